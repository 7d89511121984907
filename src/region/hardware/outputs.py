"""What did a script print? Its bytes as text and values, within bounds, whatever they are.

A node's outputs are hostile: any bytes at all end in a value or in :class:`HookError`, in bounded time and memory.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from region.nodes.findings import OutputUnusable

MAX_TEXT: Final = 1 << 20
"""Bytes of an output that is read as text or JSON."""

MAX_VALUES: Final = 150_000
"""Brackets and commas of JSON: parsing it holds Python's lock, so this bounds for how long everything else stands."""

MAX_LINES: Final = 100_000
MAX_LINE: Final = 8192
"""Characters of a line; what is over that is left out."""

MAX_NAME: Final = 255
"""Characters of a model, a serial number, a driver and the like."""

_UNPRINTABLE: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ufffe\uffff\ud800-\udfff]")
_DIGITS: Final = re.compile(r"[0-9]{1,19}\Z")
_SHOWN: Final = 60


class HookError(OutputUnusable):
    """A script's output cannot be used; the text is a sentence that says what is wrong with it."""


def output_bytes(outputs: Mapping[str, bytes], limit: int) -> bytes:
    """What the script printed: its standard output, or both of its streams in one where only that came.

    :param outputs: by ``stdout``, ``output`` (both streams), ``stderr`` and ``result``.
    :raises HookError: if there is nothing, or more than ``limit`` bytes.
    """
    data = outputs.get("stdout") or outputs.get("output") or b""
    if not data.strip():
        raise HookError("the script printed nothing")
    if len(data) > limit:
        raise HookError(f"the script printed {len(data)} bytes, of which at most {limit} can be read")
    return data


def output_text(outputs: Mapping[str, bytes]) -> str:
    """As :func:`output_bytes`, as text; what is no UTF-8 is U+FFFD."""
    return output_bytes(outputs, MAX_TEXT).decode("utf-8", "replace").removeprefix("\ufeff")


def lines(text: str) -> Iterator[str]:
    """The lines of ``text``, without their ends, one at a time.

    :raises HookError: if there are too many.
    """
    for number, line in enumerate(io.StringIO(text)):
        if number >= MAX_LINES:
            raise HookError(f"the script printed more than {MAX_LINES} lines, which is more than can be read")
        yield line[:MAX_LINE].rstrip("\r\n")


def read_json(text: str) -> Any:
    """The JSON value in ``text``.

    :raises HookError: if it is none.
    """
    count = sum(map(text.count, "[{,"))
    if count > MAX_VALUES:
        raise HookError(f"the script printed JSON with about {count} values, of which at most {MAX_VALUES} can be read")
    try:
        return json.loads(text)
    except RecursionError:
        raise HookError("the script printed JSON that is nested too deeply") from None
    except ValueError as error:  # also of a number with thousands of digits
        raise HookError(f"the script did not print JSON, or it was cut: {error}") from error


def plain(value: object, limit: int = MAX_NAME) -> str:
    """``value`` as one line of at most ``limit`` characters that any database takes; "" if it is no text or number."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        return ""
    if isinstance(value, int):
        value = str(value) if whole(value) is not None else ""
    return _UNPRINTABLE.sub("\ufffd", value.strip()[:limit]).strip()


def whole(value: object, most: int = (1 << 63) - 1) -> int | None:
    """``value``, a number or decimal digits, as a whole number from 0 to ``most``; else None."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        value = value.strip()
        number = int(value) if _DIGITS.match(value) else None
    elif isinstance(value, int):
        number = value
    elif isinstance(value, float) and math.isfinite(value) and value.is_integer():
        number = int(value)
    else:
        number = None
    return number if number is not None and 0 <= number <= most else None


def flag(value: object) -> bool:
    """Whether ``value`` means yes: older tools write 1, "1" or "yes" where newer ones write true."""
    return value is True or (not isinstance(value, bool) and value in (1, "1", "yes", "true"))


def shown(value: object) -> str:
    """``value`` as it is shown in a sentence: texts and numbers as they are, the rest by what it is."""
    if isinstance(value, str):
        return _UNPRINTABLE.sub("\ufffd", repr(value[:_SHOWN])) + "…" * (len(value) > _SHOWN)
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return f"an object of {len(value)}"
    if isinstance(value, int) and abs(value) >= 1 << 100:
        return f"a number of {value.bit_length()} bits"
    return repr(value)
