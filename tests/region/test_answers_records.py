"""What became of a release, read from the rows that publishing wrote, on a real database."""

from __future__ import annotations

from typing import Any

from region.answers.past import Kernel, Past, departures, origins
from region.answers.records import Records
from region.database import DatabaseUnavailable
from region.images.plan import Change
from tests.region.importing import image
from tests.region.test_generations import GenerationTestCase


class Counting:
    """The test's database, whose queries are counted, or fail."""

    def __init__(self, database: Any) -> None:
        self.database = database
        self.asked = 0
        self.error: Exception | None = None

    async def query(self, sql: str, parameters: Any = ()) -> list[tuple[Any, ...]]:
        self.asked += 1
        if self.error is not None:
            raise self.error
        rows: list[tuple[Any, ...]] = await self.database.query(sql, parameters)
        return rows


class TestRecords(GenerationTestCase):
    async def begin(self) -> None:
        """Noble comes, is replaced, and goes; jammy stays."""
        self.old, self.new, self.jammy = image(), image(version="20260201"), image("jammy")
        self.first = await self.publish(self.old, self.jammy)
        changed = [Change("changed", self.new, "version 20260201 instead of 20260101")]
        self.second = await self.publish(self.new, self.jammy, base=self.first.number, because=changed)
        went = [
            Change("removed", self.new, "no selection asks for it any more"),
            Change("kept", self.jammy, "the source could not be read"),
        ]
        self.third = await self.publish(self.jammy, base=self.second.number, because=went)
        self.counting = Counting(self.database)
        self.records = Records(self.counting)

    async def past(self, release: str, current: int) -> Past:
        return await self.records.past("ubuntu", release, current)

    async def test_it_has_every_change_in_order_with_times_and_reasons(self) -> None:
        await self.begin()
        past = await self.past("noble", self.third.number)
        self.assertEqual(
            [(step.generation, step.kind, step.version, step.reason) for step in past.steps],
            [
                (self.first.number, "added", "20260101", "upstream lists it"),
                (self.second.number, "changed", "20260201", "version 20260201 instead of 20260101"),
                (self.third.number, "removed", "20260201", "no selection asks for it any more"),
            ],
        )
        self.assertEqual(past.steps[1].published, self.second.published.timestamp())
        self.assertEqual(past.steps[1].kernel, Kernel.of(self.new))
        self.assertEqual(
            past.listed, {number: {Kernel.of(self.new)} for number in (self.first.number, self.second.number)}
        )
        [gone] = departures("", (), past)
        self.assertEqual((gone.generation, gone.reason), (self.third.number, "no selection asks for it any more"))

    async def test_it_says_where_a_published_image_comes_from(self) -> None:
        await self.begin()
        number = self.second.number
        [origin] = origins([self.new], await self.past("noble", number), number)
        assert origin.brought is not None
        assert origin.first is not None
        self.assertEqual((origin.brought.generation, origin.first.generation), (number, self.first.number))
        [origin] = origins([self.jammy], await self.past("jammy", self.third.number), self.third.number)
        self.assertEqual(origin.kept, "the source could not be read")

    async def test_generations_newer_than_what_is_asked_about_are_not_in_it(self) -> None:
        await self.begin()
        past = await self.past("noble", self.second.number)
        self.assertEqual([step.kind for step in past.steps], ["added", "changed"])

    async def test_it_is_read_once_for_each_generation(self) -> None:
        await self.begin()
        past = await self.past("noble", self.third.number)
        self.assertIs(await self.past("noble", self.third.number), past)
        self.assertEqual(self.counting.asked, 2)
        await self.past("noble", self.second.number)
        self.assertEqual(self.counting.asked, 4)

    async def test_a_failure_to_read_it_is_not_remembered(self) -> None:
        await self.begin()
        self.counting.error = DatabaseUnavailable("away")
        with self.assertRaises(DatabaseUnavailable):
            await self.past("noble", self.third.number)
        self.counting.error = None
        self.assertEqual(len((await self.past("noble", self.third.number)).steps), 3)

    async def test_before_anything_is_published_there_is_no_past_and_no_query(self) -> None:
        await self.begin()
        self.assertEqual((await self.records.past("ubuntu", "noble", None)).steps, ())
        self.assertEqual(self.counting.asked, 0)
