"""What does a script say about itself? YAML in its comments, between two lines that MAAS's users know::

    # --- Start MAAS 1.0 script metadata ---
    # name: disk-speed
    # --- End MAAS 1.0 script metadata ---

The YAML is anybody's: bounded in size and depth, without aliases (which may grow to gigabytes) and with plain types.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from typing import Any, Final

import yaml

from region.scripts.values import ScriptInvalid

VERSION: Final = "1.0"
LIMIT: Final = 64 << 10
"""Bytes that the metadata may have."""
DEPTH: Final = 16
"""How deep its lists and mappings may be nested."""

# The C parser, where PyYAML has it, is ten times as fast, and its constructors are the same.
_Loader: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_MARK: Final = re.compile(
    rb"[ \t]*#[ \t]*-{2,}[ \t]*(?P<which>Start|End)[ \t]+MAAS[ \t]+(?P<version>[0-9]+\.[0-9]+)[ \t]+"
    rb"script metadata[ \t]*-{2,}[ \t]*\r?\Z"
)


def embedded(content: bytes) -> dict[str, Any]:
    """The metadata that a script has in it, by field, as YAML gives it; empty if it has none.

    :raises ScriptInvalid: if there is some that cannot be read, with what is wrong and in which line of the script.
    """
    found = _section(content)
    if found is None:
        return {}
    lines, before = found
    text = _text(lines, before)
    value = _parsed(text, before)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _invalid("it must be fields with values, such as 'name: disk-speed'", before + 1)
    for name in value:
        if not isinstance(name, str):
            raise _invalid(f"{name!r} is no name of a field", before + 1)
    return value


def _section(content: bytes) -> tuple[list[bytes], int] | None:
    """The lines of the section, and how many lines of the script come before them."""
    lines = content.split(b"\n")
    begun, versions = None, set()
    for number, line in enumerate(lines):
        mark = _MARK.match(line) if b"script metadata" in line else None
        if mark is None:
            continue
        version = mark["version"].decode()
        versions.add(version)
        if version != VERSION:
            continue
        if mark["which"] == b"Start":
            if begun is not None:
                raise _invalid("it begins twice", number + 1)
            begun = number + 1
        elif begun is None:
            raise _invalid("it ends, but did not begin", number + 1)
        else:
            return lines[begun:number], begun
    if begun is not None:
        raise _invalid(f"it has no end; add '# --- End MAAS {VERSION} script metadata ---'", begun)
    if versions:
        raise _invalid(f"it is of version {', '.join(sorted(versions))}; only {VERSION} is understood", 1)
    return None


def _text(lines: list[bytes], before: int) -> str:
    if sum(map(len, lines)) > LIMIT:
        raise _invalid(f"it has more than {LIMIT} bytes", before + 1)
    taken = []
    for number, line in enumerate(lines, before + 1):
        stripped = line.strip()
        if stripped and not stripped.startswith(b"#"):
            raise _invalid("a line in it is no comment; begin each with '#'", number)
        taken.append(stripped[1:])
    try:
        return textwrap.dedent(b"\n".join(taken).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _invalid(f"it is not UTF-8: {error.reason}", before + 1) from error


def _parsed(text: str, before: int) -> Any:
    try:
        _check_shape(yaml.parse(text, Loader=_Loader), before)
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(filter(None, (error.context, error.problem)))
        raise _invalid(f"it is not YAML: {problem}", before + (mark.line if mark else 0) + 1) from error
    except (yaml.YAMLError, ValueError, OverflowError, TypeError) as error:
        if isinstance(error, ScriptInvalid):
            raise
        raise _invalid(f"it is not YAML: {error}", before + 1) from error


def _check_shape(events: Iterator[Any], before: int) -> None:
    """Refuse what could grow, what nests too deep for a parser's stack, and a field that is there twice."""
    names: list[tuple[set[str], list[bool]] | None] = []
    for event in events:
        line = before + event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise _invalid("it has anchors or aliases (& or *), which are not accepted; quote the text", line)
        if isinstance(event, yaml.CollectionEndEvent):
            names.pop()
            continue
        if not isinstance(event, yaml.NodeEvent):
            continue
        inside = names[-1] if names else None
        if inside is not None:
            known, is_name = inside
            if is_name[0] and isinstance(event, yaml.ScalarEvent):
                if event.value in known:
                    raise _invalid(f"{event.value!r} is there twice", line)
                known.add(event.value)
            is_name[0] = not is_name[0]
        if isinstance(event, yaml.CollectionStartEvent):
            names.append((set(), [True]) if isinstance(event, yaml.MappingStartEvent) else None)
            if len(names) > DEPTH:
                raise _invalid(f"it is nested deeper than {DEPTH} levels", line)


def _invalid(problem: str, line: int) -> ScriptInvalid:
    return ScriptInvalid({"script": [f"Its metadata cannot be read (line {line}): {problem}."]})
