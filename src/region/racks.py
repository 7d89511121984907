"""Which racks there are, what each last reported, and which of them are linked to this process right now.

:class:`RackStore` is the table; :class:`RackRegistry` is what the rest of the region asks: the enrolled racks as one
immutable mapping, replaced whole whenever the table changes, and the live links beside it.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from typing import Any, Final, Protocol

import psycopg2.errors
from attrs import asdict, evolve, field, frozen
from twisted.internet.defer import Deferred, DeferredLock
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from region.database import DatabaseUnavailable
from region.database.pool import Database, Transaction
from region.together import Together
from rpc.commands import Ping
from rpc.outcomes import Answered
from rpc.protocol import PING_PATIENCE, Life, Link

log = Logger()

CHANNEL: Final = "stanchion_rack"
"""The NOTIFY channel that says that a rack was enrolled, revoked, renamed or forgotten."""

REFRESH_AGAIN_SECONDS: Final = 2.0
"""How long after a failure to read the racks that is tried again."""

NAME_RULE: Final = "use letters, digits, '-' and '.', at most 64"

_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,62}[A-Za-z0-9])?\Z")
_ALPHABET: Final = "abcdefghijkmnpqrstuvwxyz23456789"


RETURNS: Final = 50
"""Racks that are to come back in a second, when all have lost their links: some 5 ms of the region's time for each."""


class RackRefused(Exception):
    """A rack cannot be enrolled or served; the text says why and what to do."""


JOIN_THE_OTHER: Final = "One of them must join anew, by another name (stanchion rack join --again --name …)."
"""What to do about two machines with one identity."""


class RackInUse(RackRefused):
    """The rack is linked already, and that link is alive."""


@frozen
class Rack:
    """One enrolled rack and what it last said. ``generation`` and ``digest`` are None while it has said nothing."""

    system_id: str
    name: str
    certificate_sha256: str
    enrolled: datetime
    revoked: datetime | None = None
    version: str = ""
    last_connected: datetime | None = None
    last_disconnected: datetime | None = None
    generation: int | None = None
    digest: str | None = None
    state: str = "unknown"
    progress: Mapping[str, Any] = field(factory=dict)
    reported: datetime | None = None


@frozen
class Report:
    """What a rack says that it holds, and how it is getting on."""

    generation: int | None
    digest: str | None
    state: str
    progress: Mapping[str, Any]


_SELECT: Final = """
SELECT rack.system_id, name, certificate_sha256, enrolled, revoked, version, last_connected, last_disconnected,
       generation, digest, coalesce(state, 'unknown'), coalesce(progress, '{}'), reported
FROM rack LEFT JOIN rack_inventory USING (system_id)
"""


class RackStore:
    """The ``rack`` and ``rack_inventory`` tables."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def list(self) -> list[Rack]:
        """Every rack that is enrolled, also those that were revoked, by name."""
        return [Rack(*row) for row in await self._database.query(_SELECT + " ORDER BY name")]

    async def enrol(self, transaction: Transaction, system_id: str, name: str, certificate_sha256: str) -> None:
        """Insert a rack, in the caller's transaction.

        :raises RackRefused: if another rack has the name.
        """
        inserted = await transaction.execute(
            "INSERT INTO rack (system_id, name, certificate_sha256) VALUES (%s, %s, %s) ON CONFLICT (name) DO NOTHING",
            (system_id, name, certificate_sha256),
        )
        if not inserted:
            raise RackRefused(
                f"a rack named {name!r} has joined already: join with another name (--name), or forget that rack "
                f"first (stanchion racks forget {name})"
            )
        await transaction.execute("SELECT pg_notify(%s, %s)", (CHANNEL, system_id))

    async def forget(self, system_id: str) -> bool:
        """Remove a rack, so that its certificate is refused from now on. Whether there was one."""

        async def remove(transaction: Transaction) -> bool:
            removed = await transaction.execute("DELETE FROM rack WHERE system_id = %s", (system_id,))
            await transaction.execute("SELECT pg_notify(%s, %s)", (CHANNEL, system_id))
            return removed > 0

        return await self._database.transact(remove)

    async def revoke(self, system_id: str) -> bool:
        """Serve a rack no more, from now on and in every region process. Whether it was served until now."""

        async def change(transaction: Transaction) -> bool:
            changed = await transaction.execute(
                "UPDATE rack SET revoked = now() WHERE system_id = %s AND revoked IS NULL", (system_id,)
            )
            await transaction.execute("SELECT pg_notify(%s, %s)", (CHANNEL, system_id))
            return changed > 0

        return await self._database.transact(change)

    async def rename(self, system_id: str, name: str) -> bool:
        """Give a rack another name. Whether there is the rack.

        :raises RackRefused: if ``name`` is none, or another rack has it.
        """
        if not is_name(name):
            raise RackRefused(f"{name[:80]!r} cannot be a rack's name: {NAME_RULE}")

        async def change(transaction: Transaction) -> bool:
            changed = await transaction.execute("UPDATE rack SET name = %s WHERE system_id = %s", (name, system_id))
            await transaction.execute("SELECT pg_notify(%s, %s)", (CHANNEL, system_id))
            return changed > 0

        try:
            return await self._database.transact(change)
        except psycopg2.errors.UniqueViolation as error:
            raise RackRefused(f"another rack is named {name!r}: take another name, or rename that one first") from error

    async def connected(self, versions: Mapping[str, str]) -> None:
        """Record that racks connected just now, and which software each runs, by system id."""
        # All who write several racks lock them in this order, so that no two region processes wait for each other.
        await self._database.execute(
            """
            WITH locked AS MATERIALIZED (
                SELECT system_id, linked.version FROM unnest(%s::text[], %s::text[]) AS linked (id, version)
                JOIN rack ON system_id = linked.id ORDER BY system_id FOR NO KEY UPDATE OF rack
            )
            UPDATE rack SET last_connected = now(), version = locked.version
            FROM locked WHERE rack.system_id = locked.system_id
            """,
            (list(versions), list(versions.values())),
        )

    async def disconnected(self, *system_ids: str) -> None:
        """Record that the racks' links ended just now."""
        await self._database.execute(
            """
            WITH locked AS MATERIALIZED (
                SELECT system_id FROM rack WHERE system_id = ANY(%s) ORDER BY system_id FOR NO KEY UPDATE
            )
            UPDATE rack SET last_disconnected = now() FROM locked WHERE rack.system_id = locked.system_id
            """,
            (list(system_ids),),
        )

    async def report(self, reports: Mapping[str, Report]) -> frozenset[str]:
        """Store what racks, by system id, reported; returns when it is committed.

        :return: those that it is stored of. The others are not enrolled: they may have been forgotten meanwhile.
        """
        # Every region process stores in the same order, so that none waits for another that waits for it; and a rack
        # that is there stays until its report is.
        rows = await self._database.query(
            """
            INSERT INTO rack_inventory (system_id, generation, digest, state, progress, reported)
            SELECT id, said.generation, said.digest, said.state, said.progress::jsonb, now()
            FROM unnest(%s::text[], %s::bigint[], %s::text[], %s::text[], %s::text[])
                 AS said (id, generation, digest, state, progress)
            JOIN rack ON rack.system_id = said.id ORDER BY id FOR KEY SHARE OF rack
            ON CONFLICT (system_id) DO UPDATE SET generation = EXCLUDED.generation, digest = EXCLUDED.digest,
                state = EXCLUDED.state, progress = EXCLUDED.progress, reported = EXCLUDED.reported
            RETURNING system_id
            """,
            (
                list(reports),
                [report.generation for report in reports.values()],
                [report.digest for report in reports.values()],
                [report.state for report in reports.values()],
                [json.dumps(report.progress) for report in reports.values()],
            ),
        )
        return frozenset(system_id for (system_id,) in rows)


def _not_enrolled(system_id: str) -> str:
    return f"rack {system_id} is not enrolled here: join it again with stanchion rack join"


def is_name(text: str) -> bool:
    """Whether a rack may be named so."""
    return _NAME.match(text) is not None


def new_system_id() -> str:
    """A fresh identifier for a rack: six characters, none of them easily mistaken for another."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(6))


class IConnections(Protocol):
    """Where it is made known which racks this process is linked with; :class:`region.processes.Processes` is one."""

    def linked(self, system_id: str, address: str, instance: str) -> None:
        """An instance of a rack is linked now, in place of any link that it had."""

    def unlinked(self, system_id: str) -> None:
        """A rack is not linked any more."""


class Unrecorded:
    """Makes nothing known."""

    def linked(self, system_id: str, address: str, instance: str) -> None:
        """Nothing."""

    def unlinked(self, system_id: str) -> None:
        """Nothing."""


@frozen
class _Turn:
    """Which of a rack's links is the later: of one instance of the rack, the one with the higher ``attempt``; otherwise
    the one whose registration came in later."""

    instance: str
    attempt: int
    arrival: int

    def is_same_instance(self, other: _Turn) -> bool:
        return bool(self.instance) and self.instance == other.instance

    def is_after(self, other: _Turn) -> bool:
        if self.is_same_instance(other) and self.attempt != other.attempt:
            return self.attempt > other.attempt
        return self.arrival > other.arrival


class RackRegistry:
    """The enrolled racks, and the live links of this region process.

    One link per rack. When the same instance of a rack registers again, its later link replaces the earlier one, which
    is closed; in whatever order their registrations come in or come to an end. When another instance registers, its
    link replaces the older one if that is dead; if it is alive, the newer one is refused: two machines use one
    identity.
    """

    def __init__(
        self, store: RackStore, clock_now: Callable[[], datetime], connections: IConnections | None = None
    ) -> None:
        self.store = store
        self._now = clock_now
        self._connections: IConnections = connections or Unrecorded()
        self._turns: dict[str, _Turn] = {}
        self._arrivals = 0
        self._racks: Mapping[str, Rack] = {}
        self._revoked: Mapping[str, Rack] = {}
        self._links: dict[str, Link] = {}
        # What is stored and what is shown change together, in the same order: a slow reading of the table must not
        # put back what a report has replaced meanwhile.
        self._order = DeferredLock()
        self._registrations = Together(self._order, self._record)
        self._reports = Together(self._order, self._report)
        self._upgraded: list[Callable[[], object]] = []

    def listen_for_upgrades(self, upgraded: Callable[[], object]) -> None:
        """Have ``upgraded`` called whenever a rack is known to have other software than before."""
        self._upgraded.append(upgraded)

    async def refresh(self) -> None:
        """Read the table again, replace the mapping at once, and close links of racks that are gone from it."""
        async with self._order:
            racks = await self.store.list()
            self._show({rack.system_id: rack for rack in racks if rack.revoked is None})
            self._revoked = {rack.system_id: rack for rack in racks if rack.revoked is not None}
        for system_id in [system_id for system_id in self._links if system_id not in self._racks]:
            why = "it was revoked" if system_id in self._revoked else "it is no longer enrolled"
            log.warn("Closing the link of rack {rack}: {why}.", rack=system_id, why=why)
            link = self._links[system_id]
            self._forget(system_id)
            link.close(why)

    def enrolled(self) -> Mapping[str, Rack]:
        """Every enrolled rack by system id. The mapping never changes; a new one takes its place."""
        return self._racks

    @property
    def spread(self) -> int:
        """Seconds within which the racks are to come back when they have all lost their links."""
        return -(-len(self._racks) // RETURNS)

    def revoked(self) -> Mapping[str, Rack]:
        """Every rack that was revoked and not forgotten, likewise."""
        return self._revoked

    def link_of(self, system_id: str) -> Link | None:
        """The live link to a rack, if there is one."""
        return self._links.get(system_id)

    def not_connected_since(self, system_id: str) -> float | None:
        """When the rack's last link ended, or when it was enrolled if it never had one, as seconds since the epoch, if
        that is known."""
        rack = self._racks.get(system_id)
        if rack is None:
            return None
        if rack.last_disconnected is None:
            return rack.enrolled.timestamp() if rack.last_connected is None else None
        if rack.last_connected is not None and rack.last_connected > rack.last_disconnected:
            return None  # the region was killed while the rack was linked: nobody saw that link end
        return rack.last_disconnected.timestamp()

    def by_certificate(self, sha256: str) -> Rack | None:
        """The enrolled rack with this certificate."""
        return next((rack for rack in self._racks.values() if rack.certificate_sha256 == sha256), None)

    async def register(self, link: Link, version: str, instance: str = "", attempt: int = 0) -> Rack:
        """Make ``link`` the link of the rack that it names, unless a later one of that rack is there.

        :param instance: what the rack says of itself, with ``attempt``; see :class:`rpc.commands.Register`.
        :raises RackRefused: if the rack is not enrolled (any more), or this is not its latest link, or is lost.
        :raises RackInUse: if another instance of it has a link that is alive.
        """
        system_id = link.peer.id
        self._arrivals += 1
        turn = _Turn(instance, attempt, self._arrivals)
        if system_id not in self._racks:
            await self.refresh()
        rack = self._racks.get(system_id)
        if rack is None:
            raise RackRefused(_not_enrolled(system_id))
        while True:
            await self._make_room(rack, link, turn)
            await self._registrations.bring(system_id, version)
            if not self._is_in_the_way(system_id, link, turn):
                break  # otherwise a link of another instance came meanwhile
        # From here on nothing waits: what is decided is done.
        if system_id not in self._racks:
            raise RackRefused(f"rack {rack.name} ({system_id}) was revoked or forgotten while it registered")
        if link.life is not Life.READY:
            raise RackRefused("the link ended while it registered")
        older = self._links.get(system_id)
        if older is not None and older is not link and self._turns[system_id].is_after(turn):
            raise RackRefused(f"rack {system_id} has registered on a later link; this one is of no use any more")
        self._links[system_id] = link
        self._turns[system_id] = turn
        self._connections.linked(system_id, link.peer.address, instance)
        if older is not None and older is not link:
            log.warn("Rack {rack} ({name}) registered anew; its older link is closed.", rack=system_id, name=rack.name)
            older.close("the rack registered anew")
        return self._racks[system_id]

    async def _record(self, versions: Mapping[str, str]) -> Mapping[str, Exception]:
        """Record that racks connected, and with which version."""
        await self.store.connected(versions)
        connected = self._now()
        self._change({rack: {"version": version, "last_connected": connected} for rack, version in versions.items()})
        return {}

    def _is_in_the_way(self, system_id: str, link: Link, turn: _Turn) -> bool:
        """Whether there is a link of another instance of the rack than the one that registers on ``link``."""
        older = self._links.get(system_id)
        return older is not None and older is not link and not self._turns[system_id].is_same_instance(turn)

    async def _make_room(self, rack: Rack, link: Link, turn: _Turn) -> None:
        """See to it that no other instance of the rack has a link that is alive."""
        while self._is_in_the_way(rack.system_id, link, turn):
            older = self._links[rack.system_id]
            # A rack that lost its network may come back before its old link is known to be dead.
            outcome = await older.ask(Ping, deadline=PING_PATIENCE)
            if self._links.get(rack.system_id) is not older:
                continue
            if isinstance(outcome, Answered):
                raise RackInUse(
                    f"rack {rack.name} ({rack.system_id}) is linked already, from {older.peer.address}, and that link "
                    f"is alive; the one from {link.peer.address} is refused: two machines have this rack's identity. "
                    f"{JOIN_THE_OTHER}"
                )
            if link.life is not Life.READY:
                raise RackRefused("the link ended while it registered")
            log.warn(
                "Rack {rack} ({name}) registers anew from {newer}; its older link, from {older}, does not answer and "
                "is closed.",
                rack=rack.system_id, name=rack.name, newer=link.peer.address, older=older.peer.address,
            )  # fmt: skip
            self._forget(rack.system_id)
            older.close("the rack registered anew")

    async def lost(self, link: Link) -> None:
        """Forget ``link`` if it is still the rack's link, and record when it ended."""
        system_id = link.peer.id
        if self._links.get(system_id) is not link:
            return
        self._forget(system_id)
        ended = self._now()
        self._change({system_id: {"last_disconnected": ended}})
        async with self._order:
            await self.store.disconnected(system_id)
            # A reading of the table that was under way has put back what was there before.
            self._change({system_id: {"last_disconnected": ended}})

    async def report(
        self, system_id: str, generation: int | None, digest: str | None, state: str, progress: Mapping[str, Any]
    ) -> None:
        """Store a rack's report, then let everyone see it.

        :raises RackRefused: if it is not enrolled any more.
        """
        await self._reports.bring(system_id, Report(generation, digest, state, progress))

    async def _report(self, reports: Mapping[str, Report]) -> Mapping[str, Exception]:
        stored = await self.store.report(reports)
        reported = self._now()
        self._change({rack: {**asdict(reports[rack], recurse=False), "reported": reported} for rack in stored})
        return {rack: RackRefused(_not_enrolled(rack)) for rack in reports if rack not in stored}

    async def close(self) -> None:
        """Close every link, because the region is stopping, and record that while there is a database to do it in."""
        links, self._links = self._links, {}
        for link in links.values():
            link.close("the region is stopping")
        try:
            async with self._order:
                await self.store.disconnected(*links)
        except DatabaseUnavailable as error:
            log.warn("When the links with racks ended is not recorded: {reason}", reason=str(error))

    def held_generations(self) -> Mapping[str, int]:
        """For each rack that holds something, the generation that it last reported."""
        return {key: rack.generation for key, rack in self._racks.items() if rack.generation is not None}

    def _forget(self, system_id: str) -> None:
        del self._links[system_id], self._turns[system_id]
        self._connections.unlinked(system_id)

    def _change(self, changes: Mapping[str, Mapping[str, Any]]) -> None:
        known = {rack: evolve(self._racks[rack], **what) for rack, what in changes.items() if rack in self._racks}
        if known:
            self._show({**self._racks, **known}, known)

    def _show(self, racks: Mapping[str, Rack], changed: Collection[str] | None = None) -> None:
        """Have ``racks`` be the enrolled ones. Only ``changed`` may be others than before; None: any."""
        before, self._racks = self._racks, racks
        both = [rack for rack in (racks if changed is None else changed) if rack in before]
        if any(racks[rack].version != before[rack].version for rack in both):
            for upgraded in self._upgraded:
                upgraded()


def watch(registry: RackRegistry, database: Database, clock: IReactorTime) -> None:
    """Refresh ``registry`` whenever any region process changes the set of racks, and again until that succeeds: a rack
    that was revoked must not stay linked because the database did not answer in that moment."""
    again: list[IDelayedCall] = []

    def changed(payload: str) -> None:
        refreshing = Deferred.fromCoroutine(registry.refresh())
        refreshing.addErrback(failed)

    def failed(reason: Failure) -> None:
        if reason.check(psycopg2.Error, DatabaseUnavailable):
            log.error(
                "Could not read the list of racks, so that one that was revoked may still be linked; trying again in "
                "{seconds:g} s: {error}",
                seconds=REFRESH_AGAIN_SECONDS, error=str(reason.value).strip(),
            )  # fmt: skip
        else:
            log.failure("Could not read the list of racks, on an error of this process's own", reason)
        if not any(each.active() for each in again):
            again[:] = [clock.callLater(REFRESH_AGAIN_SECONDS, changed, "")]

    database.listen(CHANNEL, changed)
