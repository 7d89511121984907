"""Tests for :mod:`region.upstream.reader`: documents from memory, read by the child's own code without a process."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from twisted.internet.defer import CancelledError, Deferred, execute, fail, succeed
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from region.upstream import Source, SourceFailed, SourceRead
from region.upstream import child as child_module
from region.upstream.exchange import decode_question
from region.upstream.process import ChildFailed
from region.upstream.reader import MAX_DOCUMENT, SourceReader
from rpc.fetch import FetchError
from tests.streams import IMAGES, LOADERS, NOW, Stream, rfc2822, sha256, signer

P = ParamSpec("P")
T = TypeVar("T")

LATER = NOW + timedelta(hours=1)


class Documents:
    """A fetcher of documents from memory, keyed by path below the root; a value may be a function that gives one."""

    def __init__(self, root: str, documents: Mapping[str, Any]) -> None:
        self.root = root
        self.documents = dict(documents)
        self.asked: list[str] = []
        self.waiting: Deferred[bytes] | None = None

    async def read_document(self, url: str, *, limit: int) -> bytes:
        """As :meth:`rpc.fetch.Fetcher.read_document`."""
        assert limit == MAX_DOCUMENT
        path = url.removeprefix(self.root)
        self.asked.append(path)
        found = self.documents.get(path, FetchError(url, "the server answered 404 Not Found", status=404))
        if callable(found):
            found = found()
        if isinstance(found, Exception):
            raise found
        if isinstance(found, Deferred):
            found = await found
        return bytes(found)


class Inline:
    """Answers questions as the child would, and counts how often it was closed."""

    def __init__(self) -> None:
        self.closed = 0

    def ask(self, question: bytes) -> Deferred[bytes]:
        """The answer, at once."""
        return execute(child_module.answer, question)

    def close(self) -> Deferred[None]:
        """Nothing is left."""
        self.closed += 1
        return succeed(None)


def at_once(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Deferred[T]:
    """Runs a function here, in place of a thread."""
    return execute(function, *args, **kwargs)


class ReaderCase(SynchronousTestCase):
    """A signed stream of two documents, to spoil and to read."""

    signed = True

    def setUp(self) -> None:
        self.clock = Clock()
        self.stream = Stream(Path(self.mktemp()).absolute(), signer() if self.signed else None)
        self.stream.add()
        self.stream.add("jammy", "arm64")
        self.stream.add_loader()
        self.accepted: dict[str, datetime] = {}
        self.now = LATER
        self.conversation = Inline()
        self.load()

    def load(self) -> None:
        """Serve the stream as it is now."""
        self.fetcher = Documents(self.stream.url, self.stream.rendered())

    def path(self, content_id: str) -> str:
        """Where a document is."""
        return f"streams/v1/{content_id}.{self.stream.suffix}"

    def edited(self, name: str, **fields: Any) -> bytes:
        """A document with other fields, signed."""
        document = {"updated": rfc2822(self.stream.updated), **self.stream.documents[name], **fields}
        return self.stream.signed(json.dumps(document).encode())

    def start(self, source: Source | None = None) -> Deferred[SourceRead | SourceFailed]:
        """Begin to read."""
        reader = SourceReader(
            self.clock, self.fetcher, spawn=lambda: self.conversation, run_in_thread=at_once,
            now=lambda: self.now,
        )  # fmt: skip
        return Deferred.fromCoroutine(reader.read(source or self.stream.source(), self.accepted))

    def read(self, source: Source | None = None) -> SourceRead:
        """Read, and succeed."""
        end = self.successResultOf(self.start(source))
        self.assertIsInstance(end, SourceRead, str(end))
        assert isinstance(end, SourceRead)
        return end

    def failure(self, source: Source | None = None) -> str:
        """Read, and say why that failed."""
        end = self.successResultOf(self.start(source))
        self.assertIsInstance(end, SourceFailed, str(end))
        assert isinstance(end, SourceFailed)
        return end.reason


class WholeSourceTests(ReaderCase):
    """What makes a whole source fail."""

    def test_an_index_that_cannot_be_had_fails_the_source_with_the_reason(self) -> None:
        del self.fetcher.documents[self.path("index")]
        reason = self.failure()
        self.assertIn("streams/v1/index.sjson cannot be used", reason)
        self.assertIn("404 Not Found", reason)

    def test_an_index_with_a_bad_signature_fails_the_source(self) -> None:
        path = self.path("index")
        self.fetcher.documents[path] = self.fetcher.documents[path].replace(b"index:1.0", b"index:1.1")
        self.assertIn("the signature is bad", self.failure())

    def test_an_index_signed_with_another_key_fails_the_source(self) -> None:
        self.assertIn("not in the keyring", self.failure(self.stream.source(keyring=signer("Another").keyring)))

    def test_an_error_page_in_place_of_an_index_fails_the_source(self) -> None:
        self.fetcher.documents[self.path("index")] = b"<html>500</html>"
        self.assertIn("not a clear-signed document", self.failure())

    def test_an_index_that_lists_nothing_fails_the_source(self) -> None:
        self.stream.index = {"index": {}}
        self.load()
        self.assertIn("lists no products document", self.failure())

    def test_an_older_index_than_accepted_before_is_a_replay(self) -> None:
        self.accepted = {"index": NOW + timedelta(seconds=1)}
        reason = self.failure()
        self.assertIn("its index was updated 2026-03-04 12:00:00", reason)
        self.assertIn("replay", reason)

    def test_an_older_document_than_accepted_before_is_a_replay(self) -> None:
        self.accepted = {IMAGES: NOW + timedelta(seconds=1)}
        reason = self.failure()
        self.assertIn(IMAGES, reason)
        self.assertIn("replay", reason)

    def test_the_same_document_again_is_no_replay(self) -> None:
        self.accepted = {seen.name: seen.updated for seen in self.read().documents}
        self.assertEqual(len(self.read().images), 3)

    def test_a_source_none_of_whose_documents_can_be_used_failed(self) -> None:
        for content_id in (IMAGES, LOADERS):
            self.fetcher.documents[self.path(content_id)] = b"no"
        reason = self.failure()
        self.assertIn(IMAGES, reason)
        self.assertIn(LOADERS, reason)

    def test_a_url_of_an_unsigned_index_does_not_go_with_a_keyring(self) -> None:
        source = self.stream.source(url=f"{self.stream.url}streams/v1/index.json")
        self.assertIn("names the unsigned index", self.failure(source))
        self.assertEqual(self.fetcher.asked, [])

    def test_a_source_with_neither_keyring_nor_leave_to_be_unsigned_is_never_believed(self) -> None:
        self.stream.signer = None
        self.load()
        self.assertIn("no keyring", self.failure(self.stream.source(allow_unsigned=False)))

    def test_an_error_nobody_foresaw_is_logged_and_fails_the_source(self) -> None:
        self.fetcher.documents[self.path("index")] = ZeroDivisionError("surprise")
        self.assertIn("an internal error", self.failure())
        [logged] = self.flushLoggedErrors(ZeroDivisionError)
        self.assertIn("surprise", logged.getErrorMessage())

    def test_a_child_that_dies_over_the_index_fails_the_source(self) -> None:
        self.patch(Inline, "ask", lambda _, question: fail(ChildFailed("reading it took longer than 120 seconds")))
        self.assertIn("took longer than 120 seconds", self.failure())


class OneDocumentTests(ReaderCase):
    """What makes one document of a source fail, and not the others."""

    def failed(self) -> str:
        """The boot loaders' document failed and the images' did not; why."""
        end = self.read()
        self.assertEqual({offer.image.os for offer in end.images}, {"ubuntu"})
        [failed] = end.failed
        self.assertEqual(failed.content_id, LOADERS)
        self.assertIn(("error", LOADERS, failed.reason), [(it.severity, it.file, it.reason) for it in end.problems])
        self.assertEqual([seen.name for seen in end.documents], ["index", IMAGES])
        return failed.reason

    def test_a_document_that_cannot_be_had_fails_alone(self) -> None:
        del self.fetcher.documents[self.path(LOADERS)]
        self.assertIn("404 Not Found", self.failed())

    def test_a_document_with_a_bad_signature_fails_alone(self) -> None:
        path = self.path(LOADERS)
        self.fetcher.documents[path] = self.fetcher.documents[path].replace(b"grub-efi", b"grub-evi")
        self.assertIn("the signature is bad", self.failed())

    def test_a_document_that_is_not_json_fails_alone(self) -> None:
        self.fetcher.documents[self.path(LOADERS)] = self.stream.signed(b'{"format": "products:1.0",')
        self.assertIn("not JSON", self.failed())

    def test_a_document_without_a_date_fails_alone(self) -> None:
        self.fetcher.documents[self.path(LOADERS)] = self.edited(LOADERS, updated=None)
        self.assertIn("no 'updated' date", self.failed())

    def test_a_document_that_kills_its_reader_fails_alone(self) -> None:
        ask = Inline.ask

        def fail_over_loaders(conversation: Inline, question: bytes) -> Deferred[bytes]:
            if decode_question(question)[0].content_id == LOADERS:
                return fail(ChildFailed("the process that reads it failed"))
            return ask(conversation, question)

        self.patch(Inline, "ask", fail_over_loaders)
        self.assertEqual(self.failed(), "the process that reads it failed")

    def test_an_entry_of_the_index_that_cannot_be_used_fails_alone(self) -> None:
        index = json.loads(
            Stream(self.stream.root, None, NOW, self.stream.documents).rendered()["streams/v1/index.json"]
        )
        index["index"][LOADERS]["path"] = "../../x.json"
        index["index"][IMAGES]["path"] = self.path(IMAGES)
        self.fetcher.documents[self.path("index")] = self.stream.signed(json.dumps(index).encode())
        self.assertIn("'..' part", self.failed())
        self.assertEqual([path for path in self.fetcher.asked if "v1" not in path], [])


class TornReadTests(ReaderCase):
    """An index and documents of two moments are read once more, and then not believed."""

    def serve(self, *moments: bytes) -> None:
        """The images' document is one of ``moments`` after the other, then stays the last."""
        waiting = list(moments)
        self.fetcher.documents[self.path(IMAGES)] = lambda: waiting.pop(0) if len(waiting) > 1 else waiting[0]

    def test_a_document_older_than_its_index_says_is_read_once_more(self) -> None:
        self.serve(self.edited(IMAGES, updated=rfc2822(NOW - timedelta(days=1))), self.edited(IMAGES))
        self.assertEqual(len(self.read().images), 3)
        self.assertEqual(self.fetcher.asked.count(self.path("index")), 2)

    def test_a_document_that_stays_older_than_its_index_says_fails_the_source(self) -> None:
        self.serve(self.edited(IMAGES, updated=rfc2822(NOW - timedelta(days=1))))
        reason = self.failure()
        self.assertIn("2026-03-04 12:00:00, and it says 2026-03-03 12:00:00", reason)
        self.assertEqual(self.fetcher.asked.count(self.path("index")), 2)

    def test_a_document_with_another_content_id_is_read_once_more(self) -> None:
        self.serve(self.edited(IMAGES, content_id="other"), self.edited(IMAGES))
        self.assertEqual(len(self.read().images), 3)

    def test_a_document_that_keeps_another_content_id_fails_the_source(self) -> None:
        self.serve(self.edited(IMAGES, content_id="other"))
        self.assertIn("its content_id is 'other'", self.failure())

    def test_a_document_newer_than_its_index_says_is_used(self) -> None:
        self.serve(self.edited(IMAGES, updated=rfc2822(NOW + timedelta(minutes=1))))
        self.assertEqual(len(self.read().images), 3)
        self.assertEqual(self.fetcher.asked.count(self.path("index")), 1)

    def test_a_product_that_only_the_index_lists_is_kept_with_a_warning(self) -> None:
        products = dict(self.stream.products())
        gone = next(name for name in products if "jammy" in name)
        del products[gone]
        self.serve(self.edited(IMAGES, products=products))
        end = self.read()
        self.assertEqual([(entry.product, entry.key) for entry in end.listed_broken], [(gone, None)])
        [problem] = end.problems
        self.assertEqual((problem.severity, problem.file), ("warning", IMAGES))
        self.assertIn(gone, problem.reason)

    def test_a_product_that_a_newer_document_no_longer_lists_is_gone(self) -> None:
        products = {name: tree for name, tree in self.stream.products().items() if "jammy" not in name}
        self.serve(self.edited(IMAGES, products=products, updated=rfc2822(NOW + timedelta(minutes=1))))
        end = self.read()
        self.assertEqual((len(end.images), end.listed_broken, end.problems), (2, (), ()))


class PassingFailureTests(ReaderCase):
    """A failure that may pass is waited out for a moment."""

    def test_a_document_is_fetched_again_after_a_pause(self) -> None:
        path = self.path(LOADERS)
        whole = self.fetcher.documents[path]
        answers = [
            FetchError("u", "reset", retriable=True),
            FetchError("u", "503", retriable=True, retry_after=7),
            whole,
        ]
        self.fetcher.documents[path] = lambda: answers.pop(0)
        reading = self.start()
        self.assertNoResult(reading)
        self.clock.advance(1)
        self.assertNoResult(reading)
        self.clock.advance(6.5)
        self.assertNoResult(reading)
        self.clock.advance(0.5)
        end = self.successResultOf(reading)
        assert isinstance(end, SourceRead)
        self.assertEqual((len(end.images), end.failed), (3, ()))

    def test_it_is_given_up_after_three_times(self) -> None:
        self.fetcher.documents[self.path("index")] = FetchError("u", "connection refused", retriable=True)
        reading = self.start()
        self.clock.pump([1, 3])
        end = self.successResultOf(reading)
        assert isinstance(end, SourceFailed)
        self.assertIn("connection refused", end.reason)
        self.assertEqual(len(self.fetcher.asked), 3)

    def test_reading_can_be_cancelled_while_it_fetches_and_while_it_waits(self) -> None:
        cancelled: list[object] = []
        fetching: Deferred[bytes] = Deferred(cancelled.append)
        for waiting in (fetching, FetchError("u", "reset", retriable=True)):
            self.load()
            self.fetcher.documents[self.path(IMAGES)] = waiting
            reading = self.start()
            self.assertNoResult(reading)
            reading.cancel()
            self.failureResultOf(reading, CancelledError)
        self.assertEqual((len(cancelled), self.conversation.closed), (1, 2))
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_a_surprise_in_one_document_cancels_the_fetching_of_the_others(self) -> None:
        cancelled: list[object] = []
        surprise: Deferred[bytes] = Deferred()
        self.fetcher.documents[self.path(LOADERS)] = surprise
        self.fetcher.documents[self.path(IMAGES)] = Deferred(cancelled.append)
        reading = self.start()
        surprise.errback(ZeroDivisionError("surprise"))
        self.assertIsInstance(self.successResultOf(reading), SourceFailed)
        self.assertEqual(len(cancelled), 1)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)


class ReadTests(ReaderCase):
    """What a source that was read comes to."""

    def test_everything_selected_is_there_with_its_urls(self) -> None:
        end = self.read()
        self.assertEqual(
            sorted(str(offer.image.key) for offer in end.images),
            ["grub-efi amd64 (stable)", "ubuntu/jammy arm64/ga-24.04/generic (stable)",
             "ubuntu/noble amd64/ga-24.04/generic (stable)"],
        )  # fmt: skip
        self.assertEqual((end.problems, end.listed_broken, end.failed), ((), (), ()))
        for offer in end.images:
            for digest, url in offer.urls:
                data = (self.stream.root / url.removeprefix(self.stream.url)).read_bytes()
                self.assertEqual(sha256(data), digest)

    def test_every_document_is_told_with_its_date_and_digest(self) -> None:
        seen = {document.name: document for document in self.read().documents}
        self.assertEqual(set(seen), {"index", IMAGES, LOADERS})
        for name, document in seen.items():
            self.assertEqual(document.updated, NOW)
            self.assertEqual(document.sha256, sha256(self.fetcher.documents[self.path(name)]))

    def test_each_document_is_fetched_once(self) -> None:
        self.read()
        self.assertEqual(sorted(self.fetcher.asked), sorted(self.fetcher.documents))

    def test_the_conversation_is_closed_however_reading_ends(self) -> None:
        self.read()
        self.fetcher.documents.clear()
        self.failure()
        self.assertEqual(self.conversation.closed, 2)

    def test_a_date_in_the_future_is_a_warning_and_makes_no_replay_of_what_follows(self) -> None:
        self.now = NOW - timedelta(days=1)
        end = self.read()
        self.assertEqual({document.updated for document in end.documents}, {self.now})
        self.assertEqual([problem.severity for problem in end.problems], ["warning"] * 3)
        self.assertIn("in the future", end.problems[0].reason)

    def test_a_url_may_name_the_index_itself(self) -> None:
        for url in (self.stream.url.rstrip("/"), self.stream.url, f"{self.stream.url}streams/v1/index.sjson"):
            end = self.read(self.stream.source(url=url))
            self.assertEqual(len(end.images), 3)
            self.assertEqual({offer.image.source for offer in end.images}, {url})

    def test_a_url_may_name_an_index_of_another_name(self) -> None:
        self.fetcher.documents["streams/v1/com.example.sjson"] = self.fetcher.documents.pop(self.path("index"))
        end = self.read(self.stream.source(url=f"{self.stream.url}streams/v1/com.example.sjson"))
        self.assertEqual(len(end.images), 3)

    def test_a_broken_product_and_its_problem_are_passed_on(self) -> None:
        del self.stream.item("squashfs", "noble")["sha256"]
        self.load()
        end = self.read()
        self.assertEqual([entry.key and entry.key.release for entry in end.listed_broken], ["noble"])
        self.assertEqual(
            [(it.severity, it.version, it.file) for it in end.problems], [("error", "20260101", "squashfs")]
        )
        self.assertEqual(len(end.images), 2)

    def test_the_same_image_in_two_documents_is_offered_once(self) -> None:
        other = dict(self.stream.documents[IMAGES], content_id="other")
        self.stream.documents["other"] = other
        self.load()
        end = self.read()
        self.assertEqual((len(end.images), end.problems), (3, ()))


class UnsignedReadTests(ReaderCase):
    """A source that the operator allows to be unsigned."""

    signed = False

    def test_the_unsigned_index_and_its_documents_are_read(self) -> None:
        self.assertEqual(len(self.read().images), 3)
        self.assertIn("streams/v1/index.json", self.fetcher.asked)

    def test_a_replay_is_refused_all_the_same(self) -> None:
        self.accepted = {"index": NOW + timedelta(days=1)}
        self.assertIn("replay", self.failure())

    def test_signed_documents_are_read_without_a_keyring(self) -> None:
        self.stream.signer = signer()
        self.load()
        source = self.stream.source(url=f"{self.stream.url}streams/v1/index.sjson", keyring=b"", allow_unsigned=True)
        self.assertEqual(len(self.read(source).images), 3)
