"""Tests for tags in the database: the store, evaluating a node, and evaluating all of them. Nothing stale ever wins."""

from __future__ import annotations

from typing import Any, cast

from twisted.internet import reactor as installed
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock

from region.database import Database
from region.nodes.kinds import TAGS_NOT_EVALUATED
from region.nodes.values import NodeName
from region.tags.evaluation import Tagger
from region.tags.evaluator import Evaluator
from region.tags.rebuilding import FAILURES, LOCK, LOOK_SECONDS, RETRY_SECONDS, STUCK, Rebuilder
from region.tags.store import NoSuchTag, Tag, TagConflict, TagInvalid, TagStore
from region.upstream.process import TookTooLong
from tests.database import DatabaseTestCase
from tests.region.test_tags_documents import LLDP, LSHW
from tests.region.test_tags_evaluator import Inline

reactor = cast(Any, installed)


class Waiting(Inline):
    """The child, which lets the test do something while it evaluates: ``meanwhile`` is awaited once."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: list[Any] = []

    def ask(self, question: bytes, seconds: float | None = None) -> Deferred[bytes]:
        if not self.meanwhile:
            return super().ask(question, seconds)
        waiting = Deferred.fromCoroutine(self.meanwhile.pop(0)())
        return waiting.addCallback(lambda _: super(Waiting, self).ask(question, seconds))


class TagsTestCase(DatabaseTestCase):
    """Has nodes with results, tags, and an evaluator in this process."""

    def setUp(self) -> Deferred[None]:  # type: ignore[override]  # trial waits for it
        self.child = Waiting()
        return super().setUp().addCallback(self.begin)

    def begin(self, _: None) -> None:
        self.store = TagStore(self.database, self.evaluator().check)
        self.tagger = Tagger(self.database, self.evaluator)
        self.count = 0

    def evaluator(self) -> Evaluator:
        return Evaluator(Clock(), 5.0, conversation=self.child)

    async def value(self, sql: str, *parameters: object) -> Any:
        row = await self.database.one(sql, parameters)
        assert row is not None, sql
        return row[0]

    async def node(self, **outputs: bytes) -> NodeName:
        """A node; with outputs of lshw or lldp, one that was commissioned."""
        self.count += 1
        system_id, hostname = f"node{self.count:02}", f"host{self.count}"
        number = await self.value(
            "INSERT INTO node (system_id, hostname, architecture) VALUES (%s, %s, 'amd64/generic') RETURNING id",
            system_id, hostname,
        )  # fmt: skip
        node = NodeName(number, system_id, hostname)
        if outputs:
            await self.commission(node, **outputs)
        return node

    async def commission(self, node: NodeName, status: int = 2, /, **outputs: bytes) -> None:
        run = await self.value("INSERT INTO script_set (node_id, result_type) VALUES (%s, 0) RETURNING id", node.id)
        await self.database.execute("UPDATE node SET commissioning_set_id = %s WHERE id = %s", (run, node.id))
        for name, content in outputs.items():
            result = await self.value(
                "INSERT INTO script_result (script_set_id, script_name, status) VALUES (%s, %s, %s) RETURNING id",
                run, {"lshw": "10-lshw", "lldp": "40-lldp"}.get(name, name), status,
            )  # fmt: skip
            await self.database.execute(
                "INSERT INTO script_output (script_result_id, name, content) VALUES (%s, 'stdout', %s), "
                "(%s, 'output', %s)",
                (result, content, result, b"<list><both/></list>"),
            )

    async def tags_of(self, node: NodeName) -> list[str]:
        rows = await self.database.query(
            "SELECT name FROM node_tag JOIN tag ON tag.id = tag_id WHERE node_id = %s ORDER BY name", (node.id,)
        )
        return [row[0] for row in rows]

    async def all_nodes(self, name: str) -> list[str]:
        return sorted(await self.store.nodes(name))


class StoreTests(TagsTestCase):
    async def test_a_tag_is_kept_as_it_was_given(self) -> None:
        made = await self.store.create("virtual", comment="é", kernel_opts="console=ttyS0")
        self.assertEqual((await self.store.get("virtual"), await self.store.list()), (made, (made,)))
        self.assertEqual((made.definition, made.is_automatic, made.is_evaluating), ("", False, False))
        changed = await self.store.update("virtual", name="vm", comment="")
        self.assertEqual((changed.name, changed.comment, changed.kernel_opts), ("vm", "", "console=ttyS0"))
        self.assertEqual(changed.generation, made.generation, "nothing that is evaluated was changed")
        await self.store.delete("vm")
        for gone in (self.store.get("vm"), self.store.update("vm"), self.store.delete("vm"), self.store.nodes("vm")):
            with self.assertRaises(NoSuchTag):
                await gone

    async def test_what_cannot_be_is_refused_by_field(self) -> None:
        await self.store.create("taken")
        for name, values, field, words in (
            ("", {}, "name", "letters"), ("a b", {}, "name", "letters"), ("é", {}, "name", "letters"),
            ("x" * 257, {}, "name", "letters"), ("a\n", {}, "name", "letters"), ("taken", {}, "name", "already exists"),
            ("a", {"definition": "//["}, "definition", "Invalid XPath expression: Invalid expression"),
            ("a", {"definition": "//x:y"}, "definition", "no prefix 'x'"),
            ("a", {"comment": "\x00"}, "comment", "not text"),
            ("a", {"kernel_opts": "\ud800"}, "kernel_opts", "not text"),
        ):  # fmt: skip
            with self.assertRaises(TagInvalid) as caught:
                await self.store.create(name, **values)
            self.assertEqual(caught.exception.field, field)
            self.assertIn(words, caught.exception.message)
        with self.assertRaises(TagInvalid):
            await self.store.update("taken", definition="//[")
        await self.store.create("b")
        with self.assertRaises(TagInvalid) as caught:
            await self.store.update("b", name="taken")
        self.assertIn("already exists", caught.exception.message)
        self.assertEqual([tag.name for tag in await self.store.list()], ["b", "taken"])

    async def test_a_changed_definition_is_a_new_generation(self) -> None:
        tag = await self.store.create("cpu", definition="  //node ")
        self.assertEqual((tag.definition, tag.generation, tag.is_evaluating), ("//node", 1, True))
        self.assertEqual((await self.store.update("cpu", definition="//node\n")).generation, 1)
        self.assertEqual((await self.store.update("cpu", definition="//other")).generation, 2)
        self.assertEqual((await self.store.rebuild("cpu")).generation, 3)
        tag = await self.store.update("cpu", definition="")
        self.assertEqual((tag.generation, tag.evaluated, tag.is_evaluating), (4, 4, False))
        with self.assertRaisesRegex(TagConflict, "no definition"):
            await self.store.rebuild("cpu")
        with self.assertRaises(NoSuchTag):
            await self.store.rebuild("none")

    async def test_people_say_which_nodes_have_a_tag_without_a_definition(self) -> None:
        one, two = await self.node(), await self.node()
        await self.store.create("mine")
        self.assertEqual(await self.store.change_nodes("mine", [one.system_id, two.system_id], []), (2, 0))
        self.assertEqual(await self.store.change_nodes("mine", [one.system_id], [two.system_id], definition=""), (0, 1))
        self.assertEqual(await self.store.nodes("mine"), [one.system_id])
        for add, remove, field in (
            (["zzzzzz"], [], "add"),
            ([], ["zzzzzz"], "remove"),
            (["node01"], ["node01"], "remove"),
        ):
            with self.assertRaises(TagInvalid) as caught:
                await self.store.change_nodes("mine", add, remove)
            self.assertEqual(caught.exception.field, field)
        with self.assertRaisesRegex(TagConflict, "'//x' doesn't match current definition ''"):
            await self.store.change_nodes("mine", [], [], definition="//x")
        await self.store.update("mine", definition="//node")
        with self.assertRaisesRegex(TagConflict, "take that away"):
            await self.store.change_nodes("mine", [two.system_id], [])
        await self.store.update("mine", definition="")
        self.assertEqual(await self.store.nodes("mine"), [one.system_id], "those that have it keep it")


class NodeTests(TagsTestCase):
    """Evaluating all tags on one node."""

    async def test_a_node_has_the_tags_whose_definitions_are_true_of_it(self) -> None:
        node = await self.node(lshw=LSHW, lldp=LLDP, other=b"<list><other/></list>")
        for name, definition in (
            ("cpu", "//node[@id='cpu']"), ("switch", "//lldp:name = 'switch-7'"), ("gpu", "//node[@class='display']"),
            ("other", "//other"), ("both", "//both"), ("mine", ""),
        ):  # fmt: skip
            await self.store.create(name, definition=definition)
        await self.store.change_nodes("mine", [node.system_id], [])
        self.assertEqual(await self.tagger.evaluate_node(node), [])
        self.assertEqual(await self.tags_of(node), ["cpu", "mine", "switch"])
        self.assertEqual(self.child.closed, 1)
        await self.commission(node, lshw=b"<list><node class='display'/></list>")
        await self.tagger.evaluate_node(node)
        self.assertEqual(await self.tags_of(node), ["gpu", "mine"])

    async def test_only_what_passed_in_the_current_run_counts(self) -> None:
        node = await self.node(lshw=LSHW)
        await self.store.create("cpu", definition="//node")
        await self.tagger.evaluate_node(node)
        self.assertEqual(await self.tags_of(node), ["cpu"])
        await self.commission(node, 3, lshw=LSHW)
        await self.tagger.evaluate_node(node)
        self.assertEqual(await self.tags_of(node), [])

    async def test_a_late_output_is_no_document(self) -> None:
        node = await self.node(lshw=b"<list/>")
        await self.store.create("cpu", definition="//node")
        await self.database.execute("DELETE FROM script_output")
        result = await self.value("SELECT id FROM script_result")
        late = await self.value(
            "INSERT INTO late_result (script_result_id, signal_status) VALUES (%s, 'OK') RETURNING id", result
        )
        await self.database.execute(
            "INSERT INTO script_output (script_result_id, late_result_id, name, content) VALUES (%s, %s, 'stdout', %s)",
            (result, late, LSHW),
        )
        await self.tagger.evaluate_node(node)
        self.assertEqual(await self.tags_of(node), [])

    async def test_what_could_not_be_evaluated_is_told_and_costs_nothing_else(self) -> None:
        node = await self.node(lshw=LSHW, lldp=b"not XML")
        await self.store.create("cpu", definition="//node")
        await self.store.create("slow", definition="//slow")
        self.child.died["//slow"] = lambda: TookTooLong("evaluating it took longer than 5 seconds")
        findings = await self.tagger.evaluate_node(node)
        self.assertEqual({finding.kind for finding in findings}, {TAGS_NOT_EVALUATED})
        first, second = (finding.description for finding in findings)
        self.assertIn("not set: slow: evaluating it took longer than 5 seconds.", first)
        self.assertIn("without the output of 40-lldp: it is no XML", second)
        self.assertEqual(await self.tags_of(node), ["cpu"])
        self.assertEqual((await self.store.get("slow")).problem, "on host1: evaluating it took longer than 5 seconds")
        self.assertEqual((await self.store.get("cpu")).problem, "")

    async def test_a_definition_that_was_changed_meanwhile_is_not_written(self) -> None:
        node = await self.node(lshw=LSHW)
        await self.store.create("cpu", definition="//node")
        await self.store.create("bus", definition="//node[@class='bus']")

        async def change() -> None:
            await self.store.update("cpu", definition="//nothing")

        self.child.meanwhile.append(change)
        await self.tagger.evaluate_node(node)
        self.assertEqual(await self.tags_of(node), ["bus"])

    async def test_a_tag_or_node_that_was_deleted_meanwhile_is_no_error(self) -> None:
        node = await self.node(lshw=LSHW)
        await self.store.create("cpu", definition="//node")

        async def delete_tag() -> None:
            await self.store.delete("cpu")

        async def delete_node() -> None:
            await self.database.execute("DELETE FROM node")

        self.child.meanwhile.append(delete_tag)
        self.assertEqual(await self.tagger.evaluate_node(node), [])
        await self.store.create("cpu", definition="//node")
        self.child.meanwhile.append(delete_node)
        self.assertEqual(await self.tagger.evaluate_node(node), [])
        self.assertEqual(await self.value("SELECT count(*) FROM node_tag"), 0)

    async def test_documents_that_were_replaced_meanwhile_are_read_again(self) -> None:
        node = await self.node(lshw=LSHW)
        await self.store.create("cpu", definition="//node")

        async def commission() -> None:
            await self.commission(node, lshw=b"<list/>")

        self.child.meanwhile.append(commission)
        await self.tagger.evaluate_node(node)
        self.assertEqual(await self.tags_of(node), [])

    async def test_one_whose_documents_change_each_time_is_given_up_and_not_tagged_wrongly(self) -> None:
        node = await self.node(lshw=LSHW)
        await self.store.create("cpu", definition="//node")

        async def commission() -> None:
            await self.commission(node, lshw=LSHW)

        # Each time it is loaded and evaluated; the second question is not waited with.
        plain = Inline.ask

        def ask(child: Waiting, question: bytes, seconds: float | None = None) -> Deferred[bytes]:
            if b'"Load"' in question:
                return Deferred.fromCoroutine(commission()).addCallback(lambda _: plain(child, question, seconds))
            return plain(child, question, seconds)

        self.patch(Waiting, "ask", ask)
        await self.tagger.evaluate_node(node)
        self.assertEqual(await self.tags_of(node), [])


class RebuildingTests(TagsTestCase):
    """Evaluating tags on all nodes, after their definitions were changed."""

    def begin(self, _: None) -> None:
        super().begin(None)
        self.clock = Clock()
        self.patch_batch(2)
        self.rebuilder = self.make_rebuilder(self.database)

    def patch_batch(self, size: int) -> None:
        self.patch(__import__("region.tags.rebuilding", fromlist=["BATCH"]), "BATCH", size)

    def make_rebuilder(self, database: Database) -> Rebuilder:
        rebuilder = Rebuilder(database, Tagger(database, self.evaluator), self.evaluator, self.clock)
        self.addCleanup(rebuilder.stop)
        return rebuilder

    async def idle(self) -> None:
        await self.rebuilder.when_idle()

    async def evaluated(self, name: str) -> Tag:
        tag = await self.store.get(name)
        self.assertFalse(tag.is_evaluating)
        return tag

    async def test_a_changed_definition_is_evaluated_on_all_nodes(self) -> None:
        nodes = [await self.node(lshw=LSHW) for _ in range(5)] + [await self.node(), await self.node(lshw=b"<list/>")]
        await self.store.create("cpu", definition="//node[@id='cpu']")
        await self.store.create("not", definition="not(//node)")
        self.rebuilder.start()
        await self.idle()
        self.assertEqual(await self.all_nodes("cpu"), [node.system_id for node in nodes[:5]])
        self.assertEqual(await self.all_nodes("not"), [nodes[6].system_id], "one without documents has no such tag")
        await self.store.update("cpu", definition="//nothing")
        self.rebuilder.wake()
        await self.idle()
        self.assertEqual(await self.all_nodes("cpu"), [])
        self.assertEqual((await self.evaluated("cpu")).evaluated, 2)

    async def test_whoever_comes_next_goes_on_from_where_another_ended(self) -> None:
        documents = [LSHW, LSHW, LSHW, b"<list><node id='poison'/></list>", LSHW]
        nodes = [await self.node(lshw=document) for document in documents]
        await self.store.create("cpu", definition="//node")
        self.child.died["poison"] = lambda: RuntimeError("nobody foresaw this")
        self.rebuilder.start()
        await self.idle()
        await self.rebuilder.stop()
        self.assertGreater(len(self.flushLoggedErrors(RuntimeError)), 0)
        tag = await self.store.get("cpu")
        self.assertEqual((tag.is_evaluating, tag.position), (True, nodes[2].id))
        self.child.died.clear()
        self.child.asked.clear()
        self.rebuilder = self.make_rebuilder(self.database)
        self.rebuilder.start()
        await self.idle()
        self.assertEqual([kind for kind, _ in self.child.asked], ["Load", "Evaluate"] * 2, "the others were evaluated")
        self.assertEqual(len(await self.all_nodes("cpu")), 5)
        await self.evaluated("cpu")

    async def test_one_that_is_changed_while_it_is_evaluated_is_evaluated_from_the_start(self) -> None:
        nodes = [await self.node(lshw=LSHW) for _ in range(5)]
        await self.store.create("cpu", definition="//node")

        async def nothing() -> None: ...

        async def change() -> None:
            await self.store.update("cpu", definition="not(//node)")

        self.child.meanwhile += [nothing] * 6 + [change]
        self.rebuilder.start()
        await self.idle()
        await self.evaluated("cpu")
        self.assertEqual(await self.all_nodes("cpu"), [])
        self.assertEqual(len(nodes), 5)

    async def test_two_region_processes_do_not_do_it_twice(self) -> None:
        await self.node(lshw=LSHW)
        await self.store.create("cpu", definition="//node")
        async with self.database.session() as other:
            await other.query("SELECT pg_advisory_lock(%s, %s)", LOCK)
            self.child.asked.clear()
            self.rebuilder.start()
            await self.idle()
            self.assertTrue((await self.store.get("cpu")).is_evaluating)
            self.assertEqual(self.child.asked, [])
        # The other process has died; that is noticed in time.
        self.clock.advance(max(LOOK_SECONDS, RETRY_SECONDS[1]))
        await self.idle()
        await self.evaluated("cpu")

    async def test_a_tag_that_cannot_be_evaluated_anywhere_is_given_up(self) -> None:
        nodes = [await self.node(lshw=LSHW) for _ in range(FAILURES + 3)]
        tag = await self.store.create("slow", definition="//slow")
        await self.store.create("cpu", definition="//node")
        for node in nodes:
            await self.database.execute("INSERT INTO node_tag (node_id, tag_id) VALUES (%s, %s)", (node.id, tag.id))
        self.child.died["//slow"] = lambda: TookTooLong("evaluating it took longer than 5 seconds")
        self.rebuilder.start()
        await self.idle()
        slow = await self.evaluated("slow")
        self.assertRegex(slow.problem, f"given up.* on {FAILURES} of them, last on host{FAILURES}: .* than 5 seconds")
        self.assertEqual(await self.all_nodes("slow"), [], "an earlier definition's nodes do not have it")
        self.assertEqual(len(await self.all_nodes("cpu")), len(nodes))
        asked = sum(kind == "Evaluate" for kind, _ in self.child.asked)
        self.assertEqual(asked - FAILURES, FAILURES + len(nodes), "each failure is followed by a reload and the other")

    async def test_a_node_on_which_nothing_can_be_evaluated_does_not_stop_the_others(self) -> None:
        poisoned, good = await self.node(lshw=b"<list><poison/></list>"), await self.node(lshw=LSHW)
        await self.store.create("cpu", definition="//node")
        self.child.died["poison"] = lambda: TookTooLong("the process ended")
        self.rebuilder.start()
        for _ in range(STUCK):
            await self.idle()
            self.clock.advance(RETRY_SECONDS[1])
        await self.idle()
        await self.evaluated("cpu")
        self.assertEqual(await self.all_nodes("cpu"), [good.system_id])
        self.assertNotEqual(poisoned, good)

    async def test_stopping_breaks_off_what_is_evaluated(self) -> None:
        await self.node(lshw=LSHW)
        await self.store.create("cpu", definition="//node")
        began: Deferred[None] = Deferred()
        never: Deferred[None] = Deferred()

        async def wait() -> None:
            reactor.callLater(0, began.callback, None)
            await never

        self.child.meanwhile.append(wait)
        self.rebuilder.start()
        await began
        self.child.closed = 0
        await self.rebuilder.stop()
        self.assertEqual((await self.store.get("cpu")).position, 0)
        self.assertEqual(self.child.closed, 1)
        self.assertEqual(self.clock.getDelayedCalls(), [])
