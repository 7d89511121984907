"""How a connection between region and rack lives: from the TLS handshake, by which each end learns who the other is,
to its end, of which everyone who wants to know is told, with the reason.

A connection that does not get through the handshake in time, stays without a certificate, or lets too much wait for it
unread, is cut.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Final, Self

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import (
    IDelayedCall,
    IHandshakeListener,
    IPushProducer,
    IReactorTime,
    ITCPTransport,
    ITransport,
)
from twisted.internet.protocol import connectionDone
from twisted.logger import Logger
from twisted.protocols import amp
from twisted.python.failure import Failure
from zope.interface import implementer

from rpc.failures import LinkLost
from rpc.identity import IdentityError, Peer, address_of, channel_binding, distrusts, explain, peer_of
from rpc.limits import unread
from rpc.metrics import CUTS
from rpc.versions import OLDEST_VERSION

log = Logger(namespace="rpc.protocol")

HANDSHAKE_SECONDS: Final = 15.0
"""How long a connection may take until the peer's identity is known."""
ANONYMOUS_SECONDS: Final = 60.0
"""How long a peer without a certificate may stay: long enough to enrol."""
CLOSING_SECONDS: Final = 2.0
"""How long an orderly end of the link may take before it is cut."""


class Life(enum.Enum):
    """Where a link is in its life."""

    HANDSHAKE = "not yet ready"
    READY = "ready"
    CLOSING = "closing"
    LOST = "lost"


READY: Final = Life.READY
"""For where it is looked up for each box: an enumeration's members take four times as long."""


@implementer(IHandshakeListener, IPushProducer)
class Connection(amp.AMP):
    """What is common to both directions of a link; :class:`rpc.protocol.Link` is made of it.

    ``version`` is the version of the protocol that both ends speak on it; ``registered``, whether they have agreed on
    one; ``spread``, within how many seconds a rack is to come back when the link is lost (0: the region did not say).
    It is a producer for its transport only to be told when the peer does not read.
    """

    # With more than 30 attributes beside those in slots, Python keeps a table of their names for each link, of its own:
    # that is over a kilobyte more, and much to fetch from memory when a thousand links are used one after the other.
    __slots__ = (
        "_binding", "_choked", "_cutter", "_distrusted", "_lost_at", "_lost_callbacks", "_peer_is_known",
        "_ready_callback", "_reason", "_timer", "_unread", "_waiting", "clock", "life", "peer", "registered", "spread",
        "version",
    )  # fmt: skip

    def __init__(self, clock: IReactorTime, peer: Peer | None, binding: bytes | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # AMP's has no annotations
        self.peer = peer or Peer("anonymous", "", "")
        self.life = Life.HANDSHAKE
        self.clock = clock
        self.version = OLDEST_VERSION
        self.registered = False
        self.spread = 0.0
        self._peer_is_known = peer is not None
        self._binding = binding
        self._choked = False
        self._unread = 0
        self._timer: IDelayedCall | None = None
        self._cutter: IDelayedCall | None = None
        self._lost_at = 0.0
        self._reason = ""
        self._distrusted = False
        self._waiting: list[Deferred[Any]] = []
        self._ready_callback: Callable[..., object] | None = None
        self._lost_callbacks: list[Callable[..., object]] = []

    def makeConnection(self, transport: ITransport) -> None:
        """Start. AMP's own makeConnection only writes a line to the log, which :meth:`_ready` does better."""
        self.transport = transport
        transport.registerProducer(self, True)  # type: ignore[attr-defined]  # TCP's and TLS's have it
        if self._peer_is_known:
            self._ready()
        else:
            self._timer = self.clock.callLater(
                HANDSHAKE_SECONDS, self.abort, f"no TLS handshake within {HANDSHAKE_SECONDS:g} s"
            )

    def handshakeCompleted(self) -> None:
        """TLS is up: see who the peer is."""
        if self.life is not Life.HANDSHAKE:
            return
        try:
            self.peer = peer_of(self.transport)
        except IdentityError as error:
            self._distrusted = True
            self.abort(str(error))
            return
        if ITCPTransport.providedBy(self.transport):
            # Otherwise the kernel keeps a small write back until the peer has acknowledged the one before, which takes
            # it 40 ms: an answer that follows a report would come that late, and everybody who asks waits for it.
            self.transport.setTcpNoDelay(True)
        self._ready()

    def _ready(self) -> None:
        self._stop_timer()
        self.life = Life.READY
        log.info("Link with {peer} is up", peer=str(self.peer), address=self.peer.address)
        if self.peer.role != "anonymous":
            self._begin()
        else:
            self._timer = self.clock.callLater(
                ANONYMOUS_SECONDS, self.abort, f"a peer without a certificate may stay {ANONYMOUS_SECONDS:g} s"
            )
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            each.callback(self)
        if self._ready_callback is not None:
            self._ready_callback(self)
            self._ready_callback = None

    def _begin(self) -> None:
        """The peer is known, and is no stranger."""

    def _end(self) -> None:
        """The link is lost."""

    def on_ready(self, callback: Callable[[Self], object]) -> None:
        """Call ``callback`` with this link when the peer is known, which it must not be yet. It must not raise."""
        self._ready_callback = callback

    def agreed(self, version: int) -> None:
        """Both ends have agreed on ``version`` of the protocol: the rack is registered."""
        self.version = version
        self.registered = True

    def when_ready(self) -> Deferred[Self]:
        """Fires with this link when the peer is known; fails with :class:`LinkLost` if that is not to be."""
        waiting: Deferred[Self] = Deferred()
        if self.life is Life.READY:
            waiting.callback(self)
        elif self.life is Life.LOST:
            waiting.errback(self._lost_error())
        else:
            self._waiting.append(waiting)
        return waiting

    def on_lost(self, callback: Callable[[Self, str], object]) -> None:
        """Call ``callback`` with this link and the reason, once, when the link has ended (at once if it has)."""
        if self.life is Life.LOST:
            self._tell(callback)
        else:
            self._lost_callbacks.append(callback)

    def _tell(self, callback: Callable[..., object]) -> None:
        try:
            callback(self, self._reason)
        except Exception:  # noqa: BLE001  # the others must be told all the same
            log.failure("{callback} failed when told that {peer} is gone", callback=callback, peer=str(self.peer))

    def close(self, reason: str = "closed by this end") -> None:
        """End the link in order, after what was written; cut it if that takes over two seconds."""
        if self.life is Life.LOST or self.transport is None or self._cutter is not None:
            return
        self._end_with(reason)
        self._cutter = self.clock.callLater(CLOSING_SECONDS, self.abort, reason)
        self.transport.unregisterProducer()  # type: ignore[attr-defined]  # a transport waits for its producer to end
        self.transport.loseConnection()

    def abort(self, reason: str) -> None:
        """Cut the link now."""
        if self.life is Life.LOST or self.transport is None:
            return
        self._end_with(reason)
        self.transport.abortConnection()  # type: ignore[attr-defined]  # TCP's and TLS's have it

    def cut(self, kind: str, reason: str) -> None:
        """Cut the link now, say so in the log, and count it under ``kind`` (see :data:`rpc.metrics.CUTS`): the peer
        breaks the protocol, or asks for more than it may."""
        if self.life is Life.READY:
            CUTS.labels(self.peer.role, kind).inc()
            log.error("The link with {peer} is cut: {reason}", peer=str(self.peer), reason=reason)
            self.abort(reason)

    def _end_with(self, reason: str) -> None:
        self._reason = self._reason or reason
        if self.life is Life.READY:
            self.life = Life.CLOSING

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """End every call that is under way, and tell who wants to know."""
        if self.life is Life.LOST:
            return
        was, self.life = self.life, Life.LOST
        self._lost_at = self.clock.seconds()
        self._stop_timer()
        if self._cutter is not None and self._cutter.active():
            self._cutter.cancel()
        self._cutter = None
        self._distrusted = self._distrusted or distrusts(reason, self.transport)
        if not self._reason:
            self._reason = "closed by the peer" if reason.check(ConnectionDone) else explain(reason, self.transport)
        if was is not Life.HANDSHAKE:
            log.info("Link with {peer} ended: {reason}", peer=str(self.peer), reason=self._reason)
        elif not self._waiting:  # otherwise those who wait for the link are told, and say what it means to them
            log.warn("No link with {address}: {reason}", address=address_of(self.transport), reason=self._reason)
        self.transport = None
        self._end()
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            each.errback(self._lost_error())
        callbacks, self._lost_callbacks = self._lost_callbacks, []
        for callback in callbacks:
            self._tell(callback)

    def _stop_timer(self) -> None:
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        self._timer = None

    def _lost_error(self) -> LinkLost:
        since = self._lost_at or self.clock.seconds()
        return LinkLost(f"the link is lost: {self._reason}", since, distrusted=self._distrusted)

    def channel_binding(self) -> bytes:
        """32 bytes that only the two ends of this very TLS channel know (RFC 5705), for proofs to hang on."""
        if self._binding is not None:
            return self._binding
        return channel_binding(self.transport)

    def _write(self, data: bytes) -> None:
        self.transport.write(data)  # type: ignore[union-attr]  # there is one until LOST, which callers have checked
        if self._choked:
            self._unread += len(data)
            if self._unread > unread(self.peer.role):
                self.cut("unread", f"{self._unread} bytes wait, which it does not read")

    def pauseProducing(self) -> None:
        """The peer reads too slowly: from now on, what is written is counted. TCP says so at every write."""
        if not self._choked:
            self._choked = True
            self._unread = 0

    def resumeProducing(self) -> None:
        """The peer has read everything."""
        self._choked = False

    def stopProducing(self) -> None:
        """The connection is gone: :meth:`connectionLost` sees to that."""
