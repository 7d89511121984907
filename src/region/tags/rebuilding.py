"""Evaluates tags on all nodes after their definitions were changed: who does it, and where it goes on if that one ends.

One process at a time does it, the one that holds an advisory lock; how far it has come is in the database, so another
one goes on from there if it ends. All tags that are to be evaluated take part in one pass over the nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from region.database import Database, DatabaseUnavailable, Session
from region.nodes.values import NodeName
from region.tags.evaluation import Tagger
from region.tags.evaluator import Evaluated, Evaluator, NotEvaluated
from region.tags.store import CHANNEL, Tag, advance, finish, give_up, next_nodes, pending
from rpc.waking import Waker

log = Logger()

LOCK: Final = (0x5354414E, 5)
"""The advisory lock of the region process that evaluates."""

LOOK_SECONDS: Final = 60.0
"""How often it is looked whether there is something to evaluate that nobody does."""

RETRY_SECONDS: Final = (1.0, 60.0)
"""How soon it is tried again after a failure: at first, and at most."""

BATCH: Final = 100
"""Nodes after which it is kept how far it has come."""

FAILURES: Final = 10
"""Nodes with documents, one after the other, on which a tag could not be evaluated, and after which it is given up."""

STUCK: Final = 3
"""Times that nothing could be evaluated on a node, after which it is left out."""


class Rebuilder:
    """Keeps the tags of all nodes in line with the definitions.

    :param evaluator: makes what evaluates.
    """

    def __init__(
        self, database: Database, tagger: Tagger, evaluator: Callable[[], Evaluator], clock: IReactorTime
    ) -> None:
        self._database = database
        self._tagger = tagger
        self._new_evaluator = evaluator
        self._waker = Waker(self._work, clock, retry=RETRY_SECONDS, failed=self._not_done)
        self._failed: dict[tuple[int, int], int] = {}
        self._stuck: tuple[int, int] = (0, 0)

    def start(self) -> None:
        """Begin: also with what was left unfinished."""
        self._database.listen(CHANNEL, lambda payload: self.wake())
        self._waker.start()

    def stop(self) -> Deferred[None]:
        """End; what is under way is broken off, and whoever does it next goes on from the last batch."""
        return self._waker.stop()

    def when_idle(self) -> Deferred[None]:
        """Fires when nothing is being evaluated; more may come at any time."""
        return self._waker.when_idle()

    def wake(self) -> None:
        """See whether there is something to evaluate; if that is being done already, once more after it."""
        self._waker.wake()

    async def _work(self) -> float:
        if await pending(self._database):
            async with self._database.session() as session:
                row = await session.one("SELECT pg_try_advisory_lock(%s, %s)", LOCK)
                if row == (True,):  # otherwise another process is at it; unless it ends, there is nothing to do
                    await self._rebuild(session)
        return LOOK_SECONDS

    def _not_done(self, reason: Failure, seconds: float | None) -> None:
        if reason.check(CancelledError) and seconds is None:
            log.info("Evaluating tags was broken off, because the region is stopping")
        elif reason.check(DatabaseUnavailable, NotEvaluated):
            log.warn("Evaluating tags waits: {reason}", reason=str(reason.value))
        else:
            log.failure("Evaluating tags broke off, on an error of the region's own", reason)

    async def _rebuild(self, session: Session) -> None:
        evaluator = self._new_evaluator()
        try:
            while self._waker.is_started and session.alive and (tags := await pending(self._database)):
                nodes = await next_nodes(self._database, tags[0].position, BATCH)
                if nodes:
                    await self._batch(tags, nodes, evaluator)
                    continue
                for tag in tags:
                    if tag.position == tags[0].position:
                        await finish(self._database, tag)
                        self._failed.pop((tag.id, tag.generation), None)
                        log.info("Tag {tag} is evaluated on all nodes", tag=tag.name, generation=tag.generation)
        finally:
            await evaluator.close()

    async def _batch(self, tags: Sequence[Tag], nodes: Sequence[NodeName], evaluator: Evaluator) -> None:
        remaining = list(tags)
        done = tags[0].position
        try:
            for node in nodes:
                if not self._waker.is_started:
                    break
                wanted = [tag for tag in remaining if tag.position < node.id]
                evaluated = await self._one(node, wanted, evaluator)
                done = node.id
                for tag in wanted:
                    if self._fails_for_good(tag, evaluated):
                        remaining.remove(tag)
                        await self._give_up(tag, node, evaluated)
                if evaluated.problems:
                    # That took long, and is not to be done again by whoever comes next.
                    await self._advance(remaining, done)
        finally:
            # Also when a node could not be evaluated: those before it were.
            await self._advance(remaining, done)

    async def _advance(self, tags: Sequence[Tag], position: int) -> None:
        for tag in tags:
            await advance(self._database, tag, position)

    async def _one(self, node: NodeName, tags: Sequence[Tag], evaluator: Evaluator) -> Evaluated:
        try:
            return await self._tagger.evaluate(node, tags, evaluator)
        except NotEvaluated as error:
            stuck, times = self._stuck
            self._stuck = (node.id, times + 1 if stuck == node.id else 1)
            if self._stuck[1] < STUCK:
                raise
            log.error(
                "The tags of {node} stay as they are, for they could not be evaluated {times} times: {reason}",
                node=node.hostname, times=STUCK, reason=str(error),
            )  # fmt: skip
            return Evaluated({}, had_documents=False)

    def _fails_for_good(self, tag: Tag, evaluated: Evaluated) -> bool:
        """Count on how many nodes, one after the other, the tag could not be evaluated; whether they are too many."""
        key = (tag.id, tag.generation)
        if tag.id not in evaluated.problems:
            if evaluated.had_documents:
                self._failed.pop(key, None)
            return False
        self._failed[key] = self._failed.get(key, 0) + 1
        return self._failed[key] >= FAILURES

    async def _give_up(self, tag: Tag, node: NodeName, evaluated: Evaluated) -> None:
        self._failed.pop((tag.id, tag.generation), None)
        problem = (
            f"given up, and set on no further node, because it could not be evaluated on {FAILURES} of them, last on "
            f"{node.hostname}: {evaluated.problems[tag.id]}"
        )
        await give_up(self._database, tag, node.id, problem)
        log.error("Tag {tag}: {problem}", tag=tag.name, problem=problem)
