"""Commissioning over real HTTP: a machine that the test plays, real daemons and PostgreSQL, and faults between them."""

from __future__ import annotations

import atexit
import base64
import shutil
from functools import cache
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from tests.region.test_hardware_commissioning import OUTPUTS
from tests.system.daemons import Region, make_directory, wait_for
from tests.system.nodes import FakeNode

MAC = "02:00:00:00:00:01"


@cache
def shared_region() -> Region:
    """One region for all of these, as it takes longest to start; it ends with the process of the tests."""
    directory = make_directory()
    atexit.register(shutil.rmtree, directory)
    region = Region(directory)
    atexit.register(region.kill)
    region.start()
    region.make_key()
    return region


class CommissioningTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.region = shared_region()

    def make_node(self) -> FakeNode:
        """A machine that is being commissioned, and is forgotten after the test."""
        node = FakeNode.create(self.region, MAC, hostname="node-1", testing_scripts="none")
        self.addCleanup(self.region.api, f"machines/{node.system_id}/", "DELETE")
        return node

    def run_scripts(self, node: FakeNode, scripts: list[dict[str, Any]], **outputs: bytes) -> None:
        """Report each script, with its own output or the one that is given for it."""
        for script in scripts:
            known = {"00-support-info": b"a machine\n", **OUTPUTS}
            output = outputs.get(script["name"].rpartition("-")[2], known.get(script["name"], b""))
            answer = node.report(script, output)
            self.assertEqual((answer.status, answer.body), (200, b"OK"))

    def end(self, node: FakeNode) -> str:
        """Say that all was run, and wait until the region has made of it what it can."""
        self.assertEqual(node.signal("OK", error="all scripts passed").status, 200)
        found: str = wait_for(
            lambda: (name := node.status_name) != "Commissioning" and name, "the end of commissioning"
        )
        return found

    def test_a_machine_is_commissioned_to_ready(self) -> None:
        node = self.make_node()
        self.assertEqual(node.status_name, "Commissioning")
        self.assertEqual(node.request("GET", "//2012-03-01//meta-data/local-hostname").body, b"node-1")
        self.assertIn(b"STANCHION_RUNNER", node.request("GET", "latest/user-data").body)
        scripts = node.scripts()
        self.assertEqual({script["name"] for script in scripts}, {"00-support-info", *OUTPUTS})
        self.run_scripts(node, scripts[:3])
        self.assertEqual(node.scripts(), scripts[3:])
        self.run_scripts(node, scripts[3:])
        self.assertEqual(node.request("GET", "latest/maas-scripts").status, 204)
        self.assertEqual(self.end(node), "Ready")
        machine = self.region.get(f"machines/{node.system_id}/")
        self.assertEqual((machine["cpu_count"], machine["memory"]), (63, 8192))
        self.assertEqual(machine["boot_interface"]["mac_address"], MAC)
        for name, result in node.results().items():
            self.assertEqual(base64.b64decode(result["stdout"]), OUTPUTS.get(name, b"a machine\n"), name)
            self.assertEqual((result["status_name"], result["exit_status"]), ("Passed", 0), name)
        self.assertEqual([event for event in node.events() if event["level"] in ("ERROR", "WARNING")], [])
        # The answer to the last signal was lost, so the machine sends it again: nothing changes.
        self.assertEqual(node.signal("OK", error="all scripts passed").status, 200)
        self.assertEqual(node.status_name, "Ready")

    def test_an_output_that_cannot_be_processed_is_kept_and_named_and_the_rest_goes_on(self) -> None:
        node = self.make_node()
        self.run_scripts(node, node.scripts(), lshw=b"<list><node")
        self.assertEqual(self.end(node), "Failed commissioning")
        results = node.results()
        bad = results.pop("10-lshw")
        self.assertEqual(base64.b64decode(bad["stdout"]), b"<list><node")
        self.assertEqual((bad["status_name"], bad["exit_status"], bad["post_processing"]), ("Passed", 0, "failed"))
        self.assertEqual({result["post_processing"] for result in results.values()}, {"done", "none"})
        (event,) = [event for event in node.events() if event["type"] == "Script result lookup or storage error"]
        self.assertIn("10-lshw", event["description"])
        correlation = event["correlation"]
        self.assertEqual(bad["correlation"], correlation)
        log = self.region.log.read_text()
        self.assertEqual(log.count(correlation), 1)
        self.assertIn("Traceback (most recent call last)", log.partition(correlation)[2])
        shown = self.region.command("node", "show", "node-1")
        for words in ("Failed commissioning", "10-lshw", "OutputUnusable", "cannot be used", correlation, "What to do"):
            self.assertIn(words, shown)
        self.assertIn(correlation, self.region.command("events", "--level", "error"))

    def test_a_script_that_failed_is_the_scripts_failure(self) -> None:
        node = self.make_node()
        scripts = node.scripts()
        self.run_scripts(node, scripts[1:])
        self.assertEqual(node.report(scripts[0], b"no such tool", 3).status, 200)
        self.assertEqual(self.end(node), "Failed commissioning")
        result = node.results()[scripts[0]["name"]]
        self.assertEqual((result["status_name"], result["exit_status"]), ("Failed", 3))
        self.assertNotEqual(result["post_processing"], "failed")
        shown = self.region.command("node", "show", "node-1")
        self.assertIn(scripts[0]["name"], shown)

    def test_a_region_that_is_killed_in_the_middle_has_lost_nothing(self) -> None:
        node = self.make_node()
        scripts = node.scripts()
        self.run_scripts(node, scripts[:4])
        self.region.kill()
        self.region.start()
        # What was answered is stored; the machine sends the last one again, as it cannot know that.
        self.assertEqual(node.scripts(), scripts[4:])
        self.run_scripts(node, scripts[3:])
        self.assertEqual(node.signal("OK").status, 200)
        self.region.kill()
        self.region.start()
        wait_for(lambda: node.status_name == "Ready", "the node to be ready")
        self.assertEqual({result["status_name"] for result in node.results().values()}, {"Passed"})
        self.assertFalse(any(result["late"] for result in node.results().values()))

    def test_a_machine_that_was_aborted_is_told_to_stop_and_what_it_still_sends_is_kept(self) -> None:
        node = self.make_node()
        scripts = node.scripts()
        status, body, _ = self.region.api(f"machines/{node.system_id}/?op=abort", "POST", {"comment": "not now"})
        self.assertEqual(status, 200, body)
        answer = node.report(scripts[0], b"late words")
        self.assertEqual((answer.status, answer.headers["X-Stanchion-Stop"]), (200, "true"))
        self.assertEqual(node.scripts(), [])
        result = node.results()[scripts[0]["name"]]
        self.assertEqual(result["status_name"], "Aborted")
        self.assertEqual(len(result["late"]), 1)
