"""
Whether a tracker runs, by the heartbeat that its commits leave.

Rule 1: a heartbeat is at most five seconds old while a tracker runs, idle or not; the last one of a tracker that was
asked to stop says so.
Rule 2: the heartbeat has the clock of the tracker's host: the bound leaves room for clocks that differ by seconds.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from kmq_spark.inspection.spans import span

if TYPE_CHECKING:
    from kmq_spark.inspection.facts import TrackerFacts

HEARTBEAT_LATE_MS = 15_000
"""A tracker whose newest heartbeat is older does not run: three of them are missing."""


SNAPSHOT_LATE_BATCHES = 300
"""As the tracker's own bound; Spark fails at some 860."""


class Life(StrEnum):
    """What the heartbeat says."""

    NEVER = "never"
    UNKNOWN = "unknown"
    """Of a tracker of an older version, which leaves no heartbeat."""
    RUNNING = "running"
    STOPPED = "stopped"
    GONE = "gone"


def life_of(tracker: TrackerFacts, now_ms: int) -> Life:
    """
    Return whether a tracker runs.

    Args:
        tracker: As its group shows it.
        now_ms: Epoch milliseconds, clock of whoever asks.
    """
    if not tracker.positions:
        return Life.NEVER
    if tracker.heartbeat_at_ms is None:
        return Life.UNKNOWN
    if tracker.is_stopped:
        return Life.STOPPED
    return Life.RUNNING if now_ms - tracker.heartbeat_at_ms <= HEARTBEAT_LATE_MS else Life.GONE


def described(tracker: TrackerFacts, overdue: int, now_ms: int) -> str:
    """
    Return one line: whether a tracker runs, since when not, and how many messages wait for it.

    Args:
        tracker: As its group shows it.
        overdue: Messages past their deadline.
        now_ms: Epoch milliseconds, clock of whoever asks.
    """
    life, ago = life_of(tracker, now_ms), span(max(0, now_ms - (tracker.heartbeat_at_ms or now_ms)))
    if life is Life.GONE:
        return f"no tracker for {ago}, {overdue} overdue"
    if life is Life.STOPPED:
        return f"the tracker was stopped {ago} ago, {overdue} overdue"
    if life is Life.RUNNING:
        return f"the tracker runs, last heartbeat {ago} ago"
    return ""


def snapshots_late(tracker: TrackerFacts) -> tuple[str, str] | None:
    """Return what is wrong with the snapshots of the tracker's state, and its repair; None where nothing is."""
    if tracker.snapshot_lag <= SNAPSHOT_LATE_BATCHES:
        return None
    what = f"no snapshot of the tracker's state for {tracker.snapshot_lag} batches: its query fails after some 860"
    return what, "look at the checkpoint's file system and at the tracker's log"
