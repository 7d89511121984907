"""The list of releases, put together from what was written of each release before."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from datetime import date, timedelta

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from region.answers import documents
from region.answers.combine import Answers, Catalogue, Held, Policy, Published, RackAnswer, combine
from region.answers.describing import Described, Descriptions
from region.answers.documents import Document
from region.answers.past import Kernel
from rpc.manifest import Manifest
from rpc.outcomes import Answered, TimedOut
from tests.region.inventories import BOOKWORM, FOCAL, NOBLE, NOBLE_ARM, image

DAY = date(2030, 6, 1)
TARGETS = FOCAL, NOBLE, NOBLE_ARM, BOOKWORM
IMAGES = {
    target: [image(target, version, support_eol=f"{DAY}") for version in ("20260101", "20260201")] for target in TARGETS
}
"""The same objects in whichever generation has them, as an import and a region have it."""


def catalogue(versions: tuple[int | None, ...]) -> Catalogue:
    chosen = zip(TARGETS, versions, strict=True)
    return Catalogue(Manifest(IMAGES[target][version] for target, version in chosen if version is not None))


CATALOGUES = st.sampled_from(
    [catalogue(each) for each in [(0, 0, 0, 0), (0, 1, 0, 0), (0, 1, 1, None), (None, 1, 0, 1), (1, None, None, None)]]
)


@st.composite
def worlds(draw: st.DrawFn) -> Answers:
    current = draw(CATALOGUES)
    published = Published(2, current, {1: frozenset(TARGETS), 2: frozenset(current.targets)})
    racks: dict[str, RackAnswer] = {}
    for name in draw(st.lists(st.sampled_from("abc"), unique=True)):
        held = draw(st.none() | st.tuples(st.integers(1, 2), CATALOGUES))
        outcome = Answered(Held("ready", *held)) if held is not None else TimedOut(2.0)
        racks[name] = RackAnswer(name, f"rack-{name}", outcome, draw(st.none() | st.integers(1, 2)))
    return combine(published, racks, draw(st.sampled_from(list(Policy))))


DESCRIBED = st.builds(
    Described,
    st.sampled_from(["", "A title"]),
    st.booleans(),
    st.sampled_from([(), ((Kernel.of(IMAGES[NOBLE][0]), ("deploy",)),)]),
)
DESCRIPTIONS = st.builds(
    Descriptions,
    st.dictionaries(st.sampled_from([target[:2] for target in TARGETS]), DESCRIBED).map(
        lambda known: (*known.items(),)
    ),
)


class Memory:
    """Remembers everything, and how often it did."""

    def __init__(self) -> None:
        self.known: dict[Hashable, Document] = {}
        self.written = 0

    def get(self, key: Hashable, write: Callable[[], Document]) -> Document:
        if key not in self.known:
            self.written += 1
            self.known[key] = write()
        return self.known[key]


class ListTests(SynchronousTestCase):
    @given(
        st.lists(
            st.tuples(worlds(), st.sampled_from([None, "amd64", "arm64"]), DESCRIPTIONS, st.integers(0, 1)),
            min_size=2,
            max_size=8,
        )
    )
    @settings(max_examples=150, deadline=None)
    def test_a_list_from_what_was_written_before_is_the_list_written_anew(
        self, asked: list[tuple[Answers, str | None, Descriptions, int]]
    ) -> None:
        memory = Memory()
        for answers, arch, described, days in asked:
            today = DAY + timedelta(days=days)
            remembered = documents.releases(answers, arch, described, today, remember=memory.get)
            self.assertEqual(remembered, documents.releases(answers, arch, described, today))

    def _list(self, memory: Memory, current: Catalogue, *held: Catalogue) -> Document:
        published = Published(2, current, {1: frozenset(TARGETS), 2: frozenset(current.targets)})
        racks = {
            str(number): RackAnswer(str(number), f"rack-{number}", Answered(Held("ready", 1, each)), 1)
            for number, each in enumerate(held)
        }
        return documents.releases(combine(published, racks), None, Descriptions(), DAY, remember=memory.get)

    def test_while_racks_swap_no_release_is_written_again(self) -> None:
        memory, old, new = Memory(), catalogue((0, 0, 0, 0)), catalogue((0, 1, 0, 0))
        lists = [self._list(memory, new, *held) for held in [(old, old), (old, new), (new, new)]]
        self.assertEqual(memory.written, 3)
        self.assertEqual([sum(rack["in_step"] for rack in each["racks"]) for each in lists], [0, 1, 2])

    def test_of_a_new_generation_only_the_releases_that_changed_are_written(self) -> None:
        memory, old, new = Memory(), catalogue((0, 0, 0, 0)), catalogue((0, 1, 0, 0))
        self._list(memory, old, old, old)
        written = memory.written
        versions = [
            [each["architectures"][0]["version"] for each in self._list(memory, current, old, new)["releases"]]
            for current in (old, new)
        ]
        self.assertEqual(versions, [["20260101"] * 3, ["20260101", "20260101", "20260201"]])
        self.assertEqual(memory.written, written + 1)
