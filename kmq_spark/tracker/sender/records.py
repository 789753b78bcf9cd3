"""
What the tracker writes: decisions and payloads in, records of one transaction out.

Rule 1: no client here; values in, values out.
Rule 2: key, value and foreign headers of a message go on as they are, byte for byte, in their order.
Rule 3: every decided message gets exactly one END, in the markers partition that its START came from.
Rule 4: what only the payload tells is judged here, by the same rules: its time to live, and the delivery count where a
START carried none.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from kmq_spark.core.markers import Marker, MarkerType, Outcome
from kmq_spark.core.policy import exhausted_reason, is_exhausted, with_last_error
from kmq_spark.kafka.marker_ranges import cut_ranges
from kmq_spark.kafka.records import OutgoingRecord, headers_of
from kmq_spark.wire.codec import encode_marker
from kmq_spark.wire.headers import (
    PREFIX,
    Headers,
    by_name,
    dead_letter_headers,
    delivery_count_of,
    expires_at_ms_of,
    first_sent_ms_of,
    last_error_of,
    redelivery_headers,
)
from kmq_spark.wire.signature import signed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from confluent_kafka import Message

    from kmq_spark.core.policy import Rules
    from kmq_spark.kafka.payloads import Payload
    from kmq_spark.kafka.queue_topics import QueueTopics
    from kmq_spark.tracker.sender.due_decisions import Due

UNREADABLE_BYTES = 65_536
"""What is kept of a record that is no marker: enough to tell what it is, too little to flood the dead-letter topic."""


class Item(NamedTuple):
    """A decision with its payload; `message` is None where the payload is gone."""

    due: Due
    message: Message | None

    @property
    def size(self) -> int:
        """Bytes of key, value and headers."""
        if self.message is None:
            return 0
        size = len(self.message.key() or b"") + len(self.message.value() or b"")
        for name, value in headers_of(self.message):
            size += len(name) + len(value or b"")
        return size


def settle(item: Item, refused: int, topics: QueueTopics, rules: Rules) -> Item:
    """
    Return what is to be done after all: a dead letter where a redelivery cannot be, nothing where its time is over.

    Args:
        item: As decided.
        refused: How often the broker refused this item as too large: once, and it becomes a dead letter; twice, and it
            becomes one without its payload.
        topics: Of the queue.
        rules: Of the queue.
    """
    due, message = item
    if message is not None:
        due = _judged(due, message, rules)
        if refused == 0 or due.outcome is Outcome.EXPIRED:
            return item if due is item.due else Item(due, message)
    elif due.outcome is Outcome.EXPIRED:
        # There never was a message: a dead letter would let any writer of markers make as many as it likes.
        return item
    place = f"{topics.queue_topic}[{due.queue_partition}]@{due.message_offset}"
    if message is None:
        reason = f"payload gone: {place} is not in the topic; raise its retention.ms above lease and outage"
        return Item(due._replace(outcome=Outcome.DEAD_LETTERED, reason=_both(due.reason, reason)), None)
    reason = "too large to redeliver: the broker refused it with the tracker's headers; raise max.message.bytes"
    if refused > 1:
        reason = f"{reason}; too large for the dead-letter topic too, so the payload stays at {place}"
    kept = message if refused == 1 else None
    return Item(due._replace(outcome=Outcome.DEAD_LETTERED, reason=_both(due.reason, reason)), kept)


def _judged(due: Due, message: Message, rules: Rules) -> Due:
    """Return a decision with what its payload tells: deliveries that no START counted, and a time that is over."""
    headers = by_name(headers_of(message))
    if due.is_silent and due.delivery_count <= (counted := delivery_count_of(headers)):
        # kafka-mq-go's START has no count; ours has this one. One that was given back may not count, as the fold knows.
        due = due._replace(delivery_count=counted + 1)
    if due.is_exhausted:
        # What an earlier delivery raised, where the last one ended without a text.
        due = due._replace(reason=with_last_error(due.reason, last_error_of(headers)))
    if due.outcome is not Outcome.REDELIVERED:
        return due
    if is_exhausted(due.delivery_count, rules):
        reason = exhausted_reason(due.delivery_count, rules, due.reason or last_error_of(headers))
        return due._replace(outcome=Outcome.DEAD_LETTERED, reason=reason)
    if not headers:
        return due
    sent_at_ms = message.timestamp()[1]
    expires_at_ms = expires_at_ms_of(headers, sent_at_ms)
    if expires_at_ms is None or due.tick_at_ms < expires_at_ms:
        return due
    if rules.dead_letters_expired:
        ttl_ms = expires_at_ms - (first_sent_ms_of(headers, sent_at_ms) or 0)
        reason = f"expired: ttl of {ttl_ms} ms was over"
        return due._replace(outcome=Outcome.DEAD_LETTERED, reason=reason)
    return due._replace(outcome=Outcome.EXPIRED)


def _both(first: str, second: str) -> str:
    return f"{first}; {second}" if first else second


def outgoing_record(
    item: Item, topics: QueueTopics, dead_letter_partitions: int, max_deliveries: int = 0
) -> OutgoingRecord:
    """
    Return the redelivered message or the dead letter of a settled item.

    Args:
        item: As settled.
        topics: Of the queue.
        dead_letter_partitions: Partitions of the dead-letter topic.
        max_deliveries: Of the queue, 0 for no limit.
    """
    due, message = item
    headers: Headers = []
    sent_at_ms, key, value = -1, None, None
    if message is not None:
        headers, sent_at_ms, key, value = headers_of(message), message.timestamp()[1], message.key(), message.value()
    if due.is_dead_letter:
        new_headers = dead_letter_headers(
            headers,
            source_topic=topics.queue_topic,
            group=topics.consumer_group,
            delivery_count=due.delivery_count,
            queue_partition=due.queue_partition,
            message_offset=due.message_offset,
            sent_at_ms=sent_at_ms,
            reason=due.reason,
        )
        partition = due.queue_partition % dead_letter_partitions
        return OutgoingRecord(topics.dead_letter_topic, partition, key, value, new_headers)
    new_headers = redelivery_headers(
        headers,
        delivery_count=due.delivery_count,
        queue_partition=due.queue_partition,
        message_offset=due.message_offset,
        sent_at_ms=sent_at_ms,
        is_silent=due.is_silent,
        group=topics.group,
        max_deliveries=max_deliveries,
        decided_at_ms=due.tick_at_ms,
        last_error=due.reason,
    )
    # The same queue partition as before: the key decided it once, and a partition count may have changed since.
    return OutgoingRecord(topics.queue_topic, due.queue_partition, key, value, new_headers)


def end_records(
    dues: Iterable[Due], topics: QueueTopics, tracker_id: str, key: bytes = b""
) -> Iterator[OutgoingRecord]:
    """Return the ENDs of settled decisions, signed with the queue's key: as few records as their ranges allow."""
    groups: defaultdict[tuple[int, int, Outcome, str], list[int]] = defaultdict(list)
    for marker_partition, queue_partition, message_offset, _, outcome, reason, *_ in dues:
        told = reason if outcome is Outcome.DEAD_LETTERED else ""
        groups[marker_partition, queue_partition, outcome, told].append(message_offset)
    for (marker_partition, queue_partition, outcome, reason), message_offsets in groups.items():
        for ranges in cut_ranges(message_offsets):
            marker = Marker(
                type=MarkerType.END,
                queue_partition=queue_partition,
                ranges=ranges,
                outcome=outcome,
                reason=reason,
                consumer_id=tracker_id,
            )
            value = signed(encode_marker(marker), marker_partition, key)
            yield OutgoingRecord(topics.markers_topic, marker_partition, None, value, [])


def unreadable_record(payload: Payload, error: str, topics: QueueTopics, dead_letter_partitions: int) -> OutgoingRecord:
    """Return the dead letter of a record that is no marker: its bytes, and what is wrong with them."""
    message = payload.message
    headers = dead_letter_headers(
        [],
        source_topic=topics.markers_topic,
        group=topics.tracker_group,
        delivery_count=0,
        queue_partition=payload.partition,
        message_offset=payload.offset,
        sent_at_ms=message.timestamp()[1] if message is not None else -1,
        reason=error,
    )
    # It is no message of the queue, so it has no origin there and no deliveries.
    headers = [(name, value) for name, value in headers if not name.startswith(PREFIX)]
    value = (message.value() or b"")[:UNREADABLE_BYTES] if message is not None else None
    return OutgoingRecord(topics.dead_letter_topic, payload.partition % dead_letter_partitions, None, value, headers)
