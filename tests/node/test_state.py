"""The journal keeps what it was told, over a kill, whoever tells it, and whatever the disk does."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from node.state import State
from tests.examples import examples


class StateTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.path = self.mktemp()
        self.complaints: list[str] = []

    def open(self) -> State:
        return State(self.path, self.complaints.append)

    def test_the_next_start_knows_what_this_one_did(self) -> None:
        state = self.open()
        state.begin("a.1")
        state.begin("a.1")
        state.keep("script:a.1", {"passed": True})
        state.keep("final", {"status": "OK"})
        after = self.open()
        self.assertEqual((after.begun("a.1"), after.begun("b.2")), (2, 0))
        self.assertEqual(after.kept("final"), {"status": "OK"})
        self.assertEqual(after.records("script:"), {"script:a.1": {"passed": True}})
        self.assertIsNone(after.kept("testing"))
        self.assertEqual(self.complaints, [])

    def test_what_many_threads_say_at_once_is_all_kept(self) -> None:
        state = self.open()
        threads = [threading.Thread(target=state.keep, args=(f"script:{number}", {})) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(len(self.open().records("script:")), 20)

    def test_a_write_that_was_cut_leaves_the_last_whole_one(self) -> None:
        self.open().begin("a.1")
        Path(self.path + ".part").write_bytes(b'{"begun": {')
        self.assertEqual(self.open().begun("a.1"), 1)

    def test_a_disk_that_takes_nothing_is_said_and_this_start_still_knows(self) -> None:
        def full(*arguments: Any) -> None:
            raise OSError(28, "No space left on device")

        self.patch(os, "fsync", full)
        state = self.open()
        state.keep("final", {"status": "OK"})
        self.assertEqual(state.kept("final"), {"status": "OK"})
        self.assertIn("after a restart scripts may run once more", self.complaints[0])

    @examples(40)
    @given(
        st.binary(max_size=40)
        | st.sampled_from([b"[]", b"{}", b'{"begun": 1, "kept": {}}', b'{"begun": {"a": "x"}, "kept": {}}', b'"x"'])
    )
    def test_a_file_that_is_no_journal_is_said_and_a_new_one_begun(self, data: bytes) -> None:
        Path(self.path).write_bytes(data)
        self.complaints.clear()
        self.open().begin("a.1")
        self.assertEqual(len(self.complaints), 1)
        self.assertEqual(self.open().begun("a.1"), 1)
