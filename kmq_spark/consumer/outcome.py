"""
Read from the log whether a transaction was committed, if its commit request had no response.

Rule 1: the log decides. If a `read_committed` consumer returns a record of the transaction, the whole transaction was
committed. If such a consumer skips the record, the transaction was aborted.
Rule 2: there is no result before the transaction has ended on the broker. A `read_committed` consumer waits at every
open transaction, also at those of other producers.

Source: KIP-98, "last stable offset".
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, TopicPartition

from kmq_spark.errors import KafkaClientError
from kmq_spark.kafka.lookups import bounds_of
from kmq_spark.kafka.payloads import PayloadReader
from kmq_spark.kafka.settings import make_client

if TYPE_CHECKING:
    from collections.abc import Mapping

_PAUSE_S = 0.1


def is_committed(config: Mapping[str, Any], topic: str, partition: int, offset: int, timeout: float) -> bool:
    """
    Return whether a record of an ended transaction was committed.

    Args:
        config: librdkafka settings of a consumer that only reads, see `settings.reader_config`.
        topic: Topic of the record.
        partition: Partition of the record.
        offset: Offset of the record, from its delivery report.
        timeout: Longest wait for the transaction to end on the broker.

    Raises:
        KafkaClientError: The broker cannot be reached, or the transaction did not end in time.
    """
    _wait_until_stable(config, TopicPartition(topic, partition), offset, timeout)
    reader = PayloadReader(config, topic, timeout)
    try:
        return any(payload.message is not None for payload in reader.read({partition: [offset]}))
    finally:
        reader.close()


def _wait_until_stable(config: Mapping[str, Any], place: TopicPartition, offset: int, timeout_s: float) -> None:
    """Wait until all transactions up to *offset* have ended: until the last stable offset is greater than *offset*."""
    deadline_s = time.monotonic() + timeout_s
    consumer = make_client(Consumer, dict(config))
    try:
        while bounds_of(consumer, place, timeout_s).end <= offset:
            if time.monotonic() > deadline_s:
                message = (
                    f"cannot read {place.topic}[{place.partition}]@{offset}: a transaction before it has been open for "
                    f"{timeout_s:g} s; check the broker"
                )
                raise KafkaClientError(message, code="_TIMED_OUT", retriable=True)
            time.sleep(_PAUSE_S)
    finally:
        consumer.close()
