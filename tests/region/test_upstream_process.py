"""Tests for :mod:`region.upstream.process` and the child, with real processes."""

from __future__ import annotations

import os
import select
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

from twisted.internet import reactor as installed
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.error import ProcessDone, ProcessTerminated
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase, TestCase

from region.upstream import SourceFailed, SourceRead
from region.upstream import child as child_module
from region.upstream.child import answer, examine
from region.upstream.documents import ProductsRead
from region.upstream.exchange import (
    Question,
    Refused,
    decode_answer,
    decode_question,
    encode_answer,
    encode_question,
)
from region.upstream.process import MAX_ANSWER, ChildFailed, in_a_process
from region.upstream.reader import SourceReader
from tests.streams import IMAGES, NOW, Stream, signer

reactor = cast(Any, installed)


def a_question(root: Path) -> tuple[Question, bytes]:
    """A question about a signed products document, and the document."""
    stream = Stream(root, signer())
    stream.add()
    del stream.add("jammy")["label"]
    question = Question(stream.source(), "http://images.example/", IMAGES)
    return question, stream.rendered()[f"streams/v1/{IMAGES}.sjson"]


_WATCHED = """
import os, sys
from region.upstream.child import answer

CHANGES = {"os.mkdir", "os.rmdir", "os.rename", "os.remove", "os.link", "os.symlink", "os.truncate", "os.chmod"}

def watch(event, arguments):
    opens = event == "open" and not isinstance(arguments[0], int)  # else a pipe, or memory, that is open already
    writes = opens and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    if writes or event in CHANGES:
        sys.stderr.write(f"{event} {arguments}\\n")

question = sys.stdin.buffer.read()
sys.addaudithook(watch)
sys.stdout.buffer.write(answer(question))
"""
"""The child's work, by a Python that says of every file that is changed or opened to be written."""


class ExchangeTests(SynchronousTestCase):
    """What is written to the child and back arrives as it was."""

    def test_a_question_arrives_with_its_document(self) -> None:
        question, document = a_question(Path(self.mktemp()))
        self.assertEqual(decode_question(encode_question(question, document)), (question, document))

    def test_an_answer_arrives_whole(self) -> None:
        read = examine(*a_question(Path(self.mktemp())))
        assert isinstance(read, ProductsRead)
        self.assertEqual((len(read.images), len(read.broken), len(read.problems)), (1, 1, 1))
        self.assertEqual(decode_answer(encode_answer(read)), read)
        self.assertEqual(decode_answer(encode_answer(Refused("no", True))), Refused("no", True))

    def test_what_is_not_an_answer_is_refused(self) -> None:
        for data in (b"", b"x", b"{}", b'{"kind": "Nothing", "value": {}}', b'{"kind": "ProductsRead", "value": {}}'):
            self.assertRaises(ValueError, decode_answer, data)


class ExamineTests(SynchronousTestCase):
    """What the child makes of a document."""

    def test_a_document_that_needs_too_much_memory_is_refused(self) -> None:
        def exhausted(payload: bytes, **_: object) -> None:
            raise MemoryError

        self.patch(child_module, "read_products", exhausted)
        refused = examine(*a_question(Path(self.mktemp())))
        assert isinstance(refused, Refused)
        self.assertIn("more than 1024 MiB of memory", refused.reason)

    def test_it_writes_no_file_so_that_its_death_at_any_moment_leaves_none(self) -> None:
        base = Path(self.mktemp()).absolute()
        question = encode_question(*a_question(base / "stream"))
        empty = base / "empty"
        empty.mkdir()
        environment = {**os.environ, "HOME": str(empty), "TMPDIR": str(empty), "PYTHONPATH": os.pathsep.join(sys.path)}
        run = subprocess.run(
            [sys.executable, "-B", "-c", _WATCHED], input=question, capture_output=True, cwd=empty, env=environment,
            timeout=60, check=True,
        )  # fmt: skip
        self.assertIsInstance(decode_answer(run.stdout), ProductsRead)
        self.assertEqual(run.stderr, b"")
        self.assertEqual(list(empty.iterdir()), [])  # nor does gpgv


class FakeTransport:
    """A process that does what the test says."""

    def __init__(self) -> None:
        self.written = b""
        self.signals: list[str] = []

    def write(self, data: bytes) -> None:
        """To its standard input."""
        self.written += data

    def signalProcess(self, name: str) -> None:
        """Sent to it."""
        self.signals.append(name)


class FakeProcesses(Clock):
    """A reactor whose processes are fakes."""

    def __init__(self) -> None:
        super().__init__()
        self.error: OSError | None = None
        self.children: list[Any] = []

    def spawnProcess(self, protocol: Any, executable: str, args: list[str], env: dict[str, str]) -> None:
        """Start one."""
        if self.error:
            raise self.error
        self.children.append(protocol)
        protocol.transport = FakeTransport()
        protocol.connectionMade()


def framed(data: bytes) -> bytes:
    """As it is written, after its length."""
    return struct.pack(">Q", len(data)) + data


class LifeTests(SynchronousTestCase):
    """A process that hangs, dies, or says too much."""

    def setUp(self) -> None:
        self.reactor = FakeProcesses()
        self.conversation = in_a_process(self.reactor, seconds=5)()
        self.answered = self.conversation.ask(b"question")
        [self.child] = self.reactor.children

    def end(self, status: int = 0, signalled: int | None = None) -> None:
        """The process ends."""
        reason: Exception = ProcessTerminated(status, signalled) if status or signalled else ProcessDone(0)
        self.child.processEnded(Failure(reason))

    def killed(self) -> bool:
        """Whether the process was killed."""
        signals: list[str] = self.child.transport.signals
        return signals == ["KILL"]

    def failure(self) -> str:
        """Why the question was not answered."""
        return str(self.failureResultOf(self.answered, ChildFailed).value)

    def test_an_answer_in_pieces_is_put_together(self) -> None:
        self.assertEqual(self.child.transport.written, framed(b"question"))
        answer = framed(b"an answer")
        for byte in answer[:-1]:
            self.child.outReceived(bytes([byte]))
        self.assertNoResult(self.answered)
        self.child.outReceived(answer[-1:])
        self.assertEqual(self.successResultOf(self.answered), b"an answer")
        self.assertEqual(self.reactor.getDelayedCalls(), [])

    def test_the_same_process_answers_one_question_after_the_other(self) -> None:
        second = self.conversation.ask(b"second")
        self.assertEqual(self.child.transport.written, framed(b"question"))
        self.child.outReceived(framed(b"one"))
        self.assertEqual(self.successResultOf(self.answered), b"one")
        self.assertEqual(self.child.transport.written, framed(b"question") + framed(b"second"))
        self.child.outReceived(framed(b"two"))
        self.assertEqual(self.successResultOf(second), b"two")
        self.assertEqual(len(self.reactor.children), 1)

    def test_one_that_takes_too_long_is_killed(self) -> None:
        self.reactor.advance(5)
        self.assertTrue(self.killed())
        self.end(signalled=9)
        self.assertIn("longer than 5 seconds", self.failure())

    def test_one_that_says_too_much_is_killed(self) -> None:
        self.child.outReceived(struct.pack(">Q", MAX_ANSWER + 1) + b"x")
        self.child.outReceived(b"x")
        self.assertTrue(self.killed())
        self.end(signalled=9)
        self.assertIn("larger than 256 MiB", self.failure())

    def test_one_that_says_more_than_its_answer_is_killed(self) -> None:
        self.child.outReceived(framed(b"answer") + b"x")
        self.assertTrue(self.killed())
        self.end(signalled=9)
        self.assertIn("said more than its answer", self.failure())

    def test_one_that_fails_says_with_its_own_words_why(self) -> None:
        self.child.outReceived(framed(b"half an answer")[:-3])
        self.child.errReceived(b"Traceback\nMemoryError\n")
        self.end(status=1)
        reason = self.failure()
        self.assertIn("exit code 1", reason)
        self.assertIn("MemoryError", reason)

    def test_one_that_ends_without_an_answer_failed_too(self) -> None:
        self.end()
        self.assertIn("it said nothing", self.failure())

    def test_the_next_question_after_a_failure_starts_another(self) -> None:
        second = self.conversation.ask(b"second")
        self.reactor.advance(5)
        self.end(signalled=9)
        self.failure()
        [_, self.child] = self.reactor.children
        self.child.outReceived(framed(b"two"))
        self.assertEqual(self.successResultOf(second), b"two")

    def test_a_cancelled_question_kills_it(self) -> None:
        self.answered.cancel()
        self.failureResultOf(self.answered, CancelledError)
        self.assertTrue(self.killed())
        closed = self.conversation.close()
        self.assertNoResult(closed)
        self.end(signalled=9)
        self.successResultOf(closed)
        self.assertEqual(self.reactor.getDelayedCalls(), [])

    def test_closing_waits_until_it_is_gone(self) -> None:
        self.child.outReceived(framed(b"one"))
        self.successResultOf(self.answered)
        closed = self.conversation.close()
        self.assertTrue(self.killed())
        self.assertNoResult(closed)
        self.end(signalled=9)
        self.successResultOf(closed)
        self.successResultOf(self.conversation.close())

    def test_closing_what_never_started_is_nothing(self) -> None:
        self.child.outReceived(framed(b"one"))
        self.successResultOf(self.answered)
        self.successResultOf(in_a_process(self.reactor)().close())
        self.assertEqual(len(self.reactor.children), 1)

    def test_one_that_cannot_be_started_is_a_failure_too(self) -> None:
        self.reactor.error = OSError(11, "no more processes")
        self.answered = in_a_process(self.reactor)().ask(b"question")
        self.assertIn("no more processes", self.failure())


class FromDisk:
    """A fetcher of ``file:`` URLs."""

    async def read_document(self, url: str, *, limit: int) -> bytes:
        """As :meth:`rpc.fetch.Fetcher.read_document`."""
        return Path(url.removeprefix("file://")).read_bytes()


class RealChildTests(TestCase):
    """The real process."""

    def test_it_answers_as_its_code_does_here(self) -> Deferred[None]:
        data = encode_question(*a_question(Path(self.mktemp())))

        async def check() -> None:
            conversation = in_a_process(reactor)()
            for question in (data, data + b"garbage", data):
                self.assertEqual(await conversation.ask(question), answer(question))
            await conversation.close()

        return Deferred.fromCoroutine(check())

    def test_a_whole_source_is_read_through_it(self) -> Deferred[None]:
        stream = Stream(Path(self.mktemp()).absolute(), signer())
        stream.add()
        stream.add_loader()
        stream.write()
        reading = SourceReader(reactor, FromDisk(), now=lambda: NOW).read(stream.source(), {})

        def check(end: SourceRead | SourceFailed) -> None:
            assert isinstance(end, SourceRead), end
            self.assertEqual(sorted(offer.image.os for offer in end.images), ["grub-efi", "ubuntu"])
            self.assertEqual((end.problems, end.failed), ((), ()))

        return Deferred.fromCoroutine(reading).addCallback(check)

    def test_it_does_not_outlive_its_parent(self) -> None:
        # The parent starts a child, waits until it has made its arrangements (they end with a limit), and is killed.
        script = (
            "import os, subprocess, sys\n"
            "question, answer = map(int, sys.argv[1:])\n"
            "command = [sys.executable, '-m', 'region.upstream.child', str(os.getpid())]\n"
            "child = subprocess.Popen(command, stdin=question, stdout=answer)\n"
            "def limit():\n"
            "    return open(f'/proc/{child.pid}/limits').read().split('Max core file size')[1].split()[1]\n"
            "while limit() != '0':\n"
            "    os.sched_yield()\n"
            "os.kill(os.getpid(), 9)\n"
        )
        # The write end of its standard input stays open here, so that only its parent's death can end it.
        question, our_question = os.pipe()
        our_answer, answer_ = os.pipe()
        self.addCleanup(os.close, our_question)
        self.addCleanup(os.close, our_answer)
        command = [sys.executable, "-c", script, str(question), str(answer_)]
        parent = subprocess.run(command, pass_fds=[question, answer_], check=False)
        os.close(question)
        os.close(answer_)
        self.assertEqual(parent.returncode, -signal.SIGKILL)
        readable, _, _ = select.select([our_answer], [], [], 30)
        self.assertEqual(readable, [our_answer], "the child lives on")
        self.assertEqual(os.read(our_answer, 1), b"")
