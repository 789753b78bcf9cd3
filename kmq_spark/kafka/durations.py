"""
Read durations as callers give them: seconds or a timedelta.

Rule 1: rounded up to whole milliseconds, so that nothing is shorter than what was asked for.
"""

from __future__ import annotations

import math
from datetime import timedelta

from kmq_spark.core.markers import MAX_REDELIVER_AFTER_MS
from kmq_spark.errors import ConfigError

MIN_LEASE_MS = 1_000
"""Shortest lease: below it, a slow broker alone would cause redeliveries."""


def milliseconds(name: str, duration: float | timedelta, least_ms: int = 0) -> int:
    """
    Return a duration in milliseconds.

    Args:
        name: What it is, for the error.
        duration: Seconds, or a timedelta.
        least_ms: Shortest one allowed; the longest is 12 hours.

    Raises:
        ConfigError: It is out of bounds, or no number.
    """
    seconds = duration.total_seconds() if isinstance(duration, timedelta) else duration
    if not (isinstance(seconds, int | float) and least_ms <= seconds * 1000 <= MAX_REDELIVER_AFTER_MS):
        message = (
            f"{name} is out of bounds: got {duration!r}, {least_ms // 1000} to {MAX_REDELIVER_AFTER_MS // 1000} "
            "seconds; give seconds or a timedelta"
        )
        raise ConfigError(message)
    return math.ceil(seconds * 1000)
