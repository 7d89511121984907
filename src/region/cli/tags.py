"""``stanchion tag``: which tags there are, which machines have them, and how the evaluation of definitions goes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote

from region.cli.api import client_of, done
from rpc.client import Client, Fields, Refused
from rpc.console import CommandFailed, Status, write, write_json, write_table

_FIELDS: Final = {"name": "new_name", "definition": "definition", "comment": "comment", "kernel_opts": "kernel_options"}


def show_all(arguments: argparse.Namespace) -> int:
    """Every tag."""
    tags = client_of(arguments).get("tags/")
    if arguments.json:
        write_json(tags)
    elif not tags:
        write("no tag; make one (stanchion tag create --help)")
    else:
        rows = [(tag["name"], tag["machine_count"], _state(tag), tag["definition"] or "-") for tag in tags]
        write_table(("TAG", "MACHINES", "STATE", "DEFINITION"), rows)
    return Status.YES


def show(arguments: argparse.Namespace) -> int:
    """One tag, and the machines that have it."""
    client = client_of(arguments)
    tag = _get(client, arguments.tag)
    machines = client.get(_path(arguments.tag), op="machines")
    if arguments.json:
        write_json({**tag, "machines": machines})
        return Status.YES
    rows = [
        ("definition", tag["definition"] or "none: people say which machines have it (stanchion tag add)"),
        ("comment", tag["comment"]),
        ("kernel options", tag["kernel_opts"]),
        ("state", _state(tag)),
        ("problem", tag["problem"]),
    ]
    write_table((tag["name"], ""), [row for row in rows if row[1]])
    write()
    if machines:
        write_table(
            ("MACHINE", "ID", "STATUS"), [(one["hostname"], one["system_id"], one["status_name"]) for one in machines]
        )
    else:
        write("no machine has it")
    return Status.YES


def create(arguments: argparse.Namespace) -> int:
    """Make a tag."""
    tag = _refusing(lambda: client_of(arguments).post("tags/", {"name": arguments.tag, **_fields(arguments)}))
    return done(arguments, f"tag {tag['name']} is made" + _follows(tag))


def change(arguments: argparse.Namespace) -> int:
    """Change what is given of a tag."""
    fields = _fields(arguments)
    if not fields:
        raise CommandFailed("say what to change: --name, --definition, --comment or --kernel-options", Status.USAGE)
    tag = _refusing(lambda: client_of(arguments).put(_path(arguments.tag), fields))
    return done(arguments, f"tag {tag['name']} is changed" + _follows(tag))


def delete(arguments: argparse.Namespace) -> int:
    """Remove a tag."""
    client_of(arguments).delete(_path(arguments.tag))
    return done(arguments, f"tag {arguments.tag} is removed, also from all machines")


def rebuild(arguments: argparse.Namespace) -> int:
    """Evaluate a tag anew."""
    client_of(arguments).post(_path(arguments.tag), op="rebuild")
    return done(arguments, f"tag {arguments.tag} is being evaluated on all machines; see `stanchion tag show`")


def add(arguments: argparse.Namespace) -> int:
    """Give a tag to machines."""
    return _update(arguments, "add")


def remove(arguments: argparse.Namespace) -> int:
    """Take a tag from machines."""
    return _update(arguments, "remove")


def _update(arguments: argparse.Namespace, field: str) -> int:
    client = client_of(arguments)
    machines = [client.get(f"machines/{quote(name, safe='')}/")["system_id"] for name in arguments.machine]
    changed = client.post(_path(arguments.tag), {field: machines}, op="update_nodes")
    count = changed["added"] + changed["removed"]
    words = "got" if field == "add" else "lost"
    of = "1 machine" if count == 1 else f"{count} machines"
    return done(arguments, f"{of} {words} the tag {arguments.tag}")


def _path(name: str) -> str:
    return f"tags/{quote(name, safe='')}/"


def _get(client: Client, name: str) -> Mapping[str, Any]:
    tag: Mapping[str, Any] = client.get(_path(name))
    return tag


def _fields(arguments: argparse.Namespace) -> Fields:
    found = {field: getattr(arguments, option, None) for field, option in _FIELDS.items()}
    return {field: value for field, value in found.items() if value is not None}


def _refusing(asking: Any) -> Any:
    """The answer; what is wrong with a field is said in its own words."""
    try:
        return asking()
    except Refused as error:
        messages = error.document
        if error.code != 400 or not isinstance(messages, dict):
            raise
        said = "; ".join(f"{field}: {' '.join(map(str, each))}" for field, each in messages.items())
        raise CommandFailed(said, Status.USAGE) from error


def _follows(tag: Mapping[str, Any]) -> str:
    return "; it is being evaluated on all machines (see `stanchion tag show`)" if tag["evaluating"] else ""


def _state(tag: Mapping[str, Any]) -> str:
    if not tag["definition"]:
        return "by hand"
    if tag["evaluating"]:
        return "evaluating"
    return "problem" if tag["problem"] else "evaluated"
