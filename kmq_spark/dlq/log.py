"""
Read the dead letters of a queue, and the ENDs in its redrive topic that close them.

Rule 1: Reads use `read_committed` and join no consumer group. They change nothing in Kafka.
Rule 2: A read ends where the topic ended when the read began. Letters that are appended later, such as redriven
messages that fail again, do not extend it.
Rule 3: A redrive or purge fences older ones first and reads the ENDs after that. Then no other process can add an END.
"""

from __future__ import annotations

import logging
from contextlib import closing
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, cast

from confluent_kafka import Consumer, TopicPartition

from kmq_spark.core.closed import ClosedRanges
from kmq_spark.core.markers import MarkerType
from kmq_spark.errors import TopicError, WireError
from kmq_spark.kafka.log_reader import LogReader, read_committed
from kmq_spark.kafka.lookups import bounds_of
from kmq_spark.kafka.payloads import PayloadReader
from kmq_spark.kafka.settings import make_client, new_client_id, reader_config
from kmq_spark.wire.codec import decode_marker
from kmq_spark.wire.dead_letter import DeadLetter, dead_letter_of

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    from confluent_kafka import Message

    from kmq_spark.kafka.lookups import Bounds
    from kmq_spark.kafka.topics import QueueLayout
    from kmq_spark.wire.headers import Headers

logger = logging.getLogger(__name__)


class DeadLetterLog:
    """
    The dead letters of one queue.

    Args:
        layout: The queue's topics, checked.
        bootstrap_servers: Comma-separated `host:port`.
        timeout: Longest wait for a record, seconds; then the read fails.
        extra: librdkafka settings.
    """

    def __init__(
        self, layout: QueueLayout, *, bootstrap_servers: str, timeout: float, extra: Mapping[str, str] | None = None
    ) -> None:
        """Store the settings; read nothing yet."""
        self._topics = layout.topics
        self._partitions = range(layout.dead_letter_partition_count)
        self._timeout = timeout
        # The consumer joins no group and commits nothing, but librdkafka requires a `group.id`, and ACLs may name it.
        self._config = reader_config(bootstrap_servers, self._topics.redrive_id, new_client_id("redrive"), extra)

    def closed(self, redrive_partition_count: int) -> ClosedRanges:
        """
        Read the redrive topic and return the closed letters (redriven or purged).

        Args:
            redrive_partition_count: Partitions of the redrive topic.

        Raises:
            TopicError: The redrive topic does not exist: it is not known which letters are closed.
            KafkaClientError: The broker cannot be reached, or no record arrived in time.
        """
        closed = ClosedRanges()
        if not redrive_partition_count:
            message = f"topic {self._topics.redrive_topic!r} does not exist; run `kmq queue create {self._topics}`"
            raise TopicError(message)
        for record in read_committed(
            self._config, self._topics.redrive_topic, range(redrive_partition_count), self._timeout, patience_s=0
        ):
            try:
                marker = decode_marker(record.value())
            except WireError as error:
                # A record that cannot be read closes no letter.
                logger.warning(
                    "skipping %s[%s]@%s, which is not a marker: %s",
                    self._topics.redrive_topic, record.partition(), record.offset(), error,
                )  # fmt: skip
                continue
            if marker.type is MarkerType.END:
                closed.add(marker.queue_partition, marker.ranges)
        return closed

    def bounds(self, closed: ClosedRanges) -> dict[int, Bounds]:
        """
        Return the first offset and the end offset of each partition at this moment.

        Raises:
            KafkaClientError: The broker cannot be reached.
            TopicError: An END names an offset past the end of the dead-letter topic: that topic was deleted and
                created again.
        """
        consumer = make_client(Consumer, self._config)
        try:
            topic, timeout_s = self._topics.dead_letter_topic, self._timeout
            bounds = {
                partition: bounds_of(consumer, TopicPartition(topic, partition), timeout_s)
                for partition in self._partitions
            }
        finally:
            consumer.close()
        for partition, (_, end) in bounds.items():
            if closed.end(partition) > end:
                message = (
                    f"topic {self._topics.redrive_topic!r} does not match {self._topics.dead_letter_topic!r}: got "
                    f"ENDs up to offset {closed.end(partition)} of partition {partition}, which ends at {end}; if the "
                    f"dead-letter topic was deleted and created again, delete {self._topics.redrive_topic!r} too"
                )
                raise TopicError(message)
        return bounds

    def letters(self, bounds: Mapping[int, tuple[int, int]]) -> Generator[DeadLetter]:
        """
        Yield the letters between these bounds, open and closed, partition by partition, oldest first in each.

        Raises:
            KafkaClientError: The broker cannot be reached, or no record arrived in time.
        """
        reader = LogReader(self._config, self._topics.dead_letter_topic, self._timeout)
        try:
            for partition, (first, end) in bounds.items():
                if first < end:
                    with closing(reader.read({partition: first})) as records:
                        yield from map(self._letter, takewhile(partial(_is_before, end), records))
        finally:
            reader.close()

    def by_ids(self, ids: Sequence[tuple[int, int]]) -> Iterator[tuple[str, DeadLetter | None]]:
        """
        Yield each id and its letter, ascending within a partition; None where the topic has no such letter.

        Raises:
            KafkaClientError: The broker cannot be reached, or no record arrived in time.
        """
        wanted: dict[int, list[int]] = {}
        for partition, offset in sorted(set(ids)):
            wanted.setdefault(partition, []).append(offset)
        reader = PayloadReader(self._config, self._topics.dead_letter_topic, self._timeout)
        try:
            for payload in reader.read(wanted):
                found = self._letter(payload.message) if payload.message is not None else None
                yield f"{payload.partition}:{payload.offset}", found
        finally:
            reader.close()

    def _letter(self, record: Message) -> DeadLetter:
        headers = cast("Headers", record.headers() or [])
        key, value = cast("tuple[Any, Any]", (record.key(), record.value()))
        return dead_letter_of(
            record.partition() or 0,
            record.offset() or 0,
            dead_at_ms=record.timestamp()[1],
            key=key,
            value=value,
            headers=list(headers),
            queue_topic=self._topics.queue_topic,
        )


def _is_before(end: int, record: Message) -> bool:
    return (record.offset() or 0) < end
