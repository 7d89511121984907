"""How is something done whenever there is something to do, by one at a time, and again when it failed?

Whoever knows that there may be something to do *wakes* a :class:`Waker`, and its work begins: never two at once. A work
looks for itself what there is to do, so any number of wakes while it works are followed by one more work. A work that
failed is tried again, ever more seldom; so that is no matter for those who wake. :data:`Machine` is the table, to be
read from top to bottom.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol

from attrs import define, field
from automat import TypeMachineBuilder
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

log = Logger()

BREAK_SECONDS: Final = 3.0
"""How long a work that is broken off may wait for anything more, such as the end of a transaction."""

Work = Callable[[], Coroutine[Any, Any, float | None]]
"""What is done. Its result is after how many seconds to do it again although nobody wakes; None: not at all."""

Told = Callable[[Failure, float | None], object]
"""Is given why a work failed, and in how many seconds the next begins: 0 if at once, None if no other follows."""


class Inputs(Protocol):
    """What can happen to a waker, and what it can be asked."""

    def start(self) -> None:
        """From now on there may be works; one begins at once."""

    def wake(self) -> None:
        """There may be something to do, or it is time to try again."""

    def done(self) -> None:
        """The work ended well."""

    def put_off(self, seconds: float) -> None:
        """The work ended well, but wants another after so many seconds."""

    def failed(self, reason: Failure) -> None:
        """The work ended with an exception."""

    def stop(self, grace: float) -> None:
        """No other work is to begin; one that is under way may go on for ``grace`` seconds."""

    def break_off(self) -> None:
        """The work under way has had the time that it was given."""

    def is_started(self) -> bool:
        """Whether it was started and not told to stop."""

    def is_working(self) -> bool:
        """Whether a work is under way."""


@define(eq=False)
class Core:
    """What the states share. A transition only says what is to be done, in ``actions``; that is done after it, so that
    whoever is called then finds the new state and may bring about the next.

    ``pauses`` are the seconds until a failed work is tried again, at first and at most, ``pause`` those after the next
    failure; ``idle`` and ``stopped`` are those who wait for that.
    """

    work: Work
    clock: IReactorTime
    pauses: tuple[float, float]
    told: Told
    pause: float
    inputs: Inputs = field(init=False)
    working: Deferred[None] | None = None
    timer: IDelayedCall | None = None
    idle: list[Deferred[None]] = field(factory=list)
    stopped: list[Deferred[None]] = field(factory=list)
    actions: deque[Callable[[], object]] = field(factory=deque)
    is_acting: bool = False

    # What the transitions say

    def begin(self) -> None:
        """Begin a work."""
        self.no_timer()
        self.actions.append(self._begin)

    def break_off(self) -> None:
        """Cancel what the work is waiting for."""
        self.actions.append(self._cancel)

    def tell(self, reason: Failure, seconds: float | None) -> None:
        """Tell the owner of a work that failed."""
        self.actions.append(lambda: self._tell(reason, seconds))

    def tell_idle(self) -> None:
        """Tell those who wait that the work is over, and no other begins now."""
        self.actions.append(self._tell_idle)

    def tell_stopped(self) -> None:
        """Tell those who wait that nothing is done any more."""
        self.no_timer()
        self.actions.append(self._tell_stopped)

    def next_pause(self) -> float:
        """Seconds to wait after one more failure."""
        pause, self.pause = self.pause, min(self.pause * 2, self.pauses[1])
        return pause

    def no_pause(self) -> None:
        """The next failure will be the first."""
        self.pause = self.pauses[0]

    def after(self, seconds: float, happen: Callable[[], None]) -> None:
        """Have that happen after so many seconds, and nothing else by the clock."""
        self.no_timer()
        self.timer = self.clock.callLater(seconds, self.happens, happen)

    def no_timer(self) -> None:
        """Have nothing happen by the clock."""
        if self.timer is not None and self.timer.active():
            self.timer.cancel()
        self.timer = None

    # What is done

    def happens(self, happen: Callable[[], None]) -> None:
        """Make a transition, and do what is to be done then, unless somebody further up on the stack does."""
        happen()
        if self.is_acting:
            return
        self.is_acting = True
        try:
            while self.actions:
                self.actions.popleft()()
        finally:
            self.is_acting = False

    def _begin(self) -> None:
        self.working = Deferred.fromCoroutine(self._go())
        self.working.addErrback(lambda reason: log.failure("The end of a work could not be told", reason))

    async def _go(self) -> None:
        inputs = self.inputs
        try:
            # Whoever was told that it is idle may have woken it and stopped it since.
            again = await self.work() if inputs.is_started() else None
        except Exception:  # noqa: BLE001  # whatever it was: the owner is told, and works go on
            reason = Failure()
            self.happens(lambda: inputs.failed(reason))
            return
        if again is None:
            self.happens(inputs.done)
        else:
            seconds = max(again, 0.0)
            self.happens(lambda: inputs.put_off(seconds))

    def _cancel(self) -> None:
        if self.working is not None:
            self.working.cancel()

    def _tell(self, reason: Failure, seconds: float | None) -> None:
        try:
            self.told(reason, seconds)
        except Exception:  # noqa: BLE001  # works go on, whatever is wrong with telling of them
            log.failure("Telling that a work failed ({reason}) failed itself", reason=str(reason.value))

    def _tell_idle(self) -> None:
        while self.idle and not self.inputs.is_working():  # whoever is told may wake it
            self.idle.pop(0).callback(None)

    def _tell_stopped(self) -> None:
        while self.stopped:
            self.stopped.pop(0).callback(None)


_builder = TypeMachineBuilder(Inputs, Core)
_new = _builder.state("not started")
_idle = _builder.state("idle")
_waiting = _builder.state("waiting for the next try")
_working = _builder.state("working")
_woken = _builder.state("working, and woken meanwhile")
_stopping = _builder.state("stopping the last work")
_stopped = _builder.state("stopped")

_new.upon(Inputs.wake).loop().returns(None)  # the first work, when it is started, finds what there is


@_new.upon(Inputs.start).to(_working)
@_idle.upon(Inputs.wake).to(_working)
@_idle.upon(Inputs.start).to(_working)
@_waiting.upon(Inputs.wake).to(_working)
@_waiting.upon(Inputs.start).to(_working)
def _begin(inputs: Inputs, core: Core) -> None:
    core.begin()


_working.upon(Inputs.wake).to(_woken).returns(None)
_working.upon(Inputs.start).to(_woken).returns(None)
_woken.upon(Inputs.wake).loop().returns(None)
_woken.upon(Inputs.start).loop().returns(None)


@_working.upon(Inputs.done).to(_idle)
def _done(inputs: Inputs, core: Core) -> None:
    core.no_pause()
    core.tell_idle()


@_working.upon(Inputs.put_off).to(_waiting)
def _put_off(inputs: Inputs, core: Core, seconds: float) -> None:
    core.no_pause()
    core.after(seconds, inputs.wake)
    core.tell_idle()


@_working.upon(Inputs.failed).to(_waiting)
def _failed(inputs: Inputs, core: Core, reason: Failure) -> None:
    seconds = core.next_pause()
    core.after(seconds, inputs.wake)
    core.tell(reason, seconds)
    core.tell_idle()


@_woken.upon(Inputs.done).to(_working)
def _done_but_woken(inputs: Inputs, core: Core) -> None:
    core.no_pause()
    core.begin()


@_woken.upon(Inputs.put_off).to(_working)
def _put_off_but_woken(inputs: Inputs, core: Core, seconds: float) -> None:
    core.no_pause()
    core.begin()  # it says anew whether it has to wait


@_woken.upon(Inputs.failed).to(_working)
def _failed_but_woken(inputs: Inputs, core: Core, reason: Failure) -> None:
    core.next_pause()
    core.tell(reason, 0.0)
    core.begin()


@_new.upon(Inputs.stop).to(_stopped)
@_idle.upon(Inputs.stop).to(_stopped)
@_waiting.upon(Inputs.stop).to(_stopped)
@_stopped.upon(Inputs.stop).loop()
def _stop(inputs: Inputs, core: Core, grace: float) -> None:
    core.tell_stopped()


@_working.upon(Inputs.stop).to(_stopping)
@_woken.upon(Inputs.stop).to(_stopping)
def _stop_work(inputs: Inputs, core: Core, grace: float) -> None:
    if grace > 0:
        core.after(grace, inputs.break_off)
    else:
        _break_off(inputs, core)


@_stopping.upon(Inputs.break_off).loop()
def _break_off(inputs: Inputs, core: Core) -> None:
    core.break_off()
    core.after(BREAK_SECONDS, inputs.break_off)


@_stopping.upon(Inputs.done).to(_stopped)
def _last_done(inputs: Inputs, core: Core) -> None:
    core.tell_idle()
    core.tell_stopped()


@_stopping.upon(Inputs.put_off).to(_stopped)
def _last_put_off(inputs: Inputs, core: Core, seconds: float) -> None:
    core.tell_idle()
    core.tell_stopped()


@_stopping.upon(Inputs.failed).to(_stopped)
def _last_failed(inputs: Inputs, core: Core, reason: Failure) -> None:
    core.tell(reason, None)
    core.tell_idle()
    core.tell_stopped()


_stopping.upon(Inputs.wake).loop().returns(None)
_stopping.upon(Inputs.stop).loop().returns(None)
_stopped.upon(Inputs.wake).loop().returns(None)

for _state in (_idle, _waiting, _working, _woken):
    _state.upon(Inputs.is_started).loop().returns(True)
for _state in (_new, _stopping, _stopped):
    _state.upon(Inputs.is_started).loop().returns(False)
for _state in (_working, _woken, _stopping):
    _state.upon(Inputs.is_working).loop().returns(True)
for _state in (_new, _idle, _waiting, _stopped):
    _state.upon(Inputs.is_working).loop().returns(False)

Machine = _builder.build()


class Waker:
    """Has ``work`` done whenever it is woken.

    :param clock: what waiting for the next try runs on.
    :param retry: after how many seconds a failed work is tried again, at first and at most; each further failure
        doubles it, and a work that ends well begins anew.
    :param failed: is told of each work that ended with an exception, to log it.
    """

    def __init__(self, work: Work, clock: IReactorTime, *, retry: tuple[float, float], failed: Told) -> None:
        self._core = Core(work, clock, retry, failed, retry[0])
        self._core.inputs = self._inputs = Machine(self._core)

    @property
    def is_started(self) -> bool:
        """Whether it was started and not told to stop: a work that finds this false should end soon."""
        return self._inputs.is_started()

    @property
    def is_working(self) -> bool:
        """Whether a work is under way."""
        return self._inputs.is_working()

    def start(self) -> None:
        """Begin, with a first work. If it was started already this only wakes; one that was stopped is over."""
        self._core.happens(self._inputs.start)

    def wake(self) -> None:
        """Begin a work, or have one more follow that which is under way; nothing before the start or after a stop."""
        self._core.happens(self._inputs.wake)

    def stop(self, grace: float = 0.0) -> Deferred[None]:
        """Begin no other work; fires when none is under way any more.

        One that is under way is cancelled after ``grace`` seconds. If it waits for more then, to end in order, that is
        cancelled too when it takes :data:`BREAK_SECONDS`, and so on.
        """
        stopped: Deferred[None] = Deferred()
        self._core.stopped.append(stopped)
        self._core.happens(lambda: self._inputs.stop(grace))
        return stopped

    def when_idle(self) -> Deferred[None]:
        """Fires when no work is under way, and no other begins at that moment; now, if that is so now."""
        idle: Deferred[None] = Deferred()
        if self.is_working:
            self._core.idle.append(idle)
        else:
            idle.callback(None)
        return idle
