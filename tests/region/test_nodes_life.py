"""The life of a node: what follows what, and that nothing else does."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from region.nodes.life import BUSY, Inputs, NotAllowed, allowed, next_status
from region.nodes.life import Input as X
from region.nodes.statuses import NodeStatus as S

# Written once more, by hand: (status, status before) and what each input makes of it.
EDGES: dict[tuple[S, S], dict[X, S]] = {
    (S.NEW, S.NEW): {X.COMMISSION: S.COMMISSIONING, X.MARK_BROKEN: S.BROKEN},
    (S.COMMISSIONING, S.NEW): {
        X.COMMISSIONED: S.READY, X.BEGIN_TESTING: S.TESTING, X.FAIL: S.FAILED_COMMISSIONING,
        X.ABORT: S.NEW, X.MARK_BROKEN: S.BROKEN,
    },
    (S.FAILED_COMMISSIONING, S.COMMISSIONING): {
        X.COMMISSION: S.COMMISSIONING, X.TEST: S.TESTING, X.MARK_BROKEN: S.BROKEN,
    },
    (S.READY, S.COMMISSIONING): {X.COMMISSION: S.COMMISSIONING, X.TEST: S.TESTING, X.MARK_BROKEN: S.BROKEN},
    (S.TESTING, S.COMMISSIONING): {
        X.TESTED: S.READY, X.FAIL: S.FAILED_TESTING, X.ABORT: S.NEW,
        X.MARK_BROKEN: S.BROKEN,
    },
    (S.TESTING, S.READY): {
        X.TESTED: S.READY, X.FAIL: S.FAILED_TESTING, X.ABORT: S.READY, X.MARK_BROKEN: S.BROKEN,
    },
    (S.TESTING, S.FAILED_TESTING): {
        X.TESTED: S.READY, X.FAIL: S.FAILED_TESTING, X.ABORT: S.FAILED_TESTING, X.MARK_BROKEN: S.BROKEN,
    },
    (S.TESTING, S.FAILED_COMMISSIONING): {
        X.TESTED: S.NEW, X.FAIL: S.FAILED_COMMISSIONING, X.ABORT: S.FAILED_COMMISSIONING, X.MARK_BROKEN: S.BROKEN,
    },
    (S.FAILED_TESTING, S.TESTING): {X.COMMISSION: S.COMMISSIONING, X.TEST: S.TESTING, X.MARK_BROKEN: S.BROKEN},
    (S.BROKEN, S.NEW): {X.COMMISSION: S.COMMISSIONING, X.MARK_FIXED: S.NEW},
    (S.BROKEN, S.READY): {X.COMMISSION: S.COMMISSIONING, X.MARK_FIXED: S.READY},
    (S.BROKEN, S.FAILED_TESTING): {X.COMMISSION: S.COMMISSIONING, X.MARK_FIXED: S.READY},
    (S.BROKEN, S.TESTING): {X.COMMISSION: S.COMMISSIONING, X.MARK_FIXED: S.NEW},
}  # fmt: skip


class TestLife(SynchronousTestCase):
    def test_every_edge_is_there_and_no_other(self) -> None:
        for (status, previous), edges in EDGES.items():
            with self.subTest(status=status, previous=previous):
                self.assertEqual(allowed(status, previous), frozenset(edges))
                for each, after in edges.items():
                    self.assertIs(next_status(status, previous, each), after)

    def test_each_input_is_one_of_the_machine(self) -> None:
        methods = {name for name in vars(Inputs) if not name.startswith("_")}
        self.assertEqual({each.value for each in X}, methods)

    def test_whatever_can_be_reached_from_new_is_in_the_table_of_this_test(self) -> None:
        # The status before decides of these two alone, so of all others one pair stands for all.
        reached, left = set(), {(S.NEW, S.NEW)}
        while left:
            status, previous = left.pop()
            reached.add((status, previous))
            for each in allowed(status, previous):
                pair = (next_status(status, previous, each), status)
                if pair not in reached:
                    left.add(pair)
        listed = {status for status, _ in EDGES}
        for status, previous in reached:
            self.assertIn(status, listed)
            if status is S.TESTING:
                self.assertIn((status, previous), EDGES)

    def test_what_is_not_allowed_is_said_with_what_is(self) -> None:
        error = self.assertRaises(NotAllowed, next_status, S.READY, S.COMMISSIONING, X.TESTED)
        self.assertEqual(
            str(error),
            "A node that is 'Ready' cannot take 'tested'; it can take: commission, mark broken, test.",
        )
        error = self.assertRaises(NotAllowed, next_status, S.COMMISSIONING, S.NEW, X.COMMISSION)
        self.assertTrue(str(error).endswith("it can take: abort, mark broken."), str(error))
        error = self.assertRaises(NotAllowed, next_status, S.DEPLOYED, S.DEPLOYING, X.COMMISSION)
        self.assertIn("it can take: nothing", str(error))

    @settings(max_examples=200)
    @given(status=st.sampled_from(S), previous=st.sampled_from(S), each=st.sampled_from(X))
    def test_from_whatever_is_stored_there_is_an_answer(self, status: S, previous: S, each: X) -> None:
        if each in allowed(status, previous):
            self.assertIsInstance(next_status(status, previous, each), S)
        else:
            self.assertIs(self.assertRaises(NotAllowed, next_status, status, previous, each).input, each)

    @settings(max_examples=100)
    @given(st.lists(st.sampled_from(X), max_size=30))
    def test_nothing_is_ready_that_no_commissioning_ended_well_for(self, inputs: list[X]) -> None:
        status, previous, commissioned = S.NEW, S.NEW, False
        for each in inputs:
            if each not in allowed(status, previous):
                continue
            status, previous = next_status(status, previous, each), status
            if each in (X.COMMISSIONED, X.BEGIN_TESTING):
                commissioned = True
            elif each is X.COMMISSION:
                commissioned = False
            self.assertTrue(commissioned or status is not S.READY, inputs)
            self.assertTrue(status not in BUSY or X.ABORT in allowed(status, previous))
