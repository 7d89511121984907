"""How what many racks bring at the same moment is written in one statement: what comes while another is under way waits
for its turn, and then everything that waits is done at once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Generic, TypeVar

from twisted.internet.defer import Deferred, DeferredLock
from twisted.logger import Logger
from twisted.python.failure import Failure

T = TypeVar("T")
log = Logger()


class Together(Generic[T]):
    """Does what is brought, by key. Of what is brought for one key while it waits, the last counts.

    :param order: what else must not go on at the same time has this too.
    :param act: does all that it is given; those that it could not do, with the error of each. If it raises instead,
        none is done, and that is the error of all.
    """

    def __init__(
        self, order: DeferredLock, act: Callable[[Mapping[str, T]], Awaitable[Mapping[str, Exception]]]
    ) -> None:
        self._order = order
        self._act = act
        self._brought: dict[str, T] = {}
        self._waiting: list[tuple[str, Deferred[None]]] = []

    def bring(self, key: str, what: T) -> Deferred[None]:
        """Have ``what`` done in its turn; called back when it is, or fails with why it is not."""
        mine: Deferred[None] = Deferred()
        self._waiting.append((key, mine))
        self._brought[key] = what
        if len(self._waiting) == 1:
            acting = Deferred.fromCoroutine(self._turn())
            acting.addErrback(lambda reason: log.failure("What was brought together could not be ended", reason))
        return mine

    async def _turn(self) -> None:
        async with self._order:
            brought, self._brought = self._brought, {}
            waiting, self._waiting = self._waiting, []
            errors: Mapping[str, Exception]
            try:
                errors = await self._act(brought)
            except Exception as error:  # noqa: BLE001  # each that waits fails with it
                errors = dict.fromkeys(brought, error)
        for key, each in waiting:
            if (failed := errors.get(key)) is None:
                each.callback(None)
            else:
                each.errback(Failure(failed))
