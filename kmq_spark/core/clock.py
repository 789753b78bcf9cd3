"""
The clock of a markers partition: time as the append times of its records tell it.

Rule 1: it never runs backwards, and never behind the newest append time.
Rule 2: where the broker's clock was set back, the clock goes on by what passes from record to record, so that a lease
of 30 s is one of 30 s however far the broker's clock is behind.
Rule 3: while it is ahead, a gap of more than `LONGEST_STEP_MS` between two records is not counted: silence, a clock
that is set forward again and the return of a leader with another clock all look like that. A lease that is too long is
late; one that is too short gives a message away that a consumer works on.
Rule 4: a function of the log: the state keeps the clock, the last append time, and how far the clock was ahead at each
marker that a rebuild may begin with. So a rebuild has the clock of the first run.

docs/design.md has the argument.
"""

from __future__ import annotations

from typing import NamedTuple

LONGEST_STEP_MS = 1_000
"""Longest gap between two records that counts as time while the broker's clock is behind."""


class ClockStart(NamedTuple):
    """
    The clock where a rebuild begins.

    Attributes:
        ahead_ms: How far it is ahead of the append time, at least 0.
        appended_at_ms: That append time, epoch milliseconds, of the last record before; negative for that of the first
            record that is read.
    """

    ahead_ms: int = 0
    appended_at_ms: int = -1


def advanced(clock_ms: int, last_appended_at_ms: int, appended_at_ms: int) -> int:
    """
    Return the clock after a record.

    Args:
        clock_ms: Before it.
        last_appended_at_ms: Append time of the record before it, epoch milliseconds, broker clock.
        appended_at_ms: Its own.
    """
    if clock_ms == last_appended_at_ms <= appended_at_ms:
        return appended_at_ms
    passed_ms = appended_at_ms - last_appended_at_ms
    return max(clock_ms + (passed_ms if 0 <= passed_ms <= LONGEST_STEP_MS else 0), appended_at_ms)
