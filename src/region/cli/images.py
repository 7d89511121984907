"""``stanchion images``: verify the region's files, upload an image, delete one that was uploaded."""

from __future__ import annotations

import argparse
import hashlib
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

from region.cli.api import client_of, done
from region.cli.progress import Meter
from rpc.client import Client, Refused, Unreachable
from rpc.console import CommandFailed, Status, complain, safe, size, write, write_json

CHUNK: Final = 8 << 20
"""Bytes that are sent at a time."""

POLL_SECONDS: Final = 0.5
PATIENCE: Final = 60
"""A region that did not answer so many times in a row, at intervals of a second or more, is given up."""

BASE: Final = "/MAAS/api/2.0/"

SUFFIXES: Final[Mapping[str, str]] = {
    ".tgz": "tgz", ".tar.gz": "tgz", ".tbz": "tbz", ".tar.bz2": "tbz", ".txz": "txz", ".tar.xz": "txz",
    ".squashfs": "squashfs", ".dd": "ddraw", ".raw": "ddraw", ".img": "ddraw", ".dd.gz": "ddgz", ".raw.gz": "ddgz",
    ".img.gz": "ddgz", ".dd.xz": "ddxz", ".raw.xz": "ddxz", ".img.xz": "ddxz", ".dd.bz2": "ddbz2", ".raw.bz2": "ddbz2",
    ".img.bz2": "ddbz2", ".dd.tar": "ddtar", ".dd.tar.gz": "ddtgz", ".dd.tar.bz2": "ddtbz", ".dd.tar.xz": "ddtxz",
}  # fmt: skip
"""What a file is by the end of its name."""

_NEVER: Final = threading.Event()


class _Progress:
    """Says how far something is, at each tenth, or every ten seconds."""

    def __init__(self, what: str, total: int, now: Callable[[], float] = time.monotonic) -> None:
        self._what, self._total, self._now = what, total, now
        self._meter = Meter()
        self._tenth, self._at = -1, 0.0

    def show(self, bytes_done: int) -> None:
        """So many bytes are done."""
        now = self._now()
        self._meter.saw(now, bytes_done)
        tenth = 10 * bytes_done // self._total if self._total else 10
        if tenth != self._tenth or now >= self._at + 10:
            rate = f", {size(self._meter.rate)}/s" if self._meter.rate else ""
            complain(f"{self._what} {size(bytes_done)} of {size(self._total)} ({10 * tenth} %{rate})")
            self._tenth, self._at = tenth, now


# Verifying


def verify(arguments: argparse.Namespace) -> int:
    """Have the region hash all of its files again, and say what came of it."""
    client = client_of(arguments)
    fields = {} if arguments.rate is None else {"rate": str(arguments.rate)}
    before = client.get("image-verification/") if arguments.status else client.post("image-verification/", fields)
    if arguments.status or arguments.no_wait:
        return _say(arguments, before)
    progress = None
    while True:
        try:
            now = client.get("image-verification/")
        except KeyboardInterrupt:
            complain("no longer watching; the region goes on (stanchion images verify --status)")
            return Status.INTERRUPTED
        if now["state"] != "verifying":
            return _say(arguments, now)
        if now.get("bytes_total") and not arguments.json:
            progress = progress or _Progress("verified", now["bytes_total"])
            progress.show(now["bytes"])
        _NEVER.wait(POLL_SECONDS)


def _say(arguments: argparse.Namespace, status: Mapping[str, Any]) -> int:
    broken = status["not_repaired"]
    damaged = status.get("damaged") or []
    if arguments.json:
        write_json(status)
    elif status["state"] == "verifying":
        write(f"the region is verifying: {size(status.get('bytes') or 0)} of {size(status.get('bytes_total') or 0)}")
    elif status.get("ended") is None:
        write("the region has not verified its files yet")
    else:
        count = len(damaged) or "none"
        write(f"{status['files']} files ({size(status['bytes'])}) were verified at {status['ended']}: {count} damaged")
    if not arguments.json:
        for each in damaged:
            write(safe(f"  damaged: {each['sha256']}: {each['reason']}"))
        for each in broken:
            write(safe(f"  not repaired yet: {each['sha256']}, since {each['found']}"))
    return Status.NO if damaged or broken else Status.YES


# Uploading


def upload(arguments: argparse.Namespace) -> int:
    """Upload an image, going on with what was cut."""
    path = Path(arguments.file)
    filetype = arguments.filetype or filetype_of(path.name)
    client = client_of(arguments)
    try:
        with path.open("rb") as file:
            sha256, length = _measure(file, arguments.json)
            fields = {
                "name": arguments.name, "architecture": arguments.arch, "title": arguments.title or "",
                "filetype": filetype, "base_image": arguments.base_image or "", "sha256": sha256, "size": str(length),
            }  # fmt: skip
            resource = client.post("boot-resources/", fields)
            resource = send(client, resource, file, length, not arguments.json)
    except OSError as error:
        raise CommandFailed(f"the image {path} cannot be read: {error.strerror or error}", Status.USAGE) from error
    except KeyboardInterrupt:
        complain("interrupted; the same command goes on from here")
        return Status.INTERRUPTED
    if arguments.json:
        write_json(resource)
        return Status.YES
    return done(
        arguments,
        f"{resource['name']} ({resource['architecture']}) is uploaded, version {resource['version']}; an import "
        "publishes it now (stanchion import --list), and racks fetch it then (stanchion why)",
    )


def filetype_of(name: str) -> str:
    """What a file is by its name.

    :raises CommandFailed: if that does not say.
    """
    lower = name.lower()
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        if lower.endswith(suffix):
            return SUFFIXES[suffix]
    listed = ", ".join(sorted(set(SUFFIXES.values())))
    raise CommandFailed(f"what {name!r} is does not follow from its name: say it, --filetype {listed}", Status.USAGE)


def _measure(file: BinaryIO, quiet: bool) -> tuple[str, int]:
    """The sha256 and the length of a file."""
    total = file.seek(0, 2)
    file.seek(0)
    progress = _Progress("read", total)
    digest, length = hashlib.sha256(), 0
    while block := file.read(CHUNK):
        digest.update(block)
        length += len(block)
        if not quiet:
            progress.show(length)
    return digest.hexdigest(), length


def send(
    client: Client,
    resource: Mapping[str, Any],
    file: BinaryIO,
    length: int,
    is_shown: bool,
    pause: Callable[[float], object] = _NEVER.wait,
) -> Mapping[str, Any]:
    """Send what is missing of an upload; the resource when all has come.

    A region that is away for a while, because it is restarted, is waited for.

    :param pause: waits so many seconds.
    :raises Unreachable: if it stays away.
    :raises Refused: if it does not take it.
    """
    progress = _Progress("sent", length)
    missed = 0
    while not (content := _file_of(resource))["complete"]:
        at = content["received"]
        if is_shown:
            progress.show(at)
        file.seek(at)
        try:
            path = content["upload_uri"].removeprefix(BASE)
            resource = client.put_bytes(path, file.read(CHUNK), offset=str(at))
            missed = 0
        except (Unreachable, Refused) as error:
            if isinstance(error, Refused) and error.code not in (409, 503):
                raise
            missed += 1
            if missed >= PATIENCE:
                raise
            pause(1.0)
            resource = _again(client, resource, content["upload_uri"])
            if isinstance(error, Refused) and error.code == 409 and _file_of(resource).get("received") == at:
                raise  # it does belong there, so that is not why
    if is_shown:
        progress.show(length)
    return resource


def _again(client: Client, resource: Mapping[str, Any], uri: str) -> Mapping[str, Any]:
    """The resource as it is now, with just the upload of ``uri`` or, if that is whole, its version."""
    try:
        found = client.get(resource["resource_uri"].removeprefix(BASE))
    except Unreachable:
        return resource  # it is tried again, and raised when it has lasted
    version = max(resource["sets"])
    if version not in found["sets"]:
        raise CommandFailed(f"the upload at {uri} was deleted or replaced meanwhile", Status.NO)
    kept: dict[str, Any] = {**found, "version": version, "sets": {version: found["sets"][version]}}
    return kept


def _file_of(resource: Mapping[str, Any]) -> Mapping[str, Any]:
    newest = resource["sets"][max(resource["sets"])]
    (file,) = newest["files"].values()
    found: Mapping[str, Any] = file
    return found


# Deleting


def delete(arguments: argparse.Namespace) -> int:
    """Delete an image that was uploaded."""
    client = client_of(arguments)
    name = arguments.name if "/" in arguments.name else f"custom/{arguments.name}"
    found = [
        each
        for each in client.get("boot-resources/", type="uploaded")
        if each["name"] == name and arguments.arch in (None, each["architecture"], each["architecture"].split("/")[0])
    ]
    if not found:
        raise CommandFailed(f"no image {name} was uploaded (stanchion images)", Status.NO)
    if len(found) > 1:
        listed = ", ".join(each["architecture"] for each in found)
        raise CommandFailed(f"{name} was uploaded for {listed}: say which, --arch", Status.USAGE)
    client.delete(f"boot-resources/{found[0]['id']}/")
    return done(arguments, f"{name} ({found[0]['architecture']}) is deleted; the next generation is without it")
