"""What is asked of a source, and what reading it ends in: immutable values that the reader, the plan and stores share.

Reading a source ends in exactly one of :class:`SourceRead` and :class:`SourceFailed`. What a read source could not say
for certain (a document that failed, an entry that is broken) is part of the value, so that a plan keeps what depends
on it and never takes silence for "no longer listed".
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from typing import Final, Literal

from attrs import field, frozen

from rpc.manifest import Image, ImageKey
from rpc.urls import public

ANY: Final = "*"

UPLOADS: Final = "uploads:"
"""What stands for a source's URL in the images that people have uploaded."""

Severity = Literal["error", "warning"]

MAX_SHOWN: Final = 600
"""Characters of a text of upstream's that are shown."""

_UNSHOWABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def is_plain(text: str) -> bool:
    """Whether a text can be shown, logged and stored as it is: no control characters, no half characters."""
    return _UNSHOWABLE.search(text) is None


def _shown(text: str) -> str:
    """What upstream wrote, so that it can be shown, logged and stored whatever it is."""
    text = _UNSHOWABLE.sub(lambda found: ascii(found[0])[1:-1], text)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"


def _texts(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(values)


@frozen
class Selection:
    """Which images of a source to keep; each text is matched exactly, or is ``*`` for any.

    ``subarches`` are the sub-architectures of the machines to serve, as in MAAS: a product is kept if its own
    ``subarch`` or any of the ``subarches`` that it says it can boot is among them. Boot loaders have no release: a
    selection keeps those of its ``arches`` and ``labels`` whatever its ``os`` and ``release`` are, for without them
    nothing boots.
    """

    os: str
    release: str
    arches: tuple[str, ...] = field(default=(ANY,), converter=_texts)
    subarches: tuple[str, ...] = field(default=(ANY,), converter=_texts)
    labels: tuple[str, ...] = field(default=(ANY,), converter=_texts)

    def asks_for(self, product: Mapping[str, str]) -> bool:
        """Whether a product with these attributes is kept.

        :param product: simplestreams attributes (``os``, ``release``, ``arch``, ``arches``, ``subarch``, ``subarches``,
            ``label``, ``bootloader-type``). One that is missing is taken to match: it may be what was asked for.
        """
        if not _allowed(self.labels, _one(product, "label")):
            return False
        if is_bootloader(product):
            return _allowed(self.arches, (*_one(product, "arch"), *_list(product, "arches")))
        return (
            _allowed((self.os,), _one(product, "os"))
            and _allowed((self.release,), _one(product, "release"))
            and _allowed(self.arches, _one(product, "arch"))
            and _allowed(self.subarches, (*_one(product, "subarch"), *_list(product, "subarches")))
        )


def is_bootloader(product: Mapping[str, str]) -> bool:
    """Whether a product with these attributes is a boot loader: it has a ``bootloader-type`` and no release."""
    return not product.get("release") and "bootloader-type" in product


def _one(product: Mapping[str, str], name: str) -> tuple[str, ...]:
    return (product[name],) if product.get(name) else ()


def _list(product: Mapping[str, str], name: str) -> tuple[str, ...]:
    """The words of a comma list; real streams write it with and without spaces."""
    return tuple(word.strip() for word in product.get(name, "").split(",") if word.strip())


def _allowed(allowed: Collection[str], values: Collection[str]) -> bool:
    return not values or ANY in allowed or any(value in allowed for value in values)


@frozen
class Source:
    """A simplestreams source as the operator set it up.

    ``url`` is its mirror root, or the URL of its index (``…/streams/v1/….sjson`` or ``.json``); it may hold a user's
    name and password, so everything that is shown, logged or published has :attr:`name` instead. ``keyring`` holds the
    public keys, one of which must have signed (binary or ASCII-armoured; empty only with ``allow_unsigned``). Where two
    sources offer the same image, the one with the higher ``priority`` is used, then the one with the lower ``id``.
    ``former`` are the names that it had before it was pointed elsewhere: what it gave then is still its own.
    """

    id: int
    url: str
    keyring: bytes = field(repr=False)
    allow_unsigned: bool
    priority: int
    selections: tuple[Selection, ...]
    former: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The URL without user's name and password: what the source is called, in manifests too. No two share it."""
        return public(self.url)

    @property
    def rank(self) -> tuple[int, int, str]:
        """Sources sort by this, the one that is preferred first."""
        return -self.priority, self.id, self.url

    def asks_for(self, product: Mapping[str, str]) -> bool:
        """Whether any selection keeps a product with these attributes; see :meth:`Selection.asks_for`."""
        return any(selection.asks_for(product) for selection in self.selections)

    def selects(self, image: Image) -> bool:
        """Whether any selection keeps this image."""
        key = image.key
        product = dict(image.attributes)
        product.update(os=key.os, release=key.release, arch=key.arch, subarch=key.subarch, label=key.label)
        if not key.release:
            product.setdefault("bootloader-type", "")
        return self.asks_for(product)


@frozen(order=True)
class Problem:
    """Something that an operator should know about an import, said so that it can be acted on.

    ``source`` is the source's :attr:`~Source.name`; ``product``, ``version`` and ``file`` are upstream's names, empty
    where they do not apply. An *error* kept something from being imported; a *warning* did not.
    """

    severity: Severity
    source: str
    product: str = field(converter=_shown)
    version: str = field(converter=_shown)
    file: str = field(converter=_shown)
    reason: str = field(converter=_shown)


@frozen
class UpstreamImage:
    """An image that a source offers, with where each of its files can be fetched: (sha256, absolute URL) pairs."""

    image: Image
    urls: tuple[tuple[str, str], ...]


@frozen(order=True)
class DocumentSeen:
    """A document that was read and accepted.

    ``name`` is ``"index"`` or the content id. ``updated`` is the document's own date, but never later than when it was
    read: a date in the future must not make every later document look like a replay.
    """

    name: str
    updated: datetime
    sha256: str


@frozen(order=True)
class DocumentFailed:
    """A products document that the index lists and that could not be used: all that came from it must be kept."""

    content_id: str
    reason: str = field(converter=_shown)


@frozen
class Broken:
    """A product that upstream lists with an entry that cannot be used: the image it stands for must be kept.

    ``key`` is ``None`` if not even that could be read; then ``content_id`` and ``product`` say which images are meant.
    """

    content_id: str
    product: str = field(converter=_shown)
    version: str = field(converter=_shown)
    key: ImageKey | None
    reason: str = field(converter=_shown)


@frozen
class SourceRead:
    """A source whose index was read and accepted.

    ``images`` are those selected, in their newest version, at most one per key. An image of this source that is neither
    here, nor ``listed_broken``, nor of a document in ``failed`` is no longer listed upstream.
    """

    source: Source
    images: tuple[UpstreamImage, ...]
    problems: tuple[Problem, ...] = ()
    documents: tuple[DocumentSeen, ...] = ()
    listed_broken: tuple[Broken, ...] = ()
    failed: tuple[DocumentFailed, ...] = ()


@frozen
class SourceFailed:
    """A source that could not be read, or not believed; ``reason`` is one sentence. All that came from it is kept."""

    source: Source
    reason: str
    problems: tuple[Problem, ...] = ()
