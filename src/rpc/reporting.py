"""Where a failed call is made known: one structured log event and one count for each, on each side, whatever failed.

Only the protocol reports, at the one place where a call ends; whoever gets the failure decides what it means and need
not log it again.
"""

from __future__ import annotations

from typing import Final

from attrs import frozen
from prometheus_client import Counter
from twisted.logger import Logger, LogLevel
from twisted.python.failure import Failure
from zope.interface import Interface, implementer

log = Logger()

FAILURES: Final = Counter(
    "stanchion_rpc_failures",
    "Calls between region and rack that failed, by command, direction (out: this process called; in: it answered), "
    "the role of the peer, and the kind of error.",
    ["command", "direction", "peer", "kind"],
)

UNKNOWN: Final = "(unknown)"
"""The command's label when a peer asked for one that is not in the table: its text must not become a label."""


@frozen
class FailedCall:
    """One call that failed.

    ``direction`` is ``out`` on the side that called and ``in`` on the side that was to answer. ``peer``, ``peer_id``
    (a rack's system id) and ``address`` say who the other side is, ``ask`` is the call's number on its link,
    ``seconds`` how long it lasted. ``kind`` is the error's type and ``text`` its text; ``failure`` has the traceback if
    the error is internal to this process, and ``reference`` is what the other side was told to look for in this log.
    """

    command: str
    direction: str
    peer: str
    peer_id: str
    address: str
    ask: str
    seconds: float
    kind: str
    text: str
    reference: str = ""
    failure: Failure | None = None
    peer_role: str = ""


_FIELDS: Final = (
    "command", "direction", "peer", "peer_id", "address", "ask", "seconds", "kind", "reference",
)  # fmt: skip


class IReporter(Interface):
    """What is told of every failed call."""

    def failed(call: FailedCall) -> None:
        """Make ``call`` known. Must not raise."""


@implementer(IReporter)
class Reporter:
    """Logs each failed call once and counts it once."""

    def __init__(self, counter: Counter = FAILURES) -> None:
        self._counter = counter

    def failed(self, call: FailedCall) -> None:
        """Log and count ``call``; with its traceback if it has one."""
        self._counter.labels(call.command, call.direction, call.peer_role, call.kind).inc()
        if call.direction == "out":
            text = "{command} to {peer} failed after {seconds:.3f} s: {kind}: {error}"
        else:
            text = "{command} from {peer} was not answered: {kind}: {error}"
        event = {name: getattr(call, name) for name in _FIELDS}
        event["error"] = call.text
        if call.failure is not None:
            log.failure(text + " (the peer was told reference {reference})", call.failure, LogLevel.critical, **event)
        else:
            log.warn(text, **event)
