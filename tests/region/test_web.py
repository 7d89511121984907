"""The region's HTTP server: its front door, and how it ends."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransportWithDisconnection
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET

from region.web import RegionSite, tree


class Slow(Resource):
    """Answers when the test says."""

    isLeaf = True

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Any] = []

    def render_GET(self, request: Any) -> int:
        self.requests.append(request)
        return NOT_DONE_YET


class SiteTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.slow = Slow()
        self.site = RegionSite(tree(self.slow, Resource(), Resource()), self.clock)
        self.site.startFactory()
        self.addCleanup(self.site.stopFactory)

    def ask(self, path: str, method: str = "GET") -> StringTransportWithDisconnection:
        transport = StringTransportWithDisconnection()
        channel: Any = self.site.buildProtocol(None)
        transport.protocol = channel
        channel.makeConnection(transport)
        channel.dataReceived(f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        self.addCleanup(transport.loseConnection)
        return transport

    def test_the_front_door_says_where_to_go(self) -> None:
        for path in ("/", "/MAAS/", "/MAAS/api/"):
            answer = self.ask(path).value().decode()
            self.assertIn(" 200 ", answer.splitlines()[0])
            self.assertIn("text/plain", answer)
            self.assertIn("/MAAS/api/2.0/", answer)

    def test_what_is_not_there_is_said_in_plain_text_whatever_the_method(self) -> None:
        for method in ("GET", "POST", "DELETE"):
            answer = self.ask("/elsewhere/<b>", method).value().decode()
            self.assertIn(" 404 ", answer.splitlines()[0])
            self.assertIn("text/plain", answer)
            self.assertIn("There is nothing at /elsewhere/", answer)

    def test_stopping_waits_for_what_was_asked(self) -> None:
        transport = self.ask("/MAAS/api/2.0/x")
        draining = Deferred.fromCoroutine(self.site.drain(self.clock, 2.0))
        self.assertNoResult(draining)
        self.slow.requests[0].write(b"answer")
        self.slow.requests[0].finish()
        self.successResultOf(draining)
        self.assertIn(b"answer", transport.value())
        self.assertEqual([call for call in self.clock.getDelayedCalls() if call.getTime() == 2.0], [])

    def test_stopping_does_not_wait_for_ever(self) -> None:
        self.ask("/MAAS/api/2.0/x")
        draining = Deferred.fromCoroutine(self.site.drain(self.clock, 2.0))
        self.clock.advance(2.0)
        self.successResultOf(draining)

    def test_stopping_when_nobody_asked_takes_no_time(self) -> None:
        self.successResultOf(Deferred.fromCoroutine(self.site.drain(self.clock, 2.0)))
        self.ask("/")
        self.successResultOf(Deferred.fromCoroutine(self.site.drain(self.clock, 2.0)))
