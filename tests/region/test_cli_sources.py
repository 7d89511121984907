"""The commands that change what is imported, and import: half a source is never left, and the status tells."""

from __future__ import annotations

import argparse
import base64
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from region.cli import imports, progress
from region.cli.api import Selection, parse_selection, update_source
from region.cli.sources import _one
from rpc.client import Client, Unreachable
from rpc.profile import Profile
from tests.region.test_cli_answers import CommandCase
from tests.rpc.region_server import Told

ANY = {"arches": ["*"], "subarches": ["*"], "labels": ["*"]}
SOURCE = {"id": 1, "url": "http://s/", "keyring_filename": "", "allow_unsigned": True, "priority": 1}
names = st.text("abcdefghijklmnopqrstuvwxyz0123456789.-", min_size=1, max_size=8)


class TestSelections(SynchronousTestCase):
    def test_what_is_typed_is_what_is_selected(self):
        for text, wanted in [
            ("*", Selection()),
            ("ubuntu", Selection("ubuntu")),
            ("ubuntu/noble", Selection("ubuntu", "noble")),
            ("ubuntu/noble:amd64,arm64", Selection("ubuntu", "noble", ("amd64", "arm64"))),
            ("*:amd64", Selection("*", "*", ("amd64",))),
            ("grub/", Selection("grub", "")),
        ]:
            with self.subTest(text):
                self.assertEqual(parse_selection(text), wanted)

    def test_what_is_none_is_refused(self):
        for text in ("", "/", "/noble", "a/b/c", "a:b:c", "a/b:"):
            with self.subTest(text):
                self.assertRaises(argparse.ArgumentTypeError, parse_selection, text)

    @settings(deadline=None)
    @given(st.just("*") | names, st.just("*") | names, st.just(["*"]) | st.lists(names, min_size=1, max_size=3))
    def test_a_selection_is_shown_as_it_would_be_typed(self, os, release, arches):
        shown = _one({"os": os, "release": release, "subarches": ["*"], "labels": ["*"], "arches": arches})
        self.assertEqual(parse_selection(shown), Selection(os, release, tuple(arches)))


class TestSources(CommandCase):
    def test_a_source_is_added_with_its_selections(self):
        self.region.answers["POST", "boot-sources/"] = Told(SOURCE, 201)
        self.region.answers["POST", "boot-sources/1/selections/"] = Told({}, 201)
        status, output, _ = self.stanchion(
            "sources", "add", "http://s/", "--allow-unsigned", "--select", "ubuntu/noble:amd64", "--select", "centos"
        )
        self.assertEqual(
            (status, output), (0, "source 1 is added; `stanchion import` imports now, and shows how it goes\n")
        )
        self.assertEqual(
            self.region.seen[0].form, {"url": ["http://s/"], "priority": ["1"], "allow_unsigned": ["true"]}
        )
        self.assertEqual(self.region.seen[1].form["arches"], ["amd64"])
        self.assertEqual(self.region.seen[2].form["os"], ["centos"])

    def test_a_source_whose_selection_is_refused_is_removed_again(self):
        self.region.answers["POST", "boot-sources/"] = Told(SOURCE, 201)
        self.region.answers["POST", "boot-sources/1/selections/"] = Told({"os": ["bad."]}, 400)
        self.region.answers["DELETE", "boot-sources/1/"] = Told("", 204)
        status, _, errors = self.stanchion("sources", "add", "http://s/", "--allow-unsigned")
        self.assertEqual(status, 2)
        self.assertIn("os: bad", errors)
        self.assertEqual(self.region.seen[-1].method, "DELETE")

    def test_a_source_that_there_is_gets_the_trust_and_exactly_the_selections_that_are_named(self):
        path = "boot-sources/1/selections/"
        self.region.answers["PUT", "boot-sources/1/"] = SOURCE
        self.region.answers["GET", path] = [
            {"id": number, "os": "ubuntu", "release": release, **ANY}
            for number, release in ((5, "jammy"), (6, "noble"))
        ]
        self.region.answers["PUT", f"{path}6/"] = {}
        self.region.answers["POST", path] = Told({}, 201)
        self.region.answers["DELETE", f"{path}5/"] = Told("", 204)
        client = Client(Profile(self.region.url, "a:b:c"))
        update_source(client, 1, {"keyring_data": "QQ=="}, [Selection("ubuntu", "noble"), Selection("centos")])
        self.assertEqual(self.region.seen[0].form, {"keyring_data": ["QQ=="]})
        self.assertEqual(
            [(seen.method, seen.path) for seen in self.region.seen[1:]],
            [("GET", path), ("PUT", f"{path}6/"), ("POST", path), ("DELETE", f"{path}5/")],
        )

    def test_a_source_keeps_its_selections_where_none_are_named(self):
        self.region.answers["PUT", "boot-sources/1/"] = SOURCE
        update_source(Client(Profile(self.region.url, "a:b:c")), 1, {"allow_unsigned": "true"}, [])
        self.assertEqual([seen.method for seen in self.region.seen], ["PUT"])

    def test_the_keyring_itself_is_sent(self):
        keyring = Path(self.mktemp())
        keyring.write_bytes(b"\x99\x01keys")
        self.region.answers["POST", "boot-sources/"] = Told(SOURCE, 201)
        self.region.answers["POST", "boot-sources/1/selections/"] = Told({}, 201)
        self.assertEqual(self.stanchion("sources", "add", "http://s/", "--keyring", str(keyring))[0], 0)
        self.assertEqual(base64.b64decode(self.region.seen[0].form["keyring_data"][0]), b"\x99\x01keys")

    def test_how_a_source_is_trusted_must_be_said(self):
        for options in ((), ("--keyring", "/nowhere/keys.gpg"), ("--keyring", "/dev/null", "--allow-unsigned")):
            with self.subTest(options):
                self.assertEqual(self.stanchion("sources", "add", "http://s/", *options)[0], 2)
        self.assertEqual(self.region.seen, [])

    def test_a_directory_is_a_source(self):
        directory = Path(self.mktemp()).absolute()
        directory.mkdir()
        self.region.answers["POST", "boot-sources/"] = Told(SOURCE, 201)
        self.region.answers["POST", "boot-sources/1/selections/"] = Told({}, 201)
        self.stanchion("sources", "add", str(directory), "--allow-unsigned")
        self.assertEqual(self.region.seen[0].form["url"], [f"file://{directory}/"])
        self.assertEqual(self.stanchion("sources", "add", "/nowhere/at/all", "--allow-unsigned")[0], 2)

    def test_sources_are_shown_with_what_they_select(self):
        self.region.answers["GET", "boot-sources/"] = [SOURCE]
        self.region.answers["GET", "boot-sources/1/selections/"] = [
            {"id": 5, "os": "ubuntu", "release": "noble", **ANY, "arches": ["amd64"]},
            {"id": 6, "os": "*", "release": "*", **ANY},
        ]
        row = self.stanchion("sources")[1].splitlines()[1]
        self.assertEqual(row.split(), ["1", "http://s/", "1", "unsigned", "ubuntu/noble:amd64", "*"])

    def test_a_selection_is_changed_where_there_is_one_and_made_where_there_is_none(self):
        self.region.answers["GET", "boot-sources/1/selections/"] = [
            {"id": 5, "os": "ubuntu", "release": "noble", **ANY}
        ]
        self.region.answers["PUT", "boot-sources/1/selections/5/"] = {}
        self.region.answers["POST", "boot-sources/1/selections/"] = Told({}, 201)
        self.assertEqual(self.stanchion("sources", "select", "1", "ubuntu/noble:amd64")[0], 0)
        self.assertEqual(self.stanchion("sources", "select", "1", "ubuntu/jammy")[0], 0)
        self.assertEqual([seen.method for seen in self.region.seen], ["GET", "PUT", "GET", "POST"])

    def test_a_selection_that_is_not_there_cannot_be_removed(self):
        self.region.answers["GET", "boot-sources/1/selections/"] = []
        self.assertEqual(self.stanchion("sources", "unselect", "1", "ubuntu/noble")[0], 1)


JOB = {
    "id": 12, "state": "done", "trigger": "request", "requested": "noon", "started": "noon", "ended": "one",
    "bytes_done": 5, "bytes_total": 5, "files_done": 1, "files_total": 1, "fetching": "", "generation": 3,
    "outcome": "published generation 3", "problems": [],
}  # fmt: skip
BEGUN = Told("Import of boot resources started", 200, {"Location": "/MAAS/api/2.0/import-jobs/12/"})


class TestImport(CommandCase):
    def setUp(self):
        super().setUp()
        self.region.answers["POST", "boot-resources/"] = BEGUN

    def test_the_status_tells_whether_everything_is_there(self):
        error = {
            "severity": "error",
            "source": "s",
            "product": "p",
            "version": "v",
            "file": "f",
            "reason": "bad sha256",
        }
        for job, expected in [
            (JOB, 0),
            (JOB | {"problems": [error]}, 1),
            (JOB | {"problems": [error | {"severity": "warning"}]}, 0),
            (JOB | {"state": "failed", "outcome": "no space left"}, 1),
            (JOB | {"state": "cancelled"}, 1),
        ]:
            with self.subTest(job["state"]):
                self.region.answers["GET", "import-jobs/12/"] = job
                self.assertEqual(self.stanchion("import")[0], expected)

    def test_what_went_wrong_is_said_with_product_file_and_reason(self):
        error = {
            "severity": "error",
            "source": "s",
            "product": "p",
            "version": "v",
            "file": "f",
            "reason": "bad sha256",
        }
        self.region.answers["GET", "import-jobs/12/"] = JOB | {"problems": [error]}
        self.assertIn("error: p v f: bad sha256", self.stanchion("import")[1])

    def test_without_waiting_only_the_id_is_said(self):
        self.region.answers["GET", "import-jobs/12/"] = JOB | {"state": "queued"}
        self.assertEqual(self.stanchion("import", "--no-wait")[:2], (0, "import 12 is queued\n"))

    def test_an_import_that_runs_is_followed_without_asking_for_another(self):
        self.region.answers["GET", "import-jobs/12/"] = JOB
        self.assertEqual(self.stanchion("import", "--follow", "12")[0], 0)
        self.assertEqual([seen.method for seen in self.region.seen], ["GET"])

    def test_the_document_at_the_end_is_for_programs(self):
        self.region.answers["GET", "import-jobs/12/"] = JOB
        self.assertIn('"outcome": "published generation 3"', self.stanchion("import", "--json")[1])

    def test_an_answer_that_does_not_say_which_import_began_is_an_error(self):
        self.region.answers["POST", "boot-resources/"] = "Import of boot resources started"
        self.assertEqual(self.stanchion("import")[0], 3)

    def test_what_does_not_run_is_not_said_to_be_stopped(self):
        self.region.answers["GET", "boot-resources/"] = (False, True)
        self.region.answers["POST", "boot-resources/"] = "Import of boot resources is being stopped"
        self.assertEqual(self.stanchion("import", "--stop")[:2], (0, "no import is running, and none is queued\n"))
        self.assertEqual(self.stanchion("import", "--stop")[:2], (0, "Import of boot resources is being stopped\n"))

    def test_the_last_imports_are_listed(self):
        self.region.answers["GET", "import-jobs/"] = [JOB, JOB | {"id": 11, "state": "failed", "outcome": "no space"}]
        lines = self.stanchion("import", "--list")[1].splitlines()
        self.assertEqual(len(lines), 3)
        self.assertIn("no space", lines[2])

    def test_it_is_followed_until_its_end(self):
        self.region.answers["GET", "import-jobs/12/"] = (
            JOB | {"state": "queued"}, JOB | {"state": "fetching"}, JOB,
        )  # fmt: skip
        shown: list[str] = []
        job = imports.follow(
            Client(Profile(self.region.url, "a:b:c")), 12, lambda job: shown.append(job["state"]), lambda seconds: None
        )
        self.assertEqual(shown, ["queued", "fetching", "done"])
        self.assertTrue(progress.ended(job))


class TestFollowingARegionThatIsAway(SynchronousTestCase):
    def test_it_is_waited_for_but_not_for_ever(self):
        class Away:
            asked = 0

            def get(self, path: str) -> object:
                self.asked += 1
                if self.asked == 3:
                    return JOB
                raise Unreachable("http://r", "the connection is refused")

        away = Away()
        pauses: list[float] = []
        job = imports.follow(away, 12, lambda job: None, pauses.append)  # type: ignore[arg-type]  # it has what is used
        self.assertEqual((job, pauses), (JOB, [1.0, 1.0]))
        away.asked = 3
        self.assertRaises(Unreachable, imports.follow, away, 12, lambda job: None, pauses.append)
        self.assertEqual(away.asked, 3 + imports.PATIENCE)
