"""``stanchion racks revoke``, ``forget`` and ``rename``: what is done to one rack."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from region.cli.api import client_of, done
from rpc.client import Client, Refused
from rpc.console import CommandFailed, Status


def revoke(arguments: argparse.Namespace) -> int:
    """Cut a rack off and keep it off."""
    client = client_of(arguments)
    rack = find(client, arguments.rack)
    client.post(f"rackcontrollers/{rack['system_id']}/", op="revoke")
    return done(arguments, f"{rack['hostname']} is revoked: it is cut off, and its certificate is refused from now on")


def forget(arguments: argparse.Namespace) -> int:
    """Remove a rack."""
    return forget_rack(arguments, client_of(arguments), arguments.rack)


def forget_rack(arguments: argparse.Namespace, client: Client, wanted: str) -> int:
    """Remove the rack with the name or id ``wanted``."""
    rack = find(client, wanted)
    client.delete(f"rackcontrollers/{rack['system_id']}/")
    return done(arguments, f"{rack['hostname']} is forgotten; its certificate is refused from now on")


def rename(arguments: argparse.Namespace) -> int:
    """Give a rack another name."""
    client = client_of(arguments)
    rack = find(client, arguments.rack)
    try:
        client.put(f"rackcontrollers/{rack['system_id']}/", {"hostname": arguments.name})
    except Refused as error:
        document = error.document
        if error.code != 400 or not isinstance(document, dict) or "hostname" not in document:
            raise
        raise CommandFailed(" ".join(map(str, document["hostname"])), Status.NO) from error
    return done(arguments, f"{rack['hostname']} is named {arguments.name} from now on")


def find(client: Client, wanted: str) -> Mapping[str, Any]:
    """The rack with the name or id ``wanted``.

    :raises CommandFailed: if there is none.
    """
    for rack in client.get("rackcontrollers/"):
        if wanted in (rack["system_id"], rack["hostname"]):
            found: Mapping[str, Any] = rack
            return found
    raise CommandFailed(f"there is no rack {wanted!r}; see `stanchion racks`", Status.NO)
