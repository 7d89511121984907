"""A node cannot have more stored than it should, and what it has is not lost by trying."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred

from region.commissioning.intake import TooMuch, UnknownNode
from region.commissioning.messages import MAX_FILES
from region.commissioning.signals import MessageFile, Signal, SignalStatus, StatusMessage, Upload
from region.database import Transaction
from region.nodes import kinds
from tests.region.commissioning import WorkerTestCase


def named(*scripts: str) -> Signal:
    """What scripts came to that nobody chose."""
    return Signal(
        SignalStatus.WORKING, exit_status=0, uploads=tuple(Upload(each, {"stdout": b"x"}) for each in scripts)
    )


def message(*files: MessageFile, description: str = "it goes on") -> StatusMessage:
    return StatusMessage("progress", "curtin", "stage", description, 1.0, files=files)


class BoundsTests(WorkerTestCase):
    async def count(self, table: str) -> Any:
        row = await self.database.one(f"SELECT count(*) FROM {table}")
        return row and row[0]

    async def refused(self, storing: Any, said: str) -> TooMuch:
        """Nothing of what is refused is stored."""
        before = await self.everything()
        try:
            await storing
        except TooMuch as error:
            self.assertIn(said, str(error))
            self.assertEqual(await self.everything(), before)
            return error
        raise AssertionError("it was stored")

    async def test_a_result_has_few_late_ones(self) -> None:
        for number in range(21):
            await self.intake.signal(self.node, self.finished("10-lshw", out=b"%d" % number))
        error = await self.refused(
            self.intake.signal(self.node, self.finished("10-lshw", out=b"one more")), "20 late ones"
        )
        self.assertFalse(error.is_rate)
        self.assertEqual(
            await self.outputs(self.results["10-lshw"]), [{"output": b"0\n", "stdout": b"0", "stderr": b""}]
        )
        # The one that was stored is a replay still, and others are not concerned.
        await self.intake.signal(self.node, self.finished("10-lshw", out=b"20"))
        await self.intake.signal(self.node, self.finished("20-block-devices"))

    async def test_a_run_has_as_many_results_as_scripts_that_a_node_may_have(self) -> None:
        there = await self.count("script_result")
        await self.intake.signal(self.node, named(*(f"script-{number}" for number in range(1000 - there))))
        await self.refused(self.intake.signal(self.node, named("one-more")), "script one-more would be one more")
        await self.intake.signal(self.node, self.finished("10-lshw"))

    async def test_a_run_has_so_many_signals(self) -> None:
        await self.intake.signal(self.node, named("a"))
        await self.database.execute("UPDATE node_usage SET signals = 9999")
        await self.intake.signal(self.node, named("b"))
        await self.refused(self.intake.signal(self.node, named("c")), "10000 different signals")
        standing = await self.intake.signal(self.node, Signal(SignalStatus.WORKING))
        self.assertFalse(standing.stop)

    async def test_a_run_has_so_many_bytes_and_the_next_one_has_room_again(self) -> None:
        await self.intake.signal(self.node, self.finished("10-lshw", out=b"12345"))
        self.assertEqual(await self.database.query("SELECT signals, bytes FROM node_usage"), [(1, 11)])
        await self.database.execute("UPDATE node_usage SET bytes = (1 << 30) - 2")
        storing = self.intake.signal(self.node, self.finished("20-block-devices", out=b"123"))
        await self.refused(storing, "1024 MiB of outputs")
        await self.end(self.node)
        self.results = await self.begin(self.node)
        await self.intake.signal(self.node, self.finished("20-block-devices", out=b"123"))

    async def test_a_node_that_is_deleted_at_that_moment_is_unknown(self) -> None:
        for storing, is_refused in (
            (lambda: self.intake.ping(self.node, "here"), False),
            (lambda: self.intake.signal(self.node, self.finished("10-lshw")), True),
            (lambda: self.intake.message(self.node, message()), True),
        ):
            outcomes: list[Any] = []

            async def delete(transaction: Transaction, storing: Any = storing, outcomes: Any = outcomes) -> None:
                await transaction.execute("DELETE FROM node WHERE id = %s", (self.node.id,))
                Deferred.fromCoroutine(storing()).addBoth(outcomes.append)
                await self.until(self.somebody_waits)  # for the row of the node

            await self.database.transact(delete)

            async def stored(outcomes: Any = outcomes) -> bool:
                return bool(outcomes)

            await self.until(stored)
            if is_refused:
                self.assertTrue(outcomes[0].check(UnknownNode), outcomes)
            else:
                self.assertEqual(outcomes, [None])
            self.node = await self.make_node()
            self.results = await self.begin(self.node)

    async def somebody_waits(self) -> bool:
        return bool(await self.database.query("SELECT FROM pg_locks WHERE NOT granted"))

    async def test_messages_are_bounded_by_the_hour(self) -> None:
        await self.intake.message(self.node, message())
        for column, most in (("messages", 2000), ("bytes", 64 << 20)):
            await self.database.execute(f"UPDATE node_message_rate SET since = now(), {column} = {most}")
            error = await self.refused(self.intake.message(self.node, message(description=column)), "within an hour")
            self.assertTrue(error.is_rate)
            await self.intake.signal(self.node, named(column))
            await self.database.execute("UPDATE node_message_rate SET since = now() - interval '61 minutes'")
            await self.intake.message(self.node, message(description=column))
        self.assertEqual(await self.database.query("SELECT messages FROM node_message_rate"), [(1,)])

    async def test_of_files_as_many_are_kept_as_there_is_room_for_and_people_are_told_of_the_others(self) -> None:
        await self.process()
        await self.intake.message(
            self.node, message(*(MessageFile(f"/{number}", b"") for number in range(MAX_FILES - 1)))
        )
        await self.intake.message(self.node, message(*(MessageFile(f"/more/{number}", b"") for number in range(3))))
        await self.until_done()
        rows = await self.database.query("SELECT script_name FROM script_result WHERE script_name LIKE '/more/%'")
        self.assertEqual(rows, [("/more/0",)])
        events = await self.events_of(self.node, kinds.NODE_COMMISSIONING_EVENT)
        self.assertIn("2 of its 3 files are not kept", events[-1][0])
