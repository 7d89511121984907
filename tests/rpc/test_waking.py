"""What there is to do is done: by one at a time, again when it failed, and not after the end."""

from __future__ import annotations

from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from hypothesis.strategies import integers, lists, sampled_from
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from rpc.waking import BREAK_SECONDS, Waker

FIRST, LONGEST = 1.0, 6.0
TICK = 0.5


class Broken(Exception):
    """Why a work failed."""


class WakerTests(SynchronousTestCase):
    """What each state makes of what happens."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.works: list[Deferred[float | None]] = []
        self.told: list[tuple[type[BaseException] | None, float | None]] = []
        self.waker = Waker(self.work, self.clock, retry=(FIRST, LONGEST), failed=self.failed)

    async def work(self) -> float | None:
        self.works.append(Deferred())
        return await self.works[-1]

    def failed(self, reason: Failure, seconds: float | None) -> None:
        self.told.append((reason.type, seconds))

    def state(self) -> tuple[int, bool, bool]:
        return len(self.works), self.waker.is_started, self.waker.is_working

    def test_nothing_is_done_before_the_start_and_then_it_is_looked_at_once(self) -> None:
        self.waker.wake()
        self.assertEqual(self.state(), (0, False, False))
        self.successResultOf(self.waker.when_idle())
        self.waker.start()
        self.assertEqual(self.state(), (1, True, True))

    def test_starting_again_only_wakes(self) -> None:
        self.waker.start()
        self.waker.start()
        self.assertEqual(self.state(), (1, True, True))
        self.works[0].callback(None)
        self.assertEqual(self.state(), (2, True, True))
        self.works[1].callback(None)
        self.waker.start()
        self.assertEqual(self.state(), (3, True, True))
        self.works[2].callback(60.0)
        self.waker.start()
        self.assertEqual(self.state(), (4, True, True))

    def test_any_number_of_wakes_while_it_works_are_followed_by_one_more_work(self) -> None:
        self.waker.start()
        for _ in range(3):
            self.waker.wake()
        self.assertEqual(len(self.works), 1)
        self.works[0].callback(None)
        self.assertEqual(self.state(), (2, True, True))
        self.works[1].callback(None)
        self.assertEqual(self.state(), (2, True, False))

    def test_those_who_wait_are_told_when_no_other_work_follows(self) -> None:
        self.waker.start()
        idle = self.waker.when_idle()
        self.waker.wake()
        self.works[0].callback(None)
        self.assertNoResult(idle)
        self.works[1].callback(None)
        self.successResultOf(idle)

    def test_one_who_waits_and_then_wakes_has_the_others_wait_on(self) -> None:
        self.waker.start()
        self.waker.when_idle().addCallback(lambda _: self.waker.wake())
        other = self.waker.when_idle()
        self.works[0].callback(None)
        self.assertNoResult(other)
        self.assertEqual(self.state(), (2, True, True))
        self.works[1].callback(None)
        self.successResultOf(other)

    def test_a_work_that_has_to_wait_is_done_again_then_or_when_it_is_woken(self) -> None:
        self.waker.start()
        self.works[0].callback(5.0)
        self.successResultOf(self.waker.when_idle())
        self.clock.advance(4.5)
        self.assertEqual(len(self.works), 1)
        self.clock.advance(0.5)
        self.assertEqual(len(self.works), 2)
        self.works[1].callback(5.0)
        self.waker.wake()
        self.assertEqual(len(self.works), 3)
        self.works[2].callback(None)
        self.assertEqual(self.clock.getDelayedCalls(), [], "what woke it is not followed by what it waited for")

    def test_a_moment_that_is_over_is_now(self) -> None:
        self.waker.start()
        self.works[0].callback(-5.0)
        (call,) = self.clock.getDelayedCalls()
        self.assertEqual(call.getTime(), self.clock.seconds())
        self.clock.advance(0)
        self.assertEqual(self.state(), (2, True, True))

    def test_a_work_that_failed_is_tried_again_ever_more_seldom_up_to_a_bound(self) -> None:
        self.waker.start()
        for seconds in (1.0, 2.0, 4.0, LONGEST, LONGEST):
            self.works[-1].errback(Broken())
            self.assertEqual(self.told[-1], (Broken, seconds))
            begun = len(self.works)
            self.clock.advance(seconds - TICK)
            self.assertEqual(len(self.works), begun)
            self.clock.advance(TICK)
            self.assertEqual(len(self.works), begun + 1)

    def test_after_a_work_that_ended_well_the_next_failure_is_the_first(self) -> None:
        self.waker.start()
        for result in (None, 1.0):
            self.works[-1].errback(Broken())
            self.waker.wake()
            self.works[-1].callback(result)
            self.waker.wake()
        for result in (None, 1.0):
            self.works[-1].errback(Broken())
            self.waker.wake()
            self.waker.wake()
            self.works[-1].callback(result)
        self.works[-1].errback(Broken())
        self.assertEqual(self.told, [(Broken, FIRST)] * 5)

    def test_a_failure_while_it_was_woken_is_told_and_tried_again_at_once(self) -> None:
        self.waker.start()
        self.waker.wake()
        self.works[0].errback(Broken())
        self.assertEqual((self.told, self.state()), ([(Broken, 0.0)], (2, True, True)))
        self.works[1].errback(Broken())
        self.assertEqual(self.told[1:], [(Broken, 2 * FIRST)])

    def test_those_who_wait_for_the_end_find_that_it_was_told_why(self) -> None:
        self.waker.start()
        seen: list[int] = []
        self.waker.when_idle().addCallback(lambda _: seen.append(len(self.told)))
        self.works[0].errback(Broken())
        self.waker.wake()
        self.waker.stop().addCallback(lambda _: seen.append(len(self.told)))
        self.assertEqual(seen, [1, 2])

    def test_works_go_on_when_telling_of_a_failure_fails(self) -> None:
        def broken(reason: Failure, seconds: float | None) -> None:
            raise ZeroDivisionError

        self.waker = Waker(self.work, self.clock, retry=(FIRST, LONGEST), failed=broken)
        self.waker.start()
        idle = self.waker.when_idle()
        self.works[0].errback(Broken())
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        self.successResultOf(idle)
        self.clock.advance(FIRST)
        self.assertEqual(self.state(), (2, True, True))

    def test_a_work_that_is_cancelled_from_elsewhere_failed(self) -> None:
        self.waker.start()
        self.works[0].cancel()
        self.assertEqual(self.told, [(CancelledError, FIRST)])
        self.clock.advance(FIRST)
        self.assertEqual(self.state(), (2, True, True))

    def test_a_stop_cancels_the_work_and_nothing_is_done_after_it(self) -> None:
        self.waker.start()
        self.waker.wake()
        idle = self.waker.when_idle()
        self.successResultOf(self.waker.stop())
        self.successResultOf(idle)
        self.assertEqual(self.told, [(CancelledError, None)])
        self.waker.wake()
        self.clock.advance(3600)
        self.assertEqual((self.state(), self.clock.getDelayedCalls()), ((1, False, False), []))
        self.successResultOf(self.waker.stop())

    def test_one_who_is_told_that_it_is_idle_may_wake_and_stop_it_and_nothing_is_done(self) -> None:
        stopped: list[Deferred[None]] = []

        def wake_and_stop(_: None) -> None:
            self.waker.wake()
            stopped.append(self.waker.stop())

        self.waker.start()
        self.waker.when_idle().addCallback(wake_and_stop)
        self.works[0].callback(None)
        self.assertEqual(self.state(), (1, False, False))
        self.successResultOf(stopped[0])

    def test_a_stop_while_it_waits_takes_nothing(self) -> None:
        self.waker.start()
        self.works[0].callback(5.0)
        self.successResultOf(self.waker.stop())
        self.assertEqual((self.state(), self.clock.getDelayedCalls()), ((1, False, False), []))

    def test_one_that_was_never_started_is_stopped_at_once(self) -> None:
        self.successResultOf(self.waker.stop())

    def test_a_work_has_the_time_that_the_stop_leaves_it(self) -> None:
        self.waker.start()
        stopped, again = self.waker.stop(2.0), self.waker.stop()
        self.assertEqual(self.state(), (1, False, True))
        self.clock.advance(2.0 - TICK)
        self.assertNoResult(stopped)
        self.works[0].callback(5.0)
        self.successResultOf(stopped)
        self.successResultOf(again)
        self.assertEqual((self.told, self.clock.getDelayedCalls()), ([], []))

    def test_a_work_that_does_not_end_in_that_time_is_cancelled(self) -> None:
        self.waker.start()
        stopped = self.waker.stop(2.0)
        self.clock.advance(2.0)
        self.successResultOf(stopped)
        self.assertEqual(self.told, [(CancelledError, None)])

    def test_what_a_cancelled_work_waits_for_at_its_end_is_cancelled_in_turn(self) -> None:
        ends: list[Deferred[float | None]] = []

        async def orderly() -> float | None:
            try:
                return await self.work()
            finally:
                ends.append(Deferred())
                await ends[-1]

        self.waker = Waker(orderly, self.clock, retry=(FIRST, LONGEST), failed=self.failed)
        self.waker.start()
        stopped = self.waker.stop()
        self.assertEqual(len(ends), 1)
        self.clock.advance(BREAK_SECONDS - TICK)
        self.assertNoResult(stopped)
        self.clock.advance(TICK)
        self.successResultOf(stopped)

    def test_a_work_that_has_its_own_waker_stopped_is_cancelled_as_soon_as_it_waits(self) -> None:
        stopped: list[Deferred[None]] = []

        async def last() -> float | None:
            stopped.append(self.waker.stop())
            return await self.work()

        self.waker = Waker(last, self.clock, retry=(FIRST, LONGEST), failed=self.failed)
        self.waker.start()
        self.successResultOf(stopped[0])
        self.assertEqual(self.told, [(CancelledError, None)])

    def test_thousands_of_works_that_have_nothing_to_wait_for_need_no_more_stack_than_one(self) -> None:
        left = [5000]

        async def quick() -> None:
            left[0] -= 1
            if left[0]:
                self.waker.wake()

        self.waker = Waker(quick, self.clock, retry=(FIRST, LONGEST), failed=self.failed)
        self.waker.start()
        self.assertEqual((left, self.told, self.waker.is_working), ([0], [], False))


ENDS = ("done", "put off", "put off", "failed", "failed")
PUT_OFF = 2.0
REACTIONS = ("nothing", "nothing", "nothing", "nothing", "wake", "wake", "wake", "stop", "wake and stop")


class Model(RuleBasedStateMachine):
    """Whatever happens in whatever order, also while somebody is told of something.

    ``wanted`` is whether a work has to begin because of a wake, ``due`` when one has to begin by the clock, ``pause``
    how many seconds after the next failure that is. What ``work`` and the listeners check is checked when it happens.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.waker = Waker(self.work, self.clock, retry=(FIRST, LONGEST), failed=self.failed)
        self.is_started = self.is_stopping = self.is_stopped = self.wanted = self.is_working = False
        self.due: float | None = None
        self.pause = FIRST
        self.deadline: float | None = None
        self.begun = 0
        self.begun_at_stop: int | None = None
        self.quick: list[str] = []
        self.stubborn = 0
        self.waited: Deferred[str] | None = None
        self.untold: float | str | None = "nothing"
        self.waiting: list[int] = []
        self.wrong: list[str] = []

    def check(self, is_right: bool, what: str) -> None:
        if not is_right:
            self.wrong.append(what)  # an exception in here would be taken for that of a work

    # What the waker calls

    async def work(self) -> float | None:
        self.check(not self.is_working, "two works at once")
        self.check(self.is_started and not self.is_stopping, "a work began that must not")
        self.check(self.wanted or (self.due is not None and self.due <= self.clock.seconds()), "a work for no reason")
        self.check(self.waker.is_working, "it says that it is not working")
        self.is_working, self.wanted, self.due = True, False, None
        self.begun += 1
        if self.quick:
            end = self.quick.pop()
            if end.startswith("wake"):
                self.wake()
                end = end.removeprefix("wake, ")
        else:
            end = await self.blocked()
        self.is_working = False
        if end == "failed":
            if self.is_stopping:
                self.untold = None
            elif self.wanted:
                self.untold = 0.0
            else:
                self.untold, self.due = self.pause, self.clock.seconds() + self.pause
            self.pause = min(self.pause * 2, LONGEST)
            raise Broken
        self.pause = FIRST
        if end == "put off":
            self.due = None if self.wanted or self.is_stopping else self.clock.seconds() + PUT_OFF
            return PUT_OFF
        return None

    async def blocked(self) -> str:
        while True:
            self.waited = Deferred()
            try:
                return await self.waited
            except CancelledError:
                self.check(self.is_stopping, "a work was cancelled though nobody stops")
                if not self.stubborn:
                    return "failed"
                self.stubborn -= 1

    def failed(self, reason: Failure, seconds: float | None) -> None:
        self.check(reason.type is Broken and seconds == self.untold, f"told {seconds} instead of {self.untold}")
        self.untold = "nothing"

    def idle(self, number: int, reaction: str) -> None:
        self.waiting[number] += 1
        self.check(not self.is_working and not self.waker.is_working, "it was called idle while it worked")
        self.check(self.untold == "nothing", "those who wait were told before it was told why it failed")
        if reaction.startswith("wake"):
            self.wake()
        if reaction.endswith("stop"):
            self.stop(0.0)

    # What happens

    @precondition(lambda self: not self.is_stopping)
    @rule()
    def start(self) -> None:
        self.is_started = self.wanted = True
        self.waker.start()

    @rule()
    def wake(self) -> None:
        self.wanted = self.is_started and not self.is_stopping
        self.waker.wake()

    @rule(ends=lists(sampled_from([*ENDS, *(f"wake, {end}" for end in ENDS)]), max_size=4))
    def plan(self, ends: list[str]) -> None:
        self.quick = ends

    @precondition(lambda self: self.is_working)
    @rule(end=sampled_from(ENDS))
    def end(self, end: str) -> None:
        assert self.waited is not None
        self.waited.callback(end)

    @rule(ticks=integers(1, 14))
    def wait(self, ticks: int) -> None:
        self.clock.pump([TICK] * ticks)

    @rule(reaction=sampled_from(REACTIONS))
    def wait_for_idle(self, reaction: str) -> None:
        number = len(self.waiting)
        self.waiting.append(0)
        self.waker.when_idle().addCallback(lambda _: self.idle(number, reaction))

    @precondition(lambda self: not self.is_stopping)
    @rule(stubborn=integers(0, 2))
    def be_stubborn(self, stubborn: int) -> None:
        self.stubborn = stubborn

    @rule(grace=sampled_from([None, None, None, None, None, 0.0, 0.0, 2.0]))
    def maybe_stop(self, grace: float | None) -> None:
        if grace is not None:  # most examples should have time for more than that
            self.stop(grace)

    def stop(self, grace: float) -> None:
        if not self.is_stopping:
            self.deadline = self.clock.seconds() + grace + BREAK_SECONDS * self.stubborn
        self.is_stopping, self.wanted, self.due = True, False, None
        self.waker.stop(grace).addCallback(self.ended)

    def ended(self, _: None) -> None:
        self.check(not self.is_working and not self.waker.is_working, "it was called stopped while it worked")
        self.is_stopped, self.begun_at_stop = True, self.begun

    def teardown(self) -> None:
        self.stop(2.0)
        self.clock.pump([TICK] * 30)
        self.all_is_well()
        assert self.is_stopped

    @invariant()
    def all_is_well(self) -> None:
        assert not self.wrong, self.wrong
        assert self.waker.is_working == self.is_working
        assert self.waker.is_started == (self.is_started and not self.is_stopping)
        assert self.untold == "nothing", "it was not told that a work failed"
        if not self.is_working:
            assert not self.wanted, "a wake was forgotten"
            assert self.due is None or self.due > self.clock.seconds(), "it was not tried again in time"
            assert self.waiting == [1] * len(self.waiting), "whoever waits for it to be idle is told once"
        else:
            assert max(self.waiting, default=0) <= 1
        if self.deadline is not None and self.clock.seconds() >= self.deadline:
            assert self.is_stopped, "a stop takes too long"
        if self.is_stopped:
            assert self.begun == self.begun_at_stop
            assert self.clock.getDelayedCalls() == []


class ModelTests(SynchronousTestCase):
    """:class:`Model`, run."""

    def test_works_come_one_at_a_time_none_is_forgotten_and_a_stop_is_the_end(self) -> None:
        run_state_machine_as_test(Model, settings=settings(deadline=None, max_examples=100, stateful_step_count=40))
