"""Whether a license key can be one for a release: the racks' drivers know its form, and each is asked.

One rack that takes it is enough. That it is wrong, or needed for nothing, is certain only when every rack has said so:
one that did not answer may be the one that knows better.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from enum import StrEnum
from typing import Any, Final

from attrs import frozen

from region.answers.asking import DEADLINE, IRackLinks
from region.answers.wording import names
from rpc import rounds
from rpc.commands import ValidateLicenseKey
from rpc.events import plain
from rpc.outcomes import Answered, Failed, NotConnected, Outcome, TimedOut

_SHOWN: Final = 300


class Validity(StrEnum):
    """What is known of a license key."""

    VALID = "valid"
    INVALID = "invalid"
    NOT_NEEDED = "not-needed"
    UNDETERMINED = "undetermined"


@frozen
class Verdict:
    """What is known of a license key, and why, in a sentence; the reason is empty if it is valid."""

    validity: Validity
    reason: str = ""


@frozen
class _Named:
    name: str


def judge(outcomes: Mapping[str, Outcome[Mapping[str, Any]]]) -> Verdict:
    """What the racks' words come to, whatever their order.

    :param outcomes: how asking each enrolled rack ended, by its name.
    """
    said = {rack: _said(outcome) for rack, outcome in sorted(outcomes.items())}
    if not said:
        return Verdict(Validity.UNDETERMINED, "No rack is enrolled that could tell: join one, then try again.")
    kinds = {verdict.validity for verdict in said.values()}
    if Validity.VALID in kinds:
        return Verdict(Validity.VALID)
    silent = [rack for rack, verdict in said.items() if verdict.validity is Validity.UNDETERMINED]
    if silent:
        verb = "has" if len(silent) == 1 else "have"
        return Verdict(
            Validity.UNDETERMINED,
            f"Whether the license key is valid cannot be told: {names([_Named(rack) for rack in silent])} {verb} not "
            f"said ({silent[0]}: {said[silent[0]].reason}).",
        )
    kind = Validity.INVALID if Validity.INVALID in kinds else Validity.NOT_NEEDED
    return next(verdict for verdict in said.values() if verdict.validity is kind)


def _said(outcome: Outcome[Mapping[str, Any]]) -> Verdict:
    match outcome:
        case Answered(value):
            if value["outcome"] in (Validity.VALID, Validity.INVALID, Validity.NOT_NEEDED):
                return Verdict(Validity(value["outcome"]), plain(value["reason"], _SHOWN))
            return Verdict(Validity.UNDETERMINED, "it gave an answer that this region does not understand")
        case Failed("UnknownCommand", _):
            return Verdict(Validity.UNDETERMINED, "its version knows nothing of license keys: upgrade it")
        case Failed(kind, reason):
            return Verdict(Validity.UNDETERMINED, f"asking it failed: {kind}: {reason}")
        case TimedOut(seconds):
            return Verdict(Validity.UNDETERMINED, f"it did not answer within {seconds:g} s")
        case NotConnected():
            return Verdict(Validity.UNDETERMINED, "it is not connected")


class Validator:
    """Asks racks about license keys.

    :param deadline: seconds that each rack has to answer.
    """

    def __init__(
        self,
        links: IRackLinks,
        *,
        deadline: float = DEADLINE,
        ask_all: Callable[..., Awaitable[Mapping[str, Outcome[Any]]]] = rounds.ask_all,
    ) -> None:
        self._links = links
        self._deadline = deadline
        self._ask_all = ask_all

    async def judge(self, os: str, release: str, key: str) -> Verdict:
        """What all enrolled racks together say of a key; asked now."""
        racks = self._links.enrolled()
        links = {system_id: self._links.link_of(system_id) for system_id in racks}
        arguments = {"os": os, "release": release, "key": key}
        asks = {system_id: (link, arguments) for system_id, link in links.items() if link is not None}
        outcomes: dict[str, Outcome[Any]] = dict.fromkeys(racks, NotConnected())
        outcomes |= await self._ask_all(ValidateLicenseKey, asks, deadline=self._deadline)
        return judge({racks[system_id].name: outcome for system_id, outcome in outcomes.items()})
