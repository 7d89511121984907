"""How fast the API says what can be deployed when it asks the racks, beside the same list read from PostgreSQL.

Both go through the same API code, region and racks are processes of their own, and the links are TLS.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from bench.table import Figure
from tests.streams import Stream
from tests.system.daemons import Region, authorization, wait_for

SECONDS = 4.0
_LENGTH = re.compile(rb"\r\ncontent-length: *([0-9]+)", re.IGNORECASE)
ASKING, READING = "releases/", "releases-from-database/"


class ComparingRegion(Region):
    """A region that has both lists."""

    program = ("-m", "bench.comparing")


class _Client(asyncio.Protocol):
    """Asks for the same again and again over one connection; ``done`` has the seconds that each answer took.

    It looks at nothing but the status and the length, so that the processor is left to what is measured.
    """

    def __init__(self, request: bytes, until: float, done: asyncio.Future[list[float]]) -> None:
        self._request = request
        self._until = until
        self._done = done
        self._taken: list[float] = []
        self._head = b""
        self._missing = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._ask()

    def _ask(self) -> None:
        self._begun = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self._missing:
            self._missing -= len(data)
        else:
            self._head += data
            head, end, body = self._head.partition(b"\r\n\r\n")
            if not end:
                return
            self._head = b""
            found = _LENGTH.search(head)
            if found is None or not head.startswith(b"HTTP/1.1 200 "):
                self._end(RuntimeError(f"the answer to {self._request!r} began {head!r}"))
                return
            self._missing = int(found[1]) - len(body)
        if self._missing:
            return
        now = time.perf_counter()
        self._taken.append(now - self._begun)
        if now < self._until:
            self._ask()
        else:
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        self._transport.close()
        if error is None:
            self._done.set_result(self._taken)
        else:
            self._done.set_exception(error)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(exc or ConnectionError("the region closed the connection"))


async def client(region: Region, path: str, until: float) -> tuple[int, list[float]]:
    """Requests answered until ``until``, and how many seconds each took, over one connection."""
    head = (
        f"GET /MAAS/api/2.0/{path} HTTP/1.1\r\nHost: 127.0.0.1:{region.http}\r\n"
        f"Authorization: {authorization(region.key)}\r\n\r\n"
    ).encode()
    loop = asyncio.get_running_loop()
    done: asyncio.Future[list[float]] = loop.create_future()
    await loop.create_connection(lambda: _Client(head, until, done), "127.0.0.1", region.http)
    taken = await done
    return len(taken), taken


async def _load(region: Region, path: str, clients: int, seconds: float) -> tuple[float, float]:
    """Answers a second, and the median seconds of one."""
    begun = time.perf_counter()
    ends = await asyncio.gather(*(client(region, path, begun + seconds) for _ in range(clients)))
    elapsed = time.perf_counter() - begun
    taken = sorted(one for _, each in ends for one in each)
    return sum(count for count, _ in ends) / elapsed, taken[len(taken) // 2]


@contextmanager
def racks(region: Region, count: int, manifest: Path, generation: int) -> Iterator[None]:
    token = region.join_token_for(count)
    process = subprocess.Popen(
        [
            sys.executable, "-m", "bench.racks", str(count), "127.0.0.1", str(region.rpc), token, str(manifest),
            str(generation),
        ],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise RuntimeError("the racks did not come up")
        yield
    finally:
        process.communicate()


@contextmanager
def published(directory: Path, catalogue: Path, keyring: Path | None, count: int) -> Iterator[Region]:
    """A region that has published the stream in ``catalogue``, with ``count`` racks that hold it."""
    directory.mkdir()
    directory.chmod(0o755)
    region = ComparingRegion(directory)
    region.start()
    try:
        region.make_key()
        region.add_source(catalogue.resolve().as_uri() + "/", keyring.read_bytes() if keyring else b"")
        [generation] = wait_for(partial(region.get, "image-generations/"), "the import")
        manifest = directory / "manifest.json"
        manifest.write_bytes(region.stream(f"generations/{generation['digest']}/manifest.json"))
        with racks(region, count, manifest, generation["number"]):
            yield region
    finally:
        region.stop()


def measure(catalogue: Path, keyring: Path | None, scratch: Path) -> Iterator[Figure]:
    """The figures, with the images of the stream in ``catalogue``, and with few: PostgreSQL reads those sooner."""
    few = scratch / "few"
    stream = Stream(few, signer=None)
    for arch in ("amd64", "arm64", "armhf", "i386", "ppc64el", "riscv64", "s390x", "x32"):
        stream.add("noble", arch)
    stream.write()
    for count in (1, 10, 100):
        with published(scratch / f"answers-{count}", catalogue, keyring, count) as region:
            yield from _compare(region, count, "")
    with published(scratch / "answers-few", few, None, 10) as region:
        yield from _compare(region, 10, ", 8 images")


def _compare(region: Region, count: int, what: str) -> Iterator[Figure]:
    for clients in (1, 64):
        asyncio.run(_load(region, ASKING, clients, 1.0))  # whatever is only done once
        rates: dict[str, list[tuple[float, float]]] = {ASKING: [], READING: []}
        for path in (READING, ASKING, ASKING, READING):
            rates[path].append(asyncio.run(_load(region, path, clients, SECONDS / 2)))
        asking, reading = (max(rate for rate, _ in rates[path]) for path in (ASKING, READING))
        median = min(seconds for _, seconds in rates[ASKING])
        target = {(10, 64): 1.0, (10, 1): 1 / 3}.get((count, clients))
        yield Figure(
            f"asking {count} racks / PostgreSQL, {clients} clients{what}",
            asking / reading, "x", target, True,
            f"{asking:.0f}/s asking (median {median * 1000:.1f} ms), {reading:.0f}/s from PostgreSQL",
        )  # fmt: skip
