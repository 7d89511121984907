"""What the region answers to racks."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from region.authority import EnrolledRack, TokenRefused
from region.database import DatabaseUnavailable
from region.events import NotEnrolled
from region.processes import Connection
from region.racks import RackInUse, RackRefused
from region.wire import RegionWire
from rpc.commands import (
    AlreadyLinked,
    Endpoints,
    EnrolmentRefused,
    EventsRefused,
    Register,
    RegistrationRefused,
    RenewalRefused,
    RenewSoon,
    ReportInventory,
    ReportRefused,
    VersionMismatch,
)
from rpc.events import MAX_BATCH, Event
from rpc.failures import Unavailable
from rpc.protocol import NotAllowed, Peer
from rpc.testing import RecordingReporter, linked
from tests.logs import Logs

DIGEST = "d" * 64
TOKEN = "0123456789abcdef"
SHA256 = "c" * 64


class FakeLink:
    peer = Peer("rack", "aaaaaa", "192.0.2.1:4", SHA256)

    def __init__(self) -> None:
        self.lost: list[Any] = []
        self.asked: list[Any] = []

    async def ask(self, command: Any, **arguments: Any) -> None:
        self.asked.append((command, arguments))

    def channel_binding(self) -> bytes:
        return b"binding"

    def on_lost(self, callback: Any) -> None:
        self.lost.append(callback)


class FakeRack:
    system_id = "aaaaaa"
    name = "one"


class Fakes:
    """The authority, the registry and the syncs in one; each notes what it is asked."""

    def __init__(self) -> None:
        self.issued = self
        self.keys = self
        self.authorities = ["f" * 64]
        self.behind: list[Any] = []
        self.link: Any = None
        self.calls: list[tuple[Any, ...]] = []
        self.refuses: Exception | None = None
        self.away = False
        self.is_enrolled = True
        self.other: tuple[str, Connection] | None = None

    def _call(self, *call: Any) -> None:
        self.calls.append(call)
        if self.refuses is not None:
            raise self.refuses

    async def enrol(self, *arguments: Any) -> EnrolledRack:
        self._call("enrol", *arguments)
        return EnrolledRack(b"certificate", b"ca", "aaaaaa")

    async def admit(self, system_id: str, sha256: str) -> None:
        self._call("admit", system_id, sha256)

    async def renew(self, *arguments: Any) -> EnrolledRack:
        self._call("renew", *arguments)
        return EnrolledRack(b"certificate", b"ca", "aaaaaa")

    async def stored(self, system_id: str, sha256: str) -> bool:
        self._call("stored", system_id, sha256)
        return sha256 == SHA256

    async def not_told(self, authorities: list[str], system_id: str | None) -> list[Any]:
        assert authorities == self.authorities
        return self.behind

    def link_of(self, system_id: str) -> Any:
        return self.link

    async def refresh(self) -> None:
        self._call("refresh")
        if self.away:
            raise DatabaseUnavailable("no route to the server")

    def enrolled(self) -> dict[str, object]:
        return {"aaaaaa": None} if self.is_enrolled else {}

    spread = 20
    id = "p1"

    def endpoints(self) -> dict[str, list[str]]:
        return {"p1": ["*:5250"], "p2": []}

    async def elsewhere(self, system_id: str, instance: str) -> Connection | None:
        return None if self.other is None or self.other[0] == instance else self.other[1]

    async def register(self, link: Any, version: str, instance: str, attempt: int) -> FakeRack:
        self._call("register", link.peer.id, version, instance, attempt)
        return FakeRack()

    async def report(self, *arguments: Any) -> None:
        self._call("report", *arguments)

    async def store(self, rack: str, events: Any) -> list[str]:
        self._call("store", rack, events)
        return [event.id for event in events]

    async def lost(self, link: Any) -> None:
        self._call("lost", link.peer.id)

    def consider(self, system_id: str) -> bool:
        self._call("consider", system_id)
        return True


class WireTests(SynchronousTestCase):
    def setUp(self) -> None:
        fakes: Any = Fakes()
        self.fakes: Fakes = fakes
        self.refused: list[tuple[str, Any]] = []
        self.wire = RegionWire(
            fakes, fakes, fakes, fakes, fakes, "region", ["http://r/s"],
            lambda rack, files: self.refused.append((rack, files)),
        )  # fmt: skip
        self.link: Any = FakeLink()

    def result(self, coroutine: Any) -> Any:
        return self.successResultOf(Deferred.fromCoroutine(coroutine))

    def failure(self, coroutine: Any, kind: type[Exception]) -> str:
        return str(self.failureResultOf(Deferred.fromCoroutine(coroutine), kind).value)

    def register(self, versions: Any) -> Any:
        return self.wire.register(self.link, versions, "one", "0.1")

    def report(self, generation: int = 3, digest: str = DIGEST, state: str = "ready", progress: Any = None) -> Any:
        return self.wire.report_inventory(self.link, generation, digest, state, {} if progress is None else progress)

    def test_files_that_a_rack_got_with_wrong_bytes_are_looked_at_and_nonsense_is_refused(self) -> None:
        for refused in (["x"], "x" * 64, [DIGEST] * 65, {"a": 1}):
            report = self.wire.report_inventory(self.link, 3, DIGEST, "failed", {}, refused)
            self.assertIn("refused must be a list", self.failure(report, ReportRefused))
        self.assertEqual(self.refused, [])
        self.result(self.wire.report_inventory(self.link, 3, DIGEST, "failed", {}, [DIGEST]))
        self.assertEqual(self.refused, [("aaaaaa", [DIGEST])])

    def test_enrolling_gives_the_certificate_after_everyone_can_see_the_rack(self) -> None:
        answer = self.result(self.wire.enroll(self.link, TOKEN, b"p", b"csr", "one"))
        self.assertEqual(answer, {"certificate": b"certificate", "ca": b"ca", "system_id": "aaaaaa"})
        self.assertEqual(self.fakes.calls, [("enrol", b"binding", TOKEN, b"p", b"csr", "one"), ("refresh",)])

    def test_a_rack_that_is_enrolled_gets_its_certificate_also_when_the_database_fails_then(self) -> None:
        self.fakes.away = True
        answer = self.result(self.wire.enroll(self.link, TOKEN, b"p", b"csr", "one"))
        self.assertEqual(answer["system_id"], "aaaaaa")

    def test_a_refusal_to_enrol_is_one_event_in_the_log(self) -> None:
        self.fakes.refuses = TokenRefused("expired")
        logs = Logs(self)
        self.failure(self.wire.enroll(self.link, TOKEN, b"p", b"csr", "one"), EnrolmentRefused)
        self.assertEqual(logs.texts, [])  # the link, which is not here, reports the call

    def test_a_refusal_to_enrol_tells_the_rack_why(self) -> None:
        for refusal in (TokenRefused("expired"), RackRefused("taken")):
            self.fakes.refuses = refusal
            why = self.failure(self.wire.enroll(self.link, TOKEN, b"p", b"csr", "one"), EnrolmentRefused)
            self.assertEqual(why, f"one cannot join: {refusal}")

    def test_a_name_that_is_none_is_refused(self) -> None:
        for name in ("", "-a", "a/b", "a b", "a\n", "x" * 65, "ü"):
            why = self.failure(self.wire.enroll(self.link, TOKEN, b"p", b"csr", name), EnrolmentRefused)
            self.assertIn("cannot be a rack's name", why)
        self.assertEqual(self.fakes.calls, [])

    def test_what_is_no_token_s_id_never_reaches_the_database(self) -> None:
        for token in ("", "\0" * 16, "0123456789ABCDEF", TOKEN + "0", "x" * 60000):
            why = self.failure(self.wire.enroll(self.link, token, b"p", b"csr", "one"), EnrolmentRefused)
            self.assertIn("no join token's id", why)
        self.assertEqual(self.fakes.calls, [])

    def test_registering_agrees_on_a_version_and_watches_the_link(self) -> None:
        answer = self.result(self.register([1, 2]))
        self.assertEqual(answer, {"version": 1, "region": "region", "stream_urls": ["http://r/s"], "spread": 20})
        Register.answer_schema.dump(answer)
        [callback] = self.link.lost
        callback(self.link, "gone")
        self.assertEqual(
            self.fakes.calls, [("admit", "aaaaaa", SHA256), ("register", "aaaaaa", "0.1", "", 0), ("lost", "aaaaaa")]
        )
        self.assertEqual(self.link.asked, [])

    def test_a_rack_whose_other_link_is_alive_is_told(self) -> None:
        self.fakes.refuses = RackInUse("linked already")
        self.assertEqual(self.failure(self.register([1]), AlreadyLinked), "linked already")

    def test_a_copy_of_a_rack_is_refused_that_comes_to_another_process_than_the_rack_is_linked_with(self) -> None:
        other = Connection("p2", "second", "host-2", datetime(2026, 11, 30, tzinfo=UTC), "192.0.2.9:4")
        self.fakes.other = ("the first", other)
        why = self.failure(self.wire.register(self.link, [1], "one", "0.1", "a copy", 1), AlreadyLinked)
        for part in ("192.0.2.9:4", "192.0.2.1:4", "second on host-2", "two machines"):
            self.assertIn(part, why)
        self.failure(self.wire.register(self.link, [1], "one", "0.1"), AlreadyLinked)  # nor one that does not say
        self.assertEqual([call[0] for call in self.fakes.calls], ["admit", "admit"])
        self.result(self.wire.register(self.link, [1], "one", "0.1", "the first", 1))

    def test_a_rack_that_does_not_know_the_authorities_is_asked_to_renew(self) -> None:
        self.fakes.link, self.fakes.behind = self.link, [FakeRack()]
        self.result(self.register([1]))
        [(command, arguments)] = self.link.asked
        self.assertIs(command, RenewSoon)
        self.assertIn("authority was changed", arguments["reason"])

    def test_a_rack_renews_over_its_registered_link_only(self) -> None:
        self.assertIn("register first", self.failure(self.wire.renew(self.link, b"csr"), RenewalRefused))
        self.assertIn("register first", self.failure(self.wire.renewed(self.link, SHA256), NotAllowed))
        self.assertEqual(self.fakes.calls, [])
        self.fakes.link = self.link
        answer = self.result(self.wire.renew(self.link, b"csr"))
        self.assertEqual(answer, {"certificate": b"certificate", "ca": b"ca"})
        self.assertEqual(self.result(self.wire.renewed(self.link, SHA256)), {})
        self.assertEqual(self.fakes.calls, [("renew", "aaaaaa", b"csr"), ("stored", "aaaaaa", SHA256)])

    def test_what_was_not_issued_is_not_stored(self) -> None:
        self.fakes.link = self.link
        for sha256 in ("0" * 64, "x", "\0"):
            self.assertIn("was given no", self.failure(self.wire.renewed(self.link, sha256), NotAllowed))
        self.assertEqual(self.fakes.calls, [("stored", "aaaaaa", "0" * 64)])

    def test_a_refusal_to_renew_tells_the_rack_why(self) -> None:
        self.fakes.link, self.fakes.refuses = self.link, RackRefused("revoked")
        self.assertEqual(self.failure(self.wire.renew(self.link, b"csr"), RenewalRefused), "revoked")

    def test_which_link_is_the_later_is_the_rack_s_to_say(self) -> None:
        self.result(self.wire.register(self.link, [1], "one", "0.1", "instance", 7))
        self.assertEqual(self.fakes.calls[1:], [("register", "aaaaaa", "0.1", "instance", 7)])

    def test_a_rack_is_told_of_every_process_and_of_which_it_asks(self) -> None:
        answer = self.result(self.wire.endpoints(self.link))
        self.assertEqual(answer, {"process": "p1", "endpoints": {"p1": ["*:5250"], "p2": []}})
        Endpoints.answer_schema.dump(answer)

    def test_a_rack_that_was_revoked_is_not_told_where_the_region_is(self) -> None:
        self.fakes.is_enrolled = False
        answer = self.result(self.wire.endpoints(self.link))
        self.assertEqual(answer, {"process": "p1", "endpoints": {}})
        Endpoints.answer_schema.dump(answer)

    def test_no_common_version_says_which_side_to_upgrade(self) -> None:
        self.assertIn("upgrade the region", self.failure(self.register([2, 3]), VersionMismatch))
        self.assertIn("upgrade the rack", self.failure(self.register([0]), VersionMismatch))
        self.assertIn("upgrade the rack", self.failure(self.register("1"), VersionMismatch))
        self.assertEqual(self.fakes.calls, [])

    def test_a_rack_that_is_not_enrolled_is_told(self) -> None:
        self.fakes.refuses = RackRefused("not enrolled here")
        self.assertEqual(self.failure(self.register([1]), RegistrationRefused), "not enrolled here")

    def test_a_report_is_stored_and_then_a_sync_is_considered(self) -> None:
        self.assertEqual(self.result(self.report(progress={"a": 1})), {})
        self.assertEqual(self.fakes.calls, [("report", "aaaaaa", 3, DIGEST, "ready", {"a": 1}), ("consider", "aaaaaa")])

    def test_holding_nothing_is_stored_as_nothing(self) -> None:
        self.result(self.report(-1, "", "empty"))
        self.assertEqual(self.fakes.calls[0], ("report", "aaaaaa", None, None, "empty", {}))

    def test_while_the_database_is_away_a_rack_is_told_to_ask_later(self) -> None:
        reports = RecordingReporter()
        region, rack, pump = linked(self.wire.responders(), {}, region_reporter=reports)
        region.agreed(1)
        rack.agreed(1)
        self.fakes.refuses = DatabaseUnavailable("no route to the server")
        asking = Deferred.fromCoroutine(
            rack.call(ReportInventory, generation=3, digest=DIGEST, state="ready", progress={})
        )
        asking.addErrback(lambda failure: failure.value)
        pump.flush()
        error = self.successResultOf(asking)
        self.assertIsInstance(error, Unavailable)
        self.assertNotIn("no route", str(error))
        self.assertEqual(reports.kinds, ["Unavailable"])
        self.assertIsNone(reports.calls[0].failure)

    def test_a_rack_may_show_whatever_text_can_be_stored(self) -> None:
        progress = {"current": ["\U0001f600", "a\\u0000b", "é"], "deep": [[[[[1]]]]], "bytes": (1 << 63) - 1}
        self.result(self.report(progress=progress))
        self.assertEqual(self.fakes.calls[0][-1], progress)

    def test_what_a_rack_says_of_its_program_is_made_fit_to_be_stored_and_shown(self) -> None:
        self.result(self.wire.register(self.link, [1], "one", "1\0" + "v" * 65_000, "i" * 65_000, 2))
        [(*_, software, instance, _)] = [call for call in self.fakes.calls if call[0] == "register"]
        self.assertEqual((software[:6], len(software), len(instance)), ("1\\x00v", 64, 64))

    def test_a_report_that_is_none_is_refused_and_not_stored(self) -> None:
        deep: Any = {}
        for _ in range(900):
            deep = {"x": deep}
        for wrong in (
            {"digest": "xyz"}, {"state": "happy"}, {"progress": [1]}, {"generation": -1}, {"digest": ""},
            {"generation": 1 << 63}, {"progress": {"x": "a\0"}}, {"progress": {"x": ["\ud800"]}},
            {"progress": {"\0": 1}}, {"progress": {"x": "a\\\0"}}, {"progress": deep},
            {"progress": {"bytes": 10**400}}, {"progress": {"x": [-(10**400)]}},
        ):  # fmt: skip
            self.assertIn("not a report", self.failure(self.report(**wrong), ReportRefused))
        self.assertEqual(self.fakes.calls, [])

    def test_a_report_of_a_rack_that_is_none_any_more_is_refused_and_no_sync_considered(self) -> None:
        self.fakes.refuses = RackRefused("rack aaaaaa is not enrolled here")
        self.assertIn("not enrolled", self.failure(self.report(), ReportRefused))
        self.assertNotIn(("consider", "aaaaaa"), self.fakes.calls)

    def send(self, events: Any) -> Any:
        return self.wire.send_events(self.link, events)

    def test_events_are_stored_for_the_rack_that_the_link_names_and_their_ids_are_answered(self) -> None:
        event = Event("e" * 32, 7, "Sync ended", 20, "All well.", 1e9)
        self.assertEqual(self.result(self.send([event.document])), {"committed": [event.id]})
        self.assertEqual(self.fakes.calls, [("store", "aaaaaa", [event])])

    def test_events_that_are_none_are_refused_and_none_of_them_is_stored(self) -> None:
        good = Event("e" * 32, 7, "Sync ended", 20, "All well.", 1e9).document
        batches: tuple[Any, ...] = (
            None, {"events": []}, [good] * (MAX_BATCH + 1), [good, "x"], [good | {"id": "7"}], [good | {"level": "20"}],
            [good | {"level": 101}], [good | {"occurred": float("nan")}], [good | {"occurred": -1}],
            [good | {"type": ""}], [good | {"description": None}], [good | {"id": "e" * 32 + "-" + "9" * 19}],
        )  # fmt: skip
        for wrong in batches:
            self.assertTrue(self.failure(self.send(wrong), EventsRefused))
        self.assertEqual(self.fakes.calls, [])

    def test_the_events_of_a_rack_that_is_not_enrolled_are_not_refused_as_events_for_then_it_would_drop_them(
        self,
    ) -> None:
        self.fakes.refuses = NotEnrolled("not enrolled here")
        event = Event("e" * 32, 7, "Sync ended", 20, "All well.", 1e9)
        self.assertEqual(self.failure(self.send([event.document]), NotAllowed), "not enrolled here")
