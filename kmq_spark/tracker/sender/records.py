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
    from kmq_spark.tracker.sender.due_decisions import DueDecision

UNREADABLE_BYTES = 65_536
"""
Most bytes kept of a record that is not a marker: enough to identify it, too little to flood the dead-letter topic.
"""


class DecidedMessage(NamedTuple):
    """A decision with its payload; `message` is None if the payload is not in the queue topic."""

    decision: DueDecision
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


def final_decision(decided: DecidedMessage, rejection_count: int, topics: QueueTopics, rules: Rules) -> DecidedMessage:
    """
    Return the final decision on a message, with the payload to send.

    A message that cannot be redelivered becomes a dead letter. A message whose TTL has expired gets the outcome
    EXPIRED, or becomes a dead letter if the queue's rules require it.

    Args:
        decided: The decision of the fold, with its payload.
        rejection_count: How often the broker rejected the message as too large. Once: it becomes a dead letter. Twice:
            a dead letter without payload.
        topics: Topics of the queue.
        rules: Rules of the queue.
    """
    decision, message = decided
    if message is not None:
        decision = _with_payload_facts(decision, message, rules)
        if rejection_count == 0 or decision.outcome is Outcome.EXPIRED:
            return decided if decision is decided.decision else DecidedMessage(decision, message)
    elif decision.outcome is Outcome.EXPIRED:
        # The queue topic never had this offset. With a dead letter here, any client that can write markers could create
        # as many dead letters as it likes.
        return decided
    place = f"{topics.queue_topic}[{decision.queue_partition}]@{decision.message_offset}"
    if message is None:
        reason = f"payload gone: {place} is not in the topic; raise its retention.ms above lease and outage"
        return DecidedMessage(
            decision._replace(outcome=Outcome.DEAD_LETTERED, reason=_joined(decision.reason, reason)), None
        )
    reason = "too large to redeliver: the broker refused it with the tracker's headers; raise max.message.bytes"
    if rejection_count > 1:
        reason = f"{reason}; too large for the dead-letter topic too, so the payload stays at {place}"
    payload = message if rejection_count == 1 else None
    return DecidedMessage(
        decision._replace(outcome=Outcome.DEAD_LETTERED, reason=_joined(decision.reason, reason)), payload
    )


def _with_payload_facts(decision: DueDecision, message: Message, rules: Rules) -> DueDecision:
    """Return the decision corrected by the headers: deliveries that no START counted, last error, expired TTL."""
    headers = by_name(headers_of(message))
    if decision.is_silent and decision.delivery_count <= (counted := delivery_count_of(headers)):
        # A START of kafka-mq-go contains no delivery count; one of ours contains the header's count + 1. Only silent
        # deliveries are corrected: a released one may not count, and the fold has handled that.
        decision = decision._replace(delivery_count=counted + 1)
    if decision.is_exhausted:
        # If the last delivery ended without an error text, use that of an earlier delivery.
        decision = decision._replace(reason=with_last_error(decision.reason, last_error_of(headers)))
    if decision.outcome is not Outcome.REDELIVERED:
        return decision
    if is_exhausted(decision.delivery_count, rules):
        reason = exhausted_reason(decision.delivery_count, rules, decision.reason or last_error_of(headers))
        return decision._replace(outcome=Outcome.DEAD_LETTERED, reason=reason)
    if not headers:
        return decision
    sent_at_ms = message.timestamp()[1]
    expires_at_ms = expires_at_ms_of(headers, sent_at_ms)
    if expires_at_ms is None or decision.tick_at_ms < expires_at_ms:
        return decision
    if rules.dead_letters_expired:
        ttl_ms = expires_at_ms - (first_sent_ms_of(headers, sent_at_ms) or 0)
        reason = f"expired: ttl of {ttl_ms} ms was over"
        return decision._replace(outcome=Outcome.DEAD_LETTERED, reason=reason)
    return decision._replace(outcome=Outcome.EXPIRED)


def _joined(first: str, second: str) -> str:
    return f"{first}; {second}" if first else second


def outgoing_record(
    decided: DecidedMessage, topics: QueueTopics, dead_letter_partitions: int, max_deliveries: int = 0
) -> OutgoingRecord:
    """
    Return the record for a final decision: the redelivered message or the dead letter.

    Args:
        decided: A decision as `final_decision` returns it; its outcome is not EXPIRED.
        topics: Topics of the queue.
        dead_letter_partitions: Partitions of the dead-letter topic.
        max_deliveries: The queue's delivery limit, 0 for none.
    """
    decision, message = decided
    headers: Headers = []
    sent_at_ms, key, value = -1, None, None
    if message is not None:
        headers, sent_at_ms, key, value = headers_of(message), message.timestamp()[1], message.key(), message.value()
    if decision.is_dead_letter:
        new_headers = dead_letter_headers(
            headers,
            source_topic=topics.queue_topic,
            group=topics.consumer_group,
            delivery_count=decision.delivery_count,
            queue_partition=decision.queue_partition,
            message_offset=decision.message_offset,
            sent_at_ms=sent_at_ms,
            reason=decision.reason,
        )
        partition = decision.queue_partition % dead_letter_partitions
        return OutgoingRecord(topics.dead_letter_topic, partition, key, value, new_headers)
    new_headers = redelivery_headers(
        headers,
        delivery_count=decision.delivery_count,
        queue_partition=decision.queue_partition,
        message_offset=decision.message_offset,
        sent_at_ms=sent_at_ms,
        is_silent=decision.is_silent,
        group=topics.group,
        max_deliveries=max_deliveries,
        decided_at_ms=decision.tick_at_ms,
        last_error=decision.reason,
    )
    # The same queue partition as before: the partition count may have changed, and the key may map elsewhere now.
    return OutgoingRecord(topics.queue_topic, decision.queue_partition, key, value, new_headers)


def end_records(
    decisions: Iterable[DueDecision], topics: QueueTopics, tracker_id: str, key: bytes = b""
) -> Iterator[OutgoingRecord]:
    """
    Yield the ENDs of final decisions, in as few records as their ranges allow.

    Args:
        decisions: Decisions as `final_decision` returns them.
        topics: Topics of the queue.
        tracker_id: Written as the markers' `consumer_id`.
        key: The queue's signing key; empty for no signatures.
    """
    groups: defaultdict[tuple[int, int, Outcome, str], list[int]] = defaultdict(list)
    for marker_partition, queue_partition, message_offset, _, outcome, reason, *_ in decisions:
        end_reason = reason if outcome is Outcome.DEAD_LETTERED else ""
        groups[marker_partition, queue_partition, outcome, end_reason].append(message_offset)
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
