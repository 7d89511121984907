"""What ``releases/{os}/{release}/`` tells of one release: where it comes from, where it went, and each rack's part."""

from __future__ import annotations

from typing import Any

from attrs import evolve

from region.answers.combine import Catalogue
from region.database import DatabaseUnavailable
from region.upstream.values import UPLOADS
from rpc.manifest import Manifest
from rpc.outcomes import Failed, TimedOut
from tests.region.fakes import EPOCH
from tests.region.inventories import FOCAL, NOBLE, NOBLE_ARM, catalogue, image
from tests.region.test_api_releases import ReleasesTestCase

GA, HWE = "ga-24.04", "hwe-24.04"
SOURCE = "http://images.example.com/"


class WhyTestCase(ReleasesTestCase):
    """With what is asked most."""

    def architecture(self, path: str = "releases/ubuntu/noble/?arch=amd64") -> dict[str, Any]:
        (found,) = self.get(path).json["architectures"]
        assert isinstance(found, dict)
        return found

    def says(self, path: str = "releases/ubuntu/noble/?arch=amd64") -> str:
        """What is said of the first rack."""
        told = self.architecture(path)["racks"][0]["says"]
        assert isinstance(told, str)
        return told

    def publish_images(self, *images: Any) -> Catalogue:
        manifest = Manifest(images)
        self.generations.publish(manifest)
        return Catalogue(manifest)

    def reports(self, rack: str, **progress: Any) -> None:
        """The rack has reported that, at :data:`tests.region.fakes.NOW`."""
        self.racks.racks = {**self.racks.racks, rack: evolve(self.racks.racks[rack], progress=progress)}


class TestPublished(WhyTestCase):
    """With which generation it came, since when, and from where."""

    def test_it_says_with_which_generation_an_image_came_since_when_and_from_which_source(self) -> None:
        self.publish(FOCAL)
        self.racks.add("aaaaaa", self.publish(FOCAL, NOBLE), 2)
        found = self.architecture()
        self.assertEqual(
            found["published"],
            f"Version 20260101 (generic) is published since 2026-05-28T22:26:40Z, with generation 2, from {SOURCE}.",
        )
        self.assertEqual(
            found["images"],
            [{"subarch": "generic", "kflavor": "generic", "label": "stable", "version": "20260101", "size": 3000,
              "source": SOURCE, "generation": 2, "since": "2026-05-28T22:26:40Z", "first_generation": 2,
              "first_since": "2026-05-28T22:26:40Z", "kept": "",
              "uses": ["commissioning", "diskless", "xinstall"]}],
        )  # fmt: skip
        self.assertEqual((found["gone"], found["went"]), ([], ""))

    def test_of_an_upload_it_says_that_it_was_uploaded(self) -> None:
        self.racks.add("aaaaaa", self.publish_images(evolve(image(NOBLE), source=UPLOADS)), 1)
        self.assertEqual(
            self.architecture()["published"],
            "Version 20260101 (generic) is published since 2026-05-28T21:26:40Z, with generation 1, "
            "as it was uploaded.",
        )

    def test_it_says_since_when_there_has_been_any_version(self) -> None:
        self.publish(NOBLE)
        self.publish(NOBLE, FOCAL)
        self.racks.add("aaaaaa", self.publish(NOBLE, version="20260202"), 3)
        self.assertIn(
            "since 2026-05-28T23:26:40Z, with generation 3, from http://images.example.com/; there has been a version "
            "of it since 2026-05-28T21:26:40Z (generation 1).",
            self.architecture()["published"],
        )

    def test_it_says_if_the_current_generation_only_keeps_it_and_why(self) -> None:
        self.publish(NOBLE)
        self.records.kept[2] = "http://images.example.com/ could not be read: timed out"
        self.racks.add("aaaaaa", self.publish(NOBLE, FOCAL), 2)
        found = self.architecture()
        self.assertIn("Generation 2 keeps it: http://images.example.com/ could not be read: timed out.",
                      found["published"])  # fmt: skip
        self.assertEqual(found["images"][0]["kept"], self.records.kept[2])

    def test_kernels_that_came_with_different_generations_are_told_apart(self) -> None:
        self.publish_images(image(NOBLE, subarch=GA))
        held = self.publish_images(image(NOBLE, subarch=GA), image(NOBLE, "20260303", subarch=HWE))
        self.racks.add("aaaaaa", held, 2)
        published = self.architecture()["published"]
        self.assertIn(f"Version 20260101 ({GA}) is published since 2026-05-28T21:26:40Z, with generation 1", published)
        self.assertIn(f"Version 20260303 ({HWE}) is published since 2026-05-28T22:26:40Z, with generation 2", published)

    def test_without_the_database_it_still_answers_and_says_what_it_does_not_know(self) -> None:
        self.racks.add("aaaaaa", self.publish(NOBLE))
        self.records.error = DatabaseUnavailable("it is away")
        response = self.get("releases/ubuntu/noble/")
        self.assertEqual((response.status, response.json["state"]), (200, "deployable"))
        self.assertEqual(
            response.json["architectures"][0]["published"],
            f"Version 20260101 (generic) is published in generation 1, from {SOURCE}; since when cannot be read right "
            "now.",
        )
        self.assertEqual(self.get("releases/ubuntu/trusty/").status, 400)


class TestGone(WhyTestCase):
    """When it went, with which generation, and why."""

    def setUp(self) -> None:
        super().setUp()
        self.publish(FOCAL, NOBLE)
        self.records.reasons[2] = "no selection of http://images.example.com/ asks for it any more"
        self.newer = self.publish(NOBLE)

    def test_a_release_that_a_rack_still_holds_says_that_it_is_published_no_more_and_why(self) -> None:
        self.racks.add("aaaaaa", catalogue([FOCAL]), 1)
        response = self.get("releases/ubuntu/focal/")
        self.assertEqual(response.status, 200)
        (found,) = response.json["architectures"]
        self.assertEqual((found["images"], found["published"]), ([], ""))
        self.assertEqual(
            found["went"],
            "Version 20260101 (generic) went with generation 2, 2026-05-28T22:26:40Z: "
            "no selection of http://images.example.com/ asks for it any more.",
        )
        (gone,) = found["gone"]
        self.assertEqual((gone["arch"], gone["generation"], gone["since"], gone["reason"]),
                         ("amd64", 2, "2026-05-28T22:26:40Z", self.records.reasons[2]))  # fmt: skip

    def test_a_silent_rack_that_may_hold_it_changes_nothing_about_that(self) -> None:
        self.racks.add("aaaaaa", catalogue([FOCAL]), 1).outcome = TimedOut(2.0)
        response = self.get("releases/ubuntu/focal/")
        self.assertEqual(response.status, 503)
        self.assertIn("went with generation 2", response.json["architectures"][0]["went"])

    def test_a_release_that_nobody_holds_any_more_is_refused_in_the_usual_words_and_then_says_when_it_went(
        self,
    ) -> None:
        self.racks.add("aaaaaa", self.newer, 2)
        response = self.get("releases/ubuntu/focal/")
        self.assertEqual(response.status, 400)
        usual, went = response.json["distro_series"]
        self.assertEqual(usual, "'ubuntu/focal' is not a valid distro_series.  It should be one of: 'ubuntu/noble'.")
        self.assertIn("went with generation 2, 2026-05-28T22:26:40Z: no selection of", went)

    def test_what_came_back_is_not_gone(self) -> None:
        self.racks.add("aaaaaa", self.publish(FOCAL, NOBLE), 3)
        found = self.architecture("releases/ubuntu/focal/")
        self.assertEqual(found["gone"], [])
        self.assertEqual(found["images"][0]["first_generation"], 3)

    def test_an_architecture_that_went_is_told_beside_those_that_are_there_and_where_it_is_asked_about(self) -> None:
        self.publish(NOBLE, NOBLE_ARM)
        self.racks.add("aaaaaa", self.publish(NOBLE), 4)
        told = "Version 20260101 (generic) went with generation 4, 2026-05-29T00:26:40Z: as upstream has it."
        found = self.get("releases/ubuntu/noble/").json
        self.assertEqual([one["arch"] for one in found["architectures"]], ["amd64"])
        self.assertEqual(found["went"], f"For arm64: {told}")
        self.assertEqual([(gone["arch"], gone["generation"]) for gone in found["gone"]], [("arm64", 4)])
        self.assertEqual(self.get("releases/ubuntu/noble/?kernel=generic").json["went"], f"For arm64: {told}")
        found = self.get("releases/ubuntu/noble/?arch=amd64").json
        self.assertEqual((found["went"], found["architectures"][0]["went"]), ("", ""))
        self.assertEqual(self.get("releases/ubuntu/noble/?arch=arm64").json["architecture"][1:], [told])

    def test_one_kernel_of_several_that_went_is_told(self) -> None:
        self.publish_images(image(NOBLE, subarch=GA), image(NOBLE, subarch=HWE))
        self.racks.add("aaaaaa", self.publish_images(image(NOBLE, subarch=GA)), 4)
        self.assertIn(f"Version 20260101 ({HWE}) went with generation 4", self.architecture()["went"])


class TestRacks(WhyTestCase):
    """A sentence for each state that a rack can be in."""

    def setUp(self) -> None:
        super().setUp()
        self.old = self.publish(FOCAL)
        self.new = self.publish(FOCAL, NOBLE)

    def test_one_that_holds_it(self) -> None:
        self.racks.add("aaaaaa", self.new, 2)
        self.assertEqual(self.says(), "Holds version 20260101, in generation 2.")

    def test_one_that_holds_it_and_fetches_something_newer(self) -> None:
        self.racks.add("aaaaaa", self.new, 2, "syncing")
        self.publish(FOCAL, NOBLE, version="20260202")
        self.reports("aaaaaa", generation=3, step="fetching", bytes=4_000_000, bytes_done=1_000_000, rate=500_000)
        self.assertEqual(
            self.says(),
            "Holds version 20260101, in generation 2, and is fetching generation 3: 1.0 MB of 4.0 MB, at 500 kB/s.",
        )

    def test_one_on_which_it_is_arriving(self) -> None:
        self.racks.add("aaaaaa", self.old, 1, "syncing")
        self.reports("aaaaaa", generation=2, step="fetching", bytes=340_000_000, bytes_done=12_000_000, rate=11_000_000)
        self.assertEqual(
            self.says(),
            "Does not hold it yet: it is at generation 1, and is fetching generation 2: 12 MB of 340 MB, at 11 MB/s.",
        )
        (row,) = self.architecture()["racks"]
        self.assertEqual(
            row["fetching"],
            {"generation": 2, "step": "fetching", "bytes_done": 12_000_000, "bytes": 340_000_000, "rate": 11_000_000},
        )
        self.assertIsNone(row["failing"])

    def test_one_that_has_not_said_yet_how_far_it_is(self) -> None:
        self.racks.add("aaaaaa", self.old, 1, "syncing")
        self.assertEqual(
            self.says(), "Does not hold it yet: it is at generation 1, and is fetching a newer generation."
        )

    def test_one_that_has_not_begun(self) -> None:
        self.racks.add("aaaaaa", self.old, 1)
        self.assertEqual(
            self.says(), "Does not hold it yet: it is at generation 1, and has not begun to fetch generation 2."
        )

    def test_one_that_could_not_fetch_it_says_why_and_when_it_tries_again(self) -> None:
        self.racks.add("aaaaaa", self.old, 1, "failed")
        self.reports("aaaaaa", generation=2, reason="the disk is full: 3 bytes are free.", next_try_seconds=90.0)
        self.assertEqual(
            self.says(),
            "Does not hold it yet: it is at generation 1, and could not fetch generation 2 (the disk is full: 3 bytes "
            "are free); it tries again at 2026-05-28T20:28:10Z.",
        )
        (row,) = self.architecture()["racks"]
        self.assertEqual(
            row["failing"],
            {"generation": 2, "reason": "the disk is full: 3 bytes are free.", "next_try": "2026-05-28T20:28:10Z"},
        )
        self.reports("aaaaaa", generation=2, reason="the disk is full: 3 bytes are free.", next_try_seconds=180.0)
        self.assertIn("tries again at 2026-05-28T20:29:40Z", self.says())

    def test_one_on_which_a_file_of_it_is_damaged(self) -> None:
        self.racks.add("aaaaaa", catalogue([FOCAL]), 2, "failed")
        self.reports("aaaaaa", generation=2, reason="ubuntu/noble amd64: squashfs is missing", next_try_seconds=30)
        self.assertEqual(
            self.says(),
            "Does not hold it yet: it is at generation 2, and lacks part of that (ubuntu/noble amd64: squashfs is "
            "missing); it tries again at 2026-05-28T20:27:10Z.",
        )

    def test_one_that_holds_all_but_it_because_the_region_cannot_give_it(self) -> None:
        self.racks.add("aaaaaa", catalogue([FOCAL]), 2, "partial")
        reason = "squashfs is not here: it is damaged."
        lacking = {"os": "ubuntu", "release": "noble", "arch": "amd64", "reason": reason}
        other = {"os": "ubuntu", "release": "warty", "arch": "amd64", "reason": "boot-dtb is not here"}
        self.reports("aaaaaa", generation=2, reason="2 of 3 images", next_try_seconds=30, lacking=[7, other, lacking])
        self.assertEqual(
            self.says(),
            "Does not hold it yet: it is at generation 2, and holds what can be had of that (squashfs is not here: it "
            "is damaged); it tries again at 2026-05-28T20:27:10Z.",
        )
        response = self.get("releases/ubuntu/noble/?arch=amd64")
        self.assertEqual((response.status, response.json["state"]), (409, "arriving"))
        self.assertEqual(
            response.json["reason"],
            "Generation 2 lists it; rack-aaaaaa does not hold it yet (rack-aaaaaa is at generation 2, without what the "
            "region cannot give now).",
        )
        self.assertEqual(self.architecture()["racks"][0]["failing"]["reason"], reason)
        self.assertEqual(self.get("releases/ubuntu/focal/").status, 200)
        nonsenses: list[Any] = [None, 7, {}, [None], [{}], [lacking | {"reason": 7}]]
        for nonsense in nonsenses:
            self.reports("aaaaaa", generation=2, reason="2 of 3 images", lacking=nonsense)
            self.assertIn("(2 of 3 images)", self.says())

    def test_one_that_does_not_answer_and_held_it(self) -> None:
        link = self.racks.add("aaaaaa", self.new, 2)
        self.says()
        link.outcome = TimedOut(2.0)
        self.clock.advance(60)
        self.assertEqual(
            self.says(),
            "Does not answer: it did not answer within 2 s (silent since 2026-05-28T20:27:40Z). "
            "When last known at 2026-05-28T20:26:40Z, it held it, in generation 2.",
        )

    def test_one_that_is_not_connected_and_may_have_fetched_it_since(self) -> None:
        self.racks.add("aaaaaa", self.old, 1)
        del self.racks.links["aaaaaa"]
        self.racks.ended["aaaaaa"] = EPOCH - 60
        self.assertEqual(
            self.says(),
            "Does not answer: it is not connected since 2026-05-28T20:25:40Z. When last known at 2026-05-28T20:26:40Z, "
            "it was at generation 1; it may hold it by now.",
        )

    def test_one_that_is_not_connected_since_nobody_knows_when(self) -> None:
        self.racks.add("aaaaaa", self.new, 2)
        del self.racks.links["aaaaaa"]
        self.says()
        self.clock.advance(60)
        row = self.architecture()["racks"][0]
        self.assertEqual(
            row["says"],
            "Does not answer: it is not connected. "
            "When last known at 2026-05-28T20:26:40Z, it held it, in generation 2.",
        )
        self.assertIsNone(row["since"])

    def test_one_that_has_reported_something_newer_since_it_last_answered(self) -> None:
        link = self.racks.add("aaaaaa", self.old, 1)
        self.says()
        link.outcome = TimedOut(2.0)
        self.racks.racks["aaaaaa"] = evolve(self.racks.racks["aaaaaa"], generation=2, digest=self.new.digest)
        self.assertIn("When last known at 2026-05-28T20:26:40Z, it held it, in generation 2.", self.says())
        self.assertEqual(self.architecture()["racks"][0]["generation"], 2)
        # What that was, nobody remembers: then it is not said that it held it, nor that it did not.
        self.racks.racks["aaaaaa"] = evolve(self.racks.racks["aaaaaa"], generation=2, digest="0" * 64)
        self.assertIn("it was at generation 2, which lists it; it may hold it still.", self.says())

    def test_one_that_fails_and_of_which_nothing_was_ever_known(self) -> None:
        self.racks.add("aaaaaa", self.new, -1).outcome = Failed("Unhandled", "reference 42")
        self.racks.racks["aaaaaa"] = evolve(self.racks.racks["aaaaaa"], generation=None, reported=None)
        self.assertEqual(
            self.says(),
            "Does not answer: asking it failed since 2026-05-28T20:26:40Z (Unhandled: reference 42). "
            "What it holds was never known; it may hold it by now.",
        )

    def test_one_that_is_silent_and_cannot_hold_it(self) -> None:
        self.publish(NOBLE)
        self.racks.add("aaaaaa", self.old, 1)
        self.racks.add("bbbbbb", catalogue([NOBLE]), 3).outcome = TimedOut(2.0)
        row = self.architecture("releases/ubuntu/focal/")["racks"][1]
        self.assertIn("it was at generation 3; it cannot hold it, for nothing since then lists it.", row["says"])

    def test_one_that_lacks_what_is_not_published_any_more(self) -> None:
        newest = self.publish(NOBLE)
        self.racks.add("aaaaaa", newest, 3)
        self.racks.add("bbbbbb", self.old, 1)
        self.assertEqual(self.says("releases/ubuntu/focal/"), "Does not hold it; it is at generation 3.")

    def test_one_that_is_ahead_of_this_region_process(self) -> None:
        self.racks.add("aaaaaa", catalogue([FOCAL]), 7)
        self.assertIn("it is at generation 7, a newer one than this region process has heard of.", self.says())

    def test_racks_on_different_generations_are_explained_one_by_one(self) -> None:
        self.racks.add("aaaaaa", self.new, 2)
        self.racks.add("bbbbbb", self.old, 1, "syncing")
        self.racks.add("cccccc", catalogue([]), -1, "empty").outcome = TimedOut(2.0)
        for policy, status in (("any", 200), ("all", 503)):
            response = self.get(f"releases/ubuntu/noble/?arch=amd64&policy={policy}")
            self.assertEqual(response.status, status)
            rows = response.json["architectures"][0]["racks"]
            self.assertEqual([row["says"].split(":")[0].split(",")[0] for row in rows],
                             ["Holds version 20260101", "Does not hold it yet", "Does not answer"])  # fmt: skip

    def test_words_of_a_rack_that_make_no_sense_are_left_out(self) -> None:
        self.racks.add("aaaaaa", self.old, 1, "syncing")
        self.reports("aaaaaa", generation="2", bytes=-1, bytes_done=[], rate=True, step=7, next_try_seconds="x")
        self.assertEqual(
            self.says(), "Does not hold it yet: it is at generation 1, and is fetching a newer generation."
        )
        self.racks.links["aaaaaa"].state = "failed"
        self.reports("aaaaaa", reason=None, next_try_seconds=1e300)
        self.assertTrue(self.says().endswith("and could not fetch what is published (it did not say why)."))


class TestKernels(WhyTestCase):
    """One kernel can be asked about alone."""

    def setUp(self) -> None:
        super().setUp()
        self.first = self.publish_images(image(NOBLE, subarch=GA), image(NOBLE_ARM, subarch=GA))
        self.both = self.publish_images(
            image(NOBLE, subarch=GA), image(NOBLE, subarch=HWE), image(NOBLE_ARM, subarch=GA), image(FOCAL)
        )
        self.path = f"releases/ubuntu/noble/?arch=amd64&kernel={HWE}"

    def test_a_kernel_that_a_rack_holds_is_200_with_only_that(self) -> None:
        self.racks.add("aaaaaa", self.both, 2)
        response = self.get(self.path)
        self.assertEqual((response.status, response.json["kernel"]), (200, HWE))
        (found,) = response.json["architectures"]
        self.assertEqual((found["subarches"], [one["subarch"] for one in found["images"]]), ([HWE], [HWE]))
        self.assertEqual(self.get(f"{self.path}-generic").status, 200)

    def test_a_kernel_that_is_arriving_is_409_though_the_release_can_be_deployed(self) -> None:
        self.racks.add("aaaaaa", self.first, 1, "syncing")
        self.assertEqual(self.get("releases/ubuntu/noble/?arch=amd64").status, 200)
        response = self.get(self.path)
        self.assertEqual((response.status, response.json["state"]), (409, "arriving"))

    def test_a_kernel_that_a_silent_rack_may_hold_is_503(self) -> None:
        self.racks.add("aaaaaa", self.first, 1).outcome = TimedOut(2.0)
        self.assertEqual(self.get(self.path).status, 503)

    def test_a_kernel_that_no_rack_can_hold_is_400_with_those_that_can_be_had(self) -> None:
        for outcome in (None, TimedOut(2.0)):
            self.racks.add("aaaaaa", self.both, 2).outcome = outcome
            response = self.get("releases/ubuntu/noble/?kernel=hwe-99.04")
            self.assertEqual(
                (response.status, response.json),
                (
                    400,
                    {"kernel": ["'hwe-99.04' is not a valid kernel.  It should be one of: 'ga-24.04', 'hwe-24.04'."]},
                ),
            )
        response = self.get(f"releases/ubuntu/noble/?arch=arm64&kernel={HWE}")
        self.assertEqual(response.json, {"kernel": ["'hwe-24.04' is not a valid kernel.  "
                                                    "It should be one of: 'ga-24.04'."]})  # fmt: skip

    def test_a_kernel_that_went_is_not_offered_but_may_be_held_by_a_silent_rack_that_is_behind(self) -> None:
        third = self.publish_images(image(NOBLE, subarch=GA))
        link = self.racks.add("aaaaaa", third, 3)
        self.assertEqual(self.get(self.path).json, {"kernel": ["'hwe-24.04' is not a valid kernel.  "
                                                               "It should be one of: 'ga-24.04'."]})  # fmt: skip
        link.outcome = TimedOut(2.0)
        self.racks.add("bbbbbb", self.both, 2).outcome = TimedOut(2.0)
        response = self.get(self.path)
        self.assertEqual(response.status, 503)
        self.assertIn("went with generation 3", response.json["architectures"][0]["went"])

    def test_while_the_past_cannot_be_read_what_a_silent_rack_may_hold_stays_open(self) -> None:
        self.racks.add("aaaaaa", self.both, 2).outcome = TimedOut(2.0)
        self.records.error = DatabaseUnavailable("it is away")
        self.assertEqual(self.get("releases/ubuntu/noble/?kernel=hwe-99.04").status, 503)

    def test_no_kernel_is_had_on_all_racks_if_each_holds_another_that_is_published_no_more(self) -> None:
        self.publish(FOCAL)
        self.racks.add("aaaaaa", Catalogue(Manifest([image(NOBLE, subarch=GA)])), 2)
        self.racks.add("bbbbbb", Catalogue(Manifest([image(NOBLE, subarch=HWE)])), 2)
        self.assertEqual(self.get("releases/ubuntu/noble/?policy=all").status, 200)
        response = self.get(f"{self.path}&policy=all")
        self.assertEqual(response.status, 400)
        self.assertIn("'hwe-24.04' cannot be had on these racks, nor can any other: no kernel of it is published",
                      response.json["kernel"][0])  # fmt: skip

    def test_without_racks_it_is_503_for_a_kernel_too(self) -> None:
        self.assertEqual(self.get(self.path).status, 503)
