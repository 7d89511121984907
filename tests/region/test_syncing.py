"""Who tells racks to fetch, and how often."""

from __future__ import annotations

from typing import Any

from attrs import frozen
from twisted.internet.defer import Deferred
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from region.database import DatabaseUnavailable
from region.syncing import SyncDriver, describe
from rpc.outcomes import Answered, Failed, NotConnected, Outcome, TimedOut


@frozen
class Generation:
    number: int
    digest: str


@frozen
class Rack:
    name: str
    generation: int | None
    digest: str | None
    state: str = "ready"


ONE, TWO = Generation(1, "a" * 64), Generation(2, "b" * 64)
DONE = Answered({"outcome": "done", "reason": ""})


class FakeLink:
    """A link that notes what it was asked, and answers when the test says."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.waiting: list[Deferred[Any]] = []

    def ask(self, command: Any, **arguments: Any) -> Deferred[Outcome[Any]]:
        self.asked.append(arguments)
        self.waiting.append(Deferred())
        return self.waiting[-1]


class FakeRegistry:
    def __init__(self) -> None:
        self.racks: dict[str, Rack] = {}
        self.links: dict[str, FakeLink] = {}

    def enrolled(self) -> dict[str, Rack]:
        return self.racks

    def link_of(self, system_id: str) -> FakeLink | None:
        return self.links.get(system_id)


class SyncDriverTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.registry = FakeRegistry()
        self.registry.racks["r"] = Rack("one", None, None)
        self.link = self.registry.links["r"] = FakeLink()

    def driver(self, current: Generation | None = ONE) -> SyncDriver:
        return SyncDriver(self.registry, current, lambda: "http://*:1/s")  # type: ignore[arg-type]  # a fake

    def holds(self, generation: Generation) -> None:
        self.registry.racks["r"] = Rack("one", generation.number, generation.digest)

    def test_a_rack_that_is_behind_is_told_where_to_fetch_what(self) -> None:
        self.assertTrue(self.driver().consider("r"))
        self.assertEqual(self.link.asked, [{"generation": 1, "digest": ONE.digest, "url": "http://*:1/s"}])

    def test_a_sync_that_failed_is_an_error_in_the_log_and_any_other_end_is_not(self) -> None:
        for outcome, reason, level in (
            ("failed", "1 of 9 files could not be fetched", "error"),
            ("synced", "", "info"),
        ):
            with self.subTest(outcome=outcome), capturedLogs() as events:
                self.setUp()
                self.driver().consider("r")
                self.link.waiting[0].callback(Answered({"outcome": outcome, "reason": reason}))
                [event] = events
                self.assertEqual(event["log_level"].name, level)
                text = formatEvent(event)
                self.assertIn(f"generation 1 ended: {outcome}", text)
                self.assertIn(reason, text)
                self.assertEqual(text, text.strip())

    def test_a_rack_in_step_is_not_told(self) -> None:
        self.holds(ONE)
        self.assertFalse(self.driver().consider("r"))
        self.assertEqual(self.link.asked, [])

    def test_a_rack_that_holds_the_same_content_under_an_older_number_is_told(self) -> None:
        self.holds(Generation(1, TWO.digest))
        self.assertTrue(self.driver(TWO).consider("r"))

    def test_a_rack_in_step_is_told_when_someone_insists(self) -> None:
        self.holds(ONE)
        self.assertTrue(self.driver().consider("r", even_if_in_step=True))
        self.assertEqual(len(self.link.asked), 1)

    def ahead(self, newest: Generation, *, is_away: bool = False) -> SyncDriver:
        """A driver that knows of the first generation, with a rack at the second; ``newest`` is in the database."""
        self.holds(TWO)
        self.read = 0

        async def read_again() -> None:
            self.read += 1
            if is_away:
                raise DatabaseUnavailable("the database is away")
            if newest is not ONE:
                driver.published(newest)

        driver = SyncDriver(self.registry, ONE, lambda: "http://*:1/s", read_again)  # type: ignore[arg-type]  # a fake
        return driver

    def test_a_rack_that_heard_of_a_generation_from_another_process_is_not_sent_back(self) -> None:
        # Regression: one process had told the rack of what it published, the other told it of what it knew until then.
        driver = self.ahead(TWO)
        self.assertTrue(driver.consider("r"))
        self.assertEqual((self.read, self.link.asked), (1, []))
        self.assertFalse(driver.consider("r"))

    def test_a_rack_that_is_ahead_of_the_database_itself_is_sent_back_to_what_that_has(self) -> None:
        driver = self.ahead(ONE)
        driver.consider("r")
        self.assertEqual([asked["generation"] for asked in self.link.asked], [1])
        self.link.waiting[0].callback(DONE)
        driver.consider("r", even_if_in_step=True)
        self.assertEqual(self.read, 1)

    def test_a_rack_that_was_told_before_it_reported_that_it_is_ahead_is_told_again_once(self) -> None:
        # It did not take it then, for all that it knew another process of the region had published what it holds.
        driver = self.ahead(ONE)
        ahead, self.registry.racks["r"] = self.registry.racks["r"], Rack("one", None, None)
        driver.consider("r")
        self.link.waiting[0].callback(Answered({"outcome": "superseded", "reason": "generation 2 is held"}))
        self.registry.racks["r"] = ahead
        self.assertTrue(driver.consider("r"))
        self.assertEqual([asked["generation"] for asked in self.link.asked], [1, 1])
        self.link.waiting[1].callback(Answered({"outcome": "failed", "reason": "no space"}))
        self.assertFalse(driver.consider("r"))
        self.assertEqual((self.read, len(self.link.asked)), (1, 2))

    def test_a_rack_that_is_ahead_is_left_alone_while_the_database_is_away_and_looked_at_again_after(self) -> None:
        driver = self.ahead(ONE, is_away=True)
        driver.consider("r")
        driver.consider("r")
        self.assertEqual((self.read, self.link.asked), (2, []))

    def test_nothing_is_told_while_nothing_is_published_or_nobody_is_linked(self) -> None:
        self.assertFalse(self.driver(None).consider("r"))
        self.assertFalse(self.driver().consider("unknown"))
        del self.registry.links["r"]
        self.assertFalse(self.driver().consider("r"))

    def test_a_sync_under_way_is_not_asked_for_twice(self) -> None:
        driver = self.driver()
        driver.consider("r")
        self.assertTrue(driver.consider("r", even_if_in_step=True))
        self.assertEqual(len(self.link.asked), 1)
        self.assertEqual(driver.syncing(), {"r": 1})

    def test_a_failed_sync_is_not_asked_for_again_at_each_report_but_on_a_new_link(self) -> None:
        driver = self.driver()
        driver.consider("r")
        self.link.waiting[0].callback(Answered({"outcome": "failed", "reason": "no space"}))
        self.assertEqual(driver.syncing(), {})
        self.assertFalse(driver.consider("r"))
        self.link = self.registry.links["r"] = FakeLink()
        self.assertTrue(driver.consider("r"))

    def test_racks_that_lack_something_are_told_again_when_it_is_there_and_no_others(self) -> None:
        driver = self.driver()
        driver.consider("r")
        self.link.waiting[0].callback(Answered({"outcome": "failed", "reason": "a file is damaged"}))
        self.registry.racks["s"] = Rack("two", ONE.number, ONE.digest)
        other = self.registry.links["s"] = FakeLink()
        driver.again()
        self.assertEqual((len(self.link.asked), len(other.asked)), (2, 0))

    def test_a_rack_that_is_fetching_when_a_file_comes_back_is_told_again_if_it_could_not_have_all(self) -> None:
        for outcome, asked in (("partial", 2), ("failed", 2), ("synced", 1)):
            with self.subTest(outcome=outcome), capturedLogs() as events:
                self.setUp()
                driver = self.driver()
                driver.consider("r")
                driver.again()
                driver.again()
                self.assertEqual(len(self.link.asked), 1)
                self.link.waiting[0].callback(Answered({"outcome": outcome, "reason": "1 of 9 images cannot be had"}))
                self.assertEqual(len(self.link.asked), asked)
                if outcome == "partial":
                    self.assertEqual(events[0]["log_level"].name, "warn")
                if asked == 2:
                    self.link.waiting[1].callback(Answered({"outcome": outcome, "reason": "still"}))
                self.assertEqual(len(self.link.asked), asked)

    def test_a_rack_that_fetches_of_its_own_accord_when_a_file_comes_back_is_told_again_as_well(self) -> None:
        # It lets who asks have the result of the sync under way, in which it may have been refused that file already.
        for outcome, asked in (("partial", 3), ("failed", 3), ("synced", 2)):
            with self.subTest(outcome=outcome):
                self.setUp()
                driver = self.driver()
                driver.consider("r")
                self.link.waiting[0].callback(Answered({"outcome": "partial", "reason": "1 of 9 images"}))
                self.registry.racks["r"] = Rack("one", 1, "c" * 64, "syncing")
                driver.again()
                self.assertEqual(len(self.link.asked), 2)
                self.link.waiting[1].callback(Answered({"outcome": outcome, "reason": "1 of 9 images"}))
                self.assertEqual(len(self.link.asked), asked)
                if asked == 3:
                    self.link.waiting[2].callback(Answered({"outcome": outcome, "reason": "still"}))
                self.assertEqual(len(self.link.asked), asked)

    def test_a_rack_whose_old_link_breaks_after_it_came_back_is_told_on_the_new_one(self) -> None:
        driver = self.driver()
        driver.consider("r")
        older, self.link = self.link, FakeLink()
        self.registry.links["r"] = self.link
        driver.consider("r")  # the rack reports over its new link; the region has not noticed yet that the old is dead
        older.waiting[0].callback(NotConnected())
        self.assertEqual([asked["generation"] for asked in self.link.asked], [1])

    def test_what_is_published_during_a_sync_is_told_at_once_and_once(self) -> None:
        driver = self.driver()
        driver.consider("r")
        driver.published(TWO)
        self.assertEqual([asked["generation"] for asked in self.link.asked], [1, 2])
        self.assertEqual(driver.syncing(), {"r": 1})  # what it may still be fetching must not be thrown away
        self.link.waiting[0].callback(Answered({"outcome": "superseded", "reason": "2 was asked for"}))
        self.assertEqual(driver.syncing(), {"r": 2})
        self.holds(TWO)
        self.link.waiting[1].callback(DONE)
        self.assertEqual(driver.syncing(), {})
        self.assertEqual(len(self.link.asked), 2)

    def test_everyone_is_told_of_a_publish(self) -> None:
        self.registry.racks["s"] = Rack("two", 1, ONE.digest)
        other = self.registry.links["s"] = FakeLink()
        self.driver().published(TWO)
        self.assertEqual((len(self.link.asked), len(other.asked)), (1, 1))

    def test_a_call_that_failed_leaves_nothing_under_way(self) -> None:
        for outcome in (Failed("Unhandled", "x"), TimedOut(3.0), NotConnected()):
            driver = self.driver()
            driver.consider("r")
            self.link.waiting[-1].callback(outcome)
            self.assertEqual(driver.syncing(), {})

    def test_every_outcome_has_a_phrase(self) -> None:
        outcomes: list[Outcome[object]] = [Failed("Unhandled", "x"), TimedOut(3.0), NotConnected(), Answered(1)]
        self.assertEqual(
            [describe(outcome) for outcome in outcomes],
            ["Unhandled: x", "no answer within 3 s", "not connected", "answered"],
        )
