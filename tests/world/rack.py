"""A rack in a world: its snapshots, its syncing and its end of the link, composed as the rack's service does it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import define, field
from twisted.internet.defer import CancelledError, Deferred
from twisted.web.server import Site

from rack.assignment import AssignmentFile
from rack.inventory import Inventory
from rack.link import RegionLinks
from rack.snapshots import Lease, SnapshotStore
from rack.steps import Syncs
from rack.sync import Synchroniser
from rpc.blobs import BlobStore
from rpc.damage import Damaged
from rpc.fetch import Fetcher
from rpc.protocol import Link
from rpc.verifying import MIB, Verifier
from tests.world.turns import Turns, Wire
from tests.world.web import MemoryAgent

INTERVAL = 900.0
VERIFYING = 1024.0 * MIB
"""Bytes in a second: all that a world has, at once."""


@define(eq=False)
class Process:
    """One run of a rack's process. ``history`` is all that it held, in order."""

    synchroniser: Synchroniser
    store: SnapshotStore
    blobs: BlobStore
    fetcher: Fetcher
    links: RegionLinks
    verifier: Verifier
    number: int
    recovering: Deferred[None] = field(factory=Deferred)
    is_ready: bool = False
    leases: list[Lease] = field(factory=list)


@define(eq=False)
class Linked:
    """A link with a region process: both ends, and the wire between them."""

    region: Link
    rack: Link
    wire: Wire


class ModelRack:
    """A rack whose directory outlives its processes; :attr:`process` is the one that runs, None while none does.

    ``names`` are all that it was ever to be called, each with the step from which it might be and the one (if any) from
    which it is so no more; ``known`` is the step since when all region processes know it under its last name, None if
    they may not yet. ``links`` are those that it has, by the region process. ``gone`` are the region processes that
    know that it is no rack any more.
    """

    def __init__(self, turns: Turns, system_id: str, directory: Path, site: Callable[[], Site | None]) -> None:
        self.system_id = system_id
        self.name = f"rack-{system_id}"
        self.names: dict[str, tuple[int, int | None]] = {self.name: (turns.steps, None)}
        self.known: int | None = None
        self.renaming = 0
        self.directory = directory
        self.process: Process | None = None
        self.links: dict[str, Linked] = {}
        self.gone: set[str] = set()
        self.history: list[Inventory] = []
        self._turns = turns
        self._site = site
        self._starts = 0
        self._attempts = 0

    def start(self) -> None:
        """Begin to start a process; it :attr:`is_ready` once it knows what it holds."""
        turns, run_in_thread = self._turns, self._turns.threads(self.system_id)
        blobs = BlobStore(self.directory / "cache")
        store = SnapshotStore(self.directory, blobs)
        store.open()
        agent = MemoryAgent(turns, self.system_id, self._site)
        fetcher = Fetcher(turns, blobs, agent=agent, run_in_thread=run_in_thread, jitter=lambda: 0.0)
        syncs = Syncs(store, AssignmentFile(self.directory / "assignment.json"), fetcher, run_in_thread)
        synchroniser = Synchroniser(syncs, turns, interval=INTERVAL, jitter=lambda: 0.0)
        links = RegionLinks(turns, synchroniser, self.name)
        verifier = Verifier(
            blobs, turns, run_in_thread, turns.seconds, VERIFYING, 0, lambda last: synchroniser.look_again()
        )

        def damage_found(damaged: Damaged) -> None:
            if store.withdraw(damaged.sha256, f"was wrong: {damaged.reason}"):
                turns.callFromThread(synchroniser.damage_found)

        blobs.on_damage.append(damage_found)
        self._starts += 1
        self.process = process = Process(synchroniser, store, blobs, fetcher, links, verifier, self._starts)
        synchroniser.on_change(self._note)
        process.recovering = Deferred.fromCoroutine(self._recover(process))
        process.recovering.addErrback(lambda failure: failure.trap(CancelledError))

    async def _recover(self, process: Process) -> None:
        await process.synchroniser.recover()
        self._note()
        process.is_ready = True
        process.links._start_ticking()
        process.synchroniser.look_again()
        process.verifier.start()

    def _note(self) -> None:
        if self.process is not None and (not self.history or self.history[-1] is not self.inventory):
            self.history.append(self.inventory)

    def may_be_called(self, name: str, since: int) -> bool:
        """Whether this may have been its name (or its system id) at the step ``since``, or later."""
        if name == self.system_id:
            return True
        _, until = self.names.get(name, (0, 0))
        return until is None or until >= since

    @property
    def is_ready(self) -> bool:
        """Whether it runs, and knows what it holds."""
        return self.process is not None and self.process.is_ready

    @property
    def inventory(self) -> Inventory:
        """What it holds, or held when it last ran."""
        return self.history[-1] if self.process is None else self.process.store.inventory

    def turn(self) -> dict[str, Any]:
        """The arguments of ``Register`` that say which link this is."""
        self._attempts += 1
        return {"instance": f"{self.system_id}-{self._starts}", "attempt": self._attempts}

    def cut(self) -> None:
        """Lose the links, and every other connection."""
        for lane in list(self._turns.lanes):
            if isinstance(lane, Wire) and lane.owner == self.system_id:
                lane.cut()
        self.links.clear()

    def cut_all_but(self, region: str) -> None:
        """Lose every connection but the link with one region process."""
        kept = self.links.get(region)
        for lane in list(self._turns.lanes):
            if isinstance(lane, Wire) and lane.owner == self.system_id and (kept is None or lane is not kept.wire):
                lane.cut()
        self.links = {} if kept is None else {region: kept}

    def cut_from(self, region: str) -> None:
        """Lose the link with one region process, if there is one."""
        linked = self.links.pop(region, None)
        if linked is not None:
            linked.wire.cut()

    def stop(self) -> None:
        """Stop the process as its service does; what it is in the midst of is left at some point."""
        process = self.process
        if process is None:
            return
        process.recovering.cancel()
        process.store.interrupt()
        stopping = process.synchroniser.stop()
        self.cut()
        self._turns.settle(self.system_id)  # a process does not end before its threads have
        self._turns.finish(Deferred.fromCoroutine(self._stop(process, stopping)), owner=self.system_id)
        self._note()
        self.process = None

    @staticmethod
    async def _stop(process: Process, stopping: Deferred[None]) -> None:
        await stopping
        await process.verifier.stop()
        await process.links.stop()
        for lease in process.leases:
            lease.release()
        process.blobs.close()
        process.store.close()

    def asked_for(self) -> int | None:
        """The generation of the sync under way, if one is."""
        run = None if self.process is None else self.process.synchroniser._core.run
        return None if run is None else run.assignment.generation

    def look_again(self) -> None:
        """Look again, as the timer makes it."""
        if self.process is not None and self.process.is_ready:
            self.process.synchroniser.look_again()
