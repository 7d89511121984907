"""How does memory that was used once, for something large, go back to the machine?

The C library keeps what was freed below what is still used, for the next time. A daemon that once held fifty outputs of
15 MiB would have hundreds of megabytes for ever; asked to, the C library gives them back.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

_LIBC: Final[Any] = ctypes.CDLL(None)


def give_back() -> bool:
    """Give back what the C library keeps without using it; whether it can (glibc's can). Takes some milliseconds, in
    which threads that allocate wait: to be run in a thread, and seldom."""
    trim = getattr(_LIBC, "malloc_trim", None)
    return trim is not None and bool(trim(0))
