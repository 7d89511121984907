"""How much memory does a node have, and what is it? From the XML that ``lshw -xml`` prints.

Vendors put memory in different places: ``memory`` with a size; ``memory:0``, ``memory:1`` … with sizes; banks with
sizes below a memory without one; banks somewhere else. Caches, firmware, flash and the memory of PCI devices have the
class "memory" as well, and do not count.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from attrs import define, field, frozen

from region.database import Transaction
from region.hardware.documents import read_document
from region.hardware.facts import write_facts
from region.hardware.findings import not_used
from region.hardware.outputs import HookError, plain, whole
from region.nodes.findings import Finding
from region.nodes.values import NodeName

_MEMORY: Final = re.compile(r"memory(:\d+)?\Z")
_OTHER: Final = re.compile(r"flash|firmware|bios|cache|video|\brom\b|non-volatile", re.IGNORECASE)
_UNITS: Final = {"": 1, "bytes": 1, "b": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30, "tb": 1 << 40}
_MOST: Final = 1 << 60
_SYSTEM: Final = ("vendor", "product", "version", "serial", "description")


@frozen
class Machine:
    """What lshw says: ``memory`` in MiB, None if it does not; ``system`` what the machine is (vendor, product, …)."""

    memory: int | None
    system: Mapping[str, str]


@define
class _Node:
    """A ``node`` element that is open: ``size`` is its own, ``banks`` that of all banks below it (bytes)."""

    id: str
    kind: str
    size: int = 0
    banks: int = 0
    texts: dict[str, str] = field(factory=dict)

    @property
    def is_memory(self) -> bool:
        return (
            self.kind == "memory"
            and _MEMORY.match(self.id) is not None
            and not self.texts.get("businfo", "").startswith("pci@")
            and not _OTHER.search(self.texts.get("description", ""))
        )

    @property
    def is_bank(self) -> bool:
        return self.id.startswith("bank") and self.kind in ("memory", "")


class _Document:
    """Adds up what the elements say."""

    def __init__(self) -> None:
        self.memory = 0
        self.banks = 0
        self.nodes = 0
        self.system: dict[str, str] = {}
        self._path: list[_Node | None] = []
        self._units: list[str] = []

    def begin(self, name: str, attributes: Mapping[str, str]) -> None:
        self._units.append(attributes.get("units", ""))
        if name == "node":
            self.nodes += 1
            self._path.append(_Node(attributes.get("id", ""), attributes.get("class", "")))
        else:
            self._path.append(None)

    def end(self, name: str, text: str) -> None:
        units = self._units.pop().lower()
        ended = self._path.pop()
        if ended is not None:
            self._node(ended)
            return
        inside = self._path[-1] if self._path else None
        if inside is None:
            return  # of a node's list of capabilities, resources, ...
        if name == "size":
            inside.size = (whole(text) or 0) * _UNITS.get(units, 0)
        elif name == "businfo" or name in _SYSTEM:
            inside.texts.setdefault(name, plain(text))

    def _node(self, node: _Node) -> None:
        """Count what ended: memory by itself, unless it is inside of memory; banks with what they are inside of."""
        nodes = [one for one in self._path if one is not None]
        amount = node.banks
        if node.is_bank or node.is_memory:
            amount = node.size or node.banks
        elif node.kind == "memory":
            amount = 0  # a cache, firmware, ...: nor do banks in it count
        if node.is_memory and not any(one.is_memory for one in nodes):
            self.memory += amount
        elif nodes:
            nodes[-1].banks += amount
        else:
            self.banks += amount
        if not nodes and not self.system:
            self.system = {key: node.texts[key] for key in _SYSTEM if node.texts.get(key)}


def read_machine(outputs: Mapping[str, bytes]) -> Machine:
    """What ``lshw -xml`` printed.

    :raises HookError: if it is not that.
    """
    document = _Document()
    read_document(outputs, document.begin, document.end)
    if not document.nodes:
        raise HookError("the script printed an XML document that is not lshw's: it has no element 'node'")
    total = document.memory or document.banks
    if total > _MOST:
        raise HookError(f"lshw says that there are {total} bytes of memory, which cannot be")
    return Machine(total >> 20 or None, document.system)


async def write_machine(transaction: Transaction, node: NodeName, machine: Machine) -> Sequence[Finding]:
    """Write the memory and the fact ``system``; memory that lshw does not speak of stays what it was."""
    await write_facts(transaction, node, system=dict(machine.system))
    if machine.memory is None:
        return (not_used("lshw says nothing of the size of the memory; what was known of it before is kept"),)
    await transaction.execute("UPDATE node SET memory = %s, updated = now() WHERE id = %s", (machine.memory, node.id))
    return ()
