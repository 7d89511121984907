"""Reads a source: fetches its index and products documents, has each verified and read by a child process, and checks
that they fit together. Whatever goes wrong, the end is a value that says what is certain and what is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Protocol

from attrs import frozen
from simplestreams.util import path_from_mirror_url
from twisted.internet.defer import CancelledError, Deferred, DeferredSemaphore, FirstError, gatherResults
from twisted.internet.task import deferLater
from twisted.logger import Logger

from region.upstream.documents import IndexRead, Listed, ProductsRead
from region.upstream.exchange import Answer, Question, Refused, decode_answer, encode_question
from region.upstream.merging import merge
from region.upstream.process import ChildFailed, Conversation, Spawn, in_a_process
from region.upstream.values import (
    Broken,
    DocumentFailed,
    DocumentSeen,
    Problem,
    Source,
    SourceFailed,
    SourceRead,
    UpstreamImage,
)
from rpc.fetch import FetchError, RunInThread, reactor_threads

log = Logger()

MAX_DOCUMENT: Final = 64 << 20
"""Bytes of an index or a products document."""

READINGS: Final = 2
"""Documents of all sources that are verified and parsed at once."""

FETCHES: Final = 4
"""Documents of a source that are fetched at once."""


PAUSES: Final = (1.0, 3.0)
"""Seconds before a document is fetched again, if it failed in a way that may pass."""

MAX_PAUSE: Final = 60.0
"""Seconds that a server's wish to be left alone is heeded."""


class DocumentFetcher(Protocol):
    """What fetches documents; :class:`rpc.fetch.Fetcher` is one."""

    async def read_document(self, url: str, *, limit: int) -> bytes:
        """The bytes at ``url``, at most ``limit`` of them; raises FetchError."""


def _now() -> datetime:
    return datetime.now(UTC)


@frozen
class _Unsettled(Exception):
    """The source cannot be believed as it was read; ``torn`` is whether reading it again may help."""

    reason: str
    torn: bool = False


class SourceReader:
    """Reads sources.

    :param reactor: provides IReactorProcess, IReactorTime and IReactorThreads.
    :param fetcher: fetches the documents.
    :param spawn: begins a conversation with what verifies and parses documents: a process.
    :param run_in_thread: runs the decoding of answers.
    :param now: the time, with its zone.
    """

    def __init__(
        self,
        reactor: Any,
        fetcher: DocumentFetcher,
        *,
        spawn: Spawn | None = None,
        run_in_thread: RunInThread | None = None,
        now: Callable[[], datetime] = _now,
    ) -> None:
        self._reactor = reactor
        self._fetcher = fetcher
        self._spawn = spawn or in_a_process(reactor)
        self._run_in_thread = run_in_thread or reactor_threads(reactor)
        self._now = now
        self._readings = DeferredSemaphore(READINGS)

    async def read(self, source: Source, accepted: Mapping[str, datetime]) -> SourceRead | SourceFailed:
        """Read a source. Cancelling the Deferred that runs it stops it, and kills its processes.

        :param accepted: for the documents that were accepted before (``"index"``, or the content id), their
            ``updated``: an older one is a replay and not accepted.
        :return: never raises anything but CancelledError; what was unforeseen is logged and fails the source.
        """
        conversation = self._spawn()
        try:
            try:
                return await self._read_once(source, accepted, conversation)
            except _Unsettled as first:
                if not first.torn:
                    raise
                log.info("Reading {url} once more, because {reason}", url=source.name, reason=first.reason)
                return await self._read_once(source, accepted, conversation)
        except _Unsettled as error:
            return SourceFailed(source, error.reason)
        except CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 – the border of a source; the others must be imported all the same
            log.failure("Reading the source {url} failed for a reason nobody foresaw", url=source.name)
            return SourceFailed(source, f"an internal error, see the region's log: {type(error).__name__}: {error}")
        finally:
            await conversation.close()

    async def _read_once(
        self, source: Source, accepted: Mapping[str, datetime], conversation: Conversation
    ) -> SourceRead:
        root, path = _root_and_index(source)
        index = await self._document(Question(source, root), root + path, conversation)
        if isinstance(index, Refused):
            raise _Unsettled(f"its index {path} cannot be used: {index.reason}", index.torn)
        if not isinstance(index, IndexRead):
            raise TypeError(f"the index was answered with {type(index).__name__}")
        _refuse_replay("its index", index.updated, accepted.get("index"))
        fetching = DeferredSemaphore(FETCHES)
        answers: Sequence[Answer] = await _all(
            [
                fetching.run(self._start, Question(source, root, listed.content_id), listed.url, conversation)
                for listed in index.listed
            ]
        )
        pairs = list(zip(index.listed, answers, strict=True))
        for listed, answer in pairs:
            if isinstance(answer, Refused) and answer.torn:
                raise _Unsettled(f"{listed.content_id} does not fit its index: {answer.reason}", torn=True)
            if isinstance(answer, ProductsRead):
                _refuse_replay(listed.content_id, answer.updated, accepted.get(listed.content_id))
                if listed.updated and answer.updated < listed.updated:
                    raise _Unsettled(
                        f"{listed.content_id} does not fit its index, which says that it was updated "
                        f"{listed.updated:%Y-%m-%d %H:%M:%S}, and it says {answer.updated:%Y-%m-%d %H:%M:%S}",
                        torn=True,
                    )
        failed = [
            *index.failed,
            *(DocumentFailed(listed.content_id, it.reason) for listed, it in pairs if isinstance(it, Refused)),
        ]
        read = [(listed, it) for listed, it in pairs if isinstance(it, ProductsRead)]
        if not read:
            raise _Unsettled("; ".join(f"{document.content_id}: {document.reason}" for document in failed))
        return await self._run_in_thread(self._fit, source, index, read, failed)

    def _start(self, question: Question, url: str, conversation: Conversation) -> Deferred[Answer]:
        return Deferred.fromCoroutine(self._document(question, url, conversation))

    async def _document(self, question: Question, url: str, conversation: Conversation) -> Answer:
        """Fetch one document and have it read; what goes wrong with it makes it refused."""
        try:
            data = await self._fetch(url)
        except FetchError as error:
            return Refused(f"it could not be fetched from {error.url}: {error.reason}")
        try:
            answer = await self._readings.run(conversation.ask, encode_question(question, data))
        except ChildFailed as error:
            return Refused(str(error))
        return await self._run_in_thread(decode_answer, answer)

    async def _fetch(self, url: str) -> bytes:
        for pause in PAUSES:
            try:
                return await self._fetcher.read_document(url, limit=MAX_DOCUMENT)
            except FetchError as error:
                if not error.retriable:
                    raise
                seconds = max(pause, min(error.retry_after, MAX_PAUSE))
                log.info("{error}; trying again in {seconds} s", error=error, seconds=seconds)
                await deferLater(self._reactor, seconds, bool)
        return await self._fetcher.read_document(url, limit=MAX_DOCUMENT)

    def _fit(
        self,
        source: Source,
        index: IndexRead,
        read: Sequence[tuple[Listed, ProductsRead]],
        failed: Sequence[DocumentFailed],
    ) -> SourceRead:
        """What the documents of a source come to, together."""
        now = self._now()
        offers: list[UpstreamImage] = []
        broken: list[Broken] = []
        problems = [Problem("error", source.name, "", "", document.content_id, document.reason) for document in failed]
        seen = [DocumentSeen("index", min(index.updated, now), index.sha256)]
        for listed, document in read:
            offers.extend(document.images)
            broken.extend(document.broken)
            problems.extend(document.problems)
            seen.append(DocumentSeen(document.content_id, min(document.updated, now), document.sha256))
            absent = _listed_only_in_the_index(listed, document)
            broken.extend(absent)
            if absent:
                names = ", ".join(entry.product for entry in absent[:3]) + (", …" if len(absent) > 3 else "")
                reason = f"the index lists {len(absent)} products that it does not have: {names}"
                problems.append(Problem("warning", source.name, "", "", listed.content_id, reason))
        dates = {"index": index.updated, **{document.content_id: document.updated for _, document in read}}
        for name, updated in dates.items():
            if updated > now:
                reason = f"it is dated {updated:%Y-%m-%d %H:%M:%S}, in the future: its clock or this host's is wrong"
                problems.append(Problem("warning", source.name, "", "", name, reason))
        images, contradictory, more = merge(offers)
        return SourceRead(
            source,
            tuple(images),
            problems=(*problems, *more),
            documents=tuple(seen),
            listed_broken=(*broken, *contradictory),
            failed=tuple(failed),
        )


def _root_and_index(source: Source) -> tuple[str, str]:
    """The mirror root, ending in a slash, and the index's path below it, as simplestreams' own clients find them."""
    root, path = path_from_mirror_url(source.url, None)
    if path == "streams/v1/index.sjson" and not source.url.endswith(path) and not source.keyring:
        path = "streams/v1/index.json"
    if source.keyring and not path.endswith(".sjson"):
        raise _Unsettled(
            f"its URL names the unsigned index {path}, but it has a keyring: "
            f"name the .sjson, or remove the keyring and allow it to be unsigned"
        )
    return root if root.endswith("/") else root + "/", path


def _refuse_replay(what: str, updated: datetime, accepted: datetime | None) -> None:
    if accepted is not None and updated < accepted:
        raise _Unsettled(
            f"{what} was updated {updated:%Y-%m-%d %H:%M:%S}, which is older than the one accepted before "
            f"({accepted.astimezone(UTC):%Y-%m-%d %H:%M:%S}): a replay, or a mirror that is behind; "
            f"if upstream did go back, remove the source and add it again",
            torn=True,
        )


def _listed_only_in_the_index(listed: Listed, document: ProductsRead) -> list[Broken]:
    """The products that the index lists and its document has not, unless the document is the newer one of the two."""
    if listed.updated is None or document.updated > listed.updated:
        return []
    absent = sorted(set(listed.products).difference(document.products))
    reason = "the index lists it, and its document does not have it"
    return [Broken(listed.content_id, product, "", None, reason) for product in absent]


async def _all(running: Sequence[Deferred[Answer]]) -> list[Answer]:
    """The results of all; if one fails, the others are cancelled and its own failure is raised."""
    try:
        return await gatherResults(running, consumeErrors=True)
    except FirstError as error:
        for each in running:
            each.cancel()
        error.subFailure.raiseException()
        raise
