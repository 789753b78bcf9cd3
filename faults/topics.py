"""
What the topics of a queue hold, as values: the checker's evidence.

Rule 1: `read_committed`: what a transaction gave up is not there.
Rule 2: a reader of its own, and names as docs/protocol.md has them: nothing of the product reads what judges it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from faults.evidence import RawRecord
from faults.protocol import (
    DELIVERY_COUNT,
    ORIGIN,
    PREVIOUS,
    LoggedMarker,
    MarkerType,
    MessageId,
    Outcome,
    decode,
    number_of,
    place_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from confluent_kafka import Consumer

    from faults.protocol import Marker, OffsetRange

Result = TypeVar("Result")

READ_TIMEOUT_S = 15.0
RETRY_PAUSE_S = 0.2


class Record(NamedTuple):
    """A message or a dead letter."""

    place: MessageId
    appended_at_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]

    def header(self, name: str) -> bytes | None:
        """Return the last header of a name."""
        return dict(self.headers).get(name)

    @property
    def origin(self) -> MessageId:
        """The first copy of this message; itself where it is that."""
        return place_of(self.header(ORIGIN)) or self.place

    @property
    def previous(self) -> MessageId | None:
        """The copy that this one follows; None for a first copy."""
        return place_of(self.header(PREVIOUS))

    @property
    def delivery_count(self) -> int:
        """Deliveries before this copy."""
        return number_of(self.header(DELIVERY_COUNT)) or 0

    @property
    def id(self) -> str:
        """The producer's name for the message: what stands before the bar in its value."""
        return (self.value or b"").partition(b"|")[0].decode("utf-8", "replace")


class NoMarker(NamedTuple):
    """A record of the markers topic that is no marker: its place, and its bytes."""

    partition: int
    offset: int
    value: bytes | None


@dataclass(slots=True)
class Dump:
    """
    The three topics of a queue.

    Attributes:
        markers: By markers partition, in log order; None as the marker of an unreadable record.
        messages: The queue topic.
        dead_letters: The dead-letter topic, records of the markers topic that were no markers left out.
        set_aside: Those.
        no_markers: Records of the markers topic that are no markers.
        results: What transactions of consumers wrote beside their ENDs.
        removed: Messages that were read before their records were removed from the queue topic.
        injected: Markers that the injector wrote: markers partition, marker offset.
        queue_topic: Name.
        markers_topic: Name.
    """

    markers: dict[int, list[LoggedMarker]] = field(default_factory=dict)
    messages: list[Record] = field(default_factory=list)
    dead_letters: list[Record] = field(default_factory=list)
    set_aside: list[Record] = field(default_factory=list)
    no_markers: list[NoMarker] = field(default_factory=list)
    results: list[Record] = field(default_factory=list)
    removed: set[MessageId] = field(default_factory=set)
    injected: set[tuple[int, int]] = field(default_factory=set)
    queue_topic: str = ""
    markers_topic: str = ""


def topics_of(queue: str) -> tuple[str, str, str]:
    """Return the names of a queue's markers topic, queue topic and dead-letter topic."""
    return f"{queue}.markers", queue, f"{queue}.dlq"


def results_of(queue: str) -> str:
    """Return the name of the topic that takes the results of a queue's consumers."""
    return f"{queue}.results"


def read_dump(queue: str, bootstrap_servers: str, keep: Callable[[RawRecord], None] | None = None) -> Dump:
    """
    Read the topics of a queue from beginning to end.

    Args:
        queue: Queue.
        bootstrap_servers: Broker.
        keep: Is given every record as it is read.
    """

    def records() -> Iterator[RawRecord]:
        for topic in (*topics_of(queue), results_of(queue)):
            for record in read_topic(topic, bootstrap_servers, may_be_missing=topic == results_of(queue)):
                if keep is not None:
                    keep(record)
                yield record

    return dump_of(records(), queue)


def read_topic(topic: str, bootstrap_servers: str, *, may_be_missing: bool = False) -> Iterator[RawRecord]:
    """
    Read every committed record of a topic, up to where it ends now.

    A commit returns to its client before the partitions have its control record. Up to then a reader of committed
    records does not see that transaction, so this one waits for the end that a reader of all records sees.

    Raises:
        KafkaException: There is no such topic, or the broker cannot be reached.
        TimeoutError: Nothing came for a while before the end.
    """
    # Judging evidence needs no broker.
    from confluent_kafka import Consumer, KafkaError, TopicPartition  # noqa: PLC0415

    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": f"{topic}.checker",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
            "check.crcs": True,
            "log_level": 3,
        }
    )
    try:
        partitions = patiently(partial(_partitions, consumer, topic, may_be_missing=may_be_missing))
        ends = patiently(partial(_ends, topic, partitions, bootstrap_servers))
        consumer.assign([TopicPartition(topic, partition, 0) for partition in ends])
        unread, held_up = set(ends), set[int]()
        while unread:
            # `consume` waits until it has all that it was asked for: ask for one, then for what is there.
            messages = consumer.consume(1, READ_TIMEOUT_S)
            if not messages and unread <= held_up:
                # What follows belongs to a transaction that a killed process left open.
                return
            if not messages:
                message = f"cannot read {topic} to its end: got nothing for {READ_TIMEOUT_S:g} s; check the broker"
                raise TimeoutError(message)
            for each in messages + consumer.consume(1_000, 0):
                error = each.error()
                if error is None:
                    yield RawRecord.of(each)
                elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001  # librdkafka's public name for it
                    partition, offset = each.partition() or 0, each.offset() or 0
                    held_up.add(partition)
                    if offset >= ends[partition]:
                        unread.discard(partition)
                # Other errors pass by themselves, or the time-out above names them.
    finally:
        consumer.close()


def patiently(call: Callable[[], Result]) -> Result:
    """Try a call again for a while: a broker that has just begun answers that it leads no partition yet."""
    from confluent_kafka import KafkaException  # noqa: PLC0415  # judging evidence needs no broker

    give_up_s = time.monotonic() + READ_TIMEOUT_S
    while True:
        try:
            return call()
        except KafkaException:
            if time.monotonic() > give_up_s:
                raise
            time.sleep(RETRY_PAUSE_S)


def _partitions(consumer: Consumer, topic: str, *, may_be_missing: bool) -> list[int]:
    """Return the partitions of a topic; none where it may be missing and is."""
    from confluent_kafka import KafkaError, KafkaException  # noqa: PLC0415  # judging evidence needs no broker

    metadata = consumer.list_topics(topic, READ_TIMEOUT_S).topics[topic]
    if metadata.error is None:
        return list(metadata.partitions)
    if may_be_missing and metadata.error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
        return []
    raise KafkaException(metadata.error)


def _ends(topic: str, partitions: Iterable[int], bootstrap_servers: str) -> dict[int, int]:
    """Return the end offset of each partition, open transactions included."""
    from confluent_kafka import Consumer, TopicPartition  # noqa: PLC0415  # judging evidence needs no broker

    config = {"bootstrap.servers": bootstrap_servers, "group.id": f"{topic}.checker", "log_level": 3}
    consumer = Consumer({**config, "isolation.level": "read_uncommitted"})
    try:
        return {
            each: consumer.get_watermark_offsets(TopicPartition(topic, each), timeout=READ_TIMEOUT_S)[1]
            for each in partitions
        }
    finally:
        consumer.close()


def dump_of(records: Iterable[RawRecord], queue: str) -> Dump:
    """Return what the records of a queue's topics say."""
    markers_topic, queue_topic, dead_letter_topic = topics_of(queue)
    dump = Dump(queue_topic=queue_topic, markers_topic=markers_topic)
    by_partition: defaultdict[int, list[LoggedMarker]] = defaultdict(list)
    for raw in records:
        if raw.topic == markers_topic:
            logged = LoggedMarker(raw.offset, raw.timestamp_ms, decode(raw.value))
            by_partition[raw.partition].append(logged)
            if logged.marker is None:
                dump.no_markers.append(NoMarker(raw.partition, raw.offset, raw.value))
        elif raw.topic == queue_topic:
            dump.messages.append(_record(raw))
        elif raw.topic == dead_letter_topic:
            record = _record(raw)
            (dump.set_aside if record.previous is None else dump.dead_letters).append(record)
        elif raw.topic == results_of(queue):
            dump.results.append(_record(raw))
    dump.markers = {partition: by_partition[partition] for partition in sorted(by_partition)}
    return dump


def without(dump: Dump, markers: Collection[tuple[int, int]]) -> None:
    """
    Take hostile markers out of a dump, so that it reads as if they had not been written.

    The tracker's answer to a START of messages that never existed goes with it: an END, EXPIRED, of nothing else. A
    record that is taken out leaves its offset and its append time.

    Args:
        dump: Topics.
        markers: Markers partition and marker offset of each hostile marker.
    """
    ends: defaultdict[int, int] = defaultdict(int)
    for record in dump.messages:
        ends[record.place.queue_partition] = max(ends[record.place.queue_partition], record.place.message_offset + 1)
    for partition, log in dump.markers.items():
        hostile = {offset for place, offset in markers if place == partition}
        started: list[tuple[int, OffsetRange]] = []
        kept: list[LoggedMarker] = []
        for logged in log:
            marker, is_out = logged.marker, logged.marker_offset in hostile
            if is_out and marker is not None and marker.type is MarkerType.START:
                started += [(marker.queue_partition, each) for each in marker.ranges]
            elif marker is not None and marker.type is MarkerType.END and marker.outcome is Outcome.EXPIRED:
                is_out = is_out or _is_of(marker, started, ends[marker.queue_partition])
            kept.append(logged._replace(marker=None) if is_out else logged)
        dump.markers[partition] = kept


def _is_of(marker: Marker, started: Iterable[tuple[int, OffsetRange]], end: int) -> bool:
    """Return whether all messages of a marker lie past the topic's end, and inside the ranges that were started."""
    ranges = [each for queue_partition, each in started if queue_partition == marker.queue_partition]
    return all(
        first >= end and any(begin <= first and first + size <= begin + many for begin, many in ranges)
        for first, size in marker.ranges
    )


def _record(raw: RawRecord) -> Record:
    return Record(MessageId(raw.partition, raw.offset), raw.timestamp_ms, raw.key, raw.value, raw.headers)
