"""The program ``stanchion``: which sub-commands there are, and what its exit status means.

The commands come from the parts that are installed, ``region.cli`` and ``rack.cli``; each has a function
``commands(subparsers)`` that adds parsers with ``set_defaults(run=…)``, where ``run(arguments)`` gives the exit status.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import io
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol

from rpc.console import CommandFailed, Status, complain
from rpc.settings import SettingsError

MODULES: Final = ("region.cli", "rack.cli")

DESCRIPTION: Final = """\
Stanchion imports operating system images, keeps verified copies of them on racks, and says which can be deployed
right now: never a wrong answer, never a silent failure, never a half state."""

EPILOG: Final = """\
try it:
  stanchion up                           a region and a rack on this machine, with a small sample
  stanchion releases                     what can be deployed, asked of the racks this moment
  stanchion why sample/alpha             why it can or cannot, rack by rack

which region:
  --url and --key, else STANCHION_URL and STANCHION_KEY, else the file that STANCHION_PROFILE names, else the
  `stanchion up` that runs from this directory, else what `stanchion login` wrote to ~/.config/stanchion/profile.toml

exit status:
  0    done, or the answer is yes
  1    the answer is no: not deployable now, the import failed or had errors, there is no such thing
  2    the command line, a settings file or the key is wrong
  3    no answer: the region cannot be reached, failed, or cannot know at the moment
  130  Ctrl-C

`stanchion COMMAND --help` explains each command, with examples."""


class Subparsers(Protocol):
    """What ``commands`` is given."""

    def add_parser(self, name: str, **kwargs: Any) -> argparse.ArgumentParser:
        """A parser for the command ``name``."""
        ...


def common() -> argparse.ArgumentParser:
    """The parent parser of every command: ``--json``."""
    parent = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    parent.add_argument("--json", action="store_true", help="print JSON, for programs")
    return parent


def command(
    subparsers: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    *,
    epilog: str,
    parents: Iterable[argparse.ArgumentParser] = (),
) -> argparse.ArgumentParser:
    """Add the command ``name``, whose help is ``summary`` and the examples in ``epilog``."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=summary[0].lower() + summary[1:].rstrip("."),
        description=summary,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[common(), *parents],
    )
    parser.set_defaults(run=run)
    return parser


def build_parser(modules: Sequence[str] = MODULES) -> argparse.ArgumentParser:
    """The parser of the whole program; a part that is not installed just lacks its commands."""
    parser = argparse.ArgumentParser(
        prog="stanchion",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"stanchion {_version()}")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs (also after any command)")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for name in modules:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in (name, name.partition(".")[0]):
                raise
            continue
        module.commands(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``stanchion`` with the arguments ``argv`` (default: the process's), and return the exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what the locale cannot show is shown as an escape
            stream.reconfigure(errors="backslashreplace")
    parser = build_parser()
    arguments = parser.parse_args(argv)
    run: Callable[[argparse.Namespace], int] | None = getattr(arguments, "run", None)
    if run is None:
        parser.print_help()
        return Status.USAGE
    try:
        return run(arguments)
    except CommandFailed as error:
        complain(str(error))
        return error.status
    except SettingsError as error:
        complain(str(error))
        return Status.USAGE
    except KeyboardInterrupt:
        complain("interrupted")
        return Status.INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output (`| head`) has had enough. Python would complain about it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13


def _version() -> str:
    return importlib.metadata.version("stanchion")


if __name__ == "__main__":
    sys.exit(main())
