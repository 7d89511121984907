"""How does what a handler gives, or raises, become an HTTP response?

Every response has a correlation id. What a handler raises on purpose is the client's to mend; anything else is the
region's own: 5xx, and the log holds the details under that id.
"""

from __future__ import annotations

import io
import uuid
from collections.abc import Coroutine
from typing import Any, Final

from prometheus_client import Counter
from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import Logger

from region.api import descriptions
from region.api.oauth import Unauthorized
from region.api.operations import ApiError, Reply, text
from region.api.sending import send
from region.database import DatabaseUnavailable

log = Logger()

RESPONSES: Final = Counter("stanchion_api_responses", "Answers of the API, by HTTP status.", ["status"])

DATABASE_RETRY_SECONDS: Final = 5


def new_correlation() -> str:
    """What a request is called in the log and in its response, from now on."""
    return uuid.uuid4().hex


def respond(request: Any, correlation: str, replying: Coroutine[Any, Any, Reply]) -> Deferred[bytes]:
    """The body of the response to ``request``, whose status and headers are set, once ``replying`` has ended.

    A client that hangs up takes back what it wanted to read, but not what it has asked to be done.
    """
    answering = Deferred.fromCoroutine(replying)
    answering.addErrback(_failed, request, correlation)
    written = answering.addCallback(lambda reply: write(request, reply, correlation))
    if request.method in (b"GET", b"HEAD"):
        return written.addCallback(lambda body: send(request, body))
    response: Deferred[bytes] = Deferred()

    def passed(result: Any) -> None:
        if not response.called:
            response.callback(result)

    written.addBoth(passed)
    return response


def _failed(failure: Any, request: Any, correlation: str) -> Reply:
    """The answer to a request that ended in an exception."""
    error = failure.value
    method, path = request.method.decode("ascii", "replace"), request.path.decode("utf-8", "replace")
    match error:
        case ApiError():
            return error.reply
        case Unauthorized():
            log.info(
                "{method} {path} refused: {reason} [{correlation}]",
                method=method, path=path, reason=str(error), correlation=correlation,
            )  # fmt: skip
            return text(f"Authorization Error: {error}", 401, **{"WWW-Authenticate": 'OAuth realm="MAAS API"'})
        case CancelledError():
            # The client is gone; this is written to nobody.
            return text("The request was given up.", 503)
        case DatabaseUnavailable():
            log.error(
                "{method} {path}: the database is unavailable: {reason} [{correlation}]",
                method=method, path=path, reason=str(error), correlation=correlation,
            )  # fmt: skip
            return text(
                f"The region cannot reach its database; try again. The log has the details under {correlation}.",
                503,
                **{"Retry-After": str(DATABASE_RETRY_SECONDS)},
            )
    log.failure(
        "{method} {path} failed [{correlation}]", failure, method=method, path=path, correlation=correlation
    )  # fmt: skip
    return text(f"The region failed to answer; its log has the details under {correlation}.", 500)


def write(request: Any, reply: Reply, correlation: str) -> bytes:
    """Set the status and headers of the response; its body."""
    request.setResponseCode(reply.status)
    RESPONSES.labels(str(reply.status)).inc()
    headers = {
        "X-Correlation-Id": correlation,
        "X-MAAS-API-Hash": descriptions.description_hash(),
        "Cache-Control": "no-store",
        **({"Content-Type": reply.content_type} if reply.content_type else {}),
        **({"Content-Length": str(len(reply.body))} if reply.status != 204 else {}),
        **reply.headers,
    }
    for name, value in headers.items():
        request.responseHeaders.setRawHeaders(name, [value])
    return reply.body


def authorization_of(request: Any) -> str:
    """The Authorization header of the request; empty if there is none."""
    header: bytes = request.requestHeaders.getRawHeaders(b"Authorization", [b""])[-1]
    return header.decode("utf-8", "replace")


def read_body(request: Any) -> bytes:
    """The body of a request of :class:`~region.api.site.ApiRequest`.

    :raises ApiError: 413, if it is larger than it may be.
    """
    limit = request.body_limit
    too_large = ApiError(text(f"The request's body is too large; at most {limit} bytes are accepted.", 413))
    if request.body_too_large:
        raise too_large
    request.content.seek(0)
    body: bytes = request.content.read(limit + 1)
    if len(body) > limit:
        raise too_large
    return body


def body_size(request: Any) -> int:
    """Bytes of the request's body that are there to be read."""
    request.content.seek(0, io.SEEK_END)
    size: int = request.content.tell()
    return size


def content_type_of(request: Any) -> str:
    """The Content-Type that the request says, if any."""
    header: bytes = request.requestHeaders.getRawHeaders(b"Content-Type", [b""])[0]
    return header.decode("utf-8", "replace")
