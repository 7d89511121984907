"""How does a script get the packages that it needs? From apt, from snap, or from a URL, before it runs.

What fails is the installation's failure, not the script's: it says which command, and what that said.
"""

import http.client
import os
import tarfile
import urllib.parse
import urllib.request
import zipfile
from typing import Any, Callable, Iterator, List, Mapping, NamedTuple, Union

from node.archive import safe_name
from node.clock import within

APT_ENVIRONMENT = {"DEBIAN_FRONTEND": "noninteractive"}
FETCH_SECONDS = 60.0
"""How long a server may say nothing."""

ANSWER_SECONDS = 180.0
"""How long it may take until a server has answered, however slowly that comes, and whom it sends one to."""

DOWNLOAD_SECONDS = 1800.0
"""How long one download may take, however slowly it comes."""

ATTEMPTS = 3
SNAP_MODES = ("classic", "devmode", "dangerous", "jailmode")


class BadPackages(Exception):
    """What a script says of its packages makes no sense, or one cannot be had; the text says which and why."""


class Command(NamedTuple):
    """A command that installs."""

    words: List[str]
    environment: Mapping[str, str] = {}


class Download(NamedTuple):
    """A file to fetch and to unpack or install."""

    url: str


Step = Union[Command, Download]


def steps(packages: Mapping[str, Any]) -> Iterator[Step]:
    """What there is to do for ``packages``: ``{"apt": […], "snap": […], "url": […]}``.

    :raises BadPackages: if it is something else.
    """
    for kind, listed in packages.items():
        entries = listed if isinstance(listed, list) else [listed]
        if kind == "apt":
            names = [_word(kind, entry) for entry in entries]
            if names:
                options = ["-o", "DPkg::Lock::Timeout=300", "-o", "Acquire::Retries=3"]
                apt = ["apt-get", "--quiet", "--yes", *options]
                yield Command([*apt, "update"], APT_ENVIRONMENT)
                yield Command([*apt, "install", "--no-install-recommends", "--", *names], APT_ENVIRONMENT)
        elif kind == "snap":
            for entry in entries:
                yield Command(_snap(entry))
        elif kind == "url":
            for entry in entries:
                url = _word(kind, entry)
                if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
                    raise BadPackages("{!r} is no http(s) URL".format(url))
                yield Download(url)
        else:
            raise BadPackages("{!r} is no kind of packages; there are apt, snap and url".format(kind))


def _word(kind: str, entry: Any) -> str:
    if not isinstance(entry, str) or not entry or entry.startswith("-") or "\x00" in entry:
        raise BadPackages("{!r} is no {} package".format(entry, kind))
    return entry


def _snap(entry: Any) -> List[str]:
    if not isinstance(entry, dict):
        return ["snap", "install", _word("snap", entry)]
    words = ["snap", "install", _word("snap", entry.get("name"))]
    if entry.get("channel"):
        words.append("--channel={}".format(entry["channel"]))
    if entry.get("mode"):
        if entry["mode"] not in SNAP_MODES:
            raise BadPackages("{!r} is no mode of a snap; there are {}".format(entry["mode"], ", ".join(SNAP_MODES)))
        words.append("--{}".format(entry["mode"]))
    return words


def fetch(
    url: str,
    directory: str,
    pause: Callable[[float], object],
    now: Callable[[], float],
    seconds: float = DOWNLOAD_SECONDS,
    is_stopped: Callable[[], bool] = lambda: False,
) -> str:
    """Download ``url`` into ``directory``, in a few attempts; the file's path.

    :param pause: waits so many seconds.
    :param is_stopped: whether it is of no use any more.
    :raises BadPackages: if that fails, or takes longer than ``seconds``; the text says why.
    """
    until = now() + seconds
    attempt = 1
    while True:
        try:
            return _download(url, directory, until, now, is_stopped)
        except (OSError, ValueError, http.client.HTTPException) as error:
            # 4xx will be the same the next time; and what is wrong with the URL too.
            final = isinstance(error, ValueError) or 400 <= getattr(error, "code", 0) < 500
            if final or attempt == ATTEMPTS or now() >= until or is_stopped():
                raise BadPackages("{} cannot be fetched: {}".format(url, error or type(error).__name__)) from error
        pause(2.0**attempt)
        attempt += 1


def _download(url: str, directory: str, until: float, now: Callable[[], float], is_stopped: Callable[[], bool]) -> str:
    name = os.path.basename(urllib.parse.unquote(urllib.parse.urlsplit(url).path)).replace("\x00", "_")
    path = os.path.join(directory, name if name.strip(".") else "download")
    opened = within(ANSWER_SECONDS, lambda: urllib.request.urlopen(url, timeout=FETCH_SECONDS))
    with opened as response, open(path + ".part", "wb") as file:
        while True:
            piece = response.read1(1 << 16)
            if not piece:
                break
            file.write(piece)
            if is_stopped():
                raise OSError("it was told to stop")
            if now() > until:
                raise OSError("it comes too slowly; {} bytes came in time".format(file.tell()))
        if getattr(response, "length", 0):
            raise OSError("it was cut off: {} bytes are missing".format(response.length))
    os.rename(path + ".part", path)
    return path


def unpack_or_install(path: str, directory: str, complain: Callable[[str], None]) -> List[Command]:
    """Unpack what is an archive into ``directory``; the commands that install what is a package.

    :raises BadPackages: if an archive cannot be read.
    """
    if path.endswith(".deb"):
        return [
            Command(["dpkg", "--install", path], APT_ENVIRONMENT),
            Command(["apt-get", "--quiet", "--yes", "--fix-broken", "install"], APT_ENVIRONMENT),
        ]
    if path.endswith(".snap"):
        return [Command(["snap", "install", "--dangerous", path])]
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as zipped:
                for name in zipped.namelist():
                    if safe_name(name.rstrip("/")) is None:
                        raise BadPackages("{} has the member {!r}, which leads out of it".format(path, name))
                zipped.extractall(directory)
        elif tarfile.is_tarfile(path):
            with tarfile.open(path) as tarred:
                for member in tarred:
                    name = safe_name(member.name)  # type: ignore[assignment]  # None is looked at next
                    if name is None or not (member.isreg() or member.isdir()):
                        complain("{}: the member {!r} is left out".format(path, member.name))
                        continue
                    member.mode = (member.mode or 0) & 0o755 | 0o600
                    tarred.extract(member, directory)
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, OSError, RuntimeError) as error:
        raise BadPackages("{} cannot be unpacked: {}".format(path, error)) from error
    return []
