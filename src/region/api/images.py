"""The images that are published, the generations, and the imports: what there is and how it came to be."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any, Final

from attrs import asdict

from region.answers.documents import BASE
from region.answers.wording import when
from region.api.operations import BadRequest, Call, NotFound, Reply, document, text
from region.api.parts import Parts
from region.images.job import ImportJob
from region.images.receiving import Received
from region.images.store import Generation, GenerationSummary
from region.images.uploads import Upload
from region.upstream.values import UPLOADS
from rpc.manifest import Image, ImageKey
from rpc.verifying import MIB

TYPES: Final = ("synced", "generated", "uploaded", "all")
"""The types of boot resource that MAAS has; none of ours is generated."""


# Boot resources


async def list_resources(parts: Parts, call: Call) -> Reply:
    """Every image of the current generation, and those that are being uploaded."""
    wanted = call.values.get("type") or "all"
    if wanted not in TYPES:
        raise BadRequest(f"Bad type '{wanted}'")
    if wanted == "generated":
        return document([])
    published = await parts.generations.current()
    resources = await _published(parts, published)
    for upload in await parts.uploads.list():
        resources.setdefault(resource_id(upload.image), uploaded_resource(upload))
    return document([found for found in resources.values() if wanted in ("all", found["type"].lower())])


async def _published(parts: Parts, generation: Generation | None) -> dict[int, dict[str, Any]]:
    if generation is None:
        return {}
    updates, deployed = await parts.history.updates(generation), await parts.nodes.deployed()
    return {resource_id(image): _resource(image, generation, updates, deployed) for image in generation.manifest.images}


async def read_resource(parts: Parts, call: Call) -> Reply:
    """One image with its files."""
    wanted = call.number("id")
    sets: dict[str, Any] = {}
    found: dict[str, Any] | None = None
    generation = await parts.generations.current()
    for image in generation.manifest.images if generation else ():
        if resource_id(image) == wanted:
            assert generation is not None, "the image is of a generation"
            updates, deployed = await parts.history.updates(generation), await parts.nodes.deployed()
            found = _resource(image, generation, updates, deployed)
            damaged = {each["sha256"] for each in parts.verifier.status["not_repaired"]}
            sets[image.version] = _set(image, damaged)
    for upload in await parts.uploads.list():
        if resource_id(upload.image) == wanted:
            found = found or uploaded_resource(upload)
            sets.setdefault(upload.version, upload_set(await parts.receiver.progress(upload)))
    if found is None:
        raise NotFound(f"There is no boot resource {wanted}: it may have been removed by a newer generation.")
    return document(found | {"sets": sets})


async def start_import(parts: Parts, call: Call) -> Reply:
    """Begin an import, or name the one that is queued already."""
    job = await parts.importer.request("request")
    return text("Import of boot resources started", Location=f"{BASE}/import-jobs/{job}/")


async def stop_import(parts: Parts, call: Call) -> Reply:
    """Stop the import that is running or queued."""
    await parts.importer.cancel()
    return text("Import of boot resources is being stopped")


async def is_importing(parts: Parts, call: Call) -> Reply:
    """Whether an import is running or queued."""
    return document(await parts.importer.is_importing())


def resource_id(image: Image) -> int:
    """The number of an image: the same in every generation and region, and exact as a JavaScript number (48 bits)."""
    key = image.key
    named = "\x00".join((key.os, key.release, key.arch, key.subarch, key.kflavor, key.label))
    return int.from_bytes(hashlib.sha256(named.encode()).digest()[:6], "big")


def _resource(
    image: Image,
    generation: Generation,
    updates: Mapping[ImageKey, tuple[int, datetime]],
    deployed: Mapping[tuple[str, str, str], int],
) -> dict[str, Any]:
    number, published = updates.get(image.key, (generation.number, generation.published))
    machines = deployed.get((image.os, image.release, image.arch), 0)
    return described(image) | {
        "generation": number, "last_update": _time(published), "machines_deployed": machines,
    }  # fmt: skip


def described(image: Image) -> dict[str, Any]:
    """An image as a boot resource, whether it is published or on its way."""
    found = {
        "id": resource_id(image),
        "type": "Uploaded" if image.source == UPLOADS else "Synced",
        "name": f"{image.os}/{image.release or image.attribute('bootloader-type')}",
        "architecture": f"{image.arch}/{image.subarch or 'generic'}",
        "title": image.attribute("release_title") or image.release,
        "label": image.label,
        "version": image.version,
        "size": image.size,
        "generation": None,
        "last_update": None,
        "last_deployed": None,
        "machines_deployed": 0,
        "resource_uri": f"{BASE}/boot-resources/{resource_id(image)}/",
    }
    for name, value in (
        ("subarches", image.attribute("subarches")),
        ("kflavor", image.kflavor),
        ("base_image", image.attribute("base_image")),
    ):
        if value:
            found[name] = value
    return found


def _set(image: Image, damaged: Collection[str] = ()) -> dict[str, Any]:
    # An image is in a generation only if every file of it was verified; but disks change bytes, and then it is fetched
    # again. Racks may hold it whole all the same.
    return {
        "version": image.version,
        "label": image.label,
        "size": image.size,
        "complete": all(file.sha256 not in damaged for file in image.files),
        "files": {
            file.name: {
                "filename": file.name,
                "filetype": file.ftype,
                "sha256": file.sha256,
                "size": file.size,
                "complete": file.sha256 not in damaged,
            }
            for file in image.files
        },
    }


def uploaded_resource(upload: Upload) -> dict[str, Any]:
    """An image that is not published yet."""
    return described(upload.image) | {"last_update": _time(upload.touched)}


def upload_set(received: Received) -> dict[str, Any]:
    """Its one set, with where to send what is missing of its one file."""
    upload = received.upload
    found = _set(upload.image) | {"complete": received.complete}
    if not received.complete:
        size = upload.request.size
        found["progress"] = 100.0 * received.received / size
        uri = f"{BASE}/boot-resources/{resource_id(upload.image)}/upload/{upload.id}/"
        for file in found["files"].values():
            file |= {
                "complete": False, "progress": found["progress"], "received": received.received, "upload_uri": uri,
            }  # fmt: skip
    return found


# Verification


async def read_verification(parts: Parts, call: Call) -> Reply:
    """How far verifying the files is, or how it ended."""
    return document(_verification(parts.verifier.status))


async def start_verification(parts: Parts, call: Call) -> Reply:
    """Begin verifying all files, or go on."""
    rate = call.values.get("rate")
    parts.verifier.request(None if rate is None else float(rate * MIB))
    return document(_verification(parts.verifier.status), 202, Location=f"{BASE}/image-verification/")


def _verification(status: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(status)
    for name in ("started", "ended", "next"):
        moment = found.get(name)
        found[name] = None if not moment else when(moment)
    found["not_repaired"] = [each | {"found": when(each["found"])} for each in status["not_repaired"]]
    found.pop("after", None)
    return found


# Generations


async def list_generations(parts: Parts, call: Call) -> Reply:
    """The newest generations."""
    found = await parts.generations.list(call.values.get("limit", 100))
    return document([_generation(generation) for generation in found])


async def read_generation(parts: Parts, call: Call) -> Reply:
    """One generation, with how it differs from the one before and why."""
    number = call.number("number")
    newest = next(iter(await parts.generations.list(1)), None)
    older = newest.number - number if newest is not None else -1
    # Numbers only grow, so the wanted one is among the newest so many.
    found = await parts.generations.list(older + 1) if older >= 0 else ()
    for generation in found:
        if generation.number == number:
            changes = [
                {"kind": change.kind, **asdict(change.key), "version": change.version, "reason": change.reason}
                for change in await parts.generations.changes(number)
            ]
            return document(_generation(generation) | {"changes": changes})
    raise NotFound(f"There is no generation {number}.")


def _generation(generation: GenerationSummary) -> dict[str, Any]:
    return {
        "number": generation.number,
        "digest": generation.digest,
        "current": generation.current,
        "published": _time(generation.published),
        "retired": _time(generation.retired),
        "images": generation.images,
        "size": generation.size,
        "import_job": generation.job_id,
        "resource_uri": f"{BASE}/image-generations/{generation.number}/",
    }


# Imports


async def list_jobs(parts: Parts, call: Call) -> Reply:
    """The newest imports."""
    return document([_job(job) for job in await parts.jobs.list(call.values.get("limit", 50))])


async def read_job(parts: Parts, call: Call) -> Reply:
    """One import, with everything that was wrong."""
    number = call.number("id")
    job = await parts.jobs.get(number)
    if job is None:
        raise NotFound(f"There is no import {number}: it never was, or ended so long ago that it was forgotten.")
    problems: list[Mapping[str, Any]] = [asdict(problem) for problem in await parts.jobs.problems(number)]
    return document(_job(job) | {"problems": problems})


def _job(job: ImportJob) -> dict[str, Any]:
    found = asdict(job)
    for name in ("requested", "started", "ended"):
        found[name] = _time(found[name])
    return found | {"resource_uri": f"{BASE}/import-jobs/{job.id}/"}


def _time(moment: datetime | None) -> str | None:
    return None if moment is None else when(moment.timestamp())
