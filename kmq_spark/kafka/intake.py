"""
The steps from the queue topic to a handler's hands: fetch, START, durable, commit; and their way back.

Rule 1: a message is handed out, and its position committed, only after its START is durable.
Rule 2: a START that did not become durable in time gives its messages back: the position is sought back.
Rule 3: one thread at a time; rebalance callbacks run inside its calls.
Rule 4: markers need no ownership: what is held stays held when its partition goes to another consumer.

Source: kmq README, "How does kmq work"; kafka-mq-go does these steps message by message, each awaited.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from kmq_spark.core.markers import Marker, MarkerType
from kmq_spark.errors import KafkaClientError, KmqError
from kmq_spark.failpoints import failpoint
from kmq_spark.kafka.batch import Batch
from kmq_spark.kafka.leases import Lease, LeaseTable
from kmq_spark.kafka.marker_ranges import cut_ranges
from kmq_spark.kafka.message import Message
from kmq_spark.kafka.settings import client_error, make_client
from kmq_spark.kafka.start_writer import PlainStarts, StartWriter
from kmq_spark.wire.headers import delivery_count_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt
    from confluent_kafka import Message as KafkaMessage

    from kmq_spark.kafka.marker_producer import MarkerProducer

    Offsets = npt.NDArray[np.int64]

logger = logging.getLogger(__name__)

REPORT_GRACE_S = 2.0
"""librdkafka looks for timed-out records once a second: the report of a failed START comes this late at most."""

_PASSING = frozenset({"_PARTITION_EOF", "_MAX_POLL_EXCEEDED", "_TRANSPORT", "_ALL_BROKERS_DOWN", "_TIMED_OUT"})
"""Errors in the place of a message that need no answer: librdkafka goes on, or joins the group again, by itself."""


class Intake:
    """
    Fetches messages of a queue and starts them.

    Args:
        config: librdkafka settings of the consumer.
        topic: Queue topic.
        leases: Where leases go once their START is durable.
        markers: Sends the STARTs.
        consumer_id: Name told in the STARTs.
        lease_s: Length of a lease, seconds.
        max_lease_s: How long a message may be held altogether, seconds.
        start_timeout_s: How long a START may take, seconds.
        starts: Makes what writes STARTs and positions; one after the other by default.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        topic: str,
        leases: LeaseTable,
        markers: MarkerProducer,
        consumer_id: str,
        lease_s: float,
        max_lease_s: float,
        start_timeout_s: float,
        starts: Callable[[Consumer], StartWriter] | None = None,
    ) -> None:
        """Join the group; partitions come with the first `fetch`."""
        self._topic = topic
        self._leases = leases
        self._markers = markers
        self._consumer_id = consumer_id
        self._lease_s = lease_s
        self._max_lease_s = max_lease_s
        self._start_timeout_s = start_timeout_s
        self._owned: set[int] = set()
        self._started: list[Batch] = []
        self._positions: dict[int, int] = {}
        self._stash: list[KafkaMessage] = []
        self._error: KmqError | None = None
        self._paused: set[int] = set()
        callbacks = {"error_cb": self._on_error, "on_commit": self._on_commit}
        self._consumer = make_client(Consumer, {**config, **callbacks})
        self._starts = starts(self._consumer) if starts else PlainStarts(markers, self._consumer, topic)
        self._consumer.subscribe([topic], on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost)

    @property
    def clients(self) -> tuple[object, ...]:
        """The clients, to be left alone in a child process."""
        return (self._consumer, *self._starts.clients())

    def fetch(self, max_messages: int, timeout: float) -> list[KafkaMessage]:
        """
        Fetch messages, as many as are there, waiting for the first alone.

        Args:
            max_messages: Most messages to return, at least 1.
            timeout: Seconds to wait for the first message.

        Returns:
            At most *max_messages*; nothing is prefetched beyond them except in librdkafka's own buffer.

        Raises:
            KmqError: The client reported an error that does not pass by itself.
        """
        self._raise_error()
        self._resume()
        records, self._stash = self._stash[:max_messages], self._stash[max_messages:]
        room = max_messages - len(records)
        try:
            if room:
                records += self._consumer.consume(room, 0)
            if not records and timeout > 0:
                # A full batch would be waited for to the end of the time-out; the first message ends the wait here.
                records = self._consumer.consume(1, timeout)
                if records and max_messages > 1:
                    records += self._consumer.consume(max_messages - 1, 0)
        except KafkaException as error:
            raise client_error(error, f"cannot receive from {self._topic}") from error
        good = [record for record in records if record.error() is None]
        if len(good) < len(records):
            self._note_errors(records)
        if not good:
            self._raise_error()
            return good
        failpoint("consumer.fetched")
        return good

    def send_start(self, records: Sequence[KafkaMessage]) -> Batch:
        """
        Send the STARTs of fetched messages: one for each queue partition and delivery count.

        Args:
            records: What `fetch` returned, not empty.

        Returns:
            The batch, whose STARTs are under way.
        """
        # Before the START is sent, so that the lease ends here before it ends on the broker.
        batch, leased = self._lease_out(records, time.monotonic())
        markers = [
            Marker(
                MarkerType.START,
                lease.queue_partition,
                ranges,
                redeliver_after_ms=round(self._lease_s * 1000),
                delivery_count=lease.delivery_count,
                consumer_id=self._consumer_id,
            )
            for lease, offsets in leased
            for ranges in cut_ranges(offsets)
        ]
        batch.expect(len(markers))
        self._started.append(batch)
        self._starts.send(batch, markers, self._owned)
        failpoint("consumer.start-sent")
        return batch

    def wait_until_durable(self, batch: Batch) -> None:
        """
        Wait for the STARTs of a batch, and give its messages back where they failed.

        Args:
            batch: What `send_start` returned; batches are waited for in their order.

        Raises:
            KmqError: A START failed or took too long; nothing may be handed out of this batch or a later one, they are
                fetched again.
        """
        if not batch.wait(self._start_timeout_s + REPORT_GRACE_S):
            batch.error = KafkaClientError(
                f"cannot start messages of {self._topic}: got no answer within {self._start_timeout_s:g} s; "
                "check the broker, the messages are fetched again",
                code="_TIMED_OUT",
                retriable=True,
            )
        if batch.error is not None:
            self.give_back()
            raise batch.error
        self._started.remove(batch)
        failpoint("consumer.start-durable")
        self._leases.open(batch.leases)

    def commit(self, batch: Batch) -> None:
        """Commit the position behind a batch whose START is durable; the answer is not waited for."""
        owned = {partition: offset for partition, offset in batch.next_offsets.items() if partition in self._owned}
        self._positions.update(owned)
        if owned:
            try:
                self._starts.commit(owned)
            except KafkaException as error:
                self._log_commit(error.args[0])

    def idle(self, timeout: float) -> None:
        """
        Serve the group without fetching: rebalances go on while there is no room for messages.

        Args:
            timeout: Seconds to stay here.
        """
        running = self._owned - self._paused
        if running:
            self._consumer.pause([TopicPartition(self._topic, partition) for partition in running])
            self._paused |= running
        record = self._consumer.poll(timeout)
        if record is None:
            return
        if record.error() is None:
            self._stash.append(record)
        else:
            self._note_errors([record])

    def close(self) -> None:
        """Commit what was handed out and leave the group; batches that were not waited for are forgotten."""
        try:
            # Runs `_on_revoke`.
            self._consumer.close()
        except KafkaException as error:
            raise client_error(error, f"cannot leave the group of {self._topic}") from error
        finally:
            self._started.clear()
            self._starts.close()

    def _lease_out(self, records: Sequence[KafkaMessage], now: float) -> tuple[Batch, list[tuple[Lease, Offsets]]]:
        """Put records under leases, by queue partition and delivery count, without a Python step a message."""
        partitions: list[Any] = [record.partition() for record in records]
        offsets: list[Any] = [record.offset() for record in records]
        headers = [record.headers() for record in records]
        counts = [1 if each is None else _delivery_count(each) for each in headers] if any(headers) else None
        # One number for both: a partition takes 15 bits, a count the rest.
        keys = partitions if counts is None else [(c << 16) | p for p, c in zip(partitions, counts, strict=True)]
        leased: dict[int, tuple[Lease, Offsets]] = {}
        key_column, offset_column = np.asarray(keys, dtype=np.int64), np.asarray(offsets, dtype=np.int64)
        for key in set(keys):
            covered = offset_column[key_column == key]
            lease = Lease(
                outbox=self._leases.outbox(key & 0xFFFF),
                delivery_count=max(1, key >> 16),
                held=set(covered.tolist()),
                renewed_at=now,
                expires_at=now + self._lease_s,
                limit_at=now + self._max_lease_s,
            )
            leased[key] = (lease, covered)
        lease_of = {key: lease for key, (lease, _) in leased.items()}
        messages = [
            Message(record, offset, lease_of[key]) for record, offset, key in zip(records, offsets, keys, strict=True)
        ]
        return Batch(messages, [lease for lease, _ in leased.values()]), list(leased.values())

    def give_back(self) -> None:
        """Seek back to the oldest batch that was not waited for: it and all after it are fetched again."""
        first: dict[int, int] = {}
        for batch in self._started:
            for lease in batch.leases:
                lease.end("its START could not be written, it was never handed out")
            for partition, offset in batch.first_offsets.items():
                first[partition] = min(offset, first.get(partition, offset))
        self._started.clear()
        self._stash = [record for record in self._stash if record.partition() not in first]
        for partition, offset in first.items():
            if partition in self._owned:
                self._seek(TopicPartition(self._topic, partition, offset))

    def _seek(self, position: TopicPartition) -> None:
        try:
            self._consumer.seek(position)
        except KafkaException as error:
            # Going on from here would skip messages, and the next commit would lose them: only a new consumer,
            # which begins at the committed position, is right.
            raise client_error(error, f"cannot seek {self._topic} back; close this consumer, make a new one") from error

    def _resume(self) -> None:
        if self._paused:
            self._consumer.resume([TopicPartition(self._topic, partition) for partition in self._paused])
            self._paused.clear()

    def _offsets(self, positions: Mapping[int, int]) -> list[TopicPartition]:
        return [TopicPartition(self._topic, partition, offset) for partition, offset in positions.items()]

    def _on_assign(self, _consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._owned.update(each.partition for each in partitions)
        self._log_rebalance("got", partitions)

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Commit what was handed out, or is about to be, before the next owner looks for the position."""
        gone = {each.partition for each in partitions}
        for batch in list(self._started):
            if gone & batch.next_offsets.keys() and batch.wait(self._start_timeout_s) and batch.error is None:
                self._positions.update(batch.next_offsets)
        positions = {partition: offset for partition, offset in self._positions.items() if partition in gone}
        if positions:
            try:
                consumer.commit(offsets=self._offsets(positions), asynchronous=False)
            except KafkaException as error:
                self._log_commit(error.args[0])
        self._forget(gone)
        self._log_rebalance("gave up", partitions)

    def _on_lost(self, _consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Commit nothing: the partitions have another owner already."""
        self._forget({each.partition for each in partitions})
        self._log_rebalance("lost", partitions)

    def _forget(self, partitions: set[int]) -> None:
        self._owned -= partitions
        self._paused -= partitions
        self._stash = [record for record in self._stash if record.partition() not in partitions]
        for partition in partitions:
            self._positions.pop(partition, None)

    def _log_rebalance(self, what: str, partitions: list[TopicPartition]) -> None:
        if not partitions:
            return
        numbers = sorted(each.partition for each in partitions)
        logger.info("%s partitions %s of %s", what, numbers, self._topic, extra={"action": "rebalanced"})

    def _on_commit(self, error: KafkaError | None, _partitions: list[TopicPartition]) -> None:
        if error is not None:
            self._log_commit(error)
            return
        failpoint("consumer.commit-done")

    def _log_commit(self, error: KafkaError) -> None:
        # The next commit carries the position too; until then a crash would deliver the messages behind it again.
        logger.warning("cannot commit positions of %s: %s", self._topic, error.str(), extra={"action": "commit_failed"})

    def _on_error(self, error: KafkaError) -> None:
        if error.name() in {"_AUTHENTICATION", "_SSL", "_FATAL"}:
            self._error = client_error(error, f"cannot receive from {self._topic}")

    def _note_errors(self, records: Sequence[KafkaMessage]) -> None:
        for record in records:
            error = record.error()
            if error is not None and error.name() not in _PASSING:
                self._error = client_error(error, f"cannot receive from {self._topic}")

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


def _delivery_count(headers: Any) -> int:  # noqa: ANN401  # the stub's header type allows what may be sent, too
    return delivery_count_of(headers) + 1
