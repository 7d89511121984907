"""What every child process of the region that answers questions does: it reads them, answers, and dies with the region.

:mod:`region.upstream.process` is the other end.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_LENGTH: Final = struct.Struct(">Q")


def die_with(parent: int) -> None:
    """Have this process killed when ``parent``, its parent, ends in whatever way (Linux, ``prctl(2)``)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        sys.exit("the region ended before its child began")


def serve(answer: Callable[[bytes], bytes], memory: int) -> None:
    """Answer the questions on standard input until it ends; each, and each answer, comes after its length.

    The process dies with the one whose id is its first argument, and may use ``memory`` bytes of address space.
    """
    die_with(int(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    while length := questions.read(_LENGTH.size):
        said = answer(questions.read(*_LENGTH.unpack(length)))
        answers.write(_LENGTH.pack(len(said)) + said)
        answers.flush()
