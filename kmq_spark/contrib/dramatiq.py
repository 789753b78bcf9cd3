"""
A broker for dramatiq: its actors, workers and middleware, on a queue of kmq-spark.

Rule 1: a queue of dramatiq is a logical queue. So one tracker serves all of them, and declaring one connects nowhere.
Rule 2: there are no delay queues. A delay is a header, and the tracker keeps the time: no worker holds what waits.
Rule 3: `enqueue` returns when the message is durable: `Retries` sends the next attempt, then this one is acknowledged.

Source: dramatiq's `StubBroker` for errors and hooks; `RabbitmqBroker` for requeue and late acknowledgements.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from kmq_spark.consumer.consumer import QueueConsumer
from kmq_spark.consumer.message import text_of_failure
from kmq_spark.errors import KafkaClientError, KmqError, LeaseLostError, UsageError, needing
from kmq_spark.kafka.queue_topics import QueueTopics
from kmq_spark.producer.producer import QueueProducer, forks

with needing("dramatiq", "use the dramatiq broker"):
    from dramatiq import Broker, Consumer, Message, MessageProxy
    from dramatiq.errors import ConnectionClosed, DecodeError, QueueJoinTimeout, QueueNotFound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from datetime import timedelta

    from dramatiq import Middleware

    from kmq_spark.consumer.message import Message as Delivery
    from kmq_spark.core.markers import MessageId

logger = logging.getLogger(__name__)

FLUSH_S = 0.05
"""How long one wait for a durable message lasts: a flush also waits for what other threads send meanwhile."""

JOIN_PAUSE_S = 0.1
"""Pause of `join` between two looks at the topics."""


class KmqBroker(Broker):
    """
    Broker for dramatiq on a queue.

    Each queue of dramatiq is a logical queue of it. The queue must exist, and a tracker must run: it delivers delayed
    messages and retries, and what a killed worker had; it writes the dead letters.
    """

    def __init__(
        self,
        queue: str,
        *,
        bootstrap_servers: str,
        middleware: list[Middleware] | None = None,
        lease: float | timedelta | None = None,
        max_lease: float | timedelta | None = None,
        timeout: float | timedelta = 30.0,
        extra: Mapping[str, str] | None = None,
    ) -> None:
        """
        Keep the arguments. Producer and consumers connect when they are first used, also after a fork.

        Args:
            queue: Name of the queue and of its topic.
            bootstrap_servers: Comma-separated `host:port`.
            middleware: Middleware of dramatiq; by default dramatiq's own.
            lease: As for `QueueConsumer`; by default the lease in the rules of the queue, else 30 s.
            max_lease: As for `QueueConsumer`. Choose it longer than the time limit of the slowest actor.
            timeout: Longest time for which `enqueue` waits until a message is durable, seconds or a timedelta.
            extra: librdkafka settings, without `client.id` and `group.id`.

        Raises:
            ConfigError: The name of the queue is not allowed.
        """
        super().__init__(middleware)
        self._topics = QueueTopics(queue)
        self._reach: dict[str, Any] = {"bootstrap_servers": bootstrap_servers, "extra": extra}
        self._leases: dict[str, Any] = {"lease": lease, "max_lease": max_lease}
        self._timeout = timeout
        self._lock = threading.Lock()
        self._opened: tuple[int, QueueProducer] | None = None
        self.queues: dict[str, None] = {}

    def declare_queue(self, queue_name: str) -> None:
        """
        Declare a queue. Nothing is created: a logical queue begins with its first message.

        Raises:
            ConfigError: The name is not allowed.
        """
        if queue_name not in self.queues:
            self._topics.logical_group(queue_name)  # checks the name
            self.emit_before("declare_queue", queue_name)
            self.queues[queue_name] = None
            self.emit_after("declare_queue", queue_name)

    def enqueue(self, message: Message[Any], *, delay: int | None = None) -> Message[Any]:
        """
        Send a message; return it when it is durable.

        Args:
            message: The message.
            delay: Milliseconds before which it is not delivered, at most the retention of the topics.

        Raises:
            QueueNotFound: Its queue was not declared.
            ConnectionClosed: The brokers do not answer.
            KafkaClientError: The message is too large.
            ConfigError: The delay is out of bounds.
            TopicError: The queue does not exist.
        """
        self._check_declared(message.queue_name)
        retried = message if isinstance(message, _Proxy) else None
        try:
            self.emit_before("enqueue", message, delay)
            with _connection_errors():
                self._send(message, delay)
        except BaseException as error:
            if retried is not None:
                retried.unsent = error
            raise
        if retried is not None:
            retried.unsent = None
        self.emit_after("enqueue", message, delay)
        return message

    def consume(self, queue_name: str, prefetch: int = 1, timeout: int = 30_000) -> Consumer:
        """
        Return a consumer of a queue, which holds at most *prefetch* messages and waits *timeout* milliseconds for one.

        Raises:
            QueueNotFound: The queue was not declared.
            ConnectionClosed: The brokers do not answer.
            TopicError: A topic of the queue is missing.
        """
        self._check_declared(queue_name)
        with _connection_errors():
            consumer = QueueConsumer(
                self._topics.queue, logical_queue=queue_name, max_in_flight=prefetch, **self._reach, **self._leases
            )
        return _Consumer(consumer, queue_name, prefetch, timeout / 1_000)

    def flush(self, queue_name: str) -> None:
        """Raise UsageError: a Kafka topic is not emptied while consumers read it."""
        message = f"a queue cannot be flushed: got {queue_name!r}; use a new queue for each test"
        raise UsageError(message)

    def flush_all(self) -> None:
        """Raise UsageError, if a queue was declared."""
        for queue_name in self.queues:
            self.flush(queue_name)

    def join(self, queue_name: str, *, timeout: int | None = None) -> None:
        """
        Wait until every message of a queue is done, delayed ones and dead letters too. For tests: it reads the topics.

        Messages in flight do not tell their logical queue: those of all queues of the broker are waited for.

        Args:
            queue_name: The queue.
            timeout: Milliseconds; None for no limit.

        Raises:
            QueueNotFound: The queue was not declared.
            QueueJoinTimeout: It took longer than *timeout*.
        """
        from kmq_spark.inspection.inspector import QueueInspector  # noqa: PLC0415  # workers need none

        self._check_declared(queue_name)
        until = None if timeout is None else time.monotonic() + timeout / 1_000
        idle_end: Mapping[int, int] | None = None
        with QueueInspector(self._topics.queue, **self._reach) as inspector:
            while True:
                view = inspector.look()
                # A handler may have sent a message between the look at what is ready and that at what is in flight.
                if view.queue_topic.end == idle_end:
                    return
                logical = view.logical.get(queue_name)
                is_idle = not (view.in_flight or view.deferred or (logical and logical.ready))
                idle_end = view.queue_topic.end if is_idle else None
                if until is not None and time.monotonic() >= until:
                    raise QueueJoinTimeout(queue_name)
                time.sleep(JOIN_PAUSE_S)

    def close(self) -> None:
        """Close the producer. Workers close their consumers."""
        with self._lock:
            if self._opened is not None and self._opened[0] == forks():
                self._opened[1].close()
            self._opened = None

    def _check_declared(self, queue_name: str) -> None:
        if queue_name not in self.queues:
            raise QueueNotFound(queue_name)

    def _send(self, message: Message[Any], delay: int | None) -> None:
        with self._lock:
            if self._opened is None or self._opened[0] != forks():
                self._opened = (
                    forks(),
                    QueueProducer(self._topics.queue, delivery_timeout=self._timeout, **self._reach),
                )
            producer = self._opened[1]
        reports: list[KmqError | None] = []

        def report(_id: MessageId | None, error: KmqError | None) -> None:
            reports.append(error)

        delay_s = None if delay is None else delay / 1_000
        producer.send(message.encode(), logical_queue=message.queue_name, delay=delay_s, on_delivery=report)
        while not reports:
            with contextlib.suppress(KafkaClientError):  # not durable yet
                producer.flush(FLUSH_S)
        if reports[0] is not None:
            raise reports[0]


@contextlib.contextmanager
def _connection_errors() -> Iterator[None]:
    """Raise what may succeed later as dramatiq's error for it: its workers then try again."""
    try:
        yield
    except KafkaClientError as error:
        if not error.retriable:
            raise
        raise ConnectionClosed(str(error)) from error


class _Proxy(MessageProxy):
    """
    A message of dramatiq with its delivery.

    *unsent* is why the newest retry could not be sent. dramatiq logs that, and would acknowledge the message.
    """

    def __init__(self, delivery: Delivery, queue_name: str) -> None:
        # A worker finds the consumer by this name. Another one, as of a message from elsewhere, would end its thread.
        super().__init__(Message.decode(delivery.value or b"").copy(queue_name=queue_name))
        self.delivery = delivery
        self.unsent: BaseException | None = None


class _Consumer(Consumer):
    """The messages of one logical queue. One thread iterates; others settle."""

    def __init__(self, consumer: QueueConsumer, queue_name: str, prefetch: int, timeout_s: float) -> None:
        self._consumer, self._queue_name = consumer, queue_name
        self._prefetch, self._timeout_s = prefetch, timeout_s
        self._waiting: deque[Delivery] = deque()

    def __next__(self) -> _Proxy | None:
        if not self._waiting:
            self._waiting.extend(self._consumer.receive(self._prefetch, timeout=self._timeout_s))
        while self._waiting:
            delivery = self._waiting.popleft()
            try:
                return _Proxy(delivery, self._queue_name)
            except DecodeError as error:
                logger.warning("%r is no message of dramatiq: %s", delivery, error.error, extra={"action": "rejected"})
                _settle(delivery.reject, f"no message of dramatiq: {text_of_failure(error.error)}")
        return None

    def ack(self, message: Any) -> None:  # noqa: ANN401  # always a `_Proxy`
        if message.unsent is None:
            _settle(message.delivery.ack)
        else:
            _settle(message.delivery.fail, message.unsent)

    def nack(self, message: Any) -> None:  # noqa: ANN401  # as above
        error = message._exception  # noqa: SLF001  # dramatiq has no other way to it
        _settle(message.delivery.reject, "" if error is None else text_of_failure(error))

    def requeue(self, messages: Iterable[Any]) -> None:
        for message in messages:
            message.delivery._release_uncounted()  # noqa: SLF001  # private to the package: not for handlers

    def close(self) -> None:
        for delivery in self._waiting:
            delivery._release_uncounted()  # noqa: SLF001  # as above
        self._waiting.clear()
        try:
            self._consumer.close()
        except KmqError as error:  # dramatiq would pass over it
            logger.warning("%s", error, extra={"action": "close_failed"})


def _settle(settle: Callable[..., None], *arguments: object) -> None:
    try:
        settle(*arguments)
    except LeaseLostError as error:
        logger.warning("%s", error, extra={"action": "lease_lost"})
