"""Which partitions, volumes and file systems does a node get by default? Planned as one value, and stored as one.

The layouts are ``flat`` (the root file system on a partition), ``lvm`` (on a logical volume) and ``blank`` (nothing).
Only the disk that the node boots from is used. Every table is a GPT, and every offset and size in it a multiple of
:data:`ALIGNMENT`. How each architecture boots decides what stands before the root: https://uefi.org/specs (EFI system
partition), the GRUB manual (BIOS boot partition), and the Linux on Power boot requirements (PReP).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from attrs import frozen
from cattrs import Converter
from psycopg2.extras import Json

from region.database import Transaction
from region.nodes.findings import Finding
from region.nodes.kinds import STORAGE_NOT_CONFIGURED
from region.nodes.values import NodeName

LAYOUTS: Final = ("flat", "lvm", "blank")

MIB: Final = 1 << 20

ALIGNMENT: Final = 4 * MIB
"""Bytes: a multiple of every sector, page and stripe size that disks have, and of LVM's extents."""

EFI: Final = 512 * MIB
BOOT: Final = 512 * MIB
PREP: Final = 8 * MIB

BIOS_GRUB: Final = ALIGNMENT
"""GRUB needs less than 1 MiB; it gets what keeps the next partition aligned."""

SMALLEST_ROOT: Final = 3072 * MIB
"""Bytes that the smallest system which is of use takes."""

TABLE: Final = MIB
"""Bytes at the end of a disk that are left to the second copy of its GPT, which takes 33 sectors or less."""

_NAMED: Final = 8
"""Disks that a sentence names."""


class LayoutImpossible(Exception):
    """The disks do not allow for the layout; the text is a sentence that says why, and what to do."""


@frozen
class Disk:
    """A disk that there is. ``id`` is its number in the database; ``size`` and ``block_size`` are in bytes."""

    id: int
    name: str
    size: int
    block_size: int = 512
    tags: frozenset[str] = frozenset()


@frozen
class Filesystem:
    """A file system, and where it is mounted."""

    type: str
    mount_point: str
    label: str = ""


@frozen
class Partition:
    """A partition, from ``offset`` on for ``size`` bytes.

    ``purpose`` is bios_grub, prep, efi, boot, root or lvm; of these bios_grub, prep and lvm have no file system.
    """

    number: int
    purpose: str
    offset: int
    size: int
    filesystem: Filesystem | None = None


@frozen
class DiskPlan:
    """What becomes of one disk. ``table`` is gpt, or empty for one that is not touched."""

    block_device: int
    name: str
    table: str = ""
    partitions: tuple[Partition, ...] = ()


@frozen
class LogicalVolume:
    """A volume of ``size`` bytes."""

    name: str
    size: int
    filesystem: Filesystem


@frozen
class VolumeGroup:
    """Volumes on one partition: the one numbered ``partition`` of the disk ``block_device``."""

    name: str
    block_device: int
    partition: int
    volumes: tuple[LogicalVolume, ...]


@frozen
class StoragePlan:
    """How all of a node's disks are used, in the order of their numbers. ``boot_disk`` is None where none is used."""

    layout: str
    boot_disk: int | None
    disks: tuple[DiskPlan, ...]
    volume_groups: tuple[VolumeGroup, ...] = ()

    @property
    def document(self) -> dict[str, Any]:
        """The plan in JSON; :func:`read_plan` reads it."""
        unstructured: dict[str, Any] = _CONVERTER.unstructure(self)
        return unstructured


_CONVERTER: Final = Converter(detailed_validation=False, forbid_extra_keys=True)


def read_plan(document: Mapping[str, Any]) -> StoragePlan | None:
    """What :attr:`StoragePlan.document` was made of; None for the empty document of a node without a layout.

    :raises Exception: what cattrs raises, if it is no such document.
    """
    return _CONVERTER.structure(document, StoragePlan) if document else None


def plan(
    disks: Sequence[Disk], boot_disk_id: int | None, architecture: str, boot_method: str, layout: str
) -> StoragePlan:
    """How ``disks`` are used.

    :param boot_disk_id: the disk to boot from; None for the first that does: not removable, and large enough.
    :param architecture: such as amd64/generic.
    :param boot_method: uefi, pxe, …; empty while it is not known, which gets what any way of booting needs.
    :param layout: one of :data:`LAYOUTS`.
    :raises LayoutImpossible: if there is no disk for it.
    :raises ValueError: if there is no such layout.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"there is no storage layout {layout!r}; there are {', '.join(LAYOUTS)}")
    disks = sorted(disks, key=lambda disk: disk.id)
    if not disks:
        raise LayoutImpossible("It has no disk, so nothing can be installed on it. If it should have: look at it, and "
                               "at the output of 20-block-devices, and commission it again.")  # fmt: skip
    if layout == "blank":
        return StoragePlan(layout, None, tuple(DiskPlan(disk.id, disk.name) for disk in disks))
    before = _before_root(architecture.partition("/")[0], boot_method)
    boot = _boot_disk(disks, boot_disk_id, SMALLEST_ROOT + sum(size for _, size, _ in before), layout)
    partitions = list[Partition]()
    offset = ALIGNMENT
    for purpose, size, filesystem in before:
        partitions.append(Partition(len(partitions) + 1, purpose, offset, size, filesystem))
        offset += size
    root = Filesystem("ext4", "/", "root")
    rest, number = _end(boot) - offset, len(partitions) + 1
    groups: tuple[VolumeGroup, ...] = ()
    if layout == "lvm":
        partitions.append(Partition(number, "lvm", offset, rest))
        # The first extent's worth of a physical volume is LVM's own.
        volume = LogicalVolume("lvroot", rest - ALIGNMENT, root)
        groups = (VolumeGroup("vgroot", boot.id, number, (volume,)),)
    else:
        partitions.append(Partition(number, "root", offset, rest, root))
    used = DiskPlan(boot.id, boot.name, "gpt", tuple(partitions))
    return StoragePlan(
        layout, boot.id, tuple(used if disk is boot else DiskPlan(disk.id, disk.name) for disk in disks), groups
    )


def _before_root(architecture: str, boot_method: str) -> Sequence[tuple[str, int, Filesystem | None]]:
    """Purpose, size and file system of what the firmware needs, in order."""
    efi = ("efi", EFI, Filesystem("vfat", "/boot/efi", "efi"))
    # Firmware without UEFI (U-Boot) reads kernels from a plain file system, and not from a volume.
    plain = ("boot", BOOT, Filesystem("ext4", "/boot", "boot"))
    grub = ("bios_grub", BIOS_GRUB, None)
    is_uefi = boot_method.partition("-")[0] == "uefi"
    match architecture:
        case "ppc64el":
            return [("prep", PREP, None)]
        case "s390x":
            return []
        case "amd64" | "i386":
            return [efi] if is_uefi else [grub] if boot_method else [grub, efi]
        case "arm64" | "armhf" | "riscv64":
            return [efi] if is_uefi else [plain] if boot_method else [efi, plain]
    return [efi] if is_uefi or not boot_method else []


def _boot_disk(disks: Sequence[Disk], wanted: int | None, needed: int, layout: str) -> Disk:
    """The disk to use, with room for ``needed`` bytes of partitions."""
    extra = ALIGNMENT if layout == "lvm" else 0
    chosen = [disk for disk in disks if disk.id == wanted]
    # What can be pulled out is used only if people, or the firmware, chose it.
    candidates = chosen or [disk for disk in disks if "removable" not in disk.tags]
    for disk in candidates:
        if _end(disk) - ALIGNMENT >= needed + extra:
            return disk
    least = f"layout {layout} needs {_shown(ALIGNMENT + needed + extra + TABLE)} here"
    if chosen:
        raise LayoutImpossible(
            f"Its boot disk {chosen[0].name} has {_shown(chosen[0].size)}, and {least}. Choose another boot disk or "
            "layout."
        )
    found = ", ".join(f"{disk.name} {_shown(disk.size)}" for disk in disks[:_NAMED])
    more = f" and {len(disks) - _NAMED} more" if len(disks) > _NAMED else ""
    raise LayoutImpossible(
        f"None of its disks can be used: {least}, on one that is not removable. It has {found}{more}. Choose a boot "
        "disk, or another layout."
    )


def _end(disk: Disk) -> int:
    """Where the last partition must end; 0 for a disk whose sectors do not fit the alignment."""
    if ALIGNMENT % disk.block_size:
        return 0
    return max(0, (disk.size - TABLE) // ALIGNMENT * ALIGNMENT)


def _shown(size: int) -> str:
    return f"{size / MIB / 1024:.1f} GiB" if size >= 10240 * MIB else f"{size // MIB} MiB"


async def storage(transaction: Transaction, node: NodeName, layout: str) -> Sequence[Finding]:
    """Give a node the layout, in place of whatever it had; where that is not possible, none, and a finding.

    :raises ValueError: if there is no such layout.
    """
    row = await transaction.one(
        "SELECT architecture, boot_method, boot_disk_id FROM node WHERE id = %s FOR NO KEY UPDATE", (node.id,)
    )
    if row is None:
        return ()  # it was deleted, with its disks
    architecture, boot_method, boot_disk_id = row
    rows = await transaction.query(
        "SELECT id, name, size, block_size, tags FROM block_device WHERE node_id = %s ORDER BY id", (node.id,)
    )
    disks = [Disk(number, name, size, sector, frozenset(tags)) for number, name, size, sector, tags in rows]
    findings: Sequence[Finding] = ()
    try:
        document = plan(disks, boot_disk_id, architecture, boot_method, layout).document
    except LayoutImpossible as error:
        # What was planned for disks that are gone would be worse than nothing.
        document, layout = {}, ""
        findings = (Finding(STORAGE_NOT_CONFIGURED, str(error)),)
    await transaction.execute(
        "UPDATE node SET storage_layout = %s, storage = %s, updated = now() WHERE id = %s",
        (layout, Json(document), node.id),
    )
    return findings
