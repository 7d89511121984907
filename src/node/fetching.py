"""Which scripts does the region have for this machine? Asked for until it says, or patience is at an end."""

import os
import shutil
import tempfile
from typing import Callable, NamedTuple, Optional, Tuple, Union

from node.archive import BadArchive, Script, unpack
from node.client import Answer, Client, NoAnswer
from node.clock import Clock, Event
from node.console import Console
from node.delivery import ITEM_SECONDS, Standing, Verdict, judge, pause
from node.sending import describe_failure

SCRIPTS_PATH = "2012-03-01/maas-scripts"


class FetchFailed(Exception):
    """The scripts cannot be had; the text says why."""


class Fetched(NamedTuple):
    """The scripts that are still to run, and where the region says that this machine stands."""

    scripts: Tuple[Script, ...]
    standing: Standing


class Fetcher(object):
    """Fetches the archive of scripts and unpacks it below ``directory``, each time in a new place: what a script that
    runs is made of stays as it is."""

    def __init__(
        self,
        client: Client,
        directory: str,
        console: Console,
        stop: Event,
        patience: float,
        clock: Clock,
        chance: Callable[[], float],
    ) -> None:
        self._client = client
        self._directory = directory
        self._console = console
        self._stop = stop
        self._patience = patience
        self._clock = clock
        self._chance = chance
        self._count = 0
        # What an earlier start left: nothing of it runs any more.
        shutil.rmtree(directory, ignore_errors=True)

    def fetch(self) -> Optional[Fetched]:
        """The scripts; None if the runner was told to stop meanwhile.

        :raises FetchFailed: if they cannot be had, however often it is tried.
        """
        begun = self._clock.now()
        attempt = 0
        while not self._stop.is_set():
            attempt += 1
            outcome = self._get()
            problem = ""
            # Without that header it is not the region that says that there are none.
            is_none = isinstance(outcome, Answer) and outcome.status == 204 and "x-stanchion-status" in outcome.headers
            if isinstance(outcome, Answer) and (outcome.status == 200 or is_none):
                standing = Standing(
                    outcome.headers.get("x-stanchion-status", ""), outcome.headers.get("x-stanchion-stop") == "true"
                )
                if is_none:
                    return Fetched((), standing)
                try:
                    return Fetched(self._unpacked(outcome.body), standing)
                except (BadArchive, OSError) as error:
                    problem = "the archive of scripts cannot be used: {}".format(error)
            judgement = judge(outcome, self._clock.wall())
            reason = problem or judgement.reason
            # A refusal is tried as long as an item, and no longer: what makes the region take one may come a bit late.
            is_refused = judgement.verdict is Verdict.REFUSED
            patience = min(ITEM_SECONDS, self._patience) if is_refused else self._patience
            left = begun + patience - self._clock.now()
            seconds = min(pause(attempt, judgement.retry_after, self._chance()), max(left, 0.0))
            then = "next try in {:.1f} s".format(seconds) if left > 0 else "giving it up"
            url = self._client.url(SCRIPTS_PATH)
            self._console.warn(
                describe_failure(
                    "fetching the scripts", attempt, "GET", url, outcome, reason, then, self._console.hidden
                )
            )
            if left <= 0:
                raise FetchFailed("the scripts could not be fetched: {}".format(reason))
            self._stop.wait(seconds)
        return None

    def _get(self) -> Union[Answer, NoAnswer]:
        try:
            return self._client.request("GET", SCRIPTS_PATH, accept="*/*")
        except NoAnswer as error:
            return error

    def _unpacked(self, data: bytes) -> Tuple[Script, ...]:
        self._count += 1
        directory = os.path.join(self._directory, str(self._count))
        try:
            return unpack(data, directory, self._console.warn)
        except OSError as error:
            elsewhere = tempfile.mkdtemp(prefix="stanchion-")
            self._console.warn("{} has no room for the scripts ({}); {} is used".format(directory, error, elsewhere))
            return unpack(data, elsewhere, self._console.warn)
