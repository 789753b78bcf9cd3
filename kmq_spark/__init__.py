"""
Message-queue semantics on plain Kafka topics.

    from kmq_spark import QueueConsumer, QueueProducer

Rule 1: importing this package loads neither pyspark nor confluent_kafka. A public name loads its module at first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from kmq_spark.core.markers import MessageId
from kmq_spark.errors import (
    BatchFailed,
    ConfigError,
    FencedError,
    KafkaClientError,
    KmqError,
    LeaseLostError,
    TopicError,
    TransactionError,
    UnreadableError,
    UsageError,
)

if TYPE_CHECKING:
    from kmq_spark.client_properties import read_client_properties
    from kmq_spark.config import load_settings
    from kmq_spark.consumer.async_consumer import AsyncQueueConsumer
    from kmq_spark.consumer.batch import Batch
    from kmq_spark.consumer.consumer import QueueConsumer
    from kmq_spark.consumer.hooks import around
    from kmq_spark.consumer.message import Message
    from kmq_spark.consumer.policy import Reject, Retry
    from kmq_spark.consumer.transaction import Transaction
    from kmq_spark.consumer.worker import RunSummary
    from kmq_spark.dlq.dead_letters import list_dead_letters, purge, redrive
    from kmq_spark.dlq.filter import DeadLetterFilter
    from kmq_spark.dlq.redrive import RedriveSummary
    from kmq_spark.kafka.queue_rules import create_queue
    from kmq_spark.kafka.serializers import JsonDeserializer, JsonSerializer
    from kmq_spark.kafka.topics import check_queue
    from kmq_spark.producer.async_producer import AsyncQueueProducer
    from kmq_spark.producer.producer import QueueProducer
    from kmq_spark.producer.resuming import ResumingProducer
    from kmq_spark.wire.dead_letter import DeadLetter

__version__ = "0.1.0"

_MODULE_OF = {
    "AsyncQueueConsumer": "kmq_spark.consumer.async_consumer",
    "AsyncQueueProducer": "kmq_spark.producer.async_producer",
    "Batch": "kmq_spark.consumer.batch",
    "DeadLetter": "kmq_spark.wire.dead_letter",
    "DeadLetterFilter": "kmq_spark.dlq.filter",
    "JsonDeserializer": "kmq_spark.kafka.serializers",
    "JsonSerializer": "kmq_spark.kafka.serializers",
    "Message": "kmq_spark.consumer.message",
    "QueueConsumer": "kmq_spark.consumer.consumer",
    "QueueProducer": "kmq_spark.producer.producer",
    "RedriveSummary": "kmq_spark.dlq.redrive",
    "Reject": "kmq_spark.consumer.policy",
    "ResumingProducer": "kmq_spark.producer.resuming",
    "Retry": "kmq_spark.consumer.policy",
    "RunSummary": "kmq_spark.consumer.worker",
    "Transaction": "kmq_spark.consumer.transaction",
    "around": "kmq_spark.consumer.hooks",
    "check_queue": "kmq_spark.kafka.topics",
    "create_queue": "kmq_spark.kafka.queue_rules",
    "list_dead_letters": "kmq_spark.dlq.dead_letters",
    "load_settings": "kmq_spark.config",
    "purge": "kmq_spark.dlq.dead_letters",
    "read_client_properties": "kmq_spark.client_properties",
    "redrive": "kmq_spark.dlq.dead_letters",
}

__all__ = [
    "AsyncQueueConsumer",
    "AsyncQueueProducer",
    "Batch",
    "BatchFailed",
    "ConfigError",
    "DeadLetter",
    "DeadLetterFilter",
    "FencedError",
    "JsonDeserializer",
    "JsonSerializer",
    "KafkaClientError",
    "KmqError",
    "LeaseLostError",
    "Message",
    "MessageId",
    "QueueConsumer",
    "QueueProducer",
    "RedriveSummary",
    "Reject",
    "ResumingProducer",
    "Retry",
    "RunSummary",
    "TopicError",
    "Transaction",
    "TransactionError",
    "UnreadableError",
    "UsageError",
    "around",
    "check_queue",
    "create_queue",
    "list_dead_letters",
    "load_settings",
    "purge",
    "read_client_properties",
    "redrive",
]


def __getattr__(name: str) -> object:
    """Import the module of a public name at its first use (PEP 562)."""
    module = _MODULE_OF.get(name)
    if module is None:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    """Return the names of the module, including those that are not imported yet (PEP 562)."""
    return sorted({*globals(), *__all__})
