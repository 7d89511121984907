"""Two region processes over one database, with a rack: linked with both, and the truth told when one is killed."""

from __future__ import annotations

import json
import shutil
import signal
import time
from functools import partial
from typing import Any
from urllib.parse import urlencode

from psycopg2.extensions import parse_dsn
from twisted.trial.unittest import SynchronousTestCase

from tests.database import Server
from tests.system.daemons import Rack, Region, make_directory, wait_for

TRUTH_SECONDS = 15.0
"""So soon what ``stanchion racks`` says must be true again, whatever happened."""


class ProcessesTests(SynchronousTestCase):
    def setUp(self) -> None:
        server = Server.instance()
        database = server.make_database(template="template0")
        self.addCleanup(server.drop_database, database)
        # Both processes need the same database user, whoever they run as; the socket's directory is in the DSN.
        url = _as_url(server.dsn_of(database))
        self.directory = make_directory()
        self.addCleanup(shutil.rmtree, self.directory)
        self.one = self.region("one", url)
        self.addCleanup(self.one.kill)
        self.one.start()
        self.one.make_key()
        self.two = self.region("two", url)
        # One authority for all: the second process is given a copy before it starts.
        shutil.copytree(self.one.directory / "region" / "authority", self.two.directory / "region" / "authority")
        self.addCleanup(self.two.kill)
        self.two.start()
        self.two.key = self.one.key
        self.rack = Rack(self.one, self.directory)
        self.addCleanup(self.rack.kill)
        self.rack.join()
        self.rack.start()

    def region(self, name: str, url: str) -> Region:
        directory = self.directory / name
        directory.mkdir()
        directory.chmod(0o755)
        return Region(directory, top=f'name = "{name}"\ndatabase = "{url}"')

    def racks(self, through: Region) -> list[Any]:
        """What ``stanchion racks`` says when it asks ``through``."""
        status = 0 if through.get("rackcontrollers/")[0]["connected"] else 1
        try:
            racks: list[Any] = json.loads(through.command("racks", "--json", status=status))
        except AssertionError:  # it changed in between
            racks = json.loads(through.command("racks", "--json", status=1 - status))
        return racks

    def linked(self, through: Region) -> list[str]:
        [rack] = self.racks(through)
        self.assertEqual(rack["connected"], bool(rack["connections"]))
        return sorted(connection["process"] for connection in rack["connections"])

    def in_log(self, region: Region, text: str) -> bool:
        return text in region.log.read_text("utf-8", "replace")

    def wait_linked(self, through: Region, *names: str, seconds: float = 120.0) -> None:
        wait_for(
            lambda: self.linked(through) == sorted(names), f"links with {names} seen through {through.log}", seconds
        )

    def test_a_rack_is_linked_with_both_and_the_truth_is_told_when_one_dies_and_when_it_is_back(self) -> None:
        self.wait_linked(self.one, "one", "two")
        self.wait_linked(self.two, "one", "two")
        remembered = json.loads((self.directory / "rack" / "regions.json").read_bytes())["addresses"]
        self.assertEqual(remembered, sorted(f"127.0.0.1:{region.rpc}" for region in (self.one, self.two)))

        self.one.kill()
        self.wait_linked(self.two, "two", seconds=TRUTH_SECONDS)
        self.one.start()
        self.assertNotIn("one", self.linked(self.one))  # what it was linked with before it died is not said to be so
        self.wait_linked(self.two, "one", "two")
        self.wait_linked(self.one, "one", "two")

        # A rack whose configured region is down finds the other by what it remembers.
        self.rack.kill()
        self.wait_linked(self.two, seconds=TRUTH_SECONDS)
        self.one.stop()
        self.rack.start()
        self.wait_linked(self.two, "two")

    def test_a_rack_that_goes_silent_is_not_listed_any_more_in_time_and_is_back_when_it_speaks(self) -> None:
        self.wait_linked(self.two, "one", "two")
        self.rack.send(signal.SIGSTOP)
        begun = time.monotonic()
        try:
            self.wait_linked(self.two, seconds=TRUTH_SECONDS)
            self.assertLess(time.monotonic() - begun, TRUTH_SECONDS + 1)
            [rack] = self.racks(self.one)
            self.assertIsNotNone(rack["not_connected_since"])
        finally:
            self.rack.send(signal.SIGCONT)
        self.wait_linked(self.one, "one", "two")

        # What is asked of one process is done by the other as well, at once.
        self.two.command("racks", "revoke", self.rack.rack_name)
        for region in (self.one, self.two):
            wait_for(partial(self.in_log, region, "it was revoked"), "the link to be cut", TRUTH_SECONDS)
        self.wait_linked(self.one, seconds=TRUTH_SECONDS)

    def test_a_region_process_that_goes_silent_is_left_by_the_rack_and_struck_off(self) -> None:
        self.wait_linked(self.two, "one", "two")
        self.one.send(signal.SIGSTOP)
        try:
            self.wait_linked(self.two, "two", seconds=TRUTH_SECONDS)
            wait_for(lambda: "no answer to a ping" in self.rack.log.read_text(), "the rack to find out")
            wait_for(lambda: "has not been heard of" in self.two.log.read_text(), "it to be struck off")
        finally:
            self.one.send(signal.SIGCONT)
        self.wait_linked(self.two, "one", "two")
        self.assertIn("taken for dead", self.one.log.read_text())


def _as_url(dsn: str) -> str:
    """The URL for a DSN of words, as a region's settings have it."""
    words = parse_dsn(dsn)
    name = words.pop("dbname")
    return f"postgresql:///{name}?{urlencode(words)}"
