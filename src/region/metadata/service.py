"""The metadata service, at ``/MAAS/metadata/``: what machines ask for, and what they report.

Every request but the list of versions is authenticated with the node's own token (OAuth 1.0, PLAINTEXT), and a node
sees and tells of itself alone. A report is answered 2xx when, and only when, it is committed. What is wrong with a
request is said before any work begins; what fails later is the region's own fault, and never a 4xx.

Paths may have repeated slashes (cloud-init makes them). Versions are ``latest`` and ``2012-03-01``.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final, Protocol

from attrs import evolve, field, frozen
from twisted.logger import Logger
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET

from region.api.forms import parse_body, parse_plain, parse_query
from region.api.oauth import Unauthorized, read_claim
from region.api.operations import JSON, TEXT, ApiError, BadRequest, NotFound, Reply, text
from region.api.responding import authorization_of, body_size, content_type_of, new_correlation, read_body, respond
from region.commissioning.intake import SignalRefused, TooMuch, UnknownNode
from region.commissioning.signals import Signal, StatusMessage
from region.database import Database
from region.metadata.parsing import parse_message, parse_signal
from region.metadata.room import Room
from region.metadata.userdata import user_data
from region.nodes import tokens
from region.nodes.statuses import NodeStatus
from region.nodes.values import NodeName, Standing
from region.scripts.archive import DevicesUnknown
from rpc.fetch import RunInThread

log = Logger()

VERSIONS: Final = ("2012-03-01", "latest")
INLINE: Final = 16 << 10
"""Bytes of a body that are read at once; a larger one is read in a thread."""

PLAIN: Final = 512 << 10
"""The same of a body that needs only to be cut: that is done before a thread would have begun."""

REMEMBERED: Final = 10_000
"""Tokens whose secrets are remembered."""
AT_ONCE: Final = 32 << 20
"""Bytes of bodies that are looked into and stored at once; others wait, on the disk those that are large."""

RATE_RETRY_SECONDS: Final = 600
"""When a node that reports too much may go on."""

ACTIVE: Final = frozenset({NodeStatus.COMMISSIONING, NodeStatus.TESTING})
"""While a node has one of these there is something for its runner to do."""


@frozen
class Known:
    """The node that a token is of. ``retired``: the token was replaced, or the node is done, and what comes with it
    belongs to what is over; ``expired``: it is good no more. ``token`` is the token's public part."""

    name: NodeName
    status: NodeStatus
    secret: str = field(repr=False)
    retired: bool = False
    expired: bool = False
    token: str = field(default="", repr=False)


class INodes(Protocol):
    """Who knows the nodes' tokens."""

    async def find(self, consumer_key: str, token_key: str) -> Known | None:
        """The node with these first two parts of a token."""


class NodeTokens:
    """The tokens in PostgreSQL."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def find(self, consumer_key: str, token_key: str) -> Known | None:
        """As :meth:`INodes.find`."""
        holder = await tokens.find(self._database, consumer_key, token_key)
        if holder is None:
            return None
        token = holder.token
        retired = token.expires is not None
        return Known(holder.node, holder.status, token.token_secret, retired, holder.expired, token.token_key)


class IIntake(Protocol):
    """Who stores what nodes report; :class:`region.commissioning.intake.Intake` is one."""

    async def signal(self, node: NodeName, signal: Signal, *, retired: bool = False, token: str = "") -> Standing:
        """Store a signal; where the node stands, once that is committed. SignalRefused if the signal is wrong, and
        UnknownNode if the token is not that node's, or is good no more."""

    async def message(self, node: NodeName, message: StatusMessage, *, retired: bool = False) -> None:
        """Store a status message."""

    async def ping(self, node: NodeName, heard: str) -> None:
        """A node was heard of in another way."""

    async def standing(self, node: NodeName, *, retired: bool = False) -> Standing:
        """Where the node stands."""


class IScripts(Protocol):
    """Who has the scripts of a node."""

    async def pending(self, node_id: int) -> bytes | None:
        """The archive of the scripts that the node still has to run; None if there are none.

        :raises DevicesUnknown: if it is to ask again in a moment.
        """


@frozen
class MetadataParts:
    """What the service is made over."""

    nodes: INodes
    intake: IIntake
    scripts: IScripts
    run_in_thread: RunInThread


class MetadataResource(Resource):
    """``/MAAS/metadata``, in a site of :class:`~region.api.site.ApiRequest`."""

    isLeaf = True

    def __init__(self, parts: MetadataParts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # twisted.web is not typed
        self._parts = parts
        self._remembered: OrderedDict[tuple[str, str], Known] = OrderedDict()
        self._room = Room(AT_ONCE)

    def render(self, request: Any) -> int:
        """Answer one request."""
        correlation = new_correlation()

        def finish(body: bytes) -> None:
            if request.method != b"HEAD":
                request.write(body)
            request.finish()

        responding = respond(request, correlation, self._answer(request))
        gone = request.notifyFinish()
        gone.addErrback(lambda _: responding.cancel())
        responding.addCallback(finish)
        # respond() turns every failure into a response; what is left is a client that is gone.
        responding.addErrback(
            lambda failure: log.debug("Nobody reads the answer [{id}]: {why}", id=correlation, why=failure.value)
        )
        return NOT_DONE_YET

    async def _answer(self, request: Any) -> Reply:
        path = tuple(part.decode("utf-8", "replace") for part in request.postpath if part)
        method = "GET" if request.method == b"HEAD" else request.method.decode("ascii", "replace")
        match path:
            case ():
                _require(method, "GET")
                return text("\n".join(VERSIONS) + "\n")
            case ("status", system_id):
                return await self._status(request, method, system_id)
            case (version, *rest) if version in VERSIONS:
                return await self._versioned(request, method, tuple(rest))
        raise NotFound(
            f"There is nothing at {request.path.decode('utf-8', 'replace')}; the versions are {', '.join(VERSIONS)}."
        )

    async def _versioned(self, request: Any, method: str, path: tuple[str, ...]) -> Reply:
        if not path and method == "POST":
            return await self._operation(request, await self._authenticated(request, remembered=True))
        known = await self._authenticated(request)
        _require(method, *(("GET", "POST") if not path else ("GET",)))
        match path:
            case ():
                return text("maas-scripts\nmeta-data/\nuser-data\n")
            case ("meta-data",):
                return text("\n".join(sorted(_items(known.name))))
            case ("meta-data", item) if item in _items(known.name):
                return text(_items(known.name)[item])
            case ("user-data",) if known.status in ACTIVE:
                content = await self._parts.run_in_thread(user_data)
                return Reply(content, 200, "application/octet-stream")
            case ("user-data",):
                raise NotFound(f"Node {known.name.hostname} is {known.status.label}: it has no user-data.")
            case ("maas-scripts",):
                return await self._scripts(known)
        raise NotFound(f"There is nothing at {request.path.decode('utf-8', 'replace')}.")

    async def _scripts(self, known: Known) -> Reply:
        if not known.retired:
            await self._parts.intake.ping(known.name, "fetched its scripts")
        try:
            standing = await self._parts.intake.standing(known.name, retired=known.retired)
        except UnknownNode as error:
            raise Unauthorized(f"The token is of no node any more: {error}.") from error
        try:
            archive = None if standing.stop else await self._parts.scripts.pending(known.name.id)
        except DevicesUnknown as error:
            raise ApiError(text(str(error), 503, **{"Retry-After": "2", **_headers(standing)})) from error
        if archive is None:
            return Reply(status=204, content_type="", headers=_headers(standing))
        return Reply(archive, 200, "application/x-tar", _headers(standing))

    async def _operation(self, request: Any, known: Known) -> Reply:
        async with self._room.of(body_size(request)):
            return await self._signal(request, known)

    async def _signal(self, request: Any, known: Known) -> Reply:
        _, _, query = request.uri.partition(b"?")
        body = read_body(request)
        content_type = content_type_of(request)
        plain = parse_plain(content_type, body) if INLINE < len(body) <= PLAIN else None

        def parse() -> Signal:
            form = {**parse_query(query)}
            fields = parse_body(content_type, body) if plain is None else plain
            for name, values in fields.items():
                form[name] = (*form.get(name, ()), *values)  # type: ignore[arg-type]  # a query's values are text
            ops = form.pop("op", ())
            if len(ops) != 1 or ops[0] != "signal":
                found = ", ".join(str(op)[:40] for op in ops) or "none"
                raise BadRequest(f"Unrecognised signature: method=POST op={found}\nIt has this value of op: signal.")
            return parse_signal(form)

        at_once = len(body) <= INLINE or plain is not None
        signal = parse() if at_once else await self._parts.run_in_thread(parse)
        try:
            standing = await self._parts.intake.signal(known.name, signal, retired=known.retired, token=known.token)
        except UnknownNode as error:
            raise Unauthorized(f"{error}.") from None
        except SignalRefused as error:
            raise _refused("signal", known, error) from None
        if _wants_json(request):
            document: Mapping[str, Any] = {
                "status": int(standing.status),
                "status_name": standing.status.label,
                "stop": standing.stop,
            }
            return Reply(json.dumps(document).encode(), 200, JSON, _headers(standing))
        # The word that runners of MAAS 2.x look for, and nothing else.
        return Reply(b"OK", 200, TEXT, _headers(standing))

    async def _status(self, request: Any, method: str, system_id: str) -> Reply:
        known = await self._authenticated(request)
        _require(method, "POST")
        if known.name.system_id != system_id:
            raise ApiError(text(f"The token is not that of node {system_id[:40]}.", 403))
        async with self._room.of(body_size(request)):
            body = read_body(request)
            run_in_thread = self._parts.run_in_thread
            message = parse_message(body) if len(body) <= INLINE else await run_in_thread(parse_message, body)
            try:
                await self._parts.intake.message(known.name, message, retired=known.retired)
            except UnknownNode as error:
                raise Unauthorized(f"{error}.") from None
            except SignalRefused as error:
                raise _refused("status message", known, error) from None
        return Reply(status=204, content_type="")

    async def _authenticated(self, request: Any, *, remembered: bool = False) -> Known:
        """Whose request it is. ``remembered``: what was known of its token before will do. Its secret never changes,
        and the transaction that the request is for looks whether it is still good."""
        claim = read_claim(authorization_of(request))
        key = (claim.consumer, claim.token)
        before = self._remembered.get(key) if remembered else None
        if before is not None and claim.proves(before.secret):
            self._remembered.move_to_end(key)
            return before
        known = await self._parts.nodes.find(claim.consumer, claim.token) if claim.is_plausible else None
        if not claim.proves(known.secret if known else None) or known is None:
            raise Unauthorized("No node has this token, or its secret is wrong.")
        if known.expired:
            raise Unauthorized(
                f"The token of node {known.name.hostname} has expired: it was replaced, or the node is done since long."
            )
        if known.token:
            self._remembered[key] = evolve(known, retired=False)
            if len(self._remembered) > REMEMBERED:
                self._remembered.popitem(last=False)
        return known


def _refused(what: str, known: Known, error: SignalRefused) -> ApiError:
    """The answer to what cannot be stored."""
    if not isinstance(error, TooMuch):
        return BadRequest(f"The {what} cannot be stored: {error}.")
    log.warn("A {what} of {node} is not stored: {reason}", what=what, node=known.name.hostname, reason=str(error))
    headers = {"Retry-After": str(RATE_RETRY_SECONDS)} if error.is_rate else {}
    return ApiError(text(f"The {what} cannot be stored: {error}.", 429 if error.is_rate else 400, **headers))


def _items(node: NodeName) -> Mapping[str, str]:
    return {
        "instance-id": node.system_id,
        "local-hostname": node.hostname,
        "public-keys": "",
        # cloud-init reads it as YAML; there is nothing that every machine must be told.
        "vendor-data": "#cloud-config\n{}\n",
    }


def _headers(standing: Standing) -> Mapping[str, str]:
    return {"X-Stanchion-Status": standing.status.label, "X-Stanchion-Stop": "true" if standing.stop else "false"}


def _require(method: str, *allowed: str) -> None:
    if method not in allowed:
        listed = ", ".join(allowed)
        raise ApiError(text(f"{method} cannot be used here; use {' or '.join(allowed)}.", 405, Allow=listed))


def _wants_json(request: Any) -> bool:
    accepted = request.requestHeaders.getRawHeaders(b"Accept", [b""])[0]
    return b"application/json" in accepted
