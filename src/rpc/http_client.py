"""What did an HTTP server really answer to a GET, and did all of the answer arrive?

Twisted's Agent does the talking. This adds what hostile or broken servers make necessary: time-outs for connecting, for
the head and for every pause in the body, a lowest speed, bounds on sizes and redirects, proxies, and one kind of error,
:exc:`FetchError`, whose text says in a sentence what went wrong and whether trying again could help.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import quote, unquote, urljoin, urlsplit, urlunsplit

from attrs import define, field, frozen
from twisted.internet.defer import CancelledError, maybeDeferred
from twisted.internet.defer import TimeoutError as DeferredTimeout
from twisted.internet.interfaces import IReactorTime
from twisted.internet.protocol import Protocol
from twisted.python.failure import Failure
from twisted.web.client import HTTPConnectionPool, _HTTP11ClientFactory
from twisted.web.http_headers import Headers
from twisted.web.iweb import UNKNOWN_LENGTH, IAgent, IPolicyForHTTPS, IResponse

from rpc.http_errors import WITHHELD, FetchError, explain, innermost
from rpc.receiving import Receiver
from rpc.tunnels import basic, make_agent
from rpc.urls import public

MAX_REDIRECTS: Final = 5
REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
RETRIABLE: Final = frozenset({408, 425, 429})
"""Statuses below 500 that say that asking again may help."""

_SHOWN: Final = 300
"""Characters of a server's own words that a reason quotes."""

_DRAINED: Final = 1 << 16


@frozen
class Answer:
    """The head of an answer; the body has not been read. ``url`` is where it came from, after redirects."""

    url: str
    status: int
    phrase: str
    headers: Headers
    length: int | None
    """What ``Content-Length`` says, in bytes, or None if the server did not say."""
    response: IResponse

    def header(self, name: str) -> str:
        """The last value of a header, or nothing."""
        values = self.headers.getRawHeaders(name)
        return str(values[-1]).strip() if values else ""


class _QuietFactory(_HTTP11ClientFactory):
    """Makes the pool's connections without two lines in the log for each."""

    noisy = False


@define(eq=False)
class HttpClient:
    """Asks servers, over connections that are kept and used again.

    :param reactor: the reactor; time is taken from it.
    :param proxy: ``http://[user:password@]host:port`` of a proxy for both http and https, or nothing.
    :param connect_timeout: seconds for a connection, and for a proxy's tunnel.
    :param idle_timeout: seconds for the head of an answer, and without a byte of a body.
    :param agent: asks in place of our own agent; for tests. The proxy is then not used.
    :param tls_policy: how servers are verified; by default like a browser with the system's certificates.
    """

    reactor: IReactorTime
    proxy: str = ""
    connections: int = 4
    connect_timeout: float = 10.0
    idle_timeout: float = 30.0
    agent: IAgent | None = None
    tls_policy: IPolicyForHTTPS | None = None
    _pool: HTTPConnectionPool = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._pool = HTTPConnectionPool(self.reactor)
        self._pool._factory = _QuietFactory
        self._pool.maxPersistentPerHost = self.connections
        if self.agent is None:
            self.agent = make_agent(self.reactor, self._pool, self.proxy, self.connect_timeout, self.tls_policy)

    async def get(self, url: str, headers: Mapping[str, str] | None = None) -> Answer:
        """GET ``url``, follow redirects, and give the head of the final answer, whatever its status.

        The body must then be taken with :meth:`receive` or refused with :meth:`refuse`.

        :raises FetchError: if there is no answer, or the redirects lead nowhere.
        """
        _request_url(url)
        seen = [url]
        secret = urlsplit(url)
        while True:
            answer = await self._ask(seen[-1], headers or {}, same_origin=_origin(seen[-1]) == _origin(url))
            if answer.status not in REDIRECTS:
                return answer
            target = self._redirected(seen, answer)
            await self._drain(answer)
            if secret.username is not None and _origin(target) == _origin(url):
                target = _with_credentials(target, secret.netloc.rpartition("@")[0])
            seen.append(target)

    async def read(self, url: str, *, limit: int) -> bytes:
        """The whole body of a 200 answer. :raises FetchError: for any other end, or if it is over ``limit`` bytes."""
        answer = await self.get(url)
        problem = self.problem(answer)
        if answer.status == 206:
            problem = FetchError(url, "the server answered 206 with a part although all was asked for")
        if problem is None and answer.length is not None and answer.length > limit:
            problem = FetchError(url, f"it is {answer.length} bytes long, over the limit of {limit}")
        if problem is None and (coding := answer.header("Content-Encoding").lower()) not in ("", "identity"):
            problem = FetchError(url, f"the server encoded it as {coding!r}, although that was not accepted")
        if problem is not None:
            await self._drain(answer)
            raise problem
        parts: list[bytes] = []
        await self.receive(answer, parts.append, limit=limit)
        return b"".join(parts)

    def problem(self, answer: Answer) -> FetchError | None:
        """What an answer that is neither 200 nor 206 means."""
        if answer.status in (200, 206):
            return None
        if answer.status == 503 and (why := answer.header(WITHHELD)):
            text = f"the server cannot give it now: it {why[:_SHOWN]}"
            return FetchError(answer.url, text, status=answer.status, withheld=True)
        wait = answer.header("Retry-After")
        return FetchError(
            answer.url,
            f"the server answered {answer.status} {answer.phrase}".rstrip(),
            retriable=answer.status >= 500 or answer.status in RETRIABLE,
            status=answer.status,
            retry_after=float(wait) if wait.isascii() and wait.isdigit() else 0.0,
        )

    async def receive(self, answer: Answer, consume: Callable[[bytes], Any], *, limit: int) -> int:
        """Hand the body to ``consume`` in blocks (of :data:`rpc.receiving.BLOCK` bytes) and give the number of bytes.

        ``consume`` may give a Deferred; meanwhile at most :data:`rpc.receiving.HIGH_WATER` bytes, and what one read of
        the socket brings, are collected: then the server has to wait. What came before an error is handed over too.

        :raises FetchError: if the body is over ``limit`` bytes, was cut, stalls, or is too slow.
        """
        receiver = Receiver(self.reactor, answer.url, answer.length, consume, limit, self.idle_timeout)
        answer.response.deliverBody(receiver)
        return await receiver.done

    def refuse(self, answer: Answer) -> None:
        """Close the connection of an answer whose body is not wanted."""
        answer.response.deliverBody(_Refuser())

    async def close(self) -> None:
        """Close the connections that are kept for later."""
        await self._pool.closeCachedConnections()

    async def _ask(self, url: str, headers: Mapping[str, str], *, same_origin: bool) -> Answer:
        address, user, password = _request_url(url)
        fields = Headers({"Accept-Encoding": ["identity"], "User-Agent": ["stanchion"]})
        for name, value in headers.items():
            fields.setRawHeaders(name, [value])
        if same_origin and user is not None:
            fields.setRawHeaders("Authorization", [basic(user, password or "")])
        assert self.agent is not None
        seconds = self.connect_timeout + self.idle_timeout
        try:
            asked = maybeDeferred(self.agent.request, b"GET", address, fields)
            asked.addTimeout(seconds, self.reactor, _timed_out)
            response = await asked
        except CancelledError:
            raise
        except DeferredTimeout:
            raise FetchError(url, f"the server did not answer within {seconds:g} seconds", retriable=True) from None
        except Exception as failure:
            if isinstance(innermost(failure), CancelledError):
                raise CancelledError() from failure
            reason, retriable = explain(failure, self.connect_timeout)
            raise FetchError(url, reason, retriable=retriable) from failure
        phrase = bytes(response.phrase).decode("utf-8", "replace")[:200]
        length = None if response.length is UNKNOWN_LENGTH else int(response.length)
        return Answer(url, response.code, phrase, response.headers, length, response)

    def _redirected(self, seen: list[str], answer: Answer) -> str:
        """The URL that a redirect leads to, if it may be followed."""
        location = answer.header("Location")
        here = seen[-1]
        reason = ""
        target = ""
        try:
            target = urljoin(here, location)
            scheme, was = urlsplit(target).scheme, urlsplit(here).scheme
        except ValueError:
            scheme = was = ""
        if not location:
            reason = f"the server answered {answer.status} without saying where to go"
        elif scheme not in ("http", "https"):
            reason = f"the server redirects to {public(location)!r}, which is neither http nor https"
        elif (was, scheme) == ("https", "http"):
            reason = f"the server redirects from https to {public(target)}, which is not protected"
        elif target in seen:
            reason = f"the server redirects in a loop, back to {public(target)}"
        elif len(seen) > MAX_REDIRECTS:
            reason = f"the server redirects more than {MAX_REDIRECTS} times, at last to {public(target)}"
        if reason:
            self.refuse(answer)
            raise FetchError(seen[0], reason, status=answer.status)
        return target

    async def _drain(self, answer: Answer) -> None:
        """Get rid of a body: read it if it is short, so that the connection can be used again, else close."""
        if answer.length is None or answer.length > _DRAINED:
            self.refuse(answer)
            return
        try:
            await self.receive(answer, lambda data: None, limit=_DRAINED)
        except FetchError:
            return  # what matters is the answer's head; its body's fate is of no interest, and the connection is closed


def _timed_out(_result: object, seconds: float) -> Failure:
    """What a request that was cancelled for its time-out ends in, whatever the Agent makes of the cancelling."""
    return Failure(DeferredTimeout(f"{seconds:g} seconds"))


class _Refuser(Protocol):
    """Closes the connection of a body at once."""

    def connectionMade(self) -> None:
        assert self.transport is not None
        self.transport.loseConnection()


def _origin(url: str) -> tuple[str, str | None, int | None]:
    """What credentials are good for; for what is not a URL, something that equals nothing else."""
    try:
        parts = urlsplit(url)
        return parts.scheme, parts.hostname, parts.port
    except ValueError:
        return "", url, None


def _with_credentials(url: str, credentials: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f"{credentials}@{parts.netloc.rpartition('@')[2]}"))


def _request_url(url: str) -> tuple[bytes, str | None, str | None]:
    """What the Agent is to be asked for, and the user and password that the URL held."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as problem:
        raise FetchError(url, f"that is not a URL: {problem}") from problem
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise FetchError(url, "that is not an http or https URL with a host")
    try:
        host = parts.hostname.encode("idna").decode()
    except UnicodeError as problem:
        raise FetchError(url, f"{parts.hostname!r} is not a host's name: {problem}") from problem
    if ":" in host:
        host = f"[{host}]"
    netloc = host if port is None else f"{host}:{port}"
    path = quote(parts.path, safe="/%:@!$&'()*+,;=~-._") or "/"
    query = quote(parts.query, safe="/%:@!$&'()*+,;=~-._?")
    address = urlunsplit((parts.scheme, netloc, path, query, "")).encode("ascii")
    user = None if parts.username is None else unquote(parts.username)
    return address, user, None if parts.password is None else unquote(parts.password)
