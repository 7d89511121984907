"""How a daemon's TOML file becomes its frozen settings, and what is said when it cannot.

``load`` reads the file, turns it into an attrs class and refuses everything that does not fit: unknown keys, wrong
types, missing keys, values out of bounds. Whatever is wrong is one ``SettingsError`` whose text is one line that names
the file and every key concerned, so that a daemon can write it and exit.

An attribute's name is its key in the file; one trailing underscore is dropped, so that ``import_`` is ``import``.
A nested attrs class is a table. A relative ``Path`` is relative to the directory of the file.
"""

from __future__ import annotations

import difflib
import os
import tomllib
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import attrs
from cattrs import AttributeValidationNote, ClassValidationError, Converter, IterableValidationError
from cattrs.errors import ForbiddenExtraKeysError, IterableValidationNote
from cattrs.gen import make_dict_structure_fn, override

T = TypeVar("T")


class SettingsError(Exception):
    """A file of settings cannot be used. ``str()`` is one line: the file, then each key with what is wrong with it."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem


class _Unfit(ValueError):
    """A value that does not fit its setting; the text follows the key's name."""


class _OutOfBounds(ValueError):
    """A value that a validator of this module refused; ``key`` is the attribute's key."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(problem)
        self.key = key


def load(cls: type[T], path: Path | str) -> T:
    """The settings of the attrs class ``cls`` in the TOML file at ``path``.

    :raises SettingsError: if the file cannot be read, is not TOML, or does not fit ``cls``.
    """
    path = Path(path)
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise SettingsError(path, "there is no such file; write one, or name another with --config") from None
    except UnicodeDecodeError as error:
        raise SettingsError(
            path, f"is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}"
        ) from None
    except OSError as error:
        raise SettingsError(path, f"cannot be read: {error.strerror}") from error
    return parse(cls, text, path)


def parse(cls: type[T], text: str, path: Path | str = "settings") -> T:
    """The settings of the attrs class ``cls`` in the TOML ``text``; ``path`` is what errors and relative paths name.

    :raises SettingsError: if the text is not TOML or does not fit ``cls``.
    """
    path = Path(path)
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(path, f"is not TOML: {error}") from None
    try:
        return _converter(path.absolute().parent).structure(document, cls)
    except ClassValidationError as error:
        problems = list(_problems(error, (), cls))
        raise SettingsError(path, "; ".join(problems)) from error


def keys(cls: type[Any]) -> tuple[str, ...]:
    """Every key that a file for ``cls`` may have, with its tables: ``("database", "http.listen", "http.port", …)``."""
    return tuple(".".join(names) for names in _keys(cls, ()))


def between(low: float, high: float) -> Callable[[object, Any, Any], None]:
    """An attrs validator: the number is from ``low`` to ``high``, both included."""

    def validate(instance: object, attribute: Any, value: Any) -> None:
        if not low <= value <= high:
            raise _OutOfBounds(_key_of(attribute), f"must be from {low} to {high}, not {value!r}")

    return validate


def at_least(low: float) -> Callable[[object, Any, Any], None]:
    """An attrs validator: the number is ``low`` or more."""

    def validate(instance: object, attribute: Any, value: Any) -> None:
        if not value >= low:
            raise _OutOfBounds(_key_of(attribute), f"must be {low} or more, not {value!r}")

    return validate


def satisfies(check: Callable[[Any], object], problem: str) -> Callable[[object, Any, Any], None]:
    """An attrs validator: ``check(value)`` is true. ``problem`` follows the key's name: ``"must be a URL"``."""

    def validate(instance: object, attribute: Any, value: Any) -> None:
        if not check(value):
            shown = value
            if isinstance(value, str) and "@" in value:
                shown = "…@" + value.rpartition("@")[2]  # a URL in the making, and maybe a password
            raise _OutOfBounds(_key_of(attribute), f"{problem}, not {shown!r}")

    return validate


def _key_of(attribute: Any) -> str:
    name: str = attribute.name
    return name[:-1] if name.endswith("_") else name


def _keys(cls: type[Any], above: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for attribute in attrs.fields(attrs.resolve_types(cls)):
        if not attribute.init:
            continue
        if isinstance(attribute.type, type) and attrs.has(attribute.type):
            yield from _keys(attribute.type, (*above, _key_of(attribute)))
        else:
            yield (*above, _key_of(attribute))


def _converter(directory: Path) -> Converter:
    converter = Converter(forbid_extra_keys=True, detailed_validation=True)

    def path_hook(value: object, kind: object) -> Path:
        if not isinstance(value, str) or not value:
            raise _Unfit(f"must be a path, not {_shown(value)}")
        return Path(os.path.normpath(directory / Path(value).expanduser()))

    def class_hook(cls: type[Any]) -> Callable[[Any, Any], Any]:
        names = {
            attribute.name: override(rename=_key_of(attribute))
            for attribute in attrs.fields(cls)
            if _key_of(attribute) != attribute.name
        }
        structure = make_dict_structure_fn(cls, converter, _cattrs_forbid_extra_keys=True, **names)  # type: ignore[arg-type]  # the names' overrides are keyword arguments of their own

        def hook(value: Any, kind: Any) -> Any:
            if not isinstance(value, Mapping):
                raise _Unfit(f"must be a table, not {_shown(value)}")
            return structure(value, kind)

        return hook

    for kind, expected in _SIMPLE.items():
        converter.register_structure_hook(kind, _simple_hook(kind, expected))
    converter.register_structure_hook(Path, path_hook)
    converter.register_structure_hook_factory(attrs.has, class_hook)
    converter.register_structure_hook_factory(_is_list, _list_hook(converter))
    converter.register_structure_hook_func(_is_literal, _literal)
    return converter


_SIMPLE: Mapping[type, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def _is_list(kind: Any) -> bool:
    origin: Any = get_origin(kind)
    return origin in (tuple, list)


def _is_literal(kind: Any) -> bool:
    origin: Any = get_origin(kind)
    return origin is Literal


def _simple_hook(kind: type, expected: str) -> Callable[[object, object], Any]:
    def hook(value: object, wanted: object) -> Any:
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind:
            raise _Unfit(f"must be {expected}, not {_shown(value)}")
        return value

    return hook


def _list_hook(converter: Converter) -> Callable[[Any], Callable[[object, Any], Any]]:
    def factory(kind: Any) -> Callable[[object, Any], Any]:
        element = get_args(kind)[0]
        make: Any = get_origin(kind)

        def hook(value: object, wanted: Any) -> Any:
            if not isinstance(value, list):
                raise _Unfit(f"must be a list, not {_shown(value)}")
            return make(converter.structure(item, element) for item in value)

        return hook

    return factory


def _literal(value: object, kind: Any) -> Any:
    allowed = get_args(kind)
    if not any(value == one and type(value) is type(one) for one in allowed):
        raise _Unfit(f"must be one of {', '.join(repr(one) for one in allowed)}, not {_shown(value)}")
    return value


def _shown(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return f"the text {value!r}"
        case int() | float():
            return f"the number {value!r}"
        case list():
            return "a list"
        case dict():
            return "a table"
    return f"the {type(value).__name__} {value}"


def _problems(error: BaseException, above: tuple[str, ...], cls: Any) -> Iterator[str]:
    """Each thing that is wrong, as a sentence that names the key with its tables."""
    name = ".".join(above) or "the file"
    match error:
        case ClassValidationError() | IterableValidationError():
            for inner in error.exceptions:
                key, kind = _note(inner, cls)
                yield from _problems(inner, (*above, key) if key else above, kind)
        case ForbiddenExtraKeysError():
            for key in sorted(error.extra_fields):
                yield f"{'.'.join((*above, key))} is not a setting{_hint(key, above, error.cl)}"
        case KeyError():
            yield f"{name} is missing"
        case _OutOfBounds():
            yield f"{'.'.join((*above, error.key))} {error}"
        case _Unfit():
            yield f"{name} {error}"
        case _:
            yield f"{name}: {error}" if above else str(error)


def _note(error: BaseException, cls: Any) -> tuple[str, Any]:
    """The key whose value ``error`` is about, and the class that was wanted there."""
    for note in getattr(error, "__notes__", ()):
        match note:
            case AttributeValidationNote(name=name, type=kind):
                return (name[:-1] if name.endswith("_") else name), _plain(kind)
            case IterableValidationNote():
                return "", cls
    return "", cls


def _plain(kind: Any) -> Any:
    """The class in ``kind | None``."""
    if get_origin(kind) in (Union, types.UnionType):
        return next(one for one in get_args(kind) if one is not type(None))
    return kind


def _hint(key: str, above: tuple[str, ...], cls: type[Any]) -> str:
    here = [_key_of(attribute) for attribute in attrs.fields(cls) if attribute.init]
    near = difflib.get_close_matches(key, here, n=1, cutoff=0.6)
    if near:
        return f" (did you mean {'.'.join((*above, near[0]))}?)"
    tables = [
        f"[{_key_of(attribute)}]"
        for attribute in attrs.fields(cls)
        if isinstance(attribute.type, type) and attrs.has(attribute.type)
        if key in [_key_of(inner) for inner in attrs.fields(attribute.type)]
    ]
    if tables:
        return f" (it belongs in {' or '.join(tables)})"
    return f" (the settings here are {', '.join(sorted(here))})"
