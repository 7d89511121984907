"""Where does a person read what the runner does? On stderr, at the machine's console, and in syslog.

One line for each event of interest. Whatever is written, no credential is in it.
"""

import logging
import logging.handlers
import os
import sys
import threading
import time
import urllib.parse
from typing import Callable, Iterable, List, Optional

SYSLOG = "/dev/log"
CONSOLE = "/dev/console"

INFO = "info"
WARNING = "warning"
ERROR = "error"

_SYSLOG_LEVELS = {INFO: logging.INFO, WARNING: logging.WARNING, ERROR: logging.ERROR}


class Console(object):
    """Writes lines. Thread-safe, and never fails: a line that can be written nowhere is not worth a script's result.

    :param secrets: words that are replaced wherever they appear.
    """

    def __init__(
        self,
        writers: Optional[List[Callable[[str, str], None]]] = None,
        secrets: Iterable[str] = (),
    ) -> None:
        self._writers = standard_writers() if writers is None else writers
        self._secrets: List[str] = []
        self.hide(secrets)
        self._lock = threading.Lock()

    def hide(self, secrets: Iterable[str]) -> None:
        """From now on replace these too, also as they stand in a URL or header."""
        found = {form for secret in secrets if secret for form in (secret, urllib.parse.quote(secret, safe=""))}
        self._secrets = sorted({*self._secrets, *found}, key=len, reverse=True)

    def hidden(self, text: str) -> str:
        """``text`` with every secret replaced. Cut it afterwards: a part of a secret would not be found."""
        for secret in self._secrets:
            text = text.replace(secret, "[hidden]")
        return text

    def say(self, message: str, level: str = INFO) -> None:
        """Write one line. Line ends and control characters in it become spaces."""
        line = "".join(character if character.isprintable() else " " for character in self.hidden(message))
        with self._lock:
            for write in self._writers:
                write(level, line)

    def warn(self, message: str) -> None:
        """Write one line about something that may need a person."""
        self.say(message, WARNING)

    def error(self, message: str) -> None:
        """Write one line about something that is lost or failed."""
        self.say(message, ERROR)


def standard_writers() -> List[Callable[[str, str], None]]:
    """Those that there are on this machine: stderr, the console unless that is stderr, syslog."""
    writers = [_stream_writer(sys.stderr)]
    try:
        same = os.fstat(sys.stderr.fileno()).st_rdev == os.stat(CONSOLE).st_rdev
    except (OSError, ValueError, AttributeError):
        same = False
    if not same and os.access(CONSOLE, os.W_OK):
        writers.append(_console_writer())
    if os.path.exists(SYSLOG):
        syslog = _syslog_writer()
        if syslog is not None:
            writers.append(syslog)
    return writers


def _stamped(level: str, line: str) -> str:
    mark = {INFO: "", WARNING: "WARNING ", ERROR: "ERROR "}[level]
    return "{} stanchion: {}{}\n".format(time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), mark, line)


def _stream_writer(stream: object) -> Callable[[str, str], None]:
    def write(level: str, line: str) -> None:
        try:
            stream.write(_stamped(level, line))  # type: ignore[attr-defined]  # a text stream
            stream.flush()  # type: ignore[attr-defined]
        except (OSError, ValueError):
            # Closed, or full. There is nowhere left to say it; the other writers have the line.
            return

    return write


def _console_writer() -> Callable[[str, str], None]:
    def write(level: str, line: str) -> None:
        try:
            # Opened each time, as the kernel may hang it up; not to become this process's terminal, nor to wait for it.
            descriptor = os.open(CONSOLE, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
        except OSError:
            return
        try:
            os.write(descriptor, _stamped(level, line).replace("\n", "\r\n").encode("utf-8", "replace"))
        except OSError:
            # As above.
            return
        finally:
            os.close(descriptor)

    return write


def _syslog_writer() -> Optional[Callable[[str, str], None]]:
    try:
        handler = logging.handlers.SysLogHandler(address=SYSLOG, facility=logging.handlers.SysLogHandler.LOG_DAEMON)
    except OSError:
        return None
    handler.ident = "stanchion: "
    # What logging does with its own errors is to print a traceback on stderr for each line.
    handler.handleError = lambda record: None  # type: ignore[method-assign]

    def write(level: str, line: str) -> None:
        handler.emit(logging.LogRecord("stanchion", _SYSLOG_LEVELS[level], "", 0, line, (), None))

    return write
