"""``python -m tests.system.killing region|rack FILE``: a real daemon that dies where its steps are counted.

It runs ``twistd`` as usual, with :mod:`tests.faults` around what it does to its images and, for a region, around its
statements. When ``FILE.order`` appears, it counts; ``{"at": N, "kill": "self"}`` in it kills the daemon by SIGKILL at
the N-th step from there, ``"postgres"`` the region's PostgreSQL instead. ``FILE.steps`` has a line for each step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from tests.faults import Disk


class Ordered(Disk):
    """The disk of a daemon, with a fault where the order says."""

    def __init__(self, directory: Path, name: str, config: Path) -> None:
        super().__init__(directory / name / "images", stop=self.kill, remembers=False)
        self._order = config.with_name(config.name + ".order")
        self._steps = config.with_name(config.name + ".steps")
        self._postmaster = directory / name / "postgres" / "data" / "postmaster.pid"
        self._victim = "self"
        self._turn = threading.RLock()

    def step(self, kind: str, what: str) -> None:
        with self._turn:
            if not self._order.exists():
                self.armed = False
            elif not self.armed:
                order = json.loads(self._order.read_text())
                self._victim = order["kill"]
                self.arm(order["at"])
            super().step(kind, what)
            if self.armed:
                with self._steps.open("a") as file:
                    file.write(f"{kind} {what}\n")

    def kill(self, what: str) -> bool:
        with self._steps.open("a") as file:
            file.write(f"killed {self._victim} before {what}\n")
        if self._victim == "postgres":
            os.kill(int(self._postmaster.read_text().split()[0]), signal.SIGKILL)
            return True
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("nothing runs after that")


def count_statements(disk: Disk) -> None:
    """Have every statement of the daemon be a step."""
    from region.database.connection import Connection

    run = Connection._run

    def statement(connection: Connection, sql: str, parameters: Any) -> Any:
        disk.step("statement", " ".join(sql.split())[:60])
        return run(connection, sql, parameters)

    setattr(Connection, "_run", statement)  # noqa: B010  # that is what this is for


def main() -> None:
    """Run the daemon."""
    name, config = sys.argv[1], Path(sys.argv[2]).resolve()
    disk = Ordered(config.parent, name, config)
    disk.install(setattr)
    if name == "region":
        count_statements(disk)
    from twisted.scripts.twistd import run

    sys.argv = ["twistd", "-n", "--pidfile=", "--logger", "rpc.logs.observer", name, "--config", str(config)]
    run()


if __name__ == "__main__":
    main()
