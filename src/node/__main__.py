"""The command line of the runner: ``python3 runner.pyz``."""

import argparse
import errno
import fcntl
import hashlib
import http.client
import os
import signal
import sys
import tempfile
import urllib.request
from functools import partial
from typing import Any, List, Optional

from node.client import Client
from node.clock import Clock, within
from node.console import Console
from node.credentials import Credentials, NoCredentials, find
from node.delivery import ITEM_SECONDS, pause
from node.priority import Priority
from node.runner import Options, Runner

DIRECTORY = "/var/lib/stanchion-runner"

FETCH_SECONDS = 30.0
"""How long one attempt to get the credentials may take."""

USAGE = """\
Where the region is, and with what this machine proves who it is, is looked for in this order: --config,
$COMMISSIONING_CREDENTIALS_URL, cloud-init's configuration, cloud-config-url= on the kernel's command line.

exit status: 0 everything passed and was delivered; 1 something was not; 2 there are no credentials, or the command
line is wrong; 3 another runner is at work for this machine
"""


def main(arguments: Optional[List[str]] = None) -> int:
    """Run the scripts that the region has for this machine, and report each to it; the exit status."""
    parser = argparse.ArgumentParser(
        prog="stanchion-runner",
        description="Run the scripts that the region has for this machine, and report each to it.",
        epilog=USAGE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", metavar="FILE|URL", help="a configuration with the credentials in it")
    parser.add_argument("--directory", metavar="DIR", default=DIRECTORY, help="what it keeps (default: %(default)s)")
    parser.add_argument("--heartbeat", metavar="SECONDS", type=_positive, default=60.0, help="default: %(default)g")
    parser.add_argument(
        "--patience", metavar="SECONDS", type=_patient, default=1800.0,
        help="how long to go on when all has run and the region takes nothing; at least 300 (default: %(default)g)",
    )  # fmt: skip
    chosen = parser.parse_args(arguments)
    console = Console()
    try:
        credentials = find(_read, partial(_fetch, console), chosen.config)
    except NoCredentials as error:
        console.error(str(error))
        return 2
    console.hide([credentials.consumer_key, credentials.token_key, credentials.token_secret])
    return start(credentials, console, chosen.directory, Options(chosen.heartbeat, chosen.patience))


def start(credentials: Credentials, console: Console, directory: str, options: Options) -> int:
    """Run with these credentials; the exit status."""
    # Each run has a token of its own, and so a directory of its own.
    mine = os.path.join(directory, hashlib.sha256(credentials.token_key.encode("utf-8")).hexdigest()[:16])
    client = Client(credentials, say=console.warn)
    priority = Priority(console.say)
    try:
        lock = _Lock(mine)
        runner = Runner(client, mine, console, options, on_start=priority.release)
    except AlreadyRunning:
        console.error("another runner is at work for this machine ({})".format(mine))
        return 3
    except OSError as error:
        refused, mine = mine, tempfile.mkdtemp(prefix="stanchion-runner-")
        console.warn("{} cannot be used ({}); {} is, and is lost at a reboot".format(refused, error, mine))
        lock = _Lock(mine)
        runner = Runner(client, mine, console, options, on_start=priority.release)
    console.say("running the scripts that {} has for this machine; kept in {}".format(credentials.metadata_url, mine))
    priority.protect()
    statuses: List[int] = []
    worker = Clock().start("runner", lambda: statuses.append(runner.run()))

    def down(number: int, frame: Any) -> None:
        # This thread only ever waits for the other one, so it holds no lock that this needs.
        runner.shut_down()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, down)
    while not worker.wait(1.0):
        continue
    lock.release()
    return statuses[0] if statuses else 1


class AlreadyRunning(Exception):
    """Another runner has the lock."""


class _Lock(object):
    """The lock of a directory, held until it is released or the process ends, however it ends.

    :raises AlreadyRunning: if another process has it.
    :raises OSError: if it cannot be had at all.
    """

    def __init__(self, directory: str) -> None:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        self._descriptor = os.open(os.path.join(directory, "lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._descriptor)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise AlreadyRunning(directory) from error

    def release(self) -> None:
        """Let others have it."""
        os.close(self._descriptor)


def _read(path: str) -> str:
    with open(path, "rb") as file:
        return file.read(1 << 20).decode("utf-8", "replace")


def _fetch(console: Console, url: str, clock: Optional[Clock] = None, seconds: float = ITEM_SECONDS) -> str:
    """The text at ``url``: asked for until it comes, or the server refuses it, or so many ``seconds`` are over."""
    clock = clock or Clock()
    until = clock.now() + seconds
    attempt = 0
    while True:
        attempt += 1
        try:
            return _fetch_once(url)
        except (OSError, http.client.HTTPException) as error:
            # The region may be starting, or the network not be there yet.
            wait = pause(attempt, None, 1.0)
            why = str(error) or type(error).__name__
            if 400 <= getattr(error, "code", 0) < 500 or clock.now() + wait > until:
                raise OSError(why) from error
            console.warn("{}: attempt {}: {}; next try in {:.0f} s".format(url, attempt, why, wait))
        clock.event().wait(wait)


def _fetch_once(url: str) -> str:
    """Whatever the server does, it takes no longer than :data:`FETCH_SECONDS`. No proxy is to see what is there."""

    def read() -> bytes:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=FETCH_SECONDS) as response:
            content: bytes = response.read()
        return content

    return within(FETCH_SECONDS, read).decode("utf-8", "replace")


def _positive(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < 86400:
        raise argparse.ArgumentTypeError("{} is not a number of seconds over 0 and under a day".format(text))
    return seconds


def _patient(text: str) -> float:
    seconds = _positive(text)
    if seconds < 300:
        raise argparse.ArgumentTypeError("{} is less than 300 seconds".format(text))
    return seconds


if __name__ == "__main__":
    sys.exit(main())
