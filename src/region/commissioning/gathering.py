"""How are many signals stored that come at once, with less than a round trip and a commit for each?

While few come, each is stored at once and by itself. While more come than there are statements under way, those that
wait are stored together in the next one, in one transaction. If that fails for whatever reason but the database's being
away, each of them is stored by itself after all, so that none suffers from another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import psycopg2.errors
from attrs import field, frozen
from psycopg2.extensions import TransactionRollbackError
from twisted.internet.defer import Deferred
from twisted.logger import Logger
from twisted.python.failure import Failure

from region.database import Database, DatabaseUnavailable, Transaction
from region.database.connection import Parameters

log = Logger()

Row = tuple[Any, ...]

AT_ONCE: Final = 3
"""Statements under way; the pool has more connections, which others need."""

MOST: Final = 16
"""Signals in one statement,"""

MOST_BYTES: Final = 1 << 20
"""and bytes of their outputs, unless one alone has more."""


@frozen(eq=False)
class _Waiting:
    key: int
    parameters: Sequence[Any]
    size: int
    row: Deferred[Row] = field(factory=Deferred)


class Gathering:
    """Calls ``function``, which gives one row, with its parameters; several calls in one statement if need be.

    :param function: the call, in SQL, with a placeholder for each parameter.
    """

    def __init__(self, database: Database, function: str) -> None:
        self._database = database
        self._function = function
        self._waiting: deque[_Waiting] = deque()
        self._under_way = 0

    async def call(self, key: int, parameters: Sequence[Any], size: int) -> Row:
        """The row that the function gives, once that is committed.

        :param key: calls in one statement are made in the order of their keys, in which their locks are taken.
        :param size: bytes of the parameters, about.
        :raises DatabaseUnavailable: if the database is away.
        """
        waiting = _Waiting(key, parameters, size)
        self._waiting.append(waiting)
        self._begin()
        return await waiting.row

    def _begin(self) -> None:
        while self._waiting and self._under_way < AT_ONCE:
            self._under_way += 1
            together = self._next()
            storing = Deferred.fromCoroutine(self._store(together))
            storing.addErrback(self._failed, together)
            storing.addCallback(self._ended)

    def _next(self) -> Sequence[_Waiting]:
        together, size = [self._waiting.popleft()], 0
        while self._waiting and len(together) < MOST:
            size += together[-1].size
            if size + self._waiting[0].size > MOST_BYTES:
                break
            together.append(self._waiting.popleft())
        # Those of one node keep their order: sorting is stable.
        return sorted(together, key=lambda each: each.key)

    def _ended(self, _: object) -> None:
        self._under_way -= 1
        self._begin()

    def _failed(self, reason: Failure, together: Sequence[_Waiting]) -> None:
        """Whoever waits gets the failure, and says it."""
        for each in together:
            if not each.row.called:
                each.row.errback(reason)

    async def _store(self, together: Sequence[_Waiting]) -> None:
        if len(together) > 1:
            sql = " UNION ALL ".join(f"SELECT {number}, * FROM {self._function}" for number in range(len(together)))
            parameters = [value for each in together for value in each.parameters]
            try:
                rows = await self._database.query(sql, parameters)
            except DatabaseUnavailable:
                raise
            except Exception as error:  # noqa: BLE001  # the one whose fault it is gets it below
                log.info("Storing {count} signals one by one, after {error}", count=len(together), error=error)
            else:
                for number, *row in rows:
                    together[number].row.callback(tuple(row))
                return
        for each in together:
            try:
                found = await one(self._database, f"SELECT * FROM {self._function}", each.parameters)
                assert found is not None  # a function gives one
            except DatabaseUnavailable:
                raise
            except Exception as error:  # noqa: BLE001  # it is for whoever waits for this one
                each.row.errback(Failure(error))
            else:
                each.row.callback(found)


async def one(database: Database, sql: str, parameters: Parameters) -> Row | None:
    """The row of a statement that commits by itself; it is tried again if it collided with another."""

    async def again(transaction: Transaction) -> Row | None:
        return await transaction.one(sql, parameters)

    try:
        return await database.one(sql, parameters)
    except (TransactionRollbackError, psycopg2.errors.ForeignKeyViolation) as error:
        # What refers to something has collided with its being deleted, a node or a script: that is seen next time.
        log.debug("storing it again after {error}", error=error)
        return await database.transact(again)
