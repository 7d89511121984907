"""How a rack stays linked: each failure is one logged attempt, and waits longer; a link that is up is never doubled."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.error import ConnectionRefusedError
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.internet.task import Clock
from twisted.logger import LogLevel, globalLogPublisher
from twisted.test.iosim import FakeTransport
from twisted.trial.unittest import SynchronousTestCase
from zope.interface import implementer

from rpc.commands import AlreadyLinked, RegistrationRefused
from rpc.endpoints import FIRST_DELAY, LONGEST_DELAY, NotNeeded, Reconnecting, retry_delay
from rpc.failures import LinkLost
from rpc.patience import refused_delay
from rpc.protocol import Life, Link, Responders
from rpc.testing import REGION


class DelayTests(SynchronousTestCase):
    def test_the_longest_delay_doubles_up_to_a_minute(self) -> None:
        delays = [retry_delay(attempt, lambda: 1.0) for attempt in range(1, 8)]
        self.assertEqual(delays, [5, 10, 20, 40, 60, 60, 60])

    @settings(deadline=None)
    @given(st.integers(1, 1_000_000), st.floats(0, 1, exclude_max=True))
    def test_the_delay_is_never_over_a_minute(self, attempt, jitter) -> None:
        self.assertTrue(0 <= retry_delay(attempt, lambda: jitter) <= LONGEST_DELAY)

    def test_racks_that_lose_the_region_together_come_back_spread_evenly(self) -> None:
        # Regression: they came back within half a second, all of them.
        random = Random(1)
        back = Counter(int(retry_delay(1, random.random) / FIRST_DELAY * 50) for _ in range(1000))
        self.assertEqual(len(back), 50)
        self.assertLess(max(back.values()), 40)

    def test_a_region_with_many_racks_has_them_come_back_over_a_longer_time(self) -> None:
        longest = [retry_delay(attempt, lambda: 1.0, spread=20) for attempt in range(1, 5)]
        self.assertEqual(longest, [20, 20, 20, 40])

    def test_two_racks_do_not_wait_equally_long(self) -> None:
        self.assertGreater(len({retry_delay(7) for _ in range(20)}), 10)


@implementer(IStreamClientEndpoint)
class FakeEndpoint:
    """Connects at once, in memory, unless told to fail or to wait."""

    def __init__(self) -> None:
        self.attempts = 0
        self.failure: Exception | None = None
        self.waiting: Deferred[Any] | None = None

    def connect(self, protocolFactory: Any) -> Deferred[Any]:
        self.attempts += 1
        if self.waiting is not None:
            return self.waiting
        if self.failure is not None:
            return fail(self.failure)
        link = protocolFactory.buildProtocol(None)
        link.makeConnection(FakeTransport(link, False))
        return succeed(link)


class ReconnectingTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.endpoint = FakeEndpoint()
        self.links: list[Link] = []
        self.preparing: list[Deferred[None]] = []
        self.prepare_by_hand = False
        self.refusal: Exception | None = None
        self.service = Reconnecting(
            self.endpoint, "region:5250", self.make, self.prepare, clock=self.clock,
            retry=lambda attempt, spread=0.0: max(2.0 ** (attempt - 1), spread),
            refused=lambda attempt: refused_delay(attempt, lambda: 0.0),
        )  # fmt: skip
        self.warnings: list[str] = []
        observer: Any = self.observe
        globalLogPublisher.addObserver(observer)
        self.addCleanup(globalLogPublisher.removeObserver, observer)

    def observe(self, event) -> None:
        if event["log_namespace"] == "rpc.patience" and event["log_level"] is not LogLevel.debug:
            self.warnings.append(event["reason"])

    def make(self) -> Link:
        self.links.append(Link(Responders("rack", {}), clock=self.clock, peer=REGION, interval=0))
        return self.links[-1]

    async def prepare(self, link: Link) -> None:
        if self.refusal is not None:
            raise self.refusal
        if self.prepare_by_hand:
            self.preparing.append(Deferred())
            await self.preparing[-1]

    def lose(self, link: Link) -> None:
        """What the transport does once it is told, or for itself."""
        link.connectionLost()

    def stop(self) -> Deferred[None]:
        stopped = self.service.stopService()
        for link in self.links:
            transport: Any = link.transport
            if transport is not None and transport.disconnecting:
                self.lose(link)
        return stopped

    def test_a_link_that_registered_is_up(self) -> None:
        self.service.startService()
        self.assertIs(self.service.link, self.links[0])
        self.successResultOf(self.stop())
        self.assertIsNone(self.service.link)
        self.assertIs(self.links[0].life, Life.LOST)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_a_link_is_not_up_before_it_registered(self) -> None:
        self.prepare_by_hand = True
        self.service.startService()
        self.assertIsNone(self.service.link)
        self.preparing[0].callback(None)
        self.assertIs(self.service.link, self.links[0])

    def test_a_lost_link_is_made_again(self) -> None:
        self.service.startService()
        self.lose(self.links[0])
        self.assertIsNone(self.service.link)
        self.clock.advance(1)
        self.assertIs(self.service.link, self.links[1])
        self.assertEqual(self.endpoint.attempts, 2)

    def test_a_link_is_made_again_within_the_time_that_its_region_said_until_another_says_else(self) -> None:
        self.service.startService()
        self.links[0].spread = 20.0
        self.service._up(self.links[0])
        self.lose(self.links[0])
        self.clock.advance(19.5)
        self.assertEqual(len(self.links), 1)
        self.endpoint.failure = ConnectionRefusedError()
        self.clock.advance(0.5)  # it is away, and so this one waits as long
        self.endpoint.failure = None
        self.clock.advance(19.5)
        self.assertEqual(len(self.links), 1)
        self.clock.advance(0.5)
        self.assertEqual(len(self.links), 2)
        self.lose(self.links[1])  # which was not told
        self.clock.advance(1)
        self.assertEqual(len(self.links), 3)

    def test_each_failure_is_logged_with_its_reason_and_waits_longer(self) -> None:
        self.endpoint.failure = ConnectionRefusedError()
        self.service.startService()
        for delay in (1, 2, 4):
            self.clock.advance(delay)
        self.assertEqual(self.endpoint.attempts, 4)
        self.assertEqual(self.warnings, ["Connection was refused by other side."] * 4)
        self.endpoint.failure = None
        self.clock.advance(8)
        self.lose(self.links[0])
        self.clock.advance(1)  # having been up, it begins with a second again
        self.assertEqual(len(self.links), 2)

    def test_a_refused_registration_is_a_failed_attempt_and_ends_its_link(self) -> None:
        self.refusal = RegistrationRefused("rack abc234 was revoked")
        self.service.startService()
        self.assertIsNone(self.service.link)
        self.assertEqual(self.warnings, ["rack abc234 was revoked"])
        self.assertIs(self.links[0].life, Life.CLOSING)
        self.lose(self.links[0])

    def test_a_rack_that_is_refused_seldom_tries_again_and_says_why_once(self) -> None:
        self.refusal = RegistrationRefused("rack abc234 was revoked")
        self.service.startService()
        for number, delay in enumerate((30, 60, 120, 240, 480, 600, 600), start=1):
            self.assertEqual(len(self.links), number)
            self.lose(self.links[-1])
            self.clock.advance(delay - 0.1)
            self.assertEqual(len(self.links), number)
            self.clock.advance(0.1)
        self.assertEqual(self.warnings, ["rack abc234 was revoked"])
        self.refusal = RegistrationRefused("rack abc234 is not enrolled here")
        self.lose(self.links[-1])
        self.clock.advance(600)
        self.assertEqual(self.warnings, ["rack abc234 was revoked", "rack abc234 is not enrolled here"])
        self.refusal = None
        self.lose(self.links[-1])
        self.clock.advance(600)
        self.assertIs(self.service.link, self.links[-1])
        self.lose(self.links[-1])
        self.clock.advance(1)
        self.assertIs(self.service.link, self.links[-1])

    def test_a_region_that_is_not_trusted_is_tried_as_seldom(self) -> None:
        self.endpoint.failure = LinkLost("the peer's certificate is refused: it has expired", 0.0, distrusted=True)
        self.service.startService()
        self.clock.advance(29.9)
        self.assertEqual(self.endpoint.attempts, 1)
        self.clock.advance(0.1)
        self.assertEqual(self.endpoint.attempts, 2)
        self.assertEqual(len(self.warnings), 1)
        # What is no refusal is tried again soon, and said each time.
        self.endpoint.failure = LinkLost("the connection broke off", 0.0)
        self.clock.advance(60)
        self.clock.advance(4)
        self.assertEqual((self.endpoint.attempts, len(self.warnings)), (4, 3))

    def test_a_rack_whose_other_link_is_alive_soon_tries_again(self) -> None:
        self.refusal = AlreadyLinked("rack abc234 is linked already")
        self.service.startService()
        self.lose(self.links[0])
        self.clock.advance(1)
        self.assertEqual(len(self.links), 2)

    def test_a_link_that_is_not_needed_is_closed_without_an_alarm(self) -> None:
        self.refusal = NotNeeded("linked already")
        self.service.startService()
        self.assertIsNone(self.service.link)
        self.assertEqual((self.warnings, self.links[0].life), ([], Life.CLOSING))

    def test_a_link_that_is_lost_while_it_registers_is_a_failed_attempt(self) -> None:
        self.prepare_by_hand = True
        self.service.startService()
        self.lose(self.links[0])
        self.preparing[0].callback(None)
        self.assertIsNone(self.service.link)
        self.assertEqual(self.warnings, ["the link was lost while it was being set up"])
        self.clock.advance(1)
        self.preparing[1].callback(None)
        self.assertIs(self.service.link, self.links[1])

    def test_stopping_while_it_connects_ends_the_attempt(self) -> None:
        self.endpoint.waiting = Deferred()
        self.service.startService()
        self.successResultOf(self.stop())
        self.assertEqual(self.warnings, [])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_stopping_while_it_registers_ends_the_link(self) -> None:
        self.prepare_by_hand = True
        self.service.startService()
        self.successResultOf(self.stop())
        self.assertIs(self.links[0].life, Life.LOST)
        self.assertEqual(self.warnings, [])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_stopping_while_it_waits_ends_the_waiting(self) -> None:
        self.endpoint.failure = ConnectionRefusedError()
        self.service.startService()
        self.successResultOf(self.stop())
        self.assertEqual(self.clock.getDelayedCalls(), [])
