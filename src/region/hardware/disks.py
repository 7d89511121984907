"""Which disks does a node have? From the JSON of the built-in script, whose fields are those of ``lsblk --json``.

What is made by software (loops, RAM, device mapper, RAID), what cannot be written, what has no medium, and what is too
small to hold anything is no disk. What is wrong with one disk is said, and leaves the others.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from attrs import evolve, field, frozen

from region.hardware.interfaces import cut
from region.hardware.outputs import HookError, flag, output_text, plain, read_json, shown, whole

MAX_ENTRIES: Final = 10_000
MAX_DISKS: Final = 4096
SMALLEST: Final = 4 << 20
"""Bytes; a device of this size, or less, is no disk."""

_NAME: Final = re.compile(r"[!-.0-~]{1,64}\Z")
_SOFTWARE: Final = re.compile(
    r"(loop|ram|zram|dm-|md|nbd|drbd|bcache|zd|rbd|fd|sr|mtdblock)\d*\Z|mmcblk\d+(boot|gp|rpmb)"
)
_LONGEST: Final = 300
_KINDS: Final = frozenset({"", "disk"})
_TRANSPORTS: Final = frozenset(
    {"sata", "ata", "sas", "scsi", "spi", "nvme", "usb", "virtio", "fc", "iscsi", "mmc", "ieee1394", "xen", "hyperv"}
)


class _Unfit(ValueError):
    """Why a disk cannot be used."""


@frozen
class Disk:
    """One disk. ``size`` and ``block_size`` are bytes; ``identity`` is what it is known by at the next commissioning.

    ``paths`` are the names of all devices that lead to it: more than one of a disk with multipath.
    """

    name: str
    size: int
    block_size: int = 512
    model: str = ""
    serial: str = ""
    wwn: str = ""
    id_path: str = ""
    tags: tuple[str, ...] = ()
    facts: Mapping[str, str | int] = field(factory=dict)
    identity: str = ""
    paths: tuple[str, ...] = ()


@frozen
class Disks:
    """What was found, each name and identity once; ``problems`` are sentences about what cannot be used."""

    found: tuple[Disk, ...]
    problems: tuple[str, ...] = ()


def read_disks(outputs: Mapping[str, bytes]) -> Disks:
    """What the script printed: ``{"blockdevices": [{"name": "sda", "size": 1000204886016, …}, …]}``.

    :raises HookError: if it is not that. No disk at all is no error.
    """
    document = read_json(output_text(outputs))
    entries = document.get("blockdevices") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise HookError("the script printed JSON that has no list 'blockdevices'")
    if len(entries) > MAX_ENTRIES:
        raise HookError(f"the script printed {len(entries)} block devices, of which at most {MAX_ENTRIES} are read")
    problems: list[str] = []
    found: dict[str, Disk] = {}
    for number, entry in enumerate(entries):
        try:
            disk = _disk(entry)
            if disk is None:
                continue
            if disk.name in found:
                raise _Unfit("another disk has the same name")
            if len(found) >= MAX_DISKS:
                raise _Unfit(f"there are {MAX_DISKS} already")
            found[disk.name] = disk
        except _Unfit as error:
            name = plain(entry.get("name"), 64) if isinstance(entry, dict) else ""
            problems.append(f"disk {name or f'number {number + 1}'} is left out: {error}")
    told = _tell_apart(list(found.values()), problems)
    return Disks(tuple(sorted(told, key=lambda disk: order(disk.name))), cut(problems))


def order(name: str) -> tuple[int, str]:
    """By what names are sorted: ``sdb`` before ``sdaa``, ``nvme2n1`` before ``nvme10n1``."""
    return len(name), name


def _disk(entry: object) -> Disk | None:
    """The disk, or None if it is none.

    :raises _Unfit: if it cannot be used.
    """
    if not isinstance(entry, dict):
        raise _Unfit(f"it is {shown(entry)}, not an object")
    name = entry.get("name")
    if not isinstance(name, str) or not _NAME.match(name):
        raise _Unfit(f"its name is {shown(name)}")
    if _SOFTWARE.match(name) or plain(entry.get("type")) not in _KINDS or flag(entry.get("ro")):
        return None
    size = whole(entry.get("size"))
    if size is None:
        raise _Unfit(f"its size is {shown(entry.get('size'))}, not a number of bytes")
    if size <= SMALLEST:
        return None
    block_size = whole(entry.get("log-sec"), 1 << 20)
    wwn = plain(entry.get("wwn"))
    facts: dict[str, str | int] = {"wwn": wwn} if wwn else {}
    for key, source in (("vendor", "vendor"), ("firmware", "rev"), ("driver", "driver"), ("path", "sysfs_path")):
        if text := plain(entry.get(source), 1024):
            facts[key] = text
    for key, source in (("physical_block_size", "phy-sec"), ("numa_node", "numa_node")):
        if number := whole(entry.get(source), 1 << 30):
            facts[key] = number
    return Disk(
        name, size, block_size or 512, plain(entry.get("model")), plain(entry.get("serial")), wwn,
        plain(entry.get("id_path"), 1024), tuple(_tags(entry, name)), facts,
    )  # fmt: skip


def _tags(entry: Mapping[str, Any], name: str) -> Iterator[str]:
    transport = "nvme" if name.startswith("nvme") else plain(entry.get("tran")).lower()
    if "rota" in entry and entry["rota"] is not None:
        # Some virtual and NVMe disks say that they rotate.
        yield "rotary" if flag(entry["rota"]) and transport != "nvme" else "ssd"
    if transport in _TRANSPORTS:
        yield transport
    if flag(entry.get("rm")):
        yield "removable"
    if flag(entry.get("mounted")):
        yield "mounted"


def _tell_apart(disks: Sequence[Disk], problems: list[str]) -> Iterator[Disk]:
    """The disks with their identities; what are paths to one and the same disk is one."""
    groups: defaultdict[tuple[str, ...], list[Disk]] = defaultdict(list)
    for disk in sorted(disks, key=lambda disk: order(disk.name)):
        if disk.serial:
            groups["serial", disk.model, disk.serial].append(disk)
        elif disk.wwn:
            groups["wwn", disk.wwn].append(disk)
        else:
            groups[("path", disk.id_path) if disk.id_path else ("name", disk.name)].append(disk)
    taken: set[str] = set()
    for key, group in groups.items():
        for disk, *more in _distinct(group, ":".join(key), problems):
            identity = _bounded(":".join((*key, *more)))
            while identity in taken:
                identity = _bounded(f"{identity}:{disk.name}")
            taken.add(identity)
            yield evolve(disk, identity=identity)


def _distinct(group: Sequence[Disk], called: str, problems: list[str]) -> Iterator[tuple[Disk, *tuple[str, ...]]]:
    """Each disk of those that give the same serial number, with what else it is known by if there are several."""
    paths: defaultdict[tuple[str, int], list[Disk]] = defaultdict(list)
    for disk in group:
        # Without a worldwide name two disks cannot be said to be one: some makers give all of theirs one number.
        paths[disk.wwn or f"\0{disk.name}", disk.size].append(disk)
    for (wwn, _), (first, *others) in paths.items():
        names = tuple(disk.name for disk in (first, *others))
        tags = (*first.tags, "multipath") if others else first.tags
        disk = evolve(first, paths=names, tags=tags)
        if len(paths) == 1:
            yield (disk,)
        elif wwn.startswith("\0"):
            yield disk, disk.id_path or disk.name
        else:
            yield disk, wwn
    unclear = sorted({disk.name for disks in paths.values() for disk in disks if not disk.wwn}, key=order)
    if unclear and len(paths) > 1:
        problems.append(
            f"disks {' and '.join(disk.name for disk in group[:8])} are all known as {shown(called)}: "
            f"{' and '.join(unclear[:8])} can be told apart only by where they are connected"
        )


def _bounded(identity: str) -> str:
    """An identity that fits into an index."""
    if len(identity) <= _LONGEST:
        return identity
    return f"{identity[:_LONGEST]}#{hashlib.sha256(identity.encode()).hexdigest()}"
