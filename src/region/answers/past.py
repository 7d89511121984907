"""What became of a release: with which generation each of its images came, was kept, and went, and for which reason.

Values and pure functions; :mod:`region.answers.records` reads them from the database.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from attrs import frozen

from region.answers.combine import Published, Target
from region.answers.wording import when
from region.upstream.values import UPLOADS
from rpc.manifest import Image


class Kernel(NamedTuple):
    """What tells the images of one release apart: architecture, subarchitecture, the kernel's flavour, label."""

    arch: str
    subarch: str
    kflavor: str
    label: str

    @classmethod
    def of(cls, image: Image) -> Kernel:
        """That of an image."""
        return cls(image.arch, image.subarch, image.kflavor, image.label)

    def is_called(self, name: str) -> bool:
        """Whether people may mean this by ``name``: the subarchitecture, such as ``hwe-24.04``, or with a flavour
        ``hwe-24.04-lowlatency``."""
        return name in (str(self), self.subarch, f"{self.subarch}-{self.kflavor}")

    def __str__(self) -> str:
        flavour = self.kflavor if self.kflavor != "generic" and self.kflavor not in self.subarch else ""
        return "-".join(filter(None, (self.subarch or "generic", flavour)))


@frozen
class Step:
    """A change of one image that a generation made: ``kind`` is added, changed, removed or kept. ``published`` is when
    (seconds since the epoch)."""

    generation: int
    published: float
    kind: str
    kernel: Kernel
    version: str
    reason: str

    @property
    def document(self) -> dict[str, Any]:
        """As a JSON object: what, with which generation, when and why."""
        return {
            **self.kernel._asdict(), "version": self.version, "generation": self.generation,
            "since": when(self.published), "reason": self.reason,
        }  # fmt: skip


@frozen(eq=False)
class Past:
    """Every change of a release's images, in order, and which kernels each generation listed."""

    steps: tuple[Step, ...] = ()
    listed: Mapping[int, frozenset[Kernel]] = {}

    def kernels(self, os: str, release: str, name: str, numbers: Iterable[int]) -> Mapping[int, frozenset[Target]]:
        """For each of the generations, the targets of this release that it listed with the kernel ``name``."""
        return {
            number: frozenset(
                Target(os, release, kernel.arch)
                for kernel in self.listed.get(number, ())
                if kernel.is_called(name)
            )
            for number in numbers
        }  # fmt: skip


@frozen
class Origin:
    """How a published image came to be there: the generation that brought it as it is, and when that was; the one since
    which there is an image of this kind without a break; and the reason if the current one keeps it although upstream
    did not confirm it."""

    image: Image
    brought: Step | None
    first: Step | None
    kept: str = ""


def origins(images: Iterable[Image], past: Past, current: int | None) -> tuple[Origin, ...]:
    """How each of a release's published images came to be there."""
    found = []
    for image in images:
        steps = _steps(past, Kernel.of(image))
        first: Step | None = None
        for step in steps:
            if step.kind == "removed":
                first = None
            elif first is None and step.kind in ("added", "changed"):
                first = step
        brought = next((step for step in reversed(steps) if step.kind in ("added", "changed")), None)
        kept = [step.reason for step in steps if step.kind == "kept" and step.generation == current]
        found.append(Origin(image, brought, first, kept[-1] if kept else ""))
    return tuple(found)


def departures(arch: str, images: Iterable[Image], past: Past) -> tuple[Step, ...]:
    """For each kind of image for ``arch`` that was published once and is not any more, the step with which it went.

    :param arch: "" for every architecture.
    :param images: what is published.
    """
    there = {Kernel.of(image) for image in images}
    last = {step.kernel: step for step in past.steps if arch in ("", step.kernel.arch)}
    return tuple(step for kernel, step in sorted(last.items()) if kernel not in there and step.kind == "removed")


def _steps(past: Past, kernel: Kernel) -> Sequence[Step]:
    return [step for step in past.steps if step.kernel == kernel]


def document_of(origin: Origin) -> dict[str, Any]:
    """A published image as a JSON object: which, from where, with which generation it came, and since when."""
    image, brought, first = origin.image, origin.brought, origin.first
    return {
        "subarch": image.subarch, "kflavor": image.kflavor, "label": image.label, "version": image.version,
        "size": image.size, "source": image.source,
        "generation": brought.generation if brought else None,
        "since": when(brought.published) if brought else None,
        "first_generation": first.generation if first else None,
        "first_since": when(first.published) if first else None,
        "kept": origin.kept,
    }  # fmt: skip


def told_published(found: Sequence[Origin], published: Published, is_known: bool) -> str:
    """With which generation what is published came, since when and from where, in a sentence for what came together.

    :param is_known: whether the past could be read.
    """
    if not found:
        return ""
    told = []
    for (version, source, brought, first, kept), group in groupby(sorted(found, key=_together), key=_together):
        names = _names(Kernel.of(origin.image) for origin in group)
        text = f"Version {version} ({names}) is published"
        if brought:
            text += f" since {when(brought[1])}, with generation {brought[0]}, {_whence(source)}"
        else:
            known = "which generation brought it is not known" if is_known else "since when cannot be read right now"
            text += f" in generation {published.number}, {_whence(source)}; {known}"
        if first and first != brought:
            text += f"; there has been a version of it since {when(first[1])} (generation {first[0]})"
        text += f". Generation {published.number} keeps it: {kept.rstrip('.')}." if kept else "."
        told.append(text)
    return " ".join(told)


def told_gone(steps: Sequence[Step]) -> str:
    """When what is not published any more went, with which generation and why, in a sentence for what went together."""
    told = []
    for (version, number, at, reason), group in groupby(sorted(steps, key=_gone_together), key=_gone_together):
        names = _names(step.kernel for step in group)
        told.append(f"Version {version} ({names}) went with generation {number}, {when(at)}: {reason.rstrip('.')}.")
    return " ".join(told)


def _together(origin: Origin) -> tuple[str, str, tuple[float, ...], tuple[float, ...], str]:
    steps = ((step.generation, step.published) if step else () for step in (origin.brought, origin.first))
    return (origin.image.version, origin.image.source, *steps, origin.kept)  # type: ignore[return-value]  # two tuples


def _gone_together(step: Step) -> tuple[str, int, float, str]:
    return step.version, step.generation, step.published, step.reason


def _whence(source: str) -> str:
    return "as it was uploaded" if source == UPLOADS else f"from {source}"


def _names(kernels: Iterable[Kernel]) -> str:
    found = sorted({(kernel.arch, str(kernel), kernel.label) for kernel in kernels})
    labels = {label for _, _, label in found}
    arches = {arch for arch, _, _ in found}
    return ", ".join(
        (f"{arch}/" if len(arches) > 1 else "") + name + (f" {label}" if len(labels) > 1 else "")
        for arch, name, label in found
    )
