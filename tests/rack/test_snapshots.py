"""A rack's snapshots: whatever happens, one whole snapshot is current, and only verified files are listed."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path

from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from rack.files import Files
from rack.inspection import Inspector, Interrupted, SnapshotError
from rack.inventory import NOTHING, Inventory
from rack.snapshots import Lease, SnapshotStore
from rpc.blobs import BlobStore, Examination
from rpc.manifest import EMPTY, Manifest
from tests.examples import SOAK
from tests.faults import Crash, Disk, Loss
from tests.rack.material import expected_tree, image, put_all, tree

FOCAL = image(release="focal", version="20200101")
NOBLE = image()
NEWER_NOBLE = image(version="20260202")
LOADER = image(os_="grub-efi", release="", version="20250505")
FIRST = Manifest((FOCAL, NOBLE))
SECOND = Manifest((NEWER_NOBLE, FOCAL, LOADER))


class Rack:
    """A store below ``root``, as one process of a rack has it."""

    def __init__(self, root: Path, files: Files | None = None) -> None:
        self.root = root
        self.blobs = BlobStore(root / "cache")
        self.store = SnapshotStore(root, self.blobs, files)
        self.store.open()

    def hold(self, generation: int, manifest: Manifest) -> None:
        put_all(self.blobs, manifest)
        self.store.install(generation, manifest)

    def restart(self, files: Files | None = None) -> Rack:
        self.stop()
        rack = Rack(self.root, files)
        rack.store.recover()
        return rack

    def stop(self) -> None:
        self.store.close()
        self.blobs.close()

    @property
    def snapshots(self) -> list[str]:
        return sorted(os.listdir(self.root / "snapshots"))


class SnapshotTestCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.patch(os, "fsync", lambda descriptor: None)  # slow, and of no effect on what tests can see

    def make(self, *, recovered: bool = True) -> Rack:
        root = self.new_root()
        root.mkdir(parents=True)
        rack = Rack(root)
        if recovered:
            rack.store.recover()
        self.addCleanup(rack.stop)
        return rack

    def new_root(self) -> Path:
        return Path(self.mktemp()).absolute()

    def assert_holds(self, rack: Rack, generation: int, manifest: Manifest) -> None:
        inventory = rack.store.inventory
        self.assertEqual((inventory.generation, inventory.manifest), (generation, manifest))
        self.assertEqual(inventory.damaged, ())
        self.assertEqual(tree(rack.root / "current"), expected_tree(manifest))


class TestInstalling(SnapshotTestCase):
    def test_a_rack_that_never_held_anything_holds_nothing(self) -> None:
        rack = self.make()
        self.assertEqual(rack.store.inventory, NOTHING)
        self.assertEqual((rack.store.inventory.generation, rack.store.inventory.digest), (-1, ""))
        self.assertIsNone(rack.store.lease())

    def test_what_is_installed_is_current_and_listed(self) -> None:
        rack = self.make()
        rack.hold(5, FIRST)
        self.assert_holds(rack, 5, FIRST)
        self.assertEqual(os.readlink(rack.root / "current"), f"snapshots/5-{FIRST.digest[:8]}")
        self.assertTrue(rack.store.inventory.holds(5, FIRST.digest))

    def test_files_are_hard_links_into_the_cache(self) -> None:
        rack = self.make()
        rack.hold(5, SECOND)
        for each in SECOND.images:
            for file in each.files:
                paths = [path for path in (rack.root / "current/").rglob(file.name) if path.is_file()]
                self.assertIn(os.stat(rack.blobs.path(file.sha256)).st_ino, [path.stat().st_ino for path in paths])

    def test_the_newer_generation_replaces_the_older_and_tidying_removes_that_with_its_contents(self) -> None:
        rack = self.make()
        rack.hold(5, FIRST)
        rack.hold(6, SECOND)
        self.assert_holds(rack, 6, SECOND)
        tidied = rack.store.tidy()
        self.assertEqual(tidied.snapshots, (f"5-{FIRST.digest[:8]}",))
        self.assertEqual(tidied.problems, ())
        self.assertEqual(set(os.listdir(rack.root / "cache/blobs")), set(SECOND.blobs))
        self.assertEqual(rack.snapshots, [f"6-{SECOND.digest[:8]}"])

    def test_a_snapshot_is_removed_from_a_full_disk_that_has_no_room_for_its_new_name(self) -> None:
        class FullDisk(Files):
            def rename(self, old: Path, new: Path) -> None:
                if new.name.startswith(".old-"):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(new))
                super().rename(old, new)

        rack = self.make()
        rack.hold(5, FIRST)
        rack = rack.restart(FullDisk())
        self.addCleanup(rack.stop)
        rack.hold(6, SECOND)
        self.assertEqual(rack.store.tidy().problems, ())
        self.assert_holds(rack, 6, SECOND)
        self.assertEqual(rack.snapshots, [f"6-{SECOND.digest[:8]}"])

    def test_an_empty_generation_is_held_and_is_not_the_same_as_nothing(self) -> None:
        rack = self.make()
        rack.hold(7, EMPTY)
        self.assertEqual((rack.store.inventory.generation, rack.store.inventory.digest), (7, EMPTY.digest))
        self.assertEqual(rack.restart().store.inventory.generation, 7)

    def test_the_same_content_under_a_new_number_is_a_new_snapshot(self) -> None:
        rack = self.make()
        rack.hold(5, FIRST)
        rack.store.install(8, FIRST)
        self.assert_holds(rack, 8, FIRST)

    def test_a_file_that_is_not_in_the_cache_fails_and_the_old_snapshot_stays(self) -> None:
        rack = self.make()
        rack.hold(5, FIRST)
        with self.assertRaises(FileNotFoundError):
            rack.store.install(6, SECOND)
        self.assert_holds(rack, 5, FIRST)
        self.assertEqual(rack.snapshots, [f"5-{FIRST.digest[:8]}"])

    def test_a_blob_that_was_changed_is_never_installed(self) -> None:
        rack = self.make()
        rack.hold(5, FIRST)
        put_all(rack.blobs, SECOND)
        victim = LOADER.files[0].sha256
        rack.blobs.path(victim).write_bytes(b"something else")
        with self.assertRaises(SnapshotError) as caught:
            rack.store.install(6, SECOND)
        self.assertIn(LOADER.files[0].name, str(caught.exception))
        self.assert_holds(rack, 5, FIRST)
        self.assertEqual(rack.snapshots, [f"5-{FIRST.digest[:8]}"])
        self.assertFalse(rack.blobs.path(victim).exists())

    def test_an_os_named_like_the_manifest_is_refused(self) -> None:
        rack = self.make()
        odd = Manifest((image(os_="manifest.json"),))
        with self.assertRaises(SnapshotError):
            rack.hold(5, odd)
        self.assertEqual(rack.store.inventory, NOTHING)
        self.assertEqual(rack.snapshots, [])

    def test_images_that_differ_only_in_where_their_kernel_is_named_are_kept_apart(self) -> None:
        # Regression: their printed names are equal, so one broken file must not hide the other image.
        rack = self.make()
        one, other = evolve(NOBLE, kflavor=""), evolve(NOBLE, subarch="")
        both = Manifest((one, evolve(other, files=image(version="20260303").files, version="20260303")))
        rack.hold(5, both)
        (rack.root / "current/ubuntu/noble/amd64/generic/_/stable/20260101/squashfs").unlink()
        self.assertEqual([each.subarch for each in rack.store.recheck().manifest.images], [""])

    def test_a_second_process_is_kept_out(self) -> None:
        rack = self.make()
        with self.assertRaises(SnapshotError) as caught:
            Rack(rack.root)
        self.assertIn("is this rack running already?", str(caught.exception))

    def test_a_root_that_cannot_be_made_is_named(self) -> None:
        root = Path(self.mktemp()).absolute()
        root.parent.mkdir(parents=True, exist_ok=True)
        root.write_bytes(b"a file")
        with self.assertRaises(SnapshotError) as caught:
            SnapshotStore(root, BlobStore(root / "cache")).open()
        self.assertIn(str(root), str(caught.exception))

    def test_after_an_interrupt_nothing_is_begun(self) -> None:
        rack = self.make()
        rack.hold(5, FIRST)
        put_all(rack.blobs, SECOND)
        rack.store.interrupt()
        with self.assertRaises(Interrupted):
            rack.store.install(6, SECOND)
        self.assertEqual(rack.store.inventory.generation, 5)
        self.assertEqual(rack.snapshots, [f"5-{FIRST.digest[:8]}"])


class TestDamage(SnapshotTestCase):
    """What is listed is concluded from verified files, not from names (an older rack's import trusted directories)."""

    def damaged(self, damage: Callable[[Rack], object], *, restart: bool) -> Rack:
        rack = self.make()
        rack.hold(5, FIRST)
        damage(rack)
        if restart:
            return rack.restart()
        rack.store.recheck()
        return rack

    def assert_only_focal(self, damage: Callable[[Rack], object]) -> None:
        for restart in (False, True):
            rack = self.damaged(damage, restart=restart)
            inventory = rack.store.inventory
            self.assertEqual(inventory.manifest, Manifest((FOCAL,)))
            self.assertEqual((inventory.generation, inventory.listed), (5, FIRST))
            self.assertEqual({each.image for each in inventory.damaged}, {NOBLE.key})
            self.assertNotEqual(inventory.digest, FIRST.digest)
            # Once the contents are there again, the same generation is made anew and whole.
            put_all(rack.blobs, FIRST)
            rack.store.install(5, FIRST)
            self.assert_holds(rack, 5, FIRST)
            rack.store.tidy()
            self.assertEqual(rack.snapshots, [f"5-{FIRST.digest[:8]}.2"])
            self.assert_holds(rack.restart(), 5, FIRST)

    NOBLE_PATH = "current/ubuntu/noble/amd64/generic/generic/stable/20260101"

    def test_an_image_with_a_file_missing_from_the_snapshot_is_not_listed(self) -> None:
        self.assert_only_focal(lambda rack: (rack.root / self.NOBLE_PATH / "squashfs").unlink())

    def test_an_image_with_another_file_in_place_of_its_own_is_not_listed(self) -> None:
        def replace(rack: Rack) -> None:
            path = rack.root / self.NOBLE_PATH / "squashfs"
            data = path.read_bytes()
            path.unlink()
            path.write_bytes(data[:-1] + b"!")

        self.assert_only_focal(replace)

    def test_an_image_with_a_symbolic_link_in_place_of_a_file_is_not_listed(self) -> None:
        def replace(rack: Rack) -> None:
            path = rack.root / self.NOBLE_PATH / "squashfs"
            path.unlink()
            path.symlink_to(rack.blobs.path(next(file.sha256 for file in NOBLE.files if file.name == "squashfs")))

        self.assert_only_focal(replace)

    def test_an_image_whose_file_was_written_to_is_not_listed(self) -> None:
        def write(rack: Rack) -> None:
            with (rack.root / self.NOBLE_PATH / "squashfs").open("r+b") as file:
                file.write(b"XX")

        self.assert_only_focal(write)

    def test_an_image_whose_blob_was_cut_is_not_listed(self) -> None:
        self.assert_only_focal(lambda rack: os.truncate(rack.blobs.path(NOBLE.files[0].sha256), 10))

    def test_an_image_whose_blob_is_gone_is_not_listed(self) -> None:
        self.assert_only_focal(lambda rack: rack.blobs.path(NOBLE.files[1].sha256).unlink())

    def test_an_image_whose_directory_is_gone_is_not_listed(self) -> None:
        self.assert_only_focal(lambda rack: shutil.rmtree(rack.root / "current/ubuntu/noble"))

    def test_directories_that_no_manifest_names_are_not_images(self) -> None:
        def invent(rack: Rack) -> None:
            path = rack.root / "current/ubuntu/trusty/amd64/generic/generic/stable/20140101"
            path.mkdir(parents=True)
            (path / "squashfs").write_bytes(b"x")

        rack = self.damaged(invent, restart=True)
        self.assertEqual(rack.store.inventory.manifest, FIRST)

    def test_stamps_that_were_lost_cost_a_hash_and_nothing_else(self) -> None:
        rack = self.damaged(lambda rack: (rack.root / "cache/verified.log").unlink(), restart=True)
        self.assert_holds(rack, 5, FIRST)

    def test_with_an_unreadable_manifest_nothing_is_listed(self) -> None:
        rack = self.damaged(lambda rack: (rack.root / "current/manifest.json").write_bytes(b"{"), restart=False)
        self.assertEqual(rack.store.inventory.manifest, EMPTY)
        self.assertEqual(rack.store.inventory.generation, 5)
        self.assertFalse(rack.store.inventory.is_whole)
        self.assertEqual(rack.restart().store.inventory, NOTHING)

    def test_a_manifest_that_was_changed_on_the_disk_is_not_believed(self) -> None:
        rack = self.damaged(
            lambda rack: (rack.root / "current/manifest.json").write_bytes(Manifest((FOCAL,)).canonical), restart=True
        )
        self.assertEqual(rack.store.inventory, NOTHING)

    def test_a_current_link_that_leads_nowhere_gives_way_to_a_whole_snapshot(self) -> None:
        rack = self.make()
        rack.hold(5, FIRST)
        (rack.root / "current").unlink()
        (rack.root / "current").symlink_to("snapshots/9-00000000")
        self.assert_holds(rack.restart(), 5, FIRST)

    def test_a_current_link_that_leads_out_of_the_snapshots_is_not_followed(self) -> None:
        rack = self.make()
        rack.hold(5, FIRST)
        (rack.root / "current").unlink()
        (rack.root / "current").symlink_to("/etc")
        self.assert_holds(rack.restart(), 5, FIRST)

    def replace_link(self, rack: Rack, what: str) -> None:
        link = rack.root / "current"
        link.unlink()
        match what:
            case "a directory":
                link.mkdir()
                (link / "mine").write_bytes(b"not to be lost")
            case "a file":
                link.write_bytes(b"")
            case "another link":
                link.symlink_to("/etc")

    def test_a_current_link_that_somebody_replaced_is_put_right_when_it_is_looked_at(self) -> None:
        for what in ("a directory", "a file", "another link", "nothing"):
            with self.subTest(what):
                rack = self.make()
                rack.hold(5, FIRST)
                self.replace_link(rack, what)
                rack.store.recheck()
                self.assert_holds(rack, 5, FIRST)
                self.assertEqual(os.readlink(rack.root / "current"), f"snapshots/5-{FIRST.digest[:8]}")

    def test_whatever_is_in_the_place_of_the_current_link_the_rack_starts_and_holds_what_it_held(self) -> None:
        for what in ("a directory", "a file", "another link", "nothing"):
            with self.subTest(what):
                rack = self.make()
                rack.hold(5, FIRST)
                self.replace_link(rack, what)
                (rack.root / ".current-new").mkdir()
                self.assert_holds(rack.restart(), 5, FIRST)
                if what == "a directory":
                    self.assertEqual((rack.root / "current.moved-1/mine").read_bytes(), b"not to be lost")

    def test_without_a_usable_current_snapshot_the_newest_whole_one_is_taken(self) -> None:
        rack = self.make()
        rack.hold(5, FIRST)
        with rack.store.lease() or self.fail("no lease"):
            rack.hold(6, SECOND)
            rack.store.tidy()
            (rack.root / "current/manifest.json").write_bytes(b"")
            rack = rack.restart()
        self.assert_holds(rack, 5, FIRST)
        self.assertEqual(rack.snapshots, [f"5-{FIRST.digest[:8]}"])

    def test_a_snapshot_that_cannot_be_read_gives_way_to_no_older_one_and_is_not_removed(self) -> None:
        for what in ("its manifest", "a file of it"):
            with self.subTest(what):
                rack = self.make()
                rack.hold(5, FIRST)
                rack.store.lease()
                rack.hold(6, SECOND)
                rack.store.tidy()
                (rack.root / "current").unlink()
                before = rack.snapshots
                examine = BlobStore.examine

                def refuse(store: BlobStore, sha256: str, size: int) -> Examination:
                    if sha256 == LOADER.files[0].sha256:
                        raise OSError(errno.EIO, os.strerror(errno.EIO), sha256)
                    return examine(store, sha256, size)  # noqa: B023

                read = Files.read

                def unread(files: Files, path: Path) -> bytes:
                    if path.parent.name.startswith("6-"):
                        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
                    return read(files, path)  # noqa: B023

                patch = self.patch(Files, "read", unread) if what == "its manifest" else None
                patch = patch or self.patch(BlobStore, "examine", refuse)
                rack = rack.restart()
                self.assertEqual((rack.store.inventory, rack.snapshots), (NOTHING, before))
                self.assertRaises(OSError, rack.store.recheck)
                self.assertEqual((rack.store.inventory, rack.snapshots), (NOTHING, before))
                patch.restore()
                rack.store.recheck()
                self.assert_holds(rack, 6, SECOND)

    def test_what_is_found_wrong_is_not_listed_also_if_the_disk_does_not_let_it_be_moved_away(self) -> None:
        # Regression: that it could not be moved was taken for that it could not be looked at.
        rack = self.make()
        rack.hold(5, FIRST)
        rack.blobs.on_damage.append(lambda damaged: rack.store.withdraw(damaged.sha256, damaged.reason))
        path = rack.blobs.path(FOCAL.files[0].sha256)
        path.write_bytes(path.read_bytes()[::-1])
        rename = os.rename

        def refuse(source: Path, target: Path) -> None:
            if "quarantine" in str(target):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(target))
            rename(source, target)

        self.patch(os, "rename", refuse)
        for _ in range(2):
            self.assertRaises(OSError, rack.store.recheck)
            self.assertEqual(rack.store.inventory.manifest.images, (NOBLE,))

    def test_what_is_found_wrong_while_it_is_recovered_is_not_listed(self) -> None:
        rack = self.make()
        rack.hold(5, FIRST)
        inspect = Inspector.inspect

        def find(inspector: Inspector, base: Path) -> Inventory:
            found = inspect(inspector, base)
            rack.store.withdraw(FOCAL.files[0].sha256, "was wrong")
            return found

        self.patch(Inspector, "inspect", find)
        self.assertEqual(rack.store.recover().manifest.images, (NOBLE,))

    def test_a_damaged_snapshot_does_not_give_way_to_an_older_generation(self) -> None:
        rack = self.make()
        rack.hold(5, FIRST)
        rack.store.lease()
        rack.hold(6, SECOND)
        rack.store.tidy()
        rack.blobs.path(LOADER.files[0].sha256).unlink()
        rack = rack.restart()
        self.assertEqual(rack.store.inventory.generation, 6)
        self.assertEqual(rack.store.inventory.manifest, SECOND.only([NEWER_NOBLE.key, FOCAL.key]))


class TestLeases(SnapshotTestCase):
    def test_a_leased_snapshot_stays_whole_until_its_last_lease_ends(self) -> None:
        rack = self.make()
        rack.hold(5, FIRST)
        one, other = rack.store.lease(), rack.store.lease()
        assert one is not None
        assert other is not None
        rack.hold(6, SECOND)
        for lease in (one, other):
            rack.store.tidy()
            self.assertEqual(tree(lease.path), expected_tree(FIRST))
            self.assertEqual(lease.inventory.manifest, FIRST)
            self.assertLessEqual(set(FIRST.blobs), set(os.listdir(rack.root / "cache/blobs")))
            lease.release()
            lease.release()
        rack.store.tidy()
        self.assertEqual(rack.snapshots, [f"6-{SECOND.digest[:8]}"])
        self.assertEqual(set(os.listdir(rack.root / "cache/blobs")), set(SECOND.blobs))

    def test_a_new_lease_is_of_the_new_snapshot_even_while_the_old_one_is_leased(self) -> None:
        rack = self.make()
        rack.hold(5, FIRST)
        with rack.store.lease() or self.fail("no lease"):
            rack.hold(6, SECOND)
            with rack.store.lease() or self.fail("no lease") as lease:
                self.assertEqual(tree(lease.path), expected_tree(SECOND))

    def test_leases_of_a_process_that_died_hold_nothing_back(self) -> None:
        rack = self.make()
        rack.hold(5, FIRST)
        rack.store.lease()
        rack.hold(6, SECOND)
        rack.store.tidy()
        self.assertEqual(len(rack.snapshots), 2)
        self.assertEqual(rack.restart().snapshots, [f"6-{SECOND.digest[:8]}"])


POWER_LOSS = Loss(-1, "torn")
STRIDE = 1 if SOAK > 1 else 3
"""From one step that is the place of a crash to the next; whole syncs are crashed at others besides."""


class CrashTestCase(SnapshotTestCase):
    """Racks on a disk that can stop or fail at any change."""

    def setUp(self) -> None:
        base = Path(self.mktemp()).absolute()
        base.mkdir(parents=True)
        self.disk = Disk(base)
        self.disk.install(self.patch)
        self.addCleanup(self.disk.close)
        self.roots = count()

    def new_root(self) -> Path:
        return Path(self.disk.root, str(next(self.roots)))


class TestCrashes(CrashTestCase):
    """The machine stops before each single change of the disk in turn, with and without what was not yet durable."""

    def crash_everywhere(self, prepare: Callable[[Rack], object], allowed: dict[int, Manifest], power: bool) -> int:
        at = 1
        while True:
            at += STRIDE
            rack = self.make()
            prepare(rack)
            put_all(rack.blobs, SECOND)
            rack = rack.restart()
            self.disk.arm(at)
            try:
                rack.store.install(6, SECOND)
                rack.store.tidy()
            except Crash:
                self.disk.restart()
            else:
                self.disk.disarm()
                return at
            if power:
                self.disk.lose_power(POWER_LOSS)
            for name in rack.snapshots:
                if not name.startswith("."):  # whoever finds it by its name finds it whole
                    found_tree = tree(rack.root / "snapshots" / name)
                    self.assertIn(found_tree, [expected_tree(manifest) for manifest in allowed.values()])
            again = rack.restart()
            found = again.store.inventory
            self.assertIn(found.generation, allowed, self.disk.met)
            if found.generation == -1:
                self.assertEqual(found, NOTHING)
                self.assertEqual(again.snapshots, [])
            else:
                self.assert_holds(again, found.generation, allowed[found.generation])
                self.assertEqual(again.snapshots, [os.readlink(again.root / "current").rpartition("/")[2]])
            put_all(again.blobs, SECOND)
            again.store.install(6, SECOND)
            again.store.tidy()
            self.assert_holds(again, 6, SECOND)
            self.assertEqual(len(again.snapshots), 1)
            self.assertEqual(set(os.listdir(again.root / "cache/blobs")), set(SECOND.blobs))
            again.stop()

    def test_a_crash_anywhere_in_an_update_leaves_the_old_or_the_new_snapshot_whole(self) -> None:
        for power in (False, True):
            steps = self.crash_everywhere(lambda rack: rack.hold(5, FIRST), {5: FIRST, 6: SECOND}, power)
            self.assertGreater(steps, 40)

    def test_a_crash_anywhere_in_the_first_sync_leaves_nothing_or_the_snapshot_whole(self) -> None:
        for power in (False, True):
            steps = self.crash_everywhere(lambda rack: None, {-1: EMPTY, 6: SECOND}, power)
            self.assertGreater(steps, 40)

    def test_a_crash_anywhere_in_the_recovery_leaves_what_can_be_recovered(self) -> None:
        at = 0
        crashed = True
        while crashed:
            at += 1
            rack = self.make()
            rack.hold(5, FIRST)
            rack.store.lease()
            rack.hold(6, SECOND)
            rack.store.tidy()
            (rack.root / "current").unlink()
            (rack.root / "snapshots/.new-7-00000000/ubuntu").mkdir(parents=True)
            rack.stop()
            recovering = Rack(rack.root)
            self.disk.arm(at)
            try:
                recovering.store.recover()
                crashed = False
                self.disk.disarm()
            except Crash:
                self.disk.restart()
                self.disk.lose_power(POWER_LOSS)
            again = recovering.restart()
            self.assert_holds(again, 6, SECOND)
            self.assertEqual(again.snapshots, [f"6-{SECOND.digest[:8]}"])
            again.stop()
        self.assertGreater(at, 10)


class TestAnyHistory(CrashTestCase):
    @settings(deadline=None, max_examples=30)
    @given(
        st.lists(
            st.tuples(st.sampled_from(["install", "crash", "lease", "release", "tidy", "restart"]), st.integers(1, 60)),
            max_size=12,
        )
    )
    def test_whatever_happens_in_whatever_order_what_is_listed_is_there(self, history: list[tuple[str, int]]) -> None:
        rack = self.make()
        choices = (FIRST, SECOND, Manifest((LOADER,)), Manifest((NOBLE, LOADER)))
        leases: list[Lease] = []
        for number, (what, at) in enumerate(history, start=1):
            manifest = choices[at % len(choices)]
            if what == "install":
                rack.hold(number, manifest)
                self.assert_holds(rack, number, manifest)
            elif what == "crash":
                rack.stop()
                rack = Rack(rack.root)
                self.disk.arm(at)
                try:
                    rack.store.recover()
                    rack.hold(number, manifest)
                    rack.store.tidy()
                except Crash:
                    self.disk.restart()
                    self.disk.lose_power(POWER_LOSS)
                self.disk.disarm()
                leases.clear()
                rack = rack.restart()
            elif what == "lease":
                lease = rack.store.lease()
                if lease is not None:
                    leases.append(lease)
            elif what == "release" and leases:
                leases.pop(at % len(leases)).release()
            elif what == "tidy":
                self.assertEqual(rack.store.tidy().problems, ())
            elif what == "restart":
                leases.clear()
                rack = rack.restart()
            inventory = rack.store.inventory
            self.assertEqual(inventory.damaged, ())
            if inventory.generation != -1:
                self.assertEqual(tree(rack.root / "current"), expected_tree(inventory.manifest))
            for lease in leases:
                self.assertEqual(tree(lease.path), expected_tree(lease.inventory.manifest))
        rack.stop()
