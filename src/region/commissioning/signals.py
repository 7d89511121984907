"""What did a node say? A signal and a status message, checked, as immutable values; nothing here knows HTTP or SQL."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from enum import Enum
from typing import Any, Final

from attrs import field, frozen


class SignalStatus(Enum):
    """The ``status`` of a signal; with FINAL ones a node says that its run has ended."""

    OK = "OK"
    FAILED = "FAILED"
    WORKING = "WORKING"
    TESTING = "TESTING"
    TIMEDOUT = "TIMEDOUT"
    INSTALLING = "INSTALLING"
    COMMISSIONING = "COMMISSIONING"
    APPLYING_NETCONF = "APPLYING_NETCONF"


OUTPUTS: Final = {"output": "", "stdout": ".out", "stderr": ".err", "result": ".yaml"}
"""The files of a script named NAME: ``NAME``, ``NAME.out``, ``NAME.err`` and ``NAME.yaml``, by what each holds."""


@frozen
class Upload:
    """The files of one script, by what they hold (the keys of :data:`OUTPUTS`), byte for byte."""

    script_name: str
    files: Mapping[str, bytes]


@frozen
class Signal:
    """One ``op=signal``. ``exit_status`` and ``runtime`` (seconds) are None where the node did not say.

    ``uploads`` is in the order of the request, one for each script whose files it carries: usually none or one.
    """

    status: SignalStatus
    message: str = ""
    script_result_id: int | None = None
    script_version_id: int | None = None
    exit_status: int | None = None
    runtime: float | None = None
    name: str = ""
    power_type: str = ""
    power_parameters: Mapping[str, Any] = field(factory=dict)
    uploads: tuple[Upload, ...] = ()

    @property
    def digest(self) -> str:
        """The sha256 of everything that it says, as 64 hexadecimal digits: two that are equal are one."""
        hashed = hashlib.sha256()

        def add(*values: bytes) -> None:
            for value in values:
                hashed.update(len(value).to_bytes(8, "big"))
                hashed.update(value)

        said = (
            self.status.value, self.message, self.script_result_id, self.script_version_id, self.exit_status,
            self.runtime, self.name, self.power_type, sorted(self.power_parameters.items()),
        )  # fmt: skip
        add(repr(said).encode("utf-8", "backslashreplace"))
        for upload in self.uploads:
            add(upload.script_name.encode("utf-8", "backslashreplace"))
            for kind in sorted(upload.files):
                add(kind.encode(), upload.files[kind])
        return hashed.hexdigest()


@frozen
class MessageFile:
    """A file that came with a status message; ``result`` is an exit status, if the node said one."""

    path: str
    content: bytes
    result: int | None = None


@frozen
class StatusMessage:
    """One event of cloud-init's (or curtin's) reporting. ``timestamp`` is in seconds since the epoch, by the node."""

    event_type: str
    origin: str
    name: str
    description: str
    timestamp: float
    result: str = ""
    files: tuple[MessageFile, ...] = ()

    @property
    def is_top_level(self) -> bool:
        """Whether it tells of a stage as a whole."""
        return "/" not in self.name
