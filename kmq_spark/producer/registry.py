"""
The producer ids of a queue: list them, forget one.

Rule 1: an id is never forgotten by itself: its next life would send everything again.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kmq_spark.core.producing import check_producer_id, slot_of
from kmq_spark.errors import KmqError
from kmq_spark.kafka.queue_topics import QueueTopics
from kmq_spark.kafka.settings import new_client_id, transactional_producer_config
from kmq_spark.kafka.topics import DEFAULT_TIMEOUT
from kmq_spark.kafka.transaction import TransactionalProducer
from kmq_spark.producer.position_log import Found, PositionLog

if TYPE_CHECKING:
    from collections.abc import Mapping

PATIENCE_S = 2.0
"""How long a read-only caller waits for an open transaction; that of a running producer takes well below a second."""


def list_producers(
    queue: str,
    *,
    bootstrap_servers: str,
    timeout: float = DEFAULT_TIMEOUT,
    extra: Mapping[str, str] | None = None,
) -> list[Found]:
    """
    Return the newest record of every producer id of a queue, by id.

    Raises:
        ConfigError: The name is not allowed.
        TopicError: The queue does not exist.
        KafkaClientError: The broker cannot be reached in time.
    """
    log = PositionLog(QueueTopics.parse(queue), bootstrap_servers, timeout, extra)
    log.queue_partition_count()
    return log.all(PATIENCE_S)


def forget_producer(
    queue: str,
    producer_id: str,
    *,
    bootstrap_servers: str,
    timeout: float = DEFAULT_TIMEOUT,
    extra: Mapping[str, str] | None = None,
) -> Found:
    """
    Remove the position of a producer id: its next life is a first life, with no position and sequence 1.

    A running producer with this id is fenced.

    Returns:
        What was forgotten.

    Raises:
        ConfigError: A name is not allowed.
        TopicError: The queue does not exist.
        KmqError: The queue has no such producer id.
        FencedError: A producer with this id started at the same time; nothing is forgotten.
        KafkaClientError: The broker cannot be reached in time, or refuses.
    """
    slot = slot_of(check_producer_id(producer_id))
    topics = QueueTopics.parse(queue)
    log = PositionLog(topics, bootstrap_servers, timeout, extra)
    log.queue_partition_count()
    find(log.all(), queue, producer_id)
    config = transactional_producer_config(
        bootstrap_servers,
        topics.producer_transactional_id(producer_id) if slot is None else topics.sink_transactional_id(*slot),
        new_client_id("forget"),
        extra,
        transaction_timeout_ms=10_000,
    )
    producer = TransactionalProducer(config, timeout, role="producer")
    try:
        # Read behind the fencing: what the producer has committed by now is what is forgotten.
        found = find(log.all(), queue, producer_id)
        producer.run(partial(producer.send, log.record_of(producer_id, None)))
    finally:
        producer.close()
    return found


def find(found: list[Found], queue: str, producer_id: str) -> Found:
    """Return the record of one producer id. Raises KmqError if there is none."""
    for each in found:
        if each.key == producer_id:
            return each
    message = f"queue {queue!r} has no producer {producer_id!r}: `kmq producer list {queue}` shows what there is"
    raise KmqError(message)
