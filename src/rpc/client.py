"""How the command line talks to a region's HTTP API: one blocking request, and an error that says what went wrong.

The key is ``consumer:token:secret``, sent as OAuth 1.0 PLAINTEXT (RFC 5849 section 3.4.4). No proxy of the environment
is used and no redirect is followed, so that the key goes to the address that was named and nowhere else.
"""

from __future__ import annotations

import http.client
import json
import socket
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlencode

from attrs import frozen
from oauthlib.oauth1 import SIGNATURE_PLAINTEXT
from oauthlib.oauth1 import Client as OAuthClient

from rpc.console import CommandFailed, Status, safe
from rpc.profile import Profile

TIMEOUT: Final = 30.0
"""Seconds that the region may take to answer; it asks racks for 2 seconds at most by default."""

LIMIT: Final = 256 << 20
"""Bytes of an answer that are read at most."""


Fields = Mapping[str, str | list[str]]
"""The fields of a form; a list is a field that is given several times."""

NO_FIELDS: Final[Fields] = {}
NO_FILES: Final[Mapping[str, bytes]] = {}


class Unreachable(CommandFailed):
    """The region did not answer at all."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"cannot reach the region at {url}: {reason}", Status.UNREACHABLE)
        self.reason = reason


class Refused(CommandFailed):
    """The region answered with a status other than 2xx: ``code``, ``text`` (the body) and ``headers``."""

    def __init__(self, method: str, url: str, code: int, text: str, headers: Mapping[str, str]) -> None:
        self.code = code
        self.text = text
        self.headers = headers
        status, hint = Status.USAGE, ""
        if code in (404, 409):
            status = Status.NO
        elif code == 401:
            hint = "; check the key (stanchion region apikey makes one)"
        elif code == 503:
            # An answer that is meant: what it is waiting for is in it.
            status = Status.UNREACHABLE
            retry_after = headers.get("Retry-After", "")
            hint = f"; try again in {retry_after} s" if retry_after.isascii() and retry_after.isdigit() else ""
        elif code >= 500:
            status = Status.UNREACHABLE
            correlation = headers.get("X-Correlation-Id", "")
            hint = f" (its log has the details under {correlation})" if correlation else ""
        did = "refuses" if code < 500 else "cannot do that now" if code == 503 else "failed"
        said = _first_words(text).rstrip(".")
        super().__init__(f"the region {did} ({code} to {method} {url}): {said}{hint}", status)

    @property
    def document(self) -> Any:
        """The body as JSON; None if it is none."""
        try:
            return json.loads(self.text)
        except ValueError:
            return None


SIGN: Final = "X-MAAS-API-Hash"
"""A header that every answer of a region's API has. What has it not is another server, whatever it says."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *arguments: Any) -> None:
        return None


_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())


@frozen
class Answer:
    """An answer: its ``document`` is decoded JSON, or text, or the bytes that were downloaded."""

    document: Any
    headers: Mapping[str, str]


@frozen
class Client:
    """Requests to the API of one region. Every method blocks, and raises :class:`Unreachable` or :class:`Refused`."""

    profile: Profile
    timeout: float = TIMEOUT

    def get(self, path: str, **query: str | list[str] | None) -> Any:
        """The answer to GET ``path`` (below ``/MAAS/api/2.0/``): decoded JSON, or text."""
        return self.request("GET", path, query).document

    def post(self, path: str, fields: Fields = NO_FIELDS, *, op: str | None = None) -> Any:
        """The answer to POST ``path`` with form ``fields`` and the operation ``op``."""
        return self.request("POST", path, {"op": op}, fields).document

    def put(self, path: str, fields: Fields) -> Any:
        """The answer to PUT ``path`` with form ``fields``."""
        return self.request("PUT", path, {}, fields).document

    def upload(self, method: str, path: str, fields: Fields, files: Mapping[str, bytes]) -> Any:
        """The answer to POST or PUT ``path`` with form ``fields``, and ``files`` whose bytes are sent as they are."""
        return self.request(method, path, {}, fields, files).document

    def put_bytes(self, path: str, data: bytes, **query: str | None) -> Any:
        """The answer to PUT ``path`` with ``data`` as the body, as it is."""
        return self.request("PUT", path, query, body=data).document

    def delete(self, path: str) -> None:
        """DELETE ``path``."""
        self.request("DELETE", path, {})

    def request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str | list[str] | None],
        fields: Fields | None = None,
        files: Mapping[str, bytes] = NO_FILES,
        *,
        body: bytes | None = None,
    ) -> Answer:
        """One request; None in ``query`` is left out. ``body`` is sent as it is, in place of a form."""
        url = f"{self.profile.url}/MAAS/api/2.0/{path}"
        given = {name: value for name, value in query.items() if value is not None}
        if given:
            url += "?" + urlencode(given, doseq=True)
        headers = {"Accept": "application/json", "User-Agent": "stanchion"}
        if body is not None:
            headers["Content-Type"] = "application/octet-stream"
        elif files:
            boundary = uuid.uuid4().hex
            body = _multipart(boundary, fields or NO_FIELDS, files)
            headers["Content-Type"] = f"multipart/form-data; boundary={boundary}"
        elif fields is not None:
            body = urlencode(fields, doseq=True).encode("ascii")
            headers["Content-Type"] = "application/x-www-form-urlencoded"
        headers.update(self._authorization(url, method))
        request = urllib.request.Request(url, body, headers, method=method)
        try:
            with _opener.open(request, timeout=self.timeout) as response:
                if SIGN not in response.headers:
                    raise CommandFailed(
                        f"{url} answered, but not as a Stanchion region does: is the address right?", Status.UNREACHABLE
                    )
                document = _decoded(url, response.headers.get_content_type(), _read(response))
                return Answer(document, dict(response.headers))
        except urllib.error.HTTPError as error:
            with error:
                text = _read(error).decode("utf-8", "backslashreplace").strip()
            if 300 <= error.code < 400:
                text = f"redirects to {error.headers.get('Location')!r}; give the right address with --url"
            raise Refused(method, url, error.code, text or error.reason, dict(error.headers)) from None
        except urllib.error.URLError as error:
            raise Unreachable(self.profile.url, _why(error.reason)) from error
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(self.profile.url, _why(error)) from error

    def _authorization(self, url: str, method: str) -> Mapping[str, str]:
        if not self.profile.key:
            return {}
        parts = self.profile.key.split(":")
        if len(parts) != 3 or not all(parts):
            raise CommandFailed("the API key must have three parts, consumer:token:secret", Status.USAGE)
        consumer, token, secret = parts
        signer = OAuthClient(
            consumer, resource_owner_key=token, resource_owner_secret=secret, signature_method=SIGNATURE_PLAINTEXT
        )
        _, headers, _ = signer.sign(url, method)
        return {"Authorization": headers["Authorization"]}


def _read(response: Any) -> bytes:
    data: bytes = response.read(LIMIT + 1)
    if len(data) > LIMIT:
        raise http.client.HTTPException(f"the answer is longer than {LIMIT} bytes")
    return data


def _decoded(url: str, content_type: str, data: bytes) -> Any:
    if content_type == "application/octet-stream":
        return data
    if content_type != "application/json":
        return data.decode("utf-8", "backslashreplace")
    try:
        return json.loads(data)
    except ValueError as error:
        raise CommandFailed(f"{url} answered with JSON that is none: {error}", Status.UNREACHABLE) from error


def _multipart(boundary: str, fields: Fields, files: Mapping[str, bytes]) -> bytes:
    """A form as multipart (RFC 7578). The names are our own, so that none needs to be quoted."""
    parts = [
        (name, "", value.encode())
        for name, given in fields.items()
        for value in (given if isinstance(given, list) else [given])
    ]
    parts += [
        (name, f'; filename="{name}"\r\nContent-Type: application/octet-stream', content)
        for name, content in files.items()
    ]
    body = b"".join(
        f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + value + b"\r\n"
        for name, more, value in parts
    )
    return body + f"--{boundary}--\r\n".encode()


def _why(reason: object) -> str:
    match reason:
        case TimeoutError():
            return "it did not answer in time"
        case ConnectionRefusedError():
            return "the connection is refused; is the region running there?"
        case socket.gaierror():
            return f"its name is not known ({reason.strerror})"
        case OSError() if reason.strerror:
            return reason.strerror
    return str(reason) or type(reason).__name__


def _first_words(text: str) -> str:
    """The error text for one line: a JSON object of messages by field becomes ``field: message``."""
    try:
        document = json.loads(text)
    except ValueError:
        document = None  # most errors are plain text
    if isinstance(document, dict):
        text = "; ".join(
            f"{name}: {' '.join(map(str, value)) if isinstance(value, list) else value}"
            for name, value in document.items()
        )
    text = " ".join(text.split())
    return safe(text if len(text) <= 500 else text[:500] + "…")
