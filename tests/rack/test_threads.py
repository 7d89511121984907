"""The rack's threads: what runs in them, and that none of them keeps the process from ending."""

from __future__ import annotations

import threading
from queue import Queue
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from rack.service import PATIENCE, RackService
from rack.threads import Threads


class Reactor:
    """Takes what threads want to be called, until the test calls it."""

    def __init__(self) -> None:
        self.calls: Queue[Any] = Queue()

    def callFromThread(self, function: Any, *arguments: Any) -> None:
        self.calls.put((function, arguments))

    def turn(self) -> None:
        function, arguments = self.calls.get(timeout=60)
        function(*arguments)


class TestThreads(SynchronousTestCase):
    def test_results_and_errors_come_back(self) -> None:
        reactor = Reactor()
        threads = Threads(reactor, 1)
        self.addCleanup(threads.stop)
        summed = threads.run(sum, [1, 2])
        reactor.turn()
        self.assertEqual(self.successResultOf(summed), 3)
        failed: Deferred[int] = threads.run(int, "x")
        reactor.turn()
        self.failureResultOf(failed, ValueError)

    def test_a_thread_that_is_at_work_is_not_waited_for(self) -> None:
        reactor = Reactor()
        threads = Threads(reactor, 1)
        begun, end = threading.Event(), threading.Event()
        self.addCleanup(end.set)
        is_daemon: list[bool] = []

        def work() -> None:
            is_daemon.append(threading.current_thread().daemon)
            begun.set()
            end.wait(60)

        threads.run(work)
        self.assertTrue(begun.wait(60))
        threads.stop()
        self.assertFalse(end.is_set())
        self.assertEqual(is_daemon, [True])


class TestPatience(SynchronousTestCase):
    def test_a_sync_that_does_not_stop_is_not_waited_for_longer_than_that(self) -> None:
        clock = Clock()
        service = RackService.__new__(RackService)
        service._reactor = clock
        waiting = Deferred.fromCoroutine(service._in_time(Deferred()))
        clock.advance(PATIENCE - 0.1)
        self.assertNoResult(waiting)
        clock.advance(0.1)
        self.successResultOf(waiting)
