"""
The headers that kmq-spark writes on messages and dead letters.

Rule 1: all values are UTF-8 text, so that any Kafka tool can display them.
Rule 2: headers of other programs are kept unchanged, including order, repeated names and null values.
Rule 3: headers are untrusted; a header that cannot be read counts as absent. If a name is repeated, the last value
counts, as with Kafka's `lastHeader`.

Source: the `__dlq.errors.*` names are those of Kafka's share groups (KIP-1191), so tools for those can read these dead
letters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kmq_spark.core.markers import MAX_DELIVERY_COUNT, MAX_ERROR_CHARS, MessageId

if TYPE_CHECKING:
    from collections.abc import Iterable

    Given = Iterable[tuple[str, bytes | None]] | dict[str, bytes | None] | None
    """Headers as the Kafka client returns them, None if there are none; or a dict from `by_name`, for many look-ups."""

Headers = list[tuple[str, bytes | None]]

PREFIX = "kmq-"
DELIVERY_COUNT = "kmq-delivery-count"
"""Number of deliveries so far."""
ORIGIN = "kmq-origin"
"""`partition:offset` of the first copy; the same on every later copy."""
PREVIOUS = "kmq-previous"
"""`partition:offset` of the previous copy; `kmq message` follows these links to show the history of a message."""
FIRST_SENT_MS = "kmq-first-sent-ms"
"""Append time of the first copy, epoch milliseconds."""
ATTEMPTS_MS = "kmq-attempts-ms"
"""Append times of the previous copies, oldest first, at most the last `MAX_ATTEMPTS_KEPT`, comma-separated."""
LOGICAL_QUEUE = "kmq-logical-queue"
"""Logical queue of the message."""
SUBSCRIPTION = "kmq-subscription"
"""Subscription that a copy is intended for; consumers of the others skip it."""
DELAY_MS = "kmq-delay-ms"
"""The message is not handed out before its append time plus this number of milliseconds."""
NOT_BEFORE_MS = "kmq-not-before-ms"
"""The message is not handed out before this instant, epoch milliseconds."""
TTL_MS = "kmq-ttl-ms"
"""The message expires at the append time of its first copy plus this number of milliseconds."""
EXPIRES_AT_MS = "kmq-expires-at-ms"
"""The message expires at this instant, epoch milliseconds."""
SILENT_COUNT = "kmq-silent-count"
"""Number of silent deliveries: the lease ran out without a release, as happens when a handler crashes its process."""
MAX_DELIVERIES = "kmq-max-deliveries"
"""The queue's delivery limit, written together with `SILENT_COUNT`. The number of deliveries left decides how a suspect
is handed out."""
LAST_ERROR = "kmq-last-error"
"""Exception text of the last delivery that failed with a text; later silent deliveries do not change it."""
PRODUCER = "kmq-producer"
"""Id of the producer that sent the message, if the producer has an id."""
GENERATION = "kmq-generation"
"""Generation of that producer: the number of its start; the first is 1."""
SEQUENCE = "kmq-sequence"
"""Sequence number of the message among all messages that the producer committed; the first is 1, without gaps."""

TOPIC_ID = "kmq-topic-id"
"""Of the own record of a redrive: id of the dead-letter topic to whose letters the ENDs behind it belong."""

DLQ_PREFIX = "__dlq.errors."
DLQ_TOPIC = "__dlq.errors.topic"
DLQ_PARTITION = "__dlq.errors.partition"
DLQ_OFFSET = "__dlq.errors.offset"
DLQ_GROUP = "__dlq.errors.group"
DLQ_DELIVERY_COUNT = "__dlq.errors.delivery.count"
DLQ_MESSAGE = "__dlq.errors.message"

MAX_ATTEMPTS_KEPT = 20
"""Largest number of append times in `ATTEMPTS_MS`: enough to see a pattern, and bounded if deliveries are unlimited."""

RECORD_BYTES = 64
"""What a record takes beside key, value and headers, at most."""

_MAX_DIGITS = 19

_ENDS_WITH_DELIVERY = frozenset({DELAY_MS, NOT_BEFORE_MS, MAX_DELIVERIES})
"""Headers that are not copied to a redelivered copy: the delay is over, and the limit is written with its new value."""

_OF_DELIVERIES = frozenset(
    {
        *(DELIVERY_COUNT, ATTEMPTS_MS, ORIGIN, PREVIOUS, FIRST_SENT_MS, SILENT_COUNT, MAX_DELIVERIES, LAST_ERROR),
        *(SUBSCRIPTION, DELAY_MS, NOT_BEFORE_MS, TTL_MS, EXPIRES_AT_MS),
    }
)
"""Headers that a redelivery reads or changes. A message of a plain producer has none of them."""

_ENDS_WITH_DEATH = frozenset(
    {
        # Counts and times start again.
        *(DELIVERY_COUNT, ATTEMPTS_MS, PREVIOUS, SILENT_COUNT, MAX_DELIVERIES, LAST_ERROR),
        # A redriven message is to be handed out now: its delay is over, and a TTL would expire it at once.
        *(DELAY_MS, NOT_BEFORE_MS, TTL_MS, EXPIRES_AT_MS),
        # The redrive sets the subscription that the message is sent back to.
        SUBSCRIPTION,
    }
)
"""Headers of kmq-spark that a redriven message does not have."""


def size_of(key: bytes | None, value: bytes | None, headers: Iterable[tuple[str, bytes | None]] | None) -> int:
    """Return the size of a message: the bytes of its key, value and headers."""
    return len(key or b"") + len(value or b"") + header_bytes(headers)


def header_bytes(headers: Iterable[tuple[str, bytes | None]] | None) -> int:
    """Return the size of headers: the bytes of their names and values."""
    return sum([len(name) + len(value or b"") for name, value in headers or ()])


def by_name(headers: Iterable[tuple[str, bytes | None]] | None) -> dict[str, bytes | None]:
    """Return headers by name; if a name is repeated, the last value."""
    return dict(headers or ())


def text_of(headers: Given, name: str) -> str:
    """Return the text of a header; empty if it is absent."""
    return (_last(headers, name) or b"").decode("utf-8", "replace")


def place_of(headers: Given, name: str) -> MessageId | None:
    """Return the partition and offset that a header contains; None if it is absent or unreadable."""
    return MessageId.parse(_last(headers, name))


def delivery_count_of(headers: Given) -> int:
    """Return the number of deliveries of a message so far; limited, so that one more is valid in a START."""
    return min(read_number(_last(headers, DELIVERY_COUNT)) or 0, MAX_DELIVERY_COUNT - 1)


def silent_count_of(headers: Given) -> int:
    """Return the number of silent deliveries of a message; 0 if the header is absent or unreadable."""
    return min(read_number(_last(headers, SILENT_COUNT)) or 0, MAX_DELIVERY_COUNT - 1)


def last_error_of(headers: Given) -> str:
    """Return the exception text of the last delivery that failed with a text; empty if there is none."""
    return text_of(headers, LAST_ERROR)[:MAX_ERROR_CHARS]


def first_sent_ms_of(headers: Given, appended_at_ms: int) -> int | None:
    """Return the append time of a message's first copy, epoch milliseconds, from any copy; None if unknown."""
    first_sent_ms = read_number(_last(headers, FIRST_SENT_MS))
    return first_sent_ms if first_sent_ms is not None or appended_at_ms < 0 else appended_at_ms


def expires_at_ms_of(headers: Given, appended_at_ms: int) -> int | None:
    """
    Return when a message expires, epoch milliseconds, from any copy and its append time (negative if unknown).

    The earlier instant counts if both headers are present; None if the message never expires. A TTL counts from the
    append time of the first copy, which later copies carry in a header.
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
    subscription: str = "",
    max_deliveries: int = 0,
    decided_at_ms: int = 2**63 - 1,
    last_error: str = "",
) -> Headers:
    """
    Return the headers of the next copy of a message, from headers, place and append time (negative if unknown) of the
    copy that was delivered last.

    Headers of other programs are unchanged, then come those of kmq-spark. Origin and first-sent time are set once and
    then kept. Delay headers are removed because the delay is over. Exception: `NOT_BEFORE_MS` is kept if
    *decided_at_ms* (append time of the TICK) has not reached it, because the broker's clock was set back while the
    message waited. *max_deliveries*, the queue's limit, is written if a delivery was silent. An empty *subscription* or
    *last_error* does not change its header.
    """
    given = list(headers or ())
    known = by_name(given)
    ours = {DELIVERY_COUNT: b"%d" % delivery_count}
    _add_history(ours, known, queue_partition, message_offset, sent_at_ms)
    if is_silent:
        ours[SILENT_COUNT] = b"%d" % (silent_count_of(known) + 1) if SILENT_COUNT in known else b"1"
    if max_deliveries and (is_silent or SILENT_COUNT in known):
        ours[MAX_DELIVERIES] = b"%d" % max_deliveries
    if last_error:
        ours[LAST_ERROR] = _bytes(last_error)
    if subscription:
        ours[SUBSCRIPTION] = _bytes(subscription)
    if not _ENDS_WITH_DELIVERY.isdisjoint(known):
        is_early = (read_number(known.get(NOT_BEFORE_MS)) or 0) > decided_at_ms
        given = [
            (name, value)
            for name, value in given
            if name not in _ENDS_WITH_DELIVERY or (is_early and name == NOT_BEFORE_MS)
        ]
    return _replaced(given, ours)


class CommonHeaders:
    """What the first copies of a run of messages have in common in their headers, made once."""

    def __init__(
        self,
        *,
        delivery_count: int,
        queue_partition: int,
        is_silent: bool = False,
        subscription: str = "",
        max_deliveries: int = 0,
        last_error: str = "",
    ) -> None:
        common = redelivery_headers(
            None, delivery_count=delivery_count, queue_partition=queue_partition, message_offset=0, sent_at_ms=-1,
            is_silent=is_silent, subscription=subscription, max_deliveries=max_deliveries, last_error=last_error,
        )  # fmt: skip
        own = (ORIGIN, PREVIOUS)
        self._before = [header for header in common if header[0] == DELIVERY_COUNT]
        self._after = [header for header in common if header[0] not in (DELIVERY_COUNT, *own)]
        self._queue_partition = queue_partition
        self._sent_at_ms = -1
        self._times: Headers = []

    def of_copy(self, headers: Headers | None, message_offset: int, sent_at_ms: int) -> Headers | None:
        """
        Return what `redelivery_headers` returns for a message that has no header of an earlier delivery.

        None if the message has a header that a redelivery reads or changes.
        """
        for name, _ in headers or ():
            if name in _OF_DELIVERIES:
                return None
        if sent_at_ms != self._sent_at_ms:  # messages of one produce batch have the same append time
            sent_at = b"%d" % sent_at_ms
            self._sent_at_ms = sent_at_ms
            self._times = [(FIRST_SENT_MS, sent_at), (ATTEMPTS_MS, sent_at)] if sent_at_ms >= 0 else []
        place = b"%d:%d" % (self._queue_partition, message_offset)
        return [
            *(headers or ()), *self._before, (ORIGIN, place), (PREVIOUS, place), *self._times, *self._after
        ]  # fmt: skip


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
    Return the headers of a dead letter: those of a redelivery, then the six headers of Kafka's share groups (KIP-1191).

    *source_topic* is the topic of the copy that was delivered last, *group* the consumer group that could not process
    it; the others are as for `redelivery_headers`.
    """
    given = list(headers or ())
    ours = {DELIVERY_COUNT: b"%d" % delivery_count}
    _add_history(ours, by_name(given), queue_partition, message_offset, sent_at_ms)
    ours |= {
        DLQ_TOPIC: _bytes(source_topic),
        DLQ_PARTITION: b"%d" % queue_partition,
        DLQ_OFFSET: b"%d" % message_offset,
        DLQ_GROUP: _bytes(group),
        DLQ_DELIVERY_COUNT: b"%d" % delivery_count,
        DLQ_MESSAGE: _bytes(reason),
    }
    return _replaced(given, ours)


def redrive_headers(headers: Iterable[tuple[str, bytes | None]] | None, *, subscription: str = "") -> Headers:
    """
    Return the headers of a dead letter that is sent back to its queue, or to one subscription of it.

    Those of the dead letter, of counts, delays and TTL are left out: the delivery count starts again. Origin and
    first-sent time are kept.
    """
    kept = [
        (name, value)
        for name, value in headers or ()
        if name not in _ENDS_WITH_DEATH and not name.startswith(DLQ_PREFIX)
    ]
    return _replaced(kept, {SUBSCRIPTION: _bytes(subscription)}) if subscription else kept


def _add_history(
    ours: dict[str, bytes], known: dict[str, bytes | None], queue_partition: int, message_offset: int, sent_at_ms: int
) -> None:
    """Add the origin of a message and the append times of its copies."""
    previous = b"%d:%d" % (queue_partition, message_offset)
    sent_at = b"%d" % sent_at_ms if sent_at_ms >= 0 else b""
    # Most messages have none of these headers, so avoid parsing.
    origin = MessageId.parse(known[ORIGIN]) if ORIGIN in known else None
    ours[ORIGIN] = b"%d:%d" % origin if origin is not None else previous
    ours[PREVIOUS] = previous
    first_sent_ms = read_number(known.get(FIRST_SENT_MS))
    first_sent = b"%d" % first_sent_ms if first_sent_ms is not None else sent_at
    if first_sent:
        ours[FIRST_SENT_MS] = first_sent
    attempts = [b"%d" % each for each in numbers_of(known[ATTEMPTS_MS])] if ATTEMPTS_MS in known else []
    if sent_at:
        attempts.append(sent_at)
    if attempts:
        ours[ATTEMPTS_MS] = b",".join(attempts[-MAX_ATTEMPTS_KEPT:])


def _replaced(headers: Headers, ours: dict[str, bytes]) -> Headers:
    """Return *headers* with *ours* appended; headers with the same names are removed."""
    kept: Headers = [header for header in headers if header[0] not in ours]
    kept.extend(ours.items())
    return kept


def _last(headers: Given, wanted: str) -> bytes | None:
    return (headers if isinstance(headers, dict) else by_name(headers)).get(wanted)


def read_number(value: bytes | None) -> int | None:
    """Return the number in a header value; None if it is none, or has more digits than an int64: slow to parse."""
    return int(value) if value is not None and len(value) <= _MAX_DIGITS and value.isdigit() else None


def numbers_of(value: bytes | None) -> list[int]:
    """Return the numbers in a header value, comma-separated; those that cannot be read are left out."""
    parts = (value or b"")[: (_MAX_DIGITS + 1) * MAX_ATTEMPTS_KEPT].split(b",")
    return [number for part in parts if (number := read_number(part)) is not None]


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")
