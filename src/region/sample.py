"""A small stream to try the product with, written by the product itself.

Everything in it is called "sample" and nothing in it can boot: the files hold a line that says so and bytes computed
from their names. The same code writes the same bytes each time, so that importing it again changes nothing.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

VERSION: Final = "20260101"
UPDATED: Final = "Thu, 01 Jan 2026 00:00:00 +0000"
ARCHES: Final = ("amd64", "arm64")
RELEASES: Final[Mapping[str, Mapping[str, str]]] = {
    "alpha": {"release_title": "Sample Alpha (not bootable)", "version": "1.0", "support_eol": "2036-01-01"},
    "beta": {"release_title": "Sample Beta (not bootable)", "version": "2.0", "support_eol": "2038-01-01"},
}
ITEMS: Final[Mapping[str, int]] = {"boot-kernel": 256 << 10, "boot-initrd": 512 << 10, "squashfs": 1 << 20}
"""The files of each image: ftype to size in bytes."""

IMAGES: Final = "org.stanchion.sample:1:download"
LOADERS: Final = "org.stanchion.sample:1:bootloader-download"


def write_sample(root: Path) -> str:
    """Write the stream below ``root`` and return its ``file:`` URL. What is there already and right is left alone."""
    documents = {IMAGES: _images(root), LOADERS: _loaders(root)}
    index: dict[str, Any] = {}
    for content_id, products in documents.items():
        path = f"streams/v1/{content_id}.json"
        common = {"datatype": "image-downloads", "format": "products:1.0", "updated": UPDATED}
        index[content_id] = {**common, "path": path, "products": sorted(products)}
        _put_json(root / path, {**common, "content_id": content_id, "products": products})
    _put_json(root / "streams/v1/index.json", {"format": "index:1.0", "updated": UPDATED, "index": index})
    return root.absolute().as_uri() + "/"


def _images(root: Path) -> dict[str, Any]:
    products = {}
    for release, attributes in RELEASES.items():
        for arch in ARCHES:
            directory = f"sample/{release}/{arch}/{VERSION}"
            items = {
                ftype: _item(root, f"{directory}/{ftype}", ftype, _content(f"{directory}/{ftype}", size))
                for ftype, size in ITEMS.items()
            }
            products[f"org.stanchion.sample:boot:{release}:{arch}:generic"] = {
                "os": "sample",
                "release": release,
                "release_codename": release.title(),
                "arch": arch,
                "subarch": "generic",
                "subarches": "generic",
                "kflavor": "generic",
                "krel": release,
                "label": "sample",
                **attributes,
                "versions": {VERSION: {"items": items}},
            }
    return products


def _loaders(root: Path) -> dict[str, Any]:
    products = {}
    for arch in ARCHES:
        path = f"bootloaders/sample/{arch}/{VERSION}/sample-loader.tar.xz"
        products[f"org.stanchion.sample:sample-loader:uefi:{arch}"] = {
            "os": "sample-loader",
            "arch": arch,
            "arches": arch,
            "bootloader-type": "uefi",
            "label": "sample",
            "versions": {VERSION: {"items": {"sample-loader": _item(root, path, "archive.tar.xz", _archive(path))}}},
        }
    return products


def _item(root: Path, path: str, ftype: str, content: bytes) -> dict[str, Any]:
    _put(root / path, content)
    return {"ftype": ftype, "path": path, "sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}


def _content(name: str, size: int) -> bytes:
    head = f"Stanchion sample {name}: not bootable\n".encode("ascii")
    return head + hashlib.shake_128(name.encode("ascii")).digest(size - len(head))


def _archive(name: str) -> bytes:
    content = _content(name, 64 << 10)
    member = tarfile.TarInfo("sample.efi")
    member.size = len(content)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        archive.addfile(member, io.BytesIO(content))
    return lzma.compress(packed.getvalue(), preset=1)


def _put_json(path: Path, document: Mapping[str, Any]) -> None:
    _put(path, json.dumps(document, indent=1, sort_keys=True).encode("ascii") + b"\n")


def _put(path: Path, content: bytes) -> None:
    if path.is_file() and path.stat().st_size == len(content) and path.read_bytes() == content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(content)
    os.rename(part, path)
