"""
Compute the clock of a markers partition from the append times of its records.

Rule 1: the clock never decreases and is never behind the newest append time.
Rule 2: after the broker's clock is set back, the partition's clock advances by the time between records. A lease of
30 s therefore lasts 30 s, however far the broker's clock is behind.
Rule 3: while the clock is ahead of the append times, a gap of more than `LONGEST_STEP_MS` between two records does not
count. Three causes look the same: no records, a broker clock that is set forward again, and a return to a leader with
another clock. A lease that is too long only delays the redelivery. A lease that is too short redelivers a message that
a consumer is still processing.
Rule 4: the clock is a function of the log. The state keeps the clock, the last append time, and how far the clock was
ahead at each marker where a rebuild may begin. A rebuild therefore computes the same clock as the first run.

docs/internals/design.md explains why.
"""

from __future__ import annotations

from typing import NamedTuple

LONGEST_STEP_MS = 1_000
"""Longest gap between two records that counts as time while the broker's clock is behind the partition's clock."""


class ClockStart(NamedTuple):
    """
    The clock at the marker where a rebuild begins.

    Attributes:
        ahead_ms: How far the clock is ahead of the append time, milliseconds, at least 0.
        appended_at_ms: Append time of the last record before that marker, epoch milliseconds. A negative value means
            the append time of the first record that the rebuild reads.
    """

    ahead_ms: int = 0
    appended_at_ms: int = -1


def advanced(clock_ms: int, last_appended_at_ms: int, appended_at_ms: int) -> int:
    """Return the clock after a record."""
    if clock_ms == last_appended_at_ms <= appended_at_ms:
        return appended_at_ms
    passed_ms = appended_at_ms - last_appended_at_ms
    return max(clock_ms + (passed_ms if 0 <= passed_ms <= LONGEST_STEP_MS else 0), appended_at_ms)
