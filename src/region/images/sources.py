"""What the operator wants imported: boot sources with their keyrings and priorities, and what to keep of each.

What is stored has been checked; what is refused is a :class:`SourceInvalid` that names the field. Every change is
announced to all region processes, so that an import follows it, also one that was made while an import ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from attrs import define, field, frozen
from psycopg2 import errors

from region.database import Database, Session, Transaction
from region.images.checks import SourceInvalid, checked_selection, checked_source, read_keyring
from region.images.threads import in_thread
from region.upstream import DocumentSeen, Selection, Source, SourceFailed
from rpc.fetch import RunInThread
from rpc.urls import public

__all__ = ["BootSource", "BootSourceSelection", "NoSuchSource", "SourceInvalid", "SourceStore"]

CHANNEL: Final = "stanchion_sources"
"""Notified, with the source's id, whenever a source or a selection was changed."""


class NoSuchSource(LookupError):
    """There is no source, or no selection, with that id (any more)."""


@frozen
class BootSource:
    """A source as it is stored. One of ``keyring_filename``, ``keyring_data`` and ``allow_unsigned`` is set."""

    id: int
    url: str
    keyring_filename: str
    keyring_data: bytes = field(repr=lambda value: f"<{len(value)} bytes>")
    allow_unsigned: bool
    priority: int
    created: datetime
    updated: datetime


@frozen
class BootSourceSelection:
    """A selection as it is stored. ``release`` may be empty, which selects boot loaders only."""

    id: int
    source_id: int
    os: str
    release: str
    arches: tuple[str, ...] = field(converter=tuple)
    subarches: tuple[str, ...] = field(converter=tuple)
    labels: tuple[str, ...] = field(converter=tuple)


_SOURCE: Final = "id, url, keyring_filename, keyring_data, allow_unsigned, priority, created, updated"
_SELECTION: Final = "id, source_id, os, release, arches, subarches, labels"


@define
class SourceStore:
    """The sources in PostgreSQL."""

    _database: Database
    _run_in_thread: RunInThread = in_thread

    # Sources

    async def list(self) -> tuple[BootSource, ...]:
        """Every source, the one that is preferred first."""
        rows = await self._database.query(f"SELECT {_SOURCE} FROM boot_source ORDER BY priority DESC, id")
        return tuple(BootSource(*row) for row in rows)

    async def get(self, source_id: int) -> BootSource:
        """One source.

        :raises NoSuchSource: if there is none with that id.
        """
        row = await self._database.one(f"SELECT {_SOURCE} FROM boot_source WHERE id = %s", (source_id,))
        return BootSource(*_there(row, f"source {source_id}"))

    async def create(
        self,
        url: str,
        *,
        keyring_filename: str = "",
        keyring_data: bytes = b"",
        allow_unsigned: bool = False,
        priority: int = 1,
        selections: Iterable[Selection] = (),
    ) -> BootSource:
        """Add a source, with its selections, in one step.

        :raises SourceInvalid: if a field cannot be as given.
        """
        values = await self._checked(url, keyring_filename, keyring_data, allow_unsigned, priority)
        chosen = [checked_selection(selection) for selection in selections]

        async def insert(transaction: Transaction) -> tuple[Any, ...]:
            row = await transaction.one(
                f"""INSERT INTO boot_source (url, keyring_filename, keyring_data, allow_unsigned, priority)
                    VALUES (%s, %s, %s, %s, %s) RETURNING {_SOURCE}""",
                values,
            )
            source = _there(row, "the source")
            for selection in chosen:
                await _insert_selection(transaction, source[0], selection)
            await _announce(transaction, source[0])
            return source

        return BootSource(*await self._unique(insert))

    async def update(self, source_id: int, **changes: Any) -> BootSource:
        """Change some of url, keyring_filename, keyring_data, allow_unsigned and priority.

        Naming another way to trust the source replaces the one that it had. A source that gets another URL or another
        way of trust forgets which documents it had accepted.

        :raises SourceInvalid: if a field cannot be as given.
        :raises NoSuchSource: if there is none with that id.
        """
        trust: Mapping[str, Any] = {"keyring_filename": "", "keyring_data": b"", "allow_unsigned": False}
        fields = ("url", *trust, "priority")
        for name in changes:
            if name not in fields:
                raise SourceInvalid(name, f"a source has no such field; it has: {', '.join(fields)}")
        before = await self.get(source_id)
        wanted = {name: getattr(before, name) for name in fields}
        if any(changes.get(name) for name in trust):
            wanted.update(trust)
        wanted.update(changes)
        values = await self._checked(*(wanted[name] for name in fields))

        async def change(transaction: Transaction) -> tuple[Any, ...]:
            old = _there(
                await transaction.one(f"SELECT {_SOURCE} FROM boot_source WHERE id = %s FOR UPDATE", (source_id,)),
                f"source {source_id}",
            )
            row = await transaction.one(
                f"""UPDATE boot_source SET url = %s, keyring_filename = %s, keyring_data = %s, allow_unsigned = %s,
                           priority = %s, updated = now()
                    WHERE id = %s RETURNING {_SOURCE}""",
                (*values, source_id),
            )
            if tuple(old[1:5]) != values[:4]:
                await transaction.execute("DELETE FROM boot_source_document WHERE source_id = %s", (source_id,))
            former, name = public(old[1]), public(values[0])
            if former != name:
                await transaction.execute(
                    """UPDATE boot_source
                       SET former_names = array_append(array_remove(array_remove(former_names, %s), %s), %s)
                       WHERE id = %s""",
                    (name, former, former, source_id),
                )
            await _announce(transaction, source_id)
            return _there(row, f"source {source_id}")

        return BootSource(*await self._unique(change))

    async def delete(self, source_id: int) -> None:
        """Remove a source with its selections; the next import removes its images.

        :raises NoSuchSource: if there is none with that id.
        """

        async def remove(transaction: Transaction) -> None:
            if not await transaction.execute("DELETE FROM boot_source WHERE id = %s", (source_id,)):
                raise NoSuchSource(f"there is no source {source_id}")
            await _announce(transaction, source_id)

        await self._database.transact(remove)

    # Selections

    async def selections(self, source_id: int) -> tuple[BootSourceSelection, ...]:
        """The selections of a source, by operating system and release.

        :raises NoSuchSource: if there is no such source.
        """
        await self.get(source_id)
        rows = await self._database.query(
            f"SELECT {_SELECTION} FROM boot_source_selection WHERE source_id = %s ORDER BY os, release", (source_id,)
        )
        return tuple(BootSourceSelection(*row) for row in rows)

    async def selection(self, source_id: int, selection_id: int) -> BootSourceSelection:
        """One selection of a source.

        :raises NoSuchSource: if the source has no such selection.
        """
        row = await self._database.one(
            f"SELECT {_SELECTION} FROM boot_source_selection WHERE source_id = %s AND id = %s",
            (source_id, selection_id),
        )
        return BootSourceSelection(*_there(row, f"selection {selection_id} of source {source_id}"))

    async def add_selection(self, source_id: int, selection: Selection) -> BootSourceSelection:
        """Add a selection to a source.

        :raises SourceInvalid: if a field cannot be as given, or the source has one for that release.
        :raises NoSuchSource: if there is no such source.
        """
        checked = checked_selection(selection)

        async def insert(transaction: Transaction) -> tuple[Any, ...]:
            found = await transaction.one("SELECT id FROM boot_source WHERE id = %s FOR SHARE", (source_id,))
            _there(found, f"source {source_id}")
            row = await _insert_selection(transaction, source_id, checked)
            await _announce(transaction, source_id)
            return row

        return BootSourceSelection(*await self._unique(insert))

    async def update_selection(self, source_id: int, selection_id: int, selection: Selection) -> BootSourceSelection:
        """Replace a selection of a source.

        :raises SourceInvalid: if a field cannot be as given, or the source has another one for that release.
        :raises NoSuchSource: if the source has no such selection.
        """
        checked = checked_selection(selection)

        async def change(transaction: Transaction) -> tuple[Any, ...]:
            row = await transaction.one(
                f"""UPDATE boot_source_selection SET os = %s, release = %s, arches = %s, subarches = %s, labels = %s
                    WHERE source_id = %s AND id = %s RETURNING {_SELECTION}""",
                (*_selection_row(checked), source_id, selection_id),
            )
            await _announce(transaction, source_id)
            return _there(row, f"selection {selection_id} of source {source_id}")

        return BootSourceSelection(*await self._unique(change))

    async def delete_selection(self, source_id: int, selection_id: int) -> None:
        """Remove a selection; the next import removes the images that nothing else selects.

        :raises NoSuchSource: if the source has no such selection.
        """

        async def remove(transaction: Transaction) -> None:
            if not await transaction.execute(
                "DELETE FROM boot_source_selection WHERE source_id = %s AND id = %s", (source_id, selection_id)
            ):
                raise NoSuchSource(f"there is no selection {selection_id} of source {source_id}")
            await _announce(transaction, source_id)

        await self._database.transact(remove)

    # What an import needs

    def listen(self, callback: Callable[[str], object]) -> None:
        """Call ``callback`` whenever any region process has changed a source or a selection, or may have."""
        self._database.listen(CHANNEL, callback)

    async def read(self, session: Session | Database | None = None) -> tuple[Source | SourceFailed, ...]:
        """Every source as an import reads it, the one that is preferred first.

        A source whose keyring cannot be read is a failed one: what it gave before is kept, and nothing new is trusted.
        """
        rows = await (session or self._database).query(
            f"""SELECT {_SOURCE},
                       (SELECT coalesce(json_agg(json_build_array(os, release, arches, subarches, labels)
                                                 ORDER BY s.id), '[]')
                        FROM boot_source_selection s WHERE s.source_id = b.id),
                       former_names
                FROM boot_source b ORDER BY priority DESC, id"""
        )
        return tuple([await self._source(BootSource(*row[:-2]), row[-2], row[-1]) for row in rows])

    async def accepted(self, session: Session | Database | None = None) -> Mapping[int, Mapping[str, datetime]]:
        """For the id of each source, the newest ``updated`` of each of its documents that was accepted."""
        found: dict[int, dict[str, datetime]] = {}
        rows = await (session or self._database).query("SELECT source_id, name, updated FROM boot_source_document")
        for source_id, name, updated in rows:
            found.setdefault(source_id, {})[name] = updated
        return found

    async def accept(self, session: Session | Database, source: Source, documents: Sequence[DocumentSeen]) -> None:
        """Remember the documents that were read from ``source``, so that an older one is known as a replay.

        Nothing is remembered for an unsigned source, or one that has been removed or pointed elsewhere meanwhile.
        """
        if source.allow_unsigned or not documents:
            return

        await session.execute(
            """INSERT INTO boot_source_document (source_id, name, updated, sha256)
               SELECT b.id, d.name, d.updated, d.sha256
               FROM unnest(%s::text[], %s::timestamptz[], %s::text[]) AS d (name, updated, sha256),
                    (SELECT id FROM boot_source WHERE id = %s AND url = %s FOR SHARE) AS b
               ON CONFLICT (source_id, name) DO UPDATE SET updated = EXCLUDED.updated, sha256 = EXCLUDED.sha256
               WHERE boot_source_document.updated <= EXCLUDED.updated""",
            (
                [document.name for document in documents],
                [document.updated for document in documents],
                [document.sha256 for document in documents],
                source.id,
                source.url,
            ),
        )

    # Checks

    async def _source(
        self, source: BootSource, selections: Sequence[Sequence[Any]], former: Sequence[str]
    ) -> Source | SourceFailed:
        keyring, reason = source.keyring_data, ""
        if source.keyring_filename:
            try:
                keyring = await self._run_in_thread(read_keyring, source.keyring_filename)
            except SourceInvalid as error:
                reason = error.message
        value = Source(
            id=source.id,
            url=source.url,
            keyring=keyring,
            allow_unsigned=source.allow_unsigned,
            priority=source.priority,
            selections=tuple(Selection(*selection) for selection in selections),
            former=tuple(former),
        )
        return SourceFailed(value, reason) if reason else value

    async def _checked(
        self, url: object, keyring_filename: object, keyring_data: object, allow_unsigned: object, priority: object
    ) -> tuple[str, str, bytes, bool, int]:
        values = checked_source(url, keyring_filename, keyring_data, allow_unsigned, priority)
        if values[1]:
            await self._run_in_thread(read_keyring, values[1])
        return values

    async def _unique(self, change: Callable[[Transaction], Any]) -> tuple[Any, ...]:
        try:
            row: tuple[Any, ...] = await self._database.transact(change)
        except errors.UniqueViolation as error:
            if error.diag.table_name == "boot_source_selection":
                raise SourceInvalid(
                    "release", "this source has a selection for that operating system and release; change that one"
                ) from error
            raise SourceInvalid("url", "there is a source with this URL; change that one") from error
        return row


def _there(row: tuple[Any, ...] | None, what: str) -> tuple[Any, ...]:
    if row is None:
        raise NoSuchSource(f"there is no {what}")
    return row


async def _announce(transaction: Transaction, source_id: int) -> None:
    await transaction.query("SELECT pg_notify(%s, %s)", (CHANNEL, str(source_id)))


async def _insert_selection(transaction: Transaction, source_id: int, selection: Selection) -> tuple[Any, ...]:
    row = await transaction.one(
        f"""INSERT INTO boot_source_selection (source_id, os, release, arches, subarches, labels)
            VALUES (%s, %s, %s, %s, %s, %s) RETURNING {_SELECTION}""",
        (source_id, *_selection_row(selection)),
    )
    return _there(row, "selection")


def _selection_row(selection: Selection) -> tuple[object, ...]:
    return (
        selection.os, selection.release, list(selection.arches), list(selection.subarches), list(selection.labels),
    )  # fmt: skip
