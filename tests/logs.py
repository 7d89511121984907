"""What was logged in a test."""

from __future__ import annotations

from typing import Any

from twisted.logger import formatEvent, globalLogPublisher
from twisted.trial.unittest import SynchronousTestCase, TestCase


class Logs:
    """Keeps every event that a module (all, if it is empty) logs until the test ends."""

    def __init__(self, case: SynchronousTestCase | TestCase, namespace: str = "") -> None:
        self.events: list[dict[str, Any]] = []
        self._namespace = namespace
        observer: Any = self._observe
        globalLogPublisher.addObserver(observer)
        case.addCleanup(globalLogPublisher.removeObserver, observer)

    def _observe(self, event: dict[str, Any]) -> None:
        if self._namespace in ("", event.get("log_namespace")):
            self.events.append(event)

    @property
    def texts(self) -> list[str]:
        """The events as people read them."""
        return [formatEvent(event) for event in self.events]
