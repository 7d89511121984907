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
from rpc.manifest import Image, Manifest
from tests.examples import CHECKED
from tests.world.questions import targets_of
from tests.world.rack import ModelRack
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
        self._hashed: dict[tuple[str, int, int, int], str] = {}
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
        self.syncs_under_way()
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
        gone = {tuple(_key(image)): image for key, image in old.items() if key not in new}
        removed = {key for kind, key in said if kind == "removed"}
        assert removed == set(gone), f"generation {number} lacks {set(gone)}, and says that it lacks {removed}"
        added = {tuple(_key(image)) for key, image in new.items() if key not in old}
        assert {key for kind, key in said if kind == "added"} == added
        for key, image in gone.items():
            reason = said["removed", key]
            assert self._is_true(image, reason), f"generation {number} lacks {image.key} without cause: {reason}"

    def _is_true(self, image: Image, reason: str) -> bool:
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
        reported = {row[0] for row in self.world.observer.query("SELECT generation FROM rack_inventory") if row[0]}
        assert {newest - 1, newest} - {0, -1} <= kept, f"of generations up to {newest}, {kept} are kept"
        assert reported <= kept, f"racks said that they hold {reported}, but {kept} are kept"
        blobs = self.world.root / "region" / "blobs"
        for number in kept:
            for sha256 in self.world.generations[number].blobs:
                assert self._hash(blobs / sha256) == sha256, f"{sha256} of generation {number} is not there, or wrong"

    def syncs_under_way(self) -> None:
        """What a linked rack is fetching is kept as long as it is."""
        kept = {row[0] for row in self.world.observer.query("SELECT number FROM generation WHERE retired IS NULL")}
        region = self.world.region
        for rack in self.world.racks.values():
            number = rack.asked_for()
            if region is None or number is None or rack.link is None:
                continue
            if region.syncs.syncing().get(rack.system_id) == number:
                assert number in kept, f"{rack.name} fetches generation {number}, but {kept} are kept"

    def _hash(self, path: Path) -> str:
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            return ""
        stamp = (str(path), found.st_ino, found.st_mtime_ns, found.st_size)
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
        assert inventory.manifest.digest == inventory.digest == manifest.digest, f"{rack.name} holds another manifest"
        link = rack.directory / "current"
        number = int(os.readlink(link).rpartition("/")[2].partition("-")[0])
        assert number == inventory.generation, f"{rack.name}: current leads to {number}, not {inventory.generation}"
        snapshot_is_whole(link.resolve(), manifest, self._hash)
        for lease in process.leases:
            snapshot_is_whole(lease.path, lease.inventory.manifest, self._hash)

    # The end

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
        found = {(each.release, each.arch): each.version for each in manifest.images if not each.is_bootloader}
        assert found == expected, f"generation {newest} has {found}, upstream has {expected}"
        for rack in world.racks.values():
            doing = None if rack.process is None else rack.process.synchroniser.status
            held = rack.inventory
            assert held.holds(newest, manifest.digest), f"{rack.name} is at {held.generation} of {newest}: {doing}"
        for policy in ("any", "all"):
            for target in sorted({*targets_of(manifest)}):
                world.ask(target, policy)
                world.settle()
                [question] = world.questions
                status = question.connection.response().status
                world.questions.clear()
                assert status == (200 if world.racks else 503), f"{target}: {status}"


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
