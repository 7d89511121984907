"""Which files were verified, as which size, mtime and inode: a log that a crash can shorten but never make lie.

One line per stamp, ``<sha256> <size> <mtime_ns> <inode> <crc32>``, or ``<sha256> -`` in its place when the trust
ended; the last line of a name counts. A line that was torn by a crash fails its check sum, and then the file is merely
hashed again.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

from attrs import define, field, frozen
from twisted.logger import Logger

from rpc.manifest import is_sha256

HEADER: Final = "stanchion:verified:1"


@frozen
class Stamp:
    """What tells a file from any other that had its name: size in bytes, mtime in nanoseconds, inode number.

    The ctime would tell more, but it changes when the file is hard-linked, as a rack's snapshots do.
    """

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, found: os.stat_result) -> Self:
        """The stamp of what ``stat`` gave."""
        return cls(found.st_size, found.st_mtime_ns, found.st_ino)


@define(eq=False)
class StampLog:
    """The stamps, in memory and in an append-only file. Thread-safe.

    That the file cannot be written is logged and does no harm to the work at hand: after a restart there is more to
    hash, and no more.
    """

    path: Path
    _stamps: dict[str, Stamp] = field(repr=False)
    _descriptor: int
    _torn: bool = field(default=False, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False, repr=False)

    log = Logger()

    @classmethod
    def open(cls, path: Path, stamp_of: Callable[[str], Stamp | None]) -> Self:
        """Read the log at ``path``, keep what is still true, and write it anew if that is less than what was there.

        :param stamp_of: gives the stamp that the file of a sha256 has now, or None.
        """
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            data = b""
        stamps = {name: stamp for name, stamp in parse_log(data).items() if stamp_of(name) == stamp}
        compact = "".join([f"{HEADER}\n", *(_line(name, stamp) for name, stamp in sorted(stamps.items()))]).encode()
        if compact != data:
            temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
            try:
                with temporary.open("wb") as file:
                    file.write(compact)
                    file.flush()
                    os.fsync(file.fileno())
                os.rename(temporary, path)
                data = compact
            except OSError as error:
                temporary.unlink(missing_ok=True)
                cls.log.warn("Cannot write {path} anew ({error}); going on with the old one", path=str(path),
                             error=error)  # fmt: skip
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        opened = cls(path, stamps, descriptor)
        opened._torn = not data.endswith(b"\n")
        return opened

    def get(self, sha256: str) -> Stamp | None:
        """The stamp of a file when it was verified."""
        with self._lock:
            return self._stamps.get(sha256)

    def put(self, sha256: str, stamp: Stamp) -> None:
        """Record that a file was verified. Its bytes and its name must be on the disk before."""
        with self._lock:
            if self._stamps.get(sha256) != stamp:
                self._stamps[sha256] = stamp
                self._append(_line(sha256, stamp))

    def forget(self, sha256: str) -> None:
        """End the trust in a file."""
        with self._lock:
            if self._stamps.pop(sha256, None) is not None:
                self._append(f"{sha256} -\n")

    def flush(self) -> None:
        """Bring the file to the disk."""
        with self._lock:
            try:
                os.fdatasync(self._descriptor)
            except OSError as error:
                self.log.warn("Cannot flush {path}: {error}", path=str(self.path), error=error)

    def close(self) -> None:
        """Flush and close the file."""
        self.flush()
        with self._lock:
            os.close(self._descriptor)
            self._descriptor = -1  # so that a late stamp cannot go into whatever gets this number next

    def _append(self, line: str) -> None:
        data = (("\n" if self._torn else "") + line).encode()
        self._torn = False
        try:
            if (written := os.write(self._descriptor, data)) != len(data):
                raise OSError(f"only {written} of {len(data)} bytes were written")
        except OSError as error:
            self._torn = True  # so that the next line does not become part of this one
            self.log.warn("Cannot write {path}: {error}; after a restart there will be more to hash",
                          path=str(self.path), error=error)  # fmt: skip


def _line(sha256: str, stamp: Stamp) -> str:
    text = f"{sha256} {stamp.size} {stamp.mtime_ns} {stamp.inode}"
    return f"{text} {zlib.crc32(text.encode()):08x}\n"


def parse_log(data: bytes) -> dict[str, Stamp]:
    """The stamps that a log holds; lines that are damaged, or of something else, are left out."""
    stamps: dict[str, Stamp] = {}
    lines = data.decode("ascii", "replace").split("\n")
    if lines[0] != HEADER:
        return {}
    for line in lines[1:]:
        match line.split(" "):
            case [sha256, "-"]:
                stamps.pop(sha256, None)
            case [sha256, size, mtime_ns, inode, check] if is_sha256(sha256):
                if f"{zlib.crc32(line.rpartition(' ')[0].encode()):08x}" == check:
                    stamps[sha256] = Stamp(int(size), int(mtime_ns), int(inode))
            case _:
                continue
    return stamps
