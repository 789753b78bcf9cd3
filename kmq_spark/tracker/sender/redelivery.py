"""
Carry out the tracker's decisions exactly once: messages, dead letters, ENDs and offsets in one Kafka transaction.

Rule 1: the record that a decision causes and its END commit together or not at all.
Rule 2: only decisions of the newest term of this tracker are sent. A term begins with a new producer, which ends every
older transaction, and a TERM in every markers partition. Whatever older terms committed lies below it.
Rule 3: a transaction that the producer has certainly aborted is tried again. After any other failure a new term begins,
and the fold decides anew what is still due. No outcome is looked up.

Source: KIP-98, KIP-447 (consume-process-produce); docs/internals/design.md, "The argument".
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING, Any

from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from kmq_spark.core.markers import Marker, MarkerType
from kmq_spark.errors import FencedError, KafkaClientError, KmqError
from kmq_spark.failpoints import failpoint
from kmq_spark.kafka.payloads import PayloadReader
from kmq_spark.kafka.positions import NO_ANSWER, ResumePoint, TrackerPositions
from kmq_spark.kafka.records import OutgoingRecord, RejectedRecords
from kmq_spark.kafka.settings import (
    admin_config,
    make_client,
    new_client_id,
    reader_config,
    transactional_producer_config,
)
from kmq_spark.kafka.transaction import TransactionalProducer
from kmq_spark.pauses import RateLimit
from kmq_spark.tracker.sender.attempts import Attempt
from kmq_spark.tracker.sender.due_decisions import DueDecisions, in_chunks
from kmq_spark.tracker.sender.limits import SenderLimits
from kmq_spark.tracker.sender.positions import SenderPositions
from kmq_spark.tracker.sender.read_ahead import one_ahead
from kmq_spark.tracker.sender.rules import TrackerRules
from kmq_spark.tracker.sender.sent import Sent
from kmq_spark.tracker.sender.traces import trace_sent
from kmq_spark.wire.codec import encode_marker

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from kmq_spark.core.outcome import PartitionOutcome
    from kmq_spark.core.policy import QueueRules
    from kmq_spark.kafka.positions import LogBeginning
    from kmq_spark.kafka.queue_rules import RulesReader
    from kmq_spark.kafka.topics import QueueLayout
    from kmq_spark.tracker.sender.due_decisions import DueRun

logger = logging.getLogger(__name__)

LARGEST_RECORD = 1_000_000_000
"""The broker limits the size of a record, not the client: this is librdkafka's upper bound of `message.max.bytes`."""

LINGER_MS = 5

UNREADABLE_LOG_INTERVAL_S = 60.0

FENCED_WAIT_S = 2.0
"""
How long a fenced tracker reads on for the TERM of a newer one. Without one it looks who committed last. If that was
itself, the broker gave its transaction up, as it does after a suspension, and it begins a new term.
"""

MOST_FAILED_TERMS = 5
"""So many terms in a row in which no decision was carried out are an error of the query, which backs off."""

OPEN_ATTEMPTS = 3
"""How often a starting tracker begins its first term if an older one fences it meanwhile."""


class RedeliverySender:
    """
    Carries out the tracker's decisions for one queue, under one transactional id.

    Attributes:
        tracker_id: Id of this tracker; its TERMs and the metadata of the group's offsets contain it.
        committed_at_epoch_s: Time of the last offset commit, epoch seconds, this host's clock; 0 before the first.
    """

    def __init__(
        self,
        layout: QueueLayout,
        *,
        bootstrap_servers: str,
        extra: Mapping[str, str] | None = None,
        limits: SenderLimits | None = None,
        rules_reader: RulesReader,
    ) -> None:
        self.topics = layout.topics
        self._dead_letter_count = layout.dead_letter_partition_count
        self._partitions = range(layout.partition_count)
        self._limits = limits or SenderLimits()
        self.tracker_id = new_client_id("tracker")
        self.term = 0
        self._unread = set(self._partitions)  # partitions in which the fold has not read the TERM of the newest term
        self._fenced_at_s: float | None = None
        self._given_up: FencedError | None = None
        self._failed_terms = 0
        self._rules = TrackerRules(layout.topics, rules_reader)
        reading = reader_config(bootstrap_servers, layout.topics.tracker_group, self.tracker_id, extra)
        self._payloads = PayloadReader(reading, layout.topics.queue_topic, self._limits.timeout)
        self._unreadable_limit = RateLimit(UNREADABLE_LOG_INTERVAL_S)
        admin = make_client(AdminClient, admin_config(bootstrap_servers, self.tracker_id, extra))
        self._tracker_positions = TrackerPositions(
            reading, admin, layout.topics, layout.partition_count, self._limits.timeout
        )
        self._config = self._producer_config(layout, bootstrap_servers, extra)
        self._producer: TransactionalProducer | None = None
        self._positions = SenderPositions(self.tracker_id)
        self._is_stopping = False
        self.snapshot_lag = 0
        self.trouble = ""
        self._committed_at_s = 0.0
        self.committed_at_epoch_s = 0.0
        self._lock = threading.Lock()  # two threads use this object (batches, periodic work); one transaction at a time

    def _producer_config(
        self, layout: QueueLayout, bootstrap_servers: str, extra: Mapping[str, str] | None
    ) -> dict[str, Any]:
        config = transactional_producer_config(
            bootstrap_servers,
            layout.topics.tracker_group,
            self.tracker_id,
            extra,
            max_message_bytes=LARGEST_RECORD,
            transaction_timeout_ms=round(1000 * self._limits.transaction_timeout),
        )
        # A produce batch costs the broker about the same, however full it is. Without lingering, many leases that end
        # at once cause tens of thousands of batches. A single message waits that long too, which is about a hundredth
        # of its lateness.
        config["linger.ms"] = LINGER_MS
        # The broker compares a whole batch with the topic's `max.message.bytes`, and rejects the whole batch.
        config["batch.size"] = min(1_000_000, layout.max_message_bytes or 1_000_000)
        return config

    @property
    def unread(self) -> frozenset[int]:
        """Markers partitions whose newest TERM of this tracker is not read yet. The tracker is ready without any."""
        return frozenset(self._unread)

    @property
    def is_fenced(self) -> bool:
        """Whether a transaction was refused as that of an older tracker, and no new term has begun since."""
        return self._fenced_at_s is not None

    def open(self, own_ids: Collection[str] = ()) -> ResumePoint:
        """Take over the queue: begin the first term, and read where to begin."""
        with self._lock:
            if own_ids and (newer := self._newest_other_than(own_ids)):
                raise self._given_up_to(newer)
            # What the fencing cannot change is read beside it: redelivery is away until the first batch.
            with ThreadPoolExecutor(1, "kmq-open") as pool:
                beginning = pool.submit(self._tracker_positions.beginning)
                self._replace_producer()
            resume = self._resume_point(beginning.result())
            failpoint("tracker.positions-read")
            self._positions.load(resume)
            self._rules.read_first(resume.rules.values())
            for left in reversed(range(OPEN_ATTEMPTS)):
                try:
                    self._write_term()
                    break
                except FencedError:
                    # An older tracker has begun another term. It ends as soon as it reads ours.
                    if not left:
                        raise
                    self._replace_producer()
            return resume

    def deliver(self, outcomes: Sequence[PartitionOutcome]) -> Sent:
        """Carry out the decisions of a batch that are of the newest term of this tracker."""
        with self._lock:
            self._note(outcomes)
            self._follow_terms(outcomes)
            sent = Sent()
            self._guarded(lambda: self._deliver([each for each in outcomes if each.status.term == self.term], sent))
            if sent.nonexistent:
                logger.warning(
                    "%d messages of %s ended as expired: their markers name offsets that the queue topic does not "
                    "have; find the client that writes them, or check whether the topic was deleted and created again",
                    sent.nonexistent, self.topics,
                    extra={"action": "nonexistent_messages", "queue": str(self.topics)},
                )  # fmt: skip
            return sent

    def tend(self, read_to: Mapping[int, int]) -> None:
        """
        Do what must not wait for a batch: write changed rules, and commit positions if that is due, as a heartbeat.

        The position of a partition is not advanced before a batch has reported on it: only a batch says which markers
        are still needed.
        """
        changed = self._rules.changed()
        with self._lock:
            if changed is not None:
                self._guarded(lambda: self._write_rules(changed))
            if self._is_commit_due():
                self._positions.advance_idle(read_to)
                # Also without a change: this is the heartbeat, and Kafka deletes offsets that are not committed for a
                # week.
                self._guarded(lambda: self._transact(positions=list(self._positions.current)))

    def check_queue_topic(self) -> None:
        """Raise TopicError if the queue topic was deleted and created again since the tracker began."""
        self._tracker_positions.check_queue_id(self._positions.queue_id, self._tracker_positions.queue_id())

    def close(self, *, is_stopped: bool = False) -> None:
        """
        Commit the positions and close the clients.

        If the commit fails, nothing is lost: the next tracker reads more of the log again.
        """
        with self._lock:
            try:
                self._is_stopping = is_stopped
                if self.term and self._producer is not None and (is_stopped or self._positions.is_changed):
                    self._transact(positions=list(self._positions.current))
            except FencedError:
                pass  # the newer tracker commits the positions
            except KmqError as error:
                logger.warning(
                    "cannot commit the offsets of the tracker of %s: %s; the next tracker reads more markers again",
                    self.topics.queue, error,
                )  # fmt: skip
            finally:
                self._close_producer()
                for client in (self._payloads, self._tracker_positions, self._rules):
                    client.close()

    def _newest_other_than(self, own_ids: Collection[str]) -> str:
        """
        Return the id of another tracker that committed the group's offsets last; empty where this one did.

        An old answer costs a take-over in turn, and nothing else.
        """
        newer = {at.tracker_id for at in self._tracker_positions.committed().values()}.difference(own_ids, {""})
        return min(newer, default="")

    def _resume_point(self, beginning: LogBeginning) -> ResumePoint:
        try:
            return self._tracker_positions.resume_point(beginning)
        except KafkaClientError as error:
            if error.code != NO_ANSWER:
                raise
            self._discard_pending_offsets()
            return self._tracker_positions.resume_point(beginning)

    def _discard_pending_offsets(self) -> None:
        """
        Discard offsets that the broker keeps as pending (KIP-890): add offsets to a transaction and abort it.

        The broker then also discards the pending offsets of earlier transactions of this transactional id.
        """
        logger.warning(
            "cannot read the committed offsets of the tracker of %s: possibly the broker keeps offsets of an aborted "
            "transaction as pending; discarding these and reading again",
            self.topics, extra={"action": "pending_offsets", "queue": str(self.topics)},
        )  # fmt: skip
        places = [TopicPartition(self.topics.markers_topic, 0, 0)]
        with contextlib.suppress(_DiscardedError):
            self._open_producer().run(lambda: None, places, self._tracker_positions.group_metadata(), check=_discard)

    def _open_producer(self) -> TransactionalProducer:
        if self._producer is None:
            # Retriable: another thread has failed to replace it, and its error restarts the query.
            raise KafkaClientError(
                f"the tracker of {self.topics} has no producer: the last one could not be replaced; check the broker",
                code="_FAIL",
                retriable=True,
            )
        return self._producer

    def _close_producer(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.close()

    def _replace_producer(self) -> None:
        """Create a producer: from here on no older transaction can be committed."""
        self._close_producer()
        self._producer = TransactionalProducer(self._config, self._limits.timeout)

    def _write_term(self) -> None:
        """Write a TERM with a fresh number to every markers partition, with the rules and the positions."""
        term = secrets.randbits(62) + 1
        marker = Marker(MarkerType.TERM, consumer_id=self.tracker_id, term=term)
        records = self._rules_records(self._rules.written)
        records += [self._marker_record(partition, marker) for partition in self._partitions]
        self._transact(records=records, positions=list(self._positions.current))
        self.term, self._unread, self._fenced_at_s = term, set(self._partitions), None
        logger.info(
            "tracker %s of %s begins term %d", self.tracker_id, self.topics, term,
            extra={"action": "term", "queue": str(self.topics)},
        )  # fmt: skip
        failpoint("tracker.term-begun")

    def _begin_again(self, why: object) -> None:
        """Begin a new term with a new producer, whatever became of the last transaction."""
        logger.warning(
            "tracker %s of %s begins a new term and decides anew: %s", self.tracker_id, self.topics, why,
            extra={"action": "term_again", "queue": str(self.topics)},
        )  # fmt: skip
        self._failed_terms += 1
        if self._failed_terms > MOST_FAILED_TERMS:
            raise KafkaClientError(
                f"the tracker of {self.topics} cannot carry out its decisions: got {why} in {MOST_FAILED_TERMS} terms "
                "in a row; check the broker",
                code="_FAIL",
                retriable=True,
            )
        try:
            self._replace_producer()
            # Again: this process may have stood still since the last look.
            if not (newer := self._newest_other_than((self.tracker_id,))):
                self._write_term()
        except FencedError:
            self._fenced_at_s = time.monotonic()
            return
        if newer:
            raise self._given_up_to(newer)

    def _guarded(self, transact: Callable[[], None]) -> None:
        """Run transactions of the present term. If one was not certainly committed, begin a new term."""
        if self._given_up is not None:
            raise self._given_up
        try:
            if self._fenced_at_s is None:
                transact()
                return
        except FencedError as error:
            logger.warning("tracker %s of %s reads on: %s", self.tracker_id, self.topics, error)
            self._fenced_at_s = time.monotonic()
            return
        except KafkaClientError as error:
            if not error.retriable:
                raise
            self._begin_again(error)
            return
        if time.monotonic() - self._fenced_at_s > FENCED_WAIT_S:
            if newer := self._newest_other_than((self.tracker_id,)):
                raise self._given_up_to(newer)
            self._begin_again("the broker gave its transaction up")

    def _follow_terms(self, outcomes: Sequence[PartitionOutcome]) -> None:
        """Note where this tracker's TERM is read. Raise `FencedError` if the TERM of another one lies above it."""
        for outcome in outcomes:
            partition, status = outcome.marker_partition, outcome.status
            if partition >= len(self._partitions):
                # The topic has more partitions than before: no TICK decides in a partition without a TERM.
                self._partitions = range(partition + 1)
                self._begin_again(f"{self.topics.markers_topic} has a new partition {partition}")
            elif status.term == self.term:
                self._unread.discard(partition)
            elif partition not in self._unread:
                if status.term_by != self.tracker_id:
                    raise self._given_up_to(status.term_by)
                self._begin_again(f"an old TERM stands in {self.topics.markers_topic}[{partition}] again")

    def _given_up_to(self, newer: str) -> FencedError:
        """Return the error with which this tracker ends. From here on it writes nothing, its positions neither."""
        self._close_producer()
        self._given_up = FencedError(
            f"tracker {self.tracker_id} of {self.topics} was fenced: newer tracker {newer} has taken over; this one "
            "ends"
        )
        return self._given_up

    def _deliver(self, outcomes: Sequence[PartitionOutcome], sent: Sent) -> None:
        decisions = DueDecisions(outcomes)
        left = len(decisions)
        # While one chunk commits, another thread reads the payloads of the next one. Kafka's clients read and write in
        # threads of their own.
        with closing(one_ahead(in_chunks(self._due_runs(decisions), self._limits))) as chunks:
            for chunk in chunks:
                left -= sum(len(run.messages) for run in chunk)
                positions = list(self._positions.current) if not left else []
                self._transact(chunk, positions=positions, sent=sent)
                failpoint("tracker.chunk-committed")
        if left:
            raise KmqError(f"{left} decisions of {self.topics} were not carried out: this is a bug")
        if self._is_commit_due():
            self._transact(positions=list(self._positions.current))

    def _is_commit_due(self) -> bool:
        return time.monotonic() - self._committed_at_s > self._limits.commit_interval

    def _note(self, outcomes: Sequence[PartitionOutcome]) -> None:
        for outcome in outcomes:
            self._positions.update(outcome)
            if outcome.unreadable and self._unreadable_limit.allows():
                logger.warning(
                    "records of %s are not markers and are ignored: %s; find their writer: only kmq-spark and "
                    "kafka-mq-go may write to this topic",
                    self.topics.markers_topic, "; ".join(outcome.unreadable),
                    extra={"action": "unreadable_markers", "queue": str(self.topics)},
                )  # fmt: skip

    def _due_runs(self, decisions: DueDecisions) -> Iterator[DueRun]:
        """Read the payloads of all decisions, and yield both."""
        if len(decisions):
            for payloads in self._payloads.read_slices(decisions.message_offsets()):
                yield from decisions.with_payloads(payloads)

    def _write_rules(self, rules: QueueRules) -> None:
        self._transact(records=self._rules_records(rules))
        self._rules.written = rules

    def _rules_records(self, rules: QueueRules) -> list[OutgoingRecord]:
        if not rules.version:
            return []
        marker = Marker(MarkerType.RULES, consumer_id=self.tracker_id, rules=rules)
        return [self._marker_record(partition, marker) for partition in self._partitions]

    def _marker_record(self, marker_partition: int, marker: Marker) -> OutgoingRecord:
        return OutgoingRecord(self.topics.markers_topic, marker_partition, None, encode_marker(marker), [])

    def _transact(
        self,
        runs: Sequence[DueRun] = (),
        *,
        records: Sequence[OutgoingRecord] = (),
        positions: Sequence[int] = (),
        sent: Sent | None = None,
    ) -> None:
        """Send what runs need with their ENDs, other records, and positions of partitions, in one transaction."""
        producer = self._open_producer()
        rejected_records = RejectedRecords()
        attempts: list[Attempt] = []

        def work() -> None:
            attempt = Attempt(
                runs, rejected_records, self.topics, self._rules.written, self._dead_letter_count,
                is_first=not attempts and not self._failed_terms,
            )  # fmt: skip
            attempts.append(attempt)
            producer.send_all(attempt.records())
            for record in (*records, *attempt.ends.records(self.topics, self.tracker_id, self.term)):
                producer.send(record)
                failpoint("tracker.end-sent")

        committing = {partition: self._positions.current[partition] for partition in positions}
        places = [
            at.to_topic_partition(
                self.topics.markers_topic,
                partition,
                self._positions.heartbeat(
                    partition,
                    is_stopped=self._is_stopping,
                    snapshot_lag=self.snapshot_lag,
                    trouble=self.trouble,
                ),
            )
            for partition, at in committing.items()
        ]
        # Only if there are offsets to commit: the call needs a round trip to another thread of the client.
        group = self._tracker_positions.group_metadata() if places else None
        since_ns = time.time_ns()
        producer.run(work, places, group, lambda: rejected_records.total_count)
        if committing:
            self._positions.note_committed(committing)
            self._committed_at_s, self.committed_at_epoch_s = time.monotonic(), time.time()
        if runs:
            self._failed_terms = 0
            trace_sent(attempts[-1].ends.decided, self.topics, since_ns)
        if sent is not None:
            sent.add(attempts[-1])


class _DiscardedError(Exception):
    """Aborts a transaction on purpose."""


def _discard() -> None:
    raise _DiscardedError
