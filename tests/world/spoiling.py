"""What disks did to files in a world: bytes that flipped, files that went; and what may be wrong because of that.

A file that was spoiled may be taken for right only as long as nobody knows: until its store has it in its book of what
is damaged. What only its times betray is to be found before a byte of it is used.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from attrs import define, field, frozen

from rpc.damage import read_book

HOW: Final = ("flipped", "flipped silently", "gone")

Identity = tuple[int, int]
"""A file's inode, and when it was last written (nanoseconds): two files that are there at the same time differ in it,
and what takes the place of a wrong one does."""


def identity_of(path: Path) -> Identity | None:
    """That of the file at ``path``; None if there is none."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


@frozen
class Flip:
    """The ``number``-th file that was made wrong, at which step, and whether its times do not show it."""

    number: int
    step: int
    is_silent: bool


@define(eq=False)
class Spoiled:
    """All that was spoiled: ``files`` by identity, with how that was last; ``contents`` by sha256, wherever that was;
    which paths have ``gone`` since they were last seen; and how many files were made wrong in all."""

    files: dict[Identity, Flip] = field(factory=dict)
    contents: set[str] = field(factory=set)
    gone: set[Path] = field(factory=set)
    flips: int = 0
    _books: dict[Path, tuple[Identity, frozenset[str]]] = field(factory=dict)

    def spoil(self, path: Path, how: str, sha256: str, step: int) -> None:
        """Spoil the file at ``path``, which has the content ``sha256``; nothing if it is not there."""
        before = identity_of(path)
        if before is None:
            return
        self.contents.add(sha256)
        if how == "gone":
            path.unlink()
            self.gone.add(path)
            return
        was_silent = before not in self.files or self.files[before].is_silent
        data = bytearray(path.read_bytes())
        self.flips += 1
        data[self.flips % len(data)] ^= 0xFF  # another byte each time, so that nothing becomes right again
        with path.open("r+b") as file:
            file.write(data)
        seconds = before[1] + (0 if how == "flipped silently" else 1)
        os.utime(path, ns=(seconds, seconds))
        after = identity_of(path)
        assert after is not None
        self.files[after] = Flip(self.flips, step, was_silent and how == "flipped silently")

    def part(self, path: Path, sha256: str, step: int, *, is_gone: bool) -> None:
        """Have the file at ``path`` be a copy of what it was, or be gone, and leave alone what has other names."""
        data = path.read_bytes()
        path.unlink()
        self.contents.add(sha256)
        if is_gone:
            self.gone.add(path)
            return
        path.write_bytes(data)
        copied = identity_of(path)
        assert copied is not None
        self.flips += 1
        self.files[copied] = Flip(self.flips, step, is_silent=False)

    def known(self, blobs: Path) -> frozenset[str]:
        """What the store in the directory ``blobs`` knows to be damaged, by its book on the disk."""
        path = blobs / "damaged.json"
        identity = identity_of(path)
        if identity is None:
            return frozenset()
        kept = self._books.get(path)
        if kept is None or kept[0] != identity:
            kept = self._books[path] = identity, frozenset(read_book(path.read_bytes()))
        return kept[1]

    def may_be_wrong(self, path: Path, sha256: str, blobs: Path) -> bool:
        """Whether what is at ``path`` may be something else than the content ``sha256``, because the store in the
        directory ``blobs`` does not know it yet."""
        identity = identity_of(path)
        if identity is None:
            return path in self.gone
        return identity in self.files and sha256 not in self.known(blobs)
