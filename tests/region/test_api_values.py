"""Every parameter of the API's operations on machines and what belongs to them, with values that nobody should send."""

from __future__ import annotations

import json
import re
from typing import Any, Final
from urllib.parse import quote

from twisted.internet import reactor as installed_reactor
from twisted.internet.task import Clock, deferLater

from region.api import Api, Authenticator
from region.api.operations import Operation
from region.api.routes import OPERATIONS
from region.config import CommissioningConfig
from region.events import EventStore
from region.nodes.requests import NodeRequests
from region.nodes.store import NodeStore
from region.scripts.choose import choose
from region.scripts.results import ResultStore
from region.scripts.store import ScriptStore
from region.tags.store import TagStore
from tests.database import DatabaseTestCase
from tests.region.api_parts import parts_of
from tests.region.commissioning import run_now
from tests.region.fakes import Keys
from tests.region.machines import make_node
from tests.region.web import Connection, Response, form

reactor: Any = installed_reactor


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


VALUES: Final = (
    "", "a\0b", "-1", "9" * 19, "1" * 5000, "\u0660", "\u202e\x1b[31m", "%s {0}", "' --", "../..", "x" * 9999,
    nested(50), nested(480), nested(980), '{"a":"\\ud800"}', '{"a":1e999}', "//*[", ",,",
)  # fmt: skip
JSON_VALUES: Final[tuple[Any, ...]] = ("\ud800", [], [[]], {}, 1.5, None, True, 10**30, ["a", "b"])
NAMES: Final = {"system_id": "victim", "name": "victim", "tag": "victim", "id": "current-commissioning"}
FIELDS: Final = {"architecture": "amd64", "commission": "false", "script": "#!/bin/sh", "type": "testing"}


async def accept(definition: str) -> str:
    """What is wrong with a definition, as the child process would say it: that has tests of its own."""
    return "it has a bracket" if "[" in definition else ""


class HostileTests(DatabaseTestCase):
    timeout = 60

    def setUp(self) -> Any:
        ready = super().setUp()
        parts = parts_of(
            events=EventStore(self.database),
            nodes=NodeStore(self.database),
            node_requests=NodeRequests(self.database, CommissioningConfig(), choose),
            scripts=ScriptStore(self.database, run_now),
            results=ResultStore(self.database),
            tags=TagStore(self.database, accept),
        )
        self.clock = Clock()
        self.resource = Api(parts, Authenticator(Keys(), self.clock), run_in_thread=run_now).resource()
        return ready

    async def ask(self, method: str, path: str, **keywords: Any) -> Response:
        connection = Connection(self.resource, self.clock)
        connection.send(method, path, **keywords)
        while not connection.is_answered:
            await deferLater(reactor, 0)
        return connection.response(method)

    async def make_victims(self) -> None:
        await make_node(self.database, hostname="victim")
        await self.ask("POST", "tags/", **form(name="victim"))
        await self.ask("POST", "scripts/", **form(name="victim", script="#!/bin/sh", type="testing"))

    def check(self, response: Response, *what: object) -> None:
        self.assertLess(response.status, 500, (what, response.body[:200]))
        self.assertNotIn(response.status, range(300, 400), what)
        self.assertTrue(response.headers["X-Correlation-Id"], what)

    async def test_no_value_of_a_parameter_is_an_error_of_the_region(self) -> None:
        await self.make_victims()
        count = 0
        for operation in operations():
            needed = {each.name: FIELDS.get(each.name, "x") for each in operation.parameters if each.required}
            for parameter in operation.parameters:
                for value in (*VALUES, *JSON_VALUES):
                    if operation.method == "GET":
                        if not isinstance(value, str) or len(value) > 4000 or value == "\ud800":
                            continue
                        path, keywords = f"{path_of(operation)}&{parameter.name}={quote(value)}", {}
                    else:
                        count += 1
                        own = {"name": f"n{count}"} if "name" in needed else {}
                        fields = {**needed, **own, parameter.name: value}
                        path = path_of(operation)
                        keywords = {"body": json.dumps(fields).encode(), "Content_Type": "application/json"}
                    response = await self.ask(operation.method, path, **keywords)
                    self.check(response, operation.signature, parameter.name, value)

    async def test_no_name_in_a_path_is_an_error_of_the_region(self) -> None:
        await self.make_victims()
        for operation in operations():
            for name in re.findall(r"\{(\w+)\}", operation.path):
                for value in (*VALUES, "//", "a//b"):
                    if value and len(value) < 4000:
                        path = path_of(operation, **{name: value})
                        self.check(await self.ask(operation.method, path), operation.signature, name, value)


def operations() -> list[Operation]:
    return [
        operation
        for operation in OPERATIONS
        if re.match(r"/(machines|nodes|scripts|tags|events)/", operation.path) and operation.method != "DELETE"
    ]


def path_of(operation: Operation, **names: str) -> str:
    path = re.sub(r"\{(\w+)\}", lambda found: quote({**NAMES, **names}[found[1]], safe=""), operation.path)
    return f"{path.lstrip('/')}?op={operation.op or ''}"
