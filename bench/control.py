"""How a measurement tells its processes what to do: a line of JSON in, a line of JSON back."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from twisted.internet import reactor as installed
from twisted.internet.defer import Deferred
from twisted.internet.stdio import StandardIO
from twisted.logger import globalLogBeginner
from twisted.protocols.basic import LineReceiver

from rpc.logs import VARIABLE, observer


def raise_limit() -> None:
    """Let this process, and those that it starts, have as many open files as it may."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class Remote:
    """A process of a measurement: ``python -m MODULE ARGUMENTS``."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def tell(self, command: str, **values: Any) -> Any:
        """Have it do something; what it answers."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"command": command, **values}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args!r} ended with {self.process.wait()}")
        return json.loads(line)

    def end(self) -> None:
        self.process.communicate()


@contextmanager
def remote(*arguments: str) -> Iterator[Remote]:
    """A process, ended at the end."""
    process = Remote(*arguments)
    try:
        yield process
    finally:
        process.end()


class _Commands(LineReceiver):
    delimiter = b"\n"

    def __init__(self, table: dict[str, Callable[..., Awaitable[Any]]], reactor: Any) -> None:
        self._table = table
        self._reactor = reactor

    def lineReceived(self, line: bytes) -> None:
        values = json.loads(line)
        doing = Deferred.fromCoroutine(self._do(self._table[values.pop("command")], values))
        doing.addErrback(lambda failure: (sys.stderr.write(failure.getTraceback()), self._reactor.stop()))

    async def _do(self, function: Callable[..., Awaitable[Any]], values: dict[str, Any]) -> None:
        self.sendLine(json.dumps(await function(**values)).encode())

    def connectionLost(self, reason: object = None) -> None:
        if self._reactor.running:
            self._reactor.stop()


def serve(table: dict[str, Callable[..., Awaitable[Any]]]) -> None:
    """Run the reactor and obey, until standard input ends."""
    reactor: Any = installed
    raise_limit()
    globalLogBeginner.beginLoggingTo([observer(sys.stderr, {VARIABLE: "critical"})], redirectStandardIO=False)
    StandardIO(_Commands(table, reactor))
    reactor.run()
