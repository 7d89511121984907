"""Which scripts does this machine have to run? The region's archive, unpacked so that it can do no harm, and its index.

The format is MAAS's: an uncompressed tar with ``index.json``, ``{"1.0": {"commissioning_scripts": [...],
"testing_scripts": [...]}}``. Whatever in it is no plain file below the directory is left out, and that is said.
"""

import hashlib
import io
import json
import math
import os
import posixpath
import tarfile
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple

INDEX = "index.json"
KINDS = (("commissioning", "commissioning_scripts"), ("testing", "testing_scripts"))

MOST_MEMBERS = 10000
LARGEST_INDEX = 16 << 20
"""More than any machine has to run; a longer index would take most of a small machine's memory to read."""

LONGEST_NAME = 240
"""Bytes of a file's name, without its ending: of 255 (NAME_MAX)."""

SHOWN_CHARACTERS = 200
"""How much of an entry that makes no sense is shown."""


class BadArchive(Exception):
    """It is none, or its index says nothing that can be understood; the text says what is wrong."""


class Script(NamedTuple):
    """One script to run. ``kind`` is commissioning or testing, ``path`` where it is on this machine.

    ``timeout_seconds`` 0 means none. ``parallel`` is 0 (alone), 1 (with its own instances) or 2 (with any).
    ``content`` is what the archive has at that path.
    """

    kind: str
    name: str
    path: str
    result_id: Optional[int]
    version_id: Optional[int] = None
    timeout_seconds: float = 0.0
    parallel: int = 0
    hardware_type: int = 0
    parameters: Mapping[str, Any] = {}
    packages: Mapping[str, Any] = {}
    has_started: bool = False
    may_reboot: bool = False
    content: bytes = b""

    def restore(self) -> None:
        """Put it on the disk again if it is gone: a script before it may have deleted what the runner keeps.

        :raises OSError: if it cannot be written.
        """
        if self.content and not os.path.lexists(self.path):
            _write(self.path, self.content)

    @property
    def label(self) -> str:
        """How people name this run of it: names may be there more than once."""
        return "{}.{}".format(self.name, self.result_id) if self.result_id is not None else self.name

    @property
    def file_name(self) -> str:
        """How files name it: as people, unless that leaves no room for an ending."""
        if len(self.label.encode("utf-8")) <= LONGEST_NAME:
            return self.label
        return hashlib.sha256(self.label.encode("utf-8")).hexdigest()


def unpack(data: bytes, directory: str, complain: Callable[[str], None]) -> Tuple[Script, ...]:
    """Unpack the archive ``data`` into ``directory``; the scripts of its index.

    :raises BadArchive: if it cannot be read.
    """
    index: Optional[bytes] = None
    contents: Dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            for count, member in enumerate(archive, 1):
                if count > MOST_MEMBERS:
                    raise BadArchive("it has more than {} members".format(MOST_MEMBERS))
                name = safe_name(member.name)
                # A file that is larger than all of the archive is one with holes, or says what is not true.
                is_plain = member.isdir() or (member.isreg() and not member.issparse() and member.size <= len(data))
                if name is None or not is_plain:
                    complain(
                        "the archive's member {} is left out: it is no plain file below it".format(_shown(member.name))
                    )
                    continue
                content = archive.extractfile(member) if member.isreg() else None
                if content is None:
                    continue
                found = content.read()
                if name == INDEX:
                    index = found
                else:
                    contents[name] = found
                    _write(os.path.join(directory, *name.split("/")), found)
    except (tarfile.TarError, EOFError, OverflowError, ValueError) as error:
        raise BadArchive("it is no tar archive: {}".format(error)) from error
    if index is None:
        raise BadArchive("it has no {}".format(INDEX))
    if len(index) > LARGEST_INDEX:
        raise BadArchive("its {} has more than {} bytes".format(INDEX, LARGEST_INDEX))
    return read_index(index, directory, complain, contents)


def safe_name(name: str) -> Optional[str]:
    """The normal form of a member's name; None if it leads out of the directory, or nowhere."""
    if not name or name.startswith("/") or "\\" in name or "\x00" in name:
        return None
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if not parts or ".." in parts:
        return None
    return posixpath.join(*parts)


def _write(path: str, content: bytes) -> None:
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    # Never through what is there already: a link could lead elsewhere. And the longest name has no room for more.
    partial = os.path.join(os.path.dirname(path), ".part")
    if os.path.lexists(partial):
        os.unlink(partial)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o755)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    os.chmod(partial, 0o755)
    os.rename(partial, path)


def read_index(
    data: bytes, directory: str, complain: Callable[[str], None], contents: Mapping[str, bytes]
) -> Tuple[Script, ...]:
    """The scripts that the index ``data`` lists; ``contents`` are the files beside it, by name.

    An entry that makes no sense is left out, and that is said.

    :raises BadArchive: if the index as a whole makes none.
    """
    try:
        document = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise BadArchive("its {} is not JSON: {}".format(INDEX, error)) from error
    listed = document.get("1.0") if isinstance(document, dict) else None
    if not isinstance(listed, dict):
        raise BadArchive("its {} has no scripts of version 1.0".format(INDEX))
    found: List[Script] = []
    for kind, key in KINDS:
        entries = listed.get(key) or []
        if not isinstance(entries, list):
            raise BadArchive("its {} has {} that are no list".format(INDEX, key))
        for entry in entries:
            try:
                found.append(_script(kind, entry, directory, contents))
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                complain("a script of the archive's index is left out ({}): {}".format(error, _shown(entry)))
    return tuple(found)


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= SHOWN_CHARACTERS else shown[:SHOWN_CHARACTERS] + "…"


def _script(kind: str, entry: Dict[str, Any], directory: str, contents: Mapping[str, bytes]) -> Script:
    name = entry["name"]
    path = safe_name(entry["path"]) if isinstance(entry["path"], str) else None
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\x00" in name or path is None:
        raise ValueError("its name or path is none")
    # What is no Unicode is no file's name, and cannot be sent.
    (name + path).encode("utf-8")
    parameters, packages = entry.get("parameters") or {}, entry.get("packages") or {}
    if not isinstance(parameters, dict) or not isinstance(packages, dict):
        raise ValueError("its parameters or packages are no objects")
    return Script(
        kind,
        name,
        os.path.join(directory, *path.split("/")),
        _number(entry.get("script_result_id")),
        _number(entry.get("script_version_id")),
        _seconds(entry.get("timeout_seconds"), parameters),
        _one_of(entry.get("parallel"), 3),
        _one_of(entry.get("hardware_type"), 5),
        parameters,
        packages,
        bool(entry.get("has_started")),
        bool(entry.get("may_reboot")),
        contents.get(path, b""),
    )


def _number(value: Any) -> Optional[int]:
    if value is None:
        return None
    return int(value)


def _one_of(value: Any, count: int) -> int:
    number = int(value or 0)
    return number if 0 <= number < count else 0


def _seconds(value: Any, parameters: Mapping[str, Any]) -> float:
    """How long a script may take: what its runtime parameter says, else its own limit."""
    for parameter in parameters.values():
        if isinstance(parameter, dict) and parameter.get("type") == "runtime" and parameter.get("value"):
            value = parameter["value"]
            break
    seconds = float(value or 0)
    if not math.isfinite(seconds):
        raise ValueError("it may take {} seconds".format(seconds))
    return max(seconds, 0.0)


HARDWARE_ORDER = {1: 1, 2: 2, 3: 3, 4: 4, 0: 99}
"""CPU, memory, storage, network; and last what is about the machine as a whole."""


def plan(scripts: Tuple[Script, ...]) -> Tuple[Tuple[Script, ...], ...]:
    """In which order to run ``scripts`` (of one kind): batches, one after the other; what is in one runs together.

    By hardware type, then name. What may run with anything runs last, all together.
    """

    def order(script: Script) -> Tuple[int, str, int]:
        return HARDWARE_ORDER[script.hardware_type], script.name, script.result_id or 0

    batches: List[List[Script]] = []
    anything: List[Script] = []
    for script in sorted(scripts, key=order):
        if script.parallel == 2:
            anything.append(script)
        elif script.parallel == 1 and batches and _are_instances(batches[-1][-1], script):
            batches[-1].append(script)
        else:
            batches.append([script])
    if anything:
        # Those with the fewest packages first: they need not wait while others install.
        batches.append(
            sorted(anything, key=lambda script: (sum(map(_length, script.packages.values())), order(script)))
        )
    return tuple(tuple(batch) for batch in batches)


def _are_instances(one: Script, other: Script) -> bool:
    return one.parallel == 1 and one.name == other.name and one.hardware_type == other.hardware_type


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (list, tuple)) else 1
