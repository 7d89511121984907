"""The four ends that asking a peer can have. Every ask ends in exactly one, and the caller must look at which."""

from __future__ import annotations

from typing import Generic, TypeVar

from attrs import frozen

T = TypeVar("T")


@frozen
class Answered(Generic[T]):
    """The peer answered with ``value`` after ``seconds``."""

    value: T
    seconds: float = 0.0


@frozen
class Failed:
    """The peer answered that it failed, or its answer was unreadable; ``kind`` names the error, ``reason`` says it."""

    kind: str
    reason: str
    seconds: float = 0.0


@frozen
class TimedOut:
    """The peer did not answer within ``seconds``."""

    seconds: float


@frozen
class NotConnected:
    """There is no link to the peer; ``since`` is when the last one ended (seconds since the epoch), if known."""

    since: float | None = None


Outcome = Answered[T] | Failed | TimedOut | NotConnected
