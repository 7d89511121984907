"""The parsers of ``stanchion node``: everything that is done with machines."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from region.cli.api import connection_options
from rpc.cli import command

Later = Callable[[str, str], Callable[[argparse.Namespace], int]]


def node_commands(subparsers: Any, later: Later) -> None:
    """Add ``node`` with its actions.

    :param later: gives a function of a module of ``region.cli`` that is imported when it is called.
    """
    connection = connection_options()
    parser = command(
        subparsers,
        "node",
        later("nodes", "show_all"),
        "Which machines there are and how they do; commission them, and see why one failed.",
        epilog="""\
examples:
  stanchion node
  stanchion node create --arch amd64 --mac 00:16:3e:00:00:0a --name node-7 --commission
  stanchion node show node-7             its hardware, what ran on it, and if it failed: why, and what to do
  stanchion node commission node-7 --wait
  stanchion node output node-7 10-lshw   what a script wrote
  stanchion node runner runner.pyz       to commission a machine that runs already, without booting it""",
        parents=[connection],
    )
    _which(parser)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action")

    def action(name: str, function: str, summary: str, example: str, module: str = "nodes") -> Any:
        return command(
            actions, name, later(module, function), summary, epilog=f"example:\n  stanchion node {example}",
            parents=[connection],
        )  # fmt: skip

    _which(action("list", "show_all", "Show the machines.", "list --status 'failed commissioning'"))
    _node(action("show", "show", "Show one machine, and what is wrong with it.", "show node-7", "node_show"))
    _create(action("create", "create", "Make a machine.", "create --arch amd64 --mac 00:16:3e:00:00:0a --commission"))
    one = _node(action("commission", "commission", "Begin to commission a machine.", "commission node-7 --wait"))
    _plan(one)
    _wait(one)
    one = _node(
        action("test", "test", "Begin to test a machine, without commissioning it.", "test node-7 --test memtest")
    )
    _tests(one)
    _wait(one)
    one = action(
        "output", "output", "Show what the scripts of the last run wrote.", "output node-7 10-lshw", "node_show"
    )
    _node(one).add_argument("script", nargs="*", metavar="SCRIPT", help="only of these scripts")
    one.add_argument("--testing", action="store_true", help="of the last tests, not of the last commissioning")
    one.add_argument("--all", action="store_true", help="both streams apart too, results, and what came late")
    for name, function, summary in (
        ("abort", "abort", "End what is being done with a machine."),
        ("mark-broken", "mark_broken", "Say that a machine is broken; its run ends."),
        ("mark-fixed", "mark_fixed", "Say that a machine is mended."),
    ):
        one = _node(action(name, function, summary, f"{name} node-7 --comment 'why'"))
        one.add_argument("--comment", metavar="TEXT", default="", help="why; it is shown with the machine")
    _node(action("delete", "delete", "Forget a machine, with all that it ever ran.", "delete node-7"))
    _node(
        action(
            "credentials", "credentials",
            "Show with what a machine that is being commissioned speaks to the region, as cloud-init reads it.",
            "credentials node-7",
        )
    )  # fmt: skip
    action(
        "runner",
        "runner",
        "Write the program that runs a machine's scripts to a file, for a machine that runs already.",
        "runner runner.pyz",
    ).add_argument("file", metavar="FILE", help="where it is written to, such as runner.pyz")


def _node(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("node", metavar="NODE", help="its name or id")
    return parser


def _which(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--status", metavar="STATUS", action="append", help="only with this status, such as ready (again for more)"
    )
    parser.add_argument("--tag", metavar="TAG", action="append", help="only with this tag (again: and with that)")


def _create(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", metavar="ARCH", required=True, help="such as amd64, or amd64/generic")
    parser.add_argument(
        "--mac",
        metavar="MAC",
        action="append",
        required=True,
        help="a MAC address (again for more; it boots from the first)",
    )
    parser.add_argument("--name", metavar="NAME", help="its host name (default: one made from its id)")
    parser.add_argument("--description", metavar="TEXT", help="anything for people")
    parser.add_argument("--commission", action="store_true", help="begin to commission it")
    _plan(parser)


def _plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--script", metavar="NAME", action="append", help="run this commissioning script, or those with this tag, too"
    )
    _tests(parser)
    parser.add_argument("--skip-networking", action="store_true", help="leave the configuration of its network")
    parser.add_argument("--skip-storage", action="store_true", help="leave the configuration of its storage")


def _tests(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--test", metavar="NAME", action="append", help="run this test, or those with this tag")
    which.add_argument("--no-tests", action="store_true", help="run no tests")
    parser.add_argument("--enable-ssh", action="store_true", help="leave it on, with SSH, when all is done")


def _wait(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--wait", action="store_true", help="wait for its end; exit status 1 if it is not ready then")
