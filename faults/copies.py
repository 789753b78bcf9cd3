"""
What a copy or a dead letter must be, byte for byte, given the message that it follows and what was decided about it.

Rule 1: the whole record is compared: key, value, the headers of others in their order, and each `kmq-` and
`__dlq.errors.` header with the value that docs/internals/protocol.md gives it. A missing one is as wrong as a new one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from faults.evidence import Violation
from faults.topics import Record
from kmq_spark.wire.headers import (
    ATTEMPTS_MS,
    DELAY_MS,
    DELIVERY_COUNT,
    DLQ_DELIVERY_COUNT,
    DLQ_GROUP,
    DLQ_MESSAGE,
    DLQ_OFFSET,
    DLQ_PARTITION,
    DLQ_TOPIC,
    EXPIRES_AT_MS,
    FIRST_SENT_MS,
    LAST_ERROR,
    MAX_DELIVERIES,
    NOT_BEFORE_MS,
    ORIGIN,
    PREVIOUS,
    SILENT_COUNT,
    TTL_MS,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from faults.oracle import Decided

COUNTS = frozenset({DELIVERY_COUNT, SILENT_COUNT, DLQ_DELIVERY_COUNT})
"""Headers whose values are I6; the others are I11."""

ATTEMPTS_KEPT, REASON_CHARS, FOREVER_MS = 20, 1_000, 2**62


def expires_at_ms(record: Record) -> int:
    """Return when a message's time to live is over, by the broker's clock; very late where it has none."""
    ttl_ms, instant = record.number(TTL_MS), record.number(EXPIRES_AT_MS)
    expiry_ms = FOREVER_MS if ttl_ms is None else _first_sent_ms(record) + ttl_ms
    return expiry_ms if instant is None else min(instant, expiry_ms)


def time_to_live_ms(record: Record) -> int:
    """Return a message's time to live, from the append time of its first copy, milliseconds."""
    return expires_at_ms(record) - _first_sent_ms(record)


def _first_sent_ms(record: Record) -> int:
    first_sent_ms = record.number(FIRST_SENT_MS)
    return record.at_ms if first_sent_ms is None else first_sent_ms


def due_at_ms(record: Record) -> int:
    """Return before which instant a first copy is not to be handed out, by the broker's clock; 0 for none."""
    delay_ms = record.number(DELAY_MS)
    return max(0 if delay_ms is None else record.at_ms + delay_ms, record.number(NOT_BEFORE_MS) or 0)


def size_of(record: Record) -> int:
    """Return the bytes of a record's key, value and headers."""
    headers = sum(len(name) + len(value or b"") for name, value in record.headers)
    return len(record.key or b"") + len(record.value or b"") + headers


def copy_differences(source: Record, decided: Decided, copy: Record) -> Iterator[Violation]:
    """Yield where a redelivered message is not what it must be."""
    expected, lease = _history(source), decided.lease
    expected[DELIVERY_COUNT] = b"%d" % _deliveries(source, decided)
    silent = source.header(SILENT_COUNT)
    if lease.is_silent:
        expected[SILENT_COUNT] = b"%d" % ((source.number(SILENT_COUNT) or 0) + 1)
    limit = decided.rules.max_deliveries
    if limit and (lease.is_silent or silent is not None):
        expected[MAX_DELIVERIES] = b"%d" % limit
    if lease.reason:
        expected[LAST_ERROR] = lease.reason.encode()
    gone = {DELAY_MS, MAX_DELIVERIES, NOT_BEFORE_MS}
    if (source.number(NOT_BEFORE_MS) or 0) > decided.tick_ms:
        # The broker's clock was set back while the message waited: its time has not come.
        gone.remove(NOT_BEFORE_MS)
    yield from _differences(source, expected, gone, copy)
    if copy.place.queue_partition != source.place.queue_partition:
        yield Violation("I11", f"{copy.place} follows {source.place} into another queue partition")


def letter_differences(
    source: Record | None, decided: Decided, letter: Record, queue: str, reason: str
) -> Iterator[Violation]:
    """Yield where a dead letter is not what it must be; without *source* it is what can be said without the payload."""
    if source is None:
        place = b"%d:%d" % decided.message
        expected = {ORIGIN: place, PREVIOUS: place}
        count, source = decided.lease.count, letter._replace(key=None, value=None, headers=())
    else:
        expected, count = _history(source), _deliveries(source, decided)
    expected |= {
        DELIVERY_COUNT: b"%d" % count,
        DLQ_TOPIC: queue.encode(),
        DLQ_PARTITION: b"%d" % decided.message.queue_partition,
        DLQ_OFFSET: b"%d" % decided.message.message_offset,
        DLQ_GROUP: f"kmq.{queue}".encode(),
        DLQ_DELIVERY_COUNT: b"%d" % count,
    }
    yield from _differences(source, expected, set(), letter)
    said = (letter.header(DLQ_MESSAGE) or b"").decode("utf-8", "replace")
    if said[:REASON_CHARS] != reason:
        yield Violation("I5", f"{letter.place} says {said!r}, and its END {reason!r}")


def _deliveries(source: Record, decided: Decided) -> int:
    """Return the delivery count that a copy or dead letter must have."""
    lease = decided.lease
    # A START that carries no count, as kafka-mq-go's: the copy's own counts.
    return source.delivery_count + 1 if lease.is_silent and lease.count <= source.delivery_count else lease.count


def _history(source: Record) -> dict[str, bytes]:
    """Return the headers of a copy that describe the copies before it."""
    sent_at = b"%d" % source.at_ms
    attempts = [each for each in (source.header(ATTEMPTS_MS) or b"").split(b",") if each]
    return {
        PREVIOUS: b"%d:%d" % source.place,
        ORIGIN: b"%d:%d" % source.origin,
        FIRST_SENT_MS: source.header(FIRST_SENT_MS) or sent_at,
        ATTEMPTS_MS: b",".join([*attempts, sent_at][-ATTEMPTS_KEPT:]),
    }


def _differences(source: Record, ours: dict[str, bytes], gone: set[str], record: Record) -> Iterator[Violation]:
    """Yield where a record is not its source with some headers in place of others."""
    if (record.key, record.value) != (source.key, source.value):
        yield Violation("I11", f"{record.place} differs from {source.place} in key or value")
    kept = [each for each in source.headers if each[0] not in ours and each[0] not in gone]
    found = [each for each in record.headers if each[0] not in ours and each[0] != DLQ_MESSAGE]
    if kept != found:
        changed = {name for name, _ in set(kept) ^ set(found)} or {"their order"}
        for invariant, names in (("I6", changed & COUNTS), ("I11", changed - COUNTS)):
            if names:
                what = f"differs from {source.place} in headers: {', '.join(sorted(names))}"
                yield Violation(invariant, f"{record.place} {what}")
    for name, value in ours.items():
        values = [each for each_name, each in record.headers if each_name == name]
        if values != [value]:
            invariant = "I6" if name in COUNTS else "I11"
            yield Violation(invariant, f"{record.place} has {name} {values!r}, expected {value!r}")
