"""What is left of a step that failed: how it is told, and where it is kept, so that nobody has to guess.

The failure is recorded in a transaction of its own, for the step's was rolled back: with the run, whose end depends on
it; with the result, beside what the script itself came to; and as one event, under the id that the log has the
traceback under.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import psycopg2
from attrs import frozen
from psycopg2.extras import Json

from region import events
from region.commissioning.queue import Queue, Work
from region.database import Transaction
from region.nodes import kinds
from region.nodes.findings import OutputUnusable
from rpc.events import plain

MAX_ERROR: Final = 1000
"""Characters of an exception's text that are kept."""

WHAT: Final[Mapping[str, str]] = {
    "hook": "The output of script {script} could not be processed",
    "message": "What the node reported could not be processed",
    "power": "What the node said of its power control could not be stored",
    "storage": "The default storage layout could not be set",
    "networking": "The default network configuration could not be set",
    "tags": "The tags could not be updated",
    "finish": "The end of the run could not be processed",
}
"""What failed, by the step."""

KEPT: Final[Mapping[str, str]] = {
    "hook": "The output is kept, and the script's own result stands.",
    "message": "The message is kept.",
    "power": "What it said is kept.",
}
"""What is not lost by that."""


_PLAIN: Final = frozenset({"builtins", __name__, OutputUnusable.__module__})
"""Modules whose exceptions are told by their names alone."""


@frozen
class StepFailure:
    """That a step failed: the exception's ``type``, its ``text`` in one line, and the id that the log has it under."""

    type: str
    text: str
    correlation: str

    @property
    def error(self) -> str:
        """Type and text in one."""
        return f"{self.type}: {self.text}" if self.text else self.type

    @property
    def is_of_output(self) -> bool:
        """Whether it is what a script wrote that is wrong, and not the region."""
        return self.type == OutputUnusable.__name__


class Abandoned(Exception):
    """A step was begun as often as it may be, and each time the process that did it ended, or did not come back."""


def failure_of(error: BaseException, correlation: str) -> StepFailure:
    """What to keep of an exception."""
    kind = OutputUnusable if isinstance(error, OutputUnusable) else type(error)
    name = kind.__qualname__ if kind.__module__ in _PLAIN else f"{kind.__module__}.{kind.__qualname__}"
    return StepFailure(name, plain(" ".join(_text(error).split()), MAX_ERROR), correlation)


def _text(error: BaseException) -> str:
    """An exception in words. PostgreSQL's own without its details: they may have a whole row in them, with secrets."""
    primary = error.diag.message_primary if isinstance(error, psycopg2.Error) else None
    return primary or str(error)


def sentence(work: Work, failure: StepFailure) -> str:
    """What people are told: what failed, why, what is not lost, whose fault it is, and what to do."""
    script = work.script_name or "(gone)"
    if failure.is_of_output:
        return (
            f"The output of script {script} cannot be used: {failure.text.rstrip('.')}. {KEPT['hook']} Read it with "
            f"`stanchion node output {work.node.hostname}`, and see whether the script fits the machine. The region's "
            f"log has this under {failure.correlation}."
        )
    what = WHAT.get(work.step, f"The step {work.step} failed").format(script=script)
    parts = (
        f"{what}: {failure.error.rstrip('.')}.",
        KEPT.get(work.step, ""),
        f"That is a fault of the region, not of the machine: report it with the traceback, which the region's log has "
        f"under {failure.correlation}.",
    )
    return " ".join(part for part in parts if part)


async def record(transaction: Transaction, queue: Queue, work: Work, failure: StepFailure) -> bool:
    """Take a row off the queue as failed, and keep that with the run and the result; False if it was not there.

    The event is for the caller to write with :func:`tell`, as the last thing that its transaction does.
    """
    if not await queue.take(transaction, work):
        return False
    await transaction.execute(
        """INSERT INTO step_failure
               (node_id, script_set_id, script_result_id, step, payload, error_type, error, correlation)
           VALUES (%s, %s, %s, %s, %s, %s, %s, %s)""",
        (
            work.node.id, work.set_id, work.result_id, work.step, Json(dict(work.payload)), failure.type, failure.text,
            failure.correlation,
        ),
    )  # fmt: skip
    if work.step == "hook":
        await transaction.execute(
            """UPDATE script_result
               SET post_processing = 'failed', post_processing_error = %s, correlation = %s, updated = now()
               WHERE id = %s""",
            (failure.error, failure.correlation, work.result_id),
        )
    return True


async def tell(transaction: Transaction, work: Work, failure: StepFailure) -> None:
    """Write the event."""
    await events.record(
        transaction, work.node, kinds.SCRIPT_RESULT_ERROR, sentence(work, failure), correlation=failure.correlation
    )
