"""An HTTP client for tests that sends exactly the bytes it is told to, over a connection in memory."""

from __future__ import annotations

import json
from email.message import Message
from http.client import HTTPResponse
from io import BytesIO
from typing import Any, cast
from urllib.parse import urlencode

from attrs import frozen
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IAddress
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure
from twisted.web.resource import Resource
from twisted.web.server import Site

from region.api import ApiRequest
from region.web import tree

AUTHORIZATION = (
    'OAuth oauth_version="1.0", oauth_signature_method="PLAINTEXT", oauth_consumer_key="consumer", '
    'oauth_token="token", oauth_signature="%26secret", oauth_nonce="1", oauth_timestamp="1"'
)


@frozen
class Response:
    """What came back."""

    status: int
    headers: Message
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Connection:
    """One connection to a site that has ``resource`` at ``/MAAS/api/2.0``."""

    def __init__(self, resource: Any, clock: Clock, metadata: Resource | None = None) -> None:
        root = tree(resource, Resource(), Resource(), metadata)
        self.attach(Site(root, requestFactory=ApiRequest, reactor=clock))

    def attach(self, site: Site) -> None:
        """Connect to ``site``, whatever it has."""
        self.protocol: Any = site.buildProtocol(cast(IAddress, None))
        self.transport = StringTransport()
        self.protocol.makeConnection(self.transport)

    def write(self, data: bytes) -> None:
        """Send bytes as they are."""
        self.protocol.dataReceived(data)

    def send(self, method: str, path: str, body: bytes = b"", *, key: bool = True, **headers: str) -> None:
        """Send a request; ``path`` is below ``/MAAS/api/2.0/`` unless it begins with a slash."""
        uri = path if path.startswith("/") else f"/MAAS/api/2.0/{path}"
        given = {"Host": "region.example.com:5240", **({"Authorization": AUTHORIZATION} if key else {})}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        if body or method in ("POST", "PUT"):
            given.setdefault("Content-Length", str(len(body)))
        head = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        self.write(f"{method} {uri} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body)

    def hang_up(self) -> None:
        """Close the connection."""
        self.protocol.connectionLost(Failure(ConnectionDone()))

    @property
    def is_answered(self) -> bool:
        return bool(self.transport.value())

    def response(self, method: str = "GET") -> Response:
        """The response that has come."""
        data = self.transport.value()
        if not data:
            raise AssertionError("there is no response yet")
        self.transport.clear()

        class Socket:
            def makefile(self, mode: str) -> BytesIO:
                return BytesIO(data)

        response = HTTPResponse(cast(Any, Socket()), method=method)
        response.begin()
        return Response(response.status, response.headers, response.read())


def form(**fields: Any) -> dict[str, Any]:
    """The arguments of :meth:`Connection.send` for a urlencoded form."""
    return {
        "body": urlencode(fields, doseq=True).encode(),
        "Content_Type": "application/x-www-form-urlencoded",
    }
