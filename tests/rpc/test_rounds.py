"""A round ends with one outcome for each peer that was asked, whatever each did."""

from __future__ import annotations

from typing import Any, ClassVar, Final

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from rpc.asks import Alike
from rpc.boxes import END, pairs
from rpc.commands import ListImages, SyncImages
from rpc.identity import Peer
from rpc.outcomes import Answered, Failed, NotConnected, TimedOut
from rpc.protocol import Link
from rpc.rounds import AT_ONCE, ask_all
from rpc.testing import RecordingReporter, linked

_ANSWER: Final = {"state": "ready", "generation": 1, "digest": "k", "inventory": None}


class RoundTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.reports = RecordingReporter()
        self.pumps: list[Any] = []
        self.links: dict[str, Link] = {}
        self.racks: dict[str, Link] = {}

    def rack(self, name, answer) -> None:
        async def list_images(link, known_digest, newest_digest):
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

    def test_seconds_are_counted_from_when_a_peer_was_asked(self) -> None:
        for number in range(AT_ONCE + 1):
            self.rack(f"rack{number}", self.answers)
        asked = self.ask()
        self.clock.advance(1)  # the last is asked only then
        self.clock.advance(2)
        self.flush()
        seconds = [outcome.seconds for outcome in self.successResultOf(asked).values()]
        self.assertEqual(seconds, [3.0] * AT_ONCE + [2.0])

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

    def test_equal_answers_are_read_once_and_others_are_what_they_are(self) -> None:
        self.rack("a", self.answers)
        self.rack("b", self.answers)
        self.rack("c", self.lists)
        alike = Alike()
        found: list[Any] = []
        for _ in range(2):
            asked = self.ask(alike=alike)
            self.flush()
            found.append(self.successResultOf(asked))
        values = [outcomes[name].value for outcomes in found for name in ("a", "b")]
        self.assertTrue(all(value is values[0] for value in values))
        self.assertEqual(values[0]["inventory"], None)
        self.assertEqual([outcomes["c"].value["inventory"] for outcomes in found], [b"x" * 10_000] * 2)

    async def lists(self, known_digest):
        return {"state": "ready", "generation": 1, "digest": known_digest, "inventory": b"x" * 10_000}

    def test_an_answer_like_another_to_an_ask_that_was_never_made_is_no_answer(self) -> None:
        self.rack("a", self.answers)
        alike = Alike()
        asked = self.ask(alike=alike)
        self.flush()
        self.successResultOf(asked)
        rest = pairs(ListImages.answer_schema.dump(_ANSWER).items()) + END
        self.assertIsNotNone(alike.get(rest))
        for data in (b"", b"\0", b"\0\7_answer", b"\0\7_answer\0\1", b"\0\7_answer\0\0019" + rest):
            self.assertFalse(self.links["a"].asks.answered_alike(data))

    @settings(max_examples=50)
    @given(st.text(max_size=20), st.integers(-1, 9), st.binary(max_size=40), st.data())
    def test_an_answer_cut_anywhere_is_the_same_answer(self, state, generation, inventory, data) -> None:
        self.setUp()
        answer = {"state": state, "generation": generation, "digest": "", "inventory": inventory}

        async def answers(known_digest):
            return answer

        self.rack("a", answers)
        alike = Alike()
        for _ in range(2):
            asked = self.ask(alike=alike)
            stream = bytearray()
            self.patch(self.links["a"], "dataReceived", stream.extend)
            self.flush()
            del self.links["a"].dataReceived
            cut = data.draw(st.integers(0, len(stream)))
            for piece in (stream[:cut], stream[cut:]):
                self.links["a"].dataReceived(bytes(piece))
            self.assertEqual(self.successResultOf(asked)["a"].value, answer)

    def test_many_peers_are_asked_some_at_a_time_and_nothing_is_left_of_a_round_given_up_meanwhile(
        self,
    ) -> None:
        for number in range(AT_ONCE + 1):
            self.rack(f"rack{number}", self.answers)
        asked = self.ask()
        self.assertEqual(sum(len(link.asks) for link in self.links.values()), AT_ONCE)
        self.clock.advance(0)
        self.assertEqual(sum(len(link.asks) for link in self.links.values()), AT_ONCE + 1)
        self.flush()
        self.assertEqual(len(self.successResultOf(asked)), AT_ONCE + 1)
        given_up = self.ask()
        given_up.cancel()
        self.failureResultOf(given_up, CancelledError)
        self.flush()
        self.assertEqual([len(link.asks) for link in self.links.values()], [0] * (AT_ONCE + 1))
        self.assertEqual([call for call in self.clock.getDelayedCalls() if call.getTime() > self.clock.seconds()], [])

    def test_peers_that_are_asked_when_the_time_is_up_are_late_as_the_others(self) -> None:
        for number in range(AT_ONCE + 1):
            self.rack(f"rack{number}", self.hangs)
        asked = self.ask(deadline=2.0)
        self.clock.advance(2)
        self.assertEqual(set(self.successResultOf(asked).values()), {TimedOut(2.0)})

    nothing_fetched: ClassVar[dict[str, int]] = {"bytes_fetched": 0, "files_fetched": 0}
