"""
Fold the markers of one markers partition into its state, and decide which messages fall due.

Rule 1: only a TICK decides messages. Decisions therefore depend on the log, not on how it is split into batches.
Rule 2: no system clock, no Kafka, no Spark. Time comes from the append times of the records (`core.clock`).
Rule 3: an END with a lower offset than a TICK always takes effect before that TICK.
Rule 4: the cost depends on the ranges in the markers and on the runs in the table, not on the messages they cover.
Rule 5: a TICK that has nothing to decide costs one comparison. The table is only updated when a message may be due.
Rule 6: each marker is folded under the rules of the queue that are in force at its offset (`rules_log.py`).
Rule 7: only a TICK of the newest term decides, and it decides a message once (`marks.py`). At a TERM all messages that
are still due may be decided anew. docs/internals/design.md, "The argument", says why nothing is sent twice.

Source: kmq `MarkersQueue.scala`, kafka-mq-go `queue/redelivery/markersqueue.go`. Two differences: time only advances
with records, never because none arrive; a second START after the deadline is accepted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np

from kmq_spark.core.clock import advanced
from kmq_spark.core.decisions import Decision, Decisions
from kmq_spark.core.events import EventBuffer, LoggedMarker
from kmq_spark.core.in_flight import KEY_BITS, MOST_SPREAD, REJECTED
from kmq_spark.core.markers import MAX_MESSAGE_OFFSET, MarkerType, Outcome, Release
from kmq_spark.core.marks import Marks
from kmq_spark.core.policy import DEFAULT_RULES, DecisionAction, exhausted_reason
from kmq_spark.core.resolve import resolve
from kmq_spark.core.segments import cut_to_segments
from kmq_spark.core.state import Counters, PartitionState, Status

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kmq_spark.core.in_flight import Columns
    from kmq_spark.core.markers import Marker
    from kmq_spark.core.policy import QueueRules

__all__ = [
    "Counters",
    "Decision",
    "DecisionAction",
    "Decisions",
    "FoldResult",
    "LoggedMarker",
    "PartitionState",
    "Status",
    "fold",
]

_NEVER = 2**63 - 1

MOST_DECISIONS_OF_A_TICK = 10_000
"""Most messages that one TICK decides, so that they fit into one Kafka transaction; the others wait for the next."""

MOST_RANGES_BUFFERED = 500_000
"""
Number of buffered ranges from which on the table is updated; the update takes about 200 bytes a range.

Decisions do not depend on this value.
"""


@dataclass(frozen=True, slots=True, eq=False)
class FoldResult:
    """
    The result of folding a batch.

    Attributes:
        state: State after the batch; the state before it is not modified.
        decisions: Redeliveries and dead letters to send, all of the term `status.term`.
        status: Status of the partition after the batch.
    """

    state: PartitionState
    decisions: Decisions
    status: Status


def fold(state: PartitionState, markers: Iterable[LoggedMarker]) -> FoldResult:
    """
    Fold a batch of markers of one markers partition.

    Source: docs/internals/protocol.md, the fold.
    """
    folding = _Folding(state)
    # Sort by offset only: rows with equal offsets are the same record, and `Marker` is not orderable.
    for logged in sorted(markers, key=itemgetter(0)):
        folding.take(*logged)
    folding.bring_up_to_date()
    folding.state.forget_the_old()
    return FoldResult(folding.state, Decisions.concatenated(folding.decided), folding.state.status())


class _Folding:
    """
    A fold in progress.

    Attributes:
        state: The state, without the buffered markers.
        decided: Decisions so far, one entry a TICK.
    """

    __slots__ = ("_buffer", "_earliest_ms", "_rules", "decided", "state")

    def __init__(self, state: PartitionState) -> None:
        self.state = replace(state, counters=replace(state.counters), ahead=list(state.ahead))
        self.decided: list[Decisions] = []
        self._rules = state.rules_log.in_force or DEFAULT_RULES
        self._buffer = EventBuffer()
        # Lower bound of the deadlines that are not decided, buffered markers included. An END may leave it too low.
        self._earliest_ms = self._table_earliest_ms()

    def take(self, marker_offset: int, appended_at_ms: int, marker: Marker | None) -> None:
        """Fold one marker."""
        state = self.state
        if marker_offset < state.next_marker_offset:
            state.counters.repeated += 1
            return
        state.next_marker_offset = marker_offset + 1
        if appended_at_ms >= 0:
            state.clock_ms = advanced(state.clock_ms, state.appended_at_ms, appended_at_ms)
            state.appended_at_ms = appended_at_ms
            state.note_ahead(marker_offset)
        if marker is None:
            state.counters.unreadable += 1
        elif marker.type is MarkerType.TICK:
            self._tick(marker_offset, marker.term)
        elif marker.type is MarkerType.RULES:
            self._change_rules(marker_offset, marker.rules)
        elif marker.type is MarkerType.TERM:
            self._begin_term(marker)
        else:
            self._gather(marker_offset, marker)

    def _gather(self, marker_offset: int, marker: Marker) -> None:
        """Buffer a START, KEEPALIVE or END until the table is updated."""
        state = self.state
        deadline_at_ms = state.clock_ms + marker.redeliver_after_ms
        if marker.due_at_ms:
            deadline_at_ms = max(deadline_at_ms, marker.due_at_ms + state.behind_ms)
        if marker.type is not MarkerType.END:
            # A lower bound is enough: backoff only makes a deadline later. A last delivery that failed is due at once.
            is_failed = marker.release is Release.FAILED
            self._earliest_ms = min(self._earliest_ms, state.clock_ms if is_failed else deadline_at_ms)
        elif marker.outcome is Outcome.REJECTED or (
            marker.outcome is Outcome.EXPIRED and self._rules.dead_letters_expired
        ):
            self._earliest_ms = REJECTED
        self._buffer.append(marker_offset, deadline_at_ms, marker)
        # An update copies columns of the whole table, so wait until the buffer has a quarter of the table's size.
        if len(self._buffer) >= max(MOST_RANGES_BUFFERED, state.in_flight.run_count // 4):
            self.bring_up_to_date()

    def bring_up_to_date(self) -> None:
        """Apply the buffered markers to the table."""
        if not len(self._buffer):
            return
        state, waiting = self.state, self._buffer.events()
        while len(waiting):
            events, in_flight, waiting = cut_to_segments(waiting, state.in_flight)
            state.in_flight = resolve(in_flight, events, state.counters, self._rules).coalesced()
            by_tracker = events.by_tracker[events.source]
            state.marks = state.marks.without_runs(events.key[by_tracker], events.count[by_tracker])

    def _change_rules(self, marker_offset: int, rules: QueueRules | None) -> None:
        """Apply the markers below this one under the old rules, then put the new rules in force."""
        if rules is None or rules == self.state.rules_log.in_force:
            return
        self.bring_up_to_date()
        self.state.rules_log = self.state.rules_log.changed(marker_offset, rules)
        self._rules = rules

    def _begin_term(self, marker: Marker) -> None:
        """Drop what the older term decided and marked: its transactions are over. A repeated TERM changes nothing."""
        if marker.term == self.state.term:
            return
        self.bring_up_to_date()
        self.state.term, self.state.term_by, self.state.marks = marker.term, marker.consumer_id, Marks()
        self.decided.clear()
        self._earliest_ms = self._table_earliest_ms()

    def _table_earliest_ms(self) -> int:
        earliest_ms = self.state.next_deadline_at_ms()
        return _NEVER if earliest_ms is None else earliest_ms

    def _tick(self, marker_offset: int, term: int) -> None:
        state = self.state
        state.counters.ticks += 1
        if not term or term != state.term or self._earliest_ms >= state.clock_ms:
            return
        self.bring_up_to_date()
        due = self._due()
        if len(due):
            self.decided.append(self._decide(due, marker_offset))
        self._earliest_ms = self._table_earliest_ms()

    def _due(self) -> Columns:
        """Return the messages that this TICK decides, in runs sorted by deadline, then by key."""
        limit, clock_ms, due = MOST_DECISIONS_OF_A_TICK, self.state.clock_ms, self.state.unmarked()
        due = due.take(due.deadline_at_ms < clock_ms)
        has_jitter = due.jitter_ms > 0
        if has_jitter.any():
            spread = self._looked_at(due.take(has_jitter)).messages()
            due = due.take(~has_jitter).merged(spread.take(spread.deadline_at_ms < clock_ms))
        if len(due) > limit:
            # Select before sorting: after an outage a million rows may be due.
            latest_ms = np.partition(due.deadline_at_ms, limit - 1)[limit - 1]
            due = due.take(due.deadline_at_ms <= latest_ms)
        # The table is sorted by key and the sort is stable, so equal deadlines stay ordered by key.
        due = due.take(np.argsort(due.deadline_at_ms, kind="stable"))
        before = np.cumsum(due.count) - due.count
        return replace(due, count=np.minimum(due.count, limit - before)).take(before < limit)

    def _looked_at(self, runs: Columns) -> Columns:
        """Return the runs with jitter that this TICK looks at: all of them, or another part at each TICK."""
        ends = np.cumsum(runs.count)
        if ends[-1] <= MOST_SPREAD:
            return runs
        first = int(np.searchsorted(ends, self.state.counters.ticks * MOST_SPREAD % ends[-1], side="right"))
        rows = np.roll(np.arange(len(runs)), -first)
        taken = int(np.searchsorted(np.cumsum(runs.count[rows]), MOST_SPREAD, side="right"))
        return runs.take(np.sort(rows[: max(1, taken)]))

    def _decide(self, due: Columns, tick_marker_offset: int) -> Decisions:
        """Decide messages and mark them. They stay in the table until an END is read."""
        state = self.state
        is_rejected = due.deadline_at_ms == REJECTED
        limit = self._rules.max_deliveries
        is_dead_letter = is_rejected | ((due.delivery_count >= limit) & (limit > 0))
        reasons = [state.in_flight.texts[text] for text in due.text.tolist()]
        for row in np.flatnonzero(is_dead_letter).tolist():
            if is_rejected[row]:
                reasons[row] = reasons[row] or "rejected"
            else:
                reasons[row] = exhausted_reason(int(due.delivery_count[row]), self._rules, reasons[row])
        state.marks = state.marks.with_runs(due.key, due.count)
        columns = {
            "queue_partition": due.key >> KEY_BITS,
            "message_offset": due.key & MAX_MESSAGE_OFFSET,
            "message_count": due.count,
            "delivery_count": due.delivery_count,
            "action": np.where(is_dead_letter, DecisionAction.DEAD_LETTER, DecisionAction.REDELIVER),
            "deadline_at_ms": state.on_brokers_clock(due.deadline_at_ms),
            "tick_marker_offset": np.full(len(due), tick_marker_offset),
            "tick_at_ms": np.full(len(due), state.appended_at_ms),
            "start_marker_offset": due.start_marker_offset,
            "is_silent": ~due.given_back & ~is_rejected,
        }
        return Decisions.from_columns(columns, reasons)
