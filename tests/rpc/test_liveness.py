"""A link whose packets go nowhere is found dead by both ends in time, whichever way they are lost."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet import reactor as installed
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.test.iosim import FakeTransport
from twisted.trial.unittest import SynchronousTestCase

from rpc.commands import ListImages, SyncImages
from rpc.endpoints import listen_tls
from rpc.identity import client_tls, server_tls
from rpc.outcomes import NotConnected
from rpc.protocol import Link, Responders, link_factory
from rpc.testing import RACK, REGION, RecordingReporter
from tests.rpc.test_tls import AUTHORITY, TlsTestCase
from tests.rpc.test_tls import RACK as RACK_CREDENTIALS
from tests.rpc.test_tls import REGION as REGION_CREDENTIALS

FOUND_SECONDS = 15.0
STEP = 0.25

reactor: Any = installed


class Wire:
    """A link whose two directions can be cut, each on its own, with nobody being told."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.reports = RecordingReporter()

        async def never(link: Link, **arguments: Any) -> dict[str, Any]:
            await Deferred()
            return {}

        self.region = Link(Responders("region", {}), clock=self.clock, peer=RACK, reporter=self.reports)
        self.rack = Link(
            Responders("rack", {SyncImages: never}), clock=self.clock, peer=REGION, reporter=RecordingReporter()
        )
        self.lost: dict[str, float] = {}
        for link, is_server in ((self.region, True), (self.rack, False)):
            link.makeConnection(FakeTransport(link, is_server))
            link.on_lost(lambda link, reason: self.lost.setdefault(link.responders.role, self.clock.seconds()))
        self.cut: set[Link] = set()

    def run(self, seconds: float) -> None:
        end = self.clock.seconds() + seconds
        while self.clock.seconds() < end:
            for _ in range(3):
                self._carry(self.region, self.rack)
                self._carry(self.rack, self.region)
            self.clock.advance(STEP)
            for link in (self.region, self.rack):
                transport: Any = link.transport
                if transport is not None and transport.disconnecting:
                    link.connectionLost()

    def _carry(self, sender: Link, receiver: Link) -> None:
        transport: Any = sender.transport
        if transport is None:
            return
        data = transport.getOutBuffer()
        if data and sender not in self.cut and receiver.transport is not None:
            receiver.dataReceived(data)


class HalfOpenTests(SynchronousTestCase):
    @settings(deadline=None, max_examples=100)
    @given(st.integers(0, 200), st.sampled_from([("region",), ("rack",), ("region", "rack")]))
    def test_both_ends_find_a_silent_link_in_time(self, steps: int, silent: tuple[str, ...]) -> None:
        wire = Wire()
        wire.run(steps * STEP)
        self.assertEqual(wire.lost, {})
        begun = wire.clock.seconds()
        wire.cut = {wire.region if name == "region" else wire.rack for name in silent}
        wire.run(FOUND_SECONDS)
        self.assertEqual(set(wire.lost), {"region", "rack"})
        self.assertLess(max(wire.lost.values()) - begun, FOUND_SECONDS)

    def test_a_call_that_may_take_hours_ends_when_the_link_is_found_dead(self) -> None:
        wire = Wire()
        syncing = Deferred.fromCoroutine(wire.region.ask(SyncImages, generation=1, digest="", url=""))
        wire.run(3600)
        self.assertNoResult(syncing)
        wire.cut = {wire.rack}
        wire.run(FOUND_SECONDS)
        self.assertIsInstance(self.successResultOf(syncing), NotConnected)
        self.assertEqual(sorted(wire.reports.kinds), ["CallTimedOut", "LinkLost"])


class WriteBlockedTests(TlsTestCase):
    async def test_a_peer_that_reads_nothing_is_cut_off_although_much_waits_for_it(self) -> None:
        # What waits to be written must not keep the connection from being ended.
        self.region_links = []
        reports = RecordingReporter()

        def make() -> Link:
            link = Link(Responders("region", {}), clock=reactor, interval=0.2, patience=0.2, reporter=reports)
            self.region_links.append(link)
            return link

        tls = server_tls(REGION_CREDENTIALS, AUTHORITY.certificate)
        listening: Any = listen_tls(reactor, 0, "127.0.0.1", tls, link_factory(make))
        self.addCleanup(listening.stopListening)
        self.port = listening.getHost().port
        rack = await self.connect(client_tls(RACK_CREDENTIALS, AUTHORITY.certificate))
        transport: Any = rack.transport
        transport.pauseProducing()
        [region] = self.region_links
        lost: Deferred[str] = Deferred()
        region.on_lost(lambda _, reason: lost.callback(reason))
        waiting = [Deferred.fromCoroutine(region.ask(ListImages, known_digest="x" * 60000)) for _ in range(100)]
        self.assertEqual(await lost, "no answer to a ping within 0.2 s")
        for each in waiting:
            self.assertIsInstance(await each, NotConnected)
        self.assertEqual(sorted(set(reports.kinds)), ["CallTimedOut", "LinkLost"])
