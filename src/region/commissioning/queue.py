"""What is to be done with what nodes said: who takes which of it, so that nothing is lost and nothing is done twice?

A row of ``processing`` is claimed in a statement of its own, which counts the attempt; it is deleted by the transaction
that has done it, and only while the claim is its own. Of each node only the oldest row is due, so that they are done
in order. The claims of a region process that is dead are taken over.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from attrs import frozen

from region.database import Database, Transaction
from region.nodes.values import NodeName
from region.processes import ALIVE

CHANNEL: Final = "stanchion_processing"
"""The NOTIFY channel that says that something was queued."""


@frozen
class Work:
    """One row that was claimed. ``set_id`` and ``result_id`` are the run and the result that it is about, if any.

    ``script_name`` is the result's, ``options`` are the run's; ``attempts`` counts this one. ``correlation`` is what
    the log has this attempt under.
    """

    id: int
    node: NodeName
    step: str
    attempts: int
    set_id: int | None = None
    result_id: int | None = None
    script_name: str = ""
    payload: Mapping[str, Any] = {}
    options: Mapping[str, Any] = {}
    correlation: str = ""


_CLAIM: Final = f"""
WITH due AS (
    SELECT id FROM processing AS first
    WHERE not_before <= clock_timestamp()
      AND NOT EXISTS (SELECT FROM processing AS before WHERE before.node_id = first.node_id AND before.id < first.id)
      AND (claimed_by IS NULL
           OR (claimed_by = %(owner)s AND id <> ALL(%(busy)s::bigint[]))
           OR (claimed_by <> %(owner)s
               AND NOT EXISTS (SELECT FROM region_process WHERE region_process.id = claimed_by AND {ALIVE})))
    ORDER BY id
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
), claimed AS (
    UPDATE processing SET claimed_by = %(owner)s, claimed = clock_timestamp(), attempts = attempts + 1
    FROM due WHERE processing.id = due.id
    RETURNING processing.*
)
SELECT claimed.id, node.id, system_id, hostname, step, attempts, claimed.script_set_id, script_result_id,
       coalesce(script_name, ''), payload, coalesce(options, '{{}}')
FROM claimed
JOIN node ON node.id = claimed.node_id
LEFT JOIN script_set ON script_set.id = claimed.script_set_id
LEFT JOIN script_result ON script_result.id = script_result_id
ORDER BY claimed.id
"""


class Queue:
    """The ``processing`` table, as one region process sees it.

    :param owner: the id of the process, as in ``region_process``.
    """

    def __init__(self, database: Database, owner: str) -> None:
        self._database = database
        self._owner = owner

    async def claim(self, limit: int, busy: Collection[int]) -> Sequence[Work]:
        """Claim up to ``limit`` rows that are due, each of another node; the oldest first.

        :param busy: the rows that this process is at. Others that it has claimed (it may not know, if the answer to the
            claim was lost) are due again.
        """
        values = {"owner": self._owner, "busy": list(busy), "limit": limit}
        return [
            Work(
                row_id, NodeName(node_id, system_id, hostname), step, attempts, set_id, result_id, script_name, payload,
                options, uuid.uuid4().hex,
            )
            for row_id, node_id, system_id, hostname, step, attempts, set_id, result_id, script_name, payload, options
            in await self._database.query(_CLAIM, values)
        ]  # fmt: skip

    async def take(self, transaction: Transaction, work: Work) -> bool:
        """Take a row off the queue in the transaction that does it. The node's row is locked by this, before all else.

        :return: whether it was there to be taken. Otherwise it is another's by now, or was done (the answer to the
            commit was lost), or its node is gone: nothing may be done for it.
        """
        await transaction.query("SELECT FROM node WHERE id = %s FOR NO KEY UPDATE", (work.node.id,))
        return bool(
            await transaction.execute(
                "DELETE FROM processing WHERE id = %s AND claimed_by = %s AND attempts = %s",
                (work.id, self._owner, work.attempts),
            )
        )

    async def put_back(self, works: Collection[Work], *, seconds: float = 0.0, counted: bool = False) -> None:
        """Let rows be claimed again by anyone, ``seconds`` from now; without having been tried, unless ``counted``."""
        await self._database.execute(
            """UPDATE processing
               SET claimed_by = NULL, claimed = NULL, attempts = attempts - %s,
                   not_before = clock_timestamp() + make_interval(secs => %s)
               WHERE id = ANY(%s) AND claimed_by = %s""",
            (0 if counted else 1, seconds, [work.id for work in works], self._owner),
        )
