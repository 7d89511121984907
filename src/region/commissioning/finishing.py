"""What has a run come to, once the node has said that it is done and all that follows from its outputs was done?

The decision is a pure function of what the scripts came to and of what the region could not do. A script that never
said how it ended, and an output that could not be processed, are no success.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from attrs import frozen

from region.commissioning.queue import Work
from region.database import Transaction
from region.nodes.findings import OutputUnusable
from region.nodes.life import Input
from region.nodes.statuses import NodeStatus, ResultType, ScriptStatus
from region.nodes.transitions import change, lock

COUNTS: Final = frozenset({"hook", "storage", "networking"})
"""Steps whose failure fails a commissioning."""

NAMED: Final = 8
"""Scripts, or failures, that a reason names."""


@frozen
class Ended:
    """What a script came to. ``exit_status`` is None if it gave none; ``suppressed``: its failure does not count."""

    name: str
    status: ScriptStatus
    exit_status: int | None = None
    suppressed: bool = False

    @property
    def counts_against(self) -> bool:
        """Whether a run with it has failed."""
        return not self.suppressed and (self.status.is_failure or not self.status.is_finished)

    @property
    def how(self) -> str:
        """Its name and how it ended, for people."""
        if not self.status.is_finished:
            return f"{self.name} (the node never said how it ended)"
        if self.exit_status:
            return f"{self.name} ({self.status.label.lower()}, exit status {self.exit_status})"
        return f"{self.name} ({self.status.label.lower()})"


@frozen
class NotDone:
    """A step that failed."""

    step: str
    script_name: str
    error_type: str
    error: str
    correlation: str

    @property
    def is_of_output(self) -> bool:
        """Whether it is what a script wrote that is wrong, and not the region."""
        return self.error_type == OutputUnusable.__name__

    @property
    def how(self) -> str:
        """Which it was and why, for people."""
        if self.is_of_output:
            return f"{self.script_name} ({self.error[:200].rstrip('.')}; in the log under {self.correlation})"
        what = f"the output of {self.script_name}" if self.step == "hook" else f"the default {self.step}"
        why = f"{self.error_type}: {self.error}" if self.error else self.error_type
        return f"{what} ({why[:200].rstrip('.')}; in the log under {self.correlation})"


def reasons(said: str, message: str, scripts: Sequence[Ended], failures: Sequence[NotDone]) -> Sequence[str]:
    """Why a run has failed, in sentences; none if it went well.

    :param said: the status of the node's last signal.
    """
    found = []
    if failed := [script.how for script in scripts if script.counts_against]:
        found.append(f"Scripts failed: {_listed(failed)}.")
    counted = [failure for failure in failures if failure.step in COUNTS]
    if unusable := [failure.how for failure in counted if failure.is_of_output]:
        found.append(f"What scripts wrote cannot be used: {_listed(unusable)}.")
    if own := [failure.how for failure in counted if not failure.is_of_output]:
        found.append(f"The region could not process {_listed(own)}.")
    if said == "FAILED" and (message or not found):
        found.append(f"The node said that it failed: {message.rstrip('.') or 'it did not say why'}.")
    return found


def _listed(names: Sequence[str]) -> str:
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


async def finish(transaction: Transaction, work: Work) -> None:
    """End a run: the node is Ready, or goes on to be tested, or has failed, with the reason."""
    node, status, _ = await lock(transaction, work.node.id)
    row = await transaction.one(
        """SELECT result_type, coalesce(signal_status, ''),
                  id IN (coalesce(commissioning_set_id, 0), coalesce(testing_set_id, 0)),
                  EXISTS (SELECT FROM script_set AS tests WHERE tests.id = testing_set_id AND tests.ended IS NULL)
           FROM script_set, (SELECT commissioning_set_id, testing_set_id FROM node WHERE id = %s) AS node
           WHERE id = %s AND ended IS NULL""",
        (node.id, work.set_id),
    )
    if row is None:
        return  # somebody, or the monitor, has ended the run meanwhile, and has said so
    result_type, said, is_current, tests_follow = row
    expected = NodeStatus.COMMISSIONING if result_type == ResultType.COMMISSIONING else NodeStatus.TESTING
    why = await _reasons(transaction, work, said)
    if status is not expected or not is_current:
        # The run is of no consequence for what the node is now; it is ended all the same.
        await _end(transaction, work)
        return
    if why:
        await change(transaction, node.id, Input.FAIL, reason=" ".join(why))
    elif expected is NodeStatus.TESTING:
        await change(transaction, node.id, Input.TESTED)
    elif tests_follow:
        await change(transaction, node.id, Input.BEGIN_TESTING)
    else:
        await change(transaction, node.id, Input.COMMISSIONED)


async def _reasons(transaction: Transaction, work: Work, said: str) -> Sequence[str]:
    results = await transaction.query(
        "SELECT script_name, status, exit_status, suppressed FROM script_result WHERE script_set_id = %s ORDER BY id",
        (work.set_id,),
    )
    failures = await transaction.query(
        """SELECT step, coalesce(script_name, ''), error_type, error, step_failure.correlation
           FROM step_failure LEFT JOIN script_result ON script_result.id = script_result_id
           WHERE step_failure.script_set_id = %s ORDER BY step_failure.id""",
        (work.set_id,),
    )
    return reasons(
        said,
        str(work.payload.get("message", "")),
        [Ended(name, ScriptStatus(status), exit_status, quiet) for name, status, exit_status, quiet in results],
        [NotDone(*failure) for failure in failures],
    )


async def _end(transaction: Transaction, work: Work) -> None:
    await transaction.execute(
        """UPDATE script_result SET status = %s, ended = clock_timestamp(), updated = now()
           WHERE script_set_id = %s AND status IN (0, 1, 7, 10)""",
        (ScriptStatus.ABORTED, work.set_id),
    )
    await transaction.execute("UPDATE script_set SET ended = clock_timestamp() WHERE id = %s", (work.set_id,))
