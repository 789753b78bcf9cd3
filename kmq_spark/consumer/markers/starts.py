"""
Write the STARTs of a batch and commit its position: one after the other, or in one Kafka transaction.

Rule 1: a position is committed only once the START of everything before it is durable.
Rule 2: in one transaction, a consumer that dies between the two has done neither: nothing is fetched again that was
started, so nothing is done twice for it. It costs a transaction a batch, and what dies in one holds up the readers of
its markers partitions, and the next owner of its queue partitions, until the broker aborts it.
Rule 3: one thread, the receiving one.

Source: KIP-447, whose group metadata keeps a member that was thrown out of the group from committing.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from confluent_kafka import TopicPartition

from kmq_spark.errors import FencedError, KafkaClientError, KmqError
from kmq_spark.failpoints import failpoint
from kmq_spark.kafka.records import OutgoingRecord
from kmq_spark.kafka.settings import transactional_producer_config
from kmq_spark.kafka.transaction import TransactionalProducer
from kmq_spark.wire.codec import encode_marker

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from confluent_kafka import Consumer, KafkaError, Message

    from kmq_spark.consumer.batch import Batch
    from kmq_spark.consumer.markers.producer import MarkerProducer, OnReport
    from kmq_spark.core.markers import Marker
    from kmq_spark.kafka.queue_topics import QueueTopics

    Start = tuple[Marker, OnReport]

ATTEMPTS = 3
"""Transactions tried for one batch: what the group refuses it refuses again, and fetching again is cheap."""

MIN_TRANSACTION_TIMEOUT_MS = 1_000
"""librdkafka takes no shorter one."""


class StartWriter(Protocol):
    """How STARTs and positions are written."""

    commits_positions: bool
    """Whether the position behind a batch is committed with its STARTs; else that is the caller's."""

    def send(self, batch: Batch, starts: Sequence[Start], owned: Collection[int]) -> None:
        """
        Send the STARTs of a batch.

        Args:
            batch: Expects as many reports as there are STARTs.
            starts: Its STARTs, deferrals among them, and what hears of each.
            owned: Queue partitions that are ours now.
        """

    def clients(self) -> tuple[object, ...]:
        """Return the clients that a child process must leave alone."""

    def close(self) -> None:
        """Give up what is under way."""


class PlainStarts:
    """
    STARTs first; the position follows once they are durable.

    Args:
        markers: Sends the STARTs.
    """

    commits_positions = False

    def __init__(self, markers: MarkerProducer) -> None:
        """Keep the client; it is another's."""
        self._markers = markers

    def send(self, batch: Batch, starts: Sequence[Start], owned: Collection[int]) -> None:  # noqa: ARG002  # as above
        """Send the STARTs; reports come later."""
        for marker, on_report in starts:
            self._markers.send(marker, on_report)

    def clients(self) -> tuple[object, ...]:
        """Return nothing: they are another's."""
        return ()

    def close(self) -> None:
        """Do nothing: they are another's."""


class TransactionalStarts:
    """
    STARTs and position in one transaction, written before `send` returns.

    Args:
        config: librdkafka settings of a transactional producer, for nobody else.
        consumer: Its group metadata goes with the positions.
        topic: Queue topic.
        markers_topic: Markers topic.
        timeout_ms: Bound on each call, and on how old a START may be when it is committed.
    """

    commits_positions = True

    def __init__(
        self, config: Mapping[str, Any], consumer: Consumer, *, topic: str, markers_topic: str, timeout_ms: int
    ) -> None:
        """Prepare; the producer is made by the first batch."""
        self._config = dict(config)
        self._consumer = consumer
        self._topic = topic
        self._markers_topic = markers_topic
        self._timeout_ms = timeout_ms
        self._producer: TransactionalProducer | None = None

    def send(self, batch: Batch, starts: Sequence[Start], owned: Collection[int]) -> None:
        """Write all of it, or nothing; `batch` has heard of it when this returns."""
        if not starts:
            return
        error: KmqError | None = None
        appended_at_ms = [0] * len(starts)
        try:
            self._send(batch, [marker for marker, _ in starts], owned, appended_at_ms)
        except KmqError as failure:
            # What this producer left open, the next one ends.
            self.close()
            error = failure
        except BaseException:
            # An interrupt in the middle of it: whether it was committed is not known, and its batch is fetched again.
            self.close()
            raise
        for (_, on_report), at_ms in zip(starts, appended_at_ms, strict=True):
            on_report(error, at_ms)

    def clients(self) -> tuple[object, ...]:
        """Return the producer, where there is one."""
        return () if self._producer is None else (self._producer.client,)

    def close(self) -> None:
        """Give up the producer."""
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.close()

    def _send(self, batch: Batch, markers: Sequence[Marker], owned: Collection[int], appended_at_ms: list[int]) -> None:
        lost = batch.next_offsets.keys() - set(owned)
        if lost:
            raise self._given_up(f"partitions {sorted(lost)} went to another consumer meanwhile")
        if self._producer is None:
            self._producer = TransactionalProducer(self._config, self._timeout_ms, role="consumer")
        began_at = time.monotonic()
        try:
            self._transact(self._producer, markers, _places(self._topic, batch.next_offsets), appended_at_ms)
        except _TooOftenError:
            raise self._given_up("the broker or the group refused it") from None
        except FencedError as error:
            if time.monotonic() - began_at > int(self._config["transaction.timeout.ms"]) / 1000:
                raise self._given_up("the broker gave up the transaction") from error
            message = f"{error}; give each consumer a consumer_id of its own"
            raise FencedError(message) from error

    def _transact(
        self,
        producer: TransactionalProducer,
        markers: Sequence[Marker],
        positions: list[TopicPartition],
        appended_at_ms: list[int],
    ) -> None:
        attempts, until = 0, time.monotonic() + self._timeout_ms / 1000

        def work() -> None:
            nonlocal attempts
            attempts += 1
            if attempts > ATTEMPTS:
                raise _TooOftenError
            for index, marker in enumerate(markers):
                record = OutgoingRecord(self._markers_topic, marker.queue_partition, None, encode_marker(marker), [])
                producer.send(record, partial(_note_append_time, appended_at_ms, index))
            failpoint("consumer.start-tx-sent")

        def check() -> None:
            if time.monotonic() > until:
                raise _TooOftenError
            failpoint("consumer.start-tx-before-commit")

        producer.run(work, positions, self._consumer.consumer_group_metadata(), check=check)

    def _given_up(self, why: str) -> KafkaClientError:
        message = f"cannot start messages of {self._topic}: {why}; they are fetched again"
        return KafkaClientError(message, code="_ABORTED", retriable=True)


def transactional_starts(
    topics: QueueTopics,
    consumer_id: str,
    bootstrap_servers: str,
    extra: Mapping[str, str] | None,
    timeout_ms: int,
) -> Callable[[Consumer], TransactionalStarts]:
    """
    Return what makes the transactional form, from a consumer's client.

    Args:
        topics: Names of its queue.
        consumer_id: Part of the transactional id.
        bootstrap_servers: Comma-separated `host:port`.
        extra: librdkafka settings.
        timeout_ms: How long a START may take.
    """
    config = transactional_producer_config(
        bootstrap_servers,
        f"{topics.consumer_transactional_id(consumer_id)}.starts",
        consumer_id,
        extra,
        # What dies in a transaction holds others up for this long, and for the broker's scan after it.
        transaction_timeout_ms=max(MIN_TRANSACTION_TIMEOUT_MS, timeout_ms),
    )
    # The receiver waits for its START.
    config["linger.ms"] = 0
    return lambda consumer: TransactionalStarts(
        config, consumer, topic=topics.queue_topic, markers_topic=topics.markers_topic, timeout_ms=timeout_ms
    )


def _note_append_time(appended_at_ms: list[int], index: int, error: KafkaError | None, record: Message) -> None:
    if error is None:
        appended_at_ms[index] = record.timestamp()[1]


class _TooOftenError(Exception):
    """The batch is given up; its transaction is aborted."""


def _places(topic: str, positions: Mapping[int, int]) -> list[TopicPartition]:
    return [TopicPartition(topic, partition, offset) for partition, offset in positions.items()]
