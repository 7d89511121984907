"""How a command of ``stanchion`` speaks: tables for people, JSON for programs, one line when it fails.

Text that came from elsewhere is made safe for a terminal here: control characters are shown, never sent. A table is
as wide as the terminal and wraps its longest columns; when the output is not a terminal nothing is wrapped or
coloured, so that every row is one line for ``grep`` and ``awk``.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Final, TextIO


class Status(IntEnum):
    """What the exit status of ``stanchion`` says."""

    YES = 0
    """It was done, or the answer is yes."""
    NO = 1
    """The answer is no: not deployable, the import failed, there is no such thing."""
    USAGE = 2
    """The command line or a file that it names is wrong."""
    UNREACHABLE = 3
    """No answer could be had: the region cannot be reached, failed, or cannot know at the moment."""
    INTERRUPTED = 130
    """Ctrl-C."""


class CommandFailed(Exception):
    """A command could not do what it was asked; ``str()`` is one or a few lines that say why and what to do."""

    def __init__(self, reason: str, status: Status) -> None:
        super().__init__(reason)
        self.status = status


COLOURS: Final[Mapping[str, str]] = {
    "deployable": "32", "ready": "32", "done": "32", "connected": "32",
    "arriving": "33", "syncing": "33", "queued": "33", "reading": "33", "fetching": "33", "publishing": "33",
    "partial": "33",
    "warning": "33", "undetermined": "35", "unknown": "31", "failed": "31", "error": "31", "cancelled": "31",
}  # fmt: skip


def write(text: str = "", stream: TextIO | None = None) -> None:
    """Write ``text`` and a line end to ``stream`` (standard output)."""
    stream = sys.stdout if stream is None else stream
    stream.write(text + "\n")
    stream.flush()


def write_json(document: object) -> None:
    """Write ``document`` to standard output as indented JSON."""
    write(json.dumps(document, indent=2, ensure_ascii=not _speaks_unicode(sys.stdout)))


def complain(text: str) -> None:
    """Write ``text`` to standard error, after the program's name."""
    write("stanchion: " + safe(text, keep="\n"), sys.stderr)


def safe(text: str, keep: str = "") -> str:
    """``text`` with its control characters shown as escapes, except those in ``keep``."""
    return "".join(
        char if char in keep or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp") else _escape(char)
        for char in text
    )


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def size(count: float) -> str:
    """``count`` bytes for people: ``"340 MB"``, ``"1.2 GB"`` (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 9.95 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def duration(seconds: float) -> str:
    """``seconds`` for people: ``"42 s"``, ``"3 min"``, ``"5 h"``, ``"2 days"``."""
    for limit, one, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if abs(seconds) < limit:
            return f"{seconds / one:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"


def is_terminal(stream: TextIO) -> bool:
    """Whether people look at ``stream`` in a terminal that can do more than print lines."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def painted(word: str, stream: TextIO | None = None, text: str | None = None) -> str:
    """``text`` (default: ``word``) in the colour of the state ``word``, if ``stream`` shows colours."""
    text = word if text is None else text
    stream = sys.stdout if stream is None else stream
    colour = COLOURS.get(word)
    if colour is None or not is_terminal(stream) or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{colour}m{text}\x1b[0m"


def width_of(text: str) -> int:
    """How many columns of a terminal ``text`` takes."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def terminal_width(stream: TextIO | None = None) -> int | None:
    """The columns to fit into; None when ``stream`` is no terminal and ``COLUMNS`` does not say."""
    stream = sys.stdout if stream is None else stream
    if not stream.isatty() and not os.environ.get("COLUMNS", "").isdigit():
        return None
    return max(shutil.get_terminal_size((80, 24)).columns, 20)


def table(head: Sequence[str], rows: Sequence[Sequence[object]], *, width: int | None = None) -> str:
    """The rows under their headings, in columns. Numbers stand right; long text wraps to fit ``width``, if given."""
    texts = [["" if cell is None else safe(str(cell)) for cell in row] for row in rows]
    numeric = [
        any(isinstance(row[n], int) for row in rows) and all(isinstance(row[n], int) or row[n] == "" for row in rows)
        for n in range(len(head))
    ]
    widths = [max(map(width_of, [title, *(row[n] for row in texts)])) for n, title in enumerate(head)]
    if width is not None:
        widths = _fitted(widths, [width_of(title) for title in head], width - 2 * (len(head) - 1))
    lines = [_line(head, widths, numeric)]
    for row in texts:
        cells = [_wrapped(cell, room) for cell, room in zip(row, widths, strict=True)]
        for n in range(max(map(len, cells))):
            lines.append(_line([cell[n] if n < len(cell) else "" for cell in cells], widths, numeric))
    return "\n".join(lines)


def write_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Write a table to standard output, fitted to the terminal."""
    write(table(head, rows, width=terminal_width()))


def _fitted(widths: list[int], least: list[int], room: int) -> list[int]:
    """The widths, with the widest columns cut until they fit into ``room``, but none under its heading or 8."""
    widths = list(widths)
    while sum(widths) > room:
        able = [n for n, width in enumerate(widths) if width > max(least[n], 8)]
        if not able:
            break
        widths[max(able, key=lambda n: widths[n])] -= 1
    return widths


def _wrapped(cell: str, room: int) -> list[str]:
    if width_of(cell) <= room:
        return [cell]
    lines = [""]
    for word in cell.split():
        joined = f"{lines[-1]} {word}" if lines[-1] else word
        if width_of(joined) <= room:
            lines[-1] = joined
            continue
        lines.append("")
        for char in word:  # a word that is longer than a line is cut where the line ends
            if width_of(lines[-1] + char) > room:
                lines.append("")
            lines[-1] += char
    return lines if lines[0] else lines[1:]


def _line(cells: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> str:
    parts = []
    for cell, room, right in zip(cells, widths, numeric, strict=True):
        padding = " " * (room - width_of(cell))
        parts.append(padding + cell if right else painted(cell) + padding)
    return "  ".join(parts).rstrip()


def _speaks_unicode(stream: TextIO) -> bool:
    return (getattr(stream, "encoding", None) or "ascii").lower().replace("-", "") in ("utf8", "utf16")
