"""A real PostgreSQL for tests: one embedded server per test process, and a fresh migrated database per test.

``class MyTests(DatabaseTestCase)`` has ``self.database`` (started) and ``self.dsn``; write a test as
``return self.run_async(coroutine)``, or simply as ``async def test_…`` (which trial awaits). The server is a process
of its own, so that it outlives each test without dirtying the reactor, and it ends with the test process however that
ends.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Coroutine
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import psycopg2
from twisted.internet import reactor as installed_reactor
from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase

from region.database import Database
from region.database.embedded import EmbeddedPostgres
from region.database.migrations import migrate

T = TypeVar("T")
reactor: Any = installed_reactor

# Nothing of a test's database has to survive anything.
SETTINGS = {
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "shared_buffers": "32MB",
    "autovacuum": "off",
    "io_method": "sync",
    "dynamic_shared_memory_type": "mmap",  # in its directory, where a killed server leaves nothing behind
    "max_connections": "200",
}
TEMPLATE = "stanchion"


def make_directory() -> Path:
    """A directory that others can enter, in memory if there is room: a database is a thousand files."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > 2**30 else None
    directory = Path(tempfile.mkdtemp(prefix="stanchion-test-", dir=memory))
    directory.chmod(0o755)
    return directory


class Server:
    """The test process's server, started when it is first asked for."""

    _instance: Server | None = None

    def __init__(self) -> None:
        self._numbers = count(1)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.database"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        atexit.register(self._end)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the test database did not start (exit status {self._process.wait()}), see above")
        answer = json.loads(line)
        self.dsn: str = answer["dsn"]
        self.directory: str = answer["directory"]
        self.pid: int = answer["pid"]
        self._control = psycopg2.connect(self.dsn_of("postgres"))
        self._control.autocommit = True

    @classmethod
    def instance(cls) -> Server:
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance

    def dsn_of(self, name: str) -> str:
        return f"{self.dsn} dbname={name}"

    def make_database(self, *, template: str = TEMPLATE) -> str:
        """The name of a new database: a clone of the migrated one, or empty with ``template="template0"``."""
        name = f"test_{next(self._numbers)}"
        # Copying files is faster than writing them through the WAL when nothing is synced.
        self.execute(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY file_copy")
        return name

    def drop_database(self, name: str) -> None:
        self.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def execute(self, sql: str) -> None:
        """Run a statement outside of every test's database."""
        with self._control.cursor() as cursor:
            cursor.execute(sql)

    def _end(self) -> None:
        self._process.communicate()


class DatabaseTestCase(TestCase):
    """A test with a database of its own, migrated and empty. ``self.server`` makes more of them."""

    timeout = 30
    server: Server
    dsn: str
    database: Database

    def setUp(self) -> Deferred[None]:  # type: ignore[override]  # trial waits for it
        self.server = Server.instance()
        name = self.server.make_database()
        self.addCleanup(self.server.drop_database, name)
        self.dsn = self.server.dsn_of(name)
        self.database = self.make(self.dsn)
        return self.run_async(self.database.start())

    def make(self, dsn: str, **options: Any) -> Database:
        """One more :class:`Database`, not started, stopped after the test."""
        database = Database(reactor, dsn, **options)
        self.addCleanup(lambda: self.run_async(database.stop()))
        return database

    def run_async(self, coroutine: Coroutine[Any, Any, T]) -> Deferred[T]:
        return Deferred.fromCoroutine(coroutine)


async def _serve(directory: Path) -> None:
    server = EmbeddedPostgres(reactor, directory / "postgres", settings=SETTINGS, initdb_options=("--no-sync",))
    ended: Deferred[None] = Deferred()
    try:
        dsn = await server.start()
        database = Database(reactor, dsn)
        await database.start()
        await migrate(database)
        await database.stop()
        sys.stdout.write(
            json.dumps({"dsn": dsn.rpartition(" dbname=")[0], "directory": str(directory), "pid": server.pid})
        )
        sys.stdout.write("\n")
        sys.stdout.flush()
        # The pipe ends when the test process does.
        reactor.callInThread(lambda: (sys.stdin.read(), reactor.callFromThread(ended.callback, None)))
        await ended
    finally:
        await server.stop()


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test process, whose end ends this one
    directory = make_directory()
    failures: list[str] = []

    def run() -> None:
        served = Deferred.fromCoroutine(_serve(directory))
        served.addErrback(lambda failure: failures.append(failure.getTraceback()))
        served.addBoth(lambda _: reactor.stop())

    reactor.callWhenRunning(run)
    reactor.run(installSignalHandlers=True)
    shutil.rmtree(directory)
    if failures:
        sys.stderr.write(failures[0])
        sys.exit(1)


if __name__ == "__main__":
    os.environ.pop("PGDATABASE", None)
    _main()
