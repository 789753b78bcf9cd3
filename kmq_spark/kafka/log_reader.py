"""
Read a topic from given positions to its present end, once or repeatedly: audits, the command line, tests.

Rule 1: `read_committed`: records of aborted transactions are not returned.
Rule 2: The reader joins no consumer group and commits nothing.
Rule 3: A position also moves past the control records of transactions, so that nothing is read twice.
Rule 4: The time-out counts the wait for the broker only, and not what the caller does between two records.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from kmq_spark.errors import KafkaClientError
from kmq_spark.kafka.client_errors import client_error
from kmq_spark.kafka.settings import make_client

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from confluent_kafka import Message

READ_AT_ONCE = 1_000


class LogReader:
    """
    Reads one topic and keeps its own positions.

    Args:
        config: librdkafka settings of a reader, see `settings.reader_config`.
        topic: Topic to read.
        timeout: A read fails if no record arrives for this time.

    Attributes:
        positions: Next offset to read, by partition.
    """

    def __init__(self, config: Mapping[str, Any], topic: str, timeout: float) -> None:
        """Create the client; it sends nothing before the first read."""
        self._consumer = make_client(
            Consumer, {**config, "enable.partition.eof": True, "auto.offset.reset": "earliest"}
        )
        self._topic = topic
        self._timeout = timeout
        self.positions: dict[int, int] = {}

    @property
    def client(self) -> Consumer:
        """The client, which a child process must not use."""
        return self._consumer

    def close(self) -> None:
        """Close the client."""
        self._consumer.close()

    def read(self, starts: Mapping[int, int]) -> Generator[Message]:
        """
        Yield every committed record from these offsets to the end of their partitions.

        Args:
            starts: First offset by partition. If retention removed it, reading starts at the beginning of the log.

        Yields:
            Records, in order within a partition; the partitions are mixed.

        Raises:
            KafkaClientError: No record arrived in time, or this client may not read the topic.
        """
        if not starts:
            return
        unread = set(starts)
        self.positions |= starts
        self._consumer.assign([TopicPartition(self._topic, partition, offset) for partition, offset in starts.items()])
        try:
            last_record_at_s = time.monotonic()
            while unread:
                # `consume` waits until it has as many records as requested: request one, then those that are already
                # fetched.
                records = self._consumer.consume(1, 0.1)
                if records:
                    records += self._consumer.consume(READ_AT_ONCE, 0)
                for record in records:
                    if record.partition() in starts and self._is_record(record, unread):
                        yield record
                        last_record_at_s = time.monotonic()
                if unread and time.monotonic() - last_record_at_s > self._timeout:
                    message = (
                        f"cannot read {self._topic} to its end: got nothing for {self._timeout:g} s; "
                        "check the broker, or raise [kafka] timeout"
                    )
                    raise KafkaClientError(message, code="_TIMED_OUT", retriable=True)
        except KafkaException as error:
            raise client_error(error, f"cannot read {self._topic}") from error
        finally:
            self._consumer.unassign()

    def _is_record(self, record: Message, unread: set[int]) -> bool:
        error, partition, offset = record.error(), record.partition(), record.offset()
        if error is None:
            self.positions[partition or 0] = (offset or 0) + 1
            return True
        if error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001  # librdkafka's public name for it
            unread.discard(-1 if partition is None else partition)
            self.positions[partition or 0] = offset or 0
        elif not error.retriable() and error.code() in _PERMANENT:
            raise KafkaException(error)
        # Other errors are temporary. If not, the time-out above reports them.
        return False


_PERMANENT = frozenset(
    {KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC}  # noqa: SLF001  # as above
)
