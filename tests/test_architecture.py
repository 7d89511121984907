"""What docs/architecture.rst says of the states of things is what the code does."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from rack import life
from region.answers.combine import State
from region.api.releases import STATUS
from region.images import job
from rpc import waking

DOCUMENT = (Path(__file__).parents[1] / "docs" / "architecture.rst").read_text("utf-8")


def section(title: str) -> str:
    """The text under a heading."""
    return re.split(r"\n(?=[^\n]+\n-{3,}\n)", DOCUMENT.split(f"\n{title}\n{'-' * len(title)}\n", 1)[1])[0]


def described(module: str) -> dict[str, set[str]]:
    """What follows on each state of the machine in a module, as the document has it."""
    _, text = section("State machines").split(f"(``{module}``)", 1)
    found = {}
    for item in re.findall(r"^\* (.*(?:\n  .*)*)", re.split(r"\n\n(?=[^*\s])", text)[0], re.MULTILINE):
        states, _, following = item.partition("→")
        for state in re.findall("``(.+?)``", states):
            found[state] = set(re.findall("``(.+?)``", following))
    return found


def built(machine: Any) -> dict[str, set[str]]:
    """The same, of a machine."""
    automaton = machine.__automat_automaton__
    found: dict[str, set[str]] = defaultdict(set, {state.name: set() for state in automaton.states()})
    for old, _, new, _ in automaton.allTransitions():
        if old != new:
            found[old.name].add(new.name)
    return dict(found)


class StatesTests(SynchronousTestCase):
    """The tables of states."""

    def test_an_import_is_as_described(self) -> None:
        self.assertEqual(described("region.images.job"), built(job._new_machine))

    def test_a_rack_s_syncing_is_as_described(self) -> None:
        self.assertEqual(described("rack.life"), built(life.Machine))

    def test_waking_is_as_described(self) -> None:
        self.assertEqual(described("rpc.waking"), built(waking.Machine))

    def test_each_state_of_an_answer_is_described_with_its_status(self) -> None:
        rows = re.findall(r"^([a-z-]+)  .*  (\d{3})$", section("Combining"), re.MULTILINE)
        self.assertEqual(dict(rows), {state.value: str(STATUS[state]) for state in State})
        self.assertEqual(len(rows), len(State))
