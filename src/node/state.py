"""What did this runner do before it was killed, or the machine rebooted? A journal of one file, replaced as a whole.

It has how often each script was begun, and a record of what is done once and for all: how a script ended, that the
tests have begun, and what the final signal says.
"""

import json
import os
import threading
from typing import Any, Callable, Dict, Mapping, Optional


class State(object):
    """The journal at ``path``. What is said to it is on the disk when it returns, if the disk takes it at all.

    Thread-safe: scripts that run together end when they like.

    :param complain: called with a sentence when the disk does not.
    """

    def __init__(self, path: str, complain: Callable[[str], None]) -> None:
        self._path = path
        self._complain = complain
        self._lock = threading.Lock()
        self._begun: Dict[str, int] = {}
        self._kept: Dict[str, Dict[str, Any]] = {}
        self._read()

    def _read(self) -> None:
        try:
            with open(self._path, "rb") as file:
                values = json.loads(file.read().decode("utf-8"))
            self._begun = {str(label): int(count) for label, count in values["begun"].items()}
            self._kept = {str(key): dict(record) for key, record in values["kept"].items()}
        except FileNotFoundError:
            # A first start.
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            self._complain("{} cannot be read ({}); scripts that had run may run once more".format(self._path, error))

    def begun(self, label: str) -> int:
        """How often the script was begun."""
        with self._lock:
            return self._begun.get(label, 0)

    def begin(self, label: str) -> None:
        """The script is begun now."""
        with self._lock:
            self._begun[label] = self._begun.get(label, 0) + 1
            self._write()

    def kept(self, key: str) -> Optional[Dict[str, Any]]:
        """The record under ``key``; None if there is none."""
        with self._lock:
            return self._kept.get(key)

    def records(self, prefix: str) -> Mapping[str, Dict[str, Any]]:
        """All records whose keys begin with ``prefix``, by key."""
        with self._lock:
            return {key: record for key, record in self._kept.items() if key.startswith(prefix)}

    def keep(self, key: str, record: Dict[str, Any]) -> None:
        """Keep a record."""
        with self._lock:
            self._kept[key] = record
            self._write()

    def _write(self) -> None:
        partial = self._path + ".part"
        try:
            with open(partial, "wb") as file:
                file.write(json.dumps({"begun": self._begun, "kept": self._kept}, sort_keys=True).encode("utf-8"))
                file.flush()
                os.fsync(file.fileno())
            os.rename(partial, self._path)
        except OSError as error:
            self._complain(
                "{} cannot be written ({}): after a restart scripts may run once more".format(self._path, error)
            )
