"""
What others have started behind the committed offset of a group, or where it has none: it is not started again.

A consumer that is killed or removed after a START leaves messages behind the committed offset. They are done, or the
tracker redelivers them; started again, such a message would be handled twice, and have two results. With each offset
the group has the place in the markers topic from which on their STARTs lie.

A group without committed offset is new, or its offsets have expired (KIP-211): Kafka deletes those of a group that has
had no members for `offsets.retention.minutes`, and logs nothing. The consumer then reads the topic from its beginning.

Rule 1: without committed offset, the consumer skips what was started, as far as the last START goes.
Rule 2: it commits no offset of the partition before that; a later start in the middle could not use the markers.
Rule 3: an offset that is committed in the middle of what others have started keeps its place in the markers topic.
Rule 4: if the markers have been deleted, the consumer raises an error that names the command to run.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from functools import cached_property
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka import Message as KafkaMessage
from confluent_kafka.admin import AdminClient, OffsetSpec

from kmq_spark.consumer.admission import SKIPPED, Verdict
from kmq_spark.consumer.offsets import OF_TOPIC
from kmq_spark.core.markers import Marker, MarkerType, OffsetRange
from kmq_spark.core.ranges import join_ranges
from kmq_spark.errors import KmqError, TopicError, WireError
from kmq_spark.kafka.client_errors import client_error
from kmq_spark.kafka.log_reader import read_committed
from kmq_spark.kafka.lookups import EARLIEST, LATEST, offsets_of, topic_id_of
from kmq_spark.kafka.settings import admin_config, make_client, reader_config
from kmq_spark.wire.codec import decode_marker

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kmq_spark.consumer.admission import Admission
    from kmq_spark.consumer.fetcher import Fetcher
    from kmq_spark.consumer.marker_producer import MarkerProducer
    from kmq_spark.kafka.queue_topics import QueueTopics

logger = logging.getLogger(__name__)

TIMEOUT_S = 10.0

CLOCK_MARGIN_MS = 1_000
"""A START may be this much older than its message (two brokers). Older ones belong to an earlier topic of this name."""

READ_BEFORE_MS = 60_000
"""STARTs are read from so long before a message on: the first one of the next partition may be a little older."""

_PARTITION = KafkaMessage.partition


class History:
    """`unproven`: partitions without a committed offset in which messages that were started may still come."""

    def __init__(
        self,
        group: str,
        topics: QueueTopics,
        bootstrap_servers: str,
        extra: Mapping[str, str] | None,
        *,
        markers: MarkerProducer,
        consumer_id: str,
    ) -> None:
        self.unproven: set[int] = set()
        self._markers = markers
        self._consumer_id = consumer_id
        # What others have started, and all below the committed offset, by queue partition: ascending, no overlaps.
        self._behind: dict[int, list[OffsetRange]] = {}
        # The same, and what was in `unproven`, where a batch has passed it.
        self._passed: dict[int, list[OffsetRange]] = {}
        self._proven: set[int] = set()
        self._group = group
        self._topics = topics
        self._servers = bootstrap_servers
        self._extra = extra
        # The ends of a queue partition without a committed offset, and of its markers: behind our own record.
        self._ends: dict[int, int] = {}
        self._marker_ends: dict[int, int] = {}
        # From which message on none was started, by queue partition, where it is known.
        self._new_from: dict[int, int] = {}
        self._since_ms = self._read_from_ms = float("inf")
        self._is_complete = True
        # The STARTs that were read: append time, queue partition, what they cover.
        self._starts: list[tuple[int, int, tuple[OffsetRange, ...]]] = []
        # What was started, by queue partition: ascending, without overlaps.
        self._started: dict[int, list[OffsetRange]] = {}

    def concerns(self, records: Sequence[KafkaMessage]) -> bool:
        """Return whether records must pass `without_started`."""
        partitions = self.unproven | self._behind.keys()
        return bool(partitions) and not partitions.isdisjoint(map(_PARTITION, records))

    def look(self, fetcher: Fetcher) -> dict[int, int]:
        """
        Find out what was started in newly assigned partitions behind their committed offsets, and empty `unchecked`.

        Where the committed offset is of an earlier topic of this name, it is replaced. Return these partitions with
        the offsets from which to fetch them.

        Raises:
            TopicError: The topic is not the one that this consumer has read until now.
            KafkaClientError: The markers cannot be written or read.
        """
        topic, partitions = self._topics.queue_topic, fetcher.unchecked
        self._forget(partitions)
        metadata = self._metadata(fetcher.offsets.metadata)
        fetcher.offsets.metadata = metadata
        try:
            places = [TopicPartition(topic, each) for each in sorted(partitions)]
            found = [each for each in fetcher.client.committed(places, TIMEOUT_S) if each.error is None]
            other = {each.partition for each in found if metadata and _is_other(each.metadata, metadata)}
            missing = {each.partition for each in found if each.offset < 0}
            ends = self._markers.append_own([each.partition for each in found], TIMEOUT_S, self._consumer_id)
            begun = self._begin(missing | other, ends) if missing | other else {}
            first = {each: begun[each] for each in other}
            known = {each.partition: each for each in found if each.partition not in missing | other}
            fetcher.offsets.starts_from |= self._look_behind(known, ends)
            # With these the fetcher can ask whether it is still a member.
            fetcher.offsets.positions = {each: of.offset for each, of in known.items()} | fetcher.offsets.positions
            if first:
                begins = [TopicPartition(topic, each, at, metadata) for each, at in first.items()]
                fetcher.client.commit(offsets=begins, asynchronous=False)
        except KafkaException as error:
            raise client_error(error, f"cannot read the committed offsets of {self._group}") from error
        if first:
            logger.warning(
                "%s was deleted and created again: consumer group %s begins anew in partitions %s",
                topic, self._group, sorted(first), extra={"action": "topic_created_again"},
            )  # fmt: skip
        partitions.clear()
        return first

    def _look_behind(
        self, committed: Mapping[int, TopicPartition], ends: Mapping[int, tuple[int, int]]
    ) -> dict[int, int]:
        """Read the STARTs that may be behind these offsets, up to a record of our own; return from where on."""
        places = {each: at for each, of in committed.items() if (at := _place_in(of.metadata)) is not None}
        found: dict[int, list[OffsetRange]] = {each: [] for each in places}
        for record in read_committed(
            self._reader_config,
            self._topics.markers_topic,
            places,
            TIMEOUT_S,
            starts=places,
            ends={each: ends[each][0] + 1 for each in places},
        ):
            marker = _start_of(record)
            if marker is not None and marker.queue_partition in found:
                position = committed[marker.queue_partition].offset
                found[marker.queue_partition] += [each for each in marker.ranges if sum(each) > position]
        for partition, ranges in found.items():
            # Below the offset, too: this consumer may have fetched before it slept, and another one has gone on.
            self._behind[partition] = _joined([OffsetRange(0, committed[partition].offset), *ranges])
            if not (count := sum(count for _, count in _joined(ranges))):
                continue
            logger.info(
                "%d message(s) of partition %d of %s were started before and not committed; the tracker redelivers "
                "those that are not done", count, partition, self._topics.queue_topic,
                extra={"action": "started_by_others"},
            )  # fmt: skip
        return places

    def starts_from(self, next_offsets: Mapping[int, int]) -> dict[int, int]:
        """
        Return from which marker on lies what will be started behind these offsets, and forget what they have passed.

        To be called before the messages up to these offsets are started.
        """
        for partition, offset in next_offsets.items():
            if partition in self._behind and offset >= sum(self._behind[partition][-1]):
                self._passed[partition] = self._behind.pop(partition)
            if partition in self.unproven and offset >= self._new_from.get(partition, offset + 1):
                self.unproven.discard(partition)
                self._proven.add(partition)
        if not self.unproven:
            self._starts.clear()
        known = {each: self._markers.last_offset(each) for each in next_offsets.keys() - self._behind.keys()}
        return {each: at for each, at in known.items() if at >= 0}

    def _metadata(self, known: str) -> str:
        topic = self._topics.queue_topic
        topic_id = topic_id_of(self._admin, topic, TIMEOUT_S)
        metadata = f"{OF_TOPIC}{topic_id}" if topic_id else known
        if known not in {"", metadata}:
            raise TopicError(
                f"{topic} was deleted and created again: got topic id {topic_id}; expected {known[len(OF_TOPIC) :]} / "
                "create a new consumer, what this one holds is gone"
            )
        return metadata

    def without_started(self, records: Sequence[KafkaMessage], admissions: Sequence[Admission]) -> list[Admission]:
        """Return the verdicts; messages that were started before are skipped."""
        found = list(admissions)
        for index, record in enumerate(records):
            partition: Any = record.partition()
            offset: Any = record.offset()
            if partition in self._behind and _is_in(self._behind[partition], offset):
                found[index] = SKIPPED
            if partition not in self.unproven:
                continue
            is_ours, end = admissions[index].verdict is not Verdict.SKIP, self._ends[partition]
            if offset >= self._new_from.get(partition, offset + 1):
                continue
            if is_ours and self._is_started(partition, offset, record.timestamp()[1]):
                found[index] = SKIPPED
            elif partition not in self._new_from and (is_ours or offset + 1 >= end):
                self._new_from[partition] = max(offset, min(end, self._end_of_started(partition)))
        return found

    def reopen(self) -> None:
        """Compare all records again: what was fetched is fetched again, perhaps from where others had started it."""
        self._behind |= self._passed
        self.unproven |= self._proven

    def _forget(self, partitions: set[int]) -> None:
        self.unproven -= partitions
        self._proven -= partitions
        for partition in partitions:
            for known in (self._behind, self._passed, self._new_from):
                known.pop(partition, None)

    def _begin(self, missing: set[int], ends: Mapping[int, tuple[int, int]]) -> dict[int, int]:
        topics = self._topics
        first, end = (self._offsets(topics.queue_topic, missing, spec) for spec in (EARLIEST, LATEST))
        # Without a marker ahead of our own nothing was started: the group is new.
        if any(own for own, _ in ends.values()):
            self.unproven |= missing
        self._ends |= end
        self._marker_ends |= {each: ends[each][0] + 1 for each in missing}
        self._since_ms = self._read_from_ms = float("inf")
        logger.info(
            "consumer group %s has no committed offsets of %s in partitions %s: it begins with the first message that "
            "was never started", self._group, topics.queue_topic, sorted(missing),
            extra={"action": "no_committed_offsets"},
        )  # fmt: skip
        return first

    def _is_started(self, partition: int, offset: int, appended_at_ms: int) -> bool:
        if appended_at_ms < self._since_ms:
            self._extend(appended_at_ms)
        ranges = self._started.get(partition, [])
        if _is_in(ranges, offset):
            return True
        if not self._is_complete:
            topic = self._topics.queue_topic
            raise KmqError(
                f"cannot tell whether message {partition}:{offset} of {topic} was delivered before: consumer group "
                f"{self._group} has no committed offset, and the markers of its time are removed; stop its consumers "
                f"and run kafka-consumer-groups.sh --group {self._group} --topic {topic} --reset-offsets --execute, "
                "with --to-earliest to deliver all messages again or --to-latest to skip them"
            )
        return False

    def _end_of_started(self, partition: int) -> int:
        """Return the offset behind all that was started. A deferral is written before the STARTs of its batch."""
        return sum(self._started[partition][-1]) if self._started.get(partition) else 0

    def _extend(self, since_ms: int) -> None:
        """Take the STARTs from an instant on, up to a record of our own: a START is appended after its message."""
        first, end = self._marker_offsets(EARLIEST), self._marker_offsets(LATEST)

        def since(at_ms: int) -> dict[int, int]:
            found = self._marker_offsets(OffsetSpec.for_timestamp(max(0, at_ms)))
            return {each: at if at >= 0 else end[each] for each, at in found.items()}

        self._is_complete = all(not first[each] or at > first[each] for each, at in since(since_ms).items())
        if since_ms - CLOCK_MARGIN_MS < self._read_from_ms:
            self._read_from_ms = since_ms - READ_BEFORE_MS
            self._read(since(since_ms - READ_BEFORE_MS))
        ranges: dict[int, list[OffsetRange]] = {each: [] for each in self._ends}
        for at_ms, partition, covered in self._starts:
            if at_ms >= since_ms - CLOCK_MARGIN_MS and partition in ranges:
                ranges[partition] += covered
        self._started = {each: _joined(found) for each, found in ranges.items()}
        self._since_ms = since_ms

    def _read(self, starts: Mapping[int, int]) -> None:
        """Read the STARTs from these marker offsets on."""
        self._starts.clear()
        topic, ends = self._topics.markers_topic, self._marker_ends
        for record in read_committed(self._reader_config, topic, starts, TIMEOUT_S, starts=starts, ends=ends):
            if (marker := _start_of(record)) is not None:
                self._starts.append((record.timestamp()[1], marker.queue_partition, marker.ranges))

    def _marker_offsets(self, spec: OffsetSpec) -> dict[int, int]:
        return self._offsets(self._topics.markers_topic, self._marker_ends, spec)

    def _offsets(self, topic: str, partitions: Iterable[int], spec: OffsetSpec) -> dict[int, int]:
        return offsets_of(self._admin, topic, partitions, spec, TIMEOUT_S, with_open_transactions=True)

    @cached_property
    def _reader_config(self) -> dict[str, Any]:
        # A START is in no transaction, and may be above one that is open.
        return reader_config(self._servers, self._group, extra=self._extra) | {"isolation.level": "read_uncommitted"}

    @cached_property
    def _admin(self) -> AdminClient:
        return make_client(AdminClient, admin_config(self._servers, extra=self._extra))


def _is_other(found: str | None, metadata: str) -> bool:
    """Return whether an offset is of another topic. Who commits by other means says nothing about it."""
    return found is not None and found.startswith(OF_TOPIC) and found.split()[:2] != metadata.split()


def _place_in(metadata: str | None) -> int | None:
    """Return the place in the markers topic that was committed with an offset; None if its writer gave none."""
    place = (metadata or "").removeprefix(OF_TOPIC).partition(" ")[2]
    return int(place) if place.isdecimal() else None


def _start_of(record: KafkaMessage) -> Marker | None:
    try:
        marker = decode_marker(record.value())
    except WireError:
        return None
    return marker if marker.type is MarkerType.START else None


def _joined(ranges: Iterable[OffsetRange]) -> list[OffsetRange]:
    return list(chain.from_iterable(join_ranges(ranges)))


def _is_in(ranges: Sequence[OffsetRange], offset: int) -> bool:
    place = bisect_right(ranges, offset, key=itemgetter(0))
    return place > 0 and offset < sum(ranges[place - 1])
