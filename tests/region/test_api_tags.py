"""The tags over HTTP, with a real database and the child process that checks definitions."""

from __future__ import annotations

from typing import Any

from twisted.internet import reactor as installed_reactor
from twisted.internet.task import Clock, deferLater

from region.api import Api, Authenticator
from region.nodes.store import NodeStore
from region.tags.evaluator import Evaluator, NotEvaluated
from region.tags.store import TagStore
from tests.database import DatabaseTestCase
from tests.region.api_parts import parts_of
from tests.region.fakes import Keys
from tests.region.machines import make_node
from tests.region.web import Connection, Response, form

reactor: Any = installed_reactor


class TagsTests(DatabaseTestCase):
    def setUp(self) -> Any:
        ready = super().setUp()
        self.tags = TagStore(self.database, lambda text: Evaluator(reactor, 5.0).check_and_close(text))
        parts = parts_of(nodes=NodeStore(self.database), tags=self.tags)
        self.clock = Clock()
        self.resource = Api(parts, Authenticator(Keys(), self.clock)).resource()
        return ready

    async def ask(self, method: str, path: str, **keywords: Any) -> Response:
        connection = Connection(self.resource, self.clock)
        connection.send(method, path, **keywords)
        while not connection.is_answered:
            # The database is a real one, so its answer comes through the real reactor.
            await deferLater(reactor, 0.001)
        return connection.response(method)

    async def test_a_tag_is_made_shown_changed_and_removed(self) -> None:
        response = await self.ask(
            "POST", "tags/", **form(name="big", definition="//node", comment="c", kernel_opts="k")
        )
        tag = {
            "name": "big", "definition": "//node", "comment": "c", "kernel_opts": "k", "evaluating": True,
            "problem": "", "machine_count": 0, "resource_uri": "/MAAS/api/2.0/tags/big/",
        }  # fmt: skip
        self.assertEqual((response.status, response.json), (200, tag))
        self.assertEqual((await self.ask("GET", "tags/")).json, [tag])
        response = await self.ask("PUT", "tags/big/", **form(name="large", definition=""))
        self.assertEqual(response.json["resource_uri"], "/MAAS/api/2.0/tags/large/")
        self.assertEqual((await self.ask("GET", "tags/large/")).json["evaluating"], False)
        self.assertEqual((await self.ask("DELETE", "tags/large/")).status, 204)
        for method, path in (
            ("GET", "tags/large/"), ("PUT", "tags/large/"), ("DELETE", "tags/large/"),
            ("GET", "tags/large/?op=nodes"), ("POST", "tags/large/?op=rebuild"),
            ("POST", "tags/large/?op=update_nodes"),
        ):  # fmt: skip
            response = await self.ask(method, path)
            self.assertEqual((response.status, response.text), (404, "There is no tag 'large'."), (method, path))

    async def test_what_cannot_be_is_refused_by_field(self) -> None:
        await self.ask("POST", "tags/", **form(name="taken"))
        for fields, name, said in (
            ({"definition": "//node"}, "name", "This field is required."),
            ({"name": "a b"}, "name", "letters"),
            ({"name": "taken"}, "name", "Tag with this Name already exists."),
            ({"name": "a", "definition": "//["}, "definition", "Invalid XPath expression: Invalid expression"),
            ({"name": "a", "definition": "//x:y"}, "definition", "there is no prefix 'x'"),
            ({"name": "a", "generation": "3"}, "generation", "no such parameter"),
        ):
            response = await self.ask("POST", "tags/", **form(**fields))
            self.assertEqual((response.status, list(response.json)), (400, [name]), response.text)
            self.assertIn(said, response.json[name][0])
        for path in ("tags/%00/", "tags/a%2Fb/", "tags/%F0%9F%98%80/", "tags/" + "x" * 300 + "/"):
            for method in ("GET", "PUT", "DELETE"):
                self.assertEqual((await self.ask(method, path)).status, 404, (method, path))
        surrogate = {"body": b'{"add": "\\ud800"}', "Content_Type": "application/json"}
        self.assertEqual((await self.ask("POST", "tags/taken/?op=update_nodes", **surrogate)).status, 400)
        surrogate = {"body": b'{"name": "a", "comment": "\\ud800"}', "Content_Type": "application/json"}
        self.assertEqual((await self.ask("POST", "tags/", **surrogate)).status, 400)

    async def test_people_give_a_tag_to_machines_and_take_it(self) -> None:
        await self.ask("POST", "tags/", **form(name="mine"))
        for system_id in ("aaaaaa", "bbbbbb"):
            await make_node(self.database, system_id)
        path = "tags/mine/?op=update_nodes"
        response = await self.ask("POST", path, **form(add=["aaaaaa", "bbbbbb"]))
        self.assertEqual((response.status, response.json), (200, {"added": 2, "removed": 0}))
        response = await self.ask("POST", path, **form(remove="aaaaaa", definition=""))
        self.assertEqual(response.json, {"added": 0, "removed": 1})
        for op in ("nodes", "machines"):
            machines = (await self.ask("GET", f"tags/mine/?op={op}")).json
            self.assertEqual([(one["system_id"], one["tag_names"]) for one in machines], [("bbbbbb", ["mine"])])
        self.assertEqual((await self.ask("GET", "tags/mine/")).json["machine_count"], 1)
        response = await self.ask("POST", path, **form(add="cccccc"))
        self.assertEqual((response.status, response.json), (400, {"add": ["There is no node 'cccccc'."]}))
        response = await self.ask("POST", path, **form(add="aaaaaa", definition="//node"))
        self.assertEqual(response.status, 409)
        self.assertIn("'//node' doesn't match current definition ''", response.text)

    async def test_a_tag_with_a_definition_is_evaluated_and_not_set(self) -> None:
        await self.ask("POST", "tags/", **form(name="auto", definition="//node"))
        response = await self.ask("POST", "tags/auto/?op=update_nodes", **form(add=[]))
        self.assertEqual(response.status, 409)
        self.assertIn("which finds its nodes", response.text)
        response = await self.ask("POST", "tags/auto/?op=rebuild")
        self.assertEqual((response.status, response.json), (200, {"rebuilding": "auto"}))
        self.assertEqual((await self.tags.get("auto")).generation, 2)
        await self.ask("PUT", "tags/auto/", **form(definition=""))
        self.assertEqual((await self.ask("POST", "tags/auto/?op=rebuild")).status, 409)

    async def test_a_definition_that_could_not_be_checked_is_no_fault_of_the_client(self) -> None:
        async def check(definition: str) -> str:
            raise NotEvaluated("the definition could not be checked: no process could be started")

        self.patch(self.tags, "_check", check)
        response = await self.ask("POST", "tags/", **form(name="a", definition="//node"))
        self.assertEqual((response.status, response.headers["Retry-After"]), (503, "5"))
        self.assertIn("no process could be started. Try again.", response.text)
        self.assertEqual((await self.ask("GET", "tags/")).json, [])
