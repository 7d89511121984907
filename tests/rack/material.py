"""What the rack's tests are made of: small images whose content is real, and a disk that stops at any step."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from attrs import define, field, frozen

from rack.files import Files
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


def _cut(path: Path, length: int) -> None:
    if path.exists():
        os.truncate(path, length)


class Crash(BaseException):
    """The machine stopped. No code of the rack runs after this."""


@frozen
class Undo:
    """What a loss of power does to ``path``, unless the disk is told to sync ``where`` before."""

    where: Path
    path: Path
    does: Callable[[Path], object]
    renamed_from: Path | None = None

    def moved(self, old: Path, new: Path) -> Undo:
        """The same after ``old`` got the name ``new``."""

        def move(path: Path) -> Path:
            return new / path.relative_to(old) if path.is_relative_to(old) else path

        return Undo(move(self.where), move(self.path), self.does, self.renamed_from)


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


@define
class StoppingFiles(Files):
    """A disk on which the ``at``-th change does not happen, nor anything after it.

    With ``error`` the change fails with that errno instead, just once. :meth:`lose_power` takes back whatever was not
    made durable: contents are cut, names that were not synced disappear, renames are undone.
    """

    at: int | None = None
    error: int | None = None
    steps: int = 0
    said: list[str] = field(factory=list)
    _unsynced: list[Undo] = field(factory=list)

    def _step(self, what: str) -> None:
        self.steps += 1
        if self.at is None or self.steps < self.at or (self.error is not None and self.steps > self.at):
            return
        self.said.append(what)
        if self.error is None:
            raise Crash(what)
        raise OSError(self.error, os.strerror(self.error), what)

    def make_directory(self, path: Path) -> None:
        self._step(f"make_directory {path.name}")
        super().make_directory(path)
        self._unsynced.append(Undo(path.parent, path, lambda path: shutil.rmtree(path, ignore_errors=True)))

    def link(self, source: Path, target: Path) -> None:
        self._step(f"link {target.name}")
        super().link(source, target)
        self._unsynced.append(Undo(target.parent, target, _remove))

    def symlink(self, target: str, path: Path) -> None:
        self._step(f"symlink {path.name}")
        super().symlink(target, path)
        self._unsynced.append(Undo(path.parent, path, _remove))

    def write(self, path: Path, data: bytes) -> None:
        if self.error == errno.ENOSPC and self.at == self.steps + 1:
            super().write(path, data[: len(data) // 2])
        self._step(f"write {path.name}")
        super().write(path, data)
        self._unsynced.append(Undo(path, path, lambda path: _cut(path, len(data) // 2)))
        self._unsynced.append(Undo(path.parent, path, _remove))

    def sync(self, path: Path) -> None:
        self._step(f"sync {path.name}")
        super().sync(path)
        self._unsynced = [undo for undo in self._unsynced if undo.where != path]

    def rename(self, old: Path, new: Path) -> None:
        self._step(f"rename {old.name} {new.name}")
        before = os.readlink(new) if new.is_symlink() else new.read_bytes() if new.is_file() else None
        super().rename(old, new)

        def undo(path: Path) -> None:
            if os.path.lexists(path):
                path.rename(old)
            if isinstance(before, str):
                path.symlink_to(before)
            elif before is not None:
                path.write_bytes(before)

        self._unsynced = [each.moved(old, new) for each in self._unsynced]
        self._unsynced.append(Undo(new.parent, new, undo, renamed_from=old))

    def unlink(self, path: Path) -> None:
        self._step(f"unlink {path.name}")
        super().unlink(path)

    def remove_directory(self, path: Path) -> None:
        self._step(f"remove_directory {path.name}")
        super().remove_directory(path)

    def lose_power(self) -> None:
        """Take back what was not made durable."""
        while self._unsynced:
            undo = self._unsynced.pop()
            undo.does(undo.path)
            if undo.renamed_from is not None:
                self._unsynced = [each.moved(undo.path, undo.renamed_from) for each in self._unsynced]
