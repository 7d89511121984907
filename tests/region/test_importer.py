"""Imports with a reader and a fetcher that do exactly what the test says, on a real database and a real blob store."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from twisted.internet.defer import Deferred, succeed
from twisted.internet.task import Clock
from twisted.logger import capturedLogs
from twisted.trial.unittest import SynchronousTestCase

from region.database import DatabaseUnavailable, Session
from region.images import steps
from region.images.importer import HERE, LOCK_RETRY_SECONDS, SETTLE_SECONDS, Importer
from region.images.job import ImportJob, JobStore
from region.images.lock import try_lock
from region.images.sources import SourceStore
from region.images.steps import ImportRun, _Saver
from region.images.store import GenerationStore
from region.upstream import Problem, Selection, SourceFailed, SourceRead
from rpc.blobs import BlobStore
from rpc.manifest import Image, Manifest
from tests.region.importing import SOURCE, UPDATED, ImportTestCase, contents_of, image, inline, put
from tests.rpc.test_verifying import rot

OTHER = "http://other.example.com/"


def text_of(events: Sequence[Any]) -> list[str]:
    return [event["log_format"].format(**event) for event in events]


class PublishingTests(ImportTestCase):
    """What an import publishes."""

    async def test_the_first_import_publishes_everything_that_is_selected(self) -> None:
        await self.add_source()
        generation = await self.publish(image(), image("jammy"))
        self.assertEqual(generation.manifest, Manifest((image(), image("jammy"))))
        (job,) = await self.importer.jobs.list()
        self.assertEqual((job.state, job.generation, job.trigger), ("done", generation.number, "request"))
        self.assertEqual(job.outcome, f"published generation {generation.number}: 2 added")
        self.assertEqual((job.files_total, job.bytes_total), (4, sum(generation.manifest.blobs.values())))

    async def test_an_import_that_changes_nothing_publishes_nothing_and_fetches_nothing(self) -> None:
        await self.add_source()
        first = await self.publish(image())
        self.fetcher.fetched.clear()

        def refuse(*_: object, **__: object) -> None:
            raise AssertionError("a blob was read")

        self.patch(type(self.blobs), "examine", refuse)
        job = await self.import_now()
        self.assertEqual((job.state, job.generation), ("done", first.number))
        self.assertEqual(job.outcome, f"nothing changed; generation {first.number} stays current")
        self.assertEqual(self.fetcher.fetched, [])
        self.assertEqual(len(await self.generations.list()), 1)

    async def test_only_what_is_missing_is_fetched(self) -> None:
        await self.add_source()
        await self.publish(image())
        self.fetcher.fetched.clear()
        await self.publish(image(), image("jammy"))
        self.assertEqual(set(self.fetcher.fetched), {file.sha256 for file in image("jammy").files})

    async def test_new_content_under_an_old_version_is_a_change(self) -> None:
        await self.add_source()
        await self.publish(image())
        new = self.fetcher.know(image(content=b"respun"), b"respun")
        self.reader.offer(new)
        job = await self.import_now()
        self.assertEqual(await self.manifest(), Manifest([new]))
        assert job.generation is not None
        (change,) = await self.generations.changes(job.generation)
        self.assertEqual((change.kind, change.version), ("changed", new.version))
        self.assertIn("squashfs", change.reason)

    async def test_a_product_that_upstream_dropped_is_removed_with_the_reason(self) -> None:
        await self.add_source()
        await self.publish(image(), image("jammy"))
        self.reader.offer(image())
        job = await self.import_now()
        self.assertEqual(await self.manifest(), Manifest([image()]))
        assert job.generation is not None
        (change,) = await self.generations.changes(job.generation)
        self.assertEqual((change.kind, change.key.release), ("removed", "jammy"))
        self.assertIn("no longer lists", change.reason)

    async def test_with_no_source_nothing_is_published_and_the_import_says_so(self) -> None:
        job = await self.import_now()
        self.assertEqual(job.state, "done")
        self.assertEqual(job.outcome, "nothing was published: there is no source to import from")
        self.assertIsNone(await self.generations.current())

    async def test_a_source_that_offers_nothing_publishes_nothing(self) -> None:
        await self.add_source()
        self.reader.offer()
        job = await self.import_now()
        self.assertEqual(job.outcome, "nothing was published: no source offers an image that is selected")
        self.assertIsNone(await self.generations.current())

    async def test_removing_the_only_source_removes_its_images_with_the_reason(self) -> None:
        source = await self.add_source()
        await self.publish(image())
        await self.sources.delete(source)
        job = await self.import_now()
        self.assertEqual((await self.manifest()).images, ())
        assert job.generation is not None
        (change,) = await self.generations.changes(job.generation)
        self.assertIn("was removed", change.reason)

    async def test_accepted_documents_are_given_to_the_next_reading(self) -> None:
        await self.add_source()
        await self.publish(image())
        await self.import_now()
        accepted = {"index": UPDATED, "com.example:download": UPDATED}
        self.assertEqual([dates for _, dates in self.reader.read_with], [{}, accepted])


class FailingFileTests(ImportTestCase):
    """Files that cannot be had leave the last good image in place."""

    async def broken(self, reason: str) -> tuple[ImportJob, Image, list[str]]:
        """Publish an image; then import a new version whose root file system cannot be had."""
        await self.add_source()
        await self.publish(image(), image("jammy"))
        new = self.fetcher.know(image(version="20260201"))
        root = next(file for file in new.files if file.name == "squashfs")
        self.fetcher.broken[root.sha256] = reason
        self.reader.offer(new, image("jammy"))
        with capturedLogs() as events:
            job = await self.import_now()
        return job, new, [text for text in text_of(events) if reason in text]

    async def test_the_last_good_version_stays_and_the_problem_names_product_file_and_reason(self) -> None:
        for reason in (
            "the sha256 of its 99 bytes is 00, not ff",
            "the body ended after 5 of 10 bytes",
            "the server answered 404 Not Found",
        ):
            job, new, logged = await self.broken(reason)
            self.assertEqual(await self.manifest(), Manifest((image(), image("jammy"))))
            self.assertEqual(job.state, "done")
            self.assertIn("nothing changed", job.outcome)
            self.assertIn("1 error", job.outcome)
            (problem,) = await self.problems_of(job)
            self.assertEqual((problem.severity, problem.source), ("error", SOURCE))
            self.assertEqual((problem.product, problem.version, problem.file), (new.product, new.version, "squashfs"))
            self.assertIn(reason, problem.reason)
            self.assertIn(f"{SOURCE}/", problem.reason)
            errors = [text for text in logged if f"{new.product} {new.version} squashfs" in text]
            self.assertEqual(len(errors), 1, logged)
            await self.forget_everything()

    async def forget_everything(self) -> None:
        for source in await self.sources.list():
            await self.sources.delete(source.id)
        await self.import_now()
        self.fetcher.broken.clear()

    async def test_the_generation_says_what_it_kept_when_something_else_changed(self) -> None:
        await self.broken("the server answered 404 Not Found")
        self.reader.offers[SOURCE] = self.with_other(self.reader.offers[SOURCE], self.fetcher.know(image("focal")))
        job = await self.import_now()
        assert job.generation is not None
        changes = {change.key.release: change for change in await self.generations.changes(job.generation)}
        self.assertEqual((changes["noble"].kind, changes["focal"].kind), ("kept", "added"))
        self.assertIn("20260201", changes["noble"].reason)
        self.assertIn("squashfs", changes["noble"].reason)
        self.assertIn("1 added, 1 kept; 1 error", job.outcome)

    def with_other(self, offer: Any, other: Image) -> Any:
        self.reader.offer(other)
        more = self.reader.offers[SOURCE]

        def both(source: Any) -> SourceRead:
            first, second = offer(source), more(source)
            return SourceRead(source, (*first.images, *second.images), documents=first.documents)

        return both

    async def test_a_new_image_that_is_not_complete_is_not_published(self) -> None:
        await self.add_source()
        await self.publish(image())
        new = self.fetcher.know(image("jammy"))
        self.fetcher.broken[new.files[0].sha256] = "the sha256 is wrong"
        self.reader.offer(image(), new)
        await self.import_now()
        self.assertEqual(await self.manifest(), Manifest([image()]))

    async def test_a_first_import_of_which_nothing_is_complete_fails_and_says_why(self) -> None:
        await self.add_source()
        self.reader.offer(image())
        job = await self.import_now()
        self.assertEqual(job.state, "failed")
        self.assertIn("there is no complete image to publish; 2 errors", job.outcome)
        self.assertIn("404 Not Found", job.outcome)
        self.assertIsNone(await self.generations.current())

    async def test_a_file_that_failed_is_tried_again_by_the_next_import(self) -> None:
        _, new, _ = await self.broken("the server answered 404 Not Found")
        self.fetcher.broken.clear()
        self.fetcher.fetched.clear()
        await self.import_now()
        self.assertEqual(self.fetcher.fetched, [file.sha256 for file in new.files if file.name == "squashfs"])
        self.assertEqual(await self.manifest(), Manifest((new, image("jammy"))))

    async def test_a_published_file_that_was_damaged_on_the_disk_is_fetched_again(self) -> None:
        await self.add_source()
        generation = await self.publish(image())
        damaged = image().files[0]
        self.blobs.path(damaged.sha256).write_bytes(b"x" * damaged.size)
        self.fetcher.fetched.clear()
        job = await self.import_now()
        self.assertEqual(self.fetcher.fetched, [damaged.sha256])
        self.assertEqual(job.generation, generation.number)
        self.assertTrue(self.blobs.is_verified(damaged.sha256, damaged.size))

    async def test_an_image_whose_file_is_damaged_here_stays_published_with_the_reason(
        self,
    ) -> None:
        await self.add_source()
        await self.publish(image(), image("jammy"))
        damaged = image().files[0]
        rot(self.blobs.path(damaged.sha256))
        self.blobs.verify(damaged.sha256, damaged.size, thorough=True)
        self.reader.fail("no route to host")
        await self.add_source(OTHER)
        self.reader.offer(self.fetcher.know(image("focal")), url=OTHER)
        job = await self.import_now()
        self.assertEqual(await self.manifest(), Manifest((image(), image("jammy"), image("focal"))))
        assert job.generation is not None
        reasons = {c.key.release: c.reason for c in await self.generations.changes(job.generation) if c.kind == "kept"}
        self.assertIn("the region's own copy is missing or damaged (boot-kernel)", reasons["noble"])
        self.assertIn("no route to host", reasons["noble"])
        self.assertNotIn("damaged", reasons["jammy"])
        problems = [each.reason for each in await self.importer.jobs.problems(job.id) if each.file == "boot-kernel"]
        self.assertIn("racks that do not hold it yet cannot fetch it", problems[0])
        self.reader.offer(image(), image("jammy"))
        await self.import_now()
        self.assertTrue(self.blobs.is_verified(damaged.sha256, damaged.size))
        self.assertEqual(self.blobs.damaged, {})
        self.flushLoggedErrors()

    async def test_a_file_that_vanishes_while_importing_is_not_published(self) -> None:
        await self.add_source()
        new = self.fetcher.know(image("jammy"))
        self.reader.offer(self.fetcher.know(image()), new)
        fetch = self.fetcher.fetch

        async def fetch_and_lose(*arguments: Any) -> Any:
            ends = await fetch(*arguments)
            self.blobs.path(new.files[0].sha256).unlink()
            return ends

        self.patch(self.fetcher, "fetch", fetch_and_lose)
        job = await self.import_now()
        self.assertEqual(await self.manifest(), Manifest([image()]))
        (problem,) = await self.problems_of(job)
        self.assertIn("removed or changed on the region's disk", problem.reason)

    async def test_an_import_for_which_the_disk_has_no_room_fails_before_it_fetches(self) -> None:
        await self.add_source()
        generation = await self.publish(image())
        self.reader.offer(image(), self.fetcher.know(image("jammy")))
        self.fetcher.fetched.clear()
        self.free = 1 << 20
        job = await self.import_now()
        self.assertEqual(job.state, "failed")
        self.assertIn("2 files of ", job.outcome)
        self.assertIn("1.0 MiB free", job.outcome)
        self.assertIn("make room", job.outcome)
        self.assertEqual(self.fetcher.fetched, [])
        self.assertEqual((await self.manifest()).digest, generation.digest)

    async def test_a_disk_that_fills_up_during_an_import_gets_back_what_no_whole_image_needs(self) -> None:
        await self.add_source()
        await self.publish(image())
        whole, broken = self.fetcher.know(image("jammy")), self.fetcher.know(image("focal"))
        self.reader.offer(image(), whole, broken)
        root = next(file for file in broken.files if file.name == "squashfs")
        self.fetcher.broken[root.sha256] = "No space left on device"
        fetch = self.fetcher.fetch

        async def fetch_and_fill(*arguments: Any) -> Any:
            self.blobs.part_path(root.sha256).write_bytes(bytes(root.size))  # there was no room for its new name
            self.free = 1 << 20
            return await fetch(*arguments)

        self.patch(self.fetcher, "fetch", fetch_and_fill)
        job = await self.import_now()
        self.assertEqual((job.state, await self.manifest()), ("done", Manifest([image(), whole])))
        self.assertIn("No space left", (await self.problems_of(job))[0].reason)
        self.assertEqual(set(self.blobs.sizes()), set(Manifest([image(), whole]).blobs))
        self.assertEqual(os.listdir(self.blobs.partial), [])
        self.blobs.part_path(root.sha256).write_bytes(b"root")  # left by an import that was killed
        job = await self.import_now()
        self.assertIn("make room", job.outcome)
        self.assertEqual(os.listdir(self.blobs.partial), [])

    async def test_what_nobody_needs_any_more_makes_room_for_an_import(self) -> None:
        await self.add_source()
        await self.publish(image())
        new = self.fetcher.know(image("jammy"))
        self.reader.offer(image(), new)
        # Left by imports that ended early, of a version that upstream has replaced since: a file, and a part of one.
        left = self.blobs.path(put(self.blobs, b"the kernel of a version that is gone"))
        started, resumed = (self.blobs.part_path(name) for name in ("a" * 64, new.files[0].sha256))
        for path in (started, resumed):
            path.write_bytes(b"kern")
        importer = self.make_importer(free_bytes=lambda _: 1 << 20 if left.exists() or started.exists() else 1 << 40)
        self.addCleanup(lambda: self.run_async(importer.stop()))
        parts: list[bool] = []
        fetch = self.fetcher.fetch

        async def look_and_fetch(*arguments: Any) -> Any:
            parts.append(resumed.exists())
            return await fetch(*arguments)

        self.patch(self.fetcher, "fetch", look_and_fetch)
        job = await self.import_now(importer)
        self.assertEqual(job.state, "done", job.outcome)
        self.assertEqual(parts, [True])  # what was fetched of a file that is wanted is not thrown away
        self.assertEqual(await self.manifest(), Manifest([image(), new]))

    async def test_a_full_disk_is_no_reason_to_fail_when_nothing_has_to_be_fetched(self) -> None:
        await self.add_source()
        await self.publish(image())
        self.free = 0
        self.assertEqual((await self.import_now()).state, "done")


class TooManyImagesTests(ImportTestCase):
    async def test_a_list_that_racks_could_not_tell_is_not_published(self) -> None:
        await self.add_source()
        await self.publish(image())
        self.reader.offer(image(), self.fetcher.know(image("jammy")))
        self.patch(steps, "MAX_MANIFEST", len(Manifest([image()]).canonical))
        job = await self.import_now()
        self.assertEqual(job.state, "failed")
        self.assertIn("the list of its 2 images has", job.outcome)
        self.assertIn("select fewer images", job.outcome)
        self.assertEqual(await self.manifest(), Manifest([image()]))


class FailingSourceTests(ImportTestCase):
    """Sources that cannot be read keep what they gave before."""

    async def test_a_failed_source_keeps_its_images_and_the_others_go_on(self) -> None:
        await self.add_source()
        await self.add_source(OTHER)
        self.reader.offer(url=OTHER)
        await self.publish(image())
        self.reader.fail("the connection was refused")
        theirs = self.fetcher.know(image("jammy", source=OTHER))
        self.reader.offer(theirs, url=OTHER)
        with capturedLogs() as events:
            job = await self.import_now()
        self.assertEqual(await self.manifest(), Manifest((image(), theirs)))
        self.assertEqual(job.state, "done")
        (problem,) = await self.problems_of(job)
        self.assertEqual((problem.severity, problem.source), ("error", SOURCE))
        self.assertEqual(problem.reason, "the connection was refused")
        self.assertEqual(len([text for text in text_of(events) if "the connection was refused (source" in text]), 1)
        assert job.generation is not None
        kept = [each for each in await self.generations.changes(job.generation) if each.kind == "kept"]
        self.assertIn("the connection was refused", kept[0].reason)

    async def test_many_images_that_are_kept_for_one_reason_are_one_line_in_the_log(self) -> None:
        await self.add_source()
        await self.publish(*(image(f"release-{number}") for number in range(40)))
        self.reader.fail("the connection was refused")
        with capturedLogs() as events:
            await self.import_now()
        [line] = [text for text in text_of(events) if ": kept " in text]
        self.assertIn("release-0 ", line)
        self.assertIn(" and 37 more: ", line)

    async def test_an_import_that_could_read_no_source_fails_and_nothing_changes(self) -> None:
        await self.add_source()
        generation = await self.publish(image())
        self.reader.fail("the signature is not by a key of its keyring")
        job = await self.import_now()
        self.assertEqual(job.state, "failed")
        self.assertIn("no source could be read", job.outcome)
        self.assertIn("the signature is not by a key of its keyring", job.outcome)
        self.assertEqual((await self.manifest()).digest, generation.digest)

    async def test_a_reader_that_raises_fails_only_its_source(self) -> None:
        await self.add_source()
        await self.add_source(OTHER)

        def broken(source: Any) -> SourceFailed:
            raise ZeroDivisionError("unforeseen")

        self.reader.offers[OTHER] = broken
        generation = await self.publish(image())
        self.assertEqual(generation.manifest, Manifest([image()]))
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        (job,) = await self.importer.jobs.list()
        (problem,) = await self.problems_of(job)
        self.assertEqual(problem.source, OTHER)
        self.assertIn("ZeroDivisionError: unforeseen", problem.reason)

    async def test_a_source_whose_keyring_is_gone_keeps_its_images(self) -> None:
        keyring = self.mktemp()
        with open(keyring, "wb") as file:
            file.write(b"\x99keys")
        source = await self.add_source(keyring_data=b"", keyring_filename=os.path.abspath(keyring))
        await self.publish(image())
        os.unlink(keyring)
        job = await self.import_now()
        self.assertEqual(await self.manifest(), Manifest([image()]))
        (problem,) = await self.problems_of(job)
        self.assertIn("cannot be read", problem.reason)
        self.assertEqual(len(self.reader.read_with), 1)
        self.assertEqual((await self.sources.get(source)).url, SOURCE)

    async def test_warnings_are_kept_and_do_not_count_as_errors(self) -> None:
        await self.add_source()
        warning = Problem("warning", SOURCE, "com.example:noble:amd64", "20260101", "odd", "its ftype is unknown")
        self.reader.offer(self.fetcher.know(image()), problems=[warning])
        job = await self.import_now()
        self.assertEqual(await self.problems_of(job), (warning,))
        self.assertNotIn("error", job.outcome)

    async def test_a_fault_of_our_own_fails_the_import_and_is_logged_once(self) -> None:
        await self.add_source()
        self.reader.offer(image())

        async def broken(*_: object) -> None:
            raise ZeroDivisionError("unforeseen")

        self.patch(self.fetcher, "fetch", broken)
        job = await self.import_now()
        self.assertEqual(job.state, "failed")
        self.assertIn("ZeroDivisionError: unforeseen", job.outcome)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        self.assertEqual((await self.import_now()).state, "failed")
        self.flushLoggedErrors(ZeroDivisionError)


class EditingTests(ImportTestCase):
    """Sources and selections that are edited, also while an import runs."""

    async def edited(self) -> None:
        """Return when the importer has heard of an edit and has run what follows it."""
        heard: Deferred[None] = Deferred()
        want = self.importer._want

        def wanting(trigger: str) -> None:
            want(trigger)
            heard.callback(None)

        self.patch(self.importer, "_want", wanting)
        while self.importer._settling is None or not self.importer._settling.active():
            await self.database.query("SELECT 1")
        self.clock.advance(SETTLE_SECONDS)
        await heard

    async def test_a_selection_edited_while_an_import_runs_is_followed_by_another_import(self) -> None:
        self.importer = self.make_importer(follow_edits=False)
        source = await self.add_source(selections=[Selection("ubuntu", "noble")])
        self.reader.offer(self.fetcher.know(image()), self.fetcher.know(image("jammy")))
        held = self.fetcher.hold()
        self.importer.start()
        first = await self.importer.request()
        await self.fetcher.waiting
        await self.sources.add_selection(source, Selection("ubuntu", "jammy"))
        await self.edited()
        held.callback(None)
        await self.importer.when_idle()
        second, ended = await self.importer.jobs.list()
        self.assertEqual([(job.id, job.trigger, job.state) for job in (ended, second)],
                         [(first, "request", "done"), (second.id, "selection", "done")])  # fmt: skip
        self.assertEqual(await self.manifest(), Manifest((image(), image("jammy"))))

    async def test_an_edit_is_followed_by_an_import(self) -> None:
        self.importer.start()
        listening: Deferred[None] = Deferred()
        self.database.listen("after_all_others", lambda payload: listening.callback(None))
        await listening  # what is edited before that is imported at the start, if anything is
        self.reader.offer(self.fetcher.know(image()))
        await self.add_source()
        await self.edited()
        await self.jobs_done(1)
        self.assertEqual(await self.manifest(), Manifest([image()]))

    async def test_an_edit_is_not_followed_when_that_is_not_wanted_and_no_import_runs(self) -> None:
        self.importer = self.make_importer(follow_edits=False)
        await self.add_source()
        await self.publish(image())
        self.clock.advance(SETTLE_SECONDS)  # it may have heard of the new source while it ran
        self.importer._edited("1")
        settling = self.importer._settling
        self.assertFalse(settling is not None and settling.active())

    async def test_a_series_of_edits_is_followed_once_it_has_ended(self) -> None:
        await self.add_source()
        await self.publish(image())
        self.clock.advance(SETTLE_SECONDS)
        await self.importer.when_idle()
        noted = NotedReading(self.sources)
        self.patch(self.importer, "_sources", noted)
        for _ in range(3):
            self.importer._edited("1")
            self.clock.advance(0.6 * SETTLE_SECONDS)
        settling = self.importer._settling
        assert settling is not None
        self.assertTrue(settling.active())
        self.clock.advance(0.5 * SETTLE_SECONDS)
        self.assertFalse(settling.active())
        await noted.read_once
        await self.importer.when_idle()

    async def jobs_done(self, count: int) -> None:
        while True:
            await self.importer.when_idle()
            jobs = await self.importer.jobs.list()
            if len([job for job in jobs if job.ended]) >= count:
                return

    async def test_a_notification_that_brings_nothing_new_is_not_followed_by_an_import(self) -> None:
        await self.add_source()
        await self.publish(image())
        before = len(await self.importer.jobs.list())
        noted = NotedReading(self.sources)
        self.patch(self.importer, "_sources", noted)
        self.importer._edited("")
        self.clock.advance(SETTLE_SECONDS)
        await noted.read_once
        await self.importer.when_idle()
        self.assertEqual(len(await self.importer.jobs.list()), before)


class NotedReading:
    """Sources whose reading is noted."""

    def __init__(self, sources: SourceStore) -> None:
        self._sources = sources
        self.read_once: Deferred[None] = Deferred()

    async def read(self) -> Any:
        found = await self._sources.read()
        self.read_once.callback(None)
        return found


class StoppingTests(ImportTestCase):
    """Imports that are cancelled, lost, overtaken, or left by a process that died."""

    async def held_import(self) -> tuple[int, Deferred[None]]:
        """An import that is in the middle of fetching a new version of a published image."""
        await self.add_source()
        await self.publish(image())
        self.reader.offer(self.fetcher.know(image(version="20260201")))
        held = self.fetcher.hold()
        job_id = await self.importer.request()
        await self.fetcher.waiting
        return job_id, held

    async def test_a_cancelled_import_stops_fetching_and_publishes_nothing(self) -> None:
        job_id, _ = await self.held_import()
        self.assertTrue(self.importer.is_running)
        self.assertTrue(await self.importer.is_importing())
        self.assertEqual(await self.importer.cancel(), (job_id,))
        self.assertTrue(self.fetcher.cancelled)
        job = await self.end_of(job_id)
        self.assertEqual((job.state, job.outcome, job.fetching), ("cancelled", "cancelled on request", ""))
        self.assertEqual(await self.manifest(), Manifest([image()]))
        self.assertFalse(self.importer.is_running)
        self.assertFalse(await self.importer.is_importing())
        self.assertEqual((await self.import_now()).state, "done")
        self.assertEqual(await self.manifest(), Manifest([image(version="20260201")]))

    async def test_an_import_is_cancelled_while_it_reads(self) -> None:
        await self.add_source()
        reading: Deferred[None] = Deferred()
        stuck: Deferred[SourceRead] = Deferred()

        def stall(source: object) -> Deferred[SourceRead]:
            reading.callback(None)
            return stuck

        self.reader.offers[SOURCE] = stall
        self.importer.start()
        job_id = await self.importer.request()
        await reading
        self.assertEqual(await self.importer.cancel("enough"), (job_id,))
        self.assertEqual((await self.end_of(job_id)).state, "cancelled")

    async def test_an_import_that_waits_for_its_turn_is_cancelled(self) -> None:
        job_id, held = await self.held_import()
        waiting = await self.importer.request()
        self.assertNotEqual(waiting, job_id)
        self.assertEqual(await self.importer.jobs.cancel_queued("never mind"), (waiting,))
        held.callback(None)
        self.assertEqual((await self.end_of(job_id)).state, "done")
        self.assertEqual((await self.end_of(waiting)).state, "cancelled")

    async def test_requests_while_an_import_runs_are_answered_by_one_more_import(self) -> None:
        job_id, held = await self.held_import()
        first, second = await self.importer.request(), await self.importer.request("timer")
        self.assertEqual(first, second)
        held.callback(None)
        self.assertEqual((await self.end_of(job_id)).state, "done")
        self.assertEqual((await self.end_of(first)).state, "done")

    async def test_an_import_that_is_publishing_cannot_be_cancelled(self) -> None:
        await self.add_source()
        self.reader.offer(self.fetcher.know(image()))
        publish = GenerationStore.publish
        cancelled: list[tuple[int, ...]] = []

        async def cancel_and_publish(store: GenerationStore, *arguments: Any, **options: Any) -> Any:
            cancelled.append(await self.importer.cancel())
            return await publish(store, *arguments, **options)

        self.patch(GenerationStore, "publish", cancel_and_publish)
        job = await self.import_now()
        self.assertEqual((cancelled, job.state), ([()], "done"))
        self.assertEqual(await self.manifest(), Manifest([image()]))

    async def test_an_import_is_cancelled_from_another_region_process(self) -> None:
        job_id, _ = await self.held_import()
        other = self.make_importer(GenerationStore(self.database, run_in_thread=inline))
        self.assertEqual(await other.cancel(), (job_id,))
        self.assertEqual((await self.end_of(job_id)).state, "cancelled")

    async def test_stopping_the_region_cancels_what_runs_and_keeps_what_was_fetched(self) -> None:
        job_id, _ = await self.held_import()
        await self.importer.stop()
        job = await self.importer.jobs.get(job_id)
        assert job is not None
        self.assertEqual(job.state, "cancelled")
        self.assertIn("the region was stopped", job.outcome)

    async def test_stopping_the_region_leaves_what_is_queued_to_others(self) -> None:
        await self.held_import()
        waiting = await self.importer.request()
        await self.importer.stop()
        job = await self.importer.jobs.get(waiting)
        assert job is not None
        self.assertEqual(job.state, "queued")

    async def test_stopping_the_region_does_not_wait_for_a_database_that_does_not_answer(self) -> None:
        async def never(store: JobStore) -> None:
            await Deferred()

        self.patch(JobStore, "unfinished", never)
        self.importer.start()
        self.assertTrue(self.importer.is_busy)
        self.successResultOf(Deferred.fromCoroutine(self.importer.stop()))
        self.assertFalse(self.importer.is_busy)

    async def test_what_another_process_does_not_get_to_is_imported_when_that_has_ended(self) -> None:
        await self.add_source()
        self.reader.offer(self.fetcher.know(image()))
        queued = await self.importer.jobs.enqueue("request")
        async with self.database.session() as session:
            self.assertTrue(await try_lock(session))
            self.importer.start()
            await self.importer.when_idle()
        self.clock.advance(LOCK_RETRY_SECONDS)
        self.assertEqual((await self.end_of(queued)).state, "done")

    def elsewhere(self, **options: Any) -> Importer:
        """The importer of another region process."""
        other = self.make_importer(GenerationStore(self.database, run_in_thread=inline), **options)
        self.addCleanup(lambda: self.run_async(other.stop()))
        return other

    async def test_a_process_that_does_not_import_leaves_what_it_is_asked_for_to_one_that_does(self) -> None:
        await self.add_source()
        self.reader.offer(self.fetcher.know(image()))
        other = self.elsewhere(here=False, at_start=True, interval=60)
        other.start()
        queued = await other.request()
        for _ in range(3):
            self.clock.advance(60)
            await other.when_idle()
        job = await self.importer.jobs.get(queued)
        assert job is not None
        self.assertEqual((job.state, await self.importer.jobs.list()), ("queued", (job,)))
        self.importer.start()
        self.assertEqual((await self.end_of(queued)).state, "done")

    async def test_a_process_that_imports_hears_at_once_of_what_another_was_asked_for(self) -> None:
        await self.add_source()
        self.reader.offer(self.fetcher.know(image()))
        self.importer.start()
        await self.importer.when_idle()
        other = self.elsewhere(here=False)
        other.start()
        queued = await other.request()
        while (job := await self.importer.jobs.get(queued)) is None or job.ended is None:
            pass  # no clock moves: it was told, or this never ends
        self.assertEqual(job.state, "done")

    async def test_that_an_import_ended_is_said_also_by_a_process_that_imports_nothing(self) -> None:
        await self.add_source()
        other = self.elsewhere(here=False)
        other.start()
        async with self.database.session() as session:  # of a process that dies
            self.assertTrue(await try_lock(session))
            queued = await self.importer.jobs.enqueue("request", HERE)
            self.assertIsNotNone(await self.importer.jobs.claim(session))
            while not self.clock.getDelayedCalls():  # it was told, and waits for the lock; or this never ends
                await self.database.query("SELECT")
        self.clock.advance(LOCK_RETRY_SECONDS)
        await other.when_idle()
        job = await self.importer.jobs.get(queued)
        assert job is not None
        self.assertEqual((job.state, job.outcome), ("failed", "the region stopped while it ran"))

    async def test_another_process_that_takes_over_fetches_what_is_published_for_its_own_disk(self) -> None:
        await self.add_source()
        await self.publish(image())
        await self.importer.stop()
        self.blobs = self.fetcher.blobs = BlobStore(Path(self.mktemp()))
        self.addCleanup(self.blobs.close)
        other = self.elsewhere()
        await self.import_now(other)
        for sha256, size in (await self.manifest()).blobs.items():
            self.assertTrue(self.blobs.is_verified(sha256, size))

    async def test_two_importers_never_import_at_once(self) -> None:
        job_id, held = await self.held_import()
        other = self.make_importer(GenerationStore(self.database, run_in_thread=inline))
        self.addCleanup(lambda: self.run_async(other.stop()))
        other.start()
        second = await other.request()
        await other.when_idle()
        self.assertFalse(other.is_running)
        waiting = await self.importer.jobs.get(second)
        assert waiting is not None
        self.assertEqual(waiting.state, "queued")
        held.callback(None)
        self.assertEqual((await self.end_of(job_id)).state, "done")
        self.clock.advance(LOCK_RETRY_SECONDS)
        await other.when_idle()
        self.assertEqual((await self.end_of(second)).state, "done")
        self.assertEqual(await self.manifest(), Manifest([image(version="20260201")]))

    async def test_a_lock_lost_between_fetching_and_publishing_publishes_nothing(self) -> None:
        sessions: list[int] = []
        run = ImportRun.__init__

        def noting(self_: ImportRun, parts: Any, session: Session, job: ImportJob) -> None:
            sessions.append(session.pid)
            run(self_, parts, session, job)

        self.patch(ImportRun, "__init__", noting)
        job_id, held = await self.held_import()
        await self.database.query("SELECT pg_terminate_backend(%s)", (sessions[-1],))
        held.callback(None)
        await self.importer.when_idle()
        self.assertEqual(await self.manifest(), Manifest([image()]))
        left = await self.importer.jobs.get(job_id)
        assert left is not None
        self.assertTrue(left.is_running)
        self.clock.advance(1)
        job = await self.end_of(job_id)
        self.assertEqual(job.state, "failed")
        self.assertIn("the connection that held the import's lock was lost", job.outcome)
        self.assertEqual((await self.import_now()).state, "done")
        self.assertEqual(await self.manifest(), Manifest([image(version="20260201")]))

    async def test_a_database_without_room_ends_the_import_with_that_reason_and_without_a_traceback(self) -> None:
        await self.add_source()
        await self.publish(image())
        save = JobStore.save

        async def full(store: JobStore, connection: Any, job: ImportJob) -> None:
            if job.state == "publishing":
                await connection.execute("DO $$ BEGIN RAISE 'no space left' USING ERRCODE = 'disk_full'; END $$")
            await save(store, connection, job)

        self.reader.offer(self.fetcher.know(image(version="20260201")))
        patched = self.patch(JobStore, "save", full)
        self.importer.start()
        job_id = await self.importer.request()
        await self.importer.when_idle()
        patched.restore()
        self.clock.advance(1)
        job = await self.end_of(job_id)
        self.assertEqual(job.state, "failed")
        self.assertIn("no space left", job.outcome)
        self.assertNotIn("lost", job.outcome)
        self.assertEqual(await self.manifest(), Manifest([image()]))
        self.assertEqual((await self.import_now()).state, "done")

    async def test_losing_the_lock_while_fetching_stops_the_fetch(self) -> None:
        sessions: list[int] = []
        run = ImportRun.__init__

        def noting(self_: ImportRun, parts: Any, session: Session, job: ImportJob) -> None:
            sessions.append(session.pid)
            run(self_, parts, session, job)

        self.patch(ImportRun, "__init__", noting)
        await self.held_import()
        await self.database.query("SELECT pg_terminate_backend(%s)", (sessions[-1],))
        self.clock.advance(1)
        await self.importer.when_idle()
        self.assertTrue(self.fetcher.cancelled)

    async def test_an_import_overtaken_by_another_publication_publishes_nothing(self) -> None:
        job_id, held = await self.held_import()
        await self.database.execute("INSERT INTO generation (digest, manifest) VALUES (%s, %s)", ("0" * 64, b"{}"))
        await self.database.execute("UPDATE current_generation SET generation = generation + 1")
        held.callback(None)
        job = await self.end_of(job_id)
        self.assertEqual(job.state, "failed")
        self.assertIn("not 1 that this import started from", job.outcome)

    async def test_what_a_killed_region_left_is_ended_at_the_next_start(self) -> None:
        left = await self.importer.jobs.enqueue("timer")
        async with self.database.session() as session:
            await self.importer.jobs.claim(session)
        self.importer.start()
        await self.importer.when_idle()
        job = await self.importer.jobs.get(left)
        assert job is not None
        self.assertEqual((job.state, job.outcome), ("failed", "the region stopped while it ran"))

    async def test_an_import_that_another_process_runs_is_not_taken_for_left_behind(self) -> None:
        running = await self.importer.jobs.enqueue("timer")
        async with self.database.session() as session:
            self.assertTrue(await try_lock(session))
            await self.importer.jobs.claim(session)
            self.importer.start()
            await self.importer.when_idle()
            job = await self.importer.jobs.get(running)
            assert job is not None
            self.assertEqual(job.state, "reading")

    async def test_an_import_queued_before_a_crash_runs_at_the_next_start(self) -> None:
        await self.add_source()
        self.reader.offer(self.fetcher.know(image()))
        queued = await self.importer.jobs.enqueue("request")
        self.importer.start()
        self.assertEqual((await self.end_of(queued)).state, "done")


class SavingTests(SynchronousTestCase):
    """How far an import is, is written on the session that holds its lock."""

    def test_a_session_that_is_lost_while_the_last_of_it_is_written_is_told_and_no_error_of_ours(self) -> None:
        writing: Deferred[None] = Deferred()

        async def save(session: object, job: object) -> None:
            await writing

        parts: Any = SimpleNamespace(clock=Clock(), jobs=SimpleNamespace(save=save))
        life: Any = SimpleNamespace(job=SimpleNamespace(ended=None))
        session: Any = SimpleNamespace(alive=True)
        told: list[Exception] = []
        saver = _Saver(parts, session, life, told.append)
        saver.start()
        stopping = Deferred.fromCoroutine(saver.stop())
        self.assertNoResult(stopping)
        lost = DatabaseUnavailable("lost the connection")
        writing.errback(lost)
        self.successResultOf(stopping)
        self.assertEqual(told, [lost])


class TimingTests(ImportTestCase):
    """When imports are run, and how progress is written."""

    async def triggers(self, count: int) -> list[str]:
        while True:
            await self.importer.when_idle()
            jobs = [job for job in await self.importer.jobs.list() if job.ended]
            if len(jobs) >= count:
                return [job.trigger for job in reversed(jobs)]

    async def test_images_are_imported_at_the_start_and_then_at_intervals(self) -> None:
        self.importer = self.make_importer(interval=3600, at_start=True)
        self.importer.start()
        self.assertEqual(await self.triggers(1), ["start"])
        self.clock.advance(3599)
        await self.importer.when_idle()
        self.assertEqual(await self.triggers(1), ["start"])
        self.clock.advance(1)
        self.assertEqual(await self.triggers(2), ["start", "timer"])
        self.clock.advance(3600)
        self.assertEqual(await self.triggers(3), ["start", "timer", "timer"])

    async def test_imports_go_on_when_the_database_is_back(self) -> None:
        self.importer = self.make_importer(interval=3600, at_start=False)
        enqueue = type(self.importer.jobs).enqueue
        away = [True]

        async def sometimes(store: Any, *what: str) -> int:
            if away[0]:
                raise DatabaseUnavailable("the server is away")
            return await enqueue(store, *what)

        self.patch(type(self.importer.jobs), "enqueue", sometimes)
        self.importer.start()
        self.clock.advance(3600)
        await self.importer.when_idle()
        away[0] = False
        self.clock.advance(60)
        self.assertEqual(await self.triggers(1), ["timer"])

    async def test_progress_is_written_at_most_once_a_second(self) -> None:
        await self.add_source()
        self.reader.offer(self.fetcher.know(image()))
        held = self.fetcher.hold()
        self.importer.start()
        job_id = await self.importer.request()
        await self.fetcher.waiting
        saved: list[ImportJob] = []
        save = type(self.importer.jobs).save

        def saving(store: Any, connection: Any, job: ImportJob) -> Any:
            saved.append(job)
            return save(store, connection, job)

        self.patch(type(self.importer.jobs), "save", saving)
        self.clock.advance(0.5)
        self.assertEqual(saved, [])
        self.clock.advance(0.5)
        (job,) = saved
        self.assertEqual((job.state, job.files_total), ("fetching", 2))
        self.assertIn("ubuntu/noble amd64/generic/generic (stable) 20260101 boot-kernel", job.fetching)
        held.callback(None)
        self.assertEqual((await self.end_of(job_id)).state, "done")

    async def test_two_sources_are_read_at_once(self) -> None:
        await self.add_source()
        await self.add_source(OTHER)
        begun: list[str] = []
        both: Deferred[None] = Deferred()

        def wait_for_the_other(source: Any) -> Deferred[SourceRead]:
            begun.append(source.url)
            if len(begun) == 2:
                both.callback(None)
            ready: Deferred[None] = succeed(None) if both.called else self.after(both)
            return ready.addCallback(lambda _: SourceRead(source, ()))

        self.reader.offers = {SOURCE: wait_for_the_other, OTHER: wait_for_the_other}
        self.assertEqual((await self.import_now()).state, "done")
        self.assertEqual(set(begun), {SOURCE, OTHER})

    def after(self, deferred: Deferred[None]) -> Deferred[None]:
        following: Deferred[None] = Deferred()
        deferred.addCallback(following.callback)
        return following


class ContentTests(ImportTestCase):
    """What the fakes promise, so that the tests above mean something."""

    async def test_the_fake_fetcher_stores_what_the_image_lists(self) -> None:
        await self.add_source()
        await self.publish(image(content=b""))
        for file, content in zip(image().files, contents_of(b"ubuntu/noble/amd64/20260101", b"").values(), strict=True):
            self.assertEqual(self.blobs.path(file.sha256).read_bytes(), content)
