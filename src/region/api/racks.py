"""The rack controllers: what is known of them, what they hold, and telling them to fetch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from twisted.logger import Logger

from region.answers import wording
from region.answers.combine import RackAnswer
from region.answers.documents import BASE, rack_entry
from region.api.operations import NOTHING, ApiError, Call, Invalid, NotFound, Reply, document, text
from region.api.parts import IRack, Parts
from region.processes import Connections
from region.racks import RackRefused
from rpc.outcomes import NotConnected

log = Logger()

NOT_LINKED: Final = Connections()


async def list_racks(parts: Parts, call: Call) -> Reply:
    """Every enrolled rack, and every one that was revoked, by name."""
    await parts.published.read()
    connections = await parts.connections()
    racks = sorted(_all(parts), key=lambda rack: rack.name)
    return document([_rack(parts, rack, connections.get(rack.system_id, NOT_LINKED)) for rack in racks])


async def read_rack(parts: Parts, call: Call) -> Reply:
    """One rack."""
    await parts.published.read()
    connections = await parts.connections()
    rack = _find(parts, call, revoked=True)
    return document(_rack(parts, rack, connections.get(rack.system_id, NOT_LINKED)))


async def rename_rack(parts: Parts, call: Call) -> Reply:
    """The rack gets another name."""
    rack = _find(parts, call, revoked=True)
    name = call.values.get("hostname", rack.name)
    try:
        await parts.racks.store.rename(rack.system_id, name)
    except RackRefused as refused:
        raise Invalid({"hostname": [str(refused)]}) from refused
    await parts.racks.refresh()
    log.info("Rack {old} ({rack}) is named {name} on request.", old=rack.name, rack=rack.system_id, name=name)
    return await read_rack(parts, call_for(rack.system_id))


async def revoke_rack(parts: Parts, call: Call) -> Reply:
    """The rack is cut off, in every region process, and its certificate is refused."""
    rack = _find(parts, call, revoked=True)
    await parts.racks.store.revoke(rack.system_id)
    await parts.racks.refresh()
    log.warn("Rack {name} ({rack}) was revoked on request.", name=rack.name, rack=rack.system_id)
    return await read_rack(parts, call_for(rack.system_id))


def call_for(system_id: str) -> Call:
    """A call about the rack with this id, which stays when its name changes."""
    return Call(path={"system_id": system_id})


async def forget_rack(parts: Parts, call: Call) -> Reply:
    """The rack goes: nothing waits for it any more, and its certificate is refused."""
    rack = _find(parts, call, revoked=True)
    await parts.racks.store.forget(rack.system_id)
    await parts.racks.refresh()
    log.info("Rack {name} ({rack}) was forgotten on request.", name=rack.name, rack=rack.system_id)
    return NOTHING


async def list_boot_images(parts: Parts, call: Call) -> Reply:
    """What one rack holds, asked now."""
    rack = _find(parts, call)
    published = await parts.published.read()
    answer = await parts.asker.ask_one(rack.system_id)
    entry = rack_entry(answer, published)
    images = []
    if answer.held is not None:
        for image in answer.held.catalogue.manifest.images:
            name = f"{image.os}/{image.release or image.attribute('bootloader-type')}"
            subarches = [word.strip() for word in image.attribute("subarches").split(",") if word.strip()]
            images.append(
                {
                    "name": name,
                    "architecture": image.arch,
                    "subarches": subarches or [image.subarch or "generic"],
                    "label": image.label,
                    "version": image.version,
                }
            )
    return document(
        {
            "images": images,
            "connected": not isinstance(answer.outcome, NotConnected),
            "status": _status(answer, entry["in_step"]),
            **{name: entry[name] for name in ("outcome", "reason", "since", "generation", "behind", "progress")},
        }
    )


async def import_on_all(parts: Parts, call: Call) -> Reply:
    """Tell every rack to fetch what is published."""
    await _require_published(parts)
    racks = sorted(parts.racks.enrolled().values(), key=lambda rack: rack.name)
    if not racks:
        raise ApiError(text(wording.no_racks(), 503, **{"Retry-After": "60"}))
    silent = [rack for rack in racks if not parts.syncs.consider(rack.system_id, even_if_in_step=True)]
    if not silent:
        return text("Import of boot images started on all rack controllers", 202)
    if len(silent) == len(racks):
        raise ApiError(text(_not_connected(silent), 503, **{"Retry-After": "30"}))
    told = f"{len(racks) - len(silent)} of {len(racks)} rack controllers"
    return text(f"Import of boot images started on {told}. {_not_connected(silent)}", 202)


async def import_on_one(parts: Parts, call: Call) -> Reply:
    """Tell one rack to fetch what is published."""
    rack = _find(parts, call)
    await _require_published(parts)
    if not parts.syncs.consider(rack.system_id, even_if_in_step=True):
        raise ApiError(text(_not_connected([rack]), 503, **{"Retry-After": "30"}))
    return text(f"Import of boot images started on {rack.name}", 202)


async def _require_published(parts: Parts) -> None:
    """:raises ApiError: 503, if there is nothing that a rack could fetch."""
    if (await parts.published.read()).number is None:
        raise ApiError(text(wording.nothing_published(), 503, **{"Retry-After": "60"}))


def _not_connected(racks: Sequence[IRack]) -> str:
    if len(racks) == 1:
        return f"Rack {racks[0].name} is not connected; it fetches what is published when it connects again."
    return f"Racks {wording.names(racks)} are not connected; they fetch what is published when they connect again."


def _all(parts: Parts) -> list[IRack]:
    return [*parts.racks.enrolled().values(), *parts.racks.revoked().values()]


def _find(parts: Parts, call: Call, *, revoked: bool = False) -> IRack:
    wanted = call.path["system_id"]
    for rack in _all(parts):
        if wanted in (rack.system_id, rack.name):
            if rack.revoked is not None and not revoked:
                raise ApiError(text(f"Rack {rack.name} was revoked: it is not served any more.", 409))
            return rack
    raise NotFound(f"There is no rack {wanted!r}: no rack has that system id or name.")


def _status(answer: RackAnswer, in_step: bool) -> str:
    """The word that MAAS has for it."""
    if answer.held is None:
        return "unknown"
    if in_step:
        return "synced"
    return "syncing" if answer.held.state == "syncing" else "out-of-sync"


def _rack(parts: Parts, rack: IRack, connections: Connections) -> dict[str, Any]:
    connected = bool(connections.live)
    # This process knows of its own link's end before the database does, and of no other's.
    elsewhere = connections.ended.timestamp() if connections.ended else None
    ends = [end for end in (parts.racks.not_connected_since(rack.system_id), elsewhere) if end is not None]
    since = max(ends, default=None)
    behind = parts.published.behind(rack.generation)
    info = "" if connected else "not connected" + (f" since {wording.when(since)}" if since is not None else "")
    return {
        "system_id": rack.system_id,
        "hostname": rack.name,
        "fqdn": rack.name,
        "node_type": 2,
        "node_type_name": "Rack controller",
        "version": rack.version,
        "service_set": [{"name": "rackd", "status": "running" if connected else "dead", "status_info": info}],
        "connected": connected,
        "connections": [
            {
                "process": connection.name,
                "process_id": connection.process,
                "host": connection.host,
                "since": wording.when(connection.since.timestamp()),
                "address": connection.address,
            }
            for connection in connections.live
        ],
        "not_connected_since": None if connected or since is None else wording.when(since),
        "last_connected": rack.last_connected and wording.when(rack.last_connected.timestamp()),
        "enrolled": wording.when(rack.enrolled.timestamp()),
        "revoked": rack.revoked and wording.when(rack.revoked.timestamp()),
        "state": rack.state,
        "generation": rack.generation,
        "digest": rack.digest,
        "behind": behind,
        "progress": dict(rack.progress),
        "reported": rack.reported and wording.when(rack.reported.timestamp()),
        "resource_uri": f"{BASE}/rackcontrollers/{rack.system_id}/",
    }
