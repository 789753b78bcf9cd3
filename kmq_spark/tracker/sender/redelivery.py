"""
Carry out the tracker's decisions, exactly once: messages, dead letters, ENDs and offsets in one Kafka transaction.

Rule 1: a decision and its END commit together or not at all. So the log itself says what is done, and a tracker that
has read the log to its end (`ResumePoint.decide_from`) cannot send anything twice, whatever died before.
Rule 2: a batch with much to send is cut into several transactions; the offsets go with the last one.
Rule 3: nothing is lost in silence: what cannot be redelivered becomes a dead letter that says why.

Source: KIP-98, KIP-447 (consume-process-produce); docs/design.md has the argument.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer
from confluent_kafka.admin import AdminClient

from kmq_spark.core.markers import Outcome
from kmq_spark.core.policy import Rules
from kmq_spark.errors import FencedError, KmqError
from kmq_spark.failpoints import failpoint
from kmq_spark.kafka.payloads import PayloadReader
from kmq_spark.kafka.positions import Heartbeat, Position, ResumePoint, TrackerPositions
from kmq_spark.kafka.records import OutgoingRecord
from kmq_spark.kafka.rejected_records import Refusals
from kmq_spark.kafka.settings import (
    admin_config,
    make_client,
    new_client_id,
    reader_config,
    transactional_producer_config,
)
from kmq_spark.tracker.producer import TrackerProducer
from kmq_spark.tracker.rules import TrackerRules
from kmq_spark.tracker.sender.attempts import Attempt
from kmq_spark.tracker.sender.due_decisions import Dues
from kmq_spark.tracker.sender.read_ahead import one_ahead
from kmq_spark.tracker.sender.records import Item, end_records
from kmq_spark.tracker.sender.set_aside import ChunkLimits, SetAside
from kmq_spark.wire.marker_log import Signing

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Mapping, Sequence

    from kmq_spark.core.outcome import PartitionOutcome
    from kmq_spark.core.state import Status
    from kmq_spark.kafka.queue_rules import RulesReader
    from kmq_spark.kafka.topics import QueueLayout
    from kmq_spark.tracker.consumer_positions import ConsumerPositions

logger = logging.getLogger(__name__)

LARGEST_RECORD = 1_000_000_000
"""The broker decides what is too large, not our client: librdkafka's upper bound."""

LINGER_MS = 5

UNTRUSTED_LOG_INTERVAL_S = 60.0

HEARTBEAT_S = 5.0
"""A tracker commits at least as often, so that those who look from outside can tell idle from dead."""


@dataclass(frozen=True, slots=True)
class SenderLimits:
    """
    Bounds of one sender.

    Attributes:
        timeout_ms: For each call to the broker.
        max_transaction_messages: Messages in one transaction.
        max_transaction_bytes: Payload bytes in one transaction.
        commit_interval_ms: How often offsets are committed while nothing is sent.
        transaction_timeout_ms: When the broker aborts a transaction whose tracker fell silent. Until then consumers of
            its partitions read nothing that was written after it.
    """

    timeout_ms: int = 15_000
    max_transaction_messages: int = 10_000
    max_transaction_bytes: int = 16 * 1024 * 1024
    commit_interval_ms: int = 5_000
    transaction_timeout_ms: int = 10_000


@dataclass(slots=True)
class Sent:
    """
    What a batch led to.

    Attributes:
        redelivered: Messages sent to the queue topic again.
        expired: Messages that were dropped, since their time to live was over.
        nonexistent: Decisions that were dropped: a marker named an offset at or past the end of the queue topic.
        dead_lettered: Messages sent to the dead-letter topic.
        set_aside: Records of the markers topic that are no markers.
        lateness_ms: For each redelivered message: append time less deadline, both on the broker's clock.
    """

    redelivered: int = 0
    expired: int = 0
    nonexistent: int = 0
    dead_lettered: int = 0
    set_aside: int = 0
    lateness_ms: list[int] = field(default_factory=list)


class RedeliverySender:
    """
    The tracker's hands: one per queue, one transactional id.

    Args:
        layout: The queue's topics, checked.
        bootstrap_servers: Comma-separated `host:port`.
        extra: librdkafka settings of the operator.
        limits: Bounds.
        rules: Of the tracker: those that the payload decides, its time to live for one, are judged here.
        rules_reader: Follows the rules that belong to the queue, which go before these; closed with the sender.
        consumer_positions: Keeps the positions of the queue's consumers; stopped with the sender.
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
        consumer_positions: ConsumerPositions | None = None,
    ) -> None:
        """Make the clients that only read; `open` makes the one that writes."""
        self.topics = layout.topics
        self._dead_letter_count = layout.dead_letter_partition_count
        self._limits = limits or SenderLimits()
        self.consumer_positions = consumer_positions
        self._key = b""
        self._untrusted: dict[int, int] = {}
        self._untrusted_told_s = -UNTRUSTED_LOG_INTERVAL_S
        self.tracker_id = new_client_id("tracker")
        self._rules = TrackerRules(layout.topics, self.tracker_id, rules or Rules(), rules_reader)
        reading = reader_config(bootstrap_servers, layout.topics.tracker_group, self.tracker_id, extra)
        self._group = make_client(Consumer, reading)
        self._payloads = PayloadReader(reading, layout.topics.queue_topic, self._limits.timeout_ms)
        self._raw_markers = PayloadReader(reading, layout.topics.markers_topic, self._limits.timeout_ms)
        self._set_aside = SetAside(self._raw_markers, layout.topics, layout.dead_letter_partition_count)
        admin = make_client(AdminClient, admin_config(bootstrap_servers, self.tracker_id, extra))
        self._tracker_positions = TrackerPositions(
            self._group, admin, layout.topics.markers_topic, layout.partition_count, self._limits.timeout_ms
        )
        self._producer = TrackerProducer(
            self._writing(layout, bootstrap_servers, extra),
            self._limits.timeout_ms,
            self._tracker_positions,
            self.tracker_id,
            layout.topics.queue,
        )
        self._positions: dict[int, Position] = {}
        self._committed: dict[int, Position] = {}
        self._topic_id = ""
        self._statuses: dict[int, Status] = {}
        self._is_stopping = False
        self.snapshot_lag = 0  # batches since the last snapshot of the state, told with the heartbeat
        self._told: frozenset[int] = frozenset()  # partitions whose state was told since `open`
        self._committed_at_s = 0.0
        self.committed_at_epoch_s = 0.0
        self._lock = threading.Lock()  # batches and upkeep come from different threads, transactions from one at a time

    def _writing(self, layout: QueueLayout, bootstrap_servers: str, extra: Mapping[str, str] | None) -> dict[str, Any]:
        config = transactional_producer_config(
            bootstrap_servers,
            layout.topics.tracker_group,
            self.tracker_id,
            extra,
            max_message_bytes=LARGEST_RECORD,
            transaction_timeout_ms=self._limits.transaction_timeout_ms,
        )
        # Each batch costs the broker about the same, however full: without a pause a mass expiry makes tens of
        # thousands of them. A lone message waits as long, which is a hundredth of its lateness.
        config["linger.ms"] = LINGER_MS
        # The broker judges a whole batch by the topic's limit, and refuses it whole.
        config["batch.size"] = min(1_000_000, layout.max_message_bytes or 1_000_000)
        return config

    @property
    def known_ids(self) -> frozenset[str]:
        """Ids of the trackers that had the queue up to this one, its own included; known once it is open."""
        return self._producer.known_ids

    def open(self, known_ids: Collection[str] = ()) -> ResumePoint:
        """
        Take over the queue: fence older trackers, find out where to begin, and sign the group's offsets.

        Args:
            known_ids: For a tracker that has had the queue before and starts again: the `known_ids` of then. Whoever
                else has signed since is newer, and keeps the queue.

        Raises:
            KafkaClientError: The broker cannot be reached in time.
            FencedError: A newer tracker took over while this one was starting, or before it started again.
        """
        with self._lock:
            self._producer.take(known_ids)
            resume = self._tracker_positions.resume_point()
            failpoint("tracker.positions-read")
            self._topic_id = resume.topic_id
            if self.consumer_positions is not None:
                self.consumer_positions.load(resume.consumers)
            self._statuses = {}
            self._committed = dict(resume.positions)
            resume = resume.with_key()
            self._key = resume.key
            self._positions = {p: at._replace(tracker_id=self.tracker_id) for p, at in resume.positions.items()}
            self._told = frozenset()
            self._producer.note_older({at.tracker_id for at in resume.positions.values()})
            self._rules.take(resume)
            self._transact([], self._rules.records(self._positions, self._key), list(self._positions), Sent())
            self._rules.written(self._positions)
            failpoint("tracker.signed")
            return resume

    def look_for_rules(self) -> None:
        """
        Look whether the rules of the queue changed, every few seconds; new ones go into the log.

        Raises:
            FencedError: A newer tracker has taken over.
            KafkaClientError: They could not be written; what is in the log holds.
        """
        rules = self._rules.look()
        with self._lock:
            self._rules.adopt(rules)
            records = self._rules.records(self._positions, self._key) if self._producer.is_open else []
            if records:
                self._transact([], records, [], Sent())
                self._rules.written(self._positions)

    def deliver(self, outcomes: Sequence[PartitionOutcome]) -> Sent:
        """
        Carry out the decisions of a batch.

        Args:
            outcomes: One a markers partition.

        Returns:
            What was sent, when all of it is committed.

        Raises:
            FencedError: A newer tracker has taken over; nothing of the open transaction was sent.
            KafkaClientError: It did not succeed; open again before anything is decided.
        """
        with self._lock:
            before = dict(self._positions), self._told
            try:
                return self._deliver(outcomes)
            except BaseException:
                # `close` commits where we stand, and what was not sent does not stand.
                positions, self._told = before
                self._positions = {
                    partition: at._replace(aside_offset=self._committed[partition].aside_offset)
                    if partition in self._committed
                    else at
                    for partition, at in positions.items()
                }
                raise

    def _deliver(self, outcomes: Sequence[PartitionOutcome]) -> Sent:
        sent = Sent()
        set_aside = self._set_aside_all_but_last(outcomes, sent)
        self._advance(outcomes)
        dues = Dues(outcomes)
        left = len(dues)
        # The client's own threads read and write; what can be done beside a commit is to make items of what they read.
        with closing(one_ahead(self._chunks(dues))) as chunks:
            for chunk in chunks:
                left -= len(chunk)
                if not left:
                    break
                self._transact(chunk, [], [], sent)
                failpoint("tracker.chunk-committed")
            else:
                chunk = []
                if left:
                    message = (
                        f"{left} decisions were neither carried out nor reported: this is a bug; nothing is committed"
                    )
                    raise KmqError(message)
            # Only the last transaction may say that the markers were read: "offset committed" means "all sent".
            if chunk or set_aside or self._is_commit_due():
                self._transact(chunk, set_aside, list(self._positions), sent)
        sent.set_aside += len(set_aside)
        if sent.nonexistent:
            logger.warning(
                "%d messages of %s were dropped without a dead letter: their markers name offsets that its queue topic "
                "does not have. Find who writes such markers, or who made the topic anew",
                sent.nonexistent, self.topics, extra={"action": "nonexistent_messages", "queue": str(self.topics)},
            )  # fmt: skip
        return sent

    def _set_aside_all_but_last(self, outcomes: Sequence[PartitionOutcome], sent: Sent) -> list[OutgoingRecord]:
        """Set unreadable records aside in transactions of their own; return those that go with the positions."""
        limits = ChunkLimits(self._limits.max_transaction_messages, self._limits.max_transaction_bytes)
        chunks = self._set_aside.chunks(outcomes, dict(self._committed), limits)
        chunk = next(chunks, None)
        if chunk is None:
            return []
        for following in chunks:
            for partition, done_to in chunk.done_to.items():
                position = self._positions.get(partition, Position(0, 0, topic_id=self._topic_id))
                self._positions[partition] = position._replace(tracker_id=self.tracker_id, aside_offset=done_to)
            self._transact([], chunk.records, list(chunk.done_to), sent)
            sent.set_aside += len(chunk.records)
            failpoint("tracker.chunk-committed")
            chunk = following
        return chunk.records

    def commit_read_to(self, read_to: Mapping[int, int]) -> None:
        """
        Commit where an idle queue stands.

        Args:
            read_to: First marker offset not read, by partition, as Spark knows it: past the last marker there may be
                the control records of transactions, and lag would count them for ever. A partition whose state has not
                been told since `open` is left alone: a query that was started again says at once what an earlier one
                had read, and only its first batch says which of that is still in flight, and so needed.
        """
        with self._lock:
            if not self._is_commit_due():
                return
            for partition, next_offset in read_to.items():
                position = self._positions.get(partition)
                if partition not in self._told or position is None or position.next_offset >= next_offset:
                    continue
                nothing_needed = position.needed_offset == position.next_offset
                needed_offset = next_offset if nothing_needed else position.needed_offset
                self._positions[partition] = position._replace(next_offset=next_offset, needed_offset=needed_offset)
            # Also where nothing has moved: a heartbeat, and offsets that are not committed for a week expire.
            self._transact([], [], list(self._positions), Sent())

    def close(self, *, is_stopped: bool = False) -> None:
        """
        Commit where we stand and leave the broker.

        Where that fails nothing is lost: the next tracker reads a little more of the log.

        Args:
            is_stopped: Whether the tracker was asked to stop, or is done; the commit says so, and nobody takes it for
                dead.
        """
        if self.consumer_positions is not None:
            self.consumer_positions.stop()
        with self._lock:
            try:
                self._is_stopping = is_stopped
                self._commit_positions()
            except FencedError:
                pass  # the newer tracker's positions stand
            except KmqError as error:
                logger.warning("cannot commit where the tracker of %s stands: %s", self.topics.queue, error)
            finally:
                self._producer.close()
                for client in (self._payloads, self._raw_markers, self._group, self._rules):
                    client.close()

    def _is_commit_due(self) -> bool:
        return time.monotonic() - self._committed_at_s > min(self._limits.commit_interval_ms / 1000, HEARTBEAT_S)

    def _commit_positions(self) -> None:
        if self._producer.is_open and (self._is_stopping or self._positions != self._committed):
            self._transact([], [], list(self._positions), Sent())

    def _advance(self, outcomes: Sequence[PartitionOutcome]) -> None:
        for outcome in outcomes:
            status = outcome.status
            self._told |= {outcome.marker_partition}
            self._statuses[outcome.marker_partition] = status
            before = self._positions.get(outcome.marker_partition)
            # A batch that is read again, for a lost or an older checkpoint, must not take the group backwards.
            if before is None or status.next_marker_offset >= before.next_offset:
                # A partition that is new has had no tracker before this one.
                signing = Signing(self._key) if before is None else before.signing
                self._positions[outcome.marker_partition] = Position(
                    status.next_marker_offset,
                    status.needed_marker_offset,
                    self.tracker_id,
                    rules=status.needed_rules,
                    signing=signing,
                    topic_id=self._topic_id,
                    clock=status.needed_clock,
                )
            self._note_untrusted(outcome)
            self._rules.note(outcome)

    def _note_untrusted(self, outcome: PartitionOutcome) -> None:
        """Log markers that claim to be a tracker's and are not, at most once a minute."""
        count = outcome.status.counters.get("untrusted", 0)
        before = self._untrusted.get(outcome.marker_partition, 0)
        self._untrusted[outcome.marker_partition] = count
        if count > before and time.monotonic() - self._untrusted_told_s > UNTRUSTED_LOG_INTERVAL_S:
            self._untrusted_told_s = time.monotonic()
            logger.warning(
                "%s[%d] has %d more markers that only a tracker writes and that carry no signature of this queue; they "
                "are ignored. Find their writer: a tracker of an older version, or a client with too many rights",
                self.topics.markers_topic, outcome.marker_partition, count - before,
                extra={"action": "untrusted_markers", "queue": str(self.topics)},
            )  # fmt: skip

    def _chunks(self, dues: Dues) -> Generator[list[Item]]:
        """Read the payloads of all decisions, in pieces that fit into one transaction."""
        wanted = dues.wanted()
        chunk: list[Item] = []
        size = 0
        for partition, first, messages in self._payloads.stretches(wanted) if wanted else ():
            for which, due in dues.of(partition, first, len(messages)):
                message = messages[which]
                if message is None and self._payloads.never_was(partition, due.message_offset):
                    due = due._replace(outcome=Outcome.EXPIRED)  # noqa: PLW2901  # the same decision, as it is carried out
                item = Item(due, message)
                chunk.append(item)
                size += item.size
                if len(chunk) >= self._limits.max_transaction_messages or size >= self._limits.max_transaction_bytes:
                    yield chunk
                    chunk, size = [], 0
        if chunk:
            yield chunk

    def _transact(self, items: list[Item], also: list[OutgoingRecord], places: list[int], sent: Sent) -> None:
        """Send items with their ENDs, other records and the positions of these partitions, in one transaction."""
        refusals = Refusals()
        attempt = Attempt(items, refusals, self.topics, self._rules.in_force, self._dead_letter_count)

        def work() -> None:
            nonlocal attempt
            attempt = Attempt(items, refusals, self.topics, self._rules.in_force, self._dead_letter_count)
            producer = self._producer.current
            producer.send_all(attempt.records(), attempt.on_delivery)
            for record in (*also, *end_records(attempt.dues, self.topics, self.tracker_id, self._key)):
                producer.send(record)
                failpoint("tracker.end-sent")

        committing = {partition: self._positions[partition] for partition in places}
        kept = self.consumer_positions
        positions = [
            at.to_topic_partition(
                self.topics.markers_topic, p, self._heartbeat(p), None if kept is None else kept.of(p)
            )
            for p, at in committing.items()
        ]
        # Asked for where it is needed: it is a trip to another thread of the client.
        group = self._group.consumer_group_metadata() if positions else None
        self._producer.run(work, positions, group, lambda: refusals.count)
        self._committed |= committing
        if committing:
            self._committed_at_s, self.committed_at_epoch_s = time.monotonic(), time.time()
        sent.redelivered += len(attempt.lateness_ms)
        sent.expired += attempt.expired
        sent.nonexistent += attempt.nonexistent
        sent.dead_lettered += attempt.dead_lettered
        sent.lateness_ms += attempt.lateness_ms

    def _heartbeat(self, partition: int) -> Heartbeat:
        status, now_ms = self._statuses.get(partition), int(time.time() * 1000)
        if status is None:
            return Heartbeat(now_ms, is_stopped=self._is_stopping, snapshot_lag=self.snapshot_lag)
        return Heartbeat(now_ms, status.in_flight, status.next_deadline_at_ms, self._is_stopping, self.snapshot_lag)
