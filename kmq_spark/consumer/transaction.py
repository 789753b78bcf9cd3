"""
Write results and ENDs in one Kafka transaction: the results of a message appear if and only if the message is done.

Rule 1: before a transaction, the group's coordinator has confirmed the offsets after its messages: no other consumer
fetches them again, so a result appears once. A consumer that has lost a partition without that gets LeaseLostError.
Rule 2: an END takes effect if it was appended before the TICK that would redeliver its message, whenever it is
committed: the tracker reads no marker after the start of an open transaction. So one check is enough: after the last
delivery report and before the commit, no lease may have run out, neither here nor by the append times of its markers:
the clock of a suspended host may stand still, the broker's goes on. During a commit no thread can settle its messages;
they are moved to leases of the transaction, which keep-alive renews as usual.
Rule 3: if a commit has no response, a record is written after it, and its outcome is read up to there. If that fails
too, the messages are no longer held: the tracker redelivers them unless the transaction was committed.

Source: KIP-98, KIP-447; docs/internals/protocol.md, "Transactions of a consumer". Here ENDs replace the offsets.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from typing import TYPE_CHECKING

from confluent_kafka import KafkaException

from kmq_spark.consumer.batch import Batch
from kmq_spark.core.markers import Marker, MarkerType
from kmq_spark.core.ranges import cut_ranges
from kmq_spark.errors import (
    FencedError,
    KafkaClientError,
    KmqError,
    LeaseLostError,
    TopicError,
    TransactionError,
    UsageError,
)
from kmq_spark.failpoints import failpoint
from kmq_spark.kafka.client_errors import REFUSED
from kmq_spark.kafka.clock import now_s
from kmq_spark.kafka.log_reader import read_committed
from kmq_spark.kafka.records import OutgoingRecord, place_of
from kmq_spark.kafka.settings import reader_config, transactional_producer_config
from kmq_spark.kafka.topics import partition_count
from kmq_spark.kafka.transaction import TransactionalProducer
from kmq_spark.producer.options import SendOptions, encoded
from kmq_spark.wire.codec import encode_marker
from kmq_spark.wire.headers import RECORD_BYTES, size_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from datetime import datetime, timedelta

    from confluent_kafka import KafkaError
    from confluent_kafka import Message as KafkaMessage

    from kmq_spark.consumer.leases import Lease, LeaseTable
    from kmq_spark.consumer.marker_producer import MarkerProducer
    from kmq_spark.consumer.message import Message
    from kmq_spark.kafka.queue_topics import QueueTopics
    from kmq_spark.producer.options import Headers

logger = logging.getLogger(__name__)

MAX_TRANSACTION_BYTES = 32 * 1024 * 1024
"""Maximum bytes of results: sent within seconds over a slow network, and far below the limit of librdkafka's buffer."""

MAX_TRANSACTION_RECORDS = 50_000
"""Maximum number of results: half of the capacity of librdkafka's buffer."""

MAX_RECORD_BYTES = 1_000_000_000
"""`message.max.bytes` of the client. Each result topic has its own limit, so the broker checks the size."""

ABORT_SCAN_MS = 10_000
"""Interval at which the broker aborts timed-out transactions (Kafka's default)."""

SHORTEST_TIMEOUT_MS, LONGEST_TIMEOUT_MS = 5_000, 10_000
"""
Bounds of `transaction.timeout.ms`. A transaction is normally open for milliseconds. If a process dies in one, the
readers of its markers partitions wait until the broker aborts it. So the timeout is short: together with
`ABORT_SCAN_MS` it fits into a lease of 15 s or more.
"""

_UNKNOWN_OUTCOME = "the outcome of its transaction is unknown"
_NOT_CONFIRMED = "the group gave the partition to another consumer, which fetches the message again"


class Transaction:
    """
    The results and acknowledgements of one block. Created by `QueueConsumer.transaction`.

    Nothing is sent before the block ends. A call that cannot succeed raises at once.

    Attributes:
        results: Results recorded so far.
        messages: Messages acknowledged so far, each once.
    """

    def __init__(self, check_topic: Callable[[str, int], None], options: SendOptions) -> None:
        self.results: list[OutgoingRecord] = []
        self.messages: dict[int, Message] = {}
        self._check_topic = check_topic
        self._options = options
        self._size = 0
        self._lock = threading.Lock()
        self._is_over = False

    def send(
        self,
        topic: str,
        value: bytes | str | None,
        *,
        key: bytes | str | None = None,
        headers: Headers | None = None,
        partition: int | None = None,
        logical_queue: str | None = None,
        delay: float | timedelta | None = None,
        at: datetime | float | None = None,
        ttl: float | timedelta | None = None,
    ) -> None:
        """
        Record a result. It is sent when the block ends.

        Only the consumers of a queue apply *logical_queue*, *delay*, *at* and *ttl*. Readers of another topic see the
        record immediately, with the headers.

        Args:
            topic: Any topic, including the topic of a queue.
            value: Payload; text is encoded as UTF-8.
            key: All results with one key are sent to one partition; text is encoded as UTF-8.
            headers: Names that begin with `kmq-` are reserved.
            partition: Partition of the topic. By default the key selects it; without a key it is random.
            logical_queue: Logical queue on this topic, as for `QueueProducer.send`.
            delay: Time after the append time before the message is delivered, seconds or a timedelta. The append time
                is before the commit.
            at: Instant before which the message is not delivered, aware datetime or epoch seconds. *delay* and *at*
                exclude each other.
            ttl: Time after the append time when the message expires, seconds or a timedelta.

        Raises:
            ConfigError: A value is out of bounds, a header name is reserved, or the delay is longer than the retention
                of the queue.
            TopicError: The topic or the partition does not exist.
            KafkaClientError: The transaction would be too large, or the broker cannot be reached.
            UsageError: The block has ended.
        """
        pairs = self._options.headers(topic, headers, logical_queue=logical_queue, delay=delay, at=at, ttl=ttl)
        record = OutgoingRecord(
            topic,
            -1 if partition is None else partition,
            encoded(key),
            encoded(value),
            [(name, encoded(text)) for name, text in pairs],
        )
        self._check_topic(topic, max(record.partition, 0))
        size = _size_of(record)
        with self._lock:
            self._check_open()
            if self._size + size > MAX_TRANSACTION_BYTES or len(self.results) == MAX_TRANSACTION_RECORDS:
                message = (
                    f"transaction is too large: got {self._size + size} bytes in {len(self.results) + 1} results, "
                    f"maximum {MAX_TRANSACTION_BYTES} bytes and {MAX_TRANSACTION_RECORDS} results; use several "
                    "transactions"
                )
                raise KafkaClientError(message, code="MSG_SIZE_TOO_LARGE")
            self.results.append(record)
            self._size += size

    def ack(self, message: Message | Batch) -> None:
        """
        Record that a message, or what is not settled of a batch, is done. The ENDs are written when the block ends.

        Until then the message is held and its lease renewed as usual. A second `ack` of the same message has no effect.

        Args:
            message: A message, or a batch, held by the consumer of this transaction.

        Raises:
            LeaseLostError: The lease of the message ran out.
            UsageError: The message was settled earlier, or the block has ended.
        """
        with self._lock:
            self._check_open()
            given = message if isinstance(message, Batch) else [message]
            wanted = [each for each in given if each is message or not each.settled_by]
            for each in wanted:
                each._check_held()  # noqa: SLF001  # private to the package: not for handlers
            self.messages.update({id(each): each for each in wanted})

    def _end(self) -> None:
        with self._lock:
            self._is_over = True

    def _check_open(self) -> None:
        if self._is_over:
            message = "transaction has ended: got a call after its block; open a new one with consumer.transaction()"
            raise UsageError(message)


def _size_of(record: OutgoingRecord) -> int:
    return RECORD_BYTES + size_of(record.key, record.value, record.headers)


class _RejectedError(Exception):
    """The broker rejected a result, and would reject it again."""


class _Commit:
    """One transaction during its commit: its results, its leases, and its known state."""

    def __init__(self, transaction: Transaction) -> None:
        self.results = transaction.results
        self.leases: list[tuple[Lease, list[Message]]] = []
        self.written_at: tuple[int, int] | None = None
        self.is_placed = True
        self.appended_at_ms: dict[int, int] = {}
        self.rejected: KafkaError | None = None
        self.rejected_record = ""
        self.begin()

    def begin(self) -> None:
        """Note when an attempt begins, by both clocks; the broker's was read with the last START or KEEPALIVE."""
        self.is_committing, self.written_at, self.is_placed, self.began_at = False, None, True, now_s()
        self.began_at_ms = max([each.ends_at_ms - round(each.duration_s * 1000) for each, _ in self.leases], default=0)
        self.appended_at_ms.clear()

    def take(self, messages: list[Message], table: LeaseTable) -> None:
        """Move messages to leases of this transaction. After an error, `restore_leases` moves them back."""
        taken: dict[int, tuple[Lease, float, list[Message]]] = {}
        try:
            for message in messages:
                lease, ends_at = message._enter_transaction()  # noqa: SLF001  # private to the package: not for handlers
                source, least, found = taken.setdefault(id(lease), (lease, ends_at, []))
                found.append(message)
                taken[id(lease)] = (source, min(least, ends_at), found)
        finally:
            self.leases = [(_lease_of(lease, found, ends_at), found) for lease, ends_at, found in taken.values()]
            table.open([lease for lease, _ in self.leases])

    def check_leases(self) -> None:
        """Raise LeaseLostError if another consumer may get a message: its lease has ended, or its partition is lost."""
        now = now_s()
        for lease, messages in self.leases:
            is_late = self.appended_at_ms.get(lease.queue_partition, 0) >= lease.ends_at_ms
            if is_late or lease.ends_at < now or lease.is_unconfirmed:
                why = _NOT_CONFIRMED if lease.is_unconfirmed else lease.end_reason or "the lease ran out"
                message = (
                    f"lease of {len(messages)} message(s) of queue partition {lease.queue_partition} was lost before "
                    f"the commit: {why}; nothing was written, raise the lease or use smaller transactions"
                )
                raise LeaseLostError(message)

    def offsets(self) -> dict[int, list[int]]:
        """Return the offsets of the messages, by queue partition."""
        found: dict[int, list[int]] = {}
        for lease, _ in self.leases:
            found.setdefault(lease.queue_partition, []).extend(lease.held)
        return found

    def note_marker(self, error: KafkaError | None, sent: KafkaMessage) -> None:
        """Store the place of a marker of this transaction, from its delivery report."""
        if error is None:
            partition, place = sent.partition() or 0, place_of(sent)
            if place is None:
                self.is_placed = False
                return
            offset, appended_at_ms = place
            self.written_at = partition, offset
            self.appended_at_ms[partition] = max(self.appended_at_ms.get(partition, 0), appended_at_ms)

    def clear_leases(self) -> None:
        """The transaction is committed: clear the leases, so that no message is held."""
        for lease, _ in self.leases:
            lease.held.clear()

    def restore_leases(self) -> None:
        """Nothing was written: the messages are held again, under the leases that keep-alive renewed meanwhile."""
        for lease, messages in self.leases:
            for message in messages:
                message._leave_transaction(lease)  # noqa: SLF001  # private to the package: not for handlers

    def abandon_leases(self) -> None:
        """The outcome is unknown: end the leases, so that the messages are neither held nor renewed."""
        for lease, _ in self.leases:
            lease.end(_UNKNOWN_OUTCOME)
        self.restore_leases()
        self.clear_leases()


def _lease_of(source: Lease, messages: list[Message], ends_at: float) -> Lease:
    """Return a lease like *source* that holds only *messages*."""
    held = {each.id.message_offset for each in messages}
    return dataclasses.replace(source, held=held, is_whole=False, ends_at=ends_at)


class ResultTransactions:
    """
    The transactions of one consumer.

    *confirm* is `Pipeline.confirm`.
    """

    def __init__(
        self,
        topics: QueueTopics,
        consumer_id: str,
        bootstrap_servers: str,
        extra: Mapping[str, str] | None,
        *,
        leases: LeaseTable,
        markers: MarkerProducer,
        confirm: Callable[[Mapping[int, int], float, Callable[[], None]], None],
        lease_s: float,
        timeout: float,
    ) -> None:
        # Together with the broker's scan it fits into the lease, if the lease is long enough.
        timeout_ms = max(SHORTEST_TIMEOUT_MS, min(LONGEST_TIMEOUT_MS, round(lease_s * 1000) - ABORT_SCAN_MS))
        self._markers_topic = topics.markers_topic
        self._leases = leases
        self._marker_producer = markers
        self._confirm = confirm
        self._consumer_id = consumer_id
        self._bootstrap_servers = bootstrap_servers
        self._partition_counts: dict[str, int] = {}
        self._options = SendOptions(bootstrap_servers, timeout, extra)
        self._timeout = timeout
        self._transaction_timeout_s = timeout_ms / 1000
        self._config = transactional_producer_config(
            bootstrap_servers,
            topics.consumer_transactional_id(consumer_id),
            consumer_id,
            extra,
            max_message_bytes=MAX_RECORD_BYTES,
            transaction_timeout_ms=timeout_ms,
        )
        # No linger: the commit flushes the whole transaction at once, so waiting for a fuller batch gains nothing.
        self._config["linger.ms"] = 0
        self._reader_config = reader_config(bootstrap_servers, topics.outcome_group, consumer_id, extra)
        # The first commit creates it.
        self._producer: TransactionalProducer | None = None
        self._fenced: FencedError | None = None
        # Commits run one after another. Several threads may have open blocks, because a block only records.
        self._committing = threading.Lock()
        self._thread = threading.local()

    @contextlib.contextmanager
    def block(self, check_usable: Callable[[], None]) -> Iterator[Transaction]:
        """Record the calls of the body, then commit them. An exception of the body discards them."""
        check_usable()
        if getattr(self._thread, "is_open", False):
            message = "a transaction is already open in this thread: got a second one; end the first block"
            raise UsageError(message)
        transaction = Transaction(self._check_topic, self._options)
        self._thread.is_open = True
        try:
            yield transaction
            transaction._end()  # noqa: SLF001  # not for handlers
            if transaction.results or transaction.messages:
                with self._committing:
                    check_usable()
                    self._commit(_Commit(transaction), list(transaction.messages.values()))
        finally:
            transaction._end()  # noqa: SLF001  # as above
            self._thread.is_open = False

    def close(self, timeout: float) -> None:
        """Wait for a running commit, at most *timeout* seconds, then close the producer."""
        if self._committing.acquire(timeout=timeout):
            try:
                self._drop_producer()
            finally:
                self._committing.release()

    def _check_topic(self, topic: str, partition: int) -> None:
        """Raise TopicError for what does not exist: librdkafka would wait for it half a minute."""
        if partition >= self._partition_counts.get(topic, 0):
            self._partition_counts[topic] = partition_count(
                self._marker_producer.client, topic, self._bootstrap_servers, self._timeout
            )
        count = self._partition_counts[topic]
        if partition >= count:
            message = f"cannot send a result: topic {topic!r} does not exist; create it, or correct its name"
            if count:
                message = (
                    f"cannot send a result: got partition {partition} of {topic!r}, 0 to {count - 1}; correct it, or "
                    "leave it out so that the key selects it"
                )
            raise TopicError(message)

    def _commit(self, commit: _Commit, messages: list[Message]) -> None:
        try:
            commit.take(messages, self._leases)
            positions = {partition: max(offsets) + 1 for partition, offsets in commit.offsets().items()}
            self._confirm(positions, self._timeout, commit.check_leases)
            self._run(commit)
        except KmqError as error:
            self._drop_producer()
            self._resolve(commit, error)
        except BaseException:
            # For example Ctrl+C: the outcome is not read from the log, which could block.
            self._drop_producer()
            (commit.abandon_leases if commit.is_committing else commit.restore_leases)()
            raise
        else:
            commit.clear_leases()

    def _run(self, commit: _Commit) -> None:
        if self._fenced is not None:
            raise self._fenced
        if self._producer is None or self._producer.has_ended:
            self._producer = TransactionalProducer(self._config, self._timeout, role="consumer")
        producer, markers = self._producer, list(self._markers(commit))

        def work() -> None:
            commit.begin()
            if commit.rejected is not None:
                raise _RejectedError
            commit.check_leases()
            for record in commit.results:
                self._send_result(producer, commit, record)
            for record in markers:
                producer.send(record, commit.note_marker)
            failpoint("consumer.tx-sent")

        def check() -> None:
            commit.check_leases()
            if not commit.is_placed:
                # Its place says whether a lease had run out and, if the commit has no answer, what became of it.
                message = (
                    f"cannot commit to {self._markers_topic}: the broker did not say the place of a marker, as after "
                    "an election; run the transaction again"
                )
                raise KafkaClientError(message, code="_NO_OFFSET", retriable=True)
            failpoint("consumer.tx-before-commit")
            commit.is_committing = True

        try:
            producer.run(work, [], None, check=check)
        except _RejectedError:
            raise self._rejection(commit) from None
        failpoint("consumer.tx-committed")

    def _send_result(self, producer: TransactionalProducer, commit: _Commit, record: OutgoingRecord) -> None:
        def check_rejection(error: KafkaError | None, _sent: KafkaMessage | None = None) -> None:
            if error is not None and commit.rejected is None and error.name() in REFUSED:
                commit.rejected = error
                commit.rejected_record = f"a result of {_size_of(record)} bytes for {record.topic!r}"

        try:
            producer.send(record, check_rejection)
        except KafkaException as error:
            check_rejection(error.args[0])
            raise

    def _markers(self, commit: _Commit) -> Iterator[OutgoingRecord]:
        """Yield the ENDs. Without one, a TICK: every transaction has a record that shows its outcome."""
        offsets = commit.offsets()
        for queue_partition, found in offsets.items():
            for ranges in cut_ranges(found):
                marker = Marker(MarkerType.END, queue_partition, ranges, consumer_id=self._consumer_id)
                yield OutgoingRecord(self._markers_topic, queue_partition, None, encode_marker(marker), [])
        if not offsets:
            yield OutgoingRecord(self._markers_topic, 0, None, encode_marker(Marker(MarkerType.TICK)), [])

    def _resolve(self, commit: _Commit, error: KmqError) -> None:
        """Find out whether the transaction was committed. Return if it was; raise if not, or if that is unknown."""
        is_written = self._is_written(commit, error) if commit.is_committing else False
        if isinstance(error, FencedError):
            self._record_fencing(commit, error)
        if is_written:
            logger.info("found a commit without a response in the log: it succeeded", extra={"action": "txn_found"})
            commit.clear_leases()
            return
        if is_written is None:
            commit.abandon_leases()
            message = (
                f"{error}; {_UNKNOWN_OUTCOME}: its messages are redelivered if it was not committed; do not retry "
                "them or their results"
            )
            raise TransactionError(message, code="_UNKNOWN_OUTCOME", nothing_written=False) from error
        commit.restore_leases()
        if isinstance(error, FencedError):
            if self._fenced is not None:
                raise self._fenced from error
            message = (
                f"the broker aborted a transaction of {self._consumer_id} after transaction.timeout.ms "
                f"({self._transaction_timeout_s:g} s); nothing was written, the messages are still held: open a new "
                "transaction"
            )
            raise TransactionError(message, code="_ABORTED", retriable=True, nothing_written=True) from error
        if isinstance(error, KafkaClientError) and not isinstance(error, TransactionError):
            message = f"{error}; nothing was written, the messages are still held"
            raise TransactionError(message, code=error.code, retriable=error.retriable, nothing_written=True) from error
        raise error

    def _is_written(self, commit: _Commit, error: KmqError) -> bool | None:
        """Read the outcome from the log; None if the log cannot be read in time."""
        if commit.written_at is None:
            return None
        try:
            if not isinstance(error, FencedError):
                # A new producer with this transactional id aborts the open transaction. If the producer was fenced,
                # another one does.
                self._producer = TransactionalProducer(self._config, self._timeout, role="consumer")
            return self._is_committed(*commit.written_at)
        except KmqError as failure:
            logger.warning("cannot read the outcome of a commit: %s", failure, extra={"action": "txn_unknown"})
            return None

    def _is_committed(self, partition: int, offset: int) -> bool:
        """
        Return whether a marker was committed: whether a reader of committed records that sees a later record sees it.

        The later record is our own. Its leader was the leader when it took it: one that was suspended and deposed may
        answer with a log that ends before the marker. An open transaction in between hides both records.
        """
        ends = {partition: self._own_record(partition)[0] + 1}
        below = read_committed(
            self._reader_config, self._markers_topic, [partition], self._timeout, starts={partition: offset}, ends=ends
        )
        # All are read to the own record: a replica that is behind may begin with the oldest ones.
        return any(record.offset() == offset for record in below)

    def _own_record(self, partition: int) -> tuple[int, int]:
        """Append a record that changes nothing; return its offset and its time, epoch milliseconds, broker clock."""
        return self._marker_producer.append_own([partition], self._timeout)[partition]

    def _record_fencing(self, commit: _Commit, error: FencedError) -> None:
        """Distinguish fencing by a consumer with the same id from a timed-out transaction; the error is the same."""
        took_s = now_s() - commit.began_at
        if took_s < self._transaction_timeout_s and commit.leases:
            # The clock of a suspended host may have stood still, the broker's went on.
            with contextlib.suppress(KmqError):
                _, now_ms = self._own_record(commit.leases[0][0].queue_partition)
                took_s = (now_ms - commit.began_at_ms) / 1000
        if took_s < self._transaction_timeout_s:
            message = (
                f"cannot commit a transaction as {self._consumer_id}: another consumer with this client.id has "
                f"fenced it ({error}); give each consumer its own client.id"
            )
            self._fenced = FencedError(message)

    @staticmethod
    def _rejection(commit: _Commit) -> TransactionError:
        error = commit.rejected
        assert error is not None
        message = (
            f"cannot commit a transaction: the broker rejected {commit.rejected_record}: {error.str()} "
            f"({error.name()}); nothing was written, the messages are still held: change the result, or the topic"
        )
        return TransactionError(message, code=error.name(), nothing_written=True)

    def _drop_producer(self) -> None:
        """Close the producer. The next one fences it, which aborts a transaction that it left open."""
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.close()
