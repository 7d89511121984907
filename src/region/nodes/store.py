"""What is known of nodes? All of one, or of a page of many, in one statement whose cost is that of the page."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from attrs import field, frozen

from region.database import Database
from region.nodes import tokens
from region.nodes.life import REQUESTS, Input, allowed
from region.nodes.statuses import NodeStatus, ScriptStatus
from region.nodes.tokens import NodeToken
from region.nodes.values import NodeName

PAGE: Final = 50
"""Nodes that are read at once, however many are wanted: so many are shown without holding up anything else."""


@frozen
class Interface:
    """A network interface of a node. ``discovered`` and ``links`` are lists of objects, as in the database."""

    id: int
    name: str
    type: str
    mac_address: str | None
    enabled: bool
    link_connected: bool
    discovered: Sequence[Mapping[str, Any]]
    links: Sequence[Mapping[str, Any]]
    facts: Mapping[str, Any]


@frozen
class BlockDevice:
    """A disk of a node. ``size`` and ``block_size`` are in bytes."""

    id: int
    name: str
    model: str
    serial: str
    id_path: str
    size: int
    block_size: int
    tags: Sequence[str]


@frozen
class Node:
    """All that is known of a node, except what its scripts wrote. ``memory`` is in MiB."""

    name: NodeName
    description: str
    architecture: str
    status: NodeStatus
    previous_status: NodeStatus
    status_changed: datetime
    status_message: str
    owner: str
    power_type: str
    power_parameters: Mapping[str, Any] = field(repr=False)
    boot_method: str
    memory: int
    cpu_count: int
    facts: Mapping[str, Any] = field(repr=False)
    storage_layout: str
    storage: Mapping[str, Any] = field(repr=False)
    osystem: str
    distro_series: str
    hwe_kernel: str
    created: datetime
    updated: datetime
    boot_interface_id: int | None
    boot_disk_id: int | None
    commissioning_set_id: int | None
    testing_set_id: int | None
    last_ping: datetime | None
    heard: str
    tags: Sequence[str]
    interfaces: Sequence[Interface]
    block_devices: Sequence[BlockDevice]
    commissioning: Sequence[ScriptStatus]
    """The statuses of the results of its last commissioning."""
    testing: Sequence[ScriptStatus]
    """Those of its last tests."""

    @property
    def allowed(self) -> frozenset[Input]:
        """All that people can ask for now."""
        return allowed(self.status, self.previous_status) & REQUESTS


@frozen
class Wanted:
    """Which nodes: those that have one of the values of each field that has any, and all of ``tags``."""

    system_ids: Collection[str] = ()
    hostnames: Collection[str] = ()
    mac_addresses: Collection[str] = ()
    statuses: Collection[NodeStatus] = ()
    architectures: Collection[str] = ()
    tags: Collection[str] = ()

    @property
    def condition(self) -> tuple[str, dict[str, Any]]:
        """As SQL, and its parameters."""
        parts = {
            "node.system_id = ANY(%(system_ids)s)": list(self.system_ids),
            "node.hostname = ANY(%(hostnames)s)": list(self.hostnames),
            "node.id IN (SELECT node_id FROM interface WHERE mac_address = ANY(%(mac_addresses)s))": list(
                self.mac_addresses
            ),
            "node.status = ANY(%(statuses)s)": [int(each) for each in self.statuses],
            "node.architecture = ANY(%(architectures)s)": list(self.architectures),
            "NOT EXISTS (SELECT FROM unnest(%(tags)s::text[]) AS wanted (name) WHERE NOT EXISTS (SELECT FROM node_tag"
            " JOIN tag ON tag.id = tag_id WHERE node_id = node.id AND tag.name = wanted.name))": list(self.tags),
        }
        names = ("system_ids", "hostnames", "mac_addresses", "statuses", "architectures", "tags")
        given = [part for part, value in parts.items() if value]
        return " AND ".join(given) or "true", dict(zip(names, parts.values(), strict=True))


@frozen
class Problem:
    """A step of the region's own that failed for a node: which, for which script if it is about one, with which error,
    and what the log has its traceback under."""

    step: str
    script: str
    error_type: str
    error: str
    correlation: str
    occurred: datetime


_PROBLEMS: Final = 20
"""Steps that are shown at most, newest first."""

_COLUMNS: Final = """
    node.id, node.system_id, node.hostname, node.description, node.architecture, node.status, node.previous_status,
    node.status_changed, node.status_message, node.owner, node.power_type, node.power_parameters, node.boot_method,
    node.memory, node.cpu_count, node.facts, node.storage_layout, node.storage, node.osystem, node.distro_series,
    node.hwe_kernel, node.created, node.updated, node.boot_interface_id, node.boot_disk_id, node.commissioning_set_id,
    node.testing_set_id, node_heartbeat.last_ping, coalesce(node_heartbeat.heard, ''),
    ARRAY(SELECT tag.name FROM node_tag JOIN tag ON tag.id = tag_id WHERE node_id = node.id ORDER BY tag.name),
    ARRAY(SELECT json_build_array(id, name, type, mac_address, enabled, link_connected, discovered, links, facts)
          FROM interface WHERE node_id = node.id ORDER BY id),
    ARRAY(SELECT json_build_array(id, name, model, serial, id_path, size, block_size, tags)
          FROM block_device WHERE node_id = node.id ORDER BY id),
    ARRAY(SELECT status FROM script_result WHERE script_set_id = node.commissioning_set_id),
    ARRAY(SELECT status FROM script_result WHERE script_set_id = node.testing_set_id)
"""


class NodeStore:
    """The nodes, to be read."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def find(self, wanted: str) -> NodeName | None:
        """The node with this system id or, if there is none, this host name."""
        if not (wanted.isascii() and wanted.isprintable()):
            return None  # no node is called so, and PostgreSQL has no text with some of that
        row = await self._database.one(
            """SELECT id, system_id, hostname FROM node WHERE system_id = %(wanted)s OR hostname = lower(%(wanted)s)
               ORDER BY system_id = %(wanted)s DESC LIMIT 1""",
            {"wanted": wanted},
        )
        return None if row is None else NodeName(*row)

    async def read(self, wanted: str) -> Node | None:
        """All of the node with this system id or host name."""
        name = await self.find(wanted)
        if name is None:
            return None
        found = await self._read("node.id = %(number)s", {"number": name.id}, 1)
        return found[0] if found else None

    async def problems(self, node: Node) -> Sequence[Problem]:
        """The steps that failed for the runs that the node's status is about, newest first."""
        rows = await self._database.query(
            """SELECT step, coalesce(script_name, ''), error_type, error, step_failure.correlation, occurred
               FROM step_failure LEFT JOIN script_result ON script_result.id = script_result_id
               WHERE step_failure.node_id = %s AND step_failure.script_set_id = ANY(present_runs(%s))
               ORDER BY step_failure.id DESC LIMIT %s""",
            (node.name.id, node.name.id, _PROBLEMS),
        )
        return [Problem(*row) for row in rows]

    async def token(self, node: NodeName) -> NodeToken | None:
        """The credentials of a node, unless they are retired."""
        return await tokens.current(self._database, node.id)

    async def count(self) -> Mapping[NodeStatus, int]:
        """How many nodes have which status."""
        rows = await self._database.query("SELECT status, count(*) FROM node GROUP BY status")
        return {NodeStatus(status): count for status, count in rows}

    async def deployed(self) -> Mapping[tuple[str, str, str], int]:
        """How many nodes are deployed with which operating system, release and architecture."""
        rows = await self._database.query(
            """SELECT osystem, distro_series, split_part(architecture, '/', 1), count(*) FROM node
               WHERE status = %s GROUP BY 1, 2, 3""",
            (NodeStatus.DEPLOYED,),
        )
        return {(system, release, architecture): count for system, release, architecture, count in rows}

    async def page(self, wanted: Wanted, *, after: int = 0, limit: int = PAGE) -> Sequence[Node]:
        """At most ``limit`` of the nodes that are ``wanted``: the oldest whose number is over ``after``."""
        condition, values = wanted.condition
        return await self._read(f"node.id > %(after)s AND {condition}", {**values, "after": after}, limit)

    async def pages(self, wanted: Wanted, *, after: int = 0, limit: int | None = None) -> AsyncIterator[Sequence[Node]]:
        """All nodes that are ``wanted`` (at most ``limit``), oldest first, page by page. What changes meanwhile is
        seen as it is when its page is read; no node is seen twice."""
        left = limit
        while left is None or left > 0:
            size = PAGE if left is None else min(PAGE, left)
            found = await self.page(wanted, after=after, limit=size)
            if found:
                yield found
            if len(found) < size:
                return
            after = found[-1].name.id
            left = None if left is None else left - size

    async def _read(self, condition: str, values: Mapping[str, Any], limit: int) -> list[Node]:
        rows = await self._database.query(
            f"""SELECT {_COLUMNS} FROM node LEFT JOIN node_heartbeat ON node_heartbeat.node_id = node.id
                WHERE {condition} ORDER BY node.id LIMIT %(limit)s""",
            {**values, "limit": limit},
        )
        return [_node(row) for row in rows]


def _node(row: Sequence[Any]) -> Node:
    (
        number, system_id, hostname, description, architecture, status, previous, *others, tags, interfaces, disks,
        commissioning, testing,
    ) = row  # fmt: skip
    name = NodeName(number, system_id, hostname)
    values: list[Any] = [
        name, description, architecture, NodeStatus(status), NodeStatus(previous), *others, tuple(tags),
        tuple(Interface(*each) for each in interfaces), tuple(BlockDevice(*each) for each in disks),
        [ScriptStatus(each) for each in commissioning], [ScriptStatus(each) for each in testing],
    ]  # fmt: skip
    return Node(*values)
