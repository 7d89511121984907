"""``stanchion up`` as people run it: everything comes up, answers, and whatever ends it leaves no process behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from twisted.internet import reactor
from twisted.internet.abstract import FileDescriptor
from twisted.internet.defer import Deferred
from twisted.internet.protocol import ProcessProtocol
from twisted.trial.unittest import TestCase

from region.sample import write_sample

SECONDS = 180


class Program(ProcessProtocol):
    """A running ``stanchion``: what it has written, when it writes something, and how it ended."""

    def __init__(self, *arguments: str, **variables: str) -> None:
        self.output = ""
        self._ended: Deferred[int] = Deferred()
        self._waiting: list[tuple[str, Deferred[None]]] = []
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **variables}
        command = [sys.executable, "-P", "-m", "rpc.cli", *arguments]
        reactor.spawnProcess(self, sys.executable, command, env=environment)

    def outReceived(self, data: bytes) -> None:
        self.output += data.decode()
        for text, waiting in list(self._waiting):
            if text in self.output:
                self._waiting.remove((text, waiting))
                waiting.callback(None)

    errReceived = outReceived

    def processEnded(self, reason: Any) -> None:
        waiting, self._waiting = self._waiting, []
        for text, one in waiting:
            one.errback(AssertionError(f"it ended without writing {text!r}:\n{self.output}"))
        ended = reason.value
        self._ended.callback(ended.exitCode if ended.exitCode is not None else -(ended.signal or 0))

    async def says(self, text: str) -> None:
        """Wait until it has written ``text``."""
        if text not in self.output:
            waiting: Deferred[None] = Deferred()
            self._waiting.append((text, waiting))
            await waiting

    async def ended(self) -> int:
        """Wait for its end; the exit status, or minus the signal."""
        return await self._ended

    def send(self, number: signal.Signals) -> None:
        self.transport.signalProcess(number.name.removeprefix("SIG"))  # type: ignore[union-attr]  # it was started


class _Pidfd(FileDescriptor):
    """Fires when a process, not necessarily a child of this one, is gone: no polling, no guessing."""

    def __init__(self, pid: int, gone: Deferred[None]) -> None:
        super().__init__(reactor)
        self._descriptor = os.pidfd_open(pid)
        self._gone = gone
        self.startReading()

    def fileno(self) -> int:
        return self._descriptor

    def doRead(self) -> None:
        self.stopReading()
        os.close(self._descriptor)
        self._gone.callback(None)


async def gone(pid: int) -> None:
    """Wait until process ``pid`` has ended."""
    waiting: Deferred[None] = Deferred()
    try:
        _Pidfd(pid, waiting)
    except ProcessLookupError:
        return
    await waiting


def descendants(pid: int) -> dict[int, str]:
    """The children of a process, and theirs: process id to command line."""
    found: dict[int, str] = {}
    for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        found[child] = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        found |= descendants(child)
    return found


def the(word: str, processes: dict[int, str]) -> int:
    """The one process that is ``word`` (a daemon's name)."""
    (pid,) = (pid for pid, line in processes.items() if f"rpc.logs.observer {word} --config" in line)
    return pid


class TestUp(TestCase):
    timeout = SECONDS

    def setUp(self) -> None:
        # Not below trial's directory: as root, PostgreSQL's user must be able to reach it.
        self.root = Path(tempfile.mkdtemp(prefix="stanchion-test-", dir="/var/tmp"))
        self.root.chmod(0o755)
        self.addCleanup(shutil.rmtree, self.root)
        self.state = self.root / "state"

    def up(self, *arguments: str) -> Program:
        return Program("up", "--state", str(self.state), *arguments)

    async def test_it_comes_up_and_stops_and_comes_up_again_with_what_it_had(self) -> None:
        first = self.up("--then-stop")
        self.assertEqual(await first.ended(), 0, first.output)
        self.assertIn("2 of 2 releases can be deployed", first.output)
        self.assertIn("published generation 1", first.output)
        second = self.up("--then-stop")
        self.assertEqual(await second.ended(), 0, second.output)
        self.assertIn("2 of 2 releases can be deployed", second.output)
        self.assertNotIn("the rack joins", second.output)
        self.assertNotIn("adding the source", second.output)
        self.assertNotIn("published generation", second.output)

    async def test_other_commands_work_while_it_is_up_and_ctrl_c_ends_all_of_it(self) -> None:
        up = self.up()
        await up.says("Ctrl-C here stops everything")
        processes = descendants(self.pid(up))
        self.assertTrue(any("postgres" in line for line in processes.values()), processes)
        why = Program("why", "sample/alpha", "--arch", "amd64", STANCHION_PROFILE=str(self.state / "profile.toml"))
        self.assertEqual(await why.ended(), 0, why.output)
        self.assertIn("amd64: deployable", why.output)
        up.send(signal.SIGINT)
        self.assertEqual(await up.ended(), 0, up.output)
        self.assertIn("stopping", up.output)
        for pid in processes:
            await gone(pid)

    async def test_another_rack_that_has_joined_and_is_away_is_not_waited_for(self) -> None:
        up = self.up()
        await up.says("Ctrl-C here stops everything")
        made = Program("region", "join-token", "--config", str(self.state / "region.toml"))
        self.assertEqual(await made.ended(), 0, made.output)
        settings = self.root / "second.toml"
        settings.write_text('state_directory = "second"')
        [listens] = re.findall(r"^\[rpc\]\nlisten = .*\nport = (\d+)", (self.state / "region.toml").read_text(), re.M)
        joining = Program(
            "rack", "join", "--config", str(settings), "--region", f"127.0.0.1:{listens}", "--name", "second",
            made.output.strip(),
        )  # fmt: skip
        self.assertEqual(await joining.ended(), 0, joining.output)
        up.send(signal.SIGINT)
        self.assertEqual(await up.ended(), 0, up.output)
        again = self.up("--then-stop")
        self.assertEqual(await again.ended(), 0, again.output)
        self.assertIn("2 of 2 releases can be deployed", again.output)

    async def test_a_signal_that_comes_twice_at_once_stops_it_in_order(self) -> None:
        up = self.up()
        await up.says("Ctrl-C here stops everything")
        up.send(signal.SIGTERM)
        up.send(signal.SIGINT)
        self.assertEqual(await up.ended(), 0, up.output)
        self.assertNotIn("killed", up.output)

    async def test_it_ends_with_all_that_it_started_when_nobody_reads_what_it_says(self) -> None:
        up = self.up()
        await up.says("region: ")
        processes = descendants(self.pid(up))
        up.transport.closeStdout()  # type: ignore[union-attr]  # it was started
        up.transport.closeStderr()  # type: ignore[union-attr]  # it was started
        self.assertEqual(await up.ended(), 128 + signal.SIGPIPE)
        for pid in processes:
            await gone(pid)

    async def test_what_is_said_of_a_source_that_it_knows_already_is_done(self) -> None:
        stream = self.root / "stream"
        write_sample(stream)
        for release, without_slash in (("alpha", True), ("beta", False)):
            url = stream.as_uri() + ("" if without_slash else "/")
            up = self.up(url, "--allow-unsigned", "--select", f"sample/{release}", "--then-stop")
            self.assertEqual(await up.ended(), 0, up.output)
            self.assertIn("1 of 1 releases can be deployed", up.output)
            self.assertNotIn("Ctrl-C here", up.output)
        self.assertIn("published generation 2: 2 added, 2 removed", up.output)
        up = self.up("--then-stop")
        self.assertEqual(await up.ended(), 0, up.output)
        self.assertIn("they stay as they are, without the sample", up.output)
        self.assertIn("1 of 1 releases can be deployed", up.output)

    async def test_the_death_of_a_daemon_is_said_and_ends_the_other(self) -> None:
        for name in ("region", "rack"):
            up = self.up()
            await up.says("Ctrl-C here stops everything")
            processes = descendants(self.pid(up))
            os.kill(the(name, processes), signal.SIGKILL)
            self.assertEqual(await up.ended(), 3, up.output)
            self.assertIn(f"the {name} was ended by signal 9", up.output)
            for pid in processes:
                await gone(pid)

    async def test_nothing_is_left_when_it_is_killed_itself_and_the_next_start_works(self) -> None:
        up = self.up()
        await up.says("Ctrl-C here stops everything")
        processes = descendants(self.pid(up))
        up.send(signal.SIGKILL)
        self.assertEqual(await up.ended(), -signal.SIGKILL)
        for pid in processes:
            await gone(pid)
        again = self.up("--then-stop")
        self.assertEqual(await again.ended(), 0, again.output)

    async def test_a_second_one_is_refused_and_ctrl_c_while_it_comes_up_leaves_nothing(self) -> None:
        up = self.up()
        await up.says("the region starts")
        second = self.up()
        self.assertEqual(await second.ended(), 2)
        self.assertIn("another `stanchion up`", second.output)
        processes = descendants(self.pid(up))
        up.send(signal.SIGINT)
        self.assertEqual(await up.ended(), 130, up.output)
        for pid in processes:
            await gone(pid)

    async def test_a_daemon_that_cannot_start_says_why(self) -> None:
        self.state.mkdir()
        (self.state / "region").write_text("a file where the region's directory must be")
        up = self.up()
        self.assertEqual(await up.ended(), 3, up.output)
        self.assertIn("the region ended with exit status 1", up.output)
        self.assertIn("the region could not start", up.output)

    async def test_a_source_that_cannot_be_imported_is_said_and_ends_it(self) -> None:
        empty = self.root / "empty"
        empty.mkdir()
        up = self.up(str(empty), "--allow-unsigned")
        self.assertNotEqual(await up.ended(), 0)
        self.assertIn("index", up.output)

    def pid(self, program: Program) -> int:
        pid: int = program.transport.pid  # type: ignore[union-attr]  # it was started
        return pid
