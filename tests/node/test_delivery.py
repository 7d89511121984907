"""How an attempt ended, and when the next one is: rules without a network."""

from __future__ import annotations

from email.utils import formatdate

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from node.client import Answer, NoAnswer
from node.delivery import (
    LONGEST_PAUSE,
    LONGEST_RETRY_AFTER,
    Standing,
    Verdict,
    judge,
    pause,
    retry_after,
)


def answer(status: int, body: bytes = b"OK", **headers: str) -> Answer:
    return Answer(status, "Reason", {name.replace("_", "-"): value for name, value in headers.items()}, body)


class JudgeTests(SynchronousTestCase):
    def verdict(self, status: int, body: bytes = b"OK", **headers: str) -> Verdict:
        return judge(answer(status, body, **headers), 0.0).verdict

    def test_ok_in_any_form_of_the_region_is_delivered(self) -> None:
        self.assertEqual(self.verdict(200), Verdict.DELIVERED)
        self.assertEqual(self.verdict(204, b"", x_stanchion_status="Ready"), Verdict.DELIVERED)
        found = judge(answer(200, b'{"status": 2, "status_name": "Failed commissioning", "stop": true}'), 0.0)
        self.assertEqual((found.verdict, found.standing), (Verdict.DELIVERED, Standing("Failed commissioning", True)))
        found = judge(answer(200, x_stanchion_status="Broken", x_stanchion_stop="true"), 0.0)
        self.assertEqual(found.standing, Standing("Broken", True))

    def test_a_good_answer_of_something_else_is_not_delivered(self) -> None:
        for body in (b"", b"<html>Log in</html>", b"\xff", b"[]", b"{}", b'{"stop": "no"}', b"[" * 100000):
            self.assertEqual(self.verdict(200, body), Verdict.REGION_AWAY, body[:20])
        self.assertEqual(self.verdict(204, b""), Verdict.REGION_AWAY)

    def test_what_says_nothing_of_the_item_means_that_the_region_is_away(self) -> None:
        for status in (408, 425, 429, 502, 503, 504, 301, 302, 307):
            self.assertEqual(self.verdict(status), Verdict.REGION_AWAY, status)
        self.assertEqual(judge(NoAnswer("refused"), 0.0).verdict, Verdict.REGION_AWAY)

    def test_an_error_of_the_region_may_be_the_items(self) -> None:
        for status in (409, 500, 501, 505, 507):
            self.assertEqual(self.verdict(status), Verdict.ITEM_FAILED, status)

    def test_other_refusals_are_for_good(self) -> None:
        for status in (400, 401, 403, 404, 405, 410, 413, 422):
            self.assertEqual(self.verdict(status), Verdict.REFUSED, status)

    @given(st.integers(100, 999), st.binary(max_size=20))
    def test_every_answer_has_a_verdict(self, status: int, body: bytes) -> None:
        self.assertIsInstance(self.verdict(status, body), Verdict)


class RetryAfterTests(SynchronousTestCase):
    def test_seconds_and_dates(self) -> None:
        self.assertEqual(retry_after({"retry-after": "7"}, 0.0), 7.0)
        self.assertEqual(retry_after({"retry-after": formatdate(1090, usegmt=True)}, 1000.0), 90.0)

    def test_a_date_counts_from_the_regions_own_clock(self) -> None:
        headers = {"retry-after": formatdate(1060, usegmt=True), "date": formatdate(1000, usegmt=True)}
        self.assertEqual(retry_after(headers, 999_999_999.0), 60.0)

    def test_what_is_past_or_far_off_or_nonsense(self) -> None:
        self.assertEqual(retry_after({"retry-after": formatdate(0, usegmt=True)}, 1000.0), 0.0)
        self.assertEqual(retry_after({"retry-after": "86400"}, 0.0), LONGEST_RETRY_AFTER)
        for value in ("", "soon", "-1", "1.5", "9" * 40, "²"):
            self.assertIsNone(retry_after({"retry-after": value}, 0.0), value)

    @given(st.text(max_size=30), st.text(max_size=30))
    def test_any_header_gives_seconds_or_none(self, value: str, date: str) -> None:
        found = retry_after({"retry-after": value, "date": date}, 0.0)
        self.assertTrue(found is None or 0 <= found <= LONGEST_RETRY_AFTER)


class PauseTests(SynchronousTestCase):
    @given(st.integers(1, 10_000), st.floats(0, 1))
    def test_pauses_grow_up_to_a_limit_and_are_never_in_step(self, failures: int, chance: float) -> None:
        found = pause(failures, None, chance)
        self.assertTrue(0.5 <= found <= LONGEST_PAUSE)
        self.assertLessEqual(pause(failures, None, 0.0), found)
        self.assertGreaterEqual(pause(failures + 1, None, chance), found)

    @given(st.floats(0, 300), st.floats(0, 1))
    def test_what_the_region_asks_for_is_the_least(self, wanted: float, chance: float) -> None:
        self.assertTrue(wanted <= pause(1, wanted, chance) <= wanted * 1.1 + 1)
