"""A region's database in a world: statements happen at once, but their results, and notifications, come in lanes.

Its clock is the world's, so that whatever grows old there does so when the world's time passes.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import psycopg2
from twisted.internet.defer import Deferred

from region.database.connection import Connection, Result
from region.database.pool import Database
from tests.database import TEMPLATE, Server
from tests.world.turns import START, Lane, Turns

FENCE: Final = "tests_fence"
"""A channel on which it is said that all notifications so far have arrived."""

CLOCKED: Final = "stanchion_world"
"""The template of the databases of worlds."""

_CLOCK: Final = f"""
CREATE SCHEMA world;
CREATE TABLE world.clock (at timestamptz NOT NULL);
INSERT INTO world.clock VALUES (to_timestamp({START}));
CREATE FUNCTION world.now() RETURNS timestamptz LANGUAGE sql STABLE AS 'SELECT at FROM world.clock';
CREATE FUNCTION world.clock_timestamp() RETURNS timestamptz LANGUAGE sql STABLE AS 'SELECT at FROM world.clock';
SET search_path TO world, pg_catalog, public;
DO $$
DECLARE found record;
BEGIN
    FOR found IN SELECT table_name, column_name, column_default FROM information_schema.columns
                 WHERE table_schema = 'public' AND column_default ~ '(now|clock_timestamp)[(][)]' LOOP
        EXECUTE format('ALTER TABLE public.%I ALTER %I SET DEFAULT %s', found.table_name, found.column_name,
                       replace(found.column_default, 'pg_catalog.', ''));
    END LOOP;
END $$;
"""


def make_database(server: Server) -> str:
    """The name of a new database in which it is as late as in a world that begins."""
    if CLOCKED not in _made:
        server.execute(f"CREATE DATABASE {CLOCKED} TEMPLATE {TEMPLATE} STRATEGY file_copy")
        connection = psycopg2.connect(server.dsn_of(CLOCKED))
        with connection, connection.cursor() as cursor:
            cursor.execute(_CLOCK)
        connection.close()
        _made.add(CLOCKED)
    name = server.make_database(template=CLOCKED)
    server.execute(f"ALTER DATABASE {name} SET search_path TO world, pg_catalog, public")
    return name


_made: Final[set[str]] = set()


class HeldDatabase(Database):
    """A pool whose results are delivered when their lane moves. What happens inside a transaction is not held up, so
    that no statement waits for a lock that is held by somebody who cannot go on."""

    def __init__(self, turns: Turns, dsn: str, owner: str) -> None:
        super().__init__(turns, dsn)
        self._turns = turns
        self._owner = owner
        self._opening = 0
        self._arrived: list[tuple[Any, str, str]] = []
        self._notifications = Lane(owner)
        self._fence = ""
        self.listen(FENCE, self._fenced)
        turns.is_waited_for.append(self._is_busy)

    def kill(self) -> None:
        """Lose every connection for good, as when the process is killed: nothing is written any more."""
        self._stopped = True
        for connection in list(self._open):
            connection.close("the process was killed")
            self._discard(connection)

    @property
    def sessions(self) -> list[int]:
        """The server's process ids for what is open."""
        return [connection.pid for connection in self._open]

    async def stop(self) -> None:
        await super().stop()
        if self._is_busy in self._turns.is_waited_for:
            self._turns.is_waited_for.remove(self._is_busy)

    async def _connect(self, **options: Any) -> Connection:
        on_notify = options.get("on_notify")
        if on_notify is not None:
            options["on_notify"] = partial(self._heard, on_notify)
        results = Lane(self._owner)
        self._opening += 1
        try:
            connection = await super()._connect(**options)
        finally:
            self._opening -= 1
        run = connection.run

        def held(sql: str, parameters: Any = ()) -> Deferred[Result]:
            running = run(sql, parameters)
            outer: Deferred[Result] = Deferred(lambda _: running.cancel())

            def ended(result: Any) -> None:
                if connection.idle and not sql.startswith("LISTEN"):
                    self._turns.put(results, lambda: None if outer.called else outer.callback(result))
                elif not outer.called:
                    outer.callback(result)

            running.addBoth(ended)
            return outer

        connection.run = held  # type: ignore[method-assign]
        return connection

    def _is_busy(self) -> bool:
        return self._opening > 0 or any(connection._lock.locked for connection in self._open)

    # Notifications

    def _heard(self, on_notify: Any, channel: str, payload: str) -> None:
        if channel == FENCE:
            self._fence = payload
        else:
            self._arrived.append((on_notify, channel, payload))

    def _fenced(self, payload: str) -> None:
        """What is on this channel was seen in :meth:`_heard`."""

    def deliver_until(self, fence: str) -> None:
        """Wait for the notifications that were sent before ``fence`` was, and put them into their lane."""
        while self._fence != fence and self._listener._connection is not None:
            assert self._turns.poll(5_000), "a notification did not come"
        arrived, self._arrived = self._arrived, []
        for on_notify, channel, payload in arrived:
            self._turns.put(self._notifications, partial(on_notify, channel, payload))


class Observer:
    """A connection of the test's own, which sees what is committed and sends fences."""

    def __init__(self, dsn: str) -> None:
        self._connection = psycopg2.connect(dsn)
        self._connection.autocommit = True
        self._fences = 0

    def query(self, sql: str, parameters: Any = ()) -> list[tuple[Any, ...]]:
        """All rows."""
        with self._connection.cursor() as cursor:
            cursor.execute(sql, parameters)
            return list(cursor.fetchall()) if cursor.description else []

    def fence(self) -> str:
        """Send a fence; its text."""
        self._fences += 1
        self.query("SELECT pg_notify(%s, %s)", (FENCE, str(self._fences)))
        return str(self._fences)

    def set_clock(self, seconds: float) -> None:
        """Have it be so late in the database; ``seconds`` since the epoch."""
        self.query("UPDATE world.clock SET at = to_timestamp(%s)", (seconds,))

    def end(self, sessions: list[int]) -> None:
        """Have the server end sessions, and wait until it has: then none of them holds anything any more."""
        for session in sessions:
            self.query("SELECT pg_terminate_backend(%s, 20000)", (session,))

    def close(self) -> None:
        """Disconnect."""
        self._connection.close()
