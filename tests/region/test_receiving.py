"""Taking in an upload, as a state machine: whatever comes in whichever order, only the right content becomes whole."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from attrs import evolve
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from hypothesis.strategies import integers, sampled_from
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from region.images.naming import UploadRequest, checked_upload
from region.images.receiving import EXPIRE_SECONDS, IDLE_SECONDS, Receiver, TooMuch, WrongOffset, WrongUpload
from region.images.uploads import NoSuchUpload, Upload
from rpc.blobs import BlobStore
from rpc.manifest import ImageKey
from tests.examples import examples
from tests.faults import LOSSES, Crash, Disk, Loss
from tests.region.importing import inline, sha256

NOW = datetime(2026, 1, 1, tzinfo=UTC)
CONTENT = bytes(range(100))
REQUEST = checked_upload("mine", "amd64/generic", sha256(CONTENT), len(CONTENT))


class FakeStore:
    """What :class:`region.images.uploads.UploadStore` keeps, in memory: it outlives the receiver, as rows do."""

    def __init__(self) -> None:
        self.rows: dict[int, Upload] = {}
        self.next = 1
        self.is_old = False

    async def list(self) -> tuple[Upload, ...]:
        return tuple(self.rows.values())

    async def get(self, upload_id: int) -> Upload:
        if upload_id not in self.rows:
            raise NoSuchUpload("there is none")
        return self.rows[upload_id]

    async def create(self, request: UploadRequest, process: str, username: str) -> tuple[Upload, bool]:
        for row in self.rows.values():
            if row.request == request:
                return row, False
        made = self.rows[self.next] = Upload(self.next, request, process, username, NOW, NOW, None)
        self.next += 1
        return made, True

    async def touch(self, upload: Upload, received: int) -> None:
        self.is_old = False
        self.rows[upload.id] = evolve(self.rows[upload.id], received=received)

    async def complete(self, upload_id: int) -> tuple[Upload, tuple[Upload, ...]]:
        row = self.rows[upload_id] = evolve(await self.get(upload_id), completed=NOW)
        return row, ()

    async def delete(self, key: ImageKey) -> tuple[Upload, ...]:
        gone, self.rows = tuple(self.rows.values()), {}
        return gone

    async def expire(self, process: str, hours: float) -> tuple[Upload, ...]:
        gone = tuple(row for row in self.rows.values() if self.is_old and row.completed is None)
        self.rows = {row.id: row for row in self.rows.values() if row not in gone}
        return gone


class Receiving(RuleBasedStateMachine):
    """One image that is uploaded; ``expected`` is what must have come, None while nothing was begun."""

    def __init__(self, root: Path | None = None) -> None:
        super().__init__()
        self.root = root or Path(tempfile.mkdtemp(prefix="stanchion-test-"))
        self.store = FakeStore()
        self.clock = Clock()
        self.published = 0
        self.expected: bytes | None = None
        self.id = 0
        self.is_anew = False
        """Whether it was begun again, so that a chunk that does not say where it belongs is the first."""
        self.start()

    def start(self) -> None:
        self.blobs = BlobStore(self.root)
        self.receiver = Receiver(cast(Any, self.store), self.blobs, "region", 24.0, self.clock, inline, self.publish,
                                 lambda path: 1 << 40)  # fmt: skip
        self.do(self.receiver.start())
        self.is_anew = False

    async def publish(self) -> None:
        self.published += 1

    def do(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        ended: list[Any] = []
        Deferred.fromCoroutine(coroutine).addBoth(ended.append)
        assert ended, "it waits for something that does not come"
        [result] = ended
        if hasattr(result, "raiseException"):
            result.raiseException()
        return result

    def fails(self, kind: type[Exception], coroutine: Coroutine[Any, Any, Any]) -> Exception:
        try:
            self.do(coroutine)
        except kind as error:
            return error
        raise AssertionError(f"it is no {kind.__name__}")

    @property
    def is_whole(self) -> bool:
        return self.expected == CONTENT

    @rule()
    def begin(self) -> None:
        received = self.do(self.receiver.begin(REQUEST, "me"))
        if self.expected is None:
            self.expected, self.id = b"", received.upload.id
        self.is_anew = not self.is_whole
        assert (received.received, received.complete) == (len(self.expected), self.is_whole)

    @precondition(lambda self: self.expected is not None and not self.is_whole)
    @rule(count=integers(1, 60), says_where=sampled_from([True, False]))
    def append(self, count: int, says_where: bool) -> None:
        assert self.expected is not None
        if self.is_anew and not says_where:
            self.expected = b""
        at = len(self.expected)
        data = CONTENT[at : at + count]
        received = self.do(self.receiver.append(self.id, data, at if says_where else None))
        self.expected += data
        self.is_anew = False
        assert (received.received, received.complete) == (len(self.expected), self.is_whole)

    @precondition(lambda self: self.expected)
    @rule(back=integers(1, 20))
    def append_again_what_has_come(self, back: int) -> None:
        assert self.expected is not None
        at = max(0, len(self.expected) - back)
        sending = self.receiver.append(self.id, self.expected[at:], at)
        if self.is_whole:
            assert self.do(sending).complete
        else:
            assert f"{len(self.expected)} bytes have come" in str(self.fails(WrongOffset, sending))

    @precondition(lambda self: self.expected is not None)
    @rule()
    def append_too_much(self) -> None:
        self.fails(TooMuch, self.receiver.append(self.id, CONTENT + b"x"))

    @precondition(lambda self: self.expected is not None and not self.is_whole)
    @rule()
    def append_wrong_content(self) -> None:
        assert self.expected is not None
        wrong = b"\xff" * (len(CONTENT) - (0 if self.is_anew else len(self.expected)))
        self.fails(WrongUpload, self.receiver.append(self.id, wrong))
        self.expected, self.is_anew = b"", False

    @rule()
    def nothing_comes_for_a_while(self) -> None:
        self.clock.advance(IDLE_SECONDS)
        assert not self.receiver._open

    @rule()
    def restart(self) -> None:
        self.do(self.receiver.stop())
        self.blobs.close()
        self.start()

    @rule()
    def die_and_start(self) -> None:
        for known in self.receiver._open.values():
            if known.part is not None:
                os.close(known.part._descriptor)  # as the end of a process does
                known.part._descriptor = -1
        self.blobs.close()
        self.start()

    @rule()
    def grow_old(self) -> None:
        self.store.is_old = True
        self.clock.advance(EXPIRE_SECONDS)
        self.store.is_old = False
        if self.expected is not None and not self.is_whole:
            self.fails(NoSuchUpload, self.receiver.append(self.id, b"x"))
            self.expected = None

    @precondition(lambda self: self.expected is not None)
    @rule()
    def delete(self) -> None:
        assert self.do(self.receiver.delete(ImageKey("custom", "mine", "amd64", "generic", "generic", "uploaded")))
        self.blobs.sweep(())  # what an import does when no generation needs it
        self.expected = None

    @rule()
    def clean_up(self) -> None:
        self.blobs.sweep((), stale_after=-1.0)

    @invariant()
    def only_the_right_content_is_whole(self) -> None:
        rows = list(self.store.rows.values())
        assert [row.completed is not None for row in rows] == ([] if self.expected is None else [self.is_whole])
        if self.is_whole:
            assert self.blobs.path(REQUEST.sha256).read_bytes() == CONTENT
            assert self.published
        else:
            assert not self.blobs.path(REQUEST.sha256).exists()

    def teardown(self) -> None:
        self.do(self.receiver.stop())
        self.blobs.close()
        shutil.rmtree(self.root)


class ReceivingTests(SynchronousTestCase):
    def test_only_the_right_content_becomes_whole_whatever_happens_on_the_way(self) -> None:
        self.patch(os, "fsync", lambda descriptor: None)
        run_state_machine_as_test(Receiving, settings=settings(examples(60), stateful_step_count=30))

    def test_what_was_acknowledged_is_there_after_a_loss_of_power_at_any_step(self) -> None:
        pid = os.getpid()
        self.patch(os, "getpid", lambda: pid)
        base = Path(self.mktemp()).absolute()
        base.mkdir(parents=True)
        disk = Disk(base)
        disk.install(self.patch)
        self.addCleanup(disk.close)
        for loss in (*LOSSES, Loss(0, "kept")):
            at = 1
            while self.lose_power_at(disk, at, loss):
                at += 1
            self.assertGreater(at, 20)

    def lose_power_at(self, disk: Disk, at: int, loss: Loss) -> bool:
        """Upload in chunks, lose power at a step, and go on; whether there were so many steps."""
        root = Path(disk.root) / "images"
        root.mkdir()
        machine = Receiving(root)
        acknowledged = 0
        upload = machine.do(machine.receiver.begin(REQUEST, "me")).upload
        disk.arm(at)
        for start in range(0, len(CONTENT), 30):
            sending = Deferred.fromCoroutine(machine.receiver.append(upload.id, CONTENT[start : start + 30], start))
            sending.addErrback(lambda failure: failure.trap(Crash))
            if disk.stopped:
                break
            acknowledged = self.successResultOf(sending).received
        stopped = disk.stopped
        disk.restart()
        disk.lose_power(loss)
        machine.start()
        where = f"{loss}: {disk.said[-3:]}"
        received = machine.do(machine.receiver.begin(REQUEST, "me"))
        self.assertGreaterEqual(received.received, acknowledged, where)
        if not received.complete:
            # What is there beyond what was acknowledged is not believed: the right rest makes it whole.
            self.assertEqual(received.received, acknowledged, where)
            received = machine.do(machine.receiver.append(upload.id, CONTENT[acknowledged:], acknowledged))
        self.assertTrue(received.complete, where)
        self.assertEqual(machine.blobs.path(REQUEST.sha256).read_bytes(), CONTENT, where)
        machine.do(machine.receiver.stop())
        machine.blobs.close()
        shutil.rmtree(root)
        return stopped
