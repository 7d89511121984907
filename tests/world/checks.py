"""What must be the case in a world at every moment, whatever has happened: looked at from outside, on disk and in rows.

Nothing here asks the code that is under test whether it is right. Files are hashed, rows are read over a connection of
the test's own; only what a rack *says* that it holds is taken from it, to be compared.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rack.inspection import directory_of
from rack.inventory import NO_GENERATION
from region.answers.combine import Target
from region.upstream.values import UPLOADS
from rpc.manifest import Image, Manifest
from tests.examples import CHECKED
from tests.world.questions import targets_of
from tests.world.rack import ModelRack
from tests.world.region import REGION
from tests.world.uploading import key_of
from tests.world.world import World

ENDED: Final = ("done", "failed", "cancelled")
RUNNING: Final = ("reading", "fetching", "publishing")
FOLLOWING: Final = {
    "queued": {"queued", *RUNNING, *ENDED},
    "reading": {*RUNNING, *ENDED},
    "fetching": {"fetching", "publishing", *ENDED},
    "publishing": {"publishing", "done", "failed"},
    **{state: {state} for state in ENDED},
}
"""The states that an import may be seen in after each; some may have been passed unseen."""


class Checker:
    """Looks at a world after every step."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._hashed: dict[tuple[object, ...], str] = {}
        self._held: dict[str, int] = {}
        self._seen = 0
        self._imports: dict[int, str] = {}

    def check(self) -> None:
        """:raises AssertionError: naming what is not as it must be."""
        self.generations()
        self.imports()
        self.region_files()
        for rack in self.world.racks.values():
            self.rack(rack)
        self.uploads()
        self.syncs_under_way()
        self.world.operators.attend()
        for question in [each for each in self.world.questions if each.connection.is_answered]:
            self.world.questions.remove(question)
            question.check()
        for reading in [each for each in self.world.readings if each.result is not None]:
            self.world.readings.remove(reading)
            reading.check()
        assert not self.world.failures, self.world.failures[0]
        CHECKED["moments"] += 1

    # Generations

    def generations(self) -> None:
        """Each that was published says for every image that went why, and that reason is true."""
        known = self.world.generations
        self.world.learn()
        self._trust()
        while self._seen < len(known):
            self._seen += 1
            self._check_changes(self._seen, known.get(self._seen - 1), known[self._seen])
            CHECKED["generations"] += 1

    def _check_changes(self, number: int, before: Manifest | None, manifest: Manifest) -> None:
        rows = self.world.observer.query(
            """SELECT kind, os, release, arch, subarch, kflavor, label, version, reason FROM generation_change
               WHERE generation = %s""",
            (number,),
        )
        old = {} if before is None else dict(before.by_key)
        new = dict(manifest.by_key)
        said = {(row[0], tuple(row[1:7])): row[8] for row in rows}
        assert all(said.values()), f"generation {number} gives no reason for {said}"
        for image in manifest.images:
            self._check_offer(number, image)
        gone = {tuple(_key(image)): image for key, image in old.items() if key not in new}
        removed = {key for kind, key in said if kind == "removed"}
        assert removed == set(gone), f"generation {number} lacks {set(gone)}, and says that it lacks {removed}"
        added = {tuple(_key(image)) for key, image in new.items() if key not in old}
        assert {key for kind, key in said if kind == "added"} == added
        for key, image in gone.items():
            reason = said["removed", key]
            assert self._is_true(image, reason), f"generation {number} lacks {image.key} without cause: {reason}"

    def _check_offer(self, number: int, image: Image) -> None:
        """What is published was offered by somebody who is believed: a source that is trusted, or who uploaded it."""
        operators = self.world.operators
        files = {file.sha256 for file in image.files}
        if image.source == UPLOADS:
            honest = {each.said for each in operators.given if each.is_honest}
            assert files <= honest, f"generation {number} has {image.key}, which nobody uploaded"
            return
        [upstream] = [each for each in self.world.upstreams if each.stream.url == image.source]
        wrong = [sha256 for sha256 in files if not upstream.is_offered(sha256)]
        assert not wrong, f"generation {number} has {image.key} {image.version}, which nobody signed who is trusted"

    def _trust(self) -> None:
        """What was trusted before is not any more, unless an import may have begun then."""
        query = self.world.observer.query
        if not query("SELECT 1 FROM import_job WHERE state IN ('reading', 'fetching', 'publishing')"):
            stored = {url: bytes(keyring) for url, keyring in query("SELECT url, keyring_data FROM boot_source")}
            for upstream in self.world.upstreams:
                upstream.trusts_only(stored.get(upstream.stream.url, b""))

    def _is_true(self, image: Image, reason: str) -> bool:
        if image.source == UPLOADS:
            # Also when another of that name took its place, and was deleted.
            return "was deleted" in reason and bool(self.world.operators.deleted.get(image.key))
        [upstream] = [each for each in self.world.upstreams if each.stream.url == image.source]
        if "no longer lists" in reason:
            return (image.release, image.arch) in upstream.dropped
        if "no selection" in reason:
            return upstream.was_narrowed and image.release != "noble" and not image.is_bootloader
        return "was removed" in reason and upstream.was_removed

    # Imports

    def imports(self) -> None:
        """One import runs at a time; each goes through its states in their order, ends once, and says how."""
        rows = self.world.observer.query("SELECT id, state, outcome, generation FROM import_job ORDER BY id")
        for number, state, outcome, generation in rows:
            before = self._imports.get(number, "queued")
            assert state in FOLLOWING[before], f"import {number} was {before} and is {state}"
            self._imports[number] = state
            assert state not in ENDED or outcome, f"import {number} is {state}, and does not say why"
            assert generation is None or generation in self.world.generations, f"import {number} has no generation"
        running = [number for number, state, *_ in rows if state in RUNNING]
        assert len(running) <= 1, f"imports {running} run at the same time"
        assert sum(state == "queued" for _, state, *_ in rows) <= 1

    # The region's files

    def region_files(self) -> None:
        """Every file of every generation that is kept is there and right, and those are kept that must be."""
        kept = {row[0] for row in self.world.observer.query("SELECT number FROM generation WHERE retired IS NULL")}
        newest = max(self.world.generations, default=0)
        needed = {number for number in (newest - 1, newest) if number > 0}
        needed |= {self._held[system_id] for system_id in self.world.racks if self._held.get(system_id, 0) > 0}
        reported = {
            row[0]
            for row in self.world.observer.query(
                "SELECT generation FROM rack_inventory JOIN rack USING (system_id) WHERE revoked IS NULL"
            )
            if row[0]
        }
        assert {newest - 1, newest} - {0, -1} <= kept, f"of generations up to {newest}, {kept} are kept"
        assert reported <= kept, f"racks said that they hold {reported}, but {kept} are kept"
        for number in kept:
            for sha256 in self.world.generations[number].blobs:
                self._is_right_or_lost(sha256, f"of generation {number}")

    def _is_right_or_lost(self, sha256: str, what: str) -> None:
        """The content is on the region's disk, and right; or the disk has spoiled it. Then it is wrong only as long as
        nobody knows, and after that it is not there until it is right."""
        blobs, spoiled = self.world.blobs, self.world.spoiled
        path = blobs / "blobs" / sha256
        found = self._hash(path)
        if found == sha256:
            spoiled.gone.discard(path)
        elif sha256 not in spoiled.contents:
            raise AssertionError(f"{sha256} {what} is not there, or wrong")
        elif found:
            assert spoiled.may_be_wrong(path, sha256, blobs), f"{sha256} {what} is wrong, and that is known"
        else:
            known = path in spoiled.gone or sha256 in spoiled.known(blobs)
            assert known, f"{sha256} {what} is not there, and nobody knows why"

    def uploads(self) -> None:
        """What has come of an upload is there for as long as there is the upload; and there is until somebody deletes
        it, or another takes its place."""
        operators = self.world.operators
        rows = {
            row[0]: row[1:]
            for row in self.world.observer.query("SELECT id, sha256, completed IS NOT NULL FROM boot_upload")
        }
        for upload_id, received in operators.acknowledged.items():
            if upload_id not in rows:
                continue
            sha256, is_complete = rows[upload_id]
            part = self.world.blobs / "partial" / f"{sha256}.part"
            if is_complete:
                self._is_right_or_lost(sha256, f"of upload {upload_id}")
            elif part.exists():
                assert part.stat().st_size >= received, f"{received} bytes of upload {upload_id} had come"
            else:
                self._is_right_or_lost(sha256, f"of upload {upload_id}")
        for upload_id, upload in operators.completed.items():
            assert upload_id in rows or operators.is_replaced(upload), f"upload {upload_id} is gone, and nobody asked"

    def syncs_under_way(self) -> None:
        """What a linked rack is fetching is kept as long as it is."""
        kept = {row[0] for row in self.world.observer.query("SELECT number FROM generation WHERE retired IS NULL")}
        region = self.world.region
        for rack in self.world.racks.values():
            number = rack.asked_for()
            if region is None or number is None or REGION not in rack.links:
                continue
            if region.syncs.syncing().get(rack.system_id) == number:
                assert number in kept, f"{rack.name} fetches generation {number}, but {kept} are kept"

    def _hash(self, path: Path) -> str:
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            return ""
        identity = found.st_ino, found.st_mtime_ns
        stamp = str(path), *identity, found.st_size, self.world.spoiled.files.get(identity)
        if stamp not in self._hashed:
            self._hashed[stamp] = hashlib.sha256(path.read_bytes()).hexdigest()
            CHECKED["files hashed"] += 1
        return self._hashed[stamp]

    # Racks

    def rack(self, rack: ModelRack) -> None:
        """A rack holds one whole published generation, no older one than before, and what is leased is there."""
        process = rack.process
        if process is None or not process.is_ready:
            return
        inventory = process.store.inventory
        before = self._held.get(rack.system_id, NO_GENERATION)
        assert inventory.generation >= before, f"{rack.name} held {before} and now {inventory.generation}"
        CHECKED["racks' changes"] += inventory.generation != before
        self._held[rack.system_id] = inventory.generation
        if inventory.generation == NO_GENERATION:
            assert not inventory.manifest.images
            return
        manifest = self.world.generations[inventory.generation]
        self._holds_part_of(rack, inventory.manifest, inventory.digest, manifest)
        link = rack.directory / "current"
        number = int(os.readlink(link).rpartition("/")[2].partition("-")[0])
        assert number == inventory.generation, f"{rack.name}: current leads to {number}, not {inventory.generation}"
        self._snapshot(rack, link.resolve(), inventory.manifest, self._may_be_wrong)
        for lease in process.leases:
            # Who reads what was held before reads the files that there were then, whatever is known of them by now.
            self._snapshot(rack, lease.path, lease.inventory.manifest, self._was_spoiled)

    def _holds_part_of(self, rack: ModelRack, held: Manifest, digest: str, manifest: Manifest) -> None:
        """What a rack says that it holds is all of a generation, but for images that have a file that was damaged."""
        assert held.digest == digest, f"{rack.name} holds {held.digest} and says {digest}"
        for key, image in held.by_key.items():
            assert manifest.by_key.get(key) == image, f"{rack.name} holds {key}, which is of another generation"
        for key, image in manifest.by_key.items():
            if key not in held.by_key:
                damaged = {file.sha256 for file in image.files} & self.world.spoiled.contents
                assert damaged, f"{rack.name} lacks {key}, which was never damaged"
                CHECKED["images withdrawn"] += 1

    def _snapshot(self, rack: ModelRack, path: Path, manifest: Manifest, may_be_wrong: Callable[..., bool]) -> None:
        for image in manifest.images:
            for file in image.files:
                where = path / directory_of(image) / file.name
                if self._hash(where) != file.sha256 and not may_be_wrong(where, file.sha256, rack):
                    raise AssertionError(f"{rack.name}: {where} is listed, and is not there, or known to be wrong")

    def _may_be_wrong(self, path: Path, sha256: str, rack: ModelRack) -> bool:
        return self.world.spoiled.may_be_wrong(path, sha256, rack.directory / "cache")

    def _was_spoiled(self, path: Path, sha256: str, rack: ModelRack) -> bool:
        return sha256 in self.world.spoiled.contents

    # The end

    def noticed(self) -> None:
        """All files have been looked at, so that nothing is listed that is not right."""
        for rack in self.world.racks.values():
            held = rack.inventory
            if held.generation != NO_GENERATION:
                self._snapshot(rack, (rack.directory / "current").resolve(), held.manifest, lambda *_: False)

    def converged(self) -> None:
        """All is as upstream has it now, the region and each rack hold it, and the API says so."""
        world = self.world
        newest = max(world.generations, default=0)
        manifest = world.generations[newest]
        expected: dict[tuple[str, str], str] = {}
        for upstream in reversed(world.upstreams):
            for product in upstream.products().values():
                if upstream.is_wanted and upstream.selection.release in ("*", product["release"]):
                    expected[product["release"], product["arch"]] = max(product["versions"])
        synced = [each for each in manifest.images if each.source != UPLOADS and not each.is_bootloader]
        found = {(each.release, each.arch): each.version for each in synced}
        assert found == expected, f"generation {newest} has {found}, upstream has {expected}"
        self._uploads_converged(manifest)
        spoiled = self._spoiled_of(manifest)
        assert not spoiled, f"{spoiled} of generation {newest} are not right again"
        for rack in world.racks.values():
            doing = None if rack.process is None else rack.process.synchroniser.status
            held = rack.inventory
            assert held.holds(newest, manifest.digest), f"{rack.name} is at {held.generation} of {newest}: {doing}"
            snapshot_is_whole((rack.directory / "current").resolve(), manifest, self._hash)
            for region in world.regions:
                assert region.owner in rack.links, f"{rack.name} is not linked with {region.owner}"
        for stranger in world.strangers.values():
            assert not stranger.links, f"{stranger.name} is no rack any more, and is linked"
        for policy in ("any", "all"):
            for target in sorted({*targets_of(manifest)}):
                for region in world.regions:
                    world.ask(target, policy, region=region)
                    world.settle()
                    [question] = world.questions
                    response = question.connection.response()
                    world.questions.clear()
                    assert response.status == (200 if world.racks else 503), f"{target}: {response.text}"
                    assert response.json["generation"]["number"] == newest, f"{region.owner}: {response.text}"

    def _uploads_converged(self, manifest: Manifest) -> None:
        """Of each image that was uploaded, what is published is the newest upload that is whole."""
        rows = self.world.observer.query(
            """SELECT DISTINCT ON (os, release, arch, subarch) os, release, arch, sha256 FROM boot_upload
               WHERE completed IS NOT NULL ORDER BY os, release, arch, subarch, id DESC"""
        )
        wanted = {key_of(Target(*row[:3])): str(row[3]) for row in rows}
        found = {each.key: each.files[0].sha256 for each in manifest.images if each.source == UPLOADS}
        assert found == wanted, f"uploaded are {wanted}, published {found}"
        CHECKED["uploads published"] += len(found)

    def _spoiled_of(self, manifest: Manifest) -> list[str]:
        places = [self.world.blobs, *(rack.directory / "cache" for rack in self.world.racks.values())]
        found = [(place, sha256, self._hash(place / "blobs" / sha256)) for place in places for sha256 in manifest.blobs]
        return [f"{sha256} of {place} ({is_now or 'missing'})" for place, sha256, is_now in found if is_now != sha256]


def sha256_of(path: Path) -> str:
    """The sha256 of the file at ``path``, "" if there is none."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


def snapshot_is_whole(path: Path, manifest: Manifest, sha256_of: Callable[[Path], str] = sha256_of) -> None:
    """:raises AssertionError: if the snapshot at ``path`` is not all of ``manifest``, byte for byte."""
    assert (path / "manifest.json").read_bytes() == manifest.canonical, f"{path} has another manifest"
    for image in manifest.images:
        for file in image.files:
            where = path / directory_of(image) / file.name
            found = sha256_of(where)
            assert found == file.sha256, f"{where} is not there, or wrong: {found}"


def _key(image: Image) -> tuple[str, ...]:
    key = image.key
    return key.os, key.release, key.arch, key.subarch, key.kflavor, key.label
