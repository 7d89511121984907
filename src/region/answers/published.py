"""What the region has published, as combining needs it: one immutable value, replaced with each new generation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from region.answers.combine import Catalogue, Published, Target
from rpc.locks import FairLock
from rpc.manifest import Manifest


class Generation(Protocol):
    """The current generation."""

    @property
    def number(self) -> int: ...
    @property
    def digest(self) -> str: ...
    @property
    def manifest(self) -> Manifest: ...


class Generations(Protocol):
    """The part of :class:`region.images.store.GenerationStore` that is needed here."""

    async def current(self) -> Generation | None:
        """The current generation, from memory once it is known."""

    async def listings(self) -> Mapping[int, frozenset[tuple[str, str, str]]]:
        """For every generation that ever was, the (os, release, arch) that it listed."""


def _targets(releases: Iterable[tuple[str, str, str]]) -> Iterable[Target]:
    """The releases as targets; what has no release is a boot loader, which nobody deploys."""
    return (Target(*release) for release in releases if release[1])


class PublishedView:
    """Keeps the :class:`~region.answers.combine.Published` of the current generation, and recent catalogues."""

    def __init__(self, generations: Generations) -> None:
        self._generations = generations
        self._published = Published()
        self._before: Catalogue | None = None
        self._reading = FairLock()

    async def read(self) -> Published:
        """What is published now. Costs no query while the current generation is the one that was seen last.

        :raises DatabaseUnavailable: if it changed, or is not known yet, and the database cannot be asked.
        """
        current = await self._generations.current()
        if current is None or current.number == self._published.number:
            return self._published
        async with self._reading:  # those who ask when it has just changed are served by one reading
            current = await self._generations.current()
            if current is not None and current.number != self._published.number:
                await self._replace(current)
            return self._published

    async def _replace(self, current: Generation) -> None:
        listed = await self._generations.listings()
        # What a generation listed never changes, so only what is new of years of generations is looked at.
        known = self._published.listed
        published = Published(
            current.number,
            Catalogue(current.manifest),
            {number: known.get(number) or frozenset(_targets(releases)) for number, releases in listed.items()},
        )
        if self._published.number is None or current.number > self._published.number:
            if self._published.number is not None:
                self._before = self._published.catalogue
            self._published = published

    def catalogue(self, digest: str) -> Catalogue | None:
        """The catalogue of the current or the previous generation, if it has this digest."""
        for known in (self._published.catalogue, self._before):
            if known is not None and known.digest == digest:
                return known
        return None

    def current_digest(self) -> str:
        """The digest of the current generation; "" if nothing is known to be published."""
        return self._published.catalogue.digest if self._published.number is not None else ""

    def behind(self, generation: int | None) -> int:
        """How many generations were published after ``generation``; all of them, if it is None."""
        return sum(number > (generation or 0) for number in self._published.listed)
