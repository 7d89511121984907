"""Where are the parts of a multipart body, found without looking at each line of it?

Parsing as mail is parsed takes some 5 ms for an output of 64 KiB, which is most of what storing it costs. Nearly every
client writes the plainest form there is, which is cut here at its delimiters alone. Whatever is not exactly that form
is left to the parser of mail, so that what is accepted, and what it means, stays the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from attrs import frozen

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
