"""How do the scripts that this program brings get into the database? At a region's start, each as its own new version
if its content changed. Any number of region processes may do so at once.

They are the files of ``node/builtin/``; each says in its metadata what it is. Hooks know their outputs by their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final

from attrs import field, frozen
from twisted.logger import Logger

from region.database import Database, Transaction
from region.images.threads import in_thread
from region.scripts.checks import checked_script
from region.scripts.choose import NOT_BY_DEFAULT
from region.scripts.store import add_version, insert_script, latest, lock_script, write_fields
from region.scripts.values import ScriptFields, ScriptInvalid
from rpc.fetch import RunInThread

log = Logger()

LOCK: Final = (0x5343, 1)
"""The advisory lock that is held while they are installed."""


class BuiltinInvalid(Exception):
    """A script that this program brings is wrong: a fault of the program's, or of its installation."""


@frozen
class Builtin:
    """A script that this program brings."""

    fields: ScriptFields
    content: bytes = field(repr=False)


def read_builtins(directory: Traversable | None = None) -> Mapping[str, Builtin]:
    """The built-in scripts by name, checked. Reads files: for a thread.

    :raises BuiltinInvalid: if one cannot be what it says it is.
    """
    directory = files("node") / "builtin" if directory is None else directory
    found: dict[str, Builtin] = {}
    if not directory.is_dir():
        return found
    for entry in sorted(directory.iterdir(), key=lambda one: one.name):
        if not entry.is_file() or entry.name.startswith((".", "__")):
            continue
        content = entry.read_bytes()
        try:
            fields = checked_script(content, {"name": entry.name})
        except ScriptInvalid as error:
            raise BuiltinInvalid(f"the built-in script {entry.name} is wrong: {error}") from error
        found[fields.name] = Builtin(fields, content)
    return found


async def install(
    database: Database, directory: Traversable | None = None, *, run_in_thread: RunInThread = in_thread
) -> tuple[str, ...]:
    """Have the database's built-in scripts be those of ``directory``; the names of those that changed.

    :raises BuiltinInvalid: as :func:`read_builtins`.
    :raises DatabaseUnavailable: if the database cannot be reached.
    """
    builtins = await run_in_thread(read_builtins, directory)
    if not builtins:
        log.warn("This installation has no built-in scripts; commissioning will find out nothing by itself")

    async def write(transaction: Transaction) -> tuple[str, ...]:
        await transaction.query("SELECT pg_advisory_xact_lock(%s, %s)", LOCK)
        changed = [name for name, builtin in builtins.items() if await _install(transaction, builtin)]
        # One that is not brought any more stays, with its results, but is run, and may be deleted, by people alone.
        retired = await transaction.query(
            """UPDATE script SET builtin = false, tags = array_append(array_remove(tags, %s), %s), updated = now()
               WHERE builtin AND NOT name = ANY (%s::text[]) RETURNING name""",
            (NOT_BY_DEFAULT, NOT_BY_DEFAULT, list(builtins)),
        )
        for (name,) in retired:
            log.warn("The script {name} is not built in any more; it runs only when it is named", name=name)
        return (*changed, *(name for (name,) in retired))

    changed = await database.transact(write)
    if changed:
        log.info("Installed the built-in scripts {names}.", names=", ".join(changed))
    return changed


async def _install(transaction: Transaction, builtin: Builtin) -> bool:
    name = builtin.fields.name
    script = await lock_script(transaction, name)
    if script is None:
        await insert_script(transaction, builtin.fields, builtin.content, builtin=True)
        return True
    if not script.builtin:
        log.warn("The script {name} is built in from now on; what it was is in its history", name=name)
    same = script.builtin and (await latest(transaction, script.id)).content == builtin.content
    if same and script.fields == builtin.fields:
        return False
    await write_fields(transaction, script.id, builtin.fields, builtin=True)
    if not same:
        await add_version(transaction, script.id, builtin.content)
    return True
