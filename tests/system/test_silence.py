"""What a pulled cable does: packets are dropped, nobody says goodbye, and both ends find out in time.

The rack runs in a network namespace of its own, so that its cable can be pulled. That takes root and iproute2.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SkipTest, SynchronousTestCase

from tests.system.daemons import Rack, Region, make_directory, wait_for

TRUTH_SECONDS = 15.0


class Cable:
    """A network namespace and the cable that it is reached by, with addresses that nobody else has."""

    def __init__(self) -> None:
        # Several of these may run at once on one machine: each has a network that follows from its process.
        number = os.getpid() % 16384
        self.name = f"stn{number}"
        self.network = f"198.{18 + number // 8192}.{number // 32 % 256}.{number % 32 * 8}"
        first, _, last = self.network.rpartition(".")
        self.near, self.far = (f"{first}.{int(last) + host}" for host in (1, 2))

    def lay(self) -> None:
        """Make it.

        :raises SkipTest: if that cannot be done here.
        """
        try:
            self._ip("netns", "add", self.name)
            self._ip("link", "add", self.name, "type", "veth", "peer", "name", "far", "netns", self.name)
            self._ip("addr", "add", f"{self.near}/29", "dev", self.name)
            self._ip("link", "set", self.name, "up")
            self._ip("-n", self.name, "addr", "add", f"{self.far}/29", "dev", "far")
            self._ip("-n", self.name, "link", "set", "lo", "up")
            self.plug_in()
        except (OSError, subprocess.CalledProcessError) as error:
            self.remove()
            said = getattr(error, "stderr", "") or error
            raise SkipTest(f"NOT TESTED: no network namespace can be made here: {said}") from error

    def plug_in(self) -> None:
        self._ip("-n", self.name, "link", "set", "far", "up")

    def pull(self) -> None:
        self._ip("-n", self.name, "link", "set", "far", "down")

    def remove(self) -> None:
        if Path("/run/netns", self.name).exists():
            self._ip("netns", "delete", self.name)  # the cable goes with it

    def _ip(self, *arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=30)


class FarRack(Rack):
    """A rack at the far end of a cable."""

    cable: Cable

    @property
    def command_line(self) -> list[str | Path]:
        return ["ip", "netns", "exec", self.cable.name, *super().command_line]


class CableTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.cable = Cable()
        self.cable.lay()
        self.addCleanup(self.cable.remove)
        self.directory = make_directory()
        self.addCleanup(shutil.rmtree, self.directory)
        self.region = Region(self.directory)
        text = self.region.config.read_text()
        self.region.write_config(text.replace('[rpc]\nlisten = "127.0.0.1"', f'[rpc]\nlisten = "{self.cable.near}"'))
        self.addCleanup(self.end)
        self.region.start()
        self.region.make_key()
        self.rack = FarRack(self.region, self.directory)
        self.rack.cable = self.cable
        self.addCleanup(self.rack.kill)
        self.region.command(
            "rack", "join", "--config", str(self.rack.config), "--region", f"{self.cable.near}:{self.region.rpc}",
            "--name", self.rack.rack_name, self.region.join_token_for(1),
        )  # fmt: skip
        self.rack.start()

    def end(self) -> None:
        """Have the region stop its database as well, before the directory is removed."""
        if self.region.process is not None:
            self.region.stop()

    def listed(self) -> Any:
        [rack] = self.region.get("rackcontrollers/")
        return rack

    def test_a_pulled_cable_is_found_out_by_both_ends_in_time_and_a_plugged_one_mends_it(self) -> None:
        wait_for(lambda: self.listed()["connected"], "the rack to connect")
        self.cable.pull()
        wait_for(lambda: not self.listed()["connected"], "the region to find out", TRUTH_SECONDS)
        self.assertIn("no answer to a ping", self.region.log.read_text())
        self.region.command("racks", status=1)  # not all of them are connected
        wait_for(lambda: "no answer to a ping" in self.rack.log.read_text(), "the rack to find out", TRUTH_SECONDS)
        self.cable.plug_in()
        wait_for(lambda: self.listed()["connected"], "the rack to be back")
