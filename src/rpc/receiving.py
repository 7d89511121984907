"""How does a body come in: in blocks, no faster than they are taken, never too long, never too slow, never for ever?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.interfaces import IDelayedCall, IPushProducer, IReactorTime
from twisted.internet.protocol import Protocol, connectionDone
from twisted.python.failure import Failure
from twisted.web.client import ResponseDone
from twisted.web.http import PotentialDataLoss

from rpc.http_errors import FetchError, explain

BLOCK: Final = 1 << 19
"""Bytes of a body that are collected before they are handed over."""
HIGH_WATER: Final = 1 << 20
"""Bytes waiting at which the server is paused until what was handed over is done with."""

SLOW_WINDOW: Final = 60.0
MINIMUM_RATE: Final = 1024.0
"""Bytes per second, over :data:`SLOW_WINDOW` seconds, below which a body is given up as too slow."""


class Receiver(Protocol):
    """Takes one body: collects, hands over, pauses the server, and watches the clock.

    ``done`` fires with the number of bytes when all of them were taken, or fails with a FetchError, or with what
    ``consume`` failed with. ``expected`` is what the server promised, ``limit`` the most to accept, in bytes.
    """

    def __init__(
        self,
        clock: IReactorTime,
        url: str,
        expected: int | None,
        consume: Callable[[bytes], Any],
        limit: int,
        idle_timeout: float,
    ) -> None:
        self.done: Deferred[int] = Deferred(self._cancelled)
        self._clock = clock
        self._url = url
        self._expected = expected
        self._consume = consume
        self._limit = limit
        self._idle_timeout = idle_timeout
        self._pending: list[bytes] = []
        self._waiting = 0  # bytes pending
        self._received = 0
        self._consuming = False
        self._paused = False
        self._outcome: FetchError | None = None
        self._ended = False  # nothing more will come, or we want nothing more
        self._finished = False  # done was fired
        self._timer: IDelayedCall | None = None

    def connectionMade(self) -> None:
        self._last = self._window_start = self._clock.seconds()
        self._window_bytes = 0
        self._timer = self._clock.callLater(self._idle_timeout, self._tick)

    def dataReceived(self, data: bytes) -> None:
        if self._ended:
            return
        self._received += len(data)
        self._last = self._clock.seconds()
        if self._received > self._limit:
            self._stop(FetchError(self._url, f"the server sends more than the {self._limit} bytes that were expected"))
            return
        self._pending.append(data)
        self._waiting += len(data)
        if not self._consuming:
            if self._waiting >= BLOCK:
                self._hand_over()
        elif self._waiting >= HIGH_WATER and not self._paused:
            self._pause(True)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if self._ended:
            return
        self._ended = True
        self._stop_timer()
        if not reason.check(ResponseDone, PotentialDataLoss):
            why, retriable = explain(reason.value, 0)
            of = "" if self._expected is None else f" of {self._expected}"
            text = f"the body ended after {self._received}{of} bytes: {why}"
            self._outcome = FetchError(self._url, text, retriable=retriable)
        self._go_on()

    def _hand_over(self) -> None:
        data = self._pending[0] if len(self._pending) == 1 else b"".join(self._pending)
        self._pending = []
        self._waiting = 0
        self._consuming = True
        taken = maybeDeferred(self._consume, data).addCallbacks(self._consumed, self._refused)
        taken.addErrback(self._refused)  # an error of our own must end the body, not leave it waiting

    def _consumed(self, _result: object) -> None:
        self._consuming = False
        self._go_on()

    def _refused(self, failure: Failure) -> None:
        self._consuming = False
        self._pending = []
        self._waiting = 0
        self._ended = True
        self._finish(failure)

    def _go_on(self) -> None:
        if self._consuming or self._finished:
            return
        if self._waiting >= BLOCK or (self._ended and self._waiting):
            self._hand_over()
        elif self._ended:
            self._finish(self._received if self._outcome is None else Failure(self._outcome))
            return
        if self._paused and self._waiting < HIGH_WATER and not self._ended:
            self._pause(False)

    def _pause(self, pause: bool) -> None:
        self._paused = pause
        producer: IPushProducer = self.transport  # type: ignore[assignment]  # the response's transport is both
        # While we make the server wait, its silence is no stall and its speed not its own.
        self._last = self._window_start = self._clock.seconds()
        self._window_bytes = self._received
        if pause:
            producer.pauseProducing()
        else:
            producer.resumeProducing()

    def _tick(self) -> None:
        now = self._clock.seconds()
        self._timer = None
        if self._paused:
            self._timer = self._clock.callLater(self._idle_timeout, self._tick)
            return
        if now - self._last >= self._idle_timeout:
            text = f"no byte came for {self._idle_timeout:g} seconds, after {self._received} bytes"
            self._stop(FetchError(self._url, text, retriable=True))
            return
        if now - self._window_start >= SLOW_WINDOW:
            rate = (self._received - self._window_bytes) / (now - self._window_start)
            if rate < MINIMUM_RATE:
                text = f"it comes too slowly, {rate:.0f} bytes a second, after {self._received} bytes"
                self._stop(FetchError(self._url, text, retriable=True))
                return
            self._window_start, self._window_bytes = now, self._received
        self._timer = self._clock.callLater(self._last + self._idle_timeout - now, self._tick)

    def _stop(self, outcome: FetchError) -> None:
        """Want nothing more; what has come is still handed over."""
        self._outcome = outcome
        self._ended = True
        self._close()
        self._go_on()

    def _cancelled(self, _done: Deferred[int]) -> None:
        self._finished = self._ended = True
        self._pending = []
        self._close()

    def _finish(self, result: int | Failure) -> None:
        if not self._finished:
            self._finished = True
            self._close(only_if=isinstance(result, Failure))
            self.done.callback(result)

    def _close(self, only_if: bool = True) -> None:
        self._stop_timer()
        if only_if and self.transport is not None:
            self.transport.loseConnection()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
