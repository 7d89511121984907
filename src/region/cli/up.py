"""``stanchion up``: a region and a rack on this machine, with images, in one command that also ends them.

The order: settings and sample are written, the region starts and says that it serves, key and join token are made, the
rack joins, starts and says the same, the source is added, the import runs, the rack is in step. Everything is kept in
the state directory, so that doing it again goes on from there. Whatever happens, no process is left behind.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from attrs import define, field, frozen
from twisted.internet.defer import CancelledError, Deferred, DeferredList
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread

from region.cli import progress
from region.cli.api import Selection, add_source, ask, source_url, start_import, trust_fields, update_source
from region.cli.processes import Daemon, run_command
from region.cli.state import Ports, State, choose_ports, lock_state, open_state, write_settings
from region.sample import write_sample
from rpc.client import Client, Fields, Refused
from rpc.console import CommandFailed, Status, complain, safe, size, write
from rpc.profile import Profile, load_profile, save_profile, state_directory
from rpc.running import run_in_reactor

T = TypeVar("T")

REQUEST_SECONDS: Final = 10.0
POLL_SECONDS: Final = 0.5
"""How often the import's and the rack's progress is asked for, to be shown."""

SILENT_SECONDS: Final = 60.0
"""A rack that has not answered for so long, while it is waited for, is given up."""

SAME_SIGNAL_SECONDS: Final = 1.0
"""Signals so soon after the first ask for the same: who ends a process group reaches this process directly, and again
through `make`, which passes SIGTERM on."""

UNSIGNED: Final[Fields] = {"allow_unsigned": "true"}


@frozen
class Wanted:
    """What the command line asks for. ``source`` None is the sample; no ``selections`` are all, or what there is."""

    state: State
    listen: str
    source: str | None
    trust: Fields
    selections: tuple[Selection, ...]
    proxy: str
    then_stop: bool


def run(arguments: argparse.Namespace) -> int:
    """Run ``stanchion up`` and return its exit status."""
    source, trust = None, UNSIGNED
    if arguments.source:
        source = source_url(arguments.source)
        trust = trust_fields(arguments.keyring, arguments.allow_unsigned)
    elif arguments.keyring or arguments.allow_unsigned or arguments.select:
        raise CommandFailed("--keyring, --allow-unsigned and --select are about a SOURCE; name one", Status.USAGE)
    state, note = open_state(Path(arguments.state) if arguments.state else None, Path.cwd())
    lock = lock_state(state)
    if note:
        write(note)
    selections = tuple(arguments.select)
    wanted = Wanted(state, arguments.listen, source, trust, selections, arguments.proxy, arguments.then_stop)
    try:
        return run_in_reactor(partial(_up, wanted=wanted))
    finally:
        lock.close()


async def _up(reactor: Any, wanted: Wanted) -> int:
    up = Up(reactor, wanted)
    done = Deferred.fromCoroutine(up.main())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: reactor.callFromThread(up.interrupt, done))
    try:
        status: int = await done.addBoth(up.status_of)
    except OSError as error:
        raise BrokenPipeError from error  # what it came to can be told to nobody
    return status


@define
class Up:
    """One run of ``stanchion up``."""

    reactor: Any
    wanted: Wanted
    _daemons: list[Daemon] = field(factory=list)
    _working: Deferred[None] | None = None
    _died: str = ""
    _is_up: bool = False
    _is_stopping: bool = False
    _interrupted: float | None = None
    _unheard: OSError | None = None

    async def main(self) -> int:
        """Bring everything up, keep it up, stop it; the exit status."""
        sockets = Path(tempfile.mkdtemp(prefix="stanchion-up-"))  # 0700, and short: a socket's path has 107 bytes
        try:
            self._working = Deferred.fromCoroutine(self._work(sockets))
            await self._working
        except CancelledError:
            if self._unheard is not None:
                raise BrokenPipeError from self._unheard
            if not self._died:
                write("stopping …")
                return Status.YES if self._is_up else Status.INTERRUPTED
            raise CommandFailed(self._died, Status.UNREACHABLE) from None
        except CommandFailed as error:
            await self._settle()
            if self._died:
                raise CommandFailed(self._died, Status.UNREACHABLE) from error
            raise
        finally:
            await self._stop()
            shutil.rmtree(sockets)
        return Status.YES

    def interrupt(self, done: Deferred[int]) -> None:
        """Ctrl-C: stop in order. A second time: end what is still there at once."""
        now = self.reactor.seconds()
        if self._interrupted is None:
            self._interrupted = now
        elif now - self._interrupted < SAME_SIGNAL_SECONDS:
            return
        if self._is_stopping:
            complain("ending what has not stopped yet")
            for daemon in self._daemons:
                daemon.kill()
        else:
            self._is_stopping = True
            done.cancel()

    def status_of(self, outcome: Any) -> int:
        """The exit status for what ``main`` came to, after saying why if it failed.

        :raises OSError: if nobody reads what is said: the terminal is gone, or the program behind the pipe.
        """
        if isinstance(outcome, int):
            return outcome
        if outcome.check(BrokenPipeError):
            outcome.raiseException()
        if outcome.check(CommandFailed):
            complain(str(outcome.value))
            return int(outcome.value.status)
        if outcome.check(CancelledError):
            return Status.INTERRUPTED
        complain("a fault of this program: " + outcome.getTraceback())
        return Status.UNREACHABLE

    async def _work(self, sockets: Path) -> None:
        state = self.wanted.state
        source = self.wanted.source
        if source is None:
            source = str(await self._in_thread(write_sample, state.sample))
        ports = await self._start_region(sockets)
        client = await self._client(ports)
        if not await self._has_joined(client):
            await self._join(ports)
        await self._start("rack", state.rack_toml, sockets, 60.0)
        await self._add_source(client, source)
        job = await self._import(client)
        answer = await self._until_in_step(client)
        self._is_up = True
        write(_welcome(client.profile, answer, state, self.wanted.then_stop))
        if not progress.succeeded(job):
            complain(
                "not all that was selected could be imported: see above; what could is there "
                "(`stanchion sources` shows and changes what is selected)"
            )
        if not answer["releases"]:
            complain("nothing that was selected is a release; `stanchion sources` shows what is selected")
        if not self.wanted.then_stop:
            await Deferred()  # until Ctrl-C, or until a daemon ends

    async def _start_region(self, sockets: Path) -> Ports:
        """Start the region. A port that another program took since it was found free is replaced."""
        state, listen = self.wanted.state, self.wanted.listen
        ports = choose_ports(state, listen)
        for last in (False, False, True):
            write_settings(state, listen, ports, self.wanted.proxy)
            try:
                await self._start("region", state.region_toml, sockets, 180.0)
                break
            except CommandFailed:
                before, ports = ports, choose_ports(state, listen)
                if last or ports == before:
                    raise
                write(f"another program took port {before.http} or {before.rpc} meanwhile; trying others")
        return ports

    async def _start(self, name: str, settings: Path, sockets: Path, seconds: float) -> None:
        write(f"the {name} starts …")
        daemon = Daemon(self.reactor, name, self.wanted.state.log(name), lambda status: self._show(name, status))
        self._daemons.append(daemon)
        socket = sockets / f"{name}-{len(self._daemons)}"
        daemon.start([name, "--config", str(settings)], socket, self.wanted.state.root)
        ready = daemon.ready()
        ready.addTimeout(seconds, self.reactor, lambda result, after: _too_late(daemon, after))
        await ready
        daemon.end().addCallback(self._has_ended)

    def _show(self, name: str, status: str) -> None:
        """Show what a daemon says that it does. If nobody reads that any more, stop, as at Ctrl-C."""
        try:
            write(f"  {name}: {safe(status)}")
        except OSError as error:
            self._unheard = error
            if self._working is not None:
                self._working.cancel()

    def _has_ended(self, why: str) -> None:
        if self._is_stopping or self._died:
            return
        self._died = why
        if self._working is not None:
            self._working.cancel()

    async def _settle(self) -> None:
        """A daemon that dies is noticed first by whoever talks to it; give the news of its death a moment."""
        ends = [daemon.end() for daemon in self._daemons]
        if not ends or self._died:
            return
        first = DeferredList(ends, fireOnOneCallback=True, consumeErrors=True)
        first.addTimeout(1.0, self.reactor, lambda result, after: None)
        await first

    async def _stop(self) -> None:
        self._is_stopping = True
        for daemon in reversed(self._daemons):
            await daemon.stop()
            if daemon.killed:
                complain(f"the {daemon.name} did not stop in time and was killed; see {daemon.log}")

    async def _in_thread(self, function: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
        result: T = await deferToThread(function, *arguments, **keywords)
        return result

    async def _client(self, ports: Ports) -> Client:
        """A client with the key of the last run, if that is still good, or with a new one."""
        state = self.wanted.state
        url = f"http://{_url_host(self.wanted.listen)}:{ports.http}"
        if state.profile.exists():
            client = Client(Profile(url, load_profile(state.profile).key), timeout=REQUEST_SECONDS)
            try:
                await self._in_thread(client.get, "boot-sources/")
            except Refused as error:
                if error.code != 401:
                    raise
            else:
                save_profile(state.profile, client.profile)
                return client
        made = json.loads(
            await run_command(
                self.reactor, "region", "apikey", "--json", "--config", str(state.region_toml), "--name", "up"
            )
        )
        profile = Profile(url, made["key"])
        save_profile(state.profile, profile)
        return Client(profile, timeout=REQUEST_SECONDS)

    @property
    def _identity(self) -> Path:
        return self.wanted.state.root / "rack" / "identity" / "identity.json"

    def _system_id(self) -> str:
        """Which rack it is that runs here, once it has joined."""
        return str(json.loads(self._identity.read_bytes())["system_id"])

    async def _has_joined(self, client: Client) -> bool:
        """Whether the rack has an identity that the region still knows."""
        if not self._identity.exists():
            return False
        system_id = self._system_id()
        return any(rack["system_id"] == system_id for rack in await self._in_thread(client.get, "rackcontrollers/"))

    async def _join(self, ports: Ports) -> None:
        write("the rack joins …")
        state, listen = self.wanted.state, self.wanted.listen
        region = ("--config", str(state.region_toml))
        made = await run_command(self.reactor, "region", "join-token", "--json", "--expires", "10m", *region)
        rack = ("--config", str(state.rack_toml), "--region", _address(listen, ports.rpc), "--again")
        await run_command(self.reactor, "rack", "join", *rack, json.loads(made)["token"])

    async def _add_source(self, client: Client, url: str) -> None:
        """Have the source as the command line says: the trust that it names, and the selections if it names any.

        The sample is for a region that has no source yet.
        """
        known = await self._in_thread(client.get, "boot-sources/")
        same = [source for source in known if source["url"].rstrip("/") == url.rstrip("/")]
        if self.wanted.source is None and known and not same:
            write("no source is named, and there are some: they stay as they are, without the sample")
        elif not same:
            write(f"adding the source {safe(url)}")
            selections = self.wanted.selections or (Selection(),)
            await self._in_thread(add_source, client, url, self.wanted.trust, selections)
        elif self.wanted.source is not None:
            await self._in_thread(update_source, client, same[0]["id"], self.wanted.trust, self.wanted.selections)

    async def _import(self, client: Client) -> Any:
        job_id = await self._in_thread(start_import, client)
        display = progress.Display(time.monotonic)
        try:
            while True:
                job = await self._in_thread(client.get, f"import-jobs/{job_id}/")
                display.show(job)
                if progress.ended(job):
                    break
                await deferLater(self.reactor, POLL_SECONDS)
        finally:
            display.close()
        write(progress.summary(job))
        if job["state"] != "done":
            raise CommandFailed(
                f"the import {job['state']}, for the reason above; put that right and run this again "
                f"(the log: {self.wanted.state.log('region')})",
                Status.NO,
            )
        return job

    async def _until_in_step(self, client: Client) -> Any:
        """Wait until the rack holds what is published; the answer that then holds. Other racks that have joined may be
        away for as long as they like."""
        write("the rack fetches the images …")
        mine = self._system_id()
        shown, answered = "", self.reactor.seconds()
        while True:
            answer = await self._in_thread(ask, client, "releases/")
            racks = [rack for rack in answer["racks"] if rack["system_id"] == mine]
            if racks and all(rack["in_step"] for rack in racks):
                return answer
            for rack in racks:
                if rack["outcome"] == "answered":
                    answered = self.reactor.seconds()
                said = _said_of(rack)
                if rack["state"] == "partial" and rack["generation"] == answer["generation"]["number"]:
                    write(f"  {safe(rack['name'])} goes without what cannot be had now: {safe(said)}")
                    return answer
                if rack["state"] == "failed":
                    raise CommandFailed(f"the rack cannot fetch the images: {said}", Status.NO)
                if said != shown:
                    shown = said
                    write(f"  {safe(rack['name'])}: {safe(said)}")
            if self.reactor.seconds() - answered > SILENT_SECONDS:
                raise CommandFailed(
                    f"the rack has not answered for {SILENT_SECONDS:.0f} s; see {self.wanted.state.log('rack')}",
                    Status.UNREACHABLE,
                )
            await deferLater(self.reactor, POLL_SECONDS)


def _said_of(rack: Any) -> str:
    """How far a rack is, or why that is not known, in a few words."""
    shown = rack["progress"] or {}
    if rack["outcome"] != "answered":
        return str(rack["reason"])
    if rack["state"] in ("failed", "partial"):
        return str(shown.get("reason") or "it does not say why")
    done, total = shown.get("bytes_done"), shown.get("bytes")
    if isinstance(done, int) and isinstance(total, int) and total:
        return f"{rack['state']}, {size(done)} of {size(total)}"
    return str(rack["state"])


def _address(listen: str, port: int) -> str:
    return f"{_url_host(listen)}:{port}"


def _welcome(profile: Profile, answer: Any, state: State, then_stop: bool) -> str:
    """What to say when all is up: where the API is, the key, and what to try; less if it is stopped at once."""
    program = _program()
    names = [entry["name"] for entry in answer["releases"] if entry["state"] == "deployable"]
    came_up = f"Stanchion is up: {len(names)} of {len(answer['releases'])} releases can be deployed."
    if then_stop:
        return f"\n{came_up}\nstopping, as it was asked to (--then-stop); the state is kept in {state.root}"
    tries = [f"{program} releases"]
    if names:
        tries.append(f"{program} why {shlex.quote(names[0])}")
    tries.append(f"curl {profile.url}/MAAS/images-stream/streams/v1/index.json")
    if state.root != state_directory(Path.cwd()):
        tries.insert(0, f"export STANCHION_PROFILE={shlex.quote(str(state.profile))}")
    lines = [
        "",
        came_up,
        "",
        f"  API    {profile.url}/MAAS/api/2.0/",
        f"  key    {profile.key}",
        f"  state  {state.root} (and the logs: region.log, rack.log)",
        "",
        "Try, in another terminal, in this directory:",
        "",
        *(f"  {one}" for one in tries),
        "",
        "Ctrl-C here stops everything; the state is kept.",
    ]
    return "\n".join(lines)


def _too_late(daemon: Daemon, seconds: float) -> None:
    doing = f"; it last said: {daemon.status}" if daemon.status else ""
    raise CommandFailed(
        f"the {daemon.name} did not begin to serve within {seconds:.0f} s{doing}; see {daemon.log}", Status.UNREACHABLE
    )


def _url_host(listen: str) -> str:
    if listen in ("0.0.0.0", "::"):
        return "127.0.0.1" if listen == "0.0.0.0" else "[::1]"
    return f"[{listen}]" if ":" in listen else listen


def _program() -> str:
    """How this program was called, as the shell needs it."""
    called = sys.argv[0]
    if os.path.basename(called) != "stanchion" or shutil.which("stanchion") == os.path.abspath(called):
        return "stanchion"
    return shlex.quote(min(os.path.relpath(called), os.path.abspath(called), key=len))
