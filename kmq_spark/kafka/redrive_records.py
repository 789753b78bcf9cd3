"""
What a redrive writes: dead letters in, records of one transaction out.

Rule 1: no client here; values in, values out.
Rule 2: key, value and foreign headers of a message go back as they are, byte for byte, in their order.
Rule 3: every letter that is done with gets exactly one END, in the redrive topic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kmq_spark.core.markers import Marker, MarkerType, Outcome
from kmq_spark.kafka.marker_ranges import cut_ranges
from kmq_spark.kafka.redelivery_records import OutgoingRecord
from kmq_spark.wire.codec import encode_marker
from kmq_spark.wire.headers import FIRST_SENT_MS, GENERATION, ORIGIN, PRODUCER, SEQUENCE, redrive_headers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kmq_spark.kafka.topics import QueueTopics
    from kmq_spark.wire.dead_letter import DeadLetter

_OF_ANOTHER_QUEUE = frozenset({ORIGIN, FIRST_SENT_MS, PRODUCER, GENERATION, SEQUENCE})

BY_KEY = -1
"""Partition of a record that the client may choose by its key."""


def redriven_record(letter: DeadLetter, topics: QueueTopics, to: QueueTopics, partition_count: int) -> OutgoingRecord:
    """
    Return the message that a dead letter becomes again.

    Args:
        letter: One that can be redriven.
        topics: Of the queue that it died in.
        to: Of the queue, or the group, that it goes to.
        partition_count: Partitions of the topic that it goes to.
    """
    headers = redrive_headers(letter.headers, group=to.group)
    if to.queue_topic != topics.queue_topic:
        # They name a place and a producer of another topic: here this copy is the first, and this redrive its sender.
        headers = [(name, value) for name, value in headers if name not in _OF_ANOTHER_QUEUE]
        return OutgoingRecord(to.queue_topic, BY_KEY, letter.key, letter.value, headers)
    home = letter.origin.queue_partition if letter.origin is not None else BY_KEY
    # Where its key put it once: a partition count may have changed since.
    return OutgoingRecord(to.queue_topic, home if home < partition_count else BY_KEY, letter.key, letter.value, headers)


def closing_records(
    letters: Iterable[DeadLetter], topics: QueueTopics, outcome: Outcome, redrive_partition_count: int, writer_id: str
) -> Iterator[OutgoingRecord]:
    """
    Return the ENDs of letters that are done with.

    Args:
        letters: Of one transaction.
        topics: Of the queue.
        outcome: ACKED where they were redriven, EXPIRED where they were purged.
        redrive_partition_count: Partitions of the redrive topic.
        writer_id: Who writes them.
    """
    offsets: dict[int, list[int]] = {}
    for letter in letters:
        offsets.setdefault(letter.partition, []).append(letter.offset)
    for partition, of_partition in offsets.items():
        for ranges in cut_ranges(of_partition):
            marker = Marker(MarkerType.END, partition, ranges, outcome=outcome, consumer_id=writer_id)
            # The dead-letter topic may have grown since the redrive topic was made: the marker names its partition.
            place = partition % redrive_partition_count
            yield OutgoingRecord(topics.redrive_topic, place, None, encode_marker(marker), [])
