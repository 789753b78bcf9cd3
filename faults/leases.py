"""
The leases of every message, followed through the markers log alone, independently of the tracker's code.

Rule 1: time is the clock of the partition as docs/protocol.md has it (`LogClock`), from append times alone; no clock of
ours, and none of the tracker's code.
Rule 2: a lease is a list of segments: parts of the log in which the message was in flight with one deadline.
Rule 3: a delivery that was given back, or deferred, is not silent until the next START.
Rule 4: a tracker's END is justified by a TICK of its own session at which some segment was due, and by nothing else. It
is wrong where it, or what ended the segment, lies below the first TICK that could decide that segment.
Rule 5: a session decides in the order of the log: that TICK does not lie below one which an END of an earlier
transaction of the same session needs. A transaction ends where an offset is missing: its commit has taken it.
Rule 6: a deadline has the queue's backoff in it, by the rules in force at its marker.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from faults.protocol import (
    ERROR_CHARS,
    LoggedMarker,
    Marker,
    MarkerType,
    MessageId,
    Outcome,
    QueueRules,
    Release,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BY_TRACKER = frozenset({Outcome.REDELIVERED, Outcome.DEAD_LETTERED})
"""Outcomes that only a tracker writes."""

OPEN_END = 2**63 - 1

REJECTED_AT_MS = -1
"""Deadline of a rejected message: due at the next TICK."""

LONGEST_STEP_MS = 1_000
"""While the broker's clock is behind, a longer gap between two records does not count as time."""


class LogClock:
    """
    The clock of a markers partition.

    clock = max(clock + step, t), where t is the record's append time and step is what passed since the record before,
    0 where that is not 0 to 1,000 ms.
    """

    def __init__(self) -> None:
        """Begin before all markers."""
        self.clock_ms, self._last_ms = 0, 0

    def read(self, appended_at_ms: int) -> int:
        """Return the clock at the next record."""
        if appended_at_ms < 0:
            return self.clock_ms
        passed_ms = appended_at_ms - self._last_ms
        step_ms = passed_ms if 0 <= passed_ms <= LONGEST_STEP_MS else 0
        self.clock_ms, self._last_ms = max(self.clock_ms + step_ms, appended_at_ms), appended_at_ms
        return self.clock_ms


class Session(NamedTuple):
    """A tracker between taking over a queue and losing it: TICKs below `decides_from` decide nothing for it."""

    tracker_id: str
    decides_from: dict[int, int]


@dataclass(slots=True)
class Segment:
    """
    A part of the log, `[begin, end)` in marker offsets, in which a message had one deadline.

    Attributes:
        begin: Marker offset.
        deadline_at_ms: By the log's clock.
        delivery_count: Deliveries so far.
        is_silent: No consumer has said how the delivery ended, so that it ends by its lease alone.
        appended_at_ms: Append time of the marker that began it, the broker's clock.
        held_ms: From then on: lease and backoff.
        due_at_ms: Not before this instant; 0 where no instant was named.
        is_last: A last delivery that failed, or a rejection: it becomes a dead letter.
        reason: What the handler raised, why it was rejected; empty for nothing.
        end: Marker offset.
        ended_by: What ended it; empty while nothing has.
    """

    begin: int
    deadline_at_ms: int
    delivery_count: int
    is_silent: bool = True
    appended_at_ms: int = 0
    held_ms: int = 0
    due_at_ms: int = 0
    is_last: bool = False
    reason: str = ""
    end: int = OPEN_END
    ended_by: str = ""

    @property
    def is_rejected(self) -> bool:
        """Whether a consumer has rejected the message."""
        return self.deadline_at_ms == REJECTED_AT_MS


class Tick(NamedTuple):
    """
    A TICK of the log.

    Attributes:
        marker_offset: Where.
        appended_at_ms: Append time.
        rules: In force there.
    """

    marker_offset: int
    appended_at_ms: int
    rules: QueueRules


class Justified(NamedTuple):
    """
    A tracker's END of one message, and what justifies it.

    Attributes:
        message_id: Message.
        marker_offset: Where the END lies.
        appended_at_ms: Its append time.
        marker: The END.
        segment: The one that was due; None where there is none.
        tick: The first TICK that could decide it; None where there is none.
        is_acked: A consumer had acked the message.
        is_started: The message had a lease.
        rules: In force where the END lies. A tracker applies the newest rules in the log where it needs the payload.
    """

    message_id: MessageId
    marker_offset: int
    appended_at_ms: int
    marker: Marker
    segment: Segment | None
    tick: Tick | None
    is_acked: bool
    is_started: bool
    rules: QueueRules

    @property
    def outcome(self) -> Outcome:
        """What it says."""
        return self.marker.outcome

    @property
    def reason(self) -> str:
        """Why."""
        return self.marker.reason

    @property
    def writer(self) -> str:
        """Who wrote it."""
        return self.marker.writer


class ConsumerEnd(NamedTuple):
    """An END of one message that no tracker wrote."""

    message_id: MessageId
    marker_offset: int
    appended_at_ms: int
    marker: Marker


@dataclass(slots=True)
class Leases:
    """
    What one markers partition says.

    Attributes:
        ends: ENDs by a tracker, message by message, in log order.
        starts: STARTs of each message: marker offset, delivery count, writer.
        in_flight: Messages in flight at the end of the log.
        deferred_until_ms: Of messages whose newest START is a deferral: until when, epoch milliseconds.
        acked: Messages that an END with outcome ACKED took out of flight.
        consumer_ends: ENDs that a consumer wrote, one by one.
        late_acks: ENDs with outcome ACKED of messages that were not in flight any more.
        restarted: Marker offsets of STARTs of messages after an END of a tracker: fetched again, since a position was
            not committed.
        kept: Marker offsets of ENDs EXPIRED of consumers that end nothing yet: the queue dead-letters what expires.
    """

    ends: list[Justified] = field(default_factory=list)
    starts: defaultdict[MessageId, list[tuple[int, int, str]]] = field(default_factory=lambda: defaultdict(list))
    in_flight: set[MessageId] = field(default_factory=set)
    deferred_until_ms: dict[MessageId, int] = field(default_factory=dict)
    acked: set[MessageId] = field(default_factory=set)
    consumer_ends: list[ConsumerEnd] = field(default_factory=list)
    late_acks: int = 0
    restarted: list[int] = field(default_factory=list)
    kept: set[int] = field(default_factory=set)


def read_leases(
    partition: int, log: Sequence[LoggedMarker], sessions: Sequence[Session], rules: QueueRules | None = None
) -> Leases:
    """
    Follow every message of a markers partition through its log.

    Args:
        partition: Markers partition.
        log: Its markers, by ascending offset.
        sessions: All trackers, in the order in which they took over.
        rules: In force before the first RULES marker; none by default.
    """
    reading = _Reading(partition, log, sessions, rules or QueueRules())
    for logged in log:
        reading.take(logged)
    reading.leases.in_flight = {
        message_id for message_id, segments in reading.segments.items() if segments and segments[-1].end == OPEN_END
    }
    return reading.leases


@dataclass(slots=True)
class _Order:
    """
    How far a session has decided.

    Attributes:
        transaction: Transaction of the last END.
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


class _Reading:
    """One markers partition being read."""

    def __init__(
        self, partition: int, log: Sequence[LoggedMarker], sessions: Sequence[Session], rules: QueueRules
    ) -> None:
        self.leases = Leases()
        self.segments: defaultdict[MessageId, list[Segment]] = defaultdict(list)
        self._rules = rules
        self._clock = LogClock()
        self._decides_from = [session.decides_from.get(partition, 0) for session in sessions] or [0]
        self._trackers = {session.tracker_id for session in sessions}
        self._commits = [other[0] for one, other in pairwise(log) if other[0] > one[0] + 1]
        self._order: dict[int, _Order] = {}
        self._ended_by_tracker: set[MessageId] = set()
        self._ticks: list[Tick] = []
        self._clocks: list[int] = []

    def take(self, logged: LoggedMarker) -> None:
        """Go on with the next record."""
        clock_ms, marker = self._clock.read(logged.appended_at_ms), logged.marker
        if marker is None:
            return
        if marker.type is MarkerType.RULES:
            self._rules = marker.rules or self._rules
        elif marker.type is MarkerType.TICK:
            self._ticks.append(Tick(logged.marker_offset, logged.appended_at_ms, self._rules))
            self._clocks.append(clock_ms)
        else:
            for message_id in marker.covered():
                if marker.type is MarkerType.START:
                    self._start(message_id, logged, marker)
                elif marker.type is MarkerType.KEEPALIVE:
                    self._keep_alive(message_id, logged, marker)
                else:
                    self._end(message_id, logged, marker)

    def _segment(self, message_id: MessageId, logged: LoggedMarker, marker: Marker, count: int) -> Segment:
        """Return what a START or KEEPALIVE begins."""
        clock_ms, held_ms = self._clock.clock_ms, marker.redeliver_after_ms
        has_word = marker.never_handed_out or marker.release is Release.GIVEN_BACK
        held_ms += 0 if has_word else self._rules.backoff_ms(message_id, count)
        is_failed = marker.release is Release.FAILED and not marker.never_handed_out
        is_last = is_failed and self._rules.is_last(count)
        held_ms = 0 if is_last else held_ms
        # An instant that a marker names is one of the broker's clock.
        ahead_ms = clock_ms - max(0, logged.appended_at_ms)
        due_ms = marker.due_at_ms + ahead_ms if marker.due_at_ms else 0
        return Segment(
            logged.marker_offset,
            max(clock_ms + held_ms, due_ms),
            count,
            appended_at_ms=logged.appended_at_ms,
            held_ms=held_ms,
            due_at_ms=marker.due_at_ms,
            is_last=is_last,
            reason=marker.reason[:ERROR_CHARS] if is_failed else "",
        )

    def _start(self, message_id: MessageId, logged: LoggedMarker, marker: Marker) -> None:
        self._close(message_id, logged.marker_offset, "started again")
        count, is_deferral = max(1, marker.delivery_count), marker.never_handed_out
        segment = self._segment(message_id, logged, marker, count - is_deferral)
        segment.is_silent = not is_deferral
        self.leases.deferred_until_ms.pop(message_id, None)
        if is_deferral:
            self.leases.deferred_until_ms[message_id] = segment.deadline_at_ms
        self.segments[message_id].append(segment)
        self.leases.starts[message_id].append((logged.marker_offset, count, marker.writer))
        if message_id in self._ended_by_tracker:
            self.leases.restarted.append(logged.marker_offset)

    def _keep_alive(self, message_id: MessageId, logged: LoggedMarker, marker: Marker) -> None:
        before = self._open(message_id)
        if before is None or before.is_rejected:
            return
        is_renewal = marker.release is Release.RENEWED and not marker.never_handed_out
        self._close(message_id, logged.marker_offset, "renewed" if is_renewal else "released")
        count = max(0, before.delivery_count - marker.never_handed_out)
        segment = self._segment(message_id, logged, marker, count)
        segment.is_silent = before.is_silent and is_renewal
        self.segments[message_id].append(segment)

    def _end(self, message_id: MessageId, logged: LoggedMarker, marker: Marker) -> None:
        is_expired_by_tracker = marker.outcome is Outcome.EXPIRED and marker.writer in self._trackers
        if marker.outcome in BY_TRACKER or is_expired_by_tracker:
            self._end_by_tracker(message_id, logged, marker)
            return
        is_kept = marker.outcome is Outcome.EXPIRED and self._rules.dead_letters_expired
        if is_kept:
            self.leases.kept.add(logged.marker_offset)
        segment = self._open(message_id)
        self.leases.consumer_ends.append(ConsumerEnd(message_id, logged.marker_offset, logged.appended_at_ms, marker))
        if segment is None or segment.is_rejected:
            self.leases.late_acks += marker.outcome is Outcome.ACKED
            return
        if marker.outcome is Outcome.ACKED:
            self.leases.acked.add(message_id)
        self._close(message_id, logged.marker_offset, marker.outcome.name.lower())
        if marker.outcome is Outcome.REJECTED or is_kept:
            self.segments[message_id].append(
                Segment(
                    logged.marker_offset,
                    REJECTED_AT_MS,
                    segment.delivery_count,
                    is_silent=False,
                    appended_at_ms=logged.appended_at_ms,
                    is_last=True,
                    reason=marker.reason or ("expired" if is_kept else "rejected"),
                )
            )

    def _end_by_tracker(self, message_id: MessageId, logged: LoggedMarker, marker: Marker) -> None:
        offset = logged.marker_offset
        self._close(message_id, offset, "ended by a tracker")
        segments = self.segments.pop(message_id, [])
        # Sessions follow each other: what a session wrote lies below where the next one decides from.
        session = max(0, bisect_right(self._decides_from, offset) - 1)
        order = self._order.setdefault(session, _Order())
        order.reach(bisect_right(self._commits, offset))
        due, tick = self._due(segments, self._decides_from[session], order.settled, offset)
        if tick is not None:
            order.needed = max(order.needed, tick.marker_offset)
        is_acked = any(one.ended_by == Outcome.ACKED.name.lower() for one in segments)
        self.leases.ends.append(
            Justified(
                message_id, offset, logged.appended_at_ms, marker, due, tick, is_acked, bool(segments), self._rules
            )
        )
        self._ended_by_tracker.add(message_id)

    def _due(
        self, segments: Sequence[Segment], decides_from: int, settled: int, end_offset: int
    ) -> tuple[Segment | None, Tick | None]:
        """Return the first segment that some TICK could decide, and the first such TICK."""
        for segment in segments:
            first = bisect_left(self._ticks, max(segment.begin, decides_from, settled), key=_offset_of)
            first = max(first, bisect_right(self._clocks, segment.deadline_at_ms))
            if first < len(self._ticks) and self._ticks[first].marker_offset < min(segment.end, end_offset):
                return segment, self._ticks[first]
        return None, None

    def _open(self, message_id: MessageId) -> Segment | None:
        segments = self.segments.get(message_id)
        return segments[-1] if segments and segments[-1].end == OPEN_END else None

    def _close(self, message_id: MessageId, offset: int, what: str) -> None:
        segment = self._open(message_id)
        if segment is not None:
            segment.end, segment.ended_by = offset, what


def _offset_of(tick: Tick) -> int:
    return tick.marker_offset


def all_covered(logs: Iterator[LoggedMarker]) -> Iterator[tuple[LoggedMarker, Marker, MessageId]]:
    """Return each message of each marker that is about messages."""
    for logged in logs:
        if logged.marker is not None:
            for message_id in logged.marker.covered():
                yield logged, logged.marker, message_id
