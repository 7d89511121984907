"""With which region processes is the rack linked, and how does it learn of them?

It begins with the addresses of its settings and those that it remembers. Each region process tells of all; the rack
links with each, once, whichever of several addresses leads there, and asks again at intervals. A link that is up
stays, whatever a region says: the rack works with those it has.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Protocol

from attrs import define, field
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from rpc.addresses import join_address, split_address
from rpc.commands import Endpoints
from rpc.endpoints import NotNeeded
from rpc.failures import UnknownCommand
from rpc.outcomes import Answered
from rpc.protocol import Life, Link

log = Logger()

ASK_SECONDS: Final = 30.0
"""Between two questions for the region processes; of which up to a fifth is taken or added at random."""

MOST: Final = 64
"""Addresses that a region can tell of; more are left out."""


class IService(Protocol):
    """What keeps one link up; :class:`rpc.endpoints.Reconnecting` is one."""

    def startService(self) -> None:
        """Begin to connect."""

    def stopService(self) -> Deferred[None]:
        """Stop, and close the link."""


_OLDER: Final = "older region at "
"""What a process that does not tell its id is called, with its address."""

Dial = Callable[[str, Callable[[Link], Awaitable[object]]], IService]
"""Given HOST:PORT and what prepares a link, the service that keeps a link there up."""


@define(eq=False)
class _Route:
    """An address, the ``service`` that connects there (None: nobody does for now), the ``process`` that was last found
    there, and the ``link`` with it that is up or about to be."""

    address: str
    configured: bool
    service: IService | None = None
    process: str = ""
    link: Link | None = field(default=None, repr=False)


class Regions:
    """The rack's links with all region processes.

    :param dial: makes the service for an address.
    :param register: registers the rack over a link whose peer is verified; fails if the region does not take it.
    :param remember: keeps addresses for the next start.
    :param jitter: random numbers from 0 to 1.
    """

    def __init__(
        self,
        clock: IReactorTime,
        dial: Dial,
        register: Callable[[Link, Mapping[str, Any]], Awaitable[object]],
        remember: Callable[[tuple[str, ...]], object],
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._clock = clock
        self._dial = dial
        self._register = register
        self._remember = remember
        self._jitter = jitter
        self._routes: dict[str, _Route] = {}
        self._told: dict[str, list[str]] = {}
        self._remembered: tuple[str, ...] = ()
        self._instance = uuid.uuid4().hex
        self._attempts = 0
        self._asking: IDelayedCall | None = None
        self._stopping: list[Deferred[None]] = []

    @property
    def addresses(self) -> list[str]:
        """Every address that the rack uses or would use."""
        return list(self._routes)

    def links(self) -> Iterator[Link]:
        """Every link that is up."""
        return (route.link for route in list(self._routes.values()) if route.link is not None)

    def start(self, configured: Iterable[str], remembered: Iterable[str] = ()) -> None:
        """Connect to ``configured``, which stay, and to ``remembered``, which stay while a region tells of them."""
        self._remembered = tuple(remembered)
        for address in configured:
            self._go(self._routes.setdefault(address, _Route(address, configured=True)))
        for address in self._remembered:
            self._go(self._routes.setdefault(address, _Route(address, configured=False)))
        self._ask_later()

    async def stop(self) -> None:
        """Close all links in order."""
        if self._asking is not None and self._asking.active():
            self._asking.cancel()
        self._asking = None
        for route in self._routes.values():
            self._rest(route)
        self._routes = {}
        await gatherResults(self._stopping, consumeErrors=True)

    # One link.

    def _go(self, route: _Route) -> None:
        if route.service is None:

            async def prepare(link: Link) -> None:
                await self._prepare(route, link)

            route.service = self._dial(route.address, prepare)
            route.service.startService()

    def _rest(self, route: _Route) -> None:
        service, route.service = route.service, None
        if service is not None:
            stopping = service.stopService()
            self._stopping.append(stopping)
            stopping.addErrback(
                lambda reason: log.failure("Could not stop connecting to {address}", reason, address=route.address)
            )
            stopping.addCallback(lambda _: self._stopping.remove(stopping))

    async def _prepare(self, route: _Route, link: Link) -> None:
        self._attempts += 1
        attempt = self._attempts
        try:
            answer = await link.call(Endpoints)
        except UnknownCommand:  # an older region, which is one process
            answer = {"process": _OLDER + route.address, "endpoints": {}}
        process = answer["process"]
        route.process = process
        holder = self._holder(process)
        if holder is not None and holder is not route:
            # Only when this attempt has ended, because it cannot be stopped from inside.
            self._clock.callLater(0, self._rest, route)
            raise NotNeeded(f"the rack is linked with that region process already, by {holder.address}")
        route.link = link
        link.on_lost(lambda lost, _: self._lost(route, lost))
        await self._register(link, {"instance": self._instance, "attempt": attempt})
        self._learn(route, answer["endpoints"])

    def _holder(self, process: str) -> _Route | None:
        return next(
            (
                route
                for route in self._routes.values()
                if route.process == process and route.link is not None and route.link.life is Life.READY
            ),
            None,
        )

    def _lost(self, route: _Route, link: Link) -> None:
        if route.link is link:
            route.link = None

    # All of them.

    def _ask_later(self) -> None:
        self._asking = self._clock.callLater(ASK_SECONDS * (0.8 + 0.4 * self._jitter()), self._tick)

    def _tick(self) -> None:
        asking = Deferred.fromCoroutine(self._ask())
        asking.addErrback(lambda reason: log.failure("Could not ask which region processes there are", reason))
        asking.addCallback(lambda _: None if self._asking is None else self._ask_later())

    async def _ask(self) -> None:
        """Ask whoever answers which processes there are."""
        up = [
            route
            for route in self._routes.values()
            if route.link is not None and route.link.registered and not route.process.startswith(_OLDER)
        ]
        random.shuffle(up)  # so that one process that knows less than the others is not always the one
        for route in up:
            if route.link is None:
                continue
            outcome = await route.link.ask(Endpoints)
            if self._asking is None:
                return
            if isinstance(outcome, Answered):
                self._learn(route, outcome.value["endpoints"])
                return
        self._follow()  # nobody answers: whatever rested is tried as well

    def _learn(self, route: _Route, endpoints: Any) -> None:
        """Take what the process at the other end of ``route`` says: addresses of each process, by its id."""
        host, _ = split_address(route.address)
        told: dict[str, list[str]] = {}
        for process, addresses in _read(endpoints):
            told[process] = [
                join_address(host, port) if name == "*" else join_address(name, port) for name, port in addresses
            ]
        self._told = told
        self._follow()
        found = tuple(sorted({address for each in told.values() for address in each}))[:MOST]
        if found and found != self._remembered:
            self._remembered = found
            self._remember(found)

    def _follow(self) -> None:
        """Connect where there may be a process that the rack is not linked with; give up what nobody tells of."""
        wanted: dict[str, str] = {}
        for process, addresses in self._told.items():
            for address in addresses:
                wanted.setdefault(address, process)
        if len(wanted) > MOST:
            log.error("A region tells of {count} addresses; only {most} are tried.", count=len(wanted), most=MOST)
            wanted = dict(list(wanted.items())[:MOST])
        for address, process in wanted.items():
            if self._holder(process) is None:
                if address not in self._routes:
                    log.info("Learned of a region process at {address}.", address=address)
                route = self._routes.setdefault(address, _Route(address, configured=False))
                self._go(route)
        for route in list(self._routes.values()):
            if route.configured:
                if self._holder(route.process) is None:
                    self._go(route)
            elif self._told and route.address not in wanted and route.link is None:
                log.info("No region tells of a process at {address} any more.", address=route.address)
                self._rest(route)
                del self._routes[route.address]


def _read(endpoints: Any) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """The processes and their addresses, without what makes no sense."""
    if not isinstance(endpoints, dict):
        log.error("A region told of its processes in a way that makes no sense: {what!r}", what=str(endpoints)[:200])
        return
    unusable: list[object] = []
    for process, addresses in endpoints.items():
        found: list[tuple[str, int]] = []
        for address in addresses if isinstance(addresses, list) else [addresses]:
            try:
                found.append(split_address(address))
            except (ValueError, AttributeError):
                unusable.append(address)
        yield process, found
    if unusable:
        log.error(
            "A region told of a process at {what!r}, which is no address{more}",
            what=str(unusable[0])[:200], more=f"; and of {len(unusable) - 1} more" if len(unusable) > 1 else "",
        )  # fmt: skip
