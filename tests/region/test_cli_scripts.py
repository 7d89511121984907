"""The commands about scripts: what is sent, what people see, and that a script arrives as it is."""

from __future__ import annotations

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rpc.console import Status
from tests.region.test_cli_answers import CommandCase
from tests.region.test_scripts_metadata import script
from tests.rpc.region_server import Told

SCRIPT: dict[str, Any] = {
    "id": 1, "name": "disk-speed", "title": "Speed", "description": "", "tags": ["disk", "commissioning"], "type": 2,
    "type_name": "Testing script", "hardware_type": 3, "hardware_type_name": "Storage", "parallel": 1,
    "parallel_name": "x", "results": {}, "parameters": {"runtime": {"type": "runtime", "default": 60}},
    "packages": {"apt": ["fio"]}, "timeout": "0:10:00", "destructive": False, "for_hardware": [], "may_reboot": False,
    "recommission": False, "apply_configured_networking": False, "default": False, "resource_uri": "/x",
    "history": [{"id": 12, "comment": "more\x1b[2J", "created": "Thu, 01 Jan 2026 00:00:00 +0000"}],
}  # fmt: skip


class ScriptTests(CommandCase):
    def setUp(self) -> None:
        super().setUp()
        directory = TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.path = Path(directory.name) / "speed.sh"

    def write(self, content: bytes) -> str:
        self.path.write_bytes(content)
        return str(self.path)

    def test_scripts_are_listed(self) -> None:
        self.region.answers["GET", "scripts/"] = [SCRIPT, SCRIPT | {"name": "10-a", "type": 0, "default": True}]
        status, output, _ = self.stanchion("script", "list", "--type", "testing", "--filter", "a,b")
        self.assertEqual(status, Status.YES)
        lines = output.splitlines()
        self.assertEqual(lines[1].split()[:4], ["disk-speed", "testing", "Storage", "0:10:00"])
        self.assertIn("built in", lines[2])
        self.assertEqual(self.region.seen[0].query, {"type": ["testing"], "filters": ["a,b"]})
        self.assertEqual(json.loads(self.stanchion("script", "list", "--json")[1])[0], SCRIPT)

    def test_where_there_are_none_that_is_said(self) -> None:
        self.region.answers["GET", "scripts/"] = []
        self.assertIn("there are no such scripts", self.stanchion("script", "list")[1])

    def test_one_is_shown_with_its_versions_and_nothing_that_moves_the_cursor(self) -> None:
        self.region.answers["GET", "scripts/disk-speed/"] = SCRIPT
        status, output, _ = self.stanchion("script", "show", "disk-speed")
        self.assertEqual(status, Status.YES)
        for words in (
            "type:       testing",
            "needs:      apt: fio",
            "runtime (runtime, 60 by default)",
            "more\\x1b[2J",
        ):
            self.assertIn(words, output)
        self.assertNotIn("destructive", output)

    def test_a_script_is_added_as_it_is_under_the_name_that_it_says(self) -> None:
        content = script("name: disk-speed") + bytes(range(256))
        self.region.answers["POST", "scripts/"] = Told(SCRIPT, 201)
        status, output, _ = self.stanchion(
            "script", "add", self.write(content), "--tags", "disk", "--timeout", "60", "--comment", "größer"
        )
        self.assertEqual(
            (status, output),
            (0, "script disk-speed is added; it is a testing script, run after every commissioning that names no other"
             " tests\n"),
        )  # fmt: skip
        form = self.region.seen[-1].form
        self.assertEqual(form.pop("script")[0].encode("latin-1"), content)
        self.assertEqual(form, {"name": ["disk-speed"], "tags": ["disk"], "timeout": ["60"], "comment": ["größer"]})

    def test_a_script_without_a_name_has_that_of_its_file(self) -> None:
        self.region.answers["POST", "scripts/"] = Told(SCRIPT, 201)
        for arguments, name in (((), "speed.sh"), (("--name", "other"), "other")):
            self.stanchion("script", "add", self.write(b"#!/bin/sh\n"), *arguments)
            self.assertEqual(self.region.seen[-1].form["name"], [name])

    def test_one_that_is_there_gets_another_version(self) -> None:
        self.region.answers["GET", "scripts/disk-speed/"] = SCRIPT
        self.region.answers["PUT", "scripts/disk-speed/"] = SCRIPT | {"tags": []}
        status, output, _ = self.stanchion("script", "add", self.write(script("name: disk-speed")))
        self.assertEqual(
            (status, output),
            (0, "script disk-speed has the version 12 now; it is a testing script, run when it is named\n"),
        )
        self.assertEqual(list(self.region.seen[-1].form), ["script"])

    def test_what_cannot_be_added_is_said(self) -> None:
        self.assertEqual(self.stanchion("script", "add", "/nowhere/x")[0], Status.USAGE)
        status, _, errors = self.stanchion("script", "add", self.write(script("name: [")))
        self.assertEqual(status, Status.USAGE)
        self.assertIn("line", errors)
        self.region.answers["POST", "scripts/"] = Told({"timeout": ["'x' is no time."]}, 400)
        status, _, errors = self.stanchion("script", "add", self.write(b"#!/bin/sh\n"), "--timeout", "x")
        self.assertEqual(status, Status.USAGE)
        self.assertIn("timeout: 'x' is no time", errors)
        self.region.answers["GET", "scripts/speed.sh/"] = Told("broken", 500)
        self.assertEqual(self.stanchion("script", "add", self.write(b"#!/bin/sh\n"))[0], Status.UNREACHABLE)

    def test_a_script_is_downloaded_byte_for_byte(self) -> None:
        content = b"#!/bin/sh\n" + bytes(range(256))
        self.region.answers["GET", "scripts/disk-speed/"] = Told(content)
        target = self.path.with_name("copy")
        status, output, _ = self.stanchion(
            "script", "download", "disk-speed", "--revision", "12", "--output", str(target)
        )
        self.assertEqual((status, output), (0, f"{len(content)} bytes are written to {target}\n"))
        self.assertEqual(target.read_bytes(), content)
        self.assertTrue(os.access(target, os.X_OK))
        self.assertEqual(self.region.seen[0].query, {"op": ["download"], "revision": ["12"]})
        self.region.answers["GET", "scripts/disk-speed/"] = Told(b"#!/bin/sh\necho\n")
        self.assertEqual(self.stanchion("script", "download", "disk-speed")[1], "#!/bin/sh\necho\n")
        status, _, errors = self.stanchion("script", "download", "disk-speed", "--output", "/nowhere/x")
        self.assertEqual(status, Status.USAGE)
        self.assertIn("/nowhere/x cannot be written", errors)

    def test_a_script_is_deleted_unless_the_region_refuses(self) -> None:
        self.region.answers["DELETE", "scripts/disk-speed/"] = Told("", 204)
        self.assertEqual(self.stanchion("script", "delete", "disk-speed")[0], Status.YES)
        self.region.answers["DELETE", "scripts/disk-speed/"] = Told("The script disk-speed is built in.", 409)
        status, _, errors = self.stanchion("script", "delete", "disk-speed")
        self.assertEqual(status, Status.NO)
        self.assertIn("is built in", errors)
