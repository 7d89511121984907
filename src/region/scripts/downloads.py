"""How are a run's outputs handed out as files? As one text with a line between, or as a tar.xz. Pure, but slow enough
for a thread."""

from __future__ import annotations

import re
import tarfile
from collections import Counter
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
_LONGEST: Final = 200
_OTHER: Final = re.compile(r"[^A-Za-z0-9._-]+")


@frozen
class File:
    """One output. ``mtime`` is in seconds since the epoch."""

    content: bytes
    mtime: int


def files_of(run: Run, kind: str) -> Mapping[str, File]:
    """The outputs of a run by the names of their files; empty ones too, unless all are asked for.

    Where a script has several results (one for each disk), each name has the number of its result. What a node calls
    what it sends may be anything: no name here leads out of a folder, and none takes the place of another.
    """
    names = Counter(_plain(result.name) for result in run.results)
    found: dict[str, File] = {}

    def add(name: str, ending: str, file: File) -> None:
        number = 1
        while (unique := f"{name}{f'_{number}' if number > 1 else ''}{ending}") in found:
            number += 1
        found[unique] = file

    for result in run.results:
        plain = _plain(result.name)
        name = plain if names[plain] == 1 else f"{plain}.{result.id}"
        mtime = int(result.updated.timestamp())
        for output in KINDS[kind]:
            if kind != "all" or output == "output" or output in result.outputs:
                add(name, OUTPUTS[output], File(result.outputs.get(output, b""), mtime))
        for late in result.late:
            for output, content in late.outputs.items():
                add(f"{name}.late-{late.id}", OUTPUTS[output], File(content, int(late.received.timestamp())))
    return found


def _plain(name: str) -> str:
    """A name of nothing but what the names of scripts have, which begins with no dot."""
    return _OTHER.sub("_", name[:_LONGEST]).lstrip(".-") or "_"


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
