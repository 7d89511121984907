"""Uploads become part of generations by the same rules as what comes from sources."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from rack.systems.describing import describe
from region.images.naming import FILETYPES, FROM_SOURCES, UploadInvalid, checked_upload, image_of
from region.images.uploads import UploadStore
from region.upstream.values import UPLOADS
from rpc.manifest import EMPTY, Manifest, parse_manifest
from tests.region.importing import SOURCE, ImportTestCase, image, put, sha256
from tests.rpc.test_verifying import rot

BODY = b"my own root file system"
SHA = sha256(BODY)


class NameTests(SynchronousTestCase):
    @settings(max_examples=100)
    @given(
        st.text(max_size=20) | st.sampled_from(["custom/a", "windows/win2022", "ubuntu/noble", "noble", "a", "a/b/c"]),
        st.text(max_size=20) | st.sampled_from(["amd64", "amd64/generic", "arm64/ga", "/", "amd64/"]),
        st.sampled_from([SHA, SHA.upper(), "", "x"]),
        st.integers(-1, 10) | st.just(1 << 50),
        st.text(max_size=5),
        st.sampled_from([*FILETYPES, "", "iso"]),
    )
    def test_whatever_is_asked_for_is_refused_with_a_reason_or_becomes_an_image_that_racks_can_read(
        self, name: str, architecture: str, digest: str, size: int, title: str, filetype: str
    ) -> None:
        published = Manifest([image()])
        try:
            request = checked_upload(
                name, architecture, digest, size, title=title, filetype=filetype, published=published
            )
        except UploadInvalid as error:
            self.assertIn(error.field, ("name", "architecture", "sha256", "size", "title", "filetype"))
            self.assertTrue(error.message.endswith("."))
            return
        made = image_of(request, "20260101.000001")
        self.assertNotIn(made.os, FROM_SOURCES)
        self.assertNotIn(made.key, published.by_key)
        both = Manifest([*published.images, made])
        self.assertEqual(parse_manifest(both.canonical, both.digest), both)

    def test_a_bare_name_is_a_custom_image(self) -> None:
        request = checked_upload("mine", "amd64", SHA, 5)
        self.assertEqual((request.name, request.subarch, request.title), ("custom/mine", "generic", ""))

    def test_what_has_no_title_is_called_as_the_rack_s_driver_has_it(self) -> None:
        for name, title, expected in (
            ("windows/win2022", "", "Windows Server 2022"),
            ("windows/win2022", "Ours", "Ours"),
            ("custom/mine", "", "mine"),
        ):
            made = image_of(checked_upload(name, "amd64", SHA, 5, title=title), "1")
            self.assertEqual(describe(Manifest([made]), made.os, made.release).title, expected)

    def test_what_a_source_gives_cannot_be_uploaded_under_the_same_name(self) -> None:
        published = Manifest([image("centos70", os="centos")])
        error = self.assertRaises(
            UploadInvalid, checked_upload, "centos/centos70", "amd64/generic", SHA, 5, published=published
        )
        self.assertIn("is imported from http://images.example.com/stable", error.message)
        checked_upload("centos/centos70", "arm64/generic", SHA, 5, published=published)
        checked_upload("centos/centos70", "amd64/generic", SHA, 5, published=EMPTY)

    def test_a_bare_name_that_means_an_image_of_a_source_goes_on_meaning_it(self) -> None:
        published = Manifest([image("centos70", os="centos"), image("noble")])
        for name in ("custom/noble", "debian/noble", "suse/centos70", "rhel/Noble", "windows/ubuntu", "ol/suse"):
            error = self.assertRaises(UploadInvalid, checked_upload, name, "arm64", SHA, 5, published=published)
            self.assertEqual(error.field, "name")
        mine = image_of(checked_upload("suse/mine", "amd64", SHA, 5), "1")
        checked_upload("rhel/mine", "amd64", SHA, 5, published=Manifest([mine]))


class PublishTests(ImportTestCase):
    def _set_up_importer(self, _: None) -> None:
        super()._set_up_importer(_)
        self.uploads = UploadStore(self.database)

    async def upload(self, body: bytes = BODY, name: str = "mine", *, whole: bool = True) -> int:
        request = checked_upload(name, "amd64/generic", sha256(body), len(body), title="Mine")
        upload, _ = await self.uploads.create(request, "region", "me")
        if whole:
            put(self.blobs, body)
            await self.uploads.complete(upload.id)
        return upload.id

    async def test_an_upload_is_published_with_what_sources_give_and_stays_when_they_are_away(self) -> None:
        await self.add_source()
        await self.publish(image())
        await self.upload()
        await self.upload(b"not whole", "other", whole=False)
        job = await self.import_now()
        manifest = await self.manifest()
        self.assertEqual([each.release for each in manifest.images], ["mine", "noble"])
        self.assertEqual(await self.problems_of(job), ())  # what is not whole yet is not missed
        mine = manifest.images[0]
        self.assertEqual((mine.label, mine.source, mine.attribute("release_title")), ("uploaded", UPLOADS, "Mine"))
        assert job.generation is not None
        (change,) = await self.generations.changes(job.generation)
        self.assertEqual((change.kind, change.reason), ("added", "it was uploaded"))
        self.reader.fail("no route to host")
        await self.upload(b"newer", "mine")
        job = await self.import_now()
        self.assertEqual([each.release for each in (await self.manifest()).images], ["mine", "noble"])
        self.assertGreater((await self.manifest()).images[0].version, mine.version)

    async def test_of_an_upload_and_a_source_s_image_of_the_same_name_the_one_that_came_first_stays(self) -> None:
        await self.add_source()
        await self.upload(name="centos/centos7")
        offered = [image(release, os=os) for os, release in (("centos", "centos7"), ("suse", "mine"))]
        for more in ([], [image()]):
            self.reader.offer(*map(self.fetcher.know, [*offered, *more]))
            job = await self.import_now()
            reasons = [problem.reason for problem in await self.importer.jobs.problems(job.id)]
            self.assertEqual(len(reasons), 1)
            self.assertIn("centos/centos7 for amd64 is an image that was uploaded", reasons[0])
        await self.upload(name="suse/mine")  # it was begun before the source had one
        job = await self.import_now()
        reasons = [problem.reason for problem in await self.importer.jobs.problems(job.id)]
        self.assertEqual(len(reasons), 2)
        self.assertIn(f"suse/mine for amd64 is imported from {SOURCE}", reasons[1])
        found = {f"{each.os}/{each.release}": each.source for each in (await self.manifest()).images}
        self.assertEqual(found, {"centos/centos7": UPLOADS, "suse/mine": SOURCE, "ubuntu/noble": SOURCE})
        # Deleted, the upload makes room.
        (mine,) = [each for each in await self.uploads.list() if each.request.name == "centos/centos7"]
        await self.uploads.delete(mine.image.key)
        await self.import_now()
        found = {f"{each.os}/{each.release}": each.source for each in (await self.manifest()).images}
        self.assertEqual(found["centos/centos7"], SOURCE)

    async def test_uploads_alone_are_enough_to_publish(self) -> None:
        await self.upload()
        job = await self.import_now()
        self.assertEqual((job.state, job.generation is not None), ("done", True))

    async def test_one_that_is_deleted_goes_with_the_next_generation_and_the_reason(self) -> None:
        await self.upload()
        await self.import_now()
        (mine,) = (await self.manifest()).images
        await self.uploads.delete(mine.key)
        job = await self.import_now()
        assert job.generation is not None
        (change,) = await self.generations.changes(job.generation)
        self.assertEqual((change.kind, change.reason), ("removed", "it had been uploaded, and was deleted"))
        self.assertEqual(await self.manifest(), EMPTY)

    async def test_damaged_content_of_one_keeps_it_published_and_asks_to_upload_it_again(self) -> None:
        await self.upload()
        await self.import_now()
        before = await self.manifest()
        rot(self.blobs.path(SHA))
        self.blobs.verify(SHA, len(BODY), thorough=True)
        job = await self.import_now()
        self.assertEqual(await self.manifest(), before)
        reasons = [problem.reason for problem in await self.importer.jobs.problems(job.id)]
        self.assertTrue(any("upload it again (stanchion images upload)" in reason for reason in reasons), reasons)
        self.flushLoggedErrors()

    async def test_what_is_being_uploaded_or_waits_to_be_published_is_not_thrown_away(self) -> None:
        await self.add_source()
        await self.upload()
        await self.upload(b"not whole", "other", whole=False)
        await self.upload(b"not said to be whole yet", "another", whole=False)
        put(self.blobs, b"not said to be whole yet")
        part = self.blobs.open_part(sha256(b"not whole"), 9)
        part.load()
        part.write(b"not")
        part.close()
        await self.publish(image())
        await self.publish(image("jammy"))
        self.assertTrue(self.blobs.is_verified(SHA, len(BODY)))
        self.assertTrue(self.blobs.is_verified(sha256(b"not said to be whole yet"), 24))
        self.assertEqual(self.blobs.part_size(sha256(b"not whole")), 3)

    def test_two_that_begin_the_same_upload_share_it(self) -> Deferred[None]:
        return self.run_async(self._share())

    async def _share(self) -> None:
        first = await self.upload(whole=False)
        self.assertEqual(await self.upload(whole=False), first)
        self.assertNotEqual(await self.upload(b"other content", whole=False), first)
