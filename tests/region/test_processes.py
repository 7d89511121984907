"""Which region processes there are and what each is linked with, as the others see it, over a real PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from twisted.internet import reactor as installed
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock, deferLater
from twisted.trial.unittest import SynchronousTestCase

from region.database import Transaction
from region.processes import HEARTBEAT_SECONDS, STALE_SECONDS, Processes, endpoint_of
from region.racks import RackStore
from tests.database import DatabaseTestCase

NOW = datetime(2026, 11, 30, tzinfo=UTC)
reactor: Any = installed


class EndpointTests(SynchronousTestCase):
    def test_what_is_advertised_comes_before_where_it_listens(self) -> None:
        self.assertEqual(endpoint_of("r.example.com:1", "10.0.0.1", 5250), "r.example.com:1")

    def test_an_address_that_it_listens_on_is_where_it_is(self) -> None:
        self.assertEqual(endpoint_of("", "10.0.0.1", 5250), "10.0.0.1:5250")
        self.assertEqual(endpoint_of("", "fd00::1", 5250), "[fd00::1]:5250")

    def test_on_all_addresses_the_rack_s_own_way_is_kept(self) -> None:
        for listen in ("", "0.0.0.0", "::"):
            self.assertEqual(endpoint_of("", listen, 5250), "*:5250")


class ProcessesTests(DatabaseTestCase):
    def setUp(self) -> Deferred[None]:  # type: ignore[override]  # trial waits for what setUp returns
        self.clock = Clock()
        self.all: list[Processes] = []
        ready = super().setUp()
        self.addCleanup(self.stop_all)
        return ready.addCallback(lambda _: self.run_async(self.enrol("aaaaaa", "bbbbbb", "cccccc")))

    async def enrol(self, *system_ids: str) -> None:
        store = RackStore(self.database)

        async def enrolling(transaction: Transaction) -> None:
            for system_id in system_ids:
                await store.enrol(transaction, system_id, system_id, system_id)

        await self.database.transact(enrolling)

    async def stop_all(self) -> None:
        for process in self.all:
            await process.stop()

    async def start(self, name: str, *, host: str = "machine", endpoint: str = "*:1", directory: str = "") -> Processes:
        process = Processes(self.database, self.clock, name, Path("/", directory or name), lambda: NOW, host=host)
        await process.start(endpoint)
        self.all.append(process)
        return process

    async def until(self, condition: Callable[[], Any]) -> None:
        """Let the database's answers come in until ``condition`` gives something true; trial bounds the wait."""
        while not await condition():
            await deferLater(reactor, 0.002)

    async def rows(self) -> set[tuple[str, str]]:
        """(process, rack) of every row, whether its process lives or not."""
        return set(
            await self.database.query(
                "SELECT region_process.name, rack FROM rack_connection JOIN region_process ON process = id"
            )
        )

    async def rows_are(self, *expected: tuple[str, str]) -> None:
        async def are() -> bool:
            return await self.rows() == set(expected)

        await self.until(are)

    async def seen(self, process: Processes) -> dict[str, list[str]]:
        """What ``process`` says of every rack: the names of the processes that it is linked with."""
        return {
            rack: [each.name for each in connections.live]
            for rack, connections in (await process.connections()).items()
        }

    async def age(self, name: str, seconds: float) -> None:
        """Let the heartbeat of a process be that old."""
        await self.database.execute(
            "UPDATE region_process SET heartbeat = clock_timestamp() - %s * interval '1 second' WHERE name = %s",
            (seconds, name),
        )

    async def beat(self, process: Processes) -> None:
        await process._beat_once()

    async def test_every_process_tells_what_each_is_linked_with(self) -> None:
        one, two = await self.start("one"), await self.start("two")
        one.linked("aaaaaa", "192.0.2.1:4")
        two.linked("aaaaaa", "192.0.2.1:5")
        two.linked("bbbbbb", "192.0.2.2:5")
        await self.rows_are(("one", "aaaaaa"), ("two", "aaaaaa"), ("two", "bbbbbb"))
        self.assertEqual(await self.seen(one), {"aaaaaa": ["one", "two"], "bbbbbb": ["two"], "cccccc": []})
        self.assertEqual(await self.seen(two), {"aaaaaa": ["two", "one"], "bbbbbb": ["two"], "cccccc": []})
        [_, other] = (await one.connections())["aaaaaa"].live
        self.assertEqual((other.process, other.host, other.address), (two.id, "machine", "192.0.2.1:5"))

    async def test_another_instance_of_a_rack_is_found_with_whatever_process_it_is_linked(self) -> None:
        one, two = await self.start("one"), await self.start("two")
        one.linked("aaaaaa", "192.0.2.1:4", "first")
        one.linked("bbbbbb", "192.0.2.2:4")  # one that is too old to say which instance it is
        await self.rows_are(("one", "aaaaaa"), ("one", "bbbbbb"))
        found = await two.elsewhere("aaaaaa", "second")
        assert found is not None
        self.assertEqual((found.name, found.address), ("one", "192.0.2.1:4"))
        self.assertEqual(await two.elsewhere("aaaaaa", ""), found)  # a copy may well say nothing
        for process, rack, instance in (
            (two, "aaaaaa", "first"), (two, "bbbbbb", "second"), (two, "cccccc", "x"), (one, "aaaaaa", "second"),
            (two, "bbbbbb", ""),
        ):  # fmt: skip
            self.assertIsNone(await process.elsewhere(rack, instance))
        one.linked("aaaaaa", "192.0.2.1:5", "second")
        one.linked("cccccc", "192.0.2.3:4", "any text, with \0, " + "x" * 60_000)
        await self.rows_are(("one", "aaaaaa"), ("one", "bbbbbb"), ("one", "cccccc"))
        self.assertIsNotNone(await two.elsewhere("cccccc", "another, with \0"))

        async def is_changed() -> bool:
            return await two.elsewhere("aaaaaa", "second") is None

        await self.until(is_changed)
        await self.age("one", STALE_SECONDS + 1)
        self.assertIsNone(await two.elsewhere("aaaaaa", "third"))

    async def test_a_link_that_ended_is_not_listed_by_anyone(self) -> None:
        one, two = await self.start("one"), await self.start("two")
        one.linked("aaaaaa", "192.0.2.1:4")
        await self.rows_are(("one", "aaaaaa"))
        one.unlinked("aaaaaa")
        self.assertEqual((await self.seen(one))["aaaaaa"], [])
        await self.rows_are()
        self.assertEqual((await self.seen(two))["aaaaaa"], [])

    async def test_the_rows_end_as_the_links_are_however_fast_they_change(self) -> None:
        one = await self.start("one")
        for turn in range(50):
            for rack in ("aaaaaa", "bbbbbb", "cccccc"):
                one.linked(rack, f"192.0.2.1:{turn + 1}")
            one.unlinked("bbbbbb")
            if turn % 7 == 0:
                await deferLater(reactor, 0)
        one.unlinked("cccccc")
        while one._writing is not None:
            await one._written()
        await self.rows_are(("one", "aaaaaa"))
        row = await self.database.one("SELECT address FROM rack_connection")
        self.assertEqual(row, ("192.0.2.1:50",))

    async def test_a_statement_of_an_earlier_link_changes_nothing(self) -> None:
        one = await self.start("one")
        one.linked("aaaaaa", "192.0.2.1:4")
        earlier = dict(one._linked)
        one.linked("aaaaaa", "192.0.2.1:5")

        async def is_later() -> bool:
            return await self.database.one("SELECT address FROM rack_connection") == ("192.0.2.1:5",)

        await self.until(is_later)
        await self.database.transact(lambda transaction: one._store(earlier, [], transaction))
        self.assertEqual(await self.database.one("SELECT address FROM rack_connection"), ("192.0.2.1:5",))

    async def test_a_process_without_a_heartbeat_is_not_listed_and_then_deleted_by_another(self) -> None:
        one, two = await self.start("one"), await self.start("two")
        two.linked("aaaaaa", "192.0.2.1:4")
        await self.rows_are(("two", "aaaaaa"))
        await self.age("two", STALE_SECONDS - 5)
        self.assertEqual((await self.seen(one))["aaaaaa"], ["two"])
        await self.age("two", STALE_SECONDS)
        self.assertEqual((await self.seen(one))["aaaaaa"], [])
        await self.beat(one)
        await self.rows_are()
        self.assertEqual(set(one.endpoints()), {one.id})
        ended = (await one.connections())["aaaaaa"].ended
        self.assertIsNotNone(ended)

    async def test_a_process_that_died_before_the_clock_was_set_back_does_not_live_on(self) -> None:
        one, two = await self.start("one"), await self.start("two")
        two.linked("aaaaaa", "192.0.2.1:4")
        await self.rows_are(("two", "aaaaaa"))
        await self.age("two", -3600)
        self.assertEqual((await self.seen(one))["aaaaaa"], [])
        await self.beat(one)
        await self.rows_are()

    async def test_a_process_that_starts_again_takes_the_place_of_what_ran_before_at_once(self) -> None:
        before = await self.start("one")
        before.linked("aaaaaa", "192.0.2.1:4")
        await self.rows_are(("one", "aaaaaa"))
        before._beating.stop()  # kill -9
        after = await self.start("one")
        self.assertNotEqual(before.id, after.id)
        self.assertEqual(await self.rows(), set())
        other = await self.start("other")
        self.assertEqual((await self.seen(other))["aaaaaa"], [])

    async def test_processes_elsewhere_that_use_the_same_path_are_others(self) -> None:
        one = await self.start("one", host="here", directory="state")
        two = await self.start("two", host="there", directory="state")
        await self.beat(one)
        self.assertEqual(set(one.endpoints()), {one.id, two.id})

    async def test_one_that_was_taken_for_dead_comes_back_with_all_its_links(self) -> None:
        one, two = await self.start("one"), await self.start("two")
        two.linked("aaaaaa", "192.0.2.1:4")
        await self.rows_are(("two", "aaaaaa"))
        await self.age("two", 2 * STALE_SECONDS)
        await self.beat(one)
        self.assertEqual(await self.rows(), set())
        two.linked("bbbbbb", "192.0.2.2:4")  # it has no row to hang this on
        await self.beat(two)
        await self.rows_are(("two", "aaaaaa"), ("two", "bbbbbb"))
        self.assertEqual(await self.seen(one), {"aaaaaa": ["two"], "bbbbbb": ["two"], "cccccc": []})

    async def test_one_that_stops_leaves_nothing(self) -> None:
        one, two = await self.start("one"), await self.start("two")
        two.linked("aaaaaa", "192.0.2.1:4")
        await two.stop()
        self.assertEqual(await self.rows(), set())
        await self.beat(one)
        self.assertEqual(set(one.endpoints()), {one.id})

    async def test_a_rack_that_was_forgotten_meanwhile_does_not_keep_the_others_from_being_written(self) -> None:
        one = await self.start("one")
        await RackStore(self.database).forget("aaaaaa")
        for rack in ("aaaaaa", "bbbbbb", "zzzzzz"):
            one.linked(rack, "192.0.2.1:4")
        await self.rows_are(("one", "bbbbbb"))

    async def test_what_the_database_did_not_take_is_written_at_a_heartbeat(self) -> None:
        one = await self.start("one")
        await self.database.execute("ALTER TABLE rack_connection RENAME TO away")
        one.linked("aaaaaa", "192.0.2.1:4")
        await one._written()
        await self.database.execute("ALTER TABLE away RENAME TO rack_connection")
        self.assertEqual(await self.rows(), set())
        self.clock.advance(HEARTBEAT_SECONDS)
        await self.rows_are(("one", "aaaaaa"))

    async def test_heartbeats_go_on_when_one_fails(self) -> None:
        one = await self.start("one")
        await self.database.execute("ALTER TABLE region_process RENAME TO away")
        await self.beat(one)
        await self.database.execute("ALTER TABLE away RENAME TO region_process")
        await self.age("one", 8)
        self.clock.advance(HEARTBEAT_SECONDS)

        async def young() -> bool:
            row = await self.database.one("SELECT clock_timestamp() - heartbeat < interval '5 s' FROM region_process")
            return row == (True,)

        await self.until(young)
        self.assertTrue(one._beating.running)

    async def test_a_process_on_another_machine_must_advertise_to_be_told_of(self) -> None:
        one = await self.start("one", host="here", endpoint="*:1")
        same = await self.start("same", host="here", endpoint="*:2")
        silent = await self.start("silent", host="there", endpoint="*:3")
        loud = await self.start("loud", host="there", endpoint="r.example.com:4")
        await self.beat(one)
        self.assertEqual(
            one.endpoints(), {one.id: ["*:1"], same.id: ["*:2"], silent.id: [], loud.id: ["r.example.com:4"]}
        )
