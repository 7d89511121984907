"""What states does a rack's syncing have, and what happens in each?

A newer request stops the sync under way and takes its place when that has ended. A sync that failed, or could not have
everything, is tried again, ever more seldom; a cancelled one only when somebody asks. :data:`Machine` is the table, to
be read from top to bottom.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from attrs import define, field, frozen
from automat import TypeMachineBuilder
from prometheus_client import Counter
from twisted.internet.defer import Deferred, DeferredLock
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from rack.assignment import Assignment
from rack.inventory import Damage
from rack.rate import Rate
from rack.steps import DiskFull, SyncFailed, Syncs, SyncState
from rack.stop import CANCELLED, FAILED, PARTIAL, SUPERSEDED, SYNCED, UNCHANGED, Stop, Stopped
from rpc.events import DISK_FULL, SYNC_ENDED, SYNC_FAILED, SYNC_INCOMPLETE, SYNC_STARTED, SYNC_STOPPED

log = Logger()

SYNCS: Final = Counter(
    "stanchion_syncs",
    "Syncs that have ended, by outcome (synced, unchanged, partial, failed, superseded, cancelled).",
    ["outcome"],
)

LOOK_SOON: Final = 1.0
"""Seconds until the rack looks again when something was found damaged during a sync."""

FIRST_RETRY: Final = 15.0
"""Seconds until a failed sync is tried again; each further failure doubles it, up to the interval of looking again."""


@frozen
class Result:
    """How a sync ended: ``outcome`` is ``synced``, ``unchanged``, ``partial``, ``failed``, ``superseded`` or
    ``cancelled``; ``partial`` when images are not held because the region cannot give their files now.

    ``generation`` and ``digest`` are what the rack holds now, ``reason`` is a sentence unless it ended well, and
    ``bytes_fetched`` came over the wire for ``files_fetched`` whole files (and maybe parts of others).
    """

    outcome: str
    generation: int
    digest: str
    reason: str = ""
    bytes_fetched: int = 0
    files_fetched: int = 0


@define(eq=False)
class Run:
    """A sync under way or to come, and who waits for its result."""

    assignment: Assignment
    callers: list[Deferred[Result]] = field(factory=list)
    stop: Stop = field(factory=Stop)
    state: SyncState = field(factory=SyncState)
    started: float = 0.0
    rate: Rate = field(factory=Rate)
    is_told: bool = False
    """Whether there is an event that says that it began: there is none for a look that finds everything in place."""

    def tell(self, result: Result) -> None:
        """Give everyone who waits the result."""
        callers, self.callers = self.callers, []
        for caller in callers:
            caller.callback(result)


class Inputs(Protocol):
    """What can happen to a rack's syncing."""

    def ask(self, run: Run) -> None:
        """Somebody asked for a sync."""

    def replace(self, run: Run) -> None:
        """What somebody asked for takes the place of the sync under way, and of what was to follow that."""

    def look_again(self) -> None:
        """It is time, or there is a reason, to look whether all that should be held is there."""

    def cancel(self) -> None:
        """Somebody asked to stop the sync under way; there is one."""

    def succeeded(self, result: Result) -> None:
        """The sync ended well."""

    def incomplete(self, result: Result, lacking: tuple[Damage, ...]) -> None:
        """The sync ended, and the rack holds all that can be had."""

    def failed(self, result: Result) -> None:
        """The sync ended with an error."""

    def halted(self, result: Result) -> None:
        """The sync was stopped."""

    def stop(self) -> None:
        """The rack is stopping."""


@define(eq=False)
class Core:
    """What the states share. ``run`` is the sync under way, ``next`` the one that takes its place when it ends."""

    syncs: Syncs
    clock: IReactorTime
    interval: float
    jitter: Callable[[], float]
    listeners: list[Callable[[], object]] = field(factory=list)
    lock: DeferredLock = field(factory=DeferredLock)
    assignment: Assignment | None = None
    run: Run | None = None
    next: Run | None = None
    timer: IDelayedCall | None = None
    last_success: float | None = None
    failures: int = 0
    failure: str = ""
    lacking: tuple[Damage, ...] = ()
    """What the last sync found that the region cannot give."""
    stopped: Deferred[None] = field(factory=Deferred)

    def start(self, inputs: Inputs, run: Run) -> None:
        """Start ``run``, and forget the time of the next look."""
        self.no_timer()
        self.run = run
        self.assignment = run.assignment
        run.started = self.clock.seconds()
        log.info("Sync to {assignment} from {url} begins.", assignment=str(run.assignment), url=run.assignment.url)
        self.announce()
        going = Deferred.fromCoroutine(self._go(inputs, run))
        going.addErrback(lambda reason: log.failure("The end of a sync could not be told", reason))

    async def _go(self, inputs: Inputs, run: Run) -> None:
        tell: Callable[[Result], object] = inputs.succeeded
        reason, kind = "", SYNC_ENDED
        try:
            async with self.lock:
                done = await self.syncs.perform(
                    run.assignment, run.stop, lambda state: self._show(run, state), self.announce
                )
            if done.lacking:
                outcome, reason, kind = PARTIAL, done.reason, SYNC_INCOMPLETE
                tell = partial(inputs.incomplete, lacking=done.lacking)
            else:
                outcome = SYNCED if done.changed else UNCHANGED
                self.last_success = self.clock.seconds()
        except Stopped as stopped:
            tell, outcome, reason, kind = inputs.halted, stopped.outcome, str(stopped), SYNC_STOPPED
        except SyncFailed as failure:
            tell, outcome, reason = inputs.failed, FAILED, str(failure)
            kind = DISK_FULL if isinstance(failure, DiskFull) else SYNC_FAILED
        except Exception as error:  # noqa: BLE001  # a fault of our own: it must end the sync, not the syncing
            log.failure("The sync to {assignment} met an internal error", assignment=str(run.assignment))
            tell, outcome, reason = inputs.failed, FAILED, f"internal error: {type(error).__name__}: {error}"
            kind = SYNC_FAILED
        result = self.result(outcome, reason, run.state)
        SYNCS.labels(outcome).inc()
        seconds = self.clock.seconds() - run.started
        said = {"assignment": str(run.assignment), "seconds": round(seconds, 3), "outcome": outcome,
                "files": result.files_fetched, "bytes": result.bytes_fetched, "reason": reason}  # fmt: skip
        ended = "Sync to {assignment} ended after {seconds} s: {outcome}, {files} files and {bytes} bytes fetched."
        if outcome == FAILED:
            log.error(ended + " {reason}", **said)
        else:
            (log.warn if outcome == PARTIAL else log.info)(ended + (" {reason}" if reason else ""), **said)
        if run.is_told or outcome in (FAILED, SYNCED):
            files, size = result.files_fetched, result.bytes_fetched
            fetched = f"{outcome} after {seconds:.1f} s, {files} files and {size} bytes fetched"
            self.syncs.happened(kind, f"Sync to {run.assignment}: {fetched}. {reason}".rstrip())
        tell(result)

    def _show(self, run: Run, state: SyncState) -> None:
        run.state = state
        if state.step == "fetching":
            run.rate.saw(self.clock.seconds(), state.bytes_read)
        if state.step != "checking" and not run.is_told:
            run.is_told = True
            self.syncs.happened(SYNC_STARTED, f"Sync to {run.assignment} from {run.assignment.url}.")

    def result(self, outcome: str, reason: str = "", state: SyncState | None = None) -> Result:
        """A result that says what is held now."""
        inventory = self.syncs.store.inventory
        state = state or SyncState()
        return Result(outcome, inventory.generation, inventory.digest, reason, state.bytes_read, state.files_done)

    def end(self, result: Result) -> None:
        """The sync under way is over."""
        run, self.run = self.run, None
        if run is not None:
            run.tell(result)

    def go_on(self, inputs: Inputs) -> None:
        """Start what was to take the place of the sync that is over."""
        run, self.next = self.next, None
        if run is not None:
            self.start(inputs, run)

    def drop_next(self, outcome: str, reason: str) -> None:
        """Tell those who wait for what was to come that it does not."""
        run, self.next = self.next, None
        if run is not None:
            run.tell(self.result(outcome, reason))

    def try_again(self, inputs: Inputs, result: Result) -> None:
        """A sync ended without all being there: look again, the later the more often that was in vain."""
        seconds = min(FIRST_RETRY * 2.0 ** min(self.failures, 30), self.interval) * (1 + self.jitter() / 4)
        self.failures += 1
        log.info("The next try is in {seconds} s.", seconds=round(seconds, 1))
        self.end(result)
        self.look_in(inputs, seconds)
        self.announce()

    def look_in(self, inputs: Inputs, seconds: float) -> None:
        """Look again after so many seconds."""
        self.no_timer()
        self.timer = self.clock.callLater(seconds, inputs.look_again)

    def no_timer(self) -> None:
        """Do not look again by the clock."""
        if self.timer is not None and self.timer.active():
            self.timer.cancel()
        self.timer = None

    def announce(self) -> None:
        """Tell the listeners that the state or what is held has changed."""
        for listener in self.listeners:
            listener()


_builder = TypeMachineBuilder(Inputs, Core)
_idle = _builder.state("idle")
_retrying = _builder.state("retrying after a failure")
_paused = _builder.state("paused: the last sync was cancelled")
_syncing = _builder.state("syncing")
_replacing = _builder.state("stopping a sync for a newer one")
_stopping = _builder.state("stopping the last sync")
_stopped = _builder.state("stopped")


@_idle.upon(Inputs.ask).to(_syncing)
@_retrying.upon(Inputs.ask).to(_syncing)
@_paused.upon(Inputs.ask).to(_syncing)
def _begin(inputs: Inputs, core: Core, run: Run) -> None:
    core.start(inputs, run)


@_syncing.upon(Inputs.ask).loop()
@_replacing.upon(Inputs.ask).loop()
def _ask(inputs: Inputs, core: Core, run: Run) -> None:
    latest = core.next or core.run
    assert latest is not None, "a sync is under way"
    if latest.assignment.wants_same(run.assignment) and not latest.stop.why:
        latest.callers.extend(run.callers)
    elif run.assignment.generation < latest.assignment.generation and latest.callers:
        # Without callers it is the rack's own look at what it was told once; the region knows better now.
        run.tell(core.result(SUPERSEDED, f"{latest.assignment} was asked for already"))
    else:
        inputs.replace(run)


@_idle.upon(Inputs.look_again).to(_syncing)
@_retrying.upon(Inputs.look_again).to(_syncing)
def _look_again(inputs: Inputs, core: Core) -> None:
    assert core.assignment is not None, "there is nothing to look for"
    core.start(inputs, Run(core.assignment))


_paused.upon(Inputs.look_again).loop().returns(None)
_syncing.upon(Inputs.look_again).loop().returns(None)
_replacing.upon(Inputs.look_again).loop().returns(None)
_stopping.upon(Inputs.look_again).loop().returns(None)
_stopped.upon(Inputs.look_again).loop().returns(None)


@_syncing.upon(Inputs.replace).to(_replacing)
def _replace(inputs: Inputs, core: Core, run: Run) -> None:
    assert core.run is not None, "a sync is under way"
    core.next = run
    core.run.stop.now(SUPERSEDED, f"{run.assignment} was asked for meanwhile")


@_replacing.upon(Inputs.replace).loop()
def _replace_next(inputs: Inputs, core: Core, run: Run) -> None:
    core.drop_next(SUPERSEDED, f"{run.assignment} was asked for meanwhile")
    core.next = run


@_syncing.upon(Inputs.cancel).loop()
@_replacing.upon(Inputs.cancel).to(_syncing)
def _cancel(inputs: Inputs, core: Core) -> None:
    assert core.run is not None, "a sync is under way"
    core.drop_next(CANCELLED, "the sync was cancelled")
    core.run.stop.now(CANCELLED, "the sync was cancelled")


@_syncing.upon(Inputs.succeeded).to(_idle)
def _succeeded(inputs: Inputs, core: Core, result: Result) -> None:
    core.failures, core.failure, core.lacking = 0, "", ()
    core.end(result)
    # Something may have been found damaged after it was looked at.
    core.look_in(inputs, core.interval if core.syncs.store.inventory.is_whole else LOOK_SOON)
    core.announce()


@_syncing.upon(Inputs.failed).to(_retrying)
def _failed(inputs: Inputs, core: Core, result: Result) -> None:
    core.failure, core.lacking = result.reason, ()
    core.try_again(inputs, result)


@_syncing.upon(Inputs.incomplete).to(_retrying)
def _incomplete(inputs: Inputs, core: Core, result: Result, lacking: tuple[Damage, ...]) -> None:
    core.failure, core.lacking = "", lacking
    if result.files_fetched:
        core.failures = 0  # more of it came; so may the rest
    core.try_again(inputs, result)


@_syncing.upon(Inputs.halted).to(_paused)
def _halted(inputs: Inputs, core: Core, result: Result) -> None:
    core.failures, core.failure, core.lacking = 0, "", ()
    core.end(result)
    core.announce()


@_replacing.upon(Inputs.succeeded).to(_syncing)
@_replacing.upon(Inputs.failed).to(_syncing)
@_replacing.upon(Inputs.halted).to(_syncing)
def _go_on(inputs: Inputs, core: Core, result: Result) -> None:
    core.failures, core.failure, core.lacking = 0, "", ()
    core.end(result)
    core.go_on(inputs)


@_replacing.upon(Inputs.incomplete).to(_syncing)
def _go_on_incomplete(inputs: Inputs, core: Core, result: Result, lacking: tuple[Damage, ...]) -> None:
    _go_on(inputs, core, result)


@_idle.upon(Inputs.stop).to(_stopped)
@_retrying.upon(Inputs.stop).to(_stopped)
@_paused.upon(Inputs.stop).to(_stopped)
def _stop(inputs: Inputs, core: Core) -> None:
    core.no_timer()
    core.stopped.callback(None)


@_syncing.upon(Inputs.stop).to(_stopping)
@_replacing.upon(Inputs.stop).to(_stopping)
def _stop_sync(inputs: Inputs, core: Core) -> None:
    assert core.run is not None, "a sync is under way"
    core.drop_next(CANCELLED, "the rack is stopping")
    core.run.stop.now(CANCELLED, "the rack is stopping")


@_stopping.upon(Inputs.succeeded).to(_stopped)
@_stopping.upon(Inputs.failed).to(_stopped)
@_stopping.upon(Inputs.halted).to(_stopped)
def _last_ended(inputs: Inputs, core: Core, result: Result) -> None:
    core.end(result)
    core.stopped.callback(None)


@_stopping.upon(Inputs.incomplete).to(_stopped)
def _last_ended_incomplete(inputs: Inputs, core: Core, result: Result, lacking: tuple[Damage, ...]) -> None:
    _last_ended(inputs, core, result)


_stopping.upon(Inputs.cancel).loop().returns(None)
_stopping.upon(Inputs.stop).loop().returns(None)
_stopped.upon(Inputs.stop).loop().returns(None)


@_stopping.upon(Inputs.ask).loop()
@_stopped.upon(Inputs.ask).loop()
def _too_late(inputs: Inputs, core: Core, run: Run) -> None:
    run.tell(core.result(CANCELLED, "the rack is stopping"))


Machine = _builder.build()
