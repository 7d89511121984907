"""Simplestreams trees for tests: written file by file, signed with a key made for the test run, and spoiled at will.

The builder writes what it is told, good or bad; it shares no code with what reads it.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from attrs import define, field, frozen

from region.upstream import Selection, Source

NOW = datetime(2026, 3, 4, 12, 0, 0, tzinfo=UTC)
IMAGES = "com.example:stable:v3:download"
LOADERS = "com.example:stable:1:bootloader-download"
EVERYTHING = (Selection("*", "*"),)


@frozen
class Signer:
    """A signing key in a home directory of its own; ``keyring`` is its public half, binary."""

    home: Path
    keyring: bytes

    def sign(self, payload: bytes) -> bytes:
        """``payload`` as a clear-signed document."""
        return _signed(self.home, payload)

    @property
    def armoured(self) -> bytes:
        """The public key in ASCII armour."""
        return _gpg(self.home, "--armor", "--export")


@cache
def signer(name: str = "Test stream") -> Signer:
    """The key of that name; made once per test process, and removed at its end together with its agent."""
    home = Path(tempfile.mkdtemp(prefix="stream-key-"))
    atexit.register(_remove, home)
    _gpg(
        home, "--passphrase", "", "--quick-generate-key", f"{name} <{name[0]}@example.com>", "ed25519", "sign", "never"
    )
    return Signer(home, _gpg(home, "--export"))


@lru_cache(maxsize=512)
def _signed(home: Path, payload: bytes) -> bytes:
    """Kept, because the same documents are signed over and over."""
    return _gpg(home, "--clearsign", "--output", "-", data=payload)


def _gpg(home: Path, *arguments: str, data: bytes = b"") -> bytes:
    command = ["gpg", "--homedir", str(home), "--batch", "--yes", "--quiet", *arguments]
    return subprocess.run(command, input=data, capture_output=True, check=True).stdout


def _remove(home: Path) -> None:
    subprocess.run(["gpgconf", "--homedir", str(home), "--kill", "all"], capture_output=True, check=False)
    shutil.rmtree(home, ignore_errors=True)


def sha256(data: bytes) -> str:
    """The sha256 in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def rfc2822(moment: datetime) -> str:
    """The date as streams write it."""
    return format_datetime(moment)


def content(text: str, size: int = 300) -> bytes:
    """``size`` bytes that are the same for the same text."""
    return (f"{text}\n".encode() * size)[:size]


@define
class Stream:
    """A stream in the directory ``root``: change ``documents`` as you like, then :meth:`write`.

    ``documents`` maps content id to the products document; ``index`` is what is merged over the index at the end.
    ``updated`` is the date of the index and of every document that has none of its own.
    """

    root: Path
    signer: Signer | None = None
    updated: datetime = NOW
    documents: dict[str, dict[str, Any]] = field(factory=dict)
    index: dict[str, Any] = field(factory=dict)

    @property
    def url(self) -> str:
        """The mirror root, as a ``file:`` URL."""
        return f"file://{self.root}/"

    @property
    def suffix(self) -> str:
        """How the documents' names end."""
        return "sjson" if self.signer else "json"

    def source(self, **fields: Any) -> Source:
        """A source that reads this stream and selects everything, with ``fields`` as given."""
        keyring = self.signer.keyring if self.signer else b""
        values: dict[str, Any] = {"id": 1, "url": self.url, "keyring": keyring, "allow_unsigned": not keyring,
                                  "priority": 1, "selections": EVERYTHING}  # fmt: skip
        return Source(**{**values, **fields})

    def products(self, content_id: str = IMAGES) -> dict[str, Any]:
        """The products of a document, which is made if there is none."""
        document = self.documents.setdefault(
            content_id,
            {"content_id": content_id, "datatype": "image-ids", "format": "products:1.0", "products": {}},
        )
        products: dict[str, Any] = document["products"]
        return products

    def add(
        self,
        release: str = "noble",
        arch: str = "amd64",
        version: str = "20260101",
        files: Mapping[str, bytes] | None = None,
        **attributes: Any,
    ) -> dict[str, Any]:
        """Add a version of a product with a kernel, an initrd and a root file system, and write its files.

        :return: the product, to change.
        """
        name = attributes.pop("product", f"com.example.stable:v3:boot:{release}:{arch}:ga")
        fields = {"os": "ubuntu", "release": release, "arch": arch, "label": "stable", "subarch": "ga-24.04",
                  "kflavor": "generic", "subarches": "generic,ga-24.04", "release_title": f"{release} LTS",
                  "support_eol": "2029-05-31", "version": "24.04", **attributes}  # fmt: skip
        product: dict[str, Any] = self.products().setdefault(name, {"versions": {}})
        product.update(fields)
        named = files or {
            each: content(f"{release} {arch} {version} {each}") for each in ("boot-kernel", "boot-initrd", "squashfs")
        }
        items = {each: self.file(f"{release}/{arch}/{version}/{each}", data, each) for each, data in named.items()}
        product["versions"][version] = {"items": items}
        return product

    def add_loader(self, arch: str = "amd64", version: str = "20260101.0") -> dict[str, Any]:
        """Add a version of a boot loader, and write its files."""
        path = f"bootloaders/uefi/{arch}/{version}/grub.tar.xz"
        items = {"grub2": self.file(path, content(path), "archive.tar.xz", src_package="grub2")}
        product: dict[str, Any] = {"os": "grub-efi", "arch": arch, "arches": f"{arch}, i386", "label": "stable",
                                   "bootloader-type": "uefi", "versions": {version: {"items": items}}}  # fmt: skip
        self.products(LOADERS)[f"com.example.stable:1:grub-efi:uefi:{arch}"] = product
        return product

    def file(self, path: str, data: bytes, ftype: str, **attributes: Any) -> dict[str, Any]:
        """Write a file; the item that describes it."""
        where = self.root / path
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_bytes(data)
        return {"ftype": ftype, "path": path, "size": len(data), "sha256": sha256(data), **attributes}

    def item(self, name: str = "boot-kernel", product: str = "") -> dict[str, Any]:
        """A file's entry, to change: of the newest version of the first product with ``product`` in its name."""
        for document in self.documents.values():
            for each in sorted(document["products"]):
                if product in each:
                    versions = document["products"][each]["versions"]
                    found: dict[str, Any] = versions[max(versions)]["items"][name]
                    return found
        raise LookupError(product)

    def rendered(self) -> dict[str, bytes]:
        """Every document by its path below the root, signed if there is a signer."""
        found, listed = {}, {}
        for content_id, document in self.documents.items():
            dated = {"updated": rfc2822(self.updated), **document}
            path = f"streams/v1/{content_id}.{self.suffix}"
            found[path] = self.signed(json.dumps(dated, indent=1).encode())
            products = document.get("products")
            listed[content_id] = {"datatype": "image-ids", "format": "products:1.0", "path": path,
                                  "updated": dated["updated"], "products": sorted(products or {})}  # fmt: skip
        index = {"format": "index:1.0", "updated": rfc2822(self.updated), "index": listed, **self.index}
        found[f"streams/v1/index.{self.suffix}"] = self.signed(json.dumps(index, indent=1).encode())
        return found

    def signed(self, payload: bytes) -> bytes:
        """The payload, signed if there is a signer."""
        return self.signer.sign(payload) if self.signer else payload

    def write(self) -> Stream:
        """Write the index and the documents, in place of those of before."""
        shutil.rmtree(self.root / "streams", ignore_errors=True)
        (self.root / "streams" / "v1").mkdir(parents=True)
        for path, data in self.rendered().items():
            (self.root / path).write_bytes(data)
        return self

    def change(self, how: Callable[..., None], product: str = "") -> Stream:
        """Have one of the changes below made to the product with ``product`` in its name, a minute later; write."""
        for document in self.documents.values():
            for name in sorted(document["products"]):
                if product in name:
                    how(self, document["products"], name)
                    self.updated += timedelta(minutes=1)
                    return self.write()
        raise LookupError(product)


# What upstreams do to their streams, well or badly: give one to :meth:`Stream.change`.


def _newest(products: dict[str, Any], name: str) -> tuple[str, dict[str, Any]]:
    versions = products[name]["versions"]
    version = max(versions)
    return version, versions[version]["items"]


def new_version(stream: Stream, products: dict[str, Any], name: str) -> None:
    """A new version of the product, with other files."""
    old, items = _newest(products, name)
    new = f"{old}.1"
    products[name]["versions"][new] = {
        "items": {
            each: {
                **item,
                **stream.file(
                    f"{item['path'].partition('~')[0]}~{new}", content(f"{name} {new} {each}"), item["ftype"]
                ),
            }
            for each, item in items.items()
        }
    }


def same_version(stream: Stream, products: dict[str, Any], name: str) -> None:
    """Another content of its first file, under the same version name and path."""
    _, items = _newest(products, name)
    item = items[min(items)]
    item.update(stream.file(item["path"], content(f"again {item['sha256']}", item["size"] + 1), item["ftype"]))


def drop_product(stream: Stream, products: dict[str, Any], name: str) -> None:
    """The product is not listed any more."""
    del products[name]


def corrupt_file(stream: Stream, products: dict[str, Any], name: str) -> None:
    """A byte of its first file is flipped, but not its sha256."""
    path = _first_file(stream, products, name)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def truncate_file(stream: Stream, products: dict[str, Any], name: str) -> None:
    """Its first file is cut in half, but not its size."""
    path = _first_file(stream, products, name)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def missing_file(stream: Stream, products: dict[str, Any], name: str) -> None:
    """Its first file is gone, but still listed."""
    _first_file(stream, products, name).unlink()


def _first_file(stream: Stream, products: dict[str, Any], name: str) -> Path:
    _, items = _newest(products, name)
    path: str = items[min(items)]["path"]
    return stream.root / path
