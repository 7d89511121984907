"""How is a body of tens of megabytes sent without holding up everything else?

Given to Twisted at once it is copied as a whole, in one turn of the reactor. So it is sent piece by piece, each when
the one before has gone to the socket.
"""

from __future__ import annotations

from typing import Any, Final

from attrs import define, field
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IPushProducer
from zope.interface import implementer

WHOLE: Final = 1 << 20
"""Bytes of a body that is sent at once."""

PIECE: Final = 256 << 10
"""Bytes of a piece of a larger one."""

STALL_SECONDS: Final = 60.0
"""How long a client may take no byte of it before its connection is cut."""


def send(request: Any, body: bytes) -> bytes | Deferred[bytes]:
    """What is left to be written to ``request``, whose headers are set: a small ``body``, or nothing of a large one
    when that has gone. Cancelling ends the sending."""
    if len(body) <= WHOLE or request.method == b"HEAD":
        return body
    pieces = _Pieces(request, body)
    request.registerProducer(pieces, True)
    pieces.resumeProducing()
    return pieces.sent


@implementer(IPushProducer)
@define(eq=False)
class _Pieces:
    """``sent`` has nothing, b"", when all is written; until then, writing may be paused, or be given up."""

    _request: Any
    _body: bytes
    sent: Deferred[bytes] = field(init=False)
    _at: int = 0
    _goes_on: bool = False

    def __attrs_post_init__(self) -> None:
        self.sent = Deferred(lambda _: self.stopProducing())

    def resumeProducing(self) -> None:
        """There is room for more."""
        self._goes_on = True
        # Twisted itself bounds only how long a client takes to ask, and to take an answer that is finished.
        self._request.channel.setTimeout(STALL_SECONDS)
        while self._goes_on and self._at < len(self._body):
            start, self._at = self._at, self._at + PIECE
            self._request.write(self._body[start : self._at])  # may call pauseProducing
        if self._at >= len(self._body) and not self.sent.called:
            self._request.unregisterProducer()
            self.sent.callback(b"")

    def pauseProducing(self) -> None:
        """There is no room at the moment."""
        self._goes_on = False

    def stopProducing(self) -> None:
        """The client is gone; Klein, which is told of that too, cancels what it waits for."""
        self._goes_on = False
