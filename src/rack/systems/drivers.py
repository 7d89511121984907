"""What is known of each operating system, one driver for each; and of those that nobody has heard of.

What the stream says of a release goes before what a driver says. A driver's tables are for streams that say nothing,
and are short: a release that is missing in them is called by its own name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from attrs import field, frozen
from zope.interface import Attribute, Interface, implementer

from rpc.manifest import Image

COMMISSIONING: Final = "commissioning"
"""A machine can be booted into it, to be looked at and tested; nothing is written to its disks."""

DISKLESS: Final = "diskless"
"""A machine can run it from its memory."""

INSTALL: Final = "install"
"""A machine can be booted into its own installer."""

XINSTALL: Final = "xinstall"
"""It can be written to a machine's disk by another system that runs there."""

_LIVE_ROOTS: Final = frozenset({"squashfs", "root-image.gz"})
_ROOTS: Final = _LIVE_ROOTS | {"root-tgz", "root-tbz", "root-txz"}
_BOOTS: Final = frozenset({"boot-kernel", "boot-initrd"})
_PXE: Final = re.compile(r"pxeboot\.\d+\Z")
_MAX_KEY: Final = 128


class IOperatingSystem(Interface):
    """What a rack knows of one operating system."""

    name = Attribute("What streams call it, such as ``ubuntu``; text.")
    title = Attribute("What people call it, such as ``Ubuntu``; text.")

    def release_title(release: str) -> str:
        """What people call a release; empty if nothing better than ``release`` is known."""

    def purposes(image: Image) -> frozenset[str]:
        """What an image may be used for, by its files; maybe nothing that is known."""

    def requires_license_key(release: str) -> bool:
        """Whether a release must not be installed without a license key."""

    def wrong_with_key(release: str, key: str) -> str:
        """What is wrong with a license key, as a sentence that does not quote it; empty if nothing is."""


def no_title(release: str) -> str:
    """Nothing is known."""
    return ""


def any_key(release: str, key: str) -> str:
    """There is no rule but that a key is one word."""
    if not 0 < len(key) <= _MAX_KEY or not key.isprintable() or any(character.isspace() for character in key):
        return f"A license key is 1 to {_MAX_KEY} characters, without blanks."
    return ""


def root_only(image: Image) -> frozenset[str]:
    """What an image is good for that is written to disks: a root file system, or a whole disk."""
    types = _types(image)
    return frozenset({XINSTALL}) if types & _ROOTS or any(kind.startswith("root-dd") for kind in types) else frozenset()


def live(image: Image) -> frozenset[str]:
    """What an image is good for that a machine can run without a disk, if it has all the files for that."""
    types = _types(image)
    found = set(root_only(image))
    if types >= _BOOTS:
        found |= {COMMISSIONING, DISKLESS} if types & _LIVE_ROOTS else {INSTALL}
    return frozenset(found)


def _types(image: Image) -> frozenset[str]:
    return frozenset(file.ftype for file in image.files)


@implementer(IOperatingSystem)
@frozen
class OperatingSystem:
    """A system of which what is known is a few functions."""

    name: str
    title: str
    _title_of: Callable[[str], str] = no_title
    _purposes: Callable[[Image], frozenset[str]] = root_only
    _licensed: Callable[[str], bool] = field(default=lambda release: False)
    _wrong: Callable[[str, str], str] = any_key

    def release_title(self, release: str) -> str:
        """What people call a release; empty if nothing better than ``release`` is known."""
        return self._title_of(release)

    def purposes(self, image: Image) -> frozenset[str]:
        """What an image may be used for."""
        return self._purposes(image)

    def requires_license_key(self, release: str) -> bool:
        """Whether a release must not be installed without a license key."""
        return self._licensed(release)

    def wrong_with_key(self, release: str, key: str) -> str:
        """What is wrong with a license key; empty if nothing is."""
        return self._wrong(release, key)


def table(titles: Mapping[str, str]) -> Callable[[str], str]:
    """Titles from a table."""
    return lambda release: titles.get(release, "")


def pattern(expression: str, name: str) -> Callable[[str], str]:
    """Titles for releases that are a name and a number, such as ``centos7``: the groups are the parts of the number."""
    compiled = re.compile(expression)

    def title_of(release: str) -> str:
        found = compiled.fullmatch(release)
        return f"{name} {'.'.join(filter(None, found.groups()))}" if found else ""

    return title_of


# Windows

_WINDOWS: Final = re.compile(r"win(?P<year>20\d\d)(?P<hv>hv)?-?(?P<edition>core|nano|dc|std)?(?P<r2>r2)?")
_WINDOWS_CLIENT: Final = re.compile(r"win(?P<number>7|8\.1|81|8|10|11)")
_EDITIONS: Final = {"core": " (Core)", "nano": " (Nano)", "dc": " (Datacenter)", "std": " (Standard)"}
_WINDOWS_KEY: Final = re.compile(r"([A-Za-z0-9]{5}-){4}[A-Za-z0-9]{5}")


def windows_title(release: str) -> str:
    """``win2012hvr2`` is Hyper-V Server 2012 R2."""
    if found := _WINDOWS.fullmatch(release):
        name = "Hyper-V Server" if found["hv"] else "Windows Server"
        return f"{name} {found['year']}{' R2' if found['r2'] else ''}{_EDITIONS.get(found['edition'] or '', '')}"
    if client := _WINDOWS_CLIENT.fullmatch(release):
        return f"Windows {'8.1' if client['number'] == '81' else client['number']}"
    return ""


def windows_licensed(release: str) -> bool:
    """Every Windows, but for Hyper-V Server, which is free."""
    found = _WINDOWS.fullmatch(release)
    return not (found and found["hv"])


def windows_purposes(image: Image) -> frozenset[str]:
    """A disk is written; an installer is booted, of which there is the boot program."""
    installs = any(_PXE.match(file.name) for file in image.files)
    return root_only(image) | (frozenset({INSTALL}) if installs else frozenset())


def windows_key(release: str, key: str) -> str:
    """Five groups of five, with hyphens."""
    if _WINDOWS_KEY.fullmatch(key):
        return ""
    return "A license key of Windows is five groups of five letters and digits, with hyphens between."


SYSTEMS: Final[Sequence[IOperatingSystem]] = (
    OperatingSystem(
        "ubuntu", "Ubuntu",
        table({
            "trusty": "14.04 LTS", "xenial": "16.04 LTS", "bionic": "18.04 LTS", "focal": "20.04 LTS",
            "jammy": "22.04 LTS", "noble": "24.04 LTS",
        }),
        live,
    ),
    OperatingSystem(
        "debian", "Debian",
        table({"buster": "Debian 10", "bullseye": "Debian 11", "bookworm": "Debian 12", "trixie": "Debian 13"}),
    ),
    OperatingSystem("centos", "CentOS", pattern(r"(?:centos)?(\d)\.?(\d)?", "CentOS")),
    OperatingSystem("rhel", "Red Hat Enterprise Linux", pattern(r"(?:rhel)?(\d+)(?:\.(\d+))?",
                                                                "Red Hat Enterprise Linux")),
    OperatingSystem("suse", "SUSE", lambda release: (
        pattern(r"opensuse(\d\d)\.?(\d)?", "openSUSE")(release)
        or pattern(r"sles(\d\d)(?:[.-]?sp(\d))?", "SUSE Linux Enterprise Server")(release)
    )),
    OperatingSystem("windows", "Windows", windows_title, windows_purposes, windows_licensed, windows_key),
    OperatingSystem("esxi", "VMware ESXi", pattern(r"(?:esxi)?(\d)\.?(\d)?(?:\.(\d+))?", "VMware ESXi")),
    OperatingSystem("custom", "Custom"),
)  # fmt: skip

_BY_NAME: Final = {system.name: system for system in SYSTEMS}


def system_of(name: str) -> IOperatingSystem:
    """The driver for an operating system; one that knows nothing special, if there is none."""
    return _BY_NAME.get(name) or OperatingSystem(name, name)
