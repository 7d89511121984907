"""How does the runner stay alive and get its turn when a test takes all memory and all processors?

It comes first and is the last that the kernel ends; what it runs is as any other process. All of it is best effort: it
needs root, and some containers forbid it.
"""

import os
from typing import Callable, Optional

OWN_NICE = -20
OWN_OOM = -1000
"""So far from the kernel's mind as can be when memory runs out (proc(5), oom_score_adj)."""


class Priority(object):
    """What this process had before :meth:`protect`, so that what it starts can be given that.

    :param say: called with a sentence about what cannot be done.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._nice: Optional[int] = None
        self._oom: Optional[int] = None

    def protect(self) -> None:
        """Put this process first. To be called before it has threads."""
        refused = []
        try:
            nice = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, 0, OWN_NICE)
            self._nice = nice
        except OSError as error:
            refused.append("nice ({})".format(error.strerror))
        try:
            with open("/proc/self/oom_score_adj") as file:
                oom = int(file.read())
            _write_oom("self", OWN_OOM)
            self._oom = oom
        except (OSError, ValueError) as error:
            refused.append("oom_score_adj ({})".format(getattr(error, "strerror", None) or error))
        if refused:
            self._say("the runner runs as any other process; it may not set: {}".format(", ".join(refused)))

    def release(self, pid: int) -> None:
        """Make a process that was just started as any other."""
        try:
            if self._nice is not None:
                os.setpriority(os.PRIO_PROCESS, pid, self._nice)
            if self._oom is not None:
                _write_oom(str(pid), self._oom)
        except ProcessLookupError:
            # It has ended already.
            return
        except OSError as error:
            self._say("process {} keeps the runner's own priority: {}".format(pid, error))


def _write_oom(pid: str, value: int) -> None:
    with open("/proc/{}/oom_score_adj".format(pid), "w") as file:
        file.write(str(value))
