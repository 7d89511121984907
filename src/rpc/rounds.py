"""How many peers are asked at once, cheaply: one encoding for equal arguments, one timer and one Deferred for all."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import partial
from typing import Any, Final, TypeVar

from twisted.internet.defer import Deferred

from rpc.asks import Result, encode, outcome_of
from rpc.commands import Command
from rpc.failures import ArgumentsInvalid
from rpc.outcomes import Outcome
from rpc.protocol import Link

K = TypeVar("K", bound=Hashable)

_PLAIN: Final = frozenset({str, int, bool, bytes})


async def ask_all(
    command: type[Command], asks: Mapping[K, tuple[Link, Mapping[str, Any]]], *, deadline: float | None = None
) -> dict[K, Outcome[dict[str, Any]]]:
    """Ask many peers at once, and give every outcome when the last is there: a round.

    Much cheaper than :meth:`Link.ask` for each: equal arguments are encoded once, and one timer and one Deferred serve
    all.

    :param asks: for each peer, under a key of the caller's, its link and the arguments.
    :param deadline: seconds, for each ask; the command's own by default.
    """
    outcomes: dict[K, Outcome[dict[str, Any]]] = {}
    if not asks:
        return outcomes
    seconds = command.deadline if deadline is None else deadline
    clock = next(iter(asks.values()))[0].clock
    started = clock.seconds()
    pending: dict[K, tuple[Link, bytes]] = {}
    everyone: Deferred[None] = Deferred(lambda _: forget())
    encoded: dict[Any, bytes] = {}

    def forget() -> None:
        if timer.active():
            timer.cancel()
        for link, tag in pending.values():
            link.asks.forget(tag)

    def ended(key: K, result: Result) -> None:
        outcomes[key] = outcome_of(result, clock.seconds() - started)
        if len(outcomes) == len(asks):
            if timer.active():
                timer.cancel()
            if not everyone.called:
                everyone.callback(None)

    def expire() -> None:
        for key, (link, tag) in pending.items():
            if key not in outcomes:
                link.asks.expire(tag, seconds)

    timer = clock.callLater(seconds, expire)
    for key, (link, arguments) in asks.items():
        try:
            request = _encoded(encoded, command, arguments)
        except ArgumentsInvalid as error:
            link.report(command.__name__, "out", b"", 0.0, error)
            ended(key, error)
            continue
        tag = link.send(command, request, None, partial(ended, key))
        if tag is not None:
            pending[key] = (link, tag)
    await everyone
    return {key: outcomes[key] for key in asks}


def _encoded(cache: dict[Any, bytes], command: type[Command], arguments: Mapping[str, Any]) -> bytes:
    # The type is part of the key because 1 equals True; only plain values are looked up, since a tuple may hold both.
    key = tuple((name, type(value), value) for name, value in arguments.items() if type(value) in _PLAIN)
    if len(key) != len(arguments):
        return encode(command, arguments)
    if (request := cache.get(key)) is None:
        request = cache[key] = encode(command, arguments)
    return request
