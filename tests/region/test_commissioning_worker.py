"""Several region processes over one queue: everything is done, in each node's order, and nothing is done twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.task import deferLater

from region.commissioning.intake import Intake
from region.commissioning.queue import Queue, Work
from region.commissioning.signals import MessageFile, Signal, SignalStatus, StatusMessage, Upload
from region.commissioning.steps import Step, Steps
from region.commissioning.steps import steps as steps_of
from region.commissioning.worker import ATTEMPTS, LOOK_SECONDS, Notice, Worker
from region.database import Database, Transaction
from region.nodes import kinds
from region.nodes.findings import Finding
from region.nodes.statuses import NodeStatus, ScriptStatus
from region.nodes.values import NodeName
from rpc.events import Kind, Level
from tests.database import reactor
from tests.logs import Logs
from tests.region.commissioning import WorkerTestCase, following


class QueueTestCase(WorkerTestCase):
    """Has steps that write down what they did."""

    async def prepare(self) -> None:
        await super().prepare()
        self.begun: list[tuple[str, str]] = []
        self.holding: dict[str, Deferred[None]] = {}
        await self.database.execute("CREATE TABLE done (id serial, node_id bigint, work bigint)")

    def counted(self, database: Database | None = None) -> Steps:
        """The usual steps, each of which adds a row to ``done``, and waits where ``holding`` has its name."""
        table = {}
        for name, sound in steps_of(following(database or self.database)).items():
            table[name] = self._counted(name, sound)
        return table

    def _counted(self, name: str, sound: Step) -> Step:
        async def apply(transaction: Transaction, work: Work, prepared: Any) -> Sequence[Finding]:
            held = self.holding.get(name)
            self.begun.append((work.node.hostname, name))
            await transaction.execute("INSERT INTO done (node_id, work) VALUES (%s, %s)", (work.node.id, work.id))
            if held is not None:
                await held
            return await sound.apply(transaction, work, prepared)

        return Step(apply, sound.prepare)

    async def done(self, node: NodeName) -> list[int]:
        """The rows that were done of a node, in order."""
        rows = await self.database.query("SELECT work FROM done WHERE node_id = %s ORDER BY id", (node.id,))
        return [work for (work,) in rows]

    async def ids(self, node: NodeName) -> list[int]:
        rows = await self.database.query("SELECT id FROM processing WHERE node_id = %s ORDER BY id", (node.id,))
        return [identifier for (identifier,) in rows]

    async def fill(self, node: NodeName) -> None:
        """All that a good commissioning says."""
        for script in self.results:
            await self.intake.signal(node, self.finished(script))
        await self.intake.signal(node, Signal(SignalStatus.OK))


class QueueTests(QueueTestCase):
    async def test_only_the_oldest_row_of_a_node_is_due(self) -> None:
        other = await self.make_node()
        await self.begin(other)
        await self.fill(self.node)
        await self.intake.signal(other, Signal(SignalStatus.OK))
        one, two = Queue(self.database, await self.owner()), Queue(self.database, await self.owner())
        first = await one.claim(10, ())
        self.assertEqual([(work.node, work.step) for work in first], [(self.node, "hook"), (other, "storage")])
        self.assertEqual((first[0].script_name, first[0].attempts), ("10-lshw", 1))
        self.assertEqual(await two.claim(10, ()), [])
        self.assertEqual(await one.claim(10, [work.id for work in first]), [])

    async def owner(self) -> str:
        worker = await self.idle_process()
        return worker._queue._owner

    async def test_the_claims_of_a_process_that_is_dead_are_taken_over_and_what_it_still_does_counts_no_more(
        self,
    ) -> None:
        await self.fill(self.node)
        dead, alive = Queue(self.database, await self.owner()), Queue(self.database, await self.owner())
        [before] = await dead.claim(1, ())
        await self.database.execute(
            "UPDATE region_process SET heartbeat = now() - interval '1 minute' WHERE id = %s", (dead._owner,)
        )
        [after] = await alive.claim(1, ())
        self.assertEqual((after.id, after.attempts), (before.id, 2))
        self.assertFalse(await self.database.transact(lambda transaction: dead.take(transaction, before)))
        self.assertTrue(await self.database.transact(lambda transaction: alive.take(transaction, after)))

    async def test_a_claim_that_a_process_does_not_know_of_is_due_again_for_it(self) -> None:
        await self.fill(self.node)
        queue = Queue(self.database, await self.owner())
        [first] = await queue.claim(1, ())
        [again] = await queue.claim(1, ())
        self.assertEqual((again.id, again.attempts), (first.id, 2))

    async def test_what_is_put_back_is_due_at_once_and_was_not_tried(self) -> None:
        await self.fill(self.node)
        one, two = Queue(self.database, await self.owner()), Queue(self.database, await self.owner())
        works = await one.claim(1, ())
        await two.put_back(works)
        self.assertEqual(await two.claim(1, ()), [])
        await one.put_back(works)
        [again] = await two.claim(1, ())
        self.assertEqual((again.id, again.attempts), (works[0].id, 1))


class WorkerTests(QueueTestCase):
    async def test_two_processes_do_everything_once_and_in_each_node_s_order(self) -> None:
        nodes = [self.node]
        ids = {}
        await self.fill(self.node)
        for _ in range(5):
            node = await self.make_node()
            self.results = await self.begin(node)
            await self.fill(node)
            nodes.append(node)
        for node in nodes:
            ids[node] = await self.ids(node)
        second = self.make(self.dsn)
        await second.start()
        await self.process(self.counted())
        await self.process(self.counted(second), database=second)
        await self.until_done()
        for node in nodes:
            self.assertEqual(await self.done(node), ids[node])
            self.assertEqual(await self.status_of(node), NodeStatus.READY)
            self.assertEqual(len(await self.events_of(node, kinds.NODE_CHANGED_STATUS)), 1)
        self.assertEqual(await self.database.query("SELECT DISTINCT storage_layout FROM node"), [("flat",)])

    async def test_two_processes_that_are_given_the_same_signal_at_once_store_and_do_it_once(self) -> None:
        second = self.make(self.dsn)
        await second.start()
        intakes = [self.intake, Intake(second, self.hooks, self.wake)]
        for signal in (*(self.finished(script) for script in self.results), Signal(SignalStatus.OK)):
            await gatherResults([Deferred.fromCoroutine(each.signal(self.node, signal)) for each in intakes * 3])
        ids = await self.ids(self.node)
        self.assertEqual(len(ids), 7)
        await self.process(self.counted())
        await self.process(self.counted(second), database=second)
        await self.until_done()
        self.assertEqual(await self.done(self.node), ids)
        self.assertEqual(await self.database.query("SELECT * FROM late_result"), [])

    async def test_a_process_that_dies_in_the_middle_of_a_step_leaves_nothing_half_and_nothing_undone(self) -> None:
        await self.fill(self.node)
        ids = await self.ids(self.node)
        dying = self.make(self.dsn)
        await dying.start()
        self.holding["storage"] = Deferred()
        worker = await self.process(self.counted(dying), database=dying)

        async def in_storage() -> bool:
            return (self.node.hostname, "storage") in self.begun

        await self.until(in_storage)
        held = self.holding.pop("storage")
        # As when the process is killed: its connections end, it says nothing, and its heartbeat grows old.
        await worker._claiming.stop()
        await dying.stop()
        held.callback(None)
        self.workers.remove(worker)
        self.assertEqual((await self.done(self.node)), ids[:3])
        living = await self.process(self.counted())
        for _ in range(5):
            await deferLater(reactor, 0.005)
            living.wake()
        self.assertEqual(len(await self.ids(self.node)), 4)
        await self.database.execute(
            "UPDATE region_process SET heartbeat = now() - interval '1 minute' WHERE id = %s", (worker._queue._owner,)
        )
        await self.until_done(seconds=LOOK_SECONDS)
        self.assertEqual(await self.done(self.node), ids)
        self.assertEqual(await self.status_of(self.node), NodeStatus.READY)

    async def test_a_step_that_ends_its_process_each_time_is_given_up_and_recorded(self) -> None:
        await self.fill(self.node)
        await self.database.execute("UPDATE processing SET attempts = %s WHERE step = 'hook'", (ATTEMPTS,))
        await self.process(self.counted())
        await self.until_done()
        self.assertNotIn((self.node.hostname, "hook"), self.begun)
        self.assertEqual(len(self.flushLoggedErrors()), 3)
        self.assertEqual(len(await self.events_of(self.node, kinds.SCRIPT_RESULT_ERROR)), 3)
        self.assertEqual(await self.status_of(self.node), NodeStatus.FAILED_COMMISSIONING)
        self.assertEqual(await self.result("10-lshw", "status", "post_processing"), (2, "failed"))

    async def test_a_process_that_stops_hands_back_what_it_was_at(self) -> None:
        await self.fill(self.node)
        self.holding["hook"] = Deferred()
        worker = await self.process(self.counted())

        async def in_hook() -> bool:
            return bool(self.begun)

        await self.until(in_hook)
        await worker.stop()
        rows = await self.database.query("SELECT claimed_by, attempts FROM processing ORDER BY id LIMIT 1")
        self.assertEqual(rows, [(None, 0)])
        self.holding.clear()
        await self.process(self.counted())
        await self.until_done()
        self.assertEqual(await self.status_of(self.node), NodeStatus.READY)

    async def test_a_database_that_is_away_is_no_fault_of_a_step(self) -> None:
        await self.fill(self.node)
        away = self.make(self.dsn)
        await away.start()
        self.holding["storage"] = Deferred()
        await self.process(self.counted(away), database=away)

        async def in_storage() -> bool:
            return (self.node.hostname, "storage") in self.begun

        await self.until(in_storage)
        held = self.holding.pop("storage")
        await away.stop()
        held.callback(None)
        for _ in range(20):  # far longer than a step may lose its connection for by itself
            self.clock.advance(60)
            await deferLater(reactor, 0.002)
        await away.start()
        await self.until_done(seconds=60)
        self.assertEqual(await self.status_of(self.node), NodeStatus.READY)
        self.assertEqual(await self.events_of(self.node, kinds.SCRIPT_RESULT_ERROR), [])

    async def test_a_failure_that_cannot_be_recorded_stays_in_the_queue_and_in_the_log(self) -> None:
        async def fail(transaction: Transaction, work: Work, prepared: Any) -> Sequence[Finding]:
            raise ValueError("the step itself")

        await self.intake.signal(self.node, self.finished("10-lshw"))
        await self.database.execute("ALTER TABLE step_failure ADD CHECK (step <> 'hook')")
        await self.process({**self.counted(), "hook": Step(fail)})

        async def put_back() -> bool:
            row = await self.database.one("SELECT FROM processing WHERE claimed_by IS NULL AND not_before > now()")
            return row is not None

        await self.until(put_back)
        self.assertEqual(len(self.flushLoggedErrors()), 2)
        await self.database.execute("ALTER TABLE step_failure DROP CONSTRAINT step_failure_step_check")
        await self.database.execute("UPDATE processing SET not_before = now()")
        await self.until_done(seconds=LOOK_SECONDS)
        self.assertEqual(len(self.flushLoggedErrors(ValueError)), 1)
        self.assertEqual(len(await self.events_of(self.node, kinds.SCRIPT_RESULT_ERROR)), 1)

    async def test_the_end_of_a_node_ends_what_was_queued_for_it(self) -> None:
        await self.fill(self.node)
        self.holding["hook"] = Deferred()
        logs = Logs(self, "region.commissioning.worker")
        await self.process(self.counted())

        async def in_hook() -> bool:
            return bool(self.begun)

        await self.until(in_hook)
        deleting = Deferred.fromCoroutine(self.database.execute("DELETE FROM node WHERE id = %s", (self.node.id,)))
        self.holding.pop("hook").callback(None)
        await deleting
        await self.until_done()
        self.assertEqual([text for text in logs.texts if "failed" in text], [])

    async def test_findings_of_a_step_that_succeeded_are_events(self) -> None:
        kind = Kind("Storage was not configured", Level.WARNING)

        async def storage(transaction: Transaction, node: NodeName, layout: str) -> Sequence[Finding]:
            return (Finding(kind, "It has no disk."),)

        await self.fill(self.node)
        await self.process(steps_of(following(self.database, storage=storage)))
        await self.until_done()
        self.assertEqual(await self.events_of(self.node, kind), [("It has no disk.", "")])
        self.assertEqual(await self.status_of(self.node), NodeStatus.READY)

    async def test_a_notice_wakes_this_process_at_once_and_the_others_by_a_notification(self) -> None:
        second = self.make(self.dsn)
        await second.start()
        await self.process(self.counted(), database=second)
        woken: list[Worker | None] = []
        notice = Notice(self.database, lambda: woken.append(None))
        await self.until_done()
        await self.fill(self.node)
        for _ in range(10):
            notice()
        self.assertEqual(len(woken), 10)
        # No time goes by for the other process.
        await self.until_done(seconds=0)
        self.assertEqual(await self.status_of(self.node), NodeStatus.READY)


class MessageTests(WorkerTestCase):
    async def test_a_report_is_an_event_and_its_files_are_results(self) -> None:
        report = StatusMessage(
            "finish", "curtin", "cmd-install/stage", "installed", 1.0, "FAIL",
            (MessageFile("/tmp/install.log", b"\x00log", 1), MessageFile("/tmp/a", b"")),
        )  # fmt: skip
        await self.intake.message(self.node, report)
        await self.process()
        await self.until_done()
        self.assertEqual(
            await self.events_of(self.node, kinds.NODE_COMMISSIONING_EVENT_FAILED),
            [("curtin finish cmd-install/stage (FAIL): installed", "")],
        )
        rows = await self.database.query(
            "SELECT script_name, status, script_result.exit_status, content FROM script_result"
            " JOIN script_output ON script_result_id = script_result.id ORDER BY script_result.id"
        )
        failed = ScriptStatus.FAILED.value
        self.assertEqual(rows, [("/tmp/install.log", failed, 1, b"\x00log"), ("/tmp/a", failed, None, b"")])
        self.assertEqual(await self.status_of(self.node), NodeStatus.COMMISSIONING)

    async def test_cloud_init_that_fails_without_a_word_of_the_runner_fails_the_node_and_says_why(self) -> None:
        await self.intake.message(self.node, FAILED)
        await self.process()
        await self.until_done()
        self.assertEqual(await self.status_of(self.node), NodeStatus.FAILED_COMMISSIONING)
        [(reason, _)] = await self.events_of(self.node, kinds.REQUEST_NODE_MARK_FAILED_SYSTEM)
        self.assertIn("before its runner said that it was done (no python3)", reason)

    async def test_cloud_init_that_fails_after_the_runner_is_done_changes_nothing(self) -> None:
        for script in self.results:
            await self.intake.signal(self.node, self.finished(script))
        await self.intake.signal(self.node, Signal(SignalStatus.OK))
        await self.intake.message(self.node, FAILED)
        await self.process()
        await self.until_done()
        self.assertEqual(await self.status_of(self.node), NodeStatus.READY)

    async def test_what_a_retired_token_reports_does_not_fail_the_present_run(self) -> None:
        await self.end(self.node)
        await self.begin(self.node)
        await self.intake.message(self.node, FAILED, retired=True)
        await self.process()
        await self.until_done()
        self.assertEqual(await self.status_of(self.node), NodeStatus.COMMISSIONING)

    async def test_a_script_says_of_itself_in_yaml_what_it_came_to(self) -> None:
        async def say(script: str, exit_status: int, text: bytes) -> tuple[int, str]:
            signal = Signal(
                SignalStatus.WORKING, script_result_id=self.results[script], exit_status=exit_status,
                uploads=(Upload(script, {"stdout": b"", "result": text}),),
            )  # fmt: skip
            await self.intake.signal(self.node, signal)
            self.workers[0].wake()
            await self.until_done()
            found: tuple[int, str] = await self.result(script, "status", "post_processing")
            return found

        await self.process()
        self.assertEqual(await say("10-lshw", 0, b"status: degraded"), (ScriptStatus.DEGRADED, "done"))
        self.assertEqual(await say("20-block-devices", 1, b"status: passed"), (ScriptStatus.FAILED, "done"))
        self.assertEqual(await say("30-network-interfaces", 0, b"status: ["), (ScriptStatus.PASSED, "failed"))
        self.assertEqual(len(self.flushLoggedErrors()), 1)


FAILED = StatusMessage("finish", "cloudinit", "modules-final", "no python3", 2.0, "FAIL")
