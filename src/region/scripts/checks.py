"""May a script be as it is given? From what a request and the script's own metadata say, to fields that are right,
or to a message for each that is not. Pure, but slow enough for a thread: it reads YAML."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any, Final, TypeVar

from attrs import evolve, fields_dict

from region.nodes.statuses import HardwareType, Parallel, ResultType
from region.scripts.metadata import DEPTH, embedded
from region.scripts.parameters import ParameterInvalid, check_definitions
from region.scripts.values import ScriptFields, ScriptInvalid

E = TypeVar("E", bound=IntEnum)

CONTENT_LIMIT: Final = 1 << 20
"""Bytes that a script may have (1 MiB)."""

TYPES: Final = {
    "0": ResultType.COMMISSIONING, "commissioning": ResultType.COMMISSIONING, "commission": ResultType.COMMISSIONING,
    "2": ResultType.TESTING, "testing": ResultType.TESTING, "test": ResultType.TESTING, "tests": ResultType.TESTING,
}  # fmt: skip
HARDWARE: Final = {
    "0": HardwareType.NODE, "node": HardwareType.NODE, "generic": HardwareType.NODE, "other": HardwareType.NODE,
    "1": HardwareType.CPU, "cpu": HardwareType.CPU, "processor": HardwareType.CPU,
    "2": HardwareType.MEMORY, "memory": HardwareType.MEMORY, "ram": HardwareType.MEMORY,
    "3": HardwareType.STORAGE, "storage": HardwareType.STORAGE, "disk": HardwareType.STORAGE,
    "ssd": HardwareType.STORAGE, "4": HardwareType.NETWORK, "network": HardwareType.NETWORK,
    "net": HardwareType.NETWORK, "interface": HardwareType.NETWORK,
}  # fmt: skip
PARALLELS: Final = {
    "0": Parallel.DISABLED, "disabled": Parallel.DISABLED, "none": Parallel.DISABLED,
    "1": Parallel.INSTANCE, "instance": Parallel.INSTANCE, "name": Parallel.INSTANCE,
    "2": Parallel.ANY, "any": Parallel.ANY, "enabled": Parallel.ANY,
}  # fmt: skip

_MOST_SECONDS: Final = 10 * 366 * 86400
_OVERRIDES: Final = ("tags", "timeout")
"""What a request may give although the script's metadata says something else, as with MAAS."""

_UNSUPPORTED: Final = ("for_hardware", "recommission", "apply_configured_networking")
"""What MAAS's scripts may ask for and this region does not do: refused, unless it asks for nothing."""

_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,255}\Z")
_OUTPUTS: Final = (".out", ".err", ".yaml")
_TAG: Final = re.compile(r"[A-Za-z0-9_.:-]{1,255}\Z")
_APT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+:~=/_-]{0,254}\Z")
_SNAP: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,99}\Z")
_CHANNEL: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9./_-]{0,99}\Z")
_MODES: Final = ("classic", "dangerous", "devmode", "jailmode")
_URL: Final = re.compile(r"(https?|ftp)://[^\s/]\S{0,2000}\Z")
_DURATION: Final = re.compile(
    r"(?:(?P<days>[0-9]{1,5})(?: days?,?)? )?(?:(?:(?P<hours>[0-9]{1,6}):)?(?P<minutes>[0-5]?[0-9]):)?"
    r"(?P<seconds>[0-9]{1,9})(?:\.0+)?\Z"
)


def checked_script(
    content: bytes, given: Mapping[str, object], before: ScriptFields | None = None, *, is_new: bool = True
) -> ScriptFields:
    """What a script with this content is.

    :param given: what a request says: ``name``, ``title``, ``type``, ``timeout``, … as text or as YAML has them.
    :param before: what the script was, where it is changed: what nobody says anything of stays.
    :param is_new: whether the content is; what the metadata of an old one says has been taken already, and may have
        been changed since.
    :raises ScriptInvalid: with a message for each field that is wrong.
    """
    check_content(content)
    said = _renamed(embedded(content))
    asked = _renamed(given)
    wrong: dict[str, list[str]] = {}
    from_script = _understood(said, wrong)
    from_request = _understood(asked, wrong)
    for name, value in from_request.items():
        if name in from_script and from_script[name] != value and name not in _attributes(_OVERRIDES):
            wrong[_shown(name)] = [
                f"The script itself says {_shown(name)}: {said.get(_shown(name))!r}. Change it there, or leave it out."
            ]
    found = {**(from_script if is_new else {}), **from_request}
    if before is None and "name" not in found and "name" not in wrong:
        wrong["name"] = ["This field is required, here or in the script's metadata."]
    if before is not None and found.get("name", before.name) != before.name:
        wrong["name"] = [f"A script keeps its name, which is '{before.name}'; add another script for another name."]
    if wrong:
        raise ScriptInvalid(wrong)
    return evolve(before, **found) if before is not None else ScriptFields(**found)


def check_content(content: bytes) -> None:
    """Whether a node can run it.

    :raises ScriptInvalid: if not.
    """
    first = content[:1024].split(b"\n", 1)[0]
    problem = ""
    if not content.strip():
        problem = "It is empty."
    elif len(content) > CONTENT_LIMIT:
        problem = f"It has {len(content)} bytes; at most {CONTENT_LIMIT} are accepted."
    elif not first.startswith(b"#!") or not first[2:].strip().startswith(b"/"):
        problem = "It must begin with a line such as '#!/bin/sh', or a node does not know what runs it."
    elif first.endswith(b"\r"):
        problem = "Its lines end with CR LF, so that a node would look for '/bin/sh\\r'; convert it (dos2unix)."
    if problem:
        raise ScriptInvalid({"script": [problem]})


def _renamed(given: Mapping[str, object]) -> dict[str, object]:
    """By MAAS's name of the API, where metadata has another; without what is not given."""
    return {"type" if name == "script_type" else name: value for name, value in given.items() if value is not None}


def _understood(given: Mapping[str, object], wrong: dict[str, list[str]]) -> dict[str, Any]:
    """The attributes of :class:`ScriptFields` that ``given`` says; what is wrong with others is put in ``wrong``."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name in _UNSUPPORTED:
            if value not in ("", False, "false", "False", "0", [], (), {}):
                wrong[name] = [f"{value!r}: this region does not do that; leave it out."]
            continue
        if name == "comment":
            continue
        reader = _READERS.get(name)
        if reader is None:
            wrong[name] = [f"A script has no such field; it has {', '.join(_READERS)}."]
            continue
        try:
            found[_attribute(name)] = reader(value)
        except (ValueError, TypeError) as error:
            wrong[name] = [f"{str(error)[:1].upper()}{str(error)[1:]}."]
    return found


def _attribute(name: str) -> str:
    return {"type": "script_type", "timeout": "timeout_seconds"}.get(name, name)


def _attributes(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(map(_attribute, names))


def _shown(attribute: str) -> str:
    return {"script_type": "type", "timeout_seconds": "timeout"}.get(attribute, attribute)


def script_name(value: object) -> str:
    """A name that a script may have.

    :raises ValueError: if it may not.
    """
    text = str(value)
    if not _NAME.match(text) or text in (".", ".."):
        raise ValueError(f"{text[:300]!r} is no name of a script: use letters, digits, '.', '_' and '-'")
    if text.isdigit() or text == "none":
        raise ValueError(f"{text!r} means something else where scripts are chosen; use another name")
    if text.endswith(_OUTPUTS):
        raise ValueError(f"{text!r} ends like the output of a script ({', '.join(_OUTPUTS)}); use another name")
    return text


def tag_name(value: object) -> str:
    """A tag that a script may have.

    :raises ValueError: if it may not.
    """
    if not isinstance(value, str) or not _TAG.match(value):
        raise ValueError(f"{value!r} is no tag: use letters, digits, '.', ':', '_' and '-'")
    return value


def choice(words: Mapping[str, E], value: object) -> E:
    """What one of ``words``, or a number, means.

    :raises ValueError: if it is none of them.
    """
    text = str(value).strip().lower()
    if isinstance(value, bool) or text not in words:
        raise ValueError(f"{value!r} must be one of {', '.join(word for word in words if not word.isdigit())}")
    return words[text]


def _tags(value: object) -> tuple[str, ...]:
    listed = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    if not isinstance(listed, list | tuple):
        raise ValueError(f"{value!r} must be tags: a list, or a text with commas between them")
    return tuple(dict.fromkeys(tag_name(tag) for tag in listed if tag != ""))


def _text(limit: int) -> Callable[[object], str]:
    def read(value: object) -> str:
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            raise ValueError(f"{value!r} must be text")
        text = str(value)
        if len(text) > limit or "\x00" in text:
            raise ValueError(f"it must have at most {limit} characters, none of them NUL")
        text.encode("utf-8")  # YAML can say half a character
        return text

    return read


def timeout(value: object) -> int:
    """Seconds, from a number of them, or ``MM:SS``, ``HH:MM:SS`` or ``DAYS HH:MM:SS``; 0 is none.

    :raises ValueError: if it is none of these.
    """
    match = None if isinstance(value, bool) else _DURATION.match(str(value).strip())
    if match is None:
        raise ValueError(f"{value!r} is no time: say seconds, HH:MM:SS or 'DAYS HH:MM:SS'")
    days, hours, minutes, seconds = (int(found or 0) for found in match.group("days", "hours", "minutes", "seconds"))
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if total > _MOST_SECONDS:
        raise ValueError(f"{value!r} is longer than ten years; 0 means that there is no limit")
    return total


def _truth(value: object) -> bool:
    words = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    if str(value).lower() not in words:
        raise ValueError(f"{value!r} is neither true nor false")
    return words[str(value).lower()]


def _structure(value: object, what: str) -> Any:
    """A value of YAML's, or its JSON or YAML text."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else {}
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{what} must be JSON: {error}") from error
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        text.encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{what} may have texts, numbers, lists and mappings alone: {error}") from error
    if not _is_flat(value, DEPTH):
        raise ValueError(f"{what} must not be nested deeper than {DEPTH} levels")
    if len(text) > 64 << 10 or "\\u0000" in text:
        raise ValueError(f"{what} must have at most 64 KiB, and no NUL")
    return json.loads(text)


def _is_flat(value: object, deepest: int) -> bool:
    """Whether lists and mappings are nested at most so deep."""
    if not isinstance(value, dict | list):
        return True
    inside = value.values() if isinstance(value, dict) else value
    return deepest > 0 and all(_is_flat(each, deepest - 1) for each in inside)


def _parameters(value: object) -> Mapping[str, Mapping[str, Any]]:
    try:
        return check_definitions(_structure(value, "parameters"))
    except ParameterInvalid as error:
        raise ValueError(str(error)) from error


def _results(value: object) -> Any:
    found = _structure(value, "results")
    if not isinstance(found, dict | list):
        raise ValueError(f"results must be descriptions by name, or a list of names, not {found!r}")
    return found


def _packages(value: object) -> Mapping[str, Sequence[Any]]:
    found = _structure(value, "packages")
    if not isinstance(found, dict) or not found.keys() <= {"apt", "snap", "url"}:
        raise ValueError("packages must be lists by 'apt', 'snap' and 'url'")
    packages: dict[str, Sequence[Any]] = {}
    for kind, listed in found.items():
        entries = listed if isinstance(listed, list) else [listed]
        for entry in entries:
            _check_package(kind, entry)
        packages[kind] = entries
    return packages


def _check_package(kind: str, entry: object) -> None:
    # What begins with "-" would be an option of the program that installs it.
    if kind == "apt" and isinstance(entry, str) and _APT.match(entry):
        return
    if kind == "url" and isinstance(entry, str) and _URL.match(entry):
        return
    if kind == "snap":
        snap = entry if isinstance(entry, dict) else {"name": entry}
        name, channel, mode = snap.get("name"), snap.get("channel", "stable"), snap.get("mode", "classic")
        if (
            snap.keys() <= {"name", "channel", "mode"}
            and (isinstance(name, str) and _SNAP.match(name))
            and (isinstance(channel, str) and _CHANNEL.match(channel))
            and mode in _MODES
        ):
            return
    raise ValueError(f"{entry!r} is nothing that can be installed with {kind}")


_READERS: Final[Mapping[str, Callable[[object], Any]]] = {
    "name": script_name,
    "title": _text(255),
    "description": _text(8192),
    "tags": _tags,
    "type": lambda value: choice(TYPES, value),
    "hardware_type": lambda value: choice(HARDWARE, value),
    "parallel": lambda value: choice(PARALLELS, value),
    "parameters": _parameters,
    "packages": _packages,
    "results": _results,
    "timeout": timeout,
    "destructive": _truth,
    "may_reboot": _truth,
}

assert {_attribute(name) for name in _READERS} == set(fields_dict(ScriptFields)), "each field is read from somewhere"
