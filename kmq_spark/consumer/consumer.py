"""
Receive messages of a queue, hold them under a lease, and settle them one by one or in batches.

Rule 1: `receive` and `receive_batch` return at most *max_messages*.
Rule 2: `ack`, `release` and `reject` may be called from any thread; only one thread at a time may receive.
Rule 3: a process that is killed at any point loses no message. The tracker redelivers a message that was started;
another consumer fetches a message that was not.
Rule 4: a consumer that is dropped is closed by a thread of its own. The destructor of its client would wait for a
rebalance, hold the interpreter meanwhile, and so stop the process.

Source: SQS's receive loop; Kafka's share consumer (KIP-932) for the verbs; kmq `KmqClient` for START and END.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, overload

from kmq_spark.consumer.admission import AdmissionPolicy
from kmq_spark.consumer.batch import Batch
from kmq_spark.consumer.checks import check_bounds, check_topics, limits_of
from kmq_spark.consumer.fetcher import Fetcher
from kmq_spark.consumer.history import History
from kmq_spark.consumer.leases import LeaseTable, Settled, Verb
from kmq_spark.consumer.marker_producer import MarkerProducer
from kmq_spark.consumer.marker_writer import MarkerWriter
from kmq_spark.consumer.pipeline import Pipeline, Result
from kmq_spark.core.durations import MIN_LEASE_MS, milliseconds
from kmq_spark.errors import ConfigError, KmqError, UsageError
from kmq_spark.kafka.clock import now_s
from kmq_spark.kafka.queue_rules import lease_of
from kmq_spark.kafka.queue_topics import QueueTopics
from kmq_spark.kafka.settings import consumer_config, marker_producer_config, new_client_id

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping
    from datetime import timedelta
    from types import TracebackType
    from typing import Self

    from kmq_spark.consumer.async_worker import AsyncWorker
    from kmq_spark.consumer.batch import Failures
    from kmq_spark.consumer.message import Message
    from kmq_spark.consumer.policy import Rule
    from kmq_spark.consumer.transaction import ResultTransactions, Transaction
    from kmq_spark.consumer.worker import RunSummary, Worker
    from kmq_spark.kafka.serializers import Deserializer

logger = logging.getLogger(__name__)

EXIT_TIMEOUT_S = 5.0
"""How long the end of a process waits for a consumer that was not closed."""

_open_consumers: weakref.WeakSet[QueueConsumer] = weakref.WeakSet()


def _itself(batch: Batch) -> Batch:
    return batch


class QueueConsumer:
    """
    Consumer of a queue.

    Use it in a `with` block, or call `close`.
    """

    _is_closed = _is_stopped = False
    _worker: Worker | AsyncWorker | None = None
    _transactions: ResultTransactions | None = None

    def __init__(
        self,
        queue: str,
        *,
        bootstrap_servers: str,
        logical_queue: str = "",
        subscription: str = "",
        lease: float | timedelta | None = None,
        max_lease: float | timedelta | None = None,
        max_in_flight: int = 1_000,
        isolate_after: int = 2,
        deserializer: Deserializer | None = None,
        timeout: float = 10,
        extra: Mapping[str, str] | None = None,
    ) -> None:
        """
        Connect, check that the topics exist, and join the consumer group.

        Args:
            queue: Name of the queue and of its topic.
            bootstrap_servers: Comma-separated `host:port`.
            logical_queue: Logical queue, if several share the queue. By default the consumer receives the messages
                without one. Each logical queue has its own committed offsets. The consumer skips messages of other
                logical queues; they do not delay it.
            subscription: Application, if several read the queue. Each receives every message and has its own markers
                topic, dead-letter topic and tracker: `kmq queue create <queue>@<subscription>`.
            lease: Length of a lease, seconds or a timedelta, 1 second to 12 hours. A message is redelivered when its
                lease ends; keep-alive renews it. By default the lease in the rules of the queue (`kmq queue alter
                --lease`), else 30 s.
            max_lease: Longest total time that keep-alive holds a message, seconds or a timedelta; by default 12 hours,
                the longest there is. After that, a handler that hangs loses its message.
            max_in_flight: Maximum number of messages held at once. They have 64 MiB at most; a single message may be
                larger.
            isolate_after: A message becomes a suspect after this many deliveries that ended silently (no answer, as
                when a process dies). A suspect is delivered alone, while nothing else is held. 0 disables isolation.
                Recommended: half of the queue's `max_deliveries`.
            deserializer: What reads `Message.data`: `JsonDeserializer()`, or one of confluent-kafka's deserializers.
            timeout: Timeout of the broker requests of this constructor and of result transactions, seconds.
            extra: librdkafka settings. `client.id` is also the name in the markers; by default host, process id and a
                random part. `group.id` is by default `kmq.<queue>` plus the names of subscription and logical queue.
                `group.protocol=consumer` (KIP-848) is for brokers from 4.0: rebalances do not stop the whole group,
                and fewer messages are repeated after a consumer is killed. `partition.assignment.strategy` is
                `cooperative-sticky`; `range,roundrobin` shares the group with clients that know no other, such as
                kafka-mq-go's workers.

        Raises:
            ConfigError: A value is out of bounds, or a setting in *extra* would break a guarantee.
            TopicError: A topic of the queue is missing or has the wrong partition count.
            KafkaClientError: The broker cannot be reached within *timeout*.
        """
        topics = self._topics = QueueTopics(queue, subscription)
        group = topics.logical_group(logical_queue) if logical_queue else topics.consumer_group
        check_bounds("max_in_flight", max_in_flight, 1, 10_000_000)
        check_bounds("isolate_after", isolate_after, 0, 10_000)
        self.consumer_id = (extra or {}).get("client.id") or new_client_id("consumer")
        config = consumer_config(bootstrap_servers, group, self.consumer_id, extra)
        # No other client has its name.
        extra = {key: value for key, value in (extra or {}).items() if key != "client.id"}
        if lease is None:
            lease = lease_of(topics, bootstrap_servers=bootstrap_servers, timeout=timeout, extra=extra)
        limits = self._limits = limits_of(lease, max_lease, max_in_flight)
        self._bootstrap_servers, self._extra, self._timeout = bootstrap_servers, extra, timeout
        self._leases = LeaseTable(deserializer)
        # Reentrant: if an interrupt prevents its release, the same thread can still receive.
        self._receiving = threading.RLock()
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._producer = MarkerProducer(
            marker_producer_config(
                bootstrap_servers, extra=extra, delivery_timeout_ms=round(limits.start_timeout_s * 1000)
            ),
            topics.markers_topic,
        )
        check_topics(self._producer.client, topics, bootstrap_servers, timeout)
        self._writer = MarkerWriter(self._producer, self._leases, self.consumer_id)
        self._pipeline = Pipeline(
            Fetcher(config, topics.queue_topic, limits.start_timeout_s, self._leases),
            topic=topics.queue_topic,
            policy=AdmissionPolicy(logical_queue, subscription, isolate_after),
            history=History(
                config["group.id"],
                topics,
                bootstrap_servers,
                extra,
                markers=self._producer,
                consumer_id=self.consumer_id,
            ),
            leases=self._leases,
            markers=self._producer,
            consumer_id=self.consumer_id,
            limits=limits,
            write_settled=self._writer.write_out,
        )
        self._writer.start()
        parts = self._pipeline, self._leases, self._writer
        self._dropped = weakref.finalize(self, _close_dropped, os.getpid(), self.consumer_id, *parts)
        self._dropped.atexit = False  # `_close_all` does it, while threads can still be joined
        _open_consumers.add(self)

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
        """Count of messages held, with those that are fetched ahead."""
        return self._leases.held_count(now_s())

    @property
    def problem(self) -> str:
        """What is wrong with the handlers: some have held messages for longer than `max_lease`; empty if nothing is."""
        count = self._leases.hung_count(now_s())
        return f"{count} message(s) held for longer than max_lease, {self._limits.max_lease_s:g} s" if count else ""

    def receive(
        self, max_messages: int = 1, timeout: float = 1.0, lease: float | timedelta | None = None
    ) -> list[Message]:
        """
        Receive messages. Each is held until it is settled or its lease ends.

        For a caller that comes back within a tenth of a second, several times in a row, the consumer fetches one batch
        ahead. If the caller then stays away for a second, this batch is released, without counting the delivery.

        Args:
            max_messages: Maximum number of messages to return, at least 1.
            timeout: Seconds to wait for the first message; 0 polls once. A broker that is connected and does not answer
                may hold the call for 20 seconds more.
            lease: Length of the leases of these messages, seconds or a timedelta, 1 second to 12 hours; by default the
                consumer's. Keep-alive renews them with the same length, up to `max_lease`.

        Returns:
            At most *max_messages* messages. The list is empty if no message arrives in time, if `max_in_flight`
            messages are held, while a suspect is held, or while the broker is away, which the log says.

        Raises:
            ConfigError: A value is out of bounds.
            KmqError: The client failed permanently. No message is returned.
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
                f"{call} is out of bounds: got max_messages={max_messages!r}, timeout={timeout!r}; expected 1 and 0 "
                "or more"
            )
            raise ConfigError(message)
        lease_s = None if lease is None else milliseconds("lease", lease, MIN_LEASE_MS) / 1000
        self._check_usable()
        with self._one_receiver():
            return self._pipeline.receive(max_messages, timeout, result_of, lease_s=lease_s)

    @overload
    def run(
        self,
        handler: Callable[[Message], object],
        *,
        concurrency: int = ...,
        drain_timeout: float | timedelta = ...,
        retry: Mapping[type[BaseException], Rule] | None = ...,
    ) -> RunSummary: ...
    @overload
    def run(
        self,
        handler: Callable[[Batch], Failures | None],
        *,
        concurrency: int = ...,
        batch: int,
        batch_wait: float | timedelta = ...,
        drain_timeout: float | timedelta = ...,
        retry: Mapping[type[BaseException], Rule] | None = ...,
    ) -> RunSummary: ...
    def run(
        self,
        handler: Callable[[Any], object],
        *,
        concurrency: int = 8,
        batch: int | None = None,
        batch_wait: float | timedelta = 0.05,
        drain_timeout: float | timedelta = 20,
        retry: Mapping[type[BaseException], Rule] | None = None,
    ) -> RunSummary:
        """
        Call a handler for each message, or for each batch of messages, in threads, until stopped; then close.

        `stop`, SIGTERM or Ctrl+C end the run (signals only if `run` is called in the main thread). The run then
        releases the messages that no handler has seen, without counting the delivery, and waits for the running
        handlers. A second Ctrl+C ends the run immediately.

        Counts of the messages are in the default registry of `prometheus_client`, if it is installed.

        Args:
            handler: Called with one message. If it returns, the message is acknowledged, unless the handler has settled
                it. If it raises, the exception is logged and the message is released for redelivery, after the queue's
                backoff. A coroutine function runs in tasks of one event loop instead of threads; see
                `AsyncQueueConsumer`.
                With *batch*, it is called with a `Batch`. If it returns None, every message that it has not settled is
                acknowledged. If it raises, they are all released. If it raises `BatchFailed({3: error})`, or returns
                such a mapping from indices to exceptions or texts, those messages are released and the others are
                acknowledged.
            concurrency: Number of handlers that run at once.
            batch: Maximum number of messages of a batch, at most `max_in_flight`; None to call the handler with single
                messages. Each running handler holds a batch, so *concurrency* of them need a `max_in_flight` of
                concurrency times *batch*.
            batch_wait: Longest time to collect messages for a batch after the first has arrived, seconds or a
                timedelta. Their leases begin after it.
            drain_timeout: Longest wait for running handlers after a stop, seconds or a timedelta. After that, their
                messages are released.
            retry: What becomes of messages whose handler raised, by type of exception: a delay, to which the queue's
                backoff is added, or `Reject`, for a dead letter at once. These exceptions are logged without traceback.
                A handler may also raise `Retry` or `Reject` itself.

        Returns:
            Counts of messages by result.

        Raises:
            ConfigError: A value is out of bounds, or the handler is not a plain callable.
            KmqError: The client failed permanently, or the last markers could not be written.
            UsageError: As `receive`; or the handler returned an awaitable or a generator, or with *batch* another value
                that is neither None nor a mapping. Its messages were released without counting the delivery.
        """
        from kmq_spark.consumer.worker import Worker, is_coroutine_function  # noqa: PLC0415  # as the next one
        from kmq_spark.metrics.worker import counting  # noqa: PLC0415  # a caller of `receive` needs neither

        self._check_usable()
        options: dict[str, Any] = {
            "concurrency": concurrency, "batch": batch, "batch_wait": batch_wait, "drain_timeout": drain_timeout,
            "retry": retry,
        }  # fmt: skip
        if is_coroutine_function(handler):
            import asyncio  # noqa: PLC0415  # most programs need none

            return asyncio.run(self._run_tasks(handler, takes_interrupts=True, **options))
        worker = Worker(self._pipeline, self.close, handler, max_in_flight=self._limits.max_in_flight, **options)
        with self._one_receiver(), counting(str(self._topics), worker.counts, lambda: self.in_flight_count):
            self._worker = worker
            if self._is_stopped:
                worker.stop()
            return worker.run()

    async def _run_tasks(self, handler: Callable[[Any], Awaitable[object]], **options: Any) -> RunSummary:
        """Call a coroutine function for each message, in the running event loop; see `AsyncQueueConsumer.run`."""
        from kmq_spark.consumer.async_worker import AsyncWorker  # noqa: PLC0415  # most programs need none
        from kmq_spark.metrics.worker import counting  # noqa: PLC0415  # as above

        self._check_usable()
        worker = AsyncWorker(self._pipeline, self.close, handler, max_in_flight=self._limits.max_in_flight, **options)
        with self._one_receiver(), counting(str(self._topics), worker.counts, lambda: self.in_flight_count):
            self._worker = worker
            if self._is_stopped:
                worker.stop()
            return await worker.run()

    def transaction(self) -> contextlib.AbstractContextManager[Transaction]:
        """
        Open a block whose results and acknowledgements are written atomically when it ends.

            with consumer.transaction() as tx:
                tx.send("invoices", invoice, key=message.key)
                tx.ack(message)

        An exception in the block discards the recorded results and acknowledgements; the messages stay held. Handlers
        of `run` may use transactions. The commits of one consumer run one after another.

        Raises:
            LeaseLostError: A lease ran out before the commit, or another consumer of the group fetches a message again;
                nothing was written.
            TransactionError: The commit failed. If `nothing_written` is true, the messages are still held. Otherwise
                the outcome is unknown; do not retry.
            FencedError: Another consumer with the same `client.id` writes transactions.
            UsageError: This thread has an open block already, the consumer is closed, or it was created in another
                process.
        """
        with self._lock:
            if self._transactions is None:
                from kmq_spark.consumer.transaction import ResultTransactions  # noqa: PLC0415  # most consumers need none

                self._transactions = ResultTransactions(
                    self._topics,
                    self.consumer_id,
                    self._bootstrap_servers,
                    self._extra,
                    leases=self._leases,
                    markers=self._producer,
                    confirm=self._pipeline.confirm,
                    lease_s=self._limits.lease_s,
                    timeout=self._timeout,
                )
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
        self._dropped.detach()
        if self._transactions is not None:
            self._transactions.close(timeout)
        _close_parts(self._pipeline, self._leases, self._writer, timeout)

    @contextlib.contextmanager
    def _one_receiver(self) -> Iterator[None]:
        if not self._receiving.acquire(blocking=False):
            message = "receive is running in another thread: got a second call; use one consumer per thread, or `run`"
            raise UsageError(message)
        try:
            yield
        finally:
            self._receiving.release()

    def _check_usable(self) -> None:
        if self._pid != os.getpid():
            message = (
                f"consumer belongs to another process: got a call in process {os.getpid()}; expected process "
                f"{self._pid}, which created it / create one after the fork"
            )
            raise UsageError(message)
        if self._is_closed:
            message = "consumer is closed: got a call after close; create a new one"
            raise UsageError(message)


def _close_parts(pipeline: Pipeline, leases: LeaseTable, writer: MarkerWriter, timeout: float) -> None:
    try:
        # Commit offsets first: a message released before its offset commit would be delivered twice.
        pipeline.close(timeout)
    finally:
        for lease in leases.end_all("the consumer was closed, the message was released"):
            lease.outbox.others.extend(Settled(Verb.RELEASE, offset) for offset in lease.take_held())
        writer.close(timeout)


def _close_dropped(pid: int, consumer_id: str, pipeline: Pipeline, leases: LeaseTable, writer: MarkerWriter) -> None:
    if pid != os.getpid():
        return
    logger.warning(
        "consumer %s was not closed: use it in a `with` block, or call close()",
        consumer_id, extra={"action": "not_closed"},
    )  # fmt: skip

    def close() -> None:
        try:
            _close_parts(pipeline, leases, writer, 30.0)
        except KmqError as error:
            logger.warning("cannot close consumer %s: %s", consumer_id, error, extra={"action": "close_failed"})

    threading.Thread(target=close, name=f"kmq-close-{consumer_id}", daemon=True).start()


@atexit.register
def _close_all() -> None:
    """Close what is still open when the process ends: what it holds is released."""
    for consumer in list(_open_consumers):
        with contextlib.suppress(KmqError):
            consumer.close(EXIT_TIMEOUT_S)
