"""Large loads written as the clients would write them, by range markers: a million messages in seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from confluent_kafka import Producer

from kmq_spark.core.markers import Marker, MarkerType, OffsetRange
from kmq_spark.kafka.settings import marker_producer_config, producer_config
from kmq_spark.wire.codec import encode_marker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from faults.stage import Stage


MESSAGES_PER_MARKER = 200
"""What a consumer's `receive` typically covers."""


def finished_messages(stage: Stage, count: int) -> None:
    """Write *count* messages with a START of the shortest lease and an END each."""
    markers = _marker_producer(stage)
    for queue_partition, part in _sent(stage, count):
        _write(stage, markers, Marker(MarkerType.START, queue_partition, (part,), redeliver_after_ms=1))
        _write(stage, markers, Marker(MarkerType.END, queue_partition, (part,)))
    markers.flush()


def messages_in_flight(stage: Stage, count: int, lease_ms: int) -> None:
    """Write *count* messages with a START each."""
    markers = _marker_producer(stage)
    for queue_partition, part in _sent(stage, count):
        _write(stage, markers, Marker(MarkerType.START, queue_partition, (part,), redeliver_after_ms=lease_ms))
    markers.flush()


def write_record(
    stage: Stage, value: bytes | None, partition: int, *, times: int = 1, is_hostile: bool = False
) -> None:
    """Write any bytes to a markers partition, as a foreign or broken client would."""
    producer = _marker_producer(stage)
    for _ in range(times):
        producer.produce(
            stage.layout.topics.markers_topic, value, partition=partition, on_delivery=_noted(stage, is_hostile)
        )
        producer.poll(0)
    producer.flush()


def write_marker(stage: Stage, marker: Marker, partition: int | None = None, *, is_hostile: bool = False) -> None:
    """
    Write a marker.

    Args:
        stage: Queue.
        marker: Marker.
        partition: Where to; that of its messages by default.
        is_hostile: Whether the verdict must be as though it had not been written.
    """
    place = marker.queue_partition if partition is None else partition
    write_record(stage, encode_marker(marker), place, is_hostile=is_hostile)


def _noted(stage: Stage, is_hostile: bool) -> Callable[[object, object], None]:  # noqa: FBT001  # one question
    """Return a delivery callback that notes that the injector wrote the marker, and no consumer."""
    notes = stage.hostile_markers if is_hostile else stage.injected_markers

    def note(_error: object, record: object) -> None:
        notes.add((record.partition(), record.offset()))  # type: ignore[attr-defined]  # the client's Message

    return note


def _sent(stage: Stage, count: int) -> Iterator[tuple[int, OffsetRange]]:
    """Send empty messages, evenly, and return the ranges that they took."""
    producer = Producer(producer_config(stage.bootstrap_servers))
    partitions = stage.layout.partition_count
    first: dict[int, int] = {}
    last: dict[int, int] = {}

    def on_delivery(error: object, record: object) -> None:
        del error
        partition, offset = record.partition(), record.offset()  # type: ignore[attr-defined]  # the client's Message
        first[partition] = min(offset, first.get(partition, offset))
        last[partition] = max(offset, last.get(partition, offset))

    for number in range(count):
        while True:
            try:
                producer.produce(
                    stage.layout.topics.queue_topic, b"", partition=number % partitions, on_delivery=on_delivery
                )
                break
            except BufferError:
                producer.poll(0.05)
        if number % 1_000 == 0:
            producer.poll(0)
    producer.flush()
    for partition, begin in sorted(first.items()):
        for at in range(begin, last[partition] + 1, MESSAGES_PER_MARKER):
            yield partition, OffsetRange(at, min(MESSAGES_PER_MARKER, last[partition] + 1 - at))


def _marker_producer(stage: Stage) -> Producer:
    return Producer(marker_producer_config(stage.bootstrap_servers))


def _write(stage: Stage, producer: Producer, marker: Marker) -> None:
    producer.produce(
        stage.layout.topics.markers_topic,
        encode_marker(marker),
        partition=marker.queue_partition,
        on_delivery=_noted(stage, is_hostile=False),
    )
    producer.poll(0)
