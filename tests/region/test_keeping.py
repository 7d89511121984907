"""How a running region follows its authority's files: new connections, new certificates, and racks that are told."""

from __future__ import annotations

import shutil
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred, execute
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from region.authority import Authority
from region.authority_files import begin_change, finish_change, load_keys
from region.keeping import CHANNEL, ENDS_SOON, LOOK_SECONDS, Keeper
from rpc.certificates import expires
from rpc.identity import server_tls
from tests.logs import Logs

NOW = datetime(2026, 11, 30, tzinfo=UTC)


class FakeDatabase:
    """What listens for the news."""

    def __init__(self) -> None:
        self.callbacks: dict[str, Any] = {}

    def listen(self, channel: str, callback: Any) -> None:
        self.callbacks[channel] = callback


class KeeperTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp()) / "authority"
        self.addCleanup(shutil.rmtree, self.directory.parent)
        self.clock = Clock()
        self.time = NOW
        database: Any = FakeDatabase()
        self.database = database
        racks: Any = None
        keys = load_keys(self.directory, "test", NOW)
        self.authority = Authority(keys, database, racks)
        self.tls = server_tls(keys.region, keys.trusted)
        self.context = self.tls._context
        self.told = 0
        self.logs = Logs(self, "region.keeping")
        self.keeper = Keeper(self.clock, lambda: self.time, self.load, self.authority, self.tls, self.tell)
        self.keeper.start(database)
        self.addCleanup(self.keeper.stop)

    def load(self, now: datetime) -> Deferred[Any]:
        return execute(load_keys, self.directory, "test", now)

    def tell(self) -> None:
        self.told += 1

    def news(self) -> None:
        self.successResultOf(self.database.callbacks[CHANNEL](""))

    def test_what_has_not_changed_changes_nothing(self) -> None:
        keys = self.authority.keys
        self.news()
        self.clock.advance(LOOK_SECONDS)
        self.assertIs(self.authority.keys, keys)
        self.assertIs(self.tls._context, self.context)
        self.assertEqual(self.logs.texts, [])

    def test_the_region_s_own_certificate_is_renewed_while_it_runs(self) -> None:
        before = self.authority.keys
        self.time = expires(before.region.certificate) - timedelta(days=80)
        self.clock.advance(LOOK_SECONDS)
        self.assertEqual(self.authority.keys.ca, before.ca)
        self.assertGreater(expires(self.authority.keys.region.certificate), self.time + timedelta(days=600))
        self.assertIsNot(self.tls._context, self.context)
        self.assertIn("shows a new certificate", self.logs.texts[0])

    def test_a_change_of_the_authority_is_followed_at_once_and_racks_are_told_at_each_step(self) -> None:
        begun, _ = begin_change(self.directory, "test", NOW)
        self.news()
        self.assertEqual(self.authority.keys, begun)
        self.assertEqual(self.told, 1)
        self.assertIsNot(self.tls._context, self.context)
        ended = finish_change(self.directory, "test", NOW)
        self.clock.advance(LOOK_SECONDS)  # also if the news was missed
        self.assertEqual(self.authority.keys, ended)
        self.assertEqual(self.told, 2)

    def test_with_each_look_racks_are_told_that_could_not_be_told_before(self) -> None:
        self.news()
        self.clock.advance(LOOK_SECONDS)
        self.assertEqual(self.told, 2)

    def test_files_that_are_no_good_are_said_and_what_was_in_use_stays(self) -> None:
        keys = self.authority.keys
        (self.directory / "ca.crt").write_bytes(b"garbage")
        self.news()
        self.assertIs(self.authority.keys, keys)
        self.assertIs(self.tls._context, self.context)
        self.assertIn("no good", self.logs.texts[0])
        self.assertEqual(self.told, 0)

    def test_an_authority_that_ends_soon_is_said_when_the_region_starts(self) -> None:
        self.time = expires(self.authority.keys.ca.certificate) - ENDS_SOON + timedelta(days=1)
        keeper = Keeper(self.clock, lambda: self.time, self.load, self.authority, self.tls, self.tell)
        keeper.start(self.database)
        self.addCleanup(keeper.stop)
        self.assertIn("stanchion region rotate-ca", self.logs.texts[0])
