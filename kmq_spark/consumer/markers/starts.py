"""
Write the STARTs of a batch and commit its offsets: one after the other, or in one Kafka transaction.

Rule 1: an offset is committed only when the STARTs of all messages before it are durable.
Rule 2: with one transaction, a consumer that dies before the commit leaves neither STARTs nor offsets. So no message
that was started is fetched again, and no message is processed twice for this reason. The cost is one transaction per
batch. If a process dies in a transaction, the readers of its markers partitions and the next owner of its queue
partitions wait until the broker aborts the transaction.
Rule 3: only the receiving thread uses this module.

Source: KIP-447; its group metadata prevents a commit by a member that was removed from the group.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from kmq_spark.consumer.offset_commits import topic_partitions
from kmq_spark.errors import FencedError, KafkaClientError, KmqError
from kmq_spark.failpoints import failpoint
from kmq_spark.kafka.records import OutgoingRecord
from kmq_spark.kafka.settings import transactional_producer_config
from kmq_spark.kafka.transaction import TransactionalProducer
from kmq_spark.wire.codec import encode_marker

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from confluent_kafka import KafkaError, Message, TopicPartition

    from kmq_spark.consumer.markers.producer import MarkerProducer, OnReport
    from kmq_spark.consumer.started import StartedBatch
    from kmq_spark.core.markers import Marker
    from kmq_spark.kafka.queue_topics import QueueTopics

    Start = tuple[Marker, OnReport]

ATTEMPTS = 3
"""Maximum number of transactions per batch. A commit that the group rejects fails again; fetching again is cheap."""

MIN_TRANSACTION_TIMEOUT_MS = 1_000
"""Minimum that librdkafka accepts."""


class StartWriter(Protocol):
    """Interface for writing STARTs and committing offsets."""

    @property
    def commit_positions(self) -> Callable[[Mapping[int, int]], None] | None:
        """
        Commits offsets after skipped records, where `send` also commits the offsets after a batch; otherwise None.

        It raises `KmqError` where the offsets were not committed, or it is unknown whether they were.
        """

    def send(self, batch: StartedBatch, starts: Sequence[Start], owned: Collection[int]) -> None:
        """
        Send the STARTs of a batch.

        Args:
            batch: The batch; `StartedBatch.expect` was called with the count of *starts*.
            starts: Its STARTs, including deferrals, each with its delivery callback.
            owned: Queue partitions that are assigned now.
        """

    def clients(self) -> tuple[object, ...]:
        """Return the Kafka clients that a forked child process must not use."""

    def close(self) -> None:
        """Close the producer, if this writer owns one; an open transaction is not committed."""


class PlainStarts:
    """
    Writer of STARTs without a transaction. The caller commits the offsets when the STARTs are durable.

    Args:
        markers: Sends the STARTs.
    """

    commit_positions = None
    """The client of the consumer group commits."""

    def __init__(self, markers: MarkerProducer) -> None:
        """Keep the producer of markers; the caller owns it."""
        self._markers = markers

    def send(self, batch: StartedBatch, starts: Sequence[Start], owned: Collection[int]) -> None:  # noqa: ARG002  # part of `StartWriter`
        """Send the STARTs; their reports arrive later."""
        for marker, on_report in starts:
            self._markers.send(marker, on_report)

    def clients(self) -> tuple[object, ...]:
        """Return no clients: the caller owns the producer."""
        return ()

    def close(self) -> None:
        """Do nothing: the caller owns the producer."""


class TransactionalStarts:
    """
    Writer of STARTs and offsets in one transaction, which ends before `send` returns.

    Args:
        config: librdkafka settings of a transactional producer. No other producer may use its transactional id.
        group_metadata: Returns the metadata of the consumer's membership in its group, sent with the offsets.
        topic: Queue topic.
        markers_topic: Markers topic.
        timeout: Timeout of each call, and greatest age of a START at its commit, seconds.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        group_metadata: Callable[[], object],
        *,
        topic: str,
        markers_topic: str,
        timeout: float,
    ) -> None:
        """Store the values. The first batch creates the producer."""
        self._config = dict(config)
        self._group_metadata = group_metadata
        self._topic = topic
        self._markers_topic = markers_topic
        self._timeout = timeout
        self._producer: TransactionalProducer | None = None

    def send(self, batch: StartedBatch, starts: Sequence[Start], owned: Collection[int]) -> None:
        """Write all STARTs and offsets, or none. All delivery callbacks are called before this method returns."""
        if not starts:
            return
        error: KmqError | None = None
        appended_at_ms = [0] * len(starts)
        try:
            if lost := batch.next_offsets.keys() - set(owned):
                raise self._given_up(f"partitions {sorted(lost)} are no longer assigned")  # noqa: TRY301  # reported as the others are
            self._send(batch.next_offsets, [marker for marker, _ in starts], appended_at_ms)
        except KmqError as failure:
            # The next producer with this transactional id aborts the transaction that this one left open.
            self.close()
            error = failure
        except BaseException:
            # Interrupted: it is unknown whether the transaction was committed. The batch is fetched again.
            self.close()
            raise
        for (_, on_report), at_ms in zip(starts, appended_at_ms, strict=True):
            on_report(error, at_ms)

    def commit_positions(self, positions: Mapping[int, int]) -> None:
        """Commit offsets in a transaction of their own, so that they stay in order with those of STARTs."""
        try:
            self._send(positions, [], [])
        except BaseException:
            self.close()
            raise

    def clients(self) -> tuple[object, ...]:
        """Return the producer, if one is open."""
        return () if self._producer is None else (self._producer.client,)

    def close(self) -> None:
        """Close the producer."""
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.close()

    def _send(self, next_offsets: Mapping[int, int], markers: Sequence[Marker], appended_at_ms: list[int]) -> None:
        if self._producer is None:
            self._producer = TransactionalProducer(self._config, self._timeout, role="consumer")
        began_at = time.monotonic()
        try:
            self._transact(self._producer, markers, topic_partitions(self._topic, next_offsets), appended_at_ms)
        except _GivenUpError:
            why = f"the transaction failed {ATTEMPTS} times or took longer than {self._timeout:g} s"
            raise self._given_up(why) from None
        except FencedError as error:
            timeout_s = int(self._config["transaction.timeout.ms"]) / 1000
            if time.monotonic() - began_at > timeout_s:
                why = f"the broker aborted the transaction after transaction.timeout.ms ({timeout_s:g} s)"
                raise self._given_up(why) from error
            message = f"{error}; give each consumer its own consumer_id"
            raise FencedError(message) from error

    def _transact(
        self,
        producer: TransactionalProducer,
        markers: Sequence[Marker],
        positions: list[TopicPartition],
        appended_at_ms: list[int],
    ) -> None:
        attempts, until = 0, time.monotonic() + self._timeout

        def work() -> None:
            nonlocal attempts
            attempts += 1
            if attempts > ATTEMPTS:
                raise _GivenUpError
            for index, marker in enumerate(markers):
                record = OutgoingRecord(self._markers_topic, marker.queue_partition, None, encode_marker(marker), [])
                producer.send(record, partial(_store_append_time, appended_at_ms, index))
            if markers:
                failpoint("consumer.start-tx-sent")

        def check() -> None:
            if time.monotonic() > until:
                raise _GivenUpError
            if markers:
                failpoint("consumer.start-tx-before-commit")

        producer.run(work, positions, self._group_metadata(), check=check)

    def _given_up(self, why: str) -> KafkaClientError:
        message = f"cannot start messages of {self._topic}: {why}; the messages are fetched again"
        return KafkaClientError(message, code="_ABORTED", retriable=True)


def transactional_starts(
    topics: QueueTopics,
    consumer_id: str,
    bootstrap_servers: str,
    extra: Mapping[str, str] | None,
    timeout: float,
) -> Callable[[Callable[[], object]], TransactionalStarts]:
    """
    Return a function that creates the transactional writer from one that returns the metadata of the group membership.

    Args:
        topics: Topic names of the queue.
        consumer_id: Part of the transactional id.
        bootstrap_servers: Comma-separated `host:port`.
        extra: librdkafka settings.
        timeout: Longest time for a START to become durable, seconds.
    """
    config = transactional_producer_config(
        bootstrap_servers,
        f"{topics.consumer_transactional_id(consumer_id)}.starts",
        consumer_id,
        extra,
        # If this process dies in a transaction, others wait for this time plus the broker's abort scan.
        transaction_timeout_ms=max(MIN_TRANSACTION_TIMEOUT_MS, round(timeout * 1000)),
    )
    # No linger: the receiving thread waits for the STARTs.
    config["linger.ms"] = 0
    return lambda group_metadata: TransactionalStarts(
        config, group_metadata, topic=topics.queue_topic, markers_topic=topics.markers_topic, timeout=timeout
    )


def _store_append_time(appended_at_ms: list[int], index: int, error: KafkaError | None, record: Message) -> None:
    if error is None:
        appended_at_ms[index] = record.timestamp()[1]


class _GivenUpError(Exception):
    """The batch reached its limit of attempts or time; its transaction is aborted."""
