"""How the API's site reads a request: bodies are left as they came, and one that is too large is refused with 413.

Twisted parses form bodies itself and drops the connection on those that MAAS's own clients send (a multipart body with
one nameless empty part), so :mod:`region.api.forms` does that instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from io import BytesIO
from typing import Any, Final

from twisted.internet.interfaces import ITransport
from twisted.logger import Logger
from twisted.web.server import Request

log = Logger()

BODY_LIMIT: Final = 1 << 20
"""Bytes that the body of a request may have (1 MiB), unless its path is below one of :data:`UPLOADS`."""

UPLOADS: Final[Mapping[bytes, int]] = {
    b"/MAAS/api/2.0/scripts": 4 << 20,  # a script of 1 MiB, as base64 and with its fields
    b"/MAAS/api/2.0/boot-resources": 24 << 20,  # a chunk of an image of 16 MiB, as base64 and with its fields
    b"/MAAS/metadata": 16 << 20,  # the four files of a script's output
}
"""Bytes that it may have there."""

DISCARDED: Final = 16 << 20
"""Bytes of a body over the limit that are read and thrown away, so that its sender gets to read the answer.

Where the limit is not much less it is twice the limit."""

_SLASHES: Final = re.compile(rb"/+")


def limit_of(path: bytes) -> int:
    """How many bytes the body of a request for ``path`` may have."""
    plain = _SLASHES.sub(b"/", path.partition(b"?")[0])
    return next((limit for place, limit in UPLOADS.items() if (plain + b"/").startswith(place + b"/")), BODY_LIMIT)


class ApiRequest(Request):
    """A request whose body has at most :attr:`body_limit` bytes. ``body_too_large`` says that it had more."""

    body_limit = BODY_LIMIT

    def __init__(self, channel: Any, *arguments: Any, **keywords: Any) -> None:
        keywords["parsePOSTFormSubmission"] = False
        super().__init__(channel, *arguments, **keywords)  # type: ignore[no-untyped-call]  # Twisted's
        self.body_too_large = False
        self._discarded = DISCARDED
        self._body_length = 0

    def gotLength(self, length: int | None) -> None:
        """The length that was announced, or None if it was not."""
        # The request itself learns its path when all of it has come; its channel has read it already.
        self.body_limit = limit_of(getattr(self.channel, "_path", b""))
        self._discarded = max(DISCARDED, 2 * self.body_limit)
        kept = length if length is None or length <= self.body_limit else 0
        super().gotLength(kept)  # type: ignore[no-untyped-call]  # Twisted's
        if length is not None and length > self.body_limit:
            self.body_too_large = True
            if length > self._discarded:
                self._cut()

    def handleContentChunk(self, data: bytes) -> None:
        """Some of the body."""
        self._body_length += len(data)
        if self._body_length <= self.body_limit and not self.body_too_large:
            super().handleContentChunk(data)  # type: ignore[no-untyped-call]  # Twisted's
            return
        if not self.body_too_large:
            self.body_too_large = True
            self.content = BytesIO()
        if self._body_length > self._discarded:
            self._cut()

    def _cut(self) -> None:
        log.warn(
            "Refused a request from {peer} with a body over {limit} bytes", peer=self.client, limit=self._discarded
        )
        message = f"The request's body is too large; at most {self.body_limit} bytes are accepted.\n".encode()
        transport: ITransport = self.channel.transport  # type: ignore[assignment]  # a request that arrives has one
        transport.write(
            b"HTTP/1.1 413 Content Too Large\r\nConnection: close\r\nContent-Type: text/plain; charset=utf-8\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(message), message)
        )
        self.channel.loseConnection()
