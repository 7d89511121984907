"""What did an earlier run of the embedded server leave behind, and how is it made safe to start again?

PostgreSQL refuses to start over a pid file whose number some process has, which after a crash may be any process; and
it must not start while processes of a killed server still have its memory. So the processes that really work in the
data directory are found in ``/proc`` and ended, and only then the stale files are removed. The caller holds the
directory's lock, so none of this belongs to a region that is alive.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

PID_FILE = "postmaster.pid"


def processes_in(*directories: Path) -> list[int]:
    """The ids of PostgreSQL processes that work in one of ``directories``: a server, with its children, does so."""
    wanted = set()
    for directory in directories:
        try:
            found = os.stat(directory)
        except FileNotFoundError:
            continue  # nothing works in a directory that is not there
        wanted.add((found.st_dev, found.st_ino))
    return sorted(_processes_in(wanted)) if wanted else []


def _processes_in(wanted: set[tuple[int, int]]) -> Iterator[int]:
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            found = os.stat(f"/proc/{entry}/cwd")
            program = os.path.basename(os.readlink(f"/proc/{entry}/exe"))
        except OSError:
            continue  # it ended, or is another user's, whose it cannot be
        # " (deleted)" follows when the installation was upgraded under it.
        if (found.st_dev, found.st_ino) in wanted and program.split(" ")[0] == "postgres":
            yield int(entry)


def send(pids: list[int], number: signal.Signals) -> None:
    """Signal those of ``pids`` that still exist."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue  # it has ended, which is what the signal was for


def remove_stale_files(data: Path, unfinished: Path, sockets: Path) -> list[str]:
    """Remove what only a running server, or a running ``initdb``, may have; returns the names that were there."""
    removed = []
    for path in (data / PID_FILE, *sockets.glob(".s.PGSQL.*")):
        try:
            path.unlink()
        except FileNotFoundError:
            continue  # it is not there, which is what was wanted; only what was there is told
        removed.append(path.name)
    if unfinished.exists():
        shutil.rmtree(unfinished)
        removed.append(unfinished.name)
    return removed
