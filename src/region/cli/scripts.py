"""``stanchion script``: which scripts nodes run, and what they are; add, download and delete them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from region.cli.api import client_of, done
from rpc.client import Client, Refused
from rpc.console import CommandFailed, Status, is_terminal, safe, write, write_json, write_table


def show_list(arguments: argparse.Namespace) -> int:
    """The scripts, by name."""
    found = client_of(arguments).get("scripts/", type=arguments.type, filters=arguments.filter)
    if arguments.json:
        write_json(found)
    elif not found:
        write("there are no such scripts; add one (stanchion script add --help)")
    else:
        rows = [
            (one["name"], _type(one), one["hardware_type_name"], _timeout(one), ", ".join(one["tags"]), _origin(one),
             one["title"])
            for one in found
        ]  # fmt: skip
        write_table(("NAME", "TYPE", "HARDWARE", "TIMEOUT", "TAGS", "ORIGIN", "TITLE"), rows)
    return Status.YES


def show(arguments: argparse.Namespace) -> int:
    """Everything about one script but its content."""
    one = client_of(arguments).get(f"scripts/{_quoted(arguments.name)}/")
    if arguments.json:
        write_json(one)
        return Status.YES
    facts = {
        "name": one["name"], "title": one["title"], "description": one["description"], "type": _type(one),
        "hardware": one["hardware_type_name"], "runs": _parallel(one), "timeout": _timeout(one),
        "tags": ", ".join(one["tags"]), "origin": _origin(one),
        "destructive": "yes, it overwrites disks" if one["destructive"] else "",
        "may restart the node": "yes" if one["may_reboot"] else "",
        "needs": "; ".join(f"{kind}: {', '.join(map(_package, listed))}" for kind, listed in one["packages"].items()),
        "parameters": "; ".join(_parameter(name, about) for name, about in one["parameters"].items()),
    }  # fmt: skip
    width = max(len(name) for name, value in facts.items() if value) + 2
    for name, value in facts.items():
        if value:
            write(f"{name + ':':{width}}{safe(str(value))}")
    write()
    write_table(
        ("VERSION", "CREATED", "COMMENT"), [(each["id"], each["created"], each["comment"]) for each in one["history"]]
    )
    return Status.YES


def add(arguments: argparse.Namespace) -> int:
    """Add a script, or a new version of one."""
    client = client_of(arguments)
    try:
        content = Path(arguments.file).read_bytes()
    except OSError as error:
        raise CommandFailed(f"the script {arguments.file} cannot be read: {error.strerror}", Status.USAGE) from error
    name = arguments.name or _own_name(content) or Path(arguments.file).name
    fields = {
        name: value
        for name in ("type", "tags", "timeout", "comment")
        if (value := getattr(arguments, name)) is not None
    }
    exists = _exists(client, name)
    if exists:
        one = client.upload("PUT", f"scripts/{_quoted(name)}/", fields, {"script": content})
    else:
        one = client.upload("POST", "scripts/", {"name": name, **fields}, {"script": content})
    if arguments.json:
        write_json(one)
        return Status.YES
    version = one["history"][0]["id"]
    done_ = f"script {name} has the version {version} now" if exists else f"script {name} is added"
    return done(arguments, f"{done_}; it is a {_type(one)} script{_when(one)}")


def download(arguments: argparse.Namespace) -> int:
    """The script itself, to standard output or a file."""
    revision = None if arguments.revision is None else str(arguments.revision)
    content = client_of(arguments).get(f"scripts/{_quoted(arguments.name)}/", op="download", revision=revision)
    if arguments.output is None:
        _write_bytes(content)
        return Status.YES
    path = Path(arguments.output)
    try:
        path.write_bytes(content)
        path.chmod(path.stat().st_mode | 0o111)
    except OSError as error:
        raise CommandFailed(f"{path} cannot be written: {error.strerror}", Status.USAGE) from error
    return done(arguments, f"{len(content)} bytes are written to {path}")


def delete(arguments: argparse.Namespace) -> int:
    """Remove a script with all its versions."""
    client_of(arguments).delete(f"scripts/{_quoted(arguments.name)}/")
    return done(arguments, f"script {arguments.name} is deleted; its results stay")


def _own_name(content: bytes) -> str:
    """The name that the script's metadata says; metadata that is wrong is the region's to refuse."""
    from region.scripts.metadata import embedded  # reading YAML is for who adds a script alone
    from region.scripts.values import ScriptInvalid

    try:
        return str(embedded(content).get("name", ""))
    except ScriptInvalid as error:
        raise CommandFailed(f"the script cannot be added: {error}", Status.USAGE) from error


def _exists(client: Client, name: str) -> bool:
    try:
        client.get(f"scripts/{_quoted(name)}/")
    except Refused as error:
        if error.code != 404:
            raise
        return False
    return True


def _quoted(name: str) -> str:
    from urllib.parse import quote

    return quote(name, safe="")


def _write_bytes(content: bytes) -> None:
    """As it is, unless people look at it: then what would move their cursor is shown."""
    if is_terminal(sys.stdout) or not hasattr(sys.stdout, "buffer"):
        sys.stdout.write(safe(content.decode("utf-8", "backslashreplace"), keep="\n\t"))
    else:
        sys.stdout.buffer.write(content)
    sys.stdout.flush()


def _type(one: Mapping[str, Any]) -> str:
    return "commissioning" if one["type"] == 0 else "testing"


def _origin(one: Mapping[str, Any]) -> str:
    return "built in" if one["default"] else "added"


def _timeout(one: Mapping[str, Any]) -> str:
    return "none" if one["timeout"] == "0:00:00" else str(one["timeout"])


def _parallel(one: Mapping[str, Any]) -> str:
    return ("alone", "with its own instances", "with any other script")[one["parallel"]]


def _package(package: object) -> str:
    return str(package["name"]) if isinstance(package, dict) else str(package)


def _parameter(name: str, about: Mapping[str, Any]) -> str:
    default = f", {about['default']} by default" if "default" in about else ""
    return f"{name} ({about['type']}{default})"


def _when(one: Mapping[str, Any]) -> str:
    """When it is run, for who has just added it."""
    tags = one["tags"]
    if one["type"] == 0:
        return ", run only when it is named (it has the tag noauto)" if "noauto" in tags else (
            ", run at every commissioning that names no other"
        )  # fmt: skip
    if "commissioning" in tags and not one["destructive"]:
        return ", run after every commissioning that names no other tests"
    return ", run when it is named"
