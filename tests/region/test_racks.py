"""The enrolled racks and their links, as the region sees them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any

from twisted.internet.defer import Deferred, DeferredList
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from region.database import DatabaseUnavailable
from region.database.pool import Transaction
from region.racks import REFRESH_AGAIN_SECONDS, RackInUse, RackRefused, RackRegistry, RackStore, Report, watch
from rpc.commands import Ping
from rpc.outcomes import Answered, Outcome, TimedOut
from rpc.protocol import Life, Peer
from tests.database import DatabaseTestCase
from tests.logs import Logs

NOW = datetime(2026, 11, 30, tzinfo=UTC)
DIGEST = "d" * 64


class FakeLink:
    """What the registry needs of a link."""

    def __init__(self, system_id: str, address: str = "192.0.2.1:4") -> None:
        self.peer = Peer("rack", system_id, address)
        self.closed: list[str] = []
        self.life = Life.READY
        self.outcome: Outcome[Any] = TimedOut(5.0)
        self.pinged: list[Deferred[None]] | None = None

    async def ask(self, command: Any, *, deadline: float) -> Outcome[Any]:
        assert command is Ping
        if self.pinged is not None:
            self.pinged.append(Deferred())
            await self.pinged[-1]
        return self.outcome

    def close(self, reason: str = "") -> None:
        self.closed.append(reason)


def link(system_id: str, address: str = "192.0.2.1:4") -> Any:
    return FakeLink(system_id, address)


class Recorded:
    """Which links were made known, by the rack's address."""

    def __init__(self) -> None:
        self.now: dict[str, str] = {}
        self.instances: list[str] = []

    def linked(self, system_id: str, address: str, instance: str) -> None:
        self.now[system_id] = address
        self.instances.append(instance)

    def unlinked(self, system_id: str) -> None:
        del self.now[system_id]


class RegistryTests(DatabaseTestCase):
    def setUp(self):
        ready = super().setUp()
        self.store = RackStore(self.database)
        self.connections = Recorded()
        self.registry = RackRegistry(self.store, lambda: NOW, self.connections)
        return ready.addCallback(lambda _: self.run_async(self.enrol("aaaaaa", "one")))

    async def enrol(self, system_id: str, name: str) -> None:
        await self.database.transact(lambda transaction: self.store.enrol(transaction, system_id, name, system_id))
        await self.registry.refresh()

    async def test_an_enrolled_rack_that_never_said_anything_holds_nothing_known(self) -> None:
        rack = self.registry.enrolled()["aaaaaa"]
        self.assertEqual((rack.name, rack.generation, rack.digest, rack.state), ("one", None, None, "unknown"))
        self.assertIsNone(self.registry.link_of("aaaaaa"))
        self.assertEqual(self.registry.held_generations(), {})

    async def test_a_report_is_stored_and_then_seen(self) -> None:
        await self.registry.report("aaaaaa", 7, DIGEST, "ready", {"bytes_done": 1})
        self.assertEqual(self.registry.held_generations(), {"aaaaaa": 7})
        again = RackRegistry(self.store, lambda: NOW)
        await again.refresh()
        rack = again.enrolled()["aaaaaa"]
        self.assertEqual((rack.generation, rack.digest, rack.state), (7, DIGEST, "ready"))
        self.assertEqual(rack.progress, {"bytes_done": 1})

    async def test_the_mapping_that_was_handed_out_never_changes(self) -> None:
        before = self.registry.enrolled()
        await self.registry.report("aaaaaa", 7, DIGEST, "ready", {})
        self.assertIsNone(before["aaaaaa"].generation)

    async def test_a_report_of_a_rack_that_was_forgotten_meanwhile_is_refused(self) -> None:
        # Regression: it broke a constraint of the database, and was told as an error of the region's own.
        await self.store.forget("aaaaaa")
        with self.assertRaisesRegex(RackRefused, "aaaaaa is not enrolled here"):
            await self.registry.report("aaaaaa", 7, DIGEST, "ready", {})

    async def test_racks_that_report_together_are_stored_together_and_each_as_it_said(self) -> None:
        ids = [f"c{number:05d}" for number in range(20)]
        for each in ids:
            await self.enrol(each, f"many-{each}")
        stored: list[list[str]] = []
        store = self.store.report

        async def storing(reports: Any) -> Any:
            stored.append(list(reports))
            return await store(reports)

        self.patch(self.store, "report", storing)
        reporting = [
            Deferred.fromCoroutine(self.registry.report(each, number, DIGEST, "ready", {"of": each}))
            for number, each in enumerate(ids, 1)
        ]
        for number, (each, reported) in enumerate(zip(ids, reporting, strict=True), 1):
            await reported
            rack = self.registry.enrolled()[each]
            self.assertEqual((rack.generation, rack.progress, rack.reported), (number, {"of": each}, NOW))
        self.assertEqual(sorted(each for some in stored for each in some), ids)
        self.assertLess(len(stored), 4)
        rows = await self.database.query("SELECT system_id, generation, progress FROM rack_inventory ORDER BY 1")
        self.assertEqual(rows, [(each, number, {"of": each}) for number, each in enumerate(ids, 1)])

    async def test_of_two_reports_of_a_rack_that_wait_the_later_is_what_is_stored(self) -> None:
        await self.enrol("bbbbbb", "two")
        reporting = [
            Deferred.fromCoroutine(self.registry.report(rack, generation, DIGEST, "ready", {}))
            for rack, generation in [("bbbbbb", 1), ("aaaaaa", 2), ("aaaaaa", 3)]
        ]
        for each in reporting:
            await each
        self.assertEqual(self.registry.held_generations(), {"aaaaaa": 3, "bbbbbb": 1})
        rows = await self.database.query("SELECT system_id, generation FROM rack_inventory ORDER BY 1")
        self.assertEqual(rows, [("aaaaaa", 3), ("bbbbbb", 1)])

    async def test_a_rack_that_was_forgotten_does_not_take_the_reports_of_others_with_it(self) -> None:
        await self.enrol("bbbbbb", "two")
        await self.enrol("cccccc", "three")
        await self.store.forget("bbbbbb")
        reporting = [
            Deferred.fromCoroutine(self.registry.report(rack, 7, DIGEST, "ready", {}))
            for rack in ("cccccc", "bbbbbb", "aaaaaa")
        ]
        await reporting[0]
        with self.assertRaisesRegex(RackRefused, "bbbbbb is not enrolled here"):
            await reporting[1]
        await reporting[2]
        held = self.registry.held_generations()
        self.assertEqual((held["aaaaaa"], held["cccccc"]), (7, 7))

    async def test_reports_that_cannot_be_stored_fail_each_are_not_shown_and_the_next_is_stored(self) -> None:
        await self.enrol("bbbbbb", "two")
        store = self.store.report

        async def away(reports: Any) -> Any:
            raise DatabaseUnavailable("away")

        self.patch(self.store, "report", away)
        for reporting in [
            Deferred.fromCoroutine(self.registry.report(rack, 7, DIGEST, "ready", {})) for rack in ("aaaaaa", "bbbbbb")
        ]:
            with self.assertRaises(DatabaseUnavailable):
                await reporting
        self.assertEqual(self.registry.held_generations(), {})
        self.patch(self.store, "report", store)
        await self.registry.report("aaaaaa", 8, DIGEST, "ready", {})
        self.assertEqual(self.registry.held_generations(), {"aaaaaa": 8})

    async def test_reports_are_stored_in_one_order_so_that_no_two_processes_wait_for_each_other(self) -> None:
        report = Report(1, DIGEST, "ready", {})
        for each in ("cccccc", "bbbbbb"):
            await self.enrol(each, f"many-{each}")
            await self.store.report({each: report})
        waiting = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        write = "UPDATE rack_inventory SET state = 'failed' WHERE system_id = %s"

        async def other_process(transaction: Transaction) -> Deferred[frozenset[str]]:
            await transaction.execute(write, ("bbbbbb",))
            storing = Deferred.fromCoroutine(self.store.report({"cccccc": report, "bbbbbb": report}))
            while not await self.database.query(waiting):
                pass
            await transaction.execute(write, ("cccccc",))
            return storing

        logs = Logs(self, "region.database.pool")
        stored = await self.database.transact(other_process)
        self.assertEqual(await stored, {"bbbbbb", "cccccc"})
        self.assertEqual(logs.texts, [])  # nothing was tried again

    async def test_links_are_recorded_in_one_order_so_that_no_two_processes_wait_for_each_other(self) -> None:
        for each in ("cccccc", "bbbbbb"):
            await self.enrol(each, f"many-{each}")
        waiting = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        write = "UPDATE rack SET version = '0' WHERE system_id = %s"
        for record in (
            lambda: self.store.connected({"cccccc": "1", "bbbbbb": "1"}),
            lambda: self.store.disconnected("cccccc", "bbbbbb"),
        ):

            async def other_process(
                transaction: Transaction, record: Callable[[], Coroutine[Deferred[Any], Any, None]] = record
            ) -> Deferred[None]:
                await transaction.execute(write, ("bbbbbb",))
                recording = Deferred.fromCoroutine(record())
                while not await self.database.query(waiting):
                    pass
                await transaction.execute(write, ("cccccc",))
                return recording

            logs = Logs(self, "region.database.pool")
            await (await self.database.transact(other_process))
            self.assertEqual(logs.texts, [])

    async def test_a_refresh_under_way_does_not_put_back_what_a_report_has_replaced(self) -> None:
        refreshing = Deferred.fromCoroutine(self.registry.refresh())
        reporting = Deferred.fromCoroutine(self.registry.report("aaaaaa", 7, DIGEST, "ready", {}))
        await refreshing
        await reporting
        self.assertEqual(self.registry.held_generations(), {"aaaaaa": 7})

    async def test_a_refresh_under_way_does_not_put_back_that_a_lost_link_is_up(self) -> None:
        mine, later = link("aaaaaa"), datetime(2100, 1, 1, tzinfo=UTC)
        registry = RackRegistry(self.store, lambda: later)
        await registry.register(mine, "1")
        refreshing = Deferred.fromCoroutine(registry.refresh())
        losing = Deferred.fromCoroutine(registry.lost(mine))
        await refreshing
        await losing
        self.assertEqual(registry.not_connected_since("aaaaaa"), later.timestamp())

    async def test_that_a_rack_has_other_software_is_told_whichever_region_process_it_tells_first(self) -> None:
        told: list[str] = []
        other = RackRegistry(self.store, lambda: NOW)
        await other.refresh()
        self.registry.listen_for_upgrades(lambda: told.append("here"))
        other.listen_for_upgrades(lambda: told.append("there"))
        await self.registry.register(link("aaaaaa"), "1.2")
        self.assertEqual(told, ["here"])
        await other.refresh()
        self.assertEqual(told, ["here", "there"])
        await other.register(link("aaaaaa"), "1.2")
        await other.refresh()
        await self.registry.report("aaaaaa", 7, DIGEST, "ready", {})
        await self.registry.refresh()
        self.assertEqual(told, ["here", "there"])

    async def test_registering_makes_the_link_the_rack_s(self) -> None:
        mine = link("aaaaaa")
        rack = await self.registry.register(mine, "1.2")
        self.assertIs(self.registry.link_of("aaaaaa"), mine)
        self.assertEqual((rack.version, rack.last_connected), ("1.2", NOW))

    async def test_a_second_link_is_refused_while_the_first_one_is_alive(self) -> None:
        first, second = link("aaaaaa", "192.0.2.1:4"), link("aaaaaa", "192.0.2.9:5")
        await self.registry.register(first, "1")
        first.outcome = Answered({}, 0.001)
        with self.assertRaises(RackInUse) as caught:
            await self.registry.register(second, "1")
        for said in ("one (aaaaaa)", "192.0.2.1:4", "192.0.2.9:5", "two machines"):
            self.assertIn(said, str(caught.exception))
        self.assertIs(self.registry.link_of("aaaaaa"), first)
        self.assertEqual((first.closed, second.closed), ([], []))

    async def test_a_link_that_registers_again_is_not_in_its_own_way(self) -> None:
        mine = link("aaaaaa")
        mine.outcome = Answered({}, 0.001)
        await self.registry.register(mine, "1")
        await self.registry.register(mine, "2")
        self.assertIs(self.registry.link_of("aaaaaa"), mine)

    async def test_of_two_that_come_while_the_old_link_dies_one_is_let_in(self) -> None:
        dead, one, two = link("aaaaaa"), link("aaaaaa"), link("aaaaaa")
        await self.registry.register(dead, "1")
        dead.pinged = []
        coming = [Deferred.fromCoroutine(self.registry.register(each, "1")) for each in (one, two)]
        one.outcome = two.outcome = Answered({}, 0.001)
        for asked in dead.pinged:
            asked.callback(None)
        ends = [success for success, _ in await DeferredList(coming, consumeErrors=True)]
        self.assertEqual(sorted(ends), [False, True])
        self.assertIs(self.registry.link_of("aaaaaa"), (one, two)[ends.index(True)])
        self.assertEqual(len(dead.closed), 1)

    async def test_a_rack_that_is_revoked_while_it_registers_does_not_get_in(self) -> None:
        dead, mine = link("aaaaaa"), link("aaaaaa")
        await self.registry.register(dead, "1")
        dead.pinged = []
        coming = Deferred.fromCoroutine(self.registry.register(mine, "1"))
        await self.store.revoke("aaaaaa")
        await self.registry.refresh()
        dead.pinged[0].callback(None)
        with self.assertRaises(RackRefused):
            await coming
        self.assertIsNone(self.registry.link_of("aaaaaa"))

    async def test_revoking_a_rack_closes_its_link_in_every_region_process_and_says_why(self) -> None:
        other = RackRegistry(self.store, lambda: NOW)
        refreshed: Deferred[str] = Deferred()
        watch(other, self.database, Clock())
        await other.refresh()
        mine = link("aaaaaa")
        mine.close = lambda reason: refreshed.callback(reason)
        await other.register(mine, "1")
        await self.store.revoke("aaaaaa")
        self.assertEqual(await refreshed, "it was revoked")
        self.assertIsNone(other.link_of("aaaaaa"))

    async def test_a_newer_link_replaces_an_older_one_that_does_not_answer(self) -> None:
        older, newer = link("aaaaaa"), link("aaaaaa")
        await self.registry.register(older, "1")
        await self.registry.register(newer, "1")
        self.assertIs(self.registry.link_of("aaaaaa"), newer)
        self.assertEqual(len(older.closed), 1)
        await self.registry.lost(older)
        self.assertIs(self.registry.link_of("aaaaaa"), newer)
        self.assertIsNone(self.registry.not_connected_since("aaaaaa"))

    async def register_together(self, *links: tuple[Any, str, int]) -> list[Any]:
        """Register all before any is done; what each ended with."""
        return [
            result
            for _, result in await DeferredList(
                [Deferred.fromCoroutine(self.registry.register(link, "1", name, turn)) for link, name, turn in links],
                consumeErrors=True,
            )
        ]

    async def test_an_earlier_link_whose_registration_comes_in_later_does_not_replace_the_later_link(self) -> None:
        earlier, later = link("aaaaaa"), link("aaaaaa")
        _, refused = await self.register_together((later, "i", 2), (earlier, "i", 1))
        self.assertIs(self.registry.link_of("aaaaaa"), later)
        self.assertEqual(later.closed, [])
        refused.trap(RackRefused)
        self.assertIn("later link", refused.getErrorMessage())
        await self.registry.lost(earlier)
        self.assertIs(self.registry.link_of("aaaaaa"), later)
        self.assertEqual(list(self.connections.now), ["aaaaaa"])

    async def test_a_rack_that_started_anew_replaces_its_link_whatever_its_attempts_are(self) -> None:
        before, after = link("aaaaaa"), link("aaaaaa")
        await self.registry.register(before, "1", "first", 900)
        await self.registry.register(after, "1", "second", 1)
        self.assertIs(self.registry.link_of("aaaaaa"), after)
        self.assertEqual(len(before.closed), 1)
        self.assertEqual(self.connections.instances, ["first", "second"])

    async def test_a_link_that_was_lost_while_it_registered_takes_nobody_s_place(self) -> None:
        # Regression: it closed the link by which the rack had come back meanwhile.
        dead, alive = link("aaaaaa"), link("aaaaaa")
        await self.registry.register(alive, "1")
        dead.life = Life.LOST
        with self.assertRaises(RackRefused):
            await self.registry.register(dead, "1")
        self.assertIs(self.registry.link_of("aaaaaa"), alive)
        self.assertEqual(alive.closed, [])

    async def test_what_is_made_known_is_what_is_linked(self) -> None:
        older, newer = link("aaaaaa"), link("aaaaaa")
        newer.peer = Peer("rack", "aaaaaa", "192.0.2.1:5")
        await self.registry.register(older, "1")
        self.assertEqual(self.connections.now, {"aaaaaa": "192.0.2.1:4"})
        await self.registry.register(newer, "1")
        await self.registry.lost(older)
        self.assertEqual(self.connections.now, {"aaaaaa": "192.0.2.1:5"})
        await self.registry.lost(newer)
        self.assertEqual(self.connections.now, {})
        await self.registry.register(link("aaaaaa"), "1")
        await self.store.forget("aaaaaa")
        await self.registry.refresh()
        self.assertEqual(self.connections.now, {})

    async def test_a_lost_link_is_remembered_with_its_time(self) -> None:
        mine = link("aaaaaa")
        await self.registry.register(mine, "1")
        await self.registry.lost(mine)
        self.assertIsNone(self.registry.link_of("aaaaaa"))
        self.assertEqual(self.registry.not_connected_since("aaaaaa"), NOW.timestamp())
        row = await self.database.one("SELECT last_disconnected IS NOT NULL FROM rack")
        self.assertEqual(row, (True,))

    async def test_racks_that_register_together_are_recorded_together(self) -> None:
        ids = [f"c{number:05d}" for number in range(20)]
        for each in ids:
            await self.enrol(each, f"many-{each}")
        recorded: list[list[str]] = []
        connected = self.store.connected

        async def recording(versions: Any) -> None:
            recorded.append(list(versions))
            await connected(versions)

        self.patch(self.store, "connected", recording)
        registering = [
            Deferred.fromCoroutine(self.registry.register(link(each), f"v-{each}")) for each in [*ids, "missing"]
        ]
        for each, registered in zip(ids, registering, strict=False):
            self.assertEqual((await registered).version, f"v-{each}")
        with self.assertRaises(RackRefused):
            await registering[-1]
        self.assertEqual(sorted(each for some in recorded for each in some), ids)
        self.assertLess(len(recorded), 4)
        rows = await self.database.query("SELECT version FROM rack WHERE last_connected IS NOT NULL ORDER BY version")
        self.assertEqual(rows, [(f"v-{each}",) for each in ids])

    async def test_registrations_that_cannot_be_recorded_fail_each_and_the_next_are_tried(self) -> None:
        await self.enrol("bbbbbb", "two")
        connected = self.store.connected

        async def away(versions: Any) -> None:
            raise DatabaseUnavailable("away")

        self.patch(self.store, "connected", away)
        for registering in [
            Deferred.fromCoroutine(self.registry.register(link(each), "1")) for each in ("aaaaaa", "bbbbbb")
        ]:
            with self.assertRaises(DatabaseUnavailable):
                await registering
        self.patch(self.store, "connected", connected)
        self.assertEqual((await self.registry.register(link("aaaaaa"), "2")).version, "2")

    async def test_one_that_never_connected_is_not_connected_since_it_was_enrolled(self) -> None:
        (rack, *_) = self.registry.enrolled().values()
        self.assertEqual(self.registry.not_connected_since(rack.system_id), rack.enrolled.timestamp())
        self.assertIsNone(self.registry.not_connected_since("zzzzzz"))

    async def test_the_more_racks_there_are_the_longer_they_are_told_to_take_to_come_back(self) -> None:
        self.assertEqual(self.registry.spread, 1)
        for number in range(50):
            await self.enrol(f"c{number:05d}", f"many-{number}")
        await self.registry.refresh()
        self.assertEqual(self.registry.spread, 2)

    async def test_after_a_kill_an_older_end_is_not_taken_for_when_the_link_ended(self) -> None:
        first = link("aaaaaa")
        await self.registry.register(first, "1")
        await self.registry.lost(first)
        await self.registry.register(link("aaaaaa"), "1")
        restarted = RackRegistry(self.store, lambda: NOW)  # the region was killed while the rack was linked
        await restarted.refresh()
        self.assertIsNone(restarted.not_connected_since("aaaaaa"))

    async def test_the_end_of_every_link_is_recorded_before_the_region_stops(self) -> None:
        await self.enrol("bbbbbb", "two")
        links = [link("aaaaaa"), link("bbbbbb")]
        for each in links:
            await self.registry.register(each, "1")
        await self.registry.close()
        self.assertEqual([each.closed for each in links], [["the region is stopping"]] * 2)
        rows = await self.database.query("SELECT last_disconnected >= last_connected FROM rack")
        self.assertEqual(rows, [(True,), (True,)])
        await self.database.stop()
        await self.registry.lost(links[0])  # which comes when the database is gone: it says nothing new

    async def test_links_are_closed_also_when_the_database_is_gone(self) -> None:
        mine = link("aaaaaa")
        await self.registry.register(mine, "1")
        await self.database.stop()
        await self.registry.close()
        self.assertEqual(len(mine.closed), 1)

    async def test_a_rack_that_is_not_enrolled_cannot_register(self) -> None:
        with self.assertRaises(RackRefused) as caught:
            await self.registry.register(link("zzzzzz"), "1")
        self.assertIn("not enrolled", str(caught.exception))

    async def test_a_rack_enrolled_by_another_process_a_moment_ago_can_register(self) -> None:
        await self.database.transact(lambda transaction: self.store.enrol(transaction, "bbbbbb", "two", "b"))
        await self.registry.register(link("bbbbbb"), "1")
        self.assertIn("bbbbbb", self.registry.enrolled())

    async def test_forgetting_a_rack_closes_its_link(self) -> None:
        mine = link("aaaaaa")
        await self.registry.register(mine, "1")
        self.assertTrue(await self.store.forget("aaaaaa"))
        await self.registry.refresh()
        self.assertEqual(self.registry.enrolled(), {})
        self.assertIsNone(self.registry.link_of("aaaaaa"))
        self.assertEqual(len(mine.closed), 1)
        self.assertFalse(await self.store.forget("aaaaaa"))


class FailingRegistry:
    """Fails to read the racks with ``error`` unless that is None."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.refreshed = 0

    async def refresh(self) -> None:
        self.refreshed += 1
        if self.error is not None:
            raise self.error

    def listen(self, channel: str, changed: Any) -> None:
        self.changed = changed


class WatchTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.registry = FailingRegistry()
        both: Any = self.registry
        watch(both, both, self.clock)

    def test_a_change_that_could_not_be_read_is_read_again_until_that_succeeds(self) -> None:
        self.registry.error = DatabaseUnavailable("no route to the server")
        for _ in range(3):
            self.registry.changed("")
        self.assertEqual(self.registry.refreshed, 3)
        self.clock.pump([REFRESH_AGAIN_SECONDS] * 4)
        self.assertEqual(self.registry.refreshed, 7)
        self.registry.error = None
        self.clock.pump([REFRESH_AGAIN_SECONDS] * 4)
        self.assertEqual(self.registry.refreshed, 8)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_an_error_of_its_own_is_logged_with_its_traceback_and_ends_nothing(self) -> None:
        self.registry.error = ValueError("a bug")
        self.registry.changed("")
        self.assertEqual(len(self.flushLoggedErrors(ValueError)), 1)
        self.registry.error = None
        self.clock.advance(REFRESH_AGAIN_SECONDS)
        self.assertEqual(self.registry.refreshed, 2)
