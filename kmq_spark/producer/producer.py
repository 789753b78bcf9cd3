"""
Send messages to a queue. A message is reported as sent only when it is durable.

Rule 1: no failure is lost. It is passed to the message's callback, or the next call raises it. A producer that is not
closed sends what is left when its process ends, and says so where that fails.
Rule 2: a thread that sends much serves the delivery reports itself. The producer's own thread serves them while less is
sent: two busy threads that compete for the interpreter lock would serve one report per 5 ms (Python's switch interval).

Source: librdkafka INTRODUCTION.md, "Message reliability"; confluent-kafka's `produce`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaException, Producer

from kmq_spark.core.durations import seconds
from kmq_spark.core.markers import MessageId
from kmq_spark.errors import KafkaClientError, KmqError, TopicError, UsageError
from kmq_spark.kafka.client_errors import client_error, serve_reports
from kmq_spark.kafka.queue_topics import QueueTopics
from kmq_spark.kafka.settings import MAX_MESSAGE_BYTES, make_client, producer_config
from kmq_spark.kafka.topics import partition_count
from kmq_spark.producer.options import SendOptions, checked_headers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime, timedelta
    from types import TracebackType
    from typing import Self

    from confluent_kafka import KafkaError, Message

    from kmq_spark.kafka.serializers import Serializer
    from kmq_spark.producer.options import Headers, Pairs

    OnDelivery = Callable[[MessageId | None, KmqError | None], object]

logger = logging.getLogger(__name__)

SERVE_S = 0.01
"""Interval at which the producer's own thread serves the delivery reports, while some are outstanding."""

REST_S = 1.0
"""Longest rest of that thread while none is outstanding; a send ends it."""

SERVE_EVERY = 100
"""Messages between two polls for delivery reports. A poll costs about a tenth of a send."""

PARTITIONS_READ_EVERY_S = 60.0
"""How often the number of partitions is read, so that new ones get messages too."""

EXIT_TIMEOUT_S = 30.0
"""How long the end of a process waits for the messages of a producer that was not closed."""

_forks = 0
"""How many forks lie between this process and the first one: cheaper to compare in each send than the process id."""


def _note_fork() -> None:
    global _forks  # noqa: PLW0603  # of the process
    _forks += 1


os.register_at_fork(after_in_child=_note_fork)


def forks() -> int:
    """Return how many forks lie between this process and the first one."""
    return _forks


class QueueProducer:
    """
    Producer of a queue. Thread-safe. Use it in a `with` block, or call `close`.

    A retry of the client neither duplicates a message nor changes the order within a partition, unless it begins a new
    epoch after an election or a time-out (librdkafka issue 4953). For messages that are sent exactly once, also after
    a crash of this process, see `ResumingProducer`.
    """

    def __init__(
        self,
        queue: str,
        *,
        bootstrap_servers: str,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        delivery_timeout: float | timedelta = 120.0,
        serializer: Serializer | None = None,
        timeout: float | timedelta = 10.0,
        extra: Mapping[str, str] | None = None,
    ) -> None:
        """
        Connect, and check that the queue topic exists.

        Args:
            queue: Name of the queue and of its topic.
            bootstrap_servers: Comma-separated `host:port`.
            max_message_bytes: Largest message in bytes, key, value and headers together. Use the value that the queue
                was created with.
            delivery_timeout: Time after which an undelivered message has failed, seconds or a timedelta
                (`delivery.timeout.ms`).
            serializer: What makes bytes of the values: `JsonSerializer()`, or one of confluent-kafka's serializers. By
                default values are bytes or text.
            timeout: Timeout of metadata requests, seconds or a timedelta. Also the longest time that `send` blocks
                because the client's send buffer is full.
            extra: librdkafka settings.

        Raises:
            ConfigError: A value is out of bounds, or a setting in *extra* would break a guarantee.
            TopicError: The queue topic does not exist.
            KafkaClientError: The broker cannot be reached within *timeout*.
        """
        self._topic = QueueTopics(queue).queue_topic
        self._timeout = seconds("timeout", timeout)
        self._max_message_bytes = max_message_bytes
        self._options = SendOptions(bootstrap_servers, self._timeout, extra)
        self._serialize: Callable[[Any, Pairs], tuple[bytes | None, Pairs]] | None = None
        if serializer is not None:
            from kmq_spark.kafka.serializers import serialized  # noqa: PLC0415  # most producers need none

            self._serialize = partial(serialized, serializer, self._topic)
        self._forks = _forks
        self._errors: list[KmqError] = []
        self._reports = Reports(self._topic)
        self._sent_count = 0
        self._is_closed = self._is_resting = self._is_busy = False
        self._awake = threading.Event()
        self._producer = make_client(
            Producer,
            producer_config(
                bootstrap_servers,
                extra=extra,
                max_message_bytes=max_message_bytes,
                delivery_timeout=seconds("delivery_timeout", delivery_timeout),
            ),
        )
        self._partition_count = partition_count(self._producer, self._topic, bootstrap_servers, self._timeout)
        self._partitions_read_at_s = time.monotonic()
        if not self._partition_count:
            message = f"queue {queue!r} does not exist; run `kmq queue create {queue}`"
            raise TopicError(message)
        self._at_exit = weakref.finalize(self, _send_the_rest, self._producer, self._reports, self._errors, _forks)
        self._thread = threading.Thread(
            target=_serve_reports, args=(weakref.ref(self), self._awake), name=f"kmq-producer-{queue}", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> Self:
        """Return the producer."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the producer. If the body raised, that exception is raised and an error of closing is only logged."""
        try:
            self.close()
        except KmqError:
            if error is None:
                raise
            logger.exception("cannot close the producer of %s", self._topic, extra={"action": "close_failed"})

    def send(
        self,
        value: Any,  # noqa: ANN401  # what the serializer takes
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
        """
        Send a message; return before it is durable.

        Delay and TTL are measured on the broker's clock. The first message with a delay reads the retention of the
        queue topic and of its markers topic. The markers topics of subscriptions are not checked.

        Args:
            value: Payload: bytes or text, which is encoded as UTF-8, or what the producer's serializer takes.
            key: All messages with one key are sent to one partition; text is encoded as UTF-8.
            headers: Kept in redelivered copies and dead letters. Names that begin with `kmq-` are reserved.
            partition: Queue partition. By default the key selects it; without a key it is random.
            on_delivery: Called once, in the thread of a later call or in the producer's own thread, as
                `on_delivery(message_id, None)` or `on_delivery(None, error)`. Without it, the next call raises the
                error. The id has offset -1 where the broker has the message and did not say its place, as after an
                election.
            logical_queue: Only consumers of this logical queue receive the message; 1 to 200 characters of A-Z a-z 0-9
                . _ -.
            delay: Time after the append time before the message is delivered, seconds or a timedelta; 0 means no delay.
            at: Instant before which the message is not delivered, aware datetime or epoch seconds; an instant in the
                past means no delay. *delay* and *at* exclude each other.
            ttl: Time after the append time of the first copy when the message expires, seconds or a timedelta, more
                than 0. An expired message is not delivered or redelivered.

        Raises:
            ConfigError: A value is out of bounds, a header name is reserved, the serializer raised, or the delay is
                longer than the retention of the topics.
            KafkaClientError: The message is too large, or the client's send buffer stayed full for *timeout*.
            KmqError: An earlier message without a callback has failed; this message was not sent.
            UsageError: The producer is closed or was created in another process.
        """
        # Checked inline before the call: a function call that does nothing costs a twentieth of a send.
        if self._is_closed or self._forks != _forks:
            self._check_usable()
        if self._errors:
            self._raise_failed()
        pairs: Pairs | None = None
        if self._serialize is not None:
            value, headers = self._serialize(value, checked_headers(headers or ()))
        if headers or not (logical_queue is None and delay is None and at is None and ttl is None):
            pairs = self._options.headers(
                self._topic, headers, logical_queue=logical_queue, delay=delay, at=at, ttl=ttl
            )  # fmt: skip
        report = self._on_report if on_delivery is None else _DeliveryReport(on_delivery, self._reports)
        if partition is None:
            # The client sends all of 10 ms to one partition. That makes large batches of much, but of a few messages
            # one worker would do all.
            partition = _random_partition(self._partition_count) if key is None and not self._is_busy else -1
        self._produce(value, key, partition, pairs, report)
        self._sent_count += 1
        if self._is_resting:
            self._is_resting = False
            self._awake.set()
        if self._sent_count % SERVE_EVERY == 0:
            self._reports.serve(self._producer.poll, 0)

    def flush(self, timeout: float = 30.0) -> None:
        """
        Wait until every message sent so far is durable.

        Args:
            timeout: Longest wait, seconds.

        Raises:
            KmqError: A message without a callback has failed; the first such error since the last call.
            KafkaClientError: It took longer than *timeout*; the messages are still being sent.
            UsageError: The producer is closed or was created in another process.
        """
        self._check_usable()
        left = self._reports.flush(self._producer, timeout)
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
        if self._is_closed or self._forks != _forks:
            return
        try:
            self.flush(timeout)
        finally:
            self._is_closed = True
            self._at_exit.detach()
            self._awake.set()
            self._thread.join()
            self._producer.purge()
            self._producer.flush(1.0)

    def _produce(
        self,
        value: bytes | str | None,
        key: bytes | str | None,
        partition: int,
        headers: Pairs | None,
        report: Callable[[KafkaError | None, Message], None],
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
                self._reports.serve(self._producer.poll, 0.05)
            except KafkaException as error:
                if error.args[0].name() == "MSG_SIZE_TOO_LARGE":
                    raise message_too_large(value, self._max_message_bytes) from error
                self._reports.serve(self._producer.poll, 0)  # has the cause, where the client has ended
                raise self._reports.error_of(error.args[0]) from error
            else:
                return

    def _on_report(self, error: KafkaError | None, _record: Message) -> None:
        if error is not None:
            self._errors.append(self._reports.error_of(error))
        else:
            self._reports.is_proven = True

    def _raise_failed(self) -> None:
        if self._errors:
            errors = self._errors[:]
            self._errors.clear()
            if len(errors) > 1:
                logger.error("%d messages to %s failed", len(errors), self._topic, extra={"action": "send_failed"})
            raise errors[0]

    def _serve(self, seen: int) -> int:
        """Serve the delivery reports unless the callers do; return how many messages were sent by now."""
        sent = self._sent_count
        self._is_busy = sent - seen >= SERVE_EVERY
        if not self._is_busy:
            self._reports.serve(self._producer.poll, 0)
            self._read_partitions()
        # Set before the count is read again: a send in between sees it, or is seen.
        self._is_resting = not len(self._producer)
        if sent != self._sent_count:
            self._is_resting = False
        return sent

    def _read_partitions(self) -> None:
        if time.monotonic() - self._partitions_read_at_s > PARTITIONS_READ_EVERY_S:
            self._partitions_read_at_s = time.monotonic()
            with contextlib.suppress(KafkaException):
                found = self._producer.list_topics(self._topic, timeout=1.0).topics[self._topic].partitions
                self._partition_count = max(self._partition_count, len(found))

    def _check_usable(self) -> None:
        check_process(self._forks)
        if self._is_closed:
            message = "producer is closed: got a call after close; create a new one"
            raise UsageError(message)


_random_partition = random.Random().randrange  # noqa: S311  # to spread work


def _serve_reports(producer: weakref.ref[QueueProducer], awake: threading.Event) -> None:
    """Serve the delivery reports of a producer until it is closed, or gone; rest while none is outstanding."""
    seen = 0
    while (served := producer()) is not None and not served._is_closed:  # noqa: SLF001  # its own thread
        seen = served._serve(seen)  # noqa: SLF001  # as above
        is_resting = served._is_resting  # noqa: SLF001  # as above
        del served
        if is_resting:
            awake.wait(REST_S)
        awake.clear()
        time.sleep(SERVE_S)


def _send_the_rest(producer: Producer, reports: Reports, errors: list[KmqError], forks: int) -> None:
    """Send what a producer that was not closed has left, when it is collected, or its process ends."""
    if forks != _forks:
        return
    left = reports.flush(producer, EXIT_TIMEOUT_S)
    if left or errors:
        logger.error(
            "a producer of %s was not closed: %d messages were not sent%s; use it in a `with` block, or call close()",
            reports.topic, left + len(errors), f", the first error: {errors[0]}" if errors else "",
            extra={"action": "not_closed", "queue": reports.topic},
        )  # fmt: skip


class Reports:
    """What a producer knows from its delivery reports, and from the client's fatal error."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.is_proven = False
        self._last_offsets: dict[int, int] = {}
        self._fatal: KafkaError | None = None

    def flush(self, producer: Producer, timeout: float) -> int:
        """Wait until no message is outstanding; return how many are."""
        until = time.monotonic() + timeout
        # `flush` loses reports beside an error that ends the client: it comes with the first message, or hardly ever.
        while len(producer) and not self.is_proven and time.monotonic() < until:
            self.serve(producer.poll, 0.05)
        return self.serve(producer.flush, max(0.0, until - time.monotonic()))

    def serve(self, serve: Callable[[float], int], timeout: float) -> int:
        """Serve the reports by a call of the client; return its answer."""
        return serve_reports(serve, timeout, self._note_fatal)

    def _note_fatal(self, error: KafkaError) -> None:
        self._fatal = error

    def error_of(self, error: KafkaError) -> KmqError:
        """Return our error of a message. What ended the client is the cause of all later ones."""
        return client_error(self._fatal or error, f"cannot send to {self.topic}")

    def id_of(self, record: Message) -> MessageId:
        """Return the id of a durable message; see `records.place_of`. The offsets of one producer ascend."""
        self.is_proven = True
        partition, offset = record.partition() or 0, record.offset()
        if offset is None or offset <= self._last_offsets.get(partition, -1):
            return MessageId(partition, -1)
        self._last_offsets[partition] = offset
        return MessageId(partition, offset)


class _DeliveryReport:
    """Delivery report of one message, passed to the callback of its sender."""

    __slots__ = ("_on_delivery", "_reports")

    def __init__(self, on_delivery: OnDelivery, reports: Reports) -> None:
        self._on_delivery = on_delivery
        self._reports = reports

    def __call__(self, error: KafkaError | None, record: Message) -> None:
        try:
            if error is not None:
                self._on_delivery(None, self._reports.error_of(error))
            else:
                self._on_delivery(self._reports.id_of(record), None)
        except Exception:
            # Uncaught, it would be raised in the call that serves the report, which may be for another message.
            logger.exception("delivery callback raised an exception", extra={"action": "callback_failed"})


def check_process(forks: int) -> None:
    """
    Refuse a producer in a forked child process: the threads of its client exist only in the parent.

    Raises:
        UsageError: The process was forked after the producer was created.
    """
    if forks != _forks:
        message = f"producer belongs to another process: got a call in process {os.getpid()}; create one after the fork"
        raise UsageError(message)


def message_too_large(value: bytes | str | None, max_message_bytes: int) -> KafkaClientError:
    """Return the error of a message that is larger than the largest message of its producer."""
    return KafkaClientError(
        f"message is too large: got a value of {len(value or b'')} bytes; expected at most {max_message_bytes} with "
        "key and headers; send a reference to the content, or raise max_message_bytes of queue and producer",
        code="MSG_SIZE_TOO_LARGE",
    )
