"""What does the text that ``ip addr`` prints say? The same as ``ip -json addr``, in the same shape."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any, Final

from region.hardware.outputs import lines

_LINK: Final = re.compile(r"\d+: ([^\s:@]+)(?:@([^\s:]+))?: <([A-Z0-9_,-]*)>(.*)")
_ADDRESS: Final = re.compile(r"\s+(inet6?) ([0-9a-fA-F.:]+)(?: peer [0-9a-fA-F.:]+)?/(\d{1,3}) (.*)")
_HARDWARE: Final = re.compile(r"\s+link/(\S+)(?: ([0-9a-f:]+))?(.*)")
_KIND: Final = re.compile(
    r"    (bond|bridge|vlan|veth|dummy|ifb|tun|macvlan|macvtap|macsec|ipvlan|ipvtap|vxlan|geneve|vrf|team|wireguard"
    r"|vti6?|sit|gre|gretap|ip6gre|ip6gretap|ipip|ip6tnl|erspan|ip6erspan|xfrm|nlmon|vcan|openvswitch|hsr)(?: |$)"
)
_WORDS: Final = {"mtu": "mtu", "state": "operstate", "master": "master"}


def read_ip_text(text: str, most: int) -> list[dict[str, Any]]:
    """One object for each of the first ``most`` interfaces of ``ip addr`` or ``ip -details addr``.

    :raises HookError: if there are too many lines. Those that are not understood are left out.
    """
    found: list[dict[str, Any]] = []
    for line in lines(text):
        if link := _LINK.match(line):
            if len(found) >= most:
                break
            words = link[4].split()
            entry: dict[str, Any] = {"ifname": link[1], "flags": link[3].split(","), "addr_info": []}
            entry.update({_WORDS[word]: value for word, value in pairwise(words) if word in _WORDS})
            if link[2]:
                entry["link"] = link[2]
            found.append(entry)
        elif found:
            _detail(found[-1], line)
    return found


def _detail(entry: dict[str, Any], line: str) -> None:
    if hardware := _HARDWARE.match(line):
        entry["link_type"], entry["address"] = hardware[1], hardware[2]
        words = hardware[3].split()
        if "permaddr" in words[:-1]:
            entry["permaddr"] = words[words.index("permaddr") + 1]
    elif address := _ADDRESS.match(line):
        words = address[4].split()
        scope = words[words.index("scope") + 1] if "scope" in words[:-1] else ""
        prefix = int(address[3])
        entry["addr_info"].append({"family": address[1], "local": address[2], "prefixlen": prefix, "scope": scope})
    elif "linkinfo" not in entry and not entry["addr_info"] and (kind := _KIND.match(line)):
        # The first line below that of the hardware, of "ip -details", begins with what kind of device it is.
        entry["linkinfo"] = {"info_kind": kind[1]}
