"""The commands that verify, upload and delete images: what is sent, how they go on, and what they say."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from region.cli import images
from region.cli.images import filetype_of
from rpc.console import CommandFailed, Status
from tests.region.test_cli_answers import CommandCase
from tests.rpc.region_server import Told

BODY = bytes(range(256)) * 10
URI = "/MAAS/api/2.0/boot-resources/7/upload/3/"


def resource(received: int, size: int = len(BODY)) -> dict[str, Any]:
    complete = received == size
    file = {"complete": complete} | ({} if complete else {"received": received, "upload_uri": URI})
    return {
        "id": 7, "name": "custom/mine", "architecture": "amd64/generic", "version": "20260101.000003",
        "resource_uri": "/MAAS/api/2.0/boot-resources/7/",
        "sets": {"20260101.000003": {"complete": complete, "files": {"root-tgz": file}}},
    }  # fmt: skip


class UploadTests(CommandCase):
    def setUp(self) -> None:
        super().setUp()
        directory = TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.path = Path(directory.name) / "mine.tar.gz"
        self.path.write_bytes(BODY)
        self.patch(images, "CHUNK", 1000)
        self.patch(images._NEVER, "wait", lambda seconds: None)

    def upload(self, *more: str) -> tuple[int, str, str]:
        return self.stanchion("images", "upload", str(self.path), "--name", "mine", "--arch", "amd64", *more)

    @property
    def chunks(self) -> list[tuple[int, bytes]]:
        sent = [each for each in self.region.seen if each.method == "PUT"]
        return [(int(each.query["offset"][0]), each.form[""][0].encode("latin-1")) for each in sent]

    def test_a_file_is_sent_in_chunks_with_what_it_is(self) -> None:
        self.region.answers["POST", "boot-resources/"] = Told(resource(0), 201)
        self.region.answers["PUT", "boot-resources/7/upload/3/"] = (resource(1000), resource(2000), resource(2560))
        status, output, errors = self.upload("--title", "Größe")
        self.assertEqual(status, Status.YES, errors)
        self.assertIn("custom/mine (amd64/generic) is uploaded, version 20260101.000003", output)
        form = self.region.seen[0].form
        digest = hashlib.sha256(BODY).hexdigest()
        self.assertEqual((form["sha256"], form["size"], form["filetype"]), ([digest], ["2560"], ["tgz"]))
        self.assertEqual((form["name"], form["title"]), (["mine"], ["Größe"]))
        self.assertEqual(self.chunks, [(0, BODY[:1000]), (1000, BODY[1000:2000]), (2000, BODY[2000:])])
        self.assertIn("sent 2.0 kB of 2.6 kB", errors)

    def test_what_was_cut_goes_on_where_it_was(self) -> None:
        self.region.answers["POST", "boot-resources/"] = Told(resource(2000), 201)
        self.region.answers["PUT", "boot-resources/7/upload/3/"] = resource(2560)
        self.assertEqual(self.upload()[0], Status.YES)
        self.assertEqual(self.chunks, [(2000, BODY[2000:])])

    def test_a_chunk_whose_answer_was_lost_is_not_sent_again(self) -> None:
        self.region.answers["POST", "boot-resources/"] = Told(resource(0), 201)
        self.region.answers["PUT", "boot-resources/7/upload/3/"] = (Told("go on from there", 409), resource(2560))
        self.region.answers["GET", "boot-resources/7/"] = resource(1000)
        self.assertEqual(self.upload()[0], Status.YES)
        self.assertEqual([offset for offset, _ in self.chunks], [0, 1000])

    def test_what_is_there_already_is_not_sent(self) -> None:
        self.region.answers["POST", "boot-resources/"] = Told(resource(2560), 201)
        self.assertEqual(self.upload()[0], Status.YES)
        self.assertEqual(self.chunks, [])

    def test_a_refusal_is_said(self) -> None:
        self.region.answers["POST", "boot-resources/"] = Told({"name": ["'ubuntu' is a reserved name."]}, 400)
        status, _, errors = self.upload()
        self.assertEqual(status, Status.USAGE)
        self.assertIn("name: 'ubuntu' is a reserved name", errors)

    def test_an_upload_that_is_refused_for_good_ends(self) -> None:
        self.region.answers["POST", "boot-resources/"] = Told(resource(0), 201)
        self.region.answers["PUT", "boot-resources/7/upload/3/"] = Told("goes to region process other", 409)
        self.region.answers["GET", "boot-resources/7/"] = resource(0)
        status, _, errors = self.upload()
        self.assertEqual(status, Status.NO)
        self.assertIn("goes to region process other", errors)

    def test_a_file_that_is_not_there_is_said(self) -> None:
        self.path.unlink()
        status, _, errors = self.upload()
        self.assertEqual(status, Status.USAGE)
        self.assertIn("No such file", errors)

    def test_what_a_file_is_follows_from_its_name_or_is_asked_for(self) -> None:
        for name, kind in (("A.TGZ", "tgz"), ("x.dd.tar.xz", "ddtxz"), ("x.tar.xz", "txz"), ("x.img", "ddraw")):
            self.assertEqual(filetype_of(name), kind)
        self.assertIn("--filetype", str(self.assertRaises(CommandFailed, filetype_of, "image.iso")))


class DeleteTests(CommandCase):
    def test_one_is_deleted_by_its_name(self) -> None:
        self.region.answers["GET", "boot-resources/"] = [resource(2560)]
        self.region.answers["DELETE", "boot-resources/7/"] = Told("", 204)
        status, output, _ = self.stanchion("images", "delete", "mine")
        self.assertEqual(status, Status.YES)
        self.assertIn("custom/mine (amd64/generic) is deleted", output)
        self.assertEqual(self.region.seen[0].query, {"type": ["uploaded"]})

    def test_one_of_several_has_to_be_named(self) -> None:
        both = [resource(2560), resource(2560) | {"id": 8, "architecture": "arm64/generic"}]
        self.region.answers["GET", "boot-resources/"] = both
        self.region.answers["DELETE", "boot-resources/8/"] = Told("", 204)
        status, _, errors = self.stanchion("images", "delete", "custom/mine")
        self.assertEqual(status, Status.USAGE)
        self.assertIn("amd64/generic, arm64/generic: say which, --arch", errors)
        self.assertEqual(self.stanchion("images", "delete", "mine", "--arch", "arm64")[0], Status.YES)

    def test_one_that_there_is_not_is_said(self) -> None:
        self.region.answers["GET", "boot-resources/"] = []
        self.assertEqual(self.stanchion("images", "delete", "mine")[0], Status.NO)


class VerifyTests(CommandCase):
    RUNNING: Any = {
        "state": "verifying", "files": 1, "bytes": 50, "bytes_total": 100, "ended": None, "damaged": [],
        "not_repaired": [],
    }  # fmt: skip
    ENDED: Any = {**RUNNING, "state": "waiting", "files": 2, "bytes": 100, "ended": "2026-01-01T00:00:00Z"}
    DAMAGED: Any = {
        **ENDED, "damaged": [{"sha256": "ab", "reason": "it is wrong\x1b"}],
        "not_repaired": [{"sha256": "ab", "size": 1, "reason": "it is wrong", "found": "2026-01-01T00:00:00Z"}],
    }  # fmt: skip

    def setUp(self) -> None:
        super().setUp()
        self.patch(images._NEVER, "wait", lambda seconds: None)

    def test_it_is_watched_to_its_end(self) -> None:
        self.region.answers["POST", "image-verification/"] = Told(self.RUNNING, 202)
        self.region.answers["GET", "image-verification/"] = (self.RUNNING, self.ENDED)
        status, output, errors = self.stanchion("images", "verify", "--rate", "200")
        self.assertEqual(status, Status.YES)
        self.assertEqual(self.region.seen[0].form, {"rate": ["200"]})
        self.assertIn("verified 50 B of 100 B (50 %", errors)
        self.assertEqual(output, "2 files (100 B) were verified at 2026-01-01T00:00:00Z: none damaged\n")

    def test_damage_is_said_and_is_the_status(self) -> None:
        self.region.answers["GET", "image-verification/"] = self.DAMAGED
        status, output, _ = self.stanchion("images", "verify", "--status")
        self.assertEqual(status, Status.NO)
        self.assertIn("damaged: ab: it is wrong\\x1b", output)
        self.assertIn("not repaired yet: ab, since 2026", output)
        self.assertEqual(json.loads(self.stanchion("images", "verify", "--status", "--json")[1]), self.DAMAGED)

    def test_it_need_not_be_waited_for(self) -> None:
        self.region.answers["POST", "image-verification/"] = Told(self.RUNNING, 202)
        status, output, _ = self.stanchion("images", "verify", "--no-wait")
        self.assertEqual((status, output), (Status.YES, "the region is verifying: 50 B of 100 B\n"))
