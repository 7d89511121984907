"""The commands of ``stanchion`` that the region's package brings: asking a region, changing it, and running one.

Parsers only; what a command needs is imported when it is run, so that ``stanchion --help`` is quick.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from typing import Any

from region.cli.api import connection_options, parse_selection
from region.cli.node_parsers import node_commands
from rpc.cli import command

DEFAULT_CONFIG = "/etc/stanchion/region.toml"


def commands(subparsers: Any) -> None:
    """Add this package's commands."""
    _up(subparsers)
    _answers(subparsers)
    _sources(subparsers)
    _import(subparsers)
    _script(subparsers)
    _login(subparsers)
    _tags(subparsers)
    _license_keys(subparsers)
    _region(subparsers)
    node_commands(subparsers, _later)


def _later(module: str, function: str = "run") -> Callable[[argparse.Namespace], int]:
    """``region.cli.<module>.<function>``, imported when it is called."""

    def run(arguments: argparse.Namespace) -> int:
        status: int = getattr(importlib.import_module(f"region.cli.{module}"), function)(arguments)
        return status

    return run


def _up(subparsers: Any) -> None:
    parser = command(
        subparsers,
        "up",
        _later("up"),
        "Run a region and a rack on this machine, import images, and keep both running until Ctrl-C.",
        epilog="""\
Everything is kept in the state directory; running it again goes on from there. The first time, without a SOURCE, a
small sample stream is written and imported: nothing in it can boot, but everything about it is real.

examples:
  stanchion up
  stanchion up http://images.maas.io/ephemeral-v3/stable --select ubuntu/noble:amd64 \\
      --keyring /usr/share/keyrings/ubuntu-cloudimage-keyring.gpg
  stanchion up /srv/my-stream --allow-unsigned
  stanchion up --then-stop               bring everything up, stop it again: does it work on this machine?""",
    )
    parser.add_argument("source", nargs="?", metavar="SOURCE", help="a simplestreams URL or directory; else the sample")
    parser.add_argument("--keyring", metavar="FILE", help="the keys that SOURCE is signed with")
    parser.add_argument("--allow-unsigned", action="store_true", help="SOURCE is not signed, and that is all right")
    parser.add_argument(
        "--select", action="append", default=[], type=parse_selection, metavar="OS/RELEASE[:ARCH,…]",
        help="import only this of SOURCE, boot loaders too (again for more; default: everything)",
    )  # fmt: skip
    parser.add_argument("--state", metavar="DIR", help="the state directory (default: ./.state)")
    parser.add_argument(
        "--listen", metavar="ADDRESS", default="127.0.0.1", help="where to listen (default: %(default)s)"
    )
    parser.add_argument("--proxy", metavar="URL", default="", help="the http proxy to fetch SOURCE through")
    parser.add_argument("--then-stop", action="store_true", help="when all is up, stop it and exit with 0")


def _answers(subparsers: Any) -> None:
    connection = connection_options()
    parser = command(
        subparsers,
        "releases",
        _later("answers", "releases"),
        "Which releases can be deployed, asked of the racks this moment.",
        epilog="""\
states:
  deployable     as many racks as the policy needs hold it, verified
  arriving       it is published, and racks are fetching it
  undetermined   a rack that may hold it did not answer; nobody can know at the moment
  unknown        no rack can hold it
  no-racks, nothing-published: no rack has joined; nothing was imported yet

exit status: 0 if anything is deployable, 1 if nothing is, 3 if that cannot be known.

examples:
  stanchion releases
  stanchion releases --arch arm64 --policy all
  stanchion releases --json | jq -r '.releases[] | select(.state == "deployable") | .name'""",
        parents=[connection],
    )
    _which(parser)
    parser = command(
        subparsers,
        "why",
        _later("answers", "why"),
        "Why a release can or cannot be deployed, rack by rack.",
        epilog="""\
For each architecture: with which generation its images came, since when and from which source, or when and why they
went; and for each rack, whether it holds it, fetches it (how much of how much, how fast), could not (why, and when it
tries again), or does not answer (since when, and what was last known of it).

exit status: 0 deployable, 1 not (arriving or unknown), 3 not known at the moment.

examples:
  stanchion why ubuntu/noble
  stanchion why ubuntu/noble --arch amd64 --rack rack-2
  stanchion why ubuntu/noble --arch amd64 --kernel hwe-24.04
  until stanchion why ubuntu/noble --arch amd64; do sleep 10; done""",
        parents=[connection],
    )
    parser.add_argument("release", metavar="OS/RELEASE", help="such as ubuntu/noble")
    parser.add_argument("--kernel", metavar="KERNEL", help="only this kernel (subarchitecture), such as hwe-24.04")
    _which(parser)
    parser = command(
        subparsers,
        "racks",
        _later("answers", "racks"),
        "Which racks there are, whether they are connected, and what they hold.",
        epilog="""\
exit status: 0 if every rack is connected, else 1.

examples:
  stanchion racks
  stanchion racks --sync rack-2          have it look for what it lacks now
  stanchion racks rename rack-2 cellar
  stanchion racks revoke cellar          it is cut off at once, and its certificate is refused from now on
  stanchion racks forget cellar          it is gone for good, and its name is free again""",
        parents=[connection],
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--sync", metavar="RACK", help="tell a rack (name or id) to sync now")
    action.add_argument("--forget", metavar="RACK", help="remove a rack (name or id), as `racks forget` does")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action")
    for name, summary in (
        ("revoke", "Cut a rack off at once, and refuse its certificate from now on."),
        ("forget", "Remove a rack; its certificate is refused, and its name is free again."),
        ("rename", "Give a rack another name."),
    ):
        one = command(
            actions, name, _later("racks", name), summary,
            epilog=f"example:\n  stanchion racks {name} rack-2" + (" cellar" if name == "rename" else ""),
            parents=[connection],
        )  # fmt: skip
        one.add_argument("rack", metavar="RACK", help="its name or id")
        if name == "rename":
            one.add_argument("name", metavar="NAME", help="its new name")
    parser = command(
        subparsers,
        "events",
        _later("events"),
        "What happened on the racks and to the nodes: syncs, damage, lost links; changes of status, failed scripts.",
        epilog="""\
Oldest first, as in a log. A rack's events have the rack's time. A rack that cannot reach its region keeps its events
and sends them later; if there are too many for it to keep, an event says how many are lost. At the end of an error
stands, in brackets, what the region's log has more about it under.

examples:
  stanchion events
  stanchion events --level warning --rack rack-2
  stanchion events --node node-7 --level debug
  stanchion events --follow
  stanchion events --follow --json | jq -r 'select(.level == "ERROR") | .description'""",
        parents=[connection],
    )
    parser.add_argument(
        "--level", metavar="LEVEL", help="only this level and higher: debug, info (default), warning, error"
    )
    parser.add_argument(
        "--rack", metavar="RACK", action="append", help="only of this rack (name or id; again for more)"
    )
    parser.add_argument(
        "--node", metavar="NODE", action="append", help="only of this node (name or id; again for more)"
    )
    parser.add_argument("--mac", metavar="MAC", action="append", help="only of the node with this MAC address")
    parser.add_argument("--limit", metavar="N", type=int, default=100, help="the newest so many (default: %(default)s)")
    parser.add_argument("--follow", action="store_true", help="go on and show those that come; Ctrl-C ends it")
    _images(subparsers, connection)


def _images(subparsers: Any, connection: argparse.ArgumentParser) -> None:
    parser = command(
        subparsers,
        "images",
        _later("answers", "images"),
        "Which images the region has published; verify, upload and delete them.",
        epilog="""\
examples:
  stanchion images
  stanchion images --json
  stanchion images verify
  stanchion images upload mine.tgz --name mine --arch amd64
  stanchion images delete mine""",
        parents=[connection],
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action")
    command(
        actions, "list", _later("answers", "images"), "Show the images that are published.",
        epilog="example:\n  stanchion images list", parents=[connection],
    )  # fmt: skip
    one = command(
        actions, "verify", _later("images", "verify"), "Hash all of the region's files again, and show how it goes.",
        epilog="""\
The region does that by itself, slowly, once a week ([verify] in region.toml). What is damaged is served no more at
once, and is fetched again from upstream. Ctrl-C stops watching; the region goes on.

exit status: 0 nothing is damaged, 1 something was or is, 3 no answer.

examples:
  stanchion images verify
  stanchion images verify --rate 200      not slowly
  stanchion images verify --status        how far it is, or how it last ended""",
        parents=[connection],
    )  # fmt: skip
    one.add_argument("--rate", metavar="MIB", type=int, help="MiB in a second at most (default: that of region.toml)")
    one.add_argument("--no-wait", action="store_true", help="do not wait for its end")
    one.add_argument("--status", action="store_true", help="begin nothing; say how it is")
    one = command(
        actions, "upload", _later("images", "upload"), "Upload an image of your own.",
        epilog="""\
When all has come the region publishes it, and racks fetch it, as they do what is imported. What was cut goes on with
the same command; what is not gone on with is forgotten after a day. A newer upload of the same name replaces the older.

examples:
  stanchion images upload mine.tgz --name mine --arch amd64 --title 'My own'
  stanchion images upload disk.img.gz --name custom/disk --arch arm64
  stanchion images upload win.dd.gz --name windows/win2022 --arch amd64 --filetype ddgz""",
        parents=[connection],
    )  # fmt: skip
    one.add_argument("file", metavar="FILE", help="the image")
    one.add_argument(
        "--name", required=True, metavar="[OS/]NAME", help="what it is called; without OS/, a custom image"
    )
    one.add_argument("--arch", required=True, metavar="ARCH[/SUBARCH]", help="for which machines: amd64, say")
    one.add_argument("--title", metavar="TEXT", help="what people are shown")
    one.add_argument("--filetype", metavar="TYPE", help="tgz, squashfs, ddgz, … (default: by the end of FILE's name)")
    one.add_argument("--base-image", metavar="OS/RELEASE", help="what it was made of")
    one = command(
        actions, "delete", _later("images", "delete"), "Delete an image that was uploaded.",
        epilog="examples:\n  stanchion images delete mine\n  stanchion images delete windows/win2022 --arch amd64",
        parents=[connection],
    )  # fmt: skip
    one.add_argument("name", metavar="[OS/]NAME", help="what it is called")
    one.add_argument("--arch", metavar="ARCH", help="which, if there are several")


def _which(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", metavar="ARCH", help="only this architecture, such as amd64")
    parser.add_argument("--rack", metavar="RACK", action="append", help="the racks (name or id) that serve the machine")
    parser.add_argument(
        "--policy", choices=("any", "all"), help="how many of the racks must hold it: any one (default), or all"
    )


def _sources(subparsers: Any) -> None:
    connection = connection_options()
    parser = command(
        subparsers,
        "sources",
        _later("sources", "show"),
        "Where images are imported from, and which.",
        epilog="""\
examples:
  stanchion sources
  stanchion sources add http://images.maas.io/ephemeral-v3/stable --select ubuntu/noble:amd64,arm64 \\
      --keyring /usr/share/keyrings/ubuntu-cloudimage-keyring.gpg
  stanchion sources select 1 ubuntu/jammy
  stanchion sources unselect 1 ubuntu/jammy
  stanchion sources remove 1
The region imports by itself in a moment after a change; `stanchion import` does it now, and shows how it goes.""",
        parents=[connection],
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action")
    command(
        actions, "list", _later("sources", "show"), "Show the sources and their selections.",
        epilog="example:\n  stanchion sources list", parents=[connection],
    )  # fmt: skip
    one = command(
        actions, "add", _later("sources", "add"), "Add a source.",
        epilog="example:\n  stanchion sources add file:///srv/stream/ --allow-unsigned --select '*'",
        parents=[connection],
    )  # fmt: skip
    one.add_argument("source", metavar="URL", help="the root of a simplestreams mirror, or its index")
    one.add_argument(
        "--keyring", metavar="FILE", help="the keys that it is signed with (the file is sent to the region)"
    )
    one.add_argument("--allow-unsigned", action="store_true", help="it is not signed, and that is all right")
    one.add_argument("--priority", type=int, default=1, help="which wins where two offer the same: the higher")
    one.add_argument(
        "--select", action="append", default=[], type=parse_selection, metavar="OS/RELEASE[:ARCH,…]",
        help="what to import (again for more; default: everything)",
    )  # fmt: skip
    one = command(
        actions, "remove", _later("sources", "remove"), "Remove a source; the next import removes its images.",
        epilog="example:\n  stanchion sources remove 2", parents=[connection],
    )  # fmt: skip
    one.add_argument("id", type=int, help="as `stanchion sources` shows it")
    for name, summary in (
        ("select", "Import something more of a source."),
        ("unselect", "Import something no longer; the next import removes its images."),
    ):
        one = command(
            actions, name, _later("sources", name), summary,
            epilog=f"example:\n  stanchion sources {name} 1 ubuntu/noble", parents=[connection],
        )  # fmt: skip
        one.add_argument("id", type=int, help="the source, as `stanchion sources` shows it")
        one.add_argument("selection", type=parse_selection, metavar="OS/RELEASE[:ARCH,…]")


def _import(subparsers: Any) -> None:
    parser = command(
        subparsers,
        "import",
        _later("imports"),
        "Import images from the sources now, and show how it goes.",
        epilog="""\
Ctrl-C stops watching; the import goes on. An image that could not be completed keeps its last good version.

exit status: 0 everything selected is there, 1 the import failed, was cancelled, or had errors, 3 no answer.

examples:
  stanchion import
  stanchion import --no-wait             start it and print its id
  stanchion import --follow 12           watch one that runs
  stanchion import --list                the last imports and how they ended
  stanchion import --stop""",
        parents=[connection_options()],
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--no-wait", action="store_true", help="do not wait for its end")
    action.add_argument("--follow", type=int, metavar="ID", help="do not start one, watch this one")
    action.add_argument("--list", action="store_true", help="show the last imports")
    action.add_argument("--stop", action="store_true", help="stop the import that runs")


def _script(subparsers: Any) -> None:
    connection = connection_options()
    parser = subparsers.add_parser("script", help="what nodes run when they are commissioned or tested")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    one = command(
        actions, "list", _later("scripts", "show_list"), "Show the scripts.",
        epilog="""\
examples:
  stanchion script list
  stanchion script list --type testing
  stanchion script list --filter disk,cpu     those with one of these names or tags""",
        parents=[connection],
    )  # fmt: skip
    one.add_argument("--type", choices=("commissioning", "testing"), help="only those of this type")
    one.add_argument("--filter", metavar="NAME,TAG,…", help="only those with one of these names or tags")
    one = command(
        actions, "show", _later("scripts", "show"), "Show one script, and which versions it has had.",
        epilog="example:\n  stanchion script show disk-speed", parents=[connection],
    )  # fmt: skip
    one.add_argument("name", metavar="NAME", help="its name or number")
    one = command(
        actions, "add", _later("scripts", "add"), "Add a script, or a new version of one.",
        epilog="""\
What a script is, it says itself, in its comments:

  #!/bin/sh
  # --- Start MAAS 1.0 script metadata ---
  # name: disk-speed
  # script_type: testing
  # hardware_type: storage
  # timeout: 00:10:00
  # tags: [commissioning, disk]
  # parameters:
  #   storage: {type: storage, argument_format: '--disk={path}'}
  # --- End MAAS 1.0 script metadata ---

Tests with the tag "commissioning" are run after every commissioning that names no other.

examples:
  stanchion script add disk-speed.sh
  stanchion script add disk-speed.sh --tags disk,slow --timeout 1:00:00 --comment 'larger blocks'""",
        parents=[connection],
    )  # fmt: skip
    one.add_argument("file", metavar="FILE", help="the script")
    one.add_argument("--name", help="what it is called (default: what it says itself, else the file's name)")
    one.add_argument("--type", choices=("commissioning", "testing"), help="when it is run, if it does not say so")
    one.add_argument("--tags", metavar="TAG,TAG…", help="its tags, whatever it says itself")
    one.add_argument("--timeout", metavar="TIME", help="after how long it is given up: seconds, or HH:MM:SS; 0: never")
    one.add_argument("--comment", metavar="TEXT", help="what this version changes")
    one = command(
        actions, "download", _later("scripts", "download"), "Print a script, or write it to a file.",
        epilog="examples:\n  stanchion script download disk-speed\n"
        "  stanchion script download disk-speed --revision 12 --output disk-speed.sh",
        parents=[connection],
    )  # fmt: skip
    one.add_argument("name", metavar="NAME", help="its name or number")
    one.add_argument("--revision", metavar="ID", type=int, help="a version, as `stanchion script show` has it")
    one.add_argument("--output", metavar="FILE", help="where to write it (default: standard output)")
    one = command(
        actions, "delete", _later("scripts", "delete"), "Delete a script with all its versions; its results stay.",
        epilog="example:\n  stanchion script delete disk-speed", parents=[connection],
    )  # fmt: skip
    one.add_argument("name", metavar="NAME", help="its name or number")


def _login(subparsers: Any) -> None:
    parser = command(
        subparsers,
        "login",
        _later("login"),
        "Keep a region's address and an API key for the other commands.",
        epilog="""\
The key is tried before it is kept, in ~/.config/stanchion/profile.toml (mode 0600). Make one where the region runs:
stanchion region apikey. With - for the key it is read from standard input.

examples:
  stanchion login http://region:5240 consumer:token:secret
  ssh region sudo stanchion region apikey | stanchion login http://region:5240 -""",
    )
    parser.add_argument("url", metavar="URL")
    parser.add_argument("key", metavar="KEY", help="consumer:token:secret, or -")


def _license_keys(subparsers: Any) -> None:
    connection = connection_options()
    parser = command(
        subparsers,
        "license-key",
        _later("license_keys", "show_all"),
        "The license keys of releases that must not be installed without one.",
        epilog="""\
The racks judge whether a key can be one, by its form. While one does not answer that could know better, a key is
neither taken nor called wrong (exit status 3).

examples:
  stanchion license-key
  stanchion license-key set windows/win2022 - < key.txt
  stanchion license-key delete windows/win2022""",
        parents=[connection],
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action")
    for name, function, summary, more in (
        ("list", "show_all", "Show the license keys.", ""),
        ("set", "give", "Give a release its license key, or another one.", " windows/win2022 - < key.txt"),
        ("delete", "delete", "Forget the license key of a release.", " windows/win2022"),
    ):
        one = command(
            actions, name, _later("license_keys", function), summary,
            epilog=f"example:\n  stanchion license-key {name}{more}", parents=[connection],
        )  # fmt: skip
        if name != "list":
            one.add_argument("release", metavar="OS/RELEASE", help="such as windows/win2022")
        if name == "set":
            one.add_argument("license", metavar="LICENSE", help="the license key, or - to read it from standard input")


def _tags(subparsers: Any) -> None:
    connection = connection_options()
    parser = command(
        subparsers,
        "tag",
        _later("tags", "show_all"),
        "Which tags there are, and which machines have them.",
        epilog="""\
A definition is an XPath 1.0 over what lshw and lldp said of a machine when it was commissioned: the root is lshw's, and
both are there again with the prefixes lshw and lldp. Without a definition, people say which machines have the tag.

examples:
  stanchion tag
  stanchion tag create big --definition '//node[@id="memory"]/size > 68719476736'
  stanchion tag create rack-7 --definition '//lldp:chassis/lldp:name = "switch-7"'
  stanchion tag show big
  stanchion tag create spare --comment 'kept for parts'
  stanchion tag add spare node-1 node-2""",
        parents=[connection],
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action")
    for name, function, summary, more in (
        ("list", "show_all", "Show the tags.", ""),
        ("show", "show", "Show a tag, and the machines that have it.", " big"),
        ("create", "create", "Make a tag.", " big --definition '//node[@id=\"memory\"]/size > 68719476736'"),
        ("change", "change", "Change a tag; another definition is evaluated on all machines.", " big --name large"),
        ("delete", "delete", "Remove a tag, also from all machines.", " big"),
        ("rebuild", "rebuild", "Evaluate a tag's definition anew on all machines.", " big"),
        ("add", "add", "Give a tag without a definition to machines.", " spare node-1 node-2"),
        ("remove", "remove", "Take a tag without a definition from machines.", " spare node-1"),
    ):
        one = command(
            actions, name, _later("tags", function), summary, epilog=f"example:\n  stanchion tag {name}{more}",
            parents=[connection],
        )  # fmt: skip
        if name != "list":
            one.add_argument("tag", metavar="TAG", help="its name")
        if name == "change":
            one.add_argument("--name", metavar="NAME", dest="new_name", help="its new name")
        if name in ("create", "change"):
            one.add_argument("--definition", metavar="XPATH", help="which machines have it ('': people say which)")
            one.add_argument("--comment", metavar="TEXT", help="anything for people")
            one.add_argument("--kernel-options", metavar="TEXT", help="kernel options for the machines that have it")
        if name in ("add", "remove"):
            one.add_argument("machine", metavar="MACHINE", nargs="+", help="its system id or host name")


def _region(subparsers: Any) -> None:
    parser = subparsers.add_parser("region", help="on the region's host: make keys and tokens")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    one = command(
        actions, "join-token", _later("local", "join_token"), "Make a token with which a rack joins this region.",
        epilog="""\
The token names this region's certificate authority, so the rack cannot be led to another one. Whoever has it can
join a rack until it is used or expires: hand it over like a password.

examples:
  sudo stanchion region join-token
  sudo stanchion region join-token --expires 30m --uses 20
  sudo stanchion region join-token --list
  sudo stanchion region join-token --revoke 0123456789abcdef""",
    )  # fmt: skip
    one.add_argument(
        "--expires", metavar="TIME", default="1d", help="how long it is good: 30m, 12h, 7d (default: %(default)s)"
    )
    one.add_argument("--uses", metavar="N", type=int, default=1, help="how many racks may join with it (default: 1)")
    instead = one.add_mutually_exclusive_group()
    instead.add_argument(
        "--list", action="store_true", help="show the tokens that were made; their secrets are not kept"
    )
    instead.add_argument("--revoke", metavar="ID", help="take a token back, as --list names it")
    _config(one)
    one = command(
        actions, "rotate-ca", _later("rotation"), "Replace the region's certificate authority, step by step.",
        epilog="""\
The first run makes the new authority, and the region has its racks renew their certificates with it; both are trusted.
Run it again to see which racks have not done so. When none is left, --finish retires the old authority.

exit status: 0 every rack trusts the new one, or it is finished; 1 there are racks that do not.

examples:
  sudo stanchion region rotate-ca
  until sudo stanchion region rotate-ca; do sleep 10; done
  sudo stanchion region rotate-ca --finish""",
    )  # fmt: skip
    one.add_argument("--finish", action="store_true", help="retire the old authority")
    one.add_argument("--anyway", action="store_true", help="finish although racks will be locked out: they join again")
    _config(one)
    one = command(
        actions, "apikey", _later("local", "apikey"), "Make a key for the API.",
        epilog="examples:\n  sudo stanchion region apikey\n  sudo stanchion region apikey --name juju",
    )  # fmt: skip
    one.add_argument("--name", default="cli", help="whose it is, for people (default: %(default)s)")
    _config(one)


def _config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", metavar="FILE", default=DEFAULT_CONFIG,
        help="the region's settings (default: %(default)s; where that is not, those of the `stanchion up` that runs "
        "from this directory)",
    )  # fmt: skip
