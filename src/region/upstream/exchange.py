"""How the region and its child process write to each other: JSON lines, one value a line.

A question is one line that says what the document is, and then the document's own bytes. An answer is one line for the
value and one for each of its images, so that whoever reads a long answer can do other things between two lines.
"""

from __future__ import annotations

import base64
import json
from datetime import datetime
from typing import Any, Final

from attrs import evolve, frozen
from cattrs import Converter

from region.upstream.documents import IndexRead, ProductsRead
from region.upstream.values import Source, UpstreamImage


@frozen
class Question:
    """What a document should be read as. ``content_id`` is empty for the index; ``root`` is where its paths begin."""

    source: Source
    root: str
    content_id: str = ""


@frozen
class Refused:
    """The document cannot be used; ``reason`` is one sentence. ``torn``: whether reading all again may help."""

    reason: str
    torn: bool = False


Answer = IndexRead | ProductsRead | Refused

_KINDS: Final[dict[str, type[Any]]] = {kind.__name__: kind for kind in (IndexRead, ProductsRead, Refused)}


def _converter() -> Converter:
    converter = Converter(detailed_validation=False)
    converter.register_unstructure_hook(bytes, lambda value: base64.b64encode(value).decode("ascii"))
    converter.register_structure_hook(bytes, lambda value, _: base64.b64decode(value, validate=True))
    converter.register_unstructure_hook(datetime, datetime.isoformat)
    converter.register_structure_hook(datetime, lambda value, _: datetime.fromisoformat(value))
    return converter


_CONVERTER: Final = _converter()


def _line(value: object) -> bytes:
    return json.dumps(_CONVERTER.unstructure(value), separators=(",", ":")).encode("ascii") + b"\n"


def encode_question(question: Question, document: bytes) -> bytes:
    """The bytes to write to the child for a document to read."""
    return _line(question) + document


def decode_question(data: bytes) -> tuple[Question, bytes]:
    """What :func:`encode_question` was given."""
    line, _, document = data.partition(b"\n")
    return _CONVERTER.structure(json.loads(line), Question), document


def encode_answer(answer: Answer) -> bytes:
    """The bytes that the child answers with."""
    images: tuple[UpstreamImage, ...] = ()
    if isinstance(answer, ProductsRead):
        images, answer = answer.images, evolve(answer, images=())
    head = {"kind": type(answer).__name__, "value": _CONVERTER.unstructure(answer)}
    return _line(head) + b"".join(_line(image) for image in images)


def decode_answer(data: bytes) -> Answer:
    """What :func:`encode_answer` was given.

    :raises ValueError: if it is not such an answer.
    """
    try:
        head, *images = data.splitlines()
        known = json.loads(head)
        answer: Answer = _CONVERTER.structure(known["value"], _KINDS[known["kind"]])
        if isinstance(answer, ProductsRead):
            found = (_CONVERTER.structure(json.loads(line), UpstreamImage) for line in images)
            answer = evolve(answer, images=tuple(found))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"the process that reads documents answered {data[:80]!r}: {error}") from error
    return answer
