"""What follows from how a request ended: is it delivered, refused for good, or to be tried again, and when?

Pure. Three kinds of failure are told apart. What says nothing about the item itself (no answer, 502, 503, 504, 429,
408, 425, a page of somebody else's) is tried until the runner's patience as a whole is at an end: the region is away.
What may be the item's own fault (500, 409, other 5xx) soon lets the others go first. Other 4xx mean that the item will
never be taken.
"""

import email.utils
import enum
import json
import re
from typing import Mapping, NamedTuple, Optional, Union

from node.client import Answer, NoAnswer

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0
LONGEST_RETRY_AFTER = 300.0
"""Seconds: what a region asks for with Retry-After is honoured up to here; no region means hours."""

ITEM_SECONDS = 300.0
"""How long anything is tried, at least, before it is given up for a reason that may pass."""

ASIDE_SECONDS = 60.0
"""How long an item that does not get through, while others do, keeps these waiting."""


class Verdict(enum.Enum):
    """How one attempt ended."""

    DELIVERED = "delivered"
    REFUSED = "refused"
    ITEM_FAILED = "failed"
    REGION_AWAY = "region away"


class Standing(NamedTuple):
    """Where the region says that this machine stands."""

    status: str = ""
    stop: bool = False


class Judgement(NamedTuple):
    """What follows: ``reason`` is for the log; ``retry_after`` are seconds, if the region named any."""

    verdict: Verdict
    reason: str
    retry_after: Optional[float] = None
    standing: Standing = Standing()


AWAY = frozenset({408, 425, 429, 502, 503, 504})


def judge(outcome: Union[Answer, NoAnswer], now: float) -> Judgement:
    """How an attempt to POST ended. ``now`` is in seconds since the epoch, by this machine."""
    if isinstance(outcome, NoAnswer):
        return Judgement(Verdict.REGION_AWAY, str(outcome))
    reason = "{} {}".format(outcome.status, outcome.reason).strip()
    if 200 <= outcome.status < 300:
        standing = read_standing(outcome)
        if standing is None:
            return Judgement(Verdict.REGION_AWAY, "{}, but the answer is not the region's".format(reason))
        return Judgement(Verdict.DELIVERED, reason, standing=standing)
    wanted = retry_after(outcome.headers, now)
    if outcome.status in AWAY or 300 <= outcome.status < 400 or outcome.status < 200:
        return Judgement(Verdict.REGION_AWAY, reason, wanted)
    if outcome.status >= 500 or outcome.status == 409:
        return Judgement(Verdict.ITEM_FAILED, reason, wanted)
    return Judgement(Verdict.REFUSED, reason)


def read_standing(answer: Answer) -> Optional[Standing]:
    """What a good answer to a signal says; None if it is no region's (a portal's page, a proxy's)."""
    if answer.status == 204 and "x-stanchion-status" not in answer.headers:
        return None  # as portals answer whoever looks whether there is a way into the Internet
    if answer.status == 204 or answer.body.strip() == b"OK":
        return Standing(answer.headers.get("x-stanchion-status", ""), answer.headers.get("x-stanchion-stop") == "true")
    try:
        document = json.loads(answer.body.decode("utf-8"))
    except (ValueError, RecursionError):
        # The caller says that it is no region's answer, and shows its beginning.
        return None
    if not isinstance(document, dict) or not isinstance(document.get("stop"), bool):
        return None
    return Standing(str(document.get("status_name", "")), document["stop"])


def retry_after(headers: Mapping[str, str], now: float) -> Optional[float]:
    """The seconds that Retry-After asks for (RFC 9110, 10.2.3), as a number or a date; None if it asks for none."""
    value = headers.get("retry-after", "").strip()
    if not value:
        return None
    if re.match(r"[0-9]{1,9}\Z", value):
        return min(float(value), LONGEST_RETRY_AFTER)
    try:
        when = email.utils.parsedate_to_datetime(value).timestamp()
        # Its own clock, where it says: this machine's may be years off.
        date = headers.get("date")
        base = email.utils.parsedate_to_datetime(date).timestamp() if date else now
    except (TypeError, ValueError, IndexError, OverflowError):
        return None
    return min(max(when - base, 0.0), LONGEST_RETRY_AFTER)


def pause(failures: int, wanted: Optional[float], chance: float) -> float:
    """Seconds until the next attempt, after so many failures in a row (from 1).

    :param wanted: what the region asked for; never less than that, and up to a tenth more.
    :param chance: a random number from 0 to 1.
    """
    if wanted is not None:
        return wanted * (1.0 + 0.1 * chance) + chance
    longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(failures - 1, 16))
    return longest * (0.5 + 0.5 * chance)
