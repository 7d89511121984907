"""Images, catalogues and rack answers for tests of asking, combining and the API."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from region.answers.combine import Catalogue, Held, Published, RackAnswer, Target
from rpc.manifest import Image, ImageFile, Manifest
from rpc.outcomes import Answered

NOBLE = Target("ubuntu", "noble", "amd64")
NOBLE_ARM = Target("ubuntu", "noble", "arm64")
FOCAL = Target("ubuntu", "focal", "amd64")
BOOKWORM = Target("debian", "bookworm", "amd64")


def image(target: Target, version: str = "20260101", subarch: str = "generic", **attributes: str) -> Image:
    """A complete image for ``target``, whose files depend on the version."""
    files = tuple(
        ImageFile(ftype, ftype, hashlib.sha256(f"{target}{version}{subarch}{ftype}".encode()).hexdigest(), 1000)
        for ftype in ("boot-kernel", "boot-initrd", "squashfs")
    )
    return Image(
        os=target.os, release=target.release, arch=target.arch, subarch=subarch, kflavor="generic", label="stable",
        version=version, product=f"test:{target.os}:{target.release}:{target.arch}:{subarch}",
        content_id="test:download", source="http://images.example.com/", files=files, attributes=attributes,
    )  # fmt: skip


def loader(arch: str = "amd64") -> Image:
    """A boot loader."""
    return Image(
        os="grub-efi-signed", release="", arch=arch, subarch="", kflavor="", label="stable", version="20260101",
        product=f"test:grub-efi-signed:uefi:{arch}", content_id="test:loaders", source="http://images.example.com/",
        files=(ImageFile("grub2-signed", "archive.tar.xz", "ab" * 32, 500),), attributes={"bootloader-type": "uefi"},
    )  # fmt: skip


def catalogue(targets: Iterable[Target], version: str = "20260101") -> Catalogue:
    """What a rack that holds exactly these targets holds."""
    return Catalogue(Manifest(image(target, version) for target in targets))


def published(*generations: Iterable[Target]) -> Published:
    """Generations 1, 2, … listing these targets; the last one is current."""
    listed = {number: frozenset(targets) for number, targets in enumerate(generations, 1)}
    if not listed:
        return Published()
    current = max(listed)
    return Published(current, catalogue(listed[current]), listed)


def answered(rack: str, targets: Iterable[Target], generation: int | None = 1, state: str = "ready") -> RackAnswer:
    """A rack that answered that it holds these targets."""
    return RackAnswer(rack, f"rack-{rack}", Answered(Held(state, generation, catalogue(targets))), generation)
