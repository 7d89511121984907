"""The releases as API clients see them: DESIGN's table, with its statuses and bodies, over racks that are asked."""

from __future__ import annotations

from typing import Any, cast

from attrs import evolve
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from region.answers import releases
from region.answers.asking import Asker
from region.answers.combine import Catalogue, Target
from region.answers.describing import Describer, Descriptions
from region.answers.licensing import Validator
from region.answers.published import PublishedView
from region.answers.releases import Question, Releases
from region.api import Api, Authenticator
from region.api.routes import OPERATIONS
from region.database import DatabaseUnavailable
from rpc.commands import ListImages
from rpc.manifest import Manifest
from rpc.outcomes import Failed, Outcome, TimedOut
from tests.region.api_parts import parts_of
from tests.region.fakes import EPOCH, Generations, Keys, LicenseKeys, Link, Racks, Records, ask_each
from tests.region.inventories import BOOKWORM, FOCAL, NOBLE, NOBLE_ARM, catalogue, image, loader
from tests.region.web import Connection, Response, form


class ReleasesTestCase(SynchronousTestCase):
    """An API over fake racks and generations."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.advance(EPOCH)
        self.racks = Racks()
        self.generations = Generations()
        self.records = Records(self.generations)
        view = PublishedView(cast(Any, self.generations))
        self.describer = Describer(self.racks, self.clock, ask_all=ask_each)
        asker = Asker(self.racks, self.clock, published=view.catalogue, expected=view.current_digest, ask_all=ask_each)
        self.parts = parts_of(
            releases=Releases(asker, view, self.clock, self.records, self.describer),
            asker=asker,
            published=view,
            racks=self.racks,
            connections=self.racks.connections,
            syncs=self.racks,
            generations=cast(Any, self.generations),
            license_keys=LicenseKeys(),
            validator=Validator(self.racks, ask_all=ask_each),
        )
        api = Api(self.parts, Authenticator(Keys(), self.clock))
        self.resource = api.resource()

    def connect(self) -> Connection:
        return Connection(self.resource, self.clock)

    def ask(self, method: str, path: str, **keywords: Any) -> Response:
        connection = self.connect()
        connection.send(method, path, **keywords)
        return connection.response(method)

    def get(self, path: str, **keywords: Any) -> Response:
        return self.ask("GET", path, **keywords)

    def publish(self, *targets: Target, version: str = "20260101") -> Catalogue:
        published = catalogue(targets, version)
        self.generations.publish(published.manifest)
        return published


class Why(ReleasesTestCase):
    """``releases/{os}/{release}/``: the status is the answer, the body says why."""

    def test_a_release_that_a_rack_holds_is_200(self) -> None:
        self.racks.add("aaaaaa", self.publish(NOBLE))
        response = self.get("releases/ubuntu/noble/")
        self.assertEqual((response.status, response.headers["Retry-After"]), (200, None))
        document = response.json
        self.assertEqual((document["state"], document["reason"]), ("deployable", "The rack holds it."))
        self.assertEqual(document["generation"]["number"], 1)
        (row,) = document["architectures"][0]["racks"]
        self.assertEqual((row["name"], row["holds"], row["versions"]), ("rack-aaaaaa", True, ["20260101"]))

    def test_an_arriving_release_is_409_and_says_which_racks_are_behind_and_how_far(self) -> None:
        old = self.publish(FOCAL)
        self.publish(FOCAL, version="20260102")
        self.publish(FOCAL, NOBLE)
        self.racks.add("aaaaaa", old, 1, "syncing")
        response = self.get("releases/ubuntu/noble/")
        self.assertEqual((response.status, response.headers["Retry-After"]), (409, "30"))
        self.assertEqual(response.json["state"], "arriving")
        (row,) = response.json["architectures"][0]["racks"]
        self.assertEqual((row["holds"], row["generation"], row["behind"], row["state"]), (False, 1, 2, "syncing"))
        self.assertEqual(response.json["architectures"][0]["racks_behind"], ["aaaaaa"])

    def test_an_undetermined_release_is_503_and_says_which_racks_since_when_and_why(self) -> None:
        link = self.racks.add("aaaaaa", self.publish(NOBLE))
        del self.racks.links["aaaaaa"]
        self.racks.ended["aaaaaa"] = EPOCH - 60
        response = self.get("releases/ubuntu/noble/?arch=amd64")
        self.assertEqual((response.status, response.headers["Retry-After"]), (503, "10"))
        (row,) = response.json["architectures"][0]["racks"]
        self.assertEqual((row["outcome"], row["holds"], row["since"]), ("not-connected", None, "2026-05-28T20:25:40Z"))
        self.assertIn("rack-aaaaaa may hold it, but it is not connected since 2026-05-28", response.json["reason"])
        self.racks.links["aaaaaa"] = link
        link.outcome = TimedOut(2.0)
        (row,) = self.get("releases/ubuntu/noble/").json["architectures"][0]["racks"]
        self.assertEqual((row["outcome"], row["reason"][:33]), ("timed-out", "it did not answer within 2 s (sil"))
        link.outcome = Failed("Unhandled", "reference 42")
        (row,) = self.get("releases/ubuntu/noble/").json["architectures"][0]["racks"]
        self.assertEqual(row["outcome"], "failed")
        self.assertIn("Unhandled: reference 42", row["reason"])

    def test_an_unknown_release_is_400_with_exactly_the_body_that_clients_know(self) -> None:
        self.racks.add("aaaaaa", self.publish(NOBLE, FOCAL))
        response = self.get("releases/x/")
        self.assertEqual((response.status, response.headers["Content-Type"]), (400, "application/json; charset=utf-8"))
        self.assertEqual(
            response.text,
            '{"distro_series": ["\'x\' is not a valid distro_series.  '
            "It should be one of: 'ubuntu/focal', 'ubuntu/noble'.\"]}",
        )
        self.assertIn("'ubuntu/x' is not a valid", self.get("releases/ubuntu/x/").text)
        self.assertIn("'ubuntu/x' is not a valid", self.get("releases/ubuntu%2Fx/").text)

    def test_boot_loaders_are_no_release_that_one_could_choose(self) -> None:
        images = Manifest([image(NOBLE), loader()])
        self.generations.publish(images)
        self.racks.add("aaaaaa", Catalogue(images)).outcome = TimedOut(2.0)
        self.assertEqual([entry["name"] for entry in self.get("releases/").json["releases"]], ["ubuntu/noble"])
        self.assertIn("should be one of: 'ubuntu/noble'.", self.get("releases/x/").text)

    def test_a_release_that_a_silent_rack_may_hold_is_never_400(self) -> None:
        self.publish(FOCAL)
        self.publish(NOBLE)
        self.racks.add("aaaaaa", catalogue([FOCAL]), 1).outcome = TimedOut(2.0)
        self.assertEqual(self.get("releases/ubuntu/focal/").status, 503)
        self.assertEqual(self.get("releases/ubuntu/trusty/").status, 400)

    def test_without_racks_or_before_anything_is_published_it_is_503_saying_which(self) -> None:
        response = self.get("releases/ubuntu/noble/")
        self.assertEqual((response.status, response.headers["Retry-After"]), (503, "60"))
        self.assertIn("No rack is enrolled", response.json["reason"])
        self.racks.add("aaaaaa", catalogue([]), -1, "empty")
        response = self.get("releases/ubuntu/noble/")
        self.assertEqual(response.status, 503)
        self.assertIn("No images have been published yet", response.json["reason"])
        self.generations.publish(Manifest([loader()]))
        response = self.get("releases/ubuntu/noble/")
        self.assertEqual(response.status, 503)
        self.assertIn("Generation 1 lists no release", response.json["reason"])

    def test_a_bare_name_is_accepted_where_it_is_unambiguous(self) -> None:
        self.racks.add("aaaaaa", self.publish(NOBLE, BOOKWORM, Target("centos", "bookworm", "amd64"),
                                                Target("custom", "noble", "amd64")))  # fmt: skip
        self.assertEqual(self.get("releases/noble/").json["name"], "ubuntu/noble")
        response = self.get("releases/bookworm/")
        self.assertEqual(
            (response.status, response.json),
            (400, {"distro_series": ["'bookworm' is not a valid distro_series.  It should be one of: "
                                     "'centos/bookworm', 'debian/bookworm'."]}),
        )  # fmt: skip

    def test_one_architecture_can_be_asked_about(self) -> None:
        self.publish(NOBLE, NOBLE_ARM, FOCAL)
        self.racks.add("aaaaaa", catalogue([NOBLE, FOCAL]))
        self.assertEqual(self.get("releases/ubuntu/noble/?arch=amd64/generic").status, 200)
        self.assertEqual(self.get("releases/ubuntu/noble/?arch=arm64").status, 409)
        self.assertEqual(self.get("releases/ubuntu/noble/").status, 200)
        response = self.get("releases/ubuntu/focal/?arch=arm64")
        self.assertEqual((response.status, response.json["distro_series"][0][-35:]),
                         (400, " It should be one of: 'ubuntu/noble'."[-35:]))  # fmt: skip
        response = self.get("releases/ubuntu/focal/?arch=riscv64")
        self.assertEqual(
            (response.status, response.json),
            (400, {"architecture": ["'riscv64' is not a valid architecture.  It should be one of: 'amd64', 'arm64'."]}),
        )

    def test_the_racks_that_must_serve_can_be_named(self) -> None:
        held = self.publish(NOBLE)
        self.racks.add("aaaaaa", held)
        self.racks.add("bbbbbb", catalogue([FOCAL]))
        self.assertEqual(self.get("releases/noble/?rack=bbbbbb").status, 409)
        self.assertEqual(self.get("releases/noble/?rack=rack-aaaaaa").status, 200)
        self.assertEqual(self.get("releases/noble/?rack=aaaaaa&rack=bbbbbb").status, 200)
        self.assertEqual(self.get("releases/noble/?rack=aaaaaa&rack=bbbbbb&policy=all").status, 409)
        self.assertEqual(self.get("releases/noble/?policy=all").status, 409)

    def test_the_racks_that_must_serve_can_be_named_in_one_parameter(self) -> None:
        held = self.publish(NOBLE)
        self.racks.add("aaaaaa", held)
        self.racks.add("bbbbbb", catalogue([FOCAL]))
        self.assertEqual(self.get("releases/noble/?racks=bbbbbb").status, 409)
        self.assertEqual(self.get("releases/noble/?racks=rack-aaaaaa,bbbbbb").status, 200)
        self.assertEqual(self.get("releases/noble/?racks=aaaaaa,%20bbbbbb&policy=all").status, 409)
        self.assertEqual(self.get("releases/noble/?rack=aaaaaa&racks=bbbbbb&policy=all").status, 409)
        self.assertEqual(self.get("releases/noble/?racks=aaaaaa,rack-aaaaaa&policy=all").status, 200)
        for racks in ("", ",", "aaaaaa,,bbbbbb"):
            response = self.get(f"releases/noble/?racks={racks}")
            self.assertEqual((response.status, list(response.json)), (400, ["racks"]))
        response = self.get("releases/noble/?racks=aaaaaa,nobody")
        self.assertEqual(
            (response.status, response.json),
            (400, {"racks": ["'nobody' is not a valid rack.  It should be one of: 'aaaaaa', 'bbbbbb'."]}),
        )

    def test_a_rack_that_joined_while_others_were_being_asked_is_asked_and_not_refused(self) -> None:
        held = self.publish(NOBLE)
        waiting = self.racks.add("aaaaaa", held).pending = Deferred()
        first, second = self.connect(), self.connect()
        first.send("GET", "releases/noble/")
        self.racks.racks = dict(self.racks.racks)  # as the registry does it: a new mapping
        self.racks.add("bbbbbb", held)
        second.send("GET", "releases/noble/?rack=bbbbbb")
        self.racks.links["aaaaaa"].pending = None
        waiting.callback(None)
        self.assertEqual((first.response().status, second.response().status), (200, 200))

    def test_what_is_published_while_the_racks_are_being_asked_is_in_the_answer_that_is_given_then(self) -> None:
        self.generations.publish(catalogue([NOBLE]).manifest)
        answering = self.racks.add("aaaaaa", catalogue([NOBLE]))
        self.racks.add("bbbbbb", catalogue([NOBLE])).outcome = TimedOut(2.0)
        waiting: Deferred[None] = Deferred()
        answering.pending = waiting
        asked = {
            path: self.connect()
            for path in ("releases/", "releases/focal/?rack=aaaaaa", "releases/focal/?rack=bbbbbb", "releases/jammy/")
        }
        for path, connection in asked.items():
            connection.send("GET", path)
        self.publish(NOBLE, FOCAL)
        answering.pending = None
        waiting.callback(None)
        listed, arriving, undetermined, unknown = (connection.response() for connection in asked.values())
        self.assertEqual((listed.status, listed.json["generation"]["number"]), (200, 2))
        self.assertEqual([entry["release"] for entry in listed.json["releases"]], ["focal", "noble"])
        self.assertEqual((arriving.status, arriving.json["state"]), (409, "arriving"), "it was published by then")
        self.assertEqual((undetermined.status, undetermined.json["state"]), (503, "undetermined"))
        self.assertEqual(unknown.status, 400)
        self.assertIn("'ubuntu/focal', 'ubuntu/noble'", unknown.text, "what may be chosen instead is of that time too")

    def test_a_rack_that_was_renamed_while_others_were_being_asked_is_known_by_its_new_name(self) -> None:
        held = self.publish(NOBLE)
        waiting = self.racks.add("aaaaaa", held).pending = Deferred()
        first, second = self.connect(), self.connect()
        first.send("GET", "releases/noble/?rack=rack-aaaaaa")
        self.racks.racks = {"aaaaaa": evolve(self.racks.racks["aaaaaa"], name="left")}
        second.send("GET", "releases/noble/?rack=left")
        self.racks.links["aaaaaa"].pending = None
        waiting.callback(None)
        self.assertEqual((first.response().status, second.response().status), (200, 200))

    def test_a_name_that_no_release_can_have_is_refused_as_the_client_s_mistake(self) -> None:
        self.racks.add("aaaaaa", self.publish(NOBLE))
        for path in ("releases/ubuntu/%F0%9F%8E%89/", "releases/ubuntu/ /"):
            self.assertEqual(self.get(path).status, 400, path)
        for path in ("releases/ubuntu/a%00b/", "releases/a%00b/"):
            self.assertEqual(self.get(path).status, 404, path)

    def test_a_bad_filter_is_400_and_says_what_is_allowed(self) -> None:
        self.racks.add("aaaaaa", self.publish(NOBLE))
        for query, expected in (
            ("arch=a%20b", {"arch": ["'a b' is not an architecture: give one such as 'amd64' or 'amd64/generic'."]}),
            ("arch=amd64/hwe-24.04", {"arch": ["'amd64/hwe-24.04' is not an architecture: give one such as 'amd64' or "
                                               "'amd64/generic'."]}),
            ("rack=nobody", {"rack": ["'nobody' is not a valid rack.  It should be one of: 'aaaaaa'."]}),
            ("policy=most", {"policy": ["'most' is not a valid policy.  It should be one of: 'any', 'all'."]}),
            ("archs=amd64", {"archs": ["GET releases/ has no such parameter; it has arch, rack, racks, policy."]}),
        ):  # fmt: skip
            response = self.get(f"releases/?{query}")
            self.assertEqual((response.status, response.json), (400, expected))
        response = self.get("releases/noble/?kernel=a%20b")
        self.assertEqual(
            (response.status, response.json),
            (400, {"kernel": ["'a b' is not a kernel: give one such as 'hwe-24.04'."]}),
        )

    def test_a_rack_that_is_asked_about_while_none_is_enrolled_is_no_error_of_the_client(self) -> None:
        self.publish(NOBLE)
        response = self.get("releases/noble/?rack=aaaaaa")
        self.assertEqual((response.status, response.json["state"]), (503, "no-racks"))

    def test_under_policy_all_what_cannot_come_to_be_held_is_not_offered(self) -> None:
        self.publish(FOCAL)
        self.racks.add("aaaaaa", catalogue([FOCAL]), 1)
        self.racks.add("bbbbbb", self.publish(NOBLE), 2)
        response = self.get("releases/focal/?policy=all")
        self.assertEqual((response.status, response.json["distro_series"][0][-37:]),
                         (400, "  It should be one of: 'ubuntu/noble'."[-37:]))  # fmt: skip
        self.assertEqual(response.json["distro_series"][1], "rack-aaaaaa still holds it, but generation 2 no longer "
                         "lists it, so rack-bbbbbb cannot come to hold it.")  # fmt: skip
        (focal, _) = self.get("releases/?policy=all").json["releases"]
        self.assertIn("rack-aaaaaa still holds it, but generation 2 no longer lists it", focal["reason"])


class Listing(ReleasesTestCase):
    """``releases/``: all of them, and every rack's outcome."""

    def test_the_list_has_titles_support_windows_states_and_racks(self) -> None:
        images = [
            image(
                NOBLE,
                "2",
                "ga-24.04",
                release_title="24.04 LTS",
                support_eol="2029-05-31",
                support_esm_eol="2034-04-25",
            ),
            image(NOBLE, "2", "hwe-24.04", release_title="24.04 LTS", support_eol="2029-05-31"),
            image(FOCAL, release_title="20.04 LTS", support_eol="2025-05-31", support_esm_eol="2030-04-02"),
            image(BOOKWORM, support_eol="soon"),
            loader(),
        ]
        self.generations.publish(Manifest(images))
        self.racks.add("aaaaaa", Catalogue(Manifest(images)))
        self.racks.add("bbbbbb", catalogue([])).outcome = TimedOut(2.0)
        document = self.get("releases/").json
        bookworm, focal, noble = document["releases"]
        self.assertEqual((bookworm["name"], bookworm["title"]), ("debian/bookworm", "Debian 12"))
        self.assertEqual(bookworm["support"], {"state": "unknown", "eol": None, "esm_eol": None})
        self.assertEqual(focal["support"], {"state": "extended", "eol": "2025-05-31", "esm_eol": "2030-04-02"})
        self.assertEqual(
            (noble["title"], noble["support"]["state"], noble["state"]), ("24.04 LTS", "supported", "deployable")
        )
        (architecture,) = noble["architectures"]
        self.assertEqual(architecture["subarches"], ["ga-24.04", "hwe-24.04"])
        self.assertEqual(
            (architecture["size"], architecture["version"], architecture["racks"]), (6000, "2", ["aaaaaa"])
        )
        self.assertEqual([rack["outcome"] for rack in document["racks"]], ["answered", "timed-out"])
        self.assertEqual(document["racks"][0]["in_step"], True)

    def test_a_release_whose_support_has_ended_is_still_listed(self) -> None:
        images = Manifest([image(FOCAL, support_eol="2025-05-31")])
        self.generations.publish(images)
        self.racks.add("aaaaaa", Catalogue(images))
        (focal,) = self.get("releases/").json["releases"]
        self.assertEqual((focal["support"]["state"], focal["state"]), ("ended", "deployable"))

    def test_the_list_can_be_narrowed_to_an_architecture(self) -> None:
        self.racks.add("aaaaaa", self.publish(NOBLE, NOBLE_ARM, FOCAL))
        names = [release["name"] for release in self.get("releases/?arch=arm64").json["releases"]]
        self.assertEqual(names, ["ubuntu/noble"])

    def test_without_racks_what_is_published_is_listed_with_the_reason(self) -> None:
        self.publish(NOBLE)
        response = self.get("releases/")
        self.assertEqual((response.status, response.json["releases"][0]["state"]), (200, "no-racks"))
        self.assertIn("No rack is enrolled", response.json["reason"])

    def test_an_empty_list_is_never_given_as_a_good_answer(self) -> None:
        response = self.get("releases/")
        self.assertEqual((response.status, response.json["releases"]), (503, []))
        self.racks.add("aaaaaa", catalogue([]), -1, "empty")
        response = self.get("releases/")
        self.assertEqual((response.status, response.headers["Retry-After"]), (503, "60"))
        self.assertIn("No images have been published yet", response.json["reason"])

    def test_a_rack_that_falls_silent_takes_no_release_from_the_list(self) -> None:
        link = self.racks.add("aaaaaa", self.publish(NOBLE, FOCAL))
        before = {release["name"] for release in self.get("releases/").json["releases"]}
        link.outcome = Failed("LinkLost", "gone")
        after = self.get("releases/").json["releases"]
        self.assertEqual({release["name"] for release in after}, before)
        self.assertEqual({release["state"] for release in after}, {"undetermined"})

    def test_what_a_rack_holds_of_an_older_generation_is_described_by_the_rack(self) -> None:
        older = Manifest([image(FOCAL, release_title="20.04 LTS")])
        self.generations.publish(older)
        self.publish(NOBLE)
        self.racks.add("aaaaaa", Catalogue(older))
        focal = self.get("releases/").json["releases"][0]
        self.assertEqual((focal["title"], focal["state"]), ("20.04 LTS", "deployable"))

    def test_equal_rounds_are_written_down_once(self) -> None:
        self.racks.add("aaaaaa", self.publish(NOBLE))
        self.get("releases/")
        first = self.successResultOf(self._listing())
        self.assertIs(self.successResultOf(self._listing()), first)
        self.publish(NOBLE, FOCAL)
        self.assertIsNot(self.successResultOf(self._listing()), first)

    def _listing(self) -> Any:
        async def listing() -> bytes:
            answers = await self.parts.releases.answers(Question())
            return self.parts.releases.listing(answers, None, Descriptions())

        return Deferred.fromCoroutine(listing())

    def test_what_is_remembered_is_bounded(self) -> None:
        self.patch(releases, "REMEMBERED_BYTES", 1)
        self.setUp()
        self.racks.add("aaaaaa", self.publish(NOBLE))
        first = self.successResultOf(self._listing())
        second = self.successResultOf(self._listing())
        self.assertIsNot(first, second)
        self.assertEqual(first, second)

    def test_support_ends_with_the_day_and_not_with_the_process(self) -> None:
        images = Manifest([image(FOCAL, support_eol="2026-05-28")])
        self.generations.publish(images)
        self.racks.add("aaaaaa", Catalogue(images))
        states = [self.get("releases/").json["releases"][0]["support"]["state"]]
        self.clock.advance(86400)
        states.append(self.get("releases/").json["releases"][0]["support"]["state"])
        self.assertEqual(states, ["supported", "ended"])

    def test_clients_that_ask_together_cost_one_round(self) -> None:
        link = self.racks.add("aaaaaa", self.publish(NOBLE))
        link.pending = Deferred()
        connections = [self.connect() for _ in range(64)]
        for number, connection in enumerate(connections):
            connection.send("GET", "releases/" if number % 2 else "releases/noble/")
        link.pending.callback(None)
        self.assertEqual({connection.response().status for connection in connections}, {200})
        self.assertEqual(link.asks, 1)

    def test_already_the_first_client_has_no_rack_send_a_list_that_the_region_has_itself(self) -> None:
        published = self.publish(NOBLE)
        self.racks.add("aaaaaa", published)
        known: list[str] = []
        ask = Link.ask

        async def noting(link: Link, command: object, **arguments: Any) -> Outcome[Any]:
            if command is ListImages:
                known.append(arguments["known_digest"])
            return await ask(link, command, **arguments)

        self.patch(Link, "ask", noting)
        self.assertEqual(self.get("releases/noble/").status, 200)
        self.assertEqual(known, [published.digest])

    def test_a_database_that_is_away_is_503_and_not_an_empty_list(self) -> None:
        async def current() -> None:
            raise DatabaseUnavailable("cannot connect to database x: refused")

        self.generations.current = current  # type: ignore[method-assign]  # it is away
        response = self.get("releases/")
        self.assertEqual((response.status, response.headers["Retry-After"]), (503, "5"))


class RackControllers(ReleasesTestCase):
    """``rackcontrollers/``."""

    def test_racks_are_listed_by_name_with_their_state(self) -> None:
        self.publish(FOCAL)
        held = self.publish(NOBLE)
        self.racks.add("bbbbbb", held, 2)
        self.racks.add("aaaaaa", catalogue([FOCAL]), 1)
        del self.racks.links["aaaaaa"]
        self.racks.ended["aaaaaa"] = EPOCH
        one, two = self.get("rackcontrollers/").json
        self.assertEqual((one["hostname"], one["connected"], one["behind"]), ("rack-aaaaaa", False, 1))
        self.assertEqual(one["service_set"][0]["status_info"], "not connected since 2026-05-28T20:26:40Z")
        self.assertEqual((two["connected"], two["behind"], two["service_set"][0]["status"]), (True, 0, "running"))

    def test_a_rack_is_found_by_id_and_by_name(self) -> None:
        self.racks.add("aaaaaa", catalogue([NOBLE]))
        for name in ("aaaaaa", "rack-aaaaaa"):
            self.assertEqual(self.get(f"rackcontrollers/{name}/").json["system_id"], "aaaaaa")
        response = self.get("rackcontrollers/zzz/")
        self.assertEqual(
            (response.status, response.text), (404, "There is no rack 'zzz': no rack has that system id or name.")
        )

    def test_what_a_rack_holds_is_asked_of_it(self) -> None:
        self.racks.add("aaaaaa", self.publish(NOBLE))
        document = self.get("rackcontrollers/aaaaaa/?op=list_boot_images").json
        self.assertEqual((document["connected"], document["status"]), (True, "synced"))
        (found,) = document["images"]
        self.assertEqual((found["name"], found["architecture"]), ("ubuntu/noble", "amd64"))

    def test_a_rack_that_does_not_answer_is_said_to_be_unknown_and_not_empty(self) -> None:
        link = self.racks.add("aaaaaa", self.publish(NOBLE))
        link.outcome = TimedOut(2.0)
        document = self.get("rackcontrollers/aaaaaa/?op=list_boot_images").json
        self.assertEqual(
            (document["connected"], document["status"], document["outcome"]), (True, "unknown", "timed-out")
        )
        del self.racks.links["aaaaaa"]
        document = self.get("rackcontrollers/aaaaaa/?op=list_boot_images").json
        self.assertEqual((document["connected"], document["outcome"]), (False, "not-connected"))

    def test_a_rack_that_is_behind_is_out_of_sync_or_syncing(self) -> None:
        self.publish(NOBLE)
        link = self.racks.add("aaaaaa", catalogue([FOCAL]))
        status = [self.get("rackcontrollers/aaaaaa/?op=list_boot_images").json["status"]]
        link.state = "syncing"
        status.append(self.get("rackcontrollers/aaaaaa/?op=list_boot_images").json["status"])
        self.assertEqual(status, ["out-of-sync", "syncing"])

    def test_racks_can_be_told_to_fetch(self) -> None:
        self.racks.add("aaaaaa", self.publish(NOBLE))
        self.racks.add("bbbbbb", catalogue([]))
        response = self.ask("POST", "rackcontrollers/?op=import_boot_images")
        self.assertEqual((response.status, self.racks.told), (202, ["aaaaaa", "bbbbbb"]))
        self.assertEqual(response.text, "Import of boot images started on all rack controllers")
        response = self.ask("POST", "rackcontrollers/bbbbbb/?op=import_boot_images")
        self.assertEqual((response.status, response.text), (202, "Import of boot images started on rack-bbbbbb"))

    def test_a_rack_that_cannot_be_told_is_503_saying_why(self) -> None:
        self.racks.add("aaaaaa", catalogue([]))
        response = self.ask("POST", "rackcontrollers/aaaaaa/?op=import_boot_images")
        self.assertEqual((response.status, response.headers["Retry-After"]), (503, "60"))
        self.assertIn("No images have been published yet", response.text)
        self.publish(NOBLE)
        del self.racks.links["aaaaaa"]
        response = self.ask("POST", "rackcontrollers/aaaaaa/?op=import_boot_images")
        self.assertEqual((response.status, response.headers["Retry-After"]), (503, "30"))
        self.assertIn("rack-aaaaaa is not connected", response.text)

    def test_of_all_racks_those_that_could_not_be_told_are_named(self) -> None:
        response = self.ask("POST", "rackcontrollers/?op=import_boot_images")
        self.assertEqual((response.status, response.headers["Retry-After"]), (503, "60"))
        self.assertIn("No images have been published yet", response.text)
        self.publish(NOBLE)
        response = self.ask("POST", "rackcontrollers/?op=import_boot_images")
        self.assertEqual((response.status, response.headers["Retry-After"]), (503, "60"))
        self.assertIn("No rack is enrolled", response.text)
        for system_id in ("aaaaaa", "bbbbbb"):
            self.racks.add(system_id, catalogue([]))
        del self.racks.links["bbbbbb"]
        response = self.ask("POST", "rackcontrollers/?op=import_boot_images")
        self.assertEqual(response.status, 202)
        self.assertIn("1 of 2 rack controllers", response.text)
        self.assertIn("rack-bbbbbb is not connected", response.text)
        del self.racks.links["aaaaaa"]
        response = self.ask("POST", "rackcontrollers/?op=import_boot_images")
        self.assertEqual((response.status, response.headers["Retry-After"]), (503, "30"))
        self.assertIn("rack-aaaaaa and rack-bbbbbb are not connected", response.text)

    def test_a_rack_that_is_forgotten_is_not_waited_for_any_more(self) -> None:
        self.publish(FOCAL)
        self.racks.add("aaaaaa", self.publish(NOBLE), 2)
        self.racks.add("bbbbbb", catalogue([FOCAL]), 1).outcome = TimedOut(2.0)
        self.assertEqual(self.get("releases/focal/").status, 503)
        self.assertEqual(self.ask("DELETE", "rackcontrollers/bbbbbb/").status, 204)
        self.assertEqual(self.get("releases/focal/").status, 400)
        self.assertEqual(self.ask("DELETE", "rackcontrollers/bbbbbb/").status, 404)

    def test_a_rack_that_is_revoked_is_not_waited_for_but_still_listed_until_it_is_forgotten(self) -> None:
        self.publish(FOCAL)
        self.racks.add("aaaaaa", self.publish(NOBLE), 2)
        self.racks.add("bbbbbb", catalogue([FOCAL]), 1).outcome = TimedOut(2.0)
        self.assertEqual(self.get("releases/focal/").status, 503)
        response = self.ask("POST", "rackcontrollers/rack-bbbbbb/?op=revoke")
        self.assertEqual((response.status, response.json["system_id"]), (200, "bbbbbb"))
        self.assertTrue(response.json["revoked"])
        self.assertFalse(response.json["connected"])
        self.assertEqual(self.get("releases/focal/").status, 400)
        self.assertEqual([bool(rack["revoked"]) for rack in self.get("rackcontrollers/").json], [False, True])
        self.assertEqual(self.ask("POST", "rackcontrollers/bbbbbb/?op=revoke").status, 200)
        for method, op in (("GET", "list_boot_images"), ("POST", "import_boot_images")):
            response = self.ask(method, f"rackcontrollers/bbbbbb/?op={op}")
            self.assertEqual(response.status, 409)
            self.assertIn("was revoked", response.text)
        self.assertEqual(self.ask("DELETE", "rackcontrollers/bbbbbb/").status, 204)
        self.assertEqual(len(self.get("rackcontrollers/").json), 1)
        self.assertEqual(self.ask("POST", "rackcontrollers/bbbbbb/?op=revoke").status, 404)

    def test_a_rack_is_renamed(self) -> None:
        self.racks.add("aaaaaa", self.publish(NOBLE))
        response = self.ask("PUT", "rackcontrollers/rack-aaaaaa/", **form(hostname="cellar"))
        self.assertEqual((response.status, response.json["hostname"]), (200, "cellar"))
        response = self.ask("PUT", "rackcontrollers/cellar/", **form(hostname="taken"))
        self.assertEqual((response.status, response.json), (400, {"hostname": ["another rack is named 'taken'"]}))
        self.assertEqual(self.ask("PUT", "rackcontrollers/other/", **form(hostname="x")).status, 404)


class About(ReleasesTestCase):
    """What the API says of itself."""

    def test_the_version_is_anonymous(self) -> None:
        document = self.get("version/", key=False).json
        self.assertEqual((document["version"], document["subversion"]), ("1.2.3", ""))
        self.assertIn("network-deployment-ubuntu", document["capabilities"])

    def test_describe_has_exactly_the_content_type_that_maas_demands_and_absolute_uris(self) -> None:
        response = self.get("describe/", key=False)
        self.assertEqual(response.headers["Content-Type"], "application/json")
        resources = {resource["name"]: resource for resource in response.json["resources"]}
        release = resources["Release"]["auth"]
        self.assertEqual(release["uri"], "http://region.example.com:5240/MAAS/api/2.0/releases/{os}/{release}/")
        self.assertEqual(release["params"], ["os", "release"])
        self.assertIsNone(resources["Version"]["auth"])
        actions = {action["name"]: action for action in resources["BootResources"]["auth"]["actions"]}
        self.assertEqual((actions["import"]["op"], actions["import"]["restful"]), ("import", False))
        self.assertEqual((actions["read"]["op"], actions["read"]["restful"]), (None, True))
        self.assertEqual(response.json["hash"], response.headers["X-MAAS-API-Hash"])

    def test_the_key_s_owner_can_be_asked_for(self) -> None:
        self.assertEqual(self.get("users/?op=whoami").json["username"], "someone")

    def test_the_openapi_document_has_every_operation_and_every_parameter(self) -> None:
        response = self.get("openapi.json", key=False)
        document = response.json
        self.assertEqual((document["openapi"], response.headers["Content-Type"]), ("3.1.0", "application/json"))
        for operation in OPERATIONS:
            described = document["paths"][operation.path][operation.method.lower()]
            self.assertIn(operation.doc, described["description"])
            for status in operation.answers:
                self.assertIn(str(status), described["responses"])
            ops = [one["schema"]["enum"] for one in described.get("parameters", ()) if one["name"] == "op"]
            if operation.op:
                self.assertIn(operation.op, ops[0])
            for parameter in operation.parameters:
                if operation.method == "GET":
                    self.assertIn(parameter.name, [one["name"] for one in described["parameters"]])
                else:
                    content = described["requestBody"]["content"]
                    given = {one["name"] for one in described.get("parameters", ())}
                    if "application/octet-stream" in content:
                        given.add("content")
                    else:
                        given |= set(content["multipart/form-data"]["schema"]["properties"])
                    self.assertIn(parameter.name, given)
            self.assertEqual(described.get("security") == [], operation.anonymous)
        names = [
            one["operationId"]
            for path in document["paths"].values()
            for key, one in path.items()
            if key != "parameters"
        ]
        self.assertEqual(len(set(names)), len(names))
