"""
What a block `with consumer.transaction()` has recorded: results to send and messages to acknowledge.

Rule 1: recording sends nothing; the whole block is played at its end, again where the broker asks for it.
Rule 2: what cannot succeed is refused while it is recorded, so that the caller sees it in the line that made it.
Rule 3: bounded: a transaction has to fit into its time-out, and holds up the readers of its partitions.

Source: Kafka Streams and Flink commit results with offsets (KIP-129, KIP-447); here the ENDs take the offsets' place.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from kmq_spark.errors import ConfigError, KafkaClientError, TopicError, UsageError
from kmq_spark.kafka.records import OutgoingRecord
from kmq_spark.kafka.topics import partition_count
from kmq_spark.producer.producer import checked_headers
from kmq_spark.producer.send_options import option_headers, wait_ms

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime, timedelta

    from confluent_kafka import Producer

    from kmq_spark.consumer.message import Message
    from kmq_spark.producer.producer import Headers
    from kmq_spark.producer.retention import KnownRetentions

MAX_TRANSACTION_BYTES = 32 * 1024 * 1024
"""Most bytes of results: sent within seconds over a slow line, far below librdkafka's own queue."""

MAX_TRANSACTION_RECORDS = 50_000
"""Most results, half of what librdkafka's own queue takes."""

_RECORD_BYTES = 64
"""What a record takes beside key, value and headers, at most."""


class KnownTopics:
    """
    The topics that results were sent to, with their partitions.

    Args:
        client: Returns a client with `list_topics`; it may be replaced over time.
        bootstrap_servers: For messages alone.
        timeout_ms: Bound on each question.
    """

    def __init__(self, client: Callable[[], Producer], bootstrap_servers: str, timeout_ms: int) -> None:
        """Know none yet."""
        self._client = client
        self._bootstrap_servers = bootstrap_servers
        self._timeout_ms = timeout_ms
        self._counts: dict[str, int] = {}

    def check(self, topic: str, partition: int) -> None:
        """
        Refuse a topic or partition that is not there: librdkafka would wait half a minute for it.

        Raises:
            TopicError: It does not exist.
            KafkaClientError: The broker cannot be reached.
        """
        if partition >= self._counts.get(topic, 0):
            self._counts[topic] = partition_count(
                self._client(), topic, self._bootstrap_servers, self._timeout_ms
            )  # fmt: skip
        count = self._counts[topic]
        if count == 0:
            message = f"cannot send a result: topic {topic!r} does not exist; create it, or correct its name"
            raise TopicError(message)
        if partition >= count:
            message = (
                f"cannot send a result: got partition {partition} of {topic!r}, 0 to {count - 1}; leave it to the key"
            )
            raise TopicError(message)


class Transaction:
    """
    The results and acknowledgements of one block; made by `QueueConsumer.transaction`.

    Attributes:
        results: Recorded so far.
        messages: Acknowledged so far, each once.
    """

    def __init__(self, topics: KnownTopics, retentions: KnownRetentions) -> None:
        """Record nothing yet."""
        self.results: list[OutgoingRecord] = []
        self.messages: dict[int, Message] = {}
        self._topics = topics
        self._retentions = retentions
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
        queue: str | None = None,
        delay: float | timedelta | None = None,
        at: datetime | float | None = None,
        ttl: float | timedelta | None = None,
    ) -> None:
        """
        Record a result; it is sent when the block ends.

        What `queue`, `delay`, `at` and `ttl` ask for is done by the consumers of a queue; readers of a topic that is
        none see the headers and the record at once.

        Args:
            topic: Any topic, a queue's too.
            value: Payload; text is encoded as UTF-8.
            key: Results of one key go to one partition; text is encoded as UTF-8.
            headers: Names beginning with `kmq-` are reserved.
            partition: Partition of the topic, chosen by key or at random by default.
            queue: Logical queue on this topic, as for `QueueProducer.send`.
            delay: How long it is not handed out, seconds or a timedelta from its append time on, before the commit.
            at: When it is handed out instead, an aware datetime or epoch seconds.
            ttl: After which it is not handed out any more, seconds or a timedelta, from its append time on.

        Raises:
            ConfigError: A value has the wrong type or is out of bounds, a header is reserved, or the result would wait
                longer than its queue keeps it.
            TopicError: The topic or the partition does not exist.
            KafkaClientError: The transaction would be too large, or the broker cannot be reached.
            UsageError: The block has ended.
        """
        pairs = [*checked_headers(headers or ()), *option_headers(queue=queue, delay=delay, at=at, ttl=ttl)]
        record = OutgoingRecord(
            topic,
            -1 if partition is None else partition,
            _encoded("key", key),
            _encoded("value", value),
            [(name, _encoded(name, text)) for name, text in pairs],
        )
        self._topics.check(topic, max(record.partition, 0))
        self._retentions.check(topic, wait_ms(delay, at, time.time()))
        size = size_of(record)
        with self._lock:
            self._check_open()
            if self._size + size > MAX_TRANSACTION_BYTES or len(self.results) == MAX_TRANSACTION_RECORDS:
                message = (
                    f"transaction is too large: got {self._size + size} bytes in {len(self.results) + 1} results, "
                    f"{MAX_TRANSACTION_BYTES} bytes and {MAX_TRANSACTION_RECORDS} results; use several transactions"
                )
                raise KafkaClientError(message, code="MSG_SIZE_TOO_LARGE")
            self.results.append(record)
            self._size += size

    def ack(self, message: Message) -> None:
        """
        Record that a message is done; its END is written when the block ends, together with the results.

        Until then it is held, and kept alive, as any other. The same message twice is one.

        Args:
            message: Held by the consumer of this transaction.

        Raises:
            LeaseLostError: Its lease ran out.
            UsageError: It was settled before, or the block has ended.
        """
        with self._lock:
            self._check_open()
            message._check_held()  # noqa: SLF001  # private to the package: not for handlers
            self.messages[id(message)] = message

    def end(self) -> None:
        """Refuse whatever comes later."""
        with self._lock:
            self._is_over = True

    def _check_open(self) -> None:
        if self._is_over:
            message = "transaction has ended: got a call after its block; open a new one with consumer.transaction()"
            raise UsageError(message)


def size_of(record: OutgoingRecord) -> int:
    """Return about how many bytes a record takes."""
    headers = sum(len(name) + len(value or b"") for name, value in record.headers)
    return _RECORD_BYTES + len(record.key or b"") + len(record.value or b"") + headers


def _encoded(name: str, value: bytes | str | None) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    got = type(value).__name__
    message = f"{name} of a result has the wrong type: expected bytes, str or None, got {got}; encode it first"
    raise ConfigError(message)
