"""Asks the process that evaluates definitions, and never waits for it longer than it may take.

A definition that takes too long, or more memory than there is for it, costs the process its life and itself its value;
the next one is evaluated by another process, as if nothing had been.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol

from attrs import field, frozen
from twisted.internet.defer import Deferred

from region.tags.exchange import (
    Answer,
    Check,
    Evaluate,
    Load,
    Loaded,
    Question,
    Verdict,
    decode_answer,
    encode_question,
)
from region.upstream.process import ChildFailed, ProcessConversation, TookTooLong

START_SECONDS: Final = 30.0
"""How long the process may take to start and to read the documents: that is no definition's fault."""

MODULE: Final = "region.tags.child"


class Conversation(Protocol):
    """Has questions answered; :class:`region.upstream.process.ProcessConversation` is one."""

    def ask(self, question: bytes, seconds: float | None = None) -> Deferred[bytes]:
        """The answer; fails with ChildFailed if none comes in ``seconds``."""

    def close(self) -> Deferred[None]:
        """No more is asked; fires when nothing is left running."""


class NotEvaluated(Exception):
    """The process could not be asked at all, which says nothing of any definition; the text says why."""


@frozen
class Evaluated:
    """What came of evaluating definitions on one node's documents.

    :param matches: whether each is true, by what it was asked as; false where that could not be told.
    :param problems: why that could not be told.
    :param unread: why documents could not be read, by their names.
    :param had_documents: whether there was anything to evaluate them on; if not, none is true.
    """

    matches: Mapping[int, bool]
    problems: Mapping[int, str] = field(factory=dict)
    unread: Mapping[str, str] = field(factory=dict)
    had_documents: bool = True


class Evaluator:
    """Evaluates definitions in a process, which is started when there is something to evaluate.

    :param seconds: that one definition may take on one node's documents.
    """

    def __init__(self, reactor: Any, seconds: float, *, conversation: Conversation | None = None) -> None:
        self._seconds = seconds
        self._conversation = conversation or ProcessConversation(reactor, MODULE, "evaluating it", START_SECONDS)

    def close(self) -> Deferred[None]:
        """End the process; it is started again if more is asked."""
        return self._conversation.close()

    async def check(self, definition: str) -> str:
        """Why the definition cannot be one; empty if it can.

        :raises NotEvaluated: if that could not be found out.
        """
        try:
            # What an empty document takes is the start of the process.
            verdict = await self._ask(Check(definition), START_SECONDS)
        except ChildFailed as error:
            raise NotEvaluated(f"the definition could not be checked: {error}") from error
        assert isinstance(verdict, Verdict)
        return verdict.problem

    async def check_and_close(self, definition: str) -> str:
        """As :meth:`check`, after which the process is ended."""
        try:
            return await self.check(definition)
        finally:
            await self.close()

    async def evaluate(self, documents: Mapping[str, bytes], definitions: Mapping[int, str]) -> Evaluated:
        """Evaluate ``definitions``, by number, on a node's documents, by name; without a document none is true.

        :raises NotEvaluated: if the process could not be asked.
        """
        if not definitions or not documents:
            return Evaluated(dict.fromkeys(definitions, False), had_documents=bool(documents))
        matches, problems = dict[int, bool](), dict[int, str]()
        unread = await self._load(documents)
        for number, definition in definitions.items():
            verdict = await self._evaluate(definition, documents)
            matches[number] = verdict.value and not verdict.problem
            if verdict.problem:
                problems[number] = verdict.problem
        return Evaluated(matches, problems, unread)

    async def _load(self, documents: Mapping[str, bytes]) -> Mapping[str, str]:
        try:
            loaded = await self._ask(Load(documents), START_SECONDS)
        except ChildFailed as error:
            raise NotEvaluated(f"the node's documents could not be read: {error}") from error
        assert isinstance(loaded, Loaded)
        return loaded.problems

    async def _evaluate(self, definition: str, documents: Mapping[str, bytes]) -> Verdict:
        try:
            verdict = await self._ask(Evaluate(definition), self._seconds)
            if isinstance(verdict, Verdict) and not verdict.is_loaded:
                # The process is another one, for the last definition has ended the one that had been told.
                await self._load(documents)
                verdict = await self._ask(Evaluate(definition), self._seconds)
        except TookTooLong as error:
            return Verdict(False, str(error))
        except ChildFailed as error:
            return Verdict(False, f"evaluating it failed: {error}")
        assert isinstance(verdict, Verdict)
        if not verdict.is_loaded:
            return Verdict(False, "the process that evaluates it ended again and again")
        return verdict

    async def _ask(self, question: Question, seconds: float) -> Answer:
        return decode_answer(await self._conversation.ask(encode_question(question), seconds))
