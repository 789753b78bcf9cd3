"""
Read a topic to where it ends now: for audits, the command line and tests.

Rule 1: `read_committed`: what a transaction gave up is not there.
Rule 2: no group, nothing is committed.
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
    Yield every committed record of a topic, or those from some offsets on, up to its present end.

    Args:
        config: librdkafka settings of a reader, see `settings.reader_config`.
        topic: Topic.
        partition_count: Its partitions.
        starting_offsets: First offset by partition; 0 where none is given.

    Yields:
        Records, in order within a partition, partitions mixed.

    Raises:
        KafkaClientError: Nothing arrived for 15 s before the end was reached.
    """
    consumer = make_client(Consumer, {**config, "enable.partition.eof": True, "auto.offset.reset": "earliest"})
    try:
        first = starting_offsets or {}
        consumer.assign([TopicPartition(topic, each, first.get(each, 0)) for each in range(partition_count)])
        unread = set(range(partition_count))
        while unread:
            # `consume` waits until it has all it was asked for: ask for one, then for what is there.
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
                # Other errors pass by themselves, or the time-out above tells of them.
    finally:
        consumer.close()
