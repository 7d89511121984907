"""Runs a process that answers questions about foreign bytes: one at a time, and it is never waited for for ever.

A process serves one reading of a source, for starting it costs more than reading most documents. One that fails, or is
killed because it took too long, fails only the question that it was asked: the next one starts another.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol

from twisted.internet.defer import CancelledError, Deferred, DeferredLock, fail, succeed
from twisted.internet.error import ProcessExitedAlready
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure

SECONDS: Final = 120.0
"""How long answering one question may take."""

MODULE: Final = "region.upstream.child"
"""What is run to read documents."""

MAX_ANSWER: Final = 256 << 20
"""Bytes of an answer."""

_MAX_SAID: Final = 16 << 10
_LENGTH: Final = struct.Struct(">Q")


class ChildFailed(Exception):
    """A question was not answered; the text says what became of the process."""


class TookTooLong(ChildFailed):
    """The process was killed, because it had not answered in time."""


class Conversation(Protocol):
    """Has questions answered; see :mod:`region.upstream.exchange`."""

    def ask(self, question: bytes) -> Deferred[bytes]:
        """The answer; fails with ChildFailed. Cancelling it stops whatever is done for it."""

    def close(self) -> Deferred[None]:
        """No more is asked; fires when nothing is left running."""


Spawn = Callable[[], Conversation]


def in_a_process(reactor: Any, *, seconds: float = SECONDS) -> Spawn:
    """Conversations with the process that reads documents.

    :param reactor: provides IReactorProcess and IReactorTime.
    :param seconds: after which a process that does not answer is killed.
    """
    return lambda: ProcessConversation(reactor, MODULE, "reading it", seconds)


class ProcessConversation:
    """A conversation with one process, which is started by the first question, and again if it failed.

    :param module: what ``python -m`` runs; see :func:`region.upstream.child.serve`.
    :param doing: what the process does, for people: "reading it".
    :param seconds: after which a process that does not answer is killed.
    """

    def __init__(self, reactor: Any, module: str, doing: str, seconds: float) -> None:
        self._reactor = reactor
        self._module = module
        self._doing = doing
        self._seconds = seconds
        self._lock = DeferredLock()
        self._child: _Child | None = None

    def ask(self, question: bytes, seconds: float | None = None) -> Deferred[bytes]:
        """See :class:`Conversation`; one question after the other.

        :param seconds: for this question, in place of what was said for all.
        """
        answer: Deferred[bytes] = self._lock.run(self._ask, question, self._seconds if seconds is None else seconds)
        return answer

    def close(self) -> Deferred[None]:
        """See :class:`Conversation`."""
        return self._child.end() if self._child else succeed(None)

    def _ask(self, question: bytes, seconds: float) -> Deferred[bytes]:
        if self._child is None or self._child.is_ending:
            try:
                self._child = self._start()
            except OSError as error:
                return fail(ChildFailed(f"no process could be started for {self._doing}: {error}"))
        return self._child.ask(question, seconds)

    def _start(self) -> _Child:
        child = _Child(self._reactor, self._doing)
        source = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(part for part in (source, os.environ.get("PYTHONPATH", "")) if part)
        environment = {"PATH": os.environ.get("PATH", os.defpath), "PYTHONPATH": path, "LC_ALL": "C.UTF-8"}
        # -P: a file in the working directory must not be taken for a module.
        command = [sys.executable, "-P", "-m", self._module, str(os.getpid())]
        self._reactor.spawnProcess(child, sys.executable, command, env=environment)
        return child


class _Child(ProcessProtocol):
    """One process, from its start to its end."""

    def __init__(self, clock: IReactorTime, doing: str) -> None:
        self._clock = clock
        self._doing = doing
        self._received = bytearray()
        self._said = b""
        self._answer: Deferred[bytes] | None = None
        self._timer: IDelayedCall | None = None
        self._why: Exception | None = None
        self._ended = False
        self._waiting: list[Deferred[None]] = []

    @property
    def is_ending(self) -> bool:
        """Whether nothing can be asked any more."""
        return self._ended or self._why is not None

    def ask(self, question: bytes, seconds: float) -> Deferred[bytes]:
        """The answer to the only question at this time."""
        assert self.transport is not None
        self._answer = Deferred(lambda _: self._kill(CancelledError()))
        self._timer = self._clock.callLater(seconds, self._too_late, seconds)
        self.transport.write(_LENGTH.pack(len(question)) + question)
        return self._answer

    def end(self) -> Deferred[None]:
        """Kill it, for it has nothing to lose; fires when it has ended and its pipes are closed."""
        if self._ended:
            return succeed(None)
        self._waiting.append(Deferred())
        self._kill(ChildFailed(f"{self._doing} was ended"))
        return self._waiting[-1]

    def outReceived(self, data: bytes) -> None:
        """A piece of the answer, which begins with its length."""
        if self.is_ending:
            return
        self._received += data
        if len(self._received) < _LENGTH.size:
            return
        [length] = _LENGTH.unpack_from(self._received)
        if length > MAX_ANSWER:
            self._kill(ChildFailed(f"its contents are larger than {MAX_ANSWER >> 20} MiB"))
        elif len(self._received) == _LENGTH.size + length:
            answer = bytes(memoryview(self._received)[_LENGTH.size :])
            self._received = bytearray()
            self._fire(answer)
        elif len(self._received) > _LENGTH.size + length:
            self._kill(ChildFailed(f"the process for {self._doing} said more than its answer"))

    def errReceived(self, data: bytes) -> None:
        """What Python says when it fails: the end of it is kept."""
        self._said = (self._said + data)[-_MAX_SAID:]

    def processEnded(self, reason: Failure) -> None:
        """It has ended and its pipes are closed."""
        self._ended = True
        said = self._said.decode("utf-8", "replace").strip() or "it said nothing"
        self._fire(self._why or ChildFailed(f"the process for {self._doing} failed ({reason.value}): {said}"))
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            each.callback(None)

    def _fire(self, result: bytes | Exception) -> None:
        """End the question, if there is one and it was not cancelled."""
        if self._timer and self._timer.active():
            self._timer.cancel()
        answer, self._answer = self._answer, None
        if answer is None or answer.called:
            return
        if isinstance(result, Exception):
            answer.errback(result)
        else:
            answer.callback(result)

    def _too_late(self, seconds: float) -> None:
        self._kill(TookTooLong(f"{self._doing} took longer than {seconds:g} seconds"))

    def _kill(self, why: Exception) -> None:
        """Kill it; the question fails with ``why`` once it is gone."""
        if not self.is_ending:
            self._why = why
            self._received = bytearray()
            assert self.transport is not None
            with suppress(ProcessExitedAlready):  # then its end is on its way already
                self.transport.signalProcess("KILL")
