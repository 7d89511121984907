"""The box parser agrees with Twisted's, however the bytes come in, and ends what is no box."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.protocols import amp
from twisted.trial.unittest import SynchronousTestCase

from rpc.boxes import END, BadBox, Parser, pairs

BOXES = st.lists(
    st.dictionaries(st.binary(min_size=1, max_size=255), st.binary(max_size=700), min_size=1, max_size=5), max_size=6
)


def fed(*pieces, limit=1 << 20):
    boxes: list[dict[bytes, bytes]] = []

    def receive(box):
        boxes.append(box)
        return True

    parser = Parser(limit)
    for piece in pieces:
        parser.feed(piece, receive)
    return boxes


class ParserTests(SynchronousTestCase):
    @settings(deadline=None)
    @given(BOXES, st.lists(st.integers(0, 5000)))
    def test_boxes_come_out_whole_wherever_the_stream_is_cut(self, boxes, cuts) -> None:
        stream = b"".join(amp.AmpBox(box).serialize() for box in boxes)
        places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
        pieces = [stream[start:stop] for start, stop in itertools.pairwise(places)]
        self.assertEqual(fed(*pieces), boxes)

    @settings(deadline=None)
    @given(BOXES)
    def test_a_byte_at_a_time_is_enough(self, boxes) -> None:
        stream = b"".join(amp.AmpBox(box).serialize() for box in boxes)
        self.assertEqual(fed(*(stream[at : at + 1] for at in range(len(stream)))), boxes)

    @settings(deadline=None)
    @given(BOXES)
    def test_twisted_reads_what_is_written(self, boxes) -> None:
        stream = b"".join(pairs(box.items()) + END for box in boxes)
        self.assertEqual(amp.parseString(stream), boxes)

    @settings(deadline=None)
    @given(st.binary(max_size=400))
    def test_garbage_ends_in_boxes_or_in_a_bad_box(self, garbage) -> None:
        try:
            boxes = fed(garbage)
        except BadBox:
            return
        self.assertTrue(all(box for box in boxes))

    def test_the_longest_key_and_value_pass(self) -> None:
        box = {b"k" * 255: b"v" * 65535}
        self.assertEqual(fed(pairs(box.items()) + END), [box])

    def test_a_key_that_is_too_long_is_refused(self) -> None:
        self.assertIn("a key of 256 bytes", str(self.assertRaises(BadBox, fed, b"\x01\x00" + b"k" * 256)))

    def test_a_box_with_nothing_in_it_is_refused(self) -> None:
        self.assertRaises(BadBox, fed, END)

    def test_a_box_without_end_is_cut_off_at_the_limit(self) -> None:
        pair = pairs([(b"k", b"v" * 65535)])
        error = self.assertRaises(BadBox, fed, *([pair] * 10), limit=300_000)
        self.assertEqual(str(error), "a box of more than 300000 bytes")

    def test_a_value_that_is_too_long_for_the_limit_is_refused_before_it_came(self) -> None:
        error = self.assertRaises(BadBox, fed, b"\0\1k" + (5000).to_bytes(2, "big"), limit=4000)
        self.assertEqual(str(error), "a box of more than 4000 bytes")

    def test_the_limit_is_for_each_box_and_not_for_the_stream(self) -> None:
        box = {b"k": b"v" * 60000}
        self.assertEqual(fed(*([pairs(box.items()) + END] * 10), limit=100_000), [box] * 10)

    def test_nothing_is_read_after_the_receiver_has_had_enough_and_the_rest_is_read_later(self) -> None:
        boxes: list[dict[bytes, bytes]] = []

        def receive(box):
            boxes.append(box)
            return False

        parser = Parser()
        self.assertFalse(parser.feed((pairs([(b"a", b"1")]) + END) * 3 + b"\0\1", receive))
        self.assertEqual(len(boxes), 1)

        def receive_all(box):
            boxes.append(box)
            return True

        self.assertTrue(parser.feed(b"b\0\0\0\0", receive_all))
        self.assertEqual(boxes, [{b"a": b"1"}] * 3 + [{b"b": b""}])
