"""What the region answers to racks: enrolment, registration, reports and events.

Each responder checks what it was sent, changes the stores, and only then lets other parts see it. Who may call what is
not decided here but in the command table (:mod:`rpc.commands`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from twisted.internet.defer import Deferred, gatherResults
from twisted.logger import Logger

from region.authority import Authority, TokenRefused
from region.database import DatabaseUnavailable
from region.events import EventStore, NotEnrolled
from region.images.repair import MAX_REFUSED
from region.processes import Processes
from region.racks import JOIN_THE_OTHER, NAME_RULE, RackInUse, RackRefused, RackRegistry, is_name
from region.syncing import SyncDriver
from rpc.commands import (
    AlreadyLinked,
    Command,
    Endpoints,
    Enroll,
    EnrolmentRefused,
    EventsRefused,
    Register,
    RegistrationRefused,
    Renew,
    RenewalRefused,
    Renewed,
    RenewSoon,
    ReportInventory,
    ReportRefused,
    SendEvents,
)
from rpc.events import MAX_BATCH, InvalidEvent, plain, read_event
from rpc.failures import Unavailable
from rpc.manifest import is_sha256
from rpc.protocol import Link, NotAllowed, Responders
from rpc.responders import Responder
from rpc.versions import agree

log = Logger()

_TOKEN_ID: Final = re.compile(r"[0-9a-f]{16}\Z")
_NUL: Final = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")
_HALF: Final = re.compile("[\ud800-\udfff]")

MAX_SOFTWARE: Final = 64
"""Characters of a rack's version that are kept."""

MAX_INSTANCE: Final = 64
"""Characters of what a rack says of itself to tell its starts apart; what follows does not count."""

MAX_DEPTH: Final = 16
"""How deeply what a rack shows of its progress may be nested."""

MAX_NUMBER: Final = (1 << 63) - 1
"""The largest whole number in it: of larger ones no quotient can be told, such as how far a sync is."""

_STATES: Final = frozenset({"empty", "ready", "partial", "syncing", "failed"})


def _is_showable(progress: object) -> bool:
    """Whether PostgreSQL can store it, which has no place for NUL and half characters, and JSON can be made of it."""
    level: list[object] = [progress]
    for _ in range(MAX_DEPTH):
        level = [
            each
            for one in level
            if isinstance(one, dict | list)
            for each in (one.values() if isinstance(one, dict) else one)
        ]
        if any(isinstance(each, int) and abs(each) > MAX_NUMBER for each in level):
            return False
    if level:
        return False
    text = json.dumps(progress, ensure_ascii=False)
    return not _NUL.search(text) and not _HALF.search(text)


def _with_database(responder: Responder) -> Responder:
    """``responder``, which tells a rack to ask later while the database is away: that is no error of the region's."""

    async def answer(link: Link, **arguments: Any) -> Mapping[str, Any]:
        try:
            return await responder(link, **arguments)
        except DatabaseUnavailable as error:
            raise Unavailable("the region cannot reach its database; ask again later") from error

    return answer


class RegionWire:
    """The region's end of every rack's link.

    :param processes: which region processes there are.
    :param name: the region's name, told to racks.
    :param stream_urls: where racks can read the image stream.
    :param refused: is told which rack got which files with wrong bytes. It must not raise.
    """

    def __init__(
        self,
        authority: Authority,
        registry: RackRegistry,
        syncs: SyncDriver,
        events: EventStore,
        processes: Processes,
        name: str,
        stream_urls: list[str],
        refused: Callable[[str, Sequence[str]], object] = lambda rack, files: None,
    ) -> None:
        self._refused = refused
        self._processes = processes
        self._authority = authority
        self._registry = registry
        self._syncs = syncs
        self._events = events
        self._name = name
        self._stream_urls = stream_urls

    def responders(self) -> Responders:
        """The table of what the region answers."""
        table: dict[type[Command], Responder] = {
            Enroll: self.enroll,
            Endpoints: self.endpoints,
            Register: self.register,
            Renew: self.renew,
            Renewed: self.renewed,
            ReportInventory: self.report_inventory,
            SendEvents: self.send_events,
        }
        return Responders("region", {command: _with_database(responder) for command, responder in table.items()})

    async def enroll(self, link: Link, token_id: str, proof: bytes, csr: bytes, name: str) -> Mapping[str, Any]:
        """Give a rack that proves to know a token's secret its certificate and its system id."""
        if not is_name(name):
            raise EnrolmentRefused(f"{name[:80]!r} cannot be a rack's name: {NAME_RULE} (--name)")
        if not _TOKEN_ID.match(token_id):
            raise EnrolmentRefused(
                "what was sent is no join token's id: join with the stanchion command of this version"
            )
        try:
            enrolled = await self._authority.enrol(link.channel_binding(), token_id, proof, csr, name)
        except (TokenRefused, RackRefused) as refused:
            raise EnrolmentRefused(f"{name} cannot join: {refused}") from refused
        try:
            await self._registry.refresh()
        except DatabaseUnavailable as error:
            # It is a rack, and the token is used up: it must get its certificate all the same.
            log.warn("Rack {rack} is not listed yet: {why}", rack=enrolled.system_id, why=str(error))
        log.info("Enrolled rack {rack} ({name}) from {peer}.", rack=enrolled.system_id, name=name, peer=str(link.peer))
        return {"certificate": enrolled.certificate, "ca": enrolled.ca, "system_id": enrolled.system_id}

    async def endpoints(self, link: Link) -> Mapping[str, Any]:
        """Which region processes there are. A rack that is not served any more learns nothing, and why when it
        registers; as does one of which another process has just made a rack, and asks again soon."""
        served = link.peer.id in self._registry.enrolled()
        return {"process": self._processes.id, "endpoints": self._processes.endpoints() if served else {}}

    async def register(
        self,
        link: Link,
        versions: Any,
        name: str,
        software: str,
        instance: str | None = None,
        attempt: int | None = None,
    ) -> Mapping[str, Any]:
        """Agree on a version and take the link into use."""
        version = agree(versions)
        try:
            await self._authority.issued.admit(link.peer.id, link.peer.certificate)
            software, instance = plain(software, MAX_SOFTWARE), plain((instance or "")[:MAX_INSTANCE], MAX_INSTANCE)
            await self._refuse_a_copy(link, instance)
            rack = await self._registry.register(link, software, instance, attempt or 0)
        except RackInUse as refused:
            raise AlreadyLinked(str(refused)) from refused
        except RackRefused as refused:
            raise RegistrationRefused(str(refused)) from refused
        link.on_lost(self._lost)
        log.info(
            "Rack {rack} ({name}) registered from {peer}, software {software}.",
            rack=rack.system_id, name=rack.name, peer=str(link.peer), software=software,
        )  # fmt: skip
        self.ask_to_renew(link.peer.id)
        return {
            "version": version,
            "region": self._name,
            "stream_urls": self._stream_urls,
            "spread": self._registry.spread,
        }

    async def _refuse_a_copy(self, link: Link, instance: str) -> None:
        """See to it that no other process is linked with another instance of the rack: that is another machine, or the
        rack as it was before it broke down, whose link is found dead in a moment.

        :raises RackInUse: if one is.
        """
        other = await self._processes.elsewhere(link.peer.id, instance)
        if other is not None:
            raise RackInUse(
                f"rack {link.peer.id} is linked already, from {other.address} with region process {other.name} on "
                f"{other.host}; the link from {link.peer.address} is refused: two machines have this rack's identity, "
                f"unless it has broken down and is back, and is let in within 15 s. {JOIN_THE_OTHER}"
            )

    async def renew(self, link: Link, csr: bytes) -> Mapping[str, Any]:
        """Give a registered rack its next certificate; the one that it has stays good until it uses the next."""
        if not self._is_registered(link):
            raise RenewalRefused(f"this link is not the one of rack {link.peer.id}: register first")
        try:
            renewed = await self._authority.renew(link.peer.id, csr)
        except RackRefused as refused:
            raise RenewalRefused(str(refused)) from refused
        log.info("{peer} was given a new certificate.", peer=str(link.peer))
        return {"certificate": renewed.certificate, "ca": renewed.ca}

    async def renewed(self, link: Link, certificate: str) -> Mapping[str, Any]:
        """Note that a rack keeps a certificate that it was given."""
        if not self._is_registered(link):
            raise NotAllowed(f"this link is not the one of rack {link.peer.id}: register first")
        if not is_sha256(certificate) or not await self._authority.issued.stored(link.peer.id, certificate):
            raise NotAllowed(f"rack {link.peer.id} was given no certificate {certificate[:80]!r}")
        log.info("{peer} has stored its new certificate.", peer=str(link.peer))
        return {}

    def _is_registered(self, link: Link) -> bool:
        return self._registry.link_of(link.peer.id) is link

    def ask_to_renew(self, system_id: str | None = None) -> None:
        """Have the linked racks, or just one, renew that were not told yet which authorities to trust now."""
        asking = Deferred.fromCoroutine(self._ask_to_renew(system_id))
        asking.addErrback(lambda failure: log.failure("Could not ask racks to renew their certificates", failure))

    async def _ask_to_renew(self, system_id: str | None) -> None:
        behind = await self._authority.issued.not_told(self._authority.keys.authorities, system_id)
        links = [link for rack in behind if (link := self._registry.link_of(rack.system_id)) is not None]
        # A failure is logged and counted by the link; the rack is asked again when it registers the next time.
        asks = [link.ask(RenewSoon, reason="the region's certificate authority was changed") for link in links]
        await gatherResults([Deferred.fromCoroutine(ask) for ask in asks])

    async def report_inventory(
        self, link: Link, generation: int, digest: str, state: str, progress: Any, refused: Any = None
    ) -> Mapping[str, Any]:
        """Store what a rack says that it holds, and tell it to sync if that is not the current generation."""
        if refused is not None:
            self._look_at_refused(link, refused)
        holds = 0 < generation < 1 << 63 and is_sha256(digest)
        holds_nothing = (generation, digest) == (-1, "")
        if state not in _STATES or not (holds or holds_nothing):
            raise ReportRefused(f"not a report: generation {generation}, digest {digest[:80]!r}, state {state[:80]!r}")
        if not isinstance(progress, dict) or not _is_showable(progress):
            raise ReportRefused(
                f"not a report: its progress is no object, nested more than {MAX_DEPTH} deep, has text with NUL or "
                "half a character, or a whole number of over 63 bits"
            )
        try:
            await self._registry.report(
                link.peer.id, generation if holds else None, digest if holds else None, state, progress
            )
        except RackRefused as refused:
            raise ReportRefused(str(refused)) from refused
        self._syncs.consider(link.peer.id)
        return {}

    def _look_at_refused(self, link: Link, refused: Any) -> None:
        """Have our copies looked at of what a rack got with wrong bytes."""
        if not isinstance(refused, list) or len(refused) > MAX_REFUSED or not all(is_sha256(each) for each in refused):
            raise ReportRefused(f"not a report: refused must be a list of at most {MAX_REFUSED} sha256")
        self._refused(link.peer.id, refused)

    async def send_events(self, link: Link, events: Any) -> Mapping[str, Any]:
        """Store what happened on a rack; answered when that is committed."""
        if not isinstance(events, list) or len(events) > MAX_BATCH:
            raise EventsRefused(f"events are sent as a list of at most {MAX_BATCH}")
        try:
            return {"committed": await self._events.store(link.peer.id, [read_event(each) for each in events])}
        except InvalidEvent as error:
            raise EventsRefused(str(error)) from error
        except NotEnrolled as error:
            # Not for the events to suffer: the rack keeps them.
            raise NotAllowed(str(error)) from error

    def _lost(self, link: Link, reason: str) -> None:
        forgetting = Deferred.fromCoroutine(self._registry.lost(link))
        forgetting.addErrback(
            lambda failure: log.failure("Could not record that {peer} is gone", failure, peer=str(link.peer))
        )
