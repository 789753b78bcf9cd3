"""
Send messages to a queue. A message is reported as sent only when it is durable.

Rule 1: idempotent: a retry neither duplicates a message nor changes the order within a partition.
Rule 2: no failure is lost. It is passed to the message's callback, or the next call raises it.
Rule 3: the calling thread serves the delivery reports. The producer's own thread serves them only while no calls are
made: two threads that compete for the interpreter lock would serve one report per 5 ms (Python's switch interval).

Source: librdkafka INTRODUCTION.md, "Message reliability"; confluent-kafka's `produce`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import TYPE_CHECKING

from confluent_kafka import KafkaException, Producer

from kmq_spark.core.markers import MessageId
from kmq_spark.core.producing import check_own_id
from kmq_spark.errors import ConfigError, KafkaClientError, KmqError, TopicError, UsageError
from kmq_spark.kafka.client_errors import client_error
from kmq_spark.kafka.forks import watch
from kmq_spark.kafka.queue_topics import QueueTopics
from kmq_spark.kafka.settings import MAX_MESSAGE_BYTES, make_client, producer_config
from kmq_spark.kafka.topics import partition_count
from kmq_spark.producer.retention import KnownRetentions
from kmq_spark.producer.send_options import option_headers, wait_ms
from kmq_spark.wire.headers import PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from datetime import datetime, timedelta
    from types import TracebackType
    from typing import Self

    from confluent_kafka import KafkaError
    from confluent_kafka import Message as KafkaMessage

    from kmq_spark.core.producing import ProducerState, SourcePosition
    from kmq_spark.producer.resuming import ResumingSender

    Headers = Mapping[str, bytes | str | None] | Iterable[tuple[str, bytes | str | None]]
    OnDelivery = Callable[[MessageId | None, KmqError | None], object]

logger = logging.getLogger(__name__)

_SENDABLE = (bytes, str, type(None))

IDLE_S = 0.1
"""Time without a call after which the producer's own thread serves the delivery reports, seconds."""

SERVE_EVERY = 100
"""
Messages between two polls for delivery reports. A poll costs about a tenth of a send; at 1 M messages/s a report waits
0.1 ms.
"""


class QueueProducer:
    """
    Producer of a queue. Thread-safe.

    Use it in a `with` block, or call `close`.

    With a *producer_id*, the messages and their source position are written in Kafka transactions, exactly once. A
    later producer with the same id, also after a crash, resumes at `position` and fences the older producer. See
    docs/producers.md.
    """

    def __init__(
        self,
        topic: str,
        *,
        bootstrap_servers: str,
        client_id: str = "",
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        delivery_timeout_ms: int = 120_000,
        timeout: float = 10,
        extra: Mapping[str, str] | None = None,
        producer_id: str | None = None,
        commit_every_ms: int = 100,
        commit_every: int = 50_000,
        transaction_timeout_ms: int = 10_000,
        metrics_port: int | None = None,
        metrics_host: str | None = None,
    ) -> None:
        """
        Connect and check that the queue topic exists. With a *producer_id*, fence the older producer with this id.

        Args:
            topic: Name of the queue and of its topic.
            bootstrap_servers: Comma-separated `host:port`.
            client_id: Kafka `client.id`, which the broker uses for logs and quotas; empty for a generated one.
            max_message_bytes: Largest message in bytes, key, value and headers together. Use the value that the queue
                was created with.
            delivery_timeout_ms: Time after which an undelivered message has failed (`delivery.timeout.ms`).
            timeout: Timeout of metadata requests. Also the longest time that `send` blocks because the client's
                send buffer is full.
            extra: librdkafka settings.
            producer_id: Id under which a later process resumes where this one ended; 1 to 100 characters of A-Z a-z
                0-9 . _ -. Only one process may use it at a time: a second process fences the first, whose calls then
                raise FencedError.
            commit_every_ms: With *producer_id*: longest time that a message waits for its commit, 1 to 3,600,000.
            commit_every: With *producer_id*: maximum number of messages in one transaction, 1 to 100,000.
            transaction_timeout_ms: With *producer_id*: time after which the broker aborts the open transaction of a
                dead process, 1,000 to 900,000. Consumers cannot read past that transaction until then, or until a
                process uses the id again.
            metrics_port: With *producer_id*: serve Prometheus metrics on this port; needs the extra `metrics`. 0 takes
                a free port, which the log names.
            metrics_host: Address to listen on; loopback by default.

        Raises:
            ConfigError: A value is out of bounds, or a setting in *extra* would break a guarantee.
            TopicError: The queue topic does not exist.
            FencedError: Another process with this *producer_id* started at the same time.
            KafkaClientError: The broker cannot be reached within *timeout*.
        """
        self._topics = QueueTopics(topic)
        self._topic = self._topics.queue_topic
        self._timeout = timeout
        self._max_message_bytes = max_message_bytes
        self._pid = os.getpid()
        self._errors: list[KmqError] = []
        self._sent_count = 0
        self._closed = threading.Event()
        # Closed, or a copy in a forked process.
        self._is_unusable = False
        self._retentions = KnownRetentions(bootstrap_servers, extra, timeout)
        self._resuming: ResumingSender | None = None
        if producer_id is not None:
            from kmq_spark.producer.resuming import ResumingSender  # noqa: PLC0415  # it imports half of this package

            self._resuming = ResumingSender(
                self._topics,
                check_own_id(producer_id),
                client_id=client_id,
                max_message_bytes=max_message_bytes,
                delivery_timeout_ms=delivery_timeout_ms,
                timeout=timeout,
                transaction_timeout_ms=transaction_timeout_ms,
                commit_every_ms=commit_every_ms,
                commit_every=commit_every,
                bootstrap_servers=bootstrap_servers,
                extra=extra,
                metrics_port=metrics_port,
                metrics_host=metrics_host,
            )
            watch(self)
            return
        if metrics_port is not None:
            raise self._no_id("metrics_port")
        self._producer = make_client(
            Producer,
            producer_config(
                bootstrap_servers,
                client_id,
                extra,
                max_message_bytes=max_message_bytes,
                delivery_timeout_ms=delivery_timeout_ms,
            ),
        )
        if not partition_count(self._producer, self._topic, bootstrap_servers, timeout):
            message = f"queue {topic!r} has no topic {self._topic!r}; run `kmq queue create {topic}`"
            raise TopicError(message)
        self._thread = threading.Thread(target=self._serve_while_idle, name=f"kmq-producer-{topic}", daemon=True)
        self._thread.start()
        watch(self)

    def __enter__(self) -> Self:
        """Return the producer."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """
        Close the producer.

        If the body raised, that exception is raised and an error of closing is only logged. With a *producer_id*, an
        exception of the body also aborts everything that is not committed.
        """
        try:
            if error is not None and self._resuming is not None:
                self._abort()
            else:
                self.close()
        except KmqError:
            if error is None:
                raise
            logger.exception("cannot close the producer of %s", self._topic, extra={"action": "close_failed"})

    def send(
        self,
        value: bytes | str | None,
        *,
        key: bytes | str | None = None,
        headers: Headers | None = None,
        partition: int | None = None,
        on_delivery: OnDelivery | None = None,
        queue: str | None = None,
        delay: float | timedelta | None = None,
        at: datetime | float | None = None,
        ttl: float | timedelta | None = None,
        position: SourcePosition = None,
    ) -> None:
        """
        Send a message; return before it is durable.

        Delay and TTL are measured on the broker's clock. The first message with a delay reads the retention of the
        queue topic and of its markers topic. The markers topics of the queue's groups are not checked.

        Args:
            value: Payload; text is encoded as UTF-8.
            key: All messages with one key are sent to one partition; text is encoded as UTF-8.
            headers: Kept in redelivered copies and dead letters. Names that begin with `kmq-` are reserved.
            partition: Queue partition. By default the key selects it; without a key it is random.
            on_delivery: Called once, in the thread of a later call or in the producer's own thread, as
                `on_delivery(message_id, None)` or `on_delivery(None, error)`. Without it, the next call raises the
                error.
            queue: Logical queue on this topic. Only consumers of this logical queue receive the message; 1 to 200
                characters of A-Z a-z 0-9 . _ -.
            delay: Time after the append time before the message is delivered, seconds or a timedelta; 0 means no delay.
            at: Instant before which the message is not delivered, aware datetime or epoch seconds; an instant in the
                past means no delay. *delay* and *at* exclude each other.
            ttl: Time after the append time of the first copy when the message expires, seconds or a timedelta, more
                than 0. An expired message is not delivered or redelivered.
            position: Source position after this message, bytes or JSON, at most 4 KiB; needs a *producer_id*. A message
                without a position is committed together with the next message that has one.

        Raises:
            ConfigError: A value has the wrong type or is out of bounds, a header name is reserved, or the delay is
                longer than the retention of the topics.
            KafkaClientError: The message is too large, or the client's send buffer stayed full for *timeout*.
            KmqError: An earlier message without a callback has failed; this message was not sent.
            FencedError: A newer producer with this *producer_id* has taken over; uncommitted messages are not sent.
            UsageError: The producer is closed, was created in another process, or has no *producer_id* for a
                *position*.
        """
        # Checked inline before the call: a function call that does nothing costs a twentieth of a send.
        if self._is_unusable:
            self._check_usable()
        if self._errors:
            self._raise_failed()
        if not ((type(value) is bytes or isinstance(value, _SENDABLE)) and (key is None or isinstance(key, _SENDABLE))):
            wrong = key if isinstance(value, _SENDABLE) else value
            message = (
                f"message has the wrong type: expected bytes, str or None, got {type(wrong).__name__}; encode it first"
            )
            raise ConfigError(message)
        pairs = checked_headers(headers) if headers else None
        if not (queue is None and delay is None and at is None and ttl is None):
            options = option_headers(queue=queue, delay=delay, at=at, ttl=ttl)
            self._retentions.check(self._topic, wait_ms(delay, at, time.time()))
            pairs = [*(pairs or ()), *options]
        if self._resuming is not None:
            self._resuming.send(value, key, partition, pairs, on_delivery, position)
            return
        if position is not None:
            raise self._no_id("a position")
        report = self._on_report if on_delivery is None else _DeliveryReport(on_delivery, self._topic)
        self._produce(value, key, -1 if partition is None else partition, pairs, report)
        self._sent_count += 1
        if self._sent_count % SERVE_EVERY == 0:
            self._producer.poll(0)

    @property
    def position(self) -> SourcePosition:
        """
        Source position after the last committed message; None if no position was ever committed.

        Raises:
            UsageError: The producer has no *producer_id*.
        """
        return self._committed_state("a position").position

    @property
    def sequence(self) -> int:
        """
        Count of messages committed under this *producer_id*, by all processes that used it.

        Raises:
            UsageError: The producer has no *producer_id*.
        """
        return self._committed_state("a sequence").sequence

    @property
    def generation(self) -> int:
        """
        Count of processes that have used this *producer_id*, including this one.

        Raises:
            UsageError: The producer has no *producer_id*.
        """
        return self._committed_state("a generation").generation

    def commit(self, *, position: SourcePosition = None, timeout: float = 30.0) -> None:
        """
        Commit every message sent so far, and wait for the commit.

        Args:
            position: Current source position. Needed if the source advanced past records that produced no message.
            timeout: Longest wait, seconds.

        Raises:
            FencedError: A newer producer with this *producer_id* has taken over; uncommitted messages are not sent.
            KmqError: Sending has failed; uncommitted messages are not sent.
            KafkaClientError: The commit took longer than *timeout*; the producer still tries it.
            UsageError: The producer has no *producer_id*, is closed, or was created in another process.
        """
        self._check_usable()
        if self._resuming is None:
            raise self._no_id("commit()")
        self._resuming.commit(timeout, position)

    def flush(self, timeout: float = 30.0) -> None:
        """
        Wait until every message sent so far is durable. With a *producer_id*, wait until it is committed.

        Args:
            timeout: Longest wait, seconds.

        Raises:
            KmqError: A message without a callback has failed; the first such error since the last call.
            KafkaClientError: It took longer than *timeout*; the messages are still being sent.
            UsageError: The producer is closed or was created in another process.
        """
        self._check_usable()
        if self._resuming is not None:
            self._resuming.commit(timeout)
            return
        left = self._producer.flush(timeout)
        self._raise_failed()
        if left:
            message = (
                f"cannot send to {self._topic}: {left} message(s) are not durable after {timeout:g} s; "
                "check the broker, they are still being sent"
            )
            raise KafkaClientError(message, code="_TIMED_OUT", retriable=True)

    def close(self, timeout: float = 30.0) -> None:
        """
        Send the remaining messages, then disconnect. A second call does nothing.

        Args:
            timeout: Longest wait, seconds.

        Raises:
            KmqError: As `flush`. Messages that are not durable by then are dropped.
        """
        if self._closed.is_set() or self._pid != os.getpid():
            return
        if self._resuming is not None:
            self._set_closed()
            self._resuming.close(timeout)
            return
        try:
            self.flush(timeout)
        finally:
            self._set_closed()
            self._thread.join()
            self._producer.purge()
            self._producer.flush(1.0)

    def after_fork(self) -> tuple[object, ...]:
        """Refuse calls in a forked child process; return the Kafka clients that it must not use."""
        self._is_unusable = True
        return (self._producer,) if self._resuming is None else self._resuming.clients

    def _abort(self) -> None:
        if self._resuming is not None and not self._closed.is_set() and self._pid == os.getpid():
            self._set_closed()
            self._resuming.close(0.0, is_aborting=True)

    def _set_closed(self) -> None:
        self._is_unusable = True
        self._closed.set()

    def _committed_state(self, what: str) -> ProducerState:
        if self._resuming is None:
            raise self._no_id(what)
        return self._resuming.state

    @staticmethod
    def _no_id(what: str) -> UsageError:
        return UsageError(f"producer has no producer_id: got a use of {what}, which needs one; give it a producer_id")

    def _produce(
        self,
        value: bytes | str | None,
        key: bytes | str | None,
        partition: int,
        headers: list[tuple[str, bytes | str | None]] | None,
        report: Callable[[KafkaError | None, KafkaMessage], None],
    ) -> None:
        until = 0.0
        while True:
            try:
                # Positional arguments: keyword arguments are half of the cost of the call.
                self._producer.produce(self._topic, value, key, partition, report, None, 0, headers)
            except BufferError as error:
                # Back-pressure: serving delivery reports frees space in the send buffer.
                until = until or time.monotonic() + self._timeout
                if time.monotonic() > until:
                    message = (
                        f"cannot send to {self._topic}: the client's send buffer was full for {self._timeout:g} s; "
                        "check the broker, or send more slowly"
                    )
                    raise KafkaClientError(message, code="_QUEUE_FULL", retriable=True) from error
                self._producer.poll(0.05)
            except KafkaException as error:
                raise self._send_error(error, value) from error
            else:
                return

    def _send_error(self, error: KafkaException, value: bytes | str | None) -> KmqError:
        if error.args[0].name() == "MSG_SIZE_TOO_LARGE":
            size = len(value) if value is not None else 0
            return KafkaClientError(
                f"message is too large: got a value of {size} bytes, maximum {self._max_message_bytes} with key and "
                "headers; send a reference to the content, or raise max_message_bytes of queue and producer",
                code="MSG_SIZE_TOO_LARGE",
            )
        return client_error(error, f"cannot send to {self._topic}")

    def _on_report(self, error: KafkaError | None, _record: KafkaMessage) -> None:
        if error is not None:
            self._errors.append(client_error(error, f"cannot send to {self._topic}"))

    def _raise_failed(self) -> None:
        if self._errors:
            errors, self._errors = self._errors, []
            if len(errors) > 1:
                logger.error("%d messages to %s failed", len(errors), self._topic, extra={"action": "send_failed"})
            raise errors[0]

    def _serve_while_idle(self) -> None:
        seen = -1
        while not self._closed.wait(IDLE_S):
            is_idle, seen = seen == self._sent_count, self._sent_count
            if is_idle and len(self._producer):
                self._producer.poll(IDLE_S)

    def _check_usable(self) -> None:
        if self._pid != os.getpid():
            message = (
                f"producer belongs to another process: got a call in process {os.getpid()}, it was created in process "
                f"{self._pid}; create one after the fork"
            )
            raise UsageError(message)
        if self._closed.is_set():
            message = "producer is closed: got a call after close; create a new one"
            raise UsageError(message)


class _DeliveryReport:
    """Delivery report of one message, passed to the callback of its sender."""

    __slots__ = ("_on_delivery", "_topic")

    def __init__(self, on_delivery: OnDelivery, topic: str) -> None:
        self._on_delivery = on_delivery
        self._topic = topic

    def __call__(self, error: KafkaError | None, record: KafkaMessage) -> None:
        try:
            if error is not None:
                self._on_delivery(None, client_error(error, f"cannot send to {self._topic}"))
            else:
                self._on_delivery(MessageId(record.partition() or 0, record.offset() or 0), None)
        except Exception:
            # Uncaught, it would be raised in the call that serves the report, which may be for another message.
            logger.exception("delivery callback raised an exception", extra={"action": "callback_failed"})


def checked_headers(headers: Headers) -> list[tuple[str, bytes | str | None]]:
    """
    Return the sender's headers as a list of pairs.

    Raises:
        ConfigError: A name or a value has the wrong type, or a name is reserved.
    """
    pairs = list(headers.items() if hasattr(headers, "items") else headers)
    for name, value in pairs:
        if not isinstance(name, str) or not isinstance(value, bytes | str | None):
            message = (
                f"header has the wrong type: expected a str name and a bytes, str or None value, got {name!r}; "
                "encode it"
            )
            raise ConfigError(message)
        if name.startswith(PREFIX):
            message = f"header name is reserved: got {name!r}, names that begin with {PREFIX} are reserved; rename it"
            raise ConfigError(message)
    return pairs
