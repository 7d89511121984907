"""Which releases can be deployed, and why one can or cannot: the status of the answer is DESIGN's table."""

from __future__ import annotations

import re
from typing import Final

from prometheus_client import Counter
from twisted.logger import Logger

from region.answers.combine import OFFERED, RETRY_AFTER, Answer, Answers, Policy, State, Target, overall
from region.answers.narrowing import kernels_of
from region.answers.past import Past, departures, told_gone
from region.answers.releases import Question, UnknownRack
from region.api.operations import Call, Invalid, Parameter, Reply, invalid_choice
from region.api.parts import Parts

log = Logger()

ANSWERS: Final = Counter(
    "stanchion_release_answers",
    "Answers to whether a release can be deployed, by state; a list counts only if nothing could be offered.",
    ["state"],
)

STATUS: Final = {
    State.DEPLOYABLE: 200,
    State.ARRIVING: 409,
    State.UNDETERMINED: 503,
    State.UNKNOWN: 400,
    State.NO_RACKS: 503,
    State.NOTHING_PUBLISHED: 503,
}

PARAMETERS = (
    Parameter("arch", "Only this architecture, as amd64 or amd64/generic."),
    Parameter("rack", "Only racks with this system id or name have to serve the machine; may be repeated.", many=True),
    Parameter("racks", "The same as a list with commas between them; both may be given."),
    Parameter("policy", "How many of the racks must hold a release.", choices=tuple(policy.value for policy in Policy)),
)

RELEASE_PARAMETERS = (
    PARAMETERS[0],
    Parameter("kernel", "Only images of this kernel (subarchitecture), as hwe-24.04 or ga-24.04-lowlatency."),
    *PARAMETERS[1:],
)

_KERNEL: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}\Z")
_ARCH: Final = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]{0,63})(/generic)?\Z")


async def list_releases(parts: Parts, call: Call) -> Reply:
    """Every release with its state by architecture, and how asking each rack ended."""
    question = _question(call)
    answers = await _answers(parts, question, call)
    body = parts.releases.listing(answers, question.arch, await parts.releases.described(answers))
    if not answers.choices:
        # An empty list would say that nothing can ever be deployed, which nobody knows.
        nothing = answers.of(Target("", "", ""))
        ANSWERS.labels(nothing.state.value).inc()
        _log_open("anything", nothing, call)
        return Reply(body, 503, headers=_retry(nothing.state))
    return Reply(body)


async def read_release(parts: Parts, call: Call) -> Reply:
    """Why a release can be deployed, or not: rack by rack."""
    question = _question(call)
    answers = await _answers(parts, question, call)
    name = "/".join(part for part in (call.path.get("os", ""), call.path["release"]) if part)
    meant = answers.named(name)
    if len(meant) > 1:
        raise invalid_choice("distro_series", name, meant)
    os, _, release = (meant[0] if meant else f"/{name}").partition("/")
    past = await parts.releases.past(os, release, answers.published)
    best = overall(answers.for_release(os, release, question.arch))
    if best.state is State.UNKNOWN:
        ANSWERS.labels(best.state.value).inc()
        raise _unknown(answers, best, name, question.arch, past)
    described = await parts.releases.described(answers, (os, release))
    kernel = call.values.get("kernel")
    if kernel is not None:
        answers = _for_kernel(parts, answers, Target(os, release, question.arch or ""), kernel, past)
        best = overall(answers.for_release(os, release, question.arch))
    ANSWERS.labels(best.state.value).inc()
    if best.state is not State.DEPLOYABLE:
        _log_open(name if kernel is None else f"{name} with kernel {kernel}", best, call)
    body = parts.releases.why(answers, os, release, question.arch, kernel, past, described)
    return Reply(body, STATUS[best.state], headers=_retry(best.state))


def _for_kernel(parts: Parts, answers: Answers, target: Target, kernel: str, past: Past | None) -> Answers:
    """The answers for one kernel of a release that is not unknown.

    :raises Invalid: if no rack can hold it, with those that can be asked for.
    """
    os, release, arch = target
    if not _KERNEL.match(kernel):
        raise Invalid({"kernel": [f"'{kernel}' is not a kernel: give one such as 'hwe-24.04'."]})

    def best(name: str) -> Answer:
        only = parts.releases.for_kernel(answers, os, release, name, past)
        return overall(only.for_release(os, release, arch or None))

    if best(kernel).state in OFFERED or overall(answers.for_release(os, release, arch or None)).state not in OFFERED:
        return parts.releases.for_kernel(answers, os, release, kernel, past)
    ANSWERS.labels(State.UNKNOWN.value).inc()
    offered = [name for name in kernels_of(answers, os, release, arch or None, past) if best(name).state in OFFERED]
    if offered:
        raise invalid_choice("kernel", kernel, offered)
    reason = "no kernel of it is published any more, and none is held by all that have to"
    raise Invalid({"kernel": [f"'{kernel}' cannot be had on these racks, nor can any other: {reason}."]})


async def _answers(parts: Parts, question: Question, call: Call) -> Answers:
    try:
        return await parts.releases.answers(question)
    except UnknownRack as error:
        found = invalid_choice("rack", error.rack, error.enrolled)
        if error.rack in call.values.get("rack", ()):
            raise found from error
        raise Invalid({"racks": found.messages["rack"]}) from error


def _question(call: Call) -> Question:
    arch = call.values.get("arch")
    if arch is not None:
        found = _ARCH.match(arch)
        if found is None:
            raise Invalid({"arch": [f"'{arch}' is not an architecture: give one such as 'amd64' or 'amd64/generic'."]})
        arch = found[1]
    policy = Policy(call.values.get("policy", Policy.ANY.value))
    return Question(policy, frozenset(call.values.get("rack", ())) | _racks(call.values.get("racks")), arch)


def _racks(listed: str | None) -> frozenset[str]:
    """The racks of a list with commas. One that names none is refused: no rack at all would be every rack."""
    if listed is None:
        return frozenset()
    names = [name.strip() for name in listed.split(",")]
    if not all(names):
        raise Invalid({"racks": [f"'{listed}' has an empty name in it: give one such as 'rack-1,rack-2'."]})
    return frozenset(names)


def _unknown(answers: Answers, best: Answer, name: str, arch: str | None, past: Past | None) -> Invalid:
    """400, with what there is instead (never nothing, for then the state is another), which racks hold it although not
    all that have to can, and, if it was there once, when and why it went."""
    offered = sorted({target.name for target in answers.choices if arch in (None, target.arch)})
    if offered:
        refused = invalid_choice("distro_series", name, offered)
    else:
        # The release is not to blame: there is nothing at all for this architecture.
        arches = sorted({target.arch for target in answers.choices})
        refused = invalid_choice("architecture", arch or "", arches)
    went = told_gone(departures(arch or "", (), past or Past()))
    more = [*filter(None, (best.reason if best.holders else "", went))]
    return Invalid({field: [*messages, *more] for field, messages in refused.messages.items()})


def _retry(state: State) -> dict[str, str]:
    return {"Retry-After": str(RETRY_AFTER[state])} if state in RETRY_AFTER else {}


def _log_open(what: str, answer: Answer, call: Call) -> None:
    log.warn(
        "Whether {what} can be deployed: {state}. {reason} [{correlation}]",
        what=what, state=answer.state.value, reason=answer.reason, correlation=call.correlation,
    )  # fmt: skip
