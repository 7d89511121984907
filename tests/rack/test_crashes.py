"""A rack that is killed, loses power or meets an error of its disk at any step of a sync, or of the start after one."""

from __future__ import annotations

import errno
import hashlib
import os
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from attrs import evolve
from twisted.internet.defer import Deferred, execute
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from rack.assignment import Assignment, AssignmentFile
from rack.inspection import SnapshotError, is_name
from rack.life import Result
from rack.snapshots import SnapshotStore
from rack.steps import Syncs
from rack.sync import Synchroniser
from rpc.blobs import BlobStore
from rpc.fetch import Fetched, Fetcher, FetchError, FetchFailed, Progress, Wanted
from rpc.manifest import Manifest
from tests.crashes import TALLY
from tests.examples import SOAK
from tests.faults import LOSSES, Crash, Disk, Loss, any_loss, disarmed, places
from tests.rack.material import URL, contents_of, expected_tree, image, tree

INTERVAL = 900.0
STEPS = 20
"""How many of the steps are the place of a fault, for each kind of fault; all of them when soaking."""


class Stream:
    """A region's stream whose contents are files of this host, fetched as the real fetcher does that."""

    def __init__(self, root: Path, blobs: BlobStore, clock: Clock, documents: Mapping[str, bytes]) -> None:
        self.root = root
        self.documents = documents
        self.withheld: frozenset[str] = frozenset()
        self.fetcher = Fetcher(clock, blobs, run_in_thread=inline, concurrency=2, jitter=lambda: 0.0)

    async def read_document(self, url: str, *, limit: int) -> bytes:
        """As :class:`rpc.fetch.Fetcher`."""
        if url not in self.documents:
            raise FetchError(url, "the server answered 404 Not Found")
        return self.documents[url]

    async def fetch(
        self, wanted: Sequence[Wanted], progress: Callable[[Progress], object] | None = None
    ) -> Mapping[str, Fetched | FetchFailed]:
        """As :class:`rpc.fetch.Fetcher`."""
        here = [
            Wanted(f"file://{self.root}/{urlsplit(one.url).path.rpartition('/')[2]}", one.sha256, one.size, one.label)
            for one in wanted
            if one.sha256 not in self.withheld
        ]
        withheld = {
            one.sha256: FetchFailed(one.sha256, one.url, "it was found damaged", withheld=True)
            for one in wanted
            if one.sha256 in self.withheld
        }
        return {**await self.fetcher.fetch(here, progress), **withheld}


def inline(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Deferred[Any]:
    """A thread that is none. A process that is killed in it does not go on."""
    return execute(function, *args, **kwargs)


class Process:
    """A rack's parts around its images, as one process has them."""

    def __init__(self, root: Path, upstream: Path, documents: Mapping[str, bytes]) -> None:
        self.clock = Clock()
        self.blobs = BlobStore(root / "cache")
        self.store = SnapshotStore(root, self.blobs)
        self.store.open()
        self.stream = Stream(upstream, self.blobs, self.clock, documents)
        syncs = Syncs(self.store, AssignmentFile(root / "assignment.json"), self.stream, inline)
        self.synchroniser = Synchroniser(syncs, self.clock, interval=INTERVAL, jitter=lambda: 0.0)

    def recover(self) -> None:
        """Find out what is held, as at the start of the process."""
        ends: list[Any] = []
        Deferred.fromCoroutine(self.synchroniser.recover()).addBoth(ends.append)
        if ends and hasattr(ends[0], "raiseException"):
            ends[0].raiseException()

    def request(self, assignment: Assignment) -> list[Result]:
        """Ask for a generation; the result is in the list when there is one."""
        ends: list[Result] = []
        self.synchroniser.request(assignment).addCallback(ends.append)
        return ends


class CrashTestCase(SynchronousTestCase):
    """A rack that holds a generation, and a newer one that it is to hold, again and again."""

    def setUp(self) -> None:
        base = Path(self.mktemp()).absolute()
        self.root, self.upstream = base / "images", base / "upstream"
        self.root.mkdir(parents=True)
        self.upstream.mkdir()
        self.rng = random.Random(f"{self.id()}{random.random() if SOAK > 1 else ''}")
        self.documents: dict[str, bytes] = {}
        self.manifests: dict[int, Manifest] = {}
        self.number = 0
        self.pid = os.getpid()
        self.disk = Disk(self.root)
        self.disk.install(self.patch)
        self.patch(os, "getpid", lambda: self.pid)
        self.addCleanup(self.disk.close)
        self.process = self.new()
        self.process.recover()
        self.request_newest(self.publish())

    def new(self) -> Process:
        """Another process, with a number of its own."""
        self.pid += 1
        return Process(self.root, self.upstream, self.documents)

    def publish(self) -> Assignment:
        """A generation that shares an image with the one before, has one anew and one in a newer version."""
        self.number += 1
        number = self.number
        images = (image(version=f"2026{number:04}"), image(release="focal", version=f"{number // 2:08}"),
                  image(os_="grub-efi", release="", version=f"{number // 3:08}"))  # fmt: skip
        manifest = Manifest(images if number % 2 else images[:2])
        assignment = Assignment(number, manifest.digest, URL)
        self.documents[assignment.manifest_url] = manifest.canonical
        for sha256, data in contents_of(*manifest.images).items():
            (self.upstream / sha256).write_bytes(data)
        self.manifests[number] = manifest
        return assignment

    def request_newest(self, assignment: Assignment) -> None:
        """Let the rack be until it holds ``assignment``."""
        results = self.process.request(assignment)
        for _ in range(6):
            if self.process.synchroniser.inventory.holds(assignment.generation, assignment.digest) and results:
                break
            self.process.clock.advance(INTERVAL * 2)
        self.assert_settled(assignment.generation)

    # What must be so

    def where(self) -> str:
        """For messages: where the fault was, and what was done before."""
        return f"fault at {self.disk.met} after {self.disk.said[-6:]}"

    def assert_whole_on_disk(self, *allowed: int) -> None:
        """Whoever looks at the disk finds one of these generations, whole, and no other under a snapshot's name."""
        link = self.root / "current"
        self.assertTrue(link.is_symlink(), self.where())
        self.assertIn(int(os.readlink(link).rpartition("/")[2].partition("-")[0]), allowed, self.where())
        for path in (link.resolve(), *(self.root / "snapshots").iterdir()):
            if is_name(path.name):
                number = int(path.name.partition("-")[0])
                self.assertIn(number, allowed, self.where())
                self.assertEqual(tree(path), expected_tree(self.manifests[number]), self.where())
        for path in (self.root / "cache" / "blobs").iterdir():
            self.assertEqual(hashlib.sha256(path.read_bytes()).hexdigest(), path.name, self.where())

    def assert_holds(self, *allowed: int) -> None:
        """The rack says that it holds one of these generations, all of it, and that is so."""
        inventory = self.process.synchroniser.inventory
        self.assertIn(inventory.generation, allowed, self.where())
        self.assertEqual(inventory.damaged, (), self.where())
        self.assertEqual(inventory.manifest, self.manifests[inventory.generation], self.where())
        self.assertEqual(tree(self.root / "current"), expected_tree(inventory.manifest), self.where())

    def assert_settled(self, number: int) -> None:
        """It holds this generation, and there is nothing on the disk that is not needed for it."""
        self.assert_holds(number)
        self.assertEqual(self.process.synchroniser.status.state, "ready", self.where())
        name = os.readlink(self.root / "current").rpartition("/")[2]
        self.assertEqual(os.listdir(self.root / "snapshots"), [name], self.where())
        cache = self.root / "cache"
        self.assertEqual(set(os.listdir(cache / "blobs")), set(self.manifests[number].blobs), self.where())
        self.assertEqual(os.listdir(cache / "partial"), [], self.where())
        self.assertEqual(os.listdir(cache / "quarantine"), [], self.where())
        left = set(os.listdir(self.root)) - {"assignment.json", "cache", "current", "lock", "snapshots"}
        left |= set(os.listdir(cache)) - {"blobs", "partial", "quarantine", "verified.log"}
        self.assertEqual(left, set(), self.where())

    # The history of one fault

    def sync_with_fault(self, at: int | None, error: int | None = None, *, lasting: bool = False) -> Assignment:
        """Publish, and sync to it with a fault at step ``at``."""
        assignment = self.publish()
        self.disk.arm(at, error, lasting)
        self.results = self.process.request(assignment)
        return assignment

    def steps(self, error: int | None = None) -> list[int]:
        """The places of the faults of one kind: of the longest of the syncs, which differ a little."""
        said: list[str] = []
        for _ in range(2):
            assignment = self.sync_with_fault(None)
            said = max(said, list(self.disk.said), key=len)
            self.disk.disarm()
            self.assert_settled(assignment.generation)
        self.assertGreater(len(said), 100)
        return places(said, error, 0 if SOAK > 1 else STEPS, self.rng)

    def crash(self, at: int, loss: Loss | None, again: int = 0) -> None:
        """Kill a sync, and with ``again`` also the start after it, at a step; then leave the rack alone."""
        assignment = self.sync_with_fault(at)
        TALLY.injected(self.disk, "rack: power" if loss else "rack: kill")
        if self.disk.stopped:
            self.die(loss)
            self.assert_whole_on_disk(assignment.generation - 1, assignment.generation)
            if again:
                self.disk.arm(again)
                try:
                    self.process = self.new()
                    self.process.recover()
                    self.process.synchroniser.look_again()
                except Crash:
                    self.assertTrue(self.disk.stopped)
                TALLY.injected(self.disk, "rack: power" if loss else "rack: kill")
                self.die(loss)
                self.assert_whole_on_disk(assignment.generation - 1, assignment.generation)
            self.process = self.new()
            self.process.recover()
            self.assert_holds(assignment.generation - 1, assignment.generation)
            self.process.synchroniser.look_again()
            self.assert_holds(assignment.generation - 1, assignment.generation)
        self.disk.disarm()
        self.request_newest(assignment)

    def die(self, loss: Loss | None) -> None:
        """The process is gone, and with a ``loss`` the machine was without power."""
        self.disk.restart()
        if loss is not None:
            self.disk.lose_power(loss)
        for path in self.root.rglob("*.new"):
            os.utime(path, (0, 0))  # time goes by until somebody starts it again
        self.flushLoggedErrors(Crash)


class TestKilled(CrashTestCase):
    def test_killed_at_any_step_the_rack_holds_the_old_or_the_new_images_whole_and_goes_on(self) -> None:
        for at in self.steps():
            self.crash(at, None)

    def test_killed_at_any_step_and_again_in_the_start_after_it(self) -> None:
        for at in self.steps()[:: 1 if SOAK > 1 else 3]:
            self.crash(at, self.rng.choice((None, any_loss(self.rng))), self.rng.randrange(1, 60))

    def test_without_power_at_any_step_nothing_that_was_promised_is_lost(self) -> None:
        for at in self.steps():
            for loss in (*LOSSES, any_loss(self.rng)) if SOAK > 1 else (any_loss(self.rng),):
                self.crash(at, loss)


class TestKilledWithPart(CrashTestCase):
    """With an image that the region cannot give: what is there is the old images, those that can be had, or all."""

    def withhold(self, manifest: Manifest, *releases: str) -> Manifest:
        """Withhold the images of these releases; what is left of ``manifest``."""
        lost = [each for each in manifest.images if each.release in releases]
        self.process.stream.withheld = frozenset(file.sha256 for each in lost for file in each.files[:1])
        return manifest.only(manifest.by_key.keys() - {each.key for each in lost})

    def assert_holds_one_of(self, *held: Manifest) -> None:
        """The rack says that it holds one of these, and that is what is on the disk."""
        inventory = self.process.synchroniser.inventory
        self.assertIn(inventory.manifest, held, self.where())
        on_disk = tree(self.root / "current")
        self.assertEqual(on_disk.pop("manifest.json"), inventory.listed.canonical, self.where())
        whole = expected_tree(inventory.manifest)
        del whole["manifest.json"]
        self.assertEqual(on_disk, whole, self.where())
        self.assertEqual(inventory.is_whole, inventory.manifest == inventory.listed, self.where())

    def go(self, at: int | None) -> tuple[int, int]:
        """Sync to a generation of which an image is withheld, and then to all of it, each time with a fault; how many
        steps that was."""
        before = self.process.synchroniser.inventory.manifest
        assignment = self.publish()
        fresh = image(release="jammy", version=f"{self.number:08}")
        manifest = Manifest((*self.manifests[self.number].images, fresh))
        assignment = evolve(assignment, digest=manifest.digest)
        self.documents[assignment.manifest_url] = manifest.canonical
        self.manifests[self.number] = manifest
        for sha256, data in contents_of(fresh).items():
            (self.upstream / sha256).write_bytes(data)
        part = self.withhold(manifest, "jammy")
        steps = []
        for held, allowed in ((part, (before, part)), (manifest, (part, manifest))):
            if held is manifest:
                self.process.stream.withheld = frozenset()
            withheld = self.process.stream.withheld
            self.disk.arm(at)
            self.process.request(assignment)
            steps.append(len(self.disk.said))
            TALLY.injected(self.disk, "rack: kill with part")
            if self.disk.stopped:
                self.die(None)
                self.process = self.new()
                self.process.stream.withheld = withheld
                self.process.recover()
                self.assert_holds_one_of(*allowed)
                self.process.synchroniser.look_again()
            self.disk.disarm()
            for _ in range(3):
                if self.process.synchroniser.inventory.manifest != held:
                    self.process.request(assignment)
            self.assert_holds_one_of(held)
            self.assertEqual(self.process.synchroniser.status.state, "ready" if held is manifest else "partial")
        self.request_newest(self.publish())  # which has no such image, so that the next is fresh again
        return steps[0], steps[1]

    def test_killed_at_any_step_of_taking_part_or_the_rest_it_holds_what_it_says(self) -> None:
        most = max(self.go(None))
        places = range(1, most + 1) if SOAK > 1 else sorted(self.rng.sample(range(1, most + 1), STEPS // 2))
        for at in places:
            self.go(at)


class TestFailingDisk(CrashTestCase):
    """The old state stays, the reason is said, the space is given back, and when the fault is gone the rack syncs."""

    def fail_at(self, at: int, error: int, lasting: bool) -> None:
        assignment = self.sync_with_fault(at, error, lasting=lasting)
        with disarmed(self.disk):
            self.assert_whole_on_disk(assignment.generation - 1, assignment.generation)
            self.assert_holds(assignment.generation - 1, assignment.generation)
        if self.disk.met:
            TALLY.injected(self.disk, f"rack: {errno.errorcode[error]}")
        for result in self.results:
            if result.outcome == "failed":
                self.assertIn(os.strerror(error), result.reason, self.where())
        if self.disk.full and self.process.synchroniser.status.state == "failed":
            held = self.manifests[assignment.generation - 1]
            cache = self.root / "cache"
            self.assertEqual(set(os.listdir(cache / "blobs")), set(held.blobs), self.where())
            self.assertEqual(os.listdir(cache / "partial"), [], self.where())
            self.assertEqual(len(os.listdir(self.root / "snapshots")), 1, self.where())
        if lasting:
            self.process.clock.advance(INTERVAL * 2)  # it tries again in vain
            with disarmed(self.disk):
                self.assert_holds(assignment.generation - 1, assignment.generation)
        self.disk.disarm()
        for _ in range(3):
            self.process.clock.advance(INTERVAL * 2)
        self.assert_settled(assignment.generation)

    def test_any_error_at_any_step_once_is_said_and_made_good(self) -> None:
        for error in (errno.ENOSPC, errno.EIO, errno.EACCES):
            for at in self.steps(error):
                self.fail_at(at, error, lasting=False)

    def test_any_error_from_any_step_on_is_said_and_made_good_when_it_is_gone(self) -> None:
        for error in (errno.ENOSPC, errno.EIO, errno.EACCES):
            for at in self.steps(error):
                self.fail_at(at, error, lasting=True)


class TestUnreadableDisk(CrashTestCase):
    """That something cannot be read says nothing of it: it is neither damaged nor missing, and nothing is given up."""

    def looks(self) -> list[int]:
        """The places of the faults: of the longest of the syncs, or starts."""
        assignment = self.publish()
        self.disk.arm(looks=True)
        self.process.request(assignment)
        said = list(self.disk.said)
        self.disk.disarm()
        self.assert_settled(assignment.generation)
        self.assertGreater(len(said), 100)
        return places(said, None, 0 if SOAK > 1 else STEPS, self.rng)

    def assert_nothing_was_given_up(self, *allowed: int) -> None:
        """Nothing was taken for damaged, and all that was held is there."""
        with disarmed(self.disk):
            self.assert_whole_on_disk(*allowed)
            self.assertEqual(os.listdir(self.root / "cache" / "quarantine"), [], self.where())
            self.assertEqual(dict(self.process.blobs.damaged), {}, self.where())
            held = self.manifests[allowed[0]].blobs.keys()
            blobs = set(os.listdir(self.root / "cache" / "blobs"))
            self.assertTrue(held <= blobs or self.process.store.inventory.generation == allowed[-1], self.where())

    def fail_at(self, at: int, error: int, lasting: bool) -> None:
        assignment = self.publish()
        old, new = assignment.generation - 1, assignment.generation
        self.disk.arm(at, error, lasting, looks=True)
        results = self.process.request(assignment)
        self.assert_nothing_was_given_up(old, new)
        with disarmed(self.disk):
            self.assert_holds(old, new)
        if self.disk.met:
            TALLY.injected(self.disk, f"rack: {errno.errorcode[error]} on reading")
        for result in results:
            if result.outcome == "failed":
                self.assertIn(os.strerror(error), result.reason, self.where())
                self.assertEqual(self.process.synchroniser.status.state, "failed")
        if lasting:
            self.process.clock.advance(INTERVAL * 2)  # in vain
            self.assert_nothing_was_given_up(old, new)
            with disarmed(self.disk):
                self.assert_holds(old, new)
        self.disk.disarm()
        for _ in range(3):
            self.process.clock.advance(INTERVAL * 2)
        self.assert_settled(new)

    def start_at(self, at: int, error: int, lasting: bool) -> None:
        """Start with a fault, without a region that could give anything back."""
        self.die(None)
        documents, self.documents = self.documents, {}
        number = self.number
        self.disk.arm(at, error, lasting, looks=True)
        try:
            self.process = self.new()
            self.process.recover()
            self.process.synchroniser.look_again()
        except (OSError, SnapshotError) as refused:
            self.assertIn(os.strerror(error), str(refused))  # then it is started again
        if self.disk.met:
            TALLY.injected(self.disk, f"rack: {errno.errorcode[error]} on reading")
        self.assert_nothing_was_given_up(number)
        self.disk.disarm()
        if self.process.synchroniser._core.assignment is None:  # it could not be read, or nothing could
            self.die(None)
            self.process = self.new()
            self.process.recover()
            self.process.synchroniser.look_again()
        for _ in range(3):
            self.process.clock.advance(INTERVAL * 2)
        self.documents = documents
        self.assert_settled(number)
        self.die(None)
        self.process = self.new()
        self.process.recover()

    def test_any_error_of_reading_in_a_sync_leaves_what_was_held_and_is_said(self) -> None:
        for error in (errno.EIO, errno.EACCES):
            for lasting in (False, True):
                for at in self.looks():
                    self.fail_at(at, error, lasting)

    def test_any_error_of_reading_in_a_start_takes_nothing_away(self) -> None:
        self.die(None)
        self.disk.arm(looks=True)
        self.process = self.new()
        self.process.recover()
        self.process.synchroniser.look_again()
        said = list(self.disk.said)
        self.disk.disarm()
        for error in (errno.EIO, errno.EACCES):
            for lasting in (False, True):
                some = places(said, None, 0 if SOAK > 1 else STEPS // 2, self.rng)
                decisive = [at for at, what in enumerate(said, start=1) if "manifest.json" in what or "current" in what]
                for at in sorted({*some, *decisive}):
                    self.start_at(at, error, lasting)
