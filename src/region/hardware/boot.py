"""From which interface did a node boot, and by which firmware? Its kernel's command line tells.

PXE loaders append ``BOOTIF=01-52-54-00-12-34-56``: the hardware type (01 is Ethernet) and the MAC that was booted from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from attrs import frozen

from region.database import Transaction
from region.hardware.facts import write_facts
from region.hardware.findings import changed
from region.hardware.outputs import HookError, output_text, plain
from region.nodes.findings import Finding
from region.nodes.values import NodeName

MAX_COMMAND_LINE: Final = 8192
"""Characters; the kernel's own limit is 4096 on most architectures."""

_BOOTIF: Final = re.compile(r"(?:^|\s)BOOTIF=\"?(?:01[-:])?([0-9a-fA-F]{2}(?:[-:][0-9a-fA-F]{2}){5})\"?(?=\s|$)")
_METHOD: Final = re.compile(r"^boot method: *([a-z0-9][a-z0-9-]{0,31}) *$", re.MULTILINE)


@frozen
class CommandLine:
    """``boot_mac`` and ``boot_method`` are "" where the script does not say."""

    text: str
    boot_mac: str
    boot_method: str


def read_command_line(outputs: Mapping[str, bytes]) -> CommandLine:
    """The first line is ``/proc/cmdline``; a line ``boot method: uefi`` may follow.

    :raises HookError: if there is no first line.
    """
    first, _, rest = output_text(outputs).lstrip("\r\n").partition("\n")
    text = plain(first, MAX_COMMAND_LINE)
    if not text:
        raise HookError("the script's first line is empty, and not the kernel's command line")
    boot, method = _BOOTIF.search(text), _METHOD.search(rest[:MAX_COMMAND_LINE])
    return CommandLine(text, boot[1].lower().replace("-", ":") if boot else "", method[1] if method else "")


async def write_command_line(transaction: Transaction, node: NodeName, line: CommandLine) -> Sequence[Finding]:
    """Write the facts ``kernel_command_line`` and ``boot_mac``, the boot method, and the boot interface if it is known.

    An interface that is found only later becomes the boot interface then (:func:`use_waiting_boot_mac`).
    """
    await write_facts(transaction, node, kernel_command_line=line.text, boot_mac=line.boot_mac)
    if line.boot_method:
        await transaction.execute("UPDATE node SET boot_method = %s WHERE id = %s", (line.boot_method, node.id))
    return await use_waiting_boot_mac(transaction, node, line.boot_mac)


async def use_waiting_boot_mac(transaction: Transaction, node: NodeName, mac: str) -> Sequence[Finding]:
    """Have the node's interface with this MAC be that which it boots from, because that is what it did.

    If it has none (yet), the fact ``boot_mac_waits`` says so. The caller has locked the node's row.
    """
    row = await transaction.one(
        """SELECT found.id, found.name, before.id, before.name
           FROM interface found JOIN node ON node.id = found.node_id
                LEFT JOIN interface before ON before.id = node.boot_interface_id
           WHERE found.node_id = %s AND found.mac_address = %s AND found.type = 'physical'""",
        (node.id, mac),
    )
    await write_facts(transaction, node, boot_mac_waits=bool(mac) and row is None)
    if row is None or row[0] == row[2]:
        return ()
    await transaction.execute("UPDATE node SET boot_interface_id = %s WHERE id = %s", (row[0], node.id))
    if row[2] is None:
        return ()
    return (changed(f"the node booted from {row[1]} ({mac}), which is now its boot interface instead of {row[3]}"),)
