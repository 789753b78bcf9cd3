"""
Create producers and consumers from settings (`conf/*.toml`, environment) instead of arguments.

Rule 1: this module only maps names. `config.py` documents what each setting means.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kmq_spark.consumer.consumer import QueueConsumer
from kmq_spark.kafka.queue_rules import lease_of
from kmq_spark.kafka.queue_topics import QueueTopics
from kmq_spark.producer.producer import QueueProducer

if TYPE_CHECKING:
    from collections.abc import Callable

    from kmq_spark.config import Settings
    from kmq_spark.consumer.message import Message
    from kmq_spark.consumer.worker import RunSummary


def producer_from(settings: Settings, queue: str) -> QueueProducer:
    """
    Return a producer for a queue.

    Args:
        settings: From `kmq_spark.config.load_settings`.
        queue: Name of the queue.

    Raises:
        KmqError: As `QueueProducer` does.
    """
    return QueueProducer(queue, **settings.kafka.reach())


def consumer_from(settings: Settings, queue: str) -> QueueConsumer:
    """
    Return a consumer of a queue, with the queue's lease and the limits of `[consumer]`.

    If the rules of the queue contain a lease, that lease overrides `[queue] lease_ms`. If both are set and differ, a
    log line reports it.

    Args:
        settings: From `kmq_spark.config.load_settings`.
        queue: Name of the queue.

    Raises:
        KmqError: As `QueueConsumer` does.
    """
    return QueueConsumer(
        queue,
        group_protocol=settings.consumer.group_protocol,
        lease_ms=lease_of(QueueTopics.parse(queue), settings.for_queue(queue), **settings.kafka.reach()),
        max_in_flight=settings.consumer.max_in_flight,
        max_in_flight_bytes=settings.consumer.max_in_flight_bytes,
        isolate_after=settings.consumer.isolate_after,
        **settings.kafka.reach(),
    )


def run_worker(
    settings: Settings, queue: str, handler: Callable[[Message], None], *, metrics_port: int | None = None
) -> RunSummary:
    """
    Run a handler for each message of a queue until stopped, with the settings of `[consumer]`.

    Args:
        settings: From `kmq_spark.config.load_settings`.
        queue: Name of the queue.
        handler: See `QueueConsumer.run`.
        metrics_port: See `QueueConsumer.run`.

    Returns:
        Counts of messages by result.

    Raises:
        KmqError: As `QueueConsumer.run` does.
    """
    wanted = settings.consumer
    return consumer_from(settings, queue).run(
        handler,
        concurrency=wanted.concurrency,
        retry_delay_ms=wanted.retry_delay_ms,
        drain_timeout_ms=wanted.drain_timeout_ms,
        metrics_port=metrics_port,
    )
