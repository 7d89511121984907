"""A slow or flooding peer costs only itself."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

from prometheus_client import REGISTRY
from twisted.internet.address import IPv4Address
from twisted.internet.defer import Deferred
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.internet.task import Clock, deferLater
from twisted.internet.testing import MemoryReactorClock, StringTransport
from twisted.logger import LogLevel, globalLogPublisher
from twisted.protocols import amp
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from rpc import limits
from rpc.asks import encode
from rpc.boxes import END, MAX_BOX, MAX_PAIRS, BadBox, Parser, pairs
from rpc.commands import CancelSync, Enroll, ListImages, Ping, Register
from rpc.endpoints import listen_tls, region_endpoint
from rpc.identity import client_tls, server_tls
from rpc.limits import Door
from rpc.outcomes import Answered, Failed
from rpc.protocol import Life, Link, Responders, TooBusy, link_factory
from rpc.rounds import ask_all
from rpc.testing import ANONYMOUS, RACK, RecordingReporter, linked
from rpc.testing import REGION as REGION_PEER
from tests.rpc.test_tls import AUTHORITY, REGION, TlsTestCase, reactor
from tests.rpc.test_tls import RACK as CREDENTIALS

NOTHING = Responders("region", {})


class Socket(StringTransport):
    """A transport whose peer reads only when :meth:`read` is called; as TCP's, it tells its producer of that."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = 0
        self.aborting = False

    def write(self, data: bytes) -> None:
        self.waiting += len(data)
        if self.waiting > 1 << 16 and self.producer is not None:
            self.producer.pauseProducing()  # as TCP does, once or more

    def read(self) -> None:
        self.waiting = 0
        if self.producer is not None:
            self.producer.resumeProducing()

    def abortConnection(self) -> None:
        self.aborting = True


def cuts(reason: str, peer: str = "rack") -> float:
    """How many links were cut for that."""
    return REGISTRY.get_sample_value("stanchion_rpc_cuts_total", {"peer": peer, "reason": reason}) or 0.0


class LoggedCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.events: list[Any] = []
        observer: Any = self.events.append
        globalLogPublisher.addObserver(observer)
        self.addCleanup(globalLogPublisher.removeObserver, observer)

    def errors(self) -> list[str]:
        return [event["reason"] for event in self.events if event["log_level"] >= LogLevel.error]


class CallsTests(LoggedCase):
    """Calls under way on one link."""

    def setUp(self) -> None:
        super().setUp()
        self.asked: list[Deferred[None]] = []
        self.clock = Clock()
        self.at_region, self.at_rack = RecordingReporter(), RecordingReporter()

        async def cancel(link: Link) -> dict[str, bool]:
            self.asked.append(Deferred())
            await self.asked[-1]
            return {"cancelled": True}

        self.region, self.rack, self.pump = linked(
            {}, {CancelSync: cancel}, self.clock, region_reporter=self.at_region, rack_reporter=self.at_rack, interval=0
        )

    def start(self, count: int) -> list[Deferred[Any]]:
        asked = [Deferred.fromCoroutine(self.region.ask(CancelSync)) for _ in range(count)]
        self.pump.flush()
        return asked

    def raw_asks(self, count: int, first: int = 1) -> bytes:
        """What a peer sends that keeps to no bound."""
        request = encode(CancelSync, {})
        return b"".join(pairs([(amp.ASK, b"%x" % number)]) + request for number in range(first, first + count))

    def test_one_call_too_many_is_not_sent_and_the_others_go_on(self) -> None:
        most = self.start(limits.MAX_CALLS)
        [more] = self.start(1)
        outcome = self.successResultOf(more)
        self.assertIsInstance(outcome, Failed)
        self.assertEqual(outcome.kind, "TooBusy")
        self.assertIn("128 calls to rack abc234 at 192.0.2.2:40000 are under way", outcome.reason)
        self.assertEqual(self.at_region.kinds, ["TooBusy"])
        self.assertEqual(len(self.asked), limits.MAX_CALLS)
        for each in self.asked:
            each.callback(None)
        self.pump.flush()
        self.assertEqual({type(self.successResultOf(each)) for each in most}, {Answered})
        [again] = self.start(1)
        self.assertNoResult(again)

    def test_a_link_with_too_many_calls_is_still_watched(self) -> None:
        self.start(limits.MAX_CALLS)
        pinged = Deferred.fromCoroutine(self.region.call(Ping))
        self.pump.flush()
        self.assertEqual(self.successResultOf(pinged), {})

    def test_in_a_round_a_busy_peer_fails_alone(self) -> None:
        self.start(limits.MAX_CALLS)

        async def list_images(link: Link, **arguments: Any) -> dict[str, Any]:
            return {"state": "empty", "generation": -1, "digest": ""}

        other, _, pump = linked({}, {ListImages: list_images}, self.clock, interval=0)
        arguments = {"known_digest": ""}
        asked = Deferred.fromCoroutine(ask_all(ListImages, {1: (self.region, arguments), 2: (other, arguments)}))
        pump.flush()
        outcomes = self.successResultOf(asked)
        self.assertEqual((type(outcomes[1]), type(outcomes[2])), (Failed, Answered))

    def test_a_peer_that_asks_too_much_is_refused_and_gets_its_answers_all_the_same(self) -> None:
        self.rack.dataReceived(self.raw_asks(limits.MAX_ANSWERING + 3))
        self.assertEqual(len(self.asked), limits.MAX_ANSWERING)
        boxes = amp.parseString(self.rack.transport.getOutBuffer())  # type: ignore[union-attr]  # it is iosim's
        self.assertEqual([box[amp.ERROR_CODE] for box in boxes], [TooBusy.code] * 3)
        self.assertEqual([box[amp.ERROR] for box in boxes], [b"81", b"82", b"83"])
        self.assertEqual(self.at_rack.kinds, ["TooBusy"] * 3)
        self.asked[0].callback(None)
        self.rack.dataReceived(self.raw_asks(1, first=200))
        self.assertEqual(len(self.asked), limits.MAX_ANSWERING + 1)
        self.assertIs(self.rack.life, Life.READY)

    def test_a_peer_that_floods_is_cut_off_with_the_reason_and_only_it(self) -> None:
        other_region, other_rack, _ = linked({}, {}, self.clock, interval=0)
        before = cuts("flood", "region")
        self.rack.dataReceived(self.raw_asks(100_000))
        self.assertEqual(cuts("flood", "region"), before + 1)
        self.assertIs(self.rack.life, Life.CLOSING)
        self.assertEqual(len(self.asked), limits.MAX_ANSWERING)
        self.assertEqual(self.at_rack.kinds, ["TooBusy"] * limits.MAX_REFUSED)
        [reason] = self.errors()
        self.assertIn("after 128 asks were refused because it asks too many at a time", reason)
        self.assertEqual((other_region.life, other_rack.life), (Life.READY, Life.READY))
        for each in self.asked:  # what was begun ends, and is reported as not delivered
            each.callback(None)
        self.assertEqual(self.at_rack.kinds[limits.MAX_REFUSED :], ["LinkLost"] * limits.MAX_ANSWERING)

    def test_a_stranger_that_is_refused_again_and_again_is_cut_off(self) -> None:
        region, _, _ = linked({}, {}, rack=ANONYMOUS, region_reporter=self.at_region)
        request = encode(Register, {"versions": [1], "name": "n", "software": "s"})
        for number in range(limits.MAX_ANONYMOUS_REFUSED):
            self.assertIs(region.life, Life.READY)
            region.dataReceived(pairs([(amp.ASK, b"%x" % number)]) + request)
        self.assertIs(region.life, Life.CLOSING)
        self.assertEqual(self.at_region.kinds, ["NotAllowed"] * limits.MAX_ANONYMOUS_REFUSED)
        [reason] = self.errors()
        self.assertIn("it has no certificate, and was refused 8 times", reason)

    def test_a_rack_that_has_not_registered_sends_no_large_box(self) -> None:
        pair = pairs([(b"k%d" % number, bytes(60_000)) for number in range(5)])
        region, _, _ = linked({}, {}, version=None, interval=0)
        region.dataReceived(pair)
        self.assertIs(region.life, Life.CLOSING)
        region, _, _ = linked({}, {}, version=None, interval=0)
        region.agreed(1)
        region.dataReceived(pair)
        self.assertIs(region.life, Life.READY)
        _, rack, _ = linked({}, {}, version=None, interval=0)
        rack.dataReceived(pair)
        self.assertIs(rack.life, Life.READY)

    def test_a_stranger_has_one_thing_to_ask(self) -> None:
        asked: list[Deferred[None]] = []

        async def enroll(link: Link, **arguments: Any) -> Any:
            asked.append(Deferred())
            await asked[-1]

        region, _, _ = linked({Enroll: enroll}, {}, rack=ANONYMOUS)
        request = encode(Enroll, {"token_id": "", "proof": b"", "csr": b"", "name": ""})
        region.dataReceived(b"".join(pairs([(amp.ASK, b"%x" % number)]) + request for number in range(1000)))
        self.assertEqual(len(asked), limits.MAX_ANONYMOUS_ANSWERING)
        self.assertIs(region.life, Life.CLOSING)


class TurnTests(LoggedCase):
    """What takes long to answer keeps nobody else waiting for long."""

    def setUp(self) -> None:
        super().setUp()
        self.clock = Clock()
        self.answered = 0

        async def cancel(link: Link) -> dict[str, bool]:
            self.answered += 1
            self.clock.rightNow += limits.TURN_SECONDS / 4
            return {"cancelled": False}

        self.rack = Link(
            Responders("rack", {CancelSync: cancel}), clock=self.clock, peer=REGION_PEER, interval=0,
            reporter=RecordingReporter(),
        )  # fmt: skip
        self.transport = StringTransport()
        self.transport.abortConnection = lambda: None  # type: ignore[method-assign]  # its own cannot take one
        self.rack.makeConnection(self.transport)
        self.rack.agreed(1)
        request = encode(CancelSync, {})
        self.asks = b"".join(pairs([(amp.ASK, b"%x" % number)]) + request for number in range(1, 51))

    def turn(self) -> None:
        """As the reactor's next turn: what is due now, and not what comes to be due in it."""
        [call] = self.clock.calls
        self.clock.calls.remove(call)
        call.called = 1
        call.func(*call.args)

    def test_a_turn_ends_and_the_next_goes_on_where_it_ended(self) -> None:
        self.rack.dataReceived(self.asks)
        self.assertEqual((self.answered, self.transport.producerState), (4, "paused"))
        self.turn()
        self.assertEqual((self.answered, self.transport.producerState), (8, "paused"))
        self.clock.advance(0)
        self.assertEqual((self.answered, self.transport.producerState), (50, "producing"))
        boxes = amp.parseString(self.transport.value())
        self.assertEqual([box[amp.ANSWER] for box in boxes], [b"%x" % number for number in range(1, 51)])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_what_comes_meanwhile_waits_and_is_not_lost(self) -> None:
        self.rack.dataReceived(self.asks[:1000])
        for byte in range(1000, len(self.asks), 7):
            self.rack.dataReceived(self.asks[byte : byte + 7])
        self.assertEqual(self.answered, 4)
        self.clock.advance(0)
        self.assertEqual(self.answered, 50)

    def test_a_link_that_ends_meanwhile_answers_no_more(self) -> None:
        self.rack.dataReceived(self.asks)
        self.rack.abort("enough")
        self.clock.advance(0)
        self.rack.connectionLost()
        self.clock.advance(0)
        self.assertEqual((self.answered, self.clock.getDelayedCalls()), (4, []))


class UnreadTests(LoggedCase):
    """Bytes that wait for a peer that does not read."""

    def link(self, peer: Any = RACK) -> None:
        self.clock = Clock()
        self.socket = Socket()
        self.link_ = Link(NOTHING, clock=self.clock, peer=peer, interval=0, reporter=RecordingReporter())
        self.link_.makeConnection(self.socket)

    def flood(self, count: int) -> None:
        """``count`` asks to which the answers are some 100 bytes each."""
        for number in range(count):
            self.link_.dataReceived(pairs([(amp.ASK, b"%030x" % number), (amp.COMMAND, b"Nonsense" * 8)]) + END)

    def test_a_peer_that_asks_and_does_not_read_is_cut_off_with_the_reason(self) -> None:
        self.patch(limits, "MAX_UNREAD", 1 << 20)
        self.link()
        lost: list[str] = []
        self.link_.on_lost(lambda link, reason: lost.append(reason))
        before = cuts("unread")
        self.flood(20_000)
        self.assertEqual(cuts("unread"), before + 1)
        self.assertTrue(self.socket.aborting)
        self.assertLess(self.socket.waiting, (1 << 20) + (1 << 18))
        [reason] = self.errors()
        self.assertRegex(reason, r"^10\d+ bytes wait, which it does not read$")
        self.link_.connectionLost()
        self.assertEqual(lost, [reason])

    def test_one_that_reads_in_the_end_is_not(self) -> None:
        self.patch(limits, "MAX_UNREAD", 1 << 20)
        self.link()
        for _ in range(20):
            self.flood(1000)
            self.socket.read()
        self.assertIs(self.link_.life, Life.READY)
        self.assertEqual(self.errors(), [])

    def test_the_largest_box_may_wait(self) -> None:
        self.assertGreater(limits.MAX_UNREAD, MAX_BOX)

    def test_little_may_wait_for_a_stranger(self) -> None:
        self.link(ANONYMOUS)
        self.flood(20_000)
        self.assertTrue(self.socket.aborting)
        self.assertLess(self.socket.waiting, 2 * limits.MAX_ANONYMOUS_UNREAD)

    def test_an_orderly_end_does_not_wait_for_the_producer(self) -> None:
        self.link()
        self.link_.close("testing")
        self.assertIsNone(self.socket.producer)
        self.assertTrue(self.socket.disconnecting)


class Deaf(Protocol):
    """A rack that asks, and never reads."""

    def connectionMade(self) -> None:
        self.lost: Deferred[None] = Deferred()
        request = encode(Register, {"versions": [1], "name": "n", "software": "s"})
        self.transport.write(b"".join(pairs([(amp.ASK, b"%x" % number)]) + request for number in range(2000)))  # type: ignore[union-attr]  # it is up

    def dataReceived(self, data: bytes) -> None:
        self.transport.pauseProducing()  # type: ignore[union-attr]  # TLS's has it

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.lost.callback(None)


class RealTests(TlsTestCase):
    """Over TLS on loopback."""

    def test_a_rack_that_asks_and_never_reads_is_cut_off_and_another_is_served(self) -> Deferred[Any]:
        self.patch(limits, "MAX_UNREAD", 1 << 20)
        urls = "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz0123456789", k=60_000))

        async def register(link: Link, **arguments: Any) -> dict[str, Any]:
            return {"version": 1, "region": "r", "stream_urls": [urls]}

        self.listen({Register: register})

        async def run() -> None:
            tls = client_tls(CREDENTIALS, AUTHORITY.certificate)
            endpoint = region_endpoint(reactor, "127.0.0.1", self.port, tls)
            deaf: Any = await endpoint.connect(Factory.forProtocol(Deaf))
            lost: Deferred[str] = Deferred()
            while not self.region_links:
                await deferLater(reactor, 0)
            [link] = self.region_links
            link.on_lost(lambda link, reason: lost.callback(reason))
            other = await self.connect(tls)
            answer = await other.call(Register, versions=[1], name="n", software="s")
            self.assertEqual(answer["stream_urls"], [urls])
            self.assertRegex(await lost, r"^\d+ bytes wait, which it does not read$")
            self.assertEqual(await other.call(Ping), {})
            deaf.dataReceived = lambda data: None
            deaf.transport.resumeProducing()  # who does not read does not see the end either
            await deaf.lost

        return Deferred.fromCoroutine(run())


class BoxTests(SynchronousTestCase):
    """Boxes that are cheap to send and dear to hold."""

    def test_a_box_of_many_small_pairs_is_cut_off(self) -> None:
        parser = Parser(MAX_BOX)
        stream = b"".join(pairs([(b"%07d" % number, b"")]) for number in range(300_000))
        tracemalloc.start()
        try:
            error = self.assertRaises(BadBox, parser.feed, stream, lambda box: True)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        self.assertEqual(str(error), f"a box of more than {MAX_PAIRS} pairs")
        self.assertLess(peak, 1 << 20)

    def test_a_box_of_as_many_pairs_as_may_be_passes(self) -> None:
        boxes: list[object] = []
        box = {b"%d" % number: b"" for number in range(MAX_PAIRS)}

        def receive(one: object) -> bool:
            boxes.append(one)
            return True

        Parser(MAX_BOX).feed(pairs(box.items()) + END, receive)
        self.assertEqual(boxes, [box])


class DoorTests(LoggedCase):
    """Connections that have shown no certificate, and links of one rack."""

    def setUp(self) -> None:
        super().setUp()
        self.clock = Clock()
        self.ended: list[tuple[str, str]] = []

    def enter(self, door: Door, host: str, peer: Any = None) -> Link:
        """A connection from ``host``; with ``peer`` it has shown its certificate."""
        link = Link(NOTHING, clock=self.clock, peer=peer, interval=0)
        door.enter(link, host)
        link.on_lost(lambda link, reason: self.ended.append((host, reason)))
        socket = Socket()
        socket.abortConnection = link.connectionLost  # type: ignore[method-assign]  # at once
        link.makeConnection(socket)
        return link

    def test_of_too_many_strangers_the_oldest_of_the_busiest_address_is_cut(self) -> None:
        door = Door(strangers=4)
        quiet = self.enter(door, "192.0.2.1")
        first, second = self.enter(door, "192.0.2.66"), self.enter(door, "192.0.2.66")
        self.enter(door, "192.0.2.2")
        self.assertEqual(self.ended, [])
        self.enter(door, "192.0.2.3")
        self.assertIs(first.life, Life.LOST)
        self.assertEqual(
            self.ended,
            [("192.0.2.66", "4 connections have shown no certificate, 2 of them from 192.0.2.66: this was the oldest "
                            "of those")],
        )  # fmt: skip
        self.assertEqual((quiet.life, second.life, door.strangers), (Life.HANDSHAKE, Life.HANDSHAKE, 4))

    def test_an_address_that_floods_loses_only_its_own(self) -> None:
        door = Door(strangers=10)
        others = [self.enter(door, f"192.0.2.{number}") for number in range(5)]
        for _ in range(1000):
            self.enter(door, "198.51.100.1")
        self.assertEqual({link.life for link in others}, {Life.HANDSHAKE})
        self.assertEqual((door.strangers, len(self.ended)), (10, 995))
        self.assertEqual({host for host, _ in self.ended}, {"198.51.100.1"})

    def test_one_that_shows_its_certificate_is_no_stranger(self) -> None:
        door = Door(strangers=2, links=100)
        links = [self.enter(door, "192.0.2.2", RACK) for _ in range(50)]
        self.assertEqual({link.life for link in links}, {Life.READY})
        self.assertEqual(door.strangers, 0)

    def test_one_that_enrols_stays_a_stranger(self) -> None:
        door = Door(strangers=2)
        self.enter(door, "192.0.2.2", ANONYMOUS)
        self.assertEqual(door.strangers, 1)

    def test_a_rack_with_too_many_links_loses_the_oldest(self) -> None:
        door = Door(links=2)
        first, second = self.enter(door, "192.0.2.2", RACK), self.enter(door, "192.0.2.2", RACK)
        before = cuts("links")
        third = self.enter(door, "192.0.2.2", RACK)
        self.assertEqual(cuts("links"), before + 1)
        self.assertEqual((first.life, second.life, third.life), (Life.LOST, Life.READY, Life.READY))
        [reason] = self.errors()
        self.assertIn("rack abc234 at 192.0.2.2:40000 has more than 2 links", reason)

    def test_a_copy_of_the_certificate_does_not_cut_off_the_link_that_is_in_use(self) -> None:
        door = Door(links=2)
        mine = self.enter(door, "192.0.2.2", RACK)
        mine.agreed(1)
        copies = [self.enter(door, "192.0.2.66", RACK) for _ in range(20)]
        self.assertIs(mine.life, Life.READY)
        self.assertEqual([link.life for link in copies], [Life.LOST] * 19 + [Life.READY])

    def test_a_rack_that_does_not_register_is_cut_off(self) -> None:
        door = Door()
        idle, used = self.enter(door, "192.0.2.2", RACK), self.enter(door, "192.0.2.2", RACK)
        used.agreed(1)
        self.clock.advance(limits.REGISTER_SECONDS - 1)
        self.assertIs(idle.life, Life.READY)
        self.clock.advance(1)
        self.assertEqual((idle.life, used.life), (Life.LOST, Life.READY))
        [reason] = self.errors()
        self.assertEqual(reason, "it has not registered within 90 s")

    def test_nothing_is_kept_of_a_connection_that_ended(self) -> None:
        door = Door()
        for peer in (None, ANONYMOUS, RACK):
            self.enter(door, "192.0.2.2", peer).connectionLost()
        self.assertEqual((door.strangers, door._links, self.clock.getDelayedCalls()), (0, {}, []))

    def test_a_listener_has_a_door(self) -> None:
        reactor, door = MemoryReactorClock(), Door(strangers=3)
        tls = server_tls(REGION, AUTHORITY.certificate)
        factory = link_factory(lambda: Link(NOTHING, clock=reactor))
        listen_tls(reactor, 5250, "", tls, factory, door)
        [(_, guarded, *_)] = reactor.tcpServers
        self.assertIsInstance(guarded, Factory)
        for port in range(3):
            guarded.buildProtocol(IPv4Address("TCP", "192.0.2.1", port))
        self.assertEqual(door.strangers, 3)
