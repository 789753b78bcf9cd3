"""
Read a topic to its present end, for audits, the command line and tests.

Rule 1: `read_committed`: records of aborted transactions are not returned.
Rule 2: The reader joins no consumer group and commits nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, KafkaError, TopicPartition

from kmq_spark.errors import KafkaClientError
from kmq_spark.kafka.settings import make_client

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from confluent_kafka import Message

READ_TIMEOUT_S = 15.0


def read_to_end(
    config: Mapping[str, Any], topic: str, partition_count: int, starting_offsets: Mapping[int, int] | None = None
) -> Iterator[Message]:
    """
    Yield every committed record of a topic up to its present end, optionally from given offsets on.

    Args:
        config: librdkafka settings of a reader, see `settings.reader_config`.
        topic: Topic.
        partition_count: Number of partitions of the topic.
        starting_offsets: First offset by partition; 0 for partitions without one.

    Yields:
        Records, in order within a partition; the partitions are mixed.

    Raises:
        KafkaClientError: Nothing arrived for 15 s before the end was reached.
    """
    consumer = make_client(Consumer, {**config, "enable.partition.eof": True, "auto.offset.reset": "earliest"})
    try:
        first = starting_offsets or {}
        consumer.assign([TopicPartition(topic, each, first.get(each, 0)) for each in range(partition_count)])
        unread = set(range(partition_count))
        while unread:
            # `consume` waits until it has as many records as requested: request one, then those that are already
            # fetched.
            records = consumer.consume(1, READ_TIMEOUT_S)
            if not records:
                message = f"cannot read {topic} to its end: got nothing for {READ_TIMEOUT_S:g} s; check the broker"
                raise KafkaClientError(message, code="_TIMED_OUT", retriable=True)
            for record in records + consumer.consume(1_000, 0):
                error = record.error()
                if error is None:
                    yield record
                elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001  # librdkafka's public name for it
                    unread.discard(-1 if record.partition() is None else record.partition())
                # Other errors are temporary. If not, the time-out above reports them.
    finally:
        consumer.close()
