"""The scripts that nodes run: list, read, add, change, revert, download, delete; as clients of MAAS know it."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any, Final, TypeVar

from region.answers.documents import BASE
from region.api.forms import FileValue
from region.api.operations import (
    BYTES,
    NOTHING,
    ApiError,
    BadRequest,
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
from region.images.threads import in_thread
from region.nodes.statuses import HardwareType, Parallel
from region.scripts.checks import HARDWARE, TYPES, choice
from region.scripts.values import NoSuchScript, Script, ScriptInvalid, ScriptProtected, ScriptVersion

T = TypeVar("T")

_HARDWARE_NAMES: Final = {
    HardwareType.NODE: "Node", HardwareType.CPU: "CPU", HardwareType.MEMORY: "Memory",
    HardwareType.STORAGE: "Storage", HardwareType.NETWORK: "Network",
}  # fmt: skip
_PARALLEL_NAMES: Final = {
    Parallel.DISABLED: "Disabled",
    Parallel.INSTANCE: "Run along other instances of this script",
    Parallel.ANY: "Run along any other script",
}

_INCLUDE: Final = Parameter("include_script", "With the contents of all versions, in base64.", kind="boolean")
_TAG: Final = Parameter("tag", "The tag.", required=True)

FIELDS: Final = (
    Parameter("script", "The script itself: as a file, or as text. At most 1 MiB.", kind="file"),
    Parameter("name", "What it is called, here and on the node."),
    Parameter("title", "A title, for people."),
    Parameter("description", "What it does, for people."),
    Parameter("tags", "Tags, with commas between them."),
    Parameter("type", "When it is run: commissioning or testing (default)."),
    Parameter("script_type", "The same, as metadata names it."),
    Parameter("hardware_type", "What it is about: node (default), cpu, memory, storage or network."),
    Parameter("parallel", "With what it may run at once: disabled (default), instance or any."),
    Parameter("timeout", "After how long it is given up: seconds, or HH:MM:SS; 0 (default): never."),
    Parameter("parameters", "Definitions of what it may be told, as JSON."),
    Parameter("packages", "What it needs, as JSON: lists by apt, snap and url."),
    Parameter("results", "What its results mean, for people, as JSON."),
    Parameter("destructive", "Whether it overwrites disks.", kind="boolean"),
    Parameter("may_reboot", "Whether it may restart the node.", kind="boolean"),
    Parameter("comment", "What this version changes, for people."),
    Parameter("for_hardware", "Not supported; must be empty."),
    Parameter("recommission", "Not supported; must be false.", kind="boolean"),
    Parameter("apply_configured_networking", "Not supported; must be false.", kind="boolean"),
)


async def list_scripts(parts: Parts, call: Call) -> Reply:
    """The scripts by name."""
    values = call.values
    found = await parts.scripts.list(
        script_type=read_choice("type", TYPES, values.get("type")),
        hardware_type=read_choice("hardware_type", HARDWARE, values.get("hardware_type")),
        filters=read_list(values.get("filters")),
    )
    return await _shown(parts, found, call)


async def create_script(parts: Parts, call: Call) -> Reply:
    """A new script. ``script``, and a name there or in ``name``, are needed."""
    given, content, comment = _given(call)
    if content is None:
        raise Invalid({"script": ["This field is required."]})
    script = await _refusing(parts.scripts.create(content, given, comment))
    versions = await parts.scripts.versions([script])
    return document(_document(script, versions[script.id]), 201, Location=_uri(script))


async def read_script(parts: Parts, call: Call) -> Reply:
    """One script, by name or number."""
    return await _one(parts, await _refusing(parts.scripts.get(call.path["name"])), call)


async def update_script(parts: Parts, call: Call) -> Reply:
    """The fields that are given replace those of the script; another content is a new version."""
    given, content, comment = _given(call)
    return await _one(parts, await _refusing(parts.scripts.update(call.path["name"], given, content, comment)), call)


async def delete_script(parts: Parts, call: Call) -> Reply:
    """The script goes with all its versions; results stay."""
    await _refusing(parts.scripts.delete(call.path["name"]))
    return NOTHING


async def download_script(parts: Parts, call: Call) -> Reply:
    """The script itself: its newest version, or another."""
    version = call.values.get("revision", call.values.get("rev"))
    return Reply(await _refusing(parts.scripts.content(call.path["name"], version)), 200, BYTES)


async def add_tag(parts: Parts, call: Call) -> Reply:
    """The script has a tag more."""
    return await _one(parts, await _refusing(parts.scripts.add_tag(call.path["name"], call.values["tag"])), call)


async def remove_tag(parts: Parts, call: Call) -> Reply:
    """The script has a tag less."""
    return await _one(parts, await _refusing(parts.scripts.remove_tag(call.path["name"], call.values["tag"])), call)


async def revert_script(parts: Parts, call: Call) -> Reply:
    """The script is what it was before."""
    try:
        to = int(call.values["to"])
    except ValueError:
        raise Invalid({"to": [f"'{call.values['to'][:40]}' is not a whole number."]}) from None
    return await _one(parts, await _refusing(parts.scripts.revert(call.path["name"], to)), call)


async def _refusing(doing: Awaitable[T]) -> T:
    """What ``doing`` gives; what it refuses becomes an answer."""
    try:
        return await doing
    except ScriptInvalid as error:
        raise Invalid(error.messages) from error
    except NoSuchScript as error:
        raise NotFound(f"{str(error)[:1].upper()}{str(error)[1:]}.") from error
    except ScriptProtected as error:
        raise ApiError(text(str(error), 409)) from error


def read_choice(name: str, words: Mapping[str, Any], given: str | None) -> Any:
    """What a parameter means that is one of ``words``; None if it is not given.

    :raises Invalid: if it is none of them.
    """
    if given is None:
        return None
    try:
        return choice(words, given)
    except ValueError as error:
        raise Invalid({name: [f"{error}."]}) from error


def read_list(given: str | None) -> tuple[str, ...]:
    """The parts of a parameter that has commas between them."""
    return tuple(part.strip() for part in (given or "").split(",") if part.strip())


def _given(call: Call) -> tuple[Mapping[str, object], bytes | None, str]:
    values = dict(call.values)
    script: FileValue | str | None = values.pop("script", None)
    comment = values.pop("comment", "")
    if "type" in values and values.setdefault("script_type", values["type"]) != values["type"]:
        raise BadRequest("`type` and `script_type` are the same, and are given differently; give one.")
    values.pop("type", None)
    return values, script.encode() if isinstance(script, str) else script.data if script else None, comment


async def _shown(parts: Parts, scripts: Sequence[Script], call: Call) -> Reply:
    with_content = call.values.get("include_script", False)
    versions = await parts.scripts.versions(scripts, with_content=with_content)

    def render() -> Reply:
        return document([_document(script, versions[script.id]) for script in scripts])

    return await in_thread(render) if with_content else render()


async def _one(parts: Parts, script: Script, call: Call) -> Reply:
    versions = await parts.scripts.versions([script], with_content=call.values.get("include_script", False))
    return await in_thread(lambda: document(_document(script, versions[script.id])))


def _document(script: Script, versions: Sequence[ScriptVersion]) -> Mapping[str, Any]:
    fields = script.fields
    return {
        "id": script.id,
        "name": fields.name,
        "title": fields.title,
        "description": fields.description,
        "tags": list(fields.tags),
        "type": fields.script_type.value,
        "type_name": f"{fields.script_type.label} script",
        "hardware_type": fields.hardware_type.value,
        "hardware_type_name": _HARDWARE_NAMES[fields.hardware_type],
        "parallel": fields.parallel.value,
        "parallel_name": _PARALLEL_NAMES[fields.parallel],
        "results": fields.results,
        "parameters": fields.parameters,
        "packages": fields.packages,
        "timeout": str(timedelta(seconds=fields.timeout_seconds)),
        "destructive": fields.destructive,
        "for_hardware": [],
        "may_reboot": fields.may_reboot,
        "recommission": False,
        "apply_configured_networking": False,
        "default": script.builtin,
        "history": [_version(version) for version in versions],
        "resource_uri": _uri(script),
    }


def _version(version: ScriptVersion) -> Mapping[str, Any]:
    shown: dict[str, Any] = {"id": version.id, "comment": version.comment, "created": moment(version.created)}
    if version.content is not None:
        shown["data"] = base64.b64encode(version.content).decode("ascii")
    return shown


def _uri(script: Script) -> str:
    return f"{BASE}/scripts/{script.name}/"


def moment(when: datetime | None) -> str | None:
    """A time as MAAS writes it where scripts are concerned (RFC 5322), in UTC."""
    return None if when is None else format_datetime(when.astimezone(UTC))


_GONE: Final = "There is no such script."
_WRONG: Final = "The request is wrong; the text, or the JSON object of messages by field, says what is."
_PROTECTED: Final = "It is built in, or a node has still to run it; the text says which."

OPERATIONS: Final[tuple[Operation, ...]] = (
    Operation(
        "GET", "/scripts/", "NodeScripts", "read", list_scripts, "The scripts that nodes may run, by name.",
        parameters=(
            Parameter("type", "Only those of this type: commissioning or testing."),
            Parameter("hardware_type", "Only those about this: node, cpu, memory, storage or network."),
            Parameter("filters", "Only those with one of these names or tags; with commas between them."),
            _INCLUDE,
        ),
        answers={200: "The list.", 400: _WRONG},
    ),
    Operation(
        "POST", "/scripts/", "NodeScripts", "create", create_script,
        "Add a script. What its own metadata says need not be said again, and cannot be contradicted, save `tags` and "
        "`timeout`.",
        parameters=FIELDS, answers={201: "The script.", 400: _WRONG},
    ),
    Operation(
        "GET", "/scripts/{name}/", "NodeScript", "read", read_script, "One script, by its name or its number.",
        parameters=(_INCLUDE,), answers={200: "The script.", 404: _GONE},
    ),
    Operation(
        "PUT", "/scripts/{name}/", "NodeScript", "update", update_script,
        "Change the fields that are given. Another `script` is a new version; what runs already keeps the old one.",
        parameters=FIELDS, answers={200: "The script.", 400: _WRONG, 404: _GONE, 409: _PROTECTED},
    ),
    Operation(
        "DELETE", "/scripts/{name}/", "NodeScript", "delete", delete_script,
        "Remove a script with all its versions; its results stay.",
        answers={204: "It is removed.", 404: _GONE, 409: _PROTECTED},
    ),
    Operation(
        "GET", "/scripts/{name}/", "NodeScript", "download", download_script, "The script itself.", op="download",
        parameters=(
            Parameter("revision", "The id of a version, as `history` has it.", kind="integer", minimum=0),
            Parameter("rev", "The same.", kind="integer", minimum=0),
        ),
        answers={200: "The script, byte for byte.", 404: _GONE}, content=BYTES,
    ),
    Operation(
        "POST", "/scripts/{name}/", "NodeScript", "add_tag", add_tag, "Give a script a tag.", op="add_tag",
        parameters=(_TAG,), answers={200: "The script.", 400: _WRONG, 404: _GONE, 409: _PROTECTED},
    ),
    Operation(
        "POST", "/scripts/{name}/", "NodeScript", "remove_tag", remove_tag, "Take a tag from a script.",
        op="remove_tag", parameters=(_TAG,), answers={200: "The script.", 404: _GONE, 409: _PROTECTED},
    ),
    Operation(
        "POST", "/scripts/{name}/", "NodeScript", "revert", revert_script,
        "Have an earlier version again, as a new one.", op="revert",
        parameters=(
            Parameter("to", "The id of a version, or how many to go back: -1 is the one before.", required=True),
        ),
        answers={200: "The script.", 400: _WRONG, 404: _GONE, 409: _PROTECTED},
    ),
)  # fmt: skip
