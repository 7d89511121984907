"""How far is the run? For the progress that people see, and for the summary at its end."""

import threading
from typing import Callable, Dict, NamedTuple

from node.archive import Script
from node.clock import span


class _Running(NamedTuple):
    number: int
    what: str
    since: float
    limit: float


class Tally(object):
    """What is being done. A script is numbered when it begins, and keeps its number. Thread-safe."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._running: Dict[str, _Running] = {}
        self._numbers: Dict[str, int] = {}
        self._total = 0
        self._done = 0

    def expect(self, count: int) -> None:
        """So many more scripts are to run."""
        with self._lock:
            self._total += count

    def begin(self, script: Script, what: str, limit: float = 0.0) -> None:
        """A script begins with ``what``, such as running, for at most ``limit`` seconds (0: no limit)."""
        with self._lock:
            self._number(script)
            self._running[script.label] = _Running(self._numbers[script.label], what, self._now(), limit)

    def end(self, script: Script) -> None:
        """A script has ended."""
        with self._lock:
            self._number(script)
            self._running.pop(script.label, None)
            self._done += 1

    def _number(self, script: Script) -> None:
        self._numbers.setdefault(script.label, len(self._numbers) + 1)

    def place(self, script: Script) -> str:
        """Which of how many a script is: ``3/12``."""
        with self._lock:
            self._number(script)
            return "{}/{}".format(self._numbers[script.label], max(self._total, len(self._numbers)))

    def progress(self) -> str:
        """What runs, since when, and how long it may take: ``3/12 50-memtest: running, 12 min of 60 min``."""
        with self._lock:
            if not self._running:
                return "{} of {} scripts have run".format(self._done, self._total)
            now = self._now()
            return "; ".join(
                "{}/{} {}: {}, {}{}".format(
                    running.number, self._total, label, running.what, span(now - running.since),
                    " of {}".format(span(running.limit)) if running.limit else "",
                )
                for label, running in sorted(self._running.items(), key=lambda pair: pair[1].number)
            )  # fmt: skip
