"""How a rack renews its certificate: in time, over a live link, and so that being cut off anywhere does no harm."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from attrs import evolve
from twisted.internet.defer import Deferred, execute
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from rack import renewal as renewal_module
from rack.identity import Identity, read_identity, write_identity
from rack.renewal import (
    FIRST_PAUSE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    LOOK_SECONDS,
    MAX_REASON,
    SPREAD_SECONDS,
    Renewal,
)
from rpc.certificates import (
    CERTIFICATE_LIFE,
    create_authority,
    fingerprint,
    issue_rack,
    load_certificate,
    make_request,
    new_key,
)
from rpc.commands import Renew, RenewalRefused, Renewed, RenewSoon
from rpc.identity import client_tls
from rpc.outcomes import Answered
from rpc.protocol import Life, Link
from rpc.testing import RecordingReporter, linked
from tests.logs import Logs

NOW = datetime.now(UTC)
AUTHORITY = create_authority(NOW)
NEXT = create_authority(NOW)
T = TypeVar("T")


def in_place(function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Deferred[T]:
    """What runs in a thread, run at once."""
    return execute(function, *args, **kwargs)


def an_identity(now: datetime = NOW) -> Identity:
    key = new_key()
    certificate = issue_rack(AUTHORITY, make_request(key), "abc234", now)
    return Identity(
        "abc234", "rack-1", "region.example:5250", certificate.decode("ascii"), AUTHORITY.certificate.decode("ascii"),
        key.decode("ascii"),
    )  # fmt: skip


class RenewalTestCase(SynchronousTestCase):
    """A rack whose certificate was issued ``age`` ago, and the region's end of its link."""

    age = timedelta(0)

    def setUp(self) -> None:
        self.patch(os, "fsync", lambda descriptor: None)
        self.clock = Clock()
        self.directory = Path(self.mktemp()).absolute() / "identity"
        self.identity = an_identity(NOW - self.age)
        write_identity(self.directory, self.identity)
        self.tls = client_tls(self.identity.credentials, self.identity.authority)
        self.context = self.tls._context
        self.time = NOW
        self.authority = AUTHORITY
        self.ca = AUTHORITY.certificate
        self.system_id = "abc234"
        self.issued_at = NOW
        self.refuse: Exception | None = None
        self.late: Deferred[None] | None = None
        self.requests: list[bytes] = []
        self.issued: list[bytes] = []
        self.stored: list[str] = []
        self.restart()

    def restart(self) -> None:
        """The rack begins with what it has on disk."""
        self.renewal = Renewal(
            read_identity(self.directory), self.directory, self.clock, lambda: self.time, in_place, lambda: 0.0
        )
        self.renewal.follow(self.tls)
        self.renewal.start()
        renewal = self.renewal
        self.addCleanup(lambda: Deferred.fromCoroutine(renewal.stop()))

    def connect(self) -> Link:
        self.reporter = RecordingReporter()
        self.region_end, rack_end, self.pump = linked(
            {Renew: self.renew, Renewed: self.renewed}, {RenewSoon: self.renewal.renew_soon}, self.clock, interval=0,
            rack_reporter=self.reporter,
        )  # fmt: skip
        self.renewal.linked(rack_end)
        self.pump.flush()
        return rack_end

    async def renew(self, link: Link, csr: bytes) -> Mapping[str, Any]:
        self.requests.append(csr)
        if self.late is not None:
            await self.late
        if self.refuse is not None:
            raise self.refuse
        self.issued.append(issue_rack(self.authority, csr, self.system_id, self.issued_at))
        return {"certificate": self.issued[-1], "ca": self.ca}

    async def renewed(self, link: Link, certificate: str) -> Mapping[str, Any]:
        self.stored.append(certificate)
        return {}

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.pump.flush()

    @property
    def kept(self) -> str:
        """The sha256 of the certificate on disk."""
        return fingerprint(read_identity(self.directory).credentials.certificate)

    @property
    def first(self) -> str:
        return fingerprint(self.identity.credentials.certificate)

    def assert_renewed(self) -> None:
        self.assertEqual(self.kept, fingerprint(self.issued[-1]))
        self.assertEqual(self.kept, fingerprint(self.renewal.identity.credentials.certificate))
        self.assertIsNot(self.tls._context, self.context)
        self.assertEqual((self.directory / "identity.json").stat().st_mode & 0o777, 0o600)

    def assert_not_renewed(self) -> None:
        self.assertEqual(self.kept, self.first)
        self.assertEqual(self.renewal.identity, self.identity)
        self.assertIs(self.tls._context, self.context)


class FreshTests(RenewalTestCase):
    def test_a_certificate_that_has_long_to_go_is_not_renewed(self) -> None:
        self.connect()
        self.advance(LOOK_SECONDS)
        self.assertEqual(self.requests, [])

    def test_it_is_renewed_when_a_quarter_of_its_life_is_left(self) -> None:
        self.connect()
        self.time = NOW + CERTIFICATE_LIFE * 0.74
        self.advance(LOOK_SECONDS)
        self.assertEqual(self.requests, [])
        self.time = self.issued_at = NOW + CERTIFICATE_LIFE * 0.76
        self.advance(LOOK_SECONDS)
        self.assert_renewed()
        self.assertEqual(self.stored, [self.kept])
        self.advance(10 * LOOK_SECONDS)
        self.assertEqual(len(self.requests), 1)

    def test_a_rack_whose_clock_is_far_ahead_says_so_and_does_not_renew_without_end(self) -> None:
        self.connect()
        self.time = NOW + CERTIFICATE_LIFE * 0.9
        logs = Logs(self, "rack.renewal")
        for _ in range(int(LONGEST_PAUSE_SECONDS / LOOK_SECONDS)):
            self.advance(LOOK_SECONDS)
        self.assertEqual(len(self.requests), 1)
        self.assert_renewed()
        [said] = [text for text in logs.texts if "Compare the clocks" in text]
        self.assertIn(f"the clock here says {self.time:%Y-%m-%d}", said)
        self.advance(LOOK_SECONDS)
        self.assertEqual(len(self.requests), 2)

    def test_the_region_may_ask_for_it_and_is_answered_at_once(self) -> None:
        self.renewal._jitter = lambda: 0.5
        self.connect()
        self.authority, self.ca = NEXT, AUTHORITY.certificate + NEXT.certificate
        for _ in range(2):  # from two region processes
            asking = Deferred.fromCoroutine(self.region_end.ask(RenewSoon, reason="the authority was changed"))
            self.pump.flush()
            self.assertIsInstance(self.successResultOf(asking), Answered)
        self.assertEqual(self.requests, [])
        self.advance(SPREAD_SECONDS / 2)
        self.assertEqual(len(self.requests), 1)
        self.assert_renewed()
        self.assertEqual(read_identity(self.directory).authority, self.ca)
        self.advance(10 * LOOK_SECONDS)
        self.assertEqual(len(self.requests), 1)

    def test_what_a_region_gives_as_its_reason_is_bounded(self) -> None:
        self.connect()
        asking = Deferred.fromCoroutine(self.region_end.ask(RenewSoon, reason="why\n" * 10_000))
        self.pump.flush()
        self.assertIsInstance(self.successResultOf(asking), Answered)
        self.assertLessEqual(len(self.renewal._asked), MAX_REASON)
        self.assertNotIn("\n", self.renewal._asked)


class DueTests(RenewalTestCase):
    age = CERTIFICATE_LIFE * 0.9

    def test_it_is_renewed_as_soon_as_there_is_a_link_and_the_link_stays(self) -> None:
        rack_end = self.connect()
        self.assert_renewed()
        self.assertIs(rack_end.life, Life.READY)
        self.assertEqual(self.stored, [self.kept])
        self.assertEqual(self.reporter.calls, [])

    def test_each_renewal_has_a_key_of_its_own(self) -> None:
        self.connect()
        self.assertNotEqual(self.renewal.identity.key, self.identity.key)
        issued = load_certificate(self.issued[0])
        self.assertNotEqual(issued.public_key(), load_certificate(self.identity.credentials.certificate).public_key())

    def test_what_else_the_identity_says_stays(self) -> None:
        self.connect()
        expected = evolve(
            self.identity, certificate=self.renewal.identity.certificate, ca=self.renewal.identity.ca,
            key=self.renewal.identity.key,
        )  # fmt: skip
        self.assertEqual(read_identity(self.directory), expected)

    def test_a_refusal_is_said_and_tried_again_ever_more_seldom(self) -> None:
        self.refuse = RenewalRefused("not now")
        self.connect()
        self.assert_not_renewed()
        for pause in (FIRST_PAUSE_SECONDS, 2 * FIRST_PAUSE_SECONDS, 4 * FIRST_PAUSE_SECONDS):
            before = len(self.requests)
            for _ in range(int(pause / LOOK_SECONDS)):
                self.assertEqual(len(self.requests), before)
                self.advance(LOOK_SECONDS)
            self.assertEqual(len(self.requests), before + 1)
        self.refuse = None
        self.advance(100 * LOOK_SECONDS)
        self.advance(LOOK_SECONDS)
        self.assert_renewed()

    def test_after_a_failure_another_link_is_tried(self) -> None:
        self.refuse = RenewalRefused("not here")
        self.connect()
        first = self.requests
        self.requests, self.refuse = [], None
        old = self.pump
        self.connect()
        self.advance(FIRST_PAUSE_SECONDS)
        self.assertEqual((len(first), len(self.requests)), (1, 1))
        self.assert_renewed()
        old.flush()

    def test_a_link_that_is_lost_before_the_answer_leaves_the_old_one_in_use(self) -> None:
        self.late = Deferred()
        rack_end = self.connect()
        rack_end.abort("the cable was pulled")
        self.pump.flush()
        self.late.callback(None)
        self.assert_not_renewed()
        self.late = None
        self.connect()
        self.advance(FIRST_PAUSE_SECONDS)
        self.assert_renewed()

    def test_an_answer_that_comes_too_late_is_not_used(self) -> None:
        self.late = Deferred()
        self.connect()
        self.advance(Renew.deadline)
        late, self.late = self.late, None
        late.callback(None)
        self.pump.flush()
        self.assert_not_renewed()
        self.advance(LOOK_SECONDS)
        self.advance(LOOK_SECONDS)
        self.assertEqual(len(self.issued), 2)
        self.assert_renewed()

    def test_what_is_no_certificate_for_this_rack_is_not_used(self) -> None:
        for name, value, said in (
            ("system_id", "xyz789", "not for abc234"),
            ("ca", NEXT.certificate, "not signed by its authority"),
            ("ca", b"-", "cannot be read"),
            ("issued_at", NOW - CERTIFICATE_LIFE - timedelta(days=1), "compare the clocks"),
        ):
            before = getattr(self, name)
            setattr(self, name, value)
            self.connect()
            setattr(self, name, before)
            self.assert_not_renewed()
            self.assertEqual(self.stored, [], said)
            self.restart()

    def test_a_disk_that_is_full_leaves_the_old_one_in_use_and_it_is_tried_again(self) -> None:
        def full(directory: Path, identity: Identity) -> None:
            raise OSError(28, "No space left on device")

        self.patch(renewal_module, "write_identity", full)
        self.connect()
        self.assert_not_renewed()
        self.assertEqual(self.stored, [])
        self.patch(renewal_module, "write_identity", write_identity)
        self.advance(FIRST_PAUSE_SECONDS)
        self.assert_renewed()

    def test_a_rack_that_is_cut_off_once_it_has_stored_the_new_one_goes_on_with_it(self) -> None:
        def store_and_end(directory: Path, identity: Identity) -> None:
            write_identity(directory, identity)
            raise SystemExit

        self.patch(renewal_module, "write_identity", store_and_end)
        self.connect()
        self.flushLoggedErrors(SystemExit)
        self.assertEqual(self.kept, fingerprint(self.issued[0]))
        self.patch(renewal_module, "write_identity", write_identity)
        self.restart()
        self.connect()
        self.assertEqual(len(self.requests), 1)

    def test_if_the_region_does_not_hear_that_it_is_stored_it_is_used_all_the_same(self) -> None:
        async def deaf(link: Link, certificate: str) -> Mapping[str, Any]:
            link.abort("the region stops")
            return {}

        self.renewed = deaf  # type: ignore[method-assign]  # a region that is killed at this point
        self.connect()
        self.assert_renewed()

    def test_a_rack_that_stops_meanwhile_stops(self) -> None:
        self.late = Deferred()
        self.connect()
        self.successResultOf(Deferred.fromCoroutine(self.renewal.stop()))
        self.assert_not_renewed()

    def test_the_file_never_has_half_an_identity(self) -> None:
        seen: list[str] = []

        def watched(directory: Path, identity: Identity) -> Path:
            seen.append(json.loads((directory / "identity.json").read_bytes())["key"])
            path = write_identity(directory, identity)
            seen.append(json.loads(path.read_bytes())["key"])
            return path

        self.patch(renewal_module, "write_identity", watched)
        self.connect()
        self.assertEqual(seen, [self.identity.key, self.renewal.identity.key])
        self.assertEqual(os.listdir(self.directory), ["identity.json"])
