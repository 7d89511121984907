"""``stanchion region``: what is done on the region's host, to its database, and needs no API key: to make the first.

The database is found through the region's settings. The embedded one runs only with its region, which is told apart by
the lock that the region holds, and is connected to through its private socket.
"""

from __future__ import annotations

import argparse
import fcntl
import re
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final, TypeVar

import psycopg2.errors

from region.api.keys import ApiKeyStore
from region.authority_files import AuthorityError, is_changing, read_ca
from region.cli import DEFAULT_CONFIG
from region.config import RegionConfig
from region.database import Database, DatabaseUnavailable
from region.database.premises import NAME
from region.tokens import create_join_token, list_join_tokens, revoke_join_token
from rpc.certificates import moment
from rpc.console import CommandFailed, Status, complain, write, write_json, write_table
from rpc.profile import is_up, state_directory
from rpc.running import run_in_reactor
from rpc.settings import load

T = TypeVar("T")

_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def config_of(arguments: argparse.Namespace) -> RegionConfig:
    """The settings of the region on this host: those that ``--config`` names; by default those that are installed, or,
    where none are, those of the ``stanchion up`` that runs from this directory.

    :raises SettingsError: if they cannot be read, or are no good.
    """
    path = Path(arguments.config)
    if arguments.config == DEFAULT_CONFIG and not path.exists():
        state = state_directory(Path.cwd())
        if is_up(state):
            path = state / "region.toml"
    return load(RegionConfig, path)


def apikey(arguments: argparse.Namespace) -> int:
    """Make an API key."""
    config = config_of(arguments)
    key = in_database(config, lambda database: ApiKeyStore(database).create(arguments.name))
    if arguments.json:
        write_json({"key": key.text, "name": key.name})
    else:
        write(key.text)
    return Status.YES


def join_token(arguments: argparse.Namespace) -> int:
    """Make a join token; or list those that there are, or take one back."""
    config = config_of(arguments)
    if arguments.list:
        return _list_tokens(arguments, config)
    if arguments.revoke:
        return _revoke_token(arguments, config)
    seconds = seconds_of(arguments.expires)
    if arguments.uses < 1:
        raise CommandFailed(f"--uses must be 1 or more, not {arguments.uses}", Status.USAGE)
    try:
        ca = read_ca(authority_directory(config))
        changing = is_changing(authority_directory(config))
    except AuthorityError as error:
        raise CommandFailed(str(error), Status.USAGE) from error
    token = in_database(
        config, lambda database: create_join_token(database, ca, expires_seconds=seconds, uses=arguments.uses)
    )
    if changing:
        complain(
            "the certificate authority is being changed: a rack can join with this token only until the change is "
            "finished (stanchion region rotate-ca --finish)"
        )
    if arguments.json:
        write_json({"token": token, "expires_seconds": seconds, "uses": arguments.uses})
    else:
        write(token)
        if sys.stdout.isatty():
            address = config.rpc.advertise or f"THIS-HOST:{config.rpc.port}"
            write(f"\nOn the rack: sudo -u stanchion-rack stanchion rack join --region {address} {token}")
    return Status.YES


def _list_tokens(arguments: argparse.Namespace, config: RegionConfig) -> int:
    tokens = in_database(config, list_join_tokens)
    if arguments.json:
        write_json(
            [
                {"id": one.id, "state": one.state, "created": moment(one.created), "expires": moment(one.expires),
                 "uses_left": one.uses_left, "revoked": one.revoked and moment(one.revoked)}
                for one in tokens
            ]
        )  # fmt: skip
    elif tokens:
        rows = [(one.id, one.state, one.uses_left, moment(one.created), moment(one.expires)) for one in tokens]
        write_table(("TOKEN", "STATE", "USES LEFT", "MADE", "EXPIRES"), rows)
    else:
        write("there are no join tokens; `stanchion region join-token` makes one")
    return Status.YES


def _revoke_token(arguments: argparse.Namespace, config: RegionConfig) -> int:
    if not in_database(config, lambda database: revoke_join_token(database, arguments.revoke)):
        raise CommandFailed(
            f"there is no join token {arguments.revoke!r}; see `stanchion region join-token --list`", Status.NO
        )
    say(arguments, {"revoked": arguments.revoke}, f"nobody can join with {arguments.revoke} any more")
    return Status.YES


def say(arguments: argparse.Namespace, document: object, text: str) -> None:
    """Print ``document`` for a program, or ``text`` for people."""
    if arguments.json:
        write_json(document)
    else:
        write(text)


def seconds_of(text: str) -> int:
    """A time such as ``30m``, ``12h`` or ``7d``, in seconds.

    :raises CommandFailed: if it is no such time, or none at all.
    """
    found = re.fullmatch(r"([0-9]{1,9})([smhd])", text)
    if found is None or int(found[1]) == 0:
        raise CommandFailed(f"{text!r} is not a time such as 30m, 12h or 7d", Status.USAGE)
    return int(found[1]) * _SECONDS[found[2]]


def in_database(config: RegionConfig, work: Callable[[Database], Coroutine[Any, Any, T]]) -> T:
    """Run ``work`` with the region's database, and return what it returns.

    :raises CommandFailed: if the database cannot be reached, or no region ever used it.
    """
    dsn = config.database or embedded_dsn(database_directory(config))

    async def connected(reactor: Any) -> T:
        database = Database(reactor, dsn, size=1)
        try:
            await database.start()
            return await work(database)
        except DatabaseUnavailable as error:
            raise CommandFailed(f"the region's database cannot be reached: {error}", Status.UNREACHABLE) from error
        except psycopg2.errors.UndefinedTable as error:
            raise CommandFailed(
                "the region's database is empty: start the region once, it makes its tables", Status.UNREACHABLE
            ) from error
        finally:
            await database.stop()

    return run_in_reactor(connected)


def database_directory(config: RegionConfig) -> Path:
    """Where the region that ``config`` is for keeps its embedded PostgreSQL."""
    return config.state_directory / "postgres"


def authority_directory(config: RegionConfig) -> Path:
    """Where the region that ``config`` is for keeps its certificate authority."""
    return config.state_directory / "authority"


def embedded_dsn(directory: Path) -> str:
    """How to connect to the embedded PostgreSQL in ``directory``, which must be running.

    :raises CommandFailed: if it is not, or this user may not see it.
    """
    try:
        running = _is_locked(directory / "lock")
        facts = (directory / "data" / "postmaster.pid").read_text("utf-8").splitlines() if running else []
    except FileNotFoundError:
        facts = []
    except OSError as error:
        raise CommandFailed(
            f"cannot look into {directory}: {error.strerror}; run this as root or as the region's user", Status.USAGE
        ) from error
    if len(facts) < 5:
        raise CommandFailed(
            f"no region runs with {directory.parent}, and its database runs only with it: start the region first, or "
            "name its settings with --config",
            Status.UNREACHABLE,
        )
    # postmaster.pid, line by line: process, data directory, start, port, socket directory (PostgreSQL's miscadmin.h).
    host = facts[4].replace("\\", "\\\\").replace("'", "\\'")
    return f"host='{host}' port={facts[3]} user={NAME} dbname={NAME}"


def _is_locked(path: Path) -> bool:
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
