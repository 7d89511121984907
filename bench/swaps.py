"""How fast the API says what can be deployed while that changes all the time, beside the same while nothing changes.

Every so often the region publishes, every rack fetches the new manifest over HTTP, swaps to it and reports it; clients
poll the list of releases all the while. No import takes part: it would measure what else its process has to do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

from attrs import frozen

from bench.answers import ASKING, client, published
from bench.processor import seconds_of
from bench.table import Figure
from tests.system.daemons import Region

CLIENTS = 64
RACKS = 10
SECONDS = 5.0
ROUNDS = 3
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


def measure(catalogue: Path, keyring: Path | None, scratch: Path) -> Iterator[Figure]:
    """The figures, with the images of the stream in ``catalogue``."""
    with published(scratch / "swaps", catalogue, keyring, RACKS) as region:
        asyncio.run(_poll(region, True))  # whatever is only done once
        still: list[_Polled] = []
        swapping: list[_Polled] = []
        for number in range(ROUNDS):
            # Turn about, so that what else the machine does meets both.
            for mode in (False, True) if number % 2 else (True, False):
                (swapping if mode else still).append(asyncio.run(_poll(region, mode)))
        racks = region.get("rackcontrollers/")
        generation = region.get("image-generations/")[0]
        behind = [rack["hostname"] for rack in racks if rack["generation"] < generation["number"] - 1]
        if behind:
            raise RuntimeError(f"generation {generation['number']} is published, and far behind are {behind}")
    publishes = sum(each.publishes for each in swapping)
    what = f"{publishes} publishes in {ROUNDS * SECONDS:g} s, each with {RACKS} swaps; {CLIENTS} clients"

    def middle(found: list[_Polled]) -> tuple[float, float, float]:
        return median(one.rate for one in found), median(one.p99 for one in found), median(one.cpu for one in found)

    rate, p99, cpu = middle(swapping)
    still_rate, still_p99, still_cpu = middle(still)
    yield Figure(
        "rate of releases/, still / swapping", still_rate / rate, "x", 1.1, False,
        f"{rate:.0f}/s swapping, {still_rate:.0f}/s still; {what}",
    )  # fmt: skip
    yield Figure(
        "p99 of releases/, swapping / still", p99 / still_p99, "x", 1.1, False,
        f"{p99 * 1000:.0f} ms swapping, {still_p99 * 1000:.0f} ms still",
    )  # fmt: skip
    yield Figure(
        "the region's CPU for one, swapping / still", cpu / still_cpu, "x", None, False,
        f"{cpu * 1000:.2f} ms swapping, {still_cpu * 1000:.2f} ms still, with all that a publish takes it",
    )  # fmt: skip
