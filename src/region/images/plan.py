"""Which images the next generation should hold, and which it may: the decision of an import, as two pure functions.

:func:`plan` says what to fetch, from what the sources offered and from what is published; :func:`assemble` says what
can be published, once it is known which files are verified. An image is published only if every one of its files is
verified, and one that is published goes away only with a reason: nobody selects it any more, its source was removed,
or upstream said (in a document that was verified) that it is no longer listed. That the region's own copy of a file is
damaged is no such reason: racks may hold the image whole, so it stays published until the file is there again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum, auto
from typing import Literal

from attrs import frozen

from region.upstream.values import UPLOADS, Problem, Source, SourceFailed, SourceRead, UpstreamImage
from rpc.manifest import Image, ImageFile, ImageKey, Manifest

ChangeKind = Literal["added", "changed", "removed", "kept"]


@frozen
class Download:
    """A file content that the planned images need: where it can be fetched, and what it is in words for people."""

    sha256: str
    size: int
    url: str
    label: str


@frozen
class Plan:
    """What the next generation should hold. Every published image is in exactly one of the first three.

    ``wanted`` are the images to complete and publish. ``kept`` are published images that stay as they are although
    upstream did not confirm them, ``removed`` those that go, each with the reason. ``no_fallback`` says for which
    wanted images the one published so far may *not* stay if the wanted one cannot be completed, and why.
    """

    wanted: Mapping[ImageKey, UpstreamImage]
    kept: Mapping[ImageKey, str]
    removed: Mapping[ImageKey, str]
    no_fallback: Mapping[ImageKey, str]
    problems: tuple[Problem, ...]

    @property
    def downloads(self) -> tuple[Download, ...]:
        """Every distinct content that the wanted images need, in the order of the images."""
        found: dict[str, Download] = {}
        for key in sorted(self.wanted):
            offer = self.wanted[key]
            urls = dict(offer.urls)
            for file in offer.image.files:
                if file.sha256 not in found:
                    label = f"{key} {offer.image.version} {file.name}"
                    found[file.sha256] = Download(file.sha256, file.size, urls[file.sha256], label)
        return tuple(found.values())

    def blobs(self, previous: Manifest) -> Mapping[str, int]:
        """Every content that what is published next may need, sha256 to size in bytes: what to verify."""
        needed = {download.sha256: download.size for download in self.downloads}
        for image in previous.images:
            if image.key not in self.removed:
                needed.update((file.sha256, file.size) for file in image.files)
        return needed


@frozen
class Change:
    """How a generation differs from the one before, or what it kept without upstream's word; never without a reason.

    ``image`` is the new image for *added* and *changed*, the old one for *removed* and *kept*.
    """

    kind: ChangeKind
    image: Image
    reason: str


@frozen
class Assembly:
    """What can be published: the manifest, how it differs from the one before, and what went wrong on the way.

    ``damaged`` are the contents of the manifest that are *not* verified here: those of images that were published
    whole and stay, because racks may hold them.
    """

    manifest: Manifest
    changes: tuple[Change, ...]
    problems: tuple[Problem, ...]
    damaged: frozenset[str] = frozenset()


def plan(reads: Sequence[SourceRead | SourceFailed], previous: Manifest) -> Plan:
    """What the next generation should hold.

    :param reads: how reading ended for *every* source that is set up now, in any order. An image whose source is not
        among them is removed, because its source was.
    :param previous: the manifest that is published now (:data:`rpc.manifest.EMPTY` if none is).
    """
    named = {end.source.name: end for end in sorted(reads, key=lambda end: end.source.rank)}
    listed = {name: frozenset(offer.image.key for offer in _offers(end)) for name, end in named.items()}
    offers = _best_offers(named.values())
    ends = {former: end for end in reversed(named.values()) for former in end.source.former} | named
    wanted: dict[ImageKey, UpstreamImage] = {}
    kept: dict[ImageKey, str] = {}
    removed: dict[ImageKey, str] = {}
    no_fallback: dict[ImageKey, str] = {}
    for key in sorted({*offers, *previous.by_key}):
        offer = offers.get(key)
        image = previous.by_key.get(key)
        standing, reason = _standing(image, ends.get(image.source), listed) if image else (_Standing.ABSENT, "")
        if offer is None:
            (kept if standing is _Standing.UNCERTAIN else removed)[key] = reason
        elif standing is _Standing.UNCERTAIN and image and ends[image.source].source.rank <= offer[0].rank:
            kept[key] = reason
        else:
            wanted[key] = offer[1]
            if standing is _Standing.UNWANTED:
                no_fallback[key] = reason
    problems = [problem for end in named.values() for problem in end.problems]
    for key, problem in list(_namesakes(wanted, previous.only(set(previous.by_key) - set(removed)))):
        del wanted[key]
        problems.append(problem)
    for key, problem in _contradictions(wanted, previous.only(set(previous.by_key) - set(removed))):
        del wanted[key]
        problems.append(problem)
        if key in no_fallback:
            removed[key] = no_fallback.pop(key)
        elif key in previous.by_key:
            kept[key] = problem.reason
    return Plan(wanted, kept, removed, no_fallback, tuple(problems))


class _Standing(Enum):
    """What a published image's own source says of it now."""

    ABSENT = auto()  # there is no published image
    LISTED = auto()
    UNLISTED = auto()
    UNCERTAIN = auto()  # the source, or the part of it that would say, could not be used
    UNWANTED = auto()  # the operator does not want it any more


def _standing(
    image: Image, end: SourceRead | SourceFailed | None, listed: Mapping[str, Collection[ImageKey]]
) -> tuple[_Standing, str]:
    """What the source of a published image says of it, with the reason in words (a reason to keep or to remove it)."""
    content_id = image.content_id
    if end is None:
        return _Standing.UNWANTED, f"the source {image.source} was removed"
    url = end.source.name
    if not end.source.selects(image):
        return _Standing.UNWANTED, f"no selection of {url} asks for it any more"
    if isinstance(end, SourceFailed):
        return _Standing.UNCERTAIN, f"{url} could not be read: {end.reason}"
    for document in end.failed:
        if document.content_id == content_id:
            return _Standing.UNCERTAIN, f"{content_id} of {url} could not be used: {document.reason}"
    for entry in end.listed_broken:
        same_product = (entry.content_id, entry.product) == (content_id, image.product)
        if same_product or (entry.key == image.key and image.key not in listed[url]):
            return _Standing.UNCERTAIN, f"the entry of {entry.product} at {url} cannot be used: {entry.reason}"
    if image.key in listed[url]:
        return _Standing.LISTED, ""
    if url == UPLOADS:
        return _Standing.UNLISTED, "it had been uploaded, and was deleted"
    for seen in end.documents:
        if seen.name == content_id:
            date = seen.updated.strftime("%Y-%m-%d %H:%M:%S %Z").rstrip()
            return _Standing.UNLISTED, f"{content_id} of {url}, updated {date}, no longer lists it"
    return _Standing.UNLISTED, f"the index of {url} no longer lists {content_id}"


def _offers(end: SourceRead | SourceFailed) -> Sequence[UpstreamImage]:
    """The images that a source offers and that are selected, the newest first."""
    if isinstance(end, SourceFailed):
        return ()
    selected = (offer for offer in end.images if end.source.selects(offer.image))
    return sorted(selected, key=lambda offer: (offer.image.version, offer.image), reverse=True)


def _best_offers(ends: Iterable[SourceRead | SourceFailed]) -> dict[ImageKey, tuple[Source, UpstreamImage]]:
    """For each image that is offered, the offer to use; ``ends`` come with the preferred source first."""
    offers: dict[ImageKey, tuple[Source, UpstreamImage]] = {}
    for end in ends:
        for offer in _offers(end):
            offers.setdefault(offer.image.key, (end.source, offer))
    return offers


def _namesakes(wanted: Mapping[ImageKey, UpstreamImage], published: Manifest) -> Iterator[tuple[ImageKey, Problem]]:
    """The wanted images that are new, and are called as one that was uploaded, or if they were uploaded, as one of a
    source: nobody could tell any more which of the two is deployed. What is published goes first, then what was
    uploaded."""
    images = [*published.images, *(offer.image for offer in wanted.values())]
    uploaded = {_called(image) for image in images if image.source == UPLOADS}
    imported = {_called(image): image.source for image in published.images if image.source != UPLOADS}
    for key, offer in wanted.items():
        image = offer.image
        name = f"{image.os}/{image.release} for {image.arch}"
        if key in published.by_key:
            continue
        if image.source == UPLOADS and _called(image) in imported:
            source = imported[_called(image)]
            reason = f"{name} is imported from {source}: select it there no longer, or upload it under another name"
            yield key, _problem(image, "", reason)
        elif image.source != UPLOADS and _called(image) in uploaded - set(imported):
            reason = f"{name} is an image that was uploaded: delete that (stanchion images delete), or do not select it"
            yield key, _problem(image, "", reason)


def _called(image: Image) -> tuple[str, str, str]:
    return image.os, image.release, image.arch


def _contradictions(wanted: Mapping[ImageKey, UpstreamImage], published: Manifest) -> list[tuple[ImageKey, Problem]]:
    """The wanted images that give a content another size than is known for it; the content cannot have both."""
    sizes: dict[str, set[int]] = {}
    for offer in wanted.values():
        for file in offer.image.files:
            sizes.setdefault(file.sha256, set()).add(file.size)
    sizes.update((sha256, {size}) for sha256, size in published.blobs.items())
    found = []
    for key, offer in wanted.items():
        for file in offer.image.files:
            if sizes[file.sha256] != {file.size}:
                others = ", ".join(str(size) for size in sorted(sizes[file.sha256] - {file.size}))
                reason = (
                    f"{offer.image.product} {offer.image.version} says that the content with sha256 {file.sha256} is "
                    f"{file.size} bytes long, elsewhere it is {others}"
                )
                found.append((key, _problem(offer.image, file.name, reason)))
                break
    return found


def assemble(plan: Plan, previous: Manifest, verified: Collection[str], failures: Mapping[str, str]) -> Assembly:
    """What can be published.

    :param plan: what :func:`plan` made of ``previous``.
    :param verified: the sha256 of every content that is in the blob store and was verified.
    :param failures: sha256 to reason, for the contents that could not be fetched or verified.
    """
    images: list[Image] = []
    changes: list[Change] = []
    problems: list[Problem] = []
    lacking: set[str] = set()
    for key in sorted({*plan.wanted, *previous.by_key}):
        old = previous.by_key.get(key)
        offer = plan.wanted.get(key)
        stay = plan.kept.get(key, "")
        go = plan.removed.get(key) or plan.no_fallback.get(key, "")
        if offer:
            missing = _missing(offer.image, verified)
            if not missing:
                # An image that stays as it is stays the same object, with what was computed of it.
                images.append(old if old == offer.image else offer.image)
                changes.extend(_difference(old, offer.image))
                continue
            stated = [(file, failures.get(file.sha256) or "it was not fetched") for file in missing]
            problems.extend(_problem(offer.image, file.name, reason) for file, reason in stated)
            stay = (
                f"version {offer.image.version} of {offer.image.product} could not be completed: "
                f"{stated[0][0].name}: {stated[0][1]}"
            )
        if old is None:
            continue
        if go:
            changes.append(Change("removed", old, go))
            continue
        if damaged := _missing(old, verified):
            names = ", ".join(file.name for file in damaged)
            stay = f"the region's own copy is missing or damaged ({names}), and upstream gave no replacement: {stay}"
            problems.append(
                _problem(old, damaged[0].name, f"{key}: racks that do not hold it yet cannot fetch it: {stay}")
            )
            lacking.update(file.sha256 for file in damaged)
        images.append(old)
        changes.append(Change("kept", old, stay))
    return Assembly(Manifest(images), tuple(changes), tuple(problems), frozenset(lacking))


def _missing(image: Image, verified: Collection[str]) -> list[ImageFile]:
    return [file for file in image.files if file.sha256 not in verified]


def _difference(old: Image | None, new: Image) -> Iterator[Change]:
    """The change from ``old`` to ``new``, if they differ in anything."""
    if old is None:
        why = "it was uploaded" if new.source == UPLOADS else f"{new.content_id} of {new.source} lists it"
        yield Change("added", new, why)
        return
    if old == new:
        return
    contents = {file.name: file.sha256 for file in old.files}
    differing = sorted(
        {file.name for file in new.files if contents.get(file.name) != file.sha256}
        | set(contents).difference(file.name for file in new.files)
    )
    if old.version != new.version:
        reason = f"version {new.version} instead of {old.version}"
    elif differing:
        reason = f"version {new.version} has new content: {', '.join(differing)}"
    else:
        reason = "the same content with another description"
    if old.source != new.source:
        reason += f"; from {new.source} instead of {old.source}"
    yield Change("changed", new, reason)


def _problem(image: Image, file: str, reason: str) -> Problem:
    return Problem("error", image.source, image.product, image.version, file, reason)
