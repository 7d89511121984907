"""How the calls that one end of a link has made are kept until they end: by an answer, an error, a deadline, or never.

Each call ends exactly once, with one :data:`Result`; a call that failed is reported there and then. The table knows
nothing of connections: it is given what writes to one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.protocols import amp

from rpc.arguments import KIB, Malformed
from rpc.boxes import END, BadBox, pairs
from rpc.commands import Command, DeclaredError
from rpc.failures import (
    TRAVELLING,
    AnswerMalformed,
    ArgumentsInvalid,
    CallFailed,
    CallTimedOut,
    LinkLost,
    UndeclaredError,
    Unhandled,
)
from rpc.metrics import CALLS
from rpc.outcomes import Answered, Failed, NotConnected, Outcome, TimedOut

REFERENCE: Final = b"_error_reference"
"""The key of an error box that has the reference under which the other side's log has the traceback."""

MAX_DESCRIPTION: Final = 4096
"""Bytes of an error's description that are sent, and that are taken in."""

Result = dict[str, Any] | CallFailed | DeclaredError
"""What a call ended with: the answer's values by name, or what to raise."""

Box = Mapping[bytes, bytes]
Report = Callable[[str, bytes, float, CallFailed | DeclaredError], object]
"""Makes known that a call failed, given the command's name, the ask, the seconds and the error."""

_ASK: Final = b"\0\4" + amp.ASK
_ANSWER: Final = b"\0\7" + amp.ANSWER + b"\0"  # and the first byte of its length: no number has 256 bytes
_TAG: Final = len(_ANSWER) + 1

MOST_ALIKE: Final = 64
"""Answers that are remembered, to be known again; a fleet that is up to date has one."""

LONGEST_ALIKE: Final = 4 * KIB
"""Bytes of the longest that is."""


class Alike:
    """Answers to one command, which many peers are asked, by their bytes: of an answer that says the same as one before
    the values are known without reading it. Such answers share their values, which nobody may change."""

    __slots__ = ("_results",)

    def __init__(self) -> None:
        self._results: dict[bytes, dict[str, Any]] = {}

    def get(self, rest: bytes) -> dict[str, Any] | None:
        """The values of an answer, given the bytes that follow its number, if one like it was read before."""
        return self._results.get(rest)

    def add(self, box: Box, result: dict[str, Any]) -> None:
        """Remember that ``result`` was read from ``box``."""
        rest = pairs((key, value) for key, value in box.items() if key != amp.ANSWER) + END
        if len(rest) <= LONGEST_ALIKE:
            if len(self._results) >= MOST_ALIKE:
                self._results.clear()
            self._results[rest] = result


class Question:
    """What one peer is asked, or many at the same moment: all that asking them has in common.

    :param started: that moment, in the seconds of the links' clock.
    :param done: called with the key of each that was asked, what asking it ended with, and after how many seconds.
    :param alike: what was answered to the same command by others.
    """

    __slots__ = ("alike", "command", "done", "started")

    def __init__(
        self,
        command: type[Command],
        started: float,
        done: Callable[[Any, Result, float], object],
        alike: Alike | None = None,
    ) -> None:
        self.command = command
        self.started = started
        self.done = done
        self.alike = alike


_Ask = tuple[Question, Any, IDelayedCall | None]
"""An ask under way: what is asked, the key of who is asked, and the deadline's timer. Many begin at the same moment,
and a tuple costs least."""


def encode(command: type[Command], arguments: Mapping[str, Any]) -> bytes:
    """Everything of the box that asks for ``command``, but the ask's number.

    :raises ArgumentsInvalid: if the arguments are not what the command takes.
    """
    try:
        box = command.argument_schema.dump(arguments)
    except Malformed as error:
        raise ArgumentsInvalid(f"{command.__name__} cannot be called so: {error}") from error
    box[amp.COMMAND] = command.commandName
    return pairs(box.items()) + END


def outcome_of(result: Result, seconds: float) -> Outcome[dict[str, Any]]:
    """What a call ended with, as an outcome."""
    match result:
        case dict():
            return Answered(result, seconds)
        case CallTimedOut():
            return TimedOut(result.seconds)
        case LinkLost():
            return NotConnected(result.since or None)
        case _:
            return Failed(type(result).__name__, str(result), seconds)


class Asks:
    """The calls under way."""

    __slots__ = ("_asks", "_clock", "_report", "made")

    def __init__(self, clock: IReactorTime, report: Report) -> None:
        self._clock = clock
        self._report = report
        self._asks: dict[bytes, _Ask] = {}
        self.made = 0
        """How many calls were ever made."""

    def __len__(self) -> int:
        """How many are under way."""
        return len(self._asks)

    def start(
        self,
        question: Question,
        key: Any,
        request: bytes,
        deadline: float | None,
        write: Callable[[bytes], object],
    ) -> bytes:
        """Write what :func:`encode` made of the question, and call its ``done`` with ``key`` when the call has ended.

        :param deadline: seconds; None if the caller ends the ask itself, by :meth:`expire`.
        :return: the ask's number.
        """
        self.made += 1
        tag = b"%x" % self.made
        timer = None if deadline is None else self._clock.callLater(deadline, self.expire, tag, deadline)
        self._asks[tag] = (question, key, timer)
        write(_ASK + len(tag).to_bytes(2, "big") + tag + request)
        return tag

    def expire(self, tag: bytes, seconds: float) -> None:
        """The deadline of ``seconds`` has passed."""
        self._end(tag, CallTimedOut(seconds))

    def forget(self, tag: bytes) -> None:
        """The caller gave up: that is no failure, and the answer, if it comes, is of no interest."""
        ask = self._asks.pop(tag, None)
        if ask is not None:
            _stop(ask[2])

    def lost(self, error: Callable[[], LinkLost]) -> None:
        """No answer will come any more: end every call, each with an error of its own."""
        for tag in list(self._asks):
            self._end(tag, error())

    def answered(self, tag: bytes, box: Box) -> bool:
        """Take the answer in ``box``. False if nobody waits for it."""
        ask = self._asks.get(tag)
        if ask is None:
            return self._unexpected(tag)
        try:
            values = ask[0].command.answer_schema.load(box)
        except Malformed as error:
            self._end(tag, AnswerMalformed(f"the answer cannot be read: {error}"))
            return True
        if (alike := ask[0].alike) is not None:
            alike.add(box, values)
        self._end(tag, values)
        return True

    def answered_alike(self, data: bytes) -> bool:
        """Take ``data`` if it is one answer, no more and no less, that says what another peer has answered before."""
        if not data.startswith(_ANSWER) or len(data) < _TAG:
            return False
        stop = _TAG + data[_TAG - 1]
        tag = data[_TAG:stop]
        ask = self._asks.get(tag)
        if ask is None or (alike := ask[0].alike) is None or (result := alike.get(data[stop:])) is None:
            return False
        self._end(tag, result)
        return True

    def failed(self, tag: bytes, box: Box) -> bool:
        """Take the error in ``box``. False if nobody waits for it."""
        ask = self._asks.get(tag)
        if ask is None:
            return self._unexpected(tag)
        self._end(tag, _error(ask[0].command, box))
        return True

    def _unexpected(self, tag: bytes) -> bool:
        """An answer that nobody waits for is late, as a rule. One to a number never used comes of a broken peer."""
        try:
            used = 0 < int(tag, 16) <= self.made
        except ValueError:
            used = False
        if not used:
            raise BadBox(f"an answer to ask {tag[:20]!r}, which was never made")
        return False

    def _end(self, tag: bytes, result: Result) -> None:
        ask = self._asks.pop(tag, None)
        if ask is None:
            return
        question, key, timer = ask
        if timer is not None:
            _stop(timer)
        seconds = self._clock.seconds() - question.started
        if isinstance(result, dict):
            CALLS.answered(question.command.__name__, "out", seconds)
        else:
            self._report(question.command.__name__, tag, seconds, result)
        question.done(key, result, seconds)


def _stop(timer: IDelayedCall | None) -> None:
    if timer is not None and timer.active():
        timer.cancel()


def _error(command: type[Command], box: Box) -> CallFailed | DeclaredError:
    code = box.get(amp.ERROR_CODE, b"")
    reason = box.get(amp.ERROR_DESCRIPTION, b"")[:MAX_DESCRIPTION].decode("utf-8", "replace")
    if (declared := command.declared.get(code)) is not None:
        return declared(reason)
    if code == Unhandled.code:
        return Unhandled(reason, box.get(REFERENCE, b"").decode("utf-8", "replace"))
    if (kind := TRAVELLING.get(code)) is not None:
        return kind(reason)
    return UndeclaredError(reason, code.decode("utf-8", "replace"))
