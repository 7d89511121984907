"""Asking racks: one round at a time, one outcome per rack, and no list where a digest will do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from attrs import define, evolve, frozen
from twisted.internet.defer import Deferred, execute, succeed
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from region.answers import asking
from region.answers.asking import Asker, Round
from region.answers.combine import Catalogue
from rpc.commands import ListImages
from rpc.identity import Peer
from rpc.manifest import InvalidManifest, Manifest
from rpc.outcomes import Answered, Failed, NotConnected, Outcome, TimedOut
from rpc.testing import RecordingReporter, linked
from tests.region.fakes import ask_each
from tests.region.inventories import FOCAL, NOBLE, catalogue, image


@frozen
class Info:
    name: str
    generation: int | None = None
    digest: str | None = None
    progress: Mapping[str, Any] = {}
    reported: datetime | None = None


@define
class FakeLink:
    """A link whose answers the test gives, one by one or at once."""

    asked: list[str]
    answer: Outcome[Any] | Callable[[str], Outcome[Any]] | None = None
    pending: list[Deferred[Outcome[Any]]] = []  # noqa: RUF008  (replaced in __attrs_post_init__)
    newest: list[str | None] = []  # noqa: RUF008  (likewise)

    def __attrs_post_init__(self) -> None:
        self.pending = []
        self.newest = []

    def ask(self, command: Any, *, deadline: float | None = None, **arguments: Any) -> Awaitable[Outcome[Any]]:
        self.asked.append(arguments["known_digest"])
        self.newest.append(arguments.get("newest_digest"))
        if self.answer is None:
            waiting: Deferred[Outcome[Any]] = Deferred()
            self.pending.append(waiting)
            return waiting
        return succeed(self.answer(arguments["known_digest"]) if callable(self.answer) else self.answer)


def holding(held: Catalogue, generation: int = 1) -> Callable[[str], Outcome[Any]]:
    """How a rack that holds ``held`` answers, given the digest that is known of it."""

    def answer(known: str) -> Outcome[Any]:
        value: dict[str, Any] = {"state": "ready", "generation": generation, "digest": held.digest}
        if known != held.digest:
            value["inventory"] = held.manifest.canonical
        return Answered(value, 0.01)

    return answer


EMPTY = {"state": "empty", "generation": -1, "digest": ""}
EMPTY_RACK: Outcome[Any] = Answered(EMPTY)


class FakeLinks:
    """Some racks, linked or not."""

    def __init__(self, **racks: Outcome[Any] | Callable[[str], Outcome[Any]] | None) -> None:
        self.racks = {name: Info(f"rack-{name}") for name in racks}
        self.links = {name: FakeLink([], answer) for name, answer in racks.items()}
        self.ended: dict[str, float] = {}

    def enrolled(self) -> Mapping[str, Info]:
        return self.racks

    def link_of(self, system_id: str) -> FakeLink | None:
        return self.links.get(system_id)

    def not_connected_since(self, system_id: str) -> float | None:
        return self.ended.get(system_id)


class Asking(SynchronousTestCase):
    """The asker over fake links."""

    def asker(self, links: FakeLinks, **options: Any) -> Asker:
        self.clock = Clock()
        self.clock.advance(1000)
        return Asker(links, self.clock, **{"ask_all": ask_each, **options})

    def round(self, asker: Asker) -> Round:
        return self.successResultOf(asker.ask())

    def test_a_rack_that_answers_is_read(self) -> None:
        links = FakeLinks(a=holding(catalogue([NOBLE]), 7))
        answer = self.round(self.asker(links)).answers["a"]
        assert answer.held is not None
        self.assertEqual(set(answer.held.catalogue.targets), {NOBLE})
        self.assertEqual((answer.name, answer.held.state, answer.last_generation), ("rack-a", "ready", 7))

    def test_a_rack_that_holds_nothing_answers_with_nothing(self) -> None:
        answer = self.round(self.asker(FakeLinks(a=EMPTY_RACK))).answers["a"]
        assert answer.held is not None
        self.assertEqual((dict(answer.held.catalogue.targets), answer.held.generation), ({}, None))

    def test_a_rack_that_did_not_change_sends_no_list_again(self) -> None:
        held = catalogue([NOBLE])
        links = FakeLinks(a=holding(held))
        asker = self.asker(links)
        first, second = self.round(asker), self.round(asker)
        self.assertEqual(links.links["a"].asked, ["", held.digest])
        self.assertEqual(first.key, second.key)
        assert first.answers["a"].held
        assert second.answers["a"].held
        self.assertIs(first.answers["a"].held.catalogue, second.answers["a"].held.catalogue)

    def test_a_rack_never_asked_before_is_asked_about_what_was_published(self) -> None:
        current = catalogue([NOBLE])
        links = FakeLinks(a=holding(current), b=holding(catalogue([FOCAL])))
        asker = self.asker(links, published={current.digest: current}.get, expected=lambda: current.digest)
        answers = self.round(asker).answers
        self.assertEqual(links.links["a"].asked, [current.digest])
        assert answers["a"].held
        assert answers["b"].held
        self.assertIs(answers["a"].held.catalogue, current)
        self.assertEqual(set(answers["b"].held.catalogue.targets), {FOCAL})

    def test_a_rack_that_has_reported_something_new_is_asked_about_that(self) -> None:
        old, new = catalogue([FOCAL]), catalogue([NOBLE])
        links = FakeLinks(a=holding(old))
        asker = self.asker(links, published={new.digest: new}.get)
        self.round(asker)
        links.racks["a"] = evolve(links.racks["a"], digest=new.digest)
        links.links["a"].answer = holding(new)
        self.round(asker)
        self.assertEqual(links.links["a"].asked, ["", new.digest])

    def test_a_rack_that_has_just_swapped_to_what_was_published_sends_no_list(self) -> None:
        old, new = catalogue([FOCAL]), catalogue([NOBLE])
        current = old
        links = FakeLinks(a=holding(old))
        asker = self.asker(links, published={old.digest: old, new.digest: new}.get, expected=lambda: current.digest)
        self.round(asker)
        current = new
        swapped = Answered({"state": "ready", "generation": 2, "digest": new.digest}, 0.01)
        links.links["a"].answer = swapped  # it has not reported that yet
        answers = [self.round(asker).answers["a"] for _ in range(2)]
        self.assertEqual(links.links["a"].asked, [old.digest, old.digest, new.digest])
        self.assertEqual(links.links["a"].newest, [None, new.digest, None])
        for answer in answers:
            assert answer.held is not None
            self.assertIs(answer.held.catalogue, new)
            self.assertEqual((answer.held.generation, answer.last_generation), (2, 2))

    def test_what_a_rack_was_asked_about_counts_also_if_another_is_published_before_it_answers(self) -> None:
        old, new = catalogue([FOCAL]), catalogue([NOBLE])
        known = {old.digest: old, new.digest: new}
        links = FakeLinks(a=holding(old))
        asker = self.asker(links, published=known.get, expected=lambda: new.digest)
        self.round(asker)
        links.links["a"].answer = None
        asking = asker.ask()
        known.clear()  # two generations later, the region has forgotten both
        links.links["a"].pending.pop().callback(Answered({"state": "ready", "generation": 2, "digest": new.digest}))
        held = self.successResultOf(asking).answers["a"].held
        assert held is not None
        self.assertIs(held.catalogue, new)

    def test_every_way_to_fail_is_an_outcome(self) -> None:
        links = FakeLinks(late=TimedOut(2.0), broken=Failed("Unhandled", "reference 1"), gone=None)
        del links.links["gone"]
        links.ended["gone"] = 500.0
        answers = self.round(self.asker(links)).answers
        self.assertEqual(answers["late"].outcome, TimedOut(2.0))
        self.assertEqual(answers["broken"].outcome, Failed("Unhandled", "reference 1"))
        self.assertEqual(answers["gone"].outcome, NotConnected(500.0))
        self.assertEqual([answers[name].silent_since for name in ("late", "broken", "gone")], [1000.0, 1000.0, 500.0])

    def test_a_rack_that_falls_silent_keeps_what_it_last_held(self) -> None:
        links = FakeLinks(a=holding(catalogue([NOBLE]), 3))
        asker = self.asker(links)
        self.round(asker)
        links.links["a"].answer = TimedOut(2.0)
        self.clock.advance(50)
        self.round(asker)
        self.clock.advance(50)
        answer = self.round(asker).answers["a"]
        self.assertEqual((set(answer.last_targets), answer.last_generation), ({NOBLE}, 3))
        self.assertEqual(answer.silent_since, 1050.0)

    def test_a_rack_is_not_silent_since_before_it_was_connected_or_reported(self) -> None:
        links = FakeLinks(a=TimedOut(2.0), b=TimedOut(2.0))
        linked = links.links.pop("a")
        asker = self.asker(links)
        self.assertEqual(self.round(asker).answers["b"].silent_since, 1000.0)
        self.clock.advance(50)
        links.links["a"] = linked
        links.racks["b"] = evolve(links.racks["b"], reported=datetime.fromtimestamp(1020, UTC))
        for _ in range(2):
            answers = self.round(asker).answers
            self.assertEqual([answers[name].silent_since for name in "ab"], [1050.0, 1050.0])
            self.clock.advance(50)

    def test_the_older_of_what_was_answered_and_reported_counts_for_a_silent_rack(self) -> None:
        links = FakeLinks(a=holding(catalogue([NOBLE]), 3))
        asker = self.asker(links)
        self.round(asker)
        links.racks["a"] = evolve(links.racks["a"], generation=5)
        links.links["a"].answer = TimedOut(2.0)
        self.assertEqual(self.round(asker).answers["a"].last_generation, 3)

    def test_those_who_ask_while_a_round_is_in_flight_share_it(self) -> None:
        links = FakeLinks(a=None, b=None)
        asker = self.asker(links)
        waiting = [asker.ask() for _ in range(64)]
        links.links["a"].pending.pop().callback(EMPTY_RACK)
        waiting.append(asker.ask())
        for deferred in waiting:
            self.assertNoResult(deferred)
        links.links["b"].pending.pop().callback(EMPTY_RACK)
        rounds = {id(self.successResultOf(deferred)) for deferred in waiting}
        self.assertEqual((len(rounds), len(links.links["a"].asked)), (1, 1))
        asker.ask()
        self.assertEqual(len(links.links["a"].asked), 2)

    def test_one_who_stops_waiting_does_not_end_the_round_for_the_others(self) -> None:
        links = FakeLinks(a=None)
        asker = self.asker(links)
        leaver, stayer = asker.ask(), asker.ask()
        leaver.cancel()
        self.failureResultOf(leaver)
        links.links["a"].pending.pop().callback(EMPTY_RACK)
        self.assertIsNotNone(self.successResultOf(stayer).answers["a"].held)

    def test_a_rack_whose_answer_cannot_be_read_for_another_reason_fails_alone_and_is_logged(self) -> None:
        def broken(data: bytes, digest: str) -> None:
            raise ZeroDivisionError("division by zero")

        self.patch(asking, "_read_catalogue", broken)
        answers = self.round(self.asker(FakeLinks(a=EMPTY_RACK, b=holding(catalogue([NOBLE]))))).answers
        self.assertIsNotNone(answers["a"].held)
        self.assertEqual(answers["b"].outcome, Failed("ZeroDivisionError", "division by zero", 0.01))
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)

    def test_a_round_that_breaks_is_told_to_all_who_wait_and_the_next_one_is_tried(self) -> None:
        async def broken(command: Any, asks: Any, *, deadline: float) -> Any:
            raise ZeroDivisionError("division by zero")

        asker = self.asker(FakeLinks(a=EMPTY_RACK), ask_all=broken)
        for _ in range(2):
            self.failureResultOf(asker.ask(), ZeroDivisionError)

    def test_a_round_that_breaks_when_nobody_waits_any_more_is_logged(self) -> None:
        waiting: Deferred[Any] = Deferred()

        async def broken(command: Any, asks: Any, *, deadline: float) -> Any:
            await waiting
            raise ZeroDivisionError("division by zero")

        leaver = self.asker(FakeLinks(a=EMPTY_RACK), ask_all=broken).ask()
        leaver.cancel()
        self.failureResultOf(leaver)
        waiting.callback(None)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)

    def test_a_rack_that_says_the_same_again_gives_the_same_answer(self) -> None:
        links = FakeLinks(a=holding(catalogue([NOBLE])))
        asker = self.asker(links)
        first, second = self.round(asker), self.round(asker)
        self.assertIs(first.answers["a"], second.answers["a"])

    def test_rounds_are_one_value_while_all_racks_are_as_they_were_and_are_asked_each_time(self) -> None:
        links = FakeLinks(a=holding(catalogue([NOBLE])), b=TimedOut(2.0))
        asker = self.asker(links)
        rounds = [self.round(asker) for _ in range(3)]
        self.assertIs(rounds[1], rounds[0])
        self.assertIs(rounds[2], rounds[0])
        self.assertEqual((len(links.links["a"].asked), len(links.links["b"].asked)), (3, 3))

    def test_a_round_is_another_as_soon_as_one_rack_says_something_else_is_silent_or_is_new(self) -> None:
        links = FakeLinks(a=holding(catalogue([NOBLE])), b=holding(catalogue([NOBLE])))
        asker = self.asker(links)
        rounds = [self.round(asker)]
        links.links["a"].answer = holding(catalogue([FOCAL]), 2)
        rounds.append(self.round(asker))
        links.links["a"].answer = TimedOut(2.0)
        rounds.append(self.round(asker))
        links.racks = {"b": links.racks["b"]}
        rounds.append(self.round(asker))
        self.assertEqual(len({id(each) for each in rounds}), 4)
        self.assertEqual(len({each.key for each in rounds}), 4)
        self.assertEqual([type(each.answers["a"].outcome).__name__ for each in rounds[:3]],
                         ["Answered", "Answered", "TimedOut"])  # fmt: skip

    def test_an_inventory_that_is_not_what_its_digest_says_is_a_failure(self) -> None:
        cases: list[tuple[dict[str, Any], str]] = [
            ({"digest": "0" * 64, "inventory": b"{}"}, "sha256 is"),
            ({"digest": "junk"}, "not 64 lower-case"),
            ({"digest": "0" * 64}, "sent no list"),
        ]
        for value, reason in cases:
            links = FakeLinks(a=Answered({"state": "ready", "generation": 1, **value}))
            outcome = self.round(self.asker(links)).answers["a"].outcome
            assert isinstance(outcome, Failed)
            self.assertEqual(outcome.kind, "InventoryInvalid")
            self.assertIn(reason, outcome.reason)

    def test_an_inventory_with_half_a_character_is_a_failure_of_its_rack_alone(self) -> None:
        bad = Catalogue(Manifest([evolve(image(NOBLE), attributes={"release_title": "half \ud800"})]))
        good = Catalogue(Manifest([evolve(image(FOCAL), attributes={"release_title": "\U0001f600 \\ud800"})]))
        found = self.round(self.asker(FakeLinks(a=holding(bad), b=holding(good)))).answers
        assert isinstance(found["a"].outcome, Failed)
        self.assertEqual(found["a"].outcome.kind, "InventoryInvalid")
        self.assertIsNotNone(found["b"].held)
        self.flushLoggedErrors()

    def test_a_word_for_its_state_that_no_rack_has_is_cut(self) -> None:
        words = {"state": "\0" + "x" * 60_000, "generation": -1, "digest": ""}
        held = self.round(self.asker(FakeLinks(a=Answered(words)))).answers["a"].held
        assert held is not None
        self.assertEqual(held.state, "\\x00" + "x" * 27 + "…")

    def test_a_large_list_that_many_racks_send_is_parsed_once_and_in_a_thread(self) -> None:
        self.patch(asking, "INLINE", 10)
        jobs: list[tuple[Callable[..., Any], tuple[Any, ...], Deferred[Any]]] = []

        def run_in_thread(function: Callable[..., Any], *arguments: Any) -> Deferred[Any]:
            deferred: Deferred[Any] = Deferred()
            jobs.append((function, arguments, deferred))
            return deferred

        held = catalogue([NOBLE])
        links = FakeLinks(**{f"r{number}": holding(held) for number in range(10)})
        waiting = self.asker(links, run_in_thread=run_in_thread).ask()
        self.assertNoResult(waiting)
        ((function, arguments, deferred),) = jobs
        deferred.callback(function(*arguments))
        catalogues = {
            id(answer.held and answer.held.catalogue) for answer in self.successResultOf(waiting).answers.values()
        }
        self.assertEqual(len(catalogues), 1)

    def test_a_bad_list_does_not_spoil_a_good_one_that_is_called_the_same(self) -> None:
        self.patch(asking, "INLINE", 10)
        jobs: list[tuple[Callable[..., Any], tuple[Any, ...], Deferred[Any]]] = []

        def run_in_thread(function: Callable[..., Any], *arguments: Any) -> Deferred[Any]:
            jobs.append((function, arguments, Deferred()))
            return jobs[-1][2]

        held = catalogue([NOBLE])
        bad = Answered({"state": "ready", "generation": 1, "digest": held.digest, "inventory": b"x" * 100})
        waiting = self.asker(FakeLinks(a=bad, b=holding(held)), run_in_thread=run_in_thread).ask()
        for function, arguments, deferred in jobs:
            execute(function, *arguments).chainDeferred(deferred)
        answers = self.successResultOf(waiting).answers
        self.assertIsInstance(answers["a"].outcome, Failed)
        self.assertIsNotNone(answers["b"].held)

    def test_a_large_list_that_cannot_be_parsed_fails_every_rack_that_sent_it(self) -> None:
        self.patch(asking, "INLINE", 10)
        deferred: Deferred[Any] = Deferred()
        bad = Answered({"state": "ready", "generation": 1, "digest": "0" * 64, "inventory": b"x" * 100})
        waiting = self.asker(FakeLinks(a=bad, b=bad), run_in_thread=lambda *_: deferred).ask()
        deferred.errback(Failure(InvalidManifest("not a manifest")))
        kinds = [answer.outcome for answer in self.successResultOf(waiting).answers.values()]
        self.assertEqual([type(kind) for kind in kinds], [Failed, Failed])

    def test_one_rack_can_be_asked_alone(self) -> None:
        links = FakeLinks(a=holding(catalogue([NOBLE])), b=EMPTY_RACK)
        answer = self.successResultOf(Deferred.fromCoroutine(self.asker(links).ask_one("a")))
        self.assertIsNotNone(answer.held)
        self.assertEqual(links.links["b"].asked, [])

    def test_without_racks_a_round_is_empty(self) -> None:
        self.assertEqual(self.round(self.asker(FakeLinks())).answers, {})

    def test_what_is_remembered_of_a_rack_that_is_gone_is_forgotten(self) -> None:
        links = FakeLinks(a=holding(catalogue([NOBLE])))
        asker = self.asker(links)
        self.round(asker)
        info = links.racks.pop("a")
        self.round(asker)
        links.racks["a"] = info
        self.round(asker)
        self.assertEqual(links.links["a"].asked, ["", ""])

    def test_the_key_of_a_round_does_not_depend_on_seconds(self) -> None:
        keys = set()
        for seconds in (0.1, 0.2):
            links = FakeLinks(a=Failed("Unhandled", "reference 1", seconds), b=Answered(EMPTY, seconds))
            keys.add(self.round(self.asker(links)).key)
        self.assertEqual(len(keys), 1)

    def test_the_key_of_a_round_tells_when_anything_shown_has_changed(self) -> None:
        links = FakeLinks(a=holding(catalogue([NOBLE])), b=EMPTY_RACK)
        asker = self.asker(links)
        keys = [self.round(asker).key]
        for change in (
            TimedOut(2.0),
            Failed("Unhandled", "1"),
            holding(catalogue([NOBLE]), 2),
            holding(catalogue([FOCAL])),
        ):
            links.links["a"].answer = change
            keys.append(self.round(asker).key)
        links.racks["b"] = evolve(links.racks["b"], progress={"bytes_done": 1})
        keys.append(self.round(asker).key)
        self.assertEqual(len(set(keys)), len(keys))


class OverTheWire(SynchronousTestCase):
    """The asker over real links, in memory."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.advance(1000)
        self.links = FakeLinks()
        self.pumps: list[Any] = []
        self.asked: list[str] = []

    def rack(self, name: str, answer: Callable[[str], Outcome[Any]] | None) -> None:
        async def list_images(link: Any, known_digest: str, newest_digest: str | None) -> Mapping[str, Any]:
            self.asked.append(known_digest)
            if answer is None:
                await Deferred()
                raise AssertionError("it never fires")
            outcome = answer(known_digest)
            assert isinstance(outcome, Answered)
            value: Mapping[str, Any] = {"inventory": None, **outcome.value}
            return value

        region, _, pump = linked(
            {}, {ListImages: list_images}, self.clock, rack=Peer("rack", name, name),
            region_reporter=RecordingReporter(), rack_reporter=RecordingReporter(), interval=0,
        )  # fmt: skip
        self.links.racks[name] = Info(f"rack-{name}")
        self.links.links[name] = region  # type: ignore[assignment]  # a real one
        self.pumps.append(pump)

    def flush(self) -> None:
        for pump in self.pumps:
            pump.flush()

    def test_a_round_over_real_links_ends_with_every_rack_in_one_outcome(self) -> None:
        held = catalogue([NOBLE, FOCAL])
        self.rack("good", holding(held, 4))
        self.rack("slow", None)
        asker = Asker(self.links, self.clock)
        waiting = asker.ask()
        self.flush()
        self.assertNoResult(waiting)
        self.clock.advance(asking.DEADLINE)
        answers = self.successResultOf(waiting).answers
        self.assertEqual(answers["slow"].outcome, TimedOut(2.0))
        assert answers["good"].held
        self.assertEqual(set(answers["good"].held.catalogue.targets), {NOBLE, FOCAL})
        again = asker.ask()
        self.flush()
        self.clock.advance(asking.DEADLINE)
        self.assertIsNotNone(self.successResultOf(again).answers["good"].held)
        self.assertEqual([known for known in self.asked if known], [held.digest])
