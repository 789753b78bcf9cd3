"""A queue in memory, with a clock that tests move."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from kmq_spark.consumer.async_consumer import DeliveryOptions
from kmq_spark.consumer.checks import check_bounds
from kmq_spark.core.durations import milliseconds
from kmq_spark.core.markers import MAX_DUE_AT_MS, MAX_QUEUE_PARTITION
from kmq_spark.errors import ConfigError, UsageError
from kmq_spark.kafka.queue_rules import DEFAULT_LEASE_S, RETRIES, checked_rules, named_rules
from kmq_spark.kafka.queue_topics import QueueTopics
from kmq_spark.kafka.records import headers_of
from kmq_spark.testing.consumer import AsyncInMemoryConsumer, InMemoryConsumer
from kmq_spark.testing.log import MemoryLog
from kmq_spark.testing.producer import AsyncInMemoryProducer, InMemoryProducer
from kmq_spark.testing.tracker import MemoryTracker
from kmq_spark.wire.dead_letter import dead_letter_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import timedelta
    from typing import Unpack

    from kmq_spark.consumer.worker import RunSummary
    from kmq_spark.kafka.serializers import Serializer
    from kmq_spark.wire.dead_letter import DeadLetter

STEP_MS = 6 * 60 * 60 * 1000
"""Consumers renew their leases at least so often while the clock moves: no lease is longer than 12 hours."""

IDLE_CHECK_S = 0.001


class InMemoryQueue:
    """
    A queue without Kafka, Java and Spark, for tests.

    Its producers and consumers have the interfaces of `QueueProducer` and `QueueConsumer`, and share their code for
    leases, settling, batches, `run` and delivery control; redelivery is decided by the code of the tracker. Time stands
    still until `advance` moves it. Nothing is lost by a crash, and nothing survives the process: for that, test with a
    broker.

    Attributes:
        name: Name of the queue.
        partition_count: Number of partitions.
        lease: Length of a lease by the rules, seconds.
    """

    def __init__(
        self,
        name: str = "queue",
        *,
        partitions: int = 1,
        rules: Mapping[str, Any] | None = None,
        beside: InMemoryQueue | None = None,
    ) -> None:
        """
        Create an empty queue.

        Args:
            name: Name of the queue.
            partitions: Number of partitions, 1 to 32,768.
            rules: Rules by name, as for `create_queue`, with its defaults: 12 deliveries, and a backoff that grows from
                one second to ten minutes.
            beside: A queue whose clock this one shares, and to which the transactions of its consumers may send.

        Raises:
            ConfigError: A name or a value is out of bounds.
        """
        topics = QueueTopics(name)
        check_bounds("partitions", partitions, 1, MAX_QUEUE_PARTITION + 1)
        stored = checked_rules({**RETRIES, **named_rules(rules)}, version=1)
        self.name, self.partition_count = name, partitions
        self.lease = DEFAULT_LEASE_S if stored.lease_s is None else stored.lease_s
        self._rules = stored.rules
        self.log: MemoryLog = MemoryLog() if beside is None else beside.log
        if name in self.log.queues:
            raise ConfigError(f"queue exists: got {name!r} twice; use another name")
        self._trackers: dict[str, MemoryTracker] = {}
        self._consumers: list[tuple[InMemoryConsumer, str]] = []
        self._positions: dict[str, dict[int, int]] = {}
        with self.log.lock:
            self.log.queues[name] = self
            self._tracker(topics)

    def producer(self, *, serializer: Serializer | None = None) -> InMemoryProducer:
        """Return a producer, used as a `QueueProducer`."""
        return InMemoryProducer(self, serializer)

    def async_producer(self, *, serializer: Serializer | None = None) -> AsyncInMemoryProducer:
        """Return a producer, used as an `AsyncQueueProducer`."""
        return AsyncInMemoryProducer(self, serializer)

    def consumer(self, **options: Unpack[DeliveryOptions]) -> InMemoryConsumer:
        """
        Return a consumer, used as a `QueueConsumer`, whose documentation says what the arguments mean.

        A `receive` that finds nothing returns after 10 ms, whatever its timeout: the queue's clock stands still.
        """
        return InMemoryConsumer(self, **options)

    def async_consumer(self, **options: Unpack[DeliveryOptions]) -> AsyncInMemoryConsumer:
        """Return a consumer, used as an `AsyncQueueConsumer`; the arguments are those of `consumer`."""
        return AsyncInMemoryConsumer(self, **options)

    def work(self, handler: Callable[[Any], object], *, timeout: float = 30.0, **options: Any) -> RunSummary:
        """
        Run a handler on what can be delivered now, as `QueueConsumer.run` does, and return when nothing is left.

        A message that is to be redelivered later waits until `advance` has moved the clock that far.

        Args:
            handler: As for `QueueConsumer.run`.
            timeout: Longest time on the machine's clock, seconds.
            options: Those of `consumer`, and those of `QueueConsumer.run`.

        Raises:
            UsageError: A handler still ran after *timeout*, or `QueueConsumer.run` raised it.
        """
        consumer = self.consumer(
            **{name: options.pop(name) for name in DeliveryOptions.__annotations__ if name in options}
        )
        is_late = threading.Event()

        def stop_when_idle() -> None:
            until = time.monotonic() + timeout
            while not (consumer.is_closed or consumer.is_idle()):
                if time.monotonic() > until:
                    is_late.set()
                    break
                time.sleep(IDLE_CHECK_S)
            consumer.stop()

        stopper = threading.Thread(target=stop_when_idle, name=f"kmq-idle-{self.name}", daemon=True)
        stopper.start()
        try:
            summary = consumer.run(handler, **{"drain_timeout": 1.0, **options})
        finally:
            consumer.close()
            stopper.join()
        if is_late.is_set():
            raise UsageError(f"handlers still ran after {timeout:g} s: got {handler!r}; give them less, or more time")
        return summary

    @property
    def now(self) -> datetime:
        """The queue's clock."""
        return datetime.fromtimestamp(self.log.now_ms / 1000, UTC)

    def advance(self, duration: float | timedelta) -> None:
        """
        Move the clock of this queue and of those beside it, and carry out what falls due meanwhile.

        Consumers renew the leases of the messages that they hold, up to their `max_lease`, except those that were
        killed.

        Args:
            duration: Seconds or a timedelta, at least 0.
        """
        log = self.log
        with log.lock:
            target_ms = log.now_ms + milliseconds("duration", duration, most_ms=MAX_DUE_AT_MS)
            while log.now_ms < target_ms:
                self._advance_to(min(target_ms, log.now_ms + STEP_MS))

    def _advance_to(self, until_ms: int) -> None:
        log, queues = self.log, list(self.log.queues.values())
        for consumer, _ in [each for queue in queues for each in queue._consumers]:  # noqa: SLF001  # of this class
            consumer.writer.write_out()
            consumer.writer.keep_alive(until_ms)
        while True:
            due = [each for queue in queues if (each := queue.track()) is not None]
            if log.now_ms >= until_ms:
                return
            log.now_ms = min(until_ms, max(log.now_ms + 1, min(due, default=until_ms)))

    def kill(self, consumer: InMemoryConsumer) -> None:
        """End a consumer as `kill -9` ends its process: what it holds is redelivered when its leases run out."""
        with self.log.lock:
            consumer.die()
            self.remove(consumer)

    @property
    def in_flight_count(self) -> int:
        """Count of messages that are held, wait for their redelivery, or are deferred until they are due."""
        return self._in_flight_count("")

    def _in_flight_count(self, subscription: str) -> int:
        with self.log.lock:
            self.track()
            return self._tracker(QueueTopics(self.name, subscription)).in_flight_count

    def dead_letters(self, subscription: str = "") -> list[DeadLetter]:
        """Return the dead letters, a partition after the other."""
        topics, log = QueueTopics(self.name, subscription), self.log
        with log.lock:
            self.track()
            return [
                dead_letter_of(
                    partition,
                    offset,
                    dead_at_ms=record.timestamp()[1],
                    key=record.key(),
                    value=record.value(),
                    headers=headers_of(record),
                    queue_topic=self.name,
                )
                for partition in range(self.partition_count)
                for offset, record in enumerate(log.records(topics.dead_letter_topic, partition))
            ]

    def track(self) -> int | None:
        """Carry out what is overdue. Return when the next message may fall due, epoch milliseconds. For consumers."""
        with self.log.lock:
            for consumer, _ in self._consumers:
                consumer.writer.write_out()
            due = []
            for subscription, tracker in self._trackers.items():
                due.append(tracker.track())
                decided, tracker.decided = tracker.decided, set()
                for consumer, of in self._consumers:
                    if of == subscription and decided:
                        consumer.writer.end_leases(decided)
            return min((each for each in due if each is not None), default=None)

    def positions(self, group: str) -> dict[int, int]:
        """Return the positions of a consumer group, by partition. For consumers."""
        return self._positions.setdefault(group, {})

    def add(self, consumer: InMemoryConsumer, topics: QueueTopics) -> None:
        """Note a consumer. For consumers."""
        with self.log.lock:
            self._tracker(topics)
            self._consumers.append((consumer, topics.subscription))

    def remove(self, consumer: InMemoryConsumer) -> None:
        """Forget a consumer. For consumers."""
        with self.log.lock:
            self._consumers = [each for each in self._consumers if each[0] is not consumer]

    def _tracker(self, topics: QueueTopics) -> MemoryTracker:
        if topics.subscription not in self._trackers:
            tracker = MemoryTracker(self.log, topics, self.partition_count, self._rules)
            self._trackers[topics.subscription] = tracker
        return self._trackers[topics.subscription]
