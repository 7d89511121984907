"""How do blobs get from a server, or a directory, into a store, whatever goes wrong on the way?

Each wanted content is fetched on its own: what is verified already is left alone, what was cut goes on where it ended,
what is wrong is thrown away, and what cannot be had is reported in a sentence while the others go on. A content has
its name in the store only when its sha256 was checked, so nothing of this can leave a wrong file.
"""

from __future__ import annotations

import errno
import random
import re
import shutil
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, ParamSpec, Protocol, TypeVar

from attrs import define, evolve, field, frozen
from attrs.validators import ge
from twisted.internet.defer import CancelledError, Deferred, DeferredList
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThreadPool
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.iweb import IAgent, IPolicyForHTTPS

from rpc.blobs import BlobError, BlobStore, Part, State, WrongContent
from rpc.http_client import Answer, HttpClient
from rpc.http_errors import FetchError
from rpc.local_files import copy_file, read_file
from rpc.urls import public

__all__ = ["FetchError", "FetchFailed", "Fetched", "Fetcher", "Progress", "RunInThread", "Wanted", "reactor_threads"]

P = ParamSpec("P")
T = TypeVar("T")

PROGRESS_INTERVAL: Final = 0.25
"""Seconds between two reports of progress."""

STEP_FORWARD: Final = 1 << 20
"""Bytes beyond all earlier attempts that make an attempt count as a success: a long file may be cut many times."""

LONGEST_WAIT: Final = 60.0
"""Seconds that a server's Retry-After is obeyed at most."""

_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})\Z")


class RunInThread(Protocol):
    """Runs a function that may block elsewhere, and gives a Deferred of its result."""

    def __call__(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Deferred[T]: ...


def reactor_threads(reactor: Any) -> RunInThread:
    """The reactor's own threads, as :class:`RunInThread`."""

    def run(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Deferred[T]:
        return deferToThreadPool(reactor, reactor.getThreadPool(), function, *args, **kwargs)

    return run


@frozen
class Wanted:
    """A content to have: where it is, what it must be (``size`` in bytes), and ``label``, what people call it."""

    url: str
    sha256: str
    size: int
    label: str


@frozen
class Fetched:
    """It is in the store, verified. ``bytes_read`` came over the wire now: 0 if it was there already, or from a file
    on this host."""

    sha256: str
    size: int
    bytes_read: int
    seconds: float


@frozen
class FetchFailed:
    """It could not be had; ``reason`` is one sentence with values, without the URL. ``is_wrong``: all bytes came, and
    their sha256 was another. ``withheld``: the server has said that it cannot give it now."""

    sha256: str
    url: str
    reason: str
    is_wrong: bool = False
    withheld: bool = False


@frozen
class Progress:
    """How far a :meth:`Fetcher.fetch` is. Bytes done are in the store or in parts; ``bytes_read`` came over the wire;
    ``current`` are the labels of what is being fetched at this moment."""

    files: int
    files_done: int
    files_failed: int
    bytes: int
    bytes_done: int
    bytes_read: int
    current: tuple[str, ...]


@define(eq=False)
class Fetcher:
    """Fetches contents into a store, and documents into memory, from ``http:``, ``https:`` and ``file:`` URLs.

    :param store: where contents go. Its methods, and all hashing and writing, run by ``run_in_thread``.
    :param proxy: ``http://[user:password@]host:port`` for http and https, or nothing.
    :param concurrency: how many contents are fetched at once.
    :param connect_timeout: seconds for a connection.
    :param idle_timeout: seconds for the head of an answer, and without a byte of a body.
    :param attempts: how often a content is tried in a row without a step forward, after 1, 2, 4 … seconds.
    :param agent: asks in place of our own agent, for tests.
    :param run_in_thread: by default the reactor's threads.
    :param tls_policy: how https servers are verified; by default with the system's certificates.
    :param jitter: gives numbers from 0 to 1, by which waits are lengthened by up to a quarter.
    """

    reactor: IReactorTime
    store: BlobStore
    agent: IAgent | None = field(default=None, kw_only=True)
    proxy: str = field(default="", kw_only=True)
    concurrency: int = field(default=4, kw_only=True, validator=ge(1))
    connect_timeout: float = field(default=10.0, kw_only=True)
    idle_timeout: float = field(default=30.0, kw_only=True)
    attempts: int = field(default=3, kw_only=True, validator=ge(1))
    run_in_thread: RunInThread | None = field(default=None, kw_only=True)
    tls_policy: IPolicyForHTTPS | None = field(default=None, kw_only=True)
    jitter: Callable[[], float] = field(default=random.random, kw_only=True)
    client: HttpClient = field(init=False)
    _run: RunInThread = field(init=False)

    log = Logger()

    def __attrs_post_init__(self) -> None:
        self._run = self.run_in_thread or reactor_threads(self.reactor)
        self.client = HttpClient(
            self.reactor, self.proxy, self.concurrency, self.connect_timeout, self.idle_timeout, self.agent,
            self.tls_policy,
        )  # fmt: skip

    async def fetch(
        self, wanted: Sequence[Wanted], progress: Callable[[Progress], object] | None = None
    ) -> Mapping[str, Fetched | FetchFailed]:
        """Bring all of ``wanted`` into the store, and say for each sha256 how it ended.

        The same sha256 may be wanted several times, with other URLs: they are tried in turn until one succeeds.
        Attempts that will be repeated are logged; how each content ended is the caller's to log. Nothing is raised for
        what goes wrong with a content or the disk. To stop, cancel the Deferred that runs this: what has come so far
        stays and is resumed next time.

        :param progress: is called at most four times a second, and once at the end.
        """
        run = _Run(self, wanted, progress or (lambda _progress: None))
        try:
            return await run.run()
        finally:
            await self._run(self.store.flush)

    async def read_document(self, url: str, *, limit: int) -> bytes:
        """The whole document at ``url``.

        :param limit: the most bytes that it may have.
        :raises FetchError: if it is longer, or cannot be had: the text says why. Nothing is tried twice.
        """
        if _is_file(url):
            return await self._run(read_file, url, limit)
        return await self.client.read(url, limit=limit)

    async def close(self) -> None:
        """Close the connections that are kept for later."""
        await self.client.close()


@define(eq=False)
class _Run:
    """One call of :meth:`Fetcher.fetch`."""

    fetcher: Fetcher
    wanted: Sequence[Wanted]
    report: Callable[[Progress], object]
    _results: dict[str, Fetched | FetchFailed] = field(factory=dict, init=False)
    _active: dict[str, _One] = field(factory=dict, init=False)
    _bytes_done: int = field(default=0, init=False)
    _bytes_read: int = field(default=0, init=False)
    _timer: IDelayedCall | None = field(default=None, init=False)
    _files: int = field(default=0, init=False)
    _total: int = field(default=0, init=False)
    _ends: Any = field(default=(), init=False)
    is_cancelled: bool = field(default=False, init=False)

    async def run(self) -> Mapping[str, Fetched | FetchFailed]:
        """Fetch all, a few at a time."""
        sources: dict[str, list[Wanted]] = {}
        for one in self.wanted:
            sources.setdefault(one.sha256, []).append(one)
        self._total = sum(some[0].size for some in sources.values())
        self._files = len(sources)
        queue = deque(sources.values())
        self._tick()
        workers = [Deferred.fromCoroutine(self._work(queue)) for _ in range(min(self.fetcher.concurrency, len(queue)))]
        # Some of what is waited for takes being cancelled for a failure (looking up a host's name does), which would be
        # tried again. So cancelling is noticed here as well, before any worker hears of it.
        working: Deferred[None] = Deferred(lambda _: self._cancelled())
        together = DeferredList(workers, consumeErrors=True)
        together.addBoth(self._worked, working)
        try:
            waited: list[Deferred[Any]] = [working, together]
            await DeferredList(waited, consumeErrors=True)
        finally:
            if self._timer is not None:
                self._timer.cancel()
        ends = self._ends
        if self.is_cancelled:
            raise CancelledError()
        for succeeded, failure in ends:
            if not succeeded:
                raise _error_of(failure)
        self._report()
        return self._results

    def _cancelled(self) -> None:
        self.is_cancelled = True

    def _worked(self, ends: Any, working: Deferred[None]) -> None:
        self._ends = ends
        if not working.called:
            working.callback(None)

    async def _work(self, queue: deque[list[Wanted]]) -> None:
        while queue and not self.is_cancelled:
            sources = queue.popleft()
            sha256 = sources[0].sha256
            for source in sources:
                self._active[sha256] = one = _One(self, source)
                try:
                    result = await one.run()
                finally:
                    del self._active[sha256]
                    self._bytes_read += one.bytes_read
                if isinstance(result, Fetched) or sha256 not in self._results:
                    self._results[sha256] = result
                else:
                    self._results[sha256] = _both(self._results[sha256], result)
                if isinstance(result, Fetched):
                    self._bytes_done += result.size
                    break

    def _tick(self) -> None:
        self._timer = self.fetcher.reactor.callLater(PROGRESS_INTERVAL, self._tick)
        self._report()

    def _report(self) -> None:
        failed = sum(isinstance(result, FetchFailed) for result in self._results.values())
        active = self._active.values()
        progress = Progress(
            files=self._files,
            files_done=len(self._results) - failed,
            files_failed=failed,
            bytes=self._total,
            bytes_done=self._bytes_done + sum(one.bytes_there for one in active),
            bytes_read=self._bytes_read + sum(one.bytes_read for one in active),
            current=tuple(one.wanted.label for one in active),
        )
        try:
            self.report(progress)
        except Exception:  # noqa: BLE001  # whoever watches must not stop the work
            self.fetcher.log.failure("Cannot report the progress of fetching")


def _both(earlier: Fetched | FetchFailed, later: FetchFailed) -> FetchFailed:
    assert isinstance(earlier, FetchFailed)
    reason = f"{earlier.reason}; from {later.url}: {later.reason}"
    return evolve(earlier, reason=reason, withheld=earlier.withheld and later.withheld)


@define(eq=False)
class _One:
    """The fetching of one content from one URL."""

    run_of: _Run
    wanted: Wanted
    fetcher: Fetcher = field(init=False)
    bytes_read: int = field(default=0, init=False)
    _part: Part | None = field(default=None, init=False)
    _stopped: bool = field(default=False, init=False)
    _resumed: bool = field(default=False, init=False)  # whether the part holds bytes of an earlier answer

    def __attrs_post_init__(self) -> None:
        self.fetcher = self.run_of.fetcher

    @property
    def bytes_there(self) -> int:
        """How much of the content is in the part."""
        return 0 if self._part is None else self._part.length

    async def run(self) -> Fetched | FetchFailed:
        """Fetch it, or say why not."""
        clock = self.fetcher.reactor
        start = clock.seconds()
        wanted = self.wanted
        is_wrong = withheld = False
        try:
            await self._have()
        except CancelledError:
            raise
        except FetchError as error:
            reason, withheld = error.reason, error.withheld
        except BlobError as error:
            reason, is_wrong = str(error), isinstance(error, WrongContent)
        except OSError as error:
            reason = _refused(error, self.fetcher.store.root, wanted.size)
        except Exception as error:  # noqa: BLE001  # a fault of ours with one content must not stop the others
            self.fetcher.log.failure("Cannot fetch {label} from {url}", label=wanted.label, url=public(wanted.url))
            reason = f"internal error: {type(error).__name__}: {error}"
        else:
            return Fetched(wanted.sha256, wanted.size, self.bytes_read, clock.seconds() - start)
        return FetchFailed(wanted.sha256, public(wanted.url), reason, is_wrong, withheld)

    async def _have(self) -> None:
        run, wanted = self.fetcher._run, self.wanted
        found = await run(self.fetcher.store.examine, wanted.sha256, wanted.size)
        if found.state is State.VERIFIED:
            return
        try:
            part = await run(self._open)
            await self._fill(part)
        finally:
            self._stopped = True
            if self._part is not None:
                self._part.abandon()
                await run(self._part.close)

    def _open(self) -> Part:
        """In a thread: open the part and hash what it holds. Nobody may be waiting for it any more."""
        self._part = part = self.fetcher.store.open_part(self.wanted.sha256, self.wanted.size)
        if self._stopped:
            part.close()
        part.load()
        return part

    async def _fill(self, part: Part) -> None:
        """Try until the part is the blob, or an attempt fails for good, or too many failed in a row."""
        furthest = part.length
        failures = 0
        while True:
            try:
                await self._attempt(part)
                return
            except FetchError as error:
                if self.run_of.is_cancelled:
                    raise CancelledError() from error
                if not error.retriable:
                    raise
                stepped = part.length >= furthest + STEP_FORWARD
                furthest = max(furthest, part.length)
                failures = 1 if stepped else failures + 1
                if failures >= self.fetcher.attempts:
                    raise
                await self._wait(error, failures)

    async def _wait(self, error: FetchError, failures: int) -> None:
        seconds = max(2.0 ** (failures - 1), min(error.retry_after, LONGEST_WAIT))
        seconds *= 1 + self.fetcher.jitter() / 4
        self.fetcher.log.warn(
            "{label}: {reason} ({url}); trying again in {seconds:.1f} seconds", label=self.wanted.label,
            reason=error.reason, url=error.url, seconds=seconds,
        )  # fmt: skip
        await deferLater(self.fetcher.reactor, seconds)

    async def _attempt(self, part: Part) -> None:
        """One go at what is missing. :raises FetchError: what came before is in the part, unless it is of no use."""
        run = self.fetcher._run
        self._resumed = part.length > 0
        while not await self._is_finished(part):
            if _is_file(self.wanted.url):
                await run(copy_file, self.wanted.url, part)
            elif (answer := await self._ask(part)) is not None:
                await self._append(part, answer)

    async def _append(self, part: Part, answer: Answer) -> None:
        """Take the body into the part."""
        run = self.fetcher._run
        try:
            await self.fetcher.client.receive(
                answer, lambda data: run(self._write, part, data), limit=part.size - part.length
            )
        except FetchError as error:
            if not error.retriable:  # such as more than was expected: it is not the file that we want
                await self._restart(part)
            raise
        if not part.is_full:
            text = f"the body ended after {part.length} of {part.size} bytes"
            raise FetchError(answer.url, text, retriable=True)

    def _write(self, part: Part, data: bytes) -> None:
        part.write(data)
        self.bytes_read += len(data)

    async def _is_finished(self, part: Part) -> bool:
        """Verify and rename a part that is full; a wrong one is emptied, and tried again if it was pieced together."""
        if not part.is_full:
            return False
        try:
            await self.fetcher._run(part.finish)
        except WrongContent as error:
            if not self._resumed:
                raise
            text = f"after an earlier fetch was resumed, {error}"
            raise FetchError(self.wanted.url, text, retriable=True) from error
        return True

    async def _ask(self, part: Part) -> Answer | None:
        """Ask for what is missing; gives the answer whose body is to be appended, or None to ask again for all."""
        client = self.fetcher.client
        start = part.length
        answer = await client.get(self.wanted.url, {"Range": f"bytes={start}-"} if start else None)
        try:
            if await self._is_usable(part, answer):
                return answer
        except BaseException:  # also when cancelled: nobody else would close the connection
            client.refuse(answer)
            raise
        client.refuse(answer)
        return None

    async def _is_usable(self, part: Part, answer: Answer) -> bool:
        """Whether the body belongs at the end of the part, which may have to be emptied for it; else ask for all.

        :raises FetchError: if the answer is no such file.
        """
        start = part.length
        if start and answer.status == 206 and self._continues(answer, start):
            return True
        if start and answer.status in (206, 416):
            await self._restart(part)
            return False
        if (problem := self.fetcher.client.problem(answer)) is not None:
            raise problem
        if answer.status == 206:
            raise FetchError(answer.url, "the server answered 206 with a part although all was asked for")
        if answer.length not in (None, part.size):
            raise FetchError(answer.url, f"the server has {answer.length} bytes, not {part.size}")
        if start:
            await self._restart(part)
        return True

    async def _restart(self, part: Part) -> None:
        await self.fetcher._run(part.restart)
        self._resumed = False

    def _continues(self, answer: Answer, start: int) -> bool:
        """Whether a 206 answer is the rest of the content from byte ``start`` on."""
        found = _CONTENT_RANGE.match(answer.header("Content-Range"))
        if found is None:
            return False
        first, last, total = map(int, found.groups())
        return (
            first == start and total == self.wanted.size and start <= last < total
            and answer.length in (None, last - first + 1)
        )  # fmt: skip


def _is_file(url: str) -> bool:
    return url[:5].lower() == "file:"


def _error_of(failure: object) -> BaseException:
    assert isinstance(failure, Failure)
    return failure.value or CancelledError()


def _refused(error: OSError, root: Path, size: int) -> str:
    """What the system refused, in a sentence."""
    where = error.filename or root
    text = f"{where}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        try:
            free = shutil.disk_usage(root).free
        except OSError:
            return text
        text = f"{text} (the file needs {size} bytes, {free} are free)"
    return text
