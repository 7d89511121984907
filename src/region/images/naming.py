"""What may be uploaded as an image, and what is it called? What else is asked for is an :class:`UploadInvalid`.

The names, architectures and file types are those of MAAS. A name that people, or an API client, could take for an
image of a source is refused: it must always be clear which of the two is deployed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from attrs import frozen

from region.upstream.values import UPLOADS, is_plain
from rpc.manifest import EMPTY, MAX_FILE_SIZE, Image, ImageFile, Manifest, is_path_component, is_sha256

CUSTOM: Final = "custom"

UPLOADABLE: Final = (CUSTOM, "centos", "debian", "esxi", "ol", "rhel", "suse", "windows")
"""The operating systems of which images are uploaded."""

FROM_SOURCES: Final = frozenset({"bootloader", "caringo", "ubuntu", "ubuntu-core"})
"""Those whose images come from sources alone."""

FILETYPES: Final[Mapping[str, str]] = {
    "tgz": "root-tgz", "tbz": "root-tbz", "txz": "root-txz", "squashfs": "squashfs", "ddtgz": "root-dd",
    "ddtbz": "root-dd.tar.bz2", "ddtxz": "root-dd.tar.xz", "ddtar": "root-dd.tar", "ddraw": "root-dd.raw",
    "ddbz2": "root-dd.bz2", "ddgz": "root-dd.gz", "ddxz": "root-dd.xz",
}  # fmt: skip
"""MAAS's names of what is uploaded, and the simplestreams ``ftype`` of each."""

MAX_TITLE: Final = 255


class UploadInvalid(ValueError):
    """An upload cannot be as it was asked for: ``field`` is which of its fields, ``message`` why and what to do."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


@frozen
class UploadRequest:
    """An image to be uploaded, checked. ``title`` may be empty; ``filetype`` is a key of :data:`FILETYPES`, ``size`` in
    bytes."""

    os: str
    release: str
    arch: str
    subarch: str
    title: str
    filetype: str
    base_image: str
    sha256: str
    size: int

    @property
    def name(self) -> str:
        """As it is asked for when a machine is deployed."""
        return f"{self.os}/{self.release}"


def checked_upload(
    name: str,
    architecture: str,
    sha256: str,
    size: int,
    *,
    title: str = "",
    filetype: str = "",
    base_image: str = "",
    published: Manifest = EMPTY,
) -> UploadRequest:
    """The upload that these fields ask for, if it can be.

    :param published: what is published now, whose names cannot be taken.
    :raises UploadInvalid: if it cannot.
    """
    os, release = _checked_name(name, published)
    arch, slash, subarch = architecture.partition("/")
    if slash and not subarch:
        raise UploadInvalid("architecture", f"'{architecture}' ends with its slash; use one such as amd64/generic.")
    for part in (arch, subarch or "generic"):
        if not is_path_component(part):
            raise UploadInvalid("architecture", f"'{architecture}' is not an architecture such as amd64/generic.")
    for image in _synced(published):
        if (image.os, image.release, image.arch) == (os, release, arch):
            raise UploadInvalid(
                "name", f"'{os}/{release}' is imported from {image.source} for {arch}; use another name, such as "
                f"{CUSTOM}/my-{release}, or select it there no longer."
            )  # fmt: skip
    if not is_plain(title) or len(title) > MAX_TITLE:
        raise UploadInvalid("title", f"A title is a text of one line, of at most {MAX_TITLE} characters.")
    kind = filetype or "tgz"
    if kind not in FILETYPES:
        listed = ", ".join(f"'{choice}'" for choice in FILETYPES)
        raise UploadInvalid("filetype", f"'{kind}' is not a valid filetype.  It should be one of: {listed}.")
    if base_image and (base_image.count("/") != 1 or not all(map(is_path_component, base_image.split("/")))):
        raise UploadInvalid("base_image", f"'{base_image}' is not the name of an image such as ubuntu/noble.")
    if not is_sha256(sha256.lower()):
        raise UploadInvalid("sha256", f"'{sha256[:80]}' is not a sha256: 64 hexadecimal digits.")
    if not 1 <= size <= MAX_FILE_SIZE:
        raise UploadInvalid("size", f"{size} is not the size of an image: a number of bytes from 1 to {MAX_FILE_SIZE}.")
    return UploadRequest(os, release, arch, subarch or "generic", title, kind, base_image, sha256.lower(), size)


def _checked_name(name: str, published: Manifest) -> tuple[str, str]:
    """The operating system and the release that an image is called."""
    os, slash, release = name.partition("/")
    if not slash:
        os, release = CUSTOM, name
    if not is_path_component(os) or not is_path_component(release):
        raise UploadInvalid("name", f"'{name[:200]}' is not a name such as {CUSTOM}/my-image or my-image.")
    if os in FROM_SOURCES:
        raise UploadInvalid(
            "name", f"Images of {os} come from sources (stanchion sources); call yours {CUSTOM}/{release}-custom, say."
        )
    if os not in UPLOADABLE:
        listed = ", ".join(f"'{choice}'" for choice in UPLOADABLE)
        raise UploadInvalid("name", f"'{os}' is not a valid operating system.  It should be one of: {listed}.")
    systems = {*UPLOADABLE, *FROM_SOURCES, *(image.os for image in _synced(published))}
    if release.lower() in systems and (release != os or os == CUSTOM):
        raise UploadInvalid("name", f"'{release}' is a reserved name; use another, such as my-{release}.")
    for image in _synced(published):
        # Clients may ask for it by its bare name, which would not tell the two apart any more.
        if image.os != os and image.release and image.release.lower() == release.lower():
            raise UploadInvalid(
                "name", f"'{release}' is what {image.os}'s {image.release} is called, imported from {image.source}; "
                f"use another, such as my-{release}."
            )  # fmt: skip
    return os, release


def _synced(published: Manifest) -> Sequence[Image]:
    """The images of sources."""
    return [image for image in published.images if image.source != UPLOADS]


def image_of(request: UploadRequest, version: str) -> Image:
    """The image that an upload becomes when all of its content is there."""
    attributes = {"os_title": request.os}
    if request.title:  # else it is called as a rack's driver for the operating system has it
        attributes["release_title"] = request.title
    if request.base_image:
        attributes["base_image"] = request.base_image
    ftype = FILETYPES[request.filetype]
    return Image(
        os=request.os, release=request.release, arch=request.arch, subarch=request.subarch, kflavor="generic",
        label="uploaded", version=version,
        product=f"uploaded:{request.os}:{request.release}:{request.arch}:{request.subarch}",
        content_id="uploaded:download", source=UPLOADS,
        files=(ImageFile(ftype, ftype, request.sha256, request.size),), attributes=attributes,
    )  # fmt: skip
