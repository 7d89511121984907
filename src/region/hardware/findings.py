"""What should people know of a node's hardware, although the rest of it was written?"""

from __future__ import annotations

from region.nodes.findings import Finding
from region.nodes.kinds import HARDWARE_CHANGED, HARDWARE_NOT_USED, MAC_ADDRESS_TAKEN
from rpc.events import MAX_DESCRIPTION, plain


def not_used(description: str) -> Finding:
    """Something cannot be used, or not as it was found."""
    return Finding(HARDWARE_NOT_USED, plain(description, MAX_DESCRIPTION))


def changed(description: str) -> Finding:
    """Something is not there any more that was there before, or is used in another way."""
    return Finding(HARDWARE_CHANGED, plain(description, MAX_DESCRIPTION))


def taken(description: str) -> Finding:
    """Another node has the MAC address of an interface."""
    return Finding(MAC_ADDRESS_TAKEN, plain(description, MAX_DESCRIPTION))
