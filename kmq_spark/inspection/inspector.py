"""
Inspect a queue without changing it: its topics, its groups and its messages in flight.

Rule 1: The inspector writes nothing, joins no consumer group and commits nothing.
Rule 2: A repeated inspection reads only what was appended since the last one.
"""

from __future__ import annotations

import time
from itertools import islice
from typing import TYPE_CHECKING, Self

from kmq_spark.core.closed import ClosedRanges
from kmq_spark.core.events import LoggedMarker
from kmq_spark.core.markers import MarkerType
from kmq_spark.errors import TopicError, WireError
from kmq_spark.inspection.cluster import Cluster
from kmq_spark.inspection.facts import Backlog, TopicFacts, TrackerFacts
from kmq_spark.inspection.figures import Figures, figures
from kmq_spark.inspection.view import MarkersView
from kmq_spark.kafka.log_reader import LogReader
from kmq_spark.kafka.lookups import LATEST
from kmq_spark.kafka.positions import Heartbeat, Position
from kmq_spark.kafka.queue_topics import QueueTopics
from kmq_spark.kafka.settings import new_client_id, reader_config
from kmq_spark.wire.codec import decode_marker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from confluent_kafka import Message, TopicPartition

    from kmq_spark.core.markers import Marker

MAX_COUNTED_BACKLOG = 500
"""Maximum backlog that is counted record by record. In a larger one the included control records do not matter."""

FOLD_BATCH_RECORDS = 50_000


class QueueInspector:
    """
    Inspects one queue.

    Args:
        queue: Name of the queue, or `queue@subscription`.
        bootstrap_servers: Comma-separated `host:port`.
        timeout: Maximum time for each call, and for the arrival of the next record while a topic is read.
        extra: librdkafka settings.

    Raises:
        ConfigError: The name or a setting is not allowed.
    """

    def __init__(
        self, queue: str, *, bootstrap_servers: str, timeout: float = 15, extra: Mapping[str, str] | None = None
    ) -> None:
        """Create the clients; they send nothing before the first call."""
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
        self._ended = ClosedRanges()
        self.views: dict[int, MarkersView] = {}

    def close(self) -> None:
        """Close the clients."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
        self.cluster.close()

    def __enter__(self) -> Self:
        """Return this inspector."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the clients."""
        self.close()

    def queue_partitions(self) -> range:
        """
        Return the partitions of the queue, after a check that the queue exists.

        Raises:
            TopicError: The queue topic or the markers topic does not exist.
            KafkaClientError: The broker cannot be reached in time.
        """
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

    def tracker(self, markers: TopicFacts) -> TrackerFacts:
        """
        Return the tracker's positions and its latest heartbeat.

        Args:
            markers: Present facts about the markers topic.

        Raises:
            KafkaClientError: The broker cannot be reached in time.
        """
        places = self._committed()
        positions = _positions_of(places)
        heartbeats = [each for each in map(Heartbeat.from_topic_partition, places) if each is not None]
        newest = max(heartbeats, key=lambda each: each.at_ms, default=None)
        unread = {
            partition: (position.next_offset, markers.end[partition])
            for partition, position in positions.items()
            if position.next_offset < markers.end.get(partition, 0)
        }
        backlog = self.backlog(
            markers.name, {p: max(at, markers.first[p]) for p, (at, _) in unread.items()}, markers.end
        )
        return TrackerFacts(
            self.topics.tracker_group,
            {partition: each.next_offset for partition, each in positions.items()},
            {partition: each.needed_offset for partition, each in positions.items()},
            {partition: each.tracker_id for partition, each in positions.items()},
            backlog.count,
            backlog.oldest_at_ms,
            None if newest is None else newest.at_ms,
            newest is not None and newest.is_stopped,
            0 if newest is None else newest.snapshot_lag,
        )

    def refresh(self, on_progress: Callable[[int], None] | None = None) -> dict[int, MarkersView]:
        """
        Fold the markers appended since the last call. The first call begins where the tracker would begin.

        Args:
            on_progress: Progress callback; called from time to time with the number of markers read so far.

        Raises:
            TopicError: The queue does not exist.
            KafkaClientError: The broker cannot be reached, or nothing arrived in time.
        """
        topic = self.topics.markers_topic
        if not self.views:
            self.views = {partition: MarkersView() for partition in self.queue_partitions()}
            needed = {partition: position.needed_offset for partition, position in self._positions().items()}
            self._reader(topic).positions = {partition: needed.get(partition, 0) for partition in self.views}
        ends = self.cluster.offsets(topic, self.views, LATEST)
        known = self._reader(topic).positions
        starts = {partition: known[partition] for partition, end in ends.items() if known[partition] < end}
        waiting: dict[int, list[LoggedMarker]] = {partition: [] for partition in starts}
        try:
            for number, record in enumerate(self._reader(topic).read(starts), 1):
                partition = record.partition() or 0
                waiting[partition].append(LoggedMarker(record.offset() or 0, record.timestamp()[1], _marker_of(record)))
                if len(waiting[partition]) >= FOLD_BATCH_RECORDS:
                    self.views[partition].add(waiting[partition])
                    waiting[partition] = []
                    if on_progress is not None:
                        on_progress(number)
        finally:
            # If the broker fails in between, the markers that were read are not read again.
            for partition, markers in waiting.items():
                self.views[partition].add(markers)
        return self.views

    def backlog(self, topic: str, starts: Mapping[int, int], ends: Mapping[int, int]) -> Backlog:
        """
        Return the number of records between positions and ends. A small number is counted record by record.

        Transactions leave control records in a log, which readers do not receive. Without counting, an idle queue would
        always have a backlog.

        Args:
            topic: Topic.
            starts: Position by partition; a partition without one has no backlog.
            ends: End by partition.

        Raises:
            KafkaClientError: The broker cannot be reached, or nothing arrived in time.
        """
        count, is_exact, oldest_at_ms = 0, True, None
        for partition, start in starts.items():
            end = ends.get(partition, start)
            if start >= end:
                continue
            place = (topic, partition, start, end)
            if place not in self._backlogs:
                self._drop_cached(topic, partition)
                self._backlogs[place] = self._counted(topic, partition, start, end)
            counted, at_ms = self._backlogs[place]
            count += counted
            is_exact = is_exact and end - start <= MAX_COUNTED_BACKLOG
            if at_ms is not None:
                oldest_at_ms = at_ms if oldest_at_ms is None else min(oldest_at_ms, at_ms)
        return Backlog(count, is_exact, oldest_at_ms)

    def ready(self, queue: TopicFacts, positions: Mapping[int, int]) -> Backlog:
        """
        Return the messages that no consumer has started. In a partition without a committed position, that is all
        messages.
        """
        starts = {partition: max(positions.get(partition, first), first) for partition, first in queue.first.items()}
        return self.backlog(queue.name, starts, queue.end)

    def dead_letters(self, letters: TopicFacts) -> Backlog:
        """Return the dead letters that were neither redriven nor purged."""
        if not letters.partition_count:
            return Backlog()
        all_letters = self.backlog(letters.name, letters.first, letters.end)
        done = self._ended_letters(letters)
        return Backlog(max(0, all_letters.count - done), all_letters.is_exact, all_letters.oldest_at_ms)

    def figures(self, on_progress: Callable[[int], None] | None = None) -> Figures:
        """
        Return the key figures of the queue.

        Raises:
            TopicError: The queue does not exist.
            KafkaClientError: The broker cannot be reached, or nothing arrived in time.
        """
        views = self.refresh(on_progress)
        facts = self.cluster.topics(self.topics.all_topics)
        queue, markers, letters = (facts[name] for name in self.topics.all_topics)
        if not queue.partition_count or not markers.partition_count:
            # A broker that starts does not know its topics for a moment: raise an error instead of returning zeros.
            self.queue_partitions()
        positions = {p.partition: p.offset for p in self.cluster.committed(self.topics.consumer_group, queue.name)}
        tracker = self._positions()
        lag = self.backlog(markers.name, {p: at.next_offset for p, at in tracker.items()}, markers.end)
        return figures(
            self.queue,
            int(time.time() * 1000),
            views.values(),
            ready=self.ready(queue, positions),
            dead_letters=self.dead_letters(letters),
            tracker_lag=lag.count if tracker else sum(markers.end.values()),
        )

    def ready_records(self, limit: int) -> Iterator[Message]:
        """Yield at most *limit* messages that no consumer has started, one partition after the other."""
        (queue,) = self.cluster.topics([self.topics.queue_topic]).values()
        committed = self.cluster.committed(self.topics.consumer_group, queue.name)
        positions = {place.partition: place.offset for place in committed}
        left = limit
        for partition, first in queue.first.items():
            start = max(positions.get(partition, first), first)
            if left and start < queue.end[partition]:
                for record in islice(self.records(queue.name, {partition: start}), left):
                    left -= 1
                    yield record

    def records(self, topic: str, starts: Mapping[int, int]) -> Iterator[Message]:
        """Yield every committed record of a topic from these offsets to its end. The caller may stop before the end."""
        reader = LogReader(self.reader_config, topic, self._timeout)
        try:
            yield from reader.read(starts)
        finally:
            reader.close()

    def _positions(self) -> dict[int, Position]:
        return _positions_of(self._committed())

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

    def _drop_cached(self, topic: str, partition: int) -> None:
        """Remove the cached backlogs of a partition: only the newest one is needed."""
        for place in [place for place in self._backlogs if place[:2] == (topic, partition)]:
            del self._backlogs[place]

    def _ended_letters(self, letters: TopicFacts) -> int:
        topic = self.topics.redrive_topic
        metadata = self.cluster.metadata(topic).topics.get(topic)
        if metadata is None or metadata.error is not None or not metadata.partitions:
            return 0
        reader = self._reader(topic)
        # Read only what was appended since the last call: the redrive topic is kept without limit.
        for record in reader.read({partition: reader.positions.get(partition, 0) for partition in metadata.partitions}):
            marker = _marker_of(record)
            if marker is not None and marker.type is MarkerType.END:
                self._ended.add(marker.queue_partition, marker.ranges)
        return sum(self._ended.count(partition, first) for partition, first in letters.first.items())


def _positions_of(places: list[TopicPartition]) -> dict[int, Position]:
    positions = {place.partition: Position.from_topic_partition(place) for place in places}
    return {partition: position for partition, position in positions.items() if position is not None}


def _marker_of(record: Message) -> Marker | None:
    try:
        return decode_marker(record.value())
    except WireError:
        return None
