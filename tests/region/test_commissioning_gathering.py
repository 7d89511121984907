"""Calls that come at once share statements, and nothing else: no failure, no order, and no answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg2
from psycopg2.errors import SerializationFailure
from twisted.internet.defer import Deferred, gatherResults

from region.commissioning.gathering import AT_ONCE, MOST, MOST_BYTES, Gathering
from region.commissioning.signals import Signal, SignalStatus, Upload
from region.database import Database, DatabaseUnavailable
from tests.database import DatabaseTestCase
from tests.region.commissioning import CommissioningTestCase

FUNCTION = """
CREATE TABLE called (id serial, value int UNIQUE);
CREATE FUNCTION keep(value int) RETURNS TABLE (double int, text text) LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO called (value) VALUES (keep.value);
    RETURN QUERY SELECT 2 * keep.value, 'n' || keep.value;
END $$;
"""


class Counting:
    """A database whose statements are counted."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.statements: list[int] = []
        self.error: Exception | None = None

    async def query(self, sql: str, parameters: Sequence[Any]) -> Any:
        return await self._counted(self._database.query, sql, parameters)

    async def one(self, sql: str, parameters: Sequence[Any]) -> Any:
        return await self._counted(self._database.one, sql, parameters)

    async def transact(self, function: Any) -> Any:
        return await self._database.transact(function)

    async def _counted(self, run: Any, sql: str, parameters: Sequence[Any]) -> Any:
        self.statements.append(len(parameters))
        error, self.error = self.error, None
        if error is not None:
            raise error
        return await run(sql, parameters)


class GatheringTests(DatabaseTestCase):
    async def prepare(self) -> None:
        await self.database.execute(FUNCTION)
        self.counting = Counting(self.database)
        self.gathering = Gathering(self.counting, "keep(%s)")  # type: ignore[arg-type]  # all that it uses

    def call(self, key: int, value: object, size: int = 0) -> Deferred[Any]:
        return Deferred.fromCoroutine(self.gathering.call(key, (value,), size))

    async def kept(self) -> list[int]:
        return [value for (value,) in await self.database.query("SELECT value FROM called ORDER BY id")]

    async def test_each_gets_its_own_row_in_few_statements(self) -> None:
        await self.prepare()
        count = AT_ONCE + 2 * MOST
        rows = await gatherResults([self.call(number, number) for number in range(count)])
        self.assertEqual(rows, [(2 * number, f"n{number}") for number in range(count)])
        self.assertEqual(self.counting.statements, [1] * AT_ONCE + [MOST, MOST])

    async def test_one_alone_is_one_statement(self) -> None:
        await self.prepare()
        self.assertEqual(await self.call(1, 1), (2, "n1"))
        self.assertEqual(await self.call(2, 2), (4, "n2"))
        self.assertEqual(self.counting.statements, [1, 1])

    async def test_calls_of_one_statement_are_made_in_the_order_of_their_keys_and_for_one_key_as_they_came(
        self,
    ) -> None:
        await self.prepare()
        keys = [9] * AT_ONCE + [5, 3, 5, 1, 3]
        await gatherResults([self.call(key, number) for number, key in enumerate(keys)])
        self.assertEqual([value for value in await self.kept() if value >= AT_ONCE], [6, 4, 7, 3, 5])

    async def test_one_that_is_refused_spoils_no_other(self) -> None:
        await self.prepare()
        await self.call(0, 100)
        values = [*range(AT_ONCE), 50, 100, 51]
        calls = [self.call(0, value) for value in values]
        results: list[Any] = []
        for call in calls:
            try:
                results.append((await call)[0])
            except psycopg2.errors.UniqueViolation:
                results.append("refused")
        self.assertEqual(results, [*(2 * value for value in range(AT_ONCE)), 100, "refused", 102])

    async def test_one_that_no_statement_can_hold_spoils_no_other(self) -> None:
        await self.prepare()
        values: list[Any] = [*range(AT_ONCE), 50, "5\x00", 51]
        results: list[Any] = []
        for call in [self.call(0, value) for value in values]:
            try:
                results.append((await call)[0])
            except ValueError:
                results.append("refused")
        self.assertEqual(results, [*(2 * value for value in range(AT_ONCE)), 100, "refused", 102])

    async def test_one_that_collides_is_made_again(self) -> None:
        await self.prepare()
        self.counting.error = SerializationFailure("could not serialize")
        self.assertEqual(await self.call(1, 1), (2, "n1"))

    async def test_all_are_told_when_the_database_is_away_and_later_ones_are_served(self) -> None:
        await self.prepare()
        first = [self.call(0, number) for number in range(AT_ONCE)]
        together = [self.call(0, 10 + number) for number in range(3)]
        self.counting.error = DatabaseUnavailable("gone")
        await gatherResults(first)
        for call in together:
            with self.assertRaises(DatabaseUnavailable):
                await call
        self.assertEqual(await self.call(0, 20), (40, "n20"))
        self.assertEqual(sorted(await self.kept()), [0, 1, 2, 20])

    async def test_a_statement_has_no_more_bytes_than_it_may_unless_one_call_has(self) -> None:
        await self.prepare()
        sizes = [0] * AT_ONCE + [MOST_BYTES // 2, MOST_BYTES // 2, 1, 2 * MOST_BYTES, 0]
        await gatherResults([self.call(0, number, size) for number, size in enumerate(sizes)])
        self.assertEqual(self.counting.statements, [1] * AT_ONCE + [2, 1, 1, 1])


class SignalsTogetherTests(CommissioningTestCase):
    async def test_one_signal_that_cannot_be_stored_takes_no_other_with_it(self) -> None:
        nodes = [(self.node, self.results)]
        for _ in range(10):
            node = await self.make_node()
            nodes.append((node, await self.begin(node)))
        calls = []
        for number, (node, results) in enumerate(nodes):
            # The database refuses an output of an unknown name.
            name = "nonsense" if number == 5 else "stdout"
            upload = Upload("10-lshw", {name: b"%d" % number})
            signal = Signal(SignalStatus.WORKING, script_result_id=results["10-lshw"], exit_status=0, uploads=(upload,))
            calls.append(Deferred.fromCoroutine(self.intake.signal(node, signal)))
        for number, call in enumerate(calls):
            outputs = nodes[number][1]["10-lshw"]
            if number == 5:
                with self.assertRaises(psycopg2.errors.CheckViolation):
                    await call
                self.assertEqual(await self.outputs(outputs), [])
            else:
                await call
                self.assertEqual(await self.outputs(outputs), [{"stdout": b"%d" % number}])
