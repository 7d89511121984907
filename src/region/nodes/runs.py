"""How does a run of scripts on a node begin? With its results pending, a deadline for booting, and a fresh token.

A run is a script set for each type of scripts. Its options are its own and are gone with it; older runs, over the
number that is kept of each type, are deleted when a new one begins.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from attrs import asdict, frozen

from region.config import CommissioningConfig
from region.database import Transaction
from region.nodes import tokens
from region.nodes.life import Input
from region.nodes.statuses import ResultType, ScriptStatus
from region.nodes.transitions import Change, Told, perform, tell

DEFAULTS: Final = CommissioningConfig()


class IChoice(Protocol):
    """A script that is to run, in one of its versions; :class:`region.scripts.choose.Choice` is one."""

    @property
    def script_id(self) -> int: ...
    @property
    def script_version_id(self) -> int: ...
    @property
    def script_name(self) -> str: ...
    @property
    def timeout_seconds(self) -> int: ...
    @property
    def parameters(self) -> Mapping[str, Any]: ...


@frozen
class RunOptions:
    """What somebody wants of one run, by MAAS's names. Stored with the run, as the JSON object of these names."""

    enable_ssh: bool = False
    skip_bmc_config: bool = False
    skip_networking: bool = False
    skip_storage: bool = False


@frozen
class Run:
    """A run that has begun: what became of the node, its script sets by type, and the token that it got."""

    change: Change
    sets: Mapping[ResultType, int]
    token: tokens.NodeToken


async def begin(
    transaction: Transaction,
    node_id: int,
    options: RunOptions,
    choices: Mapping[ResultType, Sequence[IChoice]],
    *,
    settings: CommissioningConfig = DEFAULTS,
    first: Sequence[Told] = (),
    username: str = "",
    correlation: str = "",
) -> Run:
    """Begin a commissioning, or tests alone if ``choices`` has nothing to commission with. It comes last in its
    transaction, as :func:`region.nodes.transitions.change` does.

    :param choices: the scripts to run, by type: :attr:`ResultType.COMMISSIONING` is there, maybe with none, if the
        node is to be commissioned. A type without scripts has no run, except that one.
    :param first: events of what came before, to be written before its own.
    :raises NotAllowed: if the status of the node does not allow it.
    :raises NoSuchNode: if there is none with this number.
    """
    given = Input.COMMISSION if ResultType.COMMISSIONING in choices else Input.TEST
    changed, told = await perform(transaction, node_id, given, username=username)
    sets: dict[ResultType, int] = {}
    for result_type in (ResultType.COMMISSIONING, ResultType.TESTING):
        chosen = choices.get(result_type, ())
        if chosen or (result_type is ResultType.COMMISSIONING and given is Input.COMMISSION):
            sets[result_type] = await _create(transaction, node_id, result_type, options, chosen, settings)
    await transaction.execute(
        """UPDATE node SET commissioning_set_id = coalesce(%s, commissioning_set_id),
               testing_set_id = coalesce(%s, testing_set_id) WHERE id = %s""",
        (sets.get(ResultType.COMMISSIONING), sets.get(ResultType.TESTING), node_id),
    )
    for result_type in sets:
        await _prune(transaction, node_id, result_type, settings.keep_runs)
    token = await tokens.issue(transaction, node_id, grace_seconds=settings.token_grace_minutes * 60)
    await tell(transaction, changed.node, (*first, *told), username=username, correlation=correlation)
    return Run(changed, sets, token)


async def _create(
    transaction: Transaction,
    node_id: int,
    result_type: ResultType,
    options: RunOptions,
    chosen: Sequence[IChoice],
    settings: CommissioningConfig,
) -> int:
    row = await transaction.one(
        """INSERT INTO script_set (node_id, result_type, options, boot_deadline)
           VALUES (%s, %s, %s, clock_timestamp() + make_interval(secs => %s)) RETURNING id""",
        (node_id, result_type, json.dumps(asdict(options)), settings.boot_timeout_minutes * 60),
    )
    assert row is not None, "INSERT … RETURNING gives one row"
    identifier: int = row[0]
    await transaction.execute(
        """INSERT INTO script_result (script_set_id, script_id, script_version_id, script_name, parameters,
               timeout_seconds, status)
           SELECT %s, script_id, script_version_id, name, parameters::jsonb, timeout_seconds, %s
           FROM unnest(%s::bigint[], %s::bigint[], %s::text[], %s::text[], %s::bigint[]) WITH ORDINALITY
                AS chosen (script_id, script_version_id, name, parameters, timeout_seconds, place)
           ORDER BY place""",
        (
            identifier, ScriptStatus.PENDING, [each.script_id for each in chosen],
            [each.script_version_id for each in chosen], [each.script_name for each in chosen],
            [json.dumps(dict(each.parameters)) for each in chosen], [each.timeout_seconds for each in chosen],
        ),
    )  # fmt: skip
    return identifier


async def _prune(transaction: Transaction, node_id: int, result_type: ResultType, keep: int) -> None:
    """Delete the oldest runs over ``keep``, with all that came of them; not one that there is still work to do for."""
    await transaction.execute(
        """DELETE FROM script_set WHERE id IN (
               SELECT id FROM script_set WHERE node_id = %s AND result_type = %s AND ended IS NOT NULL
               ORDER BY id DESC OFFSET %s)
           AND NOT EXISTS (SELECT FROM processing WHERE script_set_id = script_set.id)""",
        (node_id, result_type, keep - 1),
    )
