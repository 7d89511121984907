"""Tests for :mod:`region.layouts.storage`: whatever the disks, a plan can be carried out, or it is said why not."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from attrs import evolve
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from region.layouts.storage import (
    ALIGNMENT,
    LAYOUTS,
    MIB,
    SMALLEST_ROOT,
    TABLE,
    Disk,
    DiskPlan,
    Filesystem,
    LayoutImpossible,
    StoragePlan,
    plan,
    read_plan,
    storage,
)
from region.nodes.kinds import STORAGE_NOT_CONFIGURED
from region.nodes.values import NodeName
from tests.database import DatabaseTestCase

GIB = 1024 * MIB
DISK = Disk(1, "sda", 100 * GIB)

ARCHITECTURES = ("amd64", "i386", "arm64", "armhf", "riscv64", "ppc64el", "s390x", "sparc64")
METHODS = ("", "uefi", "uefi-amd64-tftp", "pxe", "powernv", "open-firmware", "s390x")

sizes = st.integers(0, 64 * GIB) | st.sampled_from([0, 1, MIB, 2 * GIB, 3 * GIB, 3081 * MIB, 4 * GIB, 1 << 41, 1 << 62])
disk_sets = st.lists(
    st.builds(
        Disk,
        st.integers(1, 1000),
        st.sampled_from(["sda", "nvme0n1", "vda"]),
        sizes,
        st.sampled_from([512, 4096, 520, 1 << 23, 1]),
        st.frozensets(st.sampled_from(["ssd", "removable", "rotary"])),
    ),
    min_size=1,
    max_size=5,
    unique_by=lambda disk: disk.id,
)


def purposes(made: StoragePlan) -> list[str]:
    """What the partitions are for, in order, of the only disk that has any."""
    [used] = [disk for disk in made.disks if disk.table]
    return [partition.purpose for partition in used.partitions]


class EveryPlanTests(SynchronousTestCase):
    """What holds for every plan."""

    @settings(max_examples=300, deadline=None)
    @given(
        disk_sets, st.none() | st.integers(1, 6), st.sampled_from(ARCHITECTURES), st.sampled_from(METHODS),
        st.sampled_from(LAYOUTS), st.integers(),
    )  # fmt: skip
    def test_it_can_be_carried_out(
        self, disks: list[Disk], index: int | None, architecture: str, method: str, layout: str, seed: int
    ) -> None:
        boot = None if index is None else disks[index % len(disks)].id
        try:
            made = plan(disks, boot, f"{architecture}/generic", method, layout)
        except LayoutImpossible as error:
            self.assertRegex(str(error), r"MiB|GiB")
            self.assertTrue(str(error).endswith("."))
            return
        by_id = {disk.id: disk for disk in disks}
        self.assertEqual([one.block_device for one in made.disks], sorted(by_id))
        self.assertEqual(sum(bool(one.partitions) for one in made.disks), 0 if layout == "blank" else 1)
        for one in made.disks:
            self.assertEqual(bool(one.table), bool(one.partitions))
            offset = ALIGNMENT
            for number, partition in enumerate(one.partitions, 1):
                self.assertEqual(partition.number, number)
                self.assertEqual((partition.offset % ALIGNMENT, partition.size % ALIGNMENT), (0, 0))
                self.assertEqual(partition.offset, offset, "nothing overlaps, and nothing is left out")
                self.assertGreater(partition.size, 0)
                self.assertEqual(partition.offset % by_id[one.block_device].block_size, 0)
                offset += partition.size
            if one.partitions:
                self.assertEqual(one.block_device, made.boot_disk)
                size = by_id[one.block_device].size
                self.assertLessEqual(offset + TABLE, size)
                self.assertLess(size - offset - TABLE, ALIGNMENT, "room is left")
        self.check_root(made, layout)
        if boot is not None and layout != "blank":
            self.assertEqual(made.boot_disk, boot)
        shuffled = list(disks)
        Random(seed).shuffle(shuffled)
        self.assertEqual(plan(shuffled, boot, f"{architecture}/hwe-24.04", method, layout), made)
        self.assertEqual(read_plan(json.loads(json.dumps(made.document))), made)

    def check_root(self, made: StoragePlan, layout: str) -> None:
        partitions = [partition for disk in made.disks for partition in disk.partitions]
        volumes = [volume for group in made.volume_groups for volume in group.volumes]
        placed = [(one.filesystem, one.size) for one in partitions if one.filesystem]
        placed += [(one.filesystem, one.size) for one in volumes]
        mounted = [system.mount_point for system, _ in placed]
        self.assertEqual(len(set(mounted)), len(mounted))
        self.assertEqual(mounted.count("/"), 0 if layout == "blank" else 1)
        for group in made.volume_groups:
            [physical] = [one for one in partitions if one.number == group.partition]
            self.assertEqual((group.block_device, physical.purpose), (made.boot_disk, "lvm"))
            # LVM's own head takes 1 MiB, and what is left counts in extents of 4 MiB.
            extents = (physical.size - MIB) // (4 * MIB)
            self.assertEqual(sum(volume.size for volume in group.volumes), extents * 4 * MIB)
        self.assertTrue(all(size >= SMALLEST_ROOT for system, size in placed if system.mount_point == "/"))

    @settings(max_examples=60, deadline=None)
    @given(st.sampled_from(ARCHITECTURES), st.sampled_from(METHODS), st.sampled_from(["flat", "lvm"]))
    def test_the_size_that_a_refusal_asks_for_is_enough_and_the_least(
        self, architecture: str, method: str, layout: str
    ) -> None:
        with self.assertRaises(LayoutImpossible) as caught:
            plan([evolve(DISK, size=GIB)], None, architecture, method, layout)
        words = str(caught.exception).split()
        needed = int(words[words.index("needs") + 1]) * MIB
        plan([evolve(DISK, size=needed)], None, architecture, method, layout)
        with self.assertRaises(LayoutImpossible):
            plan([evolve(DISK, size=needed - 1)], None, architecture, method, layout)

    @settings(max_examples=50, deadline=None)
    @given(disk_sets, st.text(max_size=6))
    def test_there_are_no_other_layouts(self, disks: list[Disk], layout: str) -> None:
        assume(layout not in LAYOUTS)
        with self.assertRaisesRegex(ValueError, "there are flat, lvm, blank"):
            plan(disks, None, "amd64/generic", "uefi", layout)


class BootTests(SynchronousTestCase):
    """What each machine needs to boot."""

    def before_root(self, architecture: str, method: str) -> list[str]:
        flat = purposes(plan([DISK], None, f"{architecture}/generic", method, "flat"))
        lvm = purposes(plan([DISK], None, f"{architecture}/generic", method, "lvm"))
        self.assertEqual((flat[-1], lvm[-1], flat[:-1]), ("root", "lvm", lvm[:-1]))
        return flat[:-1]

    def test_each_way_of_booting_has_what_it_needs_and_no_more(self) -> None:
        for architecture, method, wanted in (
            ("amd64", "uefi", ["efi"]), ("amd64", "uefi-amd64-tftp", ["efi"]), ("amd64", "pxe", ["bios_grub"]),
            ("i386", "pxe", ["bios_grub"]), ("arm64", "uefi", ["efi"]), ("arm64", "pxe", ["boot"]),
            ("armhf", "pxe", ["boot"]), ("riscv64", "uefi", ["efi"]), ("ppc64el", "open-firmware", ["prep"]),
            ("ppc64el", "powernv", ["prep"]), ("s390x", "s390x", []), ("s390x", "", []), ("ppc64el", "", ["prep"]),
            ("sparc64", "pxe", []),
        ):  # fmt: skip
            self.assertEqual(self.before_root(architecture, method), wanted, f"{architecture} {method}")

    def test_while_it_is_not_known_how_a_machine_boots_it_has_what_either_way_needs(self) -> None:
        self.assertEqual(self.before_root("amd64", ""), ["bios_grub", "efi"])
        self.assertEqual(self.before_root("arm64", ""), ["efi", "boot"])

    def test_file_systems_are_where_systems_look_for_them(self) -> None:
        made = plan([DISK], None, "arm64/generic", "", "flat")
        self.assertEqual(
            [(one.size, one.filesystem) for one in made.disks[0].partitions[:2]],
            [(512 * MIB, Filesystem("vfat", "/boot/efi", "efi")), (512 * MIB, Filesystem("ext4", "/boot", "boot"))],
        )
        self.assertEqual(made.disks[0].partitions[2].filesystem, Filesystem("ext4", "/", "root"))
        made = plan([DISK], None, "ppc64el/generic", "powernv", "lvm")
        prep, physical = made.disks[0].partitions
        self.assertEqual((prep.size, prep.filesystem, physical.filesystem), (8 * MIB, None, None))
        [group] = made.volume_groups
        [volume] = group.volumes
        self.assertEqual((group.name, volume.name, volume.filesystem.mount_point), ("vgroot", "lvroot", "/"))


class ChoosingTests(SynchronousTestCase):
    """Which disk is used."""

    def chosen(self, *disks: Disk, boot: int | None = None) -> int | None:
        return plan(disks, boot, "amd64/generic", "uefi", "flat").boot_disk

    def impossible(self, *disks: Disk, boot: int | None = None) -> str:
        with self.assertRaises(LayoutImpossible) as caught:
            self.chosen(*disks, boot=boot)
        return str(caught.exception)

    def test_the_first_disk_that_is_large_enough_and_stays_where_it_is(self) -> None:
        stick = Disk(1, "sda", 64 * GIB, tags=frozenset({"removable"}))
        card = Disk(2, "mmcblk0", 1 * GIB)
        odd = Disk(3, "sdb", 64 * GIB, 520)
        self.assertEqual(self.chosen(Disk(5, "sdd", 8 * GIB), Disk(4, "sdc", 8 * GIB), odd, card, stick), 4)
        self.assertEqual(self.chosen(Disk(4, "sdc", 8 * GIB), stick, boot=1), 1, "what people chose, they get")

    def test_a_boot_disk_that_is_gone_is_none(self) -> None:
        self.assertEqual(self.chosen(DISK, boot=77), 1)

    def test_a_boot_disk_that_is_too_small_is_not_silently_replaced(self) -> None:
        self.assertEqual(
            self.impossible(Disk(1, "sda", 2 * GIB), Disk(2, "sdb", 64 * GIB), boot=1),
            "Its boot disk sda has 2048 MiB, and layout flat needs 3589 MiB here. Choose another boot disk or layout.",
        )

    def test_why_no_disk_will_do_is_said(self) -> None:
        stick = Disk(7, "sdx", 64 * GIB, tags=frozenset({"removable"}))
        self.assertEqual(
            self.impossible(Disk(1, "sda", 2 * GIB), stick),
            "None of its disks can be used: layout flat needs 3589 MiB here, on one that is not removable. It has sda "
            "2048 MiB, sdx 64.0 GiB. Choose a boot disk, or another layout.",
        )
        many = [Disk(number, f"sd{number}", 0) for number in range(500)]
        self.assertIn("sd7 0 MiB and 492 more.", self.impossible(*many))
        self.assertIn("has no disk", self.impossible())

    def test_the_other_disks_are_left_alone(self) -> None:
        made = plan([DISK, Disk(2, "sdb", GIB)], None, "amd64/generic", "uefi", "lvm")
        self.assertEqual(made.disks[1], DiskPlan(2, "sdb"))

    def test_blank_uses_none(self) -> None:
        made = plan([DISK, Disk(2, "sdb", 0)], 1, "amd64/generic", "uefi", "blank")
        self.assertEqual(made, StoragePlan("blank", None, (DiskPlan(1, "sda"), DiskPlan(2, "sdb"))))

    def test_a_node_without_a_layout_has_no_plan(self) -> None:
        self.assertIsNone(read_plan({}))


class StorageTests(DatabaseTestCase):
    """What is stored."""

    async def node(self, **columns: Any) -> NodeName:
        values = {"system_id": "abc123", "hostname": "one", "architecture": "amd64/generic", **columns}
        row = await self.database.one(
            f"INSERT INTO node ({', '.join(values)}) VALUES ({', '.join(['%s'] * len(values))}) RETURNING id",
            tuple(values.values()),
        )
        assert row is not None
        return NodeName(row[0], values["system_id"], values["hostname"])

    async def disk(self, node: NodeName, name: str, size: int) -> int:
        row = await self.database.one(
            "INSERT INTO block_device (node_id, name, identity, size, tags) VALUES (%s, %s, %s, %s, %s) RETURNING id",
            (node.id, name, name, size, ["ssd"]),
        )
        assert row is not None
        number: int = row[0]
        return number

    async def stored(self, node: NodeName) -> tuple[str, StoragePlan | None]:
        row = await self.database.one("SELECT storage_layout, storage FROM node WHERE id = %s", (node.id,))
        assert row is not None
        return row[0], read_plan(row[1])

    async def test_the_plan_is_stored_whole_and_again_the_same(self) -> None:
        node = await self.node(boot_method="uefi")
        first, second = await self.disk(node, "sda", 8 * GIB), await self.disk(node, "sdb", 8 * GIB)
        await self.database.execute("UPDATE node SET boot_disk_id = %s", (second,))
        for _ in range(2):
            self.assertEqual(await self.database.transact(lambda tx: storage(tx, node, "lvm")), ())
            layout, made = await self.stored(node)
            assert made is not None
            self.assertEqual((layout, made.boot_disk, purposes(made)), ("lvm", second, ["efi", "lvm"]))
            self.assertEqual([disk.block_device for disk in made.disks], [first, second])

    async def test_a_node_without_disks_is_an_event_and_keeps_nothing_of_before(self) -> None:
        node = await self.node(storage_layout="flat", storage='{"layout": "flat"}')
        [finding] = await self.database.transact(lambda tx: storage(tx, node, "flat"))
        self.assertEqual(finding.kind, STORAGE_NOT_CONFIGURED)
        self.assertIn("has no disk", finding.description)
        self.assertEqual(await self.stored(node), ("", None))

    async def test_a_node_that_was_deleted_meanwhile_is_nothing_to_do(self) -> None:
        gone = NodeName(77, "zzzzzz", "gone")
        self.assertEqual(await self.database.transact(lambda tx: storage(tx, gone, "flat")), ())
