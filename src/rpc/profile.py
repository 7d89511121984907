"""Which region the command line talks to, and with which key.

The first of these that says: the command's ``--url`` and ``--key``; ``STANCHION_URL`` and ``STANCHION_KEY``; the file
that ``STANCHION_PROFILE`` names; the region that ``stanchion up`` runs from this directory right now; the file that
``stanchion login`` wrote. A key is only ever used for the URL that it was written down with.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from attrs import frozen

from rpc.console import CommandFailed, Status
from rpc.settings import SettingsError, load

DEFAULT_URL: Final = "http://127.0.0.1:5240"

LOCK: Final = "up.lock"
"""The file in a state directory that ``stanchion up`` holds locked while it runs."""


@frozen
class Profile:
    """Which region to talk to, and as whom. ``key`` is ``consumer:token:secret``, or "" for none."""

    url: str = DEFAULT_URL
    key: str = ""


def find_profile(
    url: str | None, key: str | None, environment: Mapping[str, str] = os.environ, directory: Path | None = None
) -> Profile:
    """The profile to use, given ``--url`` and ``--key``; ``directory`` is the working directory.

    :raises CommandFailed: if a file that is asked for is not usable, or the URL is none.
    """
    url = url or environment.get("STANCHION_URL") or ""
    key = key or environment.get("STANCHION_KEY") or ""
    if url and key:
        return Profile(base_url(url), key)
    kept = _kept(environment, directory or Path.cwd())
    if kept is not None and (not url or base_url(url) == base_url(kept.url)):
        url, key = url or kept.url, key or kept.key
    return Profile(base_url(url or DEFAULT_URL), key)


def _kept(environment: Mapping[str, str], directory: Path) -> Profile | None:
    if environment.get("STANCHION_PROFILE"):
        return load_profile(Path(environment["STANCHION_PROFILE"]))
    local = state_directory(directory)
    home = profile_path(environment)
    if (local / "profile.toml").exists() and (is_up(local) or not home.exists()):
        return load_profile(local / "profile.toml")
    return load_profile(home) if home.exists() else None


def profile_path(environment: Mapping[str, str] = os.environ) -> Path:
    """Where ``stanchion login`` keeps the profile."""
    base = environment.get("XDG_CONFIG_HOME") or os.path.join(environment.get("HOME", "~"), ".config")
    return Path(base).expanduser() / "stanchion" / "profile.toml"


def load_profile(path: Path) -> Profile:
    """The profile in the file at ``path``.

    :raises CommandFailed: if it cannot be read.
    """
    try:
        return load(Profile, path)
    except SettingsError as error:
        raise CommandFailed(f"{error.path}: {error.problem}", Status.USAGE) from error


def save_profile(path: Path, profile: Profile) -> None:
    """Write ``profile`` to ``path``, readable by its owner only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = (
        "# Which region `stanchion` talks to, and the API key that it uses. Keep this file private.\n"
        f"url = {json.dumps(profile.url)}\nkey = {json.dumps(profile.key)}\n"
    )
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".profile-")  # made with mode 0600
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.rename(name, path)
    except BaseException:
        os.unlink(name)
        raise


def base_url(url: str) -> str:
    """``url`` as ``scheme://host:port``, whether or not it came with ``/MAAS`` and what follows that.

    :raises CommandFailed: if it is not an http or https URL.
    """
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        parts.port  # noqa: B018  (reading it is what checks it)
    except ValueError as error:
        raise CommandFailed(f"{url!r} is not a URL: {error}", Status.USAGE) from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        raise CommandFailed(f"{url!r} is not the URL of a region, such as http://region:5240", Status.USAGE)
    before, _, _ = parts.path.rstrip("/").partition("/MAAS")
    return f"{parts.scheme}://{parts.netloc}{before}"


def state_directory(directory: Path) -> Path:
    """Where ``stanchion up``, run in ``directory``, keeps its state: ``.state`` there, or else below ``/var/tmp``.

    As root, the region's PostgreSQL runs as another user, who must be able to reach its files.
    """
    state = Path(os.path.abspath(directory)) / ".state"
    if os.geteuid() != 0 or _others_may_enter(state):
        return state
    return Path("/var/tmp") / f"stanchion-{hashlib.sha256(os.fsencode(state)).hexdigest()[:12]}"


def _others_may_enter(path: Path) -> bool:
    return all(not one.exists() or one.stat().st_mode & stat.S_IXOTH for one in (path, *path.parents))


def is_up(state: Path) -> bool:
    """Whether a ``stanchion up`` runs with the state directory ``state`` at this moment."""
    try:
        with open(state / LOCK, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
