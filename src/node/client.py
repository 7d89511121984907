"""How does one request reach the region, and what came of it?

Whatever the network does, a request ends within its deadline, in an answer or in :class:`NoAnswer`. Nothing is tried
again here, but for a refusal that this machine's clock may have caused; and no redirect or proxy is followed: the
region is what the credentials say.
"""

import base64
import email.utils
import http.client
import os
import socket
import ssl
import time
import urllib.parse
import uuid
from typing import Callable, Iterable, List, Mapping, NamedTuple, Optional, Tuple

from node.clock import TooLong, within
from node.credentials import Credentials

CONNECT_SECONDS = 10.0
READ_SECONDS = 60.0
"""How long the region may say nothing while it works on an answer."""

DEADLINE_SECONDS = 120.0
"""How long a small request may take altogether, also when the answer comes byte by byte."""

SLOWEST = 16 * 1024
"""Bytes per second: a large request may take as much longer as it takes at this rate."""

LARGEST_ANSWER = 256 << 20
LARGEST_REPLY = 1 << 20
"""Bytes of an answer to what is told: the region's are a few words."""

PIECE = 64 * 1024
SKEW_SECONDS = 30.0
"""By how much this machine's clock must be off before the region's is taken."""


class Answer(NamedTuple):
    """What the region, or something in front of it, answered. Names of headers are in lower case."""

    status: int
    reason: str
    headers: Mapping[str, str]
    body: bytes


class NoAnswer(Exception):
    """There was no whole answer in time; the text says why, in words for the log."""


class File(NamedTuple):
    """A file of a multipart form."""

    name: str
    content: bytes


class Client(object):
    """Speaks for this machine. May be used by several threads; each request has a connection of its own.

    :param say: called with a sentence when the region's clock is found to differ from this machine's.
    """

    def __init__(
        self,
        credentials: Credentials,
        connect_seconds: float = CONNECT_SECONDS,
        read_seconds: float = READ_SECONDS,
        deadline_seconds: float = DEADLINE_SECONDS,
        now: Callable[[], float] = time.time,
        say: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self._credentials = credentials
        self._connect_seconds = connect_seconds
        self._read_seconds = read_seconds
        self._deadline_seconds = deadline_seconds
        self._now = now
        self._say = say
        self._skew = 0.0

    @property
    def skew(self) -> float:
        """How many seconds the region's clock is ahead of this machine's, as far as is known."""
        return self._skew

    def url(self, path: str) -> str:
        """The URL of ``path`` in the metadata service, such as ``2012-03-01/maas-scripts``."""
        return self._credentials.metadata_url.rstrip("/") + "/" + path

    def learn_clock(self, answer: Answer, sent: float) -> bool:
        """Take the region's clock from the Date of a refusal; whether that differs enough from what the request said to
        be the cause.

        :param sent: the time that the request said. Another request may have learned the right one meanwhile, or
            somebody may have set this machine's clock: what was refused is to be sent again all the same.
        """
        try:
            theirs = email.utils.parsedate_to_datetime(answer.headers.get("date", "")).timestamp()
        except (TypeError, ValueError, IndexError, OverflowError):
            # It has none, or none that can be read: then nothing is to be learned from it.
            return False
        if abs(theirs - sent) < SKEW_SECONDS:
            return False
        self._skew = theirs - self._now()
        return True

    def request(
        self, method: str, path: str, body: bytes = b"", content_type: str = "", accept: str = "application/json"
    ) -> Answer:
        """Send one request and read its answer. If it is refused (401, 403) by a region whose clock differs from what
        was known of it, send it once more with the right time.

        :raises NoAnswer: if the connection cannot be made or is lost, the answer is cut or no HTTP, or time is up.
        """
        sent = self._now() + self._skew
        answer = self._request(method, path, body, content_type, accept)
        if answer.status in (401, 403) and self.learn_clock(answer, sent):
            self._say(
                "the region refused a request ({} {}), and its clock is {:.0f} s ahead of this machine's: taking that, "
                "and asking once more".format(answer.status, answer.reason, self._skew)
            )
            answer = self._request(method, path, body, content_type, accept)
        return answer

    def _request(self, method: str, path: str, body: bytes, content_type: str, accept: str) -> Answer:
        parts = urllib.parse.urlsplit(self.url(path))
        deadline = self._deadline_seconds + len(body) / SLOWEST
        connection = self._connection(parts)

        def exchange() -> Answer:
            try:
                return self._exchange(connection, method, parts, body, content_type, accept)
            finally:
                connection.close()

        try:
            return within(deadline, exchange)
        except TooLong as error:
            _close(connection)
            raise NoAnswer(str(error)) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise NoAnswer(_words(error)) from error

    def _connection(self, parts: urllib.parse.SplitResult) -> http.client.HTTPConnection:
        host = parts.hostname or ""
        if parts.scheme == "https":
            return http.client.HTTPSConnection(host, parts.port, timeout=self._connect_seconds)
        return http.client.HTTPConnection(host, parts.port, timeout=self._connect_seconds)

    def _exchange(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        parts: urllib.parse.SplitResult,
        body: bytes,
        content_type: str,
        accept: str,
    ) -> Answer:
        headers = {"Authorization": self.authorization(), "Accept": accept, "Connection": "close"}
        if content_type:
            headers["Content-Type"] = content_type
        # Not HTTPSConnection's own: while that shakes hands, nobody else knows the socket, and could close it.
        http.client.HTTPConnection.connect(connection)
        if isinstance(connection, http.client.HTTPSConnection):
            context = ssl.create_default_context()
            wrapped = context.wrap_socket(
                connection.sock, server_hostname=connection.host, do_handshake_on_connect=False
            )
            connection.sock = wrapped
            wrapped.do_handshake()
        connection.sock.settimeout(self._read_seconds)
        target = parts.path + ("?" + parts.query if parts.query else "")
        broken: Optional[OSError] = None
        try:
            connection.request(method, target, body if method != "GET" else None, headers)
        except OSError as error:
            # A server may refuse a body before it has read it: then the answer is there already, and says why.
            broken = error
        try:
            response = connection.getresponse()
        except (OSError, http.client.HTTPException):
            if broken is not None:
                raise broken from None
            raise
        with response:
            # A connection that is closed stays open for as long as there is an answer to be read from it.
            content = _content(response, LARGEST_ANSWER if method == "GET" else LARGEST_REPLY)
        found = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, response.reason, found, content)

    def authorization(self) -> str:
        """The Authorization header: OAuth 1.0 with PLAINTEXT (RFC 5849)."""
        mine = self._credentials
        values = [
            ("oauth_version", "1.0"),
            ("oauth_signature_method", "PLAINTEXT"),
            ("oauth_consumer_key", mine.consumer_key),
            ("oauth_token", mine.token_key),
            ("oauth_signature", "&" + mine.token_secret),
            ("oauth_nonce", uuid.uuid4().hex),
            ("oauth_timestamp", str(int(self._now() + self._skew))),
        ]
        listed = ", ".join('{}="{}"'.format(name, urllib.parse.quote(value, safe="")) for name, value in values)
        return 'OAuth realm="", ' + listed


def _content(response: http.client.HTTPResponse, largest: int) -> bytes:
    pieces: List[bytes] = []
    size = 0
    while True:
        # In pieces: Python before 3.10 makes room for all that may come before it reads.
        piece = response.read(PIECE)
        if not piece:
            break
        pieces.append(piece)
        size += len(piece)
        if size > largest:
            raise NoAnswer("the answer has more than {} bytes".format(largest))
    if response.length:
        raise NoAnswer("the answer was cut off: {} bytes are missing".format(response.length))
    return b"".join(pieces)


def _close(connection: http.client.HTTPConnection) -> None:
    """End what another thread waits for on this connection."""
    sock = connection.sock
    if sock is None:
        return
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        # It is closed already.
        return


def _words(error: BaseException) -> str:
    """An error for people: the name of its kind alone says little."""
    text = str(error)
    if isinstance(error, socket.timeout):
        return "timed out ({})".format(text or "no byte came")
    if isinstance(error, http.client.IncompleteRead):
        return "the answer was cut off after {} bytes".format(len(error.partial))
    if isinstance(error, http.client.RemoteDisconnected):
        return "the connection was closed before an answer came"
    if isinstance(error, http.client.BadStatusLine):
        return "what came is no HTTP answer: {!r}".format(text[:80])
    return "{}: {}".format(type(error).__name__, text) if text else type(error).__name__


def encode_form(fields: Iterable[Tuple[str, str]], files: Iterable[File] = ()) -> Tuple[bytes, str]:
    """A multipart/form-data body (RFC 7578) and its Content-Type. Files are sent byte for byte."""
    listed = list(files)
    boundary = base64.b32encode(os.urandom(20)).decode("ascii")
    lines: List[bytes] = []
    for name, value in fields:
        lines += [b"--" + boundary.encode("ascii"), 'Content-Disposition: form-data; name="{}"'.format(
            _quoted(name)).encode("utf-8"), b"", value.encode("utf-8", "backslashreplace")]  # fmt: skip
    for file in listed:
        lines += [
            b"--" + boundary.encode("ascii"),
            'Content-Disposition: form-data; name="{0}"; filename="{0}"'.format(_quoted(file.name)).encode("utf-8"),
            b"Content-Type: application/octet-stream",
            b"",
            file.content,
        ]
    lines += [b"--" + boundary.encode("ascii") + b"--", b""]
    return b"\r\n".join(lines), "multipart/form-data; boundary=" + boundary


def _quoted(name: str) -> str:
    return name.replace("\\", "\\\\").replace('"', '\\"').replace("\r", " ").replace("\n", " ")
