"""
Build the records that the tracker writes: decisions and payloads in, the records of one transaction out.

Rule 1: This module uses no Kafka client: values in, values out.
Rule 2: Key, value and application headers of a message are kept byte for byte, headers in their order.
Rule 3: Every decision gets exactly one END, in the markers partition of the message's START.
Rule 4: Decisions that need the payload are made here, by the same rules: the TTL, and the delivery count if the START
contained none.
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
"""
Most bytes kept of a record that is not a marker: enough to identify it, too little to flood the dead-letter topic.
"""


class Item(NamedTuple):
    """A decision with its payload; `message` is None if the payload is not in the queue topic."""

    due: Due
    message: Message | None

    @property
    def size(self) -> int:
        """Bytes of key, value and headers; 0 without payload."""
        if self.message is None:
            return 0
        size = len(self.message.key() or b"") + len(self.message.value() or b"")
        for name, value in headers_of(self.message):
            size += len(name) + len(value or b"")
        return size


def settle(item: Item, refused: int, topics: QueueTopics, rules: Rules) -> Item:
    """
    Return the final decision on an item, with the payload to send.

    A message that cannot be redelivered becomes a dead letter. A message whose TTL has expired gets the outcome
    EXPIRED, or becomes a dead letter if the queue's rules require it.

    Args:
        item: The decision of the fold, with its payload.
        refused: How often the broker rejected the item as too large. Once: it becomes a dead letter. Twice: a dead
            letter without payload.
        topics: Topics of the queue.
        rules: Rules of the queue.
    """
    due, message = item
    if message is not None:
        due = _judged(due, message, rules)
        if refused == 0 or due.outcome is Outcome.EXPIRED:
            return item if due is item.due else Item(due, message)
    elif due.outcome is Outcome.EXPIRED:
        # The queue topic never had this offset. With a dead letter here, any client that can write markers could create
        # as many dead letters as it likes.
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
    """Return the decision corrected by the headers: deliveries that no START counted, last error, expired TTL."""
    headers = by_name(headers_of(message))
    if due.is_silent and due.delivery_count <= (counted := delivery_count_of(headers)):
        # A START of kafka-mq-go contains no delivery count; one of ours contains the header's count + 1. Only silent
        # deliveries are corrected: a released one may not count, and the fold has handled that.
        due = due._replace(delivery_count=counted + 1)
    if due.is_exhausted:
        # If the last delivery ended without an error text, use that of an earlier delivery.
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
    Return the record for a final decision: the redelivered message or the dead letter.

    Args:
        item: An item as `settle` returns it; its outcome is not EXPIRED.
        topics: Topics of the queue.
        dead_letter_partitions: Partitions of the dead-letter topic.
        max_deliveries: The queue's delivery limit, 0 for none.
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
    # The same queue partition as before: the partition count may have changed, and the key may map elsewhere now.
    return OutgoingRecord(topics.queue_topic, due.queue_partition, key, value, new_headers)


def end_records(
    dues: Iterable[Due], topics: QueueTopics, tracker_id: str, key: bytes = b""
) -> Iterator[OutgoingRecord]:
    """
    Yield the ENDs of final decisions, in as few records as their ranges allow.

    Args:
        dues: Decisions as `settle` returns them.
        topics: Topics of the queue.
        tracker_id: Written as the markers' `consumer_id`.
        key: The queue's signing key; empty for no signatures.
    """
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
    """Return the dead letter for a record that is not a marker: its bytes, with *error* as the reason."""
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
    # The record is not a message of the queue, so it has no origin there and no deliveries.
    headers = [(name, value) for name, value in headers if not name.startswith(PREFIX)]
    value = (message.value() or b"")[:UNREADABLE_BYTES] if message is not None else None
    return OutgoingRecord(topics.dead_letter_topic, payload.partition % dead_letter_partitions, None, value, headers)
