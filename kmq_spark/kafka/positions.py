"""
Where a tracker stands: the offsets of its group, and where a new one must begin.

Rule 1: offsets are committed inside transactions only; a fenced tracker must not be able to move them.
Rule 2: a committed offset means: every marker below it was folded, and what it led to was sent.
Rule 3: the metadata of a commit says who made it, the oldest marker still needed and the queue's rules in force there.
So a lost checkpoint is rebuilt from there and not from the beginning of the topic.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from confluent_kafka import TopicPartition

from kmq_spark.core.clock import ClockStart
from kmq_spark.core.policy import QueueRules
from kmq_spark.errors import KmqError
from kmq_spark.kafka.client_errors import until_answered
from kmq_spark.kafka.lookups import EARLIEST, LATEST, offsets_of, topic_id_of
from kmq_spark.wire.marker_log import Signing
from kmq_spark.wire.signature import new_key

if TYPE_CHECKING:
    from confluent_kafka import Consumer
    from confluent_kafka.admin import AdminClient, OffsetSpec

logger = logging.getLogger(__name__)

METADATA_VERSION = 1

MAX_KEPT_CHARS = 2_000
"""
Most characters of a commit's metadata for the positions of consumers, some 60 logical queues; the broker takes 4,096
(`offset.metadata.max.bytes`). What is left out is kept as long as the tracker runs.
"""


class Heartbeat(NamedTuple):
    """
    What a tracker says of itself with each commit of a partition, every few seconds, when idle too.

    Attributes:
        at_ms: When, epoch milliseconds, clock of the tracker's host.
        in_flight: Messages in flight.
        due_at_ms: Earliest deadline of them, broker clock; None where nothing falls due.
        is_stopped: Whether the tracker was asked to stop and this is its last commit.
        snapshot_lag: Batches since the last snapshot of the state was uploaded.
    """

    at_ms: int
    in_flight: int = 0
    due_at_ms: int | None = None
    is_stopped: bool = False
    snapshot_lag: int = 0

    def metadata(self) -> dict[str, object]:
        """Return the fields of a commit's metadata."""
        told: dict[str, object] = {"at": self.at_ms, "in_flight": self.in_flight, "due_at": self.due_at_ms}
        if self.snapshot_lag:
            told["snapshot_lag"] = self.snapshot_lag
        return told | {"stopped": True} if self.is_stopped else told

    @classmethod
    def from_topic_partition(cls, committed: TopicPartition) -> Heartbeat | None:
        """Return what was committed; None where nothing was, or by a tracker of an older version."""
        try:
            told = json.loads(committed.metadata or "{}")
            due_at_ms = told.get("due_at")
            return cls(
                int(told["at"]),
                int(told.get("in_flight", 0)),
                None if due_at_ms is None else int(due_at_ms),
                bool(told.get("stopped", False)),
                int(told.get("snapshot_lag", 0)),
            )
        except (ValueError, TypeError, KeyError, AttributeError):
            return None


class ConsumerOffsets(NamedTuple):
    """
    What a tracker keeps, with each commit of a partition, of the positions of the queue's consumers.

    Attributes:
        topic_id: Of the queue topic: a topic made anew has another one. Empty where unknown.
        by_suffix: Committed offset of the queue partition of the same number, by what the name of the consumer group
            has behind that of the queue's own group.
        is_refused: Whether the tracker may not read or commit the offsets of a group.
    """

    topic_id: str = ""
    by_suffix: Mapping[str, int] = MappingProxyType({})
    is_refused: bool = False

    def metadata(self) -> dict[str, object]:
        """Return the fields of a commit's metadata; what would exceed `MAX_KEPT_CHARS` is left out."""
        size, kept = 0, {}
        for suffix, offset in sorted(self.by_suffix.items()):
            size += len(json.dumps({suffix: offset}))
            if size <= MAX_KEPT_CHARS:
                kept[suffix] = offset
        fields: dict[str, object] = {"consumers": kept, "queue_topic": self.topic_id}
        return fields | {"consumers_refused": True} if self.is_refused else fields

    @classmethod
    def from_topic_partition(cls, committed: TopicPartition) -> ConsumerOffsets | None:
        """Return what was committed; None where nothing was, or by a tracker that keeps no positions."""
        try:
            metadata = json.loads(committed.metadata or "{}")
            by_suffix = {str(suffix): int(offset) for suffix, offset in metadata["consumers"].items()}
            return cls(str(metadata["queue_topic"]), by_suffix, bool(metadata.get("consumers_refused", False)))
        except (ValueError, TypeError, KeyError, AttributeError):
            return None


class Position(NamedTuple):
    """
    Where the fold of one markers partition stands.

    Attributes:
        next_offset: First marker offset that is not folded yet.
        needed_offset: First marker offset that a rebuild of the state must read.
        tracker_id: Who said so; empty where unknown.
        aside_offset: Unreadable records below it were set aside, where that is further than the fold; else 0.
        rules: The queue's rules in force at `needed_offset`, for a rebuild; None where it has none of its own.
        signing: How the queue's trackers sign in this partition.
        topic_id: Of the markers topic that is meant: a topic made anew has another one. Empty where unknown.
        is_after_gap: Whether markers below it were removed and nothing says that a tracker had read them; until
            something from there on was folded.
        clock: That of the partition at `needed_offset`, for a rebuild.
    """

    next_offset: int
    needed_offset: int
    tracker_id: str = ""
    aside_offset: int = 0
    rules: QueueRules | None = None
    signing: Signing = Signing()
    topic_id: str = ""
    is_after_gap: bool = False
    clock: ClockStart = ClockStart()

    @property
    def set_aside_to(self) -> int:
        """First marker offset whose record may be set aside: all below were."""
        return max(self.next_offset, self.aside_offset)

    def to_topic_partition(
        self,
        topic: str,
        partition: int,
        heartbeat: Heartbeat | None = None,
        consumers: ConsumerOffsets | None = None,
    ) -> TopicPartition:
        """Return the form in which it is committed."""
        metadata: dict[str, Any] = {"v": METADATA_VERSION, "needed": self.needed_offset, "by": self.tracker_id}
        if self.topic_id:
            metadata["topic"] = self.topic_id
        if self.is_after_gap:
            metadata["gap"] = True
        if heartbeat is not None:
            metadata |= heartbeat.metadata()
        if consumers is not None:
            metadata |= consumers.metadata()
        if self.aside_offset > self.next_offset:
            metadata["aside"] = self.aside_offset
        if self.rules is not None:
            metadata["rules"] = self.rules.to_dict()
        if self.clock != ClockStart():
            metadata["clock"] = self.clock
        if self.signing.key:
            metadata["key"], metadata["key_since"] = self.signing.key.hex(), self.signing.since
        return TopicPartition(topic, partition, self.next_offset, json.dumps(metadata))

    @classmethod
    def from_topic_partition(cls, committed: TopicPartition) -> Position | None:
        """Return what was committed, None where nothing was; metadata that is not ours counts as none."""
        if committed.offset < 0:
            return None
        try:
            metadata = json.loads(committed.metadata or "{}")
            aside_offset = int(metadata.get("aside", 0))
            rules = QueueRules.from_dict(metadata["rules"]) if metadata.get("rules") else None
            signing = Signing(bytes.fromhex(metadata.get("key", "")), int(metadata.get("key_since", 0)))
            needed_offset, tracker_id = int(metadata["needed"]), str(metadata["by"])
            topic_id, is_after_gap = str(metadata.get("topic", "")), bool(metadata.get("gap", False))
            ahead_ms, appended_at_ms = metadata.get("clock") or ClockStart()
            clock = ClockStart(int(ahead_ms), int(appended_at_ms))
            return cls(
                committed.offset, needed_offset, tracker_id, aside_offset, rules, signing, topic_id, is_after_gap, clock
            )
        except (ValueError, TypeError, KeyError, AttributeError):
            return cls(committed.offset, 0)


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """
    Where a tracker begins, by markers partition.

    Attributes:
        positions: As committed, or the beginning of the log.
        starting_offsets: First marker that a query without checkpoint reads.
        decide_from: End of the log now: TICKs below it decide nothing, since the ENDs of what older trackers sent lie
            below it, and they must be known first.
        removed: Markers that retention took away before any tracker folded them, by partition: the first, and the one
            after the last.
        is_anew: Whether no tracker has signed for this topic: with a topic Kafka deletes the offsets of its groups, and
            it deletes those of a group that has not committed for `offsets.retention.minutes`.
        is_another: Whether a tracker has signed for another topic of this name: its topic id differs, or it was longer.
        topic_id: Of the markers topic; empty where the broker does not say.
        unexplained: First marker of a partition that no tracker has signed for, where it is not 0: markers were removed
            and nothing says that a tracker had read them.
        consumers: What the trackers before kept of the positions of the queue's consumers, by partition.
    """

    positions: Mapping[int, Position]
    starting_offsets: Mapping[int, int]
    decide_from: Mapping[int, int]
    removed: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    is_anew: bool = False
    is_another: bool = False
    topic_id: str = ""
    unexplained: Mapping[int, int] = field(default_factory=dict)
    consumers: Mapping[int, ConsumerOffsets] = field(default_factory=dict)

    @property
    def key(self) -> bytes:
        """The key by which the queue's trackers sign; empty where they do not."""
        return next((position.signing.key for position in self.positions.values() if position.signing.key), b"")

    @property
    def signing(self) -> dict[int, Signing]:
        """How the queue's trackers sign, by markers partition."""
        return {partition: position.signing for partition, position in self.positions.items()}

    def with_key(self) -> ResumePoint:
        """
        Return this point with one key in all partitions: the one that is there, or a new one.

        Where a partition has none, or another, signatures count from its present end on: below it lie the markers of
        trackers that did not sign, or signed with a key that was lost with the offsets of the group.
        """
        key = self.key or new_key()
        positions = {
            partition: position
            if position.signing.key == key
            else position._replace(signing=Signing(key, self.decide_from[partition]))
            for partition, position in self.positions.items()
        }
        return replace(self, positions=positions)

    @property
    def rules(self) -> dict[int, QueueRules | None]:
        """The queue's rules in force where a rebuild begins, by markers partition."""
        return {partition: position.rules for partition, position in self.positions.items()}

    @property
    def clocks(self) -> dict[int, ClockStart]:
        """The clock where a rebuild begins, by markers partition."""
        return {partition: position.clock for partition, position in self.positions.items()}

    def check_nothing_removed(self, topic: str, *, has_checkpoint: bool = False) -> None:
        """
        Look that every marker was folded before it was removed.

        Args:
            topic: The markers topic.
            has_checkpoint: Whether there is a checkpoint of this topic, which knows what was folded.

        Raises:
            KmqError: Some were not, or nothing says so; the message says how to go on without them.
        """
        if self.unexplained and not has_checkpoint:
            places = ", ".join(f"[{p}] at {first}" for p, first in sorted(self.unexplained.items()))
            raise KmqError(
                f"{topic} does not begin at offset 0 and the tracker's group has no committed offset: its first "
                f"markers are {places}; a message that was started before them and whose consumer died is not "
                "redelivered. The group's offsets expired (offsets.retention.minutes of the brokers), or no tracker "
                "has run since the topic was created. To go on with what is left, run once with "
                "KMQ_TRACKER__FAIL_ON_REMOVED_MARKERS=false"
            )
        if not self.removed:
            return
        places = ", ".join(f"[{p}] {first} to {end - 1}" for p, (first, end) in sorted(self.removed.items()))
        raise KmqError(
            f"markers of {topic} were removed before a tracker read them: {places}; a message that was started there "
            "and whose consumer died is not redelivered. Raise retention.ms above lease and outage; to go on with what "
            "is left, run once with KMQ_TRACKER__FAIL_ON_REMOVED_MARKERS=false"
        )


class TrackerPositions:
    """
    Reads the positions of one tracker group.

    Args:
        consumer: Of the tracker's group; never subscribes.
        admin: Admin client.
        markers_topic: Markers topic.
        partition_count: Its partitions.
        timeout_ms: Bound on each call.
    """

    def __init__(
        self, consumer: Consumer, admin: AdminClient, markers_topic: str, partition_count: int, timeout_ms: int
    ) -> None:
        """Keep the clients; nothing is sent yet."""
        self._consumer = consumer
        self._admin = admin
        self._topic = markers_topic
        self._partitions = range(partition_count)
        self._timeout_s = timeout_ms / 1000

    def committed(self) -> dict[int, Position]:
        """Return the committed positions; partitions without one are left out."""
        return _positions(self._places())

    def resume_point(self) -> ResumePoint:
        """
        Return where to begin. Call it after older trackers were fenced, or the end of the log may still move under it.

        Raises:
            KafkaClientError: The broker cannot be reached in time.
        """
        first, end = self._offsets(EARLIEST), self._offsets(LATEST)
        topic_id = topic_id_of(self._admin, self._topic, self._timeout_s)
        places = self._places()
        committed = _positions(places)
        consumers = {each.partition: ConsumerOffsets.from_topic_partition(each) for each in places}
        positions, starting_offsets, removed, unexplained = {}, {}, {}, {}
        is_another = False
        for partition in self._partitions:
            position = committed.get(partition)
            if position is not None and (reason := _another(position, topic_id, end[partition])):
                logger.error(
                    "%s was deleted and created anew: %s in partition %d; reading it from its beginning",
                    self._topic, reason, partition, extra={"action": "topic_anew"},
                )  # fmt: skip
                position, is_another = None, True
            if position is None:
                position = Position(first[partition], first[partition], is_after_gap=first[partition] > 0)
            if position.is_after_gap:
                unexplained[partition] = max(position.next_offset, first[partition])
            elif position.next_offset < first[partition]:
                removed[partition] = (position.next_offset, first[partition])
            elif position.needed_offset < first[partition]:
                # Not at the beginning of the log as a rule of the group, so silence would be a loss without a word.
                logger.warning(
                    "retention removed markers %d to %d of %s[%d] that a rebuild would need; raise its retention.ms",
                    position.needed_offset, first[partition] - 1, self._topic, partition,
                )  # fmt: skip
            positions[partition] = position._replace(topic_id=topic_id)
            starting_offsets[partition] = max(position.needed_offset, first[partition])
        return ResumePoint(
            positions,
            starting_offsets,
            end,
            removed,
            is_anew=all(position.is_after_gap for position in committed.values()),
            is_another=is_another,
            topic_id=topic_id,
            unexplained=unexplained,
            consumers={partition: kept for partition, kept in consumers.items() if kept is not None},
        )

    def _places(self) -> list[TopicPartition]:
        wanted = [TopicPartition(self._topic, partition) for partition in self._partitions]
        return until_answered(
            lambda: self._consumer.committed(wanted, timeout=self._timeout_s),
            f"cannot read the committed offsets of {self._topic}",
            self._timeout_s,
        )

    def _offsets(self, spec: OffsetSpec) -> dict[int, int]:
        return offsets_of(
            self._admin, self._topic, self._partitions, spec, self._timeout_s, with_open_transactions=True
        )


def _positions(places: list[TopicPartition]) -> dict[int, Position]:
    positions = {place.partition: Position.from_topic_partition(place) for place in places}
    return {partition: position for partition, position in positions.items() if position is not None}


def _another(position: Position, topic_id: str, end: int) -> str:
    """Return why a position is of another topic of this name; empty where it is of this one."""
    if position.topic_id and topic_id and position.topic_id != topic_id:
        return f"the topic's id is {topic_id}, the tracker's group stands in {position.topic_id}"
    if position.next_offset > end:
        return f"the log ends at {end}, the tracker's group stands at {position.next_offset}"
    return ""
