"""``python -m tests.soak SECONDS``: images that change in every order of events, clients that read meanwhile, the state
machines of imports, syncs, uploads and answers each by itself, crashes at every step of an import and a sync, and
hostile and broken input for the link between region and rack, for as long as one likes.

Runs the tests that make their input up (from other random numbers each time), the matrix of faults, and the crashes
(at all steps, of which ``make test`` takes some), over and over, with many more examples than ``make test`` has. Prints
how many examples there were, what was read and checked in them, how many crashes and faults were injected, and what
went wrong; ends with status 1 if anything did.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

from hypothesis.statistics import collector
from twisted.logger import globalLogBeginner
from twisted.trial.reporter import TestResult
from twisted.trial.runner import TestLoader

from tests.crashes import TALLY as CRASHES

MODULES: Final = (
    "tests.test_truth", "tests.test_readers",
    "tests.region.test_jobs.LifeMachineTests", "tests.rack.test_sync.TestAnyOrder", "tests.region.test_receiving",
    "tests.region.test_combine.Properties", "tests.region.test_answers_whole_path.WholePath",
    "tests.rpc.test_bad_input", "tests.rpc.test_fault_matrix", "tests.rpc.test_boxes", "tests.rpc.test_arguments",
    "tests.rpc.test_certificates", "tests.rpc.test_gate", "tests.rpc.test_versions", "tests.rack.test_regions",
    "tests.test_state_crashes", "tests.rack.test_crashes", "tests.region.test_import_crashes",
    "tests.system.test_crashes.CrashTests",
)  # fmt: skip
"""Tests of one process at a time, which run in this one. What some of them check per example is counted in
:data:`tests.examples.CHECKED`."""

VARIABLE: Final = "STANCHION_SOAK"
"""What :mod:`tests.examples` looks at, when it is imported: which is not before the tests are loaded."""

FACTOR: Final = 5
"""How many times as many examples as in ``make test`` are tried in a row, unless the environment says otherwise."""


class Tally:
    """What was tried so far; ``examples`` by test."""

    def __init__(self) -> None:
        self.running = ""
        self.rounds = 0
        self.tests = 0
        self.examples: Counter[str] = Counter()
        self.violations: dict[str, str] = {}

    def note(self, statistics: Any) -> None:
        """Take what hypothesis says of a test that has ended."""
        for phase, told in statistics.items():
            if phase.endswith("-phase"):
                self.examples[self.running] += len(told["test-cases"])

    def run(self, test: Any) -> None:
        """Run one test."""
        self.running = test.id()
        self.tests += 1
        result = TestResult()
        with collector.with_value(self.note):  # type: ignore[arg-type]  # the stub knows only that there is none
            test.run(result)
        for _, problem in (*result.failures, *result.errors):
            text = problem if isinstance(problem, str) else problem.getTraceback()
            if self.running not in self.violations:
                self.violations[self.running] = text
                sys.stderr.write(f"{self.running}\n{text}\n")  # at once: it may be long until the end

    def lines(self, seconds: float) -> Iterator[str]:
        """The summary."""
        yield from (f"{count:>10} examples  {name}" for name, count in sorted(self.examples.items()))
        total = sum(self.examples.values())
        yield f"{total:>10} examples in all, {self.tests} tests in {self.rounds} rounds, {seconds:.0f} s"
        yield from (f"{count:>10} {what} checked" for what, count in sorted(checked().items()))
        yield from CRASHES.lines()
        yield f"{len(self.violations):>10} violations"
        yield from (f"{'':>10} {name}" for name in self.violations)


def checked() -> Mapping[str, int]:
    """What was checked so far. Imported only now: :data:`VARIABLE` is set before anything looks at it."""
    from tests.examples import CHECKED

    return CHECKED


def _tests(suite: Any) -> Iterator[Any]:
    try:
        parts = iter(suite)
    except TypeError:
        yield suite
        return
    for part in parts:
        yield from _tests(part)


def soak(seconds: float, modules: tuple[str, ...] = MODULES) -> Tally:
    """Run everything again and again until ``seconds`` are over, each test at least once."""
    tally = Tally()
    # The same objects each time: hypothesis takes a test of which there are several for one that is not reliable.
    tests = list(_tests(TestLoader().loadByNames(list(modules))))
    begun = time.monotonic()
    while not tally.rounds or time.monotonic() < begun + seconds:
        tally.rounds += 1
        for test in tests:
            if tally.rounds > 1 and time.monotonic() >= begun + seconds:
                break
            tally.run(test)
        sys.stderr.write(
            f"round {tally.rounds}: {sum(tally.examples.values())} examples, {len(tally.violations)} violations\n"
        )
    return tally


def main() -> int:
    """Soak as the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("seconds", type=float, nargs="?", default=600.0, help="how long (default: 600)")
    arguments = parser.parse_args()
    os.environ.setdefault(VARIABLE, str(FACTOR))
    # What the tests provoke is logged; what went wrong is in the tally.
    globalLogBeginner.beginLoggingTo([], discardBuffer=True, redirectStandardIO=False)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="stanchion-soak-", dir="/var/tmp") as scratch:
        os.chdir(scratch)
        tally = soak(arguments.seconds)
        os.chdir("/")
    sys.stdout.write("\n".join(tally.lines(time.monotonic() - begun)) + "\n")
    return 1 if tally.violations else 0


if __name__ == "__main__":
    sys.exit(main())
