"""Damage and uploads with real processes: what rots is replaced, and an upload survives kill -9 and reaches racks."""

from __future__ import annotations

import hashlib
import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.rpc.test_verifying import rot
from tests.system.daemons import WAIT_SECONDS, Rack, authorization, wait_for
from tests.system.test_spine import SystemTestCase


class RepairTests(SystemTestCase):
    def events(self, kind: str) -> list[str]:
        found = self.region.get("events/?op=query&limit=1000")["events"]
        return [event["description"] for event in found if event["type"] == kind]

    def test_what_rots_on_the_rack_and_at_the_region_is_found_withdrawn_and_replaced(self) -> None:
        self.import_and_sync()
        manifest = json.loads((self.rack.snapshot / "manifest.json").read_bytes())
        [noble] = [one for one in manifest["images"] if (one["release"], one["arch"]) == ("noble", "amd64")]
        name, size = noble["files"][0]["sha256"], noble["files"][0]["size"]
        cache = self.directory / "rack" / "images" / "cache" / "blobs"
        blobs = self.directory / "region" / "images" / "blobs"
        rot(cache / name, size - 1)
        rot(blobs / name, size - 1)

        # The rack finds its own copy, gets wrong bytes from the region, says so, and the region fetches it again.
        found = self.region.command(
            "rack", "verify", "--json", "--rate", "1000", "--config", str(self.rack.config), status=1
        )
        self.assertEqual([damaged[0] for damaged in json.loads(found)["damaged"]], [name])
        wait_for(lambda: len(self.events("Damage repaired")) == 2, "both copies to be repaired")
        self.rack.wait_in_step()
        self.assert_whole(self.rack)
        self.assertEqual(hashlib.sha256(self.region.stream(f"blobs/{name}")).hexdigest(), name)
        self.assertEqual(len(self.events("Damage found")), 2)

        # With upstream away it is served no more, and the image stays published for the rack that holds it.
        os.rename(self.stream.root, self.stream.root.with_name("away"))
        rot(blobs / name)
        self.region.command("images", "verify", "--rate", "1000", status=1)
        error = self.assertRaises(urllib.error.HTTPError, self.region.stream, f"blobs/{name}")
        with error:
            self.assertEqual((error.code, error.headers["Retry-After"]), (503, "30"))
            self.assertIn("was found damaged at", error.read().decode())
        self.region.run_import()
        self.assertEqual(self.why("noble")[0], 200)
        os.rename(self.stream.root.with_name("away"), self.stream.root)
        self.region.run_import()
        self.region.command("images", "verify", "--rate", "1000")

    def test_a_fresh_rack_takes_what_the_region_can_give_and_the_rest_when_it_is_there_again(self) -> None:
        self.import_and_sync()
        manifest = json.loads((self.rack.snapshot / "manifest.json").read_bytes())
        [noble] = [one for one in manifest["images"] if (one["release"], one["arch"]) == ("noble", "amd64")]
        name = noble["files"][0]["sha256"]
        away = self.stream.root.with_name("away")
        os.rename(self.stream.root, away)
        rot(self.directory / "region" / "images" / "blobs" / name)
        self.region.command("images", "verify", "--rate", "1000", status=1)

        # A rack that holds it is not touched; one that comes now holds all the rest, and says so and why.
        (self.directory / "second").mkdir()
        fresh = Rack(self.region, self.directory / "second", "rack-2")
        self.addCleanup(fresh.kill)
        fresh.join()
        fresh.start()
        seen = wait_for(lambda: self.of("rack-2")["state"] == "partial" and self.of("rack-2"), "what can be had")
        self.assertEqual(seen["generation"], 1)
        self.assertIn("was found damaged at", seen["progress"]["reason"])
        self.assertFalse(fresh.is_in_step())
        listed = self.region.command("racks")
        self.assertIn("partial", listed)
        self.assertIn("1 of 5 images cannot be had now", self.events("Sync incomplete")[0])
        status, answer, _ = self.region.api("releases/ubuntu/noble/?arch=amd64&rack=rack-2")
        self.assertEqual((status, answer["state"]), (409, "arriving"), answer)
        self.assertEqual(self.region.api("releases/ubuntu/noble/?arch=amd64&rack=rack-1")[0], 200)
        self.assertEqual(self.why("noble")[0], 200)
        for other, arch in (("noble", "arm64"), ("jammy", "amd64"), ("jammy", "arm64")):
            self.assertEqual(self.region.api(f"releases/ubuntu/{other}/?arch={arch}&rack=rack-2")[0], 200)
        told = self.region.command("why", "ubuntu/noble", "--arch", "amd64", "--rack", "rack-2", status=1)
        self.assertIn("holds what can be had of that", told)
        self.assertIn("was found damaged at", told)

        # It goes on so through a restart, and holds all as soon as upstream is back.
        fresh.kill()
        fresh.start()
        wait_for(lambda: self.of("rack-2")["connected"] and self.of("rack-2")["state"] == "partial", "the same again")
        os.rename(away, self.stream.root)
        self.region.run_import()
        fresh.wait_in_step(10)
        self.assert_whole(fresh)
        self.assertEqual(self.region.api("releases/ubuntu/noble/?arch=amd64&rack=rack-2")[0], 200)

    def of(self, rack: str) -> Any:
        """What the region tells of a rack."""
        [found] = [each for each in self.region.get("rackcontrollers/") if each["hostname"] == rack]
        return found

    def put(self, path: str, data: bytes) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.region.http}{path}", data, method="PUT",
            headers={"Authorization": authorization(self.region.key), "Content-Type": "application/octet-stream"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as answer:
            return json.loads(answer.read())

    def test_an_upload_survives_the_death_of_the_region_and_reaches_the_rack(self) -> None:
        self.import_and_sync()
        body = os.urandom(3 << 20)
        path = Path(self.directory) / "mine.tgz"
        path.write_bytes(body)
        fields = {
            "name": "mine", "architecture": "amd64/generic", "sha256": hashlib.sha256(body).hexdigest(),
            "size": len(body), "filetype": "tgz",
        }  # fmt: skip
        status, begun, _ = self.region.api("boot-resources/", "POST", fields)
        self.assertEqual(status, 201, begun)
        [file] = next(iter(begun["sets"].values()))["files"].values()
        self.put(file["upload_uri"], body[: 1 << 20])
        self.region.kill()
        self.region.start()
        again = self.region.get(begun["resource_uri"].removeprefix("/MAAS/api/2.0/"))
        [file] = next(iter(again["sets"].values()))["files"].values()
        self.assertEqual(file["received"], 1 << 20)

        self.region.command("images", "upload", str(path), "--name", "mine", "--arch", "amd64")
        wait_for(lambda: len(self.region.get("image-generations/")) == 2, "the generation with the upload")
        self.rack.wait_in_step()
        self.assert_whole(self.rack)
        self.assertEqual(self.region.api("releases/custom/mine/?arch=amd64")[0], 200)

        self.region.command("images", "delete", "mine")
        wait_for(lambda: len(self.region.get("image-generations/")) == 3, "the generation without it")
        wait_for(lambda: self.region.api("releases/custom/mine/?arch=amd64")[0] == 400, "the rack to follow")
