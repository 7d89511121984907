"""What images a products document offers: its selected products in their newest version, checked field by field.

Attributes are inherited and aliases expanded by python-simplestreams' own functions. A product that cannot be used is
reported with the names an operator needs to find it, and stands for itself only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from simplestreams.util import ALIASNAME, expand_data, products_exdata, stringitems

from region.upstream.documents import (
    MAX_NAME,
    PRODUCTS_FORMAT,
    ProductsRead,
    Repeated,
    Unusable,
    date,
    parse,
    texts,
)
from region.upstream.paths import UnsafePath, file_url
from region.upstream.values import Broken, Problem, Source, UpstreamImage, is_bootloader, is_plain
from rpc.manifest import KNOWN_FTYPES, MANIFEST_NAME, MAX_FILE_SIZE, Image, ImageFile, ImageKey, InvalidManifest

_DOCUMENT_FIELDS: Final = frozenset({"format", "content_id", "datatype", "updated", "license"})
_KEY_FIELDS: Final = ("os", "release", "arch", "subarch", "kflavor", "label")
# The date of a document changes whenever it is written again, and makes no other image.
_NOT_ATTRIBUTES: Final = _DOCUMENT_FIELDS.union(_KEY_FIELDS)
# Other checksums are not checked here, so they are not passed on as if they were.
_FILE_FIELDS: Final = frozenset({"ftype", "path", "size", "sha256", "sha512", "sha384", "sha1", "md5"})


MAX_TEXTS: Final = 16 << 10
"""Characters of the attributes of an image, names and values together, or of one of its files. Those of real streams
have some 1,000; racks tell them in one piece, and clients get them with every answer."""


class _Unfit(ValueError):
    """Why an entry cannot be used, and the file of it that is at fault, if it is one."""

    def __init__(self, reason: str, file: str = "") -> None:
        super().__init__(reason)
        self.file = file


def read_products(payload: bytes, *, sha256: str, root: str, content_id: str, source: Source) -> ProductsRead:
    """The images that a products document offers.

    :param payload: its JSON, already verified.
    :param sha256: of the document as it was fetched.
    :param root: the source's mirror root, ending in a slash.
    :param content_id: what the index calls it.
    :param source: whose selections say which products to read.
    :raises Unusable: if the document cannot be used as a whole.
    """
    document = parse(payload, PRODUCTS_FORMAT)
    if document.get("content_id") != content_id:
        raise Unusable(
            f"its content_id is {document.get('content_id')!r}, the index calls it {content_id!r}", torn=True
        )
    updated = date(document.get("updated"), "it")
    products = document.get("products")
    if not isinstance(products, dict):
        raise Unusable(f"its 'products' is {type(products).__name__}, not an object")
    aliases = document.get(ALIASNAME)
    top = {name: value for name, value in texts(document).items() if name not in _DOCUMENT_FIELDS}
    _expand(top, aliases, Unusable)
    read = _Reader(source, root, content_id, top, aliases)
    repeats = products.repeats if isinstance(products, Repeated) else {}
    for product in sorted(products):
        before = len(read.images)
        for tree in repeats.get(product, [products[product]]):
            read.product(product, tree)
        read.require_one(product, before)
    return ProductsRead(
        content_id,
        updated,
        sha256,
        products=tuple(sorted(products)),
        images=tuple(read.images),
        broken=tuple(read.broken),
        problems=tuple(read.problems),
    )


def _expand(tree: dict[str, Any], aliases: object, unfit: type[ValueError]) -> None:
    try:
        expand_data(tree, aliases)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:  # RecursionError is a RuntimeError
        raise unfit(f"its aliases cannot be expanded: {type(error).__name__}: {error}") from error


class _Reader:
    """Collects what the products of one document come to."""

    def __init__(self, source: Source, root: str, content_id: str, top: Mapping[str, Any], aliases: object) -> None:
        self._source = source
        self._root = root
        self._content_id = content_id
        self._top = top
        self._aliases = aliases
        self.images: list[UpstreamImage] = []
        self.broken: list[Broken] = []
        self.problems: list[Problem] = []

    def product(self, product: str, tree: object) -> None:
        """Read one product."""
        version = ""
        known: Mapping[str, str] = {}
        try:
            versions = self._versions(product, tree)
            known = self._attributes(product, tree)
            if not versions:
                raise _Unfit("it lists no versions")
            version = max(versions)  # by the C locale's order of strings, as the format has it
            content = self._version(version, versions)
            known = self._attributes(product, tree, version)
            if self._source.asks_for(known):
                self._image(product, version, content, known)
        except _Unfit as error:
            if self._source.asks_for(known):
                reason = f"{error.file}: {error}" if error.file else str(error)
                self.broken.append(Broken(self._content_id, product, version, _key(known), reason))
                self.problems.append(Problem("error", self._source.name, product, version, error.file, str(error)))

    def require_one(self, product: str, before: int) -> None:
        """Refuse what was read since ``before`` if it is several images: the one name would say which of neither."""
        found = [offer.image for offer in self.images[before:]]
        names = sorted({str(image.key) for image in found})
        if len(names) < 2:
            return
        del self.images[before:]
        reason = f"it is listed more than once, as {' and as '.join(names)}"
        self.broken += [Broken(self._content_id, product, image.version, image.key, reason) for image in found]
        self.problems.append(Problem("error", self._source.name, product, found[0].version, "", reason))

    def _attributes(self, product: str, tree: object, *version: str) -> Mapping[str, str]:
        """The text attributes of a product, or of a version of it, with what it inherits."""
        whole = {**self._top, "products": {product: tree}}
        inherited: dict[str, str] = products_exdata(whole, (product, *version), insert_fieldnames=False)
        return inherited

    def _versions(self, product: str, tree: object) -> Mapping[str, Any]:
        tree = _tree(tree, "it")
        if len(product) > MAX_NAME:
            raise _Unfit(f"its name is {len(product)} characters long, more than {MAX_NAME}")
        _expand(tree, self._aliases, _Unfit)
        versions = tree.get("versions", {})
        if not isinstance(versions, dict):
            raise _Unfit(f"its 'versions' is {type(versions).__name__}, not an object")
        return versions

    def _version(self, version: str, versions: Mapping[str, Any]) -> Mapping[str, Any]:
        if isinstance(versions, Repeated) and version in versions.repeats:
            raise _Unfit(f"version {version} is listed more than once, with different contents")
        return _tree(versions[version], "the version")

    def _image(self, product: str, version: str, content: Mapping[str, Any], known: Mapping[str, str]) -> None:
        items = _tree(content.get("items", {}), "its 'items'")
        if not items:
            raise _Unfit("the version lists no files")
        for name in ("os", "arch", "label"):
            if name not in known:
                raise _Unfit(f"it has no {name!r}")
        if "release" not in known and not is_bootloader(known):
            raise _Unfit("it has neither a 'release' nor a 'bootloader-type'")
        if known["os"] == MANIFEST_NAME:  # a rack could not keep it, nor anything that is published together with it
            raise _Unfit(f"its os is {MANIFEST_NAME!r}, which racks call something else")
        _require_plain({"name": product, **known})
        files: list[ImageFile] = []
        urls: dict[str, str] = {}
        faults: list[_Unfit] = []
        for name in sorted(items):
            try:
                file = _file(name, items[name])
                urls.setdefault(file.sha256, file_url(self._root, items[name].get("path")))
                files.append(file)
            except (_Unfit, UnsafePath, InvalidManifest) as error:
                faults.append(_Unfit(str(error), name))
        for fault in faults[1:]:
            self.problems.append(Problem("error", self._source.name, product, version, fault.file, str(fault)))
        if faults:
            raise faults[0]
        attributes = {name: value for name, value in known.items() if name not in _NOT_ATTRIBUTES}
        try:
            image = Image(
                **{name: known.get(name, "") for name in _KEY_FIELDS},
                version=version,
                product=product,
                content_id=self._content_id,
                source=self._source.name,
                files=tuple(files),
                attributes=tuple(attributes.items()),
            )
        except InvalidManifest as error:
            raise _Unfit(str(error)) from error
        self.images.append(UpstreamImage(image, tuple(sorted(urls.items()))))
        self.problems.extend(self._warnings(image))

    def _warnings(self, image: Image) -> Iterator[Problem]:
        for file in image.files:
            if file.ftype not in KNOWN_FTYPES:
                reason = f"its ftype {file.ftype!r} is not known; the file is kept as it is"
                yield Problem("warning", image.source, image.product, image.version, file.name, reason)


def _key(known: Mapping[str, str]) -> ImageKey | None:
    """What a product is a version of, as far as that can be said."""
    if not all(name in known for name in ("os", "arch", "label")) or not ("release" in known or is_bootloader(known)):
        return None
    return ImageKey(*(known.get(name, "") for name in _KEY_FIELDS))


def _tree(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Unfit(f"{what} is {type(value).__name__}, not an object")
    return _once(value, what)


def _once(tree: dict[str, Any], what: str) -> dict[str, Any]:
    if isinstance(tree, Repeated):
        raise _Unfit(f"{what} gives {', '.join(map(repr, sorted(tree.repeats)))} more than once, with different values")
    return tree


def _file(name: str, value: object) -> ImageFile:
    item = _tree(value, "the entry")
    for field in ("ftype", "path", "sha256", "size"):
        if field not in item:
            raise _Unfit(f"it has no {field!r}")
    sha256 = item["sha256"]
    attributes = {field: text for field, text in stringitems(item).items() if field not in _FILE_FIELDS}
    _require_plain(attributes)
    sha256 = sha256.lower() if isinstance(sha256, str) else sha256
    return ImageFile(name, item["ftype"], sha256, _size(item["size"]), tuple(attributes.items()))


def _require_plain(attributes: Mapping[str, str]) -> None:
    """:raises _Unfit: if there is more text than an image has, or some that cannot be shown."""
    if (length := sum(len(name) + len(text) for name, text in attributes.items())) > MAX_TEXTS:
        longest = max(attributes, key=lambda name: len(attributes[name]))
        raise _Unfit(
            f"its {len(attributes)} attributes have {length} characters, more than {MAX_TEXTS}; the longest is "
            f"{longest[:80]!r}"
        )
    for name, text in attributes.items():
        if not (is_plain(name) and is_plain(text)):
            raise _Unfit(f"its {name} has a control character: {text!r}")


def _size(value: object) -> int:
    """A size in bytes; some streams write numbers as text."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= len(str(MAX_FILE_SIZE)):
        return int(value)
    if type(value) is not int or not 0 <= value <= MAX_FILE_SIZE:
        shown = str(value) if len(str(value)) <= 40 else f"a number of {len(str(value))} digits"
        raise _Unfit(f"its size is {shown}, not a number of bytes from 0 to {MAX_FILE_SIZE}")
    return value
