"""A clock for the runner on which time passes only when all its threads wait, and then at once.

While a thread is at a real request or a real process, time stands still; so what is tested does not depend on how busy
the machine is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from node.clock import Clock, Event, Worker

REAL_SECONDS = 120.0
"""How long a thread waits in real time before it is said that the runner hangs."""


class Stuck(AssertionError):
    """All threads wait, and nothing will ever wake one."""


class _Waiter:
    def __init__(self, event: VirtualEvent, deadline: float | None) -> None:
        self.event = event
        self.deadline = deadline
        self.is_released = False


class VirtualEvent(Event):
    """An event of a virtual clock."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def set(self) -> None:
        self._clock.set(self, super().set)

    def wait(self, seconds: float | None = None) -> bool:
        self._clock.wait(self, seconds)
        return self.is_set()


class VirtualClock(Clock):
    """To be made, and used, by a thread that counts as one of the runner's.

    :param limit: virtual seconds after which the runner is said to hang.
    """

    def __init__(self, limit: float = 6 * 3600.0, epoch: float = 1_700_000_000.0) -> None:
        self._condition = threading.Condition()
        self._running = 1
        self._waiters: list[_Waiter] = []
        self._seconds = 0.0
        self._limit = limit
        self._epoch = epoch
        self._problem = ""

    def now(self) -> float:
        return self._seconds

    def wall(self) -> float:
        return self._epoch + self._seconds

    def event(self) -> Event:
        return VirtualEvent(self)

    def sleep(self, seconds: float) -> None:
        self.event().wait(seconds)

    def start(self, name: str, target: Callable[..., None], *arguments: Any) -> Worker:
        with self._condition:
            self._running += 1
        ended = self.event()

        def work() -> None:
            try:
                target(*arguments)
            finally:
                ended.set()
                with self._condition:
                    self._running -= 1
                    self._pass_time()

        threading.Thread(target=work, name=name, daemon=True).start()
        return Worker(ended)

    def set(self, event: VirtualEvent, really: Callable[[], None]) -> None:
        with self._condition:
            really()
            self._release([waiter for waiter in self._waiters if waiter.event is event])

    def wait(self, event: VirtualEvent, seconds: float | None) -> None:
        with self._condition:
            if event.is_set() or (seconds is not None and seconds <= 0):
                return
            waiter = _Waiter(event, None if seconds is None else self._seconds + seconds)
            self._waiters.append(waiter)
            self._running -= 1
            self._pass_time()
            while not waiter.is_released:
                if not self._condition.wait(REAL_SECONDS):
                    self._problem = self._problem or f"a thread is stuck at {self._seconds:.0f} s"
                if self._problem:
                    raise Stuck(self._problem)

    def _release(self, waiters: list[_Waiter]) -> None:
        for waiter in waiters:
            self._waiters.remove(waiter)
            waiter.is_released = True
            self._running += 1
        self._condition.notify_all()

    def _pass_time(self) -> None:
        if self._running or not self._waiters:
            return
        deadlines = [waiter.deadline for waiter in self._waiters if waiter.deadline is not None]
        if not deadlines or min(deadlines) > self._limit:
            self._problem = f"nothing goes on at {self._seconds:.0f} s"
            self._condition.notify_all()
            return
        self._seconds = max(self._seconds, min(deadlines))
        self._release([one for one in self._waiters if one.deadline is not None and one.deadline <= self._seconds])
