"""
Producers that resume: messages and the position of their source in one Kafka transaction.

Rule 1: `send` only collects; `commit` writes. So a transaction is open for as short as possible, and one that was
aborted can be written again.

Source: KIP-98 for fencing by transactional id; KIP-618 (Kafka Connect's exactly-once sources) for positions in the
transaction of the messages.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kmq_spark.core.durations import seconds
from kmq_spark.core.producing import check_own_id
from kmq_spark.errors import ConfigError, KmqError, TopicError, UsageError
from kmq_spark.kafka.queue_topics import QueueTopics
from kmq_spark.kafka.settings import MAX_MESSAGE_BYTES, new_client_id, transactional_producer_config
from kmq_spark.producer.life import SENDER_HEADER_BYTES, Life, size_of_item
from kmq_spark.producer.options import SendOptions
from kmq_spark.producer.position_log import PositionLog
from kmq_spark.producer.producer import check_process, forks, message_too_large

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime, timedelta
    from types import TracebackType
    from typing import Self

    from kmq_spark.core.producing import SourcePosition
    from kmq_spark.producer.life import Item
    from kmq_spark.producer.options import Headers, Pairs

TRANSACTION_TIMEOUT_MS = 10_000
"""After this time the broker aborts the transaction of a producer that died in it; consumers wait behind it so long."""

MAX_UNCOMMITTED, MAX_UNCOMMITTED_BYTES = 100_000, 32 * 1024 * 1024
"""Most messages of one transaction. A broker takes about 32 MiB a second."""


class ResumingProducer:
    """
    Producer that copies a source to a queue, each message exactly once. Thread-safe.

    `commit(position)` writes the messages sent so far and the position of the source in one Kafka transaction. A later
    producer with the same id, also after a crash, resumes at `position` and fences the older producer. See
    docs/producing.md.

        with ResumingProducer("orders", "nightly-import", bootstrap_servers="localhost:9092") as producer:
            for number, line in enumerate(lines, 1):
                if number > (producer.position or 0):
                    producer.send(line)
                    producer.commit(number)
    """

    def __init__(
        self,
        queue: str,
        producer_id: str,
        *,
        bootstrap_servers: str,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        delivery_timeout: float | timedelta = 120.0,
        timeout: float | timedelta = 10.0,
        extra: Mapping[str, str] | None = None,
    ) -> None:
        """
        Connect, fence the older producer with this id, and read what it has committed.

        Args:
            queue: Name of the queue and of its topic.
            producer_id: Id under which a later process resumes where this one ended; 1 to 100 characters of A-Z a-z
                0-9 . _ -. Only one process may use it at a time: a second process fences the first, whose calls then
                raise FencedError.
            bootstrap_servers: Comma-separated `host:port`.
            max_message_bytes: Largest message in bytes, key, value and headers together. Use the value that the queue
                was created with.
            delivery_timeout: How long `commit` tries, seconds or a timedelta.
            timeout: Timeout of each request to the broker, seconds or a timedelta.
            extra: librdkafka settings.

        Raises:
            ConfigError: A value is out of bounds, or a setting in *extra* would break a guarantee.
            TopicError: A topic of the queue is missing or has a wrong setting.
            FencedError: Another process with this *producer_id* started at the same time.
            KafkaClientError: The broker cannot be reached in time, or refuses the transactional id.
            WireError: The position of this *producer_id* cannot be read.
        """
        topics = QueueTopics(queue)
        timeout = seconds("timeout", timeout)
        by = dict(extra or {}).get("client.id") or new_client_id("producer")
        config = transactional_producer_config(
            bootstrap_servers,
            topics.producer_transactional_id(check_own_id(producer_id)),
            by,
            extra,
            max_message_bytes=max_message_bytes + SENDER_HEADER_BYTES,
            transaction_timeout_ms=TRANSACTION_TIMEOUT_MS,
        )
        self._topic = topics.queue_topic
        self._max_message_bytes = max_message_bytes
        self._delivery_timeout = seconds("delivery_timeout", delivery_timeout)
        self._options = SendOptions(bootstrap_servers, timeout, extra)
        self._log = PositionLog(topics, bootstrap_servers, timeout, extra)
        self._log.ensure()
        self._partition_count = self._log.queue_partition_count()
        self._life = Life(self._log, producer_id, config, by=by, timeout=timeout)
        self._forks = forks()
        self._lock = threading.Lock()
        self._items: list[Item] = []
        self._bytes = 0
        self._failure: KmqError | None = None
        self._is_closed = False

    def __enter__(self) -> Self:
        """Return the producer."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the producer. If the body raised, messages that are not committed are dropped without an error."""
        if error is not None:
            self._items.clear()
        self.close()

    @property
    def position(self) -> SourcePosition:
        """Source position of the last commit, also of an earlier process; None before the first one."""
        return self._life.state.position

    @property
    def sequence(self) -> int:
        """Number of messages committed under this *producer_id*, by all processes that used it."""
        return self._life.state.sequence

    def send(
        self,
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
        Add a message to the next commit. Arguments as `QueueProducer.send`.

        Raises:
            ConfigError: A value has the wrong type or is out of bounds, a header name is reserved, or the delay is
                longer than the retention of the topics.
            TopicError: The partition does not exist.
            KafkaClientError: The message is too large.
            UsageError: 100,000 messages or 32 MiB are not committed, the producer is closed, or it was created in
                another process.
            KmqError: An earlier commit has failed; create a new producer, which resumes at its `position`.
        """
        for given in (value, key):
            if not isinstance(given, bytes | str | None):
                message = (
                    f"message has the wrong type: got {type(given).__name__}; expected bytes, str or None; encode it"
                )
                raise ConfigError(message)
        pairs: Pairs = []
        if headers or not (logical_queue is None and delay is None and at is None and ttl is None):
            pairs = self._options.headers(
                self._topic, headers, logical_queue=logical_queue, delay=delay, at=at, ttl=ttl
            )  # fmt: skip
        item: Item = (
            value.encode() if isinstance(value, str) else value,
            key.encode() if isinstance(key, str) else key,
            -1 if partition is None else partition,
            [(name, text.encode() if isinstance(text, str) else text) for name, text in pairs],
        )
        size = size_of_item(item)
        if size > self._max_message_bytes:
            raise message_too_large(item[0], self._max_message_bytes)
        if partition is not None and not 0 <= partition < self._partition_count:
            self._check_partition(partition)
        with self._lock:
            self._check_usable()
            if len(self._items) >= MAX_UNCOMMITTED or (self._items and self._bytes + size > MAX_UNCOMMITTED_BYTES):
                message = (
                    f"too many messages are not committed: got {len(self._items)} of {self._bytes} bytes; expected at "
                    f"most {MAX_UNCOMMITTED}, {MAX_UNCOMMITTED_BYTES} bytes; call commit(position) more often"
                )
                raise UsageError(message)
            self._items.append(item)
            self._bytes += size

    def commit(self, position: SourcePosition) -> None:
        """
        Write the messages sent so far and the position of the source after them, in one transaction.

        Call it between two records of the source: the messages of one record belong to one commit. A position without
        messages is committed too: the source has advanced past records that need no message.

        Args:
            position: Where the source continues: bytes or JSON (text, numbers, lists, dicts with text keys), at most
                4 KiB. A source without a position of its own is counted.

        Raises:
            ConfigError: The position is not allowed; nothing was written, and the messages wait for the next commit.
            FencedError: A newer producer with this *producer_id* has taken over; nothing was written.
            KafkaClientError: The broker refuses a message, which is named, or the commit did not succeed within
                *delivery_timeout*. Create a new producer, which resumes at its `position`.
            KmqError: An earlier commit has failed.
            UsageError: The producer is closed or was created in another process.
        """
        if position is None:
            message = "position is missing: got None; expected bytes or JSON: where the source continues"
            raise ConfigError(message)
        with self._lock:
            self._check_usable()
            after = self._life.after(len(self._items), position)
            try:
                self._life.write(self._items, after, self._delivery_timeout)
            except BaseException as error:
                # It may be committed: written again, its messages would be doubled.
                self._failure = error if isinstance(error, KmqError) else _interrupted(error)
                raise
            self._items, self._bytes = [], 0

    def close(self) -> None:
        """
        Disconnect. A second call does nothing.

        Raises:
            UsageError: Messages were sent after the last commit; they are dropped, because no position belongs to them.
        """
        if self._is_closed or self._forks != forks():
            return
        with self._lock:
            self._is_closed = True
            self._life.close()
            if self._items and self._failure is None:
                message = (
                    f"producer {self._life.key} was closed with messages that are not committed: got "
                    f"{len(self._items)}, which are dropped; call commit(position) before"
                )
                raise UsageError(message)

    def _check_usable(self) -> None:
        check_process(self._forks)
        if self._is_closed:
            message = "producer is closed: got a call after close; create a new one"
            raise UsageError(message)
        if self._failure is not None:
            raise self._failure

    def _check_partition(self, partition: int) -> None:
        self._partition_count = self._log.queue_partition_count()
        if not 0 <= partition < self._partition_count:
            message = (
                f"cannot send to {self._topic}: got partition {partition}, expected 0 to {self._partition_count - 1}; "
                "leave it to the key"
            )
            raise TopicError(message)


def _interrupted(error: BaseException) -> UsageError:
    return UsageError(f"commit was interrupted: got {error!r}; create a new producer, which resumes at its position")
