"""``stanchion license-key``: what people see, and what the region is asked."""

from __future__ import annotations

import io
import sys

from tests.region.test_cli_answers import CommandCase
from tests.rpc.region_server import Told

KEY = "AAAAA-BBBBB-CCCCC-DDDDD-12345"
ONE = "license-key/windows/win2022/"
SHOWN = {"osystem": "windows", "distro_series": "win2022", "license_key": KEY, "resource_uri": "/x"}


class LicenseKeyTests(CommandCase):
    def test_the_keys_are_shown(self):
        self.region.answers["GET", "license-keys/"] = [SHOWN]
        for argv in (("license-key",), ("license-key", "list")):
            status, output, _ = self.stanchion(*argv)
            self.assertEqual((status, output.splitlines()[-1].split()), (0, ["windows/win2022", KEY]))
        self.region.answers["GET", "license-keys/"] = []
        self.assertIn("no license key", self.stanchion("license-key")[1])

    def test_a_first_key_is_made_and_another_one_takes_its_place(self):
        self.region.answers["GET", "license-keys/"] = []
        self.region.answers["POST", "license-keys/"] = SHOWN
        status, output, _ = self.stanchion("license-key", "set", "windows/win2022", KEY)
        self.assertEqual((status, output), (0, "windows/win2022 has the license key\n"))
        self.assertEqual(self.region.seen[-1].form["license_key"], [KEY])
        self.region.answers["GET", "license-keys/"] = [SHOWN]
        self.region.answers["PUT", ONE] = SHOWN
        self.assertEqual(self.stanchion("license-key", "set", "windows/win2022", KEY)[0], 0)
        self.assertEqual([one.method for one in self.region.seen], ["GET", "POST", "GET", "PUT"])

    def test_a_key_can_be_read_from_standard_input(self):
        self.patch(sys, "stdin", io.StringIO(KEY + "\n"))
        self.region.answers["GET", "license-keys/"] = [SHOWN]
        self.region.answers["PUT", ONE] = SHOWN
        self.assertEqual(self.stanchion("license-key", "set", "windows/win2022", "-")[0], 0)
        self.assertEqual(self.region.seen[-1].form["license_key"], [KEY])

    def test_a_wrong_key_is_a_no_and_what_cannot_be_told_is_no_answer(self):
        self.region.answers["GET", "license-keys/"] = [SHOWN]
        self.region.answers["PUT", ONE] = Told({"license_key": ["Invalid license key.", "It is short."]}, 400)
        status, output, errors = self.stanchion("license-key", "set", "windows/win2022", "x")
        self.assertEqual((status, output), (1, ""))
        self.assertIn("Invalid license key. It is short.", errors)
        self.region.answers["PUT", ONE] = Told("rack-1 has not said", 503)
        status, output, errors = self.stanchion("license-key", "set", "windows/win2022", "x")
        self.assertEqual((status, output), (3, ""))
        self.assertIn("rack-1 has not said", errors)

    def test_a_key_is_forgotten(self):
        self.region.answers["DELETE", ONE] = Told("", 204)
        self.assertEqual(self.stanchion("license-key", "delete", "windows/win2022")[0], 0)
        self.assertEqual(self.stanchion("license-key", "delete", "windows")[0], 2)
