"""The commands that ask a region: ``releases``, ``why``, ``racks`` and ``images``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote

from region.cli.api import ask, client_of, done
from region.cli.racks import forget_rack
from rpc.client import Refused
from rpc.console import CommandFailed, Status, painted, safe, size, write, write_json, write_table

STATUS_OF: Final[Mapping[str, Status]] = {
    "deployable": Status.YES,
    "arriving": Status.NO,
    "unknown": Status.NO,
    "undetermined": Status.UNREACHABLE,
    "no-racks": Status.UNREACHABLE,
    "nothing-published": Status.UNREACHABLE,
}
"""The exit status for a state: no for what is a certain no at this moment, "no answer" for what nobody can know."""

Document = Mapping[str, Any]


def releases(arguments: argparse.Namespace) -> int:
    """Every release with its state."""
    client = client_of(arguments)
    document = ask(client, "releases/", arguments)
    if arguments.json:
        write_json(document)
    else:
        _show_releases(document)
    states = [entry["state"] for entry in document["releases"]]
    if "deployable" in states:
        return Status.YES
    if not document["racks"] or document["generation"] is None or document.get("reason"):
        return Status.UNREACHABLE
    return max((STATUS_OF.get(state, Status.UNREACHABLE) for state in states), default=Status.NO)


def _show_releases(document: Document) -> None:
    rows = [
        (
            entry["name"],
            entry["title"],
            entry["state"],
            ", ".join(_architecture(one, entry["state"]) for one in entry["architectures"]),
            _support(entry["support"]),
        )
        for entry in document["releases"]
    ]
    if rows:
        write_table(("RELEASE", "TITLE", "STATE", "ARCHITECTURES", "SUPPORT"), rows)
    elif document["generation"] is None:
        write("nothing has been published yet; `stanchion sources` shows where from, `stanchion import` gets it")
    elif document.get("reason"):
        write(safe(document["reason"]))
    else:
        write(f"generation {document['generation']['number']} has no release that fits")
    if not document["racks"]:
        write("no rack has joined yet; `stanchion region join-token`, on the region, begins that")
    for entry in document["releases"]:
        if entry["state"] not in ("deployable", "no-racks", "nothing-published"):
            write(f"{entry['name']}: {safe(entry['reason'])}")
    for rack in document["racks"]:
        if rack["outcome"] != "answered":
            write(f"{painted('failed', text=safe(rack['name']))}: {safe(rack['reason'])}")


def _architecture(one: Document, state: str) -> str:
    """An architecture, with its own state where that is another than the release's."""
    name: str = one["arch"]
    return name if one["state"] == state else f"{name} ({one['state']})"


def _support(support: Document) -> str:
    match support["state"]:
        case "supported":
            return f"until {support['eol']}"
        case "extended":
            return f"extended until {support['esm_eol']}"
        case "ended":
            return f"ended {support['esm_eol'] or support['eol']}"
    return str(support["state"])


def why(arguments: argparse.Namespace) -> int:
    """One release, rack by rack."""
    os, slash, release = arguments.release.partition("/")
    if not (os and slash and release) or "/" in release:
        raise CommandFailed(f"{arguments.release!r} is not OS/RELEASE, such as ubuntu/noble", Status.USAGE)
    client = client_of(arguments)
    try:
        document = ask(client, f"releases/{quote(os, safe='')}/{quote(release, safe='')}/", arguments)
    except Refused as error:
        if error.code != 400 or not isinstance(error.document, dict):
            raise
        return _refused(arguments, error.document)
    if arguments.json:
        write_json(document)
    else:
        _show_why(document)
    return STATUS_OF.get(document["state"], Status.UNREACHABLE)


def _refused(arguments: argparse.Namespace, document: Document) -> int:
    """What the question names is not known: a certain no for a release, a mistake for anything else in it."""
    if arguments.json:
        write_json(document)
    else:
        for messages in document.values():
            write(safe(" ".join(map(str, messages)) if isinstance(messages, list) else str(messages)))
    return Status.NO if document.keys() <= {"distro_series", "architecture", "kernel"} else Status.USAGE


def _show_why(document: Document) -> None:
    title = safe(f"{document['name']} ({document['title']})" if document["title"] else document["name"])
    if document.get("kernel"):
        title += f" with kernel {safe(document['kernel'])}"
    write(f"{title}: {painted(document['state'])}. {safe(document['reason'])}")
    if document.get("retry_after"):
        write(f"Ask again in {document['retry_after']} s.")
    for one in document["architectures"]:
        if not one["arch"] and not one["racks"]:
            continue  # nothing lists it and nobody could hold it: all was said above
        name = one["arch"] or "any architecture"
        version = f", version {one['version']}, {size(one['size'])}" if one.get("version") else ""
        write(f"\n{safe(name)}: {painted(one['state'])}{safe(version)}. {safe(one['reason'])}")
        for told in (one.get("published"), one.get("went")):
            if told:
                write(safe(told))
        rows = [
            (
                rack["name"],
                {True: "yes", False: "no", None: "not known"}[rack["holds"]],
                " ".join(rack["versions"]),
                "" if rack["generation"] is None else rack["generation"],
                rack["state"],
                safe(rack.get("says") or rack["reason"] or _behind(rack)),
            )
            for rack in one["racks"]
        ]
        if rows:
            write_table(("RACK", "HOLDS IT", "VERSION", "GENERATION", "STATE", "NOTE"), rows)
    if document.get("went"):
        write(f"\n{safe(document['went'])}")


def _behind(rack: Document) -> str:
    if rack["in_step"]:
        return ""
    behind = rack.get("behind")
    text = f"{behind} behind" if behind else "not in step"
    shown = _sync_progress(rack.get("progress") or {})
    return f"{text}, {shown}" if shown else text


def _sync_progress(progress: Document) -> str:
    """What a rack reports of its sync, in a few words."""
    done, total, rate = progress.get("bytes_done"), progress.get("bytes"), progress.get("rate")
    if isinstance(done, int) and isinstance(total, int) and total:
        return f"{size(done)} of {size(total)}" + (f", {size(rate)}/s" if isinstance(rate, int) else "")
    return str(progress.get("reason") or progress.get("step") or "")


def racks(arguments: argparse.Namespace) -> int:
    """Every rack; or one is told to sync, or forgotten."""
    client = client_of(arguments)
    if arguments.sync:
        return done(
            arguments, client.post(f"rackcontrollers/{quote(arguments.sync, safe='')}/", op="import_boot_images")
        )
    if arguments.forget:
        return forget_rack(arguments, client, arguments.forget)
    found = client.get("rackcontrollers/")
    if arguments.json:
        write_json(found)
    elif found:
        rows = [
            (
                rack["hostname"],
                rack["system_id"],
                "revoked" if rack.get("revoked") else "connected" if rack["connected"] else "away",
                ", ".join(_process(one) for one in rack["connections"]),
                rack["state"],
                "" if rack["generation"] is None else rack["generation"],
                rack["version"],
                _rack_note(rack),
            )
            for rack in found
        ]
        write_table(("RACK", "ID", "LINK", "WITH", "STATE", "GENERATION", "VERSION", "NOTE"), rows)
    else:
        write("no rack has joined yet; `stanchion region join-token`, on the region, begins that")
    return Status.YES if all(rack["connected"] or rack.get("revoked") for rack in found) else Status.NO


def _process(connection: Document) -> str:
    """A region process, by a name that few others have."""
    return f"{connection['process']}@{connection['host']}"


def _rack_note(rack: Document) -> str:
    if rack.get("revoked"):
        return f"since {rack['revoked']}; `stanchion racks forget {safe(rack['hostname'])}` frees its name"
    parts = []
    if not rack["connected"]:
        since = rack["not_connected_since"]
        parts.append(f"not connected since {since}" if since else "not connected")
    if rack["behind"]:
        parts.append(f"{rack['behind']} behind" if rack["generation"] is not None else "holds nothing yet")
    shown = _sync_progress(rack["progress"] or {})
    if shown:
        parts.append(shown)
    return ", ".join(parts)


def images(arguments: argparse.Namespace) -> int:
    """Every image that is published."""
    found = client_of(arguments).get("boot-resources/")
    if arguments.json:
        write_json(found)
    elif found:
        rows = [
            (
                image["name"],
                _with_flavour(image),
                image.get("version") or "",
                size(image.get("size") or 0),
                image["machines_deployed"],
                image.get("last_update") or "",
                image.get("generation") or "",
            )
            for image in sorted(found, key=lambda image: (image["name"], _with_flavour(image)))
        ]
        write_table(("IMAGE", "ARCHITECTURE", "VERSION", "SIZE", "DEPLOYED", "LAST UPDATE", "GENERATION"), rows)
    else:
        write("nothing has been published yet; `stanchion import` imports what `stanchion sources` shows")
    return Status.YES


def _with_flavour(image: Document) -> str:
    """Architecture and subarchitecture, with the kernel's flavour where it is a special one."""
    flavour = image.get("kflavor") or "generic"
    architecture: str = image["architecture"]
    return architecture if flavour == "generic" else f"{architecture} ({flavour})"
