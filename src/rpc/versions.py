"""Which version of the protocol do two ends speak? The highest that both have; if there is none, one must be upgraded.

A rack offers its versions when it registers, and the region chooses. Until then a link speaks the oldest version there
ever was. A command names the version that it came with, and is not sent to a peer that is older.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from rpc.commands import PROTOCOL_VERSION, Command, Role, VersionMismatch

OLDEST_VERSION: Final = 1
"""The first version that any release spoke."""

VERSIONS: Final = tuple(range(OLDEST_VERSION, PROTOCOL_VERSION + 1))
"""The versions that this end speaks."""


def agree(offered: object, ours: Collection[int] = VERSIONS) -> int:
    """The highest version that is both among those that a rack has ``offered``, a list if it means well, and ``ours``.

    :raises VersionMismatch: if there is none; the text says which end to upgrade.
    """
    theirs = {one for one in offered if type(one) is int} if isinstance(offered, list) else set()
    if common := theirs & set(ours):
        return max(common)
    older = "region" if any(one > max(ours) for one in theirs) else "rack"
    raise VersionMismatch(
        f"this region speaks version {spoken(ours)} of the protocol and the rack offers {str(offered)[:80]}: "
        f"upgrade the {older}"
    )


def spoken(versions: Collection[int]) -> str:
    """``1``, or ``1 to 3``."""
    first, last = min(versions), max(versions)
    return str(first) if first == last else f"{first} to {last}"


def too_old(command: type[Command], role: Role, version: int) -> str:
    """Why ``command`` is not sent to a peer of ``role`` with which ``version`` was agreed on."""
    return (
        f"the {role} speaks version {version} of the protocol and {command.__name__} came with version "
        f"{command.since}: upgrade the {role}"
    )
