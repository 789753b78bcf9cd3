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
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from confluent_kafka import TopicPartition

from kmq_spark.core.policy import QueueRules
from kmq_spark.errors import KmqError
from kmq_spark.kafka.client_errors import until_answered
from kmq_spark.kafka.lookups import EARLIEST, LATEST, offsets_of
from kmq_spark.wire.marker_log import Signing
from kmq_spark.wire.signature import new_key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from confluent_kafka import Consumer
    from confluent_kafka.admin import AdminClient, OffsetSpec

logger = logging.getLogger(__name__)

METADATA_VERSION = 1


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
    """

    next_offset: int
    needed_offset: int
    tracker_id: str = ""
    aside_offset: int = 0
    rules: QueueRules | None = None
    signing: Signing = Signing()

    @property
    def set_aside_to(self) -> int:
        """First marker offset whose record may be set aside: all below were."""
        return max(self.next_offset, self.aside_offset)

    def to_topic_partition(self, topic: str, partition: int) -> TopicPartition:
        """Return the form in which it is committed."""
        metadata: dict[str, Any] = {"v": METADATA_VERSION, "needed": self.needed_offset, "by": self.tracker_id}
        if self.aside_offset > self.next_offset:
            metadata["aside"] = self.aside_offset
        if self.rules is not None:
            metadata["rules"] = self.rules.to_dict()
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
            return cls(committed.offset, needed_offset, tracker_id, aside_offset, rules, signing)
        except (ValueError, TypeError, KeyError):
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
        is_anew: Whether no tracker has signed for this topic, or one has signed for a longer one: with a topic Kafka
            deletes the offsets of its groups. A checkpoint from before is of another topic.
    """

    positions: Mapping[int, Position]
    starting_offsets: Mapping[int, int]
    decide_from: Mapping[int, int]
    removed: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    is_anew: bool = False

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

    def check_nothing_removed(self, topic: str) -> None:
        """
        Look that every marker was folded before it was removed.

        Raises:
            KmqError: Some were not; the message says how to go on without them.
        """
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
        wanted = [TopicPartition(self._topic, partition) for partition in self._partitions]
        found = until_answered(
            lambda: self._consumer.committed(wanted, timeout=self._timeout_s),
            f"cannot read the committed offsets of {self._topic}",
            self._timeout_s,
        )
        positions = {each.partition: Position.from_topic_partition(each) for each in found}
        return {partition: position for partition, position in positions.items() if position is not None}

    def resume_point(self) -> ResumePoint:
        """
        Return where to begin. Call it after older trackers were fenced, or the end of the log may still move under it.

        Raises:
            KafkaClientError: The broker cannot be reached in time.
        """
        first, end = self._offsets(EARLIEST), self._offsets(LATEST)
        committed = self.committed()
        positions, starting_offsets, removed, is_anew = {}, {}, {}, not committed
        for partition in self._partitions:
            position = committed.get(partition)
            if position is not None and position.next_offset > end[partition]:
                logger.error(
                    "%s[%d] ends at %d but the tracker's group stands at %d: the topic was created anew; "
                    "reading it from its beginning",
                    self._topic, partition, end[partition], position.next_offset,
                )  # fmt: skip
                position, is_anew = None, True
            if position is None:
                position = Position(first[partition], first[partition])
            elif position.next_offset < first[partition]:
                removed[partition] = (position.next_offset, first[partition])
            elif position.needed_offset < first[partition]:
                # Not at the beginning of the log as a rule of the group, so silence would be a loss without a word.
                logger.warning(
                    "retention removed markers %d to %d of %s[%d] that a rebuild would need; raise its retention.ms",
                    position.needed_offset, first[partition] - 1, self._topic, partition,
                )  # fmt: skip
            positions[partition] = position
            starting_offsets[partition] = max(position.needed_offset, first[partition])
        return ResumePoint(positions, starting_offsets, end, removed, is_anew)

    def _offsets(self, spec: OffsetSpec) -> dict[int, int]:
        return offsets_of(
            self._admin, self._topic, self._partitions, spec, self._timeout_s, with_open_transactions=True
        )
