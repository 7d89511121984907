"""What a request's body says, in any of the forms that clients of MAAS send.

libmaas and ``maas`` send multipart with base64 parts, or multipart with one nameless empty part where there is nothing
to say; gomaasapi sends urlencoded forms; others send JSON or nothing. All become the same: names with their values.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from email.message import Message
from typing import Final
from urllib.parse import parse_qsl

from attrs import frozen

from region.api.multipart import Malformed, cut, split
from region.api.operations import BadRequest

FIELDS: Final = 1000
"""How many values a body may have at most."""

MAX_MARKS: Final = 1 << 20
MAX_ESCAPES: Final = 2 << 20
"""Of what takes a parser some hundred bytes each, how much a body may have: of JSON, and of a form."""


@frozen
class FileValue:
    """A value that was sent as a file: its bytes are meant as they are."""

    data: bytes


Value = str | FileValue
Form = Mapping[str, tuple[Value, ...]]


def parse_query(query: bytes) -> Mapping[str, tuple[str, ...]]:
    """The parameters of a URL's query.

    :raises BadRequest: if it is not text, or has too many.
    """
    return _pairs(query, "query")


def parse_body(content_type: str, body: bytes) -> Form:
    """The fields of a request's body.

    :raises BadRequest: if the body is not what its Content-Type says, or of a type that is not understood.
    """
    header = Message()
    header["Content-Type"] = content_type
    kind = header.get_content_type() if content_type else ""
    if not body.strip():
        return {}
    match kind:
        case "multipart/form-data":
            return _multipart(content_type, body)
        case "application/json":
            return _json(body)
        case "application/x-www-form-urlencoded" | "":
            # gomaasapi and curl -d send forms; a body without a type is one if it is anything.
            return _pairs(body, "body")
    raise BadRequest(
        f"Content-Type {content_type[:100]!r} is not understood; send multipart/form-data, "
        "application/x-www-form-urlencoded or application/json."
    )


def _pairs(data: bytes, where: str) -> Mapping[str, tuple[str, ...]]:
    if data.count(b"%") > MAX_ESCAPES:
        raise BadRequest(f"The {where} has more than {MAX_ESCAPES} percent signs; send large values as multipart.")
    found: dict[str, list[str]] = defaultdict(list)
    try:
        pairs = parse_qsl(
            data.decode("utf-8"), keep_blank_values=True, encoding="utf-8", errors="strict", max_num_fields=FIELDS
        )
    except ValueError as error:
        raise BadRequest(f"The {where} is not a form: {error}.") from None
    for name, value in pairs:
        found[name].append(value)
    return {name: tuple(values) for name, values in found.items()}


def parse_plain(content_type: str, body: bytes) -> Form | None:
    """The fields of a multipart body of the plainest form, at once whatever its size; None of any other body.

    :raises BadRequest: if it has too many.
    """
    plain = cut(content_type, body)
    if plain is None:
        return None
    _require_few(len(plain))
    fields: dict[str, list[Value]] = defaultdict(list)
    for each in plain:
        fields[each.name].append(FileValue(each.data) if each.is_file else _text_or_file(each.data))
    return {name: tuple(values) for name, values in fields.items()}


def _multipart(content_type: str, body: bytes) -> Form:
    plain = parse_plain(content_type, body)
    if plain is not None:
        return plain
    try:
        parts = split(content_type, body)
    except Malformed as error:
        raise BadRequest(str(error)) from None
    _require_few(len(parts))
    found: dict[str, list[Value]] = defaultdict(list)
    for part in parts:
        if part.name:
            # libmaas sends bytes without a file name.
            found[part.name].append(FileValue(part.data) if part.is_file else _text_or_file(part.data))
        elif part.data.strip():
            raise BadRequest("The body has a part with content but without a name.")
    return {name: tuple(values) for name, values in found.items()}


def _text_or_file(data: bytes) -> Value:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return FileValue(data)


def _json(body: bytes) -> Form:
    if body.count(b",") + body.count(b"[") + body.count(b"{") > MAX_MARKS:
        raise BadRequest(f"The body has more than {MAX_MARKS} commas and brackets; send large values as multipart.")
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"The body is not JSON: {error}.") from None
    if not isinstance(value, dict):
        raise BadRequest("The body must be a JSON object, with the fields as its members.")
    found = {name: given if isinstance(given, list) else [given] for name, given in value.items() if given is not None}
    for name in found:
        _require_text(name)
    _require_few(sum(map(len, found.values())))
    return {name: tuple(_json_value(name, entry) for entry in entries) for name, entries in found.items()}


def _require_few(count: int) -> None:
    if count > FIELDS:
        raise BadRequest(f"The body has {count} values; at most {FIELDS} are accepted.")


def _json_value(name: str, value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return _require_text(value)
        case int():
            return str(value)
    raise BadRequest(f"The field {name!r} must be text, a number, true or false, or a list of those.")


def _require_text(value: str) -> str:
    """``value``, if it can be written as UTF-8: JSON has halves of characters, which are none."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRequest(f"{value[:80]!a} has half a character in it (a lone surrogate), which is no text.") from None
    return value
