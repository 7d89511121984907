"""What is one connection to PostgreSQL, and when is it lost?

A :class:`Connection` runs one statement at a time over ``txpostgres``. Once anything says that the server is gone,
or a statement is cancelled or does not end, the connection is closed for good and everything that was waiting on it
gets :class:`DatabaseUnavailable`; it never reconnects by itself, because what it held (a transaction, a lock) is gone.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import psycopg2
from attrs import frozen
from psycopg2 import extensions
from twisted.internet.defer import CancelledError, Deferred, DeferredLock
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure
from txpostgres import txpostgres

from region.database.target import NameNotFound, Target

T = TypeVar("T")
Parameters = Sequence[object] | Mapping[str, object]
log = Logger()

# Older servers lack client_connection_check_interval, without which a statement that nobody awaits runs on.
LARGE: Final = 4 << 20
"""Bytes of a statement after which its connection is not used again: five that stored 15 MiB each kept 300."""

OLDEST_SERVER = 140000
# How long after the server should have ended a statement the region stops believing that the server is there.
_GRACE_SECONDS = 10.0
# SQLSTATEs with which a server that goes away, or will not have us, ends a connection.
_LOST_STATES = {"57P01", "57P02", "57P03", "57P04", "57P05", "25P03", "25P04"}
# The class of SQLSTATEs with which a server says that it lacks disk, memory or connections: no fault of the statement.
_LACKS_RESOURCES = "53"
# What a server says that starts, or recovers because one of its processes crashed: the next try may succeed.
_NOT_YET = (
    "starting up",
    "in recovery mode",
    "not yet accepting",
    "shutting down",
    "terminating connection",
    "server closed the connection",
    "Connection reset by peer",
)
# What comes of a statement and values that do not fit each other, or that no text of PostgreSQL can hold.
_NOT_SENT = (ValueError, TypeError, LookupError, ArithmeticError, MemoryError)


class DatabaseUnavailable(Exception):
    """A connection could not be made or was lost, or the server has no room; the text says which server and why, and
    never the password."""


class CommitUnknown(DatabaseUnavailable):
    """The connection was lost while committing: whether the transaction was committed is not known."""


class TransactionAborted(Exception):
    """The transaction's function returned although one of its statements had failed, so nothing was committed."""


@frozen
class Result:
    """A finished statement: its ``rows`` (``None`` if it has none), ``count`` of rows touched, and command ``tag``."""

    rows: list[tuple[Any, ...]] | None
    count: int
    tag: str


def _read_bytea(value: str | None, cursor: Any) -> bytes | None:
    return None if value is None else bytes(psycopg2.BINARY(value, cursor))


# psycopg2 gives bytea as a memoryview, which is unequal to the bytes that were stored in hash and in JSON alike.
_BYTEA = extensions.new_type(psycopg2.BINARY.values, "BYTEA", _read_bytea)


class _Descriptors:
    """The reactor, as txpostgres uses it. A socket that libpq has closed is reported: it cannot be watched."""

    def __init__(self, reactor: Any, follow: Callable[[], bool], closed: Callable[[], object]) -> None:
        self._reactor = reactor
        self._follow = follow
        self._closed = closed
        self.removeReader = reactor.removeReader
        self.removeWriter = reactor.removeWriter
        self.callLater = reactor.callLater

    def addReader(self, descriptor: Any) -> None:
        if self._follow():
            self._reactor.addReader(descriptor)
        else:
            self._closed()

    def addWriter(self, descriptor: Any) -> None:
        if self._follow():
            self._reactor.addWriter(descriptor)
        else:
            self._closed()


class _Cursor(txpostgres.Cursor):  # type: ignore[misc]  # txpostgres has no type information
    def fileno(self) -> int:
        number: int = self._connection.fileno()
        return number

    def _handleCancellation(self, failure: Failure) -> Failure:
        """Keep the server's word (a statement over its time): txpostgres would call it a cancelled Deferred."""
        return failure


class _Wire(txpostgres.Connection):  # type: ignore[misc]  # txpostgres has no type information
    """txpostgres' connection, which tells when an idle connection is lost instead of raising into the reactor.

    The reactor watches a duplicate of libpq's descriptor. libpq closes its own without a word, in the middle of sending
    for one; its number may be an HTTP client's a moment later, who would then not be watched, and never be answered.
    """

    cursorFactory = _Cursor

    def __init__(
        self, reactor: object, lost: Callable[[str], object], notified: Callable[[str, str], object] | None
    ) -> None:
        super().__init__(_Descriptors(reactor, self._follow, self._closed_by_libpq))
        self._watched = -1
        self._socket: tuple[int, int] | None = None
        self._lost = lost
        self._notified = notified

    def fileno(self) -> int:
        return self._watched

    def _follow(self) -> bool:
        """Watch the socket that libpq has now (it tries several, one after the other); whether there is one."""
        if self._connection.closed or (current := self._connection.fileno()) < 0:
            return False
        status = os.fstat(current)
        if self._socket != (status.st_dev, status.st_ino):
            self._forget()
            self._watched, self._socket = os.dup(current), (status.st_dev, status.st_ino)
        return True

    def _forget(self) -> None:
        if self._watched < 0:
            return
        self.reactor.removeReader(self)
        self.reactor.removeWriter(self)
        os.close(self._watched)
        self._watched, self._socket = -1, None

    def close(self) -> None:
        super().close()
        self._forget()

    def doRead(self) -> None:
        try:
            super().doRead()
        except psycopg2.Error as error:
            self._lost(_first_line(error))

    def doWrite(self) -> None:
        try:
            super().doWrite()
        except psycopg2.Error as error:
            self._lost(_first_line(error))

    def connectionLost(self, reason: Failure) -> None:
        if self._pollingD is not None or self._connection.closed:
            # It is being opened, or was closed here: what waits gets libpq's reason, which says more.
            super().connectionLost(reason)
            return
        try:
            self._connection.poll()
            self._lost(reason.getErrorMessage())
        except psycopg2.Error as error:
            self._lost(_first_line(error))

    def _closed_by_libpq(self) -> None:
        # What the server said at the end came as a notice.
        notices = [" ".join(notice.split()) for notice in self._connection.notices]
        self._lost(notices[-1] if notices else "the server closed the connection")

    def checkForNotifies(self) -> None:
        notifies, self._connection.notifies[:] = list(self._connection.notifies), []
        if self._notified is not None:
            for notify in notifies:
                self._notified(notify.channel, notify.payload)


class Connection:
    """One open connection; made by :func:`connect`. ``lost`` is why it was lost, or ``None`` while it is there."""

    def __init__(
        self,
        reactor: IReactorTime,
        target: Target,
        *,
        statement_timeout: float,
        on_lost: Callable[[str], object] | None = None,
        on_notify: Callable[[str, str], object] | None = None,
    ) -> None:
        self.lost: str | None = None
        self.swollen = False
        """Whether a statement or an answer was so large that libpq, which never gives back a buffer, should go too."""
        self.pid = 0
        self._reactor = reactor
        self._target = target
        self._statement_timeout = statement_timeout
        self._on_lost = on_lost
        self._lock = DeferredLock()
        self._wire = _Wire(reactor, self._lost_wire, on_notify)

    async def open(self, parameters: Mapping[str, str]) -> None:
        """Connect with libpq's ``parameters`` and set the session up. Raises :class:`DatabaseUnavailable`."""
        try:
            await _closing_when_cancelled(self._wire.connect(**parameters), lambda: self.close("it was cancelled"))
        except CancelledError:
            raise
        except Exception as error:
            reason = self.lost or _first_line(error)
            self.close(reason)
            raise DatabaseUnavailable(f"cannot connect to {self._target.description}: {reason}") from error
        if self._wire.server_version < OLDEST_SERVER:
            found, needed = self._wire.server_version // 10000, OLDEST_SERVER // 10000
            self.close("its version is too old")
            raise DatabaseUnavailable(
                f"{self._target.description} is version {found}: version {needed} or newer is needed"
            )
        self.pid = self._wire.get_backend_pid()
        extensions.register_type(_BYTEA, self._wire.pollable())
        await self.run(
            "SELECT set_config('statement_timeout', %s, false), set_config('TimeZone', 'UTC', false),"
            " set_config('client_connection_check_interval', '2s', false)",
            (f"{round(self._statement_timeout * 1000)}ms",),
        )

    @property
    def alive(self) -> bool:
        """Whether the connection is there, as far as is known; looks at the socket, so that news is not missed."""
        if self.lost is None and not self._lock.locked and self._readable():
            # An idle connection has nothing to read but a notification or the news of its end.
            self._wire.doRead()
        return self.lost is None

    @property
    def idle(self) -> bool:
        """Whether no statement runs and no transaction is open, so that somebody else may have the connection."""
        return (
            self.lost is None
            and not self._lock.locked
            and self._wire.get_transaction_status() == extensions.TRANSACTION_STATUS_IDLE
        )

    def run(self, sql: str, parameters: Parameters = ()) -> Deferred[Result]:
        """Run one statement (or, without parameters, several) after those that were asked for before it.

        Fails with :class:`DatabaseUnavailable` (the connection is lost, or :attr:`lost` is None and the server's disk
        is full), or ``psycopg2.Error`` when the server refuses the statement.
        Cancelling it closes the connection: the server rolls back, and stops the statement within seconds.
        """
        return self._lock.run(self._run, sql, parameters)

    def close(self, reason: str = "it was closed") -> None:
        """Close at once; what still waits on the connection fails with ``reason``."""
        if self.lost is None:
            self.lost = reason
        if self._wire.pollable() is not None:
            self._wire.close()

    def _run(self, sql: str, parameters: Parameters) -> Deferred[Result]:
        if self.lost is not None:
            raise self._unavailable()
        cursor = self._wire.cursor()
        running = _closing_when_cancelled(
            cursor.execute(sql, parameters or None), lambda: self.close("its statement was cancelled")
        )
        running.addBoth(self._weigh, cursor)
        running.addCallbacks(lambda _: self._read(cursor), self._explain)
        if self._statement_timeout:
            self._limit(running, self._statement_timeout + _GRACE_SECONDS)
        return running

    def _weigh(self, result: T, cursor: Any) -> T:
        # What came back is weighed by the statement's caller alone: nearly all that is large is sent, not read.
        self.swollen = self.swollen or len(cursor.query or b"") > LARGE
        return result

    def _read(self, cursor: Any) -> Result:
        """The result of a statement that has ended well, unless the connection ended together with it."""
        try:
            return _result(cursor)
        except psycopg2.InterfaceError as error:
            self._lost_wire(_first_line(error))
            raise self._unavailable() from error

    def _limit(self, running: Deferred[Result], seconds: float) -> None:
        timer = self._reactor.callLater(
            seconds, self._lost_wire, f"the server has not ended a statement in {seconds:g} seconds"
        )

        def stop(result: T) -> T:
            if timer.active():
                timer.cancel()
            return result

        running.addBoth(stop)

    def _explain(self, failure: Failure) -> Failure:
        """Tell a refused statement, or a full server (the connection stays), from a lost connection (it is closed)."""
        error = failure.value
        assert error is not None  # a Failure always has one
        if isinstance(error, CancelledError):
            return failure
        if self.lost is None and _says_lost(error):
            self._lost_wire(_first_line(error))
        if self.lost is not None:
            unavailable = self._unavailable()
        elif isinstance(error, psycopg2.Error) and (error.pgcode or "").startswith(_LACKS_RESOURCES):
            unavailable = DatabaseUnavailable(f"{self._target.description} lacks resources: {_first_line(error)}")
        else:
            return failure
        unavailable.__cause__ = error
        return Failure(unavailable)

    def _unavailable(self) -> DatabaseUnavailable:
        return DatabaseUnavailable(f"lost the connection to {self._target.description}: {self.lost}")

    def _lost_wire(self, reason: str) -> None:
        if self.lost is not None:
            return
        self.close(reason)
        if self._on_lost is not None:
            self._on_lost(reason)

    def _readable(self) -> bool:
        # poll, not select: a busy region has descriptors over 1024.
        descriptor = self._wire.fileno()
        if descriptor < 0:
            return True
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(0))


async def connect(
    reactor: Any,
    target: Target,
    *,
    deadline: float,
    statement_timeout: float,
    on_lost: Callable[[str], object] | None = None,
    on_notify: Callable[[str, str], object] | None = None,
) -> Connection:
    """Open a connection within ``deadline`` seconds; waits for a server that is starting or recovering.

    ``statement_timeout`` is in seconds, 0 for none. ``on_lost`` is called once with the reason if the connection is
    lost after it was opened, ``on_notify`` with channel and payload. Raises :class:`DatabaseUnavailable`.
    """

    last = ""

    async def attempt() -> Connection:
        nonlocal last
        try:
            parameters = await target.resolved(reactor)
        except NameNotFound as error:
            raise DatabaseUnavailable(f"cannot connect to {target.description}: {error}") from error
        pause = 0.05
        while True:
            connection = Connection(
                reactor, target, statement_timeout=statement_timeout, on_lost=on_lost, on_notify=on_notify
            )
            try:
                await connection.open(parameters)
            except DatabaseUnavailable as error:
                if not any(words in str(error) for words in _NOT_YET):
                    raise
                log.debug("waiting for the database: {error}", error=error)
                last = f"; the last try: {error}"
                await deferLater(reactor, pause)
                pause = min(1.0, pause * 2)
            else:
                return connection

    limited = Deferred.fromCoroutine(attempt())

    def too_long(result: object, seconds: float) -> Connection | Failure:
        return Failure(
            DatabaseUnavailable(
                f"cannot connect to {target.description}: it was not ready within {seconds:g} seconds{last}"
            )
        )

    return await limited.addTimeout(deadline, reactor, onTimeoutCancel=too_long)


def _closing_when_cancelled(running: Deferred[Any], close: Callable[[], object]) -> Deferred[Any]:
    """The same result; cancelling it closes the connection, since txpostgres can only be cancelled by raising."""
    cancelled = False

    def cancel(_: Deferred[Any]) -> None:
        nonlocal cancelled
        cancelled = True
        close()

    outer: Deferred[Any] = Deferred(cancel)

    def finished(result: object) -> None:
        if not cancelled:
            outer.callback(result)

    running.addBoth(finished)
    return outer


def _result(cursor: Any) -> Result:
    rows = cursor.fetchall() if cursor.description is not None else None
    return Result(rows, cursor.rowcount, cursor.statusmessage or "")


def _says_lost(error: BaseException) -> bool:
    if isinstance(error, ValueError | TypeError | RecursionError):
        return False  # a value that no statement can have, such as a NUL: nothing of it was sent
    if not isinstance(error, psycopg2.Error):
        # ConnectionDone and the like are the transport's word. The others were raised before anything was sent.
        return not isinstance(error, _NOT_SENT)
    if error.pgcode is not None:
        return error.pgcode in _LOST_STATES or error.pgcode.startswith("08")
    # Without a SQLSTATE it was libpq that spoke. Subclasses mean that the statement was wrong, these that the link is.
    return isinstance(error, psycopg2.InterfaceError) or type(error) in (
        psycopg2.OperationalError,
        psycopg2.DatabaseError,
    )


def _first_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text or type(error).__name__
