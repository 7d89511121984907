"""Fetching, in memory: what a server or a disk does wrong never becomes a wrong blob, and never stops the others."""

from __future__ import annotations

import errno
import hashlib
import os
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from unittest import mock

from attrs import evolve
from treq.testing import RequestTraversalAgent
from twisted.internet.defer import CancelledError, Deferred, maybeDeferred
from twisted.internet.error import DNSLookupError
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.resource import Resource
from twisted.web.static import Data

from rpc.blobs import Abandoned, BlobError, BlobStore
from rpc.fetch import Fetched, Fetcher, FetchError, FetchFailed, Progress, Wanted
from tests.rpc import hostile
from tests.rpc.hostile import HostileServer, MemoryNetwork, cut, page, partial, raw, redirect, serve, stall

BODY = random.Random(1).randbytes(3 << 20)
SMALL = b"a small file\n" * 10


def sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


P = ParamSpec("P")
T = TypeVar("T")


def inline(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Deferred[T]:
    return maybeDeferred(function, *args, **kwargs)


class Threads:
    """Work in "threads" that goes on when the test says so."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Callable[[], Any], Deferred[Any]]] = []

    def __call__(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Deferred[T]:
        result: Deferred[T] = Deferred()
        self.waiting.append((lambda: function(*args, **kwargs), result))
        return result

    def work(self) -> Any:
        """Do the next work and give what it returned or raised; who waits for it gets it, too."""
        function, result = self.waiting.pop(0)
        try:
            value = function()
        except Exception as error:  # noqa: BLE001  # as a thread does, which passes on what happened
            result.errback(error)
            return error
        result.callback(value)
        return value

    def work_all(self) -> None:
        """Do all there is."""
        while self.waiting:
            self.work()


class FetchTestCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.network = MemoryNetwork()
        self.server = HostileServer(self.network)
        self.network.put(self.server)
        self.root = Path(self.mktemp())
        self.store = BlobStore(self.root)
        self.addCleanup(self.store.close)
        self.fetcher = self.make_fetcher()

    def make_fetcher(self, **settings: Any) -> Fetcher:
        return Fetcher(self.network, self.store, run_in_thread=inline, jitter=lambda: 0.0, **settings)

    def finish(self, coroutine: Coroutine[Any, Any, Any], seconds: float = 600) -> Any:
        """Run to the end, letting time go by as needed."""
        done = Deferred.fromCoroutine(coroutine)
        self.network.spin()
        while seconds > 0 and not done.called:
            self.network.pass_time(1, step=0.5)
            seconds -= 1
        return self.successResultOf(done)

    def fetch(self, *wanted: Wanted, **more: Any) -> Any:
        return self.finish(self.fetcher.fetch(wanted, **more))

    def wanted(self, body: bytes, *behaviours: hostile.Behaviour, path: str = "/file") -> Wanted:
        url = self.server.script(path, *behaviours)
        return Wanted(url, sha256(body), len(body), f"ubuntu/noble amd64 {path}")

    def assert_stored(self, body: bytes) -> None:
        self.assertEqual(self.store.path(sha256(body)).read_bytes(), body)
        self.assertTrue(self.store.is_verified(sha256(body), len(body)))
        self.assertEqual(list(self.store.partial.iterdir()), [])

    def assert_failed(self, result: Any, *texts: str) -> None:
        self.assertIsInstance(result, FetchFailed)
        for text in texts:
            self.assertIn(text, result.reason)
        self.assertFalse(self.store.path(result.sha256).exists())

    def leave_part(self, wanted: Wanted, data: bytes) -> None:
        self.store.prepare()
        self.store.part_path(wanted.sha256).write_bytes(data)


class FetchTests(FetchTestCase):
    def test_a_file_is_stored_under_its_sha256(self) -> None:
        wanted = self.wanted(BODY, serve(BODY))
        result = self.fetch(wanted)
        self.assertEqual(result, {wanted.sha256: Fetched(wanted.sha256, len(BODY), len(BODY), 0.0)})
        self.assert_stored(BODY)
        self.assertEqual(self.store.path(wanted.sha256).stat().st_mode & 0o777, 0o644)

    def test_identity_coding_is_asked_for(self) -> None:
        self.fetch(self.wanted(SMALL, serve(SMALL)))
        self.assertEqual(self.server.requests[0].headers["accept-encoding"], "identity")

    def test_what_is_verified_is_not_asked_for(self) -> None:
        wanted = self.wanted(SMALL, serve(SMALL))
        self.fetch(wanted)
        result = self.fetch(wanted)
        self.assertEqual(result[wanted.sha256].bytes_read, 0)
        self.assertEqual(len(self.server.requests), 1)

    def test_an_empty_file_needs_no_request(self) -> None:
        self.fetch(self.wanted(b"", serve(b"")))
        self.assert_stored(b"")
        self.assertEqual(self.server.requests, [])

    def test_one_bad_file_does_not_stop_the_others(self) -> None:
        bodies = [b"%d" % number * 1000 for number in range(9)]
        wanted = [self.wanted(body, serve(body), path=f"/{number}") for number, body in enumerate(bodies)]
        self.server.script("/4", page("404 Not Found"))
        result = self.fetch(*wanted)
        self.assertEqual([type(result[one.sha256]) for one in wanted], [Fetched] * 4 + [FetchFailed] + [Fetched] * 4)

    def test_fetching_nothing_at_a_time_is_refused(self) -> None:
        for settings in ({"concurrency": 0}, {"attempts": 0}):
            with self.assertRaises(ValueError):
                self.make_fetcher(**settings)

    def test_connections_are_used_again(self) -> None:
        bodies = [b"%d" % number * 1000 for number in range(9)]
        self.fetch(*[self.wanted(body, serve(body), path=f"/{number}") for number, body in enumerate(bodies)])
        self.assertLessEqual(self.server.connections, 4)

    def test_another_agent_can_be_asked(self) -> None:
        root = Resource()
        root.putChild(b"file", Data(SMALL, "application/octet-stream"))
        agent = RequestTraversalAgent(root)
        self.fetcher = self.make_fetcher(agent=agent)
        wanted = Wanted("http://anywhere.test/file", sha256(SMALL), len(SMALL), "label")
        running = Deferred.fromCoroutine(self.fetcher.fetch([wanted]))
        agent.flush()
        self.assertIsInstance(self.successResultOf(running)[wanted.sha256], Fetched)
        self.assert_stored(SMALL)

    def test_no_more_than_the_wanted_number_at_once(self) -> None:
        self.fetcher = self.make_fetcher(concurrency=2)
        wanted = [self.wanted(b"%d" % n, hostile.silence, path=f"/{n}") for n in range(5)]
        running = Deferred.fromCoroutine(self.fetcher.fetch(wanted))
        self.network.spin()
        self.assertEqual(len(self.server.requests), 2)
        running.cancel()
        self.network.spin()
        self.failureResultOf(running, CancelledError)

    def test_the_same_content_wanted_twice_is_fetched_once(self) -> None:
        wanted = self.wanted(SMALL, serve(SMALL))
        self.assertEqual(len(self.fetch(wanted, evolve(wanted, label="another"))), 1)
        self.assertEqual(len(self.server.requests), 1)

    def test_the_same_content_from_another_url_is_the_second_choice(self) -> None:
        bad = self.wanted(SMALL, page("404 Not Found"), path="/bad")
        good = self.wanted(SMALL, serve(SMALL), path="/good")
        self.assertIsInstance(self.fetch(bad, good)[good.sha256], Fetched)
        self.assert_stored(SMALL)

    def test_all_urls_that_failed_are_told(self) -> None:
        bad = self.wanted(SMALL, page("404 Not Found"), path="/bad")
        worse = self.wanted(SMALL, page("403 Forbidden"), path="/worse")
        self.assert_failed(self.fetch(bad, worse)[bad.sha256], "404 Not Found", "/worse: the server answered 403")

    def test_a_fault_of_ours_is_logged_and_fails_one_file(self) -> None:
        wanted = self.wanted(SMALL, serve(SMALL))
        with mock.patch.object(BlobStore, "open_part", side_effect=ZeroDivisionError("oops")):
            self.assert_failed(self.fetch(wanted)[wanted.sha256], "internal error: ZeroDivisionError: oops")
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)


class MeasuredDefectsTests(FetchTestCase):
    """What an existing mirror was measured to do wrong, by its letter."""

    def test_a_cut_keeps_what_came_and_resumes(self) -> None:
        """A: a connection that is cut in the middle of the body."""
        wanted = self.wanted(BODY, cut(BODY, 2_000_000), serve(BODY))
        result = self.fetch(wanted)[wanted.sha256]
        self.assertEqual([seen.range for seen in self.server.requests], ["", "bytes=2000000-"])
        self.assertEqual(result.bytes_read, len(BODY))
        self.assert_stored(BODY)

    def test_b_part_is_resumed(self) -> None:
        """B: a part is there and the server honours Range."""
        wanted = self.wanted(BODY, serve(BODY))
        self.leave_part(wanted, BODY[:1_500_000])
        self.assertEqual(self.fetch(wanted)[wanted.sha256].bytes_read, len(BODY) - 1_500_000)
        self.assert_stored(BODY)

    def test_c_server_that_ignores_range_means_starting_over(self) -> None:
        """C: 200 is the answer to a Range."""
        wanted = self.wanted(BODY, serve(BODY, ranges=False))
        self.leave_part(wanted, BODY[:1_500_000])
        self.assertEqual(self.fetch(wanted)[wanted.sha256].bytes_read, len(BODY))
        self.assertEqual(len(self.server.requests), 1)
        self.assert_stored(BODY)

    def test_d_full_part_is_verified_and_renamed_without_a_request(self) -> None:
        """D: a crash between the last byte and the rename."""
        wanted = self.wanted(BODY, page("416 Range Not Satisfiable"))
        self.leave_part(wanted, BODY)
        self.assertEqual(self.fetch(wanted)[wanted.sha256].bytes_read, 0)
        self.assertEqual(self.server.requests, [])
        self.assert_stored(BODY)

    def test_e_corrupt_blob_is_fetched_again(self) -> None:
        """E: the final file is there, but its bytes are wrong."""
        wanted = self.wanted(SMALL, serve(SMALL))
        self.fetch(wanted)
        self.store.path(wanted.sha256).write_bytes(SMALL[:-1] + b"!")
        self.assertEqual(self.fetch(wanted)[wanted.sha256].bytes_read, len(SMALL))
        self.assert_stored(SMALL)
        self.assertEqual(len(list(self.store.quarantine.iterdir())), 1)

    def test_f_error_is_never_taken_for_content(self) -> None:
        """F: HTTP 500 on an item."""
        wanted = self.wanted(SMALL, page("500 Internal Server Error", SMALL))
        self.assert_failed(self.fetch(wanted)[wanted.sha256], "the server answered 500 Internal Server Error")
        self.assertEqual(len(self.server.requests), 3)
        self.assertEqual(list(self.store.partial.iterdir()), [])

    def test_g_stall_ends_and_is_resumed(self) -> None:
        """G: the server stalls in the middle of the body."""
        wanted = self.wanted(BODY, stall(BODY, 2_000_000), serve(BODY))
        self.fetch(wanted)
        self.assertEqual([seen.range for seen in self.server.requests], ["", "bytes=2000000-"])
        self.assertAlmostEqual(self.network.seconds(), 31, delta=1)
        self.assert_stored(BODY)

    def test_h_new_content_under_an_old_url_is_fetched(self) -> None:
        """H: a respin inside the same version."""
        old, new = b"old" * 1000, b"new" * 1000
        wanted = self.wanted(old, serve(old), serve(new))
        self.fetch(wanted)
        self.fetch(evolve(wanted, sha256=sha256(new)))
        self.assert_stored(old)
        self.assert_stored(new)

    def test_i_deleted_file_is_fetched_again(self) -> None:
        """I: a file of ours was deleted."""
        wanted = self.wanted(SMALL, serve(SMALL))
        self.fetch(wanted)
        self.store.path(wanted.sha256).unlink()
        self.fetch(wanted)
        self.assertEqual(len(self.server.requests), 2)
        self.assert_stored(SMALL)

    def test_j_url_without_a_path_is_the_root(self) -> None:
        """J: ``http://host:port`` without a slash."""
        self.server.script("/", serve(SMALL))
        self.network.put(self.server, port=8099)
        self.assertEqual(self.finish(self.fetcher.read_document("http://127.0.0.1:8099", limit=1000)), SMALL)


class ResumeTests(FetchTestCase):
    def test_a_part_that_is_too_long_is_started_again(self) -> None:
        wanted = self.wanted(SMALL, serve(SMALL))
        self.leave_part(wanted, SMALL + b"more")
        self.fetch(wanted)
        self.assertEqual([seen.range for seen in self.server.requests], [""])
        self.assert_stored(SMALL)

    def test_a_full_part_with_wrong_bytes_is_started_again(self) -> None:
        wanted = self.wanted(SMALL, serve(SMALL))
        self.leave_part(wanted, SMALL[:-1] + b"!")
        self.fetch(wanted)
        self.assertEqual([seen.range for seen in self.server.requests], [""])
        self.assert_stored(SMALL)

    def test_a_part_with_wrong_bytes_is_found_after_resuming_and_started_again(self) -> None:
        wanted = self.wanted(SMALL, serve(SMALL))
        self.leave_part(wanted, b"!" + SMALL[1:50])
        self.fetch(wanted)
        self.assertEqual([seen.range for seen in self.server.requests], ["bytes=50-", ""])
        self.assert_stored(SMALL)

    def assert_starts_again(self, *behaviours: hostile.Behaviour) -> None:
        wanted = self.wanted(SMALL, *behaviours, serve(SMALL))
        self.leave_part(wanted, SMALL[:50])
        self.fetch(wanted)
        self.assertEqual([seen.range for seen in self.server.requests], ["bytes=50-", ""])
        self.assertEqual(self.network.seconds(), 0)
        self.assert_stored(SMALL)

    def test_a_content_range_that_starts_elsewhere_means_starting_over(self) -> None:
        self.assert_starts_again(partial(SMALL[49:], f"bytes 49-{len(SMALL) - 1}/{len(SMALL)}"))

    def test_a_content_range_with_another_total_means_starting_over(self) -> None:
        self.assert_starts_again(partial(SMALL[50:], f"bytes 50-{len(SMALL) - 1}/{len(SMALL) + 1}"))

    def test_a_content_range_that_does_not_fit_the_length_means_starting_over(self) -> None:
        self.assert_starts_again(partial(SMALL[50:-1], f"bytes 50-{len(SMALL) - 1}/{len(SMALL)}"))

    def test_a_content_range_that_ends_before_it_starts_means_starting_over(self) -> None:
        self.assert_starts_again(partial(b"", f"bytes 50-49/{len(SMALL)}"))

    def test_a_206_without_content_range_means_starting_over(self) -> None:
        self.assert_starts_again(page("206 Partial Content", SMALL[50:]))

    def test_an_unreadable_content_range_means_starting_over(self) -> None:
        self.assert_starts_again(partial(SMALL[50:], "bytes fifty-end/*"))

    def test_a_416_means_starting_over(self) -> None:
        self.assert_starts_again(page("416 Range Not Satisfiable"))

    def test_a_part_of_the_part_that_was_asked_for_is_taken(self) -> None:
        wanted = self.wanted(SMALL, partial(SMALL[50:80], f"bytes 50-79/{len(SMALL)}"), serve(SMALL))
        self.leave_part(wanted, SMALL[:50])
        self.fetch(wanted)
        self.assertEqual([seen.range for seen in self.server.requests], ["bytes=50-", "bytes=80-"])
        self.assert_stored(SMALL)

    def test_an_error_page_does_not_cost_what_was_fetched_before(self) -> None:
        for answer in (page("200 OK"), page("404 Not Found"), page("500 Internal Server Error")):
            wanted = self.wanted(SMALL, answer)
            self.leave_part(wanted, SMALL[:50])
            self.assert_failed(self.fetch(wanted)[wanted.sha256])
            self.assertEqual(self.store.part_size(wanted.sha256), 50)

    def test_a_206_that_nobody_asked_for_is_an_error(self) -> None:
        wanted = self.wanted(SMALL, partial(SMALL, f"bytes 0-{len(SMALL) - 1}/{len(SMALL)}"))
        self.assert_failed(self.fetch(wanted)[wanted.sha256], "206")

    def test_a_file_that_is_cut_often_arrives_as_long_as_it_moves(self) -> None:
        wanted = self.wanted(BODY, cut(BODY, 1 << 20))
        wanted = self.wanted(BODY * 3, cut(BODY * 3, 1 << 20))
        self.assertIsInstance(self.fetch(wanted)[wanted.sha256], Fetched)
        self.assert_stored(BODY * 3)

    def test_a_server_that_always_cuts_and_ignores_range_is_given_up(self) -> None:
        wanted = self.wanted(BODY, cut(BODY, 2 << 20, ranges=False))
        self.assert_failed(self.fetch(wanted)[wanted.sha256], f"the body ended after 2097152 of {len(BODY)} bytes")
        self.assertEqual(len(self.server.requests), 3)

    def test_a_server_that_sends_wrong_bytes_and_cuts_is_given_up(self) -> None:
        bad = BODY[:-1] + b"!"
        wanted = self.wanted(BODY, *[cut(bad, 2 << 20), serve(bad)] * 20)
        self.assert_failed(self.fetch(wanted)[wanted.sha256])
        self.assertLess(len(self.server.requests), 10)


class BadAnswersTests(FetchTestCase):
    def assert_once(self, *texts: str, behaviour: hostile.Behaviour, body: bytes = SMALL) -> None:
        """It fails at the first try, for good, and leaves nothing."""
        wanted = self.wanted(body, behaviour)
        self.assert_failed(self.fetch(wanted)[wanted.sha256], *texts)
        self.assertEqual(len(self.server.requests), 1)
        self.assertEqual(list(self.store.partial.iterdir()), [])

    def assert_retried(self, *texts: str, behaviour: hostile.Behaviour, requests: int = 3) -> None:
        wanted = self.wanted(SMALL, behaviour)
        self.assert_failed(self.fetch(wanted)[wanted.sha256], *texts)
        self.assertEqual(len(self.server.requests), requests)

    def test_a_missing_file_is_not_tried_again(self) -> None:
        self.assert_once("the server answered 404 Not Found", behaviour=page("404 Not Found"))

    def test_an_error_page_with_200_is_told_by_its_length(self) -> None:
        self.assert_once("has 18 bytes, not 130", behaviour=page("200 OK"))

    def test_an_error_page_with_200_and_no_length_is_told_by_its_end(self) -> None:
        self.assert_retried("ended after", "of 130 bytes", behaviour=hostile.unmeasured(b"<html>sorry</html>"))

    def test_wrong_content_names_the_hash_that_was_found(self) -> None:
        wrong = SMALL[:-1] + b"!"
        self.assert_once(sha256(wrong), f"not {sha256(SMALL)}", behaviour=serve(wrong))

    def test_a_body_that_is_longer_than_promised_is_cut_off(self) -> None:
        self.assert_once("more than the 130 bytes", behaviour=hostile.unmeasured(SMALL + b"more"))

    def test_an_endless_body_is_cut_off(self) -> None:
        self.assert_once(f"more than the {len(BODY)} bytes", behaviour=hostile.endless, body=BODY)

    def test_bytes_after_the_promised_length_are_not_of_the_file(self) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(SMALL)
        self.fetch(self.wanted(SMALL, raw(head + SMALL + b"HTTP/1.1 200 OK\r\n")))
        self.assert_stored(SMALL)

    def test_a_body_without_a_length_is_taken(self) -> None:
        self.fetch(self.wanted(SMALL, hostile.unmeasured(SMALL)))
        self.assert_stored(SMALL)

    def test_a_chunked_body_is_taken(self) -> None:
        self.fetch(self.wanted(BODY, hostile.unmeasured(BODY, chunked=True)))
        self.assert_stored(BODY)

    def test_a_broken_chunk_is_an_error(self) -> None:
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        self.assert_retried("ended after", behaviour=raw(head + b"zz\r\n" + SMALL))

    def test_no_answer_at_all_is_tried_again(self) -> None:
        self.assert_retried("the server closed the connection", behaviour=hostile.hang_up)

    def test_what_is_not_http_is_an_error(self) -> None:
        wanted = self.wanted(SMALL, raw(b"220 ftp.example.com ready\r\n"))
        self.assert_failed(self.fetch(wanted)[wanted.sha256], "ParseError")

    def test_a_length_that_is_no_number_is_an_error(self) -> None:
        wanted = self.wanted(SMALL, raw(b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n"))
        self.assert_failed(self.fetch(wanted)[wanted.sha256], "-5")

    def test_a_head_without_end_is_cut_off(self) -> None:
        head = b"HTTP/1.1 200 OK\r\n" + b"".join(b"X-%d: %s\r\n" % (n, b"x" * 1000) for n in range(300))
        self.assert_once("the head of the answer is over 262144 bytes", behaviour=raw(head, close=False))

    def test_silence_ends(self) -> None:
        self.assert_retried("did not answer within 40 seconds", behaviour=hostile.silence)

    def test_a_slow_drip_ends(self) -> None:
        self.assert_retried("too slowly, 0 bytes a second", behaviour=hostile.drip(SMALL, every=5.0))

    def test_a_slow_but_useful_server_is_waited_for(self) -> None:
        self.fetch(self.wanted(BODY, hostile.drip(BODY, every=10.0, size=1 << 17)))
        self.assert_stored(BODY)

    def test_a_failing_server_is_asked_again_after_1_and_2_seconds(self) -> None:
        wanted = self.wanted(SMALL, page("503 Service Unavailable"), page("502 Bad Gateway"), serve(SMALL))
        self.fetch(wanted)
        self.assertEqual(self.network.seconds(), 3)
        self.assert_stored(SMALL)

    def test_retry_after_is_obeyed(self) -> None:
        self.fetch(self.wanted(SMALL, page("503 Service Unavailable", Retry_After="20"), serve(SMALL)))
        self.assertEqual(self.network.seconds(), 20)

    def test_an_absurd_retry_after_is_not_obeyed(self) -> None:
        self.fetch(self.wanted(SMALL, page("503 Service Unavailable", Retry_After="9" * 30), serve(SMALL)))
        self.assertEqual(self.network.seconds(), 60)

    def test_what_a_server_says_that_it_withholds_is_told_at_once_with_its_reason(self) -> None:
        withheld = page("503 Service Unavailable", Retry_After="30", X_Stanchion_Withheld="was found damaged")
        wanted = self.wanted(SMALL, withheld)
        failed = self.fetch(wanted)[wanted.sha256]
        self.assertEqual(self.network.seconds(), 0)
        self.assertTrue(failed.withheld)
        self.assertEqual(failed.reason, "the server cannot give it now: it was found damaged")
        other = self.wanted(BODY, *[page("503 Service Unavailable")] * 3)
        self.assertFalse(self.fetch(other)[other.sha256].withheld)

    def test_what_only_one_of_two_servers_withholds_is_not_withheld(self) -> None:
        wanted = self.wanted(SMALL, page("503 Service Unavailable", X_Stanchion_Withheld="was found damaged"))
        failed = self.fetch(wanted, evolve(wanted, url="http://127.0.0.1:81/file"))[wanted.sha256]
        self.assertFalse(failed.withheld)
        self.assertIn("Connection was refused", failed.reason)

    def test_nobody_listening_is_told(self) -> None:
        wanted = evolve(self.wanted(SMALL), url="http://127.0.0.1:81/file")
        self.assert_failed(self.fetch(wanted)[wanted.sha256], "no connection: Connection was refused")

    def test_an_unknown_name_is_told(self) -> None:
        self.network.unknown_names.add("nowhere.test")
        wanted = evolve(self.wanted(SMALL), url="http://nowhere.test/file")
        self.assert_failed(self.fetch(wanted)[wanted.sha256], "nowhere.test", "cannot be resolved")

    def test_a_connection_that_is_never_made_is_told(self) -> None:
        self.network.hanging = True
        wanted = self.wanted(SMALL)
        self.assert_failed(self.fetch(wanted)[wanted.sha256], "no connection within 10 seconds")

    def test_what_is_no_url_is_told(self) -> None:
        for url in ("ftp://127.0.0.1/x", "http:///x", "http://[::1/x", "http://h:99999/", "x", "http://a..b/"):
            with self.assertRaises(FetchError):
                self.failureResultOf(Deferred.fromCoroutine(self.fetcher.read_document(url, limit=9))).raiseException()

    def test_odd_characters_in_a_path_are_escaped(self) -> None:
        self.server.script("/a%20b%C3%A9%0D%0Ac%2Fd", serve(SMALL))
        url = f"{self.server.url}/a bé%0D%0Ac%2Fd"
        self.assertEqual(self.finish(self.fetcher.read_document(url, limit=1000)), SMALL)


class RedirectTests(FetchTestCase):
    def read(self, url: str, limit: int = 1000) -> Any:
        return self.finish(self.fetcher.read_document(url, limit=limit))

    def assert_refused(self, url: str, text: str) -> None:
        error = self.failureResultOf(Deferred.fromCoroutine(self.spun(url)), FetchError).value
        self.assertIn(text, str(error))

    async def spun(self, url: str) -> bytes:
        reading = Deferred.fromCoroutine(self.fetcher.read_document(url, limit=1000))
        self.network.spin()
        return await reading

    def test_a_redirect_is_followed(self) -> None:
        self.server.script("/new/file", serve(SMALL))
        for to in ("/new/file", "new/file", f"{self.server.url}/new/file"):
            self.assertEqual(self.read(self.server.script("/old", redirect(to))), SMALL)

    def test_a_file_behind_a_redirect_is_resumed_there(self) -> None:
        self.server.script("/new", serve(SMALL))
        wanted = self.wanted(SMALL, redirect("/new"))
        self.leave_part(wanted, SMALL[:50])
        self.fetch(wanted)
        self.assertEqual(self.server.asked("/new")[0].range, "bytes=50-")
        self.assert_stored(SMALL)

    def test_five_redirects_are_followed_and_six_are_not(self) -> None:
        for number in range(6):
            self.server.script(f"/{number}", redirect(f"/{number + 1}"))
        self.server.script("/6", serve(SMALL))
        self.assertEqual(self.read(f"{self.server.url}/1"), SMALL)
        self.assert_refused(f"{self.server.url}/0", "more than 5 times")

    def test_a_redirect_loop_is_told(self) -> None:
        self.server.script("/a", redirect("/b"))
        self.server.script("/b", redirect("/a"))
        self.assert_refused(f"{self.server.url}/a", "in a loop, back to http://127.0.0.1:80/a")

    def test_a_redirect_to_a_file_is_refused(self) -> None:
        self.assert_refused(self.server.script("/a", redirect("file:///etc/passwd")), "neither http nor https")

    def test_a_redirect_to_nowhere_is_refused(self) -> None:
        self.assert_refused(self.server.script("/a", page("302 Found")), "without saying where to go")

    def test_a_redirect_to_what_is_no_url_is_refused(self) -> None:
        self.assert_refused(self.server.script("/a", redirect("http://[::1/")), "neither http nor https")
        self.assert_refused(self.server.script("/b", redirect("http://h:port/")), "not a URL")

    def test_user_and_password_go_to_their_own_server_only(self) -> None:
        self.network.put(self.server, "other.test")
        self.server.script("/a", redirect("/b"))
        self.server.script("/b", redirect("http://x:y@other.test/c"))
        self.server.script("/c", serve(SMALL))
        self.read("http://user:p%40ss@127.0.0.1:80/a")
        sent = [seen.headers.get("authorization", "") for seen in self.server.requests]
        self.assertEqual(sent, ["Basic dXNlcjpwQHNz", "Basic dXNlcjpwQHNz", ""])

    def test_a_password_is_not_in_the_error(self) -> None:
        url = self.server.script("/a", page("404 Not Found")).replace("//", "//user:secret@")
        error = self.failureResultOf(Deferred.fromCoroutine(self.spun(url)), FetchError).value
        self.assertNotIn("secret", str(error))


class DocumentTests(RedirectTests):
    def test_a_document_is_read(self) -> None:
        self.assertEqual(self.read(self.server.script("/d", serve(SMALL))), SMALL)

    def test_a_document_over_the_limit_is_refused_by_its_length(self) -> None:
        self.assert_refused(self.server.script("/d", serve(BODY)), "over the limit of 1000")

    def test_a_document_over_the_limit_is_cut_off(self) -> None:
        self.assert_refused(self.server.script("/d", hostile.unmeasured(BODY)), "more than the 1000 bytes")

    def test_a_document_that_is_cut_is_an_error(self) -> None:
        self.assert_refused(self.server.script("/d", cut(SMALL, 100)), "ended after 100 of 130 bytes")

    def test_a_missing_document_is_an_error_with_its_status(self) -> None:
        reading = self.failureResultOf(Deferred.fromCoroutine(self.spun(f"{self.server.url}/x")), FetchError)
        self.assertEqual(reading.value.status, 404)

    def test_a_document_that_was_compressed_unasked_is_an_error(self) -> None:
        self.assert_refused(self.server.script("/d", page("200 OK", Content_Encoding="gzip")), "encoded it as 'gzip'")

    def test_a_part_of_a_document_is_an_error(self) -> None:
        self.assert_refused(self.server.script("/d", partial(SMALL[:10], "bytes 0-9/130")), "206 with a part")

    def test_a_document_that_stalls_is_an_error(self) -> None:
        reading = Deferred.fromCoroutine(
            self.fetcher.read_document(self.server.script("/d", stall(SMALL, 10)), limit=1000)
        )
        self.network.pass_time(31)
        self.assertIn("no byte came for 30 seconds, after 10 bytes", str(self.failureResultOf(reading).value))
        self.assertEqual(self.server.open, [])

    def test_reading_can_be_cancelled_at_every_stage(self) -> None:
        self.server.script("/never", hostile.silence)
        for behaviour in (hostile.silence, stall(SMALL, 10), redirect("/never")):
            url = self.server.script("/d", behaviour)
            reading = Deferred.fromCoroutine(self.fetcher.read_document(url, limit=1000))
            self.network.spin()
            reading.cancel()
            self.network.spin()
            self.failureResultOf(reading, CancelledError)
            self.assertEqual(self.server.open, [])


class FileUrlTests(FetchTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.directory = Path(self.mktemp())
        self.directory.mkdir()

    def put(self, body: bytes, name: str = "a file é") -> Wanted:
        path = (self.directory / name).resolve()
        path.write_bytes(body)
        return Wanted(path.as_uri(), sha256(body), len(body), "label")

    def test_a_file_is_copied_and_not_linked(self) -> None:
        wanted = self.put(BODY)
        self.assertEqual(self.fetch(wanted)[wanted.sha256].bytes_read, 0)
        self.assert_stored(BODY)
        self.assertEqual(self.store.path(wanted.sha256).stat().st_nlink, 1)

    def test_a_copy_is_resumed(self) -> None:
        wanted = self.put(BODY)
        self.leave_part(wanted, BODY[:1000])
        self.fetch(wanted)
        self.assert_stored(BODY)

    def test_a_file_of_another_size_is_refused(self) -> None:
        wanted = self.put(SMALL)
        self.assert_failed(self.fetch(evolve(wanted, size=7))[wanted.sha256], "it has 130 bytes, not 7")

    def test_a_file_with_other_bytes_is_refused(self) -> None:
        wanted = evolve(self.put(SMALL), sha256=sha256(b""))
        self.assert_failed(self.fetch(wanted)[wanted.sha256], sha256(SMALL))

    def test_a_missing_file_is_told(self) -> None:
        wanted = evolve(self.put(SMALL), url="file:///nowhere/at/all")
        self.assert_failed(self.fetch(wanted)[wanted.sha256], "cannot read it: No such file or directory")

    def test_what_is_no_file_is_refused(self) -> None:
        os.mkfifo(self.directory / "fifo")
        for path in (self.directory, self.directory / "fifo", Path("/dev/zero")):
            wanted = evolve(self.put(SMALL), url=path.resolve().as_uri())
            self.assert_failed(self.fetch(wanted)[wanted.sha256], "not a regular file")

    def test_a_file_of_another_host_is_refused(self) -> None:
        wanted = evolve(self.put(SMALL), url="file://elsewhere/etc/passwd")
        self.assert_failed(self.fetch(wanted)[wanted.sha256], "of this host, not of 'elsewhere'")

    def test_a_document_is_read_up_to_its_limit(self) -> None:
        wanted = self.put(SMALL)
        self.assertEqual(self.finish(self.fetcher.read_document(wanted.url, limit=130)), SMALL)
        reading = Deferred.fromCoroutine(self.fetcher.read_document(wanted.url, limit=129))
        self.assertIn("over the limit of 129", str(self.failureResultOf(reading, FetchError).value))


class DiskTests(FetchTestCase):
    def failing(self, name: str, code: int, after: int = 0) -> Any:
        """Let the os function fail from its ``after``-th call on."""
        real = getattr(os, name)
        calls = [0]

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] > after:
                raise OSError(code, os.strerror(code))
            return real(*args, **kwargs)

        return mock.patch.object(os, name, call)

    def test_a_full_disk_is_told_and_what_came_is_resumed_later(self) -> None:
        wanted = self.wanted(BODY, hostile.drip(BODY, every=0.1, size=1 << 19), serve(BODY))
        self.store.prepare()
        with self.failing("write", errno.ENOSPC, after=2):
            reason = self.fetch(wanted)[wanted.sha256].reason
        self.assertIn("No space left on device", reason)
        self.assertIn(f"needs {len(BODY)} bytes", reason)
        self.assertEqual(len(self.server.requests), 1)
        self.assertGreater(self.store.part_size(wanted.sha256), 1 << 19)
        self.fetch(wanted)
        self.assertNotEqual(self.server.requests[1].range, "")
        self.assert_stored(BODY)

    def test_a_full_disk_fails_one_file_and_not_those_that_fit(self) -> None:
        big, small = self.wanted(BODY, serve(BODY)), self.wanted(SMALL, serve(SMALL), path="/small")
        real = os.write

        def write(descriptor: int, data: Any) -> int:
            if len(data) > 100_000:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(descriptor, data)

        with mock.patch.object(os, "write", write):
            result = self.fetch(big, small)
        self.assert_failed(result[big.sha256], "No space left")
        self.assert_stored(SMALL)

    def test_refused_access_is_told(self) -> None:
        wanted = self.wanted(SMALL, serve(SMALL))
        with mock.patch.object(os, "open", side_effect=OSError(errno.EACCES, "Permission denied", "/some/place")):
            self.assert_failed(self.fetch(wanted)[wanted.sha256], "/some/place: Permission denied")

    def test_a_failing_flush_is_not_taken_for_success(self) -> None:
        wanted = self.wanted(SMALL, serve(SMALL))
        with self.failing("fsync", errno.EIO):
            self.assert_failed(self.fetch(wanted)[wanted.sha256], "Input/output error")
        self.fetch(wanted)
        self.assert_stored(SMALL)

    def test_a_failing_rename_leaves_a_part_that_needs_no_request(self) -> None:
        wanted = self.wanted(SMALL, serve(SMALL))
        self.store.prepare()
        with self.failing("rename", errno.EROFS):
            self.assert_failed(self.fetch(wanted)[wanted.sha256], "Read-only file system")
        self.fetch(wanted)
        self.assertEqual(len(self.server.requests), 1)
        self.assert_stored(SMALL)

    def test_another_fetch_of_the_same_file_is_told(self) -> None:
        wanted = self.wanted(SMALL, serve(SMALL))
        part = BlobStore(self.root).open_part(wanted.sha256, wanted.size)
        self.assert_failed(self.fetch(wanted)[wanted.sha256], "is being written by another fetch")
        part.close()
        self.fetch(wanted)
        self.assert_stored(SMALL)


class CancelTests(FetchTestCase):
    def test_cancelling_stops_at_once_and_leaves_what_came(self) -> None:
        wanted = [self.wanted(BODY, stall(BODY, 2_000_000), path="/1"), self.wanted(SMALL, hostile.silence, path="/2")]
        running = Deferred.fromCoroutine(self.fetcher.fetch(wanted))
        self.network.spin()
        running.cancel()
        self.failureResultOf(running, CancelledError)
        self.network.spin()
        self.assertEqual(self.server.open, [])
        self.assertGreater(self.store.part_size(wanted[0].sha256), 1_000_000)
        self.assertEqual(self.network.getDelayedCalls(), [])
        self.server.script("/1", serve(BODY))
        self.fetch(wanted[0])
        self.assert_stored(BODY)

    def test_cancelling_what_takes_that_for_a_failure_does_not_try_again(self) -> None:
        asked: list[bytes] = []

        class Agent:
            """Looks up names as Twisted's endpoint does: cancelled, it says that it found nothing."""

            def request(self, method: bytes, uri: bytes, *more: Any) -> Deferred[Any]:
                asked.append(uri)
                return Deferred(lambda looking: looking.errback(DNSLookupError("no results")))

        fetcher = self.make_fetcher(agent=Agent(), concurrency=2)
        wanted = [Wanted(f"http://region.example/{number}", f"{number:064x}", 5, "x") for number in range(5)]
        running = Deferred.fromCoroutine(fetcher.fetch(wanted))
        self.network.spin()
        self.assertEqual(len(asked), 2)
        running.cancel()
        self.network.spin()
        self.failureResultOf(running, CancelledError)
        self.network.pass_time(100, step=1)
        self.assertEqual(len(asked), 2)

    def test_cancelling_while_waiting_to_try_again_stops_at_once(self) -> None:
        running = Deferred.fromCoroutine(self.fetcher.fetch([self.wanted(SMALL, page("503 Service Unavailable"))]))
        self.network.pass_time(0.5)
        running.cancel()
        self.failureResultOf(running, CancelledError)
        self.network.pass_time(100)
        self.assertEqual(len(self.server.requests), 1)

    def test_cancelling_closes_a_part_that_is_only_just_being_opened(self) -> None:
        threads = Threads()
        wanted = self.wanted(SMALL, serve(SMALL))
        running = Deferred.fromCoroutine(Fetcher(self.network, self.store, run_in_thread=threads).fetch([wanted]))
        threads.work()  # examine
        running.cancel()  # while the part is being opened
        self.assertIsInstance(threads.work(), BlobError)
        threads.work_all()
        self.failureResultOf(running, CancelledError)
        self.store.open_part(wanted.sha256, wanted.size).close()

    def test_cancelling_stops_copying_in_a_thread(self) -> None:
        threads = Threads()
        path = Path(self.mktemp()).resolve()
        path.write_bytes(BODY)
        wanted = Wanted(path.as_uri(), sha256(BODY), len(BODY), "label")
        running = Deferred.fromCoroutine(Fetcher(self.network, self.store, run_in_thread=threads).fetch([wanted]))
        threads.work()  # examine
        threads.work()  # open
        real = os.fstat

        def cancelling(descriptor: int) -> os.stat_result:
            running.cancel()
            return real(descriptor)

        with mock.patch.object(os, "fstat", cancelling):
            self.assertIsInstance(threads.work(), Abandoned)
        threads.work_all()
        self.failureResultOf(running, CancelledError)
        self.assertEqual(self.store.part_size(wanted.sha256), 0)

    def test_cancelling_while_the_part_is_emptied_closes_the_connection(self) -> None:
        def run(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Deferred[T]:
            return Deferred() if getattr(function, "__name__", "") == "restart" else inline(function, *args, **kwargs)

        wanted = self.wanted(BODY, lambda one: one.transport.write(one.start(BODY, ranges=False)[:2000]))
        self.leave_part(wanted, BODY[:1000])
        running = Deferred.fromCoroutine(Fetcher(self.network, self.store, run_in_thread=run).fetch([wanted]))
        self.network.spin()
        self.assertEqual(len(self.server.open), 1)
        running.cancel()
        self.failureResultOf(running, CancelledError)
        self.network.spin()
        self.assertEqual(self.server.open, [])


class ProgressTests(FetchTestCase):
    def test_progress_says_what_is_done_and_under_way(self) -> None:
        seen: list[Progress] = []
        wanted = [
            self.wanted(BODY, stall(BODY, 2 << 20), serve(BODY), path="/big"),
            self.wanted(SMALL, serve(SMALL), path="/small"),
            self.wanted(b"none", path="/none"),
        ]
        self.fetch(*wanted, progress=seen.append)
        total = len(BODY) + len(SMALL) + 4
        self.assertEqual(seen[0], Progress(3, 0, 0, total, 0, 0, ()))
        self.assertIn(wanted[0].label, seen[4].current)
        self.assertEqual(seen[4].files_done, 1)
        self.assertEqual(seen[4].files_failed, 1)
        self.assertGreater(seen[4].bytes_done, 1 << 20)
        self.assertEqual(seen[-1], Progress(3, 2, 1, total, total - 4, total - 4, ()))

    def test_progress_is_reported_at_most_four_times_a_second(self) -> None:
        seen: list[Progress] = []
        running = Deferred.fromCoroutine(self.fetcher.fetch([self.wanted(SMALL, hostile.silence)], seen.append))
        self.network.pass_time(10, step=0.05)
        self.assertLessEqual(len(seen), 41)
        running.cancel()
        self.failureResultOf(running, CancelledError)

    def test_a_watcher_that_fails_is_logged_and_does_not_stop_the_work(self) -> None:
        def watch(progress: Progress) -> None:
            raise ZeroDivisionError

        self.fetch(self.wanted(SMALL, serve(SMALL)), progress=watch)
        self.assertGreater(len(self.flushLoggedErrors(ZeroDivisionError)), 0)
        self.assert_stored(SMALL)
