"""Which switch ports is a node connected to? From the XML that ``lldpcli -f xml show neighbors details`` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from attrs import asdict, define, field, frozen

from region.database import Transaction
from region.hardware.documents import read_document
from region.hardware.facts import write_facts
from region.hardware.outputs import HookError, plain
from region.nodes.findings import Finding
from region.nodes.values import NodeName

MAX_NEIGHBOURS: Final = 1024
MAX_LISTED: Final = 64
"""VLANs, or management addresses, of one neighbour; more are left out."""


@frozen
class Vlan:
    """A VLAN that the port says it has; ``untagged`` is whether it is the port's own (its PVID)."""

    id: str
    name: str
    untagged: bool


@frozen
class Neighbour:
    """Who answers at the other end of an interface; what was not said is ""."""

    interface: str
    protocol: str = ""
    chassis_id: str = ""
    chassis_name: str = ""
    chassis_description: str = ""
    management: tuple[str, ...] = ()
    port_id: str = ""
    port_description: str = ""
    vlans: tuple[Vlan, ...] = ()


@frozen
class Neighbours:
    """All that were heard, in the order of the document; ``omitted`` is how many there were over the limit."""

    found: tuple[Neighbour, ...]
    omitted: int = 0


_FIELDS: Final = {
    ("chassis", "id"): "chassis_id",
    ("chassis", "name"): "chassis_name",
    ("chassis", "descr"): "chassis_description",
    ("port", "id"): "port_id",
    ("port", "descr"): "port_description",
}


@define
class _Open:
    """An ``interface`` element that is open."""

    texts: dict[str, str]
    management: list[str] = field(factory=list)
    vlans: list[Vlan] = field(factory=list)


class _Document:
    """Collects the neighbours."""

    def __init__(self) -> None:
        self.root = ""
        self.found: list[Neighbour] = []
        self.omitted = 0
        self._path: list[tuple[str, Mapping[str, str]]] = []
        self._open: _Open | None = None

    def begin(self, name: str, attributes: Mapping[str, str]) -> None:
        self.root = self.root or name
        self._path.append((name, attributes))
        if name == "interface" and self._open is None:
            self._open = _Open({"interface": plain(attributes.get("name")), "protocol": plain(attributes.get("via"))})

    def end(self, name: str, text: str) -> None:
        _, attributes = self._path.pop()
        inside = self._path[-1][0] if self._path else ""
        if self._open is None:
            return
        if (key := _FIELDS.get((inside, name))) is not None:
            self._open.texts.setdefault(key, plain(text))
        elif (inside, name) == ("chassis", "mgmt-ip") and len(self._open.management) < MAX_LISTED:
            self._open.management.append(plain(text))
        elif (inside, name) == ("interface", "vlan") and len(self._open.vlans) < MAX_LISTED:
            vlan = Vlan(plain(attributes.get("vlan-id"), 16), plain(text), attributes.get("pvid") == "yes")
            self._open.vlans.append(vlan)
        elif name == "interface" and not any(one == "interface" for one, _ in self._path):
            self._add(self._open)
            self._open = None

    def _add(self, ended: _Open) -> None:
        if len(self.found) >= MAX_NEIGHBOURS:
            self.omitted += 1
        elif ended.texts["interface"]:
            neighbour = Neighbour(**ended.texts, management=tuple(ended.management), vlans=tuple(ended.vlans))
            self.found.append(neighbour)


def read_neighbours(outputs: Mapping[str, bytes]) -> Neighbours:
    """What the script printed; no neighbour at all is no error.

    :raises HookError: if it is not lldpd's document.
    """
    document = _Document()
    read_document(outputs, document.begin, document.end)
    if document.root != "lldp":
        raise HookError(f"the script printed an XML document that is not lldpd's: it begins with {document.root!r:.60}")
    return Neighbours(tuple(document.found), document.omitted)


async def write_neighbours(transaction: Transaction, node: NodeName, neighbours: Neighbours) -> Sequence[Finding]:
    """Write them as the fact ``neighbours``, one object each."""
    documents: list[dict[str, Any]] = [asdict(one) for one in neighbours.found]
    await write_facts(transaction, node, neighbours=documents)
    return ()
