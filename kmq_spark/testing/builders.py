"""
Builders of markers at their place in the log: `start(message_offset=7, at_ms=1_000)`.

Rule 1: every argument has a small round default; a test names those that it is about.
Rule 2: marker offsets are the test's where it names them; else `log` gives them, in the order of writing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kmq_spark.core.events import LoggedMarker
from kmq_spark.core.markers import Marker, MarkerType, OffsetRange, Outcome, Release
from kmq_spark.wire.codec import encode_marker, tick_marker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kmq_spark.core.policy import QueueRules

UNPLACED = -1
"""Marker offset of a marker that `log` has not placed yet."""


def start(
    message_offset: int = 7,
    at_ms: int = 1_000,
    *,
    lease_ms: int = 5_000,
    count: int = 1,
    delivery_count: int = 1,
    never_handed_out: bool = False,
    due_at_ms: int = 0,
    queue_partition: int = 0,
    ranges: Sequence[tuple[int, int]] = (),
    marker_offset: int = UNPLACED,
) -> LoggedMarker:
    """
    Return a START.

    Args:
        message_offset: First message covered.
        at_ms: Append time, epoch milliseconds.
        lease_ms: Lease from then on.
        count: Messages covered, one after the other.
        delivery_count: Deliveries of each, this one included.
        never_handed_out: Whether it is a deferral: nobody holds the messages, and the delivery does not count.
        due_at_ms: Of a deferral: no deadline before this instant, epoch milliseconds.
        queue_partition: Of all of them.
        ranges: Pairs of first message offset and count, in place of *message_offset* and *count*.
        marker_offset: Place in the log.
    """
    covered = _covered(message_offset, count, ranges)
    marker = Marker(
        MarkerType.START, queue_partition, covered, lease_ms, delivery_count,
        never_handed_out=never_handed_out, due_at_ms=due_at_ms,
    )  # fmt: skip
    return LoggedMarker(marker_offset, at_ms, marker)


def keep_alive(
    message_offset: int = 7,
    at_ms: int = 2_000,
    *,
    lease_ms: int = 5_000,
    count: int = 1,
    never_handed_out: bool = False,
    release: Release = Release.RENEWED,
    reason: str = "",
    queue_partition: int = 0,
    ranges: Sequence[tuple[int, int]] = (),
    marker_offset: int = UNPLACED,
) -> LoggedMarker:
    """
    Return a KEEPALIVE; with another *release* than RENEWED it ends the delivery.

    Args:
        message_offset: First message covered.
        at_ms: Append time, epoch milliseconds.
        lease_ms: Lease from then on.
        count: Messages covered, one after the other.
        never_handed_out: Whether the delivery does not count.
        release: Whether it renews the lease or ends the delivery.
        reason: Exception of a delivery that failed.
        queue_partition: Of all of them.
        ranges: Pairs of first message offset and count, in place of *message_offset* and *count*.
        marker_offset: Place in the log.
    """
    covered = _covered(message_offset, count, ranges)
    marker = Marker(
        MarkerType.KEEPALIVE,
        queue_partition,
        covered,
        lease_ms,
        reason=reason,
        never_handed_out=never_handed_out,
        release=release,
    )
    return LoggedMarker(marker_offset, at_ms, marker)


def end(
    message_offset: int = 7,
    at_ms: int = 3_000,
    *,
    outcome: Outcome = Outcome.ACKED,
    reason: str = "",
    count: int = 1,
    queue_partition: int = 0,
    ranges: Sequence[tuple[int, int]] = (),
    marker_offset: int = UNPLACED,
) -> LoggedMarker:
    """
    Return an END.

    Args:
        message_offset: First message covered.
        at_ms: Append time, epoch milliseconds.
        outcome: How the messages ended.
        reason: Why, of a rejection.
        count: Messages covered, one after the other.
        queue_partition: Of all of them.
        ranges: Pairs of first message offset and count, in place of *message_offset* and *count*.
        marker_offset: Place in the log.
    """
    covered = _covered(message_offset, count, ranges)
    marker = Marker(MarkerType.END, queue_partition, covered, outcome=outcome, reason=reason)
    return LoggedMarker(marker_offset, at_ms, marker)


def tick(
    at_ms: int = 10_000, *, queue_ends: Sequence[int] = (), ends_as_of: int = 0, marker_offset: int = UNPLACED
) -> LoggedMarker:
    """
    Return a TICK.

    Args:
        at_ms: Append time, epoch milliseconds.
        queue_ends: End of each partition of the queue topic, -1 where it is not known; none for a TICK without them.
        ends_as_of: Marker offset of the TICK that was in the log before the ends were read.
        marker_offset: Place in the log.
    """
    return LoggedMarker(marker_offset, at_ms, tick_marker(queue_ends, ends_as_of))


def rules(queue_rules: QueueRules, at_ms: int = 1_000, *, marker_offset: int = UNPLACED) -> LoggedMarker:
    """Return the marker from which a queue's rules hold."""
    return LoggedMarker(marker_offset, at_ms, Marker(MarkerType.RULES, rules=queue_rules))


def unreadable(at_ms: int = 1_000, *, marker_offset: int = UNPLACED) -> LoggedMarker:
    """Return a record that is no marker."""
    return LoggedMarker(marker_offset, at_ms, None)


def log(*markers: LoggedMarker, first: int = 0) -> list[LoggedMarker]:
    """
    Place markers in a log, one after the other.

    Args:
        markers: A marker that names its marker offset keeps it, and the next ones follow it.
        first: Marker offset of the first.
    """
    placed = []
    for logged in markers:
        marker_offset = first if logged.marker_offset == UNPLACED else logged.marker_offset
        placed.append(logged._replace(marker_offset=marker_offset))
        first = marker_offset + 1
    return placed


def marker_record(logged: LoggedMarker) -> bytes:
    """Return the record value of a marker; of an unreadable one, bytes that no reader accepts."""
    return b"\xff\xff\xff" if logged.marker is None else encode_marker(logged.marker)


def _covered(message_offset: int, count: int, ranges: Sequence[tuple[int, int]]) -> tuple[OffsetRange, ...]:
    return tuple(OffsetRange(*pair) for pair in ranges or ((message_offset, count),))
