"""How Prometheus reads a daemon's numbers: ``GET /metrics``.

The numbers are read in the reactor's thread, where they are made; turning them into text, which takes long when there
are many racks, is done in another one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final

from attrs import frozen
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.http import Request
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET, Site

from rpc.fetch import RunInThread

log = Logger()

IDLE_SECONDS: Final = 60.0


async def nothing() -> None:
    """There is nothing to look up."""


@frozen
class _Snapshot:
    families: tuple[Metric, ...]

    def collect(self) -> Iterator[Metric]:
        return iter(self.families)


class Metrics(Resource):
    """The numbers in ``registry``.

    :param refresh: looks up, before each answer, what has to be asked for elsewhere. It must not take long.
    """

    isLeaf = True

    def __init__(
        self,
        run_in_thread: RunInThread,
        refresh: Callable[[], Awaitable[None]] = nothing,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # twisted.web is not typed
        self._run_in_thread = run_in_thread
        self._refresh = refresh
        self._registry = registry

    def render_GET(self, request: Request) -> int:
        """Answer with the numbers of this moment, in the format that the client prefers."""
        answering = Deferred.fromCoroutine(self._answer(request))
        request.notifyFinish().addErrback(lambda reason: answering.cancel())
        answering.addErrback(self._failed, request)
        return NOT_DONE_YET

    async def _answer(self, request: Request) -> None:
        await self._refresh()
        snapshot: Any = _Snapshot(tuple(self._registry.collect()))
        encode, content_type = choose_encoder(request.getHeader("accept") or "")
        body = await self._run_in_thread(encode, snapshot)
        request.setHeader("content-type", content_type)
        request.setHeader("content-length", str(len(body)))
        request.write(body)
        request.finish()

    def _failed(self, reason: Failure, request: Request) -> None:
        if reason.check(CancelledError):
            log.debug("Whoever asked for the metrics did not wait for them.")
            return
        log.failure("The metrics could not be read", reason)
        request.setResponseCode(500)
        request.write(b"The metrics could not be read; the log says why.\n")
        request.finish()


class _QuietSite(Site):
    displayTracebacks = False
    noisy = False

    def log(self, request: object) -> None:
        """Nothing: each scrape would be a line in the log, which is about what happens."""


def metrics_site(metrics: Metrics, reactor: Any) -> Site:
    """A site that has ``/metrics`` and nothing else."""
    root = Resource()
    root.putChild(b"metrics", metrics)
    return _QuietSite(root, timeout=IDLE_SECONDS, reactor=reactor)  # type: ignore[no-untyped-call]  # as above
