"""A round ends with one outcome for each peer that was asked, whatever each did."""

from __future__ import annotations

from typing import Any, ClassVar

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from rpc.commands import ListImages, SyncImages
from rpc.identity import Peer
from rpc.outcomes import Answered, Failed, NotConnected, TimedOut
from rpc.protocol import Link
from rpc.rounds import ask_all
from rpc.testing import RecordingReporter, linked


class RoundTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.reports = RecordingReporter()
        self.pumps: list[Any] = []
        self.links: dict[str, Link] = {}
        self.racks: dict[str, Link] = {}

    def rack(self, name, answer) -> None:
        async def list_images(link, known_digest):
            return await answer(known_digest)

        region, rack, pump = linked(
            {},
            {ListImages: list_images},
            self.clock,
            rack=Peer("rack", name, name),
            region_reporter=self.reports,
            rack_reporter=RecordingReporter(),
            interval=0,
        )
        self.links[name], self.racks[name] = region, rack
        self.pumps.append(pump)

    def flush(self) -> None:
        for pump in self.pumps:
            pump.flush()

    def ask(self, **settings: Any) -> Deferred[Any]:
        asks = {name: (link, {"known_digest": "k"}) for name, link in self.links.items()}
        return Deferred.fromCoroutine(ask_all(ListImages, asks, **settings))

    async def answers(self, known_digest):
        return {"state": "ready", "generation": 1, "digest": known_digest, "inventory": None}

    async def fails(self, known_digest):
        raise RuntimeError("no disk")

    async def hangs(self, known_digest):
        await Deferred()

    def test_every_peer_has_its_outcome(self) -> None:
        self.rack("good", self.answers)
        self.rack("bad", self.fails)
        self.rack("slow", self.hangs)
        self.rack("gone", self.answers)
        self.rack("cut", self.hangs)
        self.racks["gone"].abort("testing")
        self.flush()
        asked = self.ask(deadline=2.0)
        self.flush()
        self.clock.advance(1)
        self.racks["cut"].abort("testing")
        self.flush()
        self.assertNoResult(asked)
        self.clock.advance(1)
        outcomes: Any = self.successResultOf(asked)
        self.assertEqual(list(outcomes), ["good", "bad", "slow", "gone", "cut"])
        self.assertEqual(outcomes["good"].value["digest"], "k")
        self.assertIsInstance(outcomes["bad"], Failed)
        self.assertEqual(outcomes["bad"].kind, "Unhandled")
        self.assertEqual(outcomes["slow"], TimedOut(2.0))
        self.assertIsInstance(outcomes["gone"], NotConnected)
        self.assertEqual(outcomes["cut"], NotConnected(1.0))
        self.assertEqual(sorted(self.reports.kinds), ["CallTimedOut", "LinkLost", "LinkLost", "Unhandled"])

    def test_a_round_ends_with_its_last_answer_and_leaves_no_timer(self) -> None:
        for number in range(5):
            self.rack(f"rack{number}", self.answers)
        asked = self.ask()
        self.assertEqual(len(self.clock.getDelayedCalls()), 1)
        self.flush()
        self.assertTrue(all(isinstance(outcome, Answered) for outcome in self.successResultOf(asked).values()))
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_a_round_over_nobody_is_over(self) -> None:
        self.assertEqual(self.successResultOf(self.ask()), {})

    def test_a_round_over_links_that_are_all_gone_is_over(self) -> None:
        for name in ("one", "two"):
            self.rack(name, self.answers)
            self.links[name].abort("testing")
        self.flush()
        outcomes: Any = self.successResultOf(self.ask())
        self.assertTrue(all(isinstance(outcome, NotConnected) for outcome in outcomes.values()))
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_an_answer_after_the_round_is_ignored(self) -> None:
        waiting: Deferred[None] = Deferred()

        async def late(known_digest):
            await waiting
            return await self.answers(known_digest)

        self.rack("late", late)
        asked = self.ask(deadline=2.0)
        self.flush()
        self.clock.advance(2)
        self.assertEqual(self.successResultOf(asked), {"late": TimedOut(2.0)})
        waiting.callback(None)
        self.flush()
        again = self.ask()
        self.flush()
        self.assertIsInstance(self.successResultOf(again)["late"], Answered)

    def test_a_cancelled_round_is_forgotten(self) -> None:
        self.rack("slow", self.hangs)
        asked = self.ask()
        self.flush()
        asked.cancel()
        self.failureResultOf(asked, CancelledError)
        self.assertEqual(self.clock.getDelayedCalls(), [])
        self.racks["slow"].abort("testing")
        self.flush()
        self.assertEqual(self.reports.calls, [])

    def test_peers_may_be_asked_different_things(self) -> None:
        self.rack("a", self.answers)
        self.rack("b", self.answers)
        asked = Deferred.fromCoroutine(
            ask_all(ListImages, {name: (link, {"known_digest": name}) for name, link in self.links.items()})
        )
        self.flush()
        outcomes: Any = self.successResultOf(asked)
        self.assertEqual({name: outcome.value["digest"] for name, outcome in outcomes.items()}, {"a": "a", "b": "b"})

    def test_arguments_that_do_not_fit_fail_for_the_peer_that_they_were_for(self) -> None:
        self.rack("a", self.answers)
        self.rack("b", self.answers)
        arguments: dict[str, dict[str, Any]] = {"a": {"known_digest": ["unhashable"]}, "b": {"known_digest": ""}}
        asked = Deferred.fromCoroutine(
            ask_all(ListImages, {name: (link, arguments[name]) for name, link in self.links.items()})
        )
        self.flush()
        outcomes: Any = self.successResultOf(asked)
        self.assertEqual(outcomes["a"].kind, "ArgumentsInvalid")
        self.assertIsInstance(outcomes["b"], Answered)

    def test_arguments_that_are_equal_but_of_another_type_are_not_mistaken_for_each_other(self) -> None:
        async def sync(link, generation, digest, url):
            return {"outcome": "", "generation": generation, "digest": "", "reason": "", **self.nothing_fetched}

        region, _, pump = linked({}, {SyncImages: sync}, self.clock, region_reporter=self.reports, interval=0)
        asks = {str(value): (region, {"generation": value, "digest": "", "url": ""}) for value in (1, True, 1.0)}
        asked = Deferred.fromCoroutine(ask_all(SyncImages, asks))
        pump.flush()
        outcomes: Any = self.successResultOf(asked)
        self.assertEqual(outcomes["1"].value["generation"], 1)
        self.assertEqual(outcomes["True"].kind, "ArgumentsInvalid")
        self.assertEqual(outcomes["1.0"].kind, "ArgumentsInvalid")

    nothing_fetched: ClassVar[dict[str, int]] = {"bytes_fetched": 0, "files_fetched": 0}
