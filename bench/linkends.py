"""The two ends of many links: ``python -m bench.linkends region|racks product|plain DIRECTORY``.

*product* is this project's link; *plain* is the same commands written with Twisted's AMP, over the same TLS in the way
that Twisted does it. DIRECTORY has the certificates.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from attrs import frozen
from twisted.internet import reactor as installed
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.endpoints import TCP4ClientEndpoint
from twisted.internet.protocol import Factory
from twisted.protocols import amp
from twisted.protocols.tls import TLSMemoryBIOFactory

from bench.control import serve
from region.answers.asking import Asker
from region.answers.combine import Catalogue
from rpc.certificates import Credentials
from rpc.commands import ListImages, Register
from rpc.daemon import collect_seldom
from rpc.endpoints import connect_link, listen_tls, region_endpoint
from rpc.identity import TLS, client_tls, server_tls
from rpc.manifest import Image, ImageFile, Manifest
from rpc.outcomes import Answered
from rpc.protocol import Link, Responders, link_factory

reactor: Any = installed

FILE = ImageFile("squashfs", "squashfs", "a" * 64, 1, ())
HELD = Catalogue(Manifest([Image("ubuntu", "noble", "amd64", "ga", "generic", "stable", "1", "p", "c", "s", (FILE,))]))


class PlainRegister(amp.Command):
    """As Register."""

    arguments = [(b"name", amp.Unicode())]
    response = [(b"version", amp.Integer())]


class PlainListImages(amp.Command):
    """As ListImages, of a rack that holds what the region knows."""

    arguments = [(b"known_digest", amp.Unicode())]
    response = [
        (b"state", amp.Unicode()),
        (b"generation", amp.Integer()),
        (b"digest", amp.Unicode()),
        (b"inventory", amp.String(optional=True)),
    ]


@frozen
class Info:
    """A rack, as the region knows it without asking."""

    name: str
    generation: int | None = 1
    digest: str | None = HELD.digest
    progress: Mapping[str, Any] = {}
    reported: datetime | None = None


class ProductRegion:
    """The region's end, as the product has it."""

    def __init__(self, tls: TLS) -> None:
        collect_seldom()  # as the region does
        self.links: list[Link] = []
        self.racks: dict[str, Info] = {}
        self.by_name: dict[str, Link] = {}
        responders = Responders("region", {Register: self.register})
        listening: Any = listen_tls(reactor, 0, "127.0.0.1", tls, link_factory(lambda: Link(responders, clock=reactor)))
        self.port: int = listening.getHost().port
        self.asker = Asker(
            self, reactor, deadline=30.0, published={HELD.digest: HELD}.get, expected=lambda: HELD.digest
        )

    async def register(self, link: Link, versions: Any, name: str, **more: Any) -> dict[str, Any]:
        self.links.append(link)
        self.racks[name] = Info(name)
        self.by_name[name] = link
        return {"version": 1, "region": "bench"}

    def enrolled(self) -> Mapping[str, Info]:
        return self.racks

    def link_of(self, system_id: str) -> Link:
        return self.by_name[system_id]

    def not_connected_since(self, system_id: str) -> float | None:
        return None

    def call(self, number: int) -> Deferred[Any]:
        link = self.links[number % len(self.links)]
        return Deferred.fromCoroutine(link.call(ListImages, known_digest=HELD.digest))

    async def round(self) -> int:
        round_ = await self.asker.ask()
        return sum(isinstance(answer.outcome, Answered) for answer in round_.answers.values())


class PlainRegion:
    """The region's end, as one would write it with Twisted alone."""

    def __init__(self, tls: TLS) -> None:
        links: list[amp.AMP] = []
        self.links = links

        class Plain(amp.AMP):
            @PlainRegister.responder
            def register(self, name: str) -> dict[str, Any]:
                links.append(self)
                return {"version": 1}

        factory = TLSMemoryBIOFactory(tls, False, Factory.forProtocol(Plain))
        self.port: int = reactor.listenTCP(0, factory, 1024, "127.0.0.1").getHost().port

    def call(self, number: int) -> Any:
        return self.links[number % len(self.links)].callRemote(PlainListImages, known_digest=HELD.digest)

    async def round(self) -> int:
        return len(await gatherResults([self.call(number) for number in range(len(self.links))]))


def region(kind: str, directory: Path) -> dict[str, Callable[..., Awaitable[Any]]]:
    """What the region's end is told to do."""
    credentials = Credentials((directory / "region.key").read_bytes(), (directory / "region.crt").read_bytes())
    tls = server_tls(credentials, (directory / "ca.crt").read_bytes())
    end: ProductRegion | PlainRegion = ProductRegion(tls) if kind == "product" else PlainRegion(tls)

    async def port() -> int:
        return end.port

    async def resident() -> int:
        return _resident()

    async def calls(links: int, at_once: int, seconds: float) -> float:
        """Calls a second over the first ``links``, so many at a time on each."""
        stop = time.perf_counter() + seconds
        done = 0
        del end.links[links:]

        async def client(number: int) -> None:
            nonlocal done
            while time.perf_counter() < stop:
                await end.call(number)
                done += 1

        begun = time.perf_counter()
        await gatherResults([Deferred.fromCoroutine(client(number)) for number in range(links * at_once)])
        return done / (time.perf_counter() - begun)

    async def rounds(count: int) -> list[float]:
        """Milliseconds of this process's processor time for each of so many rounds over all links."""
        taken = []
        for _ in range(count):
            begun = _cpu()
            answered = await end.round()
            taken.append((_cpu() - begun) * 1000)
            if answered != len(end.links):
                raise RuntimeError(f"{answered} of {len(end.links)} answered")
        return taken

    return {"port": port, "resident": resident, "calls": calls, "rounds": rounds}


def racks(kind: str, directory: Path) -> dict[str, Callable[..., Awaitable[Any]]]:
    """What the racks' end is told to do."""
    ca = (directory / "ca.crt").read_bytes()
    identities = json.loads((directory / "racks.json").read_bytes())
    answer = {"state": "ready", "generation": 1, "digest": HELD.digest}

    async def list_images(link: Link, **arguments: Any) -> Mapping[str, Any]:
        return answer

    class Plain(amp.AMP):
        @PlainListImages.responder
        def list_images(self, known_digest: str) -> dict[str, Any]:
            return {**answer, "inventory": None}

    responders = Responders("rack", {ListImages: list_images})
    kept: list[Any] = []

    async def one(port: int, number: int) -> None:
        key, certificate = identities[number]
        tls = client_tls(Credentials(key.encode(), certificate.encode()), ca)
        if kind == "product":
            link = await connect_link(
                region_endpoint(reactor, "127.0.0.1", port, tls), link_factory(lambda: Link(responders, clock=reactor))
            )
            await link.call(Register, versions=[1], name=f"rack-{number}", software="bench")
            kept.append(link)
        else:
            wrapped = TLSMemoryBIOFactory(tls, True, Factory.forProtocol(Plain))
            made: Any = await TCP4ClientEndpoint(reactor, "127.0.0.1", port).connect(wrapped)
            await made.wrappedProtocol.callRemote(PlainRegister, name=f"rack-{number}")
            kept.append(made)

    async def connect(port: int, count: int) -> int:
        for number in range(count):
            await one(port, number)
        return len(kept)

    return {"connect": connect}


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    serve({"region": region, "racks": racks}[sys.argv[1]](sys.argv[2], Path(sys.argv[3])))
