"""Which region processes are there, and which racks is each linked with, seen from any of them?

Each process keeps its own rows in PostgreSQL. What it is linked with is a table in memory that one writer brings the
rows in line with, so neither the order in which statements arrive nor a database that was away can leave a row of a
link that is gone. A process that dies says nothing: its heartbeat, by the database's clock, grows old; from then on
nobody lists what it was linked with, and any other process deletes it.
"""

from __future__ import annotations

import hashlib
import os
import socket
import uuid
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import psycopg2
from attrs import frozen
from twisted.internet.defer import Deferred
from twisted.internet.task import LoopingCall
from twisted.logger import Logger
from twisted.python.failure import Failure

from region.database import Database, DatabaseUnavailable, Transaction
from region.racks import CHANNEL
from rpc.addresses import join_address

log = Logger()

HEARTBEAT_SECONDS: Final = 4.0
"""Between two heartbeats of a process."""

STALE_SECONDS: Final = 12.0
"""After so long without a heartbeat a process counts as dead."""

ANY_HOST: Final = "*"
"""In an endpoint: the address that the rack connected to."""

_WILDCARDS: Final = frozenset({"", "0.0.0.0", "::"})

ALIVE: Final = (
    f"(heartbeat > clock_timestamp() - interval '{STALE_SECONDS:g} seconds' "
    # A clock that was set back must not keep alive what has died just before.
    f"AND heartbeat < clock_timestamp() + interval '{STALE_SECONDS:g} seconds')"
)


@frozen
class Connection:
    """A live link of a rack: with the process ``process`` called ``name`` on ``host``, since when, and the rack's
    address and port."""

    process: str
    name: str
    host: str
    since: datetime
    address: str


@frozen
class Connections:
    """A rack's live links, the one with the process that was asked first; and when one ended last, if ever."""

    live: tuple[Connection, ...] = ()
    ended: datetime | None = None


@frozen
class _Linked:
    number: int
    address: str
    since: datetime
    instance: str


def endpoint_of(advertise: str, listen: str, port: int) -> str:
    """Where racks reach a process that listens on address ``listen``: what it is set to advertise, before all."""
    if advertise:
        return advertise
    return join_address(ANY_HOST if listen in _WILDCARDS else listen, port)


class Processes:
    """The rows of this process, and those of the others.

    :param name: what people call this process.
    :param directory: its state directory, which no other process uses.
    :param host: the machine that it is on.
    """

    def __init__(
        self,
        database: Database,
        clock: Any,
        name: str,
        directory: Path,
        now: Callable[[], datetime],
        *,
        host: str | None = None,
    ) -> None:
        self.id: Final = str(uuid.uuid4())
        """A fresh one at each start."""
        self._name = name
        self._host = host or socket.gethostname()
        self._values: dict[str, Any] = {
            "id": self.id, "name": name, "pid": os.getpid(), "host": self._host, "directory": str(directory.absolute()),
        }  # fmt: skip
        self._now = now
        self._database = database
        self._linked: dict[str, _Linked] = {}
        self._links = 0
        self._changed: set[str] = set()
        self._writing: Deferred[None] | None = None
        self._others: Mapping[str, tuple[str, str, str]] = {}
        self._unreachable: frozenset[str] = frozenset()
        self._beating = LoopingCall(self._beat)
        self._beating.clock = clock
        self._ended: Deferred[object] | None = None

    # This process's own rows.

    async def start(self, endpoint: str) -> None:
        """Make this process known, in place of what ran from its directory before, and begin to say that it lives.

        :param endpoint: HOST:PORT for racks; the host is ``*`` if it is not known under which they reach it.
        """
        self._values["endpoint"] = endpoint

        async def starting(transaction: Transaction) -> None:
            await _delete(transaction, "host = %(host)s AND directory = %(directory)s", self._values)
            await self._insert(transaction)

        await self._database.transact(starting)
        await self._look_around()
        ended: Deferred[Any] = self._beating.start(HEARTBEAT_SECONDS, now=False)
        self._ended = ended.addErrback(lambda reason: log.failure("The heartbeats have ended", reason))
        self._write()

    async def stop(self) -> None:
        """Take this process's rows away."""
        if not self._beating.running:
            return
        self._beating.stop()
        if self._ended is not None:
            await self._ended
        while self._writing is not None:
            await self._written()

        async def stopping(transaction: Transaction) -> None:
            await _delete(transaction, "id = %(id)s", self._values)

        await self._database.transact(stopping)

    def linked(self, system_id: str, address: str, instance: str = "") -> None:
        """A rack is linked with this process now, in place of any link that it had with it."""
        self._links += 1
        self._linked[system_id] = _Linked(self._links, address, self._now(), _digest(instance))
        self._write(system_id)

    def unlinked(self, system_id: str) -> None:
        """A rack is not linked with this process any more."""
        if self._linked.pop(system_id, None) is not None:
            self._write(system_id)

    async def _insert(self, transaction: Transaction) -> None:
        await transaction.execute(
            """
            INSERT INTO region_process (id, name, pid, host, directory, endpoint)
            VALUES (%(id)s, %(name)s, %(pid)s, %(host)s, %(directory)s, %(endpoint)s)
            """,
            self._values,
        )

    def _write(self, *system_ids: str) -> None:
        self._changed.update(system_ids)
        if self._writing is None and self._beating.running:
            self._writing = Deferred.fromCoroutine(self._write_all())
            self._writing.addErrback(self._not_written)
            self._writing.addCallback(self._ended_writing)

    def _not_written(self, reason: Failure) -> None:
        if reason.check(psycopg2.Error, DatabaseUnavailable):
            log.warn("Could not write which racks are linked; trying again: {error}", error=str(reason.value).strip())
        else:
            log.failure("Could not write which racks are linked, on an error of this process's own", reason)

    def _ended_writing(self, _: object) -> None:
        self._writing = None

    async def _written(self) -> None:
        """Wait for the writer, whose end others wait for as well."""
        waiting: Deferred[None] = Deferred()
        if self._writing is None:
            return
        self._writing.addBoth(lambda _: waiting.callback(None))
        await waiting

    async def _write_all(self) -> None:
        """Write until the rows are as this process's memory is. What cannot be written is written at a heartbeat."""
        while self._changed and self._beating.running:
            changed, self._changed = self._changed, set()
            up = {system_id: self._linked[system_id] for system_id in changed if system_id in self._linked}
            down = sorted(changed - up.keys())
            try:
                await self._database.transact(partial(self._store, up, down))
            except BaseException:
                self._changed |= changed
                raise

    async def _store(self, up: Mapping[str, _Linked], down: list[str], transaction: Transaction) -> None:
        if down:
            await transaction.execute(
                "DELETE FROM rack_connection WHERE process = %s AND rack = ANY(%s)", (self.id, down)
            )
        if up:
            # A process that was taken for dead has no row until its next heartbeat, which writes all this again.
            await transaction.execute(
                """
                INSERT INTO rack_connection (process, rack, link, address, instance)
                SELECT region_process.id, rack.system_id, new.link, new.address, new.instance
                FROM unnest(%s, %s::bigint[], %s, %s) AS new (rack, link, address, instance)
                JOIN rack ON rack.system_id = new.rack
                JOIN region_process ON region_process.id = %s
                FOR KEY SHARE OF rack, region_process
                ON CONFLICT (process, rack) DO UPDATE
                SET link = EXCLUDED.link, address = EXCLUDED.address, since = EXCLUDED.since,
                    instance = EXCLUDED.instance
                WHERE rack_connection.link < EXCLUDED.link
                """,
                (
                    list(up), [each.number for each in up.values()], [each.address for each in up.values()],
                    [each.instance for each in up.values()], self.id,
                ),
            )  # fmt: skip

    # Heartbeats, and the others.

    def _beat(self) -> Deferred[None]:
        return Deferred.fromCoroutine(self._beat_once())

    async def _beat_once(self) -> None:
        try:
            alive = await self._database.execute(
                "UPDATE region_process SET heartbeat = clock_timestamp() WHERE id = %s", (self.id,)
            )
            if not alive:
                log.warn("This process was taken for dead, because it did not reach the database for long.")
                await self._database.transact(self._insert)
                self._changed.update(self._linked)
            self._write()
            await self._look_around()
        except (psycopg2.Error, DatabaseUnavailable) as error:
            log.warn("The database did not take this process's heartbeat: {error}", error=str(error).strip())
        except Exception:  # noqa: BLE001  # whatever it was: without heartbeats this process would be taken for dead
            log.failure("A heartbeat failed on an error of this process's own")

    async def _look_around(self) -> None:
        """Delete what is left of processes that died, and see which there are."""

        async def looking(transaction: Transaction) -> list[tuple[Any, ...]]:
            for name, host, pid in await _delete(transaction, f"NOT {ALIVE} AND id <> %(id)s", self._values):
                log.warn(
                    "Region process {name} (on {host}, pid {pid}) has not been heard of for {seconds:g} s; it is "
                    "struck off the list, with its links.",
                    name=name, host=host, pid=pid, seconds=STALE_SECONDS,
                )  # fmt: skip
            return await transaction.query(f"SELECT id::text, name, host, endpoint FROM region_process WHERE {ALIVE}")

        rows = await self._database.transact(looking)
        self._others = {identifier: (name, host, endpoint) for identifier, name, host, endpoint in rows}
        unreachable = frozenset(
            f"{name} on {host}" for name, host, endpoint in self._others.values() if not self._usable(host, endpoint)
        )
        for which in sorted(unreachable - self._unreachable):
            log.warn(
                "Racks cannot be told how to reach region process {which}: set rpc.advertise there, or list it in "
                "every rack's settings.",
                which=which,
            )
        self._unreachable = unreachable

    def _usable(self, host: str, endpoint: str) -> bool:
        return host == self._host or not endpoint.startswith(f"{ANY_HOST}:")

    def endpoints(self) -> dict[str, list[str]]:
        """For each region process that lives, by its id, the HOST:PORT to connect to; host ``*`` stands for the address
        that whoever asks has connected to. A process that racks cannot be told how to reach has none."""
        mine = self._values.get("endpoint")
        return {
            **{
                identifier: [endpoint] if self._usable(host, endpoint) else []
                for identifier, (_, host, endpoint) in self._others.items()
            },
            self.id: [mine] if mine else [],
        }

    async def elsewhere(self, system_id: str, instance: str) -> Connection | None:
        """A live link that another process has with another instance of the rack than ``instance``, if there is one.

        :raises DatabaseUnavailable: if the database cannot be asked.
        """
        row = await self._database.one(
            f"""
            SELECT process::text, name, host, since, address
            FROM rack_connection JOIN region_process ON region_process.id = process AND {ALIVE} AND id <> %s
            WHERE rack = %s AND instance NOT IN ('', %s) ORDER BY since LIMIT 1
            """,
            (self.id, system_id, _digest(instance)),
        )
        return None if row is None else Connection(*row)

    async def connections(self) -> dict[str, Connections]:
        """How every rack is linked with whatever process, by its system id.

        :raises DatabaseUnavailable: if the database cannot be asked.
        """
        rows = await self._database.query(
            f"""
            SELECT system_id, last_disconnected, process::text, region_process.name, host, since, address
            FROM rack
            LEFT JOIN (rack_connection JOIN region_process ON region_process.id = process AND {ALIVE} AND id <> %s)
                ON rack = system_id
            ORDER BY region_process.name, process
            """,
            (self.id,),
        )
        found: dict[str, Connections] = {}
        for rack, ended, process, name, host, since, address in rows:
            if rack not in found:
                # What this process is linked with it knows better than its rows do.
                mine = self._linked.get(rack)
                own = (Connection(self.id, self._name, self._host, mine.since, mine.address),) if mine else ()
                found[rack] = Connections(own, ended)
            if process is not None:
                other = Connection(process, name, host, since, address)
                found[rack] = Connections((*found[rack].live, other), ended)
        return found


def _digest(instance: str) -> str:
    """What stands for an instance in the table, whatever text a rack says that it is; nothing for none."""
    return hashlib.sha256(instance.encode("utf-8", "surrogatepass")).hexdigest()[:32] if instance else ""


async def _delete(transaction: Transaction, which: str, values: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Delete processes; the name, host and pid of each. A rack's link with one ended when that was last heard of."""
    # In the order of their keys, so that two processes that do this at once wait for each other instead of for ever.
    doomed = await transaction.query(
        f"SELECT id, name, host, pid FROM region_process WHERE {which} ORDER BY id FOR UPDATE", values
    )
    if not doomed:
        return []
    identifiers = [identifier for identifier, *_ in doomed]
    await transaction.execute(
        """
        WITH ended AS (
            SELECT rack, max(heartbeat) AS at FROM rack_connection JOIN region_process ON region_process.id = process
            WHERE process = ANY(%s::uuid[]) GROUP BY rack
        ), locked AS MATERIALIZED (
            SELECT system_id, at FROM rack JOIN ended ON system_id = rack ORDER BY system_id FOR NO KEY UPDATE OF rack
        )
        UPDATE rack SET last_disconnected = greatest(last_disconnected, locked.at)
        FROM locked WHERE rack.system_id = locked.system_id
        """,
        (identifiers,),
    )
    await transaction.execute("DELETE FROM region_process WHERE id = ANY(%s::uuid[])", (identifiers,))
    await transaction.execute("SELECT pg_notify(%s, '')", (CHANNEL,))
    return [(name, host, pid) for _, name, host, pid in doomed]
