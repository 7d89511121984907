"""Where are the parts of a multipart body, found without looking at each line of it?

Parsing as mail is parsed takes some 5 ms for an output of 64 KiB, which is most of what storing it costs; and a body
that is made for that takes minutes, gigabytes, or all of the stack: parts in parts, headers in brackets in brackets,
millions of lines. So bodies are cut here at their delimiters. Nearly every client writes the plainest form there is
(:func:`cut`); of any other (:func:`split`) just the headers are parsed as mail, as many and as long as a form has them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from email.message import Message
from email.parser import BytesHeaderParser
from email.policy import compat32
from email.utils import collapse_rfc2231_value
from typing import Final

from attrs import frozen

MAX_PARTS: Final = 1000
MAX_HEAD: Final = 2048
"""Bytes that the headers of a part may have, or the Content-Type of the whole."""

ENCODINGS: Final = frozenset({"", "7bit", "8bit", "binary", "base64", "quoted-printable"})
"""The values of Content-Transfer-Encoding that are understood."""

_BLANK: Final = re.compile(rb"\r?\n\r?\n")


class Malformed(ValueError):
    """A body is not multipart as a form is; the text is a sentence that says why."""


_CONTENT_TYPE: Final = re.compile(r'multipart/form-data; ?boundary=("?)([0-9A-Za-z\'()+_./:=?-]{1,70})\1', re.I)

_HEAD: Final = re.compile(
    rb'content-disposition: form-data; name="([ !#-$&-\[\]-~]+)"(; filename="[ !#-$&-\[\]-~]*")?'
    rb"(?:\r\ncontent-type: ([a-z0-9/+.-]+)(?:; ?charset=\"?utf-8\"?)?)?",
    re.I,
)
"""Names without anything that would have to be decoded, and no header but these two, in this order."""


@frozen
class Part:
    """A part: its ``name``, whether it was sent as a file, and its bytes."""

    name: str
    is_file: bool
    data: bytes


def cut(content_type: str, body: bytes) -> Sequence[Part] | None:
    """The parts of ``body``, or None if it is not of the plainest form: then it may still be multipart."""
    found = _CONTENT_TYPE.fullmatch(content_type)
    if found is None:
        return None
    opening = b"--" + found[2].encode("ascii")
    delimiter = b"\r\n" + opening
    end = body.rfind(delimiter + b"--")
    if not body.startswith(opening + b"\r\n") or end < 0 or body[end + len(delimiter) + 2 :] not in (b"", b"\r\n"):
        return None
    pieces = body[len(opening) + 2 : end].split(delimiter + b"\r\n")
    # What looks like a delimiter in any other way is not for this module to judge.
    if body.count(opening) != len(pieces) + 1:
        return None
    parts = []
    for piece in pieces:
        head, blank, data = piece.partition(b"\r\n\r\n")
        header = _HEAD.fullmatch(head)
        if header is None or not blank:
            return None
        is_file = header[2] is not None or (header[3] or b"").lower() == b"application/octet-stream"
        parts.append(Part(header[1].decode("ascii"), is_file, data))
    return parts


def split(content_type: str, body: bytes) -> Sequence[Part]:
    """The parts of a body of any form. One without a name has the name "".

    :raises Malformed: if it is not multipart, or not as forms are.
    """
    if len(content_type) > MAX_HEAD:
        raise Malformed(f"The Content-Type is longer than {MAX_HEAD} bytes.")
    boundary = _boundary(content_type)
    if boundary is None:
        raise Malformed("The body is not multipart/form-data as its Content-Type says (it names no boundary).")
    delimiter = re.compile(rb"(?:\A|(?<=\n))--" + re.escape(boundary) + rb"(--)?[ \t]{0,100}(?=\r?\n|\Z)")
    parts: list[Part] = []
    begins: int | None = None
    for found in delimiter.finditer(body):
        if begins is not None:
            if len(parts) >= MAX_PARTS:
                raise Malformed(f"The body has more than {MAX_PARTS} parts.")
            parts.append(_part(_without_line_ends(body[begins : found.start()])))
        if found[1]:
            if begins is None:
                break
            return parts
        begins = found.end()
    why = "its last delimiter is missing: it was cut off" if begins is not None else "it has no part with its boundary"
    raise Malformed(f"The body is not multipart/form-data as its Content-Type says ({why}).")


def _boundary(content_type: str) -> bytes | None:
    header = Message()
    header["Content-Type"] = content_type
    found = header.get_boundary()
    return found.encode("utf-8", "surrogateescape") if found else None


def _without_line_ends(piece: bytes) -> bytes:
    """A piece between two delimiters, with the line end of each taken away: they may share one."""
    if piece in (b"\r\n", b"\n"):
        return b""
    return piece[piece.startswith(b"\r") + 1 : len(piece) - 1 - piece.endswith(b"\r\n")]


def _part(piece: bytes) -> Part:
    if not piece:
        return Part("", False, b"")
    blank = _BLANK.search(piece, 0, MAX_HEAD)
    # The blank line may be the first, where there are no headers.
    first = re.match(rb"\r?\n", piece)
    if first is not None:
        head, data = b"", piece[first.end() :]
    elif blank is not None:
        head, data = piece[: blank.start()], piece[blank.end() :]
    elif len(piece) <= MAX_HEAD:
        head, data = piece, b""
    else:
        raise Malformed(f"A part has no blank line after its headers, or more than {MAX_HEAD} bytes of them.")
    headers = BytesHeaderParser(policy=compat32).parsebytes(head + b"\r\n\r\n")
    try:
        given = headers.get_param("name", header="content-disposition")
        name = collapse_rfc2231_value(given) if isinstance(given, tuple) else str(given or "")
        is_named_file = headers.get_filename() is not None
    except ValueError as error:  # of a character set that decodes nothing so, as idna, or has NUL in its name
        raise Malformed(f"The Content-Disposition of a part cannot be decoded: {error}.") from None
    name = name.encode("utf-8", "replace").decode("utf-8")
    if headers.defects:
        raise Malformed(f"The headers of the field {name!r} cannot be read ({type(headers.defects[0]).__name__}).")
    if headers.get_content_maintype() in ("multipart", "message"):
        raise Malformed(f"The field {name!r} is made of parts itself; send its value alone.")
    is_file = is_named_file or headers.get_content_type() == "application/octet-stream"
    return Part(name, is_file, _decoded(name, headers, data))


def _decoded(name: str, headers: Message, data: bytes) -> bytes:
    encoding = str(headers.get("Content-Transfer-Encoding", "")).strip().lower()
    if encoding not in ENCODINGS:
        raise Malformed(f"The field {name!r} has the encoding {encoding[:40]!r}; send it as it is, or as base64.")
    if encoding not in ("base64", "quoted-printable"):
        return data
    headers.set_payload(data.decode("ascii", "surrogateescape"))
    decoded = headers.get_payload(decode=True)
    if headers.defects or not isinstance(decoded, bytes):
        reason = type(headers.defects[0]).__name__ if headers.defects else "no text"
        raise Malformed(f"The field {name!r} cannot be decoded ({reason}).")
    return decoded
