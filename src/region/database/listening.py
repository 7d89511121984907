"""Who hears PostgreSQL's notifications, and what if some were missed?

One connection listens for all channels. It is made again whenever it is lost, with back-off, and after every connect
each callback is called with "", because what was sent in between was not heard.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Protocol

import psycopg2
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import deferLater
from twisted.logger import Logger

from region.database.connection import Connection, DatabaseUnavailable

log = Logger()
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 30.0


class Connect(Protocol):
    """Opens the listening connection; ``on_lost`` is called once if it is lost. Raises ``DatabaseUnavailable``."""

    def __call__(
        self, *, on_notify: Callable[[str, str], object], on_lost: Callable[[], object]
    ) -> Coroutine[Any, Any, Connection]: ...


class Listener:
    """LISTENs on every channel that was asked for, from :meth:`start` to :meth:`stop`."""

    def __init__(self, reactor: Any, connect: Connect, disconnect: Callable[[Connection], object]) -> None:
        self._reactor = reactor
        self._connect = connect
        self._disconnect = disconnect
        self._callbacks: dict[str, list[Callable[[str], object]]] = {}
        self._connection: Connection | None = None
        self._running: Deferred[None] | None = None

    def listen(self, channel: str, callback: Callable[[str], object]) -> None:
        """Add a callback; may be called before or after :meth:`start`."""
        self._callbacks.setdefault(channel, []).append(callback)
        if self._running is None:
            return
        if self._connection is not None:
            self._start(self._add(self._connection, channel, callback), f"LISTEN {channel}")
        elif self._running.called:  # there was nothing to listen for
            self.start()

    def start(self) -> None:
        """Connect, and stay connected, if there is anything to listen for."""
        self._running = self._start(self._stay_connected(), "listening to the database")

    def stop(self) -> None:
        """Listen no more."""
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
        self._drop()

    async def _stay_connected(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while self._callbacks:
            ended: Deferred[None] = Deferred()
            began = self._reactor.seconds()
            try:
                connection = await self._connect(on_notify=self._notified, on_lost=partial(ended.callback, None))
                # From here on listen() itself sees to channels that are added while those of now are listened to.
                self._connection = connection
                for channel, callbacks in [(channel, list(found)) for channel, found in self._callbacks.items()]:
                    await self._listen_to(connection, channel, callbacks)
                await ended
            except (DatabaseUnavailable, psycopg2.Error) as error:
                log.warn(
                    "not listening to the database, trying again in {pause:.1f} s: {error}", pause=pause, error=error
                )
            self._drop()
            if self._reactor.seconds() - began > 2 * LONGEST_PAUSE_SECONDS:
                pause = FIRST_PAUSE_SECONDS
            await deferLater(self._reactor, pause * random.uniform(0.5, 1.0))
            pause = min(LONGEST_PAUSE_SECONDS, pause * 2)

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._disconnect(connection)

    async def _add(self, connection: Connection, channel: str, callback: Callable[[str], object]) -> None:
        try:
            await self._listen_to(connection, channel, [callback])
        except DatabaseUnavailable as error:
            log.debug("{channel} is listened to after the next connect: {error}", channel=channel, error=error)

    async def _listen_to(self, connection: Connection, channel: str, callbacks: list[Callable[[str], object]]) -> None:
        await connection.run("LISTEN " + _quoted(channel))
        for callback in callbacks:
            self._call(channel, callback, "")

    def _notified(self, channel: str, payload: str) -> None:
        for callback in list(self._callbacks.get(channel, ())):
            self._call(channel, callback, payload)

    def _call(self, channel: str, callback: Callable[[str], object], payload: str) -> None:
        async def call() -> None:
            result = callback(payload)
            if isinstance(result, Coroutine | Deferred):
                await result

        self._start(call(), f"a notification on {channel}")

    def _start(self, coroutine: Coroutine[Any, Any, None], what: str) -> Deferred[None]:
        def report(failure: Any) -> None:
            if not failure.check(CancelledError):
                log.failure("{what} failed", failure=failure, what=what)

        return Deferred.fromCoroutine(coroutine).addErrback(report)


def _quoted(identifier: str) -> str:
    return '"' + identifier.replace('"', '""') + '"'
