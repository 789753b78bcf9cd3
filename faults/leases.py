"""
The leases of every message, told from the markers log alone, independently of the tracker's code.

Rule 1: time is the clock of the partition as docs/protocol.md has it (`LogClock`), from append times alone; no clock of
ours, and none of the tracker's code.
Rule 2: a lease is a list of segments: stretches of the log on which the message was in flight with one deadline.
Rule 3: a delivery that was given back, or put off by a deferral, ended with a word until the next START.
Rule 4: a tracker's END is justified by a TICK of its own session at which some segment was due, and by nothing else.
Rule 5: a session decides in the order of the log: that TICK does not lie below one which an END of an earlier
transaction of the same session needs. A transaction ends where an offset is missing: its commit has taken it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from kmq_spark.core.markers import MarkerType, MessageId, Outcome, Release

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kmq_spark.core.events import LoggedMarker
    from kmq_spark.core.markers import Marker

BY_TRACKER = frozenset({Outcome.REDELIVERED, Outcome.DEAD_LETTERED})

OPEN_END = 2**63 - 1

REJECTED_AT_MS = -1
"""Deadline of a rejected message: due at the next TICK."""


LONGEST_COUNTED_GAP_MS = 1_000
"""While the broker's clock is behind, a longer gap between two markers does not count as time."""


class LogClock:
    """
    The clock of a markers partition: append times, except that it never runs backwards.

    Where the broker's clock was set back, the log's clock is ahead of it by a constant, and goes on at its pace. A gap
    that is longer than a second makes up for what it is ahead, and so does the broker's clock when it is set right.
    """

    def __init__(self) -> None:
        """Begin before all markers."""
        self._last_ms, self._ahead_ms = 0, 0

    def read(self, appended_at_ms: int) -> int:
        """Return the clock at the next marker."""
        if appended_at_ms < 0:
            return self._last_ms + self._ahead_ms
        gap_ms = appended_at_ms - self._last_ms
        if not 0 <= gap_ms <= LONGEST_COUNTED_GAP_MS:
            self._ahead_ms = max(0, self._ahead_ms - gap_ms)
        self._last_ms = appended_at_ms
        return appended_at_ms + self._ahead_ms


class Session(NamedTuple):
    """A tracker between taking over a queue and losing it: TICKs below `decides_from` decide nothing for it."""

    tracker_id: str
    decides_from: dict[int, int]


@dataclass(slots=True)
class Segment:
    """
    A stretch of the log, `[begin, end)` in marker offsets, on which a message had one deadline.

    Attributes:
        begin: Marker offset.
        deadline_at_ms: By the log's clock.
        delivery_count: Deliveries so far.
        is_silent: No consumer has said how the delivery ended, so that it ends by its lease alone.
        appended_at_ms: Append time of the marker that began it, the broker's clock.
        lease_ms: From then on.
        due_at_ms: Not before this instant; 0 where no instant was named.
        end: Marker offset.
        is_acked: Whether an ack ended it.
        failed_at_ms: By the log's clock, when its handler raised: a last delivery is due from then on. None else.
    """

    begin: int
    deadline_at_ms: int
    delivery_count: int
    is_silent: bool = True
    appended_at_ms: int = 0
    lease_ms: int = 0
    due_at_ms: int = 0
    end: int = OPEN_END
    is_acked: bool = False
    failed_at_ms: int | None = None


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
        consumer_ends: ENDs that a consumer wrote, one by one: message, marker offset, marker.
        late_acks: ENDs that say so of messages that were not in flight any more.
        restarted: Messages with a START after an END of a tracker: fetched again, since a position was not committed.
    """

    ends: list[Justified] = field(default_factory=list)
    starts: defaultdict[MessageId, list[int]] = field(default_factory=lambda: defaultdict(list))
    in_flight: set[MessageId] = field(default_factory=set)
    acked: set[MessageId] = field(default_factory=set)
    consumer_ends: list[tuple[MessageId, int, Marker]] = field(default_factory=list)
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
    clock = LogClock()
    for logged in log:
        clock_ms = clock.read(logged.appended_at_ms)
        if logged.marker is not None and logged.marker.type is not MarkerType.TICK:
            reading.take(logged, logged.marker, clock_ms)
    reading.leases.in_flight = {
        message_id for message_id, segments in reading.segments.items() if segments and segments[-1].end == OPEN_END
    }
    return reading.leases


def _deadline_ms(marker: Marker, clock_ms: int, appended_at_ms: int) -> int:
    """Return a deadline by the log's clock; an instant that a marker names is one of the broker's clock."""
    due_at_ms = marker.due_at_ms + clock_ms - appended_at_ms if marker.due_at_ms else 0
    return max(clock_ms + marker.redeliver_after_ms, due_at_ms)


@dataclass(slots=True)
class _Order:
    """
    How far a session has decided.

    Attributes:
        transaction: Of the last END.
        settled: The latest TICK that an END of an earlier transaction needs.
        needed: The latest one that any END needs so far.
    """

    transaction: int = -1
    settled: int = 0
    needed: int = 0

    def reach(self, transaction: int) -> None:
        """Go on to the transaction of the next END."""
        if transaction != self.transaction:
            self.transaction, self.settled = transaction, self.needed


class _Lease(NamedTuple):
    """What a START or KEEPALIVE gives: `given` is append time, lease and instant, as `Segment` has them."""

    offset: int
    deadline_at_ms: int
    given: tuple[int, int, int]


class _Reading:
    """One markers partition being read."""

    def __init__(self, log: Sequence[LoggedMarker], decides_from: list[int]) -> None:
        self.leases = Leases()
        self.segments: defaultdict[MessageId, list[Segment]] = defaultdict(list)
        self._decides_from = decides_from
        self._commits = [other[0] for one, other in pairwise(log) if other[0] > one[0] + 1]
        self._order: dict[int, _Order] = {}
        self._tick_offsets: list[int] = []
        self._clocks: list[int] = []
        self._ended_by_tracker: set[MessageId] = set()
        clock = LogClock()
        for logged in log:
            clock_ms = clock.read(logged.appended_at_ms)
            if logged.marker is not None and logged.marker.type is MarkerType.TICK:
                self._tick_offsets.append(logged.marker_offset)
                self._clocks.append(clock_ms)

    def take(self, logged: LoggedMarker, marker: Marker, clock_ms: int) -> None:
        lease = _Lease(
            logged.marker_offset,
            _deadline_ms(marker, clock_ms, max(0, logged.appended_at_ms)),
            (logged.appended_at_ms, marker.redeliver_after_ms, marker.due_at_ms),
        )
        for message_id in covered(marker):
            if marker.type is MarkerType.START:
                self._start(message_id, lease, marker)
            elif marker.type is MarkerType.KEEPALIVE:
                self._keep_alive(message_id, lease, marker)
            else:
                self._end(message_id, logged.marker_offset, marker)

    def _start(self, message_id: MessageId, lease: _Lease, marker: Marker) -> None:
        self._close(message_id, lease.offset)
        count, is_deferred = max(1, marker.delivery_count), marker.never_handed_out
        segment = Segment(lease.offset, lease.deadline_at_ms, count - is_deferred, not is_deferred, *lease.given)
        self.segments[message_id].append(segment)
        self.leases.starts[message_id].append(count)
        if message_id in self._ended_by_tracker:
            self.leases.restarted.add(message_id)

    def _keep_alive(self, message_id: MessageId, lease: _Lease, marker: Marker) -> None:
        segment = self._open(message_id)
        if segment is None or segment.deadline_at_ms == REJECTED_AT_MS:
            return
        count = max(0, segment.delivery_count - marker.never_handed_out)
        is_renewal = marker.release is Release.RENEWED and not marker.never_handed_out
        self._close(message_id, lease.offset)
        is_silent = segment.is_silent and is_renewal
        kept = Segment(lease.offset, lease.deadline_at_ms, count, is_silent, *lease.given)
        if marker.release is Release.FAILED and not marker.never_handed_out:
            kept.failed_at_ms = lease.deadline_at_ms - marker.redeliver_after_ms
        self.segments[message_id].append(kept)

    def _end(self, message_id: MessageId, offset: int, marker: Marker) -> None:
        segment = self._open(message_id)
        if marker.outcome in BY_TRACKER:
            self._end_by_tracker(message_id, offset, marker)
            return
        self.leases.consumer_ends.append((message_id, offset, marker))
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
        if marker.outcome is Outcome.DEAD_LETTERED:
            # Whether it was the last delivery is judged by who knows the queue's limit.
            segments = [
                one if one.failed_at_ms is None else replace(one, deadline_at_ms=one.failed_at_ms) for one in segments
            ]
        # Sessions follow each other: what a session wrote lies below where the next one decides from.
        session = max(0, bisect_right(self._decides_from, offset) - 1)
        order = self._order.setdefault(session, _Order())
        order.reach(bisect_right(self._commits, offset))
        ticks = (
            (one, self._deciding_tick(one, self._decides_from[session], order.settled, offset)) for one in segments
        )
        due, tick = next(((one, at) for one, at in ticks if at is not None), (None, 0))
        order.needed = max(order.needed, tick)
        self.leases.ends.append(
            Justified(
                message_id, offset, marker.outcome, marker.reason, marker.consumer_id, due,
                any(one.is_acked for one in segments), bool(segments),
            )
        )  # fmt: skip
        self._ended_by_tracker.add(message_id)

    def _deciding_tick(self, segment: Segment, decides_from: int, settled: int, end_offset: int) -> int | None:
        """Return the first TICK that could decide a segment; None where there is none before its end and the END."""
        first = bisect_left(self._tick_offsets, max(segment.begin, decides_from, settled))
        first = max(first, bisect_right(self._clocks, segment.deadline_at_ms))
        if first < len(self._tick_offsets) and self._tick_offsets[first] < min(segment.end, end_offset):
            return self._tick_offsets[first]
        return None

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
