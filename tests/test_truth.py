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
from hypothesis.strategies import booleans, integers, lists, sampled_from
from twisted.trial.unittest import SynchronousTestCase

from tests.database import Server
from tests.examples import SOAK
from tests.streams import new_version
from tests.world.checks import Checker
from tests.world.database import make_database
from tests.world.operators import UNACCEPTABLE
from tests.world.recovery import end_faults, recover
from tests.world.region import REGION, SECOND
from tests.world.spoiling import HOW
from tests.world.upstream import CHANGES, EVERYTHING, FORGERIES, NARROW, UPLOADED, WIDE
from tests.world.world import World

EXAMPLES = 14
EXAMPLES_OF_TWO = 7
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
    two = False

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(dir=Truth.root))
        self.server = Server.instance()
        self.name = make_database(self.server)
        self.world = World(self.server.dsn_of(self.name), self.directory, two=self.two)
        self.checker = Checker(self.world)

    def rack(self, number: int) -> str:
        """One of the racks."""
        racks = sorted(self.world.racks)
        return racks[number % len(racks)]

    is_up = precondition(lambda self: self.world.region is not None)
    has_racks = precondition(lambda self: bool(self.world.racks))

    @initialize(racks=integers(0, 3), settled=sampled_from([True, True, False]))
    def begin(self, racks: int, settled: bool) -> None:
        if self.two:
            self.world.start_second()
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
        self.world.upstreams[number].list_again(product)

    @event(number=numbers, how=sampled_from(["gone", "garbage", "document gone", "document garbage"]))
    def break_upstream(self, number: int, how: str) -> None:
        self.world.upstreams[number].break_documents(how)

    @event(number=numbers)
    def mend_upstream(self, number: int) -> None:
        self.world.upstreams[number].write()

    # Signatures

    @event(how=sampled_from(FORGERIES), product=integers(0, 2), is_imported=booleans())
    def forge(self, how: str, product: int, is_imported: bool) -> None:
        self.world.upstreams[-1].forge(how, product)
        if is_imported and self.world.region is not None:
            self.world.request_import()

    @event(number=numbers)
    def sign_with(self, number: int) -> None:
        self.world.upstreams[-1].sign_with(number)

    @event(number=numbers)
    def trust_key(self, number: int) -> None:
        self.world.trust_key(number)

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
    @event(kill=booleans())
    def stop_region(self, kill: bool) -> None:
        self.world.stop_region(kill=kill)

    @precondition(lambda self: self.world.region is None)
    @event()
    def start_region(self) -> None:
        self.world.start_region()

    @is_up
    @event(kill=booleans())
    def restart_region(self, kill: bool) -> None:
        self.world.stop_region(kill=kill)
        self.world.start_region()

    # Uploads

    @is_up
    @event(image=sampled_from(UPLOADED), number=numbers, is_honest=sampled_from([True, True, True, False]))
    def upload(self, image, number: int, is_honest: bool) -> None:
        self.world.operators.upload(image, number, is_honest=is_honest)

    @is_up
    @event(image=sampled_from(UPLOADED), before=sampled_from([10, 20, 40, 80]), order=seeds)
    def upload_while_importing(self, image, before: int, order: int) -> None:
        self.world.upload_while_importing(image, before, order)

    @is_up
    @event(what=sampled_from(UNACCEPTABLE))
    def upload_unacceptable(self, what) -> None:
        self.world.operators.upload_unacceptable(what)

    @is_up
    @event(image=sampled_from(UPLOADED))
    def delete_uploaded(self, image) -> None:
        self.world.operators.delete(image)

    @is_up
    @event(number=integers(0, 9))
    def delete_imported(self, number: int) -> None:
        self.world.operators.delete_imported(number)

    @is_up
    @event()
    def import_now(self) -> None:
        self.world.operators.import_now()

    # Disks

    @event(how=sampled_from(HOW), number=integers(0, 30))
    def spoil_a_file_of_the_region(self, how: str, number: int) -> None:
        self.world.spoil("", how, number)

    @is_up
    @event()
    def verify_the_region(self) -> None:
        self.world.verify("")

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

    @is_up
    @has_racks
    @event(number=numbers, how=sampled_from(["revoke", "forget"]))
    def dismiss(self, number: int, how: str) -> None:
        self.world.dismiss_rack(self.rack(number), how)

    @precondition(lambda self: bool(self.world.strangers))
    @event(number=integers(0, 2))
    def link_stranger(self, number: int) -> None:
        self.world.link_stranger(number)

    @precondition(lambda self: bool(self.world.strangers) and self.world.region is not None)
    @event(number=integers(0, 2), how=sampled_from(["list_boot_images", "import_boot_images"]))
    def ask_of_a_stranger(self, number: int, how: str) -> None:
        strangers = sorted(self.world.strangers)
        self.world.operators.ask_of_revoked(self.world.strangers[strangers[number % len(strangers)]], how)

    @is_up
    @has_racks
    @event(number=integers(0, 2), name=sampled_from(["left", "right", "rack-rack01", "rack-rack02"]))
    def rename(self, number: int, name: str) -> None:
        self.world.operators.rename(self.world.racks[self.rack(number)], name)

    @has_racks
    @event(number=integers(0, 2), how=sampled_from(HOW), which=integers(0, 30))
    def spoil_a_file_of_a_rack(self, number: int, how: str, which: int) -> None:
        self.world.spoil(self.rack(number), how, which)

    @has_racks
    @event(number=integers(0, 2), which=integers(0, 30))
    def part_a_snapshot(self, number: int, which: int) -> None:
        self.world.part_snapshot(self.rack(number), which)

    @has_racks
    @event(number=integers(0, 2))
    def verify_a_rack(self, number: int) -> None:
        self.world.verify(self.rack(number))

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
    @event(release=sampled_from([None, *EVERYTHING]), policy=sampled_from(["any", "all"]))
    def ask(self, release, policy: str) -> None:
        self.world.ask(release, policy)

    @is_up
    @has_racks
    @event(release=sampled_from([None, *EVERYTHING]), numbers=lists(integers(0, 2), min_size=1, max_size=3),
           by_name=booleans(), policy=sampled_from(["any", "all"]), apart=booleans())  # fmt: skip
    def ask_of_racks(self, release, numbers: list[int], by_name: bool, policy: str, apart: bool) -> None:
        racks = [self.world.racks[self.rack(number)] for number in numbers]
        called = [rack.name if by_name else rack.system_id for rack in racks]
        self.world.ask(release, policy, *called, apart=apart)

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
                end_faults(self.world)
                self.checker.check()
                self.checker.noticed()
                recover(self.world)
                self.checker.check()
                self.checker.converged()
        finally:
            self.world.close()
            self.server.drop_database(self.name)
            shutil.rmtree(self.directory)


class TruthOfTwo(Truth):
    """The same with two region processes over one database, which racks link with and clients ask both."""

    two = True
    has_second = precondition(lambda self: self.world.second is not None)
    has_no_second = precondition(lambda self: self.world.second is None)

    @has_no_second
    @event()
    def start_second(self) -> None:
        self.world.start_second()

    @has_second
    @event(kill=booleans())
    def stop_second(self, kill: bool) -> None:
        self.world.stop_second(kill=kill)

    @has_second
    @event(release=sampled_from([None, *EVERYTHING]), policy=sampled_from(["any", "all"]))
    def ask_the_second(self, release, policy: str) -> None:
        self.world.ask(release, policy, region=self.world.second)

    @has_second
    @Truth.has_racks
    @event(number=integers(0, 2), is_first=booleans())
    def cut_from_one(self, number: int, is_first: bool) -> None:
        self.world.disturbances += 1
        self.world.racks[self.rack(number)].cut_from(REGION if is_first else SECOND)

    @has_second
    @event()
    def import_through_the_second(self) -> None:
        self.world.request_import(self.world.second)

    @has_second
    @event()
    def upload_to_the_second(self) -> None:
        self.world.operators.upload_elsewhere()


class TruthUnderChange(SynchronousTestCase):
    def test_in_any_order_of_events_nobody_sees_but_whole_published_images(self) -> None:
        self.run_machine(Truth, EXAMPLES)

    def test_two_region_processes_over_one_database_say_the_same(self) -> None:
        self.run_machine(TruthOfTwo, EXAMPLES_OF_TWO)

    def run_machine(self, machine: type[Truth], examples: int) -> None:
        self.patch(os, "fsync", lambda descriptor: None)
        Truth.root = Path(self.mktemp()).absolute()
        Truth.root.mkdir(parents=True)
        try:
            run_state_machine_as_test(
                machine,
                settings=settings(
                    deadline=None, max_examples=examples * SOAK, stateful_step_count=STEPS,
                    suppress_health_check=list(HealthCheck), phases=PHASES,
                ),
            )  # fmt: skip
        except Exception as error:
            # What had happened, step by step, is in notes, which trial does not show.
            raise AssertionError("\n".join([str(error), *getattr(error, "__notes__", ())])) from error
        finally:
            # Each was seen as a violation, or is what follows from one.
            self.flushLoggedErrors()
