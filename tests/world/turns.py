"""What may happen next in a world, and in which order: lanes that move one step at a time, and the time itself."""

from __future__ import annotations

import random
import select
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, Final, ParamSpec, TypeVar

from attrs import define, field
from twisted.internet.defer import Deferred, execute
from twisted.internet.error import ConnectionDone
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from twisted.test.iosim import FakeTransport, IOPump

P = ParamSpec("P")
T = TypeVar("T")

START: Final = 1_790_000_000.0
"""When a world begins, in seconds since the epoch: after everything that its upstreams are dated."""

DATABASE_MILLISECONDS: Final = 20_000
"""How long the database may take for one statement before a test fails."""

MOST_STEPS: Final = 100_000


_NUMBERS = count()
"""Of lanes, in the order in which they were made."""


@define(eq=False)
class Lane:
    """Steps that happen one after the other. ``owner`` is whose they are."""

    owner: str
    steps: deque[Callable[[], object]] = field(factory=deque)
    number: int = field(factory=_NUMBERS.__next__, init=False)

    @property
    def is_pending(self) -> bool:
        """Whether it can move."""
        return bool(self.steps)

    def move(self) -> None:
        """Do the next step."""
        self.steps.popleft()()


@define(eq=False)
class Wire:
    """A connection in memory; moving it carries what either end has written so far."""

    owner: str
    pump: IOPump
    stalled: bool = False
    number: int = field(factory=_NUMBERS.__next__, init=False)

    @property
    def ends(self) -> tuple[FakeTransport, FakeTransport]:
        """The transports of both ends."""
        return self.pump.serverIO, self.pump.clientIO

    @property
    def is_pending(self) -> bool:
        """Whether it can move."""
        return not self.stalled and any(end.stream or (end.disconnecting and not end.disconnected) for end in self.ends)

    @property
    def is_over(self) -> bool:
        """Whether both ends know that it has ended."""
        return all(end.disconnected for end in self.ends)

    def move(self) -> None:
        """Carry what was written."""
        self.pump.pump(advanceClock=False)

    def cut(self) -> None:
        """End it at once; what was under way is lost."""
        server, client = self.ends
        for end, other in ((server, client), (client, server)):
            end.stream.clear()
            was_told, other.disconnecting, other.disconnected = other.disconnected, True, True
            if not was_told:
                end.protocol.connectionLost(Failure(ConnectionDone("cut")))


class Turns(Clock):
    """A reactor: the time, lanes, and the sockets of the database, whose statements take no time in a world."""

    def __init__(self) -> None:
        super().__init__()
        self.advance(START)
        self.lanes: list[Lane | Wire] = []
        self.steps = 0
        self.is_waited_for: list[Callable[[], bool]] = []
        self.on_time: list[Callable[[float], object]] = []
        self._descriptors: dict[Any, int] = {}

    # Lanes

    def threads(self, owner: str) -> Callable[..., Deferred[Any]]:
        """Threads of ``owner``, each of whose pieces of work is a step that may be taken in any order."""
        return partial(self._in_thread, owner)

    def _in_thread(self, owner: str, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Deferred[T]:
        started: Deferred[T] = Deferred()

        def work() -> None:
            execute(function, *args, **kwargs).chainDeferred(started)

        self.lanes.append(Lane(owner, deque([work])))
        return started

    def callFromThread(self, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """There are no threads, but it must not happen inside what calls this."""
        self.callLater(0, function, *args, **kwargs)

    def forget(self, owner: str) -> None:
        """Let nothing of ``owner`` happen any more."""
        self.lanes = [lane for lane in self.lanes if lane.owner != owner]

    def pending(self) -> list[Lane | Wire]:
        """What can happen next, in an order that is the same each time."""
        self.lanes = [lane for lane in self.lanes if not (isinstance(lane, Wire) and lane.is_over)]
        # Statements that run at the same time end in any order, which must not matter.
        return sorted((lane for lane in self.lanes if lane.is_pending), key=lambda lane: lane.number)

    def step(self, chosen: Lane | Wire) -> None:
        """Let one thing happen, and what follows from it at once."""
        self.steps += 1
        chosen.move()
        if isinstance(chosen, Lane) and not chosen.steps and chosen in self.lanes:
            self.lanes.remove(chosen)
        self.follow()

    def put(self, lane: Lane, step: Callable[[], object]) -> None:
        """Add a step to ``lane``, which is listed while it has one."""
        lane.steps.append(step)
        if lane not in self.lanes:
            self.lanes.append(lane)

    def follow(self) -> None:
        """Have the database answer what it was asked, and what was to happen at this moment happen."""
        while True:
            if any(call.getTime() <= self.seconds() for call in self.calls):
                self.advance(0)
            elif any(is_busy() for is_busy in self.is_waited_for):
                assert self.poll(DATABASE_MILLISECONDS), "the database does not answer"
            else:
                return

    def go(self, most: int, chance: random.Random) -> None:
        """Let at most ``most`` things happen, any of those that can."""
        self.follow()
        for _ in range(most):
            pending = self.pending()
            if not pending:
                return
            self.step(chance.choice(pending))

    def settle(self, owner: str = "") -> None:
        """Let everything happen that can without more time (of ``owner`` only, if that is given)."""
        self.follow()
        begun = self.steps
        while pending := [lane for lane in self.pending() if owner in ("", lane.owner)]:
            for lane in pending:
                if lane.is_pending:
                    self.step(lane)
            assert self.steps < begun + MOST_STEPS, "a world does not come to rest"

    def finish(self, *waited: Deferred[T], owner: str = "", seconds: float = 300.0) -> list[T]:
        """Let happen what can until all that is ``waited`` for has happened, if need be after some time; the results.

        :param owner: whose lanes move first, so that as little as possible of other things happens.
        """
        results: list[list[Any]] = []
        for each in waited:
            results.append([])
            each.addBoth(results[-1].append)
        until = self.seconds() + seconds
        self.follow()
        while not all(results):
            mine = [lane for lane in self.pending() if lane.owner == owner] or self.pending()
            if mine:
                self.step(mine[0])
                continue
            assert self.seconds() < until, f"waited {seconds} s for something that did not happen"
            self.pass_time(0.25)
        found = [each[0] for each in results]
        for each in found:
            if isinstance(each, Failure):
                each.raiseException()
        return found

    def pass_time(self, seconds: float) -> None:
        """Let time pass, and what it was waited for happen."""
        for listener in self.on_time:
            listener(self.seconds() + seconds)
        self.advance(seconds)
        self.follow()

    # Sockets

    def addReader(self, reader: Any) -> None:
        """As IReactorFDSet."""
        self._descriptors[reader] = self._descriptors.get(reader, 0) | select.POLLIN

    def addWriter(self, writer: Any) -> None:
        """As IReactorFDSet."""
        self._descriptors[writer] = self._descriptors.get(writer, 0) | select.POLLOUT

    def removeReader(self, reader: Any) -> None:
        """As IReactorFDSet."""
        self._remove(reader, select.POLLIN)

    def removeWriter(self, writer: Any) -> None:
        """As IReactorFDSet."""
        self._remove(writer, select.POLLOUT)

    def _remove(self, descriptor: Any, event: int) -> None:
        left = self._descriptors.pop(descriptor, 0) & ~event
        if left:
            self._descriptors[descriptor] = left

    def poll(self, milliseconds: int) -> bool:
        """Wait for sockets, and serve those that are ready; whether there was one."""
        by_number = {descriptor.fileno(): descriptor for descriptor in self._descriptors}
        poll = select.poll()
        for number, descriptor in by_number.items():
            if number >= 0:
                poll.register(number, self._descriptors[descriptor])
        ready = poll.poll(milliseconds)
        for number, event in ready:
            descriptor = by_number[number]
            wanted = self._descriptors.get(descriptor, 0)
            if wanted & select.POLLOUT and event & (select.POLLOUT | select.POLLERR | select.POLLHUP):
                self._serve(descriptor, descriptor.doWrite)
            if self._descriptors.get(descriptor, 0) & select.POLLIN and event & ~select.POLLOUT:
                self._serve(descriptor, descriptor.doRead)
        return bool(ready)

    def _serve(self, descriptor: Any, serve: Callable[[], Any]) -> None:
        why = serve()
        if why is not None:
            self._descriptors.pop(descriptor, None)
            descriptor.connectionLost(Failure(why))
