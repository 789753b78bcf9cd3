"""
What the topics of a queue hold, as values: the checker's evidence.

Rule 1: `read_committed`: what a transaction gave up is not there.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, cast

from kmq_spark.core.events import LoggedMarker
from kmq_spark.core.markers import MessageId
from kmq_spark.errors import WireError
from kmq_spark.kafka.settings import reader_config
from kmq_spark.kafka.topic_reader import read_to_end
from kmq_spark.kafka.topics import check_queue
from kmq_spark.wire.codec import decode_marker
from kmq_spark.wire.headers import ORIGIN, PREVIOUS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from confluent_kafka import Message

    from kmq_spark.core.markers import Marker


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
    def id(self) -> str:
        """The producer's name for the message: what stands before the bar in its value."""
        return (self.value or b"").partition(b"|")[0].decode("utf-8", "replace")


@dataclass(slots=True)
class Dump:
    """
    The three topics of a queue.

    Attributes:
        markers: By markers partition, in log order; None as the marker of an unreadable record.
        messages: The queue topic.
        dead_letters: The dead-letter topic, records of the markers topic that were no markers left out.
        set_aside: How many of those there are.
        removed: Messages that were read before their records were removed from the queue topic.
        injected: Markers that the injector wrote: markers partition, marker offset.
    """

    markers: dict[int, list[LoggedMarker]] = field(default_factory=dict)
    messages: list[Record] = field(default_factory=list)
    dead_letters: list[Record] = field(default_factory=list)
    set_aside: int = 0
    removed: set[MessageId] = field(default_factory=set)
    injected: set[tuple[int, int]] = field(default_factory=set)


def place_of(header: bytes | None) -> MessageId | None:
    """Return what an origin or previous header says; None where it is absent or says nothing."""
    partition, _, offset = (header or b"").partition(b":")
    return MessageId(int(partition), int(offset)) if partition.isdigit() and offset.isdigit() else None


def read_dump(queue: str, bootstrap_servers: str) -> Dump:
    """Read the topics of a queue from beginning to end."""
    layout = check_queue(queue, bootstrap_servers=bootstrap_servers)
    topics, dump = layout.topics, Dump()
    config = reader_config(bootstrap_servers, f"{topics.consumer_group}.checker")
    dump.markers = _markers(config, topics.markers_topic, layout.partition_count)
    dump.messages = list(_records(config, topics.queue_topic, layout.partition_count))
    for record in _records(config, topics.dead_letter_topic, layout.dead_letter_partition_count):
        if record.previous is None:
            dump.set_aside += 1
        else:
            dump.dead_letters.append(record)
    return dump


def _markers(config: Mapping[str, object], topic: str, partition_count: int) -> dict[int, list[LoggedMarker]]:
    found: defaultdict[int, list[LoggedMarker]] = defaultdict(list)
    for record in read_to_end(config, topic, partition_count):
        logged = LoggedMarker(record.offset() or 0, record.timestamp()[1], _decoded(record.value()))
        found[record.partition() or 0].append(logged)
    return dict(found)


def _decoded(value: bytes | None) -> Marker | None:
    try:
        return decode_marker(value)
    except WireError:
        return None


def _records(config: Mapping[str, object], topic: str, partition_count: int) -> Iterator[Record]:
    for record in read_to_end(config, topic, partition_count):
        yield _record(record)


def _record(record: Message) -> Record:
    place = MessageId(record.partition() or 0, record.offset() or 0)
    headers = cast("list[tuple[str, bytes | None]]", record.headers() or [])
    return Record(place, record.timestamp()[1], record.key(), record.value(), tuple(headers))
