"""
What the tracker writes: decisions and payloads in, records of one transaction out.

Rule 1: no client here; values in, values out.
Rule 2: key, value and foreign headers of a message go on as they are, byte for byte, in their order.
Rule 3: every decided message gets exactly one END, in the markers partition that its START came from.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple, cast

from kmq_spark.core.markers import Marker, MarkerType, Outcome
from kmq_spark.core.policy import DecisionAction
from kmq_spark.kafka.marker_ranges import cut_ranges
from kmq_spark.wire.codec import encode_marker
from kmq_spark.wire.headers import PREFIX, Headers, dead_letter_headers, redelivery_headers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from confluent_kafka import Message

    from kmq_spark.core.outcome import PartitionOutcome
    from kmq_spark.kafka.payloads import Payload
    from kmq_spark.kafka.topics import QueueTopics

UNREADABLE_BYTES = 65_536
"""What is kept of a record that is no marker: enough to tell what it is, too little to flood the dead-letter topic."""


class Due(NamedTuple):
    """One decision, ready to be carried out."""

    marker_partition: int
    queue_partition: int
    message_offset: int
    delivery_count: int
    is_dead_letter: bool
    reason: str
    deadline_at_ms: int


class Item(NamedTuple):
    """A decision with its payload; `message` is None where the payload is gone."""

    due: Due
    message: Message | None

    @property
    def size(self) -> int:
        """Bytes of key, value and headers."""
        if self.message is None:
            return 0
        header_bytes = sum(len(name) + len(value or b"") for name, value in headers_of(self.message))
        return len(self.message.key() or b"") + len(self.message.value() or b"") + header_bytes


class OutgoingRecord(NamedTuple):
    """One record to produce."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    headers: Headers


def headers_of(message: Message | None) -> Headers:
    """Return the headers of a message in their order, none where it has none or is gone."""
    return list(cast("Headers", message.headers() or [])) if message is not None else []


def dues_of(outcomes: Iterable[PartitionOutcome]) -> Iterator[Due]:
    """Return the decisions of a batch, one by one."""
    for outcome in outcomes:
        decisions = outcome.decisions
        for queue_partition, message_offset, delivery_count, action, reason, deadline_at_ms in zip(
            decisions.queue_partition.tolist(),
            decisions.message_offset.tolist(),
            decisions.delivery_count.tolist(),
            decisions.action.tolist(),
            decisions.reasons,
            decisions.deadline_at_ms.tolist(),
            strict=True,
        ):
            is_dead_letter = action == DecisionAction.DEAD_LETTER
            yield Due(
                outcome.marker_partition, queue_partition, message_offset, delivery_count,
                is_dead_letter, reason or "", deadline_at_ms,
            )  # fmt: skip


def settle(item: Item, refused: int, topics: QueueTopics) -> Item:
    """
    Return what is to be done after all, which is a dead letter where a redelivery cannot be.

    Args:
        item: As decided.
        refused: How often the broker refused this item as too large: once, and it becomes a dead letter; twice, and it
            becomes one without its payload.
        topics: Of the queue.
    """
    due = item.due
    place = f"{topics.queue_topic}[{due.queue_partition}]@{due.message_offset}"
    if item.message is None:
        reason = f"payload gone: {place} is not in the topic; raise its retention.ms above lease and outage"
        return Item(due._replace(is_dead_letter=True, reason=_both(due.reason, reason)), None)
    if refused == 0:
        return item
    reason = "too large to redeliver: the broker refused it with the tracker's headers; raise max.message.bytes"
    if refused > 1:
        reason = f"{reason}; too large for the dead-letter topic too, so the payload stays at {place}"
    message = item.message if refused == 1 else None
    return Item(due._replace(is_dead_letter=True, reason=_both(due.reason, reason)), message)


def _both(first: str, second: str) -> str:
    return f"{first}; {second}" if first else second


def outgoing_record(item: Item, topics: QueueTopics, dead_letter_partitions: int) -> OutgoingRecord:
    """Return the redelivered message or the dead letter of a settled item."""
    due, message = item.due, item.message
    # The client's stub allows what may be sent; what was read is always a list of text and bytes.
    headers = cast("Headers", message.headers() or []) if message is not None else []
    sent_at_ms = message.timestamp()[1] if message is not None else -1
    key = message.key() if message is not None else None
    value = message.value() if message is not None else None
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
    )
    # The same queue partition as before: the key decided it once, and a partition count may have changed since.
    return OutgoingRecord(topics.queue_topic, due.queue_partition, key, value, new_headers)


def end_records(dues: Iterable[Due], topics: QueueTopics, tracker_id: str) -> Iterator[OutgoingRecord]:
    """Return the ENDs of settled decisions, signed by the tracker: as few records as their ranges allow."""
    groups: defaultdict[tuple[int, int, bool, str], list[int]] = defaultdict(list)
    for due in dues:
        reason = due.reason if due.is_dead_letter else ""
        groups[due.marker_partition, due.queue_partition, due.is_dead_letter, reason].append(due.message_offset)
    for (marker_partition, queue_partition, is_dead_letter, reason), message_offsets in groups.items():
        for ranges in cut_ranges(message_offsets):
            marker = Marker(
                type=MarkerType.END,
                queue_partition=queue_partition,
                ranges=ranges,
                outcome=Outcome.DEAD_LETTERED if is_dead_letter else Outcome.REDELIVERED,
                reason=reason,
                consumer_id=tracker_id,
            )
            yield OutgoingRecord(topics.markers_topic, marker_partition, None, encode_marker(marker), [])


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
