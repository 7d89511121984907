"""Clients that read as fast as they can while one generation after the other is published never see anything torn.

Importer, database, files, HTTP over loopback, racks and the standard simplestreams mirror are the real ones. Each
generation is published while every client is in the midst of reading the one before.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from twisted.internet import reactor as installed_reactor
from twisted.internet.defer import Deferred, DeferredList
from twisted.internet.utils import getProcessOutputAndValue
from twisted.web.resource import Resource

from rack.assignment import Assignment, AssignmentFile
from rack.snapshots import SnapshotStore
from rack.steps import Syncs
from rack.sync import Synchroniser
from region.answers.asking import Asker
from region.answers.describing import Describer, Descriptions
from region.answers.published import PublishedView
from region.answers.records import Records
from region.answers.releases import Releases
from region.api import Api, Authenticator
from region.images.stream import StreamResource
from region.web import RegionSite, tree
from rpc.blobs import BlobStore
from rpc.fetch import Fetcher
from rpc.http_client import HttpClient
from rpc.manifest import Manifest
from rpc.outcomes import Answered, Outcome
from tests.examples import CHECKED, SOAK
from tests.region.api_parts import parts_of
from tests.region.fakes import Keys, Rack, ask_each
from tests.region.importing import ImportTestCase, image
from tests.region.test_image_streams import ClosingFactory
from tests.region.web import AUTHORIZATION
from tests.world.checks import snapshot_is_whole

reactor: Any = installed_reactor
PUBLISHES = 5 if SOAK == 1 else 20 * SOAK
LIMIT = 1 << 20


class Link:
    """A rack's answers to what the region asks, without a wire between them."""

    def __init__(self, synchroniser: Synchroniser) -> None:
        self.synchroniser = synchroniser

    async def ask(self, command: Any, *, deadline: float, **arguments: Any) -> Outcome[Any]:
        """What the rack holds; it knows of no release's title."""
        inventory = self.synchroniser.inventory
        value = {"state": "ready", "generation": inventory.generation, "digest": inventory.digest}
        if inventory.digest not in ("", arguments.get("known_digest"), arguments.get("newest_digest")):
            value["inventory"] = inventory.manifest.canonical
        return Answered(value)


class Links:
    """The racks, all of which are linked."""

    def __init__(self) -> None:
        self.links: dict[str, Link] = {}

    def enrolled(self) -> Mapping[str, Rack]:
        return {name: Rack(name, f"rack-{name}") for name in self.links}

    def link_of(self, system_id: str) -> Link | None:
        return self.links.get(system_id)

    def not_connected_since(self, system_id: str) -> float | None:
        return None


class ReadersDuringChange(ImportTestCase):
    timeout = 120 * SOAK  # seconds

    async def begin(self) -> None:
        """Serve, and publish the first generation."""
        self.patch(os, "fsync", lambda descriptor: None)
        self.published: dict[str, Manifest] = {}
        self.is_over = False
        self.begun: dict[str, int] = {}
        self.waiting: list[Deferred[None]] = []
        await self.add_source()
        view = PublishedView(self.generations)
        self.racks = Links()
        asker = Asker(self.racks, reactor, published=view.catalogue, expected=view.current_digest, ask_all=ask_each)
        describer = mock.Mock(spec=Describer)
        describer.describe = mock.AsyncMock(return_value=Descriptions())
        parts = parts_of(
            releases=Releases(asker, view, reactor, Records(self.database), describer), asker=asker, published=view,
            racks=self.racks, generations=self.generations,
        )  # fmt: skip
        stream = StreamResource(self.generations, self.blobs, reactor)
        api = Api(parts, Authenticator(Keys(), reactor)).resource()
        site = ClosingFactory(RegionSite(tree(api, stream, Resource()), reactor))
        port = reactor.listenTCP(0, site, interface="127.0.0.1")
        self.addCleanup(site.close)
        self.addCleanup(port.stopListening)
        self.root = f"http://127.0.0.1:{port.getHost().port}/MAAS"
        self.stream = f"{self.root}/images-stream"
        await self.publish_next(1)

    async def publish_next(self, number: int) -> None:
        """A generation in which everything but one image is another."""
        images = [image(version=f"2026{number:04}"), image("jammy", version=f"2026{number:04}"), image("focal")]
        if number % 2:
            images.append(image("warty", version=f"2026{number:04}"))
        generation = await self.publish(*images)
        self.published[generation.digest] = generation.manifest
        CHECKED["publishes"] += 1

    async def one_after_the_other(self) -> None:
        """Publish all generations, each when every client has begun anew since the one before."""
        for number in range(2, PUBLISHES + 2):
            self.begun.clear()
            waiting: Deferred[None] = Deferred()
            self.waiting.append(waiting)
            await waiting
            await self.publish_next(number)
        self.is_over = True

    def reads(self, client: str) -> bool:
        """Say that a client begins to read; whether it should."""
        self.begun[client] = self.begun.get(client, 0) + 1
        if self.waiting and len(self.begun) == len(self.clients):
            self.waiting.pop().callback(None)
        return not self.is_over

    # Clients

    async def read_stream(self, name: str) -> None:
        """From the index to the last file, all of one generation."""
        client = HttpClient(reactor)
        try:
            while self.reads(name):
                index = json.loads(await client.read(f"{self.stream}/streams/v1/index.json", limit=LIMIT))
                digests = {entry["path"].split("/")[1] for entry in index["index"].values()}
                self.assertEqual(len(digests), 1, "the index mixes generations, or is empty")
                files: dict[str, int] = {}
                for entry in index["index"].values():
                    document = json.loads(await client.read(f"{self.stream}/{entry['path']}", limit=LIMIT))
                    self.assertEqual(sorted(document["products"]), entry["products"])
                    for product in document["products"].values():
                        for version in product["versions"].values():
                            files |= {item["path"]: item["size"] for item in version["items"].values()}
                manifest = self.published_as(digests.pop())
                self.assertEqual(files, {f"blobs/{sha256}": size for sha256, size in manifest.blobs.items()})
                for path, size in files.items():
                    data = await client.read(f"{self.stream}/{path}", limit=LIMIT)
                    self.assertEqual((len(data), f"blobs/{hashlib.sha256(data).hexdigest()}"), (size, path))
                    CHECKED["files read"] += 1
                CHECKED["streams read"] += 1
        finally:
            await client.close()

    def published_as(self, digest: str) -> Manifest:
        """What was published with ``digest``; it may be read before the test has heard that it was."""
        latest = self.generations.latest
        if digest not in self.published and latest is not None:
            self.published[latest.digest] = latest.manifest
        return self.published[digest]

    async def mirror(self, name: str) -> None:
        """What ``sstream-mirror`` copies is one whole generation."""
        program = os.path.join(os.path.dirname(sys.executable), "sstream-mirror")
        while self.reads(name):
            target = Path(self.mktemp()).absolute()
            arguments = [program, "--max=1", f"{self.stream}/streams/v1/index.json", str(target)]
            _, errors, status = await getProcessOutputAndValue(
                sys.executable, arguments, {**os.environ, "no_proxy": "*"}
            )
            self.assertEqual(status, 0, errors.decode())
            found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (target / "blobs").iterdir()}
            self.assertTrue(all(name == sha256 for name, sha256 in found.items()), found)
            self.assertIn(set(found), [set(manifest.blobs) for manifest in self.published.values()])
            shutil.rmtree(target)
            CHECKED["mirrors"] += 1

    async def sync(self, name: str) -> None:
        """A rack fetches whatever is current, and holds a whole generation at any time."""
        root = Path(self.mktemp()).absolute()
        blobs = BlobStore(root / "cache")
        store = SnapshotStore(root, blobs)
        store.open()
        fetcher = Fetcher(reactor, blobs)
        syncs = Syncs(store, AssignmentFile(root / "assignment.json"), fetcher, fetcher._run)
        synchroniser = Synchroniser(syncs, reactor, interval=900)
        await synchroniser.recover()
        self.racks.links[name] = Link(synchroniser)
        try:
            while self.reads(name):
                generation = self.generations.latest
                assert generation is not None
                self.syncing[name] = generation.number
                result = await synchroniser.request(Assignment(generation.number, generation.digest, self.stream))
                self.assertIn(result.outcome, ("synced", "unchanged"), result)
                self.assertEqual(result.digest, generation.digest)
                with store.lease() or self.fail("nothing is held") as lease:
                    await fetcher._run(snapshot_is_whole, lease.path, self.published_as(generation.digest))
                CHECKED["syncs"] += 1
                turn: Deferred[None] = Deferred()
                reactor.callLater(0.01, turn.callback, None)
                await turn
        finally:
            await synchroniser.stop()
            await fetcher.close()
            blobs.close()
            store.close()

    async def poll(self, name: str) -> None:
        """A release that racks hold all the time can be deployed all the time, and is listed."""
        client = HttpClient(reactor)
        headers = {"Authorization": AUTHORIZATION}
        try:
            while self.reads(name):
                for path in ("releases/", "releases/ubuntu/noble/?arch=amd64", "releases/ubuntu/focal/"):
                    answer = await client.get(f"{self.root}/api/2.0/{path}", headers)
                    parts: list[bytes] = []
                    await client.receive(answer, parts.append, limit=LIMIT)
                    text = b"".join(parts).decode()
                    self.assertEqual(answer.status, 200, text)
                    document = json.loads(text)
                    entries = document["releases"] if path == "releases/" else [document]
                    states = {entry["name"]: entry["state"] for entry in entries}
                    for release in ("ubuntu/noble", "ubuntu/focal"):
                        if path == "releases/" or release in path:
                            self.assertEqual(states[release], "deployable", text)
                    CHECKED["answers"] += 1
        finally:
            await client.close()

    async def test_nothing_is_torn_mixed_missing_or_empty_while_generations_are_published(self) -> None:
        await self.begin()
        first = [self.sync("slow"), self.sync("fast")]
        self.clients = ["slow", "fast", "stream-1", "stream-2", "mirror", "poll-1", "poll-2"]
        running = [Deferred.fromCoroutine(each) for each in first]
        while not any(link.synchroniser.inventory.generation > 0 for link in self.racks.links.values()):
            turn: Deferred[None] = Deferred()
            reactor.callLater(0.01, turn.callback, None)
            await turn
        running += [Deferred.fromCoroutine(self.read_stream(name)) for name in ("stream-1", "stream-2")]
        running += [Deferred.fromCoroutine(self.poll(name)) for name in ("poll-1", "poll-2")]
        running += [Deferred.fromCoroutine(self.mirror("mirror"))]
        publishing = Deferred.fromCoroutine(self.one_after_the_other())
        for each in running:
            each.addErrback(self.stop_all)
        ends: Any = await DeferredList([publishing, *running], consumeErrors=True)
        for succeeded, end in ends:
            if not succeeded:
                end.raiseException()

    def stop_all(self, failure: Any) -> Any:
        """One client has seen what it must not: the others stop too."""
        self.is_over = True
        if self.waiting:
            self.waiting.pop().errback(failure)
        return failure
