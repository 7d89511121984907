"""An HTTP server in a thread that serves what it is told, and holds an answer in its middle until it is let go."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

HOLD_SECONDS = 120.0


class GatedServer:
    """Serves ``read(path)`` for each path; None is a 404.

    After :meth:`hold`, each answer whose path contains the text stops in its middle; :attr:`held` is set when one has,
    and :meth:`let_go` lets them all go on.
    """

    def __init__(self, read: Callable[[str], bytes | None]) -> None:
        self.paths: list[str] = []
        self.held = threading.Event()
        self._read = read
        self._text = ""
        self._open = threading.Event()
        self._open.set()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                server.answer(self)

            def log_message(self, format: str, *arguments: Any) -> None:
                return

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                # Peers are killed in these tests; whatever else goes wrong shows as a missing answer.
                return

        self._server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def hold(self, text: str) -> None:
        self._text = text
        self._open.clear()

    def let_go(self) -> None:
        self._open.set()

    def close(self) -> None:
        self.let_go()
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.paths.append(request.path)
        try:
            data = self._read(request.path)
        except urllib.error.HTTPError as error:
            with error:
                body = error.read()
            request.send_response(error.code)
            for name in ("Retry-After", "X-Stanchion-Withheld"):
                if name in error.headers:
                    request.send_header(name, error.headers[name])
            request.send_header("Content-Length", str(len(body)))
            request.end_headers()
            request.wfile.write(body)
            return
        if data is None:
            request.send_error(404)
            return
        begin = 0
        asked = request.headers.get("Range", "")
        if asked.startswith("bytes=") and asked.endswith("-"):
            begin = int(asked[6:-1])
            request.send_response(206)
            request.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        else:
            request.send_response(200)
        body = data[begin:]
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        half = len(body) // 2
        try:
            request.wfile.write(body[:half])
            request.wfile.flush()
            if self._text and self._text in request.path and not self._open.is_set():
                self.held.set()
                self._open.wait(HOLD_SECONDS)
            request.wfile.write(body[half:])
        except (BrokenPipeError, ConnectionResetError):
            request.close_connection = True  # whoever asked was killed, which is what these tests do


def directory_reader(root: Path) -> Callable[[str], bytes | None]:
    """Reads files below ``root``."""

    def read(path: str) -> bytes | None:
        file = root / path.lstrip("/")
        return file.read_bytes() if file.is_file() else None

    return read


def forwarding_reader(base: Callable[[], str]) -> Callable[[str], bytes | None]:
    """Reads from the server at ``base()``; raises HTTPError for what that refuses."""

    def read(path: str) -> bytes | None:
        with urllib.request.urlopen(base() + path, timeout=30) as answer:
            data: bytes = answer.read()
            return data

    return read
