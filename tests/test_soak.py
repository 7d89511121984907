"""Soaking counts what was tried, and what went wrong."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tests.soak import Tally


class SoakTests(SynchronousTestCase):
    def test_examples_and_violations_are_counted(self) -> None:
        class Sample(SynchronousTestCase):
            @settings(max_examples=30, deadline=None, database=None)
            @given(st.integers())
            def test_right(self, number) -> None:
                self.assertIsInstance(number, int)

            @settings(max_examples=30, deadline=None, database=None)
            @given(st.integers())
            def test_wrong(self, number) -> None:
                self.assertLess(number, 0)

        tally = Tally()
        samples = [Sample("test_right"), Sample("test_wrong")]
        for _ in range(3):  # as in three rounds
            for sample in samples:
                tally.run(sample)
        [(right, count), (wrong, _)] = sorted(tally.examples.items())
        self.assertTrue(right.endswith("test_right") and count == 3 * 30)
        self.assertEqual((list(tally.violations), tally.tests), ([wrong], 6))
        self.assertIn("not less than 0", tally.violations[wrong])
        lines = list(tally.lines(1.0))
        self.assertIn("1 violations", lines[-2])
        self.assertIn(wrong, lines[-1])
