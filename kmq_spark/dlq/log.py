"""
Read a dead-letter topic as the log it is: the letters, and the ENDs that say which of them are done.

Rule 1: `read_committed`, no group: looking changes nothing.
Rule 2: the letters of one reading are those that were there when it began, so that what dies again meanwhile does not
keep it going for ever.
Rule 3: who sends anything fences older redrives first and reads the ENDs afterwards: then nobody can add to them.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, cast

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from kmq_spark.core.closed import ClosedRanges
from kmq_spark.core.markers import MarkerType
from kmq_spark.errors import KafkaClientError, TopicError, WireError
from kmq_spark.kafka.payloads import PayloadReader
from kmq_spark.kafka.settings import client_error, make_client, new_client_id, reader_config
from kmq_spark.kafka.topic_reader import read_to_end
from kmq_spark.wire.codec import decode_marker
from kmq_spark.wire.dead_letter import DeadLetter, dead_letter_of

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    from confluent_kafka import Message

    from kmq_spark.kafka.topics import QueueLayout
    from kmq_spark.wire.headers import Headers

logger = logging.getLogger(__name__)

READ_AT_ONCE = 500
"""Records taken from the client together; dead letters may be large, and a limit ends most readings early."""


class DeadLetterLog:
    """
    The dead letters of one queue.

    Args:
        layout: The queue's topics, checked.
        bootstrap_servers: Comma-separated `host:port`.
        timeout_ms: How long nothing may arrive before reading is an error.
        extra: librdkafka settings.
    """

    def __init__(
        self, layout: QueueLayout, *, bootstrap_servers: str, timeout_ms: int, extra: Mapping[str, str] | None = None
    ) -> None:
        """Keep what is needed; nothing is read yet."""
        self._topics = layout.topics
        self._partitions = range(layout.dead_letter_partition_count)
        self._timeout_ms = timeout_ms
        # No group is joined and nothing committed, but librdkafka wants a name, and ACLs may be given for it.
        self._config = reader_config(bootstrap_servers, self._topics.redrive_id, new_client_id("redrive"), extra)

    def closed(self, redrive_partition_count: int) -> ClosedRanges:
        """
        Read which letters are done.

        Args:
            redrive_partition_count: Partitions of the redrive topic; 0 where there is none: then none are.

        Raises:
            KafkaClientError: The broker cannot be reached, or nothing arrived in time.
        """
        closed = ClosedRanges()
        if not redrive_partition_count:
            return closed
        for record in read_to_end(self._config, self._topics.redrive_topic, redrive_partition_count):
            try:
                marker = decode_marker(record.value())
            except WireError as error:
                # Nothing was said of any letter, so none is taken for done.
                logger.warning(
                    "%s[%s]@%s is no marker and is passed over: %s",
                    self._topics.redrive_topic, record.partition(), record.offset(), error,
                )  # fmt: skip
                continue
            if marker.type is MarkerType.END:
                closed.add(marker.queue_partition, marker.ranges)
        return closed

    def bounds(self, closed: ClosedRanges) -> dict[int, tuple[int, int]]:
        """
        Return first offset and end of each partition, now.

        Raises:
            KafkaClientError: The broker cannot be reached.
            TopicError: More letters are done than there are: the dead-letter topic was made anew.
        """
        consumer = make_client(Consumer, self._config)
        try:
            bounds = {partition: self._watermarks(consumer, partition) for partition in self._partitions}
        finally:
            consumer.close()
        for partition, (_, end) in bounds.items():
            if closed.end(partition) > end:
                message = (
                    f"topic {self._topics.redrive_topic!r} is of another {self._topics.dead_letter_topic!r}: got "
                    f"{closed.end(partition)} as done in partition {partition}, which ends at {end}; where the "
                    f"dead-letter topic was made anew, delete {self._topics.redrive_topic!r} too"
                )
                raise TopicError(message)
        return bounds

    def letters(self, bounds: Mapping[int, tuple[int, int]]) -> Generator[DeadLetter]:
        """
        Yield the letters between these bounds, done or not, a partition after the other, oldest first.

        Raises:
            KafkaClientError: The broker cannot be reached, or nothing arrived in time.
        """
        consumer = make_client(
            Consumer, {**self._config, "enable.partition.eof": True, "auto.offset.reset": "earliest"}
        )
        try:
            for partition, (first, end) in bounds.items():
                if first < end:
                    consumer.assign([TopicPartition(self._topics.dead_letter_topic, partition, first)])
                    yield from map(self._letter, self._records(consumer, partition, end))
        finally:
            consumer.close()

    def by_ids(self, ids: Sequence[tuple[int, int]]) -> Iterator[tuple[str, DeadLetter | None]]:
        """
        Yield the letters of these ids, ascending within a partition; None for one that is not there.

        Raises:
            KafkaClientError: The broker cannot be reached, or nothing arrived in time.
        """
        wanted: dict[int, list[int]] = {}
        for partition, offset in sorted(set(ids)):
            wanted.setdefault(partition, []).append(offset)
        reader = PayloadReader(self._config, self._topics.dead_letter_topic, self._timeout_ms)
        try:
            for payload in reader.read(wanted):
                found = self._letter(payload.message) if payload.message is not None else None
                yield f"{payload.partition}:{payload.offset}", found
        finally:
            reader.close()

    def _watermarks(self, consumer: Consumer, partition: int) -> tuple[int, int]:
        topic = self._topics.dead_letter_topic
        try:
            return consumer.get_watermark_offsets(
                TopicPartition(topic, partition), timeout=self._timeout_ms / 1000, cached=False
            )
        except KafkaException as error:
            raise client_error(error, f"cannot read the offsets of {topic}") from error

    def _records(self, consumer: Consumer, partition: int, end: int) -> Iterator[Message]:
        while True:
            # `consume` waits until it has all it was asked for: ask for one, then for what is there.
            records = consumer.consume(1, self._timeout_ms / 1000)
            if not records:
                message = (
                    f"cannot read {self._topics.dead_letter_topic}: got nothing for {self._timeout_ms} ms; "
                    "check the broker, or raise [kafka] timeout_ms"
                )
                raise KafkaClientError(message, code="_TIMED_OUT", retriable=True)
            for record in records + consumer.consume(READ_AT_ONCE, 0):
                error = record.error()
                if record.partition() != partition:
                    continue
                if error is None:
                    if (record.offset() or 0) >= end:
                        return
                    yield record
                elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001  # librdkafka's public name for it
                    return
                # Other errors pass by themselves, or the time-out above tells of them.

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
