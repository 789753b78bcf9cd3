"""
The committed offsets of a tracker's group, and the point at which a new tracker begins.

Rule 1: Offsets are committed only inside transactions, so that a fenced tracker cannot move them.
Rule 2: A committed offset means that every marker below it was folded. What is decided and not yet confirmed is still
needed, and so above the oldest marker that is needed.
Rule 3: The metadata of a commit contains the tracker id, the oldest marker that is still needed, and the queue's rules
in force at that marker. If the checkpoint is lost, the state is rebuilt from that marker and not from the beginning of
the topic.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from confluent_kafka import Consumer, TopicPartition

from kmq_spark.core.clock import ClockStart
from kmq_spark.core.policy import QueueRules
from kmq_spark.errors import KafkaClientError, KmqError, TopicError
from kmq_spark.kafka.client_errors import retry_until_answered
from kmq_spark.kafka.lookups import EARLIEST, LATEST, offsets_of, topic_id_of
from kmq_spark.kafka.settings import make_client

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient, OffsetSpec

    from kmq_spark.kafka.queue_topics import QueueTopics

logger = logging.getLogger(__name__)

METADATA_VERSION = 1

STABLE_WAIT_S = 5.0
"""
Maximum time to wait for offsets that an open transaction may change. The wait usually takes milliseconds.

A broker that was suspended may keep the offsets of an aborted transaction as pending forever, because the request that
adds the offsets (TxnOffsetCommit) arrives after the abort (KIP-890). While offsets are pending, the broker does not
return the offsets of the group. `TrackerProducer.discard_pending_offsets` ends this.
"""

NO_ANSWER = "_TIMED_OUT"
"""Code of the error when the broker does not answer in time, or the offsets stay pending."""


MAX_TROUBLE = 300
"""Characters of a trouble that a commit keeps: Kafka allows 4,096 bytes of metadata."""


class Heartbeat(NamedTuple):
    """
    What a tracker reports about itself with each commit of a partition, every few seconds, also when idle.

    Attributes:
        at_ms: Time of the report, epoch milliseconds, clock of the tracker's host.
        due_at_ms: Earliest deadline of these messages, broker clock; None if none falls due.
        is_stopped: Whether the tracker was asked to stop and this is its last commit.
        trouble: Why its query was started again, until a batch succeeds.
    """

    at_ms: int
    in_flight: int = 0
    due_at_ms: int | None = None
    is_stopped: bool = False
    snapshot_lag: int = 0
    trouble: str = ""

    def metadata(self) -> dict[str, object]:
        """Return the heartbeat as fields of a commit's metadata."""
        fields: dict[str, object] = {"at": self.at_ms, "in_flight": self.in_flight, "due_at": self.due_at_ms}
        if self.snapshot_lag:
            fields["snapshot_lag"] = self.snapshot_lag
        if self.trouble:
            fields["trouble"] = self.trouble[:MAX_TROUBLE]
        return fields | {"stopped": True} if self.is_stopped else fields

    @classmethod
    def from_topic_partition(cls, committed: TopicPartition) -> Heartbeat | None:
        """Return the committed heartbeat; None if there is none, or a tracker of an older version committed."""
        try:
            fields = json.loads(committed.metadata or "{}")
            due_at_ms = fields.get("due_at")
            return cls(
                int(fields["at"]),
                int(fields.get("in_flight", 0)),
                None if due_at_ms is None else int(due_at_ms),
                bool(fields.get("stopped", False)),
                int(fields.get("snapshot_lag", 0)),
                str(fields.get("trouble", "")),
            )
        except (ValueError, TypeError, KeyError, AttributeError):
            return None


class Position(NamedTuple):
    """
    How far one markers partition is folded.

    Attributes:
        needed_offset: First marker offset that a rebuild of the state must read.
        tracker_id: Id of the tracker that committed the position; empty if unknown.
        rules: The queue's rules in force at `needed_offset`, for a rebuild; None if the queue has no rules of its own.
        topic_id: Topic id of the markers topic: it changes if the topic is deleted and created again. Empty if unknown.
        is_after_gap: Whether markers below the position were removed and there is no proof that a tracker had read
            them. It stays true until a marker after the gap was folded.
        queue_id: Topic id of the queue topic, to whose messages the markers belong. Empty if unknown.
    """

    next_offset: int
    needed_offset: int
    tracker_id: str = ""
    rules: QueueRules | None = None
    topic_id: str = ""
    is_after_gap: bool = False
    clock: ClockStart = ClockStart()
    queue_id: str = ""

    def to_topic_partition(self, topic: str, partition: int, heartbeat: Heartbeat | None = None) -> TopicPartition:
        """Return the position as the offset and metadata to commit."""
        metadata: dict[str, Any] = {"v": METADATA_VERSION, "needed": self.needed_offset, "by": self.tracker_id}
        if self.topic_id:
            metadata["topic"] = self.topic_id
        if self.queue_id:
            metadata["queue"] = self.queue_id
        if self.is_after_gap:
            metadata["gap"] = True
        if heartbeat is not None:
            metadata |= heartbeat.metadata()
        if self.rules is not None:
            metadata["rules"] = self.rules.to_dict()
        if self.clock != ClockStart():
            metadata["clock"] = self.clock
        return TopicPartition(topic, partition, self.next_offset, json.dumps(metadata))

    @classmethod
    def from_topic_partition(cls, committed: TopicPartition) -> Position | None:
        """Return the committed position; None if there is none. Metadata from other programs counts as empty."""
        if committed.offset < 0:
            return None
        try:
            metadata = json.loads(committed.metadata or "{}")
            rules = QueueRules.from_dict(metadata["rules"]) if metadata.get("rules") else None
            needed_offset, tracker_id = int(metadata["needed"]), str(metadata["by"])
            topic_id, is_after_gap = str(metadata.get("topic", "")), bool(metadata.get("gap", False))
            ahead_ms, appended_at_ms = metadata.get("clock") or ClockStart()
            clock = ClockStart(int(ahead_ms), int(appended_at_ms))
            return cls(
                committed.offset,
                needed_offset,
                tracker_id,
                rules,
                topic_id,
                is_after_gap,
                clock,
                str(metadata.get("queue", "")),
            )
        except (ValueError, TypeError, KeyError, AttributeError):
            return cls(committed.offset, 0)


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """
    Where a tracker begins, by markers partition.

    Attributes:
        positions: The committed positions; the beginning of the log if there is none.
        starting_offsets: First marker that a query without a checkpoint reads.
        removed: Markers that retention removed before any tracker folded them, by partition: offset of the first one,
            and offset after the last one.
        has_no_position: Whether no partition has a committed offset, except one with `is_after_gap`. Kafka deletes
            committed offsets together with a topic, and those of a group that has not committed for
            `offsets.retention.minutes`.
        is_other_topic: Whether a tracker has committed offsets for another topic of this name: its topic id differs, or
            it was longer.
        unproven_gaps: First marker to read in each partition with `is_after_gap`: markers below it were removed and
            there is no proof that a tracker had read them.
    """

    positions: Mapping[int, Position]
    starting_offsets: Mapping[int, int]
    removed: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    has_no_position: bool = False
    is_other_topic: bool = False
    topic_id: str = ""
    queue_id: str = ""
    unproven_gaps: Mapping[int, int] = field(default_factory=dict)

    @property
    def rules(self) -> dict[int, QueueRules | None]:
        """The queue's rules in force where a rebuild begins, by markers partition."""
        return {partition: position.rules for partition, position in self.positions.items()}

    @property
    def clocks(self) -> dict[int, ClockStart]:
        """The clock where a rebuild begins, by markers partition."""
        return {partition: position.clock for partition, position in self.positions.items()}

    def check_nothing_removed(self, topic: str, *, has_checkpoint: bool = False) -> None:
        """Check that every marker was folded before retention removed it."""
        if self.unproven_gaps and not has_checkpoint:
            places = ", ".join(f"[{p}] at {first}" for p, first in sorted(self.unproven_gaps.items()))
            raise KmqError(
                f"{topic} does not begin at offset 0 and the tracker's group has no committed offset: its first "
                f"markers are {places}; a message that was started before them and whose consumer died is not "
                "redelivered. The group's offsets expired (offsets.retention.minutes of the brokers), or no tracker "
                "has run since the topic was created. To continue with the remaining markers, run once with "
                "KMQ_TRACKER__FAIL_ON_REMOVED_MARKERS=false"
            )
        if not self.removed:
            return
        places = ", ".join(f"[{p}] {first} to {end - 1}" for p, (first, end) in sorted(self.removed.items()))
        raise KmqError(
            f"markers of {topic} were removed before a tracker read them: {places}; a message that was started there "
            "and whose consumer died is not redelivered. Raise retention.ms above the longest lease plus the "
            "longest outage. To continue with the remaining markers, run once with "
            "KMQ_TRACKER__FAIL_ON_REMOVED_MARKERS=false"
        )


class LogBeginning(NamedTuple):
    """
    Where a markers topic begins, and which topic of its name it is.

    Attributes:
        first: First offset of each partition.
        topic_id: Topic id; empty if unknown.
        queue_id: Topic id of the queue topic; empty if unknown.
    """

    first: Mapping[int, int]
    topic_id: str
    queue_id: str = ""


class TrackerPositions:
    """Reads the committed positions of one tracker group."""

    def __init__(
        self,
        config: Mapping[str, Any],
        admin: AdminClient,
        topics: QueueTopics,
        partition_count: int,
        timeout: float,
    ) -> None:
        self._consumer = make_client(Consumer, config)
        self._config = config
        self._admin = admin
        self._topic, self._queue_topic = topics.markers_topic, topics.queue_topic
        self._partitions = range(partition_count)
        self._timeout = timeout

    def close(self) -> None:
        """Close the consumer."""
        self._consumer.close()

    def group_metadata(self) -> object:
        """Return the metadata of the group, for offsets that a transaction commits."""
        return self._consumer.consumer_group_metadata()

    def committed(self) -> dict[int, Position]:
        """
        Return the committed positions; partitions without one are left out.

        If an open transaction may change them for longer than `STABLE_WAIT_S`, return those from before it.
        """
        try:
            return _positions(self._committed())
        except KafkaClientError as error:
            if error.code != NO_ANSWER:
                raise
            return _positions(self._committed_without_waiting())

    def beginning(self) -> LogBeginning:
        """Return where the markers topic begins. This may be read before the fencing."""
        # The id first: if a client has no connection yet, and its first request is for offsets, librdkafka may look for
        # the leaders only after 1 or 3 s (`rd_kafka_topic_partition_list_query_leaders_async`).
        topic_id = topic_id_of(self._admin, self._topic, self._timeout)
        return LogBeginning(self._offsets(EARLIEST), topic_id, self.queue_id())

    def queue_id(self) -> str:
        """Return the topic id of the queue topic; empty if the broker does not return one."""
        return topic_id_of(self._admin, self._queue_topic, self._timeout)

    def check_queue_id(self, known: str, found: str) -> None:
        """Raise TopicError if the queue topic is another one than that of the messages in flight."""
        if known and found and known != found:
            message = (
                f"topic {self._queue_topic!r} was deleted and created again, {self._topic!r} was not: in flight are "
                f"messages that are gone, and others have their offsets; delete {self._topic!r} too, and run "
                f"`kmq queue create {self._queue_topic}`"
            )
            raise TopicError(message)

    def resume_point(self, beginning: LogBeginning) -> ResumePoint:
        """Return where to begin."""
        first, topic_id, queue_id = beginning
        end = self._offsets(LATEST)
        committed = _positions(self._committed())
        positions, starting_offsets, removed, unproven_gaps = {}, {}, {}, {}
        is_other_topic = False
        for partition in self._partitions:
            position = committed.get(partition)
            if position is not None and (reason := _why_other_topic(position, topic_id, end[partition])):
                logger.error(
                    "topic %s was deleted and created again: %s in partition %d; reading it from its beginning",
                    self._topic, reason, partition, extra={"action": "topic_anew"},
                )  # fmt: skip
                position, is_other_topic = None, True
            if position is not None:
                self.check_queue_id(position.queue_id, queue_id)
            if position is None:
                position = Position(first[partition], first[partition], is_after_gap=first[partition] > 0)
            if position.is_after_gap:
                unproven_gaps[partition] = max(position.next_offset, first[partition])
            elif position.next_offset < first[partition]:
                removed[partition] = (position.next_offset, first[partition])
            elif position.needed_offset < first[partition]:
                # The position is usually not at the beginning of the log. Warn: the state cannot be fully rebuilt.
                logger.warning(
                    "retention removed markers %d to %d of %s[%d], needed to rebuild the state; raise retention.ms",
                    position.needed_offset, first[partition] - 1, self._topic, partition,
                )  # fmt: skip
            positions[partition] = position._replace(topic_id=topic_id, queue_id=queue_id)
            starting_offsets[partition] = max(position.needed_offset, first[partition])
        return ResumePoint(
            positions,
            starting_offsets,
            removed,
            has_no_position=all(position.is_after_gap for position in committed.values()),
            is_other_topic=is_other_topic,
            topic_id=topic_id,
            queue_id=queue_id,
            unproven_gaps=unproven_gaps,
        )

    def _committed(self) -> list[TopicPartition]:
        wait_s = min(self._timeout, STABLE_WAIT_S)
        return retry_until_answered(
            lambda: self._consumer.committed(self._places(), timeout=wait_s),
            f"cannot read the committed offsets of {self._topic}",
            wait_s,
        )

    def _committed_without_waiting(self) -> list[TopicPartition]:
        """Return what is committed, whatever an open transaction may change."""
        # Not by the admin client: such a request may abort the process when the connection breaks (librdkafka's issue
        # 4605).
        client = make_client(Consumer, {**self._config, "isolation.level": "read_uncommitted"})
        try:
            return retry_until_answered(
                lambda: client.committed(self._places(), timeout=self._timeout),
                f"cannot read the committed offsets of {self._topic}",
                self._timeout,
            )
        finally:
            client.close()

    def _places(self) -> list[TopicPartition]:
        return [TopicPartition(self._topic, partition) for partition in self._partitions]

    def _offsets(self, spec: OffsetSpec) -> dict[int, int]:
        return offsets_of(self._admin, self._topic, self._partitions, spec, self._timeout, with_open_transactions=True)


def _positions(places: list[TopicPartition]) -> dict[int, Position]:
    positions = {place.partition: Position.from_topic_partition(place) for place in places}
    return {partition: position for partition, position in positions.items() if position is not None}


def _why_other_topic(position: Position, topic_id: str, end: int) -> str:
    """Return why a position belongs to another topic of this name; empty if it belongs to this one."""
    if position.topic_id and topic_id:
        if position.topic_id == topic_id:
            return ""
        return f"its topic id is {topic_id}, the tracker's group has offsets of topic id {position.topic_id}"
    if position.next_offset > end:
        return f"its log ends at {end}, the tracker's group has committed offset {position.next_offset}"
    return ""
