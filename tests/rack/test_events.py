"""A rack's events over real links and files: what is kept, what is sent again, and what becomes of what is refused."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from rack.eventfile import EventFile
from rack.events import FAREWELL_SECONDS, UNWRITTEN, Events
from rack.files import Files
from rpc.commands import CancelSync, EventsRefused, SendEvents, SyncImages
from rpc.events import EVENTS_LOST, MAX_BATCH, MAX_DESCRIPTION, SYNC_ENDED
from rpc.protocol import Link
from rpc.testing import linked
from tests.rack.test_link import LinkTestCase
from tests.rack.test_sync import FIRST, SECOND, Threads, inline


class EventsTestCase(SynchronousTestCase):
    """A rack's events, and regions that keep what they are sent in ``received``."""

    def setUp(self) -> None:
        self.patch(os, "fsync", lambda descriptor: None)
        self.clock = Clock()
        self.clock.advance(1e9)
        self.directory = Path(self.mktemp()).absolute()
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        self.received: list[Mapping[str, Any]] = []
        self.calls: list[int] = []
        self.raises: Exception | None = None
        self.bad = ""
        self.late: list[Deferred[None]] | None = None
        self.start()

    def start(self, run_in_thread: Any = inline, files: Files | None = None) -> None:
        file = EventFile(self.directory, files, now=self.clock.seconds)
        self.events = Events(file, self.clock, run_in_thread, now=self.clock.seconds, jitter=lambda: 0.0)
        self.opening = Deferred.fromCoroutine(self.events.open())

    def connect(self, table: Any = None) -> Link:
        region_end, rack_end, self.pump = linked(
            {SendEvents: self.send_events} if table is None else table, {}, self.clock, interval=0
        )
        self.region_end = region_end
        self.events.use(rack_end)
        self.pump.flush()
        return rack_end

    async def send_events(self, link: Link, events: list[Mapping[str, Any]]) -> Mapping[str, Any]:
        self.calls.append(len(events))
        if self.late is not None:
            waiting: Deferred[None] = Deferred()
            self.late.append(waiting)
            await waiting
        if self.raises is not None:
            raise self.raises
        if self.bad and any(self.bad in event["description"] for event in events):
            raise EventsRefused("that is no event")
        self.received += events
        return {"committed": [event["id"] for event in events]}

    def record(self, *descriptions: str) -> None:
        for description in descriptions:
            self.events.record(SYNC_ENDED, description)
        if hasattr(self, "pump"):
            self.pump.flush()

    @property
    def told(self) -> list[str]:
        return [event["description"] for event in self.received]

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.pump.flush()

    def stop(self) -> None:
        stopping = Deferred.fromCoroutine(self.events.stop())
        self.clock.advance(FAREWELL_SECONDS)
        self.successResultOf(stopping)


class TestSending(EventsTestCase):
    def test_what_happened_while_no_region_could_be_reached_is_sent_in_order_with_the_time_when_it_happened(
        self,
    ) -> None:
        self.record("one")
        self.clock.advance(100)
        self.record("two")
        self.connect()
        self.record("three")
        self.assertEqual(self.told, ["one", "two", "three"])
        self.assertEqual([event["occurred"] - 1e9 for event in self.received], [0, 100, 100])
        self.assertEqual((self.received[0]["type"], self.received[0]["level"]), ("Sync ended", 20))
        self.assertEqual(self.events.pending, 0)

    def test_what_was_not_confirmed_is_sent_again_with_the_same_id_ever_more_seldom(self) -> None:
        self.raises = RuntimeError("the database is away")
        self.connect()
        self.record("one")
        self.record("two")
        for seconds in (1, 2, 4):
            self.advance(seconds)
        self.assertEqual(self.calls, [1, 1, 1, 1])  # "two" waits until it is known what became of "one"
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 4)
        self.raises = None
        self.advance(8)
        self.assertEqual(self.told, ["one", "two"])

    def test_when_one_region_does_not_answer_the_next_try_is_with_another(self) -> None:
        self.late = []
        self.connect()
        self.record("one")
        first = self.pump
        late, self.late = self.late, None
        self.connect()
        self.assertEqual((len(late), self.told), (1, []))
        self.clock.advance(30)
        first.flush()
        self.clock.advance(1)
        self.pump.flush()
        self.assertEqual(self.told, ["one"])

    def test_a_lost_link_is_no_reason_to_wait_if_there_is_another(self) -> None:
        self.late = []
        self.connect()
        first = self.region_end
        pump = self.pump
        self.record("one")
        self.late = None
        self.connect()
        first.abort("cut")
        pump.flush()
        self.pump.flush()
        self.assertEqual(self.told, ["one"])

    def test_batches_are_bounded_in_number_and_bytes(self) -> None:
        self.record(*["x"] * 250, *["y" * 2000] * 50)
        self.connect()
        self.assertEqual(len(self.received), 300)
        self.assertEqual(self.calls[:2], [MAX_BATCH, MAX_BATCH])
        self.assertLess(max(self.calls[3:]), 30)

    def test_a_region_that_knows_no_events_is_left_alone_and_they_wait(self) -> None:
        self.connect({})
        self.record("one")
        self.advance(3600)
        self.record("two")
        self.assertEqual(self.events.pending, 2)
        self.connect()
        self.assertEqual(self.told, ["one", "two"])

    def test_an_event_that_the_region_refuses_does_not_hold_up_the_others_and_its_loss_is_told(self) -> None:
        self.bad = "two"
        self.record("one", "two", "three")
        self.connect()
        self.pump.flush()
        self.assertEqual(self.told[:2], ["one", "three"])
        self.assertIn("1 event was lost: the region does not take 'Sync ended' for one: that is no event", self.told[2])
        self.assertEqual((self.events.pending, self.events.lost), (0, 1))

    def test_an_answer_that_confirms_nothing_is_a_failure_and_not_a_loop(self) -> None:
        async def confirm_nothing(link: Link, events: Any) -> Mapping[str, Any]:
            self.calls.append(len(events))
            return {"committed": ["yes", [[]], [{}]][len(self.calls) % 3]}

        self.connect({SendEvents: confirm_nothing})
        self.record("one")
        self.assertEqual(self.calls, [1])
        self.advance(1)
        self.assertEqual(self.calls, [1, 1])
        self.advance(2)
        self.assertEqual(self.calls, [1, 1, 1])
        self.assertEqual(self.events.pending, 1)


class TestKeeping(EventsTestCase):
    def test_a_restart_keeps_what_was_not_confirmed_and_sends_nothing_twice_that_was(self) -> None:
        self.connect()
        self.record("one")
        self.region_end.abort("cut")
        self.pump.flush()
        self.record("two")
        self.stop()
        del self.pump
        self.start()
        self.record("three")
        self.connect()
        self.assertEqual(self.told, ["one", "two", "three"])
        identities = [event["id"].partition("-") for event in self.received]
        self.assertEqual(len({epoch for epoch, _, _ in identities}), 1)
        numbers = [int(number) for _, _, number in identities]
        self.assertEqual(numbers, sorted(set(numbers)))

    def test_numbers_are_not_used_again_when_the_disk_is_put_back_to_an_older_state(self) -> None:
        self.record("one")
        old = {path: path.read_bytes() for path in self.directory.iterdir()}
        self.record("two")
        self.connect()
        self.stop()
        for path in self.directory.iterdir():
            path.unlink()
        for path, data in old.items():
            path.write_bytes(data)
        self.clock.advance(60)
        self.start()
        self.record("three")
        self.connect()
        self.assertEqual(self.told, ["one", "two", "one", "three"])
        self.assertEqual(self.received[0]["id"], self.received[2]["id"])
        self.assertGreater(self.received[3]["id"], self.received[1]["id"])

    def test_what_a_crash_tore_is_cut_off_and_what_follows_it_is_whole(self) -> None:
        self.record("one", "two")
        [path] = self.directory.glob("*.events")
        os.truncate(path, path.stat().st_size - 10)
        self.start()
        self.record("three")
        self.start()
        self.connect()
        self.assertEqual((self.told, self.events.lost), (["one", "three"], 0))

    def test_damage_in_the_middle_is_counted_and_told_once(self) -> None:
        self.record("one", "two", "three")
        [path] = self.directory.glob("*.events")
        path.write_bytes(path.read_bytes().replace(b'"two"', b'"twx"'))
        self.start()
        self.start()
        self.start()
        self.connect()
        self.assertEqual(self.told[:2], ["one", "three"])
        self.assertEqual(self.told[2:], ["1 event was lost: their records on the rack's disk are damaged."])
        self.assertEqual(self.received[2]["type"], EVENTS_LOST.type)

    def test_zeros_are_damage_like_any_other_though_they_have_the_right_sum_of_nothing(self) -> None:
        for zeros in (b"00000000 \n", b"00000000\n", b"\0" * 512 + b"\n"):
            self.record("one", "two")
            path = sorted(self.directory.glob("*.events"))[-1]
            head, two = path.read_bytes().splitlines(keepends=True)[-2:]
            path.write_bytes(head + zeros + two)
            (self.directory / "state").write_bytes(zeros)
            self.start()
            self.connect()
            self.assertEqual(self.told[:2], ["one", "two"])
            self.assertIn("1 event was lost", self.told[2])
            self.stop()
            self.setUp()

    def test_a_damaged_state_makes_the_rack_send_all_that_it_keeps(self) -> None:
        self.connect()
        self.record("one")
        self.stop()
        (self.directory / "state").write_bytes(b"00000000 {}\n")
        self.start()
        self.connect()
        self.assertEqual(self.told, ["one", "one"])
        self.assertEqual(self.received[0]["id"], self.received[1]["id"])

    def test_what_was_confirmed_does_not_stay_on_the_disk(self) -> None:
        self.connect()
        for _ in range(2000):
            self.record("x" * 500)
        self.assertLess(sum(path.stat().st_size for path in self.directory.iterdir()), 600_000)

    def test_a_description_is_bounded_and_plain(self) -> None:
        self.connect()
        self.record("\x00" + "x" * 5000, "\ud800")
        self.assertEqual(len(self.told[0]), MAX_DESCRIPTION)
        self.assertEqual(self.told[1], "\\ud800")

    def test_a_disk_that_does_not_answer_costs_bounded_memory_and_the_rest_is_counted(self) -> None:
        threads = Threads()
        self.start(threads.run)
        self.record(*["x"] * (UNWRITTEN + 50))
        self.assertEqual(self.events.pending, UNWRITTEN)
        threads.work()
        self.connect()
        while threads.tasks:
            threads.work()
            self.pump.flush()
        self.assertEqual(len(self.received), UNWRITTEN + 1)
        self.assertTrue(self.told[-1].startswith("50 events were lost"), self.told[-1])

    def test_what_is_recorded_last_is_sent_before_the_rack_ends_if_that_is_quick(self) -> None:
        self.connect()
        self.late = []
        self.record("the rack stops")
        stopping = Deferred.fromCoroutine(self.events.stop())
        self.assertNoResult(stopping)
        self.late[0].callback(None)
        self.pump.flush()
        self.successResultOf(stopping)
        self.assertEqual(self.told, ["the rack stops"])
        self.events.record(SYNC_ENDED, "too late")
        self.assertEqual(self.events.pending, 0)

    def test_a_region_that_does_not_answer_does_not_keep_the_rack_from_ending(self) -> None:
        self.connect()
        self.late = []
        self.record("the rack stops")
        self.stop()
        self.late = None
        self.start()
        self.connect()
        self.assertEqual(self.told, ["the rack stops"])


class TestHappenings(LinkTestCase):
    """What of a rack's life makes events."""

    def setUp(self) -> None:
        super().setUp()
        self.happened: list[tuple[str, str]] = []
        self.rack.synchroniser.on_happening(lambda kind, text: self.happened.append((kind.type, text)))

    def types(self) -> list[str]:
        return [kind for kind, _ in self.happened]

    def test_a_sync_begins_and_ends_and_one_that_finds_all_in_place_is_not_worth_an_event(self) -> None:

        asked = self.publish(5, FIRST)
        self.answer(SyncImages, **asked)
        self.assertEqual(self.types(), ["Sync started", "Sync ended"])
        self.assertIn("generation 5", self.happened[0][1])
        self.assertIn(f"{len(FIRST.blobs)} files", self.happened[1][1])
        self.answer(SyncImages, **asked)
        self.assertEqual(len(self.happened), 2)

    def test_a_sync_that_fails_or_is_stopped_says_why(self) -> None:

        self.answer(SyncImages, **{**self.publish(5, FIRST), "digest": SECOND.digest})
        self.assertEqual(self.types(), ["Sync started", "Sync failed"])
        self.assertIn("404", self.happened[-1][1])
        self.rack.region.hold()
        self.ask(SyncImages, **self.publish(6, FIRST))
        self.answer(CancelSync)
        self.assertEqual(self.types()[2:], ["Sync started", "Sync stopped"])

    def test_damage_is_told_with_what_is_damaged(self) -> None:

        self.answer(SyncImages, **self.publish(5, FIRST))
        self.rack.blobs.path(next(iter(FIRST.blobs))).unlink()
        self.rack.synchroniser.look_again()
        self.assertIn("Damage found", self.types())
        self.assertIn("boot-", dict(self.happened)["Damage found"])
