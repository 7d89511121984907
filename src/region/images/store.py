"""Which generations there are, and which one is current.

A generation becomes current in the one transaction that inserts it, on the session that holds the import's lock, and
only if the generation that it was planned from is still current. Readers take the current one from memory; a
notification from the database replaces it by one assignment.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from attrs import define, field, frozen
from twisted.internet.defer import Deferred
from twisted.logger import Logger
from twisted.python.failure import Failure

from region.database import Database, DatabaseUnavailable, Session, Transaction
from region.images.lock import require_lock
from region.images.plan import Change
from region.images.threads import in_thread
from rpc.fetch import RunInThread
from rpc.locks import FairLock
from rpc.manifest import Image, ImageKey, Manifest, parse_manifest

log = Logger()

CHANNEL: Final = "stanchion_generation"
_MANIFESTS_REMEMBERED: Final = 4


class GenerationMoved(Exception):
    """Another generation became current since the import was planned, so publishing would undo it."""


class NothingToPublish(Exception):
    """There is no image and never was one: an empty first generation would only mislead."""


@frozen
class Generation:
    """A published generation whose manifest is still held. ``published`` is when, with a time zone."""

    number: int
    digest: str
    published: datetime
    manifest: Manifest = field(eq=False, repr=False)


@frozen
class GenerationSummary:
    """A generation in a list. ``size`` is the sum of its images' sizes in bytes; ``retired`` is when its manifest was
    dropped, or None while it is held."""

    number: int
    digest: str
    published: datetime
    retired: datetime | None
    job_id: int | None
    images: int
    size: int
    current: bool


@frozen
class GenerationChange:
    """How a generation differs from the one before: ``kind`` is added, changed, removed or kept, and ``reason`` why."""

    kind: str
    key: ImageKey
    version: str
    reason: str


Release = tuple[str, str, str]
"""(os, release, arch)"""


@define
class GenerationStore:
    """The generations in PostgreSQL.

    Between :meth:`start` and the end of the process, :meth:`current` answers from memory.
    """

    _database: Database
    _run_in_thread: RunInThread = in_thread
    _current: Generation | None = field(default=None, init=False)
    _heard: int = field(default=0, init=False)
    """How often it was said that the current generation may be another."""
    _read: int = field(default=-1, init=False)
    """How often that had been said when it was last read."""
    _listening: bool = field(default=False, init=False)
    _refreshing: FairLock = field(factory=FairLock, init=False)
    _manifests: OrderedDict[str, Manifest] = field(factory=OrderedDict, init=False)
    _releases: dict[int, frozenset[Release]] = field(factory=dict, init=False)
    _subscribers: list[Callable[[Generation], object]] = field(factory=list, init=False)

    # Reading

    def start(self) -> None:
        """Listen for generations that become current, published here or by another region process."""
        if not self._listening:
            self._listening = True
            self._database.listen(CHANNEL, self._notified)

    def subscribe(self, callback: Callable[[Generation], object]) -> None:
        """Call ``callback(generation)`` once for each generation that becomes current while this process runs."""
        self._subscribers.append(callback)

    @property
    def latest(self) -> Generation | None:
        """The newest current generation that this process has heard of, without asking; None if of none."""
        return self._current

    async def current(self) -> Generation | None:
        """The current generation, or None if nothing was ever published.

        :raises DatabaseUnavailable: if it is not in memory and the database cannot be asked.
        """
        if self._read < self._heard or not self._listening:
            await self._refresh()
        return self._current

    async def read_again(self) -> Generation | None:
        """The current generation as the database has it now, also if nobody has said that it is another.

        :raises DatabaseUnavailable: if the database cannot be asked.
        """
        self._heard += 1
        await self._refresh()
        return self._current

    async def by_digest(self, digest: str) -> Generation | None:
        """The newest generation with this digest whose manifest is still held, or None."""
        current = await self.current()
        if current is not None and current.digest == digest:
            return current
        row = await self._database.one(
            f"{_SELECT} WHERE digest = %s AND manifest IS NOT NULL ORDER BY number DESC LIMIT 1", (digest,)
        )
        return None if row is None else await self._generation(row)

    async def list(self, limit: int = 100) -> tuple[GenerationSummary, ...]:
        """The newest ``limit`` generations, retired ones too, newest first."""
        rows = await self._database.query(
            """SELECT g.number, g.digest, g.published, g.retired, g.job_id, count(i.generation),
                      coalesce(sum(i.size), 0)::bigint, g.number = (SELECT generation FROM current_generation)
               FROM (SELECT * FROM generation ORDER BY number DESC LIMIT %s) g
               LEFT JOIN generation_image i ON i.generation = g.number
               GROUP BY g.number, g.digest, g.published, g.retired, g.job_id ORDER BY g.number DESC""",
            (limit,),
        )
        return tuple(GenerationSummary(*row) for row in rows)

    async def changes(self, number: int) -> tuple[GenerationChange, ...]:
        """How generation ``number`` differs from the one before it, and what it kept for lack of something better."""
        rows = await self._database.query(
            """SELECT kind, os, release, arch, subarch, kflavor, label, version, reason
               FROM generation_change WHERE generation = %s ORDER BY id""",
            (number,),
        )
        return tuple(GenerationChange(row[0], ImageKey(*row[1:7]), row[7], row[8]) for row in rows)

    async def releases_of(self, number: int) -> frozenset[Release]:
        """Every (os, release, arch) that generation ``number`` listed, also if it is retired; empty if unknown."""
        return (await self.listings()).get(number, frozenset())

    async def listings(self) -> Mapping[int, frozenset[Release]]:
        """For the number of every generation there ever was, each (os, release, arch) that it listed."""
        newest = max(self._releases, default=0)
        current = await self.current()
        if current is not None and (current.number != newest or not self._listening):
            rows = await self._database.query(
                """SELECT g.number, i.os, i.release, i.arch FROM generation g
                   LEFT JOIN generation_image i ON i.generation = g.number
                   WHERE g.number > %s GROUP BY g.number, i.os, i.release, i.arch""",
                (newest,),
            )
            found: dict[int, set[Release]] = {}
            for number, os, release, arch in rows:
                listed = found.setdefault(number, set())
                if os is not None:
                    listed.add((os, release, arch))
            self._releases = {**self._releases, **{number: frozenset(listed) for number, listed in found.items()}}
        return self._releases

    # Publishing

    async def publish(
        self, session: Session, manifest: Manifest, changes: Sequence[Change], job_id: int, *, base: int | None
    ) -> Generation:
        """Make ``manifest`` the current generation, or return the current one if its digest is the same.

        :param session: the session that holds the import's lock.
        :param base: the number of the generation that ``manifest`` was planned from; None if there was none.
        :raises ImportLockLost: if ``session`` does not hold the lock.
        :raises GenerationMoved: if ``base`` is not current any more.
        :raises NothingToPublish: if ``manifest`` is empty and nothing was published before.
        :raises DatabaseUnavailable: if the session is lost; then nothing, or everything, was published.
        """
        if base is None and not manifest.images:
            raise NothingToPublish("no image is complete and nothing was published before")
        await self._run_in_thread(lambda: manifest.digest)  # computed once, and not in the reactor's thread

        async def write(transaction: Transaction) -> tuple[Any, ...]:
            await require_lock(transaction)
            row = await transaction.one(
                """SELECT g.number, g.digest, g.published FROM current_generation c
                   JOIN generation g ON g.number = c.generation FOR UPDATE OF c"""
            )
            current = None if row is None else row[0]
            if current != base:
                raise GenerationMoved(f"generation {current} is current, not {base} that this import started from")
            if row is None or row[1] != manifest.digest:
                row = await _insert(transaction, manifest, changes, job_id)
            await transaction.execute("UPDATE import_job SET generation = %s WHERE id = %s", (row[0], job_id))
            return row

        number, digest, published = await session.transact(write)
        generation = Generation(number, digest, published, manifest)
        self._remember(manifest)
        self._adopt(generation)
        return generation

    async def read_current(self, session: Session) -> Generation | None:
        """The current generation as the database has it now, not as it is in memory: what an import starts from."""
        row = await session.one(f"{_SELECT} WHERE number = (SELECT generation FROM current_generation)")
        return None if row is None else await self._generation(row)

    # In memory

    def _notified(self, payload: str) -> None:
        self._heard += 1
        Deferred.fromCoroutine(self._refresh()).addErrback(_not_read)

    async def _refresh(self) -> None:
        """See to it that what was heard of by now is read. Those who wait together are served by one reading."""
        wanted = self._heard
        await self._refreshing.acquire()
        try:
            if self._listening and self._read >= wanted:
                return
            heard = self._heard
            row = await self._database.one(f"{_SELECT} WHERE number = (SELECT generation FROM current_generation)")
            if row is not None:
                self._adopt(await self._generation(row))
            self._read = heard
        finally:
            self._refreshing.release()

    def _adopt(self, generation: Generation) -> None:
        if self._current is not None and generation.number <= self._current.number:
            return
        self._current = generation
        for callback in self._subscribers:
            try:
                callback(generation)
            except Exception:  # noqa: BLE001 - one subscriber must not keep the others from hearing of it
                log.failure("A subscriber failed on generation {number}", number=generation.number)

    def _remember(self, manifest: Manifest) -> None:
        self._manifests[manifest.digest] = manifest
        self._manifests.move_to_end(manifest.digest)
        while len(self._manifests) > _MANIFESTS_REMEMBERED:
            self._manifests.popitem(last=False)

    async def _generation(self, row: tuple[Any, ...]) -> Generation:
        number, digest, published = row
        manifest = self._manifests.get(digest)
        if manifest is None:
            data = await self._database.one("SELECT manifest FROM generation WHERE number = %s", (number,))
            if data is None or data[0] is None:
                raise GenerationMoved(f"generation {number} was retired while it was read; ask again")
            manifest = await self._run_in_thread(parse_manifest, bytes(data[0]), digest)
        self._remember(manifest)
        return Generation(number, digest, published, manifest)


def _not_read(reason: Failure) -> None:
    if reason.check(DatabaseUnavailable):
        log.warn("The current generation is read again when it is asked for: {reason}", reason=str(reason.value))
    else:
        log.failure("The current generation could not be read again", reason)


_SELECT: Final = "SELECT number, digest, published FROM generation"


async def _insert(
    transaction: Transaction, manifest: Manifest, changes: Sequence[Change], job_id: int
) -> tuple[Any, ...]:
    row = await transaction.one(
        # As the text that it is, which is half as long to write and to read as bytes are.
        """INSERT INTO generation (digest, manifest, job_id) VALUES (%s, convert_to(%s, 'UTF8'), %s)
           RETURNING number, digest, published""",
        (manifest.digest, manifest.canonical.decode("ascii"), job_id),
    )
    assert row is not None, "INSERT … RETURNING gives one row"
    number = row[0]
    await transaction.execute(
        f"""INSERT INTO generation_image (generation, {", ".join(_IMAGE_COLUMNS)})
            SELECT %s, * FROM json_to_recordset(%s) AS image({_typed(_IMAGE_COLUMNS)})""",
        (number, _records(_IMAGE_COLUMNS, map(_image_row, manifest.images))),
    )
    if changes:
        rows = ((change.kind, *_key_row(change.image), change.reason) for change in changes)
        await transaction.execute(
            f"""INSERT INTO generation_change (generation, {", ".join(_CHANGE_COLUMNS)})
                SELECT %s, * FROM json_to_recordset(%s) AS change({_typed(_CHANGE_COLUMNS)})""",
            (number, _records(_CHANGE_COLUMNS, rows)),
        )
    await transaction.execute(
        """INSERT INTO current_generation (generation) VALUES (%s)
           ON CONFLICT (only_one) DO UPDATE SET generation = EXCLUDED.generation""",
        (number,),
    )
    await transaction.query("SELECT pg_notify(%s, %s)", (CHANNEL, str(number)))
    return row


_KEY_COLUMNS: Final = dict.fromkeys(("os", "release", "arch", "subarch", "kflavor", "label", "version"), "text")
_IMAGE_COLUMNS: Final[Mapping[str, str]] = {
    **_KEY_COLUMNS, "source": "text", "product": "text", "size": "bigint", "title": "text", "support_eol": "text",
}  # fmt: skip
_CHANGE_COLUMNS: Final[Mapping[str, str]] = {"kind": "text", **_KEY_COLUMNS, "reason": "text"}


def _typed(columns: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in columns.items())


def _records(columns: Mapping[str, str], rows: Iterable[tuple[object, ...]]) -> str:
    """The rows as one JSON text: to quote thousands of texts one by one takes several times as long."""
    return json.dumps([dict(zip(columns, row, strict=True)) for row in rows])


def _key_row(image: Image) -> tuple[str, ...]:
    return (image.os, image.release, image.arch, image.subarch, image.kflavor, image.label, image.version)


def _image_row(image: Image) -> tuple[object, ...]:
    attributes = dict(image.attributes)
    title, support_eol = attributes.get("release_title", ""), attributes.get("support_eol", "")
    return (*_key_row(image), image.source, image.product, image.size, title, support_eol)
