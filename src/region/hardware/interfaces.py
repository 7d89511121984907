"""Which network interfaces does a node have? From ``ip addr``, as JSON or as text, and what the script adds to that.

The built-in script prints ``ip -json -details addr`` with an object ``sysfs`` in each interface. Only what is hardware
is a node's interface: bonds, bridges and the like are how the system that runs now is configured, and what addresses
they have are those of the hardware below. What is wrong with one interface is said, and leaves the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from typing import Any, Final

from attrs import evolve, field, frozen

from region.hardware.ip_text import read_ip_text
from region.hardware.outputs import HookError, flag, output_text, plain, read_json, shown, whole

MAX_ENTRIES: Final = 10_000
"""Of all kinds; with more an output is not read at all."""

MAX_INTERFACES: Final = 1024
MAX_ADDRESSES: Final = 256
"""Of one interface; more are left out."""

MAX_PROBLEMS: Final = 20

_NAME: Final = re.compile(r"[!-.0-9;-~]{1,15}\Z")  # what the kernel takes, of ASCII
_MAC: Final = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}\Z")
_INFINIBAND: Final = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){19}\Z")
# Hardware that says of itself what kind of device it is, as otherwise only what is made by software does.
_HARDWARE_KINDS: Final = frozenset({"", "ipoib", "dsa", "can", "netdevsim", "wwan", "rmnet"})
# By their names, where nothing better is known: the text of "ip addr" alone has no kinds.
_SOFTWARE: Final = re.compile(
    r"(bond|br-|br\d|virbr|docker|lxcbr|lxdbr|veth|vnet|tap|tun|dummy|ifb|wg|vxlan|cni|flannel|ovs|team|sit|gre|erspan"
    r"|ip6tnl|ip6gre|ip_vti|ip6_vti|tunl|teql|nlmon|macv|ipvl|vrf|lo\Z).*"
)
_FACTS: Final = ("driver", "vendor", "product", "firmware_version", "bus", "sriov_vfs")


class _Unfit(ValueError):
    """Why an interface cannot be used."""


@frozen
class Interface:
    """One interface that is hardware.

    ``mac`` is its own, lower case with colons; "" for InfiniBand, of which ``guid`` (8 bytes, so written) is known.
    ``connected`` is None where that was not to be seen. ``addresses`` are (address, prefix length) of global scope.
    """

    name: str
    mac: str
    guid: str = ""
    connected: bool | None = None
    addresses: tuple[tuple[str, int], ...] = ()
    facts: Mapping[str, str | int] = field(factory=dict)

    @property
    def key(self) -> str:
        """What it is known by from one commissioning to the next."""
        return self.mac or self.guid


@frozen
class Interfaces:
    """What was found, each name and key once; ``problems`` are sentences about what cannot be used."""

    found: tuple[Interface, ...]
    problems: tuple[str, ...] = ()


def read_interfaces(outputs: Mapping[str, bytes]) -> Interfaces:
    """What the script printed.

    :raises HookError: if it has no interface at all, not even one that cannot be used.
    """
    text = output_text(outputs)
    entries = read_json(text) if text.lstrip().startswith(("[", "{")) else read_ip_text(text, MAX_ENTRIES + 1)
    if not isinstance(entries, list) or not any(entries):
        raise HookError("the script printed no network interfaces, as 'ip addr' or 'ip -json addr' do")
    if len(entries) > MAX_ENTRIES:
        raise HookError(
            f"the script printed more than {MAX_ENTRIES} network interfaces, which is more than can be read"
        )
    problems: list[str] = []
    found: list[Interface] = []
    names: set[str] = set()
    keys: dict[str, str] = {}
    above: dict[str, str] = {}
    for number, entry in enumerate(entries):
        if entry == {}:
            continue  # iproute2 writes these for what was filtered out
        try:
            interface = _interface(entry)
            if interface is None:
                continue
            if interface.name in names:
                raise _Unfit("another interface has the same name")
            if interface.key in keys:
                raise _Unfit(f"{keys[interface.key]} has the same MAC address, {interface.key}")
            if len(found) >= MAX_INTERFACES:
                raise _Unfit(f"there are {MAX_INTERFACES} already")
        except _Unfit as error:
            problems.append(f"network interface {_called(entry, number)} is left out: {error}")
            continue
        names.add(interface.name)
        keys[interface.key] = interface.name
        found.append(interface)
        if isinstance(master := entry.get("master"), str):
            above.setdefault(master, interface.name)
    inherited = dict(_inherited(entries, above))
    return Interfaces(
        tuple(evolve(one, addresses=one.addresses or inherited.get(one.name, ())) for one in found), cut(problems)
    )


def cut(problems: list[str]) -> tuple[str, ...]:
    """The first of ``problems``, and how many more there were."""
    more = len(problems) - MAX_PROBLEMS
    return tuple(problems) if more <= 0 else (*problems[:MAX_PROBLEMS], f"and {more} more that are left out")


def _inherited(entries: list[Any], above: Mapping[str, str]) -> Iterator[tuple[str, tuple[tuple[str, int], ...]]]:
    """By interface, the addresses of the bridge or bond that it is the first member of."""
    for entry in entries:
        if isinstance(entry, dict) and isinstance(name := entry.get("ifname"), str) and name in above:
            yield above[name], tuple(_addresses(entry))


def _interface(entry: object) -> Interface | None:
    """The interface, or None if it is no hardware.

    :raises _Unfit: if it cannot be used.
    """
    if not isinstance(entry, dict):
        raise _Unfit(f"it is {shown(entry)}, not an object")
    name = entry.get("ifname")
    if not isinstance(name, str) or not _NAME.match(name):
        raise _Unfit(f"its name is {shown(name)}")
    sysfs = entry["sysfs"] if isinstance(entry.get("sysfs"), dict) else {}
    if not _is_hardware(entry, sysfs, name):
        return None
    kind = entry.get("link_type")
    address = next((one for one in (sysfs.get("permanent_address"), entry.get("permaddr")) if one), None)
    address = address or entry.get("address")
    address = address.lower() if isinstance(address, str) else ""
    facts: dict[str, str | int] = {key: text for key in _FACTS if (text := plain(sysfs.get(key, "")))}
    for key, value in (("mtu", entry.get("mtu")), ("speed", sysfs.get("speed"))):
        number = whole(value, (1 << 31) - 1)
        if number is not None:
            facts[key] = number
    mac = guid = ""
    if kind == "infiniband" or _INFINIBAND.match(address):
        if not _INFINIBAND.match(address):
            raise _Unfit(f"its InfiniBand address is {shown(entry.get('address'))}, not 20 bytes")
        # What comes before the last 8 bytes (a queue pair's number, a subnet's prefix) may change at any boot.
        guid, facts["guid"], facts["hardware_address"] = address[36:], address[36:], address
    elif kind in ("ether", None):
        mac = address
        if not _MAC.match(mac):
            raise _Unfit(f"its MAC address is {shown(entry.get('address'))}")
        if mac == "00:00:00:00:00:00" or int(mac[:2], 16) & 1:
            raise _Unfit(f"its MAC address is {mac}, which no interface has for its own")
    else:
        return None  # ppp, can, sit, none, ...: nothing that a machine is provisioned over
    return Interface(name, mac, guid, _connected(entry, sysfs), tuple(_addresses(entry)), facts)


def _is_hardware(entry: Mapping[str, Any], sysfs: Mapping[str, Any], name: str) -> bool:
    flags = entry["flags"] if isinstance(entry.get("flags"), list) else []
    if entry.get("link_type") == "loopback" or "LOOPBACK" in flags:
        return False
    if "device" in sysfs:
        return flag(sysfs["device"])
    details = entry.get("linkinfo")
    kind = details.get("info_kind") if isinstance(details, dict) else None
    if kind is not None:
        return kind in _HARDWARE_KINDS if isinstance(kind, str) else False
    if entry.get("parentdev"):
        return True
    on_another = entry.get("link") or "link_index" in entry  # a vlan, or one end of a pair
    return "MASTER" not in flags and not on_another and not _SOFTWARE.match(name)


def _connected(entry: Mapping[str, Any], sysfs: Mapping[str, Any]) -> bool | None:
    """Whether there is a carrier; of an interface that is down nobody knows."""
    flags = entry["flags"] if isinstance(entry.get("flags"), list) else []
    if (carrier := whole(sysfs.get("carrier"), 1)) is not None:
        return carrier == 1
    if "NO-CARRIER" in flags:
        return False
    return True if "LOWER_UP" in flags else None


def _addresses(entry: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Those that others can reach it by."""
    listed = entry.get("addr_info")
    for one in listed[:MAX_ADDRESSES] if isinstance(listed, list) else ():
        if not isinstance(one, dict) or one.get("scope") not in ("global", "site", None):
            continue
        prefix = whole(one.get("prefixlen"), 128)
        local = one.get("local")
        try:
            address = ip_address(local if isinstance(local, str) else "")
        except ValueError:
            continue  # "any", say, of a tunnel
        usable = not (address.is_link_local or address.is_loopback or address.is_unspecified or address.is_multicast)
        if usable and prefix is not None and prefix <= address.max_prefixlen:
            yield str(address), prefix


def _called(entry: object, number: int) -> str:
    name = plain(entry.get("ifname"), 15) if isinstance(entry, dict) else ""
    return name or f"number {number + 1}"
