"""A node gets another status in one way: with all that hangs on it closed, and with its events."""

from __future__ import annotations

from typing import Any

import psycopg2
from twisted.internet.defer import gatherResults

from region.config import CommissioningConfig
from region.nodes import tokens
from region.nodes.life import Input, NotAllowed
from region.nodes.runs import RunOptions
from region.nodes.statuses import NodeStatus, ResultType, ScriptStatus
from region.nodes.transitions import NoSuchNode, change
from region.nodes.values import NodeName
from tests.database import DatabaseTestCase
from tests.region.machines import events_of, happen, make_node, make_script, start, status_of


class TransitionTests(DatabaseTestCase):
    async def results(self, set_id: int) -> list[tuple[str, ScriptStatus, bool]]:
        rows = await self.database.query(
            "SELECT script_name, status, ended IS NOT NULL FROM script_result WHERE script_set_id = %s ORDER BY id",
            (set_id,),
        )
        return [(name, ScriptStatus(status), ended) for name, status, ended in rows]

    async def open_sets(self, node: NodeName) -> list[int]:
        rows = await self.database.query(
            "SELECT result_type FROM script_set WHERE node_id = %s AND ended IS NULL ORDER BY 1", (node.id,)
        )
        return [result_type for (result_type,) in rows]

    async def run_of_two(self, status: NodeStatus = NodeStatus.NEW) -> tuple[NodeName, Any]:
        node = await make_node(self.database, status=status)
        lshw = await make_script(self.database, "10-lshw", timeout_seconds=90)
        memory = await make_script(
            self.database, "memtest", ResultType.TESTING, parameters={"runtime": {"type": "runtime", "value": 86400}}
        )
        return node, await start(
            self.database, node, [lshw], [memory], options=RunOptions(skip_storage=True), username="someone"
        )

    async def test_a_run_begins_with_all_that_it_needs(self) -> None:
        node, run = await self.run_of_two()
        self.assertIs(await status_of(self.database, node), NodeStatus.COMMISSIONING)
        self.assertEqual(sorted(run.sets), [ResultType.COMMISSIONING, ResultType.TESTING])
        rows = await self.database.query(
            """SELECT script_name, script_result.parameters, timeout_seconds, status, options->>'skip_storage',
                      boot_deadline - clock_timestamp() BETWEEN interval '19 min' AND interval '20 min'
               FROM script_result JOIN script_set ON script_set.id = script_set_id ORDER BY script_result.id"""
        )
        self.assertEqual(
            rows,
            [
                ("10-lshw", {}, 90, 0, "true", True),
                ("memtest", {"runtime": {"type": "runtime", "value": 86400}}, 0, 0, "true", True),
            ],
        )
        [current] = await self.database.query("SELECT commissioning_set_id, testing_set_id FROM node")
        self.assertEqual(current, (run.sets[ResultType.COMMISSIONING], run.sets[ResultType.TESTING]))
        found = await tokens.find(self.database, run.token.consumer_key, run.token.token_key)
        assert found is not None
        self.assertEqual(
            (found.token, found.node, found.status, found.expired), (run.token, node, NodeStatus.COMMISSIONING, False)
        )
        self.assertEqual(
            await events_of(self.database, node),
            [
                ("User starting node commissioning", "(someone)"),
                ("Node changed status", "From 'New' to 'Commissioning'"),
            ],
        )

    async def test_a_failure_closes_the_results_ends_the_runs_retires_the_token_and_says_why(self) -> None:
        node, run = await self.run_of_two()
        await self.database.execute("UPDATE script_result SET status = 2, ended = now() WHERE script_name = '10-lshw'")
        changed = await happen(
            self.database, node, Input.FAIL, reason="It did not boot.", unfinished=ScriptStatus.TIMEDOUT
        )
        self.assertEqual((changed.before, changed.after), (NodeStatus.COMMISSIONING, NodeStatus.FAILED_COMMISSIONING))
        self.assertEqual(
            await self.results(run.sets[ResultType.COMMISSIONING]), [("10-lshw", ScriptStatus.PASSED, True)]
        )
        self.assertEqual(await self.results(run.sets[ResultType.TESTING]), [("memtest", ScriptStatus.TIMEDOUT, True)])
        self.assertEqual(await self.open_sets(node), [])
        found = await tokens.find(self.database, run.token.consumer_key, run.token.token_key)
        assert found is not None
        self.assertEqual((found.token.expires is not None, found.expired), (True, False))
        self.assertIsNone(await tokens.current(self.database, node.id))
        [stored] = await self.database.query("SELECT status_message, previous_status FROM node")
        self.assertEqual(stored, ("It did not boot.", NodeStatus.COMMISSIONING))
        self.assertEqual(
            (await events_of(self.database, node))[-2:],
            [
                ("Marking node failed", "It did not boot."),
                ("Node changed status", "From 'Commissioning' to 'Failed commissioning'"),
            ],
        )

    async def test_when_tests_begin_the_commissioning_ends_and_the_tests_go_on(self) -> None:
        node, run = await self.run_of_two()
        await happen(self.database, node, Input.BEGIN_TESTING)
        self.assertEqual(await self.open_sets(node), [ResultType.TESTING])
        self.assertEqual(await self.results(run.sets[ResultType.TESTING]), [("memtest", ScriptStatus.PENDING, False)])
        self.assertEqual(await tokens.current(self.database, node.id), run.token)
        await happen(self.database, node, Input.TESTED)
        self.assertIs(await status_of(self.database, node), NodeStatus.READY)
        self.assertEqual(await self.open_sets(node), [])

    async def test_what_is_not_allowed_changes_nothing(self) -> None:
        node, run = await self.run_of_two()
        with self.assertRaises(NotAllowed):
            await happen(self.database, node, Input.TESTED)
        with self.assertRaises(NotAllowed):
            await start(self.database, node, [])
        self.assertIs(await status_of(self.database, node), NodeStatus.COMMISSIONING)
        self.assertEqual(await self.open_sets(node), [ResultType.COMMISSIONING, ResultType.TESTING])
        self.assertEqual(await tokens.current(self.database, node.id), run.token)
        self.assertEqual(len(await events_of(self.database, node)), 2)

    async def test_of_two_at_once_one_happens_and_the_other_is_told_what_there_is_now(self) -> None:
        node, _ = await self.run_of_two()

        async def attempt() -> str:
            try:
                await happen(self.database, node, Input.FAIL, reason="first")
            except NotAllowed as error:
                return str(error)
            return ""

        outcomes = sorted(await gatherResults([self.run_async(attempt()) for _ in range(4)]))
        self.assertEqual(outcomes[0], "")
        self.assertTrue(all("'Failed commissioning' cannot take 'fail'" in each for each in outcomes[1:]), outcomes)
        self.assertEqual(len(await events_of(self.database, node)), 4)

    async def test_a_node_that_is_gone_is_said_to_be(self) -> None:
        with self.assertRaises(NoSuchNode):
            await happen(self.database, NodeName(4711, "abc234", "gone"), Input.COMMISSION)

    async def test_nothing_else_can_change_a_status(self) -> None:
        node = await make_node(self.database)

        async def after_a_change(transaction: Any) -> None:
            await change(transaction, node.id, Input.MARK_BROKEN)
            await transaction.execute("UPDATE node SET status = 4 WHERE id = %s", (node.id,))

        with self.assertRaises(psycopg2.Error):
            await self.database.execute("UPDATE node SET status = 4 WHERE id = %s", (node.id,))
        with self.assertRaises(psycopg2.Error):
            await self.database.transact(after_a_change)
        self.assertIs(await status_of(self.database, node), NodeStatus.NEW)

    async def test_a_token_that_was_retired_is_good_until_its_grace_period_is_over(self) -> None:
        node = await make_node(self.database)
        run = await start(self.database, node, [], settings=CommissioningConfig(token_grace_minutes=0))
        await happen(self.database, node, Input.ABORT, username="someone", reason="wrong rack")
        found = await tokens.find(self.database, run.token.consumer_key, run.token.token_key)
        assert found is not None
        self.assertTrue(found.expired)
        self.assertEqual((await events_of(self.database, node))[-2][1], "(someone) - wrong rack")
        again = await start(self.database, node, [])
        self.assertIsNone(await tokens.find(self.database, run.token.consumer_key, run.token.token_key))
        self.assertEqual(await tokens.current(self.database, node.id), again.token)
        self.assertIsNone(await tokens.find(self.database, again.token.consumer_key, "none"))
        self.assertNotIn(again.token.token_secret, repr(again.token))

    async def test_only_so_many_runs_are_kept_and_none_that_there_is_work_to_do_for(self) -> None:
        node = await make_node(self.database)
        few = CommissioningConfig(keep_runs=2)
        runs = []
        for number in range(4):
            run = await start(self.database, node, [], settings=few)
            runs.append(run.sets[ResultType.COMMISSIONING])
            if not number:
                await self.database.execute(
                    "INSERT INTO processing (node_id, script_set_id, step) VALUES (%s, %s, 'hook')", (node.id, runs[0])
                )
            await happen(self.database, node, Input.ABORT)
        rows = await self.database.query("SELECT id FROM script_set ORDER BY id")
        self.assertEqual([identifier for (identifier,) in rows], [runs[0], *runs[2:]])

    async def test_tests_alone_leave_the_last_commissioning_in_place(self) -> None:
        node, run = await self.run_of_two()
        await happen(self.database, node, Input.COMMISSIONED)
        testing = await make_script(self.database, "stress", ResultType.TESTING)
        tests = await start(self.database, node, None, [testing])
        self.assertEqual(list(tests.sets), [ResultType.TESTING])
        self.assertIs(await status_of(self.database, node), NodeStatus.TESTING)
        [current] = await self.database.query("SELECT commissioning_set_id, testing_set_id FROM node")
        self.assertEqual(current, (run.sets[ResultType.COMMISSIONING], tests.sets[ResultType.TESTING]))
