"""Which contents do we hold whole and right on this disk, and can we trust them without reading them again?

A blob is a file named by its sha256. It gets that name only after every byte was hashed and flushed to the disk, and a
*stamp* (size, mtime, inode) says later that it is still that very file. A blob without a matching stamp is hashed
again before anybody may use it; one whose bytes are wrong is moved aside, so that it is fetched again.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Final

from attrs import define, field, frozen
from twisted.logger import Logger

from rpc.damage import DamageBook, Damaged
from rpc.hashing import Hashing, NotRegular, hashing
from rpc.manifest import is_sha256
from rpc.parts import Abandoned, BlobError, Part, PartBusy, WrongContent, is_at, sync_directory
from rpc.stamps import Stamp, StampLog

__all__ = [
    "Abandoned", "BlobError", "BlobStore", "Examination", "Part", "PartBusy", "State", "Swept", "Unreadable",
    "WrongContent",
]  # fmt: skip

KEPT_IN_QUARANTINE: Final = 4
"""How many wrong files are kept for inspection; older ones are deleted, so that bad disks do not fill up."""


STALE: Final = 7 * 86400.0
"""Seconds after which a ``.part`` file that nobody asks for is deleted."""

UNFINISHED: Final = 60.0
"""Seconds after which a file that was to replace one of the store's books is taken for that of a process that was
killed while it wrote it. Should that one live after all, it logs that it could not write the book, and goes on."""


READS: Final = 3
"""How often the bytes of a blob must be unreadable, some seconds apart, before it is taken for damaged."""


class Unreadable(BlobError):
    """The disk did not give a blob's bytes, which says nothing of them: look again after a while."""


class State(Enum):
    """What looking at a blob found."""

    VERIFIED = "verified"
    MISSING = "missing"
    QUARANTINED = "quarantined"


@frozen
class Examination:
    """What :meth:`BlobStore.examine` found: the state, and for a wrong file why it was moved away and where it is."""

    state: State
    reason: str = ""
    quarantined: Path | None = None


@frozen
class Swept:
    """What :meth:`BlobStore.sweep` removed: numbers of files, and the bytes of all of them."""

    blobs: int = 0
    partials: int = 0
    bytes: int = 0


@define(eq=False)
class BlobStore:
    """The blobs below one directory: ``blobs/<sha256>``, ``partial/<sha256>.part``, ``quarantine/``, ``verified.log``.

    All methods block on the disk and may be called from any thread: call them in threads, not in the reactor's. Two
    processes may use one directory: parts are locked against each other, and a stamp that one of them does not know
    costs it a re-hash. Anything the system refuses (``ENOSPC``, ``EACCES``, …) is raised as ``OSError``.
    """

    root: Path = field(converter=Path)
    _lock: threading.RLock = field(factory=threading.RLock, init=False, repr=False)
    _stamps: StampLog | None = field(default=None, init=False, repr=False)
    _damage: DamageBook | None = field(default=None, init=False, repr=False)
    _pinned: set[str] = field(factory=set, init=False, repr=False)
    _moved: dict[str, int] = field(factory=dict, init=False, repr=False)
    _unreadable: int = field(default=0, init=False, repr=False)
    """How many blobs in a row were taken for damaged because they could not be read."""
    on_damage: list[Callable[[Damaged], object]] = field(factory=list, init=False, repr=False)
    """Are called, in the thread that found it, when a blob was wrong and is in the quarantine. They must not raise."""
    on_repair: list[Callable[[Damaged], object]] = field(factory=list, init=False, repr=False)
    """Are called, in some thread, when a blob that was wrong is there again. They must not raise."""

    log = Logger()

    @property
    def blobs(self) -> Path:
        """The directory of whole blobs."""
        return self.root / "blobs"

    @property
    def partial(self) -> Path:
        """The directory of files that are still being fetched."""
        return self.root / "partial"

    @property
    def quarantine(self) -> Path:
        """The directory of files whose bytes were wrong."""
        return self.root / "quarantine"

    def path(self, sha256: str) -> Path:
        """Where the blob is, or would be. Its being there does not mean that it is right: see :meth:`verify`."""
        return self.blobs / _named(sha256)

    def part_path(self, sha256: str) -> Path:
        """Where the bytes fetched so far are, or would be."""
        return self.partial / f"{_named(sha256)}.part"

    def prepare(self) -> None:
        """Make the directories and read the stamps, which the first use would do otherwise; for errors at start-up."""
        self._log()
        self._book()

    @property
    def damaged(self) -> Mapping[str, Damaged]:
        """The blobs that were found wrong and are not there again, by sha256; empty before the first use."""
        book = self._damage
        return {} if book is None else book.entries

    def times_damaged(self, sha256: str) -> int:
        """How often the blob was found wrong since this store was made: whoever has it open since before the last time
        has a file that is wrong, whether or not it was replaced since."""
        return self._moved.get(sha256, 0)

    def pin(self, sha256: str) -> None:
        """Have :meth:`sweep` leave this content alone until :meth:`unpin`, whole or in part, whatever it is told."""
        self._pinned.add(_named(sha256))

    def unpin(self, sha256: str) -> None:
        """Let :meth:`sweep` decide again."""
        self._pinned.discard(sha256)

    def sizes(self) -> dict[str, int]:
        """What is there under the name of a blob, with its size in bytes, whether or not it is right."""
        self.prepare()
        found = {}
        with os.scandir(self.blobs) as entries:
            for entry in entries:
                try:
                    if is_sha256(entry.name):
                        found[entry.name] = entry.stat(follow_symlinks=False).st_size
                except FileNotFoundError:
                    continue  # removed since the directory was read
        return found

    def is_verified(self, sha256: str, size: int) -> bool:
        """Whether the blob is there, of ``size`` bytes, and still the file that was verified. Reads no content."""
        found = _stamp_at(self.path(sha256))
        return found is not None and found.size == size and self._log().get(sha256) == found

    def verify(self, sha256: str, size: int, *, thorough: bool = False) -> bool:
        """Whether the blob is there and right; like :meth:`examine`, for callers who need no reason."""
        return self.examine(sha256, size, thorough=thorough).state is State.VERIFIED

    def examine(self, sha256: str, size: int, *, thorough: bool = False) -> Examination:
        """Look at a blob, hash it if it has no matching stamp, and move it to the quarantine if it is wrong.

        :param size: what its size must be, in bytes.
        :param thorough: hash it even when its stamp matches; finds what a disk did without changing the file's times.
        """
        if not thorough and self.is_verified(sha256, size):
            return Examination(State.VERIFIED)
        path = self.path(sha256)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return Examination(State.MISSING)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENXIO):
                raise
            return self._quarantine(sha256, f"{path} is not a regular file")
        try:
            before = os.fstat(descriptor)
            if not stat.S_ISREG(before.st_mode):
                return self._quarantine(sha256, f"{path} is not a regular file")
            if before.st_size != size:
                return self._quarantine(sha256, f"it has {before.st_size} bytes, not {size}")
            with os.fdopen(descriptor, "rb", buffering=0, closefd=False) as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(descriptor)
            stamp = Stamp.of(os.fstat(descriptor))
        finally:
            os.close(descriptor)
        if found != sha256:
            return self._quarantine(sha256, f"the sha256 of its {size} bytes is {found}, not {sha256}")
        if stamp != Stamp.of(before) or stamp != _stamp_at(path):
            raise BlobError(f"{path} was changed while it was being hashed; look again")
        self._verified(sha256, stamp)
        return Examination(State.VERIFIED)

    def begin_examination(self, sha256: str) -> Hashing | Examination:
        """Begin to look at a blob's bytes, whatever its stamp says, in steps that the caller makes.

        :return: what to make the steps of and to give to :meth:`conclude`; or at once what was found.
        """
        self.prepare()
        path = self.path(sha256)
        try:
            return hashing(path)
        except FileNotFoundError:
            return Examination(State.MISSING)
        except NotRegular as error:
            return self._quarantine(sha256, str(error))

    def conclude(self, sha256: str, hashed: Hashing, read: int = READS) -> Examination:
        """What the bytes that were hashed say of the blob; one that is wrong is moved to the quarantine.

        One whose bytes could not be read is, too, when that was so :data:`READS` times; but not when it was so of more
        than are kept there: then it is the disk that fails, and to move files about would only lose them.

        :param read: how many times it has been read by now.
        :raises Unreadable: if its bytes could not be read.
        :raises BlobError: if the file was changed or replaced while it was being hashed.
        """
        path = self.path(sha256)
        stamp = hashed.stamp()
        if stamp != hashed.began_as or stamp != _stamp_at(path):
            if _stamp_at(path) is None:
                return Examination(State.MISSING)
            raise BlobError(f"{path} was changed while it was being hashed; look again")
        if hashed.failure:
            reason = f"its bytes cannot be read: {hashed.failure}"
            if read < READS:
                raise Unreadable(reason)
            if self._unreadable >= KEPT_IN_QUARANTINE:
                raise Unreadable(f"{reason}, nor could those of {self._unreadable} others: the disk fails, replace it")
            self._unreadable += 1
            return self._quarantine(sha256, reason)
        self._unreadable = 0
        found = hashed.hexdigest()
        if found != sha256:
            return self._quarantine(sha256, f"the sha256 of its {stamp.size} bytes is {found}, not {sha256}")
        self._verified(sha256, stamp)
        return Examination(State.VERIFIED)

    def open_part(self, sha256: str, size: int) -> Part:
        """Open, or create, the ``.part`` file of a blob for one writer.

        :raises PartBusy: if another writer has it open.
        """
        self._log()  # makes the directories
        path = self.part_path(sha256)
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                length = os.fstat(descriptor).st_size
                if is_at(descriptor, path):  # else its last writer finished between our open and our lock
                    return Part(path, self.path(sha256), sha256, size, descriptor, length, self._verified)
            except BlockingIOError:
                os.close(descriptor)
                raise PartBusy(f"{path} is being written by another fetch") from None
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def part_size(self, sha256: str) -> int:
        """How many bytes of a blob were fetched but not yet verified; 0 if none."""
        try:
            return self.part_path(sha256).stat().st_size
        except FileNotFoundError:
            return 0

    def discard_part(self, sha256: str) -> bool:
        """Delete what was fetched of a blob, unless a writer has it open; whether there is nothing left."""
        path = self.part_path(sha256)
        with self._unused(path) as unused:
            if unused:
                _remove(path)
        return not path.exists()

    def adopt_part(self, sha256: str, size: int) -> None:
        """Verify a ``.part`` file that has its full size, and make it the blob.

        :raises WrongContent: if its hash is another one; it is deleted then.
        :raises BlobError: if it has another size; it is kept.
        """
        part = self.open_part(sha256, size)
        try:
            part.load()
            part.finish()
        finally:
            part.close()

    def total_bytes(self) -> int:
        """Bytes of all blobs together."""
        return sum(self.sizes().values())

    def sweep(self, keep: Collection[str], *, stale_after: float = STALE, now: float | None = None) -> Swept:
        """Delete the blobs whose sha256 is not in ``keep``, and the ``.part`` files that nobody will resume.

        A part is kept while a writer has it, while its sha256 is in ``keep``, and for ``stale_after`` seconds after it
        was last written: whoever fetches that content next goes on from there.

        :param now: seconds since the epoch, by default the system's clock.
        """
        kept = set(keep)
        pinned = self._pinned
        oldest = (time.time() if now is None else now) - stale_after
        self._log()
        blobs = partials = total = 0
        for path in sorted(self.blobs.iterdir()):
            if path.name not in kept and path.name not in pinned:
                try:
                    total += path.lstat().st_size
                except FileNotFoundError:  # it was moved to the quarantine just now
                    continue
                _remove(path)
                self._log().forget(path.name)
                blobs += 1
        for path in sorted(self.partial.iterdir()):
            with self._unused(path) as unused:
                if unused and self._is_stale(path, kept | pinned, oldest):
                    total += path.lstat().st_size
                    _remove(path)
                    partials += 1
        self._trim_quarantine()
        self._book().keep(kept | pinned)
        self._remove_unfinished((time.time() if now is None else now) - UNFINISHED)
        return Swept(blobs, partials, total)

    def _remove_unfinished(self, oldest: float) -> None:
        """Remove what processes that were killed left of books that they wrote anew."""
        for path in self.root.glob("*.new"):
            try:
                if path.lstat().st_mtime < oldest:
                    _remove(path)
            except FileNotFoundError:  # it has its name just now
                continue

    def _is_stale(self, path: Path, keep: Collection[str], oldest: float) -> bool:
        sha256 = path.name.removesuffix(".part")
        if not is_sha256(sha256) or self.path(sha256).exists():
            return True
        return sha256 not in keep and path.lstat().st_mtime < oldest

    def note_missing(self, sha256: str, size: int) -> bool:
        """Whether a blob is missing. One that has been here is noted as damaged, so that it is fetched again."""
        if self.is_verified(sha256, size):
            return False
        if self._log().get(sha256) is not None and sha256 not in self._book().entries:
            damaged = Damaged(sha256, size, "it is missing from the disk", time.time())
            self._book().add(damaged)
            self.log.error("The blob {sha256} ({size} bytes) should be there and is missing", sha256=sha256, size=size)
            for listener in self.on_damage:
                listener(damaged)
        if self.is_verified(sha256, size):  # it came in that moment
            self._repaired(sha256)
            return False
        return True

    def flush(self) -> None:
        """Bring the stamps to the disk. Without it a crash costs hashing again, never wrong trust."""
        with self._lock:
            stamps = self._stamps
        if stamps is not None:
            stamps.flush()

    def close(self) -> None:
        """Flush, and close the stamp log. The store can be used again; it opens the log anew."""
        with self._lock:
            if self._stamps is not None:
                self._stamps.close()
                self._stamps = None

    def _log(self) -> StampLog:
        with self._lock:
            if self._stamps is None:
                made = [each for each in (self.root, self.blobs, self.partial, self.quarantine) if not each.exists()]
                for directory in made:
                    directory.mkdir(parents=True, exist_ok=True)
                if made:
                    sync_directory(self.root)
                    sync_directory(self.root.parent)
                self._stamps = StampLog.open(self.root / "verified.log", lambda name: _stamp_at(self.blobs / name))
            return self._stamps

    def _book(self) -> DamageBook:
        with self._lock:
            if self._damage is None:
                self._log()
                self._damage = DamageBook.open(self.root / "damaged.json")
            return self._damage

    def _verified(self, sha256: str, stamp: Stamp) -> None:
        self._log().put(sha256, stamp)
        self._repaired(sha256)

    def _repaired(self, sha256: str) -> None:
        was = self._book().repaired(sha256)
        if was is not None:
            self.log.info("The blob {sha256} is there again, and right.", sha256=sha256)
            for listener in self.on_repair:
                listener(was)

    def _quarantine(self, sha256: str, reason: str) -> Examination:
        now = time.time_ns()
        target = self.quarantine / f"{sha256}.{now}"
        size = self.path(sha256).lstat().st_size
        self._log().forget(sha256)
        try:
            os.rename(self.path(sha256), target)
        except FileNotFoundError:
            raise  # somebody else has moved it
        except OSError as error:
            # A disk that takes no writes after errors, as a rule: what is wrong is wrong also where it is.
            if sha256 not in self.damaged:
                self.log.error("The blob {sha256} is wrong ({reason}), and cannot be moved to {target}: {error}",
                               sha256=sha256, reason=reason, target=str(target), error=error)  # fmt: skip
                self._tell_damaged(Damaged(sha256, size, reason, now / 1e9))
            raise
        self._tell_damaged(Damaged(sha256, size, reason, now / 1e9))
        sync_directory(self.blobs)
        self.log.error("The blob {sha256} is wrong and was moved to {target}: {reason}", sha256=sha256,
                       target=str(target), reason=reason)  # fmt: skip
        self._trim_quarantine()
        return Examination(State.QUARANTINED, reason, target)

    def _tell_damaged(self, damaged: Damaged) -> None:
        with self._lock:
            self._moved[damaged.sha256] = self._moved.get(damaged.sha256, 0) + 1
        try:
            self._book().add(damaged)
        finally:
            for listener in self.on_damage:
                listener(damaged)

    def _trim_quarantine(self) -> None:
        with self._lock:
            entries = sorted(self.quarantine.iterdir(), key=lambda path: path.name.rpartition(".")[2], reverse=True)
            for path in entries[KEPT_IN_QUARANTINE:]:
                _remove(path)

    @contextmanager
    def _unused(self, path: Path) -> Iterator[bool]:
        """Holds the lock of the part at ``path`` and gives True, or gives False if a writer has it."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            yield False
            return
        except OSError:  # a symbolic link, or a file of somebody else: no writer of ours
            yield True
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unused = True
        except BlockingIOError:
            unused = False
        try:
            yield unused
        finally:
            os.close(descriptor)


def _named(sha256: str) -> str:
    if not is_sha256(sha256):
        raise BlobError(f"{sha256!r} is not a sha256, so there is no such blob")
    return sha256


def _stamp_at(path: Path) -> Stamp | None:
    """The stamp of the regular file at ``path``, or None."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return Stamp.of(found) if stat.S_ISREG(found.st_mode) else None


def _remove(path: Path) -> None:
    """Delete a file, or whatever else somebody put where files should be."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
