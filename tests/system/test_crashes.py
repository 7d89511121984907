"""Real daemons, and a PostgreSQL, that are killed at a step of an import or a sync: what is there, then and later."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tests import streams
from tests.crashes import TALLY
from tests.examples import SOAK
from tests.system.daemons import Daemon, Rack, Region, wait_for
from tests.system.test_spine import SystemTestCase

KILLS: Final = 1 if SOAK == 1 else 4
"""How often each of them is killed."""


class CrashTests(SystemTestCase):
    """A region that imports when it starts, and a rack, both counting their steps."""

    def setUp(self) -> None:
        self.rng = random.Random(None if SOAK > 1 else self.id())
        self.patch(Region, "program", ("-m", "tests.system.killing", "region"))
        self.patch(Rack, "program", ("-m", "tests.system.killing", "rack"))
        written = Region.write_config
        self.patch(
            Region, "write_config", lambda region, text: written(region, text.replace("at_start = false", ""))
        )  # fmt: skip
        super().setUp()
        self.version = "20260101"
        self.changes = 0
        self.import_and_sync()

    def beside(self, daemon: Daemon, suffix: str) -> Path:
        return daemon.config.with_name(daemon.config.name + suffix)

    def order(self, daemon: Daemon, at: int | None, victim: str = "self") -> None:
        """Have ``daemon`` count its steps from now on, and be the end of ``victim`` at one."""
        self.beside(daemon, ".steps").unlink(missing_ok=True)
        order = self.beside(daemon, ".order")
        order.with_suffix(".new").write_text(json.dumps({"at": at, "kill": victim}))
        os.rename(order.with_suffix(".new"), order)

    def steps_of(self, daemon: Daemon) -> list[str]:
        """What it did since it was ordered to count, and no more from now on."""
        self.beside(daemon, ".order").unlink(missing_ok=True)
        path = self.beside(daemon, ".steps")
        return path.read_text().splitlines() if path.exists() else []

    def change(self) -> None:
        """Something newer upstream."""
        # In turn, because the names of files grow with each version.
        product = ("noble:amd64", "noble:arm64", "jammy:amd64", "jammy:arm64")[self.changes % 4]
        self.changes += 1
        self.stream.change(streams.new_version, product).write()
        if product == "noble:amd64":
            self.version += ".1"

    def import_until_published(self) -> None:
        generations = self.region.get("image-generations/")
        self.region.run_import()
        wait_for(lambda: self.region.get("image-generations/") != generations, "the next generation")
        self.rack.wait_in_step()

    def assert_whole_on_disk(self, *digests: str) -> None:
        """What the rack serves is one of these generations, whole; every file of the region is what its name says."""
        self.assert_whole(self.rack)
        manifest = (self.rack.snapshot / "manifest.json").read_bytes()
        self.assertIn(hashlib.sha256(manifest).hexdigest(), digests)
        for path in self.blobs("blobs"):
            self.assertEqual(hashlib.sha256(path.read_bytes()).hexdigest(), path.name)

    def blobs(self, name: str) -> Sequence[Path]:
        return sorted((self.region.directory / "region" / "images" / name).iterdir())

    def assert_settled(self) -> None:
        """Region and rack have what is newest upstream, and nothing is left over."""
        self.rack.wait_in_step()
        self.assert_whole(self.rack)
        self.assertEqual(self.why("noble")[1]["architectures"][0]["version"], self.version)
        # The rack tidies up after it has told that it holds the new images.
        images = self.rack.directory / "rack" / "images"
        wait_for(lambda: os.listdir(images / "snapshots") == [self.rack.snapshot.name], "the old snapshot to be gone")
        for directory in (images / "cache" / "partial", images / "cache" / "quarantine"):
            self.assertEqual(os.listdir(directory), [])
        for name in ("partial", "quarantine"):
            self.assertEqual(self.blobs(name), [])

    def current(self) -> str:
        digest: str = self.region.get("image-generations/")[0]["digest"]
        return digest

    def test_killed_at_a_step_of_an_import_or_a_sync_all_go_on_to_what_is_newest(self) -> None:
        self.order(self.region, None)
        self.order(self.rack, None)
        self.change()
        self.import_until_published()
        counts: dict[Daemon, int] = {daemon: len(self.steps_of(daemon)) for daemon in (self.region, self.rack)}
        self.assertGreater(min(counts.values()), 20)
        for number in range(KILLS):
            victims = [(self.region, "self"), (self.rack, "self"), (self.region, "postgres")]
            for daemon, victim in victims if SOAK > 1 else victims[:2]:  # other tests kill an idle PostgreSQL
                count = counts[daemon]
                self.kill(daemon, victim, 1 + int(count * (number + self.rng.random()) / KILLS))

    def kill(self, daemon: Daemon, victim: str, at: int) -> None:
        """Kill it at that step of an import or sync, and let them all be."""
        before = self.current()
        self.change()
        self.order(daemon, at, victim)
        self.region.api("boot-resources/?op=import", "POST", {})
        assert daemon.process is not None
        path = self.beside(daemon, ".steps")
        wait_for(lambda: path.exists() and "killed" in path.read_text(), f"{daemon.name} to come to step {at}")
        if victim == "self":
            daemon.process.wait()
        self.steps_of(daemon)
        TALLY.count(f"real {daemon.name if victim == 'self' else victim}: SIGKILL")
        if daemon is self.region and victim == "self":
            self.region.kill()  # which waits for its PostgreSQL
            self.region.start()
        elif daemon is self.rack:
            self.rack.start()

        def is_newest() -> Any:
            status, generations, _ = self.region.api("image-generations/")
            if status == 200 and generations[0]["digest"] != before:
                return generations[0]["digest"]
            # This region imports at its start and on request only: a request that met a killed PostgreSQL was refused,
            # and an import that did has failed. One that has not ended must go on by itself.
            status, jobs, _ = self.region.api("import-jobs/")
            if status == 200 and all(job["ended"] for job in jobs):
                self.region.api("boot-resources/?op=import", "POST", {})
            return None

        newest = wait_for(is_newest, "the newest generation")
        self.assert_whole_on_disk(before, newest)
        wait_for(lambda: self.region.api("image-generations/")[0] == 200, "the database")
        wait_for(lambda: all(job["ended"] for job in self.region.get("import-jobs/")), "all imports to end")
        self.region.run_import()  # it cleans up
        self.assert_settled()
