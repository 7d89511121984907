"""How does what is in the spool reach the region? One at a time, in order, for as long as there is any hope.

While scripts run nothing is given up because the region is away. Once they have ended (:meth:`Sender.drain`) the region
has ``patience`` seconds to take something; every item that it takes renews that.
"""

import random
from typing import Callable, Dict, Optional, Union

from node.client import Answer, Client, NoAnswer
from node.clock import Clock, span
from node.console import Console
from node.delivery import ASIDE_SECONDS, Judgement, Standing, Verdict, judge, pause
from node.spool import Item, Spool

PATIENCE_SECONDS = 1800.0
SHOWN_BYTES = 500
"""How much of an answer's body a failure's line shows."""

SIGNAL_PATH = "2012-03-01/"


class Sender(object):
    """Sends what is in ``spool``. :meth:`run` is for a thread of its own.

    :param on_standing: called, in that thread, with what each good answer says of where this machine stands.
    """

    def __init__(
        self,
        spool: Spool,
        client: Client,
        console: Console,
        on_standing: Callable[[Standing], None],
        patience: float = PATIENCE_SECONDS,
        clock: Optional[Clock] = None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._spool = spool
        self._client = client
        self._console = console
        self._on_standing = on_standing
        self._patience = patience
        self._clock = clock or Clock()
        self._now = self._clock.now
        self._chance = chance
        self._attempts: Dict[int, int] = {}
        self._first_error: Dict[int, float] = {}
        self._heard: Optional[float] = None
        self._was_away = False
        self._failures = 0
        self._hopeful_since: Optional[float] = None
        self._ended = self._clock.event()
        self._more = self._clock.event()
        self._back = self._clock.event()

    def drain(self) -> None:
        """Be patient for so long from now on, and no longer: no more scripts are running."""
        self._hopeful_since = self._now()

    def hear(self) -> None:
        """The region took something else, so it is there: if it was away, it is not waited for any longer."""
        self._heard = self._now()
        if self._was_away:
            self._back.set()

    def look(self) -> None:
        """Something was added to the spool."""
        self._more.set()

    def end(self) -> None:
        """End :meth:`run` when it next looks."""
        self._ended.set()
        self._more.set()
        self._back.set()

    def run(self) -> None:
        """Send until :meth:`end`. Nothing that goes wrong ends it before."""
        while not self._ended.is_set():
            self._more.clear()
            self._back.clear()
            if self._ended.is_set():
                return
            try:
                seconds = self.step()
            except Exception as error:  # noqa: BLE001  # whatever it is, what is spooled has to be sent
                what = "{}: {}".format(type(error).__name__, error)
                self._console.error("the sender stumbled over {}; it goes on".format(what))
                left = self._left()
                seconds = 5.0 if left is None else min(5.0, max(left, 0.0))
                if not seconds:
                    self._give_up_all("the runner failed at it: {}".format(what))
            if seconds is None:
                self._more.wait()
            elif seconds:
                self._back.wait(seconds)

    def step(self) -> Optional[float]:
        """Try one item once; seconds until the next try, or None if there is nothing to send."""
        item = self._spool.first()
        if item is None:
            return None
        attempt = self._attempts[item.number] = self._attempts.get(item.number, 0) + 1
        outcome = self._post(item)
        judgement = judge(outcome, self._clock.wall())
        self._was_away = judgement.verdict is Verdict.REGION_AWAY and judgement.retry_after is None
        return self._follow(item, attempt, outcome, judgement)

    def _post(self, item: Item) -> Union[Answer, NoAnswer]:
        try:
            return self._client.request("POST", SIGNAL_PATH, item.body, item.content_type)
        except NoAnswer as error:
            return error

    def _follow(
        self, item: Item, attempt: int, outcome: Union[Answer, NoAnswer], judgement: Judgement
    ) -> Optional[float]:
        if judgement.verdict is Verdict.DELIVERED:
            if self._failures or attempt > 1:
                self._console.say("{} is delivered, at attempt {}".format(item.label, attempt))
            self._failures = 0
            self._done(item)
            self._spool.sent(item.number)
            if self._hopeful_since is not None:
                self._hopeful_since = self._now()
            self._on_standing(judgement.standing)
            return 0.0
        self._failures += 1
        if judgement.verdict is Verdict.REFUSED:
            self._report(item, attempt, outcome, judgement, None)
            self._give_up(item, judgement.reason)
            return 0.0
        left = self._left()
        if left is not None and left <= 0:
            self._report(item, attempt, outcome, judgement, None)
            reason = "{}; the region took nothing for {}".format(judgement.reason, span(self._patience))
            self._give_up(item, reason)
            is_there = self._heard is not None and self._heard >= self._now() - self._patience
            if judgement.verdict is Verdict.REGION_AWAY and not is_there:
                # It would be the same with all the others, and might take minutes for each.
                self._give_up_all(reason)
            return 0.0
        first = self._first_error.setdefault(item.number, self._now())
        is_its_own = judgement.verdict is Verdict.ITEM_FAILED or (self._heard is not None and self._heard > first)
        if is_its_own and self._now() - first >= ASIDE_SECONDS and self._spool.waiting > 1:
            # It may be this one alone that does not get through; the others must not wait for it.
            self._first_error[item.number] = self._now()
            self._spool.set_aside(item.number)
        seconds = pause(self._failures, judgement.retry_after, self._chance())
        if left is not None:
            seconds = min(seconds, left)
        self._report(item, attempt, outcome, judgement, seconds)
        return seconds

    def _left(self) -> Optional[float]:
        """Seconds that patience lasts; None while that is without end."""
        if self._hopeful_since is None:
            return None
        return self._hopeful_since + self._patience - self._now()

    def _done(self, item: Item) -> None:
        self._attempts.pop(item.number, None)
        self._first_error.pop(item.number, None)

    def _give_up(self, item: Item, reason: str) -> None:
        self._done(item)
        self._spool.give_up(item.number, item.label, reason)
        self._console.error("{} is NOT delivered and will not be tried again: {}".format(item.label, reason))

    def _give_up_all(self, reason: str) -> None:
        item = self._spool.first()
        while item is not None:
            self._give_up(item, reason)
            item = self._spool.first()

    def _report(
        self, item: Item, attempt: int, outcome: Union[Answer, NoAnswer], judgement: Judgement, seconds: Optional[float]
    ) -> None:
        then = "giving it up" if seconds is None else "next try in {:.1f} s".format(seconds)
        self._console.warn(
            describe_failure(
                item.label, attempt, "POST", self._client.url(SIGNAL_PATH), outcome, judgement.reason, then,
                self._console.hidden,
            )
        )  # fmt: skip


def describe_failure(
    label: str,
    attempt: int,
    method: str,
    url: str,
    outcome: Union[Answer, NoAnswer],
    reason: str,
    then: str,
    hidden: Callable[[str], str],
) -> str:
    """One line with everything that is known of a failed request; ``hidden`` removes secrets from what came."""
    line = "{}: attempt {}: {} {}: {}".format(label, attempt, method, url, reason)
    if isinstance(outcome, Answer):
        correlation = outcome.headers.get("x-correlation-id")
        if correlation:
            line += " [{}]".format(correlation)
        shown = hidden(outcome.body[: 64 * SHOWN_BYTES].decode("utf-8", "replace").strip())
        if shown:
            line += ": {!r}".format(shown[:SHOWN_BYTES])
    return "{}; {}".format(line, then)


class Heartbeat(object):
    """Tells the region, every so often, that this machine is there. :meth:`run` is for a thread of its own.

    What a heartbeat says is of interest now or never, so it is not spooled; and nothing ends it but :meth:`end`.

    :param progress: gives what is being done, for the region's people.
    """

    def __init__(
        self,
        client: Client,
        console: Console,
        progress: Callable[[], str],
        form: Callable[[str], "tuple[bytes, str]"],
        seconds: float = 60.0,
        on_standing: Callable[[Standing], None] = lambda standing: None,
        clock: Optional[Clock] = None,
    ) -> None:
        self._client = client
        self._console = console
        self._progress = progress
        self._form = form
        self._seconds = seconds
        self._on_standing = on_standing
        self._clock = clock or Clock()
        self._failures = 0
        self._ended = self._clock.event()

    def end(self) -> None:
        """End :meth:`run`."""
        self._ended.set()

    def run(self) -> None:
        """Beat until :meth:`end`."""
        while not self._ended.wait(self._seconds):
            try:
                self.beat()
            except BaseException as error:  # noqa: BLE001  # a heart that stops fails a machine that is well
                self._console.error(
                    "the heartbeat stumbled over {}: {}; it goes on".format(type(error).__name__, error)
                )

    def beat(self) -> None:
        """Send one."""
        body, content_type = self._form(self._progress())
        outcome: Union[Answer, NoAnswer, None] = None
        try:
            outcome = self._client.request("POST", SIGNAL_PATH, body, content_type)
        except NoAnswer as error:
            outcome = error
        judgement = judge(outcome, self._clock.wall())
        if judgement.verdict is Verdict.DELIVERED:
            if self._failures:
                self._console.say("the region hears the heartbeat again, after {} that failed".format(self._failures))
            self._failures = 0
            self._on_standing(judgement.standing)
            return
        self._failures += 1
        then = "next in {}".format(span(self._seconds))
        url = self._client.url(SIGNAL_PATH)
        self._console.warn(
            describe_failure(
                "heartbeat", self._failures, "POST", url, outcome, judgement.reason, then, self._console.hidden
            )
        )
