"""How is a program of PostgreSQL started so that it ends when the region does, whatever ends the region?

Run as a script (standard library only, before any privilege is dropped): becomes the given user, asks the kernel for
a signal when its parent dies, and becomes the program. With ``--reach`` it instead says, as that user, which part of a
path cannot be entered.

    launch.py --parent PID --signal N [--user UID GID] -- PROGRAM [ARGUMENT ...]
    launch.py [--user UID GID] --reach PATH
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> NoReturn:
    """Become the program; or exit with 0, or with 1 after a line that says what was in the way."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int)
    parser.add_argument("--signal", type=int, default=0)
    parser.add_argument("--user", type=int, nargs=2)
    parser.add_argument("--reach", type=Path)
    parser.add_argument("program", nargs="*")
    options = parser.parse_args(arguments)
    if options.user is not None:
        uid, gid = options.user
        os.setgroups([gid])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    if options.reach is not None:
        sys.exit(_reach(options.reach))
    os.umask(0o077)
    os.chdir("/")
    # Ctrl-C in the region's terminal is for the region, which stops its database in its own time.
    os.setsid()
    if options.signal:
        # After the change of user, which would undo it; kept over exec.
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, options.signal, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
        if os.getppid() != options.parent:
            sys.exit("the region ended while its database was being started")
    os.execv(options.program[0], options.program)


def _reach(path: Path) -> int:
    """Print the outermost part of ``path`` that the user cannot enter (or, for a file, execute)."""
    for part in [*reversed(path.parents), path]:
        if not os.access(part, os.X_OK):
            sys.stdout.write(f"{part}\n")
            return 1
    return 0


if __name__ == "__main__":
    main(sys.argv[1:])
