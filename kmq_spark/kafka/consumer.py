"""
Receive messages of a queue, hold them under a lease, and settle them one by one.

Rule 1: `receive` hands out at most what it was asked for; nothing is held that was not asked for.
Rule 2: `ack`, `release` and `reject` may come from any thread; `receive` from one at a time.
Rule 3: killed at any point, nothing is lost: what was started is redelivered, what was not is fetched by another.

Source: SQS's receive loop; Kafka's share consumer (KIP-932) for the verbs; kmq `KmqClient` for START and END.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from typing import TYPE_CHECKING

from kmq_spark.core.markers import MAX_REDELIVER_AFTER_MS
from kmq_spark.errors import ConfigError, KmqError, TopicError, UsageError
from kmq_spark.kafka.forks import watch
from kmq_spark.kafka.intake import Intake
from kmq_spark.kafka.leases import LeaseTable, Settled, Verb
from kmq_spark.kafka.marker_producer import MarkerProducer
from kmq_spark.kafka.marker_writer import MarkerWriter
from kmq_spark.kafka.result_transaction import ResultTransactions
from kmq_spark.kafka.settings import consumer_config, marker_producer_config, new_client_id
from kmq_spark.kafka.start_writer import transactional_starts
from kmq_spark.kafka.topics import QueueTopics, partition_count
from kmq_spark.kafka.worker import MAX_BATCH, Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import TracebackType
    from typing import Self

    from kmq_spark.kafka.leases import Lease
    from kmq_spark.kafka.message import Message
    from kmq_spark.kafka.transaction_record import Transaction
    from kmq_spark.kafka.worker import RunSummary

logger = logging.getLogger(__name__)

MIN_LEASE_MS = 1_000
"""Shortest lease: below it, a slow broker alone would cause redeliveries."""

MAX_START_TIMEOUT_MS = 10_000
"""Longest wait for a START: a broker that restarts is back within it, a caller does not hang for longer."""

_HOLD_LEASES = 10
"""Leases that a message may be held, by default: long work is renewed, a handler that hangs is given up."""

_FULL_LOG_S = 60.0
"""How often a receiver that has no room is told so."""


class QueueConsumer:
    """
    Receives messages of a queue.

    Use it in a `with` block, or call `close`.
    """

    _is_closed = _is_stopped = False
    _full_logged_at = float("-inf")
    _worker: Worker | None = None

    def __init__(
        self,
        queue: str,
        *,
        bootstrap_servers: str,
        group: str | None = None,
        group_protocol: str = "classic",
        lease_ms: int = 30_000,
        max_lease_ms: int | None = None,
        max_in_flight: int = 1_000,
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
            queue: Name of the queue.
            bootstrap_servers: Comma-separated `host:port`.
            group: Consumer group; `kmq.<queue>` by default.
            group_protocol: `classic`, or `consumer` for brokers from 4.0 (KIP-848): rebalances without a halt, and
                fewer repeats where consumers are killed.
            lease_ms: How long a message is held before it is redelivered, 1 s to 12 h; keep-alive renews it.
            max_lease_ms: How long keep-alive may hold a message altogether; ten leases or 12 h by default, whichever
                is less. A handler that hangs loses its message then.
            max_in_flight: Most messages held at once.
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
        self._topics = QueueTopics(queue)
        max_lease_ms = min(MAX_REDELIVER_AFTER_MS, _HOLD_LEASES * lease_ms) if max_lease_ms is None else max_lease_ms
        _check_bounds(lease_ms, max_lease_ms, max_in_flight, ack_linger_ms)
        start_timeout_ms = start_timeout_ms or min(MAX_START_TIMEOUT_MS, lease_ms // 2)
        self.consumer_id = consumer_id or new_client_id("consumer")
        self.max_in_flight = max_in_flight
        self.lease_ms = lease_ms
        self._leases = LeaseTable()
        self._receiving = threading.Lock()
        self._pid = os.getpid()
        self._producer = MarkerProducer(
            marker_producer_config(bootstrap_servers, extra=extra, delivery_timeout_ms=start_timeout_ms),
            self._topics.markers_topic,
        )
        self._check_topics(bootstrap_servers, timeout_ms)
        group = group or self._topics.consumer_group
        identity = (self._topics, self.consumer_id, bootstrap_servers, extra)
        self._intake = Intake(
            consumer_config(bootstrap_servers, group, self.consumer_id, extra, group_protocol=group_protocol),
            topic=self._topics.queue_topic,
            leases=self._leases,
            markers=self._producer,
            consumer_id=self.consumer_id,
            lease_s=lease_ms / 1000,
            max_lease_s=max_lease_ms / 1000,
            start_timeout_s=start_timeout_ms / 1000,
            starts=transactional_starts(*identity, start_timeout_ms) if start_in_transaction else None,
        )
        self._writer = MarkerWriter(
            self._producer,
            self._leases,
            consumer_id=self.consumer_id,
            lease_ms=lease_ms,
            ack_linger_ms=ack_linger_ms,
            keep_alive=keep_alive,
        )
        self._writer.start()
        self._transactions = ResultTransactions(*identity, self._leases, self._producer, lease_ms, timeout_ms)
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
        return self._leases.held_count()

    def receive(self, max_messages: int = 1, timeout: float = 1.0) -> list[Message]:
        """
        Receive messages; each is held until it is settled or its lease ends.

        Args:
            max_messages: Most messages to return, at least 1.
            timeout: Seconds to wait for the first one; 0 looks once.

        Returns:
            At most *max_messages*, none where none came in time or where `max_in_flight` messages are held.

        Raises:
            ConfigError: A value is out of bounds.
            KmqError: A START could not be made durable; nothing was handed out, the messages will be fetched again.
            UsageError: The consumer is closed, was made by another process, or receives in another thread already.
        """
        if max_messages < 1 or timeout < 0:
            message = (
                f"receive is out of bounds: got max_messages={max_messages!r}, timeout={timeout!r}, "
                "minimum 1 and 0; correct the call"
            )
            raise ConfigError(message)
        self._check_usable()
        with self._one_receiver():
            return self._receive(max_messages, timeout)

    def run(
        self,
        handler: Callable[[Message], object],
        *,
        concurrency: int = 8,
        retry_delay_ms: int = 1_000,
        drain_timeout_ms: int = 20_000,
        max_batch: int = MAX_BATCH,
    ) -> RunSummary:
        """
        Call a handler for each message, in threads, until stopped; then close.

        Ends after `stop`, SIGTERM or Ctrl+C (both in the main thread only): what no handler has seen is given back
        uncounted, running handlers are waited for. A second Ctrl+C ends it at once.

        Args:
            handler: Called with a message. Returning acknowledges it, unless the handler settled it; an exception is
                logged and releases it, to be delivered again.
            concurrency: Handler threads.
            retry_delay_ms: How long a message rests after its handler raised.
            drain_timeout_ms: How long a stop waits for running handlers; then their messages are released.
            max_batch: Most messages fetched at once.

        Returns:
            What was done.

        Raises:
            ConfigError: A value is out of bounds.
            KmqError: The client failed for good, or the last markers could not be written.
            UsageError: As `receive`.
        """
        self._check_usable()
        worker = Worker(
            intake=self._intake,
            leases=self._leases,
            close=self.close,
            handler=handler,
            concurrency=concurrency,
            max_in_flight=self.max_in_flight,
            retry_delay_ms=retry_delay_ms,
            drain_timeout_ms=drain_timeout_ms,
            max_batch=max_batch,
        )
        with self._one_receiver():
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
        return (*self._intake.clients, self._producer.client, *self._transactions.after_fork())

    def stop(self) -> None:
        """Ask `run` to end, from any thread or a signal handler; running handlers are waited for."""
        self._is_stopped = True
        if self._worker is not None:
            self._worker.stop()

    def close(self, timeout: float = 30.0) -> None:
        """
        Give back what is held, write the last markers, commit, leave the group. A second call does nothing.

        Args:
            timeout: Seconds for the last markers.

        Raises:
            KmqError: The last markers could not be written: what was settled last may be delivered again.
        """
        if self._is_closed or self._pid != os.getpid():
            return
        self._is_closed = True
        self._transactions.close(timeout)
        try:
            # Positions first: a message that is released before its position is committed would come twice.
            self._intake.close()
        finally:
            for lease in self._leases.end_all("the consumer was closed, the message was released"):
                self._give_back(lease)
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

    def _receive(self, max_messages: int, timeout: float) -> list[Message]:
        until = time.monotonic() + timeout
        room = min(max_messages, self._wait_for_room(until))
        if room < 1:
            return []
        records = self._intake.fetch(room, max(0.0, until - time.monotonic()))
        if not records:
            return []
        batch = self._intake.send_start(records)
        try:
            self._intake.wait_until_durable(batch)
        except BaseException:
            # Ctrl+C in the middle of the wait, for one: nobody has these messages, so they are fetched again.
            self._intake.give_back()
            raise
        self._intake.commit(batch)
        return batch.messages

    def _wait_for_room(self, until: float) -> int:
        room = self.max_in_flight - self._leases.held_count()
        while room < 1 and time.monotonic() < until:
            time.sleep(min(0.005, max(0.0, until - time.monotonic())))
            room = self.max_in_flight - self._leases.held_count()
        if room < 1 and time.monotonic() - self._full_logged_at > _FULL_LOG_S:
            self._full_logged_at = time.monotonic()
            logger.warning(
                "receiving nothing: %d messages are held, max_in_flight is %d; settle messages or raise it",
                self._leases.held_count(),
                self.max_in_flight,
                extra={"action": "in_flight_full"},
            )
        return room

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

    def _check_topics(self, bootstrap_servers: str, timeout_ms: int) -> None:
        counts = {
            topic: partition_count(self._producer.client, topic, bootstrap_servers, timeout_ms)
            for topic in (self._topics.queue_topic, self._topics.markers_topic)
        }
        queue = self._topics.queue
        missing = [topic for topic, count in counts.items() if not count]
        if missing:
            message = f"queue {queue!r} has no topic {missing[0]!r}; run `kmq queue create {queue}`"
            raise TopicError(message)
        queue_count, marker_count = counts.values()
        if marker_count < queue_count:
            message = (
                f"topic {self._topics.markers_topic!r} has too few partitions: got {marker_count}, "
                f"{queue_count} as {queue!r}; add them before messages of the others are received"
            )
            raise TopicError(message)


def _check_bounds(lease_ms: int, max_lease_ms: int, max_in_flight: int, ack_linger_ms: int) -> None:
    bounds = {
        "lease_ms": (lease_ms, MIN_LEASE_MS, MAX_REDELIVER_AFTER_MS),
        "max_lease_ms": (max_lease_ms, lease_ms, MAX_REDELIVER_AFTER_MS),
        "max_in_flight": (max_in_flight, 1, 10_000_000),
        "ack_linger_ms": (ack_linger_ms, 0, 1_000),
    }
    for name, (value, least, most) in bounds.items():
        if not least <= value <= most:
            message = f"{name} is out of bounds: got {value!r}, {least} to {most}; correct {name}"
            raise ConfigError(message)
