"""Every kind of exception inside every step, over HTTP and a real database: what a node did is never lost by it, never
hidden, and never its fault.

The cases are made from the table of steps: each step fails in each way, while it prepares, before it writes, or after
it has written; each on a node of its own, all at once, since no node may suffer from what happens to another.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import cattrs
from attrs import frozen
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.task import Clock, deferLater
from twisted.web.resource import Resource

from region.commissioning.queue import Work
from region.commissioning.steps import Step, Steps
from region.commissioning.steps import steps as steps_of
from region.database import Transaction
from region.metadata.service import Known, MetadataParts, MetadataResource
from region.nodes import kinds
from region.nodes.statuses import NodeStatus
from region.nodes.values import NodeName
from tests.database import reactor
from tests.logs import Logs
from tests.region.commissioning import NOISE, WorkerTestCase, following, run_now
from tests.region.web import Connection, Response

Ask = Callable[..., Awaitable[Any]]
"""Runs SQL: in the transaction of the step, or while it prepares in one of its own."""


async def value_error(ask: Ask) -> None:
    raise ValueError("half of it\x00 is missing")


async def cattrs_error(ask: Ask) -> None:
    cattrs.structure({"id": "seven", "hostname": "x"}, NodeName)


async def attrs_error(ask: Ask) -> None:
    setattr(NodeName(1, "aaaaaa", "a"), "id", 2)  # noqa: B010  # it is frozen


async def unique_violation(ask: Ask) -> None:
    await ask("INSERT INTO node (system_id, hostname, architecture) SELECT system_id, 'x', architecture FROM node")


async def foreign_key_violation(ask: Ask) -> None:
    await ask("INSERT INTO node_tag (node_id, tag_id) SELECT id, 12345 FROM node LIMIT 1")


async def serialization_failure(ask: Ask) -> None:
    await ask("DO $$ BEGIN RAISE EXCEPTION 'could not serialize access' USING ERRCODE = '40001'; END $$")


async def connection_lost(ask: Ask) -> None:
    await ask("SELECT pg_terminate_backend(pg_backend_pid())")


async def memory_error(ask: Ask) -> None:
    raise MemoryError


FAULTS: Final[Mapping[str, Callable[[Ask], Awaitable[None]]]] = {
    "builtins.ValueError": value_error,
    "cattrs.errors.ClassValidationError": cattrs_error,
    "attr.exceptions.FrozenInstanceError": attrs_error,
    "psycopg2.errors.UniqueViolation": unique_violation,
    "psycopg2.errors.ForeignKeyViolation": foreign_key_violation,
    "psycopg2.errors.SerializationFailure": serialization_failure,
    "region.database.connection.DatabaseUnavailable": connection_lost,
    "builtins.MemoryError": memory_error,
}
"""By the exception that comes of it."""

MOMENTS: Final = ("preparing", "before writing", "after writing")

FAILS_THE_NODE: Final = frozenset({"hook", "storage", "networking", "finish"})

HOOKED: Final = "10-lshw"
LATER: Final = "20-block-devices"


@frozen
class Case:
    """A node, and how its step fails: with which exception, and when. ``times`` 0: each time."""

    node: NodeName
    error: str
    moment: str
    results: Mapping[str, int]
    times: int = 0


class FaultTestCase(WorkerTestCase):
    """Sends what nodes send through the metadata service, while one step fails for each node in its own way."""

    timeout = 60

    async def prepare(self) -> None:
        await super().prepare()
        self.cases: dict[int, Case] = {}
        self.happened: dict[int, int] = {}
        self.logs = Logs(self)
        self.resource = MetadataResource(MetadataParts(self, self.intake, self, run_now))  # type: ignore[arg-type]

    # What the metadata service asks of others.

    async def find(self, consumer_key: str, token_key: str) -> Known | None:
        for case in self.cases.values():
            if case.node.system_id == token_key:
                return Known(case.node, NodeStatus.COMMISSIONING, "secret")
        return None

    # Nodes.

    async def add(self, error: str, moment: str, times: int = 0) -> Case:
        node = await self.make_node()
        results = await self.begin(node, commissioning=(HOOKED, LATER))
        case = self.cases[node.id] = Case(node, error, moment, results, times)
        return case

    async def post(self, node: NodeName, path: str, body: bytes, content_type: str = "") -> Response:
        connection = Connection(Resource(), Clock(), self.resource)
        authorization = (
            'OAuth oauth_version="1.0", oauth_signature_method="PLAINTEXT", oauth_consumer_key="c", '
            f'oauth_token="{node.system_id}", oauth_signature="%26secret", oauth_nonce="1", oauth_timestamp="1"'
        )
        headers = {"Authorization": authorization, **({"Content-Type": content_type} if content_type else {})}
        connection.send("POST", f"/MAAS/metadata/{path}", body, key=False, **headers)
        while not connection.is_answered:
            await deferLater(reactor, 0.001)
        return connection.response("POST")

    async def signal(self, node: NodeName, status: str, files: Mapping[str, bytes] | None = None, **fields: Any) -> int:
        parts = [
            f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
            for name, value in {"op": "signal", "status": status, **fields}.items()
        ] + [
            f'--b\r\nContent-Disposition: form-data; name="{name}"; filename="{name}"\r\n'
            "Content-Type: application/octet-stream\r\n\r\n".encode()
            + content
            + b"\r\n"
            for name, content in (files or {}).items()
        ]
        body = b"".join(parts) + b"--b--\r\n"
        return (await self.post(node, "2012-03-01/", body, "multipart/form-data; boundary=b")).status

    async def commission(self, case: Case) -> None:
        """All that a node says whose commissioning goes well; each time it is told that its part is done."""
        node = case.node
        report = b'{"event_type": "start", "origin": "cloudinit", "name": "modules-final", "description": "runs"}'
        self.assertEqual((await self.post(node, f"status/{node.system_id}", report)).status, 204)
        for script in (HOOKED, LATER):
            files = {script: NOISE + b"both", f"{script}.out": NOISE + script.encode(), f"{script}.err": b""}
            answer = await self.signal(
                node, "WORKING", files, script_result_id=case.results[script], exit_status=0, runtime=1
            )
            self.assertEqual(answer, 200)
        power = '{"power_address": "192.0.2.1"}'
        self.assertEqual(await self.signal(node, "OK", power_type="ipmi", power_parameters=power), 200)

    def faulty(self, name: str) -> Steps:
        """The table of steps, in which one fails as each node's case says."""
        table = dict(steps_of(following(self.database)))
        sound = table[name]

        async def perhaps(work: Work, moment: str, ask: Ask) -> None:
            case = self.cases[work.node.id]
            if case.moment != moment or (name == "hook" and work.script_name != HOOKED):
                return
            self.happened[work.node.id] = self.happened.get(work.node.id, 0) + 1
            if not case.times or self.happened[work.node.id] <= case.times:
                await FAULTS[case.error](ask)

        async def prepare(work: Work) -> Any:
            await perhaps(work, "preparing", self.database.execute)
            return await sound.prepare(work)

        async def apply(transaction: Transaction, work: Work, prepared: Any) -> Sequence[Any]:
            await perhaps(work, "before writing", transaction.execute)
            findings = await sound.apply(transaction, work, prepared)
            await perhaps(work, "after writing", transaction.execute)
            return findings

        table[name] = Step(apply, prepare)
        return table

    async def outputs_are_kept(self, case: Case) -> None:
        for script in (HOOKED, LATER):
            expected = {"output": NOISE + b"both", "stdout": NOISE + script.encode(), "stderr": b""}
            self.assertEqual(await self.outputs(case.results[script]), [expected])
            self.assertEqual(await self.result_of(case.results[script], "status", "exit_status"), (2, 0))

    async def facts_of(self, case: Case) -> tuple[dict[str, Any], str, str]:
        row = await self.database.one(
            "SELECT facts, storage_layout, power_type FROM node WHERE id = %s", (case.node.id,)
        )
        assert row is not None
        return row[0], row[1], row[2]


class FaultTests(FaultTestCase):
    async def check(self, name: str) -> None:
        """Have step ``name`` fail in every way; the whole of what is left of that."""
        # Each step in every way, and each way at every moment of one step or another.
        turn = list(steps_of(following(self.database))).index(name)
        for number, error in enumerate(FAULTS):
            await self.add(error, MOMENTS[(turn + number) % len(MOMENTS)])
        await self.process(self.faulty(name), concurrency=4)
        await gatherResults([Deferred.fromCoroutine(self.commission(case)) for case in self.cases.values()])
        await self.until_done(seconds=1.0)
        for case in self.cases.values():
            try:
                await self.look_at(case, name)
            except self.failureException as error:
                raise self.failureException(f"{name}, {case.error} {case.moment}: {error}") from error
        # One traceback for each, and none that nobody expected.
        self.assertEqual(len(self.flushLoggedErrors()), len(self.cases))

    async def look_at(self, case: Case, name: str) -> None:
        await self.outputs_are_kept(case)
        [(description, correlation)] = await self.events_of(case.node, kinds.SCRIPT_RESULT_ERROR)
        self.assertIn(case.error.removeprefix("builtins."), description)
        self.assertIn("a fault of the region, not of the machine: report it", description)
        self.assertIn(correlation, description)
        self.assertEqual(len(correlation), 32)
        tracebacks = [
            event for event in self.logs.events if "log_failure" in event and event.get("correlation") == correlation
        ]
        self.assertEqual(len(tracebacks), 1)
        kind = tracebacks[0]["log_failure"].type
        self.assertEqual(f"{kind.__module__}.{kind.__qualname__}", case.error)
        failures = await self.database.query(
            "SELECT step, correlation, payload <> '{}' FROM step_failure WHERE node_id = %s", (case.node.id,)
        )
        self.assertEqual(failures, [(name, correlation, name in ("message", "power", "storage", "networking", "tags",
                                                                 "finish"))])  # fmt: skip
        processing = await self.result_of(case.results[HOOKED], "post_processing", "correlation")
        self.assertEqual(processing, ("failed", correlation) if name == "hook" else ("done", ""))
        # It undid itself, and nothing else; what was to come after it came.
        self.assertEqual(await self.result_of(case.results[LATER], "post_processing"), ("done",))
        facts, layout, power = await self.facts_of(case)
        self.assertIn(LATER, facts)
        self.assertEqual((HOOKED in facts, "networking" in facts), (name != "hook", name != "networking"))
        self.assertEqual(
            (layout, power), ("" if name == "storage" else "flat", "manual" if name == "power" else "ipmi")
        )
        status = NodeStatus.FAILED_COMMISSIONING if name in FAILS_THE_NODE else NodeStatus.READY
        self.assertEqual(await self.status_of(case.node), status)
        self.assertEqual(len(await self.events_of(case.node, kinds.NODE_CHANGED_STATUS)), 1)
        reasons = await self.events_of(case.node, kinds.REQUEST_NODE_MARK_FAILED_SYSTEM)
        self.assertEqual(len(reasons), 1 if name in FAILS_THE_NODE else 0)
        for reason, _ in reasons:
            self.assertIn(correlation, reason)

    async def test_a_step_whose_transaction_collides_or_loses_its_connection_is_tried_again(self) -> None:
        for name in ("hook", "finish"):
            self.cases.clear()
            self.happened.clear()
            for error in ("psycopg2.errors.SerializationFailure", "region.database.connection.DatabaseUnavailable"):
                for moment in MOMENTS[1:]:
                    await self.add(error, moment, times=2)
            worker = await self.process(self.faulty(name))
            await gatherResults([Deferred.fromCoroutine(self.commission(case)) for case in self.cases.values()])
            await self.until_done(seconds=1.0)
            await worker.stop()
            for case in self.cases.values():
                await self.outputs_are_kept(case)
                self.assertEqual(await self.status_of(case.node), NodeStatus.READY)
                self.assertEqual(await self.events_of(case.node, kinds.SCRIPT_RESULT_ERROR), [])
                self.assertEqual(self.happened[case.node.id], 3)


def _check(name: str) -> Callable[[FaultTests], Any]:
    async def test(self: FaultTests) -> None:
        await self.check(name)

    return test


for _name in steps_of(following(None)):  # type: ignore[arg-type]  # only the names are looked at
    setattr(FaultTests, f"test_whatever_is_raised_in_step_{_name}_nothing_is_lost_hidden_or_refused", _check(_name))
