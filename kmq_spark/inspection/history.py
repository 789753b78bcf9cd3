"""
The history of one message, from the topics: its copies, what consumers did with each, and how it ended.

Rule 1: Copies are linked by headers: a redelivery and a dead letter have `kmq-previous`, a redriven message has its
origin.
Rule 2: What retention removed is reported as missing and never guessed.
Rule 3: An event has the name that it has in the ledger's view `message_story`; details follow the name.

Source: the usual question about a queue during an incident: "what happened to this message?"
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from kmq_spark.core.markers import MarkerType, MessageId, Outcome
from kmq_spark.inspection.spans import span
from kmq_spark.wire.headers import ORIGIN, PREVIOUS, place_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kmq_spark.core.markers import Marker
    from kmq_spark.wire.headers import Headers

RENEWED = "renewed"

TOGETHER_MS = 1_000
"""Maximum difference between the append times of records of one transaction that are shown in the given order."""

LONGEST_TRANSACTION_MS = 120_000
"""Maximum difference between the append times of a copy and of the END in the same transaction."""


class Event(NamedTuple):
    """
    One line of the history: when (epoch milliseconds, broker clock), where in the log, what happened, and the consumer
    id.
    """

    at_ms: int
    place: str
    what: str
    by: str = ""


class Content(NamedTuple):
    """Key, value and headers of a record."""

    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]


class PlacedMarker(NamedTuple):
    """A marker that covers the message, with its position."""

    marker_partition: int
    marker_offset: int
    at_ms: int
    marker: Marker


def covers(marker: Marker, message: MessageId) -> bool:
    """Return whether a marker covers a message."""
    return marker.queue_partition == message.queue_partition and any(
        first <= message.message_offset < first + count for first, count in marker.ranges
    )


def copy_event(at_ms: int, place: str, headers: Headers, number: int) -> Event:
    """Return the event of a copy in the queue topic; its number begins at 0."""
    name = "sent"
    if place_of(headers, ORIGIN) is not None:
        name = "redriven" if place_of(headers, PREVIOUS) is None else "sent again"
    return Event(at_ms, place, f"{name}, copy {number + 1}" if number else name)


def events_of(markers_topic: str, markers: Iterable[PlacedMarker]) -> Iterator[Event]:
    """
    Yield the markers of one copy, from consumers and the tracker, as events.

    Args:
        markers_topic: Name of the topic, for the positions.
        markers: Markers that cover the copy, in log order.
    """
    for partition, offset, at_ms, marker in markers:
        place = f"{markers_topic}[{partition}]@{offset}"
        yield Event(at_ms, place, _what(marker, at_ms), marker.consumer_id)


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
        is_renewal = event.what.startswith(RENEWED)
        if is_renewal and before is not None and before.what.startswith(RENEWED) and before.by == event.by:
            repeats += 1
            found[-1] = before._replace(what=f"{event.what}, {repeats} times in {span(event.at_ms - before.at_ms)}")
            continue
        repeats = 1
        found.append(event)
    return found


def last_outcome(markers: Sequence[PlacedMarker]) -> PlacedMarker | None:
    """Return the marker that ended the copy's last lease; None if the copy is in flight or was never started."""
    ended = None
    for each in markers:
        if each.marker.type is MarkerType.END:
            ended = each if ended is None or each.marker.outcome is not Outcome.ACKED else ended
        elif each.marker.type is MarkerType.START:
            ended = None
    return ended


def _what(marker: Marker, at_ms: int) -> str:
    name, after = marker.event, span(marker.redeliver_after_ms)
    reason = f": {marker.reason}" if marker.reason else ""
    details = {
        "started": f", delivery {marker.delivery_count}, lease {after}",
        "deferred": f", for {span(max(marker.redeliver_after_ms, marker.due_at_ms - at_ms))}",
        "failed": f"{reason}, redelivered after {after} plus the backoff",
        "released": f", redelivered after {after}",
        RENEWED: f", lease {after}",
    }
    return name + details.get(name, reason)
