"""What an index or a products document says, as values: JSON is parsed here, and what does not fit is refused by name.

A document that cannot be believed as a whole (not JSON, another format, no date) raises :class:`Unusable`. Within a
products document one bad entry is that entry's fault only: it becomes a :class:`Broken` with a problem that names
product, version and file. The format is that of ``doc/README`` in python-simplestreams.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final

from attrs import frozen

from region.upstream.paths import UnsafePath, file_url
from region.upstream.values import Broken, DocumentFailed, Problem, UpstreamImage, is_plain

INDEX_FORMAT: Final = "index:1.0"
PRODUCTS_FORMAT: Final = "products:1.0"
MAX_LISTED: Final = 1000
"""Documents in one index; the largest in the field list a few dozen."""

MAX_NAME: Final = 256
"""Characters in the name of a document, a product or a version."""


class Unusable(ValueError):
    """The document cannot be used as a whole; the text says why.

    ``torn`` is whether it may be one of another moment than the index that named it, so that reading again can help.
    """

    def __init__(self, reason: str, *, torn: bool = False) -> None:
        super().__init__(reason)
        self.torn = torn


@frozen
class Listed:
    """A products document that an index lists: its URL, its date and its products as the index has them."""

    content_id: str
    url: str
    updated: datetime | None
    products: tuple[str, ...]


@frozen
class IndexRead:
    """An index that was read. ``sha256`` is that of the whole document, its signature included."""

    updated: datetime
    sha256: str
    listed: tuple[Listed, ...]
    failed: tuple[DocumentFailed, ...] = ()


@frozen
class ProductsRead:
    """A products document that was read: its selected images and those selected that cannot be used."""

    content_id: str
    updated: datetime
    sha256: str
    products: tuple[str, ...]
    images: tuple[UpstreamImage, ...]
    broken: tuple[Broken, ...] = ()
    problems: tuple[Problem, ...] = ()


class Repeated(dict[str, Any]):
    """A JSON object that gives a name more than once, with different values: ``repeats`` holds all of those."""

    repeats: dict[str, list[Any]]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    plain = dict(pairs)
    if len(plain) == len(pairs):
        return plain
    values: dict[str, list[Any]] = {}
    for name, value in pairs:
        held = values.setdefault(name, [])
        if value not in held:
            held.append(value)
    repeats = {name: held for name, held in values.items() if len(held) > 1}
    if not repeats:
        return plain
    repeated = Repeated(plain)
    repeated.repeats = repeats
    return repeated


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def parse(payload: bytes, expected: str) -> dict[str, Any]:
    """The JSON object of a document.

    :param expected: what its ``format`` must be.
    :raises Unusable: if it is not UTF-8, not JSON, not an object, or of another format.
    """
    try:
        document = json.loads(payload.decode("utf-8"), object_pairs_hook=_object, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise Unusable(f"it is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except RecursionError as error:
        raise Unusable("its JSON is nested too deeply") from error
    except ValueError as error:
        begin = payload[:40].decode("utf-8", "replace")
        raise Unusable(f"it is not JSON: {error} (it begins with {begin!r})") from error
    if not isinstance(document, dict):
        raise Unusable(f"it is a JSON {type(document).__name__}, not an object")
    if document.get("format") != expected:
        raise Unusable(f"its format is {document.get('format')!r}, not {expected!r}")
    if isinstance(document, Repeated):
        raise Unusable(f"it gives {', '.join(map(repr, sorted(document.repeats)))} more than once")
    return document


def date(value: object, what: str) -> datetime:
    """The moment that an ``updated`` field names (RFC 2822), in UTC.

    :raises Unusable: if it is missing or not such a date.
    """
    if not isinstance(value, str):
        raise Unusable(f"{what} has no 'updated' date (it is {value!r})")
    try:
        moment = parsedate_to_datetime(value)
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, TypeError, IndexError, OverflowError) as error:
        raise Unusable(f"{what} has 'updated' {value!r}, which is not a date such as RFC 2822 has") from error


def read_index(payload: bytes, *, sha256: str, root: str, signed: bool) -> IndexRead:
    """What an index lists.

    :param payload: its JSON, already verified.
    :param sha256: of the document as it was fetched.
    :param root: the source's mirror root, ending in a slash.
    :param signed: whether the documents must be signed; their paths then end in ``.sjson``.
    :raises Unusable: if the index cannot be used as a whole.
    """
    document = parse(payload, INDEX_FORMAT)
    updated = date(document.get("updated"), "the index")
    entries = document.get("index")
    if not isinstance(entries, dict):
        raise Unusable(f"its 'index' is {type(entries).__name__}, not an object")
    if isinstance(entries, Repeated):
        raise Unusable(f"it lists {', '.join(sorted(entries.repeats))} more than once")
    if len(entries) > MAX_LISTED:
        raise Unusable(f"it lists {len(entries)} documents, more than {MAX_LISTED}")
    listed: list[Listed] = []
    failed: list[DocumentFailed] = []
    for content_id, entry in sorted(entries.items()):
        try:
            one = _listed(content_id, entry, root, signed)
        except (Unusable, UnsafePath) as error:
            failed.append(DocumentFailed(content_id, f"the index's entry for it cannot be used: {error}"))
        else:
            if one:
                listed.append(one)
    if not listed and not failed:
        raise Unusable("it lists no products document")
    return IndexRead(updated, sha256, tuple(listed), tuple(failed))


def _listed(content_id: str, entry: object, root: str, signed: bool) -> Listed | None:
    """The document that an entry of an index lists; None if it is of a format that is not about products."""
    if content_id in ("", "index") or len(content_id) > MAX_NAME or not is_plain(content_id):
        raise Unusable("its name is not a content id")
    if not isinstance(entry, dict):
        raise Unusable(f"it is {type(entry).__name__}, not an object")
    if isinstance(entry, Repeated):
        raise Unusable(f"it gives {', '.join(sorted(entry.repeats))} more than once")
    kind = entry.get("format")
    if kind != PRODUCTS_FORMAT:
        if isinstance(kind, str) and kind and not kind.startswith("products:"):
            return None
        raise Unusable(f"its format is {kind!r}, not {PRODUCTS_FORMAT!r}")
    path = entry.get("path")
    if signed and isinstance(path, str) and path.endswith(".json"):
        path = path.removesuffix(".json") + ".sjson"
    products = entry.get("products", [])
    if not isinstance(products, list) or not all(isinstance(name, str) for name in products):
        raise Unusable("its 'products' is not a list of names")
    updated = date(entry["updated"], "it") if "updated" in entry else None
    return Listed(content_id, file_url(root, path), updated, tuple(products))


def texts(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a tree that are not themselves trees or lists."""
    return {name: value for name, value in tree.items() if not isinstance(value, dict | list)}
