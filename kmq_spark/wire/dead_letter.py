"""
Dead letters as values: what their record tells, what keeps one from being sent again, and which ones are meant.

Rule 1: no client, no clock; records are untrusted, so whatever they hold becomes a value.
Rule 2: a filter's parts must all hold; a part that is not given holds always.

Source: SQS' redrive and RabbitMQ's shovel know all or nothing; users of both asked for a filter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kmq_spark.core.markers import MessageId
from kmq_spark.wire.headers import death_of

if TYPE_CHECKING:
    from kmq_spark.wire.headers import Death, Headers


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """
    One record of a dead-letter topic.

    Attributes:
        partition: Of the dead-letter topic.
        offset: In that partition.
        origin: Place of the message's first copy in the queue topic, None where that is not known.
        reason: Why it could not be delivered.
        delivery_count: Deliveries altogether.
        first_sent_ms: Append time of the first copy, epoch milliseconds, broker clock; None where not known.
        attempts_ms: Append times of its copies, oldest first, the last 20.
        dead_at_ms: Append time of the dead letter, epoch milliseconds, broker clock.
        queue: Logical queue, empty for none.
        key: As it was sent.
        value: As it was sent.
        headers: All of the record's, in their order.
        problem: Why it cannot be redriven, empty where it can.
    """

    partition: int
    offset: int
    origin: MessageId | None
    reason: str
    delivery_count: int
    first_sent_ms: int | None
    attempts_ms: tuple[int, ...]
    dead_at_ms: int
    queue: str
    key: bytes | None
    value: bytes | None
    headers: Headers = field(repr=False)
    problem: str = ""

    @property
    def id(self) -> str:
        """`partition:offset` in the dead-letter topic: its name for `redrive`, `purge` and the command line."""
        return f"{self.partition}:{self.offset}"

    @property
    def size(self) -> int:
        """Bytes of key, value and headers."""
        header_bytes = sum(len(name) + len(value or b"") for name, value in self.headers)
        return len(self.key or b"") + len(self.value or b"") + header_bytes


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
    """
    Return what a record of a dead-letter topic tells.

    Args:
        partition: Its partition.
        offset: Its offset.
        dead_at_ms: Its append time, epoch milliseconds, broker clock.
        key: As it lies in the log.
        value: As it lies in the log.
        headers: As they lie in the log.
        queue_topic: Topic of the queue: what died elsewhere is no message of it.
    """
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
        queue=death.queue,
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
    # The tracker tells the times of every copy it has read; it has read none where the payload was gone or stays.
    if not has_payload and not death.attempts_ms:
        return "it has no payload: see its reason"
    return ""
