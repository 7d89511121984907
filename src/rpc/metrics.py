"""How many calls were made over links, how they ended and how long they took, counted at the cost of a few additions.

prometheus_client's own counters take a lock and a look-up by labels for each observation, which a round over a thousand
racks would feel. All calls are made in the reactor's thread, and there the numbers are read too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Any, Final

from prometheus_client import REGISTRY, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

BOUNDS: Final = (0.001, 0.01, 0.1, 0.5, 2.0, 10.0, 60.0)
"""Seconds; the upper bounds of the histogram's buckets. A round of asking has 2 s, a call 30 s."""

_NO_BUCKETS: Final = [0] * (len(BOUNDS) + 1)


class _Numbers:
    __slots__ = ("answered", "buckets", "failed", "seconds")

    def __init__(self) -> None:
        self.answered = 0
        self.failed = 0
        self.seconds = 0.0
        self.buckets = _NO_BUCKETS.copy()


class CallMetrics(Collector):
    """Counts calls by command and direction (``out``: this process called; ``in``: it answered)."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str], _Numbers] = {}

    def answered(self, command: str, direction: str, seconds: float) -> None:
        """A call has ended with an answer."""
        numbers = self._numbers.get((command, direction)) or self._new(command, direction)
        numbers.answered += 1
        numbers.seconds += seconds
        numbers.buckets[bisect_left(BOUNDS, seconds)] += 1

    def failed(self, command: str, direction: str, seconds: float) -> None:
        """A call has ended otherwise."""
        numbers = self._numbers.get((command, direction)) or self._new(command, direction)
        numbers.failed += 1
        numbers.seconds += seconds
        numbers.buckets[bisect_left(BOUNDS, seconds)] += 1

    def _new(self, command: str, direction: str) -> _Numbers:
        return self._numbers.setdefault((command, direction), _Numbers())

    def describe(self) -> Iterator[Metric]:
        """The families without numbers."""
        yield from self._families()

    def _families(self) -> tuple[CounterMetricFamily, HistogramMetricFamily]:
        calls = CounterMetricFamily(
            "stanchion_rpc_calls",
            "Calls between region and rack that have ended, by command, direction (out: this process called; in: it "
            "answered) and outcome (answered, failed).",
            labels=("command", "direction", "outcome"),
        )
        seconds = HistogramMetricFamily(
            "stanchion_rpc_call_seconds",
            "How long calls between region and rack took, whatever their outcome.",
            labels=("command", "direction"),
        )
        return calls, seconds

    def collect(self) -> Iterator[Metric]:
        """The numbers of this moment."""
        calls, seconds = self._families()
        for (command, direction), numbers in self._numbers.items():
            calls.add_metric((command, direction, "answered"), numbers.answered)
            calls.add_metric((command, direction, "failed"), numbers.failed)
            total, buckets = 0, list[tuple[str, float]]()
            for bound, count in zip((*map(str, BOUNDS), "+Inf"), numbers.buckets, strict=True):
                total += count
                buckets.append((bound, total))
            seconds.add_metric((command, direction), buckets=buckets, sum_value=numbers.seconds)
        yield calls
        yield seconds


CUTS: Final = Counter(
    "stanchion_rpc_cuts",
    "Links that were cut because the peer broke the protocol or asked more than it may, by peer and reason (malformed, "
    "flood, unread, links, silent, unregistered).",
    ["peer", "reason"],
)


def _registered() -> CallMetrics:
    metrics = CallMetrics()
    REGISTRY.register(metrics)
    return metrics


CALLS: Final = _registered()
"""The calls of this process."""


def gauge(name: str, doc: str, *labels: str, values: Any) -> Metric:
    """A family of gauges. ``values`` is a number, or with ``labels`` pairs of the labels' values and a number."""
    family = GaugeMetricFamily(name, doc, labels=labels)
    for named, value in values if labels else [((), values)]:
        family.add_metric(named, value)
    return family
