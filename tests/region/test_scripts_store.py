"""Scripts in a real database: added, changed, chosen, handed out; and those that are built in."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from psycopg2.extras import Json
from twisted.internet.defer import gatherResults

import node
from region.nodes.statuses import HardwareType, NodeStatus, ResultType, ScriptStatus
from region.scripts.archive import DevicesUnknown, Entry, NodeScripts, build
from region.scripts.builtin import BuiltinInvalid, install
from region.scripts.choose import Choice, ScriptsUnknown, choose
from region.scripts.store import ScriptStore
from region.scripts.values import NoSuchScript, Script, ScriptInvalid, ScriptProtected
from tests.database import DatabaseTestCase
from tests.region.test_scripts_metadata import script

PLAIN = b"#!/bin/sh\necho hello\n"


class ScriptsTestCase(DatabaseTestCase):
    """A database with a store of scripts over it."""

    def setUp(self) -> Any:
        self.store: ScriptStore
        started = super().setUp()
        self.store = ScriptStore(self.database)
        self.scripts = NodeScripts(self.database)
        directory = TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = Path(directory.name)
        return started

    async def add(self, name: str, content: bytes = PLAIN, **given: Any) -> Script:
        return await self.store.create(content, {"name": name, **given})

    async def choose(
        self, kind: ResultType, names: Sequence[str] | None = None, parameters: Any = None
    ) -> tuple[Choice, ...]:
        return await self.database.transact(lambda transaction: choose(transaction, kind, names, parameters))

    async def chosen(self, kind: ResultType, *names: str) -> list[str]:
        return [choice.script_name for choice in await self.choose(kind, names)]

    async def refused(self, error: type[Exception], awaitable: Any) -> str:
        try:
            await awaitable
        except error as raised:
            return str(raised)
        raise self.failureException(f"it did not raise {error.__name__}")

    async def make_node(self, status: NodeStatus = NodeStatus.COMMISSIONING) -> int:
        row = await self.database.one(
            "INSERT INTO node (system_id, hostname, architecture, status) VALUES ('abc123', 'n', 'amd64/generic', %s)"
            " RETURNING id",
            (status.value,),
        )
        assert row is not None
        number: int = row[0]
        return number

    async def set_status(self, node: int, status: NodeStatus) -> None:
        async def change(transaction: Any) -> None:
            await transaction.execute("SET LOCAL stanchion.transition = 'abc123'")
            await transaction.execute("UPDATE node SET status = %s WHERE id = %s", (status.value, node))

        await self.database.transact(change)

    async def begin(self, node: int, kind: ResultType, choices: Sequence[Choice]) -> int:
        """A run of these scripts, which becomes the node's current one."""
        row = await self.database.one(
            "INSERT INTO script_set (node_id, result_type) VALUES (%s, %s) RETURNING id", (node, kind.value)
        )
        assert row is not None
        for choice in choices:
            await self.database.execute(
                """INSERT INTO script_result
                   (script_set_id, script_id, script_version_id, script_name, parameters, timeout_seconds)
                   VALUES (%s, %s, %s, %s, %s, %s)""",
                (
                    row[0], choice.script_id, choice.script_version_id, choice.script_name, Json(choice.parameters),
                    choice.timeout_seconds,
                ),
            )  # fmt: skip
        column = "commissioning_set_id" if kind is ResultType.COMMISSIONING else "testing_set_id"
        await self.database.execute(f"UPDATE node SET {column} = %s WHERE id = %s", (row[0], node))
        number: int = row[0]
        return number


class StoreTests(ScriptsTestCase):
    async def test_a_script_is_as_it_was_given(self) -> None:
        content = script("title: A", "timeout: 60", "parameters: {s: {type: storage}}")
        made = await self.add("a", content, tags="x,y")
        self.assertEqual(await self.store.get("a"), made)
        self.assertEqual(await self.store.get(str(made.id)), made)
        self.assertEqual((made.fields.tags, made.fields.timeout_seconds, made.builtin), (("x", "y"), 60, False))
        self.assertEqual(made.fields.parameters, {"s": {"type": "storage"}})
        self.assertEqual(
            await self.store.content("a"), script("title: A", "timeout: 60", "parameters: {s: {type: storage}}")
        )

    async def test_bytes_that_are_no_text_are_kept(self) -> None:
        content = b"#!/bin/sh\n" + bytes(range(256))
        await self.add("a", content)
        self.assertEqual(await self.store.content("a"), content)

    async def test_a_name_is_taken_once(self) -> None:
        await self.add("a")
        self.assertIn("There is a script named 'a'", await self.refused(ScriptInvalid, self.add("a")))

    async def test_they_are_listed_by_type_hardware_name_and_tag(self) -> None:
        await self.add("a", type="testing", hardware_type="cpu", tags="slow")
        await self.add("b", type="commissioning", hardware_type="cpu")
        await self.add("c", type="testing", hardware_type="storage")

        async def names(**wanted: Any) -> str:
            return "".join(one.name for one in await self.store.list(**wanted))

        self.assertEqual(await names(), "abc")
        self.assertEqual(await names(script_type=ResultType.TESTING), "ac")
        self.assertEqual(await names(hardware_type=HardwareType.CPU), "ab")
        self.assertEqual(await names(filters=["slow", "c"]), "ac")
        self.assertEqual(await names(filters=["slow", "c"], hardware_type=HardwareType.CPU), "a")

    async def test_another_content_is_a_new_version_and_the_old_one_stays(self) -> None:
        first = await self.add("a", tags="x")
        second = await self.store.update("a", {}, script("title: Two"), "more")
        self.assertEqual((second.fields.title, second.fields.tags), ("Two", ("x",)))
        self.assertNotEqual(second.version_id, first.version_id)
        self.assertEqual(await self.store.content("a", first.version_id), PLAIN)
        versions = (await self.store.versions([second], with_content=True))[second.id]
        self.assertEqual([(one.number, one.comment) for one in versions], [(2, "more"), (1, "")])
        self.assertEqual(versions[1].content, PLAIN)

    async def test_the_same_content_is_no_new_version(self) -> None:
        first = await self.add("a", script("timeout: 60"))
        await self.store.update("a", {"timeout": "90"})
        same = await self.store.update("a", {"tags": "y"}, script("timeout: 60"))
        self.assertEqual(same.version_id, first.version_id)
        self.assertEqual((same.fields.timeout_seconds, same.fields.tags), (90, ("y",)))

    async def test_changes_at_the_same_time_are_all_there(self) -> None:
        await self.add("a")
        self.assertEqual((await self.store.add_tag("a", "first")).fields.tags, ("first",))
        await gatherResults(
            [
                self.run_async(self.store.update("a", {"title": "Title"})),
                self.run_async(self.store.update("a", {"timeout": "90"})),
                self.run_async(self.store.add_tag("a", "second")),
            ]
        )
        found = (await self.store.get("a")).fields
        self.assertEqual((found.title, found.timeout_seconds, found.tags), ("Title", 90, ("first", "second")))

    async def test_reverting_makes_a_version_and_loses_none(self) -> None:
        first = await self.add("a")
        await self.store.update("a", {}, script("title: Two"))
        third = await self.store.revert("a", -1)
        self.assertEqual(await self.store.content("a"), PLAIN)
        self.assertEqual(len((await self.store.versions([third]))[third.id]), 3)
        await self.store.update("a", {}, script("title: Four"))
        await self.store.revert("a", first.version_id)
        self.assertEqual(await self.store.content("a"), PLAIN)
        for wrong in (-9, 10**9):
            self.assertIn("no version", await self.refused(NoSuchScript, self.store.revert("a", wrong)))

    async def test_tags_come_and_go(self) -> None:
        await self.add("a", tags="x")
        self.assertEqual((await self.store.add_tag("a", "y")).fields.tags, ("x", "y"))
        self.assertEqual((await self.store.add_tag("a", "x")).fields.tags, ("y", "x"))
        self.assertEqual((await self.store.remove_tag("a", "y")).fields.tags, ("x",))
        await self.refused(ScriptInvalid, self.store.add_tag("a", "not a tag"))

    async def test_what_is_not_there_is_said(self) -> None:
        for awaitable in (
            self.store.get("x"), self.store.get("7"), self.store.content("x"), self.store.update("x", {}),
            self.store.delete("x"), self.store.add_tag("x", "y"), self.store.revert("x", 1), self.store.get("9" * 40),
        ):  # fmt: skip
            self.assertIn("no script", await self.refused(NoSuchScript, awaitable))
        await self.add("a")
        self.assertIn("no version 0", await self.refused(NoSuchScript, self.store.content("a", 0)))

    async def test_a_script_that_a_node_has_still_to_run_is_not_deleted(self) -> None:
        await self.add("a", tags="commissioning")
        node = await self.make_node()
        run = await self.begin(node, ResultType.TESTING, await self.choose(ResultType.TESTING))
        self.assertIn("still to be run by n;", await self.refused(ScriptProtected, self.store.delete("a")))
        await self.database.execute("UPDATE script_result SET status = 2 WHERE script_set_id = %s", (run,))
        await self.store.delete("a")
        self.assertEqual(await self.database.query("SELECT script_name, script_id FROM script_result"), [("a", None)])


class ChooseTests(ScriptsTestCase):
    async def test_commissioning_has_what_is_built_in_and_what_is_not_to_be_named(self) -> None:
        (self.directory / "10-b").write_bytes(script("script_type: commissioning"))
        await install(self.database, self.directory)
        await self.add("mine", type="commissioning", tags="fast")
        await self.add("odd", type="commissioning", tags="noauto")
        await self.add("test", type="testing", tags="commissioning")
        kind = ResultType.COMMISSIONING
        self.assertEqual(await self.chosen(kind), ["10-b", "mine"])
        self.assertEqual(await self.chosen(kind, "none"), ["10-b"])
        self.assertEqual(await self.chosen(kind, "odd"), ["10-b", "odd"])
        self.assertEqual(await self.chosen(kind, "fast", "noauto"), ["10-b", "mine", "odd"])

    async def test_testing_has_what_is_named_and_by_default_what_is_for_commissioning(self) -> None:
        first = await self.add("a", tags="commissioning,cpu")
        await self.add("b", tags="cpu")
        await self.add("wipe", tags="commissioning,cpu", destructive=True)
        kind = ResultType.TESTING
        self.assertEqual(await self.chosen(kind), ["a"])
        self.assertEqual(await self.chosen(kind, "none"), [])
        self.assertEqual(await self.chosen(kind, "cpu"), ["a", "b"])
        self.assertEqual(await self.chosen(kind, str(first.id), "wipe"), ["a", "wipe"])
        self.assertEqual(await self.chosen(kind, "destructive"), ["wipe"])

    async def test_what_names_nothing_is_said_with_what_there_is(self) -> None:
        await self.add("a")
        await self.add("c", type="commissioning")
        message = await self.refused(ScriptsUnknown, self.choose(ResultType.TESTING, ["a", "c"]))
        self.assertEqual(message, "no testing script has the name, number or tag 'c'; there are: a")

    async def test_a_choice_has_the_newest_version_and_the_values(self) -> None:
        content = script("parameters: {runtime: {type: runtime, default: 5}, storage: {type: storage}}", "timeout: 60")
        await self.add("a")
        made = await self.store.update("a", {}, content)
        [found] = await self.choose(ResultType.TESTING, ["a"], {"a": {"runtime": "9"}})
        self.assertEqual(
            found,
            Choice(
                made.id, made.version_id, "a", 60,
                {"runtime": {"type": "runtime", "value": 9}, "storage": {"type": "storage", "value": "all"}},
            ),
        )  # fmt: skip

    async def test_a_script_that_is_chosen_is_not_deleted_before_that_is_written(self) -> None:
        await self.add("a")
        node_id = await self.make_node()
        deleting: list[Any] = []

        async def begin(transaction: Any) -> None:
            [chosen] = await choose(transaction, ResultType.TESTING, ["a"])
            deleting.append(self.run_async(self.refused(ScriptProtected, self.store.delete("a"))))
            await transaction.query(
                """WITH run AS (INSERT INTO script_set (node_id, result_type) VALUES (%s, 2) RETURNING id),
                        result AS (INSERT INTO script_result (script_set_id, script_id, script_version_id, script_name)
                                   SELECT id, %s, %s, 'a' FROM run)
                   SELECT id FROM run""",
                (node_id, chosen.script_id, chosen.script_version_id),
            )
            await transaction.execute("UPDATE node SET testing_set_id = (SELECT max(id) FROM script_set)")

        await self.database.transact(begin)
        self.assertIn("still to be run by n", await deleting[0])

    async def test_parameters_that_cannot_be_are_refused(self) -> None:
        await self.add("a")
        for parameters in ({"a": {"x": "1"}}, {"b": {"x": "1"}}):
            await self.refused(ScriptsUnknown, self.choose(ResultType.TESTING, ["a"], parameters))


class ArchiveTests(ScriptsTestCase):
    async def unpacked(self, node: int) -> tuple[Mapping[str, tuple[int, bytes]], Any]:
        """The members, with mode and content, and the index of what the node is handed."""
        archive = await self.scripts.pending(node)
        assert archive is not None
        members = {}
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r|") as tar:
            for member in tar:
                content = tar.extractfile(member)
                assert content is not None
                members[member.name] = (member.mode, content.read())
        self.assertEqual(list(members), sorted(members))
        return members, json.loads(members["index.json"][1])

    async def index(self, node: int) -> list[tuple[str, int]]:
        """The names and results of what is listed, commissioning first."""
        _, found = await self.unpacked(node)
        return [(one["name"], one["script_result_id"]) for listed in found["1.0"].values() for one in listed]

    async def test_a_node_is_handed_its_scripts_with_how_to_run_them(self) -> None:
        content = script("timeout: 90", "hardware_type: cpu", "parallel: any", "packages: {apt: [fio]}")
        commissioning = await self.add("c", PLAIN, type="commissioning")
        testing = await self.add("t", content, tags="commissioning")
        node = await self.make_node()
        for kind in (ResultType.COMMISSIONING, ResultType.TESTING):
            await self.begin(node, kind, await self.choose(kind))
        members, index = await self.unpacked(node)
        self.assertEqual(members["commissioning/c"], (0o755, PLAIN))
        self.assertEqual(members["testing/t"], (0o755, content))
        self.assertEqual(members["index.json"][0], 0o644)
        common = {"for_hardware": [], "may_reboot": False, "has_started": False, "parameters": {}}
        self.assertEqual(
            index,
            {
                "1.0": {
                    "commissioning_scripts": [
                        {
                            "name": "c", "path": "commissioning/c", "script_result_id": 1, "timeout_seconds": 0,
                            "script_version_id": commissioning.version_id, "parallel": 0, "hardware_type": 0,
                            "packages": {}, **common,
                        }
                    ],
                    "testing_scripts": [
                        {
                            "name": "t", "path": "testing/t", "script_result_id": 2, "timeout_seconds": 90,
                            "script_version_id": testing.version_id, "parallel": 2, "hardware_type": 1,
                            "packages": {"apt": ["fio"]}, **common,
                        }
                    ],
                }
            },
        )  # fmt: skip

    async def test_it_lists_what_is_unfinished_in_the_current_runs_alone(self) -> None:
        for name in ("a", "b", "c"):
            await self.add(name, type="commissioning")
        node = await self.make_node()
        choices = await self.choose(ResultType.COMMISSIONING)
        await self.begin(node, ResultType.COMMISSIONING, choices)
        await self.begin(node, ResultType.COMMISSIONING, choices)
        self.assertEqual(await self.index(node), [("a", 4), ("b", 5), ("c", 6)])
        await self.database.execute("UPDATE script_result SET status = 2 WHERE id = 4")
        await self.database.execute("UPDATE script_result SET status = 1 WHERE id = 5")
        await self.database.execute(
            "INSERT INTO script_output (script_result_id, name, content) VALUES (5, 'stdout', 'x')"
        )
        members, index = await self.unpacked(node)
        started = {one["name"]: one["has_started"] for one in index["1.0"]["commissioning_scripts"]}
        self.assertEqual(started, {"b": True, "c": False})
        self.assertEqual(members["out/b.5.out"], (0o644, b"x"))
        await self.database.execute("UPDATE script_result SET status = 5")
        self.assertIsNone(await self.scripts.pending(node))

    async def test_a_node_that_is_not_there_or_has_no_run_has_no_scripts(self) -> None:
        self.assertIsNone(await self.scripts.pending(7))
        self.assertIsNone(await self.scripts.pending(await self.make_node()))

    async def test_commissioning_scripts_are_for_a_node_that_is_commissioning(self) -> None:
        await self.add("c", type="commissioning")
        await self.add("t", tags="commissioning")
        node = await self.make_node(NodeStatus.TESTING)
        for kind in (ResultType.COMMISSIONING, ResultType.TESTING):
            await self.begin(node, kind, await self.choose(kind))
        self.assertEqual(await self.index(node), [("t", 2)])

    async def test_a_version_that_was_replaced_meanwhile_is_the_one_that_is_run(self) -> None:
        await self.add("t", tags="commissioning")
        node = await self.make_node()
        await self.begin(node, ResultType.TESTING, await self.choose(ResultType.TESTING))
        await self.store.update("t", {}, b"#!/bin/sh\necho new\n")
        members, _ = await self.unpacked(node)
        self.assertEqual(members["testing/t"][1], PLAIN)

    async def test_tests_of_disks_get_one_each_when_they_are_about_to_run(self) -> None:
        await self.add("t", script("parameters: {storage: {type: storage}}"), tags="commissioning")
        node = await self.make_node()
        await self.begin(node, ResultType.TESTING, await self.choose(ResultType.TESTING))
        _, index = await self.unpacked(node)
        [one] = index["1.0"]["testing_scripts"]
        self.assertEqual(one["parameters"], {"storage": {"type": "storage", "value": "all"}})
        for letter in "ab":
            await self.database.execute(
                "INSERT INTO block_device (node_id, name, identity, serial, size) VALUES (%s, %s, %s, %s, 1)",
                (node, f"sd{letter}", letter, letter),
            )
        await self.set_status(node, NodeStatus.TESTING)
        for _ in range(2):
            members, index = await self.unpacked(node)
            listed = index["1.0"]["testing_scripts"]
            self.assertEqual([one["parameters"]["storage"]["value"]["name"] for one in listed], ["sda", "sdb"])
            self.assertEqual([one["path"] for one in listed], ["testing/t", "testing/t"])
            self.assertEqual(sorted(members), ["index.json", "testing/t"])

    async def test_two_requests_at_once_give_each_disk_one_test(self) -> None:
        await self.add("t", script("parameters: {storage: {type: storage}}"), tags="commissioning")
        node = await self.make_node(NodeStatus.TESTING)
        await self.begin(node, ResultType.TESTING, await self.choose(ResultType.TESTING))
        for letter in "ab":
            await self.database.execute(
                "INSERT INTO block_device (node_id, name, identity, size) VALUES (%s, %s, %s, 1)",
                (node, letter, letter),
            )
        await gatherResults([self.run_async(self.scripts.pending(node)) for _ in range(4)])
        self.assertEqual(len(await self.index(node)), 2)

    async def test_a_test_of_what_is_not_there_ends_and_says_so(self) -> None:
        content = script("parameters: {storage: {type: storage}}")
        await self.add("t", content)
        node = await self.make_node(NodeStatus.TESTING)
        for value, status, words in (
            ("all", ScriptStatus.SKIPPED, b"not found any disk"),
            ("sdz", ScriptStatus.FAILED, b"not found the disk 'sdz'"),
        ):
            choices = await self.choose(ResultType.TESTING, ["t"], {"t": {"storage": value}})
            run = await self.begin(node, ResultType.TESTING, choices)
            self.assertIsNone(await self.scripts.pending(node))
            [(found, ended, output)] = await self.database.query(
                """SELECT r.status, r.ended IS NOT NULL, o.content FROM script_result r
                   JOIN script_output o ON o.script_result_id = r.id WHERE script_set_id = %s""",
                (run,),
            )
            self.assertEqual((found, ended), (status.value, True))
            self.assertIn(words, output)

    async def test_while_commissioning_is_processed_tests_of_disks_wait(self) -> None:
        await self.add("t", script("parameters: {storage: {type: storage}}"), tags="commissioning")
        node = await self.make_node()
        await self.begin(node, ResultType.COMMISSIONING, ())
        await self.begin(node, ResultType.TESTING, await self.choose(ResultType.TESTING))
        await self.database.execute("UPDATE script_set SET signalled = now(), signal_status = 'TESTING' WHERE id = 1")
        await self.refused(DevicesUnknown, self.scripts.pending(node))
        await self.database.execute("UPDATE script_set SET ended = now() WHERE id = 1")
        self.assertEqual(len(await self.index(node)), 1)

    def test_two_versions_of_a_script_are_both_there(self) -> None:
        entries = [Entry(n, n, "x", ResultType.TESTING, str(n).encode()) for n in (1, 2)]
        with tarfile.open(fileobj=io.BytesIO(build(entries))) as tar:
            self.assertEqual(sorted(tar.getnames()), ["index.json", "testing/2/x", "testing/x"])


class BuiltinTests(ScriptsTestCase):
    def write(self, name: str, *lines: str) -> None:
        (self.directory / name).write_bytes(script("script_type: commissioning", *lines))

    async def install(self) -> tuple[str, ...]:
        return await install(self.database, self.directory)

    async def test_they_are_installed_once_and_again_when_they_change(self) -> None:
        self.write("10-a")
        self.write("11-b")
        self.assertEqual(await self.install(), ("10-a", "11-b"))
        self.assertEqual(await self.install(), ())
        self.write("10-a", "timeout: 60")
        self.assertEqual(await self.install(), ("10-a",))
        made = await self.store.get("10-a")
        self.assertEqual((made.builtin, made.fields.timeout_seconds), (True, 60))
        versions = await self.store.versions(await self.store.list())
        self.assertEqual([len(versions[one.id]) for one in await self.store.list()], [2, 1])

    async def test_region_processes_that_start_together_install_them_once(self) -> None:
        self.write("10-a")
        other = self.make(self.dsn)
        await other.start()
        done = await gatherResults(
            [self.run_async(install(database, self.directory)) for database in (self.database, other, self.database)]
        )
        self.assertEqual(sorted(done), [(), (), ("10-a",)])
        self.assertEqual(await self.database.one("SELECT count(*) FROM script_version"), (1,))

    async def test_nobody_changes_or_deletes_one(self) -> None:
        self.write("10-a")
        await self.install()
        for awaitable in (
            self.store.update("10-a", {"title": "x"}), self.store.update("10-a", {}, PLAIN), self.store.delete("10-a"),
            self.store.add_tag("10-a", "x"), self.store.remove_tag("10-a", "x"), self.store.revert("10-a", 0),
        ):  # fmt: skip
            self.assertIn("10-a is built in", await self.refused(ScriptProtected, awaitable))

    async def test_one_that_is_wrong_is_named_and_nothing_is_installed(self) -> None:
        self.write("10-a")
        (self.directory / "11-b").write_bytes(b"no script")
        self.assertIn("the built-in script 11-b is wrong", await self.refused(BuiltinInvalid, self.install()))
        self.assertEqual(await self.store.list(), ())

    async def test_all_that_this_program_brings_are_right(self) -> None:
        directory = Path(node.__file__).parent / "builtin"
        files = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
        self.assertEqual(await install(self.database), tuple(files))
        self.assertEqual(await self.chosen(ResultType.COMMISSIONING), files)

    async def test_one_that_is_not_brought_any_more_runs_only_by_name(self) -> None:
        self.write("10-a")
        self.write("11-b")
        await self.install()
        (self.directory / "11-b").unlink()
        self.assertEqual(await self.install(), ("11-b",))
        self.assertEqual(await self.chosen(ResultType.COMMISSIONING), ["10-a"])
        await self.store.delete("11-b")

    async def test_a_script_of_the_same_name_becomes_the_built_in_one_and_keeps_its_history(self) -> None:
        await self.add("10-a")
        self.write("10-a", "title: Ours")
        self.assertEqual(await self.install(), ("10-a",))
        made = await self.store.get("10-a")
        self.assertEqual((made.builtin, made.fields.title), (True, "Ours"))
        versions = (await self.store.versions([made], with_content=True))[made.id]
        self.assertEqual(versions[1].content, PLAIN)
