"""Since when each image is as it is: the generation that last added or changed it, and when that was published."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Final

from region.images.store import Generation, GenerationStore
from rpc.manifest import ImageKey

_UPDATES: Final = frozenset({"added", "changed"})


class History:
    """Reads what generations say of how they differ; each generation is read once."""

    def __init__(self, generations: GenerationStore) -> None:
        self._generations = generations
        self._read_to = 0
        self._updates: Mapping[ImageKey, tuple[int, datetime]] = {}

    async def updates(self, current: Generation) -> Mapping[ImageKey, tuple[int, datetime]]:
        """For each image that ever was, the number of the generation that last brought it, and its publication."""
        read_to = self._read_to
        if current.number > read_to:
            updates = dict(self._updates)
            # Numbers only grow, so the ones not read yet are among the newest so many.
            for generation in reversed(await self._generations.list(current.number - read_to)):
                if read_to < generation.number <= current.number:
                    for change in await self._generations.changes(generation.number):
                        if change.kind in _UPDATES:
                            updates[change.key] = generation.number, generation.published
            self._updates, self._read_to = updates, current.number
        return self._updates
