"""What is made of the output of each built-in script?

A hook first reads the output, which is pure and may take a while, so it runs in a thread; then it writes what it read,
in a transaction that the caller commits. A script that failed says so itself: of its output nothing is made.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

from attrs import frozen

from region.database import Transaction
from region.hardware.boot import read_command_line, write_command_line
from region.hardware.disk_rows import write_disks
from region.hardware.disks import read_disks
from region.hardware.facts import read_modaliases, write_modaliases
from region.hardware.interface_rows import write_interfaces
from region.hardware.interfaces import read_interfaces
from region.hardware.memory import read_machine, write_machine
from region.hardware.neighbours import read_neighbours, write_neighbours
from region.hardware.outputs import HookError
from region.hardware.processors import read_processors, write_processors
from region.hardware.virtuality import read_virtuality, write_virtuality
from region.nodes.findings import Finding
from region.nodes.values import NodeName

__all__ = ["HOOKS", "Hook", "HookError"]

T = TypeVar("T")


class Hook(Protocol):
    """Turns the output of one built-in script into what the database knows of a node's hardware."""

    def parse(self, outputs: Mapping[str, bytes], exit_status: int) -> Any:
        """What the output says: an immutable value for :meth:`apply`, or None if the script failed. Pure.

        :param outputs: the bytes by ``stdout``, ``stderr``, ``output`` (both in one) and ``result``, as far as known.
        :raises HookError: if the output cannot be used; nothing else.
        """

    async def apply(self, transaction: Transaction, node: NodeName, parsed: Any) -> Sequence[Finding]:
        """Write it; what people must know though it was written, in the order in which it was found.

        Locks the node's row first, and the rows of its disks or interfaces then.
        """


@frozen
class _Hook(Generic[T]):
    """A hook of two functions."""

    read: Callable[[Mapping[str, bytes]], T]
    write: Callable[[Transaction, NodeName, T], Awaitable[Sequence[Finding]]]

    def parse(self, outputs: Mapping[str, bytes], exit_status: int) -> T | None:
        return None if exit_status else self.read(outputs)

    async def apply(self, transaction: Transaction, node: NodeName, parsed: T | None) -> Sequence[Finding]:
        return () if parsed is None else await self.write(transaction, node, parsed)


HOOKS: Final[Mapping[str, Hook]] = {
    "10-lshw": _Hook(read_machine, write_machine),
    "11-lscpu": _Hook(read_processors, write_processors),
    "12-virtuality": _Hook(read_virtuality, write_virtuality),
    "13-modaliases": _Hook(read_modaliases, write_modaliases),
    "14-kernel-command-line": _Hook(read_command_line, write_command_line),
    "20-block-devices": _Hook(read_disks, write_disks),
    "30-network-interfaces": _Hook(read_interfaces, write_interfaces),
    "40-lldp": _Hook(read_neighbours, write_neighbours),
}
"""By the script's name."""
