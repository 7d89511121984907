"""Nodes that did not boot, fell silent or hang are failed, each for itself, and it is said what was heard last."""

from __future__ import annotations

from typing import Any, cast

from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from region.config import CommissioningConfig
from region.database import Database, DatabaseUnavailable
from region.nodes.deadlines import Limits, Running, Watched, limit_of, verdict
from region.nodes.life import Input
from region.nodes.monitor import LOOK_SECONDS, Monitor
from region.nodes.statuses import NodeStatus, ResultType, ScriptStatus
from region.nodes.values import NodeName
from tests.database import DatabaseTestCase
from tests.region.machines import Choice, events_of, happen, make_node, make_script, start, status_of

DAY = 86400
RUNTIME = {"seconds": {"type": "runtime", "value": 2 * DAY}}


class MonitorTests(DatabaseTestCase):
    def setUp(self) -> Any:
        ready = super().setUp()
        self.monitor = Monitor(self.database, Clock(), CommissioningConfig())
        return ready

    async def running(
        self, system_id: str = "abc234", *, heard: str | None = "1 second", script: Choice | None = None
    ) -> NodeName:
        """A node that is being commissioned since an hour and was heard of so long ago, None for never."""
        node = await make_node(self.database, system_id)
        await start(self.database, node, [script or await make_script(self.database, f"script-of-{system_id}")])
        await self.database.execute(
            "UPDATE node SET status_changed = status_changed - interval '1 hour' WHERE id = %s", (node.id,)
        )
        if heard is not None:
            await self.hear(node, heard)
        return node

    async def hear(self, node: NodeName, ago: str, what: str = "WORKING 10-lshw") -> None:
        await self.database.execute("UPDATE script_set SET boot_deadline = NULL WHERE node_id = %s", (node.id,))
        await self.database.execute(
            "INSERT INTO node_heartbeat (node_id, last_ping, heard) VALUES (%s, now() - %s::interval, %s)",
            (node.id, ago, what),
        )

    async def run_since(self, node: NodeName, ago: str, status: ScriptStatus = ScriptStatus.RUNNING) -> None:
        await self.database.execute(
            """UPDATE script_result SET status = %s, started = now() - %s::interval
               WHERE script_set_id IN (SELECT id FROM script_set WHERE node_id = %s)""",
            (status, ago, node.id),
        )

    async def results(self, node: NodeName) -> list[ScriptStatus]:
        rows = await self.database.query(
            """SELECT status FROM script_result JOIN script_set ON script_set.id = script_set_id
               WHERE node_id = %s ORDER BY script_result.id""",
            (node.id,),
        )
        return [ScriptStatus(status) for (status,) in rows]

    async def assert_fails(self, node: NodeName, *said: str) -> None:
        self.assertEqual(await self.monitor.look(), 1)
        self.assertIs(await status_of(self.database, node), NodeStatus.FAILED_COMMISSIONING)
        [(_, reason)] = [each for each in await events_of(self.database, node) if each[0] == "Marking node failed"]
        for each in said:
            self.assertIn(each, reason)
        [stored] = await self.database.query("SELECT status_message FROM node WHERE id = %s", (node.id,))
        self.assertEqual(stored, (reason,))
        [correlation] = await self.database.query("SELECT DISTINCT correlation FROM event WHERE correlation <> ''")
        self.assertEqual(len(correlation[0]), 32)

    async def test_one_that_does_well_is_left_alone(self) -> None:
        script = await make_script(self.database, "long", timeout_seconds=3600)
        node = await self.running(script=script, heard="9 minutes")
        await self.run_since(node, "62 minutes")
        other = await make_node(self.database, "bcd234", status=NodeStatus.READY)
        self.assertEqual(await self.monitor.look(), 0)
        self.assertIs(await status_of(self.database, node), NodeStatus.COMMISSIONING)
        self.assertIs(await status_of(self.database, other), NodeStatus.READY)

    async def test_one_that_does_not_boot_has_until_its_deadline_however_long_ago_it_was_heard_of_before(self) -> None:
        node = await self.running(heard=None)
        await self.database.execute(
            "INSERT INTO node_heartbeat (node_id, last_ping, heard) VALUES (%s, '2026-01-02 03:04:05Z', 'OK')",
            (node.id,),
        )
        self.assertEqual(await self.monitor.look(), 0)
        await self.database.execute("UPDATE script_set SET boot_deadline = now() - interval '1 second'")
        await self.assert_fails(node, "not heard of in time", "Last heard of at 2026-01-02 03:04:05 UTC, ", " ago: OK")
        self.assertEqual(await self.results(node), [ScriptStatus.ABORTED])

    async def test_one_that_fell_silent_is_failed_with_what_it_said_last(self) -> None:
        node = await self.running(heard="11 minutes")
        await self.run_since(node, "20 minutes")
        await self.assert_fails(
            node, "said nothing for 11 min while script-of-abc234 ran", "given up after 10 min", "WORKING 10-lshw"
        )
        self.assertEqual(await self.results(node), [ScriptStatus.TIMEDOUT])

    async def test_one_that_was_never_heard_of_and_has_no_deadline_is_not_left_for_ever(self) -> None:
        node = await self.running(heard=None)
        await self.database.execute("UPDATE script_set SET boot_deadline = NULL")
        await self.assert_fails(node, "said nothing for 60 min", "It was never heard of.")

    async def test_also_one_without_any_run(self) -> None:
        node = await make_node(self.database, status=NodeStatus.COMMISSIONING)
        await self.database.execute("UPDATE node SET status_changed = now() - interval '1 hour'")
        await self.assert_fails(node, "It was never heard of.")

    async def test_silence_counts_from_the_beginning_of_the_run(self) -> None:
        node = await self.running(heard="50 minutes")
        await self.database.execute("UPDATE node SET status_changed = now() - interval '9 minutes'")
        self.assertEqual(await self.monitor.look(), 0)
        await self.database.execute("UPDATE node SET status_changed = now() - interval '10 minutes 1 second'")
        await self.assert_fails(node, "said nothing for 10 min", "50 min ago")

    async def test_a_script_is_given_its_time_and_no_more(self) -> None:
        for status in (ScriptStatus.RUNNING, ScriptStatus.INSTALLING, ScriptStatus.APPLYING_NETCONF):
            system_id = f"s{status:05}"
            script = await make_script(self.database, f"slow-{status.name.lower()}", timeout_seconds=3 * DAY)
            node = await self.running(system_id, script=script)
            await self.run_since(node, "3 days 4 minutes", status)
            self.assertEqual(await self.monitor.look(), 0)
            await self.run_since(node, "3 days 6 minutes", status)
            await self.assert_fails(node, script.script_name, status.label.lower(), "may take 3 days (and 5 min more)")
            self.assertEqual(await self.results(node), [ScriptStatus.TIMEDOUT])
            await self.database.execute("DELETE FROM event")

    async def test_a_script_with_a_runtime_parameter_is_watched(self) -> None:
        script = await make_script(self.database, "burn-in", parameters=RUNTIME, timeout_seconds=60)
        node = await self.running(script=script)
        await self.run_since(node, "2 days 4 minutes")
        self.assertEqual(await self.monitor.look(), 0)
        await self.run_since(node, "2 days 6 minutes")
        await self.assert_fails(node, "burn-in has been running for 2 days")

    async def test_a_script_without_a_limit_may_take_for_ever_as_long_as_the_node_speaks(self) -> None:
        script = await make_script(self.database, "endless", parameters={"x": {"type": "string", "value": "1"}})
        node = await self.running(script=script)
        await self.run_since(node, "300 days")
        self.assertEqual(await self.monitor.look(), 0)
        self.assertIs(await status_of(self.database, node), NodeStatus.COMMISSIONING)

    async def test_a_script_that_began_at_a_time_that_nobody_wrote_down_is_watched(self) -> None:
        script = await make_script(self.database, "slow", timeout_seconds=60)
        node = await self.running(script=script)
        await self.database.execute("UPDATE script_result SET status = 1, updated = now() - interval '7 minutes'")
        await self.assert_fails(node, "slow has been running for 7 min")

    async def test_of_the_results_the_hanging_one_has_timed_out_and_what_was_to_come_is_aborted(self) -> None:
        scripts = [await make_script(self.database, name, timeout_seconds=60) for name in ("a", "b", "c")]
        tests = [await make_script(self.database, "memtest", ResultType.TESTING)]
        node = await make_node(self.database)
        await start(self.database, node, scripts, tests)
        await self.hear(node, "1 second")
        await self.run_since(node, "7 minutes", ScriptStatus.PENDING)
        await self.database.execute("UPDATE script_result SET status = 2, ended = now() WHERE script_name = 'a'")
        await self.database.execute("UPDATE script_result SET status = 1 WHERE script_name = 'b'")
        await self.assert_fails(node, "b has been running for 7 min")
        self.assertEqual(
            await self.results(node),
            [ScriptStatus.PASSED, ScriptStatus.TIMEDOUT, ScriptStatus.ABORTED, ScriptStatus.ABORTED],
        )

    async def test_a_node_that_has_done_its_part_is_not_failed_for_what_the_region_has_yet_to_do(self) -> None:
        node = await self.running(heard="11 minutes")
        await self.done(node)
        self.assertEqual(await self.monitor.look(), 0)
        await self.database.execute("UPDATE script_set SET signal_status = 'TESTING'")
        await self.assert_fails(node, "said nothing")

    async def test_one_whose_end_the_region_has_lost_is_not_left_for_ever_and_the_region_is_blamed(self) -> None:
        node = await self.running(heard="11 minutes")
        await self.done(node)
        await self.database.execute("DELETE FROM processing")
        self.assertEqual(await self.monitor.look(listening=60), 0)
        await self.assert_fails(node, "a fault of the region", "Last heard of")

    async def done(self, node: NodeName) -> None:
        """It has said that it is done, and the end of its run is queued."""
        await self.database.execute("UPDATE script_set SET signalled = now(), signal_status = 'OK'")
        await self.database.execute(
            "INSERT INTO processing (node_id, script_set_id, step) SELECT node_id, id, 'finish' FROM script_set"
            " WHERE node_id = %s",
            (node.id,),
        )

    async def test_tests_that_hang_fail_the_tests(self) -> None:
        memtest = await make_script(self.database, "memtest", ResultType.TESTING, timeout_seconds=60)
        node = await make_node(self.database)
        await start(self.database, node, [], [memtest])
        await happen(self.database, node, Input.BEGIN_TESTING)
        await self.hear(node, "1 second")
        await self.run_since(node, "7 minutes")
        self.assertEqual(await self.monitor.look(), 1)
        self.assertIs(await status_of(self.database, node), NodeStatus.FAILED_TESTING)

    async def test_a_poisoned_node_is_logged_and_does_not_stop_the_others(self) -> None:
        nodes = [await self.running(system_id, heard="11 minutes") for system_id in ("aaaaaa", "bbbbbb", "cccccc")]
        await self.database.execute(
            """CREATE FUNCTION poison() RETURNS trigger LANGUAGE plpgsql AS
               $$ BEGIN RAISE EXCEPTION 'poisoned'; END $$"""
        )
        await self.database.execute(
            """CREATE TRIGGER poison BEFORE UPDATE ON node FOR EACH ROW WHEN (OLD.system_id = 'aaaaaa')
               EXECUTE FUNCTION poison()"""
        )
        await self.database.execute(
            """UPDATE node_heartbeat SET last_ping = '-infinity'
               WHERE node_id = (SELECT id FROM node WHERE system_id = 'bbbbbb')"""
        )
        await self.database.execute(
            """UPDATE script_result SET status = 1, timeout_seconds = 9223372036854775807,
                   parameters = '["no object"]' WHERE script_name = 'script-of-bbbbbb'"""
        )
        self.assertEqual(await self.monitor.look(), 2)
        self.assertEqual(
            [await status_of(self.database, node) for node in nodes],
            [NodeStatus.COMMISSIONING, NodeStatus.FAILED_COMMISSIONING, NodeStatus.FAILED_COMMISSIONING],
        )
        [failure] = self.flushLoggedErrors()
        self.assertIn("poisoned", str(failure.value))

    async def test_several_processes_at_once_fail_each_node_once(self) -> None:
        nodes = [await self.running(f"node{number:02}", heard="11 minutes") for number in range(6)]
        databases: list[Database] = [self.make(self.dsn) for _ in range(3)]
        for database in databases:
            await database.start()
        monitors = [Monitor(database, Clock(), CommissioningConfig()) for database in databases]
        found = await gatherResults([self.run_async(monitor.look()) for monitor in monitors])
        self.assertEqual(sum(found) + await self.monitor.look(), len(nodes))
        for node in nodes:
            kinds = [kind for kind, _ in await events_of(self.database, node)]
            self.assertEqual(kinds.count("Marking node failed"), 1)

    async def test_one_that_is_locked_is_looked_at_the_next_time_and_with_what_was_done_meanwhile(self) -> None:
        node = await self.running(heard="11 minutes")
        held: Deferred[None] = Deferred()
        locked: Deferred[None] = Deferred()

        async def speaking(transaction: Any) -> None:
            await transaction.query("SELECT id FROM node WHERE id = %s FOR NO KEY UPDATE", (node.id,))
            await transaction.execute("UPDATE node_heartbeat SET last_ping = now()")
            locked.callback(None)
            await held

        holding = self.run_async(self.database.transact(speaking))
        await locked
        self.assertEqual(await self.monitor.look(), 0)
        held.callback(None)
        await holding
        self.assertEqual(await self.monitor.look(), 0)
        self.assertIs(await status_of(self.database, node), NodeStatus.COMMISSIONING)


class TimerTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.looks: list[tuple[float, float]] = []
        self.errors: list[Exception] = []

    def monitor(self, boot_timeout_minutes: float = 20.0) -> Monitor:
        settings = CommissioningConfig(boot_timeout_minutes=boot_timeout_minutes)
        monitor = Monitor(cast(Any, None), self.clock, settings)

        async def look(listening: float) -> int:
            self.looks.append((self.clock.seconds(), listening))
            if self.errors:
                raise self.errors.pop()
            return 0

        self.patch(monitor, "look", look)
        monitor.start()
        return monitor

    def test_it_looks_at_intervals_until_it_is_stopped(self) -> None:
        monitor = self.monitor()
        self.clock.pump([LOOK_SECONDS] * 2)
        self.assertEqual(self.looks, [(LOOK_SECONDS, LOOK_SECONDS), (2 * LOOK_SECONDS, 2 * LOOK_SECONDS)])
        self.successResultOf(Deferred.fromCoroutine(monitor.stop()))
        self.clock.advance(LOOK_SECONDS)
        self.assertEqual(len(self.looks), 2)

    def test_short_limits_make_it_look_more_often(self) -> None:
        self.monitor(boot_timeout_minutes=0.1)
        self.clock.advance(1.5)
        self.assertEqual(len(self.looks), 1)

    def test_a_fault_of_its_own_is_logged_and_it_goes_on(self) -> None:
        self.errors = [RuntimeError("a fault")]
        self.monitor()
        self.clock.pump([LOOK_SECONDS] * 2)
        self.assertEqual([listening for _, listening in self.looks], [LOOK_SECONDS, 2 * LOOK_SECONDS])
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)

    def test_it_has_not_listened_while_the_database_was_away(self) -> None:
        self.errors = [DatabaseUnavailable("away")]
        self.monitor()
        self.clock.pump([LOOK_SECONDS] * 3)
        self.assertEqual([listening for _, listening in self.looks], [LOOK_SECONDS, 0.0, LOOK_SECONDS])

    def test_nor_while_the_process_stood_still(self) -> None:
        self.monitor()
        self.clock.pump([LOOK_SECONDS, 600.0, LOOK_SECONDS])
        self.assertEqual([listening for _, listening in self.looks], [LOOK_SECONDS, 0.0, LOOK_SECONDS])


ANYTHING = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers(), max_size=2)
PARAMETER = st.fixed_dictionaries({"type": st.just("runtime"), "value": ANYTHING}) | ANYTHING
SECONDS = st.floats(-1e6, 1e9)


class VerdictTests(SynchronousTestCase):
    def test_the_longer_of_the_limit_and_the_runtime_counts(self) -> None:
        for timeout, value, limit in (
            (0, 60, 60), (600, 60, 600), (60, 600, 600), (60, "600", 600), (60, "ten", 60), (60, -1, 60), (0, None, 0),
            (60, float("inf"), 60), (60, True, 60), (0, 10**9, 10**9), (60, 10**400, 60), (60, "9" * 400, float("inf")),
        ):  # fmt: skip
            self.assertEqual(limit_of(timeout, {"t": {"type": "runtime", "value": value}}), limit, (timeout, value))
        self.assertEqual(limit_of(60, {"t": {"type": "string", "value": 600}, "u": "x"}), 60)

    def test_a_region_that_was_away_itself_lets_nodes_speak_first(self) -> None:
        limits, hanging = Limits(1200, 600, 300), [Running(1, "x", ScriptStatus.RUNNING, 1000, 60, {})]
        for watched, enough in (
            (Watched(1.0, 9e9, None, "", "", False, []), 600), (Watched(None, 9e9, 9e9, "", "", False, []), 600),
            (Watched(None, 0, 0, "", "", False, hanging), 300),
        ):  # fmt: skip
            self.assertIsNone(verdict(evolve(watched, listening=enough - 1), limits))
            self.assertIsNotNone(verdict(evolve(watched, listening=enough + 1), limits))

    @settings(max_examples=100)
    @given(
        boot=st.none() | SECONDS, silent=SECONDS, is_done=st.booleans(), is_queued=st.booleans(), seconds=SECONDS,
        timeout=st.integers(0, 10**18), parameters=st.dictionaries(st.text(max_size=3), PARAMETER, max_size=2),
    )  # fmt: skip
    def test_whatever_is_stored_there_is_a_verdict(
        self,
        boot: float | None,
        silent: float,
        is_done: bool,
        is_queued: bool,
        seconds: float,
        timeout: int,
        parameters: Any,
    ) -> None:
        running = Running(1, "x", ScriptStatus.RUNNING, seconds, timeout, parameters)
        watched = Watched(boot, silent, None, "", "", is_done, [running], is_queued=is_queued)
        found = verdict(watched, Limits(1200, 600, 300))
        if boot is not None:
            self.assertEqual(found is not None, boot > 0)
        elif is_done and (is_queued or silent <= 600):
            self.assertIsNone(found)
        elif silent > 600:
            self.assertIsNotNone(found)
        elif timeout == 0 and not parameters:
            self.assertIsNone(found)
