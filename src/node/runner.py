"""What does a run do, from fetching the scripts to the one final signal? The network never stops it.

A script is begun, runs, and its end is in the journal, then in the spool, in this order; so wherever the runner is
killed, the next one goes on from there: nothing that ended runs again, nothing that was not sent is forgotten.
"""

import json
import os
import random
import threading
import time
import traceback
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple

from node import packages as installing
from node.archive import BadArchive, Script, plan, unpack
from node.client import Answer, Client, File, NoAnswer, encode_form
from node.console import Console
from node.delivery import ITEM_SECONDS, Standing, Verdict, judge, pause
from node.parameters import BadParameter, arguments
from node.results import problem_of, shortened, status_of
from node.running import Ended, Outputs, environment_of, run
from node.sending import PATIENCE_SECONDS, Heartbeat, Sender, describe_failure
from node.spool import Spool
from node.state import State

SCRIPTS_PATH = "2012-03-01/maas-scripts"
PROGRESS_SECONDS = 60.0
INSTALL_SECONDS = 1800.0
"""How long one command that installs packages may take."""

INTERRUPTIONS = 2
"""How often a script that does not say that it may reboot the machine is begun: more would go on for ever."""

TIMED_OUT = 124
"""The exit status of a script that took too long, as of timeout(1)."""


class Options(NamedTuple):
    """What can be set, in seconds."""

    heartbeat: float = 60.0
    patience: float = PATIENCE_SECONDS


DEFAULTS = Options()


class Tally(object):
    """What is being done, and what came of what was: for progress and the summary."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._running: Dict[str, Tuple[str, float, float]] = {}
        self.total = 0
        self.done = 0
        self.passed: List[str] = []
        self.failed: List[str] = []

    def begin(self, script: Script, what: str) -> None:
        """A script begins with ``what``: installing, running."""
        with self._lock:
            self._running[script.label] = (what, self._now(), script.timeout_seconds)

    def end(self, script: Script, passed: bool) -> None:
        """A script has ended."""
        with self._lock:
            self._running.pop(script.label, None)
            self.done += 1
            (self.passed if passed else self.failed).append(script.name)

    def progress(self) -> str:
        """What runs, since when, and how long it may take."""
        with self._lock:
            running = sorted(self._running.items())
            numbers = "{}/{}".format(min(self.done + 1, max(self.total, 1)), self.total)
        if not running:
            return "{} of {} scripts have run".format(self.done, self.total)
        parts = []
        for label, (what, since, limit) in running:
            minutes = "{:.0f} min".format((self._now() - since) / 60)
            parts.append("{}: {}, {}{}".format(label, what, minutes, " of {:.0f}".format(limit / 60) if limit else ""))
        return "{} {}".format(numbers, "; ".join(parts))


class FetchFailed(Exception):
    """The scripts cannot be had; the text says why."""


class Runner(object):
    """One run of this machine's scripts; everything that it keeps is in ``directory``."""

    def __init__(
        self,
        client: Client,
        directory: str,
        console: Console,
        options: Options = DEFAULTS,
        now: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._client = client
        self._directory = directory
        self._console = console
        self._options = options
        self._now = now
        self._chance = chance
        self._stop = threading.Event()
        self._down = False
        self._said_stop = False
        self._tally = Tally(now)
        os.makedirs(directory, mode=0o700, exist_ok=True)
        self._spool = Spool(os.path.join(directory, "spool"), console.error)
        self._state = State(os.path.join(directory, "state.json"), console.error)
        self._sender = Sender(
            self._spool, client, console, self._heard, patience=options.patience, now=now, chance=chance
        )
        self._heartbeat = Heartbeat(
            client, console, self._tally.progress, _heartbeat_form, options.heartbeat, self._heard
        )

    def shut_down(self) -> None:
        """End what runs, record nothing of it, and leave the rest to the next start: the machine goes down."""
        self._down = True
        self._stop.set()

    def _heard(self, standing: Standing) -> None:
        """The region said where this machine stands."""
        if standing.stop and not self._said_stop:
            self._said_stop = True
            self._console.warn(
                "the region says stop: this machine is {}; what runs is ended".format(standing.status or "done with")
            )
            self._stop.set()

    def run(self) -> int:
        """Do all of it; 0 if every script passed and everything was delivered, else 1."""
        sender = _thread("sender", self._sender.run)
        heart = _thread("heartbeat", self._heartbeat.run)
        if self._spool.waiting:
            self._console.say("{} items of an earlier start are still to be sent".format(self._spool.waiting))
        try:
            problem = "" if self._state.final else self._scripts()
            if self._down:
                self._console.warn("the runner is told to end; its next start goes on from here")
                return 1
            return self._finish(problem)
        finally:
            self._heartbeat.end()
            self._sender.end()
            for thread in (sender, heart):
                thread.join(2.0)

    def _scripts(self) -> str:
        """Run them all; why not, if they could not be had."""
        try:
            scripts = self._fetch()
            self._respool()
            self._run_kind("commissioning", scripts)
            testing = [script for script in scripts if script.kind == "testing"]
            if testing and not self._tally.failed and not self._stop.is_set():
                self._run_testing(tuple(testing))
            elif testing and not self._stop.is_set():
                self._console.warn("{} testing scripts are not run: commissioning failed".format(len(testing)))
        except FetchFailed as error:
            return str(error)
        return ""

    def _run_testing(self, testing: Tuple[Script, ...]) -> None:
        if not self._state.is_spooled("testing"):
            self._signal("TESTING", "commissioning scripts have run", "signal TESTING")
            self._state.spooled("testing")
        self._wait_for_spool()
        if self._stop.is_set():
            return
        try:
            # Now that the region has read what commissioning found, it knows the disks to test.
            scripts = self._fetch()
        except FetchFailed as error:
            self._console.warn("{}; the testing scripts that are here already are run".format(error))
            scripts = testing
        self._run_kind("testing", scripts)

    def _wait_for_spool(self) -> None:
        """Until all is sent, or the region has taken nothing for so long that testing had better begin without it."""
        until = self._now() + self._options.patience
        while self._spool.waiting and self._now() < until and not self._stop.is_set():
            self._spool.wait(0.5)

    def _fetch(self) -> Tuple[Script, ...]:
        """The scripts that are still to run, of the region.

        :raises FetchFailed: if they cannot be had, however often it is tried.
        """
        begun = self._now()
        attempt = 0
        skewed = False
        while not self._stop.is_set():
            attempt += 1
            try:
                outcome: Any = self._client.request("GET", SCRIPTS_PATH, accept="*/*")
            except NoAnswer as error:
                outcome = error
            away, reason = True, ""
            if isinstance(outcome, Answer):
                if outcome.status == 204:
                    self._heard(Standing(outcome.headers.get("x-stanchion-status", ""),
                                         outcome.headers.get("x-stanchion-stop") == "true"))  # fmt: skip
                    return ()
                if outcome.status == 200:
                    try:
                        return unpack(outcome.body, os.path.join(self._directory, "scripts"), self._console.warn)
                    except (BadArchive, OSError) as error:
                        reason = "the archive of scripts cannot be used: {}".format(error)
                elif outcome.status in (401, 403) and not skewed and self._client.learn_clock(outcome):
                    skewed = True
                    self._console.warn("the region's clock is {:.0f} s ahead; taking that".format(self._client.skew))
                    continue
            if not reason:
                judgement = judge(outcome, time.time())
                reason, away = judgement.reason, judgement.verdict is not Verdict.REFUSED
                wanted = judgement.retry_after
            else:
                wanted = None
            left = begun + (self._options.patience if away else min(ITEM_SECONDS, self._options.patience)) - self._now()
            seconds = min(pause(attempt, wanted, self._chance()), max(left, 0.0))
            then = "next try in {:.1f} s".format(seconds) if left > 0 else "giving it up"
            url = self._client.url(SCRIPTS_PATH)
            self._console.warn(describe_failure("fetching the scripts", attempt, "GET", url, outcome, reason, then))
            if left <= 0:
                raise FetchFailed("the scripts could not be fetched: {}".format(reason))
            self._stop.wait(seconds)
        return ()

    def _respool(self) -> None:
        """Spool the results of scripts that ended just before the runner did."""
        for label, record in self._state.all_ended().items():
            if not self._state.is_spooled(label):
                self._spool_result(label, record)

    def _run_kind(self, kind: str, scripts: Tuple[Script, ...]) -> None:
        wanted = tuple(script for script in scripts if script.kind == kind)
        self._tally.total += len(wanted)
        if wanted:
            self._console.say("{} {} scripts: {}".format(
                len(wanted), kind, ", ".join(script.name for batch in plan(wanted) for script in batch)))  # fmt: skip
        for batch in plan(wanted):
            if self._stop.is_set():
                return
            threads = [_thread(script.label, self._guarded, script) for script in batch]
            told = self._now()
            while any(thread.is_alive() for thread in threads):
                for thread in threads:
                    thread.join(0.2)
                if self._now() - told >= PROGRESS_SECONDS:
                    told = self._now()
                    self._console.say(self._tally.progress())

    def _guarded(self, script: Script) -> None:
        """Run one script; whatever goes wrong in the runner itself is that script's failure, and not the end."""
        try:
            self._run_script(script)
        except BaseException as error:  # noqa: BLE001  # the other scripts have to run
            self._console.error("{}: the runner failed: {}: {}".format(script.label, type(error).__name__, error))
            self._ended(script, Ended(1, 0.0, note="the runner failed:\n" + traceback.format_exc()))

    def _run_script(self, script: Script) -> None:
        known = self._state.ended(script.label)
        if known is not None:
            # It ended before a restart, and its result is spooled; the region did not have it when it listed this.
            self._tally.end(script, bool(known.get("passed")))
            return
        begun = self._state.begun(script.label)
        if begun >= INTERRUPTIONS and not script.may_reboot:
            note = "it was begun {} times and this machine or the runner went down each time; it is not begun again"
            self._ended(script, Ended(1, 0.0, note=note.format(begun)))
            return
        self._state.begin(script.label)
        if begun or script.has_started:
            self._console.warn("{} was interrupted; it is run again".format(script.label))
        if script.packages and not self._install(script):
            return
        outputs = self._outputs(script)
        self._tally.begin(script, "running")
        self._console.say("{}/{} {}: running{}".format(
            self._tally.done + 1, self._tally.total, script.label,
            ", at most {:.0f} min".format(script.timeout_seconds / 60) if script.timeout_seconds else ""))  # fmt: skip
        self._progress(script, "WORKING", "running {}".format(script.name))
        try:
            command = [script.path, *arguments(script.parameters)]
        except BadParameter as error:
            self._ended(script, Ended(1, 0.0, note=str(error)))
            return
        environment = environment_of(
            {
                "OUTPUT_COMBINED_PATH": outputs.combined,
                "OUTPUT_STDOUT_PATH": outputs.stdout,
                "OUTPUT_STDERR_PATH": outputs.stderr,
                "RESULT_PATH": self._result_path(script.label),
                "DOWNLOAD_PATH": self._downloads(script),
                "RUNTIME": "{:g}".format(script.timeout_seconds),
                "HAS_STARTED": "True" if begun or script.has_started else "False",
            }
        )
        ended = run(
            command, outputs, environment, os.path.dirname(outputs.combined), script.timeout_seconds, self._stop,
            self._now,
        )  # fmt: skip
        if not self._down:
            self._ended(script, ended)

    def _ended(self, script: Script, ended: Ended) -> None:
        """Journal and spool what came of a script."""
        result = shortened(self._result_path(script.label)).content
        problem = problem_of(result)
        if problem:
            self._console.warn("{}: its result cannot be used: {}".format(script.label, problem))
        status = "TIMEDOUT" if ended.timed_out else "WORKING"
        exit_status = TIMED_OUT if ended.timed_out else ended.exit_status
        said = status_of(result) if not problem else ""
        passed = (said in ("passed", "degraded", "skipped")) if said else exit_status == 0
        passed = passed and not ended.timed_out and not ended.stopped
        self._close(script, status, exit_status, ended.runtime, passed, ended.note)

    def _close(self, script: Script, status: str, exit_status: int, runtime: float, passed: bool, note: str) -> None:
        outputs = self._outputs(script)
        if note:
            # The region keeps outputs, not the runner's log: what explains this one goes with it.
            _append(outputs, "\n[stanchion: {}]\n".format(note.strip()), self._console)
        record = {
            "name": script.name,
            "status": status,
            "passed": passed,
            "exit_status": exit_status,
            "runtime": round(runtime, 3),
            "script_result_id": script.result_id,
            "script_version_id": script.version_id,
            "message": "{} {} (exit status {}, {:.0f} s){}".format(
                script.name, "passed" if passed else "FAILED", exit_status, runtime, ": " + note if note else ""
            ),
        }
        self._state.end(script.label, record)
        self._spool_result(script.label, record)
        self._tally.end(script, passed)
        (self._console.say if passed else self._console.warn)("{}/{} {}".format(
            self._tally.done, self._tally.total, record["message"]))  # fmt: skip

    def _spool_result(self, label: str, record: Mapping[str, Any]) -> None:
        """Spool a script's result, from the journal and its files: the same each time, so that twice is once."""
        directory = os.path.join(self._directory, "out", label)
        files: List[File] = []
        for ending in ("", ".out", ".err", ".yaml"):
            sent = shortened(os.path.join(directory, label + ending))
            if sent.content or ending in ("", ".out"):
                files.append(File(record["name"] + ending, sent.content))
            if sent.omitted:
                self._console.warn("{}{}: {} bytes in its middle are not sent".format(label, ending, sent.omitted))
        fields = {
            "exit_status": record["exit_status"],
            "runtime": record["runtime"],
            "script_result_id": record["script_result_id"],
            "script_version_id": record["script_version_id"],
            "name": record["name"],
        }
        self._signal(record["status"], record["message"], "the result of {}".format(label), fields, tuple(files))
        self._state.spooled(label)

    def _signal(
        self,
        status: str,
        message: str,
        label: str,
        fields: Optional[Mapping[str, Any]] = None,
        files: Tuple[File, ...] = (),
    ) -> None:
        listed = [("op", "signal"), ("status", status), ("error", message[:2000])]
        listed += [(name, str(value)) for name, value in (fields or {}).items() if value is not None]
        body, content_type = encode_form(listed, files)
        self._spool.add(label, content_type, body)

    def _progress(self, script: Script, status: str, message: str) -> None:
        fields = {"script_result_id": script.result_id, "script_version_id": script.version_id}
        self._signal(status, message, "{}: {}".format(script.label, message), fields)

    def _install(self, script: Script) -> bool:
        """Install what a script needs; whether that worked."""
        self._tally.begin(script, "installing packages")
        self._progress(script, "INSTALLING", "installing packages for {}".format(script.name))
        outputs = self._outputs(script)
        begun = self._now()
        log: List[bytes] = []
        problem, status = "", 0
        try:
            queue = list(installing.steps(script.packages))
            while queue and not problem:
                step = queue.pop(0)
                if isinstance(step, installing.Download):
                    path = installing.fetch(step.url, self._downloads(script))
                    queue[:0] = installing.unpack_or_install(path, self._downloads(script), self._console.warn)
                    continue
                ended = run(
                    step.words, outputs, environment_of(step.environment), os.path.dirname(outputs.combined),
                    INSTALL_SECONDS, self._stop, self._now,
                )  # fmt: skip
                log.append(shortened(outputs.combined).content)
                if ended.exit_status or ended.timed_out or ended.stopped:
                    status = ended.exit_status or 1
                    problem = "{} failed with exit status {}{}".format(
                        " ".join(step.words), status, "; " + ended.note if ended.note else ""
                    )
        except installing.BadPackages as error:
            problem, status = str(error), 1
        if not problem:
            return True
        with open(outputs.combined, "wb") as file:
            file.write(b"".join(log))
        if not self._down:
            note = "its packages could not be installed: {}".format(problem)
            self._close(script, "INSTALLING", status, self._now() - begun, False, note)
        return False

    def _outputs(self, script: Script) -> Outputs:
        directory = os.path.join(self._directory, "out", script.label)
        os.makedirs(directory, mode=0o755, exist_ok=True)
        path = os.path.join(directory, script.label)
        return Outputs(path, path + ".out", path + ".err")

    def _result_path(self, label: str) -> str:
        return os.path.join(self._directory, "out", label, label + ".yaml")

    def _downloads(self, script: Script) -> str:
        path = os.path.join(self._directory, "downloads", script.label)
        os.makedirs(path, mode=0o755, exist_ok=True)
        return path

    def _finish(self, problem: str) -> int:
        """Send all that is left, then the one final signal; the exit status."""
        self._sender.drain()
        if not self._state.final:
            self._drain("results")
            said = self._verdict(problem)
            self._state.finish(json.dumps(said))
        final = json.loads(self._state.final)
        if not self._state.is_spooled("final"):
            self._signal(final["status"], final["message"], "the final signal {}".format(final["status"]))
            self._state.spooled("final")
        self._drain("the final signal")
        tally, undelivered = self._tally, self._spool.undelivered
        self._console.say("summary: {} passed, {} failed{}, {} undelivered{}; final signal {}".format(
            len(tally.passed), len(tally.failed), _listed(tally.failed), len(undelivered), _listed(undelivered),
            final["status"]))  # fmt: skip
        return 0 if final["status"] == "OK" and not undelivered else 1

    def _verdict(self, problem: str) -> Dict[str, str]:
        reasons = [problem] if problem else []
        if self._tally.failed:
            reasons.append("failed: {}".format(", ".join(sorted(self._tally.failed))))
        if self._spool.undelivered:
            reasons.append("could not be delivered: {}".format("; ".join(self._spool.undelivered)))
        if self._said_stop:
            reasons.append("the region said stop")
        if reasons:
            return {"status": "FAILED", "message": ". ".join(reasons)}
        return {"status": "OK", "message": "all {} scripts passed".format(len(self._tally.passed))}

    def _drain(self, what: str) -> None:
        told = self._now()
        while self._spool.waiting:
            self._spool.wait(0.5)
            if self._now() - told >= PROGRESS_SECONDS:
                told = self._now()
                self._console.say("{} items are still to be sent ({})".format(self._spool.waiting, what))


def _heartbeat_form(progress: str) -> Tuple[bytes, str]:
    return encode_form([("op", "signal"), ("status", "WORKING"), ("error", progress)])


def _append(outputs: Outputs, text: str, console: Console) -> None:
    for path in (outputs.combined, outputs.stderr):
        try:
            with open(path, "ab") as file:
                file.write(text.encode("utf-8", "replace"))
        except OSError as error:
            console.warn("{} cannot be written: {}".format(path, error))


def _listed(names: Any) -> str:
    return " ({})".format("; ".join(names)) if names else ""


def _thread(name: str, target: Callable[..., None], *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=target, args=arguments, name=name)
    thread.daemon = True
    thread.start()
    return thread
