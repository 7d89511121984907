"""A file of a rack that is damaged: its images are not listed from then on, and it is fetched again."""

from __future__ import annotations

import argparse
import io
import json
import os
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from rack import verification
from rack.config import RackConfig
from rack.inspection import Inspector
from rack.inventory import NOTHING, Inventory
from rack.life import FIRST_RETRY, LOOK_SOON
from rack.verification import RequestFile, read_rate, verify_all
from rack.wire import RackWire
from rpc.blobs import BlobStore
from rpc.console import CommandFailed, Status
from rpc.damage import Damaged
from rpc.events import Kind
from rpc.fetch import FetchFailed
from rpc.manifest import Manifest
from rpc.verifying import MIB, Verifier
from tests.rack.material import image, put
from tests.rack.test_sync import FIRST, FOCAL, NOBLE, SECOND, Region, SyncTestCase, inline
from tests.rpc.test_verifying import rot


class DamageTests(SyncTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.told: list[tuple[str, str]] = []
        rack = self.rack
        rack.synchroniser.on_happening(self.happened)
        rack.blobs.on_damage.append(self.found)
        self.sync_to(5, FIRST)
        self.told.clear()
        self.addCleanup(self.flushLoggedErrors)

    def happened(self, kind: Kind, text: str) -> None:
        self.told.append((kind.type, text))

    def found(self, damaged: Damaged) -> None:
        """As the service wires it, but in one thread."""
        if self.rack.store.withdraw(damaged.sha256, f"was wrong: {damaged.reason}"):
            self.rack.synchroniser.damage_found()

    def sync_to(self, generation: int, manifest: Manifest) -> Deferred[Any]:
        return self.rack.synchroniser.request(self.rack.region.publish(generation, manifest))

    def damage(self, number: int = 0, of: Any = NOBLE) -> str:
        """Have a file of an image rot, and be verified."""
        file = of.files[number]
        rot(self.rack.blobs.path(file.sha256))
        self.rack.blobs.verify(file.sha256, file.size, thorough=True)
        return str(file.sha256)

    @property
    def inventory(self) -> Inventory:
        return self.rack.synchroniser.inventory

    def test_its_image_is_listed_no_more_and_is_fetched_again_and_listed(self) -> None:
        self.rack.region.hold()
        name = self.damage()
        self.assertEqual(self.inventory.manifest.images, (FOCAL,))
        self.assertEqual(self.inventory.generation, 5)
        self.assertNotEqual(self.inventory.digest, FIRST.digest)
        self.assertIn("was wrong: the sha256 of its", str(self.inventory.damaged[0]))
        self.assertEqual([kind for kind, _ in self.told], ["Damage found", "Sync started"])
        self.rack.region.release()
        self.assertTrue(self.inventory.holds(5, FIRST.digest))
        self.assertTrue(self.rack.region.requests[-1].endswith(name))

    def test_the_reason_is_reported_to_the_region(self) -> None:
        self.rack.region.contents.clear()
        self.damage()
        report = RackWire(self.rack.synchroniser).report()
        self.assertEqual((report["state"], report["digest"]), ("failed", self.inventory.manifest.digest))
        self.assertIn("404", report["progress"]["reason"])

    def test_a_file_that_is_found_damaged_during_a_sync_is_withdrawn_at_once(self) -> None:
        self.rack.region.hold()
        self.sync_to(6, SECOND)
        self.damage(of=FOCAL)
        self.assertEqual(self.inventory.manifest.images, (NOBLE,))
        self.rack.region.release()
        self.clock.advance(FIRST_RETRY)
        self.assertTrue(self.inventory.holds(6, SECOND.digest))

    def test_damage_that_is_found_while_a_new_snapshot_is_looked_at_is_not_listed_in_it(self) -> None:
        inspector: Any = self.rack.store._inspector
        inspect = inspector.inspect
        damaged: list[Any] = []

        def inspect_and_damage(base: Path, known: Manifest | None = None) -> Inventory:
            found: Inventory = inspect(base, known)
            if base.name == f"6-{SECOND.digest[:8]}" and not damaged:
                damaged.append(FOCAL)
                self.damage(of=FOCAL)
            return found

        self.patch(Inspector, "inspect", lambda _, base, known=None: inspect_and_damage(base, known))
        self.rack.synchroniser.on_change(self.never_lists_what_is_damaged)
        self.sync_to(6, SECOND)
        self.assertNotIn(FOCAL.key, self.inventory.manifest.by_key)
        self.clock.advance(LOOK_SOON)
        self.assertTrue(self.inventory.holds(6, SECOND.digest))

    def never_lists_what_is_damaged(self) -> None:
        held = self.inventory.manifest.blobs
        self.assertFalse(set(self.rack.blobs.damaged) & set(held))

    def test_what_a_rack_refused_is_told_until_the_next_sync(self) -> None:
        name = SECOND.images[0].files[0].sha256
        fetch = self.rack.region.fetch

        async def fetch_wrong(_: object, wanted: Any, progress: Any = None) -> Any:
            results = dict(await fetch(wanted, progress))
            results[name] = FetchFailed(name, "http://x/", "the sha256 is another", True)
            return results

        wrong = self.patch(Region, "fetch", fetch_wrong)
        self.sync_to(6, SECOND)
        wire = RackWire(self.rack.synchroniser)
        self.assertEqual(wire.report()["refused"], [name])
        wrong.restore()
        self.clock.advance(FIRST_RETRY)
        self.assertNotIn("refused", wire.report())

    def test_damage_of_what_no_image_needs_changes_nothing(self) -> None:
        put(self.rack.blobs, b"of nobody")
        self.assertFalse(self.rack.store.withdraw("0" * 64, "was wrong"))
        self.assertTrue(self.inventory.holds(5, FIRST.digest))


class InventoryTests(SynchronousTestCase):
    SHARED = image(version="20260303", files={"squashfs": "noble 20260101 squashfs", "boot-kernel": "other"})
    MANIFEST = Manifest((FOCAL, NOBLE, image(arch="arm64", files={"squashfs": "noble 20260101 squashfs"})))

    @settings(max_examples=50)
    @given(st.lists(st.sampled_from(sorted(MANIFEST.blobs)), max_size=4))
    def test_no_image_is_held_without_a_content_whatever_the_order(self, lost: list[str]) -> None:
        found = there = Inventory(1, self.MANIFEST, self.MANIFEST)
        for name in lost:
            found = found.without(name, "was wrong")
        for name in reversed(lost):
            there = there.without(name, "was wrong")
        self.assertEqual(found, there)
        self.assertFalse(set(found.manifest.blobs) & set(lost))
        self.assertEqual({damage.sha256 for damage in found.damaged}, set(lost))
        left = [each for each in self.MANIFEST.images if not {file.sha256 for file in each.files} & set(lost)]
        self.assertEqual(list(found.manifest.images), left)

    def test_nothing_stays_nothing(self) -> None:
        self.assertIs(NOTHING.without("0" * 64, "was wrong"), NOTHING)


class CommandTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.patch(os, "fsync", lambda descriptor: None)
        self.root = Path(self.mktemp()).absolute()
        (self.root / "images").mkdir(parents=True)
        (self.root / "images" / "lock").touch()
        self.blobs = BlobStore(self.root / "images" / "cache")
        self.addCleanup(self.blobs.close)
        self.names = [put(self.blobs, bytes([number]) * 1000) for number in range(3)]
        self.settings = self.root / "rack.toml"
        self.settings.write_text(f'state_directory = "{self.root}"\n')
        self.output = io.StringIO()
        self.patch(verification, "write", lambda text="": self.output.write(f"{text}\n"))

    def run_it(self, **options: Any) -> int:
        given = {"config": str(self.settings), "rate": 1000.0, "no_wait": False, "json": False, **options}
        return verification.run(argparse.Namespace(**given))

    def test_without_a_rack_that_runs_the_command_does_it_and_says_what_is_damaged(self) -> None:
        self.assertEqual(self.run_it(), Status.YES)
        self.assertIn("3 files (3.0 kB) were verified: none damaged", self.output.getvalue())
        rot(self.blobs.path(self.names[1]))
        self.assertEqual(self.run_it(), Status.NO)
        self.assertIn(f"{self.names[1]}: the sha256 of its 1000 bytes is", self.output.getvalue())
        self.assertIn("it is fetched again when the rack runs", self.output.getvalue())
        self.assertFalse(self.blobs.path(self.names[1]).exists())
        self.flushLoggedErrors()

    def test_a_directory_without_images_is_said(self) -> None:
        (self.root / "images" / "lock").unlink()
        error = self.assertRaises(CommandFailed, self.run_it)
        self.assertIn("the rack has not run yet", str(error))

    def test_a_request_is_taken_by_the_rack_that_runs(self) -> None:
        clock = Clock()
        verifier = Verifier(self.blobs, clock, inline, clock.seconds, 0.1 * MIB, 0)
        verifier.start()
        path = RackConfig(self.root).verify_request_file
        requests = RequestFile(path, verifier, clock, inline)
        requests.start()
        clock.advance(2)
        self.assertNotIn("files", verifier.status)
        path.write_text("50")
        clock.advance(2)
        self.assertFalse(path.exists())
        self.assertEqual((verifier.status["files"], verifier.status["ended"]), (3, 4.0))
        recorded = json.loads(verifier.path.read_text())
        self.assertEqual((recorded["files"], recorded["ended"]), (3, 4.0))
        self.successResultOf(Deferred.fromCoroutine(requests.stop()))
        self.successResultOf(Deferred.fromCoroutine(verifier.stop()))

    def test_a_rate_that_is_none_is_the_one_that_is_set(self) -> None:
        self.assertEqual([read_rate(text) for text in ("", "x", "-1", "nan", "1e9", "16")], [None] * 5 + [16.0])

    def test_every_file_is_shown_as_it_is_done(self) -> None:
        shown: list[int] = []
        last = verify_all(self.blobs, 1e9, lambda going: shown.append(going.files))
        self.assertEqual((shown, last.bytes_total), ([1, 2, 3], 3000))
