"""The daemons that ``stanchion up`` runs: start one, know when it serves, know why it ended, stop it.

A daemon says that it serves through NOTIFY_SOCKET, so nobody guesses with pauses. Whatever it writes goes to its log
file; when it ends unasked, its last lines are the reason that is given.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from twisted.internet.defer import Deferred
from twisted.internet.error import ProcessDone, ProcessExitedAlready
from twisted.internet.protocol import DatagramProtocol, ProcessProtocol
from twisted.python.failure import Failure

from rpc.console import CommandFailed, Status

STOP_SECONDS: Final = 15.0
"""A daemon that has not ended this long after SIGTERM is killed."""

LAST_LINES: Final = 12


class _Notifications(DatagramProtocol):
    def __init__(self, received: Callable[[dict[str, str]], None]) -> None:
        self._received = received

    def datagramReceived(self, datagram: bytes, address: Any) -> None:
        lines = datagram.decode("utf-8", "backslashreplace").splitlines()
        self._received(dict(line.partition("=")[::2] for line in lines))


class Daemon(ProcessProtocol):
    """One daemon: ``twistd -n <arguments>``. ``status`` is what it last said that it does."""

    def __init__(self, reactor: Any, name: str, log: Path, told: Callable[[str], object]) -> None:
        self.name = name
        self.log = log
        self.status = ""
        self.ended = False
        self.killed = False
        self._reactor = reactor
        self._told = told
        self._is_ready = False
        self._stopping = False
        self._ready: list[Deferred[None]] = []
        self._end: list[Deferred[str]] = []
        self._port: Any = None

    def start(self, arguments: Sequence[str], socket: Path, directory: Path) -> None:
        """Start it in ``directory``; ``socket`` is where it is to say that it is ready."""
        self._port = self._reactor.listenUNIXDatagram(str(socket), _Notifications(self._notified), mode=0o600)
        if self.log.exists():
            os.replace(self.log, self.log.with_suffix(".log.1"))
        with open(self.log, "ab") as output, open(os.devnull, "rb") as nothing:
            self._reactor.spawnProcess(
                self,
                sys.executable,
                command("twistd", "-n", "--pidfile=", "--logger", "rpc.logs.observer", *arguments),
                env=_environment(NOTIFY_SOCKET=str(socket)),
                path=str(directory),
                childFDs={0: nothing.fileno(), 1: output.fileno(), 2: output.fileno()},
            )

    def ready(self) -> Deferred[None]:
        """Fires when the daemon serves; fails with CommandFailed if it ends before."""
        waiting: Deferred[None] = Deferred()
        if self._is_ready:
            waiting.callback(None)
        elif self.ended:
            waiting.errback(CommandFailed(self.why(), Status.UNREACHABLE))
        else:
            self._ready.append(waiting)
        return waiting

    def end(self) -> Deferred[str]:
        """Fires when the daemon has ended, with the reason."""
        waiting: Deferred[str] = Deferred(self._end_not_wanted)
        if self.ended:
            waiting.callback(self.why())
        else:
            self._end.append(waiting)
        return waiting

    async def stop(self) -> None:
        """Stop it in an orderly way, and after :data:`STOP_SECONDS` in another; return when it is gone."""
        if self.ended or self.transport is None:
            return
        self._stopping = True
        self._signal("TERM")
        late = self._reactor.callLater(STOP_SECONDS, self.kill)
        await self.end()
        if late.active():
            late.cancel()

    def kill(self) -> None:
        """End it at once."""
        if not self.ended and self.transport is not None:
            self.killed = True
            self._signal("KILL")

    def why(self) -> str:
        """How it ended, with the last lines of its log unless it was asked to end."""
        text = f"the {self.name} {self._how}"
        if self._stopping:
            return text
        lines = self.log.read_text("utf-8", "backslashreplace").splitlines()[-LAST_LINES:] if self.log.exists() else []
        return "\n  ".join([f"{text}; the end of {self.log}:", *lines])

    def processEnded(self, reason: Failure) -> None:
        """Twisted calls this when the process is gone."""
        self.ended = True
        self._how = _how(reason)
        if self._port is not None:
            self._port.stopListening()
        ready, self._ready = self._ready, []
        end, self._end = self._end, []
        for waiting in ready:
            waiting.errback(CommandFailed(self.why(), Status.UNREACHABLE))
        for ending in end:
            ending.callback(self.why())

    def _end_not_wanted(self, waiting: Deferred[str]) -> None:
        self._end.remove(waiting)

    def _signal(self, name: str) -> None:
        try:
            self.transport.signalProcess(name)  # type: ignore[union-attr]  # it was started
        except ProcessExitedAlready:
            self._told(f"the {self.name} has just ended")

    def _notified(self, values: Mapping[str, str]) -> None:
        self.status = values.get("STATUS", self.status)
        if "STATUS" in values:
            self._told(self.status)
        if values.get("READY") == "1":
            self._is_ready = True
            ready, self._ready = self._ready, []
            for waiting in ready:
                waiting.callback(None)


class _Command(ProcessProtocol):
    """A command of ``stanchion``: its standard output when it ends with 0, else CommandFailed with what it said."""

    def __init__(self) -> None:
        self.done: Deferred[str] = Deferred(self._cancel)
        self._output = {1: bytearray(), 2: bytearray()}

    def childDataReceived(self, descriptor: int, data: bytes) -> None:
        self._output[descriptor] += data

    def processEnded(self, reason: Failure) -> None:
        if self.done.called:
            return
        output, errors = (bytes(data).decode("utf-8", "backslashreplace") for data in self._output.values())
        if reason.check(ProcessDone):
            self.done.callback(output)
        else:
            said = errors.strip().removeprefix("stanchion: ") or _how(reason)
            self.done.errback(CommandFailed(said, Status.UNREACHABLE))

    def _cancel(self, done: Deferred[str]) -> None:
        self.transport.signalProcess("TERM")  # type: ignore[union-attr]  # it was started


def run_command(reactor: Any, *arguments: str) -> Deferred[str]:
    """Run ``stanchion <arguments>`` in a process of its own; fires with what it wrote, fails with CommandFailed."""
    protocol = _Command()
    reactor.spawnProcess(protocol, sys.executable, command("stanchion", *arguments), env=_environment())
    return protocol.done


def command(program: str, *arguments: str) -> list[str]:
    """The command line of a child of this process that runs ``program``."""
    # -P: a directory called "region" where the operator happens to be is not our package.
    return [sys.executable, "-P", "-m", "region.cli.child", str(os.getpid()), program, *arguments]


def _environment(**variables: str) -> dict[str, str]:
    """This process's environment for a child, whose output goes not where this process's goes."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("NOTIFY_SOCKET", "JOURNAL_STREAM")}
    return inherited | variables


def _how(reason: Failure) -> str:
    ended: Any = reason.value
    if getattr(ended, "signal", None):
        return f"was ended by signal {ended.signal}"
    return f"ended with exit status {getattr(ended, 'exitCode', 0)}"
