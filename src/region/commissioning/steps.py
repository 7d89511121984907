"""What follows from what a node said, step by step: one table, from the name of a step to what is done.

A step has two parts. ``prepare`` may take long (reading an output in a thread, evaluating tags in a process) and holds
no transaction open; ``apply`` writes what came of it, in the transaction that also takes the step off the queue.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from attrs import frozen
from psycopg2.extras import Json

from region.commissioning.finishing import finish
from region.commissioning.messages import message
from region.commissioning.outcomes import read_outcome
from region.commissioning.queue import Work
from region.database import Database, Transaction
from region.nodes.findings import Finding
from region.nodes.statuses import ScriptStatus
from region.nodes.values import NodeName
from rpc.fetch import RunInThread

NOTHING: Final[Sequence[Finding]] = ()

NO_EXIT_STATUS: Final = 1
"""What a hook is told of a script that gave no exit status: that it failed."""


class Hook(Protocol):
    """What is made of a script's output; see :class:`region.hardware.hooks.Hook`."""

    def parse(self, outputs: Mapping[str, bytes], exit_status: int) -> Any: ...
    async def apply(self, transaction: Transaction, node: NodeName, parsed: Any) -> Sequence[Finding]: ...


@frozen
class Following:
    """What the steps use: the hooks by script, the defaults for storage (with the name of a layout) and networking,
    and the evaluation of tags, which has transactions of its own."""

    database: Database
    run_in_thread: RunInThread
    hooks: Mapping[str, Hook]
    storage: Callable[[Transaction, NodeName, str], Awaitable[Sequence[Finding]]]
    networking: Callable[[Transaction, NodeName], Awaitable[Sequence[Finding]]]
    tags: Callable[[NodeName], Awaitable[Sequence[Finding]]]
    layout: str = "flat"


async def _prepare_nothing(work: Work) -> None:
    return None


@frozen
class Step:
    """One step. ``apply`` gets what ``prepare`` gave, and gives what people should know although it succeeded."""

    apply: Callable[[Transaction, Work, Any], Awaitable[Sequence[Finding]]]
    prepare: Callable[[Work], Awaitable[Any]] = _prepare_nothing


Steps = Mapping[str, Step]


def steps(following: Following) -> Steps:
    """The table."""
    hooks = _Hooks(following)

    async def power(transaction: Transaction, work: Work, _: None) -> Sequence[Finding]:
        if work.options.get("skip_bmc_config"):
            return NOTHING
        await transaction.execute(
            "UPDATE node SET power_type = %s, power_parameters = %s, updated = now() WHERE id = %s",
            (work.payload["power_type"], Json(work.payload["power_parameters"]), work.node.id),
        )
        return NOTHING

    async def storage(transaction: Transaction, work: Work, _: None) -> Sequence[Finding]:
        if work.options.get("skip_storage") or not await _goes_on(transaction, work):
            return NOTHING
        return await following.storage(transaction, work.node, following.layout)

    async def networking(transaction: Transaction, work: Work, _: None) -> Sequence[Finding]:
        if work.options.get("skip_networking") or not await _goes_on(transaction, work):
            return NOTHING
        return await following.networking(transaction, work.node)

    async def evaluate(work: Work) -> Sequence[Finding]:
        return await following.tags(work.node)

    async def tags(transaction: Transaction, work: Work, findings: Sequence[Finding]) -> Sequence[Finding]:
        return findings

    async def tell(transaction: Transaction, work: Work, _: None) -> Sequence[Finding]:
        await message(transaction, work)
        return NOTHING

    async def end(transaction: Transaction, work: Work, _: None) -> Sequence[Finding]:
        await finish(transaction, work)
        return NOTHING

    return {
        "hook": Step(hooks.apply, hooks.prepare),
        "message": Step(tell),
        "power": Step(power),
        "storage": Step(storage),
        "networking": Step(networking),
        "tags": Step(tags, evaluate),
        "finish": Step(end),
    }


async def _goes_on(transaction: Transaction, work: Work) -> bool:
    """Whether the run has not been ended meanwhile: what it found is not for what the node is then."""
    row = await transaction.one("SELECT FROM script_set WHERE id = %s AND ended IS NULL", (work.set_id,))
    return row is not None


class _Hooks:
    """The step that looks into the output of a script."""

    def __init__(self, following: Following) -> None:
        self._following = following

    async def prepare(self, work: Work) -> tuple[ScriptStatus | None, Any]:
        """The status that the script gives itself in its result, and what its hook reads in its output."""
        database = self._following.database
        rows = await database.query(
            "SELECT name, content FROM script_output WHERE script_result_id = %s AND late_result_id IS NULL",
            (work.result_id,),
        )
        outputs = dict(rows)
        row = await database.one("SELECT exit_status FROM script_result WHERE id = %s", (work.result_id,))
        if row is None:
            return None, None  # deleted meanwhile with its outputs, and the step with it: nothing will be applied
        exit_status = NO_EXIT_STATUS if row[0] is None else row[0]
        hook = self._following.hooks.get(work.script_name)

        def parse() -> tuple[ScriptStatus | None, Any]:
            outcome = read_outcome(outputs["result"]) if "result" in outputs else None
            return outcome, None if hook is None else hook.parse(outputs, exit_status)

        return await self._following.run_in_thread(parse)

    async def apply(
        self, transaction: Transaction, work: Work, prepared: tuple[ScriptStatus | None, Any]
    ) -> Sequence[Finding]:
        """Write it."""
        outcome, parsed = prepared
        hook = self._following.hooks.get(work.script_name)
        findings = NOTHING if hook is None else await hook.apply(transaction, work.node, parsed)
        # What a script says of itself decides where its exit status said that it passed; the other way round it lies.
        await transaction.execute(
            """UPDATE script_result
               SET post_processing = 'done', post_processing_error = '', updated = now(),
                   status = CASE WHEN status = %(passed)s THEN coalesce(%(outcome)s::smallint, status) ELSE status END
               WHERE id = %(result)s""",
            {"passed": ScriptStatus.PASSED, "outcome": outcome, "result": work.result_id},
        )
        return findings
