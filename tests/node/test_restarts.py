"""The runner is killed, wherever it is, and started again: nothing that ended runs again, and nothing is lost or told
twice."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from node.clock import Event
from node.running import Ended, Outputs, remember
from node.spool import Spool
from node.state import State
from tests.examples import SOAK
from tests.node.hostile import Fault, HostileRegion, WatchedClient
from tests.node.runs import Run, Scripts, entry, make_run
from tests.node.virtual import VirtualClock

INDEX = {
    "commissioning_scripts": [entry(1, "10-first"), entry(2, "20-second", packages={"apt": ["a"]})],
    "testing_scripts": [entry(3, "memory", "testing"), entry(4, "reboots", "testing", may_reboot=True)],
}
LABELS = {1: "10-first.1", 2: "20-second.2", 3: "memory.3", 4: "reboots.4"}
STEP = 5
"""Every so many points are tried, when not soaking."""


class ToldScripts(Scripts):
    """Scripts that write down that they ran, and print something else each time."""

    file: str
    interrupt: Callable[[str], None] = staticmethod(lambda label: None)

    def execute(
        self,
        command: list[str],
        outputs: Outputs,
        environment: Any,
        where: str,
        limit: float,
        stop: Event,
    ) -> Ended:
        if command[0] == "apt-get":
            return Ended(0, 0.0)
        label = where.rpartition("/")[2]
        with open(self.file, "a") as file:
            file.write(f"{label} {environment['HAS_STARTED']}\n")
        Path(outputs.combined).write_text(os.urandom(4).hex())
        self.interrupt(label)
        stop.wait(30.0)
        return Ended(0, 30.0, stopped=stop.is_set())


class RestartTestCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.begin_anew()

    def begin_anew(self, index: Any = INDEX) -> None:
        self.directory = self.mktemp()
        self.ran_file = self.mktemp()
        Path(self.ran_file).touch()
        self.region = HostileRegion(VirtualClock(), index)
        self.url = self.region.start()

    def tearDown(self) -> None:
        self.region.close()

    def ran(self) -> list[str]:
        """The scripts that were begun, in order, and whether each was told that it had been before."""
        return Path(self.ran_file).read_text().splitlines()

    def start(self, interrupt: Callable[[str], None] = lambda label: None) -> Run:
        """A further start, with a clock of its own."""
        self.region.clock = VirtualClock()
        scripts = ToldScripts(self.region.clock)
        scripts.file, scripts.interrupt = self.ran_file, interrupt
        return make_run(self.region, self.url, self.directory, scripts)

    def start_and_die(self, prepare: Callable[[Callable[[], None]], Any]) -> bool:
        """Run a start in a process of its own. ``prepare`` is given what kills that; whether it was killed."""
        pid = os.fork()
        if pid:
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        try:
            interrupt = prepare(lambda: os.kill(os.getpid(), signal.SIGKILL))
            self.start(interrupt or (lambda label: None)).runner.run()
        finally:
            os._exit(0)

    def kept(self) -> set[str]:
        """The scripts of which the disk knows how they ended."""
        state = State(os.path.join(self.directory, "state.json"), self.fail)
        spool = Spool(os.path.join(self.directory, "spool"), self.fail)
        return {key[7:] for key in {*state.records("script:"), *spool.keys()} if key.startswith("script:")}

    def check_whole(self, run: Run, status: int) -> None:
        self.assertEqual(status, 0, run.text)
        self.assertEqual({number: len(bodies) for number, bodies in self.region.results.items()},
                         dict.fromkeys(LABELS, 1), run.text)  # fmt: skip
        self.assertEqual(self.region.finals, {("OK", "4 scripts passed")})
        self.assertIn("summary: 4 passed, 0 failed, 0 undelivered; final signal OK", run.text)


def die_at(number: int, die: Callable[[], None]) -> Callable[[str], None]:
    """Have this process killed at the ``number``-th point at which something is written, sent or run."""
    count = 0

    def point() -> None:
        nonlocal count
        count += 1
        if count == number:
            die()

    def around(real: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(*arguments: Any, **more: Any) -> Any:
            point()
            result = real(*arguments, **more)
            point()
            return result

        return replacement

    for owner, name in (
        (State, "begin"), (State, "keep"), (Spool, "add"), (Spool, "release"), (Spool, "sent"), (os, "fsync"),
        (os, "rename"), (WatchedClient, "_request"),
    ):  # fmt: skip
        setattr(owner, name, around(getattr(owner, name)))
    return lambda label: point()


class KillTests(RestartTestCase):
    def test_wherever_it_is_killed_the_next_start_ends_the_run_and_tells_of_everything_once(self) -> None:
        number, was_killed = 1, True
        while was_killed:
            was_killed = self.start_and_die(lambda die, number=number: die_at(number, die))  # type: ignore[misc]
            kept = self.kept()
            run = self.start()
            self.check_whole(run, run.runner.run())
            times = Counter(line.split()[0] for line in self.ran())
            self.assertEqual(set(times), set(LABELS.values()), number)
            self.assertEqual([label for label in kept if times[label] != 1], [], f"point {number}: {self.ran()}")
            self.assertLessEqual(sum(times.values()), len(LABELS) + 1)
            self.region.close()
            self.begin_anew()
            number += max(STEP // SOAK, 1)
        self.assertGreater(number, 100)

    def test_what_was_spooled_but_not_in_the_journal_is_known_at_the_next_start(self) -> None:
        def die_in_keep(die: Callable[[], None]) -> None:
            State.keep = lambda self, key, record: die()  # type: ignore[method-assign]

        self.assertTrue(self.start_and_die(die_in_keep))
        self.assertEqual(self.ran(), ["10-first.1 False"])
        run = self.start()
        self.check_whole(run, run.runner.run())
        self.assertEqual(self.ran().count("10-first.1 False"), 1)
        self.assertIn("items of an earlier start are still to be sent", run.text)


class InterruptedTests(RestartTestCase):
    def die_in(self, script: str) -> None:
        """Be killed in a script, when everything before it has been told."""

        def prepare(die: Callable[[], None]) -> Callable[[str], None]:
            def interrupt(label: str) -> None:
                if label == script:
                    self.region.clock.sleep(5.0)
                    die()

            return interrupt

        self.assertTrue(self.start_and_die(prepare))

    def test_one_that_was_interrupted_is_run_once_more_and_told_so(self) -> None:
        self.die_in("10-first.1")
        run = self.start()
        self.check_whole(run, run.runner.run())
        self.assertEqual(self.ran()[:2], ["10-first.1 False", "10-first.1 True"])
        self.assertIn("10-first.1 was begun before; it was interrupted, and is run again", run.text)

    def test_one_that_takes_the_machine_down_each_time_has_failed_and_the_others_run(self) -> None:
        self.die_in("10-first.1")
        self.die_in("10-first.1")
        # What it left running is not to run beside the others.
        left = subprocess.Popen(["sleep", "600"], start_new_session=True)
        self.addCleanup(left.kill)
        remember(left.pid, os.path.join(self.directory, "out", "10-first.1", "process"))
        run = self.start()
        self.assertEqual(run.runner.run(), 1)
        self.assertIn("10-first.1 still ran; it was ended", run.text)
        self.assertEqual(left.wait(60), -signal.SIGTERM)
        self.assertEqual([line.split()[0] for line in self.ran()], ["10-first.1", "10-first.1", "20-second.2"])
        [body] = self.region.results[1]
        self.assertIn(b"it was begun 2 times, and each time the runner or this machine went down", body)
        self.assertEqual(self.region.finals, {("FAILED", "failed: 10-first")})

    def test_one_that_may_reboot_the_machine_is_begun_as_often_as_it_does(self) -> None:
        for _ in range(3):
            self.die_in("reboots.4")
        run = self.start()
        self.check_whole(run, run.runner.run())
        begun = [line for line in self.ran() if line.startswith("reboots")]
        self.assertEqual(begun, ["reboots.4 False", *["reboots.4 True"] * 3])
        self.assertIn("may reboot this machine, and is run again", run.text)

    def test_with_a_disk_that_forgets_over_a_reboot_the_region_remembers_what_was_begun(self) -> None:
        self.die_in("20-second.2")
        self.directory = self.mktemp()
        run = self.start()
        self.assertEqual(run.runner.run(), 0)
        self.assertEqual(self.ran()[:3], ["10-first.1 False", "20-second.2 False", "20-second.2 True"])
        self.assertEqual({len(bodies) for bodies in self.region.results.values()}, {1})

    def test_failures_of_an_earlier_start_count_at_the_end(self) -> None:
        self.begin_anew({"commissioning_scripts": INDEX["commissioning_scripts"]})

        def prepare(die: Callable[[], None]) -> Callable[[str], None]:
            def interrupt(label: str) -> None:
                if label != "10-first.1":
                    die()
                raise RuntimeError("a bug of the runner's own")

            return interrupt

        self.assertTrue(self.start_and_die(prepare))
        run = self.start()
        self.assertEqual(run.runner.run(), 1)
        self.assertEqual(self.region.finals, {("FAILED", "failed: 10-first")})
        self.assertIn("summary: 1 passed, 1 failed (10-first), 0 undelivered; final signal FAILED", run.text)
        [body] = self.region.results[1]
        self.assertIn(b"RuntimeError: a bug of the runner's own", body)

    def test_what_was_refused_before_a_restart_is_named_at_the_end(self) -> None:
        self.region.fault, self.region.is_faulty = Fault("400"), lambda kind, number: kind == "result" and number == 1

        def prepare(die: Callable[[], None]) -> Callable[[str], None]:
            return lambda label: die() if label == "memory.3" else None

        self.assertTrue(self.start_and_die(prepare))
        self.region.is_faulty = lambda kind, number: False
        run = self.start()
        self.assertEqual(run.runner.run(), 1)
        self.assertEqual([line.split()[0] for line in self.ran()].count("10-first.1"), 1)
        [(status, message)] = self.region.finals
        self.assertEqual(status, "FAILED")
        self.assertIn("could not be delivered: the result of 10-first.1 (400 Reason)", message)

    def test_after_the_end_a_further_start_tells_nothing_new(self) -> None:
        run = self.start()
        self.check_whole(run, run.runner.run())
        run = self.start()
        self.check_whole(run, run.runner.run())
        self.assertEqual(len(self.ran()), len(LABELS))
        self.assertEqual(self.region.counts["fetch"], 1)


class ShutDownTests(RestartTestCase):
    def test_told_to_end_it_ends_what_runs_and_the_next_start_goes_on(self) -> None:
        first: list[Run] = []

        def interrupt(label: str) -> None:
            if label == "20-second.2":
                first[0].runner.shut_down()

        first.append(self.start(interrupt))
        self.assertEqual(first[0].runner.run(), 1)
        self.assertIn("its next start goes on from here", first[0].text)
        self.assertEqual(self.region.finals, set())
        run = self.start()
        self.check_whole(run, run.runner.run())
        self.assertEqual(self.ran()[1:3], ["20-second.2 False", "20-second.2 True"])

    def test_told_to_end_while_the_region_is_away_it_does_not_wait_for_it(self) -> None:
        self.region.fault, self.region.is_faulty = Fault("500"), lambda kind, number: kind == "result"
        run = self.start(lambda label: None)

        def go_down() -> None:
            self.region.clock.sleep(700.0)
            run.runner.shut_down()

        self.region.clock.start("down", go_down)
        self.assertEqual(run.runner.run(), 1)
        self.assertLess(self.region.clock.now(), 800)
        self.region.is_faulty = lambda kind, number: False
        again = self.start()
        self.check_whole(again, again.runner.run())


class FullDiskTests(RestartTestCase):
    def test_without_any_room_below_its_directory_everything_runs_and_is_told(self) -> None:
        run = self.start()

        def refuse(path: str, *arguments: Any, **more: Any) -> Any:
            if self.directory in str(path):
                raise OSError(28, "No space left on device", str(path))
            return makedirs(path, *arguments, **more)

        def full(*arguments: Any) -> None:
            raise OSError(28, "No space left on device")

        makedirs = os.makedirs
        self.patch(os, "makedirs", refuse)
        self.patch(os, "fsync", full)
        self.patch(tempfile, "tempdir", self.mktemp())
        makedirs(str(tempfile.tempdir))
        status = run.runner.run()
        self.assertEqual(status, 0, run.text)
        self.assertEqual(set(self.region.results), set(LABELS))
        self.assertEqual(self.region.finals, {("OK", "4 scripts passed")})
        for words in ("has no room for the scripts", "is kept in memory", "after a restart scripts may run once more"):
            self.assertIn(words, run.text)


class StopTests(RestartTestCase):
    def test_when_the_region_says_stop_what_runs_is_ended_and_told_and_nothing_else_begins(self) -> None:
        def interrupt(label: str) -> None:
            if label == "20-second.2":
                self.region.stop = True
                self.region.clock.sleep(100.0)

        run = self.start(interrupt)
        self.assertEqual(run.runner.run(), 1)
        self.assertEqual([line.split()[0] for line in self.ran()], ["10-first.1", "20-second.2"])
        self.assertEqual(set(self.region.results), {1, 2})
        [(status, message)] = self.region.finals
        self.assertEqual(status, "FAILED")
        self.assertIn("the region said stop: Commissioning", message)
        self.assertEqual(run.text.count("the region says stop"), 1)

    def test_a_node_that_is_tested_alone_does_not_say_that_its_commissioning_has_ended(self) -> None:
        self.region.status = "Testing"
        run = self.start()
        self.assertEqual(run.runner.run(), 0)
        self.assertEqual(self.region.status, "Testing")
        self.assertEqual(set(self.region.results), {3, 4})
        self.assertNotIn("testing", self.region.counts)

    def test_when_commissioning_fails_nothing_is_tested(self) -> None:
        run = self.start(lambda label: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        self.assertEqual(run.runner.run(), 1)
        self.assertEqual(set(self.region.results), {1, 2})
        self.assertIn("2 testing scripts are not run: commissioning failed", run.text)
