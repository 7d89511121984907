"""What an upstream does to its stream, well or badly, and what becomes of the images: read, plan, assemble."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from region.images.plan import Assembly, assemble, plan
from region.upstream import SourceFailed, SourceRead
from region.upstream.reader import SourceReader
from rpc.fetch import FetchError
from rpc.manifest import EMPTY, Image, Manifest
from tests.region.test_upstream_reader import LATER, Inline, at_once
from tests.streams import (
    Stream,
    corrupt_file,
    drop_product,
    missing_file,
    new_version,
    same_version,
    sha256,
    signer,
    truncate_file,
)


class FromDisk:
    """A fetcher of ``file:`` URLs."""

    async def read_document(self, url: str, *, limit: int) -> bytes:
        """As :meth:`rpc.fetch.Fetcher.read_document`."""
        try:
            return Path(url.removeprefix("file://")).read_bytes()
        except OSError as error:
            raise FetchError(url, str(error)) from error


class ChangeTests(SynchronousTestCase):
    """A stream of two images that are published, and then changed."""

    def setUp(self) -> None:
        self.stream = Stream(Path(self.mktemp()).absolute(), signer())
        self.stream.add()
        self.stream.add("jammy")
        self.stream.write()
        self.published: Manifest = EMPTY
        self.verified: set[str] = set()
        self.accepted: dict[str, datetime] = {}
        self.run_import()
        self.assertEqual([image.release for image in self.published.images], ["jammy", "noble"])
        self.noble = self.image("noble")

    def image(self, release: str) -> Image:
        """The published image of a release."""
        [found] = [image for image in self.published.images if image.release == release]
        return found

    def run_import(self) -> Assembly:
        """Read, plan, fetch, assemble, publish."""
        reader = SourceReader(
            Clock(), FromDisk(), spawn=Inline, run_in_thread=at_once,
            now=lambda: LATER,
        )  # fmt: skip
        reading = Deferred.fromCoroutine(reader.read(self.stream.source(), self.accepted))
        end: SourceRead | SourceFailed = self.successResultOf(reading)
        if isinstance(end, SourceRead):
            self.accepted = {seen.name: seen.updated for seen in end.documents}
        planned = plan([end], self.published)
        failures: dict[str, str] = {}
        for download in planned.downloads:
            if download.sha256 not in self.verified:
                path = Path(download.url.removeprefix("file://"))
                data = path.read_bytes() if path.exists() else b""
                if sha256(data) == download.sha256:
                    self.verified.add(download.sha256)
                else:
                    failures[download.sha256] = f"its sha256 is {sha256(data)}"
        assembly = assemble(planned, self.published, self.verified, failures)
        self.published = assembly.manifest
        return assembly

    def changes(self, how: Callable[..., None], product: str = "noble") -> list[tuple[str, str, str]]:
        """What an import does after a change: kind, release and reason of each."""
        self.stream.change(how, product)
        assembly = self.run_import()
        return [(change.kind, change.image.release, change.reason) for change in assembly.changes]

    def test_nothing_changed(self) -> None:
        before = self.published
        self.assertEqual(self.run_import().changes, ())
        self.assertEqual(self.published, before)

    def test_a_new_version_is_taken(self) -> None:
        self.assertEqual(self.changes(new_version), [("changed", "noble", "version 20260101.1 instead of 20260101")])

    def test_new_content_under_the_same_version_is_taken(self) -> None:
        [change] = self.changes(same_version)
        self.assertEqual(change, ("changed", "noble", "version 20260101 has new content: boot-initrd"))
        self.assertNotEqual(self.image("noble").identity, self.noble.identity)

    def test_a_product_that_is_dropped_goes(self) -> None:
        [(kind, release, reason)] = self.changes(drop_product)
        self.assertEqual((kind, release), ("removed", "noble"))
        self.assertIn("updated 2026-03-04 12:01:00 UTC, no longer lists it", reason)
        self.assertEqual([image.release for image in self.published.images], ["jammy"])

    def test_a_bad_file_of_a_new_version_leaves_the_old_one(self) -> None:
        for spoil in (corrupt_file, truncate_file, missing_file):
            self.setUp()
            self.stream.change(new_version, "noble")
            self.stream.change(spoil, "noble")
            assembly = self.run_import()
            self.assertEqual(self.image("noble"), self.noble)
            [problem] = assembly.problems
            self.assertEqual((problem.version, problem.file), ("20260101.1", "boot-initrd"))
            self.assertIn("noble", problem.product)
            self.assertIn("its sha256 is", problem.reason)

    def test_a_stream_that_is_put_back_leaves_everything_as_it_is(self) -> None:
        old = {path: (self.stream.root / path).read_bytes() for path in self.stream.rendered()}
        self.changes(drop_product, "jammy")
        for path, data in old.items():
            (self.stream.root / path).write_bytes(data)
        assembly = self.run_import()
        self.assertEqual([image.release for image in self.published.images], ["noble"])
        self.assertIn("replay", assembly.changes[0].reason)

    def test_a_stream_that_is_gone_leaves_everything_as_it_is(self) -> None:
        before = self.published
        (self.stream.root / "streams/v1/index.sjson").unlink()
        assembly = self.run_import()
        self.assertEqual(self.published, before)
        self.assertEqual({change.kind for change in assembly.changes}, {"kept"})
