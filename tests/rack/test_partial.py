"""A rack takes of a generation what can be had: what the region cannot give now is left out, told, and follows."""

from __future__ import annotations

import os
from pathlib import Path

from twisted.internet.defer import Deferred

from rack.files import Files
from rack.life import Result
from rack.snapshots import SnapshotStore
from rack.wire import RackWire
from rpc.events import SYNC_INCOMPLETE, Kind
from rpc.manifest import Image, Manifest
from tests.rack.material import URL, expected_tree, image, tree
from tests.rack.test_sync import FIRST, FOCAL, INTERVAL, LOADER, NEWER_NOBLE, NOBLE, SECOND, SyncTestCase

WHY = "the server cannot give it now: it was found damaged at 2026-01-01 00:00:00 UTC and is being fetched again"


class PartialTestCase(SyncTestCase):
    def withhold(self, *images: Image) -> None:
        """Have the region's stream say that it cannot give one file of each of these images."""
        for each in images:
            self.rack.region.withheld[each.files[0].sha256] = WHY

    def give(self, *images: Image) -> None:
        """Have it give them again."""
        for each in images:
            del self.rack.region.withheld[each.files[0].sha256]

    def assert_lacks(self, result: Result, generation: int, manifest: Manifest, *absent: Image) -> None:
        """The rack holds all of ``manifest`` but these images, and says just that."""
        held = manifest.only(manifest.by_key.keys() - {each.key for each in absent})
        self.assertEqual((result.outcome, result.generation, result.digest), ("partial", generation, held.digest))
        inventory = self.rack.synchroniser.inventory
        self.assertEqual((inventory.generation, inventory.manifest, inventory.listed), (generation, held, manifest))
        self.assertFalse(inventory.is_whole or inventory.holds(generation, manifest.digest))
        self.assertNotEqual(inventory.digest, manifest.digest)
        on_disk = tree(self.root / "current")
        self.assertEqual(on_disk.pop("manifest.json"), manifest.canonical)
        whole = expected_tree(held)
        del whole["manifest.json"]
        self.assertEqual(on_disk, whole)
        status = self.rack.synchroniser.status
        self.assertEqual(status.state, "partial")
        for each in absent:
            self.assertIn(str(each.key), status.progress["reason"])
            self.assertIn(str(each.key), result.reason)
            self.assertIn(
                (each.os, each.release, each.arch),
                [(one["os"], one["release"], one["arch"]) for one in status.progress["lacking"]],
            )


class TestTaking(PartialTestCase):
    def test_a_fresh_rack_takes_all_but_the_image_whose_file_the_region_cannot_give(self) -> None:
        told: list[tuple[Kind, str]] = []
        self.rack.synchroniser.on_happening(lambda kind, text: told.append((kind, text)))
        self.withhold(NEWER_NOBLE)
        result = self.sync(6, SECOND)
        self.assert_lacks(result, 6, SECOND, NEWER_NOBLE)
        self.assertIn("1 of 3 images cannot be had now: ubuntu/noble", result.reason)
        self.assertIn(WHY, result.reason)
        self.assertEqual(result.files_fetched, len(SECOND.blobs) - 1)
        self.assertEqual(self.rack.changes[-1], ("partial", 6))
        [text] = [text for kind, text in told if kind is SYNC_INCOMPLETE]
        self.assertIn("partial", text)
        self.assertIn(WHY, text)
        self.assertFalse([kind for kind, _ in told if kind.type == "Damage found"])
        self.assertTrue(any("Not held of generation 6: ubuntu/noble" in message for message in self.messages()))
        self.assertIsNone(self.rack.synchroniser.last_success)

    def test_it_is_asked_for_again_ever_more_seldom_and_the_snapshot_is_whole_when_it_comes(self) -> None:
        self.withhold(NEWER_NOBLE)
        self.assert_lacks(self.sync(6, SECOND), 6, SECOND, NEWER_NOBLE)
        self.rack.region.requests.clear()
        waits = []
        for _ in range(8):
            waits.append(self.rack.synchroniser.status.progress["next_try_seconds"])
            self.clock.advance(waits[-1])
        self.assertEqual(waits, [15.0, 30.0, 60.0, 120.0, 240.0, 480.0, INTERVAL, INTERVAL])
        url = f"{URL}/blobs/{NEWER_NOBLE.files[0].sha256}"
        self.assertEqual(self.rack.region.requests, [url] * 8)
        self.assertEqual(len(os.listdir(self.root / "snapshots")), 1)
        self.give(NEWER_NOBLE)
        self.clock.advance(INTERVAL)
        self.assert_holds(6, SECOND)
        self.assertTrue(self.rack.synchroniser.inventory.holds(6, SECOND.digest))
        self.assertEqual(self.rack.synchroniser.status.state, "ready")
        self.assertEqual(len(os.listdir(self.root / "snapshots")), 1)

    def test_it_is_whole_at_once_when_the_region_asks_again(self) -> None:
        self.withhold(NEWER_NOBLE)
        self.sync(6, SECOND)
        self.give(NEWER_NOBLE)
        self.assertEqual(self.sync(6, SECOND).outcome, "synced")
        self.assert_holds(6, SECOND)

    def test_what_comes_is_taken_although_more_is_withheld_still(self) -> None:
        self.withhold(NEWER_NOBLE, LOADER)
        self.assert_lacks(self.sync(6, SECOND), 6, SECOND, NEWER_NOBLE, LOADER)
        for _ in range(3):
            self.clock.advance(INTERVAL)
        self.give(LOADER)
        self.clock.advance(INTERVAL)
        self.assertEqual(self.rack.synchroniser.inventory.manifest, SECOND.only([FOCAL.key, LOADER.key]))
        self.assertEqual(self.rack.synchroniser.status.progress["next_try_seconds"], 15.0)

    def test_a_retry_that_brings_nothing_changes_nothing_on_the_disk(self) -> None:
        self.withhold(NEWER_NOBLE)
        self.sync(6, SECOND)
        before = os.readlink(self.root / "current")
        inventory = self.rack.synchroniser.inventory
        self.clock.advance(15)
        self.assertEqual(os.readlink(self.root / "current"), before)
        self.assertIs(self.rack.synchroniser.inventory, inventory)

    def test_it_goes_on_to_a_newer_generation_without_it_and_lists_it_when_that_has_it(self) -> None:
        self.withhold(NEWER_NOBLE)
        self.sync(6, SECOND)
        seventh = Manifest((NEWER_NOBLE, image(release="focal", version="20210101")))
        self.assert_lacks(self.sync(7, seventh), 7, seventh, NEWER_NOBLE)
        self.give(NEWER_NOBLE)
        self.clock.advance(15)
        self.assert_holds(7, seventh)

    def test_after_a_restart_it_holds_the_same_and_goes_on_asking(self) -> None:
        told: list[Kind] = []
        self.withhold(NEWER_NOBLE)
        self.sync(6, SECOND)
        held = self.rack.synchroniser.inventory
        withheld = self.rack.region.withheld
        self.restart()
        self.rack.synchroniser.on_happening(lambda kind, text: told.append(kind))
        self.assertEqual(self.rack.synchroniser.inventory, held)
        self.assertEqual(self.rack.synchroniser.status.state, "partial")
        self.assertFalse(any("Damaged" in message for message in self.messages()))
        self.rack.region.withheld = withheld
        self.rack.synchroniser.look_again()
        self.assertEqual(self.rack.synchroniser.status.state, "partial")
        self.assertNotIn("Damage found", [kind.type for kind in told])
        self.give(NEWER_NOBLE)
        self.clock.advance(15)
        self.assert_holds(6, SECOND)

    def test_the_region_is_told_what_is_there_and_what_is_not(self) -> None:
        self.withhold(NEWER_NOBLE)
        self.sync(6, SECOND)
        report = RackWire(self.rack.synchroniser).report()
        self.assertEqual((report["state"], report["generation"]), ("partial", 6))
        self.assertEqual(report["digest"], SECOND.only([FOCAL.key, LOADER.key]).digest)
        self.assertEqual(report["progress"]["generation"], 6)


class TestKeeping(PartialTestCase):
    """Nothing that a rack holds, and could keep, is lost for that."""

    def test_a_rack_that_holds_an_older_version_stays_where_it_is_and_says_why(self) -> None:
        self.sync(5, FIRST)
        self.withhold(NEWER_NOBLE)
        result = self.sync(6, SECOND)
        self.assertEqual((result.outcome, result.generation, result.digest), ("failed", 5, FIRST.digest))
        self.assertIn("stays at generation 5", result.reason)
        self.assertIn(str(NOBLE.key), result.reason)
        self.assertIn(WHY, result.reason)
        self.assert_holds(5, FIRST)
        self.assertEqual(self.rack.synchroniser.status.state, "failed")
        self.give(NEWER_NOBLE)
        self.clock.advance(15)
        self.assert_holds(6, SECOND)

    def test_a_rack_that_holds_no_version_of_it_goes_on_without_it(self) -> None:
        self.sync(5, FIRST)
        self.withhold(LOADER)
        self.assert_lacks(self.sync(6, SECOND), 6, SECOND, LOADER)

    def test_an_image_that_is_damaged_here_too_is_no_reason_to_stay(self) -> None:
        self.sync(5, FIRST)
        path = self.rack.blobs.path(NOBLE.files[0].sha256)
        path.write_bytes(b"spoilt")
        self.withhold(NOBLE)
        self.clock.advance(INTERVAL)
        self.assertEqual(self.rack.synchroniser.inventory.manifest, Manifest((FOCAL,)))
        self.assertEqual(self.rack.synchroniser.status.state, "partial")
        sixth = Manifest((NOBLE, FOCAL, LOADER))
        self.assert_lacks(self.sync(6, sixth), 6, sixth, NOBLE)

    def test_a_file_that_cannot_be_had_for_any_other_reason_makes_the_sync_fail_as_ever(self) -> None:
        self.withhold(NEWER_NOBLE)
        assignment = self.rack.region.publish(6, SECOND)
        self.rack.region.contents[LOADER.files[0].sha256] = "the server answered 500 Internal Server Error"
        result = self.successResultOf(self.request(assignment))
        self.assertEqual((result.outcome, result.generation), ("failed", -1))
        self.assertIn("500", result.reason)

    def test_a_newer_request_takes_the_place_of_one_that_could_not_have_all(self) -> None:
        self.withhold(NEWER_NOBLE)
        threads = self.keep_threads_back()
        first = self.request(self.rack.region.publish(5, SECOND))
        install = SnapshotStore.install

        def installing(store: SnapshotStore, *arguments: object) -> object:
            self.patch(SnapshotStore, "install", install)
            self.second = self.request(self.rack.region.publish(6, Manifest((FOCAL, LOADER))))
            return install(store, *arguments)  # type: ignore[arg-type]  # as it was called

        self.patch(SnapshotStore, "install", installing)
        threads.work()
        self.assertEqual(self.successResultOf(first).outcome, "partial")
        self.assertEqual(self.successResultOf(self.second).outcome, "synced")
        self.assertEqual(self.rack.synchroniser.status.state, "ready")

    def test_a_rack_that_stops_while_it_installs_what_can_be_had_stops(self) -> None:
        self.withhold(NEWER_NOBLE)
        files = Files()
        self.restart(files)
        self.withhold(NEWER_NOBLE)
        original = files.link
        stopped: list[Deferred[None]] = []

        def link(source: Path, target: Path) -> None:
            if not stopped:
                stopped.append(self.rack.synchroniser.stop())
            original(source, target)

        files.link = link  # type: ignore[method-assign]  # to be called in the midst of it
        self.assertEqual(self.sync(5, SECOND).outcome, "partial")
        self.successResultOf(stopped[0])
        self.assertEqual(self.clock.getDelayedCalls(), [])
