"""Which statuses do a node, and a script on it, have? Numbers and names are MAAS's, since its clients read them."""

from __future__ import annotations

from collections.abc import Collection
from enum import IntEnum
from typing import Final


class NodeStatus(IntEnum):
    """What a node is, or what is being done with it. ``label`` is the name that people and clients see."""

    NEW = 0
    COMMISSIONING = 1
    FAILED_COMMISSIONING = 2
    MISSING = 3
    READY = 4
    RESERVED = 5
    DEPLOYED = 6
    RETIRED = 7
    BROKEN = 8
    DEPLOYING = 9
    ALLOCATED = 10
    FAILED_DEPLOYMENT = 11
    RELEASING = 12
    FAILED_RELEASING = 13
    DISK_ERASING = 14
    FAILED_DISK_ERASING = 15
    RESCUE_MODE = 16
    ENTERING_RESCUE_MODE = 17
    FAILED_ENTERING_RESCUE_MODE = 18
    EXITING_RESCUE_MODE = 19
    FAILED_EXITING_RESCUE_MODE = 20
    TESTING = 21
    FAILED_TESTING = 22

    @property
    def label(self) -> str:
        """Its name, as in ``Failed commissioning``."""
        return self.name.replace("_", " ").capitalize()


class ScriptStatus(IntEnum):
    """How far a script has come on a node, and what it came to: the script's own outcome, never the region's."""

    PENDING = 0
    RUNNING = 1
    PASSED = 2
    FAILED = 3
    TIMEDOUT = 4
    ABORTED = 5
    DEGRADED = 6
    INSTALLING = 7
    FAILED_INSTALLING = 8
    SKIPPED = 9
    APPLYING_NETCONF = 10
    FAILED_APPLYING_NETCONF = 11

    @property
    def label(self) -> str:
        """Its name, as in ``Timed out``."""
        return _SCRIPT_LABELS[self]

    @property
    def is_finished(self) -> bool:
        """Whether nothing more is to come of the script."""
        return self not in UNFINISHED

    @property
    def is_failure(self) -> bool:
        """Whether a run with a script that ended so has failed."""
        return self in FAILURES


_SCRIPT_LABELS: Final = {
    ScriptStatus.PENDING: "Pending",
    ScriptStatus.RUNNING: "Running",
    ScriptStatus.PASSED: "Passed",
    ScriptStatus.FAILED: "Failed",
    ScriptStatus.TIMEDOUT: "Timed out",
    ScriptStatus.ABORTED: "Aborted",
    ScriptStatus.DEGRADED: "Degraded",
    ScriptStatus.INSTALLING: "Installing dependencies",
    ScriptStatus.FAILED_INSTALLING: "Failed installing dependencies",
    ScriptStatus.SKIPPED: "Skipped",
    ScriptStatus.APPLYING_NETCONF: "Applying custom network configuration",
    ScriptStatus.FAILED_APPLYING_NETCONF: "Failed to apply custom network configuration",
}

UNFINISHED: Final = frozenset(
    {ScriptStatus.PENDING, ScriptStatus.RUNNING, ScriptStatus.INSTALLING, ScriptStatus.APPLYING_NETCONF}
)

FAILURES: Final = frozenset(
    {
        ScriptStatus.FAILED, ScriptStatus.TIMEDOUT, ScriptStatus.ABORTED, ScriptStatus.FAILED_INSTALLING,
        ScriptStatus.FAILED_APPLYING_NETCONF,
    }
)  # fmt: skip


_PRECEDENCE: Final = (
    ScriptStatus.RUNNING, ScriptStatus.APPLYING_NETCONF, ScriptStatus.INSTALLING, ScriptStatus.PENDING,
    ScriptStatus.ABORTED, ScriptStatus.FAILED, ScriptStatus.TIMEDOUT, ScriptStatus.FAILED_INSTALLING,
    ScriptStatus.FAILED_APPLYING_NETCONF, ScriptStatus.DEGRADED, ScriptStatus.PASSED, ScriptStatus.SKIPPED,
)  # fmt: skip
assert set(_PRECEDENCE) == set(ScriptStatus), "a status that is in no place would be overlooked"


def status_of_run(statuses: Collection[ScriptStatus]) -> ScriptStatus | None:
    """The status of a run as a whole, whose results have these; None if it has none."""
    return min(statuses, key=_PRECEDENCE.index, default=None)


class ResultType(IntEnum):
    """What a run of scripts, or a script, is for."""

    COMMISSIONING = 0
    INSTALLATION = 1
    TESTING = 2

    @property
    def label(self) -> str:
        """Its name, as in ``Commissioning``."""
        return self.name.capitalize()


class HardwareType(IntEnum):
    """Which hardware a script is about; scripts run in this order, ``NODE`` last."""

    NODE = 0
    CPU = 1
    MEMORY = 2
    STORAGE = 3
    NETWORK = 4


class Parallel(IntEnum):
    """With what a script may run at the same time: with nothing, with its own instances, with anything."""

    DISABLED = 0
    INSTANCE = 1
    ANY = 2
