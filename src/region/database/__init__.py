"""How the region reaches PostgreSQL: a pool of connections, an embedded server, and numbered migrations."""

from region.database.connection import CommitUnknown, DatabaseUnavailable, TransactionAborted
from region.database.pool import Database, Session, Transaction

__all__ = [
    "CommitUnknown",
    "Database",
    "DatabaseUnavailable",
    "Session",
    "Transaction",
    "TransactionAborted",
]
