"""What is a script told, and what may it be told? Typed parameters: defined in a script's metadata, given a value for
a run, and, where the value is disks or interfaces, given one of them for each result. Pure.

A definition is ``{"type": "runtime", "min": 0, "max": 600, "default": 60, "argument_format": "--for {input}"}``; a
value, as results have it and nodes read it, ``{"type": "runtime", "value": 60, "argument_format": "--for {input}"}``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from string import Formatter
from typing import Any, Final
from urllib.parse import urlsplit

from attrs import frozen

ALL: Final = "all"
"""The value that means every disk, or every interface, that the node has when the script is about to be run."""

DEVICES: Final = ("storage", "interface")

_PLACES: Final = {
    "storage": ("input", "name", "path", "model", "serial"),
    "interface": ("input", "name", "mac", "vendor", "product"),
}
_COMMON: Final = ("type", "title", "description", "required", "argument_format", "default")
_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "storage": (), "interface": (), "boolean": (), "url": ("allow_list",), "runtime": ("min", "max"),
    "string": ("min", "max"), "password": ("min", "max"), "choice": ("choices",),
}  # fmt: skip
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}\Z")
_SCHEMES: Final = ("http", "https", "ftp")
_MOST_SECONDS: Final = 10 * 366 * 86400
_TEXT: Final = 8192


class ParameterInvalid(ValueError):
    """A definition or a value cannot be as given; the text says which, and why."""


@frozen
class Device:
    """A disk or an interface that a result may be about. ``facts`` is what the node is told of it: of a disk
    ``name``, ``id_path``, ``model`` and ``serial``; of an interface ``name``, ``mac_address``, ``vendor`` and
    ``product``. ``tags`` are the device's."""

    facts: Mapping[str, str]
    tags: tuple[str, ...] = ()

    def is_named(self, text: str) -> bool:
        """Whether people may mean it by ``text``: a name, path, serial number, MODEL:SERIAL, MAC address, or tag."""
        facts = self.facts
        names = {facts.get(key, "") for key in ("name", "id_path", "serial", "mac_address")}
        names |= {f"/dev/{facts.get('name')}", f"{facts.get('model')}:{facts.get('serial')}", *self.tags}
        return text in names - {""} or text.lower() == facts.get("mac_address")


def check_definitions(definitions: object) -> Mapping[str, Mapping[str, Any]]:
    """``definitions`` as they are stored.

    :raises ParameterInvalid: if one of them is none.
    """
    if not isinstance(definitions, Mapping):
        raise ParameterInvalid("they must be definitions by name, such as 'storage: {type: storage}'")
    return {str(name): _definition(name, definition) for name, definition in definitions.items()}


def fill(
    definitions: Mapping[str, Mapping[str, Any]], given: Mapping[str, object] | None = None
) -> Mapping[str, Mapping[str, Any]]:
    """The values for a run: what is ``given``, else the default. Devices stay as text until they are looked for.

    :raises ParameterInvalid: if a value cannot be as given, is needed but not given, or is of no parameter.
    """
    given = given or {}
    for name in given:
        if name not in definitions:
            known = ", ".join(definitions) or "none"
            raise ParameterInvalid(f"there is no parameter {name!r}; the script has: {known}")
    filled = {}
    for name, definition in definitions.items():
        kind = definition["type"]
        value = given.get(name, definition.get("default"))
        if value is None and kind in DEVICES:
            value = ALL
        if value is None:
            if definition.get("required", False):
                raise ParameterInvalid(f"the parameter {name!r} needs a value, and has no default")
            continue
        filled[name] = {"type": kind, "value": _value(name, definition, value)}
        if "argument_format" in definition:
            filled[name]["argument_format"] = definition["argument_format"]
    return filled


def unresolved(values: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """The names of those parameters whose devices have not been looked for."""
    return tuple(name for name, one in values.items() if one["type"] in DEVICES and isinstance(one["value"], str))


def expand(
    values: Mapping[str, Mapping[str, Any]], devices: Mapping[str, Sequence[Device]]
) -> tuple[Mapping[str, Mapping[str, Any]], ...]:
    """``values`` once for each device that they name; none where a parameter names no device that there is.

    :param devices: those of the node, by ``storage`` and ``interface``.
    """
    names = unresolved(values)
    found = [
        [device for device in devices.get(values[name]["type"], ()) if _is_meant(device, values[name]["value"])]
        for name in names
    ]
    return tuple(
        {
            name: {**one, "value": dict(chosen[names.index(name)].facts)} if name in names else one
            for name, one in values.items()
        }
        for chosen in itertools.product(*found)
    )


def _is_meant(device: Device, value: str) -> bool:
    return any(text == ALL or device.is_named(text) for text in _listed(value))


def _listed(value: str) -> Iterator[str]:
    return (text.strip() for text in value.split(",") if text.strip())


def _definition(name: object, definition: object) -> Mapping[str, Any]:
    if not isinstance(name, str) or not _NAME.match(name):
        raise ParameterInvalid(f"{name!r} is no name of a parameter: use letters, digits, _ and -")
    if not isinstance(definition, Mapping):
        raise ParameterInvalid(f"{name!r} must have a definition, such as {{type: storage}}")
    kind = definition.get("type")
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise ParameterInvalid(f"{name!r} has the type {kind!r}; it must be one of {', '.join(_FIELDS)}")
    known = (*_COMMON, *_FIELDS[kind])
    for field in definition:
        if field not in known:
            raise ParameterInvalid(f"{name!r} has {field!r}, which a {kind} has not; it has {', '.join(known)}")
    for field, type_, what in (
        ("title", str, "text"), ("description", str, "text"), ("required", bool, "true or false"),
        ("argument_format", str, "text"), ("allow_list", bool, "true or false"),
    ):  # fmt: skip
        if field in definition and not isinstance(definition[field], type_):
            raise ParameterInvalid(f"{name!r}: {field} must be {what}, not {definition[field]!r}")
    _check_bounds(name, definition)
    if kind == "choice":
        _check_choices(name, definition.get("choices"))
    if "argument_format" in definition:
        _check_format(name, kind, definition["argument_format"])
    checked = dict(definition)
    if checked.get("default") is None:
        checked.pop("default", None)
    else:
        checked["default"] = _value(name, checked, checked["default"])
    return checked


def _check_bounds(name: str, definition: Mapping[str, Any]) -> None:
    for field in ("min", "max"):
        if field in definition and (type(definition[field]) is not int or definition[field] < 0):
            raise ParameterInvalid(f"{name!r}: {field} must be a whole number, not {definition[field]!r}")
    if definition.get("min", 0) > definition.get("max", float("inf")):
        raise ParameterInvalid(f"{name!r}: min {definition['min']} is more than max {definition['max']}")


def _check_choices(name: str, choices: object) -> None:
    if not isinstance(choices, list) or not choices or not all(isinstance(one, str) for one in choices):
        raise ParameterInvalid(f"{name!r}: a choice needs choices, a list of texts, not {choices!r}")


def _check_format(name: str, kind: str, template: str) -> None:
    places = _PLACES.get(kind, ("input",))
    try:
        used = [place for _, place, _, _ in Formatter().parse(template) if place is not None]
    except ValueError as error:
        raise ParameterInvalid(f"{name!r}: argument_format {template!r} is no format: {error}") from error
    if not used or not set(used) <= set(places):
        listed = ", ".join(f"{{{place}}}" for place in places)
        raise ParameterInvalid(f"{name!r}: argument_format {template!r} must have one of {listed}, and nothing else")


def _value(name: str, definition: Mapping[str, Any], value: object) -> Any:
    """The value as it is stored, from YAML or from text."""
    kind: str = definition["type"]
    if kind in ("runtime", "boolean"):
        return _number(name, definition, value) if kind == "runtime" else _truth(name, value)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ParameterInvalid(f"{name!r} must be text, not {value!r}")
    text = str(value)
    if len(text) > _TEXT or "\x00" in text:
        raise ParameterInvalid(f"{name!r} must be at most {_TEXT} characters, none of them NUL")
    if kind in DEVICES and not list(_listed(text)):
        raise ParameterInvalid(f"{name!r} must be {ALL!r}, or name a {kind}")
    if kind == "url":
        for url in _listed(text) if definition.get("allow_list") else (text,):
            _check_url(name, url)
    if kind == "choice" and text not in definition["choices"]:
        raise ParameterInvalid(f"{name!r} must be one of {', '.join(definition['choices'])}, not {text!r}")
    if kind in ("string", "password"):
        _check_within(name, definition, len(text), "characters")
    return text


def _number(name: str, definition: Mapping[str, Any], value: object) -> int:
    if isinstance(value, bool) or not re.fullmatch(r"[0-9]{1,12}", str(value)):
        raise ParameterInvalid(f"{name!r} must be whole seconds, not {value!r}")
    seconds = int(str(value))
    if seconds > _MOST_SECONDS:
        raise ParameterInvalid(f"{name!r} must be at most {_MOST_SECONDS} seconds, not {seconds}")
    _check_within(name, definition, seconds, "seconds")
    return seconds


def _truth(name: str, value: object) -> bool:
    known = {"true": True, "false": False}
    if str(value).lower() not in known:
        raise ParameterInvalid(f"{name!r} must be true or false, not {value!r}")
    return known[str(value).lower()]


def _check_within(name: str, definition: Mapping[str, Any], number: int, unit: str) -> None:
    if number < definition.get("min", 0) or number > definition.get("max", number):
        raise ParameterInvalid(
            f"{name!r} must be from {definition.get('min', 0)} to {definition.get('max', 'any')} {unit}, not {number}"
        )


def _check_url(name: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        good = parts.scheme in _SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError as error:
        raise ParameterInvalid(f"{name!r}: {url!r} is no URL: {error}") from error
    if not good or any(character.isspace() for character in url):
        raise ParameterInvalid(f"{name!r} must be a URL that begins with {'://, '.join(_SCHEMES)}://, not {url!r}")
