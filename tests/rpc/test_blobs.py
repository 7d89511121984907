"""The blob store: only verified bytes are trusted, a crash at any step costs work and never truth."""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.logger import capturedLogs
from twisted.trial.unittest import SynchronousTestCase

from rpc.blobs import Abandoned, BlobError, BlobStore, Part, PartBusy, State, Swept, WrongContent
from rpc.damage import Damaged
from rpc.stamps import HEADER, Stamp, StampLog, parse_log

BODY = b"content " * 1000
SHA = hashlib.sha256(BODY).hexdigest()
OTHER = hashlib.sha256(b"other").hexdigest()


class Crash(BaseException):
    """The process ends here."""


class StoreTestCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.root = Path(self.mktemp())
        self.store = self.open()

    def open(self) -> BlobStore:
        """The store as a process sees it that was started now."""
        store = BlobStore(self.root)
        store.prepare()
        self.addCleanup(store.close)
        return store

    def add(self, body: bytes = BODY, store: BlobStore | None = None) -> str:
        sha256 = hashlib.sha256(body).hexdigest()
        store = store or self.store
        part = store.open_part(sha256, len(body))
        try:
            part.load()
            if not part.is_full:
                part.write(body[part.length :])
            part.finish()
        finally:
            part.close()
        return sha256

    @contextmanager
    def loaded(self, size: int = len(BODY), sha256: str = SHA) -> Iterator[Part]:
        part = self.store.open_part(sha256, size)
        try:
            part.load()
            yield part
        finally:
            part.close()


class VerifiedTests(StoreTestCase):
    def test_a_finished_part_is_verified_without_reading_it(self) -> None:
        self.add()
        with mock.patch.object(hashlib, "file_digest", side_effect=AssertionError("read")):
            self.assertTrue(self.store.is_verified(SHA, len(BODY)))
            self.assertTrue(self.store.verify(SHA, len(BODY)))

    def test_a_restart_keeps_what_is_verified(self) -> None:
        self.add()
        self.store.close()
        self.assertTrue(self.open().is_verified(SHA, len(BODY)))

    def test_a_missing_blob_is_not_verified(self) -> None:
        self.assertFalse(self.store.is_verified(SHA, len(BODY)))
        self.assertEqual(self.store.examine(SHA, len(BODY)).state, State.MISSING)

    def test_another_size_is_not_verified_and_goes_to_quarantine(self) -> None:
        self.add()
        self.assertFalse(self.store.is_verified(SHA, len(BODY) + 1))
        found = self.store.examine(SHA, len(BODY) + 1)
        self.assertEqual((found.state, found.reason), (State.QUARANTINED, "it has 8000 bytes, not 8001"))

    def test_a_blob_without_a_stamp_is_hashed_and_then_trusted(self) -> None:
        self.store.path(SHA).write_bytes(BODY)
        self.assertFalse(self.store.is_verified(SHA, len(BODY)))
        self.assertTrue(self.store.verify(SHA, len(BODY)))
        self.assertTrue(self.store.is_verified(SHA, len(BODY)))

    def test_a_touched_blob_is_hashed_again(self) -> None:
        self.add()
        os.utime(self.store.path(SHA), ns=(1, 1))
        self.assertFalse(self.store.is_verified(SHA, len(BODY)))
        self.assertTrue(self.store.verify(SHA, len(BODY)))

    def test_a_replaced_blob_is_hashed_again(self) -> None:
        self.add()
        path = self.store.path(SHA)
        found = path.stat()
        path.rename(self.root / "old")
        path.write_bytes(b"!" * len(BODY))
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
        self.assertFalse(self.store.is_verified(SHA, len(BODY)))
        self.assertFalse(self.store.verify(SHA, len(BODY)))

    def test_a_hard_link_does_not_end_the_trust(self) -> None:
        self.add()
        os.link(self.store.path(SHA), self.root / "link")
        self.assertTrue(self.store.is_verified(SHA, len(BODY)))

    def test_a_wrong_blob_goes_to_quarantine_and_is_logged_once(self) -> None:
        self.add()
        self.store.path(SHA).write_bytes(b"!" * len(BODY))
        with capturedLogs() as events:
            found = self.store.examine(SHA, len(BODY))
        assert found.quarantined is not None
        self.assertEqual(found.quarantined.read_bytes(), b"!" * len(BODY))
        self.assertIn(f"is {hashlib.sha256(b'!' * len(BODY)).hexdigest()}, not {SHA}", found.reason)
        self.assertFalse(self.store.path(SHA).exists())
        self.assertEqual([event["reason"] for event in events], [found.reason])

    def test_what_is_wrong_is_told_and_trusted_no_more_also_if_the_disk_does_not_let_it_be_moved(self) -> None:
        # Such as one that was mounted anew, to be read only, after errors.
        self.add()
        heard: list[Damaged] = []
        self.store.on_damage.append(heard.append)
        self.store.path(SHA).write_bytes(BODY[::-1])
        with mock.patch.object(os, "rename", side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS))):
            for _ in range(2):
                self.assertRaises(OSError, self.store.examine, SHA, len(BODY))
        self.assertEqual([each.sha256 for each in heard], [SHA])
        self.assertEqual(list(self.store.damaged), [SHA])
        self.assertEqual(self.store.times_damaged(SHA), 1)
        self.assertFalse(self.store.is_verified(SHA, len(BODY)))
        self.assertIs(self.store.examine(SHA, len(BODY)).state, State.QUARANTINED)

    def test_the_quarantine_does_not_grow(self) -> None:
        for number in range(7):
            self.store.path(SHA).write_bytes(b"%d" % number)
            self.store.verify(SHA, len(BODY))
        self.assertEqual(
            sorted(path.read_bytes() for path in self.store.quarantine.iterdir()), [b"3", b"4", b"5", b"6"]
        )

    def test_what_is_no_regular_file_goes_to_quarantine(self) -> None:
        path = self.store.path(SHA)
        for make in (path.mkdir, lambda: path.symlink_to("/etc/passwd"), lambda: os.mkfifo(path)):
            make()
            self.assertFalse(self.store.is_verified(SHA, len(BODY)))
            self.assertEqual(self.store.examine(SHA, len(BODY)).reason, f"{path} is not a regular file")
            self.assertFalse(path.is_symlink() or path.exists())

    def test_thorough_finds_what_changed_no_times(self) -> None:
        self.add()
        path = self.store.path(SHA)
        found = path.stat()
        path.write_bytes(b"!" * len(BODY))
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
        self.assertTrue(self.store.verify(SHA, len(BODY)))
        self.assertFalse(self.store.verify(SHA, len(BODY), thorough=True))

    def test_a_blob_that_changes_while_it_is_hashed_is_not_trusted(self) -> None:
        path = self.store.path(SHA)
        path.write_bytes(BODY)
        real = hashlib.file_digest

        def digest(*args: Any) -> Any:
            result = real(*args)
            os.utime(path, ns=(1, 1))
            return result

        with mock.patch.object(hashlib, "file_digest", digest), self.assertRaisesRegex(BlobError, "was changed while"):
            self.store.verify(SHA, len(BODY))
        self.assertFalse(self.store.is_verified(SHA, len(BODY)))

    def test_a_blob_that_is_replaced_while_it_is_hashed_is_not_trusted(self) -> None:
        path = self.store.path(SHA)
        path.write_bytes(BODY)
        real = hashlib.file_digest

        def digest(*args: Any) -> Any:
            (self.root / "other").write_bytes(b"!" * len(BODY))
            (self.root / "other").rename(path)
            return real(*args)

        with mock.patch.object(hashlib, "file_digest", digest), self.assertRaisesRegex(BlobError, "was changed while"):
            self.store.verify(SHA, len(BODY))
        self.assertFalse(self.store.is_verified(SHA, len(BODY)))

    def test_a_name_that_is_no_sha256_is_refused(self) -> None:
        for name in ("", "../x", SHA.upper(), SHA + "\n", SHA[:-1]):
            with self.assertRaises(BlobError):
                self.store.path(name)

    def test_an_unreadable_directory_is_an_error_and_not_a_missing_blob(self) -> None:
        error = OSError(errno.EIO, "Input/output error")
        with mock.patch.object(os, "stat", side_effect=error), self.assertRaises(OSError):
            self.store.is_verified(SHA, len(BODY))


class PartTests(StoreTestCase):
    def test_a_part_with_wrong_content_is_emptied_and_can_be_filled_again(self) -> None:
        with self.loaded() as part:
            part.write(b"!" * len(BODY))
            with self.assertRaises(WrongContent) as caught:
                part.finish()
            self.assertEqual(caught.exception.found, hashlib.sha256(b"!" * len(BODY)).hexdigest())
            part.write(BODY)
            part.finish()
        self.assertTrue(self.store.is_verified(SHA, len(BODY)))

    def test_an_empty_part_leaves_no_file(self) -> None:
        with self.loaded():
            self.assertTrue(self.store.part_path(SHA).exists())
        self.assertFalse(self.store.part_path(SHA).exists())

    def test_a_part_is_not_finished_before_it_is_full(self) -> None:
        with self.loaded() as part:
            part.write(BODY[:-1])
            with self.assertRaisesRegex(BlobError, "7999 of 8000 bytes are there"):
                part.finish()
        self.assertEqual(self.store.part_size(SHA), 7999)

    def test_a_part_takes_no_more_than_the_blob_has(self) -> None:
        with self.loaded() as part:
            part.write(BODY[:-1])
            with self.assertRaisesRegex(BlobError, "more than 8000 bytes"):
                part.write(b"xy")
            self.assertEqual(part.length, 7999)

    def test_a_part_goes_on_where_it_ended(self) -> None:
        with self.loaded() as part:
            part.write(BODY[:5000])
        with self.loaded() as part:
            self.assertEqual(part.length, 5000)
            part.write(BODY[5000:])
            part.finish()
        self.assertEqual(self.store.path(SHA).read_bytes(), BODY)

    def test_a_short_write_is_completed(self) -> None:
        real = os.write
        with self.loaded() as part:
            with mock.patch.object(os, "write", lambda descriptor, data: real(descriptor, data[:3])):
                part.write(BODY[:100])
            part.write(BODY[100:])
            part.finish()

    def test_after_a_write_that_failed_half_way_the_part_is_still_right(self) -> None:
        real = os.write
        calls: list[int] = []

        def write(descriptor: int, data: Any) -> int:
            calls.append(1)
            if len(calls) > 1:
                raise OSError(errno.ENOSPC, "full")
            return real(descriptor, data[:1000])

        with self.loaded() as part:
            with mock.patch.object(os, "write", write), self.assertRaises(OSError):
                part.write(BODY)
            self.assertEqual(part.length, 1000)
            part.write(BODY[1000:])
            part.finish()

    def test_a_file_size_limit_is_an_error_and_what_fits_is_kept(self) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4000, hard))
            with self.loaded() as part, self.assertRaises(OSError) as caught:
                part.write(BODY)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, handler)
        self.assertEqual(caught.exception.errno, errno.EFBIG)
        self.assertEqual(self.store.part_size(SHA), 4000)

    def test_two_writers_of_one_part_are_kept_apart(self) -> None:
        with self.loaded(), self.assertRaises(PartBusy):
            self.open().open_part(SHA, len(BODY))

    def test_a_writer_that_waited_for_a_part_that_became_the_blob_gets_a_new_one(self) -> None:
        """Opened before the rename and locked after it, it would write into the blob."""
        real = os.open
        adopted: list[str] = []

        def open_late(path: Any, *args: Any, **kwargs: Any) -> int:
            descriptor = real(path, *args, **kwargs)
            if str(path).endswith(".part") and not adopted:
                adopted.append("")
                self.store.part_path(SHA).write_bytes(BODY)
                os.rename(self.store.part_path(SHA), self.store.path(SHA))
            return descriptor

        with mock.patch.object(os, "open", open_late):
            part = self.store.open_part(SHA, len(BODY))
        self.assertEqual(part.load(), 0)
        part.write(b"garbage")
        part.close()
        self.assertEqual(self.store.path(SHA).read_bytes(), BODY)

    def test_an_abandoned_part_stops_working(self) -> None:
        with self.loaded() as part:
            part.write(BODY[:100])
            part.abandon()
            for work in (part.load, part.restart, part.finish, lambda: part.write(b"x")):
                with self.assertRaises(Abandoned):
                    work()
        self.assertEqual(self.store.part_size(SHA), 100)

    def test_abandoning_stops_the_hashing_of_a_long_part(self) -> None:
        size = 3 << 20
        self.store.part_path(SHA).write_bytes(bytes(size))
        part = self.store.open_part(SHA, size)
        real = os.read

        def read(descriptor: int, length: int) -> bytes:
            part.abandon()
            return real(descriptor, length)

        with mock.patch.object(os, "read", read), self.assertRaises(Abandoned):
            part.load()
        self.assertLess(part.length, size)
        part.close()

    def test_closing_waits_for_work_in_another_thread(self) -> None:
        part = self.store.open_part(SHA, len(BODY))
        part.load()
        writing, go_on = threading.Event(), threading.Event()
        real = os.write

        def write(descriptor: int, data: Any) -> int:
            writing.set()
            go_on.wait(10)
            return real(descriptor, data)

        with mock.patch.object(os, "write", write):
            writer = threading.Thread(target=part.write, args=(BODY,))
            writer.start()
            writing.wait(10)
            closer = threading.Thread(target=part.close)
            closer.start()
            go_on.set()
            writer.join(10)
            closer.join(10)
        self.assertEqual(self.store.part_size(SHA), len(BODY))

    def test_a_part_of_the_full_size_is_adopted(self) -> None:
        self.store.part_path(SHA).write_bytes(BODY)
        self.store.adopt_part(SHA, len(BODY))
        self.assertTrue(self.store.is_verified(SHA, len(BODY)))

    def test_a_part_with_wrong_bytes_is_not_adopted(self) -> None:
        self.store.part_path(SHA).write_bytes(b"!" * len(BODY))
        with self.assertRaises(WrongContent):
            self.store.adopt_part(SHA, len(BODY))
        self.assertEqual([*self.store.blobs.iterdir(), *self.store.partial.iterdir()], [])


class CrashTests(StoreTestCase):
    STEPS = ("fchmod", "fsync", "rename", "write", "fdatasync", "ftruncate", "lseek")

    def watched(self, watch: Callable[[str], object]) -> Any:
        """Call ``watch`` with the name before each call of an os function that changes something."""

        def wrap(name: str) -> Callable[..., Any]:
            real = getattr(os, name)

            def call(*args: Any, **kwargs: Any) -> Any:
                watch(name)
                return real(*args, **kwargs)

            return call

        wrapped: dict[str, Any] = {name: wrap(name) for name in self.STEPS}
        return mock.patch.multiple(os, **wrapped)

    def test_the_bytes_are_on_the_disk_before_the_name_and_the_name_before_the_stamp(self) -> None:
        with self.loaded() as part:
            part.write(BODY)
            steps: list[str] = []
            with self.watched(steps.append):
                part.finish()
        self.assertEqual(steps, ["fchmod", "fsync", "rename", "fsync", "write"])

    def test_after_a_crash_at_any_step_nothing_wrong_is_trusted_and_it_can_be_finished(self) -> None:
        crashed = 0
        for at in range(100):
            self.root = Path(self.mktemp())
            store = self.open()
            left = [at]

            def watch(name: str, left: list[int] = left) -> None:
                left[0] -= 1
                if left[0] < 0:
                    raise Crash(name)

            try:
                with self.watched(watch):
                    part = store.open_part(SHA, len(BODY))
                    part.load()
                    part.write(BODY[:4000])
                    part.write(BODY[4000:])
                    part.finish()
                    store.flush()
            except Crash:
                crashed += 1
                os.close(part._descriptor)  # as the end of a process does
            else:
                part.close()
            store = self.open()
            if store.is_verified(SHA, len(BODY)):
                self.assertEqual(store.path(SHA).read_bytes(), BODY)
            if store.examine(SHA, len(BODY)).state is not State.VERIFIED:
                self.add(store=store)
            self.assertTrue(store.is_verified(SHA, len(BODY)))
            self.assertEqual(list(store.partial.iterdir()), [])
            self.assertEqual(list(store.quarantine.iterdir()), [])
            if left[0] >= 0:
                break
        self.assertGreater(crashed, 8)

    def test_a_renamed_blob_without_a_stamp_is_hashed_once(self) -> None:
        self.add()
        self.store.close()
        (self.root / "verified.log").unlink()
        store = self.open()
        self.assertFalse(store.is_verified(SHA, len(BODY)))
        self.assertTrue(store.verify(SHA, len(BODY)))
        store.close()
        self.assertTrue(self.open().is_verified(SHA, len(BODY)))


class SweepTests(StoreTestCase):
    def test_what_is_not_kept_is_deleted_and_counted(self) -> None:
        keep, drop = self.add(), self.add(b"other")
        self.assertEqual(self.store.sweep({keep}), Swept(blobs=1, partials=0, bytes=5))
        self.assertTrue(self.store.is_verified(keep, len(BODY)))
        self.assertFalse(self.store.path(drop).exists())
        self.store.close()
        self.assertEqual((self.root / "verified.log").read_text().splitlines()[-1], f"{drop} -")

    def test_a_part_is_kept_while_it_is_wanted_or_fresh_and_deleted_when_stale(self) -> None:
        for sha256 in (SHA, OTHER):
            self.store.part_path(sha256).write_bytes(b"begin")
        self.assertEqual(self.store.sweep([]), Swept())
        later = time.time() + 8 * 86400
        self.assertEqual(self.store.sweep([SHA], now=later), Swept(partials=1, bytes=5))
        self.assertEqual([path.name for path in self.store.partial.iterdir()], [f"{SHA}.part"])

    def test_a_part_whose_blob_is_whole_is_deleted(self) -> None:
        self.add()
        self.store.part_path(SHA).write_bytes(b"begin")
        self.assertEqual(self.store.sweep([SHA]).partials, 1)

    def test_a_part_that_is_being_written_is_kept(self) -> None:
        with self.loaded() as part:
            part.write(b"begin")
            self.assertEqual(self.store.sweep([], now=time.time() + 8 * 86400), Swept())
            self.assertTrue(part.path.exists())

    def test_a_book_that_a_killed_process_did_not_finish_is_deleted_but_not_one_that_is_being_written(self) -> None:
        left, living = self.root / "verified.log.99.new", self.root / "damaged.json.100.new"
        for path in (left, living):
            path.write_bytes(b"half")
        os.utime(left, (0, 0))
        self.store.sweep([])
        self.assertEqual((left.exists(), living.exists()), (False, True))

    def test_what_somebody_else_put_there_is_deleted(self) -> None:
        (self.store.blobs / "directory" / "inside").mkdir(parents=True)
        (self.store.blobs / "link").symlink_to("/etc/passwd")
        (self.store.partial / "README").write_text("x")
        (self.store.partial / "link").symlink_to("/etc/passwd")
        swept = self.store.sweep([])
        self.assertEqual((swept.blobs, swept.partials), (2, 2))
        self.assertEqual([*self.store.blobs.iterdir(), *self.store.partial.iterdir()], [])


class StampLogTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.path = Path(self.mktemp())
        self.now: dict[str, Stamp] = {}

    def open(self) -> StampLog:
        log = StampLog.open(self.path, self.now.get)
        self.addCleanup(log.close)
        return log

    def put(self, log: StampLog, sha256: str, stamp: Stamp) -> None:
        self.now[sha256] = stamp
        log.put(sha256, stamp)

    def test_stamps_survive(self) -> None:
        self.put(self.open(), SHA, Stamp(1, 2, 3))
        self.assertEqual(self.open().get(SHA), Stamp(1, 2, 3))

    def test_the_last_stamp_counts(self) -> None:
        log = self.open()
        self.put(log, SHA, Stamp(1, 2, 3))
        self.put(log, SHA, Stamp(1, 4, 5))
        self.assertEqual(self.open().get(SHA), Stamp(1, 4, 5))

    def test_what_was_forgotten_stays_forgotten(self) -> None:
        log = self.open()
        self.put(log, SHA, Stamp(1, 2, 3))
        log.forget(SHA)
        self.assertIsNone(self.open().get(SHA))

    def test_what_is_not_true_any_more_is_dropped(self) -> None:
        self.put(self.open(), SHA, Stamp(1, 2, 3))
        self.now[SHA] = Stamp(1, 2, 4)
        self.assertIsNone(self.open().get(SHA))
        self.assertEqual(self.path.read_text(), f"{HEADER}\n")

    def test_the_log_is_compacted_at_the_start(self) -> None:
        log = self.open()
        for number in range(100):
            self.put(log, SHA, Stamp(1, number, 3))
        self.open()
        self.assertEqual(len(self.path.read_text().splitlines()), 2)

    def test_a_log_that_cannot_be_compacted_is_used_as_it_is(self) -> None:
        log = self.open()
        for number in range(3):
            self.put(log, SHA, Stamp(1, number, 3))
        with mock.patch.object(os, "fsync", side_effect=OSError(errno.ENOSPC, "full")):
            log = self.open()
        self.assertEqual(log.get(SHA), Stamp(1, 2, 3))
        self.assertEqual([path.name for path in self.path.parent.iterdir() if "new" in path.name], [])
        self.put(log, OTHER, Stamp(7, 8, 9))
        self.assertEqual(self.open().get(OTHER), Stamp(7, 8, 9))

    def test_a_stamp_that_cannot_be_written_is_logged_and_the_next_one_can_be_read(self) -> None:
        log = self.open()
        real = os.write

        def half(descriptor: int, data: bytes) -> int:
            return real(descriptor, data[:30])

        with mock.patch.object(os, "write", half), capturedLogs() as events:
            self.put(log, SHA, Stamp(1, 2, 3))
        self.assertIn("only 30 of", str([event["error"] for event in events]))
        self.assertEqual(log.get(SHA), Stamp(1, 2, 3))
        self.put(log, OTHER, Stamp(7, 8, 9))
        again = self.open()
        self.assertIsNone(again.get(SHA))
        self.assertEqual(again.get(OTHER), Stamp(7, 8, 9))

    @settings(deadline=None, max_examples=200)
    @given(st.data())
    def test_a_damaged_log_gives_only_stamps_that_were_written(self, data: st.DataObject) -> None:
        self.path.unlink(missing_ok=True)
        names = [hashlib.sha256(bytes([number])).hexdigest() for number in range(4)]
        numbers = st.integers(0, 10**12)
        log = StampLog.open(self.path, self.now.get)
        written: set[tuple[str, Stamp]] = set()
        for name in data.draw(st.lists(st.sampled_from(names), max_size=8)):
            stamp = Stamp(data.draw(numbers), data.draw(numbers), data.draw(numbers))
            log.put(name, stamp)
            written.add((name, stamp))
        log.close()
        damaged = bytearray(self.path.read_bytes())
        for _ in range(data.draw(st.integers(0, 3))):
            at = data.draw(st.integers(0, len(damaged) - 1))
            damaged[at] ^= data.draw(st.integers(1, 255))
        del damaged[data.draw(st.integers(0, len(damaged))) :]
        self.assertLessEqual(set(parse_log(bytes(damaged)).items()), written)
