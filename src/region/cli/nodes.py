"""``stanchion node``: the machines, and what is done with them."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from region.cli.api import client_of, done
from rpc.client import Client, Fields, Refused, Unreachable
from rpc.console import CommandFailed, Status, complain, safe, size, write, write_json, write_table

PAGE: Final = 500
"""Machines that are read at once."""

POLL_SECONDS: Final = 2.0

_BUSY: Final = ("Commissioning", "Testing")
_NEVER: Final = threading.Event()


def show_all(arguments: argparse.Namespace) -> int:
    """Show the machines."""
    machines = list(_read_all(client_of(arguments), arguments))
    if arguments.json:
        write_json(machines)
    elif machines:
        write_table(
            ("NAME", "ID", "STATUS", "ARCHITECTURE", "CPUS", "MEMORY", "DISKS", "TAGS", "LAST HEARD"),
            [_row(machine) for machine in machines],
        )
    elif arguments.status or arguments.tag:
        write("there are no such machines")
    else:
        write("there are no machines; `stanchion node create` makes one")
    return Status.YES


def _read_all(client: Client, arguments: argparse.Namespace) -> Iterator[Any]:
    last = None
    while True:
        page = client.get(
            "machines/", status=arguments.status or None, tags=arguments.tag or None, limit=str(PAGE), after=last
        )
        yield from page
        if len(page) < PAGE:
            return
        last = page[-1]["system_id"]


def _row(machine: Any) -> tuple[object, ...]:
    disks = sum(disk["size"] for disk in machine["physicalblockdevice_set"])
    return (
        machine["hostname"], machine["system_id"], machine["status_name"], machine["architecture"],
        machine["cpu_count"] or "", memory(machine), size(disks) if disks else "", ", ".join(machine["tag_names"]),
        machine["last_heard"] or "never",
    )  # fmt: skip


def memory(machine: Any) -> str:
    """A machine's memory for people; empty where it is not known."""
    mebibytes = machine["memory"]
    if not mebibytes:
        return ""
    return f"{mebibytes} MiB" if mebibytes < 10240 else f"{mebibytes / 1024:.0f} GiB"


def create(arguments: argparse.Namespace) -> int:
    """Make a machine."""
    client = client_of(arguments)
    fields: dict[str, str | list[str]] = {"architecture": arguments.arch, "mac_addresses": arguments.mac}
    if arguments.name:
        fields["hostname"] = arguments.name
    if arguments.description:
        fields["description"] = arguments.description
    fields["commission"] = "true" if arguments.commission else "false"
    machine = _asked(lambda: client.post("machines/", {**fields, **_plan(arguments)}))
    if arguments.json:
        write_json(machine)
        return Status.YES
    then = (
        "it is to be switched on now" if arguments.commission
        else f"`stanchion node commission {machine['hostname']}` begins to commission it"
    )  # fmt: skip
    write(f"{machine['hostname']} ({machine['system_id']}) is made; {then}")
    return Status.YES


def commission(arguments: argparse.Namespace) -> int:
    """Begin to commission a machine, and maybe wait for the end."""
    return _begin(arguments, "commission")


def test(arguments: argparse.Namespace) -> int:
    """Begin to test a machine, and maybe wait for the end."""
    return _begin(arguments, "test")


def _begin(arguments: argparse.Namespace, op: str) -> int:
    client = client_of(arguments)
    machine = _asked(lambda: client.post(path_of(arguments.node), _plan(arguments), op=op))
    if arguments.wait:
        try:
            return wait(client, arguments, machine)
        except KeyboardInterrupt:
            return Status.INTERRUPTED
    if arguments.json:
        write_json(machine)
        return Status.YES
    write(f"{machine['hostname']} is {machine['status_name'].lower()}; it is to be switched on now, or on again")
    return Status.YES


def wait(
    client: Client, arguments: argparse.Namespace, machine: Any, pause: Callable[[float], object] = _NEVER.wait
) -> int:
    """Wait until nothing is being done with a machine any more, and say what it is then.

    :param pause: waits so many seconds; what it raises ends this.
    """
    status, away = "", False
    while machine["status_name"] in _BUSY:
        if machine["status_name"] != status and not arguments.json:
            status = machine["status_name"]
            write(f"{machine['hostname']} is {status.lower()} …")
        pause(POLL_SECONDS)
        try:
            machine, away = client.get(path_of(machine["system_id"])), False
        except Unreachable as error:
            if not away:
                complain(f"{error}; still trying")
            away = True
    if arguments.json:
        write_json(machine)
    else:
        message = machine["status_message"]
        write(safe(f"{machine['hostname']} is {machine['status_name']}" + (f": {message}" if message else "")))
        if machine["status_name"] != "Ready":
            write(f"`stanchion node show {machine['hostname']}` shows more")
    return Status.YES if machine["status_name"] == "Ready" else Status.NO


def abort(arguments: argparse.Namespace) -> int:
    """End what is being done with a machine."""
    return _mark(arguments, "abort")


def mark_broken(arguments: argparse.Namespace) -> int:
    """Say that a machine is broken."""
    return _mark(arguments, "mark_broken")


def mark_fixed(arguments: argparse.Namespace) -> int:
    """Say that a machine is mended."""
    return _mark(arguments, "mark_fixed")


def _mark(arguments: argparse.Namespace, op: str) -> int:
    client = client_of(arguments)
    fields = {"comment": arguments.comment} if arguments.comment else {}
    machine = _asked(lambda: client.post(path_of(arguments.node), fields, op=op))
    return done(arguments, f"{machine['hostname']} is {machine['status_name']} now")


def delete(arguments: argparse.Namespace) -> int:
    """Forget a machine."""
    client = client_of(arguments)
    _asked(lambda: client.delete(path_of(arguments.node)))
    return done(arguments, f"{arguments.node} is forgotten; its events stay")


def credentials(arguments: argparse.Namespace) -> int:
    """Show a machine's token, as the part of cloud-init's configuration that names its data source."""
    client = client_of(arguments)
    token = _asked(lambda: client.get(path_of(arguments.node), op="get_token"))
    if token is None:
        raise CommandFailed(
            f"{arguments.node} has no credentials: it gets some when it begins to be commissioned or tested", Status.NO
        )
    if arguments.json:
        write_json({"metadata_url": f"{client.profile.url}/MAAS/metadata/", **token})
        return Status.YES
    write("datasource:\n  MAAS:")
    write(f"    metadata_url: {client.profile.url}/MAAS/metadata/")
    for name in ("consumer_key", "token_key", "token_secret"):
        write(f"    {name}: {safe(token[name])}")
    return Status.YES


def runner(arguments: argparse.Namespace) -> int:
    """Write the runner to a file, and say how it is used. The region is not asked: it is part of this program."""
    from region.metadata.userdata import runner_archive  # reading all of it is for who wants it

    content, path = runner_archive(), Path(arguments.file)
    try:
        path.write_bytes(content)
    except OSError as error:
        raise CommandFailed(f"{path} cannot be written: {error.strerror}", Status.USAGE) from error
    if arguments.json:
        write_json({"file": str(path), "size": len(content)})
        return Status.YES
    write(f"{safe(str(path))} is written: {len(content)} bytes, for Python 3.6 or later")
    write(f"""\
On a machine that is being commissioned or tested, as root, in place of booting it:
  stanchion node credentials NODE > node.cfg     (here; it holds secrets: delete it afterwards)
  python3 {safe(path.name)} --config node.cfg            (there, with both files)""")
    return Status.YES


def path_of(node: str) -> str:
    """The API's path of a machine."""
    return f"machines/{quote(node, safe='')}/"


def _plan(arguments: argparse.Namespace) -> Fields:
    """The fields of a run, as far as the command has them."""
    fields: dict[str, str | list[str]] = {}
    if getattr(arguments, "script", None):
        fields["commissioning_scripts"] = arguments.script
    if arguments.test:
        fields["testing_scripts"] = arguments.test
    if arguments.no_tests:
        fields["testing_scripts"] = "none"
    for name in ("enable_ssh", "skip_networking", "skip_storage"):
        if getattr(arguments, name, False):
            fields[name] = "true"
    return fields


def _asked(ask: Callable[[], Any]) -> Any:
    """What the region answers; where there is no such machine, or its status does not allow it, the region's words."""
    try:
        return ask()
    except Refused as error:
        if error.code in (404, 409) and error.text:
            raise CommandFailed(error.text.strip(), Status.NO) from error
        raise
