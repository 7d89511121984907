"""Which changes of the schema has this database had, and how does it get the rest?

Numbered plain SQL files are applied in order, each in a transaction of its own together with its row in
``schema_migration``, by one region process at a time. Kept libraries were looked at: yoyo-migrations and alembic
block the reactor and bring a second driver or an ORM; what is needed is this module.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from importlib import resources
from importlib.resources.abc import Traversable

import psycopg2
from attrs import frozen
from twisted.logger import Logger

from region.database.pool import Database, Session, Transaction

log = Logger()
# The key pair of the advisory lock: "STAN" and what it is for.
LOCK = (0x5354414E, 1)
_FILE_NAME = re.compile(r"(\d{4})_([a-z0-9_]+)\.sql")


class MigrationError(Exception):
    """The schema cannot be brought to what this version needs; the text says why and what to do."""


@frozen
class Migration:
    """One SQL file: ``number`` from 1 without gaps, ``name``, its text ``sql`` and the ``sha256`` of its bytes."""

    number: int
    name: str
    sql: str
    sha256: str

    @property
    def label(self) -> str:
        return f"{self.number:04}_{self.name}"


def read_migrations(directory: Traversable | None = None) -> tuple[Migration, ...]:
    """The migrations in ``directory`` (default: those of ``region.migrations``) in order. Raises `MigrationError`."""
    directory = resources.files("region") / "migrations" if directory is None else directory
    found: dict[int, Migration] = {}
    for path in sorted(directory.iterdir(), key=lambda path: path.name):
        if not path.name.endswith(".sql"):
            continue
        match = _FILE_NAME.fullmatch(path.name)
        if match is None:
            raise MigrationError(f"the migration {path.name!r} is not named like 0001_some_words.sql")
        data = path.read_bytes()
        migration = Migration(int(match[1]), match[2], data.decode(), hashlib.sha256(data).hexdigest())
        if migration.number in found:
            raise MigrationError(f"two migrations have one number: {found[migration.number].label}, {migration.label}")
        found[migration.number] = migration
    if sorted(found) != list(range(1, len(found) + 1)):
        raise MigrationError(f"migrations must be numbered from 1 without gaps, but found {sorted(found)}")
    if not found:
        raise MigrationError(f"there are no migrations in {directory}: the installation is incomplete")
    return tuple(found[number] for number in sorted(found))


async def migrate(database: Database, directory: Traversable | None = None) -> tuple[int, ...]:
    """Apply what is missing; returns the numbers that were applied. Waits while another region process migrates.

    Raises :class:`MigrationError` if a file fails (nothing of that file is kept), if an applied file was changed, or
    if the database is newer than this version; and :class:`region.database.DatabaseUnavailable`.
    """
    migrations = read_migrations(directory)
    # No statement time-out: a migration may rewrite a large table, and waiting for another process may take as long.
    async with database.session(statement_timeout=0) as session:
        if await session.one("SELECT pg_try_advisory_lock(%s, %s)", LOCK) != (True,):
            log.info("waiting for another process that migrates {database}", database=database.description)
            await session.query("SELECT pg_advisory_lock(%s, %s)", LOCK)
        missing = await _missing(session, migrations)
        for migration in missing:
            log.info("migrating the database: {label}", label=migration.label)
            await _apply(session, migration)
    return tuple(migration.number for migration in missing)


async def _missing(session: Session, migrations: Sequence[Migration]) -> Sequence[Migration]:
    await session.execute(
        "CREATE TABLE IF NOT EXISTS schema_migration ("
        " number integer PRIMARY KEY CHECK (number > 0), name text NOT NULL, sha256 text NOT NULL,"
        " applied timestamptz NOT NULL DEFAULT now())"
    )
    rows = await session.query("SELECT number, name, sha256 FROM schema_migration ORDER BY number")
    for (number, name, sha256), expected in zip(rows, range(1, len(rows) + 1), strict=True):
        if number > len(migrations):
            raise MigrationError(
                f"the database has had migration {number:04}_{name}, which this version does not know (its last is"
                f" {migrations[-1].label}): start the version that made it, or restore a backup from before"
            )
        migration = migrations[number - 1]
        if number != expected or (name, sha256) != (migration.name, migration.sha256):
            raise MigrationError(
                f"migration {migration.label} was changed after it was applied to this database as {number:04}_{name}"
                f" (sha256 {sha256}, the file now has {migration.sha256}): restore the file, and make a new migration"
            )
    return migrations[len(rows) :]


async def _apply(session: Session, migration: Migration) -> None:
    async def apply(transaction: Transaction) -> None:
        before = await transaction.one("SELECT pg_current_xact_id()::text")
        await transaction.execute(migration.sql)
        if await transaction.one("SELECT pg_current_xact_id()::text") != before:
            raise MigrationError(f"migration {migration.label} begins or ends a transaction by itself: take that out")
        await transaction.execute(
            "INSERT INTO schema_migration (number, name, sha256) VALUES (%s, %s, %s)",
            (migration.number, migration.name, migration.sha256),
        )

    try:
        await session.transact(apply)
    except psycopg2.Error as error:
        raise MigrationError(
            f"migration {migration.label} failed, nothing of it was kept: {' '.join(str(error).split())}"
        ) from error
