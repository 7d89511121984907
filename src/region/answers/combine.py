"""Which releases can be deployed, given what was published and how each rack answered.

:func:`combine` is a pure function, and what it returns does not depend on the order in which racks answered. A rack
that did not answer never removes a release: it leaves open everything that it may hold, and the answer says which rack
that is and why. The rule it rests on: a rack can only hold what some generation listed, so a silent rack leaves open
what its last known generation, or a newer one, lists.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping
from enum import StrEnum
from functools import cached_property
from typing import Final, NamedTuple

from attrs import field, frozen

from region.answers import wording
from region.images.naming import CUSTOM
from rpc.manifest import EMPTY, Image, Manifest
from rpc.outcomes import Answered, Failed, NotConnected, Outcome


class Target(NamedTuple):
    """What one deploys: an operating system's release for an architecture."""

    os: str
    release: str
    arch: str

    @property
    def name(self) -> str:
        """The release as API clients write it: ``ubuntu/noble``."""
        return f"{self.os}/{self.release}"


class State(StrEnum):
    """What is known of one target; DESIGN's table, row by row, with the last row's two cases told apart."""

    DEPLOYABLE = "deployable"
    ARRIVING = "arriving"
    UNDETERMINED = "undetermined"
    UNKNOWN = "unknown"
    NO_RACKS = "no-racks"
    NOTHING_PUBLISHED = "nothing-published"


class Policy(StrEnum):
    """How many of the racks asked about must hold a target for it to be deployable."""

    ANY = "any"
    ALL = "all"


OFFERED: Final = frozenset({State.DEPLOYABLE, State.ARRIVING, State.UNDETERMINED, State.NO_RACKS})
"""The states of a target that a client may ask for; with no rack at all, what was published is still what is meant."""

RETRY_AFTER: Final[Mapping[State, int]] = {
    State.ARRIVING: 30,
    State.UNDETERMINED: 10,
    State.NO_RACKS: 60,
    State.NOTHING_PUBLISHED: 60,
}
"""Seconds after which asking again may give another answer; the other states have none."""

_A_YEAR: Final = 366 * 86400.0


@frozen(eq=False)
class Catalogue:
    """The images of one manifest by target; boot loaders are left out. One object serves every rack that holds it."""

    manifest: Manifest

    @cached_property
    def targets(self) -> Mapping[Target, tuple[Image, ...]]:
        """Each target with its images (one per subarchitecture, kernel flavour and label)."""
        found: dict[Target, list[Image]] = defaultdict(list)
        for image in self.manifest.images:
            if not image.is_bootloader:
                found[Target(image.os, image.release, image.arch)].append(image)
        return {target: tuple(images) for target, images in found.items()}

    @property
    def digest(self) -> str:
        """The manifest's digest."""
        return self.manifest.digest


NOTHING: Final = Catalogue(EMPTY)


@frozen
class Published:
    """What the region has published.

    ``number`` is the current generation's, None if there is none. ``listed`` says, for every generation that ever
    was, retired ones too, which targets it listed.
    """

    number: int | None = None
    catalogue: Catalogue = NOTHING
    listed: Mapping[int, frozenset[Target]] = field(factory=dict)

    @property
    def newest(self) -> int:
        """The highest generation number known here; 0 if there is none."""
        return max(self.listed, default=self.number or 0)


@frozen
class Held:
    """What a rack answered that it holds: its state word, the generation its snapshot was built for, its images."""

    state: str
    generation: int | None
    catalogue: Catalogue


@frozen
class RackAnswer:
    """How asking one rack ended, and what was known of it before.

    ``last_generation`` is the oldest generation that it may be at, by what it last answered and reported (None: it
    never said). ``known_generation`` is the one that it was at when it was last heard of, ``last_targets`` what it held
    then, if that is known, and in ``last_catalogue`` with all its images; ``since`` when it was first found silent,
    ``reported`` when it last reported (both seconds since the epoch), and ``progress`` what it reported then of a sync
    under way or one that failed.
    """

    rack: str
    name: str
    outcome: Outcome[Held]
    last_generation: int | None = None
    last_targets: Collection[Target] = frozenset()
    since: float | None = None
    progress: tuple[tuple[str, object], ...] = ()
    reported: float | None = None
    last_catalogue: Catalogue | None = field(default=None, repr=False)
    known_generation: int | None = None

    @property
    def held(self) -> Held | None:
        """What it holds, if it answered."""
        return self.outcome.value if isinstance(self.outcome, Answered) else None

    @property
    def silent_since(self) -> float | None:
        """Since when it has not answered, if it is silent and that is known."""
        if isinstance(self.outcome, NotConnected):
            return self.outcome.since  # not since somebody happened to ask
        return None if self.held else self.since

    @property
    def next_try(self) -> float | None:
        """When it tries again what failed (seconds since the epoch), if it has reported that."""
        seconds = dict(self.progress).get("next_try_seconds")
        if self.reported is None or not isinstance(seconds, int | float) or not 0 <= seconds <= _A_YEAR:
            return None
        return self.reported + seconds

    @cached_property
    def fingerprint(self) -> Hashable:
        """Equal for answers that say the same, however long they took."""
        if (held := self.held) is not None:
            said: Hashable = (held.state, held.generation, held.catalogue.digest, self.next_try)
        else:
            failed = self.outcome if not isinstance(self.outcome, Failed) else (self.outcome.kind, self.outcome.reason)
            known = self.last_generation, self.known_generation, frozenset(self.last_targets)
            said = (failed, known, self.silent_since, self.reported)
        return self.rack, self.name, said, repr(self.progress)


@frozen
class Answer:
    """What is known of one target: the state, a sentence that says why, and the racks (by id) on each side."""

    target: Target
    state: State
    reason: str
    holders: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()

    @property
    def retry_after(self) -> int | None:
        """Seconds to wait before asking again, if that can change the answer."""
        return RETRY_AFTER.get(self.state)


@frozen
class _Group:
    """Racks that are alike: they hold the same catalogue, or are silent and may hold the same. None: anything."""

    racks: tuple[RackAnswer, ...]
    answered: bool
    targets: Collection[Target] | None


@frozen
class Answers:
    """The answers for every target, from one round. ``racks`` are those that must serve the machine, by name."""

    published: Published
    racks: tuple[RackAnswer, ...]
    policy: Policy
    by_target: Mapping[Target, Answer]
    _groups: tuple[_Group, ...]

    @cached_property
    def choices(self) -> tuple[Target, ...]:
        """Every target that is deployable, on its way, or may be held by a silent rack: what one can ask for."""
        return tuple(target for target, answer in self.by_target.items() if answer.state in OFFERED)

    def of(self, target: Target) -> Answer:
        """The answer for any target, also one that nothing lists."""
        known = self.by_target.get(target)
        return known or _evaluate(target, self.published, self._groups, self.policy, bool(self.choices))

    def for_release(self, os: str, release: str, arch: str | None = None) -> tuple[Answer, ...]:
        """The answers for a release: one per architecture (or for ``arch`` alone), never none.

        A release that nothing lists has one answer, whose architecture is ``arch`` or empty.
        """
        if arch is not None:
            return (self.of(Target(os, release, arch)),)
        found = tuple(answer for target, answer in self.by_target.items() if target[:2] == (os, release))
        return found or (self.of(Target(os, release, "")),)

    def named(self, name: str) -> tuple[str, ...]:
        """What ``name`` may mean, as ``os/release``: itself, or for a bare release every one so called; maybe none.

        An image of one's own does not make the name of another system's release ambiguous that is published later.
        """
        if "/" in name:
            return (name,)
        found = {target for target in self.choices if target.release == name}
        found = found or {target for target in self.by_target if target.release == name}
        systems = {target for target in found if target.os != CUSTOM}
        return tuple(sorted({target.name for target in systems or found}))


_PREFERENCE: Final = (
    State.DEPLOYABLE, State.UNDETERMINED, State.ARRIVING, State.NO_RACKS, State.NOTHING_PUBLISHED, State.UNKNOWN,
)  # fmt: skip


def overall(answers: Iterable[Answer]) -> Answer:
    """The answer for "on any of these architectures": deployable if one is; open as long as one is."""
    return min(answers, key=lambda answer: (_PREFERENCE.index(answer.state), answer.target))


def combine(published: Published, racks: Mapping[str, RackAnswer], policy: Policy = Policy.ANY) -> Answers:
    """What can be deployed.

    :param racks: how asking each rack that must serve the machine ended, by rack.
    :param policy: whether any one of them holding a target is enough, or all must.
    """
    ordered = tuple(sorted(racks.values(), key=lambda answer: (answer.name, answer.rack)))
    groups = _group(published, ordered)
    targets = set(published.catalogue.targets)
    for group in groups:
        targets.update(group.targets or ())
    listed = sorted(targets)
    evaluated = {target: _evaluate(target, published, groups, policy, True) for target in listed}
    if not any(answer.state in OFFERED for answer in evaluated.values()):
        # Nothing can be offered instead, so "it should be one of" would name nothing: that is no client's error.
        evaluated = {target: _evaluate(target, published, groups, policy, False) for target in listed}
    return Answers(published, ordered, policy, evaluated, groups)


def _group(published: Published, racks: Iterable[RackAnswer]) -> tuple[_Group, ...]:
    alike: dict[object, list[RackAnswer]] = defaultdict(list)
    for rack in racks:
        if rack.held is not None:
            alike[rack.held.catalogue.digest].append(rack)
        else:
            alike[rack.last_generation, frozenset(rack.last_targets)].append(rack)
    groups = []
    for members in alike.values():
        held = members[0].held
        targets = held.catalogue.targets if held is not None else _open_targets(members[0], published)
        groups.append(_Group(tuple(members), held is not None, targets))
    return tuple(groups)


def _open_targets(rack: RackAnswer, published: Published) -> frozenset[Target] | None:
    """Everything that a silent rack may hold: None if that cannot be told."""
    oldest = -1 if rack.last_generation is None else rack.last_generation
    if oldest > published.newest:
        return None
    listed = (targets for number, targets in published.listed.items() if number >= oldest)
    return frozenset(rack.last_targets).union(published.catalogue.targets, *listed)


def _evaluate(
    target: Target, published: Published, groups: tuple[_Group, ...], policy: Policy, has_choices: bool
) -> Answer:
    holders: list[RackAnswer] = []
    lacking: list[RackAnswer] = []
    silent: list[RackAnswer] = []
    for group in groups:
        has = group.targets is None or target in group.targets
        if group.answered:
            (holders if has else lacking).extend(group.racks)
        elif has:
            silent.extend(group.racks)
    total = sum(len(group.racks) for group in groups)
    state, reason = State.UNKNOWN, ""
    if not total:
        state, reason = State.NO_RACKS, wording.no_racks()
    elif len(holders) >= (total if policy is Policy.ALL else 1):
        state, reason = State.DEPLOYABLE, wording.deployable(holders, total)
    elif silent:
        state, reason = State.UNDETERMINED, wording.undetermined(silent)
    elif target in published.catalogue.targets:
        state, reason = State.ARRIVING, wording.arriving(lacking, published)
    elif published.number is None:
        state, reason = State.NOTHING_PUBLISHED, wording.nothing_published()
    elif not has_choices:
        state, reason = State.NOTHING_PUBLISHED, wording.nothing_listed(published)
    elif holders:
        reason = wording.cannot_come(holders, lacking, published)
    else:
        reason = wording.unknown(total)
    return Answer(
        target, state, reason, *(tuple(sorted(rack.rack for rack in side)) for side in (holders, lacking, silent))
    )
