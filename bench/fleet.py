"""A thousand racks in one process: ``python -m bench.fleet HOST PORT``. What it can be told to do is below.

Each has an identity of its own and keeps its links as a rack does, and does nothing else.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from twisted.internet import reactor as installed
from twisted.internet.defer import Deferred, gatherResults

from bench.control import serve
from rack.regions import Regions
from rpc.commands import Register, ReportInventory
from rpc.endpoints import Enrolled, Reconnecting, enrol, region_endpoint, retry_delay
from rpc.identity import JoinToken, client_tls
from rpc.protocol import Link, Responders

reactor: Any = installed


def fleet(host: str, port: int) -> dict[str, Callable[..., Awaitable[Any]]]:
    """What the fleet is told to do."""
    enrolled: list[Enrolled] = []
    registered: list[float] = []
    attempts: list[float] = []
    waiting: list[tuple[int, Deferred[None]]] = []
    responders = Responders("rack", {})
    tried: set[int] = set()

    async def join(token: str, count: int) -> int:
        """Enrol racks."""
        numbers = iter(range(count))

        async def some() -> None:
            for number in numbers:
                enrolled.append(await enrol(reactor, host, port, JoinToken.parse(token), f"bench-{number}"))

        await gatherResults([Deferred.fromCoroutine(some()) for _ in range(8)])
        return len(enrolled)

    def one(number: int, identity: Enrolled) -> None:
        tls = client_tls(identity.credentials, identity.ca)

        async def register(link: Link, turn: Mapping[str, Any]) -> None:
            await link.call(Register, versions=[1], name=f"bench-{number}", software="bench", **turn)
            await link.call(ReportInventory, generation=-1, digest="", state="empty", progress={})
            registered.append(time.monotonic())
            for count, done in waiting:
                if len(registered) >= count and not done.called:
                    done.callback(None)

        def make() -> Link:
            if number not in tried:
                tried.add(number)
                attempts.append(time.monotonic())
            return Link(responders, clock=reactor)

        def dial(address: str, prepare: Callable[[Link], Awaitable[object]]) -> Reconnecting:
            return Reconnecting(
                region_endpoint(reactor, host, port, tls), address, make, prepare, clock=reactor, retry=retry_delay
            )

        Regions(reactor, dial, register, lambda addresses: None).start([f"{host}:{port}"])

    async def connect() -> None:
        """Have them link, a few at a time."""
        for number, identity in enumerate(enrolled):
            one(number, identity)
            if number % 8 == 7:
                await all_registered(number + 1)

    async def all_registered(count: int = 0) -> None:
        """Wait until so many (0: all) have registered since the last reset."""
        count = count or len(enrolled)
        if len(registered) < count:
            done: Deferred[None] = Deferred()
            waiting.append((count, done))
            await done

    async def reset() -> None:
        """Forget who has registered and who has tried."""
        for each in (registered, attempts, waiting, tried):
            each.clear()

    async def times() -> dict[str, list[float]]:
        """When each registered, and when each made its first connection since the last reset: seconds."""
        return {"registered": registered, "connected": attempts}

    return {"join": join, "connect": connect, "all_registered": all_registered, "reset": reset, "times": times}


if __name__ == "__main__":
    serve(fleet(sys.argv[1], int(sys.argv[2])))
