"""A failed call is one event and one count on each side: not none, not two."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.logger import LogLevel, formatEvent, globalLogPublisher
from twisted.trial.unittest import SynchronousTestCase

from rpc.commands import ListImages, Register, VersionMismatch
from rpc.reporting import FAILURES, FailedCall, IReporter, Reporter
from rpc.testing import RecordingReporter, linked


class ReportingTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.registry = CollectorRegistry()
        counter = Counter("failures", "", ["command", "direction", "peer", "kind"], registry=self.registry)
        self.reporter = Reporter(counter)
        self.events: list[Any] = []
        observer: Any = self.events.append
        globalLogPublisher.addObserver(observer)
        self.addCleanup(globalLogPublisher.removeObserver, observer)

    def failures(self) -> list[Any]:
        return [event for event in self.events if event["log_namespace"] == "rpc.reporting"]

    def count(self, command, direction, kind) -> float | None:
        # The region calls ListImages and answers Register: in these tests its peer is a rack.
        peer = "rack" if (command, direction) in (("Register", "in"), ("ListImages", "out")) else "region"
        labels = {"command": command, "direction": direction, "peer": peer, "kind": kind}
        return self.registry.get_sample_value("failures_total", labels)

    def link(self, region_table, rack_table=()) -> None:
        self.clock = Clock()
        self.region, self.rack, self.pump = linked(
            dict(region_table),
            dict(rack_table),
            self.clock,
            region_reporter=self.reporter,
            rack_reporter=self.reporter,
            interval=0,
        )

    def register(self) -> None:
        asked = Deferred.fromCoroutine(self.rack.ask(Register, versions=[1], name="", software=""))
        self.pump.flush()
        self.successResultOf(asked)

    def test_an_internal_error_is_logged_once_with_its_traceback_and_once_where_it_was_called(self) -> None:
        async def register(link, **arguments):
            raise ZeroDivisionError("the cause")

        self.link({Register: register})
        self.register()
        [logged] = self.flushLoggedErrors(ZeroDivisionError)
        self.assertIn("register", logged.getTraceback())
        answered, called = self.failures()
        self.assertEqual(answered["log_level"], LogLevel.critical)
        self.assertEqual(called["log_level"], LogLevel.warn)
        for event in (answered, called):
            self.assertEqual((event["command"], event["kind"], event["ask"]), ("Register", "Unhandled", "1"))
        self.assertEqual((answered["direction"], called["direction"]), ("in", "out"))
        self.assertEqual((answered["peer_id"], called["peer_id"]), ("abc234", ""))
        self.assertEqual(answered["reference"], called["reference"])
        self.assertEqual(answered["error"], "ZeroDivisionError: the cause")
        self.assertEqual(self.count("Register", "in", "Unhandled"), 1)
        self.assertEqual(self.count("Register", "out", "Unhandled"), 1)

    def test_a_declared_error_is_logged_once_on_each_side_without_a_traceback(self) -> None:
        async def register(link, **arguments):
            raise VersionMismatch("too new")

        self.link({Register: register})
        self.register()
        self.assertEqual([event["kind"] for event in self.failures()], ["VersionMismatch"] * 2)
        self.assertEqual([event["error"] for event in self.failures()], ["too new"] * 2)
        self.assertEqual(self.count("Register", "in", "VersionMismatch"), 1)
        self.assertEqual(self.count("Register", "out", "VersionMismatch"), 1)

    def test_a_deadline_is_logged_with_the_seconds_that_it_took(self) -> None:
        async def never(link, **arguments):
            await Deferred()

        self.link({}, {ListImages: never})
        asked = Deferred.fromCoroutine(self.region.ask(ListImages, known_digest="", deadline=2))
        self.pump.flush()
        self.clock.advance(2)
        self.successResultOf(asked)
        [event] = self.failures()
        self.assertEqual((event["kind"], event["seconds"]), ("CallTimedOut", 2.0))
        self.assertEqual(self.count("ListImages", "out", "CallTimedOut"), 1)

    def test_a_call_that_succeeds_is_not_reported(self) -> None:
        async def register(link, **arguments):
            return {"version": 1, "region": "", "stream_urls": []}

        self.link({Register: register})
        self.register()
        self.assertEqual(self.failures(), [])

    def test_the_metric_has_the_name_that_dashboards_know(self) -> None:
        [metric] = FAILURES.collect()
        self.assertEqual(metric.name + "_total", "stanchion_rpc_failures_total")
        self.assertTrue(IReporter.providedBy(Reporter()))
        self.assertTrue(IReporter.providedBy(RecordingReporter()))

    def test_braces_in_what_a_peer_says_do_not_break_the_log_line(self) -> None:
        self.reporter.failed(
            FailedCall("Ping", "out", "{peer}", "", "{x}", "1", 0.0, "Failed", "{kaboom!r:>10}"),
        )
        [event] = self.failures()
        self.assertEqual(formatEvent(event), "Ping to {peer} failed after 0.000 s: Failed: {kaboom!r:>10}")
