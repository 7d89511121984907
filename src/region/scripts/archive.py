"""What is a node handed to run? A tar of the scripts that it has not finished, with an index that says how to run each.

Building it is pure; :func:`pending` reads what is to be in it. Only unfinished results of the node's current runs are,
so a node that fetches it again goes on where it was. Tests that are about disks or interfaces are given theirs here,
when they are about to run: by then commissioning has found what there is.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any, Final

from attrs import field, frozen
from psycopg2.extras import Json

from region.commissioning.signals import OUTPUTS
from region.database import Database, Transaction
from region.images.threads import in_thread
from region.nodes.statuses import UNFINISHED, NodeStatus, ResultType, ScriptStatus
from region.scripts.parameters import ALL, DEVICES, Device, expand, unresolved
from rpc.fetch import RunInThread

VERSION: Final = "1.0"
_UNFINISHED: Final = sorted(status.value for status in UNFINISHED)
_FOLDERS: Final = {ResultType.COMMISSIONING: "commissioning", ResultType.TESTING: "testing"}


class DevicesUnknown(Exception):
    """Tests are about disks or interfaces, and what there are is being found out: ask again in a moment."""


@frozen
class Entry:
    """One unfinished result: what is run for it, and how.

    ``outputs`` is what it has sent so far, by the keys of :data:`~region.commissioning.signals.OUTPUTS`; ``mtime`` is
    when its script was written, in seconds since the epoch.
    """

    result_id: int
    version_id: int
    name: str
    result_type: ResultType = field(converter=ResultType)
    content: bytes = field(repr=False)
    mtime: int = 0
    timeout_seconds: int = 0
    hardware_type: int = 0
    parallel: int = 0
    parameters: Mapping[str, Any] = field(factory=dict)
    packages: Mapping[str, Any] = field(factory=dict)
    may_reboot: bool = False
    has_started: bool = False
    outputs: Mapping[str, bytes] = field(factory=dict, repr=False)


def build(entries: Sequence[Entry]) -> bytes:
    """An uncompressed tar: the scripts (mode 0755) in ``commissioning/`` and ``testing/``, in ``out/`` what those that
    were begun have sent, and ``index.json``; the members, and the entries of the index, in order of their names."""
    paths: dict[tuple[ResultType, str], int] = {}
    members: dict[str, tuple[bytes, int, int]] = {}
    index: dict[str, list[Mapping[str, Any]]] = {f"{folder}_scripts": [] for folder in _FOLDERS.values()}
    for entry in sorted(entries, key=lambda one: (one.name, one.result_id)):
        folder = _FOLDERS[entry.result_type]
        path = f"{folder}/{entry.name}"
        if paths.setdefault((entry.result_type, entry.name), entry.version_id) != entry.version_id:
            path = f"{folder}/{entry.version_id}/{entry.name}"
        members[path] = (entry.content, 0o755, entry.mtime)
        index[f"{folder}_scripts"].append(_indexed(entry, path))
        for kind, content in entry.outputs.items():
            members[f"out/{entry.name}.{entry.result_id}{OUTPUTS[kind]}"] = (content, 0o644, entry.mtime)
    newest = max((entry.mtime for entry in entries), default=0)
    members["index.json"] = (json.dumps({VERSION: index}, indent=1).encode(), 0o644, newest)
    archive = BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name in sorted(members):
            content, mode, mtime = members[name]
            member = tarfile.TarInfo(name)
            member.size, member.mode, member.mtime = len(content), mode, mtime
            tar.addfile(member, BytesIO(content))
    return archive.getvalue()


def _indexed(entry: Entry, path: str) -> Mapping[str, Any]:
    return {
        "name": entry.name,
        "path": path,
        "script_result_id": entry.result_id,
        "script_version_id": entry.version_id,
        "timeout_seconds": entry.timeout_seconds,
        "parallel": entry.parallel,
        "hardware_type": entry.hardware_type,
        "parameters": entry.parameters,
        "packages": entry.packages,
        "for_hardware": [],
        "may_reboot": entry.may_reboot,
        "has_started": entry.has_started,
    }


@frozen
class NodeScripts:
    """Who hands nodes their scripts, over a database."""

    database: Database
    run_in_thread: RunInThread = in_thread

    async def pending(self, node_id: int) -> bytes | None:
        """As :func:`pending`."""
        return await pending(self.database, node_id, run_in_thread=self.run_in_thread)


async def pending(database: Database, node_id: int, *, run_in_thread: RunInThread = in_thread) -> bytes | None:
    """The archive of the scripts that a node has still to run; None if there are none.

    :raises DevicesUnknown: while the commissioning that tests wait for is being processed.
    :raises DatabaseUnavailable: if the database cannot be reached.
    """
    entries = await database.transact(lambda transaction: _read(transaction, node_id))
    return await run_in_thread(build, entries) if entries else None


async def _read(transaction: Transaction, node_id: int) -> Sequence[Entry]:
    node = await transaction.one(
        """SELECT n.status, n.commissioning_set_id, n.testing_set_id,
                  c.signal_status = 'TESTING' AND c.signalled IS NOT NULL AND c.ended IS NULL
           FROM node n LEFT JOIN script_set c ON c.id = n.commissioning_set_id WHERE n.id = %s""",
        (node_id,),
    )
    if node is None:
        return ()
    status, commissioning, testing, is_processed = node
    found = await _unfinished(transaction, testing)
    if any(unresolved(values) for _, values in found):
        if status == NodeStatus.TESTING:
            await _resolve(transaction, node_id)
        elif is_processed:
            raise DevicesUnknown("The region is still finding out which disks and interfaces there are to test.")
    sets = [testing, commissioning if status == NodeStatus.COMMISSIONING else None]
    rows = await transaction.query(
        """SELECT r.id, v.id, r.script_name, t.result_type, v.content, extract(epoch FROM v.created)::bigint,
                  r.timeout_seconds, s.hardware_type, s.parallel, r.parameters, s.packages, s.may_reboot, r.status
           FROM script_result r JOIN script_set t ON t.id = r.script_set_id
                JOIN script_version v ON v.id = r.script_version_id JOIN script s ON s.id = v.script_id
           WHERE r.script_set_id = ANY (%s::bigint[]) AND r.status = ANY (%s::int[]) AND t.result_type = ANY (%s::int[])
           ORDER BY r.script_name, r.id""",
        ([one for one in sets if one is not None], _UNFINISHED, [kind.value for kind in _FOLDERS]),
    )
    outputs: dict[int, dict[str, bytes]] = {}
    for result, name, content in await transaction.query(
        """SELECT script_result_id, name, content FROM script_output
           WHERE script_result_id = ANY (%s::bigint[]) AND late_result_id IS NULL""",
        ([row[0] for row in rows],),
    ):
        outputs.setdefault(result, {})[name] = content
    return [_entry(row, outputs.get(row[0], {})) for row in rows]


def _entry(row: tuple[Any, ...], outputs: Mapping[str, bytes]) -> Entry:
    *values, status = row
    values += [status != ScriptStatus.PENDING, outputs]
    return Entry(*values)


async def _unfinished(transaction: Transaction, script_set: int | None) -> list[tuple[int, Mapping[str, Any]]]:
    rows = await transaction.query(
        """SELECT id, parameters FROM script_result
           WHERE script_set_id = %s AND status = %s AND script_version_id IS NOT NULL ORDER BY id""",
        (script_set, ScriptStatus.PENDING.value),
    )
    return [(row[0], row[1]) for row in rows]


async def _resolve(transaction: Transaction, node_id: int) -> None:
    """Give each test that is about disks or interfaces one, and have it once for each that it is about."""
    row = await transaction.one("SELECT status, testing_set_id FROM node WHERE id = %s FOR NO KEY UPDATE", (node_id,))
    if row is None or row[0] != NodeStatus.TESTING:
        return
    devices = await _devices(transaction, node_id)
    for result, values in await _unfinished(transaction, row[1]):
        if not unresolved(values):
            continue
        expanded = expand(values, devices)
        if not expanded:
            await _give_up(transaction, result, values)
            continue
        await transaction.execute(
            "UPDATE script_result SET parameters = %s, updated = now() WHERE id = %s", (Json(expanded[0]), result)
        )
        for one in expanded[1:]:
            await transaction.execute(
                """INSERT INTO script_result
                          (script_set_id, script_id, script_version_id, script_name, timeout_seconds, parameters)
                   SELECT script_set_id, script_id, script_version_id, script_name, timeout_seconds, %s
                   FROM script_result WHERE id = %s""",
                (Json(one), result),
            )


async def _give_up(transaction: Transaction, result: int, values: Mapping[str, Any]) -> None:
    """End a test that is about nothing that there is, saying so: skipped if it was to test all, else failed."""
    wanted = [(values[name]["type"], values[name]["value"]) for name in unresolved(values)]
    is_all = all(value == ALL for _, value in wanted)
    listed = " and ".join(
        f"any {_SAID[kind]}" if value == ALL else f"the {_SAID[kind]} {value!r}" for kind, value in wanted
    )
    status = ScriptStatus.SKIPPED if is_all else ScriptStatus.FAILED
    await transaction.execute(
        "UPDATE script_result SET status = %s, ended = now(), updated = now() WHERE id = %s", (status.value, result)
    )
    await transaction.execute(
        "INSERT INTO script_output (script_result_id, name, content) VALUES (%s, 'output', %s) ON CONFLICT DO NOTHING",
        (result, f"The region did not have this run: commissioning has not found {listed} on the node.\n".encode()),
    )


_SAID: Final = {"storage": "disk", "interface": "network interface"}


async def _devices(transaction: Transaction, node_id: int) -> Mapping[str, Sequence[Device]]:
    disks = await transaction.query(
        "SELECT name, id_path, model, serial, tags FROM block_device WHERE node_id = %s ORDER BY id", (node_id,)
    )
    interfaces = await transaction.query(
        """SELECT name, coalesce(mac_address, ''), coalesce(facts->>'vendor', ''), coalesce(facts->>'product', '')
           FROM interface WHERE node_id = %s AND type = 'physical' AND enabled ORDER BY id""",
        (node_id,),
    )
    storage, interface = DEVICES
    return {
        storage: [
            Device({"name": name, "id_path": path, "model": model, "serial": serial}, tuple(tags))
            for name, path, model, serial, tags in disks
        ],
        interface: [
            Device({"name": name, "mac_address": mac, "vendor": vendor, "product": product})
            for name, mac, vendor, product in interfaces
        ],
    }
