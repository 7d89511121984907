"""Tests for :mod:`region.tags.evaluator`, with a process in memory, and with the real one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from twisted.internet import reactor as installed
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.error import ProcessDone
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase, TestCase

from region.tags.child import Examiner
from region.tags.evaluator import START_SECONDS, Evaluated, Evaluator, NotEvaluated
from region.tags.exchange import Evaluate, Load, Verdict, decode_question, encode_answer
from region.upstream.process import ChildFailed, ProcessConversation, TookTooLong
from tests.region.test_tags_documents import LLDP, LSHW
from tests.region.test_upstream_process import FakeProcesses

reactor = cast(Any, installed)

ENDLESS = "//*[count(//*[count(//*[count(//*) > 0]) > 0]) > 0]"
"""Takes the fourth power of the number of elements."""

LARGE = b"<list>" + b"<node><a/><b/></node>" * 4000 + b"</list>"


class Inline:
    """The child, in this process. ``died`` are questions that it does not survive, and what becomes of those."""

    def __init__(self) -> None:
        self.examiner = Examiner()
        self.died: dict[str, Callable[[], Exception]] = {}
        self.asked: list[tuple[str, float | None]] = []
        self.closed = 0

    def ask(self, question: bytes, seconds: float | None = None) -> Deferred[bytes]:
        """See :class:`region.tags.evaluator.Conversation`."""
        read = decode_question(question)
        self.asked.append((type(read).__name__, seconds))
        for words, error in self.died.items():
            if words in question.decode():
                self.examiner = Examiner()
                return fail(error())
        return succeed(self.examiner.answer(question))

    def close(self) -> Deferred[None]:
        """See :class:`region.tags.evaluator.Conversation`."""
        self.closed += 1
        return succeed(None)


class EvaluatorTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.child = Inline()
        self.evaluator = Evaluator(Clock(), 2.0, conversation=self.child)

    def evaluate(self, documents: dict[str, bytes], *definitions: str) -> Evaluated:
        evaluated: Evaluated = self.successResultOf(
            Deferred.fromCoroutine(self.evaluator.evaluate(documents, dict(enumerate(definitions))))
        )
        return evaluated

    def test_definitions_are_evaluated_one_by_one_each_in_its_time(self) -> None:
        evaluated = self.evaluate({"lshw": LSHW, "lldp": b"none"}, "//node", "//nothing", "//x:y")
        self.assertEqual(evaluated.matches, {0: True, 1: False, 2: False})
        self.assertEqual(list(evaluated.problems), [2])
        self.assertEqual(list(evaluated.unread), ["lldp"])
        self.assertEqual(self.child.asked, [("Load", START_SECONDS)] + [("Evaluate", 2.0)] * 3)

    def test_one_that_takes_too_long_costs_only_itself(self) -> None:
        self.child.died["slow"] = lambda: TookTooLong("evaluating it took longer than 2 seconds")
        evaluated = self.evaluate({"lshw": LSHW}, "//node", "//slow", "//node[@id='cpu']")
        self.assertEqual(evaluated.matches, {0: True, 1: False, 2: True})
        self.assertEqual(evaluated.problems, {1: "evaluating it took longer than 2 seconds"})
        kinds = [kind for kind, _ in self.child.asked]
        self.assertEqual(kinds, ["Load", "Evaluate", "Evaluate", "Evaluate", "Load", "Evaluate"])

    def test_one_that_ends_the_process_is_a_problem(self) -> None:
        self.child.died["crash"] = lambda: ChildFailed("the process failed (signal 11)")
        evaluated = self.evaluate({"lshw": LSHW}, "//crash")
        self.assertEqual(evaluated.problems, {0: "evaluating it failed: the process failed (signal 11)"})

    def test_a_process_that_forgets_again_and_again_is_a_problem(self) -> None:
        self.patch(self.child.examiner, "examine", lambda question: Verdict(False, is_loaded=False))
        answers = iter([{"kind": "Loaded", "value": {"problems": {}}}] * 2)

        def answer(data: bytes) -> bytes:
            question = decode_question(data)
            if isinstance(question, Load):
                return str(next(answers)).replace("'", '"').encode()
            assert isinstance(question, Evaluate)
            return encode_answer(Verdict(False, is_loaded=False))

        self.patch(self.child.examiner, "answer", answer)
        self.assertIn("again and again", self.evaluate({"lshw": LSHW}, "//node").problems[0])

    def test_a_process_that_does_not_start_says_nothing_of_definitions(self) -> None:
        self.child.died["Load"] = lambda: ChildFailed("no process could be started")
        failed = Deferred.fromCoroutine(self.evaluator.evaluate({"lshw": LSHW}, {1: "//node"}))
        self.assertIn("no process could be started", str(self.failureResultOf(failed, NotEvaluated).value))
        self.child.died["Check"] = lambda: ChildFailed("no process could be started")
        checked = Deferred.fromCoroutine(self.evaluator.check_and_close("//node"))
        self.assertIn("could not be checked", str(self.failureResultOf(checked, NotEvaluated).value))
        self.assertEqual(self.child.closed, 1)

    def test_without_documents_nothing_is_true_and_nobody_is_asked(self) -> None:
        self.assertEqual(self.evaluate({}, "//node", "1"), Evaluated({0: False, 1: False}, had_documents=False))
        self.assertEqual(self.evaluate({"lshw": LSHW}), Evaluated({}))
        self.assertEqual(self.child.asked, [])

    def test_a_definition_is_checked(self) -> None:
        for definition, reason in (("//node", ""), ("//[", "Invalid expression")):
            checked = Deferred.fromCoroutine(self.evaluator.check(definition))
            self.assertEqual(self.successResultOf(checked), reason)


class KillingTests(SynchronousTestCase):
    def test_each_question_has_a_time_of_its_own(self) -> None:
        processes = FakeProcesses()
        conversation = ProcessConversation(processes, "some.module", "evaluating it", 30)
        answered = conversation.ask(b"question", 2)
        [child] = processes.children
        processes.advance(1.9)
        self.assertEqual(child.transport.signals, [])
        processes.advance(0.1)
        self.assertEqual(child.transport.signals, ["KILL"])
        child.processEnded(Failure(ProcessDone(0)))
        text = str(self.failureResultOf(answered, TookTooLong).value)
        self.assertEqual(text, "evaluating it took longer than 2 seconds")


class RealChildTests(TestCase):
    timeout = 60

    async def test_a_definition_without_end_is_killed_and_the_others_are_evaluated(self) -> None:
        evaluator = Evaluator(reactor, 2.0)
        self.addCleanup(evaluator.close)
        definitions = {1: "//node", 2: ENDLESS, 3: "//lldp:interface", 4: "count(//lshw:node) = 4000"}
        evaluated = await evaluator.evaluate({"lshw": LARGE, "lldp": LLDP}, definitions)
        self.assertEqual(evaluated.matches, {1: True, 2: False, 3: True, 4: True})
        self.assertEqual(evaluated.problems, {2: "evaluating it took longer than 2 seconds"})

    async def test_one_that_needs_all_memory_ends_within_its_limit(self) -> None:
        evaluator = Evaluator(reactor, 30)
        self.addCleanup(evaluator.close)
        # Each concat doubles what it is given: to 576 MB, if it were let.
        doubling = "string(//node[1]/@id)"
        for _ in range(6):
            doubling = f"concat({doubling}, {doubling})"
        document = b'<list><node id="' + b"x" * 9_000_000 + b'"/></list>'
        evaluated = await evaluator.evaluate({"lshw": document}, {1: f"string-length({doubling})", 2: "//node"})
        self.assertTrue(evaluated.matches[2])
        self.assertFalse(evaluated.matches[1])
        self.assertEqual(list(evaluated.problems), [1])

    async def test_definitions_are_checked_by_the_process(self) -> None:
        evaluator = Evaluator(reactor, 1)
        self.assertEqual(await evaluator.check_and_close("//node"), "")
        self.assertIn("no prefix 'x'", await evaluator.check_and_close("//x:y"))
