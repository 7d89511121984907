"""How do the disks that were found become a node's rows? Each keeps its row, whatever it is called now.

What is configured on a disk, and that a node boots from it, hangs on its row: it must not change hands because two
cables were swapped.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Final

from attrs import frozen

from region.database import Transaction
from region.hardware.disks import Disk, Disks, order
from region.hardware.findings import changed, not_used
from region.nodes.findings import Finding
from region.nodes.values import NodeName

_COLUMNS: Final = (
    "name text, identity text, id_path text, model text, serial text, size bigint, block_size integer, tags text[], "
    "facts jsonb"
)
_NAMES: Final = ", ".join(column.rsplit(" ", 1)[0].strip() for column in _COLUMNS.split(","))


@frozen
class Row:
    """A row of the table."""

    id: int
    name: str
    identity: str
    model: str
    serial: str
    wwn: str
    size: int


@frozen
class Comparison:
    """What is to be done: rows that stay with what they are now, disks that are new, rows that are gone."""

    kept: tuple[tuple[Row, Disk], ...]
    new: tuple[Disk, ...]
    gone: tuple[Row, ...]


# How a disk is known again, best first. An empty answer says that this way it cannot be known.
_WAYS: Final[Sequence[Callable[[Row | Disk], Hashable]]] = (
    lambda one: one.identity,
    lambda one: one.wwn,
    lambda one: (one.model, one.serial) if one.serial else None,
    # One that gives no serial number, as long as it gave none, or did not before there was a driver that reads it.
    lambda one: (one.name, one.size),
)


def compare(rows: Sequence[Row], found: Sequence[Disk]) -> Comparison:
    """Which row is which disk. A row gets the identity of another only if no other has it any more."""
    kept: list[tuple[Row, Disk]] = []
    old, new = list(rows), list(found)
    for way in _WAYS:
        last = way is _WAYS[-1]
        known, unknown = _once(old, way), _once(new, way)
        pairs = [
            (known[key], unknown[key])
            for key in unknown
            if key in known and not (last and known[key].serial and unknown[key].serial)
        ]
        kept += pairs
        staying, there = {row.id for row, _ in pairs}, {disk.name for _, disk in pairs}
        old = [row for row in old if row.id not in staying]
        new = [disk for disk in new if disk.name not in there]
    return Comparison(tuple(kept), tuple(new), tuple(old))


async def write_disks(transaction: Transaction, node: NodeName, disks: Disks) -> Sequence[Finding]:
    """Write them; a disk that is gone is removed, and that is said."""
    locked = await transaction.one("SELECT boot_disk_id FROM node WHERE id = %s FOR NO KEY UPDATE", (node.id,))
    if locked is None:
        return ()  # deleted meanwhile, with all that it had
    boot_id = locked[0]
    rows = [
        Row(*row)
        for row in await transaction.query(
            """SELECT id, name, identity, model, serial, coalesce(facts->>'wwn', ''), size FROM block_device
               WHERE node_id = %s ORDER BY id FOR UPDATE""",
            (node.id,),
        )
    ]
    plan = compare(rows, disks.found)
    await transaction.execute("DELETE FROM block_device WHERE id = ANY(%s)", ([row.id for row in plan.gone],))
    await transaction.execute(
        f"""UPDATE block_device SET ({_NAMES}, updated) = (SELECT {_of("found")}, now())
            FROM jsonb_to_recordset(%s::jsonb) AS found (id bigint, {_COLUMNS}) WHERE block_device.id = found.id""",
        (json.dumps([{"id": row.id, **_values(disk)} for row, disk in plan.kept]),),
    )
    # In the order of their names: the first is what a node boots from unless something else is known.
    await transaction.execute(
        f"""INSERT INTO block_device (node_id, {_NAMES})
            SELECT %s, {_NAMES} FROM jsonb_to_recordset(%s::jsonb) AS found (number integer, {_COLUMNS})
            ORDER BY number""",
        (
            node.id,
            json.dumps([
                {"number": number, **_values(disk)}
                for number, disk in enumerate(sorted(plan.new, key=lambda disk: order(disk.name)))
            ]),
        ),
    )  # fmt: skip
    gone = [
        changed(
            f"disk {row.name} ({' '.join(filter(None, (row.model, row.serial))) or 'without a serial number'}, "
            f"{row.size} bytes) was not found any more, and is removed"
            + (": it was the node's boot disk" if row.id == boot_id else "")
        )
        for row in plan.gone
    ]
    return [*(not_used(sentence) for sentence in disks.problems), *gone]


def _once(many: Iterable[Any], way: Callable[[Any], Hashable]) -> dict[Hashable, Any]:
    """Those of ``many`` that are the only one with their key, by it."""
    keys = [(way(one), one) for one in many]
    times = Counter(key for key, _ in keys)
    return {key: one for key, one in keys if key and times[key] == 1}


def _of(table: str) -> str:
    return ", ".join(f"{table}.{name}" for name in _NAMES.split(", "))


def _values(disk: Disk) -> dict[str, Any]:
    return {
        "name": disk.name, "identity": disk.identity, "id_path": disk.id_path, "model": disk.model,
        "serial": disk.serial, "size": disk.size, "block_size": disk.block_size, "tags": list(disk.tags),
        "facts": {**disk.facts, "paths": list(disk.paths)},
    }  # fmt: skip
