"""What the log says of what PostgreSQL says."""

from __future__ import annotations

from typing import Any, cast

from twisted.internet.interfaces import IReactorProcess
from twisted.logger import LogLevel, capturedLogs
from twisted.trial.unittest import SynchronousTestCase

from region.database.child import Child


class TestLines(SynchronousTestCase):
    def level_of(self, line: str) -> Any:
        child = Child(cast(IReactorProcess, None), "postgres")
        with capturedLogs() as events:
            child.outReceived(line.encode() + b"\n")
        (event,) = events
        return event["log_level"]

    def test_what_is_wrong_is_a_warning(self) -> None:
        self.assertIs(self.level_of('FATAL:  role "x" does not exist'), LogLevel.warn)

    def test_that_a_stop_ends_its_connections_is_not(self) -> None:
        self.assertIs(self.level_of("FATAL:  terminating connection due to administrator command"), LogLevel.debug)
