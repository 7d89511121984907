"""Who ends the runs of nodes that did not boot, fell silent, or hang in a script?

Every node is looked at in a transaction of its own, with its row locked and all that speaks against it read again, so
whatever is wrong with one stops no other, and several region processes may do this at once. Only the clock of the
database counts; this process's own says no more than since when it has listened, for while it is away, or the database
is, nobody can be heard.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from prometheus_client import Counter
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from region.config import CommissioningConfig
from region.database import Database, DatabaseUnavailable, Transaction
from region.nodes.deadlines import RUNNING, Limits, Overdue, Running, Watched, verdict
from region.nodes.life import BUSY, Input
from region.nodes.statuses import ScriptStatus
from region.nodes.transitions import Change, change

log = Logger()

LOOK_SECONDS: Final = 30.0
"""Between two looks at all nodes, at most; where a limit is short they are more frequent."""

_LEAST_SECONDS: Final = 0.5

OVERDUE: Final = Counter("stanchion_nodes_overdue", "Nodes that were failed because they did not boot or answer.")

_BUSY: Final = [int(each) for each in BUSY]
_RUNNING: Final = [int(each) for each in RUNNING]

# Times are compared as seconds since the epoch: that never fails, whatever is stored, and does not lose days.
_CANDIDATES: Final = """
    SELECT node.id FROM node
    LEFT JOIN node_heartbeat ON node_heartbeat.node_id = node.id
    CROSS JOIN LATERAL (SELECT extract(epoch FROM clock_timestamp())::float8 AS now) AS clock
    WHERE node.status = ANY(%(busy)s) AND (
        now - extract(epoch FROM greatest(last_ping, status_changed))::float8 > %(silence)s
        OR EXISTS (SELECT FROM script_set WHERE script_set.node_id = node.id AND ended IS NULL
                   AND boot_deadline < clock_timestamp())
        OR EXISTS (SELECT FROM script_set JOIN script_result ON script_set_id = script_set.id
                   WHERE script_set.node_id = node.id AND script_set.ended IS NULL
                   AND script_result.status = ANY(%(running)s)
                   AND (timeout_seconds > 0 OR script_result.parameters <> '{}')
                   AND now - extract(epoch FROM coalesce(started, script_result.updated))::float8
                       > timeout_seconds::float8 + %(grace)s))
    ORDER BY node.id
"""

_WATCHED: Final = """
    SELECT (SELECT max(extract(epoch FROM clock_timestamp())::float8 - extract(epoch FROM boot_deadline)::float8)
            FROM script_set WHERE script_set.node_id = node.id AND ended IS NULL),
        now - extract(epoch FROM greatest(last_ping, status_changed))::float8,
        now - extract(epoch FROM last_ping)::float8,
        coalesce(heard, ''),
        to_char(last_ping AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS "UTC"'),
        EXISTS (SELECT FROM script_set WHERE script_set.node_id = node.id AND ended IS NULL
                AND signal_status IN ('OK', 'FAILED')),
        EXISTS (SELECT FROM processing WHERE processing.node_id = node.id)
    FROM node LEFT JOIN node_heartbeat ON node_heartbeat.node_id = node.id
    CROSS JOIN LATERAL (SELECT extract(epoch FROM clock_timestamp())::float8 AS now) AS clock
    WHERE node.id = %s
"""

_RESULTS: Final = """
    SELECT script_result.id, script_name, script_result.status,
        extract(epoch FROM clock_timestamp())::float8
            - extract(epoch FROM coalesce(started, script_result.updated))::float8,
        timeout_seconds, script_result.parameters
    FROM script_result JOIN script_set ON script_set.id = script_set_id
    WHERE script_set.node_id = %s AND script_set.ended IS NULL AND script_result.status = ANY(%s)
    ORDER BY script_result.id
"""


class Monitor:
    """Looks at all nodes at intervals."""

    def __init__(self, database: Database, clock: IReactorTime, settings: CommissioningConfig) -> None:
        self._database = database
        self._limits = Limits(
            settings.boot_timeout_minutes * 60, settings.heartbeat_timeout_minutes * 60,
            settings.script_grace_minutes * 60,
        )  # fmt: skip
        shortest = min(self._limits.boot, self._limits.silence, self._limits.grace)
        self._interval = min(LOOK_SECONDS, max(shortest / 4, _LEAST_SECONDS))
        self._clock = clock
        self._timer = LoopingCall(self._look)
        self._timer.clock = clock
        self._listening_since: float | None = None
        self._looked = 0.0
        self._looking: Deferred[Any] | None = None

    def start(self) -> None:
        """Begin, an interval from now."""
        self._listening_since = self._looked = self._clock.seconds()
        looking: Deferred[Any] = self._timer.start(self._interval, now=False)
        self._looking = looking.addErrback(lambda reason: log.failure("Nodes are not watched any more", reason))

    async def stop(self) -> None:
        """End; the node that is looked at is dealt with first."""
        if self._timer.running:
            self._timer.stop()
        if self._looking is not None:
            await self._looking

    async def look(self, listening: float = math.inf) -> int:
        """Look at all nodes once; how many have failed.

        :param listening: for how many seconds nodes could be heard, without a break.
        :raises DatabaseUnavailable: if the database is away; those that were not looked at are so the next time.
        """
        limits = self._limits
        rows = await self._database.query(
            _CANDIDATES, {"busy": _BUSY, "running": _RUNNING, "silence": limits.silence, "grace": limits.grace}
        )
        failed = 0
        for (node_id,) in rows:
            try:
                failed += await self._look_at(node_id, listening)
            except DatabaseUnavailable:
                raise
            except Exception:  # noqa: BLE001  # whatever is wrong with this one, the others are looked at
                log.failure("Could not look at node number {number}, which may have failed", number=node_id)
        return failed

    async def _look(self) -> None:
        now = self._clock.seconds()
        if self._listening_since is None or now - self._looked > 3 * self._interval:
            self._listening_since = now  # the database, or this process, stood still meanwhile
        try:
            await self.look(now - self._listening_since)
        except DatabaseUnavailable as error:
            self._listening_since = None
            log.warn("The nodes are looked at again later: {reason}", reason=str(error))
        except Exception:  # noqa: BLE001  # without looks, nodes that fail would never be found
            log.failure("Could not look which nodes have failed; trying again later")
        self._looked = self._clock.seconds()

    async def _look_at(self, node_id: int, listening: float) -> bool:
        correlation = uuid.uuid4().hex
        found = await self._database.transact(partial(_fail_if_overdue, node_id, listening, self._limits, correlation))
        if found is None:
            return False
        changed, overdue = found
        OVERDUE.inc()
        log.warn(
            "Node {node} ({system_id}) is {status} now: {reason} [{correlation}]",
            node=changed.node.hostname, system_id=changed.node.system_id, status=changed.after.label,
            reason=overdue.reason, correlation=correlation,
        )  # fmt: skip
        return True


async def _fail_if_overdue(
    node_id: int, listening: float, limits: Limits, correlation: str, transaction: Transaction
) -> tuple[Change, Overdue] | None:
    # One that is locked is being changed; the next look sees how.
    row = await transaction.one(
        "SELECT id FROM node WHERE id = %s AND status = ANY(%s) FOR NO KEY UPDATE SKIP LOCKED", (node_id, _BUSY)
    )
    if row is None:
        return None
    watched = await _read(transaction, node_id, listening)
    overdue = verdict(watched, limits)
    if overdue is None:
        return None
    if overdue.timed_out:
        await transaction.execute(
            """UPDATE script_result SET status = %s, ended = clock_timestamp(), updated = now()
               WHERE id = ANY(%s) AND status = ANY(%s)""",
            (ScriptStatus.TIMEDOUT, list(overdue.timed_out), _RUNNING),
        )
    changed = await change(transaction, node_id, Input.FAIL, reason=overdue.reason, correlation=correlation)
    return changed, overdue


async def _read(transaction: Transaction, node_id: int, listening: float) -> Watched:
    row = await transaction.one(_WATCHED, (node_id,))
    assert row is not None, "the node is locked"
    results: Sequence[tuple[Any, ...]] = await transaction.query(_RESULTS, (node_id, _RUNNING))
    running = [
        Running(
            number, name, ScriptStatus(status), seconds, timeout, parameters if isinstance(parameters, dict) else {}
        )
        for number, name, status, seconds, timeout, parameters in results
    ]
    boot_overdue, silent, last_heard, heard, heard_at, is_done, is_queued = row
    return Watched(boot_overdue, silent, last_heard, heard, heard_at or "", is_done, running, listening, is_queued)
