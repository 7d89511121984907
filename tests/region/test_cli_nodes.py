"""``stanchion node``: what is done with machines, and that whoever looks sees what is wrong and what to do."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from attrs import evolve

from region.api.machine_documents import machine, whole_machine
from region.cli.nodes import PAGE, wait
from region.metadata.userdata import runner_archive
from region.nodes.statuses import NodeStatus, ScriptStatus
from region.nodes.store import BlockDevice, Interface, Node, Problem
from region.nodes.values import NodeName
from rpc.client import Client
from rpc.profile import Profile
from tests.region.test_cli_answers import CommandCase
from tests.rpc.region_server import Told

WHEN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
NODE = Node(
    NodeName(1, "abc234", "node-7"), "", "amd64/generic", NodeStatus.FAILED_COMMISSIONING, NodeStatus.COMMISSIONING,
    WHEN, "Processing what 10-lshw wrote failed.", "", "manual", {}, "uefi", 16384, 8, {}, "flat", {}, "", "", "", WHEN,
    WHEN, None, None, 3, None, WHEN, "OK \x1b[31m", ("big",),
    (Interface(1, "eth0", "physical", "00:16:3e:00:00:0a", True, True, [], [], {}),),
    (BlockDevice(1, "sda", "M", "S", "", 500_000_000_000, 512, ("ssd",)),), [ScriptStatus.PASSED], [],
)  # fmt: skip
PROBLEM = Problem("hook", "10-lshw", "KeyError", "'size'", "c0ffee" * 5 + "aa", WHEN)
RESULT = {
    "id": 5, "name": "10-lshw", "status": 2, "status_name": "Passed", "exit_status": 0, "runtime": "0:00:02",
    "post_processing": "failed", "warning": "The region could not process what the script put out: KeyError: 'size'.",
}  # fmt: skip
RUN = {"id": 3, "type": 0, "type_name": "Commissioning", "status_name": "Passed", "results": [RESULT]}
EVENT = {
    "id": 2, "node": "abc234", "hostname": "node-7", "level": "ERROR", "username": "", "correlation": "c0ffee",
    "created": "Fri, 02 Jan. 2026 03:04:05", "type": "Script result lookup or storage error", "description": "hook",
}  # fmt: skip


class TestShow(CommandCase):
    def told(self, node: Node = NODE, *problems: Problem, runs: Any = (RUN,)) -> None:
        self.region.answers["GET", "machines/node-7/"] = whole_machine(node, problems)
        self.region.answers["GET", "nodes/abc234/results/"] = list(runs)
        self.region.answers["GET", "events/"] = {"count": 1, "events": [EVENT], "next_uri": "", "prev_uri": ""}

    def test_of_a_failed_step_people_see_which_of_which_script_the_error_where_the_log_has_it_and_what_to_do(
        self,
    ) -> None:
        self.told(NODE, PROBLEM)
        status, output, _ = self.stanchion("node", "show", "node-7")
        self.assertEqual(status, 0)
        for text in (
            "node-7 (abc234): Failed commissioning since", "why          Processing what 10-lshw wrote failed.",
            "OK \\x1b[31m", "amd64/generic, 8 CPUs, 16 GiB, uefi", "sda (500 GB)", "eth0 (00:16:3e:00:00:0a)",
            "KeyError: 'size'", PROBLEM.correlation, "the region could not process its output: see above",
            f"journalctl -u stanchion-region | grep -A 40 -e {PROBLEM.correlation}",
            "stanchion node output node-7 10-lshw", "stanchion node commission node-7",
            "Script result lookup or storage error", "hook [c0ffee]",
        ):  # fmt: skip
            self.assertIn(text, output)
        self.assertEqual(self.region.seen[-1].query["id"], ["abc234"])

    def test_what_no_step_of_this_run_explains_is_said_beside_the_result(self) -> None:
        self.told(NODE, runs=({**RUN, "results": [RESULT, {**RESULT, "name": "x", "warning": "2 more came."}]},))
        output = self.stanchion("node", "show", "node-7")[1]
        self.assertIn("could not process what the script put out", output)
        self.assertIn("2 more came.", output)

    def test_of_many_failures_the_first_few_are_searched_for(self) -> None:
        self.told(
            NODE, *(evolve(PROBLEM, correlation=f"{number:032}", error_type="a.b.C") for number in range(9, 0, -1))
        )
        output = self.stanchion("node", "show", "node-7")[1]
        self.assertIn(f"-e {1:032} -e {2:032} -e {3:032} (and so on: 6 more)", output)
        self.assertIn(" C: 'size'", output)

    def test_of_an_output_that_cannot_be_used_people_see_that_the_script_is_to_be_looked_at_and_not_the_region(
        self,
    ) -> None:
        self.told(NODE, evolve(PROBLEM, error_type="OutputUnusable", error="the script printed nothing"))
        _, output, _ = self.stanchion("node", "show", "node-7")
        self.assertIn("What 10-lshw wrote cannot be used", output)
        self.assertIn("the script printed nothing", output)
        self.assertNotIn("The region failed", output)

    def test_only_the_runs_that_the_status_is_about_are_shown(self) -> None:
        self.told(NODE, runs=(RUN, {**RUN, "id": 2, "results": [{**RESULT, "name": "old"}]}))
        self.assertNotIn("old", self.stanchion("node", "show", "node-7")[1])

    def test_programs_get_all_of_it(self) -> None:
        self.told(NODE, PROBLEM)
        document = json.loads(self.stanchion("node", "show", "node-7", "--json")[1])
        self.assertEqual(sorted(document), ["advice", "events", "machine", "results"])
        self.assertEqual(document["machine"]["problems"][0]["step"], "hook")

    def test_each_status_has_its_advice(self) -> None:
        for node_status, heard, said in (
            (NodeStatus.NEW, None, "Commission it: stanchion node commission node-7"),
            (NodeStatus.COMMISSIONING, None, "to be switched on"), (NodeStatus.BROKEN, WHEN, "node mark-fixed node-7"),
            (NodeStatus.FAILED_TESTING, WHEN, "stanchion node test node-7"),
        ):  # fmt: skip
            self.told(evolve(NODE, status=node_status, last_ping=heard, commissioning_set_id=None))
            self.assertIn(said, self.stanchion("node", "show", "node-7")[1])
        self.told(evolve(NODE, status=NodeStatus.READY), runs=({**RUN, "results": [{**RESULT, "warning": ""}]},))
        self.assertNotIn("What to do", self.stanchion("node", "show", "node-7")[1])

    def test_outputs_are_shown_as_they_are_but_for_control_characters(self) -> None:
        self.told()
        path = "nodes/abc234/results/current-testing/"
        self.region.answers["GET", path] = "line\n\tother \x1b[31m\n"
        status, output, _ = self.stanchion("node", "output", "node-7", "a", "b", "--testing")
        self.assertEqual((status, output), (0, "line\n\tother \\x1b[31m\n"))
        self.assertEqual(
            self.region.seen[-1].query,
            {"op": ["download"], "output": ["combined"], "filetype": ["txt"], "filters": ["a,b"]},
        )
        self.region.answers["GET", path] = b"\xff\x00\n"
        self.assertEqual(self.stanchion("node", "output", "node-7", "--testing")[1], "\\xff\\x00\n")
        self.region.answers["GET", path] = ""
        self.assertEqual(self.stanchion("node", "output", "node-7", "--testing")[1], "nothing was written\n")

    def test_what_came_late_is_pointed_at_and_shown(self) -> None:
        self.told(NODE, runs=({**RUN, "results": [{**RESULT, "late": [{"id": 1}]}]},))
        self.assertIn("stanchion node output node-7 --all", self.stanchion("node", "show", "node-7")[1])
        self.region.answers["GET", "nodes/abc234/results/current-commissioning/"] = "late\n"
        self.assertEqual(self.stanchion("node", "output", "node-7", "--all")[1], "late\n")
        self.assertEqual(self.region.seen[-1].query["output"], ["all"])

    def test_one_that_is_not_there_is_the_answer_no(self) -> None:
        self.region.answers["GET", "machines/node-7/"] = Told("There is no machine 'node-7'.", 404)
        for words in (("show", "node-7"), ("output", "node-7")):
            self.assertEqual(self.stanchion("node", *words), (1, "", "stanchion: There is no machine 'node-7'.\n"))


class TestNodes(CommandCase):
    def test_machines_are_listed_page_by_page(self) -> None:
        full = [machine(evolve(NODE, name=NodeName(n, f"{n:06}", f"node-{n}"))) for n in range(PAGE)]
        self.region.answers["GET", "machines/"] = (full, [machine(NODE)])
        status, output, _ = self.stanchion("node", "--status", "ready", "--tag", "big")
        lines = output.splitlines()
        self.assertEqual((status, len(lines)), (0, PAGE + 2))
        self.assertEqual(lines[0].split()[:3], ["NAME", "ID", "STATUS"])
        self.assertEqual(self.region.seen[0].query, {"status": ["ready"], "tags": ["big"], "limit": [str(PAGE)]})
        self.assertEqual(self.region.seen[1].query["after"], [f"{PAGE - 1:06}"])

    def test_none_is_said_to_be_none(self) -> None:
        self.region.answers["GET", "machines/"] = []
        self.assertIn("stanchion node create", self.stanchion("node", "list")[1])
        self.assertEqual(self.stanchion("node", "list", "--tag", "x")[1], "there are no such machines\n")

    def test_a_machine_is_made_and_only_commissioned_on_request(self) -> None:
        self.region.answers["POST", "machines/"] = machine(NODE)
        words = ("node", "create", "--arch", "amd64", "--mac", "00:16:3e:00:00:0a", "--mac", "00:16:3e:00:00:0b")
        status, output, _ = self.stanchion(*words)
        self.assertEqual((status, output.split(";")[0]), (0, "node-7 (abc234) is made"))
        self.assertEqual(
            self.region.seen[-1].form,
            {
                "architecture": ["amd64"], "mac_addresses": ["00:16:3e:00:00:0a", "00:16:3e:00:00:0b"],
                "commission": ["false"],
            },
        )  # fmt: skip
        self.stanchion(*words, "--commission", "--name", "node-7", "--no-tests", "--skip-storage")
        form = self.region.seen[-1].form
        self.assertEqual(
            [form[name] for name in ("commission", "hostname", "testing_scripts", "skip_storage")],
            [["true"], ["node-7"], ["none"], ["true"]],
        )

    def test_a_run_is_begun_with_what_is_asked_for(self) -> None:
        self.region.answers["POST", "machines/node-7/"] = machine(evolve(NODE, status=NodeStatus.COMMISSIONING))
        self.stanchion("node", "commission", "node-7", "--script", "a", "--script", "b", "--test", "c", "--enable-ssh")
        seen = self.region.seen[-1]
        self.assertEqual(seen.query, {"op": ["commission"]})
        self.assertEqual(
            seen.form, {"commissioning_scripts": ["a", "b"], "testing_scripts": ["c"], "enable_ssh": ["true"]}
        )
        self.stanchion("node", "test", "node-7")
        self.assertEqual((self.region.seen[-1].query, self.region.seen[-1].form), ({"op": ["test"]}, {}))

    def test_what_the_status_does_not_allow_is_said_in_the_region_s_words(self) -> None:
        self.region.answers["POST", "machines/node-7/"] = Told("A node that is 'New' cannot take 'abort'.", 409)
        self.assertEqual(
            self.stanchion("node", "abort", "node-7"), (1, "", "stanchion: A node that is 'New' cannot take 'abort'.\n")
        )

    def test_a_machine_is_marked_aborted_and_forgotten(self) -> None:
        self.region.answers["POST", "machines/node-7/"] = machine(evolve(NODE, status=NodeStatus.BROKEN))
        for action in ("mark-broken", "mark-fixed", "abort"):
            status, output, _ = self.stanchion("node", action, "node-7", "--comment", "why")
            self.assertEqual((status, output), (0, "node-7 is Broken now\n"))
            self.assertEqual(self.region.seen[-1].query, {"op": [action.replace("-", "_")]})
            self.assertEqual(self.region.seen[-1].form, {"comment": ["why"]})
        self.region.answers["DELETE", "machines/node-7/"] = Told("", 204)
        self.assertEqual(self.stanchion("node", "delete", "node-7")[0], 0)

    def test_credentials_are_what_cloud_init_reads(self) -> None:
        token = {"consumer_key": "c", "token_key": "t", "token_secret": "s"}
        self.region.answers["GET", "machines/node-7/"] = (token, token, None)
        _, output, _ = self.stanchion("node", "credentials", "node-7")
        url = f"{self.region.url}/MAAS/metadata/"
        self.assertEqual(
            output,
            f"datasource:\n  MAAS:\n    metadata_url: {url}\n"
            "    consumer_key: c\n    token_key: t\n    token_secret: s\n",
        )
        self.assertEqual(
            json.loads(self.stanchion("node", "credentials", "node-7", "--json")[1]), {"metadata_url": url, **token}
        )
        self.assertEqual(self.stanchion("node", "credentials", "node-7")[0], 1)

    def test_the_runner_is_written_to_a_file_that_python_runs_and_how_to_use_it_is_said(self) -> None:
        path = Path(self.mktemp())
        status, output, _ = self.stanchion("node", "runner", str(path))
        self.assertEqual((status, path.read_bytes(), self.region.seen), (0, runner_archive(), []))
        self.assertIn("stanchion node credentials NODE > node.cfg", output)
        self.assertIn(f"python3 {path.name} --config node.cfg", output)
        _, output, _ = self.stanchion("node", "runner", str(path), "--json")
        self.assertEqual(json.loads(output), {"file": str(path), "size": path.stat().st_size})
        status, _, errors = self.stanchion("node", "runner", str(path / "below"))
        self.assertEqual(status, 2)
        self.assertIn(f"{path}/below cannot be written: Not a directory", errors)

    def wait(self, *statuses: Any) -> tuple[int, str, str]:
        output, errors = io.StringIO(), io.StringIO()
        first, *rest = [
            machine(evolve(NODE, status=each)) if isinstance(each, NodeStatus) else each for each in statuses
        ]
        self.region.answers["GET", "machines/abc234/"] = tuple(rest)
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            status = wait(
                Client(Profile(self.region.url, "a:b:c")), argparse.Namespace(json=False), first, lambda seconds: None
            )
        return status, output.getvalue(), errors.getvalue()

    def test_waiting_ends_when_nothing_is_being_done_any_more_and_the_exit_status_tells(self) -> None:
        busy, testing = NodeStatus.COMMISSIONING, NodeStatus.TESTING
        status, output, _ = self.wait(busy, busy, testing, NodeStatus.READY)
        self.assertEqual(status, 0)
        self.assertEqual([line.split(":")[0] for line in output.splitlines()],
                         ["node-7 is commissioning …", "node-7 is testing …", "node-7 is Ready"])  # fmt: skip
        status, output, _ = self.wait(busy, NodeStatus.FAILED_COMMISSIONING)
        self.assertEqual(status, 1)
        self.assertIn("Processing what 10-lshw wrote failed.", output)
        self.assertIn("`stanchion node show node-7`", output)
