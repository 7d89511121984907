"""What scripts say of themselves in YAML, and what hostile ones say."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from region.commissioning.outcomes import MAX_BYTES, OutcomeInvalid, read_outcome
from region.nodes.statuses import ScriptStatus

# A few lines that fill the memory of whoever merges them.
MERGES = b"a0: &a0 {x: 1}\n" + b"".join(
    f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}], y{n}: 1}}\n".encode() for n in range(1, 30)
)

COPIES = b"a0: &a0 [x]\n" + b"".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n".encode() for n in range(1, 30))


class OutcomeTests(SynchronousTestCase):
    def test_a_status_is_read_and_none_is_none(self) -> None:
        self.assertEqual(read_outcome(b"status: skipped\nresults: {a: 1}"), ScriptStatus.SKIPPED)
        for nothing in (b"", b"results: {a: 1}", b"status:"):
            self.assertIsNone(read_outcome(nothing), nothing)

    def test_what_is_no_outcome_is_refused_with_the_reason(self) -> None:
        for text, reason in (
            (b"status: sideways", "'sideways'"), (b"- 1", "list"), (b"status: [a]", "status"), (b"{", "not YAML"),
            (b"x" * (MAX_BYTES + 1), "at most"), (b"[" * 5000, "not YAML"), (b"? {a: 1}\n: 1", "not YAML"),
        ):  # fmt: skip
            with self.assertRaisesRegex(OutcomeInvalid, reason):
                read_outcome(text)

    def test_a_bomb_is_read_at_once(self) -> None:
        self.assertIsNone(read_outcome(MERGES))

    def test_a_status_that_is_made_of_copies_of_copies_is_not_written_out(self) -> None:
        with self.assertRaisesRegex(OutcomeInvalid, "the status a list"):
            read_outcome(COPIES + b"status: *a29")

    @given(st.binary(max_size=200))
    @settings(max_examples=200)
    @example(b"\xff\xfe")
    @example(b"!!python/object/apply:os.system [true]")
    def test_any_bytes_are_an_outcome_or_refused(self, data: bytes) -> None:
        try:
            read_outcome(data)
        except OutcomeInvalid as error:
            self.assertTrue(str(error))
