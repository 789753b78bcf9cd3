"""
Receive messages of a queue, hold them under a lease, and settle them one by one.

Rule 1: `receive` hands out at most what it was asked for; nothing is held that was not asked for.
Rule 2: `ack`, `release` and `reject` may come from any thread; `receive` from one at a time.
Rule 3: a message that is suspected of taking processes down is handed out apart, see `isolation`.
Rule 4: killed at any point, nothing is lost: what was started is redelivered, what was not is fetched by another.

Source: SQS's receive loop; Kafka's share consumer (KIP-932) for the verbs; kmq `KmqClient` for START and END.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from typing import TYPE_CHECKING

from kmq_spark.consumer.checks import check_bounds, check_logical_queue, check_topics, limits_of
from kmq_spark.consumer.full_watch import FullWatch
from kmq_spark.consumer.intake import Intake
from kmq_spark.consumer.leases import LeaseTable, Settled, Verb
from kmq_spark.consumer.markers.producer import MarkerProducer
from kmq_spark.consumer.markers.starts import transactional_starts
from kmq_spark.consumer.markers.writer import MarkerWriter
from kmq_spark.consumer.missing_offsets import MissingOffsets
from kmq_spark.consumer.poison.admission import Door
from kmq_spark.consumer.receiver import Receiver
from kmq_spark.consumer.transactions.result import ResultTransactions
from kmq_spark.consumer.worker import MAX_BATCH, Worker
from kmq_spark.errors import ConfigError, KmqError, UsageError
from kmq_spark.kafka.durations import MIN_LEASE_MS, milliseconds
from kmq_spark.kafka.forks import watch
from kmq_spark.kafka.queue_rules import lease_of
from kmq_spark.kafka.queue_topics import QueueTopics
from kmq_spark.kafka.settings import consumer_config, marker_producer_config, new_client_id
from kmq_spark.metrics.worker import serving_worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from datetime import timedelta
    from types import TracebackType
    from typing import Self

    from kmq_spark.consumer.leases import Lease
    from kmq_spark.consumer.message import Message
    from kmq_spark.consumer.transactions.record import Transaction
    from kmq_spark.consumer.worker import RunSummary

logger = logging.getLogger(__name__)


class QueueConsumer:
    """
    Receives messages of a queue.

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
        start_in_transaction: bool = False,
        timeout_ms: int = 10_000,
        extra: Mapping[str, str] | None = None,
    ) -> None:
        """
        Connect, check that the topics exist, and join the group.

        Args:
            topic: Name of the queue, and of its topic.
            bootstrap_servers: Comma-separated `host:port`.
            queue: Logical queue, where several share the topic; by default the messages that name none. Each has a
                position of its own: what is sent to another is passed over, and holds up nothing.
            group: Group, where several read the queue; each sees every message. It has a markers topic, a dead-letter
                topic and a tracker of its own: `kmq queue create <topic>@<group>`.
            consumer_group: Kafka's group id; `kmq.<topic>`, and the names of group and logical queue, by default.
            group_protocol: `classic`, or `consumer` for brokers from 4.0 (KIP-848): rebalances without a halt, and
                fewer repeats where consumers are killed; `eager` to share a group with clients that know nothing else,
                such as kafka-mq-go's workers.
            lease_ms: How long a message is held before it is redelivered, 1 s to 12 h; keep-alive renews it. By default
                the lease that belongs to the queue (`kmq queue alter --lease-ms`), or 30 s.
            max_lease_ms: How long keep-alive may hold a message altogether; ten leases or 12 h by default, whichever
                is less. A handler that hangs loses its message then.
            max_in_flight: Most messages held at once.
            max_in_flight_bytes: Most bytes of values, keys and headers held at once; one message may be larger.
            prefetch: Batches that `receive` fetches ahead, of at most as many messages as were asked for: faster, and
                what was not asked for by the end is given back uncounted. 0 holds nothing beyond what was asked for.
            isolate_after: Deliveries of a message that ended without an answer, as when a process dies, after which
                it is handed out while nothing else is held: with some of its like while deliveries are left to spare,
                then alone; 0 for never. Half of the queue's `max_deliveries` is right.
            keep_alive: Whether leases are renewed in the background while messages are held.
            consumer_id: Name told in the markers; host, process and a random part by default.
            ack_linger_ms: How long acknowledgements are gathered before their END is written.
            start_timeout_ms: How long a START may take; half a lease or 10 s by default, whichever is less.
            start_in_transaction: Whether STARTs and their position are one transaction: a crash repeats nothing then.
            timeout_ms: How long the broker may take to answer here.
            extra: librdkafka settings.

        Raises:
            ConfigError: A value is out of bounds, or *extra* would break a guarantee.
            TopicError: A topic of the queue is missing or does not fit.
            KafkaClientError: The broker cannot be reached within *timeout_ms*.
        """
        self._topics = QueueTopics(topic, group)
        check_logical_queue(queue)
        check_bounds(isolate_after=isolate_after, ack_linger_ms=ack_linger_ms, prefetch=prefetch)
        if lease_ms is None:
            lease_ms = lease_of(self._topics, bootstrap_servers=bootstrap_servers, timeout_ms=timeout_ms, extra=extra)
        limits = limits_of(lease_ms, max_lease_ms, start_timeout_ms, max_in_flight, max_in_flight_bytes)
        self.consumer_id = consumer_id or new_client_id("consumer")
        self.max_in_flight = max_in_flight
        self.lease_ms = lease_ms
        self._leases = LeaseTable()
        self._receiving = threading.RLock()  # an interrupt before its release must not shut its own thread out
        self._pid = os.getpid()
        start_timeout_ms = round(limits.start_timeout_s * 1000)
        self._producer = MarkerProducer(
            marker_producer_config(bootstrap_servers, extra=extra, delivery_timeout_ms=start_timeout_ms),
            self._topics.markers_topic,
        )
        check_topics(self._producer.client, self._topics, bootstrap_servers, timeout_ms)
        consumer_group = consumer_group or (self._topics.logical_group(queue) if queue else self._topics.consumer_group)
        identity = (self._topics, self.consumer_id, bootstrap_servers, extra)
        self._writer = MarkerWriter(
            self._producer,
            self._leases,
            consumer_id=self.consumer_id,
            ack_linger_ms=ack_linger_ms,
            keep_alive=keep_alive,
        )
        full_watch = self._full_watch = FullWatch(self._topics, bootstrap_servers, extra)
        self._intake = Intake(
            consumer_config(bootstrap_servers, consumer_group, self.consumer_id, extra, group_protocol=group_protocol),
            topic=self._topics.queue_topic,
            door=Door(queue, group, isolate_after),
            leases=self._leases,
            markers=self._producer,
            consumer_id=self.consumer_id,
            limits=limits,
            write_settled=self._writer.write_out,
            starts=transactional_starts(*identity, start_timeout_ms) if start_in_transaction else None,
            missing_offsets=MissingOffsets(
                consumer_group, self._topics.queue_topic, bootstrap_servers=bootstrap_servers, extra=extra
            ),
            is_queue_full=lambda: full_watch.is_full,
        )
        self._receiver = Receiver(self._intake, self._leases, prefetch)
        self._writer.start()
        self._transactions = ResultTransactions(*identity, self._leases, self._producer, lease_ms, timeout_ms)
        self._full_watch.start_on(self._intake)
        watch(self)

    def __enter__(self) -> Self:
        """Return the consumer."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the consumer; what the body raised goes before what closing would."""
        try:
            self.close()
        except KmqError:
            if error is None:
                raise
            logger.exception("cannot close %s", self.consumer_id, extra={"action": "close_failed"})

    @property
    def in_flight_count(self) -> int:
        """How many messages are held."""
        return self._leases.held_count(time.monotonic())

    def receive(
        self, max_messages: int = 1, timeout: float = 1.0, lease: float | timedelta | None = None
    ) -> list[Message]:
        """
        Receive messages; each is held until it is settled or its lease ends.

        Args:
            max_messages: Most messages to return, at least 1.
            timeout: Seconds to wait for the first one; 0 looks once.
            lease: How long these are held, seconds or a timedelta, 1 second to 12 hours; the consumer's `lease_ms` by
                default. Keep-alive renews with it, up to `max_lease_ms`.

        Returns:
            At most *max_messages*; none where none came in time, where `max_in_flight` messages or
            `max_in_flight_bytes` are held, while a suspect is, or while the queue is full.

        Raises:
            ConfigError: A value is out of bounds, or *lease* goes with `prefetch`.
            KmqError: A START could not be made durable; nothing was handed out, the messages will be fetched again.
            UsageError: The consumer is closed, was made by another process, or receives in another thread already.
        """
        if max_messages < 1 or timeout < 0:
            message = (
                f"receive is out of bounds: got max_messages={max_messages!r}, timeout={timeout!r}, "
                "minimum 1 and 0; correct the call"
            )
            raise ConfigError(message)
        lease_s = None if lease is None else milliseconds("lease", lease, MIN_LEASE_MS) / 1000
        if lease_s is not None and self._receiver.prefetches:
            message = f"lease does not go with prefetch: got {lease!r}; what is prefetched has the consumer's lease_ms"
            raise ConfigError(message)
        self._check_usable()
        with self._one_receiver():
            return self._receiver.receive(max_messages, timeout, lease_s)

    def run(
        self,
        handler: Callable[[Message], None],
        *,
        concurrency: int = 8,
        retry_delay_ms: int = 1_000,
        drain_timeout_ms: int = 20_000,
        max_batch: int = MAX_BATCH,
        metrics_port: int | None = None,
        metrics_host: str | None = None,
    ) -> RunSummary:
        """
        Call a handler for each message, in threads, until stopped; then close.

        Ends after `stop`, SIGTERM or Ctrl+C (both in the main thread only): what no handler has seen is given back
        uncounted, running handlers are waited for. A second Ctrl+C ends it at once.

        Args:
            handler: Called with a message. Returning acknowledges it, unless the handler settled it; an exception is
                logged and releases it, to be delivered again. Not a coroutine function: wrap it, for example
                `lambda message: asyncio.run(handle(message))`.
            concurrency: Handler threads.
            retry_delay_ms: How long a message waits after its handler raised, at most 12 hours; the queue's backoff is
                added to it.
            drain_timeout_ms: How long a stop waits for running handlers; then their messages are released.
            max_batch: Most messages fetched at once.
            metrics_port: Serve Prometheus metrics there meanwhile; needs the extra `metrics`. 0 takes a free port.
            metrics_host: Address to listen on for them; loopback by default.

        Returns:
            What was done.

        Raises:
            ConfigError: A value is out of bounds, the handler cannot be called as a function, or the metrics cannot be
                served.
            KmqError: The client failed for good, or the last markers could not be written.
            UsageError: As `receive`; or the handler returned an awaitable: its messages were given back uncounted.
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
        )
        numbers = serving_worker(
            str(self._topics), metrics_port, metrics_host, worker.handed_out_count, worker.acked_count
        )
        with self._one_receiver(), numbers:
            self._worker = worker
            if self._is_stopped:
                worker.stop()
            return worker.run()

    def transaction(self) -> contextlib.AbstractContextManager[Transaction]:
        """
        Open a block whose results and acknowledgements are written together or not at all, when it ends.

            with consumer.transaction() as tx:
                tx.send("invoices", invoice, key=message.key)
                tx.ack(message)

        An exception drops what was recorded; the messages stay held. Handlers of `run` may use it; commits are queued.

        Raises:
            LeaseLostError: A lease ran out before the commit; nothing was written.
            TransactionError: `nothing_written` tells whether the messages are still held.
            FencedError: Another consumer of the same `consumer_id` writes transactions.
            UsageError: A block is open in this thread, or as `receive`.
        """
        return self._transactions.block(self._check_usable)

    def flush(self, timeout: float = 30.0) -> None:
        """
        Wait until every message settled so far has its END written.

        Args:
            timeout: Seconds.

        Raises:
            KmqError: A marker could not be written: its messages will be delivered again.
        """
        self._check_usable()
        self._writer.flush(timeout)

    def after_fork(self) -> tuple[object, ...]:
        """End every lease in a child process, and return the clients that it must leave alone."""
        self._leases.after_fork()
        clients = (*self._intake.clients, self._producer.client, self._full_watch.client)
        return (*clients, *self._transactions.after_fork())

    def stop(self) -> None:
        """Ask `run` to end, from any thread or a signal handler; running handlers are waited for."""
        self._is_stopped = True
        if self._worker is not None:
            self._worker.stop()

    def close(self, timeout: float = 30.0) -> None:
        """
        Give back what is held, write the last markers, commit, leave the group. A second call does nothing.

        Args:
            timeout: Seconds for the last markers; and for leaving the group, 15 at most: while a rebalance waits for
                another consumer of this thread it lets nobody go. Leaving goes on in the background then, with a
                warning.

        Raises:
            KmqError: The last markers could not be written: what was settled last may be delivered again.
        """
        if self._is_closed or self._pid != os.getpid():
            return
        self._is_closed = True
        self._transactions.close(timeout)
        self._receiver.give_back_unseen()
        self._full_watch.stop()
        try:
            # Positions first: a message that is released before its position is committed would come twice.
            self._intake.close(timeout)
        finally:
            for lease in self._leases.end_all("the consumer was closed, the message was released"):
                self._give_back(lease)
            self._full_watch.close()
            self._writer.close(timeout)

    @contextlib.contextmanager
    def _one_receiver(self) -> Iterator[None]:
        if not self._receiving.acquire(blocking=False):
            message = "receive is running in another thread: got a second call; use one consumer a thread, or `run`"
            raise UsageError(message)
        try:
            yield
        finally:
            self._receiving.release()

    @staticmethod
    def _give_back(lease: Lease) -> None:
        lease.outbox.others.extend(Settled(Verb.RELEASE, offset) for offset in lease.take_held())

    def _check_usable(self) -> None:
        if self._pid != os.getpid():
            message = (
                f"consumer belongs to another process: got a call in {os.getpid()}, it was made in {self._pid}; "
                "make one after the fork"
            )
            raise UsageError(message)
        if self._is_closed:
            message = "consumer is closed: got a call after close; make a new one"
            raise UsageError(message)
