"""What happened on the racks and to the nodes, in the form that clients of MAAS read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final
from urllib.parse import urlencode

from region.answers.documents import BASE
from region.api.operations import BadRequest, Call, Invalid, Parameter, Reply, document
from region.api.parts import Parts
from region.events import StoredEvent
from rpc.events import Level, level_name

DEFAULT_LIMIT: Final = 100

PARAMETERS: Final = (
    Parameter(
        "level", "Only events of this level or a higher one: AUDIT, DEBUG, INFO, WARNING, ERROR, CRITICAL, or a number."
    ),
    Parameter("limit", f"How many at most; {DEFAULT_LIMIT} by default.", kind="integer", minimum=1, maximum=1000),
    Parameter("before", "Only events that are older than the one with this id.", kind="integer", minimum=0),
    Parameter("after", "Only events that are newer than the one with this id.", kind="integer", minimum=0),
    Parameter("id", "Only events of racks and nodes with this system id or name; may be repeated.", many=True),
    Parameter("hostname", "Only events of what had this name then; may be repeated.", many=True),
    Parameter("mac_address", "Only events of the node that has this MAC address now; may be repeated.", many=True),
)

_DAYS: Final = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


async def query_events(parts: Parts, call: Call) -> Reply:
    """Events, newest first: the newest, or those next to the one that ``before`` or ``after`` names."""
    values = call.values
    before, after = values.get("before"), values.get("after")
    if before is not None and after is not None:
        raise BadRequest("There is undetermined behaviour when both `after` and `before` are specified.")
    found = await parts.events.query(
        level=_level(values.get("level")),
        limit=values.get("limit", DEFAULT_LIMIT),
        before=before,
        after=after,
        sources=values.get("id", ()),
        hostnames=values.get("hostname", ()),
        mac_addresses=values.get("mac_address", ()),
    )
    older, newer = _neighbours(found, before, after)
    return document(
        {
            "count": len(found),
            "events": [_event(event) for event in found],
            "next_uri": _uri(values, after=newer),
            "prev_uri": _uri(values, before=older),
        }
    )


def _level(text: str | None) -> int:
    if text is None:
        return Level.INFO
    if text.upper() in Level.__members__:
        return Level[text.upper()]
    if text in (numbers := {str(int(each)): each for each in Level}):
        return numbers[text]
    listed = ", ".join(f"'{name}'" for name in sorted(Level.__members__))
    raise Invalid({"level": [f"'{text}' is not a valid level.  It should be one of: {listed}."]})


def _neighbours(found: Sequence[StoredEvent], before: int | None, after: int | None) -> tuple[int, int]:
    """The ids before which, and after which, there is what these do not show."""
    if found:
        return found[-1].id, found[0].id
    if before is not None:
        return before, max(before - 1, 0)
    if after is not None:
        return after + 1, after
    return 1, 0


def _uri(values: Mapping[str, Any], **turn: int) -> str:
    kept = [
        (name, each)
        for name, value in values.items()
        if name not in ("before", "after")
        for each in (value if isinstance(value, tuple) else (value,))
    ]
    return f"{BASE}/events/?{urlencode([('op', 'query'), *kept, *turn.items()])}"


def _event(event: StoredEvent) -> dict[str, Any]:
    return {
        "username": event.username,
        "node": event.source,
        "hostname": event.hostname,
        "id": event.id,
        "level": level_name(event.level),
        "created": created(event.occurred),
        "type": event.type,
        "description": event.description,
        "correlation": event.correlation,
    }


def created(when: datetime) -> str:
    """The one form of a time that clients of MAAS read: ``Thu, 24 Jul. 2025 08:01:49``, in UTC, in any locale."""
    return f"{_DAYS[when.weekday()]}, {when.day:02} {_MONTHS[when.month - 1]}. {when.year:04} {when:%H:%M:%S}"
