"""Where the past of a release is kept: the rows that each generation wrote of what it listed and what it changed.

They never change and only grow, so what was read stays right until the next generation.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final, Protocol

from region.answers.past import Kernel, Past, Step

REMEMBERED: Final = 64
"""Of how many releases the past is kept in memory."""

_STEPS: Final = """
SELECT c.generation, extract(epoch FROM g.published)::float8, c.kind, c.arch, c.subarch, c.kflavor, c.label, c.version,
       c.reason
FROM generation_change c JOIN generation g ON g.number = c.generation
WHERE c.os = %s AND c.release = %s AND c.generation <= %s ORDER BY c.id
"""
_LISTED: Final = """
SELECT generation, arch, subarch, kflavor, label FROM generation_image
WHERE os = %s AND release = %s AND generation <= %s
"""


class IDatabase(Protocol):
    """The part of :class:`region.database.Database` that is needed here."""

    async def query(self, sql: str, parameters: Any = ()) -> list[tuple[Any, ...]]:
        """All rows."""


class Records:
    """Reads the past of releases."""

    def __init__(self, database: IDatabase) -> None:
        self._database = database
        self._known: OrderedDict[tuple[str, str], tuple[int, Past]] = OrderedDict()

    async def past(self, os: str, release: str, current: int | None) -> Past:
        """What generations up to ``current`` said of a release. Costs no query while that is what was read last.

        :raises DatabaseUnavailable: if the database cannot be asked.
        """
        if current is None:
            return Past()
        known = self._known.get((os, release))
        if known is not None and known[0] == current:
            self._known.move_to_end((os, release))
            return known[1]
        steps = await self._database.query(_STEPS, (os, release, current))
        images = await self._database.query(_LISTED, (os, release, current))
        listed: dict[int, set[Kernel]] = {}
        for number, *kernel in images:
            listed.setdefault(number, set()).add(Kernel(*kernel))
        past = Past(
            tuple(Step(row[0], row[1], row[2], Kernel(*row[3:7]), row[7], row[8]) for row in steps),
            {number: frozenset(kernels) for number, kernels in listed.items()},
        )
        self._known[os, release] = current, past
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return past
