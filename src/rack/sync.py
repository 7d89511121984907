"""When does a rack sync, to which generation, and who is told how it ended?

Requests for what is being synced already share its result; of others the newest generation wins, and those who asked
for another are told so. At intervals, and after a failure, the rack looks by itself whether all that it should hold is
there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Final

from attrs import frozen
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from rack.assignment import Assignment
from rack.inventory import NO_GENERATION, Damage, Inventory
from rack.life import Core, Machine, Result, Run
from rack.snapshots import SnapshotStore
from rack.steps import Syncs, named
from rpc.events import Kind
from rpc.fetch import RunInThread

log = Logger()

SHOWN: Final = 64
"""Of how many releases a report says why they are not held."""

SHOWN_CHARACTERS: Final = 300
"""How much of each reason."""


@frozen
class Status:
    """``state`` is ``empty``, ``ready``, ``partial`` (all is held that the region can give now), ``syncing`` or
    ``failed``; ``progress`` is the same for display, as JSON."""

    state: str
    progress: dict[str, Any]


class Synchroniser:
    """A rack's syncing. To be used in the reactor's thread; nothing here blocks.

    :param interval: seconds after which the rack looks again whether all that it should hold is there.
    :param jitter: gives numbers from 0 to 1, by which waits are lengthened by up to a quarter.
    """

    def __init__(
        self, syncs: Syncs, clock: IReactorTime, *, interval: float, jitter: Callable[[], float] = random.random
    ) -> None:
        self._core = Core(syncs, clock, interval, jitter)
        self._machine = Machine(self._core)

    @property
    def inventory(self) -> Inventory:
        """What is held right now."""
        return self._core.syncs.store.inventory

    @property
    def last_success(self) -> float | None:
        """When a sync last ended with everything in place, in seconds since the epoch; None if none did yet."""
        return self._core.last_success

    @property
    def run_in_thread(self) -> RunInThread:
        """How to run what blocks, or takes long."""
        return self._core.syncs.run_in_thread

    @property
    def store(self) -> SnapshotStore:
        """Where it is held."""
        return self._core.syncs.store

    @property
    def refused(self) -> tuple[str, ...]:
        """What came from the region with wrong bytes in the last sync, by sha256."""
        return self._core.syncs.refused

    def damage_found(self) -> None:
        """A file that is held was found wrong and is not listed any more: tell, and have it fetched again."""
        self._core.syncs.tell_damage(self.inventory)
        self._core.announce()
        self.look_again()

    def on_change(self, listener: Callable[[], object]) -> None:
        """Call ``listener`` whenever the state, or what is held, has changed. It must not raise."""
        self._core.listeners.append(listener)

    def on_happening(self, listener: Callable[[Kind, str], object]) -> None:
        """Have ``listener`` told of what people should find in the region's events. It must not raise."""
        self._core.syncs.happened = listener

    async def recover(self) -> Inventory:
        """Find out what is held, and what should be, after a start; to be called once, before anything else.

        :raises OSError: if the disk cannot be read.
        """
        syncs = self._core.syncs
        async with self._core.lock:
            inventory = await syncs.run_in_thread(syncs.store.recover)
            self._core.assignment = await syncs.run_in_thread(syncs.assignments.read)
        syncs.tell_damage(inventory)
        if inventory.generation == NO_GENERATION:
            log.info("No images are held.")
        else:
            log.info(
                "Generation {generation} ({digest}) is held: {count} images{damaged}.",
                generation=inventory.generation, digest=inventory.listed.digest[:8],
                count=len(inventory.manifest.images),
                damaged="" if inventory.is_whole else f" of {len(inventory.listed.images)}",
            )  # fmt: skip
        return inventory

    def request(self, assignment: Assignment) -> Deferred[Result]:
        """Make the rack hold a generation; fires with the result when that sync has ended, and never fails."""
        caller: Deferred[Result] = Deferred()
        self._machine.ask(Run(assignment, [caller]))
        return caller

    def look_again(self) -> None:
        """Look now whether all that should be held is there, and sync if not; nothing if that is unknown."""
        if self._core.assignment is not None:
            self._machine.look_again()

    def cancel(self) -> bool:
        """Stop the sync under way and any to follow it; the rack does not sync until it is asked to again.

        :return: whether there was one that could still be stopped.
        """
        latest = self._core.next or self._core.run
        if latest is None or latest.stop.is_too_late:
            return False
        self._machine.cancel()
        return True

    def stop(self) -> Deferred[None]:
        """Stop for good; fires when no sync is under way any more."""
        self._machine.stop()
        return self._core.stopped

    @property
    def status(self) -> Status:
        """What the rack says of itself at this moment."""
        core, inventory = self._core, self.inventory
        if core.run is not None:
            return Status("syncing", self._progress_of(core.run))
        if core.failure or not inventory.is_whole:
            lacking = core.lacking or inventory.damaged
            progress: dict[str, Any] = {"reason": core.failure or named(lacking)}
            if core.timer is not None:
                progress["next_try_seconds"] = round(core.timer.getTime() - core.clock.seconds(), 1)
            if core.assignment is not None:
                progress["generation"] = core.assignment.generation
            if core.failure or not (core.lacking or all(damage.absent for damage in inventory.damaged)):
                return Status("failed", progress)
            return Status("partial", progress | {"lacking": _shown(lacking)})
        return Status("empty" if inventory.generation == NO_GENERATION else "ready", {})

    def _progress_of(self, run: Run) -> dict[str, Any]:
        state = run.state
        return {
            "generation": run.assignment.generation, "digest": run.assignment.digest, "step": state.step,
            "files": state.files, "files_done": state.files_done, "bytes": state.bytes,
            "bytes_done": state.bytes_done, "bytes_read": state.bytes_read, "current": list(state.current),
            "rate": run.rate.per_second(self._core.clock.seconds()) if state.step == "fetching" else None,
            "seconds": round(self._core.clock.seconds() - run.started, 1),
        }  # fmt: skip


def _shown(lacking: Sequence[Damage]) -> list[dict[str, str]]:
    """Which releases have images that are not held, and why, as JSON for people's eyes."""
    found: dict[tuple[str, str, str], str] = {}
    for damage in lacking:
        image = damage.image
        found.setdefault((image.os, image.release, image.arch), f"{damage.file} {damage.reason}"[:SHOWN_CHARACTERS])
    return [
        {"os": os, "release": release, "arch": arch, "reason": reason}
        for (os, release, arch), reason in list(found.items())[:SHOWN]
    ]
