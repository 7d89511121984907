"""How an answer's reason reads: one sentence that names racks and generation, and what to do where that is known."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, Protocol

from rpc.outcomes import Answered, Failed, NotConnected, TimedOut

if TYPE_CHECKING:
    from region.answers.combine import Published, RackAnswer


class Named(Protocol):
    """A rack, by what people call it."""

    @property
    def name(self) -> str: ...


_NAMED: Final = 3
"""How many racks a sentence names before it counts the rest."""


def when(seconds: float) -> str:
    """A time (seconds since the epoch) for people and programs: ``2026-01-31T08:00:00Z``."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def no_racks() -> str:
    """Why nothing can be deployed without racks."""
    return "No rack is enrolled, so nothing can be deployed: join one with `stanchion rack join`."


def nothing_published() -> str:
    """Why nothing is known before the first generation."""
    return "No images have been published yet: add a source and import it, or wait until the import under way is done."


def nothing_listed(published: Published) -> str:
    """Why there is nothing to offer: what was published has no release in it."""
    return f"Generation {published.number} lists no release: check the selections of the boot sources, then import."


def deployable(holders: Sequence[RackAnswer], total: int) -> str:
    """Who holds it."""
    if len(holders) == total:
        return "The rack holds it." if total == 1 else f"All {total} racks hold it."
    return f"{len(holders)} of {total} racks hold it: {names(holders)}."


def arriving(lacking: Sequence[RackAnswer], published: Published) -> str:
    """Who is behind."""
    verb = "does" if len(lacking) == 1 else "do"
    position = _position(lacking[0], published)
    return f"Generation {published.number} lists it; {names(lacking)} {verb} not hold it yet ({position})."


def undetermined(silent: Sequence[RackAnswer]) -> str:
    """Who is silent, since when and why."""
    why = silence(silent[0])
    if len(silent) == 1:
        return f"{silent[0].name} may hold it, but {why}."
    return f"{names(silent)} may hold it, but did not answer ({silent[0].name}: {why})."


def cannot_come(holders: Sequence[RackAnswer], lacking: Sequence[RackAnswer], published: Published) -> str:
    """Why the racks will never all hold it."""
    verb = "holds" if len(holders) == 1 else "hold"
    return (
        f"{names(holders)} still {verb} it, but generation {published.number} no longer lists it, "
        f"so {names(lacking)} cannot come to hold it."
    )


def unknown(total: int) -> str:
    """Why a client asked for something that does not exist."""
    return f"No generation that {'the rack' if total == 1 else f'any of the {total} racks'} may hold lists it."


def names(racks: Sequence[Named]) -> str:
    """The racks by name; of many, the first few and how many more."""
    shown = sorted(rack.name for rack in racks)
    if len(shown) > _NAMED + 1:
        shown = [*shown[:_NAMED], f"{len(shown) - _NAMED} more"]
    return " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1]))) if shown else "no rack"


def silence(rack: RackAnswer) -> str:
    """Why a rack did not answer, and since when."""
    since = rack.silent_since
    suffix = f" since {when(since)}" if since is not None else ""
    match rack.outcome:
        case Failed(kind, reason):
            return f"asking it failed{suffix} ({kind}: {reason})"
        case TimedOut(seconds):
            return f"it did not answer within {seconds:g} s{suffix and f' (silent{suffix})'}"
        case NotConnected():
            return f"it is not connected{suffix}"
        case Answered():
            return "it answered"


def _position(rack: RackAnswer, published: Published) -> str:
    held = rack.held
    if held is not None and (held.state, held.generation) == ("partial", published.number):
        return f"{rack.name} is at generation {held.generation}, without what the region cannot give now"
    if held is None or held.generation is None:
        return f"{rack.name} holds no generation, {held.state if held else 'silent'}"
    return f"{rack.name} is at generation {held.generation}, {held.state}"
