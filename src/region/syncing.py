"""Who tells racks to fetch what was published: at each publish, at each registration, and when someone asks.

A rack is told of a generation once on each link, also while it fetches an older one: it gives that up then. When a sync
failed, the rack itself tries again (it remembers what it was told), and the next publish or registration tells it anew.
A rack that holds a newer generation than this process knows of was told by another one, which published it: then this
process reads again what is current, before it would send the rack back.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from twisted.internet.defer import Deferred
from twisted.logger import Logger

from region.database import DatabaseUnavailable
from region.racks import RackRegistry
from rpc.commands import SyncImages
from rpc.outcomes import Answered, Failed, NotConnected, Outcome, TimedOut
from rpc.protocol import Link

log = Logger()


class Published(Protocol):
    """What a sync needs to know of a generation."""

    @property
    def number(self) -> int: ...

    @property
    def digest(self) -> str: ...


async def _nothing_newer() -> None:
    """There is no other process that could publish."""


def describe(outcome: Outcome[object]) -> str:
    """One phrase for an outcome that is no answer."""
    match outcome:
        case Failed(kind, reason):
            return f"{kind}: {reason}"
        case TimedOut(seconds):
            return f"no answer within {seconds:g} s"
        case NotConnected():
            return "not connected"
        case Answered():
            return "answered"


def _newest_first(run: tuple[str, int, Link]) -> int:
    return -run[1]


class SyncDriver:
    """Keeps every linked rack at the current generation.

    :param current: the current generation, or None while nothing was published.
    :param url: where racks fetch from; its host may be ``*``, for the address that the rack connected to.
    :param read_again: reads from the database what is current, and has :meth:`published` called if that is newer; it
        fails with DatabaseUnavailable if the database cannot be asked.
    """

    def __init__(
        self,
        registry: RackRegistry,
        current: Published | None,
        url: Callable[[], str],
        read_again: Callable[[], Awaitable[Any]] = _nothing_newer,
    ) -> None:
        self._read_again = read_again
        self._certain: dict[str, tuple[Link, int]] = {}
        self._reading: set[str] = set()
        self._registry = registry
        self._current = current
        self._url = url
        self._running: set[tuple[str, int, Link]] = set()
        self._told: dict[str, tuple[Link, int]] = {}
        self._once_more: set[tuple[str, int, Link]] = set()

    def published(self, generation: Published) -> None:
        """Take ``generation`` for the current one from now on, and tell every linked rack."""
        self._current = generation
        for system_id in self._registry.enrolled():
            self.consider(system_id)

    def syncing(self) -> Mapping[str, int]:
        """For each rack that was told to sync and has not answered, to which generation: the oldest, if several."""
        return {system_id: number for system_id, number, _ in sorted(self._running, key=_newest_first)}

    def again(self) -> None:
        """Tell every linked rack that is not at the current generation once more: what it lacked may be there now.

        A rack that is fetching may have been refused it a moment ago: it is told when that has ended without all.
        """
        current = self._current
        for system_id, rack in self._registry.enrolled().items():
            link = self._registry.link_of(system_id)
            if current is None or link is None or (rack.generation, rack.digest) == (current.number, current.digest):
                continue
            run = system_id, current.number, link
            # Also one that it began of its own accord, whose result it gives to who asks meanwhile.
            is_fetching = run in self._running or rack.state == "syncing"
            if run not in self._running:
                self.consider(system_id, even_if_in_step=True)
            if is_fetching and run in self._running:
                self._once_more.add(run)

    def consider(self, system_id: str, *, even_if_in_step: bool = False) -> bool:
        """Tell one rack, if it is linked, not at the current generation, and was not told of that on this link.

        :param even_if_in_step: tell it also if it was told already, or is in step.
        :return: whether a sync is under way now, or it is being looked whether there should be one.
        """
        current = self._current
        rack = self._registry.enrolled().get(system_id)
        link = self._registry.link_of(system_id)
        if current is None or rack is None or link is None:
            return False
        if (system_id, current.number, link) in self._running:
            return True
        if (
            rack.generation is not None
            and rack.generation > current.number
            # Numbers only go back when an older database was put in place of the one that the rack knew.
            and self._certain.get(system_id) != (link, rack.generation)
        ):
            self._make_certain(system_id, link, rack.generation, even_if_in_step)
            return True
        if not even_if_in_step and (
            (rack.generation, rack.digest) == (current.number, current.digest)
            # A rack whose sync failed reports so; to tell it once more at each report would go round without end.
            or self._told.get(system_id) == (link, current.number)
        ):
            return False
        self._told[system_id] = (link, current.number)
        ended = Deferred.fromCoroutine(self._sync(system_id, rack.name, link, current))
        ended.addErrback(lambda reason: log.failure("The sync of rack {rack} broke off", reason, rack=system_id))
        return True

    def _make_certain(self, system_id: str, link: Link, generation: int, even_if_in_step: bool) -> None:
        """Read again what is current before a rack is told of something older than it holds."""
        if system_id in self._reading:
            return
        self._reading.add(system_id)

        async def read() -> None:
            try:
                await self._read_again()
            except DatabaseUnavailable as error:
                log.warn("Whether rack {rack} is ahead cannot be told now: {reason}", rack=system_id, reason=str(error))
                return  # it is considered again when it reports, and when something is published
            finally:
                self._reading.discard(system_id)
            self._certain[system_id] = link, generation
            if self._current is not None and self._current.number < generation:
                # What it was told before the region knew that, it may not have taken.
                self._told.pop(system_id, None)
            self.consider(system_id, even_if_in_step=even_if_in_step)

        reading = Deferred.fromCoroutine(read())
        reading.addErrback(lambda reason: log.failure("Rack {rack} could not be considered", reason, rack=system_id))

    async def _sync(self, system_id: str, name: str, link: Link, generation: Published) -> None:
        run = system_id, generation.number, link
        self._running.add(run)
        try:
            outcome = await link.ask(
                SyncImages, generation=generation.number, digest=generation.digest, url=self._url()
            )
        finally:
            self._running.discard(run)
            is_to_be_told = run in self._once_more
            self._once_more.discard(run)
        match outcome:
            case Answered(value):
                ended, reason = value["outcome"], value["reason"]
                (log.error if ended == "failed" else log.warn if ended == "partial" else log.info)(
                    "Rack {name}: sync to generation {generation} ended: {outcome}{why}",
                    name=name, rack=system_id, generation=generation.number,
                    outcome=ended, reason=reason, why=f": {reason}" if reason else "",
                )  # fmt: skip
            case _:
                # The link has logged and counted the failed call itself; this says what it means for the rack.
                log.warn(
                    "Rack {name} did not say how its sync to generation {generation} ended ({why}); "
                    "it goes on by itself and is told again when it registers.",
                    name=name, rack=system_id, generation=generation.number, why=describe(outcome),
                )  # fmt: skip
        if is_to_be_told and isinstance(outcome, Answered) and outcome.value["outcome"] in ("failed", "partial"):
            self.consider(system_id, even_if_in_step=True)
            return
        # What was told on a link that was dead already is told on the new one; what was told on this one is not again.
        self.consider(system_id)
