"""How answers are written down for API clients: the list of releases, and why one release can be deployed or not.

Pure functions from :class:`~region.answers.combine.Answers` to JSON values. Nothing in them depends on how long a rack
took to answer, so equal rounds give equal documents.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from datetime import date
from functools import partial
from itertools import groupby
from typing import Any, Final

from attrs import frozen

from region.answers import wording
from region.answers.combine import Answer, Answers, Published, RackAnswer, Target, overall
from region.answers.describing import Described, Descriptions
from region.answers.past import Kernel, Past, departures, document_of, origins, told_gone, told_published
from region.answers.standing import failing, fetching, standing
from rpc.manifest import Image
from rpc.outcomes import Answered, Failed, NotConnected, TimedOut

BASE: Final = "/MAAS/api/2.0"
"""Where the API is, for the ``resource_uri`` of what it shows."""

Document = dict[str, Any]

Remember = Callable[[Hashable, Callable[[], Document]], Document]
"""Gives what was written for a key before, or has it written."""


@frozen
class ImageFacts:
    """What a list of releases says of one image. ``size`` is in bytes; dates are as the stream has them."""

    target: Target
    subarch: str
    label: str
    version: str
    size: int
    title: str
    support_eol: str = ""
    support_esm_eol: str = ""
    requires_license_key: bool | None = None

    @classmethod
    def of(cls, target: Target, image: Image) -> ImageFacts:
        """The facts of an image of a manifest."""
        attributes = dict(image.attributes)
        return cls(
            target, image.subarch, image.label, image.version, image.size, attributes.get("release_title", ""),
            attributes.get("support_eol", ""), attributes.get("support_esm_eol", ""), image.requires_license_key,
        )  # fmt: skip


class _Same:
    """These very objects, as a key: cheap to compare, and as long as it is kept no others can be taken for them."""

    __slots__ = ("_objects",)

    def __init__(self, objects: Iterable[object]) -> None:
        self._objects = tuple(objects)

    def __hash__(self) -> int:
        return hash(tuple(map(id, self._objects)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same) or len(self._objects) != len(other._objects):
            return False
        return all(map(operator.is_, self._objects, other._objects))


def _write(key: Hashable, write: Callable[[], Document]) -> Document:
    return write()


def releases(
    answers: Answers, arch: str | None, described: Descriptions, today: date, *, remember: Remember = _write
) -> Document:
    """The list of releases: each with its state by architecture, and how asking each rack ended.

    ``reason`` says why nothing in it can be deployed, where that is the same for all.

    :param arch: if given, only this architecture's releases.
    :param described: what racks know of them, where that is known.
    :param remember: has what is written of a release, which is mostly the same in the next list: racks swap, and one
        release of many is updated.
    """
    shown = [answer for target, answer in answers.by_target.items() if arch in (None, target.arch)]
    entries = []
    for (os, release), group in groupby(shown, key=lambda answer: answer.target[:2]):
        found = tuple((answer, _images(answers, answer)) for answer in group)
        known = described.of(os, release)
        # Everything that an entry is made of.
        key = tuple(answer for answer, _ in found), _Same(each for _, some in found for each in some), known, today
        entries.append(remember(key, partial(_listed, found, known, today)))
    nothing = "" if answers.choices else answers.of(Target("", "", "")).reason
    return envelope(answers.published, answers.policy.value) | {
        "reason": nothing or ("" if answers.racks else wording.no_racks()),
        "releases": entries,
        "racks": [rack_entry(rack, answers.published) for rack in answers.racks],
    }


def _listed(found: Sequence[tuple[Answer, Sequence[Image]]], described: Described | None, today: date) -> Document:
    """What the list says of one release: by architecture, the answer and the images."""
    best = overall(answer for answer, _ in found)
    facts = [[ImageFacts.of(answer.target, image) for image in images] for answer, images in found]
    os, release, _ = found[0][0].target
    entry = release_entry(os, release, [fact for each in facts for fact in each], today, described)
    entry |= {"state": best.state.value, "reason": best.reason}
    entry["architectures"] = [
        architecture_entry(answer.target.arch, each) | _uses(answer, described) | _sides(answer)
        for (answer, _), each in zip(found, facts, strict=True)
    ]
    return entry


def why(
    answers: Answers,
    os: str,
    release: str,
    arch: str | None,
    kernel: str | None,
    past: Past | None,
    described: Descriptions,
    today: date,
) -> Document:
    """Why a release can be deployed or not: for each architecture the state, where its images come from or when they
    went, and rack by rack what it rests on.

    :param kernel: if given, what ``answers`` are narrowed to.
    :param past: what became of the release; None if that cannot be read at the moment.
    :param described: what a rack knows of it, if that is known.
    """
    found = answers.for_release(os, release, arch)
    best = overall(found)
    facts = {answer.target: _facts(answers, answer) for answer in found}
    document = envelope(answers.published, answers.policy.value)
    known = described.of(os, release)
    document |= release_entry(os, release, [fact for each in facts.values() for fact in each], today, known)
    document |= {"state": best.state.value, "reason": best.reason, "retry_after": best.retry_after}
    document["kernel"] = kernel
    document["architectures"] = [
        architecture_entry(answer.target.arch, facts[answer.target])
        | _uses(answer, known)
        | _sides(answer)
        | _provenance(answer.target, answers.published, kernel, past, known)
        | {"racks": [_rack_row(rack, answer, answers.published) for rack in answers.racks]}
        for answer in found
    ]
    return document | _elsewhere(document["architectures"], arch, kernel, past or Past())


def _elsewhere(shown: Sequence[Document], arch: str | None, kernel: str | None, past: Past) -> Document:
    """What went of architectures that are not shown, as nothing of them is published or held; if all were asked for."""
    here = {one["arch"] for one in shown}
    gone = []
    if arch is None and "" not in here:
        gone = [step for step in departures("", (), past) if step.kernel.arch not in here]
    gone = [step for step in gone if kernel is None or step.kernel.is_called(kernel)]
    told = [f"For {name}: {told_gone(list(steps))}" for name, steps in groupby(gone, key=lambda step: step.kernel.arch)]
    return {"gone": [step.document for step in gone], "went": " ".join(told)}


def _uses(answer: Answer, described: Described | None) -> Document:
    return {"uses": described.uses(answer.target.arch) if described is not None else None}


def _provenance(
    target: Target, published: Published, kernel: str | None, past: Past | None, described: Described | None
) -> Document:
    """Where a target's published images come from, and what was published once and is not any more."""
    images = published.catalogue.targets.get(target, ())
    found = origins(images, past or Past(), published.number)
    gone = [
        step
        for step in departures(target.arch, images, past or Past())
        if kernel is None or step.kernel.is_called(kernel)
    ]
    return {
        "images": [
            document_of(origin)
            | {"uses": described.uses(target.arch, Kernel.of(origin.image)) if described is not None else None}
            for origin in found
        ],
        "published": told_published(found, published, past is not None),
        "gone": [step.document for step in gone],
        "went": told_gone(gone),
    }


def envelope(published: Published, policy: str) -> Document:
    """What every document begins with: the current generation, and how many racks must hold a release."""
    current = {"number": published.number, "digest": published.catalogue.digest}
    return {"generation": current if published.number is not None else None, "policy": policy}


def release_entry(
    os: str, release: str, facts: Sequence[ImageFacts], today: date, described: Described | None = None
) -> Document:
    """A release by name, title and support window, and whether it must not be installed without a license key.

    The stream's own words decide, then those of a rack; what neither says is unknown.
    """
    titles = [fact.title for fact in facts if fact.title]
    titles += [described.title] if described is not None and described.title else []
    licensed = [fact.requires_license_key for fact in facts if fact.requires_license_key is not None]
    licensed = licensed or ([described.requires_license_key] if described is not None else [])
    return {
        "os": os,
        "release": release,
        "name": f"{os}/{release}",
        "title": titles[0] if titles else release,
        "support": _support(facts, today),
        "requires_license_key": any(licensed) if licensed else None,
        "resource_uri": f"{BASE}/releases/{os}/{release}/",
    }


def architecture_entry(arch: str, facts: Sequence[ImageFacts]) -> Document:
    """An architecture of a release with the images there are for it: the newest version, sizes in bytes together."""
    return {
        "arch": arch,
        "version": max((fact.version for fact in facts), default=None),
        "size": sum(fact.size for fact in facts),
        "subarches": sorted({fact.subarch for fact in facts if fact.subarch}),
        "labels": sorted({fact.label for fact in facts}),
    }


def rack_entry(rack: RackAnswer, published: Published) -> Document:
    """How asking a rack ended: ``outcome``, and what it holds or since when and why it is silent."""
    held = rack.held
    generation = held.generation if held is not None else rack.known_generation
    since = rack.silent_since
    return {
        "system_id": rack.rack,
        "name": rack.name,
        "outcome": _OUTCOMES[type(rack.outcome)],
        "reason": "" if held is not None else wording.silence(rack),
        "since": wording.when(since) if since is not None else None,
        "state": held.state if held is not None else "unknown",
        "generation": generation,
        "behind": sum(number > (generation or 0) for number in published.listed),
        "in_step": held is not None and held.catalogue.digest == published.catalogue.digest,
        "progress": dict(rack.progress),
    }


_OUTCOMES: Final[Mapping[type, str]] = {
    Answered: "answered", Failed: "failed", TimedOut: "timed-out", NotConnected: "not-connected",
}  # fmt: skip


def _facts(answers: Answers, answer: Answer) -> Sequence[ImageFacts]:
    """What is known of a target's images."""
    return [ImageFacts.of(answer.target, image) for image in _images(answers, answer)]


def _images(answers: Answers, answer: Answer) -> Sequence[Image]:
    """A target's images: as published, or else as a rack that holds it says."""
    images = answers.published.catalogue.targets.get(answer.target)
    if images is None and answer.holders:
        held = (rack.held.catalogue.targets.get(answer.target) for rack in answers.racks if rack.held is not None)
        images = next(filter(None, held), None)
    return images or ()


def _sides(answer: Answer) -> Document:
    return {
        "state": answer.state.value,
        "reason": answer.reason,
        "retry_after": answer.retry_after,
        "racks": list(answer.holders),
        "racks_behind": list(answer.lacking),
        "racks_silent": list(answer.silent),
    }


def _rack_row(rack: RackAnswer, answer: Answer, published: Published) -> Document:
    row = rack_entry(rack, published)
    if rack.held is not None:
        images = rack.held.catalogue.targets.get(answer.target, ())
        row["holds"] = bool(images)
        row["versions"] = sorted({image.version for image in images})
    else:
        row["holds"] = None if rack.rack in answer.silent else False
        row["versions"] = []
    row["reported"] = wording.when(rack.reported) if rack.reported is not None else None
    row["fetching"] = under_way.document if (under_way := fetching(rack)) is not None else None
    row["failing"] = failed.document if (failed := failing(rack, answer.target)) is not None else None
    row["says"] = standing(rack, answer.target, published, row["holds"] is None)
    return row


def _support(facts: Iterable[ImageFacts], today: date) -> Document:
    eol = max((fact.support_eol for fact in facts if _day(fact.support_eol)), default=None)
    esm_eol = max((fact.support_esm_eol for fact in facts if _day(fact.support_esm_eol)), default=None)
    return {"state": _support_state(_day(eol), _day(esm_eol), today), "eol": eol, "esm_eol": esm_eol}


def _support_state(eol: date | None, esm_eol: date | None, today: date) -> str:
    if eol is not None and today <= eol:
        return "supported"
    if esm_eol is not None and today <= esm_eol:
        return "extended"
    return "unknown" if eol is None else "ended"


def _day(text: str | None) -> date | None:
    try:
        return date.fromisoformat(text or "")
    except ValueError:
        # The stream may write what it likes here; what is no date says nothing about support.
        return None
