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

from kmq_spark.core.markers import MAX_DELIVERY_COUNT, MAX_ERROR_CHARS, MessageId

if TYPE_CHECKING:
    from collections.abc import Iterable

    Given = Iterable[tuple[str, bytes | None]] | dict[str, bytes | None] | None
    """Headers as Kafka's client gives them, None for none; or `by_name`, where several of them are asked for."""

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
LAST_ERROR = "kmq-last-error"
"""What the handler raised in the last delivery that failed with a text; later silent deliveries leave it."""
PRODUCER = "kmq-producer"
"""Id of the producer that sent the message, where it has one."""
GENERATION = "kmq-generation"
"""Which life of that producer sent it; the first is 1."""
SEQUENCE = "kmq-sequence"
"""Number of the message among all that the producer has committed; the first is 1, without a gap."""

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

_LARGEST_SEQUENCE = 2**62
"""Of generations and sequences; no producer gets there."""

_ENDS_WITH_DELIVERY = frozenset({DELAY_MS, NOT_BEFORE_MS, MAX_DELIVERIES})
"""What a redelivered copy has no more, or anew: a delay is over, the limit is told as it is now."""

_ENDS_WITH_DEATH = frozenset(
    {
        # What was counted and timed starts again.
        *(DELIVERY_COUNT, ATTEMPTS_MS, PREVIOUS, SILENT_COUNT, MAX_DELIVERIES, LAST_ERROR),
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


class Sender(NamedTuple):
    """
    Which producer with an id sent a message.

    Attributes:
        producer_id: Its id.
        generation: Which life of it, from 1.
        sequence: Number of the message among all of that producer, from 1.
    """

    producer_id: str
    generation: int
    sequence: int


def sender_of(headers: Given) -> Sender | None:
    """Return who sent a message, from any copy of it; None where the sender has no id or a header is unreadable."""
    known = headers if isinstance(headers, dict) else by_name(headers)
    producer_id = text_of(known, PRODUCER)
    generation, sequence = read_number(known.get(GENERATION)), read_number(known.get(SEQUENCE))
    if not producer_id or not generation or not sequence or max(generation, sequence) > _LARGEST_SEQUENCE:
        return None
    return Sender(producer_id, generation, sequence)


def is_first_copy(headers: Given) -> bool:
    """Return whether a record of the queue topic is a message as it was sent: no redelivery, and not redriven."""
    known = headers if isinstance(headers, dict) else by_name(headers)
    return ORIGIN not in known


def death_of(headers: Iterable[tuple[str, bytes | None]] | None) -> Death:
    """
    Read the headers of a dead letter.

    Args:
        headers: Of any record of a dead-letter topic; what cannot be read counts as absent.
    """
    known = by_name(headers)
    source = b"%s:%s" % (known.get(DLQ_PARTITION) or b"", known.get(DLQ_OFFSET) or b"")
    return Death(
        topic=text_of(known, DLQ_TOPIC),
        source=MessageId.parse(source),
        origin=place_of(known, ORIGIN),
        reason=text_of(known, DLQ_MESSAGE),
        delivery_count=read_number(known.get(DLQ_DELIVERY_COUNT)) or 0,
        first_sent_ms=read_number(known.get(FIRST_SENT_MS)),
        attempts_ms=tuple(_numbers(known.get(ATTEMPTS_MS))),
        queue=text_of(known, QUEUE),
    )


def by_name(headers: Iterable[tuple[str, bytes | None]] | None) -> dict[str, bytes | None]:
    """Return headers by their names; of a repeated one the last."""
    return dict(headers or ())


def text_of(headers: Given, name: str) -> str:
    """Return what a header says, empty where there is none."""
    return (_last(headers, name) or b"").decode("utf-8", "replace")


def place_of(headers: Given, name: str) -> MessageId | None:
    """Return the place that a header names; None where there is none that can be read."""
    return MessageId.parse(_last(headers, name))


def delivery_count_of(headers: Given) -> int:
    """
    Return how often a message was delivered before.

    Args:
        headers: As Kafka's client gives them, None for none; or by name.

    Returns:
        Deliveries so far; 0 where the header is absent or unreadable. One more is a count that a START may carry.
    """
    return min(read_number(_last(headers, DELIVERY_COUNT)) or 0, MAX_DELIVERY_COUNT - 1)


def silent_count_of(headers: Given) -> int:
    """Return how many deliveries of a message ended without a word; 0 where the header is absent or unreadable."""
    return min(read_number(_last(headers, SILENT_COUNT)) or 0, MAX_DELIVERY_COUNT - 1)


def last_error_of(headers: Given) -> str:
    """Return what the handler raised in the last delivery that failed with a text; empty for nothing."""
    return text_of(headers, LAST_ERROR)[:MAX_ERROR_CHARS]


def first_sent_ms_of(headers: Given, appended_at_ms: int) -> int | None:
    """Return the append time of a message's first copy, epoch milliseconds, from any copy; None where unknown."""
    first_sent_ms = read_number(_last(headers, FIRST_SENT_MS))
    return first_sent_ms if first_sent_ms is not None or appended_at_ms < 0 else appended_at_ms


def expires_at_ms_of(headers: Given, appended_at_ms: int) -> int | None:
    """
    Return when a message's time to live is over.

    Args:
        headers: Of any of its copies.
        appended_at_ms: Append time of that copy, epoch milliseconds; negative where unknown.

    Returns:
        Epoch milliseconds on the broker's clock, the earlier one where two headers name an instant; None for never. A
        time to live counts from the append time of the first copy on, which later copies carry.
    """
    known = headers if isinstance(headers, dict) else by_name(headers)
    instant, ttl_ms = read_number(known.get(EXPIRES_AT_MS)), read_number(known.get(TTL_MS))
    if ttl_ms is None or (first_sent_ms := first_sent_ms_of(known, appended_at_ms)) is None:
        return instant
    return first_sent_ms + ttl_ms if instant is None else min(instant, first_sent_ms + ttl_ms)


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
    decided_at_ms: int = 2**63 - 1,
    last_error: str = "",
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
        decided_at_ms: Append time of the TICK that decided, epoch milliseconds.
        last_error: What the handler raised in that delivery; empty leaves the header of an earlier one.

    Returns:
        Headers of others as they were, then ours. Origin and first-sent time are set once and then kept; a delay is
        over, so its headers are gone, but for an instant that the broker's clock has not reached: it was set back while
        the message waited.
    """
    given = list(headers or ())
    known = by_name(given)
    ours = {DELIVERY_COUNT: b"%d" % delivery_count}
    _tell_history(ours, known, queue_partition, message_offset, sent_at_ms)
    if is_silent:
        ours[SILENT_COUNT] = b"%d" % (silent_count_of(known) + 1) if SILENT_COUNT in known else b"1"
    if max_deliveries and (is_silent or SILENT_COUNT in known):
        ours[MAX_DELIVERIES] = b"%d" % max_deliveries
    if last_error:
        ours[LAST_ERROR] = _bytes(last_error)
    if group:
        ours[GROUP] = _bytes(group)
    if not _ENDS_WITH_DELIVERY.isdisjoint(known):
        is_early = (read_number(known.get(NOT_BEFORE_MS)) or 0) > decided_at_ms
        given = [
            (name, value)
            for name, value in given
            if name not in _ENDS_WITH_DELIVERY or (is_early and name == NOT_BEFORE_MS)
        ]
    return _replaced(given, ours)


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
    given = list(headers or ())
    ours = {DELIVERY_COUNT: b"%d" % delivery_count}
    _tell_history(ours, by_name(given), queue_partition, message_offset, sent_at_ms)
    ours |= {
        DLQ_TOPIC: _bytes(source_topic),
        DLQ_PARTITION: b"%d" % queue_partition,
        DLQ_OFFSET: b"%d" % message_offset,
        DLQ_GROUP: _bytes(group),
        DLQ_DELIVERY_COUNT: b"%d" % delivery_count,
        DLQ_MESSAGE: _bytes(reason),
    }
    return _replaced(given, ours)


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
    return _replaced(kept, {GROUP: _bytes(group)}) if group else kept


def _tell_history(
    ours: dict[str, bytes], known: dict[str, bytes | None], queue_partition: int, message_offset: int, sent_at_ms: int
) -> None:
    """Add where a message began and when its copies were sent."""
    previous = b"%d:%d" % (queue_partition, message_offset)
    sent_at = b"%d" % sent_at_ms if sent_at_ms >= 0 else b""
    # Nearly every message comes without any of these: nothing is to be read then.
    origin = MessageId.parse(known[ORIGIN]) if ORIGIN in known else None
    ours[ORIGIN] = b"%d:%d" % origin if origin is not None else previous
    ours[PREVIOUS] = previous
    first_sent_ms = read_number(known.get(FIRST_SENT_MS))
    first_sent = b"%d" % first_sent_ms if first_sent_ms is not None else sent_at
    if first_sent:
        ours[FIRST_SENT_MS] = first_sent
    attempts = [b"%d" % each for each in _numbers(known[ATTEMPTS_MS])] if ATTEMPTS_MS in known else []
    if sent_at:
        attempts.append(sent_at)
    if attempts:
        ours[ATTEMPTS_MS] = b",".join(attempts[-MAX_ATTEMPTS_KEPT:])


def _replaced(headers: Headers, ours: dict[str, bytes]) -> Headers:
    """Return *headers* with *ours* at the end, in place of what had their names."""
    kept: Headers = [header for header in headers if header[0] not in ours]
    kept.extend(ours.items())
    return kept


def _last(headers: Given, wanted: str) -> bytes | None:
    return (headers if isinstance(headers, dict) else by_name(headers)).get(wanted)


def read_number(value: bytes | None) -> int | None:
    """
    Return the number, at least 0, that a header's value holds; None where there is none that can be read.

    Longer ones than an int64 are hostile, and slow to read.
    """
    return int(value) if value is not None and len(value) <= _MAX_DIGITS and value.isdigit() else None


def _numbers(value: bytes | None) -> list[int]:
    parts = (value or b"")[: (_MAX_DIGITS + 1) * MAX_ATTEMPTS_KEPT].split(b",")
    return [number for part in parts if (number := read_number(part)) is not None]


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")
