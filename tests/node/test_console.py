"""What people see: whole lines, no secrets, and never a failure."""

from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from node.archive import Script
from node.clock import span
from node.console import Console, _stream_writer
from node.tally import Tally


class ConsoleTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.console = Console([lambda level, line: self.lines.append((level, line))], ["s/cret", ""])

    def test_a_message_is_one_line_whatever_is_in_it(self) -> None:
        self.console.warn("a\nb\x1b[31m\x00c")
        self.assertEqual(self.lines, [("warning", "a b [31m c")])

    def test_secrets_are_hidden_also_as_they_stand_in_a_header(self) -> None:
        self.console.hide(["other"])
        self.console.say("s/cret other %26s%2Fcret")
        self.assertEqual(self.lines[0][1], "[hidden] [hidden] %26[hidden]")

    def test_nothing_is_cut_before_secrets_are_hidden(self) -> None:
        self.assertEqual(self.console.hidden("x" * 10 + "s/cret")[:12], "xxxxxxxxxx[h")

    def test_a_stream_that_is_closed_is_no_failure(self) -> None:
        stream = io.StringIO()
        stream.close()
        _stream_writer(stream)("info", "x")

    def test_lines_have_the_time_and_what_needs_a_person_is_marked(self) -> None:
        stream = io.StringIO()
        _stream_writer(stream)("error", "it is lost")
        self.assertRegex(stream.getvalue(), r"\A\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ stanchion: ERROR it is lost\n\Z")

    @given(st.text())
    def test_any_text_is_a_line(self, text: str) -> None:
        self.lines.clear()
        self.console.say(text)
        self.assertTrue(self.lines[0][1].isprintable())


class TallyTests(SynchronousTestCase):
    def script(self, name: str, number: int) -> Script:
        return Script("testing", name, "/x", number)

    def test_what_runs_with_its_place_and_its_time(self) -> None:
        now = [0.0]
        tally = Tally(lambda: now[0])
        tally.expect(12)
        one, two, three = (self.script(name, number) for number, name in enumerate(("a", "50-memtest", "z"), 1))
        tally.begin(one, "running")
        tally.end(one)
        self.assertEqual(tally.progress(), "1 of 12 scripts have run")
        tally.begin(two, "running", 3600.0)
        now[0] = 720.0
        self.assertEqual(tally.progress(), "2/12 50-memtest.2: running, 12 min of 60 min")
        tally.begin(three, "installing packages")
        self.assertEqual(
            tally.progress(), "2/12 50-memtest.2: running, 12 min of 60 min; 3/12 z.3: installing packages, 0 s"
        )
        tally.end(two)
        self.assertEqual((tally.place(two), tally.place(three)), ("2/12", "3/12"))

    def test_lengths_of_time(self) -> None:
        self.assertEqual([span(value) for value in (0, 45, 119, 120, 3600, 9000)],
                         ["0 s", "45 s", "119 s", "2 min", "60 min", "2.5 h"])  # fmt: skip
