"""What arguments may be, and that nothing else gets through."""

from __future__ import annotations

import json
import zlib

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.protocols import amp
from twisted.trial.unittest import SynchronousTestCase

from rpc.arguments import (
    KIB,
    MAX_CHUNK,
    MIB,
    Blob,
    Boolean,
    Bytes,
    Integer,
    Json,
    Malformed,
    Schema,
    Text,
    pack,
)

EVERYTHING = Schema(
    [
        (b"text", Text()),
        (b"number", Integer()),
        (b"flag", Boolean()),
        (b"raw", Bytes()),
        (b"blob", Blob(MIB)),
        (b"json", Json(MIB)),
        (b"maybe", Text(optional=True)),
        (b"maybe_blob", Blob(MIB, optional=True)),
    ]
)

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
ENCODABLE = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)

VALUES = st.fixed_dictionaries(
    {
        "text": ENCODABLE,
        "number": st.integers(-(1 << 63), (1 << 63) - 1),
        "flag": st.booleans(),
        "raw": st.binary(max_size=200),
        "blob": st.binary(max_size=2000),
        "json": JSON_VALUES,
        "maybe": st.none() | ENCODABLE,
        "maybe_blob": st.none() | st.binary(max_size=200),
    }
)


def blob(limit=MIB):
    return Schema([(b"value", Blob(limit))])


def noise(size):
    """Bytes that do not compress."""
    state = 1
    out = bytearray()
    while len(out) < size:
        state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        out += state.to_bytes(8, "big")
    return bytes(out[:size])


class RoundTripTests(SynchronousTestCase):
    @settings(deadline=None)
    @given(VALUES)
    def test_every_value_comes_back_as_it_was(self, values) -> None:
        self.assertEqual(EVERYTHING.load(EVERYTHING.dump(values)), values)

    @settings(deadline=None)
    @given(VALUES)
    def test_every_dumped_box_fits_amps_limits(self, values) -> None:
        box = amp.AmpBox(EVERYTHING.dump(values))
        self.assertEqual(amp.parseString(box.serialize()), [box])

    @settings(deadline=None, max_examples=20)
    @given(st.integers(MAX_CHUNK - 20, 4 * MAX_CHUNK))
    def test_a_value_of_any_length_travels_in_chunks_that_fit(self, size) -> None:
        data = noise(size)
        box = blob().dump({"value": data})
        self.assertTrue(all(len(chunk) <= MAX_CHUNK for chunk in box.values()))
        self.assertEqual(sorted(box)[0], b"value")
        self.assertEqual(blob().load(box), {"value": data})

    def test_a_packed_blob_is_sent_as_it_is(self) -> None:
        packed = pack(b"x" * 100)
        box = blob().dump({"value": packed})
        self.assertEqual(box, {b"value": packed.data})
        self.assertEqual(blob().load(box), {"value": b"x" * 100})

    def test_a_stock_amp_command_can_use_the_arguments(self) -> None:
        class Stock(amp.Command):
            arguments = [(b"blob", Blob()), (b"number", Integer()), (b"maybe", Blob(optional=True))]

        values = {"blob": noise(200_000), "number": 7}
        box = Stock.makeArguments(dict(values), None)
        self.assertIn(b"blob.4", box)
        self.assertEqual(Stock.parseArguments(box, None), {**values, "maybe": None})


class SendingTests(SynchronousTestCase):
    """What does not fit is refused before it is sent, by name."""

    def refused(self, name, value) -> str:
        values = {"text": "", "number": 0, "flag": True, "raw": b"", "blob": b"", "json": None, name: value}
        return str(self.assertRaises(Malformed, EVERYTHING.dump, values))

    def test_a_value_of_the_wrong_type_is_refused_by_name(self) -> None:
        wrong: dict[str, list[object]] = {
            "text": [b"", 1, None, "\ud800"],
            "number": ["1", 1.0, True, None, 1 << 63, -(1 << 63) - 1],
            "flag": [1, 0, "True", None],
            "raw": ["", 1, None, bytearray(b"")],
            "blob": ["", 1, None],
            "json": [{1, 2}, b"", float("nan"), object()],
        }
        for name, values in wrong.items():
            for value in values:
                self.assertTrue(self.refused(name, value).startswith(f"{name}: "), (name, value))

    def test_what_is_too_long_for_one_chunk_is_refused(self) -> None:
        self.assertEqual(self.refused("text", "x" * 65536), "text is 65536 bytes, more than the 65535 that fit")
        self.assertEqual(self.refused("raw", b"x" * 65536), "raw is 65536 bytes, more than the 65535 that fit")

    def test_what_is_over_its_limit_is_refused_however_well_it_compresses(self) -> None:
        self.assertIn("more than the limit of 1048576", self.refused("blob", bytes(MIB + 1)))
        self.assertIn("more than the limit of 1048576", self.refused("blob", pack(bytes(MIB + 1))))
        self.assertIn("more than the limit of 1048576", self.refused("json", "x" * MIB))

    def test_json_that_is_nested_without_end_is_refused(self) -> None:
        endless: list[object] = []
        endless.append(endless)
        self.assertIn("json: ", self.refused("json", endless))

    def test_an_unknown_and_a_missing_argument_are_named(self) -> None:
        schema = Schema([(b"a", Text()), (b"b", Text())])
        self.assertEqual(str(self.assertRaises(Malformed, schema.dump, {"a": ""})), "b is missing")
        self.assertIn("no c;", str(self.assertRaises(Malformed, schema.dump, {"a": "", "b": "", "c": ""})))


class ReadingTests(SynchronousTestCase):
    """What a stranger sent is a value of the right kind, or Malformed."""

    @settings(deadline=None)
    @given(
        st.dictionaries(
            st.sampled_from([b"text", b"number", b"flag", b"raw", b"blob", b"blob.2", b"json", b"json.2", b"maybe"]),
            st.binary(max_size=40) | st.binary(max_size=40).map(zlib.compress) | st.sampled_from([b"True", b"12"]),
        )
    )
    def test_garbage_is_malformed_and_nothing_else(self, box) -> None:
        try:
            values = EVERYTHING.load(box)
        except Malformed as error:
            self.assertRegex(str(error), r"^(text|number|flag|raw|blob|json|maybe)(:| is missing)")
        else:
            self.assertIsInstance(values["text"], str)
            self.assertIsInstance(values["blob"], bytes)

    def loaded(self, data, *more) -> object:
        box = {b"value": data, **{b"value.%d" % number: chunk for number, chunk in enumerate(more, 2)}}
        return blob().load(box)["value"]

    def test_a_bomb_is_refused_without_being_inflated(self) -> None:
        bomb = zlib.compress(bytes(60 * MIB), 9)
        inflated = []
        original = zlib.decompressobj

        class Counting:
            def __init__(self) -> None:
                self._inner = original()

            def decompress(self, data, limit):
                result = self._inner.decompress(data, limit)
                inflated.append(len(result))
                return result

        self.patch(zlib, "decompressobj", Counting)
        error = self.assertRaises(Malformed, self.loaded, bomb[:MAX_CHUNK], bomb[MAX_CHUNK:])
        self.assertEqual(str(error), "value: it inflates to more than the limit of 1048576 bytes")
        self.assertEqual(inflated, [MIB + 1])

    def test_a_value_of_just_the_limit_is_taken(self) -> None:
        self.assertEqual(self.loaded(zlib.compress(bytes(MIB))), bytes(MIB))

    def test_a_missing_chunk_is_noticed(self) -> None:
        data = pack(noise(300_000)).data
        chunks = [data[start : start + MAX_CHUNK] for start in range(0, len(data), MAX_CHUNK)]
        box = {b"value": chunks[0], b"value.2": chunks[1], b"value.4": chunks[3], b"value.5": chunks[4]}
        self.assertRaises(Malformed, blob().load, box)
        self.assertIn("chunk is missing", str(self.assertRaises(Malformed, self.loaded, *chunks[:-1])))

    def test_chunks_in_the_wrong_order_are_noticed(self) -> None:
        data = pack(noise(150_000)).data
        self.assertRaises(
            Malformed, self.loaded, data[:MAX_CHUNK], data[2 * MAX_CHUNK :], data[MAX_CHUNK : 2 * MAX_CHUNK]
        )

    @settings(deadline=None)
    @given(st.binary(min_size=1, max_size=300), st.data())
    def test_a_flipped_bit_never_gives_another_value(self, value, data) -> None:
        packed = bytearray(pack(value).data)
        packed[data.draw(st.integers(0, len(packed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        try:
            self.assertEqual(self.loaded(bytes(packed)), value)
        except Malformed as error:
            self.assertTrue(str(error).startswith("value: "))

    def test_bytes_after_the_value_are_refused(self) -> None:
        self.assertIn("2 bytes follow", str(self.assertRaises(Malformed, self.loaded, zlib.compress(b"x") + b"yz")))

    def test_json_that_is_no_json_is_refused(self) -> None:
        schema = Schema([(b"value", Json(64 * KIB))])
        for text in (
            b"",
            b"{",
            b"NaN",
            b"-Infinity",
            b"1e999",
            b"[-1e400]",
            b"\xff",
            b"[" * 60_000,
            b"1" * 5_000,
            b"{} {}",
        ):
            error = self.assertRaises(Malformed, schema.load, {b"value": zlib.compress(text)})
            self.assertTrue(str(error).startswith("value: "), text[:20])

    def test_numbers_and_booleans_are_read_strictly(self) -> None:
        numbers = Schema([(b"value", Integer())])
        for text in (b"", b" 1", b"1 ", b"1_0", b"+1", b"1.0", b"0x1", b"9223372036854775808", b"1" * 5000, b"1\n"):
            self.assertRaises(Malformed, numbers.load, {b"value": text})
        flags = Schema([(b"value", Boolean())])
        for text in (b"", b"true", b"1", b"True\n"):
            self.assertRaises(Malformed, flags.load, {b"value": text})

    def test_keys_that_are_not_known_are_left_alone(self) -> None:
        self.assertEqual(Schema([(b"a", Text())]).load({b"a": b"x", b"later": b"y"}), {"a": "x"})

    def test_an_argument_of_another_family_is_refused_when_the_table_is_made(self) -> None:
        self.assertRaises(TypeError, Schema, [(b"a", amp.Unicode())])


class JsonTests(SynchronousTestCase):
    @settings(deadline=None)
    @given(JSON_VALUES)
    def test_json_is_sent_as_text_that_any_peer_can_read(self, value) -> None:
        box = Schema([(b"value", Json())]).dump({"value": value})
        self.assertEqual(json.loads(zlib.decompress(box[b"value"])), value)
