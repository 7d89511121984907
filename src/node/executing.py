"""What does it take to run one script? Packages, arguments and an environment; and afterwards, what is told of it?"""

import os
import shutil
import tempfile
import threading
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple

from node import packages as installing
from node.archive import Script
from node.client import File
from node.clock import Clock, Event, span
from node.console import Console
from node.parameters import BadParameter, arguments
from node.results import read_result, shortened
from node.running import Ended, Outputs, environment_of
from node.tally import Tally

INSTALL_SECONDS = 1800.0
"""How long one command that installs packages may take."""

TIMED_OUT = 124
"""The exit status of a script that took too long, as of timeout(1)."""

ENDINGS = ("", ".out", ".err", ".yaml")

Execute = Callable[[List[str], Outputs, Mapping[str, str], str, float, Event], Ended]
"""Runs a command: its words, outputs, environment, directory, time-out, and what stops it."""


class Finished(NamedTuple):
    """What came of a script: for the journal, and the signal that tells the region."""

    record: Dict[str, Any]
    status: str
    fields: Mapping[str, Any]
    files: Tuple[File, ...]


class Executor(object):
    """Runs scripts; outputs and downloads are below ``directory``. May be used by several threads.

    :param begin: called with a script, a status (INSTALLING, WORKING) and a sentence when that begins.
    """

    def __init__(
        self,
        directory: str,
        console: Console,
        tally: Tally,
        execute: Execute,
        stop: Event,
        clock: Clock,
        begin: Callable[[Script, str, str], None],
    ) -> None:
        self._directory = directory
        self._console = console
        self._tally = tally
        self._execute = execute
        self._stop = stop
        self._clock = clock
        self._begin = begin
        # One at a time: apt and dpkg would trip over each other.
        self._installing = threading.Lock()
        self._elsewhere: Dict[str, str] = {}

    def run(self, script: Script, has_started: bool) -> Finished:
        """Run a script, whatever comes of it. ``has_started``: it was begun before, by an earlier start."""
        begun = self._clock.now()
        self._clear(script)
        if script.packages:
            self._tally.begin(script, "installing packages")
            self._console.say("{} {}: installing packages".format(self._tally.place(script), script.label))
            self._begin(script, "INSTALLING", "installing packages for {}".format(script.name))
            with self._installing:
                status, problem, log = self._install(script)
            if problem:
                note = "its packages could not be installed: {}".format(problem)
                ended = Ended(status, self._clock.now() - begun, stopped=self._stop.is_set(), note=note)
                return self.finished(script, ended, "INSTALLING", log)
        try:
            command = [script.path, *arguments(script.parameters)]
        except BadParameter as error:
            return self.finished(script, Ended(1, 0.0, note=str(error)))
        self._restore(script)
        limit = script.timeout_seconds
        self._tally.begin(script, "running", limit)
        at_most = ", at most {}".format(span(limit)) if limit else ""
        self._console.say("{} {}: running{}".format(self._tally.place(script), script.label, at_most))
        self._begin(script, "WORKING", "running {}".format(script.name))
        outputs = self._outputs(script)
        self._clear(script)  # of what was printed while packages were installed
        environment = environment_of(
            {
                "OUTPUT_COMBINED_PATH": outputs.combined,
                "OUTPUT_STDOUT_PATH": outputs.stdout,
                "OUTPUT_STDERR_PATH": outputs.stderr,
                "RESULT_PATH": self._path(script, ".yaml"),
                "DOWNLOAD_PATH": self._downloads(script),
                "RUNTIME": "{:.15g}".format(limit),
                "HAS_STARTED": "True" if has_started else "False",
            }
        )
        where = os.path.dirname(outputs.combined)
        return self.finished(script, self._execute(command, outputs, environment, where, limit, self._stop))

    def finished(
        self, script: Script, ended: Ended, status: str = "WORKING", output: Optional[bytes] = None
    ) -> Finished:
        """What to tell of a script that has ended, or that could not be run: then the note says why.

        :param output: what to tell in place of what is in its files.
        """
        notes = [ended.note.strip()] if ended.note else []
        contents = {"": output} if output is not None else self._contents(script, notes)
        said, problem = read_result(contents.get(".yaml", b""))
        if problem:
            self._console.warn("{}: its result cannot be used: {}".format(script.label, problem))
        exit_status = TIMED_OUT if ended.timed_out else ended.exit_status
        passed = said in ("passed", "degraded", "skipped") if said else exit_status == 0
        passed = passed and not ended.timed_out and not ended.stopped
        if notes:
            # The region keeps outputs, not the runner's log: what explains this one goes with it.
            said_too = "\n[stanchion: {}]\n".format("; ".join(notes)).encode("utf-8", "replace")
            contents[""] = contents.get("", b"") + said_too
            contents[".err"] = contents.get(".err", b"") + said_too
        files = tuple(
            File(script.name + ending, contents.get(ending, b""))
            for ending in ENDINGS
            if contents.get(ending) or ending in ("", ".out")
        )
        outcome = "passed" if passed else "FAILED"
        if ended.timed_out:
            outcome = "TIMED OUT"
        why = ": {}".format("; ".join(notes)) if notes else ""
        message = "{} {} (exit status {}, {}){}".format(script.name, outcome, exit_status, span(ended.runtime), why)
        fields = {
            "exit_status": exit_status,
            "runtime": round(ended.runtime, 3),
            "script_result_id": script.result_id,
            "script_version_id": script.version_id,
            "name": script.name,
        }
        record = {"name": script.name, "kind": script.kind, "passed": passed, "message": message}
        return Finished(record, "TIMEDOUT" if ended.timed_out else status, fields, files)

    def interrupted(self, script: Script, note: str) -> Finished:
        """What to tell of a script that is not begun again: what it printed, but not what it said of itself."""
        notes: List[str] = []
        output = self._contents(script, notes).get("", b"")
        return self.finished(script, Ended(1, 0.0, note="; ".join([note, *notes])), output=output)

    def _contents(self, script: Script, notes: List[str]) -> Dict[str, bytes]:
        contents = {}
        for ending in ENDINGS:
            path = self._path(script, ending)
            try:
                contents[ending], omitted = shortened(path)
            except OSError as error:
                notes.append("{} cannot be read: {}".format(path, error.strerror or error))
                continue
            if omitted:
                self._console.warn("{}: {} bytes in its middle are not sent".format(path, omitted))
        return contents

    def _install(self, script: Script) -> Tuple[int, str, bytes]:
        """Install what a script needs: an exit status, what is wrong (empty if nothing is), and what was printed."""
        outputs = self._outputs(script)
        log: List[bytes] = []
        try:
            queue = list(installing.steps(script.packages))
            while queue:
                step = queue.pop(0)
                if isinstance(step, installing.Download):
                    into = self._downloads(script)
                    path = installing.fetch(
                        step.url, into, self._stop.wait, self._clock.now, is_stopped=self._stop.is_set
                    )
                    queue[:0] = installing.unpack_or_install(path, into, self._console.warn)
                    continue
                environment = environment_of(step.environment)
                where = os.path.dirname(outputs.combined)
                ended = self._execute(step.words, outputs, environment, where, INSTALL_SECONDS, self._stop)
                log.append(shortened(outputs.combined).content)
                if ended.exit_status or ended.timed_out or ended.stopped:
                    status = TIMED_OUT if ended.timed_out else ended.exit_status or 1
                    note = "; " + ended.note if ended.note else ""
                    what = "{} failed with exit status {}{}".format(" ".join(step.words), status, note)
                    return status, what, b"".join(log)
        except (installing.BadPackages, OSError) as error:
            return 1, str(error), b"".join(log)
        return 0, "", b""

    def _restore(self, script: Script) -> None:
        try:
            script.restore()
        except OSError as error:
            self._console.warn("{} is gone, and cannot be written again: {}".format(script.path, error))

    def _clear(self, script: Script) -> None:
        """What an earlier start of it left is no result of this one."""
        for ending in ENDINGS:
            path = self._path(script, ending)
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            elif os.path.lexists(path):
                os.unlink(path)

    def _outputs(self, script: Script) -> Outputs:
        return Outputs(self._path(script, ""), self._path(script, ".out"), self._path(script, ".err"))

    def _path(self, script: Script, ending: str) -> str:
        return os.path.join(self._place("out", script), script.file_name + ending)

    def _downloads(self, script: Script) -> str:
        return self._place("downloads", script)

    def _place(self, kind: str, script: Script) -> str:
        """A directory of the script's own: where the others are, or elsewhere if it cannot be made there."""
        path = os.path.join(self._directory, kind, script.file_name)
        if path in self._elsewhere:
            return self._elsewhere[path]
        try:
            os.makedirs(path, mode=0o755, exist_ok=True)
        except OSError as error:
            self._elsewhere[path] = tempfile.mkdtemp(prefix="stanchion-")
            self._console.warn(
                "{} cannot be made ({}); {} is used".format(path, error.strerror or error, self._elsewhere[path])
            )
            return self._elsewhere[path]
        return path
