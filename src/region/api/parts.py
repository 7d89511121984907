"""What the API is made over: the stores, the racks, the importer and the answers, each by what handlers use of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import Any, Protocol

from attrs import Factory, field, frozen

from region.answers.asking import Asker, IRackLinks, RackInfo
from region.answers.licensing import Validator
from region.answers.published import PublishedView
from region.answers.releases import Releases
from region.api.history import History
from region.events import EventStore
from region.images.job import JobStore
from region.images.receiving import Receiver
from region.images.sources import SourceStore
from region.images.store import GenerationStore
from region.images.uploads import UploadStore
from region.license_keys import LicenseKeyStore
from region.nodes.requests import NodeRequests
from region.nodes.store import NodeStore
from region.processes import Connections
from region.scripts.results import ResultStore
from region.scripts.store import ScriptStore
from region.tags.store import TagStore


class IRack(RackInfo, Protocol):
    """An enrolled rack as it is shown; :class:`region.racks.Rack` is one."""

    @property
    def system_id(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def enrolled(self) -> datetime: ...
    @property
    def last_connected(self) -> datetime | None: ...
    @property
    def last_disconnected(self) -> datetime | None: ...
    @property
    def reported(self) -> datetime | None: ...
    @property
    def revoked(self) -> datetime | None: ...


class IRackStore(Protocol):
    """The part of :class:`region.racks.RackStore` that handlers use."""

    async def forget(self, system_id: str) -> bool:
        """Remove a rack, so that its certificate is refused from now on. Whether there was one."""

    async def revoke(self, system_id: str) -> bool:
        """Serve a rack no more. Whether it was served until now."""

    async def rename(self, system_id: str, name: str) -> bool:
        """Give a rack another name; RackRefused if it cannot have that. Whether there is the rack."""


class IRacks(IRackLinks, Protocol):
    """The enrolled racks and their links; :class:`region.racks.RackRegistry` is one."""

    @property
    def store(self) -> IRackStore:
        """Where they are enrolled."""

    def enrolled(self) -> Mapping[str, IRack]:
        """Every enrolled rack by system id."""

    def revoked(self) -> Mapping[str, IRack]:
        """Every rack that was revoked and not forgotten, by system id."""

    async def refresh(self) -> None:
        """Read the enrolled racks again."""


class ISyncs(Protocol):
    """Who tells racks to fetch; :class:`region.syncing.SyncDriver` is one."""

    def consider(self, system_id: str, *, even_if_in_step: bool = False) -> bool:
        """Tell one rack to sync, if it is linked; whether a sync is under way now."""


class IImporter(Protocol):
    """Who imports; :class:`region.images.importer.Importer` is one."""

    async def request(self, trigger: str = "request") -> int:
        """Ask for an import; its id."""

    async def cancel(self) -> Any:
        """Stop the import that is running and the one that is queued."""

    async def is_importing(self) -> bool:
        """Whether an import is running or queued."""


class IVerifier(Protocol):
    """Who hashes this process's files again; :class:`rpc.verifying.Verifier` is one."""

    @property
    def status(self) -> dict[str, Any]:
        """The pass under way or the last one."""

    def request(self, rate: float | None = None) -> None:
        """Begin a pass now, or go on with the one under way; ``rate`` in bytes per second."""


@frozen
class Parts:
    """Everything that handlers use. ``connections`` tells how each rack is linked with whatever region process, by
    system id; ``software`` is this program's version."""

    releases: Releases
    asker: Asker
    published: PublishedView
    racks: IRacks
    connections: Callable[[], Awaitable[Mapping[str, Connections]]]
    syncs: ISyncs
    sources: SourceStore
    generations: GenerationStore
    jobs: JobStore
    importer: IImporter
    verifier: IVerifier
    uploads: UploadStore
    receiver: Receiver
    events: EventStore
    nodes: NodeStore
    node_requests: NodeRequests
    tags: TagStore
    software: str
    scripts: ScriptStore
    results: ResultStore
    license_keys: LicenseKeyStore
    validator: Validator
    history: History = field(init=False, default=Factory(lambda self: History(self.generations), takes_self=True))
