"""The sample stream: the same bytes each time, right hashes, and nothing in it that pretends to be real."""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path
from urllib.parse import urlsplit

from twisted.trial.unittest import SynchronousTestCase

from region.sample import ARCHES, IMAGES, LOADERS, RELEASES, write_sample
from rpc.manifest import KNOWN_FTYPES


class TestSample(SynchronousTestCase):
    def setUp(self):
        self.root = Path(self.mktemp()).absolute()
        self.url = write_sample(self.root)

    def documents(self):
        index = json.loads((self.root / "streams/v1/index.json").read_bytes())
        return {name: json.loads((self.root / entry["path"]).read_bytes()) for name, entry in index["index"].items()}

    def items(self):
        return [
            item
            for document in self.documents().values()
            for product in document["products"].values()
            for version in product["versions"].values()
            for item in version["items"].values()
        ]

    def test_it_is_where_its_url_says(self):
        self.assertEqual(urlsplit(self.url).scheme, "file")
        self.assertTrue((Path(urlsplit(self.url).path) / "streams/v1/index.json").is_file())

    def test_every_release_has_every_architecture_and_there_are_loaders(self):
        documents = self.documents()
        images = {(one["os"], one["release"], one["arch"]) for one in documents[IMAGES]["products"].values()}
        self.assertEqual(images, {("sample", release, arch) for release in RELEASES for arch in ARCHES})
        self.assertEqual({one["arch"] for one in documents[LOADERS]["products"].values()}, set(ARCHES))
        for one in documents[LOADERS]["products"].values():
            self.assertNotIn("release", one)
            self.assertIn("bootloader-type", one)

    def test_every_file_is_there_with_the_size_and_the_hash_that_are_listed(self):
        count = 0
        for item in self.items():
            content = (self.root / item["path"]).read_bytes()
            self.assertEqual((len(content), hashlib.sha256(content).hexdigest()), (item["size"], item["sha256"]))
            self.assertIn(item["ftype"], KNOWN_FTYPES)
            count += 1
        self.assertEqual(count, 3 * len(RELEASES) * len(ARCHES) + len(ARCHES))

    def test_it_is_a_few_megabytes(self):
        size = sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file())
        self.assertTrue(1 << 20 < size < 10 << 20, size)

    def test_every_content_is_another_and_says_that_it_is_a_sample(self):
        contents = [(self.root / item["path"]).read_bytes() for item in self.items()]
        self.assertEqual(len(set(contents)), len(contents))
        self.assertTrue(all(b"not bootable" in one[:200] for one in contents if one[:1] == b"S"))

    def test_a_loader_is_an_archive_that_can_be_unpacked(self):
        for item in self.items():
            if item["ftype"] == "archive.tar.xz":
                with tarfile.open(self.root / item["path"]) as archive:
                    self.assertEqual(archive.getnames(), ["sample.efi"])

    def test_writing_it_again_changes_nothing(self):
        before = {path: path.stat().st_mtime_ns for path in self.root.rglob("*")}
        write_sample(self.root)
        self.assertEqual({path: path.stat().st_mtime_ns for path in self.root.rglob("*")}, before)

    def test_a_file_that_was_damaged_is_written_again(self):
        path = next(self.root.rglob("boot-kernel"))
        content = path.read_bytes()
        path.write_bytes(content[:-1] + b"!")
        write_sample(self.root)
        self.assertEqual(path.read_bytes(), content)

    def test_the_same_bytes_are_written_elsewhere(self):
        other = Path(self.mktemp()).absolute()
        write_sample(other)
        files = {path.relative_to(self.root): path.read_bytes() for path in self.root.rglob("*") if path.is_file()}
        again = {path.relative_to(other): path.read_bytes() for path in other.rglob("*") if path.is_file()}
        self.assertEqual(files, again)
