"""How the progress of an import is shown: a bar that is drawn over, in a terminal; a line now and then, elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, TextIO

from attrs import define, field

from rpc.console import is_terminal, safe, size, terminal_width, width_of, write

ENDED: Final = frozenset({"done", "failed", "cancelled"})

LINE_SECONDS: Final = 10.0
"""Where there is no bar, a line is written this often, and whenever the state changes."""

RATE_SECONDS: Final = 3.0
"""The rate shown is that of about the last so many seconds."""

BAR: Final = 24


@define
class Meter:
    """Bytes per second, from totals seen at moments of a monotonic clock: an average in which the old fades."""

    rate: float | None = None
    _at: float | None = None
    _total: int = 0

    def saw(self, now: float, total: int) -> None:
        """``total`` bytes are there at ``now`` (seconds)."""
        if self._at is None or total < self._total:
            self.rate = None
        elif now > self._at:
            seconds = now - self._at
            current = (total - self._total) / seconds
            weight = min(1.0, seconds / RATE_SECONDS)
            self.rate = current if self.rate is None else self.rate + weight * (current - self.rate)
        else:
            return
        self._at, self._total = now, total


def line(job: Mapping[str, Any], rate: float | None) -> str:
    """One line for ``job``: state, bytes, share, rate, and what is being fetched."""
    done, total = int(job.get("bytes_done") or 0), int(job.get("bytes_total") or 0)
    parts = [f"import {job['id']}: {job['state']}"]
    if total:
        parts.append(f"{size(done)} of {size(total)} ({_percent(done, total)} %)")
        if job["state"] == "fetching" and rate is not None:
            parts.append(f"{size(rate)}/s")
    if job["state"] == "fetching" and job.get("fetching"):
        parts.append(safe(str(job["fetching"])))
    return ", ".join(parts)


def bar(job: Mapping[str, Any], rate: float | None, width: int) -> str:
    """:func:`line` as a bar that fits into ``width`` columns."""
    done, total = int(job.get("bytes_done") or 0), int(job.get("bytes_total") or 0)
    filled = BAR * min(done, total) // total if total else 0
    text = f"{job['state']:<10} [{'#' * filled}{'.' * (BAR - filled)}]"
    if total:
        text += f" {_percent(done, total):>3} %  {size(done)} of {size(total)}"
        if rate is not None:
            text += f"  {size(rate)}/s"
    if job.get("fetching") and job["state"] == "fetching":
        text += f"  {safe(str(job['fetching']))}"
    while width_of(text) > width:
        text = text[:-1]
    return text


def _percent(done: int, total: int) -> int:
    """Rounded down, so that 100 is said only when all is there."""
    return 100 * min(done, total) // total


@define
class Display:
    """Shows one import on ``stream`` (standard error). ``now`` is a monotonic clock, in seconds."""

    now: Callable[[], float]
    stream: TextIO = field(factory=lambda: sys.stderr)
    _meter: Meter = field(factory=Meter)
    _state: str = ""
    _written: float = 0.0
    _is_drawn: bool = False

    def show(self, job: Mapping[str, Any]) -> None:
        """Show how far ``job`` is."""
        now = self.now()
        self._meter.saw(now, int(job.get("bytes_done") or 0))
        if is_terminal(self.stream):
            width = terminal_width(self.stream) or 80
            # Back to the line's start, draw, erase what an earlier, longer text left.
            self.stream.write("\r" + bar(job, self._meter.rate, width - 1) + "\x1b[K")
            self.stream.flush()
            self._is_drawn = True
        elif job["state"] != self._state or now - self._written >= LINE_SECONDS:
            write(line(job, self._meter.rate), self.stream)
            self._written = now
        self._state = job["state"]

    def close(self) -> None:
        """Leave the line of the bar, so that what follows stands on its own."""
        if self._is_drawn:
            write("", self.stream)
            self._is_drawn = False


def ended(job: Mapping[str, Any]) -> bool:
    """Whether ``job`` is over."""
    return job["state"] in ENDED


def summary(job: Mapping[str, Any]) -> str:
    """What came of ``job``, as a few lines: how it ended, then each problem with product, file and reason.

    The reason that an import failed may be its one problem; that is not said twice.
    """
    outcome = str(job.get("outcome") or "")
    lines = [f"import {job['id']} {job['state']}" + (f": {safe(outcome)}" if outcome else "")]
    problems = list(job.get("problems") or ())
    if len(problems) != 1 or str(problems[0]["reason"]) not in outcome:
        lines += [f"  {problem_line(problem)}" for problem in problems]
    return "\n".join(lines)


def problem_line(problem: Mapping[str, Any]) -> str:
    """One problem of an import: severity, where (source, product, version, file), and why."""
    where = " ".join(str(problem[name]) for name in ("product", "version", "file") if problem.get(name))
    return safe(f"{problem['severity']}: {where or problem.get('source') or 'import'}: {problem['reason']}")


def succeeded(job: Mapping[str, Any]) -> bool:
    """Whether all that was selected is there: the import is done and no problem is an error."""
    return job["state"] == "done" and not any(problem["severity"] == "error" for problem in job.get("problems") or ())
