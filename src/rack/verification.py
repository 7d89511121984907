"""How is a rack told on its own host to verify its files? By a file in its state directory, which it takes away.

``stanchion rack verify`` writes the file and then watches what the rack writes of its progress. Where no rack is
running, the command does the work itself, under the lock that keeps a rack from starting meanwhile.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from attrs import asdict, define, evolve, field
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from rack.config import RackConfig
from rack.inspection import SnapshotError
from rack.snapshots import SnapshotStore
from rpc.blobs import READS, BlobError, BlobStore, Examination, Unreadable
from rpc.console import CommandFailed, Status, complain, size, write, write_json
from rpc.fetch import RunInThread
from rpc.settings import load
from rpc.verifying import MIB, UNREADABLE_SECONDS, Pass, Verifier, read_pass, rest

log = Logger()

LOOK_SECONDS: Final = 2.0
"""How often the rack looks whether it is asked to verify."""

TAKEN_SECONDS: Final = 15.0
"""How long the command waits for the rack to take the request."""

_MOMENT: Final = threading.Event()


@define(eq=False)
class RequestFile:
    """Watches for the file at ``path`` and asks ``verifier`` for what it says: MiB in a second at most, or nothing."""

    path: Path
    verifier: Verifier
    clock: IReactorTime
    run_in_thread: RunInThread
    _looking: LoopingCall = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._looking = LoopingCall(self._look)
        self._looking.clock = self.clock

    def start(self) -> None:
        """Look from now on."""
        looking = self._looking.start(LOOK_SECONDS)
        looking.addErrback(lambda reason: log.failure("Requests to verify are not seen any more", reason))

    async def stop(self) -> None:
        """Look no more."""
        if self._looking.running:
            self._looking.stop()

    def _look(self) -> Deferred[None]:
        return self.run_in_thread(self._take).addCallback(self._taken)

    def _take(self) -> str | None:
        try:
            text = self.path.read_text("ascii", "replace")[:100]
            self.path.unlink()
        except FileNotFoundError:
            return None
        except OSError as error:
            log.error("The request to verify cannot be taken: {error}", error=str(error))
            return None
        return text

    def _taken(self, text: str | None) -> None:
        if text is not None:
            rate = read_rate(text)
            log.info("Asked on this host to verify all files.")
            self.verifier.request(rate * MIB if rate else None)


def read_rate(text: str) -> float | None:
    """The rate (MiB in a second) that a request says; None if it says none."""
    try:
        rate = float(text)
    except ValueError:
        return None
    return rate if 0.01 <= rate <= 100_000 else None


def run(arguments: argparse.Namespace) -> int:
    """``stanchion rack verify``."""
    config = load(RackConfig, arguments.config)
    try:
        is_running = _is_running(config)
        last = _by_the_rack(config, arguments) if is_running else _by_ourselves(config, arguments)
    except KeyboardInterrupt:
        complain("no longer watching; a rack that is running goes on verifying")
        return Status.INTERRUPTED
    except (OSError, SnapshotError) as error:
        raise CommandFailed(f"the rack's files cannot be verified: {error}", Status.USAGE) from error
    if last is None:
        write("the rack verifies its files; its log says what comes of it")
        return Status.YES
    if arguments.json:
        write_json(asdict(last))
    else:
        write(f"{last.files} files ({size(last.bytes)}) were verified: {len(last.damaged) or 'none'} damaged")
        for sha256, reason in last.damaged:
            write(f"  {sha256}: {reason}; it is fetched again" + ("" if is_running else " when the rack runs"))
        for problem in last.problems:
            write(f"  not verified: {problem}")
    return Status.NO if last.damaged or last.problems else Status.YES


def _is_running(config: RackConfig) -> bool:
    """Whether a rack holds the lock of its images.

    :raises OSError: if that cannot be told.
    """
    try:
        descriptor = os.open(config.images_directory / "lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        raise CommandFailed(
            f"there are no images in {config.images_directory}: the rack has not run yet, or --config names another",
            Status.USAGE,
        ) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _by_the_rack(config: RackConfig, arguments: argparse.Namespace) -> Pass | None:
    """Have the rack that is running do it; how that ended, None if that is not waited for."""
    record = config.images_directory / "cache" / "verification.json"
    before = _read(record)
    path = config.verify_request_file
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    temporary.write_text("" if arguments.rate is None else str(arguments.rate), encoding="ascii")
    os.rename(temporary, path)
    deadline = time.monotonic() + TAKEN_SECONDS
    while path.exists():
        if time.monotonic() > deadline:
            path.unlink(missing_ok=True)
            raise CommandFailed(
                f"the rack that holds {config.images_directory} does not take the request; its log may say why",
                Status.UNREACHABLE,
            )
        _MOMENT.wait(0.2)
    if arguments.no_wait:
        return None
    shown = _Shown(arguments.json)
    while True:
        found = _read(record)
        if found is not None:
            shown.show(found)
            if found.ended is not None and (before is None or before.ended is None or found.ended > before.ended):
                return found
        if not _is_running(config):
            raise CommandFailed("the rack has stopped; it goes on verifying when it runs again", Status.UNREACHABLE)
        _MOMENT.wait(0.5)


def _by_ourselves(config: RackConfig, arguments: argparse.Namespace) -> Pass:
    """Do it here, because no rack is running."""
    rate = (arguments.rate or config.verify.rate_mib_per_second) * MIB
    blobs = BlobStore(config.images_directory / "cache")
    store = SnapshotStore(config.images_directory, blobs)
    store.open()
    try:
        return verify_all(blobs, rate, _Shown(arguments.json).show)
    finally:
        blobs.close()
        store.close()


def verify_all(blobs: BlobStore, rate: float, show: Callable[[Pass], object]) -> Pass:
    """Hash every blob, at most ``rate`` bytes in a second; blocks until that is done."""
    sizes = blobs.sizes()
    going = Pass(time.time(), files_total=len(sizes), bytes_total=sum(sizes.values()))
    for sha256 in rest(sizes, ""):
        found: Examination | str
        try:
            found = _examine(blobs, sha256, rate)
        except (OSError, BlobError) as error:
            found = str(error)
        going = going.looked_at(sha256, sizes[sha256], found)
        show(going)
    return evolve(going, ended=time.time())


def _examine(blobs: BlobStore, sha256: str, rate: float) -> Examination:
    for read in range(1, READS):
        try:
            return _read_once(blobs, sha256, rate, read)
        except Unreadable as error:
            complain(f"{sha256}: {error}; it is read again")
            _MOMENT.wait(UNREADABLE_SECONDS)
    return _read_once(blobs, sha256, rate, READS)


def _read_once(blobs: BlobStore, sha256: str, rate: float, read: int) -> Examination:
    begun = blobs.begin_examination(sha256)
    if isinstance(begun, Examination):
        return begun
    try:
        while not begun.is_done:
            at = time.monotonic()
            count = begun.step(max(1, int(rate / 4)))
            _MOMENT.wait(max(0.0, count / rate - (time.monotonic() - at)))
        return blobs.conclude(sha256, begun, read)
    finally:
        begun.close()


def _read(path: Path) -> Pass | None:
    try:
        return read_pass(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None


@define
class _Shown:
    """Says how far it is, at each tenth; nothing when the output is for programs."""

    is_quiet: bool
    _tenth: int = 0

    def show(self, going: Pass) -> None:
        """Say it, if there is something new to say."""
        tenth = 10 * going.bytes // going.bytes_total if going.bytes_total else 0
        if tenth > self._tenth and not self.is_quiet:
            complain(f"verified {size(going.bytes)} of {size(going.bytes_total)} ({10 * tenth} %)")
        self._tenth = tenth
