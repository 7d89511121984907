"""Migrations: what is missing is applied once, whole or not at all, and a database that does not fit is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from twisted.internet import reactor as installed_reactor
from twisted.internet.defer import gatherResults
from twisted.trial.unittest import SynchronousTestCase

from region.database import Database
from region.database.migrations import LOCK, MigrationError, migrate, read_migrations
from tests.database import DatabaseTestCase, Server

reactor: Any = installed_reactor


class MigrateTests(DatabaseTestCase):
    def setUp(self) -> Any:
        self.directory = Path(self.mktemp())
        self.directory.mkdir()
        self.write("0001_table.sql", "-- 100% plain SQL;\nCREATE TABLE t (x int);\nINSERT INTO t VALUES (1);")
        server = Server.instance()
        name = server.make_database(template="template0")
        self.addCleanup(server.drop_database, name)
        self.empty = self.make(server.dsn_of(name))
        ready = super().setUp()
        return ready.addCallback(lambda _: self.run_async(self.empty.start()))

    def write(self, name: str, sql: str) -> None:
        (self.directory / name).write_text(sql)

    async def refused(self, database: Database | None = None) -> str:
        try:
            await migrate(database or self.empty, self.directory)
        except MigrationError as error:
            return str(error)
        raise AssertionError("the migration was not refused")

    async def test_missing_migrations_are_applied_in_order_and_once(self) -> None:
        self.write("0002_more.sql", "UPDATE t SET x = x + 1")
        self.assertEqual(await migrate(self.empty, self.directory), (1, 2))
        self.assertEqual(await migrate(self.empty, self.directory), ())
        self.write("0003_again.sql", "UPDATE t SET x = x * 10")
        self.assertEqual(await migrate(self.empty, self.directory), (3,))
        self.assertEqual(await self.empty.query("SELECT x FROM t"), [(20,)])
        rows = await self.empty.query("SELECT number, name FROM schema_migration ORDER BY number")
        self.assertEqual(rows, [(1, "table"), (2, "more"), (3, "again")])

    async def test_a_migration_that_fails_leaves_nothing_and_keeps_those_before_it(self) -> None:
        self.write(
            "0002_bad.sql", "INSERT INTO t VALUES (2); CREATE TABLE u (x int); SELECT 1/0; CREATE TABLE v (y int)"
        )
        self.assertIn("0002_bad failed, nothing of it was kept: division by zero", await self.refused())
        self.assertEqual(await self.empty.query("SELECT x FROM t"), [(1,)])
        self.assertEqual(await self.empty.one("SELECT to_regclass('u'), to_regclass('v')"), (None, None))
        self.write("0002_bad.sql", "INSERT INTO t VALUES (2)")
        self.assertEqual(await migrate(self.empty, self.directory), (2,))

    async def test_a_migration_that_commits_by_itself_is_refused(self) -> None:
        self.write("0002_commits.sql", "INSERT INTO t VALUES (2); COMMIT; INSERT INTO t VALUES (3)")
        self.assertIn("begins or ends a transaction by itself", await self.refused())

    async def test_a_changed_migration_is_refused_with_both_digests(self) -> None:
        await migrate(self.empty, self.directory)
        self.write("0001_table.sql", "CREATE TABLE t (x bigint);")
        self.write("0002_more.sql", "UPDATE t SET x = x + 1")
        message = await self.refused()
        self.assertIn("0001_table was changed after it was applied", message)
        self.assertEqual(len(set(re.findall("[0-9a-f]{64}", message))), 2)
        self.assertEqual(await self.empty.query("SELECT x FROM t"), [(1,)])

    async def test_a_renamed_migration_is_refused(self) -> None:
        await migrate(self.empty, self.directory)
        (self.directory / "0001_table.sql").rename(self.directory / "0001_other.sql")
        self.assertIn(
            "0001_other was changed after it was applied to this database as 0001_table", await self.refused()
        )

    async def test_a_database_of_a_newer_version_is_refused(self) -> None:
        self.write("0002_more.sql", "UPDATE t SET x = x + 1")
        await migrate(self.empty, self.directory)
        (self.directory / "0002_more.sql").unlink()
        message = await self.refused()
        self.assertIn("has had migration 0002_more, which this version does not know (its last is 0001_table)", message)

    async def test_two_processes_that_migrate_at_once_apply_each_file_once(self) -> None:
        self.write("0002_slow.sql", "INSERT INTO t SELECT 2 FROM pg_sleep(0.2)")
        dsn = self.server.dsn_of((await self.empty.query("SELECT current_database()"))[0][0])
        others = [self.make(dsn) for _ in range(3)]
        done = await gatherResults([self.run_async(migrate(one, self.directory)) for one in others])
        self.assertEqual(sorted(done), [(), (), (1, 2)])
        self.assertEqual(await self.empty.query("SELECT x FROM t ORDER BY x"), [(1,), (2,)])

    async def test_the_lock_is_free_afterwards_also_when_it_failed(self) -> None:
        self.write("0002_bad.sql", "SELECT 1/0")
        await self.refused()
        self.assertEqual(await self.empty.one("SELECT pg_try_advisory_lock(%s, %s)", LOCK), (True,))

    async def test_the_real_migrations_are_applied_in_the_fixture(self) -> None:
        rows = await self.database.query("SELECT number, sha256 FROM schema_migration ORDER BY number")
        self.assertEqual(rows, [(one.number, one.sha256) for one in read_migrations()])


class ReadMigrationsTests(SynchronousTestCase):
    def refused(self, *names: str) -> str:
        directory = Path(self.mktemp())
        directory.mkdir()
        for name in names:
            (directory / name).write_text("SELECT 1")
        return str(self.assertRaises(MigrationError, read_migrations, directory))

    def test_a_gap_is_refused(self) -> None:
        self.assertIn("without gaps, but found [1, 3]", self.refused("0001_a.sql", "0003_c.sql"))

    def test_a_number_used_twice_is_refused(self) -> None:
        self.assertIn("0001_a, 0001_b", self.refused("0001_a.sql", "0001_b.sql"))

    def test_a_name_that_does_not_fit_is_refused(self) -> None:
        self.assertIn("'1_a.sql'", self.refused("1_a.sql"))

    def test_an_installation_without_migrations_is_refused(self) -> None:
        self.assertIn("the installation is incomplete", self.refused("README.txt"))
