"""
Dead letters as values: the content of their records, and why one cannot be redriven.

Rule 1: no client, no clock. Records are untrusted; any record gives a value, never an error.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kmq_spark.core.markers import MessageId
from kmq_spark.wire.headers import death_of, size_of

if TYPE_CHECKING:
    from kmq_spark.wire.headers import Death, Headers


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
    death = death_of(headers)
    return DeadLetter(
        partition=partition,
        offset=offset,
        origin=death.origin or (death.source if death.topic == queue_topic else None),
        reason=death.reason,
        delivery_count=death.delivery_count,
        first_sent_ms=death.first_sent_ms,
        attempts_ms=death.attempts_ms,
        dead_at_ms=dead_at_ms,
        logical_queue=death.logical_queue,
        key=key,
        value=value,
        headers=headers,
        problem=_problem(death, queue_topic, has_payload=key is not None or value is not None),
    )


def _problem(death: Death, queue_topic: str, *, has_payload: bool) -> str:
    if not death.topic:
        return "no dead letter of ours: it does not say which topic it came from"
    if death.topic != queue_topic:
        return f"no message of the queue: it was set aside from {death.topic}"
    # The tracker writes the append times of all copies that it read. It read none if the payload was gone, or stays in
    # the queue topic.
    if not has_payload and not death.attempts_ms:
        return "it has no payload: see its reason"
    return ""
