"""
What a copy or a dead letter must be, byte for byte, given the message that it follows and the END of that message.

Rule 1: the whole record is compared: key, value, the headers of others in their order, and each `kmq-` and
`__dlq.errors.` header with the value that docs/protocol.md gives it. A missing one is as wrong as a new one.
Rule 2: what cannot be known (the payload was removed) is compared with what a tracker without the payload can say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from faults.protocol import (
    ATTEMPTS_KEPT,
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
    REASON_CHARS,
    SILENT_COUNT,
    TTL_MS,
    number_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from faults.leases import Justified
    from faults.topics import Record

OURS = ("kmq-", "__dlq.errors.")
COUNTS = frozenset({DELIVERY_COUNT, SILENT_COUNT, DLQ_DELIVERY_COUNT})
"""Headers whose values are I6; the others are I11."""

FOREVER_MS = 2**62


class Difference(NamedTuple):
    """Of which invariant, and what."""

    invariant: str
    what: str


def expires_at_ms(record: Record) -> int:
    """Return when a message's time to live is over, by the broker's clock; very late where it has none."""
    ttl_ms, instant = number_of(record.header(TTL_MS)), number_of(record.header(EXPIRES_AT_MS))
    expiry_ms = FOREVER_MS if ttl_ms is None else _first_sent_ms(record) + ttl_ms
    return expiry_ms if instant is None else min(instant, expiry_ms)


def time_to_live_ms(record: Record) -> int:
    """Return a message's time to live, from the append time of its first copy, milliseconds."""
    return expires_at_ms(record) - _first_sent_ms(record)


def _first_sent_ms(record: Record) -> int:
    """Return when the first copy of a message was appended."""
    first_sent_ms = number_of(record.header(FIRST_SENT_MS))
    return record.appended_at_ms if first_sent_ms is None else first_sent_ms


def has_ttl(record: Record) -> bool:
    """Return whether a message has a time to live."""
    return expires_at_ms(record) < FOREVER_MS


def due_at_ms(record: Record) -> int:
    """Return before which instant a first copy is not to be handed out, by the broker's clock; 0 for none."""
    delay_ms, instant = number_of(record.header(DELAY_MS)), number_of(record.header(NOT_BEFORE_MS))
    return max(0 if delay_ms is None else record.appended_at_ms + delay_ms, instant or 0)


def deliveries(record: Record, end: Justified) -> int:
    """Return the delivery count that a copy or dead letter must have."""
    assert end.segment is not None
    count = end.segment.delivery_count
    # A START that carries no count, as kafka-mq-go's: the copy's own counts.
    return record.delivery_count + 1 if end.segment.is_silent and count <= record.delivery_count else count


def copy_differences(source: Record, end: Justified, copy: Record) -> Iterator[Difference]:
    """
    Yield where a redelivered message is not what it must be.

    Args:
        source: The message that it follows.
        end: The tracker's END, justified.
        copy: What was sent.
    """
    segment, tick = end.segment, end.tick
    assert segment is not None
    assert tick is not None
    expected = _history(source)
    expected[DELIVERY_COUNT] = b"%d" % deliveries(source, end)
    silent = source.header(SILENT_COUNT)
    if segment.is_silent:
        expected[SILENT_COUNT] = b"%d" % ((number_of(silent) or 0) + 1)
    limit = tick.rules.max_deliveries
    if limit and (segment.is_silent or silent is not None):
        expected[MAX_DELIVERIES] = b"%d" % limit
    if segment.reason:
        expected[LAST_ERROR] = segment.reason.encode()
    gone = {DELAY_MS, MAX_DELIVERIES, NOT_BEFORE_MS}
    if (number_of(source.header(NOT_BEFORE_MS)) or 0) > tick.appended_at_ms:
        # The broker's clock was set back while the message waited: its time has not come.
        gone.remove(NOT_BEFORE_MS)
    yield from _differences(source, expected, gone, copy)
    if copy.place.queue_partition != source.place.queue_partition:
        yield Difference("I11", f"{copy.place} follows {source.place} into another queue partition")


def letter_differences(source: Record, end: Justified, letter: Record, queue: str) -> Iterator[Difference]:
    """
    Yield where a dead letter is not what it must be.

    Args:
        source: The message that it follows.
        end: The tracker's END, justified.
        letter: What was sent.
        queue: Name of the queue topic.
    """
    yield from _differences(source, _history(source) | _death(end, deliveries(source, end), queue), set(), letter)
    yield from _reason_differences(end, letter)


def empty_letter_differences(end: Justified, letter: Record, queue: str) -> Iterator[Difference]:
    """Yield where the dead letter of a message without payload is not what a tracker can say of it."""
    assert end.segment is not None
    place = b"%d:%d" % end.message_id
    expected = _death(end, end.segment.delivery_count, queue) | {ORIGIN: place, PREVIOUS: place}
    bare = letter._replace(key=None, value=None, headers=())
    yield from _differences(bare, expected, set(), letter)
    yield from _reason_differences(end, letter)


def _history(source: Record) -> dict[str, bytes]:
    """Return the headers of a copy that describe the copies before it."""
    sent_at = b"%d" % source.appended_at_ms
    attempts = [each for each in (source.header(ATTEMPTS_MS) or b"").split(b",") if each]
    return {
        PREVIOUS: b"%d:%d" % source.place,
        ORIGIN: b"%d:%d" % source.origin,
        FIRST_SENT_MS: source.header(FIRST_SENT_MS) or sent_at,
        ATTEMPTS_MS: b",".join([*attempts, sent_at][-ATTEMPTS_KEPT:]),
    }


def _death(end: Justified, count: int, queue: str) -> dict[str, bytes]:
    """Return the headers of a dead letter that describe its end, except the reason."""
    return {
        DELIVERY_COUNT: b"%d" % count,
        DLQ_TOPIC: queue.encode(),
        DLQ_PARTITION: b"%d" % end.message_id.queue_partition,
        DLQ_OFFSET: b"%d" % end.message_id.message_offset,
        DLQ_GROUP: f"kmq.{queue}".encode(),
        DLQ_DELIVERY_COUNT: b"%d" % count,
    }


def _reason_differences(end: Justified, letter: Record) -> Iterator[Difference]:
    reason = (letter.header(DLQ_MESSAGE) or b"").decode("utf-8", "replace")
    if reason[:REASON_CHARS] != end.reason:
        yield Difference("I5", f"{letter.place} says {reason!r}, and its END {end.reason!r}")


def _differences(source: Record, ours: dict[str, bytes], gone: set[str], record: Record) -> Iterator[Difference]:
    """Yield where a record is not its source with some headers in place of others."""
    if (record.key, record.value) != (source.key, source.value):
        yield Difference("I11", f"{record.place} differs from {source.place} in key or value")
    kept = [each for each in source.headers if each[0] not in ours and each[0] not in gone]
    found = [each for each in record.headers if each[0] not in ours and each[0] != DLQ_MESSAGE]
    if kept != found:
        changed = {name for name, _ in set(kept) ^ set(found)} or {"their order"}
        for invariant, names in (("I6", changed & COUNTS), ("I11", changed - COUNTS)):
            if names:
                what = f"differs from {source.place} in headers: {', '.join(sorted(names))}"
                yield Difference(invariant, f"{record.place} {what}")
    for name, value in ours.items():
        values = [each for each_name, each in record.headers if each_name == name]
        if values != [value]:
            invariant = "I6" if name in COUNTS else "I11"
            yield Difference(invariant, f"{record.place} has {name} {values!r}, expected {value!r}")
