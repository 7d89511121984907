"""With which arguments is a script called? Each of its parameters has a value, and maybe a format for it."""

import os
import string
from typing import Any, Callable, List, Mapping

DEFAULTS = {"storage": "--storage={path}", "interface": "--interface={name}", "runtime": "--runtime={input}"}

_FORMATTER = string.Formatter()


class BadParameter(Exception):
    """An argument cannot be made; the text names the parameter and says why."""


def arguments(parameters: Mapping[str, Any], exists: Callable[[str], bool] = os.path.exists) -> List[str]:
    """The arguments of a script, in the order of its parameters.

    A parameter is ``{"type": …, "value": …, "argument_format": …}``. The format's words are arguments; in each
    ``{input}`` is the value, and for a disk or an interface ``{name}``, ``{path}``, ``{model}``, ``{mac}``, … are what
    is known of it. A value stays one argument, whatever is in it.

    :raises BadParameter: if one has no value, or a format that names what is not known.
    """
    found: List[str] = []
    for name, parameter in parameters.items():
        if not isinstance(parameter, dict):
            raise BadParameter("the parameter {} is no object".format(name))
        value, kind = parameter.get("value"), str(parameter.get("type", ""))
        if value is None or value == "":
            if kind in ("storage", "interface"):
                raise BadParameter("the parameter {} has no value: there is no such {} to run on".format(name, kind))
            continue
        layout = str(parameter.get("argument_format") or DEFAULTS.get(kind, "--" + name + "={input}"))
        words = _words(kind, value, exists)
        try:
            made = [_filled(word, words) for word in layout.split()]
        except (KeyError, ValueError) as error:
            raise BadParameter(
                "the parameter {} has the format {!r}, which needs what is not known: {}".format(name, layout, error)
            ) from error
        if any("\x00" in word for word in made):
            raise BadParameter("the parameter {} has a NUL character in it".format(name))
        found += made
    return found


def _filled(word: str, words: Mapping[str, str]) -> str:
    """A word of a format with the values in it: names alone, as attributes and widths are for whoever programs."""
    found = ""
    for literal, name, layout, conversion in _FORMATTER.parse(word):
        found += literal
        if name is None:
            continue
        if layout or conversion:
            raise ValueError("in braces there may only be a name")
        found += words[name]
    return found


def _words(kind: str, value: Any, exists: Callable[[str], bool]) -> Mapping[str, str]:
    if not isinstance(value, dict):
        return {"input": _text(value), "name": _text(value), "path": _text(value)}
    words = {str(key): _text(found) for key, found in value.items()}
    if kind == "interface":
        words.setdefault("mac", words.get("mac_address", ""))
        words.setdefault("input", words.get("name", ""))
        return words
    if not words.get("path"):
        # A path by id stays the same when disks are found in another order; a name does not.
        stable = _device_path(words.get("id_path", ""))
        words["path"] = stable if stable and exists(stable) else "/dev/" + words.get("name", "")
    words.setdefault("input", words["path"])
    return words


def _device_path(id_path: str) -> str:
    """The device that an ``id_path`` names: a path of it, or udev's ID_PATH. Empty if it names none: where udev does
    not run it is the place of the hardware below /sys, which is no disk."""
    if "/" in id_path:
        return id_path if id_path.startswith("/dev/") else ""
    return "/dev/disk/by-path/" + id_path if id_path else ""


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else str(value)
