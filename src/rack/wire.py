"""What a rack answers to a region, and what it reports. The links themselves are in :mod:`rack.link`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from twisted.logger import Logger

from rack.assignment import Assignment, InvalidAssignment
from rack.inventory import NO_GENERATION, Inventory
from rack.renewal import Renewal
from rack.stop import FAILED, SUPERSEDED
from rack.sync import Synchroniser
from rack.systems.describing import Description, describe, validate
from rpc.arguments import Packed, pack
from rpc.commands import (
    CancelSync,
    Command,
    DescribeRelease,
    ListImages,
    RenewSoon,
    SyncImages,
    SyncProgress,
    ValidateLicenseKey,
)
from rpc.protocol import Link, Responders
from rpc.responders import Responder

log = Logger()

_THIS_REGION: Final = ("", "*")
"""What stands in a stream's URL for the host that the rack is connected to."""


class RackWire:
    """The rack's end of its links: everything about images is answered from the synchroniser.

    :param renewal: what renews the rack's certificate, if anything does.
    """

    def __init__(self, synchroniser: Synchroniser, renewal: Renewal | None = None) -> None:
        self._synchroniser = synchroniser
        self._renewal = renewal
        self._list: tuple[str, Packed | None] = "", None
        self._heard: dict[Link, int] = {}

    def responders(self) -> Responders:
        """The table of what the rack answers."""
        table: dict[type[Command], Responder] = {
            ListImages: self.list_images,
            SyncImages: self.sync_images,
            SyncProgress: self.sync_progress,
            CancelSync: self.cancel_sync,
            DescribeRelease: self.describe_release,
            ValidateLicenseKey: self.validate_license_key,
        }
        if self._renewal is not None:
            table[RenewSoon] = self._renewal.renew_soon
        return Responders("rack", table)

    def report(self) -> Mapping[str, Any]:
        """The arguments of ``ReportInventory`` at this moment."""
        inventory, status = self._synchroniser.inventory, self._synchroniser.status
        report = {
            "generation": inventory.generation,
            "digest": inventory.digest,
            "state": status.state,
            "progress": status.progress,
        }
        refused = self._synchroniser.refused
        return report | {"refused": list(refused)} if refused else report

    def heard(self, link: Link, generation: int) -> None:
        """The region at the other end has heard that the rack holds ``generation``."""
        self._heard[link] = generation

    def lost(self, link: Link) -> None:
        """A link has ended."""
        self._heard.pop(link, None)

    async def list_images(self, link: Link, known_digest: str, newest_digest: str | None) -> Mapping[str, Any]:
        """What is held right now; the list of it only if the region does not know that digest."""
        inventory = self._synchroniser.inventory
        answer: dict[str, Any] = {
            "state": self._synchroniser.status.state,
            "generation": inventory.generation,
            "digest": inventory.digest,
        }
        if inventory.digest not in ("", known_digest, newest_digest):
            answer["inventory"] = await self._packed(inventory)
        return answer

    async def _packed(self, inventory: Inventory) -> Packed:
        """The list of what is held as it travels, made once for each inventory, and not in the reactor's thread."""
        digest, packed = self._list
        if packed is None or digest != inventory.digest:
            packed = await self._synchroniser.run_in_thread(lambda: pack(inventory.manifest.canonical))
            self._list = inventory.digest, packed
        return packed

    async def sync_images(self, link: Link, generation: int, digest: str, url: str) -> Mapping[str, Any]:
        """Make the rack hold a generation; answered when the sync has ended."""
        try:
            assignment = Assignment(generation, digest, resolve(url, link.peer.address))
        except InvalidAssignment as error:
            log.error("{peer} asked for a sync that makes no sense: {reason}", peer=str(link.peer), reason=str(error))
            inventory = self._synchroniser.inventory
            return {
                "outcome": FAILED, "generation": inventory.generation, "digest": inventory.digest,
                "reason": f"the rack cannot sync so: {error}", "bytes_fetched": 0, "files_fetched": 0,
            }  # fmt: skip
        inventory = self._synchroniser.inventory
        if generation < inventory.generation and self._heard.get(link, NO_GENERATION) < inventory.generation:
            # It is another process of the region that published that one, and this one has yet to hear of it. Had it
            # heard what is held, it would know what it does: then an older database was put in place of the other.
            return {
                "outcome": SUPERSEDED, "generation": inventory.generation, "digest": inventory.digest,
                "reason": f"generation {inventory.generation} is held, which is newer", "bytes_fetched": 0,
                "files_fetched": 0,
            }  # fmt: skip
        result = await self._synchroniser.request(assignment)
        return {
            "outcome": result.outcome,
            "generation": result.generation,
            "digest": result.digest,
            "reason": result.reason,
            "bytes_fetched": result.bytes_fetched,
            "files_fetched": result.files_fetched,
        }

    async def sync_progress(self, link: Link) -> Mapping[str, Any]:
        """How far the sync under way is."""
        status = self._synchroniser.status
        return {"progress": status.progress if status.state == "syncing" else {}}

    async def cancel_sync(self, link: Link) -> Mapping[str, Any]:
        """Stop the sync under way."""
        return {"cancelled": self._synchroniser.cancel()}

    async def describe_release(self, link: Link, os: str, release: str) -> Mapping[str, Any]:
        """What is known of a release."""
        return described(describe(self._synchroniser.inventory.manifest, os, release))

    async def validate_license_key(self, link: Link, os: str, release: str, key: str) -> Mapping[str, Any]:
        """Whether a license key can be one for a release."""
        outcome, reason = validate(self._synchroniser.inventory.manifest, os, release, key)
        return {"outcome": outcome, "reason": reason}


def described(description: Description) -> Mapping[str, Any]:
    """The answer to ``DescribeRelease``."""
    return {
        "title": description.title,
        "system": description.system,
        "requires_license_key": description.requires_license_key,
        "uses": [
            {"arch": image.arch, "subarch": image.subarch, "kflavor": image.kflavor, "label": image.label,
             "version": image.version, "purposes": list(purposes)}
            for image, purposes in description.uses
        ],
    }  # fmt: skip


def resolve(url: str, address: str) -> str:
    """``url`` with the host of ``address`` (``HOST:PORT``, as a link's peer has it) in place of ``*`` or no host.

    :raises InvalidAssignment: if it is no URL, or ``address`` has no host.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise InvalidAssignment(f"url is {url!r}: {error}") from error
    if parts.scheme not in ("http", "https") or (parts.hostname or "") not in _THIS_REGION:
        return url
    host = address.rpartition(":")[0]
    if not host:
        raise InvalidAssignment(f"url is {url!r}, but the region's address is unknown ({address!r})")
    return urlunsplit(parts._replace(netloc=host if port is None else f"{host}:{port}"))
