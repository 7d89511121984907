"""Who may import and publish: the one database session that holds the import's advisory lock.

The lock belongs to a PostgreSQL session, so it ends when that session does, however it ends. Whatever it guards runs
on that same session and checks that it still holds the lock: a session that was lost cannot publish.
"""

from __future__ import annotations

from typing import Final

from region.database import Session, Transaction

LOCK_CLASS: Final = 0x5374616E  # "Stan": keeps our locks apart from those of other programs in the same database
IMPORT_LOCK: Final = 1


class ImportLockLost(Exception):
    """This database session does not hold the import's lock, so it may not publish or delete."""


async def try_lock(session: Session) -> bool:
    """Take the import's lock for ``session`` if nobody has it; whether that worked."""
    row = await session.one("SELECT pg_try_advisory_lock(%s, %s)", (LOCK_CLASS, IMPORT_LOCK))
    return row is not None and row[0] is True


async def unlock(session: Session) -> None:
    """Give the lock back."""
    await session.one("SELECT pg_advisory_unlock(%s, %s)", (LOCK_CLASS, IMPORT_LOCK))


async def require_lock(transaction: Transaction) -> None:
    """Check, within ``transaction``, that its own session holds the import's lock.

    :raises ImportLockLost: if it does not.
    """
    row = await transaction.one(
        """SELECT count(*) FROM pg_locks
           WHERE locktype = 'advisory' AND granted AND pid = pg_backend_pid() AND objsubid = 2
             AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
             AND classid = %s::oid AND objid = %s::oid""",
        (LOCK_CLASS, IMPORT_LOCK),
    )
    if row is None or row[0] == 0:
        raise ImportLockLost("this database session does not hold the import lock, so nothing was changed")
