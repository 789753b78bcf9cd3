"""
What the topics of a queue hold: half of the checker's evidence; the other half are event files.

Rule 1: `read_committed`: what a transaction gave up is not there.
Rule 2: a reader of its own: of the product it uses the codec of markers and the names of headers alone.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from kmq_spark.core.events import LoggedMarker
from kmq_spark.core.markers import MarkerType, MessageId, Outcome
from kmq_spark.errors import WireError
from kmq_spark.wire.codec import decode_marker
from kmq_spark.wire.headers import DELIVERY_COUNT, ORIGIN, PREVIOUS, by_name

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from confluent_kafka import Message

    from kmq_spark.core.markers import Marker, OffsetRange

Result = TypeVar("Result")

READ_TIMEOUT_S = 15.0
RETRY_PAUSE_S = 0.2
DIGITS = 19


class Record(NamedTuple):
    """A message, a dead letter or a result, as the broker gave it."""

    place: MessageId
    at_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()

    def header(self, name: str) -> bytes | None:
        """Return the last header of a name."""
        return by_name(self.headers).get(name)

    def number(self, name: str) -> int | None:
        """Return the number that a header says, at least 0; None where it says none."""
        value = self.header(name)
        return int(value) if value is not None and len(value) <= DIGITS and value.isdigit() else None

    @property
    def origin(self) -> MessageId:
        """The first copy of this message; itself where it is that."""
        return MessageId.parse(self.header(ORIGIN)) or self.place

    @property
    def previous(self) -> MessageId | None:
        """The copy that this one follows; None for a first copy."""
        return MessageId.parse(self.header(PREVIOUS))

    @property
    def is_redriven(self) -> bool:
        """Whether a dead letter came back as this message: it has an origin, and follows no copy."""
        return self.previous is None and self.header(ORIGIN) is not None

    @property
    def delivery_count(self) -> int:
        """Deliveries before this copy."""
        return self.number(DELIVERY_COUNT) or 0

    @property
    def id(self) -> str:
        """The sender's name for the message: what stands before the bar in its value."""
        return (self.value or b"").partition(b"|")[0].decode("utf-8", "replace")


@dataclass(slots=True)
class Dump:
    """The topics of a queue; the marker of an unreadable record is None."""

    queue: str = ""
    markers: dict[int, list[LoggedMarker]] = field(default_factory=dict)
    messages: list[Record] = field(default_factory=list)
    dead_letters: list[Record] = field(default_factory=list)
    results: list[Record] = field(default_factory=list)
    removed: set[MessageId] = field(default_factory=set)
    """Messages that were read before their records were removed from the queue topic."""
    injected: set[tuple[int, int]] = field(default_factory=set)
    """Markers that the injector wrote: markers partition, marker offset."""


def results_of(queue: str) -> str:
    """Return the name of the topic that takes the results of a queue's consumers."""
    return f"{queue}.results"


def read_dump(queue: str, bootstrap_servers: str) -> Dump:
    """Read the topics of a queue from beginning to end."""
    markers: defaultdict[int, list[LoggedMarker]] = defaultdict(list)
    for message in read_topic(f"{queue}.markers", bootstrap_servers):
        logged = LoggedMarker(message.offset() or 0, message.timestamp()[1], _marker_of(message.value()))
        markers[message.partition() or 0].append(logged)
    messages, letters, results = (
        list(map(record_of, read_topic(topic, bootstrap_servers, may_be_missing=topic == results_of(queue))))
        for topic in (queue, f"{queue}.dlq", results_of(queue))
    )
    return Dump(queue, dict(sorted(markers.items())), messages, letters, results)


def _marker_of(value: bytes | None) -> Marker | None:
    try:
        return decode_marker(value)
    except WireError:
        return None


def record_of(message: Message) -> Record:
    """Return what a client gave us."""
    headers = cast("list[tuple[str, bytes | None]]", message.headers() or [])
    place = MessageId(message.partition() or 0, message.offset() or 0)
    return Record(place, message.timestamp()[1], message.key(), message.value(), tuple(headers))


def read_topic(topic: str, bootstrap_servers: str, *, may_be_missing: bool = False) -> Iterator[Message]:
    """
    Read every committed record of a topic, up to where it ends now.

    A commit returns to its client before the partitions have its control record. Up to then a reader of committed
    records does not see that transaction, so this one waits for the end that a reader of all records sees.
    """
    config: dict[str, str | int | float | bool] = {
        "bootstrap.servers": bootstrap_servers, "group.id": f"{topic}.checker", "enable.auto.commit": False,
        "enable.partition.eof": True, "auto.offset.reset": "earliest", "check.crcs": True, "log_level": 3,
    }  # fmt: skip
    consumer = Consumer({**config, "isolation.level": "read_committed"})
    try:
        partitions = patiently(partial(_partitions, consumer, topic, may_be_missing=may_be_missing))
        ends = patiently(partial(_ends, topic, partitions, {**config, "isolation.level": "read_uncommitted"}))
        consumer.assign([TopicPartition(topic, partition, 0) for partition in ends])
        unread, held_up = set(ends), set[int]()
        while unread:
            # `consume` waits until it has all that it was asked for: ask for one, then for what is there.
            messages = consumer.consume(1, READ_TIMEOUT_S)
            if not messages and unread <= held_up:
                return  # what follows belongs to a transaction that a killed process left open
            if not messages:
                raise TimeoutError(f"cannot read {topic} to its end: got nothing for {READ_TIMEOUT_S:g} s")
            for each in messages + consumer.consume(1_000, 0):
                error = each.error()
                if error is None:
                    # Where more is always written, the client never sees the end.
                    if (each.offset() or 0) + 1 >= ends[each.partition() or 0]:
                        unread.discard(each.partition() or 0)
                    yield each
                elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001  # librdkafka's public name for it
                    held_up.add(each.partition() or 0)
                    if (each.offset() or 0) >= ends[each.partition() or 0]:
                        unread.discard(each.partition() or 0)
                # Other errors pass by themselves, or the time-out above names them.
    finally:
        consumer.close()


def patiently(call: Callable[[], Result]) -> Result:
    """Try a call again for a while: a broker that has just begun answers that it leads no partition yet."""
    give_up_s = time.monotonic() + READ_TIMEOUT_S
    while True:
        try:
            return call()
        except KafkaException:
            if time.monotonic() > give_up_s:
                raise
            time.sleep(RETRY_PAUSE_S)


def _partitions(consumer: Consumer, topic: str, *, may_be_missing: bool) -> list[int]:
    metadata = consumer.list_topics(topic, READ_TIMEOUT_S).topics[topic]
    if metadata.error is None:
        return list(metadata.partitions)
    if may_be_missing and metadata.error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
        return []
    raise KafkaException(metadata.error)


def _ends(topic: str, partitions: Iterable[int], config: dict[str, str | int | float | bool]) -> dict[int, int]:
    """Return the end offset of each partition, open transactions included."""
    consumer = Consumer(config)
    try:
        places = [TopicPartition(topic, partition) for partition in partitions]
        return {each.partition: consumer.get_watermark_offsets(each, READ_TIMEOUT_S)[1] for each in places}
    finally:
        consumer.close()


def without(dump: Dump, markers: Collection[tuple[int, int]]) -> None:
    """
    Take hostile markers out of a dump, and what the tracker answers them: the verdict is as though they were not there.

    A tracker ends what a hostile START names and what lies past the end of the queue topic as expired.
    """
    ends: defaultdict[int, int] = defaultdict(int)
    for record in dump.messages:
        ends[record.place.queue_partition] = max(ends[record.place.queue_partition], record.place.message_offset + 1)
    for partition, log in dump.markers.items() if markers else ():
        started: list[tuple[int, OffsetRange]] = []
        kept: list[LoggedMarker] = []
        for logged in log:
            marker, is_out = logged.marker, (partition, logged.marker_offset) in markers
            if is_out and marker is not None and marker.type is MarkerType.START:
                started += [(marker.queue_partition, each) for each in marker.ranges]
            elif marker is not None and marker.type is MarkerType.END and marker.outcome is Outcome.EXPIRED:
                is_out = is_out or _is_of(marker, started, ends[marker.queue_partition])
            kept.append(logged._replace(marker=None) if is_out else logged)
        dump.markers[partition] = kept


def _is_of(marker: Marker, started: Iterable[tuple[int, OffsetRange]], end: int) -> bool:
    """Return whether all messages of a marker lie past the topic's end, and in a range that was started."""
    ranges = [each for queue_partition, each in started if queue_partition == marker.queue_partition]
    return all(
        first >= end and any(begin <= first and first + count <= begin + many for begin, many in ranges)
        for first, count in marker.ranges
    )
