"""
Write results and ENDs in one Kafka transaction: the results of a message appear if and only if the message is done.

Rule 1: an END takes effect if it was appended before the TICK that would redeliver its message. The time of its commit
does not matter, because the tracker reads no marker after the start of an open transaction. So one check is enough:
after the last delivery report and before the commit, no lease may have run out. What happens to this process later
changes nothing.
Rule 2: before a transaction, the group's coordinator has confirmed the offsets after its messages: no other consumer
fetches them again, so a result appears once. A consumer that has lost a partition without that gets LeaseLostError.
Rule 3: during a commit no thread can settle its messages. They are moved to leases of the transaction, which keep-alive
renews as usual. A renewal counts only if it was durable before the lease ended.
Rule 4: if a commit has no response, its outcome is read from the log. If the log cannot be read either, the messages
are no longer held: the tracker redelivers them if nothing was written, and never if the transaction was committed.

Source: KIP-98, KIP-447; docs/protocol.md, "Transactions of a consumer".
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, KafkaException, TopicPartition

from kmq_spark.consumer.transaction import KnownTopics, Transaction, size_of
from kmq_spark.core.markers import Marker, MarkerType
from kmq_spark.core.ranges import cut_ranges
from kmq_spark.errors import FencedError, KafkaClientError, KmqError, LeaseLostError, TransactionError, UsageError
from kmq_spark.failpoints import failpoint
from kmq_spark.kafka.client_errors import REFUSED
from kmq_spark.kafka.lookups import bounds_of
from kmq_spark.kafka.payloads import PayloadReader
from kmq_spark.kafka.records import OutgoingRecord
from kmq_spark.kafka.settings import make_client, reader_config, transactional_producer_config
from kmq_spark.kafka.transaction import TransactionalProducer
from kmq_spark.producer.options import SendOptions
from kmq_spark.wire.codec import encode_marker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from confluent_kafka import KafkaError, Producer
    from confluent_kafka import Message as KafkaMessage

    from kmq_spark.consumer.leases import Lease, LeaseTable
    from kmq_spark.consumer.message import Message
    from kmq_spark.kafka.queue_topics import QueueTopics

logger = logging.getLogger(__name__)

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

PAUSE_S = 0.1
"""Interval at which the end of a transaction is looked for."""

_UNKNOWN_OUTCOME = "the outcome of its transaction is unknown"
_NOT_CONFIRMED = "the group gave the partition to another consumer, which fetches the message again"


class _RejectedError(Exception):
    """The broker rejected a result, and would reject it again."""


class _Commit:
    """One transaction during its commit: its results, its leases, and its known state."""

    def __init__(self, transaction: Transaction) -> None:
        self.results = transaction.results
        self.leases: list[tuple[Lease, list[Message]]] = []
        self.written_at: tuple[str, int, int] | None = None
        self.rejected: KafkaError | None = None
        self.rejected_record = ""
        self.is_committing = False
        self.began_at = time.monotonic()

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
        now = time.monotonic()
        for lease, messages in self.leases:
            if lease.ends_at < now or lease.is_unconfirmed:
                why = _NOT_CONFIRMED if lease.is_unconfirmed else lease.end_reason or "the lease ran out"
                message = (
                    f"lease of {len(messages)} message(s) of queue partition {lease.queue_partition} was lost before "
                    f"the commit: {why}; nothing was written, raise the lease or use smaller transactions"
                )
                raise LeaseLostError(message)

    def positions(self) -> dict[int, int]:
        """Return the offset after the last message, by queue partition."""
        found: dict[int, int] = {}
        for lease, _ in self.leases:
            found[lease.queue_partition] = max(found.get(lease.queue_partition, 0), max(lease.held) + 1)
        return found

    def record_position(self, error: KafkaError | None, sent: KafkaMessage) -> None:
        """Store topic, partition and offset of a record of this transaction, from its delivery report."""
        if error is None:
            self.written_at = (sent.topic() or "", sent.partition() or 0, sent.offset() or 0)

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
        for lease, messages in self.leases:
            lease.end(_UNKNOWN_OUTCOME)
            lease.held.clear()
            for message in messages:
                message._leave_transaction(lease)  # noqa: SLF001  # private to the package: not for handlers


def _lease_of(source: Lease, messages: list[Message], ends_at: float) -> Lease:
    """Return a lease like *source* that holds only *messages*."""
    held = {each.id.message_offset for each in messages}
    return dataclasses.replace(source, held=held, is_whole=False, ends_at=ends_at)


class ResultTransactions:
    """
    The transactions of one consumer.

    *client* returns its producer of markers, for metadata requests. *confirm* is `Pipeline.confirm`.
    """

    def __init__(
        self,
        topics: QueueTopics,
        consumer_id: str,
        bootstrap_servers: str,
        extra: Mapping[str, str] | None,
        *,
        leases: LeaseTable,
        client: Callable[[], Producer],
        confirm: Callable[[Mapping[int, int], float, Callable[[], None]], None],
        lease_s: float,
        timeout: float,
    ) -> None:
        # With the broker's scan it fits into the lease, where that is long enough.
        timeout_ms = max(SHORTEST_TIMEOUT_MS, min(LONGEST_TIMEOUT_MS, round(lease_s * 1000) - ABORT_SCAN_MS))
        self._markers_topic = topics.markers_topic
        self._leases = leases
        self._confirm = confirm
        self._consumer_id = consumer_id
        self._known_topics = KnownTopics(client, bootstrap_servers, timeout)
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
        transaction = Transaction(self._known_topics, self._options)
        self._thread.is_open = True
        try:
            yield transaction
            transaction.end()
            if transaction.results or transaction.messages:
                with self._committing:
                    check_usable()
                    self._commit(_Commit(transaction), list(transaction.messages.values()))
        finally:
            transaction.end()
            self._thread.is_open = False

    def close(self, timeout: float) -> None:
        """Wait for a running commit, at most *timeout* seconds, then close the producer."""
        if self._committing.acquire(timeout=timeout):
            try:
                self._drop_producer()
            finally:
                self._committing.release()

    def _commit(self, commit: _Commit, messages: list[Message]) -> None:
        try:
            commit.take(messages, self._leases)
            self._confirm(commit.positions(), self._timeout, commit.check_leases)
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
        producer, ends = self._producer, list(self._ends(commit))

        def work() -> None:
            commit.is_committing, commit.written_at, commit.began_at = False, None, time.monotonic()
            if commit.rejected is not None:
                raise _RejectedError
            commit.check_leases()
            for record in commit.results:
                self._send_result(producer, commit, record)
            for record in ends:
                producer.send(record, commit.record_position)
            failpoint("consumer.tx-sent")

        def check() -> None:
            commit.check_leases()
            failpoint("consumer.tx-before-commit")
            commit.is_committing = True

        try:
            producer.run(work, [], None, check=check)
        except _RejectedError:
            raise self._rejection(commit) from None
        failpoint("consumer.tx-committed")

    def _send_result(self, producer: TransactionalProducer, commit: _Commit, record: OutgoingRecord) -> None:
        def on_delivery(error: KafkaError | None, sent: KafkaMessage) -> None:
            check_rejection(error)
            if not commit.leases:
                commit.record_position(error, sent)

        def check_rejection(error: KafkaError | None) -> None:
            if error is not None and commit.rejected is None and error.name() in REFUSED:
                commit.rejected = error
                commit.rejected_record = f"a result of {size_of(record)} bytes for {record.topic!r}"

        try:
            producer.send(record, on_delivery)
        except KafkaException as error:
            check_rejection(error.args[0])
            raise

    def _ends(self, commit: _Commit) -> Iterator[OutgoingRecord]:
        by_partition: dict[int, list[int]] = {}
        for lease, _ in commit.leases:
            by_partition.setdefault(lease.queue_partition, []).extend(lease.held)
        for queue_partition, offsets in by_partition.items():
            for ranges in cut_ranges(offsets):
                marker = Marker(MarkerType.END, queue_partition, ranges, consumer_id=self._consumer_id)
                yield OutgoingRecord(self._markers_topic, queue_partition, None, encode_marker(marker), [])

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
                # A new producer with this transactional id aborts the open transaction. If the producer was fenced, the
                # transaction has ended already.
                self._producer = TransactionalProducer(self._config, self._timeout, role="consumer")
            return is_committed(self._reader_config, *commit.written_at, self._timeout)
        except KmqError as failure:
            logger.warning("cannot read the outcome of a commit: %s", failure, extra={"action": "txn_unknown"})
            return None

    def _record_fencing(self, commit: _Commit, error: FencedError) -> None:
        """Distinguish fencing by a consumer with the same id from a timed-out transaction; the error is the same."""
        if time.monotonic() - commit.began_at < self._transaction_timeout_s:
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


def is_committed(config: Mapping[str, Any], topic: str, partition: int, offset: int, timeout: float) -> bool:
    """
    Read from the log whether a transaction was committed: whether a `read_committed` consumer returns its record.

    There is no result before the transaction has ended on the broker. Such a consumer waits at every open transaction,
    also at those of other producers.
    Raises KafkaClientError where it does not end within *timeout* seconds.
    """
    _wait_until_stable(config, TopicPartition(topic, partition), offset, timeout)
    reader = PayloadReader(config, topic, timeout)
    try:
        return any(payload.message is not None for payload in reader.read({partition: [offset]}))
    finally:
        reader.close()


def _wait_until_stable(config: Mapping[str, Any], place: TopicPartition, offset: int, timeout_s: float) -> None:
    """Wait until all transactions up to *offset* have ended: until the last stable offset is greater than *offset*."""
    deadline_s = time.monotonic() + timeout_s
    consumer = make_client(Consumer, dict(config))
    try:
        while bounds_of(consumer, place, timeout_s).end <= offset:
            if time.monotonic() > deadline_s:
                message = (
                    f"cannot read {place.topic}[{place.partition}]@{offset}: a transaction before it has been open for "
                    f"{timeout_s:g} s; check the broker"
                )
                raise KafkaClientError(message, code="_TIMED_OUT", retriable=True)
            time.sleep(PAUSE_S)
    finally:
        consumer.close()
