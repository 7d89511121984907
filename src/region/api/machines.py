"""The machines: making, finding, changing and deleting them, and having them commissioned, tested or marked."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from typing import Any, Final, TypeVar
from urllib.parse import urlencode

from region.answers.documents import BASE
from region.api.machine_documents import machine, whole_machine
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
    invalid_choice,
    text,
)
from region.api.parts import Parts
from region.nodes import names
from region.nodes.life import Input, NotAllowed
from region.nodes.requests import By, NewNode, Plan, RequestRefused
from region.nodes.runs import RunOptions
from region.nodes.statuses import NodeStatus
from region.nodes.store import Wanted
from region.nodes.transitions import NoSuchNode
from region.nodes.values import NodeName
from rpc.events import plain

T = TypeVar("T")

_POWER_TYPES: Final = ("manual",)

_FILTERS: Final = (
    Parameter("id", "Only machines with this system id; may be repeated.", many=True),
    Parameter("hostname", "Only machines with this host name; may be repeated.", many=True),
    Parameter("mac_address", "Only machines with this MAC address; may be repeated.", many=True),
    Parameter("status", "Only machines with this status, by number or name; may be repeated.", many=True),
    Parameter("architecture", "Only machines of this architecture, such as amd64/generic; may be repeated.", many=True),
    Parameter("tags", "Only machines with this tag, and with every other that is given; may be repeated.", many=True),
    Parameter("zone", "Only machines in this zone; all are in `default`.", many=True),
    Parameter("pool", "Only machines in this pool; all are in `default`.", many=True),
    Parameter("domain", "Only machines in this domain; none is in any.", many=True),
    Parameter("agent_name", "Only machines that were allocated for this agent; none was for any.", many=True),
    Parameter("limit", "How many at most, oldest first; without it, all.", kind="integer", minimum=1, maximum=1000),
    Parameter("after", "Go on after the machine with this system id, the last of the page before."),
)

_FIELDS: Final = (
    Parameter("hostname", "Its name; else one that is made from its system id."),
    Parameter("description", "Anything for people."),
    Parameter("architecture", "Such as amd64, or amd64/generic."),
    Parameter("subarchitecture", "`generic` unless the architecture says it."),
    Parameter("power_type", "`manual`: somebody switches it on and off."),
    Parameter("power_parameters", "A JSON object."),
)

_TEST_SCRIPTS: Final = Parameter(
    "testing_scripts", "Tests to run, by name or tag, separated by commas; `none` for none.", many=True
)
_ENABLE_SSH: Final = Parameter("enable_ssh", "Whether it stays on, with SSH, when all is done.", kind="boolean")

_PLAN: Final = (
    Parameter(
        "commissioning_scripts", "Scripts to run beside those that are built in, by name or tag, separated by commas.",
        many=True,
    ),
    _TEST_SCRIPTS,
    _ENABLE_SSH,
    Parameter("skip_bmc_config", "Whether its BMC is left as it is.", kind="boolean"),
    Parameter("skip_networking", "Whether the configuration of its network is left as it is.", kind="boolean"),
    Parameter("skip_storage", "Whether the configuration of its storage is left as it is.", kind="boolean"),
)  # fmt: skip

_COMMENT: Final = Parameter("comment", "Why, for people; it stands with the machine and in its events.")


async def list_machines(parts: Parts, call: Call) -> Reply:
    """All machines that are asked for, oldest first; or a page of them, with a link to the next."""
    values = call.values
    wanted = _wanted(values)
    if wanted is None:
        return document([])
    after = 0
    if "after" in values:
        after = (await _find(parts, values["after"])).id
    # Each page is made into text at once, and put where the answer is to be, which gives it away without a copy:
    # thousands of machines, and tens of megabytes, do not hold up what else there is to do.
    shown, count, last = BytesIO(), 0, ""
    shown.write(b"[")
    async for page in parts.nodes.pages(wanted, after=after, limit=values.get("limit")):
        texts = [json.dumps(machine(node), ensure_ascii=False) for node in page]
        shown.write(", ".join(texts if count == 0 else ["", *texts]).encode())
        count += len(page)
        last = page[-1].name.system_id
    shown.write(b"]")
    return Reply(shown.getvalue(), headers=_next(call, last, count))


def _next(call: Call, last: str, count: int) -> Mapping[str, str]:
    """The header that says where the next page is, if this one is full."""
    if count < call.values.get("limit", count + 1):
        return {}
    kept = {name: value for name, value in call.values.items() if name != "after"}
    query = urlencode({**kept, "after": last}, doseq=True)
    return {"Link": f'<{call.base}{BASE}/machines/?{query}>; rel="next"'}


async def list_power_parameters(parts: Parts, call: Call) -> Reply:
    """The power parameters of machines, by system id."""
    wanted = Wanted(system_ids=call.values.get("id", ()))
    return document(
        {node.name.system_id: dict(node.power_parameters) async for page in parts.nodes.pages(wanted) for node in page}
    )


async def create_machine(parts: Parts, call: Call) -> Reply:
    """A machine is made, and is commissioned unless that is not wanted."""
    values = call.values
    fields = _fields(values)
    new = NewNode(
        mac_addresses=_each("mac_addresses", names.mac_address, values["mac_addresses"]),
        **{"architecture": "", **fields},
    )
    if len(set(new.mac_addresses)) != len(new.mac_addresses):
        raise Invalid({"mac_addresses": ["A MAC address is given twice."]})
    plan = _plan(values) if values.get("commission", True) else None
    try:
        node = await parts.node_requests.create(new, _by(call), plan)
    except RequestRefused as refused:
        raise Invalid(refused.messages) from refused
    return await _shown(parts, node)


async def read_machine(parts: Parts, call: Call) -> Reply:
    """One machine."""
    return await _shown(parts, await _find(parts, call.path["system_id"]))


async def update_machine(parts: Parts, call: Call) -> Reply:
    """A machine gets other values; those that are not given stay."""
    node = await _find(parts, call.path["system_id"])
    fields = _fields(call.values)
    try:
        await parts.node_requests.update(node, fields)
    except RequestRefused as refused:
        raise Invalid(refused.messages) from refused
    except NoSuchNode as gone:
        raise _no_machine(call.path["system_id"]) from gone
    return await _shown(parts, node)


async def delete_machine(parts: Parts, call: Call) -> Reply:
    """A machine is forgotten."""
    node = await _find(parts, call.path["system_id"])
    try:
        await parts.node_requests.delete(node, _by(call))
    except NoSuchNode as gone:
        raise _no_machine(call.path["system_id"]) from gone
    return NOTHING


async def commission_machine(parts: Parts, call: Call) -> Reply:
    """A machine is to be commissioned."""
    return await _begun(parts, call, parts.node_requests.commission)


async def test_machine(parts: Parts, call: Call) -> Reply:
    """A machine is to be tested."""
    return await _begun(parts, call, parts.node_requests.test)


async def abort_machine(parts: Parts, call: Call) -> Reply:
    """What is being done with a machine is to end."""
    return await _changed(parts, call, Input.ABORT)


async def mark_machine_broken(parts: Parts, call: Call) -> Reply:
    """A machine is broken."""
    return await _changed(parts, call, Input.MARK_BROKEN)


async def mark_machine_fixed(parts: Parts, call: Call) -> Reply:
    """A machine is mended."""
    return await _changed(parts, call, Input.MARK_FIXED)


async def read_token(parts: Parts, call: Call) -> Reply:
    """The credentials of a machine, while it has some."""
    node = await _find(parts, call.path["system_id"])
    token = await parts.nodes.token(node)
    if token is None:
        return document(None)
    return document(
        {
            "consumer_key": token.consumer_key, "token_key": token.token_key, "token_secret": token.token_secret,
        }
    )  # fmt: skip


async def read_power_parameters(parts: Parts, call: Call) -> Reply:
    """The power parameters of a machine."""
    node = await parts.nodes.read(call.path["system_id"])
    if node is None:
        raise _no_machine(call.path["system_id"])
    return document(dict(node.power_parameters))


async def _begun(parts: Parts, call: Call, begin: Callable[[NodeName, Plan, By], Any]) -> Reply:
    node = await _find(parts, call.path["system_id"])
    try:
        await begin(node, _plan(call.values), _by(call))
    except RequestRefused as refused:
        raise Invalid(refused.messages) from refused
    except NotAllowed as error:
        raise ApiError(text(str(error), 409)) from error
    except NoSuchNode as gone:
        raise _no_machine(call.path["system_id"]) from gone
    return await _shown(parts, node)


async def _changed(parts: Parts, call: Call, given: Input) -> Reply:
    node = await _find(parts, call.path["system_id"])
    try:
        await parts.node_requests.change(node, given, call.values.get("comment", ""), _by(call))
    except NotAllowed as error:
        raise ApiError(text(str(error), 409)) from error
    except NoSuchNode as gone:
        raise _no_machine(call.path["system_id"]) from gone
    return await _shown(parts, node)


async def _shown(parts: Parts, node: NodeName) -> Reply:
    found = await parts.nodes.read(node.system_id)
    if found is None:
        raise _no_machine(node.system_id)
    return document(whole_machine(found, await parts.nodes.problems(found)))


async def _find(parts: Parts, wanted: str) -> NodeName:
    node = await parts.nodes.find(wanted)
    if node is None:
        raise _no_machine(wanted)
    return node


def _no_machine(wanted: str) -> NotFound:
    return NotFound(f"There is no machine {wanted!r}: none has that system id or host name.")


def _by(call: Call) -> By:
    return By(call.key.name if call.key is not None else "", call.correlation)


def _plan(values: Mapping[str, Any]) -> Plan:
    options = {name: values[name] for name in ("enable_ssh", "skip_bmc_config", "skip_networking", "skip_storage")
               if name in values}  # fmt: skip
    return Plan(
        _listed(values.get("commissioning_scripts")), _listed(values.get("testing_scripts")), RunOptions(**options)
    )


def _listed(values: Sequence[str] | None) -> Sequence[str] | None:
    """What is given in one value or several, each of them maybe with commas; None if nothing is given."""
    if values is None:
        return None
    found = [word.strip() for value in values for word in value.split(",")]
    return [word for word in found if word] or None


def _fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a machine that are given, as they are stored."""
    found: dict[str, Any] = {}
    if values.get("hostname"):
        found["hostname"] = _one("hostname", names.hostname, values["hostname"])
    if "description" in values:
        found["description"] = values["description"]
    if "architecture" in values:
        subarchitecture = values.get("subarchitecture", "")
        found["architecture"] = _one(
            "architecture", lambda given: names.architecture(given, subarchitecture), values["architecture"]
        )
    elif "subarchitecture" in values:
        raise Invalid({"subarchitecture": ["Give the architecture too, or both in one as `amd64/generic`."]})
    if "power_type" in values:
        if values["power_type"] not in _POWER_TYPES:
            raise invalid_choice("power_type", values["power_type"], _POWER_TYPES)
        found["power_type"] = values["power_type"]
    if "power_parameters" in values:
        found["power_parameters"] = _one("power_parameters", _object, values["power_parameters"])
    return found


def _object(given: str) -> Mapping[str, Any]:
    """:raises ValueError: if it is no JSON object that a database takes."""
    try:
        value = json.loads(given or "{}")
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        raise ValueError("This is not JSON.") from None
    if not isinstance(value, dict):
        raise ValueError("This is not a JSON object.")
    if not _is_storable(value, _DEEPEST):
        raise ValueError(f"This has a NUL, or half a character, in it, or is nested deeper than {_DEEPEST}.")
    return value


_DEEPEST: Final = 16
"""How deep the JSON of a parameter may be nested."""


def _is_storable(value: Any, deepest: int) -> bool:
    match value:
        case dict() | list() if not deepest:
            return False
        case dict():
            return all(_is_storable(each, deepest - 1) for pair in value.items() for each in pair)
        case list():
            return all(_is_storable(each, deepest - 1) for each in value)
        case str():
            return plain(value, len(value) + 1) == value
    return True


def _one(name: str, read: Callable[[str], T], given: str) -> T:
    try:
        return read(given)
    except ValueError as error:
        raise Invalid({name: [str(error)]}) from None


def _each(name: str, read: Callable[[str], T], given: Sequence[str]) -> tuple[T, ...]:
    return tuple(_one(name, read, each) for each in given)


def _wanted(values: Mapping[str, Any]) -> Wanted | None:
    """The filters of a list; None if nothing can be what they say."""
    for name in ("zone", "pool"):
        if name in values and "default" not in values[name]:
            return None
    for name in ("domain", "agent_name"):
        if name in values and "" not in values[name]:
            return None
    return Wanted(
        system_ids=values.get("id", ()),
        hostnames=[each.lower() for each in values.get("hostname", ())],
        mac_addresses=_each("mac_address", names.mac_address, values.get("mac_address", ())),
        statuses=_each("status", _status, values.get("status", ())),
        architectures=_each("architecture", names.architecture, values.get("architecture", ())),
        tags=_listed(values.get("tags")) or (),
    )


def _status(given: str) -> NodeStatus:
    """:raises ValueError: if it is neither the number nor the name of a status."""
    known = {str(int(each)): each for each in NodeStatus} | {each.label.lower(): each for each in NodeStatus}
    status = known.get(given.strip().lower().replace("_", " "))
    if status is None:
        listed = ", ".join(f"'{each.label}'" for each in NodeStatus)
        raise ValueError(f"'{given}' is not a valid status.  It should be one of: {listed}.")
    return status


_GONE: Final = "There is no such machine."
_WRONG: Final = "The request is wrong; the text, or the JSON object of messages by field, says what is."
_NOT_NOW: Final = "Its status does not allow that; the text says what it does."
_MACHINE: Final = "The machine."
_ONE: Final = "/machines/{system_id}/"

OPERATIONS: Final = (
    Operation(
        "GET", "/machines/", "Machines", "read", list_machines,
        "The machines, oldest first. With `limit`, a page of them; the header `Link` says where the next one is.",
        parameters=_FILTERS, answers={200: "The list.", 400: _WRONG, 404: "There is no machine to go on `after`."},
    ),
    Operation(
        "GET", "/machines/", "Machines", "power_parameters", list_power_parameters,
        "The power parameters of machines, by system id.", op="power_parameters",
        parameters=(Parameter("id", "Only machines with this system id; may be repeated.", many=True),),
        answers={200: "The parameters.", 400: _WRONG},
    ),
    Operation(
        "POST", "/machines/", "Machines", "create", create_machine,
        "Make a machine, and begin to commission it: it is to be switched on.",
        parameters=(
            *(Parameter(each.name, each.doc, required=each.name == "architecture") for each in _FIELDS),
            Parameter("mac_addresses", "A MAC address of it; may be repeated.", required=True, many=True),
            Parameter("commission", "Whether to commission it now; true by default.", kind="boolean"),
            *_PLAN,
        ),
        answers={200: _MACHINE, 400: _WRONG},
    ),
    Operation(
        "GET", _ONE, "Machine", "read", read_machine, "One machine, by its system id or its host name.",
        answers={200: _MACHINE, 404: _GONE},
    ),
    Operation(
        "GET", "/nodes/{system_id}/", "Node", "read", read_machine, "The same.", answers={200: _MACHINE, 404: _GONE},
    ),
    Operation(
        "PUT", _ONE, "Machine", "update", update_machine, "Give a machine other values.", parameters=_FIELDS,
        answers={200: _MACHINE, 400: _WRONG, 404: _GONE},
    ),
    Operation(
        "DELETE", _ONE, "Machine", "delete", delete_machine,
        "Forget a machine, with all that it ever ran. Its events stay.",
        answers={204: "It is forgotten.", 404: _GONE},
    ),
    Operation(
        "POST", _ONE, "Machine", "commission", commission_machine,
        "Begin to commission a machine: it is to be switched on, or on again.", op="commission", parameters=_PLAN,
        answers={200: _MACHINE, 400: _WRONG, 404: _GONE, 409: _NOT_NOW},
    ),
    Operation(
        "POST", _ONE, "Machine", "test", test_machine,
        "Begin to test a machine, without commissioning it.", op="test", parameters=(_TEST_SCRIPTS, _ENABLE_SSH),
        answers={200: _MACHINE, 400: _WRONG, 404: _GONE, 409: _NOT_NOW},
    ),
    Operation(
        "POST", _ONE, "Machine", "abort", abort_machine, "End what is being done with a machine.", op="abort",
        parameters=(_COMMENT,), answers={200: _MACHINE, 404: _GONE, 409: _NOT_NOW},
    ),
    Operation(
        "POST", _ONE, "Machine", "mark_broken", mark_machine_broken, "Say that a machine is broken.",
        op="mark_broken", parameters=(_COMMENT,), answers={200: _MACHINE, 404: _GONE, 409: _NOT_NOW},
    ),
    Operation(
        "POST", _ONE, "Machine", "mark_fixed", mark_machine_fixed,
        "Say that a machine is mended: it is ready, or new if no commissioning has ended well.",
        op="mark_fixed", parameters=(_COMMENT,), answers={200: _MACHINE, 404: _GONE, 409: _NOT_NOW},
    ),
    Operation(
        "GET", _ONE, "Machine", "get_token", read_token,
        "The OAuth credentials with which a machine speaks to the metadata service; null while it has none.",
        op="get_token", answers={200: "`consumer_key`, `token_key` and `token_secret`; or null.", 404: _GONE},
    ),
    Operation(
        "GET", _ONE, "Machine", "power_parameters", read_power_parameters, "The power parameters of a machine.",
        op="power_parameters", answers={200: "The parameters.", 404: _GONE},
    ),
)  # fmt: skip
