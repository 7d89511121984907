"""What real processes tell of a release: where it comes from and where it went, what racks know of it, and its key."""

from __future__ import annotations

from typing import Any

from tests import streams
from tests.streams import content
from tests.system.daemons import wait_for
from tests.system.test_spine import SystemTestCase

KEY = "AAAAA-BBBBB-CCCCC-DDDDD-12345"


class WhyTests(SystemTestCase):
    def one(self, name: str, expected: int, query: str = "") -> Any:
        status, body, _ = self.region.api(f"releases/{name}/?arch=amd64{query}")
        self.assertEqual(status, expected, body)
        return body

    def give(self, key: str) -> tuple[int, Any]:
        fields = {"osystem": "windows", "distro_series": "win2022", "license_key": key}
        status, body, _ = self.region.api("license-keys/", "POST", fields)
        return status, body

    def test_a_windows_from_the_stream_to_its_key_and_a_release_from_its_coming_to_its_going(self) -> None:
        windows = self.stream.add(
            "win2022",
            os="windows",
            files={"root-dd.gz": content("a disk")},
            requires_license_key=True,
            subarch="generic",
        )
        del windows["release_title"]
        self.stream.write()
        self.import_and_sync()

        body = self.one("windows/win2022", 200)
        self.assertEqual((body["title"], body["requires_license_key"]), ("Windows Server 2022", True))
        [architecture] = body["architectures"]
        self.assertEqual((architecture["uses"], architecture["images"][0]["uses"]), (["xinstall"], ["xinstall"]))
        self.assertEqual(architecture["images"][0]["source"], f"{self.upstream.url}/")
        self.assertIn("is published since", architecture["published"])
        self.assertEqual(architecture["racks"][0]["says"], "Holds version 20260101, in generation 1.")
        listed = {one["name"]: one["requires_license_key"] for one in self.region.get("releases/")["releases"]}
        self.assertEqual(listed, {"ubuntu/jammy": False, "ubuntu/noble": False, "windows/win2022": True})
        manifest = (self.rack.snapshot / "manifest.json").read_text()
        self.assertIn('"requires_license_key":"True"', manifest)

        self.one("ubuntu/noble", 200, "&kernel=ga-24.04")
        self.assertEqual(self.one("ubuntu/noble", 400, "&kernel=hwe-24.04"), {
            "kernel": ["'hwe-24.04' is not a valid kernel.  It should be one of: 'ga-24.04'."]})  # fmt: skip

        status, body = self.give("wrong")
        self.assertEqual((status, body["license_key"][0]), (400, "Invalid license key."))
        self.assertEqual(self.give(KEY)[0], 200)
        self.assertEqual(self.region.get("license-key/windows/win2022/")["license_key"], KEY)
        self.assertEqual(self.region.api("license-key/windows/win2022/", "DELETE")[0], 204)
        for path in (self.region.log, self.rack.log):
            self.assertNotIn(KEY, path.read_text())

        # It goes, and it is told with which generation and why; while the rack is away it may hold it still.
        self.stream.change(streams.drop_product, "win2022").write()
        self.region.run_import()
        self.rack.wait_in_step()
        usual, went = self.one("windows/win2022", 400)["distro_series"]
        self.assertIn("It should be one of: 'ubuntu/jammy', 'ubuntu/noble'.", usual)
        self.assertIn("Version 20260101 (generic) went with generation 2", went)
        self.assertIn("no longer lists it", went)

        self.rack.kill()
        wait_for(lambda: not self.region.get("rackcontrollers/")[0]["connected"], "the rack to be away")
        [row] = self.one("ubuntu/noble", 503)["architectures"][0]["racks"]
        self.assertIn("Does not answer: it is not connected since", row["says"])
        self.assertIn("it held it, in generation 2.", row["says"])
