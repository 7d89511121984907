"""From an HTTP request to an operation of the table, and from what it answers to an HTTP response.

Every response has a correlation id. A request that is wrong is answered with 4xx and a text that says what is wrong;
everything else that goes wrong is the region's own: 5xx, with the log holding the details under that id.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from klein import Klein
from klein.resource import KleinResource
from twisted.internet.defer import Deferred
from twisted.web.iweb import IRequest
from werkzeug.exceptions import BadHost
from werkzeug.exceptions import NotFound as NoSuchPath

from region.api.checking import checked
from region.api.forms import FileValue, parse_body, parse_query
from region.api.oauth import Authenticator
from region.api.operations import CONTENT, BadRequest, Call, NotFound, Operation, Reply, text
from region.api.parts import Parts
from region.api.responding import authorization_of, content_type_of, new_correlation, read_body, respond, write
from region.api.routes import OPERATIONS
from region.images.threads import in_thread
from rpc.fetch import RunInThread

INLINE: Final = 16 << 10
"""Bytes of a body that are read at once; a larger one may take a third of a second and is read in a thread."""

_HOST: Final = re.compile(r"[A-Za-z0-9._~\[\]:-]{1,255}\Z")


class Api:
    """The API over ``parts``. :meth:`resource` is to be put at ``/MAAS/api/2.0``, in a site of :class:`ApiRequest`."""

    def __init__(
        self,
        parts: Parts,
        authenticator: Authenticator,
        operations: Sequence[Operation] = OPERATIONS,
        *,
        run_in_thread: RunInThread = in_thread,
    ) -> None:
        self._parts = parts
        self._authenticator = authenticator
        self._run_in_thread = run_in_thread
        self._app = Klein()
        # A name with slashes in it is no other place, to which a client is to be redirected.
        self._app.url_map.merge_slashes = False
        by_path: dict[str, dict[tuple[str, str | None], Operation]] = {}
        for operation in operations:
            by_path.setdefault(operation.path, {})[operation.method, operation.op] = operation
        for path, table in by_path.items():
            self._route(path, table)
        self._app.handle_errors(NoSuchPath)(self._no_such_path)

    def resource(self) -> Any:
        """The resource for a twisted.web site."""
        return _Addressed(self._app, self._no_address)

    def _route(self, path: str, table: Mapping[tuple[str, str | None], Operation]) -> None:
        def called(request: IRequest, **names: str) -> Deferred[bytes]:
            return self._respond(request, table, names)

        called.__name__ = path
        rule = re.sub(r"\{(\w+)\}", r"<\1>", path)
        self._app.route(rule, endpoint=path, strict_slashes=False)(called)

    def _no_address(self, request: Any) -> bytes:
        message = "The request's path is not percent-encoded UTF-8, or its Host header is not the name of a host."
        return write(request, text(message, 400), new_correlation())

    def _no_such_path(self, request: Any, failure: object) -> bytes:
        path = request.path.decode("utf-8", "replace")
        return write(request, text(f"There is nothing at {path}.", 404), new_correlation())

    def _respond(
        self, request: Any, table: Mapping[tuple[str, str | None], Operation], names: Mapping[str, str]
    ) -> Deferred[bytes]:
        correlation = new_correlation()
        return respond(request, correlation, self._answer(request, table, names, correlation))

    async def _answer(
        self,
        request: Any,
        table: Mapping[tuple[str, str | None], Operation],
        names: Mapping[str, str],
        correlation: str,
    ) -> Reply:
        method = "GET" if request.method == b"HEAD" else request.method.decode("ascii", "replace")
        methods = sorted({known for known, _ in table})
        if method not in methods:
            return text(f"{method} cannot be used here; use {' or '.join(methods)}.", 405, Allow=", ".join(methods))
        key = None
        if not all(operation.anonymous for operation in table.values()):
            key = await self._authenticator.authenticate(authorization_of(request))
        if unstorable := [name for name, value in names.items() if "\x00" in value]:
            raise NotFound(f"There is nothing with the {unstorable[0]} {names[unstorable[0]]!r}: it has a NUL in it.")
        operation, given = await self._chosen(request, table, method)
        call = Call(
            path=names,
            values=checked(operation, given),
            key=key,
            base=_base(request),
            correlation=correlation,
        )
        return await operation.handler(self._parts, call)

    async def _chosen(
        self, request: Any, table: Mapping[tuple[str, str | None], Operation], method: str
    ) -> tuple[Operation, Mapping[str, tuple[Any, ...]]]:
        """Which operation the request is for, by method and ``op``, and the parameters that it gives."""
        _, _, query_text = request.uri.partition(b"?")
        query = dict(parse_query(query_text))
        form: dict[str, tuple[Any, ...]] = {}
        if method != "GET":
            content_type, body = content_type_of(request), read_body(request)
            if any(known.raw for (of, _), known in table.items() if of == method):
                form = {CONTENT: (FileValue(body),)}
            elif len(body) <= INLINE:
                form = dict(parse_body(content_type, body))
            else:
                form = dict(await self._run_in_thread(parse_body, content_type, body))
        ops = {*query.pop("op", ()), *form.pop("op", ())} - {""}
        if len(ops) > 1:
            raise BadRequest(f"The request names more than one op: {', '.join(sorted(map(str, ops)))}.")
        op = str(ops.pop()) if ops else None
        operation = table.get((method, op))
        if operation is None:
            known = sorted(known or "none" for of, known in table if of == method)
            raise BadRequest(
                f"Unrecognised signature: method={method} op={op}\nIt has these values of op: {', '.join(known)}."
            )
        given = {name: (*query.get(name, ()), *form.get(name, ())) for name in (*query, *form)}
        return operation, given


class _Addressed(KleinResource):
    """Refuses what is no address, which Klein takes for an error of the region and logs with a traceback."""

    def __init__(self, app: Klein, refuse: Callable[[Any], bytes]) -> None:
        super().__init__(app)
        self._refuse = refuse

    def render(self, request: Any) -> Any:
        try:
            b"/".join((request.getRequestHostname(), *request.prepath, *request.postpath)).decode("utf-8")
            return super().render(request)
        except (UnicodeDecodeError, BadHost):
            return self._refuse(request)


def _base(request: Any) -> str:
    """The scheme and host that the client used, for absolute URIs."""
    host = request.requestHeaders.getRawHeaders(b"Host", [b""])[0].decode("ascii", "replace")
    scheme = "https" if request.isSecure() else "http"
    return f"{scheme}://{host if _HOST.match(host) else 'localhost'}"
