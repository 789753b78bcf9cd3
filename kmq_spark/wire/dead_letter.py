"""
Dead letters as values: the content of their records, and why one cannot be redriven.

Rule 1: no client, no clock. Records are untrusted; any record gives a value, never an error.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kmq_spark.core.markers import MessageId
from kmq_spark.wire.headers import (
    ATTEMPTS_MS,
    DLQ_DELIVERY_COUNT,
    DLQ_MESSAGE,
    DLQ_OFFSET,
    DLQ_PARTITION,
    DLQ_TOPIC,
    FIRST_SENT_MS,
    LOGICAL_QUEUE,
    ORIGIN,
    by_name,
    numbers_of,
    place_of,
    read_number,
    size_of,
    text_of,
)

if TYPE_CHECKING:
    from kmq_spark.wire.headers import Headers


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """
    One record of a dead-letter topic.

    Attributes:
        partition: Partition of the dead-letter topic.
        offset: Offset in that partition.
        origin: Partition and offset of the message's first copy in the queue topic; None if unknown.
        reason: Why the message was dead-lettered.
        delivery_count: Total number of deliveries.
        first_sent_ms: Append time of the first copy, epoch milliseconds, broker clock; None if unknown.
        attempts_ms: Append times of the copies, oldest first, at most the last 20.
        dead_at_ms: Append time of the dead letter, epoch milliseconds, broker clock.
        logical_queue: Logical queue; empty if none.
        key: Key of the message as it was sent.
        value: Value of the message as it was sent.
        headers: All headers of the record, in order.
        problem: Why the dead letter cannot be redriven; empty if it can.
    """

    partition: int
    offset: int
    origin: MessageId | None
    reason: str
    delivery_count: int
    first_sent_ms: int | None
    attempts_ms: tuple[int, ...]
    dead_at_ms: int
    logical_queue: str
    key: bytes | None
    value: bytes | None
    headers: Headers = field(repr=False)
    problem: str = ""

    @property
    def id(self) -> str:
        """`partition:offset` in the dead-letter topic, as used by `redrive`, `purge` and the command line."""
        return f"{self.partition}:{self.offset}"

    @property
    def size(self) -> int:
        """Size of key, value and headers in bytes."""
        return size_of(self.key, self.value, self.headers)


def dead_letter_of(
    partition: int,
    offset: int,
    *,
    dead_at_ms: int,
    key: bytes | None,
    value: bytes | None,
    headers: Headers,
    queue_topic: str,
) -> DeadLetter:
    """Build a dead letter from a record of a dead-letter topic."""
    known = by_name(headers)
    topic = text_of(known, DLQ_TOPIC)
    source = MessageId.parse(b"%s:%s" % (known.get(DLQ_PARTITION) or b"", known.get(DLQ_OFFSET) or b""))
    attempts_ms = tuple(numbers_of(known.get(ATTEMPTS_MS)))
    problem = ""
    if not topic:
        problem = "no dead letter of ours: it does not say which topic it came from"
    elif topic != queue_topic:
        problem = f"no message of the queue: it was set aside from {topic}"
    elif key is None and value is None and not attempts_ms:
        # The tracker writes the append times of all copies that it read. It read none if the payload was gone, or stays
        # in the queue topic.
        problem = "it has no payload: see its reason"
    return DeadLetter(
        partition=partition,
        offset=offset,
        origin=place_of(known, ORIGIN) or (source if topic == queue_topic else None),
        reason=text_of(known, DLQ_MESSAGE),
        delivery_count=read_number(known.get(DLQ_DELIVERY_COUNT)) or 0,
        first_sent_ms=read_number(known.get(FIRST_SENT_MS)),
        attempts_ms=attempts_ms,
        dead_at_ms=dead_at_ms,
        logical_queue=text_of(known, LOGICAL_QUEUE),
        key=key,
        value=value,
        headers=headers,
        problem=problem,
    )
