"""A disk, and a process, that stop or fail at any step: every call with which Python changes what is below a directory
is counted, and one of them is the place of the fault.

The functions of :mod:`os` and what :func:`open` gives are replaced while a :class:`Disk` is installed, so that no code
has to know of it, and none can be forgotten. A *step* is one change: a file or directory made, bytes written (and once
more in the middle of them), a flush, a rename, a link, a removal. With :attr:`Disk.looks` the steps are instead what
only looks at the disk: at a name's kind and size, a directory's names, a link's target; a file opened; bytes read.
What talks to a database adds its statements (``change`` and ``query``) with :meth:`Disk.step`. All of it is for one
process at a time, and for one thread.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from attrs import define, evolve, field, frozen

Patch = Callable[[Any, str, Any], object]


class Crash(BaseException):
    """The process is no more. Whatever code still runs after this, changes nothing."""


GROWS: Final = frozenset({"create", "mkdir", "link", "symlink", "write", "half", "rename"})
NAMES: Final = frozenset({"create", "mkdir", "rmdir", "link", "symlink", "rename", "unlink"})
OPENS: Final = frozenset({"stat", "list", "open"})
LOOKS: Final = OPENS | {"read"}
MEETS: Final = {
    errno.ENOSPC: GROWS | {"change"},
    errno.EACCES: NAMES | OPENS,
    errno.EIO: GROWS | NAMES | {"fsync", "truncate", "chmod"} | LOOKS,
    errno.ECONNRESET: {"change", "query"},
    errno.ECONNABORTED: {"change", "query"},
}
"""Which steps can fail with which error."""

_WRITES: Final = os.O_WRONLY | os.O_RDWR


@frozen
class Loss:
    """What a loss of power takes: how many of the last changes of names that were not flushed (-1: all), and what of
    the bytes that were not: ``kept``, ``lost``, ``torn`` (half of them are there) or ``zeroed``."""

    names: int
    bytes: str


LOSSES: Final = tuple(Loss(names, data) for names in (-1, 0) for data in ("lost", "torn", "zeroed"))


@frozen
class _Change:
    """A change of the names in ``directory`` that a loss of power may undo."""

    directory: str
    kind: str
    path: str
    old: str = ""
    grave: str = ""

    def moved(self, old: str, new: str) -> _Change:
        def move(path: str) -> str:
            return new + path[len(old) :] if path == old or path.startswith(old + "/") else path

        # The name itself has moved: where it is now, it is durable when that directory is.
        directory = os.path.dirname(new) if self.path == old else move(self.directory)
        return evolve(self, directory=directory, path=move(self.path), old=move(self.old))


def _real_path(path: str | Path) -> str:
    return os.path.realpath(path)


class _Read(io.FileIO):
    """A file below the root, opened for reading by :func:`open`."""

    disk: Disk
    shown: str

    def readinto(self, buffer: Any) -> int | None:
        self.disk.look("read", self.shown)
        return super().readinto(buffer)

    def read(self, size: int | None = -1) -> Any:
        self.disk.look("read", self.shown)
        return super().read(-1 if size is None else size)

    def readall(self) -> Any:
        self.disk.look("read", self.shown)
        return super().readall()


class _Raw(io.FileIO):
    """A file below the root, opened for writing by :func:`open`."""

    disk: Disk

    def write(self, data: Any) -> int:
        if self.disk.stopped:
            return len(memoryview(data).cast("B"))  # closing it flushes it, which a process that is no more cannot do
        return self.disk.write(self.fileno(), data)

    def truncate(self, size: int | None = None) -> int:
        length = self.tell() if size is None else size
        os.ftruncate(self.fileno(), length)
        return length


@define(eq=False)
class Disk:
    """The disk below ``root``.

    ``at`` is the step at which the fault is, counted from when :attr:`armed` was set; with ``error`` (an errno) that
    step fails, and with ``lasting`` everything after it that can fail so; else the process stops there.
    :attr:`said` is the steps so far, in words, :attr:`met` those at which there was a fault.

    With :attr:`looks`, only what looks at the disk is counted.

    :param stop: is told where the process stops. True: it was something else that was stopped, and the process goes on.
    :param remembers: whether what is not flushed is remembered, for :meth:`lose_power`.
    """

    root: str = field(converter=_real_path)
    stop: Callable[[str], bool] = field(default=lambda what: False)
    remembers: bool = True
    at: int | None = None
    error: int | None = None
    lasting: bool = False
    looks: bool = False
    armed: bool = field(default=False, init=False)
    stopped: bool = field(default=False, init=False)
    said: list[str] = field(factory=list, init=False)
    met: list[str] = field(factory=list, init=False)
    on_step: Callable[[str], object] = field(default=lambda what: None, init=False)
    _changes: list[_Change] = field(factory=list, init=False)
    _dirty: dict[int, bytes] = field(factory=dict, init=False)
    _grave: str = field(default="", init=False)
    _buried: int = field(default=0, init=False)
    _ended: int = field(default=-1, init=False)
    _real: dict[str, Any] = field(factory=dict, init=False)

    # Steps

    def arm(
        self, at: int | None = None, error: int | None = None, lasting: bool = False, *, looks: bool = False
    ) -> None:
        """Count from here; what was written until now is on the disk."""
        self.at, self.error, self.lasting, self.looks = at, error, lasting, looks
        self.said.clear()
        self.met.clear()
        self._changes.clear()
        self._dirty.clear()
        self.armed, self.stopped = True, False

    def disarm(self) -> None:
        """Let everything happen, uncounted."""
        self.armed = False

    @property
    def _noting(self) -> bool:
        return self.armed and self.remembers and not self.looks

    @property
    def full(self) -> bool:
        """Whether there is no space at this moment."""
        return self.armed and bool(self.met) and self.lasting and self.error == errno.ENOSPC

    def step(self, kind: str, what: str) -> None:
        """One step; to be called before it is made. :raises Crash: or :exc:`OSError`, if that is where the fault is."""
        if self.stopped:
            raise Crash(what)
        if self.armed and not self.looks:
            self._step(kind, what)

    def look(self, kind: str, what: str) -> None:
        """The same for what only looks at the disk."""
        if self.armed and self.looks:
            self._step(kind, what)

    def _step(self, kind: str, what: str) -> None:
        self.said.append(f"{kind} {what}")
        self.on_step(self.said[-1])
        if self.at is None or len(self.said) < self.at:
            return
        if self.error is None:
            self.met.append(self.said[-1])
            if self.stop(self.said[-1]):
                self.at = None
                return
            self.stopped = True
            raise Crash(self.said[-1])
        if kind in MEETS[self.error] and (self.lasting or len(self.said) == self.at):
            self.met.append(self.said[-1])
            raise OSError(self.error, os.strerror(self.error), what)

    def restart(self) -> None:
        """The process that stopped is gone with all that it had open; another may begin."""
        if self._ended < 0:
            self._ended = os.memfd_create("ended")
        for descriptor in [int(name) for name in os.listdir("/proc/self/fd")]:
            if self.inside(self._target(descriptor)) is not None:
                os.dup2(self._ended, descriptor, inheritable=False)  # its locks end; its number is not used again
        self.armed = self.stopped = False

    def close(self) -> None:
        """Close what :meth:`restart` kept the numbers of."""
        for descriptor in [int(name) for name in os.listdir("/proc/self/fd")]:
            if descriptor != self._ended and self._target(descriptor).startswith("/memfd:ended"):
                os.close(descriptor)
        if self._ended >= 0:
            os.close(self._ended)
        if self._grave:
            shutil.rmtree(self._grave)

    # Loss of power

    def lose_power(self, loss: Loss) -> None:
        """Take what was not flushed, as far as ``loss`` says."""
        undone = len(self._changes) if loss.names < 0 else min(loss.names, len(self._changes))
        for _ in range(undone):
            change = self._changes.pop()
            self._undo(change)
            if change.kind == "rename":
                self._changes = [each.moved(change.path, change.old) for each in self._changes]
        if loss.bytes != "kept":
            for directory, _, names in os.walk(self.root):
                for name in names:
                    self._lose_bytes(os.path.join(directory, name), loss.bytes)
        self._changes.clear()
        self._dirty.clear()

    def _undo(self, change: _Change) -> None:
        real, path = self._real, change.path
        there = os.path.lexists(path)
        if change.kind == "made":
            if there and os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            elif there:
                real["unlink"](path)
        elif change.kind == "rename":
            if there:
                real["rename"](path, change.old)
            if change.grave:
                real["link"](change.grave, path, follow_symlinks=False)
        elif not there and os.path.isdir(os.path.dirname(path)):
            if change.grave:
                real["link"](change.grave, path, follow_symlinks=False)
            else:
                real["mkdir"](path)

    def _lose_bytes(self, path: str, how: str) -> None:
        found = os.lstat(path)
        durable = self._dirty.pop(found.st_ino, None)
        if durable is None or os.path.islink(path):
            return
        now = Path(path).read_bytes()
        differ = (at for at, (was, is_now) in enumerate(zip(durable, now, strict=False)) if was != is_now)
        kept = next(differ, min(len(durable), len(now)))
        if how == "lost" or len(now) <= kept:
            content = durable
        elif how == "torn":
            content = now[: kept + (len(now) - kept) // 2]
        else:
            content = now[:kept] + bytes(len(now) - kept)
        with self._real["open"](path, "r+b") as file:
            file.truncate(0)
            file.write(content)
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))  # nothing that could be seen by looking at the times

    # What is replaced

    def install(self, patch: Patch) -> None:
        """Replace what changes the disk, with ``patch`` (:func:`setattr`, or a test's ``patch``)."""
        for name in ("mkdir", "rmdir", "link", "symlink", "rename", "unlink", "write", "ftruncate", "truncate",
                     "fsync", "fchmod", "statvfs", "stat", "lstat", "readlink", "listdir", "scandir", "read", "readv",
                     "pread"):  # fmt: skip
            self._real[name] = getattr(os, name)
        self._real |= {"os.open": os.open, "open": io.open}
        for name in ("mkdir", "rmdir", "unlink"):
            patch(os, name, getattr(self, name))
        for name in ("link", "symlink", "rename", "write", "ftruncate", "truncate", "fchmod", "statvfs"):
            patch(os, name, getattr(self, name))
        for name, kind in (("stat", "stat"), ("lstat", "stat"), ("readlink", "stat"), ("listdir", "list"),
                           ("scandir", "list"), ("read", "read"), ("readv", "read"), ("pread", "read")):  # fmt: skip
            patch(os, name, self._looking(name, kind))
        patch(os, "remove", self.unlink)
        patch(os, "replace", self.rename)
        patch(os, "fsync", self.fsync)
        patch(os, "fdatasync", self.fsync)
        patch(os, "open", self.open_descriptor)
        patch(io, "open", self.open)
        patch(builtins, "open", self.open)

    def _looking(self, name: str, kind: str) -> Callable[..., Any]:
        """What replaces a function that looks at its first argument, a path or a descriptor."""
        real = self._real[name]

        def looking(path: Any = ".", *arguments: Any, **options: Any) -> Any:
            if self.armed and self.looks and (where := self.inside(path, options.get("dir_fd"))) is not None:
                self.look(kind, self._shown(where))
            return real(path, *arguments, **options)

        return looking

    def _target(self, descriptor: int) -> str:
        try:
            return str(self._real.get("readlink", os.readlink)(f"/proc/self/fd/{descriptor}"))
        except OSError:
            return ""

    def _is_there(self, path: Any) -> bool:
        try:
            self._real["lstat"](path)
        except OSError:
            return False
        return True

    def inside(self, path: Any, directory: int | None = None) -> str | None:
        """The whole path if it is below the root, else None."""
        if isinstance(path, int):
            text = self._target(path)
        else:
            text = os.fsdecode(path)
            text = os.path.normpath(os.path.join(os.getcwd() if directory is None else self._target(directory), text))
        return text if text == self.root or text.startswith(self.root + "/") else None

    def _shown(self, path: str) -> str:
        return os.path.relpath(path, self.root)

    def _bury(self, path: str) -> str:
        """Keep what is at ``path`` from ending with its name; where it is kept, "" for a directory or nothing."""
        if not os.path.lexists(path) or (os.path.isdir(path) and not os.path.islink(path)):
            return ""
        if not self._grave:
            self._grave = tempfile.mkdtemp(prefix=".grave-", dir=os.path.dirname(self.root))
        self._buried += 1
        grave = f"{self._grave}/{self._buried}"
        self._real["link"](path, grave, follow_symlinks=False)
        return grave

    def _change(self, kind: str, path: str, old: str = "", grave: str = "") -> None:
        if self._noting:
            self._changes.append(_Change(os.path.dirname(path), kind, path, old, grave))

    def _soil(self, path: str) -> None:
        """Remember what the file at ``path`` has on the disk, before it is changed."""
        if self._noting:
            inode = os.stat(path).st_ino
            if inode not in self._dirty:
                with self._real["open"](path, "rb") as file:
                    self._dirty[inode] = file.read()

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        where = self.inside(path, dir_fd)
        if where is None or self._is_there(where):
            self._real["mkdir"](path, mode, dir_fd=dir_fd)
            return
        self.step("mkdir", self._shown(where))
        self._real["mkdir"](where, mode)
        self._change("made", where)

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        where = self.inside(path, dir_fd)
        if where is not None:
            self.step("rmdir", self._shown(where))
        self._real["rmdir"](path, dir_fd=dir_fd)
        if where is not None:
            self._change("removed", where)

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        where = self.inside(path, dir_fd)
        if where is None or not self._is_there(where):
            self._real["unlink"](path, dir_fd=dir_fd)
            return
        self.step("unlink", self._shown(where))
        grave = self._bury(where) if self._noting else ""
        self._real["unlink"](path, dir_fd=dir_fd)
        self._change("removed", where, grave=grave)

    def link(self, source: Any, target: Any, **options: Any) -> None:
        where = self.inside(target)
        if where is not None:
            self.step("link", self._shown(where))
        self._real["link"](source, target, **options)
        if where is not None:
            self._change("made", where)

    def symlink(self, source: Any, target: Any, *arguments: Any, **options: Any) -> None:
        where = self.inside(target)
        if where is not None:
            self.step("symlink", self._shown(where))
        self._real["symlink"](source, target, *arguments, **options)
        if where is not None:
            self._change("made", where)

    def rename(self, source: Any, target: Any, **options: Any) -> None:
        old, new = self.inside(source), self.inside(target)
        if old is None or new is None:
            self._real["rename"](source, target, **options)
            return
        self.step("rename", f"{self._shown(old)} {self._shown(new)}")
        grave = self._bury(new) if self._noting else ""
        self._real["rename"](source, target, **options)
        if self._changes:
            self._changes = [each.moved(old, new) for each in self._changes]
        self._change("rename", new, old, grave)

    def truncate(self, path: Any, length: int) -> None:
        where = self.inside(path)
        if where is not None:
            self.step("truncate", self._shown(where))
            self._soil(where)
        self._real["truncate"](path, length)

    def ftruncate(self, descriptor: int, length: int) -> None:
        self.truncate(descriptor, length)

    def fchmod(self, descriptor: int, mode: int) -> None:
        where = self.inside(descriptor)
        if where is not None:
            self.step("chmod", self._shown(where))
        self._real["fchmod"](descriptor, mode)

    def write(self, descriptor: int, data: Any) -> int:
        where = self.inside(descriptor)
        if where is None:
            return int(self._real["write"](descriptor, data))
        view = memoryview(data).cast("B")
        self.step("write", f"{self._shown(where)} {len(view)}")
        self._soil(f"/proc/self/fd/{descriptor}")
        half = len(view) // 2
        written = int(self._real["write"](descriptor, view[:half])) if half else 0
        self.step("half", f"{self._shown(where)} {half} of {len(view)}")
        return written + int(self._real["write"](descriptor, view[half:]))

    def fsync(self, descriptor: int) -> None:
        where = self.inside(descriptor)
        if where is None:
            self._real["fsync"](descriptor)
            return
        self.step("fsync", self._shown(where))
        # The disk itself is not waited for: what would be lost is known here.
        self._dirty.pop(os.fstat(descriptor).st_ino, None)
        self._changes = [change for change in self._changes if change.directory != where]

    def statvfs(self, path: Any) -> Any:
        found = self._real["statvfs"](path)
        if not self.full:
            return found
        values = list(found)
        values[3] = values[4] = 0  # f_bfree, f_bavail
        return os.statvfs_result(values)

    def open_descriptor(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        writes = bool(flags & (_WRITES | os.O_CREAT | os.O_TRUNC))
        where = self.inside(path, dir_fd)
        if where is not None and not writes:
            self.look("open", self._shown(where))
            where = None
        made = where is not None and self._open_step(where, bool(flags & os.O_CREAT), bool(flags & os.O_TRUNC))
        descriptor = int(self._real["os.open"](path, flags, mode, dir_fd=dir_fd))
        if made and where is not None:
            self._change("made", where)
        return descriptor

    def _open_step(self, where: str, creates: bool, truncates: bool) -> bool:
        """The step that opening a file for writing is, if it is one; whether the file will be made by it."""
        if not self._is_there(where):
            if creates:
                self.step("create", self._shown(where))
            return creates
        if truncates and self._real["stat"](where).st_size:
            self.step("truncate", self._shown(where))
            self._soil(where)
        return False

    def open(
        self, file: Any, mode: str = "r", buffering: int = -1, encoding: str | None = None, errors: str | None = None,
        newline: str | None = None, closefd: bool = True, opener: Any = None,
    ) -> Any:  # fmt: skip
        """As :func:`open`."""
        where = self.inside(file) if self.armed or isinstance(file, str | os.PathLike) else None
        writes = bool(set(mode) & set("wax+"))
        if where is not None and not writes and self.armed and self.looks:
            return self._open_to_read(where, file, mode, buffering, encoding, errors, newline, closefd, opener)
        if where is None or not writes:
            return self._real["open"](file, mode, buffering, encoding, errors, newline, closefd, opener)
        made = not isinstance(file, int) and self._open_step(where, "r" not in mode, "w" in mode)
        raw = _Raw(file, mode.replace("b", "").replace("t", ""), closefd, opener)
        raw.disk = self
        if made:
            self._change("made", where)
        if buffering == 0:
            return raw
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding or "utf-8", errors, newline)

    def _open_to_read(
        self, where: str, file: Any, mode: str, buffering: int, encoding: str | None, errors: str | None,
        newline: str | None, closefd: bool, opener: Any,
    ) -> Any:  # fmt: skip
        if not isinstance(file, int):
            self.look("open", self._shown(where))
        raw = _Read(file, "r", closefd, opener)
        raw.disk, raw.shown = self, self._shown(where)
        if buffering == 0:
            return raw
        buffered = io.BufferedReader(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding or "utf-8", errors, newline)


@contextmanager
def disarmed(disk: Disk) -> Iterator[None]:
    """What is done here is not the process's."""
    armed, disk.armed = disk.armed, False
    try:
        yield
    finally:
        disk.armed = armed


def any_loss(rng: random.Random) -> Loss:
    """What a loss of power may take."""
    return Loss(rng.choice((-1, 0, rng.randrange(1, 12))), rng.choice(("kept", "lost", "torn", "zeroed")))


def places(said: list[str], error: int | None, wanted: int, rng: random.Random) -> list[int]:
    """Of the steps at which there can be such a fault so many, spread evenly; all of them if ``wanted`` is 0."""
    numbers = [
        number for number, what in enumerate(said, start=1) if error is None or what.split(" ")[0] in MEETS[error]
    ]
    if not wanted or wanted >= len(numbers):
        return numbers
    width = len(numbers) / wanted
    return [numbers[int(width * (number + rng.random()))] for number in range(wanted)]
