"""How AMP boxes are cut out of a stream of bytes, and put in one.

The format is AMP's (https://amp-protocol.net): pairs of key and value, each after its length as 16 bits, and a zero
length at the end. Twisted's own parser is general and slow, and lets a peer send a box without end; this one is a loop
over the bytes as they came, and bounds the box.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from rpc.arguments import KIB, MIB

MAX_KEY: Final = 0xFF
MAX_PAIRS: Final = 512
"""Pairs of a box; the largest blob has some 130 chunks. A pair of few bytes costs over a hundred when it is held."""

MAX_BOX: Final = 12 * MIB
"""Bytes; more than the largest blob needs, so that it is only ever reached by a peer that is broken or hostile."""

MAX_ANONYMOUS_BOX: Final = 16 * KIB
"""Bytes; the same for a peer that has not shown who it is. What it needs to enrol has about one."""

MAX_UNREGISTERED_BOX: Final = 256 * KIB
"""Bytes; the same for a rack that has not registered, and perhaps never will: its certificate may have been revoked."""


class BadBox(ValueError):
    """What the peer sent is not AMP, or too long a box; the text says which."""


def pairs(box: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The bytes of a box's pairs, without the end mark. Keys are 1 to 255 bytes long, values at most 65,535."""
    parts: list[bytes] = []
    for key, value in box:
        parts += (len(key).to_bytes(2, "big"), key, len(value).to_bytes(2, "big"), value)
    return b"".join(parts)


END: Final = b"\0\0"


class Parser:
    """Cuts boxes out of what arrives. ``limit`` bounds the bytes of one box, and may be changed at any time."""

    __slots__ = ("_box", "_rest", "_size", "limit")

    def __init__(self, limit: int = MAX_BOX) -> None:
        self.limit = limit
        self._rest = b""
        self._box: dict[bytes, bytes] = {}
        self._size = 0

    @property
    def empty(self) -> bool:
        """Whether what comes next begins a box."""
        return not self._rest and not self._box

    def feed(self, data: bytes, receive: Callable[[dict[bytes, bytes]], bool]) -> bool:
        """Take ``data``, and call ``receive`` with each box that is complete; when it returns False, stop there, and
        keep the rest for the next time.

        :return: whether everything was read that can be.
        :raises BadBox: if this is not AMP, or the box is longer than the limit. Nothing more may be fed then.
        """
        if self._rest:
            data = self._rest + data
        end = len(data)
        start = 0
        box = self._box
        while start + 2 <= end:
            if data[start]:
                raise BadBox(f"a key of {data[start] << 8 | data[start + 1]} bytes, of at most {MAX_KEY}")
            value = start + 2 + data[start + 1]
            if value == start + 2:
                if not box:
                    raise BadBox("a box with nothing in it")
                start = value
                self._box = {}
                self._size = 0
                if not receive(box):
                    self._rest = data[start:]
                    return False
                box = self._box
                continue
            if value + 2 > end:
                break
            stop = value + 2 + (data[value] << 8 | data[value + 1])
            if self._size + stop - start > self.limit:
                raise BadBox(f"a box of more than {self.limit} bytes")
            if stop > end:
                break
            self._size += stop - start
            if len(box) >= MAX_PAIRS:
                raise BadBox(f"a box of more than {MAX_PAIRS} pairs")
            box[data[start + 2 : value]] = data[value + 2 : stop]
            start = stop
        self._rest = data[start:]
        return True
