"""
Carry out the tracker's decisions exactly once: messages, dead letters, ENDs and offsets in one Kafka transaction.

Rule 1: The record that a decision causes and its END commit together or not at all. So the markers topic states what is
done. A tracker that has read it to its end (`ResumePoint.decide_from`) sends nothing twice, whatever crashed before.
Rule 2: A batch with many decisions is sent in several transactions. The last one contains the offsets.
Rule 3: No message is lost without notice: a message that cannot be redelivered becomes a dead letter with the reason.

Source: KIP-98, KIP-447 (consume-process-produce); docs/design.md explains why this is correct.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING, Any

from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from kmq_spark.core.policy import Rules
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
from kmq_spark.pauses import RateLimit
from kmq_spark.tracker.producer import TrackerProducer
from kmq_spark.tracker.rules import TrackerRules
from kmq_spark.tracker.sender.attempts import Attempt
from kmq_spark.tracker.sender.due_decisions import DueDecisions, in_chunks
from kmq_spark.tracker.sender.limits import SenderLimits
from kmq_spark.tracker.sender.positions import SenderPositions
from kmq_spark.tracker.sender.read_ahead import one_ahead
from kmq_spark.tracker.sender.sent import Sent

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from kmq_spark.core.outcome import PartitionOutcome
    from kmq_spark.kafka.positions import LogBeginning
    from kmq_spark.kafka.queue_rules import RulesReader
    from kmq_spark.kafka.topics import QueueLayout
    from kmq_spark.tracker.sender.due_decisions import DueRun

logger = logging.getLogger(__name__)

LARGEST_RECORD = 1_000_000_000
"""The broker limits the size of a record, not the client: this is librdkafka's upper bound of `message.max.bytes`."""

LINGER_MS = 5

UNREADABLE_LOG_INTERVAL_S = 60.0

HEARTBEAT_S = 5.0
"""Longest time between two offset commits, so that monitoring can distinguish an idle tracker from a dead one."""


class RedeliverySender:
    """
    Carries out the tracker's decisions for one queue, under one transactional id.

    Args:
        layout: The queue's topics, checked.
        bootstrap_servers: Comma-separated `host:port`.
        extra: librdkafka settings of the operator.
        limits: Limits of the transactions; None: the defaults.
        rules: Rules from the tracker's settings. The sender applies those that need the payload, such as the TTL.
        rules_reader: Reads the rules of the queue, which override *rules*; closed with the sender.

    Attributes:
        topics: Topic and group names of the queue.
        tracker_id: Id of this tracker; it signs the group's offsets with it.
        snapshot_lag: Batches since the last uploaded snapshot of the state; the offset commits contain it.
        committed_at_epoch_s: Time of the last offset commit, epoch seconds, this host's clock; 0 before the first.
    """

    def __init__(
        self,
        layout: QueueLayout,
        *,
        bootstrap_servers: str,
        extra: Mapping[str, str] | None = None,
        limits: SenderLimits | None = None,
        rules: Rules | None = None,
        rules_reader: RulesReader | None = None,
    ) -> None:
        """Create the clients that only read; `open` creates the producer."""
        self.topics = layout.topics
        self._dead_letter_count = layout.dead_letter_partition_count
        self._limits = limits or SenderLimits()
        self.tracker_id = new_client_id("tracker")
        self._rules = TrackerRules(layout.topics, self.tracker_id, rules or Rules(), rules_reader)
        reading = reader_config(bootstrap_servers, layout.topics.tracker_group, self.tracker_id, extra)
        self._payloads = PayloadReader(reading, layout.topics.queue_topic, self._limits.timeout)
        self._unreadable_limit = RateLimit(UNREADABLE_LOG_INTERVAL_S)
        admin = make_client(AdminClient, admin_config(bootstrap_servers, self.tracker_id, extra))
        self._tracker_positions = TrackerPositions(
            reading, admin, layout.topics.markers_topic, layout.partition_count, self._limits.timeout
        )
        self._producer = TrackerProducer(
            self._producer_config(layout, bootstrap_servers, extra),
            self._limits.timeout,
            self._tracker_positions,
            self.tracker_id,
            layout.topics.queue,
        )
        self._positions = SenderPositions(self.tracker_id)
        self._is_stopping = False
        self.snapshot_lag = 0
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
            transaction_timeout_ms=self._limits.transaction_timeout_ms,
        )
        # A produce batch costs the broker about the same, however full it is. Without lingering, many leases that end
        # at once cause tens of thousands of batches. A single message waits that long too, which is about a hundredth
        # of its lateness.
        config["linger.ms"] = LINGER_MS
        # The broker compares a whole batch with the topic's `max.message.bytes`, and rejects the whole batch.
        config["batch.size"] = min(1_000_000, layout.max_message_bytes or 1_000_000)
        return config

    @property
    def known_ids(self) -> frozenset[str]:
        """Ids of the trackers of this queue up to and including this one; complete after `open`."""
        return self._producer.known_ids

    def open(self, known_ids: Collection[str] = ()) -> ResumePoint:
        """
        Take over the queue: fence older trackers, read where to begin, sign the group's offsets, write missing RULES.

        Args:
            known_ids: For a tracker that restarts: its `known_ids` from before. A tracker with another id that has
                signed since then is newer and keeps the queue. Empty: take over from every tracker.

        Returns:
            Where the tracker begins.

        Raises:
            KafkaClientError: The broker cannot be reached in time.
            FencedError: A newer tracker took over while this one was starting, or before it restarted.
        """
        with self._lock:
            # What the fencing cannot change is read beside it: redelivery is away until the sender is open.
            with ThreadPoolExecutor(2, "kmq-open") as pool:
                beginning = pool.submit(self._tracker_positions.beginning)
                rules = pool.submit(self._rules.read)
                self._producer.open(known_ids)
            resume = self._resume_point(beginning.result())
            failpoint("tracker.positions-read")
            self._positions.load(resume, resume.positions)
            self._producer.note_older({at.tracker_id for at in resume.positions.values()})
            rules.result()
            self._rules.load(resume)
            positions = self._positions
            self._transact([], self._rules.records(positions.current), list(positions.current), Sent())
            self._rules.note_written(positions.current)
            failpoint("tracker.signed")
            return resume

    def _resume_point(self, beginning: LogBeginning) -> ResumePoint:
        try:
            return self._tracker_positions.resume_point(beginning)
        except KafkaClientError as error:
            if error.code != NO_ANSWER:
                raise
            place = TopicPartition(self.topics.markers_topic, 0, 0)
            self._producer.discard_pending_offsets([place], self._tracker_positions.group_metadata())
            return self._tracker_positions.resume_point(beginning)

    def refresh_rules(self) -> None:
        """
        Check every few seconds whether the rules of the queue changed, and write new rules to the markers topic.

        Raises:
            FencedError: A newer tracker has taken over.
            KafkaClientError: The rules could not be written; the rules in the log stay in force.
        """
        rules = self._rules.check()
        with self._lock:
            self._rules.adopt(rules)
            positions = self._positions
            records = self._rules.records(positions.current) if self._producer.is_open else []
            if records:
                self._transact([], records, [], Sent())
                self._rules.note_written(positions.current)

    def deliver(self, outcomes: Sequence[PartitionOutcome]) -> Sent:
        """
        Carry out the decisions of a batch.

        Args:
            outcomes: One per markers partition.

        Returns:
            What was sent; all of it is committed.

        Raises:
            FencedError: A newer tracker has taken over. The open transaction was not committed.
            KafkaClientError: A transaction failed, or its outcome is unknown. The sender must be opened again before
                anything is decided.
        """
        with self._lock, self._positions.restored_on_error():
            return self._deliver(outcomes)

    def _deliver(self, outcomes: Sequence[PartitionOutcome]) -> Sent:
        sent = Sent()
        self._note(outcomes)
        decisions = DueDecisions(outcomes)
        left = len(decisions)
        # While one chunk commits, another thread reads the payloads of the next one. Kafka's clients read and write in
        # threads of their own.
        with closing(one_ahead(in_chunks(self._due_runs(decisions), self._limits))) as chunks:
            for chunk in chunks:
                left -= sum(len(run.messages) for run in chunk)
                if not left:
                    break
                self._transact(chunk, [], [], sent)
                failpoint("tracker.chunk-committed")
            else:
                chunk = []
                if left:
                    message = (
                        f"{left} decisions of {self.topics} were not carried out: this is a bug; nothing is committed"
                    )
                    raise KmqError(message)
            # Only the last transaction may commit the offsets: a committed offset means that everything was sent.
            if chunk or self._is_commit_due():
                self._transact(chunk, [], list(self._positions.current), sent)
        if sent.nonexistent:
            logger.warning(
                "%d messages of %s ended as expired: their markers name offsets that the queue topic does not have; "
                "find the client that writes them, or check whether the topic was deleted and created again",
                sent.nonexistent, self.topics, extra={"action": "nonexistent_messages", "queue": str(self.topics)},
            )  # fmt: skip
        return sent

    def commit_read_to(self, read_to: Mapping[int, int]) -> None:
        """
        Commit the positions of an idle queue, if that is due; also when they have not changed, as a heartbeat.

        The position of a partition is not advanced until a batch since `open` has reported on the partition. A query
        that was restarted returns at once what the earlier query had read, but only its first batch reports which
        markers are still needed.

        Args:
            read_to: First marker offset that Spark has not read, by partition. It may be past the last marker, after
                control records of transactions, which the group's lag would otherwise count permanently.

        Raises:
            FencedError: A newer tracker has taken over.
            KafkaClientError: The commit failed.
        """
        with self._lock:
            if not self._is_commit_due():
                return
            self._positions.advance_idle(read_to)
            # Also without a change: this is the heartbeat, and Kafka deletes offsets that are not committed for a week.
            self._transact([], [], list(self._positions.current), Sent())

    def close(self, *, is_stopped: bool = False) -> None:
        """
        Commit the positions and close the clients.

        If the commit fails, nothing is lost: the next tracker reads more of the log again.

        Args:
            is_stopped: Whether the tracker was stopped or is done. The commit contains this, so that monitoring does
                not report a dead tracker.
        """
        with self._lock:
            try:
                self._is_stopping = is_stopped
                self._commit_positions()
            except FencedError:
                pass  # the newer tracker commits the positions
            except KmqError as error:
                logger.warning(
                    "cannot commit the offsets of the tracker of %s: %s; the next tracker reads more markers again",
                    self.topics.queue, error,
                )  # fmt: skip
            finally:
                self._producer.close()
                for client in (self._payloads, self._tracker_positions, self._rules):
                    client.close()

    def _is_commit_due(self) -> bool:
        return time.monotonic() - self._committed_at_s > min(self._limits.commit_interval_ms / 1000, HEARTBEAT_S)

    def _commit_positions(self) -> None:
        if self._producer.is_open and (self._is_stopping or self._positions.is_changed):
            self._transact([], [], list(self._positions.current), Sent())

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

    def _transact(
        self, runs: list[DueRun], other_records: list[OutgoingRecord], partitions: list[int], sent: Sent
    ) -> None:
        """Send what runs need with their ENDs, other records and the positions of *partitions* in one transaction."""
        rejected_records = RejectedRecords()
        attempts: list[Attempt] = []

        def work() -> None:
            attempt = Attempt(
                runs, rejected_records, self.topics, self._rules.in_force, self._dead_letter_count,
                is_first=not attempts,
            )  # fmt: skip
            attempts.append(attempt)
            producer = self._producer.current
            producer.send_all(attempt.records())
            for record in (*other_records, *attempt.ends.records(self.topics, self.tracker_id)):
                producer.send(record)
                failpoint("tracker.end-sent")

        committing = {partition: self._positions.current[partition] for partition in partitions}
        positions = [
            at.to_topic_partition(
                self.topics.markers_topic,
                p,
                self._positions.heartbeat(p, is_stopped=self._is_stopping, snapshot_lag=self.snapshot_lag),
            )
            for p, at in committing.items()
        ]
        # Only if there are offsets to commit: the call needs a round trip to another thread of the client.
        group = self._tracker_positions.group_metadata() if positions else None
        self._producer.run(work, positions, group, lambda: rejected_records.total_count)
        self._positions.note_committed(committing)
        if committing:
            self._committed_at_s, self.committed_at_epoch_s = time.monotonic(), time.time()
        (*_, done) = attempts
        sent.redelivered += done.redelivered
        sent.expired += done.expired
        sent.nonexistent += done.nonexistent
        sent.dead_lettered += done.dead_lettered
        sent.lateness_ms += done.lateness_ms
