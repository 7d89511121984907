"""Whole runs of the runner for tests: on a virtual clock, against a region that goes wrong, with scripts that are
functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attrs import define, field

from node.clock import Event
from node.console import Console
from node.runner import Options, Runner
from node.running import Ended, Outputs
from tests.node.hostile import CREDENTIALS_PARTS, HostileRegion, WatchedClient
from tests.node.virtual import VirtualClock

PATIENCE = 900.0
HEARTBEAT = 60.0
SCRIPT_SECONDS = 90.0


def entry(number: int, name: str, kind: str = "commissioning", **changes: Any) -> dict[str, Any]:
    """A script of the region's index."""
    return {
        "name": name, "path": f"{kind}/{name}", "script_result_id": number, "script_version_id": 100 + number,
        "timeout_seconds": 600, "parallel": 0, "hardware_type": 0, "parameters": {}, "packages": {},
        "has_started": False, "may_reboot": False, **changes,
    }  # fmt: skip


INDEX = {
    "commissioning_scripts": [
        entry(1, "10-first"),
        entry(2, "20-packages", packages={"apt": ["some-package"]}),
        entry(3, "30-third"),
    ],
    "testing_scripts": [
        entry(4, "smart", "testing", parallel=1),
        entry(5, "smart", "testing", parallel=1),
        entry(6, "memory", "testing", parallel=2),
    ],
}
LABELS = ("10-first.1", "20-packages.2", "30-third.3", "smart.4", "smart.5", "memory.6")


@define
class Scripts:
    """Runs nothing: each script takes a while on the clock and passes, unless ``does`` says otherwise."""

    clock: VirtualClock
    does: Mapping[str, Callable[[Outputs], int]] = field(factory=dict)
    ran: list[str] = field(factory=list)
    installed: list[list[str]] = field(factory=list)

    def execute(
        self,
        command: list[str],
        outputs: Outputs,
        environment: Mapping[str, str],
        where: str,
        limit: float,
        stop: Event,
    ) -> Ended:
        begun = self.clock.now()
        if command[0] == "apt-get":
            self.installed.append(command)
            return Ended(0, 0.0)
        label = where.rpartition("/")[2]
        self.ran.append(label)
        with open(outputs.combined, "w") as combined, open(outputs.stdout, "w") as stdout:
            for file in (combined, stdout):
                file.write(f"what {label} prints\n")
        status = self.does[label](outputs) if label in self.does else 0
        stop.wait(SCRIPT_SECONDS)
        return Ended(143 if stop.is_set() else status, self.clock.now() - begun, stopped=stop.is_set())


@define
class Run:
    """One start of a runner; ``lines`` is what a person sees."""

    region: HostileRegion
    scripts: Scripts
    runner: Runner
    lines: list[str]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def make_run(region: HostileRegion, url: str, directory: str, scripts: Scripts | None = None, **options: Any) -> Run:
    """A runner for ``region``, not yet started."""
    lines: list[str] = []
    console = Console([lambda level, line: lines.append(f"{level} {line}")], CREDENTIALS_PARTS)
    client = WatchedClient(region, url, console.warn)
    scripts = scripts or Scripts(region.clock)
    runner = Runner(
        client, directory, console, Options(HEARTBEAT, PATIENCE), region.clock, lambda: 0.5, scripts.execute, **options
    )
    return Run(region, scripts, runner, lines)
