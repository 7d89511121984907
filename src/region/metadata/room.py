"""How many bytes of what nodes sent are in memory at once? What is over that waits, on the disk where it came in.

Storing an output takes some six times its size for a moment, in the parser and in the statement; hundreds of machines
may report at once, and any one of them may send as much as it likes as often as it likes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from twisted.internet.defer import CancelledError, Deferred


class Room:
    """Room for ``size`` bytes, given in the order in which it is asked for."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._free = size
        self._handing_out = False
        self._waiting: deque[tuple[int, Deferred[None]]] = deque()

    @asynccontextmanager
    async def of(self, size: int) -> AsyncIterator[None]:
        """Have room for ``size`` bytes meanwhile; for more than there ever is, all of it."""
        taken = min(size, self._size)
        await self._take(taken)
        try:
            yield
        finally:
            self._free += taken
            self._hand_out()

    async def _take(self, size: int) -> None:
        mine: Deferred[None] = Deferred(lambda waiting: self._waiting.remove((size, waiting)))
        self._waiting.append((size, mine))
        self._hand_out()
        try:
            await mine
        except CancelledError:
            self._hand_out()  # if it was first, there may be room for others now
            raise

    def _hand_out(self) -> None:
        if self._handing_out:
            return  # the loop below, further up the stack, hands this out too
        self._handing_out = True
        try:
            while self._waiting and self._waiting[0][0] <= self._free:
                size, waiting = self._waiting.popleft()
                self._free -= size
                waiting.callback(None)
        finally:
            self._handing_out = False
