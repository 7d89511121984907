"""The composition of the rack: which parts there are, in which order they start, and how they end.

A rack serves as soon as it knows what it holds, whether or not a region can be reached. It stops in under five seconds,
also in the midst of a sync: whatever is under way may be left at any point, for the next start looks after it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from typing import Any, Final

from prometheus_client import REGISTRY
from twisted.application.service import Service
from twisted.internet.defer import CancelledError, Deferred, TimeoutError, maybeDeferred
from twisted.internet.error import CannotListenError
from twisted.internet.interfaces import IListeningPort
from twisted.internet.task import LoopingCall
from twisted.logger import Logger
from twisted.python.failure import Failure

from rack.assignment import AssignmentFile
from rack.config import RackConfig
from rack.eventfile import EventFile
from rack.events import Events
from rack.identity import Identity
from rack.inspection import SnapshotError
from rack.link import RegionLinks
from rack.metrics import RackMetrics
from rack.remembered import RememberedRegions
from rack.renewal import Renewal
from rack.snapshots import SnapshotStore
from rack.steps import Syncs
from rack.sync import Synchroniser
from rack.threads import Threads
from rack.verification import RequestFile
from rpc.blobs import BlobStore
from rpc.certificates import expires
from rpc.daemon import give_up
from rpc.damage import Damaged
from rpc.events import CERTIFICATE_ENDING, DAMAGE_REPAIRED, LINK_LOST, RACK_STARTED, RACK_STOPPED, REGISTERED
from rpc.exposition import Metrics, metrics_site
from rpc.fetch import Fetcher
from rpc.notify import Notifier
from rpc.protocol import Link
from rpc.verifying import MIB, Verifier

log = Logger()

PATIENCE: Final = 2.0
"""Seconds that a sync may take to stop once the rack is stopping."""

EXPIRY_WARNING: Final = timedelta(days=30)
EXPIRY_LOOK_SECONDS: Final = 86400.0
"""How often the rack looks whether its certificate ends soon."""


class RackService(Service):
    """A rack."""

    def __init__(self, config: RackConfig, identity: Identity, reactor: Any, notifier: Notifier) -> None:
        self._config = config
        self._identity = identity
        self._reactor = reactor
        self._notifier = notifier
        self._starting: Deferred[None] | None = None

    def startService(self) -> None:
        """Begin to start; a failure to do so ends the process."""
        super().startService()  # type: ignore[no-untyped-call]  # Twisted's has no annotations
        reactor, sync = self._reactor, self._config.sync
        images = self._config.images_directory
        self._threads = Threads(reactor, sync.concurrency + 3)
        self._blobs = BlobStore(images / "cache")
        self._store = SnapshotStore(images, self._blobs)
        verify = self._config.verify
        self._verifier = Verifier(
            self._blobs, reactor, self._threads.run, lambda: datetime.now(UTC).timestamp(),
            verify.rate_mib_per_second * MIB, verify.interval_days * 86400,
            lambda last: self._synchroniser.look_again(),  # what links to the files is looked at as well
        )  # fmt: skip
        self._requests = RequestFile(self._config.verify_request_file, self._verifier, reactor, self._threads.run)
        self._blobs.on_damage.append(self._damage_found)
        self._blobs.on_repair.append(self._repaired)
        self._fetcher = Fetcher(
            reactor,
            self._blobs,
            proxy=sync.proxy,
            concurrency=sync.concurrency,
            connect_timeout=sync.connect_timeout_seconds,
            idle_timeout=sync.idle_timeout_seconds,
            run_in_thread=self._threads.run,
        )
        syncs = Syncs(self._store, AssignmentFile(images / "assignment.json"), self._fetcher, self._threads.run)
        self._synchroniser = Synchroniser(syncs, reactor, interval=sync.interval_minutes * 60)
        self._events = Events(EventFile(self._config.events_directory), reactor, self._threads.run)
        self._synchroniser.on_happening(self._events.record)
        self._renewal = Renewal(
            self._identity, self._config.identity_directory, reactor, lambda: datetime.now(UTC), self._threads.run
        )
        self._links = RegionLinks(reactor, self._synchroniser, self._identity.name, self._renewal)
        self._links.on_registered(self._registered)
        self._remembered = RememberedRegions(self._config.remembered_file, self._threads.run)
        self._metrics = RackMetrics(self._synchroniser, self._events, lambda: self._links.up, self._certificate_end)
        REGISTRY.register(self._metrics)
        self._listening: IListeningPort | None = None
        self._expiry = LoopingCall(self._look_at_certificate)
        self._expiry.clock = reactor
        self._starting = Deferred.fromCoroutine(self._start())
        self._starting.addErrback(self._could_not_start)

    def stopService(self) -> Deferred[None]:
        """Stop all parts, the sync under way first."""
        super().stopService()  # type: ignore[no-untyped-call]  # Twisted's has no annotations
        self._notifier.stopping()
        if self._starting is not None:
            self._starting.cancel()
        return Deferred.fromCoroutine(self._stop())

    async def _start(self) -> None:
        identity = self._identity
        looking = self._expiry.start(EXPIRY_LOOK_SECONDS)
        looking.addErrback(lambda reason: log.failure("When the certificate ends is not looked at any more", reason))
        self._notifier.status("looking through the images")
        await self._threads.run(self._store.open)
        await self._events.open()  # only now: the store makes sure that this rack is not running already
        inventory = await self._synchroniser.recover()
        self._listen()
        addresses = self._config.regions or (identity.region,)
        remembered = await self._threads.run(self._remembered.read)
        self._links.connect(self._reactor, identity, addresses, remembered, self._remembered.remember)
        self._renewal.start()
        self._synchroniser.look_again()
        self._verifier.start()
        self._requests.start()
        self._events.record(
            RACK_STARTED, f"Version {version('stanchion')}, {len(inventory.manifest.images)} images held."
        )
        log.info(
            "Rack {rack} ({name}) serves; its regions are {regions}.",
            rack=identity.system_id, name=identity.name, regions=", ".join(addresses),
        )  # fmt: skip
        self._notifier.ready(f"{len(inventory.manifest.images)} images held; connecting to {', '.join(addresses)}")

    def _certificate_end(self) -> datetime:
        return expires(self._renewal.identity.credentials.certificate)

    def _look_at_certificate(self) -> None:
        end = self._certificate_end()
        if end - datetime.now(UTC) < EXPIRY_WARNING:
            log.warn("The rack's certificate ends on {date}: join again before that.", date=f"{end:%Y-%m-%d}")
            self._events.record(CERTIFICATE_ENDING, f"The rack's certificate ends on {end:%Y-%m-%d}.")

    def _registered(self, link: Link, region: str) -> None:
        self._events.record(REGISTERED, f"Region {region} at {link.peer.address}.")
        link.on_lost(self._lost)
        self._events.use(link)

    def _lost(self, link: Link, reason: str) -> None:
        self._events.record(LINK_LOST, f"Region at {link.peer.address}: {reason}.")

    def _damage_found(self, damaged: Damaged) -> None:
        """In whichever thread found it: nothing lists the file from here on."""
        if self._store.withdraw(damaged.sha256, f"was wrong: {damaged.reason}"):
            self._reactor.callFromThread(self._synchroniser.damage_found)

    def _repaired(self, damaged: Damaged) -> None:
        self._reactor.callFromThread(
            self._events.record, DAMAGE_REPAIRED, f"The file {damaged.sha256} is there again, verified."
        )

    def _listen(self) -> None:
        """Have the metrics read. A rack that cannot listen for that serves all the same."""
        metrics = self._config.metrics
        if not metrics.port:
            return
        site = metrics_site(Metrics(self._threads.run), self._reactor)
        try:
            self._listening = self._reactor.listenTCP(metrics.port, site, interface=metrics.listen)
        except CannotListenError as error:
            log.error("The metrics cannot be read: {reason}. Set another port in [metrics].", reason=str(error))

    def _could_not_start(self, reason: Failure) -> None:
        if reason.check(CancelledError):
            log.info("Stopped before the rack had started.")
            return
        if not reason.check(OSError, SnapshotError):
            log.failure("The rack could not start, on an error of its own", reason)
        give_up(self._reactor, f"the rack could not start: {' '.join(str(reason.value).split())}")

    async def _stop(self) -> None:
        self._store.interrupt()
        self._events.record(RACK_STOPPED, "The rack was told to stop.")
        if self._expiry.running:
            self._expiry.stop()
        await self._in_time(self._synchroniser.stop())
        for name, stop in (
            ("taking requests to verify", self._requests.stop),
            ("verifying", self._verifier.stop),
            ("the events", self._events.stop),
            ("the metrics", self._stop_listening),
            ("renewing the certificate", self._renewal.stop),
            ("the links", self._links.stop),
            ("the fetcher", self._fetcher.close),
            ("the cache", self._close_files),
        ):
            await self._attempt(name, stop)
        self._threads.stop()

    async def _in_time(self, stopping: Deferred[None]) -> None:
        """Wait for ``stopping``, but not for long."""
        try:
            await stopping.addTimeout(PATIENCE, self._reactor)
        except TimeoutError:
            log.warn("The sync did not stop within {seconds} s; it is left as it is.", seconds=PATIENCE)

    async def _attempt(self, name: str, stop: Callable[[], Awaitable[object]]) -> None:
        try:
            await stop()
        except Exception:  # noqa: BLE001  # whatever one part does, the others must be stopped
            log.failure("Stopping {name} failed", name=name)

    async def _stop_listening(self) -> None:
        if self._listening is not None:
            await maybeDeferred(self._listening.stopListening)
        REGISTRY.unregister(self._metrics)

    async def _close_files(self) -> None:
        self._blobs.close()
        self._store.close()


def make_service(config: RackConfig, identity: Identity, reactor: Any) -> RackService:
    """The rack with the settings ``config`` that joined as ``identity``."""
    return RackService(config, identity, reactor, Notifier.from_environment())
