"""Nodes with runs and results in a test's database, and what there is afterwards."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar
from uuid import uuid4

from attrs import evolve
from psycopg2.extras import Json
from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.task import Clock, deferLater

from region.commissioning.intake import Intake
from region.commissioning.signals import Signal, SignalStatus, Upload
from region.commissioning.steps import Following, Steps
from region.commissioning.steps import steps as steps_of
from region.commissioning.worker import Worker
from region.database import Database, Transaction
from region.nodes.findings import Finding
from region.nodes.statuses import NodeStatus, ResultType, ScriptStatus
from region.nodes.values import NodeName
from rpc.events import Kind
from tests.database import DatabaseTestCase, reactor

T = TypeVar("T")

COMMISSIONING_SCRIPTS = ("10-lshw", "20-block-devices", "30-network-interfaces")
TESTING_SCRIPTS = ("smartctl-validate",)
NOISE = bytes(range(256)) * 3
"""Bytes that are no text."""


class CommissioningTestCase(DatabaseTestCase):
    """Has ``self.intake``, and a node ``self.node`` that is being commissioned with the scripts above and tested."""

    hooks: Sequence[str] = COMMISSIONING_SCRIPTS

    def setUp(self) -> Deferred[None]:  # type: ignore[override]  # trial waits for what setUp returns
        self.woken = 0
        self.names = 0
        ready = super().setUp()
        return ready.addCallback(lambda _: self.run_async(self.prepare()))

    def wake(self) -> None:
        self.woken += 1

    async def prepare(self) -> None:
        self.intake = Intake(self.database, self.hooks, self.wake)
        self.node = await self.make_node()
        self.results = await self.begin(self.node)

    async def make_node(self) -> NodeName:
        self.names += 1
        system_id, hostname = f"node{self.names:02}", f"machine-{self.names}"
        row = await self.database.one(
            "INSERT INTO node (system_id, hostname, architecture, status) VALUES (%s, %s, 'amd64/generic', %s)"
            " RETURNING id",
            (system_id, hostname, NodeStatus.COMMISSIONING.value),
        )
        assert row is not None
        return NodeName(row[0], system_id, hostname)

    async def begin(
        self, node: NodeName, testing: Sequence[str] = (), commissioning: Sequence[str] = COMMISSIONING_SCRIPTS
    ) -> dict[str, int]:
        """Begin a run of these scripts; the numbers of their results by script."""
        results: dict[str, int] = {}
        for kind, scripts in ((ResultType.COMMISSIONING, commissioning), (ResultType.TESTING, testing)):
            if not scripts:
                continue
            row = await self.database.one(
                "INSERT INTO script_set (node_id, result_type, boot_deadline) VALUES (%s, %s, now()) RETURNING id",
                (node.id, kind.value),
            )
            assert row is not None
            for script in scripts:
                result = await self.database.one(
                    "INSERT INTO script_result (script_set_id, script_name) VALUES (%s, %s) RETURNING id",
                    (row[0], script),
                )
                assert result is not None
                results[script] = result[0]
            column = "commissioning_set_id" if kind is ResultType.COMMISSIONING else "testing_set_id"
            await self.database.execute(f"UPDATE node SET {column} = %s WHERE id = %s", (row[0], node.id))
        return results

    async def end(self, node: NodeName, kind: ResultType = ResultType.COMMISSIONING) -> None:
        """End a run, as a transition does."""
        await self.database.execute(
            "UPDATE script_result SET status = 5, ended = now() FROM script_set WHERE script_set.id = script_set_id"
            " AND node_id = %s AND result_type = %s AND status IN (0, 1, 7, 10)",
            (node.id, kind.value),
        )
        await self.database.execute(
            "UPDATE script_set SET ended = now() WHERE node_id = %s AND result_type = %s AND ended IS NULL",
            (node.id, kind.value),
        )

    def finished(self, script: str, exit_status: int | None = 0, out: bytes = NOISE, **options: Any) -> Signal:
        """What a node says when a script has ended."""
        return Signal(
            SignalStatus.WORKING,
            script_result_id=self.results[script],
            exit_status=exit_status,
            uploads=(Upload(script, {"output": out + b"\n", "stdout": out, "stderr": b""}),),
            **options,
        )

    async def result(self, script: str, *columns: str) -> Any:
        """Columns of the result of a script (its status alone as a :class:`ScriptStatus`)."""
        return await self.result_of(self.results[script], *columns)

    async def result_of(self, number: int, *columns: str) -> Any:
        row = await self.database.one(
            f"SELECT {', '.join(columns or ('status',))} FROM script_result WHERE id = %s", (number,)
        )
        assert row is not None
        return row if columns else ScriptStatus(row[0])

    async def outputs(self, number: int, *, late: bool = False) -> list[dict[str, bytes]]:
        """What is stored of a result: its own outputs, or those of each late one."""
        rows = await self.database.query(
            "SELECT coalesce(late_result_id, 0), name, content FROM script_output WHERE script_result_id = %s"
            f" AND late_result_id IS {'NOT ' if late else ''}NULL ORDER BY 1, id",
            (number,),
        )
        found: dict[int, dict[str, bytes]] = {}
        for which, name, content in rows:
            found.setdefault(which, {})[name] = content
        return list(found.values())

    async def queued(self, node: NodeName | None = None) -> list[tuple[str, str | None]]:
        """The steps that are queued for a node, in order, each with the script that it is about."""
        return await self.database.query(
            "SELECT step, script_name FROM processing LEFT JOIN script_result ON script_result.id = script_result_id"
            " WHERE node_id = %s ORDER BY processing.id",
            ((node or self.node).id,),
        )

    async def everything(self) -> list[Any]:
        """All that storing can change, other than when a node was heard of."""
        tables = ("node", "script_set", "script_result", "late_result", "script_output", "signal", "processing")
        return [await self.database.query(f"SELECT * FROM {table} ORDER BY id") for table in tables]


class FakeHook:
    """Reads the output, and writes in the node's facts that it did."""

    def __init__(self, script: str) -> None:
        self.script = script

    def parse(self, outputs: Mapping[str, bytes], exit_status: int) -> Any:
        """How long the output is."""
        return {self.script: len(outputs["stdout"])}

    async def apply(self, transaction: Transaction, node: NodeName, parsed: Any) -> Sequence[Finding]:
        """Write that."""
        await _add_facts(transaction, node, parsed)
        return ()


async def _add_facts(transaction: Transaction, node: NodeName, facts: Mapping[str, Any]) -> None:
    await transaction.execute("UPDATE node SET facts = facts || %s WHERE id = %s", (Json(dict(facts)), node.id))


async def fake_storage(transaction: Transaction, node: NodeName, layout: str) -> Sequence[Finding]:
    """Counts how often it was done."""
    await transaction.execute("UPDATE node SET storage_layout = storage_layout || %s WHERE id = %s", (layout, node.id))
    return ()


async def fake_networking(transaction: Transaction, node: NodeName) -> Sequence[Finding]:
    """As above."""
    await _add_facts(transaction, node, {"networking": True})
    return ()


async def fake_tags(node: NodeName) -> Sequence[Finding]:
    """No tags."""
    return ()


def following(database: Database, **changes: Any) -> Following:
    """What steps use, in fakes."""
    hooks = {script: FakeHook(script) for script in COMMISSIONING_SCRIPTS}
    usual = Following(database, run_now, hooks, fake_storage, fake_networking, fake_tags)
    return evolve(usual, **changes)


def run_now(function: Callable[..., T], /, *arguments: Any, **options: Any) -> Deferred[T]:
    """A thread that has done it at once."""
    return maybeDeferred(function, *arguments, **options)


class WorkerTestCase(CommissioningTestCase):
    """Has region processes ``self.process()``, and a clock of theirs that goes by while something is waited for."""

    def setUp(self) -> Deferred[None]:  # type: ignore[override]  # as above
        self.clock = Clock()
        self.workers: list[Worker] = []
        self.addCleanup(lambda: self.run_async(self.stop_all()))
        return super().setUp()

    async def stop_all(self) -> None:
        for worker in self.workers:
            await worker.stop()

    async def process(self, steps: Steps | None = None, *, database: Database | None = None, **options: Any) -> Worker:
        """A worker of a region process of its own, which has begun."""
        worker = await self.idle_process(steps, database=database, **options)
        worker.start()
        return worker

    async def idle_process(
        self, steps: Steps | None = None, *, database: Database | None = None, **options: Any
    ) -> Worker:
        """A worker that has not begun."""
        owner = str(uuid4())
        await self.database.execute(
            "INSERT INTO region_process (id, name, pid, host, directory, endpoint)"
            " VALUES (%s, %s, 1, 'host', '/', 'host:1')",
            (owner, owner[:8]),
        )
        table = steps_of(following(self.database)) if steps is None else steps
        worker = Worker(database or self.database, self.clock, owner, table, **options)
        self.workers.append(worker)
        return worker

    async def until(self, condition: Callable[[], Coroutine[Any, Any, object]], seconds: float = 0.1) -> None:
        """Let time go by, each step ``seconds`` of the processes' clock, until ``condition`` gives something true."""
        while not await condition():
            self.clock.advance(seconds)
            await deferLater(reactor, 0.002)

    async def until_done(self, seconds: float = 0.1) -> None:
        """Wait until nothing is queued."""

        async def done() -> bool:
            return await self.database.one("SELECT FROM processing LIMIT 1") is None

        await self.until(done, seconds)

    async def status_of(self, node: NodeName) -> NodeStatus:
        """The status of a node."""
        row = await self.database.one("SELECT status FROM node WHERE id = %s", (node.id,))
        assert row is not None
        return NodeStatus(row[0])

    async def events_of(self, node: NodeName, kind: Kind) -> list[tuple[str, str]]:
        """Description and correlation of the events of one kind, oldest first."""
        rows = await self.database.query(
            "SELECT description, correlation FROM event WHERE node = %s AND type = %s ORDER BY id",
            (node.system_id, kind.type),
        )
        return [(description, correlation) for description, correlation in rows]
