"""How the region asks its racks what they hold: all at once, each within a deadline, and one round for all who wait.

A rack is told which digest is known of it and which was published last, and sends its list only if it holds something
else, so a round moves a few bytes per rack, also over racks that have just swapped. Every ask ends in exactly one
outcome, and the round says which.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Mapping
from datetime import datetime
from functools import cached_property, partial
from typing import Any, Final, Protocol, TypeVar

import prometheus_client as metrics
from attrs import define, frozen
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.internet.threads import deferToThread
from twisted.logger import Logger
from twisted.python.failure import Failure

from region.answers.combine import NOTHING, Catalogue, Held, RackAnswer, Target
from rpc import rounds
from rpc.asks import Alike
from rpc.commands import ListImages
from rpc.events import plain
from rpc.manifest import InvalidManifest, is_sha256, parse_manifest
from rpc.outcomes import Answered, Failed, NotConnected, Outcome, TimedOut

T = TypeVar("T")
log = Logger()

DEADLINE: Final = 2.0
"""Seconds that a rack has to answer, unless the region's settings say else."""

INLINE: Final = 4 << 10
"""Bytes of a manifest that are parsed at once (in half a millisecond; there may be 100 in a round); a larger one is
parsed in a thread, once for all who send it."""


ROUNDS: Final = metrics.Histogram(
    "stanchion_ask_round_seconds", "Rounds of asking all racks what they hold, and how long each took.",
    buckets=(0.01, 0.05, 0.1, 0.5, 1.0, 2.0, 2.5, 5.0),
)  # fmt: skip
ASKED: Final = metrics.Counter(
    "stanchion_ask_racks", "Racks asked in those rounds, by how that ended; all but answered are silent.", ["outcome"]
)
OUTCOMES: Final[Mapping[type, str]] = {
    Answered: "answered", Failed: "failed", TimedOut: "timed-out", NotConnected: "not-connected",
}  # fmt: skip


class RackInfo(Protocol):
    """What is known of an enrolled rack without asking it; ``progress`` is of a sync under way or one that failed, for
    display, and ``reported`` when it said that."""

    @property
    def name(self) -> str: ...
    @property
    def generation(self) -> int | None: ...
    @property
    def digest(self) -> str | None: ...
    @property
    def progress(self) -> Mapping[str, Any]: ...
    @property
    def reported(self) -> datetime | None: ...


class IRackLinks(Protocol):
    """The enrolled racks and the live links to them."""

    def enrolled(self) -> Mapping[str, RackInfo]:
        """Every rack that must be asked, by system id."""

    def link_of(self, system_id: str) -> Any:
        """The live link to a rack (:class:`rpc.protocol.Link`), or None."""

    def not_connected_since(self, system_id: str) -> float | None:
        """When the rack's last link ended (seconds since the epoch), if that is known."""


@frozen(eq=False)
class Round:
    """One round: how asking each enrolled rack ended, by system id."""

    answers: Mapping[str, RackAnswer]

    @cached_property
    def key(self) -> Hashable:
        """Equal for rounds that say the same, whatever the seconds that racks took to answer."""
        return frozenset(answer.fingerprint for answer in self.answers.values())

    def is_of(self, answers: Mapping[str, RackAnswer]) -> bool:
        """Whether it has the very same answers, not only equal ones."""
        return len(answers) == len(self.answers) and all(
            self.answers.get(rack) is answer for rack, answer in answers.items()
        )


@define
class _Memory:
    """What one rack last answered, what it had reported by then, and since when it has not answered."""

    catalogue: Catalogue | None = None
    generation: int | None = None
    reported: str | None = None
    silent_since: float | None = None
    info: RackInfo | None = None
    answer: RackAnswer | None = None
    words: Mapping[str, Any] | None = None
    """What the rack said that ``answer`` was made of, if that was that it holds what was known."""


class Asker:
    """Asks the racks.

    :param deadline: seconds that each rack has to answer.
    :param published: the catalogue with a digest, if it is one that the region has in memory: what most racks hold
        is what was published, and then nobody parses a list.
    :param expected: the digest that a rack most likely holds when nothing is known of it, or "".
    """

    def __init__(
        self,
        links: IRackLinks,
        clock: IReactorTime,
        *,
        deadline: float = DEADLINE,
        published: Callable[[str], Catalogue | None] = lambda digest: None,
        expected: Callable[[], str] = lambda: "",
        run_in_thread: Callable[..., Deferred[Any]] = deferToThread,
        ask_all: Callable[..., Awaitable[Mapping[str, Outcome[Any]]]] | None = None,
    ) -> None:
        self._links = links
        self._clock = clock
        self._deadline = deadline
        self._published = published
        self._expected = expected
        self._run_in_thread = run_in_thread
        self._ask_all = ask_all or partial(rounds.ask_all, alike=Alike())
        self._memories: dict[str, _Memory] = {}
        self._parsing: dict[tuple[str, bytes], list[Deferred[Catalogue]]] = {}
        self._waiting: list[Deferred[Round]] | None = None
        self._before = Round({})

    def ask(self) -> Deferred[Round]:
        """One round over every enrolled rack; whoever calls while it is in flight gets the same one.

        Cancelling what is returned ends this caller's wait and not the round.
        """
        begins = self._waiting is None
        waiting = self._waiting = [] if self._waiting is None else self._waiting
        mine: Deferred[Round] = Deferred(waiting.remove)
        waiting.append(mine)
        if begins:
            Deferred.fromCoroutine(self._round()).addBoth(self._ended, waiting)
        return mine

    def lacks(self, asked: Round, wanted: frozenset[str]) -> bool:
        """Whether a rack that is ``wanted`` (by id or name) is enrolled now, and was not, or not by that name, when the
        round began."""
        if not wanted:
            return False
        enrolled = self._links.enrolled()
        joined = [(rack, info.name) for rack, info in enrolled.items() if rack not in asked.answers]
        renamed = [info.name for rack, info in enrolled.items() if rack in asked.answers
                   and asked.answers[rack].name != info.name]  # fmt: skip
        return any(rack in wanted or name in wanted for rack, name in joined) or not wanted.isdisjoint(renamed)

    async def ask_one(self, system_id: str) -> RackAnswer:
        """How asking just this rack ended.

        :raises KeyError: if it is not enrolled.
        """
        rack = self._links.enrolled()[system_id]
        return (await self._gather({system_id: rack}))[system_id]

    def _ended(self, result: Any, waiting: list[Deferred[Round]]) -> None:
        self._waiting = None
        if not waiting and isinstance(result, Failure):
            log.failure("A round of asking the racks broke, and nobody waits for it any more", result)
        while waiting:
            # A failure here is a fault of this program: each who waits gets it, and reports it.
            waiting.pop(0).callback(result)

    async def _round(self) -> Round:
        racks = self._links.enrolled()
        started = self._clock.seconds()
        answers = await self._gather(racks)
        ROUNDS.observe(self._clock.seconds() - started)
        for kind, count in Counter(type(answer.outcome) for answer in answers.values()).items():
            ASKED.labels(OUTCOMES[kind]).inc(count)
        self._memories = {rack: memory for rack, memory in self._memories.items() if rack in self._links.enrolled()}
        if not self._before.is_of(answers):
            self._before = Round(answers)
        return self._before

    async def _gather(self, racks: Mapping[str, RackInfo]) -> Mapping[str, RackAnswer]:
        outcomes: dict[str, Outcome[Held]] = {}
        known: dict[str, Catalogue | None] = {}
        asks: dict[str, tuple[Any, Mapping[str, str]]] = {}
        arguments: dict[str, Mapping[str, str]] = {}
        words: dict[str, Mapping[str, Any]] = {}
        # The very catalogue that racks are asked about: by the time they answer, another may be published.
        newest = self._published(self._expected())
        for system_id, rack in racks.items():
            link = self._links.link_of(system_id)
            if link is None:
                outcomes[system_id] = NotConnected(self._links.not_connected_since(system_id))
                continue
            catalogue = known[system_id] = self._known(system_id, rack)
            digest = catalogue.digest if catalogue is not None else ""
            if digest not in arguments:
                arguments[digest] = _arguments(digest, newest)
            asks[system_id] = link, arguments[digest]
        reading: list[Deferred[None]] = []
        answers: dict[str, RackAnswer] = {}
        for system_id, outcome in (await self._ask_all(ListImages, asks, deadline=self._deadline)).items():
            if not isinstance(outcome, Answered):
                outcomes[system_id] = outcome
            elif (same := self._as_before(system_id, racks[system_id], outcome.value)) is not None:
                answers[system_id] = same
            elif (held := self._known_to_hold(outcome.value, known[system_id], newest)) is not None:
                outcomes[system_id] = Answered(held, outcome.seconds)
                words[system_id] = outcome.value
            else:
                reading.append(Deferred.fromCoroutine(self._read(racks[system_id], system_id, outcome, outcomes)))
        for each in reading:
            await each
        for system_id, concluded in outcomes.items():
            answers[system_id] = self._conclude(system_id, racks[system_id], concluded, words.get(system_id))
        return {system_id: answers[system_id] for system_id in racks}

    def _as_before(self, system_id: str, rack: RackInfo, words: Mapping[str, Any]) -> RackAnswer | None:
        """The answer before this one, if the rack says the very same again and nothing else has changed."""
        memory = self._memories.get(system_id)
        if memory is not None and memory.words is words and memory.info is rack:
            return memory.answer
        return None

    @staticmethod
    def _known_to_hold(answer: Mapping[str, Any], *asked_about: Catalogue | None) -> Held | None:
        """What a rack holds that holds what it was asked about: the usual case, and so the cheap one."""
        for known in asked_about:
            if known is not None and answer["digest"] == known.digest:
                return Held(plain(answer["state"], _SHOWN), _number(answer["generation"]), known)
        return None

    async def _read(
        self, rack: RackInfo, system_id: str, outcome: Answered[Any], outcomes: dict[str, Outcome[Held]]
    ) -> None:
        answer = outcome.value
        try:
            catalogue = await self._catalogue(answer["digest"], answer.get("inventory"))
        except InvalidManifest as error:
            log.error(
                "Rack {name} sent an inventory that is none: {reason}",
                name=rack.name,
                rack=system_id,
                reason=str(error),
            )
            outcomes[system_id] = Failed("InventoryInvalid", str(error), outcome.seconds)
        except Exception as error:  # noqa: BLE001  # one rack's answer must not end the round for the others
            log.failure("What rack {name} sent could not be read", name=rack.name, rack=system_id)
            outcomes[system_id] = Failed(type(error).__name__, str(error), outcome.seconds)
        else:
            held = Held(plain(answer["state"], _SHOWN), _number(answer["generation"]), catalogue)
            outcomes[system_id] = Answered(held, outcome.seconds)

    async def _catalogue(self, digest: str, data: bytes | None) -> Catalogue:
        if digest == "":
            return NOTHING
        if not is_sha256(digest):
            raise InvalidManifest(f"the digest is {digest!r}, not 64 lower-case hexadecimal digits")
        if (published := self._published(digest)) is not None:
            return published
        if data is None:
            raise InvalidManifest(f"it holds {digest}, which is not what it was asked about, and sent no list")
        return await self._parse(data, digest)

    def _known(self, system_id: str, rack: RackInfo) -> Catalogue | None:
        """What the rack holds, if it still holds what is known or likely."""
        memory = self._memories.get(system_id)
        if memory is None or memory.reported != rack.digest:
            reported = self._published(rack.digest or "")
            if reported is not None:
                return reported
        if memory is not None and memory.catalogue is not None:
            return memory.catalogue
        return self._published(self._expected())

    async def _parse(self, data: bytes, digest: str) -> Catalogue:
        if len(data) <= INLINE:
            return _read_catalogue(data, digest)
        sent = (digest, data)
        if sent in self._parsing:
            # Racks in step send the same list: it is parsed once.
            mine: Deferred[Catalogue] = Deferred()
            self._parsing[sent].append(mine)
            return await mine
        self._parsing[sent] = []
        parsing = self._run_in_thread(_read_catalogue, data, digest)
        parsing.addBoth(self._parsed, sent)
        catalogue: Catalogue = await parsing
        return catalogue

    def _parsed(self, result: T, sent: tuple[str, bytes]) -> T:
        for waiting in self._parsing.pop(sent):
            if not waiting.called:
                waiting.callback(result)  # type: ignore[arg-type]  # a Catalogue or a Failure, as for the first
        return result

    def _conclude(
        self, system_id: str, rack: RackInfo, outcome: Outcome[Held], words: Mapping[str, Any] | None
    ) -> RackAnswer:
        memory = self._memories.setdefault(system_id, _Memory())
        before = memory.answer
        memory.words = words
        if isinstance(outcome, Answered):
            # Nothing has changed: then the answer is the one that was given before, with all that was made of it.
            if before is not None and memory.info is rack and before.held == outcome.value:
                return before
            memory.catalogue, memory.generation = outcome.value.catalogue, outcome.value.generation
            memory.reported, memory.silent_since = rack.digest, None
        elif isinstance(outcome, NotConnected):
            memory.silent_since = None  # since when that is, the links know
        elif memory.silent_since is None or _seconds(rack.reported) > memory.silent_since:
            # What has reported meanwhile was not silent then.
            memory.silent_since = self._clock.seconds()
        # The older of what it answered and what it reported: a silent rack may hold that, or anything newer.
        known = [number for number in (memory.generation, rack.generation) if number is not None and number >= 0]
        last, at = memory.catalogue, memory.generation
        if last is None or memory.reported != rack.digest:  # it has reported that since it answered
            last, at = self._published(rack.digest or ""), rack.generation
        memory.info = rack
        answer = RackAnswer(
            rack=system_id,
            name=rack.name,
            outcome=outcome,
            last_generation=min(known) if known else None,
            last_targets=last.targets if last is not None else _NO_TARGETS,
            since=memory.silent_since,
            progress=tuple(sorted(rack.progress.items())),
            reported=rack.reported.timestamp() if rack.reported is not None else None,
            last_catalogue=last,
            known_generation=at if at is not None and at >= 0 else None,
        )
        # Likewise for one that is as silent as it was.
        memory.answer = before if before is not None and before == answer else answer
        return memory.answer


def _seconds(moment: datetime | None) -> float:
    return moment.timestamp() if moment is not None else 0.0


def _number(generation: int) -> int | None:
    return generation if generation >= 0 else None


_SHOWN: Final = 32
"""Characters of a rack's word for its state; those that are known are shorter."""

_NO_TARGETS: Final[frozenset[Target]] = frozenset()


def _arguments(known: str, newest: Catalogue | None) -> Mapping[str, str]:
    """What a rack is asked of which this digest is known."""
    if newest is None or newest.digest == known:
        return {"known_digest": known}
    return {"known_digest": known, "newest_digest": newest.digest}


def _read_catalogue(data: bytes, digest: str) -> Catalogue:
    catalogue = Catalogue(parse_manifest(data, digest))
    catalogue.targets  # noqa: B018  (computed here, in the thread, once for all)
    return catalogue
