"""How is a running sync told to stop, and which words are there for how a sync ends?"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from attrs import define
from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import Logger

from rpc.http_errors import FetchError

log = Logger()

T = TypeVar("T")

SYNCED: Final = "synced"
UNCHANGED: Final = "unchanged"
PARTIAL: Final = "partial"
FAILED: Final = "failed"
SUPERSEDED: Final = "superseded"
CANCELLED: Final = "cancelled"


class Stopped(Exception):
    """A sync was stopped on request; the text says on whose, ``outcome`` how it is to be called."""

    def __init__(self, outcome: str, why: str) -> None:
        super().__init__(why)
        self.outcome = outcome


@define(eq=False)
class Stop:
    """What a running sync asks whether to stop. It stops while it fetches, or before its next step."""

    outcome: str = ""
    why: str = ""
    is_too_late: bool = False
    """Whether the sync has gone too far to be stopped: it will have ended in a moment."""
    _waiting: Deferred[Any] | None = None

    def now(self, outcome: str, why: str) -> None:
        """Stop the sync, unless it is too late, because of ``why``. What was said first is what counts."""
        if self.is_too_late or self.outcome:
            return
        self.outcome, self.why = outcome, why
        if self._waiting is not None:
            self._waiting.cancel()

    def check(self) -> None:
        """:raises Stopped: if the sync is to stop."""
        if self.outcome:
            raise Stopped(self.outcome, self.why)

    def no_more(self) -> None:
        """From here on the sync does not stop. :raises Stopped: if it is to stop."""
        self.check()
        self.is_too_late = True

    async def interruptible(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``, which is cancelled when the sync is to stop."""
        if self.outcome:
            work.close()
        self.check()
        self._waiting = waiting = Deferred.fromCoroutine(work)
        try:
            result = await waiting
        except (CancelledError, FetchError):
            # So ends what is cancelled; looking up a host's name then says that there is no such name.
            self.check()
            raise
        except Exception:
            # This is an error of its own. The sync that was told to stop is stopped all the same, and not tried again.
            if self.outcome:
                log.failure("A sync that was being stopped ({why}) also failed", why=self.why)
            self.check()
            raise
        finally:
            self._waiting = None
        self.check()
        return result
