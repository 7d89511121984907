"""A region process in a world, composed as its service does it; who racks are, and events, are left out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from twisted.internet.defer import Deferred
from twisted.web.resource import Resource

from region.answers.asking import Asker, Round
from region.answers.describing import Describer
from region.answers.published import PublishedView
from region.answers.records import Records
from region.answers.releases import Releases
from region.api import Api, Authenticator
from region.images.importer import Importer
from region.images.sources import SourceStore
from region.images.store import GenerationStore
from region.images.stream import StreamResource
from region.racks import RackRegistry, RackStore, watch
from region.syncing import SyncDriver
from region.upstream.reader import SourceReader
from region.web import RegionSite, tree
from region.wire import RegionWire
from rpc.blobs import BlobStore
from rpc.fetch import Fetcher
from rpc.identity import Peer
from rpc.protocol import Link
from rpc.testing import linked
from tests.region.api_parts import parts_of
from tests.region.fakes import Keys
from tests.region.test_upstream_reader import Inline
from tests.world.database import HeldDatabase
from tests.world.rack import ModelRack
from tests.world.turns import Turns, Wire

REGION = "region"
STREAM_URL = "http://region.example:5240/MAAS/images-stream"


class _Issued:
    async def admit(self, system_id: str, certificate: object) -> None:
        """Every certificate is good."""

    async def not_told(self, authorities: object, system_id: str | None) -> list[Any]:
        """Nobody has to renew."""
        return []


class _Processes:
    id = "process-1"

    def endpoints(self) -> Mapping[str, str]:
        """There is no other."""
        return {}

    async def elsewhere(self, system_id: str, instance: str) -> None:
        """No rack is linked with another process."""


class ModelRegion:
    """A region process. Its database and its directory outlive it.

    :param look: is called when a round of asking racks begins; what it gives is :attr:`round_began`.
    """

    def __init__(self, turns: Turns, dsn: str, directory: Path, look: Callable[[], Any] = lambda: None) -> None:
        self.look = look
        self._turns = turns
        run_in_thread = turns.threads(REGION)
        self.database = HeldDatabase(turns, dsn, REGION)
        self.racks = RackStore(self.database)
        self.registry = RackRegistry(self.racks, self.now)
        self.blobs = BlobStore(directory)
        self._fetcher = Fetcher(turns, self.blobs, run_in_thread=run_in_thread, jitter=lambda: 0.0)
        self.sources = SourceStore(self.database, run_in_thread)
        self.generations = GenerationStore(self.database, run_in_thread)
        self.syncs = SyncDriver(self.registry, None, lambda: STREAM_URL)
        reader = SourceReader(turns, self._fetcher, spawn=Inline, run_in_thread=run_in_thread, now=self.now)
        self.importer = Importer(
            self.database, self.sources, self.generations, reader, self._fetcher, self.blobs, turns,
            interval=0, at_start=False, syncing=self.syncs.syncing, run_in_thread=run_in_thread,
            free_bytes=lambda path: 1 << 40, now=self.now,
        )  # fmt: skip
        view = PublishedView(self.generations)
        self.asker = Asker(
            self.registry, turns, published=view.catalogue, expected=view.current_digest, run_in_thread=run_in_thread
        )
        describer = Describer(self.registry, turns)
        parts = parts_of(
            releases=Releases(self.asker, view, turns, Records(self.database), describer), asker=self.asker,
            published=view, racks=self.registry, syncs=self.syncs, sources=self.sources, generations=self.generations,
            jobs=self.importer.jobs, importer=self.importer,
        )  # fmt: skip
        stream = StreamResource(self.generations, self.blobs, turns, run_in_thread=run_in_thread)
        api = Api(parts, Authenticator(Keys(), turns)).resource()
        self.site = RegionSite(tree(api, stream, Resource()), turns)
        authority = SimpleNamespace(issued=_Issued(), keys=SimpleNamespace(authorities=()))
        wire = RegionWire(
            cast(Any, authority), self.registry, self.syncs, cast(Any, None), cast(Any, _Processes()), REGION,
            [STREAM_URL],
        )  # fmt: skip
        self._responders = wire.responders()
        self.is_up = False
        self.round_began: Any = None
        ask = self.asker.ask

        def asked() -> Deferred[Round]:
            if self.asker._waiting is None:
                self.round_began = self.look()
            return ask()

        self.asker.ask = asked  # type: ignore[method-assign]  # to know when each round began

    def now(self) -> datetime:
        """The world's time."""
        return datetime.fromtimestamp(self._turns.seconds(), UTC)

    async def start(self) -> None:
        """Start it."""
        await self.database.start()
        await self.registry.refresh()
        watch(self.registry, self.database, self._turns)
        self.generations.start()
        current = await self.generations.current()
        if current is not None:
            self.syncs._current = current
        self.generations.subscribe(self.syncs.published)
        self.importer.start()
        self.is_up = True

    async def stop(self) -> None:
        """Stop it, in the order of its service."""
        self.is_up = False
        await self.importer.stop()
        await self.registry.close()
        await self._fetcher.close()
        self.blobs.close()
        await self.database.stop()

    async def enrol(self, system_id: str, name: str) -> None:
        """Make it a rack, as when it joins."""
        certificate = hashlib.sha256(system_id.encode()).hexdigest()
        await self.database.transact(lambda transaction: self.racks.enrol(transaction, system_id, name, certificate))
        await self.registry.refresh()

    async def forget(self, system_id: str) -> None:
        """Make it no rack any more, as the API does."""
        await self.racks.forget(system_id)
        await self.registry.refresh()

    def link(self, rack: ModelRack) -> Deferred[None]:
        """Connect ``rack``; fires when it has registered, and fails if it was refused."""
        process = rack.process
        assert process is not None
        region_end, rack_end, pump = linked(
            self._responders, process.links.responders, self._turns, rack=Peer("rack", rack.system_id, "192.0.2.7:1"),
            version=None, interval=0,
        )  # fmt: skip
        wire = Wire(rack.system_id, pump)
        self._turns.lanes.append(wire)
        rack.link = region_end, rack_end, wire

        def lost(link: Link, reason: str) -> None:
            if rack.link is not None and rack.link[1] is link:
                rack.link = None

        rack_end.on_lost(lost)
        return Deferred.fromCoroutine(process.links.prepare(rack_end, rack.turn()))
