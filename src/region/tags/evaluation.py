"""Evaluates tags on one node: reads what is to be evaluated, has it evaluated, and writes what is still true.

No transaction is open while a definition is evaluated. What it came to is written only if, with the node locked, its
documents are still those that were read, and the tag's definition is of the same generation; so whoever is late, in
whichever region process, changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from attrs import frozen
from twisted.internet.defer import DeferredSemaphore
from twisted.logger import Logger

from region.database import Database, Transaction
from region.nodes.findings import Finding
from region.nodes.kinds import TAGS_NOT_EVALUATED
from region.nodes.statuses import ScriptStatus
from region.nodes.values import NodeName
from region.tags.evaluator import Evaluated, Evaluator
from region.tags.store import Tag, automatic, keep_problem

log = Logger()

SCRIPTS: Final = {"10-lshw": "lshw", "40-lldp": "lldp"}
"""The scripts whose standard output is a document, and the document's name."""

PROCESSES: Final = 2
"""Nodes that are evaluated at once, by a region process, at the end of their commissioning."""

_TRIES: Final = 5
"""How often a node is evaluated whose documents are others each time that it has been."""


@frozen
class Documents:
    """What scripts said, by the document's name. ``results`` are the numbers of their results: others, if they ran
    again."""

    results: tuple[int, ...]
    contents: Mapping[str, bytes]


class Tagger:
    """Evaluates tags on nodes, one node at a time and each with a transaction of its own.

    :param evaluator: makes what evaluates; it is closed after use.
    """

    def __init__(self, database: Database, evaluator: Callable[[], Evaluator]) -> None:
        self._database = database
        self._new_evaluator = evaluator
        self._at_once = DeferredSemaphore(PROCESSES)

    async def evaluate_node(self, node: NodeName) -> Sequence[Finding]:
        """Evaluate all tags on a node whose commissioning has come to its end.

        :return: what people should know: which tags could not be evaluated, or which documents not be read.
        :raises NotEvaluated: if nothing could be evaluated.
        """
        await self._at_once.acquire()
        try:
            tags = await automatic(self._database)
            if not tags:
                return ()
            evaluator = self._new_evaluator()
            try:
                evaluated = await self.evaluate(node, tags, evaluator)
            finally:
                await evaluator.close()
        finally:
            self._at_once.release()
        return [Finding(TAGS_NOT_EVALUATED, text) for text in _sentences(tags, evaluated)]

    async def evaluate(self, node: NodeName, tags: Sequence[Tag], evaluator: Evaluator) -> Evaluated:
        """Evaluate ``tags`` on a node, and write what came of it. A node that was deleted meanwhile is no error.

        :raises NotEvaluated: if nothing could be evaluated.
        """
        for _ in range(_TRIES):
            documents = await _read(self._database, node)
            held = await self._database.query(
                "SELECT tag_id FROM node_tag WHERE node_id = %s AND tag_id = ANY(%s)",
                (node.id, [tag.id for tag in tags]),
            )
            evaluated = await evaluator.evaluate(documents.contents, {tag.id: tag.definition for tag in tags})
            if {number for number, value in evaluated.matches.items() if value} == {row[0] for row in held}:
                break  # as it is; who has changed it since then knew more
            if await self._write(node, tags, documents, evaluated):
                break
        else:
            log.warn(
                "The tags of {node} are not evaluated: its results changed each of {tries} times that they were",
                node=node.hostname, tries=_TRIES,
            )  # fmt: skip
        await self._keep_problems(node, tags, evaluated)
        return evaluated

    async def _write(self, node: NodeName, tags: Sequence[Tag], documents: Documents, evaluated: Evaluated) -> bool:
        """Write what came of it; false if its documents are others by now."""

        async def change(transaction: Transaction) -> bool:
            if await transaction.one("SELECT FROM node WHERE id = %s FOR NO KEY UPDATE", (node.id,)) is None:
                return True
            if await _results(transaction, node) != documents.results:
                return False
            rows = await transaction.query(
                "SELECT id, generation FROM tag WHERE id = ANY(%s) ORDER BY id FOR SHARE", ([tag.id for tag in tags],)
            )
            current = dict(rows)
            valid = [tag.id for tag in tags if current.get(tag.id) == tag.generation]
            await transaction.execute(
                "INSERT INTO node_tag (node_id, tag_id) SELECT %s, unnest(%s::bigint[]) ON CONFLICT DO NOTHING",
                (node.id, [number for number in valid if evaluated.matches[number]]),
            )
            await transaction.execute(
                "DELETE FROM node_tag WHERE node_id = %s AND tag_id = ANY(%s)",
                (node.id, [number for number in valid if not evaluated.matches[number]]),
            )
            return True

        return await self._database.transact(change)

    async def _keep_problems(self, node: NodeName, tags: Sequence[Tag], evaluated: Evaluated) -> None:
        for text in _sentences(tags, evaluated):
            log.warn("{node}: {text}", node=node.hostname, text=text)
        for tag in tags:
            if problem := evaluated.problems.get(tag.id):
                await keep_problem(self._database, tag, f"on {node.hostname}: {problem}")


def _sentences(tags: Sequence[Tag], evaluated: Evaluated) -> Sequence[str]:
    found = list[str]()
    if evaluated.problems:
        listed = "; ".join(f"{tag.name}: {evaluated.problems[tag.id]}" for tag in tags if tag.id in evaluated.problems)
        found.append(f"These tags could not be evaluated, and are not set: {listed}. Change their definitions.")
    if evaluated.unread:
        scripts = {name: script for script, name in SCRIPTS.items()}
        listed = "; ".join(f"{scripts[name]}: {why}" for name, why in evaluated.unread.items())
        found.append(f"Tags were evaluated without the output of {listed}.")
    return found


_FROM: Final = """
FROM node JOIN script_result ON script_set_id = node.commissioning_set_id
          JOIN script_output ON script_result_id = script_result.id AND late_result_id IS NULL AND name = 'stdout'
WHERE node.id = %s AND script_result.status = %s AND script_name = ANY(%s) ORDER BY script_result.id
"""


def _which(node: NodeName) -> tuple[object, ...]:
    return (node.id, ScriptStatus.PASSED.value, list(SCRIPTS))


async def _read(database: Database, node: NodeName) -> Documents:
    rows = await database.query(f"SELECT script_result.id, script_name, content {_FROM}", _which(node))
    return Documents(tuple(row[0] for row in rows), {SCRIPTS[name]: content for _, name, content in rows})


async def _results(transaction: Transaction, node: NodeName) -> tuple[int, ...]:
    rows = await transaction.query(f"SELECT script_result.id {_FROM}", _which(node))
    return tuple(row[0] for row in rows)
