"""What the links with a thousand racks cost the region, beside Twisted's AMP over the same TLS, in the same run.

Memory and the return after a restart are of the region as it runs, with its database; calls and rounds of a process
that has the region's end of the links and its asker, and of one that has plain AMP.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

from bench.control import Remote, raise_limit, remote
from bench.table import Figure
from rpc.certificates import create_authority, issue_rack, issue_region, make_request, new_key
from tests.system.daemons import Region

RACKS = 1000
KIB = 1024
SECONDS = 2.0
IDLE_SECONDS = 20.0
ROUNDS = 15


def measure(scratch: Path, racks: int = RACKS) -> Iterator[Figure]:
    """The figures."""
    raise_limit()
    directory = scratch / "links"
    directory.mkdir()
    directory.chmod(0o755)
    _make_identities(directory, racks)
    yield from _calls(directory)
    yield from _rounds(directory, racks)
    yield from _daemon(directory, racks)


def _make_identities(directory: Path, racks: int) -> None:
    now = datetime.now(UTC)
    authority = create_authority(now)
    region = issue_region(authority, now)
    (directory / "ca.crt").write_bytes(authority.certificate)
    (directory / "region.key").write_bytes(region.key)
    (directory / "region.crt").write_bytes(region.certificate)
    keys = [new_key() for _ in range(racks)]
    certificates = [issue_rack(authority, make_request(key), f"{number:06d}", now) for number, key in enumerate(keys)]
    pairs = [(key.decode(), certificate.decode()) for key, certificate in zip(keys, certificates, strict=True)]
    (directory / "racks.json").write_text(json.dumps(pairs))


class _Ends:
    """The two ends of a kind of links, in a process each."""

    def __init__(self, stack: ExitStack, kind: str, directory: Path) -> None:
        self.region: Remote = stack.enter_context(remote("bench.linkends", "region", kind, str(directory)))
        self.racks: Remote = stack.enter_context(remote("bench.linkends", "racks", kind, str(directory)))
        self.port = self.region.tell("port")

    def connect(self, count: int) -> None:
        self.racks.tell("connect", port=self.port, count=count)


def _calls(directory: Path) -> Iterator[Figure]:
    with ExitStack() as stack:
        ends = {kind: _Ends(stack, kind, directory) for kind in ("product", "plain")}
        for each in ends.values():
            each.connect(100)
        for links, at_once in ((100, 1), (1, 1), (1, 32)):
            rates: dict[str, float] = dict.fromkeys(ends, 0.0)
            for kind in ("product", "plain", "plain", "product", "product", "plain"):
                rate = ends[kind].region.tell("calls", links=links, at_once=at_once, seconds=SECONDS)
                rates[kind] = max(rates[kind], rate)
            over = f"{links} links" if links > 1 else f"one link, {at_once} at a time"
            yield Figure(
                f"calls over {over} / plain AMP", rates["product"] / rates["plain"], "x", 0.7, True,
                f"{rates['product']:.0f}/s, plain {rates['plain']:.0f}/s",
            )  # fmt: skip


def _rounds(directory: Path, racks: int) -> Iterator[Figure]:
    with ExitStack() as stack:
        ends = {kind: _Ends(stack, kind, directory) for kind in ("product", "plain")}
        memory: dict[str, float] = {}
        for kind, each in ends.items():
            before = each.region.tell("resident")
            each.connect(racks)
            memory[kind] = (each.region.tell("resident") - before) / racks / KIB
        taken: dict[str, list[float]] = {kind: [] for kind in ends}
        for _ in range(ROUNDS):
            for kind, each in ends.items():
                taken[kind] += each.region.tell("rounds", count=3)
    product, plain = (sorted(taken[kind])[len(taken[kind]) // 2] for kind in ("product", "plain"))
    yield Figure(
        f"one ask round over {racks} racks / plain AMP calls", product / plain, "x", 0.5, False,
        f"region CPU (getrusage), median of {len(taken['product'])}: {product:.0f} ms, plain {plain:.0f} ms",
    )  # fmt: skip
    yield Figure("memory of a plain AMP link over TLS", memory["plain"], " KiB", detail="its region end alone")
    yield Figure("memory of a link", memory["product"], " KiB", detail="its region end alone")


def _daemon(directory: Path, racks: int) -> Iterator[Figure]:
    region = Region(directory)
    region.start()
    try:
        token = region.join_token_for(racks)
        with remote("bench.fleet", "127.0.0.1", str(region.rpc)) as fleet:
            fleet.tell("join", token=token, count=racks)
            region.stop()  # so that what enrolling left in memory is not taken for what links need, or hides it
            region.start()
            time.sleep(2)
            before = region.resident
            fleet.tell("connect")
            fleet.tell("all_registered")
            time.sleep(IDLE_SECONDS)
            yield Figure(
                "region memory per idle rack link", (region.resident - before) / racks / KIB, " KiB", 60, False,
                f"{racks} racks, TLS, registered; {before / KIB / KIB:.0f} MiB without",
            )  # fmt: skip
            fleet.tell("reset")
            region.stop()
            region.start()
            fleet.tell("all_registered")
            times = fleet.tell("times")
            for what, name in (("registered", "registrations"), ("connected", "first connections")):
                moments = times[what]
                begun = min(moments)
                most = max(_per_tenth(moments))
                yield Figure(
                    f"{name} in 100 ms after a restart, at most", most, "", racks * 0.06, False,
                    f"of {racks} racks, all within {max(moments) - begun:.1f} s of the first",
                )  # fmt: skip
    finally:
        region.stop()


def _per_tenth(moments: list[float]) -> Iterator[int]:
    """For each moment, how many there are in the tenth of a second from it on."""
    ordered = sorted(moments)
    end = 0
    for start, moment in enumerate(ordered):
        while end < len(ordered) and ordered[end] < moment + 0.1:
            end += 1
        yield end - start
