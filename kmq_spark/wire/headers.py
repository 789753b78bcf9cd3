"""
The headers that kmq-spark writes on messages and dead letters.

Rule 1: all values are UTF-8 text, so that any Kafka tool shows them.
Rule 2: headers of others are kept as they are: order, repeats and null values.
Rule 3: headers are untrusted; what cannot be read counts as absent.
Rule 4: pure functions on lists of `(name, value)`; of a repeated name the last counts, as with Kafka's `lastHeader`.

Source: the `__dlq.errors.*` names are those of Kafka's share groups (KIP-1191): tools written for them read ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kmq_spark.core.markers import MAX_DELIVERY_COUNT, MAX_MESSAGE_OFFSET, MAX_QUEUE_PARTITION, MessageId

if TYPE_CHECKING:
    from collections.abc import Iterable

Headers = list[tuple[str, bytes | None]]

PREFIX = "kmq-"
DELIVERY_COUNT = "kmq-delivery-count"
"""Deliveries so far."""
ORIGIN = "kmq-origin"
"""`partition:offset` of the first copy; the same on every later one."""
PREVIOUS = "kmq-previous"
"""`partition:offset` of the copy that this one follows: the link by which a message's story is told."""
FIRST_SENT_MS = "kmq-first-sent-ms"
"""Append time of the first copy, epoch milliseconds."""
ATTEMPTS_MS = "kmq-attempts-ms"
"""Append times of the copies before this one, oldest first, the last `MAX_ATTEMPTS_KEPT`, comma-separated."""
QUEUE = "kmq-queue"
"""Logical queue, where several share a topic."""
GROUP = "kmq-group"
"""Group of consumers that a copy is meant for, where a topic has several: the others pass it over."""
DELAY_MS = "kmq-delay-ms"
"""Not to be handed out before its append time and this many milliseconds."""
NOT_BEFORE_MS = "kmq-not-before-ms"
"""Not to be handed out before this instant, epoch milliseconds."""
TTL_MS = "kmq-ttl-ms"
"""Not to be handed out after the append time of the first copy and this many milliseconds."""
EXPIRES_AT_MS = "kmq-expires-at-ms"
"""Not to be handed out after this instant, epoch milliseconds."""
SILENT_COUNT = "kmq-silent-count"
"""Deliveries that ended without a word: the lease ran out, as it does when a handler takes its process down."""
MAX_DELIVERIES = "kmq-max-deliveries"
"""The queue's limit of deliveries, beside a `SILENT_COUNT`: how many are left decides how it is handed out."""

DLQ_PREFIX = "__dlq.errors."
DLQ_TOPIC = "__dlq.errors.topic"
DLQ_PARTITION = "__dlq.errors.partition"
DLQ_OFFSET = "__dlq.errors.offset"
DLQ_GROUP = "__dlq.errors.group"
DLQ_DELIVERY_COUNT = "__dlq.errors.delivery.count"
DLQ_MESSAGE = "__dlq.errors.message"

MAX_ATTEMPTS_KEPT = 20
"""Attempts told by time: enough to see a pattern, bounded where deliveries are not."""

_MAX_DIGITS = 19

_ENDS_WITH_DEATH = frozenset(
    {
        # What was counted and timed starts again.
        *(DELIVERY_COUNT, ATTEMPTS_MS, PREVIOUS, SILENT_COUNT, MAX_DELIVERIES),
        # Whoever redrives wants it handed out, and now: its time was before its death, and a TTL would end it at once.
        *(DELAY_MS, NOT_BEFORE_MS, TTL_MS, EXPIRES_AT_MS),
        # Of the group that the dead letter goes back to, which its redriver names.
        GROUP,
    }
)
"""Headers of ours that a redriven message has not got."""


class Death(NamedTuple):
    """
    What the headers of a dead letter tell.

    Attributes:
        topic: Topic of the copy that was delivered last; empty where the headers do not say: no dead letter of ours.
        source: Where that copy lies.
        origin: Where the first copy lies, if it is known.
        reason: Why.
        delivery_count: Deliveries altogether.
        first_sent_ms: Append time of the first copy, epoch milliseconds, if it is known.
        attempts_ms: Append times of the copies, oldest first; empty where their payload was gone.
        queue: Logical queue, empty for none.
    """

    topic: str
    source: MessageId | None
    origin: MessageId | None
    reason: str
    delivery_count: int
    first_sent_ms: int | None
    attempts_ms: tuple[int, ...]
    queue: str


def death_of(headers: Iterable[tuple[str, bytes | None]] | None) -> Death:
    """
    Read the headers of a dead letter.

    Args:
        headers: Of any record of a dead-letter topic; what cannot be read counts as absent.
    """
    headers = list(headers or ())
    source = b"%s:%s" % (_last(headers, DLQ_PARTITION) or b"", _last(headers, DLQ_OFFSET) or b"")
    return Death(
        topic=_text(_last(headers, DLQ_TOPIC)),
        source=_place(source),
        origin=_place(_last(headers, ORIGIN)),
        reason=_text(_last(headers, DLQ_MESSAGE)),
        delivery_count=_number(_last(headers, DLQ_DELIVERY_COUNT)) or 0,
        first_sent_ms=_number(_last(headers, FIRST_SENT_MS)),
        attempts_ms=tuple(_numbers(_last(headers, ATTEMPTS_MS))),
        queue=_text(_last(headers, QUEUE)),
    )


def delivery_count_of(headers: Iterable[tuple[str, bytes | None]] | None) -> int:
    """
    Return how often a message was delivered before.

    Args:
        headers: As Kafka's client gives them, None for none.

    Returns:
        Deliveries so far; 0 where the header is absent or unreadable. One more is a count that a START may carry.
    """
    return min(_number(_last(headers, DELIVERY_COUNT)) or 0, MAX_DELIVERY_COUNT - 1)


def silent_count_of(headers: Iterable[tuple[str, bytes | None]] | None) -> int:
    """Return how many deliveries of a message ended without a word; 0 where the header is absent or unreadable."""
    return min(_number(_last(headers, SILENT_COUNT)) or 0, MAX_DELIVERY_COUNT - 1)


def first_sent_ms_of(headers: Iterable[tuple[str, bytes | None]] | None, appended_at_ms: int) -> int | None:
    """Return the append time of a message's first copy, epoch milliseconds, from any copy; None where unknown."""
    first_sent_ms = _number(_last(headers, FIRST_SENT_MS))
    return first_sent_ms if first_sent_ms is not None or appended_at_ms < 0 else appended_at_ms


def expires_at_ms_of(headers: Iterable[tuple[str, bytes | None]] | None, appended_at_ms: int) -> int | None:
    """
    Return when a message's time to live is over.

    Args:
        headers: Of any of its copies.
        appended_at_ms: Append time of that copy, epoch milliseconds; negative where unknown.

    Returns:
        Epoch milliseconds on the broker's clock, the earlier one where two headers name an instant; None for never. A
        time to live counts from the append time of the first copy on, which later copies carry.
    """
    headers = list(headers or ())
    instants = [_number(_last(headers, EXPIRES_AT_MS))]
    ttl_ms, first_sent_ms = _number(_last(headers, TTL_MS)), first_sent_ms_of(headers, appended_at_ms)
    if ttl_ms is not None and first_sent_ms is not None:
        instants.append(first_sent_ms + ttl_ms)
    return min((instant for instant in instants if instant is not None), default=None)


def redelivery_headers(
    headers: Iterable[tuple[str, bytes | None]] | None,
    *,
    delivery_count: int,
    queue_partition: int,
    message_offset: int,
    sent_at_ms: int,
    is_silent: bool = False,
    group: str = "",
    max_deliveries: int = 0,
) -> Headers:
    """
    Return the headers of the next copy of a message.

    Args:
        headers: Of the copy that was delivered last.
        delivery_count: Deliveries so far, that one included.
        queue_partition: Where that copy lies.
        message_offset: Where that copy lies.
        sent_at_ms: Its append time, epoch milliseconds; negative where unknown.
        is_silent: Whether that delivery ended without a word.
        group: Group of consumers that the copy is meant for; empty leaves that as it was.
        max_deliveries: The queue's limit of deliveries, 0 for none; told where one of them ended without a word.

    Returns:
        Headers of others as they were, then ours. Origin and first-sent time are set once and then kept; a delay is
        over, so its headers are gone.
    """
    headers = [(name, value) for name, value in headers or () if name not in {DELAY_MS, NOT_BEFORE_MS, MAX_DELIVERIES}]
    ours = {DELIVERY_COUNT: str(delivery_count), **_history(headers, queue_partition, message_offset, sent_at_ms)}
    silent_count = silent_count_of(headers)
    if is_silent:
        ours[SILENT_COUNT] = str(silent_count + 1)
    if max_deliveries and (is_silent or silent_count):
        ours[MAX_DELIVERIES] = str(max_deliveries)
    if group:
        ours[GROUP] = group
    return _replaced(headers, ours)


def dead_letter_headers(
    headers: Iterable[tuple[str, bytes | None]] | None,
    *,
    source_topic: str,
    group: str,
    delivery_count: int,
    queue_partition: int,
    message_offset: int,
    sent_at_ms: int,
    reason: str,
) -> Headers:
    """
    Return the headers of a dead letter.

    Args:
        headers: Of the copy that was delivered last.
        source_topic: Topic of that copy.
        group: Consumer group that could not handle it.
        delivery_count: Deliveries so far, that one included.
        queue_partition: Where that copy lies.
        message_offset: Where that copy lies.
        sent_at_ms: Its append time, epoch milliseconds; negative where unknown.
        reason: Why, free text.

    Returns:
        Headers of others as they were, then those of a redelivery, then the six of Kafka's share groups.

    Source: KIP-1191.
    """
    headers = list(headers or ())
    ours = {
        DELIVERY_COUNT: str(delivery_count),
        **_history(headers, queue_partition, message_offset, sent_at_ms),
        DLQ_TOPIC: source_topic,
        DLQ_PARTITION: str(queue_partition),
        DLQ_OFFSET: str(message_offset),
        DLQ_GROUP: group,
        DLQ_DELIVERY_COUNT: str(delivery_count),
        DLQ_MESSAGE: reason,
    }
    return _replaced(headers, ours)


def redrive_headers(headers: Iterable[tuple[str, bytes | None]] | None, *, group: str = "") -> Headers:
    """
    Return the headers of a dead letter that goes back to its queue.

    Args:
        headers: Of the dead letter.
        group: Group of consumers that it goes back to; empty for the one that a queue has by itself.

    Returns:
        Without what told of its death, of its time and of its end (TTL): the count starts again, origin and first-sent
        time stay.
    """
    kept = [
        (name, value)
        for name, value in headers or ()
        if name not in _ENDS_WITH_DEATH and not name.startswith(DLQ_PREFIX)
    ]
    return _replaced(kept, {GROUP: group}) if group else kept


def _history(headers: Headers, queue_partition: int, message_offset: int, sent_at_ms: int) -> dict[str, str]:
    """Return where a message began and when its copies were sent."""
    earlier = _numbers(_last(headers, ATTEMPTS_MS))
    attempts = [*earlier, sent_at_ms] if sent_at_ms >= 0 else earlier
    previous = f"{queue_partition}:{message_offset}"
    history = {ORIGIN: _origin(_last(headers, ORIGIN)) or previous, PREVIOUS: previous}
    first_sent_ms = _number(_last(headers, FIRST_SENT_MS))
    if first_sent_ms is None and sent_at_ms >= 0:
        first_sent_ms = sent_at_ms
    if first_sent_ms is not None:
        history[FIRST_SENT_MS] = str(first_sent_ms)
    if attempts:
        history[ATTEMPTS_MS] = ",".join(map(str, attempts[-MAX_ATTEMPTS_KEPT:]))
    return history


def _replaced(headers: Headers, ours: dict[str, str]) -> Headers:
    """Return *headers* with *ours* at the end, in place of what had their names."""
    kept = [(name, value) for name, value in headers if name not in ours]
    return kept + [(name, text.encode("utf-8", "replace")) for name, text in ours.items()]


def _last(headers: Iterable[tuple[str, bytes | None]] | None, wanted: str) -> bytes | None:
    found = None
    for name, value in headers or ():
        if name == wanted:
            found = value
    return found


def _number(value: bytes | None) -> int | None:
    """Read a number of at least 0; longer ones than an int64 are hostile, and slow to read."""
    return int(value) if value is not None and len(value) <= _MAX_DIGITS and value.isdigit() else None


def _numbers(value: bytes | None) -> list[int]:
    parts = (value or b"")[: (_MAX_DIGITS + 1) * MAX_ATTEMPTS_KEPT].split(b",")
    return [number for part in parts if (number := _number(part)) is not None]


def _text(value: bytes | None) -> str:
    return (value or b"").decode("utf-8", "replace")


def _origin(value: bytes | None) -> str:
    """Return a well-formed origin as text, empty where it is none."""
    place = _place(value)
    return f"{place.queue_partition}:{place.message_offset}" if place is not None else ""


def _place(value: bytes | None) -> MessageId | None:
    """Read `partition:offset`; None where it is none."""
    partition, _, offset = (value or b"").partition(b":")
    queue_partition, message_offset = _number(partition), _number(offset)
    if queue_partition is None or message_offset is None:
        return None
    if queue_partition > MAX_QUEUE_PARTITION or message_offset > MAX_MESSAGE_OFFSET:
        return None
    return MessageId(queue_partition, message_offset)


def read_number(value: bytes | None) -> int | None:
    """Return the number, at least 0, that a header's value holds; None where there is none that can be read."""
    return _number(value)
