"""What the API says of itself: its version, who is asking, and its description in two formats."""

from __future__ import annotations

from typing import Final

from region.api import descriptions
from region.api.operations import Call, Reply, document
from region.api.parts import Parts

CAPABILITIES: Final = (
    # gomaasapi takes this one for "API 2.0 is spoken here", and talks to no region without it.
    "network-deployment-ubuntu",
    "releases-by-rack",
    "image-generations",
    "import-jobs",
)


async def read_version(parts: Parts, call: Call) -> Reply:
    """The version and what the region can do."""
    return document({"version": parts.software, "subversion": "", "capabilities": list(CAPABILITIES)})


async def read_openapi(parts: Parts, call: Call) -> Reply:
    """The OpenAPI document."""
    return Reply(descriptions.openapi(parts.software, call.base), content_type="application/json")


async def read_describe(parts: Parts, call: Call) -> Reply:
    """The description for MAAS's clients. They refuse any other Content-Type than exactly this."""
    return Reply(descriptions.describe(call.base), content_type="application/json")


async def whoami(parts: Parts, call: Call) -> Reply:
    """Whose key it is."""
    assert call.key is not None, "the table says that this needs a key"
    return document({"username": call.key.name, "email": "", "is_superuser": True, "is_local": True})
