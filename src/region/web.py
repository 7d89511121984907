"""The region's HTTP server: one port for the API, the image stream and metrics, that finishes what it has begun.

A stopping region stops listening at once, lets the requests that are in progress end for as long as it may, and only
then closes the connections.
"""

from __future__ import annotations

from typing import Any, Final

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.web.resource import IResource, Resource
from twisted.web.server import Request, Site

from region.api.site import ApiRequest

log = Logger()

SIGNPOST: Final = (
    "This is a Stanchion region.  Its API is at /MAAS/api/2.0/ (described in /MAAS/api/2.0/openapi.json), its image "
    "stream at /MAAS/images-stream/streams/v1/index.json, what machines ask at /MAAS/metadata/, its metrics at "
    "/metrics.\n"
)
"""What someone reads who comes to the front door."""

IDLE_SECONDS: Final = 60.0
"""How long a kept-alive connection may say nothing."""


class _Request(ApiRequest):
    """A request that its site counts from its first byte of work to its end."""

    def process(self) -> None:
        site: RegionSite = self.channel.site  # type: ignore[attr-defined]  # set by Site.buildProtocol
        site.begun(self)
        self.notifyFinish().addBoth(lambda _: site.ended(self))
        super().process()  # type: ignore[no-untyped-call]  # twisted.web is not typed


class RegionSite(Site):
    """The site of a region. Requests that failed, or changed something, are logged; plain reads only at debug level."""

    requestFactory = _Request
    displayTracebacks = False
    noisy = False

    def __init__(self, root: Resource, reactor: Any) -> None:
        super().__init__(root, requestFactory=_Request, timeout=IDLE_SECONDS, reactor=reactor)  # type: ignore[no-untyped-call]  # as above
        self._active: set[Request] = set()
        self._drained: Deferred[None] | None = None

    def begun(self, request: Request) -> None:
        """Called by a request when its work begins."""
        self._active.add(request)

    def ended(self, request: Request) -> None:
        """Called by a request when it has been answered or its client is gone."""
        self._active.discard(request)
        if self._drained is not None and not self._active:
            drained, self._drained = self._drained, None
            drained.callback(None)

    async def drain(self, clock: IReactorTime, seconds: float) -> None:
        """Wait until no request is in progress, at most ``seconds``; say so if some had to be cut off."""
        if not self._active:
            return
        self._drained = Deferred()
        timer = clock.callLater(seconds, self._cut)
        await self._drained
        if timer.active():
            timer.cancel()

    def _cut(self) -> None:
        cut, self._active = self._active, set()
        log.warn("Stopping with {count} requests unanswered.", count=len(cut))
        drained, self._drained = self._drained, None
        for request in cut:
            request.loseConnection()
        if drained is not None:
            drained.callback(None)

    def log(self, request: Any) -> None:
        """Log one finished request."""
        plain = request.code < 400 and request.method in (b"GET", b"HEAD")
        (log.debug if plain else log.info)(
            "{client} {method} {uri} {status}",
            client=request.getClientAddress().host if hasattr(request.getClientAddress(), "host") else "-",
            method=request.method.decode("ascii", "replace"),
            # The query may hold what nobody should find in a log; the path does not.
            uri=request.path.decode("ascii", "replace"),
            status=request.code,
        )


class Signpost(Resource):
    """A place where there is nothing but other places: it says in plain text which, also for what is not there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # twisted.web is not typed

    def render_GET(self, request: Request) -> bytes:
        """Say where to go."""
        return self._say(request, 200, SIGNPOST)

    def getChild(self, path: bytes, request: Request) -> IResource:
        """What is at a path below that leads nowhere; the empty one is this place itself."""
        return self if path in (b"", b"index.html") else _Nowhere()

    @staticmethod
    def _say(request: Request, status: int, text: str) -> bytes:
        request.setResponseCode(status)
        request.setHeader(b"Content-Type", b"text/plain; charset=utf-8")
        return text.encode()


class _Nowhere(Signpost):
    isLeaf = True

    def render(self, request: Request) -> bytes:
        """Whatever the method, there is nothing."""
        path = request.path.decode("ascii", "backslashreplace")
        return self._say(request, 404, f"There is nothing at {path}.  {SIGNPOST}")


def tree(api: IResource, stream: IResource, metrics: IResource, metadata: IResource | None = None) -> Resource:
    """The resources of a region: ``/MAAS/api/2.0/``, ``/MAAS/images-stream/``, ``/MAAS/metadata/``, ``/metrics``."""
    root, maas, apis = Signpost(), Signpost(), Signpost()
    root.putChild(b"MAAS", maas)
    root.putChild(b"metrics", metrics)
    maas.putChild(b"api", apis)
    apis.putChild(b"2.0", api)
    maas.putChild(b"images-stream", stream)
    if metadata is not None:
        maas.putChild(b"metadata", metadata)
    return root
