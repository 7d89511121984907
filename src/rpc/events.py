"""What is an event: something that happened on a rack and that people should find later, at the region.

An event has an id that is unique for ever (the buffer's epoch and a number that only grows), so that the region can
store it exactly once however often it is sent. Both sides share these values; text is made fit for a database here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Final

from attrs import frozen

MAX_TYPE: Final = 64
"""Characters of a type."""

MAX_DESCRIPTION: Final = 2048
"""Characters of a description; a longer one is cut."""

MAX_BATCH: Final = 100
"""Events in one call of ``SendEvents``."""

_ID: Final = re.compile(r"([0-9a-f]{32})-([1-9][0-9]{0,18})\Z")
_LARGEST: Final = (1 << 63) - 1
_LATEST: Final = 253402300799.0
"""The last second of the year 9999, since the epoch."""


class Level(IntEnum):
    """How much an event matters, in MAAS's numbers."""

    AUDIT = 0
    DEBUG = 10
    INFO = 20
    WARNING = 30
    ERROR = 40
    CRITICAL = 50


@frozen
class Kind:
    """A sort of event: ``type`` is its name for people, ``level`` one of :class:`Level`."""

    type: str
    level: Level


RACK_STARTED: Final = Kind("Rack started", Level.INFO)
RACK_STOPPED: Final = Kind("Rack stopped", Level.INFO)
REGISTERED: Final = Kind("Registered with a region", Level.INFO)
LINK_LOST: Final = Kind("Link with a region lost", Level.WARNING)
SYNC_STARTED: Final = Kind("Sync started", Level.INFO)
SYNC_ENDED: Final = Kind("Sync ended", Level.INFO)
SYNC_INCOMPLETE: Final = Kind("Sync incomplete", Level.WARNING)
SYNC_STOPPED: Final = Kind("Sync stopped", Level.WARNING)
SYNC_FAILED: Final = Kind("Sync failed", Level.ERROR)
DISK_FULL: Final = Kind("Disk full", Level.ERROR)
DAMAGE_FOUND: Final = Kind("Damage found", Level.ERROR)
DAMAGE_REPAIRED: Final = Kind("Damage repaired", Level.INFO)
CERTIFICATE_ENDING: Final = Kind("Certificate ends soon", Level.WARNING)
EVENTS_LOST: Final = Kind("Events lost", Level.ERROR)

KINDS: Final = (
    RACK_STARTED, RACK_STOPPED, REGISTERED, LINK_LOST, SYNC_STARTED, SYNC_ENDED, SYNC_INCOMPLETE, SYNC_STOPPED,
    SYNC_FAILED, DISK_FULL, DAMAGE_FOUND, DAMAGE_REPAIRED, CERTIFICATE_ENDING, EVENTS_LOST,
)  # fmt: skip


class InvalidEvent(ValueError):
    """What was sent is no event; the text says what is wrong with which value."""


@frozen
class Event:
    """One event. ``occurred`` is when, in seconds since the epoch by the rack's clock.

    ``epoch`` (32 hexadecimal digits) names the rack's buffer, ``sequence`` counts up in it. ``lost`` is of use to the
    buffer alone: how many events that are gone this one stands for.
    """

    epoch: str
    sequence: int
    type: str
    level: int
    description: str
    occurred: float
    lost: int = 0

    @property
    def id(self) -> str:
        """Unique among all events of its rack, for ever."""
        return f"{self.epoch}-{self.sequence}"

    @property
    def document(self) -> dict[str, Any]:
        """As it travels, in JSON."""
        return {
            "id": self.id, "type": self.type, "level": self.level, "description": self.description,
            "occurred": self.occurred,
        }  # fmt: skip


def read_event(document: object) -> Event:
    """The event that ``document`` (as :attr:`Event.document`) describes; text in it is made plain and cut.

    :raises InvalidEvent: if it is none.
    """
    if not isinstance(document, Mapping):
        raise InvalidEvent(f"an event is an object, not {_shown(document)}")
    found = _ID.match(document["id"]) if isinstance(document.get("id"), str) else None
    if found is None or int(found[2]) > _LARGEST:
        raise InvalidEvent(
            f"an event's id is 32 hexadecimal digits, '-' and a number, not {_shown(document.get('id'))}"
        )
    kind, description = document.get("type"), document.get("description")
    if not isinstance(kind, str) or not kind or len(kind) > MAX_TYPE:
        raise InvalidEvent(f"event {found[0]}: its type is {_shown(kind)}, not a text of 1 to {MAX_TYPE} characters")
    if not isinstance(description, str):
        raise InvalidEvent(f"event {found[0]}: its description is {_shown(description)}, not a text")
    level, occurred = document.get("level"), document.get("occurred")
    if type(level) is not int or not 0 <= level <= 100:
        raise InvalidEvent(f"event {found[0]}: its level is {_shown(level)}, not a whole number from 0 to 100")
    if not isinstance(occurred, int | float) or not math.isfinite(occurred) or not 0 <= occurred <= _LATEST:
        raise InvalidEvent(f"event {found[0]}: it occurred at {_shown(occurred)}, not at seconds since 1970")
    return Event(
        found[1], int(found[2]), plain(kind, MAX_TYPE), level, plain(description, MAX_DESCRIPTION), float(occurred)
    )


def plain(text: str, limit: int) -> str:
    """``text`` in at most ``limit`` characters, with what no database takes (NUL, half a character) as escapes."""
    if "\x00" in text:
        text = text.replace("\x00", "\\x00")
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= limit else text[: limit - 1] + "…"


def level_name(level: int) -> str:
    """The name of the highest level that is not over ``level``."""
    return max(known for known in Level if known <= level).name


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"
