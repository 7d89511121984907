"""A TCP proxy before a server that lets some connections through, and cuts others where it is told."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Literal

from tests.node.hostile import reset

Cut = Literal["", "before the request", "in the request", "before the answer", "in the answer"]


class CuttingProxy:
    """Forwards to ``port`` of loopback.

    :param cut: where the connection with this number (from 0) is cut; empty if it is not.
    """

    def __init__(self, port: int, cut: Callable[[int], Cut]) -> None:
        self.cuts = 0
        self._port = port
        self._cut = cut
        self._count = 0
        self._server = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        port: int = self._server.getsockname()[1]
        return port

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            cut, self._count = self._cut(self._count), self._count + 1
            self.cuts += bool(cut)
            threading.Thread(target=self._serve, args=(client, cut), daemon=True).start()

    def _serve(self, client: socket.socket, cut: Cut) -> None:
        with client:
            if cut == "before the request":
                reset(client)
                return
            try:
                with socket.create_connection(("127.0.0.1", self._port), 10) as server:
                    self._forward(client, server, cut)
            except OSError:
                reset(client)  # the server is not there, or hung up: so does the proxy

    def _forward(self, client: socket.socket, server: socket.socket, cut: Cut) -> None:
        forward = threading.Thread(target=_copy, args=(client, server, 150 if cut == "in the request" else None))
        forward.daemon = True
        forward.start()
        if cut == "in the request":
            forward.join(10)
        elif cut == "before the answer":
            # The server has done its work when the first byte of the answer is there.
            server.recv(1)
        else:
            _copy(server, client, 20 if cut == "in the answer" else None)
        if cut:
            # While a thread reads from it, closing it would not end the connection.
            client.shutdown(socket.SHUT_RD)
            forward.join(10)
            reset(client)


def _copy(source: socket.socket, target: socket.socket, limit: int | None) -> None:
    """Until the end, or so many bytes."""
    try:
        while data := source.recv(65536 if limit is None else limit):
            target.sendall(data)
            if limit is not None:
                return
    except OSError:
        return  # one of the two hung up
