"""The command line's output: it fits, it is whole where programs read it, and no foreign text controls a terminal."""

from __future__ import annotations

import io

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from rpc.console import duration, painted, safe, size, table, width_of

cells = st.text(max_size=30) | st.integers() | st.none()


class TestTable(SynchronousTestCase):
    def test_columns_stand_under_their_headings_and_numbers_right(self):
        self.assertEqual(
            table(("NAME", "SIZE"), [("a", 5), ("long", 1234)]),
            "NAME  SIZE\na        5\nlong  1234",
        )

    def test_long_text_wraps_in_its_own_column(self):
        text = table(("RACK", "NOTE"), [("r1", "it is not connected since noon"), ("r2", "")], width=25)
        self.assertEqual(text.splitlines(), ["RACK  NOTE", "r1    it is not connected", "      since noon", "r2"])

    def test_without_a_width_every_row_is_one_line(self):
        text = table(("A", "B"), [("x" * 300, "y" * 300)])
        self.assertEqual(text.splitlines()[1], "x" * 300 + "  " + "y" * 300)

    @settings(deadline=None)
    @given(st.lists(st.tuples(cells, cells, cells), max_size=5), st.integers(40, 120))
    def test_no_line_is_wider_than_the_terminal_and_nothing_controls_it(self, rows, width):
        for line in table(("ONE", "TWO", "THREE"), rows, width=width).splitlines():
            self.assertLessEqual(width_of(line), width)
            self.assertEqual(line, safe(line))

    @settings(deadline=None)
    @given(st.lists(st.tuples(cells, cells), max_size=5))
    def test_without_a_terminal_there_are_as_many_lines_as_rows(self, rows):
        self.assertEqual(len(table(("A", "B"), rows).split("\n")), len(rows) + 1)


class TestText(SynchronousTestCase):
    def test_control_characters_are_shown_and_not_sent(self):
        self.assertEqual(safe("a\x1b[31m\r\nb\u202e"), "a\\x1b[31m\\r\\nb\\u202e")

    def test_sizes_are_for_people(self):
        for count, text in [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (340_123_456, "340 MB"), (1.25e9, "1.2 GB"),
                            (999_600, "1.0 MB"), (5e15, "5000.0 TB")]:  # fmt: skip
            with self.subTest(count):
                self.assertEqual(size(count), text)

    def test_durations_are_for_people(self):
        for seconds, text in [(5, "5 s"), (119, "119 s"), (180, "3 min"), (7200, "2 h"), (864000, "10 days")]:
            with self.subTest(seconds):
                self.assertEqual(duration(seconds), text)

    def test_there_is_no_colour_where_nobody_sees_it(self):
        self.assertEqual(painted("deployable", io.StringIO()), "deployable")

    def test_there_is_colour_in_a_terminal_unless_it_is_not_wanted(self):
        class Terminal(io.StringIO):
            def isatty(self):
                return True

        self.patch(__import__("os"), "environ", {"TERM": "xterm"})
        self.assertEqual(painted("deployable", Terminal()), "\x1b[32mdeployable\x1b[0m")
        self.patch(__import__("os"), "environ", {"TERM": "xterm", "NO_COLOR": "1"})
        self.assertEqual(painted("deployable", Terminal()), "deployable")
