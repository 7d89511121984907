"""The parts of the API that a test needs; the others are not there."""

from __future__ import annotations

from typing import Any

import attrs

from region.api.parts import Parts


def parts_of(**given: Any) -> Parts:
    """Parts that are ``given``; using any other fails."""
    names = [field.name for field in attrs.fields(Parts) if field.init]
    return Parts(**{"software": "1.2.3", **{name: None for name in names if name != "software"}, **given})
