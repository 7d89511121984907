"""A lock that many wait for, who all have nothing to do any more when they get it."""

from __future__ import annotations

from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import SynchronousTestCase

from rpc.locks import FairLock


class TestFairLock(SynchronousTestCase):
    def setUp(self) -> None:
        self.lock = FairLock()
        self.got: list[int] = []

    def come(self, number: int, pause: Deferred[None] | None = None) -> Deferred[None]:
        """Somebody who wants the lock, and has it until ``pause`` is over."""

        async def body() -> None:
            async with self.lock:
                self.got.append(number)
                if pause is not None:
                    await pause

        return Deferred.fromCoroutine(body())

    def test_thousands_go_on_one_after_another_when_the_lock_is_released(self) -> None:
        pause: Deferred[None] = Deferred()
        ended = [self.come(0, pause), *(self.come(number) for number in range(1, 3000))]
        self.assertEqual(self.got, [0])
        pause.callback(None)
        for each in ended:
            self.successResultOf(each)
        self.assertEqual(self.got, list(range(3000)))
        self.assertFalse(self.lock.locked)

    def test_nobody_has_it_beside_another(self) -> None:
        pauses: list[Deferred[None]] = [Deferred() for _ in range(3)]
        ended = [self.come(number, pause) for number, pause in enumerate(pauses)]
        for number, pause in enumerate(pauses):
            self.assertEqual(self.got, list(range(number + 1)))
            self.assertNoResult(ended[number])
            pause.callback(None)
        self.assertFalse(self.lock.locked)

    def test_one_who_waits_no_longer_is_left_out(self) -> None:
        pause: Deferred[None] = Deferred()
        first, second, third = self.come(0, pause), self.come(1), self.come(2)
        second.cancel()
        self.failureResultOf(second, CancelledError)
        pause.callback(None)
        self.successResultOf(first)
        self.successResultOf(third)
        self.assertEqual(self.got, [0, 2])

    def test_what_fails_while_it_has_the_lock_gives_it_back(self) -> None:
        pause: Deferred[None] = Deferred()
        first, second = self.come(0, pause), self.come(1)
        pause.errback(ZeroDivisionError())
        self.failureResultOf(first, ZeroDivisionError)
        self.successResultOf(second)

    def test_releasing_what_nobody_has_is_an_error(self) -> None:
        self.assertRaises(RuntimeError, self.lock.release)
