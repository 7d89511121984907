"""How is a ``file:`` URL read and copied? Like one of a server: whole, of the size that was promised, and verified."""

from __future__ import annotations

import os
import stat
from io import FileIO
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from rpc.http_errors import FetchError
from rpc.parts import BLOCK, Part


def _local_path(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise FetchError(url, f"a file: URL must be of this host, not of {parts.netloc!r}")
    path = unquote(parts.path)
    if not path.startswith("/") or "\0" in path:
        raise FetchError(url, f"{path!r} is not an absolute path")
    return path


def _open_file(url: str) -> tuple[int, int]:
    """A descriptor of the regular file that a ``file:`` URL names, and its size in bytes."""
    path = _local_path(url)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise FetchError(url, f"cannot read it: {error.strerror}") from error
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise FetchError(url, "it is not a regular file")
    return descriptor, found.st_size


def _read(url: str, file: BinaryIO | FileIO, size: int) -> bytes:
    try:
        return file.read(size) or b""
    except OSError as error:
        raise FetchError(url, f"cannot read it: {error.strerror}") from error


def read_file(url: str, limit: int) -> bytes:
    """The bytes of a file. :raises FetchError: if they are over ``limit``, or cannot be read."""
    descriptor, size = _open_file(url)
    with os.fdopen(descriptor, "rb") as file:
        if size > limit:
            raise FetchError(url, f"it is {size} bytes long, over the limit of {limit}")
        data = _read(url, file, limit + 1)
    if len(data) > limit:
        raise FetchError(url, f"it is over the limit of {limit} bytes")
    return data


def copy_file(url: str, part: Part) -> None:
    """Append to ``part`` what it lacks, from the file. :raises FetchError: if the file has another size, or none."""
    descriptor, size = _open_file(url)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        if size != part.size:
            raise FetchError(url, f"it has {size} bytes, not {part.size}")
        file.seek(part.length)
        while block := _read(url, file, BLOCK):
            part.write(block)
    if not part.is_full:
        raise FetchError(url, f"it was cut to {part.length} bytes while it was read")
