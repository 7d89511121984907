"""The commands of ``stanchion`` that the rack's package brings: joining a region, verifying its files.

Parsers only; what the command needs is imported when it is run, so that ``stanchion --help`` is quick.
"""

from __future__ import annotations

import argparse
from typing import Any, Final

from rpc.cli import command

DEFAULT_CONFIG: Final = "/etc/stanchion/rack.toml"


def commands(subparsers: Any) -> None:
    """Add this package's commands."""
    parser = subparsers.add_parser("rack", help="on a rack's host: join a region, verify its files")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    one = command(
        actions, "join", _join, "Join this rack to a region, with a token that the region made.",
        epilog="""\
The rack makes its own key and gets a certificate for it. The token names the region's certificate authority, so that
this rack cannot be led to another region. Then start the rack: systemctl start stanchion-rack.

exit status: 0 joined, 1 the region refused, 2 a settings file or the token is wrong, 3 the region cannot be reached.

examples:
  sudo stanchion rack join --region region.example.com:5250 TOKEN
  sudo stanchion rack join --region region.example.com:5250 --name rack-2 - < token
  sudo stanchion rack join --config ./rack.toml --region 127.0.0.1:5250 TOKEN""",
    )  # fmt: skip
    one.add_argument("--region", metavar="HOST:PORT", required=True, help="where the region listens for racks")
    one.add_argument("--name", metavar="NAME", help="what people call this rack (default: the host's name)")
    one.add_argument(
        "--config", metavar="FILE", default=DEFAULT_CONFIG, help="the rack's settings (default: %(default)s)"
    )
    one.add_argument("--again", action="store_true", help="join also if this rack has joined a region already")
    one.add_argument("token", metavar="TOKEN", help="what `stanchion region join-token` printed, or - to read it")
    one = command(
        actions, "verify", _verify, "Hash all files of this rack again; what is damaged is fetched again.",
        epilog="""\
The rack does that by itself, slowly, once a week ([verify] in rack.toml). This has it begin now. What is damaged is set
aside at once, and no image is offered that lacks a file. Without a running rack the command does the work itself.

exit status: 0 nothing is damaged, 1 something was, 2 a settings file is wrong, 3 the rack does not react.

examples:
  sudo stanchion rack verify
  sudo stanchion rack verify --rate 200       not slowly
  sudo stanchion rack verify --no-wait""",
    )  # fmt: skip
    one.add_argument("--rate", metavar="MIB", type=_rate, help="MiB in a second at most (default: that of rack.toml)")
    one.add_argument("--no-wait", action="store_true", help="do not wait for its end")
    one.add_argument(
        "--config", metavar="FILE", default=DEFAULT_CONFIG, help="the rack's settings (default: %(default)s)"
    )


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0.01 <= rate <= 100_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of MiB from 0.01 to 100000")
    return rate


def _verify(arguments: argparse.Namespace) -> int:
    from rack.verification import run

    return run(arguments)


def _join(arguments: argparse.Namespace) -> int:
    from rack.joining import run

    return run(arguments)
