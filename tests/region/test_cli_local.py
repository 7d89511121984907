"""``stanchion region``: times as people write them, and a database that is found only where a region runs it."""

from __future__ import annotations

import argparse
import fcntl
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from region.cli import local
from region.cli.local import config_of, embedded_dsn, seconds_of
from region.database.target import Target
from rpc.console import CommandFailed, Status
from rpc.profile import LOCK
from rpc.settings import SettingsError


class TestTimes(SynchronousTestCase):
    def test_units_are_what_they_seem(self):
        for text, seconds in [("90s", 90), ("30m", 1800), ("12h", 43200), ("7d", 604800)]:
            with self.subTest(text):
                self.assertEqual(seconds_of(text), seconds)

    def test_what_is_no_time_is_refused(self):
        for text in ("", "0s", "5", "m", "-5m", "1.5h", "5 m", "1w", "٣m", "5m\n"):
            with self.subTest(text):
                self.assertEqual(self.assertRaises(CommandFailed, seconds_of, text).status, Status.USAGE)

    @settings(deadline=None)
    @given(st.text(max_size=8))
    def test_any_text_is_a_time_or_refused(self, text):
        try:
            self.assertGreater(seconds_of(text), 0)
        except CommandFailed as error:
            self.assertIn("is not a time", str(error))


class TestSettings(SynchronousTestCase):
    """Which region is meant on a host where one is installed, or where ``stanchion up`` runs, or both."""

    def setUp(self):
        self.directory = Path(self.mktemp()).absolute()
        self.state = self.directory / "state"
        self.state.mkdir(parents=True)
        self.installed = str(self.directory / "installed.toml")
        self.patch(local, "DEFAULT_CONFIG", self.installed)
        self.patch(local, "state_directory", lambda directory: self.state)
        (self.state / "region.toml").write_text('name = "up"')

    def region(self, config: Path | str | None = None) -> str:
        return config_of(argparse.Namespace(config=str(config or self.installed))).name

    def test_where_stanchion_up_runs_its_region_is_meant_unless_one_is_installed_or_named(self):
        (self.directory / "other.toml").write_text('name = "other"')
        with open(self.state / LOCK, "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.assertEqual(self.region(), "up")
            self.assertEqual(self.region(self.directory / "other.toml"), "other")
            (self.directory / "installed.toml").write_text('name = "installed"')
            self.assertEqual(self.region(), "installed")

    def test_where_nothing_runs_and_none_is_installed_it_is_said_what_is_missing(self):
        (self.state / LOCK).write_text("")
        self.assertIn("installed.toml: there is no such file", str(self.assertRaises(SettingsError, self.region)))


class TestEmbeddedDatabase(SynchronousTestCase):
    def setUp(self):
        self.directory = Path(self.mktemp()).absolute() / "postgres"
        (self.directory / "data").mkdir(parents=True)

    def write_facts(self, sockets: str) -> None:
        (self.directory / "data" / "postmaster.pid").write_text(f"1\n/data\n1700000000\n5432\n{sockets}\n\n")

    def test_it_is_reached_through_the_socket_of_the_region_that_runs(self):
        for sockets in ("/run/x", "/srv/it's here\\so", "/a b"):
            with self.subTest(sockets):
                self.write_facts(sockets)
                with open(self.directory / "lock", "wb") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX)
                    parameters = Target.parse(embedded_dsn(self.directory)).parameters
                self.assertEqual(parameters["host"], sockets)
                self.assertEqual(parameters["port"], "5432")

    def test_without_a_region_it_is_said_that_none_runs(self):
        for prepare in (lambda: None, lambda: (self.directory / "lock").write_text("")):
            prepare()
            error = self.assertRaises(CommandFailed, embedded_dsn, self.directory)
            self.assertIn("start the region first", str(error))
            self.assertEqual(error.status, Status.UNREACHABLE)

    def test_facts_that_a_killed_server_left_are_not_believed(self):
        (self.directory / "lock").write_text("")
        self.write_facts("/run/x")
        self.assertRaises(CommandFailed, embedded_dsn, self.directory)
