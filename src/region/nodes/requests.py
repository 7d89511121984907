"""What can people ask of nodes? Each request is one transaction, with its events, or changes nothing."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

import psycopg2
from attrs import field, frozen

from region import events
from region.config import CommissioningConfig
from region.database import Database, Transaction
from region.nodes import kinds, names, transitions
from region.nodes.life import Input
from region.nodes.runs import IChoice, RunOptions, begin
from region.nodes.statuses import ResultType
from region.nodes.transitions import Told
from region.nodes.values import NodeName
from region.racks import new_system_id
from region.scripts.choose import ScriptsUnknown

T = TypeVar("T")

_TRIES: Final = 5
"""For a system id that nothing else has; of two thousand million, the first nearly always is one."""


class Choose(Protocol):
    """Which scripts are to run; :func:`region.scripts.choose.choose` does it."""

    def __call__(
        self, transaction: Transaction, result_type: ResultType, names_or_tags: Sequence[str] | None = None
    ) -> Awaitable[Sequence[IChoice]]: ...


class RequestRefused(ValueError):
    """A request cannot be granted; ``messages`` says for each field what is wrong."""

    def __init__(self, messages: Mapping[str, Sequence[str]]) -> None:
        super().__init__("; ".join(f"{name}: {' '.join(said)}" for name, said in messages.items()))
        self.messages = messages


@frozen
class NewNode:
    """A node that is to be there. ``hostname`` "" for one that is made from its system id."""

    architecture: str
    mac_addresses: Sequence[str]
    hostname: str = ""
    description: str = ""
    power_type: str = "manual"
    power_parameters: Mapping[str, Any] = field(factory=dict)


@frozen
class Plan:
    """Which scripts a run is to have, by names or tags (None: those by default), and its options."""

    commissioning: Sequence[str] | None = None
    testing: Sequence[str] | None = None
    options: RunOptions = field(factory=RunOptions)


@frozen
class By:
    """Who asks, and what the log calls the request."""

    username: str = ""
    correlation: str = ""


class NodeRequests:
    """What people ask of nodes.

    :param choose: which scripts are to run.
    """

    def __init__(self, database: Database, settings: CommissioningConfig, choose: Choose) -> None:
        self._database = database
        self._settings = settings
        self._choose = choose

    async def create(self, new: NewNode, by: By, plan: Plan | None = None) -> NodeName:
        """Make a node, and begin to commission it if there is a ``plan``; its name.

        :raises RequestRefused: if its host name or one of its MAC addresses is taken, or the plan names what is not.
        """

        async def creating(transaction: Transaction) -> NodeName:
            node = await _insert(transaction, new)
            await _insert_interfaces(transaction, node, new.mac_addresses)
            created = Told(kinds.NODE_CREATED, f"({by.username})" if by.username else "")
            if plan is not None:
                await self._begin(transaction, node.id, plan, by, commission=True, first=(created,))
            else:
                await transitions.tell(transaction, node, [created], username=by.username, correlation=by.correlation)
            return node

        return await self._asked(creating, hostname=new.hostname, mac_addresses=new.mac_addresses)

    async def update(self, node: NodeName, values: Mapping[str, Any]) -> None:
        """Give columns of a node (``hostname``, ``description``, ``architecture``, ``power_type`` and
        ``power_parameters``) new values.

        :raises RequestRefused: if the host name is taken.
        :raises NoSuchNode: if it is gone.
        """
        unknown = values.keys() - _UPDATABLE
        if unknown:
            raise ValueError(f"a node's {', '.join(sorted(unknown))} cannot be changed so")
        stored = {name: json.dumps(value) if name == "power_parameters" else value for name, value in values.items()}
        assignments = ", ".join(f"{name} = %({name})s" for name in stored)

        async def updating(transaction: Transaction) -> None:
            await transitions.lock(transaction, node.id)
            if stored:
                await transaction.execute(
                    f"UPDATE node SET {assignments}, updated = now() WHERE id = %(id)s", {**stored, "id": node.id}
                )

        await self._asked(updating, hostname=values.get("hostname", ""))

    async def delete(self, node: NodeName, by: By) -> None:
        """Forget a node, with all that it ever ran. Its events stay.

        :raises NoSuchNode: if it is gone.
        """

        async def deleting(transaction: Transaction) -> None:
            name, _, _ = await transitions.lock(transaction, node.id)
            await transaction.execute("DELETE FROM node WHERE id = %s", (node.id,))
            description = f"({by.username})" if by.username else ""
            await events.record(
                transaction, name, kinds.NODE_DELETED, description, correlation=by.correlation, username=by.username
            )

        await self._database.transact(deleting)

    async def commission(self, node: NodeName, plan: Plan, by: By) -> None:
        """Begin to commission a node.

        :raises RequestRefused: if the plan names what is not.
        :raises NotAllowed: if its status does not allow it.
        :raises NoSuchNode: if it is gone.
        """
        await self._database.transact(lambda transaction: self._begin(transaction, node.id, plan, by, commission=True))

    async def test(self, node: NodeName, plan: Plan, by: By) -> None:
        """Begin to test a node, without commissioning it.

        :raises RequestRefused: if the plan names what is not, or nothing that is to run.
        :raises NotAllowed: if its status does not allow it.
        :raises NoSuchNode: if it is gone.
        """
        await self._database.transact(lambda transaction: self._begin(transaction, node.id, plan, by, commission=False))

    async def change(self, node: NodeName, given: Input, comment: str, by: By) -> None:
        """Let what somebody asks for happen to a node: that its run is aborted, or that it is marked.

        :raises NotAllowed: if its status does not allow it.
        :raises NoSuchNode: if it is gone.
        """
        await self._database.transact(
            lambda transaction: transitions.change(
                transaction, node.id, given, reason=comment, username=by.username, correlation=by.correlation
            )
        )

    async def _begin(
        self,
        transaction: Transaction,
        node_id: int,
        plan: Plan,
        by: By,
        *,
        commission: bool,
        first: Sequence[Told] = (),
    ) -> None:
        # Nodes are locked before scripts, here as everywhere.
        await transitions.lock(transaction, node_id)
        choices: dict[ResultType, Sequence[IChoice]] = {}
        if commission:
            choices[ResultType.COMMISSIONING] = await self._chosen(
                transaction, ResultType.COMMISSIONING, plan.commissioning
            )
        choices[ResultType.TESTING] = await self._chosen(transaction, ResultType.TESTING, plan.testing)
        if not commission and not choices[ResultType.TESTING]:
            raise RequestRefused({"testing_scripts": ["There is no such test: name one that there is."]})
        await begin(
            transaction, node_id, plan.options, choices,
            settings=self._settings, first=first, username=by.username, correlation=by.correlation,
        )  # fmt: skip

    async def _chosen(
        self, transaction: Transaction, result_type: ResultType, wanted: Sequence[str] | None
    ) -> Sequence[IChoice]:
        try:
            return await self._choose(transaction, result_type, wanted)
        except ScriptsUnknown as error:
            raise RequestRefused({f"{result_type.name.lower()}_scripts": [str(error)]}) from error

    async def _asked(
        self,
        function: Callable[[Transaction], Awaitable[T]],
        *,
        hostname: str = "",
        mac_addresses: Sequence[str] = (),
    ) -> T:
        """Run a transaction; what is taken already is refused, with what has it."""
        try:
            return await self._database.transact(function)
        except psycopg2.errors.UniqueViolation as error:
            taken = error.diag.constraint_name
            if taken == "node_hostname_key":
                message = f"Another node is called '{hostname}'."
                raise RequestRefused({"hostname": [message]}) from error
            if taken == "interface_mac":
                raise RequestRefused({"mac_addresses": await self._taken(mac_addresses)}) from error
            raise

    async def _taken(self, mac_addresses: Sequence[str]) -> list[str]:
        rows = await self._database.query(
            """SELECT mac_address, hostname, system_id FROM interface JOIN node ON node.id = node_id
               WHERE mac_address = ANY(%s) ORDER BY mac_address""",
            (list(mac_addresses),),
        )
        if not rows:
            return ["One of these MAC addresses is given twice, or was another node's a moment ago."]
        return [f"{address} is of node {hostname} ({system_id})." for address, hostname, system_id in rows]


_UPDATABLE: Final = frozenset({"hostname", "description", "architecture", "power_type", "power_parameters"})


async def _insert(transaction: Transaction, new: NewNode) -> NodeName:
    for _ in range(_TRIES):
        system_id = new_system_id()
        row = await transaction.one(
            """INSERT INTO node (system_id, hostname, description, architecture, power_type, power_parameters)
               SELECT %(system_id)s, %(hostname)s, %(description)s, %(architecture)s, %(power_type)s, %(parameters)s
               WHERE NOT EXISTS (SELECT FROM rack WHERE system_id = %(system_id)s)
               ON CONFLICT (system_id) DO NOTHING RETURNING id, system_id, hostname""",
            {
                "system_id": system_id,
                "hostname": new.hostname or names.default_hostname(system_id),
                "description": new.description,
                "architecture": new.architecture,
                "power_type": new.power_type,
                "parameters": json.dumps(dict(new.power_parameters)),
            },
        )
        if row is not None:
            return NodeName(*row)
    raise RuntimeError(f"{_TRIES} random system ids were taken, which cannot be chance")


async def _insert_interfaces(transaction: Transaction, node: NodeName, mac_addresses: Sequence[str]) -> None:
    """The interfaces of a new node, of which no more than the MAC addresses is known; the first is for booting."""
    for number, address in enumerate(mac_addresses):
        row = await transaction.one(
            "INSERT INTO interface (node_id, name, mac_address) VALUES (%s, %s, %s) RETURNING id",
            (node.id, f"eth{number}", address),
        )
        if not number:
            await transaction.execute("UPDATE node SET boot_interface_id = %s WHERE id = %s", (row and row[0], node.id))
