"""How fast bytes come in, of late."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from rack.rate import WINDOW, Rate


class TestRate(SynchronousTestCase):
    def steadily(self, rate: Rate, begin: float, seconds: float, per_second: int, count: int = 0) -> int:
        for tick in range(int(seconds * 4) + 1):
            rate.saw(begin + tick / 4, count + tick * per_second // 4)
        return count + int(seconds * per_second)

    def test_at_first_it_cannot_be_told(self) -> None:
        rate = Rate()
        self.assertIsNone(rate.per_second(100.0))
        rate.saw(100.0, 0)
        self.assertIsNone(rate.per_second(100.1))

    def test_a_steady_stream_has_its_rate(self) -> None:
        rate = Rate()
        self.steadily(rate, 100.0, 5, 1000)
        self.assertEqual(rate.per_second(105.0), 1000)

    def test_only_the_last_seconds_count(self) -> None:
        rate = Rate()
        count = self.steadily(rate, 100.0, 60, 1_000_000)
        self.steadily(rate, 160.0, 20, 1000, count)
        self.assertEqual(rate.per_second(180.0), 1000)

    def test_a_stream_that_stalls_comes_down_to_nothing(self) -> None:
        rate = Rate()
        self.steadily(rate, 100.0, 20, 1000)
        self.assertEqual(rate.per_second(125.0), 500)
        self.assertEqual(rate.per_second(120.0 + WINDOW), 0)

    @settings(deadline=None)
    @given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 10**6)), max_size=30))
    def test_it_is_never_negative_nor_higher_than_the_fastest_part(self, parts) -> None:
        rate, now, count = Rate(), 0.0, 0
        for seconds, more in parts:
            now, count = now + seconds, count + more
            rate.saw(now, count)
            told = rate.per_second(now)
            self.assertTrue(told is None or 0 <= told <= 2 * count + 1)
            self.assertLessEqual(len(rate._seen), 2 * WINDOW / 0.5 + 4)
