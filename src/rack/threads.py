"""Where the rack's blocking work runs: in threads of its own, which never keep the process from ending.

Hashing a large file cannot be interrupted. The work is made so that it may stop at any point (the next start recovers),
so the threads are daemon threads and a rack that is told to stop does not wait for them for long.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThreadPool
from twisted.logger import Logger
from twisted.python.threadpool import ThreadPool

P = ParamSpec("P")
T = TypeVar("T")

log = Logger()


def _daemon(*arguments: Any, **keywords: Any) -> threading.Thread:
    return threading.Thread(*arguments, daemon=True, **keywords)


class _DaemonThreads(ThreadPool):
    threadFactory = staticmethod(_daemon)  # type: ignore[assignment]  # documented to be any maker of threads


class Threads:
    """At most ``size`` threads. :attr:`run` is what :class:`rpc.fetch.RunInThread` describes."""

    def __init__(self, reactor: Any, size: int) -> None:
        self._reactor = reactor
        self._pool = _DaemonThreads(0, size, "rack")
        self._working = 0
        self._pool.start()

    def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Deferred[T]:
        """Run ``function`` in a thread; a Deferred of its result. Cancelling that does not stop the function."""
        self._working += 1
        started: Deferred[T] = deferToThreadPool(self._reactor, self._pool, function, *args, **kwargs)
        return started.addBoth(self._ended)

    def _ended(self, result: T) -> T:
        self._working -= 1
        return result

    def stop(self) -> None:
        """End the threads. One that is at work is left to itself, and to the end of the process."""
        if self._working:
            log.info("{count} tasks of the disk are left unfinished; the next start looks after them.",
                     count=self._working)  # fmt: skip
        else:
            self._pool.stop()
