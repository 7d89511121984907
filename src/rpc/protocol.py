"""How region and rack call each other: one AMP link, on which every call ends, and every failed call is made known.

A call ends with an answer, with an error that its command declares, or with a :class:`CallFailed`; there is a deadline
for each. Nothing that a responder raises ends the link. What a peer may call follows from its certificate and the table
in :mod:`rpc.commands`. Each end pings the other, and drops a link on which no answer comes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IDelayedCall, IHandshakeListener, IProtocolFactory, IReactorTime, ITransport
from twisted.internet.protocol import Factory, connectionDone
from twisted.logger import Logger
from twisted.protocols import amp
from twisted.python.failure import Failure
from zope.interface import implementer

from rpc.asks import REFERENCE, Asks, Result, encode, outcome_of
from rpc.boxes import END, MAX_ANONYMOUS_BOX, MAX_BOX, BadBox, Parser, pairs
from rpc.commands import Command, DeclaredError, Ping
from rpc.failures import (
    AnswerMalformed,
    ArgumentsInvalid,
    ArgumentsRefused,
    CallFailed,
    CallTimedOut,
    LinkLost,
    NotAllowed,
    UndeclaredError,
    Unhandled,
    UnknownCommand,
)
from rpc.identity import IdentityError, Peer, address_of, channel_binding, explain, peer_of
from rpc.outcomes import Outcome
from rpc.reporting import UNKNOWN, FailedCall, IReporter, Reporter
from rpc.responders import Refused, Responders

__all__ = [
    "AnswerMalformed", "ArgumentsInvalid", "ArgumentsRefused", "CallFailed", "CallTimedOut", "DeclaredError", "Link",
    "LinkLost", "NotAllowed", "Peer", "Responders", "UndeclaredError", "Unhandled", "UnknownCommand",
    "link_factory", "outcome_of",
]  # fmt: skip

log = Logger()

PING_INTERVAL: Final = 10.0
PING_PATIENCE: Final = 5.0
HANDSHAKE_SECONDS: Final = 15.0
"""How long a connection may take until the peer's identity is known."""
ANONYMOUS_SECONDS: Final = 60.0
"""How long a peer without a certificate may stay: long enough to enrol."""
MAX_TAG: Final = 32
"""Bytes; the longest number of an ask that is accepted. It is repeated in every answer, and in the log."""
CLOSING_SECONDS: Final = 2.0
"""How long an orderly end of the link may take before it is cut."""


class Life(enum.Enum):
    """Where a link is in its life."""

    HANDSHAKE = "not yet ready"
    READY = "ready"
    CLOSING = "closing"
    LOST = "lost"


@implementer(IHandshakeListener)
class Link(amp.AMP):
    """One end of a link between region and rack.

    :param responders: what this end answers, and in which role.
    :param clock: the reactor, or a Clock in tests.
    :param peer: who the other end is, if that is known without TLS (in tests). Otherwise the link reads it from the
        certificate when the TLS handshake is done, and drops a peer that it cannot make out.
    :param binding: in tests, what :meth:`channel_binding` gives.
    :param interval: seconds between pings; 0 for none.
    :param patience: seconds that a ping's answer may take.
    """

    def __init__(
        self,
        responders: Responders,
        *,
        clock: IReactorTime,
        reporter: IReporter | None = None,
        peer: Peer | None = None,
        binding: bytes | None = None,
        interval: float = PING_INTERVAL,
        patience: float = PING_PATIENCE,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # AMP's has no annotations
        self.responders = responders
        self.peer = peer or Peer("anonymous", "", "")
        self.life = Life.HANDSHAKE
        self._peer_is_known = peer is not None
        self.clock = clock
        self._reporter: IReporter = reporter or _REPORTER
        self._binding = binding
        self._interval = interval
        self._patience = patience
        self._parser = Parser(MAX_ANONYMOUS_BOX)
        self.asks = Asks(clock, self._call_failed)
        self._timer: IDelayedCall | None = None
        self._cutter: IDelayedCall | None = None
        self._lost_at = 0.0
        self._reason = ""
        self._waiting: list[Deferred[Link]] = []
        self._lost_callbacks: list[Callable[[Link, str], object]] = []

    # Life.

    def makeConnection(self, transport: ITransport) -> None:
        """Start. AMP's own makeConnection only writes a line to the log, which :meth:`_ready` does better."""
        self.transport = transport
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
            self.abort(str(error))
            return
        self._ready()

    def _ready(self) -> None:
        self._stop_timer()
        self.life = Life.READY
        log.info("Link with {peer} is up", peer=str(self.peer), address=self.peer.address)
        if self.peer.role != "anonymous":
            self._parser.limit = MAX_BOX
            if self._interval and self.responders.role != "anonymous":
                self._timer = self.clock.callLater(self._interval, self._ping)
        else:
            self._timer = self.clock.callLater(
                ANONYMOUS_SECONDS, self.abort, f"a peer without a certificate may stay {ANONYMOUS_SECONDS:g} s"
            )
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            each.callback(self)

    def when_ready(self) -> Deferred[Link]:
        """Fires with this link when the peer is known; fails with :class:`LinkLost` if that is not to be."""
        waiting: Deferred[Link] = Deferred()
        if self.life is Life.READY:
            waiting.callback(self)
        elif self.life is Life.LOST:
            waiting.errback(self._lost_error())
        else:
            self._waiting.append(waiting)
        return waiting

    def on_lost(self, callback: Callable[[Link, str], object]) -> None:
        """Call ``callback`` with this link and the reason, once, when the link has ended (at once if it has)."""
        if self.life is Life.LOST:
            self._tell(callback)
        else:
            self._lost_callbacks.append(callback)

    def _tell(self, callback: Callable[[Link, str], object]) -> None:
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
        self.transport.loseConnection()

    def abort(self, reason: str) -> None:
        """Cut the link now."""
        if self.life is Life.LOST or self.transport is None:
            return
        self._end_with(reason)
        self.transport.abortConnection()  # type: ignore[attr-defined]  # TCP's and TLS's have it

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
        if not self._reason:
            self._reason = "closed by the peer" if reason.check(ConnectionDone) else explain(reason, self.transport)
        if was is not Life.HANDSHAKE:
            log.info("Link with {peer} ended: {reason}", peer=str(self.peer), reason=self._reason)
        elif not self._waiting:  # otherwise those who wait for the link are told, and say what it means to them
            log.warn("No link with {address}: {reason}", address=address_of(self.transport), reason=self._reason)
        self.transport = None
        self.asks.lost(self._lost_error)
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
        return LinkLost(f"the link is lost: {self._reason}", self._lost_at or self.clock.seconds())

    def channel_binding(self) -> bytes:
        """32 bytes that only the two ends of this very TLS channel know (RFC 5705), for proofs to hang on."""
        if self._binding is not None:
            return self._binding
        return channel_binding(self.transport)

    def _ping(self) -> None:
        self._timer = None
        self.send(Ping, _PING, self._patience, self._ponged)

    def _ponged(self, result: Result) -> None:
        if isinstance(result, CallTimedOut):
            self.abort(f"no answer to a ping within {self._patience:g} s")
        elif self.life is Life.READY:
            self._timer = self.clock.callLater(self._interval, self._ping)

    # Calling.

    async def call(self, command: type[Command], *, deadline: float | None = None, **arguments: Any) -> dict[str, Any]:
        """Ask the peer for ``command`` and give its answer, a value for each name in the command's response.

        :param deadline: seconds; the command's own by default.
        :raises: the errors that the command declares; :class:`CallFailed` in one of its kinds for everything else.
            Both have been logged and counted already.
        """
        result = await self._exchange(command, deadline, arguments)
        if isinstance(result, dict):
            return result
        raise result

    async def ask(
        self, command: type[Command], *, deadline: float | None = None, **arguments: Any
    ) -> Outcome[dict[str, Any]]:
        """As :meth:`call`, but never raises: the outcome says how it ended."""
        started = self.clock.seconds()
        result = await self._exchange(command, deadline, arguments)
        return outcome_of(result, self.clock.seconds() - started)

    def _exchange(
        self, command: type[Command], deadline: float | None, arguments: Mapping[str, Any]
    ) -> Deferred[Result]:
        # The Deferred never fails: an errback would make a Failure, which costs more than the call, and asks for care.
        tag: bytes | None = None
        waiting: Deferred[Result] = Deferred(lambda _: None if tag is None else self.asks.forget(tag))
        try:
            request = encode(command, arguments)
        except ArgumentsInvalid as error:
            self.report(command.__name__, "out", b"", 0.0, error)
            waiting.callback(error)
            return waiting
        tag = self.send(command, request, command.deadline if deadline is None else deadline, waiting.callback)
        return waiting

    def send(
        self, command: type[Command], request: bytes, deadline: float | None, done: Callable[[Result], object]
    ) -> bytes | None:
        """Send what :func:`rpc.asks.encode` made. ``done`` is called once, perhaps before this returns None.

        :param deadline: seconds; None if the caller ends the ask itself.
        :return: the ask's number.
        """
        if self.life is Life.READY:
            return self.asks.start(command, request, deadline, done, self._write)
        lost = LinkLost("the link is not up yet", 0.0) if self.life is Life.HANDSHAKE else self._lost_error()
        self.report(command.__name__, "out", b"", 0.0, lost)
        done(lost)
        return None

    def _call_failed(self, command: str, tag: bytes, seconds: float, error: Exception) -> None:
        self.report(command, "out", tag, seconds, error)

    def _write(self, data: bytes) -> None:
        self.transport.write(data)  # type: ignore[union-attr]  # there is one until LOST, which callers have checked

    # What arrives.

    def dataReceived(self, data: bytes) -> None:
        """Take bytes from the transport."""
        if self.life is not Life.READY:
            return  # the link is ending: TLS gives no data before the handshake is done
        try:
            self._parser.feed(data, self._received)
        except BadBox as error:
            log.error("{peer} broke the protocol; the link is cut: {error}", peer=str(self.peer), error=str(error))
            self.abort(f"the peer sent {error}")

    def ampBoxReceived(self, box: dict[bytes, bytes]) -> None:
        """Take a box, from whoever hands them to AMP."""
        self._received(box)

    def _received(self, box: dict[bytes, bytes]) -> bool:
        awaited = True
        if (tag := box.get(amp.ANSWER)) is not None:
            awaited = self.asks.answered(tag, box)
        elif (tag := box.get(amp.ERROR)) is not None:
            awaited = self.asks.failed(tag, box)
        elif amp.COMMAND in box and amp.ASK in box:
            self._asked(box)
        else:
            raise BadBox(f"a box that is neither ask, answer nor error: {sorted(box)[:5]!r}")
        if not awaited:
            log.info("{peer} answered ask {ask} when nobody waited any more", peer=str(self.peer), ask=tag)
        return self.life is Life.READY

    # Answering.

    def _asked(self, box: dict[bytes, bytes]) -> None:
        tag = box[amp.ASK]
        name = box[amp.COMMAND]
        if len(tag) > MAX_TAG:
            raise BadBox(f"an ask whose number is {len(tag)} bytes long, of at most {MAX_TAG}")
        if name == Ping.commandName and self.peer.role != "anonymous":
            self._write(_ANSWER + len(tag).to_bytes(2, "big") + tag + END)
            return
        answering = Deferred.fromCoroutine(self._respond(tag, name, box))
        answering.addErrback(self._broken)

    async def _respond(self, tag: bytes, name: bytes, box: dict[bytes, bytes]) -> None:
        started = self.clock.seconds()
        try:
            answer = await self.responders.answer(self, name, box)
        except Refused as refused:
            label = refused.command.__name__ if refused.command else UNKNOWN
            self.report(label, "in", tag, self.clock.seconds() - started, refused.error, refused.internal)
            reply = {amp.ERROR: tag, amp.ERROR_CODE: refused.code, amp.ERROR_DESCRIPTION: _description(refused.error)}
            if isinstance(refused.error, Unhandled):
                reply[REFERENCE] = refused.error.reference.encode("ascii")
            answer = pairs(reply.items()) + END
        else:
            answer = _ANSWER + len(tag).to_bytes(2, "big") + tag + answer + END
            if self.life is not Life.READY:
                self.report(name.decode("ascii"), "in", tag, self.clock.seconds() - started, self._lost_error())
        if self.life is Life.READY:
            self._write(answer)

    def _broken(self, reason: Failure) -> None:
        # Cannot happen, as far as is known. If it does, the peer must not wait for its deadline.
        log.failure("Answering {peer} failed; the link is cut", reason, peer=str(self.peer))
        self.abort("an internal error")

    def report(
        self,
        command: str,
        direction: str,
        tag: bytes,
        seconds: float,
        error: Exception,
        internal: Failure | None = None,
    ) -> None:
        """Make a failed call known; ``internal`` has the traceback if the failure is this process's own."""
        self._reporter.failed(
            FailedCall(
                command=command,
                direction=direction,
                peer=str(self.peer),
                peer_id=self.peer.id,
                address=self.peer.address,
                ask=tag.decode("ascii", "backslashreplace"),
                seconds=seconds,
                kind=type(error).__name__,
                text=str(error) if internal is None else f"{type(internal.value).__name__}: {internal.value}",
                reference=getattr(error, "reference", ""),
                failure=internal,
            )
        )

    def unhandledError(self, failure: Failure) -> None:
        """Nothing here lets an error get to AMP, whose own answer to one is to drop the link."""
        self._broken(failure)

    def callRemote(self, commandType: Any, *arguments: Any, **keywords: Any) -> Any:
        """Refuse: AMP's own call has no deadline and is not reported."""
        raise TypeError("use call() or ask(): callRemote has no deadline, and what fails in it goes unreported")


_REPORTER: Final = Reporter()
_PING: Final = encode(Ping, {})
_ANSWER: Final = len(amp.ANSWER).to_bytes(2, "big") + amp.ANSWER


def _description(error: Exception) -> bytes:
    return str(error).encode("utf-8", "backslashreplace")[:4096]


def link_factory(make: Callable[[], Link]) -> IProtocolFactory:
    """A factory of links, for endpoints and servers."""

    class LinkFactory(Factory):
        noisy = False

        def buildProtocol(self, addr: object) -> Link:
            return make()

    return cast(IProtocolFactory, LinkFactory())
