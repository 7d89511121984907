"""What operators of a world ask of the API, and what they may be told: of racks, of uploads, of what is published."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from attrs import define, field

from region.answers.combine import Target
from region.upstream.values import UPLOADS
from rpc.manifest import ImageKey
from tests.examples import CHECKED
from tests.region.web import Response, form
from tests.world.questions import SiteConnection
from tests.world.rack import ModelRack
from tests.world.region import ModelRegion
from tests.world.turns import Turns
from tests.world.uploading import Uploading, key_of, resource_of

if TYPE_CHECKING:
    from tests.world.world import World

RACKS: Final = "rackcontrollers"
UNACCEPTABLE: Final = (
    {"name": "ubuntu/noble"}, {"name": "custom/ubuntu"}, {"name": "plan9/fourth"}, {"architecture": "amd64/"},
    {"filetype": "floppy"}, {"size": "0"}, {"sha256": "1"},
)  # fmt: skip
"""What makes an upload one that cannot be."""


@define(eq=False)
class Request:
    """One request that has not been answered. ``since`` is when it was sent, and how much had been disturbed then."""

    region: ModelRegion
    what: str
    since: tuple[float, int]
    answered: Callable[[Response], object]
    lost: Callable[[], object]
    connection: SiteConnection


@define(eq=False)
class Operators:
    """All that operators have asked and not been told yet, and what they were told of uploads.

    ``uploads`` are under way, ``given`` all that there ever were. ``acknowledged`` says of each upload how many bytes
    the region has, ``completed`` whose it is that the region has whole, and ``deleted`` at which steps the deletion of
    an image was asked for.
    """

    world: World
    requests: list[Request] = field(factory=list)
    uploads: list[Uploading] = field(factory=list)
    given: list[Uploading] = field(factory=list)
    acknowledged: dict[int, int] = field(factory=dict)
    completed: dict[int, Uploading] = field(factory=dict)
    deleted: dict[ImageKey, list[int]] = field(factory=dict)

    @property
    def turns(self) -> Turns:
        """The time, and what may happen next."""
        return self.world.turns

    @property
    def region(self) -> ModelRegion | None:
        """The region process that they ask."""
        return self.world.region

    def send(
        self,
        method: str,
        path: str,
        answered: Callable[[Response], object],
        lost: Callable[[], object] = lambda: None,
        region: ModelRegion | None = None,
        **given: Any,
    ) -> None:
        """Ask; ``answered`` is called with the answer, or ``lost`` when the region process ends before it answers."""
        region = region or self.world.needed_region
        since = self.turns.seconds(), self.world.disturbances
        connection = SiteConnection(region.site)
        self.requests.append(Request(region, f"{method} {path}", since, answered, lost, connection))
        connection.send(method, path, **given)
        self.turns.follow()

    def attend(self) -> None:
        """Take the answers that have come, and have uploads go on.

        :raises AssertionError: if one is not as it must be.
        """
        for request in [each for each in self.requests if each.connection.is_answered]:
            self.requests.remove(request)
            response = request.connection.response()
            CHECKED["operators' requests"] += 1
            if response.status == 503 and "database" in response.text:
                assert (self.turns.seconds(), self.world.disturbances) != request.since, response.text
                request.lost()
                continue
            assert response.status < 500 or response.status == 503, f"{request.what}: {response.text}"
            request.answered(response)
        for upload in self.uploads:
            upload.go_on()

    def region_ended(self, region: ModelRegion) -> None:
        """A region process has ended: what it was asked is not answered."""
        for request in [each for each in self.requests if each.region is region]:
            self.requests.remove(request)
            request.connection.hang_up()
            request.lost()

    # Uploads

    def upload(self, target: Target, number: int, *, is_honest: bool) -> None:
        """Begin to upload an image; with an even ``number`` it is a small one."""
        content = f"{target} {number}\n".encode() * (30 if number % 2 else 3)
        said = content if is_honest else b"not " + content
        self.uploads = [each for each in self.uploads if not (each.is_over or each.is_complete)]
        upload = Uploading(self, target, content, hashlib.sha256(said).hexdigest())
        self.uploads.append(upload)
        self.given.append(upload)
        upload.go_on()

    def upload_unacceptable(self, what: dict[str, str]) -> None:
        """Begin an upload that cannot be."""
        sha256 = hashlib.sha256(b"nothing").hexdigest()
        fields = {"name": "custom/other", "architecture": "amd64", "sha256": sha256, "size": "7", **what}

        def refused(response: Response) -> None:
            [field] = what
            assert response.status == 400, f"{what}: {response.text}"
            assert list(response.json) == [field], f"{what}: {response.text}"

        self.send("POST", "boot-resources/", refused, **form(**fields))

    def upload_elsewhere(self) -> None:
        """Send a chunk of an upload to the region process that has not begun it."""
        second = self.world.second
        for upload in self.uploads:
            if second is not None and upload.id is not None and not (upload.is_over or upload.is_complete):
                self.send("PUT", f"{upload.uri}?offset=0", partial(self._refused_elsewhere, upload), region=second,
                          body=b"x", Content_Type="application/octet-stream")  # fmt: skip

    def _refused_elsewhere(self, upload: Uploading, response: Response) -> None:
        excused = upload.is_complete or upload.is_over or self.is_replaced(upload)
        assert response.status == 409 or excused, f"upload {upload.id} is another process's: {response.text}"
        CHECKED["conflicts"] += response.status == 409

    def delete(self, target: Target) -> None:
        """Delete an uploaded image."""
        key = key_of(target)
        self.deleted.setdefault(key, []).append(self.turns.steps)

        def deleted(response: Response) -> None:
            assert response.status in (204, 404), response.text

        self.send("DELETE", f"boot-resources/{resource_of(key)}/", deleted)

    def is_taken(self, key: ImageKey) -> bool:
        """Whether a source has images that are called so."""
        return key.os in {"ubuntu"}

    def is_replaced(self, upload: Uploading) -> bool:
        """Whether the upload may be gone: somebody asked for that, or a newer one of that image was whole."""
        deleted = any(step >= upload.begun for step in self.deleted.get(upload.key, ()))
        # Whoever began sooner may have got the later number, or not know it yet.
        others = [each for each in self.given if each.key == upload.key and each is not upload]
        newer = any(each.id is None or upload.id is None or each.id > upload.id for each in others)
        return deleted or newer

    def twins(self, upload: Uploading) -> list[Uploading]:
        """Who else uploads the same."""
        return [each for each in self.given if each.said == upload.said and each is not upload]

    def upload_again(self) -> None:
        """Whoever uploaded what is damaged, or gone, uploads it again, as they are told to."""
        there = {row[0] for row in self.world.observer.query("SELECT id FROM boot_upload")}
        for upload_id, upload in list(self.completed.items()):
            if upload_id in there and not (self.world.blobs / "blobs" / upload.said).exists():
                upload.is_complete, upload.id, upload.received = False, None, 0
                self.uploads.append(upload)
        self.attend()

    @property
    def are_busy(self) -> bool:
        """Whether somebody waits for an answer, or has not uploaded all."""
        return bool(self.requests) or any(not (each.is_over or each.is_complete) for each in self.uploads)

    def is_spoiled(self, sha256: str) -> bool:
        """Whether a copy of the content was ever spoiled."""
        return sha256 in self.world.spoiled.contents

    # What is imported

    def delete_imported(self, number: int) -> None:
        """Ask to delete what a source has, which would come again."""
        region = self.world.needed_region
        latest = region.generations.latest
        images = [] if latest is None else [each for each in latest.manifest.images if each.source != UPLOADS]
        if not images:
            return
        image = images[number % len(images)]
        known = max(self.world.generations, default=0)

        def refused(response: Response) -> None:
            listed = all(image.key in self.world.generations[n].by_key for n in self.world.generations if n >= known)
            assert response.status in ((409,) if listed else (404, 409)), response.text
            if response.status == 409:
                assert image.source in response.text or not listed, response.text
                CHECKED["conflicts"] += 1

        self.send("DELETE", f"boot-resources/{resource_of(image.key)}/", refused)

    def import_now(self) -> None:
        """Ask for an import, as often as somebody likes: one that runs is no reason to refuse it."""

        def begun(response: Response) -> None:
            assert response.status == 200, response.text
            job = int(response.headers["Location"].rstrip("/").rpartition("/")[2])
            assert self.world.observer.query("SELECT 1 FROM import_job WHERE id = %s", (job,)), f"there is no job {job}"

        self.send("POST", "boot-resources/?op=import", begun)

    # Racks

    def rename(self, rack: ModelRack, name: str) -> None:
        """Give a rack another name."""
        racks = [*self.world.racks.values(), *self.world.strangers.values()]
        others = [each for each in racks if each is not rack and each.may_be_called(name, self.turns.steps)]
        steadily = any(
            each.known is not None and each.name == name and each.system_id in self.world.racks for each in others
        )
        rack.names[name] = self.turns.steps, None
        rack.known = None
        rack.renaming += 1

        def lost() -> None:
            rack.renaming -= 1

        def renamed(response: Response) -> None:
            rack.renaming -= 1
            self.world.learn_name(rack)
            if response.status == 404:
                assert rack.system_id not in self.world.racks, response.text
            elif response.status == 400:
                assert others, f"nobody else is called {name}: {response.text}"
                CHECKED["conflicts"] += 1
            else:
                assert response.status == 200, response.text
                assert response.json["hostname"] in rack.names, response.text
                assert not steadily, f"another is called {name}: {response.text}"

        self.send("PUT", f"{RACKS}/{rack.system_id}/", renamed, lost, **form(hostname=name))

    def dismiss(self, rack: ModelRack, how: str) -> None:
        """Revoke a rack, or forget it, which goes on running and does not know."""
        region = self.world.needed_region

        def dismissed(response: Response) -> None:
            assert response.status in (200, 204, 404), response.text
            rack.gone.add(region.owner)
            CHECKED["racks dismissed"] += 1

        again = partial(self.world.dismissals.append, (rack, how))
        if how == "revoke":
            self.send("POST", f"{RACKS}/{rack.system_id}/?op=revoke", dismissed, again)
        else:
            self.send("DELETE", f"{RACKS}/{rack.system_id}/", dismissed, again)

    def ask_of_revoked(self, rack: ModelRack, how: str) -> None:
        """Ask something of a rack that was revoked or forgotten."""
        was_gone = self.world.needed_region.owner in rack.gone

        def refused(response: Response) -> None:
            assert response.status in ((404, 409) if was_gone else (200, 202, 404, 409, 503)), response.text
            CHECKED["conflicts"] += response.status == 409

        method = "GET" if how == "list_boot_images" else "POST"
        self.send(method, f"{RACKS}/{rack.system_id}/?op={how}", refused)
