"""
Record the calls inside a `with consumer.transaction()` block: results to send and messages to acknowledge.

Rule 1: recording sends nothing. The whole block is sent at its end, and sent again if the broker requires a retry.
Rule 2: a call that cannot succeed raises while it is recorded, so that the traceback shows the line of the caller.
Rule 3: the size is bounded: a transaction must fit into its timeout, and readers of its partitions wait for it.

Source: Kafka Streams and Flink commit results with offsets (KIP-129, KIP-447). Here ENDs replace the offsets.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kmq_spark.consumer.batch import Batch
from kmq_spark.errors import ConfigError, KafkaClientError, TopicError, UsageError
from kmq_spark.kafka.records import OutgoingRecord
from kmq_spark.kafka.topics import partition_count
from kmq_spark.wire.headers import RECORD_BYTES
from kmq_spark.wire.headers import size_of as bytes_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime, timedelta

    from confluent_kafka import Producer

    from kmq_spark.consumer.message import Message
    from kmq_spark.producer.options import Headers, SendOptions

MAX_TRANSACTION_BYTES = 32 * 1024 * 1024
"""Maximum bytes of results: sent within seconds over a slow network, and far below the limit of librdkafka's buffer."""

MAX_TRANSACTION_RECORDS = 50_000
"""Maximum number of results: half of the capacity of librdkafka's buffer."""


class KnownTopics:
    """Cache of the partition counts of result topics. *client* returns a client with `list_topics`."""

    def __init__(self, client: Callable[[], Producer], bootstrap_servers: str, timeout: float) -> None:
        self._client = client
        self._bootstrap_servers = bootstrap_servers
        self._timeout = timeout
        self._counts: dict[str, int] = {}

    def check(self, topic: str, partition: int) -> None:
        """
        Check that a topic and partition exist. Without this check, librdkafka would wait for them half a minute.

        Raises:
            TopicError: The topic or the partition does not exist.
            KafkaClientError: The broker cannot be reached.
        """
        if partition >= self._counts.get(topic, 0):
            self._counts[topic] = partition_count(
                self._client(), topic, self._bootstrap_servers, self._timeout
            )  # fmt: skip
        count = self._counts[topic]
        if count == 0:
            message = f"cannot send a result: topic {topic!r} does not exist; create it, or correct its name"
            raise TopicError(message)
        if partition >= count:
            message = (
                f"cannot send a result: got partition {partition} of {topic!r}, 0 to {count - 1}; correct it, or "
                "leave it out so that the key selects it"
            )
            raise TopicError(message)


class Transaction:
    """
    The results and acknowledgements of one block. Created by `QueueConsumer.transaction`.

    Attributes:
        results: Results recorded so far.
        messages: Messages acknowledged so far, each once.
    """

    def __init__(self, topics: KnownTopics, options: SendOptions) -> None:
        """Start without results and acknowledgements."""
        self.results: list[OutgoingRecord] = []
        self.messages: dict[int, Message] = {}
        self._topics = topics
        self._options = options
        self._size = 0
        self._lock = threading.Lock()
        self._is_over = False

    def send(
        self,
        topic: str,
        value: bytes | str | None,
        *,
        key: bytes | str | None = None,
        headers: Headers | None = None,
        partition: int | None = None,
        logical_queue: str | None = None,
        delay: float | timedelta | None = None,
        at: datetime | float | None = None,
        ttl: float | timedelta | None = None,
    ) -> None:
        """
        Record a result. It is sent when the block ends.

        Only the consumers of a queue apply *logical_queue*, *delay*, *at* and *ttl*. Readers of another topic see the
        record immediately, with the headers.

        Args:
            topic: Any topic, including the topic of a queue.
            value: Payload; text is encoded as UTF-8.
            key: All results with one key are sent to one partition; text is encoded as UTF-8.
            headers: Names that begin with `kmq-` are reserved.
            partition: Partition of the topic. By default the key selects it; without a key it is random.
            logical_queue: Logical queue on this topic, as for `QueueProducer.send`.
            delay: Time after the append time before the message is delivered, seconds or a timedelta. The append time
                is before the commit.
            at: Instant before which the message is not delivered, aware datetime or epoch seconds. *delay* and *at*
                exclude each other.
            ttl: Time after the append time when the message expires, seconds or a timedelta.

        Raises:
            ConfigError: A value has the wrong type or is out of bounds, a header name is reserved, or the delay is
                longer than the retention of the queue.
            TopicError: The topic or the partition does not exist.
            KafkaClientError: The transaction would be too large, or the broker cannot be reached.
            UsageError: The block has ended.
        """
        pairs = self._options.headers(topic, headers, logical_queue=logical_queue, delay=delay, at=at, ttl=ttl)
        record = OutgoingRecord(
            topic,
            -1 if partition is None else partition,
            _encoded("key", key),
            _encoded("value", value),
            [(name, _encoded(name, text)) for name, text in pairs],
        )
        self._topics.check(topic, max(record.partition, 0))
        size = size_of(record)
        with self._lock:
            self._check_open()
            if self._size + size > MAX_TRANSACTION_BYTES or len(self.results) == MAX_TRANSACTION_RECORDS:
                message = (
                    f"transaction is too large: got {self._size + size} bytes in {len(self.results) + 1} results, "
                    f"maximum {MAX_TRANSACTION_BYTES} bytes and {MAX_TRANSACTION_RECORDS} results; use several "
                    "transactions"
                )
                raise KafkaClientError(message, code="MSG_SIZE_TOO_LARGE")
            self.results.append(record)
            self._size += size

    def ack(self, message: Message | Batch) -> None:
        """
        Record that a message, or what is not settled of a batch, is done. The ENDs are written when the block ends.

        Until then the message is held and its lease renewed as usual. A second `ack` of the same message has no effect.

        Args:
            message: A message, or a batch, held by the consumer of this transaction.

        Raises:
            LeaseLostError: The lease of the message ran out.
            UsageError: The message was settled earlier, or the block has ended.
        """
        with self._lock:
            self._check_open()
            given = message if isinstance(message, Batch) else [message]
            wanted = [each for each in given if each is message or not each.settled_by]
            for each in wanted:
                each._check_held()  # noqa: SLF001  # private to the package: not for handlers
            self.messages.update({id(each): each for each in wanted})

    def end(self) -> None:
        """Close the transaction for recording: later calls raise UsageError."""
        with self._lock:
            self._is_over = True

    def _check_open(self) -> None:
        if self._is_over:
            message = "transaction has ended: got a call after its block; open a new one with consumer.transaction()"
            raise UsageError(message)


def size_of(record: OutgoingRecord) -> int:
    """Return the approximate size of a record in bytes."""
    return RECORD_BYTES + bytes_of(record.key, record.value, record.headers)


def _encoded(name: str, value: bytes | str | None) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    got = type(value).__name__
    message = f"{name} of a result has the wrong type: expected bytes, str or None, got {got}; encode it first"
    raise ConfigError(message)
