"""
Build the records that a redrive writes: dead letters in, the records of one transaction out.

Rule 1: This module uses no Kafka client: values in, values out.
Rule 2: Key, value and application headers of a message are kept byte for byte, headers in their order.
Rule 3: Every letter that is closed gets exactly one END, in the redrive topic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kmq_spark.core.markers import Marker, MarkerType, Outcome
from kmq_spark.core.ranges import cut_ranges
from kmq_spark.kafka.records import OutgoingRecord
from kmq_spark.wire.codec import encode_marker
from kmq_spark.wire.headers import FIRST_SENT_MS, GENERATION, ORIGIN, PRODUCER, SEQUENCE, redrive_headers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kmq_spark.kafka.queue_topics import QueueTopics
    from kmq_spark.wire.dead_letter import DeadLetter

_OF_ANOTHER_QUEUE = frozenset({ORIGIN, FIRST_SENT_MS, PRODUCER, GENERATION, SEQUENCE})

BY_KEY = -1
"""Partition number that lets the client's partitioner choose by the key."""


def redriven_record(letter: DeadLetter, topics: QueueTopics, to: QueueTopics, partition_count: int) -> OutgoingRecord:
    """
    Return the queue message for a dead letter.

    Args:
        letter: A dead letter that can be redriven.
        topics: Topics of the queue that dead-lettered it.
        to: Topics of the queue, or the subscription, that receives it.
        partition_count: Partitions of the receiving queue topic.
    """
    headers = redrive_headers(letter.headers, subscription=to.subscription)
    if to.queue_topic != topics.queue_topic:
        # These headers name a place and a producer of another topic. In this topic the new record is the first copy.
        headers = [(name, value) for name, value in headers if name not in _OF_ANOTHER_QUEUE]
        return OutgoingRecord(to.queue_topic, BY_KEY, letter.key, letter.value, headers)
    home = letter.origin.queue_partition if letter.origin is not None else BY_KEY
    # Use the partition of the first copy, since the partition count may have changed and the key may map elsewhere.
    return OutgoingRecord(to.queue_topic, home if home < partition_count else BY_KEY, letter.key, letter.value, headers)


def closing_records(
    letters: Iterable[DeadLetter], topics: QueueTopics, outcome: Outcome, redrive_partition_count: int, writer_id: str
) -> Iterator[OutgoingRecord]:
    """
    Yield the END markers that close these letters.

    Args:
        letters: The letters of one transaction.
        topics: Topics of the queue.
        outcome: ACKED for a redrive, EXPIRED for a purge.
        redrive_partition_count: Partitions of the redrive topic.
        writer_id: Client id of this redrive or purge, written as the marker's `consumer_id`.
    """
    offsets: dict[int, list[int]] = {}
    for letter in letters:
        offsets.setdefault(letter.partition, []).append(letter.offset)
    for partition, of_partition in offsets.items():
        for ranges in cut_ranges(of_partition):
            marker = Marker(MarkerType.END, partition, ranges, outcome=outcome, consumer_id=writer_id)
            # The dead-letter topic may have more partitions than the redrive topic. The marker itself contains the
            # partition of the letter.
            place = partition % redrive_partition_count
            yield OutgoingRecord(topics.redrive_topic, place, None, encode_marker(marker), [])
