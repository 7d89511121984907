"""Where the files of a source are: turns the ``path`` of a stream into a URL below the source's root, or refuses it.

A path is upstream's word and is not trusted. One that could name anything outside the root, whichever way a server, a
proxy or a file system may read it (percent-escapes, backslashes, a scheme), is refused rather than repaired.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import quote, unquote_to_bytes

_SAFE: Final = "/%:@!$&'()*+,;=~"
_BARE_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
MAX_LENGTH: Final = 2048


class UnsafePath(ValueError):
    """The path is not one of a file below the source's root; the text says why."""


def file_url(root: str, path: object) -> str:
    """The URL of the file at ``path``, which is relative to the source's root (RFC 3986, section 4.2).

    Percent-escapes in it are kept as they are; other characters that a URL may not have are escaped.

    :param root: the source's mirror root, ending in a slash.
    :param path: what the stream has as the path; anything.
    :raises UnsafePath: if it is not a path below the root.
    """
    if not isinstance(path, str) or not path:
        raise UnsafePath(f"path is {_shown(path)}, not text")
    if len(path) > MAX_LENGTH:
        raise UnsafePath(f"path is {len(path)} characters long, more than {MAX_LENGTH}: {path[:60]!r}…")
    try:
        data = path.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UnsafePath(f"path {_shown(path)} is not valid Unicode text") from error
    # Escapes may be escaped again, for whoever decodes twice: every reading of the path must be harmless.
    reading, decoded = data, unquote_to_bytes(data)
    _refuse_unsafe(path, reading)
    while decoded != reading:
        if decoded.count(b"/") != reading.count(b"/"):
            raise UnsafePath(f"path {_shown(path)} has an escaped slash")
        reading, decoded = decoded, unquote_to_bytes(decoded)
        _refuse_unsafe(path, reading)
    return root + quote(_BARE_PERCENT.sub("%25", path), safe=_SAFE)


def _refuse_unsafe(path: str, reading: bytes) -> None:
    if reading.startswith(b"/"):
        raise UnsafePath(f"path {_shown(path)} is absolute")
    if b"\\" in reading:
        raise UnsafePath(f"path {_shown(path)} has a backslash")
    if any(byte < 0x20 or byte == 0x7F for byte in reading):
        raise UnsafePath(f"path {_shown(path)} has a control character")
    components = reading.split(b"/")
    if b":" in components[0]:
        raise UnsafePath(f"path {_shown(path)} begins with a scheme or a drive")
    if any(component.strip(b". ") == b"" for component in components):
        raise UnsafePath(f"path {_shown(path)} has an empty, '.' or '..' part")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "…"
