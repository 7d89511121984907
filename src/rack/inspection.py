"""Is what a snapshot should hold really there? Each file is looked at; nothing is concluded from names.

A file counts when it is the very file in the cache (the same inode) whose content was verified. That costs a ``stat``
for each file and no reading, unless the cache has lost its word for a content: then that is hashed again.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from attrs import define, evolve, field

from rack.files import Files
from rack.inventory import NO_GENERATION, Damage, Inventory
from rpc.blobs import BlobError, BlobStore, State
from rpc.manifest import MANIFEST_NAME, Image, ImageFile, InvalidManifest, Manifest, parse_manifest

_NAME = re.compile(r"(?P<number>[0-9]{1,18})-(?P<digest>[0-9a-f]{8})(?:\.[0-9]{1,6})?\Z")
_ABSENT: Final = "_"
"""Stands in a path for a release, subarch or kflavor that an image does not have; no name can begin with it."""


class SnapshotError(Exception):
    """A snapshot cannot be made or read; the text says which and why."""


class SnapshotUnread(SnapshotError):
    """A snapshot cannot be read now, because of ``cause``, which says nothing of what is in it."""

    def __init__(self, what: str, cause: OSError) -> None:
        super().__init__(f"{what} cannot be read: {cause}")
        self.cause = cause


class Interrupted(Exception):
    """Work on the snapshots was given up because the rack is stopping."""


def is_name(name: str) -> bool:
    """Whether ``name`` can be that of a snapshot: ``<generation>-<digest8>``, maybe with ``.<count>``."""
    return _NAME.match(name) is not None


def number_of(name: str) -> int:
    """The number of the generation that the snapshot ``name`` is of."""
    match = _NAME.match(name)
    return int(match["number"]) if match else NO_GENERATION


def directory_of(image: Image) -> Path:
    """Where in a snapshot the files of ``image`` are."""
    parts = (image.os, image.release, image.arch, image.subarch, image.kflavor, image.label, image.version)
    return Path(*(part or _ABSENT for part in parts))


@define(eq=False)
class Inspector:
    """Looks at snapshots and at the cache. Its methods block, and fail with :class:`Interrupted` after an interrupt."""

    blobs: BlobStore
    files: Files
    _interrupted: threading.Event = field(factory=threading.Event, init=False)

    def interrupt(self) -> None:
        """Make the work under way, and all that follows, fail soon."""
        self._interrupted.set()

    def check(self) -> None:
        """:raises Interrupted: if there was an interrupt."""
        if self._interrupted.is_set():
            raise Interrupted("the rack is stopping")

    def inspect(self, base: Path, known: Manifest | None = None) -> Inventory:
        """What the snapshot at ``base`` holds.

        :param known: what its manifest was earlier, which saves reading it if it is that still.
        :raises SnapshotUnread: if the disk does not let its manifest be read.
        :raises SnapshotError: if it has no manifest, or one that is none or does not fit its name.
        """
        match = _NAME.match(base.name)
        if match is None:
            raise SnapshotError(f"{base.name!r} is not the name of a snapshot")
        try:
            data = self.files.read(base / MANIFEST_NAME)
            if known is not None and hashlib.sha256(data).hexdigest() == known.digest:
                manifest = known
            else:
                manifest = parse_manifest(data)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, InvalidManifest) as error:
            raise SnapshotError(f"the manifest of snapshot {base.name} cannot be read: {error}") from error
        except OSError as error:
            raise SnapshotUnread(f"the manifest of snapshot {base.name}", error) from error
        if not manifest.digest.startswith(match["digest"]):
            raise SnapshotError(f"the manifest of snapshot {base.name} is another: its digest is {manifest.digest}")
        damaged = tuple(self._damage(base, manifest.images))
        whole = manifest if not damaged else manifest.only(manifest.by_key.keys() - {each.image for each in damaged})
        inventory = Inventory(int(match["number"]), manifest, whole, damaged)
        _ = inventory.digest  # computed here once, in a thread, and not when somebody asks
        return inventory

    def unverified(self, sha256: str, size: int) -> str:
        """Why the cache has no verified content with this sha256, as a phrase; "" if it has.

        :raises OSError: if the disk does not let that be told.
        """
        self.check()
        try:
            found = self.blobs.examine(sha256, size)
        except BlobError as error:
            return f"cannot be checked: {error}"
        match found.state:
            case State.VERIFIED:
                return ""
            case State.MISSING:
                return f"({sha256}, {size} bytes) is not in the cache"
            case State.QUARANTINED:
                return f"was wrong: {found.reason}"

    def _damage(self, base: Path, images: Iterable[Image]) -> Iterator[Damage]:
        unverified: dict[str, str] = {}
        for image in images:
            directory = base / directory_of(image)
            found = []
            for file in image.files:
                try:
                    if file.sha256 not in unverified:
                        unverified[file.sha256] = self.unverified(file.sha256, file.size)
                    reason = unverified[file.sha256] or self._elsewhere(directory / file.name, file)
                except OSError as error:
                    found.append(Damage(image.key, file.name, file.sha256, f"cannot be checked: {error}", unread=True))
                    continue
                if reason:
                    found.append(Damage(image.key, file.name, file.sha256, reason))
            if found and not any(damage.unread for damage in found) and not self.files.is_directory(directory):
                # The image was left out when the snapshot was made; what counts is what it still lacks.
                lacking = [damage for damage in found if unverified[damage.sha256]] or found
                found = [evolve(damage, absent=True) for damage in lacking]
            yield from found

    def _elsewhere(self, path: Path, file: ImageFile) -> str:
        """Why ``path`` is not the file in the cache that was verified, as a phrase; "" if it is."""
        identity = self.files.identity(path)
        if identity is None:
            return "is missing from the snapshot"
        if identity != self.files.identity(self.blobs.path(file.sha256)):
            return "is another file than the verified one in the cache"
        return ""
