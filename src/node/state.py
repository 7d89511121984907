"""What did this runner do before it was killed, or the machine rebooted? A journal of one file, replaced as a whole."""

import json
import os
from typing import Any, Callable, Dict, Optional


class State(object):
    """The journal at ``path``. What is said to it is on the disk when it returns, if the disk takes it at all.

    :param complain: called with a sentence when it does not.
    """

    def __init__(self, path: str, complain: Callable[[str], None]) -> None:
        self._path = path
        self._complain = complain
        self._values = self._read()

    def _read(self) -> Dict[str, Any]:
        try:
            with open(self._path, "rb") as file:
                values = json.loads(file.read().decode("utf-8"))
            if isinstance(values, dict) and all(isinstance(values.get(key, {}), dict) for key in ("begun", "ended")):
                return values
            self._complain("{} is no journal; scripts that had run may run once more".format(self._path))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            self._complain("{} cannot be read ({}); scripts that had run may run once more".format(self._path, error))
        return {}

    def begun(self, label: str) -> int:
        """How often the script was begun."""
        found = self._values.get("begun", {}).get(label, 0)
        return found if isinstance(found, int) else 0

    def begin(self, label: str) -> None:
        """The script is begun now."""
        begun = dict(self._values.get("begun", {}))
        begun[label] = self.begun(label) + 1
        self._write(begun=begun)

    def ended(self, label: str) -> Optional[Dict[str, Any]]:
        """What :meth:`end` was told of the script; None if it has not ended."""
        found = self._values.get("ended", {}).get(label)
        return found if isinstance(found, dict) else None

    def all_ended(self) -> Dict[str, Dict[str, Any]]:
        """All that have, by label."""
        return {label: found for label, found in self._values.get("ended", {}).items() if isinstance(found, dict)}

    def end(self, label: str, record: Dict[str, Any]) -> None:
        """The script has ended, as ``record`` says; its outputs are on the disk."""
        ended = dict(self._values.get("ended", {}))
        ended[label] = record
        self._write(ended=ended)

    def is_spooled(self, what: str) -> bool:
        """Whether ``what`` (a script's label, or a final signal) is in the spool, or was and is delivered."""
        found = self._values.get("spooled", [])
        return isinstance(found, list) and what in found

    def spooled(self, what: str) -> None:
        """It is there now."""
        self._write(spooled=[*self._values.get("spooled", []), what])

    @property
    def final(self) -> str:
        """What the final signal says, as a JSON object in text; empty while there is none."""
        return str(self._values.get("final", ""))

    def finish(self, said: str) -> None:
        """Remember what the final signal says, before it is spooled: there must never be two that differ."""
        self._write(final=said)

    def _write(self, **changes: Any) -> None:
        self._values = {**self._values, **changes}
        partial = self._path + ".part"
        try:
            with open(partial, "wb") as file:
                file.write(json.dumps(self._values, sort_keys=True).encode("utf-8"))
                file.flush()
                os.fsync(file.fileno())
            os.rename(partial, self._path)
        except OSError as error:
            self._complain(
                "{} cannot be written ({}): after a restart scripts may run once more".format(self._path, error)
            )
