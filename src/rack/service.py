"""The composition of the rack: which parts there are, in which order they start, and how they end.

A rack serves as soon as it knows what it holds, whether or not a region can be reached. It stops in under five seconds,
also in the midst of a sync: whatever is under way may be left at any point, for the next start looks after it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from twisted.application.service import Service
from twisted.internet.defer import CancelledError, Deferred, TimeoutError
from twisted.logger import Logger
from twisted.python.failure import Failure

from rack.assignment import AssignmentFile
from rack.config import RackConfig
from rack.identity import Identity
from rack.inspection import SnapshotError
from rack.link import RegionLinks
from rack.snapshots import SnapshotStore
from rack.steps import Syncs
from rack.sync import Synchroniser
from rack.threads import Threads
from rpc.blobs import BlobStore
from rpc.certificates import expires
from rpc.daemon import give_up
from rpc.fetch import Fetcher
from rpc.notify import Notifier

log = Logger()

PATIENCE: Final = 2.0
"""Seconds that a sync may take to stop once the rack is stopping."""

EXPIRY_WARNING: Final = timedelta(days=30)


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
        self._threads = Threads(reactor, sync.concurrency + 2)
        self._blobs = BlobStore(images / "cache")
        self._store = SnapshotStore(images, self._blobs)
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
        self._links = RegionLinks(reactor, self._synchroniser, self._identity.name)
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
        end = expires(identity.credentials.certificate)
        if end - datetime.now(UTC) < EXPIRY_WARNING:
            log.warn("The rack's certificate ends on {date}: join again before that.", date=f"{end:%Y-%m-%d}")
        self._notifier.status("looking through the images")
        await self._threads.run(self._store.open)
        inventory = await self._synchroniser.recover()
        addresses = self._config.regions or (identity.region,)
        self._links.connect(self._reactor, identity, addresses)
        self._synchroniser.look_again()
        log.info(
            "Rack {rack} ({name}) serves; its regions are {regions}.",
            rack=identity.system_id, name=identity.name, regions=", ".join(addresses),
        )  # fmt: skip
        self._notifier.ready(f"{len(inventory.manifest.images)} images held; connecting to {', '.join(addresses)}")

    def _could_not_start(self, reason: Failure) -> None:
        if reason.check(CancelledError):
            log.info("Stopped before the rack had started.")
            return
        if not reason.check(OSError, SnapshotError):
            log.failure("The rack could not start, on an error of its own", reason)
        give_up(self._reactor, f"the rack could not start: {' '.join(str(reason.value).split())}")

    async def _stop(self) -> None:
        self._store.interrupt()
        await self._in_time(self._synchroniser.stop())
        for name, stop in (
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

    async def _close_files(self) -> None:
        self._blobs.close()
        self._store.close()


def make_service(config: RackConfig, identity: Identity, reactor: Any) -> RackService:
    """The rack with the settings ``config`` that joined as ``identity``."""
    return RackService(config, identity, reactor, Notifier.from_environment())
