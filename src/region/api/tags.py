"""The tags, in the form that clients of MAAS read, and with how far the evaluation of each has come beside it."""

from __future__ import annotations

import json
from collections.abc import Awaitable
from typing import Any, Final, TypeVar
from urllib.parse import quote

from region.answers.documents import BASE
from region.api.machine_documents import machine
from region.api.operations import (
    NOTHING,
    ApiError,
    Call,
    Invalid,
    NotFound,
    Operation,
    Parameter,
    Reply,
    document,
    text,
)
from region.api.parts import Parts
from region.nodes.store import Wanted
from region.tags.evaluator import NotEvaluated
from region.tags.store import NoSuchTag, Tag, TagConflict, TagInvalid

T = TypeVar("T")

_RETRY_SECONDS: Final = 5

_FIELDS: Final = (
    Parameter("name", "Its name: letters, digits, underscores and hyphens."),
    Parameter("definition", "An XPath over what lshw and lldp say of a machine; without it, people say which have it."),
    Parameter("comment", "Anything for people."),
    Parameter("kernel_opts", "Kernel options for the machines that have it."),
)


async def list_tags(parts: Parts, call: Call) -> Reply:
    """Every tag, by name."""
    counts = await parts.tags.counts()
    return document([_tag(tag, counts.get(tag.id, 0)) for tag in await parts.tags.list()])


async def create_tag(parts: Parts, call: Call) -> Reply:
    """A new tag. ``name`` is needed."""
    return document(_tag(await _refusing(parts.tags.create(**call.values)), 0))


async def read_tag(parts: Parts, call: Call) -> Reply:
    """One tag."""
    return await _shown(parts, await _refusing(parts.tags.get(call.path["name"])))


async def update_tag(parts: Parts, call: Call) -> Reply:
    """The fields that are given replace those of the tag."""
    return await _shown(parts, await _refusing(parts.tags.update(call.path["name"], **call.values)))


async def delete_tag(parts: Parts, call: Call) -> Reply:
    """The tag goes, also from all machines."""
    await _refusing(parts.tags.delete(call.path["name"]))
    return NOTHING


async def list_nodes(parts: Parts, call: Call) -> Reply:
    """The machines that have the tag."""
    tag = await _refusing(parts.tags.get(call.path["name"]))
    shown: list[bytes] = []
    async for page in parts.nodes.pages(Wanted(tags=(tag.name,))):
        # Page by page, so that thousands of machines do not hold up what else there is to do.
        shown += [json.dumps(machine(node), ensure_ascii=False).encode() for node in page]
    return Reply(b"[" + b", ".join(shown) + b"]")


async def rebuild_tag(parts: Parts, call: Call) -> Reply:
    """The tag is evaluated anew."""
    tag = await _refusing(parts.tags.rebuild(call.path["name"]))
    return document({"rebuilding": tag.name})


async def update_nodes(parts: Parts, call: Call) -> Reply:
    """Machines get the tag, or lose it."""
    values = call.values
    added, removed = await _refusing(
        parts.tags.change_nodes(
            call.path["name"], values.get("add", ()), values.get("remove", ()), definition=values.get("definition")
        )
    )
    return document({"added": added, "removed": removed})


async def _refusing(doing: Awaitable[T]) -> T:
    """What ``doing`` gives; what it refuses is an answer."""
    try:
        return await doing
    except TagInvalid as error:
        raise Invalid({error.field: [error.message]}) from error
    except NoSuchTag as error:
        raise NotFound(_sentence(error)) from error
    except TagConflict as error:
        raise ApiError(text(_sentence(error), 409)) from error
    except NotEvaluated as error:
        raise ApiError(text(f"{_sentence(error)} Try again.", 503, **{"Retry-After": str(_RETRY_SECONDS)})) from error


def _sentence(error: Exception) -> str:
    message = str(error)
    return message[:1].upper() + message[1:] + "."


async def _shown(parts: Parts, tag: Tag) -> Reply:
    counts = await parts.tags.counts()
    return document(_tag(tag, counts.get(tag.id, 0)))


def _tag(tag: Tag, nodes: int) -> dict[str, Any]:
    return {
        "name": tag.name,
        "definition": tag.definition,
        "comment": tag.comment,
        "kernel_opts": tag.kernel_opts,
        "evaluating": tag.is_evaluating,
        "problem": tag.problem,
        "machine_count": nodes,
        "resource_uri": f"{BASE}/tags/{quote(tag.name)}/",
    }


_GONE: Final = "There is no such tag."
_WRONG: Final = "A field is wrong; the JSON object of messages by field says what is."
_UNCHECKED: Final = "The definition could not be checked; the text says why. With `Retry-After`."
_ONE: Final = "/tags/{name}/"

OPERATIONS: Final[tuple[Operation, ...]] = (
    Operation(
        "GET", "/tags/", "Tags", "read", list_tags, "Every tag, by name.", answers={200: "The list."},
    ),
    Operation(
        "POST", "/tags/", "Tags", "create", create_tag,
        "Make a tag. One with a definition is evaluated on all machines.",
        parameters=(Parameter("name", _FIELDS[0].doc, required=True), *_FIELDS[1:]),
        answers={200: "The tag.", 400: _WRONG, 503: _UNCHECKED},
    ),
    Operation("GET", _ONE, "Tag", "read", read_tag, "One tag.", answers={200: "The tag.", 404: _GONE}),
    Operation(
        "PUT", _ONE, "Tag", "update", update_tag,
        "Change the fields that are given. Another definition is evaluated on all machines.", parameters=_FIELDS,
        answers={200: "The tag.", 400: _WRONG, 404: _GONE, 503: _UNCHECKED},
    ),
    Operation(
        "DELETE", _ONE, "Tag", "delete", delete_tag, "Remove a tag, also from all machines.",
        answers={204: "It is removed.", 404: _GONE},
    ),
    Operation(
        "GET", _ONE, "Tag", "nodes", list_nodes, "The machines that have the tag.", op="nodes",
        answers={200: "The machines.", 404: _GONE},
    ),
    Operation(
        "GET", _ONE, "Tag", "machines", list_nodes, "The same.", op="machines",
        answers={200: "The machines.", 404: _GONE},
    ),
    Operation(
        "POST", _ONE, "Tag", "rebuild", rebuild_tag, "Evaluate the tag anew on all machines.", op="rebuild",
        answers={200: "`rebuilding`, with the tag's name.", 404: _GONE, 409: "It has no definition."},
    ),
    Operation(
        "POST", _ONE, "Tag", "update_nodes", update_nodes,
        "Give a tag without a definition to machines, or take it from them.", op="update_nodes",
        parameters=(
            Parameter("add", "The system id of a machine that gets it; may be repeated.", many=True),
            Parameter("remove", "The system id of a machine that loses it; may be repeated.", many=True),
            Parameter("definition", "Change nothing unless this is the tag's definition."),
        ),
        answers={
            200: "How many were `added` and `removed`.", 400: _WRONG, 404: _GONE,
            409: "It has a definition, which finds its machines; or not the one that was given.",
        },
    ),
)  # fmt: skip
