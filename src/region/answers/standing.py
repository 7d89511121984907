"""How one rack stands to one target: it holds it, fetches it, could not fetch it, or does not answer; as one sentence.

What a rack reports of its syncing is for display and may be of another version: what has not the expected form is left
out, and never makes an answer fail.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from attrs import frozen

from region.answers.combine import Held, Published, RackAnswer, Target
from region.answers.wording import silence, when
from rpc.console import size
from rpc.manifest import Image

_SHOWN: Final = 300
"""Characters of a rack's own words that a sentence quotes."""


@frozen
class Fetching:
    """A sync under way: to which generation, how far (bytes), how fast lately (bytes per second). None: not said."""

    generation: int | None
    step: str
    bytes_done: int | None
    bytes: int | None
    rate: int | None

    @property
    def document(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "generation": self.generation, "step": self.step, "bytes_done": self.bytes_done, "bytes": self.bytes,
            "rate": self.rate,
        }  # fmt: skip

    def __str__(self) -> str:
        what = f"generation {self.generation}" if self.generation is not None else "a newer generation"
        if not self.bytes or self.bytes_done is None:
            return f"is fetching {what}"
        so_far = f"{size(self.bytes_done)} of {size(self.bytes)}"
        return f"is fetching {what}: {so_far}" + (f", at {size(self.rate)}/s" if self.rate is not None else "")


@frozen
class Failing:
    """A sync that failed, or left out what the region cannot give now (``is_partial``), and the generation that it was
    for; ``next_try`` is when (seconds since the epoch), if the rack has said that."""

    generation: int | None
    reason: str
    next_try: float | None
    is_partial: bool = False

    @property
    def document(self) -> dict[str, Any]:
        """As a JSON object."""
        at = when(self.next_try) if self.next_try is not None else None
        return {"generation": self.generation, "reason": self.reason, "next_try": at}

    def told(self, held: int | None) -> str:
        """That it failed, why, and when it is tried again; of a rack that is at the generation ``held``."""
        again = f"; it tries again at {when(self.next_try)}" if self.next_try is not None else ""
        reason = self.reason[:_SHOWN].rstrip(".")
        if self.is_partial and self.generation == held:
            return f"holds what can be had of that ({reason}){again}"
        if self.generation is not None and self.generation == held:
            return f"lacks part of that ({reason}){again}"
        what = f"generation {self.generation}" if self.generation is not None else "what is published"
        return f"could not fetch {what} ({reason}){again}"


def fetching(rack: RackAnswer) -> Fetching | None:
    """The sync under way, if the rack answered that there is one."""
    if rack.held is None or rack.held.state != "syncing":
        return None
    said = _said(rack)
    done, total = _count(said, "bytes_done"), _count(said, "bytes")
    return Fetching(_count(said, "generation"), _text(said, "step"), done, total, _count(said, "rate"))


def failing(rack: RackAnswer, target: Target | None = None) -> Failing | None:
    """The sync that failed or could not have all, if the rack answered that there was one.

    :param target: what its reason should be about, if the rack has said so much.
    """
    if rack.held is None or rack.held.state not in ("failed", "partial"):
        return None
    said = _said(rack)
    reason = _lack(said, target) or _text(said, "reason") or "it did not say why"
    return Failing(_count(said, "generation"), reason, rack.next_try, rack.held.state == "partial")


def _lack(said: Mapping[str, Any], target: Target | None) -> str:
    """Why the rack has not this target, if it has said that."""
    lacking = said.get("lacking")
    for each in lacking if isinstance(lacking, list) else []:
        if isinstance(each, dict) and target == (each.get("os"), each.get("release"), each.get("arch")):
            return _text(each, "reason")
    return ""


def standing(rack: RackAnswer, target: Target, published: Published, may_hold: bool) -> str:
    """How a rack stands to a target, as a sentence whose subject is the rack.

    :param may_hold: of a rack that does not answer, whether it can hold the target.
    """
    if rack.held is None:
        return f"Does not answer: {silence(rack)}. {_last_known(rack, target, published, may_hold)}"
    images = rack.held.catalogue.targets.get(target, ())
    if images:
        return f"Holds {_versions(images)}, in {_generation(rack.held)}{_and_does(rack, published)}."
    if target not in published.catalogue.targets:
        return f"Does not hold it; it is at {_generation(rack.held)}{_and_does(rack, published)}."
    return f"Does not hold it yet: it is at {_generation(rack.held)}, {_activity(rack, published, target)}."


def _activity(rack: RackAnswer, published: Published, target: Target | None = None) -> str:
    """What a rack that is not in step does about it."""
    held = rack.held
    if (under_way := fetching(rack)) is not None:
        return f"and {under_way}"
    if (failed := failing(rack, target)) is not None:
        return f"and {failed.told(held.generation if held is not None else None)}"
    if held is not None and held.generation is not None and held.generation > (published.number or 0):
        return "a newer one than this region process has heard of"
    return f"and has not begun to fetch generation {published.number}"


def _and_does(rack: RackAnswer, published: Published) -> str:
    if rack.held is None or rack.held.catalogue.digest == published.catalogue.digest or published.number is None:
        return ""
    return f", {_activity(rack, published)}"


def _last_known(rack: RackAnswer, target: Target, published: Published, may_hold: bool) -> str:
    heard = f" at {when(rack.reported)}" if rack.reported is not None else ""
    if rack.known_generation is None:
        known = f"When it last reported{heard}, it held nothing" if heard else "What it holds was never known"
    elif target in rack.last_targets:
        return f"When last known{heard}, it held it, in generation {rack.known_generation}."
    else:
        known = f"When last known{heard}, it was at generation {rack.known_generation}"
        if may_hold and target in published.listed.get(rack.known_generation, ()):
            return f"{known}, which lists it; it may hold it still."
    return f"{known}; it {'may hold it by now' if may_hold else 'cannot hold it, for nothing since then lists it'}."


def _versions(images: Sequence[Image]) -> str:
    versions = sorted({image.version for image in images})
    return ("version " if len(versions) == 1 else "versions ") + " and ".join(versions)


def _generation(held: Held) -> str:
    return f"generation {held.generation}" if held.generation is not None else "no generation"


def _said(rack: RackAnswer) -> Mapping[str, Any]:
    return dict(rack.progress)


def _count(said: Mapping[str, Any], name: str) -> int | None:
    value = said.get(name)
    return value if type(value) is int and value >= 0 else None


def _text(said: Mapping[str, Any], name: str) -> str:
    value = said.get(name)
    return value if isinstance(value, str) else ""
