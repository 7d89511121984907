"""Images that people upload: begun with what they are, sent at once or in chunks, and deleted."""

from __future__ import annotations

import hashlib
from typing import Any, Final

from region.api.forms import FileValue
from region.api.images import resource_id, upload_set, uploaded_resource
from region.api.operations import (
    NOTHING,
    ApiError,
    BadRequest,
    Call,
    Invalid,
    NotFound,
    Parameter,
    Reply,
    document,
    text,
)
from region.api.parts import Parts
from region.images.naming import FILETYPES, UploadInvalid, checked_upload
from region.images.receiving import (
    NoRoom,
    Received,
    TooMuch,
    UploadBusy,
    UploadElsewhere,
    WrongOffset,
    WrongUpload,
)
from region.images.threads import in_thread
from region.images.uploads import NoSuchUpload
from region.upstream.values import UPLOADS
from rpc.manifest import EMPTY

RETRY: Final = {"Retry-After": "10"}

FIELDS: Final = (
    Parameter("name", "What it is called when a machine is deployed: `custom/my-image`, or `my-image` for the same; or "
              "`OS/RELEASE` of an operating system whose images are not imported.", required=True),
    Parameter("architecture", "`amd64/generic`, say.", required=True),
    Parameter("title", "What people are shown."),
    Parameter("filetype", "What the content is; tgz by default.", choices=(*FILETYPES, "")),
    Parameter("sha256", "The sha256 of the content; needed if it is not sent at once."),
    Parameter("size", "Its bytes; likewise.", kind="integer", minimum=0),
    Parameter("base_image", "The image that it was made of, such as `ubuntu/noble`."),
    Parameter("content", "The content itself, if it is to be sent at once.", kind="file"),
)  # fmt: skip


async def create_resource(parts: Parts, call: Call) -> Reply:
    """Begin an upload, or find the one that was begun; with a content at once, take it in."""
    values = call.values
    content: bytes | None = None
    if "content" in values:
        given = values["content"]
        content = given.data if isinstance(given, FileValue) else given.encode()
    sha256, size = await _measured(content, values)
    current = await parts.generations.current()
    try:
        request = checked_upload(
            values["name"], values["architecture"], sha256, size,
            title=values.get("title", ""), filetype=values.get("filetype", ""),
            base_image=values.get("base_image", ""), published=EMPTY if current is None else current.manifest,
        )  # fmt: skip
        received = await parts.receiver.begin(request, call.key.name if call.key else "")
    except UploadInvalid as error:
        raise Invalid({error.field: [error.message]}) from error
    except UploadElsewhere as error:
        raise ApiError(text(str(error), 409)) from error
    except NoSuchUpload as error:
        raise ApiError(text(f"{_sentence(error)} Send the request again.", 409)) from error
    except NoRoom as error:
        raise ApiError(text(str(error), 507)) from error
    if content is not None and not received.complete:
        received = await _append(parts, received.upload.id, content[received.received :], received.received)
    return _reply(received, 201)


async def _measured(content: bytes | None, values: Any) -> tuple[str, int]:
    """The sha256 and the size that the content has, or is to have."""
    if content is None:
        missing = [name for name in ("sha256", "size") if values.get(name) in (None, "")]
        if missing:
            needed = "This field is required, unless the content is sent at once."
            raise Invalid({name: [needed] for name in missing})
        return values["sha256"], values["size"]
    found, size = await in_thread(lambda: hashlib.sha256(content).hexdigest()), len(content)
    if values.get("size", size) != size:
        what = "Too much data received" if size > values["size"] else "Too little data received"
        raise Invalid({"size": [f"{what}: the content has {size} bytes, not {values['size']}."]})
    if (values.get("sha256") or found).lower() != found:
        said = f"Saved content does not match given SHA256 value: it is {found}, not {values['sha256'][:80]}."
        raise Invalid({"sha256": [said]})
    return found, size


async def upload_chunk(parts: Parts, call: Call) -> Reply:
    """Take in a chunk of an upload."""
    try:
        upload = await parts.uploads.get(call.number("upload_id"))
    except NoSuchUpload as error:
        raise NotFound(_sentence(error)) from error
    if resource_id(upload.image) != call.number("id"):
        raise NotFound(f"There is no upload {upload.id} of the boot resource {call.path['id']}.")
    given = call.values["content"]
    content = given.data if isinstance(given, FileValue) else given.encode()
    return _reply(await _append(parts, upload.id, content, call.values.get("offset")), 200)


async def delete_resource(parts: Parts, call: Call) -> Reply:
    """Delete an uploaded image; the next generation is without it."""
    wanted = call.number("id")
    for upload in await parts.uploads.list():
        if resource_id(upload.image) == wanted:
            await parts.receiver.delete(upload.image.key)
            return NOTHING
    current = await parts.generations.current()
    for image in current.manifest.images if current else ():
        if resource_id(image) == wanted:
            if image.source == UPLOADS:
                return NOTHING  # deleted already; the next generation is without it
            said = f"{image.key} is imported from {image.source}, and would be again: select it there no longer."
            raise ApiError(text(said, 409))
    raise NotFound(f"There is no boot resource {wanted}: it may have been removed by a newer generation.")


async def _append(parts: Parts, upload_id: int, content: bytes, offset: int | None) -> Received:
    try:
        return await parts.receiver.append(upload_id, content, offset)
    except NoSuchUpload as error:
        raise NotFound(_sentence(error)) from error
    except (TooMuch, WrongUpload) as error:
        raise BadRequest(str(error)) from error
    except WrongOffset as error:
        raise ApiError(text(str(error), 409)) from error
    except UploadElsewhere as error:
        raise ApiError(text(str(error), 409)) from error
    except UploadBusy as error:
        raise ApiError(text(str(error), 503, **RETRY)) from error
    except NoRoom as error:
        raise ApiError(text(str(error), 507)) from error


def _reply(received: Received, status: int) -> Reply:
    upload = received.upload
    found = uploaded_resource(upload) | {"sets": {upload.version: upload_set(received)}}
    return document(found, status, Location=found["resource_uri"])


def _sentence(error: Exception) -> str:
    said = str(error)
    return f"{said[:1].upper()}{said[1:]}."
