"""What time is it, and how does one wait? Everything in the runner that waits does it through one of these.

So tests can put a clock in its place on which half an hour of a region that is away passes at once.
"""

import threading
import time
from typing import Any, Callable, List, Optional, Tuple, TypeVar, Union

Result = TypeVar("Result")

START_ATTEMPTS = 60
START_PAUSE_SECONDS = 1.0


class Event(object):
    """As ``threading.Event``."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._event.is_set()

    def set(self) -> None:
        """Let everybody who waits go on."""
        self._event.set()

    def clear(self) -> None:
        """From now on who waits has to wait."""
        self._event.clear()

    def wait(self, seconds: Optional[float] = None) -> bool:
        """Wait until it is set, at most so long; whether it is."""
        return self._event.wait(seconds)


class Worker(object):
    """A thread that somebody may wait for."""

    def __init__(self, ended: Event) -> None:
        self._ended = ended

    def wait(self, seconds: Optional[float] = None) -> bool:
        """Wait until it has ended, at most so long; whether it has."""
        return self._ended.wait(seconds)


class Clock(object):
    """The real time."""

    def now(self) -> float:
        """Seconds since some moment; never set back."""
        return time.monotonic()

    def wall(self) -> float:
        """Seconds since the epoch, as this machine has it."""
        return time.time()

    def event(self) -> Event:
        """An event that is not set."""
        return Event()

    def start(self, name: str, target: Callable[..., None], *arguments: Any) -> Worker:
        """Call ``target`` in a thread of its own, which does not keep the process alive."""
        ended = self.event()

        def work() -> None:
            try:
                target(*arguments)
            finally:
                ended.set()

        thread = threading.Thread(target=work, name=name)
        thread.daemon = True
        start(thread)
        return Worker(ended)


def start(thread: threading.Thread, pause: Callable[[float], object] = time.sleep) -> None:
    """Start a thread. While the machine has no room for one, as a script takes all there is, it is tried again.

    :raises RuntimeError: if it has none for a minute.
    """
    attempt = 1
    while True:
        try:
            thread.start()
            return
        except RuntimeError:
            if attempt == START_ATTEMPTS:
                raise
        attempt += 1
        pause(START_PAUSE_SECONDS)


class TooLong(OSError):
    """What was to be done has not been done in time; the text says in which."""


def within(seconds: float, target: Callable[[], Result]) -> Result:
    """What ``target`` gives, or raises.

    It is for what waits for others in ways that cannot be broken off, as looking up a name does: after ``seconds`` of
    real time its thread is left to itself.

    :raises TooLong: if it takes longer.
    """
    outcome: List[Union[Tuple[Result], BaseException]] = []

    def work() -> None:
        try:
            outcome.append((target(),))
        except BaseException as error:  # noqa: BLE001  # whatever it is, it is raised where it is waited for
            outcome.append(error)

    thread = threading.Thread(target=work, name="within")
    thread.daemon = True
    start(thread)
    thread.join(seconds)
    if not outcome:
        raise TooLong("no whole answer within {:.0f} s".format(seconds))
    [ended] = outcome
    if isinstance(ended, BaseException):
        raise ended
    return ended[0]


def span(seconds: float) -> str:
    """A length of time for people: ``45 s``, ``12 min``, ``3.5 h``."""
    if seconds < 120:
        return "{:.0f} s".format(seconds)
    if seconds < 7200:
        return "{:.0f} min".format(seconds / 60)
    return "{:.1f} h".format(seconds / 3600)
