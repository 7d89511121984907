"""What of a script's outputs is sent, and is what it wrote to RESULT_PATH a result?"""

import errno
import json
import os
import re
import stat
from typing import Iterator, NamedTuple, Optional, Tuple

SENT_BYTES = 1 << 20
"""How much of each output is sent; of a longer one the beginning and the end. The whole stays on this machine."""

RESULT_BYTES = 64 << 10
"""How much of a result the region looks into."""

STATUSES = ("passed", "failed", "degraded", "timedout", "skipped")

_MARK = "\n\n[stanchion: {} bytes left out here; this machine has the whole in {}]\n\n"
_BLOCK = re.compile(r"""(?m)^(?:"status"|'status'|status)[ ]*:[ ]*(?:"([^"\n]*)"|'([^'\n]*)'|([^\s#"'][^\s#]*))?""")
_FLOW = re.compile(r"""\s*(?:"status"|'status'|status)\s*:\s*(?:"([^"]*)"|'([^']*)'|([^\s"']+))?\s*\Z""")
_TOKEN = re.compile(r""""(?:[^"\\]|\\.)*"|'(?:[^']|'')*'|[^"']""", re.DOTALL)


class Sent(NamedTuple):
    """What of a file is sent, and how many bytes were left out in the middle."""

    content: bytes
    omitted: int


def shortened(path: str, limit: int = SENT_BYTES) -> Sent:
    """The content of the file at ``path``, at most ``limit`` bytes of it: the beginning and the end, the cut marked.

    A file that is not there is empty.

    :raises OSError: if it cannot be read.
    """
    try:
        # Scripts may leave anything there. A pipe would be waited for, and a device may never end.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.EINVAL, "it is no file")
            size = file.seek(0, 2)
            file.seek(0)
            if size <= limit:
                return Sent(file.read(limit), 0)
            room = limit - len(_MARK.format(size, path).encode("utf-8"))
            begin = file.read(room // 2)
            file.seek(size - (room - len(begin)))
            end = file.read(room - len(begin))
    except FileNotFoundError:
        return Sent(b"", 0)
    omitted = size - len(begin) - len(end)
    return Sent(begin + _MARK.format(omitted, path).encode("utf-8") + end, omitted)


def read_result(content: bytes) -> Tuple[str, Optional[str]]:
    """The status that a result (YAML: ``status``, ``results``) gives, empty if it gives none; and what is wrong with
    it, as far as one can tell without a parser of YAML, None if nothing is.

    The region reads it with one, and decides; this is so that the runner goes on as the region will see it, and so
    that who watches the console learns of a mistake.
    """
    if not content.strip():
        return "", None
    if len(content) > RESULT_BYTES:
        return "", "it has {} bytes; at most {} are looked into".format(len(content), RESULT_BYTES)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        return "", "it is not UTF-8: {}".format(error)
    if re.search(r"(?m)^ *\t", text):
        return "", "it is indented with tabs, which YAML forbids"
    bare = text.strip()
    status = _status_of_json(bare) if bare.startswith("{") else None
    if status is None:
        matches = map(_FLOW.match, _entries(bare)) if bare.startswith("{") else iter([_BLOCK.search(text)])
        groups = (group for found in matches if found for group in found.groups() if group is not None)
        status = next(groups, "")
    if status and status not in STATUSES:
        # Whole or not at all: what is a secret's would not be known as that any more.
        shown = "is {!r}".format(status) if len(status) <= 40 else "has {} characters".format(len(status))
        return "", "its status {}; it should be one of: {}".format(shown, ", ".join(STATUSES))
    if not re.search(r"""(?m)^(\{|---|#|["']?[A-Za-z_][\w -]*["']?\s*:)""", bare):
        return "", "it is no mapping of status and results"
    return status, None


def _entries(text: str) -> Iterator[str]:
    """The entries of a mapping in YAML's flow style, which is in braces."""
    depth, entry = 0, ""
    for token in _TOKEN.findall(text):
        depth += (token in "{[") - (token in "}]")
        if (depth == 1 and token in ",{") or depth == 0:
            yield entry
            entry = ""
        else:
            entry += token


def _status_of_json(text: str) -> Optional[str]:
    """None if it is no JSON, which is YAML as well."""
    try:
        status = json.loads(text).get("status")
    except (ValueError, RecursionError):
        return None
    return "" if status is None else str(status)
