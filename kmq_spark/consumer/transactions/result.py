"""
Write results and ENDs in one Kafka transaction: a message's results appear if and only if it is done.

Rule 1: an END counts if it was appended before the TICK that would have its message redelivered, whenever it is
committed: the tracker reads no marker behind an open transaction. So it is enough to know, between the last delivery
report and the commit, that no lease has run out; what happens to this process after that changes nothing.
Rule 2: during a commit its messages are in nobody's hands: moved to leases of the transaction's own, which are kept
alive as others are. A renewal counts only if it was durable before the lease ended.
Rule 3: a commit without an answer is looked up in the log. Where that cannot be read either, the messages are let go:
redelivered if nothing was written, never if it was.
Rule 4: commits are serialised; blocks of several threads may be open at once, since they only record.

Source: KIP-98, KIP-447; docs/protocol.md, "Transactions of a consumer".
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaException

from kmq_spark.consumer.transactions.outcome import is_committed
from kmq_spark.consumer.transactions.record import KnownTopics, Transaction, size_of
from kmq_spark.core.markers import Marker, MarkerType
from kmq_spark.errors import FencedError, KafkaClientError, KmqError, LeaseLostError, TransactionError, UsageError
from kmq_spark.failpoints import failpoint
from kmq_spark.kafka.marker_ranges import cut_ranges
from kmq_spark.kafka.records import OutgoingRecord
from kmq_spark.kafka.settings import reader_config, transactional_producer_config
from kmq_spark.kafka.transaction import TransactionalProducer
from kmq_spark.producer.retention import KnownRetentions
from kmq_spark.wire.codec import encode_marker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from confluent_kafka import KafkaError
    from confluent_kafka import Message as KafkaMessage

    from kmq_spark.consumer.leases import Lease, LeaseTable
    from kmq_spark.consumer.markers.producer import MarkerProducer
    from kmq_spark.consumer.message import Message
    from kmq_spark.kafka.queue_topics import QueueTopics

logger = logging.getLogger(__name__)

LARGEST_RECORD = 1_000_000_000
"""Each result topic has its own limit, so the broker decides what is too large, not our client."""

ABORT_SCAN_MS = 10_000
"""How often the broker looks for transactions that have run out. Kafka's default."""

SHORTEST_TIMEOUT_MS, LONGEST_TIMEOUT_MS = 5_000, 10_000
"""A transaction is open for milliseconds; what dies in one holds up the readers of its markers partitions until the
broker aborts it. So its time-out is short, and fits with the broker's scan into a lease of 15 s or more."""

_UNKNOWN = "the outcome of its transaction is unknown"


class _RefusedError(Exception):
    """The broker refuses a result, and would again."""


class _Commit:
    """One transaction on its way: what it holds, and what is known of it."""

    def __init__(self, transaction: Transaction) -> None:
        self.results = transaction.results
        self.leases: list[tuple[Lease, list[Message]]] = []
        self.written_at: tuple[str, int, int] | None = None
        self.refused: KafkaError | None = None
        self.refused_what = ""
        self.is_committing = False
        self.began_at = time.monotonic()

    def take(self, messages: list[Message], table: LeaseTable) -> None:
        """Move messages to leases of our own; on an error those taken so far have been given back."""
        taken: dict[int, tuple[Lease, float, list[Message]]] = {}
        try:
            for message in messages:
                lease, ends_at = message._enter_transaction()  # noqa: SLF001  # private to the package: not for handlers
                source, least, found = taken.setdefault(id(lease), (lease, ends_at, []))
                found.append(message)
                taken[id(lease)] = (source, min(least, ends_at), found)
        finally:
            self.leases = [
                (dataclasses.replace(lease, held={each.id.message_offset for each in found}, expires_at=ends_at), found)
                for lease, ends_at, found in taken.values()
            ]
            table.open([lease for lease, _ in self.leases])

    def check_leases(self) -> None:
        """Raise where a lease has ended: its message may be, or become, somebody else's."""
        now = time.monotonic()
        for lease, messages in self.leases:
            if lease.expires_at < now:
                why = lease.fate or "the lease ran out"
                message = (
                    f"lease of {len(messages)} message(s) of queue partition {lease.queue_partition} was lost before "
                    f"the commit: {why}; nothing was written, raise lease_ms or use smaller transactions"
                )
                raise LeaseLostError(message)

    def note_written(self, error: KafkaError | None, sent: KafkaMessage) -> None:
        """Keep where a record of this transaction lies."""
        if error is None:
            self.written_at = (sent.topic() or "", sent.partition() or 0, sent.offset() or 0)

    def settle(self) -> None:
        """All is written."""
        for lease, _ in self.leases:
            lease.held.clear()

    def restore(self) -> None:
        """Nothing is written: the messages are held as before, under the leases that were kept alive meanwhile."""
        for lease, messages in self.leases:
            for message in messages:
                message._leave_transaction(lease)  # noqa: SLF001  # private to the package: not for handlers

    def let_go(self) -> None:
        """Nobody knows: hold the messages no more, and renew them no more."""
        for lease, messages in self.leases:
            lease.end(_UNKNOWN)
            lease.held.clear()
            for message in messages:
                message._leave_transaction(lease)  # noqa: SLF001  # private to the package: not for handlers


class ResultTransactions:
    """
    The transactions of one consumer.

    Args:
        topics: Names of the consumer's queue.
        consumer_id: Told in the ENDs, and part of the transactional id.
        bootstrap_servers: Comma-separated `host:port`.
        extra: librdkafka settings.
        leases: The consumer's leases.
        markers: The consumer's producer of markers, asked for metadata.
        lease_ms: Length of a lease.
        timeout_ms: Bound on each call to the broker.
    """

    def __init__(  # noqa: PLR0917  # whose transactions they are, and where
        self,
        topics: QueueTopics,
        consumer_id: str,
        bootstrap_servers: str,
        extra: Mapping[str, str] | None,
        leases: LeaseTable,
        markers: MarkerProducer,
        lease_ms: int,
        timeout_ms: int,
    ) -> None:
        """Prepare; the producer is made by the first commit."""
        self._markers_topic = topics.markers_topic
        self._leases = leases
        self._consumer_id = consumer_id
        self._known_topics = KnownTopics(lambda: markers.client, bootstrap_servers, timeout_ms)
        self._retentions = KnownRetentions(bootstrap_servers, extra, timeout_ms)
        self._timeout_ms = timeout_ms
        self._transaction_timeout_s = transaction_timeout_ms(lease_ms) / 1000
        self._config = transactional_config(
            bootstrap_servers, topics.consumer_transactional_id(consumer_id), consumer_id, extra, lease_ms
        )
        self._reading = reader_config(bootstrap_servers, topics.outcome_group, consumer_id, extra)
        self._producer: TransactionalProducer | None = None
        self._fenced: FencedError | None = None
        self._committing = threading.Lock()
        self._thread = threading.local()

    @contextlib.contextmanager
    def block(self, check_usable: Callable[[], None]) -> Iterator[Transaction]:
        """
        Record what the body does, then commit it; an exception of the body drops it all.

        Args:
            check_usable: Raises where the consumer is closed or belongs to another process.

        Raises:
            KmqError: As `QueueConsumer.transaction`.
        """
        check_usable()
        if getattr(self._thread, "is_open", False):
            message = "a transaction is open in this thread: got a second one; end its block first"
            raise UsageError(message)
        transaction = Transaction(self._known_topics, self._retentions)
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
        """Wait for a commit that is under way, at most *timeout* seconds, and give up the producer."""
        if self._committing.acquire(timeout=timeout):
            try:
                self._drop_producer()
            finally:
                self._committing.release()

    def after_fork(self) -> tuple[object, ...]:
        """Return the client that a child process must leave alone."""
        return () if self._producer is None else (self._producer.client,)

    def _commit(self, commit: _Commit, messages: list[Message]) -> None:
        try:
            commit.take(messages, self._leases)
            self._run(commit)
        except KmqError as error:
            self._drop_producer()
            self._resolve(commit, error)
        except BaseException:
            # Ctrl+C, for one: nobody looks into the log now.
            self._drop_producer()
            (commit.let_go if commit.is_committing else commit.restore)()
            raise
        else:
            commit.settle()

    def _run(self, commit: _Commit) -> None:
        if self._fenced is not None:
            raise self._fenced
        if self._producer is None or self._producer.is_over:
            self._producer = TransactionalProducer(self._config, self._timeout_ms, role="consumer")
        producer, ends = self._producer, list(self._ends(commit))

        def work() -> None:
            commit.is_committing, commit.written_at, commit.began_at = False, None, time.monotonic()
            if commit.refused is not None:
                raise _RefusedError
            commit.check_leases()
            for record in commit.results:
                self._send_result(producer, commit, record)
            for record in ends:
                producer.send(record, commit.note_written)
            failpoint("consumer.tx-sent")

        def check() -> None:
            commit.check_leases()
            failpoint("consumer.tx-before-commit")
            commit.is_committing = True

        try:
            producer.run(work, [], None, check=check)
        except _RefusedError:
            raise self._refusal(commit) from None
        failpoint("consumer.tx-committed")

    def _send_result(self, producer: TransactionalProducer, commit: _Commit, record: OutgoingRecord) -> None:
        def on_delivery(error: KafkaError | None, sent: KafkaMessage) -> None:
            note(error)
            if not commit.leases:
                commit.note_written(error, sent)

        def note(error: KafkaError | None) -> None:
            if error is not None and commit.refused is None and error.name() in _REFUSALS:
                commit.refused = error
                commit.refused_what = f"a result of {size_of(record)} bytes for {record.topic!r}"

        try:
            producer.send(record, on_delivery)
        except KafkaException as error:
            note(error.args[0])
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
        """Find out what was written; return where it was all, raise where it was nothing or nobody knows."""
        is_written = self._is_written(commit, error) if commit.is_committing else False
        if isinstance(error, FencedError):
            self._note_fenced(commit, error)
        if is_written:
            logger.info("a commit without an answer was found in the log", extra={"action": "txn_found"})
            commit.settle()
            return
        if is_written is None:
            commit.let_go()
            message = (
                f"{error}; {_UNKNOWN}: its messages are redelivered if it was not committed; do not retry them or "
                "their results"
            )
            raise TransactionError(message, code="_UNKNOWN_OUTCOME", nothing_written=False) from error
        commit.restore()
        if isinstance(error, FencedError):
            if self._fenced is not None:
                raise self._fenced from error
            message = (
                f"the broker gave up a transaction of {self._consumer_id} after {self._transaction_timeout_s:g} s; "
                "nothing was written, the messages are held: open a new transaction"
            )
            raise TransactionError(message, code="_ABORTED", retriable=True, nothing_written=True) from error
        if isinstance(error, KafkaClientError) and not isinstance(error, TransactionError):
            message = f"{error}; nothing was written, the messages are held as before"
            raise TransactionError(message, code=error.code, retriable=error.retriable, nothing_written=True) from error
        raise error

    def _is_written(self, commit: _Commit, error: KmqError) -> bool | None:
        """Ask the log; None where it does not answer in time."""
        if commit.written_at is None:
            return None
        try:
            if not isinstance(error, FencedError):
                # Ends what is open under our name on the broker. A producer that was fenced is ended already.
                self._producer = TransactionalProducer(self._config, self._timeout_ms, role="consumer")
            return is_committed(self._reading, *commit.written_at, self._timeout_ms)
        except KmqError as failure:
            logger.warning("cannot find out what became of a commit: %s", failure, extra={"action": "txn_unknown"})
            return None

    def _note_fenced(self, commit: _Commit, error: FencedError) -> None:
        """Tell another consumer of our name from a broker that gave up a transaction, which looks the same."""
        if time.monotonic() - commit.began_at < self._transaction_timeout_s:
            message = (
                f"cannot commit a transaction as {self._consumer_id}: another consumer of this consumer_id has taken "
                f"over ({error}); give each consumer its own"
            )
            self._fenced = FencedError(message)

    @staticmethod
    def _refusal(commit: _Commit) -> TransactionError:
        error = commit.refused
        assert error is not None
        message = (
            f"cannot commit a transaction: the broker refuses {commit.refused_what}: {error.str()} ({error.name()}); "
            "nothing was written, the messages are held: send something else, or correct the topic"
        )
        return TransactionError(message, code=error.name(), nothing_written=True)

    def _drop_producer(self) -> None:
        """Give up the producer: the next one fences it, which ends whatever it left open."""
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.close()


_REFUSALS = frozenset(
    {"MSG_SIZE_TOO_LARGE", "INVALID_MSG", "INVALID_RECORD", "INVALID_TIMESTAMP", "TOPIC_AUTHORIZATION_FAILED",
     "POLICY_VIOLATION", "_UNKNOWN_TOPIC", "_UNKNOWN_PARTITION", "UNKNOWN_TOPIC_OR_PART"}
)  # fmt: skip
"""What the broker would say again."""


def transaction_timeout_ms(lease_ms: int) -> int:
    """Return the `transaction.timeout.ms` of a consumer with such leases."""
    return max(SHORTEST_TIMEOUT_MS, min(LONGEST_TIMEOUT_MS, lease_ms - ABORT_SCAN_MS))


def transactional_config(
    bootstrap_servers: str, transactional_id: str, consumer_id: str, extra: Mapping[str, str] | None, lease_ms: int
) -> dict[str, Any]:
    """Return the settings of a consumer's transactional producer."""
    config = transactional_producer_config(
        bootstrap_servers,
        transactional_id,
        consumer_id,
        extra,
        max_message_bytes=LARGEST_RECORD,
        transaction_timeout_ms=transaction_timeout_ms(lease_ms),
    )
    # A transaction is flushed as a whole: waiting for a fuller batch would only be waiting.
    return {**config, "linger.ms": 0}
