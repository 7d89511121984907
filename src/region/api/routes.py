"""The table of the API: every operation there is. Dispatch, checks, OpenAPI and ``describe/`` come from it."""

from __future__ import annotations

from typing import Final

from region.api import (
    about,
    events,
    images,
    license_keys,
    machines,
    racks,
    releases,
    results,
    scripts,
    sources,
    tags,
    uploads,
)
from region.api.operations import BYTES, JSON, TEXT, Operation, Parameter

_LIMIT: Final = Parameter("limit", "How many at most.", kind="integer", minimum=1, maximum=1000)
_GONE: Final = "There is no such thing; the text says what."
_REVOKED: Final = "The rack was revoked."
_WRONG: Final = "The request is wrong; the text, or the JSON object of messages by field, says what is."

OPERATIONS: Final[tuple[Operation, ...]] = (
    # About the API itself.
    Operation(
        "GET", "/version/", "Version", "read", about.read_version,
        "The region's version, and what it can do.",
        answers={200: "`version`, `subversion` and `capabilities`."}, anonymous=True,
    ),
    Operation(
        "GET", "/openapi.json", "OpenApi", "read", about.read_openapi,
        "This API as an OpenAPI 3.1 document.",
        answers={200: "The document."}, anonymous=True, content="application/json",
    ),
    Operation(
        "GET", "/describe/", "Describe", "read", about.read_describe,
        "This API as MAAS's own clients want it described.",
        answers={200: "The description."}, anonymous=True, content="application/json",
    ),
    Operation(
        "GET", "/users/", "Users", "whoami", about.whoami,
        "Whose key the request is signed with; clients check their key with it.", op="whoami",
        answers={200: "The key's name as `username`."},
    ),
    # What can be deployed.
    Operation(
        "GET", "/releases/", "Releases", "read", releases.list_releases,
        "Every release: title, support window, and for each architecture its state and the racks that hold it; and how "
        "asking each rack ended. The racks are asked now.",
        parameters=releases.PARAMETERS,
        answers={
            200: "The list.", 400: _WRONG,
            503: "There is nothing to list, because nothing is published or no rack is enrolled either; `reason` says "
                 "which. `Retry-After` says when to ask again.",
        },
    ),
    Operation(
        "GET", "/releases/{os}/{release}/", "Release", "read", releases.read_release,
        "Why a release can be deployed, or not, rack by rack. The racks are asked now.",
        parameters=releases.RELEASE_PARAMETERS,
        answers={
            200: "It can be deployed.",
            400: "No generation that any rack may hold lists it: `distro_series` says what there is instead.",
            409: "It is published and on its way; `racks` says which are behind, and how far. With `Retry-After`.",
            503: "A rack that may hold it did not answer, or there is no rack, or nothing is published; the body says "
                 "which, since when and why. With `Retry-After`.",
        },
    ),
    Operation(
        "GET", "/releases/{release}/", "ReleaseByName", "read", releases.read_release,
        "The same, for a bare release name such as `noble`, where it is unambiguous.",
        parameters=releases.RELEASE_PARAMETERS,
        answers={
            200: "It can be deployed.", 400: "There is none, or more than one: `distro_series` says what there is.",
            409: "It is published and on its way. With `Retry-After`.", 503: "It cannot be told. With `Retry-After`.",
        },
    ),
    # What is published, and how it came to be.
    Operation(
        "GET", "/boot-resources/", "BootResources", "read", images.list_resources,
        "Every image of the current generation, and those that are being uploaded.",
        parameters=(Parameter("type", "synced, generated, uploaded or all (default). None of ours is generated."),),
        answers={200: "The list.", 400: "`Bad type 'x'`"},
    ),
    Operation(
        "POST", "/boot-resources/", "BootResources", "create", uploads.create_resource,
        "Upload an image. With `content` it is taken in at once (up to 16 MiB); without, in chunks: each is a PUT to "
        "the file's `upload_uri`. The same again finds the upload that was cut: `received` says how many bytes have "
        "come.",
        parameters=uploads.FIELDS,
        answers={
            201: "The image, with `sets` as when it is read.", 400: _WRONG,
            503: "The same content is being written at this moment. With `Retry-After`.",
            507: "The disk has no room for it.",
        },
    ),
    Operation(
        "PUT", "/boot-resources/{id}/upload/{upload_id}/", "BootResourceUpload", "update", uploads.upload_chunk,
        "Append a chunk (the body, at most 24 MiB of any type) to an upload. When all has come it is verified, and an "
        "import that publishes it is asked for.",
        parameters=(
            Parameter("content", "The chunk: all of the body.", kind="file", required=True),
            Parameter("offset", "Where in the content it belongs, so that none is taken twice; in the query. Without: "
                      "after what has come, or at the beginning if the upload has been begun again since.",
                      kind="integer", minimum=0),
        ),
        answers={
            200: "The image, with how much has come.",
            400: "Too much data, or all of it and its sha256 is another: then it is thrown away.",
            404: _GONE,
            409: "It does not belong at `offset`, and the text says where to go on; or another region process has it.",
            503: "The same content is being written at this moment. With `Retry-After`.",
            507: "The disk is full.",
        },
        raw=True,
    ),
    Operation(
        "DELETE", "/boot-resources/{id}/", "BootResource", "delete", uploads.delete_resource,
        "Delete an uploaded image, and what is under way of it; the next generation is without it.",
        answers={204: "It is deleted.", 404: _GONE, 409: "It is imported from a source; the text says from which."},
    ),
    Operation(
        "POST", "/boot-resources/", "BootResources", "import", images.start_import,
        "Begin an import of all sources. One that is queued already is named instead.", op="import",
        answers={200: "`Import of boot resources started`; `Location` is the import's job."}, content=TEXT,
    ),
    Operation(
        "POST", "/boot-resources/", "BootResources", "stop_import", images.stop_import,
        "Stop the import that is running, and the one that is queued. One that is publishing ends first.",
        op="stop_import", answers={200: "`Import of boot resources is being stopped`"}, content=TEXT,
    ),
    Operation(
        "GET", "/boot-resources/", "BootResources", "is_importing", images.is_importing,
        "Whether an import is running or queued.", op="is_importing", answers={200: "`true` or `false`."},
    ),
    Operation(
        "GET", "/boot-resources/{id}/", "BootResource", "read", images.read_resource,
        "One image, with `sets`: its version, and in that every file with size and sha256.",
        answers={200: "The image.", 404: _GONE},
    ),
    Operation(
        "GET", "/image-verification/", "ImageVerification", "read", images.read_verification,
        "How far this region process is with hashing all of its files again, or how that last ended: `state` "
        "(verifying or waiting), files and bytes of how many, `damaged` with the reason of each, and `not_repaired`, "
        "what is damaged at this moment.",
        answers={200: "The pass under way or the last one."},
    ),
    Operation(
        "POST", "/image-verification/", "ImageVerification", "create", images.start_verification,
        "Begin to hash all files of this region process again, or go on with the pass under way.",
        parameters=(
            Parameter("rate", "MiB in a second at most, for this pass.", kind="integer", minimum=1, maximum=100_000),
        ),
        answers={202: "It has begun.", 400: _WRONG},
    ),
    Operation(
        "GET", "/image-generations/", "ImageGenerations", "read", images.list_generations,
        "The generations, newest first.", parameters=(_LIMIT,), answers={200: "The list.", 400: _WRONG},
    ),
    Operation(
        "GET", "/image-generations/{number}/", "ImageGeneration", "read", images.read_generation,
        "One generation, with `changes`: how it differs from the one before, what it kept, and why.",
        answers={200: "The generation.", 404: _GONE},
    ),
    Operation(
        "GET", "/import-jobs/", "ImportJobs", "read", images.list_jobs,
        "The imports, newest first.", parameters=(_LIMIT,), answers={200: "The list.", 400: _WRONG},
    ),
    Operation(
        "GET", "/import-jobs/{id}/", "ImportJob", "read", images.read_job,
        "One import: its state, bytes done of bytes to do, and `problems` by product, version and file.",
        answers={200: "The import.", 404: _GONE},
    ),
    # What to import.
    Operation(
        "GET", "/boot-sources/", "BootSources", "read", sources.list_sources,
        "Every source, the one that is preferred first.", answers={200: "The list."},
    ),
    Operation(
        "POST", "/boot-sources/", "BootSources", "create", sources.create_source,
        "Add a source. `url` is needed, and one way to trust it: a keyring, by name or by value, or `allow_unsigned`.",
        parameters=sources.SOURCE_FIELDS, answers={201: "The source.", 400: _WRONG},
    ),
    Operation(
        "GET", "/boot-sources/{id}/", "BootSource", "read", sources.read_source,
        "One source.", answers={200: "The source.", 404: _GONE},
    ),
    Operation(
        "PUT", "/boot-sources/{id}/", "BootSource", "update", sources.update_source,
        "Change the fields that are given.", parameters=sources.SOURCE_FIELDS,
        answers={200: "The source.", 400: _WRONG, 404: _GONE},
    ),
    Operation(
        "DELETE", "/boot-sources/{id}/", "BootSource", "delete", sources.delete_source,
        "Remove a source and its selections; the next import removes its images.",
        answers={204: "It is removed.", 404: _GONE},
    ),
    Operation(
        "GET", "/boot-sources/{boot_source_id}/selections/", "BootSourceSelections", "read", sources.list_selections,
        "The selections of a source.", answers={200: "The list.", 404: _GONE},
    ),
    Operation(
        "POST", "/boot-sources/{boot_source_id}/selections/", "BootSourceSelections", "create",
        sources.create_selection, "Add a selection. `os` and `release` are needed; what else is not given is `*`.",
        parameters=sources.SELECTION_FIELDS, answers={201: "The selection.", 400: _WRONG, 404: _GONE},
    ),
    Operation(
        "GET", "/boot-sources/{boot_source_id}/selections/{id}/", "BootSourceSelection", "read", sources.read_selection,
        "One selection.", answers={200: "The selection.", 404: _GONE},
    ),
    Operation(
        "PUT", "/boot-sources/{boot_source_id}/selections/{id}/", "BootSourceSelection", "update",
        sources.update_selection, "Change the fields that are given.", parameters=sources.SELECTION_FIELDS,
        answers={200: "The selection.", 400: _WRONG, 404: _GONE},
    ),
    Operation(
        "DELETE", "/boot-sources/{boot_source_id}/selections/{id}/", "BootSourceSelection", "delete",
        sources.delete_selection, "Remove a selection; the next import removes what nothing else selects.",
        answers={204: "It is removed.", 404: _GONE},
    ),
    # The racks.
    Operation(
        "GET", "/rackcontrollers/", "RackControllers", "read", racks.list_racks,
        "Every enrolled rack: whether it is connected, and what it last reported; and those that were revoked.",
        answers={200: "The list."},
    ),
    Operation(
        "POST", "/rackcontrollers/", "RackControllers", "import_boot_images", racks.import_on_all,
        "Tell every rack to fetch what is published.", op="import_boot_images",
        answers={
            202: "They are told; the text names those that are not connected, which fetch when they connect again.",
            503: "None can be told; the text says why. With `Retry-After`.",
        },
        content=TEXT,
    ),
    Operation(
        "GET", "/rackcontrollers/{system_id}/", "RackController", "read", racks.read_rack,
        "One rack, by its system id or its name.", answers={200: "The rack.", 404: _GONE},
    ),
    Operation(
        "PUT", "/rackcontrollers/{system_id}/", "RackController", "update", racks.rename_rack,
        "Give a rack another name.", parameters=(Parameter("hostname", "Its new name."),),
        answers={200: "The rack.", 400: _WRONG, 404: _GONE},
    ),
    Operation(
        "POST", "/rackcontrollers/{system_id}/", "RackController", "revoke", racks.revoke_rack,
        "Revoke a rack: it is cut off at once, and its certificate is refused. Its name stays taken until it is "
        "forgotten.", op="revoke", answers={200: "The rack.", 404: _GONE},
    ),
    Operation(
        "DELETE", "/rackcontrollers/{system_id}/", "RackController", "delete", racks.forget_rack,
        "Forget a rack: it is not asked any more, and its certificate is refused.",
        answers={204: "It is forgotten.", 404: _GONE},
    ),
    Operation(
        "GET", "/rackcontrollers/{system_id}/", "RackController", "list_boot_images", racks.list_boot_images,
        "What one rack holds. It is asked now; `connected` and `status` say whether it answered.",
        op="list_boot_images", answers={200: "The images.", 404: _GONE, 409: _REVOKED},
    ),
    Operation(
        "POST", "/rackcontrollers/{system_id}/", "RackController", "import_boot_images", racks.import_on_one,
        "Tell one rack to fetch what is published.", op="import_boot_images",
        answers={
            202: "It is told.", 404: _GONE, 409: _REVOKED,
            503: "It cannot be told; the text says why. With `Retry-After`.",
        },
        content=TEXT,
    ),
    # What happened.
    Operation(
        "GET", "/events/", "Events", "query", events.query_events,
        "What happened on the racks and to the nodes, newest first.", op="query", parameters=events.PARAMETERS,
        answers={200: "`count`, `events`, and `prev_uri` and `next_uri`, where there are older and newer ones.",
                 400: _WRONG},
    ),
    # The machines.
    *machines.OPERATIONS,
    *scripts.OPERATIONS,
    *results.OPERATIONS,
    *tags.OPERATIONS,
    *license_keys.OPERATIONS,
)  # fmt: skip

assert len({(one.method, one.path, one.op) for one in OPERATIONS}) == len(OPERATIONS), "each is there once"
assert all(one.content in (JSON, TEXT, BYTES, "application/json") for one in OPERATIONS), "nothing else is understood"
