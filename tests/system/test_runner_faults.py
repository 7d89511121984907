"""This very machine is commissioned by a region in which every step that follows from what a machine says raises."""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar

from region.commissioning.failures import WHAT
from region.hardware.hooks import HOOKS
from tests.system.daemons import wait_for
from tests.system.nodes import FakeNode
from tests.system.test_runner import RunnerTestCase

POWER = '{"power_address": "192.0.2.7", "power_user": "stanchion", "power_pass": "hidden-from-everybody"}'
REPORT = {
    "event_type": "start", "origin": "cloudinit", "name": "modules-final", "description": "running modules for final",
    "timestamp": 1700000000.0,
}  # fmt: skip


class RaisingTests(RunnerTestCase):
    program: ClassVar[tuple[str, ...]] = ("-m", "tests.system.raising")

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        with self.connection.cursor() as cursor:
            cursor.execute(statement)
            return list(cursor.fetchall())

    def test_all_scripts_run_and_all_outputs_are_kept_and_every_step_that_failed_is_told(self) -> None:
        self.start_rack()
        node = self.make_node()
        # What cloud-init reports and what there is to say of a machine's power control does not come from the runner.
        others = FakeNode(self.region, self.system_id, "").with_token()
        answer = others.signal("WORKING", power_type="ipmi", power_parameters=POWER)
        self.assertEqual(answer.status, 200, answer)
        answer = others.request("POST", f"status/{self.system_id}", json.dumps(REPORT).encode())
        self.assertIn(answer.status, (200, 204), answer)
        node.start(["/bin/sh", str(self.user_data())])

        # To the runner, all is as if nothing were wrong: the region has taken all it said.
        scripts = self.builtins()
        self.assertEqual(node.ended(), 0, node.text)
        self.assertIn(f"summary: {len(scripts)} passed, 0 failed, 0 undelivered; final signal OK", node.text)
        self.assertNotIn("WARNING", node.text)
        self.assertNotIn("ERROR", node.text)

        machine = wait_for(
            lambda: (seen := self.machine())["status_name"] != "Commissioning" and seen, "the end of commissioning"
        )
        self.assertEqual(machine["status_name"], "Failed commissioning")
        self.assertEqual(
            self.sql("SELECT script_name, status, exit_status FROM script_result ORDER BY script_name"),
            [(name, 2, 0) for name in sorted(scripts)],
        )
        self.check_outputs(node.directory.glob("kept/*/out/*"), scripts)

        # Nothing of what the steps did before they raised is left.
        [(cpus, disks, power)] = self.sql("SELECT cpu_count, (SELECT count(*) FROM block_device), power_type FROM node")
        self.assertEqual((cpus, disks, power), (0, 0, "manual"))
        failed = self.sql(
            """SELECT step, coalesce(script_name, ''), error_type, error, step_failure.correlation FROM step_failure
               LEFT JOIN script_result ON script_result.id = script_result_id"""
        )
        self.assertEqual({step for step, *_ in failed}, set(WHAT))
        self.assertGreaterEqual({script for step, script, *_ in failed if step == "hook"}, set(HOOKS) & set(scripts))

        shown = self.region.command("node", "show", "this")
        log = self.region.log.read_text()
        self.assertIn("The region failed at what it makes of the outputs, not the machine", shown)
        for step, script, kind, error, correlation in failed:
            self.assertEqual((kind, error), ("__main__.Injected", f"injected into {step}"))
            self.assertRegex(shown, rf"(?m)^{step} +{re.escape(script)} +Injected: {error} .*{correlation}")
            self.assertEqual(log.count(f"failed [{correlation}]"), 1, correlation)
        self.assertNotIn("hidden-from-everybody", shown + log)
        self.check_rack()

    def check_outputs(self, directories: Any, scripts: list[str]) -> None:
        """What the region has of each script is what is on the machine, byte for byte."""
        stored = {
            (f"{script}.{number}", name): bytes(content)
            for script, number, name, content in self.sql(
                """SELECT script_name, script_result.id, script_output.name, content
                   FROM script_output JOIN script_result ON script_result.id = script_result_id"""
            )
        }
        found = 0
        for directory in directories:
            for name, ending in (("output", ""), ("stdout", ".out"), ("stderr", ".err")):
                path = directory / (directory.name + ending)
                self.assertEqual(stored.get((directory.name, name), b""), path.read_bytes(), path)
            found += 1
        self.assertEqual(found, len(scripts))
