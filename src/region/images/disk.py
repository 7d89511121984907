"""What an import needs to know of the region's disk: which contents are there and right, and whether there is room."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

from rpc.blobs import BlobError, BlobStore, State
from rpc.fetch import Wanted
from rpc.manifest import Manifest

SPARE_BYTES: Final = 64 << 20
"""Bytes of the disk that an import leaves free."""


def free_bytes(path: Path) -> int:
    """The bytes that this process may still write below ``path``, the nearest existing directory above it counting."""
    while not path.exists():
        path = path.parent
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def verify(
    blobs: BlobStore, needed: Mapping[str, int], fetchable: Collection[str], stopped: Callable[[], bool]
) -> tuple[set[str], dict[str, str]]:
    """Which of the contents ``needed`` (sha256 to size) are verified, and what is wrong with some of the others.

    Content is read only to judge a file that was changed since it was verified, and that cannot be fetched again.
    """
    verified: set[str] = set()
    failures: dict[str, str] = {}
    for sha256, size in needed.items():
        if stopped():
            break
        if blobs.is_verified(sha256, size):
            verified.add(sha256)
        elif sha256 not in fetchable:
            try:
                found = blobs.examine(sha256, size)
            except (OSError, BlobError) as error:
                failures[sha256] = str(error)
                continue
            if found.state is State.VERIFIED:
                verified.add(sha256)
            else:
                failures[sha256] = found.reason or "it is missing on the region's disk"
    return verified, failures


def unverified(blobs: BlobStore, manifest: Manifest) -> frozenset[str]:
    """The contents of ``manifest`` that are not verified at this moment."""
    return frozenset(sha256 for sha256, size in manifest.blobs.items() if not blobs.is_verified(sha256, size))


def space(blobs: BlobStore, wanted: Sequence[Wanted], free: Callable[[Path], int]) -> tuple[int, int]:
    """The bytes that fetching ``wanted`` still needs, and the bytes that are free."""
    need = sum(max(0, each.size - blobs.part_size(each.sha256)) for each in wanted)
    return need, free(blobs.root)


def readable(size: float) -> str:
    """A number of bytes, for people."""
    unit = "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
