"""Why could something not be fetched, in a sentence that a person can act on, and may trying again help?"""

from __future__ import annotations

from typing import Final

from OpenSSL import SSL
from service_identity import VerificationError
from twisted.internet import error
from twisted.internet.defer import CancelledError

from rpc.tunnels import HeadTooLong, ProxyRefused
from rpc.urls import public

WITHHELD: Final = "X-Stanchion-Withheld"
"""The header with which a region says, beside a 503, that it has published a file and cannot give it now, and why: a
phrase in ASCII whose subject is the file."""


class FetchError(Exception):
    """A document or file could not be fetched.

    ``reason`` is one sentence that names values; ``retriable`` says whether the same request may do better later, and
    ``retry_after`` how many seconds the server asked to wait, if it did; ``status`` is the HTTP status, or 0.
    ``withheld``: the server knows the file, and knows that it cannot give it now; to ask again soon is of no use.
    """

    def __init__(
        self,
        url: str,
        reason: str,
        *,
        retriable: bool = False,
        status: int = 0,
        retry_after: float = 0.0,
        withheld: bool = False,
    ) -> None:
        self.url = public(url)
        self.reason = reason
        self.retriable = retriable
        self.status = status
        self.retry_after = retry_after
        self.withheld = withheld
        super().__init__(f"{self.url}: {reason}")


def explain(problem: BaseException | None, connect_timeout: float) -> tuple[str, bool]:
    """What a failed request means, in words, and whether trying again may help."""
    inner = innermost(problem)
    match inner:
        case ProxyRefused():
            return str(inner), inner.retriable
        case HeadTooLong():
            return str(inner), False
        case CancelledError():
            return "it was cancelled", False
        case VerificationError():
            return "TLS failed: the server's certificate is for another host", False
        case error.TimeoutError() | error.TCPTimedOutError() | error.UserError():
            return f"no connection within {connect_timeout:g} seconds", True
        case error.DNSLookupError():
            return f"the host's name cannot be resolved ({inner})", True
        case error.ConnectError():
            return f"no connection: {inner}", True
        case error.ConnectionDone():
            return "the server closed the connection", True
        case error.ConnectionLost() | error.ConnectionAborted():
            return "the connection was lost", True
        case SSL.Error():
            texts = [str(part[-1]) for part in inner.args[0]] if inner.args and inner.args[0] else [repr(inner)]
            text = ", ".join(texts)
            return f"TLS failed: {text}", "verify" not in text
        case _:
            return f"{type(inner).__name__}: {inner}", not isinstance(inner, ValueError)


def innermost(problem: BaseException | None) -> BaseException | None:
    """The first cause inside what the Agent wraps in lists of reasons."""
    while reasons := [reason.value for reason in getattr(problem, "reasons", ())]:
        problem = reasons[0]
    return problem
