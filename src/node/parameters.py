"""With which arguments is a script called? Each of its parameters has a value, and maybe a format for it."""

import os
from typing import Any, Callable, List, Mapping

DEFAULTS = {"storage": "--storage={path}", "interface": "--interface={name}", "runtime": "--runtime={input}"}


class BadParameter(Exception):
    """An argument cannot be made; the text names the parameter and says why."""


def arguments(parameters: Mapping[str, Any], exists: Callable[[str], bool] = os.path.exists) -> List[str]:
    """The arguments of a script, in the order of its parameters.

    A parameter is ``{"type": …, "value": …, "argument_format": …}``. In the format ``{input}`` is the value, and for a
    disk or an interface ``{name}``, ``{path}``, ``{model}``, … are what is known of it.

    :raises BadParameter: if one has no value, or a format that names what is not known.
    """
    found: List[str] = []
    for name, parameter in parameters.items():
        if not isinstance(parameter, dict):
            raise BadParameter("the parameter {} is no object but {!r}".format(name, parameter))
        value, kind = parameter.get("value"), str(parameter.get("type", ""))
        if value is None or value == "":
            if parameter.get("required", True) and kind in ("storage", "interface"):
                raise BadParameter("the parameter {} has no value: there is no such {} to run on".format(name, kind))
            continue
        layout = parameter.get("argument_format") or DEFAULTS.get(kind, "--" + name + "={input}")
        words = _words(value, exists)
        try:
            argument = str(layout).format(**words)
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise BadParameter(
                "the parameter {} has the format {!r}, which needs what is not known: {}".format(name, layout, error)
            ) from error
        if "\x00" in argument:
            raise BadParameter("the parameter {} has a NUL character in it".format(name))
        found += argument.split(" ") if " " in str(layout) and not isinstance(value, str) else [argument]
    return found


def _words(value: Any, exists: Callable[[str], bool]) -> Mapping[str, str]:
    if not isinstance(value, dict):
        return {"input": _text(value), "name": _text(value), "path": _text(value)}
    words = {str(key): _text(found) for key, found in value.items()}
    if not words.get("path"):
        # An id_path stays the same when disks are found in another order; a name does not.
        by_id = words.get("id_path", "")
        words["path"] = by_id if by_id and exists(by_id) else "/dev/" + words.get("name", "")
    words.setdefault("input", words["path"] if "size" in words or "id_path" in words else words.get("name", ""))
    return words


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else str(value)
