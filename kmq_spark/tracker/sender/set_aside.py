"""
Records of the markers topic that are no markers: their bytes go to the dead-letter topic, once, and the log is told.

Rule 1: one log line a minute, however many there are: a flood of foreign bytes must not become a flood of lines.
Rule 2: none is dropped: what exceeds one transaction goes into several, and each commits how far it got.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, NamedTuple

from kmq_spark.consumer.transactions.record import size_of
from kmq_spark.kafka.records import OutgoingRecord
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
    """Bounds of one transaction: records, and their bytes."""

    messages: int
    size: int


class Chunk(NamedTuple):
    """Dead letters of one transaction, and the marker offset by partition below which all are set aside with it."""

    records: list[OutgoingRecord]
    done_to: Mapping[int, int]


class SetAside:
    """
    Makes the dead letters of unreadable records.

    Args:
        reader: Of the markers topic.
        topics: Of the queue.
        dead_letter_partitions: Partitions of the dead-letter topic.
    """

    def __init__(self, reader: PayloadReader, topics: QueueTopics, dead_letter_partitions: int) -> None:
        """Keep what is needed; nothing is read yet."""
        self._reader = reader
        self._topics = topics
        self._dead_letter_partitions = dead_letter_partitions
        self._logged_at_s = -LOG_INTERVAL_S

    def chunks(
        self, outcomes: Sequence[PartitionOutcome], committed: Mapping[int, Position], limits: ChunkLimits
    ) -> Iterator[Chunk]:
        """
        Yield a dead letter for each unreadable record of a batch, in pieces that fit into one transaction.

        Args:
            outcomes: Of the batch.
            committed: Positions by markers partition: what lies below was set aside before. A partition without one is
                new, so nothing was.
            limits: Of a piece.
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
                yield Chunk(records, _done_to(wanted, left))
                records, size = [], 0
            records.append(record)
            size += size_of(record)
            del left[payload.partition][payload.offset]
        yield Chunk(records, _done_to(wanted, left))

    def _log(self, errors: Mapping[tuple[int, int], str]) -> None:
        if time.monotonic() - self._logged_at_s <= LOG_INTERVAL_S:
            return
        self._logged_at_s = time.monotonic()
        logger.warning(
            "%d records of %s are no markers and go to %s; the first: %s",
            len(errors), self._topics.markers_topic, self._topics.dead_letter_topic, next(iter(errors.values())),
            extra={"action": "set_aside", "queue": self._topics.queue},
        )  # fmt: skip


def _done_to(wanted: Mapping[int, list[int]], left: Mapping[int, dict[int, None]]) -> dict[int, int]:
    """Return the offset below which each partition is done: records past the end of a log come out of order."""
    return {partition: min(left[partition], default=offsets[-1] + 1) for partition, offsets in wanted.items()}
