"""Whether the parameters of a request are ones that the operation has, and are what the table says they may be.

What is misspelt is refused, not ignored: a filter that is dropped silently gives a wrong answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from region.api.forms import FileValue, Value
from region.api.operations import Invalid, Operation, Parameter

_BOOLEANS: Final = {
    "true": True,
    "1": True,
    "yes": True,
    "on": True,
    "false": False,
    "0": False,
    "no": False,
    "off": False,
}


def checked(operation: Operation, given: Mapping[str, tuple[Value, ...]]) -> dict[str, Any]:
    """The values by name: text, numbers, truth values or bytes by the parameter's kind; a tuple if it may be repeated.

    :raises Invalid: with a message for each parameter that is wrong.
    """
    known = {parameter.name: parameter for parameter in operation.parameters}
    values: dict[str, Any] = {}
    wrong: dict[str, list[str]] = {}
    for name, found in given.items():
        parameter = known.get(name)
        if parameter is None:
            wrong[name] = [_unknown(operation)]
            continue
        if len(found) > 1 and not parameter.many:
            wrong[name] = [f"This is given {len(found)} times; give it once."]
            continue
        if not found and not parameter.many:
            wrong[name] = ["This is an empty list; give it once, or leave it out."]
            continue
        try:
            each = tuple(_value(parameter, value) for value in found)
        except ValueError as error:
            wrong[name] = [str(error)]
            continue
        values[name] = each if parameter.many else each[0]
    for parameter in operation.parameters:
        if parameter.required and parameter.name not in given:
            wrong[parameter.name] = ["This field is required."]
    if wrong:
        raise Invalid(wrong)
    return values


def _unknown(operation: Operation) -> str:
    names = ", ".join(parameter.name for parameter in operation.parameters)
    return f"{operation.signature} has no such parameter; it has {names or 'none'}."


def _value(parameter: Parameter, value: Value) -> Any:
    if parameter.kind == "file":
        return value
    if isinstance(value, FileValue):
        try:
            value = value.data.decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError("This is not UTF-8 text.") from None
    if "\x00" in value:
        raise ValueError("This has a NUL character in it.")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("This has half a character in it (a surrogate, as in JSON's \\ud800).") from None
    match parameter.kind:
        case "integer":
            return _integer(parameter, value)
        case "boolean":
            if value.lower() not in _BOOLEANS:
                raise ValueError(f"'{value}' is neither true nor false.")
            return _BOOLEANS[value.lower()]
    if parameter.choices and value not in parameter.choices:
        listed = ", ".join(f"'{choice}'" for choice in parameter.choices if choice)  # empty: as if it were not given
        raise ValueError(f"'{value}' is not a valid {parameter.name}.  It should be one of: {listed}.")
    return value


def _integer(parameter: Parameter, text: str) -> int:
    if len(text) > 18:
        raise ValueError("This number has too many digits.")
    try:
        number = int(text)
    except ValueError:
        raise ValueError(f"'{text}' is not a whole number.") from None
    if parameter.minimum is not None and number < parameter.minimum:
        raise ValueError(f"{number} is less than {parameter.minimum}.")
    if parameter.maximum is not None and number > parameter.maximum:
        raise ValueError(f"{number} is more than {parameter.maximum}.")
    return number
