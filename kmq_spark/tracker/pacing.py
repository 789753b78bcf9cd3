"""
Pauses of a tracker between two batches.

Rule 1: A TICK that may decide something ends every pause at once (`Ticker.pause`). Nothing is decided between two such
TICKs, so a batch there only brings the state up to date.
Rule 2: While a `MarkerWatch` sees all markers that arrive, a pause may be long: the ticker learns of each release and
each short lease within `LOOK_S` and the watch's fetch. Without it a pause is as short as `pause_s` says.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kmq_spark.core.outcome import PartitionOutcome
    from kmq_spark.tracker.marker_watch import MarkerWatch, Unread
    from kmq_spark.tracker.ticker import Ticker

BEHIND_S = 3.0
"""No pause follows a batch that took longer: most likely more markers are already waiting."""

REST_S = 0.25
"""Shortest pause after a batch while nothing is due; 0 for no pauses."""

PAUSE_SHARE = 2.0
LONGEST_PAUSE_S = 1.0
"""
Pause without a watch = `PAUSE_SHARE` x duration of the batch before it, at most `LONGEST_PAUSE_S` and at least
`REST_S`. So it leaves two thirds of a processor free, also on a slow machine or with a cold JVM.
"""

LONGEST_WATCHED_S = 10.0
"""Longest pause with a watch: the tracker's gauges and committed offsets are at most that old while markers arrive."""

QUIET_S = 1.0
"""A pause ends when no marker has arrived for this time: one more batch, and the state is up to date."""

MOST_UNREAD_BYTES = 4_000_000
"""What one batch folds in about a second on two cores: 80,000 markers of 50 bytes, whatever they cover."""

NEAR_S = 2.0
NEAR_SHARE = 0.15
"""
From so many seconds before a deadline on, this share of the limit is enough to end a pause: a batch that decides
something should not have much else to fold.
"""

LOOK_S = 0.05
"""Time between two looks at what the watch has read."""


def pause_s(worked_s: float) -> float:
    """Return the longest pause after a batch of *worked_s* without a watch, seconds; 0 for no pause, also with one."""
    if not REST_S or worked_s > BEHIND_S:
        return 0.0
    return max(REST_S, min(worked_s * PAUSE_SHARE, LONGEST_PAUSE_S))


def is_batch_wanted(unread: Unread, *, passed_s: float, quiet_s: float, due_in_s: float, unwatched_s: float) -> bool:
    """Return whether a pause should end although no TICK can decide anything."""
    if passed_s < REST_S:
        return False
    if unread.is_blind:
        return passed_s >= unwatched_s
    share = NEAR_SHARE if due_in_s < NEAR_S else 1.0
    if unread.bytes >= share * MOST_UNREAD_BYTES:
        return True
    return quiet_s >= QUIET_S or passed_s >= LONGEST_WATCHED_S


class Pauser:
    """Pauses between two batches of one query."""

    def __init__(self, ticker: Ticker, watch: MarkerWatch) -> None:
        self._ticker = ticker
        self._watch = watch

    def observe(self, outcomes: Iterable[PartitionOutcome]) -> None:
        """Note what a batch has read: the next pause looks at the markers after it."""
        self._watch.observe(outcomes)

    def close(self) -> None:
        """Close the watch."""
        self._watch.close()

    def pause(self, worked_s: float) -> None:
        """Pause after a batch that took *worked_s* seconds, until the next batch is wanted."""
        unwatched_s = pause_s(worked_s)
        if not unwatched_s or self._ticker.pause(0):
            return
        began_s = time.monotonic()
        self._watch.begin()
        try:
            while not self._ticker.pause(min(LOOK_S, unwatched_s)):
                self._watch.read()
                unread, now_s = self._watch.unread, time.monotonic()
                for partition, due_at_ms in unread.due_at_ms.items():
                    self._ticker.expect(partition, due_at_ms)
                if is_batch_wanted(
                    unread,
                    passed_s=now_s - began_s,
                    quiet_s=now_s - unread.newest_at_s,
                    due_in_s=self._ticker.due_in_s(),
                    unwatched_s=unwatched_s,
                ):
                    return
        finally:
            self._watch.end()
