"""How the rack changes its disk: every single change is one method here, so that a test can watch or refuse any one.

Nothing is durable until :meth:`Files.sync` was called: on a file for its content, on a directory for the names in it.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import Final

from attrs import frozen

_DIRECTORY_MODE: Final = 0o755


@frozen
class Identity:
    """Which file a path leads to: equal for two paths that are hard links of one regular file."""

    device: int
    inode: int


class Files:
    """The file system. Every method blocks, and fails with :class:`OSError`; call it in threads."""

    def make_directory(self, path: Path) -> None:
        """Make the directory ``path``; its parent exists, itself does not."""
        path.mkdir(mode=_DIRECTORY_MODE)

    def link(self, source: Path, target: Path) -> None:
        """Make ``target`` another name of the file ``source``."""
        os.link(source, target)

    def symlink(self, target: str, path: Path) -> None:
        """Make ``path`` a symbolic link to ``target``."""
        path.symlink_to(target)

    def write(self, path: Path, data: bytes) -> None:
        """Make ``path`` a file with content ``data``."""
        path.write_bytes(data)

    def append(self, path: Path, data: bytes) -> None:
        """Add ``data`` at the end of the file ``path``, which is made if it does not exist."""
        with path.open("ab") as file:
            file.write(data)

    def truncate(self, path: Path, size: int) -> None:
        """Cut the file ``path`` to ``size`` bytes."""
        os.truncate(path, size)

    def sync(self, path: Path) -> None:
        """Return when the file's content, or the directory's names, would survive a loss of power."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        """Give ``old`` the name ``new``, replacing a file or link of that name in one step."""
        old.rename(new)

    def unlink(self, path: Path) -> None:
        """Remove the file or link ``path``."""
        path.unlink()

    def remove_directory(self, path: Path) -> None:
        """Remove the empty directory ``path``."""
        path.rmdir()

    def remove_tree(self, path: Path) -> None:
        """Remove the directory ``path`` and everything below it, following no link."""
        for directory, directories, names in os.walk(path, topdown=False, onerror=_raise):
            for name in names:
                self.unlink(Path(directory, name))
            for name in directories:
                below = Path(directory, name)
                if below.is_symlink():
                    self.unlink(below)
                else:
                    self.remove_directory(below)
        self.remove_directory(path)

    def read(self, path: Path) -> bytes:
        """The content of the file ``path``."""
        return path.read_bytes()

    def names(self, path: Path) -> list[str]:
        """The names in the directory ``path``, sorted."""
        return sorted(os.listdir(path))

    def target(self, path: Path) -> str | None:
        """Where the symbolic link ``path`` leads, or None if there is no such link."""
        try:
            return os.readlink(path) if stat.S_ISLNK(os.lstat(path).st_mode) else None
        except FileNotFoundError:
            return None

    def is_there(self, path: Path) -> bool:
        """Whether there is anything with the name ``path``, be it a link that leads nowhere."""
        return os.path.lexists(path)

    def identity(self, path: Path) -> Identity | None:
        """Which regular file ``path`` is, or None if it is none: missing, a link, a directory."""
        try:
            found = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return Identity(found.st_dev, found.st_ino) if stat.S_ISREG(found.st_mode) else None

    def is_directory(self, path: Path) -> bool:
        """Whether ``path`` is a directory, and no link to one."""
        try:
            return stat.S_ISDIR(os.lstat(path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def free_bytes(self, path: Path) -> int:
        """How many bytes an ordinary user may still write on the file system of ``path``."""
        return shutil.disk_usage(path).free


def _raise(error: OSError) -> None:
    raise error
