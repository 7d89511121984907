"""What of a script's outputs is told, and what it says of itself; compared with what the region makes of the same."""

from __future__ import annotations

import os
from pathlib import Path

import yaml
from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from node.results import RESULT_BYTES, STATUSES, read_result, shortened
from region.commissioning.outcomes import MAX_BYTES, OutcomeInvalid, read_outcome
from region.commissioning.outcomes import STATUSES as REGIONS
from tests.examples import examples


class ShortenedTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.path = Path(self.mktemp())

    def test_a_short_output_is_sent_as_it_is_whatever_is_in_it(self) -> None:
        self.path.write_bytes(bytes(range(256)))
        self.assertEqual(shortened(str(self.path), 256), (bytes(range(256)), 0))

    def test_of_a_long_one_the_beginning_and_the_end_are_sent_and_the_cut_is_marked(self) -> None:
        self.path.write_bytes(b"begin" + bytes(10_000) + b"end")
        sent = shortened(str(self.path), 1000)
        self.assertEqual(len(sent.content) <= 1000, True)
        self.assertTrue(sent.content.startswith(b"begin"))
        self.assertTrue(sent.content.endswith(b"end"))
        self.assertIn(
            f"{sent.omitted} bytes left out here; this machine has the whole in {self.path}", str(sent.content)
        )
        zeros = sent.content.count(b"\x00")
        self.assertEqual(sent.omitted, 10_000 - zeros)

    def test_one_that_is_not_there_is_empty(self) -> None:
        self.assertEqual(shortened(str(self.path)), (b"", 0))

    def test_one_that_cannot_be_read_is_an_error(self) -> None:
        self.path.mkdir()
        self.assertRaises(OSError, shortened, str(self.path))

    def test_what_is_no_file_is_not_waited_for(self) -> None:
        os.mkfifo(self.path)
        error = self.assertRaises(OSError, shortened, str(self.path))
        self.assertEqual(error.strerror, "it is no file")
        self.path.unlink()
        self.path.symlink_to("/dev/zero")
        self.assertRaises(OSError, shortened, str(self.path))

    @examples(30)
    @given(st.binary(max_size=2000), st.integers(300, 1500))
    def test_never_more_than_the_limit(self, content: bytes, limit: int) -> None:
        self.path.write_bytes(content)
        sent = shortened(str(self.path), limit)
        self.assertLessEqual(len(sent.content), max(limit, 300))
        self.assertEqual(sent.omitted == 0, sent.content == content)


class ReadResultTests(SynchronousTestCase):
    def test_the_status_in_every_style(self) -> None:
        for text in (
            "status: failed\n", "results:\n  a: 1\nstatus: 'failed'\n", '{"status": "failed", "results": {}}',
            "{results: 1, status: failed}", "---\n# why\nstatus: failed # so\n", '"status": "failed"\n',
        ):  # fmt: skip
            self.assertEqual(read_result(text.encode()), ("failed", None), text)

    def test_one_deeper_inside_is_none(self) -> None:
        for text in ("results:\n  status: failed\n", '{"results": {"status": "failed"}}', "a: |\n  status: failed\n"):
            self.assertEqual(read_result(text.encode()), ("", None), text)

    def test_nothing_is_no_mistake(self) -> None:
        self.assertEqual(read_result(b" \n"), ("", None))

    def test_what_is_wrong_is_said(self) -> None:
        for content, words in (
            (b"status: great", "its status is 'great'; it should be one of: passed, failed"),
            (b"status: PASSED", "'PASSED'"), (b"\xff", "not UTF-8"), (b"a:\n\tb: 1", "tabs"),
            (b"all is well", "no mapping"),
            (b"a: " + b"x" * RESULT_BYTES, "at most 65536"),
        ):  # fmt: skip
            status, problem = read_result(content)
            self.assertEqual(status, "")
            self.assertIn(words, problem or "")

    def test_it_knows_what_the_region_knows(self) -> None:
        self.assertEqual((set(STATUSES), RESULT_BYTES), (set(REGIONS), MAX_BYTES))

    @examples(80)
    @given(
        st.fixed_dictionaries(
            {},
            optional={
                "status": st.sampled_from([*STATUSES, "odd", ""]),
                "results": st.dictionaries(st.sampled_from(["status", "a", "b c"]), st.text(max_size=6), max_size=3),
            },
        ),
        st.booleans(),
    )
    def test_it_sees_what_the_region_sees_in_what_yaml_writes(self, document: dict[str, object], flow: bool) -> None:
        content = yaml.safe_dump(document, default_flow_style=flow, allow_unicode=True).encode()
        try:
            outcome = read_outcome(content)
        except OutcomeInvalid:
            self.assertIsNotNone(read_result(content)[1], content)
        else:
            self.assertEqual(read_result(content)[0], outcome.name.lower() if outcome else "", content)
