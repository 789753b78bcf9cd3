"""
Say what becomes of each fetched record: handed out, handed out alone, deferred, or passed over.

Rule 1: no clock, no client: a record's headers and its append time decide, and who reads.
Rule 2: records are taken strictly in their order: a portion is a prefix of what was fetched, so that one position says
what is done; the rest waits unstarted.
Rule 3: a suspect is handed out with its like only, and alone once the deliveries that are left are needed for that.
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
"""Due instants are rounded up to this, so that messages of one moment share a marker."""

ALONE_DELIVERIES = 2
"""The last two deliveries of a suspect are isolated: one is enough against a bad neighbour, one is a reserve."""

CROWD = 32
"""Suspects that go together before: about the root of the thousand that a worker that dies may leave behind."""

_READ = frozenset(
    {DELAY_MS, DELIVERY_COUNT, EXPIRES_AT_MS, FIRST_SENT_MS, GROUP, MAX_DELIVERIES, NOT_BEFORE_MS, ORIGIN, QUEUE}
    | {SILENT_COUNT, TTL_MS}
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
        crowd: Of a suspect: how many of the same number may be handed out together, 1 for alone.
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
        # The tracker writes both. A producer may, too: what that costs the others is bounded, see `isolation`.
        silent_count = (ORIGIN in ours and read_number(ours.get(SILENT_COUNT))) or 0
        ends_at_ms = expires_at_ms_of(ours, record.timestamp()[1])
        if not 0 < self._isolate_after <= silent_count:
            return Admission(Verdict.HAND_OUT, delivery_count, expires_at_ms=ends_at_ms)
        crowd = crowd_of(delivery_count, read_number(ours.get(MAX_DELIVERIES)) or 0)
        return Admission(Verdict.HAND_OUT_ALONE, delivery_count, expires_at_ms=ends_at_ms, crowd=crowd)


def crowd_of(delivery_count: int, max_deliveries: int) -> int:
    """
    Return how many suspects like this one may be handed out together.

    Args:
        delivery_count: Deliveries, the one at hand included.
        max_deliveries: Limit of deliveries; 0 where it is not known, or where there is none.

    Returns:
        1 where the deliveries that are left are needed for handing it out alone: it never dies of a neighbour.
    """
    return CROWD if max_deliveries - delivery_count >= ALONE_DELIVERIES else 1


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
    """It is handed out, alone or with its like."""
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
        is_suspect: Whether what is handed out are suspects.
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
    """Return whether a record may be handed out with the one before it: any with any, but suspects with their like."""
    if last.verdict is not admission.verdict:
        return False
    return not portion.is_suspect or (last.crowd == admission.crowd and len(portion.handed) < admission.crowd)
