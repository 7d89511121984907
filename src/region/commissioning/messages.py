"""What becomes of what a node reports beside its signals? Each report of cloud-init or curtin is an event of the node,
and each file that came with it a result of its own."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, Final

import psycopg2
from attrs import frozen

from region import events
from region.commissioning.queue import Work
from region.database import Transaction
from region.nodes import kinds
from region.nodes.life import Input
from region.nodes.statuses import NodeStatus, ResultType, ScriptStatus
from region.nodes.transitions import change, lock
from rpc.events import Kind

LAST_STAGE: Final = "modules-final"
"""The stage of cloud-init in which the runner runs: when it has ended, so has the runner."""

MAX_FILES: Final = 1000
MAX_BYTES: Final = 1 << 30
"""How many files, and how much in them, is kept of a node; the database's own bounds (0011_bounds.sql) are the same."""

_KINDS: Final[Mapping[NodeStatus, tuple[Kind, Kind]]] = {
    NodeStatus.COMMISSIONING: (kinds.NODE_COMMISSIONING_EVENT, kinds.NODE_COMMISSIONING_EVENT_FAILED),
    NodeStatus.TESTING: (kinds.NODE_COMMISSIONING_EVENT, kinds.NODE_COMMISSIONING_EVENT_FAILED),
    NodeStatus.DEPLOYING: (kinds.NODE_INSTALL_EVENT, kinds.NODE_INSTALL_EVENT_FAILED),
    NodeStatus.DEPLOYED: (kinds.NODE_STATUS_EVENT, kinds.NODE_POST_INSTALL_EVENT_FAILED),
}
"""The kind of a report, and of one that says that something failed, by the status of the node."""


@frozen
class Report:
    """A report as :func:`region.commissioning.intake.message_document` has it."""

    event_type: str
    origin: str
    name: str
    description: str
    result: str
    files: tuple[Mapping[str, Any], ...]

    @property
    def has_failed(self) -> bool:
        """Whether it says that something failed."""
        return self.result in ("FAIL", "FAILURE")

    @property
    def ends_all(self) -> bool:
        """Whether it says that the runner has ended, and cloud-init with a failure."""
        return (
            self.has_failed
            and (self.origin, self.event_type) == ("cloudinit", "finish")
            and self.name.strip("/") == LAST_STAGE
        )

    @property
    def text(self) -> str:
        """All that it says, for people."""
        result = f" ({self.result})" if self.result else ""
        return f"{self.origin} {self.event_type} {self.name}{result}: {self.description}"


def read(payload: Mapping[str, Any]) -> Report:
    """The report that a row of the queue holds."""
    fields = {name: str(payload[name]) for name in ("event_type", "origin", "name", "description", "result")}
    return Report(**fields, files=tuple(payload["files"]))


async def message(transaction: Transaction, work: Work) -> None:
    """Write what a row of the queue says, for people: a report, or an event that storing a signal gave rise to."""
    if "kind" in work.payload:
        kind: Kind = getattr(kinds, work.payload["kind"])
        await events.record(transaction, work.node, kind, str(work.payload["description"]))
        return
    report = read(work.payload)
    node, status, _ = await lock(transaction, work.node.id)
    kept = await _keep_files(transaction, work, report)
    is_end = report.ends_all and await _is_awaited(transaction, work)
    usual, failed = _KINDS.get(status, (kinds.NODE_STATUS_EVENT, kinds.NODE_STATUS_EVENT))
    await events.record(transaction, node, failed if report.has_failed else usual, report.text + kept)
    if is_end and status in (NodeStatus.COMMISSIONING, NodeStatus.TESTING):
        await change(
            transaction,
            node.id,
            Input.FAIL,
            reason=f"cloud-init on the node ended with a failure, before its runner said that it was done "
            f"({report.description}). Look at the console of the node, or at its /var/log/cloud-init-output.log.",
        )


async def _is_awaited(transaction: Transaction, work: Work) -> bool:
    """Whether the run is going on, and its node has not said that it is done."""
    row = await transaction.one(
        """SELECT FROM script_set JOIN node ON script_set.id IN (commissioning_set_id, testing_set_id)
           WHERE script_set.id = %s AND ended IS NULL AND signalled IS NULL""",
        (work.set_id,),
    )
    return row is not None


async def _keep_files(transaction: Transaction, work: Work, report: Report) -> str:
    """Keep files, each as the output of a result of its own, in a run that has no other purpose.

    :return: what people are to be told of those for which there is no room.
    """
    if not report.files:
        return ""
    run = await transaction.one(
        "SELECT id FROM script_set WHERE node_id = %s AND result_type = %s ORDER BY id DESC LIMIT 1",
        (work.node.id, ResultType.INSTALLATION),
    ) or await transaction.one(
        """INSERT INTO script_set (node_id, result_type, ended) VALUES (%s, %s, clock_timestamp()) RETURNING id""",
        (work.node.id, ResultType.INSTALLATION),
    )
    assert run is not None, "INSERT … RETURNING gives one row"
    used = await transaction.one(
        """SELECT (SELECT count(*) FROM script_result WHERE script_set_id = %(run)s),
                  coalesce((SELECT bytes FROM node_usage WHERE node_id = %(node)s AND script_set_id = %(run)s), 0)""",
        {"run": run[0], "node": work.node.id},
    )
    assert used is not None, "this gives one row"
    count, size = used
    left_out = 0
    for file in report.files:
        content = base64.b64decode(file["content"])
        if count >= MAX_FILES or size + len(content) > MAX_BYTES:
            left_out += 1
            continue
        count, size = count + 1, size + len(content)
        await _keep(transaction, run[0], report, file, content)
    return f" ({left_out} of its {len(report.files)} files are not kept: the node has as many as it can have)" * bool(
        left_out
    )


async def _keep(transaction: Transaction, run: int, report: Report, file: Mapping[str, Any], content: bytes) -> None:
    exit_status = file["result"]
    well = exit_status == 0 if exit_status is not None else not report.has_failed
    row = await transaction.one(
        """INSERT INTO script_result (script_set_id, script_name, status, exit_status, started, ended)
           VALUES (%s, %s, %s, %s, clock_timestamp(), clock_timestamp()) RETURNING id""",
        (run, file["path"] or "unnamed", ScriptStatus.PASSED if well else ScriptStatus.FAILED, exit_status),
    )
    assert row is not None, "INSERT … RETURNING gives one row"
    await transaction.execute(
        "INSERT INTO script_output (script_result_id, name, content) VALUES (%s, 'output', %s)",
        (row[0], psycopg2.Binary(content)),
    )
