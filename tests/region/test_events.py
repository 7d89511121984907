"""The racks' events in the region: stored once, in order, not for ever; and read as clients of MAAS read them."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from region.api import Api, Authenticator
from region.api.events import created
from region.database import DatabaseUnavailable
from region.events import CLEAN_SECONDS, EventCleaner, EventStore, NotEnrolled, StoredEvent, record
from rpc.events import MAX_DESCRIPTION, MAX_TYPE, Event, InvalidEvent, Kind, Level, plain, read_event
from tests.database import DatabaseTestCase
from tests.region.fakes import Keys
from tests.region.machines import make_node
from tests.region.web import Connection, Response

EPOCH, OTHER = "a" * 32, "b" * 32


def event(sequence: int, description: str = "", *, epoch: str = EPOCH, level: int = 20) -> Event:
    return Event(epoch, sequence, "Sync ended", level, description or f"number {sequence}", 1e9 + sequence)


class StoreTests(DatabaseTestCase):
    def setUp(self) -> Any:
        ready = super().setUp()
        self.store = EventStore(self.database)
        return ready.addCallback(lambda _: self.run_async(self.enrol("aaaaaa", "bbbbbb")))

    async def enrol(self, *racks: str) -> None:
        for rack in racks:
            await self.database.execute(
                "INSERT INTO rack (system_id, name, certificate_sha256) VALUES (%s, %s, %s)",
                (rack, f"rack-{rack}", rack),
            )

    async def rows(self) -> list[tuple[Any, ...]]:
        return await self.database.query("SELECT rack, epoch, sequence, description FROM event ORDER BY id")

    async def sequences(self) -> list[int]:
        return [row[2] for row in await self.rows()]

    async def test_what_is_answered_is_stored_as_it_was_sent(self) -> None:
        self.assertEqual(await self.store.store("aaaaaa", [event(5), event(6, level=40)]), [f"{EPOCH}-5", f"{EPOCH}-6"])
        [newer, older] = await self.store.query()
        self.assertEqual((older.source, older.hostname, older.type), ("aaaaaa", "rack-aaaaaa", "Sync ended"))
        self.assertEqual(older.occurred, datetime.fromtimestamp(1e9 + 5, UTC))
        self.assertEqual((newer.level, newer.description), (40, "number 6"))

    async def test_what_happens_on_a_region_process_is_found_by_its_name_and_among_all(self) -> None:
        await self.store.tell("region-2", Kind("Damage found", Level.ERROR), "The file x is wrong.\x00")
        for wanted in ({"sources": ["region-2"]}, {"hostnames": ["region-2"]}, {"sources": ["region"]}, {}):
            (found,) = await self.store.query(**cast(Any, wanted))
            self.assertEqual((found.source, found.hostname, found.type), ("region", "region-2", "Damage found"))
            self.assertEqual(found.description, "The file x is wrong.\\x00")

    async def test_what_is_sent_again_is_answered_and_not_stored_again(self) -> None:
        await self.store.store("aaaaaa", [event(5), event(6)])
        self.assertEqual(len(await self.store.store("aaaaaa", [event(5), event(6), event(7)])), 3)
        self.assertEqual(await self.sequences(), [5, 6, 7])

    async def test_what_is_sent_again_after_it_was_deleted_for_its_age_is_not_stored_again(self) -> None:
        await self.store.store("aaaaaa", [event(5)])
        await self.store.forget_old(keep_days=1, keep_rows=0)
        self.assertEqual(len(await self.store.store("aaaaaa", [event(5), event(6)])), 2)
        self.assertEqual(await self.sequences(), [6])

    async def test_what_one_link_has_held_up_does_not_come_in_after_what_another_has_brought(self) -> None:
        await self.store.store("aaaaaa", [event(7)])
        await self.store.store("aaaaaa", [event(5), event(6)])
        self.assertEqual(await self.sequences(), [7])

    async def test_a_rack_whose_disk_was_emptied_begins_anew(self) -> None:
        await self.store.store("aaaaaa", [event(7)])
        await self.store.store("aaaaaa", [event(7, epoch=OTHER), event(8, epoch=OTHER)])
        self.assertEqual(await self.sequences(), [7, 7, 8])

    async def test_a_batch_that_is_out_of_order_or_has_one_twice_is_stored_in_order_and_once(self) -> None:
        await self.store.store("aaaaaa", [event(3), event(1), event(2), event(3)])
        self.assertEqual(await self.sequences(), [1, 2, 3])

    async def test_the_same_batch_at_the_same_time_over_many_links_is_stored_once(self) -> None:
        batch = [event(number) for number in range(1, 51)]
        storing = [self.run_async(self.store.store("aaaaaa", batch)) for _ in range(8)]
        storing += [self.run_async(self.store.store("bbbbbb", batch)) for _ in range(8)]
        await gatherResults(storing)
        rows = await self.rows()
        for rack in ("aaaaaa", "bbbbbb"):
            self.assertEqual([row[2] for row in rows if row[0] == rack], list(range(1, 51)))

    async def test_of_two_that_are_stored_at_once_the_one_with_the_higher_ids_is_seen_last(self) -> None:
        # Whoever reads on after the last id that he saw would miss those that become visible later with a lower one.
        held: Deferred[None] = Deferred()

        async def slow(transaction: Any) -> None:
            await transaction.query("SELECT pg_advisory_xact_lock(%s, %s)", (0x5354414E, 4))
            await held

        holding = self.run_async(self.database.transact(slow))
        storing = self.run_async(self.store.store("aaaaaa", [event(1)]))
        for _ in range(3):
            self.assertEqual(await self.store.query(), [])
        held.callback(None)
        await holding
        await storing
        self.assertEqual(len(await self.store.query()), 1)

    async def test_events_of_a_rack_that_is_not_enrolled_are_not_stored(self) -> None:
        for rack in ("cccccc", "bbbbbb"):
            await self.database.execute("UPDATE rack SET revoked = now() WHERE system_id = 'bbbbbb'")
            try:
                await self.store.store(rack, [event(1)])
            except NotEnrolled as error:
                self.assertIn(rack, str(error))
            else:
                self.fail("it was stored")
        self.assertEqual(await self.rows(), [])

    async def test_a_rack_that_is_forgotten_leaves_its_events(self) -> None:
        await self.store.store("aaaaaa", [event(1)])
        await self.database.execute("DELETE FROM rack WHERE system_id = 'aaaaaa'")
        self.assertEqual([each.hostname for each in await self.store.query()], ["rack-aaaaaa"])

    async def test_text_that_no_database_takes_is_stored_with_escapes_and_within_bounds(self) -> None:
        hostile = [
            "\x00",
            "\ud800 half",
            "x" * 5000,
            "\x00" * 5000,
            "\N{COLLISION SYMBOL}" * 3000,
            "%s %(x)s {}",
            "\n'\"\\",
        ]
        sent = [
            read_event({**event(number).document, "description": text, "type": f"\x00{number}"})
            for number, text in enumerate(hostile, 1)
        ]
        self.assertEqual(len(await self.store.store("aaaaaa", sent)), len(hostile))
        stored = [each.description for each in reversed(await self.store.query())]
        self.assertEqual(stored[:2], ["\\x00", "\\ud800 half"])
        self.assertEqual(stored[-2:], hostile[-2:])
        self.assertLessEqual(max(map(len, stored)), MAX_DESCRIPTION)

    async def test_what_is_too_old_goes_and_what_is_too_much_goes_oldest_first(self) -> None:
        await self.store.store("aaaaaa", [event(number) for number in range(1, 11)])
        await self.database.execute("UPDATE event SET received = now() - interval '3 days' WHERE sequence <= 2")
        self.assertEqual(await self.store.forget_old(keep_days=2, keep_rows=100), 2)
        self.assertEqual(await self.store.forget_old(keep_days=2, keep_rows=5), 3)
        self.assertEqual(await self.sequences(), [6, 7, 8, 9, 10])
        self.assertEqual(await self.store.forget_old(keep_days=2, keep_rows=5), 0)

    async def test_how_far_a_rack_s_events_came_is_kept_as_long_as_it_is_enrolled(self) -> None:
        await self.store.store("aaaaaa", [event(1)])
        await self.store.store("bbbbbb", [event(1)])
        await self.database.execute("UPDATE event_source SET changed = now() - interval '3 days'")
        await self.database.execute("DELETE FROM rack WHERE system_id = 'bbbbbb'")
        await self.store.forget_old(keep_days=2, keep_rows=100)
        self.assertEqual(await self.database.query("SELECT rack FROM event_source"), [("aaaaaa",)])

    async def test_a_query_is_by_level_rack_and_neighbours(self) -> None:
        for number in range(1, 7):
            await self.store.store("aaaaaa" if number % 2 else "bbbbbb", [event(number, level=10 * number)])
        found = await self.store.query()
        ids = {each.level // 10: each.id for each in found}

        async def levels(**wanted: Any) -> list[int]:
            return [each.level // 10 for each in await self.store.query(**wanted)]

        self.assertEqual(await levels(), [6, 5, 4, 3, 2, 1])
        self.assertEqual(await levels(level=30), [6, 5, 4, 3])
        self.assertEqual(await levels(sources=["aaaaaa"]), [5, 3, 1])
        self.assertEqual(await levels(sources=["rack-bbbbbb", "nobody"]), [6, 4, 2])
        self.assertEqual(await levels(limit=2), [6, 5])
        self.assertEqual(await levels(limit=2, before=ids[5]), [4, 3])
        self.assertEqual(await levels(limit=2, after=ids[2]), [4, 3])
        self.assertEqual(await levels(after=ids[6]), [])
        self.assertEqual(await levels(limit=2, level=20, sources=["aaaaaa"], before=ids[6]), [5, 3])
        self.assertEqual(await levels(limit=2, sources=["aaaaaa", "rack-bbbbbb"], after=ids[3]), [5, 4])
        self.assertEqual(await levels(hostnames=["rack-aaaaaa"]), [5, 3, 1])
        self.assertEqual(await levels(sources=["aaaaaa", "bbbbbb"], hostnames=["rack-bbbbbb"]), [6, 4, 2])
        self.assertEqual(await levels(mac_addresses=["00:16:3e:00:00:01"]), [])

    async def test_a_node_s_event_stands_beside_those_of_racks_and_is_found_by_what_the_node_has(self) -> None:
        node = await make_node(self.database, "cccccc")
        await self.database.execute(
            "INSERT INTO interface (node_id, name, mac_address) VALUES (%s, 'eth0', '00:16:3e:00:00:0a')", (node.id,)
        )
        await self.store.store("aaaaaa", [event(1)])
        kind = Kind("Node changed status", Level.INFO)

        async def happening(transaction: Any) -> None:
            await record(transaction, node, kind, "x" * 5000 + "\x00", correlation="c" * 16, username="someone")

        await self.database.transact(happening)
        await self.database.execute("UPDATE node SET hostname = 'another' WHERE id = %s", (node.id,))
        [newest, oldest] = await self.store.query()
        self.assertEqual((newest.source, newest.hostname, newest.level), ("cccccc", "node-cccccc", Level.INFO))
        self.assertEqual((newest.correlation, newest.username), ("c" * 16, "someone"))
        self.assertEqual(len(newest.description), MAX_DESCRIPTION)
        self.assertEqual((oldest.source, oldest.correlation), ("aaaaaa", ""))
        for wanted in (
            {"sources": ["cccccc"]}, {"sources": ["node-cccccc"]}, {"hostnames": ["node-cccccc"]},
            {"mac_addresses": ["00:16:3E:00:00:0A"]}, {"sources": ["cccccc"], "mac_addresses": ["00:16:3e:00:00:0a"]},
        ):  # fmt: skip
            found = await self.store.query(**cast(Any, wanted))
            self.assertEqual([each.id for each in found], [newest.id], wanted)
        self.assertEqual(await self.store.query(sources=["aaaaaa"], mac_addresses=["00:16:3e:00:00:0a"]), [])

    async def test_of_two_nodes_events_that_are_written_at_once_the_one_with_the_higher_id_is_seen_last(self) -> None:
        one, other = await make_node(self.database, "cccccc"), await make_node(self.database, "dddddd")
        kind, held, order = Kind("Node changed status", Level.INFO), Deferred[None](), list[str]()

        async def slow(transaction: Any) -> None:
            await record(transaction, one, kind, "first")
            order.append("first")
            await held

        async def quick(transaction: Any) -> None:
            await record(transaction, other, kind, "second")
            order.append("second")

        writing = [self.run_async(self.database.transact(each)) for each in (slow, quick)]
        while not order:
            await self.database.query("SELECT 1")
        self.assertEqual(await self.store.query(), [])
        held.callback(None)
        await gatherResults(writing)
        self.assertEqual([each.description for each in reversed(await self.store.query())], order)


class FakeEvents:
    """A store that has ``found``, and notes what it is asked."""

    def __init__(self) -> None:
        self.found: list[StoredEvent] = []
        self.asked: dict[str, Any] = {}

    async def query(self, **wanted: Any) -> list[StoredEvent]:
        self.asked = wanted
        return self.found


class FakeParts:
    def __init__(self) -> None:
        self.events = FakeEvents()


class ApiTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.parts = FakeParts()
        self.api = Api(cast(Any, self.parts), Authenticator(Keys(), Clock()))
        when = datetime(2025, 7, 24, 8, 1, 49, 500, UTC)
        self.parts.events.found = [
            StoredEvent(12, "aaaaaa", "rack-1", "Sync failed", 40, "Why.", when, when),
            StoredEvent(9, "aaaaaa", "rack-1", "Sync started", 20, "Now.", when, when),
        ]

    def ask(self, query: str) -> Response:
        connection = Connection(self.api.resource(), Clock())
        connection.send("GET", f"events/?{query}")
        return connection.response()

    def test_the_answer_is_as_clients_of_maas_read_it(self) -> None:
        body = self.ask("op=query").json
        self.assertEqual((body["count"], len(body["events"])), (2, 2))
        self.assertEqual(
            body["events"][0],
            {
                "username": "", "node": "aaaaaa", "hostname": "rack-1", "id": 12, "level": "ERROR",
                "created": "Thu, 24 Jul. 2025 08:01:49", "type": "Sync failed", "description": "Why.",
                "correlation": "",
            },
        )  # fmt: skip
        # As libmaas reads it.
        datetime.strptime(body["events"][0]["created"], "%a, %d %b. %Y %H:%M:%S")  # noqa: DTZ007  # MAAS's form has none

    def test_the_neighbouring_pages_keep_what_was_asked_for(self) -> None:
        body = self.ask("op=query&level=WARNING&id=aaaaaa&id=bbbbbb&limit=2&before=50").json
        older, newer = urlsplit(body["prev_uri"]), urlsplit(body["next_uri"])
        self.assertEqual((older.path, newer.path), ("/MAAS/api/2.0/events/", "/MAAS/api/2.0/events/"))
        kept = {"op": ["query"], "level": ["WARNING"], "id": ["aaaaaa", "bbbbbb"], "limit": ["2"]}
        self.assertEqual(parse_qs(older.query), kept | {"before": ["9"]})
        self.assertEqual(parse_qs(newer.query), kept | {"after": ["12"]})

    def test_from_an_empty_page_one_can_go_on(self) -> None:
        self.parts.events.found = []
        for query, older, newer in (("", 1, 0), ("&before=5", 5, 4), ("&after=12", 13, 12), ("&before=0", 0, 0)):
            body = self.ask("op=query" + query).json
            self.assertEqual(body["count"], 0)
            self.assertTrue(body["prev_uri"].endswith(f"before={older}"), body)
            self.assertTrue(body["next_uri"].endswith(f"after={newer}"), body)

    def test_what_is_asked_for_is_passed_on_with_maas_s_defaults(self) -> None:
        self.ask("op=query")
        self.assertEqual(
            self.parts.events.asked,
            {
                "level": 20, "limit": 100, "before": None, "after": None,
                "sources": (), "hostnames": (), "mac_addresses": (),
            },
        )  # fmt: skip
        self.ask("op=query&level=error&limit=1000&after=0&id=aaaaaa&hostname=rack-2&mac_address=00:16:3e:00:00:01")
        self.assertEqual(
            self.parts.events.asked,
            {
                "level": 40, "limit": 1000, "before": None, "after": 0,
                "sources": ("aaaaaa",), "hostnames": ("rack-2",), "mac_addresses": ("00:16:3e:00:00:01",),
            },
        )  # fmt: skip
        self.ask("op=query&level=30")
        self.assertEqual(self.parts.events.asked["level"], Level.WARNING)

    def test_what_cannot_be_answered_is_refused_with_the_reason(self) -> None:
        for query, said in (
            ("op=query&limit=1001", "1001"), ("op=query&limit=0", "0 is less"), ("op=query&level=LOUD", "'CRITICAL'"),
            ("op=query&level=25", "25"), ("op=query&before=1&after=2", "undetermined"), ("op=query&before=x", "'x'"),
            ("op=query&zone=here", "no such parameter"), ("", "op"),
        ):  # fmt: skip
            response = self.ask(query)
            self.assertEqual(response.status, 400, query)
            self.assertIn(said, response.text)

    def test_the_form_of_a_time_does_not_depend_on_anything(self) -> None:
        self.assertEqual(created(datetime(2026, 1, 4, 0, 0, 0, 0, UTC)), "Sun, 04 Jan. 2026 00:00:00")


class CleanerTests(SynchronousTestCase):
    def test_it_deletes_at_the_start_and_every_hour_also_after_a_failure(self) -> None:
        clock, calls = Clock(), list[float]()

        async def forget_old() -> int:
            calls.append(clock.seconds())
            if len(calls) == 2:
                raise DatabaseUnavailable("away")
            return 3

        cleaner = EventCleaner(forget_old, clock)
        cleaner.start()
        clock.pump([CLEAN_SECONDS] * 2)
        self.assertEqual(calls, [0.0, CLEAN_SECONDS, 2 * CLEAN_SECONDS])
        cleaner.stop()
        clock.advance(CLEAN_SECONDS)
        self.assertEqual(len(calls), 3)


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


class ValueTests(SynchronousTestCase):
    @settings(deadline=None)
    @given(st.text(), st.integers(1, 100))
    def test_plain_text_fits_a_database_and_its_bound(self, text: str, limit: int) -> None:
        found = plain(text, limit)
        self.assertLessEqual(len(found), limit)
        self.assertNotIn("\x00", found)
        found.encode("utf-8")

    @settings(deadline=None)
    @given(st.fixed_dictionaries({}, optional=dict.fromkeys(event(1).document, ANY_JSON)) | ANY_JSON)
    def test_whatever_is_sent_as_an_event_is_one_or_is_refused(self, document: Any) -> None:
        for given_ in (document, {**event(1).document, **document} if isinstance(document, dict) else document):
            try:
                found = read_event(given_)
            except InvalidEvent as error:
                self.assertTrue(re.match("an event|event ", str(error)), error)
                continue
            self.assertTrue(1 <= len(found.type) <= MAX_TYPE)
            self.assertLessEqual(len(found.description), MAX_DESCRIPTION)
            self.assertEqual(read_event(found.document), found)
