"""``stanchion license-key``: the license keys of releases that must not be installed without one."""

from __future__ import annotations

import argparse
import sys
from typing import Any
from urllib.parse import quote

from region.cli.api import client_of, done
from rpc.client import Client, Refused
from rpc.console import CommandFailed, Status, safe, write, write_json, write_table


def show_all(arguments: argparse.Namespace) -> int:
    """Every key."""
    found = client_of(arguments).get("license-keys/")
    if arguments.json:
        write_json(found)
    elif found:
        rows = [(f"{one['osystem']}/{one['distro_series']}", one["license_key"]) for one in found]
        write_table(("RELEASE", "LICENSE KEY"), rows)
    else:
        write("no license key; `stanchion releases --json` says which releases need one (requires_license_key)")
    return Status.YES


def give(arguments: argparse.Namespace) -> int:
    """A release gets a key, or another one."""
    os, release = _release(arguments.release)
    key = sys.stdin.readline().strip() if arguments.license == "-" else arguments.license
    client = client_of(arguments)
    try:
        _give(client, os, release, key)
    except Refused as error:
        if error.code != 400 or not isinstance(error.document, dict):
            raise
        messages = (" ".join(map(str, found)) for found in error.document.values())
        raise CommandFailed(safe(" ".join(messages)), Status.NO) from error
    return done(arguments, f"{os}/{release} has the license key")


def _give(client: Client, os: str, release: str, key: str) -> Any:
    known = {(one["osystem"], one["distro_series"]) for one in client.get("license-keys/")}
    if (os, release) in known:
        return client.put(_path(os, release), {"license_key": key})
    return client.post("license-keys/", {"osystem": os, "distro_series": release, "license_key": key})


def delete(arguments: argparse.Namespace) -> int:
    """A key is forgotten."""
    os, release = _release(arguments.release)
    client_of(arguments).delete(_path(os, release))
    return done(arguments, f"the license key of {os}/{release} is forgotten")


def _path(os: str, release: str) -> str:
    return f"license-key/{quote(os, safe='')}/{quote(release, safe='')}/"


def _release(text: str) -> tuple[str, str]:
    os, slash, release = text.partition("/")
    if not (os and slash and release) or "/" in release:
        raise CommandFailed(f"{text!r} is not OS/RELEASE, such as windows/win2022", Status.USAGE)
    return os, release
