"""What garbage collection keeps and removes."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from region.images.gc import FETCHING_SECONDS, collect, retained
from region.images.lock import ImportLockLost, try_lock, unlock
from rpc.blobs import BlobStore
from rpc.manifest import Manifest
from tests.region.importing import ImportTestCase, image, inline, loader, put

numbers = st.sets(st.integers(1, 30))
racks = st.dictionaries(st.sampled_from(["rack-a", "rack-b", "rack-c"]), st.integers(1, 30))


class RetainedTests(SynchronousTestCase):
    """:func:`retained`, which decides which generations are kept."""

    def test_the_current_generation_and_the_one_before_it_are_kept(self) -> None:
        self.assertEqual(retained({1, 2, 3, 7, 9}, 9), {7, 9})

    def test_a_generation_that_a_rack_holds_or_is_fetching_is_kept(self) -> None:
        self.assertEqual(retained({1, 2, 3, 4, 5}, 5, {"rack-a": 1}, {"rack-b": 3}), {1, 3, 4, 5})

    def test_nothing_is_given_up_while_nothing_is_current(self) -> None:
        self.assertEqual(retained({1, 2, 3}, None), {1, 2, 3})

    def test_a_generation_newer_than_the_current_one_is_kept(self) -> None:
        self.assertEqual(retained({1, 2, 3}, 2), {1, 2, 3})

    def test_a_rack_that_holds_a_generation_that_is_gone_changes_nothing(self) -> None:
        self.assertEqual(retained({4, 5}, 5, {"rack-a": 1}), {4, 5})

    @settings(deadline=None)
    @given(numbers, st.integers(1, 30), racks, racks)
    def test_whatever_is_needed_is_kept_and_only_what_exists(
        self, there: set[int], current: int, held: dict[str, int], syncing: dict[str, int]
    ) -> None:
        kept = retained(there, current, held, syncing)
        self.assertLessEqual(kept, there)
        self.assertLessEqual(({current} | set(held.values()) | set(syncing.values())) & there, kept)
        before = [number for number in there if number < current]
        if before:
            self.assertIn(max(before), kept)

    @settings(deadline=None)
    @given(numbers, st.integers(1, 30), racks)
    def test_no_more_than_two_generations_are_kept_beyond_those_that_racks_need(
        self, there: set[int], current: int, held: dict[str, int]
    ) -> None:
        older = {number for number in retained(there, current, held) if number <= current}
        self.assertLessEqual(len(older - set(held.values())), 2)


class CollectTests(ImportTestCase):
    """:func:`collect`, on a real database and a real blob store."""

    async def publish_versions(self, count: int) -> list[int]:
        await self.add_source()
        return [(await self.publish(image(version=f"2026010{number}"))).number for number in range(1, count + 1)]

    def blob_of(self, version: str) -> str:
        return image(version=version).files[0].sha256

    async def held_by_rack(self, generation: int, *, revoked: bool = False) -> None:
        await self.database.execute(
            "INSERT INTO rack (system_id, name, certificate_sha256, revoked) VALUES ('rackaa', 'a', 'x', %s)",
            ("2026-01-01T00:00:00Z" if revoked else None,),
        )
        await self.database.execute(
            "INSERT INTO rack_inventory (system_id, generation, state) VALUES ('rackaa', %s, 'ready')", (generation,)
        )

    async def retired(self) -> set[int]:
        return {summary.number for summary in await self.generations.list() if summary.retired is not None}

    async def test_old_generations_are_retired_and_their_files_removed(self) -> None:
        first, *_ = await self.publish_versions(3)
        self.assertEqual(await self.retired(), {first})
        self.assertFalse(self.blobs.path(self.blob_of("20260101")).exists())
        self.assertTrue(self.blobs.path(self.blob_of("20260102")).exists())
        self.assertTrue(self.blobs.path(self.blob_of("20260103")).exists())

    async def test_a_retired_generation_still_says_which_releases_it_listed(self) -> None:
        first, *_ = await self.publish_versions(3)
        self.assertEqual(await self.generations.releases_of(first), {("ubuntu", "noble", "amd64")})
        self.assertIsNone(await self.generations.by_digest(Manifest([image(version="20260101")]).digest))

    async def test_what_a_rack_holds_is_kept_until_the_rack_has_something_else(self) -> None:
        first, second = await self.publish_versions(2)
        await self.held_by_rack(first)
        third = (await self.publish(image(version="20260103"))).number
        fourth = (await self.publish(image(version="20260104"))).number
        self.assertEqual(await self.retired(), {second})
        self.assertTrue(self.blobs.is_verified(self.blob_of("20260101"), image(version="20260101").files[0].size))
        await self.database.execute("UPDATE rack_inventory SET generation = %s", (fourth,))
        await self.import_now()
        self.assertEqual(await self.retired(), {first, second})
        self.assertNotIn(third, await self.retired())
        self.assertFalse(self.blobs.path(self.blob_of("20260101")).exists())

    async def test_what_a_rack_is_fetching_is_kept(self) -> None:
        first, second = await self.publish_versions(2)
        self.syncing["rackaa"] = first
        await self.publish(image(version="20260103"))
        await self.publish(image(version="20260104"))
        self.assertEqual(await self.retired(), {second})
        self.assertTrue(self.blobs.path(self.blob_of("20260101")).exists())

    async def fetched_by_rack(self, what: object, *, ago: float = 0.0) -> None:
        """The rack has told some other region process that it is fetching generation ``what``."""
        await self.held_by_rack(0)
        await self.database.execute(
            """UPDATE rack_inventory SET generation = NULL, state = 'syncing', progress = %s,
                   reported = now() - make_interval(secs => %s)""",
            (json.dumps({"generation": what}), ago),
        )

    async def test_what_a_rack_is_fetching_that_is_linked_with_another_region_process_is_kept(self) -> None:
        first, second = await self.publish_versions(2)
        await self.fetched_by_rack(first)
        await self.publish(image(version="20260103"))
        await self.publish(image(version="20260104"))
        self.assertEqual(await self.retired(), {second})
        self.assertTrue(self.blobs.path(self.blob_of("20260101")).exists())
        await self.database.execute("UPDATE rack_inventory SET state = 'ready', progress = '{}'")
        await self.import_now()
        self.assertEqual(await self.retired(), {first, second})

    async def test_a_rack_that_has_not_been_heard_of_for_hours_is_not_fetching_any_more(self) -> None:
        first, _ = await self.publish_versions(2)
        await self.fetched_by_rack(first, ago=FETCHING_SECONDS + 1)
        await self.publish(image(version="20260103"))
        self.assertEqual(await self.retired(), {first})

    async def test_whatever_a_rack_says_of_its_progress_old_generations_are_retired(self) -> None:
        first, second = await self.publish_versions(2)
        await self.fetched_by_rack(first)
        for number, odd in enumerate((None, "x", -1, 1.5, 10**30, [first], {"a": first}, True), 3):
            await self.database.execute("UPDATE rack_inventory SET progress = %s", (json.dumps({"generation": odd}),))
            await self.publish(image(version=f"202601{number:02}"))
        self.assertLessEqual({first, second}, await self.retired())

    async def test_a_revoked_rack_keeps_nothing(self) -> None:
        first, _ = await self.publish_versions(2)
        await self.held_by_rack(first, revoked=True)
        await self.publish(image(version="20260103"))
        self.assertEqual(await self.retired(), {first})

    async def test_a_file_that_several_generations_share_is_kept_while_one_of_them_is(self) -> None:
        await self.add_source()
        shared = loader()
        self.fetcher.contents[shared.files[0].sha256] = b"grub 20260101.0"
        for version in ("20260101", "20260102", "20260103"):
            await self.publish(shared, image(version=version))
        self.assertTrue(self.blobs.is_verified(shared.files[0].sha256, shared.files[0].size))

    async def test_files_that_the_next_import_wants_are_kept(self) -> None:
        await self.publish_versions(1)
        wanted, unwanted = put(self.blobs, b"half an image"), put(self.blobs, b"nobody's")
        async with self.database.session() as session:
            await try_lock(session)
            collected = await collect(session, self.blobs, inline, dict, [wanted])
        self.assertEqual((collected.files, collected.bytes), (1, len(b"nobody's")))
        self.assertTrue(self.blobs.path(wanted).exists())
        self.assertFalse(self.blobs.path(unwanted).exists())

    async def test_without_the_import_lock_nothing_is_removed(self) -> None:
        await self.publish_versions(2)
        unwanted = put(self.blobs, b"nobody's")
        async with self.database.session() as session:
            with self.assertRaises(ImportLockLost):
                await collect(session, self.blobs, inline, dict)
        async with self.database.session() as session:
            await try_lock(session)
            await unlock(session)
            with self.assertRaises(ImportLockLost):
                await collect(session, self.blobs, inline, dict)
        self.assertTrue(self.blobs.path(unwanted).exists())
        self.assertEqual(await self.retired(), set())

    async def test_files_of_a_running_import_are_not_removed_by_another_process(self) -> None:
        await self.publish_versions(1)
        new = self.fetcher.know(image(version="20260102"))
        self.reader.offer(new)
        held = self.fetcher.hold()
        job_id = await self.importer.request()
        await self.fetcher.waiting
        fetched = put(self.blobs, b"fetched by the running import")
        async with self.database.session() as session:
            self.assertFalse(await try_lock(session))
            with self.assertRaises(ImportLockLost):
                await collect(session, self.blobs, inline, dict)
        self.assertTrue(self.blobs.path(fetched).exists())
        held.callback(None)
        self.assertEqual((await self.end_of(job_id)).state, "done")

    async def test_when_files_cannot_be_removed_the_import_is_done_all_the_same_and_says_so(self) -> None:
        await self.publish_versions(1)

        def refuse(*_: object, **__: object) -> None:
            raise PermissionError(13, "Permission denied")

        self.patch(BlobStore, "sweep", refuse)
        self.reader.offer(self.fetcher.know(image(version="20260102")))
        job = await self.import_now()
        self.assertEqual(job.state, "done")
        self.assertEqual(len(self.flushLoggedErrors(PermissionError)), 1)
        (problem,) = await self.problems_of(job)
        self.assertEqual(problem.severity, "warning")
        self.assertIn("could not be removed: PermissionError", problem.reason)
