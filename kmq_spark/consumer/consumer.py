"""
Receive messages of a queue, hold them under a lease, and settle them one by one or in batches.

Rule 1: `receive` and `receive_batch` return at most *max_messages*. Without `prefetch`, the consumer holds no other
messages.
Rule 2: `ack`, `release` and `reject` may be called from any thread; only one thread at a time may call them.
Rule 3: a message that is suspected of crashing its process is delivered separately; see `poison/suspects.py`.
Rule 4: a process that is killed at any point loses no message. The tracker redelivers a message that was started;
another consumer fetches a message that was not.

Source: SQS's receive loop; Kafka's share consumer (KIP-932) for the verbs; kmq `KmqClient` for START and END.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any, overload

from kmq_spark.consumer.admission import AdmissionPolicy
from kmq_spark.consumer.batch import Batch
from kmq_spark.consumer.checks import check_bounds, check_logical_queue, check_topics, limits_of
from kmq_spark.consumer.commit import ResultTransactions
from kmq_spark.consumer.intake import Intake
from kmq_spark.consumer.leases import LeaseTable, Settled, Verb
from kmq_spark.consumer.marker_producer import MarkerProducer
from kmq_spark.consumer.marker_writer import MarkerWriter
from kmq_spark.consumer.missing_offsets import MissingOffsets
from kmq_spark.consumer.receiver import Receiver, Result
from kmq_spark.consumer.worker import MAX_BATCH, Worker
from kmq_spark.core.durations import MIN_LEASE_MS, milliseconds
from kmq_spark.errors import ConfigError, KmqError, UsageError
from kmq_spark.kafka.queue_rules import lease_of
from kmq_spark.kafka.queue_topics import QueueTopics
from kmq_spark.kafka.settings import consumer_config, marker_producer_config, new_client_id
from kmq_spark.metrics.worker import serving_worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from datetime import timedelta
    from types import TracebackType
    from typing import Self

    from kmq_spark.consumer.batch import Failures
    from kmq_spark.consumer.leases import Lease
    from kmq_spark.consumer.message import Message
    from kmq_spark.consumer.transaction import Transaction
    from kmq_spark.consumer.worker import RunSummary

logger = logging.getLogger(__name__)


def _itself(batch: Batch) -> Batch:
    return batch


class QueueConsumer:
    """
    Consumer of a queue.

    Use it in a `with` block, or call `close`.
    """

    _is_closed = _is_stopped = False
    _worker: Worker | None = None

    def __init__(
        self,
        topic: str,
        *,
        bootstrap_servers: str,
        queue: str = "",
        group: str = "",
        consumer_group: str | None = None,
        group_protocol: str = "classic",
        lease_ms: int | None = None,
        max_lease_ms: int | None = None,
        max_in_flight: int = 1_000,
        max_in_flight_bytes: int = 64 * 1024 * 1024,
        prefetch: int = 0,
        isolate_after: int = 2,
        keep_alive: bool = True,
        consumer_id: str | None = None,
        ack_linger_ms: int = 5,
        start_timeout_ms: int | None = None,
        timeout: float = 10,
        extra: Mapping[str, str] | None = None,
    ) -> None:
        """
        Connect, check that the topics exist, and join the consumer group.

        Args:
            topic: Name of the queue and of its topic.
            bootstrap_servers: Comma-separated `host:port`.
            queue: Logical queue, if several share the topic. By default the consumer receives the messages without a
                logical queue. Each logical queue has its own committed offsets. The consumer skips messages of other
                logical queues; they do not delay it.
            group: Group, if several applications read the queue. Each group receives every message and has its own
                markers topic, dead-letter topic and tracker: `kmq queue create <topic>@<group>`.
            consumer_group: Kafka `group.id`; by default `kmq.<topic>` plus the names of group and logical queue.
            group_protocol: `classic`; or `consumer` (KIP-848) for brokers from 4.0: rebalances do not stop the whole
                group, and fewer messages are repeated after a consumer is killed; or `eager` to share a group with
                clients that support only eager rebalancing, such as kafka-mq-go's workers.
            lease_ms: Length of a lease, 1 s to 12 h. A message is redelivered when its lease ends; keep-alive renews
                it. By default the lease in the rules of the queue (`kmq queue alter --lease-ms`), else 30 s.
            max_lease_ms: Longest total time that keep-alive holds a message; by default ten leases or 12 h, whichever
                is less. After that, a handler that hangs loses its message.
            max_in_flight: Maximum number of messages held at once.
            max_in_flight_bytes: Maximum bytes of values, keys and headers held at once. A single message may be larger.
            prefetch: Batches that `receive` fetches ahead, each of at most *max_messages* messages. Faster, but other
                consumers cannot process prefetched messages. `close` releases the unused ones without counting the
                delivery. With 0, the consumer holds only what `receive` returned.
            isolate_after: A message becomes a suspect after this many deliveries that ended silently (no answer, as
                when a process dies). A suspect is delivered alone, while nothing else is held. 0 disables isolation.
                Recommended: half of the queue's `max_deliveries`.
            keep_alive: Whether a background thread renews the leases of held messages.
            consumer_id: Name written into the markers; by default host, process id and a random part.
            ack_linger_ms: Time that acknowledgements are collected before their END is written. Longer only while an
                earlier marker of the partition is not confirmed.
            start_timeout_ms: Longest time for a START to become durable; by default half a lease or 10 s, whichever is
                less.
            timeout: Timeout of the broker requests of this constructor and of result transactions.
            extra: librdkafka settings.

        Raises:
            ConfigError: A value is out of bounds, or a setting in *extra* would break a guarantee.
            TopicError: A topic of the queue is missing or has the wrong partition count.
            KafkaClientError: The broker cannot be reached within *timeout*.
        """
        self._topics = QueueTopics(topic, group)
        check_logical_queue(queue)
        check_bounds(isolate_after=isolate_after, ack_linger_ms=ack_linger_ms, prefetch=prefetch)
        if lease_ms is None:
            lease_ms = lease_of(self._topics, bootstrap_servers=bootstrap_servers, timeout=timeout, extra=extra)
        limits = limits_of(lease_ms, max_lease_ms, start_timeout_ms, max_in_flight, max_in_flight_bytes)
        self.consumer_id = consumer_id or new_client_id("consumer")
        self.max_in_flight = max_in_flight
        self.lease_ms = lease_ms
        self._leases = LeaseTable()
        # Reentrant: if an interrupt prevents its release, the same thread can still receive.
        self._receiving = threading.RLock()
        self._pid = os.getpid()
        start_timeout_ms = round(limits.start_timeout_s * 1000)
        self._producer = MarkerProducer(
            marker_producer_config(bootstrap_servers, extra=extra, delivery_timeout_ms=start_timeout_ms),
            self._topics.markers_topic,
        )
        check_topics(self._producer.client, self._topics, bootstrap_servers, timeout)
        consumer_group = consumer_group or (self._topics.logical_group(queue) if queue else self._topics.consumer_group)
        identity = (self._topics, self.consumer_id, bootstrap_servers, extra)
        self._writer = MarkerWriter(
            self._producer,
            self._leases,
            consumer_id=self.consumer_id,
            ack_linger_ms=ack_linger_ms,
            keep_alive=keep_alive,
        )
        self._intake = Intake(
            consumer_config(bootstrap_servers, consumer_group, self.consumer_id, extra, group_protocol=group_protocol),
            topic=self._topics.queue_topic,
            admission_policy=AdmissionPolicy(queue, group, isolate_after),
            leases=self._leases,
            markers=self._producer,
            consumer_id=self.consumer_id,
            limits=limits,
            write_settled=self._writer.write_out,
            missing_offsets=MissingOffsets(
                consumer_group, self._topics.queue_topic, bootstrap_servers=bootstrap_servers, extra=extra
            ),
        )
        self._receiver = Receiver(self._intake, self._leases, prefetch)
        self._writer.start()
        self._transactions = ResultTransactions(*identity, self._leases, self._producer, lease_ms, timeout)

    def __enter__(self) -> Self:
        """Return the consumer."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the consumer. If the body raised, raise that exception and only log an error of closing."""
        try:
            self.close()
        except KmqError:
            if error is None:
                raise
            logger.exception("cannot close consumer %s", self.consumer_id, extra={"action": "close_failed"})

    @property
    def in_flight_count(self) -> int:
        """Count of messages held."""
        return self._leases.held_count(time.monotonic())

    def receive(
        self, max_messages: int = 1, timeout: float = 1.0, lease: float | timedelta | None = None
    ) -> list[Message]:
        """
        Receive messages. Each is held until it is settled or its lease ends.

        Args:
            max_messages: Maximum number of messages to return, at least 1.
            timeout: Seconds to wait for the first message; 0 polls once.
            lease: Length of the leases of these messages, seconds or a timedelta, 1 second to 12 hours; by default the
                consumer's `lease_ms`. Keep-alive renews them with the same length, up to `max_lease_ms`.

        Returns:
            At most *max_messages* messages. The list is empty if no message arrives in time, if `max_in_flight`
            messages or `max_in_flight_bytes` are held, or while a suspect is held.

        Raises:
            ConfigError: A value is out of bounds, or *lease* is set although the consumer prefetches.
            KmqError: A START did not become durable. No message is returned; the messages are fetched again.
            UsageError: The consumer is closed, was created in another process, or another thread is in `receive`.
        """
        return self._receive("receive", max_messages, timeout, lease, Batch._to_messages)  # noqa: SLF001  # private to the package: not for handlers

    def receive_batch(
        self, max_messages: int = 500, timeout: float = 1.0, lease: float | timedelta | None = None
    ) -> Batch:
        """
        Receive messages as one batch, which one call settles. No `Message` is made until one is asked for.

        Args:
            max_messages: Maximum number of messages in the batch, at least 1.
            timeout: Seconds to wait for the first message; 0 polls once.
            lease: As for `receive`.

        Returns:
            A batch of at most *max_messages* messages. It is empty, and false, in the cases in which `receive` returns
            an empty list.

        Raises:
            ConfigError: As `receive`.
            KmqError: As `receive`.
            UsageError: As `receive`.
        """
        return self._receive("receive_batch", max_messages, timeout, lease, _itself)

    def _receive(
        self,
        call: str,
        max_messages: int,
        timeout: float,
        lease: float | timedelta | None,
        result_of: Callable[[Batch], Result],
    ) -> Result:
        if max_messages < 1 or timeout < 0:
            message = (
                f"{call} is out of bounds: got max_messages={max_messages!r}, timeout={timeout!r}, "
                "minimum 1 and 0; correct the call"
            )
            raise ConfigError(message)
        lease_s = None if lease is None else milliseconds("lease", lease, MIN_LEASE_MS) / 1000
        if lease_s is not None and self._receiver.prefetches:
            message = (
                f"lease cannot be combined with prefetch: got {lease!r}, prefetched messages have the consumer's "
                "lease_ms; leave lease out, or set prefetch=0"
            )
            raise ConfigError(message)
        self._check_usable()
        with self._one_receiver():
            return self._receiver.receive(max_messages, timeout, lease_s, result_of)

    @overload
    def run(
        self,
        handler: Callable[[Message], object],
        *,
        concurrency: int = ...,
        retry_delay_ms: int = ...,
        drain_timeout_ms: int = ...,
        max_batch: int = ...,
        metrics_port: int | None = ...,
        metrics_host: str | None = ...,
    ) -> RunSummary: ...
    @overload
    def run(
        self,
        handler: Callable[[Batch], Failures | None],
        *,
        batch: int,
        batch_wait: float | timedelta = ...,
        concurrency: int = ...,
        retry_delay_ms: int = ...,
        drain_timeout_ms: int = ...,
        metrics_port: int | None = ...,
        metrics_host: str | None = ...,
    ) -> RunSummary: ...
    def run(
        self,
        handler: Callable[[Any], object],
        *,
        batch: int | None = None,
        batch_wait: float | timedelta = 0.05,
        concurrency: int = 8,
        retry_delay_ms: int = 1_000,
        drain_timeout_ms: int = 20_000,
        max_batch: int = MAX_BATCH,
        metrics_port: int | None = None,
        metrics_host: str | None = None,
    ) -> RunSummary:
        """
        Call a handler for each message, or for each batch of messages, in threads, until stopped; then close.

        `stop`, SIGTERM or Ctrl+C end the run (signals only if `run` is called in the main thread). The run then
        releases the messages that no handler has seen, without counting the delivery, and waits for the running
        handlers. A second Ctrl+C ends the run immediately.

        Args:
            handler: Called with one message. If it returns, the message is acknowledged, unless the handler has settled
                it. If it raises, the exception is logged and the message is released for redelivery. It must not be a
                coroutine function; wrap one, for example `lambda message: asyncio.run(handle(message))`.
                With *batch*, it is called with a `Batch`. If it returns None, every message that it has not settled is
                acknowledged. If it raises, they are all released. If it raises `BatchFailed({3: error})`, or returns
                such a mapping from indices to exceptions or texts, those messages are released and the others are
                acknowledged.
            batch: Maximum number of messages of a batch, at most `max_in_flight`; None to call the handler with single
                messages. Each running handler holds a batch, so *concurrency* of them need a `max_in_flight` of
                concurrency times *batch*.
            batch_wait: Longest time to collect messages for a batch after the first has arrived, seconds or a
                timedelta. Their leases begin after it.
            concurrency: Number of handler threads.
            retry_delay_ms: Delay before redelivery after the handler raised, at most 12 hours. The queue's backoff is
                added to it.
            drain_timeout_ms: Longest wait for running handlers after a stop. After that, their messages are released.
            max_batch: Maximum number of messages fetched at once; without effect with *batch*.
            metrics_port: Port on which to serve Prometheus metrics during the run; needs the extra `metrics`. 0 selects
                a free port.
            metrics_host: Address to listen on for metrics; loopback by default.

        Returns:
            Counts of messages by result.

        Raises:
            ConfigError: A value is out of bounds, the handler is not a plain callable, or the metrics server cannot
                start.
            KmqError: The client failed permanently, or the last markers could not be written.
            UsageError: As `receive`; or the handler returned an awaitable or a generator, or with *batch* another value
                that is neither None nor a mapping. Its messages were released without counting the delivery.
        """
        self._check_usable()
        worker = Worker(
            intake=self._intake,
            close=self.close,
            handler=handler,
            concurrency=concurrency,
            retry_delay_ms=retry_delay_ms,
            drain_timeout_ms=drain_timeout_ms,
            max_batch=max_batch,
            batch=batch,
            batch_wait=batch_wait,
        )
        numbers = serving_worker(
            str(self._topics), metrics_port, metrics_host, worker.delivered_count, worker.acked_count
        )
        with self._one_receiver(), numbers:
            self._worker = worker
            if self._is_stopped:
                worker.stop()
            return worker.run()

    def transaction(self) -> contextlib.AbstractContextManager[Transaction]:
        """
        Open a block whose results and acknowledgements are written atomically when it ends.

            with consumer.transaction() as tx:
                tx.send("invoices", invoice, key=message.key)
                tx.ack(message)

        An exception in the block discards the recorded results and acknowledgements; the messages stay held. Handlers
        of `run` may use transactions. The commits of one consumer run one after another.

        Raises:
            LeaseLostError: A lease ran out before the commit; nothing was written.
            TransactionError: The commit failed. If `nothing_written` is true, the messages are still held. Otherwise
                the outcome is unknown; do not retry.
            FencedError: Another consumer with the same `consumer_id` writes transactions.
            UsageError: This thread has an open block already, the consumer is closed, or it was created in another
                process.
        """
        return self._transactions.block(self._check_usable)

    def flush(self, timeout: float = 30.0) -> None:
        """
        Wait until the marker of every message settled so far is durable.

        Args:
            timeout: Longest wait, seconds.

        Raises:
            KmqError: A marker could not be written; its messages will be delivered again.
            KafkaClientError: It took longer than *timeout*; the markers are still being sent.
            UsageError: The consumer is closed or was created in another process.
        """
        self._check_usable()
        self._writer.flush(timeout)

    def stop(self) -> None:
        """Ask `run` to end. May be called from any thread or signal handler; `run` waits for the running handlers."""
        self._is_stopped = True
        if self._worker is not None:
            self._worker.stop()

    def close(self, timeout: float = 30.0) -> None:
        """
        Commit offsets, leave the consumer group, release the held messages, and write the last markers.

        A second call does nothing.

        Args:
            timeout: Seconds to wait for the last markers. Also the time for leaving the group, at most 15 s: no member
                can leave while a rebalance waits for another consumer that this thread polls. After that, a warning is
                logged and leaving continues in the background.

        Raises:
            KmqError: The last markers could not be written; the messages settled last may be delivered again.
        """
        if self._is_closed or self._pid != os.getpid():
            return
        self._is_closed = True
        self._transactions.close(timeout)
        self._receiver.release_undelivered()
        try:
            # Commit offsets first: a message released before its offset commit would be delivered twice.
            self._intake.close(timeout)
        finally:
            for lease in self._leases.end_all("the consumer was closed, the message was released"):
                self._release_held(lease)
            self._writer.close(timeout)

    @contextlib.contextmanager
    def _one_receiver(self) -> Iterator[None]:
        if not self._receiving.acquire(blocking=False):
            message = "receive is running in another thread: got a second call; use one consumer per thread, or `run`"
            raise UsageError(message)
        try:
            yield
        finally:
            self._receiving.release()

    @staticmethod
    def _release_held(lease: Lease) -> None:
        lease.outbox.others.extend(Settled(Verb.RELEASE, offset) for offset in lease.take_held())

    def _check_usable(self) -> None:
        if self._pid != os.getpid():
            message = (
                f"consumer belongs to another process: got a call in process {os.getpid()}, it was created in process "
                f"{self._pid}; create one after the fork"
            )
            raise UsageError(message)
        if self._is_closed:
            message = "consumer is closed: got a call after close; create a new one"
            raise UsageError(message)
