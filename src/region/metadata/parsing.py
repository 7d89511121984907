"""What does a node's request say? Forms and JSON become signals and status messages, or the request is wrong.

This is the only place where what a node sent can be answered with a 4xx: what comes later is the region's own work.
Facts about the formats: MAAS's metadata API 2012-03-01, and cloud-init's reporting module.
"""

from __future__ import annotations

import base64
import binascii
import bz2
import json
import math
from collections.abc import Mapping
from typing import Any, Final

from twisted.logger import Logger

from region.api.forms import FileValue, Form, Value
from region.api.operations import BadRequest, Invalid, invalid_choice
from region.commissioning.signals import OUTPUTS, MessageFile, Signal, SignalStatus, StatusMessage, Upload

FIELDS: Final = frozenset(
    {
        "status", "error", "script_result_id", "script_version_id", "exit_status", "script_result", "result",
        "runtime", "name", "power_type", "power_parameters",
    }
)  # fmt: skip
"""The fields of a signal that are no files."""

MESSAGE_BYTES: Final = 4096
"""How much of a signal's or a message's own text is kept."""

INFLATED_BYTES: Final = 16 << 20
"""What the files of one message may come to."""

VALUES: Final = 100_000
"""Commas and brackets that a message may have, also in its texts."""

log = Logger()

_LARGEST: Final = (1 << 63) - 1
_EVENT_TYPES: Final = ("start", "finish", "progress")
_ENDINGS: Final = tuple((ending, kind) for kind, ending in OUTPUTS.items() if ending)


def parse_signal(form: Form) -> Signal:
    """The signal that the fields of a request are.

    :raises ApiError: 400, if they are none; the text, or a JSON object of messages by field, says why.
    """
    texts, files = _split(form)
    wrong: dict[str, list[str]] = {}

    def integer(*names: str, least: int, most: int) -> int | None:
        for name in names:
            if not texts.get(name):
                continue
            try:
                number = int(texts[name]) if len(texts[name]) < 20 else most + 1
            except ValueError:
                wrong[name] = [f"'{texts[name][:40]}' is not a whole number."]
                return None
            if not least <= number <= most:
                wrong[name] = [f"{texts[name][:40]} is not between {least} and {most}."]
                return None
            return number
        return None

    result = integer("script_result_id", least=1, most=_LARGEST)
    version = integer("script_version_id", least=1, most=_LARGEST)
    exit_status = integer("exit_status", "script_result", "result", least=-(1 << 31), most=(1 << 31) - 1)
    runtime = _runtime(texts.get("runtime", ""), wrong)
    power = _power(texts.get("power_parameters", ""), wrong)
    uploads = _uploads(files, wrong)
    status = texts.get("status")
    if status is None:
        wrong["status"] = ["This field is required."]
    elif status not in SignalStatus.__members__:
        if not wrong:
            raise invalid_choice("status", status[:40], sorted(SignalStatus.__members__))
        wrong["status"] = [f"'{status[:40]}' is not a valid status."]
    if wrong or status is None:
        raise Invalid(wrong)
    return Signal(
        SignalStatus(status),
        message=texts.get("error", "")[:MESSAGE_BYTES],
        script_result_id=result,
        script_version_id=version,
        exit_status=exit_status,
        runtime=runtime,
        name=texts.get("name", "")[:255],
        power_type=texts.get("power_type", "")[:64],
        power_parameters=power,
        uploads=uploads,
    )


def _split(form: Form) -> tuple[dict[str, str], dict[str, bytes]]:
    """The fields that are text, and the files."""
    texts: dict[str, str] = {}
    files: dict[str, bytes] = {}
    for name, values in form.items():
        if len(values) > 1:
            raise Invalid({name: [f"This is given {len(values)} times; give it once."]})
        value = values[0]
        if name in FIELDS and not (name == "result" and isinstance(value, FileValue)):
            texts[name] = _text(name, value)
        elif isinstance(value, FileValue):
            files[name] = value.data
        else:
            # A field that some other runner has: to refuse it would lose the result that it came with.
            log.warn("A signal has the field {name}, which is ignored.", name=name[:80])
    return texts, files


def _text(name: str, value: Value) -> str:
    if isinstance(value, FileValue):
        try:
            value = value.data.decode("utf-8")
        except UnicodeDecodeError:
            raise Invalid({name: ["This is not UTF-8 text."]}) from None
    if name == "error":
        return value.replace("\x00", "\\x00")
    if "\x00" in value:
        raise Invalid({name: ["This has a NUL character in it."]})
    return value


def _runtime(value: str, wrong: dict[str, list[str]]) -> float | None:
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < 1e9:
        wrong["runtime"] = [f"'{value[:40]}' is not a number of seconds."]
        return None
    return seconds


def _power(value: str, wrong: dict[str, list[str]]) -> Mapping[str, Any]:
    if not value:
        return {}
    try:
        parameters = json.loads(value, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        wrong["power_parameters"] = ["This is not JSON."]
        return {}
    if not isinstance(parameters, dict):
        wrong["power_parameters"] = ["This is not a JSON object."]
        return {}
    if "\\u0000" in value or any(not _is_scalar(each) for each in parameters.values()):
        wrong["power_parameters"] = ["The values must be text, numbers, true, false or null."]
        return {}
    return parameters


def _is_scalar(value: object) -> bool:
    return value is None or isinstance(value, str | int | float | bool)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _uploads(files: Mapping[str, bytes], wrong: dict[str, list[str]]) -> tuple[Upload, ...]:
    """The files by script. NAME.out belongs to NAME, unless it has an output of its own (NAME.out.out) with it."""
    scripts: dict[str, dict[str, bytes]] = {}
    for name, content in files.items():
        if not name or len(name) > 255 or "\x00" in name or "/" in name:
            wrong[name[:40] or "(no name)"] = ["This is no field of a signal, and no name of a script either."]
            continue
        script, kind = name, "output"
        for ending, found in _ENDINGS:
            own = any(name + other in files for other, _ in _ENDINGS)
            if name.endswith(ending) and len(name) > len(ending) and not own:
                script, kind = name[: -len(ending)], found
        scripts.setdefault(script, {})[kind] = content
    return tuple(Upload(script, contents) for script, contents in scripts.items())


def parse_message(body: bytes) -> StatusMessage:
    """The status message that a webhook's body is.

    :raises ApiError: 400, if it is none; the text says why.
    """
    if body.count(b",") + body.count(b"[") + body.count(b"{") > VALUES:
        # Each value takes many times its place in the text: a body of nothing but brackets would be half a gigabyte.
        raise BadRequest(f"The status message has more than {VALUES} values.")
    try:
        document = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"The status message is not JSON in UTF-8: {str(error)[:200]}.") from None
    if not isinstance(document, dict):
        raise BadRequest("The status message is not a JSON object.")
    fields = {}
    for name in ("event_type", "origin", "name", "description"):
        if not isinstance(document.get(name), str):
            raise BadRequest(f"The status message lacks {name}, or it is not text.")
        fields[name] = _plain(document[name])
    if fields["event_type"] not in _EVENT_TYPES:
        raise BadRequest(
            f"The status message's event_type is {fields['event_type'][:40]!r}; it should be one of: "
            f"{', '.join(_EVENT_TYPES)}."
        )
    return StatusMessage(
        **fields, timestamp=_timestamp(document), result=_outcome(document), files=_files(document)
    )  # fmt: skip


def _plain(text: str) -> str:
    return text.replace("\x00", "\\x00").encode("utf-8", "backslashreplace").decode()[:MESSAGE_BYTES]


def _timestamp(document: Mapping[str, Any]) -> float:
    found = document.get("timestamp", 0.0)
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found < 253402300800:
        raise BadRequest("The status message's timestamp is not a number of seconds since 1970.")
    return float(found)


def _outcome(document: Mapping[str, Any]) -> str:
    found = document.get("result", "")
    if found is None:
        return ""
    if not isinstance(found, str):
        raise BadRequest("The status message's result is not text.")
    # curtin says FAILURE where cloud-init says FAIL.
    return {"FAILURE": "FAIL"}.get(found.upper(), _plain(found.upper()))


def _files(document: Mapping[str, Any]) -> tuple[MessageFile, ...]:
    listed = document.get("files")
    listed = [] if listed is None else listed
    if not isinstance(listed, list) or len(listed) > 1000:
        raise BadRequest("The status message's files are not a list of at most 1000.")
    found: list[MessageFile] = []
    total = 0
    for number, entry in enumerate(listed):
        file = _file(number, entry, INFLATED_BYTES - total)
        total += len(file.content)
        found.append(file)
    return tuple(found)


def _file(number: int, entry: object, room: int) -> MessageFile:
    where = f"File {number} of the status message"
    if not isinstance(entry, dict) or not isinstance(entry.get("path"), str) or not entry["path"]:
        raise BadRequest(f"{where} has no path.")
    content, encoding = entry.get("content"), entry.get("encoding", "base64")
    if content is None:
        # cloud-init sends null for a file that it could not read.
        data = b""
    elif not isinstance(content, str):
        raise BadRequest(f"{where} ({entry['path'][:80]!r}) has a content that is not text.")
    elif encoding == "base64":
        try:
            data = base64.b64decode(content, validate=False)
        except (binascii.Error, ValueError):
            raise BadRequest(f"{where} ({entry['path'][:80]!r}) is not base64.") from None
    else:
        raise BadRequest(f"{where} ({entry['path'][:80]!r}) has the encoding {str(encoding)[:40]!r}; send base64.")
    if (compression := entry.get("compression")) is not None:
        data = _inflated(where, compression, data, room)
    if len(data) > room:
        raise BadRequest(f"The files of the status message come to more than {INFLATED_BYTES} bytes.")
    return MessageFile(_plain(entry["path"]), data, _exit_status(where, entry.get("result")))


def _inflated(where: str, compression: object, data: bytes, room: int) -> bytes:
    if compression != "bzip2":
        raise BadRequest(f"{where} has the compression {str(compression)[:40]!r}; send bzip2, or none.")
    unpacker = bz2.BZ2Decompressor()
    try:
        inflated = unpacker.decompress(data, max_length=room + 1)
    except (OSError, EOFError):
        raise BadRequest(f"{where} is not bzip2.") from None
    if not unpacker.eof and len(inflated) <= room:
        raise BadRequest(f"{where} is bzip2 that was cut off.")
    return inflated


def _exit_status(where: str, value: object) -> int | None:
    if value is None:
        return None
    if type(value) is not int or not -(1 << 31) <= value < 1 << 31:
        raise BadRequest(f"{where} has a result that is not an exit status.")
    return value
