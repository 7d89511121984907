"""Uploading over the API, in a real database: at once and in chunks, what is refused and why; and verifying."""

from __future__ import annotations

import hashlib
from typing import Any

from twisted.internet.defer import Deferred

from region.images.disk import SPARE_BYTES
from region.images.receiving import IDLE_SECONDS
from region.images.uploads import UploadStore
from rpc.manifest import ImageKey
from tests.region.inventories import NOBLE, image
from tests.region.test_api_images import StoresTestCase
from tests.region.web import Response, form
from tests.rpc.test_verifying import rot

BODY = b"the root file system of mine\n" * 5000
SHA = hashlib.sha256(BODY).hexdigest()
KEY = ImageKey("custom", "mine", "amd64", "generic", "generic", "uploaded")


class UploadTestCase(StoresTestCase):
    async def begin(self, body: bytes = BODY, **fields: Any) -> Response:
        given = {
            "name": "custom/mine", "architecture": "amd64/generic", "size": len(body),
            "sha256": hashlib.sha256(body).hexdigest(), **fields,
        }  # fmt: skip
        return await self.ask("POST", "boot-resources/", **form(**{n: v for n, v in given.items() if v is not None}))

    def file_of(self, response: Response) -> Any:
        (newest,) = response.json["sets"].values()
        (file,) = newest["files"].values()
        return file

    async def put(self, uri: str, data: bytes, **query: int) -> Response:
        more = "".join(f"?{name}={value}" for name, value in query.items())
        return await self.ask("PUT", uri + more, body=data, Content_Type="application/octet-stream")


class ChunkTests(UploadTestCase):
    async def test_chunks_in_order_become_a_resource_and_an_import_is_asked_for(self) -> None:
        response = await self.begin(title="Mine", filetype="ddgz", base_image="ubuntu/noble")
        self.assertEqual(response.status, 201)
        created, file = response.json, self.file_of(response)
        self.assertEqual(response.headers["Location"], created["resource_uri"])
        self.assertEqual((created["type"], created["name"], created["title"]), ("Uploaded", "custom/mine", "Mine"))
        self.assertEqual((file["filetype"], file["complete"], file["received"]), ("root-dd.gz", False, 0))
        half = len(BODY) // 2
        response = await self.put(file["upload_uri"], BODY[:half])
        self.assertEqual((response.status, self.file_of(response)["received"]), (200, half))
        self.assertEqual(self.file_of(await self.ask("GET", created["resource_uri"]))["received"], half)
        self.assertEqual(await self.jobs.unfinished(), ())
        response = await self.put(file["upload_uri"], BODY[half:])
        self.assertEqual((response.status, self.file_of(response)["complete"]), (200, True))
        self.assertTrue(self.blobs.is_verified(SHA, len(BODY)))
        (job,) = await self.jobs.unfinished()
        self.assertEqual(job.trigger, "upload")
        (listed,) = (await self.ask("GET", "boot-resources/?type=uploaded")).json
        self.assertEqual(listed["id"], created["id"])
        self.assertEqual((await self.ask("GET", "boot-resources/?type=synced")).json, [])

    async def test_what_was_cut_is_found_again_by_beginning_again_also_after_a_restart(self) -> None:
        file = self.file_of(await self.begin())
        await self.put(file["upload_uri"], BODY[:1000])
        await self.receiver.stop()
        self.make_api_over(self.blobs)
        again = self.file_of(await self.begin())
        self.assertEqual((again["upload_uri"], again["received"]), (file["upload_uri"], 1000))
        response = await self.put(again["upload_uri"], BODY[1000:], offset=1000)
        self.assertTrue(self.file_of(response)["complete"])
        self.assertTrue(self.file_of(await self.begin())["complete"])

    async def test_a_client_of_maas_that_begins_again_sends_everything_again_and_need_not_say_so(self) -> None:
        file = self.file_of(await self.begin())
        await self.put(file["upload_uri"], BODY[:1000])
        again = self.file_of(await self.begin())
        self.assertEqual((again["upload_uri"], again["received"]), (file["upload_uri"], 1000))
        self.assertEqual((await self.put(again["upload_uri"], BODY + b"x")).status, 400)
        self.assertEqual(self.file_of(await self.begin())["received"], 1000)
        for start in range(0, len(BODY), 50_000):
            response = await self.put(again["upload_uri"], BODY[start : start + 50_000])
            self.assertEqual(response.status, 200, response.text)
        self.assertTrue(self.file_of(response)["complete"])

    def make_api_over(self, blobs: Any) -> None:
        self.make_api()
        self.receiver.blobs = blobs

    async def test_a_chunk_that_was_sent_twice_is_not_taken_twice(self) -> None:
        uri = self.file_of(await self.begin())["upload_uri"]
        await self.put(uri, BODY[:1000], offset=0)
        response = await self.put(uri, BODY[:1000], offset=0)
        self.assertEqual(response.status, 409)
        self.assertIn("1000 bytes have come: go on from there", response.text)
        last = (await self.put(uri, BODY[1000:], offset=1000), await self.put(uri, BODY[1000:], offset=1000))
        self.assertEqual([each.status for each in last], [200, 200])

    async def test_too_much_is_refused_and_what_had_come_is_kept(self) -> None:
        uri = self.file_of(await self.begin())["upload_uri"]
        await self.put(uri, BODY[:1000])
        response = await self.put(uri, BODY)
        self.assertEqual(response.status, 400)
        self.assertIn("Too much data received: 1000 bytes have come", response.text)
        self.assertTrue(self.file_of(await self.put(uri, BODY[1000:]))["complete"])
        self.assertEqual((await self.put(uri, b"x")).status, 400)

    async def test_wrong_content_is_refused_and_can_be_sent_again(self) -> None:
        uri = self.file_of(await self.begin())["upload_uri"]
        response = await self.put(uri, b"x" * len(BODY))
        self.assertEqual(response.status, 400)
        self.assertIn("Saved content does not match given SHA256 value", response.text)
        self.assertIn("upload it again from its beginning", response.text)
        self.assertEqual(await self.jobs.unfinished(), ())
        self.assertTrue(self.file_of(await self.put(uri, BODY))["complete"])

    async def test_another_region_process_says_whose_the_upload_is(self) -> None:
        uri = self.file_of(await self.begin())["upload_uri"]
        self.receiver.process = "other"
        response = await self.put(uri, BODY)
        self.assertEqual(response.status, 409)
        self.assertIn("goes to region process region, which began it; this one is other", response.text)

    async def test_a_region_process_that_does_not_import_takes_no_uploads(self) -> None:
        self.receiver.takes = False
        response = await self.begin()
        self.assertEqual(response.status, 409)
        self.assertIn("would not be published: upload to the one that does", response.text)
        self.assertEqual(await self.uploads.list(), ())

    async def test_one_that_goes_because_another_is_whole_first_is_begun_anew(self) -> None:
        await self.put(self.file_of(await self.begin())["upload_uri"], BODY)
        complete, times = self.uploads.complete, [1]

        async def after_another(upload_id: int) -> Any:
            if times[0]:
                times[0] -= 1
                await self.uploads.delete(KEY)
            return await complete(upload_id)

        self.patch(UploadStore, "complete", lambda store, upload_id: after_another(upload_id))
        response = await self.begin(title="Again")
        self.assertEqual((response.status, self.file_of(response)["complete"]), (201, True))
        times[0] = 99
        response = await self.begin(title="And again")
        self.assertEqual(response.status, 409)
        self.assertIn("was deleted while its content came. Send the request again.", response.text)

    async def test_a_disk_that_is_full_is_said_and_the_upload_goes_on_later(self) -> None:
        self.receiver.free_bytes = lambda path: 1000
        response = await self.begin()
        self.assertEqual(response.status, 507)
        self.assertIn("make room", response.text)
        self.receiver.free_bytes = lambda path: 1 << 40
        uri = self.file_of(await self.begin())["upload_uri"]
        await self.put(uri, BODY[:1000])

        def full(*arguments: object) -> None:
            raise OSError(28, "No space left on device")

        patch = self.patch(type(self.receiver._open[int(uri.split("/")[-2])].part), "write", full)
        self.assertEqual((await self.put(uri, BODY[1000:])).status, 507)
        patch.restore()
        self.assertTrue(self.file_of(await self.put(uri, BODY[1000:], offset=1000))["complete"])

    async def test_uploads_that_fit_each_alone_do_not_together_take_what_is_left_alone(self) -> None:
        uri = self.file_of(await self.begin())["upload_uri"]
        self.receiver.free_bytes = lambda path: SPARE_BYTES + 999
        response = await self.put(uri, BODY[:1000])
        self.assertEqual(response.status, 507)
        self.assertIn("64.0 MiB of it are left alone: make room, then go on with this upload", response.text)
        self.assertEqual((await self.put(uri, BODY[:999])).status, 200)
        self.receiver.free_bytes = lambda path: 1 << 40
        self.assertTrue(self.file_of(await self.put(uri, BODY[999:], offset=999))["complete"])

    async def test_the_part_is_closed_when_nothing_comes_and_opened_again(self) -> None:
        uri = self.file_of(await self.begin())["upload_uri"]
        await self.put(uri, BODY[:1000])
        self.assertEqual(len(self.receiver._open), 1)
        self.clock.advance(IDLE_SECONDS)
        self.assertEqual(self.receiver._open, {})
        self.assertTrue(self.file_of(await self.put(uri, BODY[1000:]))["complete"])

    async def test_an_upload_that_nobody_continues_expires(self) -> None:
        uri = self.file_of(await self.begin())["upload_uri"]
        await self.put(uri, BODY[:1000])
        await self.database.execute("UPDATE boot_upload SET touched = now() - interval '23 hours'")
        await self.receiver._expire()
        self.assertEqual(self.blobs.part_size(SHA), 1000)
        await self.database.execute("UPDATE boot_upload SET touched = now() - interval '25 hours'")
        await self.receiver._expire()
        self.assertEqual(await self.uploads.list(), ())
        self.assertEqual(self.blobs.part_size(SHA), 0)
        self.assertEqual((await self.put(uri, BODY[1000:])).status, 404)

    async def test_what_has_come_stays_when_another_upload_of_the_same_content_goes(self) -> None:
        first = await self.begin()
        await self.put(self.file_of(first)["upload_uri"], BODY[:1000])
        second = await self.begin(name="custom/other")
        response = await self.put(self.file_of(second)["upload_uri"], BODY[1000:2000], offset=1000)
        self.assertEqual((response.status, response.headers["Retry-After"]), (503, "10"))
        self.assertNotIn(str(self.blobs.root), response.text)
        self.assertEqual((await self.ask("DELETE", first.json["resource_uri"])).status, 204)
        self.blobs.sweep((), stale_after=0)
        response = await self.put(self.file_of(second)["upload_uri"], BODY[1000:], offset=1000)
        self.assertEqual((response.status, self.file_of(response)["complete"]), (200, True))

    async def test_a_whole_upload_does_not_expire(self) -> None:
        await self.put(self.file_of(await self.begin())["upload_uri"], BODY)
        await self.database.execute("UPDATE boot_upload SET touched = now() - interval '25 hours'")
        await self.receiver._expire()
        self.assertEqual(len(await self.uploads.list()), 1)

    async def test_a_process_that_ended_before_it_could_say_that_all_had_come_says_it_at_its_start(self) -> None:
        uri = self.file_of(await self.begin())["upload_uri"]
        await self.put(uri, BODY)
        await self.database.execute("UPDATE boot_upload SET completed = NULL")
        await self.receiver.start()
        (upload,) = await self.uploads.list()
        self.assertIsNotNone(upload.completed)

    async def test_content_that_is_damaged_later_can_be_uploaded_again(self) -> None:
        uri = self.file_of(await self.begin())["upload_uri"]
        await self.put(uri, BODY)
        rot(self.blobs.path(SHA))
        self.blobs.verify(SHA, len(BODY), thorough=True)
        again = self.file_of(await self.begin())
        self.assertEqual((again["complete"], again["upload_uri"]), (False, uri))
        self.assertTrue(self.file_of(await self.put(uri, BODY))["complete"])
        self.assertEqual(self.blobs.damaged, {})
        self.flushLoggedErrors()


class RequestTests(UploadTestCase):
    async def test_content_at_once_needs_neither_sha256_nor_size(self) -> None:
        response = await self.begin(sha256=None, size=None, content=BODY.decode())
        self.assertEqual(response.status, 201)
        self.assertTrue(self.file_of(response)["complete"])
        self.assertEqual(self.file_of(response)["sha256"], SHA)

    async def test_too_little_and_other_content_at_once_are_refused(self) -> None:
        response = await self.begin(content=BODY[:-1].decode())
        self.assertEqual((response.status, list(response.json)), (400, ["size"]))
        self.assertIn("Too little data received", response.json["size"][0])
        response = await self.begin(content="x" * len(BODY))
        self.assertEqual((response.status, list(response.json)), (400, ["sha256"]))
        self.assertIn("Saved content does not match given SHA256 value", response.json["sha256"][0])
        self.assertEqual(await self.uploads.list(), ())

    async def test_what_cannot_be_is_refused_by_field(self) -> None:
        await self.publish(image(NOBLE))
        for fields, field, said in (
            ({"name": "ubuntu/mine"}, "name", "Images of ubuntu come from sources"),
            ({"name": "ubuntu"}, "name", "'ubuntu' is a reserved name"),
            ({"name": "custom/windows"}, "name", "'windows' is a reserved name"),
            ({"name": "noble"}, "name", "'noble' is what ubuntu's noble is called, imported from"),
            ({"name": "centos/noble"}, "name", "'noble' is what ubuntu's noble is called, imported from"),
            ({"name": "debian/NOBLE"}, "name", "'NOBLE' is what ubuntu's noble is called, imported from"),
            ({"name": "rhel/centos"}, "name", "'centos' is a reserved name"),
            ({"name": "beos/r5"}, "name", "It should be one of: 'custom'"),
            ({"name": "custom/../x"}, "name", "is not a name such as custom/my-image"),
            ({"architecture": "amd64/"}, "architecture", "amd64/generic"),
            ({"sha256": "12"}, "sha256", "64 hexadecimal digits"),
            ({"size": "0"}, "size", "0 is not the size of an image"),
            ({"filetype": "iso"}, "filetype", "It should be one of: 'tgz'"),
            ({"filetype": "iso"}, "filetype", "'ddxz'."),
            ({"size": None}, "size", "unless the content is sent at once"),
            ({"base_image": "noble"}, "base_image", "ubuntu/noble"),
            ({"title": "x\ny"}, "title", "one line"),
        ):
            response = await self.begin(**fields)
            self.assertEqual((response.status, list(response.json)), (400, [field]), fields)
            self.assertIn(said, response.json[field][0])
        self.assertEqual(await self.uploads.list(), ())

    async def test_a_content_that_is_there_with_another_size_is_no_reason_to_touch_it(self) -> None:
        await self.put(self.file_of(await self.begin())["upload_uri"], BODY)
        response = await self.begin(name="custom/other", size=5)
        self.assertEqual((response.status, list(response.json)), (400, ["size"]))
        self.assertTrue(self.blobs.is_verified(SHA, len(BODY)))

    async def test_an_image_is_deleted_and_a_synced_one_is_not(self) -> None:
        created = (await self.begin()).json
        await self.put(self.file_of(await self.begin())["upload_uri"], BODY[:10])
        self.assertEqual(await self.jobs.unfinished(), ())
        self.assertEqual((await self.ask("DELETE", created["resource_uri"])).status, 204)
        self.assertEqual([job.trigger for job in await self.jobs.unfinished()], ["upload"])
        self.assertEqual((await self.ask("GET", created["resource_uri"])).status, 404)
        self.assertEqual(self.blobs.part_size(SHA), 0)
        await self.publish(image(NOBLE))
        (noble,) = (await self.ask("GET", "boot-resources/")).json
        response = await self.ask("DELETE", noble["resource_uri"])
        self.assertEqual(response.status, 409)
        self.assertIn("select it there no longer", response.text)
        self.assertEqual((await self.ask("DELETE", "boot-resources/1/")).status, 404)

    async def test_a_newer_upload_of_an_image_replaces_the_older_one_when_it_is_whole(self) -> None:
        await self.put(self.file_of(await self.begin())["upload_uri"], BODY)
        other = BODY + b"more"
        response = await self.begin(other)
        sets = (await self.ask("GET", response.json["resource_uri"])).json["sets"]
        self.assertEqual([sets[version]["complete"] for version in sorted(sets)], [True, False])
        await self.put(sets[max(sets)]["files"]["root-tgz"]["upload_uri"], other)
        (upload,) = await self.uploads.list()
        self.assertEqual(upload.request.sha256, hashlib.sha256(other).hexdigest())


class DescriptionTests(UploadTestCase):
    async def test_a_chunk_is_described_as_a_body_of_bytes_and_where_it_belongs_as_a_part_of_the_query(self) -> None:
        paths = (await self.ask("GET", "openapi.json")).json["paths"]
        [put] = [found["put"] for path, found in paths.items() if path.endswith("/upload/{upload_id}/")]
        self.assertEqual(list(put["requestBody"]["content"]), ["application/octet-stream"])
        self.assertEqual([each["name"] for each in put["parameters"]], ["offset"])


class VerificationTests(StoresTestCase):
    async def test_a_verification_is_begun_and_followed(self) -> None:
        self.verifier.start()
        self.addCleanup(lambda: Deferred.fromCoroutine(self.verifier.stop()))
        before = (await self.ask("GET", "image-verification/")).json
        self.assertEqual((before["state"], before["next"], before["not_repaired"]), ("waiting", None, []))
        response = await self.ask("POST", "image-verification/", **form(rate=100))
        self.assertEqual(response.status, 202)
        after = (await self.ask("GET", "image-verification/")).json
        self.assertEqual((after["files"], after["damaged"]), (0, []))
        self.assertRegex(after["ended"], r"^20\d\d-\d\d-\d\dT")
        response = await self.ask("POST", "image-verification/", **form(rate=0))
        self.assertEqual(response.json, {"rate": ["0 is less than 1."]})

    async def test_a_file_that_was_found_damaged_is_not_complete_until_it_is_there_again(self) -> None:
        await self.publish(image(NOBLE))
        (noble,) = (await self.ask("GET", "boot-resources/")).json
        (files,) = [each["files"] for each in (await self.ask("GET", noble["resource_uri"])).json["sets"].values()]
        sha256 = files["squashfs"]["sha256"]
        self.blobs.prepare()
        self.blobs.path(sha256).write_bytes(b"rot")
        self.blobs.verify(sha256, 3, thorough=True)
        self.flushLoggedErrors()
        (found,) = (await self.ask("GET", noble["resource_uri"])).json["sets"].values()
        self.assertEqual({name: file["complete"] for name, file in found["files"].items()},
                         {"boot-initrd": True, "boot-kernel": True, "squashfs": False})  # fmt: skip
        self.assertFalse(found["complete"])
        self.blobs._book().repaired(sha256)
        (found,) = (await self.ask("GET", noble["resource_uri"])).json["sets"].values()
        self.assertTrue(found["complete"] and found["files"]["squashfs"]["complete"])
