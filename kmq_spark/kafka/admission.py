"""
Say what becomes of each fetched record: handed out, handed out alone, deferred, or passed over.

Rule 1: no clock, no client: a record's headers and its append time decide, and who reads.
Rule 2: records are taken strictly in their order: a portion is a prefix of what was fetched, so that one position says
what is done; the rest waits unstarted.
Rule 3: a suspect is handed out alone: nothing is handed out with it.
Rule 4: headers are untrusted; what cannot be read counts as absent.
Rule 5: a record without headers of ours never comes here, unless one of its neighbours has some.

Source: docs/protocol.md, headers; KAFKA-17541 for suspects: Kafka's share groups halve the batch instead.
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
    QUEUE,
    SILENT_COUNT,
    TTL_MS,
    expires_at_ms_of,
    read_number,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

DUE_STEP_MS = 100
"""Due instants are rounded up to this, so that messages of one moment share a marker."""

_READ = frozenset(
    {DELAY_MS, DELIVERY_COUNT, EXPIRES_AT_MS, FIRST_SENT_MS, GROUP, NOT_BEFORE_MS, ORIGIN, QUEUE, SILENT_COUNT, TTL_MS}
)
"""Headers that are read here."""


class Stamped(Protocol):
    """A record, as far as it matters here."""

    def timestamp(self) -> tuple[int, int]:
        """Return the kind of the time stamp, and epoch milliseconds."""


class Verdict(Enum):
    """What becomes of a record."""

    HAND_OUT = "hand out"
    HAND_OUT_ALONE = "hand out alone"
    DEFER = "defer"
    PASS_OVER = "pass over"  # noqa: S105  # no secret


class Admission(NamedTuple):
    """
    The verdict on one record.

    Attributes:
        verdict: What becomes of it.
        delivery_count: Deliveries, the one that it is fetched for included.
        due_at_ms: Of a deferral: when it falls due, epoch milliseconds, broker clock.
        expires_at_ms: When its time to live is over, epoch milliseconds, broker clock; None where it has none.
    """

    verdict: Verdict
    delivery_count: int = 1
    due_at_ms: int = 0
    expires_at_ms: int | None = None


_PLAIN = Admission(Verdict.HAND_OUT)
_NOT_OURS = Admission(Verdict.PASS_OVER)


class Door:
    """
    Which records a consumer takes, and how.

    Args:
        queue: Logical queue; empty for the messages that name none.
        group: Group of the consumer; empty for the one that every queue has.
        isolate_after: Deliveries without a word after which a message is a suspect; 0 for never.
    """

    def __init__(self, queue: str = "", group: str = "", isolate_after: int = 0) -> None:
        """Take the names; they were checked before."""
        self._queue = queue.encode()
        self._group = group.encode()
        self._isolate_after = isolate_after

    @property
    def is_open(self) -> bool:
        """Whether a record without headers is handed out as it is."""
        return not self._queue

    def admit(self, headers: Iterable[tuple[str, bytes | None]] | None, record: Stamped) -> Admission:
        """
        Return the verdict on a record.

        Args:
            headers: Of the record, as Kafka's client gives them, None for none.
            record: For its append time, where one is needed.
        """
        ours = {name: value for name, value in headers or () if name in _READ}
        if not ours:
            return _NOT_OURS if self._queue else _PLAIN
        # A copy without the name of a group is one of the queue's own group; a first copy is for everybody.
        group = ours.get(GROUP) or (b"" if ORIGIN in ours else self._group)
        if (ours.get(QUEUE) or b"") != self._queue or group != self._group:
            return _NOT_OURS
        delivery_count = min(read_number(ours.get(DELIVERY_COUNT)) or 0, MAX_DELIVERY_COUNT - 1) + 1
        due_at_ms = _due_at_ms(ours, record)
        if due_at_ms is not None:
            return Admission(Verdict.DEFER, delivery_count, due_at_ms)
        silent_count = read_number(ours.get(SILENT_COUNT)) or 0
        is_suspect = 0 < self._isolate_after <= silent_count
        verdict = Verdict.HAND_OUT_ALONE if is_suspect else Verdict.HAND_OUT
        return Admission(verdict, delivery_count, expires_at_ms=expires_at_ms_of(ours.items(), record.timestamp()[1]))


def _due_at_ms(ours: Mapping[str, bytes | None], record: Stamped) -> int | None:
    """Return when a delayed message falls due, never early; None where it is not delayed."""
    delay_ms, at_ms = read_number(ours.get(DELAY_MS)), read_number(ours.get(NOT_BEFORE_MS))
    if delay_ms is None and at_ms is None:
        return None
    relative_ms = 0 if delay_ms is None else max(0, record.timestamp()[1]) + delay_ms
    due_at_ms = max(relative_ms, at_ms or 0)
    return min(-(-due_at_ms // DUE_STEP_MS) * DUE_STEP_MS, MAX_DUE_AT_MS)


class Turn(Enum):
    """What is done with a suspect that is the next to be handed out."""

    ALONE = "alone"
    """It is handed out, alone."""
    WAIT = "wait"
    """It waits, with all that comes after it, until nothing is held."""
    DEFER = "defer"
    """It is deferred, the others go on."""


class Room(NamedTuple):
    """
    What may be handed out.

    Attributes:
        max_messages: Most messages.
        max_bytes: Most bytes of their values.
        is_empty: Whether nothing is held: then one message is handed out, however large.
    """

    max_messages: int
    max_bytes: int
    is_empty: bool


@dataclass(slots=True)
class Portion:
    """
    What becomes of the first records of those that were fetched.

    Attributes:
        taken_count: How many it speaks of; the rest waits.
        handed: Which are handed out.
        deferred: Which are deferred until their time.
        postponed: Suspects that are deferred because it is not their turn.
        is_suspect: Whether the one that is handed out is a suspect.
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
    Return how many of the first records fit, where all of them are to be handed out.

    Args:
        sizes: Bytes of each value.
        room: What may be handed out.
    """
    count = min(len(sizes), room.max_messages)
    if sum(sizes[:count]) <= room.max_bytes:
        return count
    fitting = bisect_right(list(accumulate(sizes[:count])), room.max_bytes)
    return max(fitting, 1) if room.is_empty else fitting


def portion_of(admissions: Sequence[Admission], sizes: Sequence[int], room: Room, turn: Turn) -> Portion:
    """
    Cut off what one batch is made of.

    Args:
        admissions: Verdicts, in the order in which the records were fetched.
        sizes: Bytes of each value.
        room: What may be handed out.
        turn: What is done with a suspect.
    """
    portion, left_bytes = Portion(), room.max_bytes
    for index, (admission, size) in enumerate(zip(admissions, sizes, strict=True)):
        verdict = admission.verdict
        if verdict is Verdict.DEFER:
            portion.deferred.append(index)
        elif verdict is Verdict.HAND_OUT_ALONE and turn is Turn.DEFER:
            portion.postponed.append(index)
        elif verdict is Verdict.HAND_OUT_ALONE:
            if not portion.handed and turn is Turn.ALONE:
                portion.handed, portion.is_suspect, portion.taken_count = [index], True, index + 1
            portion.is_waiting = not portion.handed
            return portion
        elif verdict is Verdict.HAND_OUT:
            is_first = room.is_empty and not portion.handed
            if len(portion.handed) >= room.max_messages or (size > left_bytes and not is_first):
                return portion
            portion.handed.append(index)
            left_bytes -= size
        portion.taken_count = index + 1
    return portion
