"""One import, from reading its sources to publishing what is complete: the five steps, in order, on one session.

What goes wrong with a file, an image or a source is a problem of the import: kept, logged once, and no reason to stop.
What makes the whole import impossible ends it as failed. Until it publishes it can be stopped at any time; what was
fetched until then is there for the next one.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from attrs import define
from twisted.internet.defer import CancelledError, Deferred, DeferredList, succeed
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from region.database import DatabaseUnavailable, Session
from region.images.disk import SPARE_BYTES, free_bytes, readable, space, unverified, verify
from region.images.gc import collect
from region.images.job import ImportJob, JobLife, JobStore
from region.images.lock import ImportLockLost
from region.images.plan import Assembly, Change, Plan, assemble, plan
from region.images.sources import SourceStore
from region.images.store import Generation, GenerationMoved, GenerationStore
from region.images.threads import in_thread
from region.images.uploads import UploadStore
from region.upstream import Problem, Source, SourceFailed, SourceRead
from region.upstream.values import UPLOADS
from rpc.blobs import BlobStore
from rpc.fetch import Fetched, FetchFailed, Progress, RunInThread, Wanted
from rpc.manifest import EMPTY, MAX_MANIFEST, Manifest

log = Logger()
T = TypeVar("T")

SAVE_SECONDS: Final = 1.0
"""How often progress is written to the database, and the session that holds the lock is looked at."""

PING_SECONDS: Final = 15.0
"""How often that session is used while there is nothing to write, so that its loss is noticed."""


SHOWN: Final = 3
"""How many images that changed for the same reason are named in the log; the generation's changes have them all."""


class Reader(Protocol):
    """What reads a source; :class:`region.upstream.reader.SourceReader` is one."""

    async def read(self, source: Source, accepted: Mapping[str, datetime]) -> SourceRead | SourceFailed:
        """What ``source`` offers; ``accepted`` says how new its documents were when they were last accepted."""


class Fetcher(Protocol):
    """What fetches files; :class:`rpc.fetch.Fetcher` is one."""

    async def fetch(
        self, wanted: Sequence[Wanted], progress: Callable[[Progress], object]
    ) -> Mapping[str, Fetched | FetchFailed]:
        """Bring the wanted files into the blob store; how that ended for each, by sha256."""


def nobody_syncs() -> Mapping[str, int]:
    """No rack is fetching a generation."""
    return {}


@define
class ImportParts:
    """What an import works with. ``syncing`` says which generation each rack is fetching now."""

    jobs: JobStore
    sources: SourceStore
    generations: GenerationStore
    reader: Reader
    fetcher: Fetcher
    blobs: BlobStore
    clock: IReactorTime
    uploads: UploadStore
    run_in_thread: RunInThread = in_thread
    syncing: Callable[[], Mapping[str, int]] = nobody_syncs
    free_bytes: Callable[[Path], int] = free_bytes
    now: Callable[[], datetime] = lambda: datetime.now(UTC)


class ImportFailed(Exception):
    """The whole import cannot go on; the text says why and what to do."""


class ImportCancelled(Exception):
    """The import was stopped."""


class ImportRun:
    """One import.

    :param session: the database session that holds the import's lock.
    :param job: the import, just claimed.
    """

    def __init__(self, parts: ImportParts, session: Session, job: ImportJob) -> None:
        self._parts = parts
        self._session = session
        self._life = JobLife(job, self._stop)
        self._step: Deferred[Any] | None = None
        self._broken: Exception | None = None
        self._stopped = threading.Event()
        self._saver = _Saver(parts, session, self._life, self._session_failed)
        self._reported: set[Problem] = set()
        self._disk_is_full = False
        self.sources: tuple[Source | SourceFailed, ...] | None = None
        self.ended: Deferred[None] = Deferred()

    @property
    def job(self) -> ImportJob:
        """How the import stands."""
        return self._life.job

    def cancel(self, reason: str) -> bool:
        """Stop it, unless it is publishing already or has ended; whether it is being stopped."""
        return self._life.inputs.cancel(reason, self._parts.now())

    async def run(self) -> None:
        """Run it to its end, whatever that is.

        :raises DatabaseUnavailable: if the session is lost; the import's row does not say then how it ended.
        """
        life = self._life.inputs
        life.begin(self.job.started or self._parts.now())
        log.info("Import {job} ({trigger}) begins", job=self.job.id, trigger=self.job.trigger)
        used: frozenset[str] | None = None
        try:
            try:
                used = await self._all_steps()
            except ImportCancelled:
                log.info("Import {job} was cancelled: {reason}", job=self.job.id, reason=self.job.outcome)
            except (ImportFailed, ImportLockLost, GenerationMoved) as error:
                life.fail(str(error), self._parts.now())
                log.error("Import {job} failed: {reason}", job=self.job.id, reason=str(error))
            except DatabaseUnavailable:
                raise
            except OSError as error:
                life.fail(f"the region's disk failed: {error}", self._parts.now())
                log.error("Import {job} failed: the region's disk failed: {reason}", job=self.job.id, reason=str(error))
            except Exception as error:  # noqa: BLE001 - the import ends here, and says why in its row and in the log
                log.failure("Import {job} failed on an error of the region's own", job=self.job.id)
                life.fail(f"an error of the region's own, {type(error).__name__}: {error}", self._parts.now())
            await self._saver.stop()
            await self._parts.jobs.save(self._session, self.job)
        finally:
            await self._saver.stop()
            self.ended.callback(None)
        if used is not None:
            await self._clean_up(used)

    # The five steps

    async def _all_steps(self) -> frozenset[str]:
        """Import; the sha256 of all files that the sources offered and the operator wants."""
        self._saver.start()
        reads = await self._read()
        base = await self._parts.generations.read_current(self._session)
        previous = EMPTY if base is None else base.manifest
        uploads = await self._parts.uploads.read(self._session)
        planned = await self._in_thread(plan, (*reads, uploads), previous)
        await self._report(planned.problems)
        verified, failures = await self._obtain(planned, previous)
        assembly = await self._assemble(planned, previous, verified, failures)
        self._check()
        self._life.inputs.publish()
        await self._saver.stop()
        await self._parts.jobs.save(self._session, self.job)
        await self._publish(base, assembly, reads)
        return frozenset(download.sha256 for download in planned.downloads)

    async def _read(self) -> tuple[SourceRead | SourceFailed, ...]:
        self.sources = await self._parts.sources.read(self._session)
        accepted = await self._parts.sources.accepted(self._session)
        sources = self.sources
        reads = await self._stoppable(lambda: _together(self._read_source(source, accepted) for source in sources))
        for end in reads:
            if isinstance(end, SourceRead):
                await self._parts.sources.accept(self._session, end.source, end.documents)
            elif not any(problem.severity == "error" for problem in end.problems):
                await self._report([Problem("error", end.source.name, "", "", "", end.reason)])
        return tuple(reads)

    async def _read_source(
        self, source: Source | SourceFailed, accepted: Mapping[int, Mapping[str, datetime]]
    ) -> SourceRead | SourceFailed:
        if isinstance(source, SourceFailed):
            return source
        try:
            return await self._parts.reader.read(source, accepted.get(source.id, {}))
        except CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - one source must not take the others with it
            log.failure("Reading {source} failed on an error of the region's own", source=source.name)
            return SourceFailed(source, f"an error of the region's own, {type(error).__name__}: {error}")

    async def _obtain(self, planned: Plan, previous: Manifest) -> tuple[set[str], dict[str, str]]:
        """Fetch what is missing: the sha256 of all contents that are verified now, and why the others are not."""
        fetchable = {download.sha256 for download in planned.downloads if not download.url.startswith(UPLOADS)}
        verified, failures = await self._in_thread(
            verify, self._parts.blobs, planned.blobs(previous), fetchable, self._stopped.is_set
        )
        missing = []
        for download in planned.downloads:
            if download.sha256 in fetchable:
                if download.sha256 not in verified:
                    missing.append(download)
            elif download.sha256 in failures:  # nobody has it but who uploaded it
                failures[download.sha256] += "; upload it again (stanchion images upload)"
        wanted = [Wanted(each.url, each.sha256, each.size, each.label) for each in missing]
        await self._require_space(wanted, {download.sha256 for download in planned.downloads})
        self._life.inputs.fetch(len(wanted), sum(each.size for each in wanted))
        if wanted:
            ends = await self._stoppable(lambda: self._parts.fetcher.fetch(wanted, self._progressed))
            for sha256, end in ends.items():
                if isinstance(end, Fetched):
                    verified.add(sha256)
                else:
                    failures[sha256] = f"{end.reason} ({end.url})"
            failed = [one for one in wanted if isinstance(ends[one.sha256], FetchFailed)]
            if failed:
                need, free = await self._in_thread(space, self._parts.blobs, failed, self._parts.free_bytes)
                self._disk_is_full = need + SPARE_BYTES > free
        return verified, failures

    async def _assemble(
        self, planned: Plan, previous: Manifest, verified: set[str], failures: dict[str, str]
    ) -> Assembly:
        """What can be published of the plan; every file of it was there a moment ago, but those known to be damaged."""
        while True:
            assembly: Assembly = await self._in_thread(assemble, planned, previous, verified, failures)
            gone = await self._in_thread(unverified, self._parts.blobs, assembly.manifest) - assembly.damaged
            if not gone:
                if self._disk_is_full:
                    await self._give_space_back(assembly.manifest.blobs)
                await self._report(assembly.problems)
                return assembly
            verified.difference_update(gone)
            failures.update((sha256, "it was removed or changed on the region's disk meanwhile") for sha256 in gone)

    async def _publish(
        self, base: Generation | None, assembly: Assembly, reads: Sequence[SourceRead | SourceFailed]
    ) -> None:
        errors = sum(problem.severity == "error" for problem in self._reported)
        also = f"; {errors} error{'s' if errors != 1 else ''}" if errors else ""
        if base is None and not assembly.manifest.images:
            if errors:
                raise ImportFailed(f"there is no complete image to publish{also}: {_first_error(self._reported)}")
            nothing = "no source offers an image that is selected" if reads else "there is no source to import from"
            self._life.inputs.finish(None, f"nothing was published: {nothing}", self._parts.now())
            return
        size = await self._in_thread(lambda: len(assembly.manifest.canonical))
        if size > MAX_MANIFEST:
            raise ImportFailed(
                f"the list of its {len(assembly.manifest.images)} images has {readable(size)}, but racks can tell "
                f"{readable(MAX_MANIFEST)} at most: select fewer images"
            )
        generation = await self._parts.generations.publish(
            self._session, assembly.manifest, assembly.changes, self.job.id, base=base.number if base else None
        )
        self._log_changes(generation, assembly.changes)
        if base is None or generation.number != base.number:
            outcome = f"published generation {generation.number}: {_summary(assembly.changes)}{also}"
        elif reads and all(isinstance(end, SourceFailed) for end in reads):
            raise ImportFailed(
                f"no source could be read, so generation {generation.number} stays as it is: "
                f"{_first_error(self._reported)}"
            )
        else:
            outcome = f"nothing changed; generation {generation.number} stays current{also}"
        self._life.inputs.finish(generation.number, outcome, self._parts.now())
        log.info("Import {job}: {outcome}", job=self.job.id, outcome=outcome)

    async def _clean_up(self, used: frozenset[str]) -> None:
        """Remove what nobody needs. What goes wrong here does not undo what was published."""
        parts = self._parts
        try:
            await collect(self._session, parts.blobs, parts.run_in_thread, parts.syncing, used)
            await parts.jobs.forget_old(self._session)
        except DatabaseUnavailable:
            raise
        except Exception as error:  # noqa: BLE001 - said in the log and in the import's problems
            log.failure("Import {job}: what is not needed any more could not be removed", job=self.job.id)
            reason = f"files that are not needed any more could not be removed: {type(error).__name__}: {error}"
            await parts.jobs.add_problems(self._session, self.job.id, [Problem("warning", "", "", "", "", reason)])

    # Helpers

    async def _require_space(self, wanted: Sequence[Wanted], keep: Collection[str]) -> None:
        """Make room, if there is too little, by removing what neither a generation nor this import needs.

        Imports that ended early leave such files, and as long as there is no room none gets to cleaning up.

        :param keep: the sha256 of all files that this import needs.
        :raises ImportFailed: if that is not enough.
        """
        for retire in (False, True):
            if not await self._lacks_space(wanted):
                return
            await self._give_space_back(keep, retire=retire)
        if lack := await self._lacks_space(wanted):
            await self._give_space_back(())
            raise ImportFailed(lack)

    async def _lacks_space(self, wanted: Sequence[Wanted]) -> str:
        """What is wrong if the disk has no room for the rest of ``wanted``; else ""."""
        need, free = await self._in_thread(space, self._parts.blobs, wanted, self._parts.free_bytes)
        if not need or need + SPARE_BYTES <= free:
            return ""
        return (
            f"{len(wanted)} files of {readable(need)} are to be fetched, but the disk of {self._parts.blobs.root} "
            f"has {readable(free)} free, and {readable(SPARE_BYTES)} of it are left alone: make room, or select "
            "fewer images"
        )

    async def _give_space_back(self, keep: Collection[str], *, retire: bool = False) -> None:
        """Remove what neither a generation needs nor ``keep`` has, also what was fetched in part.

        :param retire: whether to retire generations first. That writes into the database, whose disk may be the one
            that is full.
        """
        parts = self._parts
        try:
            await collect(
                self._session, parts.blobs, parts.run_in_thread, parts.syncing, keep, stale_after=0.0, retire=retire
            )
        except OSError as error:
            log.error("Import {job}: space cannot be given back: {error}", job=self.job.id, error=str(error))

    async def _report(self, problems: Iterable[Problem]) -> None:
        """Log and keep each problem, once."""
        new = [problem for problem in dict.fromkeys(problems) if problem not in self._reported]
        self._reported.update(new)
        for problem in new:
            where = " ".join(part for part in (problem.product, problem.version, problem.file) if part)
            (log.error if problem.severity == "error" else log.warn)(
                "Import {job}: {where}: {reason} (source {source})",
                job=self.job.id, where=where or "the source", reason=problem.reason, source=problem.source,
                product=problem.product, version=problem.version, file=problem.file,
            )  # fmt: skip
        await self._parts.jobs.add_problems(self._session, self.job.id, new)

    def _log_changes(self, generation: Generation, changes: Sequence[Change]) -> None:
        """Log them, those of one kind for one reason together: a source that is away keeps hundreds of images."""
        alike: dict[tuple[str, str], list[str]] = {}
        for change in changes:
            alike.setdefault((change.kind, change.reason), []).append(f"{change.image.key} {change.image.version}")
        for (kind, reason), names in alike.items():
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            (log.debug if kind == "added" else log.info)(
                "Generation {number}: {kind} {images}: {reason}",
                number=generation.number, kind=kind, images=", ".join(names[:SHOWN]) + more, reason=reason,
            )  # fmt: skip

    def _progressed(self, progress: Progress) -> None:
        fetching = progress.current[0] if progress.current else ""
        self._life.inputs.progress(progress.files_done, progress.bytes_done, fetching)

    def _in_thread(self, function: Callable[..., T], *arguments: Any) -> Coroutine[Any, Any, T]:
        return self._stoppable(lambda: _awaited(self._parts.run_in_thread(function, *arguments)))

    async def _stoppable(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a step that :meth:`cancel`, or the loss of the session, stops."""
        self._check()
        self._step = step = Deferred.fromCoroutine(begin())
        try:
            return await step
        except CancelledError:
            self._check()
            raise
        finally:
            self._step = None
            self._check()

    def _check(self) -> None:
        if self._broken is not None:
            raise self._broken
        if self.job.state == "cancelled":
            raise ImportCancelled(self.job.outcome)

    def _stop(self) -> None:
        self._stopped.set()
        if self._step is not None:
            self._step.cancel()

    def _session_failed(self, error: Exception) -> None:
        self._broken = error
        self._stop()


class _Saver:
    """Writes an import's progress at most once a second, and notices when the session is lost."""

    def __init__(
        self, parts: ImportParts, session: Session, life: JobLife, failed: Callable[[Exception], object]
    ) -> None:
        self._parts = parts
        self._session = session
        self._life = life
        self._failed = failed
        self._saved: ImportJob | None = None
        self._used = 0.0
        self._loop = LoopingCall(self._tick)
        self._loop.clock = parts.clock
        self._idle: Deferred[Any] = succeed(None)

    def start(self) -> None:
        """Begin."""
        self._idle = self._loop.start(SAVE_SECONDS)

    async def stop(self) -> None:
        """End; nothing of this uses the session any more when it returns."""
        if self._loop.running:
            self._loop.stop()
        await self._idle

    async def _tick(self) -> None:
        now = self._parts.clock.seconds()
        try:
            if self._life.job != self._saved:
                job = self._life.job
                if job.ended is None:  # how it ended is written once, in its place
                    await self._parts.jobs.save(self._session, job)
                self._saved, self._used = job, now
            elif now - self._used >= PING_SECONDS or not self._session.alive:
                await self._session.one("SELECT 1")
                self._used = now
        except Exception as error:  # noqa: BLE001 - the import ends with it
            if self._loop.running:  # else it is being waited for the end of this already
                self._loop.stop()
            self._failed(error)


async def _together(reading: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all; also when it is cancelled, it ends only when each of them has."""
    ends: Sequence[tuple[bool, Any]] = await DeferredList(
        [Deferred.fromCoroutine(each) for each in reading], consumeErrors=True
    )
    for success, end in ends:
        if not success:
            end.raiseException()
    return [end for _, end in ends]


async def _awaited(deferred: Deferred[T]) -> T:
    return await deferred


def _first_error(problems: Collection[Problem]) -> str:
    first = min((problem for problem in problems if problem.severity == "error"), default=None)
    if first is None:
        return "no reason is known"
    where = " ".join(part for part in (first.source, first.product, first.version, first.file) if part)
    return f"{where}: {first.reason}"


def _summary(changes: Sequence[Change]) -> str:
    counts = Counter[str](change.kind for change in changes)
    kinds = ("added", "changed", "removed", "kept")
    return ", ".join(f"{counts[kind]} {kind}" for kind in kinds if counts[kind]) or "other descriptions"
