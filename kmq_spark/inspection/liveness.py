"""
Decide whether a tracker runs, from the heartbeat in its commits.

Rule 1: While a tracker runs, its heartbeat is at most five seconds old, also when idle. The last heartbeat of a tracker
that was asked to stop contains a stop flag.
Rule 2: The heartbeat has the clock of the tracker's host. The bound allows clocks that differ by seconds.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from kmq_spark.inspection.spans import span

if TYPE_CHECKING:
    from kmq_spark.inspection.facts import TrackerFacts

HEARTBEAT_LATE_MS = 15_000
"""A tracker whose newest heartbeat is older does not run: three heartbeats are missing."""


SNAPSHOT_LATE_BATCHES = 300
"""The same bound as in the tracker. Spark fails after about 860 batches."""


class Life(StrEnum):
    """State of the tracker according to its heartbeat."""

    NEVER = "never"
    UNKNOWN = "unknown"
    """The tracker is of an older version and writes no heartbeat."""
    RUNNING = "running"
    STOPPED = "stopped"
    LOST = "gone"
    """The heartbeats have ended without a stop flag. The value is that of `kmq tracker status --output json`."""


def life_of(tracker: TrackerFacts, now_ms: int) -> Life:
    """
    Return whether a tracker runs.

    Args:
        tracker: Facts about the tracker.
        now_ms: Epoch milliseconds, clock of this machine.
    """
    if not tracker.positions:
        return Life.NEVER
    if tracker.heartbeat_at_ms is None:
        return Life.UNKNOWN
    if tracker.is_stopped:
        return Life.STOPPED
    return Life.RUNNING if now_ms - tracker.heartbeat_at_ms <= HEARTBEAT_LATE_MS else Life.LOST


def describe(tracker: TrackerFacts, overdue: int, now_ms: int) -> str:
    """
    Return one line of text: whether a tracker runs, how long ago it stopped, and how many messages are overdue.

    Args:
        tracker: Facts about the tracker.
        overdue: Number of messages past their deadline.
        now_ms: Epoch milliseconds, clock of this machine.
    """
    life, ago = life_of(tracker, now_ms), span(max(0, now_ms - (tracker.heartbeat_at_ms or now_ms)))
    if life is Life.LOST:
        return f"no tracker for {ago}, {overdue} overdue"
    if life is Life.STOPPED:
        return f"the tracker was stopped {ago} ago, {overdue} overdue"
    if life is Life.RUNNING:
        return f"the tracker runs, last heartbeat {ago} ago"
    return ""


def snapshots_late(tracker: TrackerFacts) -> tuple[str, str] | None:
    """Return the problem with the snapshots of the tracker's state and its repair; None if there is no problem."""
    if tracker.snapshot_lag <= SNAPSHOT_LATE_BATCHES:
        return None
    what = f"no snapshot of the tracker's state for {tracker.snapshot_lag} batches: its query fails after about 860"
    return what, "check the checkpoint's file system and the tracker's log"
