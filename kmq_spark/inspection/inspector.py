"""
Inspect a queue without changing it: its topics, its groups and its messages in flight.

Rule 1: The inspector writes nothing, joins no consumer group and commits nothing.
Rule 2: A repeated inspection reads only what was appended since the last one.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Self

from kmq_spark.core.events import LoggedMarker
from kmq_spark.core.markers import Marker, MarkerType
from kmq_spark.dlq.ends import LetterEnds
from kmq_spark.errors import KafkaClientError, TopicError, WireError
from kmq_spark.inspection.cluster import Cluster
from kmq_spark.inspection.facts import (
    Backlog,
    GroupFacts,
    LogicalFacts,
    ProducersFacts,
    QueueView,
    TopicFacts,
    TrackerFacts,
)
from kmq_spark.inspection.markers_fold import MarkersFold
from kmq_spark.inspection.ready import Ready, Sent, Span, ready_of
from kmq_spark.kafka.client_errors import DENIED
from kmq_spark.kafka.log_reader import LogReader
from kmq_spark.kafka.lookups import LATEST, offsets_of, topic_id_of
from kmq_spark.kafka.positions import Heartbeat, Position
from kmq_spark.kafka.queue_topics import QueueTopics
from kmq_spark.kafka.settings import new_client_id, reader_config
from kmq_spark.producer.position_log import PARTITION, PositionLog
from kmq_spark.producer.registry import PATIENCE_S
from kmq_spark.wire.codec import decode_marker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from confluent_kafka import Message, TopicPartition

    from kmq_spark.config import Reach

MAX_LOGICAL_QUEUES = 50
"""Logical queues that are looked at: the offsets of each are a request of their own."""

MAX_COUNTED_BACKLOG = 500
"""Maximum backlog that is counted record by record. In a larger one the included control records do not matter."""

FOLD_BATCH_RECORDS = 50_000


class QueueInspector:
    """
    Inspects one queue, `queue` or `queue@subscription`.

    *timeout* bounds each call, and the arrival of the next record while a topic is read.
    """

    def __init__(
        self, queue: str, *, bootstrap_servers: str, timeout: float = 15.0, extra: Mapping[str, str] | None = None
    ) -> None:
        self.topics = QueueTopics.parse(queue)
        self.queue = queue
        self.cluster = Cluster(bootstrap_servers, timeout, extra)
        self._timeout = timeout
        # The reader joins no group and commits nothing, but librdkafka requires a group name, and ACLs may be granted
        # for it.
        self.reader_config = reader_config(
            bootstrap_servers, self.topics.tracker_group, new_client_id("inspector"), extra
        )
        self._readers: dict[str, LogReader] = {}
        self._backlogs: dict[tuple[str, int, int, int], tuple[int, int | None]] = {}
        self._ready_of: dict[int, tuple[Span, Ready]] = {}
        self._sent: dict[int, list[Sent]] = {}
        self._ended: LetterEnds | None = None
        self.folds: dict[int, MarkersFold] = {}

    def close(self) -> None:
        """Close the clients."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
        self.cluster.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def queue_partitions(self) -> range:
        """Return the partitions of the queue; a `TopicError` says that the queue does not exist."""
        counts = []
        for name in (self.topics.queue_topic, self.topics.markers_topic):
            metadata = self.cluster.metadata(name).topics.get(name)
            if metadata is None or metadata.error is not None or not metadata.partitions:
                message = (
                    f"queue {self.queue!r} does not exist: there is no topic {name!r}; see `kmq queue list`, or run "
                    f"`kmq queue create {self.queue}`"
                )
                raise TopicError(message)
            counts.append(len(metadata.partitions))
        return range(min(counts))

    def look(
        self,
        on_progress: Callable[[int], None] | None = None,
        *,
        with_markers: bool = True,
        with_members: bool = False,
        must_exist: bool = True,
    ) -> QueueView:
        """Return the queue as it is now."""
        topics = self.topics
        queue, markers, letters = self.cluster.topics(topics.all_topics).values()
        exists = bool(queue.partition_count and markers.partition_count)
        if must_exist and not exists:
            self.queue_partitions()
        consumers = GroupFacts(topics.consumer_group)
        if exists:
            consumers = self.cluster.group(topics.consumer_group, queue.name, with_members=with_members)
        ready, logical = self._ready(queue, consumers, with_members=with_members)
        view = QueueView(
            queue=self.queue,
            now_ms=0,
            queue_topic=queue,
            markers_topic=markers,
            dead_letter_topic=letters,
            consumers=consumers,
            tracker=self._tracker(markers) if exists else TrackerFacts(),
            ready=ready,
            logical=logical,
            dead_letters=self._dead_letters(letters),
        )
        folds = self.refresh(on_progress) if exists and with_markers else {}
        now_ms = int(time.time() * 1000)
        return replace(view, now_ms=now_ms, partitions={number: fold.view(now_ms) for number, fold in folds.items()})

    def refresh(self, on_progress: Callable[[int], None] | None = None) -> dict[int, MarkersFold]:
        """Fold the markers appended since the last call; the first one begins where the tracker would begin."""
        topic = self.topics.markers_topic
        if not self.folds:
            self.folds = {partition: MarkersFold() for partition in self.queue_partitions()}
            needed = {
                partition: position.needed_offset for partition, position in _positions_of(self._committed()).items()
            }
            self._reader(topic).positions = {partition: needed.get(partition, 0) for partition in self.folds}
        ends = self.cluster.offsets(topic, self.folds, LATEST)
        known = self._reader(topic).positions
        starts = {partition: known[partition] for partition, end in ends.items() if known[partition] < end}
        waiting: dict[int, list[LoggedMarker]] = {partition: [] for partition in starts}
        try:
            for number, record in enumerate(self._reader(topic).read(starts), 1):
                partition = record.partition() or 0
                waiting[partition].append(LoggedMarker(record.offset() or 0, record.timestamp()[1], _marker_of(record)))
                if len(waiting[partition]) >= FOLD_BATCH_RECORDS:
                    self.folds[partition].add(waiting[partition])
                    waiting[partition] = []
                    if on_progress is not None:
                        on_progress(number)
        finally:
            # If the broker fails in between, the markers that were read are not read again.
            for partition, markers in waiting.items():
                self.folds[partition].add(markers)
        return self.folds

    def backlog(self, topic: str, starts: Mapping[int, int], ends: Mapping[int, int]) -> Backlog:
        """
        Return the records between positions and ends. A small number is counted record by record.

        Transactions leave control records in a log, which readers do not receive. Without counting, an idle queue would
        always have a backlog.
        """
        counts: dict[int, int] = {}
        is_exact, oldest_at_ms = True, None
        for partition, start in starts.items():
            end = ends.get(partition, start)
            if start >= end:
                continue
            place = (topic, partition, start, end)
            if place not in self._backlogs:
                # Only the newest one of a partition is needed.
                self._backlogs = {each: known for each, known in self._backlogs.items() if each[:2] != place[:2]}
                self._backlogs[place] = self._counted(*place)
            counts[partition], at_ms = self._backlogs[place]
            is_exact = is_exact and end - start <= MAX_COUNTED_BACKLOG
            if at_ms is not None:
                oldest_at_ms = at_ms if oldest_at_ms is None else min(oldest_at_ms, at_ms)
        return Backlog(counts, is_exact, oldest_at_ms)

    def taking_nothing(self, view: QueueView, since_ms: int) -> dict[str, frozenset[str]]:
        """
        Return the consumers that have started nothing since an instant, though a message of their partitions
        was ready then; by logical queue, the default one by its empty name.
        """
        queue, markers = view.queue_topic, view.markers_topic
        groups = {name: each.group for name, each in view.logical.items() if each.ready and each.group is not None}
        if view.default_ready:
            groups[""] = view.consumers
        newer = self.cluster.offsets_at(queue.name, queue.end, since_ms)
        waiting: dict[str, frozenset[str]] = {}
        for name, group in groups.items():
            places = {
                at
                for at in view.ready.counts
                if group.positions.get(at, queue.first[at]) < newer.get(at, queue.end[at])
            }
            waiting[name] = frozenset(each for each, theirs in group.members.items() if theirs & places)
        if not any(waiting.values()):
            return {}
        found = self.cluster.offsets_at(markers.name, markers.end, since_ms)
        starts = {partition: offset for partition, offset in found.items() if offset < markers.end[partition]}
        since = map(_marker_of, self.records(markers.name, starts)) if starts else ()
        takers = {each.consumer_id for each in since if each is not None and each.type is MarkerType.START}
        # Workers of kafka-mq-go write other names into their markers than into their group.
        strangers = takers.difference(*(group.members for group in view.groups.values()))
        return {name: members - takers for name, members in waiting.items() if name or not strangers}

    def ready_records(self, limit: int) -> Iterator[Message]:
        """Yield at most *limit* messages that no consumer has started, one partition after the other."""
        (queue,) = self.cluster.topics([self.topics.queue_topic]).values()
        consumers = self.cluster.group(self.topics.consumer_group, queue.name, with_members=False)
        left = limit
        for partition, span in self._spans(queue, {"": consumers, **self._logical_groups(queue.name)}).items():
            start = min(span.start, span.read_from)
            if left and start < span.end:
                records = self.records(queue.name, {partition: start})
                for record in islice((each for each in records if span.is_ready(Sent.of(each))), left):
                    left -= 1
                    yield record

    def _ready(
        self, queue: TopicFacts, consumers: GroupFacts, *, with_members: bool
    ) -> tuple[Backlog, dict[str, LogicalFacts]]:
        """Return the messages that no consumer has started: all, and those of each logical queue."""
        if not queue.partition_count:
            return Backlog(), {}
        groups = self._logical_groups(queue.name, with_members=with_members)
        spans = self._spans(queue, {"": consumers, **groups})
        for partition, span in spans.items():
            if self._ready_of.get(partition, (None, None))[0] != span:
                self._ready_of[partition] = span, ready_of(span, self._newest(queue.name, partition, span))
        ready = {partition: self._ready_of[partition][1] for partition in spans}
        counts = sum((Counter(each.counts) for each in ready.values()), Counter())
        oldest = [each.oldest_at_ms for each in ready.values() if each.oldest_at_ms is not None]
        backlog = Backlog(
            {partition: sum(each.counts.values()) for partition, each in ready.items() if each.counts},
            all(each.is_exact for each in ready.values()),
            min(oldest, default=None),
        )
        names = sorted({*groups, *counts} - {""})
        return backlog, {name: LogicalFacts(counts[name], groups.get(name)) for name in names}

    def _newest(self, topic: str, partition: int, span: Span) -> list[Sent]:
        """Return the messages that are counted. Only what is new since the last look is read."""
        found = [each for each in self._sent.get(partition, ()) if each.offset >= span.read_from]
        if found and found[-1].offset >= span.end:  # the topic was created again
            found = []
        start = found[-1].offset + 1 if found else span.read_from
        if start < span.end:
            found += map(Sent.of, self.records(topic, {partition: start}))
        self._sent[partition] = found
        return found

    def _logical_groups(self, topic: str, *, with_members: bool = False) -> dict[str, GroupFacts]:
        prefix = self.topics.logical_group_prefix
        found = {}
        for group in self.cluster.groups(prefix)[:MAX_LOGICAL_QUEUES]:
            found[group.removeprefix(prefix)] = self.cluster.group(group, topic, with_members=with_members)
            self.cluster.let_go(group)
        return found

    @staticmethod
    def _spans(queue: TopicFacts, groups: Mapping[str, GroupFacts]) -> dict[int, Span]:
        return {
            partition: Span.of(
                first,
                queue.end.get(partition, first),
                {name: group.positions.get(partition, first) for name, group in groups.items()},
            )
            for partition, first in queue.first.items()
        }

    def records(self, topic: str, starts: Mapping[int, int]) -> Iterator[Message]:
        """Yield every committed record of a topic from these offsets to its end. The caller may stop before the end."""
        reader = LogReader(self.reader_config, topic, self._timeout)
        try:
            yield from reader.read(starts)
        finally:
            reader.close()

    def _tracker(self, markers: TopicFacts) -> TrackerFacts:
        """Return the tracker's positions and its latest heartbeat."""
        places = self._committed()
        positions = _positions_of(places)
        heartbeats = [each for each in map(Heartbeat.from_topic_partition, places) if each is not None]
        newest = max(heartbeats, key=lambda each: each.at_ms, default=None)
        unread = {
            partition: max(position.next_offset, markers.first[partition])
            for partition, position in positions.items()
            if position.next_offset < markers.end.get(partition, 0)
        }
        return TrackerFacts(
            {partition: each.next_offset for partition, each in positions.items()},
            {partition: each.needed_offset for partition, each in positions.items()},
            {partition: each.tracker_id for partition, each in positions.items()},
            self.backlog(markers.name, unread, markers.end),
            None if newest is None else newest.at_ms,
            newest is not None and newest.is_stopped,
            0 if newest is None else newest.snapshot_lag,
            "" if newest is None else newest.trouble,
        )

    def _dead_letters(self, letters: TopicFacts) -> Backlog:
        """Return the dead letters that were neither redriven nor purged."""
        if not letters.partition_count:
            return Backlog()
        there = self.backlog(letters.name, letters.first, letters.end)
        done = self._ended_letters(letters)
        counts = {partition: max(0, count - done.get(partition, 0)) for partition, count in there.counts.items()}
        return Backlog(counts, there.is_exact, there.oldest_at_ms)

    def _ended_letters(self, letters: TopicFacts) -> dict[int, int]:
        topic = self.topics.redrive_topic
        metadata = self.cluster.metadata(topic).topics.get(topic)
        if metadata is None or metadata.error is not None or not metadata.partitions:
            return {}
        reader = self._reader(topic)
        # Read only what was appended since the last call: the redrive topic is kept without limit.
        if self._ended is None:
            self._ended = LetterEnds(topic_id_of(self.cluster.admin, letters.name, self._timeout))
        for record in reader.read({partition: reader.positions.get(partition, 0) for partition in metadata.partitions}):
            self._ended.add(record)
        closed = self._ended.closed
        return {partition: closed.count(partition, first) for partition, first in letters.first.items()}

    def _committed(self) -> list[TopicPartition]:
        return self.cluster.committed(self.topics.tracker_group, self.topics.markers_topic)

    def _reader(self, topic: str) -> LogReader:
        if topic not in self._readers:
            self._readers[topic] = LogReader(self.reader_config, topic, self._timeout)
        return self._readers[topic]

    def _counted(self, topic: str, partition: int, start: int, end: int) -> tuple[int, int | None]:
        """Return the number of records between two offsets, and the append time of the first."""
        reader = LogReader(self.reader_config, topic, self._timeout)
        try:
            if end - start > MAX_COUNTED_BACKLOG:
                first = next(reader.read({partition: start}), None)
                return end - start, None if first is None else first.timestamp()[1]
            times = [
                record.timestamp()[1] for record in reader.read({partition: start}) if (record.offset() or 0) < end
            ]
            return len(times), min(times, default=None)
        finally:
            reader.close()


def look_at_producers(cluster: Cluster, topics: QueueTopics, reach: Reach) -> ProducersFacts | None:
    """Return what `kmq doctor` looks at; None where we may not read the topic of the positions."""
    (topic,) = cluster.topics([topics.producers_topic]).values()
    if not topic.partition_count:
        return ProducersFacts(topic)
    began_s = time.monotonic()
    (end,) = offsets_of(
        cluster.admin, topic.name, [PARTITION], LATEST, reach["timeout"], with_open_transactions=True
    ).values()
    try:
        found = PositionLog(topics, **reach).all(PATIENCE_S)
    except KafkaClientError as error:
        if error.code in DENIED:
            return None
        raise
    (stable,) = cluster.offsets(topic.name, [PARTITION], LATEST).values()
    open_ms = round(1000 * (time.monotonic() - began_s)) if stable < end else 0
    return ProducersFacts(topic, len(found), tuple(each.key for each in found if each.state is None), open_ms)


def _positions_of(places: list[TopicPartition]) -> dict[int, Position]:
    positions = {place.partition: Position.from_topic_partition(place) for place in places}
    return {partition: position for partition, position in positions.items() if position is not None}


def _marker_of(record: Message) -> Marker | None:
    try:
        return decode_marker(record.value())
    except WireError:
        return None
