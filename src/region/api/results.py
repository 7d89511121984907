"""What scripts came to on a node: runs with their results, and their outputs to download, in the form that MAAS's
clients know. Beside the script's own outcome each result says what the region made of it."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from region.answers.documents import BASE
from region.api.operations import BYTES, BadRequest, Call, NotFound, Operation, Parameter, Reply, document
from region.api.parts import Parts
from region.api.scripts import moment, read_choice, read_list
from region.commissioning.signals import OUTPUTS
from region.images.threads import in_thread
from region.nodes.statuses import ResultType
from region.scripts.checks import HARDWARE, TYPES
from region.scripts.downloads import KINDS, as_tar, as_text, files_of
from region.scripts.results import CURRENT, Late, NoSuchNode, NoSuchRun, OutputsTooLarge, Result, Run

_TYPES: Final = {
    **TYPES, "1": ResultType.INSTALLATION, "installation": ResultType.INSTALLATION, "install": ResultType.INSTALLATION,
}  # fmt: skip
_EMPTY: Final = -1
"""The status of a run without results, as MAAS has it."""

_OUTPUT: Final = Parameter("include_output", "With what the scripts put out, in base64.", kind="boolean")
_FILTERS: Final = Parameter(
    "filters", "Only results with one of these script names, tags or result ids; with commas between them."
)
_HARDWARE: Final = Parameter("hardware_type", "Only those about this: node, cpu, memory, storage or network.")


async def list_results(parts: Parts, call: Call) -> Reply:
    """The runs of a node, newest first."""
    runs = await _runs(parts, call, result_type=read_choice("type", _TYPES, call.values.get("type")))
    return await _shown(call, runs, lambda shown: shown)


async def read_results(parts: Parts, call: Call) -> Reply:
    """One run of a node."""
    runs = await _runs(parts, call, run=call.path["id"])
    return await _shown(call, runs, lambda shown: shown[0])


async def download_results(parts: Parts, call: Call) -> Reply:
    """What the scripts of a run put out, as one text or as an archive."""
    kind, filetype = call.values.get("output", "combined"), call.values.get("filetype", "txt")
    [run] = await _runs(parts, call, run=call.path["id"], outputs=KINDS[kind], with_late=kind == "all")
    files = files_of(run, kind)
    if filetype == "txt":
        return Reply(await in_thread(as_text, files), 200, BYTES)
    folder = f"{run.node.hostname}-{run.result_type.name.lower()}-{run.id}"
    return Reply(
        await in_thread(as_tar, files, folder), 200, "application/x-xz",
        {"Content-Disposition": f'attachment; filename="{folder}.tar.xz"'},
    )  # fmt: skip


async def _runs(parts: Parts, call: Call, **wanted: Any) -> Sequence[Run]:
    values = call.values
    if values.get("include_output"):
        wanted["outputs"] = tuple(OUTPUTS)
    try:
        return await parts.results.runs(
            call.path["system_id"],
            hardware_type=read_choice("hardware_type", HARDWARE, values.get("hardware_type")),
            filters=read_list(values.get("filters")),
            **wanted,
        )
    except (NoSuchNode, NoSuchRun) as error:
        raise NotFound(str(error)) from error
    except OutputsTooLarge as error:
        raise BadRequest(str(error)) from error


async def _shown(call: Call, runs: Sequence[Run], chosen: Any) -> Reply:
    with_output = call.values.get("include_output", False)

    def render() -> Reply:
        return document(chosen([_run(run, with_output) for run in runs]))

    return await in_thread(render) if with_output else render()


def _run(run: Run, with_output: bool) -> Mapping[str, Any]:
    status = run.status
    return {
        "id": run.id,
        "system_id": run.node.system_id,
        "type": run.result_type.value,
        "type_name": run.result_type.label,
        "status": _EMPTY if status is None else status.value,
        "status_name": "Empty" if status is None else status.label,
        "last_ping": moment(run.last_ping),
        "started": moment(run.started),
        "ended": moment(run.ended),
        "runtime": _between(run.started, run.ended),
        "created": moment(run.created),
        "signalled": moment(run.signalled),
        "processed": moment(run.done),
        "results": [_result(result, with_output) for result in run.results],
        "resource_uri": f"{BASE}/nodes/{run.node.system_id}/results/{run.id}/",
    }


def _result(result: Result, with_output: bool) -> Mapping[str, Any]:
    return {
        "id": result.id,
        "name": result.name,
        "status": result.status.value,
        "status_name": result.status.label,
        "exit_status": result.exit_status,
        "started": moment(result.started),
        "ended": moment(result.ended),
        "runtime": _runtime(result),
        "created": moment(result.created),
        "updated": moment(result.updated),
        "script_id": result.script_id,
        "script_revision_id": result.script_version_id,
        "parameters": {name: _without_secret(one) for name, one in result.parameters.items()},
        "suppressed": result.suppressed,
        "post_processing": result.post_processing,
        "post_processing_error": result.post_processing_error,
        "correlation": result.correlation,
        "warning": result.warning,
        "late": [_late(late, with_output) for late in result.late],
        **(_encoded(result.outputs) if with_output else {}),
    }


def _late(late: Late, with_output: bool) -> Mapping[str, Any]:
    return {
        "id": late.id,
        "received": moment(late.received),
        "status": late.signal_status,
        "exit_status": late.exit_status,
        "runtime": _seconds(late.runtime),
        **(_encoded(late.outputs) if with_output else {}),
    }


def _encoded(outputs: Mapping[str, bytes]) -> Mapping[str, str]:
    return {name: base64.b64encode(outputs.get(name, b"")).decode("ascii") for name in OUTPUTS}


def _without_secret(parameter: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**parameter, "value": "********"} if parameter.get("type") == "password" else parameter


def _runtime(result: Result) -> str:
    return _seconds(result.runtime) if result.runtime is not None else _between(result.started, result.ended)


def _between(started: datetime | None, ended: datetime | None) -> str:
    return "" if started is None or ended is None else _seconds((ended - started).total_seconds())


def _seconds(seconds: float | None) -> str:
    """As MAAS writes a run time: ``0:00:12``; empty if it is not known."""
    return "" if seconds is None else str(timedelta(seconds=round(max(seconds, 0))))


_GONE: Final = "There is no such node, or it has no such run; the text says which."
_WRONG: Final = "The request is wrong, or asks for too much at once; the text says what to do."
_ID: Final = f"its number, or {' or '.join(CURRENT)}"

OPERATIONS: Final[tuple[Operation, ...]] = (
    Operation(
        "GET", "/nodes/{system_id}/results/", "NodeScriptResults", "read", list_results,
        "The runs of a node's scripts, newest first, each with its results.",
        parameters=(
            Parameter("type", "Only runs of this type: commissioning, testing or installation."),
            _HARDWARE, _OUTPUT, _FILTERS,
        ),
        answers={200: "The list.", 400: _WRONG, 404: _GONE},
    ),
    Operation(
        "GET", "/nodes/{system_id}/results/{id}/", "NodeScriptResult", "read", read_results,
        f"One run ({_ID}), with its results.", parameters=(_HARDWARE, _OUTPUT, _FILTERS),
        answers={200: "The run.", 400: _WRONG, 404: _GONE},
    ),
    Operation(
        "GET", "/nodes/{system_id}/results/{id}/", "NodeScriptResult", "download", download_results,
        f"What the scripts of one run ({_ID}) put out.", op="download",
        parameters=(
            Parameter("output", "Which output: combined (default), stdout, stderr, result or all.",
                      choices=tuple(KINDS)),
            Parameter("filetype", "txt (default) or tar.xz.", choices=("txt", "tar.xz")),
            _HARDWARE, _FILTERS,
        ),
        answers={200: "The outputs, byte for byte.", 400: _WRONG, 404: _GONE}, content=BYTES,
    ),
)  # fmt: skip
