"""The list of releases read from PostgreSQL through the same API code: what ``bench`` holds the asking against.

It is not in the table of routes. ``Api(parts, authenticator, (*OPERATIONS, from_database(database)))`` serves it.
"""

from __future__ import annotations

from region.answers.releases import listing_from_database
from region.api.operations import Call, Operation, Parameter, Reply
from region.api.parts import Parts
from region.database import Database


def from_database(database: Database) -> Operation:
    """The operation ``GET releases-from-database/``."""

    async def read(parts: Parts, call: Call) -> Reply:
        published = await parts.published.read()
        arch = call.values.get("arch")
        return Reply(await listing_from_database(database, published, arch, parts.releases.today()))

    return Operation(
        "GET", "/releases-from-database/", "ReleasesFromDatabase", "read", read,
        "The list of releases, from the rows of the current generation.",
        parameters=(Parameter("arch", "Only this architecture."),), answers={200: "The list."},
    )  # fmt: skip
