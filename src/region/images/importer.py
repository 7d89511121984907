"""When images are imported: at start, at intervals, on request and after an edit of the sources; one import at a time.

An import that is asked for is a row in the database. Whoever holds the import's lock takes it from there; the lock is
held on a database session of its own, for the whole import, so a region process that dies, or loses that session,
loses the right to publish with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.task import LoopingCall
from twisted.logger import Logger
from twisted.python.failure import Failure

from region.database import Database, DatabaseUnavailable
from region.images.disk import free_bytes
from region.images.job import QUEUE_CHANNEL, JobStore
from region.images.lock import try_lock
from region.images.sources import SourceStore
from region.images.steps import Fetcher, ImportParts, ImportRun, Reader, nobody_syncs
from region.images.store import GenerationStore
from region.images.threads import in_thread
from region.images.uploads import UploadStore
from region.upstream import Source, SourceFailed
from rpc.blobs import BlobStore
from rpc.fetch import RunInThread
from rpc.waking import Waker

log = Logger()

CANCEL_CHANNEL: Final = "stanchion_import_cancel"
HERE, ELSEWHERE = "here", "elsewhere"
"""What region processes tell each other of an import that is queued: whether the process that queued it imports."""

LOCK_RETRY_SECONDS: Final = 5.0
"""How often a region process looks whether another one has finished importing."""

DATABASE_RETRY_SECONDS: Final = (1.0, 60.0)
"""How soon an import is tried again when the database is away: at first, and at most."""

STOP_SECONDS: Final = 3.0
"""How long stopping waits for an import that is publishing or cleaning up."""

SETTLE_SECONDS: Final = 1.0
"""How long after the last edit of the sources an import follows, so that a series of edits is followed by one."""


class Importer:
    """Runs imports.

    :param clock: what timers and progress run on.
    :param here: whether this region process imports. One that does not leaves that to others, whatever asks for it; it
        only says of an import that it has ended, when the process that ran it is dead.
    :param interval: seconds from one timed import to the next; 0 for none.
    :param at_start: whether to import when it starts.
    :param follow_edits: whether to import when a source or a selection was changed. One that is changed while an
        import runs is always followed by another import.
    :param syncing: which generation each rack is fetching now; those are not thrown away.
    """

    def __init__(
        self,
        database: Database,
        sources: SourceStore,
        generations: GenerationStore,
        reader: Reader,
        fetcher: Fetcher,
        blobs: BlobStore,
        clock: IReactorTime,
        *,
        here: bool = True,
        interval: float = 3600.0,
        at_start: bool = True,
        follow_edits: bool = True,
        syncing: Callable[[], Mapping[str, int]] = nobody_syncs,
        run_in_thread: RunInThread = in_thread,
        free_bytes: Callable[[Path], int] = free_bytes,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.jobs = JobStore(database)
        self._database = database
        self._sources = sources
        self._clock = clock
        self._here = here
        self._told = HERE if here else ELSEWHERE
        self._interval = interval if here else 0.0
        self._at_start = at_start and here
        self._follow_edits = follow_edits and here
        self._parts = ImportParts(
            self.jobs,
            sources,
            generations,
            reader,
            fetcher,
            blobs,
            clock,
            UploadStore(database),
            run_in_thread,
            syncing,
            free_bytes,
            now,
        )
        self._timer = LoopingCall(self._want, "timer")
        self._timer.clock = clock
        self._run: ImportRun | None = None
        self._imported: tuple[Source | SourceFailed, ...] | None = None
        self._wanted: str | None = None
        self._reasons: dict[int, str] = {}
        self._settling: IDelayedCall | None = None
        self._waker = Waker(self._run_queued, clock, retry=DATABASE_RETRY_SECONDS, failed=self._failed)

    def start(self) -> None:
        """Begin: end what an earlier process left unfinished, run what is queued, and import as it was set up."""
        self._sources.listen(self._edited)
        self._database.listen(CANCEL_CHANNEL, self._cancel_notified)
        self._database.listen(QUEUE_CHANNEL, self._queue_notified)
        if self._interval:
            self._timer.start(self._interval, now=False).addErrback(_log_failure)
        if self._at_start:
            self._want("start")
        self._waker.start()

    async def stop(self) -> None:
        """Stop; an import that is running is cancelled, or if it is publishing already, ends first."""
        run = self._run
        # Without a run it waits for the database.
        stopped = self._waker.stop(0.0 if run is None else STOP_SECONDS)
        if self._settling is not None and self._settling.active():
            self._settling.cancel()
        if self._timer.running:
            self._timer.stop()
        if run is not None:
            run.cancel("the region was stopped; what was fetched is kept for the next import")
        await stopped

    async def request(self, trigger: str = "request") -> int:
        """Ask for an import; its id. If one is queued already, that one will do: it reads the sources when it begins.

        :param trigger: timer, request, start, selection, repair or upload.
        :raises DatabaseUnavailable: if it could not be queued.
        """
        job_id = await self.jobs.enqueue(trigger, self._told)
        self._waker.wake()
        return job_id

    async def cancel(self, reason: str = "cancelled on request") -> tuple[int, ...]:
        """Stop the import that is running and the one that is queued; the ids of those that it stopped.

        One that is publishing already is not stopped. One that another region process runs is told to stop.
        """
        cancelled = list(await self.jobs.cancel_queued(reason))
        run = self._run
        if run is not None and run.cancel(reason):
            cancelled.append(run.job.id)
            await _ended(run)
        for job in await self.jobs.unfinished():
            if job.is_running and (run is None or job.id != run.job.id):
                await self._database.query("SELECT pg_notify(%s, %s)", (CANCEL_CHANNEL, str(job.id)))
                cancelled.append(job.id)
                self._waker.wake()  # if the one that ran it is dead, this ends it
        return tuple(cancelled)

    @property
    def is_started(self) -> bool:
        """Whether it was started and not stopped."""
        return self._waker.is_started

    @property
    def is_busy(self) -> bool:
        """Whether this region process is importing, cleaning up after an import, or looking for something to do."""
        return self._waker.is_working

    def when_idle(self) -> Deferred[None]:
        """Fires when :attr:`is_busy` is false; also then, more may be asked for at any time."""
        return self._waker.when_idle()

    @property
    def is_running(self) -> bool:
        """Whether this region process is importing right now."""
        return self._run is not None and self._run.job.is_running

    async def is_importing(self) -> bool:
        """Whether any region process is importing, or is about to."""
        return bool(await self.jobs.unfinished())

    # What asks for imports

    def _want(self, trigger: str) -> None:
        """Have an import as soon as the database can be told of it."""
        Deferred.fromCoroutine(self._queue(trigger)).addErrback(_log_failure)

    async def _queue(self, trigger: str) -> None:
        try:
            await self.jobs.enqueue(trigger, self._told)
        except DatabaseUnavailable as error:
            log.warn("An import ({trigger}) is queued later: {reason}", trigger=trigger, reason=str(error))
            self._wanted = trigger
        self._waker.wake()

    def _edited(self, payload: str) -> None:
        """A source was changed, or (with an empty payload) may have been while nobody listened."""
        if not self._waker.is_started or (not payload and self._imported is None):
            return
        if self._settling is not None and self._settling.active():
            self._settling.reset(SETTLE_SECONDS)
        elif self._follow_edits or self.is_running:
            self._settling = self._clock.callLater(SETTLE_SECONDS, self._settled)

    def _settled(self) -> None:
        Deferred.fromCoroutine(self._follow()).addErrback(_log_failure)

    async def _follow(self) -> None:
        try:
            wanted = await self._sources.read()
        except DatabaseUnavailable as error:
            # When the database is back, listening begins anew, and that says so with an empty payload.
            log.warn("Whether the sources were changed could not be read: {reason}", reason=str(error))
            return
        if wanted != (self._run.sources if self._run is not None else self._imported):
            self._want("selection")

    def _cancel_notified(self, payload: str) -> None:
        if self._run is not None and payload == str(self._run.job.id):
            self._run.cancel("cancelled on request")

    def _queue_notified(self, payload: str) -> None:
        """Some region process has queued an import, or (with an empty payload) may have while nobody listened."""
        # One that imports sees to what it queued itself: its disk may have what nobody else's has, such as an upload.
        if payload != HERE or not self._here:
            self._waker.wake()

    # What runs them

    def _failed(self, reason: Failure, seconds: float | None) -> None:
        if seconds is None and reason.check(CancelledError, DatabaseUnavailable):
            log.warn("Importing was broken off, because it did not end while the region was being stopped")
        elif reason.check(DatabaseUnavailable):
            why = str(reason.value)
            log.warn("Imports wait for the database, {seconds:g} s: {reason}", seconds=seconds, reason=why)
        else:  # what was left is seen to then
            log.failure("An import broke off, on an error of the region's own", reason)

    async def _run_queued(self) -> float | None:
        """Run what is queued; when to look again (in seconds) if something has to wait for another region process."""
        wanted, self._wanted = self._wanted, None
        if wanted is not None:
            try:
                await self.jobs.enqueue(wanted, self._told)
            except DatabaseUnavailable:
                self._wanted = self._wanted or wanted
                raise
        unfinished = await self.jobs.unfinished()
        if not unfinished:
            return None
        if not self._here and not any(job.is_running for job in unfinished):
            return LOCK_RETRY_SECONDS  # and be out of the way of the process that is to import
        async with self._database.session() as session:
            if not await try_lock(session):
                return LOCK_RETRY_SECONDS
            for left in await self.jobs.abandon(session, self._reasons):
                log.warn("Import {job} did not end: {outcome}", job=left.id, outcome=left.outcome)
            self._reasons.clear()
            while self._here and self._waker.is_started and (job := await self.jobs.claim(session)) is not None:
                self._run = run = ImportRun(self._parts, session, job)
                try:
                    await run.run()
                except DatabaseUnavailable as error:
                    if session.alive:
                        self._reasons[job.id] = str(error)
                    else:
                        self._reasons[job.id] = f"the connection that held the import's lock was lost: {error}"
                    raise
                except Exception as error:
                    self._reasons[job.id] = f"an error of the region's own, {type(error).__name__}: {error}"
                    raise
                finally:
                    self._imported = run.sources
                    self._run = None
        return None


async def _ended(run: ImportRun) -> None:
    ended: Deferred[None] = Deferred()

    def pass_on(result: None) -> None:
        ended.callback(None)

    run.ended.addCallback(pass_on)
    await ended


def _log_failure(failure: Any) -> None:
    log.failure("An import could not be run, on an error of the region's own", failure)
