"""Notifications: every one arrives, and after a gap somebody is told that there was one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet import reactor as installed_reactor
from twisted.internet.defer import DeferredQueue, fail
from twisted.internet.task import deferLater

from region.database import Database, listening
from tests.database import DatabaseTestCase

reactor: Any = installed_reactor
PIDS = "SELECT pid FROM pg_stat_activity WHERE query LIKE 'LISTEN %' AND datname = current_database()"


class ListeningTests(DatabaseTestCase):
    def heard(self, channel: str = "channel", database: Database | None = None) -> DeferredQueue[str]:
        """What a callback is called with from now on."""
        queue: DeferredQueue[str] = DeferredQueue()
        (database or self.database).listen(channel, queue.put)
        return queue

    async def notify(self, payload: str, channel: str = "channel") -> None:
        await self.database.query("SELECT pg_notify(%s, %s)", (channel, payload))

    async def test_the_first_call_is_empty_and_then_come_the_payloads_in_order(self) -> None:
        heard = self.heard()
        self.assertEqual(await heard.get(), "")
        for payload in ("one", "two", "three"):
            await self.notify(payload)
        self.assertEqual([await heard.get() for _ in range(3)], ["one", "two", "three"])

    async def test_a_callback_added_before_the_start_hears_too(self) -> None:
        other = self.make(self.dsn)
        heard = self.heard(database=other)
        await other.start()
        self.assertEqual(await heard.get(), "")
        await self.notify("one")
        self.assertEqual(await heard.get(), "one")

    async def test_channels_are_told_apart_and_share_a_connection(self) -> None:
        first, second = self.heard("first"), self.heard('Second "one"')
        self.assertEqual((await first.get(), await second.get()), ("", ""))
        await self.notify("2", 'Second "one"')
        await self.notify("1", "first")
        self.assertEqual((await first.get(), await second.get()), ("1", "2"))
        self.assertEqual(len(await self.database.query(PIDS)), 1)

    async def test_several_callbacks_of_a_channel_all_hear(self) -> None:
        queues = [self.heard() for _ in range(3)]
        self.assertEqual([await queue.get() for queue in queues], ["", "", ""])
        await self.notify("one")
        self.assertEqual([await queue.get() for queue in queues], ["one", "one", "one"])

    async def test_after_a_lost_connection_a_callback_is_told_that_it_may_have_missed_some(self) -> None:
        heard = self.heard()
        self.assertEqual(await heard.get(), "")
        [(pid,)] = await self.database.query(PIDS)
        await self.database.query("SELECT pg_terminate_backend(%s, 10000)", (pid,))
        self.assertEqual(await heard.get(), "")
        await self.notify("heard")
        self.assertEqual(await heard.get(), "heard")

    async def test_it_keeps_trying_while_the_database_cannot_be_reached(self) -> None:
        self.patch(listening, "FIRST_PAUSE_SECONDS", 0.01)
        heard = self.heard()
        await heard.get()
        name = self.dsn.rpartition("=")[2]
        await self.set_connections_allowed(name, False)
        waiting = heard.get()
        refused = DeferredQueue[None]()
        self.watch_log(lambda event: refused.put(None) if "not listening" in event["log_format"] else None)
        self.server.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")
        await refused.get()
        await refused.get()
        self.assertNoResult(waiting)
        await self.set_connections_allowed(name, True)
        self.assertEqual(await waiting, "")

    async def set_connections_allowed(self, name: str, allowed: bool) -> None:
        self.server.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS {allowed}")

    def watch_log(self, observer: Callable[[dict[str, Any]], object]) -> None:
        self.patch(listening, "log", _Log(observer))

    async def test_a_callback_that_fails_is_logged_and_hears_the_next(self) -> None:
        heard: DeferredQueue[str] = DeferredQueue()

        def now(payload: str) -> None:
            reactor.callLater(0, heard.put, payload)  # after the others have been called
            raise KeyError("raised")

        async def later(payload: str) -> None:
            raise KeyError("from a coroutine")

        for callback in (now, later, lambda payload: fail(KeyError("from a Deferred"))):
            self.database.listen("channel", callback)
        self.assertEqual(await heard.get(), "")
        await self.notify("one")
        self.assertEqual(await heard.get(), "one")
        await self.database.stop()
        logged = {str(failure.value) for failure in self.flushLoggedErrors(KeyError)}
        self.assertLessEqual({"'raised'", "'from a coroutine'", "'from a Deferred'"}, logged)

    async def test_nothing_is_heard_after_stop(self) -> None:
        other = self.make(self.dsn)
        await other.start()
        heard = self.heard(database=other)
        await heard.get()
        await other.stop()
        await self.notify("late")
        while await self.database.query(PIDS):  # the server notices a closed socket in its own time
            await deferLater(reactor, 0.01)
        self.assertNoResult(heard.get())


class _Log:
    """A logger that passes its events on to a test."""

    def __init__(self, observer: Callable[[dict[str, Any]], object]) -> None:
        self._observer = observer

    def warn(self, log_format: str, **fields: Any) -> None:
        self._observer({"log_format": log_format, **fields})
