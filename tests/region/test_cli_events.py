"""``stanchion events``: oldest first, on request for ever, and without losing one when the region is away."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from typing import Any

from region.cli.events import PAGE, follow
from rpc.client import Client
from rpc.profile import Profile
from tests.region.test_cli_answers import CommandCase


def event(number: int, level: str = "INFO", description: str = "All well.") -> dict[str, Any]:
    return {
        "id": number, "node": "abc234", "hostname": "rack-1", "level": level, "username": "",
        "created": "Thu, 24 Jul. 2025 08:01:49", "type": "Sync ended", "description": description,
    }  # fmt: skip


def page(*events: dict[str, Any]) -> dict[str, Any]:
    return {"count": len(events), "events": list(events), "next_uri": "", "prev_uri": ""}


class Enough(Exception):
    """Ends what goes on for ever."""


class TestEvents(CommandCase):
    def test_people_see_the_oldest_first_and_no_control_characters(self) -> None:
        self.region.answers["GET", "events/"] = page(event(2, "ERROR", "bad \x1b[31m"), event(1))
        status, output, _ = self.stanchion("events")
        lines = output.splitlines()
        self.assertEqual((status, len(lines)), (0, 3))
        self.assertEqual(lines[0].split()[:4], ["TIME", "(UTC)", "LEVEL", "HOST"])
        self.assertIn("All well.", lines[1])
        self.assertIn("bad \\x1b[31m", lines[2])
        self.assertEqual(self.region.seen[-1].query, {"op": ["query"], "limit": ["100"]})

    def test_options_become_the_query_and_json_is_the_answer(self) -> None:
        self.region.answers["GET", "events/"] = page(event(1))
        status, output, _ = self.stanchion(
            "events", "--json", "--level", "error", "--rack", "a", "--rack", "b", "--limit", "5"
        )
        self.assertEqual((status, json.loads(output)["events"][0]["id"]), (0, 1))
        self.assertEqual(
            self.region.seen[-1].query, {"op": ["query"], "level": ["error"], "id": ["a", "b"], "limit": ["5"]}
        )

    def test_events_of_nodes_are_asked_for_by_name_and_by_mac_address(self) -> None:
        self.region.answers["GET", "events/"] = page(event(1))
        self.stanchion("events", "--rack", "a", "--node", "b", "--mac", "00:16:3e:00:00:01")
        query = self.region.seen[-1].query
        self.assertEqual((query["id"], query["mac_address"]), (["a", "b"], ["00:16:3e:00:00:01"]))

    def test_of_an_error_it_is_shown_what_the_log_has_more_under(self) -> None:
        failed = {**event(1, "ERROR", "KeyError: 'x'."), "correlation": "0123456789abcdef"}
        changed = {**event(2, "INFO", "From 'New' to 'Ready'"), "correlation": "fedcba9876543210"}
        self.region.answers["GET", "events/"] = page(changed, failed)
        _, output, _ = self.stanchion("events")
        self.assertIn("KeyError: 'x'. [0123456789abcdef]", output)
        self.assertNotIn("fedcba", output)

    def test_no_event_is_said_to_be_none(self) -> None:
        self.region.answers["GET", "events/"] = page()
        self.assertEqual(self.stanchion("events")[:2], (0, "there are no such events\n"))

    def follow(self, first: Any, pauses: int, *, as_json: bool = False) -> list[str]:
        def pause(seconds: float) -> None:
            nonlocal pauses
            pauses -= 1
            if not pauses:
                raise Enough

        output = io.StringIO()
        arguments = argparse.Namespace(json=as_json, level=None, rack=None, node=None, mac=None)
        with contextlib.redirect_stdout(output), self.assertRaises(Enough):
            follow(Client(Profile(self.region.url, "a:b:c")), arguments, first, pause)
        return output.getvalue().splitlines()

    def test_following_goes_on_after_the_last_that_was_shown(self) -> None:
        self.region.answers["GET", "events/"] = (page(event(5), event(4)), page(), page(event(6)))
        lines = self.follow(page(event(3)), 4, as_json=True)
        self.assertEqual([json.loads(line)["id"] for line in lines], [3, 4, 5, 6])
        self.assertEqual([seen.query["after"] for seen in self.region.seen], [["3"], ["5"], ["5"]])
        self.assertEqual(self.region.seen[-1].query["limit"], [str(PAGE)])

    def test_following_from_nothing_begins_at_the_beginning(self) -> None:
        self.region.answers["GET", "events/"] = page(event(1))
        self.assertEqual(len(self.follow(page(), 2)), 1)
        self.assertEqual(self.region.seen[0].query["after"], ["0"])

    def test_a_full_page_is_followed_by_the_next_without_a_pause(self) -> None:
        self.region.answers["GET", "events/"] = (page(*(event(n) for n in range(PAGE, 0, -1))), page(event(PAGE + 1)))
        self.assertEqual(len(self.follow(page(), 2)), PAGE + 1)

    def test_a_region_that_is_away_is_waited_for_and_that_is_said_once(self) -> None:
        self.region.stop()
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors):
            self.assertEqual(len(self.follow(page(event(1)), 4)), 1)
        self.assertEqual(errors.getvalue().count("still trying"), 1)
        self.region.start()
