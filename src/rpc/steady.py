"""How does a daemon wait for eight seconds when somebody sets the machine's clock back by an hour meanwhile?

Twisted's reactor counts in the time of day. Set that back, and every timer is late by as much: no ping, no deadline and
no heartbeat for an hour; set it forward, and all of them are over at once. So each daemon has its reactor count in a
clock that nobody can set. What it shows is the time of day at the daemon's start plus the seconds since: good for
durations, and for moments as far as the clock has been right since then. What must be the time of day, as a
certificate's end, asks for that.
"""

from __future__ import annotations

import time
from typing import Any, Protocol


def be_steady(reactor: Any) -> None:
    """Have ``reactor`` count in seconds that only go forward. Timers that it has already stay right."""
    if "seconds" in vars(reactor):
        return
    begin = time.time() - time.monotonic()
    reactor.seconds = lambda: begin + time.monotonic()


class ITimeOfDay(Protocol):
    """What tells the time of day."""

    def seconds(self) -> float:
        """Seconds since 1970."""
        ...


class TimeOfDay:
    """The time of day, for whoever wants a clock only to be told that."""

    def seconds(self) -> float:
        """Seconds since 1970, as the machine's clock says now."""
        return time.time()
