"""Room in memory is handed out in order, and comes back however its use ends."""

from __future__ import annotations

from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import SynchronousTestCase

from region.metadata.room import Room


class RoomTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.room = Room(10)
        self.entered: list[str] = []

    def use(self, name: str, size: int) -> tuple[Deferred[None], Deferred[None]]:
        """Somebody who leaves when the first of these fires; the second fires then."""
        leaving: Deferred[None] = Deferred()

        async def using() -> None:
            async with self.room.of(size):
                self.entered.append(name)
                await leaving

        return leaving, Deferred.fromCoroutine(using())

    def test_who_has_no_room_waits_and_later_ones_do_not_overtake(self) -> None:
        first, _ = self.use("first", 6)
        self.use("large", 8)
        self.use("small", 1)
        self.assertEqual(self.entered, ["first"])
        first.callback(None)
        self.assertEqual(self.entered, ["first", "large", "small"])

    def test_more_than_there_is_takes_all_of_it(self) -> None:
        leaving, _ = self.use("huge", 1000)
        self.use("other", 1)
        self.assertEqual(self.entered, ["huge"])
        leaving.callback(None)
        self.assertEqual(self.entered, ["huge", "other"])

    def test_room_comes_back_from_one_that_failed_and_from_one_that_gave_up(self) -> None:
        leaving, failing = self.use("failing", 10)
        _, waiting = self.use("waiting", 10)
        self.use("last", 10)
        waiting.cancel()
        self.failureResultOf(waiting, CancelledError)
        leaving.errback(RuntimeError("x"))
        self.failureResultOf(failing, RuntimeError)
        self.assertEqual(self.entered, ["failing", "last"])

    def test_hundreds_may_wait(self) -> None:
        leaving, _ = self.use("first", 10)
        for number in range(2000):
            gone, _ = self.use(str(number), 10)
            gone.callback(None)
        leaving.callback(None)
        self.assertEqual(len(self.entered), 2001)
