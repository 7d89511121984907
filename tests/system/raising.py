"""A region in which whatever follows from a signal goes wrong: ``python -m tests.system.raising CONFIG``.

It is the region's own service, but each step of its table raises when it has done all its work: what it wrote has to be
undone, and the failure has to be told.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from attrs import evolve
from twisted.internet import reactor as installed
from twisted.logger import globalLogBeginner

from region import service
from region.commissioning.queue import Work
from region.commissioning.steps import Following, Step, Steps, steps
from region.config import RegionConfig
from region.database import Transaction
from region.nodes.findings import Finding
from rpc.logs import observer
from rpc.notify import Notifier
from rpc.settings import load


class Injected(Exception):
    """What each step raises."""


def raising(following: Following) -> Steps:
    """The table of steps."""
    return {name: _raising(name, step) for name, step in steps(following).items()}


def _raising(name: str, step: Step) -> Step:
    async def apply(transaction: Transaction, work: Work, prepared: Any) -> Sequence[Finding]:
        await step.apply(transaction, work, prepared)
        raise Injected(f"injected into {name}")

    return evolve(step, apply=apply)


def main() -> None:
    """Run until SIGTERM."""
    reactor: Any = installed
    globalLogBeginner.beginLoggingTo([observer()], redirectStandardIO=False)
    service.steps = raising  # type: ignore[attr-defined]  # what composes the region, composes it with these
    region = service.RegionService(load(RegionConfig, sys.argv[1]), reactor, Notifier.from_environment())
    reactor.callWhenRunning(region.startService)
    reactor.addSystemEventTrigger("before", "shutdown", region.stopService)
    reactor.run()


if __name__ == "__main__":
    main()
