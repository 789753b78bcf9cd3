"""
Admission policy: decide for each fetched record whether to deliver it, isolate it, defer it, or skip it.

Rule 1: no clock, no Kafka client. The decision depends on the record's headers, its append time, and the consumer's
logical queue and group.
Rule 2: records are taken strictly in order. A batch plan covers a prefix of the fetched records, so that one offset
states what is done. The remaining records wait and are not started.
Rule 3: a suspect is delivered alone.
Rule 4: headers are untrusted. A header that cannot be read counts as absent.
Rule 5: a batch in which no record has headers is not checked here, unless the consumer has a logical queue.

Source: docs/protocol.md, headers. KAFKA-17541 for suspects: Kafka's share groups halve the batch instead.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kmq_spark.core.markers import MAX_DELIVERY_COUNT, MAX_DUE_AT_MS
from kmq_spark.wire.headers import (
    DELAY_MS,
    DELIVERY_COUNT,
    EXPIRES_AT_MS,
    FIRST_SENT_MS,
    GROUP,
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

DUE_ROUNDING_MS = 100
"""Due times are rounded up to a multiple of this, so that messages that fall due together share a marker."""

_READ = frozenset(
    {DELAY_MS, DELIVERY_COUNT, EXPIRES_AT_MS, FIRST_SENT_MS, GROUP, NOT_BEFORE_MS, ORIGIN, QUEUE}
    | {SILENT_COUNT, TTL_MS}
)
"""Headers that this module reads."""


class Stamped(Protocol):
    """The part of a record that this module uses."""

    def timestamp(self) -> tuple[int, int]:
        """Return the timestamp type, and epoch milliseconds."""


class Verdict(Enum):
    """What the consumer does with a record."""

    DELIVER = "deliver"
    ISOLATE = "isolate"
    DEFER = "defer"
    SKIP = "skip"


class Admission(NamedTuple):
    """
    The verdict on one record.

    Attributes:
        verdict: What the consumer does with it.
        delivery_count: Count of deliveries, including this one.
        due_at_ms: For a deferral: when it falls due, epoch milliseconds, broker clock.
        expires_at_ms: When the message expires, epoch milliseconds, broker clock; None if it has no TTL.
    """

    verdict: Verdict
    delivery_count: int = 1
    due_at_ms: int = 0
    expires_at_ms: int | None = None


_PLAIN = Admission(Verdict.DELIVER)
_NOT_OURS = Admission(Verdict.SKIP)


class AdmissionPolicy:
    """
    The admission policy of a consumer.

    Args:
        queue: Logical queue; empty for the messages without one.
        group: Group of the consumer; empty for the queue's default group.
        isolate_after: Count of silent deliveries after which a message is a suspect; 0 for never.
    """

    def __init__(self, queue: str = "", group: str = "", isolate_after: int = 0) -> None:
        """Store the values. The caller has checked the names."""
        self._queue = queue.encode()
        self._group = group.encode()
        self._isolate_after = isolate_after

    @property
    def accepts_plain_records(self) -> bool:
        """Whether a record without headers is delivered: true for a consumer without a logical queue."""
        return not self._queue

    def admit(self, headers: Iterable[tuple[str, bytes | None]] | None, record: Stamped) -> Admission:
        """
        Return the verdict on a record.

        Args:
            headers: Headers of the record, as Kafka's client returns them; None for none.
            record: The record; provides the append time.
        """
        ours = {name: value for name, value in headers or () if name in _READ}
        if not ours:
            return _NOT_OURS if self._queue else _PLAIN
        # A copy without a group name belongs to the queue's default group. A first copy is for all groups.
        group = ours.get(SUBSCRIPTION) or (b"" if ORIGIN in ours else self._group)
        if (ours.get(LOGICAL_QUEUE) or b"") != self._queue or group != self._group:
            return _NOT_OURS
        delivery_count = min(read_number(ours.get(DELIVERY_COUNT)) or 0, MAX_DELIVERY_COUNT - 1) + 1
        due_at_ms = _due_at_ms(ours, record)
        if due_at_ms is not None:
            return Admission(Verdict.DEFER, delivery_count, due_at_ms)
        # The tracker writes both headers. A producer can forge them; then the message is delivered alone.
        silent_count = (ORIGIN in ours and read_number(ours.get(SILENT_COUNT))) or 0
        expires_at_ms = expires_at_ms_of(ours, record.timestamp()[1])
        is_suspect = 0 < self._isolate_after <= silent_count
        verdict = Verdict.ISOLATE if is_suspect else Verdict.DELIVER
        return Admission(verdict, delivery_count, expires_at_ms=expires_at_ms)


def _due_at_ms(ours: Mapping[str, bytes | None], record: Stamped) -> int | None:
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
    """Deliver it."""
    WAIT = "wait"
    """Wait until nothing is held; the records after it wait too."""
    DEFER = "defer"
    """Defer it, and continue with the other messages."""


class Room(NamedTuple):
    """
    Room for messages to deliver.

    Attributes:
        max_messages: Maximum number of messages.
        max_bytes: Maximum bytes of their values, keys and headers.
        is_empty: Whether nothing is held. If so, one message of any size is allowed.
    """

    max_messages: int
    max_bytes: int
    is_empty: bool


@dataclass(slots=True)
class BatchPlan:
    """
    A prefix of the fetched records, and what to do with each record. The lists contain indexes of records.

    Attributes:
        prefix_length: Length of the prefix; the remaining records wait.
        to_deliver: Records to deliver now.
        deferred: Records to defer until they are due.
        postponed: Suspects to defer because others are held for too long.
        is_suspect: Whether the record to deliver is a suspect.
        is_waiting: Whether a suspect is next and waits until nothing is held.
    """

    prefix_length: int = 0
    to_deliver: list[int] = field(default_factory=list)
    deferred: list[int] = field(default_factory=list)
    postponed: list[int] = field(default_factory=list)
    is_suspect: bool = False
    is_waiting: bool = False


def count_that_fits(sizes: Sequence[int], room: Room) -> int:
    """
    Return how many of the first records fit into the room, if all of them are to be delivered.

    Args:
        sizes: Bytes of each record, see `batch.sizes_of`.
        room: Room for messages.
    """
    count = min(len(sizes), room.max_messages)
    if sum(sizes[:count]) <= room.max_bytes:
        return count
    fitting = bisect_right(list(accumulate(sizes[:count])), room.max_bytes)
    return max(fitting, 1) if room.is_empty else fitting


def plan_batch(admissions: Sequence[Admission], sizes: Sequence[int], room: Room, turn: Turn) -> BatchPlan:
    """
    Return the prefix of the fetched records that forms one batch.

    Args:
        admissions: Verdicts, in fetch order.
        sizes: Bytes of each record, see `batch.sizes_of`.
        room: Room for messages.
        turn: What to do with a suspect.
    """
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
