"""Who does what was queued, and what if that fails?

A worker claims rows and does their steps, each in a transaction of its own with retries of what collided. A step that
fails undoes only itself: the failure is logged once with its traceback, and recorded in another transaction under the
same correlation id. That the database is away is no fault of a step: it is waited for. Rows that no process has come
back from, as often as that is tried, are recorded as failed too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import psycopg2
from attrs import define
from prometheus_client import Counter
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import deferLater
from twisted.logger import Logger, LogLevel
from twisted.python.failure import Failure

from region import events
from region.commissioning import failures
from region.commissioning.failures import Abandoned, StepFailure, failure_of
from region.commissioning.queue import CHANNEL, Queue, Work
from region.commissioning.steps import Step, Steps
from region.database import Database, DatabaseUnavailable, Transaction
from region.nodes.life import Input, NotAllowed
from region.nodes.transitions import Told, perform, tell
from rpc.waking import Waker

log = Logger()

LOOK_SECONDS: Final = 5.0
"""How often the queue is looked at though nobody said that something was queued."""

ATTEMPTS: Final = 3
"""How often a step is begun by whatever process."""

RETRIES: Final = 5
"""How often a transaction that collided with another is tried again."""

LOSSES: Final = 5
"""How often a step may lose its connection while the database is there."""

FIRST_PAUSE_SECONDS: Final = 0.5
LONGEST_PAUSE_SECONDS: Final = 30.0

LATER_SECONDS: Final = 60.0
"""When a step is tried again whose failure could not be recorded."""

_FULL: Final = frozenset({"53100", "53300"})
"""SQLSTATEs of a server without room on its disk, or for a connection: no step is to blame for that."""

STEPS: Final = Counter(
    "stanchion_commissioning_steps", "Steps of processing what nodes signalled.", ["step", "outcome"]
)


@define
class _Pauses:
    """How long to wait before the next try; longer each time."""

    seconds: float = FIRST_PAUSE_SECONDS

    def next(self) -> float:
        seconds, self.seconds = self.seconds, min(LONGEST_PAUSE_SECONDS, self.seconds * 2)
        return seconds


class Worker:
    """Does what is queued, of at most ``concurrency`` nodes at a time.

    :param owner: the id of this region process, as in ``region_process``; it must be listed there by now.
    """

    def __init__(self, database: Database, clock: Any, owner: str, steps: Steps, *, concurrency: int = 3) -> None:
        self._database = database
        self._clock = clock
        self._steps = steps
        self._queue = Queue(database, owner)
        self._concurrency = concurrency
        self._busy: dict[int, tuple[Work, Deferred[None]]] = {}
        self._is_away = False
        self._claiming = Waker(self._claim, clock, retry=(LOOK_SECONDS, LOOK_SECONDS), failed=self._not_claimed)

    def start(self) -> None:
        """Begin, and look at the queue now, when something is queued, and every few seconds."""
        self._database.listen(CHANNEL, lambda payload: self.wake())
        self._claiming.start()

    async def stop(self) -> None:
        """End. Steps that are under way are broken off; what was claimed is for others to do."""
        stopped = self._claiming.stop()
        works = [work for work, _ in self._busy.values()]
        for _, working in list(self._busy.values()):
            working.cancel()
        await stopped
        try:
            await self._queue.put_back(works)
        except DatabaseUnavailable as error:
            log.warn(
                "What was claimed is done by others as soon as they miss this process: {reason}", reason=str(error)
            )

    def wake(self) -> None:
        """Look at the queue."""
        self._claiming.wake()

    async def _claim(self) -> float:
        free = self._concurrency - len(self._busy)
        if free > 0:  # otherwise whoever ends wakes it again
            works = await self._queue.claim(free, self._busy.keys())
            self._is_away = False
            for work in works:
                self._begin(work)
            if len(works) == free:
                self.wake()
        return LOOK_SECONDS

    def _not_claimed(self, reason: Failure, seconds: float | None) -> None:
        if seconds is None and reason.check(CancelledError):
            return
        if reason.check(DatabaseUnavailable, psycopg2.OperationalError):
            if not self._is_away:
                log.warn("What nodes signalled is processed later: {reason}", reason=str(reason.value).strip())
            self._is_away = True
        else:
            log.failure("The queue of commissioning could not be read, on an error of this process's own", reason)

    def _begin(self, work: Work) -> None:
        def ended(_: object) -> None:
            self._busy.pop(work.id, None)
            self.wake()

        working = Deferred.fromCoroutine(self._work(work))
        self._busy[work.id] = (work, working)
        working.addErrback(self._did_not_work, work)
        working.addCallback(ended)

    def _did_not_work(self, reason: Failure, work: Work) -> None:
        if reason.check(CancelledError, DatabaseUnavailable) and not self._claiming.is_started:
            return
        log.failure(
            "Step {step} of {node} was left, on an error of this process's own [{correlation}]",
            reason, step=work.step, node=work.node.hostname, correlation=work.correlation,
        )  # fmt: skip

    async def _work(self, work: Work) -> None:
        """Do one row, or record that it failed."""
        reason = await self._tried(work)
        if reason is None:
            return
        STEPS.labels(work.step, "failed").inc()
        assert reason.value is not None
        failure = failure_of(reason.value, work.correlation)
        if failure.is_of_output:
            log.failure(
                "The output of script {script} of {node} cannot be used: {reason} [{correlation}]",
                reason, LogLevel.warn, script=work.script_name, node=work.node.hostname, reason=failure.text,
                correlation=work.correlation,
            )  # fmt: skip
        else:
            log.failure(
                "Step {step} of {node}{script} failed [{correlation}]",
                reason, step=work.step, node=work.node.hostname, correlation=work.correlation,
                script=f" ({work.script_name})" if work.script_name else "",
            )  # fmt: skip
        await self._record(work, failure)

    async def _tried(self, work: Work) -> Failure | None:
        """Do the step; why it failed, if it did."""
        if work.attempts > ATTEMPTS:
            return Failure(
                Abandoned(
                    f"it was begun {ATTEMPTS} times, and each time the region process that did it ended before it was "
                    "done; look at what the logs of the region processes end with"
                )
            )
        pauses, losses = _Pauses(), 0
        while True:
            try:
                await self._do(work)
                return None
            except DatabaseUnavailable as error:
                reason = Failure(error)
                if not self._claiming.is_started:
                    raise
                losses += await self._is_to_blame(error)
            except CancelledError as error:
                if not self._claiming.is_started:
                    raise
                return Failure(error)
            except Exception as error:  # noqa: BLE001  # whatever it was: it is logged and recorded
                return Failure(error)
            if losses > LOSSES:
                return reason
            await self._pause(pauses, work, reason)

    async def _do(self, work: Work) -> None:
        step = self._steps[work.step]
        prepared = await step.prepare(work)
        done = await self._database.transact(partial(self._apply, step, work, prepared), retries=RETRIES)
        if done:
            STEPS.labels(work.step, "done").inc()
        else:
            log.info(
                "Step {step} of {node} was done before, or is done by another region process.",
                step=work.step, node=work.node.hostname,
            )  # fmt: skip

    async def _apply(self, step: Step, work: Work, prepared: Any, transaction: Transaction) -> bool:
        if not await self._queue.take(transaction, work):
            return False
        for finding in await step.apply(transaction, work, prepared):
            await events.record(transaction, work.node, finding.kind, finding.description)
        return True

    async def _record(self, work: Work, failure: StepFailure) -> None:
        """Record that a step failed, when the database is there."""
        fails_node = work.step == "finish"
        pauses = _Pauses()
        while True:
            try:
                await self._database.transact(partial(self._write, work, failure, fails_node), retries=RETRIES)
                return
            except DatabaseUnavailable as error:
                reason = Failure(error)
            except CancelledError:
                raise
            except Exception:  # noqa: BLE001  # as above
                log.failure(
                    "The failure of step {step} of {node} could not be recorded [{correlation}]",
                    step=work.step, node=work.node.hostname, correlation=failure.correlation,
                )  # fmt: skip
                if not fails_node:
                    await self._queue.put_back([work], seconds=LATER_SECONDS, counted=True)
                    return
                # Then without the change of the node's status, which the monitor will see to.
                fails_node = False
                continue
            await self._pause(pauses, work, reason)

    async def _write(self, work: Work, failure: StepFailure, fails_node: bool, transaction: Transaction) -> None:
        if not await failures.record(transaction, self._queue, work, failure):
            return
        told: Sequence[Told] = ()
        if fails_node:
            try:
                _, told = await perform(transaction, work.node.id, Input.FAIL, reason=failures.sentence(work, failure))
            except NotAllowed as error:
                log.info("{node} is left as it is: {reason}", node=work.node.hostname, reason=str(error))
        await failures.tell(transaction, work, failure)
        await tell(transaction, work.node, told, correlation=failure.correlation)

    async def _is_to_blame(self, error: DatabaseUnavailable) -> bool:
        """Whether a step may have lost its connection by itself: the database is there for others."""
        cause = error.__cause__
        if isinstance(cause, psycopg2.Error) and cause.pgcode in _FULL:
            return False
        try:
            await self._database.query("SELECT 1")
        except (DatabaseUnavailable, psycopg2.Error) as away:
            log.debug("the database is away: {reason}", reason=away)
            return False
        return True

    async def _pause(self, pauses: _Pauses, work: Work, reason: Failure) -> None:
        seconds = pauses.next()
        log.warn(
            "Step {step} of {node} is tried again in {seconds:g} s: {reason}",
            step=work.step, node=work.node.hostname, seconds=seconds, reason=str(reason.value).strip(),
        )  # fmt: skip
        await deferLater(self._clock, seconds)


class Notice:
    """Tells every region process that something was queued: this one at once, the others by a notification.

    Notifications are not sent in the transactions that queue: PostgreSQL commits those that notify one at a time, and
    signals would wait for each other's disk. One that is lost is made up for by the worker's timer.

    :param wake: wakes this process's worker.
    """

    def __init__(self, database: Database, wake: Callable[[], object]) -> None:
        self._database = database
        self._wake = wake
        self._sending: Deferred[None] | None = None
        self._again = False

    def __call__(self) -> None:
        """Something was queued."""
        self._wake()
        self._again = True
        if self._sending is None:
            self._sending = Deferred.fromCoroutine(self._send())
            self._sending.addErrback(self._not_sent)
            self._sending.addCallback(self._sent)

    async def _send(self) -> None:
        while self._again:
            self._again = False
            await self._database.query("SELECT pg_notify(%s, '')", (CHANNEL,))

    def _sent(self, _: object) -> None:
        self._sending = None

    def _not_sent(self, reason: Failure) -> None:
        if reason.check(DatabaseUnavailable, psycopg2.Error):
            log.debug("Others are not told that something was queued: {reason}", reason=str(reason.value).strip())
        else:
            log.failure("Telling others that something was queued failed", reason)
