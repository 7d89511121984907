"""Every call ends, in one of the ways that it may end; nothing but silence or nonsense ends a link."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.protocols import amp
from twisted.test.iosim import FakeTransport, connect
from twisted.trial.unittest import SynchronousTestCase

from rpc import protocol
from rpc.boxes import END, MAX_ANONYMOUS_BOX, pairs
from rpc.commands import (
    CancelSync,
    Enroll,
    ListImages,
    Ping,
    Register,
    ReportInventory,
    SyncImages,
    SyncProgress,
    VersionMismatch,
)
from rpc.metrics import CUTS
from rpc.outcomes import Answered, Failed, NotConnected, TimedOut
from rpc.protocol import (
    AnswerMalformed,
    ArgumentsInvalid,
    ArgumentsRefused,
    CallTimedOut,
    Link,
    LinkLost,
    NotAllowed,
    Responders,
    UndeclaredError,
    Unhandled,
    UnknownCommand,
)
from rpc.testing import ANONYMOUS, RACK, REGION, RecordingReporter, linked

READY: dict[str, Any] = {"state": "ready", "generation": 3, "digest": "d" * 64, "inventory": None}
REGISTER: dict[str, Any] = {"versions": [1], "name": "rack", "software": "0.1"}


def run(coroutine) -> Deferred[Any]:
    return Deferred.fromCoroutine(coroutine)


class Pair(SynchronousTestCase):
    """A region and a rack in memory; each reports to a recorder."""

    def link(self, region_table=(), rack_table=(), **settings: Any) -> None:
        self.clock = Clock()
        self.at_region = RecordingReporter()
        self.at_rack = RecordingReporter()
        settings.setdefault("interval", 0)
        self.region, self.rack, self.pump = linked(
            dict(region_table),
            dict(rack_table),
            self.clock,
            region_reporter=self.at_region,
            rack_reporter=self.at_rack,
            **settings,
        )

    def call(self, link, command, **arguments: Any) -> Any:
        """The answer, after the wires have been pumped."""
        called = run(link.call(command, **arguments))
        caught: list[Any] = []
        called.addBoth(caught.append)
        self.pump.flush()
        self.assertEqual(len(caught), 1, "the call has not ended")
        if hasattr(caught[0], "raiseException"):
            caught[0].raiseException()
        return caught[0]

    def assert_usable(self) -> None:
        self.assertIs(self.region.life, protocol.Life.READY)
        self.assertIs(self.rack.life, protocol.Life.READY)
        self.assertEqual(self.call(self.rack, Ping), {})


class AnsweringTests(Pair):
    def test_an_answer_comes_back(self) -> None:
        async def list_images(link, known_digest, newest_digest):
            self.assertIs(link, self.rack)
            return {**READY, "digest": known_digest}

        self.link(rack_table={ListImages: list_images})
        self.assertEqual(self.call(self.region, ListImages, known_digest="abc"), {**READY, "digest": "abc"})
        self.assertEqual(self.at_region.calls + self.at_rack.calls, [])

    def test_an_answer_of_many_times_64_kib_comes_back(self) -> None:
        manifest = bytes(range(256)) * 8192

        async def list_images(link, known_digest, newest_digest):
            return {**READY, "inventory": manifest}

        self.link(rack_table={ListImages: list_images})
        self.assertEqual(self.call(self.region, ListImages, known_digest="")["inventory"], manifest)

    def test_answers_come_in_the_order_in_which_they_are_ready(self) -> None:
        waiting: list[Deferred[bool]] = []

        async def cancel(link):
            waiting.append(Deferred())
            return {"cancelled": await waiting[-1]}

        self.link(rack_table={CancelSync: cancel})
        first, second = run(self.region.call(CancelSync)), run(self.region.call(CancelSync))
        self.pump.flush()
        waiting[1].callback(True)
        self.pump.flush()
        self.assertNoResult(first)
        self.assertEqual(self.successResultOf(second), {"cancelled": True})
        waiting[0].callback(False)
        self.pump.flush()
        self.assertEqual(self.successResultOf(first), {"cancelled": False})

    def test_a_declared_error_comes_as_itself_and_leaves_the_link_up(self) -> None:
        async def register(link, **arguments):
            raise VersionMismatch("this region speaks 2 to 3, the rack 1")

        self.link(region_table={Register: register})
        error = self.assertRaises(VersionMismatch, self.call, self.rack, Register, **REGISTER)
        self.assertEqual(error.reason, "this region speaks 2 to 3, the rack 1")
        self.assertEqual((self.at_region.kinds, self.at_rack.kinds), (["VersionMismatch"], ["VersionMismatch"]))
        self.assert_usable()

    def test_an_undeclared_error_comes_as_a_reference_and_leaves_the_link_up(self) -> None:
        async def register(link, **arguments):
            raise ZeroDivisionError("secret detail")

        self.link(region_table={Register: register})
        error = self.assertRaises(Unhandled, self.call, self.rack, Register, **REGISTER)
        self.assertIn(error.reference, str(error))
        self.assertIn("ZeroDivisionError", str(error))
        self.assertNotIn("secret detail", str(error))
        [reported] = self.at_region.calls
        self.assertEqual(reported.reference, error.reference)
        self.assertEqual(reported.text, "ZeroDivisionError: secret detail")
        self.assertIn("register", reported.failure.getTraceback() if reported.failure else "")
        self.assert_usable()

    def test_an_undeclared_error_tells_a_stranger_nothing_but_a_reference(self) -> None:
        async def enroll(link, **arguments):
            raise KeyError("no such token")

        self.link(region_table={Enroll: enroll}, rack=ANONYMOUS)
        error = self.assertRaises(Unhandled, self.call, self.rack, Enroll, token_id="a", proof=b"", csr=b"", name="n")
        self.assertNotIn("KeyError", str(error))
        self.assertIn(error.reference, str(error))

    def test_an_answer_that_does_not_fit_the_command_is_an_internal_error_of_its_responder(self) -> None:
        for answer in ({}, {**READY, "generation": "3"}, {**READY, "more": 1}, None, {**READY, "state": "x" * 70000}):

            async def list_images(link, known_digest, newest_digest, answer=answer):
                return answer

            self.link(rack_table={ListImages: list_images})
            self.assertRaises(Unhandled, self.call, self.region, ListImages, known_digest="")
            self.assertEqual((self.at_rack.kinds, self.at_region.kinds), (["Unhandled"], ["Unhandled"]))
            self.assert_usable()

    def test_a_responder_that_is_no_coroutine_is_an_internal_error(self) -> None:
        self.link(rack_table={ListImages: lambda link, **_: READY})
        self.assertRaises(Unhandled, self.call, self.region, ListImages, known_digest="")
        self.assert_usable()

    def test_a_cancelled_responder_is_an_internal_error_and_not_silence(self) -> None:
        async def list_images(link, known_digest, newest_digest):
            raise CancelledError()

        self.link(rack_table={ListImages: list_images})
        self.assertRaises(Unhandled, self.call, self.region, ListImages, known_digest="")

    def test_a_responder_may_say_that_something_is_not_allowed(self) -> None:
        async def report(link, **arguments):
            raise NotAllowed("register first")

        self.link(region_table={ReportInventory: report})
        error = self.assertRaises(
            NotAllowed, self.call, self.rack, ReportInventory, generation=1, digest="", state="ready", progress={}
        )
        self.assertEqual(str(error), "register first")

    def test_a_command_that_is_not_served_is_unknown(self) -> None:
        self.link()
        self.assertRaises(UnknownCommand, self.call, self.region, ListImages, known_digest="")
        self.assertEqual((self.at_rack.kinds, self.at_region.kinds), (["UnknownCommand"], ["UnknownCommand"]))
        self.assert_usable()

    def test_a_very_long_error_is_cut_and_not_lost(self) -> None:
        async def register(link, **arguments):
            raise VersionMismatch("x" * 100_000 + "\ud800")

        self.link(region_table={Register: register})
        error = self.assertRaises(VersionMismatch, self.call, self.rack, Register, **REGISTER)
        self.assertEqual(error.reason, "x" * 4096)

    def test_an_answer_that_is_ready_when_the_link_is_gone_is_reported_once(self) -> None:
        waiting: Deferred[None] = Deferred()

        async def cancel(link):
            await waiting
            return {"cancelled": True}

        self.link(rack_table={CancelSync: cancel})
        outcome = run(self.region.ask(CancelSync))
        self.pump.flush()
        self.region.abort("testing")
        self.pump.flush()
        waiting.callback(None)
        self.assertIsInstance(self.successResultOf(outcome), NotConnected)
        self.assertEqual((self.at_rack.kinds, self.at_region.kinds), (["LinkLost"], ["LinkLost"]))


class CallingTests(Pair):
    def test_arguments_that_do_not_fit_are_not_sent(self) -> None:
        self.link()
        for arguments in ({}, {"known_digest": 1}, {"known_digest": "", "more": 1}, {"known_digest": "x" * 70000}):
            self.at_region.calls.clear()
            error = self.assertRaises(ArgumentsInvalid, self.call, self.region, ListImages, **arguments)
            self.assertTrue(str(error).startswith("ListImages cannot be called so: "))
            self.assertEqual(self.at_region.kinds, ["ArgumentsInvalid"])
        self.assertEqual(self.at_rack.calls, [])

    def test_no_answer_within_the_deadline_is_a_time_out_and_leaves_the_link_up(self) -> None:
        waiting: Deferred[None] = Deferred()

        async def cancel(link):
            await waiting
            return {"cancelled": True}

        self.link(rack_table={CancelSync: cancel})
        called = run(self.region.call(CancelSync, deadline=2.0))
        self.pump.flush()
        self.clock.advance(1.9)
        self.assertNoResult(called)
        self.clock.advance(0.2)
        self.assertEqual(self.failureResultOf(called, CallTimedOut).value.seconds, 2.0)
        self.assertEqual(self.at_region.kinds, ["CallTimedOut"])
        waiting.callback(None)  # the late answer arrives, and is of no consequence
        self.pump.flush()
        self.assertEqual(self.at_region.kinds + self.at_rack.kinds, ["CallTimedOut"])
        self.assert_usable()

    def test_each_command_has_its_own_deadline(self) -> None:
        async def never(link, **arguments):
            await Deferred()

        self.link(rack_table={CancelSync: never, SyncImages: never})
        short = run(self.region.ask(CancelSync))
        long = run(self.region.ask(SyncImages, generation=1, digest="", url=""))
        self.pump.flush()
        self.clock.advance(CancelSync.deadline)
        self.assertEqual(self.successResultOf(short), TimedOut(30.0))
        self.assertNoResult(long)
        self.clock.advance(6 * 3600)
        self.assertEqual(self.successResultOf(long), TimedOut(6 * 3600.0))

    def test_an_answered_call_leaves_no_timer_behind(self) -> None:
        async def cancel(link):
            return {"cancelled": True}

        self.link(rack_table={CancelSync: cancel})
        self.call(self.region, CancelSync)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_a_lost_link_ends_every_call_under_way(self) -> None:
        async def never(link):
            await Deferred()

        self.link(rack_table={CancelSync: never})
        first, second = run(self.region.call(CancelSync)), run(self.region.ask(CancelSync))
        self.pump.flush()
        self.clock.advance(5)
        self.rack.abort("power cut")
        self.pump.flush()
        self.failureResultOf(first, LinkLost)
        self.assertEqual(self.successResultOf(second), NotConnected(5.0))
        self.assertEqual(self.at_region.kinds, ["LinkLost", "LinkLost"])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_a_call_on_a_link_that_is_gone_or_going_fails_at_once(self) -> None:
        self.link()
        self.region.close("testing")
        self.failureResultOf(run(self.region.call(CancelSync)), LinkLost)
        self.clock.advance(7)
        self.pump.flush()
        self.assertIs(self.region.life, protocol.Life.LOST)
        self.assertEqual(self.successResultOf(run(self.region.ask(CancelSync))), NotConnected(7.0))
        self.assertEqual(self.at_region.kinds, ["LinkLost", "LinkLost"])

    def test_a_cancelled_call_is_forgotten_and_its_answer_is_ignored(self) -> None:
        waiting: Deferred[None] = Deferred()

        async def cancel(link):
            await waiting
            return {"cancelled": True}

        self.link(rack_table={CancelSync: cancel})
        called = run(self.region.call(CancelSync))
        self.pump.flush()
        called.cancel()
        self.failureResultOf(called, CancelledError)
        self.assertEqual(self.clock.getDelayedCalls(), [])
        waiting.callback(None)
        self.pump.flush()
        self.assertEqual(self.at_region.calls + self.at_rack.calls, [])
        self.assert_usable()

    def test_asking_gives_an_outcome_for_every_end(self) -> None:
        async def fails(link, **arguments):
            raise OSError("disk")

        async def answers(link):
            return {"cancelled": True}

        self.link(rack_table={CancelSync: answers, SyncProgress: fails})
        answered, failed = run(self.region.ask(CancelSync)), run(self.region.ask(SyncProgress))
        invalid = run(self.region.ask(SyncProgress, more=1))
        self.clock.advance(0.5)
        self.pump.flush()
        self.assertEqual(self.successResultOf(answered), Answered({"cancelled": True}, 0.5))
        outcome = self.successResultOf(failed)
        self.assertIsInstance(outcome, Failed)
        self.assertEqual((outcome.kind, outcome.seconds), ("Unhandled", 0.5))
        self.assertEqual(self.successResultOf(invalid).kind, "ArgumentsInvalid")

    def test_amps_own_call_is_refused(self) -> None:
        self.link()
        self.assertRaises(TypeError, self.region.callRemote, Ping)


class StockAmpTests(SynchronousTestCase):
    """The wire is AMP's: a peer written with nothing but Twisted's AMP gets on with a link."""

    def connect(self, other, table) -> None:
        self.clock = Clock()
        self.reports = RecordingReporter()
        self.link = Link(Responders("region", table), clock=self.clock, peer=RACK, interval=0, reporter=self.reports)
        self.pump = connect(
            self.link, FakeTransport(self.link, True), other, FakeTransport(other, False), clock=self.clock
        )

    def outcome(self, deferred) -> Any:
        caught: list[Any] = []
        deferred.addBoth(caught.append)
        self.pump.flush()
        return caught[0]

    def test_a_stock_client_is_answered(self) -> None:
        async def register(link, versions, name, **more):
            return {"version": max(versions), "region": name, "stream_urls": None}

        client = amp.AMP()
        self.connect(client, {Register: register})
        answer = self.outcome(client.callRemote(Register, **REGISTER))
        self.assertEqual(answer, {"version": 1, "region": "rack", "stream_urls": None, "spread": None})

    def test_a_stock_client_gets_errors_that_it_knows(self) -> None:
        async def register(link, **arguments):
            raise VersionMismatch("no")

        async def report(link, **arguments):
            raise KeyError("oops")

        client = amp.AMP()
        self.connect(client, {Register: register, ReportInventory: report})
        self.assertEqual(self.outcome(client.callRemote(Register, **REGISTER)).type, VersionMismatch)
        report_call = client.callRemote(ReportInventory, generation=1, digest="", state="", progress={})
        self.assertEqual(self.outcome(report_call).type, amp.UnknownRemoteError)

        class Newer(amp.Command):
            """A command of a later version."""

        self.assertEqual(self.outcome(client.callRemote(Newer)).type, amp.UnhandledCommand)
        self.assertEqual(self.outcome(client.callRemote(Ping)), {})

    def test_a_stock_server_is_called(self) -> None:
        class Server(amp.AMP):
            @CancelSync.responder
            def cancel(self):
                return {"cancelled": True}

        self.connect(Server(), {})
        self.assertEqual(self.outcome(run(self.link.call(CancelSync))), {"cancelled": True})
        error = self.outcome(run(self.link.call(SyncProgress))).value
        self.assertIsInstance(error, UnknownCommand)


class NonsenseTests(SynchronousTestCase):
    """What a peer may send that is not in the protocol."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.reports = RecordingReporter()
        self.link = Link(Responders("region", {}), clock=self.clock, peer=RACK, interval=0, reporter=self.reports)
        self.transport = FakeTransport(self.link, True)
        self.link.makeConnection(self.transport)
        self.before = self.cuts()

    def cuts(self) -> float:
        """How many links were cut because their peers sent nonsense."""
        samples = [sample for family in CUTS.collect() for sample in family.samples]
        return sum(each.value for each in samples if each.labels.get("reason") == "malformed" and "_total" in each.name)

    def send(self, **box: bytes) -> None:
        self.link.dataReceived(pairs((key.encode(), value) for key, value in box.items()) + END)

    def answered(self) -> dict[bytes, bytes]:
        [box] = amp.parseString(self.transport.getOutBuffer())
        return dict(box)

    def test_an_answer_that_cannot_be_read_fails_its_call_only(self) -> None:
        called = run(self.link.call(CancelSync))
        self.send(_answer=b"1", cancelled=b"perhaps")
        error = self.failureResultOf(called, AnswerMalformed).value
        self.assertEqual(str(error), "the answer cannot be read: cancelled: b'perhaps' is neither True nor False")
        self.assertIs(self.link.life, protocol.Life.READY)

    def test_an_error_that_nobody_declared_is_shown_with_its_code(self) -> None:
        called = run(self.link.call(CancelSync))
        self.send(_error=b"1", _error_code=b"TEAPOT", _error_description=b"short \xff stout")
        error = self.failureResultOf(called, UndeclaredError).value
        self.assertEqual(str(error), "TEAPOT: short \ufffd stout")

    def test_an_error_of_another_command_does_not_pass_for_one_of_this(self) -> None:
        called = run(self.link.call(CancelSync))
        self.send(_error=b"1", _error_code=b"VERSION_MISMATCH", _error_description=b"no")
        self.failureResultOf(called, UndeclaredError)

    def test_an_error_box_without_text_or_code_still_ends_the_call(self) -> None:
        called = run(self.link.call(CancelSync))
        self.send(_error=b"1")
        self.failureResultOf(called, UndeclaredError)

    def test_arguments_that_cannot_be_read_are_refused_by_name(self) -> None:
        async def register(link, **arguments):
            self.fail("called")

        self.link.responders = Responders("region", {Register: register})
        self.send(_ask=b"7", _command=b"Register", name=b"x", software=b"y", versions=b"junk")
        box = self.answered()
        self.assertEqual((box[b"_error"], box[b"_error_code"]), (b"7", b"ARGUMENTS_REFUSED"))
        self.assertIn(b"versions: its compressed data is damaged", box[b"_error_description"])
        self.assertEqual(self.reports.kinds, ["ArgumentsRefused"])
        self.assertEqual(ArgumentsRefused.code, b"ARGUMENTS_REFUSED")

    def test_a_second_answer_to_a_call_is_ignored(self) -> None:
        called = run(self.link.call(CancelSync))
        self.send(_answer=b"1", cancelled=b"True")
        self.send(_answer=b"1", cancelled=b"False")
        self.assertEqual(self.successResultOf(called), {"cancelled": True})
        self.assertIs(self.link.life, protocol.Life.READY)

    def cut(self, text) -> None:
        self.assertEqual(self.cuts() - self.before, 1)
        self.assertIs(self.link.life, protocol.Life.CLOSING)
        self.assertTrue(self.transport.disconnecting)
        self.link.connectionLost()
        lost: list[str] = []
        self.link.on_lost(lambda link, reason: lost.append(reason))
        self.assertIn(text, lost[0])

    def test_an_answer_to_a_call_that_was_never_made_cuts_the_link(self) -> None:
        self.send(_answer=b"1")
        self.cut("an answer to ask b'1', which was never made")

    def test_a_box_that_is_neither_ask_nor_answer_cuts_the_link(self) -> None:
        self.send(hello=b"world")
        self.cut("neither ask, answer nor error")

    def test_an_ask_that_wants_no_answer_cuts_the_link(self) -> None:
        self.send(_command=b"Ping")
        self.cut("neither ask, answer nor error")

    def test_an_ask_with_an_endless_number_cuts_the_link(self) -> None:
        self.send(_command=b"Ping", _ask=b"1" * 33)
        self.cut("33 bytes long")

    def test_what_is_not_amp_cuts_the_link(self) -> None:
        self.link.dataReceived(b"GET / HTTP/1.1\r\n\r\n")
        self.cut("a key of")
        self.link.dataReceived(b"GET / HTTP/1.1\r\n\r\n")  # more of it is of no consequence

    def test_starting_tls_inside_amp_is_an_unknown_command(self) -> None:
        self.send(_ask=b"1", _command=b"StartTLS")
        self.assertEqual(self.answered()[b"_error_code"], b"UNHANDLED")

    def test_a_stranger_cannot_make_the_region_hold_much(self) -> None:
        self.link = Link(Responders("region", {}), clock=self.clock, peer=ANONYMOUS, reporter=self.reports)
        self.transport = FakeTransport(self.link, True)
        self.link.makeConnection(self.transport)
        pair = pairs([(b"k", b"x" * 65535)])
        for _ in range(MAX_ANONYMOUS_BOX // 65535 + 1):
            self.link.dataReceived(pair)
        self.cut(f"a box of more than {MAX_ANONYMOUS_BOX} bytes")


SAMPLES = st.sampled_from(
    [b"", b"1", b"2", b"9", b"zz", b"True", b"Ping", b"Register", b"UNKNOWN", b"VERSION_MISMATCH"]
)
KEYS = st.sampled_from(
    [b"_ask", b"_answer", b"_error", b"_error_code", b"_error_description", b"_command", b"cancelled"]
)


class AnythingTests(SynchronousTestCase):
    """Whatever a peer sends, in whatever order."""

    @settings(deadline=None)
    @given(st.lists(st.dictionaries(KEYS, SAMPLES, min_size=1, max_size=4), max_size=12), st.binary(max_size=20))
    def test_every_call_ends_exactly_once_and_every_failure_is_reported_once(self, boxes, garbage) -> None:
        reports = RecordingReporter()
        clock = Clock()
        link = Link(Responders("region", {}), clock=clock, peer=RACK, interval=0, reporter=reports)
        transport = FakeTransport(link, True)
        link.makeConnection(transport)
        ended: list[object] = []
        for _ in range(3):
            run(link.call(CancelSync)).addBoth(ended.append)
        for box in boxes:
            link.dataReceived(pairs(box.items()) + END)
        link.dataReceived(garbage)
        clock.advance(CancelSync.deadline)
        link.connectionLost()
        self.assertEqual(len(ended), 3)
        failed = [end for end in ended if not isinstance(end, dict)]
        self.assertEqual(len([call for call in reports.calls if call.direction == "out"]), len(failed))
        asked = [box for box in amp.parseString(transport.getOutBuffer() or b"") if b"_error" in box]
        self.assertEqual(len([call for call in reports.calls if call.direction == "in"]), len(asked))
        self.assertEqual(clock.getDelayedCalls(), [])


class MemoryTests(Pair):
    def test_a_link_has_no_table_of_names_of_its_own(self) -> None:
        # As it would have with more than 30 attributes that are not in slots: over a kilobyte for each link.
        self.link()
        known = {*vars(amp.AMP()), "transport"}
        self.assertEqual(set(vars(self.region)) - known, set())
        self.assertLess(len(known), 30)


class PingTests(Pair):
    def test_each_end_pings_the_other(self) -> None:
        self.link(interval=10.0, patience=5.0)
        for _ in range(100):
            self.clock.advance(1)
            self.pump.flush()
        self.assertEqual((self.region.asks.made, self.rack.asks.made), (10, 10))
        self.assert_usable()
        self.assertEqual(self.at_region.calls + self.at_rack.calls, [])

    def test_a_peer_that_does_not_answer_a_ping_is_cut_off_and_reported_once(self) -> None:
        self.link(interval=10.0, patience=5.0)
        before = CUTS.labels("rack", "silent")._value.get()
        lost: list[str] = []
        self.region.on_lost(lambda link, reason: lost.append(reason))
        self.clock.advance(10)
        self.clock.advance(4.9)
        self.assertIs(self.region.life, protocol.Life.READY)
        self.clock.advance(0.2)
        self.pump.flush()
        self.assertEqual(lost, ["no answer to a ping within 5 s"])
        self.assertEqual(CUTS.labels("rack", "silent")._value.get(), before + 1)
        self.assertEqual(self.at_region.kinds, ["CallTimedOut"])
        self.assertEqual(self.at_region.calls[0].command, "Ping")

    def test_a_responder_that_takes_hours_does_not_hold_up_pings(self) -> None:
        async def sync(link, **arguments):
            await Deferred()

        self.link(rack_table={SyncImages: sync}, interval=10.0)
        asked = run(self.region.ask(SyncImages, generation=1, digest="", url=""))
        for _ in range(600):
            self.clock.advance(1)
            self.pump.flush()
        self.assertNoResult(asked)
        self.assert_usable()

    def test_no_timer_is_left_when_a_link_ends(self) -> None:
        self.link(interval=10.0)
        self.clock.advance(10)
        self.region.abort("testing")
        self.pump.flush()
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_a_stranger_may_not_stay(self) -> None:
        self.link(rack=ANONYMOUS)
        self.clock.advance(protocol.ANONYMOUS_SECONDS)
        self.pump.flush()
        self.assertIs(self.region.life, protocol.Life.LOST)


class LifeTests(Pair):
    def test_who_waits_for_the_end_is_told_once_with_the_reason(self) -> None:
        self.link()
        told: list[object] = []
        self.region.on_lost(lambda link, reason: told.append((link, reason)))
        self.region.close("testing")
        self.pump.flush()
        self.region.on_lost(lambda link, reason: told.append(reason))
        self.assertEqual(told, [(self.region, "testing"), "testing"])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_one_who_fails_when_told_does_not_keep_it_from_the_others(self) -> None:
        self.link()
        told: list[str] = []

        def fail(link, reason):
            raise RuntimeError("broken")

        self.region.on_lost(fail)
        self.region.on_lost(lambda link, reason: told.append(reason))
        self.region.abort("testing")
        self.pump.flush()
        self.assertEqual(told, ["testing"])
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)

    def test_a_link_is_ready_for_who_waits_before_and_after(self) -> None:
        self.link()
        self.assertIs(self.successResultOf(self.region.when_ready()), self.region)
        self.region.abort("testing")
        self.pump.flush()
        self.failureResultOf(self.region.when_ready(), LinkLost)

    def test_a_connection_without_tls_never_becomes_a_link(self) -> None:
        clock = Clock()
        link = Link(Responders("region", {}), clock=clock, reporter=RecordingReporter())
        transport = FakeTransport(link, True)
        link.makeConnection(transport)
        ready = link.when_ready()
        link.dataReceived(pairs([(b"_ask", b"1"), (b"_command", b"Ping")]) + END)
        self.assertIsNone(transport.getOutBuffer() or None)
        self.successResultOf(run(link.ask(CancelSync)))
        link.handshakeCompleted()
        self.assertTrue(transport.disconnecting)
        link.connectionLost()
        self.assertIn("the link is not TLS", str(self.failureResultOf(ready, LinkLost).value))
        self.assertEqual(clock.getDelayedCalls(), [])

    def test_a_handshake_that_never_ends_is_cut(self) -> None:
        clock = Clock()
        link = Link(Responders("region", {}), clock=clock)
        transport = FakeTransport(link, True)
        link.makeConnection(transport)
        clock.advance(protocol.HANDSHAKE_SECONDS)
        self.assertTrue(transport.disconnecting)

    def test_an_orderly_end_that_takes_too_long_is_cut(self) -> None:
        self.link()
        aborted: list[bool] = []
        transport = self.region.transport
        self.patch(transport, "abortConnection", lambda: aborted.append(True))
        self.region.close("testing")
        self.clock.advance(1.9)
        self.assertEqual(aborted, [])
        self.clock.advance(0.2)
        self.assertEqual(aborted, [True])


class PeerTests(SynchronousTestCase):
    def test_a_peer_reads_well(self) -> None:
        self.assertEqual(
            [str(peer) for peer in (REGION, RACK, ANONYMOUS)],
            ["region at 192.0.2.1:5250", "rack abc234 at 192.0.2.2:40000", "anonymous at 192.0.2.3:40000"],
        )
