"""What of a region can be watched as numbers: its racks, its imports, what it has published, and how it fares itself.

What the database knows is asked for before each reading, so that every region process tells the same and a restart
forgets nothing; what it could not be asked is left out, and ``stanchion_database_up`` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Final, Protocol

import psycopg2
from attrs import frozen
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from twisted.internet.defer import Deferred, TimeoutError
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from region.database import Database, DatabaseUnavailable
from region.racks import Rack
from rpc.blobs import BlobStore
from rpc.fetch import RunInThread
from rpc.metrics import gauge

log = Logger()

DEADLINE: Final = 2.0
"""Seconds that the database may take."""

BLOBS_SECONDS: Final = 60.0
"""How long the size of the images' files is remembered."""

IMPORT_STATES: Final = ("queued", "reading", "fetching", "publishing", "done", "failed", "cancelled")

_IMPORTS: Final = """
SELECT state, bytes_total, bytes_done,
       (SELECT extract(epoch FROM max(ended))::float8 FROM import_job WHERE state = 'done'),
       (SELECT extract(epoch FROM max(ended))::float8 FROM import_job)
FROM import_job ORDER BY (state <> 'queued') DESC, id DESC LIMIT 1
"""


class Racks(Protocol):
    """The part of :class:`region.racks.RackRegistry` that is read here."""

    def enrolled(self) -> Mapping[str, Rack]: ...
    def link_of(self, system_id: str) -> object | None: ...


class Current(Protocol):
    """The current generation, as :class:`region.images.store.GenerationStore` knows it."""

    @property
    def number(self) -> int: ...


class Generations(Protocol):
    """The part of :class:`region.images.store.GenerationStore` that is read here."""

    @property
    def latest(self) -> Current | None: ...


@frozen
class _Imports:
    """The import that runs, or the last one."""

    state: str
    bytes: int
    bytes_done: int
    last_success: float | None
    last_end: float | None


class RegionMetrics(Collector):
    """A region's numbers, read when they are asked for.

    :param certificates: gives when each certificate of the region ends, by what it is called.
    """

    def __init__(
        self,
        database: Database,
        racks: Racks,
        generations: Generations,
        blobs: BlobStore,
        certificates: Callable[[], Mapping[str, datetime]],
        clock: IReactorTime,
        run_in_thread: RunInThread,
    ) -> None:
        self._database = database
        self._racks = racks
        self._generations = generations
        self._blobs = blobs
        self._certificates = certificates
        self._clock = clock
        self._run_in_thread = run_in_thread
        self._imports: _Imports | None = None
        self._is_database_up = True  # until it is seen not to be, which is then said once
        self._blobs_bytes = 0
        self._blobs_looked: float | None = None

    async def refresh(self) -> None:
        """Ask the database and the disk."""
        asking = Deferred.fromCoroutine(self._database.one(_IMPORTS))
        try:
            row = await asking.addTimeout(DEADLINE, self._clock)
        except (DatabaseUnavailable, psycopg2.Error, TimeoutError) as error:
            if self._is_database_up:
                log.warn("The database cannot be asked for the metrics: {reason}", reason=str(error))
            self._is_database_up, self._imports = False, None
        else:
            self._is_database_up = True
            self._imports = _Imports(*row) if row is not None else None
        now = self._clock.seconds()
        if self._blobs_looked is None or now - self._blobs_looked >= BLOBS_SECONDS:
            self._blobs_looked = now
            self._blobs_bytes = await self._run_in_thread(self._blobs.total_bytes)

    def describe(self) -> Iterator[Metric]:
        """Nothing: what there is depends on the moment."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """The numbers of this moment."""
        yield from self._of_racks()
        if (current := self._generations.latest) is not None:
            yield gauge("stanchion_generation", "The generation that is current here.", values=current.number)
        yield gauge("stanchion_blobs_bytes", "Bytes of the images' files.", values=self._blobs_bytes)
        damaged = len(self._blobs.damaged)
        yield gauge("stanchion_blobs_damaged", "Files that are damaged and not repaired yet.", values=damaged)
        yield from self._of_imports()
        yield gauge(
            "stanchion_database_up", "Whether the database could be asked a moment ago.", values=self._is_database_up
        )
        database = self._database
        yield gauge("stanchion_database_connections", "Connections that the pool may have.", values=database.size)
        yield gauge("stanchion_database_connections_in_use", "Those that are in use.", values=database.in_use)
        yield gauge("stanchion_database_waiting", "Who waits for a connection.", values=database.waiting)
        yield gauge(
            "stanchion_certificate_end_timestamp_seconds", "When a certificate of this daemon ends.", "certificate",
            values=[((name,), end.timestamp()) for name, end in self._certificates().items()],
        )  # fmt: skip

    def _of_racks(self) -> Iterator[Metric]:
        racks = sorted(self._racks.enrolled().values(), key=lambda rack: rack.system_id)
        up = {rack.system_id: self._racks.link_of(rack.system_id) is not None for rack in racks}
        yield gauge(
            "stanchion_links", "Links that are registered, by the other end's role.", "peer",
            values=[(("rack",), sum(up.values()))],
        )  # fmt: skip
        yield gauge(
            "stanchion_rack_info", "1 for each enrolled rack.", "rack", "name", "version",
            values=[((rack.system_id, rack.name, rack.version), 1) for rack in racks],
        )  # fmt: skip
        yield gauge(
            "stanchion_rack_connected", "Whether the rack is linked to this region process.", "rack",
            values=[((system_id,), float(is_up)) for system_id, is_up in up.items()],
        )  # fmt: skip
        yield gauge(
            "stanchion_rack_generation", "The generation that the rack last reported to hold.", "rack",
            values=[((rack.system_id,), rack.generation) for rack in racks if rack.generation is not None],
        )  # fmt: skip
        yield gauge(
            "stanchion_rack_sync_failed", "Whether the rack last reported that its sync failed.", "rack",
            values=[((rack.system_id,), float(rack.state == "failed")) for rack in racks],
        )  # fmt: skip
        yield gauge(
            "stanchion_rack_partial", "Whether the rack last reported to lack images that cannot be had.", "rack",
            values=[((rack.system_id,), float(rack.state == "partial")) for rack in racks],
        )  # fmt: skip
        yield gauge(
            "stanchion_rack_reported_timestamp_seconds", "When the rack last reported.", "rack",
            values=[((rack.system_id,), rack.reported.timestamp()) for rack in racks if rack.reported is not None],
        )  # fmt: skip

    def _of_imports(self) -> Iterator[Metric]:
        imports = self._imports
        if imports is None:
            return
        yield gauge(
            "stanchion_import_state", "In which state the running or last import is: 1 for that one.", "state",
            values=[((state,), float(state == imports.state)) for state in IMPORT_STATES],
        )  # fmt: skip
        yield gauge("stanchion_import_bytes", "Bytes that it has to fetch.", values=imports.bytes)
        yield gauge("stanchion_import_bytes_done", "Bytes of those that are there.", values=imports.bytes_done)
        if imports.last_success is not None:
            yield gauge(
                "stanchion_import_last_success_timestamp_seconds", "When an import last ended well.",
                values=imports.last_success,
            )  # fmt: skip
        if imports.last_end is not None:
            yield gauge(
                "stanchion_import_last_end_timestamp_seconds", "When an import last ended, however.",
                values=imports.last_end,
            )  # fmt: skip
