"""What is still to be sent? One file for each item, in a directory, numbered in the order in which they were made.

An item is on the disk, whole and synced, before anybody goes on; it goes when the region has it. A machine that is
killed or reboots finds at its next start what it had not sent, byte for byte. When the disk is full an item is kept in
memory, and that is said. What will never be sent is kept beside the others, with the reason.
"""

import errno
import json
import os
import re
import threading
from typing import Any, Callable, Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Tuple

ENDING = ".item"
REFUSED = "undelivered"
"""The subdirectory for what will not be sent any more: kept for people."""


class Item(NamedTuple):
    """One POST: ``label`` names it for people, ``meta`` is what the runner itself wants to know of it later.

    With ``meta["is_last"]`` it is not sent while anything with a key that was added before it is still to be sent.
    """

    number: int
    label: str
    content_type: str
    body: bytes
    meta: Mapping[str, Any] = {}


class Spool(object):
    """The items in ``directory``. Thread-safe; one sender takes, anybody adds.

    :param complain: called with a sentence about what is wrong with the disk, or with what was found on it.
    :param on_change: called, in any thread, when something was added or is gone.
    :raises OSError: if the directory cannot be made or read.
    """

    def __init__(
        self, directory: str, complain: Callable[[str], None], on_change: Callable[[], None] = lambda: None
    ) -> None:
        self._directory = directory
        self._complain = complain
        self._on_change = on_change
        self._lock = threading.Lock()
        self._waiting: Dict[int, Optional[Item]] = {}
        """By number; the item itself only where the disk could not take it."""
        self._meta: Dict[int, Mapping[str, Any]] = {}
        self._held: List[int] = []
        self._gone: List[Tuple[str, Mapping[str, Any]]] = []
        self._aside: List[int] = []
        refused = os.path.join(directory, REFUSED)
        os.makedirs(refused, mode=0o700, exist_ok=True)
        gone = [(number, True) for number in _numbers(refused)]
        for number, is_gone in sorted([(number, False) for number in _numbers(directory)] + gone):
            item, problem = _read(self._path(number, is_gone), number)
            if is_gone:
                self._remember_gone(number, item)
            elif item is None:
                self._waiting[number] = None
                self.give_up(number, "item {}".format(number), problem)
            else:
                self._waiting[number] = None
                self._meta[number] = item.meta
        self._next = max([number for number, _ in gone] + list(self._waiting), default=0) + 1
        for name in os.listdir(directory):
            if name.endswith(".part"):
                # Never finished, so nobody was told that it is safe.
                os.unlink(os.path.join(directory, name))

    def _remember_gone(self, number: int, item: Optional[Item]) -> None:
        try:
            with open(self._path(number, True) + ".why", "rb") as file:
                said = file.read().decode("utf-8", "replace")
        except OSError as error:
            said = "{} (why it was not delivered cannot be read: {})".format(item.label if item else number, error)
        self._gone.append((said, item.meta if item else {}))

    def add(
        self, label: str, content_type: str, body: bytes, meta: Optional[Mapping[str, Any]] = None, held: bool = False
    ) -> Item:
        """Keep an item until it is sent. Returns when it is on the disk, or in memory if the disk has no room.

        :param held: it is not sent before :meth:`release`, by this process.
        """
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
            self._meta[item.number] = item.meta
            if held:
                self._held.append(item.number)
        self._on_change()
        return item

    def release(self, number: int) -> None:
        """Let an item that was held be sent."""
        with self._lock:
            self._held.remove(number)
        self._on_change()

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

    def _path(self, number: int, is_gone: bool = False) -> str:
        name = "{:010d}{}".format(number, ENDING)
        return os.path.join(self._directory, REFUSED, name) if is_gone else os.path.join(self._directory, name)

    def first(self) -> Optional[Item]:
        """The item to be tried next; None if there is none.

        The oldest that is neither held nor set aside; when there are only such, the one set aside first. What is to
        come last is passed over while what it has to wait for is aside.
        """
        while True:
            with self._lock:
                ready = [number for number in self._waiting if number not in self._held]
                if not ready:
                    return None
                number = min(filter(self._may_go, ready), default=self._aside[0] if self._aside else min(ready))
                kept = self._waiting[number]
            if kept is not None:
                return kept
            item, problem = _read(self._path(number), number)
            if item is not None:
                return item
            self.give_up(number, "item {}".format(number), problem)

    def _may_go(self, number: int) -> bool:
        if number in self._aside:
            return False
        awaited = (aside for aside in self._aside if aside < number and "key" in self._meta[aside])
        return not self._meta[number].get("is_last") or not any(awaited)

    def sent(self, number: int) -> None:
        """Forget an item: the region has it."""
        self._unlink(self._path(number))
        self._forget(number)
        self._on_change()

    def set_aside(self, number: int) -> None:
        """Let the others go first."""
        with self._lock:
            if number in self._aside:
                self._aside.remove(number)
            self._aside.append(number)

    def give_up(self, number: int, label: str, reason: str) -> None:
        """Keep an item that will not be sent any more where people find it, with the reason."""
        said = "{} ({})".format(label, reason)
        with self._lock:
            kept = self._waiting.get(number)
            self._gone.append((said, self._meta.get(number, {})))
        if kept is None:
            path = self._path(number, True)
            try:
                with open(path + ".why", "wb") as file:
                    file.write(said.encode("utf-8", "replace"))
                os.rename(self._path(number), path)
            except OSError as error:
                self._complain("{} cannot be kept in {}: {}".format(label, os.path.dirname(path), error))
        self._forget(number)
        self._on_change()

    def _forget(self, number: int) -> None:
        with self._lock:
            self._waiting.pop(number, None)
            self._meta.pop(number, None)
            for listed in (self._aside, self._held):
                if number in listed:
                    listed.remove(number)

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
        """What will not be sent any more, with the reasons; that of earlier starts too."""
        with self._lock:
            return tuple(said for said, _ in self._gone)

    @property
    def metas(self) -> Tuple[Mapping[str, Any], ...]:
        """The ``meta`` of every item that there is, to be sent or not, in no order."""
        with self._lock:
            return (*self._meta.values(), *(meta for _, meta in self._gone))

    def keys(self) -> FrozenSet[str]:
        """The ``key`` of every ``meta`` that has one."""
        return frozenset(str(meta["key"]) for meta in self.metas if "key" in meta)


def _numbers(directory: str) -> List[int]:
    matches = (re.match(r"([0-9]{1,18})\.item\Z", name) for name in os.listdir(directory))
    return [int(match.group(1)) for match in matches if match]


def _read(path: str, number: int) -> Tuple[Optional[Item], str]:
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
