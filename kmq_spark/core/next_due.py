"""
Tell from one marker when it may cause a decision, without folding it.

Rule 1: a lower bound. The fold may decide later or not at all, never earlier.
Rule 2: nothing is decided from this value. It only says when a batch is worth its cost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kmq_spark.core.in_flight import REJECTED
from kmq_spark.core.markers import MarkerType, Outcome, Release

if TYPE_CHECKING:
    from kmq_spark.core.markers import Marker


def next_due_at_ms(marker: Marker, appended_at_ms: int, *, dead_letters_expired: bool) -> int | None:
    """Return the earliest deadline that a marker may cause, epoch ms; -1 for a rejection, None if it causes none."""
    if marker.type is MarkerType.END:
        is_rejection = marker.outcome is Outcome.REJECTED or (
            marker.outcome is Outcome.EXPIRED and dead_letters_expired
        )
        return REJECTED if is_rejection else None
    if marker.type in {MarkerType.TICK, MarkerType.RULES, MarkerType.TERM}:
        return None
    if marker.release is Release.FAILED:
        # If this was the last delivery, the message is dead-lettered at once.
        return appended_at_ms
    return max(appended_at_ms + marker.redeliver_after_ms, marker.due_at_ms)
