"""How does a node get another status? In one way alone, which also closes all that hangs on the status that it had.

Unfinished results and runs that end with it are ended, the token is retired when the node is done talking, and the
events are written, all in the transaction of the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from attrs import frozen

from region import events
from region.database import Transaction
from region.nodes import kinds, tokens
from region.nodes.life import BUSY, Input, next_status
from region.nodes.statuses import UNFINISHED, NodeStatus, ResultType, ScriptStatus
from region.nodes.values import NodeName
from rpc.events import Kind

_REQUESTS: Final = {
    (Input.COMMISSION, None): kinds.REQUEST_NODE_START_COMMISSIONING,
    (Input.TEST, None): kinds.REQUEST_NODE_START_TESTING,
    (Input.ABORT, NodeStatus.COMMISSIONING): kinds.REQUEST_NODE_ABORT_COMMISSIONING,
    (Input.ABORT, NodeStatus.TESTING): kinds.REQUEST_NODE_ABORT_TESTING,
    (Input.MARK_BROKEN, None): kinds.REQUEST_NODE_MARK_BROKEN,
    (Input.MARK_FIXED, None): kinds.REQUEST_NODE_MARK_FIXED,
}
"""The event of somebody's having asked for it; some by the status that the node had."""


class NoSuchNode(Exception):
    """There is no such node (any more)."""


@frozen
class Change:
    """What became of a node: the status that it had, and the one that it has."""

    node: NodeName
    before: NodeStatus
    after: NodeStatus


@frozen
class Told:
    """An event that is to be written."""

    kind: Kind
    description: str


async def change(
    transaction: Transaction,
    node_id: int,
    given: Input,
    *,
    reason: str = "",
    username: str = "",
    unfinished: ScriptStatus = ScriptStatus.ABORTED,
    correlation: str = "",
) -> Change:
    """Let ``given`` happen to a node. It takes the lock of events, so it comes last in its transaction.

    :param reason: why, for people; stored with the node, and said in the event of a failure.
    :param username: who asked for it, if somebody did: that is an event of its own.
    :param unfinished: what becomes of results that have not ended, of runs that end with this.
    :raises NotAllowed: if it cannot happen to a node in its status.
    :raises NoSuchNode: if there is none with this number.
    """
    changed, told = await perform(transaction, node_id, given, reason=reason, username=username, unfinished=unfinished)
    await tell(transaction, changed.node, told, username=username, correlation=correlation)
    return changed


async def perform(
    transaction: Transaction,
    node_id: int,
    given: Input,
    *,
    reason: str = "",
    username: str = "",
    unfinished: ScriptStatus = ScriptStatus.ABORTED,
) -> tuple[Change, Sequence[Told]]:
    """As :func:`change`, without its events: these are for the caller to write, with :func:`tell`, as the last thing
    that its transaction does. Who needs no more than a change uses :func:`change`."""
    node, before, previous = await lock(transaction, node_id)
    after = next_status(before, previous, given)
    await transaction.query("SELECT set_config('stanchion.transition', %s, true)", (node.system_id,))
    await transaction.execute(
        """UPDATE node SET status = %s, previous_status = %s, status_changed = clock_timestamp(), status_message = %s,
               updated = now()
           WHERE id = %s""",
        (after, before, reason, node_id),
    )
    await transaction.query("SELECT set_config('stanchion.transition', '', true)")
    await _end_runs(transaction, node_id, given, unfinished)
    if after not in BUSY:
        await tokens.retire(transaction, node_id)
    return Change(node, before, after), _events(given, before, after, reason, username)


async def tell(
    transaction: Transaction, node: NodeName, told: Sequence[Told], *, username: str = "", correlation: str = ""
) -> None:
    """Write events of a node; nothing else may be locked after this."""
    for each in told:
        await events.record(transaction, node, each.kind, each.description, correlation=correlation, username=username)


async def lock(transaction: Transaction, node_id: int) -> tuple[NodeName, NodeStatus, NodeStatus]:
    """Lock a node's row until the end of the transaction; its name, its status, and the one that it had before.

    :raises NoSuchNode: if there is none with this number.
    """
    row = await transaction.one(
        "SELECT system_id, hostname, status, previous_status FROM node WHERE id = %s FOR NO KEY UPDATE", (node_id,)
    )
    if row is None:
        raise NoSuchNode(f"there is no node with the number {node_id}: it was deleted meanwhile")
    system_id, hostname, status, previous = row
    return NodeName(node_id, system_id, hostname), NodeStatus(status), NodeStatus(previous)


async def _end_runs(transaction: Transaction, node_id: int, given: Input, unfinished: ScriptStatus) -> None:
    """End the runs of a node that are not to go on: all, or when its tests begin the commissioning."""
    ending = [ResultType.COMMISSIONING] if given is Input.BEGIN_TESTING else list(ResultType)
    rows = await transaction.query(
        """SELECT id FROM script_set WHERE node_id = %s AND ended IS NULL AND result_type = ANY(%s)
           ORDER BY id FOR NO KEY UPDATE""",
        (node_id, [int(each) for each in ending]),
    )
    if not rows:
        return
    ended = [identifier for (identifier,) in rows]
    await transaction.execute(
        """UPDATE script_result SET status = %s, ended = clock_timestamp(), updated = now()
           WHERE script_set_id = ANY(%s) AND status = ANY(%s)""",
        (unfinished, ended, [int(each) for each in UNFINISHED]),
    )
    await transaction.execute(
        "UPDATE script_set SET ended = clock_timestamp(), boot_deadline = NULL WHERE id = ANY(%s)", (ended,)
    )


def _events(given: Input, before: NodeStatus, after: NodeStatus, reason: str, username: str) -> Sequence[Told]:
    told = []
    if username:
        kind = _REQUESTS.get((given, before)) or _REQUESTS.get((given, None))
        if kind is not None:
            told.append(Told(kind, f"({username})" + (f" - {reason}" if reason else "")))
    if given is Input.FAIL:
        told.append(Told(kinds.REQUEST_NODE_MARK_FAILED_SYSTEM, reason or f"No reason was given for {after.label!r}."))
    if before is not after:
        told.append(Told(kinds.NODE_CHANGED_STATUS, f"From {before.label!r} to {after.label!r}"))
    return told
