"""The real path of an image: a signed stream on the disk is read, fetched, published, and read again by real clients.

Reader, fetcher, blob store, database and HTTP server are the real ones; sockets are loopback's.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from twisted.internet import reactor as installed_reactor
from twisted.internet.defer import Deferred
from twisted.internet.utils import getProcessOutputAndValue
from twisted.protocols.policies import WrappingFactory
from twisted.web.resource import Resource
from twisted.web.server import Site

from region.images.importer import Importer
from region.images.job import ImportJob
from region.images.sources import SourceStore
from region.images.store import GenerationStore
from region.images.stream import StreamResource
from region.upstream import Problem
from region.upstream.reader import SourceReader
from rpc.blobs import BlobStore
from rpc.fetch import Fetcher
from rpc.manifest import Manifest
from tests import streams
from tests.database import DatabaseTestCase
from tests.streams import EVERYTHING, Stream, signer

reactor: Any = installed_reactor


class ClosingFactory(WrappingFactory):
    """A server that can close the connections that clients keep open."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._closed: Deferred[None] = Deferred()
        self._closing = False

    def close(self) -> Deferred[None]:
        """Fires when there is no connection any more."""
        self._closing = True
        for protocol in list(self.protocols):
            protocol.transport.abortConnection()
        self._look()
        return self._closed

    def unregisterProtocol(self, protocol: Any) -> None:
        super().unregisterProtocol(protocol)
        self._look()

    def _look(self) -> None:
        if self._closing and not self.protocols and not self._closed.called:
            self._closed.callback(None)


class ImageStreamTestCase(DatabaseTestCase):
    """A test with an upstream stream, and a region that imports from it."""

    timeout = 60

    def setUp(self) -> Deferred[None]:  # type: ignore[override]  # trial waits for what setUp returns
        return super().setUp().addCallback(self._begin)

    def _begin(self, _: None) -> None:
        self.upstream = Stream(Path(self.mktemp()).absolute(), signer())
        self.upstream.add("noble")
        self.upstream.add("jammy", "arm64")
        self.upstream.add_loader()
        self.upstream.write()
        self.blobs = BlobStore(Path(self.mktemp()).absolute())
        self.addCleanup(self.blobs.close)
        self.sources = SourceStore(self.database)
        self.generations = GenerationStore(self.database)
        fetcher = Fetcher(reactor, self.blobs)
        self.addCleanup(lambda: self.run_async(fetcher.close()))
        self.importer = Importer(
            self.database, self.sources, self.generations, SourceReader(reactor, fetcher), fetcher, self.blobs, reactor,
            interval=0, at_start=False, follow_edits=False,
        )  # fmt: skip
        self.importer.start()
        self.addCleanup(lambda: self.run_async(self.importer.stop()))

    async def add_source(self, **options: Any) -> None:
        settings = {"keyring_data": signer().keyring, "selections": EVERYTHING, **options}
        await self.sources.create(self.upstream.url, **settings)

    async def import_now(self) -> tuple[ImportJob, tuple[Problem, ...]]:
        job_id = await self.importer.request()
        await self.importer.when_idle()
        job = await self.importer.jobs.get(job_id)
        assert job is not None
        return job, await self.importer.jobs.problems(job_id)

    async def manifest(self) -> Manifest:
        generation = await self.generations.current()
        assert generation is not None, "nothing was published"
        return generation.manifest

    async def versions(self) -> dict[str, str]:
        """The version that is published, by release."""
        return {image.release: image.version for image in (await self.manifest()).images}


class ImportTests(ImageStreamTestCase):
    """Importing from a real stream, good and bad."""

    async def test_a_signed_stream_is_imported_whole(self) -> None:
        await self.add_source()
        job, problems = await self.import_now()
        self.assertEqual((job.state, problems), ("done", ()), job.outcome)
        self.assertEqual(await self.versions(), {"noble": "20260101", "jammy": "20260101", "": "20260101.0"})
        for sha256, size in (await self.manifest()).blobs.items():
            content = self.blobs.path(sha256).read_bytes()
            self.assertEqual((hashlib.sha256(content).hexdigest(), len(content)), (sha256, size))

    async def test_importing_it_again_changes_nothing_and_reads_no_file(self) -> None:
        await self.add_source()
        await self.import_now()

        def refuse(*_: object, **__: object) -> None:
            raise AssertionError("a blob was read, or fetched")

        self.patch(BlobStore, "examine", refuse)
        self.patch(BlobStore, "open_part", refuse)
        job, problems = await self.import_now()
        self.assertEqual((job.state, problems), ("done", ()))
        self.assertIn("nothing changed", job.outcome)
        self.assertEqual(job.files_total, 0)

    async def test_bad_files_leave_the_last_good_image_and_are_named(self) -> None:
        await self.add_source()
        await self.import_now()
        for spoil, reason in (
            (streams.corrupt_file, "the sha256 of its 300 bytes is "),
            (streams.truncate_file, "150"),
            (streams.missing_file, "No such file"),
        ):
            self.upstream.change(streams.new_version, "noble")
            self.upstream.change(spoil, "noble")
            job, problems = await self.import_now()
            self.assertEqual(job.state, "done")
            self.assertEqual((await self.versions())["noble"], "20260101", spoil.__name__)
            (problem,) = problems
            self.assertEqual(problem.severity, "error")
            self.assertIn("noble", problem.product)
            self.assertEqual(problem.file, "boot-initrd")
            self.assertIn(reason, problem.reason)
        self.upstream.change(streams.new_version, "noble")
        job, problems = await self.import_now()
        self.assertEqual(problems, ())
        self.assertEqual((await self.versions())["noble"], "20260101.1.1.1.1")

    async def test_new_content_under_the_same_version_is_imported(self) -> None:
        await self.add_source()
        await self.import_now()
        before = await self.manifest()
        self.upstream.change(streams.same_version, "noble")
        await self.import_now()
        self.assertEqual((await self.versions())["noble"], "20260101")
        self.assertNotEqual((await self.manifest()).digest, before.digest)
        self.assertIn(self.upstream.item("boot-initrd", "noble")["sha256"], (await self.manifest()).blobs)

    async def test_a_dropped_product_is_removed(self) -> None:
        await self.add_source()
        await self.import_now()
        self.upstream.change(streams.drop_product, "jammy")
        await self.import_now()
        self.assertEqual(set(await self.versions()), {"noble", ""})

    async def test_a_stream_that_is_not_signed_by_the_keyring_is_refused(self) -> None:
        await self.add_source(keyring_data=signer("Somebody else").keyring)
        job, problems = await self.import_now()
        self.assertEqual(job.state, "failed")
        (problem,) = problems
        self.assertIn("sign", problem.reason)
        self.assertIsNone(await self.generations.current())

    async def test_a_stream_that_lost_its_signature_is_refused_and_what_it_gave_is_kept(self) -> None:
        await self.add_source()
        await self.import_now()
        self.upstream.signer = None
        self.upstream.change(streams.drop_product, "noble")
        job, problems = await self.import_now()
        self.assertEqual((job.state, len(problems)), ("failed", 1))
        self.assertEqual(set(await self.versions()), {"noble", "jammy", ""})

    async def test_an_older_stream_than_was_accepted_is_refused(self) -> None:
        await self.add_source()
        older = {path: (self.upstream.root / path).read_bytes() for path in self.upstream.rendered()}
        self.upstream.change(streams.new_version, "noble")
        await self.import_now()
        for path, data in older.items():
            (self.upstream.root / path).write_bytes(data)
        job, _ = await self.import_now()
        self.assertEqual(job.state, "failed")
        self.assertEqual((await self.versions())["noble"], "20260101.1")

    async def test_an_unsigned_stream_is_imported_when_the_source_says_so(self) -> None:
        self.upstream.signer = None
        self.upstream.write()
        await self.add_source(keyring_data=b"", allow_unsigned=True)
        job, problems = await self.import_now()
        self.assertEqual((job.state, problems), ("done", ()), job.outcome)


class ClientTests(ImageStreamTestCase):
    """``sstream-query`` and ``sstream-mirror`` of python-simplestreams, reading what the region serves."""

    async def serve(self) -> str:
        """The URL of the region's stream."""
        await self.add_source()
        job, _ = await self.import_now()
        self.assertEqual(job.state, "done", job.outcome)
        root, maas = Resource(), Resource()
        root.putChild(b"MAAS", maas)
        maas.putChild(b"images-stream", StreamResource(self.generations, self.blobs, reactor))
        site = ClosingFactory(Site(root))
        port = reactor.listenTCP(0, site, interface="127.0.0.1")
        self.addCleanup(site.close)
        self.addCleanup(port.stopListening)
        return f"http://127.0.0.1:{port.getHost().port}/MAAS/images-stream"

    async def run_client(self, name: str, *arguments: str) -> str:
        program = os.path.join(os.path.dirname(sys.executable), name)
        # The programs of the wheel begin with an interpreter's path, which need not be ours.
        output, errors, status = await getProcessOutputAndValue(
            sys.executable, [program, *arguments], {**os.environ, "no_proxy": "*"}
        )
        self.assertEqual(status, 0, errors.decode())
        text: str = output.decode()
        return text

    async def test_sstream_query_lists_every_file_with_upstreams_words(self) -> None:
        url = await self.serve()
        found = json.loads(await self.run_client("sstream-query", "--json", f"{url}/streams/v1/index.json"))
        published = await self.manifest()
        self.assertEqual(len(found), sum(len(image.files) for image in published.images))
        squashfs = next(each for each in found if each["ftype"] == "squashfs" and each["release"] == "noble")
        image = next(image for image in published.images if image.release == "noble")
        self.assertEqual(squashfs["product_name"], image.product)
        self.assertEqual(
            {name: squashfs[name] for name in ("os", "arch", "subarch", "kflavor", "label", "release_title")},
            {"os": "ubuntu", "arch": "amd64", "subarch": "ga-24.04", "kflavor": "generic", "label": "stable",
             "release_title": "noble LTS"},
        )  # fmt: skip
        self.assertEqual(squashfs["item_url"], f"{url}/blobs/{squashfs['sha256']}")
        filtered = await self.run_client(
            "sstream-query", "--json", f"{url}/streams/v1/index.json", "bootloader-type=uefi"
        )
        self.assertEqual([each["os"] for each in json.loads(filtered)], ["grub-efi"])

    async def test_sstream_mirror_copies_every_file(self) -> None:
        url = await self.serve()
        target = Path(self.mktemp()).absolute()
        await self.run_client("sstream-mirror", "--max=1", f"{url}/streams/v1/index.json", str(target))
        for sha256 in (await self.manifest()).blobs:
            content = (target / "blobs" / sha256).read_bytes()
            self.assertEqual(hashlib.sha256(content).hexdigest(), sha256)

    async def test_a_region_imports_from_the_stream_of_another(self) -> None:
        url = await self.serve()
        before = await self.manifest()
        for source in await self.sources.list():
            await self.sources.delete(source.id)
        await self.sources.create(f"{url}/", allow_unsigned=True, selections=EVERYTHING)
        job, problems = await self.import_now()
        self.assertEqual((job.state, problems), ("done", ()), job.outcome)
        after = await self.manifest()
        self.assertEqual(after.blobs, before.blobs)
        self.assertEqual([image.key for image in after.images], [image.key for image in before.images])
