"""How do a thousand who wait for a lock go on when it is released, without a thousand times the stack of one?

Twisted's lock calls the next from within the release of the one before. If that has nothing to wait for itself, because
what it wanted was done meanwhile, it releases the lock at once, and so on; some sixty of them are more than Python's
stack has room for.
"""

from __future__ import annotations

from twisted.internet.defer import DeferredLock


class FairLock(DeferredLock):
    """A lock that those who wait for it get in the order in which they came, each when the one before has done."""

    _handing_over = False

    def release(self) -> None:
        """Give the lock to the next, if anybody waits."""
        if not self.locked:
            raise RuntimeError("a lock was released that nobody has")
        self.locked = False
        if self._handing_over:
            return  # whoever hands over, further up on the stack, goes on with the next
        self._handing_over = True
        try:
            while self.waiting and not self.locked:
                self.locked = True
                self.waiting.pop(0).callback(self)  # type: ignore[arg-type]  # it is one of these locks
        finally:
            self._handing_over = False
