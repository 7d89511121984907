"""Which contents of a store are known to be damaged and not yet replaced? A small book beside them, that says why.

An entry is made when a wrong file is moved to the quarantine, and goes when the content is there again, verified, or
nobody needs it any more. It outlives restarts, so that whoever asks for the content meanwhile learns what is wrong.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final, Self

from attrs import asdict, define, field, frozen
from prometheus_client import Counter
from twisted.logger import Logger

from rpc.manifest import is_sha256

FOUND: Final = Counter("stanchion_blobs_found_damaged", "Files of images that were found damaged on the disk.")
REPAIRED: Final = Counter("stanchion_blobs_repaired", "Files of those that are there again, verified.")


@frozen
class Damaged:
    """A content that was found damaged: its size then in bytes, why, and when (seconds since the epoch)."""

    sha256: str
    size: int
    reason: str
    found: float


@define(eq=False)
class DamageBook:
    """The entries, in memory and in one JSON file. Thread-safe.

    That the file cannot be written is logged and does no harm to the work at hand: after a restart the content is
    merely missing, and nobody knows why.
    """

    path: Path
    _entries: dict[str, Damaged]
    _lock: threading.Lock = field(factory=threading.Lock, init=False, repr=False)

    log = Logger()

    @classmethod
    def open(cls, path: Path) -> Self:
        """The book at ``path``; one that is none is begun anew, and that is logged.

        :raises OSError: if the disk does not let it be read.
        """
        try:
            return cls(path, read_book(path.read_bytes()))
        except FileNotFoundError:
            return cls(path, {})
        except ValueError as error:
            cls.log.error("{path} cannot be read ({error}); what was known to be damaged is only missing now",
                          path=str(path), error=error)  # fmt: skip
            return cls(path, {})

    @property
    def entries(self) -> Mapping[str, Damaged]:
        """What is damaged at this moment, by sha256; never changes itself."""
        return self._entries

    def add(self, damaged: Damaged) -> None:
        """Note a damage; of what is noted already, the newer word counts."""
        with self._lock:
            self._write({**self._entries, damaged.sha256: damaged})
        FOUND.inc()

    def repaired(self, sha256: str) -> Damaged | None:
        """Note that a content is there again; what had been noted of it, if it had."""
        if sha256 not in self._entries:
            return None
        with self._lock:
            kept = dict(self._entries)
            was = kept.pop(sha256, None)
            if was is not None:
                self._write(kept)
        if was is not None:
            REPAIRED.inc()
        return was

    def keep(self, needed: Collection[str]) -> None:
        """Forget the contents that nobody needs any more."""
        with self._lock:
            kept = {sha256: damaged for sha256, damaged in self._entries.items() if sha256 in needed}
            if len(kept) != len(self._entries):
                self._write(kept)

    def _write(self, entries: dict[str, Damaged]) -> None:
        self._entries = entries
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}.new")
        try:
            with temporary.open("w", encoding="ascii") as file:
                json.dump({"damaged": [asdict(each) for each in entries.values()]}, file)
                file.flush()
                os.fsync(file.fileno())
            os.rename(temporary, self.path)
        except OSError as error:
            self.log.error("Cannot write {path}: {error}", path=str(self.path), error=error)


def read_book(data: bytes) -> dict[str, Damaged]:
    """The entries that a book's file has.

    :raises ValueError: if it is none.
    """
    try:
        found = [_entry(each) for each in json.loads(data)["damaged"]]
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"it is no list of damaged files: {type(error).__name__}: {error}") from error
    return {each.sha256: each for each in found}


def _entry(document: Mapping[str, Any]) -> Damaged:
    entry = Damaged(document["sha256"], document["size"], document["reason"], document["found"])
    texts = is_sha256(entry.sha256) and isinstance(entry.reason, str)
    if not (texts and type(entry.size) is int and isinstance(entry.found, int | float)):
        raise ValueError(f"{document!r} says of no file that it is damaged")
    return entry
