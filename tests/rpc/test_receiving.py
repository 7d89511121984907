"""Receiving a body: bounded memory, back-pressure, and no time-out for pauses that we made ourselves."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.error import ConnectionLost
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.client import ResponseDone, ResponseFailed
from twisted.web.http import PotentialDataLoss

from rpc.http_errors import FetchError
from rpc.receiving import BLOCK, HIGH_WATER, MINIMUM_RATE, SLOW_WINDOW, Receiver

PIECE = b"\0" * (1 << 16)


class ReceiverTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.taken: list[bytes] = []
        self.slow: list[Deferred[None]] = []
        self.transport = StringTransport()

    def receiver(self, *, slow: bool = False, limit: int = 1 << 30, expected: int | None = None) -> Receiver:
        def consume(data: bytes) -> Deferred[None] | None:
            self.taken.append(data)
            if not slow:
                return None
            self.slow.append(Deferred())
            return self.slow[-1]

        receiver = Receiver(self.clock, "http://h/x", expected, consume, limit, 30.0)
        receiver.makeConnection(self.transport)
        return receiver

    def end(self, receiver: Receiver, reason: Exception) -> None:
        receiver.connectionLost(Failure(reason))

    def reason(self, receiver: Receiver) -> str:
        problem: Any = self.failureResultOf(receiver.done, FetchError).value
        return str(problem.reason)

    def is_paused(self) -> bool:
        return self.transport.producerState == "paused"

    def test_small_pieces_are_handed_over_in_blocks(self) -> None:
        receiver = self.receiver()
        for _ in range(20):
            receiver.dataReceived(PIECE)
        self.end(receiver, ResponseDone())
        self.assertEqual([len(data) for data in self.taken], [BLOCK, BLOCK, 4 * len(PIECE)])
        self.assertEqual(self.successResultOf(receiver.done), 20 * len(PIECE))

    def test_an_empty_body_is_received(self) -> None:
        receiver = self.receiver()
        self.end(receiver, ResponseDone())
        self.assertEqual(self.successResultOf(receiver.done), 0)
        self.assertEqual(self.taken, [])

    def test_while_the_consumer_is_busy_little_is_collected_and_then_the_server_waits(self) -> None:
        receiver = self.receiver(slow=True)
        sent = 0
        while not self.is_paused():
            receiver.dataReceived(PIECE)
            sent += len(PIECE)
        self.assertEqual(sent, BLOCK + HIGH_WATER)
        self.slow.pop(0).callback(None)
        self.assertFalse(self.is_paused())
        self.assertEqual([len(data) for data in self.taken], [BLOCK, HIGH_WATER])

    def test_a_busy_consumer_is_no_stall_of_the_server(self) -> None:
        receiver = self.receiver(slow=True)
        while not self.is_paused():
            receiver.dataReceived(PIECE)
        self.clock.pump([5] * 119)
        self.assertNoResult(receiver.done)
        self.slow.pop(0).callback(None)  # the server may go on after 595 seconds
        self.clock.pump([5] * 5)
        self.assertNoResult(receiver.done)
        self.assertFalse(self.transport.disconnecting)
        self.slow.pop(0).callback(None)
        self.clock.pump([5] * 2)
        self.assertIn("no byte came for 30 seconds", self.reason(receiver))

    def test_the_end_waits_for_the_consumer(self) -> None:
        receiver = self.receiver(slow=True)
        for _ in range(9):
            receiver.dataReceived(PIECE)
        self.end(receiver, ResponseDone())
        self.slow.pop(0).callback(None)
        self.assertNoResult(receiver.done)
        self.slow.pop(0).callback(None)
        self.assertEqual(self.successResultOf(receiver.done), 9 * len(PIECE))

    def test_what_came_before_a_cut_is_handed_over(self) -> None:
        receiver = self.receiver(expected=1000)
        receiver.dataReceived(b"begin")
        self.end(receiver, ResponseFailed([Failure(ConnectionLost())]))
        self.assertEqual(self.taken, [b"begin"])
        self.assertEqual(self.reason(receiver), "the body ended after 5 of 1000 bytes: the connection was lost")

    def test_the_end_of_a_body_without_length_is_its_end(self) -> None:
        receiver = self.receiver()
        self.end(receiver, PotentialDataLoss())
        self.assertEqual(self.successResultOf(receiver.done), 0)

    def test_a_body_over_the_limit_ends_the_connection(self) -> None:
        receiver = self.receiver(limit=10)
        receiver.dataReceived(b"0123456789")
        self.assertNoResult(receiver.done)
        receiver.dataReceived(b"!")
        self.assertIn("more than the 10 bytes", self.reason(receiver))
        self.assertTrue(self.transport.disconnecting)

    def test_a_consumer_that_fails_ends_it_with_its_error(self) -> None:
        receiver = self.receiver(slow=True)
        for _ in range(8):
            receiver.dataReceived(PIECE)
        self.slow[0].errback(OSError(28, "full"))
        self.failureResultOf(receiver.done, OSError)
        self.assertTrue(self.transport.disconnecting)
        receiver.dataReceived(PIECE)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_cancelling_closes_and_a_busy_consumer_may_end_later(self) -> None:
        for end in (lambda one: one.callback(None), lambda one: one.errback(OSError(28, "full"))):
            receiver = self.receiver(slow=True)
            for _ in range(8):
                receiver.dataReceived(PIECE)
            receiver.done.cancel()
            self.failureResultOf(receiver.done, CancelledError)
            self.assertTrue(self.transport.disconnecting)
            end(self.slow.pop(0))
            self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_a_rate_below_the_lowest_ends_it_and_one_above_does_not(self) -> None:
        for rate, lives in ((MINIMUM_RATE * 1.1, True), (MINIMUM_RATE * 0.9, False)):
            receiver = self.receiver()
            for _ in range(int(SLOW_WINDOW) + 31):
                receiver.dataReceived(b"\0" * int(rate))
                self.clock.advance(1)
            if lives:
                self.assertNoResult(receiver.done)
                receiver.done.cancel()
                self.failureResultOf(receiver.done, CancelledError)
            else:
                self.assertIn("too slowly, 921 bytes a second", self.reason(receiver))
