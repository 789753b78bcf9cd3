"""
Records of the markers topic that are no markers: their bytes go to the dead-letter topic, once, and the log is told.

Rule 1: one log line a minute, however many there are: a flood of foreign bytes must not become a flood of lines.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from kmq_spark.kafka.redelivery_records import OutgoingRecord, unreadable_record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kmq_spark.core.outcome import PartitionOutcome
    from kmq_spark.kafka.payloads import PayloadReader
    from kmq_spark.kafka.positions import Position
    from kmq_spark.kafka.topics import QueueTopics

logger = logging.getLogger(__name__)

LOG_INTERVAL_S = 60.0


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

    def records(self, outcomes: Sequence[PartitionOutcome], committed: Mapping[int, Position]) -> list[OutgoingRecord]:
        """
        Return a dead letter for each unreadable record of a batch.

        Args:
            outcomes: Of the batch.
            committed: Positions by markers partition: what lies below was set aside before. A partition without one is
                new, so nothing was.
        """
        errors = {
            (outcome.marker_partition, record.marker_offset): record.error
            for outcome in outcomes
            for record in outcome.unreadable
            if outcome.marker_partition not in committed
            or record.marker_offset >= committed[outcome.marker_partition].next_offset
        }
        if not errors:
            return []
        self._log(errors)
        wanted: dict[int, list[int]] = {}
        for partition, offset in sorted(errors):
            wanted.setdefault(partition, []).append(offset)
        return [
            unreadable_record(
                payload, errors[payload.partition, payload.offset], self._topics, self._dead_letter_partitions
            )
            for payload in self._reader.read(wanted)
        ]

    def _log(self, errors: Mapping[tuple[int, int], str]) -> None:
        if time.monotonic() - self._logged_at_s <= LOG_INTERVAL_S:
            return
        self._logged_at_s = time.monotonic()
        logger.warning(
            "%d records of %s are no markers and go to %s; the first: %s",
            len(errors), self._topics.markers_topic, self._topics.dead_letter_topic, next(iter(errors.values())),
            extra={"action": "set_aside", "queue": self._topics.queue},
        )  # fmt: skip
