"""A rack as a real process, with a region's TLS and HTTP ends in the test's process, over the loopback interface."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from twisted.internet import reactor as the_reactor
from twisted.internet.defer import Deferred
from twisted.internet.error import ProcessDone, ProcessTerminated
from twisted.internet.protocol import ProcessProtocol
from twisted.internet.threads import deferToThread
from twisted.python.failure import Failure
from twisted.trial.unittest import TestCase
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET, Request, Site

from rack.identity import Identity, write_identity
from rpc.certificates import create_authority, issue_rack, issue_region, make_request, new_key
from rpc.commands import ListImages, Register, ReportInventory, SyncImages
from rpc.endpoints import listen_tls
from rpc.identity import server_tls
from rpc.manifest import parse_manifest
from rpc.outcomes import Answered
from rpc.protocol import Link, Responders, link_factory
from tests.rack.material import contents_of
from tests.rack.test_sync import FIRST, SECOND

reactor: Any = the_reactor


class RackProcess(ProcessProtocol):
    """``twistd rack``; ``ended`` fires with its exit status, ``output`` is what it wrote."""

    def __init__(self) -> None:
        self.ended: Deferred[int] = Deferred()
        self.output = ""

    def childDataReceived(self, descriptor: int, data: bytes) -> None:
        self.output += data.decode("utf-8", "replace")

    def processEnded(self, reason: Failure) -> None:
        end = reason.value
        assert isinstance(end, ProcessDone | ProcessTerminated)
        status = end.exitCode if end.exitCode is not None else -int(end.signal or 0)
        self.ended.callback(status)


class Stream(Resource):
    """A region's stream. A content in ``stalled`` is begun and never ended."""

    isLeaf = True

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, bytes] = {}
        self.stalled: set[str] = set()
        self.requests: list[str] = []
        self.on_stall: Deferred[None] = Deferred()

    def publish(self, manifest: Any) -> None:
        self.files[f"/stream/generations/{manifest.digest}/manifest.json"] = manifest.canonical
        for sha256, data in contents_of(*manifest.images).items():
            self.files[f"/stream/blobs/{sha256}"] = data

    def render_GET(self, request: Request) -> bytes | int:
        path = request.path.decode("ascii")
        self.requests.append(path)
        data = self.files.get(path)
        if data is None:
            request.setResponseCode(404)
            return b"no such thing\n"
        request.setHeader("content-length", str(len(data)))
        if path.rpartition("/")[2] in self.stalled:
            request.notifyFinish().addErrback(lambda _: None)
            request.write(data[:100])
            if not self.on_stall.called:
                self.on_stall.callback(None)
            return NOT_DONE_YET
        return data


class TestProcess(TestCase):
    timeout = 120

    def setUp(self) -> None:
        self.root = Path(self.mktemp()).absolute()
        self.root.mkdir(parents=True)
        now = datetime.now(UTC)
        authority = create_authority(now)
        key = new_key()
        self.links: list[Link] = []
        self.reports: list[dict[str, Any]] = []
        self.waiting: list[tuple[Callable[[dict[str, Any]], bool], Deferred[None]]] = []
        responders = Responders("region", {Register: self.register, ReportInventory: self.report})
        listening: Any = listen_tls(
            reactor, 0, "127.0.0.1", server_tls(issue_region(authority, now), authority.certificate),
            link_factory(lambda: Link(responders, clock=reactor)),
        )  # fmt: skip
        self.addCleanup(listening.stopListening)
        self.stream = Stream()
        self.http = reactor.listenTCP(0, Site(self.stream), interface="127.0.0.1")
        self.addCleanup(self.http.stopListening)
        write_identity(
            self.root / "state" / "identity",
            Identity(
                "abc234", "rack-1", f"127.0.0.1:{listening.getHost().port}",
                issue_rack(authority, make_request(key), "abc234", now).decode("ascii"),
                authority.certificate.decode("ascii"), key.decode("ascii"),
            ),
        )  # fmt: skip
        (self.root / "rack.toml").write_text('state_directory = "state"\n')

    async def register(self, link: Link, **arguments: Any) -> Mapping[str, Any]:
        self.links.append(link)
        self.addCleanup(self.gone, link)
        return {"version": 1, "region": "test", "stream_urls": []}

    def gone(self, link: Link) -> Deferred[None]:
        ended: Deferred[None] = Deferred()
        link.on_lost(lambda _link, _reason: ended.callback(None))
        link.close()
        return ended

    async def report(self, link: Link, **arguments: Any) -> Mapping[str, Any]:
        self.reports.append(arguments)
        for condition, waiting in self.waiting:
            if not waiting.called and condition(arguments):
                waiting.callback(None)
        return {}

    def reported(self, condition: Callable[[dict[str, Any]], bool]) -> Deferred[None]:
        """Fires at the next report for which ``condition`` is true."""
        waiting: Deferred[None] = Deferred()
        self.waiting.append((condition, waiting))
        return waiting

    def start(self, environment: Mapping[str, str] | None = None) -> RackProcess:
        process = RackProcess()
        transport = reactor.spawnProcess(
            process, sys.executable,
            [sys.executable, "-c", "from twisted.scripts.twistd import run; run()", "-n", "--pidfile=", "rack",
             "--config", str(self.root / "rack.toml")],
            env={**os.environ, **(environment or {})},
        )  # fmt: skip

        def kill() -> Deferred[int] | None:
            if process.ended.called:
                return None
            transport.signalProcess("KILL")
            return process.ended

        self.addCleanup(kill)
        return process

    async def asked(self, command: Any, **arguments: Any) -> dict[str, Any]:
        outcome = await self.links[-1].ask(command, **arguments)
        assert isinstance(outcome, Answered), outcome
        return outcome.value

    def sync(self, generation: int, manifest: Any) -> dict[str, Any]:
        url = f"http://*:{self.http.getHost().port}/stream"
        return {"generation": generation, "digest": manifest.digest, "url": url}

    def test_it_is_ready_syncs_answers_stops_and_holds_it_all_when_started_again(self) -> Deferred[None]:
        return Deferred.fromCoroutine(self._life())

    async def _life(self) -> None:
        self.stream.publish(FIRST)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifications:
            # A name without a file: the path of a test's directory can be longer than a socket's address may be.
            address = f"stanchion-test-{os.getpid()}-{id(self)}"
            notifications.bind(f"\0{address}")
            notifications.settimeout(60)
            first = self.reported(lambda report: True)
            process = self.start({"NOTIFY_SOCKET": f"@{address}"})
            await first
            self.assertEqual(self.reports[0]["state"], "empty")
            told = ""
            while "READY=1" not in told:
                told += (await deferToThread(notifications.recv, 4096)).decode()
            answer = await self.asked(SyncImages, **self.sync(5, FIRST))
            self.assertEqual((answer["outcome"], answer["files_fetched"]), ("synced", len(FIRST.blobs)), answer)
            held = await self.asked(ListImages, known_digest="")
            self.assertEqual(parse_manifest(held["inventory"]), FIRST)
            await self.stop(process)
            while "STOPPING=1" not in told:
                told += (await deferToThread(notifications.recv, 4096)).decode()
        self.stream.requests.clear()
        again = self.reported(lambda report: report["generation"] == 5 and report["state"] == "ready")
        process = self.start()
        await again
        self.assertEqual(self.stream.requests, [])
        await self._refuses_a_second()

    async def _refuses_a_second(self) -> None:
        second = self.start()
        self.assertEqual(await second.ended, 1, second.output)
        self.assertIn("is this rack running already?", second.output)
        self.assertNotIn("Traceback", second.output)

    def test_it_stops_in_the_midst_of_a_sync_and_goes_on_after_a_kill(self) -> Deferred[None]:
        return Deferred.fromCoroutine(self._stops())

    async def _stops(self) -> None:
        self.stream.publish(FIRST)
        self.stream.publish(SECOND)
        up = self.reported(lambda report: True)
        process = self.start()
        await up
        await self.asked(SyncImages, **self.sync(5, FIRST))
        for how in (signal.SIGTERM, signal.SIGKILL):
            self.stream.stalled = {file.sha256 for image in SECOND.images for file in image.files}
            self.stream.on_stall = Deferred()
            syncing = self.links[-1].ask(SyncImages, **self.sync(6, SECOND))
            asking = Deferred.fromCoroutine(syncing)
            await self.stream.on_stall
            if how == signal.SIGKILL:
                os.kill(self.pid(process), how)
                await process.ended
            else:
                await self.stop(process)
            outcome = await asking
            if how == signal.SIGTERM:
                assert isinstance(outcome, Answered), f"{outcome}: {process.output}"
                self.assertEqual(outcome.value["outcome"], "cancelled")
            held = self.reported(lambda report: report["generation"] == 5)
            process = self.start()
            await held
        self.stream.stalled = set()
        # The rack goes on by itself: it remembers what it was told.
        whole = self.reported(lambda report: report["generation"] == 6 and report["state"] == "ready")
        os.kill(self.pid(process), signal.SIGKILL)
        await process.ended
        self.start()
        await whole
        self.assertEqual(self.reports[-1]["digest"], SECOND.digest)

    async def stop(self, process: RackProcess) -> None:
        """Have it stop in order; twistd then ends itself with the signal that it got."""
        os.kill(self.pid(process), signal.SIGTERM)
        self.assertEqual(await process.ended, -signal.SIGTERM, process.output)
        self.assertIn("Server Shut Down.", process.output)
        self.assertNotIn("Traceback", process.output)

    def pid(self, process: RackProcess) -> int:
        pid: int = process.transport.pid  # type: ignore[union-attr]  # it was spawned
        return pid
