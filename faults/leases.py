"""
The leases of every message, told from the markers log alone, independently of the tracker's code.

Rule 1: time is the clock of the partition as docs/protocol.md has it, from the append times alone; no clock of ours.
Rule 2: a lease is a list of segments: stretches of the log on which the message was in flight with one deadline.
Rule 3: a delivery that was given back, or put off by a deferral, ended with a word until the next START.
Rule 4: a tracker's END is justified by a TICK of its own session at which some segment was due, and by nothing else.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from kmq_spark.core.clock import LONGEST_STEP_MS
from kmq_spark.core.markers import MarkerType, MessageId, Outcome, Release

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kmq_spark.core.events import LoggedMarker
    from kmq_spark.core.markers import Marker

BY_TRACKER = frozenset({Outcome.REDELIVERED, Outcome.DEAD_LETTERED})

OPEN_END = 2**63 - 1

REJECTED_AT_MS = -1
"""Deadline of a rejected message: due at the next TICK."""


class Session(NamedTuple):
    """A tracker between taking over a queue and losing it: TICKs below `decides_from` decide nothing for it."""

    tracker_id: str
    decides_from: dict[int, int]


@dataclass(slots=True)
class Segment:
    """
    A stretch of the log, `[begin, end)` in marker offsets, on which a message had one deadline.

    `is_silent`: nobody has said a word, so that it ends by its lease alone.
    """

    begin: int
    deadline_at_ms: int
    delivery_count: int
    is_silent: bool = True
    end: int = OPEN_END
    is_acked: bool = False


class Justified(NamedTuple):
    """A tracker's END of one message, and the segment that was due; None where there is none."""

    message_id: MessageId
    marker_offset: int
    outcome: Outcome
    reason: str
    writer: str
    segment: Segment | None
    acked_before: bool
    started_before: bool


@dataclass(slots=True)
class Leases:
    """
    What one markers partition says.

    Attributes:
        ends: ENDs by a tracker, message by message, in log order.
        starts: Delivery counts that STARTs named, by message; a deferral names that of the delivery it puts off.
        in_flight: Messages in flight at the end of the log.
        acked: Messages that an END took out of flight and that says so.
        late_acks: ENDs that say so of messages that were not in flight any more.
        restarted: Messages with a START after an END of a tracker: fetched again, since a position was not committed.
    """

    ends: list[Justified] = field(default_factory=list)
    starts: defaultdict[MessageId, list[int]] = field(default_factory=lambda: defaultdict(list))
    in_flight: set[MessageId] = field(default_factory=set)
    acked: set[MessageId] = field(default_factory=set)
    late_acks: int = 0
    restarted: set[MessageId] = field(default_factory=set)


def read_leases(partition: int, log: Sequence[LoggedMarker], sessions: Sequence[Session]) -> Leases:
    """
    Follow every message of a markers partition through its log.

    Args:
        partition: Markers partition.
        log: Its markers, by ascending offset.
        sessions: All trackers, in the order in which they took over.
    """
    reading = _Reading(log, [session.decides_from.get(partition, 0) for session in sessions] or [0])
    for logged in log:
        if logged.marker is not None and logged.marker.type is not MarkerType.TICK:
            reading.take(logged, logged.marker)
    reading.leases.in_flight = {
        message_id for message_id, segments in reading.segments.items() if segments and segments[-1].end == OPEN_END
    }
    return reading.leases


class _Reading:
    """One markers partition being read."""

    def __init__(self, log: Sequence[LoggedMarker], decides_from: list[int]) -> None:
        self.leases = Leases()
        self.segments: defaultdict[MessageId, list[Segment]] = defaultdict(list)
        self._decides_from = decides_from
        self._tick_offsets: list[int] = []
        self._clocks: list[int] = []
        self._behind_ms: list[int] = []
        self._clock_at: dict[int, int] = {}
        self._ended_by_tracker: set[MessageId] = set()
        clock_ms = last_ms = 0
        for logged in log:
            if logged.appended_at_ms >= 0:
                passed_ms, last_ms = logged.appended_at_ms - last_ms, logged.appended_at_ms
                clock_ms = max(clock_ms + passed_ms * (0 <= passed_ms <= LONGEST_STEP_MS), last_ms)
            self._clock_at[logged.marker_offset] = clock_ms
            if logged.marker is not None and logged.marker.type is MarkerType.TICK:
                self._tick_offsets.append(logged.marker_offset)
                self._clocks.append(clock_ms)
                self._behind_ms.append(clock_ms - last_ms)

    def take(self, logged: LoggedMarker, marker: Marker) -> None:
        clock_ms = self._clock_at[logged.marker_offset]
        deadline_at_ms = clock_ms + marker.redeliver_after_ms
        if marker.due_at_ms:
            deadline_at_ms = max(deadline_at_ms, marker.due_at_ms + clock_ms - max(0, logged.appended_at_ms))
        for message_id in covered(marker):
            if marker.type is MarkerType.START:
                self._start(message_id, logged.marker_offset, deadline_at_ms, marker)
            elif marker.type is MarkerType.KEEPALIVE:
                self._keep_alive(message_id, logged.marker_offset, deadline_at_ms, marker)
            else:
                self._end(message_id, logged.marker_offset, marker)

    def _start(self, message_id: MessageId, offset: int, deadline_at_ms: int, marker: Marker) -> None:
        self._close(message_id, offset)
        count, is_deferred = max(1, marker.delivery_count), marker.never_handed_out
        segment = Segment(offset, deadline_at_ms, count - is_deferred, is_silent=not is_deferred)
        self.segments[message_id].append(segment)
        self.leases.starts[message_id].append(count)
        if message_id in self._ended_by_tracker:
            self.leases.restarted.add(message_id)

    def _keep_alive(self, message_id: MessageId, offset: int, deadline_at_ms: int, marker: Marker) -> None:
        segment = self._open(message_id)
        if segment is None or segment.deadline_at_ms == REJECTED_AT_MS:
            return
        count = max(0, segment.delivery_count - marker.never_handed_out)
        is_renewal = marker.release is Release.RENEWED and not marker.never_handed_out
        self._close(message_id, offset)
        self.segments[message_id].append(Segment(offset, deadline_at_ms, count, segment.is_silent and is_renewal))

    def _end(self, message_id: MessageId, offset: int, marker: Marker) -> None:
        segment = self._open(message_id)
        if marker.outcome in BY_TRACKER:
            self._end_by_tracker(message_id, offset, marker)
            return
        if segment is None or segment.deadline_at_ms == REJECTED_AT_MS:
            self.leases.late_acks += marker.outcome is Outcome.ACKED
            return
        if marker.outcome is Outcome.ACKED:
            self.leases.acked.add(message_id)
        self._close(message_id, offset)
        segment.is_acked = marker.outcome is not Outcome.REJECTED
        if marker.outcome is Outcome.REJECTED:
            rejected = Segment(offset, REJECTED_AT_MS, segment.delivery_count, is_silent=False)
            self.segments[message_id].append(rejected)

    def _end_by_tracker(self, message_id: MessageId, offset: int, marker: Marker) -> None:
        self._close(message_id, offset)
        segments = self.segments.pop(message_id, [])
        found = ((one, self._due_at(one, offset)) for one in segments)
        due = next((self._on_brokers_clock(one, tick) for one, tick in found if tick is not None), None)
        self.leases.ends.append(
            Justified(
                message_id, offset, marker.outcome, marker.reason, marker.consumer_id, due,
                any(one.is_acked for one in segments), bool(segments),
            )
        )  # fmt: skip
        self._ended_by_tracker.add(message_id)

    def _on_brokers_clock(self, segment: Segment, tick: int) -> Segment:
        """Return a segment with its deadline as the broker's clock showed it at a TICK."""
        if segment.deadline_at_ms == REJECTED_AT_MS:
            return segment
        return replace(segment, deadline_at_ms=segment.deadline_at_ms - self._behind_ms[tick])

    def _due_at(self, segment: Segment, end_offset: int) -> int | None:
        """Return the first TICK of the session that wrote the END that saw the segment past its deadline."""
        # Sessions follow each other: what a session wrote lies below where the next one decides from.
        decides_from = self._decides_from[max(0, bisect_right(self._decides_from, end_offset) - 1)]
        first = bisect_left(self._tick_offsets, max(segment.begin, decides_from))
        first = max(first, bisect_right(self._clocks, segment.deadline_at_ms))
        is_seen = first < len(self._tick_offsets) and self._tick_offsets[first] < min(segment.end, end_offset)
        return first if is_seen else None

    def _open(self, message_id: MessageId) -> Segment | None:
        segments = self.segments.get(message_id)
        return segments[-1] if segments and segments[-1].end == OPEN_END else None

    def _close(self, message_id: MessageId, offset: int) -> None:
        segment = self._open(message_id)
        if segment is not None:
            segment.end = offset


def covered(marker: Marker) -> Iterator[MessageId]:
    """Return the messages that a marker is about."""
    for first, count in marker.ranges:
        for message_offset in range(first, first + count):
            yield MessageId(marker.queue_partition, message_offset)
