"""The stream over HTTP in memory: documents, files, ranges and refusals."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from io import FileIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st
from treq.testing import StubTreq
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionLost
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.logger import capturedLogs, formatEvent
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.server import Site

from region.database import DatabaseUnavailable
from region.images import files
from region.images.files import CHUNK, STALL_SECONDS, UNSATISFIABLE, Range, parse_range
from region.images.rendering import Rendering, content_id, document_name, render
from region.images.store import Generation, GenerationMoved
from region.images.stream import StreamResource
from rpc.blobs import BlobStore
from rpc.damage import Damaged
from rpc.manifest import Image, ImageFile, Manifest, parse_manifest
from tests.faults import Disk
from tests.region.importing import contents_of, file, image, inline, loader, put, sha256
from tests.rpc.test_verifying import rot

NOW = datetime(2026, 3, 1, 12, 30, tzinfo=UTC)


def generation(*images: Image, number: int = 1) -> Generation:
    manifest = Manifest(images)
    return Generation(number, manifest.digest, NOW + timedelta(days=number), manifest)


class FakeGenerations:
    """Generations that a test publishes."""

    def __init__(self) -> None:
        self.kept: list[Generation] = []
        self.error: Exception | None = None
        self.retired: Exception | None = None

    def publish(self, *images: Image) -> Generation:
        published = generation(*images, number=len(self.kept) + 1)
        self.kept.append(published)
        return published

    async def current(self) -> Generation | None:
        if self.error:
            raise self.error
        return self.kept[-1] if self.kept else None

    async def by_digest(self, digest: str) -> Generation | None:
        if self.retired:
            raise self.retired
        return next((each for each in reversed(self.kept) if each.digest == digest), None)


class StreamTestCase(SynchronousTestCase):
    """A test with a stream to ask."""

    def setUp(self) -> None:
        self.generations = FakeGenerations()
        self.blobs = BlobStore(Path(self.mktemp()))
        self.addCleanup(self.blobs.close)
        self.clock = Clock()
        self.resource = self.make()
        self.client = StubTreq(self.resource)

    def make(self, run_in_thread: Any = inline) -> StreamResource:
        return StreamResource(self.generations, self.blobs, self.clock, run_in_thread=run_in_thread)  # type: ignore[arg-type]  # all that it needs

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, Mapping[str, str], bytes]:
        """The status, headers and body of the answer."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        client: Any = self.client
        response = self.successResultOf(client.request(method, f"http://region.example.com/{path}", headers=sent))
        received = {name.decode().lower(): values[0].decode() for name, values in response.headers.getAllRawHeaders()}
        if isinstance(response.length, int):
            received.setdefault("content-length", str(response.length))  # which treq takes out of the headers
        self.client.flush()
        return response.code, received, self.successResultOf(response.content())

    def json(self, path: str) -> Any:
        status, _, body = self.ask(path)
        self.assertEqual(status, 200, body)
        return json.loads(body)


class DocumentTests(StreamTestCase):
    """The index, the products and the manifest."""

    def test_before_anything_was_published_the_answer_is_503_and_no_empty_index(self) -> None:
        status, headers, body = self.ask("streams/v1/index.json")
        self.assertEqual(status, 503)
        self.assertEqual(headers["retry-after"], "10")
        self.assertIn(b"No images were published yet", body)
        self.assertTrue(headers["content-type"].startswith("text/plain"))

    def test_the_index_leads_to_products_and_these_to_files(self) -> None:
        self.generations.publish(image(), image("jammy"), loader())
        for name, data in contents_of(b"ubuntu/noble/amd64/20260101", b"").items():
            put(self.blobs, data)
            self.assertTrue(name)
        index = self.json("streams/v1/index.json")
        self.assertEqual(index["format"], "index:1.0")
        self.assertEqual(set(index["index"]), {"com.example:download", "com.example:bootloader-download"})
        entry = index["index"]["com.example:download"]
        self.assertEqual(entry["products"], ["com.example:jammy:amd64", "com.example:noble:amd64"])
        products = self.json(entry["path"])
        self.assertEqual((products["format"], products["content_id"]), ("products:1.0", "com.example:download"))
        product = products["products"]["com.example:noble:amd64"]
        self.assertEqual(
            {name: product[name] for name in ("os", "release", "arch", "subarch", "kflavor", "label")},
            {"os": "ubuntu", "release": "noble", "arch": "amd64", "subarch": "generic", "kflavor": "generic",
             "label": "stable"},
        )  # fmt: skip
        self.assertEqual((product["release_title"], product["support_eol"]), ("Noble", "2030-01-01"))
        item = product["versions"]["20260101"]["items"]["squashfs"]
        status, headers, body = self.ask(item["path"])
        self.assertEqual((status, sha256(body), len(body)), (200, item["sha256"], item["size"]))
        self.assertEqual((item["ftype"], headers["content-length"]), ("squashfs", str(len(body))))

    def test_boot_loaders_have_no_release_and_keep_their_attributes(self) -> None:
        self.generations.publish(image(), loader())
        index = self.json("streams/v1/index.json")
        products = self.json(index["index"]["com.example:bootloader-download"]["path"])["products"]
        product = products["com.example:grub:amd64"]
        self.assertNotIn("release", product)
        self.assertEqual(product["bootloader-type"], "uefi")
        item = product["versions"]["20260101.0"]["items"]["grub2-signed"]
        self.assertEqual((item["ftype"], item["src_package"]), ("archive.tar.xz", "grub2-signed"))

    def test_the_etag_of_the_index_is_the_digest_and_answers_304(self) -> None:
        published = self.generations.publish(image())
        status, headers, body = self.ask("streams/v1/index.json")
        self.assertEqual((status, headers["etag"]), (200, f'"{published.digest}"'))
        self.assertEqual(parsedate_to_datetime(headers["last-modified"]), published.published)
        self.assertEqual(parsedate_to_datetime(json.loads(body)["updated"]), published.published)
        for known in (f'"{published.digest}"', f'"x", W/"{published.digest}"', "*"):
            status, headers, body = self.ask("streams/v1/index.json", if_none_match=known)
            self.assertEqual((status, body), (304, b""), known)
        self.assertEqual(self.ask("streams/v1/index.json", if_none_match=f'"{"0" * 64}"')[0], 200)

    def test_a_client_that_started_before_a_publish_sees_one_generation_to_its_end(self) -> None:
        self.generations.publish(image(), image("jammy"))
        index = self.json("streams/v1/index.json")
        self.generations.publish(image(version="20260201"))
        products = self.json(index["index"]["com.example:download"]["path"])["products"]
        self.assertEqual(sorted(products), index["index"]["com.example:download"]["products"])
        self.assertEqual(list(products["com.example:noble:amd64"]["versions"]), ["20260101"])
        newer = self.json("streams/v1/index.json")["index"]["com.example:download"]
        self.assertEqual(newer["products"], ["com.example:noble:amd64"])
        self.assertNotEqual(newer["path"], index["index"]["com.example:download"]["path"])

    def test_the_manifest_is_what_its_digest_says_and_never_changes(self) -> None:
        published = self.generations.publish(image(), loader())
        self.generations.publish(image("jammy"))
        status, headers, body = self.ask(f"generations/{published.digest}/manifest.json")
        self.assertEqual(status, 200)
        self.assertEqual(parse_manifest(body, published.digest), published.manifest)
        self.assertIn("immutable", headers["cache-control"])
        self.assertEqual(headers["content-type"], "application/json")
        known = self.ask(f"generations/{published.digest}/manifest.json", if_none_match=headers["etag"])
        self.assertEqual(known[0], 304)

    def test_what_is_not_there_is_404_with_a_hint(self) -> None:
        published = self.generations.publish(image())
        for path in (
            "",
            "streams/v1/",
            "streams/v1/index.sjson",
            "streams/v1/other.json",
            f"generations/{published.digest}/",
            f"generations/{published.digest}/streams/v1/other.json",
            f"generations/{'0' * 64}/manifest.json",
            "generations/../manifest.json",
            "generations/%2e%2e%2fetc/manifest.json",
            "blobs/",
            "blobs/passwd",
            "blobs/..%2f..%2fetc%2fpasswd",
            f"blobs/{'0' * 64}",
            f"blobs/{'0' * 64}/more",
            "%ff%fe",
        ):
            status, headers, body = self.ask(path)
            self.assertEqual(status, 404, path)
            self.assertTrue(headers["content-type"].startswith("text/plain"), path)
            self.assertTrue(body.strip(), path)

    def test_a_generation_that_is_retired_while_it_is_looked_up_is_not_there(self) -> None:
        self.generations.retired = GenerationMoved("generation 1 was retired while it was read; ask again")
        status, _, body = self.ask(f"generations/{'0' * 64}/manifest.json")
        self.assertEqual(status, 404)
        self.assertIn(b"read the index again", body)

    def test_only_get_and_head_are_answered(self) -> None:
        self.generations.publish(image())
        self.assertEqual(self.ask("streams/v1/index.json", "POST")[0], 405)
        status, headers, body = self.ask("streams/v1/index.json", "HEAD")
        self.assertEqual((status, body), (200, b""))
        self.assertGreater(int(headers["content-length"]), 100)

    def test_a_database_that_is_away_is_503_with_a_reference_that_the_log_has(self) -> None:
        self.generations.error = DatabaseUnavailable("cannot connect to db.example.com: refused")
        status, headers, body = self.ask("streams/v1/index.json")
        self.assertEqual((status, headers["retry-after"]), (503, "10"))
        self.assertIn(headers["x-correlation-id"].encode(), body)
        self.assertNotIn(b"db.example.com", body)

    def test_a_fault_of_our_own_is_500_with_a_reference_and_a_traceback_in_the_log(self) -> None:
        self.generations.error = ZeroDivisionError("unforeseen")
        status, headers, body = self.ask("streams/v1/index.json")
        self.assertEqual(status, 500)
        self.assertIn(headers["x-correlation-id"].encode(), body)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)

    def test_documents_are_rendered_once_per_generation(self) -> None:
        self.generations.publish(image())
        rendered: list[str] = []

        def counted(manifest: Manifest, published: datetime) -> Rendering:
            rendered.append(manifest.digest)
            return render(manifest, published)

        with patch("region.images.stream.render", counted):
            index = self.json("streams/v1/index.json")
            self.json(index["index"]["com.example:download"]["path"])
            self.json("streams/v1/index.json")
            self.assertEqual(len(rendered), 1)
            self.generations.publish(image("jammy"))
            self.json("streams/v1/index.json")
        self.assertEqual(len(rendered), 2)


class FileTests(StreamTestCase):
    """Files: whole, in part, known already, and damaged."""

    content = bytes(range(256)) * 40

    def setUp(self) -> None:
        super().setUp()
        self.name = put(self.blobs, self.content)
        self.path = f"blobs/{self.name}"

    def test_a_file_is_sent_whole_and_may_be_kept_for_ever(self) -> None:
        status, headers, body = self.ask(self.path)
        self.assertEqual((status, body), (200, self.content))
        self.assertEqual(headers["etag"], f'"{self.name}"')
        self.assertIn("immutable", headers["cache-control"])
        self.assertEqual(headers["accept-ranges"], "bytes")
        self.assertEqual(headers["content-type"], "application/octet-stream")

    def test_a_file_that_is_known_is_not_sent_again(self) -> None:
        self.assertEqual(self.ask(self.path, if_none_match=f'"{self.name}"')[::2], (304, b""))

    def test_head_says_how_long_a_file_is(self) -> None:
        status, headers, body = self.ask(self.path, "HEAD")
        self.assertEqual((status, headers["content-length"], body), (200, str(len(self.content)), b""))

    def test_the_rest_of_a_file_is_sent_from_where_it_was_cut(self) -> None:
        status, headers, body = self.ask(self.path, range="bytes=1000-")
        self.assertEqual((status, body), (206, self.content[1000:]))
        self.assertEqual(headers["content-range"], f"bytes 1000-{len(self.content) - 1}/{len(self.content)}")
        self.assertEqual(headers["content-length"], str(len(self.content) - 1000))

    def test_a_range_counts_only_for_the_file_that_the_client_began_with(self) -> None:
        self.assertEqual(self.ask(self.path, range="bytes=5-9", if_range=f'"{self.name}"')[::2],
                         (206, self.content[5:10]))  # fmt: skip
        self.assertEqual(self.ask(self.path, range="bytes=5-9", if_range='"other"')[::2], (200, self.content))

    def test_a_range_beyond_the_end_is_416_and_says_how_long_the_file_is(self) -> None:
        status, headers, _ = self.ask(self.path, range=f"bytes={len(self.content)}-")
        self.assertEqual((status, headers["content-range"]), (416, f"bytes */{len(self.content)}"))

    def test_an_empty_file_is_sent(self) -> None:
        name = put(self.blobs, b"")
        self.assertEqual(self.ask(f"blobs/{name}")[::2], (200, b""))

    def test_a_file_longer_than_a_chunk_arrives_whole(self) -> None:
        content = bytes(range(251)) * ((CHUNK * 2) // 251 + 7)
        name = put(self.blobs, content)
        self.assertEqual(self.ask(f"blobs/{name}")[::2], (200, content))
        self.assertEqual(self.ask(f"blobs/{name}", range="bytes=100-")[2], content[100:])

    def test_a_file_without_a_stamp_is_read_before_it_is_sent(self) -> None:
        (self.blobs.root / "verified.log").unlink()
        again = BlobStore(self.blobs.root)
        self.addCleanup(again.close)
        self.blobs = again
        self.client = StubTreq(self.make())
        self.assertFalse(again.is_verified(self.name, len(self.content)))
        self.assertEqual(self.ask(self.path)[::2], (200, self.content))
        self.assertTrue(again.is_verified(self.name, len(self.content)))

    def test_a_damaged_file_is_never_sent(self) -> None:
        self.blobs.path(self.name).write_bytes(b"x" + self.content[1:])
        status, headers, body = self.ask(self.path)
        self.assertEqual((status, headers["retry-after"]), (503, "30"))
        self.assertIn(b"was found damaged at 20", body)
        self.assertIn(b"nothing that is published now needs it", body)
        self.assertNotIn(self.content[1:], body)
        self.assertNotIn("etag", headers)
        self.assertEqual(self.ask(self.path)[::2], (503, body))
        put(self.blobs, self.content)
        self.assertEqual(self.ask(self.path)[::2], (200, self.content))

    def test_rot_is_served_no_more_once_it_is_known_and_the_reason_is_told(self) -> None:
        rot(self.blobs.path(self.name))
        self.assertEqual(self.ask(self.path)[0], 200)  # nobody can know yet
        self.blobs.verify(self.name, len(self.content), thorough=True)
        for _ in range(2):
            status, headers, body = self.ask(self.path)
            self.assertEqual((status, headers["retry-after"]), (503, "30"))
            self.assertIn(b"the sha256 of its", body)
            self.assertIn("was found damaged at 20", headers["x-stanchion-withheld"])
        self.flushLoggedErrors()

    def test_what_is_damaged_and_stays_because_the_disk_takes_no_writes_is_told_as_damaged(self) -> None:
        self.blobs.path(self.name).write_bytes(b"x" + self.content[1:])
        rename = os.rename

        def refuse(source: Path, target: Path) -> None:
            if Path(target).parent.name == "quarantine":
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(target))
            rename(source, target)

        self.patch(os, "rename", refuse)
        for _ in range(2):
            status, headers, body = self.ask(self.path)
            self.assertEqual(status, 503)
            self.assertIn("was found damaged at 20", headers["x-stanchion-withheld"])
            self.assertNotIn(self.content[1:], body)

    def test_a_file_that_the_disk_does_not_give_is_neither_denied_nor_taken_for_damaged(self) -> None:
        suspected: list[str] = []
        self.resource._suspect = lambda sha256, why: suspected.append(f"{sha256} {why}")
        self.generations.publish(image())
        disk = Disk(self.blobs.root.absolute())
        disk.install(self.patch)
        self.blobs.verify(self.name, len(self.content))
        disk.arm(looks=True)
        self.assertEqual(self.ask(self.path)[0], 200)
        steps = len(disk.said)
        self.assertGreaterEqual(steps, 3)
        for error in (errno.EIO, errno.EACCES):
            for lasting in (False, True):
                for at in range(1, steps + 1):
                    suspected.clear()
                    disk.arm(at, error, lasting, looks=True)
                    status, headers, body = self.ask(self.path)
                    disk.disarm()
                    if not disk.met:
                        continue  # bytes are read by what was opened while it was allowed
                    if status == 200:
                        self.assertLess(len(body), len(self.content), disk.met)  # cut in the midst, as it must be
                    else:
                        self.assertEqual(status, 503, disk.met)
                        self.assertIn(os.strerror(error).encode(), body)
                        self.assertNotIn("x-stanchion-withheld", headers)
                    self.assertEqual(suspected, [f"{self.name} it could not be read: {os.strerror(error)}"])
                    self.assertEqual(dict(self.blobs.damaged), {})
                    self.assertEqual(self.ask(self.path)[2], self.content)

    def test_a_published_file_that_is_missing_is_not_denied(self) -> None:
        self.generations.publish(image())
        missing = image().files[0].sha256
        status, headers, body = self.ask(f"blobs/{missing}")
        self.assertEqual((status, headers["retry-after"]), (503, "30"))
        self.assertIn(b"missing on this region process's disk", body)
        self.assertIn("missing on this region process's disk", headers["x-stanchion-withheld"])
        self.assertEqual(self.blobs.damaged, {})  # another process has it; this one never had it

    def test_a_published_file_that_was_lost_is_taken_for_damaged_until_it_is_there_again(self) -> None:
        content = contents_of(b"ubuntu/noble/amd64/20260101", b"")
        found: list[Damaged] = []
        self.blobs.on_damage.append(found.append)
        name = put(self.blobs, next(iter(content.values())))
        self.generations.publish(image())
        self.blobs.path(name).unlink()
        for _ in range(2):
            status, headers, _body = self.ask(f"blobs/{name}")
            self.assertEqual(status, 503)
            self.assertIn("is being fetched again", headers["x-stanchion-withheld"])
        self.assertEqual([damaged.sha256 for damaged in found], [name])
        put(self.blobs, next(iter(content.values())))
        self.assertEqual(self.blobs.damaged, {})
        self.assertEqual(self.ask(f"blobs/{name}")[0], 200)

    def test_whoever_misses_a_file_that_only_an_older_generation_has_is_told_to_read_the_index(self) -> None:
        self.generations.publish(image())
        self.generations.publish(image("jammy"))
        status, _, body = self.ask(f"blobs/{image().files[0].sha256}")
        self.assertEqual(status, 404)
        self.assertIn(b"only an older generation has it: read the index again", body)


class FullTransport(StringTransport):
    """A transport that is full after each write, while ``full``, until the test resumes its producer."""

    full = False
    aborted = 0

    def write(self, data: bytes) -> None:
        super().write(data)
        if self.full and self.producer is not None:
            self.producer.pauseProducing()

    def resume(self) -> None:
        """The client took all of it."""
        producer: Any = self.producer
        producer.resumeProducing()

    def abortConnection(self) -> None:
        self.aborted += 1


class SendingTests(StreamTestCase):
    """Sending to clients that are slow, stall, or go away."""

    def setUp(self) -> None:
        super().setUp()
        self.content = b"0123456789abcdef" * (CHUNK // 4)
        self.name = put(self.blobs, self.content)
        self.read = 0
        self.transport = FullTransport()
        self.transport.full = True
        site = Site(self.make(self.counting), timeout=None)
        self.protocol: Any = site.buildProtocol(None)
        self.protocol.makeConnection(self.transport)

    def counting(self, function: Any, *arguments: Any) -> Deferred[Any]:
        def count(result: Any) -> Any:
            self.read += len(result) if isinstance(result, bytes) else 0
            return result

        return inline(function, *arguments).addCallback(count)

    def begin(self) -> None:
        self.protocol.dataReceived(f"GET /blobs/{self.name} HTTP/1.1\r\nHost: x\r\n\r\n".encode())

    def test_no_more_is_read_than_the_client_takes_and_one_chunk_ahead(self) -> None:
        self.begin()
        self.assertEqual(self.read, 2 * CHUNK)
        self.transport.resume()
        self.assertEqual(self.read, 3 * CHUNK)
        self.assertLess(len(self.transport.value()), len(self.content))

    def test_a_client_that_takes_nothing_for_long_is_cut(self) -> None:
        self.begin()
        self.clock.advance(STALL_SECONDS - 1)
        self.transport.resume()
        self.clock.advance(STALL_SECONDS - 1)
        self.assertEqual(self.transport.aborted, 0)
        self.clock.advance(1)
        self.assertEqual(self.transport.aborted, 1)

    def test_a_slow_client_gets_everything(self) -> None:
        self.begin()
        for _ in range(len(self.content) // CHUNK):
            self.transport.resume()
        self.assertTrue(self.transport.value().endswith(self.content))
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_a_client_that_goes_away_ends_the_sending_and_is_no_error(self) -> None:
        self.begin()
        self.protocol.connectionLost(Failure(ConnectionLost()))
        self.assertEqual(self.clock.getDelayedCalls(), [])
        self.assertEqual(self.read, 2 * CHUNK)

    def test_a_file_that_is_closed_while_a_thread_begins_to_read_ahead_is_no_error(self) -> None:
        class Closing(FileIO):
            """Closed by the reactor's thread at the worst moment."""

            def fileno(self) -> int:
                self.close()
                return super().fileno()

        self.assertEqual(files._read(Closing(self.blobs.path(self.name)), 10, 0), b"")

    def test_a_file_that_gets_shorter_while_it_is_sent_cuts_the_connection(self) -> None:
        self.begin()
        with open(self.blobs.path(self.name), "r+b") as shortened:
            shortened.truncate(10)
        with capturedLogs() as events:
            self.transport.resume()
            self.transport.resume()
        [told] = [formatEvent(event) for event in events]
        self.assertIn("cannot be read: the file ended at byte", told)
        self.assertTrue(self.transport.disconnecting)
        self.assertLess(len(self.transport.value()), len(self.content))

    def test_a_file_that_is_found_damaged_while_it_is_sent_is_sent_no_further(self) -> None:
        self.begin()
        rot(self.blobs.path(self.name), len(self.content) - 1)
        self.blobs.verify(self.name, len(self.content), thorough=True)
        sent = len(self.transport.value())
        self.transport.resume()
        self.assertTrue(self.transport.disconnecting)
        self.assertEqual(len(self.transport.value()), sent)
        self.flushLoggedErrors()

    def test_that_it_is_repaired_meanwhile_does_not_mend_what_is_being_sent(self) -> None:
        self.begin()
        rot(self.blobs.path(self.name), len(self.content) - 1)
        self.blobs.verify(self.name, len(self.content), thorough=True)
        put(self.blobs, self.content)
        self.assertEqual(self.blobs.damaged, {})
        sent = len(self.transport.value())
        self.transport.resume()
        self.assertTrue(self.transport.disconnecting)
        self.assertEqual(len(self.transport.value()), sent)
        self.flushLoggedErrors()


class RangeTests(SynchronousTestCase):
    """:func:`parse_range`."""

    def test_ranges_are_understood(self) -> None:
        for header, expected in {
            "bytes=0-9": Range(0, 10),
            "bytes=5-": Range(5, 100),
            "bytes=5-1000": Range(5, 100),
            "bytes=-7": Range(93, 100),
            "bytes=-700": Range(0, 100),
            "Bytes = 1 - 2": Range(1, 3),
            "bytes=100-": UNSATISFIABLE,
            "bytes=-0": UNSATISFIABLE,
        }.items():
            self.assertEqual(parse_range(header, 100), expected, header)

    def test_what_is_no_single_range_of_bytes_is_ignored(self) -> None:
        for header in ("", "bytes", "bytes=", "bytes=-", "bytes=a-b", "bytes=5-2", "bytes=0-1,5-6", "lines=0-1",
                       "bytes=--5", "bytes=+1-2", "bytes=1-9999999999999999999", "bytes=²-3"):  # fmt: skip
            self.assertIsNone(parse_range(header, 100), header)

    @settings(deadline=None)
    @given(st.text(st.sampled_from("bytes=-,0123456789 ")) | st.text(), st.integers(0, 10**12))
    def test_whatever_is_asked_the_range_lies_within_the_file(self, header: str, size: int) -> None:
        found = parse_range(header, size)
        if found is not None and found is not UNSATISFIABLE:
            self.assertTrue(0 <= found.start < found.end <= size)


class RenderingTests(SynchronousTestCase):
    """:func:`render`, where names collide or are no file names."""

    def test_products_of_two_sources_with_one_name_are_both_listed(self) -> None:
        first = image()
        second = image("noble", os="custom")
        manifest = Manifest((first, second))
        (document,) = [json.loads(each) for each in render(manifest, NOW).products.values()]
        self.assertEqual(sorted(product["os"] for product in document["products"].values()), ["custom", "ubuntu"])
        (entry,) = json.loads(render(manifest, NOW).index)["index"].values()
        self.assertEqual(entry["products"], sorted(document["products"]))

    def test_boot_loaders_never_share_a_content_id_with_images(self) -> None:
        mixed = Image("grub", "", "amd64", "", "", "stable", "1", "p", "com.example:download", "http://x/",
                      (file("grub", b"g"),), {"bootloader-type": "uefi"})  # fmt: skip
        self.assertEqual(content_id(mixed), "com.example:download:bootloader-download")
        self.assertEqual(content_id(loader()), "com.example:bootloader-download")

    def test_a_content_id_that_is_no_file_name_gets_one(self) -> None:
        for name in ("../../etc/passwd", "a/b", "", ".hidden", "x" * 200, "é"):
            self.assertRegex(document_name(name), r"^content-[0-9a-f]{64}\.json$")
        self.assertEqual(document_name("com.ubuntu.maas:stable:v3:download"), "com.ubuntu.maas:stable:v3:download.json")

    def test_attributes_of_upstream_cannot_change_what_a_file_is(self) -> None:
        evil = ImageFile("squashfs", "squashfs", "a" * 64, 5, {"path": "http://evil/", "size": "7", "sha256": "x"})
        odd = Image("ubuntu", "noble", "amd64", "", "", "stable", "1", "p", "c", "http://x/", (evil,),
                    {"os": "windows", "versions": "none"})  # fmt: skip
        (document,) = render(Manifest([odd]), NOW).products.values()
        product = json.loads(document)["products"]["p"]
        self.assertEqual(product["os"], "ubuntu")
        item = product["versions"]["1"]["items"]["squashfs"]
        self.assertEqual((item["path"], item["size"], item["sha256"]), (f"blobs/{'a' * 64}", 5, "a" * 64))

    def test_the_same_generation_is_always_rendered_the_same(self) -> None:
        images = [image(), image("jammy"), image(arch="arm64"), loader()]
        self.assertEqual(render(Manifest(images), NOW), render(Manifest(reversed(images)), NOW))
