"""Has a node that is being commissioned or tested failed, because it did not boot, fell silent, or hangs in a script?

Pure: from how long ago things were, by the database's clock, to a verdict with its reason. All times are seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from attrs import frozen

from region.nodes.statuses import ScriptStatus
from rpc.console import duration

RUNNING: Final = frozenset({ScriptStatus.RUNNING, ScriptStatus.INSTALLING, ScriptStatus.APPLYING_NETCONF})
"""Statuses of a result in which its script's time is running."""

_LONGEST: Final = 1e12
"""Seconds that a parameter may say; what says more is no duration."""


@frozen
class Limits:
    """After how many seconds a node that is to boot, or has been heard of, has failed if it says nothing; and how many
    a script may take over its own limit."""

    boot: float
    silence: float
    grace: float


@frozen
class Running:
    """A result that is being made: since how many seconds, and what is known of how long it may take.

    ``timeout`` 0 is no limit. ``parameters`` are those of the result.
    """

    id: int
    name: str
    status: ScriptStatus
    seconds: float
    timeout: float
    parameters: Mapping[str, Any]


@frozen
class Watched:
    """A node whose run goes on.

    ``boot_overdue`` is for how many seconds it should have been heard of; None if it was, less than 0 while there is
    time. ``silent`` is since when it was not heard of, counted from the beginning of the run at the earliest.
    ``last_heard`` is for how many seconds it was not heard of at all, None if it never was; ``heard`` what it said
    then, and ``heard_at`` when, for people. ``is_done`` is whether it has said that its run has ended, and
    ``is_queued`` whether there is still something to do for the region because of that.
    ``listening`` is since when it could have been heard without a break: a region that was away itself has missed it.
    """

    boot_overdue: float | None
    silent: float
    last_heard: float | None
    heard: str
    heard_at: str
    is_done: bool
    running: Sequence[Running]
    listening: float = math.inf
    is_queued: bool = True


@frozen
class Overdue:
    """The verdict that a node has failed: why, for people, and which results have timed out; others are aborted."""

    reason: str
    timed_out: Sequence[int] = ()


def verdict(watched: Watched, limits: Limits) -> Overdue | None:
    """Whether a node has failed; None if not."""
    if watched.boot_overdue is not None:
        is_over = watched.boot_overdue > 0 and watched.listening > min(limits.boot, limits.silence)
        return _not_booted(watched) if is_over else None
    if watched.is_done:
        # It did its part, and what is left is for the region to do; unless the region itself has lost that.
        is_lost = not watched.is_queued and min(watched.silent, watched.listening) > limits.silence
        return _not_ended(watched) if is_lost else None
    hanging = [each for each in watched.running if _is_over(each, limits.grace)]
    if hanging and watched.listening > limits.grace:
        return _hanging(watched, hanging, limits)
    if min(watched.silent, watched.listening) > limits.silence:
        return _silent(watched, limits)
    return None


def limit_of(timeout: float, parameters: Mapping[str, Any]) -> float:
    """How long a script may take; 0 for no limit.

    A ``runtime`` parameter says how long the script is told to run, whatever its own limit is; the longer one counts,
    so that the node ends a script before the region ends the run.
    """
    found = [_seconds(each.get("value")) for each in parameters.values() if _is_runtime(each)]
    return max([timeout, *(seconds for seconds in found if seconds is not None)])


def _is_runtime(parameter: Any) -> bool:
    return isinstance(parameter, Mapping) and parameter.get("type") == "runtime"


def _seconds(value: Any) -> float | None:
    """What a parameter says, as people or programs write it; None if it is no duration."""
    if isinstance(value, str) and value.strip().isdecimal():
        return float(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _LONGEST:
        return float(value)
    return None


def _is_over(running: Running, grace: float) -> bool:
    limit = limit_of(running.timeout, running.parameters)
    return limit > 0 and running.seconds > limit + grace


def _not_booted(watched: Watched) -> Overdue:
    return Overdue(
        "It was not heard of in time after it was to start: it is not switched on, does not boot from the network, or "
        f"cannot reach the region. See its console. {_last(watched)}"
    )


def _not_ended(watched: Watched) -> Overdue:
    return Overdue(
        "The node said that it was done, but the region has not ended its run, and has nothing queued that would: that "
        "is a fault of the region, which its log says more of. Report it, and begin again. " + _last(watched),
        [each.id for each in watched.running],
    )


def _hanging(watched: Watched, hanging: Sequence[Running], limits: Limits) -> Overdue:
    said = "; ".join(
        f"{each.name} has been {each.status.label.lower()} for {duration(each.seconds)}, and may take "
        f"{duration(limit_of(each.timeout, each.parameters))} (and {duration(limits.grace)} more)"
        for each in hanging
    )
    return Overdue(f"A script did not end in time: {said}. {_last(watched)}", [each.id for each in hanging])


def _silent(watched: Watched, limits: Limits) -> Overdue:
    names = ", ".join(each.name for each in watched.running)
    doing = f" while {names} ran" if names else ""
    return Overdue(
        f"It has said nothing for {duration(watched.silent)}{doing}; it is given up after {duration(limits.silence)}: "
        f"it crashed, was switched off, or cannot reach the region. See its console. {_last(watched)}",
        [each.id for each in watched.running],
    )


def _last(watched: Watched) -> str:
    if watched.last_heard is None:
        return "It was never heard of."
    said = f": {watched.heard}" if watched.heard else ""
    return f"Last heard of at {watched.heard_at}, {duration(watched.last_heard)} ago{said}"
