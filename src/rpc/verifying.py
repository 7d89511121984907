"""Is what is on this disk still what was verified once? Everything is hashed again, in the background and slowly.

A *pass* goes through the blobs by their names, at a bounded rate, so that it costs little of a core and of the disk;
how far it is outlives restarts. A blob that somebody says is wrong is looked at at once, between two steps of a pass.
What is wrong goes to the quarantine, and the store tells its listeners.
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_right
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from attrs import asdict, define, evolve, field, frozen
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from rpc.blobs import READS, BlobError, BlobStore, Examination, State, Unreadable
from rpc.fetch import RunInThread
from rpc.hashing import Hashing
from rpc.manifest import is_sha256

log = Logger()

STEPS_PER_SECOND: Final = 4
"""A step is the bytes of a quarter of a second, so that a pass can be stopped, or give way, soon."""

SMALLEST_STEP: Final = 64 << 10
LARGEST_STEP: Final = 16 << 20

SAVE_SECONDS: Final = 5.0
"""How often it is written down how far a pass is: so much is done again after a crash, and the file under way."""

SUSPECTS: Final = 256
"""How many blobs may wait to be looked at at once; more than these are left to the next pass."""

SPARED_SECONDS: Final = 60.0
LONGEST_SPARED: Final = 3600.0
"""How long a blob that was looked at is not looked at again because somebody says that it is wrong: at first, and at
most. It doubles each time that it was right, for who says so may have a bad disk, or a bad network, and never stop."""

SKEW_SECONDS: Final = 3600.0
"""By so much the clock may have been set back since a pass began. If it was by more, nobody knows when that was."""

UNREADABLE_SECONDS: Final = 10.0
"""How long after bytes of a blob could not be read they are read again."""

MIB: Final = 1 << 20


@frozen
class Pass:
    """One going through all blobs. ``after`` is the last one that was looked at, ``started`` and ``ended`` are seconds
    since the epoch, ``damaged`` says of each that was wrong why; sizes are in bytes."""

    started: float
    after: str = ""
    files: int = 0
    files_total: int = 0
    bytes: int = 0
    bytes_total: int = 0
    damaged: tuple[tuple[str, str], ...] = ()
    problems: tuple[str, ...] = ()
    ended: float | None = None

    def looked_at(self, sha256: str, size: int, found: Examination | str) -> Pass:
        """The pass after one more blob; ``found`` is what of it, or why that could not be told."""
        after = evolve(self, after=sha256, files=self.files + 1, bytes=self.bytes + size)
        if isinstance(found, str):
            return evolve(after, problems=(*self.problems, f"{sha256}: {found}")[-KEPT:])
        if found.state is State.QUARANTINED:
            return evolve(after, damaged=(*self.damaged, (sha256, found.reason))[-KEPT:])
        return after


KEPT: Final = 100
"""How many damaged blobs and problems a pass names."""


def rest(sizes: Mapping[str, int], after: str) -> list[str]:
    """The blobs that a pass which is so far has still to look at, in order."""
    names = sorted(sizes)
    return names[bisect_right(names, after) :]


def read_pass(data: bytes) -> Pass:
    """What was written of a pass.

    :raises ValueError: if it is none.
    """
    try:
        document = json.loads(data)
        found = Pass(**{**document, "damaged": tuple((sha256, why) for sha256, why in document["damaged"]),
                        "problems": tuple(document["problems"])})  # fmt: skip
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"it is no record of a verification: {type(error).__name__}: {error}") from error
    numbers = (found.started, found.files, found.files_total, found.bytes, found.bytes_total, found.ended or 0)
    if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers) or not (
        found.after == "" or is_sha256(found.after)
    ):
        raise ValueError("it is no record of a verification: its values are of other kinds")
    return found


@frozen
class _Spared:
    """A blob that is not looked at again ``until`` then (seconds), which is in ``length`` seconds."""

    until: float
    length: float


@define(eq=False)
class Verifier:
    """Goes through the blobs of a store.

    :param clock: what pauses run on.
    :param now: seconds since the epoch.
    :param rate: bytes that are hashed in a second at most.
    :param interval: seconds from the beginning of one pass to that of the next; 0: only when asked to.
    :param ended: is called when a pass has ended. It must not raise.
    """

    blobs: BlobStore
    clock: IReactorTime
    run_in_thread: RunInThread
    now: Callable[[], float]
    rate: float
    interval: float
    ended: Callable[[Pass], object] = field(default=lambda last: None)
    _pass: Pass | None = field(default=None, init=False)
    _asked_rate: float | None = field(default=None, init=False)
    _asked: bool = field(default=False, init=False)
    _suspects: dict[str, str] = field(factory=dict, init=False)
    _spared: dict[str, _Spared] = field(factory=dict, init=False)
    _current: str = field(default="", init=False)
    _current_bytes: int = field(default=0, init=False)
    _saved_at: float = field(default=0.0, init=False)
    _stopping: bool = field(default=False, init=False)
    _working: Deferred[None] | None = field(default=None, init=False)
    _sleeping: Deferred[None] | None = field(default=None, init=False)
    _timer: IDelayedCall | None = field(default=None, init=False)
    _debt: float = field(default=0.0, init=False)

    @property
    def path(self) -> Path:
        """Where it is written down how far the pass is."""
        return self.blobs.root / "verification.json"

    def start(self) -> None:
        """Go on with the pass that was under way when the process ended, or wait for the next to be due."""
        self._working = Deferred.fromCoroutine(self._work())
        self._working.addErrback(lambda reason: log.failure("Files are not verified any more", reason))

    async def stop(self) -> None:
        """Stop, and write down how far the pass is."""
        self._stopping = True
        self._wake()
        if self._working is not None:
            await self._working

    def request(self, rate: float | None = None) -> None:
        """Begin a pass now, or go on with the one under way; with another ``rate``, if one is given, for just it."""
        self._asked = True
        self._asked_rate = rate
        self._wake()

    def suspect(self, sha256: str, why: str) -> bool:
        """Look at one blob at once, because of ``why``; False if it was looked at a moment ago, or too many wait."""
        spared = self._spared.get(sha256)
        if spared is not None and spared.until > self.clock.seconds():
            return False
        if sha256 in self._suspects or len(self._suspects) >= SUSPECTS:
            return False
        self._suspects[sha256] = why
        self._wake()
        return True

    @property
    def is_running(self) -> bool:
        """Whether a pass is under way."""
        return self._pass is not None and self._pass.ended is None

    @property
    def status(self) -> dict[str, Any]:
        """For people and programs: the pass under way or the last one, as JSON."""
        last = self._pass
        found: dict[str, Any] = {
            "state": "verifying" if self.is_running or self._asked else "waiting",
            "rate": self._asked_rate or self.rate,
            "next": self._due(),
            "not_repaired": [asdict(each) for _, each in sorted(self.blobs.damaged.items())],
        }
        if last is not None:
            found |= asdict(last) | {
                "damaged": [{"sha256": sha256, "reason": reason} for sha256, reason in last.damaged],
                "problems": list(last.problems),
                "bytes": last.bytes + self._current_bytes,
                "current": self._current,
            }
        return found

    def _due(self) -> float | None:
        """When the next pass begins, in seconds since the epoch; None if only when somebody asks."""
        if not self.interval or self.is_running:
            return None
        # A pass that begins in the future was begun by a clock that was wrong: the next is not to wait for that.
        if self._pass is None or self._pass.started > self.now() + SKEW_SECONDS:
            return 0.0
        return self._pass.started + self.interval

    # The work

    async def _work(self) -> None:
        self._pass = await self.run_in_thread(self._load)
        if self.is_running:
            log.info("Verifying the files goes on after {files} of them.", files=self._pass and self._pass.files)
        while not self._stopping:
            try:
                await self._turn()
            except (OSError, BlobError) as error:
                log.error("Verifying the files is interrupted: {error}", error=str(error))
                await self._sleep(60.0)
        if self._pass is not None:
            await self.run_in_thread(self._save, self._pass)

    async def _turn(self) -> None:
        await self._look_at_suspects()
        if self.is_running:
            await self._go_through()
            return
        due = self._due()
        if self._asked or (due is not None and due <= self.now()):
            self._asked = False
            self._pass = Pass(self.now())
            log.info("Verifying all files begins.")
        elif not self._suspects and not self._stopping:
            # The clock may be set, so that it is looked at now and then.
            await self._sleep(3600.0 if due is None else min(max(due - self.now(), 1.0), 3600.0))

    async def _go_through(self) -> None:
        """The rest of the pass."""
        assert self._pass is not None, "a pass is under way"
        sizes = await self.run_in_thread(self.blobs.sizes)
        names = rest(sizes, self._pass.after)
        self._pass = evolve(
            self._pass,
            files_total=self._pass.files + len(names),
            bytes_total=self._pass.bytes + sum(sizes[name] for name in names),
        )
        for name in names:
            found = await self._examine(name, paced=True)
            if self._stopping and found is None:
                return
            self._pass = self._pass.looked_at(name, sizes[name], found or Examination(State.MISSING))
            self._current, self._current_bytes = "", 0
            if self.clock.seconds() >= self._saved_at + SAVE_SECONDS:
                self._saved_at = self.clock.seconds()
                await self.run_in_thread(self._save, self._pass)
            if self._stopping:
                return
        await self._end()

    async def _end(self) -> None:
        assert self._pass is not None, "a pass is under way"
        self._pass = last = evolve(self._pass, ended=self.now())
        self._asked, self._asked_rate, self._debt = False, None, 0.0
        await self.run_in_thread(self._save, last)
        now = self.clock.seconds()
        self._spared = {sha256: spared for sha256, spared in self._spared.items() if spared.until > now}
        (log.error if last.damaged else log.info)(
            "All {files} files ({bytes} bytes) were verified in {seconds} s: {damaged} were damaged.",
            files=last.files, bytes=last.bytes, damaged=len(last.damaged),
            seconds=round((last.ended or 0) - last.started),
        )  # fmt: skip
        self.ended(last)

    async def _look_at_suspects(self) -> None:
        while self._suspects and not self._stopping:
            sha256, why = next(iter(self._suspects.items()))
            del self._suspects[sha256]
            before = self._spared.get(sha256)
            self._spare(sha256, SPARED_SECONDS)
            found = await self._examine(sha256, paced=False)
            if isinstance(found, Examination):
                if found.state is State.VERIFIED:
                    self._spare(sha256, min(before.length * 2, LONGEST_SPARED) if before else SPARED_SECONDS)
                else:  # when it is there again it is another file
                    self._spared.pop(sha256, None)
            said = {"sha256": sha256, "why": why}
            if isinstance(found, str):
                log.warn("{sha256} could not be looked at ({why}): {found}", found=found, **said)
            elif found is not None and found.state is not State.QUARANTINED:
                log.info("{sha256} was looked at because {why}; it is {state}.", state=found.state.value, **said)

    def _spare(self, sha256: str, seconds: float) -> None:
        self._spared[sha256] = _Spared(self.clock.seconds() + seconds, seconds)

    async def _examine(self, sha256: str, *, paced: bool) -> Examination | str | None:
        """What of one blob; why that cannot be told; None if it was given up because of stopping."""
        for read in range(1, READS):
            try:
                return await self._read(sha256, paced, read)
            except Unreadable as error:
                log.warn("{sha256}: {error}; it is read again.", sha256=sha256, error=str(error))
            until = self.clock.seconds() + UNREADABLE_SECONDS
            while not self._stopping and (left := until - self.clock.seconds()) > 0:
                await self._sleep(left)
        return None if self._stopping else await self._read(sha256, paced, READS)

    async def _read(self, sha256: str, paced: bool, read: int) -> Examination | str | None:
        try:
            begun = await self.run_in_thread(self.blobs.begin_examination, sha256)
            if isinstance(begun, Examination):
                return begun
            try:
                while not begun.is_done:
                    if self._stopping:
                        return None
                    await self._step(begun, paced)
                    if paced:
                        self._current, self._current_bytes = sha256, begun.length
                        await self._look_at_suspects()
                return await self.run_in_thread(self.blobs.conclude, sha256, begun, read)
            finally:
                begun.close()
        except CancelledError:
            raise
        except Unreadable as error:
            if read < READS:
                raise
            return str(error)
        except (OSError, BlobError) as error:
            return str(error)

    async def _step(self, hashed: Hashing, paced: bool) -> None:
        rate = self._asked_rate or self.rate
        size = max(SMALLEST_STEP, min(int(rate / STEPS_PER_SECOND), LARGEST_STEP)) if paced else LARGEST_STEP
        begun = self.clock.seconds()
        count = await self.run_in_thread(hashed.step, size)
        if paced:
            self._debt = max(0.0, self._debt + count / rate - (self.clock.seconds() - begun))
            if self._debt >= 1 / STEPS_PER_SECOND / 2:  # many small files are paused for together
                debt, self._debt = self._debt, 0.0
                await self._pause(debt)

    async def _pause(self, seconds: float) -> None:
        """Wait so long, whoever wakes; but not when stopping."""
        until = self.clock.seconds() + seconds
        while not self._stopping and (left := until - self.clock.seconds()) > 0:
            await self._sleep(left)
            if self._suspects:
                await self._look_at_suspects()

    async def _sleep(self, seconds: float) -> None:
        """Wait so long, or until somebody wakes."""
        if self._stopping:
            return
        sleeping: Deferred[None] = Deferred()
        self._sleeping = sleeping
        self._timer = self.clock.callLater(seconds, self._wake)
        await sleeping

    def _wake(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None and timer.active():
            timer.cancel()
        sleeping, self._sleeping = self._sleeping, None
        if sleeping is not None:
            sleeping.callback(None)

    # On the disk

    def _load(self) -> Pass | None:
        self.blobs.prepare()
        try:
            return read_pass(self.path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            log.warn("{path} cannot be read, so verifying begins anew: {error}", path=str(self.path), error=str(error))
            return None

    def _save(self, state: Pass) -> None:
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}.new")
        try:
            temporary.write_text(json.dumps(asdict(state)), encoding="ascii")
            os.rename(temporary, self.path)
        except OSError as error:
            log.warn("Cannot write {path}, so that a restart begins anew: {error}", path=str(self.path),
                     error=str(error))  # fmt: skip
