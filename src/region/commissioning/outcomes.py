"""What does a script say of itself, in the ``result`` that it may leave (YAML, as ``NAME.yaml``)?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import yaml

from region.nodes.findings import OutputUnusable
from region.nodes.statuses import ScriptStatus

MAX_BYTES: Final = 64 << 10
"""Bytes of a result that are looked into: reading YAML is slow."""

STATUSES: Final[Mapping[str, ScriptStatus]] = {
    "passed": ScriptStatus.PASSED,
    "failed": ScriptStatus.FAILED,
    "degraded": ScriptStatus.DEGRADED,
    "timedout": ScriptStatus.TIMEDOUT,
    "skipped": ScriptStatus.SKIPPED,
}


class OutcomeInvalid(OutputUnusable):
    """The result of a script is not what the format asks for; the text says what is wrong."""


def read_outcome(data: bytes) -> ScriptStatus | None:
    """The status that ``data`` gives, if any.

    :raises OutcomeInvalid: if it is no YAML object, or its ``status`` is none that there is.
    """
    if len(data) > MAX_BYTES:
        raise OutcomeInvalid(f"the script's result has {len(data)} bytes; at most {MAX_BYTES} are looked into")
    try:
        # This loader knows text alone, and no merge keys, with which a few lines are made to fill the memory; and it is
        # not the one in C, which a deep nesting crashes.
        document = yaml.load(data, Loader=yaml.BaseLoader)  # even safer than the one called so
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise OutcomeInvalid(f"the script's result is not YAML: {' '.join(str(error).split())[:300]}") from error
    if document is None:
        return None
    if not isinstance(document, dict):
        raise OutcomeInvalid(f"the script's result is {type(document).__name__} and not an object of names and values")
    status = document.get("status")
    if status is None or status == "":
        return None
    if not isinstance(status, str) or status not in STATUSES:
        # A list is told by its type: written out, one that is made of aliases of aliases would fill the memory.
        shown = repr(status[:40]) if isinstance(status, str) else f"a {type(status).__name__}"
        raise OutcomeInvalid(f"the script's result has the status {shown}, and not {', '.join(STATUSES)}")
    return STATUSES[status]
