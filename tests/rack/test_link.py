"""What passes between a rack and its region: the answers, the reports, and that a link's end ends nothing else."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from rack import link as rack_link
from rack.assignment import InvalidAssignment
from rack.link import REPEAT_SECONDS, REPORT_SECONDS, RegionLinks
from rack.wire import resolve
from rpc.commands import (
    CancelSync,
    DescribeRelease,
    ListImages,
    Register,
    ReportInventory,
    SyncImages,
    SyncProgress,
    ValidateLicenseKey,
    VersionMismatch,
)
from rpc.manifest import Manifest, parse_manifest
from rpc.outcomes import Answered, NotConnected, Outcome
from rpc.protocol import Link
from rpc.testing import RecordingReporter, linked
from rpc.versions import VERSIONS, agree
from tests.rack.material import URL, image
from tests.rack.test_sync import FIRST, NOBLE, SECOND, Rack

STAR_URL = "http://*:5240/MAAS/images-stream"
RESOLVED = "http://192.0.2.1:5240/MAAS/images-stream"


class LinkTestCase(SynchronousTestCase):
    """A rack and a region's end of its link. ``reports`` is what the region was told."""

    def setUp(self) -> None:
        self.patch(os, "fsync", lambda descriptor: None)
        self.clock = Clock()
        root = Path(self.mktemp()).absolute()
        root.mkdir(parents=True)
        self.rack = Rack(root, self.clock)
        self.addCleanup(self.rack.release)
        self.successResultOf(Deferred.fromCoroutine(self.rack.synchroniser.recover()))
        self.links = RegionLinks(self.clock, self.rack.synchroniser, "rack-1")
        self.registered: list[dict[str, Any]] = []
        self.reports: list[dict[str, Any]] = []
        self.refuse: Exception | None = None
        self.region_speaks: tuple[int, ...] = VERSIONS
        self.answer_late: list[Deferred[None]] | None = None
        self.connect()

    def connect(self) -> None:
        self.reporter = RecordingReporter()
        self.region_end, self.rack_end, self.pump = linked(
            {Register: self.register, ReportInventory: self.report},
            self.links.responders,
            self.clock,
            interval=0,
            rack_reporter=self.reporter,
            version=None,
        )

    def prepare(self) -> None:
        preparing = Deferred.fromCoroutine(self.links.prepare(self.rack_end))
        self.pump.flush()
        self.successResultOf(preparing)
        self.links._start_ticking()
        self.addCleanup(self.stop_ticking)

    def stop_ticking(self) -> None:
        if self.links._ticking.running:
            self.links._ticking.stop()

    async def register(self, link: Link, **arguments: Any) -> Mapping[str, Any]:
        self.registered.append(arguments)
        if self.refuse:
            raise self.refuse
        return {"version": agree(arguments["versions"], self.region_speaks), "region": "the region", "stream_urls": []}

    async def report(self, link: Link, **arguments: Any) -> Mapping[str, Any]:
        if self.answer_late is not None:
            late: Deferred[None] = Deferred()
            self.answer_late.append(late)
            await late
        if self.refuse:
            raise self.refuse
        self.reports.append(arguments)
        return {}

    def ask(self, command: Any, **arguments: Any) -> Deferred[Outcome[dict[str, Any]]]:
        asking = Deferred.fromCoroutine(self.region_end.ask(command, **arguments))
        self.pump.flush()
        return asking

    def answer(self, command: Any, **arguments: Any) -> dict[str, Any]:
        outcome = self.successResultOf(self.ask(command, **arguments))
        assert isinstance(outcome, Answered), outcome
        return outcome.value

    def publish(self, generation: int, manifest: Manifest, url: str = STAR_URL) -> dict[str, Any]:
        """Have it at the URL that the rack will use; the arguments of ``SyncImages``."""
        assignment = self.rack.region.publish(generation, manifest)
        document = self.rack.region.documents.pop(assignment.manifest_url)
        self.rack.region.documents[assignment.manifest_url.replace(URL, RESOLVED)] = document
        return {"generation": generation, "digest": manifest.digest, "url": url}


class TestAnswers(LinkTestCase):
    def test_a_rack_that_holds_nothing_says_so(self) -> None:
        answer = self.answer(ListImages, known_digest="")
        self.assertEqual(answer, {"state": "empty", "generation": -1, "digest": "", "inventory": None})

    def test_a_list_is_sent_until_the_region_knows_its_digest(self) -> None:
        self.answer(SyncImages, **self.publish(5, FIRST))
        answer = self.answer(ListImages, known_digest="")
        self.assertEqual((answer["state"], answer["generation"], answer["digest"]), ("ready", 5, FIRST.digest))
        self.assertEqual(parse_manifest(answer["inventory"], answer["digest"]), FIRST)
        self.assertIsNone(self.answer(ListImages, known_digest=FIRST.digest)["inventory"])
        self.assertIsNotNone(self.answer(ListImages, known_digest=SECOND.digest)["inventory"])
        both = self.answer(ListImages, known_digest=SECOND.digest, newest_digest=FIRST.digest)
        self.assertIsNone(both["inventory"])
        neither = self.answer(ListImages, known_digest=SECOND.digest, newest_digest="0" * 64)
        self.assertIsNotNone(neither["inventory"])

    def test_a_list_over_64_kib_passes(self) -> None:
        many = Manifest(image(release=f"release{number}") for number in range(400))
        self.assertGreater(len(many.canonical), 3 * 65536)
        self.assertEqual(self.answer(SyncImages, **self.publish(5, many))["outcome"], "synced")
        self.assertEqual(parse_manifest(self.answer(ListImages, known_digest="")["inventory"]), many)

    def test_a_damaged_image_is_not_listed_and_the_digest_says_so(self) -> None:
        self.answer(SyncImages, **self.publish(5, FIRST))
        self.rack.blobs.path(NOBLE.files[0].sha256).unlink()
        self.rack.store.recheck()
        answer = self.answer(ListImages, known_digest=FIRST.digest)
        self.assertEqual((answer["state"], answer["generation"]), ("failed", 5))
        self.assertEqual(parse_manifest(answer["inventory"], answer["digest"]).images, FIRST.images[:1])

    def test_a_sync_is_answered_when_it_has_ended_and_to_all_who_asked(self) -> None:
        # Regression: an older rack answered at once, and nobody knew how an import had ended.
        self.rack.region.hold()
        asked = self.publish(5, FIRST)
        callers = [self.ask(SyncImages, **asked) for _ in range(3)]
        for caller in callers:
            self.assertNoResult(caller)
        self.rack.region.release()
        self.pump.flush()
        for caller in callers:
            outcome = self.successResultOf(caller)
            assert isinstance(outcome, Answered)
            self.assertEqual(
                outcome.value,
                {
                    "outcome": "synced", "generation": 5, "digest": FIRST.digest, "reason": "",
                    "bytes_fetched": sum(FIRST.blobs.values()), "files_fetched": len(FIRST.blobs),
                },
            )  # fmt: skip

    def test_a_region_that_has_not_heard_what_is_held_does_not_send_the_rack_back(self) -> None:
        # Regression: of two region processes, the one that had not heard of what the other had just published.
        newer, older = self.publish(6, SECOND), self.publish(5, FIRST)
        self.answer(SyncImages, **newer)
        answer = self.answer(SyncImages, **older)
        self.assertEqual((answer["outcome"], answer["generation"]), ("superseded", 6))
        self.assertIn("generation 6 is held", answer["reason"])

    def test_a_region_that_has_heard_what_is_held_does(self) -> None:
        newer, older = self.publish(6, SECOND), self.publish(5, FIRST)
        self.prepare()
        self.answer(SyncImages, **newer)
        self.assertEqual(self.reports[-1]["generation"], 6)
        self.assertEqual(self.answer(SyncImages, **older)["generation"], 5)

    def test_images_are_fetched_from_the_region_that_the_link_is_with(self) -> None:
        # Regression: a region that offered an address of its own which racks could not reach.
        self.answer(SyncImages, **self.publish(5, FIRST))
        self.assertEqual(self.rack.region.requests[0], f"{RESOLVED}/generations/{FIRST.digest}/manifest.json")

    def test_a_sync_that_makes_no_sense_fails_with_the_reason_and_the_link_stays(self) -> None:
        for wrong, said in (
            ({"digest": "../../../etc"}, "../../../etc"),
            ({"generation": -5}, "-5"),
            ({"url": "file:///etc"}, "file:///etc"),
            ({"url": "http://[::1"}, "http://[::1"),
            ({"url": "http://host:99999/"}, "99999"),
        ):
            answer = self.answer(SyncImages, **{**self.publish(5, FIRST), **wrong})
            self.assertEqual((answer["outcome"], answer["generation"]), ("failed", -1))
            self.assertIn(said, answer["reason"])
        self.assertEqual(self.answer(ListImages, known_digest="")["state"], "empty")
        self.assertEqual(self.rack.region.requests, [])

    def test_a_release_is_described_and_a_license_key_judged(self) -> None:
        self.answer(SyncImages, **self.publish(5, FIRST))
        described = self.answer(DescribeRelease, os="ubuntu", release="noble")
        self.assertEqual(
            (described["title"], described["system"], described["requires_license_key"]), ("24.04 LTS", "Ubuntu", False)
        )
        self.assertEqual(described["uses"][0]["purposes"], ["commissioning", "diskless", "xinstall"])
        self.assertEqual(described["uses"][0]["version"], "20260101")
        key = "AAAAA-BBBBB-CCCCC-DDDDD-12345"
        answer = self.answer(ValidateLicenseKey, os="windows", release="win2022", key=key)
        self.assertEqual(answer, {"outcome": "valid", "reason": ""})
        answer = self.answer(ValidateLicenseKey, os="ubuntu", release="noble", key=key)
        self.assertEqual(answer["outcome"], "not-needed")

    def test_progress_is_told_while_there_is_any_and_a_sync_can_be_cancelled(self) -> None:
        self.assertEqual(self.answer(SyncProgress), {"progress": {}})
        self.assertEqual(self.answer(CancelSync), {"cancelled": False})
        self.rack.region.hold()
        caller = self.ask(SyncImages, **self.publish(5, FIRST))
        progress = self.answer(SyncProgress)["progress"]
        self.assertEqual((progress["generation"], progress["step"]), (5, "manifest"))
        self.assertEqual(self.answer(CancelSync), {"cancelled": True})
        outcome = self.successResultOf(caller)
        assert isinstance(outcome, Answered)
        self.assertEqual(outcome.value["outcome"], "cancelled")


class TestReports(LinkTestCase):
    def test_a_rack_registers_and_then_reports(self) -> None:
        self.prepare()
        self.assertEqual(
            self.registered,
            [{"versions": list(VERSIONS), "name": "rack-1", "software": "0.1.0", "instance": None, "attempt": None}],
        )
        nothing = {"generation": -1, "digest": "", "state": "empty", "progress": {}, "refused": None}
        self.assertEqual(self.reports, [nothing])

    def test_a_rack_says_which_of_its_links_it_registers(self) -> None:
        preparing = Deferred.fromCoroutine(self.links.prepare(self.rack_end, {"instance": "i", "attempt": 3}))
        self.pump.flush()
        self.successResultOf(preparing)
        self.assertEqual((self.registered[0]["instance"], self.registered[0]["attempt"]), ("i", 3))

    def test_a_rack_of_the_next_release_registers_with_a_region_of_this_one_and_of_the_one_after(self) -> None:
        self.patch(rack_link, "VERSIONS", (1, 2))
        for region_speaks, agreed in (((1,), 1), ((1, 2), 2), ((1, 2, 3), 2), ((2, 3), 2)):
            self.region_speaks = region_speaks
            self.connect()
            preparing = Deferred.fromCoroutine(self.links.prepare(self.rack_end))
            self.pump.flush()
            self.successResultOf(preparing)
            self.assertEqual((self.rack_end.version, self.region_end.version), (agreed, agreed))
        self.assertEqual(len(self.reports), 4)

    def test_a_rack_that_has_no_version_in_common_with_the_region_is_told_which_end_to_upgrade(self) -> None:
        self.patch(rack_link, "VERSIONS", (2, 3))
        for region_speaks, end in (((1,), "region"), ((4, 5), "rack")):
            self.region_speaks = region_speaks
            self.connect()
            preparing = Deferred.fromCoroutine(self.links.prepare(self.rack_end))
            self.pump.flush()
            self.assertIn(f"upgrade the {end}", str(self.failureResultOf(preparing, VersionMismatch).value))
            self.assertEqual(self.links.up, 0)

    def test_a_rack_that_the_region_refuses_is_not_linked(self) -> None:
        self.refuse = VersionMismatch("upgrade the rack")
        preparing = Deferred.fromCoroutine(self.links.prepare(self.rack_end))
        self.pump.flush()
        self.failureResultOf(preparing, VersionMismatch)
        self.assertEqual(self.reports, [])

    def test_the_begin_and_the_end_of_a_sync_are_reported(self) -> None:
        self.prepare()
        self.rack.region.hold()
        self.ask(SyncImages, **self.publish(5, FIRST))
        self.assertEqual((self.reports[-1]["state"], self.reports[-1]["generation"]), ("syncing", -1))
        self.rack.region.release()
        self.pump.flush()
        ended = {"generation": 5, "digest": FIRST.digest, "state": "ready", "progress": {}, "refused": None}
        self.assertEqual(self.reports[-1], ended)

    def test_a_failure_is_reported_with_its_reason_and_the_next_try(self) -> None:
        self.prepare()
        self.ask(SyncImages, generation=5, digest=FIRST.digest, url=STAR_URL)
        report = self.reports[-1]
        self.assertEqual((report["state"], report["progress"]["next_try_seconds"]), ("failed", 15.0))
        self.assertIn("404", report["progress"]["reason"])

    def test_while_a_sync_is_under_way_its_progress_is_reported(self) -> None:
        self.prepare()
        self.rack.region.hold()
        self.ask(SyncImages, **self.publish(5, FIRST))
        before = len(self.reports)
        self.clock.advance(REPORT_SECONDS)
        self.pump.flush()
        self.assertEqual(len(self.reports), before + 1)
        self.assertEqual(self.reports[-1]["progress"]["seconds"], REPORT_SECONDS)

    def test_of_many_changes_while_a_report_is_under_way_only_the_last_is_told(self) -> None:
        self.answer_late = []
        self.prepare()
        for generation, manifest in ((5, FIRST), (6, SECOND), (7, FIRST)):
            self.ask(SyncImages, **self.publish(generation, manifest))
        late, self.answer_late = self.answer_late, None
        self.assertEqual(len(late), 1)
        late[0].callback(None)
        self.pump.flush()
        self.assertEqual([report["generation"] for report in self.reports], [-1, 7])

    def test_a_report_that_the_region_could_not_take_is_made_again(self) -> None:
        self.refuse = None
        self.prepare()
        self.refuse = RuntimeError("the database is away")
        self.ask(SyncImages, **self.publish(5, FIRST))
        self.assertEqual(set(self.reporter.kinds), {"Unhandled"})
        self.flushLoggedErrors(RuntimeError)
        self.refuse = None
        self.assertEqual(self.reports[-1]["generation"], -1)
        for _ in range(int(REPEAT_SECONDS / REPORT_SECONDS)):
            self.clock.advance(REPORT_SECONDS)
            self.pump.flush()
        self.assertEqual([report["generation"] for report in self.reports], [-1, 5])
        self.clock.advance(10 * REPORT_SECONDS)
        self.pump.flush()
        self.assertEqual(len(self.reports), 2)

    def test_a_sync_goes_on_when_the_link_ends_and_the_next_link_hears_of_it(self) -> None:
        self.prepare()
        self.rack.region.hold()
        caller = self.ask(SyncImages, **self.publish(5, FIRST))
        self.region_end.abort("the region stops")
        self.pump.flush()
        self.assertIsInstance(self.successResultOf(caller), NotConnected)
        self.rack.region.release()
        self.assertEqual(self.rack.synchroniser.inventory.generation, 5)
        self.stop_ticking()
        self.connect()
        self.prepare()
        self.assertEqual(self.reports[-1]["generation"], 5)

    def test_a_sync_that_failed_is_tried_again_when_the_region_is_back(self) -> None:
        self.ask(SyncImages, generation=5, digest=FIRST.digest, url=STAR_URL)
        self.assertEqual(self.rack.synchroniser.status.state, "failed")
        self.publish(5, FIRST)
        self.prepare()
        self.assertEqual(self.rack.synchroniser.inventory.generation, 5)
        self.assertEqual(self.reports[-1]["state"], "ready")


class TestResolving(SynchronousTestCase):
    def test_no_host_or_a_star_is_the_regions_address(self) -> None:
        for url, address, expected in (
            ("http://*:5240/MAAS/images-stream", "10.0.0.1:5250", "http://10.0.0.1:5240/MAAS/images-stream"),
            ("http://*/MAAS", "10.0.0.1:5250", "http://10.0.0.1/MAAS"),
            ("http://:5240/MAAS", "10.0.0.1:5250", "http://10.0.0.1:5240/MAAS"),
            ("http://*:5240/MAAS", "[fd00::1]:5250", "http://[fd00::1]:5240/MAAS"),
            ("http://other:1/MAAS", "10.0.0.1:5250", "http://other:1/MAAS"),
        ):
            self.assertEqual(resolve(url, address), expected)

    def test_without_an_address_there_is_none_to_take(self) -> None:
        with self.assertRaises(InvalidAssignment):
            resolve("http://*:5240/", "")

    @settings(deadline=None)
    @given(st.text(), st.text())
    def test_any_text_is_resolved_or_refused(self, url: str, address: str) -> None:
        try:
            self.assertIsInstance(resolve(url, address), str)
        except InvalidAssignment as error:
            self.assertIn("url is", str(error))
