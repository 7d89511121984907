"""How does a connection to a server come about: straight, through a proxy, or through a proxy's tunnel?

http goes to a proxy as a request with the whole URL; https through a tunnel made with CONNECT (RFC 9110, 9.3.6), inside
which the server is verified as without a proxy. Each connection is guarded: the head of an answer is bounded, and
giving up a TLS connection ends it at once, whatever the server does.
"""

from __future__ import annotations

import base64
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from attrs import define, frozen
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import HostnameEndpoint
from twisted.internet.interfaces import (
    IDelayedCall,
    IOpenSSLClientConnectionCreator,
    IProtocol,
    IProtocolFactory,
    IReactorTime,
    ISSLTransport,
    IStreamClientEndpoint,
    ITCPTransport,
)
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.protocols.policies import ProtocolWrapper, WrappingFactory
from twisted.protocols.tls import TLSMemoryBIOFactory
from twisted.python.failure import Failure
from twisted.web.client import URI, Agent, BrowserLikePolicyForHTTPS, HTTPConnectionPool, ProxyAgent
from twisted.web.http_headers import Headers
from twisted.web.iweb import IAgent, IAgentEndpointFactory, IPolicyForHTTPS, IResponse
from zope.interface import implementer

MAX_HEAD: Final = 1 << 18
"""Bytes that the head of an answer may have."""
MAX_TUNNEL_HEAD: Final = 1 << 14
RECEIVE: Final = 1 << 18
"""Bytes that one read of a socket may bring; Twisted's default of 64 KiB costs a fast transfer much of its speed."""

_ProtocolWrapper: Any = ProtocolWrapper
_WrappingFactory: Any = WrappingFactory


class HeadTooLong(Exception):
    """The head of an answer has no end within :data:`MAX_HEAD` bytes."""


class ProxyRefused(Exception):
    """The proxy did not make the tunnel; the text says what it answered."""

    def __init__(self, text: str, *, retriable: bool) -> None:
        super().__init__(text)
        self.retriable = retriable


@frozen
class ProxyAddress:
    """Where a proxy is, and what to show it (the value of ``Proxy-Authorization``, or nothing)."""

    host: str
    port: int
    authorization: bytes

    @classmethod
    def parse(cls, url: str) -> ProxyAddress:
        """From ``http://[user:password@]host[:port]``; the port is 3128 if none is given.

        :raises ValueError: for anything else; its text never shows the password.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as problem:
            raise ValueError(f"the proxy's URL is not right: {problem}") from None
        if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/") or parts.query:
            raise ValueError("the proxy must be given as http://host:port or http://user:password@host:port")
        authorization = b""
        if parts.username is not None:
            authorization = basic(unquote(parts.username), unquote(parts.password or "")).encode()
        return cls(parts.hostname, 3128 if port is None else port, authorization)


def basic(user: str, password: str) -> str:
    """The value of an ``Authorization`` or ``Proxy-Authorization`` header (RFC 7617)."""
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def make_agent(
    reactor: Any, pool: HTTPConnectionPool, proxy: str, connect_timeout: float, tls_policy: IPolicyForHTTPS | None
) -> IAgent:
    """An agent that connects with guarded connections, through the proxy if one is given."""
    address = ProxyAddress.parse(proxy) if proxy else None
    endpoints = _Endpoints(reactor, connect_timeout, tls_policy or BrowserLikePolicyForHTTPS(), address)
    direct: IAgent = Agent.usingEndpointFactory(reactor, endpoints, pool)
    if address is None:
        return direct
    endpoint = _Guarded(reactor, HostnameEndpoint(reactor, address.host, address.port, timeout=connect_timeout))
    return _ProxiedAgent(direct, ProxyAgent(endpoint, reactor, pool), address.authorization)


@implementer(IAgent)
@frozen
class _ProxiedAgent:
    """http by asking the proxy, anything else by the agent that makes tunnels."""

    tunnelling: IAgent
    asking: IAgent
    authorization: bytes

    def request(
        self, method: bytes, uri: bytes, headers: Headers | None = None, bodyProducer: Any = None
    ) -> Deferred[IResponse]:
        """See IAgent."""
        if not uri.lower().startswith(b"http:"):
            return self.tunnelling.request(method, uri, headers, bodyProducer)
        headers = Headers() if headers is None else headers.copy()
        if self.authorization:
            headers.setRawHeaders(b"Proxy-Authorization", [self.authorization])
        return self.asking.request(method, uri, headers, bodyProducer)


@implementer(IAgentEndpointFactory)
@frozen
class _Endpoints:
    """Guarded endpoints for the Agent, with TLS and tunnel where the URL and the setting ask for them."""

    reactor: Any
    connect_timeout: float
    tls_policy: IPolicyForHTTPS
    proxy: ProxyAddress | None

    def endpointForURI(self, uri: URI) -> IStreamClientEndpoint:
        """See IAgentEndpointFactory."""
        host = uri.host.decode("ascii")
        endpoint: IStreamClientEndpoint
        if self.proxy is not None:
            to_proxy = HostnameEndpoint(self.reactor, self.proxy.host, self.proxy.port, timeout=self.connect_timeout)
            target = f"[{host}]:{uri.port}" if ":" in host else f"{host}:{uri.port}"
            endpoint = TunnelEndpoint(self.reactor, to_proxy, target, self.proxy.authorization, self.connect_timeout)
        else:
            endpoint = HostnameEndpoint(self.reactor, host, uri.port, timeout=self.connect_timeout)
        tls = self.tls_policy.creatorForNetloc(uri.host, uri.port) if uri.scheme == b"https" else None
        return _Guarded(self.reactor, endpoint, tls)


@implementer(IStreamClientEndpoint)
@frozen
class _Guarded:
    """An endpoint whose connections are guarded by :class:`_Guard`, and speak TLS if ``tls`` is given."""

    reactor: Any
    endpoint: IStreamClientEndpoint
    tls: IOpenSSLClientConnectionCreator | None = None

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[IProtocol]:
        """See IStreamClientEndpoint."""
        factory: Any = _GuardFactory(protocolFactory)
        if self.tls is None:
            return self._connect(factory).addCallback(_inner_of)
        # As wrapClientTLS, which has no way to say which clock counts.
        factory = TLSMemoryBIOFactory(self.tls, True, factory, self.reactor)
        return self._connect(factory).addCallback(lambda secured: _inner_of(_inner_of(secured)))

    def _connect(self, factory: Any) -> Deferred[Any]:
        return self.endpoint.connect(factory)


def _inner_of(wrapper: Any) -> IProtocol:
    inner: IProtocol = wrapper.wrappedProtocol
    return inner


def _opened(tunnel: _Tunnel) -> Deferred[IProtocol]:
    return tunnel.opened


class _Guard(_ProtocolWrapper):  # type: ignore[misc]  # Twisted gives it no types
    """Bounds the head of each answer, and makes giving up a TLS connection final."""

    _head = MAX_HEAD
    _tail = b""
    _refused = False

    def makeConnection(self, transport: Any) -> None:
        if hasattr(transport, "bufferSize"):
            transport.bufferSize = RECEIVE
        super().makeConnection(transport)

    def write(self, data: bytes) -> None:
        self._expect()
        super().write(data)

    def writeSequence(self, data: Any) -> None:
        self._expect()
        super().writeSequence(data)

    def _expect(self) -> None:
        """A request goes out: an answer's head will come."""
        self._head = MAX_HEAD
        self._tail = b""

    def dataReceived(self, data: bytes) -> None:
        if self._refused:
            return
        if self._head > 0:
            seen = self._tail + data[:MAX_HEAD]
            if b"\r\n\r\n" in seen or b"\n\n" in seen:
                self._head = 0
            else:
                self._head -= len(data)
                self._tail = seen[-3:]
                if self._head <= 0:
                    self.connectionLost(Failure(HeadTooLong(f"the head of the answer is over {MAX_HEAD} bytes long")))
                    self._refused = True
                    self.loseConnection()
                    return
        super().dataReceived(data)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if not self._refused:
            super().connectionLost(reason)

    def loseConnection(self) -> None:
        # In TLS an orderly end needs the server's consent, and until then we would go on reading what it sends.
        if ISSLTransport.providedBy(self.transport):
            self.disconnecting = 1
            self.abortConnection()
        else:
            super().loseConnection()


class _GuardFactory(_WrappingFactory):  # type: ignore[misc]  # Twisted gives it no types
    protocol = _Guard
    noisy = False

    def registerProtocol(self, p: _Guard) -> None:
        """The factory lives as long as its one connection; nobody asks which it has."""

    def unregisterProtocol(self, p: _Guard) -> None:
        """See :meth:`registerProtocol`."""


@implementer(IStreamClientEndpoint)
@define
class TunnelEndpoint:
    """Connects to ``target`` (``host:port``) through the HTTP proxy at ``endpoint``, by CONNECT.

    Fails with :exc:`ProxyRefused` if the proxy says no, says something else than HTTP, or says nothing for ``timeout``
    seconds.
    """

    clock: IReactorTime
    endpoint: IStreamClientEndpoint
    target: str
    authorization: bytes = b""
    timeout: float = 10.0

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[IProtocol]:
        """See IStreamClientEndpoint."""
        factory = Factory.forProtocol(lambda: _Tunnel(self, protocolFactory))
        factory.noisy = False
        connected: Deferred[Any] = self.endpoint.connect(factory)
        return connected.addCallback(_opened)


class _Tunnel(Protocol):
    """Asks for the tunnel; once it stands, everything is the inner protocol's."""

    def __init__(self, endpoint: TunnelEndpoint, inner: IProtocolFactory) -> None:
        self.opened: Deferred[IProtocol] = Deferred(lambda _opened: self._abort())
        self._endpoint = endpoint
        self._factory = inner
        self._inner: IProtocol | None = None
        self._answer = b""
        self._timer: IDelayedCall | None = None

    def connectionMade(self) -> None:
        assert self.transport is not None
        target = self._endpoint.target.encode("ascii")
        lines = [b"CONNECT %s HTTP/1.1" % target, b"Host: %s" % target]
        if self._endpoint.authorization:
            lines.append(b"Proxy-Authorization: %s" % self._endpoint.authorization)
        self.transport.write(b"\r\n".join(lines) + b"\r\n\r\n")
        seconds = self._endpoint.timeout
        self._timer = self._endpoint.clock.callLater(
            seconds, self._refuse, f"the proxy did not answer within {seconds:g} seconds", retriable=True
        )

    def dataReceived(self, data: bytes) -> None:
        if self._inner is not None:
            self._inner.dataReceived(data)
            return
        if self.opened.called:
            return
        self._answer += data
        head, end, rest = self._answer.partition(b"\r\n\r\n")
        if not end:
            if len(self._answer) > MAX_TUNNEL_HEAD:
                self._refuse(f"the proxy's answer has no end in {MAX_TUNNEL_HEAD} bytes", retriable=False)
            return
        line = head.partition(b"\r\n")[0]
        words = line.split(b" ", 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
            self._refuse(f"the proxy answered {line[:80]!r}, which is not HTTP", retriable=False)
        elif not words[1].startswith(b"2"):
            status = b" ".join(words[1:]).decode("utf-8", "replace")[:80]
            self._refuse(
                f"the proxy refused a tunnel to {self._endpoint.target}: {status}", retriable=words[1][:1] == b"5"
            )
        else:
            self._open(rest)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._stop_timer()
        if self._inner is not None:
            self._inner.connectionLost(reason)
        elif not self.opened.called:
            self.opened.errback(ProxyRefused("the proxy closed the connection without an answer", retriable=True))

    def _open(self, rest: bytes) -> None:
        assert self.transport is not None
        self._stop_timer()
        inner = self._factory.buildProtocol(self.transport.getPeer())
        if inner is None:
            self._refuse("the connection is not wanted any more", retriable=False)
            return
        self._inner = inner
        inner.makeConnection(self.transport)
        if rest:
            inner.dataReceived(rest)
        self.opened.callback(inner)

    def _refuse(self, text: str, *, retriable: bool) -> None:
        self._abort()
        if not self.opened.called:
            self.opened.errback(ProxyRefused(text, retriable=retriable))

    def _abort(self) -> None:
        self._stop_timer()
        if self.transport is not None:
            transport: ITCPTransport = self.transport  # type: ignore[assignment]  # what a stream endpoint connects with
            transport.abortConnection()

    def _stop_timer(self) -> None:
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        self._timer = None
