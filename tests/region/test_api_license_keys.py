"""License keys: what clients of MAAS know, judged by racks; and 503, not 400, for what a rack did not answer."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from region.answers.combine import Catalogue, Target
from region.answers.licensing import Validity, judge
from region.license_keys import LicenseKey, LicenseKeyStore
from rpc.manifest import Image, Manifest
from rpc.outcomes import Answered, Failed, NotConnected, Outcome, TimedOut
from tests.database import DatabaseTestCase
from tests.logs import Logs
from tests.region.fakes import Link
from tests.region.inventories import NOBLE, catalogue, image
from tests.region.test_api_releases import ReleasesTestCase
from tests.region.web import Response, form

WINDOWS = Target("windows", "win2022", "amd64")
KEY = "AAAAA-BBBBB-CCCCC-DDDDD-12345"
OTHER = "EEEEE-FFFFF-GGGGG-HHHHH-67890"
ONE = "license-key/windows/win2022/"
SHOWN = {
    "osystem": "windows", "distro_series": "win2022", "license_key": KEY,
    "resource_uri": "/MAAS/api/2.0/license-key/windows/win2022/",
}  # fmt: skip


class KeysTestCase(ReleasesTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.link = self.hold(image(WINDOWS), image(NOBLE))

    def hold(self, *images: Image, rack: str = "aaaaaa") -> Link:
        manifest = Manifest(images)
        self.generations.publish(manifest)
        return self.racks.add(rack, Catalogue(manifest), len(self.generations.published))

    def create(self, osystem: str = "windows", distro_series: str = "win2022", license_key: str = KEY) -> Response:
        fields = form(osystem=osystem, distro_series=distro_series, license_key=license_key)
        return self.ask("POST", "license-keys/", **fields)

    def kept(self) -> dict[str, str]:
        return {
            f"{one['osystem']}/{one['distro_series']}": one["license_key"] for one in self.get("license-keys/").json
        }


class TestKeys(KeysTestCase):
    def test_a_key_is_given_shown_changed_and_forgotten(self) -> None:
        self.assertEqual(self.kept(), {})
        response = self.create()
        self.assertEqual((response.status, response.json), (200, SHOWN))
        self.assertEqual(self.get("license-keys/").json, [SHOWN])
        self.assertEqual(self.get(ONE).json, SHOWN)
        response = self.ask("PUT", ONE, **form(license_key=OTHER))
        self.assertEqual((response.status, response.json), (200, SHOWN | {"license_key": OTHER}))
        self.assertEqual(self.kept(), {"windows/win2022": OTHER})
        self.assertEqual(self.ask("DELETE", ONE).status, 204)
        self.assertEqual(self.kept(), {})

    def test_one_that_is_not_there_is_404(self) -> None:
        for path in (ONE, "license-key/windows/a%00b/", "license-key/%20/x/"):
            self.assertEqual(self.get(path).status, 404)
            self.assertEqual(self.ask("PUT", path, **form(license_key=KEY)).status, 404)
            self.assertEqual(self.ask("DELETE", path).status, 404)
        self.assertEqual(self.get(ONE).text, "There is no license key for windows/win2022.")

    def test_every_field_is_needed(self) -> None:
        response = self.ask("POST", "license-keys/", **form(osystem="windows"))
        required = ["This field is required."]
        self.assertEqual((response.status, response.json), (400, {"distro_series": required, "license_key": required}))

    def test_a_release_has_one_key(self) -> None:
        self.create()
        response = self.create(license_key=OTHER)
        self.assertEqual((response.status, list(response.json)), (400, ["__all__"]))
        self.assertIn("PUT /MAAS/api/2.0/license-key/windows/win2022/", response.json["__all__"][0])
        self.assertEqual(self.kept(), {"windows/win2022": KEY})

    def test_a_release_is_understood_as_clients_of_maas_write_it(self) -> None:
        self.assertEqual(self.create(distro_series="windows/win2022*").json, SHOWN)


class TestRefusals(KeysTestCase):
    def test_a_key_that_cannot_be_one_is_400_in_the_words_that_clients_know(self) -> None:
        for wrong in ("abc", KEY[:-1], "x" * 2000, " "):
            response = self.create(license_key=wrong)
            self.assertEqual((response.status, response.json["license_key"][0]), (400, "Invalid license key."))
            self.assertNotIn("abc", response.text)
        self.assertEqual(self.create(license_key="").status, 400)
        self.create()
        self.assertEqual(self.ask("PUT", ONE, **form(license_key="abc")).status, 400)
        self.assertEqual(self.kept(), {"windows/win2022": KEY})

    def test_text_that_is_none_is_400_too(self) -> None:
        for field in ("osystem", "distro_series", "license_key"):
            fields = {"osystem": "windows", "distro_series": "win2022", "license_key": KEY} | {field: "\ud800"}
            body = json.dumps(fields).encode()
            response = self.ask("POST", "license-keys/", body=body, Content_Type="application/json")
            self.assertEqual(response.status, 400, field)

    def test_what_needs_no_key_gets_none(self) -> None:
        response = self.create("ubuntu", "noble")
        self.assertEqual((response.status, response.json), (400, {"distro_series": [
            "ubuntu/noble needs no license key."]}))  # fmt: skip

    def test_a_release_that_there_is_not_is_400_with_those_that_there_are(self) -> None:
        response = self.create(distro_series="win2024")
        self.assertEqual((response.status, response.json), (400, {"distro_series": [
            "'win2024' is not a valid distro_series.  It should be one of: 'windows/win2022'."]}))  # fmt: skip
        response = self.create(osystem="widows")
        self.assertEqual((response.status, response.json), (400, {"osystem": [
            "'widows' is not a valid osystem.  It should be one of: 'ubuntu', 'windows'."]}))  # fmt: skip
        self.assertEqual(self.link.judged, [])

    def test_the_stream_decides_whether_one_is_needed(self) -> None:
        self.hold(image(WINDOWS, requires_license_key="false"), image(NOBLE, requires_license_key="true"))
        self.assertEqual(self.create().status, 400)
        self.assertEqual(self.create("ubuntu", "noble", "any-word").status, 200)

    def test_while_no_rack_holds_what_the_stream_says_needs_one_it_is_503(self) -> None:
        self.generations.publish(Manifest([image(NOBLE, requires_license_key="true")]))
        self.racks.add("aaaaaa", catalogue([WINDOWS]), 1)
        response = self.create("ubuntu", "noble", "any-word")
        self.assertEqual((response.status, response.headers["Retry-After"]), (503, "10"))
        self.assertIn("no rack holds it yet", response.text)


class TestSilence(KeysTestCase):
    """A rack that does not answer is nobody's wrong key."""

    def test_a_rack_that_does_not_answer_is_503_that_names_it_and_says_why(self) -> None:
        for outcome, why in (
            (TimedOut(2.0), "rack-aaaaaa: it did not answer within 2 s"),
            (Failed("Unhandled", "reference 42"), "rack-aaaaaa: asking it failed: Unhandled: reference 42"),
        ):
            self.link.outcome = outcome
            logs = Logs(self, "region.api.license_keys")
            for key in (KEY, "abc"):
                response = self.create(license_key=key)
                self.assertEqual((response.status, response.headers["Retry-After"]), (503, "10"))
                self.assertIn(why, response.text)
                [logged] = logs.texts
                self.assertIn(why, logged)
                self.assertNotIn(key, logged)
                logs.events.clear()
        del self.racks.links["aaaaaa"]
        self.assertIn("rack-aaaaaa: it is not connected", self.create().text)
        self.assertEqual(self.kept(), {})

    def test_one_rack_that_takes_it_is_enough(self) -> None:
        self.racks.add("bbbbbb", self.link.catalogue).outcome = TimedOut(2.0)
        self.assertEqual(self.create().status, 200)

    def test_a_rack_that_refuses_it_does_not_speak_for_one_that_is_silent(self) -> None:
        self.racks.add("bbbbbb", self.link.catalogue).outcome = TimedOut(2.0)
        response = self.create(license_key="abc")
        self.assertEqual(response.status, 503)
        self.assertIn("rack-bbbbbb has not said", response.text)

    def test_an_older_rack_and_one_that_talks_nonsense_cannot_tell(self) -> None:
        self.link.judgement = {"outcome": "maybe", "reason": "x"}
        response = self.create()
        self.assertEqual(response.status, 503)
        self.assertIn("an answer that this region does not understand", response.text)

    def test_without_racks_or_anything_published_it_is_503(self) -> None:
        self.racks.racks, self.racks.links = {}, {}
        response = self.create()
        self.assertEqual((response.status, response.headers["Retry-After"]), (503, "60"))
        self.assertIn("No rack is enrolled", response.text)


words: st.SearchStrategy[Outcome[Any]] = st.one_of(
    st.sampled_from(["valid", "invalid", "not-needed", "?"]).map(
        lambda outcome: Answered({"outcome": outcome, "reason": "" if outcome == "valid" else "Because."})
    ),
    st.sampled_from([TimedOut(2.0), Failed("UnknownCommand", "x"), Failed("Unhandled", "x"), NotConnected()]),
)


class TestJudging(SynchronousTestCase):
    @settings(deadline=None, max_examples=60)
    @given(st.dictionaries(st.sampled_from("abcd"), words), st.randoms())
    def test_what_racks_say_comes_to_the_same_in_any_order_and_silence_refuses_nothing(self, said, random) -> None:
        shuffled = list(said.items())
        random.shuffle(shuffled)
        verdict = judge(said)
        self.assertEqual(judge(dict(shuffled)), verdict)
        told = {outcome.value["outcome"] if isinstance(outcome, Answered) else "?" for outcome in said.values()}
        expected = (
            "valid" if "valid" in told
            else "undetermined" if "?" in told or not told
            else "invalid" if "invalid" in told
            else "not-needed"
        )  # fmt: skip
        self.assertEqual(verdict.validity, Validity(expected))
        self.assertEqual(verdict.reason == "", expected == "valid")


class TestStore(DatabaseTestCase):
    async def test_keys_are_kept_by_release(self) -> None:
        store = LicenseKeyStore(self.database)
        key, other = LicenseKey("windows", "win2022", KEY), LicenseKey("windows", "win2019", OTHER)
        self.assertTrue(await store.add(key))
        self.assertFalse(await store.add(LicenseKey("windows", "win2022", OTHER)))
        self.assertTrue(await store.add(other))
        self.assertEqual(await store.list(), [other, key])
        self.assertEqual(await store.get("windows", "win2022"), key)
        changed = LicenseKey("windows", "win2022", OTHER)
        self.assertTrue(await store.replace(changed))
        self.assertEqual(await store.get("windows", "win2022"), changed)
        self.assertTrue(await store.delete("windows", "win2022"))
        self.assertFalse(await store.delete("windows", "win2022"))
        self.assertFalse(await store.replace(key))
        self.assertIsNone(await store.get("windows", "win2022"))

    def test_a_key_does_not_show_in_logs(self) -> None:
        self.assertNotIn(KEY, repr(LicenseKey("windows", "win2022", KEY)))
