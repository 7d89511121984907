"""With which credentials does a node speak to the region? One token per node, retired when the node is done.

A retired token still authenticates for a grace period: the answer to a final signal may have been lost, and outputs may
be on their way. How long that is was said when it was issued, so that whoever retires it need not know.
"""

from __future__ import annotations

import secrets
import string
from datetime import datetime
from typing import Any, Final

from attrs import field, frozen

from region.database import Database, Transaction
from region.nodes.statuses import NodeStatus
from region.nodes.values import NodeName

GRACE_SECONDS: Final = 3600.0

_ALPHABET: Final = string.ascii_letters + string.digits
_COLUMNS: Final = "node_id, consumer_key, token_key, token_secret, node_token.created, expires"


@frozen
class NodeToken:
    """OAuth credentials of a node. ``expires`` is None while they are the node's own, and not retired ones."""

    node_id: int
    consumer_key: str
    token_key: str
    token_secret: str = field(repr=False)
    created: datetime
    expires: datetime | None


@frozen
class TokenHolder:
    """A token, whose it is, the status of that node, and whether the token is good no more."""

    token: NodeToken
    node: NodeName
    status: NodeStatus
    expired: bool


async def issue(transaction: Transaction, node_id: int, *, grace_seconds: float = GRACE_SECONDS) -> NodeToken:
    """A new token for a node; one that it has is retired. The node's row must be locked.

    :param grace_seconds: for how long it is good once it is retired.
    """
    await retire(transaction, node_id)
    await transaction.execute("DELETE FROM node_token WHERE node_id = %s AND expires < now()", (node_id,))
    row = await transaction.one(
        f"""INSERT INTO node_token (node_id, consumer_key, token_key, token_secret, grace_seconds)
            VALUES (%s, %s, %s, %s, %s) RETURNING {_COLUMNS}""",
        (node_id, _random(18), _random(18), _random(32), grace_seconds),
    )
    assert row is not None, "INSERT … RETURNING gives one row"
    return NodeToken(*row)


async def retire(transaction: Transaction, node_id: int) -> bool:
    """Let the token of a node expire when its grace period is over. Whether it had one."""
    return bool(
        await transaction.execute(
            """UPDATE node_token SET expires = clock_timestamp() + make_interval(secs => grace_seconds)
               WHERE node_id = %s AND expires IS NULL""",
            (node_id,),
        )
    )


async def find(database: Database, consumer_key: str, token_key: str) -> TokenHolder | None:
    """Whose token has these keys; whether the secret is right is for the caller to check. None if there is none."""
    row = await database.one(
        f"""SELECT {_COLUMNS}, system_id, hostname, status, coalesce(expires <= clock_timestamp(), false)
            FROM node_token JOIN node ON node.id = node_id WHERE token_key = %s AND consumer_key = %s""",
        (token_key, consumer_key),
    )
    if row is None:
        return None
    *token, system_id, hostname, status, expired = row
    return TokenHolder(NodeToken(*token), NodeName(row[0], system_id, hostname), NodeStatus(status), expired)


async def current(database: Database, node_id: int) -> NodeToken | None:
    """The token that a node has and that is not retired."""
    row: Any = await database.one(
        f"SELECT {_COLUMNS} FROM node_token WHERE node_id = %s AND expires IS NULL", (node_id,)
    )
    return None if row is None else NodeToken(*row)


def _random(length: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(length))
