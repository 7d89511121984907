"""How a daemon's log looks: one line an event, from ``info`` up, with what systemd needs to know its priority.

What Twisted says of its own running, where a part of ours says the same or where it means nothing to an operator, is
left out.
Named on the command line as ``twistd --logger rpc.logs.observer``. ``STANCHION_LOG_LEVEL=debug`` in the environment
shows everything. Under systemd each line begins with its priority (sd-daemon(3)), and the journal has the time.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from typing import IO, Any, Final

from twisted.logger import (
    FileLogObserver,
    FilteringLogObserver,
    ILogFilterPredicate,
    ILogObserver,
    LogLevel,
    LogLevelFilterPredicate,
    PredicateResult,
    eventAsText,
    formatTime,
)
from zope.interface import implementer

VARIABLE: Final = "STANCHION_LOG_LEVEL"

_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")

_PRIORITIES: Final = {
    LogLevel.debug: 7, LogLevel.info: 6, LogLevel.warn: 4, LogLevel.error: 3, LogLevel.critical: 2,
}  # fmt: skip


_CHATTER: Final[Mapping[str, frozenset[str] | None]] = {
    "log_legacy": None,  # which port a factory listens on
    "twisted.web.http.HTTPChannel": None,  # which idle connection it closes
    "twisted.scripts._twistd_unix.UnixAppLogger": frozenset({"reactor class: {reactor}."}),
    "twisted.internet.base": frozenset({"Main loop terminated."}),
}
"""What is left out at ``info``: of this namespace the events with these formats, or all."""


@implementer(ILogFilterPredicate)
class WithoutChatter:
    """Leaves out what :data:`_CHATTER` names."""

    def __call__(self, event: Mapping[str, Any]) -> Any:
        """Whether ``event`` is left out."""
        namespace = event.get("log_namespace", "")
        if namespace not in _CHATTER or event.get("log_level") is not LogLevel.info:
            return PredicateResult.maybe
        formats = _CHATTER[namespace]
        return PredicateResult.no if formats is None or event.get("log_format") in formats else PredicateResult.maybe


def level_named(name: str) -> Any:
    """The level with this name, and ``info`` for none.

    :raises ValueError: if there is no such level.
    """
    known = {level.name: level for level in _PRIORITIES}
    if not name:
        return LogLevel.info
    if name.lower() not in known:
        raise ValueError(f"{VARIABLE} is {name!r}, not one of {', '.join(known)}")
    return known[name.lower()]


def line(event: Mapping[str, Any], *, journal: bool) -> str:
    """The text of one event, with its traceback if it has one; every line of it has the priority, for the journal."""
    level = event.get("log_level") or LogLevel.info
    text = eventAsText(event, includeTraceback=True, includeTimestamp=False, includeSystem=False)  # type: ignore[arg-type]  # it reads only
    where = event.get("log_namespace") or event.get("log_system") or "-"
    if not text:
        return ""
    if not journal:
        first, *rest = _lines(text)
        begin = f"{formatTime(event.get('log_time'))} {level.name:8} {where}: {first}\n"
        return "".join([begin, *(f"  {each}\n" for each in rest)])
    prefix = f"<{_PRIORITIES[level]}>"
    first, *rest = _lines(text)
    return "".join([f"{prefix}{where}: {first}\n", *(f"{prefix}  {each}\n" for each in rest)])


def _lines(text: str) -> list[str]:
    """The lines of ``text``, at least one, with other control characters as escapes: what a peer sent may be in it, and
    must neither look like an event of its own nor reach a terminal."""
    return [_CONTROL.sub(_escape, each) for each in text.rstrip("\n").split("\n")]


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")


def observer(stream: IO[str] | None = None, environment: Mapping[str, str] = os.environ) -> ILogObserver:
    """The observer that twistd is to log to.

    :raises SystemExit: if the environment names no level that there is.
    """
    try:
        level = level_named(environment.get(VARIABLE, ""))
    except ValueError as error:
        raise SystemExit(f"stanchion: {error}") from error
    journal = "JOURNAL_STREAM" in environment
    writing = FileLogObserver(stream or sys.stdout, lambda event: line(event, journal=journal))
    predicates: list[Any] = [LogLevelFilterPredicate(defaultLogLevel=level)]
    if level is not LogLevel.debug:
        predicates.append(WithoutChatter())
    filtering: ILogObserver = FilteringLogObserver(writing, predicates)
    return filtering
