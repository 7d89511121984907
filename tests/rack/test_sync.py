"""A rack's syncing: who is told what, what stays when it fails, and that it goes on by itself."""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

from attrs import define, evolve, field
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from hypothesis.strategies import booleans, integers, lists, sampled_from
from twisted.internet.defer import CancelledError, Deferred, execute
from twisted.internet.task import Clock
from twisted.logger import ILogObserver, globalLogPublisher
from twisted.trial.unittest import SynchronousTestCase

from rack.assignment import Assignment, AssignmentFile
from rack.files import Files
from rack.inspection import directory_of
from rack.inventory import NOTHING
from rack.life import Result
from rack.snapshots import SnapshotStore
from rack.steps import RESERVE, Syncs
from rack.sync import Synchroniser
from rpc.blobs import BlobStore, Examination
from rpc.events import DAMAGE_FOUND
from rpc.fetch import Fetched, FetchError, FetchFailed, Progress, Wanted
from rpc.manifest import EMPTY, Image, Manifest
from tests.examples import examples
from tests.logs import Logs
from tests.rack.material import URL, contents_of, expected_tree, image, put, put_all, tree

P = ParamSpec("P")
T = TypeVar("T")

FOCAL = image(release="focal", version="20200101")
NOBLE = image()
NEWER_NOBLE = image(version="20260202")
LOADER = image(os_="grub-efi", release="", version="20250505")
FIRST = Manifest((FOCAL, NOBLE))
SECOND = Manifest((NEWER_NOBLE, FOCAL, LOADER))
THIRD = Manifest((LOADER, NOBLE))

INTERVAL = 900.0


def inline(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Deferred[T]:
    """What stands in for threads: the work is done at once."""
    return execute(function, *args, **kwargs)


@define(eq=False)
class Threads:
    """Threads that do nothing until :meth:`work`."""

    tasks: list[Callable[[], object]] = field(factory=list)

    def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Deferred[T]:
        """As :class:`rpc.fetch.RunInThread`."""
        started: Deferred[T] = Deferred()
        self.tasks.append(lambda: execute(function, *args, **kwargs).chainDeferred(started))
        return started

    def work(self) -> None:
        """Do what there is to do, and what follows from that."""
        while self.tasks:
            self.tasks.pop(0)()


@define(eq=False)
class Region:
    """What a region's stream has, given by a fetcher that asks nobody. ``hold`` keeps answers back until released.

    ``withheld`` says of what is damaged there why it cannot be given.
    """

    blobs: BlobStore
    documents: dict[str, bytes | FetchError] = field(factory=dict)
    contents: dict[str, bytes | str] = field(factory=dict)
    requests: list[str] = field(factory=list)
    withheld: dict[str, str] = field(factory=dict)
    held: list[Deferred[None]] | None = None
    on_fetched: Callable[[], object] = field(default=lambda: None)

    def publish(self, generation: int, manifest: Manifest) -> Assignment:
        """Have ``manifest`` and all its contents; what to tell a rack."""
        assignment = Assignment(generation, manifest.digest, URL)
        self.documents[assignment.manifest_url] = manifest.canonical
        self.contents.update(contents_of(*manifest.images))
        return assignment

    def hold(self) -> None:
        """Answer nothing until :meth:`release`."""
        self.held = []

    def release(self) -> None:
        """Answer what was asked meanwhile, and from now on at once."""
        held, self.held = self.held or [], None
        for one in held:
            one.callback(None)

    async def _turn(self) -> None:
        if self.held is not None:
            turn: Deferred[None] = Deferred()
            self.held.append(turn)
            try:
                await turn
            finally:
                if self.held and turn in self.held:
                    self.held.remove(turn)

    async def read_document(self, url: str, *, limit: int) -> bytes:
        """As :class:`rpc.fetch.Fetcher`."""
        self.requests.append(url)
        await self._turn()
        found = self.documents.get(url)
        if found is None:
            raise FetchError(url, "the server answered 404 Not Found")
        if isinstance(found, FetchError):
            raise found
        return found

    async def fetch(
        self, wanted: Sequence[Wanted], progress: Callable[[Progress], object] | None = None
    ) -> Mapping[str, Fetched | FetchFailed]:
        """As :class:`rpc.fetch.Fetcher`."""
        results: dict[str, Fetched | FetchFailed] = {}
        total = sum(one.size for one in wanted)
        done = 0
        for one in wanted:
            self.requests.append(one.url)
            if progress is not None:
                files = sum(isinstance(each, Fetched) for each in results.values())
                progress(Progress(len(wanted), files, len(results) - files, total, done, done, (one.label,)))
            await self._turn()
            if one.sha256 in self.withheld:
                results[one.sha256] = FetchFailed(one.sha256, one.url, self.withheld[one.sha256], withheld=True)
                continue
            data = self.contents.get(one.sha256, "the server answered 404 Not Found")
            if isinstance(data, str):
                results[one.sha256] = FetchFailed(one.sha256, one.url, data)
                continue
            put(self.blobs, data)
            done += one.size
            results[one.sha256] = Fetched(one.sha256, one.size, one.size, 0.0)
        if progress is not None:
            files = sum(isinstance(each, Fetched) for each in results.values())
            progress(Progress(len(wanted), files, len(results) - files, total, done, done, ()))
        self.on_fetched()
        return results


@define(eq=False)
class SmallDisk(Files):
    """A disk whose free space the test says."""

    free: int = 1 << 50

    def free_bytes(self, path: Path) -> int:
        """What the test says."""
        return self.free


class Rack:
    """The parts of a rack around a synchroniser, as one process has them."""

    def __init__(self, root: Path, clock: Clock, files: Files | None = None) -> None:
        self.root = root
        self.clock = clock
        self.blobs = BlobStore(root / "cache")
        self.store = SnapshotStore(root, self.blobs, files)
        self.store.open()
        self.region = Region(self.blobs)
        self.changes: list[tuple[str, int]] = []
        self.assignments = AssignmentFile(root / "assignment.json", files)
        syncs = Syncs(self.store, self.assignments, self.region, inline)
        self.synchroniser = Synchroniser(syncs, clock, interval=INTERVAL, jitter=lambda: 0.0)
        self.synchroniser.on_change(self._changed)

    def _changed(self) -> None:
        self.changes.append((self.synchroniser.status.state, self.synchroniser.inventory.generation))

    def release(self) -> None:
        self.store.close()
        self.blobs.close()


class SyncTestCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.patch(os, "fsync", lambda descriptor: None)  # slow, and of no effect on what tests can see
        self.clock = Clock()
        self.root = Path(self.mktemp()).absolute()
        self.root.mkdir(parents=True)
        self.rack = self.start()
        self.logged: list[dict[str, Any]] = []
        observer = cast(ILogObserver, self.logged.append)
        globalLogPublisher.addObserver(observer)
        self.addCleanup(globalLogPublisher.removeObserver, observer)

    def start(self, files: Files | None = None) -> Rack:
        rack = Rack(self.root, self.clock, files)
        self.addCleanup(rack.release)
        self.successResultOf(Deferred.fromCoroutine(rack.synchroniser.recover()))
        return rack

    def restart(self, files: Files | None = None) -> Rack:
        before = self.rack
        before.release()
        self.rack = self.start(files)
        self.rack.region.documents.update(before.region.documents)
        self.rack.region.contents.update(before.region.contents)
        return self.rack

    def request(self, assignment: Assignment) -> Deferred[Result]:
        return self.rack.synchroniser.request(assignment)

    def sync(self, generation: int, manifest: Manifest) -> Result:
        return self.successResultOf(self.request(self.rack.region.publish(generation, manifest)))

    def assert_holds(self, generation: int, manifest: Manifest) -> None:
        inventory = self.rack.synchroniser.inventory
        self.assertEqual((inventory.generation, inventory.manifest), (generation, manifest))
        if generation != -1:
            self.assertEqual(tree(self.root / "current"), expected_tree(manifest))

    def keep_threads_back(self) -> Threads:
        threads = Threads()
        self.rack.synchroniser._core.syncs.run_in_thread = threads.run
        return threads

    def messages(self) -> list[str]:
        return [
            event["log_format"].format(**event) for event in self.logged if event["log_namespace"].startswith("rack.")
        ]


class TestOneSync(SyncTestCase):
    def test_a_rack_that_holds_nothing_fetches_all_and_says_how_much(self) -> None:
        result = self.sync(5, FIRST)
        self.assertEqual(result, Result("synced", 5, FIRST.digest, "", sum(FIRST.blobs.values()), len(FIRST.blobs)))
        self.assert_holds(5, FIRST)
        self.assertEqual(self.rack.synchroniser.status.state, "ready")
        self.assertEqual(self.rack.changes[0], ("syncing", -1))
        self.assertEqual(self.rack.changes[-1], ("ready", 5))

    def test_the_manifest_is_fetched_once_and_each_missing_content_once(self) -> None:
        # Regression: an older rack read the stream twice, and kept what the two readings agreed on.
        self.sync(5, FIRST)
        requests = self.rack.region.requests
        self.assertEqual(requests[0], f"{URL}/generations/{FIRST.digest}/manifest.json")
        self.assertEqual(sorted(requests[1:]), sorted(f"{URL}/blobs/{sha256}" for sha256 in FIRST.blobs))

    def test_an_update_fetches_what_changed_and_nothing_else(self) -> None:
        self.sync(5, FIRST)
        self.rack.region.requests.clear()
        result = self.sync(6, SECOND)
        new = SECOND.blobs.keys() - FIRST.blobs.keys()
        self.assertEqual(sorted(self.rack.region.requests[1:]), sorted(f"{URL}/blobs/{sha256}" for sha256 in new))
        self.assertEqual(result.files_fetched, len(new))
        self.assert_holds(6, SECOND)
        self.assertEqual(set(os.listdir(self.root / "cache/blobs")), set(SECOND.blobs))

    def test_a_sync_that_changes_nothing_asks_nothing(self) -> None:
        self.sync(5, FIRST)
        self.rack.region.requests.clear()
        self.assertEqual(self.sync(5, FIRST), Result("unchanged", 5, FIRST.digest))
        self.assertEqual(self.rack.region.requests, [])

    def test_the_same_content_under_a_new_number_asks_nothing(self) -> None:
        self.sync(5, FIRST)
        self.rack.region.requests.clear()
        self.assertEqual(self.sync(9, FIRST), Result("synced", 9, FIRST.digest))
        self.assertEqual(self.rack.region.requests, [])
        self.assert_holds(9, FIRST)

    def test_a_region_that_was_set_up_anew_and_counts_from_one_is_followed(self) -> None:
        self.sync(57, FIRST)
        self.assertEqual(self.sync(1, SECOND).outcome, "synced")
        self.assert_holds(1, SECOND)

    def test_an_empty_generation_empties_the_rack(self) -> None:
        self.sync(5, FIRST)
        self.assertEqual(self.sync(6, EMPTY).outcome, "synced")
        self.assertEqual(self.rack.synchroniser.inventory.digest, EMPTY.digest)

    def test_start_end_bytes_and_files_are_logged(self) -> None:
        self.sync(5, FIRST)
        text = "\n".join(self.messages())
        self.assertIn(f"Sync to generation 5 ({FIRST.digest[:8]}) from {URL} begins.", text)
        self.assertIn(
            f"Sync to generation 5 ({FIRST.digest[:8]}) ended after 0.0 s: synced, {len(FIRST.blobs)} files and "
            f"{sum(FIRST.blobs.values())} bytes fetched.",
            text,
        )

    def test_while_it_fetches_it_says_what_and_how_far_it_is(self) -> None:
        self.rack.region.hold()
        self.request(self.rack.region.publish(5, FIRST))
        status = self.rack.synchroniser.status
        self.assertEqual((status.state, status.progress["step"]), ("syncing", "manifest"))
        self.assertIsNone(status.progress["rate"])
        self.rack.region.release()
        self.rack.region.hold()
        ended = self.request(self.rack.region.publish(6, SECOND))
        assert self.rack.region.held is not None
        self.rack.region.held[0].callback(None)
        self.clock.advance(2)
        progress = self.rack.synchroniser.status.progress
        self.assertEqual((progress["generation"], progress["step"], progress["seconds"]), (6, "fetching", 2.0))
        self.assertEqual((progress["files"], progress["files_done"], progress["rate"]), (6, 0, 0))
        self.assertEqual(len(progress["current"]), 1)
        self.assertIn("boot-", progress["current"][0])
        self.rack.region.release()
        self.assertEqual(self.successResultOf(ended).outcome, "synced")

    def test_readers_see_whole_inventories_only(self) -> None:
        self.sync(5, FIRST)
        seen = set()
        inventories = {(5, FIRST.digest), (6, SECOND.digest)}

        def look() -> None:
            inventory = self.rack.synchroniser.inventory
            seen.add((inventory.generation, inventory.digest))
            self.assertIn((inventory.generation, inventory.digest), inventories)
            self.assertEqual(tree(self.root / "current"), expected_tree(inventory.manifest))

        files = Files()
        watched = self.restart(files)
        for name in ("link", "write", "sync", "rename", "symlink", "make_directory", "unlink", "remove_directory"):
            original = getattr(files, name)

            def wrapped(*args: Any, original: Callable[..., Any] = original) -> None:
                look()
                original(*args)

            setattr(files, name, wrapped)
        look()
        self.successResultOf(watched.synchroniser.request(watched.region.publish(6, SECOND)))
        look()
        self.assertEqual(seen, inventories)

    def test_a_reader_with_a_lease_keeps_its_files_through_an_update(self) -> None:
        # Regression: an older rack removed snapshots that were being served.
        self.sync(5, FIRST)
        with self.rack.store.lease() or self.fail("no lease") as lease:
            self.sync(6, SECOND)
            self.sync(7, THIRD)
            self.assertEqual(tree(lease.path), expected_tree(FIRST))
        self.sync(8, SECOND)
        self.assertEqual(os.listdir(self.root / "snapshots"), [f"8-{SECOND.digest[:8]}"])


class TestFailing(SyncTestCase):
    """Whatever fails, what was held is held, the reason is said, and the rack tries again."""

    def assert_fails(self, assignment: Assignment, *said: str) -> Result:
        result = self.successResultOf(self.request(assignment))
        self.assertEqual((result.outcome, result.generation, result.digest), ("failed", 5, FIRST.digest))
        self.assert_holds(5, FIRST)
        status = self.rack.synchroniser.status
        self.assertEqual(status.state, "failed")
        for text in said:
            self.assertIn(text, result.reason)
            self.assertIn(text, status.progress["reason"])
            self.assertIn(text, "\n".join(self.messages()))
        self.assertEqual(status.progress["next_try_seconds"], 15.0)
        return result

    def setUp(self) -> None:
        super().setUp()
        self.sync(5, FIRST)

    def test_without_the_manifest(self) -> None:
        assignment = self.rack.region.publish(6, SECOND)
        del self.rack.region.documents[assignment.manifest_url]
        self.assert_fails(assignment, "404", "generation 6")

    def test_when_the_region_is_away(self) -> None:
        assignment = self.rack.region.publish(6, SECOND)
        self.rack.region.documents[assignment.manifest_url] = FetchError(
            assignment.manifest_url, "Connection refused", retriable=True
        )
        self.assert_fails(assignment, "Connection refused")

    def test_with_a_manifest_of_another_digest(self) -> None:
        assignment = self.rack.region.publish(6, SECOND)
        self.rack.region.documents[assignment.manifest_url] = THIRD.canonical
        self.assert_fails(assignment, THIRD.digest, SECOND.digest)

    def test_with_a_manifest_that_would_write_outside_of_the_snapshot(self) -> None:
        for before, after in (
            (b'"name":"squashfs"', b'"name":"../../../../../../../../evil"'),
            (b'"name":"squashfs"', b'"name":"/etc/evil"'),
            (b'"release":"noble"', b'"release":".."'),
            (b'"os":"ubuntu"', b'"os":"../.."'),
            (b'"version":"20260202"', b'"version":"a/../../b"'),
        ):
            evil = SECOND.canonical.replace(before, after)
            self.assertNotEqual(evil, SECOND.canonical)
            assignment = Assignment(6, hashlib.sha256(evil).hexdigest(), URL)
            self.rack.region.documents[assignment.manifest_url] = evil
            result = self.successResultOf(self.request(assignment))
            self.assertEqual(result.outcome, "failed")
            self.assertIn("cannot be part of a path", result.reason)
            self.assert_holds(5, FIRST)
        self.assertEqual([path.name for path in self.root.parent.rglob("evil")], [])

    def test_with_contents_that_cannot_be_fetched_the_first_are_named_and_all_logged(self) -> None:
        assignment = self.rack.region.publish(6, SECOND)
        for file in NEWER_NOBLE.files:
            self.rack.region.contents[file.sha256] = f"its sha256 is not {file.sha256}"
        for file in LOADER.files:
            del self.rack.region.contents[file.sha256]
        result = self.assert_fails(assignment, "6 of 6 files could not be fetched", "and 3 more", "404")
        self.assertEqual(result.files_fetched, 0)
        told = [message for message in self.messages() if message.startswith("Could not fetch")]
        self.assertEqual(len(told), 6)
        self.assertTrue(any("ubuntu/noble" in message and "squashfs" in message for message in told), told)

    def test_what_was_fetched_by_a_sync_that_failed_is_not_fetched_again(self) -> None:
        assignment = self.rack.region.publish(6, SECOND)
        lost = LOADER.files[0].sha256
        content = self.rack.region.contents.pop(lost)
        self.assert_fails(assignment, "1 of 6 files")
        self.rack.region.contents[lost] = content
        self.rack.region.requests.clear()
        self.clock.advance(15)
        self.assert_holds(6, SECOND)
        self.assertEqual(self.rack.region.requests[1:], [f"{URL}/blobs/{lost}"])

    def test_tries_come_ever_more_seldom_but_at_least_each_interval(self) -> None:
        assignment = self.rack.region.publish(6, SECOND)
        manifest = self.rack.region.documents.pop(assignment.manifest_url)
        self.assert_fails(assignment)
        waits = []
        for _ in range(9):
            waits.append(self.rack.synchroniser.status.progress["next_try_seconds"])
            self.clock.advance(waits[-1])
        self.assertEqual(waits, [15.0, 30.0, 60.0, 120.0, 240.0, 480.0, 900.0, 900.0, 900.0])
        self.rack.region.documents[assignment.manifest_url] = manifest
        self.clock.advance(900.0)
        self.assert_holds(6, SECOND)
        self.assertEqual(self.rack.synchroniser.status.state, "ready")

    def test_a_disk_that_cannot_hold_the_new_images_is_not_filled(self) -> None:
        disk = SmallDisk()
        self.restart(disk)
        assignment = self.rack.region.publish(6, SECOND)
        disk.free = RESERVE + 100
        self.assert_fails(assignment, "the disk is too full", f"{RESERVE + 100} are free")
        self.assertEqual(self.rack.region.requests, [assignment.manifest_url])

    def test_old_contents_make_room_before_the_disk_is_called_full(self) -> None:
        disk = SmallDisk()
        rack = self.restart(disk)
        put_all(rack.blobs, Manifest((image(version="20250101"),)))
        needed = sum(SECOND.blobs[sha256] for sha256 in SECOND.blobs.keys() - FIRST.blobs.keys())
        sweep = rack.blobs.sweep

        def sweeping(*args: Any, **kwargs: Any) -> Any:
            disk.free = needed + RESERVE
            return sweep(*args, **kwargs)

        disk.free = 0
        self.patch(BlobStore, "sweep", lambda store, *args, **kwargs: sweeping(*args, **kwargs))
        self.assertEqual(self.sync(6, SECOND).outcome, "synced")
        self.assertEqual(set(os.listdir(self.root / "cache/blobs")), set(SECOND.blobs))

    def test_a_disk_that_fills_up_while_fetching_gets_its_space_back(self) -> None:
        disk = SmallDisk()
        rack = self.restart(disk)
        assignment = rack.region.publish(6, SECOND)
        rack.region.contents[LOADER.files[-1].sha256] = "cannot write: No space left on device"

        def fill() -> None:
            part = rack.blobs.open_part(LOADER.files[-1].sha256, LOADER.files[-1].size)
            part.load()
            part.write(b"half of")
            part.close()
            disk.free = 0

        rack.region.on_fetched = fill
        self.assert_fails(assignment, "No space left on device", "the disk is too full")
        self.assertEqual(set(os.listdir(self.root / "cache/blobs")), set(FIRST.blobs))
        self.assertEqual(os.listdir(self.root / "cache/partial"), [])

    def test_an_error_of_the_disk_is_a_reason(self) -> None:
        disk = Files()
        self.restart(disk)

        def refuse(source: Path, target: Path) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(target))

        disk.link = refuse  # type: ignore[method-assign]  # this disk cannot
        self.assert_fails(self.rack.region.publish(6, SECOND), "the disk failed", "Input/output error")

    def test_what_is_missing_is_told_although_something_else_cannot_be_looked_at(self) -> None:
        told: list[str] = []
        self.rack.synchroniser.on_happening(lambda kind, text: told.append(text) if kind is DAMAGE_FOUND else None)
        unread = NOBLE.files[0].sha256
        (self.root / "cache/blobs" / FOCAL.files[0].sha256).unlink()
        examine = BlobStore.examine

        def refuse(store: BlobStore, sha256: str, size: int) -> Examination:
            if sha256 == unread:
                raise OSError(errno.EIO, os.strerror(errno.EIO), sha256)
            return examine(store, sha256, size)

        self.patch(BlobStore, "examine", refuse)
        result = self.sync(5, FIRST)
        self.assertEqual(result.outcome, "failed")
        self.assertIn("cannot be looked at", result.reason)
        self.assertEqual(self.rack.synchroniser.inventory.manifest.images, (NOBLE,))
        self.assertEqual(len(told), 1)
        self.assertIn(str(FOCAL.key), told[0])
        self.patch(BlobStore, "examine", examine)
        self.assertEqual(self.sync(5, FIRST).outcome, "synced")
        self.assertEqual(len(told), 1)

    def test_that_old_files_cannot_be_removed_does_not_make_a_sync_fail(self) -> None:
        # Regression: an older rack whose clean-up failed after the switch went on listing the old images.
        disk = Files()
        self.restart(disk)

        def refuse(path: Path) -> None:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))

        disk.remove_tree = refuse  # type: ignore[method-assign]  # this disk cannot
        self.assertEqual(self.sync(6, SECOND).outcome, "synced")
        self.assert_holds(6, SECOND)
        self.assertTrue(any("could not be removed" in message for message in self.messages()))
        self.patch(BlobStore, "sweep", lambda *args, **kwargs: 1 / 0)
        self.assertEqual(self.sync(7, THIRD).outcome, "synced")
        self.assert_holds(7, THIRD)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)

    def test_a_fault_of_our_own_ends_the_sync_and_not_the_syncing(self) -> None:
        self.patch(SnapshotStore, "missing", lambda *args: 1 / 0)
        self.assert_fails(self.rack.region.publish(6, SECOND), "internal error: ZeroDivisionError")
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)

    def test_the_environments_proxy_is_not_touched(self) -> None:
        # Regression: an older rack handed its proxy on through the process's environment.
        before = dict(os.environ)
        self.sync(6, SECOND)
        self.assertEqual(dict(os.environ), before)


class TestDamage(SyncTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.sync(5, FIRST)
        self.rack.region.requests.clear()

    def spoil(self) -> str:
        sha256 = NOBLE.files[0].sha256
        self.rack.blobs.path(sha256).write_bytes(b"spoilt")
        return f"{URL}/blobs/{sha256}"

    def test_a_corrupt_blob_is_unlisted_and_fetched_again_when_the_rack_looks(self) -> None:
        url = self.spoil()
        self.rack.region.hold()
        self.clock.advance(INTERVAL)
        self.assertEqual(self.rack.synchroniser.inventory.manifest, Manifest((FOCAL,)))
        self.assertIn(("syncing", 5), self.rack.changes)
        self.rack.region.release()
        self.assert_holds(5, FIRST)
        self.assertEqual(self.rack.region.requests, [url])
        self.assertTrue(any("Damaged in generation 5: ubuntu/noble" in message for message in self.messages()))

    def test_a_corrupt_blob_is_fetched_again_after_a_restart(self) -> None:
        url = self.spoil()
        self.restart()
        self.assertEqual(self.rack.synchroniser.inventory.manifest, Manifest((FOCAL,)))
        status = self.rack.synchroniser.status
        self.assertEqual(status.state, "failed")
        self.assertIn("ubuntu/noble", status.progress["reason"])
        self.rack.synchroniser.look_again()
        self.assert_holds(5, FIRST)
        self.assertEqual(self.rack.region.requests, [url])
        self.assertEqual(self.rack.synchroniser.status.state, "ready")

    def test_a_corrupt_blob_is_fetched_again_when_the_region_asks_for_the_same_generation(self) -> None:
        self.spoil()
        result = self.sync(5, FIRST)
        self.assertEqual((result.outcome, result.files_fetched), ("synced", 1))
        self.assert_holds(5, FIRST)

    def test_a_file_missing_from_the_snapshot_costs_no_request(self) -> None:
        (self.root / "current/ubuntu/noble/amd64/generic/generic/stable/20260101/squashfs").unlink()
        self.clock.advance(INTERVAL)
        self.assert_holds(5, FIRST)
        self.assertEqual(self.rack.region.requests, [])

    def test_what_cannot_be_mended_stays_unlisted_and_the_rest_listed(self) -> None:
        self.spoil()
        self.rack.region.contents.clear()
        result = self.sync(5, Manifest((FOCAL, NOBLE)))
        self.rack.region.contents.clear()
        self.spoil()
        self.clock.advance(INTERVAL)
        self.assertEqual(result.outcome, "synced")
        self.assertEqual(self.rack.synchroniser.inventory.manifest, Manifest((FOCAL,)))
        self.assertEqual(self.rack.synchroniser.status.state, "failed")


class TestRestarting(SyncTestCase):
    def test_after_a_restart_what_was_held_is_held_without_a_request(self) -> None:
        self.sync(5, FIRST)
        self.restart()
        self.assert_holds(5, FIRST)
        self.assertEqual(self.rack.synchroniser.status.state, "ready")
        self.assertEqual(self.rack.region.requests, [])
        self.rack.synchroniser.look_again()
        self.assertEqual(self.rack.region.requests, [])

    def test_a_sync_that_a_restart_cut_off_goes_on_by_itself(self) -> None:
        self.sync(5, FIRST)
        self.rack.region.hold()
        self.request(self.rack.region.publish(6, SECOND))
        self.stop_rack()
        self.restart()
        self.assert_holds(5, FIRST)
        self.rack.synchroniser.look_again()
        self.assert_holds(6, SECOND)

    def stop_rack(self) -> None:
        self.successResultOf(self.rack.synchroniser.stop())

    def test_a_rack_that_was_never_told_anything_looks_for_nothing(self) -> None:
        self.rack.synchroniser.look_again()
        self.assertEqual(self.rack.changes, [])
        self.assertEqual(self.rack.synchroniser.status.state, "empty")

    def test_an_assignment_that_cannot_be_read_is_logged_and_the_snapshot_held(self) -> None:
        self.sync(5, FIRST)
        for spoilt in (b"", b"{", b"[]", b'{"generation": "6", "digest": "x", "url": ""}', b"[" * 100_000):
            (self.root / "assignment.json").write_bytes(spoilt)
            self.restart()
            self.assert_holds(5, FIRST)
            self.rack.synchroniser.look_again()
            self.assertTrue(any("assignment.json" in message for message in self.messages()))
            self.logged.clear()


class TestTriggers(SyncTestCase):
    def held_request(self, generation: int, manifest: Manifest) -> Deferred[Result]:
        if self.rack.region.held is None:
            self.rack.region.hold()
        return self.request(self.rack.region.publish(generation, manifest))

    def test_all_who_ask_for_the_same_generation_share_one_sync_and_its_result(self) -> None:
        callers = [self.held_request(5, FIRST) for _ in range(5)]
        other = Assignment(5, FIRST.digest, "http://192.0.2.9:5240/MAAS/images-stream/")
        callers.append(self.request(other))
        self.rack.region.release()
        results = [self.successResultOf(caller) for caller in callers]
        self.assertEqual({result.outcome for result in results}, {"synced"})
        self.assertEqual(len(set(results)), 1)
        self.assertEqual(len(self.rack.region.requests), 1 + len(FIRST.blobs))

    def test_a_newer_generation_takes_the_place_of_the_one_under_way_whose_caller_is_told(self) -> None:
        older = self.held_request(5, FIRST)
        newer = self.held_request(6, SECOND)
        result = self.successResultOf(older)
        self.assertEqual((result.outcome, result.generation), ("superseded", -1))
        self.assertIn("generation 6", result.reason)
        self.assertNoResult(newer)
        self.rack.region.release()
        self.assertEqual(self.successResultOf(newer).outcome, "synced")
        self.assert_holds(6, SECOND)

    def test_an_older_generation_than_the_one_under_way_is_refused_at_once(self) -> None:
        newer = self.held_request(6, SECOND)
        older = self.successResultOf(self.held_request(5, FIRST))
        self.assertEqual(older.outcome, "superseded")
        self.assertIn("generation 6", older.reason)
        self.rack.region.release()
        self.assertEqual(self.successResultOf(newer).outcome, "synced")

    def test_a_region_that_was_set_back_is_followed_although_the_rack_looks_for_what_it_was_told_before(self) -> None:
        self.sync(9, FIRST)
        self.rack.blobs.path(NOBLE.files[0].sha256).write_bytes(b"spoilt")
        self.rack.region.hold()
        self.rack.synchroniser.look_again()  # nobody asked for this
        self.assertEqual(self.rack.synchroniser.status.state, "syncing")
        caller = self.request(self.rack.region.publish(8, SECOND))
        self.rack.region.release()
        self.assertEqual(self.successResultOf(caller).outcome, "synced")
        self.assert_holds(8, SECOND)

    def test_of_many_the_newest_is_synced_and_every_other_caller_told(self) -> None:
        # Regression: an older rack dropped triggers that came during an import, or ran with the first's arguments.
        # The threads are kept back, so that nothing stops before it all has come together.
        threads = self.keep_threads_back()
        manifests = {1: FIRST, 4: SECOND, 2: THIRD, 7: SECOND, 6: FIRST, 9: THIRD, 8: FIRST}
        callers = {
            number: self.request(self.rack.region.publish(number, manifest)) for number, manifest in manifests.items()
        }
        twin = self.request(self.rack.region.publish(9, THIRD))
        threads.work()
        outcomes = {number: self.successResultOf(caller).outcome for number, caller in callers.items()}
        self.assertEqual(outcomes, {number: "synced" if number == 9 else "superseded" for number in manifests})
        self.assertEqual(self.successResultOf(twin).outcome, "synced")
        self.assert_holds(9, THIRD)

    def test_the_same_number_with_another_content_is_the_newer_wish(self) -> None:
        first = self.held_request(5, FIRST)
        second = self.held_request(5, SECOND)
        self.rack.region.release()
        self.assertEqual(self.successResultOf(first).outcome, "superseded")
        self.assertEqual(self.successResultOf(second).outcome, "synced")
        self.assert_holds(5, SECOND)

    def test_after_a_failure_a_request_is_tried_at_once(self) -> None:
        assignment = self.rack.region.publish(5, FIRST)
        manifest = self.rack.region.documents.pop(assignment.manifest_url)
        self.assertEqual(self.successResultOf(self.request(assignment)).outcome, "failed")
        self.rack.region.documents[assignment.manifest_url] = manifest
        self.assertEqual(self.successResultOf(self.request(assignment)).outcome, "synced")
        self.assertEqual(len(self.clock.getDelayedCalls()), 1)

    def test_those_who_ask_for_more_as_soon_as_they_are_told_how_it_ended_are_all_answered(self) -> None:
        later: list[Deferred[Result]] = []

        def ask(result: Result, assignment: Assignment) -> None:
            self.rack.region.hold()
            later.append(self.request(assignment))

        for number, manifest in [(6, SECOND), (6, SECOND), (7, THIRD), (6, SECOND)]:
            self.held_request(5, FIRST).addCallback(ask, self.rack.region.publish(number, manifest))
        self.rack.region.release()
        self.rack.region.release()
        results = [self.successResultOf(caller) for caller in later]
        self.assertEqual([(result.outcome, result.generation) for result in results],
                         [("superseded", 5), ("superseded", 5), ("synced", 7), ("superseded", 5)])  # fmt: skip
        self.assert_holds(7, THIRD)

    def test_one_who_is_told_how_it_ended_may_stop_what_was_to_follow(self) -> None:
        stopped: list[bool] = []
        older = self.held_request(5, FIRST)
        older.addCallback(lambda result: stopped.append(self.rack.synchroniser.cancel()))
        newer = self.held_request(6, SECOND)
        self.rack.region.release()
        self.assertEqual(stopped, [True])
        self.assertEqual(self.successResultOf(newer).outcome, "cancelled")

    def test_looking_while_a_sync_is_under_way_changes_nothing(self) -> None:
        caller = self.held_request(5, FIRST)
        self.rack.synchroniser.look_again()
        self.rack.region.release()
        self.assertEqual(self.successResultOf(caller).outcome, "synced")


class TestCancelling(SyncTestCase):
    def test_a_cancelled_sync_stops_and_keeps_what_was_held(self) -> None:
        self.sync(5, FIRST)
        self.rack.region.hold()
        caller = self.request(self.rack.region.publish(6, SECOND))
        self.assertTrue(self.rack.synchroniser.cancel())
        result = self.successResultOf(caller)
        self.assertEqual((result.outcome, result.generation), ("cancelled", 5))
        self.assertEqual(self.rack.synchroniser.status.state, "ready")
        self.assert_holds(5, FIRST)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_a_cancel_that_is_taken_for_a_failure_is_a_cancel_all_the_same(self) -> None:
        # Looking up a host's name does that: when it is cancelled, there is no such name.
        assignment = self.rack.region.publish(5, FIRST)

        async def read_document(region: Region, url: str, *, limit: int) -> bytes:
            try:
                await Deferred()
            except CancelledError:
                raise FetchError(URL, "no such host") from None
            raise AssertionError("nobody lets it go on")

        self.patch(Region, "read_document", read_document)
        caller = self.request(assignment)
        self.rack.synchroniser.cancel()
        self.assertEqual(self.successResultOf(caller).outcome, "cancelled")

    def test_an_error_in_the_moment_of_a_cancel_is_logged_and_the_sync_is_cancelled_all_the_same(self) -> None:
        assignment = self.rack.region.publish(5, FIRST)

        async def read_document(region: Region, url: str, *, limit: int) -> bytes:
            try:
                await Deferred()
            except CancelledError:
                raise OSError(errno.EIO, "the disk failed") from None
            raise AssertionError("nobody lets it go on")

        self.patch(Region, "read_document", read_document)
        logs = Logs(self, "rack.stop")
        caller = self.request(assignment)
        self.rack.synchroniser.cancel()
        self.assertEqual(self.successResultOf(caller).outcome, "cancelled")
        self.assertEqual(self.clock.getDelayedCalls(), [])
        self.assertEqual(len(logs.texts), 1)
        [failure] = self.flushLoggedErrors(OSError)
        self.assertIn("the disk failed", str(failure.value))

    def test_after_a_cancel_the_rack_waits_until_it_is_asked(self) -> None:
        self.rack.region.hold()
        caller = self.request(self.rack.region.publish(5, FIRST))
        self.rack.synchroniser.cancel()
        self.successResultOf(caller)
        self.rack.region.release()
        self.rack.synchroniser.look_again()
        self.assertEqual(self.rack.synchroniser.inventory.generation, -1)
        self.assertEqual(self.sync(5, FIRST).outcome, "synced")

    def test_asking_again_while_the_cancelled_sync_still_stops_syncs_anew(self) -> None:
        threads = self.keep_threads_back()
        assignment = self.rack.region.publish(5, FIRST)
        first = self.request(assignment)
        self.assertTrue(self.rack.synchroniser.cancel())
        second = self.request(assignment)
        threads.work()
        self.assertEqual(self.successResultOf(first).outcome, "cancelled")
        self.assertEqual(self.successResultOf(second).outcome, "synced")

    def test_a_cancel_also_drops_what_was_to_follow(self) -> None:
        threads = self.keep_threads_back()
        first = self.request(self.rack.region.publish(5, FIRST))
        second = self.request(self.rack.region.publish(6, SECOND))
        self.assertTrue(self.rack.synchroniser.cancel())
        self.assertEqual(self.successResultOf(second).outcome, "cancelled")
        threads.work()
        self.assertEqual(self.successResultOf(first).outcome, "superseded")
        self.assertEqual(self.rack.synchroniser.inventory.generation, -1)

    def test_when_there_is_no_sync_there_is_nothing_to_cancel(self) -> None:
        self.assertFalse(self.rack.synchroniser.cancel())
        self.sync(5, FIRST)
        self.assertFalse(self.rack.synchroniser.cancel())

    def test_a_sync_that_is_installing_its_snapshot_is_not_cancelled_any_more(self) -> None:
        answers = []
        files = Files()
        self.restart(files)
        original = files.link

        def link(source: Path, target: Path) -> None:
            answers.append(self.rack.synchroniser.cancel())
            original(source, target)

        files.link = link  # type: ignore[method-assign]  # to be called in the midst of it
        self.assertEqual(self.sync(5, FIRST).outcome, "synced")
        self.assertEqual(set(answers), {False})

    def test_stopping_tells_all_callers_and_refuses_what_comes_after(self) -> None:
        self.rack.region.hold()
        caller = self.request(self.rack.region.publish(5, FIRST))
        self.successResultOf(self.rack.synchroniser.stop())
        result = self.successResultOf(caller)
        self.assertEqual((result.outcome, result.reason), ("cancelled", "the rack is stopping"))
        late = self.successResultOf(self.request(self.rack.region.publish(6, SECOND)))
        self.assertEqual((late.outcome, late.reason), ("cancelled", "the rack is stopping"))
        self.rack.synchroniser.look_again()
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_stopping_waits_for_the_sync_to_stop(self) -> None:
        threads = self.keep_threads_back()
        self.request(self.rack.region.publish(5, FIRST))
        stopped = self.rack.synchroniser.stop()
        self.assertNoResult(stopped)
        threads.work()
        self.successResultOf(stopped)
        self.assertEqual(self.rack.region.requests, [])
        self.assertEqual(self.clock.getDelayedCalls(), [])


def synchronous(work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which does not wait."""
    results: list[T] = []
    Deferred.fromCoroutine(work).addCallback(results.append)
    return results[0]


class SyncingMachine(RuleBasedStateMachine):
    """Any order of requests, cancels, looks, failures and time: nobody waits for ever, what is listed is there."""

    root: Path

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory(dir=SyncingMachine.root)
        self.clock = Clock()
        self.rack = Rack(Path(self.directory.name), self.clock)
        synchronous(self.rack.synchroniser.recover())
        self.callers: list[tuple[int, Deferred[Result]]] = []
        self.results: list[tuple[int, Result]] = []
        self.manifests = (FIRST, SECOND, THIRD, EMPTY)
        self.before = NOTHING
        self.given_up: list[str] = []
        self.is_spoilt = False

    def _ask(self, number: int, *then: int) -> None:
        manifest = self.manifests[number % len(self.manifests)]
        caller = self.rack.synchroniser.request(self.rack.region.publish(number, manifest))
        self.callers.append((number, caller))
        caller.addCallback(self._told, number, then)

    def _told(self, result: Result, number: int, then: Sequence[int]) -> None:
        self.results.append((number, result))
        self._compare()  # before the next sync, which may come before the step has ended
        for another in then:  # from within whatever ends the sync
            self._ask(another)

    @rule(number=integers(1, 8), then=lists(integers(1, 8), max_size=2), held=booleans())
    def ask(self, number: int, then: list[int], held: bool) -> None:
        if held:
            self.hold()
        self._ask(number, *then)

    @rule()
    def hold(self) -> None:
        if self.rack.region.held is None:
            self.rack.region.hold()

    @rule()
    def release(self) -> None:
        self.rack.region.release()

    @rule()
    def cancel(self) -> None:
        self.rack.synchroniser.cancel()

    @rule()
    def look(self) -> None:
        self.rack.synchroniser.look_again()

    @rule(number=integers(0, 7))
    def lose_a_document(self, number: int) -> None:
        self.rack.region.documents.pop(
            Assignment(1, self.manifests[number % len(self.manifests)].digest, URL).manifest_url, None
        )

    @rule(damaged=sampled_from((NOBLE, NEWER_NOBLE, FOCAL, LOADER)))
    def damage_at_the_region(self, damaged: Image) -> None:
        self.rack.region.withheld[damaged.files[0].sha256] = "the server cannot give it now: it was found damaged"

    @rule()
    def repair_at_the_region(self) -> None:
        self.rack.region.withheld.clear()

    @rule(seconds=integers(1, 2000))
    def wait(self, seconds: int) -> None:
        self.clock.advance(seconds)

    @precondition(lambda self: self.rack.synchroniser.inventory.generation != -1)
    @rule()
    def spoil(self) -> None:
        for sha256 in sorted(self.rack.synchroniser.inventory.manifest.blobs)[:1]:
            path = self.rack.blobs.path(sha256)
            path.unlink(missing_ok=True)
            self.is_spoilt = True

    @invariant()
    def what_is_held_was_published_whole(self) -> None:
        inventory = self.rack.synchroniser.inventory
        if inventory.generation == -1:
            assert inventory.manifest == EMPTY
            return
        assert inventory.listed == self.manifests[inventory.generation % len(self.manifests)]
        state = self.rack.synchroniser.status.state
        assert state in ("ready", "partial", "syncing", "failed")
        assert inventory.is_whole == (inventory.digest == inventory.listed.digest)
        assert state != "ready" or inventory.is_whole
        if not self.is_spoilt:
            for each in inventory.manifest.images:
                for file in each.files:
                    assert (self.rack.root / "current" / directory_of(each) / file.name).exists()

    def _compare(self) -> None:
        held = self.rack.synchroniser.inventory
        before, self.before = self.before, held
        lost = before.manifest.by_key.keys() - held.manifest.by_key.keys()
        if not self.is_spoilt and lost & held.listed.by_key.keys():
            self.given_up.append(f"{lost} is listed by {held.generation} and was given up")

    @invariant()
    def what_was_held_is_held_until_a_generation_without_it_is(self) -> None:
        self._compare()
        assert not self.given_up, self.given_up

    @invariant()
    def those_who_were_told_that_it_is_synced_were_told_the_truth(self) -> None:
        for number, result in self.results:
            if result.outcome in ("synced", "unchanged"):
                assert result.generation == number
                assert result.digest == self.manifests[number % len(self.manifests)].digest
            elif result.outcome == "partial":
                assert result.reason
                assert result.generation == number
                assert result.digest != self.manifests[number % len(self.manifests)].digest
            else:
                assert result.reason

    def teardown(self) -> None:
        self.rack.region.release()
        self.rack.region.withheld.clear()
        assert len(self.results) == len(self.callers)
        self._ask(100)
        number, result = self.results[-1]
        assert (number, result.outcome) == (100, "synced"), result
        synchronous_stop: list[None] = []
        self.rack.synchroniser.stop().addCallback(synchronous_stop.append)
        assert synchronous_stop == [None]
        assert self.clock.getDelayedCalls() == []
        self.rack.release()
        self.directory.cleanup()


class TestAnyOrder(SynchronousTestCase):
    def test_in_any_order_of_events_nobody_waits_for_ever_and_what_is_listed_is_there(self) -> None:
        self.patch(os, "fsync", lambda descriptor: None)
        SyncingMachine.root = Path(self.mktemp()).absolute()
        SyncingMachine.root.mkdir(parents=True)
        run_state_machine_as_test(SyncingMachine, settings=settings(examples(25), stateful_step_count=20))


class TestAssignments(SynchronousTestCase):
    def test_what_makes_no_sense_is_refused_with_the_value(self) -> None:
        for changes, said in (
            ({"generation": -1}, "-1"),
            ({"generation": 1 << 70}, "whole number"),
            ({"digest": "../../etc/passwd"}, "../../etc/passwd"),
            ({"digest": FIRST.digest.upper()}, "hexadecimal"),
            ({"url": "file:///etc"}, "file:///etc"),
            ({"url": ""}, "url"),
        ):
            with self.assertRaises(ValueError) as caught:
                evolve(Assignment(5, FIRST.digest, URL), **changes)
            self.assertIn(said, str(caught.exception))

    def test_a_slash_at_the_end_of_the_url_makes_no_difference(self) -> None:
        self.assertEqual(Assignment(5, FIRST.digest, URL + "/"), Assignment(5, FIRST.digest, URL))

    def test_it_survives_on_disk(self) -> None:
        path = Path(self.mktemp()).absolute()
        path.mkdir(parents=True)
        file = AssignmentFile(path / "assignment.json")
        self.assertIsNone(file.read())
        for generation in (5, 6):
            file.write(Assignment(generation, FIRST.digest, URL))
            self.assertEqual(file.read(), Assignment(generation, FIRST.digest, URL))
