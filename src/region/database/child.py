"""What does a program of PostgreSQL say, when is it ready, and how did it end?"""

from __future__ import annotations

import os
import signal
from collections import deque
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.error import ProcessDone, ProcessExitedAlready, ProcessTerminated
from twisted.internet.protocol import ProcessProtocol
from twisted.logger import Logger
from twisted.python.failure import Failure

from region.database.premises import Premises

log = Logger()
_READY = "database system is ready to accept connections"
# Children of a killed server keep its pipe open for a while: its last words are waited for, its children are not.
_LAST_WORDS_SECONDS = 0.2


class Child(ProcessProtocol):
    """One running program. ``ready`` fires when a server accepts connections and fails if it ends before that."""

    def __init__(self, reactor: Any, name: str) -> None:
        self.ready: Deferred[None] = Deferred()
        self.running = True
        self.succeeded = False
        self.how = ""
        self._name = name
        self._reactor = reactor
        self._waiting: list[Deferred[None]] = []
        self._last_lines: deque[str] = deque(maxlen=8)
        self._rest = b""
        self._timer: Any = None

    @property
    def last_words(self) -> str:
        """Its last lines of output, in one."""
        return " / ".join(self._last_lines) or "nothing"

    @property
    def pid(self) -> int | None:
        return self.transport.pid if self.transport is not None else None

    def ended(self) -> Deferred[None]:
        """Fires when the program has ended (at once if it has); ``how`` then says how, ``succeeded`` whether well."""
        waiting: Deferred[None] = Deferred()
        if self.running:
            self._waiting.append(waiting)
        else:
            waiting.callback(None)
        return waiting

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless the program has ended."""
        try:
            if self.transport is not None:
                self.transport.signalProcess(number)
        except ProcessExitedAlready:
            log.debug("{name} had ended before {signal} was sent", name=self._name, signal=number.name)

    def outReceived(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._line(line.decode("utf-8", "backslashreplace").rstrip())

    errReceived = outReceived

    def processExited(self, reason: Failure) -> None:
        self._timer = self._reactor.callLater(_LAST_WORDS_SECONDS, self._finish, reason)

    def processEnded(self, reason: Failure) -> None:
        self._finish(reason)

    def _line(self, text: str) -> None:
        if not text:
            return
        self._last_lines.append(text)
        if text.startswith("FATAL:") and text.endswith("terminating connection due to administrator command"):
            # How it stops. Where it is not wanted, the connection that is lost is reported by whoever used it.
            log.debug("{name}: {line}", name=self._name, line=text)
        elif text.startswith(("FATAL:", "PANIC:")):
            # Mostly a client's (a wrong role, a stop): what it means for the region, the region says itself.
            log.warn("{name}: {line}", name=self._name, line=text)
        elif text.startswith("WARNING:"):
            log.info("{name}: {line}", name=self._name, line=text)
        else:
            log.debug("{name}: {line}", name=self._name, line=text)
        if _READY in text and not self.ready.called:
            self.ready.callback(None)

    def _finish(self, reason: Failure) -> None:
        if not self.running:
            return
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        self.outReceived(b"\n")
        self.running = False
        self.succeeded = isinstance(reason.value, ProcessDone)
        ending = "it ended"
        if isinstance(reason.value, ProcessTerminated):
            ending = f"it ended with exit status {reason.value.exitCode}"
            if reason.value.signal:
                ending = f"it was ended by {signal.Signals(reason.value.signal).name}"
        self.how = f"{ending}; its last words: {self.last_words}"
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            one.callback(None)


def spawn(
    reactor: Any, premises: Premises, program: str, arguments: list[str], *, on_parent_death: signal.Signals
) -> Child:
    """Start ``program`` as PostgreSQL's user; when the region dies the kernel sends it ``on_parent_death``.

    Must be called in the reactor's thread, because to the kernel the parent is the thread.
    """
    launch = [*premises.account.launch, "--parent", str(os.getpid()), "--signal", str(int(on_parent_death)), "--"]
    command = [*launch, str(premises.programs / program), *arguments]
    child = Child(reactor, program)
    # A clean environment: PGDATA, PGPORT or LD_LIBRARY_PATH of the operator's shell are not meant for this.
    reactor.spawnProcess(child, command[0], command, env={"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"})
    return child
