"""What the region does about damage: it is told, fetched again until it is there, and racks are told then."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from attrs import evolve
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from region.database import DatabaseUnavailable
from region.images.repair import FIRST_RETRY, LAST_RETRY, MAX_REFUSED, SETTLE_SECONDS, TELL_SECONDS, Repairs
from region.upstream.values import UPLOADS
from rpc.blobs import BlobStore
from rpc.events import Kind
from rpc.manifest import Manifest
from tests.region.importing import contents_of, image, put, sha256
from tests.rpc.test_verifying import rot


class FakeVerifier:
    def __init__(self) -> None:
        self.suspected: list[str] = []

    def suspect(self, sha256: str, why: str) -> bool:
        self.suspected.append(sha256)
        return True


class RepairTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.blobs = BlobStore(Path(self.mktemp()))
        self.addCleanup(self.blobs.close)
        self.contents = list(contents_of(b"ubuntu/noble/amd64/20260101", b"").values())
        self.names = [put(self.blobs, content) for content in self.contents]
        self.told: list[tuple[Kind, str]] = []
        self.imports: list[float] = []
        self.told_again = 0
        self.error: Exception | None = None
        self.verifier = FakeVerifier()
        self.generations: Any = SimpleNamespace(latest=SimpleNamespace(manifest=Manifest([image()])))
        self.repairs = Repairs(
            self.blobs, self.generations, self.verifier, self.clock, self.request,
            lambda kind, text: self.told.append((kind, text)), self.tell_again, jitter=lambda: 0.0,
        )  # fmt: skip
        self.blobs.on_damage.append(self.repairs.found)
        self.blobs.on_repair.append(self.repairs.repaired)

    def tell_again(self) -> None:
        self.told_again += 1

    async def request(self) -> None:
        self.imports.append(self.clock.seconds())
        if self.error:
            raise self.error

    def damage(self, number: int) -> None:
        rot(self.blobs.path(self.names[number]))
        self.blobs.verify(self.names[number], len(self.contents[number]), thorough=True)
        self.flushLoggedErrors()

    def test_what_is_damaged_is_told_with_the_image_and_fetched_again_by_one_import(self) -> None:
        self.damage(0)
        self.damage(1)
        self.assertEqual([kind.type for kind, _ in self.told], ["Damage found", "Damage found"])
        self.assertIn("of ubuntu/noble amd64/generic/generic (stable) 20260101: the sha256 of its", self.told[0][1])
        self.clock.advance(SETTLE_SECONDS)
        self.assertEqual(self.imports, [SETTLE_SECONDS])

    def test_it_is_tried_again_ever_more_seldom_while_it_is_damaged(self) -> None:
        self.damage(0)
        self.error = DatabaseUnavailable("away")
        self.clock.pump([1.0] * int(SETTLE_SECONDS + FIRST_RETRY * 7))
        self.assertEqual(self.imports, [1, 61, 181, 421])
        self.error = None
        self.clock.pump([60.0] * 60 * 24)
        gaps = [after - before for before, after in zip(self.imports, self.imports[1:], strict=False)]
        self.assertEqual(max(gaps), LAST_RETRY)

    def test_when_all_is_there_again_racks_are_told_at_once_and_no_import_follows(self) -> None:
        self.damage(0)
        self.damage(1)
        put(self.blobs, self.contents[0])
        self.assertEqual(self.told_again, 0)
        put(self.blobs, self.contents[1])
        self.assertEqual(self.told_again, 1)
        self.clock.advance(TELL_SECONDS)
        self.assertEqual(self.told_again, 1)
        self.assertEqual(self.told[-1][0].type, "Damage repaired")
        self.clock.advance(FIRST_RETRY)
        self.assertEqual(self.imports, [])

    def test_what_is_there_again_is_told_soon_although_more_is_damaged_still(self) -> None:
        self.damage(0)
        self.damage(1)
        put(self.blobs, self.contents[0])
        self.damage(0)
        put(self.blobs, self.contents[0])
        self.clock.advance(TELL_SECONDS)
        self.assertEqual(self.told_again, 1)

    def test_what_the_current_generation_does_not_need_is_not_fetched(self) -> None:
        self.generations.latest.manifest = Manifest([image("jammy")])
        self.damage(0)
        self.clock.advance(FIRST_RETRY)
        self.assertEqual(self.imports, [])
        self.assertIn("of no image of the current generation", self.told[0][1])

    def test_after_a_restart_it_goes_on(self) -> None:
        self.repairs.stop()
        self.damage(0)
        again = Repairs(self.blobs, self.generations, self.verifier, self.clock, self.request, print, print)
        again.start()
        self.clock.advance(SETTLE_SECONDS)
        self.assertEqual(len(self.imports), 1)
        again.stop()
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_what_a_rack_refused_is_looked_at_and_nonsense_is_not(self) -> None:
        self.repairs.refused("two", [self.names[0], "x"])
        self.assertEqual(self.verifier.suspected, [self.names[0]])
        self.repairs.refused("two", [sha256(b"what nobody publishes")] * MAX_REFUSED + self.names[1:])
        self.assertEqual(self.verifier.suspected, [self.names[0]])
        self.generations.latest = None
        self.repairs.refused("two", self.names)
        self.assertEqual(self.verifier.suspected, [self.names[0]])

    def test_of_a_damaged_upload_it_is_said_that_only_its_owner_has_it(self) -> None:
        self.damage(0)
        self.assertIn("It is not served any more; it is being fetched again.", self.told[-1][1])
        self.generations.latest.manifest = Manifest([evolve(image(), source=UPLOADS)])
        self.damage(1)
        self.assertIn("no source has it: upload it again (stanchion images upload).", self.told[-1][1])
