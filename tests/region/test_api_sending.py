"""Large bodies: whole for the client, a piece at a time for the region."""

from __future__ import annotations

from typing import Any

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from region.api import Api, Authenticator, Parts
from region.api.operations import Call, Operation, Reply
from region.api.sending import PIECE, STALL_SECONDS, WHOLE
from tests.region.fakes import EPOCH, Keys
from tests.region.web import Connection

BODY = bytes(range(251)) * (3 * WHOLE // 251)


class TestSending(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.advance(EPOCH)

        async def large(parts: Parts, call: Call) -> Reply:
            return Reply(BODY)

        table = (Operation("GET", "/large/", "Large", "read", large, "Much."),)
        parts: Any = None
        self.connection = Connection(Api(parts, Authenticator(Keys(), self.clock), table).resource(), self.clock)
        self.transport = self.connection.transport
        self.channel: Any = self.transport.producer

    def ask_while_nothing_is_taken(self) -> int:
        """Ask, of a connection with room for one piece; the bytes that were written."""
        write = self.transport.write

        def full(data: bytes) -> None:
            write(data)
            if len(data) > PIECE // 2:
                self.channel.pauseProducing()

        self.patch(self.transport, "write", full)
        self.connection.send("GET", "large/")
        return len(self.transport.value())

    def test_a_client_gets_all_of_a_large_body_and_can_ask_again(self) -> None:
        for _ in range(2):
            self.connection.send("GET", "large/")
            response = self.connection.response()
            self.assertEqual((response.status, response.headers["Content-Length"]), (200, str(len(BODY))))
            self.assertEqual(response.body, BODY)

    def test_no_more_is_written_than_the_connection_takes(self) -> None:
        written = self.ask_while_nothing_is_taken()
        self.assertLess(written, 2 * PIECE)
        for _ in range(len(BODY) // PIECE + 1):
            self.channel.resumeProducing()
        self.assertEqual(self.connection.response().body, BODY)

    def test_a_head_request_gets_no_body(self) -> None:
        self.connection.send("HEAD", "large/")
        self.assertEqual(self.connection.response("HEAD").headers["Content-Length"], str(len(BODY)))

    def test_a_client_that_hangs_up_ends_it_without_an_error(self) -> None:
        self.ask_while_nothing_is_taken()
        self.connection.hang_up()
        self.assertEqual(self.flushLoggedErrors(), [])

    def test_a_client_that_takes_nothing_any_more_is_cut_off(self) -> None:
        self.ask_while_nothing_is_taken()
        self.clock.advance(STALL_SECONDS - 1)
        self.assertFalse(self.transport.disconnecting)
        self.clock.advance(1)
        self.assertTrue(self.transport.disconnecting)
