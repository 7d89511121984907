"""Many racks in one process, over real links: ``python -m bench.racks COUNT HOST PORT TOKEN MANIFEST GENERATION``.

Each enrols, registers, and answers as a rack that holds the manifest. They end when standard input does.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from attrs import frozen
from twisted.internet import reactor as installed
from twisted.internet.defer import Deferred
from twisted.logger import globalLogBeginner
from twisted.web.client import Agent, HTTPConnectionPool, readBody

from rack.assignment import Assignment
from rack.systems.describing import describe
from rack.wire import described, resolve
from rpc.arguments import Packed, pack
from rpc.commands import DescribeRelease, ListImages, Register, ReportInventory, SyncImages
from rpc.endpoints import enrol, reconnecting
from rpc.identity import JoinToken, client_tls
from rpc.logs import VARIABLE, observer
from rpc.manifest import Manifest, parse_manifest
from rpc.protocol import Link, Responders


@frozen
class Snapshot:
    """What a rack holds."""

    generation: int
    digest: str
    data: bytes

    @classmethod
    def of(cls, generation: int, data: bytes) -> Snapshot:
        return cls(generation, sha256(data).hexdigest(), data)

    @cached_property
    def manifest(self) -> Manifest:
        return parse_manifest(self.data, self.digest)

    @cached_property
    def packed(self) -> Packed:
        return pack(self.data)

    @property
    def known(self) -> dict[str, Any]:
        return {"state": "ready", "generation": self.generation, "digest": self.digest}


class Rack:
    """One rack. What it is told to sync to it swaps to as soon as it has that generation's manifest."""

    def __init__(self, agent: Agent, held: Snapshot, snapshots: dict[str, Snapshot]) -> None:
        self._agent = agent
        self._snapshots = snapshots
        self.held = held

    def responders(self) -> Responders:
        return Responders(
            "rack",
            {ListImages: self.list_images, SyncImages: self.sync_images, DescribeRelease: self.describe_release},
        )

    async def list_images(self, link: Link, known_digest: str, newest_digest: str | None) -> Mapping[str, Any]:
        known = self.held.known
        return known if known["digest"] in (known_digest, newest_digest) else known | {"inventory": self.held.packed}

    async def describe_release(self, link: Link, os: str, release: str) -> Mapping[str, Any]:
        return described(describe(self.held.manifest, os, release))

    async def sync_images(self, link: Link, generation: int, digest: str, url: str) -> Mapping[str, Any]:
        outcome = "unchanged"
        if digest != self.held.digest:
            where = Assignment(generation, digest, resolve(url, link.peer.address)).manifest_url
            data = await readBody(await self._agent.request(b"GET", where.encode()))
            # All racks of this process parse and compress it together, if at all: the region is what is measured.
            if digest not in self._snapshots:
                self._snapshots.clear()
                self._snapshots[digest] = Snapshot.of(generation, data)
            self.held = self._snapshots[digest]
            await self.report(link)
            outcome = "synced"
        known = self.held.known
        return {
            "outcome": outcome, "generation": known["generation"], "digest": known["digest"], "reason": "",
            "bytes_fetched": 0, "files_fetched": 0,
        }  # fmt: skip

    async def report(self, link: Link) -> None:
        await link.call(ReportInventory, **self.held.known, progress={})


async def run(reactor: Any, count: int, host: str, port: int, token: str, manifest: Path, generation: int) -> None:
    """Bring ``count`` racks up and say so."""
    held = Snapshot.of(generation, manifest.read_bytes())
    pool = HTTPConnectionPool(reactor)
    pool.maxPersistentPerHost = count  # each rack keeps its own connection
    agent = Agent(reactor, pool=pool)
    snapshots: dict[str, Snapshot] = {}
    for number in range(count):
        enrolled = await enrol(reactor, host, port, JoinToken.parse(token), f"bench-{number}")
        ready: Deferred[None] = Deferred()
        rack = Rack(agent, held, snapshots)
        responders = rack.responders()

        async def prepare(link: Link, ready: Deferred[None] = ready, number: int = number, rack: Rack = rack) -> None:
            await link.call(Register, versions=[1], name=f"bench-{number}", software="bench")
            await rack.report(link)
            if not ready.called:
                ready.callback(None)

        def make(responders: Responders = responders) -> Link:
            return Link(responders, clock=reactor)

        tls = client_tls(enrolled.credentials, enrolled.ca)
        reconnecting(reactor, host, port, tls, make, prepare).startService()
        await ready
    sys.stdout.write("ready\n")
    sys.stdout.flush()


def main() -> None:
    """Run until standard input ends."""
    reactor: Any = installed
    globalLogBeginner.beginLoggingTo([observer(sys.stderr, {VARIABLE: "error"})], redirectStandardIO=False)
    count, host, port, token, manifest, generation = sys.argv[1:]

    def begin() -> None:
        starting = Deferred.fromCoroutine(
            run(reactor, int(count), host, int(port), token, Path(manifest), int(generation))
        )
        starting.addErrback(lambda failure: (sys.stderr.write(failure.getTraceback()), reactor.stop()))

    def read() -> None:
        sys.stdin.read()
        reactor.callFromThread(reactor.stop)

    reactor.callWhenRunning(begin)
    reactor.callInThread(read)
    reactor.run()


if __name__ == "__main__":
    main()
