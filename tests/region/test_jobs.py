"""The life of an import: which step may follow which, and what its row says."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from region.images.job import ENDED, ImportJob, JobLife, JobStore
from region.images.lock import try_lock
from region.upstream import Problem
from tests.database import DatabaseTestCase
from tests.examples import examples

NOW = datetime(2026, 3, 1, tzinfo=UTC)
ORDER = ("queued", "reading", "fetching", "publishing", "done")


def new_job() -> ImportJob:
    return ImportJob(1, "queued", "request", NOW)


class LifeTests(SynchronousTestCase):
    """The machine."""

    def setUp(self) -> None:
        self.stopped = 0
        self.life = JobLife(new_job(), self.stop)

    def stop(self) -> None:
        self.stopped += 1

    def to(self, state: str) -> None:
        steps = {
            "reading": lambda: self.life.inputs.begin(NOW),
            "fetching": lambda: self.life.inputs.fetch(4, 400),
            "publishing": lambda: self.life.inputs.publish(),
            "done": lambda: self.life.inputs.finish(7, "published generation 7", NOW),
        }
        for name, step in steps.items():
            step()
            if name == state:
                return

    def test_an_import_goes_through_its_steps_in_order(self) -> None:
        states = [self.life.job.state]
        self.life.inputs.begin(NOW)
        states.append(self.life.job.state)
        self.life.inputs.fetch(4, 400)
        states.append(self.life.job.state)
        self.life.inputs.progress(1, 120, "noble squashfs")
        self.assertEqual((self.life.job.files_done, self.life.job.bytes_done), (1, 120))
        self.assertEqual(self.life.job.fetching, "noble squashfs")
        self.life.inputs.publish()
        states.append(self.life.job.state)
        self.life.inputs.finish(7, "published generation 7", NOW)
        states.append(self.life.job.state)
        self.assertEqual(tuple(states), ORDER)
        self.assertEqual((self.life.job.generation, self.life.job.ended, self.life.job.fetching), (7, NOW, ""))

    def test_a_running_import_is_cancelled_and_what_it_does_is_stopped(self) -> None:
        for state in ("reading", "fetching"):
            self.setUp()
            self.to(state)
            self.assertTrue(self.life.inputs.cancel("cancelled on request", NOW))
            self.assertEqual((self.life.job.state, self.life.job.outcome), ("cancelled", "cancelled on request"))
            self.assertEqual(self.stopped, 1)

    def test_an_import_that_is_publishing_cannot_be_cancelled(self) -> None:
        self.to("publishing")
        self.assertFalse(self.life.inputs.cancel("too late", NOW))
        self.assertEqual((self.life.job.state, self.stopped), ("publishing", 0))

    def test_what_fails_because_the_import_was_cancelled_does_not_change_its_end(self) -> None:
        self.to("fetching")
        self.life.inputs.cancel("cancelled on request", NOW)
        self.life.inputs.fail("the fetch was stopped", NOW)
        self.life.inputs.progress(2, 200, "late")
        self.assertEqual((self.life.job.state, self.life.job.outcome), ("cancelled", "cancelled on request"))
        self.assertEqual(self.life.job.fetching, "")

    def test_an_import_may_fail_at_any_step(self) -> None:
        for state in ("reading", "fetching", "publishing"):
            self.setUp()
            self.to(state)
            self.life.inputs.fail("no space left", NOW)
            self.assertEqual((self.life.job.state, self.life.job.ended), ("failed", NOW))


class LifeMachine(RuleBasedStateMachine):
    """Whatever happens in whatever order, an import ends at most once and never goes back."""

    def __init__(self) -> None:
        super().__init__()
        self.stops = 0
        self.life = JobLife(new_job(), self.stop)
        self.before = self.life.job

    def stop(self) -> None:
        self.stops += 1

    @rule()
    def go_on(self) -> None:
        inputs = self.life.inputs
        match self.life.job.state:
            case "queued":
                inputs.begin(NOW)
            case "reading":
                inputs.fetch(3, 30)
            case "fetching":
                inputs.publish()
            case "publishing":
                inputs.finish(1, "published", NOW)

    @rule(files=st.integers(0, 3))
    def progress(self, files: int) -> None:
        if self.life.job.state != "queued":
            self.life.inputs.progress(files, files * 10, "a file")

    @rule()
    def fail(self) -> None:
        self.life.inputs.fail("it broke", NOW)

    @rule()
    def cancel(self) -> None:
        before = self.life.job.state
        self.assert_same(self.life.inputs.cancel("enough", NOW), before in ("queued", "reading", "fetching"))

    def assert_same(self, found: bool, expected: bool) -> None:
        assert found is expected

    @invariant()
    def it_ends_once_and_never_goes_back(self) -> None:
        job, before = self.life.job, self.before
        if before.state in ENDED:
            assert job == before
        elif job.state in ORDER:
            assert ORDER.index(job.state) >= ORDER.index(before.state)
        assert (job.state in ENDED) == (job.ended is not None)
        assert self.stops == (job.state == "cancelled")
        assert not (job.state in ENDED and job.fetching)
        self.before = job


class LifeMachineTests(SynchronousTestCase):
    """:class:`LifeMachine`, run."""

    def test_an_import_ends_once_and_never_goes_back_whatever_happens(self) -> None:
        run_state_machine_as_test(LifeMachine, settings=examples(50))


class JobStoreTests(DatabaseTestCase):
    """The rows, on a real database."""

    def setUp(self) -> Deferred[None]:  # type: ignore[override]  # trial waits for what setUp returns
        return super().setUp().addCallback(self._begin)

    def _begin(self, _: None) -> None:
        self.jobs = JobStore(self.database)

    async def state(self, job_id: int) -> tuple[str, str]:
        job = await self.jobs.get(job_id)
        assert job is not None
        return job.state, job.outcome

    async def test_at_most_one_import_is_queued(self) -> None:
        first = await self.jobs.enqueue("timer")
        self.assertEqual(await self.jobs.enqueue("request"), first)
        async with self.database.session() as session:
            claimed = await self.jobs.claim(session)
            assert claimed is not None
            self.assertEqual((claimed.id, claimed.state), (first, "reading"))
            self.assertNotEqual(await self.jobs.enqueue("request"), first)

    async def test_a_trigger_that_is_none_is_refused(self) -> None:
        with self.assertRaises(ValueError):
            await self.jobs.enqueue("whim")

    async def test_there_is_nothing_to_claim_when_nothing_is_queued(self) -> None:
        async with self.database.session() as session:
            self.assertIsNone(await self.jobs.claim(session))

    async def test_how_an_import_stands_is_kept_and_its_end_is_final(self) -> None:
        job_id = await self.jobs.enqueue("request")
        async with self.database.session() as session:
            job = await self.jobs.claim(session)
            assert job is not None
            life = JobLife(job, lambda: None)
            life.inputs.begin(job.started or NOW)
            life.inputs.fetch(4, 400)
            life.inputs.progress(1, 120, "noble squashfs")
            await self.jobs.save(session, life.job)
            self.assertEqual(await self.jobs.get(job_id), life.job)
            life.inputs.fail("no space left", NOW + timedelta(hours=1))
            await self.jobs.save(session, life.job)
            await self.jobs.save(session, job)
        self.assertEqual(await self.jobs.get(job_id), life.job)

    async def test_what_a_dead_region_process_left_is_ended(self) -> None:
        left = await self.jobs.enqueue("request")
        async with self.database.session() as session:
            await self.jobs.claim(session)
        queued = await self.jobs.enqueue("request")
        async with self.database.session() as session:
            self.assertTrue(await try_lock(session))
            ended = await self.jobs.abandon(session)
        self.assertEqual([job.id for job in ended], [left])
        self.assertEqual(await self.state(left), ("failed", "the region stopped while it ran"))
        self.assertEqual(await self.state(queued), ("queued", ""))

    async def test_a_known_reason_is_said(self) -> None:
        left = await self.jobs.enqueue("request")
        async with self.database.session() as session:
            await self.jobs.claim(session)
            await self.jobs.abandon(session, {left: "the connection was lost"})
        self.assertEqual(await self.state(left), ("failed", "the connection was lost"))

    async def test_an_import_that_had_published_when_its_process_died_is_done(self) -> None:
        left = await self.jobs.enqueue("request")
        async with self.database.session() as session:
            await self.jobs.claim(session)
            await self.database.execute("UPDATE import_job SET state = 'publishing', generation = 4")
            await self.jobs.abandon(session)
        state, outcome = await self.state(left)
        self.assertEqual(state, "done")
        self.assertIn("generation 4 is current", outcome)

    async def test_problems_are_kept_in_order_and_without_nul(self) -> None:
        job_id = await self.jobs.enqueue("request")
        problems = [
            Problem("error", "http://a/", "prod\x00uct", "1", "squashfs", "the sha256 is wrong"),
            Problem("warning", "http://a/", "", "", "", "unknown ftype"),
        ]
        await self.jobs.add_problems(self.database, job_id, problems)
        await self.jobs.add_problems(self.database, job_id, [])
        found = await self.jobs.problems(job_id)
        self.assertEqual([each.reason for each in found], ["the sha256 is wrong", "unknown ftype"])
        self.assertEqual(found[0].product, "prod\\x00uct")

    async def test_the_list_is_newest_first(self) -> None:
        first = await self.jobs.enqueue("request")
        self.assertEqual(await self.jobs.cancel_queued("never mind"), (first,))
        second = await self.jobs.enqueue("timer")
        self.assertEqual([job.id for job in await self.jobs.list()], [second, first])
        self.assertEqual([job.id for job in await self.jobs.list(limit=1)], [second])
        self.assertEqual([job.id for job in await self.jobs.unfinished()], [second])
        self.assertIsNone(await self.jobs.get(999))

    async def test_imports_of_long_ago_are_forgotten(self) -> None:
        old = await self.jobs.enqueue("request")
        await self.jobs.cancel_queued("never mind")
        await self.database.execute("UPDATE import_job SET ended = now() - interval '91 days'")
        new = await self.jobs.enqueue("request")
        self.assertEqual(await self.jobs.forget_old(self.database), 1)
        self.assertIsNone(await self.jobs.get(old))
        self.assertEqual(await self.state(new), ("queued", ""))
