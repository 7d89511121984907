"""What happens on a rack is found at the region, whichever of the two was down meanwhile; and both can be watched."""

from __future__ import annotations

import json
import shutil
import urllib.request
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from tests.system.daemons import Rack, Region, free_port, make_directory, wait_for


class EventTests(SynchronousTestCase):
    def setUp(self) -> None:
        directory = make_directory()
        self.addCleanup(shutil.rmtree, directory)
        self.region = Region(directory)
        self.addCleanup(self.region.stop)
        self.region.start()
        self.region.make_key()
        self.rack = Rack(self.region, directory)
        self.port = free_port()
        self.rack.write_config(self.rack.config.read_text() + f"[metrics]\nport = {self.port}\n")
        self.addCleanup(self.rack.kill)
        self.rack.join()

    def types(self) -> list[str]:
        """The types of all events, oldest first."""
        events: list[Any] = json.loads(self.region.command("events", "--json"))["events"]
        return [event["type"] for event in reversed(events)]

    def metrics(self, port: int) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            data: bytes = answer.read()
        return data.decode()

    def test_events_outlive_kills_and_stops_of_both(self) -> None:
        begin = ["Rack started", "Registered with a region"]
        self.rack.start()
        wait_for(lambda: self.types() == begin, "the first events")
        self.region.kill()
        wait_for(lambda: 'stanchion_links{peer="region"} 0.0' in self.metrics(self.port), "the rack to notice")
        self.rack.kill()
        self.rack.start()
        self.rack.stop()
        self.rack.start()
        self.region.start()
        wait_for(lambda: self.types()[-1:] == begin[1:] and len(self.types()) == 7, "what happened meanwhile")
        self.assertEqual(self.types(), [*begin, "Link with a region lost", "Rack started", "Rack stopped", *begin])
        self.assertIn('stanchion_rack_connected{rack="', self.metrics(self.region.http))
        self.assertIn("stanchion_events_lost_total 0.0", self.metrics(self.port))

    def test_a_rack_whose_port_for_metrics_is_taken_says_so_and_serves(self) -> None:
        self.rack.write_config(self.rack.config.read_text().replace(str(self.port), str(self.region.http)))
        self.rack.start()
        wait_for(lambda: len(self.types()) == 2, "its events")
        self.assertIn("The metrics cannot be read", self.rack.log.read_text())
