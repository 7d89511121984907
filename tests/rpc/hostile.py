"""How does a client fare with servers that misbehave? A scripted HTTP server and proxy, on loopback or in memory.

A script is a list of behaviours for a path, one per request, the last one for ever. Behaviours are made by the
functions below (``serve``, ``cut``, ``stall`` …). ``HostileServer`` speaks over any transport: ``listen`` puts it on a
loopback port, and :class:`MemoryNetwork` joins it to clients without sockets, threads or time.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from attrs import define, frozen
from twisted.internet import reactor as _reactor
from twisted.internet.address import IPv4Address
from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.endpoints import TCP4ClientEndpoint
from twisted.internet.error import ConnectionDone, ConnectionLost, ConnectionRefusedError, DNSLookupError
from twisted.internet.error import TimeoutError as ConnectTimeout
from twisted.internet.interfaces import IHostnameResolver, IHostResolution, IReactorPluggableNameResolver
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.internet.testing import MemoryReactorClock
from twisted.python.failure import Failure
from twisted.test import iosim
from zope.interface import implementer

Behaviour = Callable[["Exchange"], object]
reactor: Any = _reactor


@frozen
class Seen:
    """A request that arrived; header names are in lower case."""

    method: str
    target: str
    headers: dict[str, str]

    @property
    def range(self) -> str:
        """The ``Range`` header, or nothing."""
        return self.headers.get("range", "")


@define
class Exchange:
    """One request and the means to misbehave at it."""

    seen: Seen
    transport: Any
    clock: Any
    server: HostileServer

    def head(self, status: str, **headers: object) -> None:
        """Send a status line (``"200 OK"``) and headers; underscores in names become hyphens."""
        lines = [f"HTTP/1.1 {status}", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
        self.transport.write(("\r\n".join(lines) + "\r\n\r\n").encode())

    def start(self, body: bytes, *, ranges: bool = True) -> bytes:
        """Send the right head for ``body`` and give the bytes that belong after it: honours ``Range: bytes=N-``."""
        found = re.fullmatch(r"bytes=(\d+)-", self.seen.range) if ranges else None
        first = int(found[1]) if found else 0
        if found and first >= len(body):
            self.head("416 Range Not Satisfiable", Content_Length=0, Content_Range=f"bytes */{len(body)}")
            return b""
        if found:
            self.head("206 Partial Content", Content_Length=len(body) - first,
                      Content_Range=f"bytes {first}-{len(body) - 1}/{len(body)}")  # fmt: skip
            return body[first:]
        self.head("200 OK", Content_Length=len(body))
        return body


def serve(body: bytes, *, ranges: bool = True) -> Behaviour:
    """Behave."""
    return lambda exchange: exchange.transport.write(exchange.start(body, ranges=ranges))


def cut(body: bytes, after: int, *, ranges: bool = True) -> Behaviour:
    """Promise all, send ``after`` bytes, close."""

    def behave(exchange: Exchange) -> None:
        exchange.transport.write(exchange.start(body, ranges=ranges)[:after])
        exchange.transport.loseConnection()

    return behave


def reset(body: bytes, after: int) -> Behaviour:
    """Promise all, send ``after`` bytes, and reset the connection once they are out."""

    def behave(exchange: Exchange) -> None:
        exchange.transport.write(exchange.start(body)[:after])
        exchange.clock.callLater(0.05, exchange.transport.abortConnection)

    return behave


def stall(body: bytes, after: int) -> Behaviour:
    """Promise all, send ``after`` bytes, and then nothing."""
    return lambda exchange: exchange.transport.write(exchange.start(body)[:after])


def silence(exchange: Exchange) -> None:
    """Never answer."""


def drip(body: bytes, every: float, size: int = 1) -> Behaviour:
    """Send ``size`` bytes every ``every`` seconds: never idle, never done."""

    def behave(exchange: Exchange) -> None:
        rest = exchange.start(body)

        def step(at: int) -> None:
            if at < len(rest) and not exchange.transport.disconnecting:
                exchange.transport.write(rest[at : at + size])
                exchange.clock.callLater(every, step, at + size)

        step(0)

    return behave


def endless(exchange: Exchange) -> None:
    """Send a body that has no length and no end."""
    exchange.head("200 OK", Connection="close")
    exchange.transport.registerProducer(_Flood(exchange.transport), False)


def page(status: str, body: bytes = b"<html>sorry</html>", **headers: object) -> Behaviour:
    """Answer with a page that is not what was asked for; the status may well be ``200 OK``."""

    def behave(exchange: Exchange) -> None:
        exchange.head(status, Content_Length=len(body), **headers)
        exchange.transport.write(body)

    return behave


def redirect(to: str, status: str = "302 Found") -> Behaviour:
    """Send elsewhere."""
    return page(status, b"elsewhere", Location=to)


def partial(body: bytes, content_range: str, status: str = "206 Partial Content") -> Behaviour:
    """Answer with this body and this Content-Range, whatever was asked for."""
    return page(status, body, Content_Range=content_range)


def unmeasured(body: bytes, *, chunked: bool = False) -> Behaviour:
    """Send a body without a Content-Length: until the end of the connection, or in chunks."""

    def behave(exchange: Exchange) -> None:
        if chunked:
            exchange.head("200 OK", Transfer_Encoding="chunked")
            for at in range(0, len(body), 1000):
                piece = body[at : at + 1000]
                exchange.transport.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            exchange.transport.write(b"0\r\n\r\n")
        else:
            exchange.head("200 OK", Connection="close")
            exchange.transport.write(body)
            exchange.transport.loseConnection()

    return behave


def raw(data: bytes, *, close: bool = True) -> Behaviour:
    """Send bytes that need not be HTTP."""

    def behave(exchange: Exchange) -> None:
        exchange.transport.write(data)
        if close:
            exchange.transport.loseConnection()

    return behave


def hang_up(exchange: Exchange) -> None:
    """Close without an answer."""
    exchange.transport.loseConnection()


class _Flood:
    def __init__(self, transport: Any) -> None:
        self.transport = transport

    def resumeProducing(self) -> None:
        if self.transport.disconnecting:
            self.transport.unregisterProducer()
        else:
            self.transport.write(b"\0" * 4096)

    def stopProducing(self) -> None:
        self.transport.unregisterProducer()


class HostileServer(Factory):
    """A factory for connections that follow the script.

    ``requests`` are those that arrived, in order; ``connections`` counts connections, ``open`` are those still open.
    """

    noisy = False

    def __init__(self, clock: Any = reactor) -> None:
        self.clock = clock
        self.requests: list[Seen] = []
        self.connections = 0
        self.open: list[_Connection] = []
        self._scripts: dict[str, list[Behaviour]] = {}
        self._port: Any = None

    def script(self, path: str, *behaviours: Behaviour) -> str:
        """Say how requests for ``path`` go, one after the other, and give its URL (once it listens)."""
        self._scripts[path] = list(behaviours)
        return f"{self.url}{path}"

    @property
    def url(self) -> str:
        """``http://127.0.0.1:port`` of a listening server; in memory, of the place where it is put by default."""
        return f"http://127.0.0.1:{self.port}"

    def asked(self, path: str) -> list[Seen]:
        """The requests for a path."""
        return [seen for seen in self.requests if seen.target == path]

    def listen(self) -> HostileServer:
        """Listen on a free port of the loopback interface."""
        self._port = reactor.listenTCP(0, self, interface="127.0.0.1")
        return self

    async def stop(self) -> None:
        """Stop listening, drop all connections and wait until they are gone."""
        await maybeDeferred(self._port.stopListening)
        for connection in list(self.open):
            transport: Any = connection.transport
            transport.abortConnection()
        await self.all_gone()

    async def all_gone(self) -> None:
        """Wait until no connection is open any more."""
        for connection in list(self.open):
            await connection.gone

    @property
    def port(self) -> int:
        """The port of a listening server; in memory, where it is put by default."""
        return int(self._port.getHost().port) if self._port else 80

    def buildProtocol(self, addr: object) -> Protocol:
        self.connections += 1
        return _Connection(self)

    def respond(self, seen: Seen, transport: Any) -> None:
        """Do what the script says."""
        self.requests.append(seen)
        script = self._scripts.get(seen.target)
        behaviour = page("404 Not Found", b"no such file") if not script else script[0]
        if script and len(script) > 1:
            script.pop(0)
        behaviour(Exchange(seen, transport, self.clock, self))


class _Connection(Protocol):
    def __init__(self, server: HostileServer) -> None:
        self.server = server
        self.buffer = b""
        self.gone: Deferred[None] = Deferred()

    def connectionMade(self) -> None:
        self.server.open.append(self)

    def dataReceived(self, data: bytes) -> None:
        self.buffer += data
        while b"\r\n\r\n" in self.buffer:
            head, _, self.buffer = self.buffer.partition(b"\r\n\r\n")
            self.server.respond(parse_head(head), self.transport)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.server.open.remove(self)
        self.gone.callback(None)


def parse_head(head: bytes) -> Seen:
    """A request's head without its empty line."""
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _version = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Seen(method, target, headers)


class LittleProxy(Factory):
    """An HTTP proxy: CONNECT makes tunnels, other requests with a whole URL are sent on, one per connection.

    :param answer: if given, what CONNECT is answered with in place of a tunnel.
    """

    noisy = False

    def __init__(self, clock: Any = reactor, answer: bytes | None = None) -> None:
        self.clock = clock
        self.answer = answer
        self.requests: list[Seen] = []

    def buildProtocol(self, addr: object) -> Protocol:
        return _Proxying(self)


class _Proxying(Protocol):
    def __init__(self, proxy: LittleProxy) -> None:
        self.proxy = proxy
        self.buffer = b""
        self.onward: Any = None

    def dataReceived(self, data: bytes) -> None:
        self.buffer += data
        if self.onward is not None:
            self.onward.transport.write(self.buffer)
            self.buffer = b""
        elif b"\r\n\r\n" in self.buffer:
            head, _, self.buffer = self.buffer.partition(b"\r\n\r\n")
            seen = parse_head(head)
            self.proxy.requests.append(seen)
            self._connect(seen)

    def _connect(self, seen: Seen) -> None:
        assert self.transport is not None
        if seen.method == "CONNECT":
            if self.proxy.answer is not None:
                self.transport.write(self.proxy.answer)
                return
            host, _, port = seen.target.rpartition(":")
            first = b""
        else:
            parts = urlsplit(seen.target)
            host, port = str(parts.hostname), str(parts.port or 80)
            fields = "".join(f"{name}: {value}\r\n" for name, value in seen.headers.items() if "proxy" not in name)
            first = f"{seen.method} {parts.path} HTTP/1.1\r\n{fields}\r\n".encode()
        endpoint = TCP4ClientEndpoint(self.proxy.clock, host, int(port))
        connected = endpoint.connect(Factory.forProtocol(lambda: _Onward(self)))
        connected.addCallbacks(self._connected, self._failed, callbackArgs=(seen, first))

    def _connected(self, onward: Any, seen: Seen, first: bytes) -> None:
        assert self.transport is not None
        self.onward = onward
        if seen.method == "CONNECT":
            self.transport.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        onward.transport.write(first + self.buffer)
        self.buffer = b""

    def _failed(self, failure: Failure) -> None:
        assert self.transport is not None
        self.transport.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if self.onward is not None:
            self.onward.transport.loseConnection()


class _Onward(Protocol):
    def __init__(self, back: _Proxying) -> None:
        self.back = back

    def dataReceived(self, data: bytes) -> None:
        assert self.back.transport is not None
        self.back.transport.write(data)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        assert self.back.transport is not None
        self.back.transport.loseConnection()


@implementer(IReactorPluggableNameResolver, IHostnameResolver)
class MemoryNetwork(MemoryReactorClock):
    """A reactor whose TCP connections lead, in memory, to the factories that were put at addresses.

    Every name resolves to itself, except those in ``unknown_names``; time is the clock's.
    """

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[tuple[str, int], Factory] = {}
        self._wires: list[_Wire] = []
        self.unknown_names: set[str] = set()
        self.nameResolver = self
        self.hanging = False  # whether connections are never made

    def put(self, factory: Factory, host: str = "127.0.0.1", port: int = 80) -> None:
        """Let a factory answer at an address."""
        self._places[host, port] = factory

    def connectTCP(self, host: Any, port: Any, factory: Any, timeout: Any = 30, bindAddress: Any = None) -> Any:
        connector = super().connectTCP(host, port, factory, timeout, bindAddress)
        if self.hanging:
            self.callLater(timeout, factory.clientConnectionFailed, connector, Failure(ConnectTimeout()))
            return connector
        place = self._places.get((host, port))
        if place is None:
            factory.clientConnectionFailed(connector, Failure(ConnectionRefusedError("nobody is there")))
            return connector
        address = IPv4Address("TCP", host, port)
        client = factory.buildProtocol(address)
        server: Any = place.buildProtocol(address)
        self._wires.append(_Wire(server=_End(server, isServer=True), client=_End(client, isServer=False)))
        return connector

    def resolveHostName(
        self, resolutionReceiver: Any, hostName: Any, portNumber: int = 0, *rest: Any, **more: Any
    ) -> IHostResolution:
        """See IHostnameResolver."""

        @implementer(IHostResolution)
        class Resolution:
            name = hostName

            def cancel(self) -> None:
                """Nothing is under way."""

        resolution = Resolution()
        resolutionReceiver.resolutionBegan(resolution)
        if hostName not in self.unknown_names:
            resolutionReceiver.addressResolved(IPv4Address("TCP", hostName, portNumber))
        resolutionReceiver.resolutionComplete()
        return resolution

    def installNameResolver(self, resolver: Any) -> Any:
        """See IReactorPluggableNameResolver."""
        raise DNSLookupError("names resolve to themselves here")

    def spin(self) -> None:
        """Let everything happen that can happen without time going by."""
        moved = True
        while moved:
            self.advance(0)
            moved = sum(wire.flush() for wire in list(self._wires)) > 0  # all of them, so no any()

    def pass_time(self, seconds: float, step: float = 1.0) -> None:
        """Let time go by in steps of at most ``step`` seconds, with everything that happens in it."""
        self.spin()
        while seconds > 0:
            self.advance(min(step, seconds))
            seconds -= step
            self.spin()


class _End(iosim.FakeTransport):
    """One end of a connection in memory. Unlike iosim's, it can be paused, and an end that was closed reads no more."""

    def __init__(self, protocol: Any, *, isServer: bool) -> None:
        super().__init__(protocol, isServer=isServer)
        self.paused = False
        self.aborted = False
        self.lost = False
        self.reason: Exception | None = None  # why the other end closed, once it did
        protocol.makeConnection(self)

    def pauseProducing(self) -> None:
        self.paused = True

    def resumeProducing(self) -> None:
        self.paused = False

    def abortConnection(self) -> None:
        self.aborted = self.disconnecting = True
        self.stream = []

    def pump(self, other: _End) -> bool:
        """Bring what this end wrote to the other, and the news of its being closed; gives whether anything moved."""
        if not self.stream and not self.disconnecting:
            self._checkProducer()
        if other.disconnecting:
            self.stream = []
        if self.stream and not other.paused:
            other.protocol.dataReceived(self.getOutBuffer())
            return True
        if self.disconnecting and not self.stream and not self.lost:
            self.lost = True
            other.reason = ConnectionLost("reset") if self.aborted else ConnectionDone()
            self.protocol.connectionLost(Failure(ConnectionDone()))
            return True
        if other.reason is not None and self.reason is None and other.lost is False:
            return self._hear(other)
        return False

    def _hear(self, other: _End) -> bool:
        """The other end hears that this one was closed."""
        if other.paused:
            return False
        other.lost = other.disconnecting = True
        other.protocol.connectionLost(Failure(other.reason or ConnectionDone()))
        return True


@frozen
class _Wire:
    client: _End
    server: _End

    def flush(self) -> bool:
        """Move what can be moved, both ways, once; gives whether there was anything."""
        return any([self.server.pump(self.client), self.client.pump(self.server)])
