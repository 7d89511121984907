"""How region and rack call each other: one AMP link, on which every call ends, and every failed call is made known.

A call ends with an answer, with an error that its command declares, or with a :class:`CallFailed`; there is a deadline
for each. Nothing that a responder raises ends the link. What a peer may call follows from its certificate and the table
in :mod:`rpc.commands`. Each end pings the other, and drops a link on which no answer comes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IProtocolFactory, IReactorTime
from twisted.internet.protocol import Factory
from twisted.logger import Logger
from twisted.protocols import amp
from twisted.python.failure import Failure

from rpc.asks import MAX_DESCRIPTION, REFERENCE, Asks, Question, Result, encode, outcome_of
from rpc.boxes import END, MAX_ANONYMOUS_BOX, MAX_BOX, MAX_UNREGISTERED_BOX, BadBox, Parser, pairs
from rpc.commands import BY_NAME, Command, DeclaredError, Ping, Register
from rpc.connection import ANONYMOUS_SECONDS, CLOSING_SECONDS, HANDSHAKE_SECONDS, READY, Connection, Life
from rpc.failures import (
    AnswerMalformed,
    ArgumentsInvalid,
    ArgumentsRefused,
    CallFailed,
    CallTimedOut,
    LinkLost,
    NotAllowed,
    PeerTooOld,
    TooBusy,
    UndeclaredError,
    Unhandled,
    UnknownCommand,
)
from rpc.identity import Peer
from rpc.limits import MAX_ANONYMOUS_REFUSED, MAX_CALLS, MAX_REFUSED, TURN_SECONDS, answering
from rpc.metrics import CALLS, CUTS
from rpc.outcomes import Outcome
from rpc.reporting import UNKNOWN, FailedCall, IReporter, Reporter
from rpc.responders import Refused, Responders
from rpc.versions import too_old

__all__ = [
    "ANONYMOUS_SECONDS", "CLOSING_SECONDS", "HANDSHAKE_SECONDS", "AnswerMalformed", "ArgumentsInvalid",
    "ArgumentsRefused", "CallFailed", "CallTimedOut", "DeclaredError", "Life", "Link", "LinkLost", "NotAllowed", "Peer",
    "PeerTooOld", "Responders", "TooBusy", "UndeclaredError", "Unhandled", "UnknownCommand", "link_factory",
    "outcome_of",
]  # fmt: skip

log = Logger()

PING_INTERVAL: Final = 8.0
"""With :data:`PING_PATIENCE` less than 15 seconds, with something to spare: so soon a silent link is found dead."""
PING_PATIENCE: Final = 5.0
LONGEST_SPREAD: Final = 300
"""Seconds; a rack stays away no longer than that because of what a region said."""
MAX_TAG: Final = 32
"""Bytes; the longest number of an ask that is accepted. It is repeated in every answer, and in the log."""


class Link(Connection):
    """One end of a link between region and rack.

    :param responders: what this end answers, and in which role.
    :param clock: the reactor, or a Clock in tests.
    :param peer: who the other end is, if that is known without TLS (in tests). Otherwise the link reads it from the
        certificate when the TLS handshake is done, and drops a peer that it cannot make out.
    :param binding: in tests, what :meth:`channel_binding` gives.
    :param interval: seconds between pings; 0 for none.
    :param patience: seconds that a ping's answer may take.
    """

    __slots__ = (
        "_answering", "_interval", "_late", "_parser", "_patience", "_refused", "_reporter", "_resting", "_turn_ends",
        "asks", "responders",
    )  # fmt: skip

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
        super().__init__(clock, peer, binding)
        self.responders = responders
        self.asks = Asks(clock, self._call_failed)
        self._reporter: IReporter = reporter or _REPORTER
        self._interval = interval
        self._patience = patience
        self._parser = Parser(MAX_ANONYMOUS_BOX)
        self._answering = 0
        self._refused = 0
        self._turn_ends = 0.0
        self._resting: IDelayedCall | None = None
        self._late = b""

    def _begin(self) -> None:
        self._parser.limit = MAX_UNREGISTERED_BOX if self.peer.role == "rack" else MAX_BOX
        if self._interval and self.responders.role != "anonymous":
            self._timer = self.clock.callLater(self._interval, self._ping)

    def agreed(self, version: int) -> None:
        """See :meth:`Connection.agreed`."""
        super().agreed(version)
        self._parser.limit = MAX_BOX

    def _end(self) -> None:
        if self._resting is not None:
            self._resting.cancel()
            self._resting = None
        self.asks.lost(self._lost_error)

    def _ping(self) -> None:
        self._timer = None
        self.send(Ping, _PING, self._patience, self._ponged)

    def _ponged(self, result: Result) -> None:
        if isinstance(result, CallTimedOut):
            CUTS.labels(self.peer.role, "silent").inc()
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
        if command is Register:
            result = self._registered(arguments, result)
        if isinstance(result, dict):
            return result
        raise result

    async def ask(
        self, command: type[Command], *, deadline: float | None = None, **arguments: Any
    ) -> Outcome[dict[str, Any]]:
        """As :meth:`call`, but never raises: the outcome says how it ended."""
        started = self.clock.seconds()
        result = await self._exchange(command, deadline, arguments)
        if command is Register:
            result = self._registered(arguments, result)
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
        self,
        command: type[Command],
        request: bytes,
        deadline: float | None,
        done: Callable[[Result], object],
    ) -> bytes | None:
        """Send what :func:`rpc.asks.encode` made. ``done`` is called once, perhaps before this returns None.

        :param deadline: seconds; None if the caller ends the ask itself.
        :return: the ask's number.
        """
        return self.put(Question(command, self.clock.seconds(), _done), done, request, deadline)

    def put(self, question: Question, key: Any, request: bytes, deadline: float | None = None) -> bytes | None:
        """As :meth:`send`, for a question that is put to others too: its ``done`` is called, with ``key``.

        :param deadline: seconds; None if the caller ends the ask itself.
        :return: the ask's number, or None if it has ended already.
        """
        command = question.command
        if self.life is not READY or command.since > self.version or len(self.asks) >= MAX_CALLS:
            obstacle = self._obstacle(command)
            if obstacle is not None:
                self.report(command.__name__, "out", b"", 0.0, obstacle)
                question.done(key, obstacle, 0.0)
                return None
        return self.asks.start(question, key, request, deadline, self._write)

    def _obstacle(self, command: type[Command]) -> CallFailed | None:
        if self.life is Life.HANDSHAKE:
            return LinkLost("the link is not up yet", 0.0)
        if self.life is not Life.READY:
            return self._lost_error()
        if command.since > self.version:
            return PeerTooOld(too_old(command, self.peer.role, self.version))
        if command is Ping:
            return None  # the link must be watched most of all when nothing is answered
        return TooBusy(f"{MAX_CALLS} calls to {self.peer} are under way, and no more are sent: ask later")

    def _registered(self, arguments: Mapping[str, Any], result: Result) -> Result:
        if not isinstance(result, dict):
            return result
        offered, version = arguments["versions"], result["version"]
        if version not in offered:
            error = AnswerMalformed(f"the region chose version {version} of the protocol, of {offered!r} offered")
            self.report(Register.__name__, "out", b"", 0.0, error)
            return error
        self.agreed(version)
        self.spread = float(min(max(result.get("spread") or 0, 0), LONGEST_SPREAD))
        return result

    def _call_failed(self, command: str, tag: bytes, seconds: float, error: Exception) -> None:
        self.report(command, "out", tag, seconds, error)

    # What arrives.

    def dataReceived(self, data: bytes) -> None:
        """Take bytes from the transport."""
        if self.life is not READY:
            return  # the link is ending: TLS gives no data before the handshake is done
        if self._resting is not None:
            self._late += data  # what TLS had taken in already; TCP reads no more
            return
        if self._parser.empty and self.asks.answered_alike(data):
            return
        self._take(data)

    def _take(self, data: bytes) -> None:
        self._turn_ends = self.clock.seconds() + TURN_SECONDS
        try:
            is_done = self._parser.feed(data, self._received)
        except BadBox as error:
            self.cut("malformed", f"the peer sent {error}")
            return
        if not is_done and self.life is Life.READY:
            # What this peer asks takes long: it is the others' turn first.
            self.transport.pauseProducing()  # type: ignore[union-attr]  # TCP's, which TLS hands through
            self._resting = self.clock.callLater(0, self._go_on)

    def _go_on(self) -> None:
        self._resting = None
        late, self._late = self._late, b""
        if self.life is not Life.READY:
            return
        self._take(late)
        if self._resting is None and self.life is Life.READY:
            self.transport.resumeProducing()  # type: ignore[union-attr]  # as above

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
        return self.life is READY and self.clock.seconds() < self._turn_ends

    # Answering.

    def _asked(self, box: dict[bytes, bytes]) -> None:
        tag = box[amp.ASK]
        name = box[amp.COMMAND]
        if len(tag) > MAX_TAG:
            raise BadBox(f"an ask whose number is {len(tag)} bytes long, of at most {MAX_TAG}")
        if name == Ping.commandName and self.peer.role != "anonymous":
            CALLS.answered("Ping", "in", 0.0)
            self._write(_ANSWER + len(tag).to_bytes(2, "big") + tag + END)
            return
        if self._answering >= answering(self.peer.role):
            self._too_busy(tag, name)
            return
        self._answering += 1
        if self.peer.role != "anonymous":
            self._refused = 0
        Deferred.fromCoroutine(self._respond(tag, name, box)).addErrback(self._broken)

    def _too_busy(self, tag: bytes, name: bytes) -> None:
        error = TooBusy(f"{self._answering} calls of {self.peer} are being answered, and no more at a time: ask later")
        command = BY_NAME.get(name)
        self.report(command.__name__ if command else UNKNOWN, "in", tag, 0.0, error)
        self._write(_refusal(tag, error.code, error))
        self._refused += 1
        if self._refused >= MAX_REFUSED:
            self.cut("flood", f"it asks on, after {self._refused} asks were refused because it asks too many at a time")

    async def _respond(self, tag: bytes, name: bytes, box: dict[bytes, bytes]) -> None:
        started = self.clock.seconds()
        try:
            answer = await self.responders.answer(self, name, box)
        except Refused as refused:
            label = refused.command.__name__ if refused.command else UNKNOWN
            self.report(label, "in", tag, self.clock.seconds() - started, refused.error, refused.internal)
            answer = _refusal(tag, refused.code, refused.error)
            self._count_refusal()
        else:
            answer = _ANSWER + len(tag).to_bytes(2, "big") + tag + answer + END
            seconds = self.clock.seconds() - started
            if self.life is READY:
                CALLS.answered(name.decode("ascii"), "in", seconds)
            else:
                self.report(name.decode("ascii"), "in", tag, seconds, self._lost_error())
        finally:
            self._answering -= 1
        if self.life is READY:
            self._write(answer)

    def _count_refusal(self) -> None:
        if self.peer.role == "anonymous":
            self._refused += 1
            if self._refused >= MAX_ANONYMOUS_REFUSED:
                self.cut("flood", f"it has no certificate, and was refused {self._refused} times")

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
        CALLS.failed(command, direction, seconds)
        self._reporter.failed(
            FailedCall(
                command=command,
                direction=direction,
                peer=str(self.peer),
                peer_role=self.peer.role,
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


def _done(done: Callable[[Result], object], result: Result, seconds: float) -> None:
    """End a question to one peer: the key that it was put under is what to call."""
    done(result)


_REPORTER: Final = Reporter()
_PING: Final = encode(Ping, {})
_ANSWER: Final = len(amp.ANSWER).to_bytes(2, "big") + amp.ANSWER


def _refusal(tag: bytes, code: bytes, error: Exception) -> bytes:
    """The box that says that an ask is not answered, and why."""
    description = str(error).encode("utf-8", "backslashreplace")[:MAX_DESCRIPTION]
    box = {amp.ERROR: tag, amp.ERROR_CODE: code, amp.ERROR_DESCRIPTION: description}
    if isinstance(error, Unhandled):
        box[REFERENCE] = error.reference.encode("ascii")
    return pairs(box.items()) + END


def link_factory(make: Callable[[], Link]) -> IProtocolFactory:
    """A factory of links, for endpoints and servers."""

    class LinkFactory(Factory):
        noisy = False

        def buildProtocol(self, addr: object) -> Link:
            return make()

    return cast(IProtocolFactory, LinkFactory())
