"""What the rack's tests are made of: small images whose content is real."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from rpc.blobs import BlobStore
from rpc.manifest import Image, ImageFile, Manifest

URL = "http://region.example:5240/MAAS/images-stream"


def content(text: str) -> bytes:
    """Some bytes that are the file ``text``."""
    return f"the content of {text}\n".encode() * 2


def image(
    os_: str = "ubuntu",
    release: str = "noble",
    version: str = "20260101",
    files: Mapping[str, str] | None = None,
    arch: str = "amd64",
) -> Image:
    """An image whose files are ``{name: text}``, each with :func:`content` of its text."""
    named = files or {name: f"{release} {version} {name}" for name in ("boot-kernel", "boot-initrd", "squashfs")}
    return Image(
        os=os_, release=release, arch=arch, subarch="generic" if release else "", kflavor="generic" if release else "",
        label="stable", version=version, product=f"test:{release}:{arch}", content_id="test:images",
        source="http://upstream.example/",
        files=tuple(
            ImageFile(name, name, hashlib.sha256(content(text)).hexdigest(), len(content(text)))
            for name, text in named.items()
        ),
    )  # fmt: skip


def contents_of(*images: Image) -> dict[str, bytes]:
    """Every content that :func:`image` gave the ``images``, by sha256."""
    texts = {f"{each.release} {each.version} {file.name}" for each in images for file in each.files}
    return {hashlib.sha256(content(text)).hexdigest(): content(text) for text in texts}


def put(blobs: BlobStore, data: bytes) -> str:
    """Make ``data`` a verified blob, as a fetch would; its sha256."""
    sha256 = hashlib.sha256(data).hexdigest()
    part = blobs.open_part(sha256, len(data))
    try:
        part.load()
        part.restart()
        part.write(data)
        part.finish()
    finally:
        part.close()
    return sha256


def put_all(blobs: BlobStore, manifest: Manifest) -> None:
    """Make all that ``manifest`` needs verified blobs."""
    known = contents_of(*manifest.images)
    for sha256, size in manifest.blobs.items():
        if not blobs.verify(sha256, size):
            put(blobs, known[sha256])


def tree(path: Path) -> dict[str, bytes]:
    """Every file below ``path``, by its relative name."""
    return {str(each.relative_to(path)): each.read_bytes() for each in path.rglob("*") if each.is_file()}


def expected_tree(manifest: Manifest) -> dict[str, bytes]:
    """What :func:`tree` finds in a snapshot of ``manifest``."""
    known = contents_of(*manifest.images)
    wanted = {"manifest.json": manifest.canonical}
    for each in manifest.images:
        parts = (each.os, each.release, each.arch, each.subarch, each.kflavor, each.label, each.version)
        for file in each.files:
            wanted["/".join([*(part or "_" for part in parts), file.name])] = known[file.sha256]
    return wanted
