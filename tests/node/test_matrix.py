"""Whatever goes wrong between the runner and the region, on whichever request and however often: all scripts run, every
result is there once or named as undelivered, there is one final signal, and the heart beats on.

``STANCHION_SOAK=16`` tries every combination; less tries an even part of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from tests.examples import SOAK
from tests.node.hostile import CREDENTIALS_PARTS, FAULTS, KINDS, Fault, HostileRegion
from tests.node.runs import HEARTBEAT, INDEX, LABELS, PATIENCE, SCRIPT_SECONDS, Run, make_run
from tests.node.virtual import VirtualClock

MOMENTS: dict[str, Callable[[int], bool]] = {
    "once": lambda number: number == 1,
    "three times": lambda number: number <= 3,
    "from the second on": lambda number: number >= 2,
    "always": lambda number: True,
}
ANY = "any"
SLOWEST_REQUEST = 120.0
PARTS = 16
"""One in so many combinations is tried when not soaking."""

CELLS = tuple(itertools.product(FAULTS, (*KINDS, ANY), MOMENTS))


def cells() -> list[tuple[int, tuple[Fault, str, str]]]:
    """Those that are tried, with their numbers: every fault, every kind and every moment is among them."""
    parts = max(PARTS // SOAK, 1)
    return [(number, cell) for number, cell in enumerate(CELLS) if (number + number // len(MOMENTS)) % parts == 0]


class MatrixTests(SynchronousTestCase):
    def run_one(self, fault: Fault, kind: str, moment: str) -> tuple[Run, int]:
        clock = VirtualClock()
        region = HostileRegion(
            clock, INDEX, fault, lambda its, number: kind in (its, ANY) and MOMENTS[moment](number)
        )  # fmt: skip
        url = region.start()
        self.addCleanup(region.close)
        run = make_run(region, url, self.mktemp())
        return run, run.runner.run()

    def check(self, fault: Fault, kind: str, moment: str) -> None:
        run, status = self.run_one(fault, kind, moment)
        region, text = run.region, run.text
        # All of it is kept for who looks into a failure; the end is shown.
        Path(self.mktemp()).write_text(text)
        shown = "\n" + "\n".join(run.lines[-12:])
        is_lasting = moment in ("from the second on", "always") and fault.name != "401 with a skewed Date"
        is_fetched = not (is_lasting and moment == "always" and kind in ("fetch", ANY))
        with self.subTest("scripts"):
            self.assertEqual(sorted(run.scripts.ran), sorted(LABELS) if is_fetched else [], shown)
            self.assertEqual(len(run.scripts.installed), 2 if is_fetched else 0)
        with self.subTest("results"):
            for number, label in enumerate(LABELS, 1):
                came = region.results.get(number, set())
                self.assertLessEqual(len(came), 1, f"{label} came as different results: {came}")
                if not came and is_fetched:
                    self.assertIn(f"the result of {label} is NOT delivered", text)
                for body in came:
                    self.assertIn(f"what {label} prints".encode(), body)
        with self.subTest("final signal"):
            said = {line.rpartition("final signal ")[2] for line in run.lines if "summary:" in line}
            self.assertEqual(len(said), 1, shown)
            self.assertLessEqual(len(region.finals), 1)
            if not region.finals:
                self.assertIn("the final signal", "".join(line for line in run.lines if "NOT delivered" in line))
            lost = [line for line in run.lines if "is NOT delivered" in line]
            before = [line for line in lost if "the final signal" not in line]
            self.assertEqual(said, {"FAILED" if before or not is_fetched else "OK"}, shown)
            self.assertEqual(status, 0 if said == {"OK"} and not lost else 1)
        with self.subTest("heartbeats"):
            beats = [0.0, *(when for its, when in region.requests if its == "heartbeat"), region.clock.now()]
            longest = max(after - before for before, after in itertools.pairwise(beats))
            self.assertLessEqual(longest, 2 * HEARTBEAT + 2 * SLOWEST_REQUEST, shown)
        with self.subTest("time"):
            budget = len(LABELS) * SCRIPT_SECONDS + 4 * PATIENCE + 10 * SLOWEST_REQUEST
            self.assertLessEqual(region.clock.now(), budget)
        for secret in CREDENTIALS_PARTS:
            self.assertNotIn(secret, text)

    def test_what_is_tried_has_every_fault_every_kind_and_every_moment(self) -> None:
        chosen = [cell for _, cell in cells()]
        for place, everything in enumerate((FAULTS, (*KINDS, ANY), MOMENTS)):
            self.assertEqual({cell[place] for cell in chosen}, set(everything))

    def test_when_nothing_goes_wrong_each_thing_is_told_once_and_nothing_is_warned_of(self) -> None:
        run, status = self.run_one(Fault("none"), "", "once")
        self.assertEqual(status, 0)
        self.assertEqual([line for line in run.lines if not line.startswith("info")], [])
        self.assertEqual(run.region.finals, {("OK", "6 scripts passed")})
        self.assertEqual(
            {kind: count for kind, count in run.region.counts.items() if kind != "heartbeat"},
            {"fetch": 1, "fetch tests": 1, "installing": 1, "working": 6, "result": 6, "testing": 1, "final": 1},
        )  # fmt: skip
        self.assertGreaterEqual(run.region.counts["heartbeat"], 6)
        self.assertIn("running", "".join(run.region.heartbeats))


class OutageTests(SynchronousTestCase):
    def test_ten_minutes_without_a_region_delay_no_script_and_lose_nothing(self) -> None:
        for fault in FAULTS:
            if fault.is_final or fault.name == "401 with a skewed Date":
                continue
            clock = VirtualClock()
            region = HostileRegion(clock, INDEX, fault)
            region.is_faulty = lambda kind, number, clock=clock: 60 <= clock.now() < 660  # type: ignore[misc]
            url = region.start()
            run = make_run(region, url, self.mktemp())
            status = run.runner.run()
            region.close()
            shown = "\n".join([fault.name, *run.lines[-12:]])
            self.assertEqual(status, 0, shown)
            self.assertEqual({number: len(bodies) for number, bodies in region.results.items()},
                             dict.fromkeys(range(1, 7), 1), shown)  # fmt: skip
            self.assertEqual(region.finals, {("OK", "6 scripts passed")}, shown)
            self.assertEqual(len(run.scripts.ran), 6)


def _add(number: int, cell: tuple[Fault, str, str]) -> None:
    fault, kind, moment = cell

    def test(self: Any) -> None:
        self.check(fault, kind, moment)

    name = f"test_{number:03}_{fault.name} at {kind} {moment}".replace(" ", "_").replace("-", "_")
    test.__name__ = name
    setattr(MatrixTests, name, test)


for _number, _cell in cells():
    _add(_number, _cell)
