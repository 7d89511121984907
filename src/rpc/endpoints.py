"""Where links begin: the region listens, a rack enrols once, and from then on connects, and connects again.

A link that a rack makes counts as up only once the peer is verified and the rack has registered: until then, a failure
of any kind is one failed attempt, is logged with its reason, and the next attempt waits longer.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any, Final

from attrs import frozen
from twisted.application.internet import ClientService
from twisted.application.service import Service
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.endpoints import HostnameEndpoint, wrapClientTLS
from twisted.internet.interfaces import (
    IListeningPort,
    IProtocol,
    IProtocolFactory,
    IStreamClientEndpoint,
)
from twisted.internet.protocol import Factory, Protocol
from twisted.logger import Logger
from twisted.protocols.tls import TLSMemoryBIOFactory
from twisted.python.failure import Failure
from zope.interface import implementer

from rpc.certificates import CertificateInvalid, Credentials, check_issued, make_request, new_key
from rpc.commands import Enroll
from rpc.failures import LinkLost
from rpc.identity import TLS, JoinToken, enrolling_tls, prove, same_authority
from rpc.limits import Door
from rpc.patience import Patience, refused_delay
from rpc.protocol import Life, Link, Responders, link_factory
from rpc.records import LinkTLS, make_prompt

log = Logger()

CONNECT_SECONDS: Final = 10.0
FIRST_DELAY: Final = 5.0
LONGEST_DELAY: Final = 60.0
BACKLOG: Final = 1024
"""Connections that the kernel holds until they are accepted: many racks may come back at once."""


class NotNeeded(Exception):
    """The link that is being prepared is not needed: the attempt ends, and that is no failure."""


class _Unbuffered(TLSMemoryBIOFactory):
    # Twisted's default gathers small writes until the next turn of the reactor. A link writes whole boxes: it would
    # pay for that, with a timed call for each, and gain nothing.
    protocol = LinkTLS


class _Guarded(_Unbuffered):
    def __init__(self, tls: TLS, factory: IProtocolFactory, reactor: Any, door: Door) -> None:
        super().__init__(tls, False, factory, reactor)
        self._door = door

    def buildProtocol(self, addr: Any) -> Any:
        protocol = super().buildProtocol(addr)
        if isinstance(link := protocol.wrappedProtocol, Link):
            self._door.enter(link, addr.host)
        return protocol


def listen_tls(
    reactor: Any, port: int, interface: str, tls: TLS, factory: IProtocolFactory, door: Door | None = None
) -> IListeningPort:
    """Listen for racks on ``interface`` (an address; empty for all of IPv4, ``::`` for both).

    :param port: 0 takes any free one; see the result's ``getHost()``.
    :param door: bounds the connections; by default one of its own.
    :raises twisted.internet.error.CannotListenError: if the port cannot be had.
    """
    guarded = _Guarded(tls, factory, reactor, Door() if door is None else door)
    listening: IListeningPort = reactor.listenTCP(port, guarded, BACKLOG, interface)
    make_prompt(listening)
    return listening


def region_endpoint(reactor: Any, host: str, port: int, tls: TLS) -> IStreamClientEndpoint:
    """How a rack reaches the region at ``host``, a name or an address."""
    endpoint: IStreamClientEndpoint = wrapClientTLS(tls, HostnameEndpoint(reactor, host, port, CONNECT_SECONDS))
    return endpoint


def retry_delay(attempt: int, jitter: Callable[[], float] = random.random, spread: float = 0.0) -> float:
    """Seconds until the next try after the ``attempt``-th failure in a row (from 1; the loss of a link is one): any
    time up to 5, 10, 20, 40 and then 60, or up to ``spread``, if that is longer. So racks that lost the region together
    do not come back together."""
    longest = min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** min(attempt - 1, 16))
    return max(longest, spread) * jitter()


class _Presence(Protocol):
    """What ClientService holds for a link that is up. Its connection is the link."""


@implementer(IStreamClientEndpoint)
class _Registered:
    """An endpoint that is connected only when the link is ready and prepared.

    ClientService can prepare connections too, but cannot bear that one is lost meanwhile.
    """

    def __init__(
        self,
        endpoint: IStreamClientEndpoint,
        address: str,
        make: Callable[[], Link],
        prepare: Callable[[Link], Awaitable[object]],
        up: Callable[[Link], object],
        failed: Callable[[BaseException], object],
    ) -> None:
        self._endpoint = endpoint
        self._address = address
        self._factory = link_factory(make)
        self._prepare = prepare
        self._up = up
        self._failed = failed

    def __repr__(self) -> str:
        return f"region at {self._address}"

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[IProtocol]:
        """Connect, prepare, and then have ``protocolFactory`` build what stands for the link."""
        return Deferred.fromCoroutine(self._connect(protocolFactory))

    async def _connect(self, factory: IProtocolFactory) -> IProtocol:
        link: Link | None = None
        try:
            link = await connect_link(self._endpoint, self._factory)
            await self._prepare(link)
            if link.life is not Life.READY:
                raise LinkLost("the link was lost while it was being set up", link.clock.seconds())
        except CancelledError:
            if link is not None:
                link.abort("the service stops")
            raise
        except NotNeeded as reason:
            log.info(
                "The link with the region at {address} ends: {reason}", address=self._address, reason=_text(reason)
            )
            if link is not None:
                link.close(_text(reason))
            raise
        except Exception as error:
            self._failed(error)
            if link is not None:
                link.abort(_text(error))
            raise
        presence = factory.buildProtocol(link.peer)  # type: ignore[arg-type]  # the factory is ours, and ignores it
        if presence is None:
            raise RuntimeError("the factory built nothing")
        presence.makeConnection(_Closer(link))  # type: ignore[arg-type]  # all that ClientService calls is there
        self._up(link)
        link.on_lost(lambda _, reason: presence.connectionLost(Failure(LinkLost(reason, 0.0))))
        return presence


@frozen
class _Closer:
    """The part of a transport that ClientService uses: to stop, it closes the link."""

    link: Link

    def loseConnection(self) -> None:
        self.link.close("the service stops")


async def connect_link(endpoint: IStreamClientEndpoint, factory: IProtocolFactory) -> Link:
    """A link over ``endpoint`` whose peer is verified. ``factory`` must make links; see
    :func:`rpc.protocol.link_factory`.

    :raises LinkLost: with the reason, if TLS fails; what the endpoint raises, if there is no connection.
    """
    link = await endpoint.connect(factory)
    if not isinstance(link, Link):
        raise TypeError(f"the factory built {link!r}, which is no Link")
    await link.when_ready()
    return link


class Reconnecting(Service):
    """Keeps one link with a region up; see :func:`reconnecting`. ``link`` is the link that is up, or None."""

    def __init__(
        self,
        endpoint: IStreamClientEndpoint,
        address: str,
        make: Callable[[], Link],
        prepare: Callable[[Link], Awaitable[object]],
        *,
        clock: Any,
        retry: Callable[..., float] = retry_delay,
        refused: Callable[[int], float] = refused_delay,
    ) -> None:
        self.link: Link | None = None
        self.address = address
        self._patience = Patience(address, retry, refused)
        registered = _Registered(endpoint, address, make, prepare, self._up, self._patience.failed)
        self._client = ClientService(
            registered, Factory.forProtocol(_Presence), retryPolicy=self._patience.delay, clock=clock
        )

    def _up(self, link: Link) -> None:
        self.link = link
        self._patience.succeeded(link.spread)
        link.on_lost(self._lost)

    def _lost(self, link: Link, reason: str) -> None:
        if self.link is link:
            self.link = None

    def startService(self) -> None:
        """Begin to connect."""
        super().startService()  # type: ignore[no-untyped-call]  # Twisted's has no annotations
        self._client.startService()

    def stopService(self) -> Deferred[None]:
        """Stop trying, and close the link in order; the Deferred fires within some two seconds."""
        super().stopService()  # type: ignore[no-untyped-call]  # Twisted's has no annotations
        return self._client.stopService()


def reconnecting(
    reactor: Any,
    host: str,
    port: int,
    tls: TLS,
    make: Callable[[], Link],
    prepare: Callable[[Link], Awaitable[object]],
) -> Reconnecting:
    """A service that keeps a link with the region at ``host``:``port`` up, whatever happens.

    :param make: makes a fresh Link for each attempt.
    :param prepare: an async function of the link whose peer is verified; it registers the rack. If it fails, so does
        the attempt. It must end by itself: give its calls deadlines.
    """
    endpoint = region_endpoint(reactor, host, port, tls)
    return Reconnecting(endpoint, f"{host}:{port}", make, prepare, clock=reactor)


@frozen
class Enrolled:
    """What a rack has once it has enrolled. ``ca`` is the authority's certificate (PEM)."""

    credentials: Credentials
    ca: bytes
    system_id: str


async def enrol(
    reactor: Any, host: str, port: int, token: JoinToken, name: str, *, endpoint: IStreamClientEndpoint | None = None
) -> Enrolled:
    """Enrol a rack under ``name`` with the region at ``host``:``port`` and give what it has to keep.

    :raises EnrolmentRefused: with the region's reason.
    :raises LinkLost: if the other end is not the region that the token names, among other reasons.
    :raises CallFailed: if the call fails otherwise. CertificateInvalid: if what the region issued is no good.
        What Twisted's endpoints raise, if there is no connection.
    """
    key = new_key()
    request = make_request(key)
    nothing = Responders("anonymous", {})
    link = await connect_link(
        endpoint or region_endpoint(reactor, host, port, enrolling_tls(token.ca_sha256)),
        link_factory(lambda: Link(nothing, clock=reactor)),
    )
    try:
        answer = await link.call(
            Enroll,
            token_id=token.id,
            proof=prove(token.key, link.channel_binding(), request),
            csr=request,
            name=name,
        )
    finally:
        await _end_in_order(link, "enrolling is over")
    if not same_authority(token, answer["ca"]):
        raise CertificateInvalid("the region sent another authority than the one that the token names")
    system_id = check_issued(answer["certificate"], key, answer["ca"])
    if system_id != answer["system_id"]:
        raise CertificateInvalid(f"the certificate is for rack {system_id}, not for {answer['system_id']}")
    return Enrolled(Credentials(key, answer["certificate"]), answer["ca"], system_id)


async def _end_in_order(link: Link, reason: str) -> None:
    """End ``link`` in order: a process that ends meanwhile would leave the other end to think that it broke off."""
    ended: Deferred[None] = Deferred()
    link.on_lost(lambda link, reason: ended.callback(None))
    link.close(reason)
    await ended


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__
