"""How values become bytes in a box, and how they are read back from bytes that a stranger may have written.

A box's values are at most 65,535 bytes. What may be longer travels compressed and cut in numbered chunks, and its
receiver bounds what it may inflate to. Reading anything malformed is one typed error, :class:`Malformed`, that names
the argument: never a wrong value, and never another exception.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from attrs import field, frozen
from twisted.protocols import amp

MAX_CHUNK: Final = 0xFFFF
"""Bytes; AMP's limit for one value."""

KIB: Final = 1024
MIB: Final = 1024 * KIB

JSON_LIMIT: Final = 1 * MIB
"""Bytes; the default bound of a JSON value. Parsing that much takes the reactor under 20 ms."""

BLOB_LIMIT: Final = 8 * MIB
"""Bytes; the default bound of a blob: an inventory of some 25,000 files. Inflating that much takes some 30 ms."""

_INTEGER: Final = re.compile(rb"-?[0-9]{1,19}\Z")
_INT64: Final = range(-(1 << 63), 1 << 63)

Box = Mapping[bytes, bytes]
"""The keys and values of one AMP box."""


class Malformed(ValueError):
    """A value is not what its argument must be; the text names the argument and says what is wrong with it."""


class Argument(amp.Argument):
    """A value that fits in one chunk. Subclasses convert, and raise ValueError for what does not fit."""

    kind = ""
    """What the documentation calls the type."""

    def __init__(self, optional: bool = False) -> None:
        self.optional = optional

    def toString(self, value: Any) -> bytes:
        """The bytes of ``value``."""
        raise TypeError(f"{type(self).__name__} is not a type of argument")

    def fromString(self, data: bytes) -> Any:
        """The value that ``data`` stands for."""
        raise TypeError(f"{type(self).__name__} is not a type of argument")


class Text(Argument):
    """Text, as UTF-8; at most 65,535 bytes of it."""

    kind = "text"

    def toString(self, value: Any) -> bytes:
        if not isinstance(value, str):
            raise ValueError(f"{value!r} is not text")
        return value.encode("utf-8")

    def fromString(self, data: bytes) -> str:
        return data.decode("utf-8")


class Integer(Argument):
    """A whole number of 64 bits, in decimal digits."""

    kind = "integer"

    def toString(self, value: Any) -> bytes:
        if type(value) is not int or value not in _INT64:
            raise ValueError(f"{value!r} is not a whole number of 64 bits")
        return b"%d" % value

    def fromString(self, data: bytes) -> int:
        if _INTEGER.match(data) is None or (value := int(data)) not in _INT64:
            raise ValueError(f"{_shown(data)} is not a whole number of 64 bits")
        return value


class Boolean(Argument):
    """``True`` or ``False``, spelled so."""

    kind = "boolean"

    def toString(self, value: Any) -> bytes:
        if value is True:
            return b"True"
        if value is False:
            return b"False"
        raise ValueError(f"{value!r} is neither True nor False")

    def fromString(self, data: bytes) -> bool:
        if data == b"True":
            return True
        if data == b"False":
            return False
        raise ValueError(f"{_shown(data)} is neither True nor False")


class Bytes(Argument):
    """Bytes as they are; at most 65,535 of them."""

    kind = "bytes"

    def toString(self, value: Any) -> bytes:
        if not isinstance(value, bytes):
            raise ValueError(f"{type(value).__name__} is not bytes")
        return value

    def fromString(self, data: bytes) -> bytes:
        return data


@frozen
class Packed:
    """A blob that is compressed already, so that sending it again costs the reactor nothing: see :func:`pack`."""

    size: int
    data: bytes = field(repr=False)


def pack(data: bytes) -> Packed:
    """Compress ``data`` for the wire. Do it in a thread if it is large; any number of answers may share the result."""
    # Level 1: manifests are hexadecimal digests with some text, and higher levels gain little for thrice the time.
    return Packed(len(data), zlib.compress(data, 1))


class Blob(Argument):
    """Bytes of any length up to ``limit``: zlib-compressed, in chunks ``name``, ``name.2``, ``name.3``, ….

    Takes ``bytes`` or :class:`Packed`, gives ``bytes``.
    """

    kind = "blob"

    def __init__(self, limit: int = BLOB_LIMIT, optional: bool = False) -> None:
        super().__init__(optional)
        self.limit = limit

    def toBox(self, name: bytes, strings: dict[bytes, bytes], objects: dict[str, Any], proto: object) -> None:
        """Put the chunks of ``objects[name]`` in ``strings``. The signature is AMP's."""
        value = objects.pop(name.decode("ascii"), None)
        if value is None and self.optional:
            return
        self.put(name, value, strings)

    def fromBox(self, name: bytes, strings: dict[bytes, bytes], objects: dict[str, Any], proto: object) -> None:
        """Put the value of the chunks in ``strings`` in ``objects[name]``. The signature is AMP's."""
        absent = self.optional and name not in strings
        objects[name.decode("ascii")] = None if absent else self.get(name, strings)

    def put(self, name: bytes, value: Any, box: dict[bytes, bytes]) -> None:
        """Add the chunks of ``value`` to ``box``.

        :raises ValueError: if the value is of another type or too large.
        """
        packed = self._pack(value)
        if packed.size > self.limit:
            raise ValueError(f"it is {packed.size} bytes, more than the limit of {self.limit}")
        box[name] = packed.data[:MAX_CHUNK]
        for number, start in enumerate(range(MAX_CHUNK, len(packed.data), MAX_CHUNK), 2):
            box[b"%b.%d" % (name, number)] = packed.data[start : start + MAX_CHUNK]

    def get(self, name: bytes, box: Box) -> Any:
        """The value whose chunks ``box`` has.

        :raises ValueError: if they are no value that this argument may have. KeyError if the first one is missing.
        """
        chunks = [box[name]]
        while (chunk := box.get(b"%b.%d" % (name, len(chunks) + 1))) is not None:
            chunks.append(chunk)
        inflater = zlib.decompressobj()
        try:
            data = inflater.decompress(b"".join(chunks), self.limit + 1)
        except zlib.error as error:
            raise ValueError(f"its compressed data is damaged ({error})") from error
        if len(data) > self.limit:
            raise ValueError(f"it inflates to more than the limit of {self.limit} bytes")
        if not inflater.eof:
            raise ValueError("its compressed data is cut off, or a chunk is missing")
        if inflater.unused_data:
            raise ValueError(f"{len(inflater.unused_data)} bytes follow its compressed data")
        return self._unpack(data)

    def _pack(self, value: Any) -> Packed:
        if isinstance(value, Packed):
            return value
        if not isinstance(value, bytes):
            raise ValueError(f"{type(value).__name__} is not bytes")
        if len(value) > self.limit:
            return Packed(len(value), b"")
        return pack(value)

    def _unpack(self, data: bytes) -> Any:
        return data


class Json(Blob):
    """Any JSON value whose text is at most ``limit`` bytes, sent as a :class:`Blob` is."""

    kind = "JSON"

    def __init__(self, limit: int = JSON_LIMIT, optional: bool = False) -> None:
        super().__init__(limit, optional)

    def _pack(self, value: Any) -> Packed:
        try:
            text = json.dumps(value, allow_nan=False, separators=(",", ":"))
        except (TypeError, RecursionError) as error:
            raise ValueError(f"it cannot be written as JSON: {error}") from error
        return super()._pack(text.encode("ascii"))

    def _unpack(self, data: bytes) -> Any:
        try:
            return json.loads(data, parse_constant=_refuse_constant, parse_float=_finite)
        except RecursionError as error:
            raise ValueError("its JSON is nested too deeply") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"its JSON has the number {name}, which no JSON has")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"its JSON has the number {text[:40]}, which is too large")
    return value


def _shown(data: bytes) -> str:
    return repr(data if len(data) <= 40 else data[:40] + b"...")


@frozen
class _Field:
    wire: bytes
    name: str
    argument: Argument
    load: Callable[[bytes], Any] | None
    """For an argument of one chunk, what reads it."""


class Schema:
    """The arguments of a command, or of its answer: values to box and back. Keys that it does not know are left alone,
    so that a later version may add some."""

    def __init__(self, arguments: Iterable[tuple[bytes, amp.Argument]]) -> None:
        self._fields: list[_Field] = []
        for wire, argument in arguments:
            if not isinstance(argument, Argument):
                raise TypeError(f"argument {wire!r} is a {type(argument).__name__}, not one of rpc.arguments")
            load = None if isinstance(argument, Blob) else argument.fromString
            self._fields.append(_Field(wire, wire.decode("ascii"), argument, load))
        self._plan = [(each.wire, each.name, each.load, each.argument) for each in self._fields]
        self._names = {each.name for each in self._fields}

    def dump(self, values: Mapping[str, Any]) -> dict[bytes, bytes]:
        """The box for ``values``; an optional one may be None or missing.

        :raises Malformed: if one is missing, unknown, of another type or too long.
        """
        if unknown := values.keys() - self._names:
            raise Malformed(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(sorted(self._names))}")
        box: dict[bytes, bytes] = {}
        for each in self._fields:
            value = values.get(each.name)
            if value is None and each.argument.optional:
                continue
            if each.name not in values:
                raise Malformed(f"{each.name} is missing")
            try:
                if isinstance(each.argument, Blob):
                    each.argument.put(each.wire, value, box)
                    continue
                data = each.argument.toString(value)
            except ValueError as error:
                raise Malformed(f"{each.name}: {error}") from error
            if len(data) > MAX_CHUNK:
                raise Malformed(f"{each.name} is {len(data)} bytes, more than the {MAX_CHUNK} that fit")
            box[each.wire] = data
        return box

    def load(self, box: Box) -> dict[str, Any]:
        """The values in ``box``; an optional one that is missing is None.

        :raises Malformed: if one is missing or is not what it must be.
        """
        values: dict[str, Any] = {}
        for wire, name, load, argument in self._plan:
            try:
                data = box[wire]
                values[name] = load(data) if load is not None else argument.get(wire, box)  # type: ignore[attr-defined]  # only a Blob has no load
            except KeyError:
                if not argument.optional:
                    raise Malformed(f"{name} is missing") from None
                values[name] = None
            except ValueError as error:
                raise Malformed(f"{name}: {error}") from error
        return values
