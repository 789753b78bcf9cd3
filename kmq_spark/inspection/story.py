"""
The story of one message, from the topics: its copies, what consumers did with each, and how it ended.

Rule 1: Copies are linked by headers: a redelivery and a dead letter have `kmq-previous`, a redriven message has its
origin. What retention removed is reported as missing and never guessed.
Rule 2: Only records that can matter are read: markers from the message's append time on, and later copies around the
END of their transaction.
"""

from __future__ import annotations

from itertools import count
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, cast

from kmq_spark.core.markers import MarkerType, MessageId, Outcome
from kmq_spark.errors import WireError
from kmq_spark.inspection.spans import span
from kmq_spark.kafka.payloads import PayloadReader
from kmq_spark.wire.codec import decode_marker
from kmq_spark.wire.headers import DLQ_MESSAGE, ORIGIN, PREVIOUS, place_of, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from confluent_kafka import Message

    from kmq_spark.core.markers import Marker
    from kmq_spark.inspection.inspector import QueueInspector
    from kmq_spark.wire.headers import Headers

MAX_COPIES = 10_000
"""More deliveries than the limit of any queue. Without a limit, the story ends here."""

TOGETHER_MS = 1_000
"""Maximum difference between the append times of records of one transaction that are shown in the given order."""

LONGEST_TRANSACTION_MS = 120_000
"""Maximum difference between the append times of a copy and of the END in the same transaction."""

_RENEWED = "renewed"


class Event(NamedTuple):
    """One line of the story: when (epoch ms, broker clock), where in the log, what happened, and the consumer id."""

    at_ms: int
    place: str
    what: str
    by: str = ""


class Content(NamedTuple):
    """Key, value and headers of a record."""

    key: bytes | None
    value: bytes | None
    headers: Headers


class PlacedMarker(NamedTuple):
    """A marker that covers the message, with its position."""

    partition: int
    offset: int
    at_ms: int
    marker: Marker


class StoryReader:
    """Reads the stories of messages of one queue; a read fails if no record arrives for *timeout* seconds."""

    def __init__(self, inspector: QueueInspector, timeout: float, on_progress: Callable[[int], None]) -> None:
        self._inspector = inspector
        self._topics = inspector.topics
        self._timeout = timeout
        self._on_progress = on_progress
        self._read = count(1)

    def sent_with(self, key: bytes) -> list[MessageId]:
        """Return the first copies of the messages with a key, oldest first. The whole queue topic is read."""
        (queue,) = self._inspector.cluster.topics([self._topics.queue_topic]).values()
        found: list[tuple[int, MessageId]] = []
        for record in self._inspector.records(queue.name, queue.first):
            self._report_progress()
            if record.key() == key and place_of(_headers(record), ORIGIN) is None:
                found.append((record.timestamp()[1], _place_of(record)))
        return [place for _, place in sorted(found)]

    def read(self, message: MessageId) -> tuple[Content | None, list[Event]]:
        """
        Return the content of a copy of a message, and the events from the first copy on, in order of time.

        The content is None if retention removed the copy or it never existed. There are no events if nothing is known.
        """
        partitions = self._inspector.queue_partitions()
        if message.queue_partition not in partitions:
            return None, []
        asked = self._record(message)
        first_id = (asked and place_of(_headers(asked), ORIGIN)) or message
        current = asked if first_id == message else self._record(first_id) or asked
        if current is None:
            return None, list(marker_events(self._topics.markers_topic, self._markers(message, 0)))
        events: list[Event] = []
        if asked is current and first_id != message:
            where = f"{self._topics.queue_topic}[{first_id[0]}]@{first_id[1]}"
            events.append(Event(0, where, "first copy no longer exists"))
        for number in range(MAX_COPIES):
            at_ms, place = current.timestamp()[1], _place_of(current)
            events.append(Event(at_ms, _place(current), copy_event(_headers(current), number)))
            markers = self._markers(place, at_ms)
            events += marker_events(self._topics.markers_topic, markers)
            following = self._next(place, last_outcome(markers), events)
            if following is None:
                break
            current = following
        return None if asked is None else _content(asked), sort_events(events)

    def _next(self, place: MessageId, ended: PlacedMarker | None, events: list[Event]) -> Message | None:
        """Return the next copy of the message. Add the events of a dead letter and of its redrive."""
        outcome = None if ended is None else ended.marker.outcome
        if ended is None or outcome not in {Outcome.REDELIVERED, Outcome.DEAD_LETTERED}:
            return None
        if outcome is Outcome.REDELIVERED:
            return self._find(self._topics.queue_topic, [place.queue_partition], ended.at_ms, PREVIOUS, place)
        (letters,) = self._inspector.cluster.topics([self._topics.dead_letter_topic]).values()
        letter = self._find(letters.name, letters.end, ended.at_ms, PREVIOUS, place)
        if letter is None:
            return None
        reason = text_of(_headers(letter), DLQ_MESSAGE)
        events.append(Event(letter.timestamp()[1], _place(letter), f"dead letter: {reason}"))
        return self._redriven(letter, place, events)

    def _redriven(self, letter: Message, place: MessageId, events: list[Event]) -> Message | None:
        topic = self._topics.redrive_topic
        if not self._inspector.cluster.metadata(topic).topics[topic].partitions:
            return None
        ended = last_outcome(self._markers_in(topic, _place_of(letter), letter.timestamp()[1]))
        if ended is None:
            return None
        is_redriven = ended.marker.outcome is Outcome.ACKED
        what, where = "redriven" if is_redriven else "purged", f"{topic}[{ended.partition}]@{ended.offset}"
        events.append(Event(ended.at_ms, where, what, ended.marker.consumer_id))
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
        return sorted(found, key=lambda each: (each.at_ms, each.offset))

    def _find(self, topic: str, partitions: Iterable[int], at_ms: int, header: str, place: MessageId) -> Message | None:
        """Return the first record around an instant whose header contains a given message position."""
        starts = self._inspector.cluster.offsets_at(topic, partitions, max(0, at_ms - LONGEST_TRANSACTION_MS))
        for partition, start in starts.items():
            for record in self._inspector.records(topic, {partition: start}):
                self._report_progress()
                if record.timestamp()[1] > at_ms + LONGEST_TRANSACTION_MS:
                    break
                headers = _headers(record)
                is_later = topic != self._topics.queue_topic or record.offset() != place.message_offset
                # A redriven copy has only its origin: its append time must be near that of the END of its dead letter,
                # which is in the same transaction.
                is_wanted = header == PREVIOUS or (
                    not text_of(headers, PREVIOUS) and abs(record.timestamp()[1] - at_ms) < LONGEST_TRANSACTION_MS
                )
                if is_later and is_wanted and place_of(headers, header) == place:
                    return record
        return None

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


def covers(marker: Marker, message: MessageId) -> bool:
    """Return whether a marker covers a message."""
    return marker.queue_partition == message.queue_partition and any(
        first <= message.message_offset < first + count for first, count in marker.ranges
    )


def copy_event(headers: Headers, number: int) -> str:
    """Return what a copy in the queue topic is; its number begins at 0."""
    name = "sent"
    if place_of(headers, ORIGIN) is not None:
        name = "redriven" if place_of(headers, PREVIOUS) is None else "sent again"
    return f"{name}, copy {number + 1}" if number else name


def marker_events(topic: str, markers: Iterable[PlacedMarker]) -> Iterator[Event]:
    """Yield the markers of one copy, from consumers and the tracker, as events."""
    for partition, offset, at_ms, marker in markers:
        after, reason = span(marker.redeliver_after_ms), f": {marker.reason}" if marker.reason else ""
        details = {
            "started": f", delivery {marker.delivery_count}, lease {after}",
            "deferred": f", for {span(max(marker.redeliver_after_ms, marker.due_at_ms - at_ms))}",
            "failed": f"{reason}, redelivered after {after} plus the backoff",
            "released": f", redelivered after {after}",
            _RENEWED: f", lease {after}",
        }
        what = marker.event + details.get(marker.event, reason)
        yield Event(at_ms, f"{topic}[{partition}]@{offset}", what, marker.consumer_id)


def is_ready(events: Sequence[Event], queue_topic: str) -> bool:
    """Return whether no marker follows the last copy: no consumer has started it."""
    return bool(events) and events[-1].place.startswith(f"{queue_topic}[")


def last_outcome(markers: Sequence[PlacedMarker]) -> PlacedMarker | None:
    """Return the marker that ended the copy's last lease; None if the copy is in flight or was never started."""
    ended = None
    for each in markers:
        if each.marker.type is MarkerType.END:
            ended = each if ended is None or each.marker.outcome is not Outcome.ACKED else ended
        elif each.marker.type is MarkerType.START:
            ended = None
    return ended


def sort_events(events: Sequence[Event]) -> list[Event]:
    """
    Return events by time. Events of the same transaction keep their order.

    A copy and the END in the same transaction are appended by the leaders of two partitions, milliseconds apart, in
    either order.
    """
    keys: list[int] = []
    for event in events:
        is_together = bool(keys) and 0 <= keys[-1] - event.at_ms < TOGETHER_MS
        keys.append(keys[-1] if is_together else event.at_ms)
    return [event for _, event in sorted(zip(keys, events, strict=True), key=itemgetter(0))]


def merge_renewals(events: Sequence[Event]) -> list[Event]:
    """Return the events, with consecutive renewals of one lease as one line: long work has hundreds of renewals."""
    found: list[Event] = []
    repeats = 0
    for event in events:
        before = found[-1] if found else None
        is_renewal = event.what.startswith(_RENEWED)
        if is_renewal and before is not None and before.what.startswith(_RENEWED) and before.by == event.by:
            repeats += 1
            found[-1] = before._replace(what=f"{event.what}, {repeats} times in {span(event.at_ms - before.at_ms)}")
            continue
        repeats = 1
        found.append(event)
    return found


def _place_of(record: Message) -> MessageId:
    return MessageId(record.partition() or 0, record.offset() or 0)


def _place(record: Message) -> str:
    return f"{record.topic()}[{record.partition()}]@{record.offset()}"


def _content(record: Message) -> Content:
    return Content(record.key(), record.value(), _headers(record))


def _headers(record: Message) -> Headers:
    return cast("Headers", record.headers() or [])
