"""What else is known of a node's hardware: small values by name, for people and for other hooks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from attrs import frozen

from region.database import Transaction
from region.hardware.outputs import HookError, lines, output_text, plain
from region.nodes.findings import Finding
from region.nodes.values import NodeName

MAX_MODALIASES: Final = 2000
MAX_MODALIAS: Final = 2048
"""Characters of one; those of CPUs list every feature."""


async def write_facts(transaction: Transaction, node: NodeName, **facts: Any) -> None:
    """Put ``facts`` (values that JSON has) in the place of those of the same names; the others stay."""
    await transaction.execute(
        "UPDATE node SET facts = facts || %s::jsonb, updated = now() WHERE id = %s", (json.dumps(facts), node.id)
    )


@frozen
class Modaliases:
    """The modaliases of a node's devices, each once, sorted; ``omitted`` is how many there were over the limit."""

    names: tuple[str, ...]
    omitted: int


def read_modaliases(outputs: Mapping[str, bytes]) -> Modaliases:
    """The modaliases that a script printed, one a line.

    :raises HookError: if there is none.
    """
    found = {name for line in lines(output_text(outputs)) if ":" in (name := plain(line, MAX_MODALIAS))}
    if not found:
        raise HookError("the script printed no modalias: none of its lines has a ':'")
    return Modaliases(tuple(sorted(found)[:MAX_MODALIASES]), max(0, len(found) - MAX_MODALIASES))


async def write_modaliases(transaction: Transaction, node: NodeName, modaliases: Modaliases) -> Sequence[Finding]:
    """Write them as the fact ``modaliases``."""
    await write_facts(transaction, node, modaliases=list(modaliases.names))
    return ()
