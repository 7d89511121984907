"""How are events kept on the rack's disk until the region has them, so that no crash loses or repeats one unseen?

Events are lines, each with its CRC-32, appended to segment files that are named by their first event's number; a file
``state`` says how far the region has confirmed them. Every append is synced before it counts (several events that come
together share one sync). A line that was torn by a crash was never promised, and is cut off; any other line that cannot
be read is counted, so that the loss can be told.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from attrs import define, frozen
from twisted.logger import Logger

from rack.files import Files
from rpc.events import Event

log = Logger()

SEGMENT_BYTES: Final = 256 << 10
"""A segment that is larger gets no more events."""


@frozen
class Hole:
    """What is not needed any more, because the buffer was full: the events before number ``before``, and those after
    ``after`` up to ``through``. What is between was sent, and had not been confirmed."""

    before: int = 0
    after: int = 0
    through: int = 0

    def __contains__(self, sequence: int) -> bool:
        return sequence < self.before or self.after < sequence <= self.through


@frozen
class Record:
    """An event as it is kept; ``hole`` is what it says was dropped."""

    event: Event
    hole: Hole = Hole()


@frozen
class Recovered:
    """What is on the disk. ``events`` are those that the region has not confirmed, in order.

    ``acknowledged`` is the last number that it has confirmed, ``attempted`` the last that was ever sent to it, ``hole``
    what was dropped last. The next event gets the number ``sequence`` or a later one. ``damaged`` lines could not be
    read.
    """

    epoch: str
    sequence: int
    acknowledged: int
    attempted: int
    hole: Hole
    events: tuple[Event, ...]
    damaged: int


@define
class _Segment:
    path: Path
    size: int = 0
    first: int = 0
    last: int = 0
    damaged: int = 0


class EventFile:
    """The files in ``directory``. Every method blocks, and only one may run at a time; call them in threads.

    :param now: gives seconds since the epoch.
    """

    def __init__(
        self,
        directory: Path,
        files: Files | None = None,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._directory = directory
        self._files = files or Files()
        self._segment_bytes = segment_bytes
        self._now = now
        self._segments: list[_Segment] = []
        self._is_torn = False
        self._epoch = ""

    def open(self) -> Recovered:
        """Find out what is there, after a start; to be called once, before anything else.

        :raises OSError: if the disk fails.
        """
        if not self._directory.is_dir():
            self._files.make_directory(self._directory)
            self._files.sync(self._directory.parent)
        state = self._read_state()
        records: list[Record] = []
        for name in self._files.names(self._directory):
            if name.endswith(".events"):
                records += self._read_segment(self._directory / name)
            elif name.endswith(".new"):
                self._files.unlink(self._directory / name)
        self._segments = [segment for segment in self._segments if segment.first or segment.damaged]
        last = max((record.event.sequence for record in records), default=0)
        self._epoch = state.get("epoch") or (records[-1].event.epoch if records else uuid4().hex)
        acknowledged, attempted = state.get("acknowledged", 0), state.get("attempted", 0)
        holes = [record.hole for record in records if record.hole.through]
        # Should the disk be put back to an older state, the numbers that were used since must not be used again: the
        # region would take what comes under them for what it has.
        sequence = max(last + 1, acknowledged + 1, attempted + 1, int(self._now() * 1e6))
        events = {
            record.event.sequence: record.event
            for record in records
            if record.event.sequence > acknowledged and not any(record.event.sequence in hole for hole in holes)
        }
        return Recovered(
            self._epoch, sequence, acknowledged, attempted, holes[-1] if holes else Hole(),
            tuple(event for _, event in sorted(events.items())), sum(segment.damaged for segment in self._segments),
        )  # fmt: skip

    def append(self, records: Sequence[Record]) -> None:
        """Add events; they are durable when this returns.

        :raises OSError: if the disk fails or is full. Then none of them counts as added: add them again.
        """
        if self._is_torn:
            self._mend()
        segment = self._segments[-1] if self._segments else None
        if segment is None or segment.size > self._segment_bytes or segment.damaged:
            first = records[0].event.sequence
            segment = _Segment(self._directory / f"{first:020d}.events", first=first)
            self._segments.append(segment)
        data = b"".join(map(_line, records))
        self._is_torn = True
        self._files.append(segment.path, data)
        self._files.sync(segment.path)
        if segment.size == 0:
            self._files.sync(self._directory)
        self._is_torn = False
        segment.size += len(data)
        segment.last = records[-1].event.sequence

    def _mend(self) -> None:
        """Take back what an append that failed has written."""
        segment = self._segments[-1]
        try:
            self._files.truncate(segment.path, segment.size)
        except FileNotFoundError:
            log.debug("{path} was not even made", path=str(segment.path))
        self._is_torn = False

    def mark(self, acknowledged: int, attempted: int) -> None:
        """Remember how far the region has confirmed, and how far it was ever sent events.

        :raises OSError: if the disk fails or is full.
        """
        document = {"epoch": self._epoch, "acknowledged": acknowledged, "attempted": attempted}
        path = self._directory / "state"
        temporary = self._directory / "state.new"
        self._files.write(temporary, _signed(document))
        self._files.sync(temporary)
        self._files.rename(temporary, path)
        self._files.sync(self._directory)

    def needs_trim(self, acknowledged: int, hole: Hole) -> bool:
        """Whether there is a segment that :meth:`trim` would remove. Does not block."""
        return any(_is_dead(segment, acknowledged, hole) for segment in self._segments[:-1])

    def trim(self, acknowledged: int, hole: Hole) -> None:
        """Remove the segments of which nothing is needed; what was confirmed must have been marked before.

        :raises OSError: if the disk fails.
        """
        for segment in self._segments[:-1]:
            if _is_dead(segment, acknowledged, hole):
                self._files.unlink(segment.path)
                self._segments.remove(segment)

    def forget_damage(self) -> None:
        """Write the segments that have unreadable lines anew, without them. The loss must have been recorded before.

        :raises OSError: if the disk fails or is full.
        """
        for segment in [segment for segment in self._segments if segment.damaged]:
            good = [record for record, _ in _records(self._files.read(segment.path)) if record is not None]
            if not good:
                self._files.unlink(segment.path)
                self._segments.remove(segment)
                continue
            data = b"".join(map(_line, good))
            temporary = segment.path.with_suffix(".new")
            self._files.write(temporary, data)
            self._files.sync(temporary)
            self._files.rename(temporary, segment.path)
            self._files.sync(self._directory)
            segment.size, segment.damaged = len(data), 0

    def _read_segment(self, path: Path) -> list[Record]:
        data = self._files.read(path)
        segment = _Segment(path)
        self._segments.append(segment)
        found: list[Record] = []
        for record, end in _records(data):
            if record is not None:
                found.append(record)
                segment.size = end
            elif end < len(data) or data.endswith(b"\n"):
                segment.damaged += 1
                segment.size = end
        if segment.size < len(data):
            # Torn by a crash. What follows must not be joined to it.
            self._files.truncate(path, segment.size)
        if found:
            segment.first = min(record.event.sequence for record in found)
            segment.last = max(record.event.sequence for record in found)
        elif not segment.damaged:
            self._files.unlink(path)
        return found

    def _read_state(self) -> dict[str, Any]:
        path = self._directory / "state"
        try:
            document = _checked(self._files.read(path))
        except FileNotFoundError:
            return {}
        if document is None or not all(isinstance(document.get(name), int) for name in ("acknowledged", "attempted")):
            log.error(
                "{path}, which says which events the region has, cannot be read; all that are kept are sent again.",
                path=str(path),
            )
            return {}
        return document


def _is_dead(segment: _Segment, acknowledged: int, hole: Hole) -> bool:
    """Whether nothing of ``segment`` is still to be sent."""
    first = max(segment.first, acknowledged + 1, hole.before)
    return not segment.damaged and (first > segment.last or (hole.after < first and segment.last <= hole.through))


def _records(data: bytes) -> list[tuple[Record | None, int]]:
    """What each line of ``data`` is (None if it is not readable), and where the line ends."""
    found: list[tuple[Record | None, int]] = []
    start = 0
    while start < len(data):
        newline = data.find(b"\n", start)
        end = len(data) if newline < 0 else newline + 1
        document = None if newline < 0 else _checked(data[start:end])
        found.append((None if document is None else _record(document), end))
        start = end
    return found


def _record(document: dict[str, Any]) -> Record | None:
    try:
        return Record(
            Event(
                document["epoch"], document["sequence"], document["type"], document["level"], document["description"],
                document["occurred"], document["lost"],
            ),
            Hole(*document["hole"]),
        )  # fmt: skip
    except (KeyError, TypeError):
        return None  # the checksum is right: another version of this program wrote it


def _line(record: Record) -> bytes:
    event, hole = record.event, record.hole
    return _signed(
        {
            "epoch": event.epoch, "sequence": event.sequence, "type": event.type, "level": event.level,
            "description": event.description, "occurred": event.occurred, "lost": event.lost,
            "hole": [hole.before, hole.after, hole.through],
        }
    )  # fmt: skip


def size_of(record: Record) -> int:
    """The bytes that ``record`` takes on the disk."""
    return len(_line(record))


def _signed(document: dict[str, Any]) -> bytes:
    text = json.dumps(document, separators=(",", ":")).encode("ascii")
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _checked(line: bytes) -> dict[str, Any] | None:
    """The object in ``line``, or None if it is not what :func:`_signed` made."""
    sum_, _, text = line.rstrip(b"\n").partition(b" ")
    if sum_ != b"%08x" % zlib.crc32(text):
        return None
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None  # the checksum can be right by chance: eight zeros and nothing after them have it
    return document if isinstance(document, dict) else None
