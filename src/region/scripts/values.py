"""What is a script? Immutable values, as they are stored; and how one that cannot be is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from attrs import field, frozen

from region.nodes.statuses import HardwareType, Parallel, ResultType


class ScriptInvalid(ValueError):
    """A script cannot be as given; ``messages`` says for each field what is wrong with it."""

    def __init__(self, messages: Mapping[str, Sequence[str]]) -> None:
        self.messages = {name: tuple(found) for name, found in messages.items()}
        super().__init__("; ".join(f"{name}: {' '.join(found)}" for name, found in self.messages.items()))


class NoSuchScript(LookupError):
    """There is no script, or no version of one, that is named so (any more)."""


class ScriptProtected(Exception):
    """A script cannot be changed or deleted, for a reason that is not in the request: it is built in, or in use."""


@frozen
class ScriptFields:
    """Everything about a script but its content.

    ``parameters`` are definitions (:mod:`region.scripts.parameters`); ``packages`` are lists by ``apt``, ``snap`` and
    ``url``; ``results`` says what the results mean, for people; ``timeout_seconds`` 0 means none.
    """

    name: str
    title: str = ""
    description: str = ""
    tags: tuple[str, ...] = ()
    script_type: ResultType = ResultType.TESTING
    hardware_type: HardwareType = HardwareType.NODE
    parallel: Parallel = Parallel.DISABLED
    parameters: Mapping[str, Mapping[str, Any]] = field(factory=dict)
    packages: Mapping[str, Sequence[Any]] = field(factory=dict)
    results: Any = field(factory=dict)
    timeout_seconds: int = 0
    destructive: bool = False
    may_reboot: bool = False


@frozen
class Script:
    """A script as it is stored, without its content. ``version_id`` is its newest version's."""

    id: int
    fields: ScriptFields
    builtin: bool
    version_id: int
    created: datetime
    updated: datetime

    @property
    def name(self) -> str:
        """What it is called, here and on the node."""
        return self.fields.name


@frozen
class ScriptVersion:
    """One of the contents that a script has had. ``number`` counts from 1; ``content`` is None where not asked for."""

    id: int
    number: int
    comment: str
    created: datetime
    content: bytes | None = field(default=None, repr=lambda value: f"<{len(value or b'')} bytes>")
