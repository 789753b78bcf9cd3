"""
What the topics of a queue hold, as values: the checker's evidence.

Rule 1: `read_committed`: what a transaction gave up is not there.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from faults.evidence import RawRecord
from kmq_spark.core.events import LoggedMarker
from kmq_spark.core.markers import MessageId
from kmq_spark.errors import WireError
from kmq_spark.kafka.settings import reader_config
from kmq_spark.kafka.topic_reader import read_to_end
from kmq_spark.kafka.topics import check_queue
from kmq_spark.wire.codec import decode_marker
from kmq_spark.wire.headers import ORIGIN, PREVIOUS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

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


def read_dump(queue: str, bootstrap_servers: str, keep: Callable[[RawRecord], None] | None = None) -> Dump:
    """
    Read the topics of a queue from beginning to end.

    Args:
        queue: Queue.
        bootstrap_servers: Broker.
        keep: Is given every record as it is read.
    """
    layout = check_queue(queue, bootstrap_servers=bootstrap_servers)
    topics = layout.topics
    config = reader_config(bootstrap_servers, f"{topics.consumer_group}.checker")

    def records(topic: str, partition_count: int) -> Iterator[RawRecord]:
        for message in read_to_end(config, topic, partition_count):
            record = RawRecord.of(message)
            if keep is not None:
                keep(record)
            yield record

    return dump_of(
        records(topics.markers_topic, layout.partition_count),
        records(topics.queue_topic, layout.partition_count),
        records(topics.dead_letter_topic, layout.dead_letter_partition_count),
    )


def dump_of(markers: Iterable[RawRecord], messages: Iterable[RawRecord], dead_letters: Iterable[RawRecord]) -> Dump:
    """Return what the records of the three topics say."""
    dump = Dump()
    by_partition: defaultdict[int, list[LoggedMarker]] = defaultdict(list)
    for raw in markers:
        by_partition[raw.partition].append(LoggedMarker(raw.offset, raw.timestamp_ms, _decoded(raw.value)))
    dump.markers = dict(by_partition)
    dump.messages = list(map(_record, messages))
    for record in map(_record, dead_letters):
        if record.previous is None:
            dump.set_aside += 1
        else:
            dump.dead_letters.append(record)
    return dump


def without(dump: Dump, markers: Collection[tuple[int, int]]) -> None:
    """Take some markers out, by partition and offset: an offset and an append time is left, and says nothing."""
    for partition, log in dump.markers.items():
        hostile = {offset for place, offset in markers if place == partition}
        dump.markers[partition] = [
            logged._replace(marker=None) if logged.marker_offset in hostile else logged for logged in log
        ]


def _decoded(value: bytes | None) -> Marker | None:
    try:
        return decode_marker(value)
    except WireError:
        return None


def _record(raw: RawRecord) -> Record:
    return Record(MessageId(raw.partition, raw.offset), raw.timestamp_ms, raw.key, raw.value, raw.headers)
