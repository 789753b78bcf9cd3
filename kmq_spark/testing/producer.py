"""Producers of a queue in memory."""

from __future__ import annotations

import random
import zlib
from functools import partial
from typing import TYPE_CHECKING, Any

from kmq_spark.core.markers import MessageId
from kmq_spark.errors import TopicError
from kmq_spark.kafka.serializers import serialized
from kmq_spark.kafka.settings import MAX_MESSAGE_BYTES
from kmq_spark.producer.async_producer import AsyncQueueProducer
from kmq_spark.producer.options import SendOptions, checked_headers, option_headers
from kmq_spark.producer.producer import QueueProducer, forks, message_too_large
from kmq_spark.wire.headers import size_of

if TYPE_CHECKING:
    from datetime import datetime, timedelta
    from typing import Self

    from kmq_spark.kafka.serializers import Serializer
    from kmq_spark.producer.options import Headers, Pairs
    from kmq_spark.producer.producer import OnDelivery
    from kmq_spark.testing.log import MemoryLog
    from kmq_spark.testing.queue import InMemoryQueue

Encoded = list[tuple[str, bytes | None]]


class MemoryOptions(SendOptions):
    """The options of a message; nothing is ever deleted from a queue in memory."""

    def __init__(self) -> None:
        """Keep nothing."""

    def headers(
        self,
        queue: str,  # noqa: ARG002  # as in `SendOptions`
        own: Headers | None,
        *,
        logical_queue: str | None,
        delay: float | timedelta | None,
        at: datetime | float | None,
        ttl: float | timedelta | None,
    ) -> Pairs:
        """Return the sender's headers, followed by those of the options."""
        return [*checked_headers(own or ()), *option_headers(logical_queue, delay, at, ttl)]


def encoded(value: bytes | str | None) -> bytes | None:
    """Return text as UTF-8."""
    return value.encode() if isinstance(value, str) else value


def append_message(
    log: MemoryLog, topic: str, partitions: int, value: bytes | str | None, key: bytes | str | None, *,
    partition: int | None, headers: Pairs,
) -> MessageId:  # fmt: skip
    """Append a message to a queue topic; without a key and a partition to a random one."""
    key, value = encoded(key), encoded(value)
    pairs: Encoded = [(name, encoded(text)) for name, text in headers]
    if size_of(key, value, pairs) > MAX_MESSAGE_BYTES:
        raise message_too_large(value, MAX_MESSAGE_BYTES)
    if partition is None:
        partition = random.randrange(partitions) if key is None else zlib.crc32(key) % partitions  # noqa: S311
    if not 0 <= partition < partitions:
        raise TopicError(f"cannot send to {topic}: got partition {partition}; expected 0 to {partitions - 1}")
    return MessageId(partition, log.append(topic, partition, key, value, pairs))


class InMemoryProducer(QueueProducer):
    """Producer of an `InMemoryQueue`: a message is durable when `send` returns."""

    def __init__(self, queue: InMemoryQueue, serializer: Serializer | None = None) -> None:
        self._queue = queue
        self._topic = queue.name
        self._serialize = None if serializer is None else partial(serialized, serializer, queue.name)
        self._forks, self._errors = forks(), []
        self._is_closed = False
        self._options = MemoryOptions()

    def send(
        self,
        value: Any,  # noqa: ANN401  # as in `QueueProducer`
        *,
        key: bytes | str | None = None,
        headers: Headers | None = None,
        partition: int | None = None,
        on_delivery: OnDelivery | None = None,
        logical_queue: str | None = None,
        delay: float | timedelta | None = None,
        at: datetime | float | None = None,
        ttl: float | timedelta | None = None,
    ) -> None:
        """Send a message, as `QueueProducer.send`."""
        self._check_usable()
        if self._serialize is not None:
            value, headers = self._serialize(value, checked_headers(headers or ()))
        pairs = self._options.headers(
            self._topic, headers, logical_queue=logical_queue, delay=delay, at=at, ttl=ttl
        )  # fmt: skip
        sent = append_message(
            self._queue.log, self._topic, self._queue.partition_count, value, key, partition=partition, headers=pairs
        )
        if on_delivery is not None:
            on_delivery(sent, None)

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
