"""The API of scripts and of results, as clients use it, over a real database."""

from __future__ import annotations

import base64
import io
import json
import tarfile
from typing import Any

from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from region.nodes.statuses import ResultType, ScriptStatus
from region.nodes.values import NodeName
from region.scripts import results
from region.scripts.downloads import as_tar, as_text, files_of
from region.scripts.results import Result, Run
from region.scripts.store import insert_script
from region.scripts.values import ScriptFields
from tests.examples import examples
from tests.region.fakes import NOW
from tests.region.test_api_images import StoresTestCase
from tests.region.test_scripts_metadata import script
from tests.region.web import form

PLAIN = b"#!/bin/sh\necho hello\n"


def multipart(*fields: tuple[str, bytes, str]) -> dict[str, Any]:
    """A body with these fields: name, value, and what else its head has."""
    body = b"".join(
        f'--B\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + value + b"\r\n"
        for name, value, more in fields
    )
    return {"body": body + b"--B--\r\n", "Content_Type": "multipart/form-data; boundary=B"}


class ScriptsTests(StoresTestCase):
    async def add(self, name: str, content: bytes = PLAIN, **fields: str) -> Any:
        response = await self.ask("POST", "scripts/", **form(name=name, script=content, **fields))
        self.assertEqual(response.status, 201, response.text)
        return response.json

    async def test_a_script_is_added_and_read_in_the_form_that_clients_know(self) -> None:
        content = script(
            "title: Speed", "hardware_type: storage", "parallel: instance", "timeout: 00:10:00", "packages: {apt: fio}",
            "parameters: {storage: {type: storage}}", "results: {speed: {title: MB/s}}",
        )  # fmt: skip
        response = await self.ask(
            "POST", "scripts/",
            **multipart(("name", b"disk-speed", ""), ("script", content, '; filename="x"'), ("comment", b"new", "")),
        )  # fmt: skip
        self.assertEqual(response.status, 201, response.text)
        self.assertEqual(response.headers["Location"], "/MAAS/api/2.0/scripts/disk-speed/")
        made = response.json
        [version] = made.pop("history")
        self.assertEqual((version["comment"], version.keys()), ("new", {"id", "comment", "created"}))
        self.assertEqual(
            made,
            {
                "id": 1, "name": "disk-speed", "title": "Speed", "description": "", "tags": [], "type": 2,
                "type_name": "Testing script", "hardware_type": 3, "hardware_type_name": "Storage", "parallel": 1,
                "parallel_name": "Run along other instances of this script",
                "results": {"speed": {"title": "MB/s"}}, "parameters": {"storage": {"type": "storage"}},
                "packages": {"apt": ["fio"]}, "timeout": "0:10:00", "destructive": False, "for_hardware": [],
                "may_reboot": False, "recommission": False, "apply_configured_networking": False, "default": False,
                "resource_uri": "/MAAS/api/2.0/scripts/disk-speed/",
            },
        )  # fmt: skip
        for path in ("scripts/disk-speed/", "scripts/disk-speed", "scripts/1/"):
            self.assertEqual((await self.ask("GET", path)).json["name"], "disk-speed")
        download = await self.ask("GET", "scripts/disk-speed/?op=download")
        self.assertEqual((download.body, download.headers["Content-Type"]), (content, "application/octet-stream"))

    async def test_the_list_is_narrowed_and_has_contents_where_they_are_asked_for(self) -> None:
        await self.add("a", tags="x,y", type="commissioning")
        await self.add("b", hardware_type="cpu")
        for query, wanted in (
            ("", "ab"), ("?type=testing", "b"), ("?type=0", "a"), ("?hardware_type=cpu", "b"), ("?filters=y,z", "a"),
        ):  # fmt: skip
            self.assertEqual("".join(one["name"] for one in (await self.ask("GET", f"scripts/{query}")).json), wanted)
        found = (await self.ask("GET", "scripts/?include_script=true&filters=a")).json
        self.assertEqual(base64.b64decode(found[0]["history"][0]["data"]), PLAIN)
        response = await self.ask("GET", "scripts/?type=release")
        self.assertEqual((response.status, list(response.json)), (400, ["type"]))

    async def test_what_is_wrong_is_said_by_field(self) -> None:
        for fields, wrong in (
            ({"name": "a"}, ["script"]), ({"script": PLAIN}, ["name"]), ({"name": "a", "script": "x"}, ["script"]),
            ({"name": "a/b", "script": PLAIN, "timeout": "soon"}, ["name", "timeout"]),
            ({"name": "a", "script": PLAIN, "for_hardware": "pci:1:2"}, ["for_hardware"]),
            ({"name": "a", "script": script("a: [")}, ["script"]), ({"name": "a", "script": script("b: 1")}, ["b"]),
        ):  # fmt: skip
            response = await self.ask("POST", "scripts/", **form(**fields))
            self.assertEqual((response.status, list(response.json)), (400, wrong), response.text)
        response = await self.ask("POST", "scripts/", **form(name="a", script=PLAIN, type="test", script_type="0"))
        self.assertEqual(response.status, 400)

    async def test_fields_and_contents_are_changed(self) -> None:
        first = await self.add("a")
        response = await self.ask("PUT", "scripts/a/", **form(title="A", timeout="1:00:00", destructive="true"))
        self.assertEqual((response.json["title"], response.json["timeout"], response.json["destructive"]),
                         ("A", "1:00:00", True))  # fmt: skip
        response = await self.ask("PUT", "scripts/a/", **form(script=script("title: B"), comment="two"))
        self.assertEqual((response.json["title"], len(response.json["history"])), ("B", 2))
        old = await self.ask("GET", f"scripts/a/?op=download&rev={first['history'][0]['id']}")
        self.assertEqual(old.body, PLAIN)
        response = await self.ask("POST", "scripts/a/?op=revert", **form(to="-1"))
        self.assertEqual(response.json["history"][0]["comment"], "Version 1 again")
        self.assertEqual((await self.ask("GET", "scripts/a/?op=download")).body, PLAIN)
        self.assertEqual((await self.ask("POST", "scripts/a/?op=revert", **form(to="x"))).status, 400)
        self.assertEqual((await self.ask("POST", "scripts/a/?op=revert", **form(to="99"))).status, 404)

    async def test_tags_come_and_go(self) -> None:
        await self.add("a")
        self.assertEqual((await self.ask("POST", "scripts/a/?op=add_tag", **form(tag="x"))).json["tags"], ["x"])
        self.assertEqual((await self.ask("POST", "scripts/a/?op=remove_tag", **form(tag="x"))).json["tags"], [])
        self.assertEqual((await self.ask("POST", "scripts/a/?op=add_tag", **form(tag="x y"))).status, 400)

    async def test_a_script_is_deleted_and_what_is_not_there_is_404(self) -> None:
        await self.add("a")
        self.assertEqual((await self.ask("DELETE", "scripts/a/")).status, 204)
        for method, path in (("GET", "a/"), ("GET", "a/?op=download"), ("PUT", "a/"), ("DELETE", "a/")):
            response = await self.ask(method, f"scripts/{path}")
            self.assertEqual((response.status, response.text), (404, "There is no script 'a'."))
        self.assertEqual((await self.ask("GET", "scripts/%00/")).status, 404)

    async def test_a_built_in_script_is_not_changed(self) -> None:
        await self.database.transact(
            lambda transaction: insert_script(transaction, ScriptFields("10-a"), PLAIN, builtin=True)
        )
        self.assertIs((await self.ask("GET", "scripts/10-a/")).json["default"], True)
        for method, query in (("PUT", ""), ("DELETE", ""), ("POST", "?op=revert"), ("POST", "?op=add_tag")):
            fields = {"": {}, "?op=revert": {"to": "0"}, "?op=add_tag": {"tag": "x"}}[query]
            response = await self.ask(method, f"scripts/10-a/{query}", **form(**fields))
            self.assertEqual(response.status, 409)
            self.assertIn("built in", response.text)


class ResultsTests(StoresTestCase):
    def setUp(self) -> Any:
        started = super().setUp()
        return started.addCallback(lambda _: self.run_async(self.fill()))

    async def fill(self) -> None:
        """A node with an old commissioning, and a current one whose results are of every kind."""
        for statement in (
            "INSERT INTO node (system_id, hostname, architecture) VALUES ('abc123', 'n1', 'amd64/generic')",
            "INSERT INTO node (system_id, hostname, architecture) VALUES ('abc124', 'n2', 'amd64/generic')",
            "INSERT INTO script_set (node_id, result_type, created, ended) VALUES (1, 0, now(), now())",
            "INSERT INTO script_set (node_id, result_type, created) VALUES (1, 0, now() - interval '1h')",
            "INSERT INTO script_set (node_id, result_type) VALUES (1, 2)",
            "UPDATE node SET commissioning_set_id = 2 WHERE id = 1",
            "INSERT INTO node_heartbeat (node_id) VALUES (1)",
            "INSERT INTO script (name, script_type, hardware_type, tags) VALUES ('b', 0, 3, '{disk}')",
            """INSERT INTO script_result (script_set_id, script_id, script_name, status, exit_status, started, ended,
                   runtime, parameters)
               VALUES (2, 1, 'b', 2, 0, timestamptz '2026-01-01 00:00:00Z', timestamptz '2026-01-01 00:00:12Z', 12.2,
                       '{"secret": {"type": "password", "value": "hunter2"}}')""",
            """INSERT INTO script_result (script_set_id, script_name, status, exit_status, post_processing,
                   post_processing_error, correlation) VALUES (2, 'a', 2, 0, 'failed', 'ValueError: no', 'c0ffee')""",
            "INSERT INTO script_result (script_set_id, script_name) VALUES (2, 'c')",
            "INSERT INTO late_result (script_result_id, signal_status, exit_status) VALUES (1, 'WORKING', 3)",
            r"INSERT INTO script_output (script_result_id, name, content) VALUES (1, 'output', '\x00ff0a')",
            "INSERT INTO script_output (script_result_id, name, content) VALUES (1, 'stderr', 'oh')",
            "INSERT INTO script_output (script_result_id, late_result_id, name, content) VALUES (1, 1, 'output', 'L')",
        ):
            await self.database.execute(statement)

    async def get(self, query: str) -> Any:
        response = await self.ask("GET", f"nodes/abc123/results/{query}")
        self.assertEqual(response.status, 200, response.text)
        return response.json

    async def test_runs_are_listed_newest_first_and_by_type(self) -> None:
        for query, wanted in (
            ("", [3, 2, 1]),
            ("?type=commissioning", [2, 1]),
            ("?type=2", [3]),
            ("?type=install", []),
        ):
            self.assertEqual([one["id"] for one in await self.get(query)], wanted)
        empty = (await self.get("?type=testing"))[0]
        self.assertEqual((empty["status"], empty["status_name"], empty["type_name"]), (-1, "Empty", "Testing"))

    async def test_a_run_is_as_clients_know_it_and_says_what_the_region_made_of_each_result(self) -> None:
        run = await self.get("current-commissioning/")
        found = {one["name"]: one for one in run.pop("results")}
        self.assertEqual(list(found), ["a", "b", "c"])
        self.assertIsNotNone(run.pop("last_ping"))
        self.assertIsNotNone(run.pop("created"))
        self.assertEqual(
            run,
            {
                "id": 2, "system_id": "abc123", "type": 0, "type_name": "Commissioning", "status": 0,
                "status_name": "Pending", "started": "Thu, 01 Jan 2026 00:00:00 +0000", "ended": None, "runtime": "",
                "signalled": None, "processed": None, "resource_uri": "/MAAS/api/2.0/nodes/abc123/results/2/",
            },
        )  # fmt: skip
        good, bad = found["b"], found["a"]
        self.assertEqual((good["status_name"], good["exit_status"], good["runtime"]), ("Passed", 0, "0:00:12"))
        self.assertEqual((good["script_id"], good["post_processing"]), (1, "none"))
        self.assertEqual(good["parameters"]["secret"]["value"], "********")
        self.assertEqual([(one["status"], one["exit_status"]) for one in good["late"]], [("WORKING", 3)])
        self.assertIn("kept as late", good["warning"])
        self.assertEqual((bad["status_name"], bad["post_processing"]), ("Passed", "failed"))
        self.assertEqual((bad["post_processing_error"], bad["correlation"]), ("ValueError: no", "c0ffee"))
        self.assertIn("ValueError: no", bad["warning"])
        self.assertIn("c0ffee", bad["warning"])
        self.assertEqual(found["c"]["warning"], "")
        self.assertNotIn("output", good)

    async def test_outputs_come_byte_for_byte_when_they_are_asked_for(self) -> None:
        [found] = (await self.get("2/?include_output=1&filters=b"))["results"]
        outputs = {name: base64.b64decode(found[name]) for name in ("output", "stdout", "stderr", "result")}
        self.assertEqual(outputs, {"output": b"\x00\xff\n", "stdout": b"", "stderr": b"oh", "result": b""})
        self.assertEqual(base64.b64decode(found["late"][0]["output"]), b"L")

    async def test_results_are_narrowed(self) -> None:
        for query, wanted in (
            ("filters=a", "a"), ("filters=disk", "b"), ("filters=1,c", "bc"), ("filters=none", ""),
            ("hardware_type=storage", "b"), ("hardware_type=storage&filters=a", ""),
        ):  # fmt: skip
            run = await self.get(f"2/?{query}")
            self.assertEqual("".join(one["name"] for one in run["results"]), wanted, query)

    async def test_too_much_at_once_is_refused_before_it_is_read(self) -> None:
        self.patch(results, "OUTPUT_LIMIT", 3)
        response = await self.ask("GET", "nodes/abc123/results/?include_output=1")
        self.assertEqual(response.status, 400)
        self.assertIn("These outputs have 6 bytes, and at most 3", response.text)
        self.assertEqual((await self.ask("GET", "nodes/abc123/results/2/?op=download&filters=b")).body, b"\x00\xff\n")

    async def test_outputs_are_downloaded(self) -> None:
        head = b"-" * 38 + b" %s " + b"-" * 39 + b"\n"
        for query, wanted in (
            ("filters=b", b"\x00\xff\n"), ("filters=b&output=stderr", b"oh"), ("filters=b&output=result", b""),
            ("filters=a,b", head % b"a" + b"\n" + head % b"b" + b"\x00\xff\n\n"),
        ):  # fmt: skip
            response = await self.ask("GET", f"nodes/abc123/results/2/?op=download&{query}")
            self.assertEqual((response.status, response.body), (200, wanted), query)
        response = await self.ask(
            "GET", "nodes/abc123/results/current-commissioning/?op=download&output=all&filetype=tar.xz"
        )
        with tarfile.open(fileobj=io.BytesIO(response.body), mode="r:xz") as tar:
            names = tar.getnames()
        folder = "n1-commissioning-2"
        self.assertEqual(names, [f"{folder}/{name}" for name in ("a", "b", "b.err", "b.late-1", "c")])
        self.assertIn(folder, response.headers["Content-Disposition"])

    async def test_what_is_not_there_is_404(self) -> None:
        for path in (
            "nodes/xxxxxx/results/", "nodes/abc123/results/9/", "nodes/abc124/results/2/",
            "nodes/abc123/results/current-testing/", "nodes/abc123/results/current-installation/",
            "nodes/abc123/results/9/?op=download", "nodes/%00/results/", "nodes/abc123/results/%00/",
        ):  # fmt: skip
            self.assertEqual((await self.ask("GET", path)).status, 404, path)


def result(name: str, number: int, status: ScriptStatus = ScriptStatus.PASSED) -> Result:
    return Result(
        number, name, status, 0, 1.0, NOW, NOW, NOW, NOW, None, None, {}, False, "none", "", "", 0, (),
        {"output": name.encode(), "result": b"r"},
    )  # fmt: skip


def run(*found: Result) -> Run:
    return Run(1, NodeName(1, "abc123", "n1"), ResultType.TESTING, NOW, None, None, None, found)


class PureTests(SynchronousTestCase):
    def test_scripts_that_ran_more_than_once_keep_their_outputs_apart(self) -> None:
        files = files_of(run(result("a", 1), result("a", 2), result("b", 3)), "result")
        self.assertEqual(list(files), ["a.1.yaml", "a.2.yaml", "b.yaml"])
        self.assertEqual(as_text({"b.yaml": files["b.yaml"]}), b"r")
        with tarfile.open(fileobj=io.BytesIO(as_tar(files, "f")), mode="r:xz") as tar:
            self.assertEqual({member.name: member.mode for member in tar}, dict.fromkeys(
                ("f/a.1.yaml", "f/a.2.yaml", "f/b.yaml"), 0o644))  # fmt: skip

    @examples(60)
    @given(
        st.lists(st.sampled_from(("/etc/passwd", "../../.ssh/x", "..", ".", "a", "a.out", "a.1", "a\x1b\n", "\u202e"))
                 | st.text(min_size=1), min_size=1, max_size=4),
        st.sampled_from(("combined", "all")),
    )  # fmt: skip
    def test_whatever_a_node_calls_what_it_sends_no_file_leaves_its_folder_nor_takes_another_s_place(
        self, names: list[str], kind: str
    ) -> None:
        found = [result(name, number) for number, name in enumerate(names, 1)]
        with_stdout = [evolve(one, outputs={**one.outputs, "stdout": b"s"}) for one in found]
        files = files_of(run(*with_stdout), kind)
        self.assertEqual(len(files), len(names) * (3 if kind == "all" else 1))
        with tarfile.open(fileobj=io.BytesIO(as_tar(files, "f")), mode="r:xz") as tar:
            for member in tar:
                self.assertRegex(member.name, r"\Af/[A-Za-z0-9_][A-Za-z0-9._-]*\Z")

    @examples(60)
    @given(st.lists(st.sampled_from(ScriptStatus), min_size=1, max_size=5))
    def test_a_run_has_ended_when_all_of_it_has(self, statuses: list[ScriptStatus]) -> None:
        found = run(*(result("a", number, status) for number, status in enumerate(statuses)))
        self.assertEqual(found.ended is not None, all(status.is_finished for status in statuses))
        self.assertIn(found.status, statuses)
        assert found.status is not None
        self.assertEqual(found.status.is_finished, found.ended is not None)
        if any(status.is_failure for status in statuses) and found.ended is not None:
            self.assertTrue(found.status.is_failure)
        self.assertEqual(evolve(found, results=()).status, None)

    def test_contents_are_not_in_what_is_logged(self) -> None:
        self.assertNotIn("b'r'", repr(result("a", 1)))
        self.assertIn("<output, result>", repr(result("a", 1)))
        self.assertTrue(json.dumps(repr(run())))
