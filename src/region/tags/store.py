"""Where tags are kept, and what may be in them. A definition has been checked before it is stored.

Every change of a definition is a new generation, and all region processes are told of it; what an earlier generation
was found to be true of is not written any more (:mod:`region.tags.evaluation`).
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Final

from attrs import define, frozen
from psycopg2 import errors

from region.database import Database, Transaction
from region.nodes.values import NodeName

CHANNEL: Final = "stanchion_tag"
"""Notified, with the tag's name, whenever there is something to evaluate."""

_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,256}\Z")
_COLUMNS: Final = "id, name, definition, comment, kernel_opts, generation, evaluated, position, problem"
_FIELDS: Final = ("name", "definition", "comment", "kernel_opts")


class TagInvalid(ValueError):
    """A field cannot be as it was given."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class NoSuchTag(LookupError):
    """There is no tag with that name (any more)."""


class TagConflict(Exception):
    """The tag is not what whoever wants to change it believes; the text says what it is."""


@frozen
class Tag:
    """A tag as it is stored; its columns are explained in the migration that makes the table."""

    id: int
    name: str
    definition: str
    comment: str
    kernel_opts: str
    generation: int
    evaluated: int
    position: int
    problem: str

    @property
    def is_automatic(self) -> bool:
        """Whether the nodes that have it are found by its definition, and not named by people."""
        return bool(self.definition)

    @property
    def is_evaluating(self) -> bool:
        """Whether there are nodes that its current definition has not been evaluated on."""
        return self.is_automatic and self.evaluated < self.generation


Check = Callable[[str], Awaitable[str]]
"""Says why a definition cannot be one; empty if it can (:meth:`region.tags.evaluator.Evaluator.check`)."""


@define
class TagStore:
    """The ``tag`` and ``node_tag`` tables."""

    _database: Database
    _check: Check

    async def list(self) -> tuple[Tag, ...]:
        """Every tag, by name."""
        rows = await self._database.query(f"SELECT {_COLUMNS} FROM tag ORDER BY name")
        return tuple(Tag(*row) for row in rows)

    async def get(self, name: str) -> Tag:
        """One tag.

        :raises NoSuchTag: if there is none.
        """
        return _there(await self._database.one(f"SELECT {_COLUMNS} FROM tag WHERE name = %s", (_named(name),)), name)

    async def create(self, name: str, *, definition: str = "", comment: str = "", kernel_opts: str = "") -> Tag:
        """Add a tag; one with a definition is evaluated on all nodes.

        :raises TagInvalid: if a field cannot be as given.
        """
        values = await self._checked(name=name, definition=definition, comment=comment, kernel_opts=kernel_opts)

        async def insert(transaction: Transaction) -> Tag:
            row = await transaction.one(
                f"""INSERT INTO tag (name, definition, comment, kernel_opts) VALUES (%s, %s, %s, %s)
                    RETURNING {_COLUMNS}""",
                tuple(values[field] for field in _FIELDS),
            )
            if values["definition"]:
                await _announce(transaction, name)
            return _there(row, name)

        return await self._unique(insert)

    async def update(self, name: str, /, **changes: str) -> Tag:
        """Change some of name, definition, comment and kernel_opts.

        With another definition it is evaluated anew on all nodes; without one any more, those that have it keep it.

        :raises TagInvalid: if a field cannot be as given.
        :raises NoSuchTag: if there is none.
        """
        key = _named(name)
        values = await self._checked(**changes)

        async def change(transaction: Transaction) -> Tag:
            row = await transaction.one(f"SELECT {_COLUMNS} FROM tag WHERE name = %s FOR NO KEY UPDATE", (key,))
            before = _there(row, name)
            wanted = {field: values.get(field, getattr(before, field)) for field in _FIELDS}
            redefined = wanted["definition"] != before.definition
            row = await transaction.one(
                f"""UPDATE tag SET name = %s, definition = %s, comment = %s, kernel_opts = %s, updated = now()
                    WHERE id = %s RETURNING {_COLUMNS}""",
                (*(wanted[field] for field in _FIELDS), before.id),
            )
            return await _next_generation(transaction, before.id) if redefined else _there(row, name)

        return await self._unique(change)

    async def delete(self, name: str) -> None:
        """Remove a tag, also from all nodes.

        :raises NoSuchTag: if there is none.
        """
        if not await self._database.execute("DELETE FROM tag WHERE name = %s", (_named(name),)):
            raise _no_such(name)

    async def rebuild(self, name: str) -> Tag:
        """Have a tag evaluated anew on all nodes.

        :raises TagConflict: if it has no definition.
        :raises NoSuchTag: if there is none.
        """
        key = _named(name)

        async def change(transaction: Transaction) -> Tag:
            row = await transaction.one(f"SELECT {_COLUMNS} FROM tag WHERE name = %s FOR NO KEY UPDATE", (key,))
            tag = _there(row, name)
            if not tag.is_automatic:
                raise TagConflict(f"tag {name!r} has no definition that could be evaluated: people say which nodes "
                                  "have it")  # fmt: skip
            return await _next_generation(transaction, tag.id)

        return await self._database.transact(change)

    async def nodes(self, name: str) -> Sequence[str]:
        """The system ids of the nodes that have the tag, by host name.

        :raises NoSuchTag: if there is none.
        """
        tag = await self.get(name)
        rows = await self._database.query(
            """SELECT system_id FROM node_tag JOIN node ON node.id = node_id WHERE tag_id = %s ORDER BY hostname""",
            (tag.id,),
        )
        return [row[0] for row in rows]

    async def counts(self) -> Mapping[int, int]:
        """How many nodes have each tag that any has, by its number."""
        return dict(await self._database.query("SELECT tag_id, count(*) FROM node_tag GROUP BY tag_id"))

    async def change_nodes(
        self, name: str, add: Collection[str], remove: Collection[str], *, definition: str | None = None
    ) -> tuple[int, int]:
        """Give nodes a tag that people set, and take it from others; of how many it was new, and how many had it.

        :param add: system ids; likewise ``remove``.
        :param definition: what the tag's definition is believed to be; None for no belief.
        :raises TagConflict: if its definition is another one, or it has one at all: then nobody sets it.
        :raises TagInvalid: if there is no such node, or one is in both.
        :raises NoSuchTag: if there is no such tag.
        """
        key = _named(name)
        if both := sorted(set(add) & set(remove)):
            raise TagInvalid("remove", f"{both[0]!r} is both to be added and to be removed.")

        async def change(transaction: Transaction) -> tuple[int, int]:
            # What is no text in the database is not looked for there.
            wanted = sorted(one for one in {*add, *remove} if one.isascii() and "\x00" not in one)
            rows = await transaction.query(
                "SELECT system_id, id FROM node WHERE system_id = ANY(%s) ORDER BY id FOR KEY SHARE", (wanted,)
            )
            ids = dict(rows)
            row = await transaction.one(f"SELECT {_COLUMNS} FROM tag WHERE name = %s FOR SHARE", (key,))
            tag = _there(row, name)
            if definition is not None and definition != tag.definition:
                raise TagConflict(
                    f"Definition supplied '{definition}' doesn't match current definition '{tag.definition}'"
                )
            if tag.is_automatic:
                raise TagConflict(f"tag {name!r} has a definition, which finds its nodes; take that away to set it "
                                  "by hand")  # fmt: skip
            for field, given in (("add", add), ("remove", remove)):
                for system_id in given:
                    if system_id not in ids:
                        raise TagInvalid(field, f"There is no node {system_id!r}.")
            added = await transaction.execute(
                "INSERT INTO node_tag (node_id, tag_id) SELECT unnest(%s::bigint[]), %s ON CONFLICT DO NOTHING",
                ([ids[one] for one in sorted(set(add))], tag.id),
            )
            removed = await transaction.execute(
                "DELETE FROM node_tag WHERE tag_id = %s AND node_id = ANY(%s)",
                (tag.id, [ids[one] for one in remove]),
            )
            return added, removed

        return await self._database.transact(change)

    async def _checked(self, **given: str) -> dict[str, str]:
        values = dict(given)
        for field, text in values.items():
            if field not in _FIELDS:
                raise TagInvalid(field, f"a tag has no such field; it has: {', '.join(_FIELDS)}")
            if "\x00" in text or text.encode("utf-8", "replace").decode("utf-8") != text:
                raise TagInvalid(field, "This is not text that can be stored.")
        if "name" in values and not _NAME.match(values["name"]):
            raise TagInvalid("name", "Enter a name of 1 to 256 letters, digits, underscores and hyphens.")
        if "definition" in values:
            values["definition"] = values["definition"].strip()
        if values.get("definition") and (problem := await self._check(values["definition"])):
            raise TagInvalid("definition", f"Invalid XPath expression: {problem}")
        return values

    async def _unique(self, change: Callable[[Transaction], Awaitable[Tag]]) -> Tag:
        try:
            return await self._database.transact(change)
        except errors.UniqueViolation as error:
            raise TagInvalid("name", "Tag with this Name already exists.") from error


# What evaluating needs


async def pending(database: Database) -> Sequence[Tag]:
    """The tags whose current definition has not been evaluated on all nodes yet."""
    rows = await database.query(
        f"SELECT {_COLUMNS} FROM tag WHERE definition <> '' AND evaluated < generation ORDER BY position, id"
    )
    return [Tag(*row) for row in rows]


async def automatic(database: Database) -> Sequence[Tag]:
    """The tags that have a definition."""
    return [Tag(*row) for row in await database.query(f"SELECT {_COLUMNS} FROM tag WHERE definition <> '' ORDER BY id")]


async def next_nodes(database: Database, after: int, limit: int) -> Sequence[NodeName]:
    """At most ``limit`` nodes, in the order of their numbers, from the first over ``after`` on."""
    rows = await database.query(
        "SELECT id, system_id, hostname FROM node WHERE id > %s ORDER BY id LIMIT %s", (after, limit)
    )
    return [NodeName(*row) for row in rows]


async def advance(database: Database, tag: Tag, position: int) -> None:
    """Keep that all nodes up to ``position`` were evaluated with this generation of the tag, if it is current."""
    await database.execute(
        "UPDATE tag SET position = greatest(position, %s) WHERE id = %s AND generation = %s",
        (position, tag.id, tag.generation),
    )


async def finish(database: Database, tag: Tag) -> None:
    """Keep that this generation of the tag was evaluated on all nodes, if it is current."""
    await database.execute(
        "UPDATE tag SET evaluated = generation WHERE id = %s AND generation = %s", (tag.id, tag.generation)
    )


async def give_up(database: Database, tag: Tag, position: int, problem: str) -> None:
    """Evaluate this generation no further than ``position``, if it is current: no node beyond that has the tag."""

    async def change(transaction: Transaction) -> None:
        changed = await transaction.execute(
            "UPDATE tag SET evaluated = generation, problem = %s WHERE id = %s AND generation = %s",
            (problem, tag.id, tag.generation),
        )
        if changed:
            await transaction.execute("DELETE FROM node_tag WHERE tag_id = %s AND node_id > %s", (tag.id, position))

    await database.transact(change)


async def keep_problem(database: Database, tag: Tag, problem: str) -> None:
    """Keep why this generation of the tag could not be evaluated somewhere, if it is current."""
    await database.execute(
        "UPDATE tag SET problem = %s WHERE id = %s AND generation = %s", (problem, tag.id, tag.generation)
    )


async def _next_generation(transaction: Transaction, tag_id: int) -> Tag:
    row = await transaction.one(
        f"""UPDATE tag SET generation = generation + 1, position = 0, problem = '',
                           evaluated = CASE WHEN definition = '' THEN generation + 1 ELSE evaluated END
            WHERE id = %s RETURNING {_COLUMNS}""",
        (tag_id,),
    )
    tag = _there(row, str(tag_id))
    await _announce(transaction, tag.name)
    return tag


async def _announce(transaction: Transaction, name: str) -> None:
    await transaction.query("SELECT pg_notify(%s, %s)", (CHANNEL, name))


def _there(row: tuple[Any, ...] | None, name: str) -> Tag:
    if row is None:
        raise _no_such(name)
    return Tag(*row)


def _named(name: str) -> str:
    """The name, to be looked for; it may be anything, also what the database cannot be asked for."""
    if not _NAME.match(name):
        raise _no_such(name)
    return name


def _no_such(name: str) -> NoSuchTag:
    return NoSuchTag(f"there is no tag {name!r}")
