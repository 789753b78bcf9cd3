"""
Admission policy: decide for each fetched record whether to deliver it, isolate it, defer it, or skip it.

Rule 1: no clock, no Kafka client. The decision depends on the record's headers, its append time, and the consumer's
logical queue and group.
Rule 2: records are taken strictly in order. A portion is a prefix of the fetched records, so that one offset states
what is done. The remaining records wait and are not started.
Rule 3: a suspect is delivered only together with other suspects, and alone in its last `ALONE_DELIVERIES` deliveries.
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
    MAX_DELIVERIES,
    NOT_BEFORE_MS,
    ORIGIN,
    QUEUE,
    SILENT_COUNT,
    TTL_MS,
    expires_at_ms_of,
    read_number,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

DUE_STEP_MS = 100
"""Due times are rounded up to a multiple of this, so that messages that fall due together share a marker."""

ALONE_DELIVERIES = 2
"""
Reserve the last two deliveries of a suspect for isolated processing. One protects it from another message that crashes
the process; the second is spare.
"""

CROWD = 32
"""
Largest group of suspects that are delivered together before that: about the square root of the 1,000 messages that a
worker may hold when it dies.
"""

_READ = frozenset(
    {DELAY_MS, DELIVERY_COUNT, EXPIRES_AT_MS, FIRST_SENT_MS, GROUP, MAX_DELIVERIES, NOT_BEFORE_MS, ORIGIN, QUEUE}
    | {SILENT_COUNT, TTL_MS}
)
"""Headers that this module reads."""


class Stamped(Protocol):
    """The part of a record that this module uses."""

    def timestamp(self) -> tuple[int, int]:
        """Return the timestamp type, and epoch milliseconds."""


class Verdict(Enum):
    """What the consumer does with a record."""

    HAND_OUT = "hand out"
    HAND_OUT_ALONE = "hand out alone"
    DEFER = "defer"
    PASS_OVER = "pass over"  # noqa: S105  # no secret


class Admission(NamedTuple):
    """
    The verdict on one record.

    Attributes:
        verdict: What the consumer does with it.
        delivery_count: Count of deliveries, including this one.
        due_at_ms: For a deferral: when it falls due, epoch milliseconds, broker clock.
        expires_at_ms: When the message expires, epoch milliseconds, broker clock; None if it has no TTL.
        crowd: For a suspect: largest group of suspects with the same value that may be delivered together; 1 for alone.
    """

    verdict: Verdict
    delivery_count: int = 1
    due_at_ms: int = 0
    expires_at_ms: int | None = None
    crowd: int = 1


_PLAIN = Admission(Verdict.HAND_OUT)
_NOT_OURS = Admission(Verdict.PASS_OVER)


class Door:
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
    def is_open(self) -> bool:
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
        group = ours.get(GROUP) or (b"" if ORIGIN in ours else self._group)
        if (ours.get(QUEUE) or b"") != self._queue or group != self._group:
            return _NOT_OURS
        delivery_count = min(read_number(ours.get(DELIVERY_COUNT)) or 0, MAX_DELIVERY_COUNT - 1) + 1
        due_at_ms = _due_at_ms(ours, record)
        if due_at_ms is not None:
            return Admission(Verdict.DEFER, delivery_count, due_at_ms)
        # The tracker writes both headers. A producer can forge them; `Isolation` limits the effect on other messages.
        silent_count = (ORIGIN in ours and read_number(ours.get(SILENT_COUNT))) or 0
        ends_at_ms = expires_at_ms_of(ours, record.timestamp()[1])
        if not 0 < self._isolate_after <= silent_count:
            return Admission(Verdict.HAND_OUT, delivery_count, expires_at_ms=ends_at_ms)
        crowd = crowd_of(delivery_count, read_number(ours.get(MAX_DELIVERIES)) or 0)
        return Admission(Verdict.HAND_OUT_ALONE, delivery_count, expires_at_ms=ends_at_ms, crowd=crowd)


def crowd_of(delivery_count: int, max_deliveries: int) -> int:
    """
    Return how many suspects like this one may be delivered together.

    Args:
        delivery_count: Count of deliveries, including this one.
        max_deliveries: Limit of deliveries; 0 if it is unknown or there is none.

    Returns:
        `CROWD`; or 1 for the last `ALONE_DELIVERIES` deliveries. So a message does not become a dead letter because
        another message crashes the process.
    """
    return CROWD if max_deliveries - delivery_count >= ALONE_DELIVERIES else 1


def _due_at_ms(ours: Mapping[str, bytes | None], record: Stamped) -> int | None:
    """Return when a delayed message falls due, rounded up; None if it is not delayed."""
    delay_ms, at_ms = read_number(ours.get(DELAY_MS)), read_number(ours.get(NOT_BEFORE_MS))
    if delay_ms is None and at_ms is None:
        return None
    relative_ms = 0 if delay_ms is None else max(0, record.timestamp()[1]) + delay_ms
    due_at_ms = max(relative_ms, at_ms or 0)
    return min(-(-due_at_ms // DUE_STEP_MS) * DUE_STEP_MS, MAX_DUE_AT_MS)


class Turn(Enum):
    """What to do with a suspect that is next in order."""

    ALONE = "alone"
    """Deliver it, alone or with other suspects."""
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
class Portion:
    """
    A prefix of the fetched records, and what to do with each record. The lists contain indexes of records.

    Attributes:
        taken_count: Length of the prefix; the remaining records wait.
        handed: Records to deliver now.
        deferred: Records to defer until they are due.
        postponed: Suspects to defer because it is not their turn.
        is_suspect: Whether the records to deliver are suspects.
        is_waiting: Whether a suspect is next and waits until nothing is held.
    """

    taken_count: int = 0
    handed: list[int] = field(default_factory=list)
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


def portion_of(admissions: Sequence[Admission], sizes: Sequence[int], room: Room, turn: Turn) -> Portion:
    """
    Return the prefix of the fetched records that forms one batch.

    Args:
        admissions: Verdicts, in fetch order.
        sizes: Bytes of each record, see `batch.sizes_of`.
        room: Room for messages.
        turn: What to do with a suspect.
    """
    portion, left_bytes = Portion(), room.max_bytes
    for index, (admission, size) in enumerate(zip(admissions, sizes, strict=True)):
        verdict = admission.verdict
        if verdict is Verdict.DEFER:
            portion.deferred.append(index)
        elif verdict is Verdict.HAND_OUT_ALONE and turn is Turn.DEFER:
            portion.postponed.append(index)
        elif verdict is not Verdict.PASS_OVER:
            is_suspect = verdict is Verdict.HAND_OUT_ALONE
            if is_suspect and not portion.handed and turn is not Turn.ALONE:
                portion.is_waiting = True
                return portion
            is_first = room.is_empty and not portion.handed
            fits = len(portion.handed) < room.max_messages and (size <= left_bytes or is_first)
            if not fits or (portion.handed and not _go_together(admissions[portion.handed[-1]], admission, portion)):
                return portion
            portion.handed.append(index)
            portion.is_suspect = is_suspect
            left_bytes -= size
        portion.taken_count = index + 1
    return portion


def _go_together(last: Admission, admission: Admission, portion: Portion) -> bool:
    """Return whether a record may be delivered with the one before it. Suspects need an equal, unfilled `crowd`."""
    if last.verdict is not admission.verdict:
        return False
    return not portion.is_suspect or (last.crowd == admission.crowd and len(portion.handed) < admission.crowd)
