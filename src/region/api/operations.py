"""What one operation of the API is: what it is called with, what it may answer, and how its errors read.

These are the values that the table of routes is made of and that handlers take and return. They know nothing of HTTP
servers, so a handler is tested by calling it.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from attrs import field, frozen

if TYPE_CHECKING:
    from region.api.keys import ApiKey
    from region.api.parts import Parts

JSON: Final = "application/json; charset=utf-8"
TEXT: Final = "text/plain; charset=utf-8"
BYTES: Final = "application/octet-stream"

CONTENT: Final = "content"
"""The parameter that the body of a ``raw`` operation is."""

Kind = Literal["string", "integer", "boolean", "file"]


@frozen
class Parameter:
    """One parameter. ``many``: it may be repeated; ``choices``: what it may be, if that is a closed list."""

    name: str
    doc: str
    kind: Kind = "string"
    required: bool = False
    many: bool = False
    choices: tuple[str, ...] = ()
    minimum: int | None = None
    maximum: int | None = None


@frozen
class Call:
    """One request for an operation: the values in its path, and its parameters, checked against the table.

    ``base`` is the scheme and host that the client used, ``correlation`` what this request is called in the log.
    """

    path: Mapping[str, str] = field(factory=dict)
    values: Mapping[str, Any] = field(factory=dict)
    key: ApiKey | None = None
    base: str = ""
    correlation: str = ""

    def number(self, name: str) -> int:
        """The number ``name`` of the path.

        :raises NotFound: if it is none, so that nothing can be there.
        """
        text = self.path[name]
        if not (text.isascii() and text.isdigit() and len(text) < 19):
            raise NotFound(f"There is nothing with the {name} {text!r}: it is not a number.")
        return int(text)


@frozen
class Reply:
    """What an operation answers."""

    body: bytes = b""
    status: int = 200
    content_type: str = JSON
    headers: Mapping[str, str] = field(factory=dict)


Handler = Callable[["Parts", Call], Awaitable[Reply]]


@frozen
class Operation:
    """One row of the table: what is called, how, by whom, and what it may answer.

    ``name`` is unique; ``resource`` and ``action`` are the names that MAAS clients know it by. ``answers`` says what
    each status means. ``content`` is the type of a successful answer. ``raw``: the body is no form, but as it is
    the parameter ``content``.
    """

    method: str
    path: str
    resource: str
    action: str
    handler: Handler
    doc: str
    op: str | None = None
    parameters: tuple[Parameter, ...] = ()
    answers: Mapping[int, str] = field(factory=dict)
    anonymous: bool = False
    content: str = JSON
    raw: bool = False

    @property
    def name(self) -> str:
        """A name for this operation alone: ``BootSources.read``."""
        return f"{self.resource}.{self.action}"

    @property
    def signature(self) -> str:
        """How documentation names it: ``POST boot-resources/ op=import``."""
        return f"{self.method} {self.path.lstrip('/')}" + (f" op={self.op}" if self.op else "")


class ApiError(Exception):
    """An answer that is an error. Raised by handlers; the client gets ``reply``."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.body.decode("utf-8", "replace"))
        self.reply = reply


class BadRequest(ApiError):
    """400: the request is wrong; ``message`` says what is."""

    def __init__(self, message: str) -> None:
        super().__init__(text(message, 400))


class Invalid(ApiError):
    """400: fields of the request are wrong; ``messages`` says for each field what is."""

    def __init__(self, messages: Mapping[str, Sequence[str]]) -> None:
        super().__init__(document({name: list(found) for name, found in messages.items()}, 400))
        self.messages = messages


class NotFound(ApiError):
    """404: there is no such thing."""

    def __init__(self, message: str) -> None:
        super().__init__(text(message, 404))


def invalid_choice(name: str, value: str, choices: Sequence[str]) -> Invalid:
    """The error that MAAS clients know for a value that is none of ``choices`` (at least one)."""
    if not choices:
        raise ValueError(f"{value!r} is refused for {name}, but there is nothing that it should be one of")
    listed = ", ".join(f"'{choice}'" for choice in choices)
    return Invalid({name: [f"'{value}' is not a valid {name}.  It should be one of: {listed}."]})


def text(message: str, status: int = 200, **headers: str) -> Reply:
    """A message in plain text."""
    return Reply(message.encode(), status, TEXT, headers)


def document(value: Any, status: int = 200, **headers: str) -> Reply:
    """A JSON value."""
    return Reply(json.dumps(value, ensure_ascii=False).encode(), status, JSON, headers)


NOTHING: Final = Reply(status=204, content_type="")
"""204, the answer to a DELETE."""
