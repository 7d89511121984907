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
from rpc.fetch import Fetcher
from rpc.protocol import Link
from tests.world.turns import Turns, Wire
from tests.world.web import MemoryAgent

INTERVAL = 900.0


@define(eq=False)
class Process:
    """One run of a rack's process. ``history`` is all that it held, in order."""

    synchroniser: Synchroniser
    store: SnapshotStore
    blobs: BlobStore
    fetcher: Fetcher
    links: RegionLinks
    number: int
    recovering: Deferred[None] = field(factory=Deferred)
    is_ready: bool = False
    leases: list[Lease] = field(factory=list)


class ModelRack:
    """A rack whose directory outlives its processes; :attr:`process` is the one that runs, None while none does."""

    def __init__(self, turns: Turns, system_id: str, directory: Path, site: Callable[[], Site | None]) -> None:
        self.system_id = system_id
        self.name = f"rack-{system_id}"
        self.directory = directory
        self.process: Process | None = None
        self.link: tuple[Link, Link, Wire] | None = None
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
        self._starts += 1
        self.process = process = Process(synchroniser, store, blobs, fetcher, links, self._starts)
        synchroniser.on_change(self._note)
        process.recovering = Deferred.fromCoroutine(self._recover(process))
        process.recovering.addErrback(lambda failure: failure.trap(CancelledError))

    async def _recover(self, process: Process) -> None:
        await process.synchroniser.recover()
        self._note()
        process.is_ready = True
        process.links._start_ticking()
        process.synchroniser.look_again()

    def _note(self) -> None:
        if self.process is not None and (not self.history or self.history[-1] is not self.inventory):
            self.history.append(self.inventory)

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
        """Lose the link, and every other connection."""
        for lane in list(self._turns.lanes):
            if isinstance(lane, Wire) and lane.owner == self.system_id:
                lane.cut()
        self.link = None

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
