"""How long does a rack wait before it tries its region again, and what does it say of each failure?

What may be over in a moment (no route, a region that restarts) is tried again soon, and each attempt is said. A region
that does not take the rack, or is not trusted by it, is tried seldom, and the reason is said once, until it changes:
only people can mend that, and they must be able to find it in the log.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from twisted.logger import Logger

from rpc.commands import RegistrationRefused
from rpc.failures import LinkLost

log = Logger()

FIRST_REFUSED_DELAY: Final = 30.0
LONGEST_REFUSED_DELAY: Final = 600.0


def is_refusal(error: BaseException) -> bool:
    """Whether trying again is of little use until somebody has seen to the reason."""
    return isinstance(error, RegistrationRefused) or (isinstance(error, LinkLost) and error.distrusted)


def refused_delay(attempt: int, jitter: Callable[[], float] = random.random) -> float:
    """Seconds until the next try after the ``attempt``-th refusal in a row (from 1): 30, 60, 120, … up to 600, of which
    a random part of up to a half is left out."""
    longest = min(LONGEST_REFUSED_DELAY, FIRST_REFUSED_DELAY * 2.0 ** min(attempt - 1, 16))
    return longest * (1.0 - jitter() / 2)


class Patience:
    """What is remembered of the attempts to reach the region at ``address``, until one succeeds.

    :param retry: seconds to wait after that many failures in a row (the loss of a link is one); with a ``spread``, if
        there is one.
    :param refused: the same, after that many refusals.
    """

    def __init__(self, address: str, retry: Callable[..., float], refused: Callable[[int], float]) -> None:
        self._address = address
        self._retry = retry
        self._refused = refused
        self._refusals = 0
        self._said = ""
        self._spread = 0.0

    def failed(self, error: BaseException) -> None:
        """One more attempt failed: say so."""
        reason = str(error) or type(error).__name__
        if not is_refusal(error):
            self._refusals = 0
            log.warn("No link with the region at {address}: {reason}", address=self._address, reason=reason)
            return
        self._refusals += 1
        if self._said == reason:
            log.debug("Still no link with the region at {address}: {reason}", address=self._address, reason=reason)
            return
        self._said = reason
        log.error(
            "No link with the region at {address}: {reason}. Until that is mended it is tried again ever more seldom, "
            "in the end every {minutes:g} minutes; restart the rack to try at once.",
            address=self._address, reason=reason, minutes=LONGEST_REFUSED_DELAY / 60,
        )  # fmt: skip

    def succeeded(self, spread: float) -> None:
        """The link is up: what was is over. When it is lost, its region wants racks to come back within ``spread``
        seconds (0: it does not say)."""
        self._spread = spread
        self._refusals = 0
        self._said = ""

    def delay(self, attempt: int) -> float:
        """Seconds to wait after the ``attempt``-th failure in a row, which :meth:`failed` was told of."""
        if self._refusals:
            return self._refused(self._refusals)
        return self._retry(attempt, spread=self._spread) if self._spread else self._retry(attempt)
