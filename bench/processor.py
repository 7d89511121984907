"""How much a process has used the processor, which what else the machine does changes little."""

from __future__ import annotations

import os
from pathlib import Path


def seconds_of(pid: int) -> float:
    """The processor's seconds that a process has taken so far, by itself and by what it had the kernel do."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
