"""What of a script's outputs is sent, and is what it wrote to RESULT_PATH a result?"""

import os
import re
from typing import NamedTuple, Optional

SENT_BYTES = 1 << 20
"""How much of each output is sent; of a longer one the beginning and the end. The whole stays on this machine."""

_STATUS = re.compile(r"(?m)^[{\s]*[\"']?status[\"']?\s*:\s*[\"']?([^\"',}\s#]*)")

STATUSES = ("passed", "failed", "degraded", "timedout", "skipped")


class Sent(NamedTuple):
    """What of a file is sent, and how many bytes were left out in the middle."""

    content: bytes
    omitted: int


def shortened(path: str, limit: int = SENT_BYTES) -> Sent:
    """The content of the file at ``path``, at most ``limit`` bytes of it: the beginning and the end, the cut marked.

    A file that is not there is empty.
    """
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            if size <= limit:
                return Sent(file.read(limit), 0)
            mark = "\n\n[stanchion: {} bytes left out here; this machine has the whole in {}]\n\n"
            room = limit - len(mark.format(size, path).encode("utf-8"))
            begin = file.read(room // 2)
            rest = room - len(begin)
            file.seek(size - rest)
            end = file.read(rest)
    except FileNotFoundError:
        return Sent(b"", 0)
    omitted = size - len(begin) - len(end)
    return Sent(begin + mark.format(omitted, path).encode("utf-8") + end, omitted)


def status_of(content: bytes) -> str:
    """The status that a result says, in lower case; empty if it says none."""
    found = _STATUS.search(content.decode("utf-8", "replace"))
    return found.group(1).lower() if found else ""


def problem_of(content: bytes) -> Optional[str]:
    """What is wrong with a result (YAML: ``status``, ``results``), as far as one can tell without a whole parser.

    The region reads it with one; this is so that who watches the console learns of it too. None if nothing is.
    """
    if not content.strip():
        return None
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        return "it is not UTF-8: {}".format(error)
    if "\t" in re.sub(r"(?m)[^\t\n].*$", "", text):
        return "it is indented with tabs, which YAML forbids"
    status = status_of(content)
    if status and status not in STATUSES:
        return "its status is {!r}; it should be one of: {}".format(status, ", ".join(STATUSES))
    if not re.search(r"(?m)^\s*(\{|-{3}|#|[\"']?[A-Za-z_][\w -]*[\"']?\s*:)", text):
        return "it is no mapping of status and results"
    return None
