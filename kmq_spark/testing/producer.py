"""Producers of a queue in memory."""

from __future__ import annotations

import random
import zlib
from functools import partial
from typing import TYPE_CHECKING

from kmq_spark.errors import TopicError
from kmq_spark.kafka.serializers import serialized
from kmq_spark.kafka.settings import MAX_MESSAGE_BYTES
from kmq_spark.producer.async_producer import AsyncQueueProducer
from kmq_spark.producer.options import SendOptions, encoded
from kmq_spark.producer.producer import QueueProducer, Reports, forks, message_too_large
from kmq_spark.wire.headers import size_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from confluent_kafka import KafkaError, Message

    from kmq_spark.kafka.serializers import Serializer
    from kmq_spark.producer.options import Pairs
    from kmq_spark.testing.queue import InMemoryQueue

Encoded = list[tuple[str, bytes | None]]


class MemoryOptions(SendOptions):
    """The options of a message; nothing is ever deleted from a queue in memory."""

    def __init__(self) -> None:
        """Keep nothing."""

    def _check_retention(self, queue: str, waits_ms: int) -> None:
        """Do nothing."""


def record_of(
    queue: InMemoryQueue, value: bytes | str | None, key: bytes | str | None, partition: int, headers: Pairs
) -> tuple[str, int, bytes | None, bytes | None, Encoded]:
    """
    Return a message as `MemoryLog.append` takes it; *partition* -1: by the key, random without one.

    Raises:
        KafkaClientError: It is too large.
        TopicError: The queue has no such partition.
    """
    key, value, count = encoded(key), encoded(value), queue.partition_count
    pairs: Encoded = [(name, encoded(text)) for name, text in headers]
    if size_of(key, value, pairs) > MAX_MESSAGE_BYTES:
        raise message_too_large(value, MAX_MESSAGE_BYTES)
    if partition == -1:
        partition = random.randrange(count) if key is None else zlib.crc32(key) % count  # noqa: S311  # spreads
    if not 0 <= partition < count:
        raise TopicError(f"cannot send to {queue.name}: got partition {partition}; expected 0 to {count - 1}")
    return queue.name, partition, key, value, pairs


class _NoClient:
    """In place of Kafka's client: no report is ever outstanding."""

    def poll(self, _timeout: float) -> int:
        return 0


class InMemoryProducer(QueueProducer):
    """Producer of an `InMemoryQueue`: a message is durable when `send` returns."""

    _is_closed = _is_resting = _is_busy = False

    def __init__(self, queue: InMemoryQueue, serializer: Serializer | None = None) -> None:
        self._queue, self._topic, self._partition_count = queue, queue.name, queue.partition_count
        self._serialize = None if serializer is None else partial(serialized, serializer, queue.name)
        self._forks, self._errors, self._sent_count, self._reports = forks(), [], 0, Reports(queue.name)
        self._options, self._producer = MemoryOptions(), _NoClient()  # type: ignore[assignment]  # what `send` needs

    def _produce(
        self,
        value: bytes | str | None,
        key: bytes | str | None,
        partition: int,
        headers: Pairs | None,
        report: Callable[[KafkaError | None, Message], None],
    ) -> None:
        log = self._queue.log
        with log.lock:
            report(None, log.append(*record_of(self._queue, value, key, partition, headers or [])))

    def flush(self, timeout: float = 30.0) -> None:  # noqa: ARG002  # as in `QueueProducer`
        """Return: all is durable."""
        self._check_usable()

    def close(self, timeout: float = 30.0) -> None:  # noqa: ARG002  # as in `QueueProducer`
        """Close the producer."""
        self._is_closed = True


class AsyncInMemoryProducer(AsyncQueueProducer):
    """Producer of an `InMemoryQueue` for asyncio."""

    def __init__(self, queue: InMemoryQueue, serializer: Serializer | None = None) -> None:
        super().__init__(queue.name)
        self._in_memory, self._serializer = queue, serializer

    async def __aenter__(self) -> Self:
        """Begin the block."""
        self._opened = InMemoryProducer(self._in_memory, self._serializer)
        return self
