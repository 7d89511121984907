"""Runs the process that reads documents: asks it one thing at a time, and never waits for it for ever.

A process serves one reading of a source, for starting it costs more than reading most documents. One that fails, or is
killed because it took too long, fails only the document it was reading: the next question starts another.
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
"""How long reading one document may take."""

MAX_ANSWER: Final = 256 << 20
"""Bytes of an answer."""

_MAX_SAID: Final = 16 << 10
_LENGTH: Final = struct.Struct(">Q")


class ChildFailed(Exception):
    """A question was not answered; the text says what became of the process."""


class Conversation(Protocol):
    """Has questions answered; see :mod:`region.upstream.exchange`."""

    def ask(self, question: bytes) -> Deferred[bytes]:
        """The answer; fails with ChildFailed. Cancelling it stops whatever is done for it."""

    def close(self) -> Deferred[None]:
        """No more is asked; fires when nothing is left running."""


Spawn = Callable[[], Conversation]


def in_a_process(reactor: Any, *, seconds: float = SECONDS) -> Spawn:
    """Conversations with the real process, ``python -m region.upstream.child``.

    :param reactor: provides IReactorProcess and IReactorTime.
    :param seconds: after which a process that does not answer is killed.
    """
    return lambda: _Conversation(reactor, seconds)


class _Conversation:
    """A conversation with one process, which is started by the first question, and again if it failed."""

    def __init__(self, reactor: Any, seconds: float) -> None:
        self._reactor = reactor
        self._seconds = seconds
        self._lock = DeferredLock()
        self._child: _Child | None = None

    def ask(self, question: bytes) -> Deferred[bytes]:
        """See :class:`Conversation`; one question after the other."""
        answer: Deferred[bytes] = self._lock.run(self._ask, question)
        return answer

    def close(self) -> Deferred[None]:
        """See :class:`Conversation`."""
        return self._child.end() if self._child else succeed(None)

    def _ask(self, question: bytes) -> Deferred[bytes]:
        if self._child is None or self._child.is_ending:
            try:
                self._child = self._start()
            except OSError as error:
                return fail(ChildFailed(f"no process could be started to read it: {error}"))
        return self._child.ask(question)

    def _start(self) -> _Child:
        child = _Child(self._reactor, self._seconds)
        source = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(part for part in (source, os.environ.get("PYTHONPATH", "")) if part)
        environment = {"PATH": os.environ.get("PATH", os.defpath), "PYTHONPATH": path, "LC_ALL": "C.UTF-8"}
        # -P: a file in the working directory must not be taken for a module.
        command = [sys.executable, "-P", "-m", "region.upstream.child", str(os.getpid())]
        self._reactor.spawnProcess(child, sys.executable, command, env=environment)
        return child


class _Child(ProcessProtocol):
    """One process, from its start to its end."""

    def __init__(self, clock: IReactorTime, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
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

    def ask(self, question: bytes) -> Deferred[bytes]:
        """The answer to the only question at this time."""
        assert self.transport is not None
        self._answer = Deferred(lambda _: self._kill(CancelledError()))
        self._timer = self._clock.callLater(self._seconds, self._too_late)
        self.transport.write(_LENGTH.pack(len(question)) + question)
        return self._answer

    def end(self) -> Deferred[None]:
        """Kill it, for it has nothing to lose; fires when it has ended and its pipes are closed."""
        if self._ended:
            return succeed(None)
        self._waiting.append(Deferred())
        self._kill(ChildFailed("the reading of its source was ended"))
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
            self._kill(ChildFailed("the process that reads it said more than its answer"))

    def errReceived(self, data: bytes) -> None:
        """What Python says when it fails: the end of it is kept."""
        self._said = (self._said + data)[-_MAX_SAID:]

    def processEnded(self, reason: Failure) -> None:
        """It has ended and its pipes are closed."""
        self._ended = True
        said = self._said.decode("utf-8", "replace").strip() or "it said nothing"
        self._fire(self._why or ChildFailed(f"the process that reads it failed ({reason.value}): {said}"))
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

    def _too_late(self) -> None:
        self._kill(ChildFailed(f"reading it took longer than {self._seconds:g} seconds"))

    def _kill(self, why: Exception) -> None:
        """Kill it; the question fails with ``why`` once it is gone."""
        if not self.is_ending:
            self._why = why
            self._received = bytearray()
            assert self.transport is not None
            with suppress(ProcessExitedAlready):  # then its end is on its way already
                self.transport.signalProcess("KILL")
