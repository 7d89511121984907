"""How does what happens on a rack reach the region? Written to the disk, then sent in order until it is confirmed.

Anybody may :meth:`~Events.record` an event at any time, and never waits for it. Events that wait for the region are
bounded in bytes; when there are too many the oldest are dropped, and that is an event itself. What was sent once is
never dropped, since the region may have it: so an event is either at the region or counted in one that says how many
are lost, and never both.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from attrs import frozen
from twisted.internet.defer import CancelledError, Deferred, DeferredLock
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from rack.eventfile import EventFile, Hole, Record, size_of
from rpc.commands import EventsRefused, SendEvents
from rpc.events import EVENTS_LOST, MAX_BATCH, MAX_DESCRIPTION, Event, Kind, plain
from rpc.failures import UnknownCommand
from rpc.fetch import RunInThread
from rpc.outcomes import Answered, Failed, NotConnected, Outcome, TimedOut
from rpc.protocol import Link

log = Logger()

CAPACITY: Final = 4 << 20
"""Bytes of events that wait for the region; some twenty thousand of them."""

BATCH_BYTES: Final = 48 << 10
"""Bytes of the events in one call."""

UNWRITTEN: Final = 1000
"""Events that wait for the disk; when it does not answer, more than that are only counted."""

SAVE_AGAIN_SECONDS: Final = 30.0
"""How long after a failure to write events to the disk that is tried again."""

FAREWELL_SECONDS: Final = 0.5
"""How long a stopping rack tries to send its last events."""

_NOT_FOR_EVENTS: Final = frozenset({UnknownCommand.__name__, "PeerTooOld"})


@frozen
class _Fresh:
    kind: Kind
    description: str
    occurred: float
    lost: int = 0


class Events:
    """The events of a rack. To be used in the reactor's thread; nothing here blocks.

    :param now: gives seconds since the epoch.
    :param capacity: bytes that events may take while they wait for the region.
    :param jitter: gives numbers from 0 to 1, by which waits are shortened by up to a half.
    """

    def __init__(
        self,
        file: EventFile,
        clock: IReactorTime,
        run_in_thread: RunInThread,
        *,
        now: Callable[[], float] = time.time,
        capacity: int = CAPACITY,
        batch_bytes: int = BATCH_BYTES,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._file = file
        self._clock = clock
        self._run_in_thread = run_in_thread
        self._now = now
        self._capacity = capacity
        self._batch_bytes = batch_bytes
        self._jitter = jitter
        self._disk = DeferredLock()
        self._is_open = False
        self._closed = False
        self._stopping = False
        # What was recorded and has no number yet; how many more there were.
        self._fresh: list[_Fresh] = []
        self._overrun = 0
        self._epoch = ""
        self._next = 1
        # What the region has not confirmed, in order; and of that, what is not on the disk.
        self._pending: deque[tuple[Record, int]] = deque()
        self._pending_bytes = 0
        self._unsaved: list[Record] = []
        self._acknowledged = 0
        self._attempted = 0
        self._hole = Hole()
        self._links: deque[Link] = deque()
        self._writing: Deferred[None] | None = None
        self._sending: Deferred[None] | None = None
        self._asking: Deferred[Outcome[dict[str, Any]]] | None = None
        self._pause: Deferred[None] | None = None
        self._again: IDelayedCall | None = None
        self._failures = 0
        self._one_by_one = False
        self.lost = 0
        """How many events were lost since the start."""

    # What others use

    @property
    def pending(self) -> int:
        """How many events the region has not confirmed."""
        return len(self._pending) + len(self._fresh)

    async def open(self) -> None:
        """Read what is on the disk; to be called once. Events may be recorded before.

        :raises OSError: if the disk fails.
        """
        found = await self._run_in_thread(self._file.open)
        self._epoch, self._next = found.epoch, found.sequence
        self._acknowledged, self._attempted, self._hole = found.acknowledged, found.attempted, found.hole
        for event in found.events:
            self._keep(Record(event))
        self._is_open = True
        if found.damaged:
            self.lost += found.damaged
            self._lose(found.damaged, "their records on the rack's disk are damaged")
        self._write()
        if found.damaged:
            await _end_of(self._writing)
            if not self._unsaved:
                await self._disk.run(self._run_in_thread, self._file.forget_damage)
        self._send()

    def record(self, kind: Kind, description: str) -> None:
        """Keep an event that happened now, and send it when a region can be reached. After :meth:`stop` it is not."""
        if not self._closed:
            self._take(_Fresh(kind, plain(description, MAX_DESCRIPTION), self._now()))

    def use(self, link: Link) -> None:
        """Send events over ``link``, to a region with which the rack is registered, until it is lost."""
        self._links.append(link)
        link.on_lost(self._unuse)
        self._failures = 0
        self._wake()
        self._send()

    async def stop(self) -> None:
        """Write what was recorded, send it if that is quick, and stop. The rest is sent after the next start."""
        self._closed = True
        await _end_of(self._writing)
        farewell = self._clock.callLater(FAREWELL_SECONDS, self._halt)
        self._send()
        await _end_of(self._sending)
        if farewell.active():
            farewell.cancel()
        self._stopping = True
        await _end_of(self._writing)
        if self._again is not None and self._again.active():
            self._again.cancel()
        if self._is_open:
            await self._mark()

    def _halt(self) -> None:
        self._stopping = True
        if self._asking is not None:
            self._asking.cancel()
        self._wake()

    # Writing

    def _take(self, fresh: _Fresh) -> None:
        if len(self._fresh) >= UNWRITTEN and not fresh.lost:
            self._overrun += 1
            self.lost += 1
            return
        self._fresh.append(fresh)
        self._write()

    def _lose(self, count: int, why: str) -> None:
        """Record that ``count`` events are gone."""
        log.error("{count} events were lost: {why}.", count=count, why=why)
        self._take(_lost(count, why, self._now()))

    def _write(self) -> None:
        if self._is_open and self._writing is None and (self._fresh or self._unsaved):
            self._writing = Deferred.fromCoroutine(self._write_all())
            self._writing.addErrback(lambda reason: log.failure("Events could not be kept", reason))
            self._writing.addBoth(self._written)

    def _written(self, _: object) -> None:
        self._writing = None
        if self._fresh:
            self._write()

    async def _write_all(self) -> None:
        while True:
            fresh, self._fresh = self._fresh, []
            if self._overrun:
                count, self._overrun = self._overrun, 0
                fresh.append(_lost(count, "the rack's disk did not take them in time", self._now()))
            for one in fresh:
                self._add(one)
            if not await self._save():
                self._write_later()
                break
            if not self._fresh:
                break
        self._send()

    def _write_later(self) -> None:
        if not self._stopping and (self._again is None or not self._again.active()):
            self._again = self._clock.callLater(SAVE_AGAIN_SECONDS, self._write)

    def _add(self, fresh: _Fresh) -> None:
        record = self._numbered(fresh)
        if self._pending_bytes + size_of(record) > self._capacity and (gone := self._make_room(size_of(record))):
            # That they were dropped has the earlier number, so that it is told first.
            count, self._hole = gone
            why = f"there were more than {self._capacity} bytes of them, and no region took them"
            notice = Record(self._numbered(_lost(count, why, self._now())).event, self._hole)
            log.error("{count} events were dropped: {why}.", count=count, why=why)
            self._unsaved = [each for each in self._unsaved if each.event.sequence not in self._hole]
            record = self._numbered(fresh)
            self._keep(notice)
            self._unsaved.append(notice)
        self._keep(record)
        self._unsaved.append(record)

    def _numbered(self, fresh: _Fresh) -> Record:
        sequence, self._next = self._next, self._next + 1
        return Record(
            Event(
                self._epoch, sequence, fresh.kind.type, int(fresh.kind.level), fresh.description, fresh.occurred,
                fresh.lost,
            )
        )  # fmt: skip

    def _keep(self, record: Record) -> None:
        size = size_of(record)
        self._pending.append((record, size))
        self._pending_bytes += size

    def _make_room(self, size: int) -> tuple[int, Hole] | None:
        """Drop the oldest that were never sent, until a quarter is free: how many events those stood for."""
        sent = []
        while self._pending and self._pending[0][0].event.sequence <= self._attempted:
            sent.append(self._pending.popleft())
        count, through = 0, 0
        while self._pending and self._pending_bytes + size > self._capacity * 3 // 4:
            record, freed = self._pending.popleft()
            self._pending_bytes -= freed
            count += record.event.lost or 1
            self.lost += not record.event.lost
            through = record.event.sequence
        self._pending.extendleft(reversed(sent))
        before = sent[0][0].event.sequence if sent else through + 1
        return (count, Hole(before, self._attempted, through)) if count else None

    async def _save(self) -> bool:
        """Write what is not on the disk yet; whether that went well."""
        return await self._disk.run(lambda: Deferred.fromCoroutine(self._save_now()))

    async def _save_now(self) -> bool:
        through = self._next - 1
        unsaved = [record for record in self._unsaved if record.event.sequence > self._acknowledged]
        try:
            if unsaved:
                await self._run_in_thread(self._file.append, unsaved)
        except OSError as error:
            log.error(
                "{count} events cannot be written to the disk: {reason}. They are sent from memory meanwhile.",
                count=len(unsaved), reason=str(error),
            )  # fmt: skip
            return False
        self._unsaved = [record for record in self._unsaved if record.event.sequence > through]
        await self._trim()
        return True

    async def _trim(self) -> None:
        """Give back the space of what was confirmed or dropped; if that fails, again after the next write."""
        acknowledged, hole = self._acknowledged, self._hole
        if not self._file.needs_trim(acknowledged, hole):
            return
        try:
            await self._run_in_thread(self._file.mark, acknowledged, self._attempted)
            await self._run_in_thread(self._file.trim, acknowledged, hole)
        except OSError as error:
            log.error("Events that are not needed any more cannot be removed: {reason}", reason=str(error))

    # Sending

    def _unuse(self, link: Link, reason: str) -> None:
        if link in self._links:
            self._links.remove(link)

    def _send(self) -> None:
        """Begin to send, if that is not under way."""
        if self._is_open and not self._stopping and self._sending is None and self._pending and self._links:
            self._sending = Deferred.fromCoroutine(self._send_all())
            self._sending.addErrback(lambda reason: log.failure("Sending events broke off", reason))
            self._sending.addBoth(self._sent)

    def _sent(self, _: object) -> None:
        self._sending = None

    async def _send_all(self) -> None:
        while self._pending and self._links and not self._stopping:
            link = self._links[0]
            batch = self._batch()
            if batch[-1].sequence > self._attempted:
                self._attempted = batch[-1].sequence
                await self._mark()
            outcome = await self._ask(link, batch)
            if outcome is None:
                return
            if self._took(batch, outcome):
                self._failures = 0
                continue
            if isinstance(outcome, NotConnected):
                self._unuse(link, "")
                continue
            self._links.rotate(-1)
            if isinstance(outcome, Failed) and outcome.kind in _NOT_FOR_EVENTS:
                log.warn("{peer} takes no events; they wait for another, or for its upgrade.", peer=str(link.peer))
                self._links.remove(link)
                continue
            self._failures += 1
            await self._wait(_pause(self._failures, self._jitter))

    async def _ask(self, link: Link, batch: list[Event]) -> Outcome[dict[str, Any]] | None:
        """How sending ``batch`` ended; None if the rack is stopping and does not wait for that."""
        documents = [event.document for event in batch]
        self._asking = asking = Deferred.fromCoroutine(link.ask(SendEvents, events=documents))
        if self._stopping:
            asking.cancel()
        try:
            return await asking
        except CancelledError:
            return None
        finally:
            self._asking = None

    def _batch(self) -> list[Event]:
        """What to send next: again what was sent without being confirmed, or else the oldest, as many as fit."""
        batch: list[Event] = []
        size = 0
        for record, bytes_ in self._pending:
            event, size = record.event, size + bytes_
            is_new = event.sequence > self._attempted >= self._pending[0][0].event.sequence
            if batch and (is_new or self._one_by_one or size > self._batch_bytes or len(batch) == MAX_BATCH):
                break
            batch.append(event)
        return batch

    def _took(self, batch: list[Event], outcome: Outcome[dict[str, Any]]) -> bool:
        """Whether something came of sending ``batch``: the next call will not be for all of the same again."""
        match outcome:
            case Answered(value):
                committed = value["committed"]
                known = {each for each in committed if isinstance(each, str)} if isinstance(committed, list) else set()
                taken = 0
                while taken < len(batch) and batch[taken].id in known:
                    taken += 1
                if not taken:
                    log.error("The region confirmed none of {count} events, but said nothing against it.",
                              count=len(batch))  # fmt: skip
                    return False
                self._one_by_one = False
                self._acknowledge(batch[taken - 1].sequence)
                return True
            case Failed(EventsRefused.__name__, reason) if len(batch) > 1:
                self._one_by_one = True
                return True
            case Failed(EventsRefused.__name__, reason):
                refused = batch[0]
                self._one_by_one = False
                self.lost += not refused.lost
                self._lose(refused.lost or 1, f"the region does not take {refused.type!r} for one: {reason}")
                self._acknowledge(refused.sequence)
                return True
            case Failed() | TimedOut() | NotConnected():
                return False  # the link has logged and counted it

    def _acknowledge(self, sequence: int) -> None:
        self._acknowledged = sequence
        while self._pending and self._pending[0][0].event.sequence <= sequence:
            self._pending_bytes -= self._pending.popleft()[1]
        if self._file.needs_trim(self._acknowledged, self._hole):
            saving = Deferred.fromCoroutine(self._save())
            saving.addErrback(lambda reason: log.failure("Events that were sent could not be removed", reason))

    async def _mark(self) -> None:
        try:
            await self._disk.run(self._run_in_thread, self._file.mark, self._acknowledged, self._attempted)
        except OSError as error:
            # Should the rack crash now, the events are sent once more, and the region knows them.
            log.error("Which events were sent cannot be written to the disk: {reason}", reason=str(error))

    async def _wait(self, seconds: float) -> None:
        """Wait, but no longer than until there is another link."""
        if self._stopping:
            return
        pause: Deferred[None] = Deferred()
        self._pause = pause
        timer = self._clock.callLater(seconds, self._wake)
        await pause
        if timer.active():
            timer.cancel()

    def _wake(self) -> None:
        """Do not wait any longer."""
        pause, self._pause = self._pause, None
        if pause is not None:
            pause.callback(None)


async def _end_of(work: Deferred[None] | None) -> None:
    """Wait until ``work``, which does not fail, has ended."""
    if work is not None:
        ended: Deferred[None] = Deferred()
        work.addCallback(ended.callback)
        await ended


def _lost(count: int, why: str, now: float) -> _Fresh:
    words = "1 event was lost" if count == 1 else f"{count} events were lost"
    return _Fresh(EVENTS_LOST, plain(f"{words}: {why}.", MAX_DESCRIPTION), now, count)


def _pause(failures: int, jitter: Callable[[], float]) -> float:
    """Seconds until sending is tried again after so many failures in a row: 1, 2, 4, … up to 60, of which a random part
    of up to a half is left out."""
    return min(60.0, 2.0 ** min(failures - 1, 16)) * (1.0 - jitter() / 2)
