"""What of a rack can be watched as numbers: what it holds, how its syncing goes, and what waits for the region."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Final

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from rack.events import Events
from rack.inventory import NO_GENERATION
from rack.sync import Synchroniser
from rpc.metrics import gauge

STATES: Final = ("empty", "ready", "partial", "syncing", "failed")


class RackMetrics(Collector):
    """A rack's numbers, read when they are asked for.

    :param links: gives how many regions the rack is registered with.
    :param certificate_end: gives when the rack's certificate ends.
    """

    def __init__(
        self,
        synchroniser: Synchroniser,
        events: Events,
        links: Callable[[], int],
        certificate_end: Callable[[], datetime],
    ) -> None:
        self._synchroniser = synchroniser
        self._events = events
        self._links = links
        self._certificate_end = certificate_end

    def describe(self) -> Iterator[Metric]:
        """Nothing: what there is depends on the moment."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """The numbers of this moment."""
        inventory, status = self._synchroniser.inventory, self._synchroniser.status
        yield gauge(
            "stanchion_links", "Links that are registered, by the other end's role.", "peer",
            values=[(("region",), self._links())],
        )  # fmt: skip
        if inventory.generation != NO_GENERATION:
            yield gauge("stanchion_generation", "The generation that is current here.", values=inventory.generation)
        yield gauge(
            "stanchion_images_held", "Images that are held and verified.", values=len(inventory.manifest.images)
        )
        yield gauge(
            "stanchion_images_damaged", "Files that should be held, and are damaged or could not be had.",
            values=len(inventory.damaged),
        )  # fmt: skip
        held = sum(inventory.manifest.blobs.values())
        yield gauge("stanchion_blobs_bytes", "Bytes of the images' files.", values=held)
        yield gauge(
            "stanchion_sync_state", "Which state the rack is in: 1 for that one, 0 for the others.", "state",
            values=[((state,), float(state == status.state)) for state in STATES],
        )  # fmt: skip
        total, done = (status.progress.get(name, 0) for name in ("bytes", "bytes_done"))
        yield gauge("stanchion_sync_bytes", "Bytes that the sync under way has to fetch.", values=total)
        yield gauge("stanchion_sync_bytes_done", "Bytes of those that are there.", values=done)
        if (success := self._synchroniser.last_success) is not None:
            yield gauge(
                "stanchion_sync_last_success_timestamp_seconds",
                "When a sync last ended with everything in place, also if there was nothing to do.", values=success,
            )  # fmt: skip
        yield gauge("stanchion_events_waiting", "Events that no region has confirmed yet.", values=self._events.pending)
        yield CounterMetricFamily(
            "stanchion_events_lost", "Events that were lost since the rack started.", self._events.lost
        )
        yield gauge(
            "stanchion_certificate_end_timestamp_seconds", "When a certificate of this daemon ends.", "certificate",
            values=[(("rack",), self._certificate_end().timestamp())],
        )  # fmt: skip
