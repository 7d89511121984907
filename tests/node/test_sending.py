"""When each item is sent, to the second, on a clock of the test; with answers that are just given."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from node.client import Answer, NoAnswer
from node.console import Console
from node.delivery import ASIDE_SECONDS, Standing
from node.sending import Heartbeat, Sender
from node.spool import Spool
from tests.node.virtual import VirtualClock

OK = Answer(200, "OK", {}, b"OK")
PATIENCE = 900.0
Outcome = Answer | NoAnswer


def wrong(status: int, **headers: str) -> Answer:
    return Answer(status, "Reason", {name.replace("_", "-"): value for name, value in headers.items()}, b"why")


class FakeClient:
    """Answers with what ``respond`` gives for a body."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.sent: list[tuple[float, bytes]] = []
        self.respond: Callable[[bytes], Answer | NoAnswer | BaseException] = lambda body: OK

    def url(self, path: str) -> str:
        return "http://region/" + path

    def request(self, method: str, path: str, body: bytes, content_type: str) -> Answer:
        self.sent.append((self.clock.now(), body))
        outcome = self.respond(body)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


class SendingTestCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = VirtualClock()
        self.client: Any = FakeClient(self.clock)
        self.lines: list[str] = []
        self.console = Console([lambda level, line: self.lines.append(line)])
        self.heard: list[Standing] = []


class SenderTests(SendingTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.spool = Spool(self.mktemp(), self.lines.append)
        self.sender = Sender(
            self.spool, self.client, self.console, self.heard.append, PATIENCE, self.clock, chance=lambda: 1.0
        )

    def add(self, *names: str, meta: Mapping[str, Any] | None = None) -> None:
        for name in names:
            self.spool.add(f"item {name}", "", name.encode(), meta)

    def send(self, seconds: float = 1e9) -> list[tuple[float, str]]:
        """Send until all is sent or given up, or it is so late; when each attempt was and of what."""
        while (pause := self.sender.step()) is not None and self.clock.now() <= seconds:
            self.clock.sleep(pause)
        return [(round(when, 1), body.decode()) for when, body in self.client.sent]

    def failing(self, *outcomes: Any) -> Callable[[bytes], Any]:
        left = list(outcomes)
        return lambda body: left.pop(0) if left else OK

    def test_in_order_and_at_once_when_nothing_is_wrong(self) -> None:
        self.add("a", "b", "c")
        self.assertEqual(self.send(), [(0.0, "a"), (0.0, "b"), (0.0, "c")])
        self.assertEqual((self.lines, len(self.heard)), ([], 3))

    def test_pauses_double_up_to_a_minute_and_start_anew_when_the_region_is_back(self) -> None:
        self.client.respond = self.failing(*[NoAnswer("refused")] * 8, OK, NoAnswer("refused"))
        self.add("a", "b")
        times = [when for when, _ in self.send()]
        pauses = [round(after - before, 1) for before, after in itertools.pairwise(times)]
        self.assertEqual(pauses, [1, 2, 4, 8, 16, 32, 60, 60, 0, 1])

    def test_what_the_region_asks_for_is_waited_and_up_to_a_tenth_more(self) -> None:
        self.client.respond = self.failing(wrong(503, retry_after="100"))
        self.add("a")
        self.assertEqual(self.send(), [(0.0, "a"), (111.0, "a")])

    def test_a_refusal_is_the_end_of_that_item_alone(self) -> None:
        self.client.respond = lambda body: wrong(400, x_correlation_id="c0ffee") if body == b"b" else OK
        self.add("a", "b", "c")
        self.assertEqual(self.send(), [(0.0, "a"), (0.0, "b"), (0.0, "c")])
        self.assertEqual(self.spool.undelivered, ("item b (400 Reason)",))
        self.assertEqual(
            self.lines[0],
            "item b: attempt 1: POST http://region/2012-03-01/: 400 Reason [c0ffee]: 'why'; giving it up",
        )
        self.assertIn("item b is NOT delivered and will not be tried again: 400 Reason", self.lines[1])

    def test_one_that_the_region_cannot_take_soon_lets_the_others_go_first(self) -> None:
        self.client.respond = lambda body: wrong(500) if body == b"a" else OK
        self.add("a", "b", "c")
        sent = self.send(1000.0)
        first = next(when for when, name in sent if name == "b")
        self.assertTrue(ASIDE_SECONDS <= first <= 2 * ASIDE_SECONDS + 4, sent)
        self.assertEqual({name for _, name in sent[sent.index((first, "b")) + 2 :]}, {"a"})
        self.assertEqual(self.spool.undelivered, ())

    def test_one_that_never_gets_through_while_the_region_is_there_does_too(self) -> None:
        def respond(body: bytes) -> Answer | NoAnswer:
            self.sender.hear()  # a heartbeat got through
            return NoAnswer("timed out") if body == b"a" else OK

        self.client.respond = respond
        self.add("a", "b")
        sent = self.send(400.0)
        self.assertIn("b", [name for _, name in sent])

    def test_when_the_region_is_heard_again_nothing_waits_any_longer_unless_it_asked_for_that(self) -> None:
        for outcome, expected in ((NoAnswer("refused"), 80.0), (wrong(503, retry_after="200"), 221.0)):
            self.clock = VirtualClock()
            self.client = FakeClient(self.clock)
            sender = Sender(
                self.spool, self.client, self.console, self.heard.append, PATIENCE, self.clock, chance=lambda: 1.0
            )
            self.spool.add("item a", "", b"a")

            def respond(body: bytes, outcome: Outcome = outcome, sender: Sender = sender) -> Outcome:
                if self.clock.now() < 70:
                    return outcome
                sender.end()
                return OK

            def beat(sender: Sender = sender) -> None:
                self.clock.sleep(80.0)
                sender.hear()

            self.client.respond = respond
            self.clock.start("heartbeat", beat)
            sender.run()
            self.assertEqual(round(self.client.sent[-1][0]), expected)

    def test_while_the_region_is_away_the_order_stays(self) -> None:
        self.client.respond = lambda body: NoAnswer("refused") if self.clock.now() < 5000 else OK
        self.add("a", "b", "c")
        sent = self.send()
        self.assertEqual([name for _, name in sent if _ >= 5000], ["a", "b", "c"])
        self.assertEqual(self.spool.undelivered, ())

    def test_once_no_scripts_run_patience_has_an_end_and_everything_is_given_up_together(self) -> None:
        self.client.respond = lambda body: NoAnswer("refused")
        self.add("a", "b", "c")
        self.sender.drain()
        sent = self.send()
        self.assertEqual({name for _, name in sent}, {"a"})
        self.assertEqual(sent[-1][0], PATIENCE)
        reason = "refused; the region took nothing for 15 min"
        self.assertEqual(self.spool.undelivered, tuple(f"item {name} ({reason})" for name in "abc"))

    def test_each_that_is_taken_renews_patience(self) -> None:
        self.client.respond = lambda body: OK if self.clock.now() % 1000 >= 800 else NoAnswer("refused")
        self.add("a", "b")
        self.sender.drain()
        self.send(700.0)
        self.assertEqual(self.spool.undelivered, ())

    def test_what_goes_wrong_in_the_sender_itself_is_said_and_it_goes_on(self) -> None:
        def respond(body: bytes) -> Answer:
            if len(self.client.sent) == 1:
                raise RuntimeError("odd")
            self.sender.end()
            return OK

        self.client.respond = respond
        self.add("a")
        self.sender.run()
        self.assertEqual(self.spool.waiting, 0)
        self.assertIn("the sender stumbled over RuntimeError: odd; it goes on", self.lines)

    def test_what_goes_wrong_in_it_each_time_is_given_up_when_patience_is_at_an_end(self) -> None:
        self.client.respond = lambda body: RuntimeError("odd")
        spool = Spool(self.mktemp(), self.lines.append, lambda: None if spool.waiting else sender.end())
        sender = Sender(spool, self.client, self.console, self.heard.append, PATIENCE, self.clock)
        for name in "abc":
            spool.add(f"item {name}", "", b"")
        sender.drain()
        sender.run()
        self.assertEqual(self.clock.now(), PATIENCE)
        reason = "the runner failed at it: RuntimeError: odd"
        self.assertEqual(spool.undelivered, tuple(f"item {name} ({reason})" for name in "abc"))


class HeartbeatTests(SendingTestCase):
    def beats(self, count: int) -> list[float]:
        heart = Heartbeat(
            self.client,
            self.console,
            lambda: "1/2 x: running",
            lambda progress: (progress.encode(), "text"),
            60.0,
            self.heard.append,
            self.clock,
        )
        respond = self.client.respond

        def counted(body: bytes) -> Any:
            if len(self.client.sent) >= count:
                heart.end()
            return respond(body)

        self.client.respond = counted
        heart.run()
        return [when for when, _ in self.client.sent]

    def test_every_minute_with_what_is_being_done(self) -> None:
        self.assertEqual(self.beats(3), [60.0, 120.0, 180.0])
        self.assertEqual(self.client.sent[0][1], b"1/2 x: running")
        self.assertEqual((len(self.heard), self.lines), (3, []))

    def test_nothing_ends_it(self) -> None:
        outcomes: list[Any] = [NoAnswer("refused"), wrong(400), wrong(500), SystemExit(1), RuntimeError("odd"), OK]
        self.client.respond = lambda body: outcomes.pop(0)
        self.assertEqual(len(self.beats(6)), 6)
        self.assertEqual(len(self.heard), 1)
        self.assertIn("the heartbeat stumbled over SystemExit: 1; it goes on", self.lines)
        self.assertIn("the region hears the heartbeat again, after 3 that failed", self.lines)
