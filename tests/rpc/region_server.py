"""A pretended region for tests of the command line: an HTTP server on loopback that answers as it was told."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from attrs import define, field, frozen

from region.api.forms import FileValue, parse_body

BASE = "/MAAS/api/2.0/"


@frozen
class Seen:
    """A request that came in; ``path`` is below the API's root."""

    method: str
    path: str
    query: dict[str, list[str]]
    form: dict[str, list[str]]
    headers: Mapping[str, str]


@frozen
class Told:
    """An answer to give."""

    document: Any = ""
    status: int = 200
    headers: Mapping[str, str] = field(factory=dict)


def _form(content_type: str, body: bytes) -> dict[str, list[str]]:
    """The fields of a body; a file's bytes as Latin-1, so that none is lost; a body that is no form as the field ""."""
    if content_type == "application/octet-stream":
        return {"": [body.decode("latin-1")]}
    if not content_type.startswith("multipart/"):
        return parse_qs(body.decode())
    found: dict[str, list[str]] = {}
    for name, values in parse_body(content_type, body).items():
        found[name] = [one.data.decode("latin-1") if isinstance(one, FileValue) else one for one in values]
    return found


@define
class RegionServer:
    """Answers ``(method, path)`` with what ``answers`` says; a tuple of answers is used up from the front."""

    answers: dict[tuple[str, str], Any] = field(factory=dict)
    seen: list[Seen] = field(factory=list)
    _server: Any = None
    _thread: Any = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def start(self) -> None:
        """Listen and serve in a thread."""
        region = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                parts = urlsplit(self.path)
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                form = _form(self.headers.get("Content-Type") or "", body)
                path = parts.path.removeprefix(BASE)
                region.seen.append(Seen(self.command, path, parse_qs(parts.query), form, dict(self.headers)))
                told = region.answers.get((self.command, path), Told(f"no {self.command} {path}", 404))
                if isinstance(told, tuple):
                    told, *rest = told
                    if rest:
                        region.answers[self.command, path] = tuple(rest)
                if not isinstance(told, Told):
                    told = Told(told)
                is_text = isinstance(told.document, str)
                if isinstance(told.document, bytes):
                    data, kind = told.document, "application/octet-stream"
                else:
                    data = (told.document if is_text else json.dumps(told.document)).encode()
                    kind = "text/plain; charset=utf-8" if is_text else "application/json"
                self.send_response(told.status)
                headers = {"Content-Type": kind}
                headers |= {"Content-Length": str(len(data)), "X-MAAS-API-Hash": "x", **told.headers}
                headers = {name: value for name, value in headers.items() if value}
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PUT = do_DELETE = answer

            def log_message(self, format: str, *args: Any) -> None:
                """Tests look at ``seen`` instead."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def stop(self) -> None:
        """Stop; returns when it is over."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
