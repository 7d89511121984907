"""How is an XML document of a node read: as a stream of elements, never as a tree, and within bounds.

There are no document types, hence no entities and nothing to fetch; the depth, the number of elements and each
element's text are bounded. Characters that XML does not have, which firmware is fond of, become U+FFFD.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final
from xml.parsers import expat

from attrs import define, field

from region.hardware.outputs import HookError, output_bytes

MAX_DOCUMENT: Final = 4 << 20
"""Bytes of a document."""

MAX_DEPTH: Final = 100
MAX_ELEMENTS: Final = 300_000

MAX_ELEMENT_TEXT: Final = 4096
"""Characters of an element's own text; what is over that is left out."""

_CHUNK: Final = 1 << 15
_NOT_XML: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")


def read_document(
    outputs: Mapping[str, bytes],
    begin: Callable[[str, Mapping[str, str]], None],
    end: Callable[[str, str], None],
) -> None:
    """Call ``begin(name, attributes)`` and ``end(name, text)`` for each element that a script printed.

    :raises HookError: if what it printed is no such document, or one that is too large.
    """
    data = output_bytes(outputs, MAX_DOCUMENT)
    reader = _Reader(begin, end)
    parser = expat.ParserCreate()
    parser.buffer_text = True
    parser.StartElementHandler = reader.begin
    parser.EndElementHandler = reader.end
    parser.CharacterDataHandler = reader.text
    parser.StartDoctypeDeclHandler = _refuse_type
    try:
        for chunk in _chunks(data):
            parser.Parse(chunk, False)
        parser.Parse("", True)
    except expat.ExpatError as error:
        raise HookError(f"the script did not print an XML document, or it was cut: {error}") from error


def _chunks(data: bytes) -> Iterator[str]:
    """The document from its first "<" on, piece by piece, so that nothing holds Python's lock for long."""
    start = data.find(b"<")
    if start < 0:
        raise HookError("the script did not print an XML document: it has no '<'")
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for offset in range(start, len(data), _CHUNK):
        # The declaration may name any encoding; that the text is UTF-8 is said by giving it as text.
        yield _NOT_XML.sub("\ufffd", decoder.decode(data[offset : offset + _CHUNK]))
    yield _NOT_XML.sub("\ufffd", decoder.decode(b"", True))


def _refuse_type(*_: object) -> None:
    raise HookError("the script printed an XML document with a document type, which is not read")


@define
class _Reader:
    """Counts, and keeps the text of the elements that are open."""

    _begin: Callable[[str, Mapping[str, str]], None]
    _end: Callable[[str, str], None]
    _elements: int = 0
    _open: list[list[str]] = field(factory=list)
    _lengths: list[int] = field(factory=list)

    def begin(self, name: str, attributes: dict[str, str]) -> None:
        self._elements += 1
        if self._elements > MAX_ELEMENTS or len(self._open) >= MAX_DEPTH:
            raise HookError(
                f"the script printed an XML document with more than {MAX_ELEMENTS} elements, "
                f"or nested deeper than {MAX_DEPTH}"
            )
        self._open.append([])
        self._lengths.append(0)
        self._begin(name, attributes)

    def text(self, text: str) -> None:
        if self._open and (room := MAX_ELEMENT_TEXT - self._lengths[-1]) > 0:
            self._open[-1].append(text[:room])
            self._lengths[-1] += min(len(text), room)

    def end(self, name: str) -> None:
        self._lengths.pop()
        self._end(name, "".join(self._open.pop()).strip())
