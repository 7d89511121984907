"""How many peers are asked at once, cheaply: one encoding for equal arguments, one timer and one Deferred for all."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Final, TypeVar, cast

from twisted.internet.defer import Deferred

from rpc.asks import Alike, Question, Result, encode, outcome_of
from rpc.commands import Command
from rpc.failures import ArgumentsInvalid
from rpc.outcomes import Answered, Outcome
from rpc.protocol import Link

K = TypeVar("K", bound=Hashable)

AT_ONCE: Final = 32
"""Peers that are asked before the reactor has a turn, in which the first answers are read: by then what belongs to
their links is still in the processor's cache, and nothing else has had to wait for a thousand asks to be written."""


async def ask_all(
    command: type[Command],
    asks: Mapping[K, tuple[Link, Mapping[str, Any]]],
    *,
    deadline: float | None = None,
    alike: Alike | None = None,
) -> dict[K, Outcome[dict[str, Any]]]:
    """Ask many peers at once, and give every outcome when the last is there: a round.

    Much cheaper than :meth:`Link.ask` for each: arguments that are one object are encoded once, answers that are equal
    are read once, and one timer and one Deferred serve all. The seconds of an outcome are those since that peer was
    asked, to within what it takes to ask :data:`AT_ONCE`.

    :param asks: for each peer, under a key of the caller's, its link and the arguments.
    :param deadline: seconds, for each ask; the command's own by default.
    :param alike: the answers of earlier rounds of this command, if those may be shared as well.
    """
    if not asks:
        return {}
    seconds = command.deadline if deadline is None else deadline
    clock = next(iter(asks.values()))[0].clock
    outcomes: dict[K, Outcome[dict[str, Any]] | None] = dict.fromkeys(asks)
    left = len(asks)
    tags: dict[K, bytes] = {}
    everyone: Deferred[None] = Deferred()
    encoded: dict[int, bytes] = {}
    same = Alike() if alike is None else alike

    def ended(key: K, result: Result, after: float) -> None:
        nonlocal left
        outcomes[key] = Answered(result, after) if isinstance(result, dict) else outcome_of(result, after)
        left -= 1
        if not left:
            everyone.callback(None)

    def expire() -> None:
        for key, tag in tags.items():
            if outcomes[key] is None:
                asks[key][0].asks.expire(tag, seconds)

    timer = clock.callLater(seconds, expire)
    try:
        question = Question(command, clock.seconds(), ended, same)
        for number, (key, (link, arguments)) in enumerate(asks.items(), 1):
            try:
                # By identity, which is cheap, and sure: 1 equals True, and both encode differently.
                if (request := encoded.get(id(arguments))) is None:
                    request = encoded[id(arguments)] = encode(command, arguments)
            except ArgumentsInvalid as error:
                link.report(command.__name__, "out", b"", 0.0, error)
                ended(key, error, 0.0)
                continue
            if (tag := link.put(question, key, request)) is not None:
                tags[key] = tag
            if number % AT_ONCE == 0 and number < len(asks):
                turn: Deferred[None] = Deferred()
                clock.callLater(0, turn.callback, None)
                await turn
                question = Question(command, clock.seconds(), ended, same)
        if not timer.active():
            expire()  # of those that were asked after the others' time was up
        await everyone
    finally:
        if timer.active():
            timer.cancel()
        if left:  # nobody waits any more
            for key, tag in tags.items():
                asks[key][0].asks.forget(tag)
    return cast(dict[K, Outcome[dict[str, Any]]], outcomes)
