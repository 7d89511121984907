"""How fast the API says what can be deployed while that changes all the time, beside the same while nothing changes.

Every so often the region publishes, every rack fetches the new manifest over HTTP, swaps to it and reports it; clients
poll the list of releases all the while. No import takes part: it would measure what else its process has to do.

What else the machine does changes the rate by more than swaps do. So it is measured in many short pairs, one half of
each still and the other swapping, turn about; each pair has its own ratio, and the median of those is the figure.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median, quantiles

from attrs import frozen

from bench.answers import ASKING, client, published
from bench.processor import seconds_of
from bench.table import Figure
from tests.system.daemons import Region

CLIENTS = 64
RACKS = 10
SECONDS = 3.0
"""How long a half of a pair is: some 10,000 answers."""
PAIRS = 12
ALONE = 12
"""How often is published with nobody asking, for what that takes by itself."""
PAUSE = 0.5
"""Seconds from one publish to the next; the racks have all swapped in much less."""


def _publish(region: Region) -> None:
    status, body, _ = region.api("publish/", "POST", {})
    if status != 200:
        raise RuntimeError(f"publishing: {status} {body}")


@frozen
class _Polled:
    """Answers a second, the seconds within which 99 of 100 came, the processor's seconds that the region took for one,
    and how often it was published meanwhile."""

    rate: float
    p99: float
    cpu: float
    publishes: int


async def _poll(region: Region, swapping: bool) -> _Polled:
    begun = seconds_of(region.pid)
    until = time.perf_counter() + SECONDS
    clients = [asyncio.ensure_future(client(region, ASKING, until)) for _ in range(CLIENTS)]
    publishes = 0
    with ThreadPoolExecutor(1) as threads:
        while swapping and time.perf_counter() + PAUSE < until:
            await asyncio.get_running_loop().run_in_executor(threads, _publish, region)
            publishes += 1
            await asyncio.sleep(PAUSE)
        ends = await asyncio.gather(*clients)
    taken = sorted(one for _, each in ends for one in each)
    spent = (seconds_of(region.pid) - begun) / len(taken)
    return _Polled(len(taken) / SECONDS, taken[len(taken) * 99 // 100], spent, publishes)


def _alone(region: Region) -> float:
    """The processor's seconds that the region takes for a publish and the racks' swaps, while nobody asks."""
    begun = seconds_of(region.pid)
    for _ in range(ALONE):
        _publish(region)
        time.sleep(PAUSE)
    return (seconds_of(region.pid) - begun) / ALONE


def _spread(ratios: Sequence[float]) -> str:
    lower, _, upper = quantiles(ratios, n=4)
    return f"median of {len(ratios)} pairs of still and swapping, half of them {lower:.2f} to {upper:.2f}"


def measure(catalogue: Path, keyring: Path | None, scratch: Path) -> Iterator[Figure]:
    """The figures, with the images of the stream in ``catalogue``."""
    pairs: list[tuple[_Polled, _Polled]] = []
    with published(scratch / "swaps", catalogue, keyring, RACKS) as region:
        asyncio.run(_poll(region, True))  # whatever is only done once
        for number in range(PAIRS):
            # Turn about, so that what else the machine does meets both.
            halves = {mode: asyncio.run(_poll(region, mode)) for mode in ((False, True), (True, False))[number % 2]}
            pairs.append((halves[False], halves[True]))
        alone = _alone(region)
        racks = region.get("rackcontrollers/")
        generation = region.get("image-generations/")[0]
        behind = [rack["hostname"] for rack in racks if rack["generation"] < generation["number"] - 1]
        if behind:
            raise RuntimeError(f"generation {generation['number']} is published, and far behind are {behind}")
    publishes = sum(swapping.publishes for _, swapping in pairs)
    what = f"{publishes} publishes in {PAIRS * SECONDS:g} s, each with {RACKS} swaps; {CLIENTS} clients"

    def compared(name: str, of: Callable[[_Polled], float], unit: str, limit: float | None, more: str) -> Figure:
        """The median of the pairs' ratios, of what is the better the less there is of it."""
        ratios = [of(swapping) / of(still) for still, swapping in pairs]
        still, swapping = (median(of(pair[half]) for pair in pairs) for half in (0, 1))
        source = f"{_spread(ratios)}; {swapping:.3g} {unit} swapping, {still:.3g} {unit} still{more}"
        return Figure(name, median(ratios), "x", limit, False, source)

    yield compared(
        "1 / rate of releases/, swapping / still", lambda half: 1000 / half.rate, "ms an answer", 1.1, f"; {what}",
    )  # fmt: skip
    yield compared("p99 of releases/, swapping / still", lambda half: half.p99 * 1000, "ms", 1.1, "")
    yield compared(
        "the region's CPU for one, swapping / still", lambda half: half.cpu * 1000, "ms", None,
        ", with all that a publish takes it",
    )  # fmt: skip
    yield Figure(
        "the region's CPU for a publish", alone * 1000, " ms", None, False,
        f"with {RACKS} swaps, while nobody asks",
    )  # fmt: skip
