"""How does ``stanchion rack join`` make this host a rack of a region? It enrols once, and keeps what it is given."""

from __future__ import annotations

import argparse
import socket
import sys
from functools import partial
from pathlib import Path
from typing import Any

from twisted.internet.error import ConnectError, DNSLookupError, UnsupportedAddressFamily

from rack.config import RackConfig
from rack.identity import Identity, NotJoined, prepare_directory, read_identity, write_identity
from rpc.addresses import split_address
from rpc.certificates import CertificateInvalid
from rpc.commands import EnrolmentRefused
from rpc.console import CommandFailed, Status, write, write_json
from rpc.endpoints import Enrolled, enrol
from rpc.failures import CallFailed
from rpc.identity import JoinToken, TokenInvalid
from rpc.running import run_in_reactor
from rpc.settings import load


def run(arguments: argparse.Namespace) -> int:
    """Join as the command line says.

    :raises CommandFailed: if that is not possible, with the status to exit with.
    """
    config = load(RackConfig, arguments.config)
    token = _token(arguments.token)
    try:
        split_address(arguments.region)
    except ValueError as error:
        raise CommandFailed(f"--region: {error}", Status.USAGE) from error
    if not arguments.again:
        _check_not_joined(config.identity_directory)
    try:  # before the token is used up
        prepare_directory(config.identity_directory)
    except OSError as error:
        raise CommandFailed(
            f"the rack's key cannot be kept in {config.identity_directory}: {error.strerror}; run this as the user "
            "that the rack runs as, or as root",
            Status.USAGE,
        ) from error
    name = arguments.name or default_name()
    identity = run_in_reactor(partial(join, region=arguments.region, token=token, name=name))
    try:
        # Where the processes of a region were that this rack may not belong to any more; the one that it joins tells.
        config.remembered_file.unlink(missing_ok=True)
        path = write_identity(config.identity_directory, identity)
    except OSError as error:
        raise CommandFailed(
            f"the region took this rack ({identity.system_id}), but its key cannot be kept: {error}; mend that, then "
            f"forget it at the region (stanchion racks forget {identity.name}), and join again with a new token",
            Status.USAGE,
        ) from error
    if getattr(arguments, "json", False):
        write_json({"system_id": identity.system_id, "name": identity.name, "region": identity.region,
                    "identity": str(path)})  # fmt: skip
    else:
        write(f"joined {identity.region} as {identity.name} ({identity.system_id}); the key is in {path}")
        start = "restart" if arguments.again else "start"
        write(f"now {start} the rack: systemctl {start} stanchion-rack, or twistd -n rack --config {arguments.config}")
    return Status.YES


def default_name() -> str:
    """The host's name, as far as the first dot."""
    return socket.gethostname().partition(".")[0] or "rack"


async def join(reactor: Any, region: str, token: JoinToken, name: str) -> Identity:
    """Enrol with the region at ``region`` (HOST:PORT); what to keep.

    :raises CommandFailed: if that is not possible.
    """
    host, port = split_address(region)
    try:
        enrolled: Enrolled = await enrol(reactor, host, port, token, name)
    except EnrolmentRefused as error:
        raise CommandFailed(f"the region at {region} refuses: {error}", Status.NO) from error
    except CertificateInvalid as error:
        raise CommandFailed(f"the region at {region} cannot be trusted: {error}", Status.NO) from error
    except (CallFailed, ConnectError, DNSLookupError, UnsupportedAddressFamily) as error:
        raise CommandFailed(f"cannot join the region at {region}: {error}", Status.UNREACHABLE) from error
    return Identity(
        system_id=enrolled.system_id,
        name=name,
        region=region,
        certificate=enrolled.credentials.certificate.decode("ascii"),
        ca=enrolled.ca.decode("ascii"),
        key=enrolled.credentials.key.decode("ascii"),
    )


def _token(text: str) -> JoinToken:
    try:
        return JoinToken.parse(sys.stdin.readline() if text == "-" else text)
    except TokenInvalid as error:
        raise CommandFailed(str(error), Status.USAGE) from error


def _check_not_joined(directory: Path) -> None:
    try:
        identity = read_identity(directory)
    except NotJoined:
        return
    raise CommandFailed(
        f"this rack has joined {identity.region} already, as {identity.name} ({identity.system_id}); "
        "to join anew, say --again",
        Status.USAGE,
    )
