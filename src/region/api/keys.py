"""The keys that clients of the API have: ``consumer:token:secret``, one row each in PostgreSQL."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final

from attrs import define, field, frozen

from region.database import Database, Transaction

CHANNEL: Final = "stanchion_api_key"
"""Notified when a key is revoked, so that no region process remembers it."""

_ALPHABET: Final = string.ascii_letters + string.digits


@frozen
class ApiKey:
    """One key. ``name`` says for people whose it is."""

    consumer_key: str
    token_key: str
    token_secret: str = field(repr=False)
    name: str
    created: datetime

    @property
    def text(self) -> str:
        """The three-part key as clients take it."""
        return f"{self.consumer_key}:{self.token_key}:{self.token_secret}"


_COLUMNS: Final = "consumer_key, token_key, token_secret, name, created"


@define
class ApiKeyStore:
    """The keys in PostgreSQL."""

    _database: Database

    async def create(self, name: str) -> ApiKey:
        """Make a key: 18, 18 and 32 random letters and digits, as MAAS's are."""
        row = await self._database.one(
            f"INSERT INTO api_key (consumer_key, token_key, token_secret, name) VALUES (%s, %s, %s, %s) "
            f"RETURNING {_COLUMNS}",
            (_random(18), _random(18), _random(32), name),
        )
        assert row is not None, "INSERT … RETURNING gives one row"
        return ApiKey(*row)

    async def find(self, consumer_key: str, token_key: str) -> ApiKey | None:
        """The key with these first two parts."""
        row = await self._database.one(
            f"SELECT {_COLUMNS} FROM api_key WHERE consumer_key = %s AND token_key = %s", (consumer_key, token_key)
        )
        return None if row is None else ApiKey(*row)

    async def list(self) -> tuple[ApiKey, ...]:
        """Every key, oldest first."""
        rows = await self._database.query(f"SELECT {_COLUMNS} FROM api_key ORDER BY created, consumer_key")
        return tuple(ApiKey(*row) for row in rows)

    async def revoke(self, consumer_key: str, token_key: str) -> bool:
        """Remove a key and tell every region process. Whether there was one."""

        async def remove(transaction: Transaction) -> bool:
            removed = await transaction.execute(
                "DELETE FROM api_key WHERE consumer_key = %s AND token_key = %s", (consumer_key, token_key)
            )
            await transaction.query("SELECT pg_notify(%s, '')", (CHANNEL,))
            return removed > 0

        return await self._database.transact(remove)

    def listen(self, callback: Callable[[str], Any]) -> None:
        """Call ``callback`` whenever a key was revoked, or may have been."""
        self._database.listen(CHANNEL, callback)


def _random(length: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(length))
