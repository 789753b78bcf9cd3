"""
The vocabulary of the markers topic: what a marker is, without its bytes.

Rule 1: values only; no clock, no Kafka, no Spark.
Rule 2: two topics are in play, so nothing here is called a bare `offset` or `partition`.

Source: kafka-mq-go `pkg/proto/marker.proto` (V1), extended upward; the ranges and the TICK are ours.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kmq_spark.core.policy import QueueRules

MAX_QUEUE_PARTITION = 32_767
"""Largest queue partition that a marker may name; the packed table keeps 15 bits for it."""

MAX_MESSAGE_OFFSET = 2**48 - 1
"""Largest message offset that a marker may name; the packed table keeps 48 bits for it."""

MAX_MESSAGES_PER_MARKER = 100_000
"""Most messages that one marker may cover: a range of 2**32 offsets is hostile input, not work."""

MAX_REDELIVER_AFTER_MS = 12 * 60 * 60 * 1000
"""Longest lease, 12 hours, as in SQS; a longer one is hostile input or a unit mistaken."""

MAX_DUE_AT_MS = 253_402_300_799_999
"""Last instant that a deferral may name, the end of the year 9999."""

MAX_DELIVERY_COUNT = 2**31 - 1
"""Largest delivery count that is kept; a larger one reads as this."""

MAX_TEXT_CHARS = 1_000
"""Longest reason or consumer id that is kept: both travel on into headers, so a longer one is cut."""

MAX_ERROR_CHARS = 300
"""Longest text of a handler's exception that is kept: it lies beside each message that failed for the last time."""

_PLACE = re.compile(r"([0-9]{1,5}):([0-9]{1,15})")


class MarkerType(IntEnum):
    """What a marker says; the numbers are those on the wire."""

    START = 0
    END = 1
    KEEPALIVE = 2
    TICK = 3
    RULES = 4


class Release(IntEnum):
    """What a KEEPALIVE does to the delivery; the numbers are those on the wire."""

    RENEWED = 0
    """The lease goes on."""
    GIVEN_BACK = 1
    """The delivery ends; the message falls due after `redeliver_after_ms`, without backoff."""
    FAILED = 2
    """The delivery ends; the message falls due after `redeliver_after_ms` and the queue's backoff."""


class Outcome(IntEnum):
    """How a message ended; the numbers are those on the wire."""

    ACKED = 0
    REJECTED = 1
    EXPIRED = 2
    REDELIVERED = 3
    DEAD_LETTERED = 4


class MessageId(NamedTuple):
    """The identity of a message: its place in the queue topic."""

    queue_partition: int
    message_offset: int

    @property
    def text(self) -> str:
        """The form that `parse` reads: `partition:offset`, as in headers and on the command line."""
        return f"{self.queue_partition}:{self.message_offset}"

    @classmethod
    def parse(cls, text: str | bytes | None) -> MessageId | None:
        """Read `partition:offset`; None where it is none, or out of bounds."""
        found = _PLACE.fullmatch(text.decode("latin-1") if isinstance(text, bytes) else text or "")
        if found is None or int(found[1]) > MAX_QUEUE_PARTITION or int(found[2]) > MAX_MESSAGE_OFFSET:
            return None
        return cls(int(found[1]), int(found[2]))


class OffsetRange(NamedTuple):
    """`count` message offsets from `first` on."""

    first: int
    count: int  # type: ignore[assignment]  # hides `tuple.count`, which means nothing for a range


@dataclass(frozen=True, slots=True)
class Marker:
    """
    One record of the markers topic.

    Attributes:
        type: What it says.
        queue_partition: Queue partition of every message covered; -1 on a TICK and on RULES.
        ranges: Message offsets covered, ascending, without overlap; empty on a TICK and on RULES.
        redeliver_after_ms: START, KEEPALIVE: lease in milliseconds from the marker's append time;
            0 on a KEEPALIVE means due at the next TICK (a release).
        delivery_count: START: deliveries of every message covered, this one included, at least 1.
        outcome: END: how it ended.
        reason: END, rejected or dead-lettered: why; KEEPALIVE, FAILED: the handler's exception; free text.
        consumer_id: Who wrote it, free text.
        never_handed_out: KEEPALIVE: a release of messages that no handler saw; START: a deferral, of messages that are
            handed out later. The delivery does not count.
        release: KEEPALIVE: whether it renews the lease or ends the delivery.
        due_at_ms: START of a deferral: no deadline before this instant of the broker's clock, epoch milliseconds; 0 =
            none.
        rules: RULES: the queue's rules from this marker on.
        queue_ends: TICK: end of each partition of the queue topic, from partition 0 on; -1 where it is not known.
        ends_as_of: TICK: marker offset of an earlier TICK, which was in the log before the ends were read.
        is_trusted: False for what only a tracker writes and no tracker of the queue has: counted, and changes nothing.
    """

    type: MarkerType
    queue_partition: int = -1
    ranges: tuple[OffsetRange, ...] = ()
    redeliver_after_ms: int = 0
    delivery_count: int = 1
    outcome: Outcome = Outcome.ACKED
    reason: str = ""
    consumer_id: str = ""
    never_handed_out: bool = False
    release: Release = Release.RENEWED
    due_at_ms: int = 0
    rules: QueueRules | None = None
    is_trusted: bool = True
    queue_ends: tuple[int, ...] = ()
    ends_as_of: int = 0
