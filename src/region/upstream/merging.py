"""What a source offers as a whole, when its documents, or one of them twice, offer the same image."""

from __future__ import annotations

from collections.abc import Iterable

from region.upstream.values import Broken, Problem, Severity, UpstreamImage
from rpc.manifest import Image, ImageKey


def merge(offers: Iterable[UpstreamImage]) -> tuple[list[UpstreamImage], list[Broken], list[Problem]]:
    """One offer for each image: the newest version of those that are offered.

    The same version with the same files is no problem. Other versions are one, and are left out with a warning. The
    same version with other files cannot be used: upstream says two things at once, and no one here knows which is so.

    :return: the offers in the order of their keys, the images that cannot be used, and the problems.
    """
    by_key: dict[ImageKey, list[UpstreamImage]] = {}
    for offer in offers:
        by_key.setdefault(offer.image.key, []).append(offer)
    usable: list[UpstreamImage] = []
    broken: list[Broken] = []
    problems: list[Problem] = []
    for key in sorted(by_key):
        newest, *others = sorted(by_key[key], key=lambda offer: (_backwards(offer.image), offer.image))
        image = newest.image
        same_version = [other.image for other in others if other.image.version == image.version]
        if any(other.identity != image.identity for other in same_version):
            names = " and ".join(sorted({image.product, *(other.product for other in same_version)}))
            reason = f"version {image.version} of {key} is listed more than once, with different files ({names})"
            for each in (image, *same_version):
                broken.append(Broken(each.content_id, each.product, each.version, key, reason))
            problems.append(_problem("error", image, reason))
            continue
        usable.append(newest)
        for other in (other.image for other in others):
            if other.version != image.version:
                reason = f"{key} is listed more than once: {image.product} has the newer version {image.version}"
                problems.append(_problem("warning", other, reason))
    return usable, broken, problems


def _backwards(image: Image) -> tuple[int, ...]:
    """Sorts versions by the C locale's order of strings, the newest first."""
    return (*(-ord(character) for character in image.version), 1)


def _problem(severity: Severity, image: Image, reason: str) -> Problem:
    return Problem(severity, image.source, image.product, image.version, "", reason)
