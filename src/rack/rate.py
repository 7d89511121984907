"""How fast bytes come in, of late: what somebody who waits for a sync wants to know."""

from __future__ import annotations

from collections import deque
from typing import Final

from attrs import define, field

WINDOW: Final = 10.0
"""Seconds that are looked back."""

STEP: Final = 0.5
"""Seconds between two counts that are kept."""


@define
class Rate:
    """Counts of bytes over the last seconds."""

    _seen: deque[tuple[float, int]] = field(factory=deque, init=False)

    def saw(self, now: float, count: int) -> None:
        """By ``now`` (seconds), ``count`` bytes have come in altogether."""
        seen = self._seen
        if len(seen) > 1 and now - seen[-2][0] < STEP:
            seen.pop()
        seen.append((now, count))
        self._forget(now)

    def per_second(self, now: float) -> int | None:
        """Bytes per second over the last :data:`WINDOW` seconds, or since the first count; None if that is too short a
        time to tell."""
        self._forget(now)
        if not self._seen or now - self._seen[0][0] < STEP:
            return None
        return round((self._seen[-1][1] - self._seen[0][1]) / (now - self._seen[0][0]))

    def _forget(self, now: float) -> None:
        # The last count before the window is where the window begins.
        while len(self._seen) > 1 and self._seen[1][0] <= now - WINDOW:
            self._seen.popleft()
