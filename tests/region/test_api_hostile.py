"""Whatever a client writes in any field of what is about machines, it gets an answer that is not the region's fault."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import quote_from_bytes

from twisted.internet import reactor as installed_reactor
from twisted.internet.task import Clock, deferLater

from region.api import Api, Authenticator
from region.api.operations import Operation
from region.api.routes import OPERATIONS
from region.config import CommissioningConfig
from region.events import EventStore
from region.nodes.requests import NodeRequests
from region.nodes.statuses import ResultType
from region.nodes.store import NodeStore
from region.scripts.choose import choose
from region.scripts.results import ResultStore
from region.scripts.store import ScriptStore
from region.tags.store import TagStore
from tests.database import DatabaseTestCase
from tests.region.api_parts import parts_of
from tests.region.fakes import Keys
from tests.region.machines import make_node, make_script, start
from tests.region.web import Connection, Response

reactor: Any = installed_reactor

HOSTILE: Final = (
    b"", b"a\x00b", b"a" * 10_000, b"9" * 25, b"9223372036854775808", b"-1", b"\xed\xa0\x80", "\u0663\u00b2".encode(),
    "\u202e\u2028'\"\\%s,".encode(), b"[" * 2000, b'{"a": "\\ud800\\u0000", "b": 1e999}', b"..",
)  # fmt: skip
"""Values as they stand in a request; some are no text at all."""

PATHS: Final = ("/machines/", "/nodes/", "/scripts/", "/tags/", "/events/")

USUAL: Final = {
    "architecture": b"amd64", "mac_addresses": b"00:16:3e:00:00:0b", "name": b"new", "tag": b"t", "to": b"1",
    "script": b"#!/bin/sh\n", "definition": b"//node", "commission": b"false", "power_type": b"manual",
}  # fmt: skip
"""What the other fields have, where they are required."""

EXISTING: Final = {"system_id": b"abc234", "name": b"memtest", "id": b"current-commissioning"}


def requests(operation: Operation) -> Iterator[tuple[str, str, dict[str, bytes]]]:
    """What is hostile, the path, and the fields: each variable of the path, and each field, once with each value."""
    variables = re.findall(r"{(\w+)}", operation.path)
    required = {each.name: USUAL.get(each.name, b"x") for each in operation.parameters if each.required}
    path = {**EXISTING, **({"name": b"tag"} if operation.path.startswith("/tags/") else {})}
    for value in HOSTILE:
        for name in variables:
            yield name, _path(operation, {**path, name: value}), required
        for parameter in operation.parameters:
            yield parameter.name, _path(operation, path), {**required, parameter.name: value}


def _path(operation: Operation, values: dict[str, bytes]) -> str:
    return re.sub(r"{(\w+)}", lambda found: quote_from_bytes(values[found[1]], safe=""), operation.path).lstrip("/")


def _form(fields: dict[str, bytes]) -> str:
    return "&".join(f"{name}={quote_from_bytes(value, safe='')}" for name, value in fields.items())


class HostileTests(DatabaseTestCase):
    timeout = 120

    def setUp(self) -> Any:
        ready = super().setUp()
        parts = parts_of(
            events=EventStore(self.database),
            nodes=NodeStore(self.database),
            node_requests=NodeRequests(self.database, CommissioningConfig(), choose),
            scripts=ScriptStore(self.database),
            results=ResultStore(self.database),
            tags=TagStore(self.database, self.check_definition),
        )
        self.clock = Clock()
        self.resource = Api(parts, Authenticator(Keys(), self.clock)).resource()
        return ready.addCallback(lambda _: self.run_async(self.prepare()))

    async def prepare(self) -> None:
        script = await make_script(self.database, "10-lshw")
        await make_script(self.database, "memtest", ResultType.TESTING)
        node = await make_node(self.database)
        await start(self.database, node, [script])
        await self.database.execute("INSERT INTO tag (name) VALUES ('tag')")

    async def check_definition(self, definition: str) -> str:
        # The process that does it is tested with the tags; what it says is stored and shown.
        return "" if len(definition) % 2 else f"It cannot be {definition!r}."

    async def ask(self, method: str, path: str, fields: dict[str, bytes], op: str | None) -> Response:
        connection = Connection(self.resource, self.clock)
        query = _form({**({"op": op.encode()} if op else {}), **(fields if method in ("GET", "DELETE") else {})})
        body = _form(fields).encode() if method in ("POST", "PUT") else b""
        headers: dict[str, Any] = {"Content_Type": "application/x-www-form-urlencoded"} if body else {}
        connection.send(method, path + (f"?{query}" if query else ""), body, **headers)
        while not connection.is_answered:
            await deferLater(reactor, 0)
        return connection.response(method)

    async def test_no_value_of_any_field_is_an_error_of_the_region(self) -> None:
        wrong = []
        for operation in (one for one in OPERATIONS if one.path.startswith(PATHS)):
            for name, path, fields in requests(operation):
                response = await self.ask(operation.method, path, fields, operation.op)
                if response.status >= 500:
                    value = fields.get(name, path.encode())[:60]
                    wrong.append(f"{operation.signature} {name}={value!r}: {response.status} {response.text}")
        self.assertEqual(wrong, [])
        self.assertEqual(self.flushLoggedErrors(), [])
