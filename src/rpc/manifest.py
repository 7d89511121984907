"""What a generation holds: files, images and the manifest whose digest region and rack compare.

Everything here is an immutable value and a pure function. The canonical form is JSON with sorted keys, no white space
and images in key order, so that equal contents have equal bytes and the sha256 of those bytes, the *digest*, names
them. The generation's number is not part of it: a digest says what is there, not when it was published.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from operator import attrgetter
from typing import Any, Final

from attrs import field, fields, frozen

FORMAT: Final = "stanchion:manifest:1"

MANIFEST_NAME: Final = "manifest.json"
"""What the manifest is called where a rack keeps a generation's files, beside a directory for each operating system:
none may be called so."""

MAX_MANIFEST: Final = 8 << 20
"""Bytes of a canonical manifest, some 25,000 files: what a rack can tell of what it holds (``ListImages``)."""

MAX_FILE_SIZE: Final = 1 << 40
"""Bytes; no image file is larger (1 TiB), so a size above it is an error in the stream and not a file to fetch."""

_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_COMPONENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+:@~=-]{0,127}\Z")

LOADER_FTYPES: Final = frozenset({"archive.tar.xz", "bootloader"})
ROOT_FTYPES: Final = frozenset(
    {"squashfs", "root-image.gz", "root-tgz", "root-tbz", "root-txz", "root-dd", "root-dd.tar", "root-dd.raw",
     "root-dd.bz2", "root-dd.gz", "root-dd.xz", "root-dd.tar.bz2", "root-dd.tar.xz", "self-extracting"}
)  # fmt: skip
BOOT_FTYPES: Final = frozenset({"boot-kernel", "boot-initrd", "boot-dtb", "boot-dd"})
OTHER_FTYPES: Final = frozenset({"manifest", "notifications"})
KNOWN_FTYPES: Final = LOADER_FTYPES | ROOT_FTYPES | BOOT_FTYPES | OTHER_FTYPES
"""The simplestreams ``ftype`` vocabulary of the field. An unknown one is kept and reported, never dropped."""


_TRUTHS: Final = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class InvalidManifest(ValueError):
    """A manifest, image or file does not have the shape or the values that it must have; the text says which."""


def is_sha256(value: object) -> bool:
    """Whether ``value`` is a sha256 as 64 lower-case hexadecimal digits."""
    return isinstance(value, str) and _SHA256.match(value) is not None


def is_path_component(value: object) -> bool:
    """Whether ``value`` may be the name of one file or directory: no separator, no leading dot, at most 128 long."""
    return isinstance(value, str) and _COMPONENT.match(value) is not None


def _component(instance: object, attribute: Any, value: Any) -> None:
    if not is_path_component(value):
        raise InvalidManifest(f"{attribute.name} is {value!r}, which cannot be part of a path")


def _optional_component(instance: object, attribute: Any, value: Any) -> None:
    if value != "":
        _component(instance, attribute, value)


def _sha256(instance: object, attribute: Any, value: Any) -> None:
    if not is_sha256(value):
        raise InvalidManifest(f"sha256 is {value!r}, not 64 lower-case hexadecimal digits")


def _size(instance: object, attribute: Any, value: Any) -> None:
    if type(value) is not int or not 0 <= value <= MAX_FILE_SIZE:
        raise InvalidManifest(f"size is {value!r}, not a number of bytes from 0 to {MAX_FILE_SIZE}")


def _strings(value: Mapping[str, str] | Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    pairs = tuple(sorted(value.items() if isinstance(value, Mapping) else value))
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(part, str) for part in pair)):
            raise InvalidManifest(f"attributes must map text to text, not {pair!r}")
    return pairs


@frozen(order=True)
class ImageFile:
    """One file of an image.

    ``name`` is the item's key in the stream (unique in its version), ``ftype`` its simplestreams type, ``size`` is in
    bytes, and ``attributes`` are the item's other text fields (``kpackage``, ``src_package``, …), as sorted pairs.
    """

    name: str = field(validator=_component)
    ftype: str = field(validator=_component)
    sha256: str = field(validator=_sha256)
    size: int = field(validator=_size)
    attributes: tuple[tuple[str, str], ...] = field(default=(), converter=_strings)


def _files(files: Iterable[ImageFile]) -> tuple[ImageFile, ...]:
    return tuple(sorted(files, key=_file_order))


# The order of the values themselves, which attrs compares field by field too, but a good deal slower.
_file_order: Final = attrgetter(*(each.name for each in fields(ImageFile)))


@frozen(order=True)
class ImageKey:
    """What tells images of one generation apart, whatever their version. Boot loaders have no release."""

    os: str
    release: str
    arch: str
    subarch: str
    kflavor: str
    label: str

    def __str__(self) -> str:
        name = f"{self.os}/{self.release}" if self.release else self.os
        kernel = "/".join(part for part in (self.arch, self.subarch, self.kflavor) if part)
        return f"{name} {kernel} ({self.label})"


@frozen(order=True)
class Image:
    """An image: its key, its version, where it came from, and every file that it consists of.

    ``product`` and ``content_id`` are upstream's names, ``source`` the URL it was read from. ``attributes`` are the
    product's other text fields as sorted pairs: ``release_title``, ``support_eol``, ``support_esm_eol``, ``subarches``,
    ``krel``, ``version`` (the release's number), ``bootloader-type``, ….
    """

    os: str = field(validator=_component)
    release: str = field(validator=_optional_component)
    arch: str = field(validator=_component)
    subarch: str = field(validator=_optional_component)
    kflavor: str = field(validator=_optional_component)
    label: str = field(validator=_component)
    version: str = field(validator=_component)
    product: str
    content_id: str
    source: str
    files: tuple[ImageFile, ...] = field(converter=_files)
    attributes: tuple[tuple[str, str], ...] = field(default=(), converter=_strings)

    @files.validator
    def _distinct(self, attribute: Any, files: tuple[ImageFile, ...]) -> None:
        if not files:
            raise InvalidManifest(f"{self.product} {self.version} has no files")
        names = [file.name for file in files]
        if len(set(names)) != len(names):
            raise InvalidManifest(f"{self.product} {self.version} names a file twice: {', '.join(names)}")

    @property
    def key(self) -> ImageKey:
        """What this image is a version of."""
        return ImageKey(self.os, self.release, self.arch, self.subarch, self.kflavor, self.label)

    @property
    def is_bootloader(self) -> bool:
        """Whether this is a boot loader: such products have a ``bootloader-type`` and no release."""
        return not self.release

    @property
    def size(self) -> int:
        """The sum of the files' sizes, in bytes."""
        return sum(file.size for file in self.files)

    def attribute(self, name: str, default: str = "") -> str:
        """The text of the product attribute ``name``, or ``default``."""
        return dict(self.attributes).get(name, default)

    @property
    def requires_license_key(self) -> bool | None:
        """Whether the stream says that it must not be installed without a license key; None if it does not say."""
        return _TRUTHS.get(self.attribute("requires_license_key").strip().lower())

    @property
    def identity(self) -> tuple[ImageKey, str, tuple[tuple[str, str], ...]]:
        """Key, version and every (file name, sha256): new content under an old version name is another identity."""
        return self.key, self.version, tuple((file.name, file.sha256) for file in self.files)

    @cached_property
    def _canonical(self) -> str:
        """What the canonical JSON of a manifest has of it; kept, as most images of a generation are in the next too."""
        return _json(_image_document(self))


def _images(images: Iterable[Image]) -> tuple[Image, ...]:
    return tuple(sorted(images, key=_image_order))


_image_order: Final = attrgetter(*(each.name for each in fields(Image)))


@frozen
class Manifest:
    """The complete, immutable list of images of one generation, at most one per :class:`ImageKey`."""

    images: tuple[Image, ...] = field(converter=_images)

    @images.validator
    def _one_per_key(self, attribute: Any, images: tuple[Image, ...]) -> None:
        seen: set[ImageKey] = set()
        for image in images:
            key = image.key
            if key in seen:
                raise InvalidManifest(f"{key} is listed twice")
            seen.add(key)

    @cached_property
    def canonical(self) -> bytes:
        """The canonical JSON, as bytes: what is stored, sent and hashed."""
        images = ",".join([image._canonical for image in self.images])
        return f'{{"format":{_json(FORMAT)},"images":[{images}]}}'.encode("ascii")

    @cached_property
    def digest(self) -> str:
        """The sha256 of :attr:`canonical`, as 64 hexadecimal digits."""
        return hashlib.sha256(self.canonical).hexdigest()

    @cached_property
    def blobs(self) -> Mapping[str, int]:
        """Every distinct file content that the images need: sha256 to size in bytes."""
        return {file.sha256: file.size for image in self.images for file in image.files}

    @cached_property
    def by_key(self) -> Mapping[ImageKey, Image]:
        """The images by what they are a version of."""
        return {image.key: image for image in self.images}

    def only(self, keys: Iterable[ImageKey]) -> Manifest:
        """The manifest of just those of its images whose key is in ``keys``."""
        wanted = set(keys)
        return Manifest(image for image in self.images if image.key in wanted)


EMPTY: Final = Manifest(())


def parse_manifest(data: bytes, digest: str | None = None) -> Manifest:
    """The manifest whose canonical form is ``data``.

    :param digest: if given, what the sha256 of ``data`` must be.
    :raises InvalidManifest: if the digest is another, the JSON is not a manifest, or not in canonical form.
    """
    if digest is not None and (found := hashlib.sha256(data).hexdigest()) != digest:
        raise InvalidManifest(f"the manifest's sha256 is {found}, not {digest} as it was announced")
    try:
        document = json.loads(data)
        if document["format"] != FORMAT:
            raise InvalidManifest(f"the manifest's format is {document['format']!r}, not {FORMAT!r}")
        manifest = Manifest(tuple(_image(entry) for entry in document["images"]))
        if b"\\ud" in data:
            json.dumps(document, ensure_ascii=False).encode("utf-8")  # half a character is no text that can be sent on
    except InvalidManifest:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidManifest(f"not a manifest: {type(error).__name__}: {error}") from error
    if manifest.canonical != data:
        raise InvalidManifest("the manifest is not in canonical form")
    return manifest


_IMAGE_TEXTS: Final = (
    "os", "release", "arch", "subarch", "kflavor", "label", "version", "product", "content_id", "source",
)  # fmt: skip


def _json(document: object) -> str:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def _image_document(image: Image) -> dict[str, object]:
    document: dict[str, object] = {name: getattr(image, name) for name in _IMAGE_TEXTS}
    document["attributes"] = dict(image.attributes)
    document["files"] = [
        {"name": file.name, "ftype": file.ftype, "sha256": file.sha256, "size": file.size,
         "attributes": dict(file.attributes)}
        for file in image.files
    ]  # fmt: skip
    return document


def _image(entry: dict[str, Any]) -> Image:
    texts = {name: entry[name] for name in _IMAGE_TEXTS}
    for name, value in texts.items():
        if not isinstance(value, str):
            raise InvalidManifest(f"{name} is {value!r}, not text")
    files = (
        ImageFile(file["name"], file["ftype"], file["sha256"], file["size"], file["attributes"])
        for file in entry["files"]
    )
    return Image(**texts, files=tuple(files), attributes=entry["attributes"])
