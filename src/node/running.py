"""How does one command run, and what came of it? It gets a process group of its own, its outputs go to files.

Nothing that it does can hang the runner: it may fork daemons, close its outputs, fill the disk, or ignore signals.
"""

import errno
import os
import signal
import subprocess
import threading
import time
from typing import IO, Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple

from node.clock import Event, span, start

TERM_SECONDS = 10.0
"""How long a group has to end after TERM, before KILL."""

KILL_SECONDS = 30.0
"""How long a process has to end after KILL. One that waits for hardware that does not answer ends when that does."""

LINGER_SECONDS = 2.0
"""How long outputs are read after the command itself has ended: what it left in the background may hold them open."""

PIECE = 64 * 1024


class Outputs(NamedTuple):
    """Where the outputs go: both in one file as they came, and each in one of its own."""

    combined: str
    stdout: str
    stderr: str


class Ended(NamedTuple):
    """How a command ended. ``exit_status`` is as a shell counts: 128 and the signal's number if one ended it.

    ``runtime`` is in seconds. ``note`` says what a person should know besides.
    """

    exit_status: int
    runtime: float
    timed_out: bool = False
    stopped: bool = False
    note: str = ""


def run(
    command: List[str],
    outputs: Outputs,
    environment: Mapping[str, str],
    directory: str,
    timeout: float,
    stop: Event,
    now: Callable[[], float] = time.monotonic,
    term_seconds: float = TERM_SECONDS,
    on_start: Callable[[int], None] = lambda pid: None,
) -> Ended:
    """Run ``command`` until it ends, ``timeout`` seconds are over (0: never), or ``stop`` is set.

    :param on_start: called with its process id when it has begun.
    """
    begin = now()
    sink = _Sink(outputs)
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=directory,
            env=dict(environment),
            start_new_session=True,
            close_fds=True,
        )
    except (OSError, ValueError) as error:
        # As MAAS's runner: a command that cannot be executed has the error's number as its exit status.
        number = error.errno if isinstance(error, OSError) and error.errno else 2
        why = getattr(error, "strerror", None) or error
        sink.close()
        note = "{} cannot be executed: {}{}".format(command[0], why, _hint(command[0], number))
        return Ended(number, now() - begin, note=note)
    try:
        return _watch(process, outputs, sink, begin, timeout, stop, now, term_seconds, on_start)
    finally:
        sink.close()
        if process.poll() is None:
            # The runner itself has failed, and what it knows nothing of any more is not to run on.
            _signal(process.pid, signal.SIGKILL)


def _watch(
    process: "subprocess.Popen[bytes]",
    outputs: Outputs,
    sink: "_Sink",
    begin: float,
    timeout: float,
    stop: Event,
    now: Callable[[], float],
    term_seconds: float,
    on_start: Callable[[int], None],
) -> Ended:
    problem = ""
    try:
        on_start(process.pid)
    except OSError as error:
        problem = "it could not be noted that it runs: {}".format(error)
    readers = [
        _reader(process.stdout, "stdout", sink),
        _reader(process.stderr, "stderr", sink),
    ]
    timed_out = stopped = False
    while process.poll() is None:
        left = begin + timeout - now() if timeout else 1.0
        if left <= 0 or stop.is_set():
            timed_out, stopped = left <= 0, left > 0
            end_group(process, term_seconds)
            break
        _has_ended(process, min(left, 0.5))
    status = process.poll()
    lingering = _join(readers)
    sink.close()
    notes = [problem] if problem else []
    if timed_out:
        notes.append("it was ended after its limit of {}".format(span(timeout)))
    if stopped:
        notes.append("it was ended because the region said stop")
    if status is None:
        status = -signal.SIGKILL
        notes.append("it cannot be ended, as it waits for the kernel or for hardware; it is left")
    elif lingering:
        notes.append("something that it left running holds its outputs open; what that writes is not kept")
    if sink.problem:
        notes.append("not all of its output was kept: {}".format(sink.problem))
    return Ended(128 - status if status < 0 else status, now() - begin, timed_out, stopped, "; ".join(notes))


def _hint(path: str, number: int) -> str:
    if number == errno.ENOENT and os.path.exists(path):
        return " (the interpreter that its first line names is not on this machine)"
    if number == errno.ENOEXEC:
        return " (its first line must name an interpreter, such as #!/bin/sh)"
    return ""


def end_group(process: "subprocess.Popen[bytes]", term_seconds: float) -> None:
    """End a process and its whole group: TERM, and KILL for what is left after ``term_seconds``.

    It may be there all the same when this returns: not even KILL ends what waits for hardware.
    """
    _signal(process.pid, signal.SIGTERM)
    # What was stopped does not see TERM before it goes on.
    _signal(process.pid, signal.SIGCONT)
    until = time.monotonic() + term_seconds
    ended = _has_ended(process, term_seconds)
    # Whoever else is in its group has as long: signal 0 only asks whether there is one.
    while ended and _signal(process.pid, 0) and time.monotonic() < until:
        time.sleep(0.05)
    _signal(process.pid, signal.SIGKILL)
    _has_ended(process, KILL_SECONDS)


def remember(pid: int, path: str) -> None:
    """Write to ``path`` which process runs, so that the next start can end it if this one is killed.

    :raises OSError: if that cannot be written.
    """
    with open(path, "w") as file:
        file.write("{} {}".format(pid, _start_of(pid)))


def end_left_over(path: str, term_seconds: float = TERM_SECONDS) -> bool:
    """End what an earlier start left running of a script: the process that :func:`remember` wrote to ``path``, and
    whatever still has that script's outputs in its environment; whether there was any.

    A runner that was killed just when the script began has written nothing, and the script may have left its group.
    """
    left = {pid: start for pid, start in _left_over(path) if start and _start_of(pid) == start}
    until = time.monotonic() + term_seconds
    for pid in left:
        _signal(pid, signal.SIGTERM)
    while any(_start_of(pid) == start for pid, start in left.items()) and time.monotonic() < until:
        time.sleep(0.05)
    for pid in left:
        _signal(pid, signal.SIGKILL)
    return bool(left)


def _left_over(path: str) -> Iterator[Tuple[int, int]]:
    """The leaders of groups that may be what is left over, each with when it was started."""
    try:
        with open(path) as file:
            pid, start = map(int, file.read().split())
        yield pid, start
    except (OSError, ValueError):
        # None was begun, or the runner was killed before it was written.
        pass
    mark = os.fsencode("OUTPUT_COMBINED_PATH=" + os.path.join(os.path.dirname(os.path.abspath(path)), ""))
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open("/proc/{}/environ".format(name), "rb") as environment:
                is_one = any(each.startswith(mark) for each in environment.read().split(b"\0"))
            group = os.getpgid(int(name)) if is_one else 0
        except OSError:
            # It has ended meanwhile, or is somebody else's.
            continue
        if group and group != os.getpgrp():
            yield group, _start_of(group)


def _start_of(pid: int) -> int:
    """When a process was started, as the kernel counts (proc(5)): a number is used again, but not both. 0 if it does
    not run."""
    try:
        with open("/proc/{}/stat".format(pid), "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def _has_ended(process: "subprocess.Popen[bytes]", seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _signal(group: int, number: int) -> bool:
    """Send it; whether there is anybody in the group."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        # The whole group is gone; or only what is no process of ours any more is left in it.
        return False
    return True


class _Sink(object):
    """The three files, written by two readers."""

    def __init__(self, outputs: Outputs) -> None:
        self._lock = threading.Lock()
        self._files: Dict[str, IO[bytes]] = {}
        self.problem = ""
        for name, path in zip(outputs._fields, outputs):
            try:
                self._files[name] = open(path, "wb", buffering=0)
            except OSError as error:
                self.problem = "{}: {}".format(path, error.strerror or error)

    def write(self, name: str, data: bytes) -> None:
        with self._lock:
            for each in ("combined", name):
                file = self._files.get(each)
                if file is None:
                    continue
                try:
                    left = memoryview(data)
                    while left:
                        left = left[file.write(left) :]
                except OSError as error:
                    # The disk is full: reading goes on, so that the script is not stuck.
                    self.problem = "{}: {}".format(file.name, error.strerror or error)

    def close(self) -> None:
        """What comes later is thrown away."""
        with self._lock:
            files, self._files = self._files, {}
        for file in files.values():
            file.close()
            if not self.problem and not os.path.lexists(file.name):
                self.problem = "{}: it was deleted meanwhile".format(file.name)


def _reader(stream: Optional[IO[bytes]], name: str, sink: _Sink) -> threading.Thread:
    assert stream is not None

    def read() -> None:
        with stream:
            while True:
                data = os.read(stream.fileno(), PIECE)
                if not data:
                    return
                sink.write(name, data)

    thread = threading.Thread(target=read, name="reading " + name)
    thread.daemon = True
    start(thread)
    return thread


def _join(readers: List[threading.Thread]) -> bool:
    """Wait for the readers for a moment; whether one goes on, because something still holds its stream."""
    until = time.monotonic() + LINGER_SECONDS
    for reader in readers:
        reader.join(max(until - time.monotonic(), 0.0))
    return any(reader.is_alive() for reader in readers)


def environment_of(values: Mapping[str, Any]) -> Mapping[str, str]:
    """This process's environment with ``values``; without what is the runner's own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    kept.update({name: str(value) for name, value in values.items()})
    return kept
