"""Where events are kept, those of racks exactly once and in each rack's order, those of nodes with what they tell of.

Storing is one transaction, and only one at a time: ids are then in the order of being committed, so whoever reads on
from the last id that he saw misses nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from datetime import datetime
from itertools import groupby
from typing import Final

from attrs import frozen
from prometheus_client import Counter
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from region.database import Database, DatabaseUnavailable, Transaction
from region.nodes.values import NodeName
from rpc.events import MAX_DESCRIPTION, MAX_TYPE, Event, Kind, level_name, plain

log = Logger()

LOCK: Final = (0x5354414E, 4)
"""The advisory lock that storing holds."""

CLEAN_SECONDS: Final = 3600.0
"""How often what is too old is deleted."""

_AT_ONCE: Final = 10_000
"""Rows that are deleted in one statement."""

REGION: Final = "region"
"""The ``source`` of what happens on a region process itself; its name is the ``hostname``."""

STORED: Final = Counter("stanchion_events_stored", "Events of racks that were stored, by level.", ["level"])


class NotEnrolled(Exception):
    """Events came from a rack that is not enrolled (any more)."""


@frozen
class StoredEvent:
    """An event as it is stored. ``source`` is the system id of the rack or node, ``hostname`` its name at that time.

    ``correlation`` is what the log has more about it under, and ``username`` who asked for it, where there is such.
    """

    id: int
    source: str
    hostname: str
    type: str
    level: int
    description: str
    occurred: datetime
    received: datetime
    correlation: str = ""
    username: str = ""


_COLUMNS: Final = (
    "id, coalesce(rack, node), hostname, type, level, description, occurred, received, correlation, username"
)


async def record(
    transaction: Transaction,
    node: NodeName,
    kind: Kind,
    description: str,
    *,
    correlation: str = "",
    username: str = "",
) -> None:
    """Write an event of a node, in the transaction of what it tells of.

    This takes the lock under which events are written, until the transaction ends: nothing else may be locked after it.

    :param description: of any length and content; it is made fit for the database.
    :param correlation: what the log has more about this under.
    :param username: who asked for what happened.
    """
    await transaction.query("SELECT pg_advisory_xact_lock(%s, %s)", LOCK)
    await transaction.execute(
        """INSERT INTO event (node, hostname, type, level, description, correlation, username, occurred)
           VALUES (%s, %s, %s, %s, %s, %s, %s, clock_timestamp())""",
        (
            node.system_id, node.hostname, plain(kind.type, MAX_TYPE), kind.level, plain(description, MAX_DESCRIPTION),
            plain(correlation, MAX_TYPE), plain(username, MAX_TYPE),
        ),
    )  # fmt: skip


class EventStore:
    """The ``event`` table."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def store(self, rack: str, events: Sequence[Event]) -> list[str]:
        """Store the events of a rack that are not stored yet; the ids of all of them, when they are committed.

        :raises NotEnrolled: if there is no such rack.
        """

        async def insert(transaction: Transaction) -> list[int]:
            await transaction.query("SELECT pg_advisory_xact_lock(%s, %s)", LOCK)
            named = await transaction.one("SELECT name FROM rack WHERE system_id = %s AND revoked IS NULL", (rack,))
            if named is None:
                raise NotEnrolled(f"rack {rack} is not enrolled here: join it again with stanchion rack join")
            levels: list[int] = []
            for epoch, group in groupby(events, lambda event: event.epoch):
                levels += await _insert(transaction, rack, named[0], epoch, list(group))
            return levels

        for level in await self._database.transact(insert):
            STORED.labels(level_name(level)).inc()
        return [event.id for event in events]

    async def tell(self, name: str, kind: Kind, description: str) -> None:
        """Store an event of a region process itself, which is called ``name``."""

        async def insert(transaction: Transaction) -> None:
            await record(transaction, NodeName(0, REGION, name), kind, description)

        await self._database.transact(insert)

    async def query(
        self,
        *,
        level: int = 0,
        limit: int = 100,
        before: int | None = None,
        after: int | None = None,
        sources: Collection[str] = (),
        hostnames: Collection[str] = (),
        mac_addresses: Collection[str] = (),
    ) -> list[StoredEvent]:
        """At most ``limit`` events, newest first: the newest, or those next to the id ``before`` or ``after``.

        :param level: only events of this level or a higher one.
        :param sources: only of these racks and nodes, by system id or by the name that they had; all if there are none.
        :param hostnames: only of what had one of these names; all if there are none.
        :param mac_addresses: only of the nodes that have one of these now; all if there are none.
        """
        # Written out, so that the index for just these can be used.
        wanted = [f"level >= {int(level)}"]
        values: dict[str, object] = {"limit": limit, "before": before, "after": after, "hostnames": list(hostnames)}
        if before is not None:
            wanted.append("id < %(before)s")
        if after is not None:
            wanted.append("id > %(after)s")
        if hostnames:
            wanted.append("hostname = ANY(%(hostnames)s)")
        if mac_addresses:
            rows = await self._database.query(
                "SELECT system_id FROM node JOIN interface ON node_id = node.id WHERE mac_address = ANY(%s)",
                ([each.lower() for each in mac_addresses],),
            )
            values["nodes"] = sorted({system_id for (system_id,) in rows})
            wanted.append("node = ANY(%(nodes)s)")
        # From the index of what there are least of, whatever the others ask for.
        columns: tuple[str, ...] = ()
        if sources:
            columns, values["keys"] = ("rack", "node", "hostname"), list(sources)
        elif mac_addresses:
            columns, values["keys"] = ("node",), values["nodes"]
        elif hostnames:
            columns, values["keys"] = ("hostname",), list(hostnames)
        order = "ASC" if after is not None else "DESC"
        page = f"AND {' AND '.join(wanted)} ORDER BY id {order} LIMIT %(limit)s"
        found_in = " UNION ".join(f"(SELECT id FROM event WHERE {column} = key {page})" for column in columns)
        within = (
            f"id IN (SELECT found.id FROM unnest(%(keys)s::text[]) AS key, LATERAL ({found_in}) AS found)"
            if columns
            else "true"
        )
        rows = await self._database.query(f"SELECT {_COLUMNS} FROM event WHERE {within} {page}", values)
        found = [StoredEvent(*row) for row in rows]
        return found if after is None else found[::-1]

    async def forget_old(self, *, keep_days: float, keep_rows: int) -> int:
        """Delete events that are older than ``keep_days``, and the oldest over ``keep_rows``; how many."""
        deleted = 0
        row = await self._database.one("SELECT id FROM event ORDER BY id DESC OFFSET %s LIMIT 1", (keep_rows,))
        excess = row[0] if row else 0
        while True:
            count = await self._database.execute(
                """DELETE FROM event WHERE id IN (
                       SELECT id FROM event WHERE id <= %s OR received < now() - make_interval(secs => %s)
                       ORDER BY id LIMIT %s)""",
                (excess, keep_days * 86400.0, _AT_ONCE),
            )
            deleted += count
            if count < _AT_ONCE:
                break
        await self._database.execute(
            """DELETE FROM event_source WHERE changed < now() - make_interval(secs => %s)
               AND NOT EXISTS (SELECT FROM rack WHERE system_id = event_source.rack)""",
            (keep_days * 86400.0,),
        )
        return deleted


async def _insert(
    transaction: Transaction, rack: str, hostname: str, epoch: str, events: Sequence[Event]
) -> Sequence[int]:
    """Insert those of ``events`` that are new; their levels."""
    row = await transaction.one("SELECT sequence FROM event_source WHERE rack = %s AND epoch = %s", (rack, epoch))
    known = row[0] if row else 0
    # What a rack sends is in order, but what one link holds up may come after what another has brought. The rack has
    # sent that again, or has dropped it and said so; either way it must not come in now.
    new = {event.sequence: event for event in events if event.sequence > known}
    if not new:
        return ()
    rows = [new[sequence] for sequence in sorted(new)]
    await transaction.execute(
        """INSERT INTO event (rack, hostname, epoch, sequence, type, level, description, occurred)
           SELECT %s, %s, %s, sequence, type, level, description, to_timestamp(occurred)
           FROM unnest(%s::bigint[], %s::text[], %s::int[], %s::text[], %s::float8[])
                AS new (sequence, type, level, description, occurred)
           ORDER BY sequence
           ON CONFLICT (rack, epoch, sequence) DO NOTHING""",
        (
            rack, hostname, epoch, [event.sequence for event in rows], [event.type for event in rows],
            [event.level for event in rows], [event.description for event in rows], [event.occurred for event in rows],
        ),
    )  # fmt: skip
    await transaction.execute(
        """INSERT INTO event_source (rack, epoch, sequence) VALUES (%s, %s, %s)
           ON CONFLICT (rack, epoch) DO UPDATE SET sequence = EXCLUDED.sequence, changed = now()""",
        (rack, epoch, rows[-1].sequence),
    )
    return [event.level for event in rows]


class EventCleaner:
    """Has what is too old deleted, at the start and every hour.

    :param forget_old: deletes, and gives how many events it was.
    """

    def __init__(self, forget_old: Callable[[], Awaitable[int]], clock: IReactorTime) -> None:
        self._forget_old = forget_old
        self._timer = LoopingCall(self._clean)
        self._timer.clock = clock

    def start(self) -> None:
        """Begin."""
        timing = self._timer.start(CLEAN_SECONDS)
        timing.addErrback(lambda reason: log.failure("Old events are not deleted any more", reason))

    def stop(self) -> None:
        """End; a deletion that is under way may be broken off at any point."""
        self._timer.stop()

    async def _clean(self) -> None:
        try:
            count = await self._forget_old()
        except DatabaseUnavailable as error:
            log.warn("Old events are deleted an hour later: {reason}", reason=str(error))
            return
        if count:
            log.info("Deleted {count} events that were too old, or too many.", count=count)
