"""The composition of the region: which parts there are, in which order they start, and how they end.

Nothing else in the region wires parts together. What was started is stopped in reverse order, whatever failed; a
region that cannot start says why in one line and exits with status 1.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import psycopg2
from prometheus_client import REGISTRY
from twisted.application.service import Service
from twisted.internet.defer import CancelledError, Deferred, maybeDeferred
from twisted.internet.error import CannotListenError
from twisted.logger import Logger
from twisted.python.failure import Failure

from region import web
from region.answers.asking import Asker
from region.answers.describing import Describer
from region.answers.licensing import Validator
from region.answers.published import PublishedView
from region.answers.records import Records
from region.answers.releases import Releases
from region.api import Api, ApiKeyStore, Authenticator, Parts
from region.api.operations import Operation
from region.api.routes import OPERATIONS
from region.authority import Authority
from region.authority_files import AuthorityError, load_keys
from region.commissioning.intake import Intake
from region.commissioning.steps import Following, steps
from region.commissioning.worker import Notice, Worker
from region.config import RegionConfig
from region.database import Database, DatabaseUnavailable
from region.database.embedded import EmbeddedPostgres, EmbeddedPostgresError
from region.database.migrations import MigrationError, migrate
from region.events import EventCleaner, EventStore
from region.hardware.hooks import HOOKS
from region.images.importer import Importer
from region.images.receiving import Receiver
from region.images.repair import Repairs
from region.images.sources import SourceStore
from region.images.store import GenerationStore
from region.images.stream import StreamResource
from region.images.uploads import UploadStore
from region.keeping import Keeper
from region.layouts.networking import networking
from region.layouts.storage import storage
from region.license_keys import LicenseKeyStore
from region.metadata.service import MetadataParts, MetadataResource, NodeTokens
from region.metrics import RegionMetrics
from region.nodes.monitor import Monitor
from region.nodes.requests import NodeRequests
from region.nodes.store import NodeStore
from region.processes import Processes, endpoint_of
from region.racks import RackRegistry, RackStore, watch
from region.scripts.archive import NodeScripts
from region.scripts.builtin import install as install_builtins
from region.scripts.choose import choose
from region.scripts.results import ResultStore
from region.scripts.store import ScriptStore
from region.syncing import SyncDriver
from region.tags.evaluation import Tagger
from region.tags.evaluator import Evaluator
from region.tags.rebuilding import Rebuilder
from region.tags.store import TagStore
from region.upstream.reader import SourceReader
from region.wire import RegionWire
from rpc.blobs import BlobStore
from rpc.certificates import expires
from rpc.daemon import collect_seldom, give_up, spare_what_is_there
from rpc.endpoints import listen_tls
from rpc.events import Kind
from rpc.exposition import Metrics
from rpc.fetch import Fetcher, reactor_threads
from rpc.identity import server_tls
from rpc.notify import Notifier
from rpc.protocol import Link, link_factory
from rpc.steady import TimeOfDay
from rpc.verifying import MIB, Verifier

log = Logger()

DRAIN_SECONDS: Final = 2.0
"""How long requests that are in progress may take to end once the region is stopping."""

THREADS: Final = 24

STOP_SECONDS: Final = 4.7
"""How long everything together may take to stop."""

POSTGRES: Final = "PostgreSQL"
POSTGRES_SECONDS: Final = 1.5
"""How much of that is kept for PostgreSQL, which would have to recover at the next start; it stops last."""

EXPECTED_FAILURES: Final = (
    OSError, CannotListenError, DatabaseUnavailable, EmbeddedPostgresError, MigrationError, AuthorityError,
    psycopg2.Error,
)  # fmt: skip
"""What can go wrong at a start for a reason outside this program: said in one line, without a traceback."""


class RegionService(Service):
    """A region.

    :param notifier: who is told that it serves, and that it stops.
    :param operations: what the API has, over the region's database.
    """

    def __init__(
        self,
        config: RegionConfig,
        reactor: Any,
        notifier: Notifier,
        *,
        operations: Callable[[Database], Sequence[Operation]] = lambda database: OPERATIONS,
    ) -> None:
        self._operations = operations
        self._config = config
        self._reactor = reactor
        self._notifier = notifier
        self._started: list[tuple[str, Callable[[], Awaitable[object] | None]]] = []
        self._starting: Deferred[None] | None = None

    def startService(self) -> None:
        """Begin to start; a failure to do so ends the process."""
        super().startService()  # type: ignore[no-untyped-call]  # twisted.application is not typed
        self._starting = Deferred.fromCoroutine(self._start())
        self._starting.addErrback(self._could_not_start)

    def stopService(self) -> Deferred[None]:
        """Stop everything that was started, last first."""
        super().stopService()  # type: ignore[no-untyped-call]  # as above
        self._notifier.stopping()
        if self._starting is not None:
            self._starting.cancel()
        return Deferred.fromCoroutine(self._stop())

    def _could_not_start(self, reason: Failure) -> None:
        if reason.check(CancelledError):
            log.info("Stopped before the region had started.")
            return
        if not reason.check(*EXPECTED_FAILURES):
            log.failure("The region could not start, on an error of its own", reason)
        give_up(self._reactor, f"the region could not start: {' '.join(str(reason.value).split())}")

    async def _stop(self) -> None:
        begun = self._reactor.seconds()
        while self._started:
            name, stop = self._started.pop()
            share = STOP_SECONDS if name == POSTGRES else STOP_SECONDS - POSTGRES_SECONDS
            left = begun + share - self._reactor.seconds()
            stopping = maybeDeferred(_awaited, stop)
            stopping.addErrback(self._did_not_stop, name)
            if not await _within(self._reactor, max(left, 0.0), stopping):
                log.warn("{name} did not stop in time; the end of the process ends it", name=name)

    def _did_not_stop(self, reason: Failure, name: str) -> None:
        # Whatever one part does, the others must be stopped.
        log.failure("Stopping {name} failed", reason, name=name)

    def _stops(self, name: str, stop: Callable[[], Awaitable[object] | None]) -> None:
        self._started.append((name, stop))

    async def _start(self) -> None:
        config, reactor = self._config, self._reactor
        collect_seldom()
        # Hashing takes long; looking names up and reading what is asked for must not stand in line behind it.
        reactor.suggestThreadPoolSize(THREADS)
        run_in_thread = reactor_threads(reactor)
        state = config.state_directory
        await run_in_thread(_make_state_directory, state)

        database = Database(reactor, await self._dsn())
        self._stops("the database's connections", database.stop)
        await database.start()
        for number in await migrate(database):
            log.info("Migrated the database to number {number}.", number=number)
        await install_builtins(database, run_in_thread=run_in_thread)

        racks = RackStore(database)
        load = partial(load_keys, state / "authority", config.name)
        authority = Authority(await run_in_thread(load, _now()), database, racks)
        processes = Processes(database, reactor, config.name, state, _now)
        self._stops("being listed as a region process", processes.stop)
        registry = RackRegistry(racks, _now, processes)
        await registry.refresh()
        watch(registry, database, reactor)

        blobs = BlobStore(state / "images")
        self._stops("the blob store", lambda: run_in_thread(blobs.close))
        images = config.images
        fetcher = Fetcher(
            reactor,
            blobs,
            proxy=images.proxy,
            concurrency=images.concurrency,
            connect_timeout=images.connect_timeout_seconds,
            idle_timeout=images.idle_timeout_seconds,
        )
        self._stops("the fetcher", fetcher.close)
        sources = SourceStore(database)
        generations = GenerationStore(database, run_in_thread)
        generations.start()
        current = await generations.current()

        syncs = SyncDriver(
            registry, current, lambda: config.stream.url or f"http://*:{http_port}/MAAS/images-stream",
            generations.read_again,
        )  # fmt: skip
        importer = Importer(
            database,
            sources,
            generations,
            SourceReader(reactor, fetcher),
            fetcher,
            blobs,
            reactor,
            here=images.here,
            interval=images.interval_minutes * 60,
            at_start=images.at_start,
            syncing=syncs.syncing,
            run_in_thread=run_in_thread,
        )
        events = EventStore(database)
        verify = config.verify
        verifier = Verifier(
            blobs, reactor, run_in_thread, lambda: _now().timestamp(),
            verify.rate_mib_per_second * MIB, verify.interval_days * 86400,
        )  # fmt: skip
        repairs = Repairs(
            blobs, generations, verifier, reactor, partial(importer.request, "repair"),
            partial(_tell, events, config.name), syncs.again,
        )  # fmt: skip
        blobs.on_damage.append(partial(reactor.callFromThread, repairs.found))
        blobs.on_repair.append(partial(reactor.callFromThread, repairs.repaired))
        uploads = UploadStore(database)
        receiver = Receiver(
            uploads, blobs, config.name, images.upload_expire_hours, reactor, run_in_thread,
            partial(importer.request, "upload"), takes=images.here,
        )  # fmt: skip
        view = PublishedView(generations)
        asker = Asker(
            registry,
            reactor,
            deadline=config.ask.deadline_seconds,
            published=view.catalogue,
            expected=view.current_digest,
            run_in_thread=run_in_thread,
        )
        describer = Describer(registry, reactor, deadline=config.ask.deadline_seconds)
        registry.listen_for_upgrades(describer.forget)
        keep = config.events
        cleaner = EventCleaner(lambda: events.forget_old(keep_days=keep.keep_days, keep_rows=keep.keep_rows), reactor)
        cleaner.start()
        self._stops("deleting old events", cleaner.stop)
        metrics = RegionMetrics(
            database, registry, generations, blobs,
            lambda: _ends(authority), reactor, run_in_thread,
        )  # fmt: skip
        REGISTRY.register(metrics)
        self._stops("the metrics", lambda: REGISTRY.unregister(metrics))
        evaluator = partial(Evaluator, reactor, config.commissioning.tag_timeout_seconds)
        tagger = Tagger(database, evaluator)
        rebuilder = Rebuilder(database, tagger, evaluator, reactor)
        rebuilder.start()
        self._stops("evaluating tags", rebuilder.stop)
        keys = ApiKeyStore(database)
        authenticator = Authenticator(keys, reactor)
        keys.listen(authenticator.forget)
        parts = Parts(
            releases=Releases(asker, view, TimeOfDay(), Records(database), describer),
            asker=asker,
            published=view,
            racks=registry,
            connections=processes.connections,
            syncs=syncs,
            sources=sources,
            generations=generations,
            jobs=importer.jobs,
            importer=importer,
            verifier=verifier,
            uploads=uploads,
            receiver=receiver,
            events=events,
            nodes=NodeStore(database),
            node_requests=NodeRequests(database, config.commissioning, choose),
            tags=TagStore(database, lambda definition: evaluator().check_and_close(definition)),
            software=version("stanchion"),
            scripts=ScriptStore(database, run_in_thread),
            results=ResultStore(database),
            license_keys=LicenseKeyStore(database),
            validator=Validator(registry, deadline=config.ask.deadline_seconds),
        )
        worker = Worker(
            database,
            reactor,
            processes.id,
            steps(
                Following(
                    database, run_in_thread, HOOKS, storage, networking, tagger.evaluate_node,
                    layout=config.commissioning.storage_layout,
                )
            ),
        )  # fmt: skip
        self._stops("doing what follows from signals", worker.stop)
        metadata = MetadataParts(
            NodeTokens(database),
            Intake(database, HOOKS, Notice(database, worker.wake)),
            NodeScripts(database, run_in_thread),
            run_in_thread,
        )
        generations.subscribe(syncs.published)
        self._stops("the links with racks", registry.close)
        site = web.RegionSite(
            web.tree(
                Api(parts, authenticator, self._operations(database)).resource(),
                StreamResource(generations, blobs, reactor, suspect=verifier.suspect),
                Metrics(run_in_thread, metrics.refresh),
                MetadataResource(metadata),
            ),
            reactor,
        )
        self._stops("the requests in progress", lambda: site.drain(reactor, DRAIN_SECONDS))
        spare_what_is_there()
        http = reactor.listenTCP(config.http.port, site, interface=config.http.listen)
        self._stops("listening for HTTP", http.stopListening)
        http_port = http.getHost().port
        stream_urls = [config.stream.url] if config.stream.url else []
        wire = RegionWire(authority, registry, syncs, events, processes, config.name, stream_urls, repairs.refused)
        responders = wire.responders()
        tls = server_tls(authority.keys.region, authority.keys.trusted)
        listening = listen_tls(
            reactor,
            config.rpc.port,
            config.rpc.listen,
            tls,
            link_factory(lambda: Link(responders, clock=reactor)),
        )
        self._stops("listening for racks", listening.stopListening)
        keeper = Keeper(reactor, _now, partial(run_in_thread, load), authority, tls, wire.ask_to_renew)
        keeper.start(database)
        self._stops("looking at the authority's files", keeper.stop)
        rpc_port = listening.getHost().port  # type: ignore[attr-defined]  # a TCP address has one
        await processes.start(endpoint_of(config.rpc.advertise, config.rpc.listen, rpc_port))
        worker.start()
        importer.start()
        self._stops("the importer", importer.stop)
        await run_in_thread(blobs.prepare)
        await receiver.start()
        self._stops("taking in uploads", receiver.stop)
        repairs.start()
        self._stops("seeing to repairs", repairs.stop)
        verifier.start()
        self._stops("verifying files", verifier.stop)
        monitor = Monitor(database, reactor, config.commissioning)
        monitor.start()
        self._stops("watching the nodes", monitor.stop)
        log.info("Serving HTTP on port {http} and racks on port {rpc}.", http=http_port, rpc=rpc_port)
        self._notifier.ready(f"serving HTTP on port {http_port}, racks on port {rpc_port}")

    async def _dsn(self) -> str:
        if self._config.database:
            return self._config.database
        self._notifier.status("starting the embedded PostgreSQL")
        postgres = EmbeddedPostgres(self._reactor, self._config.state_directory / "postgres")
        self._stops(POSTGRES, postgres.stop)
        return await postgres.start()


def _awaited(stop: Callable[[], Awaitable[object] | None]) -> Any:
    result = stop()
    if result is None or isinstance(result, Deferred):
        return result
    return Deferred.fromCoroutine(result)  # type: ignore[arg-type]  # what is awaitable and no Deferred is a coroutine


def _tell(events: EventStore, name: str, kind: Kind, description: str) -> None:
    """Store what happened on this region process; should that fail, the log has it."""

    def failed(reason: Failure) -> None:
        said = {"why": str(reason.value), "kind": kind.type, "description": description}
        log.error("Not stored as an event ({why}): {kind}: {description}", **said)

    telling = Deferred.fromCoroutine(events.tell(name, kind, description))
    telling.addErrback(failed)


def _ends(authority: Authority) -> Mapping[str, datetime]:
    keys = authority.keys
    return {"region": expires(keys.region.certificate), "authority": expires(keys.ca.certificate)}


async def _within(reactor: Any, seconds: float, work: Deferred[Any]) -> bool:
    """Wait for ``work``, which does not fail, at most so long; whether it ended. What goes on then is left alone."""
    waiting: Deferred[bool] = Deferred()
    late = reactor.callLater(seconds, waiting.callback, False)

    def ended(_: object) -> None:
        if late.active():
            late.cancel()
            waiting.callback(True)

    work.addCallback(ended)
    return await waiting


def _now() -> datetime:
    return datetime.now(UTC)


def _make_state_directory(path: Path) -> None:
    path.mkdir(mode=0o755, parents=True, exist_ok=True)
