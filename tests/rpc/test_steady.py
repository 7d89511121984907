"""A daemon's timers do not know when somebody sets the clock."""

from __future__ import annotations

import time

from twisted.internet.selectreactor import SelectReactor
from twisted.trial.unittest import SynchronousTestCase

import rack.plugin
import region.plugin
from rpc.steady import TimeOfDay, be_steady


class SteadyTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.off = 0.0
        real = time.time
        self.patch(time, "time", lambda: real() + self.off)
        self.reactor = SelectReactor()
        self.addCleanup(self.close)

    def close(self) -> None:
        for reader in self.reactor.removeAll():
            reader.connectionLost(None)  # the waker, whose sockets are to be closed

    def test_seconds_begin_at_the_time_of_day_and_go_on_whatever_the_clock_says(self) -> None:
        be_steady(self.reactor)
        begin = self.reactor.seconds()
        self.assertLess(abs(begin - time.time()), 60)
        for self.off in (-3600.0, 3600.0):
            now = self.reactor.seconds()
            self.assertTrue(begin <= now < begin + 60, now - begin)

    def test_a_timer_is_due_when_its_seconds_are_over_whatever_the_clock_says(self) -> None:
        be_steady(self.reactor)
        late, soon = self.reactor.callLater(60, list), self.reactor.callLater(0, list)
        self.off = -3600.0
        self.reactor.runUntilCurrent()
        self.assertFalse(soon.active())
        self.off = 3600.0
        self.reactor.runUntilCurrent()
        self.assertTrue(late.active())
        late.cancel()

    def test_doing_it_again_changes_nothing(self) -> None:
        be_steady(self.reactor)
        seconds = self.reactor.seconds
        be_steady(self.reactor)
        self.assertIs(self.reactor.seconds, seconds)

    def test_both_daemons_are_steady_before_they_begin(self) -> None:
        from twisted.internet import reactor

        for plugin in (rack.plugin, region.plugin):
            steady: list[object] = []
            self.patch(plugin, "be_steady", steady.append)
            self.patch(plugin, "make_service", lambda options, given, steady=steady: [*steady, given])
            made: object = plugin.makeService(plugin.Options())
            self.assertEqual(made, [reactor, reactor])

    def test_the_time_of_day_follows_the_clock(self) -> None:
        before = TimeOfDay().seconds()
        self.off = 3600.0
        self.assertGreaterEqual(TimeOfDay().seconds(), before + 3600)
