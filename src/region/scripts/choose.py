"""Which scripts does a run of a node have? Those that are named, by name, number or tag; else those that are meant to
run without being named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from attrs import field, frozen

from region.database import Transaction
from region.nodes.statuses import ResultType
from region.scripts.parameters import ParameterInvalid, fill

NONE: Final = "none"
"""The name that means: none but what is always run."""

NOT_BY_DEFAULT: Final = "noauto"
"""The tag of a commissioning script that is run only when it is named."""

AT_COMMISSIONING: Final = "commissioning"
"""The tag of the tests that a commissioning has if nobody names any."""

DESTRUCTIVE: Final = "destructive"
"""Tests that overwrite disks are chosen by their names, or by this tag, never by another."""


class ScriptsUnknown(ValueError):
    """Scripts were named that cannot be run: there are none of that name, or not with such parameters."""


@frozen
class Choice:
    """One script to run, as a result of it is made: the values are those of ``script_result``'s columns.

    ``parameters`` may still have ``"all"`` or names for disks and interfaces; they are looked for when the script is
    about to be run (:func:`region.scripts.archive.pending`).
    """

    script_id: int
    script_version_id: int
    script_name: str
    timeout_seconds: int = 0
    parameters: Mapping[str, Mapping[str, Any]] = field(factory=dict)


async def choose(
    transaction: Transaction,
    result_type: ResultType,
    names_or_tags: Sequence[str] | None = None,
    parameters: Mapping[str, Mapping[str, object]] | None = None,
) -> tuple[Choice, ...]:
    """The scripts of a run, in the order of their names. They are not deleted before the transaction ends.

    Commissioning always has the built-in scripts; if nothing is named, also every other that has not the tag
    ``noauto``. Testing has what is named; if nothing is, what has the tag ``commissioning``. ``none`` names nothing.

    :param names_or_tags: names, numbers or tags; None or none of them for what is run by default.
    :param parameters: values by script's name and parameter's name; a script without has its defaults.
    :raises ScriptsUnknown: if something names no script of this type, or a parameter cannot be as given.
    """
    rows = await transaction.query(
        """SELECT s.id, v.id, s.name, s.timeout_seconds, s.parameters, s.tags, s.builtin, s.destructive
           FROM script s CROSS JOIN LATERAL
                (SELECT id FROM script_version WHERE script_id = s.id ORDER BY number DESC LIMIT 1) v
           WHERE s.script_type = %s ORDER BY s.name FOR KEY SHARE OF s""",
        (result_type.value,),
    )
    wanted = [name.strip() for name in names_or_tags or () if name.strip()]
    named = set(wanted) - {NONE}
    unknown = named - {word for row in rows for word in (row[2], str(row[0]), *row[5], *_destructive(row))}
    if unknown:
        raise ScriptsUnknown(_unknown(result_type, sorted(unknown), rows))
    given = parameters or {}
    chosen = [row for row in rows if _is_chosen(row, result_type, named, by_default=not wanted)]
    strangers = given.keys() - {row[2] for row in chosen}
    if strangers:
        raise ScriptsUnknown(f"there are parameters for {', '.join(sorted(strangers))}, which is not to be run")
    return tuple(_choice(row, given.get(row[2])) for row in chosen)


def _is_chosen(row: tuple[Any, ...], result_type: ResultType, named: set[str], *, by_default: bool) -> bool:
    number, _, name, _, _, tags, builtin, destructive = row
    if result_type is ResultType.COMMISSIONING and (builtin or (by_default and NOT_BY_DEFAULT not in tags)):
        return True
    if by_default:
        return result_type is ResultType.TESTING and AT_COMMISSIONING in tags and not destructive
    if named & {name, str(number)}:
        return True
    return DESTRUCTIVE in named if destructive else bool(named & set(tags))


def _destructive(row: tuple[Any, ...]) -> tuple[str, ...]:
    return (DESTRUCTIVE,) if row[7] else ()


def _choice(row: tuple[Any, ...], given: Mapping[str, object] | None) -> Choice:
    number, version, name, timeout_seconds, definitions, *_ = row
    try:
        values = fill(definitions, given)
    except ParameterInvalid as error:
        raise ScriptsUnknown(f"the script {name}: {error}") from error
    return Choice(number, version, name, timeout_seconds, values)


def _unknown(result_type: ResultType, unknown: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> str:
    kind = result_type.name.lower()
    listed = ", ".join(row[2] for row in rows) or "none"
    return f"no {kind} script has the name, number or tag {', '.join(map(repr, unknown))}; there are: {listed}"
