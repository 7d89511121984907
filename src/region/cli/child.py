"""Runs ``twistd`` or ``stanchion`` as a child that cannot outlive the process that started it.

``python -P -m region.cli.child PARENT PROGRAM ARGUMENT…``: in a process group of its own, so that a Ctrl-C in the
terminal reaches only the parent, which then stops its children in order; and with the kernel's promise of a SIGTERM
when the parent dies, however it dies (prctl(2), PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

PR_SET_PDEATHSIG: Final = 1


def tie_to(parent: int) -> None:
    """Have this process get SIGTERM when its parent dies; end at once if it died already.

    :raises OSError: if the kernel refuses.
    """
    os.setpgid(0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit(f"the process {parent} that started this one is gone")


def main() -> None:
    """Become the program that the command line names."""
    _, parent, program, *arguments = sys.argv
    tie_to(int(parent))
    sys.argv = [program, *arguments]
    if program == "twistd":
        from twisted.scripts.twistd import run

        run()
    else:
        from rpc.cli import main as stanchion

        sys.exit(stanchion())


if __name__ == "__main__":
    main()
