"""How do the interfaces that were found become a node's rows? Each keeps its row, by MAC, whatever it is called now.

A MAC that another node has stays there: two machines may have one by mistake, and which of them is right, only people
know. Rows of bonds, bridges and vlans are configuration and are left alone.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from typing import Any

from attrs import frozen

from region.database import Transaction
from region.hardware.boot import use_waiting_boot_mac
from region.hardware.findings import changed, not_used, taken
from region.hardware.interfaces import Interface, Interfaces
from region.nodes.findings import Finding
from region.nodes.values import NodeName

_COLUMNS = "(name text, mac_address text, link_connected boolean, discovered jsonb, facts jsonb)"


@frozen
class Row:
    """A row of the table; ``key`` is the MAC, or an InfiniBand port's GUID, or "" if it has neither."""

    id: int
    name: str
    is_physical: bool
    key: str


@frozen
class Comparison:
    """What is to be done: rows that stay with what they are now, interfaces that are new, rows that are gone."""

    kept: tuple[tuple[Row, Interface], ...]
    new: tuple[Interface, ...]
    gone: tuple[Row, ...]


def compare(rows: Sequence[Row], found: Sequence[Interface]) -> Comparison:
    """Which row is which interface, by key."""
    physical = [row for row in rows if row.is_physical]
    by_key = {row.key: row for row in physical if row.key}
    kept = tuple((by_key[one.key], one) for one in found if one.key in by_key)
    staying = {row.id for row, _ in kept}
    return Comparison(
        kept,
        tuple(one for one in found if one.key not in by_key),
        tuple(row for row in physical if row.id not in staying),
    )


def settled_name(interface: Interface, taken: Container[str]) -> str:
    """Its name, or a longer one, which no hardware has, if something that is no hardware has that."""
    name = interface.name
    while name in taken:
        name += f"-{interface.key.replace(':', '')}"
    return name


async def write_interfaces(transaction: Transaction, node: NodeName, interfaces: Interfaces) -> Sequence[Finding]:
    """Write them; if none was found, those that are known stay."""
    findings = [not_used(sentence) for sentence in interfaces.problems]
    if not interfaces.found:
        return [*findings, not_used("no network interface was found that is hardware; those that were known are kept")]
    locked = await transaction.one(
        "SELECT boot_interface_id, facts FROM node WHERE id = %s FOR NO KEY UPDATE", (node.id,)
    )
    if locked is None:
        return ()  # deleted meanwhile, with all that it had
    boot_id, facts = locked
    rows = [
        Row(id_, name, type_ == "physical", mac or guid or "")
        for id_, name, type_, mac, guid in await transaction.query(
            """SELECT id, name, type, mac_address, facts->>'guid' FROM interface WHERE node_id = %s
               ORDER BY id FOR UPDATE""",
            (node.id,),
        )
    ]
    plan = compare(rows, interfaces.found)
    taken = {row.name for row in rows if not row.is_physical}
    names = {one.key: settled_name(one, taken) for one in interfaces.found}
    for one in interfaces.found:
        if names[one.key] != one.name:
            findings.append(not_used(f"network interface {one.name} is kept as {names[one.key]}: the name is in use"))
    findings += await _remove(transaction, plan.gone, boot_id)
    await _keep(transaction, plan.kept, names)
    findings += await _add(transaction, node, plan.new, names)
    boot_mac = facts.get("boot_mac")
    is_unknown = boot_id is None or boot_id in {row.id for row in plan.gone}
    if boot_mac and (is_unknown or facts.get("boot_mac_waits")):
        findings += await use_waiting_boot_mac(transaction, node, boot_mac)
    return findings


async def _remove(transaction: Transaction, gone: Sequence[Row], boot_id: int | None) -> Sequence[Finding]:
    await transaction.execute("DELETE FROM interface WHERE id = ANY(%s)", ([row.id for row in gone],))
    return [
        changed(
            f"network interface {row.name} ({row.key or 'no MAC address'}) was not found any more, and is removed"
            + (": the node has no boot interface until it is seen from which it boots" if row.id == boot_id else "")
        )
        for row in gone
    ]


async def _keep(transaction: Transaction, kept: Sequence[tuple[Row, Interface]], names: Mapping[str, str]) -> None:
    # Interfaces may have swapped names, and no name is there twice even for a moment. No kernel gives such names.
    renamed = [row.id for row, one in kept if row.name != names[one.key]]
    await transaction.execute("UPDATE interface SET name = 'renaming: ' || id WHERE id = ANY(%s)", (renamed,))
    rows = [{"id": row.id, **_values(one, names)} for row, one in kept]
    await transaction.execute(
        f"""UPDATE interface SET name = found.name,
                   link_connected = coalesce(found.link_connected, interface.link_connected),
                   discovered = found.discovered, facts = found.facts, updated = now()
            FROM jsonb_to_recordset(%s::jsonb) AS found {_COLUMNS.replace("(", "(id bigint, ", 1)}
            WHERE interface.id = found.id""",
        (json.dumps(rows),),
    )


async def _add(
    transaction: Transaction, node: NodeName, new: Sequence[Interface], names: Mapping[str, str]
) -> Sequence[Finding]:
    # In the order of their MACs, so that two nodes with the same ones wait for each other in one direction only.
    inserted = await transaction.query(
        f"""INSERT INTO interface (node_id, name, mac_address, link_connected, discovered, facts)
            SELECT %s, name, mac_address, coalesce(link_connected, true), discovered, facts
            FROM jsonb_to_recordset(%s::jsonb) AS found {_COLUMNS} ORDER BY mac_address
            ON CONFLICT (mac_address) WHERE type = 'physical' DO NOTHING RETURNING mac_address""",
        (node.id, json.dumps([_values(one, names) for one in new])),
    )
    there = {mac for (mac,) in inserted}
    refused = [one for one in new if one.mac and one.mac not in there]
    if not refused:
        return ()
    owners = {
        mac: f"node {hostname} ({system_id})"
        for mac, hostname, system_id in await transaction.query(
            """SELECT mac_address, hostname, system_id FROM interface JOIN node ON node.id = node_id
               WHERE mac_address = ANY(%s) AND type = 'physical'""",
            ([one.mac for one in refused],),
        )
    }
    return [
        taken(
            f"network interface {one.name} has the MAC address {one.mac}, which {owners.get(one.mac, 'another node')} "
            "has too: it stays there and is not added here. If it was moved, commission that node again or delete it, "
            "then this one; if both have it, give one of them another address."
        )
        for one in refused
    ]


def _values(one: Interface, names: Mapping[str, str]) -> dict[str, Any]:
    discovered = [{"address": address, "prefix": prefix} for address, prefix in one.addresses]
    return {
        "name": names[one.key], "mac_address": one.mac or None, "link_connected": one.connected,
        "discovered": discovered, "facts": dict(one.facts),
    }  # fmt: skip
