"""Which region and key the command line takes: what is nearest says, and a key never goes to another URL."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from rpc.console import CommandFailed, Status
from rpc.profile import LOCK, Profile, find_profile, is_up, load_profile, save_profile, state_directory


class TestProfile(SynchronousTestCase):
    def setUp(self):
        self.root = Path(self.mktemp()).absolute()
        self.home, self.work = self.root / "home", self.root / "work"
        self.home.mkdir(parents=True)
        self.work.mkdir()
        self.environment = {"HOME": str(self.home)}
        self.patch(os, "geteuid", lambda: 1000)  # as root the state could be elsewhere; another test is about that
        self.kept = Profile("http://kept:1", "k:k:k")
        self.local = Profile("http://local:2", "l:l:l")

    def find(self, url=None, key=None, **environment):
        return find_profile(url, key, self.environment | environment, self.work)

    def login(self):
        save_profile(self.home / ".config/stanchion/profile.toml", self.kept)

    def up(self):
        save_profile(self.work / ".state/profile.toml", self.local)

    def test_with_nothing_said_it_is_this_machine_without_a_key(self):
        self.assertEqual(self.find(), Profile("http://127.0.0.1:5240", ""))

    def test_what_login_kept_is_used(self):
        self.login()
        self.assertEqual(self.find(), self.kept)

    def test_the_options_win_over_the_environment_and_that_over_the_file(self):
        self.login()
        variables = {"STANCHION_URL": "http://env:3", "STANCHION_KEY": "e:e:e"}
        self.assertEqual(self.find(**variables), Profile("http://env:3", "e:e:e"))
        self.assertEqual(self.find("http://given:4", "g:g:g", **variables), Profile("http://given:4", "g:g:g"))

    def test_a_kept_key_is_not_used_for_another_url(self):
        self.login()
        self.assertEqual(self.find("http://other:9"), Profile("http://other:9", ""))
        self.assertEqual(self.find("http://kept:1/MAAS/"), self.kept)

    def test_a_given_key_is_used_for_the_kept_url(self):
        self.login()
        self.assertEqual(self.find(key="g:g:g"), Profile("http://kept:1", "g:g:g"))

    def test_the_region_that_runs_from_here_comes_before_what_login_kept(self):
        self.login()
        self.up()
        self.assertEqual(self.find(), self.kept)
        with open(self.work / ".state" / LOCK, "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.assertTrue(is_up(self.work / ".state"))
            self.assertEqual(self.find(), self.local)
        self.assertFalse(is_up(self.work / ".state"))

    def test_a_file_that_is_named_comes_before_both_and_must_be_there(self):
        self.login()
        named = self.root / "named.toml"
        error = self.assertRaises(CommandFailed, self.find, STANCHION_PROFILE=str(named))
        self.assertIn(str(named), str(error))
        self.assertEqual(error.status, Status.USAGE)
        save_profile(named, self.local)
        self.assertEqual(self.find(STANCHION_PROFILE=str(named)), self.local)

    def test_a_profile_is_readable_by_its_owner_only(self):
        path = self.root / "new" / "profile.toml"
        save_profile(path, self.kept)
        self.assertEqual(stat.S_IMODE(path.stat().st_mode), 0o600)
        self.assertEqual(load_profile(path), self.kept)
        self.assertEqual(os.listdir(path.parent), ["profile.toml"])

    def test_a_broken_profile_is_named(self):
        path = self.root / "bad.toml"
        path.write_text("urll = 1")
        self.assertIn("bad.toml: urll is not a setting", str(self.assertRaises(CommandFailed, load_profile, path)))


class TestStateDirectory(SynchronousTestCase):
    def setUp(self):
        self.directory = Path(self.mktemp()).absolute()
        self.directory.mkdir()

    def test_an_ordinary_user_keeps_it_here(self):
        self.patch(os, "geteuid", lambda: 1000)
        self.directory.chmod(0o700)
        self.assertEqual(state_directory(self.directory), self.directory / ".state")

    def test_root_keeps_it_elsewhere_if_others_cannot_get_here(self):
        self.patch(os, "geteuid", lambda: 0)
        self.directory.chmod(0o700)
        elsewhere = state_directory(self.directory)
        self.assertEqual(elsewhere.parent, Path("/var/tmp"))
        self.assertTrue(elsewhere.name.startswith("stanchion-"))
        self.assertEqual(state_directory(self.directory), elsewhere)
