"""How does a file that is still being fetched become a blob, so that no crash leaves a wrong or half one?

A part is appended to and hashed at once; when it is full and its sha256 is right, it is flushed and renamed. Until
then it has a name that nobody takes for a blob, and whoever fetches the same content later goes on where it ends.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from attrs import define, field

from rpc.stamps import Stamp

BLOCK: Final = 1 << 20
"""Bytes read at a time when a file is hashed or copied."""


class BlobError(Exception):
    """Something is wrong with one blob; the text says what, with the values."""


class WrongContent(BlobError):
    """A ``.part`` file has its full size but another sha256; it was thrown away. ``found`` is the sha256 it had."""

    def __init__(self, sha256: str, found: str, size: int) -> None:
        super().__init__(f"the sha256 of its {size} bytes is {found}, not {sha256}")
        self.sha256 = sha256
        self.found = found


class PartBusy(BlobError):
    """Another fetch, maybe of another process, is writing this ``.part`` file at this moment."""


class Abandoned(BlobError):
    """Work on a part was stopped because :meth:`Part.abandon` was called."""


@define(eq=False)
class Part:
    """One ``.part`` file open for writing: the bytes of a blob from the start, and the hash of what is there.

    Call :meth:`load` first. The methods may be called from any thread, one after the other; :meth:`abandon` and
    :meth:`close` at any time. After an error the part stays on the disk and can be opened and resumed later.
    """

    path: Path
    target: Path
    sha256: str
    size: int
    _descriptor: int
    length: int
    _adopted: Callable[[str, Stamp], object]
    _hash: hashlib._Hash | None = field(default=None, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)
    _abandoned: bool = field(default=False, init=False)
    _is_named: bool = field(default=False, init=False)
    """Whether the disk has its name."""

    @property
    def is_full(self) -> bool:
        """Whether as many bytes are there as the blob has."""
        return self.length == self.size

    def load(self, trusted: int | None = None) -> int:
        """Hash what is there already, and give its length in bytes. A part longer than the blob is emptied.

        :param trusted: how many bytes there may be; what is beyond them is cut off.
        """
        with self._working():
            length = os.fstat(self._descriptor).st_size
            self.length = 0
            self._hash = hashlib.sha256()
            if length > self.size:
                os.ftruncate(self._descriptor, 0)
                length = 0
            elif trusted is not None and length > trusted:
                os.ftruncate(self._descriptor, trusted)
                length = trusted
            os.lseek(self._descriptor, 0, os.SEEK_SET)
            while self.length < length:
                block = os.read(self._descriptor, min(BLOCK, length - self.length))
                if not block:
                    break
                self._hash.update(block)
                self.length += len(block)
                self._check()
            return self.length

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append ``data`` and hash it. :raises BlobError: if that is more than the blob has."""
        with self._working():
            digest = self._loaded()
            view = memoryview(data)
            if self.length + len(view) > self.size:
                raise BlobError(f"more than {self.size} bytes")
            while view:
                written = os.write(self._descriptor, view)
                digest.update(view[:written])
                self.length += written
                view = view[written:]

    def flush(self) -> None:
        """Return when what was written would survive a loss of power."""
        with self._working():
            os.fsync(self._descriptor)
            if not self._is_named:
                sync_directory(self.path.parent)
                self._is_named = True

    def restart(self) -> None:
        """Throw away what is there."""
        with self._working():
            self._empty()

    def finish(self) -> None:
        """Make it the blob, if its bytes are right.

        The order (flush the bytes, rename, flush the directory, stamp) means that a crash at any point leaves
        either a part, or a whole blob that is at worst hashed once more.

        :raises WrongContent: if the hash is another one; the part is empty then, and can be filled again.
        :raises BlobError: if bytes are missing.
        """
        with self._working():
            if self.length != self.size:
                raise BlobError(f"{self.length} of {self.size} bytes are there")
            found = self._loaded().hexdigest()
            if found != self.sha256:
                self._empty()
                raise WrongContent(self.sha256, found, self.size)
            os.fchmod(self._descriptor, 0o644)
            os.fsync(self._descriptor)
            stamp = Stamp.of(os.fstat(self._descriptor))
            os.rename(self.path, self.target)
            sync_directory(self.target.parent)
            self._adopted(self.sha256, stamp)

    def abandon(self) -> None:
        """Make work that goes on in another thread end soon, with :exc:`Abandoned`. Never blocks."""
        self._abandoned = True

    def close(self) -> None:
        """Close the file when work that goes on in another thread has ended. May be called twice.

        An empty part is removed: it would say nothing.
        """
        with self._lock:
            if self._descriptor < 0:
                return
            try:
                if os.fstat(self._descriptor).st_size == 0 and is_at(self._descriptor, self.path):
                    os.unlink(self.path)
            finally:
                os.close(self._descriptor)
                self._descriptor = -1

    def _empty(self) -> None:
        os.ftruncate(self._descriptor, 0)
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        self.length = 0
        self._hash = hashlib.sha256()

    def _loaded(self) -> hashlib._Hash:
        if self._hash is None:
            raise BlobError(f"{self.path} was not loaded")
        return self._hash

    def _check(self) -> None:
        if self._abandoned:
            raise Abandoned(f"{self.path} was abandoned")

    @contextmanager
    def _working(self) -> Iterator[None]:
        with self._lock:
            self._check()
            if self._descriptor < 0:
                raise BlobError(f"{self.path} is closed")
            yield


def is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file still has the name ``path``."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def sync_directory(path: Path) -> None:
    """Bring the names in a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
