"""What a run has come to: Ready, on to the tests, or failed with a reason that says what people must look at."""

from __future__ import annotations

from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from region.commissioning.finishing import Ended, NotDone, reasons
from region.commissioning.signals import Signal, SignalStatus
from region.nodes import kinds
from region.nodes.statuses import NodeStatus, ResultType, ScriptStatus
from region.nodes.store import NodeStore
from region.nodes.values import NodeName
from tests.region.commissioning import COMMISSIONING_SCRIPTS, WorkerTestCase

ENDED = st.builds(Ended, st.just("10-lshw"), st.sampled_from(ScriptStatus), st.none() | st.integers(0, 2))
NOT_DONE = st.builds(
    NotDone,
    st.sampled_from(("hook", "storage", "tags", "power")),
    st.just("10-lshw"),
    st.sampled_from(("OutputUnusable", "KeyError")),
    st.just("E"),
    st.just("c"),
)


class ReasonTests(SynchronousTestCase):
    @given(st.sampled_from(("OK", "TESTING", "FAILED")), st.text(max_size=5), st.lists(ENDED), st.lists(NOT_DONE))
    @settings(max_examples=200)
    def test_there_is_a_reason_for_exactly_what_is_no_success(
        self, said: str, message: str, scripts: list[Ended], failures: list[NotDone]
    ) -> None:
        good = {ScriptStatus.PASSED, ScriptStatus.DEGRADED, ScriptStatus.SKIPPED}
        went_well = (
            said != "FAILED"
            and all(script.status in good for script in scripts)
            and all(failure.step in ("tags", "power") for failure in failures)
        )
        self.assertEqual(not reasons(said, message, scripts, failures), went_well)

    def test_a_reason_says_which_script_how_it_ended_and_where_to_look(self) -> None:
        found = reasons(
            "FAILED",
            "2 scripts failed.",
            [
                Ended("a", ScriptStatus.FAILED, 3), Ended("b", ScriptStatus.TIMEDOUT),
                Ended("c", ScriptStatus.RUNNING), Ended("d", ScriptStatus.FAILED, 1, suppressed=True),
            ],
            [
                NotDone("hook", "10-lshw", "ValueError", "bad.", "c0ffee"),
                NotDone("hook", "40-lldp", "OutputUnusable", "the script printed nothing", "cd"),
                NotDone("storage", "", "KeyError", "'x'", "ab"),
            ],
        )  # fmt: skip
        self.assertEqual(
            found,
            [
                "Scripts failed: a (failed, exit status 3), b (timed out), c (the node never said how it ended).",
                "What scripts wrote cannot be used: 40-lldp (the script printed nothing; in the log under cd).",
                "The region could not process the output of 10-lshw (ValueError: bad; in the log under c0ffee), the "
                "default storage (KeyError: 'x'; in the log under ab).",
                "The node said that it failed: 2 scripts failed.",
            ],
        )

    def test_of_many_scripts_the_first_are_named(self) -> None:
        [found] = reasons("OK", "", [Ended(f"s{number}", ScriptStatus.ABORTED) for number in range(10)], [])
        self.assertTrue(found.endswith("s7 (aborted) and 2 more."), found)


class FinishTests(WorkerTestCase):
    async def say(self, node: NodeName, *signals: Signal) -> None:
        for signal in signals:
            await self.intake.signal(node, signal)

    async def all_finished(self, node: NodeName) -> None:
        await self.say(node, *(self.finished(script) for script in self.results))

    async def test_a_node_whose_scripts_all_passed_is_ready(self) -> None:
        await self.all_finished(self.node)
        await self.say(self.node, Signal(SignalStatus.OK))
        await self.process()
        await self.until_done()
        self.assertEqual(await self.status_of(self.node), NodeStatus.READY)
        self.assertEqual(await self.database.query("SELECT ended IS NOT NULL FROM script_set"), [(True,)])

    async def test_a_node_goes_on_to_be_tested_and_is_ready_when_that_went_well(self) -> None:
        node = await self.make_node()
        self.results = await self.begin(node, testing=("smartctl",))
        commissioning = {script: self.results[script] for script in COMMISSIONING_SCRIPTS}
        await self.say(node, *(self.finished(script) for script in commissioning), Signal(SignalStatus.TESTING))
        await self.process()
        await self.until_done()
        self.assertEqual(await self.status_of(node), NodeStatus.TESTING)
        self.assertFalse((await self.intake.signal(node, self.finished("smartctl"))).stop)
        await self.say(node, Signal(SignalStatus.OK))
        self.workers[0].wake()
        await self.until_done()
        self.assertEqual(await self.status_of(node), NodeStatus.READY)

    async def test_ok_without_the_tests_fails_them(self) -> None:
        node = await self.make_node()
        self.results = await self.begin(node, testing=("smartctl",))
        await self.say(node, *(self.finished(script) for script in COMMISSIONING_SCRIPTS), Signal(SignalStatus.OK))
        await self.process()
        await self.until_done()
        self.assertEqual(await self.status_of(node), NodeStatus.FAILED_TESTING)
        self.assertEqual(await self.result("smartctl"), ScriptStatus.ABORTED)
        [(reason, _)] = await self.events_of(node, kinds.REQUEST_NODE_MARK_FAILED_SYSTEM)
        self.assertEqual(reason, "Scripts failed: smartctl (the node never said how it ended).")

    async def test_a_script_that_failed_fails_the_commissioning_and_the_runner_is_told_to_stop(self) -> None:
        node = await self.make_node()
        self.results = await self.begin(node, testing=("smartctl",))
        for script in COMMISSIONING_SCRIPTS:
            await self.say(node, self.finished(script, exit_status=int(script == "10-lshw")))
        await self.say(node, Signal(SignalStatus.TESTING))
        await self.process()
        await self.until_done()
        self.assertEqual(await self.status_of(node), NodeStatus.FAILED_COMMISSIONING)
        self.assertEqual(await self.result("smartctl"), ScriptStatus.ABORTED)
        self.assertTrue((await self.intake.signal(node, self.finished("smartctl"))).stop)
        self.assertEqual(len(await self.outputs(self.results["smartctl"], late=True)), 1)
        row = await self.database.one("SELECT status_message FROM node WHERE id = %s", (node.id,))
        self.assertEqual(row, ("Scripts failed: 10-lshw (failed, exit status 1).",))

    async def test_a_run_that_was_ended_meanwhile_changes_nothing(self) -> None:
        await self.all_finished(self.node)
        await self.say(self.node, Signal(SignalStatus.OK))
        await self.end(self.node)
        await self.process()
        await self.until_done()
        self.assertEqual(await self.status_of(self.node), NodeStatus.COMMISSIONING)
        self.assertEqual(
            await self.database.query("SELECT storage_layout, facts ? 'networking' FROM node"), [("", False)]
        )

    async def test_a_run_that_is_not_what_the_node_does_is_ended_and_changes_nothing_else(self) -> None:
        self.results |= await self.begin(self.node, testing=("smartctl",), commissioning=())
        await self.end(self.node)
        await self.say(self.node, Signal(SignalStatus.OK))
        await self.process()
        await self.until_done()
        self.assertEqual(await self.status_of(self.node), NodeStatus.COMMISSIONING)
        self.assertEqual(await self.result("smartctl"), ScriptStatus.ABORTED)
        rows = await self.database.query("SELECT ended IS NULL FROM script_set WHERE result_type = %s",
                                         (ResultType.TESTING,))  # fmt: skip
        self.assertEqual(rows, [(False,)])

    async def test_what_failed_in_an_earlier_run_is_not_said_of_a_later_one(self) -> None:
        store = NodeStore(self.database)

        async def told() -> list[str]:
            node = await store.read(self.node.system_id)
            assert node is not None
            return [problem.error for problem in await store.problems(node)]

        await self.end(self.node)
        for commissioning, testing, expected in (
            ((), ("a",), ["in 2 of 2"]), (("b",), (), ["in 0 of 3"]), (("c",), ("d",), ["in 2 of 5", "in 0 of 4"]),
        ):  # fmt: skip
            await self.begin(self.node, commissioning=commissioning, testing=testing)
            await self.database.execute(
                """INSERT INTO step_failure (node_id, script_set_id, step, error_type, error, correlation)
                   SELECT node_id, id, 'hook', 'E', 'in ' || result_type || ' of ' || id, 'c' FROM script_set
                   WHERE ended IS NULL ORDER BY id"""
            )
            self.assertEqual(await told(), expected)
            await self.database.execute("UPDATE script_set SET ended = clock_timestamp() WHERE ended IS NULL")
            self.assertEqual(await told(), expected)

    async def test_an_option_of_the_run_leaves_the_power_control_as_people_set_it(self) -> None:
        power = Signal(SignalStatus.WORKING, power_type="ipmi", power_parameters={"power_address": "192.0.2.1"})
        for options, expected in (('{"skip_bmc_config": true}', "manual"), ("{}", "ipmi")):
            await self.database.execute("UPDATE script_set SET options = %s", (options,))
            await self.intake.signal(self.node, evolve(power, message=options))
            await self.process()
            await self.until_done()
            self.assertEqual(await self.database.one("SELECT power_type FROM node"), (expected,))

    async def test_options_of_the_run_leave_out_storage_and_networking(self) -> None:
        await self.database.execute(
            """UPDATE script_set SET options = '{"skip_storage": true, "skip_networking": true}'"""
        )
        await self.all_finished(self.node)
        await self.say(self.node, Signal(SignalStatus.OK))
        await self.process()
        await self.until_done()
        self.assertEqual(
            await self.database.query("SELECT status, storage_layout, facts ? 'networking' FROM node"),
            [(NodeStatus.READY, "", False)],
        )
