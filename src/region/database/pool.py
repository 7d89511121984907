"""How does a part of the region use the database: which connection runs a statement, and what if that one is lost?

:class:`Database` lends out at most ``size`` connections, throws away those that broke and opens new ones; a caller
gets the result, PostgreSQL's own error, or :class:`DatabaseUnavailable`, within a bounded time. txpostgres' own pool
is not used: it keeps broken connections for ever.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Final, TypeVar

import psycopg2
from psycopg2.extensions import TransactionRollbackError
from twisted.internet import defer
from twisted.internet.defer import Deferred, succeed
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure

from region.database.connection import (
    CommitUnknown,
    Connection,
    DatabaseUnavailable,
    Parameters,
    Result,
    TransactionAborted,
    connect,
)
from region.database.listening import Listener
from region.database.target import Target
from rpc.memory import give_back

T = TypeVar("T")
log = Logger()
RETRIES: Final = 5
"""How often what a deadlock or a failed serialization has undone is tried again."""

_STOP_SECONDS = 2.0


class _Statements:
    """The three ways to run one statement, over ``_run``."""

    async def query(self, sql: str, parameters: Parameters = ()) -> list[tuple[Any, ...]]:
        """All rows. Raises ``psycopg2.Error`` if the server refuses it, or :class:`DatabaseUnavailable`."""
        rows = (await self._run(sql, parameters)).rows
        if rows is None:
            raise ValueError(f"the statement returns no rows, so it must be run with execute(): {sql[:200]}")
        return rows

    async def one(self, sql: str, parameters: Parameters = ()) -> tuple[Any, ...] | None:
        """The only row, or ``None``. Raises ``ValueError`` if there are more, and what :meth:`query` raises."""
        rows = await self.query(sql, parameters)
        if len(rows) > 1:
            raise ValueError(f"expected at most one row, but got {len(rows)} from: {sql[:200]}")
        return rows[0] if rows else None

    async def execute(self, sql: str, parameters: Parameters = ()) -> int:
        """How many rows it touched (-1 where that has no meaning). Raises what :meth:`query` raises."""
        return (await self._run(sql, parameters)).count

    async def _run(self, sql: str, parameters: Parameters) -> Result:
        raise AssertionError("every kind of statements runs them in its own way")


class Transaction(_Statements):
    """One open transaction; of no use after the function that it was given to has returned."""

    def __init__(self, connection: Connection) -> None:
        self._connection: Connection | None = connection

    def end(self) -> None:
        """Refuse every further statement."""
        self._connection = None

    async def _run(self, sql: str, parameters: Parameters) -> Result:
        if self._connection is None:
            raise RuntimeError("the transaction has ended: a statement must be awaited inside its function")
        return await self._connection.run(sql, parameters)


class Session(_Statements):
    """A connection of one's own, for advisory locks. When it is lost it stays lost, with all that it held."""

    def __init__(self, reactor: Any, connection: Connection) -> None:
        self._reactor = reactor
        self._connection = connection

    @property
    def pid(self) -> int:
        """The server's process id for this session, as in ``pg_locks`` and ``pg_stat_activity``."""
        return self._connection.pid

    @property
    def alive(self) -> bool:
        """Whether the connection, and so every lock it holds, is still there as far as is known."""
        return self._connection.alive

    async def transact(self, function: Callable[[Transaction], Awaitable[T]], *, retries: int = RETRIES) -> T:
        """As :meth:`Database.transact`, on this session."""
        return await _retried(self._reactor, lambda: _transact(self._connection, function), retries)

    async def _run(self, sql: str, parameters: Parameters) -> Result:
        return await self._connection.run(sql, parameters)


class Database(_Statements):
    """The database that ``dsn`` names (a libpq connection string or URL; host names through the reactor's resolver).

    ``connect_timeout`` and ``wait_timeout`` (for a connection of the pool to become free) and ``statement_timeout``
    (0: none) are seconds. Rows come as tuples, ``bytea`` as bytes, ``json`` as Python values, ``timestamptz`` as
    aware datetimes in UTC. A single statement of :meth:`query`, :meth:`one` and :meth:`execute` commits by itself.
    """

    def __init__(
        self,
        reactor: Any,
        dsn: str,
        *,
        size: int = 5,
        connect_timeout: float = 10.0,
        wait_timeout: float = 10.0,
        statement_timeout: float = 60.0,
    ) -> None:
        self._reactor = reactor
        self._target = Target.parse(dsn)
        self._size = size
        self._connect_timeout = connect_timeout
        self._wait_timeout = wait_timeout
        self._statement_timeout = statement_timeout
        self._free = size
        self._waiting: deque[Deferred[None]] = deque()
        self._handing_out = False
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self._stopped = False
        self._emptied: Deferred[None] | None = None
        self._listener = Listener(reactor, self._connect, self._discard)

    @property
    def description(self) -> str:
        """The server and database, for people; without the password."""
        return self._target.description

    @property
    def size(self) -> int:
        """How many connections of the pool there may be at a time."""
        return self._size

    @property
    def in_use(self) -> int:
        """How many of them somebody has right now."""
        return self._size - self._free

    @property
    def waiting(self) -> int:
        """How many wait for one."""
        return len(self._waiting)

    async def start(self) -> None:
        """Prove that the server is there and start listening. Raises :class:`DatabaseUnavailable`."""
        self._stopped = False
        await self.query("SELECT 1")
        self._listener.start()

    async def stop(self) -> None:
        """Refuse new work, give what runs two seconds, then close every connection."""
        self._stopped = True
        self._listener.stop()
        while self._waiting:
            self._waiting.popleft().errback(self._refusal())
        while self._idle:
            self._discard(self._idle.pop())
        if self._open:
            self._emptied = Deferred()
            try:
                await self._emptied.addTimeout(_STOP_SECONDS, self._reactor)
            except defer.TimeoutError:
                log.warn("closing {count} database connections that are still in use", count=len(self._open))
        for connection in list(self._open):
            connection.close("the region is stopping")
            self._discard(connection)

    async def transact(self, function: Callable[[Transaction], Awaitable[T]], *, retries: int = RETRIES) -> T:
        """Run ``function`` between BEGIN and COMMIT, and return what it returns.

        Any exception rolls back and is raised. A serialization failure or a deadlock is tried again, at most
        ``retries`` times and with a new transaction, so ``function`` must not change anything outside the database.
        Raises :class:`CommitUnknown` if the connection is lost while committing, :class:`TransactionAborted` if
        ``function`` hid that a statement failed.
        """

        async def attempt() -> T:
            connection = await self._acquire()
            try:
                return await _transact(connection, function)
            finally:
                self._release(connection)

        return await _retried(self._reactor, attempt, retries)

    def session(self, *, statement_timeout: float | None = None) -> AbstractAsyncContextManager[Session]:
        """A connection of its own, which is not of the pool: ``async with database.session() as session``.

        ``statement_timeout`` in seconds replaces the database's own; 0 for statements that may wait for long.
        """
        return _SessionContext(self, statement_timeout)

    def listen(self, channel: str, callback: Callable[[str], object]) -> None:
        """Call ``callback`` with the payload of every NOTIFY on ``channel``.

        It is also called with "" after every connect, because notifications may have been missed until then. What it
        returns (a coroutine or Deferred) is run; its failure is logged.
        """
        self._listener.listen(channel, callback)

    async def _run(self, sql: str, parameters: Parameters) -> Result:
        """Run a statement by itself; one that a deadlock has undone is tried again, as a transaction is."""

        async def attempt() -> Result:
            connection = await self._acquire()
            try:
                return await connection.run(sql, parameters)
            finally:
                self._release(connection)

        return await _retried(self._reactor, attempt, RETRIES)

    async def _acquire(self) -> Connection:
        await self._slot()
        try:
            while self._idle:
                connection = self._idle.pop()
                if connection.alive:
                    return connection
                self._discard(connection)
            return await self._connect()
        except BaseException:
            self._free_slot()
            raise

    def _release(self, connection: Connection) -> None:
        if connection.idle and not connection.swollen and not self._stopped:
            self._idle.append(connection)
        else:
            self._discard(connection)
            if connection.swollen and not self._stopped:
                self._reactor.callInThread(give_back)
        self._free_slot()

    async def _connect(
        self,
        *,
        statement_timeout: float | None = None,
        on_notify: Callable[[str, str], object] | None = None,
        on_lost: Callable[[], object] | None = None,
    ) -> Connection:
        self._refuse_when_stopped()
        opened: list[Connection] = []

        def lost(reason: str) -> None:
            log.warn("lost a connection to {server}: {reason}", server=self.description, reason=reason)
            for connection in opened:
                self._discard(connection)
            if on_lost is not None:
                on_lost()

        connection = await connect(
            self._reactor,
            self._target,
            deadline=self._connect_timeout,
            statement_timeout=self._statement_timeout if statement_timeout is None else statement_timeout,
            on_lost=lost,
            on_notify=on_notify,
        )
        opened.append(connection)
        self._open.add(connection)
        try:
            self._refuse_when_stopped()
        except DatabaseUnavailable:
            self._discard(connection)
            raise
        return connection

    def _discard(self, connection: Connection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        connection.close()
        if not self._open and self._emptied is not None and not self._emptied.called:
            self._emptied.callback(None)

    def _slot(self) -> Deferred[None]:
        """Fires when this caller may use one of the pool's connections."""
        self._refuse_when_stopped()
        if self._free:
            self._free -= 1
            return succeed(None)
        waiting: Deferred[None] = Deferred(self._waiting.remove)

        def too_long(result: object, seconds: float) -> Failure:
            return Failure(
                DatabaseUnavailable(
                    f"all {self._size} connections to {self.description} have been in use for {seconds:g} seconds"
                )
            )

        waiting.addTimeout(self._wait_timeout, self._reactor, onTimeoutCancel=too_long)
        self._waiting.append(waiting)
        return waiting

    def _free_slot(self) -> None:
        self._free += 1
        if self._handing_out:
            return  # the loop below, further up the stack, hands this one out too
        self._handing_out = True
        try:
            while self._free and self._waiting:
                self._free -= 1
                self._waiting.popleft().callback(None)
        finally:
            self._handing_out = False

    def _refuse_when_stopped(self) -> None:
        if self._stopped:
            raise self._refusal()

    def _refusal(self) -> DatabaseUnavailable:
        return DatabaseUnavailable(f"{self.description} is not in use any more: the region is stopping")


class _SessionContext(AbstractAsyncContextManager[Session]):
    def __init__(self, database: Database, statement_timeout: float | None) -> None:
        self._database = database
        self._statement_timeout = statement_timeout
        self._connection: Connection | None = None

    async def __aenter__(self) -> Session:
        self._connection = await self._database._connect(statement_timeout=self._statement_timeout)
        return Session(self._database._reactor, self._connection)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        try:
            # The server notices a closed socket a moment later: without this the next who asks may find it locked.
            if connection.idle and kind is not GeneratorExit:
                await connection.run("SELECT pg_advisory_unlock_all()")
        except DatabaseUnavailable as lost:
            log.debug("the session had ended already: {reason}", reason=lost)
        finally:
            self._database._discard(connection)


async def _transact(connection: Connection, function: Callable[[Transaction], Awaitable[T]]) -> T:
    await connection.run("BEGIN")
    transaction = Transaction(connection)
    try:
        value = await function(transaction)
    except GeneratorExit:
        # Nothing can be awaited here, so the server learns it from the socket.
        connection.close("its transaction was abandoned")
        raise
    except BaseException as error:
        transaction.end()
        await _roll_back(connection, error)
        raise
    transaction.end()
    try:
        result = await connection.run("COMMIT")
    except DatabaseUnavailable as error:
        if connection.lost is None:
            raise  # the server answered: it has no room, and did not commit
        raise CommitUnknown(f"{error}; whether the transaction was committed is not known") from error
    if result.tag != "COMMIT":
        raise TransactionAborted(
            "nothing was committed: a statement of the transaction had failed, and its error was not passed on"
        )
    return value


async def _roll_back(connection: Connection, error: BaseException) -> None:
    if connection.lost is not None:
        return
    try:
        await connection.run("ROLLBACK")
    except (psycopg2.Error, DatabaseUnavailable):
        log.failure("could not roll back after {error!r}, so the connection is closed", error=error)
        connection.close("it could not be rolled back")


async def _retried(reactor: Any, attempt: Callable[[], Awaitable[T]], retries: int) -> T:
    for failures in range(retries):
        try:
            return await attempt()
        except TransactionRollbackError as error:
            log.debug("trying a transaction again after {error}", error=error)
            # Those that collided must not collide again in step.
            await deferLater(reactor, random.uniform(0, 0.01 * 2**failures))
    return await attempt()
