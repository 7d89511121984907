"""The API described for programs, from the table of routes: OpenAPI 3.1, and the format that MAAS's clients read."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from itertools import groupby
from typing import Any, Final

from region.answers.documents import BASE
from region.api.operations import BYTES, CONTENT, Operation, Parameter

_DOC: Final = (
    "Stanchion: which operating systems can be deployed right now, and the images that they are deployed from."
)
_RESTFUL: Final = frozenset({"create", "read", "update", "delete"})


def _operations() -> Sequence[Operation]:
    # The handlers of the table use this module, so the table is there only once both are imported.
    from region.api.routes import OPERATIONS

    return OPERATIONS


@lru_cache(maxsize=16)
def openapi(version: str, base: str) -> bytes:
    """The OpenAPI 3.1 document. ``base`` is the scheme and host that the client used."""
    paths: dict[str, Any] = {}
    for operation in _operations():
        paths.setdefault(operation.path, {"parameters": _path_parameters(operation.path)})
    by_route = sorted(_operations(), key=lambda one: (one.path, one.method))
    for (path, method), group in groupby(by_route, key=lambda one: (one.path, one.method)):
        paths[path][method.lower()] = _openapi_operation(list(group))
    document = {
        "openapi": "3.1.0",
        "info": {"title": "Stanchion API", "version": version, "summary": _DOC},
        "servers": [{"url": f"{base}{BASE}"}],
        "paths": paths,
        "components": {
            "securitySchemes": {
                "key": {
                    "type": "http",
                    "scheme": "OAuth",
                    "description": "OAuth 1.0 with PLAINTEXT signatures and a key `consumer:token:secret`; the "
                    "consumer's secret is empty.",
                }
            },
            "schemas": {
                "FieldErrors": {
                    "type": "object",
                    "additionalProperties": {"type": "array", "items": {"type": "string"}},
                    "description": "What is wrong with each field.",
                }
            },
        },
        "security": [{"key": []}],
    }
    return json.dumps(document, indent=1).encode()


def _openapi_operation(operations: Sequence[Operation]) -> dict[str, Any]:
    """What a method of a path does. OpenAPI has no ``op``; operations that differ in that alone are one."""
    first = operations[0]
    ops = [one.op for one in operations if one.op]
    query: list[dict[str, Any]] = []
    if ops:
        schema = {"type": "string", "enum": ops}
        required = len(ops) == len(operations)
        query.append(
            {"name": "op", "in": "query", "required": required, "description": "Which operation.", "schema": schema}
        )
    fields: dict[str, Any] = {}
    for parameter in {one.name: one for operation in operations for one in operation.parameters}.values():
        if first.method in ("GET", "DELETE") or (first.raw and parameter.name != CONTENT):
            found = {
                "name": parameter.name,
                "in": "query",
                "required": parameter.required,
                "description": parameter.doc,
            }
            query.append(found | {"schema": _schema(parameter)})
        else:
            fields[parameter.name] = _schema(parameter) | {"description": parameter.doc}
    described: dict[str, Any] = {
        "operationId": ".".join((first.resource, *(one.action for one in operations))),
        "summary": first.doc
        if len(operations) == 1
        else f"{first.resource}: {', '.join(one.action for one in operations)}",
        "description": "\n\n".join(f"`op={one.op}`: {one.doc}" if one.op else one.doc for one in operations),
        "responses": _responses(operations),
    }
    if query:
        described["parameters"] = query
    if first.raw:
        described["requestBody"] = {
            "required": True,
            "content": {BYTES: {"schema": {"description": fields[CONTENT]["description"]}}},
        }
    elif fields:
        schema_of_body = {"schema": {"type": "object", "properties": fields}}
        kinds = ("multipart/form-data", "application/x-www-form-urlencoded", "application/json")
        described["requestBody"] = {"content": dict.fromkeys(kinds, schema_of_body)}
    if first.anonymous:
        described["security"] = []
    return described


def _responses(operations: Sequence[Operation]) -> dict[str, Any]:
    said: dict[int, list[str]] = {}
    contents: dict[int, set[str]] = {}
    for one in operations:
        for status, words in one.answers.items():
            said.setdefault(status, []).append(words)
            if status != 204:
                plain = one.content.partition(";")[0]
                kinds = {plain} if status < 300 else {"application/json", "text/plain"}
                contents.setdefault(status, set()).update(kinds)
    if not operations[0].anonymous:
        said[401], contents[401] = ["The request is not signed with a good key."], {"text/plain"}
    responses: dict[str, Any] = {}
    for status in sorted(said):
        responses[str(status)] = {"description": " / ".join(said[status])}
        if status in contents:
            responses[str(status)]["content"] = {kind: {} for kind in sorted(contents[status])}
    responses["default"] = {
        "description": "Any other error. If it is the region's own, its log tells more under the `X-Correlation-Id`.",
        "content": {"text/plain": {}},
    }
    return responses


def _schema(parameter: Parameter) -> dict[str, Any]:
    kind = "string" if parameter.kind == "file" else parameter.kind
    schema: dict[str, Any] = {"type": kind}
    if parameter.kind == "file":
        schema["contentEncoding"] = "base64"
    if parameter.choices:
        schema["enum"] = list(parameter.choices)
    if parameter.minimum is not None:
        schema["minimum"] = parameter.minimum
    if parameter.maximum is not None:
        schema["maximum"] = parameter.maximum
    return {"type": "array", "items": schema} if parameter.many else schema


def _path_parameters(path: str) -> list[dict[str, Any]]:
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in path_names(path)]


def path_names(path: str) -> list[str]:
    """The names in a path's braces, in order."""
    return re.findall(r"\{(\w+)\}", path)


@lru_cache(maxsize=16)
def describe(base: str) -> bytes:
    """The description that ``maas`` and libmaas read; URIs are absolute, as they demand."""
    return json.dumps(_description(base) | {"hash": description_hash()}).encode()


@cache
def description_hash() -> str:
    """Changes when the API does; every answer carries it, and clients that kept an older description say so."""
    return hashlib.sha1(json.dumps(_description("")).encode(), usedforsecurity=False).hexdigest()


def _description(base: str) -> dict[str, Any]:
    resources = []
    operations = sorted(_operations(), key=lambda one: one.resource)
    for resource, group in groupby(operations, key=lambda one: one.resource):
        members = list(group)
        resources.append(
            {
                "name": resource,
                "anon": _handler(base, resource, members, [one for one in members if one.anonymous]),
                "auth": _handler(base, resource, members, [one for one in members if not one.anonymous]),
            }
        )
    return {"doc": _DOC, "resources": resources}


def _handler(
    base: str, resource: str, members: Iterable[Operation], callable_: Sequence[Operation]
) -> Mapping[str, Any] | None:
    if not callable_:
        return None
    path = next(iter(members)).path
    return {
        "name": f"{'Anon' if callable_[0].anonymous else ''}{resource}Handler",
        "doc": callable_[0].doc,
        "path": BASE + path,
        "uri": base + BASE + path,
        "params": path_names(path),
        "actions": [
            {
                "name": one.action,
                "doc": _action_doc(one),
                "method": one.method,
                "op": one.op,
                "restful": one.op is None and one.action in _RESTFUL,
            }
            for one in callable_
        ],
    }


def _action_doc(operation: Operation) -> str:
    lines = [operation.doc]
    lines += [f":param {parameter.name}: {parameter.doc}" for parameter in operation.parameters]
    return "\n".join(lines)
