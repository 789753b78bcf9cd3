"""
Consumers of a queue in memory: the pipeline, leases and markers of `QueueConsumer`, with a log in place of Kafka.

Rule 1: no lease ends by the machine's clock. A consumer renews its leases when the queue's clock moves; after `kill` it
does not.
Rule 2: a message is fetched, started and committed under the lock of the log. So what was fetched and not started needs
no buffer: it is fetched again.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

from kmq_spark.consumer.admission import AdmissionPolicy
from kmq_spark.consumer.async_consumer import AsyncQueueConsumer, DeliveryOptions
from kmq_spark.consumer.checks import check_bounds, limits_of
from kmq_spark.consumer.consumer import QueueConsumer
from kmq_spark.consumer.leases import LeaseTable
from kmq_spark.consumer.marker_writer import MarkerWriter
from kmq_spark.consumer.pipeline import Pipeline
from kmq_spark.consumer.transaction import Transaction
from kmq_spark.core.markers import Marker, MarkerType, Release
from kmq_spark.core.ranges import cut_ranges
from kmq_spark.errors import KafkaClientError, TopicError, TransactionError, UsageError
from kmq_spark.kafka.queue_topics import QueueTopics
from kmq_spark.kafka.settings import new_client_id
from kmq_spark.testing.message import FOREVER
from kmq_spark.testing.producer import MemoryOptions, record_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from datetime import timedelta
    from typing import Unpack

    from confluent_kafka import Message as KafkaMessage

    from kmq_spark.consumer.batch import Batch
    from kmq_spark.consumer.pipeline import Result
    from kmq_spark.consumer.started import StartedBatch
    from kmq_spark.errors import KmqError
    from kmq_spark.kafka.serializers import Deserializer
    from kmq_spark.testing.log import MemoryLog
    from kmq_spark.testing.queue import InMemoryQueue

EMPTY_S = 0.01
"""Longest wait for a message, on the machine's clock: meanwhile another thread may send one."""


class MemoryMarkers:
    """
    The producer of markers: a marker is durable when it is sent.

    `unsettled`: partition and offset of the messages that were started and have neither an END nor a release. A handler
    that settles a message has let it go a moment before its marker is written.
    """

    def __init__(self, log: MemoryLog, topic: str) -> None:
        self._log, self._topic = log, topic
        self.unsettled: set[tuple[int, int]] = set()

    def send(self, marker: Marker, on_report: Callable[[KmqError | None, int], object]) -> None:
        """Append a START or a KEEPALIVE, and report it."""
        self.send_until_durable(marker)
        on_report(None, self._log.now_ms)

    def send_until_durable(self, marker: Marker) -> None:
        """Append a marker."""
        covered = {(marker.queue_partition, first + step) for first, count in marker.ranges for step in range(count)}
        if marker.type is MarkerType.START:
            self.unsettled |= set() if marker.never_handed_out else covered
        elif marker.type is MarkerType.END or marker.release is not Release.RENEWED:
            self.unsettled -= covered
        self._log.append_marker(self._topic, marker.queue_partition, marker)


class MemoryWriter(MarkerWriter):
    """Writes what is settled when it is asked to: it has no thread."""

    def __init__(self, log: MemoryLog, markers: MemoryMarkers, leases: LeaseTable, consumer_id: str) -> None:
        super().__init__(markers, leases, consumer_id)  # type: ignore[arg-type]  # what the writer needs of it
        self._log, self._markers = log, markers

    def write_out(self, timeout: float = 0.0) -> None:  # noqa: ARG002  # as in `MarkerWriter`
        """Write the markers of what is settled."""
        with self._log.lock:
            for outbox in self._leases.outboxes():
                self._write_settled(outbox)
                extended = outbox.take(outbox.extended)
                self._write_extensions(outbox.queue_partition, extended)
                for lease in extended:
                    lease.ends_at = lease.ends_at if lease.end_reason else FOREVER

    def flush(self, timeout: float) -> None:
        """Write the markers of what is settled."""
        self.write_out(timeout)

    def close(self, timeout: float) -> None:
        """Write the markers of what is settled."""
        self.write_out(timeout)

    def keep_alive(self, until_ms: int) -> None:
        """Renew the leases as the thread would until then: none beyond its limit."""
        with self._log.lock:
            now_ms = self._log.now_ms
            for lease in self._leases.open_leases():
                duration_ms, limit_ms = round(lease.duration_s * 1000), round(lease.limit_at * 1000)
                if now_ms + duration_ms > limit_ms:
                    continue
                for ranges in cut_ranges(lease.held_offsets()):
                    self._producer.send_until_durable(
                        Marker(
                            MarkerType.KEEPALIVE,
                            lease.queue_partition,
                            ranges,
                            redeliver_after_ms=min(until_ms + duration_ms, limit_ms) - now_ms,
                            consumer_id=self._consumer_id,
                        )
                    )

    def end_leases(self, decided: Collection[tuple[int, int]]) -> None:
        """End the leases of messages that the tracker has decided."""
        self._markers.unsettled -= set(decided)
        for lease in self._leases.open_leases():
            if any((lease.queue_partition, offset) in decided for offset in lease.held_offsets()):
                lease.end("the lease ran out")
        self._leases.remove_ended(0.0)


class MemoryFetcher:
    """Reads a queue topic from the position of a group, which all consumers of the group share."""

    def __init__(self, log: MemoryLog, topic: str, partitions: int, positions: dict[int, int]) -> None:
        self._log, self._topic, self._positions = log, topic, positions
        self.owned = set(range(partitions))
        self.unchecked: set[int] = set()
        self.started: list[StartedBatch] = []

    def available(self, most: int = 1) -> list[KafkaMessage]:
        """Return the next records."""
        found: list[KafkaMessage] = []
        for partition in sorted(self.owned):
            begin = self._positions.get(partition, 0)
            found += self._log.records(self._topic, partition)[begin : begin + most - len(found)]
        return found

    def fetch(
        self,
        max_records: int,
        timeout: float,
        *,
        gather_s: float = 0.0,  # noqa: ARG002  # as in `Fetcher`
    ) -> list[KafkaMessage]:
        """Return the next records; wait for the first one."""
        found = self.available(max_records)
        if not found and timeout > 0:
            self._log.lock.wait(timeout)
            found = self.available(max_records)
        return found

    def of_member(self, records: list[KafkaMessage]) -> list[KafkaMessage]:
        """Return the records: a consumer in memory keeps its partitions."""
        return records

    def return_to_buffer(self, records: Sequence[KafkaMessage]) -> None:
        """Do nothing: the position was not moved."""

    def commit(self, batch: StartedBatch, *, within_s: float) -> None:  # noqa: ARG002  # as in `Fetcher`
        """Move the position behind a batch."""
        self._positions.update(batch.next_offsets)
        self.started = [each for each in self.started if each is not batch]

    def commit_confirmed(self, batch: StartedBatch, timeout: float) -> bool:
        """Move the position behind a batch."""
        self.commit(batch, within_s=timeout)
        return True

    def drop_started(self) -> dict[int, int]:
        """Drop the batches that are not committed."""
        for batch in self.started:
            batch.drop({each for each, end in batch.next_offsets.items() if self._positions.get(each, 0) < end})
        self.started.clear()
        return {}

    def reseek(self, first: Mapping[int, int]) -> None:
        """Do nothing: the position was not moved."""

    def serve_group_if_due(self) -> None:
        """Do nothing: there is no group to serve."""

    def close(self, timeout: float) -> None:
        """Do nothing: there is no group to leave."""


class _NoHistory:
    """A group in memory has an offset from its beginning."""

    unproven: frozenset[int] = frozenset()

    def concerns(self, _records: Sequence[KafkaMessage]) -> bool:
        """Return False."""
        return False

    def starts_from(self, _next_offsets: Mapping[int, int]) -> dict[int, int]:
        """Return nothing: a position is moved as soon as its message is started."""
        return {}

    def reopen(self) -> None:
        """Do nothing, for the same reason."""


class MemoryPipeline(Pipeline):
    """The steps of a message, under the lock of the log; nothing is fetched ahead."""

    def __init__(self, queue: InMemoryQueue, fetcher: MemoryFetcher, **parts: Any) -> None:
        super().__init__(fetcher, history=_NoHistory(), **parts)  # type: ignore[arg-type]  # what the pipeline needs of them
        self._queue = queue
        self._lock = queue.log.lock  # type: ignore[assignment]  # used as a lock

    def receive(
        self,
        max_messages: int,
        timeout: float,
        result_of: Callable[[Batch], Result],
        *,
        lease_s: float | None = None,
        gather_s: float = 0.0,
    ) -> Result:
        """Return what is there, after the tracker has carried out what is overdue."""
        with self._lock:
            self._queue.track()
            timeout = min(timeout, EMPTY_S)
            return super().receive(max_messages, timeout, result_of, lease_s=lease_s, gather_s=gather_s)

    def _start(self, *records: Any) -> StartedBatch:
        batch = super()._start(*records)
        for lease in batch.leases:
            lease.ends_at = FOREVER
            lease.limit_at = self._queue.log.now_ms / 1000 + self._limits.max_lease_s
        return batch

    def _take_ahead(self, max_messages: int, gather_s: float) -> None:
        """Do nothing: a test should see each message where it is."""


class InMemoryConsumer(QueueConsumer):
    """Consumer of an `InMemoryQueue`, made by `InMemoryQueue.consumer`. `writer` writes what it has settled."""

    def __init__(
        self,
        queue: InMemoryQueue,
        *,
        logical_queue: str = "",
        subscription: str = "",
        lease: float | timedelta | None = None,
        max_lease: float | timedelta | None = None,
        max_in_flight: int = 1_000,
        isolate_after: int = 2,
        deserializer: Deserializer | None = None,
    ) -> None:
        topics = self._topics = QueueTopics(queue.name, subscription)
        group = topics.logical_group(logical_queue) if logical_queue else topics.consumer_group
        check_bounds("max_in_flight", max_in_flight, 1, 10_000_000)
        check_bounds("isolate_after", isolate_after, 0, 10_000)
        self.consumer_id = new_client_id("consumer")
        limits = self._limits = limits_of(queue.lease if lease is None else lease, max_lease, max_in_flight)
        self._leases = LeaseTable(deserializer)
        self._receiving, self._lock, self._pid = threading.RLock(), threading.Lock(), os.getpid()
        self._in_memory, self._in_block = queue, threading.local()
        markers = self._markers = MemoryMarkers(queue.log, topics.markers_topic)
        self.writer = MemoryWriter(queue.log, markers, self._leases, self.consumer_id)
        self._writer = self.writer
        self._fetcher = MemoryFetcher(queue.log, queue.name, queue.partition_count, queue.positions(group))
        self._pipeline = MemoryPipeline(
            queue,
            self._fetcher,
            topic=topics.queue_topic,
            policy=AdmissionPolicy(logical_queue, subscription, isolate_after),
            leases=self._leases,
            markers=markers,
            consumer_id=self.consumer_id,
            limits=limits,
            write_settled=self.writer.write_out,
        )
        self._dropped = weakref.finalize(self, _nothing)  # type: ignore[call-arg,arg-type]  # there is nothing to close
        queue.add(self, topics)

    @property
    def is_closed(self) -> bool:
        """Whether it is closed."""
        return self._is_closed

    def die(self) -> None:
        """End as a process that is killed: what is held is neither released nor renewed. For `InMemoryQueue.kill`."""
        self.writer.write_out()
        self._is_closed = True

    def is_idle(self) -> bool:
        """Return whether all it started is settled and nothing can be delivered now. For `InMemoryQueue.work`."""
        with self._in_memory.log.lock:
            self._in_memory.track()
            return not self._fetcher.available() and not self._markers.unsettled

    def close(self, timeout: float = 30.0) -> None:
        """Release the held messages."""
        super().close(timeout)
        self._in_memory.remove(self)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Open a block, as `QueueConsumer.transaction`. Results go to queues that share the log of this one."""
        self._check_usable()
        if getattr(self._in_block, "is_open", False):
            message = "this thread has an open transaction: got a second one; end the first block"
            raise UsageError(message)
        self._in_block.is_open = True
        recorded = Transaction(self._check_topic, MemoryOptions())
        try:
            yield recorded
            self._commit(recorded)
        finally:
            recorded._end()  # noqa: SLF001  # as `ResultTransactions`
            self._in_block.is_open = False

    def _commit(self, recorded: Transaction) -> None:
        log = self._in_memory.log
        with log.lock:
            self._in_memory.track()
            for each in recorded.messages.values():
                each._check_held()  # noqa: SLF001  # as `ResultTransactions`
            try:
                results = [
                    record_of(log.queues[topic], value, key, partition, list(headers))
                    for topic, partition, key, value, headers in recorded.results
                ]
            except KafkaClientError as error:
                message = f"cannot commit a transaction: {error}; nothing was written, the messages are still held"
                raise TransactionError(message, code=error.code, nothing_written=True) from error
            for each in recorded.messages.values():
                each.ack()
            for result in results:
                log.append(*result)
            self.writer.write_out()

    def _check_topic(self, topic: str, partition: int) -> None:
        queues = self._in_memory.log.queues
        if topic not in queues or partition >= queues[topic].partition_count:
            message = (
                f"topic {topic!r} has no partition {partition}; expected one of {', '.join(sorted(queues))}; make it "
                f"with InMemoryQueue({topic!r}, beside=queue)"
            )
            raise TopicError(message)


def _nothing() -> None:
    """Do nothing when a consumer is dropped."""


class AsyncInMemoryConsumer(AsyncQueueConsumer):
    """Consumer of an `InMemoryQueue` for asyncio."""

    def __init__(self, queue: InMemoryQueue, **options: Unpack[DeliveryOptions]) -> None:
        super().__init__(queue.name)
        self._in_memory, self._given = queue, options

    async def _connect(self) -> QueueConsumer:
        return InMemoryConsumer(self._in_memory, **self._given)
