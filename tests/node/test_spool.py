"""What is to be sent stays on the disk until it is sent, in order, whatever happens to the disk or the machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from node.spool import Spool


class SpoolTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.directory = self.mktemp()
        self.complaints: list[str] = []
        self.spool = self.open()

    def open(self) -> Spool:
        return Spool(self.directory, self.complaints.append)

    def labels(self, spool: Spool) -> list[str]:
        found = []
        while (item := spool.first()) is not None:
            found.append(item.label)
            spool.sent(item.number)
        return found

    def test_items_come_back_whole_and_in_order_also_after_a_restart(self) -> None:
        for number in range(12):
            self.spool.add(f"item {number}", "text/x", bytes([number]) * number, {"a": str(number)})
        spool = self.open()
        first = spool.first()
        assert first is not None
        self.assertEqual(
            (first.label, first.content_type, first.body, first.meta), ("item 0", "text/x", b"", {"a": "0"})
        )
        self.assertEqual(self.labels(spool), [f"item {number}" for number in range(12)])
        self.assertEqual(self.open().waiting, 0)

    def test_numbers_go_on_after_a_restart(self) -> None:
        self.spool.add("one", "", b"")
        self.assertGreater(self.open().add("two", "", b"").number, 1)

    def test_what_was_half_written_when_the_machine_died_is_not_there(self) -> None:
        Path(self.directory, "0000000001.item.part").write_bytes(b"half")
        spool = self.open()
        self.assertEqual((spool.waiting, spool.first()), (0, None))
        self.assertEqual([name for name in os.listdir(self.directory) if name.endswith(".part")], [])

    def test_an_item_that_is_damaged_is_named_and_the_others_go_on(self) -> None:
        self.spool.add("one", "", b"12345")
        self.spool.add("two", "", b"")
        path = Path(self.directory, "0000000001.item")
        path.write_bytes(path.read_bytes()[:-1])
        spool = self.open()
        self.assertEqual(self.labels(spool), ["two"])
        self.assertIn("is damaged", spool.undelivered[0])

    @settings(max_examples=40)
    @given(st.binary(max_size=200))
    def test_whatever_the_disk_gives_back_is_an_item_or_named_as_lost(self, data: bytes) -> None:
        directory = self.mktemp()
        os.makedirs(directory)
        Path(directory, "0000000007.item").write_bytes(data)
        spool = Spool(directory, self.complaints.append)
        self.assertTrue(spool.first() is not None or spool.undelivered)

    def test_one_that_is_set_aside_waits_for_the_others_only(self) -> None:
        first = self.spool.add("poison", "", b"")
        self.spool.add("two", "", b"")
        self.spool.set_aside(first.number)
        self.assertEqual(self.labels(self.spool), ["two", "poison"])

    def test_what_is_given_up_is_kept_for_people_and_named(self) -> None:
        item = self.spool.add("one", "", b"x")
        self.spool.give_up(item.number, item.label, "400 Bad Request")
        self.assertEqual(self.spool.undelivered, ("one (400 Bad Request)",))
        kept = sorted(os.listdir(os.path.join(self.directory, "undelivered")))
        self.assertEqual(kept, ["0000000001.item", "0000000001.item.why"])
        self.assertEqual(self.spool.waiting, 0)

    def test_what_an_earlier_start_gave_up_is_still_named_and_known(self) -> None:
        item = self.spool.add("one", "", b"x", {"key": "script:one"})
        self.spool.give_up(item.number, item.label, "400 Bad Request")
        spool = self.open()
        self.assertEqual((spool.undelivered, spool.waiting), (("one (400 Bad Request)",), 0))
        self.assertEqual(spool.keys(), {"script:one"})
        self.assertEqual(spool.add("two", "", b"").number, 2)
        os.unlink(os.path.join(self.directory, "undelivered", "0000000001.item.why"))
        self.assertIn("one (why it was not delivered cannot be read", self.open().undelivered[0])

    def test_what_is_held_is_not_sent_before_it_is_released_or_at_the_next_start(self) -> None:
        first = self.spool.add("one", "", b"", held=True)
        self.spool.add("two", "", b"")
        self.assertEqual(self.labels(self.spool), ["two"])
        self.assertEqual(self.spool.waiting, 1)
        self.assertEqual(self.labels(self.open()), ["one"])
        other = self.open()
        first = other.add("three", "", b"", held=True)
        other.release(first.number)
        self.assertEqual(self.labels(other), ["three"])

    def test_what_is_to_come_last_waits_for_results_that_are_aside_and_for_nothing_else(self) -> None:
        result = self.spool.add("result", "", b"", {"key": "script:a"})
        note = self.spool.add("note", "", b"")
        self.spool.add("last", "", b"", {"key": "final", "is_last": True})
        self.spool.add("later", "", b"")
        for number in (result.number, note.number):
            self.spool.set_aside(number)
        self.assertEqual(self.labels(self.spool), ["later", "result", "last", "note"])

    def test_a_full_disk_is_said_and_the_item_is_kept_in_memory(self) -> None:
        def full(*arguments: Any) -> None:
            raise OSError(28, "No space left on device")

        self.patch(os, "fsync", full)
        self.spool.add("one", "", b"x")
        self.assertIn("No space left on device", self.complaints[0])
        self.assertEqual([name for name in os.listdir(self.directory) if name.endswith(".part")], [])
        self.assertEqual(self.labels(self.spool), ["one"])

    def test_nobody_else_may_read_it(self) -> None:
        self.assertEqual(os.stat(os.path.join(self.directory, "undelivered")).st_mode & 0o77, 0)
