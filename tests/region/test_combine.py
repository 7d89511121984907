"""Combining what racks answer: every state, whatever the order, and a failing rack never removes a release."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from region.answers.combine import (
    OFFERED,
    Answers,
    Held,
    Policy,
    Published,
    RackAnswer,
    State,
    Target,
    combine,
    overall,
)
from rpc.outcomes import Answered, Failed, NotConnected, Outcome, TimedOut
from tests.examples import examples
from tests.region.inventories import BOOKWORM, FOCAL, NOBLE, NOBLE_ARM, answered, published

UNHEARD_OF = Target("ubuntu", "trusty", "amd64")


TIMED_OUT = TimedOut(2.0)


def silent(rack: str, last: int | None, outcome: Outcome[Held] = TIMED_OUT, **known: Any) -> RackAnswer:
    return RackAnswer(rack, f"rack-{rack}", outcome, last, **known)


def of(published: Published, *racks: RackAnswer, policy: Policy = Policy.ANY) -> Answers:
    return combine(published, {rack.rack: rack for rack in racks}, policy)


class States(SynchronousTestCase):
    """DESIGN's table, row by row."""

    def test_a_release_that_one_rack_holds_is_deployable_by_default(self) -> None:
        answer = of(published([NOBLE]), answered("a", [NOBLE]), answered("b", [])).of(NOBLE)
        self.assertEqual((answer.state, answer.holders, answer.lacking), (State.DEPLOYABLE, ("a",), ("b",)))
        self.assertEqual(answer.reason, "1 of 2 racks hold it: rack-a.")
        self.assertIsNone(answer.retry_after)

    def test_a_release_that_a_rack_holds_stays_deployable_when_another_fails(self) -> None:
        for outcome in (TimedOut(2.0), Failed("Unhandled", "reference 1"), NotConnected(0.0)):
            answers = of(published([NOBLE]), answered("a", [NOBLE]), silent("b", 1, outcome))
            self.assertEqual(answers.of(NOBLE).state, State.DEPLOYABLE)

    def test_under_policy_all_every_rack_must_hold_it(self) -> None:
        racks = answered("a", [NOBLE]), answered("b", [])
        answer = of(published([NOBLE]), *racks, policy=Policy.ALL).of(NOBLE)
        self.assertEqual(answer.state, State.ARRIVING)
        answer = of(published([NOBLE]), racks[0], answered("b", [NOBLE]), policy=Policy.ALL).of(NOBLE)
        self.assertEqual((answer.state, answer.reason), (State.DEPLOYABLE, "All 2 racks hold it."))

    def test_under_policy_all_a_silent_rack_leaves_it_undetermined(self) -> None:
        answer = of(published([NOBLE]), answered("a", [NOBLE]), silent("b", 1), policy=Policy.ALL).of(NOBLE)
        self.assertEqual((answer.state, answer.silent), (State.UNDETERMINED, ("b",)))

    def test_a_published_release_that_no_rack_holds_yet_is_arriving(self) -> None:
        answer = of(published([], [NOBLE]), answered("a", [], 1, "syncing")).of(NOBLE)
        self.assertEqual((answer.state, answer.lacking, answer.retry_after), (State.ARRIVING, ("a",), 30))
        self.assertEqual(
            answer.reason, "Generation 2 lists it; rack-a does not hold it yet (rack-a is at generation 1, syncing)."
        )

    def test_a_published_release_is_undetermined_while_the_only_rack_is_silent(self) -> None:
        answer = of(published([NOBLE]), silent("a", 1)).of(NOBLE)
        self.assertEqual((answer.state, answer.retry_after), (State.UNDETERMINED, 10))
        self.assertEqual(answer.reason, "rack-a may hold it, but it did not answer within 2 s.")

    def test_the_reason_says_since_when_a_rack_is_silent(self) -> None:
        answer = of(published([NOBLE]), silent("a", 1, NotConnected(86400.0))).of(NOBLE)
        self.assertEqual(answer.reason, "rack-a may hold it, but it is not connected since 1970-01-02T00:00:00Z.")
        answer = of(published([NOBLE]), silent("a", 1, TimedOut(2), since=86400.0)).of(NOBLE)
        self.assertIn("did not answer within 2 s (silent since 1970-01-02T00:00:00Z)", answer.reason)

    def test_a_dropped_release_that_a_silent_rack_may_still_hold_is_undetermined(self) -> None:
        generations = published([FOCAL], [NOBLE])
        self.assertEqual(of(generations, silent("a", 1)).of(FOCAL).state, State.UNDETERMINED)

    def test_a_dropped_release_is_unknown_once_the_silent_rack_was_seen_past_it(self) -> None:
        generations = published([FOCAL], [NOBLE])
        self.assertEqual(of(generations, silent("a", 2)).of(FOCAL).state, State.UNKNOWN)

    def test_a_silent_rack_of_which_nothing_is_known_may_hold_what_any_generation_listed(self) -> None:
        generations = published([FOCAL], [NOBLE])
        self.assertEqual(of(generations, silent("a", None)).of(FOCAL).state, State.UNDETERMINED)
        self.assertEqual(of(generations, silent("a", None)).of(UNHEARD_OF).state, State.UNKNOWN)

    def test_a_silent_rack_at_a_generation_not_known_here_may_hold_anything(self) -> None:
        answers = of(published([NOBLE]), silent("a", 7))
        self.assertEqual(answers.of(UNHEARD_OF).state, State.UNDETERMINED)

    def test_what_a_rack_last_held_stays_open_when_it_falls_silent(self) -> None:
        answers = of(published([NOBLE]), silent("a", 1, last_targets=frozenset([FOCAL])))
        self.assertEqual(answers.of(FOCAL).state, State.UNDETERMINED)

    def test_a_release_that_a_rack_holds_although_it_is_no_longer_published_is_deployable(self) -> None:
        self.assertEqual(of(published([FOCAL], [NOBLE]), answered("a", [FOCAL])).of(FOCAL).state, State.DEPLOYABLE)

    def test_under_policy_all_a_dropped_release_that_not_all_hold_is_unknown_and_says_why(self) -> None:
        answers = of(
            published([FOCAL], [NOBLE]), answered("a", [FOCAL], 1), answered("b", [NOBLE], 2), policy=Policy.ALL
        )
        answer = answers.of(FOCAL)
        self.assertEqual(answer.state, State.UNKNOWN)
        self.assertEqual(
            answer.reason,
            "rack-a still holds it, but generation 2 no longer lists it, so rack-b cannot come to hold it.",
        )
        self.assertEqual(answers.choices, (NOBLE,))

    def test_a_release_that_nothing_lists_is_unknown(self) -> None:
        answers = of(published([NOBLE]), answered("a", [NOBLE]))
        self.assertEqual(answers.of(UNHEARD_OF).state, State.UNKNOWN)
        self.assertEqual(answers.choices, (NOBLE,))

    def test_without_racks_nothing_is_unknown(self) -> None:
        answers = of(published([NOBLE]))
        for target in (NOBLE, UNHEARD_OF):
            self.assertEqual(answers.of(target).state, State.NO_RACKS)
            self.assertIn("No rack is enrolled", answers.of(target).reason)

    def test_before_anything_is_published_nothing_is_unknown(self) -> None:
        answer = of(published(), answered("a", [], None, "empty")).of(NOBLE)
        self.assertEqual((answer.state, answer.retry_after), (State.NOTHING_PUBLISHED, 60))
        self.assertIn("No images have been published yet", answer.reason)

    def test_a_generation_without_any_release_is_no_reason_to_blame_the_client(self) -> None:
        answer = of(published([]), answered("a", [])).of(NOBLE)
        self.assertEqual(answer.state, State.NOTHING_PUBLISHED)
        self.assertIn("Generation 1 lists no release", answer.reason)

    def test_a_release_is_answered_by_architecture(self) -> None:
        answers = of(published([NOBLE, NOBLE_ARM]), answered("a", [NOBLE]))
        states = {answer.target.arch: answer.state for answer in answers.for_release("ubuntu", "noble")}
        self.assertEqual(states, {"amd64": State.DEPLOYABLE, "arm64": State.ARRIVING})
        self.assertEqual(overall(answers.for_release("ubuntu", "noble")).state, State.DEPLOYABLE)
        self.assertEqual([answer.state for answer in answers.for_release("ubuntu", "noble", "arm64")], [State.ARRIVING])

    def test_a_bare_name_means_every_release_so_called(self) -> None:
        other = Target("debian", "noble", "amd64")
        answers = of(published([NOBLE, BOOKWORM, other]), answered("a", [NOBLE]))
        self.assertEqual(answers.named("noble"), ("debian/noble", "ubuntu/noble"))
        self.assertEqual(answers.named("bookworm"), ("debian/bookworm",))
        self.assertEqual(answers.named("trusty"), ())
        self.assertEqual(answers.named("ubuntu/trusty"), ("ubuntu/trusty",))

    def test_a_bare_name_goes_on_to_work_when_an_image_of_one_s_own_has_the_same(self) -> None:
        mine, only_mine = Target("custom", "noble", "amd64"), Target("custom", "mine", "amd64")
        answers = of(published([NOBLE, mine, only_mine]), answered("a", [mine]))
        self.assertEqual(answers.named("noble"), ("ubuntu/noble",))
        self.assertEqual(answers.named("custom/noble"), ("custom/noble",))
        self.assertEqual(answers.named("mine"), ("custom/mine",))

    def test_many_racks_are_counted_rather_than_listed(self) -> None:
        racks = [answered(f"{number:03}", []) for number in range(100)]
        reason = of(published([], [NOBLE]), *racks).of(NOBLE).reason
        self.assertIn("rack-000, rack-001, rack-002 and 97 more do not hold it yet", reason)


TARGETS = [Target(os, release, arch) for os in ("a", "b") for release in ("x", "y") for arch in ("m", "n")]
some_targets = st.frozensets(st.sampled_from(TARGETS))
failures: st.SearchStrategy[Outcome[Held]] = st.one_of(
    st.just(TimedOut(2.0)),
    st.just(Failed("Unhandled", "boom")),
    st.just(NotConnected(None)),
    st.just(NotConnected(5.0)),
)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Published, dict[str, RackAnswer]]:
    """Some generations, and racks that hold part of what one of them listed or that are silent."""
    generations = published(*draw(st.lists(some_targets, max_size=3)))
    racks: dict[str, RackAnswer] = {}
    for name in draw(st.lists(st.sampled_from("abcde"), unique=True, max_size=5)):
        number = draw(st.one_of(st.none(), st.sampled_from([*generations.listed])) if generations.listed else st.none())
        listed = generations.listed[number] if number is not None else frozenset()
        rack = answered(name, draw(st.frozensets(st.sampled_from(sorted(listed)))) if listed else (), number)
        racks[name] = rack if draw(st.booleans()) else fails(rack, draw(failures))
    return generations, racks


def fails(rack: RackAnswer, outcome: Outcome[Held]) -> RackAnswer:
    """The same rack, had it not answered."""
    held = frozenset(rack.held.catalogue.targets) if rack.held else rack.last_targets
    return evolve(rack, outcome=outcome, last_targets=held)


def shown(answers: Answers) -> Mapping[Target, object]:
    return {target: answers.of(target) for target in [*TARGETS, UNHEARD_OF]}


policies = st.sampled_from(list(Policy))


class Properties(SynchronousTestCase):
    """What holds in every world."""

    @examples(100)
    @given(worlds(), policies, st.randoms())
    def test_the_order_of_answers_does_not_matter(self, world, policy, random) -> None:
        generations, racks = world
        shuffled = list(racks.items())
        random.shuffle(shuffled)
        first, second = combine(generations, racks, policy), combine(generations, dict(shuffled), policy)
        self.assertEqual(shown(first), shown(second))
        self.assertEqual(first, second)

    @examples(100)
    @given(worlds(), policies)
    def test_a_second_rack_with_the_same_answer_changes_no_state(self, world, policy) -> None:
        generations, racks = world
        twice = racks | {f"{name}2": evolve(rack, rack=f"{name}2") for name, rack in racks.items()}
        once, again = combine(generations, racks, policy), combine(generations, twice, policy)
        for target in [*TARGETS, UNHEARD_OF]:
            self.assertEqual(once.of(target).state, again.of(target).state)

    @examples(100)
    @given(worlds(), policies, failures, st.data())
    def test_a_failing_rack_never_removes_knowledge(self, world, policy, failure, data) -> None:
        generations, racks = world
        if not racks:
            return
        victim = data.draw(st.sampled_from(sorted(racks)))
        before = combine(generations, racks, policy)
        after = combine(generations, racks | {victim: fails(racks[victim], failure)}, policy)
        self.assertLessEqual(set(before.choices), set(after.choices))
        for target in [*TARGETS, UNHEARD_OF]:
            if before.of(target).state in OFFERED:
                self.assertIn(after.of(target).state, OFFERED)

    @examples(100)
    @given(worlds(), failures, some_targets)
    def test_a_silent_rack_more_never_hides_what_another_rack_holds(self, world, failure, last) -> None:
        generations, racks = world
        more = racks | {"z": silent("z", None, failure, last_targets=last)}
        after = combine(generations, more)
        for target, answer in combine(generations, racks).by_target.items():
            if answer.state is State.DEPLOYABLE:
                self.assertEqual(after.of(target).state, State.DEPLOYABLE)

    @examples(100)
    @given(worlds(), policies)
    def test_no_release_is_called_unknown_while_a_silent_rack_may_hold_it(self, world, policy) -> None:
        generations, racks = world
        answers = combine(generations, racks, policy)
        for rack in racks.values():
            if rack.held is not None:
                continue
            may_hold = set(rack.last_targets)
            for number, listed in generations.listed.items():
                if rack.last_generation is None or number >= rack.last_generation:
                    may_hold |= listed
            for target in may_hold:
                self.assertIn(answers.of(target).state, (State.DEPLOYABLE, State.UNDETERMINED))

    @examples(100)
    @given(worlds(), policies)
    def test_unknown_always_comes_with_something_to_choose_instead(self, world, policy) -> None:
        generations, racks = world
        answers = combine(generations, racks, policy)
        for target in [*TARGETS, UNHEARD_OF]:
            answer = answers.of(target)
            self.assertNotEqual(answer.reason, "")
            if answer.state is State.UNKNOWN:
                self.assertNotEqual(answers.choices, ())

    @examples(100)
    @given(worlds(), policies)
    def test_deployable_means_that_enough_racks_said_that_they_hold_it(self, world, policy) -> None:
        generations, racks = world
        answers = combine(generations, racks, policy)
        for target in TARGETS:
            holding = [name for name, rack in racks.items() if rack.held and target in rack.held.catalogue.targets]
            needed = len(racks) if policy is Policy.ALL else 1
            self.assertEqual(answers.of(target).state is State.DEPLOYABLE, bool(racks) and len(holding) >= needed)
            self.assertEqual(answers.of(target).holders, tuple(sorted(holding)))

    @examples(100)
    @given(worlds(), policies)
    def test_arriving_means_that_every_rack_answered_and_the_current_generation_lists_it(self, world, policy) -> None:
        generations, racks = world
        for target, answer in combine(generations, racks, policy).by_target.items():
            if answer.state is State.ARRIVING:
                self.assertIn(target, generations.catalogue.targets)
                self.assertTrue(all(isinstance(rack.outcome, Answered) for rack in racks.values()))
