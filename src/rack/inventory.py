"""What does this rack hold, right now? An :class:`Inventory` is the answer: an immutable value, replaced whole.

It lists an image only when every one of its files was found in the snapshot and is verified content. What should be
there and is not is named beside it, and makes its digest differ from that of the generation it was taken from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from attrs import field, frozen

from rpc.manifest import EMPTY, Image, ImageFile, ImageKey, Manifest

NO_GENERATION: Final = -1
"""What stands on the wire for "no generation"."""


@frozen
class Damage:
    """A file of the snapshot that is missing or not what it should be; ``reason`` follows the file's name.

    ``absent``: nothing has happened to it; its image was left out of the snapshot, because it could not be had.
    ``unread``: it may be right, and could not be looked at.
    """

    image: ImageKey
    file: str
    sha256: str
    reason: str = field(eq=False)  # how it is known may change; what is damaged stays the same
    absent: bool = field(default=False, eq=False)
    unread: bool = field(default=False, eq=False)

    def __str__(self) -> str:
        return f"{self.image}: {self.file} {self.reason}"


@frozen
class Inventory:
    """What the current snapshot holds.

    ``generation`` is its number (:data:`NO_GENERATION` when there is no snapshot), ``listed`` the generation's whole
    manifest, ``manifest`` the images of it that are all there and verified, ``damaged`` why the others are not.
    """

    generation: int
    listed: Manifest
    manifest: Manifest
    damaged: tuple[Damage, ...] = ()

    @property
    def digest(self) -> str:
        """The digest of what is held, "" when there is no snapshot; the generation's own when it is whole."""
        return "" if self.generation == NO_GENERATION else self.manifest.digest

    @property
    def is_whole(self) -> bool:
        """Whether every image that the generation lists is held."""
        return not self.damaged

    def holds(self, generation: int, digest: str) -> bool:
        """Whether this is all of the generation with that number and digest."""
        return self.is_whole and (self.generation, self.digest) == (generation, digest)

    def believing(self, before: Inventory) -> Inventory:
        """The same, where all is still listed that was so ``before``, and of which something cannot be read now."""
        damaged = {damage.image for damage in self.damaged if not damage.unread}
        unread = {damage.image for damage in self.damaged if damage.unread} - damaged
        believed = unread & before.manifest.by_key.keys()
        left = tuple(damage for damage in self.damaged if damage.image not in believed)
        held = self.listed.only(self.manifest.by_key.keys() | believed)
        return Inventory(self.generation, self.listed, held, left)

    def without(self, sha256: str, reason: str) -> Inventory:
        """The same when the content ``sha256`` is not right any more: no image that needs it is held."""
        known = {(damage.image, damage.file) for damage in self.damaged}
        lost = [
            Damage(image.key, file.name, sha256, reason)
            for image in self.listed.images
            for file in image.files
            if file.sha256 == sha256 and (image.key, file.name) not in known
        ]
        if not lost:
            return self
        order = {(image.key, file.name): place for place, (image, file) in enumerate(_files_of(self.listed))}
        damaged = sorted((*self.damaged, *lost), key=lambda damage: order.get((damage.image, damage.file), -1))
        held = self.manifest.by_key.keys() - {damage.image for damage in lost}
        return Inventory(self.generation, self.listed, self.listed.only(held), tuple(damaged))


def _files_of(manifest: Manifest) -> Iterator[tuple[Image, ImageFile]]:
    """Every file of every image, in order."""
    for image in manifest.images:
        for file in image.files:
            yield image, file


NOTHING: Final = Inventory(NO_GENERATION, EMPTY, EMPTY)
"""The inventory of a rack that has no snapshot."""
