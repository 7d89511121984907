"""Events from a rack's disk to the region's table, whatever happens on the way: once, in order, and losses counted."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import psycopg2
from attrs import define, field
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from hypothesis.strategies import booleans, data, integers
from twisted.internet.defer import Deferred, execute
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from rack.eventfile import EventFile
from rack.events import SAVE_AGAIN_SECONDS, Events
from rack.files import Files
from region.events import EventStore
from rpc.events import EVENTS_LOST, SYNC_ENDED, read_event
from rpc.outcomes import Answered, Failed, NotConnected, Outcome, TimedOut
from rpc.protocol import Peer
from tests.database import Server

P = ParamSpec("P")
T = TypeVar("T")

RACK = "aaaaaa"
PRODUCED = re.compile(r"happening (\d+)\.")
LOST = re.compile(r"(\d+) events? (?:was|were) lost")


class Blocking:
    """A database, and a transaction, that blocks: for a test that has no reactor."""

    def __init__(self, dsn: str) -> None:
        self.connection = psycopg2.connect(dsn)

    async def transact(self, function: Callable[[Any], Awaitable[T]]) -> T:
        with self.connection:
            return await function(self)

    async def query(self, sql: str, parameters: Any = ()) -> list[tuple[Any, ...]]:
        with self.connection.cursor() as cursor:
            cursor.execute(sql, parameters or None)
            rows: list[tuple[Any, ...]] = cursor.fetchall()
            return rows

    async def one(self, sql: str, parameters: Any = ()) -> tuple[Any, ...] | None:
        rows = await self.query(sql, parameters)
        return rows[0] if rows else None

    async def execute(self, sql: str, parameters: Any = ()) -> int:
        with self.connection.cursor() as cursor:
            cursor.execute(sql, parameters or None)
            count: int = cursor.rowcount
            return count


class Died(Exception):
    """The rack's process has ended here."""


class MortalFiles(Files):
    """A disk at whose ``steps_left``-th change the process dies; what it was adding then is there in part."""

    def __init__(self) -> None:
        self.steps_left: int | None = None
        self.cuts = False
        self.is_full = False

    @property
    def is_dead(self) -> bool:
        return self.steps_left == 0

    def _step(self) -> None:
        if self.steps_left is not None:
            self.steps_left = max(0, self.steps_left - 1)
            if self.is_dead:
                raise Died

    def append(self, path: Path, data: bytes) -> None:
        if self.is_full:
            super().append(path, data[: len(data) // 2])
            raise OSError(28, "No space left on device")
        try:
            self._step()
        except Died:
            super().append(path, data[: len(data) // 2])
            raise
        super().append(path, data)
        self._added = path, len(data)

    def sync(self, path: Path) -> None:
        try:
            self._step()
        except Died:
            if self.cuts and path.is_file() and path.suffix == ".events" and self._added[0] == path:
                super().truncate(path, path.stat().st_size - self._added[1] // 2)
            raise

    def truncate(self, path: Path, size: int) -> None:
        self._step()
        super().truncate(path, size)

    def write(self, path: Path, data: bytes) -> None:
        if self.is_full:
            raise OSError(28, "No space left on device")
        self._step()
        super().write(path, data)

    def rename(self, old: Path, new: Path) -> None:
        self._step()
        super().rename(old, new)

    def unlink(self, path: Path) -> None:
        self._step()
        super().unlink(path)


@define(eq=False)
class FakeLink:
    """A link on which nothing is answered unless the test says so."""

    world: World
    name: int
    peer: Peer = field(factory=lambda: Peer("region", "", "192.0.2.1:5250"))
    lost: list[Callable[[Any, str], object]] = field(factory=list)

    def on_lost(self, callback: Callable[[Any, str], object]) -> None:
        self.lost.append(callback)

    async def ask(self, command: Any, *, events: list[Mapping[str, Any]]) -> Outcome[Any]:
        call = Sent(self, events)
        self.world.sent.append(call)
        return await call.outcome


@define(eq=False)
class Sent:
    """A call: it may come to the region, late or twice, and its answer may come back, or it may not."""

    link: FakeLink
    documents: list[Mapping[str, Any]]
    outcome: Deferred[Outcome[Any]] = field(factory=Deferred)
    committed: list[str] | None = None

    def end(self, outcome: Outcome[Any]) -> None:
        if not self.outcome.called:
            self.outcome.callback(outcome)


def inline(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Deferred[T]:
    """What stands in for threads: the work is done at once."""
    return execute(function, *args, **kwargs)


def result(deferred: Deferred[T]) -> T:
    """What a Deferred that has fired already has."""
    results: list[Any] = []
    deferred.addBoth(results.append)
    [found] = results
    if hasattr(found, "raiseException"):
        found.raiseException()
    value: T = found
    return value


class World:
    """A rack's events, the links, and the region's table."""

    def __init__(self, dsn: str, root: Path, capacity: int = 3000) -> None:
        self.database = Blocking(dsn)
        self.run(self.database.transact(self._clear))
        database: Any = self.database
        self.store = EventStore(database)
        self.root = root
        self.capacity = capacity
        self.clock = Clock()
        self.links: list[FakeLink] = []
        self.sent: list[Sent] = []
        self.recorded = 0
        self.doubtful = 0
        self.start()

    async def _clear(self, transaction: Any) -> None:
        await transaction.execute("TRUNCATE event, event_source, rack CASCADE")
        await transaction.execute(
            "INSERT INTO rack (system_id, name, certificate_sha256) VALUES (%s, 'rack-1', 'x')", (RACK,)
        )

    @staticmethod
    def run(coroutine: Any) -> Any:
        return result(Deferred.fromCoroutine(coroutine))

    def start(self) -> None:
        self.files = MortalFiles()
        file = EventFile(self.root / "events", self.files, segment_bytes=600, now=self.clock.seconds)
        self.events = Events(
            file, self.clock, inline, now=self.clock.seconds, capacity=self.capacity, batch_bytes=700,
            jitter=lambda: 0.0,
        )  # fmt: skip
        self.run(self.events.open())

    def record(self, size: int) -> None:
        self.recorded += 1
        self.events.record(SYNC_ENDED, f"happening {self.recorded}. {'x' * size}")
        if self.files.is_dead:
            self.doubtful += 1

    def crash(self) -> None:
        """The process is gone, and starts again; what it had sent may still come to the region."""
        for call in self.sent:
            call.outcome = Deferred()
        self.links.clear()
        for timer in self.clock.getDelayedCalls():
            timer.cancel()
        self.start()

    def connect(self) -> None:
        link: Any = FakeLink(self, len(self.links))
        self.links.append(link)
        self.events.use(link)

    def cut(self, link: FakeLink) -> None:
        self.links.remove(link)
        lost: Any = link
        for callback in link.lost:
            callback(lost, "cut")
        for call in self.sent:
            if call.link is link:
                call.end(NotConnected(None))

    def deliver(self, call: Sent) -> None:
        """The region stores what was sent; its answer is not back yet."""
        call.committed = self.run(self.store.store(RACK, [read_event(each) for each in call.documents]))

    def answer(self, call: Sent) -> None:
        if call.committed is not None:
            call.end(Answered({"committed": call.committed}, 0.0))

    def stored(self) -> list[tuple[int, str, str]]:
        """Number, type and description of all that is in the table, in its order."""
        rows = self.run(
            self.database.transact(lambda tx: tx.query("SELECT sequence, type, description FROM event ORDER BY id"))
        )
        found: list[tuple[int, str, str]] = rows
        return found

    def check(self) -> tuple[int, int]:
        """What must hold at any time; how many events are stored, and how many are told to be lost."""
        rows = self.stored()
        numbers = [number for number, _, _ in rows]
        assert numbers == sorted(set(numbers)), f"not in order: {rows}"
        happenings = [int(found[1]) for _, _, text in rows if (found := PRODUCED.match(text))]
        assert happenings == sorted(set(happenings)), f"twice, or not in order: {happenings}"
        lost = [int(found[1]) for _, kind, text in rows if kind == EVENTS_LOST.type and (found := LOST.match(text))]
        assert len(happenings) + len(lost) == len(rows), rows
        return len(happenings), sum(lost)

    def drain(self) -> None:
        """Everything works now: until the region has all."""
        self.files.steps_left, self.files.is_full = None, False
        for link in list(self.links):
            self.cut(link)
        self.clock.advance(SAVE_AGAIN_SECONDS)
        self.connect()
        for _ in range(10_000):
            if not self.events.pending:
                return
            self.clock.advance(61)
            for call in [call for call in self.sent if not call.outcome.called and call.link in self.links]:
                self.deliver(call)
                self.answer(call)
        raise AssertionError(f"{self.events.pending} events are never sent")


class Machine(RuleBasedStateMachine):
    dsn = ""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory(prefix="stanchion-events-")
        self.world = World(self.dsn, Path(self.directory.name))

    @rule(size=integers(0, 200), count=integers(1, 8))
    def record(self, size: int, count: int) -> None:
        for _ in range(count):
            self.world.record(size)
            self.reborn()

    def reborn(self) -> None:
        if self.world.files.is_dead:
            self.world.crash()

    @rule()
    def connect(self) -> None:
        if len(self.world.links) < 3:
            self.world.connect()
            self.reborn()

    @precondition(lambda self: self.world.links)
    @rule(data=data())
    def cut(self, data: Any) -> None:
        links = self.world.links
        self.world.cut(links[data.draw(integers(0, len(links) - 1))])
        self.reborn()

    def one(self, data: Any) -> Sent:
        sent = self.world.sent[-6:]
        number: int = data.draw(integers(0, len(sent) - 1))
        return sent[number]

    @precondition(lambda self: self.world.sent)
    @rule(data=data())
    def arrives(self, data: Any) -> None:
        self.world.deliver(self.one(data))

    @precondition(lambda self: self.world.sent)
    @rule(data=data())
    def is_answered(self, data: Any) -> None:
        self.world.answer(self.one(data))
        self.reborn()

    @precondition(lambda self: self.world.sent)
    @rule()
    def goes_well(self) -> None:
        self.world.deliver(self.world.sent[-1])
        self.world.answer(self.world.sent[-1])
        self.reborn()

    @precondition(lambda self: self.world.sent)
    @rule(data=data(), in_time=booleans())
    def fails(self, data: Any, in_time: bool) -> None:
        self.one(data).end(Failed("Unhandled", "the database is away", 0.0) if in_time else TimedOut(30.0))
        self.reborn()

    @rule(seconds=integers(1, 100))
    def waits(self, seconds: int) -> None:
        self.world.clock.advance(seconds)
        self.reborn()

    @rule()
    def crashes(self) -> None:
        self.world.crash()

    @rule(steps=integers(1, 12), cuts=booleans())
    def will_die(self, steps: int, cuts: bool) -> None:
        self.world.files.steps_left, self.world.files.cuts = steps, cuts

    @invariant()
    def is_in_order_and_once(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        world = self.world
        try:
            world.drain()
            stored, lost = world.check()
            assert world.recorded - world.doubtful <= stored + lost <= world.recorded, (
                f"{world.recorded} events happened ({world.doubtful} as the rack died), but {stored} are stored and "
                f"{lost} told to be lost"
            )
        finally:
            world.database.connection.close()
            self.directory.cleanup()


class WorldTestCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.server = Server.instance()
        name = self.server.make_database()
        self.addCleanup(self.server.drop_database, name)
        self.dsn = self.server.dsn_of(name)

    def world(self, **options: Any) -> World:
        root = Path(self.mktemp()).absolute()
        root.mkdir(parents=True)
        world = World(self.dsn, root, **options)
        self.addCleanup(world.database.connection.close)
        return world


class MachineTests(WorldTestCase):
    def test_whatever_happens_each_event_is_stored_once_in_order_or_counted_as_lost(self) -> None:
        Machine.dsn = self.dsn
        run_state_machine_as_test(Machine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None))
        self.flushLoggedErrors(Died)


class FullTests(WorldTestCase):
    def test_a_full_buffer_drops_the_oldest_and_says_how_many_before_what_came_after(self) -> None:
        world = self.world()
        for _ in range(100):
            world.record(50)
        kept = world.events.pending
        self.assertLess(kept, 30)
        world.drain()
        rows = world.stored()
        self.assertEqual(len(rows), kept)
        stored, lost = world.check()
        self.assertEqual(stored + lost, 100)
        self.assertEqual(PRODUCED.match(rows[-1][2])[1], "100")  # type: ignore[index]  # it is one
        self.assertEqual(world.events.lost, lost)
        self.assertLess(sum(path.stat().st_size for path in (world.root / "events").iterdir()), 3 * world.capacity)

    def test_what_was_sent_is_not_dropped_for_the_region_may_have_it(self) -> None:
        world = self.world()
        world.connect()
        world.record(10)
        [call] = world.sent
        world.deliver(call)  # and the answer is lost
        world.cut(call.link)
        for _ in range(100):
            world.record(50)
        world.crash()
        world.drain()
        stored, lost = world.check()
        self.assertEqual(stored + lost, 101)
        self.assertEqual(PRODUCED.match(world.stored()[0][2])[1], "1")  # type: ignore[index]  # it is one

    def test_a_full_disk_does_not_keep_events_from_the_region(self) -> None:
        world = self.world()
        world.record(10)
        world.files.is_full = True
        world.record(10)
        world.connect()
        world.deliver(world.sent[-1])
        world.answer(world.sent[-1])
        self.assertEqual(world.check(), (2, 0))
        world.record(10)
        world.files.is_full = False
        world.clock.advance(SAVE_AGAIN_SECONDS)
        world.crash()
        world.drain()
        self.assertEqual(world.check(), (3, 0))
