"""Where does a rack keep its images, so that after a crash at any point there is one whole snapshot and no other?

Below the root: ``cache/`` (every content once, by its sha256), ``snapshots/<generation>-<digest8>/`` (the files of one
generation by their names, as hard links into the cache) and ``current``, a symbolic link to one snapshot. A snapshot is
built beside the others, made durable, renamed, checked, and becomes current when ``current`` is replaced by a rename.
What is held is never concluded from names: each file must be the very file in the cache whose content was verified.
That something cannot be read is no reason to give it up: nothing is removed then, and nothing that is held unlisted.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Final

from attrs import evolve, field, frozen
from twisted.logger import Logger

from rack.files import Files
from rack.inspection import Inspector, SnapshotError, SnapshotUnread, directory_of, is_name, number_of
from rack.inventory import NO_GENERATION, NOTHING, Damage, Inventory
from rpc.blobs import STALE, BlobStore, Swept
from rpc.manifest import MANIFEST_NAME, ImageKey, Manifest

log = Logger()

_BUILDING: Final = ".new-"
_REMOVING: Final = ".old-"


@frozen
class Tidied:
    """What :meth:`SnapshotStore.tidy` removed, and what it could not remove (each a sentence)."""

    snapshots: tuple[str, ...]
    blobs: int
    freed: int
    problems: tuple[str, ...]


@frozen
class _Held:
    name: str
    inventory: Inventory


@frozen(eq=False)
class Lease:
    """A promise that the snapshot at ``path`` stays until :meth:`release`. ``inventory`` is what it holds."""

    path: Path
    inventory: Inventory
    _store: SnapshotStore
    _name: str
    _released: threading.Event = field(factory=threading.Event)

    def release(self) -> None:
        """End the lease. Ending it again does nothing."""
        if not self._released.is_set():
            self._released.set()
            self._store._returned(self._name)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


class SnapshotStore:
    """The snapshots and the cache below ``root``.

    All methods block; call them in threads, one at a time, except :attr:`inventory`, :meth:`lease`, :meth:`withdraw`
    and :meth:`interrupt`, which neither block nor wait and may be called at any time from any thread.
    """

    def __init__(self, root: Path, blobs: BlobStore, files: Files | None = None) -> None:
        self._root = root
        self._snapshots = root / "snapshots"
        self._link = root / "current"
        self._blobs = blobs
        self._files = files or Files()
        self._inspector = Inspector(blobs, self._files)
        self._current: _Held | None = None
        self._guard = threading.Lock()  # for the three below, and for what replaces the current inventory
        self._leases: Counter[str] = Counter()
        self._leased: dict[str, Inventory] = {}
        self._withdrawn: list[tuple[str, str]] = []
        self._locked: int | None = None
        self._unread = False
        """Whether what is there could not be looked at when this process began: then nothing may be removed."""

    @property
    def inventory(self) -> Inventory:
        """What the current snapshot holds. One assignment replaces it; nobody ever sees half of it."""
        current = self._current
        return NOTHING if current is None else current.inventory

    def interrupt(self) -> None:
        """Make the work under way, and all that follows, fail soon with :class:`Interrupted`."""
        self._inspector.interrupt()

    def open(self) -> None:
        """Make the directories and keep every other process from using them.

        :raises SnapshotError: if another process uses them, or they cannot be made or written.
        """
        try:
            for path in (self._root, self._snapshots):
                path.mkdir(mode=0o755, parents=True, exist_ok=True)
            descriptor = os.open(self._root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise SnapshotError(f"cannot use {self._root} for images: {error}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            raise SnapshotError(f"another process is using {self._root}: is this rack running already?") from error
        self._locked = descriptor

    def close(self) -> None:
        """Let other processes use the directories."""
        if self._locked is not None:
            os.close(self._locked)
            self._locked = None

    def recover(self) -> Inventory:
        """Find out what is held after a start, and finish or remove what a crash left.

        The current snapshot stays current if it is whole. If it is not, a whole one of the same generation or a newer
        one takes its place; if it cannot be used at all, any other does. If the disk does not let it be read, nothing
        is changed or removed; what cannot be looked at is not listed until :meth:`recheck` could do that.

        :raises OSError: if it cannot even be told which snapshot is current.
        :return: what is held now, also to be found as :attr:`inventory`.
        """
        self._unread = False
        since = len(self._withdrawn)
        current = self._held_by_link()
        if not self._unread and (current is None or not current.inventory.is_whole):
            better = self._better_than(current)
            if better is not None and not self._unread:
                self._flip(better, since)
                log.warn(
                    "Snapshot {name} is current now: the one that was {state}.",
                    name=better.name, state="is not whole" if current else "cannot be used",
                )  # fmt: skip
                current = better
        self._replace(current, since)
        if not self._unread:
            self._remove_others()
        return self.inventory

    def withdraw(self, sha256: str, reason: str) -> bool:
        """List no image any more that needs this content, which was found wrong; whether one was listed until now."""
        with self._guard:
            self._withdrawn.append((sha256, reason))
            before = self._current
            if before is None:
                return False
            left = before.inventory.without(sha256, reason)
            self._current = _Held(before.name, left)
            return left is not before.inventory

    def _replace(self, held: _Held | None, since: int) -> None:
        """Make ``held`` what is held, less what was withdrawn since there were ``since`` withdrawals."""
        with self._guard:
            if held is None:
                self._current = None
                return
            inventory = held.inventory
            for sha256, reason in self._withdrawn[since:]:
                inventory = inventory.without(sha256, reason)
            self._current = _Held(held.name, inventory)

    def recheck(self) -> Inventory:
        """Look at every file of the current snapshot again; what is missing or changed is not listed any more.

        :raises OSError: if something could not be looked at, or ``current`` does not lead to the snapshot any more and
            cannot be made to. It is listed as it was before.
        """
        if self._unread:
            self.recover()
            if self._unread:
                raise OSError(errno.EIO, "what is held cannot be looked at; see the log", str(self._snapshots))
        since = len(self._withdrawn)
        current = self._current
        if current is not None:
            self._restore_link(current.name)
            try:
                found = self._inspector.inspect(self._snapshots / current.name, current.inventory.listed)
            except SnapshotUnread as error:
                raise error.cause from error
            except SnapshotError as error:
                # Nothing of it may be listed, but which generation it was and what it should hold is still known.
                listed = current.inventory.listed
                lost = tuple(Damage(image.key, MANIFEST_NAME, "", str(error)) for image in listed.images)
                found = Inventory(current.inventory.generation, listed, listed.only(()), lost)
            unread = [damage for damage in found.damaged if damage.unread]
            if unread:
                found = found.believing(current.inventory)
            if found != current.inventory:
                self._replace(_Held(current.name, found), since)
            if unread:
                raise OSError(errno.EIO, f"{len(unread)} files cannot be looked at, such as {unread[0]}")
        return self.inventory

    def install(self, generation: int, manifest: Manifest, lacking: Iterable[Damage] = ()) -> Inventory:
        """Make a snapshot of ``manifest`` from the cache, check it, and make it the current one.

        :param lacking: files that cannot be had: their images are left out, and the inventory names them beside it.
        :raises SnapshotError: if a file is not verified in the cache, or was found changed in the new snapshot.
        :raises OSError: if the disk fails or is full. In both cases the old snapshot stays current.
        """
        name = self._free_name(generation, manifest)
        building = self._snapshots / (_BUILDING + name)
        final = self._snapshots / name
        absent = {(damage.image, damage.file): damage for damage in lacking}
        left_out = {damage.image for damage in absent.values()}
        try:
            self._build(building, manifest, left_out)
            self._files.rename(building, final)
            self._files.sync(self._snapshots)
            since = len(self._withdrawn)
            inventory = self._inspector.inspect(self._snapshots / name)
            damaged = [damage for damage in inventory.damaged if damage.image not in left_out]
            if damaged:
                raise SnapshotError(f"the new snapshot {name} is not whole: " + "; ".join(map(str, damaged[:3])))
            if left_out:
                told = (absent.get((damage.image, damage.file), damage) for damage in inventory.damaged)
                inventory = evolve(inventory, damaged=tuple(told))
            self._flip(_Held(name, inventory), since)
        except Exception:  # raised again, whatever it is, once the space is given back
            self._discard(building)
            if self._current is None or self._current.name != name:
                self._discard(final)
            raise
        return inventory

    def lease(self) -> Lease | None:
        """Keep the current snapshot from being removed while it is read; None if there is no snapshot."""
        with self._guard:
            current = self._current
            if current is None:
                return None
            self._leases[current.name] += 1
            self._leased[current.name] = current.inventory
            return Lease(self._snapshots / current.name, current.inventory, self, current.name)

    def tidy(self, keep: Iterable[str] = (), *, stale_after: float = STALE) -> Tidied:
        """Remove snapshots that are neither current nor leased, and contents that no snapshot which is left names.

        A thing that cannot be removed is reported and does not keep the others from being removed. Nothing is removed
        while it is not known what is held.

        :param keep: contents to keep besides, by sha256, also when they were fetched only in part.
        :param stale_after: what was fetched in part is removed when it is older than this, in seconds.
        """
        if self._unread:
            return Tidied((), 0, 0, ("nothing is removed, because it cannot be read what is held",))
        removed, problems = self._remove_others()
        wanted = set(keep) | set(self.inventory.listed.blobs)
        with self._guard:
            for inventory in self._leased.values():
                wanted |= set(inventory.listed.blobs)
        swept = Swept()
        try:
            swept = self._blobs.sweep(wanted, stale_after=stale_after)
        except OSError as error:
            problems.append(f"the cache could not be swept: {error}")
        return Tidied(tuple(removed), swept.blobs, swept.bytes, tuple(problems))

    def missing(self, manifest: Manifest) -> dict[str, int]:
        """The contents of ``manifest`` that are not verified in the cache: sha256 to size in bytes.

        :raises OSError: if one of them could not be looked at.
        """
        missing = {}
        for sha256, size in manifest.blobs.items():
            if self._inspector.unverified(sha256, size):
                missing[sha256] = size
        return missing

    def to_fetch(self, missing: Mapping[str, int]) -> int:
        """How many bytes of ``missing`` are still to be fetched, less what was fetched of each in part."""
        return sum(max(0, size - self._blobs.part_size(sha256)) for sha256, size in missing.items())

    def free_bytes(self) -> int:
        """How many bytes may still be written."""
        return self._files.free_bytes(self._root)

    def _returned(self, name: str) -> None:
        with self._guard:
            self._leases[name] -= 1
            if not self._leases[name]:
                del self._leases[name]
                del self._leased[name]

    def _held_by_link(self) -> _Held | None:
        target = self._files.target(self._link)
        if target is None:
            return None
        name = target.rpartition("/")[2]
        try:
            held = _Held(name, self._inspector.inspect(self._snapshots / name))
            self._unread = any(damage.unread for damage in held.inventory.damaged)
            return held
        except SnapshotUnread as error:
            self._unread = True
            log.error("Whether the current snapshot is right cannot be told now: {reason}", reason=str(error))
            return None
        except SnapshotError as error:
            log.error("The current snapshot cannot be used: {reason}", reason=str(error))
            return None

    def _better_than(self, current: _Held | None) -> _Held | None:
        """The newest whole snapshot that is no older than ``current``; without a current one, any that can be read."""
        readable: list[_Held] = []
        for name in sorted(self._names(), key=lambda name: (number_of(name), name), reverse=True):
            if current is not None and (name == current.name or number_of(name) < current.inventory.generation):
                continue
            try:
                readable.append(_Held(name, self._inspector.inspect(self._snapshots / name)))
                self._unread |= any(damage.unread for damage in readable[-1].inventory.damaged)
            except SnapshotUnread as error:
                self._unread = True
                log.error("Whether snapshot {name} is right cannot be told now: {reason}", name=name, reason=str(error))
            except SnapshotError as error:
                log.warn("Snapshot {name} cannot be used: {reason}", name=name, reason=str(error))
        whole = (held for held in readable if held.inventory.is_whole)
        return next(whole, readable[0] if readable and current is None else None)

    def _names(self) -> list[str]:
        return [name for name in self._files.names(self._snapshots) if is_name(name)]

    def _free_name(self, generation: int, manifest: Manifest) -> str:
        if generation <= NO_GENERATION:
            raise SnapshotError(f"{generation} is not the number of a generation")
        plain = f"{generation}-{manifest.digest[:8]}"
        # The same generation may be there already: damaged, so that it is made anew, or still leased.
        taken = set(self._files.names(self._snapshots))
        names = [plain, *(f"{plain}.{count}" for count in range(2, len(taken) + 3))]
        return next(name for name in names if name not in taken)

    def _build(self, base: Path, manifest: Manifest, left_out: Collection[ImageKey] = ()) -> None:
        if any(image.os == MANIFEST_NAME for image in manifest.images):
            raise SnapshotError(f"an image's os is {MANIFEST_NAME!r}, which is the name of the snapshot's manifest")
        if base.exists():
            self._files.remove_tree(base)
        self._files.make_directory(base)
        directories = {base}
        for image in manifest.images:
            if image.key in left_out:
                continue
            self._inspector.check()
            directory = base / directory_of(image)
            for parent in (*reversed(directory.parents), directory):
                if base in parent.parents and parent not in directories:
                    self._files.make_directory(parent)
                    directories.add(parent)
            for file in image.files:
                self._files.link(self._blobs.path(file.sha256), directory / file.name)
        self._files.write(base / MANIFEST_NAME, manifest.canonical)
        self._files.sync(base / MANIFEST_NAME)
        for directory in sorted(directories, reverse=True):  # what is below comes first
            self._inspector.check()
            self._files.sync(directory)

    def _flip(self, held: _Held, since: int) -> None:
        """Make ``held`` the current snapshot. Once the link is renamed, this does not fail any more.

        :param since: how many withdrawals there were before it was looked at.
        """
        self._set_link(held.name)
        self._replace(held, since)
        self._unread = False  # it was all looked at
        try:
            self._files.sync(self._root)
        except OSError as error:
            # The new snapshot is current for everyone. Should power fail before the disk knows, recover() finds one.
            log.warn(
                "Could not make durable that snapshot {name} is current: {reason}", name=held.name, reason=str(error)
            )

    def _set_link(self, name: str) -> None:
        """Have ``current`` lead to the snapshot ``name``, in one step for everyone who follows it."""
        temporary = self._root / ".current-new"
        self._make_way(temporary)
        if self._files.is_there(temporary):
            self._files.unlink(temporary)
        self._files.symlink(self._target(name), temporary)
        self._make_way(self._link)
        self._files.rename(temporary, self._link)

    def _restore_link(self, name: str) -> None:
        """Put ``current`` right if somebody else changed it: whoever serves the images follows it."""
        found = self._files.target(self._link)
        if found == self._target(name):
            return
        leads = f"leads to {found}" if found is not None else "is no link"
        log.error("{path} {leads}; it is put right.", path=str(self._link), leads=leads)
        self._set_link(name)
        self._files.sync(self._root)

    def _target(self, name: str) -> str:
        return f"{self._snapshots.name}/{name}"

    def _make_way(self, path: Path) -> None:
        """Move a directory away that somebody put where a link of ours belongs; it may have what is not ours."""
        if not self._files.is_directory(path):
            return
        names = (path.with_name(f"{path.name}.moved-{number}") for number in count(1))
        aside = next(name for name in names if not self._files.is_there(name))
        self._files.rename(path, aside)
        log.error("{path} was a directory; it was moved to {aside}.", path=str(path), aside=str(aside))

    def _remove_others(self) -> tuple[list[str], list[str]]:
        """Remove what is neither current nor leased; the names removed, and what could not be, as sentences."""
        with self._guard:
            current = self._current
            spared = set(self._leases) | ({current.name} if current else set())
        removed: list[str] = []
        problems: list[str] = []
        try:
            names = self._files.names(self._snapshots)
        except OSError as error:
            log.warn("Could not look for old snapshots: {error}", error=str(error))
            return [], [f"old snapshots could not be looked for: {error}"]
        for name in names:
            if name in spared or not (is_name(name) or name.startswith((_BUILDING, _REMOVING))):
                continue
            problem = self._discard(self._snapshots / name)
            if problem:
                problems.append(problem)
            else:
                removed.append(name)
        return removed, problems

    def _remove(self, path: Path) -> None:
        """Remove the snapshot at ``path``, which loses its name first so that nobody takes what is left for one."""
        if path.name.startswith((_BUILDING, _REMOVING)):
            if path.exists():
                self._files.remove_tree(path)
        elif path.exists():
            doomed = path.with_name(_REMOVING + path.name)
            if doomed.exists():
                self._files.remove_tree(doomed)
            try:
                self._files.rename(path, doomed)
            except OSError as error:
                # Even a rename may need space that a full disk lacks. Without its manifest nobody can use it either.
                log.info("{path} is removed without another name first: {error}", path=str(path), error=str(error))
                if self._files.identity(path / MANIFEST_NAME) is not None:
                    self._files.unlink(path / MANIFEST_NAME)
                    self._files.sync(path)
                self._files.remove_tree(path)
                return
            self._files.sync(self._snapshots)  # else a loss of power could bring the name back, with half of the files
            self._files.remove_tree(doomed)

    def _discard(self, path: Path) -> str:
        """Remove the snapshot at ``path`` if it is there; "", or why it could not be removed, which is logged too."""
        try:
            self._remove(path)
        except OSError as error:
            log.warn("Could not remove {path}: {error}", path=str(path), error=error)
            return f"{path} could not be removed: {error}"
        return ""
