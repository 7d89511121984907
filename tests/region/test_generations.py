"""Publishing generations and reading them again, on a real database."""

from __future__ import annotations

from typing import Any

import psycopg2
from attrs import evolve
from twisted.internet.defer import Deferred, gatherResults
from twisted.logger import capturedLogs, formatEvent

from region.database import Database, DatabaseUnavailable, Session
from region.images.lock import ImportLockLost, try_lock, unlock
from region.images.plan import Change
from region.images.store import CHANNEL, Generation, GenerationMoved, GenerationStore, NothingToPublish
from rpc.manifest import EMPTY, InvalidManifest, Manifest
from tests.database import DatabaseTestCase
from tests.region.importing import changes, image, inline, loader


class GenerationTestCase(DatabaseTestCase):
    """A test with a store, and with an import's row to publish for."""

    def setUp(self) -> Deferred[None]:  # type: ignore[override]  # trial waits for what setUp returns
        return super().setUp().addCallback(lambda _: self.run_async(self._begin()))

    async def _begin(self) -> None:
        self.store = GenerationStore(self.database, run_in_thread=inline)
        await self.job()

    async def job(self) -> None:
        row = await self.database.one(
            "INSERT INTO import_job (state, trigger) VALUES ('publishing', 'request') RETURNING id"
        )
        assert row is not None
        self.job_id: int = row[0]

    async def publish(
        self, *images: Any, base: int | None = None, because: list[Change] | None = None, store: Any = None
    ) -> Generation:
        async with self.database.session() as session:
            self.assertTrue(await try_lock(session))
            written = changes(*images) if because is None else because
            generation: Generation = await (store or self.store).publish(
                session, Manifest(images), written, self.job_id, base=base
            )
            return generation

    async def count(self, table: str) -> int:
        row = await self.database.one(f"SELECT count(*) FROM {table}")
        assert row is not None
        return int(row[0])


class PublishTests(GenerationTestCase):
    """What publishing does, and when it refuses."""

    async def test_nothing_is_current_before_the_first_publication(self) -> None:
        self.assertIsNone(await self.store.current())
        self.assertEqual(await self.store.list(), ())
        self.assertEqual(await self.store.listings(), {})

    async def test_what_was_published_is_current_for_everyone(self) -> None:
        published = await self.publish(image(), loader())
        self.assertEqual(published.manifest, Manifest((image(), loader())))
        for store in (self.store, GenerationStore(self.database, run_in_thread=inline)):
            current = await store.current()
            assert current is not None
            self.assertEqual((current.number, current.digest), (published.number, published.manifest.digest))
            self.assertEqual(current.manifest, published.manifest)
            self.assertEqual(current.published, published.published)

    async def test_a_generation_lists_its_images_and_says_why_it_differs(self) -> None:
        first = await self.publish(image(), image("jammy"))
        because = [
            Change("changed", image(version="20260201"), "version 20260201 instead of 20260101"),
            Change("removed", image("jammy"), "no selection asks for it any more"),
        ]
        second = await self.publish(image(version="20260201"), base=first.number, because=because)
        rows = await self.database.query(
            "SELECT release, version, size, title, support_eol FROM generation_image WHERE generation = %s",
            (second.number,),
        )
        new = image(version="20260201")
        self.assertEqual(rows, [("noble", "20260201", new.size, "Noble", "2030-01-01")])
        told = await self.store.changes(second.number)
        expected = [(each.kind, each.image.key, each.image.version, each.reason) for each in because]
        self.assertEqual([(each.kind, each.key, each.version, each.reason) for each in told], expected)

    async def test_texts_of_any_kind_are_listed_as_they_are_and_changes_in_their_order(self) -> None:
        odd = 'Žluťoučký "kůň" \\ \'s \n %s \\u0041 \U0001f40e'
        titled = evolve(image(), attributes={"release_title": odd, "support_eol": odd}, product=odd)
        because = [Change("changed", titled, f"{number} {odd}") for number in (3, 1, 2)]
        published = await self.publish(titled, because=because)
        rows = await self.database.query("SELECT title, support_eol, product FROM generation_image")
        self.assertEqual(rows, [(odd, odd, odd)])
        told = await self.store.changes(published.number)
        self.assertEqual([each.reason for each in told], [each.reason for each in because])

    async def test_the_list_is_newest_first_and_says_which_is_current(self) -> None:
        first = await self.publish(image())
        second = await self.publish(image(), image("jammy"), base=first.number)
        summaries = await self.store.list()
        self.assertEqual(
            [(each.number, each.images, each.size, each.current) for each in summaries],
            [(second.number, 2, image().size + image("jammy").size, True), (first.number, 1, image().size, False)],
        )
        self.assertEqual(len(await self.store.list(limit=1)), 1)

    async def test_the_same_manifest_is_not_published_again(self) -> None:
        first = await self.publish(image())
        await self.job()
        again = await self.publish(image(), base=first.number)
        self.assertEqual((again.number, again.published), (first.number, first.published))
        self.assertEqual(await self.count("generation"), 1)

    async def test_the_import_and_its_generation_are_recorded_together(self) -> None:
        generation = await self.publish(image())
        row = await self.database.one("SELECT generation FROM import_job WHERE id = %s", (self.job_id,))
        self.assertEqual(row, (generation.number,))

    async def test_a_session_without_the_lock_cannot_publish(self) -> None:
        async with self.database.session() as session:
            with self.assertRaises(ImportLockLost):
                await self.store.publish(session, Manifest([image()]), (), self.job_id, base=None)
        self.assertEqual(await self.count("generation"), 0)
        self.assertIsNone(await self.store.current())

    async def test_a_session_cannot_publish_with_the_lock_of_another(self) -> None:
        async with self.database.session() as holder, self.database.session() as session:
            await try_lock(holder)
            with self.assertRaises(ImportLockLost):
                await self.store.publish(session, Manifest([image()]), (), self.job_id, base=None)
            await unlock(holder)
            self.assertTrue(await try_lock(session))
            await self.store.publish(session, Manifest([image()]), (), self.job_id, base=None)
        self.assertEqual(await self.count("generation"), 1)

    async def test_the_same_lock_in_another_database_gives_no_right_here(self) -> None:
        elsewhere = self.make(self.server.dsn_of(self.server.make_database()))
        await elsewhere.start()
        async with elsewhere.session() as holder, self.database.session() as session:
            self.assertTrue(await try_lock(holder))
            with self.assertRaises(ImportLockLost):
                await self.store.publish(session, Manifest([image()]), (), self.job_id, base=None)

    async def test_a_plan_that_another_publication_has_overtaken_is_not_published(self) -> None:
        first = await self.publish(image())
        await self.publish(image(), image("jammy"), base=first.number)
        with self.assertRaises(GenerationMoved):
            await self.publish(image("focal"), base=first.number)
        with self.assertRaises(GenerationMoved):
            await self.publish(image("focal"), base=None)
        current = await self.store.current()
        assert current is not None
        self.assertEqual(current.manifest, Manifest((image(), image("jammy"))))

    async def test_an_empty_first_generation_is_refused(self) -> None:
        with self.assertRaises(NothingToPublish):
            await self.publish()
        self.assertEqual(await self.count("generation"), 0)

    async def test_an_emptied_generation_is_published_with_the_reasons(self) -> None:
        first = await self.publish(image())
        gone = [Change("removed", image(), "its source was removed")]
        second = await self.publish(base=first.number, because=gone)
        self.assertEqual(second.manifest, EMPTY)
        self.assertEqual((await self.store.changes(second.number))[0].reason, "its source was removed")
        self.assertEqual(await self.store.releases_of(second.number), frozenset())

    async def test_a_connection_lost_before_publishing_publishes_nothing(self) -> None:
        async with self.database.session() as session:
            await try_lock(session)
            await self.database.query("SELECT pg_terminate_backend(%s)", (session.pid,))
            with self.assertRaises(DatabaseUnavailable):
                await self.store.publish(session, Manifest([image()]), (), self.job_id, base=None)
        self.assertEqual(await self.count("generation"), 0)
        self.assertIsNone(await self.store.current())

    async def test_a_failure_in_the_middle_leaves_nothing_of_a_generation(self) -> None:
        nameless = Change("added", image(), "")  # the table asks for a reason
        with self.assertRaises(psycopg2.errors.CheckViolation):
            await self.publish(image(), because=[nameless])
        self.assertEqual(await self.count("generation"), 0)
        self.assertEqual(await self.count("generation_image"), 0)
        self.assertIsNone(await self.store.current())


class ReadTests(GenerationTestCase):
    """Reading generations."""

    async def test_a_generation_is_found_by_its_digest(self) -> None:
        first = await self.publish(image())
        second = await self.publish(image("jammy"), base=first.number)
        for generation in (first, second):
            found = await self.store.by_digest(generation.digest)
            assert found is not None
            self.assertEqual((found.number, found.manifest), (generation.number, generation.manifest))
        self.assertIsNone(await self.store.by_digest("0" * 64))

    async def test_of_two_generations_with_one_digest_the_newer_is_found(self) -> None:
        first = await self.publish(image())
        second = await self.publish(image("jammy"), base=first.number)
        third = await self.publish(image(), base=second.number)
        found = await self.store.by_digest(first.digest)
        assert found is not None
        self.assertEqual(found.number, third.number)

    async def test_releases_are_listed_for_every_generation_there_was(self) -> None:
        first = await self.publish(image(), loader())
        self.store.start()
        self.assertEqual(
            await self.store.listings(),
            {first.number: {("ubuntu", "noble", "amd64"), ("grub-efi-signed", "", "amd64")}},
        )
        second = await self.publish(image("jammy"), image("jammy", arch="arm64"), base=first.number)
        listings = await self.store.listings()
        self.assertEqual(listings[second.number], {("ubuntu", "jammy", "amd64"), ("ubuntu", "jammy", "arm64")})
        self.assertEqual(listings[first.number], {("ubuntu", "noble", "amd64"), ("grub-efi-signed", "", "amd64")})
        self.assertEqual(await self.store.releases_of(999), frozenset())

    async def test_a_manifest_damaged_in_the_database_is_refused(self) -> None:
        await self.database.execute(
            "INSERT INTO generation (digest, manifest) VALUES (%s, %s)", ("0" * 64, b'{"format":"?"}')
        )
        await self.database.execute("INSERT INTO current_generation (generation) SELECT number FROM generation")
        with self.assertRaises(InvalidManifest):
            await self.store.current()


class NotificationTests(GenerationTestCase):
    """How other region processes hear of a publication."""

    def other(self) -> tuple[GenerationStore, list[int]]:
        store = GenerationStore(self.database, run_in_thread=inline)
        heard: list[int] = []
        store.subscribe(lambda generation: heard.append(generation.number))
        return store, heard

    async def hears(self, store: GenerationStore, number: int) -> Generation:
        heard: Deferred[Generation] = Deferred()
        store.subscribe(lambda generation: heard.callback(generation) if generation.number == number else None)
        current = store.latest
        return current if current is not None and current.number == number else await heard

    async def test_another_process_takes_up_what_was_published(self) -> None:
        other, heard = self.other()
        other.start()
        first = await self.publish(image())
        await self.hears(other, first.number)
        second = await self.publish(image("jammy"), base=first.number)
        found = await self.hears(other, second.number)
        self.assertEqual(found.manifest, Manifest([image("jammy")]))
        self.assertEqual(heard, [first.number, second.number])
        self.assertIs(await other.current(), found)

    async def test_news_that_come_while_the_database_is_away_are_no_error_and_are_read_when_asked_for(self) -> None:
        # Regression: a region that was stopping logged a traceback, as if it had failed.
        away = self.make(self.dsn)
        store = GenerationStore(away, run_in_thread=inline)
        await away.start()
        store.start()
        await away.stop()
        with capturedLogs() as events:
            store._notified("1")
        [said] = [formatEvent(event) for event in events if "current generation" in formatEvent(event)]
        self.assertIn("is read again when it is asked for", said)
        await self.publish(image())
        await away.start()
        current = await store.current()
        self.assertEqual(current and current.number, 1)

    async def test_subscribers_of_the_publishing_process_hear_of_it_once(self) -> None:
        self.store.start()
        heard: list[int] = []
        self.store.subscribe(lambda generation: heard.append(generation.number))
        first = await self.publish(image())
        second = await self.publish(image("jammy"), base=first.number)
        await self.store.current()
        self.assertEqual(heard, [first.number, second.number])

    async def test_a_subscriber_that_fails_keeps_nobody_else_from_hearing(self) -> None:
        heard: list[int] = []
        self.store.subscribe(lambda generation: 1 // 0)
        self.store.subscribe(lambda generation: heard.append(generation.number))
        generation = await self.publish(image())
        self.assertEqual(heard, [generation.number])
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)

    async def test_the_current_generation_is_answered_from_memory_while_the_database_is_away(self) -> None:
        self.store.start()
        published = await self.publish(image())
        await self.store.current()
        await self.database.stop()
        current = await self.store.current()
        assert current is not None
        self.assertEqual(current.number, published.number)

    async def test_a_store_that_does_not_listen_asks_the_database_each_time(self) -> None:
        other, _ = self.other()
        first = await self.publish(image())
        before = await other.current()
        assert before is not None
        self.assertEqual(before.number, first.number)
        second = await self.publish(image("jammy"), base=first.number)
        after = await other.current()
        assert after is not None
        self.assertEqual(after.number, second.number)

    async def test_those_who_ask_when_it_may_have_changed_are_served_by_one_reading(self) -> None:
        listening = CapturedListening(self.database)
        other = GenerationStore(listening, run_in_thread=inline)  # type: ignore[arg-type]  # all that the store needs
        other.start()
        first = await self.publish(image())
        self.assertEqual(await other.current(), first)
        second = await self.publish(image("jammy"), base=first.number)
        asked, one = [], listening.one

        async def counted(sql: str, *arguments: Any) -> Any:
            asked.append(sql)
            return await one(sql, *arguments)

        self.patch(listening, "one", counted)
        listening.callbacks[CHANNEL]("")
        found = await gatherResults([Deferred.fromCoroutine(other.current()) for _ in range(300)])
        self.assertEqual(found, [second] * 300)
        self.assertEqual(len([sql for sql in asked if "current_generation" in sql]), 1)

    async def test_a_notification_that_was_missed_is_made_up_for(self) -> None:
        other, _ = self.other()
        listening = CapturedListening(self.database)
        other = GenerationStore(listening, run_in_thread=inline)  # type: ignore[arg-type]  # all that the store needs
        other.start()
        first = await self.publish(image())
        self.assertEqual(await other.current(), first)
        second = await self.publish(image("jammy"), base=first.number)
        self.assertEqual(await other.current(), first)
        listening.callbacks[CHANNEL]("")
        found = await self.hears(other, second.number)
        self.assertEqual(found, second)


class CapturedListening:
    """A database whose notifications come when the test says so."""

    def __init__(self, database: Database | Session) -> None:
        self.query, self.one, self.execute = database.query, database.one, database.execute
        self.callbacks: dict[str, Any] = {}

    def listen(self, channel: str, callback: Any) -> None:
        self.callbacks[channel] = callback
