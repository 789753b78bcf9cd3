"""
Decide for each fetched record whether to deliver it, isolate it, defer it, or skip it.

Rule 1: no clock, no Kafka client. The decision depends on the record's headers, its append time, and the consumer's
logical queue and subscription.
Rule 2: records are taken strictly in order. A batch plan covers a prefix of the fetched records, so that one offset
states what is done. The remaining records wait and are not started.
Rule 3: headers are untrusted. A header that cannot be read counts as absent.

Source: docs/internals/protocol.md, "What a consumer does with a record". KAFKA-17541 for suspects: Kafka's share groups
halve the batch instead.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from kmq_spark.core.markers import MAX_DELIVERY_COUNT, MAX_DUE_AT_MS, Marker, MarkerType
from kmq_spark.core.ranges import cut_ranges
from kmq_spark.wire.headers import (
    DELAY_MS,
    DELIVERY_COUNT,
    EXPIRES_AT_MS,
    FIRST_SENT_MS,
    LOGICAL_QUEUE,
    NOT_BEFORE_MS,
    ORIGIN,
    SILENT_COUNT,
    SUBSCRIPTION,
    TTL_MS,
    expires_at_ms_of,
    read_number,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from confluent_kafka import Message as KafkaMessage

    from kmq_spark.consumer.message import Message

DUE_ROUNDING_MS = 100
"""Due times are rounded up to a multiple of this, so that messages that fall due together share a marker."""

DRAIN_S = 10.0
"""Longest time for which a consumer starts no other messages, so that the held ones are settled before a suspect."""

DEFER_S = 120
"""Deferral of suspects after a drain that was too short, and time for which the consumer does not drain again."""

_READ = frozenset(
    {
        DELAY_MS,
        DELIVERY_COUNT,
        EXPIRES_AT_MS,
        FIRST_SENT_MS,
        LOGICAL_QUEUE,
        NOT_BEFORE_MS,
        ORIGIN,
        SILENT_COUNT,
        SUBSCRIPTION,
        TTL_MS,
    }
)
"""Headers that this module reads."""


class Verdict(Enum):
    """What the consumer does with a record."""

    DELIVER = "deliver"
    ISOLATE = "isolate"
    DEFER = "defer"
    SKIP = "skip"


class Admission(NamedTuple):
    """The verdict on one record. Both instants are epoch milliseconds, broker clock; the second is that of a TTL."""

    verdict: Verdict
    delivery_count: int = 1
    due_at_ms: int = 0
    expires_at_ms: int | None = None


_PLAIN = Admission(Verdict.DELIVER)
SKIPPED = Admission(Verdict.SKIP)


class AdmissionPolicy:
    """The verdicts of a consumer of a logical queue and a subscription; a message is a suspect from *isolate_after*."""

    def __init__(self, logical_queue: str = "", subscription: str = "", isolate_after: int = 0) -> None:
        self._queue = logical_queue.encode()
        self._subscription = subscription.encode()
        self._isolate_after = isolate_after

    @property
    def accepts_plain_records(self) -> bool:
        """Whether a record without headers is delivered: true for a consumer without a logical queue."""
        return not self._queue

    def admit(self, headers: Iterable[tuple[str, bytes | None]] | None, record: Any) -> Admission:  # noqa: ANN401  # a record, or what has its timestamp
        """Return the verdict on a record with these headers."""
        ours = {name: value for name, value in headers or () if name in _READ}
        if not ours:
            return SKIPPED if self._queue else _PLAIN
        # A copy without a name belongs to the subscription without a name. A first copy is for all.
        subscription = ours.get(SUBSCRIPTION) or (b"" if ORIGIN in ours else self._subscription)
        if (ours.get(LOGICAL_QUEUE) or b"") != self._queue or subscription != self._subscription:
            return SKIPPED
        delivery_count = min(read_number(ours.get(DELIVERY_COUNT)) or 0, MAX_DELIVERY_COUNT - 1) + 1
        due_at_ms = _due_at_ms(ours, record)
        if due_at_ms is not None:
            return Admission(Verdict.DEFER, delivery_count, due_at_ms)
        # The tracker writes both headers. A producer can forge them; then the message is delivered alone.
        silent_count = (ORIGIN in ours and read_number(ours.get(SILENT_COUNT))) or 0
        is_suspect = 0 < self._isolate_after <= silent_count
        verdict = Verdict.ISOLATE if is_suspect else Verdict.DELIVER
        return Admission(verdict, delivery_count, expires_at_ms=expires_at_ms_of(ours, record.timestamp()[1]))


def _due_at_ms(ours: Mapping[str, bytes | None], record: KafkaMessage) -> int | None:
    """Return when a delayed message falls due, rounded up; None if it is not delayed."""
    delay_ms, at_ms = read_number(ours.get(DELAY_MS)), read_number(ours.get(NOT_BEFORE_MS))
    if delay_ms is None and at_ms is None:
        return None
    relative_ms = 0 if delay_ms is None else max(0, record.timestamp()[1]) + delay_ms
    due_at_ms = max(relative_ms, at_ms or 0)
    return min(-(-due_at_ms // DUE_ROUNDING_MS) * DUE_ROUNDING_MS, MAX_DUE_AT_MS)


class Turn(Enum):
    """What to do with a suspect that is next in order."""

    ALONE = "alone"
    WAIT = "wait"
    """Wait until nothing is held; the records after it wait too."""
    DEFER = "defer"
    """Defer it, and continue with the other messages."""


class SuspectSchedule:
    """
    Suspects are delivered one at a time, in order, while nothing else is held.

    A suspect is a message whose deliveries repeatedly ended silently, as when a handler kills its process. Such a crash
    also costs a delivery of every other message that the process holds. Callers pass *now*, monotonic seconds.
    """

    def __init__(self) -> None:
        self._suspect: Message | None = None
        self._draining_since: float | None = None
        self._others_until = float("-inf")

    @property
    def is_held(self) -> bool:
        """Whether a suspect is held."""
        if self._suspect is not None and not self._suspect.is_held:
            self._suspect = None
        return self._suspect is not None

    def is_draining(self, now: float) -> bool:
        """Whether the consumer starts no messages, so that the held ones are settled before a suspect."""
        return self._draining_since is not None and now - self._draining_since < DRAIN_S

    def turn(self, now: float, *, is_empty: bool) -> Turn:
        """Return what to do with a suspect that is next. *is_empty*: nothing is held."""
        if is_empty:
            return Turn.ALONE
        if self._draining_since is not None and not self.is_draining(now):
            # A message that is held for hours must not stop its consumer for hours.
            self._draining_since, self._others_until = None, now + DEFER_S
        return Turn.DEFER if now < self._others_until else Turn.WAIT

    def drain(self, now: float) -> None:
        """Begin a drain, unless one has begun."""
        if self._draining_since is None:
            self._draining_since = now

    def took(self, suspect: Message | None) -> None:
        """Record that a batch was taken: the suspect, or other messages. A drain is over."""
        self._suspect, self._draining_since = suspect, None


class Room(NamedTuple):
    """Room for messages to deliver. *is_empty*: nothing is held; then one message of any size is allowed."""

    max_messages: int
    max_bytes: int
    is_empty: bool


@dataclass(slots=True)
class BatchPlan:
    """
    A prefix of the fetched records, and the indices of those to deliver, to defer until they are due, and to postpone.

    `is_suspect`: the record to deliver is a suspect. `is_waiting`: a suspect is next and waits until nothing is held.
    """

    prefix_length: int = 0
    to_deliver: list[int] = field(default_factory=list)
    deferred: list[int] = field(default_factory=list)
    postponed: list[int] = field(default_factory=list)
    is_suspect: bool = False
    is_waiting: bool = False


def count_that_fits(sizes: Sequence[int], room: Room) -> int:
    """Return how many of the first records fit into the room, if all of them are to be delivered."""
    count = min(len(sizes), room.max_messages)
    if sum(sizes[:count]) <= room.max_bytes:
        return count
    fitting = bisect_right(list(accumulate(sizes[:count])), room.max_bytes)
    return max(fitting, 1) if room.is_empty else fitting


def plan_batch(admissions: Sequence[Admission], sizes: Sequence[int], room: Room, turn: Turn) -> BatchPlan:
    """Return the prefix of the fetched records that forms one batch. *turn*: what to do with a suspect."""
    plan, left_bytes = BatchPlan(), room.max_bytes
    for index, (admission, size) in enumerate(zip(admissions, sizes, strict=True)):
        verdict = admission.verdict
        if verdict is Verdict.DEFER:
            plan.deferred.append(index)
        elif verdict is Verdict.ISOLATE and turn is Turn.DEFER:
            plan.postponed.append(index)
        elif verdict is not Verdict.SKIP:
            is_suspect = verdict is Verdict.ISOLATE
            if is_suspect and not plan.to_deliver and turn is not Turn.ALONE:
                plan.is_waiting = True
                return plan
            is_first = room.is_empty and not plan.to_deliver
            fits = len(plan.to_deliver) < room.max_messages and (size <= left_bytes or is_first)
            if not fits or (plan.to_deliver and (is_suspect or plan.is_suspect)):
                return plan
            plan.to_deliver.append(index)
            plan.is_suspect = is_suspect
            left_bytes -= size
        plan.prefix_length = index + 1
    return plan


def deferrals(
    records: Sequence[KafkaMessage], admissions: Sequence[Admission], plan: BatchPlan, consumer_id: str
) -> list[Marker]:
    """
    Return the STARTs of the deferred messages: no consumer holds them, and they are delivered later.

    Messages that fall due together share a marker, so 100,000 messages need only a few hundred markers.
    """
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for index in (*plan.deferred, *plan.postponed):
        record, admission = records[index], admissions[index]
        after_ms = 0 if admission.verdict is Verdict.DEFER else DEFER_S * 1_000
        key = (record.partition(), admission.delivery_count, admission.due_at_ms, after_ms)
        groups.setdefault(key, []).append(record.offset())
    return [
        Marker(
            MarkerType.START,
            partition,
            ranges,
            redeliver_after_ms=after_ms,
            delivery_count=delivery_count,
            consumer_id=consumer_id,
            never_handed_out=True,
            due_at_ms=due_at_ms,
        )
        for (partition, delivery_count, due_at_ms, after_ms), offsets in groups.items()
        for ranges in cut_ranges(offsets)
    ]
