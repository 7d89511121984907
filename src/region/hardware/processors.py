"""How many processors does a node have, and which? From ``lscpu``, as JSON, as a table, or with ``-p``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from attrs import frozen

from region.database import Transaction
from region.hardware.facts import write_facts
from region.hardware.outputs import HookError, lines, output_text, plain, read_json, whole
from region.nodes.findings import Finding
from region.nodes.values import NodeName

MAX_PROCESSORS: Final = 1 << 20

_ROW: Final = re.compile(r"(\d{1,7})(,[^:]*)?\Z")
_RANGE: Final = re.compile(r"(\d{1,7})(?:-(\d{1,7})(?::\d+(?:/\d+)?)?)?\Z")
_TEXTS: Final = {
    "Architecture": "architecture", "Vendor ID": "vendor", "Model name": "model", "Off-line CPU(s) list": "offline",
    "Hypervisor vendor": "hypervisor",
}  # fmt: skip
_NUMBERS: Final = {
    "Socket(s)": "sockets", "Core(s) per socket": "cores_per_socket", "Core(s) per cluster": "cores_per_cluster",
    "Cluster(s)": "clusters", "Thread(s) per core": "threads_per_core", "NUMA node(s)": "numa_nodes",
}  # fmt: skip


@frozen
class Processors:
    """``count`` is how many are online; ``facts`` what they are (model, architecture, sockets, …)."""

    count: int
    facts: Mapping[str, str | int]


def read_processors(outputs: Mapping[str, bytes]) -> Processors:
    """What ``lscpu`` printed.

    :raises HookError: if that does not tell how many there are.
    """
    text = output_text(outputs)
    fields: dict[str, str] = {}
    rows = set()
    for name, value in _json_fields(text) if text.lstrip().startswith("{") else _lines(text):
        if name:
            fields.setdefault(name, value)
        else:
            rows.add(value)
    total = whole(fields.get("CPU(s)"), MAX_PROCESSORS)
    count = len(rows) or _online(fields.get("On-line CPU(s) list", "")) or total
    if not count:
        raise HookError("lscpu does not say how many CPUs there are ('CPU(s)'); it is to be run with LC_ALL=C")
    if count > MAX_PROCESSORS or (total and count > total):
        raise HookError(f"lscpu says that {count} CPUs are online, which cannot be (of {total or MAX_PROCESSORS})")
    facts: dict[str, str | int] = {}
    for field, key in _TEXTS.items():
        if value := plain(fields.get(field, "")):
            facts[key] = value
    for field, key in _NUMBERS.items():
        number = whole(fields.get(field), MAX_PROCESSORS)
        if number is not None:
            facts[key] = number
    return Processors(count, facts)


async def write_processors(transaction: Transaction, node: NodeName, processors: Processors) -> Sequence[Finding]:
    """Write their number, and the fact ``cpu``."""
    await write_facts(transaction, node, cpu=dict(processors.facts))
    await transaction.execute(
        "UPDATE node SET cpu_count = %s, updated = now() WHERE id = %s", (processors.count, node.id)
    )
    return ()


def _lines(text: str) -> Iterator[tuple[str, str]]:
    """The fields of the table; with an empty name the CPU of each row that ``-p`` prints."""
    for line in lines(text):
        name, colon, value = line.partition(":")
        if colon and not line.startswith("#"):
            yield name.strip(), value.strip()
        elif row := _ROW.match(line.strip()):
            yield "", str(int(row[1]))


def _json_fields(text: str) -> Iterator[tuple[str, str]]:
    """The fields of ``lscpu --json``, which newer versions nest."""
    document = read_json(text)
    waiting: list[Any] = [document.get("lscpu")]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += reversed(value)
        elif isinstance(value, dict):
            name, data = value.get("field"), value.get("data")
            waiting.append(value.get("children"))
            if isinstance(name, str) and isinstance(data, str | int):
                yield name.strip().rstrip(":") or "?", plain(data)


def _online(ranges: str) -> int:
    """How many CPUs a list as ``0-3,8`` names; 0 if it is none."""
    count, last = 0, -1
    for part in ranges.split(",") if ranges else ():
        found = _RANGE.match(part.strip())
        if found is None:
            return 0
        first, final = int(found[1]), int(found[2] or found[1])
        if not last < first <= final:
            return 0
        count, last = count + final - first + 1, final
    return count
