"""
Convert markers to event columns: one event for each range of message offsets that a marker covers.

Rule 1: events keep the order of the log.
Rule 2: collecting a marker only stores a tuple. All collected markers are converted at once with numpy.
Rule 3: memory depends on the ranges in the markers, never on the messages that they cover: a marker of 30 bytes may
cover 100,000 messages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kmq_spark.core.in_flight import KEY_BITS
from kmq_spark.core.markers import MAX_ERROR_CHARS, MarkerType, OffsetRange, Outcome, Release

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kmq_spark.core.markers import Marker


class LoggedMarker(NamedTuple):
    """
    A marker with its offset and append time.

    Attributes:
        marker_offset: Offset in the markers partition.
        appended_at_ms: Append time, epoch milliseconds, broker clock; a negative value means that it is unknown.
        marker: The decoded marker; None if the record is not a marker.
    """

    marker_offset: int
    appended_at_ms: int
    marker: Marker | None


@dataclass(frozen=True, slots=True, eq=False)
class Events:
    """
    Events in log order, and the markers they come from.

    `key`, `count`, `source` and `times` have one value an event; all other columns have one value a marker.

    Attributes:
        key: Key of the first message of each event.
        count: Number of messages of each event, adjacent in one queue partition.
        source: Index of the event's marker in the marker columns.
        times: Number of equal events that this one stands for, itself included.
        deadline_at_ms: START, KEEPALIVE: clock plus lease; for a deferral, not before the instant it names.
        lease_ms: START, KEEPALIVE: the lease, or the delay of a release, milliseconds.
        never_handed_out: START, KEEPALIVE: 1 if the delivery does not count.
        reasons: END, KEEPALIVE with FAILED: free text.
    """

    key: NDArray[np.int64]
    count: NDArray[np.int64]
    source: NDArray[np.int64]
    times: NDArray[np.int64]
    type: NDArray[np.int64]
    marker_offset: NDArray[np.int64]
    deadline_at_ms: NDArray[np.int64]
    lease_ms: NDArray[np.int64]
    delivery_count: NDArray[np.int64]
    outcome: NDArray[np.int64]
    never_handed_out: NDArray[np.int64]
    release: NDArray[np.int64]
    by_tracker: NDArray[np.bool_]
    reasons: list[str]

    def __len__(self) -> int:
        """Return the number of events."""
        return len(self.key)

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_] | slice) -> Events:
        """Return some of the events, of the same markers."""
        return replace(
            self, key=self.key[rows], count=self.count[rows], source=self.source[rows], times=self.times[rows]
        )

    def followed_by(self, later: Events) -> Events:
        """Return these events and later ones of the same markers."""
        return replace(
            self,
            key=np.append(self.key, later.key),
            count=np.append(self.count, later.count),
            source=np.append(self.source, later.source),
            times=np.append(self.times, later.times),
        )

    def without_repeats(self) -> Events:
        """
        Return the events with equal ones as one, where this changes nothing.

        Of equal KEEPALIVEs the last one counts, unless a START or END is between them. Of equal ENDs the first one
        counts, unless a START is between them.
        """
        is_start, is_end = ((self.type == each)[self.source] for each in (MarkerType.START, MarkerType.END))
        rows = np.flatnonzero(~is_start)
        if not len(rows):
            return self
        source, ends = self.source[rows], is_end[rows]
        since = np.where(ends, np.cumsum(is_start)[rows], np.cumsum(is_start | is_end)[rows])
        kinds = (self.type, self.release, self.never_handed_out, self.outcome, self.by_tracker)
        alike = np.stack((self.key[rows], self.count[rows], since, *(kind[source] for kind in kinds)))
        order = np.lexsort(alike)  # stable: equal events stay in the order of the log
        differs = (alike[:, order[1:]] != alike[:, order[:-1]]).any(axis=0)
        first, last = np.flatnonzero(np.append(True, differs)), np.flatnonzero(np.append(differs, True))
        kept = rows[order[np.where(ends[order[first]], first, last)]]
        times = self.times.copy()
        times[kept] = np.add.reduceat(times[rows[order]], first)
        is_start[kept] = True
        return replace(self, times=times).take(is_start)


class EventBuffer:
    """
    Markers that are not yet applied to the table.

    Its length is the number of ranges in the markers.
    """

    __slots__ = ("_ranges", "_reasons", "_rows")

    def __init__(self) -> None:
        self._rows: list[tuple[int, ...]] = []
        self._ranges: list[OffsetRange] = []
        self._reasons: list[str] = []

    def __len__(self) -> int:
        """Return the number of ranges in the markers."""
        return len(self._ranges)

    def append(self, marker_offset: int, deadline_at_ms: int, marker: Marker) -> None:
        """Add a START, KEEPALIVE or END."""
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
                marker.is_by_tracker,
                marker.queue_partition,
                len(marker.ranges),
            )
        )
        self._ranges += marker.ranges
        # One reason a marker, so that `source` indexes this list too. Only ENDs and failures have a text.
        self._reasons.append(_reason(marker))

    def events(self) -> Events:
        """Return all collected markers as events, and empty the buffer."""
        columns = np.array(self._rows, dtype=np.int64).T
        marker_type, marker_offset, deadline_at_ms, lease_ms, delivery_count, outcome, never_handed_out = columns[:7]
        release, by_tracker, queue_partition, range_count = columns[7:]
        first, count = np.array(self._ranges, dtype=np.int64).reshape(-1, 2).T
        source = np.repeat(np.arange(len(range_count)), range_count)
        key = first + (queue_partition << KEY_BITS)[source]
        reasons = self._reasons
        self._rows, self._ranges, self._reasons = [], [], []
        return Events(
            key,
            count,
            source,
            np.ones_like(source),
            marker_type,
            marker_offset,
            deadline_at_ms,
            lease_ms,
            delivery_count,
            outcome,
            never_handed_out,
            release,
            by_tracker.astype(np.bool_),
            reasons,
        )


def _reason(marker: Marker) -> str:
    """Return the reason of an END, or the exception text of a failed delivery; empty for other markers."""
    if marker.type is not MarkerType.END:
        return marker.reason[:MAX_ERROR_CHARS] if marker.release is Release.FAILED else ""
    return marker.reason or ("expired" if marker.outcome is Outcome.EXPIRED else "")
