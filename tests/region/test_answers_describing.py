"""What racks know of releases: asked for once, shown where the stream is silent, and never worth an answer."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred

from region.answers import describing
from region.answers.combine import Catalogue, Target
from region.answers.describing import PAUSE, BadDescription, Described
from region.answers.releases import Question
from rpc.manifest import Image, Manifest
from rpc.outcomes import Failed, TimedOut
from tests.logs import Logs
from tests.region.inventories import FOCAL, NOBLE, NOBLE_ARM, catalogue, image
from tests.region.test_api_releases import ReleasesTestCase

WINDOWS = Target("windows", "win2022", "amd64")


class DescribingTestCase(ReleasesTestCase):
    def hold(self, *images: Image, rack: str = "aaaaaa") -> Any:
        """Publish images, which a rack holds; its link."""
        manifest = Manifest(images)
        self.generations.publish(manifest)
        return self.racks.add(rack, Catalogue(manifest), len(self.generations.published))

    def release(self, name: str = "windows/win2022") -> dict[str, Any]:
        (found,) = [one for one in self.get("releases/").json["releases"] if one["name"] == name]
        assert isinstance(found, dict)
        return found


class TestDescriptions(DescribingTestCase):
    def test_a_title_of_the_stream_goes_before_that_of_a_rack(self) -> None:
        self.hold(image(NOBLE), image(FOCAL, release_title="From the stream"))
        self.assertEqual(self.release("ubuntu/noble")["title"], "24.04 LTS")
        self.assertEqual(self.release("ubuntu/focal")["title"], "From the stream")
        self.assertEqual(self.get("releases/noble/").json["title"], "24.04 LTS")

    def test_what_no_driver_has_heard_of_is_listed_by_its_own_name(self) -> None:
        strange = Target("plan9", "fourth", "amd64")
        self.hold(image(strange))
        found = self.release("plan9/fourth")
        self.assertEqual((found["title"], found["state"], found["requires_license_key"]),
                         ("fourth", "deployable", False))  # fmt: skip

    def test_that_a_license_key_is_needed_goes_from_the_stream_to_the_answer(self) -> None:
        self.hold(image(WINDOWS), image(NOBLE), image(FOCAL, requires_license_key="True"))
        for path in ("releases/", "releases/?arch=amd64"):
            listed = {one["name"]: one["requires_license_key"] for one in self.get(path).json["releases"]}
            self.assertEqual(listed, {"windows/win2022": True, "ubuntu/noble": False, "ubuntu/focal": True})
        self.assertIs(self.get("releases/ubuntu/focal/").json["requires_license_key"], True)

    def test_the_stream_decides_that_also_while_no_rack_answers(self) -> None:
        link = self.hold(image(WINDOWS, requires_license_key="true"), image(NOBLE))
        link.outcome = TimedOut(2.0)
        self.assertIs(self.release()["requires_license_key"], True)
        self.assertIsNone(self.release("ubuntu/noble")["requires_license_key"])
        self.assertEqual(self.release("ubuntu/noble")["title"], "noble")

    def test_uses_are_told_by_architecture_and_by_image(self) -> None:
        self.hold(image(NOBLE), image(NOBLE_ARM))
        self.racks.add("bbbbbb", catalogue([]))
        for architecture in self.get("releases/ubuntu/noble/").json["architectures"]:
            self.assertEqual(architecture["uses"], ["commissioning", "diskless", "xinstall"])
            self.assertEqual(architecture["images"][0]["uses"], architecture["uses"])
        self.assertEqual(self.release("ubuntu/noble")["architectures"][0]["uses"][0], "commissioning")

    def test_what_no_rack_holds_yet_has_no_uses_that_are_known_but_a_title(self) -> None:
        self.racks.add("aaaaaa", self.publish(FOCAL))
        self.publish(FOCAL, NOBLE)
        document = self.get("releases/ubuntu/noble/").json
        self.assertEqual((document["title"], document["architectures"][0]["uses"]), ("24.04 LTS", None))


class TestAsking(DescribingTestCase):
    def test_a_rack_is_asked_once_about_each_release_until_its_images_change(self) -> None:
        link = self.hold(image(NOBLE), image(FOCAL))
        for _ in range(3):
            self.get("releases/")
            self.get("releases/ubuntu/noble/")
        self.assertEqual(sorted(link.described), [("ubuntu", "focal"), ("ubuntu", "noble")])
        link = self.hold(image(NOBLE, "20260202"), image(FOCAL, subarch="hwe-20.04"))
        self.get("releases/")
        self.assertEqual(link.described, [("ubuntu", "focal")])

    def test_a_rack_that_holds_it_is_asked_rather_than_one_that_does_not(self) -> None:
        self.racks.add("aaaaaa", catalogue([FOCAL]), 1)
        self.hold(image(NOBLE), rack="bbbbbb")
        self.get("releases/ubuntu/noble/")
        self.assertEqual((self.racks.links["aaaaaa"].described, self.racks.links["bbbbbb"].described),
                         ([], [("ubuntu", "noble")]))  # fmt: skip

    def test_of_many_racks_that_hold_the_same_one_is_asked(self) -> None:
        link = self.hold(image(NOBLE))
        others = [self.racks.add(f"b{number:05}", link.catalogue) for number in range(200)]
        self.get("releases/")
        self.assertEqual(sum(len(one.described) for one in [link, *others]), 1)

    def test_many_releases_are_asked_about_in_several_turns(self) -> None:
        link = self.hold(*(image(Target("centos", f"centos{number}", "amd64")) for number in range(150)))
        titles = {one["title"] for one in self.get("releases/").json["releases"]}
        self.assertIn("CentOS 9", titles)
        self.assertEqual(len(link.described), 150)

    def test_a_rack_that_cannot_describe_is_left_alone_for_a_while_and_another_asked(self) -> None:
        old = self.hold(image(NOBLE))
        old.description = Failed("UnknownCommand", "there is no DescribeRelease here")
        self.assertEqual(self.release("ubuntu/noble")["title"], "noble")
        self.get("releases/")
        self.assertEqual(len(old.described), 1)
        other = self.racks.add("bbbbbb", old.catalogue)
        self.assertEqual(self.release("ubuntu/noble")["title"], "24.04 LTS")
        self.assertEqual((len(old.described), len(other.described)), (1, 1))

    def test_it_is_asked_again_after_that(self) -> None:
        link = self.hold(image(NOBLE))
        link.description = TimedOut(2.0)
        self.assertEqual(self.release("ubuntu/noble")["title"], "noble")
        link.description = {}
        self.clock.advance(PAUSE - 1)
        self.assertEqual(self.release("ubuntu/noble")["title"], "noble")
        self.clock.advance(1)
        self.assertEqual(self.release("ubuntu/noble")["title"], "24.04 LTS")

    def test_while_no_rack_can_be_asked_what_they_hold_is_looked_at_once(self) -> None:
        link = self.hold(image(NOBLE), image(FOCAL))
        link.description = Failed("UnknownCommand", "there is no DescribeRelease here")
        looked: list[Any] = []
        look = describing._shapes

        def counted(*what: Any) -> Any:
            looked.append(what)
            return look(*what)

        self.patch(describing, "_shapes", counted)
        for _ in range(3):
            self.assertEqual(self.release("ubuntu/noble")["title"], "noble")
        self.assertEqual(len(looked), 1)

    def test_a_rack_whose_link_was_lost_for_a_moment_is_asked_as_soon_as_it_is_back(self) -> None:
        link = self.hold(image(NOBLE))
        releases = self.parts.releases
        answers = self.successResultOf(Deferred.fromCoroutine(releases.answers(Question())))
        lost = self.racks.links.pop("aaaaaa")
        found = [self.successResultOf(Deferred.fromCoroutine(releases.described(answers)))]
        self.racks.links["aaaaaa"] = lost
        found.append(self.successResultOf(Deferred.fromCoroutine(releases.described(answers))))
        self.assertEqual([[release for release, _ in each.known] for each in found], [[], [("ubuntu", "noble")]])
        self.assertEqual(link.described, [("ubuntu", "noble")])

    def test_a_rack_with_other_software_is_asked_anew_also_when_another_ask_is_under_way(self) -> None:
        link = self.hold(image(NOBLE))
        link.description = {"title": "old"}
        self.assertEqual(self.release("ubuntu/noble")["title"], "old")
        link.description = {"title": "new"}
        self.assertEqual(self.release("ubuntu/noble")["title"], "old")
        self.describer.forget()
        self.assertEqual(self.release("ubuntu/noble")["title"], "new")
        self.describer.forget()
        link.slow = []
        early = self.connect()
        early.send("GET", "releases/")
        self.describer.forget()
        link.slow.pop().callback(None)
        self.assertEqual(early.response().status, 200)
        link.slow, link.description = None, {"title": "newer"}
        self.assertEqual(self.release("ubuntu/noble")["title"], "newer")

    def test_a_rack_that_could_not_describe_is_asked_at_once_when_it_has_other_software(self) -> None:
        link = self.hold(image(NOBLE))
        link.description = Failed("UnknownCommand", "there is no DescribeRelease here")
        self.assertEqual(self.release("ubuntu/noble")["title"], "noble")
        link.description = {}
        self.describer.forget()
        self.assertEqual(self.release("ubuntu/noble")["title"], "24.04 LTS")

    def test_clients_that_ask_together_cost_one_ask_and_all_get_the_answer(self) -> None:
        link = self.hold(image(NOBLE))
        link.slow = []
        connections = [self.connect() for _ in range(5)]
        for connection in connections:
            connection.send("GET", "releases/")
        self.assertEqual((len(link.slow), connections[0].is_answered), (1, False))
        link.slow[0].callback(None)
        self.assertEqual({connection.response().json["releases"][0]["title"] for connection in connections},
                         {"24.04 LTS"})  # fmt: skip
        self.assertEqual(len(link.described), 1)

    def test_hundreds_of_clients_that_wait_for_one_ask_all_get_the_answer(self) -> None:
        link = self.hold(image(NOBLE))
        link.slow = []
        connections = [self.connect() for _ in range(300)]
        for connection in connections:
            connection.send("GET", "releases/")
        link.slow[0].callback(None)
        self.assertEqual({connection.response().status for connection in connections}, {200})
        self.assertEqual(len(link.described), 1)

    def test_a_client_that_hangs_up_does_not_keep_others_from_the_answer(self) -> None:
        link = self.hold(image(NOBLE))
        link.slow = []
        first, second = self.connect(), self.connect()
        first.send("GET", "releases/ubuntu/noble/")
        second.send("GET", "releases/ubuntu/noble/")
        first.hang_up()
        link.slow[-1].callback(None)
        self.assertEqual(second.response().json["title"], "24.04 LTS")

    def test_words_that_are_no_description_are_logged_and_left_out(self) -> None:
        link = self.hold(image(NOBLE))
        link.description = {"uses": [{"arch": "amd64"}]}
        logs = Logs(self, "region.answers.describing")
        self.assertEqual(self.release("ubuntu/noble")["title"], "noble")
        [text] = logs.texts
        self.assertIn("Rack aaaaaa described ubuntu/noble badly: 'uses' is not what it must be", text)

    def test_a_title_that_nobody_could_read_is_not_shown_to_everybody(self) -> None:
        said: dict[str, Any] = {"requires_license_key": False, "uses": []}
        self.assertEqual(Described.read(said | {"title": "T" * 60_000}).title, "T" * 255)
        self.assertEqual(Described.read(said | {"title": "\x1b[31mred"}).title, "")

    def test_uses_of_any_other_shape_are_no_description(self) -> None:
        use = {"arch": "a", "subarch": "", "kflavor": "", "label": "s", "version": "1", "purposes": ["install"]}
        good = {"title": "", "requires_license_key": False, "uses": [use]}
        self.assertEqual(Described.read(good).uses("a"), ["install"])
        self.assertIsNone(Described.read(good).uses("b"))
        bads: list[Any] = [None, 7, {"x": 1}, [None], [[]], [{}], [use | {"arch": 1}], [use | {"purposes": None}],
                           [use | {"purposes": [1]}], [use | {"purposes": ["x" * 129]}],
                           [use | {"arch": "\0"}]]  # fmt: skip
        for bad in bads:
            self.assertRaises(BadDescription, Described.read, good | {"uses": bad})
