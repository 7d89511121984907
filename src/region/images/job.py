"""The life of one import, from being asked for to its end, as a state machine and as rows in PostgreSQL.

The machine decides which step may follow which, and that an import cannot be cancelled once it is publishing. The
rows are what people see, and what tells the next region process that the one before stopped in the middle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final
from typing import Protocol as TypingProtocol

from attrs import define, evolve, frozen
from automat import TypeMachineBuilder

from region.database import Database, Session, Transaction
from region.upstream import Problem

QUEUE_CHANNEL: Final = "stanchion_import_queue"
"""Where region processes hear that an import is asked for."""

ENDED: Final = frozenset({"done", "failed", "cancelled"})
TRIGGERS: Final = frozenset({"timer", "request", "start", "selection", "repair", "upload"})

Connection = Database | Session | Transaction


@frozen
class ImportJob:
    """One import.

    ``state`` is queued, reading, fetching, publishing, done, failed or cancelled; ``trigger`` is what asked for it
    (timer, request, start, selection, repair, upload). ``fetching`` names the file being fetched, ``generation`` is the
    one that was current when it had published, and ``outcome`` says how it ended.
    """

    id: int
    state: str
    trigger: str
    requested: datetime
    started: datetime | None = None
    ended: datetime | None = None
    bytes_done: int = 0
    bytes_total: int = 0
    files_done: int = 0
    files_total: int = 0
    fetching: str = ""
    generation: int | None = None
    outcome: str = ""

    @property
    def is_running(self) -> bool:
        """Whether it has started and not ended."""
        return self.state not in ENDED and self.state != "queued"


# The machine


class JobInputs(TypingProtocol):
    """What can happen to an import."""

    def begin(self, now: datetime) -> None:
        """Its turn has come: it reads the sources."""

    def fetch(self, files_total: int, bytes_total: int) -> None:
        """What is missing is known: it fetches ``files_total`` files of ``bytes_total`` bytes together."""

    def progress(self, files_done: int, bytes_done: int, fetching: str) -> None:
        """So much of it is there, and the file ``fetching`` is on its way."""

    def publish(self) -> None:
        """All that could be fetched is there and verified: it publishes, and cannot be cancelled any more."""

    def finish(self, generation: int | None, outcome: str, now: datetime) -> None:
        """It has published, or there was nothing to publish."""

    def fail(self, outcome: str, now: datetime) -> None:
        """It cannot go on. Nothing was published."""

    def cancel(self, outcome: str, now: datetime) -> bool:
        """Someone wants it stopped. Whether it was: not if it is publishing or has ended."""


@define
class _Life:
    job: ImportJob
    stop: Callable[[], object]


_machine = TypeMachineBuilder(JobInputs, _Life)
_queued = _machine.state("queued")
_reading = _machine.state("reading")
_fetching = _machine.state("fetching")
_publishing = _machine.state("publishing")
_done = _machine.state("done")
_failed = _machine.state("failed")
_cancelled = _machine.state("cancelled")


@_queued.upon(JobInputs.begin).to(_reading)
def _begin(inputs: JobInputs, life: _Life, now: datetime) -> None:
    life.job = evolve(life.job, state="reading", started=now)


@_reading.upon(JobInputs.fetch).to(_fetching)
def _fetch(inputs: JobInputs, life: _Life, files_total: int, bytes_total: int) -> None:
    life.job = evolve(life.job, state="fetching", files_total=files_total, bytes_total=bytes_total)


@_fetching.upon(JobInputs.progress).to(_fetching)
def _progress(inputs: JobInputs, life: _Life, files_done: int, bytes_done: int, fetching: str) -> None:
    life.job = evolve(life.job, files_done=files_done, bytes_done=bytes_done, fetching=fetching)


@_fetching.upon(JobInputs.publish).to(_publishing)
def _publish(inputs: JobInputs, life: _Life) -> None:
    life.job = evolve(life.job, state="publishing", fetching="")


@_publishing.upon(JobInputs.finish).to(_done)
def _finish(inputs: JobInputs, life: _Life, generation: int | None, outcome: str, now: datetime) -> None:
    life.job = evolve(life.job, state="done", generation=generation, outcome=outcome, ended=now)


def _fail(inputs: JobInputs, life: _Life, outcome: str, now: datetime) -> None:
    life.job = evolve(life.job, state="failed", fetching="", outcome=outcome, ended=now)


def _cancel(inputs: JobInputs, life: _Life, outcome: str, now: datetime) -> bool:
    life.job = evolve(life.job, state="cancelled", fetching="", outcome=outcome, ended=now)
    life.stop()
    return True


def _too_late(inputs: JobInputs, life: _Life, outcome: str, now: datetime) -> bool:
    return False


def _already_ended(inputs: JobInputs, life: _Life, outcome: str, now: datetime) -> None:
    """Stopping an import makes what it was doing fail; that is no second end."""


def _late_progress(inputs: JobInputs, life: _Life, files_done: int, bytes_done: int, fetching: str) -> None:
    """A fetch that is being stopped may still report."""


for _state in (_queued, _reading, _fetching, _publishing):
    _state.upon(JobInputs.fail).to(_failed)(_fail)
for _state in (_queued, _reading, _fetching):
    _state.upon(JobInputs.cancel).to(_cancelled)(_cancel)
_publishing.upon(JobInputs.cancel).to(_publishing)(_too_late)
for _state in (_done, _failed, _cancelled):
    _state.upon(JobInputs.cancel).to(_state)(_too_late)
    _state.upon(JobInputs.fail).to(_state)(_already_ended)
for _state in (_reading, _publishing, _done, _failed, _cancelled):
    _state.upon(JobInputs.progress).to(_state)(_late_progress)

_new_machine = _machine.build()


class JobLife:
    """The life of one import: :class:`JobInputs` to drive it, and :attr:`job` for how it stands.

    :param stop: called once when a running import is cancelled; stops what it is doing.
    """

    def __init__(self, job: ImportJob, stop: Callable[[], object]) -> None:
        self._life = _Life(job, stop)
        self.inputs: JobInputs = _new_machine(self._life)

    @property
    def job(self) -> ImportJob:
        """How the import stands now."""
        return self._life.job


# The rows

_COLUMNS: Final = (
    "id, state, trigger, requested, started, ended, bytes_done, bytes_total, files_done, files_total, fetching, "
    "generation, outcome"
)
KEEP_DAYS: Final = 90
"""Imports that ended longer ago than this are forgotten."""


@define
class JobStore:
    """The imports in PostgreSQL."""

    _database: Database

    async def enqueue(self, trigger: str, payload: str = "") -> int:
        """Ask for an import; returns its id, or that of the one that is queued already, which will do as well.

        :param payload: what :data:`QUEUE_CHANNEL` is told of it; nothing is, if it is empty.
        """
        if trigger not in TRIGGERS:
            raise ValueError(f"{trigger!r} is no trigger of an import; use one of: {', '.join(sorted(TRIGGERS))}")

        async def insert(transaction: Transaction) -> int | None:
            if payload:
                await transaction.query("SELECT pg_notify(%s, %s)", (QUEUE_CHANNEL, payload))
            row = await transaction.one(
                """INSERT INTO import_job (state, trigger) VALUES ('queued', %s)
                   ON CONFLICT ((true)) WHERE state = 'queued' DO NOTHING RETURNING id""",
                (trigger,),
            ) or await transaction.one("SELECT id FROM import_job WHERE state = 'queued'")
            return None if row is None else int(row[0])

        while True:  # the queued one may begin between the two statements; then there is room for a new one
            job_id = await self._database.transact(insert)
            if job_id is not None:
                return job_id

    async def claim(self, session: Session) -> ImportJob | None:
        """The queued import, now reading, or None if there is none. ``session`` must hold the import's lock."""
        row = await session.one(
            f"UPDATE import_job SET state = 'reading', started = now() WHERE state = 'queued' RETURNING {_COLUMNS}"
        )
        return None if row is None else ImportJob(*row)

    async def save(self, connection: Connection, job: ImportJob) -> None:
        """Write how ``job`` stands. An import that has ended stays as it is."""
        await connection.execute(
            """UPDATE import_job SET state = %s, started = %s, ended = %s, bytes_done = %s, bytes_total = %s,
                      files_done = %s, files_total = %s, fetching = %s, generation = coalesce(%s, generation),
                      outcome = %s
               WHERE id = %s AND ended IS NULL""",
            (job.state, job.started, job.ended, job.bytes_done, job.bytes_total, job.files_done, job.files_total,
             job.fetching, job.generation, job.outcome, job.id),
        )  # fmt: skip

    async def abandon(self, session: Session, reasons: Mapping[int, str] = {}) -> tuple[ImportJob, ...]:
        """End every import that began and did not end, and return them.

        ``session`` must hold the import's lock, so none of them is running any more. One that had published is done.

        :param reasons: why, by id, where that is known.
        """

        async def end(transaction: Transaction) -> tuple[ImportJob, ...]:
            rows = await transaction.query(
                f"SELECT {_COLUMNS} FROM import_job WHERE state IN ('reading', 'fetching', 'publishing') FOR UPDATE"
            )
            ended = []
            for job in (ImportJob(*row) for row in rows):
                reason = reasons.get(job.id, "the region stopped while it ran")
                if job.generation is None:
                    state, outcome = "failed", reason
                else:
                    state, outcome = "done", f"generation {job.generation} is current; after that, {reason}"
                row = await transaction.one(
                    f"""UPDATE import_job SET state = %s, ended = now(), fetching = '', outcome = %s WHERE id = %s
                        RETURNING {_COLUMNS}""",
                    (state, outcome, job.id),
                )
                assert row is not None, "the row is locked"
                ended.append(ImportJob(*row))
            return tuple(ended)

        return await session.transact(end)

    async def cancel_queued(self, outcome: str) -> tuple[int, ...]:
        """Cancel the import that is waiting for its turn; the ids of those cancelled (none or one)."""
        rows = await self._database.query(
            """UPDATE import_job SET state = 'cancelled', ended = now(), outcome = %s
               WHERE state = 'queued' RETURNING id""",
            (outcome,),
        )
        return tuple(row[0] for row in rows)

    async def add_problems(self, connection: Connection, job_id: int, problems: Sequence[Problem]) -> None:
        """Keep what was wrong, for people to read. An import's problems stay with it."""
        if not problems:
            return
        fields = ("severity", "source", "product", "version", "file", "reason")
        columns = [[_text(getattr(problem, name)) for problem in problems] for name in fields]
        await connection.execute(
            """INSERT INTO import_problem (job_id, severity, source, product, version, file, reason)
               SELECT %s, * FROM unnest(%s::text[], %s::text[], %s::text[], %s::text[], %s::text[], %s::text[])""",
            (job_id, *columns),
        )

    async def problems(self, job_id: int) -> tuple[Problem, ...]:
        """What was wrong in import ``job_id``, in the order in which it was found."""
        rows = await self._database.query(
            """SELECT severity, source, product, version, file, reason FROM import_problem
               WHERE job_id = %s ORDER BY id""",
            (job_id,),
        )
        return tuple(Problem(*row) for row in rows)

    async def get(self, job_id: int) -> ImportJob | None:
        """Import ``job_id``, or None if there is no such import (any more)."""
        row = await self._database.one(f"SELECT {_COLUMNS} FROM import_job WHERE id = %s", (job_id,))
        return None if row is None else ImportJob(*row)

    async def list(self, limit: int = 50) -> tuple[ImportJob, ...]:
        """The newest ``limit`` imports, newest first."""
        rows = await self._database.query(f"SELECT {_COLUMNS} FROM import_job ORDER BY id DESC LIMIT %s", (limit,))
        return tuple(ImportJob(*row) for row in rows)

    async def unfinished(self) -> tuple[ImportJob, ...]:
        """The imports that have not ended, the one that is running before the one that is queued."""
        rows = await self._database.query(f"SELECT {_COLUMNS} FROM import_job WHERE ended IS NULL ORDER BY id")
        return tuple(ImportJob(*row) for row in rows)

    async def forget_old(self, connection: Connection) -> int:
        """Forget imports that ended more than :data:`KEEP_DAYS` days ago; how many."""
        return await connection.execute(
            "DELETE FROM import_job WHERE ended < now() - make_interval(days => %s)", (KEEP_DAYS,)
        )


def _text(value: Any) -> str:
    """PostgreSQL has no NUL in text, and what upstream wrote may have one."""
    return str(value).replace("\x00", "\\x00")
