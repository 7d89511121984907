"""``stanchion events``: what happened on racks and to nodes, oldest first as in a log, and on request as it goes on."""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

from region.cli.api import client_of
from rpc.client import Client, Unreachable
from rpc.console import Status, complain, painted, safe, write, write_json, write_table

POLL_SECONDS: Final = 2.0

PAGE: Final = 1000
"""Events that are read at once while following."""

_COLOURED: Final = {"WARNING": "warning", "ERROR": "error", "CRITICAL": "error"}
_NEVER: Final = threading.Event()


def run(arguments: argparse.Namespace) -> int:
    """Show the newest events; with ``--follow``, those that come too, until Ctrl-C."""
    client = client_of(arguments)
    page = _read(client, arguments, limit=str(arguments.limit))
    if not arguments.follow:
        if arguments.json:
            write_json(page)
        elif page["events"]:
            write_table(
                ("TIME (UTC)", "LEVEL", "HOST", "EVENT", "DESCRIPTION"),
                [row_of(event) for event in reversed(page["events"])],
            )
        else:
            write("there are no such events")
        return Status.YES
    try:
        follow(client, arguments, page)
    except KeyboardInterrupt:
        return Status.INTERRUPTED
    return Status.YES


def follow(
    client: Client,
    arguments: argparse.Namespace,
    page: Any,
    pause: Callable[[float], object] = _NEVER.wait,
) -> None:
    """Show the events of ``page``, and then for ever those that come. A region that is away for a while is waited for.

    :param pause: waits so many seconds; what it raises ends this.
    """
    seen, away = 0, False
    while True:
        for event in reversed(page["events"]):
            _show(event, arguments.json)
            seen = max(seen, event["id"])
        if len(page["events"]) < PAGE:
            pause(POLL_SECONDS)
        try:
            page = _read(client, arguments, limit=str(PAGE), after=str(seen))
            away = False
        except Unreachable as error:
            if not away:
                complain(f"{error}; still trying")
            page, away = {"events": []}, True


def _read(client: Client, arguments: argparse.Namespace, **query: str) -> Any:
    sources: list[str] = [*(arguments.rack or []), *(arguments.node or [])]
    return client.get(
        "events/", op="query", level=arguments.level, id=sources or None, mac_address=arguments.mac or None, **query
    )


def row_of(event: Any) -> Sequence[object]:
    """An event's columns: when, level, where, type and description; of an error with what the log has more under."""
    description, correlation = event["description"], event.get("correlation")
    if correlation and event["level"] in ("ERROR", "CRITICAL"):
        description = f"{description} [{correlation}]"
    return event["created"], event["level"], event["hostname"] or event["node"], event["type"], description


def _show(event: Any, as_json: bool) -> None:
    if as_json:
        write(json.dumps(event))
        return
    created, level, host, kind, description = map(str, row_of(event))
    shown = painted(_COLOURED.get(level, level), text=f"{level:8}")
    write(f"{created}  {shown}  {safe(host)}  {safe(kind)}: {safe(description)}")
