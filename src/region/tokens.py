"""Which join tokens are there? They are made, listed and taken back here; of the secret, only its sha256 is kept."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from attrs import frozen

from region.database import Database, Transaction
from rpc.identity import JoinToken

TOKEN_SECONDS: Final = 24 * 3600
"""How long a join token is good for, unless it was made otherwise."""


@frozen
class TokenEntry:
    """A join token without its secret: ``id``, when it was made and ends, how many racks may still join with it, and
    when it was taken back."""

    id: str
    created: datetime
    expires: datetime
    uses_left: int
    revoked: datetime | None
    expired: bool

    @property
    def state(self) -> str:
        """``good``, or why it is not."""
        if self.revoked is not None:
            return "revoked"
        if self.expired:
            return "expired"
        return "good" if self.uses_left else "used up"


async def create_join_token(
    database: Database, ca: bytes, *, expires_seconds: float = TOKEN_SECONDS, uses: int = 1
) -> str:
    """The text of a new join token for the authority whose certificate is ``ca`` (PEM).

    Only the sha256 of its secret is stored. Tokens that expired a month ago are forgotten.

    :param expires_seconds: from now.
    :param uses: how many racks may join with it.
    """
    token = JoinToken.create(ca)

    async def write(transaction: Transaction) -> None:
        await transaction.execute("DELETE FROM join_token WHERE expires < now() - interval '30 days'")
        await transaction.execute(
            """INSERT INTO join_token (id, key, expires, uses_left)
               VALUES (%s, %s, now() + make_interval(secs => %s), %s)""",
            (token.id, token.key, expires_seconds, uses),
        )

    await database.transact(write)
    return token.format()


async def list_join_tokens(database: Database) -> list[TokenEntry]:
    """Every join token that is remembered, newest first."""
    rows = await database.query(
        "SELECT id, created, expires, uses_left, revoked, expires < now() FROM join_token ORDER BY created DESC, id"
    )
    return [TokenEntry(*row) for row in rows]


async def revoke_join_tokens(database: Database) -> int:
    """Take every token back that is still good, because the authority that they name is not this region's any more; how
    many."""
    return await database.execute(
        "UPDATE join_token SET revoked = now() WHERE revoked IS NULL AND uses_left > 0 AND expires >= now()"
    )


async def revoke_join_token(database: Database, token_id: str) -> bool:
    """Take a token back: nobody can join with it any more. Whether there is such a token."""
    return bool(
        await database.execute("UPDATE join_token SET revoked = coalesce(revoked, now()) WHERE id = %s", (token_id,))
    )
