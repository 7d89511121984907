"""What a generation looks like to a standard simplestreams client: an index and one products document per content id.

Every path in them names the generation or the content, so that index, products and files fit together for a client
that read the index before another generation was published. Upstream's own names and attributes are kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import datetime
from email.utils import format_datetime
from typing import Any, Final

from attrs import frozen

from rpc.manifest import Image, ImageFile, Manifest, is_path_component

DATATYPE: Final = "image-downloads"
PRODUCTS: Final = "products:1.0"
INDEX: Final = "index:1.0"

_PRODUCT_TEXTS: Final = ("os", "release", "arch", "subarch", "kflavor", "label")


@frozen
class Rendering:
    """The documents of one generation: ``index``, and ``products`` by file name, as bytes of JSON."""

    index: bytes
    products: Mapping[str, bytes]


def render(manifest: Manifest, published: datetime) -> Rendering:
    """The documents of a generation.

    :param published: when it was published; all documents say that they were updated then.
    """
    contents: dict[str, dict[str, Image]] = {}
    for image in manifest.images:
        products = contents.setdefault(content_id(image), {})
        products[_distinct(image, products)] = image
    updated = format_datetime(published)
    index: dict[str, Any] = {}
    documents: dict[str, bytes] = {}
    for name, products in sorted(contents.items()):
        common = {"datatype": DATATYPE, "format": PRODUCTS, "updated": updated}
        file_name = document_name(name)
        path = f"generations/{manifest.digest}/streams/v1/{file_name}"
        index[name] = {**common, "path": path, "products": sorted(products)}
        documents[file_name] = _json(
            {**common, "content_id": name, "products": {key: _product(image) for key, image in products.items()}}
        )
    return Rendering(_json({"format": INDEX, "updated": updated, "index": index}), documents)


def content_id(image: Image) -> str:
    """The content id under which ``image`` is listed: upstream's, but boot loaders never share one with images."""
    if image.is_bootloader and "bootloader" not in image.content_id:
        return f"{image.content_id}:bootloader-download"
    return image.content_id


def document_name(name: str) -> str:
    """The file name of the products document of content id ``name``, which is any text."""
    stem = name if is_path_component(name) else f"content-{hashlib.sha256(name.encode()).hexdigest()}"
    return f"{stem}.json"


def _distinct(image: Image, taken: Mapping[str, Image]) -> str:
    """The name of the image's product. Sources may use the same name for different images; all of them are listed."""
    name = image.product
    if name in taken:
        name = ":".join((name, *(part for part in _key_texts(image).values() if part)))
    while name in taken:
        name += ":again"
    return name


def _key_texts(image: Image) -> dict[str, str]:
    return {name: getattr(image, name) for name in _PRODUCT_TEXTS}


def _product(image: Image) -> dict[str, Any]:
    key = {name: value for name, value in _key_texts(image).items() if value}
    items = {file.name: _item(file) for file in image.files}
    return {**dict(image.attributes), **key, "versions": {image.version: {"items": items}}}


def _item(file: ImageFile) -> dict[str, Any]:
    what = {"ftype": file.ftype, "path": f"blobs/{file.sha256}", "sha256": file.sha256, "size": file.size}
    return {**dict(file.attributes), **what}


def _json(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, indent=1).encode("ascii") + b"\n"
