"""``stanchion region rotate-ca``: replace the certificate authority by another one, without a rack being locked out.

The files are changed here, on the region's host; the region is told through its database, looks at them, and asks its
racks to renew. Nothing is ended before every rack is known to trust the new authority, unless somebody insists.
"""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from functools import partial

from attrs import frozen

from region.authority_files import AuthorityError, Keys, begin_change, finish_change, load_keys
from region.cli.local import authority_directory, config_of, in_database, say
from region.config import RegionConfig
from region.database import Database
from region.issued import IssuedCertificates
from region.keeping import tell
from region.tokens import revoke_join_tokens
from rpc.certificates import fingerprint
from rpc.console import CommandFailed, Status


@frozen
class Change:
    """How far a change is: the key pairs, the names of the racks that do not trust the new authority yet, and whether
    the change was begun just now."""

    keys: Keys
    behind: list[str]
    begun: bool = False


def run(arguments: argparse.Namespace) -> int:
    """Begin to change the authority, show how far that is, or end it."""
    config = config_of(arguments)
    try:
        if arguments.finish:
            return _finish(arguments, config)
        return _begin(arguments, config)
    except AuthorityError as error:
        raise CommandFailed(str(error), Status.USAGE) from error


def _begin(arguments: argparse.Namespace, config: RegionConfig) -> int:
    change = in_database(config, partial(begin, config))
    if change.begun:
        text = f"a new authority, {_short(change.keys)}, was made; the racks are told now"
    else:
        text = f"the next authority is {_short(change.keys)}"
    if change.behind:
        text += (
            f"\nracks that do not trust it yet: {', '.join(change.behind)}"
            "\nrun this again to see how far it is; racks that are away follow when they connect"
        )
    else:
        text += "\nevery rack trusts it; end the change with: stanchion region rotate-ca --finish"
    document = {"begun": change.begun, "authorities": change.keys.authorities, "waiting_for": change.behind}
    say(arguments, document, text)
    return Status.NO if change.behind else Status.YES


def _finish(arguments: argparse.Namespace, config: RegionConfig) -> int:
    change = in_database(config, partial(finish, config, anyway=arguments.anyway))
    text = f"the authority is {_short(change.keys)} from now on; join tokens from before are of no use any more"
    if change.behind:
        text += f"\nto be joined again: {', '.join(change.behind)}"
    say(arguments, {"authorities": change.keys.authorities, "locked_out": change.behind}, text)
    return Status.YES


async def begin(config: RegionConfig, database: Database) -> Change:
    """Make the next authority unless there is one, and have the racks told."""
    issued = IssuedCertificates(database)
    await issued.not_trusting("")  # before anything is changed: the database is there, and of this version
    keys, begun = begin_change(authority_directory(config), config.name, datetime.now(UTC))
    await tell(database)
    return Change(keys, [rack.name for rack in await issued.not_trusting(_new(keys))], begun)


async def finish(config: RegionConfig, database: Database, *, anyway: bool = False) -> Change:
    """Make the next authority the only one, and have the racks told.

    :raises CommandFailed: if racks would be locked out, unless ``anyway``.
    """
    directory, now = authority_directory(config), datetime.now(UTC)
    keys = load_keys(directory, config.name, now)
    if keys.next is None:
        raise AuthorityError("no change of the authority is under way: begin one with stanchion region rotate-ca")
    behind = [rack.name for rack in await IssuedCertificates(database).not_trusting(_new(keys))]
    if behind and not anyway:
        raise CommandFailed(
            f"these racks do not trust the new authority yet and would be locked out: {', '.join(behind)}; bring them "
            "up, forget them (stanchion racks forget NAME), or say --anyway and join them again afterwards",
            Status.NO,
        )
    keys = finish_change(directory, config.name, now)
    await tell(database)
    await revoke_join_tokens(database)
    return Change(keys, behind)


def _new(keys: Keys) -> str:
    return fingerprint(keys.issuing.certificate)


def _short(keys: Keys) -> str:
    return f"{_new(keys)[:16]}…"
