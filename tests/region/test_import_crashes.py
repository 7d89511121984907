"""A region that is killed, loses power, its database or its disk at any step of an import: file changes and statements.

Each import is one process's: a database of connections of its own, and all that an importer is made of. When it is
killed, all of that is dropped, its connections are cut and its files closed, and another one begins.
"""

from __future__ import annotations

import errno
import hashlib
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psycopg2
from twisted.internet import reactor as installed_reactor
from twisted.internet.defer import Deferred, DeferredList, fail
from twisted.internet.task import Clock

from region.database import Database, DatabaseUnavailable
from region.database.connection import Connection
from region.images.disk import free_bytes
from region.images.importer import Importer
from region.images.sources import SourceStore
from region.images.store import GenerationStore
from region.upstream import DocumentSeen, SourceRead, UpstreamImage
from rpc.blobs import BlobStore
from rpc.fetch import Fetcher
from rpc.manifest import Image, Manifest, parse_manifest
from tests.crashes import TALLY
from tests.database import DatabaseTestCase
from tests.examples import SOAK
from tests.faults import Crash, Disk, Loss, any_loss, disarmed, places
from tests.region.importing import EVERYTHING, SOURCE, UPDATED, FakeReader, contents_of, image, inline

reactor: Any = installed_reactor

INTERVAL = 3600.0
STEPS = 4
"""How many of the steps are the place of a fault, for each kind of fault; all of them when soaking."""

LOST = errno.ECONNRESET
LOST_AFTERWARDS = errno.ECONNABORTED
NAMES = {LOST: "database killed before a statement", LOST_AFTERWARDS: "database killed after a statement"}


class WatchedImporter(Importer):
    """An importer of which one can wait for the imports that it asks for itself, too."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.asking: list[Deferred[None]] = []

    async def _queue(self, trigger: str) -> None:
        asked: Deferred[None] = Deferred()
        self.asking.append(asked)
        try:
            await super()._queue(trigger)
        finally:
            self.asking.remove(asked)
            asked.callback(None)

    async def when_at_rest(self) -> None:
        """Wait until nothing is asked for any more, and what was asked for has ended."""
        while self.asking:
            asked: Deferred[None] = Deferred()
            self.asking[0].addCallback(asked.callback)
            await asked
        await self.when_idle()


class HurriedClock(Clock):
    """A clock for fetching, whose waits are a thousandth of what they should be: for nobody here advances it."""

    def callLater(self, delay: float, callable: Any, *arguments: object, **options: object) -> Any:
        return reactor.callLater(delay / 1000, callable, *arguments, **options)


class Process:
    """What an importer is made of, as one process of a region has it."""

    def __init__(self, dsn: str, root: Path, upstream: Path, offered: Sequence[Image]) -> None:
        self.clock = Clock()
        self.database = Database(reactor, dsn, connect_timeout=0.2, wait_timeout=0.2)
        self.blobs = BlobStore(root)
        self.reader = FakeReader()
        documents = DocumentSeen("index", UPDATED, "0" * 64), DocumentSeen("com.example:download", UPDATED, "1" * 64)
        images = tuple(
            UpstreamImage(each, tuple((file.sha256, f"file://{upstream}/{file.sha256}") for file in each.files))
            for each in offered
        )
        self.reader.offers[SOURCE] = lambda source: SourceRead(source, images, documents=documents, problems=())
        fetcher = Fetcher(HurriedClock(), self.blobs, run_in_thread=inline, concurrency=2, jitter=lambda: 0.0)
        self.importer = WatchedImporter(
            self.database, SourceStore(self.database, run_in_thread=inline),
            GenerationStore(self.database, run_in_thread=inline), self.reader, fetcher, self.blobs, self.clock,
            interval=INTERVAL, at_start=True, run_in_thread=inline, free_bytes=free_bytes,
        )  # fmt: skip

    def drop(self) -> None:
        """Cut its connections; nothing that waits for them can do anything more."""
        self.database._stopped = True
        for connection in list(self.database._open):
            connection.close("the process was killed")

    async def stop(self) -> None:
        """End in an orderly way."""
        await self.importer.stop()
        await self.database.stop()
        self.blobs.close()


class CrashTestCase(DatabaseTestCase):
    """A region that has published, and something newer upstream, again and again."""

    timeout = 1200 if SOAK > 1 else 120

    def setUp(self) -> Deferred[None]:  # type: ignore[override]  # trial waits for it
        return super().setUp().addCallback(lambda _: self.run_async(self.set_up()))

    async def set_up(self) -> None:
        base = Path(self.mktemp()).absolute()
        self.root, self.upstream = base / "images", base / "upstream"
        self.root.mkdir(parents=True)
        self.upstream.mkdir()
        self.rng = random.Random(f"{self.id()}{random.random() if SOAK > 1 else ''}")
        self.number = 0
        self.died: Deferred[None] = Deferred()
        self.pid = os.getpid()
        self.changing: set[Connection] = set()
        await SourceStore(self.database, run_in_thread=inline).create(
            SOURCE, keyring_data=b"\x99keys", selections=EVERYTHING
        )
        await self.database.stop()
        self.control = psycopg2.connect(self.dsn)
        self.control.autocommit = True
        self.addCleanup(self.control.close)
        self.disk = Disk(self.root, self.stopping)
        self.disk.install(self.patch)
        self.patch(os, "getpid", lambda: self.pid)
        self.addCleanup(self.disk.close)
        run, test = Connection._run, self

        def statement(connection: Connection, sql: str, parameters: Any) -> Any:
            return test.statement(run, connection, sql, parameters)

        self.patch(Connection, "_run", statement)
        self.before = self.newest = Manifest(())
        self.publish()
        process = self.new()
        process.importer.start()
        await self.left_alone(process)

    def stopping(self, what: str) -> bool:
        reactor.callLater(0, self.died.callback, None)
        return False

    def statement(self, run: Any, connection: Connection, sql: str, parameters: Any) -> Any:
        """A statement is a step too; the errors of sockets stand for a database that is killed before or after it."""
        try:
            self.disk.step(self.kind(connection, sql.split()[0]), " ".join(sql.split())[:60])
        except OSError as error:
            if error.errno == errno.ENOSPC:
                return fail(DatabaseUnavailable(f"the database lacks resources: {error.strerror}"))
            if error.errno == LOST:
                self.cut()
                return run(connection, sql, parameters)
            running: Deferred[Any] = run(connection, sql, parameters)
            return running.addCallback(self.lost_afterwards, connection)
        return run(connection, sql, parameters)

    def kind(self, connection: Connection, word: str) -> str:
        """Whether the statement writes: one that begins with this word, or a commit after such."""
        if word in ("INSERT", "UPDATE", "DELETE"):
            self.changing.add(connection)
            return "change"
        if word == "BEGIN":
            self.changing.discard(connection)
        if word in ("COMMIT", "ROLLBACK") and connection in self.changing:
            self.changing.discard(connection)
            return "change" if word == "COMMIT" else "query"
        return "query"

    def lost_afterwards(self, result: object, connection: Connection) -> Any:
        self.cut()
        connection._lost_wire("server closed the connection unexpectedly")
        return fail(connection._unavailable())

    def cut(self) -> None:
        """End every session but the test's own, as the death of the server does, and wait until they have ended."""
        self.ask(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )

    def ask(self, sql: str, *parameters: object) -> list[tuple[Any, ...]]:
        with self.control.cursor() as cursor:
            cursor.execute(sql, parameters)
            rows: list[tuple[Any, ...]] = cursor.fetchall()
            return rows

    def publish(self) -> None:
        """Something newer upstream: an image in a new version, one that comes and goes, one that stays."""
        self.number += 1
        number = self.number
        offered = [image(version=f"2026{number:04}"), image("jammy", version=f"2025{number // 2:04}")]
        if number % 2:
            offered.append(image("focal", version=f"2024{number:04}"))
        for each in offered:
            name = f"{each.os}/{each.release}/{each.arch}/{each.version}".encode()
            for data in contents_of(name, b"").values():
                (self.upstream / hashlib.sha256(data).hexdigest()).write_bytes(data)
        self.offered = offered
        self.before, self.newest = self.newest, Manifest(offered)

    def new(self) -> Process:
        """Another process, with a number of its own."""
        self.pid += 1
        return Process(self.dsn, self.root, self.upstream, self.offered)

    async def idle(self, process: Process) -> None:
        """Wait until it does nothing any more, or is dead."""
        died: Deferred[None] = Deferred()
        self.died.addCallback(died.callback)
        at_rest = Deferred.fromCoroutine(process.importer.when_at_rest())
        await DeferredList([at_rest, died], fireOnOneCallback=True)

    async def mended(self, process: Process, lasting: bool) -> None:
        """A fault that lasts has an import fail once more; when it is gone, all comes right."""
        if lasting:
            process.clock.advance(INTERVAL)  # in vain
            await self.idle(process)
            with disarmed(self.disk):
                self.assert_whole()
        await self.left_alone(process)

    async def left_alone(self, process: Process) -> None:
        """Let it be, at first for a moment and then for hours; it has the newest images then, and nothing else."""
        self.disk.disarm()
        self.flush()
        for _ in range(4):
            await process.importer.when_at_rest()
            if self.current() == self.newest.digest and not self.ask("SELECT 1 FROM import_job WHERE ended IS NULL"):
                break
            process.clock.advance(INTERVAL)
        process.clock.advance(INTERVAL)  # one that changes nothing, but cleans up
        await process.importer.when_at_rest()
        self.assert_settled()
        await process.stop()

    # What must be so

    def where(self) -> str:
        """For messages: where the fault was, and what was done before."""
        return f"fault at {self.disk.met[:9]} after {self.disk.said[-6:]}; imports: {self.jobs()}"

    def jobs(self) -> list[tuple[Any, ...]]:
        return self.ask("SELECT state, outcome FROM import_job ORDER BY id DESC LIMIT 2")

    def current(self) -> str:
        rows = self.ask("SELECT digest FROM current_generation JOIN generation ON number = generation")
        return str(rows[0][0]) if rows else ""

    def held(self) -> set[str]:
        """The contents of all generations that may still be read."""
        found: set[str] = set()
        for digest, manifest in self.ask("SELECT digest, manifest FROM generation WHERE retired IS NULL"):
            found |= parse_manifest(bytes(manifest), digest).blobs.keys()
        return found

    def assert_whole(self) -> None:
        """Each image is current as it was or as it is now, none is missing, and every file that anyone may read is
        there and right."""
        [(digest, data)] = self.ask(
            "SELECT digest, manifest FROM current_generation JOIN generation ON number = generation"
        )
        current = parse_manifest(bytes(data), digest)
        self.assertLessEqual(set(current.images), {*self.before.images, *self.newest.images}, self.where())
        lasting = self.before.by_key.keys() & self.newest.by_key.keys()
        self.assertLessEqual(lasting, current.by_key.keys(), self.where())
        blobs = self.root / "blobs"
        self.assertLessEqual(self.held(), set(os.listdir(blobs)), self.where())
        for path in blobs.iterdir():
            self.assertEqual(hashlib.sha256(path.read_bytes()).hexdigest(), path.name, self.where())

    def assert_settled(self) -> None:
        """The newest images are current, every import has ended and says how, and nothing is left over."""
        self.assertEqual(self.current(), self.newest.digest, self.where())
        self.assertEqual(self.ask("SELECT * FROM import_job WHERE ended IS NULL OR outcome = ''"), [], self.where())
        self.assertLessEqual(len(self.ask("SELECT 1 FROM generation WHERE retired IS NULL")), 2)
        self.assertEqual(set(os.listdir(self.root / "blobs")), self.held(), self.where())
        for name in ("partial", "quarantine"):
            self.assertEqual(os.listdir(self.root / name), [], self.where())
        left = set(os.listdir(self.root)) - {"blobs", "partial", "quarantine", "verified.log"}
        self.assertEqual(left, set(), self.where())

    def assert_said(self, error: int) -> None:
        """An import that ended without publishing what is new says why. One that lost its database did not end yet."""
        if not self.disk.met or self.current() == self.newest.digest:
            return
        for number, outcome in self.ask("SELECT id, outcome FROM import_job WHERE ended IS NOT NULL"
                                        " ORDER BY id DESC LIMIT 1"):  # fmt: skip
            if any(met.startswith(("change", "query")) for met in self.disk.met):
                continue
            reasons = [reason for (reason,) in self.ask("SELECT reason FROM import_problem WHERE job_id = %s", number)]
            self.assertIn(os.strerror(error), " ".join([outcome, *reasons]), self.where())

    def flush(self) -> None:
        """What was logged with a traceback came of the fault, and of nothing else."""
        for failure in self.flushLoggedErrors():
            self.assertTrue(failure.check(Crash, OSError, DatabaseUnavailable), failure.getTraceback())

    # The history of one fault

    async def run_with_fault(self, at: int | None, error: int | None = None, *, lasting: bool = False) -> Process:
        """One process that has something to import, with a fault at step ``at``."""
        self.died = Deferred()
        self.disk.arm(at, error, lasting)
        process = self.new()
        process.importer.start()
        await self.idle(process)
        return process

    async def steps(self, error: int | None = None) -> list[int]:
        """The places of the faults of one kind: of the longest of the imports, which differ a little."""
        said: list[str] = []
        for _ in range(2):
            self.publish()
            process = await self.run_with_fault(None)
            said = max(said, list(self.disk.said), key=len)
            await self.left_alone(process)
        self.assertGreater(len(said), 80)
        return places(said, error, 0 if SOAK > 1 else STEPS, self.rng)

    def die(self, process: Process, loss: Loss | None) -> None:
        TALLY.injected(self.disk, "region: power" if loss else "region: kill")
        process.drop()
        self.cut()
        self.disk.restart()
        if loss is not None:
            self.disk.lose_power(loss)
        for path in self.root.glob("*.new"):
            os.utime(path, (0, 0))  # time goes by until somebody starts it again
        self.flush()
        self.assert_whole()

    async def crash(self, at: int, loss: Loss | None, again: int = 0) -> None:
        """Kill an import, and with ``again`` also what follows it, at a step; then leave the region alone."""
        self.publish()
        process = await self.run_with_fault(at)
        if self.disk.stopped:
            self.die(process, loss)
            if again:
                process = await self.run_with_fault(again)
                if self.disk.met:
                    self.die(process, loss)
                else:
                    self.disk.disarm()
                    await process.stop()
            process = self.new()
            process.importer.start()
        await self.left_alone(process)


class KilledTests(CrashTestCase):
    async def test_killed_at_any_step_the_old_or_the_new_images_are_current_and_it_goes_on(self) -> None:
        for at in await self.steps():
            await self.crash(at, None)

    async def test_killed_at_any_step_and_again_in_what_follows(self) -> None:
        for at in (await self.steps())[:: 1 if SOAK > 1 else 2]:
            await self.crash(at, self.rng.choice((None, any_loss(self.rng))), self.rng.randrange(1, 100))

    async def test_without_power_at_any_step_nothing_that_was_published_is_lost(self) -> None:
        for at in await self.steps():
            await self.crash(at, any_loss(self.rng))


class FaultTests(CrashTestCase):
    """The old state stays, the import says why, the space is given back, and when the fault is gone it imports."""

    async def fail_at(self, at: int, error: int, *, lasting: bool) -> None:
        self.publish()
        process = await self.run_with_fault(at, error, lasting=lasting)
        with disarmed(self.disk):
            self.assert_whole()
            self.assert_said(error)
        if self.disk.met:
            TALLY.injected(self.disk, f"region: {NAMES.get(error, errno.errorcode[error])}")
        if self.disk.full:
            with disarmed(self.disk):
                self.assert_space_was_given_back()
        await self.mended(process, lasting)

    def assert_space_was_given_back(self) -> None:
        """There is nothing of files that were begun, and whole ones are of whole images."""
        self.assertEqual(os.listdir(self.root / "partial"), [], self.where())
        there = set(os.listdir(self.root / "blobs"))
        whole = [image for image in self.newest.images if {file.sha256 for file in image.files} <= there]
        self.assertLessEqual(there, self.held() | Manifest(whole).blobs.keys(), self.where())

    async def test_any_error_of_the_disk_at_any_step_once_is_said_and_made_good(self) -> None:
        for error in (errno.ENOSPC, errno.EIO, errno.EACCES):
            for at in await self.steps(error):
                await self.fail_at(at, error, lasting=False)

    async def test_any_error_of_the_disk_from_any_step_on_is_said_and_made_good_when_it_is_gone(self) -> None:
        for error in (errno.ENOSPC, errno.EIO, errno.EACCES):
            for at in await self.steps(error):
                await self.fail_at(at, error, lasting=True)

    async def test_a_database_that_dies_before_or_after_any_statement_is_waited_for(self) -> None:
        for error in (LOST, LOST_AFTERWARDS):
            for lasting in (False, True):
                for at in await self.steps(error):
                    await self.fail_at(at, error, lasting=lasting)


class UnreadableTests(CrashTestCase):
    """That something cannot be read says nothing of it: nothing is taken for damaged or missing, and it is said."""

    async def fail_at(self, at: int, error: int, *, lasting: bool) -> None:
        self.publish()
        self.died = Deferred()
        self.disk.arm(at, error, lasting, looks=True)
        process = self.new()
        process.importer.start()
        await self.idle(process)
        with disarmed(self.disk):
            self.assert_whole()
            self.assert_said(error)
            self.assertEqual(dict(process.blobs.damaged), {}, self.where())
        if self.disk.met:
            TALLY.injected(self.disk, f"region: {errno.errorcode[error]} on reading")
        await self.mended(process, lasting)

    async def looks(self) -> list[int]:
        """The places of the faults."""
        self.publish()
        self.disk.arm(looks=True)
        process = self.new()
        process.importer.start()
        await self.idle(process)
        said = list(self.disk.said)
        await self.left_alone(process)
        self.assertGreater(len(said), 50)
        return places(said, None, 0 if SOAK > 1 else STEPS, self.rng)

    async def test_any_error_of_reading_at_any_step_takes_nothing_away_and_is_said(self) -> None:
        for error in (errno.EIO, errno.EACCES):
            for lasting in (False, True):
                for at in await self.looks():
                    await self.fail_at(at, error, lasting=lasting)
