"""How a call can fail other than by an error that its command declares.

Each class has a ``code`` if it travels: the peer that could not answer sends the code, and the caller raises the class.
"""

from __future__ import annotations

from typing import ClassVar, Final


class CallFailed(Exception):
    """A call did not end with an answer. It has been logged and counted already, once, where it happened."""

    code: ClassVar[bytes] = b""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Unhandled(CallFailed):
    """The peer failed in a way that it did not foresee. Its log has the traceback under ``reference``."""

    code = b"UNKNOWN"  # AMP's own code for this

    def __init__(self, reason: str, reference: str = "") -> None:
        super().__init__(reason)
        self.reference = reference


class UnknownCommand(CallFailed):
    """The peer does not have the command: it is of another version, or does not serve it."""

    code = b"UNHANDLED"  # AMP's own code for this


class NotAllowed(CallFailed):
    """The peer does not answer this command for the role that we have. Responders may raise it."""

    code = b"NOT_ALLOWED"


class ArgumentsRefused(CallFailed):
    """The peer could not read the arguments that we sent."""

    code = b"ARGUMENTS_REFUSED"


class TooBusy(CallFailed):
    """There are too many calls under way on this link, of those that the peer answers or of our own: ask later."""

    code = b"TOO_BUSY"


class Unavailable(CallFailed):
    """The peer cannot answer at the moment, for a reason that passes, such as its database being away: ask later.
    Responders may raise it."""

    code = b"UNAVAILABLE"


class PeerTooOld(CallFailed):
    """The peer speaks a version of the protocol that does not have the command. Nothing was sent; the text says which
    end to upgrade."""


class ArgumentsInvalid(CallFailed):
    """The arguments do not fit the command. Nothing was sent."""


class AnswerMalformed(CallFailed):
    """The peer's answer could not be read."""


class UndeclaredError(CallFailed):
    """The peer answered with an error that the command does not declare; ``error_code`` is its code."""

    def __init__(self, reason: str, error_code: str) -> None:
        super().__init__(f"{error_code}: {reason}")
        self.error_code = error_code


class CallTimedOut(CallFailed):
    """The peer did not answer within ``seconds``."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no answer within {seconds:g} s")
        self.seconds = seconds


class LinkLost(CallFailed):
    """There is no link: it ended at ``since`` (seconds since the epoch), before the answer came or the call began.
    ``distrusted``: because one end does not accept the other's certificate."""

    def __init__(self, reason: str, since: float, *, distrusted: bool = False) -> None:
        super().__init__(reason)
        self.since = since
        self.distrusted = distrusted


TRAVELLING: Final[dict[bytes, type[CallFailed]]] = {
    kind.code: kind for kind in (Unhandled, UnknownCommand, NotAllowed, ArgumentsRefused, TooBusy, Unavailable)
}
