"""How a command of the command line runs what needs the reactor, and gets its result."""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from twisted.internet.defer import Deferred
from twisted.logger import (
    FilteringLogObserver,
    LogLevel,
    LogLevelFilterPredicate,
    globalLogBeginner,
    textFileLogObserver,
)
from twisted.python.failure import Failure

T = TypeVar("T")


def run_in_reactor(work: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
    """Run the reactor for ``work``, which is given it, and return what that returns, or raise what it raises.

    Errors that are logged meanwhile go to stderr. To be called once in a process: a reactor does not start again.

    :raises KeyboardInterrupt: if the reactor was stopped (Ctrl-C) before the work had ended.
    """
    # Importing it makes it, and commands that do not need one are not to wait for that.
    from twisted.internet import reactor as installed

    reactor: Any = installed
    errors = LogLevelFilterPredicate(defaultLogLevel=LogLevel.error)
    observer = FilteringLogObserver(textFileLogObserver(sys.stderr), [errors])
    globalLogBeginner.beginLoggingTo([observer], redirectStandardIO=False)
    results: list[T | Failure] = []

    def begin() -> None:
        done = Deferred.fromCoroutine(work(reactor))
        done.addBoth(end)

    def end(result: T | Failure) -> None:
        results.append(result)
        reactor.callLater(0, reactor.stop)

    reactor.callWhenRunning(begin)
    reactor.run()
    if not results:
        raise KeyboardInterrupt
    result = results[0]
    if isinstance(result, Failure):
        result.raiseException()
    return result
