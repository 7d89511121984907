"""Whatever bytes a peer sends, to either end: no crash, no hang, bounded memory, a typed error or the link's end, and
each said once.

``STANCHION_SOAK=N`` tries N times as many examples.
"""

from __future__ import annotations

import itertools
import tracemalloc
import zlib
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.logger import LogLevel, globalLogPublisher
from twisted.protocols import amp
from twisted.trial.unittest import SynchronousTestCase

from rpc.arguments import MAX_CHUNK, MIB
from rpc.boxes import END, MAX_ANONYMOUS_BOX, MAX_BOX, MAX_KEY, MAX_PAIRS, pairs
from rpc.commands import COMMANDS, Command, DeclaredError, Ping
from rpc.failures import CallFailed
from rpc.limits import MAX_ANSWERING
from rpc.protocol import MAX_TAG, Life, Link, Responders
from rpc.reporting import FailedCall
from rpc.testing import ANONYMOUS, RACK, REGION, RecordingReporter
from tests.examples import examples

SAMPLES: dict[str, Any] = {
    "text": "x", "integer": 1, "boolean": True, "bytes": b"x", "blob": b"x", "JSON": [1],
}  # fmt: skip

ENDS = (("region", RACK), ("region", ANONYMOUS), ("rack", REGION), ("anonymous", REGION))
"""What an end is, and who sends to it."""

ENVELOPE = [b"_ask", b"_answer", b"_error", b"_error_code", b"_error_description", b"_error_reference", b"_command"]
NAMES = sorted({wire for command in COMMANDS for wire, _ in (*command.arguments, *command.response)})
CHUNKED = [b"%b.%d" % (name, number) for name in NAMES for number in (1, 2, 3)]
CODES = sorted({code for command in COMMANDS for code in command.declared})


def sample(arguments: Any) -> dict[str, Any]:
    """A value for each of ``arguments``."""
    return {name.decode("ascii"): SAMPLES[argument.kind] for name, argument in arguments}


def packed(data: bytes) -> bytes:
    return zlib.compress(data, 1)


JSON_TEXTS = st.sampled_from(
    [
        b"", b"[1]", b"{}", b"[", b"NaN", b"1e999", b"-0", b'"\\ud800"', b"\xff", b"[" * 3000, b"9" * 5000,
        b'{"a":1,"a":2}',
    ]
)  # fmt: skip
VALUES = (
    st.binary(max_size=40)
    | st.sampled_from([b"", b"1", b"-1", b"2", b"True", b"False", b"x", b"0" * 20, b"9" * 19, b"a" * MAX_CHUNK])
    | st.sampled_from([command.commandName for command in COMMANDS] + CODES)
    | JSON_TEXTS.map(packed)
    | st.builds(lambda text, cut: packed(text)[:cut], JSON_TEXTS, st.integers(0, 30))
    | st.builds(lambda text, more: packed(text) + more, JSON_TEXTS, st.binary(max_size=5))
    | st.just(packed(bytes(MIB)))
)
KEYS = st.sampled_from(ENVELOPE + NAMES) | st.sampled_from(CHUNKED) | st.binary(min_size=1, max_size=MAX_KEY)
BOXES = st.dictionaries(KEYS, VALUES, min_size=1, max_size=8)


@st.composite
def asks(draw: Any) -> dict[bytes, bytes]:
    """An ask that is right but for something."""
    command = draw(st.sampled_from(COMMANDS))
    values = sample(command.arguments)
    box = dict(command.argument_schema.dump(values))
    box |= {amp.COMMAND: command.commandName, amp.ASK: draw(st.binary(max_size=34) | st.just(b"1" * 33))}
    return _spoilt(draw, box)


@st.composite
def answers(draw: Any) -> dict[bytes, bytes]:
    """An answer or an error that is right but for something."""
    command = draw(st.sampled_from(COMMANDS))
    tag = draw(st.sampled_from([b"1", b"2", b"3", b"4", b"99", b"zz", b"-1", b"0", b" 1", b""]))
    if draw(st.booleans()):
        values = sample(command.response)
        return _spoilt(draw, {**command.answer_schema.dump(values), amp.ANSWER: tag})
    return _spoilt(draw, {amp.ERROR: tag, amp.ERROR_CODE: draw(VALUES), amp.ERROR_DESCRIPTION: draw(VALUES)})


def _spoilt(draw: Any, box: dict[bytes, bytes]) -> dict[bytes, bytes]:
    match draw(st.integers(0, 3)):
        case 0:
            box = box | draw(BOXES)
        case 1:
            box.pop(draw(st.sampled_from(sorted(box))))
        case 2:
            box[draw(st.sampled_from(sorted(box)))] = draw(VALUES)
    return box


def encoded(box: dict[bytes, bytes]) -> bytes:
    return pairs(box.items()) + END


STREAMS = st.lists(
    st.binary(max_size=60) | BOXES.map(encoded) | asks().map(encoded) | answers().map(encoded), max_size=8
).map(b"".join)
"""What a peer may send: boxes of all kinds, and garbage between them."""


class Attacked:
    """One end, with three calls under way, to which a peer sends what it likes."""

    def __init__(self, role: Any, peer: Any) -> None:
        self.clock = Clock()
        self.reports = RecordingReporter()
        self.waiting: list[Deferred[None]] = []
        table = {command: self.responder(command) for command in COMMANDS if role in command.answered_by}
        self.link = Link(
            Responders(role, table), clock=self.clock, peer=peer, interval=0, reporter=self.reports
        )  # fmt: skip
        self.transport = StringTransport()
        self.transport.abortConnection = lambda: None  # type: ignore[method-assign]  # its own cannot take one
        self.link.makeConnection(self.transport)
        if peer is not ANONYMOUS:
            self.link.agreed(1)
        self.ended: list[Any] = []
        self.calls = [command for command in COMMANDS if role in command.called_by][:3]
        for command in self.calls:
            values = sample(command.arguments)
            called = Deferred.fromCoroutine(self.link.call(command, **values))
            called.addBoth(self.ended.append)
        self.transport.clear()

    def responder(self, command: type[Command]) -> Any:
        async def answer(link: Link, **arguments: Any) -> Any:
            if len(self.waiting) % 2:
                self.waiting.append(Deferred())
                await self.waiting[-1]
            self.waiting.append(Deferred())
            return sample(command.response)

        return answer

    def finish(self) -> None:
        """Whatever still waits comes to its end."""
        for each in self.waiting:
            each.callback(None)
        self.clock.advance(max(command.deadline for command in COMMANDS))
        self.link.connectionLost()


class BadInput(SynchronousTestCase):
    def setUp(self) -> None:
        self.events: list[Any] = []
        observer: Any = self.events.append
        globalLogPublisher.addObserver(observer)
        self.addCleanup(globalLogPublisher.removeObserver, observer)

    def attack(self, end: Any, *pieces: bytes) -> Attacked:
        """Send ``pieces`` to an end, and check everything that must hold whatever they are."""
        self.events.clear()
        attacked = Attacked(*end)
        link = attacked.link
        for piece in pieces:
            link.dataReceived(piece)
        cut = link.life is Life.CLOSING
        held = link._parser
        self.assertLess(len(held._rest), MAX_KEY + MAX_CHUNK + 4)
        self.assertLessEqual(len(held._box), MAX_PAIRS)
        self.assertTrue(cut or held._size <= held.limit)
        self.assertLessEqual(link._answering, MAX_ANSWERING)
        written = attacked.transport.value()
        boxes = amp.parseString(written) if written else []
        attacked.finish()
        # Every call of this end's has ended, in a way that has a type, and every failure was reported once.
        self.assertEqual(len(attacked.ended), len(attacked.calls))
        failed = [one.value for one in attacked.ended if not isinstance(one, dict)]
        self.assertTrue(all(isinstance(error, CallFailed | DeclaredError) for error in failed), failed)
        reported = self.reported(attacked, "out")
        self.assertEqual(sorted(call.kind for call in reported), sorted(type(error).__name__ for error in failed))
        # Every ask was answered once, with its values or with a typed error that was reported once.
        errors = [box for box in boxes if amp.ERROR in box]
        lost = [call for call in self.reported(attacked, "in") if call.kind == "LinkLost"]
        self.assertEqual(len(self.reported(attacked, "in")) - len(lost), len(errors))
        self.assertTrue(all(box[amp.ERROR_CODE] and amp.ERROR_DESCRIPTION in box for box in errors))
        self.assertFalse([call for call in attacked.reports.calls if call.failure is not None], "an internal error")
        self.assertTrue(all(len(box.get(amp.ERROR, box.get(amp.ANSWER, b""))) <= MAX_TAG for box in boxes))
        # What cut the link is in the log once, and nothing else is.
        loud = [event for event in self.events if event["log_level"] >= LogLevel.warn]
        self.assertEqual(len(loud), int(cut), loud)
        self.assertEqual(attacked.clock.getDelayedCalls(), [])
        return attacked

    def reported(self, attacked: Attacked, direction: str) -> list[FailedCall]:
        return [call for call in attacked.reports.calls if call.direction == direction]


class AnythingTests(BadInput):
    @examples(700)
    @given(st.sampled_from(ENDS), st.binary(max_size=300))
    def test_any_bytes(self, end, data) -> None:
        self.attack(end, data)

    @examples(700)
    @given(st.sampled_from(ENDS), STREAMS, st.lists(st.integers(0, 2000), max_size=3))
    def test_any_boxes_however_they_are_cut(self, end, stream, cuts) -> None:
        places = [0, *sorted(cuts), len(stream)]
        self.attack(end, *(stream[start:stop] for start, stop in itertools.pairwise(places)))

    @examples(500)
    @given(st.sampled_from(ENDS), asks())
    def test_asks_that_are_nearly_right(self, end, box) -> None:
        self.attack(end, encoded(box))

    @examples(120)
    @given(
        st.sampled_from([(command, *one) for command in COMMANDS for one in command.arguments]),
        st.sampled_from([(command, *one) for command in COMMANDS for one in command.response]),
        VALUES | JSON_TEXTS.map(packed),
    )
    def test_each_value_of_each_command(self, asked, answered, value) -> None:
        for (command, wire, _), schema, envelope in (
            (asked, asked[0].argument_schema, {amp.ASK: b"1", amp.COMMAND: asked[0].commandName}),
            (answered, answered[0].answer_schema, {amp.ANSWER: b"1"}),
        ):
            arguments = command.arguments if amp.ASK in envelope else command.response
            for end in ENDS:
                self.attack(end, encoded({**schema.dump(sample(arguments)), wire: value, **envelope}))

    @examples(500)
    @given(st.sampled_from(ENDS), st.lists(answers(), min_size=1, max_size=4))
    def test_answers_that_are_nearly_right(self, end, boxes) -> None:
        self.attack(end, b"".join(encoded(box) for box in boxes))

    @examples(300)
    @given(st.sampled_from(ENDS), STREAMS, st.integers(0, 4000), st.integers(0, 7))
    def test_a_bit_that_fell_over(self, end, stream, place, bit) -> None:
        data = bytearray(stream or b"\0")
        data[place % len(data)] ^= 1 << bit
        self.attack(end, bytes(data))

    @examples(300)
    @given(
        st.sampled_from([command for command in COMMANDS if command is not Ping]),
        st.lists(st.binary(max_size=80) | VALUES, min_size=1, max_size=4),
        st.permutations([1, 2, 3, 4]),
    )
    def test_chunks_in_any_order_with_any_of_them_missing(self, command, chunks, order) -> None:
        for role, peer, tag, schema in (
            ("region", RACK, {amp.ASK: b"1", amp.COMMAND: command.commandName}, command.arguments),
            ("rack", REGION, {amp.ASK: b"1", amp.COMMAND: command.commandName}, command.arguments),
            ("region", RACK, {amp.ANSWER: b"1"}, command.response),
            ("rack", REGION, {amp.ANSWER: b"1"}, command.response),
        ):
            box: dict[bytes, bytes] = dict(tag)
            for name, _ in schema:
                for number, chunk in zip(order, chunks, strict=False):
                    box[name if number == 1 else b"%b.%d" % (name, number)] = chunk
            self.attack((role, peer), encoded(box))


class MemoryTests(BadInput):
    """What arrives over hours in hostile shapes does not pile up."""

    def peak(self, end: Any, *pieces: bytes) -> int:
        tracemalloc.start()
        try:
            self.attack(end, *pieces)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    def test_a_value_that_never_ends_is_held_once(self) -> None:
        start = pairs([(b"_ask", b"1")]) + b"\0\x01k\xff\xff"
        self.assertLess(self.peak(("region", RACK), start, *([b"x"] * 3000)), MIB)

    def test_a_box_that_never_ends_is_held_up_to_its_bound(self) -> None:
        for end, bound in ((("region", RACK), MAX_BOX), (("region", ANONYMOUS), MAX_ANONYMOUS_BOX)):
            pair = [pairs([(b"%03d" % number, bytes(MAX_CHUNK))]) for number in range(bound // MAX_CHUNK + 2)]
            self.assertLess(self.peak(end, *pair), 2 * bound + 2 * MIB)

    def test_bombs_are_inflated_one_at_a_time_and_up_to_their_bound(self) -> None:
        bomb = zlib.compress(bytes(200 * MIB), 9)
        starts = range(0, len(bomb), MAX_CHUNK)
        names = (b"versions" if number == 1 else b"versions.%d" % number for number in range(1, len(starts) + 1))
        chunks = {name: bomb[start : start + MAX_CHUNK] for name, start in zip(names, starts, strict=True)}
        box = {amp.ASK: b"1", amp.COMMAND: b"Register", b"name": b"", b"software": b"", **chunks}
        tracemalloc.start()
        try:
            attacked = self.attack(("region", RACK), *([encoded(box)] * 20))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        self.assertEqual([call.kind for call in self.reported(attacked, "in")], ["ArgumentsRefused"] * 20)
        self.assertLess(peak, 12 * MIB)
