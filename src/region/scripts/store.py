"""Which scripts are there, and which contents has each had? What is stored has been checked.

A change of content is a new version, and older ones stay: results say which version they are of. Scripts that are
built in are changed by :mod:`region.scripts.builtin` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from attrs import define, evolve, fields_dict
from psycopg2 import errors
from psycopg2.extras import Json

from region.database import Database, Session, Transaction
from region.images.threads import in_thread
from region.nodes.statuses import UNFINISHED, HardwareType, Parallel, ResultType
from region.scripts.checks import checked_script, tag_name
from region.scripts.values import (
    NoSuchScript,
    Script,
    ScriptFields,
    ScriptInvalid,
    ScriptProtected,
    ScriptVersion,
)
from rpc.fetch import RunInThread

_FIELDS: Final = tuple(fields_dict(ScriptFields))
_COLUMNS: Final = ", ".join(f"s.{name}" for name in _FIELDS)
_SCRIPT: Final = f"""s.id, {_COLUMNS}, s.builtin, s.created, s.updated,
    (SELECT v.id FROM script_version v WHERE v.script_id = s.id ORDER BY v.number DESC LIMIT 1)"""
_TRIES: Final = 5
_UNFINISHED: Final = sorted(status.value for status in UNFINISHED)


@define
class ScriptStore:
    """The scripts in PostgreSQL. A script is named by its name or, in digits, by its number."""

    _database: Database
    _run_in_thread: RunInThread = in_thread

    async def list(
        self,
        *,
        script_type: ResultType | None = None,
        hardware_type: HardwareType | None = None,
        filters: Collection[str] = (),
    ) -> tuple[Script, ...]:
        """The scripts by name: all, or those of a type, about a hardware, with one of these names or tags."""
        kind = None if script_type is None else script_type.value
        hardware = None if hardware_type is None else hardware_type.value
        rows = await self._database.query(
            f"""SELECT {_SCRIPT} FROM script s
                WHERE (%s IS NULL OR script_type = %s) AND (%s IS NULL OR hardware_type = %s)
                      AND (%s OR name = ANY (%s::text[]) OR tags && %s::text[])
                ORDER BY name""",
            (kind, kind, hardware, hardware, not filters, list(filters), list(filters)),
        )
        return tuple(map(_script, rows))

    async def get(self, name: str) -> Script:
        """One script.

        :raises NoSuchScript: if there is none.
        """
        return _there(await _find(self._database, name), name)

    async def versions(
        self, scripts: Sequence[Script], *, with_content: bool = False
    ) -> Mapping[int, tuple[ScriptVersion, ...]]:
        """By the number of the script, its versions, newest first; with their contents if that is asked for."""
        content = "content" if with_content else "NULL"
        found: dict[int, tuple[ScriptVersion, ...]] = {script.id: () for script in scripts}
        for row in await self._database.query(
            f"""SELECT script_id, id, number, comment, created, {content} FROM script_version
                WHERE script_id = ANY (%s::bigint[]) ORDER BY number DESC""",
            (list(found),),
        ):
            found[row[0]] += (ScriptVersion(*row[1:]),)
        return found

    async def content(self, name: str, version_id: int | None = None) -> bytes:
        """What is, or was, run: the newest version, or the one with this id.

        :raises NoSuchScript: if there is no such script, or it has no such version.
        """
        script = await self.get(name)
        wanted = script.version_id if version_id is None else version_id
        row = await self._database.one(
            "SELECT content FROM script_version WHERE id = %s AND script_id = %s", (wanted, script.id)
        )
        if row is None:
            raise NoSuchScript(f"the script {script.name} has no version {wanted}")
        content: bytes = row[0]
        return content

    async def create(self, content: bytes, given: Mapping[str, object], comment: str = "") -> Script:
        """Add a script. ``given`` are its fields, as a request says them; what is in its metadata need not be given.

        :raises ScriptInvalid: if it cannot be as given, or there is one of that name.
        """
        fields = await self._run_in_thread(checked_script, content, given)

        async def insert(transaction: Transaction) -> Script:
            script = await insert_script(transaction, fields, content, comment=comment)
            return await _again(transaction, script)

        try:
            return await self._database.transact(insert)
        except errors.UniqueViolation as error:
            raise ScriptInvalid(
                {"name": [f"There is a script named '{fields.name}'; change that one (PUT), or take another name."]}
            ) from error

    async def update(
        self, name: str, given: Mapping[str, object], content: bytes | None = None, comment: str = ""
    ) -> Script:
        """Change the fields that are given; another content is a new version.

        :raises ScriptInvalid: if it cannot be as given.
        :raises NoSuchScript: if there is none.
        :raises ScriptProtected: if it is built in.
        """
        for _ in range(_TRIES):
            changed = await self._update(name, given, content, comment)
            if changed is not None:
                return changed
        raise ScriptProtected(f"The script {name} is being changed by others as well; look at it, and try again.")

    async def _update(
        self, name: str, given: Mapping[str, object], content: bytes | None, comment: str
    ) -> Script | None:
        """As :meth:`update`; None if somebody else has changed it meanwhile."""
        before = await self.get(name)
        old = await self.content(name)
        wanted = old if content is None else content
        is_new = wanted != old
        fields = await self._run_in_thread(checked_script, wanted, given, before.fields, is_new=is_new)

        async def change(transaction: Transaction) -> Script | None:
            script = _changeable(await lock_script(transaction, str(before.id)), name)
            if (script.fields, script.version_id) != (before.fields, before.version_id):
                return None
            await write_fields(transaction, script.id, fields)
            if is_new:
                await add_version(transaction, script.id, wanted, comment)
            return await _again(transaction, script.id)

        return await self._database.transact(change)

    async def revert(self, name: str, to: int) -> Script:
        """Have the content of an earlier version again, as a new one; nothing of the history is lost.

        :param to: the id of a version or, if it is less than 1, how many versions to go back (-1 is the one before).
        :raises NoSuchScript: if there is no such script, or it has no such version.
        :raises ScriptProtected: if it is built in.
        """
        script = await self.get(name)
        versions = (await self.versions([script], with_content=True))[script.id]
        if to < 1:
            chosen = versions[-to] if -to < len(versions) else None
        else:
            chosen = next((version for version in versions if version.id == to), None)
        if chosen is None:
            raise NoSuchScript(f"the script {script.name} has no version {to}; it has {len(versions)} versions")
        assert chosen.content is not None  # it was asked for
        return await self.update(name, {}, chosen.content, f"Version {chosen.number} again")

    async def add_tag(self, name: str, tag: str) -> Script:
        """Give a script a tag.

        :raises ScriptInvalid: if that is none.
        :raises NoSuchScript: if there is no such script.
        :raises ScriptProtected: if it is built in.
        """
        try:
            tag_name(tag)
        except ValueError as error:
            raise ScriptInvalid({"tag": [f"{error}."]}) from error
        return await self._tag(name, lambda tags: (*(one for one in tags if one != tag), tag))

    async def remove_tag(self, name: str, tag: str) -> Script:
        """Take a tag from a script.

        :raises NoSuchScript: if there is no such script.
        :raises ScriptProtected: if it is built in.
        """
        return await self._tag(name, lambda tags: tuple(one for one in tags if one != tag))

    async def delete(self, name: str) -> None:
        """Remove a script with its versions; its results stay, with its name.

        :raises NoSuchScript: if there is none.
        :raises ScriptProtected: if it is built in, or a node has still to run it.
        """

        async def remove(transaction: Transaction) -> None:
            script = _changeable(await lock_script(transaction, name, for_update=True), name)
            waiting = await transaction.query(
                """SELECT DISTINCT n.hostname FROM script_result r JOIN script_set t ON t.id = r.script_set_id
                       JOIN node n ON n.id = t.node_id AND t.id IN (n.commissioning_set_id, n.testing_set_id)
                   WHERE r.script_id = %s AND r.status = ANY (%s::int[]) ORDER BY n.hostname LIMIT 11""",
                (script.id, _UNFINISHED),
            )
            if waiting:
                hosts = ", ".join(host for (host,) in waiting[:10]) + (", …" if len(waiting) > 10 else "")
                raise ScriptProtected(
                    f"The script {script.name} is still to be run by {hosts}; wait for that, or abort it."
                )
            await transaction.execute("DELETE FROM script WHERE id = %s", (script.id,))

        await self._database.transact(remove)

    async def _tag(self, name: str, change: Callable[[tuple[str, ...]], Sequence[str]]) -> Script:
        async def write(transaction: Transaction) -> Script:
            script = _changeable(await lock_script(transaction, name), name)
            tags = tuple(change(script.fields.tags))
            await write_fields(transaction, script.id, evolve(script.fields, tags=tags))
            return await _again(transaction, script.id)

        return await self._database.transact(write)


# For transactions of one's own.


async def lock_script(transaction: Transaction, name: str, *, for_update: bool = False) -> Script | None:
    """The script, which nobody else changes until the transaction ends; with ``for_update``, nor chooses."""
    strength = "FOR UPDATE OF s" if for_update else "FOR NO KEY UPDATE OF s"
    return await _find(transaction, name, strength)


async def latest(transaction: Transaction, script_id: int) -> ScriptVersion:
    """The newest version of a script, with its content."""
    row = await transaction.one(
        """SELECT id, number, comment, created, content FROM script_version
           WHERE script_id = %s ORDER BY number DESC LIMIT 1""",
        (script_id,),
    )
    assert row is not None, "a script is stored with its first version"
    return ScriptVersion(*row)


async def insert_script(
    transaction: Transaction, fields: ScriptFields, content: bytes, *, comment: str = "", builtin: bool = False
) -> int:
    """Store a script with its first version; its number. ``UniqueViolation`` if there is one of that name."""
    row = await transaction.one(
        f"""INSERT INTO script ({", ".join(_FIELDS)}, builtin)
            VALUES ({", ".join("%s" for _ in _FIELDS)}, %s) RETURNING id""",
        (*_row(fields), builtin),
    )
    assert row is not None  # it returns the row that it inserts
    number: int = row[0]
    await add_version(transaction, number, content, comment)
    return number


async def write_fields(
    transaction: Transaction, script_id: int, fields: ScriptFields, *, builtin: bool = False
) -> None:
    """Store what a script, which is locked, is from now on."""
    await transaction.execute(
        f"UPDATE script SET {', '.join(f'{name} = %s' for name in _FIELDS)}, builtin = %s, updated = now()"
        " WHERE id = %s",
        (*_row(fields), builtin, script_id),
    )


async def add_version(transaction: Transaction, script_id: int, content: bytes, comment: str = "") -> None:
    """Store another content of a script, which is locked."""
    await transaction.execute(
        """INSERT INTO script_version (script_id, number, content, comment)
           SELECT %s, coalesce(max(number), 0) + 1, %s, %s FROM script_version WHERE script_id = %s""",
        (script_id, content, comment, script_id),
    )


async def _find(session: Database | Session | Transaction, name: str, strength: str = "") -> Script | None:
    if "\x00" in name:
        return None  # PostgreSQL has no text with that
    is_number = name.isascii() and name.isdigit() and len(name) < 19
    row = await session.one(
        f"SELECT {_SCRIPT} FROM script s WHERE {'s.id' if is_number else 's.name'} = %s {strength}",
        (int(name) if is_number else name,),
    )
    return None if row is None else _script(row)


async def _again(transaction: Transaction, script_id: int) -> Script:
    return _there(await _find(transaction, str(script_id)), str(script_id))


def _there(script: Script | None, name: str) -> Script:
    if script is None:
        raise NoSuchScript(f"there is no script {name!r}")
    return script


def _changeable(script: Script | None, name: str) -> Script:
    found = _there(script, name)
    if found.builtin:
        raise ScriptProtected(
            f"The script {found.name} is built in, and cannot be changed or deleted; add one of another name."
        )
    return found


def _script(row: tuple[Any, ...]) -> Script:
    number, *values, builtin, created, updated, version = row
    given = dict(zip(_FIELDS, values, strict=True))
    given["tags"] = tuple(given["tags"])
    given["script_type"] = ResultType(given["script_type"])
    given["hardware_type"] = HardwareType(given["hardware_type"])
    given["parallel"] = Parallel(given["parallel"])
    return Script(number, ScriptFields(**given), builtin, version, created, updated)


def _row(fields: ScriptFields) -> tuple[object, ...]:
    stored: dict[str, object] = {name: getattr(fields, name) for name in _FIELDS}
    for name in ("parameters", "packages", "results"):
        stored[name] = Json(stored[name])
    for name in ("script_type", "hardware_type", "parallel"):
        stored[name] = int(getattr(fields, name))
    stored["tags"] = list(fields.tags)
    return tuple(stored.values())
