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
    """Return a START."""
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
    """Return a KEEPALIVE; it ends the delivery unless *release* is RENEWED."""
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
    """Return an END."""
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
    """Assign consecutive marker offsets to markers."""
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
    """Return decisions as columns."""
    names = [name for name in DECISION_DTYPES if name != "message_count"]
    columns = {name: [getattr(each, name) for each in decisions] for name in names}
    columns["message_count"] = list(message_counts) or [1] * len(decisions)
    return Decisions.from_columns(columns, [each.reason for each in decisions])
