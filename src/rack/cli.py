"""The commands of ``stanchion`` that the rack's package brings: joining a region.

Parsers only; what the command needs is imported when it is run, so that ``stanchion --help`` is quick.
"""

from __future__ import annotations

import argparse
from typing import Any, Final

from rpc.cli import command

DEFAULT_CONFIG: Final = "/etc/stanchion/rack.toml"


def commands(subparsers: Any) -> None:
    """Add this package's commands."""
    parser = subparsers.add_parser("rack", help="on a rack's host: join a region")
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


def _join(arguments: argparse.Namespace) -> int:
    from rack.joining import run

    return run(arguments)
