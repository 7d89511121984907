"""The license keys of releases that need one: what clients of MAAS know as ``license-keys/`` and ``license-key/``.

A key is kept only when racks have said that it can be one. What cannot be told right now is 503, and nobody's fault.
"""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import quote

from twisted.logger import Logger

from region.answers.combine import OFFERED, RETRY_AFTER, State, overall
from region.answers.documents import BASE
from region.answers.licensing import Validity
from region.answers.releases import Question
from region.api.operations import (
    NOTHING,
    ApiError,
    Call,
    Invalid,
    NotFound,
    Operation,
    Parameter,
    Reply,
    document,
    invalid_choice,
    text,
)
from region.api.parts import Parts
from region.license_keys import LicenseKey
from rpc.manifest import is_path_component

log = Logger()

_RETRY_SECONDS: Final = 10
_MAX_KEY: Final = 1024


async def list_keys(parts: Parts, call: Call) -> Reply:
    """Every key."""
    return document([_shown(key) for key in await parts.license_keys.list()])


async def create_key(parts: Parts, call: Call) -> Reply:
    """A key for a release that has none yet."""
    key = LicenseKey(
        call.values["osystem"],
        # As clients of MAAS may send it: with the system before it, and marked as one that needs a key.
        call.values["distro_series"].removeprefix(f"{call.values['osystem']}/").removesuffix("*"),
        call.values["license_key"],
    )
    await _require_release(parts, key.osystem, key.distro_series, call)
    await _require_valid(parts, key, call)
    if not await parts.license_keys.add(key):
        where = f"{BASE}/license-key/{quote(key.osystem)}/{quote(key.distro_series)}/"
        raise Invalid(
            {"__all__": [f"{key.osystem}/{key.distro_series} has a license key already: change it (PUT {where})."]}
        )
    return document(_shown(key))


async def read_key(parts: Parts, call: Call) -> Reply:
    """One key."""
    return document(_shown(await _find(parts, call)))


async def update_key(parts: Parts, call: Call) -> Reply:
    """Another key in place of the one that a release has."""
    before = await _find(parts, call)
    key = LicenseKey(before.osystem, before.distro_series, call.values["license_key"])
    await _require_valid(parts, key, call)
    if not await parts.license_keys.replace(key):
        raise _gone(call)
    return document(_shown(key))


async def delete_key(parts: Parts, call: Call) -> Reply:
    """The key is forgotten."""
    key = await _find(parts, call)
    if not await parts.license_keys.delete(key.osystem, key.distro_series):
        raise _gone(call)
    return NOTHING


async def _find(parts: Parts, call: Call) -> LicenseKey:
    osystem, distro_series = call.path["osystem"], call.path["distro_series"]
    found = None
    if is_path_component(osystem) and is_path_component(distro_series):
        found = await parts.license_keys.get(osystem, distro_series)
    if found is None:
        raise _gone(call)
    return found


def _gone(call: Call) -> NotFound:
    return NotFound(f"There is no license key for {call.path['osystem']}/{call.path['distro_series']}.")


async def _require_release(parts: Parts, os: str, release: str, call: Call) -> None:
    """:raises ApiError: if no rack can hold the release (400, with what there is), or that cannot be told (503)."""
    answers = await parts.releases.answers(Question())
    best = overall(answers.for_release(os, release))
    if best.state is State.UNKNOWN:
        systems = sorted({target.os for target in answers.choices})
        if os not in systems:
            raise invalid_choice("osystem", os, systems)
        offered = sorted({target.name for target in answers.choices if target.os == os})
        raise invalid_choice("distro_series", release, offered)
    if best.state not in OFFERED or best.state is State.NO_RACKS:
        raise _untold(os, release, best.reason, RETRY_AFTER[best.state], call)


async def _require_valid(parts: Parts, key: LicenseKey, call: Call) -> None:
    """:raises ApiError: if racks say that it is no key for its release (400), or that cannot be told (503)."""
    if not 0 < len(key.license_key) <= _MAX_KEY:
        raise Invalid({"license_key": ["Invalid license key.", f"It has to have 1 to {_MAX_KEY} characters."]})
    verdict = await parts.validator.judge(key.osystem, key.distro_series, key.license_key)
    match verdict.validity:
        case Validity.INVALID:
            raise Invalid({"license_key": ["Invalid license key.", verdict.reason]})
        case Validity.NOT_NEEDED if await _stream_demands_one(parts, key):
            reason = (
                f"{key.osystem}/{key.distro_series} needs a license key, but no rack holds it yet that could tell "
                "whether this can be one."
            )
            raise _untold(key.osystem, key.distro_series, reason, _RETRY_SECONDS, call)
        case Validity.NOT_NEEDED:
            raise Invalid({"distro_series": [verdict.reason]})
        case Validity.UNDETERMINED:
            raise _untold(key.osystem, key.distro_series, verdict.reason, _RETRY_SECONDS, call)


def _untold(os: str, release: str, reason: str, seconds: int, call: Call) -> ApiError:
    """It cannot be told right now, which is logged, as nobody else may hear of it."""
    log.warn(
        "Whether a license key of {os}/{release} is valid is open. {reason} [{correlation}]",
        os=os, release=release, reason=reason, correlation=call.correlation,
    )  # fmt: skip
    return ApiError(text(reason, 503, **{"Retry-After": str(seconds)}))


async def _stream_demands_one(parts: Parts, key: LicenseKey) -> bool:
    """Whether what is published says that the release needs a key; racks know that only of what they hold."""
    published = await parts.published.read()
    return any(
        image.requires_license_key
        for target, images in published.catalogue.targets.items()
        if target[:2] == (key.osystem, key.distro_series)
        for image in images
    )


def _shown(key: LicenseKey) -> dict[str, Any]:
    return {
        "osystem": key.osystem,
        "distro_series": key.distro_series,
        "license_key": key.license_key,
        "resource_uri": f"{BASE}/license-key/{quote(key.osystem)}/{quote(key.distro_series)}/",
    }


_GONE: Final = "There is no such key."
_WRONG: Final = "A field is wrong; the JSON object of messages by field says what is. No key is kept."
_UNTOLD: Final = "Whether the key is valid cannot be told, as a rack did not answer; the text says which, and why."
_ONE: Final = "/license-key/{osystem}/{distro_series}/"
_KEY: Final = Parameter("license_key", "The license key.", required=True)

OPERATIONS: Final[tuple[Operation, ...]] = (
    Operation(
        "GET", "/license-keys/", "LicenseKeys", "read", list_keys,
        "Every license key, by operating system and release.", answers={200: "The list."},
    ),
    Operation(
        "POST", "/license-keys/", "LicenseKeys", "create", create_key,
        "Give a release that needs one its license key. The racks are asked now whether it can be one.",
        parameters=(
            Parameter("osystem", "The operating system, as windows.", required=True),
            Parameter("distro_series", "The release, as win2022.", required=True),
            _KEY,
        ),
        answers={200: "The key.", 400: _WRONG, 503: _UNTOLD + " With `Retry-After`."},
    ),
    Operation("GET", _ONE, "LicenseKey", "read", read_key, "One license key.", answers={200: "The key.", 404: _GONE}),
    Operation(
        "PUT", _ONE, "LicenseKey", "update", update_key,
        "Give a release another license key. The racks are asked now whether it can be one.", parameters=(_KEY,),
        answers={200: "The key.", 400: _WRONG, 404: _GONE, 503: _UNTOLD + " With `Retry-After`."},
    ),
    Operation(
        "DELETE", _ONE, "LicenseKey", "delete", delete_key, "Forget a license key.",
        answers={204: "It is forgotten.", 404: _GONE},
    ),
)  # fmt: skip
