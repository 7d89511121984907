"""Whatever happens while images change, in whatever order, nobody sees anything but whole, published images.

A hypothesis state machine over :mod:`tests.world`: the real region and racks, a real database and real files; what
hypothesis decides is what happens, and which of all that is under way goes on next.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from hypothesis.strategies import booleans, integers, sampled_from
from twisted.trial.unittest import SynchronousTestCase

from tests.database import Server
from tests.examples import SOAK
from tests.streams import new_version
from tests.world.checks import Checker
from tests.world.world import CHANGES, NARROW, TARGETS, UNHEARD_OF, WIDE, World

EXAMPLES = 12
STEPS = 40
MOST_RACKS = 3
PHASES = [phase for phase in Phase if phase is not Phase.shrink or os.environ.get("STANCHION_SHRINK")]
"""Finding the smallest example of a violation takes minutes, so that is done when somebody asks for it."""

numbers = integers(0, 1)
seeds = integers(0, 2**32 - 1)


def event(**strategies: Any) -> Callable[[Callable[..., None]], Any]:
    """A rule, after which some of what is under way goes on before the next."""

    def decorate(happen: Callable[..., None]) -> Any:
        def happens(self: Truth, after: int, seed: int, **arguments: Any) -> None:
            happen(self, **arguments)
            self.world.go(after, seed)

        happens.__name__ = happen.__name__
        return rule(after=sampled_from([0, 4, 20, 80, 300]), seed=seeds, **strategies)(happens)

    return decorate


class Truth(RuleBasedStateMachine):
    """What may happen, and that all is well after each of it."""

    root: Path

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(dir=Truth.root))
        self.server = Server.instance()
        self.name = self.server.make_database()
        self.world = World(self.server.dsn_of(self.name), self.directory)
        self.checker = Checker(self.world)

    def rack(self, number: int) -> str:
        """One of the racks."""
        racks = sorted(self.world.racks)
        return racks[number % len(racks)]

    is_up = precondition(lambda self: self.world.region is not None)
    has_racks = precondition(lambda self: bool(self.world.racks))

    @initialize(racks=integers(0, 3), settled=sampled_from([True, True, False]))
    def begin(self, racks: int, settled: bool) -> None:
        for _ in range(racks):
            self.world.join_rack()
        if settled:
            self.world.request_import()
            self.world.settle()
            for system_id in self.world.racks:
                self.world.link_rack(system_id)
            self.world.settle()

    # Time

    @rule(count=sampled_from([1, 10, 100, 1000]), seed=seeds)
    def go(self, count: int, seed: int) -> None:
        self.world.go(count, seed)

    @rule(seconds=sampled_from([0.5, 2.0, 5.0, 16.0, 60.0, 901.0]))
    def wait(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule()
    def settle(self) -> None:
        self.world.settle()

    # Upstream

    @event(number=numbers, how=sampled_from(CHANGES), product=integers(0, 2))
    def change_upstream(self, number: int, how, product: int) -> None:
        self.world.change_upstream(number, how, product)

    @event(number=numbers, product=integers(0, 2))
    def list_again(self, number: int, product: int) -> None:
        self.world.list_again(number, product)

    @event(number=numbers, how=sampled_from(["gone", "garbage", "document gone", "document garbage"]))
    def break_upstream(self, number: int, how: str) -> None:
        self.world.break_upstream(number, how)

    @event(number=numbers)
    def mend_upstream(self, number: int) -> None:
        self.world.mend_upstream(number)

    # The region

    @is_up
    @event()
    def request_import(self) -> None:
        self.world.request_import()

    @is_up
    @event(number=numbers, how=sampled_from(CHANGES), product=integers(0, 2))
    def publish(self, number: int, how, product: int) -> None:
        self.world.change_upstream(number, how, product)
        self.world.request_import()

    @is_up
    @event(number=numbers, product=integers(0, 2), how=sampled_from([None, *CHANGES]))
    def publish_at_once(self, number: int, product: int, how) -> None:
        self.world.change_upstream(number, how or new_version, product)
        self.world.import_at_once()

    @is_up
    @event()
    def cancel_import(self) -> None:
        self.world.cancel_import()

    @is_up
    @event(number=numbers, is_wanted=sampled_from([True, True, False]), selection=sampled_from([NARROW, WIDE]))
    def change_source(self, number: int, is_wanted: bool, selection) -> None:
        self.world.change_source(number, is_wanted=is_wanted, selection=selection)

    @is_up
    @event()
    def stop_region(self) -> None:
        self.world.stop_region()

    @precondition(lambda self: self.world.region is None)
    @event()
    def start_region(self) -> None:
        self.world.start_region()

    @is_up
    @event()
    def restart_region(self) -> None:
        self.world.stop_region()
        self.world.start_region()

    # Racks

    @is_up
    @precondition(lambda self: len(self.world.racks) < MOST_RACKS)
    @event()
    def join(self) -> None:
        self.world.join_rack()

    @is_up
    @has_racks
    @event(number=numbers)
    def leave(self, number: int) -> None:
        self.world.leave_rack(self.rack(number))

    @has_racks
    @event(number=integers(0, 2))
    def restart(self, number: int) -> None:
        self.world.restart_rack(self.rack(number))

    @is_up
    @has_racks
    @event()
    def link(self) -> None:
        for system_id in sorted(self.world.racks):
            self.world.link_rack(system_id)

    @has_racks
    @event(number=integers(0, 2))
    def cut(self, number: int) -> None:
        self.world.cut_rack(self.rack(number))

    @has_racks
    @event(number=integers(0, 2), stalled=booleans())
    def stall(self, number: int, stalled: bool) -> None:
        self.world.stall_rack(self.rack(number), stalled)

    @has_racks
    @event(number=integers(0, 2))
    def look_again(self, number: int) -> None:
        self.world.racks[self.rack(number)].look_again()

    @has_racks
    @event(number=integers(0, 2))
    def let_a_rack_go_on(self, number: int) -> None:
        self.world.turns.settle(self.rack(number))

    @has_racks
    @event(number=integers(0, 2))
    def lease(self, number: int) -> None:
        self.world.lease(self.rack(number))

    # Clients

    @is_up
    @event(release=sampled_from([None, *TARGETS, UNHEARD_OF]), policy=sampled_from(["any", "all"]))
    def ask(self, release, policy: str) -> None:
        self.world.ask(release, policy)

    @is_up
    @has_racks
    @event(release=sampled_from(TARGETS), number=integers(0, 2))
    def ask_of_one_rack(self, release, number: int) -> None:
        self.world.ask(release, rack=self.rack(number))

    @is_up
    @event()
    def read(self) -> None:
        self.world.read()

    # What must be

    @invariant()
    def all_is_well(self) -> None:
        self.checker.check()

    def teardown(self) -> None:
        try:
            if not self.world.failures:
                self.world.recover()
                self.checker.check()
                self.checker.converged()
        finally:
            self.world.close()
            self.server.drop_database(self.name)
            shutil.rmtree(self.directory)


class TruthUnderChange(SynchronousTestCase):
    def test_in_any_order_of_events_nobody_sees_but_whole_published_images(self) -> None:
        self.patch(os, "fsync", lambda descriptor: None)
        Truth.root = Path(self.mktemp()).absolute()
        Truth.root.mkdir(parents=True)
        try:
            run_state_machine_as_test(
                Truth,
                settings=settings(
                    deadline=None, max_examples=EXAMPLES * SOAK, stateful_step_count=STEPS,
                    suppress_health_check=list(HealthCheck), phases=PHASES,
                ),
            )  # fmt: skip
        except Exception as error:
            # What had happened, step by step, is in notes, which trial does not show.
            raise AssertionError("\n".join([str(error), *getattr(error, "__notes__", ())])) from error
        finally:
            # Each was seen as a violation, or is what follows from one.
            self.flushLoggedErrors()
