"""
Build markers with offset and append time, `start(message_offset=7, at_ms=1_000)`, and columns of decisions.

Rule 1: every argument has a small, round default; a test only names the arguments that it is about.
Rule 2: a test may set marker offsets; `log` assigns the others in the order of its arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kmq_spark.core.decisions import DECISION_DTYPES, Decision, Decisions
from kmq_spark.core.events import LoggedMarker
from kmq_spark.core.markers import Marker, MarkerType, OffsetRange, Outcome, Release
from kmq_spark.core.state import PartitionState
from kmq_spark.wire.codec import encode_marker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kmq_spark.core.policy import QueueRules

UNPLACED = -1
"""Marker offset of a marker to which `log` has not yet assigned one."""


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
        lease_ms: Lease from the append time on, milliseconds.
        count: Number of consecutive messages covered.
        delivery_count: Number of deliveries of each message, including this one.
        never_handed_out: Whether it is a deferral: no consumer holds the messages, and the delivery does not count.
        due_at_ms: For a deferral: the deadline is not before this instant, epoch milliseconds.
        queue_partition: Queue partition of all messages.
        ranges: Pairs of first message offset and count, in place of *message_offset* and *count*.
        marker_offset: Offset of the marker in the log.
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
    Return a KEEPALIVE; it ends the delivery unless *release* is RENEWED.

    Args:
        message_offset: First message covered.
        at_ms: Append time, epoch milliseconds.
        lease_ms: Lease from the append time on, milliseconds.
        count: Number of consecutive messages covered.
        never_handed_out: Whether the delivery does not count.
        release: Whether it renews the lease or ends the delivery.
        reason: Exception text of a failed delivery.
        queue_partition: Queue partition of all messages.
        ranges: Pairs of first message offset and count, in place of *message_offset* and *count*.
        marker_offset: Offset of the marker in the log.
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
    term: int = 0,
    marker_offset: int = UNPLACED,
) -> LoggedMarker:
    """
    Return an END.

    Args:
        message_offset: First message covered.
        at_ms: Append time, epoch milliseconds.
        outcome: How the messages ended.
        reason: Reason of a rejection.
        count: Number of consecutive messages covered.
        queue_partition: Queue partition of all messages.
        ranges: Pairs of first message offset and count, in place of *message_offset* and *count*.
        term: Term of the tracker that wrote it; 0 for a consumer.
        marker_offset: Offset of the marker in the log.
    """
    covered = _covered(message_offset, count, ranges)
    marker = Marker(MarkerType.END, queue_partition, covered, outcome=outcome, reason=reason, term=term)
    return LoggedMarker(marker_offset, at_ms, marker)


def tick(at_ms: int = 10_000, *, term: int = 1, marker_offset: int = UNPLACED) -> LoggedMarker:
    """Return a TICK of a term."""
    return LoggedMarker(marker_offset, at_ms, Marker(MarkerType.TICK, term=term))


def begin_term(
    at_ms: int = 1_000, *, term: int = 2, tracker_id: str = "tracker", marker_offset: int = UNPLACED
) -> LoggedMarker:
    """Return a TERM."""
    return LoggedMarker(marker_offset, at_ms, Marker(MarkerType.TERM, consumer_id=tracker_id, term=term))


def rules(queue_rules: QueueRules, at_ms: int = 1_000, *, marker_offset: int = UNPLACED) -> LoggedMarker:
    """Return a RULES marker: the queue's rules from its offset on."""
    return LoggedMarker(marker_offset, at_ms, Marker(MarkerType.RULES, rules=queue_rules))


def unreadable(at_ms: int = 1_000, *, marker_offset: int = UNPLACED) -> LoggedMarker:
    """Return a record that cannot be read as a marker."""
    return LoggedMarker(marker_offset, at_ms, None)


def begun(rules: QueueRules | None = None) -> PartitionState:
    """Return a state without messages, in the term that `tick` names."""
    state = PartitionState.empty(rules)
    state.term = 1
    return state


def log(*markers: LoggedMarker, first: int = 0) -> list[LoggedMarker]:
    """
    Assign consecutive marker offsets to markers.

    Args:
        markers: A marker that already has a marker offset keeps it; the following markers continue from there.
        first: Marker offset of the first marker.
    """
    placed = []
    for logged in markers:
        marker_offset = first if logged.marker_offset == UNPLACED else logged.marker_offset
        placed.append(logged._replace(marker_offset=marker_offset))
        first = marker_offset + 1
    return placed


def marker_record(logged: LoggedMarker) -> bytes:
    """Return the record value of a marker; for an unreadable record, bytes that cannot be decoded."""
    return b"\xff\xff\xff" if logged.marker is None else encode_marker(logged.marker)


def _covered(message_offset: int, count: int, ranges: Sequence[tuple[int, int]]) -> tuple[OffsetRange, ...]:
    return tuple(OffsetRange(*pair) for pair in ranges or ((message_offset, count),))


def decisions_of(decisions: Sequence[Decision], message_counts: Sequence[int] = ()) -> Decisions:
    """
    Return decisions as columns.

    Args:
        decisions: The decision on the first message of each run.
        message_counts: Number of messages in each run; if empty, each run has one.
    """
    names = [name for name in DECISION_DTYPES if name != "message_count"]
    columns = {name: [getattr(each, name) for each in decisions] for name in names}
    columns["message_count"] = list(message_counts) or [1] * len(decisions)
    return Decisions.from_columns(columns, [each.reason for each in decisions])
