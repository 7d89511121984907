"""A region process in a world, composed as its service does it; its authority, and events, are left out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime
from functools import partial
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
from region.database import DatabaseUnavailable, Transaction
from region.images.importer import Importer
from region.images.receiving import Receiver
from region.images.repair import Repairs
from region.images.sources import SourceStore
from region.images.store import GenerationStore
from region.images.stream import StreamResource
from region.images.uploads import UploadStore
from region.issued import IssuedCertificates
from region.processes import Connections, Processes
from region.racks import RackRegistry, RackStore, Unrecorded, watch
from region.syncing import SyncDriver
from region.upstream.reader import SourceReader
from region.web import RegionSite, tree
from region.wire import RegionWire
from rpc.blobs import BlobStore
from rpc.events import Kind
from rpc.fetch import Fetcher
from rpc.identity import Peer
from rpc.protocol import Link
from rpc.testing import linked
from rpc.verifying import Verifier
from tests.region.api_parts import parts_of
from tests.region.fakes import Keys
from tests.region.test_upstream_reader import Inline
from tests.world.database import HeldDatabase
from tests.world.rack import VERIFYING, Linked, ModelRack
from tests.world.turns import Turns, Wire

REGION = "region"
SECOND = "region-2"
EXPIRE_HOURS = 24.0
STREAM_URL = "http://region.example:5240/MAAS/images-stream"


class _Issued(IssuedCertificates):
    async def not_told(self, authorities: object, system_id: str | None = None) -> list[Any]:
        """Nobody has to renew."""
        return []


class _Alone(Unrecorded):
    """The region processes, where there is but one."""

    id = "process-1"

    async def start(self, endpoint: str) -> None:
        """Nobody has to know of it."""

    async def stop(self) -> None:
        """Nobody knew of it."""

    def endpoints(self) -> Mapping[str, str]:
        """There is no other."""
        return {}

    async def elsewhere(self, system_id: str, instance: str) -> None:
        """No rack is linked with another process."""

    async def connections(self) -> Mapping[str, Connections]:
        """How racks are linked is not asked."""
        return {}


class ModelRegion:
    """A region process. Its database and its directory outlive it.

    :param look: is called with it when a round of asking racks begins; what it gives is :attr:`round_began`.
    :param owner: whose lanes its work is in.
    :param is_alone: whether there is no other over the same database.

    Of several over one database, the one called :data:`REGION` imports and serves the files, as operators are told to
    set it up; the others do not import.
    """

    def __init__(
        self,
        turns: Turns,
        dsn: str,
        directory: Path,
        look: Callable[[ModelRegion], Any] = lambda region: None,
        *,
        owner: str = REGION,
        is_alone: bool = True,
    ) -> None:
        self.owner = owner
        self.is_importing = owner == REGION
        self._turns = turns
        run_in_thread = turns.threads(owner)
        self.database = HeldDatabase(turns, dsn, owner)
        self.racks = RackStore(self.database)
        self.processes = _Alone() if is_alone else Processes(
            self.database, turns, owner, directory, self.now, host="host.example"
        )  # fmt: skip
        self.registry = RackRegistry(self.racks, self.now, self.processes)
        self.blobs = BlobStore(directory)
        self._fetcher = Fetcher(turns, self.blobs, run_in_thread=run_in_thread, jitter=lambda: 0.0)
        self.sources = SourceStore(self.database, run_in_thread)
        self.generations = GenerationStore(self.database, run_in_thread)
        self.syncs = SyncDriver(self.registry, None, lambda: STREAM_URL, self.generations.read_again)
        reader = SourceReader(turns, self._fetcher, spawn=Inline, run_in_thread=run_in_thread, now=self.now)
        self.importer = Importer(
            self.database, self.sources, self.generations, reader, self._fetcher, self.blobs, turns,
            here=self.is_importing, interval=0, at_start=False, syncing=self.syncs.syncing, run_in_thread=run_in_thread,
            free_bytes=lambda path: 1 << 40, now=self.now,
        )  # fmt: skip
        self.verifier = Verifier(self.blobs, turns, run_in_thread, turns.seconds, VERIFYING, 0)
        self.happened: list[tuple[Kind, str]] = []
        self.repairs = Repairs(
            self.blobs, self.generations, self.verifier, turns, partial(self.importer.request, "repair"),
            lambda kind, description: self.happened.append((kind, description)), self.syncs.again, lambda: 0.0,
        )  # fmt: skip
        self.blobs.on_damage.append(lambda damaged: turns.callFromThread(self.repairs.found, damaged))
        self.blobs.on_repair.append(lambda damaged: turns.callFromThread(self.repairs.repaired, damaged))
        uploads = UploadStore(self.database)
        self.receiver = Receiver(
            uploads, self.blobs, owner, EXPIRE_HOURS, turns, run_in_thread, partial(self.importer.request, "upload"),
            lambda path: 1 << 40, takes=self.is_importing,
        )  # fmt: skip
        view = PublishedView(self.generations)
        self.asker = Asker(
            self.registry, turns, published=view.catalogue, expected=view.current_digest, run_in_thread=run_in_thread
        )
        describer = Describer(self.registry, turns)
        parts = parts_of(
            releases=Releases(self.asker, view, turns, Records(self.database), describer), asker=self.asker,
            published=view, racks=self.registry, syncs=self.syncs, sources=self.sources, generations=self.generations,
            jobs=self.importer.jobs, importer=self.importer, verifier=self.verifier, uploads=uploads,
            receiver=self.receiver, connections=self.processes.connections,
        )  # fmt: skip
        stream = StreamResource(self.generations, self.blobs, turns, run_in_thread=run_in_thread)
        api = Api(parts, Authenticator(Keys(), turns)).resource()
        self.site = RegionSite(tree(api, stream, Resource()), turns)
        authority = SimpleNamespace(issued=_Issued(self.database), keys=SimpleNamespace(authorities=()))
        wire = RegionWire(
            cast(Any, authority), self.registry, self.syncs, cast(Any, None), cast(Any, self.processes), owner,
            [STREAM_URL], self.repairs.refused,
        )  # fmt: skip
        self._responders = wire.responders()
        self.is_up = self.is_killed = False
        self.round_began: Any = None
        ask = self.asker.ask

        def asked() -> Deferred[Round]:
            if self.asker._waiting is None:
                self.round_began = look(self)
            return ask()

        self.asker.ask = asked  # type: ignore[method-assign]  # to know when each round began

    def now(self) -> datetime:
        """The world's time."""
        return datetime.fromtimestamp(self._turns.seconds(), UTC)

    @property
    def latest_blobs(self) -> Collection[str]:
        """The contents of what it knows to be published."""
        latest = self.generations.latest
        return () if latest is None else latest.manifest.blobs.keys()

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
        await self.processes.start(f"{self.owner}.example:5250")
        self.importer.start()
        self.blobs.prepare()
        await self.receiver.start()
        self.repairs.start()
        self.verifier.start()
        self.is_up = True

    async def stop(self) -> None:
        """Stop it, in the order of its service."""
        self.is_up = False
        await self.verifier.stop()
        self.repairs.stop()
        await self.receiver.stop()
        await self.importer.stop()
        await self.registry.close()
        await self._fetcher.close()
        self.blobs.close()
        try:
            await self.processes.stop()
        except DatabaseUnavailable:
            assert self.is_killed
        await self.database.stop()

    def kill(self) -> list[int]:
        """Have it write nothing to the database any more, not even that it ends; the sessions that it had there.

        It is to be stopped after that, which then only ends what it has in memory. That a kill may come between any two
        steps on the disk is for the tests of crashes.
        """
        self.is_up, self.is_killed = False, True
        sessions = self.database.sessions
        self.database.kill()
        return sessions

    async def enrol(self, system_id: str, name: str) -> None:
        """Make it a rack, as when it joins."""
        certificate = _certificate_of(system_id)

        async def enrol(transaction: Transaction) -> None:
            await self.racks.enrol(transaction, system_id, name, certificate)
            await transaction.execute(
                """INSERT INTO rack_certificate (system_id, sha256, authorities, expires, stored)
                   VALUES (%s, %s, '{}', now() + interval '730 days', now())""",
                (system_id, certificate),
            )

        await self.database.transact(enrol)
        await self.registry.refresh()

    async def forget(self, system_id: str) -> None:
        """Make it no rack any more, as the API does."""
        await self.racks.forget(system_id)
        await self.registry.refresh()

    def link(self, rack: ModelRack) -> Deferred[None]:
        """Connect ``rack``; fires when it has registered, and fails if it was refused."""
        process = rack.process
        assert process is not None
        peer = Peer("rack", rack.system_id, "192.0.2.7:1", _certificate_of(rack.system_id))
        region_end, rack_end, pump = linked(
            self._responders, process.links.responders, self._turns, rack=peer, version=None, interval=0
        )
        wire = Wire(rack.system_id, pump)
        self._turns.lanes.append(wire)
        rack.links[self.owner] = Linked(region_end, rack_end, wire)

        def lost(link: Link, reason: str) -> None:
            if self.owner in rack.links and rack.links[self.owner].rack is link:
                del rack.links[self.owner]

        rack_end.on_lost(lost)
        return Deferred.fromCoroutine(process.links.prepare(rack_end, rack.turn()))


def _certificate_of(system_id: str) -> str:
    return hashlib.sha256(system_id.encode()).hexdigest()
