"""What was injected into the product so far by the tests that crash it, for whoever soaks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from attrs import define, field

from tests.faults import Disk


@define
class Crashes:
    """How many faults of each kind there were."""

    kinds: Counter[str] = field(factory=Counter)

    def injected(self, disk: Disk, kind: str) -> None:
        """Count what happened on ``disk``, if anything did."""
        if disk.met:
            self.count(kind)

    def count(self, kind: str) -> None:
        """Count one that there was."""
        self.kinds[kind] += 1

    def lines(self) -> Iterator[str]:
        """The summary."""
        yield from (f"{count:>10} injected  {kind}" for kind, count in sorted(self.kinds.items()))
        yield f"{sum(self.kinds.values()):>10} crashes and faults injected in all"


TALLY: Final = Crashes()
