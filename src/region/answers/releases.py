"""Which releases can be deployed right now: a round over the racks, combined with what is published, and written down.

One request uses one round, so what is checked and what is listed cannot disagree. Rounds that say the same share the
combined answers and the bytes that are sent, so that a client costs a look-up and not a rendering.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from datetime import UTC, date, datetime
from functools import partial
from itertools import groupby
from typing import Any, Final, Generic, Protocol, TypeVar

from attrs import frozen
from twisted.logger import Logger

from region.answers import documents, narrowing
from region.answers.asking import Asker
from region.answers.combine import Answers, Policy, Published, Target, combine
from region.answers.describing import Describer, Descriptions
from region.answers.past import Past
from region.answers.published import PublishedView
from region.database import DatabaseUnavailable
from rpc.manifest import is_path_component
from rpc.steady import ITimeOfDay

T = TypeVar("T")
log = Logger()

REMEMBERED: Final = 16
"""How many different combined answers are kept."""

REMEMBERED_ENTRIES: Final = 512
"""How many releases' entries in lists are kept."""

REMEMBERED_BYTES: Final = 8 << 20
"""How many bytes of documents are kept, whatever their number."""


class UnknownRack(LookupError):
    """A request names a rack that is not enrolled: ``rack`` is what it said, ``enrolled`` what it might have meant."""

    def __init__(self, rack: str, enrolled: tuple[str, ...]) -> None:
        super().__init__(f"no rack {rack!r} is enrolled")
        self.rack = rack
        self.enrolled = enrolled


@frozen
class Question:
    """What a request is about: which racks must serve the machine (none named: all), how many of them, which arch."""

    policy: Policy = Policy.ANY
    racks: frozenset[str] = frozenset()
    arch: str | None = None


class _Kept(Generic[T]):
    """The values that were computed last, by key, as long as their weights together are at most ``limit``."""

    def __init__(self, limit: int, weight: Callable[[T], int]) -> None:
        self._limit = limit
        self._weight = weight
        self._total = 0
        self._values: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, key: Hashable, compute: Callable[[], T]) -> T:
        if key in self._values:
            self._values.move_to_end(key)
            return self._values[key]
        value = self._values[key] = compute()
        self._total += self._weight(value)
        while self._total > self._limit:
            _, dropped = self._values.popitem(last=False)
            self._total -= self._weight(dropped)
        return value


class IRecords(Protocol):
    """Where it is read what became of a release; :class:`region.answers.records.Records` is one."""

    async def past(self, os: str, release: str, current: int | None) -> Past:
        """What generations up to ``current`` said of a release; DatabaseUnavailable if that cannot be read."""


class Releases:
    """Answers questions about releases."""

    def __init__(
        self,
        asker: Asker,
        published: PublishedView,
        clock: ITimeOfDay,
        records: IRecords,
        describer: Describer,
    ) -> None:
        self._records = records
        self._describer = describer
        self._asker = asker
        self._published = published
        self._clock = clock
        self._answers: _Kept[Answers] = _Kept(REMEMBERED, lambda answers: 1)
        # Answers are kept beside what was made of them, so no others can have their id.
        self._narrowed: _Kept[tuple[Answers, Answers]] = _Kept(REMEMBERED, lambda kept: 1)
        self._entries: _Kept[documents.Document] = _Kept(REMEMBERED_ENTRIES, lambda entry: 1)
        self._documents: _Kept[tuple[Answers, bytes]] = _Kept(REMEMBERED_BYTES, lambda kept: len(kept[1]))

    async def answers(self, question: Question) -> Answers:
        """Ask the racks and combine what they say.

        :raises UnknownRack: if the question names a rack that is not enrolled (by id or by name), and others are.
        :raises DatabaseUnavailable: if what is published is not known and the database cannot be asked.
        """
        # A rack seen for the first time is asked about what is published, so that must be known before the round;
        # it is read again after it, so that no rack is ahead of what it is compared with.
        await self._published.read()
        asked = await self._asker.ask()
        if self._asker.lacks(asked, question.racks):
            # It joined, or got that name, after that round had begun; that is nothing to blame the client for.
            asked = await self._asker.ask()
        published = await self._published.read()
        racks = asked.answers
        chosen = frozenset(self._chosen(question.racks, racks)) if question.racks else None
        if chosen is not None:
            racks = {rack: racks[rack] for rack in chosen}
        key = (published.number, published.catalogue.digest, question.policy, chosen, asked.key)
        return self._answers.get(key, lambda: combine(published, racks, question.policy))

    async def described(self, answers: Answers, *releases: tuple[str, str]) -> Descriptions:
        """What racks know of these releases (os, release), or of all; those that no rack describes now are left out."""
        return await self._describer.describe(answers, releases or None)

    def listing(self, answers: Answers, arch: str | None, described: Descriptions) -> bytes:
        """The list of releases as JSON: the same bytes for the same answers, on the same day."""
        write = partial(documents.releases, remember=self._entries.get)
        return self._written("releases", write, answers, arch, described)

    async def past(self, os: str, release: str, published: Published) -> Past | None:
        """What became of a release; None, and a line in the log, if that cannot be read at the moment."""
        if not (is_path_component(os) and is_path_component(release)):
            return Past()  # no image can be called so, and not every text can be asked about
        try:
            return await self._records.past(os, release, published.number)
        except DatabaseUnavailable as error:
            # What can be deployed is known all the same, and is what matters.
            log.warn(
                "What became of {os}/{release} cannot be read: {reason}", os=os, release=release, reason=str(error)
            )
            return None

    def for_kernel(self, answers: Answers, os: str, release: str, kernel: str, past: Past | None) -> Answers:
        """The answers for one kernel of a release; see :func:`region.answers.narrowing.narrowed`."""
        key = ("kernel", id(answers), os, release, kernel, past)
        kept = self._narrowed.get(key, lambda: (answers, narrowing.narrowed(answers, os, release, kernel, past)))
        return kept[1]

    def why(
        self,
        answers: Answers,
        os: str,
        release: str,
        arch: str | None,
        kernel: str | None,
        past: Past | None,
        described: Descriptions,
    ) -> bytes:
        """Why a release can be deployed or not, as JSON: the same bytes for the same answers, on the same day."""
        return self._written("why", documents.why, answers, os, release, arch, kernel, past, described)

    def _written(
        self, name: str, write: Callable[..., documents.Document], answers: Answers, *arguments: Hashable
    ) -> bytes:
        today = self.today()
        key = (id(answers), name, arguments, today)
        return self._documents.get(key, lambda: (answers, encode(write(answers, *arguments, today))))[1]

    def today(self) -> date:
        """The day (UTC) that decides what is supported."""
        return datetime.fromtimestamp(self._clock.seconds(), UTC).date()

    def _chosen(self, wanted: frozenset[str], racks: Mapping[str, Any]) -> set[str]:
        if not racks:
            return set()
        by_name = {rack.name: system_id for system_id, rack in racks.items()}
        chosen = set()
        for rack in sorted(wanted):
            if rack not in racks and rack not in by_name:
                raise UnknownRack(rack, tuple(sorted(racks)))
            chosen.add(rack if rack in racks else by_name[rack])
        return chosen


def encode(document: object) -> bytes:
    """``document`` as JSON."""
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()


async def listing_from_database(database: Any, published: Published, arch: str | None, today: date) -> bytes:
    """The list of releases read from PostgreSQL instead of asked from racks: what ``bench`` compares with.

    The same document, from the rows of the current generation; it says nothing of racks.
    """
    rows = await database.query(
        """SELECT os, release, arch, subarch, label, version, size, title, support_eol FROM generation_image
           WHERE generation = (SELECT generation FROM current_generation) AND release <> ''
                 AND (%s::text IS NULL OR arch = %s)
           ORDER BY os, release, arch, subarch""",
        (arch, arch),
    )
    facts = [documents.ImageFacts(Target(*row[:3]), *row[3:]) for row in rows]
    entries = []
    for (os, release), group in groupby(facts, key=lambda fact: fact.target[:2]):
        found = list(group)
        entry = documents.release_entry(os, release, found, today)
        entry["architectures"] = [
            documents.architecture_entry(arch, list(images))
            for arch, images in groupby(found, lambda fact: fact.target.arch)
        ]
        entries.append(entry)
    return encode(documents.envelope(published, Policy.ANY.value) | {"reason": "", "releases": entries, "racks": []})
