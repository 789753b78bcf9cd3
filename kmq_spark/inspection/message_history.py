"""
Find one message in all topics of its queue, and build its history.

Rule 1: Only records that can matter are read: markers from the message's append time on, and later copies around the
END of their transaction.
Rule 2: A history has at most `MAX_COPIES` copies.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any, cast

from kmq_spark.core.markers import MarkerType, MessageId, Outcome
from kmq_spark.errors import WireError
from kmq_spark.inspection.history import (
    LONGEST_TRANSACTION_MS,
    Content,
    Event,
    PlacedMarker,
    copy_event,
    covers,
    events_of,
    last_outcome,
    sort_events,
)
from kmq_spark.kafka.payloads import PayloadReader
from kmq_spark.wire.codec import decode_marker
from kmq_spark.wire.headers import DLQ_MESSAGE, ORIGIN, PREVIOUS, place_of, text_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from confluent_kafka import Message

    from kmq_spark.inspection.inspector import QueueInspector
    from kmq_spark.wire.headers import Headers

MAX_COPIES = 10_000
"""More deliveries than the limit of any queue. Without a limit, the history ends here."""


class MessageHistory:
    """
    Builds the histories of messages of one queue.

    Args:
        inspector: Inspector of the queue.
        timeout: A read fails if no record arrives for this time.
        on_progress: Progress callback; called from time to time with the number of records read so far.
    """

    def __init__(self, inspector: QueueInspector, timeout: float, on_progress: Callable[[int], None]) -> None:
        """Keep the arguments; read nothing yet."""
        self._inspector = inspector
        self._topics = inspector.topics
        self._timeout = timeout
        self._on_progress = on_progress
        self._read = count(1)

    def read(self, message: MessageId) -> tuple[Content | None, list[Event]]:
        """
        Return the history of a message from its first copy on, for the position of any of its copies.

        Args:
            message: Position of any copy in the queue topic.

        Returns:
            The content of the requested copy, and the events in order of time. The content is None if retention removed
            the copy or it never existed. There are no events if nothing is known.

        Raises:
            TopicError: The queue does not exist.
            KafkaClientError: The broker cannot be reached, or nothing arrived in time.
        """
        partitions = self._inspector.queue_partitions()
        if message.queue_partition not in partitions:
            return None, []
        asked = self._record(message)
        first_id = (asked and place_of(_headers(asked), ORIGIN)) or message
        first = asked if first_id == message else self._record(first_id)
        if asked is None and first is None:
            markers = self._markers(message, 0)
            return None, list(events_of(self._topics.markers_topic, markers))
        began_ms = (first or asked).timestamp()[1]  # type: ignore[union-attr]  # one of them is there
        events: list[Event] = []
        current = first or asked
        place = first_id if first is not None else message
        if first is None:
            events.append(
                Event(0, f"{self._topics.queue_topic}[{first_id[0]}]@{first_id[1]}", "first copy no longer exists")
            )
        for number in range(MAX_COPIES):
            if current is None:
                break
            sent = copy_event(current.timestamp()[1], _place(current), _headers(current), number)
            events.append(sent)
            markers = self._markers(place, sent.at_ms or began_ms)
            events += events_of(self._topics.markers_topic, markers)
            current = self._next(place, last_outcome(markers), events)
            if current is not None:
                place = MessageId(current.partition() or 0, current.offset() or 0)
        return _content(asked), sort_events(events)

    def _next(self, place: MessageId, ended: PlacedMarker | None, events: list[Event]) -> Message | None:
        """Return the next copy of the message. Add the events of a dead letter and of its redrive."""
        if ended is None or ended.marker.outcome not in {Outcome.REDELIVERED, Outcome.DEAD_LETTERED}:
            return None
        if ended.marker.outcome is Outcome.REDELIVERED:
            return self._find(self._topics.queue_topic, [place.queue_partition], ended.at_ms, PREVIOUS, place)
        (letters,) = self._inspector.cluster.topics([self._topics.dead_letter_topic]).values()
        letter = self._find(letters.name, letters.end, ended.at_ms, PREVIOUS, place)
        if letter is None:
            return None
        reason = text_of(_headers(letter), DLQ_MESSAGE)
        events.append(Event(letter.timestamp()[1], _place(letter), f"dead letter: {reason}"))
        return self._redriven(letter, place, events)

    def _redriven(self, letter: Message, place: MessageId, events: list[Event]) -> Message | None:
        topic, letter_id = self._topics.redrive_topic, MessageId(letter.partition() or 0, letter.offset() or 0)
        if not self._inspector.cluster.metadata(topic).topics[topic].partitions:
            return None
        ended = last_outcome(self._markers_in(topic, letter_id, letter.timestamp()[1]))
        if ended is None:
            return None
        is_redriven = ended.marker.outcome is Outcome.ACKED
        where = f"{topic}[{ended.marker_partition}]@{ended.marker_offset}"
        events.append(Event(ended.at_ms, where, "redriven" if is_redriven else "purged", ended.marker.consumer_id))
        if not is_redriven:
            return None
        origin = place_of(_headers(letter), ORIGIN) or place
        return self._find(self._topics.queue_topic, self._inspector.queue_partitions(), ended.at_ms, ORIGIN, origin)

    def _markers(self, message: MessageId, since_ms: int) -> list[PlacedMarker]:
        return self._markers_in(self._topics.markers_topic, message, since_ms)

    def _markers_in(self, topic: str, message: MessageId, since_ms: int) -> list[PlacedMarker]:
        """Return the markers that cover a message; they may be in any partition."""
        cluster = self._inspector.cluster
        partitions = cluster.metadata(topic).topics[topic].partitions
        found = []
        for record in self._inspector.records(topic, cluster.offsets_at(topic, partitions, max(0, since_ms))):
            self._report_progress()
            try:
                marker = decode_marker(record.value())
            except WireError:
                continue
            if marker.type is not MarkerType.TICK and covers(marker, message):
                found.append(PlacedMarker(record.partition() or 0, record.offset() or 0, record.timestamp()[1], marker))
        return sorted(found, key=lambda each: (each.at_ms, each.marker_offset))

    def _find(self, topic: str, partitions: object, at_ms: int, header: str, place: MessageId) -> Message | None:
        """Return the first record around an instant whose header contains a given message position."""
        starts = self._inspector.cluster.offsets_at(topic, partitions, max(0, at_ms - LONGEST_TRANSACTION_MS))  # type: ignore[arg-type]
        for partition, start in starts.items():
            for record in self._inspector.records(topic, {partition: start}):
                self._report_progress()
                if record.timestamp()[1] > at_ms + LONGEST_TRANSACTION_MS:
                    break
                is_later = topic != self._topics.queue_topic or record.offset() != place.message_offset
                if (
                    is_later
                    and place_of(_headers(record), header) == place
                    and self._is_wanted_copy(record, header, at_ms)
                ):
                    return record
        return None

    @staticmethod
    def _is_wanted_copy(record: Message, header: str, at_ms: int) -> bool:
        """
        Return whether a record is the wanted copy. A redriven copy has only its origin: its append time must be near
        that of the END of its dead letter, which is in the same transaction.
        """
        return header == PREVIOUS or (
            not text_of(_headers(record), PREVIOUS) and abs(record.timestamp()[1] - at_ms) < LONGEST_TRANSACTION_MS
        )

    def _record(self, message: MessageId) -> Message | None:
        reader = PayloadReader(self._inspector.reader_config, self._topics.queue_topic, self._timeout)
        try:
            return next(iter(reader.read({message.queue_partition: [message.message_offset]}))).message
        finally:
            reader.close()

    def _report_progress(self) -> None:
        number = next(self._read)
        if number % 10_000 == 0:
            self._on_progress(number)


def _place(record: Message) -> str:
    return f"{record.topic()}[{record.partition()}]@{record.offset()}"


def _content(record: Message | None) -> Content | None:
    if record is None:
        return None
    return Content(*cast("tuple[Any, Any]", (record.key(), record.value())), _headers(record))


def _headers(record: Message) -> Headers:
    return cast("Headers", record.headers() or [])
