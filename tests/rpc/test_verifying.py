"""Verifying in the background: every blob is hashed, slowly, once a pass, over restarts; what is wrong is found."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from attrs import asdict
from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from rpc.blobs import KEPT_IN_QUARANTINE, READS, BlobStore, Examination, State
from rpc.damage import DamageBook, Damaged, read_book
from rpc.hashing import NotRegular, hashing
from rpc.verifying import LONGEST_SPARED, MIB, UNREADABLE_SECONDS, Pass, Verifier, read_pass, rest
from tests.region.importing import put, sha256

WEEK = 7 * 86400.0

names = st.integers(0, 40).map(lambda number: sha256(str(number).encode()))


def inline(function: Any, /, *args: Any, **kwargs: Any) -> Deferred[Any]:
    return maybeDeferred(function, *args, **kwargs)


def rot(path: Path, at: int = 0) -> None:
    """Change one bit of a file and nothing that anybody can see from outside: what a disk does."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


class VerifierTestCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.patch(os, "fsync", lambda descriptor: None)
        self.clock = Clock()
        self.clock.advance(1_000_000_000)
        self.root = Path(self.mktemp())
        self.ended: list[Pass] = []
        self.verifier = self.make()

    def make(self, interval: float = WEEK, rate: float = MIB) -> Verifier:
        """A verifier as a process has one that is started now."""
        self.blobs = blobs = BlobStore(self.root)
        self.addCleanup(blobs.close)
        verifier = Verifier(blobs, self.clock, inline, self.clock.seconds, rate, interval, self.ended.append)
        self.addCleanup(lambda: self.successResultOf(Deferred.fromCoroutine(verifier.stop())))
        return verifier

    def fill(self, *sizes: int) -> list[str]:
        """Blobs of these sizes; their names, sorted."""
        return sorted(put(self.blobs, os.urandom(size)) for size in sizes)

    def wait(self, seconds: float) -> None:
        # Finer than a pause: a verifier that pauses too little must be seen to be too fast.
        self.clock.pump([1 / 64] * int(seconds * 64))


class PassTests(VerifierTestCase):
    def test_a_pass_takes_as_long_as_its_rate_says(self) -> None:
        self.fill(4 * MIB, 2 * MIB, *([1000] * 10))
        self.verifier.start()
        self.wait(5)
        self.assertTrue(self.verifier.is_running)
        self.assertLess(self.verifier.status["bytes"], 5.5 * MIB)
        self.wait(2)
        self.assertFalse(self.verifier.is_running)
        (ended,) = self.ended
        self.assertEqual((ended.files, ended.files_total, ended.damaged), (12, 12, ()))
        self.assertEqual(ended.bytes, 6 * MIB + 10_000)

    def test_rot_that_changes_neither_size_nor_time_is_found_and_set_aside(self) -> None:
        first, second, third = self.fill(1000, 1000, 1000)
        heard: list[Damaged] = []
        self.blobs.on_damage.append(heard.append)
        rot(self.blobs.path(second))
        self.assertTrue(self.blobs.is_verified(second, 1000))
        self.verifier.start()
        (ended,) = self.ended
        self.assertEqual([name for name, _ in ended.damaged], [second])
        self.assertIn("the sha256 of its 1000 bytes is", ended.damaged[0][1])
        self.assertFalse(self.blobs.is_verified(second, 1000))
        self.assertTrue(self.blobs.is_verified(first, 1000) and self.blobs.is_verified(third, 1000))
        self.assertEqual([each.sha256 for each in heard], [second])
        self.assertEqual([each["sha256"] for each in self.verifier.status["not_repaired"]], [second])
        self.flushLoggedErrors()

    def test_the_next_pass_begins_an_interval_after_the_last_began(self) -> None:
        self.fill(1000)
        self.verifier.start()
        self.assertEqual(len(self.ended), 1)
        self.clock.pump([1800] * (7 * 48 - 2))
        self.assertEqual(len(self.ended), 1)
        self.clock.pump([1800] * 4)
        self.assertEqual(len(self.ended), 2)

    def test_without_an_interval_a_pass_begins_only_when_it_is_asked_for(self) -> None:
        verifier = self.make(interval=0)
        self.fill(1000)
        verifier.start()
        self.clock.pump([3600] * 24 * 14)
        self.assertEqual(self.ended, [])
        self.assertIsNone(verifier.status["next"])
        verifier.request()
        self.assertEqual(len(self.ended), 1)

    def test_a_pass_goes_on_after_a_restart_where_it_was(self) -> None:
        self.fill(*[MIB] * 6)
        self.verifier.start()
        self.wait(3.5)
        before = self.verifier.status["files"]
        self.successResultOf(Deferred.fromCoroutine(self.verifier.stop()))
        again = self.make()
        again.start()
        self.assertTrue(again.is_running)
        self.assertEqual(again.status["files"], before)
        self.assertGreater(before, 1)
        self.wait(7 - before)
        self.assertEqual([(ended.files, ended.bytes) for ended in self.ended], [(6, 6 * MIB)])

    def test_a_pass_that_a_wrong_clock_began_in_the_future_does_not_put_off_the_next(self) -> None:
        self.fill(1000)
        self.verifier.path.write_text(json.dumps(asdict(Pass(self.clock.seconds() + 10 * 365 * 86400, ended=1.0))))
        self.verifier.start()
        self.assertEqual([ended.files for ended in self.ended], [1])
        self.clock.pump([1800] * (7 * 48 - 2))
        self.assertEqual(len(self.ended), 1)

    def test_a_record_with_numbers_that_are_none_begins_a_pass_anew(self) -> None:
        self.fill(1000)
        self.verifier.path.write_text(json.dumps(asdict(Pass(float("nan"), ended=1.0))))
        self.verifier.start()
        self.assertEqual([ended.files for ended in self.ended], [1])

    def test_a_record_that_makes_no_sense_begins_a_pass_anew(self) -> None:
        self.fill(1000)
        self.verifier.path.write_bytes(b'{"started": "yesterday"')
        self.verifier.start()
        self.assertEqual(len(self.ended), 1)

    def test_a_pass_that_is_asked_for_may_be_faster(self) -> None:
        self.fill(8 * MIB)
        self.verifier.start()
        self.wait(1)
        self.verifier.request(rate=64 * MIB)
        self.wait(1)
        self.assertEqual(len(self.ended), 1)
        self.assertEqual(self.verifier.status["rate"], MIB)

    def test_what_is_removed_meanwhile_is_no_damage(self) -> None:
        names = self.fill(MIB, MIB, MIB)
        self.verifier.start()
        self.blobs.path(names[2]).unlink()
        self.blobs.path(names[0]).unlink()  # of which a part was read
        self.wait(3)
        self.assertEqual([(ended.files, ended.damaged) for ended in self.ended], [(3, ())])

    def fail_reads(self, count: int) -> list[int]:
        """Let the next ``count`` reads fail; what is left of that."""
        left = [count]
        readv = os.readv

        def reading(*arguments: Any) -> int:
            if left[0]:
                left[0] -= 1
                raise OSError(5, "Input/output error")
            return readv(*arguments)

        self.patch(os, "readv", reading)
        return left

    def test_a_file_that_cannot_be_read_again_and_again_is_damaged(self) -> None:
        (name,) = self.fill(1000)
        self.fail_reads(READS)
        self.verifier.start()
        self.assertEqual((self.ended, dict(self.blobs.damaged)), ([], {}))
        self.clock.pump([UNREADABLE_SECONDS] * READS)
        self.assertEqual(self.ended[0].damaged, ((name, "its bytes cannot be read: Input/output error after 0 bytes"),))
        self.flushLoggedErrors()

    def test_a_file_that_cannot_be_read_for_a_moment_is_not_taken_for_damaged(self) -> None:
        self.fill(1000)
        self.fail_reads(READS - 1)
        self.verifier.start()
        self.clock.pump([UNREADABLE_SECONDS] * READS)
        self.assertEqual((self.ended[0].files, self.ended[0].damaged, self.ended[0].problems), (1, (), ()))
        self.assertEqual(list(self.blobs.quarantine.iterdir()), [])

    def test_a_disk_that_reads_nothing_any_more_loses_no_file_for_that(self) -> None:
        names = self.fill(*[1000] * (KEPT_IN_QUARANTINE + 3))
        left = self.fail_reads(10_000)
        self.verifier.start()
        self.clock.pump([UNREADABLE_SECONDS] * READS * len(names))
        (ended,) = self.ended
        self.assertEqual((len(ended.damaged), len(ended.problems)), (KEPT_IN_QUARANTINE, 3))
        self.assertIn("the disk fails, replace it", ended.problems[0])
        there = len(list(self.blobs.blobs.iterdir())) + len(list(self.blobs.quarantine.iterdir()))
        self.assertEqual(there, len(names))
        left[0] = 0
        self.verifier.request()
        self.assertEqual((len(self.ended), self.ended[1].damaged, self.ended[1].problems), (2, (), ()))
        self.flushLoggedErrors()

    def test_stopping_does_not_wait_for_a_file_that_is_to_be_read_again(self) -> None:
        self.fill(1000)
        self.fail_reads(1)
        self.verifier.start()
        self.successResultOf(Deferred.fromCoroutine(self.verifier.stop()))
        self.assertEqual(self.clock.getDelayedCalls(), [])


class SuspectTests(VerifierTestCase):
    def test_a_blob_that_somebody_refused_is_looked_at_at_once(self) -> None:
        names = self.fill(*[MIB] * 4)
        self.verifier.start()
        self.wait(0.5)
        rot(self.blobs.path(names[3]))
        self.assertTrue(self.verifier.suspect(names[3], "rack one refused it"))
        self.assertFalse(self.blobs.is_verified(names[3], MIB))
        self.assertEqual(list(self.blobs.damaged), [names[3]])
        self.wait(4)
        self.assertEqual([ended.files for ended in self.ended], [4])
        self.flushLoggedErrors()

    def test_also_between_two_passes(self) -> None:
        (name,) = self.fill(1000)
        self.verifier.start()
        rot(self.blobs.path(name))
        self.verifier.suspect(name, "rack one refused it")
        self.assertEqual(list(self.blobs.damaged), [name])
        self.flushLoggedErrors()

    def test_one_that_is_right_is_not_looked_at_again_and_again(self) -> None:
        (name,) = self.fill(1000)
        self.verifier.start()
        self.assertTrue(self.verifier.suspect(name, "rack one refused it"))
        self.assertFalse(self.verifier.suspect(name, "rack one refused it"))
        self.clock.advance(61)
        self.assertTrue(self.verifier.suspect(name, "rack one refused it"))

    def test_who_says_without_end_that_files_are_wrong_that_are_right_has_them_read_ever_more_seldom(self) -> None:
        (name,) = self.fill(1000)
        verifier = self.make(interval=0)
        verifier.start()
        looked = 0
        for _ in range(24 * 60):
            looked += verifier.suspect(name, "rack one refused it")
            self.clock.advance(60)
        self.assertLess(looked, 24 + 7)
        self.assertGreater(looked, 24)
        rot(self.blobs.path(name))
        self.clock.advance(LONGEST_SPARED)
        self.assertTrue(verifier.suspect(name, "rack one refused it"))
        self.assertEqual(list(self.blobs.damaged), [name])
        put(self.blobs, os.urandom(1000))
        self.assertTrue(verifier.suspect(name, "rack one refused it"))
        self.flushLoggedErrors()

    def test_a_file_that_is_not_there_leaves_nothing_behind(self) -> None:
        self.verifier.start()
        self.assertTrue(self.verifier.suspect(sha256(b"no such"), "rack one refused it"))
        self.assertEqual(self.verifier._spared, {})


class DamageTests(VerifierTestCase):
    def test_what_is_damaged_is_known_until_it_is_there_again_also_after_a_restart(self) -> None:
        body = b"a file of an image"
        name = put(self.blobs, body)
        rot(self.blobs.path(name))
        self.blobs.verify(name, len(body), thorough=True)
        self.make()
        self.blobs.prepare()
        self.assertIn("the sha256 of its 18 bytes is", self.blobs.damaged[name].reason)
        repaired: list[Damaged] = []
        self.blobs.on_repair.append(repaired.append)
        put(self.blobs, body)
        self.assertEqual(([each.sha256 for each in repaired], self.blobs.damaged), ([name], {}))
        self.flushLoggedErrors()

    def test_what_nobody_needs_any_more_is_forgotten(self) -> None:
        name = put(self.blobs, b"x")
        rot(self.blobs.path(name))
        self.blobs.verify(name, 1, thorough=True)
        self.blobs.sweep({name})
        self.assertEqual(list(self.blobs.damaged), [name])
        self.blobs.sweep(())
        self.assertEqual(self.blobs.damaged, {})
        self.flushLoggedErrors()

    def test_a_book_that_is_none_is_begun_anew_and_said(self) -> None:
        path = self.root / "damaged.json"
        self.root.mkdir()
        for data in (b"", b"[]", b'{"damaged": [{"sha256": "x", "size": 1, "reason": "", "found": 1}]}', b"\xff"):
            path.write_bytes(data)
            self.assertRaises(ValueError, read_book, data)
            self.assertEqual(DamageBook.open(path).entries, {})

    def test_what_is_no_regular_file_is_not_hashed(self) -> None:
        self.root.mkdir()
        link = self.root / "link"
        link.symlink_to("/dev/zero")
        self.assertRaises(NotRegular, hashing, link)
        self.assertRaises(NotRegular, hashing, self.root)

    def test_a_pinned_blob_is_not_swept(self) -> None:
        name = put(self.blobs, b"x")
        self.blobs.pin(name)
        self.blobs.sweep(())
        self.assertTrue(self.blobs.is_verified(name, 1))
        self.blobs.unpin(name)
        self.blobs.sweep(())
        self.assertFalse(self.blobs.is_verified(name, 1))


class PureTests(SynchronousTestCase):
    @settings(max_examples=50)
    @given(st.dictionaries(names, st.integers(0, 9), max_size=20), st.one_of(st.just(""), names))
    def test_the_rest_of_a_pass_is_all_that_comes_after_and_nothing_twice(
        self, sizes: dict[str, int], after: str
    ) -> None:
        left = rest(sizes, after)
        self.assertEqual(left, sorted(name for name in sizes if name > after))

    @settings(max_examples=50)
    @given(st.lists(st.tuples(names, st.integers(0, 9), st.sampled_from([*State, "no route"])), max_size=8))
    def test_a_pass_is_read_as_it_was_written(self, seen: list[tuple[str, int, State | str]]) -> None:
        import json

        from attrs import asdict

        going = Pass(1.5)
        for name, size, found in seen:
            going = going.looked_at(name, size, found if isinstance(found, str) else Examination(found, "because"))
        self.assertEqual(read_pass(json.dumps(asdict(going)).encode()), going)
        self.assertEqual(going.bytes, sum(size for _, size, _ in seen))
