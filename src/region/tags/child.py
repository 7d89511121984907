"""The process that evaluates definitions, so that none of them can block the region, or take its memory.

It is killed by whoever asked it (:mod:`region.tags.evaluator`) when an answer takes too long; it dies with the region.
"""

from __future__ import annotations

from typing import Any, Final

from region.tags.documents import CannotEvaluate, InvalidDefinition, check, evaluate, merge
from region.tags.exchange import (
    Answer,
    Check,
    Evaluate,
    Load,
    Loaded,
    Question,
    Verdict,
    decode_question,
    encode_answer,
)
from region.upstream.serving import serve

MEMORY: Final = 512 << 20
"""Bytes of address space that the process may use."""


class Examiner:
    """Answers questions, and keeps the documents that it was told last."""

    def __init__(self) -> None:
        self._document: Any = None

    def answer(self, data: bytes) -> bytes:
        """The answer to a question; both as bytes."""
        return encode_answer(self.examine(decode_question(data)))

    def examine(self, question: Question) -> Answer:
        """The answer to a question."""
        try:
            match question:
                case Load(documents):
                    self._document = None
                    self._document, problems = merge(documents)
                    return Loaded(problems)
                case Check(definition):
                    check(definition)
                    return Verdict(True)
                case Evaluate(definition):
                    if self._document is None:
                        return Verdict(False, is_loaded=False)
                    return Verdict(evaluate(definition, self._document))
        except (InvalidDefinition, CannotEvaluate) as error:
            return Verdict(False, str(error))
        except MemoryError as error:
            return _exhausted(question, error)


def _exhausted(question: Question, error: MemoryError) -> Answer:
    why = f"it needs more than {MEMORY >> 20} MiB of memory {error}".strip()
    return Loaded(dict.fromkeys(question.documents, why)) if isinstance(question, Load) else Verdict(False, why)


if __name__ == "__main__":
    serve(Examiner().answer, MEMORY)
