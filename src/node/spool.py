"""What is still to be sent? One file for each item, in a directory, numbered in the order in which they were made.

An item is on the disk, whole and synced, before anybody goes on; it goes when the region has it. A machine that is
killed or reboots finds at its next start what it had not sent. When the disk is full an item is kept in memory, and
that is said.
"""

import errno
import json
import os
import re
import threading
from typing import Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple

ENDING = ".item"
REFUSED = "undelivered"
"""The subdirectory for what will not be sent any more: kept for people."""


class Item(NamedTuple):
    """One POST: ``label`` names it for people, ``meta`` is what the runner itself wants to know of it later."""

    number: int
    label: str
    content_type: str
    body: bytes
    meta: Mapping[str, str] = {}


class Spool(object):
    """The items in ``directory``. Thread-safe; one sender takes, anybody adds.

    :param complain: called with a sentence about what is wrong with the disk, or with what was found on it.
    """

    def __init__(self, directory: str, complain: Callable[[str], None]) -> None:
        self._directory = directory
        self._complain = complain
        self._lock = threading.Condition()
        self._waiting: Dict[int, Optional[Item]] = {}
        """By number; the item itself only where the disk could not take it."""
        self._gone: List[str] = []
        self._aside: List[int] = []
        self._closed = False
        os.makedirs(os.path.join(directory, REFUSED), mode=0o700, exist_ok=True)
        for name in sorted(os.listdir(directory)):
            match = re.match(r"([0-9]{1,18})\.item\Z", name)
            if match:
                self._waiting[int(match.group(1))] = None
            elif name.endswith(".part"):
                # Never finished, so nobody was told that it is safe.
                os.unlink(os.path.join(directory, name))
        self._next = max(self._waiting, default=0) + 1

    def add(self, label: str, content_type: str, body: bytes, meta: Optional[Mapping[str, str]] = None) -> Item:
        """Keep an item until it is sent. Returns when it is on the disk, or in memory if the disk has no room."""
        with self._lock:
            item = Item(self._next, label, content_type, body, dict(meta or {}))
            self._next += 1
            try:
                self._write(item)
                self._waiting[item.number] = None
            except OSError as error:
                self._complain(
                    "{} cannot be written to {} ({}); it is kept in memory, and lost if this machine ends before it is "
                    "sent".format(label, self._directory, error.strerror or error)
                )
                self._waiting[item.number] = item
            self._lock.notify_all()
            return item

    def _write(self, item: Item) -> None:
        path = self._path(item.number)
        head = json.dumps({"label": item.label, "content_type": item.content_type, "meta": dict(item.meta)})
        partial = path + ".part"
        try:
            with open(partial, "wb") as file:
                file.write(head.encode("utf-8") + b"\n" + str(len(item.body)).encode("ascii") + b"\n" + item.body)
                file.flush()
                os.fsync(file.fileno())
            os.rename(partial, path)
        except OSError:
            if os.path.exists(partial):
                os.unlink(partial)
            raise
        self._sync()

    def _sync(self) -> None:
        descriptor = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some file systems of images that are booted cannot sync a directory.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(descriptor)

    def _path(self, number: int) -> str:
        return os.path.join(self._directory, "{:010d}{}".format(number, ENDING))

    def first(self) -> Optional[Item]:
        """The oldest item that is not set aside; when there are only such, the oldest of them; None if all is sent."""
        while True:
            with self._lock:
                normal = [number for number in self._waiting if number not in self._aside]
                number = min(normal) if normal else (self._aside[0] if self._aside else 0)
                if not number:
                    return None
                kept = self._waiting[number]
            if kept is not None:
                return kept
            item, problem = self._read(number)
            if item is not None:
                return item
            self.give_up(number, "item {}".format(number), problem)

    def _read(self, number: int) -> Tuple[Optional[Item], str]:
        path = self._path(number)
        try:
            with open(path, "rb") as file:
                head = json.loads(file.readline().decode("utf-8"))
                size = int(file.readline())
                body = file.read()
            if len(body) != size:
                return None, "{} is damaged: it has {} bytes of {}".format(path, len(body), size)
            return Item(number, str(head["label"]), str(head["content_type"]), body, dict(head["meta"])), ""
        except (OSError, ValueError, KeyError, TypeError) as error:
            return None, "{} cannot be read: {}".format(path, error)

    def sent(self, number: int) -> None:
        """Forget an item: the region has it."""
        self._forget(number)
        self._unlink(self._path(number))

    def set_aside(self, number: int) -> None:
        """Let the others go first."""
        with self._lock:
            if number in self._aside:
                self._aside.remove(number)
            self._aside.append(number)

    def give_up(self, number: int, label: str, reason: str) -> None:
        """Keep an item that will not be sent any more where people find it, and remember that it was not."""
        with self._lock:
            kept = self._waiting.get(number)
            self._gone.append("{} ({})".format(label, reason))
        self._forget(number)
        if kept is None:
            path = self._path(number)
            try:
                os.rename(path, os.path.join(self._directory, REFUSED, os.path.basename(path)))
            except OSError as error:
                self._complain("{} cannot be kept in {}: {}".format(path, REFUSED, error))

    def _forget(self, number: int) -> None:
        with self._lock:
            self._waiting.pop(number, None)
            if number in self._aside:
                self._aside.remove(number)
            self._lock.notify_all()

    def _unlink(self, path: str) -> None:
        try:
            os.unlink(path)
        except FileNotFoundError:
            # It was kept in memory alone.
            return
        except OSError as error:
            self._complain("{} was sent, but cannot be removed: {}; it may be sent once more".format(path, error))

    @property
    def waiting(self) -> int:
        """How many items are still to be sent."""
        with self._lock:
            return len(self._waiting)

    @property
    def undelivered(self) -> Tuple[str, ...]:
        """What will not be sent any more, with the reasons."""
        with self._lock:
            return tuple(self._gone)

    def wait(self, seconds: Optional[float] = None) -> None:
        """Wait until something is added or goes, at most so long."""
        with self._lock:
            self._lock.wait(seconds)
