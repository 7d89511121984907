"""The progress of an import: it never shows more than there is, fits the line, and says what went wrong and where."""

from __future__ import annotations

import io

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from region.cli import progress
from rpc.console import width_of

JOB = {
    "id": 7, "state": "fetching", "bytes_done": 50_000_000, "bytes_total": 200_000_000, "files_done": 1,
    "files_total": 4, "fetching": "ubuntu/noble amd64 squashfs", "outcome": "", "problems": [],
}  # fmt: skip
PROBLEM = {
    "severity": "error", "source": "http://s", "product": "com.x:noble", "version": "20260101", "file": "squashfs",
    "reason": "its sha256 is wrong",
}  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self):
        return True


class TestProgress(SynchronousTestCase):
    def test_a_line_says_bytes_share_rate_and_file(self):
        self.assertEqual(
            progress.line(JOB, 38_000_000.0),
            "import 7: fetching, 50 MB of 200 MB (25 %), 38 MB/s, ubuntu/noble amd64 squashfs",
        )

    def test_a_bar_says_the_same_in_a_line(self):
        bar = progress.bar(JOB, 38_000_000.0, 120)
        self.assertEqual(
            bar, "fetching   [######..................]  25 %  50 MB of 200 MB  38 MB/s  ubuntu/noble amd64 squashfs"
        )

    @settings(deadline=None)
    @given(
        st.integers(0, 10**13), st.integers(0, 10**13), st.text(max_size=60), st.none() | st.floats(0, 1e12),
        st.integers(20, 200),
    )  # fmt: skip
    def test_a_bar_fits_and_never_shows_all_before_all_is_there(self, done, total, fetching, rate, width):
        job = {**JOB, "bytes_done": done, "bytes_total": total, "fetching": fetching}
        bar = progress.bar(job, rate, width)
        self.assertLessEqual(width_of(bar), width)
        self.assertNotIn("\n", bar)
        if done < total:
            self.assertNotIn("100 %", bar)

    def test_the_rate_is_that_of_the_last_seconds(self):
        meter = progress.Meter()
        meter.saw(0.0, 0)
        self.assertIsNone(meter.rate)
        for second in range(1, 20):
            meter.saw(float(second), second * 1000)
        self.assertAlmostEqual(meter.rate or 0, 1000.0)
        for second in range(20, 40):
            meter.saw(float(second), 19_000)
        self.assertLess(meter.rate or 0, 1.0)

    def test_a_total_that_shrinks_begins_anew(self):
        meter = progress.Meter()
        meter.saw(0.0, 5000)
        meter.saw(1.0, 0)
        self.assertIsNone(meter.rate)

    def test_outside_a_terminal_a_line_is_written_when_the_state_changes_and_now_and_then(self):
        now = [0.0]
        stream = io.StringIO()
        display = progress.Display(lambda: now[0], stream)
        display.show({**JOB, "state": "reading", "bytes_total": 0})
        for _ in range(25):
            display.show(JOB)
            now[0] += 1.0
        display.close()
        self.assertEqual(len(stream.getvalue().splitlines()), 4)
        self.assertNotIn("\r", stream.getvalue())

    def test_in_a_terminal_the_bar_is_drawn_over(self):
        self.patch(__import__("os"), "environ", {"TERM": "xterm", "COLUMNS": "100"})
        stream = Terminal()
        display = progress.Display(lambda: 0.0, stream)
        display.show(JOB)
        display.show(JOB)
        display.close()
        self.assertEqual(stream.getvalue().count("\r"), 2)
        self.assertTrue(stream.getvalue().endswith("\n"))

    def test_the_summary_names_product_file_and_reason(self):
        job = {**JOB, "state": "done", "outcome": "published generation 3", "problems": [PROBLEM]}
        self.assertEqual(
            progress.summary(job),
            "import 7 done: published generation 3\n  error: com.x:noble 20260101 squashfs: its sha256 is wrong",
        )

    def test_a_reason_that_is_the_outcome_already_is_not_said_twice(self):
        job = {**JOB, "state": "failed", "outcome": f"1 error: {PROBLEM['reason']}", "problems": [PROBLEM]}
        self.assertEqual(progress.summary(job), f"import 7 failed: 1 error: {PROBLEM['reason']}")
        self.assertEqual(progress.summary({**job, "problems": [PROBLEM, PROBLEM]}).count("\n"), 2)

    def test_an_import_succeeded_only_if_it_is_done_and_without_an_error(self):
        warning = {**PROBLEM, "severity": "warning"}
        self.assertTrue(progress.succeeded({**JOB, "state": "done", "problems": [warning]}))
        self.assertFalse(progress.succeeded({**JOB, "state": "done", "problems": [warning, PROBLEM]}))
        for state in ("failed", "cancelled", "fetching"):
            self.assertFalse(progress.succeeded({**JOB, "state": state}))
