"""What the region answers to racks: enrolment, registration, reports and events.

Each responder checks what it was sent, changes the stores, and only then lets other parts see it. Who may call what is
not decided here but in the command table (:mod:`rpc.commands`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from twisted.internet.defer import Deferred
from twisted.logger import Logger

from region.authority import Authority, TokenRefused
from region.events import EventStore, NotEnrolled
from region.racks import RackRefused, RackRegistry
from region.syncing import SyncDriver
from rpc.commands import (
    Enroll,
    EnrolmentRefused,
    EventsRefused,
    Register,
    RegistrationRefused,
    ReportInventory,
    ReportRefused,
    SendEvents,
)
from rpc.events import MAX_BATCH, InvalidEvent, read_event
from rpc.manifest import is_sha256
from rpc.protocol import Link, NotAllowed, Responders
from rpc.versions import agree

log = Logger()

_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,62}[A-Za-z0-9])?\Z")
_TOKEN_ID: Final = re.compile(r"[0-9a-f]{16}\Z")
_UNSTORABLE: Final = re.compile(r"\\u(?:0000|d[89a-f][0-9a-f]{2})")
_STATES: Final = frozenset({"empty", "ready", "syncing", "failed"})


class RegionWire:
    """The region's end of every rack's link.

    :param name: the region's name, told to racks.
    :param stream_urls: where racks can read the image stream.
    """

    def __init__(
        self,
        authority: Authority,
        registry: RackRegistry,
        syncs: SyncDriver,
        events: EventStore,
        name: str,
        stream_urls: list[str],
    ) -> None:
        self._authority = authority
        self._registry = registry
        self._syncs = syncs
        self._events = events
        self._name = name
        self._stream_urls = stream_urls

    def responders(self) -> Responders:
        """The table of what the region answers."""
        return Responders(
            "region",
            {
                Enroll: self.enroll,
                Register: self.register,
                ReportInventory: self.report_inventory,
                SendEvents: self.send_events,
            },
        )

    async def enroll(self, link: Link, token_id: str, proof: bytes, csr: bytes, name: str) -> Mapping[str, Any]:
        """Give a rack that proves to know a token's secret its certificate and its system id."""
        if not _NAME.match(name):
            raise EnrolmentRefused(
                f"{name[:80]!r} cannot be a rack's name: use letters, digits, '-' and '.', at most 64 (--name)"
            )
        if not _TOKEN_ID.match(token_id):
            raise EnrolmentRefused(
                "what was sent is no join token's id: join with the stanchion command of this version"
            )
        try:
            enrolled = await self._authority.enrol(link.channel_binding(), token_id, proof, csr, name)
        except (TokenRefused, RackRefused) as refused:
            log.warn("Refused to enrol {name!r} from {peer}: {why}", name=name, peer=str(link.peer), why=str(refused))
            raise EnrolmentRefused(str(refused)) from refused
        await self._registry.refresh()
        log.info("Enrolled rack {rack} ({name}) from {peer}.", rack=enrolled.system_id, name=name, peer=str(link.peer))
        return {"certificate": enrolled.certificate, "ca": enrolled.ca, "system_id": enrolled.system_id}

    async def register(self, link: Link, versions: Any, name: str, software: str) -> Mapping[str, Any]:
        """Agree on a version and take the link into use."""
        version = agree(versions)
        try:
            rack = await self._registry.register(link, software)
        except RackRefused as refused:
            raise RegistrationRefused(str(refused)) from refused
        link.on_lost(self._lost)
        log.info(
            "Rack {rack} ({name}) registered from {peer}, software {software}.",
            rack=rack.system_id, name=rack.name, peer=str(link.peer), software=software,
        )  # fmt: skip
        return {"version": version, "region": self._name, "stream_urls": self._stream_urls}

    async def report_inventory(
        self, link: Link, generation: int, digest: str, state: str, progress: Any
    ) -> Mapping[str, Any]:
        """Store what a rack says that it holds, and tell it to sync if that is not the current generation."""
        holds = 0 < generation < 1 << 63 and is_sha256(digest)
        holds_nothing = (generation, digest) == (-1, "")
        # PostgreSQL has no place for NUL and half characters, which JSON has.
        showable = not _UNSTORABLE.search(json.dumps(progress))
        if state not in _STATES or not isinstance(progress, dict) or not showable or not (holds or holds_nothing):
            raise ReportRefused(f"not a report: generation {generation}, digest {digest[:80]!r}, state {state[:80]!r}")
        await self._registry.report(
            link.peer.id, generation if holds else None, digest if holds else None, state, progress
        )
        self._syncs.consider(link.peer.id)
        return {}

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
