"""A region for the runner that goes wrong as it is told: on which requests, how, and how often.

It keeps what it processed as the real one does: a signal that is equal to one it has is a replay and changes nothing.
"""

from __future__ import annotations

import io
import json
import re
import socket
import struct
import tarfile
import threading
from collections.abc import Callable, Mapping
from email.utils import formatdate
from typing import Any, Final

from attrs import define, field, frozen

from node.client import Answer, Client, NoAnswer
from node.credentials import Credentials
from tests.node.virtual import VirtualClock

SECRET: Final = "s3cr3t-of-the-token"
CREDENTIALS_PARTS: Final = ("consumer-of-node", "key-of-the-token", SECRET)

KINDS: Final = ("fetch", "fetch tests", "installing", "working", "result", "testing", "heartbeat", "final")
"""What the runner asks for and tells, apart by what it is for."""

SKEW_SECONDS: Final = 86_400.0

READ_SECONDS: Final = 0.15
"""How long the client of these tests waits for a byte, in real time; the clock of the test moves by what the real one
would have waited."""


@frozen
class Fault:
    """What goes wrong, in words; ``is_final`` if it means that the item will never be taken."""

    name: str
    is_final: bool = False
    is_processed: bool = False
    """Whether the region did its work all the same."""


FAULTS: Final = (
    Fault("refuse"),
    Fault("reset before the body"),
    Fault("reset after the body"),
    Fault("hang"),
    Fault("trickle"),
    Fault("400", is_final=True),
    Fault("401", is_final=True),
    Fault("401 with a skewed Date"),
    Fault("404", is_final=True),
    Fault("409"),
    Fault("409 with Retry-After"),
    Fault("500"),
    Fault("502 with HTML"),
    Fault("503 with Retry-After in seconds"),
    Fault("503 with Retry-After as a date"),
    Fault("200 with garbage"),
    Fault("answer lost", is_processed=True),
    Fault("answer cut", is_processed=True),
)


@define
class HostileRegion:
    """The region's side. Requests are handled one at a time.

    :param is_faulty: whether the request of this kind, and with this number among those of its kind (from 1), goes
        wrong.
    """

    clock: VirtualClock
    index: Mapping[str, list[dict[str, Any]]]
    fault: Fault = Fault("none")
    is_faulty: Callable[[str, int], bool] = lambda kind, number: False
    status: str = "Commissioning"
    stop: bool = False
    requests: list[tuple[str, float]] = field(factory=list)
    """The kind and time of each request that was made, whether it got here or not."""
    results: dict[int, set[bytes]] = field(factory=dict)
    """The distinct bodies that came for each result."""
    finals: set[tuple[str, str]] = field(factory=set)
    begun: list[int] = field(factory=list)
    heartbeats: list[str] = field(factory=list)
    counts: dict[str, int] = field(factory=dict)
    authorizations: list[str] = field(factory=list)
    _lock: threading.Lock = field(factory=threading.Lock)
    _server: socket.socket = field(factory=socket.socket)
    _is_open: bool = True

    def start(self) -> str:
        """Serve; the URL of the metadata service."""
        self._server.bind(("127.0.0.1", 0))
        self._server.listen(64)
        threading.Thread(target=self._serve, daemon=True).start()
        return f"http://127.0.0.1:{self._server.getsockname()[1]}/MAAS/metadata/"

    def close(self) -> None:
        self._is_open = False
        # Closing alone does not wake a thread that accepts.
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def next_fault(self, kind: str) -> str:
        """What goes wrong with the request of this kind that is being made; empty if nothing does."""
        with self._lock:
            self.requests.append((kind, self.clock.now()))
            number = self.counts[kind] = self.counts.get(kind, 0) + 1
            return self.fault.name if self.is_faulty(kind, number) else ""

    def _serve(self) -> None:
        while self._is_open:
            try:
                peer, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve_one, args=(peer,), daemon=True).start()

    def _serve_one(self, peer: socket.socket) -> None:
        with peer, peer.makefile("rb") as stream:
            try:
                self._answer(peer, stream)
            except OSError:
                return  # the runner gave up waiting, which is what some of these tests are about

    def _answer(self, peer: socket.socket, stream: io.BufferedReader) -> None:
        first = stream.readline().decode()
        headers: dict[str, str] = {}
        while line := stream.readline().decode().strip():
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        if "accept" not in headers:
            return None  # it was killed while it asked
        kind, _, fault = headers["accept"].partition("kind=")[2].partition(";fault=")
        if fault == "reset before the body":
            reset(peer)
            return None
        length = int(headers.get("content-length", "0"))
        body = stream.read(length)
        if len(body) < length:
            return None  # as above
        if fault == "reset after the body":
            reset(peer)
            return None
        if fault == "hang":
            stream.read(1)
            return None
        if fault == "trickle":
            return self._trickle(peer)
        if fault == "401 with a skewed Date" and not self._is_in_time(headers):
            return self._send(peer, 401, b"You are in another time.", {"Date": self._date(SKEW_SECONDS)})
        if fault and fault != "401 with a skewed Date" and not fault.startswith("answer"):
            status, content, more = self._wrong(fault, headers)
            return self._send(peer, status, content, more)
        with self._lock:
            status, content, more = self._process(first, kind, headers, body)
        if fault == "answer lost":
            reset(peer)
            return None
        return self._send(peer, status, content, more, cut=fault == "answer cut")

    def _is_in_time(self, headers: Mapping[str, str]) -> bool:
        stamp = re.search(r'oauth_timestamp="(\d+)"', headers["authorization"])
        assert stamp is not None
        return abs(int(stamp.group(1)) - self.clock.wall() - SKEW_SECONDS) < 300

    def _date(self, ahead: float = 0.0) -> str:
        return formatdate(self.clock.wall() + ahead, usegmt=True)

    def _wrong(self, fault: str, headers: Mapping[str, str]) -> tuple[int, bytes, dict[str, str]]:
        # Some servers and proxies show what they were sent: no secret may get from there into the log.
        echo = f"You sent: {headers['authorization']}".encode()
        date = {"Date": self._date()}
        if fault == "200 with garbage":
            return 200, b"<html>Welcome to the hotel's network! " + echo, date
        status = int(fault[:3])
        if "HTML" in fault:
            return status, b"<html><h1>Bad gateway</h1>" + b"x" * 450 + echo, date
        if "seconds" in fault or "409 with" in fault:
            date["Retry-After"] = "7"
        if "as a date" in fault:
            date["Retry-After"] = self._date(45)
        return status, echo, {**date, "X-Correlation-Id": "c0ffee"}

    def _trickle(self, peer: socket.socket) -> None:
        for number in range(1000):
            peer.sendall(b"HTTP/1.1 200 OK\r\nX-Filler: "[number : number + 1] or b"x")
            threading.Event().wait(READ_SECONDS / 4)

    def _send(
        self, peer: socket.socket, status: int, content: bytes, headers: Mapping[str, str], cut: bool = False
    ) -> None:
        lines = [f"HTTP/1.1 {status} Reason", f"Content-Length: {len(content)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        data = "\r\n".join([*lines, "", ""]).encode() + content
        peer.sendall(data[: len(data) - max(1, len(content) // 2)] if cut else data)

    def _process(
        self, first: str, kind: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[int, bytes, dict[str, str]]:
        self.authorizations.append(headers["authorization"])
        standing = {"X-Stanchion-Status": self.status, "X-Stanchion-Stop": "true" if self.stop else "false"}
        if first.startswith("GET"):
            data = self._archive()
            return (200, data, standing) if data else (204, b"", standing)
        fields = parse_form(headers["content-type"], body)
        number = int(fields.get("script_result_id", b"0"))
        if kind == "result":
            self.results.setdefault(number, set()).add(
                b"|".join(name.encode() + b"=" + value for name, value in sorted(fields.items()))
            )
        elif kind == "heartbeat":
            self.heartbeats.append(fields["error"].decode())
        elif kind == "testing":
            self.status = "Testing"
        elif kind == "final":
            self.finals.add((fields["status"].decode(), fields["error"].decode()))
        else:
            self.begun.append(number)
        return 200, json.dumps({"status": 1, "status_name": self.status, "stop": self.stop}).encode(), standing

    def _archive(self) -> bytes:
        kinds = ("commissioning_scripts", "testing_scripts") if self.status == "Commissioning" else ("testing_scripts",)
        listed = {
            kind: [
                {**entry, "has_started": entry["script_result_id"] in self.begun}
                for entry in self.index.get(kind, ())
                if entry["script_result_id"] not in self.results
            ]
            for kind in kinds
        }
        if not any(listed.values()):
            return b""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            members = {entry["path"]: b"#!/bin/sh\necho $0\n" for entries in listed.values() for entry in entries}
            members["index.json"] = json.dumps({"1.0": listed}).encode()
            for name, content in members.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        return packed.getvalue()


def reset(peer: socket.socket) -> bool:
    """End a connection with a reset, as a process that is killed or a firewall does."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()
    return True


def parse_form(content_type: str, body: bytes) -> dict[str, bytes]:
    """The fields of a multipart form, and the files by their names."""
    found = re.search(r"boundary=([A-Z2-7]+)", content_type)
    assert found is not None, content_type
    fields = {}
    for part in body.split(b"--" + found.group(1).encode())[1:-1]:
        head, _, value = part.partition(b"\r\n\r\n")
        name = re.search(rb' name="((?:[^"\\]|\\.)*)"', head)
        assert name is not None, head
        fields[name.group(1).decode()] = value[:-2]
    return fields


def kind_of(method: str, content_type: str, body: bytes, has_tested: bool) -> str:
    """Of which of :data:`KINDS` a request is."""
    if method == "GET":
        return "fetch tests" if has_tested else "fetch"
    fields = parse_form(content_type, body)
    status = fields["status"].decode()
    if "exit_status" in fields:
        return "result"
    if "script_result_id" in fields:
        return status.lower()
    return {"WORKING": "heartbeat", "TESTING": "testing"}.get(status, "final")


class WatchedClient(Client):
    """The runner's client, which tells the region beforehand of which kind each request is, and for which the clock
    moves when it waits."""

    def __init__(self, region: HostileRegion, url: str, say: Callable[[str], None]) -> None:
        credentials = Credentials(url, *CREDENTIALS_PARTS)
        super().__init__(credentials, 5.0, READ_SECONDS, 2 * READ_SECONDS, region.clock.wall, say)
        self._region = region
        self._has_tested = False
        self._fault = threading.local()

    def _request(self, method: str, path: str, body: bytes, content_type: str, accept: str) -> Answer:
        kind = kind_of(method, content_type, body, self._has_tested)
        self._has_tested = self._has_tested or kind == "testing"
        fault = self._fault.name = self._region.next_fault(kind)
        # In a header, so that the region knows it before it has read the body.
        try:
            return super()._request(method, path, body, content_type, f"{accept} kind={kind};fault={fault}")
        except NoAnswer:
            if fault in ("hang", "trickle"):
                self._region.clock.sleep(60.0 if fault == "hang" else 120.0)
            raise

    def _connection(self, parts: Any) -> Any:
        if self._fault.name == "refuse":
            # The port that nobody listens at: it is in use by a socket that does not.
            with socket.socket() as nobody:
                nobody.bind(("127.0.0.1", 0))
                parts = parts._replace(netloc=f"127.0.0.1:{nobody.getsockname()[1]}")
        return super()._connection(parts)
