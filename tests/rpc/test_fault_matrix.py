"""Every command × every fault × every direction, made from the command table, so that a new command is in it too.

For each, the caller gets a typed outcome, the link survives where it should, exactly one log event with all its fields
appears on each side that can know, and that side's counter moves by one.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

from attrs import frozen
from prometheus_client import CollectorRegistry, Counter
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.logger import LogLevel, globalLogPublisher
from twisted.protocols import amp
from twisted.trial.unittest import SynchronousTestCase

from rpc import protocol
from rpc.arguments import MAX_CHUNK, Blob, Bytes, Text
from rpc.asks import encode
from rpc.boxes import END, MAX_PAIRS, pairs
from rpc.commands import COMMANDS, Command, Ping
from rpc.limits import MAX_ANSWERING, MAX_CALLS, answering
from rpc.protocol import (
    AnswerMalformed,
    ArgumentsInvalid,
    ArgumentsRefused,
    CallTimedOut,
    Life,
    LinkLost,
    NotAllowed,
    PeerTooOld,
    TooBusy,
    UndeclaredError,
    Unhandled,
    UnknownCommand,
)
from rpc.reporting import Reporter
from rpc.testing import ANONYMOUS, RACK, linked

SAMPLES: dict[str, Any] = {
    "text": "x", "integer": 1, "boolean": True, "bytes": b"x", "blob": b"x", "JSON": [1],
}  # fmt: skip
"""A value for each type of argument; those of Register are such that it succeeds."""

FIELDS = {"command", "direction", "peer", "peer_id", "address", "ask", "seconds", "kind", "error", "reference"}

SIDES = ("out", "in")


@frozen
class Expected:
    """What a fault leads to. ``error`` is what the caller gets; ``answerer``, what the other end reports, if it can
    know; ``alive``, whether the link is as good as before; ``sent``, whether anything was; ``said``, how many lines at
    warning level or above there are beside the reports."""

    error: type[Exception]
    answerer: type[Exception] | None = None
    alive: bool = True
    sent: bool = True
    said: int = 0
    internal: bool = False


def values(arguments: Any) -> dict[str, Any]:
    return {name.decode("ascii"): SAMPLES[argument.kind] for name, argument in arguments}


def too_large(argument: Any) -> Any:
    """A value of ``argument`` that is one byte too long, or None if there is no such value."""
    if isinstance(argument, Blob):
        return "x" * argument.limit if argument.kind == "JSON" else bytes(argument.limit + 1)
    if isinstance(argument, Text):
        return "x" * (MAX_CHUNK + 1)
    return bytes(MAX_CHUNK + 1) if isinstance(argument, Bytes) else None


class Case(SynchronousTestCase):
    """One cell: a link on which ``caller`` asks ``answerer``, and everything that is logged and counted."""

    command: type[Command]
    calling: str
    answering: str

    def link(self, answer: Any = None, registered: bool = True) -> None:
        """Link both ends. ``answer`` is what the answerer does when it is asked; by default nothing can ask it."""
        self.clock = Clock()
        self.clock.advance(1000.0)
        self.counters = {side: self.counter() for side in SIDES}
        table = {} if answer is None else {self.command: answer}
        calls = self.calling == "region"
        stranger = "anonymous" in (self.calling, self.answering)
        ends = linked(
            {} if calls else table,
            table if calls else {},
            self.clock,
            rack=ANONYMOUS if stranger else RACK,
            region_reporter=Reporter(self.counters["out" if calls else "in"]),
            rack_reporter=Reporter(self.counters["in" if calls else "out"]),
            version=1 if registered else None,
            interval=0,
        )
        *both, self.pump = ends
        self.caller, self.answerer = both if calls else reversed(both)
        self.events: list[dict[str, Any]] = []
        observer: Any = self.events.append
        globalLogPublisher.addObserver(observer)
        self.addCleanup(globalLogPublisher.removeObserver, observer)
        self.asked: list[Deferred[None]] = []
        self.results: list[Any] = []

    def counter(self) -> Counter:
        return Counter("failures", "", ["command", "direction", "peer", "kind"], registry=CollectorRegistry())

    def call(self, **changes: Any) -> None:
        """Make the call; what it ends with is added to ``results``."""
        calling = Deferred.fromCoroutine(self.caller.call(self.command, **(values(self.command.arguments) | changes)))
        calling.addBoth(self.results.append)

    def answer(self, **changes: Any) -> Callable[..., Any]:
        """What answers at once, and well but for ``changes``."""

        async def answer(link: Any, **arguments: Any) -> Any:
            return values(self.command.response) | changes

        return answer

    def raising(self, error: Exception) -> Callable[..., Any]:
        async def answer(link: Any, **arguments: Any) -> Any:
            raise error

        return answer

    async def slowly(self, link: Any, **arguments: Any) -> Any:
        """Answers when ``asked`` is fired."""
        self.asked.append(Deferred())
        await self.asked[-1]
        return values(self.command.response)

    def lose_what_was_written(self) -> None:
        """What the caller has written never arrives."""
        self.assertTrue(self.caller.transport.getOutBuffer())  # type: ignore[union-attr]  # it is iosim's

    def send_from_answerer(self, *box: tuple[bytes, bytes]) -> None:
        self.answerer.transport.write(pairs(box) + END)  # type: ignore[union-attr]  # it is up
        self.pump.flush()

    def check(self, expected: Expected) -> None:
        """Everything that ``expected`` says, and that nothing else happened."""
        [result] = self.results
        self.assertIs(result.type if hasattr(result, "type") else type(result), expected.error, result)
        if expected.internal:
            self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError, ValueError)), 1)
        reports = [event for event in self.events if event["log_namespace"] == "rpc.reporting"]
        loud = [event for event in self.events if event["log_level"] >= LogLevel.warn and event not in reports]
        self.assertEqual(len(loud), expected.said, loud)
        for side, error, end in (
            ("out", expected.error, self.caller),
            ("in", expected.answerer, self.answerer),
        ):
            events = [event for event in reports if event["direction"] == side]
            self.assertEqual([event["kind"] for event in events], [error.__name__] if error else [], side)
            for event in events:
                self.check_fields(event, end, expected)
            counted = [
                (*(sample.labels[label] for label in ("command", "direction", "peer", "kind")), sample.value)
                for metric in self.counters[side].collect()
                for sample in metric.samples
                if sample.name.endswith("_total")
            ]
            name = "(unknown)" if events and events[0]["command"] == "(unknown)" else self.command.__name__
            self.assertEqual(counted, [(name, side, end.peer.role, error.__name__, 1.0)] if error else [])
        self.check_life(expected)

    def check_fields(self, event: dict[str, Any], end: Any, expected: Expected) -> None:
        self.assertEqual(FIELDS - event.keys(), set())
        self.assertEqual(event["command"], self.command.__name__)
        self.assertEqual((event["peer"], event["peer_id"]), (str(end.peer), end.peer.id))
        self.assertEqual(event["address"], end.peer.address)
        self.assertTrue(event["error"])
        self.assertEqual(event["seconds"], self.command.deadline if expected.error is CallTimedOut else 0.0)
        self.assertEqual(bool(event["ask"]), expected.sent)
        self.assertEqual(bool(event["reference"]), expected.error is Unhandled)
        self.assertEqual("log_failure" in event, expected.internal and event["direction"] == "in")

    def check_life(self, expected: Expected) -> None:
        self.pump.flush()
        lives = [self.caller.life, self.answerer.life]
        if not expected.alive:
            self.assertEqual(lives, [Life.LOST] * 2)
            return
        self.assertEqual(lives, [Life.READY] * 2)
        if "anonymous" not in (self.calling, self.answering):
            for end in (self.caller, self.answerer):
                pinged = Deferred.fromCoroutine(end.call(Ping))
                self.pump.flush()
                self.assertEqual(self.successResultOf(pinged), {})

    def finish(self) -> None:
        """The link leaves nothing behind."""
        self.caller.abort("the test is over")
        self.answerer.abort("the test is over")
        self.pump.flush()
        self.assertEqual(self.clock.getDelayedCalls(), [])


# Faults. Each makes one happen and says what is expected.

Fault = Callable[[Case], Expected]


def undeclared_exception(case: Case) -> Expected:
    case.link(case.raising(ZeroDivisionError("oops")))
    case.call()
    case.pump.flush()
    return Expected(Unhandled, Unhandled, internal=True)


def deadline_passes_before_it_arrives(case: Case) -> Expected:
    case.link(case.answer())
    case.call()
    case.lose_what_was_written()
    case.clock.advance(case.command.deadline)
    return Expected(CallTimedOut)


def deadline_passes_before_it_is_answered(case: Case) -> Expected:
    case.link(case.slowly)
    case.call()
    case.pump.flush()
    case.clock.advance(case.command.deadline)
    case.asked[0].callback(None)  # too late, and no failure of the answerer's
    case.pump.flush()
    return Expected(CallTimedOut)


def link_is_lost_before_sending(case: Case) -> Expected:
    case.link(case.answer())
    case.answerer.abort("power cut")
    case.pump.flush()
    case.call()
    return Expected(LinkLost, alive=False, sent=False)


def link_is_closing(case: Case) -> Expected:
    case.link(case.answer())
    case.caller.close("going")
    case.call()
    case.pump.flush()
    return Expected(LinkLost, alive=False, sent=False)


def link_is_lost_after_sending(case: Case) -> Expected:
    case.link(case.answer())
    case.call()
    case.lose_what_was_written()
    case.answerer.abort("power cut")
    case.pump.flush()
    return Expected(LinkLost, alive=False)


def link_is_lost_before_the_answer(case: Case) -> Expected:
    case.link(case.slowly)
    case.call()
    case.pump.flush()
    case.caller.abort("power cut")
    case.pump.flush()
    case.asked[0].callback(None)
    return Expected(LinkLost, LinkLost, alive=False)


def error_that_nobody_declared(case: Case) -> Expected:
    case.link(case.answer())
    case.call()
    case.lose_what_was_written()
    case.send_from_answerer((amp.ERROR, b"1"), (amp.ERROR_CODE, b"TEAPOT"), (amp.ERROR_DESCRIPTION, b"short"))
    return Expected(UndeclaredError)


def empty_answer(case: Case) -> Expected:
    case.link(case.answer())
    case.call()
    case.lose_what_was_written()
    case.send_from_answerer((amp.ANSWER, b"1"))
    return Expected(AnswerMalformed)


def endless_answer(case: Case) -> Expected:
    case.link(case.answer())
    case.call()
    case.lose_what_was_written()
    case.send_from_answerer((amp.ANSWER, b"1"), *((b"%d" % number, b"") for number in range(MAX_PAIRS)))
    return Expected(LinkLost, alive=False, said=1)


def answer_that_is_none(case: Case) -> Expected:
    case.link(case.answer(nonsense=1))
    case.call()
    case.pump.flush()
    return Expected(Unhandled, Unhandled, internal=True)


def unreadable_arguments(case: Case) -> Expected:
    case.link(case.answer())
    request = pairs([(amp.COMMAND, case.command.commandName)]) + END
    case.caller.send(case.command, request, 30.0, case.results.append)
    case.pump.flush()
    return Expected(ArgumentsRefused, ArgumentsRefused)


def arguments_that_do_not_fit(case: Case) -> Expected:
    case.link(case.answer())
    case.call(nonsense=1)
    return Expected(ArgumentsInvalid, sent=False)


def not_served(case: Case) -> Expected:
    case.link()
    case.call()
    case.pump.flush()
    return Expected(UnknownCommand, UnknownCommand)


def not_allowed(case: Case) -> Expected:
    case.link()
    case.call()
    case.pump.flush()
    return Expected(NotAllowed, NotAllowed)


def not_registered(case: Case) -> Expected:
    case.link(case.answer(), registered=False)
    case.call()
    case.pump.flush()
    return Expected(NotAllowed, NotAllowed)


def older_peer(case: Case) -> Expected:
    case.link(case.answer())
    case.patch(case.command, "since", 2)
    case.call()
    case.assertFalse(case.caller.transport.getOutBuffer())  # type: ignore[union-attr]  # it is iosim's
    return Expected(PeerTooOld, sent=False)


def peer_that_goes_beyond_the_agreed_version(case: Case) -> Expected:
    case.link(case.answer())
    case.patch(case.command, "since", 2)
    case.caller.agreed(2)
    case.call()
    case.pump.flush()
    return Expected(UnknownCommand, UnknownCommand)


def too_many_calls(case: Case) -> Expected:
    case.link(case.answer())
    for _ in range(MAX_CALLS):
        case.caller.send(case.command, encode(case.command, values(case.command.arguments)), None, lambda result: None)
    case.lose_what_was_written()
    case.call()
    for number in range(MAX_CALLS):
        case.caller.asks.forget(b"%x" % (number + 1))
    return Expected(TooBusy, sent=False)


def too_many_asks(case: Case) -> Expected:
    case.link(case.slowly)
    case.patch(protocol, "MAX_CALLS", 2 * MAX_ANSWERING)
    for _ in range(answering(case.answerer.peer.role)):
        case.caller.send(case.command, encode(case.command, values(case.command.arguments)), None, lambda result: None)
    case.pump.flush()
    case.call()
    case.pump.flush()
    for each in case.asked:
        each.callback(None)
    case.pump.flush()
    return Expected(TooBusy, TooBusy)


def declared(kind: type[Exception]) -> Fault:
    def fault(case: Case) -> Expected:
        case.link(case.raising(kind("because")))
        case.call()
        case.pump.flush()
        return Expected(kind, kind)

    return fault


def argument_too_large(name: str, value: Any) -> Fault:
    def fault(case: Case) -> Expected:
        case.link(case.answer())
        case.call(**{name: value})
        return Expected(ArgumentsInvalid, sent=False)

    return fault


def answer_too_large(name: str, value: Any) -> Fault:
    def fault(case: Case) -> Expected:
        case.link(case.answer(**{name: value}))
        case.call()
        case.pump.flush()
        return Expected(Unhandled, Unhandled, internal=True)

    return fault


def garbled_answer(wire: bytes) -> Fault:
    def fault(case: Case) -> Expected:
        case.link(case.answer())
        case.call()
        case.lose_what_was_written()
        box = case.command.answer_schema.dump(values(case.command.response)) | {wire: b"\xff"}
        case.send_from_answerer((amp.ANSWER, b"1"), *box.items())
        return Expected(AnswerMalformed)

    return fault


# The matrix.


ALWAYS = (
    deadline_passes_before_it_arrives, link_is_lost_before_sending, link_is_closing, link_is_lost_after_sending,
    error_that_nobody_declared, endless_answer, arguments_that_do_not_fit,
)  # fmt: skip

OF_A_RESPONDER = (
    undeclared_exception, answer_that_is_none, deadline_passes_before_it_is_answered, link_is_lost_before_the_answer,
    not_served, too_many_calls, too_many_asks, older_peer, peer_that_goes_beyond_the_agreed_version,
)  # fmt: skip
"""Ping has none: the link itself answers it, always and at once."""

DIRECTIONS = (("rack", "region"), ("region", "rack"), ("anonymous", "region"), ("region", "anonymous"))


def faults(command: type[Command], caller: str) -> Iterator[tuple[str, Fault]]:
    """What can go wrong with ``command`` in a direction in which it is allowed."""
    every = ALWAYS if command is Ping else ALWAYS + OF_A_RESPONDER
    yield from ((fault.__name__, fault) for fault in every)
    yield from ((f"declared_{kind.__name__}", declared(kind)) for kind in command.declared.values())
    if any(not argument.optional for _, argument in command.arguments):
        yield "unreadable_arguments", unreadable_arguments
    if any(not argument.optional for _, argument in command.response):
        yield "empty_answer", empty_answer
    for wire, argument in command.arguments:
        if (value := too_large(argument)) is not None:
            yield f"{wire.decode()}_too_large", argument_too_large(wire.decode(), value)
    for wire, argument in command.response:
        if (value := too_large(argument)) is not None:
            yield f"{wire.decode()}_too_large_in_the_answer", answer_too_large(wire.decode(), value)
        if not isinstance(argument, Bytes):
            yield f"{wire.decode()}_garbled_in_the_answer", garbled_answer(wire)
    if caller == "rack" and not command.unregistered:
        yield "not_registered", not_registered


def cells(command: type[Command]) -> Iterator[tuple[str, str, str, Fault]]:
    """Every cell of ``command``: its name, who calls whom, and the fault."""
    for caller, answerer in DIRECTIONS:
        direction = f"{caller}_to_{answerer}"
        if caller in command.called_by and answerer in command.answered_by:
            for name, fault in faults(command, caller):
                yield f"{direction}_{name}", caller, answerer, fault
        elif command is not Ping or caller == "anonymous":  # whoever enrols may be pinged, which tells nothing
            yield f"{direction}_not_allowed", caller, answerer, not_allowed


def matrix(command: type[Command]) -> type[Case]:
    """A test case with a test for each cell of ``command``."""
    tests: dict[str, Any] = {"command": command, "__doc__": f"What can go wrong with {command.__name__}."}

    def test(caller: str, answerer: str, fault: Fault) -> Callable[[Any], None]:
        def run(self: Any) -> None:
            self.calling, self.answering = caller, answerer
            self.check(fault(self))
            self.finish()

        return run

    for name, caller, answerer, fault in cells(command):
        tests[f"test_{name}"] = test(caller, answerer, fault)
    return type(f"{command.__name__}Faults", (Case,), tests)


for _command in COMMANDS:
    _case = matrix(_command)
    _case.__module__ = __name__
    globals()[_case.__name__] = _case
del _case


class CoverageTests(SynchronousTestCase):
    """The matrix has no holes."""

    def test_every_command_is_there_in_each_direction_that_it_has_and_refused_in_the_others(self) -> None:
        for command in COMMANDS:
            names = [name for name in dir(globals()[f"{command.__name__}Faults"]) if name.startswith("test_")]
            for caller, answerer in itertools.product(command.called_by, command.answered_by):
                if caller != answerer:
                    some = [name for name in names if name.startswith(f"test_{caller}_to_{answerer}_")]
                    self.assertGreater(len(some), len(ALWAYS) - 1, (command, caller, answerer))
            refused = [name for name in names if name.endswith("_not_allowed")]
            self.assertTrue(refused, command)

    def test_a_new_command_is_covered_by_being_declared(self) -> None:
        class Newcomer(Command):
            """A command that somebody adds."""

            arguments = [(b"what", Text())]
            response = [(b"how", Text())]
            called_by = frozenset({"region"})
            answered_by = frozenset({"rack"})

        names = [name for name, *_ in cells(Newcomer)]
        self.assertIn("region_to_rack_undeclared_exception", names)
        self.assertIn("region_to_rack_what_too_large", names)
        self.assertIn("rack_to_region_not_allowed", names)
        self.assertEqual(len(names), len(set(names)))

    def test_the_faults_that_the_design_names_are_all_there(self) -> None:
        names = " ".join(name for command in COMMANDS for name, *_ in cells(command))
        for fault in (
            "declared_", "undeclared_exception", "deadline_passes", "lost_before_sending", "lost_after_sending",
            "garbled_in_the_answer", "too_large", "not_allowed", "not_registered", "not_served", "older_peer",
            "VersionMismatch",
        ):  # fmt: skip
            self.assertTrue(re.search(fault, names), fault)
