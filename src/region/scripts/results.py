"""What came back from a node's runs? Read, never written, here: each run with its results, and what they put out.

A result has two outcomes, which are not mixed up: what the script itself came to (``status``, ``exit_status``), and
what the region made of its output (``post_processing``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from attrs import define, evolve, field, frozen

from region.database import Database, Transaction
from region.nodes.findings import OutputUnusable
from region.nodes.statuses import HardwareType, ResultType, ScriptStatus, status_of_run
from region.nodes.values import NodeName

OUTPUT_LIMIT: Final = 64 << 20
"""Bytes of outputs that are read at once."""

CURRENT: Final[Mapping[str, ResultType]] = {
    f"current-{kind.name.lower()}": kind for kind in (ResultType.COMMISSIONING, ResultType.TESTING)
}
"""The names of the runs that a node's status is about."""


class NoSuchNode(LookupError):
    """There is no node with that system id."""


class NoSuchRun(LookupError):
    """The node has no such run of scripts."""


class OutputsTooLarge(Exception):
    """More is asked for at once than is read at once."""


def _hidden(outputs: Mapping[str, bytes]) -> str:
    return f"<{', '.join(outputs)}>"


@frozen
class Late:
    """What came for a result that had ended already. ``runtime`` is in seconds."""

    id: int
    received: datetime
    signal_status: str
    exit_status: int | None
    runtime: float | None
    outputs: Mapping[str, bytes] = field(factory=dict, repr=_hidden)


@frozen
class Result:
    """What one script came to in one run, and what the region made of it.

    ``outputs`` are by ``output`` (both streams as they came), ``stdout``, ``stderr`` and ``result``, where they were
    asked for and there are any; ``runtime`` is in seconds.
    """

    id: int
    name: str
    status: ScriptStatus = field(converter=ScriptStatus)
    exit_status: int | None
    runtime: float | None
    started: datetime | None
    ended: datetime | None
    created: datetime
    updated: datetime
    script_id: int | None
    script_version_id: int | None
    parameters: Mapping[str, Any]
    suppressed: bool
    post_processing: str
    post_processing_error: str
    correlation: str
    hardware_type: HardwareType = field(converter=HardwareType)
    tags: tuple[str, ...] = field(converter=tuple[str, ...])
    outputs: Mapping[str, bytes] = field(factory=dict, repr=_hidden)
    late: tuple[Late, ...] = ()

    @property
    def warning(self) -> str:
        """What people must know beside the script's own outcome; empty if there is nothing."""
        said = []
        unusable = f"{OutputUnusable.__name__}: "
        if self.post_processing == "failed" and self.post_processing_error.startswith(unusable):
            said.append(
                f"What the script wrote cannot be used: {self.post_processing_error.removeprefix(unusable)}. It is "
                "kept, and the script's own outcome is not changed by that. The region's log has this under "
                f"{self.correlation or 'no id'}."
            )
        elif self.post_processing == "failed":
            said.append(
                f"The region could not process what the script put out: {self.post_processing_error or 'no reason'}. "
                f"The script's own outcome is not changed by that. The region's log has the details under "
                f"{self.correlation or 'no id'}."
            )
        if self.late:
            said.append(f"{len(self.late)} more came from the node after the result had ended; it is kept as late.")
        return " ".join(said)


@frozen
class Run:
    """One run of a node's scripts of one type. ``last_ping`` is when the node was heard of last while it went on."""

    id: int
    node: NodeName
    result_type: ResultType = field(converter=ResultType)
    created: datetime
    signalled: datetime | None
    done: datetime | None
    last_ping: datetime | None
    results: tuple[Result, ...] = ()

    @property
    def status(self) -> ScriptStatus | None:
        """What it has come to as a whole; None if it has no results."""
        return status_of_run([result.status for result in self.results])

    @property
    def started(self) -> datetime | None:
        """When its first script began."""
        return min((result.started for result in self.results if result.started is not None), default=None)

    @property
    def ended(self) -> datetime | None:
        """When its last script ended; None while there are some that have not."""
        if not all(result.status.is_finished for result in self.results):
            return None
        return max((result.ended for result in self.results if result.ended is not None), default=None)


@define
class ResultStore:
    """The runs of nodes in PostgreSQL."""

    _database: Database

    async def runs(
        self,
        system_id: str,
        *,
        run: str | None = None,
        result_type: ResultType | None = None,
        hardware_type: HardwareType | None = None,
        filters: Collection[str] = (),
        outputs: Collection[str] = (),
        with_late: bool = True,
    ) -> tuple[Run, ...]:
        """The runs of a node, newest first, each with its results by name.

        :param run: only this one: its number, or a name of :data:`CURRENT`.
        :param hardware_type: only results of scripts about this hardware.
        :param filters: only results with one of these script names, tags or numbers.
        :param outputs: which outputs to read: ``output``, ``stdout``, ``stderr``, ``result``.
        :param with_late: whether to read those of late results too.
        :raises NoSuchNode: if there is no such node.
        :raises NoSuchRun: if it has no such run.
        :raises OutputsTooLarge: if these are more than :data:`OUTPUT_LIMIT` bytes.
        """

        async def read(transaction: Transaction) -> tuple[Run, ...]:
            node, current = await _node(transaction, system_id)
            wanted = None if run is None else _number(node, current, run)
            runs = await _runs(transaction, node, wanted, result_type)
            if run is not None and not runs:
                raise NoSuchRun(f"Node {node.hostname} has no run {run!r} of scripts.")
            found = await _results(transaction, [one.id for one in runs])
            chosen = {
                number: [one for one in results if _is_wanted(one, hardware_type, filters)]
                for number, results in found.items()
            }
            everything = [result.id for results in chosen.values() for result in results]
            late = await _late(transaction, everything)
            contents = await _outputs(transaction, everything, outputs, with_late) if outputs else {}
            return tuple(
                evolve(one, results=tuple(_complete(result, late, contents) for result in chosen.get(one.id, ())))
                for one in runs
            )

        return await self._database.transact(read)


def _is_wanted(result: Result, hardware_type: HardwareType | None, filters: Collection[str]) -> bool:
    if hardware_type is not None and result.hardware_type != hardware_type:
        return False
    return not filters or not {result.name, str(result.id), *result.tags}.isdisjoint(filters)


def _number(node: NodeName, current: Mapping[ResultType, int | None], run: str) -> int:
    if run in CURRENT:
        number = current[CURRENT[run]]
        if number is None:
            raise NoSuchRun(f"Node {node.hostname} has no {run} run of scripts: it has had none yet.")
        return number
    if not (run.isascii() and run.isdigit() and len(run) < 19):
        names = ", ".join(CURRENT)
        raise NoSuchRun(f"{run[:100]!r} names no run of scripts: it must be a number, or one of {names}.")
    return int(run)


def _complete(
    result: Result, late: Mapping[int, Sequence[Late]], contents: Mapping[tuple[int, int | None], Mapping[str, bytes]]
) -> Result:
    return evolve(
        result,
        outputs=contents.get((result.id, None), {}),
        late=tuple(evolve(one, outputs=contents.get((result.id, one.id), {})) for one in late.get(result.id, ())),
    )


async def _node(transaction: Transaction, system_id: str) -> tuple[NodeName, Mapping[ResultType, int | None]]:
    row = await transaction.one(
        "SELECT id, system_id, hostname, commissioning_set_id, testing_set_id FROM node WHERE system_id = %s",
        (system_id.replace("\x00", "\ufffd"),),  # PostgreSQL has no text with NUL
    )
    if row is None:
        raise NoSuchNode(f"There is no node with the system id {system_id[:40]!r}.")
    return NodeName(*row[:3]), {ResultType.COMMISSIONING: row[3], ResultType.TESTING: row[4]}


async def _runs(
    transaction: Transaction, node: NodeName, number: int | None, result_type: ResultType | None
) -> Sequence[Run]:
    kind = None if result_type is None else result_type.value
    rows = await transaction.query(
        """SELECT t.id, t.result_type, t.created, t.signalled, t.ended,
                  CASE WHEN h.last_ping >= t.created THEN least(h.last_ping, t.ended) END
           FROM script_set t LEFT JOIN node_heartbeat h ON h.node_id = t.node_id
           WHERE t.node_id = %s AND (%s IS NULL OR t.id = %s) AND (%s IS NULL OR t.result_type = %s)
           ORDER BY t.id DESC""",
        (node.id, number, number, kind, kind),
    )
    return [Run(row[0], node, *row[1:]) for row in rows]


async def _results(transaction: Transaction, runs: Sequence[int]) -> Mapping[int, Sequence[Result]]:
    rows = await transaction.query(
        """SELECT r.script_set_id, r.id, r.script_name, r.status, r.exit_status, r.runtime, r.started, r.ended,
                  r.created, r.updated, r.script_id, r.script_version_id, r.parameters, r.suppressed,
                  r.post_processing, r.post_processing_error, r.correlation,
                  coalesce(s.hardware_type, 0), coalesce(s.tags, '{}')
           FROM script_result r LEFT JOIN script s ON s.id = r.script_id
           WHERE r.script_set_id = ANY (%s::bigint[]) ORDER BY r.script_name, r.id""",
        (list(runs),),
    )
    found: dict[int, list[Result]] = {}
    for row in rows:
        found.setdefault(row[0], []).append(Result(*row[1:]))
    return found


async def _late(transaction: Transaction, results: Sequence[int]) -> Mapping[int, Sequence[Late]]:
    found: dict[int, list[Late]] = {}
    for result, *values in await transaction.query(
        """SELECT script_result_id, id, received, signal_status, exit_status, runtime FROM late_result
           WHERE script_result_id = ANY (%s::bigint[]) ORDER BY id""",
        (list(results),),
    ):
        found.setdefault(result, []).append(Late(*values))
    return found


async def _outputs(
    transaction: Transaction, results: Sequence[int], names: Collection[str], with_late: bool
) -> Mapping[tuple[int, int | None], Mapping[str, bytes]]:
    which = """FROM script_output WHERE script_result_id = ANY (%s::bigint[]) AND name = ANY (%s::text[])
               AND (%s OR late_result_id IS NULL)"""
    parameters = (list(results), list(names), with_late)
    row = await transaction.one(f"SELECT coalesce(sum(octet_length(content)), 0)::bigint {which}", parameters)
    if row is not None and row[0] > OUTPUT_LIMIT:
        raise OutputsTooLarge(
            f"These outputs have {row[0]} bytes, and at most {OUTPUT_LIMIT} are read at once: ask for one run, or name "
            "scripts with `filters`."
        )
    found: dict[tuple[int, int | None], dict[str, bytes]] = {}
    for result, late, name, content in await transaction.query(
        f"SELECT script_result_id, late_result_id, name, content {which}", parameters
    ):
        found.setdefault((result, late), {})[name] = content
    return found
