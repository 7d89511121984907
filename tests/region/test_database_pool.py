"""The pool of database connections: results, transactions, and what callers get when something goes wrong."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from functools import partial
from typing import Any

import psycopg2
import psycopg2.errors
from psycopg2.extras import Json
from twisted.internet import reactor as installed_reactor
from twisted.internet.defer import CancelledError, Deferred, gatherResults
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import deferLater

from region.database import (
    CommitUnknown,
    Database,
    DatabaseUnavailable,
    Session,
    Transaction,
    TransactionAborted,
    connection,
    pool,
)
from region.database.connection import LARGE
from tests.database import DatabaseTestCase

reactor: Any = installed_reactor


class Reader:
    """Fires ``seen`` with what can be read from a socket."""

    def __init__(self, reading: socket.socket, seen: Deferred[bytes]) -> None:
        self.reading = reading
        self.seen = seen

    def fileno(self) -> int:
        return self.reading.fileno()

    def logPrefix(self) -> str:
        return "a reader"

    def connectionLost(self, reason: object) -> None:
        pass

    def doRead(self) -> None:
        self.seen.callback(self.reading.recv(1))


class PoolTestCase(DatabaseTestCase):
    async def kill_backend(self, pid: int) -> None:
        """End the server's side of a connection and wait until it is gone."""
        await self.control.query("SELECT pg_terminate_backend(%s, 10000)", (pid,))

    async def raised(self, kind: type[BaseException], awaitable: Any) -> Any:
        try:
            value = await awaitable
        except kind as error:
            return error
        raise AssertionError(f"{kind.__name__} was not raised, but got {value!r}")

    def setUp(self) -> Deferred[None]:  # type: ignore[override]  # trial waits for it
        ready = super().setUp()
        self.control = self.make(self.dsn, size=1)
        return ready.addCallback(lambda _: self.run_async(self.control.start()))

    async def pid(self) -> int:
        row = await self.database.one("SELECT pg_backend_pid()")
        assert row is not None
        return int(row[0])


class StatementTests(PoolTestCase):
    async def test_a_query_gives_rows(self) -> None:
        rows = await self.database.query("SELECT 1, 'x' UNION SELECT 2, 'y' ORDER BY 1")
        self.assertEqual(rows, [(1, "x"), (2, "y")])

    async def test_the_schema_is_there_and_empty(self) -> None:
        self.assertEqual(await self.database.query("SELECT * FROM generation"), [])

    async def test_bytes_come_back_as_bytes(self) -> None:
        row = await self.database.one("SELECT %s::bytea, NULL::bytea", (b"\x00\xff",))
        self.assertEqual(row, (b"\x00\xff", None))
        assert row is not None
        self.assertIsInstance(row[0], bytes)

    async def test_times_are_aware_and_in_utc(self) -> None:
        row = await self.database.one("SELECT timestamptz '2026-01-02 03:04:05+02'")
        assert row is not None
        self.assertEqual(row[0].isoformat(), "2026-01-02T01:04:05+00:00")

    async def test_one_gives_none_for_no_row_and_refuses_several(self) -> None:
        self.assertIsNone(await self.database.one("SELECT 1 WHERE false"))
        error = await self.raised(ValueError, self.database.one("SELECT generate_series(1, 3)"))
        self.assertIn("got 3", str(error))

    async def test_execute_counts_rows(self) -> None:
        await self.database.execute("CREATE TABLE t (x int)")
        self.assertEqual(await self.database.execute("INSERT INTO t VALUES (1), (2)"), 2)

    async def test_a_percent_sign_needs_no_doubling_without_parameters(self) -> None:
        self.assertEqual(await self.database.one("SELECT 'a' LIKE '%'"), (True,))

    async def test_a_refused_statement_raises_its_own_error_and_keeps_the_connection(self) -> None:
        pid = await self.pid()
        await self.raised(psycopg2.errors.UndefinedTable, self.database.query("SELECT * FROM nowhere"))
        self.assertEqual(await self.pid(), pid)

    async def test_values_that_cannot_be_sent_are_an_error_of_who_gave_them_and_the_connection_is_kept(self) -> None:
        pid = await self.pid()
        for error, sql, values in (
            (ValueError, "SELECT %s", ("a\x00b",)), (UnicodeEncodeError, "SELECT %s", ("\ud800",)),
            (TypeError, "SELECT %s", (1, 2)), (IndexError, "SELECT %s, %s", (1,)), (KeyError, "SELECT %(a)s", {"b": 1}),
            (psycopg2.ProgrammingError, "SELECT %s", (object(),)),
        ):  # fmt: skip
            await self.raised(error, self.database.query(sql, values))
            self.assertEqual(await self.pid(), pid, error)

    async def test_a_value_that_no_statement_can_have_is_no_lost_connection(self) -> None:
        before = await self.database.one("SELECT pg_backend_pid()")
        deep: Any = 1
        for _ in range(2000):
            deep = [deep]
        for value, error in (("a\0b", ValueError), ("\ud800", UnicodeEncodeError), (Json(deep), RecursionError)):
            with self.assertRaises(error):
                await self.database.query("SELECT %s", (value,))
        self.assertEqual(await self.database.one("SELECT pg_backend_pid()"), before)

    async def test_a_server_whose_disk_is_full_is_unavailable_and_the_connection_is_kept(self) -> None:
        pid = await self.pid()
        full = "DO $$ BEGIN RAISE 'could not extend file' USING ERRCODE = 'disk_full', HINT = 'Free some.'; END $$"
        error = await self.raised(DatabaseUnavailable, self.database.execute(full))
        self.assertIn("could not extend file", str(error))
        self.assertNotIn("\n", str(error))
        self.assertNotIn("lost", str(error))
        self.assertEqual(await self.pid(), pid)

    async def test_a_transaction_that_finds_the_disk_full_is_rolled_back(self) -> None:
        await self.database.execute("CREATE TABLE thing (id int)")

        async def fill(transaction: Transaction) -> None:
            await transaction.execute("INSERT INTO thing VALUES (1)")
            await transaction.execute("DO $$ BEGIN RAISE 'no space' USING ERRCODE = 'disk_full'; END $$")

        await self.raised(DatabaseUnavailable, self.database.transact(fill))
        self.assertEqual(await self.database.query("SELECT * FROM thing"), [])

    async def test_a_statement_over_its_time_is_ended_by_the_server(self) -> None:
        impatient = self.make(self.dsn, statement_timeout=0.05)
        await impatient.start()
        await self.raised(psycopg2.errors.QueryCanceled, impatient.query("SELECT pg_sleep(60)"))
        self.assertEqual(await impatient.one("SELECT 1"), (1,))

    async def test_a_connection_that_sent_something_large_is_not_kept_with_its_buffers(self) -> None:
        pid = await self.pid()
        await self.database.query("SELECT length(%s)", ("x" * LARGE,))
        self.assertNotEqual(await self.pid(), pid)
        pid = await self.pid()
        await self.database.query("SELECT length(%s)", ("x" * (LARGE // 2),))
        self.assertEqual(await self.pid(), pid)

    async def test_a_connection_left_in_a_transaction_is_not_lent_again(self) -> None:
        pid = await self.pid()
        await self.database.execute("BEGIN")
        self.assertNotEqual(await self.pid(), pid)


class TransactionTests(PoolTestCase):
    def setUp(self) -> Deferred[None]:  # type: ignore[override]  # trial waits for it
        ready = super().setUp()
        return ready.addCallback(
            lambda _: self.run_async(self.control.execute("CREATE TABLE t (x int PRIMARY KEY, y int)"))
        )

    async def rows(self) -> list[tuple[Any, ...]]:
        return await self.control.query("SELECT x, y FROM t ORDER BY x")

    async def test_what_the_function_did_is_committed_and_its_value_returned(self) -> None:
        async def insert(transaction: Transaction) -> str:
            await transaction.execute("INSERT INTO t VALUES (1, 1)")
            self.assertEqual(await self.rows(), [])
            return "value"

        self.assertEqual(await self.database.transact(insert), "value")
        self.assertEqual(await self.rows(), [(1, 1)])

    async def test_any_exception_rolls_back_and_is_raised(self) -> None:
        async def insert(transaction: Transaction) -> None:
            await transaction.execute("INSERT INTO t VALUES (1, 1)")
            raise KeyError("mine")

        pid = await self.pid()
        await self.raised(KeyError, self.database.transact(insert))
        self.assertEqual(await self.rows(), [])
        self.assertEqual(await self.pid(), pid)

    async def test_hiding_a_failed_statement_does_not_look_like_a_commit(self) -> None:
        async def insert(transaction: Transaction) -> None:
            await transaction.execute("INSERT INTO t VALUES (1, 1)")
            await self.raised(psycopg2.errors.UniqueViolation, transaction.execute("INSERT INTO t VALUES (1, 2)"))

        await self.raised(TransactionAborted, self.database.transact(insert))
        self.assertEqual(await self.rows(), [])

    async def test_a_transaction_is_of_no_use_after_its_end(self) -> None:
        async def leak(transaction: Transaction) -> Transaction:
            return transaction

        transaction = await self.database.transact(leak)
        await self.raised(RuntimeError, transaction.query("SELECT 1"))

    async def test_statements_at_once_in_one_transaction_run_one_after_the_other(self) -> None:
        async def both(transaction: Transaction) -> None:
            await gatherResults(
                [self.run_async(transaction.execute("INSERT INTO t VALUES (%s, 0)", (x,))) for x in range(5)]
            )

        await self.database.transact(both)
        self.assertEqual(len(await self.rows()), 5)

    async def collide(self, conflicts: int, **options: Any) -> int:
        """A serializable transaction that another one gets in the way of, ``conflicts`` times; its attempts."""
        await self.control.execute("INSERT INTO t VALUES (1, 0)")
        attempts = 0

        async def increment(transaction: Transaction) -> int:
            nonlocal attempts
            attempts += 1
            await transaction.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            await transaction.query("SELECT * FROM t")
            if attempts <= conflicts:
                await self.control.execute("UPDATE t SET y = y + 100")
            await transaction.execute("UPDATE t SET y = y + 1")
            return attempts

        return await self.database.transact(increment, **options)

    async def test_a_serialization_failure_is_tried_again(self) -> None:
        self.assertEqual(await self.collide(2), 3)
        self.assertEqual(await self.rows(), [(1, 201)])

    async def test_serialization_failures_are_tried_again_a_bounded_number_of_times(self) -> None:
        await self.raised(psycopg2.errors.SerializationFailure, self.collide(3, retries=2))
        self.assertEqual(await self.rows(), [(1, 300)])

    async def test_a_deadlock_is_tried_again_and_both_commit(self) -> None:
        await self.control.execute("INSERT INTO t VALUES (1, 0), (2, 0)")
        locked: list[Deferred[None]] = [Deferred(), Deferred()]

        async def update(transaction: Transaction, mine: int) -> None:
            await transaction.execute("SET LOCAL deadlock_timeout = '10ms'")
            await transaction.execute("UPDATE t SET y = y + 1 WHERE x = %s", (mine + 1,))
            if not locked[mine].called:
                locked[mine].callback(None)
            await gatherResults([_after(one) for one in locked])
            await transaction.execute("UPDATE t SET y = y + 1 WHERE x = %s", (2 - mine,))

        await gatherResults([self.run_async(self.database.transact(partial(update, mine=mine))) for mine in (0, 1)])
        self.assertEqual(await self.rows(), [(1, 2), (2, 2)])

    async def test_a_statement_by_itself_that_a_deadlock_undid_is_tried_again(self) -> None:
        await self.control.execute("INSERT INTO t VALUES (1, 0), (2, 0)")
        waiting = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"

        async def update(transaction: Transaction) -> Deferred[int]:
            await transaction.execute("UPDATE t SET y = 10 WHERE x = 2")
            alone = self.run_async(self.database.execute("UPDATE t SET y = y + 1"))
            while not await self.control.query(waiting):
                pass
            await transaction.execute("UPDATE t SET y = 10 WHERE x = 1")  # which the other one has, and waits for ours
            return alone

        self.assertEqual(await (await self.database.transact(update)), 2)
        self.assertEqual(await self.rows(), [(1, 11), (2, 11)])

    async def test_losing_the_connection_in_a_transaction_is_unavailable_and_commits_nothing(self) -> None:
        async def insert(transaction: Transaction) -> None:
            await transaction.execute("INSERT INTO t VALUES (1, 1)")
            row = await transaction.one("SELECT pg_backend_pid()")
            assert row is not None
            await self.kill_backend(row[0])
            await transaction.execute("INSERT INTO t VALUES (2, 2)")

        error = await self.raised(DatabaseUnavailable, self.database.transact(insert))
        self.assertNotIsInstance(error, CommitUnknown)
        self.assertIn("lost the connection to PostgreSQL database 'test_", str(error))
        self.assertEqual(await self.rows(), [])
        self.assertEqual(await self.database.one("SELECT 1"), (1,))

    async def test_losing_the_connection_while_committing_says_that_the_outcome_is_not_known(self) -> None:
        await self.control.execute(
            "CREATE FUNCTION die() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); PERFORM pg_sleep(10); RETURN NULL; END $$;"
            "CREATE CONSTRAINT TRIGGER die AFTER INSERT ON t INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION die()"
        )
        error = await self.raised(
            CommitUnknown, self.database.transact(lambda tx: tx.execute("INSERT INTO t VALUES (1, 1)"))
        )
        self.assertIn("not known", str(error))

    async def test_cancelling_between_statements_rolls_back(self) -> None:
        entered: Deferred[None] = Deferred()
        never: Deferred[None] = Deferred()

        async def insert(transaction: Transaction) -> None:
            await transaction.execute("INSERT INTO t VALUES (1, 1)")
            reactor.callLater(0, entered.callback, None)  # when this waits
            await never

        running = self.run_async(self.database.transact(insert))
        await entered
        running.cancel()
        await self.raised(CancelledError, running)
        self.assertEqual(await self.rows(), [])


class FaultTests(PoolTestCase):
    async def test_a_parameter_that_no_statement_can_have_is_the_caller_s_error_and_costs_no_connection(self) -> None:
        pid = await self.pid()
        for wrong in ("a\0b", "\ud800"):
            await self.raised(ValueError, self.database.query("SELECT %s", (wrong,)))
        self.assertEqual(await self.pid(), pid)

    async def test_an_idle_connection_that_was_lost_is_replaced_without_an_error(self) -> None:
        pid = await self.pid()
        await self.kill_backend(pid)
        self.assertNotEqual(await self.pid(), pid)

    async def test_many_lost_connections_are_all_replaced(self) -> None:
        async def all_pids() -> set[int]:
            rows = await gatherResults(
                [self.run_async(self.database.query("SELECT pg_backend_pid(), pg_sleep(0.02)")) for _ in range(20)]
            )
            return {row[0][0] for row in rows}

        before = await all_pids()
        self.assertEqual(len(before), 5)
        for pid in before:
            await self.kill_backend(pid)
        after = await all_pids()
        self.assertEqual(len(after), 5)
        self.assertEqual(before & after, set())

    async def test_a_socket_that_libpq_has_closed_by_itself_is_not_taken_for_another(self) -> None:
        database = self.make(self.dsn, size=1)
        await database.start()
        await database.query("SELECT 1")
        [used] = database._idle
        # As libpq does when it finds in the middle of sending that the other end is gone.
        os.close(used._wire._connection.fileno())
        pairs = [socket.socketpair() for _ in range(2)]
        try:
            used.close("it was found to be lost")
            self.assertEqual(used._wire.fileno(), -1)
            self.assertNotIn(used._wire, reactor.getReaders())
            reading, writing = pairs[-1]
            seen: Deferred[bytes] = Deferred()
            reader = Reader(reading, seen)
            reactor.addReader(reader)
            writing.send(b"x")
            self.assertEqual(await seen, b"x")
            reactor.removeReader(reader)
        finally:
            for pair in pairs:
                for end in pair:
                    with contextlib.suppress(OSError):  # closing libpq's has closed the one that had its number
                        end.close()

    async def test_a_statement_in_flight_fails_when_its_connection_is_lost(self) -> None:
        async with self.database.session() as session:
            sleeping = self.run_async(session.query("SELECT pg_sleep(60)"))
            await self.kill_backend(session.pid)
            error = await self.raised(DatabaseUnavailable, sleeping)
        self.assertIn("terminating connection", str(error))

    async def test_a_server_that_stops_answering_is_given_up(self) -> None:
        self.patch(connection, "_GRACE_SECONDS", 0.05)
        patient = self.make(self.dsn, statement_timeout=0.05)
        async with patient.session() as session:
            os.kill(session.pid, signal.SIGSTOP)
            try:
                error = await self.raised(DatabaseUnavailable, session.query("SELECT 1"))
            finally:
                os.kill(session.pid, signal.SIGCONT)
        self.assertIn("has not ended a statement in 0.1 seconds", str(error))

    async def test_cancelling_a_statement_ends_it_and_its_connection_is_replaced(self) -> None:
        pid = await self.pid()
        running = self.run_async(self.database.query("SELECT pg_sleep(60)"))
        running.cancel()
        await self.raised(CancelledError, running)
        self.assertNotEqual(await self.pid(), pid)
        # The server notices by itself, within its check interval.
        gone = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s"
        while await self.control.one(gone, (pid,)) != (0,):
            await deferLater(reactor, 0.05)

    async def test_waiting_for_a_connection_is_bounded(self) -> None:
        small = self.make(self.dsn, size=1, wait_timeout=0.05)
        await small.start()

        async def hold(transaction: Transaction) -> DatabaseUnavailable:
            error: DatabaseUnavailable = await self.raised(DatabaseUnavailable, small.query("SELECT 1"))
            return error

        error = await small.transact(hold)
        self.assertIn("all 1 connections", str(error))
        self.assertIn("in use for 0.05 seconds", str(error))
        self.assertEqual(await small.one("SELECT 1"), (1,))

    async def test_those_who_wait_are_served_in_order_and_one_that_gave_up_is_skipped(self) -> None:
        small = self.make(self.dsn, size=1)
        await small.start()
        order: list[int] = []

        async def waiter(number: int) -> None:
            await small.query("SELECT 1")
            order.append(number)

        async def hold(transaction: Transaction) -> list[Deferred[None]]:
            waiting = [self.run_async(waiter(number)) for number in range(4)]
            waiting[1].cancel()
            await self.raised(CancelledError, waiting[1])
            return [waiting[0], *waiting[2:]]

        await gatherResults(await small.transact(hold))
        self.assertEqual(order, [0, 2, 3])

    async def test_more_than_the_recursion_limit_may_wait_for_a_database_that_is_gone(self) -> None:
        gone = Database(reactor, "host=/nonexistent dbname=x", size=1)
        waiting = [self.run_async(gone.query("SELECT 1")) for _ in range(3000)]
        errors = await gatherResults([one.addErrback(lambda failure: failure.value) for one in waiting])
        self.assertEqual({type(error) for error in errors}, {DatabaseUnavailable})

    async def test_a_server_that_is_not_there_is_named_and_the_password_is_not(self) -> None:
        gone = Database(reactor, "postgresql://me:s3cret@localhost:1/images")
        error = await self.raised(DatabaseUnavailable, gone.start())
        self.assertIn("PostgreSQL database 'images' at localhost port 1", str(error))
        self.assertIn("refused", str(error))
        self.assertNotIn("s3cret", str(error))

    async def test_a_host_without_an_address_is_named(self) -> None:
        gone = Database(reactor, "host=no-such-host.invalid")
        error = await self.raised(DatabaseUnavailable, gone.start())
        self.assertIn("'no-such-host.invalid' has no address", str(error))

    async def test_a_database_that_does_not_exist_is_unavailable_at_once(self) -> None:
        gone = Database(reactor, self.server.dsn_of("nowhere"))
        error = await self.raised(DatabaseUnavailable, gone.start())
        self.assertIn('database "nowhere" does not exist', str(error))

    def test_a_connection_string_that_cannot_be_read_is_not_quoted(self) -> None:
        for dsn in ("s3cret", "host=x s3cret", "postgresql://me:s3cr%zzet@h/x"):
            error = self.assertRaises(ValueError, Database, reactor, dsn)
            self.assertNotIn("s3c", str(error))
            self.assertIsNone(error.__cause__)

    def fake_server(self, answer: bytes) -> tuple[str, list[Protocol]]:
        """A server on loopback that answers every connection with ``answer`` (and then ends it, if there is any)."""
        connections: list[Protocol] = []

        class Fake(Protocol):
            def connectionMade(self) -> None:
                connections.append(self)

            def dataReceived(self, data: bytes) -> None:
                if answer:
                    assert self.transport is not None
                    self.transport.write(answer)
                    self.transport.loseConnection()

        port = reactor.listenTCP(0, Factory.forProtocol(Fake), interface="127.0.0.1")
        self.addCleanup(port.stopListening)
        return f"host=127.0.0.1 port={port.getHost().port} sslmode=disable gssencmode=disable", connections

    async def test_a_server_that_accepts_and_is_silent_is_given_up(self) -> None:
        dsn, connections = self.fake_server(b"")
        error = await self.raised(DatabaseUnavailable, Database(reactor, dsn, connect_timeout=0.2).start())
        self.assertIn("not ready within 0.2 seconds", str(error))
        self.assertEqual(len(connections), 1)

    async def test_a_server_that_is_starting_is_waited_for_until_the_deadline(self) -> None:
        fields = b"SFATAL\0VFATAL\0C57P03\0Mthe database system is starting up\0\0"
        dsn, connections = self.fake_server(b"E" + (len(fields) + 4).to_bytes(4, "big") + fields)
        error = await self.raised(DatabaseUnavailable, Database(reactor, dsn, connect_timeout=0.4).start())
        self.assertRegex(str(error), "not ready within 0.4 seconds.*the database system is starting up")
        self.assertGreater(len(connections), 1)

    async def test_after_stop_every_caller_is_refused_and_those_who_wait_are_told(self) -> None:
        small = self.make(self.dsn, size=1)
        await small.start()

        async def hold(transaction: Transaction) -> Deferred[Any]:
            waiting = self.run_async(small.query("SELECT 1"))
            stopping.append(self.run_async(small.stop()))
            await self.raised(DatabaseUnavailable, waiting)
            await transaction.query("SELECT 1")  # what was begun may end
            return waiting

        stopping: list[Deferred[None]] = []
        await small.transact(hold)
        await stopping[0]
        error = await self.raised(DatabaseUnavailable, small.query("SELECT 1"))
        self.assertIn("the region is stopping", str(error))

    async def test_stop_does_not_wait_for_ever(self) -> None:
        self.patch(pool, "_STOP_SECONDS", 0.05)
        other = self.make(self.dsn)
        await other.start()
        sleeping = self.run_async(other.query("SELECT pg_sleep(60)"))
        stopped = self.raised(DatabaseUnavailable, sleeping)
        await other.stop()
        self.assertIn("the region is stopping", str(await stopped))


class LateEndTests(PoolTestCase):
    async def test_a_connection_that_ends_just_before_its_answer_is_read_is_lost(self) -> None:
        def read_late(cursor: Any) -> Any:
            raise psycopg2.InterfaceError("cursor already closed")  # as when the answer came together with the end

        patched = self.patch(connection, "_result", read_late)
        error = await self.raised(DatabaseUnavailable, self.database.query("SELECT 1"))
        patched.restore()
        self.assertIn("lost the connection", str(error))
        self.assertEqual(await self.database.query("SELECT 1"), [(1,)])


class SessionTests(PoolTestCase):
    async def test_a_lock_is_held_until_the_session_ends_and_is_free_at_once_after_it(self) -> None:
        async with self.database.session() as session:
            await session.query("SELECT pg_advisory_lock(7)")
            self.assertEqual(await self.database.one("SELECT pg_try_advisory_lock(7)"), (False,))
            held = await self.database.query("SELECT pid FROM pg_locks WHERE locktype = 'advisory'")
            self.assertEqual(held, [(session.pid,)])
        self.assertEqual(await self.database.one("SELECT pg_try_advisory_lock(7)"), (True,))

    async def test_a_lost_session_stays_lost(self) -> None:
        async with self.database.session() as session:
            self.assertTrue(session.alive)
            await self.kill_backend(session.pid)
            self.assertFalse(session.alive)
            for _ in range(2):
                await self.raised(DatabaseUnavailable, session.query("SELECT 1"))
            await self.raised(DatabaseUnavailable, session.transact(lambda tx: tx.query("SELECT 1")))

    async def test_an_exception_in_the_session_is_raised_and_ends_it(self) -> None:
        kept: list[Session] = []

        async def fail() -> None:
            async with self.database.session() as session:
                kept.append(session)
                raise KeyError("mine")

        await self.raised(KeyError, fail())
        self.assertFalse(kept[0].alive)

    async def test_sessions_do_not_use_up_the_pool(self) -> None:
        small = self.make(self.dsn, size=1)
        await small.start()
        async with small.session(), small.session():
            self.assertEqual(await small.one("SELECT 1"), (1,))


def _after(one: Deferred[None]) -> Deferred[None]:
    """Fires when ``one`` does, which many may wait for."""
    waiting: Deferred[None] = Deferred()

    def fired(result: None) -> None:
        waiting.callback(None)

    one.addCallback(fired)
    return waiting
