"""
Read durations as callers give them: seconds or a timedelta.

Rule 1: rounded up to whole milliseconds, so that nothing is shorter than what was asked for.
"""

from __future__ import annotations

import math
from datetime import timedelta

from kmq_spark.core.markers import MAX_DUE_AT_MS, MAX_REDELIVER_AFTER_MS
from kmq_spark.errors import ConfigError

MIN_LEASE_MS = 1_000
"""Shortest lease: below it, a slow broker alone would cause redeliveries."""


def milliseconds(
    name: str, duration: float | timedelta, least_ms: int = 0, most_ms: int = MAX_REDELIVER_AFTER_MS
) -> int:
    """
    Return a duration in milliseconds.

    Args:
        name: What it is, for the error.
        duration: Seconds, or a timedelta.
        least_ms: Shortest one allowed.
        most_ms: Longest one allowed; the last instant of all stands for no limit.

    Raises:
        ConfigError: It is out of bounds, or no number.
    """
    seconds = duration.total_seconds() if isinstance(duration, timedelta) else duration
    # A bool is an int, and never what was meant. NaN fails both comparisons.
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not (is_number and least_ms <= seconds * 1000 <= most_ms):
        least_s, most_s = least_ms // 1000, most_ms // 1000
        allowed = f"at least {least_s}" if most_ms == MAX_DUE_AT_MS else f"{least_s} to {most_s}"
        message = f"{name} is out of bounds: got {duration!r}, {allowed} seconds; give seconds or a timedelta"
        raise ConfigError(message)
    return rounded_up_ms(seconds)


def rounded_up_ms(seconds: float) -> int:
    """Return whole milliseconds, without what the float added: 0.001 s is one of them, not two."""
    return math.ceil(round(seconds * 1000, 3))
