"""Is a node a virtual machine, and of which kind? As ``systemd-detect-virt`` says it: a word, ``none`` for hardware."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from attrs import frozen

from region.database import Transaction
from region.hardware.facts import write_facts
from region.hardware.outputs import HookError, output_text, shown
from region.nodes.findings import Finding
from region.nodes.values import NodeName

TAG: Final = "virtual"
"""The tag that virtual machines have, as in MAAS; one that people gave a definition is left to that."""

_WORD: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,31}\Z")


@frozen
class Virtuality:
    """``kind`` is ``none``, ``kvm``, ``vmware``, ``lxc``, …"""

    kind: str

    @property
    def is_virtual(self) -> bool:
        """Whether it is not hardware."""
        return self.kind != "none"


def read_virtuality(outputs: Mapping[str, bytes]) -> Virtuality:
    """What the script printed.

    :raises HookError: if it is not one word.
    """
    words = output_text(outputs).split(maxsplit=1)
    if len(words) != 1 or not _WORD.match(words[0]):
        raise HookError(
            f"the script printed {shown(words[0]) if words else 'nothing'}{' and more' * (len(words) > 1)}, "
            "not the one word that systemd-detect-virt prints"
        )
    return Virtuality(words[0])


async def write_virtuality(transaction: Transaction, node: NodeName, virtuality: Virtuality) -> Sequence[Finding]:
    """Write it as the fact ``virtuality``, and set or take away the tag."""
    await write_facts(transaction, node, virtuality=virtuality.kind)
    if virtuality.is_virtual:
        await transaction.execute(
            """INSERT INTO tag (name, comment, evaluated) VALUES (%s, 'virtual machines, found at commissioning', 1)
               ON CONFLICT (name) DO NOTHING""",
            (TAG,),
        )
        await transaction.execute(
            """INSERT INTO node_tag (node_id, tag_id)
               SELECT node.id, tag.id FROM node, tag WHERE node.id = %s AND tag.name = %s AND definition = ''
               ON CONFLICT DO NOTHING""",
            (node.id, TAG),
        )
    else:
        await transaction.execute(
            "DELETE FROM node_tag USING tag WHERE id = tag_id AND node_id = %s AND name = %s AND definition = ''",
            (node.id, TAG),
        )
    return ()
