"""How are a run's outputs handed out as files? As one text with a line between, or as a tar.xz. Pure, but slow enough
for a thread."""

from __future__ import annotations

import tarfile
from collections.abc import Mapping
from io import BytesIO
from typing import Final, Literal

from attrs import frozen

from region.commissioning.signals import OUTPUTS
from region.scripts.results import Run

FileType = Literal["txt", "tar.xz"]

KINDS: Final[Mapping[str, tuple[str, ...]]] = {
    "combined": ("output",), "stdout": ("stdout",), "stderr": ("stderr",), "result": ("result",), "all": tuple(OUTPUTS),
}  # fmt: skip
"""What may be asked for, and the outputs that it means."""

_WIDTH: Final = 80


@frozen
class File:
    """One output. ``mtime`` is in seconds since the epoch."""

    content: bytes
    mtime: int


def files_of(run: Run, kind: str) -> Mapping[str, File]:
    """The outputs of a run by the names of their files; empty ones too, unless all are asked for.

    Where a script has several results (one for each disk), each name has the number of its result.
    """
    names = [result.name for result in run.results]
    found: dict[str, File] = {}
    for result in run.results:
        name = result.name if names.count(result.name) == 1 else f"{result.name}.{result.id}"
        mtime = int(result.updated.timestamp())
        for output in KINDS[kind]:
            if kind != "all" or output == "output" or output in result.outputs:
                found[f"{name}{OUTPUTS[output]}"] = File(result.outputs.get(output, b""), mtime)
        for late in result.late:
            for output, content in late.outputs.items():
                found[f"{name}.late-{late.id}{OUTPUTS[output]}"] = File(content, int(late.received.timestamp()))
    return found


def as_text(files: Mapping[str, File]) -> bytes:
    """A single file as it is, for pipes; several one after the other, each under a line with its name."""
    if len(files) == 1:
        return next(iter(files.values())).content
    return b"".join(
        f" {name} ".center(_WIDTH, "-").encode() + b"\n" + one.content + b"\n" for name, one in files.items()
    )


def as_tar(files: Mapping[str, File], folder: str) -> bytes:
    """A tar.xz with the files in one folder."""
    archive = BytesIO()
    with tarfile.open(fileobj=archive, mode="w:xz") as tar:
        for name, one in files.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size, member.mode, member.mtime = len(one.content), 0o644, one.mtime
            tar.addfile(member, BytesIO(one.content))
    return archive.getvalue()
