"""What a node says is stored, whatever it says and however often, and its outputs byte for byte."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.task import deferLater
from twisted.trial.unittest import SynchronousTestCase

from region.commissioning.intake import FINAL, SignalRefused, UnknownNode, UnknownResult, comes_to, is_beat
from region.commissioning.signals import MessageFile, Signal, SignalStatus, StatusMessage, Upload
from region.database import Transaction
from region.nodes.statuses import ResultType, ScriptStatus
from region.nodes.values import NodeName, Standing
from tests.database import reactor
from tests.region.commissioning import COMMISSIONING_SCRIPTS, NOISE, CommissioningTestCase

OUTPUT = (Upload("10-lshw", {"stdout": b"out"}),)
SIGNALS = st.builds(
    Signal,
    st.sampled_from(SignalStatus),
    script_result_id=st.none() | st.just(1),
    exit_status=st.none() | st.integers(-3, 3),
    uploads=st.sampled_from(((), OUTPUT)),
)


class MeaningTests(SynchronousTestCase):
    @given(SIGNALS)
    @settings(max_examples=200)
    def test_only_an_exit_status_of_zero_is_success(self, signal: Signal) -> None:
        status, ends = comes_to(signal)
        self.assertEqual(ends, status.is_finished)
        if status is ScriptStatus.PASSED:
            self.assertEqual(signal.exit_status, 0)

    @given(SIGNALS)
    @settings(max_examples=200)
    def test_a_script_of_which_there_is_an_exit_status_other_than_zero_has_ended(self, signal: Signal) -> None:
        if signal.exit_status:
            status, ends = comes_to(signal)
            self.assertTrue(ends)
            self.assertTrue(status.is_failure)

    @given(SIGNALS)
    @settings(max_examples=200)
    def test_a_signal_that_brings_something_is_no_mere_beat(self, signal: Signal) -> None:
        if signal.uploads or signal.exit_status is not None or signal.status in FINAL:
            self.assertFalse(is_beat(signal))

    def test_what_comes_before_a_script_may_go_well_or_not(self) -> None:
        def of(status: SignalStatus, exit_status: int | None) -> tuple[ScriptStatus, bool]:
            return comes_to(Signal(status, script_result_id=1, exit_status=exit_status))

        self.assertEqual(of(SignalStatus.INSTALLING, None), (ScriptStatus.INSTALLING, False))
        self.assertEqual(of(SignalStatus.INSTALLING, 0), (ScriptStatus.INSTALLING, False))
        self.assertEqual(of(SignalStatus.INSTALLING, 100), (ScriptStatus.FAILED_INSTALLING, True))
        self.assertEqual(of(SignalStatus.APPLYING_NETCONF, 1), (ScriptStatus.FAILED_APPLYING_NETCONF, True))
        self.assertEqual(of(SignalStatus.WORKING, None), (ScriptStatus.RUNNING, False))
        self.assertEqual(of(SignalStatus.TIMEDOUT, None), (ScriptStatus.TIMEDOUT, True))


class IntakeTests(CommissioningTestCase):
    async def test_an_output_is_stored_byte_for_byte_and_is_to_be_looked_into(self) -> None:
        files = {"output": NOISE * 100, "stdout": b"", "stderr": b"\x00\\x00'", "result": b"status: passed"}
        signal = Signal(
            SignalStatus.WORKING, script_result_id=self.results["10-lshw"], exit_status=0, runtime=1.5,
            uploads=(Upload("10-lshw", files),),
        )  # fmt: skip
        standing = await self.intake.signal(self.node, signal)
        self.assertEqual((standing.status.label, standing.stop), ("Commissioning", False))
        self.assertEqual(await self.outputs(self.results["10-lshw"]), [files])
        self.assertEqual(
            await self.result("10-lshw", "status", "exit_status", "runtime", "post_processing", "started < ended"),
            (2, 0, 1.5, "pending", True),
        )
        self.assertEqual(await self.queued(), [("hook", "10-lshw")])
        self.assertEqual(self.woken, 1)

    async def test_a_signal_that_comes_again_changes_nothing(self) -> None:
        said = [
            Signal(SignalStatus.WORKING, script_result_id=self.results["10-lshw"]),
            self.finished("10-lshw"),
            self.finished("20-block-devices", exit_status=None),
            Signal(SignalStatus.WORKING, exit_status=1, uploads=(Upload("of-its-own", {"output": b"1"}),)),
            Signal(SignalStatus.OK, "done", power_type="ipmi", power_parameters={"power_pass": "x\x00\ud800"}),
        ]
        for signal in said:
            await self.intake.signal(self.node, signal)
        before = await self.everything()
        for signal in (*said, *reversed(said)):
            await self.intake.signal(self.node, signal)
        self.assertEqual(await self.everything(), before)

    async def test_two_deliveries_at_once_are_one(self) -> None:
        signal = self.finished("10-lshw")
        await gatherResults([Deferred.fromCoroutine(self.intake.signal(self.node, signal)) for _ in range(8)])
        self.assertEqual(len(await self.outputs(self.results["10-lshw"])), 1)
        self.assertEqual(await self.outputs(self.results["10-lshw"], late=True), [])
        self.assertEqual(await self.queued(), [("hook", "10-lshw")])

    async def test_a_signal_that_comes_again_after_its_run_changes_nothing(self) -> None:
        said = [
            self.finished("10-lshw"),
            Signal(SignalStatus.WORKING, exit_status=0, uploads=(Upload("of-its-own", {"output": b"1"}),)),
            Signal(SignalStatus.OK, "done"),
        ]
        for signal in said:
            await self.intake.signal(self.node, signal)
        await self.end(self.node)
        before = await self.everything()
        for retired in (False, True):
            for signal in said:
                standing = await self.intake.signal(self.node, signal, retired=retired)
                self.assertTrue(standing.stop)
        self.assertEqual(await self.everything(), before)

    async def test_what_comes_after_the_end_is_kept_as_late(self) -> None:
        await self.end(self.node)
        before = await self.result("10-lshw", "status", "exit_status", "ended", "post_processing")
        standing = await self.intake.signal(self.node, self.finished("10-lshw", exit_status=3))
        self.assertTrue(standing.stop)
        self.assertEqual(await self.result("10-lshw", "status", "exit_status", "ended", "post_processing"), before)
        self.assertEqual(await self.outputs(self.results["10-lshw"]), [])
        expected = {"output": NOISE + b"\n", "stdout": NOISE, "stderr": b""}
        self.assertEqual(await self.outputs(self.results["10-lshw"], late=True), [expected])
        self.assertEqual(await self.queued(), [("message", "10-lshw")])

    async def test_another_outcome_of_a_script_that_has_ended_is_kept_beside_the_first(self) -> None:
        await self.intake.signal(self.node, self.finished("10-lshw"))
        await self.intake.signal(self.node, self.finished("10-lshw", exit_status=1, out=b"other"))
        self.assertEqual(await self.result("10-lshw", "status", "exit_status"), (2, 0))
        [late] = await self.outputs(self.results["10-lshw"], late=True)
        self.assertEqual(late["stdout"], b"other")
        self.assertEqual(await self.database.query("SELECT exit_status FROM late_result"), [(1,)])

    async def test_without_an_exit_status_a_script_has_failed_and_people_are_told(self) -> None:
        await self.intake.signal(self.node, self.finished("10-lshw", exit_status=None))
        self.assertEqual(await self.result("10-lshw", "status", "exit_status"), (3, None))
        self.assertEqual(await self.queued(), [("message", "10-lshw"), ("hook", "10-lshw")])
        [[payload]] = await self.database.query("SELECT payload FROM processing WHERE step = 'message'")
        self.assertEqual(payload["kind"], "EXIT_STATUS_MISSING")
        self.assertIn("10-lshw had ended, but not with which exit status", payload["description"])

    async def test_a_status_only_moves_forward(self) -> None:
        async def say(status: SignalStatus, **options: Any) -> ScriptStatus:
            signal = Signal(status, script_result_id=self.results["10-lshw"], **options)
            await self.intake.signal(self.node, signal)
            found: ScriptStatus = await self.result("10-lshw")
            return found

        self.assertEqual(await say(SignalStatus.INSTALLING), ScriptStatus.INSTALLING)
        self.assertEqual(await say(SignalStatus.WORKING), ScriptStatus.RUNNING)
        [started] = await self.result("10-lshw", "started")
        self.assertEqual(await say(SignalStatus.INSTALLING, message="late"), ScriptStatus.RUNNING)
        self.assertEqual(await say(SignalStatus.TIMEDOUT), ScriptStatus.TIMEDOUT)
        self.assertEqual(await say(SignalStatus.WORKING, message="later"), ScriptStatus.TIMEDOUT)
        self.assertEqual(await self.result("10-lshw", "started"), (started,))
        self.assertEqual(await self.database.query("SELECT * FROM late_result"), [])

    async def test_outputs_without_a_result_go_to_the_script_of_that_name(self) -> None:
        uploads = (Upload("10-lshw", {"stdout": b"1"}), Upload("20-block-devices", {"stdout": b"2"}))
        await self.intake.signal(self.node, Signal(SignalStatus.WORKING, exit_status=0, uploads=uploads))
        self.assertEqual(await self.outputs(self.results["10-lshw"]), [{"stdout": b"1"}])
        self.assertEqual(await self.outputs(self.results["20-block-devices"]), [{"stdout": b"2"}])
        self.assertEqual(await self.result("20-block-devices"), ScriptStatus.PASSED)

    async def test_a_script_that_nobody_asked_for_gets_a_result_of_its_own(self) -> None:
        uploads = (Upload("nobody\x00-knows", {"output": b"it"}),)
        await self.intake.signal(self.node, Signal(SignalStatus.WORKING, exit_status=4, uploads=uploads))
        row = await self.database.one(
            "SELECT id, status, exit_status FROM script_result WHERE script_name = 'nobody\\x00-knows'"
        )
        assert row is not None
        self.assertEqual(row[1:], (3, 4))
        self.assertEqual(await self.outputs(row[0]), [{"output": b"it"}])

    async def test_what_a_node_without_any_run_brings_is_kept(self) -> None:
        other = await self.make_node()
        uploads = (Upload("10-lshw", {"output": b"it"}),)
        standing = await self.intake.signal(other, Signal(SignalStatus.OK, exit_status=0, uploads=uploads))
        self.assertTrue(standing.stop)
        rows = await self.database.query(
            "SELECT script_result.id, script_set.ended IS NOT NULL FROM script_result"
            " JOIN script_set ON script_set.id = script_set_id WHERE node_id = %s",
            (other.id,),
        )
        self.assertEqual([ended for _, ended in rows], [True])
        self.assertEqual(await self.outputs(rows[0][0]), [{"output": b"it"}])

    async def test_the_outputs_go_to_the_result_that_is_named_whatever_they_are_called(self) -> None:
        signal = Signal(
            SignalStatus.WORKING, script_result_id=self.results["10-lshw"], exit_status=0,
            uploads=(Upload("10-lshw-sda", {"stdout": b"1"}),),
        )  # fmt: skip
        await self.intake.signal(self.node, signal)
        self.assertEqual(await self.outputs(self.results["10-lshw"]), [{"stdout": b"1"}])

    async def test_a_result_and_outputs_of_other_scripts_in_one_signal_are_all_stored(self) -> None:
        signal = Signal(
            SignalStatus.WORKING, script_result_id=self.results["10-lshw"], exit_status=0,
            uploads=(Upload("20-block-devices", {"stdout": b"1"}), Upload("other", {"stdout": b"2"})),
        )  # fmt: skip
        await self.intake.signal(self.node, signal)
        self.assertEqual(await self.result("10-lshw"), ScriptStatus.PASSED)
        self.assertEqual(await self.outputs(self.results["20-block-devices"]), [{"stdout": b"1"}])
        rows = await self.database.query("SELECT id FROM script_result WHERE script_name = 'other'")
        self.assertEqual(await self.outputs(rows[0][0]), [{"stdout": b"2"}])

    async def test_the_result_of_another_node_is_refused_and_left_alone(self) -> None:
        other = await self.make_node()
        with self.assertRaisesRegex(UnknownResult, "no script result of node machine-2"):
            await self.intake.signal(other, self.finished("10-lshw"))
        for number in (0, -1, 1 << 63, 1 << 90):
            with self.assertRaises(UnknownResult):
                await self.intake.signal(self.node, Signal(SignalStatus.WORKING, script_result_id=number))
        self.assertEqual(await self.result("10-lshw"), ScriptStatus.PENDING)
        self.assertEqual(await self.database.query("SELECT * FROM signal"), [])

    async def test_numbers_that_do_not_fit_are_a_wrong_request_and_no_error_of_the_region(self) -> None:
        with self.assertRaises(SignalRefused):
            await self.intake.signal(self.node, self.finished("10-lshw", exit_status=1 << 31))

    async def test_a_node_that_is_gone_is_no_error_of_the_region(self) -> None:
        nobody = NodeName(12345, "nobody", "nobody")
        with self.assertRaises(UnknownNode):
            await self.intake.signal(nobody, Signal(SignalStatus.OK))
        with self.assertRaises(UnknownNode):
            await self.intake.message(nobody, MESSAGE)
        with self.assertRaises(UnknownNode):
            await self.intake.standing(nobody)

    async def test_an_unknown_version_of_a_script_loses_no_result(self) -> None:
        for script, version in (("10-lshw", 77), ("20-block-devices", 1 << 80)):
            await self.intake.signal(self.node, self.finished(script, script_version_id=version))
            self.assertEqual(await self.result(script), ScriptStatus.PASSED)
        self.assertEqual([step for step, _ in await self.queued()], ["message", "hook"] * 2)

    async def test_the_word_that_commissioning_is_done_queues_what_follows_behind_the_hooks(self) -> None:
        await self.intake.signal(self.node, self.finished("10-lshw"))
        await self.intake.signal(self.node, Signal(SignalStatus.OK, "done"))
        self.assertEqual([step for step, _ in await self.queued()], ["hook", "storage", "networking", "tags", "finish"])
        self.assertEqual(
            await self.database.query("SELECT signal_status, signalled IS NOT NULL, ended FROM script_set"),
            [("OK", True, None)],
        )

    async def test_testing_ends_commissioning_alone_and_the_next_word_the_tests(self) -> None:
        node = await self.make_node()
        self.results = await self.begin(node, testing=("smartctl",))
        await self.intake.signal(node, Signal(SignalStatus.TESTING))
        steps = ["storage", "networking", "tags", "finish"]
        self.assertEqual([step for step, _ in await self.queued(node)], steps)
        standing = await self.intake.signal(node, self.finished("smartctl"))
        self.assertFalse(standing.stop)
        await self.intake.signal(node, Signal(SignalStatus.TESTING))
        self.assertEqual([step for step, _ in await self.queued(node)], steps)
        await self.intake.signal(node, Signal(SignalStatus.FAILED, "1 test failed"))
        self.assertEqual([step for step, _ in await self.queued(node)], [*steps, "finish"])
        self.assertEqual(
            await self.database.query(
                "SELECT signal_status FROM script_set WHERE node_id = %s ORDER BY result_type", (node.id,)
            ),
            [("TESTING",), ("FAILED",)],
        )

    async def test_ok_ends_the_commissioning_and_then_the_tests(self) -> None:
        node = await self.make_node()
        await self.begin(node, testing=("smartctl",))
        await self.intake.signal(node, Signal(SignalStatus.OK))
        self.assertEqual(
            [step for step, _ in await self.queued(node)], ["storage", "networking", "tags", "finish", "finish"]
        )

    async def test_the_same_words_end_each_run_of_a_node_however_often_it_is_commissioned_and_tested(self) -> None:
        said = Signal(SignalStatus.OK, "done")
        kinds = {ResultType.COMMISSIONING: COMMISSIONING_SCRIPTS, ResultType.TESTING: ("smartctl",)}
        for run in (list(kinds), [ResultType.TESTING], [ResultType.COMMISSIONING], [ResultType.TESTING], list(kinds)):
            for kind in ResultType:
                await self.end(self.node, kind)
            await self.database.execute("DELETE FROM processing")
            await self.begin(
                self.node,
                commissioning=kinds[ResultType.COMMISSIONING] if ResultType.COMMISSIONING in run else (),
                testing=kinds[ResultType.TESTING] if ResultType.TESTING in run else (),
            )
            for _ in range(2):
                await self.intake.signal(self.node, said)
                finishing = [step for step, _ in await self.queued() if step == "finish"]
                self.assertEqual(finishing, ["finish"] * len(run), run)

    async def test_a_retired_token_neither_ends_a_run_nor_is_a_heartbeat_nor_touches_its_results(self) -> None:
        await self.end(self.node)
        earlier, self.results = self.results, await self.begin(self.node)
        uploads = (Upload("20-block-devices", {"stdout": b"old"}),)
        for signal in (
            Signal(SignalStatus.WORKING), Signal(SignalStatus.OK), Signal(SignalStatus.OK, power_type="ipmi"),
            Signal(SignalStatus.WORKING, exit_status=0, uploads=uploads),
        ):  # fmt: skip
            self.assertTrue((await self.intake.signal(self.node, signal, retired=True)).stop)
        await self.intake.message(self.node, MESSAGE, retired=True)
        self.assertEqual(await self.database.query("SELECT * FROM node_heartbeat"), [])
        # Its two ends are told of: the words differ.
        self.assertEqual(await self.queued(), [("message", name) for name in (None, None, "20-block-devices", None)])
        self.assertEqual(await self.result("20-block-devices"), ScriptStatus.PENDING)
        self.assertEqual(await self.outputs(earlier["20-block-devices"], late=True), [{"stdout": b"old"}])

    async def test_of_a_node_that_was_given_up_people_are_told_once_that_it_has_come_to_its_end_after_all(self) -> None:
        await self.end(self.node)
        for signal in (self.finished("10-lshw"), *[Signal(SignalStatus.FAILED, "2 scripts failed")] * 2):
            self.assertTrue((await self.intake.signal(self.node, signal, retired=True)).stop)
        payloads = await self.database.query("SELECT payload FROM processing WHERE step = 'message' ORDER BY id")
        self.assertEqual([payload["kind"] for (payload,) in payloads], ["LATE_OUTPUT", "LATE_END"])
        for said in ("FAILED", "2 scripts failed", "kept as late", "commission or test it again"):
            self.assertIn(said, payloads[1][0]["description"])

    async def test_whether_a_token_is_good_and_retired_is_looked_up_when_the_signal_is_stored(self) -> None:
        await self.database.execute(
            "INSERT INTO node_token (node_id, consumer_key, token_key, token_secret, expires) VALUES"
            " (%(node)s, 'a', 'good', '', NULL), (%(node)s, 'b', 'retired', '', now() + interval '1 hour'),"
            " (%(node)s, 'c', 'over', '', now())",
            {"node": self.node.id},
        )
        working = Signal(SignalStatus.WORKING, "1")
        self.assertFalse((await self.intake.signal(self.node, working, token="good")).stop)
        self.assertTrue((await self.intake.signal(self.node, Signal(SignalStatus.OK), token="retired")).stop)
        self.assertEqual(await self.queued(), [("message", None)])  # people are told; nothing of the run is done
        other = await self.make_node()
        for node, token in ((self.node, "over"), (self.node, "none"), (other, "good")):
            with self.assertRaisesRegex(UnknownNode, "has expired"):
                await self.intake.signal(node, working, token=token)

    async def test_what_comes_late_for_a_run_that_is_not_kept_any_more_is_kept(self) -> None:
        old, stray = self.finished("10-lshw"), Signal(SignalStatus.WORKING, script_result_id=1 << 40, exit_status=0)
        await self.end(self.node)
        await self.database.execute("DELETE FROM script_set")
        self.results = await self.begin(self.node)
        for _ in range(2):
            self.assertTrue((await self.intake.signal(self.node, old, retired=True)).stop)
        stored = await self.database.query(
            "SELECT content FROM script_output WHERE name = 'stdout' AND script_result_id <> ALL(%s)",
            (list(self.results.values()),),
        )
        self.assertEqual(stored, [(NOISE,)])
        self.assertEqual(await self.result("10-lshw"), ScriptStatus.PENDING)
        # One whose token is good speaks of what there is.
        with self.assertRaises(UnknownResult):
            await self.intake.signal(self.node, stray)

    async def test_a_runner_whose_run_was_replaced_is_told_to_stop(self) -> None:
        await self.end(self.node)
        earlier, self.results = self.results, await self.begin(self.node)
        working = Signal(SignalStatus.WORKING, script_result_id=earlier["10-lshw"])
        self.assertTrue((await self.intake.signal(self.node, working)).stop)
        self.assertFalse((await self.intake.signal(self.node, Signal(SignalStatus.WORKING))).stop)
        self.assertFalse((await self.intake.standing(self.node)).stop)
        self.assertTrue((await self.intake.standing(self.node, retired=True)).stop)

    async def test_being_heard_of_ends_the_wait_for_the_boot_and_says_what_was_heard(self) -> None:
        await self.intake.ping(self.node, "fetched its scripts")
        self.assertEqual(await self.database.query("SELECT heard FROM node_heartbeat"), [("fetched its scripts",)])
        self.assertEqual(await self.database.query("SELECT boot_deadline FROM script_set"), [(None,)])
        signal = Signal(SignalStatus.WORKING, "1 of 3", script_result_id=self.results["10-lshw"])
        await self.intake.signal(self.node, signal)
        self.assertEqual(await self.database.query("SELECT heard FROM node_heartbeat"), [("WORKING 10-lshw: 1 of 3",)])

    async def test_a_mere_heartbeat_leaves_nothing_behind(self) -> None:
        await self.database.execute("UPDATE script_set SET boot_deadline = NULL")
        before = await self.everything()
        for _ in range(3):
            await self.intake.signal(self.node, Signal(SignalStatus.WORKING))
        self.assertEqual(await self.everything(), before)
        self.assertEqual(self.woken, 0)

    async def test_a_status_message_is_queued_once_with_its_files(self) -> None:
        for _ in range(2):
            await self.intake.message(self.node, MESSAGE)
        [[payload]] = await self.database.query("SELECT payload FROM processing WHERE step = 'message'")
        self.assertEqual(payload["name"], "modules-final/config-\\x00")
        self.assertEqual([file["path"] for file in payload["files"]], ["/var/log/x"])

    async def test_what_a_signal_says_of_power_is_queued_as_it_was_said(self) -> None:
        signal = Signal(SignalStatus.WORKING, power_type="ipmi", power_parameters={"power_user": "a\x00b", "n": 1})
        await self.intake.signal(self.node, signal)
        self.assertEqual(await self.queued(), [("power", None)])
        self.assertEqual(
            await self.database.query("SELECT payload FROM processing"),
            [({"power_type": "ipmi", "power_parameters": {"power_user": "a\\x00b", "n": 1}},)],
        )

    async def test_signals_of_one_node_are_stored_one_after_the_other_and_wait_for_no_other_node(self) -> None:
        other = await self.make_node()
        waiting: list[Deferred[Standing]] = []

        async def holding(transaction: Transaction) -> None:
            await transaction.query("SELECT lock_signals(%s)", (self.node.id,))
            waiting.append(Deferred.fromCoroutine(self.intake.signal(self.node, Signal(SignalStatus.OK))))
            await self.intake.signal(other, Signal(SignalStatus.OK))
            await self.until_locked_out()
            self.assertFalse(waiting[0].called)

        await self.database.transact(holding)
        await waiting[0]

    async def until_locked_out(self) -> None:
        """Wait until some statement waits for a lock."""
        while not await self.database.query("SELECT FROM pg_locks WHERE NOT granted"):
            await deferLater(reactor, 0.002)

    async def test_a_run_that_is_ended_at_the_same_moment_keeps_its_end_and_the_output_is_late(self) -> None:
        waiting: list[Deferred[Standing]] = []

        async def ending(transaction: Transaction) -> None:
            await transaction.execute("UPDATE script_result SET status = %s, ended = now()", (ScriptStatus.ABORTED,))
            await transaction.execute("UPDATE script_set SET ended = now()")
            waiting.append(Deferred.fromCoroutine(self.intake.signal(self.node, self.finished("10-lshw"))))
            await self.until_locked_out()

        await self.intake.ping(self.node, "booted")
        await self.database.transact(ending)
        await waiting[0]
        self.assertEqual(await self.result("10-lshw"), ScriptStatus.ABORTED)
        self.assertEqual(await self.outputs(self.results["10-lshw"]), [])
        self.assertEqual(len(await self.outputs(self.results["10-lshw"], late=True)), 1)


MESSAGE = StatusMessage(
    "finish", "cloudinit", "modules-final/config-\x00", "ran", 1.5, "SUCCESS", (MessageFile("/var/log/x", NOISE),)
)
