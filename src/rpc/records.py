"""How a link's boxes get to the socket and back: a small box is one TLS record, encrypted, sent and read at once.

Twisted's TLS serves any protocol: it looks for more after all that it reads, for output after that, and keeps what is
written until the reactor has asked the kernel whether the socket takes it. Over a thousand links that all are asked one
small thing, that is most of what asking costs. Here the usual case is short, and everything else is left to Twisted.
Only what Twisted and pyOpenSSL document is used.
"""

from __future__ import annotations

from typing import Any, Final

from OpenSSL import SSL
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IListeningPort, ITransport
from twisted.internet.protocol import connectionDone
from twisted.internet.tcp import Port, Server
from twisted.protocols.tls import TLSMemoryBIOProtocol
from twisted.python.failure import Failure

from rpc.connection import READY, Connection

HEADER: Final = 5
"""Bytes before a record's contents; the last two are the contents' length (RFC 8446, 5.1)."""

MAX_OWN: Final = 32
"""Bytes of the contents of TLS's own records: an alert has 19, a change of keys 22; a box has more."""

MAX_PLAIN: Final = 1 << 14
"""Bytes of plain text that a record holds at most."""

MAX_READ: Final = 1 << 15
"""Bytes taken from OpenSSL at a time: more than any record."""

MARGIN: Final = 512
"""Bytes by which a record, and a message of TLS's own beside it, are longer than what is in it. A buffer of just that
size makes sending a small box a tenth cheaper than one for any record."""


class Boundaries:
    """Follows where records end in a stream of bytes, as they come in."""

    __slots__ = ("_missing", "lost")

    def __init__(self) -> None:
        self._missing = 0
        self.lost = False
        """Whether a record's header came in two pieces: from then on nobody knows."""

    def is_one(self, data: bytes) -> bool:
        """Take ``data``; whether it is just one record, from its first byte to its last, and none of TLS's own."""
        size = len(data)
        end = self._missing
        if not end and size > HEADER and HEADER + (data[3] << 8 | data[4]) == size:
            return size > HEADER + MAX_OWN and not self.lost
        while end + HEADER <= size:
            end += HEADER + (data[end + 3] << 8 | data[end + 4])
        self._missing = end - size
        if end < size:
            self.lost = True
            self._missing = 0
        return False


class _Usual(Boundaries):
    """What the usual case needs of one link: itself, its OpenSSL connection and its socket's transport; ``link`` is
    None while that case cannot be.

    It is all in one place because of what it costs to find it otherwise: Twisted's wrapper hands on what it does not
    know itself, so that Python looks up each of its attributes in the slow way.
    """

    __slots__ = ("connection", "link", "transport")

    def __init__(self) -> None:
        super().__init__()
        self.link: Connection | None = None
        self.connection: Any = None
        self.transport: Any = None

    def flush(self, size: int = MAX_READ) -> None:
        """Send what OpenSSL has for the peer: some ``size`` bytes, as a rule."""
        try:
            record = self.connection.bio_read(size)
        except SSL.WantReadError:
            return
        self.transport.write(record)
        if len(record) == size:
            self.flush()  # there may be more


class LinkTLS(TLSMemoryBIOProtocol):
    """The TLS of one link, whose wrapped protocol is a :class:`~rpc.connection.Connection`.

    While that is ready, nothing of a handshake or an end is under way: what is written becomes records at once; and a
    record that came alone, and is longer than TLS's own, has one piece of plain text in it, after which OpenSSL has
    nothing more to say.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)  # type: ignore[no-untyped-call]  # Twisted's has no annotations
        self._usual = _Usual()

    def makeConnection(self, transport: ITransport) -> None:
        """Begin the handshake."""
        super().makeConnection(transport)  # type: ignore[no-untyped-call]  # Twisted's has no annotations
        if isinstance(self.wrappedProtocol, Connection):
            self._usual.connection = self.getHandle()  # type: ignore[no-untyped-call]  # Twisted's has no annotations
            self._usual.transport = transport
            self._usual.link = self.wrappedProtocol

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """Tell the link, and let go of what would refer to each other in a circle."""
        super().connectionLost(reason)  # type: ignore[no-untyped-call]  # Twisted's has no annotations
        self._usual = _Usual()

    def dataReceived(self, data: bytes) -> None:
        """Take bytes from the socket."""
        usual = self._usual
        link = usual.link
        if not usual.is_one(data) or link is None or link.life is not READY:
            super().dataReceived(data)  # type: ignore[no-untyped-call]  # Twisted's has no annotations
            return
        connection = usual.connection
        connection.bio_write(data)
        try:
            plain = connection.recv(len(data))  # a record is longer than what is in it
        except SSL.WantReadError:
            # A message of TLS's own, padded: that may want an answer.
            usual.flush()
        except SSL.ZeroReturnError:
            self.failVerification(Failure(ConnectionDone()))  # type: ignore[no-untyped-call]  # Twisted's has no annotations
        except SSL.Error:
            self.failVerification(Failure())  # type: ignore[no-untyped-call]  # Twisted's has no annotations
        else:
            link.dataReceived(plain)  # type: ignore[no-untyped-call]  # Twisted's has no annotations

    def write(self, data: bytes) -> None:
        """Encrypt and send ``data``."""
        usual = self._usual
        if (link := usual.link) is None or link.life is not READY:
            super().write(data)  # type: ignore[no-untyped-call]  # Twisted's has no annotations
            return
        connection = usual.connection
        start = 0
        while start < len(data):
            try:
                start += connection.send(data[start : start + MAX_PLAIN] if len(data) > MAX_PLAIN else data)
            except SSL.WantReadError:
                # OpenSSL wants to hear from the peer first. Twisted keeps what waits, and all that comes after it.
                usual.link = None
                super().write(data[start:])  # type: ignore[no-untyped-call]  # Twisted's has no annotations
                return
            except SSL.Error:
                self.failVerification(Failure())  # type: ignore[no-untyped-call]  # Twisted's has no annotations
                return
            usual.flush(min(len(data), MAX_PLAIN) + MARGIN)


class PromptServer(Server):
    """A connection that was accepted: what is written goes to the socket at once, if nothing waits before it.

    Only what the socket does not take is kept, in Twisted's own buffer; while anything is there, nothing goes past it.
    So the order stays, and so do the bounds, the producers and what ends a connection. An error is left for the buffer
    to run into.
    """

    def __init__(self, *arguments: Any) -> None:
        self._keeps = False
        super().__init__(*arguments)
        # Otherwise the kernel keeps a small write back until the peer has acknowledged the one before.
        self.setTcpNoDelay(True)

    def startWriting(self) -> None:
        """Something waits for the socket: bytes, or the end of the connection."""
        self._keeps = True
        super().startWriting()  # type: ignore[no-untyped-call]  # Twisted's has no annotations

    def stopWriting(self) -> None:
        """Nothing waits any more."""
        self._keeps = False
        super().stopWriting()  # type: ignore[no-untyped-call]  # Twisted's has no annotations

    def write(self, data: bytes) -> None:
        """Write ``data`` to the socket, or keep it."""
        if not self._keeps and self.connected:
            try:
                sent = self.socket.send(data)
            except OSError:
                sent = 0  # full; or lost, which the buffer will find out, and end the connection
            if sent == len(data):
                return
            data = data[sent:]
        super().write(data)  # type: ignore[no-untyped-call]  # Twisted's has no annotations


def make_prompt(port: IListeningPort) -> None:
    """Have connections that ``port`` accepts from now on be :class:`PromptServer`, if they are Twisted's own kind."""
    if isinstance(port, Port):
        port.transport = PromptServer  # type: ignore[assignment]  # it may be replaced, says Twisted
