"""What a boot source and a selection may be; anything else is a :class:`SourceInvalid` that names the field."""

from __future__ import annotations

from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from region.upstream import Selection
from region.upstream.values import ANY
from rpc.manifest import is_path_component

MAX_KEYRING: Final = 1 << 20
"""Bytes; a keyring is a few KiB, and one of this size is something else."""

_MAX_PRIORITY: Final = 2**31 - 1


class SourceInvalid(ValueError):
    """A source or a selection cannot be as it was asked for: ``field`` is which of its fields, ``message`` why."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


def checked_source(
    url: object, keyring_filename: object, keyring_data: object, allow_unsigned: object, priority: object
) -> tuple[str, str, bytes, bool, int]:
    """A source's fields, in this order, if they can be so.

    :raises SourceInvalid: if one of them cannot.
    """
    address = checked_url(url)
    if type(priority) is not int or not 0 <= priority <= _MAX_PRIORITY:
        raise SourceInvalid("priority", f"{priority!r} is not a number from 0 to {_MAX_PRIORITY}")
    if not isinstance(allow_unsigned, bool):
        raise SourceInvalid("allow_unsigned", f"{allow_unsigned!r} is neither true nor false")
    if not isinstance(keyring_data, bytes) or len(keyring_data) > MAX_KEYRING:
        raise SourceInvalid("keyring_data", f"a keyring is a file of up to {MAX_KEYRING} bytes")
    if not isinstance(keyring_filename, str):
        raise SourceInvalid("keyring_filename", f"{keyring_filename!r} is not a file's name")
    if bool(keyring_filename) + bool(keyring_data) + allow_unsigned != 1:
        raise SourceInvalid(
            "keyring_filename" if not allow_unsigned else "allow_unsigned",
            "give exactly one of: keyring_filename (a keyring on the region's disk), keyring_data (a keyring), or "
            "allow_unsigned (true, if nobody signs this source)",
        )
    return address, keyring_filename, keyring_data, allow_unsigned, priority


def checked_url(url: object) -> str:
    """The URL of a source, in the form in which it is stored.

    :raises SourceInvalid: if it is none.
    """
    if not isinstance(url, str) or not url:
        raise SourceInvalid("url", "give the URL of a simplestreams mirror")
    if any(character.isspace() or not character.isprintable() for character in url):
        raise SourceInvalid("url", f"{url!r} has white space or control characters in it")
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise SourceInvalid("url", f"{url!r} is not a URL: {error}") from error
    if parts.scheme not in ("http", "https", "file"):
        raise SourceInvalid("url", f"{url!r} must begin with http://, https:// or file://")
    if parts.query or parts.fragment:
        raise SourceInvalid("url", f"{url!r} must have no query and no fragment: paths are appended to it")
    if parts.scheme == "file":
        if host not in (None, "", "localhost") or not parts.path.startswith("/"):
            raise SourceInvalid("url", f"{url!r} must name an absolute path on this host, as in file:///srv/images/")
        return f"file://{parts.path}"
    if not host:
        raise SourceInvalid("url", f"{url!r} names no host")
    return url


def checked_selection(selection: Selection) -> Selection:
    """``selection``, if it can be so.

    :raises SourceInvalid: if one of its fields cannot.
    """
    if selection.os != ANY and not is_path_component(selection.os):
        raise SourceInvalid("os", f"{selection.os!r} is not the name of an operating system; use * for any")
    if selection.release not in (ANY, "") and not is_path_component(selection.release):
        raise SourceInvalid("release", f"{selection.release!r} is not the name of a release; use * for any")
    for name in ("arches", "subarches", "labels"):
        values: tuple[object, ...] = getattr(selection, name)
        if not values:
            raise SourceInvalid(name, "give at least one; use * for any")
        for value in values:
            if value != ANY and not is_path_component(value):
                raise SourceInvalid(name, f"{value!r} is not a name; use * for any")
    return selection


def read_keyring(filename: str) -> bytes:
    """The content of a keyring on the region's disk. Blocks.

    :raises SourceInvalid: if it cannot be read, or cannot be a keyring.
    """
    path = Path(filename)
    if not path.is_absolute():
        raise SourceInvalid("keyring_filename", f"{filename!r} must be an absolute path on the region's host")
    try:
        with path.open("rb") as file:
            data = file.read(MAX_KEYRING + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise SourceInvalid("keyring_filename", f"the keyring {filename} cannot be read: {reason}") from error
    if not 0 < len(data) <= MAX_KEYRING:
        size = "is empty" if not data else f"has more than {MAX_KEYRING} bytes"
        raise SourceInvalid("keyring_filename", f"the keyring {filename} {size}")
    return data
