"""What does a run do, from fetching the scripts to the one final signal? The network never stops it.

What is done once and for all (a script ended, the tests begin, the run has ended) is first in the spool, with the
signal that tells of it, then in the journal, and only then may it be sent. So wherever the runner is killed, the next
one goes on from there: nothing that ended runs again, nothing is forgotten, and what is sent twice is the same bytes.
"""

import os
import random
import threading
import traceback
from functools import partial
from typing import Any, Callable, Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Tuple

from node.archive import Script, plan
from node.client import Client
from node.clock import Clock, Event
from node.console import Console
from node.delivery import Standing
from node.executing import Execute, Executor, Finished
from node.fetching import Fetcher, FetchFailed
from node.running import Ended, Outputs, end_left_over, remember, run
from node.sending import PATIENCE_SECONDS, Heartbeat, Sender
from node.signals import signal
from node.spool import Spool
from node.state import State
from node.tally import Tally

PROGRESS_SECONDS = 60.0
"""How often the console is told what is being done."""

INTERRUPTIONS = 2
"""How often a script that does not say that it may reboot the machine is begun: more would go on for ever."""

PROCESS = "process"
"""The file, beside a script's outputs, that says which process it is."""

SCRIPT, TESTING, FINAL = "script:", "testing", "final"
"""The keys of what is done once and for all; a script's label follows the first."""


class Options(NamedTuple):
    """What can be set, in seconds."""

    heartbeat: float = 60.0
    patience: float = PATIENCE_SECONDS


DEFAULTS = Options()


class Runner(object):
    """One run of this machine's scripts; everything that it keeps is in ``directory``.

    :raises OSError: if nothing can be kept there.
    """

    def __init__(
        self,
        client: Client,
        directory: str,
        console: Console,
        options: Options = DEFAULTS,
        clock: Optional[Clock] = None,
        chance: Callable[[], float] = random.random,
        execute: Optional[Execute] = None,
        on_start: Callable[[int], None] = lambda pid: None,
    ) -> None:
        self._directory = directory
        self._console = console
        self._options = options
        self._clock = clock = clock or Clock()
        self._stop = clock.event()
        self._sent = clock.event()
        self._lock = threading.Lock()
        self._is_down = False
        self._is_finishing = False
        self._stopped_as = ""
        self._untold: List[str] = []
        self._tally = Tally(clock.now)
        os.makedirs(directory, mode=0o700, exist_ok=True)
        self._spool = Spool(os.path.join(directory, "spool"), console.error, self._spool_changed)
        self._state = State(os.path.join(directory, "state.json"), console.error)
        self._sender = Sender(self._spool, client, console, self._heard, options.patience, clock, chance)
        self._heartbeat = Heartbeat(
            client, console, self._tally.progress, partial(signal, "WORKING"), options.heartbeat, self._beaten, clock
        )
        self._fetcher = Fetcher(
            client, os.path.join(directory, "scripts"), console, self._stop, options.patience, clock, chance
        )
        self._executor = Executor(
            directory, console, self._tally, execute or partial(_run, clock, on_start), self._stop, clock, self._begins
        )

    def shut_down(self) -> None:
        """End what runs, record nothing of it, and leave the rest to the next start: the machine goes down."""
        self._is_down = True
        self._stop.set()
        self._sent.set()

    def _spool_changed(self) -> None:
        self._sent.set()
        self._sender.look()

    def _beaten(self, standing: Standing) -> None:
        self._sender.hear()
        self._heard(standing)

    def _heard(self, standing: Standing) -> None:
        """The region said where this machine stands."""
        with self._lock:
            if not standing.stop or self._stopped_as or self._is_finishing:
                return
            self._stopped_as = standing.status or "not to go on"
        self._console.warn("the region says stop: this machine is {}".format(self._stopped_as))
        self._stop.set()

    def run(self) -> int:
        """Do all of it; 0 if every script passed and everything was delivered, else 1."""
        self._recover()
        workers = [self._clock.start("sender", self._sender.run), self._clock.start("heartbeat", self._heartbeat.run)]
        try:
            problem = "" if self._state.kept(FINAL) else self._guarded_scripts()
            if not self._is_down:
                return self._finish(problem)
            self._console.warn("the runner is told to end; its next start goes on from here")
            return 1
        finally:
            self._heartbeat.end()
            self._sender.end()
            for worker in workers:
                worker.wait(2.0)

    def _recover(self) -> None:
        """Note what an earlier start had spooled, but not yet in its journal when it was killed."""
        for meta in self._spool.metas:
            if "key" in meta and self._state.kept(meta["key"]) is None:
                self._state.keep(meta["key"], dict(meta["record"]))
        if self._spool.waiting:
            self._console.say("{} items of an earlier start are still to be sent".format(self._spool.waiting))

    def _guarded_scripts(self) -> str:
        try:
            return self._scripts()
        except Exception as error:  # noqa: BLE001  # the region has to be told, and what is spooled has to be sent
            self._console.error("the runner failed: {}".format(traceback.format_exc()))
            return "the runner failed: {}: {}".format(type(error).__name__, error)

    def _scripts(self) -> str:
        """Run them all; why not, if they could not be had."""
        try:
            in_spool = self._spool.keys()
            fetched = self._fetcher.fetch()
        except FetchFailed as error:
            return str(error)
        if fetched is None:
            return ""
        self._heard(fetched.standing)
        status = fetched.standing.status.lower()
        commissioning = tuple(script for script in fetched.scripts if script.kind == "commissioning")
        testing = tuple(script for script in fetched.scripts if script.kind == "testing")
        self._run_all("commissioning", commissioning, in_spool)
        if not testing or self._stop.is_set():
            return ""
        if self._failed("commissioning"):
            self._console.warn("{} testing scripts are not run: commissioning failed".format(len(testing)))
            return ""
        has_commissioned = bool(commissioning or self._named("commissioning")) and status != "testing"
        if has_commissioned or status == "commissioning":
            testing = self._begin_testing(testing)
        self._run_all("testing", testing, in_spool)
        return ""

    def _begin_testing(self, testing: Tuple[Script, ...]) -> Tuple[Script, ...]:
        """Say that commissioning is done; the tests to run, for the disks that it found."""
        if self._state.kept(TESTING) is None:
            self._once(TESTING, {}, "the signal TESTING", signal("TESTING", "commissioning scripts have run"), True)
        self._wait_for_spool(self._options.patience)
        if self._spool.waiting:
            self._console.warn("the region takes nothing; the testing scripts that are here already are run")
            return testing
        try:
            fetched = self._fetcher.fetch()
        except FetchFailed as error:
            self._console.warn("{}; the testing scripts that are here already are run".format(error))
            return testing
        if fetched is None:
            return testing
        self._heard(fetched.standing)
        return tuple(script for script in fetched.scripts if script.kind == "testing")

    def _wait_for_spool(self, seconds: float) -> None:
        """Until all is sent, or so long."""
        until = self._clock.now() + seconds
        while not self._stop.is_set():
            self._sent.clear()
            left = until - self._clock.now()
            if not self._spool.waiting or left <= 0:
                return
            self._sent.wait(min(left, PROGRESS_SECONDS))

    def _run_all(self, kind: str, scripts: Tuple[Script, ...], in_spool: FrozenSet[str]) -> None:
        """Run the scripts of a kind.

        :param in_spool: what the spool had before the region was asked for them. Of a script whose end the journal has,
            but neither the spool nor the region, the result is lost.
        """
        batches = plan(
            tuple(
                script
                for script in scripts
                if self._state.kept(SCRIPT + script.label) is None or SCRIPT + script.label not in in_spool
            )
        )
        if not batches:
            return
        self._tally.expect(sum(map(len, batches)))
        self._console.say(
            "{} {} scripts: {}".format(
                sum(map(len, batches)), kind, ", ".join(script.name for batch in batches for script in batch)
            )
        )
        for batch in batches:
            if self._stop.is_set():
                return
            workers = [self._clock.start(script.label, self._run_guarded, script) for script in batch]
            for worker in workers:
                while not worker.wait(PROGRESS_SECONDS):
                    self._console.say(self._tally.progress())

    def _run_guarded(self, script: Script) -> None:
        """Run one script; whatever goes wrong in the runner itself is that script's failure, and not the end."""
        try:
            self._run_script(script)
        except BaseException as error:  # noqa: BLE001  # the other scripts have to run
            note = "the runner failed: {}: {}".format(type(error).__name__, error)
            self._told_as_failed(script, note, traceback.format_exc())
        finally:
            self._tally.end(script)

    def _told_as_failed(self, script: Script, note: str, output: str) -> None:
        try:
            told = self._executor.finished(
                script, Ended(1, 0.0, note=note), output=output.encode("utf-8", "backslashreplace")
            )
            self._ended(script, told)
        except Exception as error:  # noqa: BLE001  # the final signal says it, if nothing else can
            self._console.error("{}: nor can that be told: {}: {}".format(script.label, type(error).__name__, error))
            with self._lock:
                self._untold.append(script.label)

    def _run_script(self, script: Script) -> None:
        begun = self._state.begun(script.label)
        if end_left_over(os.path.join(self._directory, "out", script.file_name, PROCESS)):
            self._console.warn("{} still ran; it was ended".format(script.label))
        if begun >= INTERRUPTIONS and not script.may_reboot:
            note = "it was begun {} times, and each time the runner or this machine went down; it is not begun again"
            finished = self._executor.interrupted(script, note.format(begun))
        else:
            self._state.begin(script.label)
            has_started = begun > 0 or script.has_started
            if has_started:
                self._console.warn(
                    "{} was begun before; it {}is run again".format(
                        script.label, "may reboot this machine, and " if script.may_reboot else "was interrupted, and "
                    )
                )
            finished = self._executor.run(script, has_started)
        if not self._is_down:
            self._ended(script, finished)

    def _ended(self, script: Script, finished: Finished) -> None:
        """Keep, and have sent, what came of a script."""
        body = signal(finished.status, finished.record["message"], finished.fields, finished.files)
        self._once(SCRIPT + script.label, finished.record, "the result of {}".format(script.label), body)
        say = self._console.say if finished.record["passed"] else self._console.warn
        say("{} {}".format(self._tally.place(script), finished.record["message"]))

    def _begins(self, script: Script, status: str, message: str) -> None:
        fields = {"script_result_id": script.result_id, "script_version_id": script.version_id}
        body, content_type = signal(status, message, fields)
        self._spool.add("{}: {}".format(script.label, message), content_type, body)

    def _once(
        self, key: str, record: Dict[str, Any], label: str, form: Tuple[bytes, str], is_last: bool = False
    ) -> None:
        """Do something once and for all: in the spool, in the journal, and then it may go."""
        body, content_type = form
        meta: Mapping[str, Any] = {"key": key, "record": record, "is_last": is_last}
        item = self._spool.add(label, content_type, body, meta, held=True)
        self._state.keep(key, record)
        self._spool.release(item.number)

    def _named(self, kind: str) -> List[Dict[str, Any]]:
        """The records of the scripts of a kind that have ended, at this start or an earlier one."""
        return [record for record in self._state.records(SCRIPT).values() if record.get("kind") == kind]

    def _failed(self, kind: str) -> List[str]:
        return sorted(str(record["name"]) for record in self._named(kind) if not record.get("passed"))

    def _finish(self, problem: str) -> int:
        """Send all that is left, then the one final signal; the exit status."""
        self._sender.drain()
        if self._state.kept(FINAL) is None:
            self._drain("before the final signal")
            if self._is_down:
                return 1
            with self._lock:
                self._is_finishing = True
            final = self._verdict(problem)
            form = signal(final["status"], final["message"])
            self._once(FINAL, dict(final), "the final signal {}".format(final["status"]), form, True)
            # However long the others took: this one has as long.
            self._sender.drain()
        self._is_finishing = True
        self._drain("the final signal")
        return self._sum_up()

    def _verdict(self, problem: str) -> Mapping[str, str]:
        failed = self._failed("commissioning") + self._failed("testing")
        reasons = [problem] if problem else []
        if failed:
            reasons.append("failed: {}".format(", ".join(failed)))
        if self._spool.undelivered:
            reasons.append("could not be delivered: {}".format("; ".join(self._spool.undelivered)))
        if self._untold:
            reasons.append("nothing could be told of: {}".format(", ".join(self._untold)))
        if self._stopped_as:
            reasons.append("the region said stop: {}".format(self._stopped_as))
        if reasons:
            return {"status": "FAILED", "message": ". ".join(reasons)}
        return {"status": "OK", "message": "{} scripts passed".format(len(self._state.records(SCRIPT)))}

    def _sum_up(self) -> int:
        failed = self._failed("commissioning") + self._failed("testing")
        final = self._state.kept(FINAL) or {}
        passed = len(self._state.records(SCRIPT)) - len(failed)
        undelivered, waiting = self._spool.undelivered, self._spool.waiting
        say = self._console.warn if failed or undelivered or waiting else self._console.say
        say(
            "summary: {} passed, {} failed{}, {} undelivered{}; final signal {}".format(
                passed, len(failed), _listed(failed), len(undelivered) + waiting, _listed(undelivered),
                final.get("status"),
            )
        )  # fmt: skip
        return 0 if final.get("status") == "OK" and not undelivered and not waiting else 1

    def _drain(self, what: str) -> None:
        """Wait until nothing is to be sent any more: patience gives up what does not go. Or until told to end."""
        told = self._clock.now()
        while not self._is_down:
            self._sent.clear()
            if not self._spool.waiting:
                return
            self._sent.wait(PROGRESS_SECONDS)
            if self._clock.now() - told >= PROGRESS_SECONDS and self._spool.waiting:
                told = self._clock.now()
                self._console.say("{} items are still to be sent ({})".format(self._spool.waiting, what))


def _run(
    clock: Clock,
    on_start: Callable[[int], None],
    command: List[str],
    outputs: Outputs,
    environment: Mapping[str, str],
    directory: str,
    timeout: float,
    stop: Event,
) -> Ended:
    def started(pid: int) -> None:
        on_start(pid)
        remember(pid, os.path.join(directory, PROCESS))

    return run(command, outputs, environment, directory, timeout, stop, clock.now, on_start=started)


def _listed(names: Any) -> str:
    return " ({})".format("; ".join(names)) if names else ""
