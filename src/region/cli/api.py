"""What the commands that talk to a region's API have in common: their options, and sources and imports as values."""

from __future__ import annotations

import argparse
import base64
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from rpc.client import Client, Fields, Refused
from rpc.console import CommandFailed, Status, safe, write, write_json
from rpc.profile import find_profile


def connection_options() -> argparse.ArgumentParser:
    """The parent parser with ``--url`` and ``--key``."""
    parent = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    parent.add_argument("--url", metavar="URL", help="the region, such as http://region:5240")
    parent.add_argument("--key", metavar="KEY", help="the API key, consumer:token:secret (better: STANCHION_KEY)")
    return parent


def client_of(arguments: argparse.Namespace) -> Client:
    """The client that the command's options, the environment and the profile make.

    :raises CommandFailed: if there is no key.
    """
    profile = find_profile(getattr(arguments, "url", None), getattr(arguments, "key", None))
    if not profile.key:
        raise CommandFailed(
            f"no API key for {profile.url}: make one where the region runs (stanchion region apikey), then either "
            "`stanchion login URL KEY`, or set STANCHION_KEY",
            Status.USAGE,
        )
    return Client(profile)


def done(arguments: argparse.Namespace, text: Any) -> int:
    """Say what was done, in words or as JSON."""
    if arguments.json:
        write_json({"done": str(text).strip()})
    else:
        write(safe(str(text).strip()))
    return Status.YES


@frozen
class Selection:
    """What to import of a source; "*" is any."""

    os: str = "*"
    release: str = "*"
    arches: tuple[str, ...] = ("*",)
    subarches: tuple[str, ...] = ("*",)
    labels: tuple[str, ...] = ("*",)

    @property
    def fields(self) -> Fields:
        """As the form fields of the API."""
        return {
            "os": self.os,
            "release": self.release,
            "arches": list(self.arches),
            "subarches": list(self.subarches),
            "labels": list(self.labels),
        }


_SELECTION = re.compile(r"(?P<os>[^/:]+)(/(?P<release>[^/:]*))?(:(?P<arches>[^/:]+))?\Z")


def parse_selection(text: str) -> Selection:
    """The selection ``OS[/RELEASE][:ARCH,ARCH…]``.

    :raises argparse.ArgumentTypeError: if it has another form.
    """
    found = _SELECTION.match(text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not OS/RELEASE or OS/RELEASE:ARCH,ARCH (such as ubuntu/noble:amd64)"
        )
    release = found["release"]
    return Selection(
        os=found["os"],
        release="*" if release is None else release,
        arches=tuple(found["arches"].split(",")) if found["arches"] else ("*",),
    )


def source_url(text: str) -> str:
    """The URL of a source given as a URL or as a directory of this machine.

    :raises CommandFailed: if it is neither.
    """
    if "://" in text:
        return text
    path = Path(text).expanduser().absolute()
    if not path.is_dir():
        raise CommandFailed(
            f"{text!r} is neither a URL (http://, https://, file://) nor a directory of this machine", Status.USAGE
        )
    return path.as_uri() + "/"


def trust_fields(keyring: str | None, allow_unsigned: bool) -> Fields:
    """The form fields that say how a source is trusted: the keyring's bytes, or that nothing is signed.

    :raises CommandFailed: if neither or both are given, or the keyring cannot be read.
    """
    if (keyring is not None) == allow_unsigned:
        raise CommandFailed(
            "say how the source is trusted: --keyring FILE (its signatures are verified with the keys in it), "
            "or --allow-unsigned (whoever can change what it serves decides what your machines run)",
            Status.USAGE,
        )
    if keyring is None:
        return {"allow_unsigned": "true"}
    try:
        data = Path(keyring).expanduser().read_bytes()
    except OSError as error:
        raise CommandFailed(f"the keyring {keyring} cannot be read: {error.strerror}", Status.USAGE) from error
    return {"keyring_data": base64.b64encode(data).decode("ascii")}


def add_source(client: Client, url: str, trust: Fields, selections: Sequence[Selection], priority: int = 1) -> Any:
    """Make a source with its selections; if a selection is refused, the source is removed again."""
    source = client.post("boot-sources/", {"url": url, "priority": str(priority), **trust})
    try:
        for selection in selections:
            client.post(f"boot-sources/{source['id']}/selections/", selection.fields)
    except CommandFailed:
        client.delete(f"boot-sources/{source['id']}/")
        raise
    return source


def update_source(client: Client, source_id: int, trust: Fields, selections: Sequence[Selection]) -> None:
    """Have a source that there is trusted as ``trust`` says and, unless they are none, exactly these selections."""
    client.put(f"boot-sources/{source_id}/", trust)
    path = f"boot-sources/{source_id}/selections/"
    if not selections:
        return
    wanted = {(selection.os, selection.release): selection for selection in selections}
    kept = {(one["os"], one["release"]): one["id"] for one in client.get(path)}
    for name, selection in wanted.items():
        if name in kept:
            client.put(f"{path}{kept[name]}/", selection.fields)
        else:
            client.post(path, selection.fields)
    for name in kept.keys() - wanted.keys():
        client.delete(f"{path}{kept[name]}/")


def start_import(client: Client) -> int:
    """Ask for an import; its id."""
    answer = client.request("POST", "boot-resources/", {"op": "import"}, {})
    location = answer.headers.get("Location", "").rstrip("/")
    job_id = location.rpartition("/")[2]
    if not job_id.isdigit():
        raise CommandFailed(
            f"the region did not say which import it began (Location: {location!r})", Status.UNREACHABLE
        )
    return int(job_id)


def ask(client: Client, path: str, arguments: argparse.Namespace | None = None) -> Any:
    """The document at ``path`` of ``releases/``, also when its status says "not now" (409, 503): it says why.

    :param arguments: of a command with ``--arch``, ``--rack`` and ``--policy``, and perhaps ``--kernel``.
    """
    names = ("arch", "rack", "policy", "kernel")
    query = {} if arguments is None else {name: getattr(arguments, name, None) for name in names}
    try:
        return client.get(path, **query)
    except Refused as error:
        document = error.document
        if error.code in (409, 503) and isinstance(document, dict) and {"state", "releases"} & document.keys():
            return document
        raise
