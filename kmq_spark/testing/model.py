"""
The tracker's rules, one message at a time: the reference with which the packed fold is compared.

Rule 1: slow and simple. Where this module and `core.fold` differ, one of them is wrong; this one is easier to read.
Rule 2: shares only input and output types with the fold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kmq_spark.core.backoff import BackoffKind
from kmq_spark.core.clock import LONGEST_STEP_MS
from kmq_spark.core.decisions import Decision
from kmq_spark.core.markers import Marker, MarkerType, MessageId, Outcome, Release
from kmq_spark.core.policy import DecisionAction, QueueRules, Rules
from kmq_spark.core.state import Counters, Status

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kmq_spark.core.events import LoggedMarker


@dataclass(slots=True)
class Lease:
    """A message in flight."""

    deadline_at_ms: int
    delivery_count: int
    start_marker_offset: int
    given_back: bool = False
    is_rejected: bool = False
    reason: str = ""


class ModelTracker:
    """
    A model of the tracker for one markers partition.

    Args:
        rules: Rules from the tracker's settings; may be replaced between batches, as a restarted tracker does.
        queue_rules: Rules of the queue, in force before the first marker.

    Attributes:
        in_flight: Messages started and not ended.
        unconfirmed: Decided messages whose END is not yet read back.
    """

    def __init__(self, rules: Rules | None = None, queue_rules: QueueRules | None = None) -> None:
        """Create the state before the first marker."""
        self.rules = rules or Rules()
        self._queue_rules = [(-1, queue_rules)]
        self.in_flight: dict[MessageId, Lease] = {}
        self.unconfirmed: dict[MessageId, Lease] = {}
        self._decided_at = -1
        self._clock_ms = 0
        self._appended_at_ms = 0
        self._ahead_ms = [(-1, 0)]  # by marker
        self._next_marker_offset = 0
        self._counters = Counters()

    def fold(self, markers: Iterable[LoggedMarker]) -> tuple[list[Decision], Status]:
        """
        Fold a batch.

        Args:
            markers: Markers in any order.

        Returns:
            Decisions in order, and the status of the partition after the batch.
        """
        decisions: list[Decision] = []
        for marker_offset, appended_at_ms, marker in sorted(markers, key=lambda logged: logged.marker_offset):
            if marker_offset < self._next_marker_offset:
                self._counters.repeated += 1
                continue
            self._next_marker_offset = marker_offset + 1
            self._pass_time(appended_at_ms)
            self._ahead_ms.append((marker_offset, self._clock_ms - self._appended_at_ms))
            if marker is None:
                self._counters.unreadable += 1
            elif marker.type is MarkerType.RULES:
                self._queue_rules.append((marker_offset, marker.rules))
            elif marker.type is MarkerType.TICK:
                decisions += self._tick(marker_offset)
            else:
                for message_id in _covered(marker):
                    self._one(message_id, marker_offset, marker)
        return decisions, self.status()

    def status(self) -> Status:
        """Return the status of the partition."""
        leases = self.in_flight.values()
        earliest = min(leases, key=lambda lease: lease.deadline_at_ms, default=None)
        needed = min((lease.start_marker_offset for lease in leases), default=self._next_marker_offset)
        return Status(
            next_marker_offset=self._next_marker_offset,
            clock_ms=self._clock_ms,
            in_flight=len(leases),
            needed_marker_offset=needed,
            next_deadline_at_ms=None if earliest is None else self._broker_ms(earliest),
            counters=self._counters.to_dict(),
            rules=self._queue_rules[-1][1],
            needed_rules=[rules for offset, rules in self._queue_rules if offset <= needed][-1],
            behind_ms=self._clock_ms - self._appended_at_ms,
            unconfirmed=len(self.unconfirmed),
            needed_ahead_ms=[ahead_ms for offset, ahead_ms in self._ahead_ms if offset <= needed][-1],
        )

    def _rules_now(self) -> Rules:
        """Return the rules in force for the current marker."""
        return self.rules.under(self._queue_rules[-1][1])

    def _pass_time(self, appended_at_ms: int) -> None:
        if appended_at_ms < 0:
            return  # a record without append time
        passed_ms = appended_at_ms - self._appended_at_ms
        if 0 <= passed_ms <= LONGEST_STEP_MS:
            self._clock_ms += passed_ms
        self._clock_ms = max(self._clock_ms, appended_at_ms)
        self._appended_at_ms = appended_at_ms

    def _broker_ms(self, lease: Lease) -> int:
        """Return a deadline on the broker's clock."""
        if lease.is_rejected:
            return -1
        return lease.deadline_at_ms - (self._clock_ms - self._appended_at_ms)

    def _one(self, message_id: MessageId, marker_offset: int, marker: Marker) -> None:
        if message_id in self.unconfirmed:
            self._on_its_way(message_id, marker)
        elif marker.type is MarkerType.START:
            self._start(message_id, marker_offset, marker)
        elif marker.type is MarkerType.KEEPALIVE:
            self._keep_alive(message_id, marker)
        else:
            self._end(message_id, marker)

    def _on_its_way(self, message_id: MessageId, marker: Marker) -> None:
        if marker.type is MarkerType.START:
            self._counters.renewed += 1
        elif marker.type is MarkerType.KEEPALIVE:
            self._counters.keepalive_unknown += 1
        elif marker.outcome in {Outcome.REDELIVERED, Outcome.DEAD_LETTERED}:
            self._counters.end_confirmed += 1
            del self.unconfirmed[message_id]
        else:
            self._counters.end_unknown += 1
            if marker.outcome is Outcome.EXPIRED:
                del self.unconfirmed[message_id]

    def _start(self, message_id: MessageId, marker_offset: int, marker: Marker) -> None:
        if message_id in self.in_flight:
            self._counters.renewed += 1
        else:
            self._counters.started += 1
        deadline_at_ms, count = self._clock_ms + marker.redeliver_after_ms, max(1, marker.delivery_count)
        if marker.due_at_ms:
            # `due_at_ms` is on the broker's clock; convert it to the partition's clock.
            deadline_at_ms = max(deadline_at_ms, marker.due_at_ms + self._clock_ms - self._appended_at_ms)
        if marker.never_handed_out:
            lease = Lease(deadline_at_ms, count - 1, marker_offset, given_back=True)
        else:
            lease = Lease(deadline_at_ms + self._backoff_ms(message_id, count), count, marker_offset)
        self.in_flight[message_id] = lease

    def _keep_alive(self, message_id: MessageId, marker: Marker) -> None:
        lease = self.in_flight.get(message_id)
        if lease is None or lease.is_rejected:
            self._counters.keepalive_unknown += 1
            return
        self._counters.kept_alive += 1
        lease.deadline_at_ms = self._clock_ms + marker.redeliver_after_ms
        if marker.never_handed_out:
            lease.delivery_count = max(0, lease.delivery_count - 1)
        elif marker.release is not Release.GIVEN_BACK:
            lease.deadline_at_ms += self._backoff_ms(message_id, lease.delivery_count)
        limit = self._rules_now().max_deliveries
        is_failed = marker.release is Release.FAILED and not marker.never_handed_out
        lease.reason = marker.reason[:300] if is_failed else ""
        if is_failed and 0 < limit <= lease.delivery_count:
            lease.deadline_at_ms = self._clock_ms  # due at once: it becomes a dead letter
        # Once given back it remains so: a later renewal is a straggler.
        lease.given_back |= marker.never_handed_out or marker.release is not Release.RENEWED

    def _backoff_ms(self, message_id: MessageId, delivery_count: int) -> int:
        backoff, count = self._rules_now().backoff, max(1, delivery_count)
        delays: dict[BackoffKind, int] = {
            BackoffKind.NONE: 0,
            BackoffKind.CONSTANT: backoff.initial_ms,
            BackoffKind.LINEAR: backoff.initial_ms * count,
            BackoffKind.EXPONENTIAL: backoff.initial_ms * 2 ** (count - 1),
        }
        delay = min(delays[backoff.kind], backoff.max_ms)
        share = (_splitmix64(_splitmix64(message_id[0] << 48 | message_id[1]) + count) >> 11) / 2**53
        return math.ceil(delay - delay * backoff.jitter * share)

    def _end(self, message_id: MessageId, marker: Marker) -> None:
        lease = self.in_flight.get(message_id)
        is_by_tracker = marker.outcome in {Outcome.REDELIVERED, Outcome.DEAD_LETTERED}
        is_dropped = marker.outcome is Outcome.EXPIRED and not self._rules_now().dead_letters_expired
        if lease is None and is_by_tracker:
            self._counters.end_confirmed += 1
        elif lease is None or (lease.is_rejected and not is_by_tracker and not is_dropped):
            self._counters.end_unknown += 1
        elif marker.outcome is Outcome.REJECTED or (marker.outcome is Outcome.EXPIRED and not is_dropped):
            self._counters.rejected += 1
            default = "expired" if marker.outcome is Outcome.EXPIRED else ""
            lease.is_rejected, lease.reason, lease.deadline_at_ms = True, marker.reason or default, -1
        else:
            del self.in_flight[message_id]
            name = marker.outcome.name.lower()
            setattr(self._counters, name, getattr(self._counters, name) + 1)

    def _tick(self, marker_offset: int) -> list[Decision]:
        self._counters.ticks += 1
        if marker_offset < self.rules.decide_from_marker_offset:
            return []
        if self._decided_at < self.rules.decide_from_marker_offset:
            # An earlier tracker decided these. All of its ENDs have been read, so these decisions were not carried out.
            self._counters.started += len(self.unconfirmed)
            self.in_flight |= self.unconfirmed
            self.unconfirmed = {}
        due = [(lease.deadline_at_ms, message_id) for message_id, lease in self.in_flight.items()]
        due = sorted(pair for pair in due if pair[0] < self._clock_ms)
        decided = [message_id for _, message_id in due[: self.rules.max_decisions_per_tick]]
        return [self._decide(message_id, marker_offset) for message_id in decided]

    def _decide(self, message_id: MessageId, tick_marker_offset: int) -> Decision:
        lease = self.unconfirmed[message_id] = self.in_flight.pop(message_id)
        self._decided_at = tick_marker_offset
        limit = self._rules_now().max_deliveries
        action, reason = DecisionAction.REDELIVER, lease.reason
        if lease.is_rejected:
            action, reason = DecisionAction.DEAD_LETTER, lease.reason or "rejected"
        elif limit and lease.delivery_count >= limit:
            action, reason = DecisionAction.DEAD_LETTER, f"delivery limit reached: {lease.delivery_count} of {limit}"
            reason += f"; last error: {lease.reason}" if lease.reason else ""
        if action is DecisionAction.DEAD_LETTER:
            self._counters.dead_lettered += 1
        else:
            self._counters.redelivered += 1
        return Decision(
            *message_id,
            lease.delivery_count,
            action,
            self._broker_ms(lease),
            tick_marker_offset,
            self._appended_at_ms,
            lease.start_marker_offset,
            reason,
            not lease.given_back and not lease.is_rejected,
        )


def _splitmix64(value: int) -> int:
    mask = 2**64 - 1
    value = (value + 0x9E3779B97F4A7C15) & mask
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & mask
    value = (value ^ value >> 27) * 0x94D049BB133111EB & mask
    return value ^ value >> 31


def _covered(marker: Marker) -> list[MessageId]:
    return [
        MessageId(marker.queue_partition, message_offset)
        for first, count in marker.ranges
        for message_offset in range(first, first + count)
    ]
