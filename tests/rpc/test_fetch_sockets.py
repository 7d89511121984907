"""Fetching over loopback sockets with real threads: resets, stalls, floods, and cancelling in the middle of work."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

from twisted.internet import reactor as _reactor
from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import TestCase

from rpc.blobs import BlobStore
from rpc.fetch import Fetched, Fetcher, FetchError, FetchFailed, Progress, Wanted
from tests.rpc import hostile
from tests.rpc.hostile import HostileServer, cut, page, redirect, reset, serve, stall

reactor: Any = _reactor
BODY = random.Random(2).randbytes(5 << 20)
IDLE = 0.3
"""Seconds; real ones, so few."""


class SocketTests(TestCase):
    timeout = 60

    def setUp(self) -> None:
        self.server = HostileServer().listen()
        self.store = BlobStore(Path(self.mktemp()))
        self.fetcher = self.make_fetcher()
        self.addCleanup(lambda: Deferred.fromCoroutine(self.stop()))

    async def stop(self) -> None:
        await self.fetcher.close()
        await self.server.stop()
        self.store.close()

    def make_fetcher(self, **settings: Any) -> Fetcher:
        return Fetcher(reactor, self.store, idle_timeout=IDLE, jitter=lambda: -4.0, **settings)

    def wanted(self, *behaviours: hostile.Behaviour, body: bytes = BODY, path: str = "/file") -> Wanted:
        return Wanted(self.server.script(path, *behaviours), hashlib.sha256(body).hexdigest(), len(body), path)

    async def fetch(self, wanted: Wanted) -> Fetched | FetchFailed:
        return (await self.fetcher.fetch([wanted]))[wanted.sha256]

    async def assert_fetched(self, wanted: Wanted, body: bytes = BODY) -> None:
        self.assertIsInstance(await self.fetch(wanted), Fetched)
        self.assertEqual(self.store.path(wanted.sha256).read_bytes(), body)
        self.assertTrue(self.store.is_verified(wanted.sha256, wanted.size))

    async def assert_failed(self, wanted: Wanted, text: str) -> None:
        result = await self.fetch(wanted)
        assert isinstance(result, FetchFailed)
        self.assertIn(text, result.reason)
        self.assertFalse(self.store.path(wanted.sha256).exists())

    async def test_many_files_arrive(self) -> None:
        bodies = [BODY[at : at + 300_000] for at in range(0, len(BODY), 100_000)]
        wanted = [self.wanted(serve(body), body=body, path=f"/{number}") for number, body in enumerate(bodies)]
        seen: list[Progress] = []
        result = await self.fetcher.fetch(wanted, seen.append)
        self.assertEqual({type(one) for one in result.values()}, {Fetched})
        self.assertLessEqual(self.server.connections, 4)
        self.assertEqual((seen[-1].files_done, seen[-1].bytes_read), (len(bodies), sum(map(len, bodies))))

    async def test_a_reset_is_resumed(self) -> None:
        await self.assert_fetched(self.wanted(reset(BODY, 3 << 20), serve(BODY)))
        self.assertRegex(self.server.requests[1].range, "bytes=[1-9][0-9]*-")

    async def test_a_cut_is_resumed(self) -> None:
        await self.assert_fetched(self.wanted(cut(BODY, 3 << 20), serve(BODY)))
        self.assertEqual(self.server.requests[1].range, f"bytes={3 << 20}-")

    async def test_a_stall_is_resumed(self) -> None:
        await self.assert_fetched(self.wanted(stall(BODY, 3 << 20), serve(BODY)))
        self.assertEqual(self.server.requests[1].range, f"bytes={3 << 20}-")

    async def test_a_flood_ends(self) -> None:
        await self.assert_failed(self.wanted(hostile.endless), f"more than the {len(BODY)} bytes")
        await self.server.all_gone()

    async def test_wrong_bytes_leave_nothing(self) -> None:
        await self.assert_failed(self.wanted(serve(BODY[:-1] + b"!")), "the sha256 of its")
        self.assertEqual(list(self.store.partial.iterdir()), [])

    async def test_one_connection_that_the_server_closed_between_requests_is_replaced(self) -> None:
        await self.assert_fetched(self.wanted(serve(BODY)))
        for connection in self.server.open:
            transport: Any = connection.transport
            transport.loseConnection()
        await self.server.all_gone()
        await self.assert_fetched(self.wanted(serve(b"2"), body=b"2"), b"2")

    async def test_errors_of_documents(self) -> None:
        cases = [
            (page("404 Not Found"), "404 Not Found"),
            (stall(BODY, 10), f"no byte came for {IDLE} seconds, after 10 bytes"),
            (redirect("/document"), "in a loop"),
            (hostile.hang_up, "closed the connection"),
            (hostile.endless, "more than the 6000000 bytes"),
        ]
        for behaviour, text in cases:
            with self.assertRaises(FetchError) as caught:
                await self.fetcher.read_document(self.server.script("/document", behaviour), limit=6_000_000)
            self.assertIn(text, caught.exception.reason)

    async def test_cancelling_in_the_middle_leaves_a_part_that_is_resumed(self) -> None:
        wanted = self.wanted(stall(BODY, 4 << 20), serve(BODY))
        self.fetcher.idle_timeout = self.fetcher.client.idle_timeout = 30.0

        def watch(seen: Progress) -> None:
            if seen.bytes_done >= 3 << 20:
                running.cancel()

        running: Deferred[Any] = Deferred.fromCoroutine(self.fetcher.fetch([wanted], watch))
        with self.assertRaises(CancelledError):
            await running
        await self.server.all_gone()
        self.assertGreaterEqual(self.store.part_size(wanted.sha256), 3 << 20)
        await self.assert_fetched(wanted)
        self.assertGreaterEqual(int(self.server.requests[1].range.strip("bytes=-")), 3 << 20)

    async def test_cancelling_at_the_start_leaves_nothing_open(self) -> None:
        wanted = [self.wanted(serve(BODY), path="/a"), self.wanted(serve(b"b"), body=b"b", path="/b")]
        running: Deferred[Any] = Deferred.fromCoroutine(self.fetcher.fetch(wanted))
        running.cancel()
        with self.assertRaises(CancelledError):
            await running
        await self.assert_fetched(wanted[0])
