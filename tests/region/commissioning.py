"""Nodes with runs and results in a test's database, and what there is afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twisted.internet.defer import Deferred

from region.commissioning.intake import Intake
from region.commissioning.signals import Signal, SignalStatus, Upload
from region.nodes.statuses import NodeStatus, ResultType, ScriptStatus
from region.nodes.values import NodeName
from tests.database import DatabaseTestCase

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
