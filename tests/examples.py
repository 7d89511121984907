"""How many examples hypothesis tries: as many as a test asks for, or with ``STANCHION_SOAK=N`` N times as many."""

from __future__ import annotations

import os
from typing import Final

from hypothesis import HealthCheck, settings

FACTOR_VARIABLE: Final = "STANCHION_SOAK"


def examples(count: int) -> settings:
    """The settings of a test that tries ``count`` examples, more when soaking."""
    factor = max(1, int(os.environ.get(FACTOR_VARIABLE, "1")))
    return settings(max_examples=count * factor, deadline=None, suppress_health_check=[HealthCheck.too_slow])
