"""``stanchion node show``: one machine, what ran on it, what failed, why, and what to do about it."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final

from region.cli.api import client_of
from region.cli.events import row_of
from region.cli.nodes import memory, path_of
from rpc.client import Client, Refused
from rpc.console import CommandFailed, Status, painted, safe, size, write, write_json, write_table

EVENTS: Final = 12
"""Events that are shown, the newest."""

GREPPED: Final = 3
"""Ids that are searched for in the log at once."""

_FAILED: Final = ("Failed", "Timed out", "Degraded")
_STATES: Final = {"Ready": "ready", "Commissioning": "syncing", "Testing": "syncing", "Broken": "failed"}


def show(arguments: argparse.Namespace) -> int:
    """Show one machine."""
    client = client_of(arguments)
    machine = _read(client, path_of(arguments.node))
    results = _results(client, machine)
    events = client.get("events/", op="query", id=machine["system_id"], limit=str(EVENTS))["events"]
    if arguments.json:
        write_json({"machine": machine, "results": results, "events": events, "advice": list(advice(machine, results))})
        return Status.YES
    _show_machine(machine)
    _show_problems(machine)
    _show_results(results, {each["script"] for each in machine["problems"]})
    _show_advice(machine, results)
    if events:
        write("\nEvents")
        write_table(
            ("TIME (UTC)", "LEVEL", "EVENT", "DESCRIPTION"),
            [(row[0], row[1], row[3], row[4]) for row in map(row_of, reversed(events))],
        )
    return Status.YES


def output(arguments: argparse.Namespace) -> int:
    """Show what scripts wrote."""
    client = client_of(arguments)
    machine = _read(client, path_of(arguments.node))
    run = "current-testing" if arguments.testing else "current-commissioning"
    text = _read(
        client, f"nodes/{machine['system_id']}/results/{run}/", op="download",
        output="all" if arguments.all else "combined", filetype="txt",
        filters=",".join(arguments.script) or None,
    )  # fmt: skip
    if isinstance(text, bytes):
        text = text.decode("utf-8", "backslashreplace")
    if arguments.json:
        write_json({"output": text})
    else:
        write(safe(text, keep="\n\t").rstrip("\n") if text else "nothing was written")
    return Status.YES


def advice(machine: Any, runs: Sequence[Any]) -> Iterator[str]:
    """What to do about what is wrong with a machine, most important first; nothing if nothing is."""
    name, status = machine["hostname"], machine["status_name"]
    problems = machine.get("problems", [])
    own = [each for each in problems if each["fault"] == "region"]
    if own:
        ids = list(dict.fromkeys(each["correlation"] for each in reversed(own) if each["correlation"]))
        rest = f" (and so on: {len(ids) - GREPPED} more)" if len(ids) > GREPPED else ""
        yield (
            "The region failed at what it makes of the outputs, not the machine; the outputs are kept. Report it, with "
            "the tracebacks, which the log where it runs has: "
            f"journalctl -u stanchion-region | grep -A 40 -e {' -e '.join(ids[:GREPPED])}{rest}"
        )
    if unusable := dict.fromkeys(each["script"] for each in problems if each["fault"] == "output"):
        yield (
            f"What {', '.join(unusable)} wrote cannot be used, for the reason above: see whether the script fits the "
            f"machine: stanchion node output {name} {' '.join(unusable)}"
        )
    for run in runs:
        kind = " --testing" if run["type_name"] == "Testing" else ""
        failed = [each["name"] for each in run["results"] if _has_failed(each)]
        if failed and status.startswith("Failed"):
            yield f"See what the scripts wrote: stanchion node output {name} {' '.join(failed[:3])}{kind}"
    if any(each.get("late") for run in runs for each in run["results"]):
        yield f"See what came late: stanchion node output {name} --all. It is used by nothing; run the scripts again."
    match status:
        case "New":
            yield f"Commission it: stanchion node commission {name}"
        case "Commissioning" | "Testing" if not machine["last_heard"]:
            yield (
                "It was not heard of yet: it is to be switched on, and to boot from the network. If it runs already: "
                "stanchion node runner runner.pyz"
            )
        case "Failed commissioning":
            yield f"When the cause is dealt with: stanchion node commission {name}"
        case "Failed testing":
            yield f"When the cause is dealt with: stanchion node test {name}, or stanchion node commission {name}"
        case "Broken":
            yield f"When it is mended: stanchion node mark-fixed {name}"


def _read(client: Client, path: str, **query: str | None) -> Any:
    try:
        return client.get(path, **query)
    except Refused as error:
        if error.code == 404 and error.text:
            raise CommandFailed(error.text.strip(), Status.NO) from error
        raise


def _results(client: Client, machine: Any) -> list[Any]:
    """The runs that the machine's status is about: its last commissioning, and its last tests."""
    current = (machine["current_commissioning_result_id"], machine["current_testing_result_id"])
    if not any(current):
        return []
    runs = client.get(f"nodes/{machine['system_id']}/results/")
    return sorted((run for run in runs if run["id"] in current), key=lambda run: str(run["type_name"]))


def _show_machine(machine: Any) -> None:
    status = machine["status_name"]
    state = _STATES.get(status, "failed" if status.startswith("Failed") else status)
    write(
        f"{safe(machine['hostname'])} ({machine['system_id']}): {painted(state, text=status)} "
        f"since {machine['status_changed']}"
    )
    disks = machine["physicalblockdevice_set"]
    heard = machine["last_heard"] or "never"
    if machine["last_heard"] and machine["heard"]:
        heard += f": {machine['heard']}"
    lines = {
        "why": machine["status_message"],
        "last heard": heard,
        "hardware": ", ".join(
            word
            for word in (
                machine["architecture"],
                f"{machine['cpu_count']} CPUs" if machine["cpu_count"] else "",
                memory(machine),
                machine["boot_method"],
            )
            if word
        ),
        "disks": ", ".join(f"{disk['name']} ({size(disk['size'])})" for disk in disks),
        "interfaces": ", ".join(f"{one['name']} ({one['mac_address']})" for one in machine["interface_set"]),
        "addresses": ", ".join(machine["ip_addresses"]),
        "tags": ", ".join(machine["tag_names"]),
        "description": machine["description"],
    }
    for name, text in lines.items():
        if text:
            write(f"  {name:12} {safe(text)}")


def _show_problems(machine: Any) -> None:
    if not machine["problems"]:
        return
    write("\nWhat could not be done with what it reported")
    write_table(
        ("STEP", "SCRIPT", "ERROR", "WHEN", "IN THE LOG UNDER"),
        [
            (each["step"], each["script"], f"{each['error_type'].rpartition('.')[2]}: {each['error']}",
             each["occurred"], each["correlation"])
            for each in reversed(machine["problems"])
        ],
    )  # fmt: skip


def _show_results(runs: Sequence[Any], explained: Collection[str]) -> None:
    """The runs with their results; what was said of the scripts that are ``explained`` is not said again."""
    for run in runs:
        if not run["results"]:
            continue
        write(f"\n{run['type_name']}: {run['status_name'].lower()}")
        write_table(
            ("SCRIPT", "STATUS", "EXIT", "RUNTIME", "NOTE"),
            [
                (
                    each["name"], each["status_name"], each["exit_status"], each.get("runtime") or "",
                    _note(each, explained),
                )
                for each in run["results"]
            ],
        )  # fmt: skip


def _note(result: Any, explained: Collection[str]) -> str:
    if result.get("post_processing") == "failed" and result["name"] in explained:
        late = len(result.get("late", ()))
        return "the region could not process its output: see above" + (f"; {late} more came late" if late else "")
    if result.get("warning"):
        return str(result["warning"])
    return "is being processed" if result.get("post_processing") == "pending" else ""


def _show_advice(machine: Any, runs: Sequence[Any]) -> None:
    lines = list(advice(machine, runs))
    if lines:
        write("\nWhat to do")
        for line in lines:
            write(f"  {safe(line)}")


def _has_failed(result: Any) -> bool:
    return str(result["status_name"]).startswith(_FAILED) or bool(result.get("warning"))
