"""The boot sources and their selections: list, read, create, update, delete."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from region.answers.documents import BASE
from region.api.forms import FileValue
from region.api.operations import NOTHING, Call, Invalid, NotFound, Parameter, Reply, document
from region.api.parts import Parts
from region.images.sources import BootSource, BootSourceSelection, NoSuchSource, SourceInvalid
from region.upstream import Selection

SOURCE_FIELDS = (
    Parameter("url", "Where the stream is: its root, or its index (http, https or file)."),
    Parameter("keyring_filename", "The keyring that its signatures are verified with: a file on the region's host."),
    Parameter("keyring_data", "The keyring itself: as a file, or as base64 text.", kind="file"),
    Parameter("allow_unsigned", "Accept a stream without signatures.", kind="boolean"),
    Parameter("priority", "Where two sources offer an image, the one with the higher number wins.", kind="integer"),
)
SELECTION_FIELDS = (
    Parameter("os", "The operating system, or * for any."),
    Parameter("release", "The release, or * for any."),
    Parameter("arches", "Architectures, or * for any.", many=True),
    Parameter("subarches", "Sub-architectures, or * for any.", many=True),
    Parameter("labels", "Labels such as stable or candidate, or * for any.", many=True),
)


async def list_sources(parts: Parts, call: Call) -> Reply:
    """Every source, the one that is preferred first."""
    return document([_source(source) for source in await parts.sources.list()])


async def create_source(parts: Parts, call: Call) -> Reply:
    """A new source. ``url``, and one way to trust it, are needed."""
    fields = _source_fields(call)
    if "url" not in fields:
        raise Invalid({"url": ["This field is required."]})
    try:
        source = await parts.sources.create(**fields)
    except SourceInvalid as error:
        raise Invalid({error.field: [error.message]}) from error
    return document(_source(source), 201, Location=f"{BASE}/boot-sources/{source.id}/")


async def read_source(parts: Parts, call: Call) -> Reply:
    """One source."""
    try:
        return document(_source(await parts.sources.get(call.number("id"))))
    except NoSuchSource as error:
        raise _gone(error) from error


async def update_source(parts: Parts, call: Call) -> Reply:
    """The fields that are given replace those of the source."""
    try:
        return document(_source(await parts.sources.update(call.number("id"), **_source_fields(call))))
    except NoSuchSource as error:
        raise _gone(error) from error
    except SourceInvalid as error:
        raise Invalid({error.field: [error.message]}) from error


async def delete_source(parts: Parts, call: Call) -> Reply:
    """The source and its selections go; the next import removes its images."""
    try:
        await parts.sources.delete(call.number("id"))
    except NoSuchSource as error:
        raise _gone(error) from error
    return NOTHING


async def list_selections(parts: Parts, call: Call) -> Reply:
    """The selections of a source."""
    try:
        return document([_selection(each) for each in await parts.sources.selections(call.number("boot_source_id"))])
    except NoSuchSource as error:
        raise _gone(error) from error


async def create_selection(parts: Parts, call: Call) -> Reply:
    """A new selection of a source. ``os`` and ``release`` are needed; the rest is * unless given."""
    values = call.values
    missing = {name: ["This field is required."] for name in ("os", "release") if name not in values}
    if missing:
        raise Invalid(missing)
    wanted = Selection(
        values["os"], values["release"], *(values.get(name, ("*",)) for name in ("arches", "subarches", "labels"))
    )
    try:
        selection = await parts.sources.add_selection(call.number("boot_source_id"), wanted)
    except NoSuchSource as error:
        raise _gone(error) from error
    except SourceInvalid as error:
        raise Invalid({error.field: [error.message]}) from error
    return document(_selection(selection), 201, Location=_selection_uri(selection))


async def read_selection(parts: Parts, call: Call) -> Reply:
    """One selection."""
    return document(_selection(await _find_selection(parts, call)))


async def update_selection(parts: Parts, call: Call) -> Reply:
    """The fields that are given replace those of the selection."""
    before = await _find_selection(parts, call)
    wanted = Selection(
        *(call.values.get(name, getattr(before, name)) for name in ("os", "release", "arches", "subarches", "labels"))
    )
    try:
        return document(_selection(await parts.sources.update_selection(before.source_id, before.id, wanted)))
    except NoSuchSource as error:
        raise _gone(error) from error
    except SourceInvalid as error:
        raise Invalid({error.field: [error.message]}) from error


async def delete_selection(parts: Parts, call: Call) -> Reply:
    """The selection goes; the next import removes the images that nothing else selects."""
    try:
        await parts.sources.delete_selection(call.number("boot_source_id"), call.number("id"))
    except NoSuchSource as error:
        raise _gone(error) from error
    return NOTHING


async def _find_selection(parts: Parts, call: Call) -> BootSourceSelection:
    try:
        return await parts.sources.selection(call.number("boot_source_id"), call.number("id"))
    except NoSuchSource as error:
        raise _gone(error) from error


def _gone(error: NoSuchSource) -> NotFound:
    message = str(error)
    return NotFound(message[:1].upper() + message[1:] + ".")


def _source_fields(call: Call) -> dict[str, Any]:
    """The fields as the store takes them. An empty keyring is one that was not given, as clients of MAAS send both."""
    fields = {name: value for name, value in call.values.items() if value not in ("", FileValue(b""))}
    keyring = fields.get("keyring_data")
    if isinstance(keyring, FileValue):
        fields["keyring_data"] = keyring.data
    elif isinstance(keyring, str):
        fields["keyring_data"] = _keyring(keyring)
    return fields


def _keyring(text: str) -> bytes:
    if text.lstrip().startswith("-----BEGIN"):
        return text.encode()
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise Invalid(
            {"keyring_data": ["This is not base64; send the keyring as a file, or as base64 text."]}
        ) from None


def _timestamp(moment: datetime) -> str:
    """As MAAS writes the times of a source, in UTC; its clients read it literally."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3]


def _source(source: BootSource) -> dict[str, Any]:
    return {
        "id": source.id,
        "url": source.url,
        "keyring_filename": source.keyring_filename,
        "keyring_data": base64.b64encode(source.keyring_data).decode("ascii"),
        "allow_unsigned": source.allow_unsigned,
        "priority": source.priority,
        "created": _timestamp(source.created),
        "updated": _timestamp(source.updated),
        "resource_uri": f"{BASE}/boot-sources/{source.id}/",
    }


def _selection_uri(selection: BootSourceSelection) -> str:
    return f"{BASE}/boot-sources/{selection.source_id}/selections/{selection.id}/"


def _selection(selection: BootSourceSelection) -> dict[str, Any]:
    lists: dict[str, Sequence[str]] = {
        "arches": selection.arches,
        "subarches": selection.subarches,
        "labels": selection.labels,
    }
    return {
        "id": selection.id,
        "boot_source_id": selection.source_id,
        "os": selection.os,
        "release": selection.release,
        **{name: list(values) for name, values in lists.items()},
        "resource_uri": _selection_uri(selection),
    }
