"""How blocking work leaves the reactor's thread when nobody says otherwise: into the reactor's own threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThread

P = ParamSpec("P")
T = TypeVar("T")


def in_thread(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Deferred[T]:
    """What ``function(*args, **kwargs)`` returns or raises, run in one of the reactor's threads."""
    return deferToThread(function, *args, **kwargs)
