"""The state directory of ``stanchion up``: one owner, one user, the same ports again, settings that daemons take."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from rack.config import RackConfig
from region.cli import state as state_module
from region.cli.state import Ports, State, choose_ports, lock_state, open_state, write_settings
from region.config import RegionConfig
from rpc.console import CommandFailed, Status
from rpc.profile import is_up
from rpc.settings import load


class TestStateDirectory(SynchronousTestCase):
    def setUp(self):
        self.directory = Path(self.mktemp()).absolute()
        self.directory.mkdir()

    def open(self, name: str = "state") -> State:
        return open_state(Path(name), self.directory)[0]

    def test_it_is_made_where_it_was_asked_for(self):
        state, note = open_state(Path("a/b"), self.directory)
        self.assertEqual(state.root, self.directory / "a/b")
        self.assertTrue(state.root.is_dir())
        self.assertEqual(note, "")

    def test_a_directory_that_others_may_change_is_refused(self):
        (self.directory / "state").mkdir()
        (self.directory / "state").chmod(0o777)
        error = self.assertRaises(CommandFailed, self.open)
        self.assertIn("is not a directory that only user", str(error))

    def test_a_link_to_a_directory_is_refused(self):
        (self.directory / "elsewhere").mkdir()
        (self.directory / "state").symlink_to("elsewhere")
        self.assertRaises(CommandFailed, self.open)

    def test_what_cannot_be_made_is_said_with_the_reason(self):
        (self.directory / "file").write_text("")
        error = self.assertRaises(CommandFailed, self.open, "file/state")
        self.assertIn("Not a directory", str(error))
        self.assertEqual(error.status, Status.USAGE)

    def test_that_it_is_elsewhere_is_said(self):
        elsewhere = self.directory / "elsewhere"
        self.patch(state_module, "state_directory", lambda directory: elsewhere)
        state, note = open_state(None, self.directory)
        self.assertEqual(state.root, elsewhere)
        self.assertIn(str(elsewhere), note)
        self.assertNotIn("\n", note)

    def test_only_one_may_have_it_and_is_named(self):
        state = self.open()
        lock = lock_state(state)
        self.assertTrue(is_up(state.root))
        error = self.assertRaises(CommandFailed, lock_state, state)
        self.assertIn(f"(process {os.getpid()})", str(error))
        lock.close()
        self.assertFalse(is_up(state.root))
        lock_state(state).close()


class TestPorts(SynchronousTestCase):
    def setUp(self):
        root = Path(self.mktemp()).absolute()
        root.mkdir()
        self.state = State(root)

    def occupy(self) -> int:
        sock = socket.socket()
        self.addCleanup(sock.close)
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port: int = sock.getsockname()[1]
        return port

    def test_the_usual_ports_are_taken_if_they_are_free(self):
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            two.bind(("127.0.0.1", 0))
            http, rpc = one.getsockname()[1], two.getsockname()[1]
        self.patch(state_module, "HTTP_PORT", http)
        self.patch(state_module, "RPC_PORT", rpc)
        self.assertEqual(choose_ports(self.state, "127.0.0.1"), Ports(http, rpc))

    def test_ports_that_are_taken_are_replaced_by_free_ones(self):
        taken = self.occupy(), self.occupy()
        self.patch(state_module, "HTTP_PORT", taken[0])
        self.patch(state_module, "RPC_PORT", taken[1])
        ports = choose_ports(self.state, "127.0.0.1")
        self.assertEqual(len({ports.http, ports.rpc, *taken}), 4)

    def test_the_ports_of_the_last_run_are_used_again(self):
        self.patch(state_module, "HTTP_PORT", self.occupy())
        self.patch(state_module, "RPC_PORT", self.occupy())
        ports = choose_ports(self.state, "127.0.0.1")
        write_settings(self.state, "127.0.0.1", ports, "")
        self.assertEqual(choose_ports(self.state, "127.0.0.1"), ports)

    def test_settings_of_the_last_run_that_are_damaged_do_not_matter(self):
        self.state.region_toml.write_text("[[[")
        self.assertGreater(choose_ports(self.state, "127.0.0.1").http, 0)

    def test_an_address_that_this_machine_does_not_have_is_refused(self):
        error = self.assertRaises(CommandFailed, choose_ports, self.state, "192.0.2.1")
        self.assertIn("cannot listen on 192.0.2.1", str(error))


class TestSettings(SynchronousTestCase):
    def test_both_daemons_take_what_is_written(self):
        root = Path(self.mktemp()).absolute()
        root.mkdir()
        state = State(root)
        write_settings(state, "127.0.0.1", Ports(8001, 8002), "http://proxy:3128")
        region, rack = load(RegionConfig, state.region_toml), load(RackConfig, state.rack_toml)
        self.assertEqual((region.http.port, region.rpc.port), (8001, 8002))
        self.assertEqual(region.state_directory, root / "region")
        self.assertEqual(region.images.proxy, "http://proxy:3128")
        self.assertEqual(rack.regions, ("127.0.0.1:8002",))
        self.assertEqual(rack.state_directory, root / "rack")
        write_settings(state, "::", Ports(8001, 8002), "")
        self.assertEqual(load(RackConfig, state.rack_toml).regions, ("[::1]:8002",))
