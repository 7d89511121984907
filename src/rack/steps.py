"""How is one sync done? The manifest by its digest, what is missing of it, a snapshot, and then it is current.

Up to the moment when the new snapshot is current, nothing of what is held changes, whatever fails; after it, nothing
can make the sync fail any more. Images whose files the region says that it cannot give now are left out of the
snapshot, unless the rack would lose an older version of one by that: then it stays where it is. What was fetched by a
sync that failed or was stopped is there for the next one, except when the disk was full: then the space is given back.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from attrs import define, evolve, field, frozen
from twisted.logger import Logger

from rack.assignment import Assignment, AssignmentFile
from rack.inspection import Interrupted, SnapshotError
from rack.inventory import NO_GENERATION, Damage, Inventory
from rack.snapshots import SnapshotStore
from rack.stop import CANCELLED, Stop, Stopped
from rpc.events import DAMAGE_FOUND, Kind
from rpc.fetch import Fetched, FetchError, FetchFailed, Progress, RunInThread, Wanted
from rpc.manifest import InvalidManifest, Manifest, parse_manifest

log = Logger()

MANIFEST_LIMIT: Final = 64 << 20
"""Bytes; no manifest is larger. The catalogue of all that Ubuntu publishes has less than a megabyte."""

RESERVE: Final = 64 << 20
"""Bytes that a sync leaves free on the disk, for the snapshot itself and for everybody else."""

MAX_REFUSED: Final = 64
"""How many wrong files are told to the region; it looks at more of its own accord."""

_SHOWN: Final = 3
_DISK_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


class SyncFailed(Exception):
    """A sync cannot be completed; the text is the reason, for people."""


class DiskFull(SyncFailed):
    """There is not enough space for what is to be fetched."""


class Fetches(Protocol):
    """What of :class:`rpc.fetch.Fetcher` a sync uses."""

    async def fetch(
        self, wanted: Sequence[Wanted], progress: Callable[[Progress], object] | None = None
    ) -> Mapping[str, Fetched | FetchFailed]:
        """See :meth:`rpc.fetch.Fetcher.fetch`."""
        ...

    async def read_document(self, url: str, *, limit: int) -> bytes:
        """See :meth:`rpc.fetch.Fetcher.read_document`."""
        ...


@frozen
class Done:
    """How a sync ended that did not fail: whether it ``changed`` anything, and what the rack lacks of the generation
    because the region cannot give it now; nothing of what was held before was given up for that."""

    changed: bool
    lacking: tuple[Damage, ...] = ()
    images: int = 0
    """How many images the generation lists."""

    @property
    def reason(self) -> str:
        """Why it is not all, as a sentence; "" if it is."""
        if not self.lacking:
            return ""
        count = len({damage.image for damage in self.lacking})
        return f"{count} of {self.images} images cannot be had now: {named(self.lacking)}"


@frozen
class SyncState:
    """How far a sync is: its ``step`` (checking, manifest, fetching, installing), and files and bytes of those that
    were missing. ``bytes_read`` came over the wire. ``current`` says what is being fetched."""

    step: str = "checking"
    files: int = 0
    files_done: int = 0
    bytes: int = 0
    bytes_done: int = 0
    bytes_read: int = 0
    current: tuple[str, ...] = ()


@define(eq=False)
class Syncs:
    """What all syncs of a rack share. :meth:`perform` is one of them; there must never be two at once."""

    store: SnapshotStore
    assignments: AssignmentFile
    fetcher: Fetches
    run_in_thread: RunInThread
    happened: Callable[[Kind, str], object] = field(default=lambda kind, description: None, init=False)
    """Is told of what people should find in the region's events."""
    refused: tuple[str, ...] = field(default=(), init=False)
    """What came from the region with wrong bytes in the last sync, by sha256: the region should look at its copies."""
    _told: tuple[Damage, ...] = field(default=(), init=False)
    _written: Assignment | None = field(default=None, init=False)

    async def perform(
        self,
        assignment: Assignment,
        stop: Stop,
        show: Callable[[SyncState], object],
        changed: Callable[[], object],
    ) -> Done:
        """Make the rack hold what ``assignment`` says, or as much of it as can be had.

        :param show: is given how far the sync is, whenever that changes; the last is how far it got.
        :param changed: is called when what is held has changed.
        :raises SyncFailed: with the reason. What was held before is held still.
        :raises Stopped: if ``stop`` said so; likewise.
        """
        self.refused = ()
        try:
            return await _Sync(self, assignment, stop, show, changed).run()
        except DiskFull:
            await self._tidy(stale_after=0.0)
            raise
        except Interrupted as error:
            raise Stopped(CANCELLED, str(error)) from error
        except OSError as error:
            if error.errno in _DISK_FULL:
                await self._tidy(stale_after=0.0)
                raise DiskFull(f"the disk is full: {error}") from error
            raise SyncFailed(f"the disk failed: {error}") from error

    async def remember(self, assignment: Assignment) -> None:
        """Write down what is to be held. :raises OSError: if the disk fails or is full."""
        if assignment != self._written:
            await self.run_in_thread(self.assignments.write, assignment)
            self._written = assignment

    def tell_damage(self, inventory: Inventory) -> None:
        """Make known which images of ``inventory`` are damaged, unless that was told of just these."""
        if inventory.damaged == self._told:
            return
        self._told = inventory.damaged
        generation = inventory.generation
        for damage in inventory.damaged:
            if damage.absent:
                log.warn("Not held of generation {generation}: {lack}", generation=generation, lack=str(damage))
            else:
                log.error("Damaged in generation {generation}: {damage}", generation=generation, damage=str(damage))
        if damaged := [damage for damage in inventory.damaged if not damage.absent]:
            self.happened(DAMAGE_FOUND, f"Generation {generation}: {named(damaged)}")

    async def _tidy(self, keep: Mapping[str, int] | None = None, *, stale_after: float | None = None) -> None:
        """Remove what is not needed any more. That this fails does not make a sync fail; it is logged."""
        options = {} if stale_after is None else {"stale_after": stale_after}
        try:
            tidied = await self.run_in_thread(self.store.tidy, keep or (), **options)
        except Exception:  # noqa: BLE001  # what is held is right; the next sync tidies again
            log.failure("Could not remove what is not needed any more")
            return
        for problem in tidied.problems:
            log.error("Could not remove what is not needed any more: {problem}", problem=problem)
        if tidied.snapshots or tidied.blobs or tidied.freed:
            log.info(
                "Tidied: removed {snapshots}, and {blobs} files from the cache ({bytes} bytes).",
                snapshots=", ".join(tidied.snapshots) or "no snapshot", blobs=tidied.blobs, bytes=tidied.freed,
            )  # fmt: skip


@define(eq=False)
class _Sync:
    syncs: Syncs
    assignment: Assignment
    stop: Stop
    show: Callable[[SyncState], object]
    changed: Callable[[], object]
    state: SyncState = field(factory=SyncState, init=False)

    async def run(self) -> Done:
        store, thread = self.syncs.store, self.syncs.run_in_thread
        assignment = self.assignment
        self._at("checking")
        await self.syncs.remember(assignment)
        before, unread = store.inventory, ""
        try:
            await thread(store.recheck)
        except OSError as error:
            unread = str(error)
            if store.inventory.listed.digest == assignment.digest:
                raise
            log.error("What is held cannot be looked at: {reason}", reason=unread)
        finally:
            # Also when not all could be looked at: what was found wrong is not listed any more.
            inventory = store.inventory
            if inventory is not before:
                self.syncs.tell_damage(inventory)
                self.changed()
        if inventory.holds(assignment.generation, assignment.digest):
            await self.syncs._tidy()
            return Done(False)
        if inventory.generation != NO_GENERATION and inventory.listed.digest == assignment.digest:
            manifest = inventory.listed
        else:
            manifest = await self._fetch_manifest()
        self.stop.check()
        missing = await thread(store.missing, manifest)
        lacking: tuple[Damage, ...] = ()
        if missing:
            await self._make_room(manifest, missing)
            lacking = self._lacking(manifest, await self._fetch(manifest, missing))
            if lacking and unread:
                raise SyncFailed(f"{named(lacking)}; and what would be lost by that cannot be told: {unread}")
            self._require_no_loss(lacking)
        done = Done(True, lacking, len(manifest.images))
        if lacking and self._is_all_there_is(manifest, lacking):
            await self.syncs._tidy()
            return evolve(done, changed=False)
        self._at("installing")
        self.stop.no_more()
        try:
            await thread(store.install, assignment.generation, manifest, lacking)
        except SnapshotError as error:
            raise SyncFailed(str(error)) from error
        self.syncs.tell_damage(store.inventory)
        self.changed()
        await self.syncs._tidy()
        return done

    @staticmethod
    def _lacking(manifest: Manifest, withheld: Mapping[str, str]) -> tuple[Damage, ...]:
        """Which files of which images the region cannot give now."""
        return tuple(
            Damage(image.key, file.name, file.sha256, f"is not here: {withheld[file.sha256]}", absent=True)
            for image in manifest.images
            for file in image.files
            if file.sha256 in withheld
        )

    def _require_no_loss(self, lacking: Sequence[Damage]) -> None:
        """:raises SyncFailed: if the rack holds a version of an image that it could not hold in the new snapshot."""
        held = self.syncs.store.inventory
        kept = [damage for damage in lacking if damage.image in held.manifest.by_key]
        if kept:
            raise SyncFailed(
                f"the rack stays at generation {held.generation}, whose version of what follows it would lose: "
                f"{named(kept)}"
            )

    def _is_all_there_is(self, manifest: Manifest, lacking: Sequence[Damage]) -> bool:
        """Whether the rack holds all of the generation that can be had."""
        held = self.syncs.store.inventory
        wanted = manifest.by_key.keys() - {damage.image for damage in lacking}
        is_same = (held.generation, held.listed.digest) == (self.assignment.generation, manifest.digest)
        return is_same and held.manifest.by_key.keys() == wanted

    def _at(self, step: str, **changes: Any) -> None:
        self.state = evolve(self.state, step=step, current=(), **changes)
        self.show(self.state)

    async def _fetch_manifest(self) -> Manifest:
        self._at("manifest")
        url = self.assignment.manifest_url
        try:
            data = await self.stop.interruptible(self.syncs.fetcher.read_document(url, limit=MANIFEST_LIMIT))
        except FetchError as error:
            raise SyncFailed(f"the manifest of {self.assignment} cannot be fetched: {error}") from error
        try:
            return await self.syncs.run_in_thread(parse_manifest, data, self.assignment.digest)
        except InvalidManifest as error:
            raise SyncFailed(f"{url} is not the manifest of {self.assignment}: {error}") from error

    async def _make_room(self, manifest: Manifest, missing: Mapping[str, int]) -> None:
        """:raises DiskFull: if the disk has no room for what is missing, even when all that is not needed is gone."""
        if await self._lacks_room(missing):
            await self.syncs._tidy(manifest.blobs, stale_after=0.0)
            if lack := await self._lacks_room(missing):
                raise DiskFull(lack)

    async def _lacks_room(self, missing: Mapping[str, int]) -> str:
        """What is wrong if there is no room for the rest of ``missing``; else ""."""
        store, thread = self.syncs.store, self.syncs.run_in_thread
        needed = await thread(store.to_fetch, missing)
        free = await thread(store.free_bytes)
        if free >= needed + RESERVE:
            return ""
        return (
            f"the disk is too full: {needed} bytes are to be fetched and {RESERVE} are left for others, "
            f"but {free} are free; make room, or select fewer images"
        )

    async def _fetch(self, manifest: Manifest, missing: Mapping[str, int]) -> Mapping[str, str]:
        """Fetch what is missing; of what the region cannot give now, by sha256, why.

        :raises SyncFailed: if something could not be fetched for any other reason.
        """
        self._at("fetching", files=len(missing), bytes=sum(missing.values()))
        wanted = self._wanted(manifest, missing)
        results = await self.stop.interruptible(self.syncs.fetcher.fetch(wanted, self._progressed))
        failures = [result for result in results.values() if isinstance(result, FetchFailed)]
        self._at(
            "fetching",
            files_done=len(results) - len(failures),
            bytes_read=max(
                self.state.bytes_read, sum(each.bytes_read for each in results.values() if isinstance(each, Fetched))
            ),
        )
        if not failures:
            return {}
        self.syncs.refused = tuple(failure.sha256 for failure in failures if failure.is_wrong)[:MAX_REFUSED]
        labels = {one.sha256: one.label for one in wanted}
        for failure in failures:
            (log.warn if failure.withheld else log.error)(
                "Could not fetch {label} from {url}: {reason}",
                label=labels[failure.sha256], url=failure.url, reason=failure.reason,
            )  # fmt: skip
        if all(failure.withheld for failure in failures):
            return {failure.sha256: failure.reason for failure in failures}
        told = "; ".join(f"{labels[failure.sha256]}: {failure.reason}" for failure in failures[:_SHOWN])
        more = f"; and {len(failures) - _SHOWN} more" if len(failures) > _SHOWN else ""
        reason = f"{len(failures)} of {len(missing)} files could not be fetched: {told}{more}"
        still = {failure.sha256: missing[failure.sha256] for failure in failures}
        if lack := await self._lacks_room(still):
            raise DiskFull(f"{reason} ({lack})")
        raise SyncFailed(reason)

    def _progressed(self, progress: Progress) -> None:
        self.state = evolve(
            self.state,
            files_done=progress.files_done,
            bytes_done=progress.bytes_done,
            bytes_read=progress.bytes_read,
            current=progress.current,
        )
        self.show(self.state)

    def _wanted(self, manifest: Manifest, missing: Mapping[str, int]) -> list[Wanted]:
        """One request for each missing content, in the order of the manifest's images."""
        wanted: dict[str, Wanted] = {}
        for image in manifest.images:
            for file in image.files:
                if file.sha256 in missing and file.sha256 not in wanted:
                    url = self.assignment.blob_url(file.sha256)
                    label = f"{image.key} {image.version} {file.name}"
                    wanted[file.sha256] = Wanted(url, file.sha256, file.size, label)
        return list(wanted.values())


def named(damaged: Sequence[Damage]) -> str:
    """The first few of them, and how many more there are."""
    more = f"; and {len(damaged) - _SHOWN} more" if len(damaged) > _SHOWN else ""
    return f"{'; '.join(map(str, damaged[:_SHOWN]))}{more}"
