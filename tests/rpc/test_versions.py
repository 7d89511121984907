"""Peers of other versions get on, or are told which end to upgrade."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.protocols import amp
from twisted.test.iosim import FakeTransport, connect
from twisted.trial.unittest import SynchronousTestCase

from rpc import commands
from rpc.arguments import KIB, Integer, Json, Text
from rpc.boxes import pairs
from rpc.commands import CancelSync, Command, Register, VersionMismatch
from rpc.outcomes import Answered
from rpc.protocol import AnswerMalformed, Link, PeerTooOld, Responders, UnknownCommand
from rpc.rounds import ask_all
from rpc.testing import RACK, REGION, RecordingReporter, linked
from rpc.versions import VERSIONS, agree, spoken
from tests.examples import examples


class Newest(Command):
    """A command that came with version 2."""

    response = [(b"how", Text())]
    called_by = frozenset({"region"})
    answered_by = frozenset({"rack"})
    since = 2


class Sooner(Command):
    """One that racks call, and came with version 2."""

    called_by = frozenset({"rack"})
    answered_by = frozenset({"region"})
    since = 2


async def newest(link: Link) -> dict[str, str]:
    return {"how": "well"}


async def sooner(link: Link) -> dict[str, str]:
    return {}


VERSION_1 = {
    "Ping": ("", ""),
    "Enroll": ("token_id proof csr name", "certificate ca system_id"),
    "Endpoints": ("", "process endpoints"),
    "Register": ("versions name software", "version region"),
    "Renew": ("csr", "certificate ca"),
    "Renewed": ("certificate", ""),
    "RenewSoon": ("reason", ""),
    "ReportInventory": ("generation digest state progress", ""),
    "SendEvents": ("events", "committed"),
    "ListImages": ("known_digest", "state generation digest"),
    "SyncImages": ("generation digest url", "outcome generation digest reason bytes_fetched files_fetched"),
    "SyncProgress": ("", "progress"),
    "CancelSync": ("", "cancelled"),
    "DescribeRelease": ("os release", "title system requires_license_key uses"),
    "ValidateLicenseKey": ("os release key", "outcome reason"),
}
"""Each command of version 1, with the arguments and the values of its answer that may not be left out."""


class FrozenTests(SynchronousTestCase):
    def test_what_a_peer_of_version_1_knows_and_must_be_sent_does_not_change(self) -> None:
        # A command that is not in here comes with a higher number (``since``), or such a peer would be sent it.
        found = {
            command.__name__: (_needed(command.arguments), _needed(command.response))
            for command in commands.COMMANDS
            if command.since == 1
        }
        self.assertEqual(found, VERSION_1)


def _needed(values: Any) -> str:
    return " ".join(name.decode("ascii") for name, value in values if not value.optional)


class AgreeTests(SynchronousTestCase):
    @examples(200)
    @given(st.lists(st.integers(1, 6), max_size=4), st.integers(1, 6), st.integers(0, 3))
    def test_the_highest_common_version_is_chosen_or_one_end_is_to_be_upgraded(self, offered, first, more) -> None:
        ours = range(first, first + more + 1)
        common = set(offered) & set(ours)
        if common:
            self.assertEqual(agree(offered, ours), max(common))
            return
        error = str(self.assertRaises(VersionMismatch, agree, offered, ours))
        newer = any(one > max(ours) for one in offered)
        self.assertTrue(error.endswith("upgrade the region" if newer else "upgrade the rack"), error)

    def test_what_is_no_list_of_versions_is_refused(self) -> None:
        for offered in ("1", None, {}, {"1": 1}, 1, [], ["1"], [True], [1.0], [None], [[1]]):
            self.assertRaises(VersionMismatch, agree, offered)

    def test_a_long_offer_is_not_repeated_at_length(self) -> None:
        self.assertLess(len(str(self.assertRaises(VersionMismatch, agree, ["x" * 4000]))), 250)

    def test_versions_read_well(self) -> None:
        self.assertEqual([spoken([1]), spoken([1, 2, 3])], ["1", "1 to 3"])
        self.assertEqual(VERSIONS[-1], commands.PROTOCOL_VERSION)


class Negotiating(SynchronousTestCase):
    """A region of version 2, and racks of version 1, 2 and 3; as seen from this release, one is N-1 and one N+1."""

    ours: tuple[int, ...] = (1, 2)

    def setUp(self) -> None:
        self.clock = Clock()
        self.reports = RecordingReporter()
        for each in (Newest, Sooner):
            commands.BY_NAME[each.commandName] = each
            self.addCleanup(commands.BY_NAME.pop, each.commandName)

    async def register(self, link: Link, versions: Any, name: str, software: str, **more: Any) -> dict[str, Any]:
        return {"version": agree(versions, self.ours), "region": "r", "stream_urls": None}

    def result(self, coroutine: Any) -> Any:
        called = Deferred.fromCoroutine(coroutine)
        self.pump.flush()
        return called

    def with_rack(self, offered: list[int]) -> Deferred[Any]:
        """A rack with this release's code that offers these versions."""
        self.region, self.rack, self.pump = linked(
            {Register: self.register, Sooner: sooner}, {Newest: newest}, self.clock, version=None, interval=0,
            region_reporter=self.reports,
        )  # fmt: skip
        registered: Deferred[Any] = self.result(self.rack.call(Register, versions=offered, name="n", software="s"))
        return registered

    def test_a_rack_of_the_same_version_gets_everything(self) -> None:
        self.assertEqual(self.successResultOf(self.with_rack([1, 2]))["version"], 2)
        self.assertEqual((self.region.version, self.rack.version), (2, 2))
        self.assertEqual(self.successResultOf(self.result(self.region.call(Newest))), {"how": "well"})
        self.assertEqual(self.successResultOf(self.result(self.rack.call(Sooner))), {})

    def test_a_newer_rack_gets_what_both_know(self) -> None:
        self.assertEqual(self.successResultOf(self.with_rack([1, 2, 3]))["version"], 2)
        self.assertEqual(self.successResultOf(self.result(self.region.call(Newest))), {"how": "well"})

    def test_a_rack_that_is_too_new_is_told_to_have_the_region_upgraded(self) -> None:
        error = self.failureResultOf(self.with_rack([3, 4]), VersionMismatch).value
        self.assertEqual(
            str(error),
            "this region speaks version 1 to 2 of the protocol and the rack offers [3, 4]: upgrade the region",
        )
        self.assertFalse(self.region.registered)

    def test_a_rack_that_is_too_old_is_told_to_be_upgraded(self) -> None:
        self.ours = (2, 3)
        error = self.failureResultOf(self.with_rack([1]), VersionMismatch).value
        self.assertTrue(str(error).endswith("upgrade the rack"))
        self.assertFalse(self.rack.registered)

    def test_an_older_rack_is_never_sent_what_it_does_not_know(self) -> None:
        self.assertEqual(self.successResultOf(self.with_rack([1]))["version"], 1)
        called = self.result(self.region.call(Newest))
        error = self.failureResultOf(called, PeerTooOld).value
        self.assertEqual(
            str(error), "the rack speaks version 1 of the protocol and Newest came with version 2: upgrade the rack"
        )
        outcomes = self.successResultOf(self.result(ask_all(Newest, {1: (self.region, {})})))
        self.assertEqual(outcomes[1].kind, "PeerTooOld")
        self.assertEqual(self.reports.kinds, ["PeerTooOld", "PeerTooOld"])
        self.assertEqual(self.region.asks.made, 0)

    def test_a_rack_does_not_ask_an_older_region_what_it_does_not_know(self) -> None:
        self.ours = (1,)
        self.assertEqual(self.successResultOf(self.with_rack([1, 2]))["version"], 1)
        error = self.failureResultOf(self.result(self.rack.call(Sooner)), PeerTooOld).value
        self.assertTrue(str(error).endswith("upgrade the region"))

    def test_nothing_new_is_sent_before_a_version_is_agreed_on(self) -> None:
        self.ours = ()
        self.region, self.rack, self.pump = linked({}, {Newest: newest}, self.clock, version=None, interval=0)
        self.failureResultOf(self.result(self.region.call(Newest)), PeerTooOld)

    def test_a_peer_that_asks_for_more_than_was_agreed_on_is_refused(self) -> None:
        self.successResultOf(self.with_rack([1]))
        self.rack.agreed(2)  # as a broken peer might think
        self.failureResultOf(self.result(self.rack.call(Sooner)), UnknownCommand)

    def test_a_region_that_chooses_what_was_not_offered_is_not_believed(self) -> None:
        self.ours = (1, 2, 3)
        reports = RecordingReporter()

        async def register(link: Link, **arguments: Any) -> dict[str, Any]:
            return {"version": 3, "region": "r", "stream_urls": None}

        _, self.rack, self.pump = linked(
            {Register: register}, {}, self.clock, version=None, interval=0, rack_reporter=reports
        )
        offer: dict[str, Any] = {"versions": [1, 2], "name": "n", "software": "s"}
        self.failureResultOf(self.result(self.rack.call(Register, **offer)), AnswerMalformed)
        self.assertFalse(self.rack.registered)
        self.assertEqual(reports.kinds, ["AnswerMalformed"])
        outcome = self.successResultOf(self.result(self.rack.ask(Register, **offer)))
        self.assertNotIsInstance(outcome, Answered)


class OlderRelease(amp.AMP):
    """A rack of release N-1, written with nothing of ours: it has its own table, with less in it."""

    class Register(amp.Command):
        """As it was: fewer values in the answer."""

        arguments = [(b"versions", Json(4 * KIB)), (b"name", Text()), (b"software", Text())]
        response = [(b"version", Integer()), (b"region", Text())]

    @CancelSync.responder
    def cancel(self) -> dict[str, bool]:
        """The one command that it answers."""
        return {"cancelled": True}


class OlderReleaseTests(SynchronousTestCase):
    def test_a_rack_of_the_release_before_works_with_what_it_has(self) -> None:
        older, clock, reports = OlderRelease(), Clock(), RecordingReporter()

        async def register(link: Link, versions: Any, name: str, software: str, **more: Any) -> dict[str, Any]:
            return {"version": agree(versions, (1, 2)), "region": "r", "stream_urls": ["http://r/"]}

        region = Link(
            Responders("region", {Register: register}), clock=clock, peer=RACK, interval=0, reporter=reports
        )  # fmt: skip
        pump = connect(
            region, FakeTransport(region, True), older, FakeTransport(older, False), clock=clock
        )  # fmt: skip
        registered = older.callRemote(OlderRelease.Register, versions=[1], name="n", software="0.0.9")
        pump.flush()
        self.assertEqual(self.successResultOf(registered), {"version": 1, "region": "r"})
        known = Deferred.fromCoroutine(region.call(CancelSync))
        unknown = Deferred.fromCoroutine(region.call(Newest))
        pump.flush()
        self.assertEqual(self.successResultOf(known), {"cancelled": True})
        self.failureResultOf(unknown, PeerTooOld)
        self.assertEqual(reports.kinds, ["PeerTooOld"])

    def test_a_rack_of_the_release_after_may_send_keys_that_are_not_known_here(self) -> None:
        link = Link(Responders("rack", {}), clock=Clock(), peer=REGION, interval=0, reporter=RecordingReporter())
        link.makeConnection(FakeTransport(link, False))
        called = Deferred.fromCoroutine(link.call(Register, versions=[1], name="n", software="s"))
        link.dataReceived(
            pairs([(b"_answer", b"1"), (b"version", b"1"), (b"region", b"r"), (b"colour", b"blue")]) + b"\0\0"
        )
        self.assertEqual(
            self.successResultOf(called), {"version": 1, "region": "r", "stream_urls": None, "spread": None}
        )

    def test_within_how_long_to_come_back_is_what_the_region_says_as_far_as_that_makes_sense(self) -> None:
        for said, taken in (([], 0.0), ([b"0"], 0.0), ([b"20"], 20.0), ([b"-5"], 0.0), ([b"999999"], 300.0)):
            link = Link(Responders("rack", {}), clock=Clock(), peer=REGION, interval=0, reporter=RecordingReporter())
            link.makeConnection(FakeTransport(link, False))
            called = Deferred.fromCoroutine(link.call(Register, versions=[1], name="n", software="s"))
            answer = [(b"_answer", b"1"), (b"version", b"1"), (b"region", b"r"), *((b"spread", each) for each in said)]
            link.dataReceived(pairs(answer) + b"\0\0")
            self.successResultOf(called)
            self.assertEqual(link.spread, taken)
