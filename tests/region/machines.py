"""Nodes, scripts and runs in a test's database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import field, frozen

from region.database import Database
from region.nodes.life import Input
from region.nodes.runs import DEFAULTS, Run, RunOptions, begin
from region.nodes.statuses import NodeStatus, ResultType
from region.nodes.transitions import Change, change
from region.nodes.values import NodeName


@frozen
class Choice:
    """A script to run."""

    script_id: int
    script_version_id: int
    script_name: str
    timeout_seconds: int = 0
    parameters: Mapping[str, Any] = field(factory=dict)


async def make_node(
    database: Database, system_id: str = "abc234", *, hostname: str = "", status: NodeStatus = NodeStatus.NEW
) -> NodeName:
    """A node, by whatever way it came to its status."""
    name = hostname or f"node-{system_id}"
    row = await database.one(
        "INSERT INTO node (system_id, hostname, architecture, status) VALUES (%s, %s, 'amd64/generic', %s) "
        "RETURNING id",
        (system_id, name, status),
    )
    assert row is not None
    return NodeName(row[0], system_id, name)


async def make_script(
    database: Database,
    name: str,
    result_type: ResultType = ResultType.COMMISSIONING,
    *,
    timeout_seconds: int = 0,
    parameters: Mapping[str, Any] | None = None,
) -> Choice:
    """A script with one version."""
    row = await database.one("INSERT INTO script (name, script_type) VALUES (%s, %s) RETURNING id", (name, result_type))
    assert row is not None
    version = await database.one(
        "INSERT INTO script_version (script_id, number, content) VALUES (%s, 1, '#!/bin/sh') RETURNING id", row
    )
    assert version is not None
    return Choice(row[0], version[0], name, timeout_seconds, parameters or {})


async def start(
    database: Database,
    node: NodeName,
    commissioning: Sequence[Choice] | None,
    testing: Sequence[Choice] = (),
    *,
    options: RunOptions = RunOptions(),  # noqa: B008  # an immutable value
    **keywords: Any,
) -> Run:
    """Begin a run."""
    choices: dict[ResultType, Sequence[Choice]] = {ResultType.TESTING: testing}
    if commissioning is not None:
        choices[ResultType.COMMISSIONING] = commissioning
    keywords.setdefault("settings", DEFAULTS)
    return await database.transact(lambda transaction: begin(transaction, node.id, options, choices, **keywords))


async def happen(database: Database, node: NodeName, given: Input, **keywords: Any) -> Change:
    """Let ``given`` happen to a node."""
    return await database.transact(lambda transaction: change(transaction, node.id, given, **keywords))


async def status_of(database: Database, node: NodeName) -> NodeStatus:
    """The status of a node."""
    row = await database.one("SELECT status FROM node WHERE id = %s", (node.id,))
    assert row is not None
    return NodeStatus(row[0])


async def events_of(database: Database, node: NodeName) -> list[tuple[str, str]]:
    """Type and description of a node's events, oldest first."""
    rows = await database.query("SELECT type, description FROM event WHERE node = %s ORDER BY id", (node.system_id,))
    return [(kind, description) for kind, description in rows]
