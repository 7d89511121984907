"""What racks know of releases: what they are called where the stream does not say, what their images are good for, and
which need a license key.

A rack is asked about a release once; what it said holds until the images of that release change, or the software of
some rack does. What no rack could be asked about is left open, and never makes an answer fail or wait for longer than a
round of asking does.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

from attrs import frozen
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from region.answers.asking import DEADLINE, IRackLinks
from region.answers.combine import Answers, Catalogue
from region.answers.past import Kernel
from region.upstream.values import is_plain
from rpc import rounds
from rpc.commands import DescribeRelease
from rpc.locks import FairLock
from rpc.manifest import Image
from rpc.outcomes import Answered, Outcome

log = Logger()

REMEMBERED: Final = 1024
"""Of how many releases it is remembered what a rack said."""

ANSWERS: Final = 16
"""For how many combined answers it is remembered what is known of their releases."""

TOGETHER: Final = 64
"""How many releases are asked about at a time."""

PAUSE: Final = 30.0
"""Seconds for which a rack that could not describe a release is not asked again."""

CATALOGUES: Final = 4
"""Of how many catalogues it is remembered what racks' words about their releases depend on."""

MAX_TITLE: Final = 255
MAX_WORD: Final = 128
"""Characters that are shown of a rack's title for a release, and that its other words about it have at most: they are
in answers to everybody, and a rack may say anything."""

Release = tuple[str, str]
"""(os, release)"""

Shapes = Mapping[Release, frozenset[Hashable]]
"""For each release of a catalogue, everything that a rack's words about it depend on."""


class BadDescription(ValueError):
    """What a rack said is no description; the text says why."""


@frozen(cache_hash=True)
class Described:
    """What a rack said of one release; ``purposes`` by kernel, of the images that it holds."""

    title: str
    requires_license_key: bool
    purposes: tuple[tuple[Kernel, tuple[str, ...]], ...] = ()

    @classmethod
    def read(cls, answer: Mapping[str, Any]) -> Described:
        """The answer to ``DescribeRelease``.

        :raises BadDescription: if it is none.
        """
        try:
            purposes = tuple(
                (
                    Kernel(*(_text(use[name]) for name in Kernel._fields)),
                    tuple(sorted(_text(each) for each in use["purposes"])),
                )
                for use in answer["uses"]
            )
        except (TypeError, KeyError, AttributeError) as error:
            raise BadDescription(f"'uses' is not what it must be: {type(error).__name__}: {error}") from error
        # What the stream says may be long; a rack's own words are not.
        title = answer["title"] if is_plain(answer["title"]) else ""
        return cls(title[:MAX_TITLE], answer["requires_license_key"], tuple(sorted(purposes)))

    def uses(self, arch: str, kernel: Kernel | None = None) -> list[str] | None:
        """What the images for an architecture, or the one for a kernel, may be used for; None if that is not known."""
        found = [uses for one, uses in self.purposes if one.arch == arch and kernel in (None, one)]
        return sorted({use for uses in found for use in uses}) if found else None


def _text(value: object) -> str:
    """A word, such as those that manifests have."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    if len(value) > MAX_WORD or not is_plain(value):
        raise TypeError(f"{value[:MAX_WORD]!r} is no word of at most {MAX_WORD} characters")
    return value


@frozen(cache_hash=True)
class Descriptions:
    """What is known of some releases. What is written of them is remembered by it, so its hash is computed once."""

    known: tuple[tuple[Release, Described], ...] = ()

    @cached_property
    def _by_release(self) -> Mapping[Release, Described]:
        return dict(self.known)

    def of(self, os: str, release: str) -> Described | None:
        """What is known of one release; None if nothing is."""
        return self._by_release.get((os, release))


@frozen(eq=False)
class _Remembered:
    """What was found for ``answers``, and until when (seconds) nothing more can be; None: everything was found."""

    answers: Answers
    descriptions: Descriptions
    until: float | None


class Describer:
    """Asks racks about releases.

    :param deadline: seconds that a rack has to answer.
    """

    def __init__(
        self,
        links: IRackLinks,
        clock: IReactorTime,
        *,
        deadline: float = DEADLINE,
        ask_all: Callable[..., Awaitable[Mapping[Any, Outcome[Any]]]] = rounds.ask_all,
    ) -> None:
        self._links = links
        self._clock = clock
        self._deadline = deadline
        self._ask_all = ask_all
        self._asking = FairLock()
        self._known: OrderedDict[Hashable, Described] = OrderedDict()
        self._remembered: OrderedDict[Hashable, _Remembered] = OrderedDict()
        self._paused: dict[str, float] = {}
        self._shapes: OrderedDict[int, tuple[Catalogue, Shapes]] = OrderedDict()
        self._forgotten = 0

    def forget(self) -> None:
        """Racks may say something else from now on: one has other software than before."""
        self._forgotten += 1
        self._known.clear()
        self._remembered.clear()
        self._paused.clear()

    async def describe(self, answers: Answers, releases: Collection[Release] | None = None) -> Descriptions:
        """What racks that answered know of ``releases`` (None: of all that ``answers`` are about)."""
        # Answers are kept beside what was made of them, so no others can have their id.
        key = id(answers), None if releases is None else tuple(releases)
        if (known := self._recalled(key)) is not None:
            return known
        wanted = sorted({target[:2] for target in answers.by_target} if releases is None else releases)
        async with self._asking:
            if (known := self._recalled(key)) is not None:
                return known  # somebody who came before has found it meanwhile
            forgotten = self._forgotten
            found = await self._describe(answers, wanted)
        descriptions = Descriptions(tuple(found.items()))
        until = None if len(found) == len(wanted) else self._resting_until(answers)
        if self._forgotten == forgotten and (until is None or until > self._clock.seconds()):
            self._remembered[key] = _Remembered(answers, descriptions, until)
            _trim(self._remembered, ANSWERS)
        return descriptions

    def _recalled(self, key: Hashable) -> Descriptions | None:
        known = self._remembered.get(key)
        if known is None or (known.until is not None and known.until <= self._clock.seconds()):
            return None
        self._remembered.move_to_end(key)
        return known.descriptions

    def _resting_until(self, answers: Answers) -> float:
        """Until when (seconds) no rack that answered can be asked, as each is paused; now, or before, if one can be, or
        may be as soon as it is linked again."""
        answered = [rack.rack for rack in answers.racks if rack.held is not None]
        return min((self._paused.get(rack, 0.0) for rack in answered), default=math.inf)

    async def _describe(self, answers: Answers, wanted: Sequence[Release]) -> Mapping[Release, Described]:
        # Most racks hold the same: what they hold is looked at once for all of them.
        catalogues = {id(rack.held.catalogue): rack.held.catalogue for rack in answers.racks if rack.held is not None}
        shapes = {held: self._shapes_of(catalogue) for held, catalogue in catalogues.items()}
        found: dict[Release, Described] = {}
        began = self._clock.seconds()
        while True:
            able = self._able(answers)
            to_ask: dict[Release, tuple[str, Hashable]] = {}
            for release in wanted if able else ():
                # One that holds the release if there is one, else any that answers.
                held = next((held for held in able if release in shapes[held]), next(iter(able)))
                key = release, shapes[held].get(release)
                if key in self._known:
                    found.setdefault(release, self._known[key])
                elif release not in found and len(to_ask) < TOGETHER:
                    to_ask[release] = able[held], key
            if not to_ask or self._clock.seconds() - began >= self._deadline:
                return {release: found[release] for release in wanted if release in found}
            # Each turn describes a release more or does without a rack more, so there is an end.
            found |= await self._ask(to_ask)

    def _shapes_of(self, catalogue: Catalogue) -> Shapes:
        """The shapes of a catalogue, which racks hold through many rounds."""
        key = id(catalogue)
        if key not in self._shapes:
            # Kept beside what was made of it, so no other can have its id.
            self._shapes[key] = catalogue, _shapes(catalogue)
        self._shapes.move_to_end(key)
        shapes = self._shapes[key][1]
        _trim(self._shapes, CATALOGUES)
        return shapes

    def _able(self, answers: Answers) -> Mapping[int, str]:
        """For each catalogue that is held, by its id, the first rack with it that can be asked; in the racks' order."""
        able: dict[int, str] = {}
        now = self._clock.seconds()
        for rack in answers.racks:
            if rack.held is None or id(rack.held.catalogue) in able or self._paused.get(rack.rack, 0.0) > now:
                continue
            if self._links.link_of(rack.rack) is not None:
                able[id(rack.held.catalogue)] = rack.rack
        return able

    async def _ask(self, to_ask: Mapping[Release, tuple[str, Hashable]]) -> Mapping[Release, Described]:
        asks = {
            release: (self._links.link_of(rack), {"os": release[0], "release": release[1]})
            for release, (rack, _) in to_ask.items()
        }
        found: dict[Release, Described] = {}
        forgotten = self._forgotten
        for release, outcome in (await self._ask_all(DescribeRelease, asks, deadline=self._deadline)).items():
            rack, key = to_ask[release]
            if not isinstance(outcome, Answered):
                # The link has logged and counted that.
                self._paused[rack] = self._clock.seconds() + PAUSE
                continue
            try:
                found[release] = Described.read(outcome.value)
            except BadDescription as error:
                log.error(
                    "Rack {rack} described {release} badly: {reason}",
                    rack=rack, release="/".join(release), reason=str(error),
                )  # fmt: skip
                self._paused[rack] = self._clock.seconds() + PAUSE
            else:
                if self._forgotten == forgotten:
                    self._known[key] = found[release]
        _trim(self._known, REMEMBERED)
        return found


def _shapes(catalogue: Catalogue) -> Shapes:
    shapes: dict[Release, set[Hashable]] = {}
    for target, images in catalogue.targets.items():
        shapes.setdefault(target[:2], set()).update(map(_shape, images))
    return {release: frozenset(shape) for release, shape in shapes.items()}


def _shape(image: Image) -> Hashable:
    said = image.attribute("release_title"), image.requires_license_key
    return Kernel.of(image), said, tuple((file.name, file.ftype) for file in image.files)


def _trim(kept: OrderedDict[Any, Any], limit: int) -> None:
    while len(kept) > limit:
        kept.popitem(last=False)
