"""How does a rack keep in touch with its regions? It connects, registers, reports, and connects again when that ends.

To each region there is one link. Whenever what is held changes, or the state of syncing does, each region is told;
while a sync is under way, also at intervals. Of several changes in a row only the last is told.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, Final

from attrs import define, field
from twisted.internet.defer import Deferred, DeferredLock
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from rack.identity import Identity
from rack.regions import Regions
from rack.renewal import Renewal
from rack.sync import Synchroniser
from rack.wire import RackWire
from rpc.addresses import split_address
from rpc.commands import Register, ReportInventory
from rpc.endpoints import Reconnecting, reconnecting
from rpc.identity import TLS, client_tls
from rpc.outcomes import Answered
from rpc.protocol import Link
from rpc.versions import VERSIONS

log = Logger()

REPORT_SECONDS: Final = 5.0
"""Seconds between two reports while a sync is under way."""

_NO_TURN: Final[Mapping[str, Any]] = {}

REPEAT_SECONDS: Final = 30.0
"""Seconds after which a report that the region could not take is sent again."""


@define(eq=False)
class _Told:
    """A registered link, and what was told over it."""

    link: Link
    wire: RackWire
    clock: IReactorTime
    lock: DeferredLock = field(factory=DeferredLock, init=False)
    failed_at: float | None = field(default=None, init=False)

    def tell(self) -> None:
        """Report what is held, unless a report that has not been sent yet will say it."""
        if self.lock.waiting:
            return
        telling = self.lock.run(self._send)
        telling.addErrback(lambda reason: log.failure("A report could not be made", reason))

    def _send(self) -> Deferred[None]:
        return Deferred.fromCoroutine(self._report())

    async def _report(self) -> None:
        # The link logs and counts a report that fails; here it is only remembered that the region does not know.
        report = self.wire.report()
        outcome = await self.link.ask(ReportInventory, **report)
        if isinstance(outcome, Answered):
            self.wire.heard(self.link, report["generation"])
            self.failed_at = None
        else:
            self.failed_at = self.clock.seconds()

    def is_due(self, syncing: bool) -> bool:
        """Whether it is time to report without a change."""
        return syncing or (self.failed_at is not None and self.clock.seconds() >= self.failed_at + REPEAT_SECONDS)


class RegionLinks:
    """The links to all regions, over which ``synchroniser`` is asked and reported on.

    :param renewal: what renews the certificate that the links show, if anything does.
    """

    def __init__(
        self, clock: IReactorTime, synchroniser: Synchroniser, name: str, renewal: Renewal | None = None
    ) -> None:
        self._clock = clock
        self._synchroniser = synchroniser
        self._name = name
        self._renewal = renewal
        self._wire = RackWire(synchroniser, renewal)
        self.responders = self._wire.responders()
        self._told: dict[Link, _Told] = {}
        self._registered: list[Callable[[Link, str], object]] = []
        self._regions: Regions | None = None
        self._ticking = LoopingCall(self._tick)
        self._ticking.clock = clock
        synchroniser.on_change(self._changed)

    def connect(
        self,
        reactor: Any,
        identity: Identity,
        addresses: Sequence[str],
        remembered: Sequence[str] = (),
        remember: Callable[[tuple[str, ...]], object] = lambda addresses: None,
    ) -> None:
        """Keep a link with every region process up from now on.

        :param addresses: HOST:PORT of each that the rack's settings name.
        :param remembered: those that it was told of when it last ran; ``remember`` keeps them for the next time.
        :raises CertificateInvalid: if the identity's certificates are no good.
        """
        tls: TLS = client_tls(identity.credentials, identity.authority)
        if self._renewal is not None:
            self._renewal.follow(tls)

        def dial(address: str, prepare: Callable[[Link], Awaitable[object]]) -> Reconnecting:
            host, port = split_address(address)
            return reconnecting(reactor, host, port, tls, self.make, prepare)

        self._regions = Regions(reactor, dial, self.prepare, remember)
        self._regions.start(addresses, remembered)
        self._start_ticking()

    def on_registered(self, listener: Callable[[Link, str], object]) -> None:
        """Call ``listener`` with the link and the region's name whenever the rack has registered. It must not raise."""
        self._registered.append(listener)

    @property
    def up(self) -> int:
        """How many regions the rack is registered with at this moment."""
        return len(self._told)

    def make(self) -> Link:
        """A fresh link's rack end."""
        return Link(self.responders, clock=self._clock)

    async def prepare(self, link: Link, turn: Mapping[str, Any] = _NO_TURN) -> None:
        """Register over ``link`` and report what is held.

        :param turn: the arguments of ``Register`` that say which of the rack's links this is.
        :raises CallFailed: or an error that ``Register`` declares, if the region does not take it.
        """
        answer = await link.call(
            Register, versions=list(VERSIONS), name=self._name, software=version("stanchion"), **turn
        )
        log.info("Registered with region {region} at {peer}.", region=answer["region"], peer=link.peer.address)
        told = self._told[link] = _Told(link, self._wire, self._clock)
        link.on_lost(self._lost)
        told.tell()
        for listener in self._registered:
            listener(link, answer["region"])
        if self._renewal is not None:
            self._renewal.linked(link)
        # What could not be fetched a while ago may be there now.
        self._synchroniser.look_again()

    def _lost(self, link: Link, reason: str) -> None:
        self._told.pop(link, None)
        self._wire.lost(link)

    def _changed(self) -> None:
        for told in list(self._told.values()):
            told.tell()

    def _start_ticking(self) -> None:
        ticking = self._ticking.start(REPORT_SECONDS, now=False)
        ticking.addErrback(lambda reason: log.failure("Reports at intervals have ended", reason))

    def _tick(self) -> None:
        syncing = self._synchroniser.status.state == "syncing"
        for told in list(self._told.values()):
            if told.is_due(syncing):
                told.tell()

    async def stop(self) -> None:
        """Close all links in order."""
        if self._ticking.running:
            self._ticking.stop()
        if self._regions is not None:
            await self._regions.stop()
