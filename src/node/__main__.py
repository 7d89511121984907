"""The command line of the runner: ``python3 runner.pyz``."""

import argparse
import fcntl
import hashlib
import os
import signal
import sys
import tempfile
import urllib.request
from typing import Any, List, Optional

from node.client import Client
from node.console import Console
from node.credentials import Credentials, NoCredentials, find
from node.runner import Options, Runner

DIRECTORY = "/var/lib/stanchion-runner"

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
        credentials = find(_read, _fetch, chosen.config)
    except NoCredentials as error:
        console.error(str(error))
        return 2
    console.hide([credentials.consumer_key, credentials.token_key, credentials.token_secret])
    return start(credentials, console, chosen.directory, Options(chosen.heartbeat, chosen.patience))


def start(credentials: Credentials, console: Console, directory: str, options: Options) -> int:
    """Run with these credentials; the exit status."""
    # Each run has a token of its own, and so a directory of its own.
    mine = os.path.join(directory, hashlib.sha256(credentials.token_key.encode("utf-8")).hexdigest()[:16])
    try:
        os.makedirs(mine, mode=0o700, exist_ok=True)
    except OSError as error:
        mine = tempfile.mkdtemp(prefix="stanchion-runner-")
        console.warn("{} cannot be made ({}); {} is used, and lost at a reboot".format(directory, error, mine))
    descriptor = os.open(os.path.join(mine, "lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        console.error("another runner is at work for this machine ({})".format(mine))
        return 3
    console.say("running the scripts that {} has for this machine; kept in {}".format(credentials.metadata_url, mine))
    runner = Runner(Client(credentials), mine, console, options)

    def down(number: int, frame: Any) -> None:
        runner.shut_down()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, down)
    return runner.run()


def _read(path: str) -> str:
    with open(path, "rb") as file:
        return file.read(1 << 20).decode("utf-8", "replace")


def _fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30.0) as response:
        content: bytes = response.read(1 << 20)
    return content.decode("utf-8", "replace")


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
