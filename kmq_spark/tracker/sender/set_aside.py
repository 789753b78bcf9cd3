"""
Send records of the markers topic that are not markers to the dead-letter topic, once each, and log a warning.

Rule 1: At most one log line a minute, however many such records there are.
Rule 2: No record is dropped. If they exceed one transaction, there are several, and each commits the offset up to which
records are set aside.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from kmq_spark.consumer.transactions.record import size_of
from kmq_spark.kafka.records import OutgoingRecord
from kmq_spark.rate_limit import RateLimit
from kmq_spark.tracker.sender.records import unreadable_record

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kmq_spark.core.outcome import PartitionOutcome
    from kmq_spark.kafka.payloads import PayloadReader
    from kmq_spark.kafka.positions import Position
    from kmq_spark.kafka.queue_topics import QueueTopics

logger = logging.getLogger(__name__)

LOG_INTERVAL_S = 60.0


class ChunkLimits(NamedTuple):
    """Limits of one transaction: number of records, and their bytes."""

    messages: int
    size: int


class Chunk(NamedTuple):
    """
    The dead letters of one transaction.

    Attributes:
        records: The dead letters.
        set_aside_to: Marker offset by partition, below which all unreadable records are set aside after the commit.
    """

    records: list[OutgoingRecord]
    set_aside_to: Mapping[int, int]


class SetAside:
    """
    Builds the dead letters of unreadable records.

    Args:
        reader: Reads single records of the markers topic.
        topics: Topics of the queue.
        dead_letter_partitions: Partitions of the dead-letter topic.
    """

    def __init__(self, reader: PayloadReader, topics: QueueTopics, dead_letter_partitions: int) -> None:
        """Store the arguments; read nothing yet."""
        self._reader = reader
        self._topics = topics
        self._dead_letter_partitions = dead_letter_partitions
        self._warning_limit = RateLimit(LOG_INTERVAL_S)

    def chunks(
        self, outcomes: Sequence[PartitionOutcome], committed: Mapping[int, Position], limits: ChunkLimits
    ) -> Iterator[Chunk]:
        """
        Yield a dead letter for each unreadable record of a batch, in chunks of one transaction each.

        Args:
            outcomes: Outcomes of the batch, one per markers partition.
            committed: Committed positions by markers partition. Records below their `set_aside_to` were set aside
                before. A partition without a position is new: nothing was set aside.
            limits: Limits of a chunk.

        Raises:
            KafkaClientError: The markers topic cannot be read.
        """
        errors = {
            (outcome.marker_partition, record.marker_offset): record.error
            for outcome in outcomes
            for record in outcome.unreadable
            if outcome.marker_partition not in committed
            or record.marker_offset >= committed[outcome.marker_partition].set_aside_to
        }
        if not errors:
            return
        self._log(errors)
        wanted: dict[int, list[int]] = {}
        for partition, offset in sorted(errors):
            wanted.setdefault(partition, []).append(offset)
        left = {partition: dict.fromkeys(offsets) for partition, offsets in wanted.items()}
        records: list[OutgoingRecord] = []
        size = 0
        for payload in self._reader.read(wanted):
            error = errors[payload.partition, payload.offset]
            record = unreadable_record(payload, error, self._topics, self._dead_letter_partitions)
            if records and (len(records) >= limits.messages or size + size_of(record) > limits.size):
                yield Chunk(records, _set_aside_to(wanted, left))
                records, size = [], 0
            records.append(record)
            size += size_of(record)
            del left[payload.partition][payload.offset]
        yield Chunk(records, _set_aside_to(wanted, left))

    def _log(self, errors: Mapping[tuple[int, int], str]) -> None:
        if not self._warning_limit.allows():
            return
        logger.warning(
            "%d records of %s are not markers; sending them to %s; the first: %s",
            len(errors), self._topics.markers_topic, self._topics.dead_letter_topic, next(iter(errors.values())),
            extra={"action": "set_aside", "queue": self._topics.queue},
        )  # fmt: skip


def _set_aside_to(wanted: Mapping[int, list[int]], left: Mapping[int, dict[int, None]]) -> dict[int, int]:
    """
    Return the offset below which all records of each partition are done.

    The lowest record that is left decides: the reader returns offsets that are past the end of the log out of order.
    """
    return {partition: min(left[partition], default=offsets[-1] + 1) for partition, offsets in wanted.items()}
