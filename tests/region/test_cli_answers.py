"""The commands that ask: what people see, what programs get, and an exit status that tells yes, no and not known."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from rpc.cli import main
from tests.rpc.region_server import RegionServer, Told

RACK: dict[str, Any] = {
    "system_id": "abc234", "name": "r1", "outcome": "answered", "reason": "", "since": None, "state": "ready",
    "generation": 3, "behind": 0, "in_step": True, "progress": {},
}  # fmt: skip
SILENT = RACK | {
    "system_id": "xyz234", "name": "r2", "outcome": "not-connected", "reason": "it is not connected since noon",
    "since": "noon", "state": "unknown", "in_step": False, "behind": 1, "generation": 2,
}  # fmt: skip
SUPPORT = {"state": "supported", "eol": "2036-01-01", "esm_eol": None}


def architecture(arch: str, state: str = "deployable") -> dict[str, object]:
    return {
        "arch": arch, "version": "20260101", "size": 340_000_000, "subarches": ["generic"], "labels": ["stable"],
        "state": state, "reason": f"Because of {arch}.", "retry_after": None, "racks": ["abc234"], "racks_behind": [],
        "racks_silent": [],
    }  # fmt: skip


def release(name: str, state: str, *architectures: dict[str, object]) -> dict[str, object]:
    os, _, series = name.partition("/")
    return {
        "os": os, "release": series, "name": name, "title": "A title", "support": SUPPORT, "resource_uri": "/x",
        "state": state, "reason": f"Because {name} is {state}.", "architectures": list(architectures),
    }  # fmt: skip


def listing(
    *releases: dict[str, object], racks: Sequence[object] = (RACK,), number: int | None = 3
) -> dict[str, object]:
    return {
        "generation": None if number is None else {"number": number, "digest": "0" * 64}, "policy": "any",
        "releases": list(releases), "racks": list(racks),
    }  # fmt: skip


class CommandCase(SynchronousTestCase):
    """Runs ``stanchion`` against a pretended region."""

    def setUp(self):
        self.region = RegionServer()
        self.region.start()
        self.addCleanup(self.region.stop)

    def stanchion(self, *argv: str) -> tuple[int, str, str]:
        output, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            status = main([*argv, "--url", self.region.url, "--key", "a:b:c"])
        return status, output.getvalue(), errors.getvalue()


class TestReleases(CommandCase):
    def test_people_see_a_table_with_what_differs_by_architecture(self):
        self.region.answers["GET", "releases/"] = listing(
            release("ubuntu/noble", "deployable", architecture("amd64"), architecture("arm64", "arriving"))
        )
        status, output, _ = self.stanchion("releases")
        self.assertEqual(status, 0)
        self.assertEqual(
            output.splitlines(),
            [
                "RELEASE       TITLE    STATE       ARCHITECTURES            SUPPORT",
                "ubuntu/noble  A title  deployable  amd64, arm64 (arriving)  until 2036-01-01",
            ],
        )

    def test_programs_get_the_document_of_the_api(self):
        document = listing(release("ubuntu/noble", "deployable", architecture("amd64")))
        self.region.answers["GET", "releases/"] = document
        self.assertEqual(json.loads(self.stanchion("releases", "--json")[1]), document)

    def test_the_question_is_passed_on(self):
        self.region.answers["GET", "releases/"] = listing()
        self.stanchion("releases", "--arch", "arm64", "--rack", "r1", "--rack", "r2", "--policy", "all")
        self.assertEqual(self.region.seen[0].query, {"arch": ["arm64"], "rack": ["r1", "r2"], "policy": ["all"]})

    def test_the_status_says_whether_anything_can_be_deployed(self):
        for document, told, expected in [
            (listing(release("a/b", "deployable"), release("a/c", "undetermined")), 200, 0),
            (listing(release("a/b", "arriving")), 200, 1),
            (listing(release("a/b", "arriving"), release("a/c", "undetermined")), 200, 3),
            (listing(release("a/b", "undetermined")), 200, 3),
            (listing(release("a/b", "no-racks"), racks=()), 200, 3),
            (listing(number=None), 503, 3),
            (listing(), 200, 1),
            (listing() | {"reason": "Generation 3 lists no release."}, 503, 3),
        ]:
            with self.subTest(document["releases"]):
                self.region.answers["GET", "releases/"] = Told(document, told)
                self.assertEqual(self.stanchion("releases")[0], expected)

    def test_a_rack_that_did_not_answer_is_named_with_the_reason(self):
        self.region.answers["GET", "releases/"] = listing(
            release("a/b", "undetermined", architecture("amd64", "undetermined")), racks=(RACK, SILENT)
        )
        output = self.stanchion("releases")[1]
        self.assertIn("r2: it is not connected since noon", output)
        self.assertIn("a/b: Because a/b is undetermined.", output)

    def test_what_is_missing_before_anything_can_be_deployed_is_said(self):
        self.region.answers["GET", "releases/"] = Told(listing(number=None, racks=()), 503)
        output = self.stanchion("releases")[1]
        self.assertIn("nothing has been published yet", output)
        self.assertIn("no rack has joined yet", output)

    def test_why_there_is_nothing_to_choose_from_is_said(self):
        self.region.answers["GET", "releases/"] = Told(listing() | {"reason": "Generation 3 lists no release."}, 503)
        self.assertEqual(self.stanchion("releases")[1], "Generation 3 lists no release.\n")

    def test_a_503_that_is_no_list_is_an_error(self):
        self.region.answers["GET", "releases/"] = Told("the database is away, see c1 in the log", 503)
        status, output, errors = self.stanchion("releases")
        self.assertEqual((status, output), (3, ""))
        self.assertIn("the database is away", errors)
        self.assertIn("c1", errors)


class TestWhy(CommandCase):
    def tell(self, state: str, code: int, racks: object = (RACK | {"holds": True, "versions": ["20260101"]},)):
        one = architecture("amd64", state) | {"racks": racks}
        document = listing() | release("ubuntu/noble", state, one) | {"retry_after": 30 if code != 200 else None}
        self.region.answers["GET", "releases/ubuntu/noble/"] = Told(document, code)

    def test_the_status_is_that_of_the_release(self):
        for state, code, expected in [("deployable", 200, 0), ("arriving", 409, 1), ("undetermined", 503, 3)]:
            with self.subTest(state):
                self.tell(state, code)
                status, output, errors = self.stanchion("why", "ubuntu/noble")
                self.assertEqual((status, errors), (expected, ""))
                self.assertIn(f"ubuntu/noble (A title): {state}. Because ubuntu/noble is {state}.", output)

    def test_every_rack_has_its_row(self):
        self.tell(
            "undetermined",
            503,
            (
                RACK | {"holds": False, "versions": [], "in_step": False, "behind": 2, "state": "syncing",
                        "progress": {"bytes_done": 5_000_000, "bytes": 10_000_000}},
                SILENT | {"holds": None, "versions": []},
            ),
        )  # fmt: skip
        rows = self.stanchion("why", "ubuntu/noble")[1].splitlines()[-2:]
        self.assertEqual(" ".join(rows[0].split()), "r1 no 3 syncing 2 behind, 5.0 MB of 10 MB")
        self.assertEqual(" ".join(rows[1].split()), "r2 not known 2 unknown it is not connected since noon")

    def test_what_the_region_says_of_it_and_of_each_rack_is_shown(self):
        row = RACK | {"holds": False, "versions": [], "in_step": False, "says": "Does not hold it yet: it is slow."}
        one = architecture("amd64", "arriving") | {
            "racks": [row], "published": "Version 1 is published since noon.", "went": "Version 0 went at night.",
        }  # fmt: skip
        document = listing() | release("ubuntu/noble", "arriving", one)
        document |= {"kernel": "hwe-24.04", "went": "For arm64: Version 0 went."}
        self.region.answers["GET", "releases/ubuntu/noble/"] = Told(document, 409)
        status, output, _ = self.stanchion("why", "ubuntu/noble", "--kernel", "hwe-24.04", "--arch", "amd64")
        self.assertEqual(status, 1)
        self.assertEqual(self.region.seen[0].query, {"arch": ["amd64"], "kernel": ["hwe-24.04"]})
        lines = output.splitlines()
        self.assertIn("ubuntu/noble (A title) with kernel hwe-24.04: arriving.", lines[0])
        self.assertEqual(lines[3:5], ["Version 1 is published since noon.", "Version 0 went at night."])
        self.assertTrue(lines[-3].endswith("Does not hold it yet: it is slow."), lines[-3])
        self.assertEqual(lines[-2:], ["", "For arm64: Version 0 went."])

    def test_a_kernel_that_is_not_known_is_a_certain_no(self):
        message = "'x' is not a valid kernel.  It should be one of: 'ga-24.04'."
        self.region.answers["GET", "releases/ubuntu/noble/"] = Told({"kernel": [message]}, 400)
        self.assertEqual(self.stanchion("why", "ubuntu/noble", "--kernel", "x"), (1, message + "\n", ""))

    def test_a_release_that_is_not_known_is_a_certain_no_with_the_choices(self):
        message = "'x' is not a valid distro_series.  It should be one of: 'ubuntu/noble'."
        self.region.answers["GET", "releases/ubuntu/x/"] = Told({"distro_series": [message]}, 400)
        self.assertEqual(self.stanchion("why", "ubuntu/x"), (1, message + "\n", ""))

    def test_a_rack_that_is_not_known_is_a_mistake(self):
        self.region.answers["GET", "releases/ubuntu/noble/"] = Told({"rack": ["'r9' is not a valid rack."]}, 400)
        self.assertEqual(self.stanchion("why", "ubuntu/noble", "--rack", "r9")[0], 2)

    def test_what_is_no_release_is_refused_before_it_is_asked(self):
        for text in ("noble", "ubuntu/", "/noble", "a/b/c"):
            with self.subTest(text):
                self.assertEqual(self.stanchion("why", text)[0], 2)
        self.assertEqual(self.region.seen, [])


CONTROLLER = {
    "system_id": "abc234", "hostname": "r1", "connected": True,
    "connections": [{"process": "region-1", "host": "m1"}, {"process": "region-2", "host": "m2"}],
    "not_connected_since": None, "state": "ready", "generation": 3, "behind": 0, "version": "0.1.0", "progress": {},
}  # fmt: skip


class TestRacks(CommandCase):
    def test_the_status_says_whether_all_are_connected(self):
        self.region.answers["GET", "rackcontrollers/"] = [CONTROLLER]
        self.assertEqual(self.stanchion("racks")[0], 0)
        away = CONTROLLER | {
            "hostname": "r2",
            "connected": False,
            "connections": [],
            "not_connected_since": "noon",
            "behind": 2,
        }
        self.region.answers["GET", "rackcontrollers/"] = [CONTROLLER, away]
        status, output, _ = self.stanchion("racks")
        self.assertEqual(status, 1)
        self.assertIn("not connected since noon, 2 behind", output)
        self.assertIn("connected  region-1@m1, region-2@m2", output)

    def test_a_rack_that_cannot_sync_says_why(self):
        failed = CONTROLLER | {"state": "failed", "progress": {"reason": "no space left"}}
        self.region.answers["GET", "rackcontrollers/"] = [failed]
        self.assertIn("no space left", self.stanchion("racks")[1])

    def test_a_rack_is_told_to_sync(self):
        self.region.answers["POST", "rackcontrollers/r1/"] = Told("Import of boot images started on r1", 202)
        self.assertEqual(self.stanchion("racks", "--sync", "r1")[:2], (0, "Import of boot images started on r1\n"))
        self.assertEqual(self.region.seen[0].query, {"op": ["import_boot_images"]})

    def test_a_rack_is_forgotten_by_name(self):
        self.region.answers["GET", "rackcontrollers/"] = [CONTROLLER]
        self.region.answers["DELETE", "rackcontrollers/abc234/"] = ""
        self.assertEqual(self.stanchion("racks", "--forget", "r1")[0], 0)
        self.assertEqual(self.stanchion("racks", "--forget", "r7")[0], 1)
        self.assertEqual([seen.method for seen in self.region.seen], ["GET", "DELETE", "GET"])
        self.assertEqual(self.stanchion("racks", "forget", "abc234")[0], 0)
        self.assertEqual(self.region.seen[-1].method, "DELETE")

    def test_a_rack_is_revoked_by_name(self):
        self.region.answers["GET", "rackcontrollers/"] = [CONTROLLER]
        self.region.answers["POST", "rackcontrollers/abc234/"] = CONTROLLER | {"revoked": "noon"}
        status, output, _ = self.stanchion("racks", "revoke", "r1")
        self.assertEqual(status, 0)
        self.assertIn("r1 is revoked", output)
        self.assertEqual(self.region.seen[-1].query, {"op": ["revoke"]})
        status, _, complaint = self.stanchion("racks", "revoke", "r7")
        self.assertEqual(status, 1)
        self.assertIn("there is no rack 'r7'", complaint)

    def test_a_revoked_rack_is_shown_as_that_and_is_not_missed(self):
        self.region.answers["GET", "rackcontrollers/"] = [CONTROLLER | {"connected": False, "revoked": "noon"}]
        status, output, _ = self.stanchion("racks")
        self.assertEqual(status, 0)
        self.assertIn("revoked", output)
        self.assertIn("stanchion racks forget r1", output)

    def test_a_rack_is_renamed_or_it_is_said_why_not(self):
        self.region.answers["GET", "rackcontrollers/"] = [CONTROLLER]
        self.region.answers["PUT", "rackcontrollers/abc234/"] = CONTROLLER | {"hostname": "cellar"}
        status, output, _ = self.stanchion("racks", "rename", "r1", "cellar")
        self.assertEqual((status, output), (0, "r1 is named cellar from now on\n"))
        self.assertEqual(self.region.seen[-1].method, "PUT")
        self.region.answers["PUT", "rackcontrollers/abc234/"] = Told({"hostname": ["another rack is named 'r2'"]}, 400)
        status, _, complaint = self.stanchion("racks", "rename", "r1", "r2")
        self.assertEqual((status, complaint), (1, "stanchion: another rack is named 'r2'\n"))


class TestImages(CommandCase):
    def test_images_are_listed_with_size_update_and_generation(self):
        self.region.answers["GET", "boot-resources/"] = [
            {"id": 1, "name": "ubuntu/noble", "architecture": "amd64/ga-24.04", "size": 340_000_000, "generation": 3,
             "version": "20260101", "last_update": "2026-01-01T00:00:00Z", "last_deployed": None,
             "machines_deployed": 0}
        ]  # fmt: skip
        status, output, _ = self.stanchion("images")
        self.assertEqual(status, 0)
        self.assertEqual(
            " ".join(output.splitlines()[1].split()),
            "ubuntu/noble amd64/ga-24.04 20260101 340 MB 0 2026-01-01T00:00:00Z 3",
        )

    def test_nothing_published_is_said(self):
        self.region.answers["GET", "boot-resources/"] = []
        self.assertIn("nothing has been published yet", self.stanchion("images")[1])
