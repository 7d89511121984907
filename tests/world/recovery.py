"""How a world comes to rest: all faults end, everybody is connected, and nobody does anything any more."""

from __future__ import annotations

from typing import Final

from region.images.repair import LAST_RETRY
from tests.world.rack import INTERVAL
from tests.world.world import World

RECOVERY_TURNS: Final = 60
"""Seconds that a world may take to be as it should be, once it is left alone."""


def end_faults(world: World) -> None:
    """Have all faults end, and racks look at all of their files."""
    for upstream in world.upstreams:
        upstream.mend_files()
        upstream.trusted = upstream.stream.signer
        upstream.write()
    if world.region is None:
        world.start_region()
    if world.two and world.second is None:
        world.start_second()
    for system_id, rack in world.racks.items():
        world.stall_rack(system_id, False)
        if rack.process is None:
            rack.start()
    for stranger in world.strangers.values():
        for linked in stranger.links.values():
            linked.wire.stalled = False
    world.settle()
    while world.dismissals:
        world.operators.dismiss(*world.dismissals.pop())
        world.settle()
    world.pass_time(5.0)  # questions that wait for racks that did not answer end
    world.settle()
    world.pass_time(11.0)  # and a region process that was killed is not taken for one that lives
    world.settle()
    for system_id in world.racks:
        world.verify(system_id)
    world.settle()
    world.pass_time(INTERVAL + 1.0)  # a rack that was in the midst of something looks again
    world.settle()


def recover(world: World) -> None:
    """Have everybody connect, and leave them alone until nothing changes any more."""
    for system_id in world.racks:
        world.link_rack(system_id)
    world.set_up_sources()  # what was wanted last was not stored if the region ended, or something overtook it
    world.pass_time(2.0)  # an import follows the edit
    world.settle()
    world.verify("")
    world.settle()
    _repair(world)
    world.operators.upload_again()
    world.settle()
    world.request_import()
    for _ in range(RECOVERY_TURNS):
        world.settle()
        if _is_at_rest(world):
            return
        for system_id in world.racks:
            world.link_rack(system_id)
        world.pass_time(1.0)


def _repair(world: World) -> None:
    """Nobody asks for an import, and what was found damaged is fetched again; at the latest when it is tried once
    more after trying was of no use for long."""
    for seconds in (2.0, LAST_RETRY + 1.0):
        world.pass_time(seconds)
        world.settle()
        damaged = world.spoiled.known(world.blobs) & set(world.needed_region.latest_blobs)
        damaged -= {upload.said for upload in world.operators.given}
        if not damaged:
            return
    raise AssertionError(f"{damaged} are known to be damaged, and are not fetched again")


def _is_at_rest(world: World) -> bool:
    region = world.needed_region
    if region.importer.is_busy or world.questions or world.readings or world.operators.are_busy:
        return False
    if not world.spoiled.known(world.blobs).isdisjoint(region.latest_blobs):
        return False
    latest = region.generations.latest
    return latest is None or all(
        rack.process is not None and rack.process.store.inventory.holds(latest.number, latest.digest)
        for rack in world.racks.values()
    )
