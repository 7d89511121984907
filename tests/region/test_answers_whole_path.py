"""From what racks do to the status that a client gets: DESIGN's table, over everything between, in memory.

Nothing is taken out: the racks are asked through :class:`~region.answers.asking.Asker`, and the answers go through
:class:`~region.answers.releases.Releases`, the handlers and HTTP. What should come out is said by a model that is
written from the table alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, cast

from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from region.answers.asking import Asker
from region.answers.combine import OFFERED, State, Target
from region.answers.describing import Describer
from region.answers.published import PublishedView
from region.answers.releases import Releases
from region.api import Api, Authenticator
from region.api.releases import STATUS
from rpc.outcomes import Failed, NotConnected, Outcome, TimedOut
from tests.examples import examples
from tests.region.api_parts import parts_of
from tests.region.fakes import EPOCH, Generations, Keys, Racks, Records, ask_each
from tests.region.inventories import catalogue
from tests.region.web import Connection, Response

TARGETS = [Target("a", "x", "m"), Target("a", "x", "n"), Target("a", "y", "m"), Target("b", "z", "m")]
UNHEARD_OF = Target("c", "w", "m")
NOT_LINKED: Outcome[Any] = NotConnected(EPOCH - 60)
FAILURES: list[Outcome[Any]] = [TimedOut(2.0), Failed("Unhandled", "reference 1"), NOT_LINKED]

Targets = frozenset[Target]


@frozen
class Holding:
    """What a rack holds: some of what a generation lists; generation None is nothing."""

    generation: int | None
    targets: Targets

    @property
    def number(self) -> int:
        return -1 if self.generation is None else self.generation


@frozen
class Life:
    """A rack's life: what it ``first`` answered with, if it ever did (before that it had reported the same), and what
    it does ``now``: it holds something, or it is silent in one way or another."""

    name: str
    first: Holding | None
    now: Holding | Outcome[Any]

    @property
    def holds(self) -> Targets | None:
        """What it answers now, None if it does not."""
        return self.now.targets if isinstance(self.now, Holding) else None

    def silent(self, outcome: Outcome[Any]) -> Life:
        """The same rack, which answered with what it holds, and now does not answer any more."""
        return Life(self.name, self.now, outcome) if isinstance(self.now, Holding) else self


@frozen
class World:
    """What the generations list, the last of which is published, and the racks."""

    generations: tuple[Targets, ...]
    racks: tuple[Life, ...]

    def may_hold(self, rack: Life) -> Targets:
        """What a silent rack may hold, as DESIGN has it."""
        if rack.first is None or rack.first.generation is None:
            return frozenset().union(*self.generations)
        return rack.first.targets.union(*self.generations[rack.first.generation - 1 :])

    @property
    def current(self) -> Targets:
        return self.generations[-1] if self.generations else frozenset()

    def state(self, target: Target, policy: str, racks: Sequence[Life]) -> State:
        """DESIGN's table, row by row, for one target that these racks must serve."""
        if (offered := self.offered(target, policy, racks)) is not None:
            return offered
        known = self.current.union(*(rack.holds if rack.holds is not None else self.may_hold(rack) for rack in racks))
        has_choices = any(self.offered(other, policy, racks) for other in known)
        return State.UNKNOWN if self.generations and has_choices else State.NOTHING_PUBLISHED

    def offered(self, target: Target, policy: str, racks: Sequence[Life]) -> State | None:
        """The state of what a client may choose; None if it is in one of the two last rows."""
        if not racks:
            return State.NO_RACKS
        holders = sum(target in (rack.holds or ()) for rack in racks)
        if holders >= (len(racks) if policy == "all" else 1):
            return State.DEPLOYABLE
        silent = [rack for rack in racks if rack.holds is None]
        if any(target in self.may_hold(rack) for rack in silent):
            return State.UNDETERMINED
        return State.ARRIVING if target in self.current else None


class Region:
    """An API over a world."""

    def __init__(self, world: World, order: Sequence[int] = ()) -> None:
        self.clock = Clock()
        self.clock.advance(EPOCH)
        self.racks = Racks()
        generations = Generations()
        for targets in world.generations:
            generations.publish(catalogue(targets).manifest)
        view = PublishedView(cast(Any, generations))
        describer = Describer(self.racks, self.clock, ask_all=ask_each)
        asker = Asker(self.racks, self.clock, published=view.catalogue, expected=view.current_digest, ask_all=ask_each)
        parts = parts_of(
            releases=Releases(asker, view, self.clock, Records(generations), describer), asker=asker, published=view,
            racks=self.racks, generations=cast(Any, generations),
        )  # fmt: skip
        self.resource = Api(parts, Authenticator(Keys(), self.clock)).resource()
        for rack in world.racks:
            held = rack.first or Holding(None, frozenset())
            link = self.racks.add(rack.name, catalogue(held.targets), held.number)
            if rack.first is None:
                link.outcome = TimedOut(2.0)
        self.get("releases/")  # what each answered first is known from here on
        late: list[Deferred[None]] = []
        for rack in world.racks:
            link = self.racks.links[rack.name]
            link.outcome = None if isinstance(rack.now, Holding) else rack.now
            if isinstance(rack.now, Holding):
                self.racks.add(rack.name, catalogue(rack.now.targets), rack.now.number)
                link = self.racks.links[rack.name]
            elif isinstance(rack.now, NotConnected):
                del self.racks.links[rack.name]
                self.racks.ended[rack.name] = EPOCH - 60
            if order:
                link.pending = Deferred()
                late.append(link.pending)
        if order:
            # They answer in this order, each after all have been asked.
            connection = self.send("releases/")
            for number in order:
                late[number].callback(None)
            for link in self.racks.links.values():
                link.pending = None
            connection.response()

    def send(self, path: str) -> Connection:
        connection = Connection(self.resource, self.clock)
        connection.send("GET", path)
        return connection

    def get(self, path: str) -> Response:
        return self.send(path).response()

    def of(self, target: Target, policy: str = "any", racks: Iterable[str] = ()) -> Response:
        named = "".join(f"&rack={rack}" for rack in racks)
        return self.get(f"releases/{target.name}/?arch={target.arch}&policy={policy}{named}")

    def bodies(self) -> list[tuple[int, bytes]]:
        """Everything that can be asked, and what comes of it."""
        found = [self.get(f"releases/?policy={policy}") for policy in ("any", "all")]
        found += [self.of(target, policy) for policy in ("any", "all") for target in [*TARGETS, UNHEARD_OF]]
        return [(response.status, response.body) for response in found]


@st.composite
def holdings(draw: st.DrawFn, generations: Sequence[Targets]) -> Holding:
    number = draw(st.sampled_from([None, *range(1, len(generations) + 1)]))
    listed = sorted(generations[number - 1]) if number is not None else []
    return Holding(number, draw(st.frozensets(st.sampled_from(listed))) if listed else frozenset())


@st.composite
def worlds(draw: st.DrawFn, least: int = 0) -> World:
    generations = tuple(draw(st.lists(st.frozensets(st.sampled_from(TARGETS)), max_size=3)))
    racks = []
    for name in draw(st.lists(st.sampled_from(["aaaaaa", "bbbbbb", "cccccc"]), unique=True, min_size=least)):
        first = draw(st.none() | holdings(generations))
        racks.append(Life(name, first, draw(holdings(generations) | st.sampled_from(FAILURES))))
    return World(generations, tuple(racks))


some_policy = st.sampled_from(["any", "all"])
modestly = examples(25)


class WholePath(SynchronousTestCase):
    """What holds in every world."""

    def check_refusal(self, response: Response) -> None:
        """A 400 says what there is instead, in the words that clients know."""
        [(field, messages)] = response.json.items()
        self.assertIn(field, ("distro_series", "architecture"))
        self.assertRegex(
            messages[0], rf"\A'[^']+' is not a valid {field}\.  It should be one of: '[^']+'(, '[^']+')*\.\Z"
        )

    @modestly
    @given(worlds(), some_policy, st.data())
    def test_the_status_and_the_state_are_those_of_the_table(self, world, policy, data) -> None:
        region = Region(world)
        named = data.draw(st.lists(st.sampled_from(world.racks), unique=True)) if world.racks else []
        required = named or world.racks
        for target in [*TARGETS, UNHEARD_OF]:
            expected = world.state(target, policy, required)
            response = region.of(target, policy, [rack.name for rack in named])
            self.assertEqual(response.status, STATUS[expected], (target, response.text))
            if expected is State.UNKNOWN:
                self.check_refusal(response)
            else:
                self.assertEqual(response.json["state"], expected.value)
                self.assertGreater(len(response.json["reason"]), 10)
                self.assertEqual(response.headers["Retry-After"] is None, expected is State.DEPLOYABLE)

    def test_when_all_that_racks_hold_has_gone_and_each_holds_something_else_there_is_nothing_to_choose(self) -> None:
        held = [frozenset([target]) for target in TARGETS[:2]]
        racks = [Life(name, None, Holding(1, each)) for name, each in zip(["aaaaaa", "bbbbbb"], held, strict=True)]
        world = World((held[0] | held[1], frozenset()), tuple(racks))
        for target in TARGETS[:2]:
            self.assertEqual(world.state(target, "all", racks), State.NOTHING_PUBLISHED)
            response = Region(world).of(target, "all")
            self.assertEqual((response.status, response.json["state"]), (503, "nothing-published"), response.text)
            self.assertEqual(Region(world).of(target, "any").status, 200)

    @modestly
    @given(worlds(), some_policy)
    def test_what_a_silent_rack_may_hold_is_never_refused(self, world, policy) -> None:
        region = Region(world)
        for rack in world.racks:
            if rack.holds is None:
                for target in world.may_hold(rack):
                    response = region.of(target, policy)
                    self.assertIn(response.status, (200, 503), response.text)
                    self.assertIn(rack.name, response.text)

    @modestly
    @given(worlds(least=1), st.data())
    def test_the_order_in_which_racks_joined_and_answer_does_not_matter(self, world, data) -> None:
        shuffled = data.draw(st.permutations(world.racks))
        order = data.draw(st.permutations(range(len(world.racks))))
        self.assertEqual(Region(world).bodies(), Region(World(world.generations, tuple(shuffled)), order).bodies())

    @modestly
    @given(worlds())
    def test_asking_again_gives_the_same_answers(self, world) -> None:
        region = Region(world)
        self.assertEqual(region.bodies(), region.bodies())

    @modestly
    @given(worlds(least=1), some_policy)
    def test_a_second_rack_that_does_as_the_first_changes_no_status(self, world, policy) -> None:
        twins = tuple(Life(f"{rack.name[1:]}2", rack.first, rack.now) for rack in world.racks)
        once, twice = Region(world), Region(World(world.generations, world.racks + twins))
        for target in [*TARGETS, UNHEARD_OF]:
            self.assertEqual(once.of(target, policy).status, twice.of(target, policy).status)

    @modestly
    @given(worlds(least=1), some_policy, st.sampled_from(FAILURES), st.data())
    def test_a_rack_that_fails_makes_nothing_unknown_and_takes_nothing_from_the_list(
        self, world, policy, failure, data
    ) -> None:
        number = data.draw(st.integers(0, len(world.racks) - 1))
        racks = list(world.racks)
        racks[number] = racks[number].silent(failure)
        before, after = Region(world), Region(World(world.generations, tuple(racks)))
        for target in [*TARGETS, UNHEARD_OF]:
            if world.state(target, policy, world.racks) in OFFERED:
                self.assertNotEqual(after.of(target, policy).status, 400, target)
        names = [
            {release["name"] for release in region.get(f"releases/?policy={policy}").json["releases"]}
            for region in (before, after)
        ]
        self.assertLessEqual(names[0], names[1])

    @modestly
    @given(worlds(), some_policy)
    def test_every_rack_is_explained(self, world, policy) -> None:
        region = Region(world)
        for target in TARGETS:
            response = region.of(target, policy)
            if response.status == 400:
                continue
            for architecture in response.json["architectures"]:
                rows = {row["system_id"]: row for row in architecture["racks"]}
                self.assertEqual(set(rows), {rack.name for rack in world.racks})
                for rack in world.racks:
                    row = rows[rack.name]
                    if isinstance(rack.now, Holding):
                        self.assertEqual((row["outcome"], row["holds"]), ("answered", target in rack.now.targets))
                        self.assertEqual(row["generation"], rack.now.generation)
                        self.assertEqual(row["behind"], len(world.generations) - (rack.now.generation or 0))
                    else:
                        self.assertEqual(row["holds"], None if target in world.may_hold(rack) else False)
                        self.assertNotEqual(row["reason"], "")
                    beginning = {True: "Holds ", False: "Does not hold it", None: "Does not answer: "}
                    silent = row["outcome"] != "answered"
                    self.assertTrue(row["says"].startswith(beginning[None if silent else row["holds"]]), row["says"])

    @modestly
    @given(worlds(), some_policy)
    def test_asking_for_the_only_kernel_there_is_is_asking_for_the_release(self, world, policy) -> None:
        region = Region(world)
        for target in [*TARGETS, UNHEARD_OF]:
            response = region.get(f"releases/{target.name}/?arch={target.arch}&policy={policy}&kernel=generic")
            self.assertEqual(response.status, region.of(target, policy).status, response.text)

    def test_each_state_is_reached_and_named_in_the_answer(self) -> None:
        x = frozenset(TARGETS[:1])
        holding, empty = Holding(1, x), Holding(1, frozenset())
        found = {}
        for generations, racks in (
            ((x,), [Life("aaaaaa", None, holding)]),
            ((x,), [Life("aaaaaa", None, empty)]),
            ((x,), [Life("aaaaaa", None, TimedOut(2.0))]),
            ((frozenset(TARGETS[2:3]),), [Life("aaaaaa", None, empty)]),
            ((x,), []),
            ((), [Life("aaaaaa", None, Holding(None, frozenset()))]),
        ):
            response = Region(World(generations, tuple(racks))).of(TARGETS[0])
            named = "unknown" if "distro_series" in response.json else response.json["state"]
            found[named] = response.status
        self.assertEqual(found, {state.value: status for state, status in STATUS.items()})

    def test_nothing_that_is_said_ever_offers_nothing(self) -> None:
        # The six words that this program is here to end.
        for generations in ((), (frozenset(),), (frozenset(TARGETS),)):
            for now in (Holding(None, frozenset()), *FAILURES):
                world = World(generations, (Life("aaaaaa", None, now),))
                for status, body in Region(world).bodies():
                    self.assertIsNone(re.search(rb"one of: *('')?\.", body), (status, body))
