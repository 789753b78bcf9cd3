"""Durations from callers, in seconds or as a timedelta. Milliseconds are rounded up, so that none becomes shorter."""

from __future__ import annotations

import math
from datetime import timedelta

from kmq_spark.core.markers import MAX_DUE_AT_MS, MAX_REDELIVER_AFTER_MS
from kmq_spark.errors import ConfigError

MIN_LEASE_MS = 1_000
"""Minimum lease: with a shorter one, a slow broker would be enough to cause redeliveries."""


def seconds(name: str, duration: float | timedelta) -> float:
    """Return the seconds of a time-out."""
    value = duration.total_seconds() if isinstance(duration, timedelta) else duration
    # A bool is an int in Python, but never a duration. NaN fails both comparisons.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        message = (
            f"{name} is out of bounds: got {duration!r}; expected more than 0 seconds; give seconds or a timedelta"
        )
        raise ConfigError(message)
    return value


def milliseconds(
    name: str, duration: float | timedelta, least_ms: int = 0, most_ms: int = MAX_REDELIVER_AFTER_MS
) -> int:
    """Return a duration in milliseconds; *most_ms* = `MAX_DUE_AT_MS` means that there is no limit."""
    value = duration.total_seconds() if isinstance(duration, timedelta) else duration
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and least_ms <= value * 1000 <= most_ms):
        least_s, most_s = least_ms / 1000, most_ms / 1000
        allowed = f"at least {least_s:g}" if most_ms == MAX_DUE_AT_MS else f"{least_s:g} to {most_s:g}"
        message = f"{name} is out of bounds: got {duration!r}, {allowed} seconds; give seconds or a timedelta"
        raise ConfigError(message)
    return rounded_up_ms(value)


def rounded_up_ms(seconds: float) -> int:
    """Return whole milliseconds, rounded up, without floating-point noise: 0.001 s is 1 ms, not 2 ms."""
    return math.ceil(round(seconds * 1000, 3))
