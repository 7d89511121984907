"""Real commands that behave badly: each ends, in time, with an exit status, its outputs, and a word on what was odd."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

import node.running
from node.clock import Event, start
from node.running import Ended, Outputs, end_left_over, environment_of, remember, run
from tests.system.daemons import wait_for

TERM_SECONDS = 0.3


class RunTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.directory = Path(self.mktemp()).resolve()
        self.directory.mkdir()
        self.outputs = Outputs(*(str(self.directory / name) for name in ("combined", "stdout", "stderr")))
        self.script = self.directory / "script"
        self.stop = Event()

    def run_script(
        self, text: str, timeout: float = 0.0, now: Callable[[], float] = lambda: 0.0, mode: int = 0o755
    ) -> Ended:
        self.script.write_text(text)
        self.script.chmod(mode)
        return self.run_command([str(self.script)], timeout, now)

    def run_command(self, command: list[str], timeout: float = 0.0, now: Callable[[], float] = lambda: 0.0) -> Ended:
        return run(
            command, self.outputs, os.environ, str(self.directory), timeout, self.stop, now, term_seconds=TERM_SECONDS
        )

    def shell(self, lines: str, timeout: float = 0.0, now: Callable[[], float] = lambda: 0.0) -> Ended:
        return self.run_script("#!/bin/sh\n" + lines, timeout, now)

    def printed(self, name: str = "combined") -> str:
        return (self.directory / name).read_text()

    def when(self, name: str) -> Callable[[], float]:
        """A clock that says that an hour has passed as soon as the script has made this file."""
        return lambda: 3600.0 if (self.directory / name).exists() else 0.0

    def ends(self, pid: int) -> None:
        """Wait for a process that nobody waits for to end."""

        def is_gone() -> bool:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
            return True

        wait_for(is_gone, f"process {pid} to end")

    def test_outputs_are_kept_apart_and_together(self) -> None:
        ended = self.shell("echo out; echo err >&2; exit 3")
        self.assertEqual((ended.exit_status, ended.note), (3, ""))
        self.assertEqual((self.printed("stdout"), self.printed("stderr")), ("out\n", "err\n"))
        self.assertEqual(sorted(self.printed().splitlines()), ["err", "out"])

    def test_any_bytes_are_kept(self) -> None:
        everything = bytes(range(256)) * 400
        (self.directory / "data").write_bytes(everything)
        self.shell("cat data")
        self.assertEqual((self.directory / "stdout").read_bytes(), everything)
        self.assertEqual((self.directory / "combined").read_bytes(), everything)

    def test_one_that_a_signal_ended(self) -> None:
        self.assertEqual(self.shell("kill -SEGV $$").exit_status, 128 + signal.SIGSEGV)

    def test_what_cannot_be_executed_says_why(self) -> None:
        for text, mode, status, words in (
            ("#!/bin/sh\n", 0o644, 13, "Permission denied"),
            ("#!/no/such/interpreter\n", 0o755, 2, "the interpreter that its first line names is not on this machine"),
            ("echo hello\n", 0o755, 8, "its first line must name an interpreter"),
            ("", 0o755, 8, "its first line must name an interpreter"),
        ):
            ended = self.run_script(text, mode=mode)
            self.assertEqual(ended.exit_status, status, ended)
            self.assertIn(f"{self.script} cannot be executed: ", ended.note)
            self.assertIn(words, ended.note)
        ended = self.run_command([str(self.directory / "missing")])
        self.assertEqual((ended.exit_status, "No such file" in ended.note), (2, True))

    def test_one_that_closes_its_outputs_is_waited_for(self) -> None:
        ended = self.shell("exec >&- 2>&-\nuntil [ -e go ] || [ -e /nowhere ]; do touch go; sleep 0.1; done\nexit 4")
        self.assertEqual((ended.exit_status, ended.note), (4, ""))

    def test_one_that_leaves_a_daemon_ends_all_the_same_and_that_is_said(self) -> None:
        ended = self.shell("setsid sleep 600 & echo $!; exit 0")
        daemon = int(self.printed())
        self.addCleanup(os.kill, daemon, signal.SIGKILL)
        self.assertEqual(ended.exit_status, 0)
        self.assertIn("something that it left running holds its outputs open", ended.note)

    def test_a_daemon_that_lets_go_of_the_outputs_is_nobodys_business(self) -> None:
        ended = self.shell("setsid sleep 600 > /dev/null 2>&1 & echo $!; exit 0")
        self.addCleanup(os.kill, int(self.printed()), signal.SIGKILL)
        self.assertEqual((ended.exit_status, ended.note), (0, ""))

    def test_after_its_limit_it_is_ended_and_so_is_all_that_it_started(self) -> None:
        ended = self.shell("sleep 600 & echo $!; touch ready; wait", 60.0, self.when("ready"))
        self.assertEqual((ended.exit_status, ended.timed_out), (128 + signal.SIGTERM, True))
        self.assertEqual(ended.note, "it was ended after its limit of 60 s")
        self.ends(int(self.printed()))

    def test_who_ignores_being_told_to_end_is_killed(self) -> None:
        ended = self.shell("trap '' TERM; touch ready; while :; do sleep 1; done", 60.0, self.when("ready"))
        self.assertEqual((ended.exit_status, ended.timed_out), (128 + signal.SIGKILL, True))

    def test_what_not_even_that_ends_is_left_to_itself(self) -> None:
        # As one is that waits for a disk which does not answer.
        self.patch(node.running, "_signal", lambda group, number: True)
        self.patch(node.running, "KILL_SECONDS", 0.1)
        ended = self.shell("echo $$; touch ready; exec sleep 600", 60.0, self.when("ready"))
        self.addCleanup(os.killpg, int(self.printed()), signal.SIGKILL)
        self.assertEqual((ended.exit_status, ended.timed_out), (128 + signal.SIGKILL, True))
        self.assertIn("it cannot be ended, as it waits for the kernel or for hardware; it is left", ended.note)

    def test_when_the_runner_itself_fails_it_does_not_run_on(self) -> None:
        pids: list[int] = []

        def fail(pid: int) -> None:
            pids.append(pid)
            raise RuntimeError("no room")

        command = ["/bin/sleep", "600"]
        self.assertRaises(
            RuntimeError, run, command, self.outputs, os.environ, str(self.directory), 0.0, self.stop, on_start=fail
        )
        self.ends(pids[0])

    def test_a_child_that_ignores_it_is_killed_too(self) -> None:
        stubborn = "(trap '' TERM; echo $$ > /dev/null; touch ready; while :; do sleep 1; done) & echo $!; wait"
        ended = self.shell(stubborn, 60.0, self.when("ready"))
        self.assertEqual(ended.exit_status, 128 + signal.SIGTERM)
        self.ends(int(self.printed()))

    def test_one_that_stopped_itself_is_ended_as_well(self) -> None:
        ended = self.shell("touch ready; kill -STOP $$", 60.0, self.when("ready"))
        self.assertEqual((ended.exit_status, ended.timed_out), (128 + signal.SIGTERM, True))

    def test_when_it_is_to_stop_it_is_ended_and_that_is_no_time_out(self) -> None:
        stop = self.stop

        def now() -> float:
            if (self.directory / "ready").exists():
                stop.set()
            return 0.0

        ended = self.shell("touch ready; sleep 600", 60.0, now)
        self.assertEqual((ended.stopped, ended.timed_out), (True, False))
        self.assertIn("the region said stop", ended.note)

    def test_a_full_disk_does_not_hold_it_up_and_is_said(self) -> None:
        self.outputs = Outputs("/dev/full", self.outputs.stdout, "/nowhere/stderr")
        ended = self.shell("head -c 300000 /dev/zero; echo x >&2; exit 5")
        self.assertEqual(ended.exit_status, 5)
        self.assertIn("not all of its output was kept: /dev/full: No space left on device", ended.note)
        self.assertEqual((self.directory / "stdout").stat().st_size, 300000)

    def test_that_its_outputs_are_gone_is_said(self) -> None:
        ended = self.shell("echo x; rm combined stdout")
        self.assertIn(f"not all of its output was kept: {self.outputs.combined}: it was deleted", ended.note)

    def test_what_starts_is_told_of_with_its_process_id(self) -> None:
        pids: list[int] = []
        command = ["/bin/sh", "-c", "echo $$"]
        run(command, self.outputs, os.environ, str(self.directory), 0.0, self.stop, on_start=pids.append)
        self.assertEqual(pids, [int(self.printed())])

    def test_what_a_killed_runner_left_running_is_ended_and_nothing_else(self) -> None:
        path = str(self.directory / "process")
        self.assertFalse(end_left_over(path))
        command = ["/bin/sh", "-c", "sleep 600 & echo $! > child; wait"]
        with subprocess.Popen(command, cwd=self.directory, start_new_session=True) as process:
            remember(process.pid, path)
            wait_for(lambda: (self.directory / "child").exists() and self.printed("child"), "its child to begin")
            self.assertTrue(end_left_over(path, TERM_SECONDS))
        self.ends(int(self.printed("child")))
        self.assertFalse(end_left_over(path))
        # The number is that of another process by now.
        Path(path).write_text(f"{os.getpid()} 1")
        self.assertFalse(end_left_over(path))

    def test_what_a_runner_left_that_was_killed_before_it_could_write_that_is_found_too(self) -> None:
        directory = os.path.abspath(self.mktemp())
        os.makedirs(directory)
        environment = {**os.environ, "OUTPUT_COMBINED_PATH": os.path.join(directory, "a.1")}
        other = {**os.environ, "OUTPUT_COMBINED_PATH": directory + "-other/a.1"}
        left, kept = (
            subprocess.Popen(["sleep", "100"], env=each, start_new_session=True) for each in (environment, other)
        )
        self.addCleanup(kept.wait)
        self.addCleanup(kept.kill)
        self.addCleanup(left.kill)
        self.assertTrue(end_left_over(os.path.join(directory, "process"), TERM_SECONDS))
        self.assertEqual(left.wait(), -signal.SIGTERM)
        self.assertIsNone(kept.poll())
        self.assertFalse(end_left_over(os.path.join(directory, "process"), TERM_SECONDS))

    def test_a_process_that_cannot_be_noted_runs_all_the_same(self) -> None:
        def full(pid: int) -> None:
            raise OSError(28, "No space left on device")

        command = ["/bin/sh", "-c", "echo yes"]
        ended = run(command, self.outputs, os.environ, str(self.directory), 0.0, self.stop, on_start=full)
        self.assertEqual((ended.exit_status, self.printed()), (0, "yes\n"))
        self.assertIn("it could not be noted that it runs", ended.note)

    def test_it_is_a_leader_without_a_terminal_and_reads_nothing(self) -> None:
        self.shell("echo $$; ps -o sid= -p $$ || cut -d' ' -f6 /proc/$$/stat; wc -c")
        pid, session, read = self.printed().split()
        self.assertEqual((session, read), (pid, "0"))

    def test_the_environment_is_this_ones_without_what_is_pythons(self) -> None:
        self.patch(os, "environ", {"PATH": "/bin", "PYTHONPATH": "/x", "RUNTIME": "old"})
        self.assertEqual(environment_of({"RUNTIME": 60}), {"PATH": "/bin", "RUNTIME": "60"})

    def test_while_there_is_no_room_for_a_thread_it_is_waited_for(self) -> None:
        left = [RuntimeError("can't start new thread")] * 3
        pauses: list[float] = []

        class Refused(threading.Thread):
            def start(self) -> None:
                if left:
                    raise left.pop()

        start(Refused(), pauses.append)
        self.assertEqual((left, pauses), ([], [1.0] * 3))
        left += [RuntimeError("can't start new thread")] * 1000
        self.assertRaises(RuntimeError, start, Refused(), pauses.append)

    def test_a_name_with_a_nul_is_refused(self) -> None:
        ended = self.run_command(["/bin/echo", "a\x00b"])
        self.assertEqual(ended.exit_status, 2)
        self.assertIn("cannot be executed", ended.note)

    def test_what_it_prints_last_is_kept(self) -> None:
        self.shell(f"printf %s {shlex.quote('x' * 70_000)}; printf end >&2")
        self.assertEqual((len(self.printed("stdout")), self.printed("stderr")), (70_000, "end"))
