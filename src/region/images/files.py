"""How a verified file gets to an HTTP client: whole or in part, from threads, and no faster than the client takes it.

A file is opened only when it is known to be right, and what is open stays readable when the file is removed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from io import FileIO
from typing import Any, Final

from attrs import frozen
from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IPushProducer, IReactorTime
from twisted.logger import Logger
from twisted.web.server import Request
from zope.interface import implementer

from rpc.blobs import BlobStore, State
from rpc.fetch import RunInThread

log = Logger()

CHUNK: Final = 512 << 10
"""Bytes read from the disk at a time."""

STALL_SECONDS: Final = 120.0
"""How long a client may take no byte of a file before its connection is cut."""


class FileDamaged(Exception):
    """The file's bytes were wrong, so it was moved away; the text says what was wrong and where it is now."""


@frozen
class OpenFile:
    """A verified file, open; ``size`` in bytes."""

    file: FileIO
    size: int


def open_verified(blobs: BlobStore, sha256: str) -> OpenFile | None:
    """The file with this content, or None if its bytes would have to be read to know whether it is right. Blocks.

    :raises FileNotFoundError: if it is not there.
    """
    file = open(blobs.path(sha256), "rb", buffering=0)  # noqa: SIM115  # the caller closes it
    try:
        size = os.fstat(file.fileno()).st_size
        if blobs.is_verified(sha256, size):
            return OpenFile(file, size)
    except BaseException:
        file.close()
        raise
    file.close()
    return None


def examine_and_open(blobs: BlobStore, sha256: str) -> OpenFile:
    """The file with this content, after reading it to know that it is right. Blocks.

    :raises FileNotFoundError: if it is not there.
    :raises FileDamaged: if it was wrong.
    :raises BlobError: if it was changed while it was read.
    """
    size = blobs.path(sha256).stat().st_size
    found = blobs.examine(sha256, size)
    if found.state is State.QUARANTINED:
        raise FileDamaged(f"{found.reason}; it was moved to {found.quarantined}")
    opened = open_verified(blobs, sha256)
    if opened is None:
        raise FileNotFoundError(f"{blobs.path(sha256)} was replaced while it was read")
    return opened


@frozen
class Range:
    """The bytes from ``start`` up to, not including, ``end``."""

    start: int
    end: int


UNSATISFIABLE: Final = Range(0, 0)
"""A range of which the file has no byte."""


def parse_range(header: str, size: int) -> Range | None:
    """The bytes of a file of ``size`` bytes that a ``Range`` header asks for (RFC 9110, 14.1.2).

    None if it asks for no single range of bytes, or is malformed; then the whole file is the right answer.
    :data:`UNSATISFIABLE` if the file has none of them.
    """
    unit, equals, asked = header.partition("=")
    first, dash, last = (part.strip() for part in asked.partition("-"))
    digits = [part for part in (first, last) if part]
    if unit.strip().lower() != "bytes" or not equals or not dash or not digits:
        return None
    if not all(part.isascii() and part.isdigit() and len(part) <= 18 for part in digits):
        return None
    if not first:
        found = Range(max(0, size - int(last)), size)
    elif last and int(last) < int(first):
        return None
    else:
        found = Range(int(first), min(int(last) + 1, size) if last else size)
    return found if found.start < found.end else UNSATISFIABLE


@implementer(IPushProducer)
class Sender:
    """Sends a part of a file, read in threads, as fast as the client takes it and no faster."""

    def __init__(self, request: Request, file: FileIO, clock: IReactorTime, run_in_thread: RunInThread) -> None:
        self._request = request
        self._file = file
        self._clock = clock
        self._run_in_thread = run_in_thread
        self._paused: Deferred[None] | None = None

    async def send(self, part: Range, is_good: Callable[[], bool] = lambda: True) -> None:
        """Send ``part``; the answer's headers are set.

        :param is_good: whether the file is still taken for right: it may be found damaged while it is sent.
        :raises OSError: if the file is shorter than that, or cannot be read.
        :raises FileDamaged: if it is not good any more.
        """
        self._request.registerProducer(self, True)
        try:
            position = part.start
            reading = self._read(position, part.end)
            while position < part.end:
                data = await reading
                if not is_good():
                    raise FileDamaged("it was found damaged while it was sent; the client gets no more of it")
                position += len(data)
                reading = self._read(position, part.end)  # while the client takes what was read
                self._request.write(data)
                await self._writable()
        finally:
            if self._request.channel is not None:
                self._request.unregisterProducer()

    def _read(self, position: int, end: int) -> Deferred[bytes]:
        if position >= end:
            return succeed(b"")
        return self._run_in_thread(_read, self._file, min(CHUNK, end - position), position)

    async def _writable(self) -> None:
        if self._paused is not None:
            cut = self._clock.callLater(STALL_SECONDS, self._cut)
            try:
                await self._paused
            finally:
                if cut.active():
                    cut.cancel()

    def _cut(self) -> None:
        log.warn(
            "{client} has taken no byte of {path} for {seconds:g} seconds; its connection is cut",
            client=str(self._request.getClientAddress()),
            path=self._request.path.decode("ascii", "replace"),
            seconds=STALL_SECONDS,
        )
        transport: Any = self._request.transport
        transport.abortConnection()

    def pauseProducing(self) -> None:
        """The client does not keep up."""
        if self._paused is None:
            self._paused = Deferred()

    def resumeProducing(self) -> None:
        """The client has taken what was written."""
        if self._paused is not None:
            paused, self._paused = self._paused, None
            paused.callback(None)

    def stopProducing(self) -> None:
        """The client is gone; the request's end stops the sending."""


def _read(file: FileIO, size: int, position: int) -> bytes:
    try:
        data = os.pread(file.fileno(), size, position)
    except (ValueError, OSError):
        if file.closed:
            return b""  # it was read ahead for a client that is gone
        raise
    if not data:
        raise OSError(f"the file ended at byte {position}, {size} bytes early")
    return data
