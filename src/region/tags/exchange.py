"""How the region and the process that evaluates definitions write to each other: a line of JSON, and documents' bytes.

There are three questions: whether a definition is one; what the documents are; and whether a definition is true of
them. The process keeps the documents that it was told last.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from attrs import frozen
from cattrs import Converter


@frozen
class Check:
    """Can this definition be evaluated? Answered with a :class:`Verdict`, true if so."""

    definition: str


@frozen
class Load:
    """These are the documents, by name, byte for byte. Answered with :class:`Loaded`."""

    documents: Mapping[str, bytes]


@frozen
class Evaluate:
    """Is this definition true of the documents? Answered with a :class:`Verdict`."""

    definition: str


@frozen
class Loaded:
    """Why documents could not be read, by name; evaluated is what remains."""

    problems: Mapping[str, str]


@frozen
class Verdict:
    """``problem`` says why it cannot be told. ``is_loaded`` is false if the process has no documents: tell it first."""

    value: bool
    problem: str = ""
    is_loaded: bool = True


Question = Check | Load | Evaluate
Answer = Loaded | Verdict

_CONVERTER: Final = Converter(detailed_validation=False)
_ANSWERS: Final[dict[str, type[Any]]] = {kind.__name__: kind for kind in (Loaded, Verdict)}


def encode_question(question: Question) -> bytes:
    """The bytes of a question."""
    documents: Mapping[str, bytes] = question.documents if isinstance(question, Load) else {}
    head: dict[str, Any] = {"kind": type(question).__name__}
    if isinstance(question, Load):
        head["sizes"] = {name: len(data) for name, data in documents.items()}
    else:
        head["definition"] = question.definition
    return json.dumps(head).encode("ascii") + b"\n" + b"".join(documents.values())


def decode_question(data: bytes) -> Question:
    """What :func:`encode_question` was given."""
    line, _, rest = data.partition(b"\n")
    head = json.loads(line)
    match head["kind"]:
        case "Check":
            return Check(head["definition"])
        case "Evaluate":
            return Evaluate(head["definition"])
    documents = dict[str, bytes]()
    for name, size in head["sizes"].items():
        documents[name], rest = rest[:size], rest[size:]
    return Load(documents)


def encode_answer(answer: Answer) -> bytes:
    """The bytes of an answer."""
    return json.dumps({"kind": type(answer).__name__, "value": _CONVERTER.unstructure(answer)}).encode("ascii")


def decode_answer(data: bytes) -> Answer:
    """What :func:`encode_answer` was given.

    :raises ValueError: if it is not such an answer.
    """
    try:
        head = json.loads(data)
        answer: Answer = _CONVERTER.structure(head["value"], _ANSWERS[head["kind"]])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"the process that evaluates definitions answered {data[:80]!r}: {error}") from error
    return answer
