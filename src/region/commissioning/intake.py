"""What happens first with everything that a node says: it is stored, in one transaction, and only then answered.

Nothing is looked into here that could fail for what a node's output holds. What follows from it (the scripts' hooks,
and what is done when a run has ended) is queued in the same transaction, for :mod:`region.commissioning.worker`.
What arrives again changes nothing; what arrives after the end is kept as late. The rules are in
``migrations/0007_intake.sql``, where one statement does it all.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import psycopg2
from psycopg2.extras import Json
from twisted.logger import Logger

from region.commissioning.gathering import Gathering, one
from region.commissioning.signals import Signal, SignalStatus, StatusMessage
from region.database import Database
from region.database.binary import Bytes
from region.nodes.statuses import NodeStatus, ScriptStatus
from region.nodes.values import NodeName, Standing
from rpc.events import plain

log = Logger()

FINAL: Final = frozenset({SignalStatus.OK, SignalStatus.FAILED, SignalStatus.TESTING})
"""With these a node says that its run has ended, or its commissioning."""

MAX_TEXT: Final = 2048
"""Characters of a message that are kept."""

MAX_NAME: Final = 255
"""Characters of a script's name that are kept."""

_LARGEST: Final = (1 << 63) - 1
_EXIT_STATUSES: Final = range(-(1 << 31), 1 << 31)

_TYPES: Final = {
    "the_node": "bigint", "its_token": "text", "is_retired": "boolean", "is_beat": "boolean", "is_final": "boolean",
    "its_status": "text", "its_digest": "text", "its_message": "text", "its_result": "bigint", "its_version": "bigint",
    "its_exit_status": "integer", "its_runtime": "float8", "comes_to": "smallint", "is_ending": "boolean",
    "its_power": "jsonb", "its_scripts": "text[]", "output_script": "integer[]", "output_name": "text[]",
    "output_content": "bytea[]", "with_hooks": "text[]",
}  # fmt: skip
"""The parameters of ``store_signal`` in PostgreSQL."""

_FULL: Final = "ST001"
_FAST: Final = "ST002"
"""SQLSTATEs of what is over a bound."""

_STORE: Final = f"store_signal({', '.join(f'{name} => %s::{kind}' for name, kind in _TYPES.items())})"


class SignalRefused(Exception):
    """Why a signal cannot be stored: the request is wrong, and the same one will be wrong again."""


class UnknownNode(SignalRefused):
    """There is no such node (any more), or the token is none of its, or good no more."""


class UnknownResult(SignalRefused):
    """A signal names a script result that is none of its node's."""


class TooMuch(SignalRefused):
    """A node has as much stored as it can have (``migrations/0011_bounds.sql``).

    ``is_rate``: it has sent so much within an hour, and may send this later.
    """

    def __init__(self, reason: str, *, is_rate: bool) -> None:
        super().__init__(reason)
        self.is_rate = is_rate


def comes_to(signal: Signal) -> tuple[ScriptStatus, bool]:
    """The status that a signal gives to the scripts that it is about, and whether that is how they ended.

    A script has ended when there is an exit status or output of it, or when the node gave it up; without an exit
    status that was no success.
    """
    failed = {
        SignalStatus.INSTALLING: ScriptStatus.FAILED_INSTALLING,
        SignalStatus.APPLYING_NETCONF: ScriptStatus.FAILED_APPLYING_NETCONF,
    }
    begun = {
        SignalStatus.INSTALLING: ScriptStatus.INSTALLING,
        SignalStatus.APPLYING_NETCONF: ScriptStatus.APPLYING_NETCONF,
    }
    if signal.status is SignalStatus.TIMEDOUT:
        return ScriptStatus.TIMEDOUT, True
    if signal.status in begun and signal.exit_status == 0:
        # What comes before the script went well: the script itself is still to come.
        return begun[signal.status], False
    ends = signal.exit_status is not None or bool(signal.uploads)
    if not ends and not (signal.status in FINAL and signal.script_result_id is not None):
        return begun.get(signal.status, ScriptStatus.RUNNING), False
    if signal.exit_status == 0:
        return ScriptStatus.PASSED, True
    return failed.get(signal.status, ScriptStatus.FAILED), True


def is_beat(signal: Signal) -> bool:
    """Whether a signal says nothing but that its node lives."""
    return (
        signal.script_result_id is None
        and signal.exit_status is None
        and not signal.uploads
        and not signal.power_type
        and signal.status not in FINAL
    )


class Intake:
    """Stores what nodes say.

    :param hooks: the names of the scripts whose output is looked into once it is stored.
    :param queued: called when something was queued.
    """

    def __init__(self, database: Database, hooks: Collection[str], queued: Callable[[], object]) -> None:
        self._database = database
        self._gathering = Gathering(database, _STORE)
        self._hooks = sorted(hooks)
        self._queued = queued

    async def signal(self, node: NodeName, signal: Signal, *, retired: bool = False, token: str = "") -> Standing:
        """Store a signal; where the node stands. What follows from it is queued when this returns.

        :param retired: the token that it came with was replaced, or the node is done: what it brings is kept, but
            neither is the node heard of nor does its present run end by that.
        :param token: the public part of that token; whether it is retired is then looked up as well, at the moment of
            storing, so that nothing comes between.
        :raises SignalRefused: if the signal names what there is not, or the node has as much stored as it can have;
            nothing of it was stored.
        :raises DatabaseUnavailable: if it could not be stored, or nobody knows; storing it again does no harm.
        """
        status, ends = comes_to(signal)
        if signal.script_result_id is not None and not 0 < signal.script_result_id <= _LARGEST:
            raise _unknown_result(node, signal)
        if signal.exit_status is not None and signal.exit_status not in _EXIT_STATUSES:
            raise SignalRefused(f"{signal.exit_status} is no exit status: it is not in 32 bits")
        outputs = [
            (number, kind, Bytes(content))
            for number, upload in enumerate(signal.uploads, 1)
            for kind, content in upload.files.items()
        ]
        version = signal.script_version_id
        beats = is_beat(signal)
        values: dict[str, Any] = {
            "the_node": node.id,
            "its_token": token or None,
            "is_retired": retired,
            "is_beat": beats,
            "is_final": signal.status in FINAL,
            "its_status": signal.status.value,
            "its_digest": signal.digest,
            "its_message": plain(signal.message, MAX_TEXT),
            "its_result": signal.script_result_id,
            "its_version": version if version is None or 0 < version <= _LARGEST else 0,
            "its_exit_status": signal.exit_status,
            "its_runtime": signal.runtime,
            "comes_to": status.value,
            "is_ending": ends,
            "its_power": _power(signal),
            "its_scripts": [plain(upload.script_name, MAX_NAME) or "unnamed" for upload in signal.uploads],
            "output_script": [number for number, _, _ in outputs],
            "output_name": [kind for _, kind, _ in outputs],
            "output_content": [content for _, _, content in outputs],
            "with_hooks": self._hooks,
        }
        size = sum(len(content) for upload in signal.uploads for content in upload.files.values())
        with _bounds():
            node_status, stop, problem, is_replay = await self._gathering.call(
                node.id, [values[name] for name in _TYPES], size
            )
        if problem == "node":
            raise _unknown_node(node)
        if problem == "token":
            raise UnknownNode(
                f"The token of node {node.hostname} has expired: it was replaced, or the node is done since long"
            )
        if problem == "result":
            raise _unknown_result(node, signal)
        if is_replay:
            log.debug("{node} sent a signal again: {status}", node=node.hostname, status=signal.status.value)
        elif not beats:
            self._queued()
        return Standing(NodeStatus(node_status), stop)

    async def message(self, node: NodeName, message: StatusMessage, *, retired: bool = False) -> None:
        """Store a status message. It is looked at when this has returned; see :meth:`signal` for what it raises."""
        payload = json.dumps(message_document(message), sort_keys=True)
        digest = hashlib.sha256(payload.encode()).hexdigest()
        heard = plain(f"{message.origin} {message.event_type} {message.name}: {message.description}", MAX_TEXT)
        with _bounds():
            known = await one(
                self._database,
                "SELECT store_message(%s::bigint, %s, %s, %s, %s::jsonb)",
                (node.id, retired, digest, heard, payload),
            )
        if known != (True,):
            raise _unknown_node(node)
        self._queued()

    async def ping(self, node: NodeName, heard: str) -> None:
        """A node was heard of, in another way than by a signal: it fetched its scripts, for one."""
        # Losing a heartbeat with a server that crashes is no loss: nobody has to wait for the disk.
        await one(
            self._database,
            "SELECT set_config('synchronous_commit', 'off', true), hear_node(id, %s) FROM node WHERE id = %s",
            (plain(heard, MAX_TEXT), node.id),
        )

    async def standing(self, node: NodeName, *, retired: bool = False) -> Standing:
        """Where the node stands, as after a signal."""
        found = await one(
            self._database, "SELECT status, %s OR node_is_to_stop(id, NULL) FROM node WHERE id = %s", (retired, node.id)
        )
        if found is None:
            raise _unknown_node(node)
        return Standing(NodeStatus(found[0]), found[1])


@contextmanager
def _bounds() -> Iterator[None]:
    """Have the database's word that something is over a bound be :class:`TooMuch`."""
    try:
        yield
    except psycopg2.Error as error:
        if error.pgcode not in (_FULL, _FAST):
            raise
        raise TooMuch(error.diag.message_primary or "", is_rate=error.pgcode == _FAST) from error


def message_document(message: StatusMessage) -> dict[str, Any]:
    """A status message as JSON, for the queue; :func:`region.commissioning.messages.read` reads it."""
    return {
        "event_type": plain(message.event_type, MAX_TEXT),
        "origin": plain(message.origin, MAX_TEXT),
        "name": plain(message.name, MAX_TEXT),
        "description": plain(message.description, MAX_TEXT),
        "timestamp": message.timestamp,
        "result": plain(message.result, MAX_TEXT),
        "files": [
            {
                "path": plain(file.path, MAX_TEXT),
                "content": base64.b64encode(file.content).decode(),
                "result": file.result,
            }
            for file in message.files
        ],
    }


def _power(signal: Signal) -> Json | None:
    if not signal.power_type:
        return None
    parameters: Mapping[str, Any] = {
        plain(name, MAX_TEXT): plain(value, MAX_TEXT) if isinstance(value, str) else value
        for name, value in signal.power_parameters.items()
    }
    return Json({"power_type": plain(signal.power_type, MAX_NAME), "power_parameters": parameters})


def _unknown_node(node: NodeName) -> UnknownNode:
    return UnknownNode(f"there is no node {node.hostname} ({node.system_id}), or not any more")


def _unknown_result(node: NodeName, signal: Signal) -> UnknownResult:
    return UnknownResult(f"{signal.script_result_id} is no script result of node {node.hostname} ({node.system_id})")
