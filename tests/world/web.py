"""HTTP between the parts of a world: an agent whose connections are wires in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import define
from twisted.internet.address import IPv4Address
from twisted.internet.defer import Deferred, fail
from twisted.internet.error import ConnectionRefusedError
from twisted.test.iosim import FakeTransport, connect
from twisted.web._newclient import HTTP11ClientProtocol
from twisted.web._newclient import Request as ClientRequest
from twisted.web.client import URI
from twisted.web.http_headers import Headers
from twisted.web.iweb import IAgent, IBodyProducer, IResponse
from twisted.web.server import Site
from zope.interface import implementer

from tests.world.turns import Turns, Wire


@implementer(IAgent)
@define(eq=False)
class MemoryAgent:
    """Asks whatever site is up right now; each request has a connection of its own."""

    turns: Turns
    owner: str
    site: Callable[[], Site | None]

    def request(
        self, method: bytes, uri: bytes, headers: Headers | None = None, bodyProducer: IBodyProducer | None = None
    ) -> Deferred[IResponse]:
        """As IAgent."""
        site = self.site()
        if site is None:
            return fail(ConnectionRefusedError())
        parsed = URI.fromBytes(uri)
        sent = headers.copy() if headers is not None else Headers()
        sent.setRawHeaders(b"Host", [parsed.netloc])
        client = HTTP11ClientProtocol()
        address = IPv4Address("TCP", "192.0.2.9", 40001)
        server: Any = site.buildProtocol(address)
        server_end = FakeTransport(server, isServer=True, peerAddress=address)
        pump = connect(server, server_end, client, FakeTransport(client, isServer=False), greet=False, clock=self.turns)
        self.turns.lanes.append(Wire(self.owner, pump))
        asked: Deferred[IResponse] = client.request(
            ClientRequest._construct(method, parsed.originForm, sent, bodyProducer, False, parsed)
        )
        return asked
