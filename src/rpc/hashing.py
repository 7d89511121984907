"""How is a file hashed a little at a time, from the disk and not from what the system remembers of it?

What the page cache holds of a file says nothing of what is on the disk, and rot is on the disk. So each step has the
system forget its range before it is read, and once more afterwards: looking through everything must not push out of
the memory what others are reading.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path
from typing import Final

from attrs import define, field

from rpc.stamps import Stamp

UNREADABLE: Final = frozenset({errno.EIO, errno.EBADMSG, errno.EUCLEAN})
"""What the system says of bytes that the disk, or the file system's own check sums, do not give back."""

_BLOCK: Final = 1 << 18


class NotRegular(Exception):
    """What has the file's name is something else."""


@define(eq=False)
class Hashing:
    """A file that is being hashed. The methods may be called from any thread, one after the other.

    ``failure`` is why its bytes cannot be read, if they cannot.
    """

    path: Path
    began_as: Stamp
    _descriptor: int
    length: int = field(default=0, init=False)
    failure: str = field(default="", init=False)
    is_done: bool = field(default=False, init=False)
    _hash: hashlib._Hash = field(factory=hashlib.sha256, init=False, repr=False)

    def step(self, limit: int) -> int:
        """Hash at most about ``limit`` bytes more; how many it were.

        :raises OSError: for what is no fault of the file.
        """
        start, buffer = self.length, bytearray(min(_BLOCK, max(limit, 1)))
        self._forget(start, limit)
        try:
            while not self.is_done and self.length - start < limit:
                count = os.readv(self._descriptor, [buffer])
                self._hash.update(memoryview(buffer)[:count])
                self.length += count
                self.is_done = count == 0
        except OSError as error:
            if error.errno not in UNREADABLE:
                raise
            self.failure, self.is_done = f"{error.strerror} after {self.length} bytes", True
        self._forget(start, self.length - start)
        return self.length - start

    def hexdigest(self) -> str:
        """The sha256 of what was hashed."""
        return self._hash.hexdigest()

    def stamp(self) -> Stamp:
        """What the file is like now."""
        return Stamp.of(os.fstat(self._descriptor))

    def close(self) -> None:
        """Close the file. Closing it again does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _forget(self, start: int, length: int) -> None:
        if length:  # 0 would mean all of the file
            os.posix_fadvise(self._descriptor, start, length, os.POSIX_FADV_DONTNEED)


def hashing(path: Path) -> Hashing:
    """Begin to hash the regular file at ``path``.

    :raises NotRegular: if it is something else.
    :raises OSError: if it cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise NotRegular(f"{path} is not a regular file") from error
        raise
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise NotRegular(f"{path} is not a regular file")
    return Hashing(path, Stamp.of(found), descriptor)
