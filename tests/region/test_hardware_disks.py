"""Which of the block devices that a script lists are a node's disks, and what each is known by."""

from __future__ import annotations

import json
from typing import Any

from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from region.hardware.disk_rows import Comparison, Row, compare
from region.hardware.disks import MAX_DISKS, MAX_ENTRIES, Disk, Disks, read_disks
from region.hardware.outputs import HookError
from tests.examples import examples

GB = 10**9


def device(name: str = "sda", size: object = 500 * GB, **more: Any) -> dict[str, Any]:
    return {"name": name, "size": size, "type": "disk", "ro": False, **more}


def read(*devices: object) -> Disks:
    return read_disks({"stdout": json.dumps({"blockdevices": devices}).encode()})


def names(disks: Disks) -> list[str]:
    return [disk.name for disk in disks.found]


class ReadTests(SynchronousTestCase):
    def test_a_disk_is_read_with_all_that_is_known_of_it(self) -> None:
        found = read(
            device(
                "nvme0n1", 1000204886016, model="SAMSUNG MZ", serial="S3", wwn="eui.01", tran="nvme", rota=True,
                rm=False, id_path="pci-0000:01:00.0-nvme-1", rev="1.2", numa_node=1, vendor=None, mounted=True,
                **{"log-sec": 4096, "phy-sec": 4096},
            )
        )  # fmt: skip
        self.assertEqual(
            found,
            Disks((
                Disk(
                    "nvme0n1", 1000204886016, 4096, "SAMSUNG MZ", "S3", "eui.01", "pci-0000:01:00.0-nvme-1",
                    ("ssd", "nvme", "mounted"),
                    {"wwn": "eui.01", "firmware": "1.2", "physical_block_size": 4096, "numa_node": 1},
                    "serial:SAMSUNG MZ:S3", ("nvme0n1",),
                ),
            )),
        )  # fmt: skip

    def test_older_tools_write_everything_as_text(self) -> None:
        old = {
            "name": "sda",
            "size": "500107862016",
            "ro": "0",
            "rm": "1",
            "rota": "1",
            "type": "disk",
            "log-sec": "512",
        }
        found = read(old).found[0]
        self.assertEqual((found.size, found.block_size, found.tags), (500107862016, 512, ("rotary", "removable")))
        self.assertEqual(read({**old, "ro": "1"}).found, ())

    def test_what_is_no_disk_is_left_out_without_a_word(self) -> None:
        found = read(
            device("sda"), device("loop0", type="loop"), device("ram0"), device("zram0"), device("dm-0", type="lvm"),
            device("md127"), device("sr0", type="rom"), device("fd0"), device("nbd3"), device("sdr", ro=True),
            device("mmcblk0boot0"), device("mmcblk0rpmb"), device("mpatha", type="mpath"), device("sda1", type="part"),
            device("sdx", 0), device("sdy", 4 << 20), device("mmcblk0"), device("vda"), device("xvda"), device("pmem0"),
        )  # fmt: skip
        self.assertEqual((names(found), found.problems), (["sda", "vda", "xvda", "pmem0", "mmcblk0"], ()))

    def test_how_a_disk_is_connected_is_a_tag(self) -> None:
        for tran, tag in (("usb", "usb"), ("SATA", "sata"), ("virtio", "virtio"), ("sas", "sas"), ("warp", None)):
            self.assertEqual(read(device(tran=tran)).found[0].tags, (tag,) if tag else (), tran)

    def test_what_is_wrong_with_one_disk_is_said_and_leaves_the_others(self) -> None:
        for what, why in (
            (5, "disk number 2 is left out: it is 5, not an object"),
            ({}, "disk number 2 is left out: its name is None"),
            (device("../x"), "its name is '../x'"),
            (device("sdb", None), "disk sdb is left out: its size is None, not a number of bytes"),
            (device("sdb", "931.5G"), "its size is '931.5G'"),
            (device("sdb", -1), "its size is -1"),
            (device("sdb", 1 << 63), "its size is 9223372036854775808"),
            (device("sdb", True), "its size is True"),
            (device("sda", 7 * GB), "another disk has the same name"),
        ):
            found = read(device("sda"), what, device("sdz"))
            self.assertEqual(names(found), ["sda", "sdz"], why)
            self.assertEqual(len(found.problems), 1, why)
            self.assertIn(why, found.problems[0])

    def test_no_disk_is_no_error_but_no_list_is(self) -> None:
        self.assertEqual(read(), Disks(()))
        for text in ("[]", "{}", '{"blockdevices": {}}', '{"blockdevices": null}', "lsblk: not found", "5"):
            with self.assertRaises(HookError):
                read_disks({"stdout": text.encode()})

    def test_disks_without_end_are_refused(self) -> None:
        with self.assertRaisesRegex(HookError, f"at most {MAX_ENTRIES}"):
            read(*([1] * (MAX_ENTRIES + 1)))
        many = read(*(device(f"sd{n}") for n in range(MAX_DISKS + 1)))
        self.assertEqual((len(many.found), len(many.problems)), (MAX_DISKS, 1))

    def test_disks_are_in_the_order_in_which_people_count(self) -> None:
        self.assertEqual(names(read(device("sdaa"), device("sdb"), device("sda"))), ["sda", "sdb", "sdaa"])


class IdentityTests(SynchronousTestCase):
    def identities(self, *devices: object) -> list[str]:
        return [disk.identity for disk in read(*devices).found]

    def test_a_disk_is_known_by_model_and_serial_number_else_by_where_it_is(self) -> None:
        self.assertEqual(
            self.identities(
                device("sda", model="M", serial="S", wwn="0x5", id_path="p"), device("sdb", wwn="0x6", id_path="q"),
                device("sdc", model="M", id_path="r"), device("sdd"),
            ),
            ["serial:M:S", "wwn:0x6", "path:r", "name:sdd"],
        )  # fmt: skip

    def test_paths_to_one_disk_are_one_disk(self) -> None:
        paths = [device(name, model="LUN", serial="60", wwn="0x60") for name in ("sdb", "sdc", "sdaa", "sda")]
        found = read(*paths)
        self.assertEqual(found.problems, ())
        self.assertEqual([(disk.name, disk.paths) for disk in found.found], [("sda", ("sda", "sdb", "sdc", "sdaa"))])
        self.assertEqual(found.found[0].tags, ("multipath",))
        # Fewer paths are there the next time: it is the same disk.
        self.assertEqual(read(*paths[:1]).found[0].identity, found.found[0].identity)

    def test_disks_of_one_serial_number_are_told_apart_and_that_is_said(self) -> None:
        found = read(*(device(name, model="Cheap", serial="0123", id_path=f"usb-{name}") for name in ("sda", "sdb")))
        self.assertEqual(
            [disk.identity for disk in found.found], ["serial:Cheap:0123:usb-sda", "serial:Cheap:0123:usb-sdb"]
        )
        self.assertIn("disks sda and sdb are all known as 'serial:Cheap:0123'", found.problems[0])

    def test_namespaces_of_one_nvme_disk_are_several_disks(self) -> None:
        found = read(*(device(f"nvme0n{n}", model="N", serial="S", wwn=f"eui.{n}") for n in (1, 2)))
        self.assertEqual(
            ([disk.identity for disk in found.found], found.problems), (["serial:N:S:eui.1", "serial:N:S:eui.2"], ())
        )

    def test_an_identity_always_fits_into_an_index(self) -> None:
        text = "\U0001f4be" * 255
        (disk,) = read(device("sda", model=text, serial=text)).found
        self.assertLess(len(disk.identity.encode()), 2000)

    @examples(80)
    @given(
        st.lists(
            st.tuples(st.integers(0, 9), st.sampled_from(["", "A", "A:B"]), st.sampled_from(["", "B:C", "C"]),
                      st.sampled_from(["", "w", "C"]), st.sampled_from(["", "p", "q"]), st.sampled_from([GB, 2 * GB])),
            max_size=8,
        )
    )  # fmt: skip
    def test_every_name_and_identity_is_there_once(self, listed: list[tuple[int, str, str, str, str, int]]) -> None:
        found = read(
            *(
                device(f"sd{n}", size, model=model, serial=serial, wwn=wwn, id_path=path)
                for n, model, serial, wwn, path, size in listed
            )
        ).found
        self.assertEqual(len({disk.identity for disk in found}), len(found))
        paths = [path for disk in found for path in disk.paths]
        self.assertEqual(sorted(paths), sorted({f"sd{one[0]}" for one in listed}))


def row(id_: int, disk: Disk) -> Row:
    return Row(id_, disk.name, disk.identity, disk.model, disk.serial, disk.wwn, disk.size)


class CompareTests(SynchronousTestCase):
    """:func:`compare`, which says which row is which disk."""

    A = Disk("sda", 500 * GB, model="M", serial="A", wwn="0xa", identity="serial:M:A")
    B = Disk("sdb", 500 * GB, model="M", serial="B", wwn="0xb", identity="serial:M:B")
    PLAIN = Disk("vda", 10 * GB, identity="name:vda")

    def kept(self, before: list[Disk], after: list[Disk]) -> dict[int, str]:
        """The names, by the number of the row."""
        plan = compare([row(number, disk) for number, disk in enumerate(before)], after)
        self.check(plan, before, after)
        return {one.id: disk.name for one, disk in plan.kept}

    def check(self, plan: Comparison, before: list[Disk], after: list[Disk]) -> None:
        self.assertEqual(len(plan.kept) + len(plan.gone), len(before))
        self.assertEqual(len(plan.kept) + len(plan.new), len(after))

    def test_disks_that_swapped_their_names_keep_their_rows(self) -> None:
        swapped = [evolve(self.A, name="sdb"), evolve(self.B, name="sda")]
        self.assertEqual(self.kept([self.A, self.B], swapped), {0: "sdb", 1: "sda"})

    def test_a_disk_in_the_place_of_another_is_new(self) -> None:
        self.assertEqual(self.kept([self.A], [evolve(self.B, name="sda")]), {})

    def test_a_disk_whose_identity_came_out_otherwise_is_known_by_other_ways(self) -> None:
        other = evolve(self.A, identity="serial:M:A:usb-1")
        self.assertEqual(self.kept([self.A], [other]), {0: "sda"})
        self.assertEqual(self.kept([self.A], [evolve(other, wwn="")]), {0: "sda"})
        self.assertEqual(self.kept([self.A], [evolve(other, serial="", model="")]), {0: "sda"})

    def test_a_disk_without_a_serial_number_that_has_one_now_is_the_same(self) -> None:
        self.assertEqual(self.kept([self.PLAIN], [evolve(self.PLAIN, serial="S", identity="serial::S")]), {0: "vda"})
        grown = evolve(self.PLAIN, serial="S", identity="serial::S", size=20 * GB)
        self.assertEqual(self.kept([self.PLAIN], [grown]), {})

    def test_what_could_be_either_is_neither(self) -> None:
        before = [evolve(self.A, identity="x", wwn=""), evolve(self.A, identity="y", name="sdb", wwn="")]
        after = [evolve(self.A, identity="z", name="sdc", wwn="")]
        self.assertEqual(self.kept(before, after), {})

    @examples(80)
    @given(st.data())
    def test_no_row_gets_an_identity_that_another_still_has(self, data: Any) -> None:
        disks = st.lists(
            st.builds(
                Disk, st.sampled_from(["sda", "sdb", "sdc"]), st.sampled_from([GB, 2 * GB]), model=st.just("M"),
                serial=st.sampled_from(["", "A", "B"]), wwn=st.sampled_from(["", "w", "x"]),
                identity=st.sampled_from(["1", "2", "3", "4"]),
            ),
            max_size=3, unique_by=(lambda disk: disk.name, lambda disk: disk.identity),
        )  # fmt: skip
        before, after = data.draw(disks), data.draw(disks)
        plan = compare([row(number, disk) for number, disk in enumerate(before)], after)
        self.check(plan, before, after)
        for one, disk in plan.kept:
            others = {other.identity for other, _ in plan.kept if other.id != one.id}
            self.assertNotIn(disk.identity, others)
