"""How many examples hypothesis tries: as many as a test asks for, or with ``STANCHION_SOAK=N`` N times as many."""

from __future__ import annotations

import os
from collections import Counter
from typing import Final

from hypothesis import HealthCheck, settings

SOAK: Final = max(1, int(os.environ.get("STANCHION_SOAK", "1")))

CHECKED: Final[Counter[str]] = Counter()
"""What tests that check much per example have checked, by its name: reads, files, moments."""


def examples(count: int) -> settings:
    """The settings of a test that tries ``count`` examples, more when soaking."""
    return settings(max_examples=count * SOAK, deadline=None, suppress_health_check=[HealthCheck.too_slow])
