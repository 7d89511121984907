"""What a rack says of one release, and of a license key for it: the stream's words first, then the driver's."""

from __future__ import annotations

from typing import Final

from attrs import frozen

from rack.systems.drivers import system_of
from rpc.manifest import Image, Manifest

VALID: Final = "valid"
INVALID: Final = "invalid"
NOT_NEEDED: Final = "not-needed"


@frozen
class Description:
    """A release: its ``title`` and that of its operating ``system``; whether it needs a license key; and every image
    of it that is held, with what that may be used for, sorted."""

    system: str
    title: str
    requires_license_key: bool
    uses: tuple[tuple[Image, tuple[str, ...]], ...]


def describe(held: Manifest, os: str, release: str) -> Description:
    """A release, whether any image of it is held or not."""
    driver = system_of(os)
    images = [image for image in held.images if (image.os, image.release) == (os, release)]
    titles = (image.attribute("release_title") for image in images)
    said = [image.requires_license_key for image in images if image.requires_license_key is not None]
    return Description(
        driver.title,
        next(filter(None, titles), "") or driver.release_title(release) or release,
        # Of several images one that needs a key is enough: who has a key can install all of them.
        any(said) if said else driver.requires_license_key(release),
        tuple((image, tuple(sorted(driver.purposes(image)))) for image in images),
    )


def validate(held: Manifest, os: str, release: str, key: str) -> tuple[str, str]:
    """Whether ``key`` can be one for a release: ``valid``, ``invalid`` or ``not-needed``; and why, unless it is valid.

    No key is looked up anywhere: what is checked is its form.
    """
    described = describe(held, os, release)
    if not described.requires_license_key:
        return NOT_NEEDED, f"{os}/{release} needs no license key."
    wrong = system_of(os).wrong_with_key(release, key)
    return (INVALID, wrong) if wrong else (VALID, "")
