"""The metrics are those that docs/metrics.rst has, with labels that stay few; the alerts use none that do not exist."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

import rack.service  # noqa: F401  # as below
import region.commissioning.worker
import region.service  # noqa: F401  # they define the metrics that no collector has
from rack.inventory import Inventory
from rack.metrics import RackMetrics
from rack.sync import Status
from region.database import DatabaseUnavailable
from region.metrics import RegionMetrics
from region.racks import Rack
from rpc.commands import ListImages, Ping, Register, VersionMismatch
from rpc.exposition import Metrics, metrics_site
from rpc.manifest import Manifest
from rpc.metrics import BOUNDS, CALLS, CallMetrics
from rpc.testing import linked
from tests.rack.material import image
from tests.rack.test_sync import inline
from tests.region.web import Connection

ROOT = Path(__file__).resolve().parents[1]
NOW = datetime(2026, 1, 1, tzinfo=UTC)
HELD = Manifest((image(),))


class FakeDatabase:
    size, in_use, waiting = 5, 2, 0

    def __init__(self) -> None:
        self.row: tuple[Any, ...] | None = ("fetching", 100, 40, 1.5e9, 1.6e9)
        self.error: Exception | None = None

    async def one(self, sql: str) -> tuple[Any, ...] | None:
        return await (fail(self.error) if self.error else succeed(self.row))


class FakeRegistry:
    def enrolled(self) -> Mapping[str, Rack]:
        return {
            "aaaaaa": Rack("aaaaaa", "one", "x", NOW, version="1", generation=3, state="failed", reported=NOW),
            "bbbbbb": Rack("bbbbbb", "two", "y", NOW, state="partial"),
        }

    def link_of(self, system_id: str) -> object | None:
        return object() if system_id == "aaaaaa" else None


class FakeGenerations:
    class latest:
        number = 4


class FakeBlobs:
    looked = 0
    damaged: Mapping[str, object] = {"x": "it is wrong"}

    def total_bytes(self) -> int:
        self.looked += 1
        return 12345


class FakeSynchroniser:
    inventory = Inventory(3, HELD, HELD)
    status = Status("syncing", {"bytes": 10, "bytes_done": 4})
    last_success = 1.7e9


class FakeEvents:
    pending, lost = 7, 2


def region_metrics(database: Any, clock: Clock, blobs: Any = None) -> RegionMetrics:
    fakes: Any = FakeRegistry()
    generations: Any = FakeGenerations()
    files: Any = blobs or FakeBlobs()
    return RegionMetrics(
        database, fakes, generations, files, lambda: {"region": NOW, "authority": NOW}, clock, inline
    )  # fmt: skip


def rack_metrics() -> RackMetrics:
    synchroniser: Any = FakeSynchroniser()
    events: Any = FakeEvents()
    return RackMetrics(synchroniser, events, lambda: 1, lambda: NOW)


def names(metrics: Any) -> set[str]:
    return {metric.name + ("_total" if metric.type == "counter" else "") for metric in metrics}


def families(name: str, metrics: Any) -> Metric:
    found: Metric = next(metric for metric in metrics if metric.name == name)
    return found


def values(metric: Metric) -> dict[tuple[str, ...], float]:
    return {tuple(sample.labels.values()): sample.value for sample in metric.samples}


class DocumentTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.region = region_metrics(FakeDatabase(), Clock())
        self.successResultOf(Deferred.fromCoroutine(self.region.refresh()))
        here = [*REGISTRY.collect(), *self.region.collect(), *rack_metrics().collect()]
        self.there_are = {name for name in names(here) if name.startswith("stanchion_")}

    def test_every_metric_is_documented_and_every_documented_metric_exists(self) -> None:
        text = (ROOT / "docs" / "metrics.rst").read_text("utf-8")
        documented = re.findall(r"^``(stanchion_\w+)``", text, re.MULTILINE)
        self.assertEqual(sorted(documented), sorted(self.there_are))

    def test_alerts_use_only_metrics_that_exist(self) -> None:
        text = (ROOT / "etc" / "prometheus" / "stanchion.rules.yml").read_text("utf-8")
        used = set(re.findall(r"\b(stanchion_\w+)", "\n".join(re.findall(r"^ +expr: (.*)$", text, re.MULTILINE))))
        self.assertGreater(len(used), 5)
        self.assertEqual(used - self.there_are, set())

    def test_only_a_region_s_gauges_of_racks_tell_one_rack_from_another_and_nothing_has_an_address(self) -> None:
        for metric in (*REGISTRY.collect(), *self.region.collect(), *rack_metrics().collect()):
            if metric.name.startswith("stanchion_"):
                labels = {label for sample in metric.samples for label in sample.labels}
                self.assertEqual("rack" in labels, metric.name.startswith("stanchion_rack_"), metric.name)
                self.assertFalse(labels & {"address", "ask", "url", "error", "reference"}, metric.name)


class RegionTests(SynchronousTestCase):
    def test_racks_that_are_linked_and_those_that_are_not(self) -> None:
        metrics = list(region_metrics(FakeDatabase(), Clock()).collect())
        self.assertEqual(values(families("stanchion_rack_connected", metrics)), {("aaaaaa",): 1, ("bbbbbb",): 0})
        self.assertEqual(values(families("stanchion_rack_sync_failed", metrics)), {("aaaaaa",): 1, ("bbbbbb",): 0})
        self.assertEqual(values(families("stanchion_rack_partial", metrics)), {("aaaaaa",): 0, ("bbbbbb",): 1})
        self.assertEqual(values(families("stanchion_rack_generation", metrics)), {("aaaaaa",): 3})
        self.assertEqual(values(families("stanchion_links", metrics)), {("rack",): 1})

    def test_when_the_database_is_away_its_numbers_are_absent_and_not_zero(self) -> None:
        database, clock = FakeDatabase(), Clock()
        metrics = region_metrics(database, clock)
        self.successResultOf(Deferred.fromCoroutine(metrics.refresh()))
        self.assertEqual(values(families("stanchion_import_state", metrics.collect()))["fetching",], 1)
        database.error = DatabaseUnavailable("away")
        self.successResultOf(Deferred.fromCoroutine(metrics.refresh()))
        found = list(metrics.collect())
        self.assertEqual(values(families("stanchion_database_up", found)), {(): 0})
        self.assertFalse([name for name in names(found) if name.startswith("stanchion_import_")])

    def test_the_size_of_the_files_is_not_looked_up_each_time(self) -> None:
        clock, blobs = Clock(), FakeBlobs()
        metrics = region_metrics(FakeDatabase(), clock, blobs)
        for seconds in (0, 30, 31):
            clock.advance(seconds)
            self.successResultOf(Deferred.fromCoroutine(metrics.refresh()))
        self.assertEqual(blobs.looked, 2)


class CallTests(SynchronousTestCase):
    def counted(self) -> dict[tuple[str, ...], float]:
        return values(families("stanchion_rpc_calls", CALLS.collect()))

    def test_each_call_is_counted_once_on_each_side_however_it_ends(self) -> None:
        async def register(link: Any, **arguments: Any) -> Any:
            raise VersionMismatch("too new")

        async def list_images(link: Any, **arguments: Any) -> Any:
            return {"state": "empty", "generation": -1, "digest": ""}

        region_end, rack_end, pump = linked({Register: register}, {ListImages: list_images}, interval=0, version=None)
        region_end.agreed(1)
        before = self.counted()
        calls = [
            Deferred.fromCoroutine(each)
            for each in (
                region_end.ask(ListImages, known_digest=""), region_end.ask(Ping),
                rack_end.ask(Register, versions=[1], name="", software=""),
            )
        ]  # fmt: skip
        pump.flush()
        for call in calls:
            self.successResultOf(call)
        after = self.counted()
        changed = {key: after[key] - before.get(key, 0) for key in after if after[key] != before.get(key, 0)}
        self.assertEqual(
            changed,
            {
                (command, direction, outcome): 1
                for command, outcome in (("ListImages", "answered"), ("Ping", "answered"), ("Register", "failed"))
                for direction in ("in", "out")
            },
        )

    def test_seconds_are_counted_in_the_bucket_that_they_belong_to(self) -> None:
        metrics = CallMetrics()
        metrics.answered("Ping", "out", BOUNDS[0])
        metrics.answered("Ping", "out", 0.05)
        metrics.failed("Ping", "out", 1000.0)
        found = families("stanchion_rpc_call_seconds", metrics.collect())
        buckets = {sample.labels["le"]: sample.value for sample in found.samples if sample.name.endswith("_bucket")}
        self.assertEqual((buckets["0.001"], buckets["0.01"], buckets["0.1"], buckets["+Inf"]), (1, 1, 2, 3))
        [total] = [sample.value for sample in found.samples if sample.name.endswith("_sum")]
        self.assertAlmostEqual(total, 1000.051)


class ExpositionTests(SynchronousTestCase):
    def read(self, resource: Metrics, path: str = "/metrics") -> Any:
        connection = Connection.__new__(Connection)
        connection.attach(metrics_site(resource, Clock()))
        connection.send("GET", path, key=False)
        return connection.response()

    def test_what_a_rack_serves_can_be_read_and_nothing_else_is_there(self) -> None:
        registry = CollectorRegistry()
        registry.register(rack_metrics())
        response = self.read(Metrics(inline, registry=registry))
        self.assertEqual(response.status, 200)
        self.assertIn("text/plain", response.headers["Content-Type"])
        found = {family.name for family in text_string_to_metric_families(response.text)}
        self.assertIn("stanchion_events_lost", found)
        self.assertIn("stanchion_sync_state", found)
        self.assertEqual(self.read(Metrics(inline, registry=registry), "/").status, 404)

    def test_a_fault_in_reading_the_numbers_is_logged_and_answered_with_500(self) -> None:
        async def broken() -> None:
            raise ZeroDivisionError

        self.assertEqual(self.read(Metrics(inline, broken)).status, 500)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
