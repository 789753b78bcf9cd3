"""
Which dead letters are closed, from the records of a redrive topic.

Rule 1: a redrive or purge writes an own record to each partition before its ENDs, with the id of the dead-letter topic.
If that topic is deleted and created again, the ENDs of the old one close none of the new letters.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from kmq_spark.core.closed import ClosedRanges
from kmq_spark.core.markers import Marker, MarkerType
from kmq_spark.errors import WireError
from kmq_spark.kafka.records import OutgoingRecord
from kmq_spark.wire.codec import decode_marker, encode_marker
from kmq_spark.wire.headers import TOPIC_ID, text_of

if TYPE_CHECKING:
    from confluent_kafka import Message

logger = logging.getLogger(__name__)


class LetterEnds:
    """The closed letters of the dead-letter topic with this id; empty where the broker does not say one."""

    def __init__(self, topic_id: str) -> None:
        self.closed = ClosedRanges()
        self._topic_id = topic_id
        self._other: set[int] = set()  # partitions whose newest own record is of another topic

    def add(self, record: Message) -> None:
        """Take the next record of a partition. One that is not a marker is logged."""
        partition = record.partition() or 0
        try:
            marker = decode_marker(record.value())
        except WireError as error:
            logger.warning(
                "skipping %s[%s]@%s, which is not a marker: %s", record.topic(), partition, record.offset(), error
            )
            return
        headers: Any = record.headers()
        if marker.type is MarkerType.END:
            if partition not in self._other:
                self.closed.add(marker.queue_partition, marker.ranges)
        elif (found := text_of(headers or [], TOPIC_ID)) and self._topic_id:
            (self._other.discard if found == self._topic_id else self._other.add)(partition)


def own_record(topic: str, partition: int, topic_id: str) -> OutgoingRecord:
    """Return the own record of a redrive or purge in a partition of the redrive topic."""
    tick = encode_marker(Marker(MarkerType.TICK))
    return OutgoingRecord(topic, partition, None, tick, [(TOPIC_ID, topic_id.encode())] if topic_id else [])
