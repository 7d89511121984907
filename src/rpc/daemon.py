"""How a daemon ends when it could not start or cannot go on: one clear line, a clean stop, exit status 1.

``twistd`` itself exits with 0 whenever the reactor was stopped in an orderly way, so that systemd would take a
daemon that failed to start for one that was asked to stop.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from typing import Any, Final

from twisted.logger import Logger

log = Logger()


YOUNG: Final = 50_000
"""Objects that are made before cycles among them are looked for; Python's own number is 700."""


def collect_seldom() -> None:
    """Have Python look for cycles of garbage less often: a daemon makes few, and a round over a thousand links makes
    tens of thousands of objects that all go by themselves. What waits meanwhile is a few megabytes at most."""
    gc.set_threshold(YOUNG, 10, 10)


def spare_what_is_there() -> None:
    """Have Python no more look for garbage among what there is now: to be called when all that a daemon keeps for good
    is there, and nobody waits for it yet. Otherwise each full look goes through all modules, for tens of milliseconds,
    in which nothing else is done; and making thousands of objects at a time brings several such looks about."""
    gc.collect()
    gc.freeze()


def give_up(reactor: Any, reason: str) -> None:
    """Log ``reason`` as critical, stop the reactor (services stop as usual), and make the process exit with 1."""
    log.critical("{reason}", reason=reason)
    # Services have stopped by the time that this handler runs; what other handlers there are is lost, on purpose: an
    # exit status can be set from here in no other way.
    atexit.register(_exit_with_failure)
    if reactor.running:
        reactor.stop()
    else:
        reactor.callWhenRunning(reactor.stop)


def _exit_with_failure() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
