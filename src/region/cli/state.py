"""What ``stanchion up`` keeps on disk: where, for whom, and which settings and ports its daemons get."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from region.config import RegionConfig
from rpc.console import CommandFailed, Status
from rpc.profile import LOCK, state_directory
from rpc.settings import SettingsError, load

HTTP_PORT: Final = 5240
RPC_PORT: Final = 5250


@frozen
class State:
    """The files in one state directory."""

    root: Path

    @property
    def region_toml(self) -> Path:
        """The region's settings."""
        return self.root / "region.toml"

    @property
    def rack_toml(self) -> Path:
        """The rack's settings."""
        return self.root / "rack.toml"

    @property
    def profile(self) -> Path:
        """URL and key for the command line."""
        return self.root / "profile.toml"

    @property
    def sample(self) -> Path:
        """The sample stream."""
        return self.root / "sample-stream"

    def log(self, daemon: str) -> Path:
        """What ``daemon`` writes."""
        return self.root / f"{daemon}.log"


@frozen
class Ports:
    """Where the region listens."""

    http: int
    rpc: int


def open_state(requested: Path | None, directory: Path) -> tuple[State, str]:
    """The state directory, made if need be, and a sentence about where it is if that is not where one would look.

    :raises CommandFailed: if it cannot be made, or someone else could change what is in it.
    """
    wanted = Path(os.path.abspath(directory / requested)) if requested is not None else state_directory(directory)
    try:
        wanted.mkdir(mode=0o755, parents=True, exist_ok=True)
        found = wanted.lstat()
    except OSError as error:
        raise CommandFailed(f"cannot make the state directory {wanted}: {error.strerror}", Status.USAGE) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CommandFailed(
            f"{wanted} is not a directory that only user {os.geteuid()} may write to; "
            "remove it, or name another with --state",
            Status.USAGE,
        )
    note = ""
    if requested is None and wanted.name != ".state":
        note = f"the state is in {wanted}, because PostgreSQL's user could not reach {Path(directory) / '.state'}"
    return State(wanted), note


def lock_state(state: State) -> Any:
    """Take the state directory for this process; keep what is returned for as long as it is needed.

    :raises CommandFailed: if another ``stanchion up`` has it.
    """
    file = open(state.root / LOCK, "ab+")  # noqa: SIM115  (the lock is held for as long as it is open)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().decode("ascii", "backslashreplace").strip() or "unknown"
        file.close()
        raise CommandFailed(
            f"another `stanchion up` (process {owner}) runs with {state.root}; stop it, or use another --state",
            Status.USAGE,
        ) from None
    file.truncate(0)
    file.write(f"{os.getpid()}\n".encode("ascii"))
    file.flush()
    return file


def choose_ports(state: State, listen: str) -> Ports:
    """The ports of the last run in this state directory, else the usual ones, else free ones."""
    before = _ports_before(state)
    http = _first_free(listen, [*([before.http] if before else []), HTTP_PORT])
    return Ports(http, _first_free(listen, [*([before.rpc] if before else []), RPC_PORT], but=http))


def _ports_before(state: State) -> Ports | None:
    if not state.region_toml.exists():
        return None
    try:
        config = load(RegionConfig, state.region_toml)
    except SettingsError:
        # The file is written anew in a moment; that it was bad only means that its ports are not known.
        return None
    return Ports(config.http.port, config.rpc.port)


def _first_free(listen: str, wanted: Iterable[int], but: int = 0) -> int:
    """The first of ``wanted`` ports that nobody listens on, else any free one.

    :raises CommandFailed: if ``listen`` is no address of this machine.
    """
    family = socket.AF_INET6 if ":" in listen else socket.AF_INET
    reason = ""
    for port in (*(port for port in wanted if port != but), 0):
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind((listen, port))
                sock.listen(1)
            except OSError as error:
                reason = error.strerror or str(error)
                continue
            found: int = sock.getsockname()[1]
            return found
    raise CommandFailed(f"cannot listen on {listen}: {reason}", Status.USAGE)


def write_settings(state: State, listen: str, ports: Ports, proxy: str) -> None:
    """Write the region's and the rack's settings."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(listen, listen)
    address = json.dumps(f"[{host}]:{ports.rpc}" if ":" in host else f"{host}:{ports.rpc}")
    head = "# Written by `stanchion up`, anew at each start. etc/{0}.toml explains every setting.\n"
    region = f"""\
name = "up"
state_directory = "region"

[http]
listen = {json.dumps(listen)}
port = {ports.http}

[rpc]
listen = {json.dumps(listen)}
port = {ports.rpc}
advertise = {address}

[images]
at_start = false
proxy = {json.dumps(proxy)}
"""
    rack = f'state_directory = "rack"\nregions = [{address}]\n'
    _replace(state.region_toml, head.format("region") + region)
    _replace(state.rack_toml, head.format("rack") + rack)


def _replace(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, "utf-8")
    part.rename(path)
