"""``stanchion sources``: show and change where images come from."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from region.cli.api import Selection, add_source, client_of, source_url, trust_fields
from rpc.client import Client
from rpc.console import CommandFailed, Status, write, write_json, write_table


def show(arguments: argparse.Namespace) -> int:
    """The sources with their selections."""
    client = client_of(arguments)
    sources = client.get("boot-sources/")
    for source in sources:
        source["selections"] = client.get(f"boot-sources/{source['id']}/selections/")
    if arguments.json:
        write_json(sources)
    elif not sources:
        write("no source; add one (stanchion sources add --help)")
    else:
        rows = [
            (source["id"], source["url"], source["priority"], _trust(source), _selected(source["selections"]))
            for source in sources
        ]
        write_table(("ID", "URL", "PRIORITY", "TRUST", "SELECTED"), rows)
    return Status.YES


def add(arguments: argparse.Namespace) -> int:
    """Add a source."""
    client = client_of(arguments)
    trust = trust_fields(arguments.keyring, arguments.allow_unsigned)
    selections = arguments.select or [Selection()]
    source = add_source(client, source_url(arguments.source), trust, selections, arguments.priority)
    if arguments.json:
        write_json(source)
    else:
        write(f"source {source['id']} is added; `stanchion import` imports now, and shows how it goes")
    return Status.YES


def remove(arguments: argparse.Namespace) -> int:
    """Remove a source."""
    client_of(arguments).delete(f"boot-sources/{arguments.id}/")
    return _done(arguments, f"source {arguments.id} is removed; the next import removes its images")


def select(arguments: argparse.Namespace) -> int:
    """Add a selection to a source, or change the one that it has for the same release."""
    client = client_of(arguments)
    wanted: Selection = arguments.selection
    existing = _find(client, arguments.id, wanted)
    if existing is None:
        client.post(f"boot-sources/{arguments.id}/selections/", wanted.fields)
    else:
        client.put(f"boot-sources/{arguments.id}/selections/{existing['id']}/", wanted.fields)
    return _done(arguments, f"source {arguments.id} now selects {_one(wanted.fields)}")


def unselect(arguments: argparse.Namespace) -> int:
    """Remove a selection of a source."""
    client = client_of(arguments)
    existing = _find(client, arguments.id, arguments.selection)
    name = f"{arguments.selection.os}/{arguments.selection.release}"
    if existing is None:
        raise CommandFailed(f"source {arguments.id} has no selection {name}; see `stanchion sources`", Status.NO)
    client.delete(f"boot-sources/{arguments.id}/selections/{existing['id']}/")
    return _done(arguments, f"source {arguments.id} no longer selects {name}; the next import removes its images")


def _find(client: Client, source_id: int, wanted: Selection) -> Any:
    for selection in client.get(f"boot-sources/{source_id}/selections/"):
        if (selection["os"], selection["release"]) == (wanted.os, wanted.release):
            return selection
    return None


def _done(arguments: argparse.Namespace, text: str) -> int:
    if arguments.json:
        write_json({"done": text})
    else:
        write(text)
    return Status.YES


def _trust(source: dict[str, Any]) -> str:
    if source.get("allow_unsigned"):
        return "unsigned"
    return source.get("keyring_filename") or "keyring"


def _selected(selections: list[dict[str, Any]]) -> str:
    return " ".join(_one(selection) for selection in selections) or "nothing"


def _one(selection: Mapping[str, Any]) -> str:
    """A selection in the form in which it is typed."""
    text = str(selection["os"])
    if selection["release"] != "*" or text != "*":
        text += f"/{selection['release']}"
    if list(selection["arches"]) != ["*"]:
        text += ":" + ",".join(selection["arches"])
    for name in ("subarches", "labels"):
        if list(selection[name]) != ["*"]:
            text += f" ({name} {','.join(selection[name])})"
    return text
