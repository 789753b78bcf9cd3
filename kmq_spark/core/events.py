"""
Markers to event columns: one event for each message that a marker covers.

Rule 1: events keep the order of the log.
Rule 2: collecting a marker costs one tuple; numpy does the rest, for all markers at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kmq_spark.core.in_flight import KEY_BITS
from kmq_spark.core.markers import MAX_ERROR_CHARS, MarkerType, OffsetRange, Outcome, Release

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kmq_spark.core.markers import Marker


class LoggedMarker(NamedTuple):
    """
    A marker at its place in the log.

    Attributes:
        marker_offset: Where.
        appended_at_ms: Append time, epoch milliseconds, broker clock; a negative one says nothing of the time.
        marker: What it says; None where the record is no marker.
    """

    marker_offset: int
    appended_at_ms: int
    marker: Marker | None


@dataclass(frozen=True, slots=True, eq=False)
class Events:
    """
    Columns of events, in log order, and of the markers they come from.

    Attributes:
        key: Message key of each event.
        source: Marker of each event, as a row of the columns below.
        type: A `MarkerType`.
        marker_offset: Where the marker lies.
        deadline_at_ms: START, KEEPALIVE: clock and lease; of a deferral not before its instant.
        lease_ms: START, KEEPALIVE: lease, or delay of a release.
        delivery_count: START.
        outcome: END: an `Outcome`.
        never_handed_out: START, KEEPALIVE: 1 where the delivery does not count.
        release: KEEPALIVE: a `Release`.
        reasons: END, KEEPALIVE that failed: free text.
    """

    key: NDArray[np.int64]
    source: NDArray[np.int64]
    type: NDArray[np.int64]
    marker_offset: NDArray[np.int64]
    deadline_at_ms: NDArray[np.int64]
    lease_ms: NDArray[np.int64]
    delivery_count: NDArray[np.int64]
    outcome: NDArray[np.int64]
    never_handed_out: NDArray[np.int64]
    release: NDArray[np.int64]
    reasons: list[str]

    def is_by_tracker(self) -> NDArray[np.bool_]:
        """Return whether each marker is an END that only a tracker writes."""
        by_tracker: NDArray[np.bool_] = np.isin(self.outcome, (Outcome.REDELIVERED, Outcome.DEAD_LETTERED))
        by_tracker &= self.type == MarkerType.END
        return by_tracker


class EventBuffer:
    """
    Markers since the last time that the table was brought up to date.

    Attributes:
        covered: Messages that they name, one that two of them name counted twice.
    """

    __slots__ = ("_ranges", "_reasons", "_rows", "covered")

    def __init__(self) -> None:
        """Begin with none."""
        self.covered = 0
        self._rows: list[tuple[int, ...]] = []
        self._ranges: list[OffsetRange] = []
        self._reasons: list[str] = []

    def __len__(self) -> int:
        """Return the number of markers."""
        return len(self._rows)

    def append(self, marker_offset: int, deadline_at_ms: int, marker: Marker) -> None:
        """
        Add a marker that is no TICK.

        Args:
            marker_offset: Where it lies.
            deadline_at_ms: Clock and lease; of a deferral not before its instant.
            marker: What it says.
        """
        self._rows.append(
            (
                marker.type,
                marker_offset,
                deadline_at_ms,
                marker.redeliver_after_ms,
                max(1, marker.delivery_count),
                marker.outcome,
                marker.never_handed_out,
                marker.release,
                marker.queue_partition,
                len(marker.ranges),
            )
        )
        self._ranges += marker.ranges
        for _, count in marker.ranges:
            self.covered += count
        # Only those of an END and of a failure are ever asked for, by the row of their marker.
        self._reasons.append(_reason(marker))

    def events(self) -> Events:
        """Return everything collected, and begin anew."""
        columns = np.array(self._rows, dtype=np.int64).T
        marker_type, marker_offset, deadline_at_ms, lease_ms, delivery_count, outcome, never_handed_out = columns[:7]
        release, queue_partition, range_count = columns[7:]
        first, count = np.array(self._ranges, dtype=np.int64).reshape(-1, 2).T
        source = np.repeat(np.arange(len(range_count)), range_count)
        key = first + (queue_partition << KEY_BITS)[source]
        total = int(count.sum())
        if total > len(count):
            before = np.cumsum(count) - count
            key = np.repeat(key - before, count) + np.arange(total)
            source = np.repeat(source, count)
        reasons = self._reasons
        self._rows, self._ranges, self._reasons, self.covered = [], [], [], 0
        return Events(
            key,
            source,
            marker_type,
            marker_offset,
            deadline_at_ms,
            lease_ms,
            delivery_count,
            outcome,
            never_handed_out,
            release,
            reasons,
        )


def _reason(marker: Marker) -> str:
    """Return why an END says what it says, and the exception of a failed delivery."""
    if marker.type is not MarkerType.END:
        return marker.reason[:MAX_ERROR_CHARS] if marker.release is Release.FAILED else ""
    return marker.reason or ("expired" if marker.outcome is Outcome.EXPIRED else "")
