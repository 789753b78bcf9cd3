"""
The tracker's rules, one message at a time: the campaign judges markers logs by them, property tests the fold.

Rule 1: no code of the fold. It shares the types of the wire with the product and nothing else.
Rule 2: slow and simple. Where this and `kmq_spark.core.fold` differ, this one is easier to read.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from kmq_spark.core.backoff import BackoffKind
from kmq_spark.core.markers import Marker, MarkerType, MessageId, Outcome, Release
from kmq_spark.core.policy import DEFAULT_RULES, QueueRules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kmq_spark.core.events import LoggedMarker

LONGEST_STEP_MS = 1_000
"""While the broker's clock is behind, a longer gap between two records does not count as time."""

ERROR_CHARS = 300
MOST_DECISIONS_OF_A_TICK = 10_000


@dataclass(slots=True)
class Lease:
    """
    A message in flight.

    Attributes:
        start: Marker offset of its last START.
        deadline_ms: By the clock of the log.
        count: Deliveries so far.
        marker: Marker offset of what set the deadline.
        at_ms: Append time of that marker.
        held_ms: From then on: lease and backoff.
        due_at_ms: Not before this instant of the broker's clock; 0 for none.
        is_given_back: A consumer has said how the delivery ended.
        is_rejected: It waits for its dead letter.
        reason: What the handler raised, or why it was rejected.
    """

    start: int
    deadline_ms: int
    count: int
    marker: int = 0
    at_ms: int = 0
    held_ms: int = 0
    due_at_ms: int = 0
    is_given_back: bool = False
    is_rejected: bool = False
    reason: str = ""

    @property
    def is_silent(self) -> bool:
        """Whether the lease alone ended the delivery."""
        return not (self.is_given_back or self.is_rejected)


class Decided(NamedTuple):
    """What a TICK decides about a message: its lease, the TICK, the rules in force there, and what follows."""

    message: MessageId
    lease: Lease
    tick: int
    tick_ms: int
    rules: QueueRules
    deadline_ms: int
    is_dead: bool
    reason: str


class Oracle:
    """One markers partition."""

    def __init__(
        self,
        rules: QueueRules | None = None,
        *,
        term: int = 0,
        decides: Callable[[MessageId, int], bool] = lambda _message, _tick: True,
    ) -> None:
        self.rules = rules or DEFAULT_RULES
        self.in_flight: dict[MessageId, Lease] = {}
        self.marked: set[MessageId] = set()  # decided in this term, and no END of a tracker read since
        self.counts: Counter[str] = Counter()
        self.clock_ms = self.appended_at_ms = self.next_offset = 0
        self.term, self.term_by, self._decides = term, "", decides
        self._earliest_ms: float = math.inf

    @property
    def behind_ms(self) -> int:
        """How far the broker's clock is behind that of the log."""
        return self.clock_ms - self.appended_at_ms

    def read(self, log: Iterable[LoggedMarker]) -> list[Decided]:
        """Read markers in the order of the log; return what their TICKs decide."""
        return [decided for logged in log for decided in self.take(logged)]

    def take(self, logged: LoggedMarker) -> list[Decided]:
        """Read the next record; return what it decides, which only a TICK does."""
        offset, at_ms, marker = logged
        if offset < self.next_offset:
            self.counts["repeated"] += 1
            return []
        self.next_offset = offset + 1
        self._pass_time(at_ms)
        if marker is None:
            self.counts["unreadable"] += 1
        elif marker.type is MarkerType.RULES:
            self.rules = marker.rules or self.rules
        elif marker.type is MarkerType.TICK:
            return self._tick(offset, marker.term)
        elif marker.type is MarkerType.TERM:
            self._begin_term(marker)
        else:
            for message in covered(marker):
                self._one(message, offset, marker)
        return []

    def _pass_time(self, at_ms: int) -> None:
        if at_ms < 0:
            return  # a record without append time
        passed_ms = at_ms - self.appended_at_ms
        step_ms = passed_ms if 0 <= passed_ms <= LONGEST_STEP_MS else 0
        self.clock_ms, self.appended_at_ms = max(self.clock_ms + step_ms, at_ms), at_ms

    def _one(self, message: MessageId, offset: int, marker: Marker) -> None:
        if is_by_a_tracker(marker):
            self.marked.discard(message)
        if marker.type is MarkerType.START:
            self._start(message, offset, marker)
        elif marker.type is MarkerType.KEEPALIVE:
            self._keep_alive(message, offset, marker)
        else:
            self._end(message, marker)

    def _begin_term(self, marker: Marker) -> None:
        """Forget what an older term has decided: its transactions are over, and their ENDs have been read."""
        if marker.term != self.term:
            self.term, self.term_by, self.marked = marker.term, marker.consumer_id, set()
            self._earliest_ms = self._earliest()

    def _start(self, message: MessageId, offset: int, marker: Marker) -> None:
        self.counts["renewed" if message in self.in_flight else "started"] += 1
        count, is_deferral = max(1, marker.delivery_count), marker.never_handed_out
        lease = self.in_flight[message] = Lease(offset, 0, count - is_deferral, is_given_back=is_deferral)
        rest_ms = 0 if is_deferral else self._backoff_ms(message, count)
        self._hold(lease, offset, marker.redeliver_after_ms, rest_ms, marker.due_at_ms)

    def _hold(self, lease: Lease, offset: int, after_ms: int, rest_ms: int = 0, due_at_ms: int = 0) -> None:
        """Set a deadline: a lease or a delay, not before an instant of the broker's clock, and then the backoff."""
        lease.marker, lease.at_ms, lease.held_ms = offset, self.appended_at_ms, after_ms + rest_ms
        lease.due_at_ms = due_at_ms + rest_ms if due_at_ms else 0
        lease.deadline_ms = max(self.clock_ms + lease.held_ms, lease.due_at_ms + self.behind_ms if due_at_ms else 0)
        self._earliest_ms = min(self._earliest_ms, lease.deadline_ms)

    def _keep_alive(self, message: MessageId, offset: int, marker: Marker) -> None:
        lease = self.in_flight.get(message)
        if lease is None or lease.is_rejected:
            self.counts["keepalive_unknown"] += 1
            return
        self.counts["kept_alive"] += 1
        after_ms, rest_ms = marker.redeliver_after_ms, 0
        is_failed = marker.release is Release.FAILED and not marker.never_handed_out
        if marker.never_handed_out:
            lease.count = max(0, lease.count - 1)
        elif marker.release is not Release.GIVEN_BACK:
            rest_ms = self._backoff_ms(message, lease.count)
        lease.reason = marker.reason[:ERROR_CHARS] if is_failed else ""
        if is_failed and self._is_last(lease.count):
            after_ms = rest_ms = 0  # due at once: it becomes a dead letter
        # A delivery that was given back remains so until the next START.
        lease.is_given_back |= marker.never_handed_out or marker.release is not Release.RENEWED
        self._hold(lease, offset, after_ms, rest_ms)

    def _end(self, message: MessageId, marker: Marker) -> None:
        lease, is_by_tracker = self.in_flight.get(message), is_by_a_tracker(marker)
        is_expired = marker.outcome is Outcome.EXPIRED
        becomes_letter = is_expired and self.rules.dead_letters_expired and not is_by_tracker
        if lease is None:
            self.counts["end_late" if is_by_tracker else "end_unknown"] += 1
        elif lease.is_rejected and not is_by_tracker:
            self.counts["end_unknown"] += 1
        elif marker.outcome is Outcome.REJECTED or becomes_letter:
            self.counts["rejected"] += 1
            lease.is_rejected, lease.reason = True, marker.reason or ("expired" if is_expired else "")
            self._hold(lease, self.next_offset - 1, 0)
            lease.deadline_ms = self._earliest_ms = -1
        else:
            self.counts[marker.outcome.name.lower()] += 1
            del self.in_flight[message]

    def _is_last(self, count: int) -> bool:
        return 0 < self.rules.max_deliveries <= count

    def _earliest(self) -> float:
        return min((each.deadline_ms for message, each in self.unmarked()), default=math.inf)

    def unmarked(self) -> Iterator[tuple[MessageId, Lease]]:
        """Yield the messages in flight that are not decided."""
        return (each for each in self.in_flight.items() if each[0] not in self.marked)

    def _tick(self, offset: int, term: int) -> list[Decided]:
        self.counts["ticks"] += 1
        if not term or term != self.term or self._earliest_ms >= self.clock_ms:
            return []
        due = sorted(
            (lease.deadline_ms, message) for message, lease in self.unmarked() if lease.deadline_ms < self.clock_ms
        )
        found = [
            self._decide(message, offset)
            for _, message in due[:MOST_DECISIONS_OF_A_TICK]
            if self._decides(message, offset)
        ]
        self._earliest_ms = self._earliest()
        return found

    def _decide(self, message: MessageId, tick: int) -> Decided:
        self.marked.add(message)
        lease = replace(self.in_flight[message])
        is_dead, reason = lease.is_rejected or self._is_last(lease.count), lease.reason
        if lease.is_rejected:
            reason = reason or "rejected"
        elif is_dead:
            limit = f"delivery limit reached: {lease.count} of {self.rules.max_deliveries}"
            reason = f"{limit}; last error: {reason}" if reason else limit
        # By the broker's clock, as consumers see it.
        deadline_ms = -1 if lease.is_rejected else lease.deadline_ms - self.behind_ms
        return Decided(message, lease, tick, self.appended_at_ms, self.rules, deadline_ms, is_dead, reason)

    def _backoff_ms(self, message: MessageId, count: int) -> int:
        backoff, count = self.rules.backoff, max(1, count)
        grown_ms = {
            BackoffKind.NONE: 0,
            BackoffKind.CONSTANT: backoff.initial_ms,
            BackoffKind.LINEAR: backoff.initial_ms * count,
            BackoffKind.EXPONENTIAL: backoff.initial_ms << min(count - 1, 62),
        }
        delay_ms = min(grown_ms[backoff.kind], backoff.max_ms)
        share = (_splitmix64(_splitmix64(message.queue_partition << 48 | message.message_offset) + count) >> 11) / 2**53
        return math.ceil(delay_ms - delay_ms * backoff.jitter * share)


def is_by_a_tracker(marker: Marker) -> bool:
    """Return whether a marker is an END that only a tracker writes."""
    if marker.outcome is Outcome.EXPIRED:
        return marker.type is MarkerType.END and marker.term > 0
    return marker.type is MarkerType.END and marker.outcome in {Outcome.REDELIVERED, Outcome.DEAD_LETTERED}


def covered(marker: Marker) -> Iterator[MessageId]:
    """Yield the messages that a marker is about."""
    for first, count in marker.ranges:
        for message_offset in range(first, first + count):
            yield MessageId(marker.queue_partition, message_offset)


def _splitmix64(value: int) -> int:
    value = (value + 0x9E37_79B9_7F4A_7C15) % 2**64
    value = ((value ^ (value >> 30)) * 0xBF58_476D_1CE4_E5B9) % 2**64
    value = ((value ^ (value >> 27)) * 0x94D0_49BB_1331_11EB) % 2**64
    return value ^ (value >> 31)
