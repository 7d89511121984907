"""Which events does a node have? MAAS's types and levels by MAAS's names, and those that MAAS lacks."""

from __future__ import annotations

from typing import Final

from rpc.events import Kind, Level

# What happens to a node. MAAS has made some of these DEBUG later on; people look for them, so here they are INFO.
NODE_CHANGED_STATUS: Final = Kind("Node changed status", Level.INFO)
REQUEST_NODE_MARK_FAILED_SYSTEM: Final = Kind("Marking node failed", Level.ERROR)
REQUEST_NODE_MARK_BROKEN: Final = Kind("User marking node broken", Level.INFO)
REQUEST_NODE_MARK_FIXED: Final = Kind("User marking node fixed", Level.INFO)
REQUEST_NODE_START_COMMISSIONING: Final = Kind("User starting node commissioning", Level.INFO)
REQUEST_NODE_ABORT_COMMISSIONING: Final = Kind("User aborting node commissioning", Level.INFO)
REQUEST_NODE_START_TESTING: Final = Kind("User starting node testing", Level.INFO)
REQUEST_NODE_ABORT_TESTING: Final = Kind("User aborting node testing", Level.INFO)

# What a node says, by the webhook and by signals.
NODE_STATUS_EVENT: Final = Kind("Node status event", Level.DEBUG)
NODE_COMMISSIONING_EVENT: Final = Kind("Node commissioning", Level.DEBUG)
NODE_COMMISSIONING_EVENT_FAILED: Final = Kind("Node commissioning failure", Level.ERROR)
NODE_INSTALL_EVENT: Final = Kind("Node installation", Level.DEBUG)
NODE_INSTALL_EVENT_FAILED: Final = Kind("Node installation failure", Level.ERROR)
NODE_POST_INSTALL_EVENT_FAILED: Final = Kind("Node post-installation failure", Level.ERROR)

# What the region made of what came.
SCRIPT_RESULT_ERROR: Final = Kind("Script result lookup or storage error", Level.ERROR)

# What MAAS has no event for.
NODE_CREATED: Final = Kind("Node created", Level.INFO)
NODE_DELETED: Final = Kind("Node deleted", Level.INFO)
EXIT_STATUS_MISSING: Final = Kind("Script ended without an exit status", Level.ERROR)
LATE_END: Final = Kind("Node came to its end after its run had ended", Level.WARNING)
LATE_OUTPUT: Final = Kind("Script output came late", Level.WARNING)
MAC_ADDRESS_TAKEN: Final = Kind("MAC address is another node's", Level.WARNING)
HARDWARE_NOT_USED: Final = Kind("Hardware could not be used", Level.WARNING)
HARDWARE_CHANGED: Final = Kind("Hardware changed", Level.INFO)
STORAGE_NOT_CONFIGURED: Final = Kind("Storage was not configured", Level.WARNING)
NETWORK_NOT_CONFIGURED: Final = Kind("Network was not configured", Level.WARNING)
TAGS_NOT_EVALUATED: Final = Kind("Tags were not evaluated", Level.ERROR)
