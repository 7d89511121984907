"""What is written over a link arrives whole and in order, whatever sockets take, and links end as they should."""

from __future__ import annotations

import gc
import random
import socket
import weakref
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from OpenSSL import SSL
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone, ConnectionLost
from twisted.internet.interfaces import IPushProducer
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.internet.task import deferLater
from twisted.internet.tcp import Port
from twisted.protocols.tls import TLSMemoryBIOProtocol
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase, TestCase
from zope.interface import implementer

from rpc.commands import ListImages, Ping, Register
from rpc.connection import Life
from rpc.identity import client_tls
from rpc.protocol import LinkLost
from rpc.records import HEADER, MAX_OWN, Boundaries, LinkTLS, PromptServer, make_prompt
from tests.rpc.test_tls import AUTHORITY, RACK, TlsTestCase, reactor


def record(size: int) -> bytes:
    return b"\x17\x03\x03" + size.to_bytes(2, "big") + bytes(size)


class BoundariesTests(SynchronousTestCase):
    @settings(max_examples=200)
    @given(st.lists(st.integers(0, 60), min_size=1, max_size=6), st.data())
    def test_what_is_said_to_be_one_record_is(self, sizes: list[int], data: st.DataObject) -> None:
        stream = b"".join(map(record, sizes))
        ends = [0]
        for size in sizes:
            ends.append(ends[-1] + HEADER + size)
        whole = {pair for pair in pairwise(ends) if pair[1] - pair[0] > HEADER + MAX_OWN}
        cuts = sorted(data.draw(st.sets(st.one_of(st.integers(1, len(stream)), st.sampled_from(ends[1:])))))
        pieces = list(zip([0, *cuts], [*cuts, len(stream)], strict=True))
        boundaries = Boundaries()
        for start, end in pieces:
            if start == end:
                continue
            one = boundaries.is_one(stream[start:end])
            if not boundaries.lost:
                self.assertEqual(one, (start, end) in whole)
            else:
                self.assertFalse(one)

    def test_once_a_header_came_in_two_pieces_nothing_is_said_to_be_one(self) -> None:
        boundaries = Boundaries()
        self.assertTrue(boundaries.is_one(record(100)))
        self.assertFalse(boundaries.is_one(record(100)[:3]))
        self.assertFalse(boundaries.is_one(record(100)[3:]))
        self.assertFalse(boundaries.is_one(record(100)))


@implementer(IPushProducer)
class Recording:
    """A producer that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def pauseProducing(self) -> None:
        self.told.append("pause")

    def resumeProducing(self) -> None:
        self.told.append("resume")

    def stopProducing(self) -> None:
        self.told.append("stop")


class Accepted(Protocol):
    def connectionMade(self) -> None:
        self.lost: Deferred[object] = Deferred()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.lost.callback(reason.type)


class PromptServerTests(TestCase):
    """The region's sockets, over loopback, with a peer that reads when it is told."""

    timeout = 20

    async def accept(self) -> Any:
        made: Deferred[Accepted] = Deferred()

        class Made(Accepted):
            def connectionMade(self) -> None:
                super().connectionMade()
                made.callback(self)

        port: Any = reactor.listenTCP(0, Factory.forProtocol(Made), interface="127.0.0.1")
        self.addCleanup(port.stopListening)
        make_prompt(port)
        self.peer = socket.socket()
        self.addCleanup(self.peer.close)
        self.peer.connect(("127.0.0.1", port.getHost().port))
        self.peer.setblocking(False)
        accepted = await made
        self.assertIsInstance(accepted.transport, PromptServer)
        return accepted

    def read(self) -> bytes:
        """What has come to the peer."""
        found = bytearray()
        try:
            while piece := self.peer.recv(1 << 20):
                found += piece
        except BlockingIOError:
            pass
        return bytes(found)

    async def read_until(self, size: int) -> bytes:
        found = self.read()
        while len(found) < size:
            await deferLater(reactor, 0)
            found += self.read()
        return found

    async def test_what_is_written_is_at_the_peer_before_the_reactor_turns(self) -> None:
        accepted = await self.accept()
        accepted.transport.write(b"one")
        accepted.transport.write(b"two")
        self.assertEqual(self.read(), b"onetwo")
        accepted.transport.abortConnection()
        await accepted.lost

    async def test_what_the_socket_does_not_take_arrives_later_and_nothing_goes_past_it(self) -> None:
        accepted = await self.accept()
        chance = random.Random(1)
        pieces = [bytes([number % 251]) * chance.randrange(1, 200_000) for number in range(100)]
        for piece in pieces:
            accepted.transport.write(piece)
        found = await self.read_until(500_000)
        for piece in pieces:
            accepted.transport.write(piece)
        accepted.transport.writeSequence(pieces)
        wanted = b"".join(pieces * 3)
        found += await self.read_until(len(wanted) - len(found))
        self.assertTrue(found == wanted)  # not assertEqual, which would print it
        accepted.transport.abortConnection()
        await accepted.lost

    async def test_a_producer_is_paused_when_the_peer_does_not_read_and_resumed_when_it_did(self) -> None:
        accepted = await self.accept()
        producer = Recording()
        accepted.transport.registerProducer(producer, True)
        sent = 0
        while not producer.told and sent < 1 << 28:
            accepted.transport.write(bytes(1 << 16))
            sent += 1 << 16
        self.assertEqual(producer.told, ["pause"])
        await self.read_until(sent)
        while len(producer.told) < 2:
            await deferLater(reactor, 0)
        self.assertEqual(producer.told, ["pause", "resume"])
        accepted.transport.abortConnection()
        await accepted.lost
        self.assertEqual(producer.told, ["pause", "resume", "stop"])

    async def test_what_was_written_arrives_before_an_orderly_end_and_nothing_that_is_written_after_it(self) -> None:
        accepted = await self.accept()
        sent = 0
        while self.waits(accepted) is False:
            accepted.transport.write(bytes(1 << 16))
            sent += 1 << 16
        accepted.transport.loseConnection()
        found = await self.read_until(sent)
        reason = await accepted.lost
        self.assertIs(reason, ConnectionDone)
        accepted.transport.write(b"late")
        self.assertEqual(len(found), sent)
        self.assertEqual(self.peer.recv(10), b"")

    def waits(self, accepted: Any) -> bool:
        return accepted.transport in reactor.getWriters()

    async def test_an_error_of_the_socket_ends_the_connection(self) -> None:
        accepted = await self.accept()
        accepted.transport.stopReading()  # so that only writing can find it out
        self.peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.peer.close()  # with a reset
        accepted.transport.write(b"to nobody")
        self.assertIs(await accepted.lost, ConnectionLost)

    def test_a_port_of_another_kind_stays_as_it_is(self) -> None:
        class Other:
            transport = None

        other: Any = Other()
        make_prompt(other)
        self.assertIsNone(other.transport)
        self.assertIsNot(Port.transport, PromptServer)


class LinkTests(TlsTestCase):
    """Links over TLS on loopback."""

    async def linked(self) -> Any:
        async def register(link, **arguments):
            return {"version": 1, "region": "r", "stream_urls": []}

        async def list_images(link, known_digest, newest_digest):
            return {"state": "ready", "generation": 1, "digest": known_digest, "inventory": self.inventory}

        self.inventory: bytes | None = None
        self.listen({Register: register})
        link = await self.connect(client_tls(RACK, AUTHORITY.certificate), {ListImages: list_images})
        await link.call(Register, versions=[1], name="n", software="s")
        return self.region_links[0], link

    async def test_answers_of_every_size_arrive_whole(self) -> None:
        region, _ = await self.linked()
        for size in (0, 1, 16_300, 16_384, 40_000, 300_000):
            self.inventory = random.Random(size).randbytes(size)
            answer = await region.call(ListImages, known_digest="x")
            self.assertEqual(answer["inventory"], self.inventory)

    async def test_asks_of_every_size_arrive_whole(self) -> None:
        region, _ = await self.linked()
        for size in (0, 1, 16_300, 16_384, 16_385, 65_535):
            answer = await region.call(ListImages, known_digest="x" * size)
            self.assertEqual(answer["digest"], "x" * size)

    async def test_the_usual_case_is_the_short_one(self) -> None:
        # Links work on without it, only slower: this says so if a release of Twisted or pyOpenSSL takes it away.
        region, rack = await self.linked()
        self.assertIsInstance(region.transport, LinkTLS)
        self.assertIsInstance(region.transport.transport, PromptServer)
        await rack.call(Ping)
        passed: list[bytes] = []
        write, receive = TLSMemoryBIOProtocol.write, TLSMemoryBIOProtocol.dataReceived

        def writing(own: Any, data: bytes) -> None:
            if own is region.transport:
                passed.append(data)
            write(own, data)

        def receiving(own: Any, data: bytes) -> None:
            if own is region.transport:
                passed.append(data)
            receive(own, data)

        self.patch(TLSMemoryBIOProtocol, "write", writing)
        self.patch(TLSMemoryBIOProtocol, "dataReceived", receiving)
        await region.call(ListImages, known_digest="x")
        self.assertEqual(passed, [])

    async def test_when_openssl_must_hear_from_the_peer_first_what_waits_goes_out_later_and_in_order(self) -> None:
        region, rack = await self.linked()
        handle = region.transport.getHandle()
        send: Any = handle.send
        refused: list[bytes] = []

        def refuse(data: bytes, flags: int = 0) -> Any:
            if len(refused) < 3:
                refused.append(data)
                raise SSL.WantReadError
            return send(data, flags)

        self.patch(handle, "send", refuse)
        calls = [Deferred.fromCoroutine(region.call(ListImages, known_digest=str(number))) for number in range(4)]
        self.assertEqual(len(refused), 3)
        await rack.call(Ping)
        self.assertEqual([(await call)["digest"] for call in calls], ["0", "1", "2", "3"])

    async def test_a_record_that_was_changed_on_the_way_cuts_the_link_with_the_reason(self) -> None:
        region, _ = await self.linked()
        received = region.transport.dataReceived
        self.patch(region.transport, "dataReceived", lambda data: received(data[:-1] + bytes([data[-1] ^ 1])))
        try:
            await region.call(Ping)
        except LinkLost as error:
            self.assertIn("bad record mac", str(error))
        else:
            self.fail("it was answered")

    async def test_an_orderly_end_of_the_rack_s_is_one_for_the_region(self) -> None:
        _, rack = await self.linked()
        rack.close()
        self.assertEqual(await self.region_reason(), "closed by the peer")

    async def test_what_was_written_before_the_region_closes_arrives(self) -> None:
        region, rack = await self.linked()
        call = Deferred.fromCoroutine(region.ask(ListImages, known_digest="x" * 60_000))
        region.close("the test closes it")
        ended = self.ended(rack)
        await call
        await ended
        self.assertIs(rack.life, Life.LOST)

    async def test_what_a_lost_link_took_is_given_back_at_once(self) -> None:
        # Not only when Python next looks for what refers to each other in a circle, which the region has it do seldom.
        region, rack = await self.linked()
        self.region_links.clear()
        handle = weakref.ref(region.transport.getHandle())
        gc.disable()
        self.addCleanup(gc.enable)
        ended = self.ended(region)
        rack.close()
        await ended
        del region
        await deferLater(reactor, 0)
        self.assertIsNone(handle())
